"""The engine's own step at full size, on tensors without data: what memory it takes, what it computes and sends."""
