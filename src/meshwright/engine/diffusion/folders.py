"""Diffusers folders: config.json and diffusion_pytorch_model.safetensors, read and written."""
