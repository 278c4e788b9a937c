"""Policy-gradient algorithms as pure functions on tensors, and the options that select them. See docs/algorithms.md."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
