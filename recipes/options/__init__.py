"""The options of a configuration as a command line, a help text and a file spell them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
