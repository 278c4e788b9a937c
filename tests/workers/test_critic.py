"""The critic against Hugging Face's own padded forward, one row at a time, and against itself on two processes."""

import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from dataproto.errors import CheckpointError, InvalidConfig, MissingColumn
from helpers.batches import prompt_batch, with_responses
from helpers.metrics import learned
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from recipes.algorithms.advantages import gae, whiten
from recipes.algorithms.losses import value_loss
from workers import ActorConfig, CriticConfig, CriticWorker, launch
from workers.model.named_weights import full_tensor
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "qwen3")
FAST = OptimizerConfig(lr=1e-2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(folder / family)
    return folder


def rows(family="qwen2_5_vl"):
    """Two images of unequal size, one, none, an image that two prompts share, samples of one prompt, no response."""
    config = tiny_config(family)
    grids = [[(4, 6), (8, 4)], [(6, 6)], [], [(6, 6)]]
    prompts = prompt_batch(config, grids, texts=[4, 7, 5, 3])[[0, 0, 1, 2, 2, 3, 0]]
    data = with_responses(config, prompts, lengths=[5, 4, 1, 6, 2, 3, 0], width=6)
    draw = torch.Generator().manual_seed(3)
    data["returns"] = torch.rand(data["response_mask"].shape, generator=draw)
    data["values"] = torch.rand(data["response_mask"].shape, generator=draw)
    return data


def critic(path, ranks=None, **options):
    """With a value head that is not zero."""
    worker = CriticWorker(CriticConfig(str(path), **options), CPU, ranks)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head = worker.module.value_head.weight
        drawn = torch.randn(head.shape, generator=draw)
        if isinstance(head, DTensor):
            drawn = distribute_tensor(drawn, head.device_mesh, head.placements, src_data_rank=None)
        head.copy_(drawn)
    return worker


def vf_loss(outputs, data):
    return value_loss(outputs.values, data["values"], data["returns"])


def padded_values(model, head, data):
    """The states that the model's own forward gives, one row at a time, times the head."""
    width = data["response_mask"].shape[1]
    found = []
    for row in range(len(data)):
        one = data[row : row + 1]
        kept = one["attention_mask"][0].bool()
        ids = one["input_ids"][:, kept]
        states = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=one["mm_token_type_ids"][:, kept].int(),
            use_cache=False,
            output_hidden_states=True,
            **one["multi_modal_inputs"][0],
        ).hidden_states[-1][0]  # after the final norm
        length = int(one["response_mask"].sum())
        values = (states @ head)[:-1]  # of the state before each token but the first
        found.append(torch.cat([values[len(values) - length :], torch.zeros(width - length)]))
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_padded_model(family, checkpoints):
    data = rows(family)
    worker = critic(checkpoints / family)
    model, head = tiny_model(family), worker.module.value_head.weight.detach()[0].clone().requires_grad_()
    expected = padded_values(model, head, data)
    torch.testing.assert_close(worker.values(data)["values"], expected.detach(), atol=5e-5, rtol=0)  # of about 8

    mask = data["response_mask"]
    ((expected - data["returns"]).square() / 2 * mask).sum().div(mask.sum()).backward()
    gradients = {}
    worker.model.optimizer.adamw.step = lambda: gradients.update(
        {name: p.grad.clone() for name, p in worker.module.named_parameters() if p.grad is not None}
    )
    metrics = worker.update(
        data, lambda outputs, part: value_loss(outputs.values, part["values"], part["returns"], None)
    )
    scale = min(1.0, 1.0 / (metrics["critic/grad_norm"] + 1e-6))  # the clip of the gradient
    torch.testing.assert_close(gradients.pop("value_head.weight")[0], head.grad * scale, atol=1e-6, rtol=1e-4)
    theirs = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (gradients[name] - gradient * scale).norm()
        assert error <= 1e-4 * gradient.norm() * scale + 1e-9, name


def test_it_starts_from_the_policys_weights_with_values_of_zero(checkpoints):
    worker = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl")), CPU)
    policy = tiny_model("qwen2_5_vl").state_dict()
    own = worker.module.model.state_dict()
    assert not any("lm_head" in name for name in own)
    assert all(torch.equal(weight, policy[name]) for name, weight in own.items())
    assert worker.module.value_head.weight.dtype == torch.float32
    assert not worker.values(rows())["values"].any()


def test_the_value_of_a_token_knows_what_came_before_it_and_not_the_token(checkpoints):
    worker, data = critic(checkpoints / "qwen2_5_vl"), rows()[:1]
    before = worker.values(data)["values"]
    changed = data[:]
    changed["input_ids"] = data["input_ids"].clone()
    changed["input_ids"][0, -4] += 1  # the third of the response's tokens
    after = worker.values(changed)["values"]
    torch.testing.assert_close(after[0, :3], before[0, :3], atol=1e-6, rtol=0)
    assert (after[0, 3:5] != before[0, 3:5]).all()
    assert after[0, 5] == before[0, 5] == 0  # no token there


def test_the_update_does_not_depend_on_micro_batches_and_reports_verls_metrics(checkpoints):
    found = [learned(critic(checkpoints / "qwen2_5_vl", token_budget=n).update(rows(), vf_loss)) for n in (10_000, 30)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"} <= found[
        0
    ].keys()
    assert found[0]["critic/loss"] == pytest.approx(found[0]["critic/vf_loss"])
    assert not any(name.startswith("actor/") for name in found[0])


@pytest.mark.slow
def test_it_learns_the_returns(checkpoints):
    worker = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl"), optimizer=OptimizerConfig(lr=3e-3)), CPU)
    losses = []
    for _ in range(12):
        data = rows()
        data["values"] = worker.values(data)["values"]
        losses.append(worker.update(data, vf_loss)["critic/vf_loss"])
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_a_checkpoint_goes_on_to_the_bit(checkpoints, tmp_path):
    first = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl"), optimizer=FAST), CPU)
    first.update(rows(), vf_loss)
    first.save(str(tmp_path / "critic"))
    second = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl"), optimizer=FAST), CPU)
    second.load(tmp_path / "critic")
    assert torch.equal(first.values(rows())["values"], second.values(rows())["values"])
    assert learned(first.update(rows(), vf_loss)) == learned(second.update(rows(), vf_loss))
    assert torch.equal(first.values(rows())["values"], second.values(rows())["values"])
    with pytest.raises(CheckpointError):
        second.load(tmp_path / "nothing")


def test_what_is_missing_or_impossible_is_named(checkpoints):
    worker = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl")), CPU)
    with pytest.raises(MissingColumn, match="response_mask"):
        worker.values(rows().select([name for name in rows().names() if name != "response_mask"]))
    with pytest.raises(InvalidConfig, match="entropy"):
        worker.update(rows(), vf_loss, entropy=True)


def test_frozen_parts_leave_the_head_to_learn(checkpoints):
    worker = CriticWorker(CriticConfig(str(checkpoints / "qwen2_5_vl"), freeze_vision=True, optimizer=FAST), CPU)
    trained = {name for name, p in worker.module.named_parameters() if p.requires_grad}
    assert "value_head.weight" in trained
    assert not any("visual" in name for name in trained)
    worker.update(rows(), vf_loss)
    assert worker.values(rows())["values"].any()


# Over two processes


def folder() -> Path:
    """Where the test has put the checkpoints, in an environment variable that the ranks inherit."""
    return Path(os.environ["TEST_CRITIC_FOLDER"])


def result_of(worker, data, minibatch=None):
    """Values, metrics of an update, and the value head afterwards."""
    values = torch.cat(worker.model.ranks.all_gather(worker.values(data)["values"], "dp"))
    metrics = learned(worker.update(data, vf_loss, minibatch=minibatch))
    return values, metrics, full_tensor(worker.module.value_head.weight).clone()


def equals_one_process(layout: Layout) -> None:
    data, options = rows(), {"optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=0.1)}
    parts = share_out(data, layout.dp, 2)
    values, metrics, head = result_of(critic(folder() / "qwen2_5_vl", **options), data, minibatch=2)
    ranks: Ranks = init_ranks(layout, CPU)
    worker = critic(folder() / "qwen2_5_vl", ranks, token_budget=60, **options)
    ours, found, our_head = result_of(worker, parts[ranks.rank("dp")])
    order = torch.cat([torch.tensor([find(data, part, row) for row in range(len(part))]) for part in parts])
    torch.testing.assert_close(ours, values[order], atol=1e-5, rtol=0)
    assert found == pytest.approx(metrics, rel=1e-3)
    torch.testing.assert_close(our_head, head, atol=1e-4, rtol=0)


def find(data, part, row):
    """Which row of ``data`` that is: its returns are its own."""
    return int((data["returns"] == part["returns"][row]).all(1).nonzero())


def in_bfloat16(layout: Layout) -> None:
    """FSDP rounded the head to bfloat16 with the model's other weights: an update below its third digit changed no value."""
    data, ranks = rows(), init_ranks(layout, CPU)
    worker = critic(folder() / "qwen2_5_vl", ranks, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-4))
    seen = []
    worker.module.value_head.register_forward_hook(lambda head, states, values: seen.append((states[0], values)))
    part = share_out(data, layout.dp)[ranks.rank("dp")]
    for _ in range(2):
        weight = full_tensor(worker.module.value_head.weight).detach().clone()
        assert not torch.equal(weight, weight.bfloat16().float())
        seen.clear()
        worker.values(part)
        assert seen
        for states, values in seen:
            assert torch.equal(values, states.float() @ weight[0])
        worker.update(part, vf_loss)
        assert not torch.equal(full_tensor(worker.module.value_head.weight), weight)


def test_two_processes_equal_one_and_keep_the_head_in_float32(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_CRITIC_FOLDER", str(checkpoints))
    layouts = {"dp": Layout(dp=2), "sp": Layout(sp=2), "tp": Layout(tp=2)}
    checks = {name: partial(equals_one_process, layout) for name, layout in layouts.items()}
    checks |= {f"{name} in bfloat16": partial(in_bfloat16, layout) for name, layout in layouts.items()}
    assert run_ranks(2, checks, tmp_path) == {name: [None, None] for name in checks}


def test_roles_hold_a_critic_when_one_is_launched(checkpoints):
    path = str(checkpoints / "qwen2_5_vl")
    with launch(actor=ActorConfig(path), rollout="hf", critic=CriticConfig(path)) as roles:
        assert roles.has("critic")
        assert roles.critic.values(rows())["values"].shape == (7, 6)
        with pytest.raises(InvalidConfig, match="no method 'log_probs'"):
            roles.critic.log_probs(rows())
        data = rows()
        data["token_level_rewards"] = data["returns"]
        text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
        names = {"gae": gae, "whiten": whiten, "value_loss": value_loss}
        code = next(
            block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "roles.critic.update" in block
        )
        exec(code, names | {"roles": roles, "data": data})
        assert roles.critic.values(data)["values"].any()  # it has learned something
    with launch(actor=ActorConfig(path), rollout="hf") as roles, pytest.raises(InvalidConfig, match=r"launch\(critic="):
        _ = roles.critic
