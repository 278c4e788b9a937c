"""`DataProto`, the batch that the workers of a reinforcement-learning loop pass to each other, and functions on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
