"""The experts that the routers of a Hugging Face model choose."""

from typing import Any

import torch
from torch import Tensor

from dataproto.vlm import VLMFamily
from rollout.engine import expert_dtype


class RouteRecorder:
    """Keeps what the routers of a model have chosen in its last forward pass."""

    def __init__(self, model: Any, family: VLMFamily) -> None:
        self.dtype = expert_dtype(int(model.config.get_text_config().num_experts))
        self._chosen: list[Tensor] = []  # (rows * L, k) of each layer so far
        for router in family.routers(model):
            router.register_forward_hook(self._record)

    def _record(self, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2].to(self.dtype))

    def take(self, rows: int) -> Tensor:
        """The experts ``(rows, L, M, k)`` of the last forward pass over ``rows`` rows, on the host."""
        chosen, self._chosen = torch.stack(self._chosen, dim=1), []
        return chosen.cpu().unflatten(0, (rows, -1))
