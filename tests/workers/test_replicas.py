"""HSDP, weights sharded within each replica, beside FSDP over all ranks: the same gradients within 1e-6 of their norm, weights
after two updates within 1e-5 and their log-probs within 1e-4 absolute, one checkpoint, and collectives within a replica, counted.
"""

import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.tensor import Replicate, Shard

from dataproto import DataProto
from dataproto.errors import InvalidConfig, RankFailure
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from workers.model.named_weights import full_tensor
from workers.parallel.fsdp import weight_groups
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
DENSE, MIXTURE = "qwen2_5_vl", "qwen3_vl_moe"
REPLICAS = Layout(dp=4, replicas=2)


def test_a_layout_counts_the_shards_of_a_replica():
    assert REPLICAS.shards == 2
    assert Layout(dp=4, sp=2, replicas=2, ep=4).shards == 4
    assert Layout(dp=4).shards == 4
    assert REPLICAS.world_size == 4


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp": 4, "replicas": 3}, "replicas=3 must divide dp = 4"),
        ({"dp": 2, "sp": 2, "replicas": 4}, "replicas=4 must divide dp = 2"),
        ({"dp": 4, "replicas": 2, "ep": 4}, "ep=4 must divide dp x sp / replicas = 2"),
        ({"replicas": 0}, "replicas=0: must be an integer of at least 1"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(degrees, message):
    with pytest.raises(InvalidConfig, match=message):
        Layout(**degrees)


# Over four processes


def worker(layout: Layout, model: str = DENSE, **options) -> ActorWorker:
    path = str(Path(os.environ["TEST_REPLICAS_FOLDER"]) / model)
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)
    return ActorWorker(ActorConfig(path, token_budget=25, optimizer=optimizer, **options), CPU, init_ranks(layout, CPU))


def rows(model: str = DENSE) -> DataProto:
    """Rows with images, which are in the first micro-batches alone, and rows without."""
    config = tiny_config(model)
    grids = [[(4, 6)], [(6, 6)], *[[]] * 10]
    prompts = prompt_batch(config, grids, texts=[6, 5, 9, 12, 7, 11, 8, 10, 9, 6, 12, 8])
    data = with_responses(config, prompts, lengths=[5, 4, 1, 6, 2, 3, 5, 3, 4, 6, 2, 5], width=6)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(0))
    return data


def share(actor: ActorWorker, data: DataProto) -> DataProto:
    return share_out(data, actor.model.ranks.size("dp"))[actor.model.ranks.rank("dp")]


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def gradients_of(actor: ActorWorker, data: DataProto) -> dict[str, torch.Tensor]:
    """The whole gradients of one update that leaves the weights alone."""
    found = {}

    def capture():
        for name, weight in actor.module.named_parameters():
            if weight.grad is not None:
                found[name] = full_tensor(weight.grad).clone()

    with patch.object(actor.model.optimizer.adamw, "step", capture):
        actor.update(share(actor, data), pg_loss)
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error <= 1e-6 * value.norm() + 1e-9, f"{name}: {error} of {value.norm()}"


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Two steps move a weight by up to 2e-3, also where its gradient is so small that it consists of rounding errors, as that of
    the biases of keys, which change no attention.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = float((found[name] - value).abs().max()) if value.numel() else 0.0
        assert error <= 1e-5 or name.endswith("k_proj.bias"), f"{name}: {error}"


def gradients_log_probs_and_weights(model: str, layout: Layout, plain: Layout, **options):
    """An update gives the gradients of the layout without replicas, and two leave the same weights, which engines get."""
    expected, found = worker(plain, model, **options), worker(layout, model, **options)
    data = rows(model)
    assert len(found.model.micro_batches(share(found, data))) > 1
    assert_close(gradients_of(found, data), gradients_of(expected, data))
    for actor in (expected, found):
        for _ in range(2):
            actor.update(share(actor, data), pg_loss)
    assert_same_weights(dict(found.named_weights()), dict(expected.named_weights()))
    scores = [actor.log_probs(share(actor, data))["old_log_probs"] for actor in (expected, found)]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=0)


def sharded_within_a_replica():
    """Each weight is repeated over replicas and sharded within one; a failed loss leaves nothing behind."""
    actor = worker(REPLICAS)
    for weight in actor.module.parameters():
        assert weight.placements == (Replicate(), Shard(0))
        assert weight.device_mesh.shape == (2, 2)
    rank = dist.get_rank()
    members = dist.get_process_group_ranks(actor.model.ranks.replica_mesh.get_group("shard"))
    assert members == ([0, 1] if rank < 2 else [2, 3])
    expected = gradients_of(actor, rows())
    calls = 0

    def failing(outputs, data):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("a loss that fails")
        return pg_loss(outputs, data)

    with pytest.raises((ValueError, RankFailure)):
        actor.update(share(actor, rows()), failing)
    assert all(group._partial_reduce_output is None for group in weight_groups(actor.module))
    assert_close(gradients_of(actor, rows()), expected)


def collectives():
    """The ranks of FSDP's gathers, and of its reductions and sums over replicas, in an update."""
    actor, data = worker(REPLICAS), rows()
    ranks: dict[str, list[int]] = {"gathers": [], "reductions": [], "sums": []}

    def gathering(parameters, group, *args):
        ranks["gathers"].append(dist.get_world_size(group))
        return gather(parameters, group, *args)

    def reducing(parameters, gradients, group, *args):
        ranks["reductions"].append(dist.get_world_size(group))
        return reduce(parameters, gradients, group, *args)

    def summing(*args, group=None, **kwargs):
        ranks["sums"].append(dist.get_world_size(group))
        return total(*args, group=group, **kwargs)

    gather, reduce, total = fsdp.foreach_all_gather, fsdp.foreach_reduce, dist.all_reduce
    with (
        patch.object(fsdp, "foreach_all_gather", gathering),
        patch.object(fsdp, "foreach_reduce", reducing),
        patch.object(dist, "all_reduce", summing),
    ):
        gradients_of(actor, data)
    return ranks, len(list(weight_groups(actor.module))), len(actor.model.micro_batches(share(actor, data)))


def saved_once(folder: str):
    """A checkpoint of replicas has the bytes of one without, and either layout continues from it to the same weights."""
    data, sizes, weights = rows(), {}, {}
    for name, layout in {"plain": Layout(dp=4), "replicas": REPLICAS}.items():
        actor = worker(layout)
        actor.update(share(actor, data), pg_loss)
        actor.save(Path(folder) / name)
        dist.barrier()
        sizes[name] = sum(file.stat().st_size for file in (Path(folder) / name).rglob("*.distcp"))
        weights[name] = dict(actor.named_weights())
    assert_same_weights(weights["replicas"], weights["plain"])
    for source, layout in (("replicas", Layout(dp=4)), ("plain", REPLICAS)):
        actor = worker(layout)
        actor.load(Path(folder) / source)
        for name, weight in actor.named_weights():
            assert torch.equal(weight, weights[source][name]), name
        actor.update(share(actor, data), pg_loss)
        weights[f"{source} continued"] = dict(actor.named_weights())
    assert_same_weights(weights["plain continued"], weights["replicas continued"])
    return sizes


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for model in (DENSE, MIXTURE):
        tiny_model(model).save_pretrained(tmp_path / model)
    monkeypatch.setenv("TEST_REPLICAS_FOLDER", str(tmp_path))
    return tmp_path


# `tests/workers/test_unsharded.py` compares two replicas of whole weights over two processes, in the gate.


def assert_passed(results: dict[str, list]) -> None:
    failed = [(name, each) for name, outcomes in results.items() for each in outcomes if isinstance(each, str)]
    assert not failed, "\n".join(map(str, failed[:1]))


@pytest.mark.long
def test_replicas_train_as_one_group_of_shards(folder):
    scenarios = {
        "training": partial(gradients_log_probs_and_weights, DENSE, REPLICAS, Layout(dp=4)),
        "sharding": sharded_within_a_replica,
    }
    assert_passed(run_ranks(4, scenarios, folder))


@pytest.mark.long
def test_pipelines_sum_gradients_over_replicas(folder):
    compare = partial(gradients_log_probs_and_weights, DENSE, Layout(dp=2, pp=2, replicas=2), Layout(dp=2, pp=2))
    assert_passed(run_ranks(4, {kept: partial(compare, unsharded=kept) for kept in ("nothing", "gradients")}, folder))


@pytest.mark.long
def test_replicas_beside_other_degrees_and_on_disk(folder):
    compare = gradients_log_probs_and_weights
    scenarios = {
        "collectives": collectives,
        "saving": partial(saved_once, str(folder)),
        "whole replicas": partial(compare, DENSE, Layout(dp=4, replicas=4), Layout(dp=4)),
        "tensor": partial(compare, DENSE, Layout(dp=2, tp=2, replicas=2), Layout(dp=2, tp=2)),
        "sequence": partial(compare, DENSE, Layout(dp=2, sp=2, replicas=2), Layout(dp=2, sp=2)),
        "unsharded weights": partial(compare, DENSE, REPLICAS, Layout(dp=4), unsharded="weights"),
        "unsharded gradients": partial(compare, DENSE, REPLICAS, Layout(dp=4), unsharded="gradients"),
        "mixture": partial(compare, MIXTURE, REPLICAS, Layout(dp=4)),
        "experts": partial(compare, MIXTURE, Layout(dp=4, ep=2, replicas=2), Layout(dp=4, ep=2)),
        "adapters": partial(compare, DENSE, REPLICAS, Layout(dp=4), lora_rank=4),
    }
    results = run_ranks(4, scenarios, folder)
    assert_passed(results)
    assert results["saving"][0]["replicas"] <= results["saving"][0]["plain"]
    for calls, groups, parts in results["collectives"]:
        assert {*calls["gathers"], *calls["reductions"]} == {2}
        assert len(calls["reductions"]) > groups * (parts - 1)  # some parts need no tower
        assert len(calls["sums"]) == groups + 1  # each group once, and the norm of the gradients
