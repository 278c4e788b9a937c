"""Updates that float32 cannot hold are refused by name, and change nothing."""

import math
from dataclasses import replace

import pytest
import torch

from dataproto.errors import InvalidConfig
from dataproto_server.engine import trained_adapter
from dataproto_server.engine.trained_adapter import LARGEST_GRADIENT, StepCheck, bound_after
from helpers.served_models import ADAM, gradients, new_model, rows, run_pass
from workers.model.model_config import LARGEST_FLOAT32, AdamParams, OptimizerConfig
from workers.training.optimizer import Optimizer, new_moments

TOO_LARGE = [
    {"learning_rate": 1e38},  # matrices whose gradient is 0 would be NaN
    {"learning_rate": 1e38, "grad_clip_norm": 1e-3},
    {"learning_rate": 3e38, "beta1": 0.0},
    {"learning_rate": 1e30, "weight_decay": 1e30},
    {"learning_rate": 1e4, "weight_decay": 3e38, "eps": 1e30},
]


def state_of(engine, name: str) -> dict[str, torch.Tensor]:
    """What a step may change."""
    trained = engine._models[name].trained
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
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan above 0"),
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


def test_a_large_rate_that_float32_holds_is_taken(engine):
    new_model(engine, "far")
    run_pass(engine, "far", rows(engine, "cross_entropy", seed=1))
    engine.optim_step("far", replace(ADAM, learning_rate=3e37))
    assert (
        1e37
        < max(float(each.detach().abs().max()) for each in engine._models["far"].trained.matrices.values())
        < math.inf
    )
    engine.release("far")


def test_numbers_that_grow_are_followed_from_step_to_step(engine):
    """Each step multiplies the weights by 1e12; the last one would be beyond float32."""
    new_model(engine, "growing")
    growing = replace(ADAM, learning_rate=1.0, weight_decay=1e12)
    made = 0
    with pytest.raises(InvalidConfig, match="weight_decay=1e"):
        while made < 5:
            for matrix in engine._models["growing"].trained.matrices.values():
                matrix.grad = torch.ones_like(matrix)
            engine.optim_step("growing", growing)
            made += 1
    assert made == 3
    engine._models["growing"].trained.check_finite()
    engine.release("growing")


def test_loaded_numbers_are_looked_at(engine, tmp_path):
    for name in ("small", "large"):
        new_model(engine, name)
    for name, number in (("small", 1.0), ("large", 1e38)):
        for matrix in engine._models[name].trained.matrices.values():
            matrix.data.fill_(number)
            matrix.grad = torch.ones_like(matrix)
    engine.save("large", tmp_path)
    decaying = replace(ADAM, learning_rate=1.0, weight_decay=10.0)
    engine.optim_step("small", decaying)
    engine.load("small", tmp_path, optimizer=True)
    for matrix in engine._models["small"].trained.matrices.values():
        matrix.grad = torch.ones_like(matrix)
    with pytest.raises(InvalidConfig, match="float32 does not hold"):
        engine.optim_step("small", decaying)
    for name in ("small", "large"):
        engine.release(name)


def test_an_ordinary_step_is_made_once(engine, monkeypatch):
    """Its bound says that it fits, whatever the gradients; the weights are looked at before the first one alone."""
    measured, norm = [], trained_adapter.get_total_norm
    monkeypatch.setattr(trained_adapter, "adamw", None)
    monkeypatch.setattr(trained_adapter, "get_total_norm", lambda *given: measured.append(1) or norm(*given))
    new_model(engine, "ordinary")
    for params in (AdamParams(), AdamParams(learning_rate=1e-2, weight_decay=0.1), AdamParams(learning_rate=1e4)):
        run_pass(engine, "ordinary", rows(engine, "cross_entropy", seed=1))
        engine.optim_step("ordinary", params)
    assert len(measured) == 1
    engine.release("ordinary")


def test_the_bound_holds_for_the_largest_gradients_and_any_settings():
    """Steps that the bound lets through leave no number beyond it."""
    draw = torch.Generator().manual_seed(0)

    def drawn(low: float, high: float) -> float:
        """A number from 10^low to 10^high."""
        return float(10 ** (low + (high - low) * torch.rand((), generator=draw, dtype=torch.float64)))

    made = 0
    for _ in range(400):
        first = drawn(-40, 37) * torch.randn(8, generator=draw)
        matrix, bound = torch.nn.Parameter(first), float(first.abs().max())
        optimizer = Optimizer([matrix], OptimizerConfig())
        for _ in range(4):
            betas = 1 - drawn(-15, 0), 1 - drawn(-15, 0)
            params = AdamParams(drawn(-10, 20), *betas, drawn(-20, 3), drawn(-10, 5))
            matrix.grad = LARGEST_GRADIENT / 3 * (2 * torch.rand(8, generator=draw) - 1)
            bound = bound_after(bound, params)
            if bound > LARGEST_FLOAT32 / 2:
                break
            optimizer.step(params)
            made += 1
            assert float(matrix.detach().abs().max()) <= bound * (1 + 1e-5)
            assert all(bool(each.isfinite().all()) for each in optimizer.moments[matrix].values())
    assert made > 100


def test_weights_that_are_not_finite_are_named_as_such():
    weight = torch.nn.Parameter(torch.tensor([1.0, math.nan]))
    with pytest.raises(InvalidConfig, match="the weights are not finite already"):
        StepCheck({"w": weight})(ADAM, {})


def test_a_step_without_gradients_fits():
    matrix = torch.nn.Parameter(torch.full((2,), 1e38))
    check = StepCheck({"m": matrix})
    check(AdamParams(learning_rate=1e38, weight_decay=1e38), {})
    matrix.grad = torch.ones(2)
    with pytest.raises(InvalidConfig, match="numbers in m that float32"):
        check(AdamParams(learning_rate=1e38, weight_decay=1e38), {matrix: new_moments(matrix)})


def test_a_step_by_what_earlier_gradients_left_is_tried_with_that():
    """The gradient is 0, and so is the mean of squares that forgets at once: the first mean is divided by eps."""
    matrix = torch.nn.Parameter(torch.ones(2))
    optimizer, check = Optimizer([matrix], OptimizerConfig()), StepCheck({"m": matrix})
    for gradient, params in ((1e18, AdamParams()), (0.0, AdamParams(learning_rate=1e10, beta2=0.0))):
        matrix.grad = torch.full((2,), gradient)
        if gradient:
            check(params, optimizer.moments)
        else:
            with pytest.raises(InvalidConfig, match="numbers in m that float32"):
                check(params, optimizer.moments)
        optimizer.step(params)
    assert not bool(matrix.isfinite().any())


def test_a_step_is_tried_with_clipped_gradients():
    """What Adam divides by eps is small then."""
    params = AdamParams(learning_rate=3e38, beta1=0.0, eps=1.0)
    for clip, fits in ((0.0, False), (1e-10, True)):
        matrix = torch.nn.Parameter(torch.full((2,), 1e38))
        matrix.grad, optimizer = torch.full((2,), -1e10), Optimizer([matrix], OptimizerConfig())
        clipped = replace(params, grad_clip_norm=clip)
        if fits:
            StepCheck({"m": matrix})(clipped, optimizer.moments)
        else:
            with pytest.raises(InvalidConfig, match="numbers in m that float32"):
                StepCheck({"m": matrix})(clipped, optimizer.moments)
        optimizer.step(clipped)
        assert bool(matrix.isfinite().all()) == fits
