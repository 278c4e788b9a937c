"""Muon and AdamW with moments of 8 bits, beside torch's own optimizers, and their states on disk."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dataproto.errors import CheckpointError, InvalidConfig
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.eight_bit import MomentReader, stored_parts
from workers.training.mini_batches import share_out
from workers.training.optimizer import Optimizer, OptimizerConfig

CPU = torch.device("cpu")
WITH_TORCHAO = pytest.mark.torchao
KINDS = ("muon", pytest.param("adamw8bit", marks=WITH_TORCHAO))
DP = Layout(dp=2)


def parameter(*shape, seed=0):
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def gradient(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed))


def optimizer(parameters, kind, matrices=()):
    config = OptimizerConfig(lr=1e-2, kind=kind, weight_decay=0.1, max_grad_norm=1e9)
    return Optimizer(parameters, config, matrices=matrices)


# Beside torch


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(shape):
    matrix, bias = parameter(*shape), parameter(5, seed=1)
    own, other = torch.nn.Parameter(matrix.detach().clone()), torch.nn.Parameter(bias.detach().clone())
    ours = optimizer([matrix, bias], "muon", [matrix])
    muon = torch.optim.Muon([own], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([other], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for mine, torchs in ((matrix, own), (bias, other)):
            mine.grad, torchs.grad = (gradient(*mine.shape, seed=step) for _ in range(2))
        ours.step()
        muon.step()
        adamw.step()
    torch.testing.assert_close(matrix, own, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(bias, other, atol=1e-6, rtol=1e-6)
    assert {name for state in ours.moments.values() for name in state} == {
        "momentum_buffer",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


@WITH_TORCHAO
def test_moments_of_8_bits_follow_those_of_32():
    half, whole, small = parameter(64, 128), parameter(64, 128), parameter(7)
    ours, torchs = optimizer([half, small], "adamw8bit"), optimizer([whole], "adamw")
    for step in range(5):
        half.grad, whole.grad = (gradient(64, 128, seed=step) for _ in range(2))
        small.grad = torch.ones(7)
        ours.step()
        torchs.step()
        if step == 0:  # a step computes with its new moments before they are rounded
            torch.testing.assert_close(half, whole, atol=1e-6, rtol=0)
    assert 1e-5 < float((half - whole).detach().abs().max()) < 3e-3  # of five steps of 1e-2
    moment = ours.moments[half]["exp_avg"]
    assert (moment.codes.dtype, moment.codes.nbytes, moment.scale.nbytes) == (torch.uint8, 64 * 128, 4 * 32)
    assert type(ours.moments[small]["exp_avg"]) is torch.Tensor


@WITH_TORCHAO
def test_stored_moments_are_read_by_each_kind_of_adamw():
    weight = parameter(64, 128)
    eight, plain = optimizer([weight], "adamw8bit"), optimizer([weight], "adamw")
    weight.grad = gradient(64, 128, seed=0)
    eight.step()
    for name, moment in eight.moments[weight].items():
        stored = stored_parts(f"w.{name}", moment)
        same, dense = eight.new_moments(weight)[name], plain.new_moments(weight)[name]
        for target in (same, dense):
            read(target, f"w.{name}", stored)
        exact = moment.dequantize() if name != "step" else moment
        torch.testing.assert_close(dense, exact, atol=0, rtol=0)
        if name != "step":
            assert torch.equal(same.codes, moment.codes)
            assert torch.equal(same.scale, moment.scale)
            again = eight.new_moments(weight)[name]
            read(again, f"w.{name}", stored_parts(f"w.{name}", dense))
            torch.testing.assert_close(again.dequantize(), exact, atol=0.02 * float(exact.abs().max()), rtol=0)


def read(target, name, stored):
    reader = MomentReader(name, target, stored)
    for each, tensor in reader.targets.items():
        tensor.copy_(stored[each])
    reader.finish()


def test_a_missing_torchao_is_named(monkeypatch):
    from workers.training import eight_bit

    eight_bit._rule.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(InvalidConfig, match=r"adamw8bit.*dataproto-vlm\[torchao\]"):
        optimizer([parameter(2)], "adamw8bit")


# A whole actor


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    tiny_model("qwen2_5_vl").save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_OPTIMIZER_KINDS_FOLDER", str(root))
        yield root


def folder():
    return Path(os.environ["TEST_OPTIMIZER_KINDS_FOLDER"])


def actor(kind, layout=None, **options):
    ranks = Ranks() if layout is None else init_ranks(layout, CPU)
    config = OptimizerConfig(lr=1e-2, kind=kind)
    return ActorWorker(ActorConfig(str(folder() / "model"), optimizer=config, **options), CPU, ranks)


def update(worker):
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6)], []], texts=[4, 5, 6, 7])
    data = with_responses(config, prompts, lengths=[2, 3, 4, 2], width=4)
    share = share_out(data, worker.model.ranks.size("dp"))[worker.model.ranks.rank("dp")]
    worker.update(share, lambda outputs, data: (-outputs.log_probs, {}), minibatch=2)


def difference(one, other):
    pairs = zip(one.named_weights(), other.named_weights(), strict=True)
    return max(float((mine - theirs).abs().max()) for (_, mine), (_, theirs) in pairs)


def resumes(kind, layout, name, **options):
    first, second = actor(kind, layout, **options), actor(kind, layout, **options)
    update(first)
    first.save(folder() / name)
    first.model.ranks.all_gather(None, *(("dp",) if layout else ()))
    second.load(folder() / name)
    for worker in (first, second):
        update(worker)
    assert difference(first, second) == 0.0
    return first


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_last_bit(kind):
    worker = resumes(kind, None, f"alone-{kind}")
    states = worker.model.optimizer.moments.values()
    if kind == "muon":
        assert sum("momentum_buffer" in state for state in states) == 2 * 7 + 2 * 5  # layers, and blocks of the tower
    else:
        assert sum(hasattr(state["exp_avg"], "codes") for state in states) >= 5


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_go_on_to_the_last_bit(kind):
    resumes(kind, None, f"adapters-{kind}", lora_rank=4)


@pytest.mark.slow
def test_another_kinds_state_is_refused_by_name(tmp_path):
    worker = actor("muon")
    update(worker)
    worker.model.save(tmp_path, export=False)
    with pytest.raises(CheckpointError, match=r"optimizer\.kind='adamw'"):
        actor("adamw").load(tmp_path)


# Over two processes


def muon_steps_whole_matrices():
    """Equal gradients give equal steps, whatever the layout."""
    mesh = init_ranks(DP, CPU).submesh("dp", "sp")
    matrix = parameter(9, 64)  # ranks hold 5 and 4 rows
    optimizer_of = partial(optimizer, kind="muon")
    for placement in (Shard(0), Shard(1), Replicate()):
        whole = torch.nn.Parameter(matrix.detach().clone())
        split = torch.nn.Parameter(distribute_tensor(matrix.detach().clone(), mesh, [placement]))
        rules = [optimizer_of([each], matrices=[each]) for each in (whole, split)]
        for step in range(3):
            whole.grad = gradient(9, 64, seed=step)
            split.grad = distribute_tensor(gradient(9, 64, seed=step), mesh, [placement])
            for rule in rules:
                rule.step()
        torch.testing.assert_close(split.detach().full_tensor(), whole.detach(), atol=1e-7, rtol=0)


def learns_as_one_process(kind, atol):
    """Gradients of two ranks differ by rounding, which Muon's products in bfloat16 make larger: a step moves a weight by up to
    1e-2.
    """
    alone, spread = actor(kind), actor(kind, DP)
    for worker in (alone, spread):
        update(worker)
    assert difference(alone, spread) < atol


def goes_on_in_one_process(kind):
    """Shards and whole moments of 8 bits have other blocks, so their numbers are rounded once more."""
    spread, alone = actor(kind, DP), actor(kind)
    spread.load(folder() / f"dp-{kind}")
    alone.load(folder() / f"dp-{kind}")
    assert difference(spread, alone) == 0.0
    for worker in (spread, alone):
        update(worker)
    assert difference(spread, alone) < 3e-3


SCENARIOS = {
    "muon, whole matrices": muon_steps_whole_matrices,
    "muon, equal": partial(learns_as_one_process, "muon", 2e-3),
    "muon, resumed": partial(resumes, "muon", DP, "dp-muon"),
}
SCENARIOS_8BIT = {
    "adamw8bit, equal": partial(learns_as_one_process, "adamw8bit", 2e-3),
    "adamw8bit, resumed": partial(resumes, "adamw8bit", DP, "dp-adamw8bit"),
    "adamw8bit, another layout": partial(goes_on_in_one_process, "adamw8bit"),
}


def outcome_of(scenario):
    scenario()


@pytest.mark.long
def test_muon_over_two_processes(tmp_path):
    check(SCENARIOS, tmp_path)


@pytest.mark.long
@WITH_TORCHAO
def test_8_bits_over_two_processes(tmp_path):
    check(SCENARIOS_8BIT, tmp_path)


def check(scenarios, path):
    found = run_ranks(2, {name: partial(outcome_of, each) for name, each in scenarios.items()}, path)
    failures = [
        f"{name}, rank {rank}: {each}" for name, ranks in found.items() for rank, each in enumerate(ranks) if each
    ]
    assert not failures, "\n".join(failures)


def test_the_pieces_of_a_sharded_moment_are_scaled_by_their_own_rank():
    """Two ranks' halves of a moment, read whole: by hand."""
    from workers.training.eight_bit import _scale

    numbers = torch.ones(4, 256)
    for begin in (0, 2):
        _scale(numbers, ((0, 4), (0, 256)), torch.tensor([1.0, 2.0]) + begin, ((begin, begin + 2), (0, 256)))
    assert numbers[:, 0].tolist() == [1, 2, 3, 4]
    columns = torch.ones(2, 256)
    _scale(columns, ((0, 2), (256, 512)), torch.tensor([5.0]), ((0, 1), (384, 640)))
    assert columns[0].tolist() == [1.0] * 128 + [5.0] * 128
    assert columns[1].tolist() == [1.0] * 256
