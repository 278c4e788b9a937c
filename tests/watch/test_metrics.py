import json
import math
import os
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import FileFormatError, InvalidConfig
from recipes.run.metrics import (
    best_at_k,
    majority_value,
    measure_rollouts,
    pass_at_k,
    rollout_metrics,
    speed_metrics,
    timed,
    validation_metrics,
)
from recipes.watch.metrics_file import MetricsLog, read_metrics, truncate_after


def batch():
    """Three rows, P = 3 and R = 4: prompts of 1, 3 and 2 tokens, responses of 2, 4 and 0."""
    return {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0.0, 1.0, 0, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]]),
        "advantages": torch.tensor([[0.5, 0.5, 9, 9], [-0.5, -0.5, -0.5, -0.5], [9, 9, 9, 9]]),
        "acc": [1.0, 0.0, 0.0],
    }


def rows(**columns):
    """The rows of `batch` with further columns, or others in the place of its own."""
    found = batch() | columns
    tensors = {name: column for name, column in found.items() if isinstance(column, torch.Tensor)}
    return DataProto.from_dict(tensors, non_tensors={name: found[name] for name in found.keys() - tensors.keys()})


def test_a_run_counts_responses_as_cut_at_max_tokens_not_at_the_longest():
    columns = {name: column for name, column in batch().items() if isinstance(column, torch.Tensor)}
    for longest, expected in ((9, 0), (4, 1 / 3)):
        data = DataProto.from_dict(columns, meta_info={"max_tokens": longest})
        assert measure_rollouts(data, {}, 1)["response_length/clip_ratio"] == pytest.approx(expected)


def test_rollout_metrics_by_hand():
    metrics = rollout_metrics(rows())
    expected = {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/score/min": 0.5,
        "critic/rewards/mean": 0.75,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.5,
        "critic/advantages/mean": (2 * 0.5 - 4 * 0.5) / 6,
        "critic/advantages/max": 0.5,
        "critic/advantages/min": -0.5,
        "reward/acc": 0.5,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3,
        "prompt_length/min": 1,
        "prompt_length/clip_ratio": 1 / 3,
        "response_length/mean": 2.0,
        "response_length/max": 4,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 3,
        "response/aborted_ratio": 1 / 3,
    }
    assert metrics == pytest.approx(expected)
    assert rollout_metrics(rows(), max_response_length=9)["response_length/clip_ratio"] == 0
    cut = rows(truncated=torch.tensor([True, False, True]))
    assert rollout_metrics(cut)["response/truncated_ratio"] == pytest.approx(2 / 3)


def test_scores_differ_from_rewards_where_the_batch_says_so():
    metrics = rollout_metrics(rows(token_level_scores=torch.ones(3, 4)))
    assert metrics["critic/score/mean"] == 4.0
    assert metrics["critic/rewards/mean"] == 0.75


def test_rows_without_a_verdict_are_no_wrong_answers():
    assert rollout_metrics(rows(acc=[None, 1.0, 0.0]))["reward/acc"] == 1.0


def test_each_number_of_a_reward_is_a_metric_over_the_rows_that_have_it():
    metrics = rollout_metrics(rows(iou=[0.25, 0.75, 9.0], format=[None, True, None], judge_text=["a", "b", "c"]))
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/acc": 0.5,
        "reward/iou": 0.5,  # the third row has no response
        "reward/format": 1.0,
    }


def test_an_empty_batch_has_no_statistics():
    empty = rows()[:0]
    metrics = rollout_metrics(empty)
    assert all(math.isnan(value) for value in metrics.values())
    assert speed_metrics(empty, {"timing_s/gen": 1.0}, 1)["timing_per_token_ms/gen"] == 0.0


def test_speed_metrics_by_hand():
    timings = {
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 6.0,
        "timing_s/testing": 1.0,
        "timing_s/step": 12.0,
        "x": 1.0,
    }
    assert speed_metrics(batch(), timings, devices=2) == pytest.approx(
        {
            "timing_per_token_ms/gen": 500.0,
            "timing_per_token_ms/update_actor": 500.0,
            "perf/total_num_tokens": 12,
            "perf/time_per_step": 12.0,
            "perf/throughput": 0.5,
        }
    )


def test_validation_metrics_by_hand():
    metrics = validation_metrics(
        ["a", "a", "b", "b", "b", "b"],
        [1, 2, 1, 1, 2, 2],
        {"acc": [1, 0, 1, 0, 1, 1], "reward": [1.0, 0.1, 0.9, 0.1, 1.0, 1.0], "format": [1, 1, 1, 1, 0, 0]},
    )
    assert metrics == pytest.approx(
        {
            "val-core/a/acc/mean@1": 0.5,
            "val-core/b/acc/mean@2": 0.75,
            "val-core/a/reward/mean@1": 0.55,
            "val-core/b/reward/mean@2": 0.75,
            "val-aux/a/format/mean@1": 1.0,
            "val-aux/b/format/mean@2": 0.5,
            "val-core/b/acc/best@2/mean": 1.0,
            "val-core/b/acc/pass@2": 1.0,
            "val-core/b/reward/best@2/mean": 0.95,
            "val-aux/b/format/best@2/mean": 0.5,
        }
    )


def test_pass_at_k_by_hand():
    # 5 samples, 2 right: of the 10 pairs 3 have none of them, of the 10 triples 1, of the 5 quadruples none.
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.4, 0.7, 0.9, 1.0])
    assert [pass_at_k(4, correct, 2) for correct in (0, 1, 4)] == [0, 0.5, 1]
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)  # large binomials stay exact


def test_best_at_k_is_the_mean_over_all_choices():
    values = [0.9, 0.1, 0.1, 0.5, 0.7]
    for k in (1, 2, 3, 5):
        chosen = [max(each) for each in combinations(values, k)]
        assert best_at_k(values, k) == pytest.approx(sum(chosen) / len(chosen))
    for right in range(6):
        assert best_at_k([1.0] * right + [0.0] * (5 - right), 3) == pytest.approx(pass_at_k(5, right, 3))


def test_several_samples_have_statistics_for_each_k():
    # Prompt 1: one of five is right; prompt 2: four. Pass@2: 4/10 and 1; pass@4: 4/5 and 1.
    acc = [0, 0, 1, 0, 0, 1, 1, 1, 1, 0]
    answers = ["7", "7", "9", None, None, "4", "4", "4", "4", "5"]
    metrics = validation_metrics(["a"] * 10, [1] * 5 + [2] * 5, {"acc": acc}, answers)
    assert metrics == pytest.approx(
        {
            "val-core/a/acc/mean@5": 0.5,
            "val-aux/a/acc/pass@2": 0.7,
            "val-aux/a/acc/best@2/mean": 0.7,
            "val-aux/a/acc/pass@4": 0.9,
            "val-aux/a/acc/best@4/mean": 0.9,
            "val-core/a/acc/pass@5": 1.0,
            "val-core/a/acc/best@5/mean": 1.0,
            "val-core/a/acc/maj@5/mean": 0.5,  # "7" is wrong, "4" right
        }
    )
    partial = validation_metrics(["a"] * 2, [1, 1], {"acc": [0.5, 0.25]})
    assert partial == {"val-core/a/acc/mean@2": 0.375, "val-core/a/acc/best@2/mean": 0.5}  # no pass@k of shares


def test_a_majority_needs_an_answer():
    assert majority_value([None, None], [1.0, 1.0]) == 0
    assert majority_value(["1", "2"], [0.25, 1.0]) == 0.25  # of equally frequent answers the first


def test_timed_adds_up_and_counts_failures(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr("recipes.run.metrics.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    metrics = {}
    with timed(metrics, "gen"):
        pass
    with pytest.raises(RuntimeError), timed(metrics, "gen"):
        raise RuntimeError
    assert metrics == {"timing_s/gen": 7.0}


def test_rows_survive_a_round_trip_and_nan_is_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"a": torch.tensor(0.5), "b": math.nan, "c": math.inf, "n": 3})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": 0.5, "b": null, "c": null, "n": 3}\n'
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["a"] == 0.5
    assert math.isnan(row["b"])


def test_resume_drops_later_rows_and_never_doubles(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(6):
            log.log(step, {"a": step})
    with MetricsLog(tmp_path, resume_after=3) as log:
        with pytest.raises(InvalidConfig, match="step 3"):
            log.log(3, {"a": 30})
        log.log(4, {"a": 40})
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 40]


def test_resume_from_nothing(tmp_path):
    with MetricsLog(tmp_path / "new", resume_after=-1) as log:
        log.log(0, {"a": 1})
    with MetricsLog(tmp_path / "new", resume_after=-1) as log:
        log.log(0, {"a": 2})
    assert [row["a"] for row in read_metrics(tmp_path / "new" / "metrics.jsonl")] == [2]


def test_a_new_run_does_not_touch_an_old_one(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"a": 1})
    with pytest.raises(InvalidConfig, match="earlier run"):
        MetricsLog(tmp_path)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")  # as an editor leaves it
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


WHOLE = b'{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n'


@pytest.mark.parametrize("cut", range(1, len(b'{"step": 1, "a": 2}\n')))
def test_a_line_cut_anywhere_by_a_kill_is_passed_over(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE[:-cut])
    whole = [row["step"] for row in read_metrics(path)]
    assert whole in ([0], [0, 1])
    assert (whole == [0, 1]) == (cut == 1)  # only the newline is missing
    truncate_after(path, 5)
    with MetricsLog(tmp_path, resume_after=whole[-1]) as log:
        log.log(7, {"a": 3})
    assert [row["step"] for row in read_metrics(path)] == [*whole, 7]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"a": 1}', b'{"step": null}', b"\xff\xfe"])
def test_damage_inside_the_file_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + line + b"\n" + WHOLE)
    with pytest.raises(FileFormatError, match=r"line 3: .*: mend or delete that line$"):
        read_metrics(path)


def test_a_failed_truncation_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        truncate_after(path, 0)
    assert path.read_bytes() == WHOLE


def test_each_row_reaches_the_file_at_once_in_one_write(tmp_path, monkeypatch):
    writes, write = [], os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or write(file, data))
    log = MetricsLog(tmp_path)
    log.log(0, {"a": 1})
    log.log(1, {"a": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(writes)
    assert [json.loads(line)["step"] for line in writes] == [0, 1]
    log.close()
    log.close()
