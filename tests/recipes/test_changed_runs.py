"""What a user changes after the first run: parts of the reward, several held-out sets, and options of a run that goes on."""

import json
import re

import pytest

from dataproto.errors import InvalidConfig
from helpers.geo3k_runs import rows_of
from recipes import walk
from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import main, parse
from recipes.run import evaluate
from recipes.watch.pages import number
from recipes.watch.report import write_report
from recipes.watch.rollout_files import load_rollouts
from recipes.watch.viewer import overview

REWARDS = """
def near(solution_str, ground_truth):
    return {"score": len(solution_str) / 99, "letters": len(set(solution_str))}

def short(completions, **columns):
    return [1 / (1 + len(each[0]["content"])) for each in completions]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    for name, count in (("train.jsonl", 8), ("easy/test.jsonl", 2), ("hard/test.jsonl", 3)):
        (folder / name).parent.mkdir(exist_ok=True)
        rows = [{"problem": f"Say {row}.", "answer": str(row), "data_source": "said"} for row in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARDS)
    (folder / "console.yaml").write_text("console-columns: [reward/letters]\n")
    model = make_tiny_model(folder / "model")
    words = (
        f"--preset tiny --model-path {model} --data-path {folder}/train.jsonl --config {folder}/console.yaml"
        f" --eval-data-path easy={folder}/easy/test.jsonl hard={folder}/hard/test.jsonl"
        f" --reward {folder}/mine.py:near {folder}/mine.py:short --reward-weights 0.8 0.2"
        " --batch-size 2 --algorithm.n 2 --algorithm.minibatch 2 --max-response-length 4 --save-every 1"
        " --optimizer.warmup-steps 0"
    )
    return words.split()


@pytest.fixture(scope="module")
def first_run(options, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "first"
    assert main([*options, "--steps", "2", "--output-dir", str(run)]) == 0
    return run


@pytest.mark.slow
def test_parts_of_the_reward_and_sets_are_measured_and_shown(first_run, capsys):
    row = rows_of(first_run)[-1]
    parts = {f"reward/{name}" for name in ("near", "short", "letters")}
    held_out = {f"val-aux/{name}/{part}/mean@1" for name in ("easy", "hard") for part in ("near", "short", "letters")}
    assert parts | held_out | {"val-core/easy/reward/mean@1", "val-core/hard/reward/mean@1"} <= row.keys()
    assert not any("said" in name for name in row)
    assert row["critic/score/mean"] == pytest.approx(0.8 * row["reward/near"] + 0.2 * row["reward/short"])
    answers = load_rollouts(first_run, 2)
    keys = [sample.key for sample in answers]
    assert [sample.source for sample in answers] == ["easy"] * 2 + ["hard"] * 3
    assert all(sample.parts.keys() == {"near", "short", "letters"} for sample in answers)
    assert [key.split()[0] for key in keys] == ["easy"] * 2 + ["hard"] * 3
    assert len(set(keys)) == 5  # the rows of both sets have the same source and the same places
    page = write_report(first_run).read_text()
    assert all(f"Reward: {name}" in page for name in ("near", "short", "letters"))
    assert f'<span class="badge">letters {number(answers[0].parts["letters"])}</span>' in page


@pytest.mark.slow
def test_a_run_goes_on_with_a_lower_rate_and_for_longer(first_run, capsys):
    change = ["--change", "optimizer.lr=1e-5", "steps=3", "reward-weights=0.5", "0.5"]
    assert main(["--resume", str(first_run), *change]) == 0
    shown = capsys.readouterr().out
    assert "after step 2: optimizer.lr 1e-05 (before 0.0005)" in shown
    assert "optimizer: the linear schedule ends with step 3 (before 2)" in shown
    assert "reward/letters" in shown  # a column of the console
    assert "held-out reward (mean of 2)" in shown  # in the summary
    last = rows_of(first_run)[-1]
    assert last["step"] == 3
    assert last["actor/lr"] == pytest.approx(1e-5 / 3)  # the linear schedule ends with the run
    assert last["critic/score/mean"] == pytest.approx(0.5 * last["reward/near"] + 0.5 * last["reward/short"])
    (changes,) = json.loads((first_run / "config.json").read_text())["changes"]
    assert changes["step"] == 2
    assert changes["steps"] == {"before": 2, "after": 3}
    assert parse(["--resume", str(first_run)]).optimizer.lr == 1e-5
    assert main(["--resume", str(first_run), "--optimizer.lr", "1"]) == 2
    assert "--change optimizer.lr=VALUE" in capsys.readouterr().err
    assert main(["--resume", str(first_run), "--change", "steps=2"]) == 2
    refused = capsys.readouterr()
    assert "--change steps=2 asks for no further one: name more than 3" in refused.err
    assert "loading the actor" not in refused.out


@pytest.mark.slow
def test_one_call_answers_held_out_sets_for_report_and_viewer(first_run, options, tmp_path, capsys):
    trained = first_run / "global_step_2" / "actor" / "huggingface"
    at = options.index("--data-path")
    own = [*options[:at], *options[at + 2 :], "--model-path", str(trained), "--output-dir", str(tmp_path / "answers")]
    assert main(own) == 2
    assert "--eval-data-path without --data-path" in capsys.readouterr().err
    found = evaluate(parse(own))
    printed = capsys.readouterr().out
    assert "rows read" not in printed
    means = [f"reward {found[f'val-core/{name}/reward/mean@1']:.4g}" for name in ("easy", "hard")]
    assert [re.search(f"^{name}: .*{mean}$", printed, re.M) for name, mean in zip(("easy", "hard"), means)]
    expected = next(row for row in rows_of(first_run) if row["step"] == 2)
    names = [name for name in found if name.startswith("val-core/")]
    assert len(names) == 2
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names})
    assert "easy" in (tmp_path / "answers" / "report.html").read_text()
    assert [*overview(tmp_path / "answers")["steps"]["held-out"]] == [0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            parse(["--eval-data-path", "test.jsonl"]),
            "no weights: give --model-path RUN/global_step_N/actor/huggingface",
        ),
        (parse(["--preset", "tiny", "--model-path", "gone"]), "no problems: give --eval-data-path"),
        (walk.parse(["--preset", "tiny", "--model-path", "gone"]), r"evaluate\(config, recipes.walk.walk_task\)"),
    ],
)
def test_an_evaluation_of_nothing_is_refused(config, says):
    with pytest.raises(InvalidConfig, match=says):
        evaluate(config)


def test_two_sets_of_one_name_are_told_to_be_named(options, capsys):
    sets = ["--eval-data-path", "a/test.jsonl", "b/test.jsonl"]
    assert main([*options, *sets]) == 2
    assert "a/test.jsonl and b/test.jsonl are both 'test': write NAME=PATH" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("change", ["eval-rows=2", "eval-data-path={folder}/easy/test.jsonl"])
def test_a_change_that_would_train_on_held_out_rows_is_refused_and_not_recorded(change, options, tmp_path, capsys):
    folder, run = re.search(r"(\S+)/train.jsonl", " ".join(options))[1], tmp_path / "run"
    rows = [json.dumps({"problem": f"Say {row}.", "answer": str(row)}) + "\n" for row in range(20)]
    (tmp_path / "one.jsonl").write_text("".join(rows))
    model, data = options[options.index("--model-path") + 1], str(tmp_path / "one.jsonl")
    small = ["--batch-size", "2", "--algorithm.n", "2", "--max-response-length", "4", "--steps", "1", "--no-eval-first"]
    assert main(["--preset", "tiny", "--model-path", model, "--data-path", data, *small, "--output-dir", str(run)]) == 0
    before = (run / "config.json").read_text(), (run / "config.yaml").read_text()
    assert main(["--resume", str(run), "--change", "steps=2", change.format(folder=folder)]) == 2
    assert "saved with rows=16, not" in (said := capsys.readouterr().err)
    assert "eval-rows and eval-data-path may hold out rows" in said
    assert main(["--resume", str(run), "--change", "steps=2", "--instruction", "Hi."]) == 2
    assert "--resume with data.instruction='Hi.'" in capsys.readouterr().err  # rather than the texts that it changes
    (tmp_path / "one.jsonl").write_text("".join(rows).replace("Say", "Name"))
    assert main(["--resume", str(run), "--change", "steps=2"]) == 2
    assert "saved with texts=" in capsys.readouterr().err
    (tmp_path / "one.jsonl").write_text("".join(rows))
    assert ((run / "config.json").read_text(), (run / "config.yaml").read_text()) == before
    assert main(["--resume", str(run), "--change", "steps=2"]) == 0
