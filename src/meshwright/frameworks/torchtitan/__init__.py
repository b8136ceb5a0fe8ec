"""torchtitan: TOML configs of the 0.2 line, and the commands of 0.2, 0.3.0 and main."""
