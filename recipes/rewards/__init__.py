"""Reward functions: the reward of Geometry3K, reward models, and adapters for functions, files and servers of users."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
