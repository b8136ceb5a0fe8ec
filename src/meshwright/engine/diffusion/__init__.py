"""Diffusion transformers (Wan, FLUX) trained by flow matching on precomputed latents and text embeddings."""
