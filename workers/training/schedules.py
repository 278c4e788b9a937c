"""Runs the stages of a pipeline over micro-batches, by the schedules of ``torch.distributed.pipelining``.

Its schedules cut tensors into equal parts, one a micro-batch. Here they cut the numbers 0, 1, ... of the micro-batches; by its
number a stage looks up what is its own: packed rows and, on the first stage, media. All micro-batches are filled up to one
length, since the library fixes what stages send to each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from dataproto.packing import PackedRows, fill_up, unpack_cells
from dataproto.vlm import MediaSpans
from workers.model.packed_model import PackedVLM
from workers.parallel.pipeline import StagedForward, staged
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import MicroBatch, pack, place_media, sharing, to_forward

Conclude = Callable[[MicroBatch, Any], Tensor]
"""A micro-batch and its outputs, on the last stage, to what the backward pass begins at."""


def run_pipeline(
    module: PackedVLM,
    parts: Sequence[MicroBatch],
    ranks: Ranks,
    device: torch.device,
    conclude: Conclude,
    *,
    schedule: str,
    dtype: torch.dtype,
    entropy: bool = False,
    backward: bool = False,
) -> None:
    """Passes over all micro-batches, on every rank of the pipeline; ``conclude`` is called on the last stage's ranks.

    Args:
        schedule: ``1f1b``, ``interleaved`` or ``gpipe``.
        dtype: of states between stages.
        backward: also backward, from what ``conclude`` returns.
    """
    stages = staged(module)
    if not parts or stages is None:
        return
    feed = Feed.of(module, parts, device)
    deep = module.family.deep_layers(module.model.config) if any(part.tower for part in parts) else 0
    # What each rank of sp x tp has of the tokens, and how wide states are.
    shape = (module.tokens.num_states(feed.length), module.model.config.text_config.hidden_size)
    made: list[Any] = []
    for number in stages.stages:
        into, out = (
            torch.empty(stages.levels(at, deep), *shape, dtype=dtype, device="meta", requires_grad=backward)
            for at in (number, number + 1)
        )
        last = number == len(stages.bounds) - 1
        made.append(
            PipelineStage(
                _Stage(feed, stages, number, conclude, {"entropy": entropy, "deep": deep, "dtype": dtype}),
                number,
                len(stages.bounds),
                device,
                input_args=() if number == 0 else (into,),
                output_args=(torch.empty(1, device="meta", requires_grad=backward) if last else out,),
                group=ranks.group("pp"),
            )
        )
    numbers = torch.arange(len(parts))
    plan: Any = _schedule(made, len(parts), schedule, backward)
    try:
        plan.step(number=numbers, **({"target": numbers} if backward else {}))
    except RuntimeError as error:  # the library wraps what a stage raises
        raise error.__cause__ or error from None


def _schedule(stages: list[Any], parts: int, name: str, backward: bool) -> Any:
    options: dict[str, Any] = {"loss_fn": _loss if backward else None, "scale_grads": False}
    if name == "interleaved":
        return ScheduleInterleaved1F1B(stages, parts, **options)
    kind = Schedule1F1B if name == "1f1b" and backward else ScheduleGPipe
    return kind(stages[0], parts, **options)


def _loss(output: Tensor, number: Tensor) -> Tensor:
    """The last stage's output is the loss already."""
    return output.sum()


@dataclass(frozen=True)
class Feed:
    """What stages look up: the micro-batches, packed and of one length."""

    module: PackedVLM
    parts: Sequence[MicroBatch]
    packed: Sequence[PackedRows]
    length: int  # of the longest, up to which the others are filled
    device: torch.device

    @classmethod
    def of(cls, module: PackedVLM, parts: Sequence[MicroBatch], device: torch.device) -> "Feed":
        packed = [pack(module, part.rows, sharing(part.rows)) for part in parts]
        return cls(module, parts, packed, max(rows.input_ids.shape[-1] for rows in packed), device)

    def inputs(self, number: int, media: bool) -> tuple[PackedRows, Mapping[str, Tensor], MediaSpans]:
        """Of micro-batch ``number``, on the device; ``media`` if they are wanted."""
        part, packed = self.parts[number], self.packed[number]
        nothing = torch.zeros(0, dtype=torch.int64)
        found: tuple[dict[str, Tensor], MediaSpans] = {}, MediaSpans(nothing, nothing)
        if media:
            found = place_media(self.module, part.rows, packed, sharing(part.rows), part.tower)
        return to_forward(fill_up(packed, self.length), *found, self.device)


class _Stage(nn.Module):
    """One stage as the library calls it. The model is not its submodule, so that FSDP's own hooks do their work."""

    def __init__(
        self, feed: Feed, stages: StagedForward, number: int, conclude: Conclude, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.feed, self.number, self.conclude, self.options = feed, number, conclude, dict(options)
        self.last = number == len(stages.bounds) - 1

    def forward(self, *states: Tensor, number: Tensor) -> Tensor:
        at = int(number)
        module: Any = self.feed.module
        inputs = self.feed.inputs(at, media=self.number == 0)
        given = states[0] if states else None
        out = module(*inputs, **self.options, states=given, stage=self.number)
        if not self.last:
            return out
        part = self.feed.parts[at]
        shape, cells = tuple(part.rows["response_mask"].shape), inputs[0].response_cells
        scores, entropies = (None if values is None else unpack_cells(values, cells, shape) for values in out)
        return torch.stack([self.conclude(part, module.outputs(scores, entropies))]).float()
