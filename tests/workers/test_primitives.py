"""Passes and steps by single calls, over two sharded processes against one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine_weights import differing_of_worker
from dataproto import DataProto
from dataproto.errors import InvalidColumn, InvalidConfig
from dataproto.planning import cut_minibatches
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import launch
from workers.cluster.local import LocalGroup
from workers.model.model_config import AdamParams
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker, PassOutput, join_passes
from workers.roles.model_worker import join_updates
from workers.training.loss_sums import Updated

CPU = torch.device("cpu")
STEP = AdamParams(learning_rate=1e-2, eps=1e-3, grad_clip_norm=0.1)


def folder() -> Path:
    """Where the test has put the checkpoint, in an environment variable that the ranks inherit."""
    return Path(os.environ["TEST_PRIMITIVES_FOLDER"])


def actor(ranks: Ranks | None = None) -> ActorWorker:
    return ActorWorker(ActorConfig(model_path=str(folder()), token_budget=40), CPU, ranks)


def rows() -> DataProto:
    """Two images of unequal size, one, none."""
    config = tiny_config("qwen3_vl")
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [(6, 6)], [], []], texts=[4, 7, 5, 3])
    data = with_responses(config, prompts, lengths=[5, 4, 1, 6], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def loss_fn(outputs, data):
    tokens = torch.ones_like(outputs.log_probs)
    return -outputs.log_probs * data["advantages"], {"tokens": tokens, "prob_max": outputs.log_probs.exp()}


def two_passes_and_a_step(worker: ActorWorker, first: DataProto, second: DataProto, everything: DataProto):
    passes = [worker.forward_backward(part, loss_fn) for part in (first, second)]
    stepped = worker.optim_step(STEP)
    after = worker.forward(everything, loss_fn)
    return passes, stepped, after


def sharded_passes_equal_one_process() -> None:
    ranks, data = init_ranks(Layout(dp=2), CPU), rows()
    mine = ranks.rank("dp")
    passes, stepped, after = two_passes_and_a_step(actor(), data[:2], data[2:], data)
    ours, moved, seen = two_passes_and_a_step(
        actor(ranks), data[mine : mine + 1], data[2 + mine : 3 + mine], data[[mine, 2 + mine]]
    )
    for one, other in zip(passes, ours, strict=True):
        assert other.metrics.keys() == {"loss:sum", "tokens", "prob_max"}
        assert dict(other.metrics) == pytest.approx(dict(one.metrics), rel=1e-5)
    assert moved["actor/grad_norm"] == pytest.approx(stepped["actor/grad_norm"], rel=1e-4)
    assert dict(seen.metrics) == pytest.approx(dict(after.metrics), rel=1e-4)
    torch.testing.assert_close(seen.log_probs, after.log_probs[[mine, 2 + mine]], atol=1e-4, rtol=0)


def test_an_update_tells_what_it_saw_before_it_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_PRIMITIVES_FOLDER", write_checkpoint("qwen3_vl", tmp_path))
    data = rows()
    worker, other = actor(), actor()
    before = worker.log_probs(data, into="old")["old"]
    updated = worker.update_and_score(data, loss_fn, minibatch=1, epochs=2)
    torch.testing.assert_close(updated.scores[:1], before[:1], atol=1e-6, rtol=0)
    assert not torch.allclose(updated.scores[1:], before[1:], atol=1e-6)  # the first row has taught something
    same = other.update(data, loss_fn, minibatch=1, epochs=2)
    measured = {name: value for name, value in same.items() if not name.startswith(("timing_s", "perf"))}
    assert measured == {name: updated.metrics[name] for name in measured}


def test_scores_of_ranks_come_back_in_the_callers_order():
    first, second = (np.array(rows) for rows in ([2, 0], [1, 3]))
    parts = [
        Updated({"loss": 1.0}, torch.tensor([[2.0], [0.0]]), first),
        Updated({}, torch.tensor([[1.0], [3.0]]), second),
    ]
    joined = join_updates(parts)
    assert joined.scores.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert joined.metrics == {"loss": 1.0}


def every_token(data: DataProto) -> DataProto:
    """The rows with every token that has a log-prob as one of the response: none that is first, or stands for media."""
    wide, attended = data[:], data["attention_mask"].bool()
    config = tiny_config("qwen3_vl")
    banned = torch.isin(data["input_ids"], torch.tensor(family_of(config).banned_ids(config)))
    wide["response_mask"] = (attended & (attended.cumsum(1) > 1) & ~banned)[:, 1:].long()
    return wide


def a_program(worker: ActorWorker, saved: Path, loaded: Path):
    """Passes, steps, states written and read, log-probs after each step. ``saved`` and ``loaded`` are of the same moment."""
    data, found = rows(), []
    for part in (data[:3], data[3:]):  # the second is of one row, fewer than a pipeline has stages
        found.append(worker.forward(part, loss_fn))
        found.append(worker.forward_backward(part, loss_fn))
    norms = [worker.optim_step(STEP)["actor/grad_norm"]]
    scored = [worker.log_probs(data)["old_log_probs"]]
    worker.save(saved)
    for directory in (None, saved, loaded):
        if directory is not None:
            worker.forward_backward(data, loss_fn)  # its gradients must not survive the loading
            worker.load(directory)
        worker.forward_backward(data, loss_fn)
        norms.append(worker.optim_step(STEP)["actor/grad_norm"])
        scored.append(worker.log_probs(data[:1])["old_log_probs"])
    scored.append(worker.log_probs(every_token(data))["old_log_probs"])
    return found, norms, scored


def pipelined_program():
    return a_program(actor(init_ranks(Layout(pp=2), CPU)), folder() / "staged", folder() / "alone")


@pytest.fixture(scope="module", autouse=True)
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_vl")
    tiny_model("qwen3_vl").save_pretrained(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_PRIMITIVES_FOLDER", str(path))
        yield


def test_two_processes_equal_one(tmp_path):
    alone = a_program(actor(), folder() / "alone", folder() / "alone")
    scenarios = {"passes": sharded_passes_equal_one_process, "pipeline": pipelined_program}
    outcomes = run_ranks(2, scenarios, tmp_path)
    assert outcomes["passes"] == [None, None]
    for staged in outcomes["pipeline"]:
        assert not isinstance(staged, str), staged
        assert_same_program(staged, alone)
    worker = actor()
    worker.load(folder() / "staged")
    torch.testing.assert_close(worker.log_probs(rows())["old_log_probs"], alone[2][0], atol=1e-4, rtol=0)


def assert_same_program(staged, alone):
    for passed, expected in zip(staged[0], alone[0], strict=True):
        assert passed.metrics.keys() == {"loss:sum", "tokens", "prob_max"}
        assert dict(passed.metrics) == pytest.approx(dict(expected.metrics), abs=1e-4)
        torch.testing.assert_close(passed.log_probs, expected.log_probs, atol=1e-4, rtol=0)
    assert staged[1] == pytest.approx(alone[1], rel=1e-4)
    for found, expected in zip(staged[2], alone[2], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for _, norms, scored in (staged, alone):  # a state is read to the bit
        assert norms[1] == norms[2]
        assert torch.equal(scored[1], scored[2])


def test_passes_equal_an_update_and_leave_the_weights_alone():
    data, worker, other = rows(), actor(), actor()
    before = [parameter.detach().clone() for parameter in worker.module.parameters()]
    assert worker.forward(data, loss_fn).metrics == worker.forward(data, loss_fn).metrics
    worker.forward_backward(data, loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(before, worker.module.parameters()))
    tokens = int(data["response_mask"].sum())
    found = [parameter.grad / tokens for parameter in worker.module.parameters() if parameter.grad is not None]
    expected = []
    other.model.optimizer.adamw.step = lambda: expected.extend(
        p.grad.clone() for p in other.module.parameters() if p.grad is not None
    )
    other.model.optimizer.step = lambda params=None, step=other.model.optimizer.step: step(
        AdamParams(grad_clip_norm=0.0)
    )
    other.update(data, loss_fn, aggregation="token-mean")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_passes_and_steps_of_mini_batches_are_an_update(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_PRIMITIVES_FOLDER", write_checkpoint("qwen3_vl", tmp_path))
    data, worker, other = rows(), actor(), actor()

    def loss(outputs, data):
        pg_loss, metrics = loss_fn(outputs, data)
        return pg_loss - 0.1 * outputs.entropy, metrics | {"actor/entropy": outputs.entropy}

    options = {"aggregation": "seq-mean-token-mean", "entropy": True}
    expected = other.update(data, loss, minibatch=2, **options)
    steps = []
    for part in cut_minibatches(data["uid"], 2):
        passed = worker.forward_backward(data[part], loss, **options)
        steps.append({**passed.metrics, **worker.optim_step()})
    assert steps[0].keys() == {name for name in expected if not name.startswith(("perf/", "timing_s/"))}
    assert {"actor/lr", "actor/loss", "actor/entropy", "actor/grad_norm"} <= steps[0].keys()
    for name in steps[0].keys() - {"prob_max", "actor/skipped_steps"}:
        assert (steps[0][name] + steps[1][name]) / 2 == pytest.approx(expected[name], rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(worker.module.parameters(), other.module.parameters(), strict=True))
    with pytest.raises(InvalidConfig, match="unknown aggregation mode 'mean'"):
        worker.forward_backward(data, loss, aggregation="mean")


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: None, lambda loss: (loss, None)])
def test_a_loss_without_its_metrics_is_refused_and_the_next_one_taken(returned, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_PRIMITIVES_FOLDER", write_checkpoint("qwen3_vl", tmp_path))
    worker = actor()
    for call in (worker.update, worker.forward_backward):
        with pytest.raises(InvalidColumn, match=r"the loss function returned a .*: return loss, \{\}"):
            call(rows(), lambda outputs, data: returned(-outputs.log_probs))
    assert worker.update(rows(), loss_fn)["actor/grad_norm"] > 0


def test_a_loss_without_gradient_is_refused_unless_none_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_PRIMITIVES_FOLDER", write_checkpoint("qwen3_vl", tmp_path))
    worker, data = actor(), rows()

    def constant(outputs, data):
        return -outputs.log_probs.detach(), {}

    for call in (worker.update, worker.forward_backward):
        with pytest.raises(InvalidColumn, match=r"a loss without gradient: .* return 0 \* outputs.scores"):
            call(data, constant)
    assert all(weight.grad is None for weight in worker.module.parameters())
    expected = worker.forward(data, lambda outputs, data: (-outputs.log_probs, {}))
    assert worker.forward(data, constant).metrics == expected.metrics
    assert worker.update(data, lambda outputs, data: (0 * outputs.scores, {}))["actor/grad_norm"] == 0


@pytest.mark.parametrize("call", ["update", "accumulate"])
def test_an_update_is_not_mixed_with_passes_that_wait_for_their_step(call):
    data, worker, other = rows(), actor(), actor()
    expected = two_passes_and_a_step(other, data[:2], data[2:], data)
    worker.forward_backward(data[:2], loss_fn)
    with pytest.raises(InvalidConfig, match=f"{call} would mix .*optim_step.*drop_update"):
        getattr(worker, call)(data, loss_fn)
    worker.forward_backward(data[2:], loss_fn)  # the gradients so far are as they were
    assert expected[1] == worker.optim_step(STEP)
    worker.forward_backward(data, loss_fn)
    worker.drop_update()
    other.update(data, loss_fn)
    worker.update(data, loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(worker.module.parameters(), other.module.parameters(), strict=True))


def hugging_faces_log_probs(data):
    """Of all tokens ``(B, L)``, NaN on padding and first tokens and on media and what encloses them, row by row."""
    model = tiny_model("qwen3_vl")
    banned = list(family_of(model.config).banned_ids(model.config))
    found = torch.full(data["input_ids"].shape, torch.nan)
    for row in range(len(data)):
        kept = data["attention_mask"][row].bool()
        ids, types = data["input_ids"][row, kept], data["mm_token_type_ids"][row, kept].int()
        with torch.no_grad():
            logits = model(
                input_ids=ids[None], mm_token_type_ids=types[None], use_cache=False, **data["multi_modal_inputs"][row]
            ).logits[0]
        scored = logits.index_fill(1, torch.tensor(banned), -torch.inf).log_softmax(-1)[:-1].gather(1, ids[1:, None])
        scored = scored.squeeze(1).where(~torch.isin(ids[1:], torch.tensor(banned)), torch.nan)
        found[row, kept] = torch.cat([torch.tensor([torch.nan]), scored])
    return found


def test_log_probs_of_prompts_too_are_hugging_faces():
    worker, data = actor(), rows()
    expected = hugging_faces_log_probs(data)[:, 1:].nan_to_num()
    found = worker.log_probs(every_token(data))["old_log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    own = worker.log_probs(data)["old_log_probs"]
    torch.testing.assert_close(found[:, -own.shape[1] :], own)


def test_a_pass_returns_the_log_probs_that_its_loss_got():
    worker, data = actor(), rows()
    data["response_mask"][0, 1:4] = 0  # as of text that a tool has written
    data["response_mask"][2] = 0
    whole = worker.log_probs(every_token(data))["old_log_probs"][:, -data["response_mask"].shape[1] :]
    expected = whole.where(data["response_mask"].bool(), 0.0)
    torch.testing.assert_close(worker.forward(data, loss_fn).log_probs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(worker.forward_backward(data, loss_fn).log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("token", [-100, 10**6])
def test_tokens_that_the_model_does_not_have_are_refused_where_they_count(token):
    worker, data = actor(), rows()
    data["input_ids"][1, -6] = token  # the first of four response tokens
    with pytest.raises(
        InvalidColumn, match=rf"'input_ids', row 1, position \d+: token {token} is outside the model's vocabulary"
    ):
        worker.forward(data, loss_fn)


def test_sampler_takes_weights_when_told_and_not_before(tmp_path):
    path = write_checkpoint("qwen3_vl", tmp_path)
    prompts = PromptBuilder.from_pretrained(path, 512)([{"prompt": "which?", "images": []}])
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with launch(ActorConfig(path)) as roles:
        first = roles.sample(prompts, greedy)
        data = roles.sample(prompts, SamplingParams(n=2, max_tokens=4))
        roles.actor.forward_backward(data, lambda outputs, batch: (outputs.log_probs, {}))
        roles.actor.optim_step(AdamParams(learning_rate=1e-2))
        assert differing_of_worker(roles.rollout.worker)
        still = roles.sample(prompts, greedy)
        assert torch.equal(still["rollout_log_probs"], first["rollout_log_probs"])
        roles.save_weights_for_sampler()
        assert not differing_of_worker(roles.rollout.worker)
        moved = roles.sample(prompts, greedy)
    assert not torch.allclose(moved["rollout_log_probs"], first["rollout_log_probs"], atol=1e-3)


def test_groups_pass_the_calls_on():
    group = LocalGroup(actor())
    assert group.forward(rows(), loss_fn).metrics["tokens"] == 16
    with pytest.raises(InvalidColumn, match="banned"):
        broken = rows()
        broken["input_ids"][0, -6] = tiny_config("qwen3_vl").image_token_id
        group.forward_backward(broken, loss_fn)


def test_ranks_results_are_joined():
    parts = [PassOutput({"loss:sum": 1.0}, torch.ones(n, 3)) for n in (2, 0, 1)]
    assert join_passes(parts).log_probs.shape == (3, 3)
