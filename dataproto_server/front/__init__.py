"""The front process without its routes: order, futures, samples, sessions, keys. It imports no torch."""

from dataproto_server.front.service import Service

__all__ = ["Service"]
