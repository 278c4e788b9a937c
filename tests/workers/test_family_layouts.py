"""Families that other tests of layouts leave out, over two processes against one, in float32: log-probs within 1e-5, each
parameter's gradient within 1e-4 of its norm; over pipeline stages also two updates, and a third one after their checkpoint is
resumed. Stages have two micro-batches or more.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from dataproto.vlm import family_of
from helpers import layouts
from helpers.layouts import CPU, TEMPERATURE, config_with_heads, differences, film_rows, joined, mixed_rows, run_pass
from helpers.processes import run_ranks
from helpers.shown_models import LAYOUT_TYPES, PIPELINE_TYPES
from helpers.tiny_models import ALL_TYPES, MODEL_TYPES, takes_video, tiny_config, tiny_model
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

pytestmark = pytest.mark.long

STAGED_TYPES = list(dict.fromkeys((*LAYOUT_TYPES, *PIPELINE_TYPES)))
WITH_EXPERTS = {"dp 2, pp 2, ep 2": Layout(dp=2, pp=2, ep=2)}
PRODUCTS = {
    "dp 2, pp 2": Layout(dp=2, pp=2),
    "sp 2, pp 2": Layout(sp=2, pp=2),
    "tp 2, pp 2": Layout(tp=2, pp=2),
}
FILM_LAYOUTS = {"dp 2": Layout(dp=2), "sp 2": Layout(sp=2), "tp 2": Layout(tp=2), "pp 2": Layout(pp=2)}
VIDEO_TYPES = [each for each in ALL_TYPES if takes_video(each)]
RATES = dict.fromkeys(("gemma4+per_layer", "gemma4+moe"), 1e-4)
"""Learning rates where gradients that are zero but for rounding move weights too far; see `SLOWLY` in `test_pipeline.py`."""
LAYOUTS = {
    "dp 2": Layout(dp=2),
    "sp 2": Layout(sp=2),
    "tp 2": Layout(tp=2),
    "ep 2": Layout(dp=2, ep=2),
    "sp 2, ep 2": Layout(sp=2, ep=2),
}


def config_of(model_type):
    return config_with_heads(model_type, heads=4, key_value_heads=2)


def products_of(model_type):
    """The first stage of GLM-4.5V and Kimi K2.5 has a dense layer alone."""
    sparse = family_of(tiny_config(model_type)).experts is not None
    return [*PRODUCTS, *(WITH_EXPERTS if sparse else ())]


def layouts_of(model_type):
    """Those that other tests leave out: of families that they cover, expert parallelism alone; they leave out Gemma 4."""
    covered = model_type in MODEL_TYPES and model_type != "gemma4"
    names = [name for name in LAYOUTS if not covered or "ep" in name]
    return [name for name in names if "ep" not in name or family_of(tiny_config(model_type)).experts is not None]


# What all ranks run


def equals_one_process(model_type, layout, rows=mixed_rows):
    config = config_of(model_type)
    data = rows(config)
    found = run_pass(config, data, joined(layout))
    return differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []


def parts_in_float64(model_type):
    """The largest differences of log-probs, and of a parameter's gradient as a share of its norm, over tp 2 in float64."""
    config = config_of(model_type)
    data = mixed_rows(config)
    widen = {"float": torch.Tensor.double}  # layers that compute in float32 compute in float64 too
    with patch.multiple(torch.Tensor, **widen), patch.object(layouts, "tiny_model", double_model):
        found, alone = run_pass(config, data, joined(Layout(tp=2))), run_pass(config, data)
    assert found["gradients"].keys() == alone["gradients"].keys()
    assert all(gradient.dtype == torch.float64 for gradient in alone["gradients"].values())
    shares = [
        float((found["gradients"][name] - gradient).norm() / gradient.norm())
        for name, gradient in alone["gradients"].items()
    ]
    return float((found["log_probs"] - alone["log_probs"]).abs().max()), max(shares)


def double_model(*args, **kwargs):
    return tiny_model(*args, **kwargs).double()


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {}


def learn(path, data, layout=None, updates=2, folder=None, resume=None, lr=1e-3):
    """Losses and gradient norms of updates, and log-probs and weights after them."""
    config = ActorConfig(
        path, optimizer=OptimizerConfig(lr=lr, max_grad_norm=0.1), temperature=TEMPERATURE, token_budget=60
    )
    actor = ActorWorker(config, CPU, Ranks() if layout is None else joined(layout))
    if resume is not None:
        actor.load(resume)
    metrics = [actor.update(data, pg_loss) for _ in range(updates)]
    curve = torch.tensor([[step["actor/loss"], step["actor/grad_norm"]] for step in metrics])
    if folder is not None:
        actor.save(folder)
    weights = {name: weight.clone() for name, weight in actor.named_weights()}
    return curve, actor.log_probs(data)["old_log_probs"], weights


# The test itself


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    found = {}
    for model_type in LAYOUT_TYPES:
        config, path = config_of(model_type), tmp_path_factory.mktemp(model_type)
        tiny_model(model_type, config=config).save_pretrained(path)
        data = mixed_rows(config)
        data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
        found[model_type] = str(path), data, tmp_path_factory.mktemp("saved")
    return found


@pytest.fixture(scope="module")
def outcomes(checkpoints, tmp_path_factory):
    cases = {
        (model_type, name): partial(equals_one_process, model_type, LAYOUTS[name])
        for model_type in LAYOUT_TYPES
        for name in layouts_of(model_type)
    }
    cases |= {
        (model_type, "pp 2"): partial(learn, path, data, Layout(pp=2), folder=folder, lr=RATES.get(model_type, 1e-3))
        for model_type, (path, data, folder) in checkpoints.items()
    }
    cases |= {
        (model_type, "gradients, pp 2"): partial(equals_one_process, model_type, Layout(pp=2))
        for model_type in STAGED_TYPES
    }
    cases |= {
        (model_type, f"videos, {name}"): partial(equals_one_process, model_type, layout, film_rows)
        for model_type in VIDEO_TYPES
        for name, layout in FILM_LAYOUTS.items()
    }
    cases |= {"float64": partial(parts_in_float64, "gemma4")}
    return run_ranks(2, cases, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(("model_type", "layout"), [(each, name) for each in LAYOUT_TYPES for name in layouts_of(each)])
def test_two_ranks_compute_what_one_computes(outcomes, model_type, layout):
    for outcome in outcomes[model_type, layout]:
        assert outcome == [], outcome


@pytest.mark.parametrize("layout", FILM_LAYOUTS)
@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_two_ranks_compute_what_one_computes_of_videos(outcomes, model_type, layout):
    for outcome in outcomes[model_type, f"videos, {layout}"]:
        assert outcome == [], outcome


@pytest.mark.parametrize("model_type", STAGED_TYPES)
def test_two_stages_compute_what_one_process_computes(outcomes, model_type):
    for outcome in outcomes[model_type, "gradients, pp 2"]:
        assert outcome == [], outcome


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    cases = {
        (model_type, name): partial(equals_one_process, model_type, (PRODUCTS | WITH_EXPERTS)[name])
        for model_type in STAGED_TYPES
        for name in products_of(model_type)
    }
    return run_ranks(4, cases, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(
    ("model_type", "layout"), [(each, name) for each in STAGED_TYPES for name in products_of(each)]
)
def test_four_ranks_with_stages_compute_what_one_computes(products, model_type, layout):
    for outcome in products[model_type, layout]:
        assert outcome == [], outcome


def test_rounding_alone_separates_halves_of_gemma_4_from_the_whole(outcomes):
    """In float32 its gradient norms part by 2e-3 within five updates of Adam (`test_pipeline.py`)."""
    for outcome in outcomes["float64"]:
        assert not isinstance(outcome, str), outcome
        assert max(outcome) < 1e-12


@pytest.mark.parametrize("model_type", LAYOUT_TYPES)
def test_two_stages_learn_what_one_process_learns_and_their_checkpoint_goes_on(outcomes, checkpoints, model_type):
    path, data, folder = checkpoints[model_type]
    at = {"lr": RATES.get(model_type, 1e-3)}
    expected = learn(path, data, **at)
    for outcome in outcomes[model_type, "pp 2"]:
        assert_alike(outcome, expected)
    assert_alike(learn(path, data, updates=1, resume=folder, **at), learn(path, data, updates=3, **at))


def assert_alike(found, expected):
    assert not isinstance(found, str), found
    torch.testing.assert_close(found[0], expected[0][-len(found[0]) :], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=0)
    assert found[2].keys() == expected[2].keys()
    for name, weight in found[2].items():
        assert (weight - expected[2][name]).abs().mean() < 1e-5, name
