"""What a training step is made of, and what it leaves on disk."""
