"""Functions of vLLM that are replaced, and why."""

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any

from rollout.vllm.versions.process_settings import import_vllm


def allow_adapted_heads() -> None:
    """Lets adapters have matrices for the output projection, in all models that are started from now on.

    vLLM computes them for every model, but refuses their files unless the class of the model names the projection, which only
    some classes do.
    """
    import_vllm()
    from vllm.model_executor.models.interfaces import SupportsLoRA

    SupportsLoRA.embedding_modules = {"lm_head": "output_embeddings"} | SupportsLoRA.embedding_modules


def search_plain_objects() -> None:
    """Has vLLM pass over objects of other libraries that say that they have a ``__dict__`` and have none.

    On a CPU it searches all modules for kernels that it replaces, and a start fails at such an object of llvmlite's, which the
    image processor of Kimi K2.5 imports through numba.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        return  # this version does not search
    dispatcher.vars = _attributes


def _attributes(value: Any) -> Mapping[str, Any]:
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # of what is deprecated in torch: it only looks
        found = vars(value)
    return found if isinstance(found, Mapping) else {}


def count_whole_images() -> None:
    """Has vLLM count an image of Idefics3 or SmolVLM that is not split as one tile.

    transformers' image processor by Pillow counts none, and vLLM 0.24 then gives the vision tower nothing of the image.
    """
    import_vllm()
    from vllm.model_executor.models.idefics3 import Idefics3ProcessingInfo

    own = Idefics3ProcessingInfo.get_num_patches
    if not hasattr(own, "__wrapped__"):
        Idefics3ProcessingInfo.get_num_patches = wraps(own)(lambda info, **image: max(own(info, **image), 1))
