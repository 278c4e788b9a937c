"""How an update is shared out over data-parallel ranks."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto import DataProto
from dataproto.planning import places_in_groups
from workers.ranks.dispatch_modes import Arguments, split_rows
from workers.training.mini_batches import (
    MINIBATCH,
    ROW,
    row_work,
    scoring_bounds,
    share_out,
    split_scoring,
    split_update,
    spread,
)


def rows(prompts, responses, uids, images=None):
    """Rows of so many prompt and response tokens, left- and right-padded."""
    width, right = max(prompts), max(responses)
    mask = torch.zeros(len(prompts), width + right, dtype=torch.int64)
    for row, (before, after) in enumerate(zip(prompts, responses, strict=True)):
        mask[row, width - before : width + after] = 1
    types = torch.zeros_like(mask)
    for row, count in enumerate(images or []):
        types[row, width - count : width] = 1
    return DataProto.from_dict(
        {"attention_mask": mask, "response_mask": mask[:, width:], "mm_token_type_ids": types},
        non_tensors={"uid": np.array(uids, dtype=object), "row": np.arange(len(uids))},
    )


def test_work_counts_attention_and_the_vision_tower():
    text, picture = rows([400, 400], [100, 100], ["a", "b"], images=[0, 200]), rows([40], [2000], ["a"])
    own, lead = row_work(text)
    np.testing.assert_allclose(own, 100 + (500**2 - 400**2) / 43_000)
    np.testing.assert_allclose(lead[1] - lead[0], 0.4 * 200)
    own, lead = row_work(picture)
    assert own[0] + lead[0] == 2040 + 2040**2 / 43_000
    picture["cost"] = np.array([1000])
    own, lead = row_work(picture)
    assert own[0] + lead[0] == 1000


def test_samples_of_a_prompt_stay_together_and_minibatches_are_cut_first():
    data = rows([10] * 8, [4] * 8, list("aabbccdd"))
    shares = share_out(data, 2, minibatch=2)
    for share in shares:
        assert share[MINIBATCH].tolist() == [0, 0, 1, 1]
        assert len(set(share["uid"])) == 2
        assert share["uid"][0] == share["uid"][1]
    assert sorted(row for share in shares for row in share["row"]) == list(range(8))
    assert {*shares[0]["uid"][:2], *shares[1]["uid"][:2]} == {"a", "b"}


def test_columns_of_the_caller_stay_as_they_are():
    data = rows([10] * 3, [4] * 3, list("abc"))
    data["row"] = np.array(["x", "y", "z"], dtype=object)
    for share in share_out(data, 2):
        assert share["row"].tolist() == [{"a": "x", "b": "y", "c": "z"}[uid] for uid in share["uid"]]
        assert share[ROW].tolist() == ["abc".index(uid) for uid in share["uid"]]


def test_a_prompt_with_too_many_samples_is_cut():
    data = rows([10] * 6, [100] * 6, list("aaaaab"))
    busy = [share["response_mask"].sum().item() for share in share_out(data, 2)]
    assert busy == [300, 300]


def test_fewer_prompts_than_ranks_leave_ranks_without_rows():
    shares = share_out(rows([3], [2], ["a"]), 3)
    assert sorted(map(len, shares)) == [0, 0, 1]


def test_the_call_is_split_wherever_its_batch_stands():
    data = rows([10] * 4, [4] * 4, list("aabb"))
    for call in (Arguments((data, print, 1), {"epochs": 2}), Arguments((), {"data": data, "minibatch": 1})):
        parts = split_update(call, 2)
        for part in parts:
            share = part.args[0] if part.args else part.kwargs["data"]
            assert share[MINIBATCH].max() == 1
            assert data["uid"][share["row"]].tolist() == share["uid"].tolist()
        assert parts[0].args[1:] == call.args[1:]
    assert MINIBATCH not in data


sizes = st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abcd")), min_size=1, max_size=24)


@given(sizes, st.integers(1, 4))
def test_every_row_goes_somewhere_and_nobody_does_much_more_than_its_share(drawn, parts):
    own, groups = np.array([float(size) for size, _ in drawn]), [group for _, group in drawn]
    found = spread(own, np.zeros(len(own)), groups, parts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(own)))
    assert all((np.diff(part) > 0).all() for part in found)
    heaviest = max(own[part].sum() for part in found)
    # Graham's bound for whatever grouping was kept, with pieces no larger than the largest group
    largest = max(sum(size for size, g in drawn if g == group) for group in set(groups))
    assert heaviest <= own.sum() / parts + largest


def test_places_within_groups():
    assert places_in_groups([3, 3, "x", 3]).tolist() == [0, 1, 0, 2]


def test_scoring_is_split_by_work_between_prompts():
    """A long prompt counts once for its four samples, which stay on one rank: 880 units of work there, and 1,030 here."""
    data = rows([40] * 8 + [600] * 4, [100] * 12, list("aaaabbbbcccc"))
    assert scoring_bounds(data, 2) == [0, 8, 12]
    assert [len(part.args[0]) for part in split_rows(Arguments((data,), {}), 2)] == [9, 3]  # as if each had a prompt
    shares = split_scoring(Arguments((data, "old_log_probs"), {"entropy": True}), 2)
    assert [share.args[0]["row"].tolist() for share in shares] == [list(range(8)), list(range(8, 12))]
    assert {share.args[1:] for share in shares} == {("old_log_probs",)}
    by_name = split_scoring(Arguments((), {"data": data, "into": "ref_log_prob"}), 2)
    assert [len(share.kwargs["data"]) for share in by_name] == [8, 4]
    assert [share.kwargs["into"] for share in by_name] == ["ref_log_prob"] * 2
    assert scoring_bounds(data[:1], 3) == [0, 1, 1, 1]
    assert scoring_bounds(data[:0], 2) == [0, 0, 0]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 4)), max_size=12), st.integers(1, 5))
def test_scoring_parts_cover_all_rows_in_order(groups, parts):
    prompts = [prompt for prompt, _, count in groups for _ in range(count)] or [1]
    responses = [response for _, response, count in groups for _ in range(count)] or [1]
    uids = [str(number) for number, (_, _, count) in enumerate(groups) for _ in range(count)] or ["0"]
    bounds = scoring_bounds(rows(prompts, responses, uids), parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(uids)
    assert len(bounds) == parts + 1
    assert bounds == sorted(bounds)
