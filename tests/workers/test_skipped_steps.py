"""A gradient that is not finite on one rank: every rank skips the step, keeps weights and moments to the last bit, names the rows
and goes on.
"""

import math
from functools import partial

import pytest
import torch
from torch import distributed

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from helpers.layouts import config_with_heads
from helpers.processes import check_all_passed, run_ranks, sharing
from helpers.rank_actors import actor_of, rows_of
from helpers.tiny_models import tiny_model
from workers.ranks.autograd_collectives import local_part
from workers.ranks.layout import Layout
from workers.ranks.mesh import raised_on_all_ranks
from workers.roles.actor import ActorWorker

MODEL = "qwen3_vl_moe"
LAYOUTS = {
    "dp": (Layout(dp=2), {}),
    "dp, unsharded": (Layout(dp=2), {"unsharded": "gradients"}),
    "sp": (Layout(sp=2), {}),
    "tp": (Layout(tp=2), {}),
    "pp": (Layout(pp=2), {}),
    "ep": (Layout(dp=2, ep=2), {}),
}
WAYS = ("update", "parts", "passes")


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def step(actor: ActorWorker, way: str, data: DataProto) -> float:
    """The norm of the gradient of a step."""
    if way == "update":
        return actor.update(data, pg_loss)["actor/grad_norm"]
    if way == "parts":
        actor.accumulate(data[:1], pg_loss)
        actor.accumulate(data[1:], pg_loss)
        return actor.finish_update()["actor/grad_norm"]
    actor.forward_backward(data, pg_loss)
    return actor.optim_step()["actor/grad_norm"]


def state_of(actor: ActorWorker) -> list[torch.Tensor]:
    """This rank's part of weights and moments."""
    moments = [value for state in actor.model.optimizer.moments.values() for value in state.values()]
    return [local_part(each.detach()).clone() for each in (*actor.module.model.parameters(), *moments)]


def is_skipped(actor: ActorWorker, way: str, data: DataProto) -> None:
    """The step is skipped and leaves this rank's state as it was."""
    before, skipped = state_of(actor), actor.model.optimizer.skipped_steps
    assert not math.isfinite(step(actor, way, data)), way
    assert actor.model.optimizer.skipped_steps == skipped + 1
    assert all(map(torch.equal, state_of(actor), before)), way


def rows_that_are_not_finite(layout: Layout, options: dict) -> None:
    """A row of one data-parallel rank has an advantage that is no number, in each way to make a step."""
    actor = actor_of(MODEL, layout, options)
    good, bad = rows_of(actor), rows_of(actor)
    chosen = torch.from_numpy(bad["uid"] == "row-3")
    for way, value in zip(WAYS, (math.nan, math.inf, -math.inf), strict=True):
        assert math.isfinite(step(actor, way, good)), way
        bad["advantages"][chosen] = value
        is_skipped(actor, way, bad)
        named = () if way == "passes" else ("row-3",)  # whose rows are gone when the step is made
        assert actor.model.skipped[-1].rows == named, way
    assert [skip.step for skip in actor.model.skipped] == [1, 3, 5]
    assert math.isfinite(step(actor, "update", good))


def gradients_of_one_rank(layout: Layout, options: dict) -> None:
    """An element of each kind of gradient in turn becomes no number on rank 1 alone, after a finite loss."""
    actor = actor_of(MODEL, layout, options)
    data, second = rows_of(actor), distributed.get_rank() == 1
    step(actor, "update", data)
    clean = actor.model.step
    for number in range(len(actor.model.optimizer.groups)):

        def broken(params=None, number=number):
            held = [local_part(each.grad) for each in actor.model.optimizer.groups[number] if each.grad is not None]
            if second:
                next(each for each in held if each.numel()).view(-1)[0] = math.inf
            return clean(params)

        actor.model.step = broken
        for way in WAYS:
            is_skipped(actor, way, data)
        assert actor.model.skipped[-1].rows == ()
    actor.model.step = clean
    assert math.isfinite(step(actor, "update", data))


def an_open_update_is_not_mixed(layout: Layout, options: dict) -> None:
    """Step-by-step calls are refused on all ranks, and the parts make the step that they would have made."""
    actor, other = actor_of(MODEL, layout, options), actor_of(MODEL, layout, options)
    data = rows_of(actor)
    expected = step(other, "parts", data)
    actor.accumulate(data[:1], pg_loss)
    for call in (lambda: actor.forward_backward(data, pg_loss), actor.optim_step):
        with pytest.raises(
            InvalidConfig, match="finish_update makes its step, and drop_update drops its parts"
        ) as error:
            call()
        assert raised_on_all_ranks(error.value)
    actor.accumulate(data[1:], pg_loss)
    assert actor.finish_update()["actor/grad_norm"] == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(state_of(actor), state_of(other), strict=True))
    actor.accumulate(data, pg_loss)
    actor.drop_update()
    assert math.isfinite(step(actor, "passes", data))


CHECKS = (rows_that_are_not_finite, gradients_of_one_rank, an_open_update_is_not_mixed)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with sharing(tmp_path_factory.mktemp("shared")) as folder:
        config = config_with_heads(MODEL, 4, 2)
        tiny_model(MODEL, config=config).save_pretrained(folder / MODEL)
        cases = {(name, check): partial(check, *each) for name, each in LAYOUTS.items() for check in CHECKS}
        return run_ranks(2, cases, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_all_ranks(outcomes, name, check):
    check_all_passed(outcomes[name, check])
