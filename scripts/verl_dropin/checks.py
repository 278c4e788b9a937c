"""The checks and what they are expected to give; results as plain values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
CHECKS: dict[str, Callable[[], Any]] = {}
EXPECTED: dict[str, dict[str, Any]] = {}  # of checks that differ on purpose, by side


def use_dataproto() -> None:
    """The drop-in: in every process, before verl is imported."""
    import sys

    import dataproto.protocol

    sys.modules["verl.protocol"] = dataproto.protocol


def plain(value: Any) -> Any:
    """Batches, tables and arrays as values that do not depend on the class: they are compared with their dtypes and shapes."""
    if all(hasattr(value, name) for name in ("batch", "non_tensor_batch", "meta_info")):
        tensors = {} if value.batch is None else {name: value.batch[name] for name in sorted(value.batch.keys())}
        return "batch", plain(tensors), plain(dict(sorted(value.non_tensor_batch.items()))), plain(value.meta_info)
    if hasattr(value, "batch_size"):
        return "table", list(value.batch_size), {name: plain(value[name]) for name in sorted(value.keys())}
    if isinstance(value, torch.Tensor):
        return ["nested", *value.unbind()] if value.is_nested else value
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "LinkedList":
        return [plain(each) for each in value]
    return value


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def differs(verl: Any, dataproto: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A check whose results are these."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        EXPECTED[function.__name__] = {"verl": plain(verl), "dataproto": plain(dataproto)}
        return check(function)

    return add
