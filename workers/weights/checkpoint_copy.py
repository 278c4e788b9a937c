"""Copies of checkpoints in another dtype, file by file: never more than one file's weights are in memory."""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily
from workers.weights.hollow_model import absent_weights, hollow_model
from workers.weights.sharded_export import FILE_BYTES, StageWeights, plan_export, write_index
from workers.weights.stored_tensors import CheckpointFiles, whole


def copy_weights(source: str, family: VLMFamily, directory: Path, dtype: torch.dtype) -> CheckpointFiles:
    """Writes the weights of a checkpoint to ``directory`` under their names, in files of at most `FILE_BYTES` or one module.

    Args:
        source: directory or hub name.
        dtype: of floating-point weights; `VLMFamily.float32_weights` keep theirs.

    Returns:
        What was read.

    Raises:
        CheckpointError: the checkpoint lacks weights of its model, has them in another shape, or is damaged.
        InvalidConfig: the weights are quantized.
    """
    model, files, sources = hollow_model(source, family)
    if absent := absent_weights(model, sources):
        raise CheckpointError(f"{source} lacks {len(absent)} weights of its model: {', '.join(absent[:3])}")
    exact = {name for weight, tensor in sources.stored.items() if family.in_float32(weight) for name in tensor.names}
    dtypes = _dtypes(files, lambda name, stored: stored if name in exact or not stored.is_floating_point else dtype)
    with files.opened():
        sizes = {name: prod(files.tensor(name).shape) * each.itemsize for name, each in dtypes.items()}
    places: dict[str, tuple[str, int]] = {}
    for file in plan_export([StageWeights(sizes, [0])], [], FILE_BYTES):
        _copy_file(files, {name: dtypes[name] for name in sizes if name in file.weights}, directory / file.file)
        places |= {name: (file.file, sizes[name]) for name in file.weights}
    if {file for file, _ in places.values()} != {SAFE_WEIGHTS_NAME}:
        write_index(directory, places, parameters=sum(weight.numel() for weight in model.parameters()))
    return files


def _dtypes(files: CheckpointFiles, wanted: Callable[[str, torch.dtype], torch.dtype]) -> dict[str, torch.dtype]:
    """What ``wanted`` returns for the name and dtype of each tensor."""
    with files.opened():
        firsts = {name: tuple(slice(0, 1) for _ in files.tensor(name).shape) for name in files.names}
        return {name: wanted(name, files.read(name, first).dtype) for name, first in firsts.items()}


def _copy_file(files: CheckpointFiles, dtypes: Mapping[str, torch.dtype], path: Path) -> None:
    tensors = {}
    for name, dtype in dtypes.items():
        with files.opened():  # mapped pages count as memory until the file is closed
            stored = files.tensor(name)
            tensors[name] = stored.read(whole(stored.shape)).to(dtype, copy=True).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"})
