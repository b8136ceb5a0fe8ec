"""Reads Megatron-LM checkpoints (torch_dist and legacy), for `convert`; nothing that their pickles name is executed."""
