"""Transformers models on the meta device: config, module names, init specs, adapters, multi-token prediction."""
