"""Pipeline parallelism: the decoder layers are split into stages, each of which gets states from the one before it.

Only the first stage holds vision tower and embedding, so pixels go nowhere else; only the last one holds final norm and head,
and computes log-probs and loss. Stage i runs on rank ``i % pp``. Stages send each other, as one dense tensor, the states of the
tokens, deep vision features that later layers still add to them, and the inputs that some families make for each layer. Layers
that share keys and values are on one stage. The parts that a rank holds keep the names that they have in the whole model, so
checkpoints and exported weights are those of any layout. Where head and embedding are one weight, first and last stage hold a
copy each, and add up its gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import remove_submodule, replace_forward, replace_submodule, set_on_module
from workers.parallel.pipeline_stages import (
    Feed,
    PassOptions,
    StagedForward,
    StageLayers,
    run_stages,
    stage_costs,
    stage_layers,
)
from workers.parallel.transform import Transform
from workers.ranks.mesh import Ranks


class PipelineParallel(Transform):
    """The decoder layers, split over pp."""

    staged: StagedForward
    """This rank's stages; set by `apply`."""

    tied: bool
    """Whether this rank holds a weight that is both embedding and head; set by `apply`."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return ranks.size("pp") > 1

    def apply(self, module: PackedVLM) -> None:
        """Removes the layers and parts of other ranks' stages.

        Raises:
            InvalidConfig: the layers cannot be split into these stages.
        """
        ranks, options, mesh = self.ranks, self.options, self.mesh("pp")
        model, family, size = module.model, module.family, mesh.size()
        chunks = options.pipeline_chunks if options.pipeline_schedule == "interleaved" else 1
        whole = model.get_submodule(family.decoder_layers)
        bounds = stage_layers(stage_costs(module, options), size * chunks, options.pipeline_layers)
        numbers = range(ranks.rank("pp"), len(bounds), size)
        kept = [layer for number in numbers for layer in bounds[number]]
        layers = StageLayers(whole, kept, family.numbered_layers)
        replace_submodule(model, family.decoder_layers, layers)
        if family.layer_input_method:
            set_on_module(model.get_submodule(family.language_model), family.layer_input_method, _made_already)
        self.tied = _remove_outer_parts(module, first=numbers[0] == 0, last=numbers[-1] == len(bounds) - 1)
        norm = model.get_submodule(family.final_norm)
        replace_forward(norm, partial(_after_last_layers, norm.forward, layers, bounds[-1]))
        self.staged = StagedForward(module, tuple(bounds), numbers, layers)
        replace_forward(module, self.staged)

    def run(self, feed: Feed, device: torch.device, options: PassOptions) -> None:
        """Passes over all micro-batches; every rank of the pipeline calls it."""
        run_stages(self.staged, feed, self.norm_group(), device, options)

    def norm_group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        return self.mesh("pp").get_group()

    def repeated_parameters(self, module: PackedVLM) -> Sequence[nn.Parameter]:
        """This rank's copy of a weight that the first stage holds too."""
        return [_embedding_weight(module)] if self.tied and 0 not in self.staged.numbers else []

    def sum_gradients(self, module: PackedVLM) -> None:
        """Adds up the gradients of a weight that first and last stage hold."""
        gradient = _embedding_weight(module).grad if self.tied else None
        if gradient is None:  # of a frozen weight too
            return
        group, ranks = self.norm_group(), self.ranks
        mine: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        other = distributed.get_global_rank(group, ranks.size("pp") - 1 if 0 in self.staged.numbers else 0)
        sent = mine.to(self.mesh("pp").device_type).contiguous()  # offloaded ones are on the host
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
    embedding: Any = model.get_submodule(family.embedding)
    head: Any = _find(model, family.head)
    tied = head is not None and head.weight is embedding.weight
    if not first:
        if family.vision_tower is not None and family.vision_blocks is not None:
            _empty(model, (family.vision_tower, family.vision_blocks, *family.mergers))
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


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _empty(model: nn.Module, paths: Sequence[str]) -> None:
    """Puts empty modules in the places of parts; a path may lead through a part that was emptied before."""
    for path in paths:
        names = path.split(".")
        for end in range(1, len(names)):
            if _find(model, ".".join(names[:end])) is None:
                replace_submodule(model, ".".join(names[:end]), nn.Module())
        replace_submodule(model, path, nn.Module())


def _made_already(embeddings: Tensor, inputs: Tensor) -> Tensor:
    """The inputs of layers, which the first stage has made."""
    return inputs


def _after_last_layers(forward: Callable[[Tensor], Tensor], layers: StageLayers, last: range, hidden: Tensor) -> Tensor:
    """The final norm, where the layers that run are the last ones."""
    return forward(hidden) if layers.running == last else hidden
