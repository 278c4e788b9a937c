"""Data sets as rows, and loaders that build batches of prompts from them."""
