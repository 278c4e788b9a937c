"""Parts of stored tensors, and of what conversions make of them, beside the same conversions of whole tensors."""

import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from helpers.examples import at_most
from workers.weights.stored_tensors import CheckpointFiles, Range
from workers.weights.weight_sources import Conversion, ConvertedWeight

CONVERTERS = {
    "experts": WeightConverter(
        ["experts.*.gate.weight", "experts.*.up.weight"],
        "experts.gate_up",
        [MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    "rows of experts": WeightConverter("experts.*.gate.weight", "experts.gate", [MergeModulelist(dim=1)]),
    "joined": WeightConverter(["q.weight", "k.weight", "v.weight"], "qkv.weight", [Concatenate(dim=0)]),
    "swapped": WeightConverter("wide.weight", "wide.weight", [Transpose(0, 1, check_dims=True)]),
    "always swapped": WeightConverter("wide.weight", "tall.weight", [Transpose(0, 1)]),
    "whole, cut": WeightConverter("wide.weight", ["a.weight", "b.weight", "c.weight"], [Chunk(dim=1)]),
    "whole, woven": WeightConverter("even.weight", "woven.weight", [Interleave(dim=0)]),
    "whole, woven and cut": WeightConverter("even.weight", ["a.weight", "b.weight"], [Interleave(dim=0), Chunk(dim=0)]),
}
TENSORS = {
    **{f"l.experts.{number}.{kind}.weight": torch.randn(3, 5) for number in range(4) for kind in ("gate", "up")},
    **{f"l.{name}.weight": torch.randn(rows, 4) for name, rows in (("q", 4), ("k", 2), ("v", 3))},
    "l.wide.weight": torch.randn(4, 7),
    "l.even.weight": torch.randn(8, 3),
    "l.number": torch.tensor(2.5),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored")
    save_file(TENSORS, path / "model.safetensors")
    return CheckpointFiles(str(path))


def converted(files, name):
    """The weights that a conversion makes, to be read by parts, and the whole ones that transformers makes."""
    converter, shapes = CONVERTERS[name], {"l.wide.weight": (7, 4)}
    collected, exact, first = {}, copy.deepcopy(converter), ""
    for stored in files.names:
        renamed, pattern = converter.rename_source_key(stored)
        if pattern is not None:
            first = renamed
            collected.setdefault(pattern, []).append(files.tensor(stored))
            exact.add_tensor(renamed, stored, pattern, lambda stored=stored: TENSORS[stored])
    shapes.setdefault(first, ())
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(shapes[name], device="meta"))
    wholes = exact.convert(first, model=model, config=None)
    return Conversion(first, converter, collected, shapes, None).stored(), wholes


def a_part(draw, shape) -> Range:
    bounds = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple(slice(*pair) for pair in bounds)


@pytest.mark.parametrize("name", CONVERTERS)
@settings(max_examples=at_most(20))
@given(data=st.data())
def test_a_part_of_what_a_conversion_makes_is_that_of_the_whole(files, name, data):
    with files.opened():
        with patch.object(CheckpointFiles, "read", side_effect=AssertionError("read before a part is asked for")):
            found, wholes = converted(files, name)
        assert found.keys() == wholes.keys()
        for weight, tensor in found.items():
            assert tensor.shape == tuple(wholes[weight].shape)
            part = a_part(data.draw, tensor.shape)
            assert torch.equal(tensor.read(part), wholes[weight][part])
            assert isinstance(tensor, ConvertedWeight) == name.startswith("whole")


def test_a_tensor_without_dimensions_is_read(files):
    with files.opened():
        assert float(files.tensor("l.number").read(())) == 2.5
