"""The speed of this CPU with a model and its data, measured and kept for a day, so that a plan and the run have the same numbers.

What is measured is the processor time of the calling thread, which takes part in each operation: seconds in which other processes
have the processor do not count, so what a busy machine measures holds on a quiet one too.

It is in ``dataproto/cpu_speed`` of the user's cache directory (``$XDG_CACHE_HOME`` or ``~/.cache``), one small file for each
model, first rows, longest row, token budget, dtype, number of threads and release of PyTorch. The folder may be deleted at any
time; what it held is measured again.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recipes.data.loader import PromptLoader
from recipes.forecast.batch_sizes import BatchSizes, preparation_seconds
from recipes.forecast.calibration import calibrate_cpu, cpu_memory, this_gpu, timed_rows
from recipes.forecast.devices import Device, Overheads
from workers.model.model_config import ModelConfig
from workers.model.precision import compute_dtype

KEPT = 86_400  # seconds
MEASURED = "processor time of the calling thread, memory of the passes, with their kernels"
"""Part of a file's name: a release that measures otherwise has files of its own."""

NO_SIZES = (
    "dtype",
    "torch_dtype",
    "architectures",
    "transformers_version",
)  # of a config, which differ between equal models


def this_device(
    batch: BatchSizes, loader: PromptLoader, compute: ModelConfig, clock: Callable[[], float] = time.thread_time
) -> Device:
    """The machine's GPU, or else its CPU; see `this_gpu` and `this_cpu`."""
    return this_gpu() if torch.cuda.is_available() else this_cpu(batch, loader, compute, clock)


def this_cpu(
    batch: BatchSizes, loader: PromptLoader, compute: ModelConfig, clock: Callable[[], float] = time.thread_time
) -> Device:
    """This CPU as an earlier call, here or in another process, has measured it for such rows; else measured now, and kept.

    Args:
        loader: of the run, whose first rows are prepared unless other processes do that; it stays where it is.
        compute: no more tokens are timed together than its ``token_budget``, and they are computed in its ``dtype``.
        clock: returns seconds; by default those of the processor, see above.
    """
    file = _file(batch, loader, compute)
    if (kept := _read(file)) is not None:
        return replace(kept, memory=cpu_memory())
    device = calibrate_cpu(batch, clock, compute.token_budget, compute.dtype)
    if not loader.num_workers:
        overheads = replace(device.overheads, preparation=preparation_seconds(loader, clock))
        device = replace(device, overheads=overheads)
    _keep(device, file)
    return device


def _read(file: Path) -> Device | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if time.time() - file.stat().st_mtime > KEPT:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        return Device(**found | {"overheads": Overheads(**found["overheads"])})
    return None


def _keep(device: Device, file: Path) -> None:
    """Does nothing where the cache directory cannot be written."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(device)), encoding="utf-8")
        draft.replace(file)


def _file(batch: BatchSizes, loader: PromptLoader, compute: ModelConfig) -> Path:
    machine = (platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    timed = timed_rows(batch, compute.token_budget)
    longest = int(batch.lengths.max())
    rows = (timed.prompts, timed.responses, timed.samples, batch.prompts, longest)
    loading = (loader.batch_size, bool(loader.num_workers))
    model = _sizes(json.loads(batch.config.to_json_string()))
    computed = compute.token_budget, compute_dtype(compute.dtype, "cpu")
    digest = hashlib.sha256(repr((MEASURED, machine, model, *computed, rows, loading)).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dataproto" / "cpu_speed" / f"{digest.hexdigest()[:16]}.json"


def _sizes(config: Any) -> Any:
    """A config without `NO_SIZES`.

    >>> _sizes({"dtype": "float32", "text_config": {"hidden_size": 64, "dtype": "float32"}})
    {'text_config': {'hidden_size': 64}}
    """
    if not isinstance(config, dict):
        return config
    return {name: _sizes(value) for name, value in config.items() if name not in NO_SIZES}
