"""Everything that is specific to a family of vision-language models: tokens, positions, the forward pass, weights and costs.

>>> from dataproto.vlm import family_of
>>> family = family_of("qwen2_5_vl")  # or a Hugging Face config or model
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
