"""SFT, then GRPO, on questions about pictures, as users run it; see tests/data/test_easy_vqa_rows.py for the rows."""

import re
from pathlib import Path

import pytest

from dataproto.errors import InvalidConfig
from helpers.easy_vqa_files import write_easy_vqa
from helpers.geo3k_runs import assert_same_run, rows_of
from helpers.option_files import in_files
from recipes.configs.easy_vqa_config import TINY, parse
from recipes.data.easy_vqa_rows import open_easy_vqa
from recipes.easy_vqa import TINY_MODEL, main, policy_task, supervised_task
from recipes.rewards import short_answer_reward
from recipes.run.supervised import tiny_model
from rollout.prompts import PromptBuilder
from workers.roles.reward import RewardRow

ACCURACIES = ("val-core/easy_vqa", "val-aux/easy_vqa_other_pictures", "val-aux/easy_vqa_without_pictures")


def arguments(wheel: Path, output_dir: Path, *more: str) -> list[str]:
    sft = "--sft.steps 3 --sft.batch-size 6"
    grpo = "--batch-size 4 --algorithm.n 4 --algorithm.minibatch 2 --optimizer.warmup-steps 0 --steps 3"
    run = f"--eval-rows 5 --eval-every 2 --save-every 2 --data-path {wheel} --output-dir {output_dir}"
    return [*f"{sft} {grpo} {run}".split(), *more]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_easy_vqa(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="module")
def finished_run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert main(arguments(wheel, directory)) == 0
    return directory


@pytest.mark.slow
def test_a_run_has_two_phases_and_measures_the_controls(finished_run: Path) -> None:
    supervised, grpo = rows_of(finished_run / "sft"), rows_of(finished_run)
    assert [row["step"] for row in supervised] == [1, 2, 3]
    assert supervised[-1]["train/loss"] < supervised[0]["train/loss"]
    assert supervised[-1]["val/loss"] > 0
    assert [row["step"] for row in grpo] == [0, 1, 2, 3]
    for row in (grpo[0], grpo[2], grpo[3]):
        assert all(0 <= row[f"{name}/acc/mean@1"] <= 1 for name in ACCURACIES)
    assert [name for name in grpo[0] if name.startswith("val-core/")] == [
        "val-core/easy_vqa/acc/mean@1",
        "val-core/easy_vqa/reward/mean@1",
    ]  # --keep-best does not see the controls
    page = (finished_run / "report.html").read_text()
    assert page.count('<article class="card rollout">') >= 5  # held-out questions, with their pictures and both answers
    assert page.count("data:image/png") >= 5
    assert all(title in page for title in ("Controls", "Engine and actor", "easy_vqa_other_pictures"))
    assert (finished_run / "rollouts" / "training" / "step_3.jsonl").is_file()
    assert PromptBuilder.from_pretrained(finished_run / "global_step_3/actor/huggingface", 64)


@pytest.mark.slow
def test_after_the_last_step_all_test_questions_are_asked(finished_run: Path) -> None:
    def share_of(count: int, step: int) -> bool:
        accuracy = rows_of(finished_run)[step]["val-core/easy_vqa/acc/mean@1"]
        return abs(accuracy * count - round(accuracy * count)) < 1e-9

    assert share_of(18, 3)
    assert share_of(5, 0)  # eval_rows
    assert share_of(5, 2)


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_it_had_not_been(
    wheel: Path, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    directory = tmp_path / "halves"
    assert main(arguments(wheel, directory, "--steps", "2")) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^data: a stream or mixture of rows, \d+ a step; 5 held out$", printed, re.M)
    assert re.search(r"^data: \d+ rows read, \d+ to train on, 18 held out; ", printed, re.M)
    assert printed.count("measured: a step takes") == 3  # after its third step, and at the end of both phases
    assert main(arguments(wheel, directory, "--resume")) == 0
    mine, theirs = rows_of(directory), rows_of(finished_run)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    assert mine[3]["critic/score/mean"] == theirs[3]["critic/score/mean"]
    assert mine[3]["actor/pg_loss"] == pytest.approx(theirs[3]["actor/pg_loss"], abs=1e-6)
    assert_same_run(directory / "sft", finished_run / "sft")


@pytest.mark.slow
def test_an_earlier_run_is_not_overwritten_unasked(
    wheel: Path, finished_run: Path, capsys: pytest.CaptureFixture
) -> None:
    before = (finished_run / "metrics.jsonl").read_text()
    assert main(arguments(wheel, finished_run)) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert (finished_run / "metrics.jsonl").read_text() == before


def test_the_small_model_has_a_token_for_each_answer(tmp_path: Path, wheel: Path) -> None:

    rows = open_easy_vqa(wheel)
    path = tiny_model(tmp_path / "model", 0, False, TINY_MODEL, rows.texts())
    tokenizer = PromptBuilder.from_pretrained(path, 64).tokenizer
    for answer in {asked.answer for asked in rows.train.questions}:
        assert len(tokenizer(answer)["input_ids"]) == 1
    stamp = (path / "config.json").stat().st_mtime_ns
    assert tiny_model(path, 0, True, TINY_MODEL, rows.texts()) == path
    assert (path / "config.json").stat().st_mtime_ns == stamp


def test_both_phases_prepare_rows_in_processes(tmp_path: Path, wheel: Path) -> None:
    config, rows = (
        parse(in_files(["--num-workers", "3", "--output-dir", str(tmp_path)], tmp_path)),
        open_easy_vqa(wheel),
    )
    path = str(tiny_model(tmp_path / "model", 0, False, TINY_MODEL, rows.texts()))
    supervised, policy = supervised_task(config, rows, path), policy_task(config, rows, path, short_answer_reward)
    assert (supervised.loader.num_workers, policy.loader.num_workers) == (3, 3)


def test_the_reward_takes_the_answer_in_other_spelling_and_nothing_else() -> None:
    texts = ["circle", " The circle. ", "CIRCLE", "circle circle", "no", "", "a"]
    scores = [row["acc"] for row in short_answer_reward([RewardRow(text, "circle") for text in texts])]
    assert scores == [1, 1, 1, 0, 0, 0, 0]


def test_options_over_the_small_models_defaults(tmp_path: Path) -> None:
    config = parse(["--sft.steps", "7", "--steps", "9", "--output-dir", str(tmp_path)])
    assert (config.sft.steps, config.run.steps) == (7, 9)
    assert config.data.batch_size == TINY.data.batch_size


def test_help_tells_of_its_own_data_and_phases(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--data-path TEXT folder of an unpacked wheel of easy-vqa 1.0" in shown
    assert "--sft.steps INT" in shown
    assert "Geo3K" not in shown
    with pytest.raises(InvalidConfig, match="easy-VQA has its own test questions"):
        parse(["--eval-data-path", "mine.parquet"])


@pytest.mark.parametrize(
    "wrong",
    ["--epochs 1", "--eval-data-path x --data-path y", "--sft.steps 0", "--shuffled-control"],
)
def test_options_that_do_not_fit_are_refused(wrong: str, capsys: pytest.CaptureFixture) -> None:
    assert main(wrong.split()) == 2
    assert capsys.readouterr().err.startswith("error: ")
