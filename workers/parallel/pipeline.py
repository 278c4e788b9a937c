"""Pipeline parallelism: the decoder layers are split into stages, each of which gets states from the one before it.

Only the first stage holds vision tower and embedding, so pixels go nowhere else; only the last one holds final norm and head,
and computes log-probs and loss. Stage i runs on rank i. Stages send each other, as one dense tensor, the states of the
tokens, deep vision features that later layers still add to them, and the inputs that some families make for each layer. Layers
that share keys and values are on one stage. The parts that a rank holds keep the names that they have in the whole model, so
checkpoints and exported weights are those of any layout. Where head and embedding are one weight, first and last stage hold a
copy each, and add up its gradient.

The schedules are those of ``torch.distributed.pipelining`` (1F1B; without gradients GPipe), which split tensors into equal
parts, one for each micro-batch. Here they split the numbers 0, 1, ... of the micro-batches; a stage looks up the inputs of a
number in a `Feed`: packed rows and, on the first stage, media. All micro-batches are filled up to one length, since the library
fixes the shapes that stages send.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from dataproto.errors import InvalidConfig
from dataproto.packing import PackedRows
from dataproto.vlm import MediaSpans, VLMFamily
from dataproto.vlm.costs import logit_flops
from dataproto.vlm.media import dense_levels
from workers.model.model_config import ModelConfig
from workers.model.packed_model import MediaPart, PackedVLM
from workers.model.patches import remove_submodule, replace_forward, replace_submodule, set_on_module
from workers.parallel.transform import Transform

TYPICAL_TOKENS, TYPICAL_LOGITS = 1024, 512
"""Of a row, for the split into stages: all tokens, and those of its response."""
TYPICAL_IMAGE = (1, 32, 32)
"""Patches of its image; 256 tokens in most families."""


@dataclass(frozen=True)
class StageCosts:
    """What a pass over a typical row costs, by part, e.g. in floating-point operations."""

    layers: Sequence[float]  # of the decoder, each
    tower: float = 0  # on the first stage
    head: float = 0  # on the last stage
    undivided: range = range(0)  # layers that one stage has to hold


def stage_costs(module: PackedVLM, options: ModelConfig) -> StageCosts:
    """The costs of a model's parts: only forward passes if nothing in it is trained, else with their backward passes.

    A backward pass costs two forward ones. It computes the logits again, and the layers too with full activation checkpointing.
    """
    trains = any(weight.requires_grad for weight in module.parameters())
    return typical_costs(module.family, module.model.config, options, trains, module.makes_logits)


def typical_costs(
    family: VLMFamily, config: Any, options: ModelConfig, trains: bool = True, makes_logits: bool = True
) -> StageCosts:
    """`stage_costs` of a model that need not exist."""
    text, tokens = config.get_text_config(), torch.tensor([TYPICAL_TOKENS])
    passes = 1 if not trains else 4 if options.activation_checkpointing == "full" else 3
    mixing = int(family.mixing_flops(text, tokens).sum()) // int(text.num_hidden_layers)
    weights = [family.layer_weights(text, layer) for layer in range(int(text.num_hidden_layers))]
    tower = 0
    if family.vision_tower is not None:
        tower = int(family.vision_flops(config, torch.tensor([TYPICAL_IMAGE])).sum())
    return StageCosts(
        [passes * (2 * each * TYPICAL_TOKENS + mixing) for each in weights],
        tower * (1 if options.freeze_vision else passes),
        TYPICAL_LOGITS * logit_flops(text) * (4 if trains else 1) * makes_logits,
        family.undivided_layers(config),
    )


def stage_layers(costs: StageCosts, stages: int, given: Sequence[int] | None = None) -> list[range]:
    """The decoder layers of each stage: ``given`` numbers of them, or so that the stage that costs most costs least.

    Of several such splits it is the one whose stages differ least. Ranks wait for the stage that costs most.

    >>> even, towered = StageCosts([10] * 6), StageCosts([10] * 6, tower=25, head=4)
    >>> stage_layers(even, 3), stage_layers(towered, 3)
    ([range(0, 2), range(2, 4), range(4, 6)], [range(0, 1), range(1, 4), range(4, 6)])
    >>> stage_layers(even, 2, given=[1, 5])
    [range(0, 1), range(1, 6)]
    >>> stage_layers(StageCosts([10] * 6, undivided=range(2, 6)), 3)
    [range(0, 1), range(1, 2), range(2, 6)]
    """
    layers, inside = len(costs.layers), costs.undivided[1:]
    shared = f"decoder layers {costs.undivided.start} to {costs.undivided.stop - 1} share keys and values"
    if stages > layers - len(inside):
        told = f"; {shared}, and have to be on one stage" if inside else ""
        raise InvalidConfig(
            f"layout.pp makes {stages} stages, but the model has {layers} decoder layers{told}: use at most "
            f"{layers - len(inside)} stages, and dp, sp or tp in addition"
        )
    if given is not None:
        if len(given) != stages or sum(given) != layers or min(given) < 1:
            raise InvalidConfig(
                f"pipeline_layers={tuple(given)}: must name at least one layer for each of {stages} stages, {layers} in all"
            )
        if cut := [end for end in accumulate(given) if end in inside]:
            raise InvalidConfig(
                f"pipeline_layers={tuple(given)}: a stage ends before layer {cut[0]}, but {shared}, and have to be on one stage: "
                f"begin it at layer {costs.undivided.start} or earlier"
            )
        return _ranges(list(accumulate(given)))
    most, _ = _best_split(costs, stages, max)
    _, ends = _best_split(costs, stages, lambda total, cost: total + cost**2 if cost <= most else math.inf)
    return _ranges(ends)


def _best_split(costs: StageCosts, stages: int, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least cost of all splits, joined stage by stage, and the bounds at which its stages end."""
    totals, layers = [0.0, *accumulate(costs.layers)], len(costs.layers)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # of the stages so far, by their last bound
    for stage in range(stages):
        outer = costs.tower * (stage == 0) + costs.head * (stage == stages - 1)
        best = {
            end: min(
                (join(before, totals[end] - totals[begin] + outer), (*ends, end))
                for begin, (before, ends) in best.items()
                if begin < end
            )
            for end in range(stage + 1, layers - (stages - stage - 1) + 1)
            if end not in costs.undivided[1:] and any(begin < end for begin in best)
        }
    return best[layers]


def _ranges(ends: Sequence[int]) -> list[range]:
    return [range(begin, end) for begin, end in zip((0, *ends), ends)]


class StageLayers(nn.ModuleList):
    """A rank's decoder layers under the names that they have in the whole model; with ``numbered`` iteration yields as many
    layers as the whole model has, of which the others do nothing.
    """

    def __init__(self, whole: nn.Module, kept: range, numbered: bool = False) -> None:
        super().__init__()
        for number in kept:
            self.add_module(str(number), whole.get_submodule(str(number)))
        self.kept, self.numbers = kept, range(len(list(whole.children()))) if numbered else kept

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.get_submodule(str(each)) if each in self.kept else NO_LAYER for each in self.numbers)

    def __getitem__(self, places: Any) -> Any:
        return list(self)[places]


class NoLayer(nn.Module):
    """Takes the place of a layer that another stage runs."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


NO_LAYER = NoLayer()


@dataclass(frozen=True)
class StagedForward:
    """`PackedVLM.forward` of the rank's stage."""

    module: PackedVLM
    bounds: tuple[range, ...]  # the layers of every stage
    stage: int  # this rank's

    def __call__(
        self,
        rows: PackedRows,
        media: MediaPart | None,
        spans: MediaSpans,
        entropy: bool = False,
        states: Tensor | None = None,
        deep: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        """The output of the stage.

        Args:
            states: ``(S * width,)`` from the stage before, of `width`; ``None`` for the first stage.
            deep: levels of deep features that the decoder adds, 0 if no micro-batch has media.
            dtype: of the states for the next stage.

        Returns:
            ``(S * width,)`` for the next stage, or what `PackedVLM.forward` returns.
        """
        module, family = self.module, self.module.family
        mine, windows = module.tokens.rows(rows, spans)
        here = self.bounds[self.stage]
        further = max(0, deep - here.stop)
        if states is None:
            features, places = module.media_features(media, windows, rows.input_ids.device)
            hidden, extras = module.merge(mine.input_ids, features, places)
            if features is None:
                beyond = hidden.new_zeros(further, *hidden.shape[1:])
            else:
                beyond = dense_levels(features[:, 1 + deep - further :], hidden.shape[1], places)
            inputs = family.layer_inputs(module.model, hidden, extras)
        else:
            hidden, levels, inputs = self._parts(states, deep)
            extras = family.dense_extras(levels) if len(levels) else {}
            beyond = levels[len(here) :]
        if inputs is not None:
            extras = {**extras, **family.layer_input_extras(inputs, here.start)}
        hidden = module.decode(hidden, extras, mine)
        if self.last:
            return module.finish(hidden, mine, entropy)
        sent = [hidden, beyond] if inputs is None else [hidden, beyond, inputs[len(here) :]]
        return torch.cat([each.to(dtype).flatten() for each in sent])

    @property
    def last(self) -> bool:
        """Whether it is the last stage, which computes log-probs and loss."""
        return self.stage == len(self.bounds) - 1

    def width(self, stage: int, deep: int) -> int:
        """Numbers of a token in a stage's input."""
        return sum(count * size for count, size in self._sizes(stage, deep))

    def _sizes(self, stage: int, deep: int) -> list[tuple[int, int]]:
        """What a token has in a stage's input, each as a count and a size: states, and of the layers from there on deep features
        and inputs of their own.
        """
        family, text = self.module.family, self.module.model.config.get_text_config()
        begin, width = self.bounds[stage].start, int(text.hidden_size)
        return [
            (1, width),
            (max(0, deep - begin), width),
            (self.bounds[-1].stop - begin, family.layer_input_size(text)),
        ]

    def _parts(self, states: Tensor, deep: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """States ``(1, S, H)``, deep features ``(D, S, H)`` and inputs of layers ``(layers, S, P)``, from a stage's input."""
        sizes = self._sizes(self.stage, deep)
        tokens = states.numel() // self.width(self.stage, deep)
        parts = states.split([count * tokens * size for count, size in sizes])
        hidden, levels, inputs = (
            part.view(count, tokens, size) for part, (count, size) in zip(parts, sizes, strict=True)
        )
        return hidden, levels, inputs if sizes[-1][1] else None


class Feed(Protocol):
    """The micro-batches of one call, by number."""

    count: int
    """How many micro-batches there are."""
    length: int
    """Packed tokens of the longest micro-batch."""
    has_media: bool
    """Whether any micro-batch runs the vision tower."""

    def inputs(self, number: int, media: bool) -> tuple[PackedRows, MediaPart | None, MediaSpans]:
        """The arguments of a forward pass over micro-batch ``number``, filled up to `length`; pixels only with ``media``."""

    def conclude(self, number: int, rows: PackedRows, scores: Tensor, entropies: Tensor | None) -> Tensor:
        """From the result of `PackedVLM.forward` to the number () that the backward pass starts from."""


def _loss(output: Tensor, number: Tensor) -> Tensor:
    """The last stage's output is the loss already."""
    return output.sum()


class _Stage(nn.Module):
    """The stage as the library calls it. The model is not its submodule, so that FSDP's own hooks do their work."""

    def __init__(self, feed: Feed, staged: StagedForward, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.feed, self.staged, self.options = feed, staged, dict(options)

    def forward(self, *states: Tensor, number: Tensor) -> Tensor:
        module: Any = self.staged.module
        inputs = self.feed.inputs(int(number), media=self.staged.stage == 0)
        out = module(*inputs, **self.options, states=states[0] if states else None)
        if not self.staged.last:
            return out
        return torch.stack([self.feed.conclude(int(number), inputs[0], *out)]).float()


class PipelineParallel(Transform):
    """The decoder layers, split over pp."""

    staged: StagedForward
    """This rank's stage; set by `apply`."""

    tied: bool
    """Whether this rank holds a weight that is both embedding and head; set by `apply`."""

    axes = ("pp",)

    def apply(self, module: PackedVLM) -> None:
        """Removes the layers and parts of other ranks' stages.

        Raises:
            InvalidConfig: the layers cannot be split into these stages.
        """
        options, model, family = self.options, module.model, module.family
        stage, whole = self.ranks.rank("pp"), model.get_submodule(family.decoder_layers)
        bounds = stage_layers(stage_costs(module, options), self.mesh.size(), options.pipeline_layers)
        replace_submodule(model, family.decoder_layers, StageLayers(whole, bounds[stage], family.numbered_layers))
        if family.layer_input_method:
            set_on_module(model.get_submodule(family.language_model), family.layer_input_method, _made_already)
        self.staged = StagedForward(module, tuple(bounds), stage)
        self.tied = _remove_outer_parts(module, first=stage == 0, last=self.staged.last)
        replace_forward(module, self.staged)

    def run(
        self, feed: Feed, device: torch.device, dtype: torch.dtype, entropy: bool = False, backward: bool = False
    ) -> None:
        """Passes over all micro-batches, with states in ``dtype`` between stages. Every rank of the pipeline calls it; those of
        the last stage call `Feed.conclude`.
        """
        # This takes 0.2 s, which only pipelines pay.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        if not feed.count:
            return
        staged, number, last = self.staged, self.staged.stage, self.staged.last
        module = staged.module
        deep = module.family.deep_layers(module.model.config) if feed.has_media else 0
        tokens = module.tokens.num_states(feed.length)  # that a rank of sp x tp holds
        into, out = (
            torch.empty(tokens * staged.width(at, deep), dtype=dtype, device="meta", requires_grad=backward)
            for at in (number, number + (not last))
        )
        stage = PipelineStage(
            _Stage(feed, staged, {"entropy": entropy, "deep": deep, "dtype": dtype}),
            number,
            len(staged.bounds),
            device,
            input_args=() if number == 0 else (into,),
            output_args=(torch.empty(1, device="meta", requires_grad=backward) if last else out,),
            group=self.norm_group(),
        )
        numbers = torch.arange(feed.count)
        kind = Schedule1F1B if backward else ScheduleGPipe
        schedule: Any = kind(stage, feed.count, loss_fn=_loss if backward else None, scale_grads=False)
        try:
            schedule.step(number=numbers, **({"target": numbers} if backward else {}))
        except RuntimeError as error:  # the library wraps the error of a stage
            raise error.__cause__ or error from None

    def norm_group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        return self.mesh.get_group()

    def repeated_parameters(self, module: PackedVLM) -> Sequence[nn.Parameter]:
        """This rank's copy of a weight that the first stage holds too."""
        return [_embedding_weight(module)] if self.tied and self.staged.stage else []

    def sum_gradients(self, module: PackedVLM) -> None:
        """Adds up the gradients of a weight that first and last stage hold."""
        gradient = _embedding_weight(module).grad if self.tied else None
        if gradient is None:  # of a frozen weight too
            return
        group, ranks = self.norm_group(), self.ranks
        mine: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        other = distributed.get_global_rank(group, 0 if self.staged.stage else ranks.size("pp") - 1)
        sent = mine.to(self.mesh.device_type).contiguous()  # offloaded ones are on the host
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


def _embedding_weight(module: PackedVLM) -> nn.Parameter:
    weight: Any = module.model.get_submodule(module.family.embedding).weight
    return weight


def _remove_outer_parts(module: PackedVLM, first: bool, last: bool) -> bool:
    """Takes out the parts before the layers unless the rank has the first stage, and those after them unless it has the last.

    Returns whether the rank holds a weight that is both embedding and head.
    """
    model, family = module.model, module.family
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    embedding, head = modules[family.embedding], modules.get(family.head)
    tied = head is not None and head.weight is embedding.weight
    if not first:
        if family.vision_tower is not None:
            _empty(model, (*family.vision_parts, *(set(family.repeated_layers) - {family.decoder_layers})))
        for path in family.layer_input_parts:
            remove_submodule(model, path)
        if not (tied and last):
            remove_submodule(model, family.embedding)
    if not last:
        replace_submodule(model, family.final_norm, nn.Identity())
        if head is not None:
            remove_submodule(model, family.head)
        for name, _ in list(module.named_children()):  # a critic's head, which reads the decoder's states
            if name != "model":
                replace_submodule(module, name, nn.Module())
    return bool(tied and (first or last))


def _empty(model: nn.Module, paths: Sequence[str]) -> None:
    """Puts empty modules in the places of parts; a path may lead through a part that was emptied before."""
    for path in paths:
        names = path.split(".")
        for end in range(1, len(names)):
            if ".".join(names[:end]) not in dict(model.named_modules(remove_duplicate=False)):
                replace_submodule(model, ".".join(names[:end]), nn.Module())
        replace_submodule(model, path, nn.Module())


def _made_already(embeddings: Tensor, inputs: Tensor) -> Tensor:
    """The inputs of layers, which the first stage has made."""
    return inputs
