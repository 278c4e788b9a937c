"""Agents that somebody else wrote: a chat endpoint for their clients, and the exact tokens of what they say as rows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
