"""Faster or smaller computations of parts of transformers models, as patches; parameter names never change."""
