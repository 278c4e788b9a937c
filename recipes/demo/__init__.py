"""Synthetic data and tiny models: what the demos train on, and what they train."""

__all__: list[str] = []
