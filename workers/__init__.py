"""Role workers, and the groups that run them."""

import lazy_loader

from dataproto.extras import require_extra

require_extra("train", "workers", "transformers")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
