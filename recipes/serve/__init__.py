"""Training driven step by step by another program."""
