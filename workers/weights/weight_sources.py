"""Which stored tensors make up each weight of a model: transformers' table of conversions, applied to parts of tensors."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily
from workers.weights.stored_tensors import CheckpointFiles, Joined, Range, Stacked, StoredTensor, Swapped, whole

Collected = dict[str, list[StoredTensor]]
"""Stored tensors of one conversion, by the pattern that their names match."""


@dataclass(frozen=True)
class WeightSources:
    """Where each weight of a model comes from.

    ``stored`` has the names of the model; ``absent`` are weights of the model that the checkpoint lacks, and ``unexpected``
    tensors of the checkpoint that the model lacks.
    """

    stored: Mapping[str, StoredTensor]
    absent: tuple[str, ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, family: VLMFamily, files: CheckpointFiles) -> "WeightSources":
        """Of a whole model, which may be on the meta device.

        Raises:
            CheckpointError: a tensor has another shape than the model's weight.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        with files.opened():
            conversions, unexpected = _group_by_weight(model, shapes, files)
            stored: dict[str, StoredTensor] = {}
            for first, (converter, collected) in conversions.items():
                stored |= Conversion(first, converter, collected, shapes, model.config).stored()
        for name, tensor in stored.items():
            if name in shapes and tensor.shape != shapes[name]:
                raise CheckpointError(
                    f"{files.source} is of another model: its weight {name} is {tensor.shape}, and the one that its config asks "
                    f"for is {shapes[name]}"
                )
        kept = {name: tensor for name, tensor in stored.items() if name in shapes}
        absent = tuple(name for name in shapes if name not in kept)
        return cls(kept, absent, tuple(name for name in unexpected if not _is_known(name, model, family)))


def _group_by_weight(
    model: PreTrainedModel, shapes: Mapping[str, Any], files: CheckpointFiles
) -> tuple[dict[str, tuple[WeightConverter | None, Collected]], list[str]]:
    """Conversion and stored tensors of each weight, or of the first of several that are stored as one; and names that fit none.

    As in ``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(shapes, True)
    grouped: dict[str, tuple[WeightConverter | None, Collected]] = {}
    unexpected = []
    for name in sorted(files.names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in shapes and name in shapes:
            renamed, pattern = rename_source_key(name, [], [], prefix, known)
        if renamed not in shapes:
            unexpected.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        collected = grouped.setdefault(renamed, (converter, {}))[1]
        collected.setdefault(pattern or name, []).append(files.tensor(name))
    return grouped, unexpected


def _merge(operation: Any, made: Collected, converter: WeightConverter, shape: Sequence[int]) -> Collected:
    return {
        operation.get_target_pattern(len(made), name, converter.target_patterns): [
            Stacked(tuple(tensors), operation.dim)
        ]
        for name, tensors in made.items()
    }


def _join(operation: Any, made: Collected, converter: WeightConverter, shape: Sequence[int]) -> Collected:
    tensors = [tensor for pattern in converter.source_patterns for tensor in made.get(pattern, ())]
    return {operation.get_target_pattern(converter.target_patterns): [Joined(tuple(tensors), operation.dim)]}


def _swap(operation: Any, made: Collected, converter: WeightConverter, shape: Sequence[int]) -> Collected:
    (tensors,) = made.values()
    name = operation.get_target_pattern(made, converter.source_patterns, converter.target_patterns)
    if operation.check_dims and tensors[0].shape == tuple(shape):
        return {name: tensors[:1]}
    return {name: [Swapped(tensors[0], (operation.dim0, operation.dim1))]}


_OPERATIONS: dict[type, Callable[..., Collected]] = {MergeModulelist: _merge, Concatenate: _join, Transpose: _swap}
"""The operations that are applied to parts: those of large weights, such as experts."""


@dataclass(frozen=True)
class Conversion:
    """What is stored for a weight, or for several that are stored as one, and how they are made of it.

    ``first`` is the name of the first weight, and ``converter`` transformers' ``WeightConverter``; ``None`` where the weight is
    stored as it is.
    """

    first: str
    converter: Any
    collected: Collected
    shapes: Mapping[str, tuple[int, ...]]
    config: Any

    def stored(self) -> dict[str, StoredTensor]:
        """The weights by name."""
        first, converter, made = self.first, self.converter, self.collected
        if converter is None:
            return {first: next(iter(made.values()))[0]}
        if not all(type(operation) in _OPERATIONS for operation in converter.operations):
            empty = self.convert(lambda tensor: torch.empty(tensor.shape, device="meta"))
            return {name: ConvertedWeight(self, name, tuple(weight.shape)) for name, weight in empty.items()}
        for operation in converter.operations:
            made = _OPERATIONS[type(operation)](operation, made, converter, self.shapes[first])
        full = first.replace("*.", "0.")
        inside = next((pattern for pattern in made if pattern in full), None)
        if inside is None:
            return {name: tensors[0] for name, tensors in made.items()}
        before, _, after = full.partition(inside)
        return {before + pattern + after: tensors[0] for pattern, tensors in made.items()}

    def convert(self, read: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        """The weights by name, by transformers' own code, of whole tensors that ``read`` gives."""
        converter = copy.deepcopy(self.converter)
        for pattern, tensors in self.collected.items():
            for tensor in tensors:
                future: Any = partial(read, tensor)
                converter.add_tensor(self.first, pattern, pattern, future)
        made = converter.convert(self.first, model=self, config=self.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def get_parameter(self, name: str) -> Tensor:
        """What an operation asks of a model: a tensor with the shape of a weight."""
        return torch.empty(self.shapes[name], device="meta")


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight that a `Conversion` makes of whole tensors; to read any part of it reads all that is stored for the conversion."""

    conversion: Conversion
    name: str
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for each in self.conversion.collected.values() for tensor in each for name in tensor.names)

    def read(self, part: Range) -> Tensor:
        return self.conversion.convert(lambda tensor: tensor.read(whole(tensor.shape)))[self.name][part]


def _is_known(name: str, model: PreTrainedModel, family: VLMFamily) -> bool:
    """Whether a tensor that the model lacks belongs in its checkpoints all the same."""
    ignored = [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    return any(re.search(pattern, name) for pattern in ignored) or family.is_unused(name)
