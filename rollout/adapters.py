"""Low-rank adapters (LoRA, arXiv:2106.09685) of one frozen model: their matrices, their files, and requests for them.

On disk an adapter is ``adapter_model.safetensors`` and ``adapter_config.json``, which ``peft.PeftModel.from_pretrained`` and vLLM
load. No code in them runs.
"""

import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dataproto.errors import CheckpointError, InvalidConfig, raised_as
from dataproto.grouping import grouped_by
from dataproto.vlm import VLMFamily
from rollout.engine import Request
from rollout.image_features import KeyedInputs
from rollout.sampling import derive_seed

Pair = tuple[Tensor, Tensor]
"""A ``(r, in)`` and B ``(out, r)``: the layer's output gets alpha / r * B A x more."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""The ends of peft's names of A and B."""


@dataclass(frozen=True)
class AdapterConfig:
    """Which layers of the language model an adapter has, and how strong it is. The vision tower has none.

    Args:
        rank: r of every pair of matrices.
        alpha: the output of a pair is scaled by alpha / r.
        attention: the linear layers of attention.
        mlp: the linear layers of the MLPs.
        head: the output projection. If the embedding is tied to it, the embedding stays as it is.
    """

    rank: int
    alpha: float = 32.0
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise InvalidConfig(f"rank={self.rank} must be at least 1 and alpha={self.alpha} above 0")
        if not (self.attention or self.mlp or self.head):
            raise InvalidConfig("attention, mlp and head are all off: nothing would be trained; turn one on")

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter by the names of the layers that it adapts. Two adapters are equal only if they are the same object."""

    config: AdapterConfig
    pairs: Mapping[str, Pair]
    directory: Path | None = None  # of a snapshot that was read from files

    @property
    def trained(self) -> bool:
        """Whether the matrices have gradients: those of a snapshot do not, and never change."""
        return any(down.requires_grad for down, _ in self.pairs.values())

    def snapshot(self, dtype: torch.dtype = torch.float32) -> "Adapter":
        """A copy in host memory, rounded to a dtype, that does not follow the training of this one."""
        matrices = host_copies(dict(self.named_parameters()), dtype)
        return Adapter(self.config, {name: (matrices[name + DOWN], matrices[name + UP]) for name in self.pairs})

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices, A before B of each layer, under peft's names without its prefix."""
        for name, (down, up) in self.pairs.items():
            yield name + DOWN, down
            yield name + UP, up


def host_copies(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of tensors in host memory, in ``dtype`` or their own. Those of one dtype and device come by one transfer."""
    groups = grouped_by(tensors, lambda name: (tensors[name].dtype, tensors[name].device))
    found: dict[str, Tensor] = {}
    for names in groups.values():
        flat = torch.cat([tensors[name].detach().flatten() for name in names])
        flat = flat if dtype is None else flat.to(dtype)
        if flat.is_cuda:  # a transfer to memory that is not pinned takes 35 times as long (H200)
            flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)
        parts = flat.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return found


def linear_layers(model: nn.Module, family: VLMFamily) -> dict[str, nn.Linear]:
    """The linear layers of the decoder, by name."""
    inside = f"{family.decoder_layers}."
    named = ((name, layer) for name, layer in model.named_modules() if name.startswith(inside))
    return {name: layer for name, layer in named if isinstance(layer, nn.Linear)}


def adapted_layers(model: nn.Module, family: VLMFamily, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """The layers that an adapter has by name, with their sizes (out, in).

    Raises:
        InvalidConfig: the MLPs hold fused experts, which have no adapters here.
    """
    if config.mlp and (fused := family.expert_layers(model)):
        raise InvalidConfig(f"{fused[0]} holds fused experts, which have no adapters: pass train_mlp=False")
    found = {}
    for name, layer in linear_layers(model, family).items():
        inner = name.removeprefix(f"{family.decoder_layers}.")
        if config.attention if "attn" in inner else config.mlp:
            found[name] = (layer.out_features, layer.in_features)
    if config.head:
        found[family.head] = tuple(family.lm_head(model).weight.shape)
    return found


def new_adapter(model: nn.Module, family: VLMFamily, config: AdapterConfig, seed: int, device: Any = None) -> Adapter:
    """A trainable adapter in float32 that changes nothing yet: B is zero, A uniform as that of a linear layer (as in peft).

    Each A has a random stream of its own, from the seed and the name of its layer, so that a layer's A does not depend on
    which others are adapted.

    Raises:
        InvalidConfig: see `adapted_layers`.
    """
    pairs = {}
    for name, (out, into) in adapted_layers(model, family, config).items():
        generator = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
        bound = 1 / math.sqrt(into)
        down = torch.empty(config.rank, into).uniform_(-bound, bound, generator=generator)
        up = torch.zeros(out, config.rank, device=device)
        pairs[name] = nn.Parameter(down.to(device)), nn.Parameter(up)
    return Adapter(config, pairs)


WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
DTYPES = (torch.float32, torch.bfloat16)
"""Of the matrices in a file; they are read into float32."""
PREFIX = "base_model.model."
"""Of every name in peft's file of weights."""


def write_adapter(adapter: Adapter, directory: Path, base_model: str, dtype: torch.dtype = torch.float32) -> None:
    """Writes the adapter, in a dtype, to a directory, which exists."""
    matrices = host_copies(dict(adapter.named_parameters()), dtype)
    save_file({PREFIX + name: each for name, each in matrices.items()}, directory / WEIGHTS_FILE, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.config.rank,
        "lora_alpha": adapter.config.alpha,
        "target_modules": list(adapter.pairs),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_adapter(directory: Path, model: nn.Module, family: VLMFamily, device: torch.device) -> Adapter:
    """Reads what `write_adapter` wrote. The matrices have no gradients.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model; names the file and the tensor.
    """
    config, layers = _read_config(directory / CONFIG_FILE, model, family)
    weights = read_tensors(directory / WEIGHTS_FILE)
    pairs = {}
    for name, (out, into) in layers.items():
        shapes = {DOWN: (config.rank, into), UP: (out, config.rank)}
        down, up = (
            _matrix(weights, f"{PREFIX}{name}{end}", shape, directory / WEIGHTS_FILE).to(device)
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
    with raised_as(CheckpointError, f"{file} cannot be read", OSError, SafetensorError):
        return load_file(file)


SCORED_PLACES = 256
"""Places of a prompt scored at a time, which bounds memory to a few copies of their logits."""
NO_LOG_PROB = -99999.0
"""Beside token 0: the filler of a list of likeliest tokens."""


@dataclass(eq=False)
class PromptScores:
    """Log-probs of a prompt of P tokens at temperature 1: which ones to compute and, once the prompt is read, what was found.

    Token t is predicted from the tokens before it. Nothing predicts the first token: NaN. Tokens of media get 0.0, and tokens
    before the last ``last`` ones NaN.

    Args:
        top: number of likeliest tokens at each place; 0: none.
        last: how many tokens at the end of the prompt have a score; ``None``: all.
        targets: ``(P - 1, K)`` further tokens, row i for the place of token i + 1; -1 for none, which gets 0.0.
    """

    top: int = 0
    last: int | None = None
    targets: npt.NDArray[np.int64] | None = None
    log_probs: npt.NDArray[np.float32] | None = None  # (P,)
    top_tokens: npt.NDArray[np.int32] | None = None  # (P, top), 0 where there are none
    top_log_probs: npt.NDArray[np.float32] | None = None  # (P, top), NO_LOG_PROB where there are none
    target_log_probs: npt.NDArray[np.float32] | None = None  # (P - 1, K)

    def fill(self, ids: Tensor, types: Tensor, states: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Computes the scores.

        Args:
            ids, types: of the prompt, ``(P,)``.
            states: ``(P, H)``, after each token.
            logits_of: from states ``(n, H)`` to logits ``(n, V)`` float32.
        """
        count = len(ids)
        first = max(1, count - (self.last or count))
        values = np.full(count, np.nan, dtype=np.float32)
        tokens = np.zeros((count, self.top), dtype=np.int32)
        likely = np.full((count, self.top), NO_LOG_PROB, dtype=np.float32)
        found = None if self.targets is None else np.zeros(self.targets.shape, dtype=np.float32)
        for begin in range(first if found is None else 1, count, SCORED_PLACES):
            places = slice(begin, min(begin + SCORED_PLACES, count))
            before = slice(places.start - 1, places.stop - 1)
            log_probs = logits_of(states[before]).log_softmax(-1)
            own = ids[places].to(log_probs.device)
            values[places] = log_probs.gather(1, own[:, None]).squeeze(1).cpu().numpy()
            if self.top:
                top = log_probs.topk(min(self.top, log_probs.shape[1]), dim=-1)
                width = top.values.shape[1]
                tokens[places, :width], likely[places, :width] = top.indices.cpu(), top.values.cpu()
            if found is not None and self.targets is not None:
                wanted = torch.from_numpy(self.targets[before]).to(log_probs.device)
                found[before] = log_probs.gather(1, wanted.clamp_min(0)).where(wanted >= 0, 0.0).cpu().numpy()
        values[:first], likely[:first], tokens[:first] = np.nan, NO_LOG_PROB, 0
        media = (types != 0).numpy() & (np.arange(count) >= first)
        values[media], likely[media], tokens[media] = 0.0, NO_LOG_PROB, 0
        self.log_probs, self.target_log_probs = values, found
        self.top_tokens, self.top_log_probs = tokens, likely


@dataclass(frozen=True)
class AdapterRequest(Request):
    """A request for an adapter."""

    adapter: Adapter | None = None  # None: the base model
    images: Sequence[KeyedInputs] = ()  # for engines that read features; others read `multi_modal_data`
    scores: PromptScores | None = field(default=None, compare=False)  # filled once; samples of a prompt share it

    @property
    def prompt_key(self) -> Hashable:
        """See `Request.prompt_key`; each adapter reads a prompt on its own."""
        return super().prompt_key, self.adapter, tuple(image.key for image in self.images)
