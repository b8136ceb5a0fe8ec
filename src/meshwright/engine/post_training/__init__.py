"""What is done with a trained model: try it, measure it, convert it, describe it."""
