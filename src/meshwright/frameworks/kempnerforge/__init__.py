"""KempnerForge: TOML configs. Its keys are mapped in recipes/key_maps/kempnerforge.py."""
