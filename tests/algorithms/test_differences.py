import math

import numpy as np
import pytest
import torch

from dataproto import DataProto
from recipes.algorithms.mismatch import difference_metrics
from recipes.algorithms.options import AlgorithmConfig
from recipes.run.phases import log_probs_before_update

ACTOR = torch.tensor([[0.4, 0.9, 0.5], [0.1, 0.6, 0.5]]).log()
ENGINE = torch.tensor([[0.1, 0.6, 0.5], [0.4, 0.9, math.nan]]).log()
PREFIX = "training/rollout_probs_diff_"


def batch(**columns):
    return DataProto.from_dict(
        {"response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]), "rollout_log_probs": ENGINE, **columns},
        non_tensors={"multi_modal_inputs": [{"pixel_values": torch.zeros(1)}, {}], "uid": np.array(["a", "b"], object)},
    )


def test_by_hand():
    found = difference_metrics(batch(), ACTOR)
    assert found[f"{PREFIX}mean"] == pytest.approx(4 * 0.3 / 5)
    assert found[f"{PREFIX}max"] == pytest.approx(0.3)
    assert found[f"{PREFIX}std"] == pytest.approx(math.sqrt(4 * 0.09 / 5 - 0.24**2))
    assert found[f"{PREFIX}log_max"] == found[f"{PREFIX}text_log_p99"] == pytest.approx(math.log(4))
    assert found[f"{PREFIX}images_log_mean"] == pytest.approx((math.log(4) + math.log(1.5)) / 3)
    assert found[f"{PREFIX}text_ratio_mean"] == pytest.approx((0.25 + 2 / 3) / 2)
    assert found[f"{PREFIX}ratio_off"] == pytest.approx(4 / 5)


def test_one_percent_of_the_differences_exceed_the_99th_percentile():
    engine = torch.zeros(1, 200)
    data = DataProto.from_dict({"response_mask": torch.ones(1, 200), "rollout_log_probs": engine})
    actor = torch.arange(200.0).unsqueeze(0)[:, torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert difference_metrics(data, actor)[f"{PREFIX}log_p99"] == 197


def test_rows_without_tokens_give_no_metrics():
    data = batch()
    data["response_mask"] = torch.zeros(2, 3)
    assert difference_metrics(data, ACTOR) == {}


def test_the_engine_is_compared_with_old_log_probs_or_the_first_minibatch():
    seen = ACTOR - 1
    single, whole = AlgorithmConfig(n=2, minibatch=1), AlgorithmConfig(n=2)

    def compared(rows, config):
        data = rows[:]
        return log_probs_before_update(data, rows, config, seen), data["actor_log_probs"]

    found, column = compared(batch(old_log_probs=ACTOR), single)
    assert found == difference_metrics(batch(), ACTOR)
    assert torch.equal(column, ACTOR)
    found, column = compared(batch(), whole)
    assert found == difference_metrics(batch(), seen)
    assert torch.equal(column, seen)
    trusted = batch()
    trusted["rollout_log_probs"] = trusted["old_log_probs"] = ENGINE.nan_to_num()
    found, column = compared(trusted, single)
    assert found == difference_metrics(trusted[:1], seen[:1])
    assert not any("text" in name for name in found)
    assert torch.equal(column.nan_to_num(nan=9.0), torch.cat([seen[:1], torch.full((1, 3), 9.0)]))
    found, _ = compared(DataProto.from_dict({"response_mask": torch.ones(2, 3)}, {"uid": ["a", "b"]}), whole)
    assert found == {}
    found, _ = compared(batch(old_log_probs=ACTOR), AlgorithmConfig(n=2, correction="token"))
    assert found == {}  # all rows were compared before the update
    rows = batch(old_log_probs=ACTOR)
    rows["old_log_probs"][0] = torch.nan  # the first mini-batch, which the update scores
    log_probs_before_update(rows, rows[:1], single, seen[:1])  # which left a row out
    assert torch.equal(rows["actor_log_probs"].nan_to_num(nan=9.0), torch.cat([seen[:1], torch.full((1, 3), 9.0)]))
    assert torch.equal(rows["old_log_probs"], torch.cat([seen[:1], ACTOR[1:]]))
