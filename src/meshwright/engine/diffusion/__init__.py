"""Diffusion transformers (Wan, FLUX) trained by flow matching on latents and text embeddings made beforehand."""
