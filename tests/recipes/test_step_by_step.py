"""A program samples, trains and samples again by the calls of the roles, with images and the tinker package's own data."""

import io
import math
import shutil
from contextlib import contextmanager

import pytest
import tinker
import torch
from PIL import Image
from transformers import GenerationConfig

from dataproto.chunks import Datum, EncodedTextChunk, ModelInput
from dataproto.errors import InvalidConfig, InvalidRow
from helpers.checkpoints import write_checkpoint
from helpers.step_by_step import Program
from recipes.run.supervised import SupervisedConfig, launch_supervised, next_token_loss
from rollout.engine import SamplingParams
from rollout.prompts import ChunkRenderer, PromptBuilder
from workers.model.model_config import ModelConfig

SIZES = [(16, 16), (24, 16), (40, 32)]
RATE = tinker.AdamParams(learning_rate=2e-3, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@contextmanager
def client_of(path):
    with launch_supervised(SupervisedConfig(model_path=path, compute=ModelConfig(token_budget=120)), path) as roles:
        yield Program(roles, ChunkRenderer(PromptBuilder.from_pretrained(path, 512)))


@pytest.fixture
def client(path):
    with client_of(path) as made:
        yield made


def png(size, colour=(200, 10, 30)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def prompt(client, text, *sizes):
    """As the cookbook's renderers write it: text chunks with the vision tokens around image chunks."""
    encode = client.renderer.builder.encode_text
    chunks = [tinker.EncodedTextChunk(tokens=encode("<|im_start|>user\n"))]
    for size in sizes:
        chunks += [
            tinker.EncodedTextChunk(tokens=encode("<|vision_start|>")),
            tinker.types.ImageChunk(data=png(size), format="png", expected_tokens=size[0] * size[1] // 64),
            tinker.EncodedTextChunk(tokens=encode("<|vision_end|>")),
        ]
    chunks.append(tinker.EncodedTextChunk(tokens=encode(f"{text}<|im_end|>\n<|im_start|>assistant\n")))
    return tinker.ModelInput(chunks=chunks)


def datum(asked, answer, **inputs):
    """The answer behind the prompt; loss inputs are given for the answer's tokens and 0 before."""
    before = asked.length - 1
    whole = asked
    for token in answer[:-1]:
        whole = whole.append_int(token)
    padded = {name: torch.tensor([0.0] * before + list(values)) for name, values in inputs.items()}
    targets = torch.tensor([0] * before + list(answer))
    return tinker.Datum(model_input=whole, loss_fn_inputs={"target_tokens": targets, **padded})


def supervised(client, answers, *sizes):
    data = []
    for number, answer in enumerate(answers):
        tokens = client.renderer.builder.encode_text(f"{answer}<|im_end|>")
        asked = prompt(client, f"q{number}", *sizes[: number + 1])
        data.append(datum(asked, tokens, weights=[1.0] * len(tokens)))
    return data


def test_sample_train_and_sample_again(client):
    asked = prompt(client, "which?", *SIZES[:2])
    sampling = SamplingParams(n=4, max_tokens=6, temperature=1.0, seed=7)
    samples = client.sample(asked, sampling)
    assert len({tuple(sample.tokens) for sample in samples}) > 1
    assert all(len(sample.tokens) == len(sample.logprobs) <= 6 for sample in samples)
    again = client.sample(asked, sampling)
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]

    # The policy that trains gives the samples the log-probs that they were sampled with.
    data = [
        datum(
            asked,
            sample.tokens,
            logprobs=sample.logprobs,
            advantages=[1.0 if number == 0 else -0.3] * len(sample.tokens),
        )
        for number, sample in enumerate(samples)
    ]
    passed = client.forward(data, "importance_sampling")
    for sample, log_probs in zip(samples, passed.log_probs, strict=True):
        assert log_probs[-len(sample.tokens) :].tolist() == pytest.approx(sample.logprobs, abs=1e-4)
    expected = -sum(len(sample.tokens) * (1.0 if number == 0 else -0.3) for number, sample in enumerate(samples))
    assert passed.loss == pytest.approx(expected, abs=1e-3)  # all ratios are 1

    for _ in range(8):
        client.forward_backward(data, "importance_sampling")
        client.optim_step(RATE)
    likelier = client.forward(data, "importance_sampling").log_probs[0]
    assert likelier[-len(samples[0].tokens) :].sum() > sum(samples[0].logprobs) + 1
    assert client.sample(asked, sampling) == again  # still of the old weights
    client.roles.save_weights_for_sampler()
    greedy = client.sample(asked, SamplingParams(max_tokens=6, temperature=0))
    weights = [1.0] * len(greedy[0].tokens)
    trained = client.forward([datum(asked, greedy[0].tokens, weights=weights)]).log_probs[0]
    assert trained[-len(weights) :].tolist() == pytest.approx(greedy[0].logprobs, abs=1e-4)


def test_samples_come_from_the_weights_last_given_even_the_first_ones(client, path):
    asked = prompt(client, "what", (16, 16))
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    with client_of(path) as untrained:
        (expected,) = untrained.sample(asked, params)
    datum = Datum(ModelInput([EncodedTextChunk([5, 6, 7])]), {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})
    client.forward_backward([datum])
    client.optim_step(RATE)
    (before,) = client.sample(asked, params)
    client.roles.save_weights_for_sampler()
    (after,) = client.sample(asked, params)
    assert before == expected
    assert after.logprobs != before.logprobs


def test_any_end_token_stops_an_answer_even_as_its_last_token(client, path, tmp_path):
    asked, greedy = prompt(client, "which?"), SamplingParams(max_tokens=3, temperature=0)
    (cut,) = client.sample(asked, greedy)
    assert (len(cut.tokens), cut.truncated) == (3, True)
    assert cut.tokens[-1] not in cut.tokens[:-1]
    copy = shutil.copytree(path, tmp_path / "copy")
    own = GenerationConfig.from_pretrained(copy)
    own.eos_token_id = [own.eos_token_id, cut.tokens[-1]]
    own.save_pretrained(copy)
    with client_of(str(copy)) as other:
        (ended,) = other.sample(asked, greedy)
        (whole,) = other.sample(asked, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert (ended.tokens, ended.truncated) == (cut.tokens, False)
    assert (whole.tokens[:3], len(whole.tokens), whole.truncated) == (cut.tokens, 5, True)  # nothing ends it


def test_cross_entropy_is_the_sum_that_a_loop_over_hugging_face_gives(client, path):
    import transformers

    data = supervised(client, ["yes", "no no", "perhaps"], *SIZES)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    total = 0.0
    for one in data:
        rows = client.renderer.rows([one])
        with torch.no_grad():
            logits = model(
                input_ids=rows["input_ids"],
                mm_token_type_ids=rows["mm_token_type_ids"].long(),
                **rows["multi_modal_inputs"][0],
            ).logits[0, :-1]
        logits[:, list(client.renderer.builder.family.banned_ids(client.renderer.builder.config))] = -1e30
        chosen = logits.log_softmax(-1).gather(1, rows["input_ids"][0, 1:, None]).squeeze(1)
        total -= float((chosen * rows["loss_weights"][0]).sum())
    assert client.forward(data).loss == pytest.approx(total, rel=1e-5)
    assert client.forward_backward(data, "cross_entropy").loss == pytest.approx(total, rel=1e-5)


def test_gradients_add_up_until_the_step(client):
    data = supervised(client, ["one", "two", "three"], *SIZES)
    parameters = [p for p in client.roles.actor.worker.module.parameters() if p.requires_grad]

    def gradients():
        taken = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        return taken

    whole = client.forward_backward(data)
    together = gradients()
    parts = sum(client.forward_backward([one]).loss for one in data)
    assert torch.allclose(gradients(), together, atol=1e-5)
    assert whole.loss == pytest.approx(parts, rel=1e-5)
    assert [len(values) for values in whole.log_probs] == [one.model_input.length for one in data]
    client.forward(data)
    assert all(parameter.grad is None for parameter in parameters)


def test_a_step_is_torchs_adamw_with_the_given_settings(client):
    data = supervised(client, ["one"], *SIZES)
    parameters = [p for p in client.roles.actor.worker.module.parameters() if p.requires_grad]
    client.forward_backward(data)
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    for copy, parameter in zip(copies, parameters):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    adamw = torch.optim.AdamW(copies, lr=3e-3, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.1)
    adamw.step()
    norm = math.sqrt(sum(float(copy.grad.square().sum()) for copy in copies if copy.grad is not None))
    params = tinker.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1)
    metrics = client.optim_step(params)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["actor/lr"] == 3e-3
    for copy, parameter in zip(copies, parameters):
        assert torch.allclose(copy, parameter, atol=1e-6)
    with pytest.raises(InvalidConfig, match="negative"):
        client.optim_step(tinker.AdamParams(learning_rate=-1.0))


def test_state_is_saved_and_loaded_to_the_bit(client, tmp_path):
    data = supervised(client, ["one", "two"], *SIZES)
    client.forward_backward(data)
    client.optim_step(RATE)
    client.save_state(tmp_path / "state")
    client.forward_backward(data)
    client.optim_step(RATE)
    expected = client.forward(data).loss
    client.forward_backward(data)  # its gradients must not survive the loading
    client.load_state(tmp_path / "state")
    client.forward_backward(data)
    client.optim_step(RATE)
    assert client.forward(data).loss == expected


def test_log_probs_of_a_prompt_are_those_of_its_tokens(client):
    asked = prompt(client, "what is it?", SIZES[2])
    found = client.compute_logprobs(asked)
    assert len(found) == asked.length
    ids = client.renderer.token_ids(asked)
    banned = client.renderer.builder.family.banned_ids(client.renderer.builder.config)
    assert [value is None for value in found] == [place == 0 or token in banned for place, token in enumerate(ids)]
    targets = [*ids[1:], 0]
    weights = [float(token not in banned) for token in targets]
    rows = client.renderer.rows([Datum(ModelInput(asked.chunks), {"target_tokens": targets, "weights": weights})])
    scored = client.roles.actor.forward(rows, next_token_loss).log_probs[0, :-1]
    assert [value or 0.0 for value in found[1:]] == pytest.approx(scored.tolist(), abs=1e-5)
    longer = client.compute_logprobs(tinker.ModelInput.from_ints([5, 6] * 300))  # than the longest prompt
    assert len(longer) == 600


def test_targets_other_than_the_next_tokens_are_learnt(client):
    ids = client.renderer.builder.encode_text("some words here")
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids),
            loss_fn_inputs={"target_tokens": torch.full((len(ids),), ids[0]), "weights": torch.ones(len(ids))},
        )
    ]
    before = client.forward(data)
    assert before.loss == pytest.approx(-float(before.log_probs[0].sum()), rel=1e-6)
    for _ in range(10):
        client.forward_backward(data)
        client.optim_step(RATE)
    assert client.forward(data).loss < before.loss / 2


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_every_published_loss_makes_its_step(client, name):
    asked = prompt(client, "x", SIZES[0])
    answer = client.renderer.builder.encode_text("abc")
    data = [datum(asked, answer, logprobs=[-3.0] * len(answer), advantages=[1.0] * len(answer))]
    first = client.forward_backward(data, name)
    assert client.optim_step(RATE)["actor/grad_norm"] > 0
    assert math.isfinite(first.loss)
    then = client.forward(data, name)
    before, after = (float(passed.log_probs[0].sum()) for passed in (first, then))
    assert after > before  # an answer that is better than expected becomes likelier


def test_a_custom_loss_sees_outputs_and_rows(client):
    data = supervised(client, ["one"], *SIZES)

    def squared(outputs, rows):
        return outputs.log_probs**2, {"mine": torch.ones_like(outputs.log_probs)}

    passed = client.forward_backward(data, squared)
    own = passed.log_probs[0][data[0].loss_fn_inputs["weights"].to_torch() > 0]
    assert passed.loss == pytest.approx(float((own**2).sum()), rel=1e-5)
    assert passed.metrics["mine"] == len(own)


def test_a_custom_loss_may_normalise_by_the_response_mask(client):
    data = supervised(client, ["one", "two words", "x"], *SIZES)

    def mean_of_rows(outputs, rows):
        mask = rows["response_mask"]
        return -outputs.log_probs * mask / mask.sum(1, keepdim=True), {"learnt": mask.float()}

    passed = client.forward(data, mean_of_rows)
    weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
    own = [log_probs[weight > 0].mean() for log_probs, weight in zip(passed.log_probs, weights)]
    assert passed.loss == pytest.approx(-float(sum(own)), rel=1e-5)
    assert passed.metrics["learnt"] == sum(float((weight > 0).sum()) for weight in weights)


def test_what_cannot_be_done_is_refused(client):
    with pytest.raises(InvalidRow, match="row 0: chunk 1"):
        wrong = tinker.types.ImageChunk(data=png((16, 16)), format="png", expected_tokens=9)
        client.renderer.prompts([tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1]), wrong])])
