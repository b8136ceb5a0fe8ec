"""Readers of Hugging Face configs, one module per type of architecture."""
