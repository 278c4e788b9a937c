"""Training on preferred answers: TRL's losses on the same rows, pairs in one micro-batch, the reference on disk, exact resume."""

import base64
import importlib
import io
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto.errors import InvalidColumn, InvalidConfig, UserFunctionFailed
from helpers.checkpoints import write_checkpoint
from recipes.demo.rows import DrawnPairs
from recipes.dpo import REFERENCE_FILE, PreferenceConfig, main, parse, preference_loss
from recipes.run.preferences import RECORD, REFERENCE, sent
from recipes.watch.metrics_file import read_metrics
from rollout.answers import AnswersBuilder
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.micro_batches import micro_batches
from workers.training.mini_batches import share_out

GOLDEN = json.loads(Path(__file__).with_name("trl_preference_losses.json").read_text())
"""What TRL 1.16 computes: python benchmarks/dpo_step.py --pairs 6 --trl-python TRL-VENV/bin/python --golden FILE"""


@pytest.mark.slow
def test_losses_are_those_of_trl_on_the_same_rows(tmp_path, monkeypatch):
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr("sys.path", [*sys.path, str(benchmarks)])  # last: its dataproto.py is not the library
    beside_trl = importlib.import_module("dpo_step")
    beside_trl.prepare(tmp_path, GOLDEN["settings"])
    ours = beside_trl.losses(tmp_path, GOLDEN["settings"]["compared"])
    assert ours.keys() == GOLDEN["losses"].keys()
    assert ours == pytest.approx(GOLDEN["losses"], abs=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def rows(checkpoint):
    builder = AnswersBuilder.from_pretrained(checkpoint, 256)
    data = builder([DrawnPairs()[place] for place in range(6)])
    data[REFERENCE] = torch.linspace(-3, 3, len(data))
    return sent(data)


def test_a_pair_is_in_one_micro_batch_and_the_update_is_the_same(checkpoint, rows):
    loss = partial(preference_loss, config=PreferenceConfig())
    found = []
    for budget in (4096, 100):
        actor = ActorWorker(ActorConfig(checkpoint, token_budget=budget, dtype="float32"))
        parts = micro_batches(rows, actor.module, budget)
        assert all(part.rows["pair"][::2].equal(part.rows["pair"][1::2]) for part in parts)
        found.append((len(parts), actor.update(rows, loss, aggregation="seq-mean-token-mean")))
    (one, whole), (several, split) = found
    assert (one, several > 2) == (1, True)
    for name in ("actor/loss", "actor/grad_norm", "rewards/margins", "rewards/accuracies"):
        assert split[name] == pytest.approx(whole[name], abs=1e-5), name


OWN_LOSSES = """
def margins(chosen_ratios, rejected_ratios, beta):
    return -beta * (chosen_ratios - rejected_ratios)

def mean(chosen_ratios):
    return chosen_ratios.mean()

def answers(ratios, kl):
    return -ratios

def half(ratios, kl):
    return -ratios[::2]

def wrong(chosen_ratios):
    return chosen_ratios + [1.0]
"""


def test_a_loss_of_ones_own_gives_one_number_for_each_pair_or_answer(rows, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN_LOSSES)
    outputs = SimpleNamespace(log_probs=torch.zeros(rows["response_mask"].shape))
    data = rows[:]
    data["desirable"] = torch.tensor([1, 0] * 6)

    def loss(name):
        return preference_loss(outputs, data, PreferenceConfig(loss=f"{file}:{name}", beta=0.5))[0]

    margins = -0.5 * (data[REFERENCE][1::2] - data[REFERENCE][::2])
    assert loss("margins")[:, 0].tolist() == pytest.approx(margins.repeat_interleave(2).tolist())
    assert loss("answers")[:, 0].tolist() == pytest.approx(data[REFERENCE].tolist())
    with pytest.raises(InvalidColumn, match=r"mine.py:mean returned \(\), .* one number for each pair \(6,\)"):
        loss("mean")
    with pytest.raises(InvalidColumn, match=r"mine.py:half returned \(6,\), .* one number for each answer \(12,\)"):
        loss("half")
    with pytest.raises(UserFunctionFailed, match=r"mine.py:wrong raised .*mine.py"):
        loss("wrong")


def test_ranks_get_whole_pairs(rows):
    for part in share_out(rows, 4):
        pairs = part["pair"].numpy()
        assert np.array_equal(pairs[::2], pairs[1::2])


def picture(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [
        {
            "prompt": f"Number {i}?",
            "chosen": "red",
            "rejected": "blue" * (1 + i % 3),
            "images": [picture((9 * i, 0, 0))],
        }
        for i in range(15)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def arguments(checkpoint, data_path, directory, *more):
    paths = ["--preset", "any", "--model-path", checkpoint, "--data-path", data_path, "--output-dir", str(directory)]
    settings = "--batch-size 4 --steps 4 --eval-rows 3 --save-every 2 --eval-every 2"
    optimizer = "--optimizer.lr 1e-3 --optimizer.schedule constant"
    return [*paths, *settings.split(), *optimizer.split(), *more]


@pytest.mark.slow
def test_a_resumed_run_is_exact_and_asks_the_reference_once_an_answer(checkpoint, data_path, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(arguments(checkpoint, data_path, whole)) == 0
    assert main(arguments(checkpoint, data_path, cut, "--steps", "2")) == 0
    records = cut / REFERENCE_FILE
    records.write_bytes(records.read_bytes()[:-5])  # as a killed process may leave it
    assert main(["--resume", str(cut), "--steps", "4"]) == 0
    for name in ("train/loss", "rewards/margins", "actor/grad_norm", "val/loss"):
        found, expected = (
            [row[name] for row in read_metrics(run / "metrics.jsonl") if name in row] for run in (cut, whole)
        )
        assert found == expected, name
    keys = np.fromfile(whole / REFERENCE_FILE, RECORD)["key"]
    assert len({key.tobytes() for key in keys}) == len(keys) == 2 * 15  # 12 to train on, 3 held out
    kept = [json.loads(line) for line in (whole / "rollouts/training/step_1.jsonl").read_text().splitlines()]
    assert {row["response"]: row["ground_truth"] for row in kept if len(row["response"]) <= 4} == {
        "red": "chosen",
        "blue": "rejected",
    }
    assert all(row["prompt"].startswith("Number ") for row in kept)


@pytest.mark.slow
def test_adapters_with_their_base_as_reference_and_kto(checkpoint, data_path, tmp_path, capsys):
    more = ["--lora-rank", "2", "--algorithm.loss", "kto", "--algorithm.undesirable-weight", "2"]
    more += ["--batch-size", "2"]  # so that the last of the 3 held-out rows has no other prompt next to it
    assert main(arguments(checkpoint, data_path, tmp_path / "run", *more)) == 0
    first, *_, last = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert first["train/loss"] == pytest.approx(0.75)  # of the base itself: 0.5 x (1 + 2) / 2
    assert first["rewards/ratios"] == pytest.approx(0.0, abs=1e-6)
    assert abs(last["rewards/ratios"]) > 1e-3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--algorithm.loss", "dpo"], "choose one of sigmoid"),
        (["--algorithm.label-smoothing", "0.5"], "below 0.5"),
        (["--algorithm.beta", "inf"], "must be a number above 0"),
        (["--algorithm.loss", "kto", "--algorithm.desirable-weight", "inf"], "must be numbers above 0"),
        (["--algorithm.loss", "kto", "--batch-size", "1"], "another prompt of the batch: take at least 2"),
        (
            ["--algorithm.loss", "hinge", "--algorithm.label-smoothing", "0.1"],
            "sigmoid, robust and sigmoid_norm have it",
        ),
        (["--engine", "vllm"], "nothing is generated"),
    ],
)
def test_options_without_effect_are_refused(options, reason):
    with pytest.raises(InvalidConfig, match=reason):
        parse(options)
