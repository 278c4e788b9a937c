"""An update whose parts are given up leaves the actor as it was, on all ranks: the next update is that of a fresh actor."""

from functools import partial

import pytest

from dataproto import DataProto
from helpers.layouts import config_with_heads
from helpers.metrics import learned
from helpers.processes import check_all_passed, run_ranks, shared_folder, sharing
from helpers.rank_actors import actor_of, rows_of
from helpers.tiny_models import tiny_model
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker

MODEL = "qwen2_5_vl"
DP = Layout(dp=2)
LAYOUTS = {
    "dp": (DP, {}),
    "dp, unsharded": (DP, {"unsharded": "gradients"}),
    "replicas": (Layout(dp=2, replicas=2), {}),
    "pp": (Layout(pp=2), {}),
    "tp": (Layout(tp=2), {}),
}


def pg_loss(outputs, data):
    return -outputs.log_probs * data["advantages"], {}


def in_parts(actor: ActorWorker, data: DataProto) -> dict[str, float]:
    actor.accumulate(data, pg_loss)
    return actor.finish_update()


def whole(actor: ActorWorker, data: DataProto) -> dict[str, float]:
    return actor.update(data, pg_loss)


def left_to_the_update(actor: ActorWorker) -> None:
    """An update of a whole batch drops the parts itself."""


def given_up(layout: Layout, options: dict) -> None:
    """Parts, given up in several ways, and the update after them."""
    fresh = actor_of(MODEL, layout, options)
    folder = shared_folder() / str((layout, sorted(options)))
    fresh.save(folder)
    rows = rows_of(fresh)
    expected = learned(fresh.update(rows, pg_loss))
    weights = {name: weight.clone() for name, weight in fresh.named_weights()}
    ways = {
        "drop": (ActorWorker.drop_update, in_parts),
        "load": (lambda actor: actor.load(folder), in_parts),
        "update": (left_to_the_update, whole),
    }
    for name, (give_up, update) in ways.items():
        actor = actor_of(MODEL, layout, options)
        rows = rows_of(actor)
        actor.accumulate(rows, pg_loss)
        actor.accumulate(rows, pg_loss)
        give_up(actor)
        found = learned(update(actor, rows))
        for metric in ("actor/loss", "actor/grad_norm"):
            assert abs(found[metric] - expected[metric]) <= 1e-3 * abs(expected[metric]), (
                name,
                metric,
                found,
                expected,
            )
        for weight_name, weight in actor.named_weights():
            moved = (weight - weights[weight_name]).abs()
            assert (moved > 1e-5).float().mean() < 0.02, (name, weight_name)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with sharing(tmp_path_factory.mktemp("shared")) as folder:
        config = config_with_heads(MODEL, 4, 2)
        tiny_model(MODEL, config=config).save_pretrained(folder / MODEL)
        cases = {name: partial(given_up, *each) for name, each in LAYOUTS.items()}
        return run_ranks(2, cases, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_that_are_given_up_leave_nothing_on_any_rank(outcomes, name):
    check_all_passed(outcomes[name])
