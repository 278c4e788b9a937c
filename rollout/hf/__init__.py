"""The Hugging Face engine."""
