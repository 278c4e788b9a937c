"""Which rows go where, against naive loops and brute force."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig, InvalidRow, RowCountMismatch
from dataproto.planning import balance, cut_minibatches, first_fit_decreasing, split_by_tokens
from helpers.examples import at_most


def rows_of(parts):
    """All rows in the order of the parts; slices may be empty."""
    return [row for part in parts for row in range(part.start, part.stop)]


# Contiguous parts


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 50))
def test_token_budgets_hold_and_every_row_appears_once_in_order(lengths, budget):
    parts = split_by_tokens(lengths, budget)
    assert rows_of(parts) == list(range(len(lengths)))
    for part in parts:
        assert sum(lengths[part]) <= budget or part.stop - part.start == 1
    for part, following in zip(parts, parts[1:], strict=False):  # greedy: the next row would not have fitted
        assert sum(lengths[part]) + lengths[following.start] > budget


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(1, 80))
def test_the_first_row_of_a_part_counts_what_it_shares_otherwise(rows, budget):
    lengths, lead = [tokens for tokens, _ in rows], [more for _, more in rows]
    expected, start = [], 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or sum(lengths[start : row + 1]) + lead[start] > budget:
            expected.append(slice(start, row))
            start = row
    assert split_by_tokens(torch.tensor(lengths), budget, np.array(lead)) == expected


# Parts in any order


def makespan(costs, parts):
    return max((sum(costs[row] for row in part) for part in parts), default=0)


@settings(max_examples=at_most(60))
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 3))
def test_parts_are_within_grahams_bound_of_brute_force(costs, count):
    parts = balance(costs, count)
    assert len(parts) == count
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(costs)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == part) for part in range(count))
        for owners in product(range(count), repeat=len(costs))
    )
    assert best <= makespan(costs, parts) <= best * (4 / 3 - 1 / (3 * count)) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abcdefg")), max_size=40), st.integers(1, 4))
def test_groups_stay_together_and_are_balanced_by_their_sums(rows, count):
    costs, groups = [cost for cost, _ in rows], [group for _, group in rows]
    parts = balance(costs, count, groups=groups)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(rows)))
    owners = [
        {number for number, part in enumerate(parts) if any(groups[row] == group for row in part)} for group in groups
    ]
    assert all(len(each) == 1 for each in owners)
    sums = [sum(cost for cost, name in rows if name == group) for group in dict.fromkeys(groups)]
    assert makespan(costs, parts) == makespan(sums, balance(sums, count))
    assert [part.tolist() for part in balance(costs, count, groups=np.array(groups, dtype=object))] == [
        part.tolist() for part in parts
    ]


def test_differencing_beats_largest_first_where_that_is_known():
    # Karmarkar and Karp's kind of example: largest first gives 5 + 4 + 3 = 12 against 8, differencing 10 against 10
    assert makespan([7, 5, 4, 3, 1], balance([7, 5, 4, 3, 1], 2)) == 10
    rng = np.random.default_rng(0)
    for count in (2, 8, 32):
        costs = rng.lognormal(6, 1, 1024).astype(np.int64)
        assert makespan(costs, balance(costs, count)) <= 1.01 * costs.sum() / count


# Bins


def first_fit_loop(lengths, capacity):
    bins, room = [], []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        for number, free in enumerate(room):
            if lengths[row] <= free:
                bins[number].append(row)
                room[number] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(capacity - lengths[row])
    return [sorted(each) for each in bins]


@given(st.lists(st.integers(0, 32), max_size=60), st.integers(32, 70))
def test_bins_equal_those_of_a_loop_over_rows_and_bins(lengths, capacity):
    assert [each.tolist() for each in first_fit_decreasing(lengths, capacity)] == first_fit_loop(lengths, capacity)


def test_a_row_that_fits_into_no_bin_is_named():
    assert len(first_fit_decreasing([10, 10], 10)) == 2
    with pytest.raises(InvalidRow, match="row 1: 11 tokens do not fit into a bin of 10") as caught:
        first_fit_decreasing([8, 11], 10)
    assert caught.value.index == 1
    assert len(first_fit_decreasing([2.5, 7.75], 10)) == 2


# Mini-batches, and what is refused


@given(st.lists(st.sampled_from("abcdef"), max_size=30), st.integers(1, 4))
def test_minibatches_keep_prompts_whole(groups, prompts):
    parts = cut_minibatches(groups, prompts)
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    for part in parts:
        inside = {groups[row] for row in part}
        assert len(inside) <= prompts
        assert all(groups[row] not in inside for row in range(len(groups)) if row not in part)


@given(st.integers(1, 40), st.integers(1, 12))
def test_minibatches_are_as_few_and_as_equal_as_can_be(count, prompts):
    sizes = [len(part) for part in cut_minibatches(range(count), prompts)]
    assert len(sizes) == -(-count // prompts)
    assert max(sizes) <= prompts
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5))
def test_minibatches_are_those_of_a_search_for_each(groups, prompts):
    order = list(dict.fromkeys(groups))
    count = -(-len(order) // prompts)
    wanted = [
        {group for place, group in enumerate(order) if place * count // len(order) == part} for part in range(count)
    ]
    expected = [[row for row, group in enumerate(groups) if group in inside] for inside in wanted]
    found = cut_minibatches(groups, prompts)
    assert [part.tolist() for part in found] == expected
    assert all(part.dtype == np.int64 for part in found)


def test_numbers_in_tensors_are_groups_by_value():
    assert [part.tolist() for part in cut_minibatches(torch.tensor([7, 7, 8]), 1)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    "call",
    [
        lambda: split_by_tokens([1], 0),
        lambda: cut_minibatches(["a"], 0),
        lambda: cut_minibatches(["a"], 1.5),
        lambda: balance([1], 0),
        lambda: balance([1.0, float("nan")], 1),
        lambda: balance([1, -1], 1),
        lambda: first_fit_decreasing([1], 0),
    ],
)
def test_impossible_sizes_are_refused(call):
    with pytest.raises(InvalidConfig):
        call()


def test_numbers_that_are_not_one_a_row_are_refused():
    with pytest.raises(RowCountMismatch, match="each of 2 row"):
        split_by_tokens([1, 2], 5, lead=[0])
    with pytest.raises(RowCountMismatch, match="2 costs, but 1 groups"):
        balance([1, 2], 1, groups=["a"])
    with pytest.raises(RowCountMismatch):
        balance(np.ones((2, 2)), 1)
