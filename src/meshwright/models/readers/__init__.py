"""Readers of Hugging Face configs, one file for each kind of architecture."""
