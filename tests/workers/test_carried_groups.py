"""How samples that continue later are spread over ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto, object_array
from workers.ranks.dispatch_modes import Arguments
from workers.roles.carried_groups import DEALT, GROUP, join_in_order, number_groups, share_of, split_groups


def rows_of(labels):
    uids = object_array([f"u{label}" for label in labels])
    return DataProto.from_dict(non_tensors={"uid": uids, "place": np.arange(len(labels))})


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 5), st.data())
def test_groups_stay_together_shares_add_up_and_rows_come_back_in_order(labels, parts, data):
    rows = rows_of(labels)
    wanted = data.draw(st.integers(0, len(set(labels))))
    shares = [call.args[0] for call in split_groups(Arguments((rows, "sampling"), {}), parts)]
    held = [set(share["uid"]) for share in shares]
    assert sum(map(len, held)) == len(set(labels))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert sum(share_of(share, wanted) for share in shares) == wanted
    assert all(share_of(share, wanted) <= len(uids) for share, uids in zip(shares, held, strict=True))
    joined = join_in_order(shares)
    assert joined["place"].tolist() == list(range(len(labels)))
    assert GROUP not in rows


def test_groups_stay_on_their_ranks_when_others_are_whole():
    """By hand: a, c and e begin on rank 0, b and d on rank 1. When a and d are whole, f comes to the rank with fewer groups."""
    (first, second) = (call.args[0] for call in split_groups(Arguments((rows_of("abcde"),), {}), 2))
    assert (first["uid"].tolist(), second["uid"].tolist()) == (["ua", "uc", "ue"], ["ub", "ud"])
    rest = join_in_order([first, second])[[1, 2, 4]]
    fresh = rows_of("f")
    fresh[DEALT] = np.array([-1])
    rest.pop(non_tensor_batch_keys=[GROUP])
    (first, second) = (call.args[0] for call in split_groups(Arguments((DataProto.concat([rest, fresh]),), {}), 2))
    assert (first["uid"].tolist(), second["uid"].tolist()) == (["uc", "ue"], ["ub", "uf"])
    assert share_of(first, 2) + share_of(second, 2) == 2
    (everything,) = (call.args[0] for call in split_groups(Arguments((rest,), {}), 1))
    assert everything["uid"].tolist() == ["ub", "uc", "ue"]  # of fewer ranks than before


def test_a_call_by_name_is_split_as_well():
    calls = split_groups(Arguments((), {"samples": rows_of([0, 1, 0]), "wanted": 1}), 2)
    assert [call.kwargs["samples"]["place"].tolist() for call in calls] == [[0, 2], [1]]
    assert [call.kwargs["wanted"] for call in calls] == [1, 1]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_engines_that_share_rows_share_the_groups(labels, data):
    """Any cut between groups, of samples that are in order of their groups."""
    rows = number_groups(rows_of(sorted(labels)))
    groups, wanted = len(set(labels)), data.draw(st.integers(0, len(set(labels))))
    cut = data.draw(st.integers(0, groups))
    parts = [rows[np.flatnonzero(rows[GROUP] < cut)], rows[np.flatnonzero(rows[GROUP] >= cut)]]
    assert sum(share_of(part, wanted) for part in parts) == wanted
