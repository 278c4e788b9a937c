"""Updates that float32 cannot hold are refused by name, and change nothing."""

import math
from dataclasses import replace

import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto_server.engine.trained_adapter import LARGEST_GRADIENT, check_settings
from helpers.served_models import ADAM, gradients, new_model, rows, run_pass
from workers.model.model_config import AdamParams, OptimizerConfig
from workers.training.optimizer import Optimizer

TOO_LARGE = [
    {"learning_rate": 1e38},  # matrices whose gradient is 0 would be NaN
    {"learning_rate": 1e38, "grad_clip_norm": 1e-3},
    {"learning_rate": 3e38, "beta1": 0.0},
    {"learning_rate": 1e30, "weight_decay": 1e30},
    {"learning_rate": 1e4, "weight_decay": 3e38, "eps": 1e30},
]


def state_of(engine, name: str) -> dict[str, torch.Tensor]:
    """What a step may change."""
    trained = engine._models[name]
    found = {key: value.clone() for key, value in (*trained.matrices.items(), *trained.state().items())}
    return found | {f"{key}.grad": value.clone() for key, value in gradients(engine, name).items() if value is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [1e300, math.inf, math.nan])
def test_settings_beyond_float32_are_refused_by_name(name, value):
    with pytest.raises(
        InvalidConfig, match=rf"^{name}={value}: must be at most 3\.40282e\+38".replace("e+300", r"e\+300")
    ):
        AdamParams(**{name: value})
    AdamParams(grad_clip_norm=1e300)  # no gradient is clipped
    with pytest.raises(InvalidConfig, match="grad_clip_norm=nan"):
        AdamParams(grad_clip_norm=math.nan)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e300}, r"^lr=1e\+300: must be at most"),
        ({"weight_decay": 1e300}, r"^weight_decay=1e\+300: must be at most"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan: must be at least 0"),
        ({"betas": (-1.0, 0.9)}, r"^betas=\(-1.0, 0.9\): must be at least 0 and below 1"),
        ({"min_lr_ratio": -1.0}, "^min_lr_ratio=-1.0: must be at least 0"),
    ],
)
def test_options_of_a_run_beyond_float32_are_refused_by_their_own_names(settings, said):
    with pytest.raises(InvalidConfig, match=said):
        OptimizerConfig(**settings)


@pytest.mark.parametrize("settings", TOO_LARGE)
def test_an_update_beyond_float32_is_refused_and_the_run_goes_on_as_if_it_had_never_come(engine, settings):
    names = "disturbed", "undisturbed"
    for name in names:
        new_model(engine, name, seed=1)
    for seed in range(3):
        for name in names:
            run_pass(engine, name, rows(engine, "cross_entropy", seed=seed))
        before = state_of(engine, "disturbed")
        with pytest.raises(InvalidConfig, match="no update was made, and the gradients are kept") as refused:
            engine.optim_step("disturbed", replace(ADAM, **settings))
        assert f"learning_rate={settings['learning_rate']:g}" in str(refused.value)
        assert_equal(state_of(engine, "disturbed"), before)
        for name in names:
            engine.optim_step(name, ADAM)
    assert_equal(state_of(engine, "disturbed"), state_of(engine, "undisturbed"))
    for name in names:
        engine.release(name)


@pytest.mark.slow
def test_the_settings_that_are_taken_leave_numbers_of_float32_for_the_largest_gradients():
    generator = torch.Generator().manual_seed(0)

    def sampled(low: float, high: float) -> float:
        """A number from 10^low to 10^high."""
        return float(10 ** (low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)))

    made = 0
    for _ in range(200):
        matrix = torch.nn.Parameter(torch.randn(8, generator=generator))
        optimizer = Optimizer([matrix], OptimizerConfig())
        for _ in range(4):
            betas = 1 - sampled(-15, 0), 1 - sampled(-15, 0)
            params = AdamParams(sampled(-10, 6), *betas, sampled(-20, 3), sampled(-10, 5))
            try:
                check_settings(params)
            except InvalidConfig:
                continue
            matrix.grad = LARGEST_GRADIENT / 3 * (2 * torch.rand(8, generator=generator) - 1)
            optimizer.step(params)
            made += 1
            assert bool(matrix.isfinite().all())
            assert all(bool(each.isfinite().all()) for each in optimizer.moments[matrix].values())
    assert made > 100
