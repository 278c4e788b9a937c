"""The front process without its routes: order, futures, samples, sessions, keys. It imports no torch."""

from recipes.serve.front.service import Service

__all__ = ["Service"]
