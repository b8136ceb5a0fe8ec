"""What runs on the GPUs themselves; everything here imports torch."""
