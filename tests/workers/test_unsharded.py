"""What FSDP leaves unsharded between micro-batches, over two processes: log-probs to the bit, gradients within 1e-6 of their
norm, and the collectives of a call, counted.
"""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from dataproto import DataProto
from helpers.batches import prompt_batch, with_responses
from helpers.processes import check_all_passed, run_ranks, shared_folder, sharing
from helpers.tiny_models import tiny_config, tiny_model
from workers.model.model_config import UNSHARDED
from workers.model.named_weights import full_tensor
from workers.parallel.fsdp import sharded_parts
from workers.ranks.autograd_collectives import local_part
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import reference_worker
from workers.training.mini_batches import share_out

CPU = torch.device("cpu")
MODEL = "qwen2_5_vl"


DP = Layout(dp=2)


def worker(layout: Layout = DP, **options) -> ActorWorker:
    config = ActorConfig(str(shared_folder() / MODEL), token_budget=25, scoring_token_budget=25, **options)
    return ActorWorker(config, CPU, init_ranks(layout, CPU))


def rows(first: int = 0) -> DataProto:
    """Two rows with images, which make the first micro-batch, and six without."""
    config = tiny_config(MODEL)
    grids = [[(4, 6)], [(6, 6)], *[[]] * 6]
    prompts = prompt_batch(config, grids, texts=[6, 5, 9, 12, 7, 11, 8, 10], seed=first)
    data = with_responses(config, prompts, lengths=[5, 4, 1, 6, 2, 3, 5, 3], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(first))
    return data


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def share(model: ActorWorker, data: DataProto) -> DataProto:
    return share_out(data, 2)[model.model.ranks.rank("dp")]


def gradients_of(actor: ActorWorker, data: DataProto) -> dict[str, torch.Tensor]:
    """The whole gradients of one update that leaves the weights alone."""
    found = {}

    def capture():
        for name, weight in actor.module.named_parameters():
            if weight.grad is not None:
                found[name] = full_tensor(weight.grad).clone()

    with patch.object(actor.model.optimizer.adamw, "step", capture):
        actor.update(data, pg_loss)
    return found


@contextmanager
def counted():
    """Counts FSDP's collectives in the block."""
    calls = Counter()

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    names = {"gathers": "foreach_all_gather", "reductions": "foreach_reduce"}  # one for each group of weights
    patches = [patch.object(fsdp, each, counting(name, getattr(fsdp, each))) for name, each in names.items()]
    with patches[0], patches[1]:
        yield calls


def gradients_and_collectives():
    """Each further thing that stays unsharded leaves the gradients and saves collectives, down to one for each group."""
    expected: dict[str, torch.Tensor] = {}
    calls: dict[str, Counter] = {}
    for kept in UNSHARDED:
        actor = worker(unsharded=kept)
        data = share(actor, rows())
        parts = actor.model.micro_batches(data)
        assert [part.tower for part in parts] == [True] + [False] * (len(parts) - 2) + [kept == "gradients"]
        with counted() as calls[kept]:
            found = gradients_of(actor, data)
        expected = expected or found
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm()
            assert error <= 1e-6 * gradient.norm() + 1e-9, f"{kept}, {name}: {error} of {gradient.norm()}"
    groups = len(sharded_parts(actor.module))
    assert len(parts) > 2
    assert calls["scoring"] == calls["nothing"]
    assert calls["nothing"]["gathers"] > calls["weights"]["gathers"] == calls["gradients"]["gathers"] == groups
    assert calls["nothing"]["reductions"] == calls["weights"]["reductions"] > groups
    assert calls["gradients"]["reductions"] == groups


def scores_and_gathers():
    """Weights are gathered once a call; the log-probs are the same to the bit; a later update finds everything sharded."""
    found, calls = {}, {}
    for kept in ("nothing", "scoring"):
        actor = worker(unsharded=kept)
        data = share(actor, rows())
        assert len(actor.model.micro_batches(data, backward=False)) > 2
        with counted() as calls[kept]:
            found[kept] = actor.log_probs(data)["old_log_probs"]
        before = gradients_of(actor, data)
        assert all(torch.equal(gradient, before[name]) for name, gradient in gradients_of(actor, data).items())
    assert torch.equal(found["nothing"], found["scoring"])
    assert calls["scoring"]["gathers"] == len(sharded_parts(actor.module)) < calls["nothing"]["gathers"]


def an_error_leaves_nothing_behind():
    """Gradients that were not reduced yet do not enter the next update."""
    actor, seen = worker(unsharded="gradients"), []

    def failing(outputs, data):
        seen.append(len(data))
        if len(seen) == 2:
            raise ValueError("the second micro-batch")
        return pg_loss(outputs, data)

    with pytest.raises(ValueError, match="second"):
        actor.update(share(actor, rows(first=1)), failing)
    found = gradients_of(actor, share(actor, rows()))
    fresh = worker(unsharded="gradients")
    expected = gradients_of(fresh, share(fresh, rows()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())


def a_failed_scoring_pass_frees_what_it_gathered():
    """Else the root's weights stay whole until the next pass."""
    actor = worker(unsharded="nothing")
    data, seen = share(actor, rows()), []
    sharded = {
        name: weight.shape for name, weight in actor.module.named_parameters() if local_part(weight) is not weight
    }

    def failing(*_):
        seen.append(1)
        if len(seen) == 2:
            raise ValueError("the second micro-batch")

    hook = actor.module.register_forward_hook(failing)
    with pytest.raises(ValueError, match="second"):
        actor.log_probs(data)
    hook.remove()
    after = {name: weight.shape for name, weight in actor.module.named_parameters() if local_part(weight) is not weight}
    assert sharded == after
    assert sharded


def one_step_is_the_same(**options):
    """After a step the weights of all ways are the same; also with a frozen tower, which the last pass need not run."""
    weights = {}
    for kept in ("nothing", "gradients"):
        actor = worker(unsharded=kept, **options)
        actor.update(share(actor, rows()), pg_loss)
        weights[kept] = {name: weight.clone() for name, weight in actor.named_weights()}
    for name, weight in weights["nothing"].items():
        torch.testing.assert_close(weights["gradients"][name], weight, atol=1e-6, rtol=0, msg=name)


def references_are_the_policy_before_training():
    """Stored in bfloat16, or the base of an actor that trains adapters: the log-probs of float32 weights, to the bit."""
    plain, adapted = worker(dtype="bfloat16"), worker(dtype="bfloat16", lora_rank=2)
    data = share(plain, rows())
    expected = plain.log_probs(data)["old_log_probs"]
    for weight in adapted.model.optimizer.parameters:
        local_part(weight.data).add_(0.1)
    assert not torch.equal(adapted.log_probs(data)["old_log_probs"], expected)
    for each in (plain, adapted):
        reference = reference_worker(each.config.frozen(), each)
        assert torch.equal(reference.log_probs(data)["ref_log_prob"], expected)
    assert reference.module is adapted.module
    separate = reference_worker(plain.config.frozen(), plain).module
    assert {weight.dtype for weight in separate.parameters()} == {torch.bfloat16}


def replicas_sum_once():
    """Two replicas of whole weights give the gradients of two shards; an error leaves nothing behind. More: test_replicas.py."""
    expected, actor, seen = worker(), worker(Layout(dp=2, replicas=2)), []

    def failing(outputs, data):
        seen.append(len(data))
        if len(seen) == 2:
            raise ValueError("the second micro-batch")
        return pg_loss(outputs, data)

    with pytest.raises(ValueError, match="second"):
        actor.update(share(actor, rows(first=1)), failing)
    found, wanted = (gradients_of(each, share(each, rows())) for each in (actor, expected))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-9, name


SCENARIOS = {
    "references": references_are_the_policy_before_training,
    "gradients": gradients_and_collectives,
    "scores": scores_and_gathers,
    "error": an_error_leaves_nothing_behind,
    "error in scoring": a_failed_scoring_pass_frees_what_it_gathered,
    "adapters": partial(one_step_is_the_same, lora_rank=2),
    "replicas": replicas_sum_once,
    "frozen tower": partial(one_step_is_the_same, freeze_vision=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("unsharded")
    tiny_model(MODEL).save_pretrained(root / MODEL)
    with sharing(root):
        yield run_ranks(2, SCENARIOS, root)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(outcomes, name):
    check_all_passed(outcomes[name])
