"""The slots of vLLM for the adapters that it computes with: written by a few calls in place of four for each matrix."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Slots = Sequence[Sequence[Tensor]]
"""For each matrix that vLLM has in one layer, the places ``(rows, columns)`` of every slot."""


class SlotWrites:
    """What vLLM would write into a slot, layer after layer: kept until `write`.

    On a device, a kernel for each of an adapter's many small matrices takes longer than they do.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        """Replaces the methods by which layers write slots, for those that copy whole matrices and nothing else."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
        from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

        self.drop()
        plain = BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora
        for layer in layers:
            if type(layer).set_lora in plain and layer.tp_size == 1:
                stacked = layer.lora_a_stacked, layer.lora_b_stacked
                downs, ups = ([slots.squeeze(1).unbind() for slots in each] for each in stacked)
                layer.reset_lora = partial(self._reset, downs, ups)
                layer.set_lora = partial(self._set, layer, downs, ups)

    def _reset(self, downs: Slots, ups: Slots, index: int) -> None:
        self._zeroed += [slots[index] for slots in (*downs, *ups)]

    def _set(self, layer: Any, downs: Slots, ups: Slots, index: int, lora_a: Any, lora_b: Any) -> None:
        if isinstance(lora_b, Tensor):
            lora_a, lora_b = [lora_a], [lora_b]
        elif len(lora_b) != len(ups):  # one matrix is for several
            lora_a, lora_b = layer.expand_packed_lora(lora_a, lora_b)
        for slots, matrix in zip((*downs, *ups), (*lora_a, *lora_b), strict=True):
            place = slots[index]
            if matrix is None or matrix.shape != place.shape:
                self._zeroed.append(place)
            if matrix is not None:
                if matrix.shape != place.shape:
                    place = place[: matrix.shape[0], : matrix.shape[1]]
                places, matrices = self._copied[place.is_contiguous()]
                places.append(place)
                matrices.append(matrix)

    def drop(self) -> None:
        """Forgets what is kept."""
        self._zeroed: list[Tensor] = []
        self._copied: dict[bool, tuple[list[Tensor], list[Tensor]]] = {True: ([], []), False: ([], [])}  # to, from

    def write(self) -> None:
        """Writes what is kept. Places with gaps are apart: one of them would make the others' copies slow."""
        zeroed, copied = self._zeroed, self._copied
        self.drop()  # also what cannot be written, which is of one adapter
        if zeroed:
            torch._foreach_zero_(zeroed)
        for places, matrices in copied.values():
            if places:
                torch._foreach_copy_(places, matrices, non_blocking=True)
