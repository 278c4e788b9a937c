"""Synthetic data and tiny models: what the demos train on, and what they train."""
