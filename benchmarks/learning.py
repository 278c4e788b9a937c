"""Who learns faster, by step, by sample and by second: algorithms over seeds, with TRL's `GRPOTrainer` beside them.

    python benchmarks/learning.py --work outputs/learning                                        # everything: hours on a CPU
    python benchmarks/learning.py --work outputs/learning --algorithms 'easy_vqa/*' level2/grpo --seeds 0 1 2 --steps 200
    python benchmarks/learning.py --work outputs/learning --draw --read /elsewhere/learning      # what is complete, there too

A run is TASK/ALGORITHM and a seed. Tasks are easy-VQA and the drawn problems. All runs of a task and a seed have the same
start, prompts, numbers of samples, learning rate (`RATES`) and held-out questions; an algorithm changes only what `ALGORITHMS`
says; on the drawn problems TRL's runs end after as many CPU seconds as GRPO's. The start is the tiny model after its warm-up
(level 1) or a model after supervised updates on true answers (see ``learning_starts.py``), made once in ``WORK/TASK/start``,
or for a drawn level that of ``--start``; ``--starts`` makes them and ends, on a GPU if there is one. Each run is a run
directory, ``WORK/TASK/ALGORITHM/STEPS_steps/seed_N``: a complete one is read and not run again, an interrupted one continues
from its last checkpoint (TRL's begins again). Several processes can share WORK, one for each run; ``--workers N`` starts as
many, with one thread and no GPU each, and their output in ``WORK/logs``.

Writes ``WORK/TASK.png`` (medians, and bands over the range of seeds) and ``WORK/table.md``. ``--draw`` does only that, with the
complete runs of WORK and of the directories of ``--read``; of these it needs nothing but ``metrics.jsonl``. TRL's runs need its
package on the path of this interpreter, e.g. from ``pip install --no-deps --target FOLDER trl accelerate`` with
``PYTHONPATH=FOLDER``; without it they are left out, and the table says so. Times are CPU seconds of all processes of a run in its
steps, evaluations left out, so that other work on the machine counts little.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from hashlib import blake2b
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

from learning_starts import EVAL_ROWS, TASKS, answer_length, drawn_start, easy_vqa_start, make_start  # noqa: E402
from synthetic_levels import LevelRows  # noqa: E402

from recipes import easy_vqa, grpo, ppo  # noqa: E402
from recipes.configs import easy_vqa_config  # noqa: E402
from recipes.rewards import geo3k_reward, short_answer_reward  # noqa: E402
from recipes.run import policy_gradient, run  # noqa: E402
from recipes.run.run_directory import open_run_directory  # noqa: E402
from recipes.watch.metrics_file import read_metrics  # noqa: E402

PROMPTS, SAMPLES = 16, 16
COMMON = (
    f"--batch-size {PROMPTS} --algorithm.n {SAMPLES} --algorithm.kl-coef 0 "
    f"--eval-rows {EVAL_ROWS} --save-every 50 --keep-rollouts 0"
)
WHOLE = "--algorithm.minibatch None"  # one optimizer step for each batch
ALGORITHMS = {
    "grpo": WHOLE,
    "grpo_4_updates": "--algorithm.minibatch 4",  # several optimizer steps for each batch, so that clipping works
    "dr_grpo": f"--algorithm.loss dr_grpo {WHOLE}",
    "rloo": f"--algorithm.advantage rloo {WHOLE}",
    "dapo": f"--algorithm.loss dapo --algorithm.overlong-buffer 0 {WHOLE}",
    "gspo": "--algorithm.loss gspo --algorithm.minibatch 4",
    "cispo": "--algorithm.loss cispo --algorithm.minibatch 4",
    "ppo": "",
    "grpo_corrected": f"--algorithm.correction token {WHOLE}",  # for the engine's log-probs
    "grpo_ahead": f"{WHOLE} --rollout.staleness 1 --on ray --layout.rollout 1",
    "staleness_0": f"{WHOLE} --rollout.staleness 0",  # in parts, see `in_parts`
    "staleness_1": f"{WHOLE} --rollout.staleness 1",
    "grpo_row_by_row": f"--token-budget 1 {WHOLE}",  # one prompt group a pass, as without packing
    "trl": "",  # TRL's GRPOTrainer, rows padded
}
RATES = {"level3": 1e-4}
"""Peaks of the learning rate on tasks where that of the tiny preset undoes what the start can do: with 5e-4, GRPO falls from
0.477 to 0.316 of level 3 in 40 steps."""


@dataclass(frozen=True)
class Run:
    """An algorithm on a task with a seed."""

    task: str
    algorithm: str
    seed: int
    steps: int
    start: Path | None = None  # a checkpoint; by default the one of the task

    @property
    def eval_every(self) -> int:
        return max(self.steps // 10, 1)

    @property
    def name(self) -> str:
        return f"{self.task}/{self.algorithm}"

    def checkpoint(self, work: Path) -> Path:
        """The model from which a run on drawn problems starts."""
        return self.start or drawn_start(self.task, self.seed, work)

    def directory(self, work: Path) -> Path:
        """Where a run is kept. Those from another start are other runs."""
        seed = f"seed_{self.seed}" if self.start is None else f"seed_{self.seed}_from_{digest_of(self.start)}"
        return work / self.task / self.algorithm / f"{self.steps}_steps" / seed


def digest_of(checkpoint: Path) -> str:
    """Eight hexadecimal digits that identify the weights of a checkpoint."""
    digest = blake2b(digest_size=4)
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_complete(this: Run, work: Path) -> bool:
    """Whether the directory of a run has all its steps."""
    metrics = this.directory(work) / "metrics.jsonl"
    return metrics.is_file() and any(row["step"] == this.steps or "complete" in row for row in read_metrics(metrics))


def complete_directory(this: Run, places: Sequence[Path]) -> Path | None:
    """The first directory with all steps of a run."""
    return next((this.directory(work) for work in places if is_complete(this, work)), None)


def cpu_seconds() -> float:
    """CPU seconds of this process and, on Linux, of those that it has started and that have not ended, such as Ray's."""
    parents, spent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(file.parent.name)
        parents[number] = int(fields[1])
        spent[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    found, own = {os.getpid()}, -1
    while own != len(found):
        own = len(found)
        found |= {number for number, parent in parents.items() if parent in found}
    return time.process_time() + sum(spent.get(number, 0.0) for number in found - {os.getpid()})


def with_cpu_seconds(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step function that adds the CPU seconds of all processes of the run to the metrics."""

    def timed_step(*args: Any, **options: Any) -> Any:
        start = cpu_seconds()
        data, metrics = step(*args, **options)
        return data, metrics | {"timing_cpu_s/step": cpu_seconds() - start}

    return timed_step


def arguments_of(this: Run, work: Path) -> list[str]:
    """The command line of a run's recipe."""
    directory = this.directory(work)
    resume = ["--resume"] if (directory / "metrics.jsonl").exists() else []
    length = f"--steps {this.steps} --eval-every {this.eval_every} --seed {this.seed} --output-dir {directory}"
    task = "" if this.task == "easy_vqa" else f"--max-response-length {answer_length(this.task)}"
    rate = f"--optimizer.lr {RATES[this.task]}" if this.task in RATES else ""
    return [*f"{COMMON} {length} {task} {rate} {ALGORITHMS[this.algorithm]}".split(), *resume]


def step_of(recipe: Any, config: Any) -> Callable[..., Any]:
    """The step function of a recipe with these options."""
    if config.rollout.staleness == 0:
        return grpo.grpo_step_in_parts
    return ppo.ppo_step if recipe is ppo else grpo.step_for(config)


def in_parts(config: Any) -> AbstractContextManager[Any]:
    """With staleness 0 the groups of a step come in parts, as from engines of their own. Here engine and model are in one process
    and take turns, so that only the order of the work is another one.
    """
    if config.rollout.staleness != 0:
        return nullcontext()
    carry = policy_gradient.carry_samples
    apart = mock.Mock(side_effect=lambda *given, **options: carry(*given, **options | {"apart": True}))
    return mock.patch.object(policy_gradient, "carry_samples", apart)


def rows_of(level: int, seed: int) -> AbstractContextManager[Any]:
    """Problems of a level in place of those of ``dataproto grpo``."""

    def rows(config: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
        return LevelRows(level, seed), {"": LevelRows(level, 0, "test")[: config.data.eval_rows]}

    return mock.patch.object(policy_gradient, "open_problems", rows)


def train_ours(this: Run, work: Path) -> None:
    """Runs, or continues, one of this project's runs."""
    recipe: Any = ppo if this.algorithm == "ppo" else grpo
    if this.task != "easy_vqa":
        config = recipe.parse(arguments_of(this, work))
        with in_parts(config), rows_of(int(this.task.removeprefix("level")), this.seed):
            run(replace(config, model_path=str(this.checkpoint(work))), with_cpu_seconds(step_of(recipe, config)))
        return
    start, rows = easy_vqa_start(this.seed, work)
    config = recipe.parse([*arguments_of(this, work), "--max-prompt-length", "128", "--max-response-length", "4"])
    config = replace(config, optimizer=easy_vqa_config.TINY.optimizer)
    config = open_run_directory(config, config.updates)
    run(
        config,
        with_cpu_seconds(step_of(recipe, config)),
        lambda _: easy_vqa.policy_task(config, rows, str(start), short_answer_reward),
    )


def seconds_beside(this: Run, work: Path, read: Sequence[Path]) -> float:
    """The CPU seconds of GRPO's run of the same task and seed, which is made if no directory has it."""
    beside = replace(this, algorithm="grpo")
    directory = complete_directory(beside, (work, *read))
    if directory is None:
        train_ours(beside, work)
        directory = beside.directory(work)
    return curve(directory)[-1]["seconds"]


def train_trl(this: Run, work: Path, read: Sequence[Path]) -> None:
    """Runs TRL's trainer on the same task, from the start, for one seed."""
    from trl_learning import TRLTask, train_and_measure

    seconds = math.inf
    if this.task == "easy_vqa":
        start, rows = easy_vqa_start(this.seed, work)
        train, held_out, reward = rows.train, rows.test, short_answer_reward
        config, tokens = replace(grpo.TINY, optimizer=easy_vqa_config.TINY.optimizer), 4
    else:
        level = int(this.task.removeprefix("level"))
        seconds = seconds_beside(this, work, read)
        start, reward, config, tokens = this.checkpoint(work), geo3k_reward, grpo.TINY, answer_length(this.task)
        config = replace(config, optimizer=replace(config.optimizer, lr=RATES.get(this.task, config.optimizer.lr)))
        train, held_out = LevelRows(level, this.seed), LevelRows(level, 0, "test")[:EVAL_ROWS]
    task = TRLTask(start, train, held_out, reward, tokens, config.optimizer, shuffle=this.task == "easy_vqa")
    train_and_measure(task, this.directory(work), this.seed, this.steps, this.eval_every, PROMPTS, SAMPLES, seconds)


def curve(directory: Path) -> list[dict[str, float]]:
    """The evaluations of a run: step, samples, CPU seconds of the steps until then, and held-out accuracy."""
    points, samples, seconds = [], 0.0, 0.0
    for row in read_metrics(directory / "metrics.jsonl"):
        if row["step"]:
            samples += PROMPTS * SAMPLES * row.get("train/num_gen_batches", 1)
            seconds += row["timing_cpu_s/step"]
        own = [name for name in row if name.startswith("val-core/") and name.endswith("/acc/mean@1")]
        if own:
            points.append({"step": row["step"], "samples": samples, "seconds": seconds, "accuracy": row[own[0]]})
    return points


def reached(points: Sequence[Mapping[str, float]], target: float, unit: str) -> float | None:
    """Where a curve first reaches the target, linear between evaluations; `None` if it does not.

    >>> reached([{"step": 0, "accuracy": 0.0}, {"step": 10, "accuracy": 0.5}], 0.25, "step")
    5.0
    """
    if points[0]["accuracy"] >= target:
        return points[0][unit]
    for before, after in pairwise(points):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[unit] + share * (after[unit] - before[unit])
    return None


def spread(values: Sequence[float | None], digits: int) -> str:
    """Median and range of the seeds; of those that reached a target, with their number if it is not all.

    >>> spread([1.0, 3.0, 2.0], 1), spread([1.0, None], 0), spread([None], 0)
    ('2.0 (1.0 to 3.0)', '1 (1 to 1), 1 of 2', 'not reached')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "not reached"
    text = f"{median(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)}"


Curves = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""The curves of each algorithm, one for each seed."""


def table(task: str, curves: Curves, steps: int) -> str:
    """The results of a task in Markdown; medians and ranges over seeds.

    The target is midway between the first accuracy and the best last one, both as medians.
    """
    first = median(points[0]["accuracy"] for runs in curves.values() for points in runs)
    best = max(median(points[-1]["accuracy"] for points in runs) for runs in curves.values())
    target = (first + best) / 2
    lines = [f"## {task}, {steps} steps of {PROMPTS} x {SAMPLES}, target accuracy {target:.3f}", ""]
    lines += ["| algorithm | seeds | before | after | steps to target | samples to target | CPU s to target |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, runs in curves.items():
        ends = [spread([points[place]["accuracy"] for points in runs], 3) for place in (0, -1)]
        costs = [
            spread([reached(points, target, unit) for points in runs], 0) for unit in ("step", "samples", "seconds")
        ]
        lines.append(f"| {name} | {len(runs)} | {' | '.join([*ends, *costs])} |")
    return "\n".join(lines) + "\n"


def band(
    axes: Any, where: Sequence[float], seeds: Sequence[Sequence[float]], name: str, color: str, line: str = "-"
) -> None:
    """Draws the median of the seeds, and a band from the lowest to the highest."""
    points = list(zip(*seeds, strict=True))
    axes.plot(where, [median(point) for point in points], label=name, color=color, linestyle=line)
    axes.fill_between(
        where, [min(point) for point in points], [max(point) for point in points], alpha=0.15, color=color
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def draw(task: str, curves: Curves, path: Path) -> None:
    """Held-out accuracy by step, sample and CPU second: medians, and bands from the lowest to the highest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, unit in zip(panels, ("step", "samples", "seconds"), strict=True):
        for number, (name, runs) in enumerate(curves.items()):
            common = min(map(len, runs))  # TRL's runs may end at different steps
            accuracy = [[point["accuracy"] for point in points[:common]] for points in runs]
            where = [median(place) for place in zip(*([point[unit] for point in points[:common]] for points in runs))]
            lap = "-" if number < 10 else ":"  # matplotlib has ten colours
            band(axes, where, accuracy, name, *(("black", "--") if name == "trl" else (f"C{number}", lap)))
        axes.set(xlabel={"seconds": "CPU seconds"}.get(unit, unit), ylim=(0, 1))
    panels[0].set_ylabel(f"held-out accuracy, {task}")
    panels[-1].legend(frameon=False, fontsize=7)
    figure.savefig(str(path))


def summarise(
    work: Path, runs: Sequence[Run], steps: int, left_out: Sequence[str] = (), read: Sequence[Path] = ()
) -> str:
    """Draws the complete runs of each task, in ``work`` or in the directories ``read``, and writes and returns the table."""
    parts = [f"Left out: {', '.join(left_out)} (TRL is not installed).\n"] if left_out else []
    for task in dict.fromkeys(this.task for this in runs):
        curves: dict[str, list[Any]] = {}
        for this in runs:
            directory = complete_directory(this, (work, *read)) if this.task == task else None
            if directory is not None:
                curves.setdefault(this.algorithm, []).append(curve(directory))
        if curves:
            draw(task, curves, work / f"{task}.png")
            parts.append(table(task, curves, steps))
    text = "\n".join(parts)
    (work / "table.md").write_text(text, encoding="utf-8")
    return text


def train(this: Run, work: Path, read: Sequence[Path]) -> None:
    """Runs, or continues, a run."""
    if this.algorithm == "trl":
        train_trl(this, work, read)
    else:
        train_ours(this, work)


def train_apart(this: Run, work: Path, read: Sequence[Path], log: Path) -> None:
    """Runs a run, in a process that does nothing else, with its output in a file."""
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    train(this, work, read)


def train_in_processes(runs: Sequence[Run], work: Path, read: Sequence[Path], workers: int) -> list[Run]:
    """Runs all runs, ``workers`` at a time, those of TRL last because they need GRPO's times. Returns those that failed."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # for the processes
    (work / "logs").mkdir(exist_ok=True)
    failed = []
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        for last in (False, True):
            pending = {}
            for this in runs:
                if (this.algorithm == "trl") == last:
                    log = work / "logs" / f"{this.task}_{this.algorithm}_{this.steps}_{this.seed}.txt"
                    pending[pool.submit(train_apart, this, work, read, log)] = this, log
            for done in as_completed(pending):
                this, log = pending[done]
                if done.exception() is not None:
                    failed.append(this)
                end = "ended" if done.exception() is None else f"failed, see {log}: {done.exception()!r}"
                print(f"{this.name}, seed {this.seed}: {end}", flush=True)
    return failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs and of the results")
    parser.add_argument("--algorithms", nargs="+", default=["*"], help="TASK/ALGORITHM, also with wildcards")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--start", type=Path, help="a checkpoint, from which the runs of one drawn level start")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="further directories with complete runs")
    parser.add_argument("--workers", type=int, default=0, help="runs at a time, a process each; 0: in this one")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--draw", action="store_true", help="draw and tabulate the complete runs, and run nothing")
    alone.add_argument("--starts", action="store_true", help="make the starts of the runs, and run nothing else")
    options = parser.parse_args()
    names = [f"{task}/{algorithm}" for task in TASKS for algorithm in ALGORITHMS]
    if unmatched := [each for each in options.algorithms if not any(fnmatch(name, each) for name in names)]:
        parser.error(f"no run is named {unmatched[0]}: choose of {', '.join(names)}")
    options.names = [name for name in names if any(fnmatch(name, each) for each in options.algorithms)]
    if options.start and (len({name.split("/")[0] for name in options.names}) > 1 or "easy_vqa/" in options.names[0]):
        parser.error("--start is for the runs of one drawn level: name it by --algorithms")
    return options


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    runs = [
        Run(*name.split("/"), seed, options.steps, options.start) for seed in options.seeds for name in options.names
    ]
    if options.draw:
        print(summarise(options.work, runs, options.steps, read=options.read))
        return
    if options.starts:
        for task, seed in dict.fromkeys((this.task, this.seed) for this in runs):
            print(f"{task}, seed {seed}: {make_start(task, seed, options.work)}", flush=True)
        return
    left_out = [name for name in options.names if name.endswith("/trl")] if find_spec("trl") is None else []
    missing = []
    for this in [this for this in runs if this.name not in left_out]:
        if complete_directory(this, (options.work, *options.read)) is not None:
            print(f"{this.name}, seed {this.seed}: is complete, and read", flush=True)
        else:
            missing.append(this)
    failed = []
    if options.workers:
        failed = train_in_processes(missing, options.work, options.read, options.workers)
    else:
        for this in missing:
            print(f"{this.name}, seed {this.seed}: {options.steps} steps", flush=True)
            train(this, options.work, options.read)
            summarise(options.work, runs, options.steps, left_out, options.read)
    print(summarise(options.work, runs, options.steps, left_out, options.read))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed")


if __name__ == "__main__":
    main()
