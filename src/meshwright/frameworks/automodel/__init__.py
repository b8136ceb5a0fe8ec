"""NeMo AutoModel: YAML configs and the commands that run them."""
