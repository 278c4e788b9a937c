"""Which rows of a pass have which adapter: set for the time of a pass, read by the linear layers of the model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dataproto.errors import InvalidConfig, RowCountMismatch
from dataproto.vlm import VLMFamily
from rollout.adapters.adapter import Adapter, AdapterConfig, adapted_layers
from rollout.adapters.low_rank import Groups, Segment, low_rank_linear, stacked
from rollout.sampling import project

Run = tuple[Adapter | None, int]
"""A number of tokens that follow each other, with their adapter; ``None`` is the model without one."""


@dataclass(frozen=True)
class Route:
    """The runs of a pass, adjacent ones of one adapter joined."""

    runs: tuple[Run, ...]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Route":
        """The same runs in the same order.

        >>> Route.of([(None, 2), (None, 3)]).runs
        ((None, 5),)
        """
        joined = ((adapter, sum(size for _, size in part)) for adapter, part in groupby(runs, key=lambda run: run[0]))
        return cls(tuple((adapter, size) for adapter, size in joined if size))

    def ends(self, device: torch.device) -> Tensor:
        """Where each run ends ``(G,)`` int32. Copied to the device once."""
        if device not in self._ends:
            sizes = torch.tensor([size for _, size in self.runs], dtype=torch.int32)
            self._ends[device] = sizes.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        return self._ends[device]

    def of_layer(self, name: str) -> tuple[list[Segment], list[Tensor]]:
        """The segments of a layer's rows, and the matrices that they need, each adapter's once."""
        segments, matrices, start = [], list[Tensor](), 0
        places: dict[Adapter, int] = {}
        for adapter, size in self.runs:
            pair = None if adapter is None else adapter.pairs.get(name)
            if adapter is None or pair is None:
                segments.append(Segment(start, start + size))
            else:
                if adapter not in places:
                    places[adapter] = len(places)
                    matrices += pair
                segments.append(Segment(start, start + size, adapter.config.scaling, places[adapter]))
            start += size
        return segments, matrices


class AdapterRouter:
    """Lets the linear layers of a frozen model's decoder, and its head, compute with the adapters of the rows.

    Outside of `routed` the model computes as before. The names of its parameters do not change.
    """

    def __init__(self, model: nn.Module, family: VLMFamily) -> None:
        """Takes over the linear layers of ``model``; one router a model. Raises `InvalidConfig` for logits with a soft cap.

        Each layer's ``forward`` is replaced, on the instance alone: a hook would get the output of the frozen product, and adding
        to that takes a copy of it. A module around the layer would change the names of its parameters.
        """
        if family.logit_cap(model.config) is not None:
            raise InvalidConfig(
                f"models of type {family.model_type} have a soft cap on their logits, which adapters by row do not compute"
            )
        self.model, self.family = model, family
        self._route: Route | None = None
        self._stacks: dict[str, tuple[tuple[Adapter | None, ...], Tensor, Tensor]] = {}  # of snapshots, by layer
        every = AdapterConfig(rank=1, mlp=family.experts is None, head=False)
        for name in adapted_layers(model, family, every):
            layer: Any = model.get_submodule(name)
            layer.forward = partial(self._linear, layer, name)  # of this instance; its class stays as it is

    @contextmanager
    def routed(self, runs: Sequence[Run]) -> Iterator[None]:
        """Within this context the tokens that each layer gets, flattened, have the adapters of ``runs``."""
        before, self._route = self._route, Route.of(runs)
        try:
            yield
        finally:
            self._route = before

    def _linear(self, layer: nn.Linear, name: str, x: Tensor) -> Tensor:
        segments, matrices = ([], []) if self._route is None else self._route.of_layer(name)
        if not matrices:
            return linear(x, layer.weight, layer.bias)
        _check_size(segments, x.numel() // x.shape[-1])
        groups = self._groups(name, segments, matrices, x) if x.is_cuda else None
        return low_rank_linear(x, layer.weight, layer.bias, segments, matrices, groups)

    def _groups(self, name: str, segments: Sequence[Segment], matrices: Sequence[Tensor], x: Tensor) -> Groups:
        """The matrices for grouped products. Those of snapshots are kept for the next tokens of the same rows."""
        route = self._route
        assert route is not None
        adapters = tuple(adapter for adapter, _ in route.runs)
        kept = self._stacks.get(name)
        if kept is None or kept[0] != adapters or kept[1].dtype != x.dtype:
            kept = (adapters, *stacked(segments, matrices, x.dtype))
            if not any(adapter.trained for adapter in adapters if adapter is not None):
                self._stacks[name] = kept
        return Groups(*kept[1:], route.ends(x.device))

    def logits(self, states: Tensor, runs: Sequence[Run]) -> Tensor:
        """Logits ``(n, V)`` float32 of states ``(n, H)`` with the adapters of ``runs``, without gradient."""
        weight = self.family.lm_head(self.model).weight
        segments, matrices = Route.of(runs).of_layer(self.family.head)
        _check_size(segments, len(states))
        logits = project(states, weight)
        for each in segments:
            if each.place is not None:
                down, up = matrices[2 * each.place : 2 * each.place + 2]
                add_head(logits[each.rows], states[each.rows], down, up, each.scaling)
        return logits


def add_head(logits: Tensor, states: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Adds an adapter of the head to ``logits (n, V)`` in place; returns ``states A^T`` ``(n, r)``, both in the logits' dtype."""
    inner = torch.mm(states.to(logits.dtype), down.t().to(logits.dtype))
    logits.addmm_(inner, up.t().to(logits.dtype), alpha=scaling)
    return inner


def _check_size(segments: Sequence[Segment], rows: int) -> None:
    if segments[-1].stop != rows:
        raise RowCountMismatch(f"the runs of adapters count {segments[-1].stop} tokens, but the layer got {rows}")
