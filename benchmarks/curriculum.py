"""GRPO with ``--curriculum`` and with shuffled epochs, on one set of synthetic problems of all levels, over seeds.

    python benchmarks/curriculum.py --work outputs/curriculum
    python benchmarks/curriculum.py --work outputs/curriculum --seeds 0 --steps 40

Most problems of the set, which is written once to WORK, are of the levels 2 to 4, which a model of this size does not learn in a
run: what a curriculum is for. The start of a seed is the model of ``dataproto grpo`` after ``--taught`` steps on other problems
of level 1: it solves some of them, by looking. From an untaught model neither order learns on such a set: the problems that are
sometimes solved are then those whose answers are its favourite guesses.

Both runs of a seed have the same start, options and held-out problems, those of each level by themselves. A run that is complete
in WORK is read and not run again; several processes can share WORK, one for each seed. Prints held-out accuracies by step, and
the share of groups since the evaluation before whose rewards differ, without which a group teaches nothing: medians and ranges
over the seeds. Draws them in ``WORK/curriculum.png``.
"""

import argparse
import sys
from math import isnan
from pathlib import Path
from statistics import fmean, median

from learning import band
from synthetic_levels import write_problems

from recipes import grpo
from recipes.demo.problems import Split
from recipes.demo.tiny_model import tiny_checkpoint
from recipes.watch.metrics_file import read_metrics

KINDS = {"curriculum": ["--curriculum"], "shuffled": []}
SIGNAL = "groups that differ"
LEVELS = (1, 2, 3, 4)
NAMES = [*(f"level {level}" for level in LEVELS), SIGNAL]
OPTIONS = "--preset tiny --optimizer.schedule constant --keep-rollouts 0 --overwrite"
OTHER_PROBLEMS = 1000  # seed of the problems of a start; the runs have others


def start_of(work: Path, seed: int, steps: int) -> Path:
    """The checkpoint of a seed after ``steps`` on fresh problems of level 1, which is made if it is not there."""
    folder = work / f"start-{steps}-steps" / f"seed_{seed}"
    checkpoint = folder / f"global_step_{steps}" / "actor" / "huggingface"
    if not (folder / "report.html").exists():
        run = f"{OPTIONS} --seed {OTHER_PROBLEMS + seed} --steps {steps} --save-every {steps} --eval-every {steps}"
        train(["--model-path", str(tiny_checkpoint(seed)), *run.split(), "--output-dir", str(folder)])
    return checkpoint


def train(arguments: list[str]) -> None:
    """Runs ``dataproto grpo``; ends this program if it fails."""
    if grpo.main(arguments):
        sys.exit(f"failed: dataproto grpo {' '.join(arguments)}")


def written(file: Path, counts: dict[int, int], split: Split) -> Path:
    """The file of so many problems of each level, which is written if it is not there."""
    return file if file.exists() else write_problems(file, counts, split)


def found_of(work: Path, kind: str, seed: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """By step the held-out accuracy of each level, and the share of groups whose rewards differ since the step before."""
    folder = work / f"{kind}-{options.steps}-steps" / f"seed_{seed}"
    if not (folder / "report.html").exists():
        problems = written(work / "train.jsonl", dict(zip(LEVELS, options.problems, strict=True)), "train")
        tests = [
            f"level{level}={written(work / f'level{level}.jsonl', {level: rows}, 'test')}"
            for level, rows in zip(LEVELS, options.eval_rows, strict=True)
        ]
        sets = ["--data-path", str(problems), "--eval-data-path", *tests, "--eval-rows", str(max(options.eval_rows))]
        model = ["--model-path", str(start_of(work, seed, options.taught))]
        run = f"{OPTIONS} --seed {seed} --steps {options.steps} --eval-every {options.every} --max-prompt-length 512"
        train([*model, *sets, *run.split(), *KINDS[kind], "--output-dir", str(folder)])
    found, differ = {}, list[float]()
    for row in read_metrics(folder / "metrics.jsonl"):
        if "reward/equal_groups_ratio" in row:
            differ.append(1 - row["reward/equal_groups_ratio"])
        levels = {f"level {level}": row.get(f"val-core/level{level}/acc/mean@1") for level in LEVELS}
        known = {name: value for name, value in levels.items() if value is not None}
        if known:
            found[row["step"]] = known | {SIGNAL: fmean(differ) if differ else float("nan")}
            differ = []
    return found


def with_mean(found: dict[int, dict[str, float]]) -> dict[int | str, dict[str, float]]:
    """The evaluations of a run, and the mean of each value over those after the start."""
    later = [values for step, values in found.items() if step]
    return {**found, "mean": {name: fmean(values[name] for values in later) for name in NAMES}}


def table(runs: dict[str, list[dict[int, dict[str, float]]]]) -> str:
    """Medians and ranges over the seeds, one line for each step and kind; at last of the means over all steps after the first."""
    known = {kind: [with_mean(found) for found in seeds] for kind, seeds in runs.items()}
    lines = ["| step | order | " + " | ".join(NAMES) + " |"]
    lines.append("| --- " * (len(NAMES) + 2) + "|")
    for step in next(iter(known.values()))[0]:
        for kind, seeds in known.items():
            cells = []
            for name in seeds[0][step]:
                values = [found[step][name] for found in seeds]
                shown = f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
                cells.append("-" if isnan(values[0]) else shown)
            lines.append(f"| {step} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[int, dict[str, float]]]], path: Path) -> None:
    """Each column of the table by step, medians and bands over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(NAMES), 3.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(NAMES), sharey=True)
    for axes, name in zip(panels, NAMES, strict=True):
        for number, (kind, seeds) in enumerate(runs.items()):
            band(axes, [*seeds[0]], [[found[name] for found in run.values()] for run in seeds], kind, f"C{number}")
        axes.set(title=name, xlabel="step")
    panels[0].set_ylabel("share")
    panels[0].legend(frameon=False)
    figure.savefig(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the problems and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=160, help="steps of each run (default: 160)")
    parser.add_argument("--taught", type=int, default=120, help="steps of a start (default: 120)")
    parser.add_argument("--every", type=int, default=40, help="steps between evaluations (default: 40)")
    parser.add_argument(
        "--problems",
        type=int,
        nargs=len(LEVELS),
        default=[256, 320, 320, 320],
        help="of each level (default: 256 320 320 320)",
    )
    parser.add_argument(
        "--eval-rows",
        type=int,
        nargs=len(LEVELS),
        default=[512, 128, 128, 128],
        help="held-out problems of each level (default: 512 128 128 128)",
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    seeds = [{kind: found_of(options.work, kind, seed, options) for kind in KINDS} for seed in options.seeds]
    runs = {kind: [found[kind] for found in seeds] for kind in KINDS}
    draw(runs, options.work / "curriculum.png")
    print(table(runs))


if __name__ == "__main__":
    main()
