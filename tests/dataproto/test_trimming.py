"""Padded columns go to other processes without the padding of their rows, and arrive equal to the last bit."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto import DataProto, shared_blobs
from dataproto.serialization.leaves import tensor_bytes, trim, untrim
from helpers.examples import at_most
from workers.training.loss_sums import Updated

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


STORED: list[bytes] = []


class Store:
    """A store in this process; what is pickled of it is its name."""

    def put(self, buffer: np.ndarray) -> int:
        STORED.append(buffer.tobytes())
        return len(STORED) - 1

    def get(self, ref: int) -> bytes:
        return STORED[ref]


def message(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """What is sent to another process: the text and its buffers."""
    buffers: list[pickle.PickleBuffer] = []
    with shared_blobs(Store()):
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def sent(value: Any) -> tuple[Any, int]:
    """The value as it arrives, and the bytes of the message."""
    text, buffers = message(value)
    raw = [buffer.raw().tobytes() for buffer in buffers]
    return pickle.loads(text, buffers=raw), len(text) + sum(map(len, raw))


def addresses(buffers: list[pickle.PickleBuffer]) -> list[int]:
    return [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers]


def column(dtype: torch.dtype, shape: tuple[int, ...], left: list[int], right: list[int], seed: int) -> torch.Tensor:
    """Random bits between runs of one random element; ``left`` and ``right`` elements of each row are padding."""
    noise = np.random.default_rng(seed)
    bits = torch.from_numpy(noise.integers(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype="u1"))
    made = bits.view(dtype).view(shape)
    for row, before, behind in zip(made.view(-1, shape[-1]), left * shape[0], right * shape[0], strict=False):
        row[:before] = row[0].clone()
        row[shape[-1] - behind :] = row[-1].clone()
    return made


@given(st.sampled_from(DTYPES), st.sampled_from([(40, 300), (300, 70), (9, 4, 520)]), st.data())
@settings(max_examples=at_most(60), deadline=None)
def test_any_column_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], draw: st.DataObject) -> None:
    """Padding on both sides, rows that are all padding, rows without any, infinite and undefined numbers."""
    widths = st.lists(st.integers(0, shape[-1]), min_size=7, max_size=7)
    data = DataProto.from_dict(
        {"x": column(dtype, shape, draw.draw(widths), draw.draw(widths), draw.draw(st.integers(0, 99)))}
    )
    back, _ = sent(data)
    with shared_blobs(Store()):
        in_band = pickle.loads(pickle.dumps(data, protocol=4))
    for found in (back["x"], in_band["x"]):
        assert found.dtype == dtype
        assert found.shape == shape
        assert torch.equal(tensor_bytes(found), tensor_bytes(data["x"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_stays_at_home(dtype: torch.dtype) -> None:
    """A quarter of the elements is not padding; what is on top are the runs, of two numbers and four elements a row."""
    data = DataProto.from_dict({"x": column(dtype, (256, 400), [100], [200], seed=1)})
    _, size = sent(data)
    whole = 256 * 400 * dtype.itemsize
    expected = whole if dtype.itemsize == 16 else whole // 4 + 256 * (8 + 4 * dtype.itemsize)
    assert expected - 256 * 8 * dtype.itemsize <= size <= expected + 1500


def rollout_columns(lengths: torch.Tensor, prompts: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """The columns of rollouts with left-padded prompts and right-padded responses of these lengths."""
    noise, rows, longest = torch.Generator().manual_seed(0), len(lengths), int(prompts.max())
    response = torch.arange(width) < lengths[:, None]
    attended = torch.cat([torch.arange(longest) >= longest - prompts[:, None], response], dim=1)
    text = torch.where(attended[:, :longest], attended[:, :longest].cumsum(1) - 1, 0)
    positions = torch.cat([text, text[:, -1:] + torch.arange(1, width + 1)], dim=1)  # they go on after the response
    ids = torch.randint(5, 1000, attended.shape, generator=noise) * attended
    holes = response & (torch.rand(rows, width, generator=noise) < 0.9)
    return {
        "prompts": ids[:, :longest],
        "responses": ids[:, longest:],
        "input_ids": ids,
        "attention_mask": attended.long(),
        "position_ids": positions[:, None].repeat(1, 4, 1),
        "response_mask": holes.long(),
        "old_log_probs": torch.randn(rows, width, generator=noise).where(response, 0.0),
        "advantages": torch.randn(rows, 1, generator=noise) * holes.float(),  # negative zeros too
    }


def test_a_batch_of_rollouts_is_as_large_as_its_tokens() -> None:
    """Left-padded prompts, masks with holes, a row without a response, and positions that go on after the responses."""
    lengths = torch.tensor([0, 3, 900, 40, 7, 120, 60, 1000]).repeat(4)
    data = DataProto.from_dict(rollout_columns(lengths, torch.tensor([30, 9, 1, 30, 20, 14, 5, 30]).repeat(4), 1000))
    back, size = sent(data)
    for name, value in data.batch.items():
        assert torch.equal(tensor_bytes(back[name]), tensor_bytes(value)), name
    columns = [value.nbytes for name, value in data.batch.items() if name != "position_ids"]
    assert size < 0.31 * sum(columns)  # positions are runs, of which next to nothing is sent
    assert lengths.float().mean() > 0.26 * 1000
    back["position_ids"][0, 0] = 5  # it may be written
    later, _ = sent(back[1:3])
    assert torch.equal(later["position_ids"], data["position_ids"][1:3])


@pytest.mark.parametrize("padding", [0, 60, 140])
def test_columns_with_little_padding_are_handed_over(padding: int) -> None:
    """Of rows of 300: buffers are the columns' own memory, of which nothing is copied."""
    columns = {name: column(torch.int64, (300, 300), [0], [padding], seed=seed) for seed, name in enumerate("abc")}
    _, buffers = message(DataProto.from_dict(columns))
    assert addresses(buffers) == [each.data_ptr() for each in columns.values()]


def test_pickle_elsewhere_copies_nothing() -> None:
    """Only messages to other processes are searched for padding: a pickle's buffers are the columns' own memory."""
    columns = {"all padding": torch.zeros(300, 300), "half": column(torch.float32, (300, 300), [0], [200], seed=0)}
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(DataProto.from_dict(columns), protocol=5, buffer_callback=buffers.append)
    assert addresses(buffers) == [each.data_ptr() for each in columns.values()]
    back = pickle.loads(text, buffers=buffers)
    assert all(torch.equal(tensor_bytes(back[name]), tensor_bytes(each)) for name, each in columns.items())


def test_padding_that_is_not_constant_arrives_as_it_was() -> None:
    """A stray number deep in the padding, in a few rows or in all, on either side; and rows that differ in everything."""
    padded = column(torch.int32, (300, 400), [100], [200], seed=3)
    padded[5, 50], padded[7, 399], padded[9, 201], padded[11, 0] = 1, 2, 3, 4
    back, size = sent(DataProto.from_dict({"x": padded}))
    assert torch.equal(back["x"], padded)
    assert size < 0.35 * padded.nbytes
    padded[:, 30] += 1
    padded[:, 370] += 1
    back, size = sent(DataProto.from_dict({"x": padded}))
    assert torch.equal(back["x"], padded)
    assert size > padded.nbytes


def test_gradients_and_scores_of_an_update() -> None:
    """A leaf that wants gradients still does; an update's scores are a column too."""
    padded = torch.zeros(200, 500)
    padded[:, :20] = torch.randn(200, 20)
    back, size = sent(DataProto.from_dict({"x": padded.clone().requires_grad_()}))
    assert back["x"].requires_grad
    assert torch.equal(back["x"], padded)
    assert size < 0.1 * padded.nbytes
    update, size = sent(Updated({"actor/loss": 1.0}, padded, np.arange(200)))
    assert torch.equal(update.scores, padded)
    assert update.metrics == {"actor/loss": 1.0}
    assert update.rows.tolist() == list(range(200))
    assert size < 0.1 * padded.nbytes


@pytest.mark.parametrize(
    ("row", "bounds"),
    [
        ([0] * 64, (64, 64)),
        ([*range(64)], (64, 64)),
        ([0] * 60 + [7] * 4, (60, 60)),
        ([3, 1, 4, 1, 5] + [2] * 59, (2, 5)),
        ([0] * 50 + [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], (50, 62)),
    ],
)
def test_bounds(row: list[int], bounds: tuple[int, int]) -> None:
    rows = np.tile(np.array(row, dtype=np.int64), (200, 1))
    found = trim(rows.reshape(-1).view(np.uint8), rows.shape, 8)
    assert found is not None
    runs, inner = found
    assert runs.bounds[7].tolist() == list(bounds)
    assert np.array_equal(untrim(runs, inner, rows.shape).view(np.int64).reshape(rows.shape), rows)
