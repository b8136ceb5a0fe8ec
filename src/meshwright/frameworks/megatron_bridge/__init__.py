"""Megatron-Bridge: run commands, Python overrides and saved run configs. Keys: recipes/key_maps/megatron_bridge.py."""
