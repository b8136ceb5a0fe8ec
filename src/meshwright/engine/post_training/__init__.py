"""Post-training tools: generate, evaluate, convert and model cards."""
