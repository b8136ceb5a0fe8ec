"""Hugging Face Accelerate: FSDP, DeepSpeed and Megatron-LM configured by one YAML file."""
