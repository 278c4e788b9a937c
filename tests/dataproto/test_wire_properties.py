"""Whatever stands in a batch comes back from every channel, and rows share what they shared."""

import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto import DataProto, RaggedTensor, shared_blobs
from dataproto.tensordict_utils import same_value
from helpers.examples import at_most

SHELF: list[bytes] = []


class Shelf:
    def put(self, buffer: np.ndarray) -> int:
        SHELF.append(buffer.tobytes())
        return len(SHELF) - 1

    def get(self, ref: int) -> bytes:
        return SHELF[ref]


def tensor(seed: int, size: int) -> torch.Tensor:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 9, (size, 2))).to(kinds[seed % len(kinds)])


def picture(seed: int, size: int) -> Image.Image:
    mode = ["RGB", "L", "P", "LA", "1", "I;16"][seed % 6]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size + 1, 7, 3), dtype=np.uint8)).convert(mode)


SEEDS = st.integers(0, 30), st.sampled_from([0, 1, 3, 200])
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.builds(tensor, *SEEDS),
    st.builds(picture, *SEEDS),
    st.builds(lambda seed, size: tensor(seed, size)[::2], *SEEDS),
    st.builds(lambda seed, size: np.random.default_rng(seed).random((size, 3)).astype("f2"), *SEEDS),
    st.builds(lambda seed, size: RaggedTensor(tensor(seed, size), [size])[[0, 0]], *SEEDS),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def channels(value: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    SHELF.clear()
    with shared_blobs(Shelf()):
        stored = pickle.dumps(value)
    received = [pickle.loads(text, buffers=[bytes(buffer) for buffer in buffers]), pickle.loads(stored)]
    return received + [pickle.loads(pickle.dumps(value, protocol=protocol)) for protocol in (4, 5)]


@settings(max_examples=at_most(60))
@given(st.lists(TREES, min_size=1, max_size=4), st.data())
def test_trees(rows: list[Any], draw: st.DataObject) -> None:
    order = draw.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    data = DataProto.from_dict({"n": torch.tensor(order)})
    column = np.empty(len(order), dtype=object)
    column[:] = [{"row": rows[number]} for number in order]
    data["o"] = column
    for back in [*channels(data), data.writable()]:
        assert same_value(back["n"], data["n"])
        assert same_value(back["o"], data["o"])
        for one, first in enumerate(order):
            for other, second in enumerate(order):
                if first == second and isinstance(rows[first], torch.Tensor | np.ndarray | Image.Image | dict | list):
                    assert back["o"][one]["row"] is back["o"][other]["row"]
