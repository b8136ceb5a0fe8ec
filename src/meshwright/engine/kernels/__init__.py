"""Faster ways to compute parts of transformers models, put in from outside; parameter names never change."""
