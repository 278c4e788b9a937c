"""Pipeline parallelism: decoder layers dealt out to stages, each of which gets states from the one before it.

The first stage alone holds vision tower and embedding, so pixels go nowhere else; the last one alone holds final norm and head,
and computes log-probs and loss. Stage i stands on rank ``i % pp``. Between stages travel, as one dense tensor, the states of
the tokens and the deep vision features that later layers still add to them. What a rank holds keeps the names that it has in
the whole model, so checkpoints and exported weights are those of any layout. Where head and embedding are one weight, first and
last stage hold a copy each, and add up its gradient (`sum_tied_gradients`).

`workers.training.schedules` runs the stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dataproto.errors import InvalidConfig
from dataproto.packing import PackedRows
from dataproto.vlm import MediaSpans
from dataproto.vlm.forward import dense_levels
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks


def apply(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> None:
    """Leaves this rank's stages of ``module``, in place.

    Raises:
        InvalidConfig: the layers cannot be dealt out as asked.
    """
    size = ranks.size("pp")
    if size == 1:
        return
    model, family = module.model, module.family
    chunks = options.pipeline_chunks if options.pipeline_schedule == "interleaved" else 1
    decoder = model.get_submodule(family.language_model)
    name = family.decoder_layers.rpartition(".")[2]
    whole = decoder.get_submodule(name)
    bounds = stage_layers(len(list(whole.children())), size * chunks, options.pipeline_layers)
    stages = range(ranks.rank("pp"), len(bounds), size)
    layers = StageLayers(whole, [layer for stage in stages for layer in bounds[stage]])
    setattr(decoder, name, layers)
    tied = _leave(module, first=stages[0] == 0, last=stages[-1] == len(bounds) - 1)
    norm: Any = model.get_submodule(family.final_norm)
    norm.forward = partial(_behind_the_last, norm.forward, layers, bounds[-1])
    module.forward = StagedForward(module, tuple(bounds), stages, layers, tied)  # type: ignore[method-assign]
    if ranks.size("dp", "sp") == ranks.size("tp") == 1:  # otherwise what follows moves it
        module.to(ranks.mesh.device_type)  # type: ignore[union-attr]


def stage_layers(layers: int, stages: int, given: Sequence[int] | None = None) -> list[range]:
    """The decoder layers of each stage: as many as ``given`` says, or about equally many, those without tower first.

    >>> stage_layers(7, 3), stage_layers(4, 2, given=[1, 3])
    ([range(0, 2), range(2, 5), range(5, 7)], [range(0, 1), range(1, 4)])
    """
    if stages > layers:
        raise InvalidConfig(
            f"layout.pp makes {stages} stages, but the model has {layers} decoder layers: use fewer stages"
        )
    least, more = divmod(layers, stages)
    counts = [least + (0 < stage <= more) for stage in range(stages)] if given is None else list(given)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise InvalidConfig(
            f"pipeline_layers={tuple(counts)}: must name at least one layer for each of {stages} stages, {layers} in all"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


class StageLayers(nn.ModuleList):
    """A rank's decoder layers under the names that they have in the whole model; a pass sees those of one stage."""

    def __init__(self, whole: nn.Module, kept: Sequence[int]) -> None:
        super().__init__()
        for number in kept:
            self.add_module(str(number), whole.get_submodule(str(number)))
        self.running = range(0)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self.get_submodule(str(number)) for number in self.running])

    def __getitem__(self, places: Any) -> Any:
        return list(self)[places]


@dataclass(frozen=True)
class StagedForward:
    """`PackedVLM.forward` of one of the rank's stages."""

    module: PackedVLM
    bounds: tuple[range, ...]  # the layers of every stage
    stages: range  # this rank's
    layers: StageLayers
    tied: bool  # head and embedding are one weight

    def __call__(
        self,
        rows: PackedRows,
        media: Mapping[str, Tensor],
        spans: MediaSpans,
        entropy: bool = False,
        states: Tensor | None = None,
        stage: int = 0,
        deep: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        """What stage ``stage`` makes of its input.

        Args:
            states: ``(levels, S, H)`` from the stage before, of `levels` levels; ``None`` for the first stage.
            deep: levels of deep features that the decoder adds, 0 if no micro-batch has media.
            dtype: of what goes on to the next stage.

        Returns:
            ``(levels, S, H)`` for the next stage, or what `PackedVLM.forward` returns.
        """
        module, family = self.module, self.module.family
        mine, places = module.tokens.rows(rows, spans)
        begin, end = self.bounds[stage].start, self.bounds[stage].stop
        further = self.levels(stage + 1, deep) - 1
        if states is None:
            features = module.features(module.model, media) if media else None
            hidden, extras = family.merge(module.model, mine.input_ids, features, places)
            if features is None:
                beyond = hidden.new_zeros(further, *hidden.shape[1:])
            else:
                beyond = dense_levels(features[:, 1 + deep - further :], hidden.shape[1], places)
        else:
            hidden, levels = states[:1], states[1:]
            extras = family.dense_extras(levels) if len(levels) else {}
            beyond = levels[end - begin :]
        self.layers.running = self.bounds[stage]
        hidden = module.decode(hidden, extras, mine)
        if stage == len(self.bounds) - 1:
            return module.finish(hidden, mine, entropy)
        return torch.cat([hidden.to(dtype), beyond.to(dtype)])

    def levels(self, stage: int, deep: int) -> int:
        """Of what goes into a stage: the states, and the deep features of layers from there on."""
        return 1 + (max(0, deep - self.bounds[stage].start) if stage < len(self.bounds) else 0)

    @property
    def repeats(self) -> list[nn.Parameter]:
        """This rank's copies of weights that the first stage holds, too."""
        return [self._tied_weight] if self.tied and 0 not in self.stages else []

    @property
    def _tied_weight(self) -> nn.Parameter:
        weight: Any = self.module.model.get_submodule(self.module.family.embedding).weight
        return weight


def staged(module: nn.Module) -> StagedForward | None:
    """The stages of a module that has some."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, StagedForward) else None


def sum_tied_gradients(module: nn.Module, ranks: Ranks) -> None:
    """Adds up the gradients of a weight that first and last stage hold; due on every rank before a step."""
    stages, group = staged(module), ranks.group("pp")
    if stages is None or group is None or not stages.tied:
        return
    gradient = stages._tied_weight.grad
    if gradient is None:  # frozen
        return
    mine: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    other = distributed.get_global_rank(group, ranks.size("pp") - 1 if 0 in stages.stages else 0)
    sent = mine.to(ranks.mesh.device_type).contiguous()  # type: ignore[union-attr]  # offloaded ones lie on the host
    received = torch.empty_like(sent)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, sent, other, group),
            distributed.P2POp(distributed.irecv, received, other, group),
        ]
    )
    for work in works:
        work.wait()
    mine.add_(received.to(mine.device))


def _leave(module: PackedVLM, first: bool, last: bool) -> bool:
    """Takes out what stands before the layers and behind them, unless the rank has the first or the last stage; whether the
    rank holds a weight that is embedding and head in one.
    """
    model, family = module.model, module.family
    embedding: Any = model.get_submodule(family.embedding)
    head: Any = _find(model, family.head)
    tied = head is not None and head.weight is embedding.weight
    if not first:
        _empty(model, (family.vision_tower, family.vision_blocks, *family.mergers))
        if not (tied and last):
            _remove(model, family.embedding)
    if not last:
        _replace(model, family.final_norm, nn.Identity())
        if head is not None:
            _remove(model, family.head)
        for name, _ in list(module.named_children()):  # what is computed of the decoder's states
            if name != "model":
                setattr(module, name, nn.Module())
    return bool(tied and (first or last))


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _empty(model: nn.Module, paths: Sequence[str]) -> None:
    """Puts empty modules where parts were, one inside another where paths say so."""
    for path in paths:
        if _find(model, path) is not None:
            _replace(model, path, nn.Module())
        else:  # went with what it was a part of
            holder = model
            for name in path.split("."):
                if not hasattr(holder, name):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)


def _remove(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    delattr(model.get_submodule(parent), name)


def _replace(model: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, part)


def _behind_the_last(forward: Callable[[Tensor], Tensor], layers: StageLayers, last: range, hidden: Tensor) -> Tensor:
    """The final norm, where the layers that run are the last ones."""
    return forward(hidden) if layers.running == last else hidden
