"""Drawn data, tiny models and ``dataproto make-vlm``: what the demos train on, and on what they train."""

__all__: list[str] = []
