"""A program samples, trains and samples again by the calls of the roles, with images."""

import math
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationConfig

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from recipes.run.supervised import SupervisedConfig, launch_supervised, next_token_loss
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers.model.model_config import AdamParams, ModelConfig

SIZES = [(16, 16), (24, 16), (40, 32)]
RATE = AdamParams(learning_rate=2e-3, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@contextmanager
def roles_of(path):
    with launch_supervised(SupervisedConfig(model_path=path, compute=ModelConfig(token_budget=120)), path) as roles:
        roles.save_weights_for_sampler()
        yield roles


@pytest.fixture
def roles(path):
    with roles_of(path) as made:
        yield made


def row(text, *sizes):
    pictures = [Image.new("RGB", size, (200, 10, 30)) for size in sizes]
    return {"prompt": [{"role": "user", "content": "<image>" * len(sizes) + text}], "images": pictures}


def asked(path, text, *sizes):
    prompts = PromptBuilder.from_pretrained(path, 512)([row(text, *sizes)])
    prompts["uid"] = np.array(["prompt"], dtype=object)  # the samples depend on the seed only
    return prompts


def learnt(path, *answers):
    conversations = [row(f"q{number}", *SIZES[: number + 1]) for number in range(len(answers))]
    for each, answer in zip(conversations, answers):
        each["prompt"].append({"role": "assistant", "content": answer})
    rows = SupervisedBuilder.from_pretrained(path, 512)(conversations)
    rows.pop(non_tensor_batch_keys=["multi_modal_data"])
    return rows


def test_sample_train_and_sample_again(roles, path):
    prompts, sampling = asked(path, "which?", *SIZES[:2]), SamplingParams(n=4, max_tokens=6, temperature=1.0, seed=7)
    samples = roles.sample(prompts, sampling)
    assert len({tuple(tokens) for tokens in samples["responses"].tolist()}) > 1
    again = roles.sample(prompts, sampling)
    assert torch.equal(again["responses"], samples["responses"])

    # The policy that trains gives the samples the log-probs that they were sampled with.
    samples["advantages"] = torch.tensor([1.0, -0.3, -0.3, -0.3])[:, None] * samples["response_mask"]
    mask = samples["response_mask"].bool()

    def importance(outputs, rows):
        return -(outputs.log_probs - rows["rollout_log_probs"]).exp() * rows["advantages"], {}

    passed = roles.actor.forward(samples, importance)
    torch.testing.assert_close(passed.log_probs[mask], samples["rollout_log_probs"][mask], atol=1e-4, rtol=0)
    expected = -float(samples["advantages"].sum())
    assert passed.metrics["loss:sum"] == pytest.approx(expected, abs=1e-3)  # all ratios are 1

    for _ in range(8):
        roles.actor.forward_backward(samples, importance)
        roles.actor.optim_step(RATE)
    likelier = roles.actor.forward(samples, importance).log_probs[0]
    assert likelier.sum() > samples["rollout_log_probs"][0].sum() + 1
    assert torch.equal(roles.sample(prompts, sampling)["rollout_log_probs"], again["rollout_log_probs"])  # old weights
    roles.save_weights_for_sampler()
    greedy = roles.sample(prompts, SamplingParams(max_tokens=6, temperature=0))
    trained, own = roles.actor.forward(greedy, next_token_loss).log_probs, greedy["response_mask"].bool()
    torch.testing.assert_close(trained[own], greedy["rollout_log_probs"][own], atol=1e-4, rtol=0)


def test_any_end_token_stops_an_answer_even_as_its_last_token(roles, path, tmp_path):
    prompts, greedy = asked(path, "which?"), SamplingParams(max_tokens=3, temperature=0)
    cut = roles.sample(prompts, greedy)
    tokens = cut["responses"][0].tolist()
    assert (len(tokens), cut["truncated"].tolist()) == (3, [True])
    assert tokens[-1] not in tokens[:-1]
    copy = shutil.copytree(path, tmp_path / "copy")
    own = GenerationConfig.from_pretrained(copy)
    own.eos_token_id = [own.eos_token_id, tokens[-1]]
    own.save_pretrained(copy)
    with roles_of(str(copy)) as other:
        ended = other.sample(prompts, greedy)
        whole = other.sample(prompts, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert (ended["responses"][0].tolist(), ended["truncated"].tolist()) == (tokens, [False])
    assert (whole["responses"][0, :3].tolist(), whole["truncated"].tolist()) == (tokens, [True])  # nothing ends it
    assert whole["response_mask"].sum() == 5


def test_the_loss_is_the_sum_that_a_loop_over_hugging_face_gives(roles, path):
    rows = learnt(path, "yes", "no no", "perhaps")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    builder, total = PromptBuilder.from_pretrained(path, 512), 0.0
    for place in range(len(rows)):
        count = int(rows["attention_mask"][place].sum())
        ids, types = (rows[name][place : place + 1, :count] for name in ("input_ids", "mm_token_type_ids"))
        with torch.no_grad():
            media = rows["multi_modal_inputs"][place]
            logits = model(input_ids=ids, mm_token_type_ids=types.long(), **media).logits[0, :-1]
        logits[:, list(builder.family.banned_ids(builder.config))] = -1e30
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        total -= float(chosen[rows["response_mask"][place, : count - 1].bool()].sum())
    assert roles.actor.forward(rows, next_token_loss).metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert roles.actor.forward_backward(rows, next_token_loss).metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_gradients_add_up_until_the_step(roles, path):
    rows = learnt(path, "one", "two", "three")
    parameters = [p for p in roles.actor.worker.module.parameters() if p.requires_grad]

    def gradients():
        taken = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        return taken

    whole = roles.actor.forward_backward(rows, next_token_loss)
    together = gradients()
    passes = [roles.actor.forward_backward(rows[place : place + 1], next_token_loss) for place in range(3)]
    assert torch.allclose(gradients(), together, atol=1e-5)
    assert whole.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in passes), rel=1e-5)
    roles.actor.forward(rows, next_token_loss)
    assert all(parameter.grad is None for parameter in parameters)


def test_a_step_is_torchs_adamw_with_the_given_settings(roles, path):
    parameters = [p for p in roles.actor.worker.module.parameters() if p.requires_grad]
    roles.actor.forward_backward(learnt(path, "one"), next_token_loss)
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    for copy, parameter in zip(copies, parameters):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    torch.optim.AdamW(copies, lr=3e-3, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.1).step()
    norm = math.sqrt(sum(float(copy.grad.square().sum()) for copy in copies if copy.grad is not None))
    params = AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1)
    metrics = roles.actor.optim_step(params)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["actor/lr"] == 3e-3
    for copy, parameter in zip(copies, parameters):
        assert torch.allclose(copy, parameter, atol=1e-6)
    with pytest.raises(InvalidConfig, match="must be at least 0"):
        AdamParams(learning_rate=-1.0)


def test_state_is_saved_and_loaded_to_the_bit(roles, path, tmp_path):
    rows = learnt(path, "one", "two")

    def step():
        roles.actor.forward_backward(rows, next_token_loss)
        roles.actor.optim_step(RATE)

    step()
    (tmp_path / "state").mkdir()
    roles.actor.save(str(tmp_path / "state"))
    step()
    expected = roles.actor.forward(rows, next_token_loss).metrics["loss:sum"]
    roles.actor.forward_backward(rows, next_token_loss)  # its gradients must not survive the loading
    roles.actor.load(str(tmp_path / "state"))
    step()
    assert roles.actor.forward(rows, next_token_loss).metrics["loss:sum"] == expected


def test_a_loss_may_read_rows_and_name_metrics(roles, path):
    rows = learnt(path, "one", "two words", "x")

    def mean_of_rows(outputs, rows):
        mask = rows["response_mask"]
        return -outputs.log_probs * mask / mask.sum(1, keepdim=True), {"learnt": mask.float()}

    passed, mask = roles.actor.forward(rows, mean_of_rows), rows["response_mask"].bool()
    own = [log_probs[kept].mean() for log_probs, kept in zip(passed.log_probs, mask)]
    assert passed.metrics["loss:sum"] == pytest.approx(-float(sum(own)), rel=1e-5)
    assert passed.metrics["learnt"] == int(mask.sum())
