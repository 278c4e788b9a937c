"""Mixtures of experts over packed tokens: what the experts compute, and which of them a token is sent to.

Experts are computed by two grouped matrix products: each token once for each expert that it is sent to. The pairs of a token and
an expert are sorted by expert, once; a grouped product multiplies each run of rows with the weights of its expert. All sizes are
known on the host, so that it never waits for the device. A pair with an expert that is not there, of padding or of another rank,
is sorted to the end, where nothing is computed for it.

A token is sent to the experts that the router chooses, or to recorded ones. An engine and a model that trains round differently,
so that their routers choose other experts for some tokens. Routing replay (arXiv:2510.11370) lets the model use the experts that
the engine has recorded. The weight of an expert comes from the model's own router in either case, so that gradients reach it.

Letters: N (or S) tokens, k choices of each, E experts, M layers with experts, H hidden size, F width of an expert.
"""

from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import transformers.integrations.moe  # noqa: F401 - registers the operator of the loop over experts
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from dataproto.vlm import VLMFamily
from workers.model.patches import replace_forward, set_on_module
from workers.model.precision import in_autocast_dtype


def fused_module(experts: Any) -> Any:
    """The module of transformers in what adapters or a split have put in its place, which call it as ``compute[0]``."""
    while hasattr(experts, "compute"):
        experts = experts.compute[0]
    return experts


def grouped_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a module with ``gate_up_proj (E, 2 F, H)``, ``down_proj (E, H, F)`` and ``act_fn``. As a method of each
    module, and not an object of its own, all layers share one compiled code.
    """
    weights = experts.gate_up_proj, experts.down_proj
    return grouped_experts(hidden_states, top_k_index, top_k_weights, *weights, experts.act_fn)


def grouped_experts(
    hidden: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Any
) -> Tensor:
    """The outputs ``(N, H)`` of the chosen experts for each token, weighted and summed.

    Args:
        hidden: ``(N, H)``.
        chosen: ``(N, k)`` int64; a number of E or more computes nothing and adds zero.
        weights: ``(N, k)``.
        gate_up: ``(E, 2 F, H)``, the gate's rows first; down ``(E, H, F)``.
        activation: of the gate.

    >>> one = torch.ones(1, 1)
    >>> doubled, halved = torch.tensor([[[2.0]] * 2, [[0.5]] * 2]), torch.ones(2, 1, 1)
    >>> grouped_experts(one, torch.tensor([[1, 2]]), torch.tensor([[1.0, 3.0]]), doubled, halved, nn.Identity())
    tensor([[0.2500]])
    """
    pairs = SortedPairs.of(chosen, len(gate_up))
    tokens = cast(Tensor, _Spread.apply(in_autocast_dtype(hidden), *pairs))
    gate, up = grouped_linear(tokens, gate_up, pairs.ends).chunk(2, dim=-1)
    made = grouped_linear(activation(gate) * up, down, pairs.ends)
    returned = cast(Tensor, _Collect.apply(made, *pairs))  # (N, k, H)
    return (returned * weights[..., None]).sum(1).to(hidden.dtype)


class SortedPairs(NamedTuple):
    """The N k pairs of a token and an expert, by expert."""

    order: Tensor  # (N k,) the pair at each place
    places: Tensor  # (N k,) the place of each pair
    there: Tensor  # (N, k) bool: pairs whose expert is there
    ends: Tensor  # (E,) int32, the place after the pairs of each expert

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "SortedPairs":
        """The pairs of ``chosen (N, k)``.

        >>> pairs = SortedPairs.of(torch.tensor([[1, 0], [2, 1]]), experts=2)
        >>> pairs.order.tolist(), pairs.ends.tolist()
        ([1, 0, 3, 2], [1, 3])
        """
        numbers, order = chosen.flatten().int().sort(stable=True)
        every = torch.arange(experts, device=chosen.device, dtype=torch.int32)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=chosen.device))
        return cls(order, places, chosen < experts, ends)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``(n, out)`` of rows ``x (n, in)`` that are sorted by expert, with ``weight (E, out, in)``; see `SortedPairs.ends`.

    Rows after the last end are not computed: their values, and those of their gradients, are arbitrary. Widths that are no
    multiple of 16 bytes, and dtypes other than bfloat16 under torch.compile, take a loop over experts that waits for the device.
    """
    into = in_autocast_dtype(weight).transpose(-2, -1)
    rows = x.to(into.dtype)
    aligned = all(size * into.element_size() % 16 == 0 for size in into.shape[1:])
    if not aligned or (torch.compiler.is_compiling() and into.dtype != torch.bfloat16):
        return cast(Tensor, torch.ops.transformers.grouped_mm_fallback(rows, into, ends))
    return grouped_mm(rows, into, offs=ends)


class _Spread(torch.autograd.Function):
    """From tokens ``(N, H)`` to the rows ``(N k, H)`` of their pairs; a token's gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, there: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(places, there)
        return x.index_select(0, order // there.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places, there = ctx.saved_tensors
        return _by_token(gradient, places, there).sum(1), None, None, None, None


class _Collect(torch.autograd.Function):
    """From the rows ``(N k, H)`` of pairs to ``(N, k, H)``, zero for pairs whose expert is not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, there: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _by_token(x, places, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradient.flatten(0, 1).index_select(0, order), None, None, None, None


def _by_token(x: Tensor, places: Tensor, there: Tensor) -> Tensor:
    return x.index_select(0, places).unflatten(0, there.shape).masked_fill(~there[..., None], 0.0)


def use_packed_experts(model: Any, family: VLMFamily) -> tuple[int, int]:
    """Makes the experts of ``model`` compute by grouped products, and its decoder layers take the arguments of `RoutedLayer`.

    Returns M and k, both 0 for a model without experts.
    """
    names = family.expert_layers(model)
    if not names:
        return 0, 0
    routers: dict[str, tuple[nn.Module, int]] = {}  # by layer
    for number, (name, gate) in enumerate(zip(names, family.routers(model), strict=True)):
        fused = fused_module(model.get_submodule(name))
        replace_forward(fused, MethodType(grouped_forward, fused))
        pack_router(gate, family)
        layer, _, _ = name.removeprefix(f"{family.decoder_layers}.").partition(".")
        routers[layer] = gate, number
    for name, layer in model.get_submodule(family.decoder_layers).named_children():
        replace_forward(layer, RoutedLayer(layer.forward, *routers.get(name, (None, 0))))
    return len(names), family.experts_per_token(model.config.get_text_config())


def pack_router(router: nn.Module, family: VLMFamily) -> None:
    """Makes a router compute by `packed_router`."""
    set_on_module(router, "family", family)
    use_routes(router, None, None)
    replace_forward(router, MethodType(packed_router, router))


def packed_router(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of a router that may replay recorded choices, and that sends padding nowhere. As a method of each router, and
    not an object of its own, all layers share one compiled code.

    Returns logits ``(S, E)``, and the weights and numbers of the chosen experts ``(S, k)``, E for tokens that are not routed.
    """
    logits, weights, chosen = type(router).forward(router, hidden_states)
    if router.recorded is not None:
        chosen = router.recorded.long()
        weights = router.family.expert_weights(router, logits, chosen)
    if router.routed is not None:
        chosen = chosen.masked_fill(~router.routed[:, None], logits.shape[-1])
    return logits, weights, chosen


def use_routes(router: nn.Module, recorded: Tensor | None, routed: Tensor | None) -> None:
    """Takes recorded choices ``(S, k)``, and which tokens ``(S,)`` bool are no padding, for the next calls."""
    set_on_module(router, "recorded", recorded)
    set_on_module(router, "routed", routed)


class RoutedLayer:
    """The forward of a decoder layer, with what its router needs in addition to the states.

    The arguments come with each call, since the backward pass may compute a layer again after others have run.
    """

    def __init__(self, forward: Any, router: nn.Module | None, number: int) -> None:
        """``number``: of the layer among those with experts; a dense layer has no ``router``."""
        self.forward, self.router, self.number = forward, router, number

    def __call__(
        self, *args: Any, routed_experts: Tensor | None = None, routed: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """The layer's output.

        Args:
            routed_experts: ``(S, M, k)`` experts to use; without them the router chooses.
            routed: ``(S,)`` bool, tokens that are no padding; without it all tokens.
        """
        router = self.router
        if router is None:
            return self.forward(*args, **kwargs)
        use_routes(router, None if routed_experts is None else routed_experts[:, self.number], routed)
        try:
            return self.forward(*args, **kwargs)
        finally:
            use_routes(router, None, None)
