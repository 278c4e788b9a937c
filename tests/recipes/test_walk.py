"""GRPO over episodes, as users run it: the drawn grid, and an environment of one's own."""

import json
import re
import shutil

import pytest

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import assert_same_run, rows_of
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.configs.walk_config import parse
from recipes.demo.grid_walk import MOVES, GridWalk, WalkRows, distance, moved
from recipes.run.episode_roles import load_environment
from recipes.run.policy_gradient import evaluate
from recipes.run.synthetic_environment import demonstrated_model, name_departures
from recipes.walk import WALK, main, walk_task
from rollout.prompts import PromptBuilder

SMALL = (
    "--batch-size 2 --algorithm.n 2 --eval-rows 3 --warm-up.steps 2 --warm-up.batch-size 4 --optimizer.warmup-steps 0"
    " --steps 2 --eval-every 2"
)


@pytest.mark.slow
def test_a_run_walks_measures_the_controls_and_goes_on_after_an_interruption(tmp_path):
    directory = tmp_path / "run"
    saving = ["--save-every", "1", "--keep-checkpoints", "2"]
    assert main([*SMALL.split(), *saving, "--output-dir", str(directory)]) == 0
    rows = rows_of(directory)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in (rows[0], rows[2]):
        names = [name for name in row if name.endswith("/acc/mean@1")]
        assert names == [
            "val-core/walk/acc/mean@1",
            "val-aux/walk_other_pictures/acc/mean@1",
            "val-aux/walk_blank_pictures/acc/mean@1",
        ]
    assert 1 <= rows[1]["episode/turns/mean"] <= 6
    assert sum(value for name, value in rows[1].items() if name.startswith("episode/ended/")) == pytest.approx(1)
    assert rows[1]["actor/grad_norm"] > 0
    kept = [json.loads(line) for line in (directory / "rollouts/training/step_1.jsonl").read_text().splitlines()]
    assert len(kept) == 4
    assert all(row["images"] for row in kept)
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "global_step_2")
    assert main(["--resume", str(again)]) == 0
    assert_same_run(again, directory)
    trained = [
        "--preset",
        "tiny",
        "--model-path",
        str(directory / "global_step_2/actor/huggingface"),
        "--eval-rows",
        "3",
    ]
    found = evaluate(parse([*trained, "--output-dir", str(tmp_path / "answers")]), walk_task)
    assert {name: found[name] for name in names} == {name: rows[2][name] for name in names}


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    return demonstrated_model(
        tmp_path_factory.mktemp("walker") / "model", 0, WALK, WarmUpPhaseConfig(steps=2, batch_size=4)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("advantage", "others"),
    [
        ("gigpo", "--drop-cut"),
        ("turn_gae", "--algorithm.lam 0.9 --last-pictures 1"),
    ],
)
def test_a_run_compares_turns(advantage, others, walker, tmp_path):
    small = "--batch-size 2 --algorithm.n 2 --eval-rows 2 --steps 2 --save-every 0 --max-response-length 3"
    options = (
        f"{small} --algorithm.advantage {advantage} {others} --max-prompt-length 64 --preset any --model-path {walker}"
    )
    assert main([*options.split(), "--output-dir", str(tmp_path / "run")]) == 0
    row = rows_of(tmp_path / "run")[-1]
    if (
        advantage != "gigpo"
    ):  # a model that knows nothing ends few turns: with --drop-cut there may be nothing to learn from
        assert row["actor/grad_norm"] >= 0
    assert ("critic/vf_loss" in row) == ("gae" in advantage)


OWN = """
from rollout.environments import Observation


class Say:
    def reset(self, row, seed):
        self.truth = row["reward_model"]["ground_truth"]
        return Observation()

    def step(self, action):
        return Observation(reward=float(self.truth in action), done=True)


class Broken(Say):
    def reset(self, row, seed):
        raise RuntimeError("no")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), [("Say", []), ("Say", ["--memory-gib", "1"]), ("Broken", [])])
def test_an_environment_of_ones_own(name, memory, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    model = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    rows = [{"problem": f"Say {number}.", "answer": str(number), "images": []} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--batch-size 2 --algorithm.n 2 --eval-rows 2 --steps 1 --max-response-length 6 --save-every 0"
    named = [
        "--environment",
        f"{tmp_path}/own.py:{name}",
        "--preset",
        "any",
        "--model-path",
        model,
        "--data-path",
        f"{tmp_path}/rows.jsonl",
    ]
    status = main([*options.split(), *named, *memory, "--output-dir", str(tmp_path / "run")])
    printed, told = capsys.readouterr()
    if name == "Broken":
        assert status == 2
        written = tmp_path / "run/rollouts/training/step_1.jsonl"
        assert re.search(
            rf"every episode of step 1 failed \(4 rows\): .*RuntimeError: no .*own.py:.*; {written} has the",
            told,
        )
        assert all("RuntimeError: no" in json.loads(line)["end_message"] for line in written.read_text().splitlines())
        return
    assert status == 0
    assert r"chat template: it writes '\n' after the end token" in printed
    assert "data: 12 rows read, 10 to train on, 2 held out; 2 a step, 5 steps an epoch" in printed
    ended = {key for key in rows_of(tmp_path / "run")[1] if key.startswith("episode/ended/")}
    assert ended <= {"episode/ended/done", "episode/ended/length"}


def test_what_the_chat_template_does_to_earlier_turns_is_named_at_the_start(tmp_path, capsys):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    builder = PromptBuilder.from_pretrained(path, 300)
    template = builder.tokenizer.chat_template
    thoughtless = "{{ part['text'].split('</think>')[-1] if message['role'] == 'assistant' else part['text'] }}"
    builder.tokenizer.chat_template = template.replace("{{ part['text'] }}", thoughtless)
    name_departures(builder)
    newline, thinking = capsys.readouterr().out.splitlines()
    assert newline.startswith(r"chat template: it writes '\n' after the end token")
    assert thinking.startswith("chat template: it strips thinking from answers")
    forgetful = template.replace("for message in messages -", "for message in messages[-1:] -")
    assert forgetful != template
    builder.tokenizer.chat_template = forgetful
    with pytest.raises(InvalidConfig, match="leaves out answers"):
        name_departures(builder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--environment own.py:Say", "go together"),
        ("--reward mine.py:score", "come from their environment"),
        ("--warm-up.steps 0", "at least 1"),
        ("--last-pictures 1 --algorithm.advantage remax", "choose another advantage"),
        ("--algorithm.lam 0.9", "there is no critic: add --algorithm.advantage gae"),
        ("--algorithm.advantage reverse_kl", "run dataproto distil"),
        ("--engine vllm", "needs --tokens"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(options.split())


def test_a_file_without_the_environment_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert load_environment(f"{tmp_path}/own.py:Say")().step
    with pytest.raises(InvalidConfig, match="no function 'Walk'"):
        load_environment(f"{tmp_path}/own.py:Walk")


def test_a_walk_towards_the_goal_arrives_with_a_reward_of_one():
    for row in WalkRows(split="test", rows=20):
        walk, rewards = GridWalk(), []
        shown = walk.reset(row, seed=1)
        while not shown.done:
            move = next(
                move for move in MOVES if distance(moved(walk.agent, move), walk.goal) < distance(walk.agent, walk.goal)
            )
            shown = walk.step(f" {move.upper()} please")
            rewards.append(shown.reward)
        assert sum(rewards) == pytest.approx(1)
        assert shown.info == {"acc": 1.0}
        assert len(rewards) == distance(row["extra_info"]["agent"], row["extra_info"]["goal"]) <= 6


def test_controls_show_no_picture_of_their_own_grid():
    row = WalkRows(rows=1)[0]
    own = GridWalk().reset(row, 1).content[0].tobytes()
    for shown in ("other", "blank"):
        walk = GridWalk()
        first = walk.reset({"extra_info": {**row["extra_info"], "shown": shown}}, 1).content[0]
        assert first.tobytes() != own
        assert first.size == (112, 112)
