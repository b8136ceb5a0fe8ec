"""The model a rank trains: a transformers class built on the meta device, and the parts of it that a stage runs."""
