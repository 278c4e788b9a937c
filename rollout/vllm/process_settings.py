"""What an engine of vLLM sets in its process: variables, random states, threads, replaced functions, and the model runner."""

import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

from dataproto.errors import ending

DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads belong to training as well
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nvcc would build it at the first start on a machine, and the policy's replaces it
}

CHANGED_VARIABLES = ("LD_PRELOAD", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR")
"""What an engine sets for itself: other models of the process are compiled by as many threads, into folders of their own."""


def set_environment() -> None:
    """Sets the variables that vLLM reads when it is imported and when an engine starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process, next to the actor
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def import_vllm() -> Any:
    """The package, imported.

    It sets `TORCHINDUCTOR_COMPILE_THREADS` to 1, because Inductor once forked its processes. They are started afresh since torch
    2.6, so Inductor reads the variable before: all of the cores build kernels for the actor's layers. For vLLM's own see
    `one_compile_thread`.
    """
    import torch._inductor.config  # noqa: F401

    with variables_kept():
        import vllm
    return vllm


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """Restores what the start of an engine changes in the process: random states, default dtype, number of threads, and
    environment variables (`CHANGED_VARIABLES`).
    """
    threads, set_threads, dtype = torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_cuda = list(range(torch.cuda.device_count()))
    torch_states = ExitStack()
    torch_states.enter_context(torch.random.fork_rng(devices=on_cuda))

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_num_threads = set_threads  # its CPU worker replaces this function
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)

    with ending(torch_states.close, restore), variables_kept():
        yield


@contextmanager
def variables_kept(names: Sequence[str] = CHANGED_VARIABLES) -> Iterator[None]:
    """Restores these environment variables after the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def one_compile_thread() -> Iterator[None]:
    """Lets Inductor compile in this process within the block, as vLLM means it: its start hung next to a pool of processes
    (vLLM's issues 10480 and 10619).
    """
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


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
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what is deprecated in torch
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


def keep_pixels() -> None:
    """Has vLLM keep the pixels of all images of a request.

    vLLM 0.32 leaves them out for an image that it finds in its cache of prefixes. If it then puts the request off and gives the
    blocks of the image to other requests, it has to read the image again, and fails.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda media, *_, **__: media


RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""With "0" it asks for vLLM's first model runner."""
SECOND_RUNNER_SINCE = 0, 32
"""From this version on an engine runs on the second runner, as vLLM itself does from 0.29 on."""
BY_HEAD = "mtp"
"""vLLM's name of drafts by the head of a model."""


def takes_second_runner(version: str) -> bool:
    """Whether an engine of this ``version`` of vLLM runs on the second model runner (`rollout.vllm.second_runner`).

    From `SECOND_RUNNER_SINCE` on it does, where vLLM has Triton: on CUDA, or on a CPU with a backend of Triton for it.
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    late = number is not None and (int(number[1]), int(number[2])) >= SECOND_RUNNER_SINCE
    return late and os.environ.get(RUNNER_VARIABLE) != "0" and has_triton()


def has_triton() -> bool:
    """Whether vLLM finds a Triton that compiles for this machine."""
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


@contextmanager
def runner_chosen(second: bool) -> Iterator[None]:
    """Has vLLM take its second model runner, or its first, for an engine that starts within the block."""
    from vllm import envs

    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()  # an earlier engine of the process may have kept its values
    with variables_kept((RUNNER_VARIABLE,)):
        os.environ[RUNNER_VARIABLE] = str(int(second))
        yield
