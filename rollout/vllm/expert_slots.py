"""The experts of every token in vLLM's KV cache, kept on the device under the slot of the token.

A token of a prefix that vLLM has cached is not computed again: its experts are where the request that computed it left them. So a
request finds those of all its tokens by its blocks, however they came into the cache. vLLM's own option
(``enable_return_routed_experts``) does the same in a model runner whose sampler cannot be replaced.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from rollout.engine import expert_dtype
from rollout.vllm.running_engine import attention_group, model_of


class ExpertSlots:
    """Records what the routers of a worker's model choose. It has to exist before CUDA graphs are captured."""

    def __init__(self, worker: Any) -> None:
        """Raises `InvalidConfig` if the kernels of this model do not tell what they choose."""
        runner = worker.model_runner
        whole = runner.model_config.hf_config
        config = whole.get_text_config()
        layers = routed_layers(model_of(worker))
        self.runner, self.layers = runner, len(layers)
        family = family_of(whole)
        self.tail = len(layers), family.experts_per_token(config)
        self.dtype = expert_dtype(family.expert_count(config))
        self.step = torch.zeros(runner.max_num_tokens, *self.tail, dtype=self.dtype, device=runner.device)
        self.slots = self.step[:0]
        self._seen: set[int] = set()
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._capture, number))

    def _capture(self, number: int, chosen: Tensor) -> None:
        """Takes the experts ``(N, k)`` of the current step's tokens in a layer; part of the graph where there is one."""
        self._seen.add(number)
        self.step[: len(chosen), number] = chosen

    @property
    def group(self) -> int:
        """The group of layers under whose slots experts are kept."""
        return attention_group(self.runner)

    def record(self, places: Tensor) -> None:
        """Puts the experts of the current step's tokens under their slots ``places (N,)``, without waiting for the device.

        Raises:
            InvalidConfig: a layer has not told what it chose.
        """
        if len(self._seen) < self.layers:
            raise InvalidConfig(
                "vLLM's kernel for experts does not tell which ones it chooses: turn routing replay off "
                "(--rollout.no-replay-routing)"
            )
        if not len(self.slots):
            cache = self.runner.kv_cache_config
            size = cache.num_blocks * cache.kv_cache_groups[self.group].kv_cache_spec.block_size
            self.slots = torch.zeros(size, *self.tail, dtype=self.dtype, device=self.step.device)
        self.slots.index_copy_(0, places.long(), self.step[: len(places)])

    def clear(self) -> None:
        """Frees the memory of the experts; `record` allocates it again."""
        self.slots = self.step[:0]

    def at(self, places: np.ndarray) -> Tensor:
        """The experts ``(n, M, k)``, on the host, of the tokens in these slots ``(n,)``."""
        return self.slots.index_select(0, torch.from_numpy(places).to(self.slots.device)).cpu()


def routed_layers(model: torch.nn.Module) -> list[Any]:
    """The modules with experts whose routers can be watched, in the order of the layers.

    Raises:
        InvalidConfig: there are none, or a kernel chooses experts by itself.
    """
    found = [module for module in model.modules() if hasattr(getattr(module, "router", None), "set_capture_fn")]
    layers: list[Any] = list({id(module.router): module for module in found}.values())
    methods = [getattr(layer, "_quant_method", None) or getattr(layer, "quant_method", None) for layer in layers]
    if not layers or any(getattr(method, "is_monolithic", False) for method in methods):
        raise InvalidConfig(
            "this version or kernel of vLLM does not tell which experts it chooses: turn routing replay off "
            "(--rollout.no-replay-routing)"
        )
    return layers
