"""What actor and reference share: a packed model that scores responses."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.errors import InvalidConfig, NonFiniteLogits
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig, compute_dtype
from workers.model.named_weights import all_named_weights
from workers.model.packed_model import PackedVLM
from workers.model.precision import HalfWeights
from workers.ranks.dispatch_modes import dispatch
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import MicroBatch, check_rows, forward_rows, micro_batches
from workers.training.loading import load_packed


@dataclass(frozen=True)
class PolicyConfig(ModelConfig):
    """A policy: the weights and how it is scored."""

    model_path: str
    temperature: float = 1.0  # of the policy; the same value samples and scores

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise InvalidConfig(f"temperature={self.temperature}: the policy needs a temperature above 0")

    def frozen(self) -> "PolicyConfig":
        """The same policy, as it was before any training, for a worker that never updates it."""
        kept = {field.name: getattr(self, field.name) for field in fields(PolicyConfig)}
        return PolicyConfig(**kept | {"lora_rank": 0, "lora_vision": False, "activation_checkpointing": "none"})


class ModelWorker:
    """Holds a packed model, or this rank's part of it, and runs it over rows.

    Ranks along dp have rows of their own; those along sp and tp share rows, and all of them call every method.
    """

    trains = True

    def __init__(self, config: Any, device: torch.device | None = None, ranks: Ranks | None = None) -> None:
        """``ranks`` comes from `init_ranks`; without it the process is alone."""
        self.config = config
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.ranks = ranks or Ranks()
        self.module = load_packed(config, self.device, self.ranks, self.trains, self.wrap)
        self.half_weights = HalfWeights(self.module)

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedVLM:
        """The packed model around a loaded one."""
        raise NotImplementedError

    def scores(self, data: DataProto, into: str, entropy: bool = False) -> DataProto:
        """What the model says of response tokens as column ``into`` ``(B, R)`` float32, and ``entropys`` if asked for.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
            NonFiniteLogits: what the model says is NaN or infinite; names the row and the token.
            RankFailure: another rank raised one of these.
        """
        with self.ranks.fail_together():
            check_rows(data, self.module)
        shape = tuple(data["response_mask"].shape)
        columns = {name: torch.zeros(shape) for name in (into, "entropys")[: 1 + entropy]}
        self.module.eval()

        def keep(part: MicroBatch, outputs: Any) -> Tensor:
            if not part.inert:
                columns[into][part.index] = outputs.scores.cpu()
                if entropy:
                    columns["entropys"][part.index] = outputs.entropy.cpu()
            return outputs.scores.new_zeros(())

        with torch.no_grad(), self.compute():
            self.passes(data, keep, entropy)
        if self.sharded:
            import_module("workers.parallel.fsdp").reshard(self.module)
        columns = self.ranks.broadcast_from_last(columns, "pp")
        with self.ranks.fail_together():
            check_finite(columns[into], data, into)
        return DataProto.from_dict(columns)

    def passes(
        self,
        data: DataProto,
        conclude: Callable[[MicroBatch, Any], Tensor],
        entropy: bool = False,
        backward: bool = False,
        phase: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Passes over the rows, micro-batch by micro-batch.

        Args:
            conclude: from a micro-batch and its outputs to the number that the backward pass begins at; called on the ranks of
                the last pipeline stage.
            backward: also backward.
            phase: times the parts, see `Accounting.phase`.
        """
        parts = self.micro_batches(data)
        with self.gathered():
            if self.ranks.size("pp") > 1:
                with phase("pipeline"):
                    import_module("workers.training.schedules").run_pipeline(
                        self.module,
                        parts,
                        self.ranks,
                        self.device,
                        conclude,
                        schedule=self.config.pipeline_schedule,
                        dtype=self.stream_dtype,
                        entropy=entropy,
                        backward=backward,
                    )
                return
            for part in parts:
                outputs = forward_rows(self.module, part.rows, self.device, entropy, part.tower, phase)
                with phase("forward"):
                    total = conclude(part, outputs)
                if backward:
                    with phase("backward"):
                        total.backward()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Sharded weights stay gathered from micro-batch to micro-batch in here if the configuration says so."""
        if not self.sharded or self.config.reshard_after_forward:
            yield
            return
        fsdp = import_module("workers.parallel.fsdp")
        fsdp.keep_gathered(self.module, True)
        try:
            yield
        finally:
            fsdp.keep_gathered(self.module, False)
            fsdp.reshard(self.module)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the states that go from layer to layer: under autocast (see `compute`) sums stay in float32."""
        autocast = not self.sharded and self.ranks.size("tp") > 1
        return torch.float32 if autocast else compute_dtype(self.config.dtype, self.device.type)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered layer by layer, by FSDP."""
        return self.ranks.size("dp", "sp") > 1

    def micro_batches(self, data: DataProto) -> list[MicroBatch]:
        """Parts of which each rank has at most ``token_budget`` tokens: those along sp share the tokens of one."""
        return micro_batches(data, self.module, self.config.token_budget * self.ranks.size("sp"), self.ranks)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Forward and backward passes in here are in bfloat16 where the configuration says so.

        Sharded weights are cast as they are gathered; those split over tp alone by autocast, the others by `HalfWeights`.
        """
        if compute_dtype(self.config.dtype, self.device.type) == torch.float32 or self.sharded:
            yield
        elif self.ranks.size("tp") > 1:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                yield
        else:
            with self.half_weights.replaced():
                yield


def check_finite(scores: Tensor, data: DataProto, name: str) -> None:
    """Raises `NonFiniteLogits` where ``scores (B, R)`` of response tokens are NaN or infinite.

    >>> data = DataProto.from_dict({"response_mask": torch.tensor([[1, 0], [1, 1]])}, {"uid": ["a", "b"]})
    >>> check_finite(torch.tensor([[-0.5, 0.0], [-0.1, float("nan")]]), data, "old_log_probs")
    Traceback (most recent call last):
    ...
    dataproto.errors.NonFiniteLogits: row 1 (uid b): old_log_probs of response token 1 is nan: the model's weights, or the row's \
pixels, hold NaN or infinity
    """
    wrong = (~scores.isfinite() & (data["response_mask"] != 0)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        uid = f" (uid {data['uid'][row]})" if "uid" in data else ""
        raise NonFiniteLogits(
            f"row {row}{uid}: {name} of response token {place} is {float(scores[row, place])}: the model's weights, or the row's "
            "pixels, hold NaN or infinity"
        )


class PolicyWorker(ModelWorker):
    """Holds a policy and scores responses under it."""

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedVLM:
        return PackedVLM(model, family, self.config.temperature)

    @dispatch("dp")
    def log_probs(self, data: DataProto, into: str = "old_log_probs", entropy: bool = False) -> DataProto:
        """Log-probs of the responses as column ``into`` ``(B, R)`` float32, and ``entropys`` likewise if asked for.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch, NonFiniteLogits, RankFailure: see `scores`.
        """
        return self.scores(data, into, entropy)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face parameter name, full tensor), one after the other, adapters merged; all ranks take part.

        ``dtype`` is what tensors that have to be gathered come in, if not their own.
        """
        return all_named_weights(self.module.model, self.ranks, dtype)


class ReferenceWorker(PolicyWorker):
    """The frozen policy that a KL term holds on to."""

    trains = False

    @dispatch("dp")
    def log_probs(self, data: DataProto, into: str = "ref_log_prob", entropy: bool = False) -> DataProto:
        """As the actor's, into ``ref_log_prob``."""
        return super().log_probs(data, into, entropy)
