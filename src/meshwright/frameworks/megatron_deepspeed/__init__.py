"""Megatron-DeepSpeed: scripts whose program reads Megatron's flags and a DeepSpeed config. They are checked only."""
