import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dataproto.errors import InvalidConfig
from workers.training import optimizer as optimizer_module
from workers.training.optimizer import (
    Optimizer,
    OptimizerConfig,
    clip_by_global_norm,
    learning_rate_factor,
    new_moments,
)


def one_parameter(value=1.0, **config):
    parameter = torch.nn.Parameter(torch.tensor([value]))
    return parameter, Optimizer([parameter], OptimizerConfig(**config))


def test_the_first_step_of_adamw_by_hand():
    parameter, optimizer = one_parameter(lr=0.1, weight_decay=0.5, max_grad_norm=100.0)
    parameter.grad = torch.tensor([3.0])
    metrics = optimizer.step()
    # decay: 1 - 0.1 * 0.5 = 0.95; the first Adam step is lr * sign(gradient)
    assert parameter.item() == pytest.approx(0.95 - 0.1, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(3.0)
    assert metrics["lr"] == pytest.approx(0.1)
    assert parameter.grad is None


def test_a_non_finite_gradient_skips_the_step_and_counts_it():
    parameter, optimizer = one_parameter(lr=0.1)
    parameter.grad = torch.tensor([math.nan])
    assert optimizer.step()["skipped_steps"] == 1
    assert parameter.item() == 1.0


def test_cosine_by_hand():
    config = OptimizerConfig(schedule="cosine", total_steps=4, min_lr_ratio=0.2)
    assert learning_rate_factor(0, config) == pytest.approx(1.0)
    assert learning_rate_factor(2, config) == pytest.approx(0.6)
    assert learning_rate_factor(9, config) == pytest.approx(0.2)


def test_new_moments_are_those_that_adamw_makes():
    parameter, optimizer = one_parameter(lr=0.1)
    assert not optimizer.moments
    parameter.grad = torch.tensor([0.0])
    optimizer.step()
    made, own = optimizer.moments[parameter], new_moments(parameter)
    assert made.keys() == own.keys()
    assert float(made.pop("step")) == 1 + float(own.pop("step"))
    for name, zeros in own.items():
        assert torch.equal(made[name], zeros)
        assert made[name].dtype == zeros.dtype
        assert not zeros.requires_grad


class FusedSteps(TorchFunctionMode):
    """Notes how many parameters each fused step takes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._fused_adamw_:
            self.sizes.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def test_many_parameters_are_stepped_in_parts_as_all_of_them_at_once():
    parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(150)]
    together = [nn.Parameter(each.detach().clone()) for each in parameters]
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, max_grad_norm=1e9)
    optimizer = Optimizer(parameters, config)
    plain = torch.optim.AdamW(together, lr=0.1, betas=config.betas, eps=1e-8, weight_decay=0.1, fused=True)
    for _ in range(2):
        for number, (one, other) in enumerate(zip(parameters, together, strict=True)):
            one.grad, other.grad = (torch.full((2,), float(number % 7 - 3)) for _ in range(2))
        with FusedSteps() as steps:
            optimizer.step()
        plain.step()
        assert steps.sizes == [64, 64, 22]
    assert all(torch.equal(one, other) for one, other in zip(parameters, together, strict=True))


def test_a_decaying_schedule_needs_its_length():
    with pytest.raises(InvalidConfig, match="total_steps"):
        one_parameter(schedule="linear")
    with pytest.raises(InvalidConfig, match="total_steps=3"):
        OptimizerConfig(schedule="linear", total_steps=3, warmup_steps=3)


@pytest.mark.parametrize("options", [{"lr": "1e-3"}, {"weight_decay": [0.1]}, {"max_grad_norm": "1"}])
def test_what_is_no_number_is_named(options):
    with pytest.raises(InvalidConfig, match=rf"{next(iter(options))}=.*: must be a number, and is a (str|list)"):
        OptimizerConfig(**options)


def test_clipping_counts_every_gradient_once_and_passes_over_those_that_are_not_there():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert clip_by_global_norm([parameters], max_norm=2.5) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([1.5, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert clip_by_global_norm([parameters[:1], parameters[1:]], max_norm=10.0) == pytest.approx(2.5)
    assert parameters[0].grad.tolist() == pytest.approx([1.5, 0.0])
    assert clip_by_global_norm([parameters[2:]], max_norm=1.0) == 0.0


def test_the_norm_over_stages_is_not_rounded(monkeypatch):
    """All stages clip by the same factor, that of a norm in float64."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([1.0])
    monkeypatch.setattr(optimizer_module, "gathered", lambda norms, stages: [norms, [2.0]])
    assert float(clip_by_global_norm([[parameter]], max_norm=0.1, stages=object())) == math.hypot(1, 2)


def test_gradients_that_are_not_finite_are_left_as_they_are():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    assert clip_by_global_norm([[parameter]], max_norm=1.0) == math.inf
    assert parameter.grad.tolist() == [math.inf, 1.0]
