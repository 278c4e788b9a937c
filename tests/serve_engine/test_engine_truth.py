"""The engine against Hugging Face's own forward and against itself: log-probs of passes, of samples and of prompts."""

from functools import cache

import numpy as np
import pytest
import torch

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidConfig
from dataproto_server.backend import Datum, Failure, Pass, SampleRequest, Sampling, Snapshot
from dataproto_server.engine import InProcessEngine
from dataproto_server.engine.adapter_trainer import PackedPart, ScoredRow
from helpers.checkpoints import write_checkpoint
from helpers.served_models import (
    BASE,
    chunks,
    hugging_face_logprobs,
    length,
    new_model,
    png,
    random_inputs,
    run_pass,
    sample,
    train,
    until_done,
)
from helpers.tiny_models import TEXT_TYPES

CPU = torch.device("cpu")
TYPES = [
    "qwen2_5_vl",
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("qwen2_5_vl with a tied head", "qwen3_vl", "internvl", "smolvlm", "glm4v", "qwen3", "qwen3_5")
    ),
]

UNLIKE = ["qwen2_5_vl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_vl", "qwen3", "qwen3_5"))]
"""Those whose passes are computed in different ways: features of layers, no images, and recurrent layers."""


class Served:
    """An engine with a trained adapter, its export and samplers of it and of the base."""

    def __init__(self, model_type, directory, tied=False):
        self.path = write_checkpoint(model_type, directory / "model", tied=tied)
        self.engine = InProcessEngine({"tiny": self.path}, device=CPU)
        model = self.engine.base("tiny").trainer.model
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        images = [] if model_type in TEXT_TYPES else [(40, 32), (16, 24)]  # of unequal size
        self.prompt = chunks(self.engine, "Find", *images[:1], " the angle", *images[1:], " x")
        self.tokens = length(self.engine, self.prompt)
        self.adapter = directory / "adapter"
        self.adapter.mkdir()
        new_model(self.engine, "m", rank=4, seed=1)
        train(self.engine, "m", [Datum(self.prompt, random_inputs(self.tokens, "cross_entropy"))])
        self.engine.export("m", self.adapter)
        self.snapshot = Snapshot("tiny", self.adapter)

    def expected(self, parts=None, adapter=True):
        return hugging_face_logprobs(self.path, parts or self.prompt, self.engine, self.adapter if adapter else None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes each engine once."""

    @cache
    def make(name: str) -> Served:
        model_type, _, tied = name.partition(" with ")
        return Served(model_type, tmp_path_factory.mktemp(model_type), bool(tied))

    return make


@pytest.fixture(params=TYPES)
def served(request, made):
    return made(request.param)


@pytest.fixture(params=UNLIKE)
def unlike(request, made):
    return made(request.param)


@pytest.fixture
def qwen(made):
    return made("qwen2_5_vl")


def test_log_probs_of_a_pass_are_those_of_hugging_face_with_the_exported_adapter(served):
    """On all tokens, those of images and of their borders included: no id is masked. Within 1e-5."""
    inputs = random_inputs(served.tokens, "cross_entropy", seed=5)
    inputs["target_tokens"][0] = served.engine.base("tiny").vocabulary - 1
    found = run_pass(served.engine, "m", [Datum(served.prompt, inputs)], forward_only=True)
    expected = served.expected().gather(1, torch.from_numpy(inputs["target_tokens"])[:, None])[:, 0]
    np.testing.assert_allclose(found.outputs[0]["logprobs"], expected, atol=1e-5, rtol=0)
    assert found.metrics["loss:sum"] == pytest.approx(-(expected.numpy() * inputs["weights"]).sum(), abs=1e-3)
    assert (served.expected(adapter=False) - served.expected()).abs().max() > 0.05


def test_samples_of_a_prompt_are_trained_as_if_each_were_alone(unlike):
    """The prompt, which is learned too, is computed once. Log-probs are those of Hugging Face within 1e-5."""
    prompt = [*unlike.prompt, EncodedTextChunk(list(range(5, 45)))]
    answers = ([7, 8, 9], [7, 8, 10, 11], [30], [7, 8, 9])
    parts = [[*prompt, EncodedTextChunk(answer)] for answer in answers]
    data = [
        Datum(each, random_inputs(length(unlike.engine, each), "importance_sampling", seed=number))
        for number, each in enumerate(parts)
    ]
    matrices = unlike.engine._models["m"].matrices
    found, gradients = [], []
    for passes in ([data], [[each] for each in data]):
        for matrix in matrices.values():
            matrix.grad = None
        for rows in passes:
            found += run_pass(unlike.engine, "m", rows, "importance_sampling").outputs
        gradients.append({name: matrix.grad for name, matrix in matrices.items()})
    for together, alone, given, each in zip(found[:4], found[4:], data, parts, strict=True):
        expected = unlike.expected(each).gather(1, torch.from_numpy(given.inputs["target_tokens"])[:, None])[:, 0]
        np.testing.assert_allclose(together["logprobs"], expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(together["logprobs"], alone["logprobs"], atol=1e-5, rtol=0)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, atol=1e-5 * float(gradient.abs().max() + 1), rtol=1e-4)
    base = unlike.engine.base("tiny")
    rendered = base.renderer.placed([base.sequence(each) for each in parts])
    packed = PackedPart([ScoredRow(each, None, None, None) for each in rendered])
    assert packed.lengths == [len(rendered[0]), 2, 1, 3]  # what each row has not in common with the row before


def test_prompts_with_other_pictures_are_not_shared(qwen):
    text, base = EncodedTextChunk(list(range(5, 45))), qwen.engine.base("tiny")
    inputs = [[text, ImageChunk(png(40, 32, colour), "png"), text] for colour in ((9, 9, 9), (200, 9, 9))]
    rows = [ScoredRow(each, None, None, None) for each in base.renderer.placed([base.sequence(i) for i in inputs])]
    assert PackedPart(rows).shared[1] == int(rows[1].rendered.token_types.nonzero()[0])
    assert [len(each) for each in PackedPart(rows).images] == [1, 1]


def test_sampled_log_probs_are_those_of_a_forward_pass(unlike):
    """Of the adapter and of the base, decoded in one batch. Within 1e-4."""
    for name, snapshot in (("adapter", unlike.snapshot), ("base", BASE)):
        unlike.engine.submit(SampleRequest(name, snapshot, unlike.prompt, 3, Sampling(max_tokens=5, seed=7, stop=[])))
    for name, result in until_done(unlike.engine, 2).items():
        assert len({tuple(one.tokens) for one in result.samples}) > 1
        for one in result.samples:
            assert len(one.tokens) == 5
            assert one.stop_reason == "length"
            whole = [*unlike.prompt, EncodedTextChunk(one.tokens.tolist())]
            after = unlike.expected(whole, name == "adapter")[unlike.tokens - 1 : -1]
            expected = after.gather(1, torch.from_numpy(one.tokens).long()[:, None])[:, 0]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4, rtol=0)


def test_a_prompt_is_scored_by_the_sampler_and_not_by_the_model(unlike):
    parts, count = unlike.prompt, unlike.tokens
    targets = np.stack([np.arange(count - 1), np.full(count - 1, -1)], 1)
    found = sample(
        unlike.engine,
        unlike.snapshot,
        parts,
        sampling={"max_tokens": 1},
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=targets,
    )
    rendered = unlike.engine.base("tiny").rendered(parts)
    text, expected = rendered.token_types[1:] == 0, unlike.expected()[:-1]
    own = expected.gather(1, rendered.input_ids[1:, None])[:, 0]
    assert np.isnan(found.prompt_logprobs[0])
    assert len(found.prompt_logprobs) == count
    np.testing.assert_allclose(found.prompt_logprobs[1:][text], own[text], atol=1e-4, rtol=0)
    assert not found.prompt_logprobs[1:][~text].any()
    ids, values = found.topk_prompt_logprobs
    np.testing.assert_allclose(values[1:][text], expected.topk(3).values[text], atol=1e-4, rtol=0)
    assert (values[0] == -99999).all()
    assert (ids[1:][~text] == 0).all()
    scored = expected.gather(1, torch.from_numpy(targets[:, :1]))
    np.testing.assert_allclose(found.target_prompt_logprobs[:, :1], scored, atol=1e-4, rtol=0)
    assert not found.target_prompt_logprobs[:, 1].any()


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_pass_does_not_depend_on_who_saw_its_images_first(model_type, tmp_path):
    """Bit for bit: a sampler, an earlier pass with other images, or nobody."""
    path, found = write_checkpoint(model_type, tmp_path), []
    for first in ("sampler", "pass", "nobody"):
        engine = InProcessEngine({"tiny": path}, device=CPU)
        new_model(engine, "m", seed=1)
        new_model(engine, "other", seed=1)
        one, two = chunks(engine, "see", (24, 16), "x", (40, 32)), chunks(engine, (40, 32), "y")
        data = [Datum(one, random_inputs(length(engine, one), "cross_entropy"))]
        if first == "sampler":
            sample(engine, BASE, two, prompt_logprobs=True)
        if first == "pass":
            run_pass(engine, "other", [Datum(two, random_inputs(length(engine, two), "cross_entropy"))])
        result = run_pass(engine, "m", data)
        matrices = engine._models["m"].matrices
        found.append([result.outputs[0]["logprobs"], *(matrix.grad.numpy() for matrix in matrices.values())])
        assert engine.base("tiny").trainer.features.computed == 2
    for others in found[1:]:
        assert all(map(np.array_equal, found[0], others))


def test_only_the_last_tokens_are_scored(qwen):
    whole = sample(qwen.engine, qwen.snapshot, qwen.prompt, prompt_logprobs=True).prompt_logprobs
    last = sample(
        qwen.engine, qwen.snapshot, qwen.prompt, prompt_logprobs=True, prompt_logprobs_last_n=2
    ).prompt_logprobs
    assert np.isnan(last[:-2]).all()
    np.testing.assert_allclose(last[-2:], whole[-2:], atol=1e-6, rtol=0)


def test_one_prefill_serves_the_samples_and_the_scores(qwen):
    before, computed = (
        qwen.engine.base("tiny").sampler.prefilled_tokens,
        qwen.engine.base("tiny").trainer.features.computed,
    )
    sample(qwen.engine, qwen.snapshot, qwen.prompt, count=5, prompt_logprobs=True)
    assert qwen.engine.base("tiny").sampler.prefilled_tokens == before + qwen.tokens
    assert qwen.engine.base("tiny").trainer.features.computed == computed == 2  # by passes, once


def test_samples_are_tempered_and_greedy_ones_are_equal(qwen):
    warm = sample(
        qwen.engine, qwen.snapshot, qwen.prompt, sampling={"temperature": 0.5, "stop": []}, topk_sample_logprobs=2
    )
    token, log_prob = warm.samples[0].tokens[0], warm.samples[0].logprobs[0]
    tempered = (qwen.expected()[-1] / 0.5).log_softmax(-1)
    assert log_prob == pytest.approx(tempered[token].item(), abs=1e-4)
    ids, values = warm.samples[0].topk
    assert ids.shape == values.shape == (6, 2)
    np.testing.assert_allclose(values[0], tempered.topk(2).values, atol=1e-4, rtol=0)
    greedy = sample(qwen.engine, qwen.snapshot, qwen.prompt, count=3, sampling={"temperature": 0.0})
    assert len(greedy.samples) == 3
    assert all(one.tokens.tolist() == greedy.samples[0].tokens.tolist() for one in greedy.samples)
    assert greedy.samples[0].tokens[0] == qwen.expected()[-1].argmax()


def test_a_seed_repeats_samples_and_requests_without_one_differ(qwen):
    def tokens(name, seed):
        qwen.engine.submit(SampleRequest(name, BASE, qwen.prompt, 2, Sampling(max_tokens=8, seed=seed, stop=[])))
        return [one.tokens.tolist() for one in until_done(qwen.engine, 1)[name].samples]

    assert tokens("a", 4) == tokens("b", 4) != tokens("b", 5)
    assert tokens("a", None) == tokens("a", None) != tokens("b", None)


@pytest.mark.slow
def test_stops_are_tokens_texts_or_none_at_all(qwen):
    encode = qwen.engine.base("tiny").renderer.builder.tokenizer
    free = sample(qwen.engine, BASE, qwen.prompt, sampling={"max_tokens": 40, "stop": []}).samples[0]
    assert len(free.tokens) == 40
    assert free.stop_reason == "length"
    token = int(free.tokens[7])
    first = free.tokens.tolist().index(token)
    stopped = sample(qwen.engine, BASE, qwen.prompt, sampling={"max_tokens": 40, "stop": [token]}).samples[0]
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.stop_reason == "stop"
    text = encode.decode(free.tokens[10:13])
    by_text = sample(qwen.engine, BASE, qwen.prompt, sampling={"max_tokens": 40, "stop": text}).samples[0]
    assert by_text.stop_reason == "stop"
    assert text in encode.decode(by_text.tokens)
    assert text not in encode.decode(by_text.tokens[:-1])
    end = encode.eos_token_id
    for stop, reason in ((None, "stop"), ([], "length")):
        endless = [EncodedTextChunk([end])]
        one = sample(qwen.engine, BASE, endless, count=64, sampling={"max_tokens": 60, "stop": stop})
        reasons = {each.stop_reason for each in one.samples if end in each.tokens}
        assert reasons == {reason}


def test_media_ids_are_never_sampled(qwen):
    undrawn = qwen.engine.base("tiny").sampler.undrawn_ids
    assert undrawn
    many = sample(qwen.engine, BASE, qwen.prompt, count=64, sampling={"max_tokens": 30, "stop": []})
    assert not np.isin(np.concatenate([one.tokens for one in many.samples]), undrawn).any()


def failure(engine, parts, sampling=None, **options):
    engine.submit(SampleRequest("wrong", options.pop("snapshot", BASE), parts, 1, sampling or Sampling(4), **options))
    ((name, failed),) = until_done(engine, 1).items()
    assert name == "wrong"
    assert isinstance(failed, Failure)
    assert failed.category == "user"
    return failed.message


def test_mistakes_in_a_request_are_the_users(qwen):
    engine, text = qwen.engine, chunks(qwen.engine, "x")
    wrong = [*text, ImageChunk(png(40, 32), "png", expected_tokens=63)]
    assert "chunk 1 (image): expected_tokens=63, but its 40 x 32 pixels make 20 tokens" in failure(engine, wrong)
    (failed,) = engine.passes([Pass("m", [Datum(wrong, {})], "cross_entropy")])
    assert "row 0: chunk 1 (image): expected_tokens=63" in failed.message
    assert failed.category == "user"
    assert "base model 'nobody' is unknown" in failure(engine, text, snapshot=Snapshot("nobody"))
    assert "max_tokens=5000 exceed the model's context of 1024 tokens" in failure(engine, text, Sampling(5000))
    for impossible in ({"max_tokens": 0}, {"top_p": 2.0}, {"top_k": -2}, {"temperature": np.inf}, {"stop": ["a", ""]}):
        with pytest.raises(InvalidConfig, match=next(iter(impossible))):
            Sampling(**impossible)
    assert "its model input is empty" in failure(engine, [])
    assert "from 1 to 0" in failure(engine, text, prompt_logprobs=True, prompt_logprobs_last_n=3)
    assert "needs prompt_logprobs" in failure(engine, text, prompt_logprobs_last_n=1)
    assert "takes int64 of (0, K)" in failure(engine, text, target_prompt_logprobs=np.zeros((1, 1), np.int64))
    assert "token 0 is 1000000, but the model has tokens 0 to" in failure(engine, [EncodedTextChunk([10**6])])
    assert sample(engine, BASE, text).samples  # the engine goes on


def test_aborted_requests_never_return(qwen):
    engine, text = qwen.engine, chunks(qwen.engine, "x")
    for name, snapshot in (("a", qwen.snapshot), ("b", BASE), ("c", BASE)):
        engine.submit(SampleRequest(name, snapshot, text, 2, Sampling(3, stop=[])))
    assert engine.poll() == {}
    engine.abort(["a", "b", "unknown"])
    assert list(until_done(engine, 1)) == ["c"]
    assert engine.poll() == {}
    assert engine.base("tiny").sampler.unfinished == 0
