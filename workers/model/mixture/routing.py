"""Which experts a token is sent to: those that the router chooses, or recorded ones, with the router's own weights.

An engine and a model that trains round differently, so that their routers choose other experts for some tokens. Routing replay
(arXiv:2510.11370) lets the model use the experts that the engine has recorded. The weight of an expert comes from the model's own
router in either case, so that gradients reach it.

Letters: S tokens, E experts, k choices, M layers with experts.
"""

from functools import partial
from typing import Any

from torch import Tensor

from dataproto.vlm import VLMFamily
from workers.model.mixture.grouped_experts import compute_grouped
from workers.model.patches import replace_forward


def use_packed_experts(model: Any, family: VLMFamily) -> tuple[int, int]:
    """Makes the experts of ``model`` compute by grouped products, and its decoder layers take the arguments of `RoutedLayer`.

    Returns M and k, both 0 for a model without experts.
    """
    names = family.expert_layers(model)
    if not names:
        return 0, 0
    routers: dict[str, tuple[PackedRouter, int]] = {}  # by layer
    for number, (name, gate) in enumerate(zip(names, family.routers(model), strict=True)):
        compute_grouped(model.get_submodule(name))
        router = PackedRouter(gate, family)
        replace_forward(gate, router)
        layer, _, _ = name.removeprefix(f"{family.decoder_layers}.").partition(".")
        routers[layer] = router, number
    for name, layer in model.get_submodule(family.decoder_layers).named_children():
        replace_forward(layer, RoutedLayer(layer.forward, *routers.get(name, (None, 0))))
    return len(names), family.experts_per_token(model.config.get_text_config())


class PackedRouter:
    """The forward of a router that may replay recorded choices, and that sends padding nowhere."""

    def __init__(self, router: Any, family: VLMFamily) -> None:
        self.forward, self.weights = router.forward, partial(family.expert_weights, router)
        self.use(None, None)

    def use(self, recorded: Tensor | None, routed: Tensor | None) -> None:
        """Takes recorded choices ``(S, k)``, and which tokens ``(S,)`` bool are no padding, for the next calls."""
        self.recorded, self.routed = recorded, routed

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(S, E)``, and the weights and numbers of the chosen experts ``(S, k)``, E for tokens that are not routed."""
        logits, weights, chosen = self.forward(hidden_states)
        if self.recorded is not None:
            chosen = self.recorded.long()
            weights = self.weights(logits, chosen)
        if self.routed is not None:
            chosen = chosen.masked_fill(~self.routed[:, None], logits.shape[-1])
        return logits, weights, chosen


class RoutedLayer:
    """The forward of a decoder layer, with what its router needs beside the states.

    The arguments come with each call, since the backward pass may compute a layer again after others have run.
    """

    def __init__(self, forward: Any, router: PackedRouter | None, number: int) -> None:
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
        router.use(None if routed_experts is None else routed_experts[:, self.number], routed)
        try:
            return self.forward(*args, **kwargs)
        finally:
            router.use(None, None)
