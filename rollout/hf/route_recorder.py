"""The experts that the routers of a Hugging Face model choose."""

from typing import Any

import torch
from torch import Tensor

from dataproto.vlm import VLMFamily
from rollout.engine import expert_dtype


class RouteRecorder:
    """Keeps what the routers of a model choose from `begin` to `take`."""

    def __init__(self, model: Any, family: VLMFamily) -> None:
        text = model.config.get_text_config()
        self.dtype = expert_dtype(family.expert_count(text))
        self._chosen: list[Tensor] = []  # (rows * L, k) of each layer, pass after pass
        routers = family.routers(model)
        self._layers, self._choices = len(routers), family.experts_per_token(text)
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2].to(self.dtype))

    def begin(self) -> None:
        """Forgets what a pass that was interrupted has left."""
        self._chosen = []

    @property
    def nothing(self) -> Tensor:
        """The experts ``(0, M, k)`` of no token."""
        return torch.zeros(0, self._layers, self._choices, dtype=self.dtype)

    def take(self, rows: int) -> Tensor:
        """The experts ``(rows, L, M, k)`` of all tokens that the ``rows`` rows have read, on the host.

        A long prompt is read in several forward passes.
        """
        chosen, self._chosen = self._chosen, []
        passes = [
            torch.stack(chosen[first : first + self._layers], dim=1) for first in range(0, len(chosen), self._layers)
        ]
        return torch.cat([each.unflatten(0, (rows, -1)) for each in passes], dim=1).cpu()
