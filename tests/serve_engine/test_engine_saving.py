"""Saved models continue bit for bit; snapshots to sample from stay as they are."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from dataproto.errors import CheckpointError
from dataproto_server.backend import OPTIMIZER_FILE, Datum, SampleRequest, Sampling, Snapshot
from dataproto_server.engine import base_model
from dataproto_server.refusals import failure_of
from helpers.served_models import (
    chunks,
    engine_of,
    length,
    new_model,
    random_inputs,
    rows,
    run_pass,
    sample,
    train,
    weights,
)


@pytest.mark.slow
def test_saved_and_loaded_is_uninterrupted_bit_for_bit(path, tmp_path):
    whole, parts = engine_of(path), engine_of(path)
    for engine in (whole, parts):
        new_model(engine, "m", 8, seed=2)
        train(engine, "m", rows(engine, "cross_entropy", seed=1), steps=2)
    (tmp_path / "saved").mkdir()
    parts.save("m", tmp_path / "saved")
    later = engine_of(path)
    new_model(later, "m", 8, seed=9)
    run_pass(later, "m", rows(later, "cross_entropy", seed=3))  # gradients that loading drops
    later.load("m", tmp_path / "saved", optimizer=True)
    for engine in (whole, later):
        train(engine, "m", rows(engine, "cross_entropy", seed=2), steps=2)
    expected, found = weights(whole, "m", tmp_path / "a"), weights(later, "m", tmp_path / "b")
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    later.load("m", tmp_path / "saved", optimizer=False)
    train(later, "m", rows(later, "cross_entropy", seed=2), steps=2)
    fresh = weights(later, "m", tmp_path / "c")
    assert not all(torch.equal(fresh[key], value) for key, value in expected.items())


def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(engine, tmp_path):
    new_model(engine, "m", 8)
    train(engine, "m", rows(engine, "cross_entropy", seed=1))
    (tmp_path / "saved").mkdir()
    engine.save("m", tmp_path / "saved")
    new_model(engine, "smaller", 4)
    with pytest.raises(CheckpointError, match=r"rank=8.*not of.*rank=4"):
        engine.load("smaller", tmp_path / "saved", optimizer=True)
    before = weights(engine, "m", tmp_path / "before")
    (tmp_path / "saved" / OPTIMIZER_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER_FILE} cannot be read"):
        engine.load("m", tmp_path / "saved", optimizer=True)
    after = weights(engine, "m", tmp_path / "after")
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_weights_that_are_not_finite_are_not_saved(engine, tmp_path):
    """No step leaves such weights. The message names the model, and the fault is the client's."""
    new_model(engine, "m", 8)
    next(iter(engine._models["m"].matrices.values())).data.fill_(math.inf)
    for write in (engine.save, engine.export):
        with pytest.raises(CheckpointError, match=r"model 'm': .*lora_\w\.weight is not finite") as caught:
            write("m", tmp_path)
        assert failure_of(caught.value).category == "user"
    assert not list(tmp_path.iterdir())


def test_a_snapshot_does_not_follow_its_model(path, tmp_path):
    engine = engine_of(path, max_samplers=1)
    new_model(engine, "m", 8)
    prompt = chunks(engine, "see", (24, 16))
    data = rows(engine, "cross_entropy", seed=1)
    found = []
    for step in range(2):
        train(engine, "m", data)
        (tmp_path / str(step)).mkdir()
        engine.export("m", tmp_path / str(step))
        found.append(
            sample(engine, Snapshot("tiny", tmp_path / str(step)), prompt, prompt_logprobs=True).prompt_logprobs[1:]
        )
    assert not np.allclose(found[0], found[1], atol=1e-3)
    first = Snapshot("tiny", tmp_path / "0")  # which is read from its files again
    again = sample(engine, first, prompt, prompt_logprobs=True).prompt_logprobs[1:]
    np.testing.assert_array_equal(again, found[0])


@pytest.mark.parametrize("sampled", [True, False])
def test_a_snapshot_in_memory_does_not_follow_its_model(path, tmp_path, sampled):
    """All that a sampler answers comes from its own weights, also while the model trains on."""
    engine = engine_of(path)
    new_model(engine, "m", 8)
    prompt = chunks(engine, "see", (24, 16), "and", (40, 32))
    count, data = length(engine, prompt), rows(engine, "cross_entropy", seed=1)
    train(engine, "m", data)
    engine.export("m", tmp_path, sampled=sampled)
    snapshot = Snapshot("tiny", tmp_path)
    wanted = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    targets = np.arange(count - 1)[:, None]

    def answers() -> list[np.ndarray]:
        one = sample(engine, snapshot, prompt, target_prompt_logprobs=targets, **wanted)
        (drawn,) = one.samples
        top = (*one.topk_prompt_logprobs, *drawn.topk)
        return [one.prompt_logprobs, one.target_prompt_logprobs, drawn.tokens, drawn.logprobs, *top]

    before = answers()
    train(engine, "m", data)
    after = answers()
    assert all(map(partial(np.array_equal, equal_nan=True), before, after))
    moved = run_pass(engine, "m", [Datum(prompt, random_inputs(count, "cross_entropy"))], forward_only=True)
    targets = random_inputs(count, "cross_entropy")["target_tokens"][:-1, None]
    own = sample(engine, snapshot, prompt, target_prompt_logprobs=targets).target_prompt_logprobs[:, 0]
    assert np.abs(moved.outputs[0]["logprobs"][:-1] - own).max() > 1e-3


def test_a_snapshot_that_cannot_be_read_for_want_of_memory_can_be_read_later(path, tmp_path, monkeypatch):
    engine = engine_of(path)
    new_model(engine, "m")
    data = rows(engine, "cross_entropy", seed=1)
    (tmp_path / "new").mkdir()
    engine.export("m", tmp_path / "new")
    snapshot = Snapshot("tiny", tmp_path / "new")

    def fails(*given):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(base_model, "read_adapter", fails)
        engine.submit(SampleRequest("r", snapshot, data[0].chunks, 1, Sampling(1)))
        (failed,) = engine.poll().values()
    assert failed.message.startswith("OutOfMemoryError in the server")
    assert sample(engine, snapshot, data[0].chunks).samples
