"""Megatron-LM: launch scripts and argument lists. Its flags are mapped in recipes/key_maps/megatron_lm.py."""
