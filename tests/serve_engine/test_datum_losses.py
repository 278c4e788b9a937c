import math

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig, MissingColumn
from dataproto_server.engine.datum_losses import (
    DATUM_LOSSES,
    cispo,
    cross_entropy,
    datum_loss,
    dro,
    importance_sampling,
    ppo,
)
from workers.model.packed_model import Outputs

P = [math.log(0.5), math.log(0.9), math.log(0.2)]
Q = [math.log(0.25), math.log(0.9), math.log(0.4)]  # ratios 2, 1, 0.5
A = [1.0, -2.0, -1.0]


def numbers(values, grad=False):
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def slope(loss_fn, *arguments, **options):
    p = numbers(P, grad=True)
    loss = loss_fn(p, *arguments, **options)
    loss.sum().backward()
    return loss.detach()[0].tolist(), p.grad[0].tolist()


def test_cross_entropy_is_a_weighted_sum():
    loss, grad = slope(cross_entropy, numbers([0.0, 1.0, 0.5]))
    assert loss == pytest.approx([0.0, -P[1], -0.5 * P[2]])
    assert grad == pytest.approx([0.0, -1.0, -0.5])


def test_importance_sampling_weighs_by_the_ratio():
    loss, grad = slope(importance_sampling, numbers(Q), numbers(A))
    assert loss == pytest.approx([-2.0, 2.0, 0.5])
    assert grad == pytest.approx([-2.0, 2.0, 0.5])  # the derivative of exp(p - q) by p is exp(p - q)


def test_ppo_takes_the_larger_of_clipped_and_unclipped_loss():
    loss, grad = slope(ppo, numbers(Q), numbers(A))
    # A > 0, r = 2: min(2, 1.2); A < 0, r = 1: -2; A < 0, r = 0.5: min(-0.5, -0.8)
    assert loss == pytest.approx([-1.2, 2.0, 0.8])
    assert grad == pytest.approx([0.0, 2.0, 0.0])
    loss, grad = slope(ppo, numbers(Q), numbers(A), clip_low_threshold=0.4, clip_high_threshold=3.0)
    assert loss == pytest.approx([-2.0, 2.0, 0.5])
    assert grad == pytest.approx([-2.0, 2.0, 0.5])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, grad = slope(cispo, numbers(Q), numbers(A), clip_low_threshold=0.8, clip_high_threshold=1.2)
    assert loss == pytest.approx([-1.2 * P[0], 2 * P[1], 0.8 * P[2]])
    assert grad == pytest.approx([-1.2, 2.0, 0.8])
    loss, _ = slope(cispo, numbers(Q), numbers(A))  # by default between 0 and 4
    assert loss == pytest.approx([-2 * P[0], 2 * P[1], 0.5 * P[2]])
    loss, _ = slope(cispo, numbers([P[0] - math.log(8), *Q[1:]]), numbers(A))
    assert loss[0] == pytest.approx(-4 * P[0])


def test_thresholds_may_differ_from_token_to_token():
    low, high = numbers([0.8, 0.8, 0.6]), numbers([1.5, 1.2, 1.2])
    loss, _ = slope(ppo, numbers(Q), numbers(A), clip_low_threshold=low, clip_high_threshold=high)
    assert loss == pytest.approx([-1.5, 2.0, 0.6])
    columns = {"rollout_log_probs": torch.tensor([Q]), "advantages": torch.tensor([A])}
    data = DataProto.from_dict({**columns, "clip_low_threshold": low.float(), "clip_high_threshold": high.float()})
    by_name, _ = datum_loss("ppo", clip_high_threshold=9.0)(Outputs(torch.tensor([P])), data)
    assert by_name[0].tolist() == pytest.approx(loss)
    with pytest.raises(InvalidConfig, match="'dro' does not read 'clip_"):
        datum_loss("dro")(Outputs(torch.tensor([P])), data)


def test_dro_has_a_squared_penalty():
    beta = 0.1
    loss, grad = slope(dro, numbers(Q), numbers(A), beta=beta)
    distance = [p - q for p, q in zip(P, Q)]
    assert loss == pytest.approx([-(p * a - 0.5 * beta * d**2) for p, a, d in zip(P, A, distance)])
    assert grad == pytest.approx([-a + beta * d for a, d in zip(A, distance)])


@pytest.mark.parametrize("name", DATUM_LOSSES)
def test_a_loss_by_name_reads_its_columns(name):
    formula, columns = DATUM_LOSSES[name]
    outputs = Outputs(torch.tensor([P]))
    data = DataProto.from_dict({column: torch.tensor([values]) for column, values in zip(columns, (Q, A))})
    loss, metrics = datum_loss(name)(outputs, data)
    assert torch.equal(loss, formula(outputs.log_probs, *(data[column] for column in columns)))
    assert metrics == {}
    with pytest.raises(MissingColumn, match=columns[0]):
        datum_loss(name)(outputs, DataProto.from_dict({"uid": torch.zeros(1, 3)}))


def test_options_reach_the_loss():
    data = DataProto.from_dict({"rollout_log_probs": torch.tensor([Q]), "advantages": torch.tensor([A])})
    loss, _ = datum_loss("ppo", clip_high_threshold=1.5)(Outputs(torch.tensor([P])), data)
    assert loss[0, 0].item() == pytest.approx(-1.5)
    with pytest.raises(InvalidConfig, match="0 <= low <= high"):
        datum_loss("cispo", clip_low_threshold=5.0)(Outputs(torch.tensor([P])), data)
    with pytest.raises(InvalidConfig, match="beta=-1"):
        datum_loss("dro", beta=-1)(Outputs(torch.tensor([P])), data)


def test_unknown_losses_and_options_raise_an_error():
    with pytest.raises(InvalidConfig, match="'hinge' is unknown: choose one of cross_entropy"):
        datum_loss("hinge")
    with pytest.raises(InvalidConfig, match="'gspo' has no public formula: choose one of cross_entropy"):
        datum_loss("gspo")
    with pytest.raises(InvalidConfig, match="beta=nan is not a finite number"):
        datum_loss("dro", beta=math.nan)
    with pytest.raises(InvalidConfig, match="'cross_entropy' has no option 'beta': it has none"):
        datum_loss("cross_entropy", beta=1)
