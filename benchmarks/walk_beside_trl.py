"""Seconds to an accuracy of 0.9 in the synthetic grid: ``dataproto walk``, agents and TRL's `GRPOTrainer` with an environment.

    PYTHONPATH=FOLDER OMP_NUM_THREADS=1 python benchmarks/walk_beside_trl.py --work outputs/walk_beside_trl
    PYTHONPATH=FOLDER OMP_NUM_THREADS=1 python benchmarks/walk_beside_trl.py --work outputs/short --seeds 0 --steps 20

FOLDER holds TRL, e.g. from ``pip install --no-deps --target FOLDER trl accelerate``. For each seed all runs have the same small
model after the same warm-up, the same grids, numbers of episodes, optimizer, entropy bonus and limits, and the same greedy
evaluation in 64 held-out grids, which is not counted. The runs are:

- ``walk``: the recipe, whose advantages count a reward for the move that earned it.
- ``walk_grpo``: the recipe with the advantages that TRL has: one of GRPO for the whole episode.
- ``agent``: the recipe's advantages, and the walk as an agent through OpenAI's client, see ``benchmarks/walk_agents.py``.
- ``verifiers``: as ``walk_grpo``, and the walk as an environment of verifiers 0.4, which must be installed, see
  ``benchmarks/walk_by_verifiers.py``; its rows are those of seed 0.
- ``trl``: see ``benchmarks/trl_walk.py``.

Molt (PyPI ``molt-rl`` 0.2.1) has no run: each of its workers asks Ray for a GPU, and its trainer ends on a CPU with "Distributed
package doesn't have NCCL built in".

The table also tells how many lines a user writes for each, in addition to the grid itself: those of the agent, of the taskset
with its harness, or of TRL's environment with its data set, and not what only gives TRL the tokens of the other runs.

Each run ends when it reaches the target or after ``--steps``. Nothing else should run meanwhile: the table
has seconds of the clock and of this process's processor. A run that is complete in WORK is read and not run again:
``--runs verifiers`` may have a Python of its own.
"""

import argparse
import ast
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]


from recipes.configs.walk_config import WalkConfig, parse  # noqa: E402
from recipes.demo.grid_walk import GridWalk, WalkRows  # noqa: E402
from recipes.grpo import grpo_step  # noqa: E402
from recipes.run.episode_roles import Played  # noqa: E402
from recipes.run.policy_gradient import PolicyTask, run  # noqa: E402
from recipes.run.run_directory import over_the_run  # noqa: E402
from recipes.run.synthetic_environment import demonstrated_model, episode_task  # noqa: E402
from recipes.walk import WALK  # noqa: E402
from rollout.agents import AgentPlan  # noqa: E402
from rollout.engine import SamplingParams  # noqa: E402
from rollout.environments import EpisodePlan, TurnRenderer  # noqa: E402
from rollout.environments.episode_rows import episode_starts  # noqa: E402
from rollout.hf import HFEngine  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402

Row = dict[str, float]
GRPO = "--algorithm.advantage grpo"
RUNS = {"walk": "", "agent": "", "walk_grpo": GRPO, "verifiers": GRPO, "trl": ""}
WRITTEN = {
    "agent": [("walk_agents.py",)],
    "verifiers": [("walk_by_verifiers.py",), ("walk_agents.py", "walked")],
    "trl": [("trl_walk.py", "WalkTools", "as_dataset")],
}
"""What a user writes: files, or classes and functions of them."""
FIELDS = ("step", "seconds", "processor", "accuracy")


class Reached(Exception):
    """A run has the accuracy that is asked for."""


class Recorder:
    """The rows of a run: step, seconds and processor seconds of the steps so far, and the accuracy where it was measured."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[Row]()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if "accuracy" in row:
            print("  " + ", ".join(f"{name} {row[name]:.4g}" for name in FIELDS), flush=True)

    def finish(self) -> None:
        """Writes the file: a run is complete when it exists."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        draft.replace(self.path)


class Judge:
    """Greedy episodes in held-out grids, the same for all runs."""

    def __init__(self, checkpoint: Path, config: WalkConfig) -> None:
        self.engine = HFEngine(str(checkpoint))
        self.builder = PromptBuilder.from_pretrained(checkpoint, config.data.max_prompt_length)
        self.rows = WalkRows(0, "test", config.data.eval_rows)
        self.sampling, self.limits = config.eval_sampling(), config.episodes.limits()

    def __call__(self, model: Any) -> float:
        """The share of grids in which the model's weights arrive."""
        self.engine.load_weights((name, weight.detach()) for name, weight in model.named_parameters())
        renderer = TurnRenderer(self.builder)
        starts = episode_starts(self.builder(list(self.rows[:])), SamplingParams())
        played = EpisodePlan(GridWalk, self.limits).play(self.engine, renderer, starts, self.sampling)
        return sum(float(episode.info.get("acc", 0.0)) for episode in played) / len(played)


def config_of(name: str, seed: int, steps: int, eval_every: int, directory: Path) -> WalkConfig:
    """The options of a run."""
    length = f"--steps {steps} --eval-every {eval_every} --seed {seed} --save-every 0 --keep-rollouts 0 --overwrite"
    return parse([*f"{length} {RUNS[name]}".split(), "--output-dir", str(directory)])


def train_ours(config: WalkConfig, checkpoint: Path, recorder: Recorder, judge: Judge, target: float) -> None:
    """The recipe's own run from the checkpoint, with the judge in the place of its evaluation."""
    spent = {"seconds": 0.0, "processor": 0.0}

    def timed_step(roles: Any, *args: Any, **options: Any) -> Any:
        began, used = time.perf_counter(), time.process_time()
        found = grpo_step(roles, *args, **options)
        spent["seconds"] += time.perf_counter() - began
        spent["processor"] += time.process_time() - used
        return found

    def evaluate(roles: Any, step: int) -> dict[str, float]:
        accuracy = judge(roles.actor.worker.module.model)
        recorder.add({"step": step, **spent, "accuracy": accuracy})
        if accuracy >= target:
            raise Reached
        return {"val-core/walk/acc/mean@1": accuracy}

    def prepare(options: WalkConfig) -> PolicyTask:
        task = replace(episode_task(options, replace(WALK, rows=NumberedWalks)), evaluate=evaluate)
        agent = agent_of(recorder.path.stem)
        return task if agent is None else replace(task, played=Played(AgentPlan(agent, config.episodes.limits())))

    config = replace(config, model_path=str(checkpoint))
    with contextlib.suppress(Reached):
        run(config, timed_step, prepare)


class NumberedWalks(WalkRows):
    """The walks, each with its number as the task of verifiers."""

    def row(self, place: int) -> dict[str, Any]:
        found = super().row(place)
        return found | {"extra_info": found["extra_info"] | {"task": place}}


def agent_of(name: str) -> Any:
    """What plays in the place of the recipe's environment, if anything does."""
    if name == "verifiers":
        from rollout.agents import VerifiersAgent

        return VerifiersAgent({"taskset": {"id": "walk_by_verifiers"}, "agent": {"runtime": {"type": "subprocess"}}})
    if name == "agent":
        from walk_agents import walk

        return walk
    return None


def train_trl(config: WalkConfig, checkpoint: Path, recorder: Recorder, judge: Judge, target: float) -> None:
    """TRL's trainer from the same checkpoint."""
    from trl_walk import make_trainer, train_and_measure

    data, algorithm, seed = config.data, config.algorithm, config.run.seed
    banned = sorted(judge.builder.family.banned_ids(judge.builder.config))
    trainer = make_trainer(
        checkpoint,
        WalkRows(seed),
        config.run.output_dir,
        seed,
        config.run.steps,
        data.batch_size,
        algorithm.n,
        config.episodes.turns,
        over_the_run(config.optimizer, config.run.steps),
        algorithm.entropy_coef,
        banned,
    )
    train_and_measure(trainer, judge, config.run.eval_every, target, recorder.add)


def curve_of(name: str, seed: int, options: argparse.Namespace, train: Callable[..., None]) -> list[Row]:
    """The rows of a run, which is read if it is complete."""
    folder = options.work / f"{options.steps}_steps" / f"seed_{seed}"
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        config = config_of(name, seed, options.steps, options.eval_every, folder / name)
        checkpoint = demonstrated_model(folder / "model", seed, WALK, config.warm_up)
        recorder, judge = Recorder(path), Judge(checkpoint, config)
        print(f"{name}, seed {seed}", flush=True)
        train(config, checkpoint, recorder, judge, options.target)
        recorder.finish()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def lines_of(file: str, *names: str) -> int:
    """Lines of a program, or of some of its classes and functions, without blank ones, comments and docstrings."""
    text = (HERE / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    asked = [node for node in tree.body if not names or getattr(node, "name", "") in names]
    said = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    places, docstrings = (
        {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)} for nodes in (asked, said)
    )
    lines = text.splitlines()
    return sum(bool(lines[place - 1].partition("#")[0].strip()) for place in places - docstrings)


def table(curves: Mapping[str, Sequence[Sequence[Row]]], target: float) -> str:
    """Medians over the seeds that reached the target, in Markdown."""
    lines = [
        f"| run | user's lines | seeds that reached {target} | steps | seconds | processor s | seconds a step |",
        f"|{7 * '---|'}",
    ]
    for name, runs in curves.items():
        reached = [next((row for row in rows if row.get("accuracy", 0) >= target), None) for rows in runs]
        known = [row for row in reached if row is not None]
        a_step = median(rows[-1]["seconds"] / max(rows[-1]["step"], 1) for rows in runs)
        cells = [f"{median(row[each] for row in known):.0f}" if known else "-" for each in FIELDS[:3]]
        written = sum(lines_of(*each) for each in WRITTEN.get(name, ()))
        lines.append(f"| {name} | {written} | {len(known)} of {len(runs)} | {' | '.join(cells)} | {a_step:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=150, help="of a run at most; the learning rate falls to 0 over them"
    )
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.9)
    options = parser.parse_args()
    curves: dict[str, list[list[Row]]] = {name: [] for name in options.runs}
    for seed in options.seeds:
        for name in options.runs:
            train = train_trl if name == "trl" else train_ours
            curves[name].append(curve_of(name, seed, options, train))
    text = table(curves, options.target)
    (options.work / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
