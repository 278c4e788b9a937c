"""What actor and reference share: a packed model that scores responses."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily, family_of
from workers.group import dispatch
from workers.packed import PackedVLM
from workers.step import check_rows, forward_rows, micro_batches


@dataclass(frozen=True)
class PolicyConfig:
    """A policy: the weights and how it is scored."""

    model_path: str
    temperature: float = 1.0  # of the policy; the same value samples and scores
    token_budget: int = 16_384  # tokens of one micro-batch
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the computation; "auto": bfloat16 on CUDA
    freeze_vision: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise InvalidConfig(f"temperature={self.temperature}: the policy needs a temperature above 0")
        if self.token_budget < 1:
            raise InvalidConfig(f"token_budget={self.token_budget}: must be at least 1")

    def frozen(self) -> "PolicyConfig":
        """The same policy for a worker that never updates it."""
        return PolicyConfig(**{field.name: getattr(self, field.name) for field in fields(PolicyConfig)})


class PolicyWorker:
    """Holds a policy on one device and scores responses under it."""

    def __init__(self, config: PolicyConfig, device: torch.device | None = None) -> None:
        self.config = config
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module = load_packed(config, self.device)

    @dispatch("dp")
    def log_probs(self, data: DataProto, into: str = "old_log_probs", entropy: bool = False) -> DataProto:
        """Log-probs of the responses as column ``into`` ``(B, R)`` float32, and ``entropys`` likewise if asked for.

        Raises:
            MissingColumn, InvalidColumn: see `check_rows`.
        """
        check_rows(data, self.module.banned_ids)
        columns: dict[str, list[Tensor]] = {name: [] for name in (into, "entropys")[: 1 + entropy]}
        self.module.eval()
        with torch.no_grad(), self.autocast():
            for rows in micro_batches(data, self.config.token_budget):
                outputs = forward_rows(self.module, rows, self.device, entropy)
                columns[into].append(outputs.log_probs.cpu())
                if entropy:
                    columns["entropys"].append(outputs.entropy.cpu())
        shape = tuple(data["response_mask"].shape)
        return DataProto.from_dict(
            {name: torch.cat(parts) if parts else torch.zeros(shape) for name, parts in columns.items()}
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if compute_dtype(self.config.dtype, self.device) == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face parameter name, full tensor), one after the other."""
        for name, parameter in self.module.model.named_parameters():
            yield name, parameter.detach()


class ReferenceWorker(PolicyWorker):
    """The frozen policy that a KL term holds on to."""

    def __init__(self, config: PolicyConfig, device: torch.device | None = None) -> None:
        super().__init__(config, device)
        self.module.requires_grad_(False)

    @dispatch("dp")
    def log_probs(self, data: DataProto, into: str = "ref_log_prob", entropy: bool = False) -> DataProto:
        """As the actor's, into ``ref_log_prob``."""
        return super().log_probs(data, into, entropy)


def load_packed(config: PolicyConfig, device: torch.device) -> PackedVLM:
    """Loads a checkpoint directory (or hub name) in float32, ready for packed forwards."""
    family = checkpoint_family(config.model_path)
    model = AutoModelForImageTextToText.from_pretrained(
        config.model_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.to(device)  # type: ignore[arg-type]
    module = PackedVLM(model, family, config.temperature)
    if config.freeze_vision:
        model.get_submodule(family.vision_tower).requires_grad_(False)
    return module


def checkpoint_family(model_path: str) -> VLMFamily:
    """The family of a checkpoint directory or hub name.

    Raises:
        InvalidConfig: there is no such checkpoint.
        UnknownModel: it is of no registered family.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model path {model_path!r} holds no checkpoint: {str(error).splitlines()[0]}") from error
    return family_of(config)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
