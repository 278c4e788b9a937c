"""One model that trains all weights: its gradient is Hugging Face's, and adapters of the same base do not notice it."""

import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto.chunks import EncodedTextChunk
from dataproto.errors import CheckpointError, InvalidConfig
from dataproto_server.backend import Datum, LoraSpec, Pass, SampleRequest, Sampling, Snapshot
from dataproto_server.config import EngineOptions
from dataproto_server.engine import InProcessEngine
from dataproto_server.engine.base_model import BaseModel
from helpers.checkpoints import write_checkpoint
from helpers.served_models import (
    ADAM,
    chunks,
    hugging_face_logprobs,
    length,
    new_model,
    random_inputs,
    run_pass,
    sample,
    train,
    until_done,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture
def engine(path):
    made = InProcessEngine({"tiny": path}, EngineOptions(full_finetuning=True), CPU)
    made.create("full", "tiny", LoraSpec(0))
    return made


def data_of(engine):
    prompt = chunks(engine, "Find", (40, 32), " the angle", (16, 24), " x")
    return prompt, [Datum(prompt, random_inputs(length(engine, prompt), "cross_entropy"))]


def test_the_gradient_is_that_of_hugging_face(engine, path):
    prompt, data = data_of(engine)
    run_pass(engine, "full", data)
    rendered = engine.base("tiny").rendered(prompt)
    family = engine.base("tiny").trainer.family
    model = family.model_class().from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    media = {name: torch.cat([image.inputs[name] for image in rendered.images]) for name in rendered.images[0].inputs}
    ids, types = rendered.input_ids[None], rendered.token_types[None].int()
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **media)
    targets, weights = (torch.from_numpy(data[0].inputs[name]) for name in ("target_tokens", "weights"))
    (-out.logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0] * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if "visual" not in name}
    found = {name: matrix.grad for name, matrix in engine._models["full"].matrices.items()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=1e-4)


def test_a_snapshot_is_a_checkpoint_and_adapters_of_the_base_stay_as_they_are(engine, path, tmp_path):
    prompt, data = data_of(engine)
    new_model(engine, "adapter", seed=1)
    before = run_pass(engine, "adapter", data, forward_only=True).outputs[0]["logprobs"]
    for _ in range(2):
        engine.passes([Pass("full", data, "cross_entropy"), Pass("adapter", data, "cross_entropy")])
        engine.optim_step("full", ADAM)
    after = run_pass(engine, "adapter", data, forward_only=True).outputs[0]["logprobs"]
    np.testing.assert_array_equal(before, after)
    (tmp_path / "snapshot").mkdir()
    engine.export("full", tmp_path / "snapshot")
    trained = run_pass(engine, "full", data, forward_only=True).outputs[0]["logprobs"]
    assert np.abs(trained - before).max() > 1e-2
    one = sample(engine, Snapshot("tiny", tmp_path / "snapshot"), prompt, sampling={"stop": []}).samples[0]
    whole, tokens = [*prompt, EncodedTextChunk(one.tokens.tolist())], length(engine, prompt)
    expected = hugging_face_logprobs(str(tmp_path / "snapshot"), whole, engine)[tokens - 1 : -1]
    expected = expected.gather(1, torch.from_numpy(one.tokens).long()[:, None])[:, 0]
    np.testing.assert_allclose(one.logprobs, expected, atol=1e-4, rtol=0)
    engine.forget(tmp_path / "snapshot")
    assert engine.poll() == {}


@pytest.fixture
def snapshots(engine, tmp_path):
    """Three samplers of all weights, a step apart."""
    _, data = data_of(engine)
    for name in "abc":
        train(engine, "full", data, steps=1)
        (tmp_path / name).mkdir()
        engine.export("full", tmp_path / name)
    return {name: Snapshot("tiny", tmp_path / name) for name in "abc"}


def models_in_memory(directory):
    """Of samplers of snapshots in a directory."""
    return sum(isinstance(each, BaseModel) and Path(each.path).parent == directory for each in gc.get_objects())


def test_a_row_whose_gradient_is_not_finite_fails_its_pass_by_name(engine):
    prompt, (fine,) = data_of(engine)
    bad = Datum(prompt, fine.inputs | {"weights": np.full(length(engine, prompt), 1e30, np.float32)})
    (failed,) = engine.passes([Pass("full", [fine, bad], "cross_entropy")])
    assert failed.message.startswith("the gradient of rows 0 to 1 together is not finite")
    run_pass(engine, "full", [fine])
    assert engine.optim_step("full", ADAM)["skipped_steps"] == 0


@pytest.mark.slow
def test_two_samplers_of_all_weights_are_in_memory(engine, snapshots, tmp_path, monkeypatch):
    """The last used ones; another one is read again, and gives the same."""
    assert models_in_memory(tmp_path) == 0  # nothing is read before it is used
    prompt, _ = data_of(engine)

    def scores(name):
        return sample(engine, snapshots[name], prompt, prompt_logprobs=True).prompt_logprobs[1:]

    first = [scores(name) for name in snapshots]
    assert models_in_memory(tmp_path) == 2
    assert np.abs(first[0] - first[1]).max() > 1e-3
    for name, expected in zip(snapshots, first, strict=True):
        np.testing.assert_array_equal(scores(name), expected)
        assert models_in_memory(tmp_path) == 2
    (tmp_path / "a" / "model.safetensors").unlink()
    # pytest would keep the traceback, and with it the model that cannot be read
    monkeypatch.setattr(logging.getLogger("dataproto.serve"), "propagate", False)
    engine.submit(SampleRequest("lost", snapshots["a"], prompt, 1, Sampling(2)))
    ((name, failed),) = until_done(engine, 1).items()
    assert (name, failed.category) == ("lost", "server")
    assert "CheckpointError in the server, incident" in failed.message
    engine.forget()
    assert models_in_memory(tmp_path) == 0


@pytest.mark.slow
def test_a_request_waits_until_its_weights_have_room(engine, snapshots):
    prompt, _ = data_of(engine)

    def submit(*names):
        for name in names:
            engine.submit(SampleRequest(name, snapshots[name[0]], prompt, 1, Sampling(3, stop=[])))

    submit("a1", "b1", "c1", "a2")  # a2 comes after c1, which a's requests would keep waiting for ever
    assert list(until_done(engine, 4)) == ["a1", "b1", "c1", "a2"]
    submit("a1", "b1", "c1", "c2")
    engine.abort(["c1", "c2"])
    assert until_done(engine, 2).keys() == {"a1", "b1"}
    assert engine.poll() == {}


def test_saved_and_loaded_is_uninterrupted_bit_for_bit(engine, path, tmp_path):
    _, data = data_of(engine)
    train(engine, "full", data)
    (tmp_path / "saved").mkdir()
    engine.save("full", tmp_path / "saved")
    later = InProcessEngine({"tiny": path}, EngineOptions(full_finetuning=True), CPU)
    later.create("full", "tiny", None)
    later.load("full", tmp_path / "saved", optimizer=True)
    for each in (engine, later):
        train(each, "full", data)
    whole, resumed = (each._models["full"].matrices for each in (engine, later))
    assert all(torch.equal(matrix, resumed[name]) for name, matrix in whole.items())
    new_model(later, "adapter")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        later.load("adapter", tmp_path / "saved", optimizer=True)


def test_there_is_one_such_model_if_the_engine_was_started_for_it(engine, path):
    with pytest.raises(InvalidConfig, match="trains all weights already"):
        engine.create("second", "tiny", LoraSpec(0))
    plain = InProcessEngine({"tiny": path}, device=CPU)
    for spec in (None, LoraSpec(0)):
        with pytest.raises(InvalidConfig, match="start the engine with full_finetuning"):
            plain.create("full", "tiny", spec)
    with pytest.raises(InvalidConfig, match="needs sampler='hf'"):
        EngineOptions(full_finetuning=True, sampler="vllm")
