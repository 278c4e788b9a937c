import math

import pytest
import torch

from dataproto.errors import InvalidConfig
from workers.optimizer import Optimizer, OptimizerConfig, clip_by_global_norm, learning_rate_factor


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


def test_state_round_trip_through_a_file_continues_to_the_bit(tmp_path):
    gradients = [torch.tensor([g]) for g in (3.0, -1.0, 0.5, 2.0)]
    config = {"lr": 0.1, "schedule": "linear", "total_steps": 9, "warmup_steps": 2}
    parameter, optimizer = one_parameter(**config)
    for gradient in gradients[:2]:
        parameter.grad = gradient.clone()
        optimizer.step()
    resumed, other = one_parameter(parameter.item(), **config)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for gradient in gradients[2:]:
        parameter.grad, resumed.grad = gradient.clone(), gradient.clone()
        assert optimizer.step() == other.step()
    assert torch.equal(parameter, resumed)


def test_a_decaying_schedule_needs_its_length():
    with pytest.raises(InvalidConfig, match="total_steps"):
        one_parameter(schedule="linear")
    with pytest.raises(InvalidConfig, match="total_steps=3"):
        OptimizerConfig(schedule="linear", total_steps=3, warmup_steps=3)


def test_clipping_counts_every_gradient_once_and_passes_over_those_that_are_not_there():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert clip_by_global_norm([parameters], max_norm=2.5) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([1.5, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert clip_by_global_norm([parameters[:1], parameters[1:]], max_norm=10.0) == pytest.approx(2.5)
    assert parameters[0].grad.tolist() == pytest.approx([1.5, 0.0])
    assert clip_by_global_norm([parameters[2:]], max_norm=1.0) == 0.0


def test_gradients_that_are_not_finite_are_left_as_they_are():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    assert clip_by_global_norm([[parameter]], max_norm=1.0) == math.inf
    assert parameter.grad.tolist() == [math.inf, 1.0]
