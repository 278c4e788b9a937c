"""Adam's moments on disk: of every parameter that has some, whenever the actor is saved and in whatever layout it goes on."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataproto import DataProto
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config, tiny_model
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

CPU = torch.device("cpu")
FAST = OptimizerConfig(lr=1e-2)
Make = Callable[[], ActorWorker]
Pairs = Iterator[tuple[ActorWorker, ActorWorker]]
Law = Callable[[Make, str], Pairs]
"""Yields two actors whenever they must have the same weights; the name is of what it saves."""


def folder() -> Path:
    """Where the checkpoints are, in an environment variable that the ranks inherit."""
    return Path(os.environ["TEST_OPTIMIZER_STATE_FOLDER"])


def make(layout: Layout, **options: Any) -> ActorWorker:
    ranks = Ranks() if layout.world_size == 1 else init_ranks(layout, CPU)
    return ActorWorker(ActorConfig(str(folder() / "model"), optimizer=FAST, **options), CPU, ranks)


def rows(actor: ActorWorker, *grids: list[tuple[int, int]]) -> DataProto:
    """This rank's rows, one for each list of image sizes."""
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, list(grids), texts=[4 + row for row in range(len(grids))])
    data = with_responses(config, prompts, lengths=[2 + row % 3 for row in range(len(grids))], width=4)
    return share_out(data, actor.model.ranks.size("dp"))[actor.model.ranks.rank("dp")]


def text(actor: ActorWorker) -> DataProto:
    return rows(actor, [], [], [], [])


def mixed(actor: ActorWorker) -> DataProto:
    return rows(actor, [(4, 6)], [], [(6, 6), (4, 4)], [])


def loss(outputs: Any, data: DataProto) -> Any:
    return -outputs.log_probs, {}


def weights(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in actor.named_weights()}


def assert_equal(one: ActorWorker, other: ActorWorker, atol: float = 0.0) -> None:
    for (name, mine), theirs in zip(weights(one).items(), weights(other).values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0, msg=name)


def saved(actor: ActorWorker, name: str) -> Path:
    """What it wrote, once all ranks have written."""
    target = folder() / name
    actor.save(target)
    actor.model.ranks.all_gather(None, *(("pp", "dp", "sp", "tp") if actor.model.ranks.mesh is not None else ()))
    return target


def a_first_image_may_come_after_the_save(make: Make, name: str) -> Pairs:
    first, second = make(), make()
    first.update(text(first), loss)
    second.load(saved(first, f"{name}-text"))
    for data in (text(first), mixed(first), text(first)):
        first.update(data, loss)
        second.update(data, loss)
    yield first, second
    assert first.model.optimizer.steps == second.model.optimizer.steps == 4
    third = make()
    third.load(saved(second, f"{name}-image"))  # of the tower one moment fewer than of the rest
    for actor in (first, third):
        actor.update(mixed(actor), loss)
    yield first, third


def saving_before_the_first_step_changes_nothing(make: Make, name: str) -> Pairs:
    quiet, saving, loading = make(), make(), make()
    loading.load(saved(saving, f"{name}-new"))
    for actor in (quiet, saving, loading):
        actor.update(mixed(actor), loss)
    assert {float(state["step"]) for state in saving.model.optimizer.adamw.state.values()} == {1.0}
    yield saving, quiet
    yield loading, quiet


def saving_between_passes_changes_nothing(make: Make, name: str) -> Pairs:
    quiet, saving, loading = make(), make(), make()
    for actor in (quiet, saving):
        actor.forward_backward(mixed(actor), loss)
    loading.load(saved(saving, f"{name}-passes"))
    loading.forward_backward(mixed(loading), loss)  # gradients are not part of it
    for actor in (quiet, saving, loading):
        actor.forward_backward(text(actor), loss)
        actor.optim_step()
    yield saving, quiet
    yield loading, quiet


def gradients_that_stand_are_dropped_and_moments_are_not(make: Make, name: str) -> Pairs:
    first, fresh, used = make(), make(), make()
    first.update(mixed(first), loss)
    target = saved(first, f"{name}-stepped")
    used.update(text(used), loss)
    for actor in (fresh, used):
        actor.forward_backward(text(actor), loss)
        actor.load(target)
    for actor in (first, fresh, used):
        actor.update(mixed(actor), loss)
    yield fresh, first
    yield used, first


def loading_takes_away_moments_that_the_checkpoint_does_not_have(make: Make, name: str) -> Pairs:
    expected, other = make(), make()
    target = saved(expected, f"{name}-none")
    other.update(mixed(other), loss)
    other.load(target)
    for actor in (expected, other):
        actor.update(mixed(actor), loss)
    yield other, expected


LAWS = (
    a_first_image_may_come_after_the_save,
    saving_before_the_first_step_changes_nothing,
    saving_between_passes_changes_nothing,
    gradients_that_stand_are_dropped_and_moments_are_not,
    loading_takes_away_moments_that_the_checkpoint_does_not_have,
)
MODELS: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen tower": {"freeze_vision": True},
    "adapters": {"lora_rank": 2, "lora_vision": True},
}
DP, TP, PP = Layout(dp=2), Layout(tp=2), Layout(pp=2)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "dp": (DP, {}),
    "dp, offload, adapters": (DP, {"offload": True, "lora_rank": 2, "lora_vision": True}),
    "tp": (TP, {}),
    "pp": (PP, {}),
}


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
    tiny_model("qwen2_5_vl").save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_OPTIMIZER_STATE_FOLDER", str(root))
        yield root


IN_ONE = {
    "whole": LAWS,
    "frozen tower": (saving_before_the_first_step_changes_nothing,),
    "adapters": (a_first_image_may_come_after_the_save, gradients_that_stand_are_dropped_and_moments_are_not),
}


@pytest.mark.parametrize(
    ("model", "law"),
    [pytest.param(model, law, id=f"{model}-{law.__name__}") for model in IN_ONE for law in IN_ONE[model]],
)
@pytest.mark.slow
def test_in_one_process(model, law):
    for one, other in law(partial(make, Layout(), **MODELS[model]), model):
        assert_equal(one, other)


# Over two processes


def holds(law: Law, layout: Layout, options: dict[str, Any], name: str) -> None:
    for one, other in law(partial(make, layout, **options), name):
        assert_equal(one, other)


def text_is_learnt(layout: Layout) -> None:
    actor = make(layout)
    actor.update(text(actor), loss)
    saved(actor, f"{layout}")


def goes_on_elsewhere(source: Layout, layout: Layout) -> None:
    """What was saved of text alone learns its first image in another layout as it does in its own."""
    alone, spread = make(Layout()), make(layout)
    for actor in (alone, spread):
        actor.load(folder() / f"{source}")
        steps = {float(state["step"]) for state in actor.model.optimizer.adamw.state.values()}
        assert steps == {1.0}
        actor.update(mixed(actor), loss)
    assert_equal(spread, alone, atol=1e-4)


SCENARIOS = {
    **{
        f"{law.__name__}, {name}": partial(holds, law, layout, options, name)
        for name, (layout, options) in LAYOUTS.items()
        for law in (LAWS if name == "dp, offload, adapters" else LAWS[:1])
    },
    **{f"saved, {layout}": partial(text_is_learnt, layout) for layout in (DP, TP, PP)},
    **{
        f"{source} to {layout}": partial(goes_on_elsewhere, source, layout)
        for source, layout in ((Layout(), DP), (DP, TP), (TP, PP), (PP, DP))
    },
}


@pytest.fixture(scope="module")
def outcomes(checkpoints, tmp_path_factory):
    text_is_learnt(Layout())
    return run_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_over_two_processes(outcomes, name):
    for rank, outcome in enumerate(outcomes[name]):
        assert outcome is None, f"rank {rank}: {outcome}"
