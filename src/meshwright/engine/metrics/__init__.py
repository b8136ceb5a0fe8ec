"""What a run tells while it runs."""
