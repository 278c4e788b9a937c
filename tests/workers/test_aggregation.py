import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import DataProtoError, InvalidConfig
from helpers.aggregated import aggregate
from workers.training.loss_sums import MODES, denominator, token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 9.0], [4.0, 4.0, 4.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 5) / 4),
        ("seq-mean-token-mean", (2 + 5) / 2),
        ("seq-mean-token-sum", (6 + 5) / 2),
        ("seq-mean-token-sum-norm", (6 / 3 + 5 / 3) / 2),
    ],
)
def test_hand_worked(mode, expected):
    assert aggregate(LOSS, MASK, mode).item() == pytest.approx(expected)


def test_max_length_replaces_the_width():
    assert aggregate(LOSS, MASK, "seq-mean-token-sum-norm", max_length=10).item() == pytest.approx((0.6 + 0.5) / 2)


def test_tokens_between_two_sampled_turns_do_not_count():
    mask = torch.tensor([[1, 0, 1]])
    assert aggregate(LOSS[:1], mask, "token-mean").item() == 2.0
    assert aggregate(LOSS[:1], mask, "seq-mean-token-mean").item() == 2.0


def naive(loss, mask, mode, max_length):
    rows = [[x for x, m in zip(r, k) if m] for r, k in zip(loss.tolist(), mask.tolist())]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(sum(row) / (max_length if mode.endswith("norm") else 1) for row in rows) / len(rows)


batches = st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.8, 1.0]))


def make(batch):
    rows, width, seed, density = batch
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return loss, torch.rand(rows, width, generator=generator) < density


@given(batches, st.sampled_from(MODES))
def test_equals_a_plain_loop(batch, mode):
    loss, mask = make(batch)
    assert aggregate(loss, mask, mode, max_length=11).item() == pytest.approx(naive(loss, mask, mode, 11), abs=1e-6)


@given(batches, st.sampled_from(MODES), st.data())
def test_parts_sum_to_the_whole_and_inert_rows_add_nothing(batch, mode, data):
    loss, mask = make(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(loss)))))
    cut = data.draw(st.integers(0, len(loss)))
    loss_parts = [loss[order[:cut]], torch.full((2, loss.shape[1]), torch.nan).double(), loss[order[cut:]]]
    mask_parts = [mask[order[:cut]], torch.zeros(2, loss.shape[1], dtype=torch.bool), mask[order[cut:]]]
    total = sum(denominator(part, mode) for part in mask_parts)
    assert total == denominator(mask, mode)
    parts = sum(aggregate(x, m, mode, total) for x, m in zip(loss_parts, mask_parts))
    assert parts.item() == pytest.approx(aggregate(loss, mask, mode).item(), abs=1e-6)


def test_narrower_parts_agree_once_the_length_is_given():
    total = denominator(MASK, "seq-mean-token-sum-norm")
    whole = aggregate(LOSS, MASK, "seq-mean-token-sum-norm", max_length=3)
    first = aggregate(LOSS[:1], MASK[:1], "seq-mean-token-sum-norm", total, max_length=3)
    second = aggregate(LOSS[1:, :1], MASK[1:, :1], "seq-mean-token-sum-norm", total, max_length=3)
    assert (first + second).item() == pytest.approx(whole.item())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_sampled_gives_zero_and_no_gradient(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    result = aggregate(loss, torch.zeros(2, 3), mode)
    result.backward()
    assert result.item() == 0.0
    assert torch.equal(loss.grad, torch.zeros(2, 3))
    assert aggregate(torch.zeros(0, 3), torch.zeros(0, 3), mode).item() == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_weights(mode):
    loss = LOSS.clone().requires_grad_()
    aggregate(loss, MASK, mode).backward()
    assert torch.equal(loss.grad, token_weights(MASK, mode))
    assert loss.grad[MASK == 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int8, torch.float32, torch.bfloat16])
def test_any_mask_dtype(dtype):
    weights = token_weights(MASK.to(dtype), "token-mean")
    assert weights.dtype == torch.float32
    assert torch.equal(weights, MASK / 4)


def test_a_low_precision_mask_counts_exactly():
    mask = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert denominator(mask, "token-mean").item() == 1000
    assert token_weights(mask, "seq-mean-token-mean")[0, 0].item() == pytest.approx(1 / 1000)


def test_errors_state_the_remedy():
    with pytest.raises(
        InvalidConfig, match="token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm"
    ):
        token_weights(MASK, "mean")
    with pytest.raises(DataProtoError, match="mean"):
        token_weights(MASK, "mean", total=4)
    with pytest.raises(InvalidConfig, match="max_length"):
        token_weights(MASK, "seq-mean-token-sum-norm", max_length=0)
