"""A loss function that raises in one of two real Ray processes, while the other waits for it in a collective."""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from dataproto import DataProto
from dataproto.errors import InvalidColumn, WorkerFailed
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import tiny_config, tiny_model
from recipes.run import RunConfig, attempts
from recipes.run.run_directory import with_function
from workers import Roles, launch
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import running_ray
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

TIMEOUT_S = 3000.0  # of a call, ten times that of a test: one that waited for it would fail


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its processes cannot import a test
    with running_ray(RayConfig(object_store_gib=0.2), processes=3):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ActorConfig:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_vl").save_pretrained(path)
    (path / "rates.py").write_text("def fall(step, total_steps):\n    return 0.5 ** (step + 1) * total_steps\n")
    own = OptimizerConfig(
        lr=1e-3, schedule=f"{path}/rates.py:fall", total_steps=2
    )  # which Ray's processes cannot import
    return ActorConfig(str(path), token_budget=30, optimizer=with_function(own))


@pytest.fixture(scope="module")
def data() -> DataProto:
    config = tiny_config("qwen3_vl")
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], [(6, 6)], [], []], texts=[4, 7, 5, 3])
    return with_responses(config, prompts, lengths=[5, 4, 1, 6], width=6)


def likelihood(outputs, rows):
    logging.getLogger("library").warning("what a library says")
    return -outputs.log_probs, {}


def refusing(uid, error):
    """The same loss, but for the rank that has a row of this uid: there ``error`` is raised."""

    def loss_fn(outputs, rows):
        if uid in list(rows["uid"]):
            raise error
        return likelihood(outputs, rows)

    return loss_fn


def failing_in_the_midst(error):
    """The same loss, which raises at its second micro-batch, on every rank."""
    before = []

    def loss_fn(outputs, rows):
        if before:
            raise error
        before.append(rows)
        return likelihood(outputs, rows)

    return loss_fn


class NoRows:
    """A data position that does not move."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def start(config: ActorConfig) -> Roles:
    return launch(config, config.frozen(), on="ray", layout=Layout(dp=2), timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def spread(config) -> Iterator[Roles]:
    """Roles in processes of Ray, which `test_the_call_ends_with_the_error_and_the_group_with_it` ends."""
    with start(config) as roles:
        yield roles


@pytest.fixture(scope="module")
def here(config) -> Iterator[Roles]:
    with launch(config) as roles:
        yield roles


@pytest.mark.parametrize("place", ["here", "spread"])
def test_what_fails_everywhere_leaves_the_policy_as_it_was(config, data, place, capfd, request):
    names = "actor/loss", "actor/grad_norm", "actor/lr"
    alone = ActorWorker(config)
    expected, second = alone.update(data, likelihood), alone.update(data, likelihood)
    assert [each["actor/lr"] for each in (expected, second)] == [1e-3, 5e-4]
    roles = request.getfixturevalue(place)
    capfd.readouterr()
    with pytest.raises((WorkerFailed, OverflowError), match="too much"):
        roles.actor.update(data, failing_in_the_midst(OverflowError("too much")))
    found = roles.actor.update(data, likelihood)
    assert roles.actor.update(data, likelihood)["actor/lr"] == 5e-4
    if place == "spread":  # what processes of Ray log stays in their own files, and breaks no table on the console
        assert "what a library says" not in "".join(capfd.readouterr())
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)


def test_the_call_ends_with_the_error_and_the_group_with_it(spread, data):
    places = spread.actor._pool.placements
    uid = share_out(data, 2)[1]["uid"][0]
    update = spread.actor.submit("update", data, refusing(uid, OverflowError("too much")))
    pending = spread.reference.submit("log_probs", data)
    with pytest.raises(WorkerFailed) as caught:
        update.result()
    head, _, trace = str(caught.value).partition("\n")
    assert head.startswith(f"actor.update failed: rank 1 on {places[1].name} failed in 'actor.update'")
    assert "OverflowError: too much; rank 0 on " in head
    assert f"rank 0 on {places[0].name} did not finish 'actor.update'" in head
    assert ", in loss_fn\n    raise error" in trace
    for call in (pending.result, lambda: spread.actor.log_probs(data)):
        with pytest.raises(
            WorkerFailed, match=r"log_probs: the worker processes have ended: actor.update failed: rank 1 on "
        ):
            call()
    processes = [Path("/proc") / place.name.split("process ")[1].rstrip(")") for place in places]
    deadline = time.monotonic() + 60
    while any(map(Path.exists, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(Path.exists, processes))


@pytest.mark.long
def test_the_run_starts_again_from_its_checkpoint(config, data, tmp_path, capsys):
    alone = ActorWorker(config)
    expected = [alone.update(data, likelihood)["actor/loss"] for _ in range(2)]
    losses = []

    for attempt in attempts(RunConfig(steps=2), NoRows(), max_restarts=1):
        with attempt, start(config) as roles:
            if attempt.run.resume:
                roles.actor.load(tmp_path)
            else:
                losses.append(roles.actor.update(data, likelihood)["actor/loss"])
                roles.actor.save(tmp_path)
                roles.actor.update(data, refusing("prompt-0", InvalidColumn("row 0: not this one")))
            losses.append(roles.actor.update(data, likelihood)["actor/loss"])
    assert losses == pytest.approx(expected, rel=1e-4)
    told = capsys.readouterr().err
    assert "failed in 'actor.update': InvalidColumn: row 0: not this one; rank" in told
    assert "starting again from the last checkpoint" in told
