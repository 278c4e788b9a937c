"""Training that two data-parallel ranks have saved goes on in other layouts: the same weights and moments to the last bit, and
the next steps of one process.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.layouts import CPU, config_with_heads, joined, mixed_rows
from helpers.processes import run_ranks
from helpers.tiny_models import ALL_TYPES, MOE_TYPES, tiny_model
from workers.model.named_weights import full_tensor
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

MODEL = "qwen3_vl_moe"
SCHEDULED = OptimizerConfig(lr=1e-3, max_grad_norm=0.1, schedule="linear", total_steps=9, warmup_steps=2)
TWO = {"ep 2": Layout(dp=2, ep=2), "sp 2": Layout(sp=2), "sp 2, ep 2": Layout(sp=2, ep=2), "tp 2": Layout(tp=2)}
FOUR = {"tp 2 x pp 2": Layout(tp=2, pp=2), "dp 2 x pp 2": Layout(dp=2, pp=2), "dp 2 x tp 2": Layout(dp=2, tp=2)}

EVERYWHERE = {name: TWO[name] for name in ("ep 2", "sp 2", "tp 2")} | {"pp 2": Layout(pp=2)}
CASES = [(each, name) for each in ALL_TYPES for name in EVERYWHERE if name != "ep 2" or each in MOE_TYPES]


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {}


def made(path: str, data, layout: Layout | None):
    """An actor, and its rank's rows."""
    ranks = Ranks() if layout is None else joined(layout)
    actor = ActorWorker(ActorConfig(path, optimizer=SCHEDULED, token_budget=60), CPU, ranks)
    return actor, share_out(data, ranks.size("dp"))[ranks.rank("dp")]


def saved_at_dp_2(path: str, data, folder: Path) -> None:
    actor, rows = made(path, data, Layout(dp=2))
    for _ in range(3):
        actor.update(rows, pg_loss)
    actor.save(folder)


def gone_on(path: str, data, folder: Path, layout: Layout | None = None):
    """Weights and moments as they were read, and the metrics of two more steps."""
    actor, rows = made(path, data, layout)
    actor.load(folder)
    model = actor.model
    names = {id(weight): name for name, weight in actor.module.named_parameters()}
    moments = {
        (names[id(weight)], kind): full_tensor(value).clone()
        for weight, state in model.optimizer.moments.items()
        for kind, value in state.items()
    }
    every = {key: value for stage in model.ranks.all_gather(moments, "pp") for key, value in stage.items()}
    weights = {name: weight.clone() for name, weight in actor.named_weights()}
    steps = [actor.update(rows, pg_loss) for _ in range(2)]
    return weights, every, [[step[f"actor/{name}"] for name in ("loss", "grad_norm", "lr")] for step in steps]


def checkpoint(model_type: str, folder: Path):
    """The path of a model, and rows to learn from."""
    config = config_with_heads(model_type, 4, 2)
    tiny_model(model_type, config=config).save_pretrained(folder)
    data = mixed_rows(config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return str(folder), data


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    given = checkpoint(MODEL, tmp_path_factory.mktemp("model"))
    saved = tmp_path_factory.mktemp("saved") / "actor"
    cases = {name: partial(gone_on, *given, saved, layout) for name, layout in TWO.items()}
    found = run_ranks(2, {"saved": partial(saved_at_dp_2, *given, saved)} | cases, tmp_path_factory.mktemp("two"))
    assert found.pop("saved") == [None, None]
    cases = {name: partial(gone_on, *given, saved, layout) for name, layout in FOUR.items()}
    found |= run_ranks(4, cases, tmp_path_factory.mktemp("four"))
    return gone_on(*given, saved), found


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_training_goes_on_in_another_layout(outcomes, name):
    expected, found = outcomes
    assert_alike(found[name], expected)


@pytest.fixture(scope="module")
def outcomes_of_all(tmp_path_factory):
    """By family: what one process goes on with, and what each of two ranks does."""
    given = {each: (*checkpoint(each, path := tmp_path_factory.mktemp("model")), path / "actor") for each in ALL_TYPES}
    cases = {(each, "saved"): partial(saved_at_dp_2, *of) for each, of in given.items()}
    cases |= {case: partial(gone_on, *given[case[0]], EVERYWHERE[case[1]]) for case in CASES}
    found = run_ranks(2, cases, tmp_path_factory.mktemp("every"))
    return {each: gone_on(*of) for each, of in given.items()}, found


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_training_of_every_family_goes_on_in_another_layout(outcomes_of_all, model_type, name):
    expected, found = outcomes_of_all
    assert_alike(found[model_type, name], expected[model_type])


def assert_alike(found, expected):
    weights, moments, steps = expected
    for outcome in found:
        assert not isinstance(outcome, str), outcome
        assert outcome[0].keys() == weights.keys()
        assert all(torch.equal(outcome[0][each], weight) for each, weight in weights.items())
        assert outcome[1].keys() == moments.keys()
        assert all(torch.equal(outcome[1][key], moment) for key, moment in moments.items())
        torch.testing.assert_close(torch.tensor(outcome[2]), torch.tensor(steps), atol=1e-3, rtol=1e-3)
