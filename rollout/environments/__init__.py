"""Environments that the policy acts in for several turns: what they are, playing them, and adapters of other libraries' ones."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
