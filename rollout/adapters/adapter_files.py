"""An adapter on disk: peft's two files, and a digest of each.

``adapter_model.safetensors`` and ``adapter_config.json`` are what ``peft.PeftModel.from_pretrained`` and vLLM load. No code in
them runs.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily
from rollout.adapters.adapter import DOWN, UP, Adapter, AdapterConfig, adapted_layers
from rollout.adapters.packed_tensors import PackedTensors, write_packed

WEIGHTS_FILE, CONFIG_FILE, DIGESTS_FILE = "adapter_model.safetensors", "adapter_config.json", "sha256.json"
DTYPES = (torch.float32, torch.bfloat16)
"""Of the matrices in a file; they are read into float32."""
PREFIX = "base_model.model."
"""Of every name in peft's file of weights."""


def write_adapter(adapter: Adapter, directory: Path, base_model: str, dtype: torch.dtype = torch.float32) -> None:
    """Writes the adapter, in a dtype, and its digests to a directory, which exists."""
    write_packed_adapter(adapter.config, adapter.packed(dtype), directory, base_model)


def write_packed_adapter(config: AdapterConfig, matrices: PackedTensors, directory: Path, base_model: str) -> None:
    """`write_adapter` for what `Adapter.packed` has copied, on any device."""
    names = [name.removesuffix(DOWN) for name in matrices.shapes if name.endswith(DOWN)]
    named = replace(matrices, shapes={PREFIX + name: shape for name, shape in matrices.shapes.items()})
    digest = write_packed([named], directory / WEIGHTS_FILE, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": names,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_digests(directory, CONFIG_FILE, known={WEIGHTS_FILE: digest})


def read_adapter(
    directory: Path, model: nn.Module, family: VLMFamily, device: torch.device, trained: bool = False
) -> Adapter:
    """Reads what `write_adapter` wrote.

    Args:
        trained: the matrices get gradients.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model; names the file and the tensor.
    """
    check_digests(directory, WEIGHTS_FILE, CONFIG_FILE)
    config, layers = _read_config(directory / CONFIG_FILE, model, family)
    weights = read_tensors(directory / WEIGHTS_FILE)
    pairs = {}
    for name, (out, into) in layers.items():
        shapes = {DOWN: (config.rank, into), UP: (out, config.rank)}
        down, up = (
            _matrix(weights, f"{PREFIX}{name}{end}", shape, directory / WEIGHTS_FILE).to(device).requires_grad_(trained)
            for end, shape in shapes.items()
        )
        pairs[name] = (down, up)
    if weights:
        raise CheckpointError(
            f"{directory / WEIGHTS_FILE} has {next(iter(weights))}, which the model has no adapter for"
        )
    return Adapter(config, pairs, directory)


def _read_config(file: Path, model: nn.Module, family: VLMFamily) -> tuple[AdapterConfig, dict[str, tuple[int, int]]]:
    """The settings, and the sizes of the layers that they name, which are all of some kinds."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        names = set(settings["target_modules"])
        inner = {name.removeprefix(f"{family.decoder_layers}.") for name in names - {family.head}}
        kinds = {"attn" in name for name in inner}
        config = AdapterConfig(
            int(settings["r"]),
            float(settings["lora_alpha"]),
            attention=True in kinds,
            mlp=False in kinds,
            head=family.head in names,
        )
        layers = adapted_layers(model, family, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read as the settings of an adapter: {error!r}") from error
    if layers.keys() != names:
        other = sorted(layers.keys() ^ names)[0]
        raise CheckpointError(f"{file} is of another model: they differ in {other}")
    return config, layers


def _matrix(weights: dict[str, Tensor], name: str, shape: tuple[int, int], file: Path) -> Tensor:
    found = weights.pop(name, None)
    if found is None:
        raise CheckpointError(f"{file} lacks {name}")
    if found.shape != shape or found.dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: {name} is {found.dtype} of shape {tuple(found.shape)}, but the model needs {shape} in "
            f"{' or '.join(map(str, DTYPES))}"
        )
    if not bool(found.isfinite().all()):
        raise CheckpointError(f"{file}: {name} has values that are not finite")
    return found.float()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises `CheckpointError` if it is missing or damaged."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def write_digests(directory: Path, *names: str, known: Mapping[str, str] | None = None) -> None:
    """Adds the SHA-256 of files of a directory, and those that are ``known`` of others, to its list of digests."""
    digests = {**_digests(directory), **(known or {}), **{name: _digest(directory / name) for name in names}}
    (directory / DIGESTS_FILE).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def check_digests(directory: Path, *names: str) -> None:
    """Raises `CheckpointError` if one of the files is missing or differs from its digest. A file without one is not checked."""
    digests = _digests(directory)
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory} lacks {name}")
        if name in digests and digests[name] != _digest(directory / name):
            raise CheckpointError(f"{directory / name} is damaged: its SHA-256 is not the one in {DIGESTS_FILE}")


def _digests(directory: Path) -> Mapping[str, Any]:
    file = directory / DIGESTS_FILE
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no digests")
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
