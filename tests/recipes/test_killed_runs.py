"""Runs that are killed, in the middle of episodes or with samples that are carried over, and go on without losing any."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, assert_same_run
from helpers.option_files import in_files
from recipes import geo3k_grpo, walk
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.run.synthetic_environment import demonstrated_model

pytestmark = pytest.mark.long

KILL = """
import os, signal
from pathlib import Path

calls = 0
here = Path(__file__).parent

def kill():
    global calls
    calls += (here / "disturbed/global_step_2").exists()
    if calls == 2 and (left := here / "kills").exists():
        left.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""
SHORT = "--batch-size 2 --algorithm.n 2 --eval-rows 2 --eval-every 9 --save-every 1 --steps 4 --token-budget 600"


def killed_and_resumed(
    module: str, main, options: list[str], folder: Path, status: int = -signal.SIGKILL
) -> tuple[Path, Path]:
    """The directories of a run that was killed and resumed, and of one that was not disturbed."""
    disturbed, whole = folder / "disturbed", folder / "whole"
    (folder / "kills").touch()
    command = [sys.executable, "-m", module, *options, "--output-dir", str(disturbed)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == status, done.stderr[-2000:]
    assert not (folder / "kills").exists(), done.stderr[-2000:]
    assert {path.name for path in disturbed.glob("global_step_*")} >= {"global_step_2"}
    assert main(["--resume", str(disturbed)]) == 0
    assert main([*options, "--output-dir", str(whole)]) == 0
    return disturbed, whole


def test_samples_that_are_carried_over_survive_the_process(tmp_path):
    """It is killed while it scores responses; some samples have begun then."""
    (tmp_path / "mine.py").write_text(KILL + REWARD.replace("    return", "    kill()\n    return"))
    model = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    options = [
        *SHORT.split(),
        "--preset",
        "any",
        "--model-path",
        model,
        "--reward",
        f"{tmp_path}/mine.py:score",
        "--optimizer.lr",
        "1e-3",
    ]
    more = "--max-prompt-length 500 --max-response-length 12 --rollout.staleness 2 --eval-first False"
    disturbed, whole = killed_and_resumed("recipes.geo3k_grpo", geo3k_grpo.main, [*options, *more.split()], tmp_path)
    assert_same_run(disturbed, whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert any(row["training/carried_groups"] for row in rows)
    assert 1 <= max(row["training/staleness/max"] for row in rows) <= 2


ENVIRONMENT = '''
from rollout.environments import Observation


class Echo:
    """Answers with the lengths of the actions so far."""

    def reset(self, row, seed):
        self.said = []
        return Observation(["Say something."])

    def step(self, action):
        kill()
        self.said.append(len(action))
        return Observation([str(self.said)], reward=1 / (1 + self.said[-1]), done=len(self.said) == 3)
'''


AGENT = '''
from openai import AsyncOpenAI


async def agent(task):
    """Says the lengths of the answers so far."""
    messages, said = list(task.messages), []
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(3):
            reply = (await client.chat.completions.create(model=task.model, messages=messages)).choices[0].message
            kill()
            said.append(len(reply.content or ""))
            task.reward(1 / (1 + said[-1]))
            messages += [reply, {"role": "user", "content": str(said)}]
    return 0.0
'''
PLAYED = {"environment": (ENVIRONMENT, "Echo"), "agent": (AGENT, "agent")}


def episodes_of(directory: Path) -> dict[str, list[str]]:
    """The texts of each group that the run has learned from."""
    found: dict[str, list[str]] = {}
    for number in range(1, 5):
        lines = (directory / f"rollouts/training/step_{number}.jsonl").read_text().splitlines()
        groups: dict[str, list[str]] = {}
        for row in map(json.loads, lines):
            groups.setdefault(row["uid"], []).append(row["response"])
        assert len(groups) == 2
        assert not groups.keys() & found.keys()  # each group once
        found |= groups
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """It has learned to end its answers."""
    folder = tmp_path_factory.mktemp("model") / "model"
    return str(demonstrated_model(folder, 0, walk.WALK, WarmUpPhaseConfig(steps=20, batch_size=8)))


@pytest.mark.parametrize(
    ("played", "staleness", "on_ray"),
    [
        ("environment", "None", False),
        ("environment", "2", False),
        ("agent", "None", False),
        ("agent", "2", False),
        ("agent", "2", True),
    ],
)
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_in_the_middle_of_episodes_loses_none(played, staleness, on_ray, model, tmp_path):
    """On Ray one of two processes with agents is killed, which ends the run."""
    code, name = PLAYED[played]
    (tmp_path / "own.py").write_text(KILL + code)
    rows = [{"problem": f"Say {number}.", "answer": str(number), "images": []} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        *SHORT.split(),
        "--preset",
        "any",
        "--model-path",
        model,
        "--data-path",
        f"{tmp_path}/rows.jsonl",
        "--optimizer.lr",
    ]
    options += [
        "1e-3" if staleness == "None" else "0",
        f"--{played}",
        f"{tmp_path}/own.py:{name}",
        "--eval-first",
        "False",
    ]
    options += ["--max-response-length", "3", "--rollout.staleness", staleness]
    options += (
        in_files(["--on", "ray", "--layout.dp", "2", "--ray.object-store-gib", "0.2"], tmp_path) if on_ray else []
    )
    status = 2 if on_ray else -signal.SIGKILL
    disturbed, whole = killed_and_resumed("recipes.walk", walk.main, options, tmp_path, status)
    found, expected = episodes_of(disturbed), episodes_of(whole)
    assert any("\n" in text for texts in expected.values() for text in texts)  # of several turns
    if staleness == "None":
        assert_same_run(disturbed, whole)
        assert found == expected
    else:  # which groups are whole first depends on the time that environments take, and their episodes do not
        rows = [json.loads(line) for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
        assert any(row["training/carried_groups"] for row in rows)
        assert len(found.keys() & expected.keys()) > 4
        assert {uid: found[uid] for uid in found.keys() & expected.keys()} == {
            uid: expected[uid] for uid in found.keys() & expected.keys()
        }
