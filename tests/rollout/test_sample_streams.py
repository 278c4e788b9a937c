"""Which random stream a sample draws from: repeated prompts, parted batches, batches without uids, successive calls."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataproto import DataProto, object_array
from helpers.checkpoints import write_checkpoint
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from rollout.responses import OCCURRENCE, build_requests, number_occurrences
from workers.ranks.dispatch_modes import Arguments
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker, split_prompts

ROWS = [{"prompt": "one"}, {"prompt": "another one"}, {"prompt": "<image>", "images": [Image.new("RGB", (16, 16))]}]
TILED = [4 * prompt + turn for turn in range(4) for prompt in range(3)]  # rows of `repeat(4, interleave=False)`


def batch(uids=None, rows=None):
    rows = len(uids) if uids is not None else rows
    ones = torch.ones(rows, 2, dtype=torch.int64)
    columns = {} if uids is None else {"uid": list(uids)}
    return DataProto.from_dict(dict.fromkeys(("input_ids", "attention_mask", "position_ids"), ones), columns)


def streams(prompts, n=1, call=1):
    return [request.seed for request in build_requests(prompts, SamplingParams(n=n, seed=3), call)]


def streams_in_parts(prompts, parts, n=1):
    calls = split_prompts(Arguments((prompts, SamplingParams(n=n)), {}), parts)
    assert all(call.args[1].n == n for call in calls)
    return [seed for call in calls for seed in streams(call.args[0], n)]


def test_repeated_rows_are_further_samples_by_hand():
    several = streams(batch(["a", "b"]), n=2)
    assert streams(batch(["a", "a", "b", "b"])) == several
    assert streams(batch(["a", "b", "a", "b"])) == [several[0], several[2], several[1], several[3]]
    assert streams(batch([7, "7"])) == streams(batch(["7", "7"]))  # one and the same name


def test_equal_rows_that_follow_each_other_share_their_prompt():
    """Engines read such a prompt once. Samples that are rows of their own were read one by one."""
    data = batch(["a", "a", "b", "b", "b"])
    data["input_ids"] = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4], [1, 2]])
    requests = build_requests(data, SamplingParams(n=2))
    keys = [request.prompt_key for request in requests]
    assert [keys.index(key) for key in keys] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [request.input_ids.tolist() for request in requests[::2]] == data["input_ids"].tolist()


def test_rows_with_other_pictures_share_no_prompt():
    data = batch(["a", "a", "b"])
    pictures = [{"image": [Image.new("RGB", (2, 2))]} for _ in range(2)]
    data["multi_modal_data"] = object_array([pictures[0], pictures[0], pictures[1]])
    first, second, third = (request.prompt_key for request in build_requests(data, SamplingParams()))
    assert first == second != third


def test_rows_share_a_prompt_on_all_ranks_or_on_none():
    """Views of the same memory arrive as one tensor at another rank of an engine, which took other steps then."""
    sent, pixels = batch(["a", "b", "c"]), torch.ones(4, 8)
    shown = pixels, pixels[:], pixels.clone()
    sent["multi_modal_inputs"] = object_array([{"pixel_values": each} for each in shown])
    for rows in (sent, pickle.loads(pickle.dumps(sent))):
        first, second, third = (request.prompt_key for request in build_requests(rows, SamplingParams()))
        assert first == second != third


@given(
    prompts=st.integers(1, 4),
    repeats=st.integers(1, 4),
    n=st.integers(1, 3),
    parts=st.integers(1, 5),
    named=st.booleans(),
)
def test_repeating_and_parting_change_no_stream(prompts, repeats, n, parts, named):
    data = batch([f"p{row}" for row in range(prompts)]) if named else batch(rows=prompts)
    expected = streams(data, n * repeats)
    assert len(set(expected)) == prompts * repeats * n
    repeated = data.repeat(repeats)
    assert streams(repeated, n) == expected
    assert streams_in_parts(repeated, parts, n) == expected
    tiled = streams_in_parts(data.repeat(repeats, interleave=False), parts, n)
    assert sorted(tiled) == sorted(expected)


def test_a_call_by_name_is_numbered_as_well():
    parts = split_prompts(Arguments((), {"prompts": batch(["a", "a", "a"]), "sampling": SamplingParams()}), 2)
    assert [part.kwargs["prompts"][OCCURRENCE].tolist() for part in parts] == [[0], [1, 2]]


def test_rows_without_uids_draw_other_streams_in_every_call():
    data = batch(rows=3)
    assert not set(streams(data, call=1)) & set(streams(data, call=2))
    assert streams(batch("abc"), call=1) == streams(batch("abc"), call=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def rollout_worker(checkpoint, **options):
    worker = RolloutWorker(RolloutConfig(checkpoint, "hf"), lambda dtype: [], **options)
    worker.sharding.stale = False  # the engine has read its weights from the checkpoint
    return worker


def test_repeated_prompts_give_what_several_samples_give(checkpoint):
    worker, prompts = rollout_worker(checkpoint), PromptBuilder.from_pretrained(checkpoint, 64)(ROWS)
    one, several = SamplingParams(max_tokens=4), SamplingParams(n=4, max_tokens=4)
    expected = worker.generate(prompts, several)
    assert len({tuple(row) for row in expected["responses"].tolist()}) == 12
    interleaved, tiled = (worker.generate(prompts.repeat(4, interleave=way), one) for way in (True, False))
    for found, rows in ((interleaved, slice(None)), (tiled, np.argsort(TILED))):
        found = found[rows]
        assert found.names() == expected.names()
        assert found["uid"].tolist() == expected["uid"].tolist()
        assert torch.equal(found["responses"], expected["responses"])
        torch.testing.assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=0)


def test_two_steps_without_uids_draw_other_samples_and_a_new_process_the_same(checkpoint):
    prompts = PromptBuilder.from_pretrained(checkpoint, 64)([ROWS[0]] * 4)
    prompts.pop(non_tensor_batch_keys=["uid"])
    first, again = (rollout_worker(checkpoint) for _ in range(2))
    sampling = SamplingParams(max_tokens=4)
    steps = [first.generate(prompts, sampling) for _ in range(2)]
    answers = [tuple(row) for step in steps for row in step["responses"].tolist()]
    assert len(set(answers)) == 8
    assert "uid" not in steps[0]
    assert [tuple(row) for _ in range(2) for row in again.generate(prompts, sampling)["responses"].tolist()] == answers


def test_numbering_leaves_the_callers_batch_alone():
    data = batch(["a", "a"])
    assert number_occurrences(data)[OCCURRENCE].tolist() == [0, 1]
    assert OCCURRENCE not in data
