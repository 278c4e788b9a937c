"""How torch takes the memory of a CUDA device while a model is trained or scores."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dataproto.errors import ending

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that configure torch's allocator. If one is set, nothing is changed here."""

_lock = threading.Lock()
_open = 0  # blocks of `expandable_segments` that this process is in


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Memory that is allocated in here comes in segments that grow and shrink by pages. Blocks may be nested.

    An update allocates what outlasts it, such as the optimizer's first state, among its activations. In segments of fixed size
    each such tensor keeps a whole segment, and an engine on the same device cannot have the rest of it. Outside of these blocks
    segments have fixed sizes: vLLM's memory pool and the all-reduce of its graphs do not work with others.

    Does nothing on a CPU, or if an environment variable configures torch's allocator (`VARIABLES`). Settings that a program has
    made at run time are lost, because torch resets some others with this one.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        yield
        return
    _count(1)
    with ending(lambda: _count(-1)):
        yield


def _count(change: int) -> None:
    global _open
    with _lock:
        found = _open + change
        if bool(found) != bool(_open):
            torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{bool(found)}")
        _open = found
