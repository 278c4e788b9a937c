"""GRPO with ``--curriculum`` and with shuffled epochs, on one set of synthetic problems of all levels, over seeds.

    python benchmarks/curriculum.py --work outputs/curriculum
    python benchmarks/curriculum.py --work outputs/curriculum --seeds 0 --steps 40

The set has as many problems of each level, written once to WORK. The start of a seed is the model of ``dataproto grpo`` after
``--taught`` supervised updates on true answers to other problems of level 1: it solves some of that level, and next to none of
the others, which a model of this size does not learn in a run. Without such updates GRPO soon gives each question one answer
whatever the picture shows, and held-out accuracy falls below the start's.

Both runs of a seed have the same start, options and held-out problems, those of each level by themselves. A run that is complete
in WORK is read and not run again; several processes can share WORK, one for each seed. Prints held-out accuracies, medians and
ranges over the seeds, by step, and draws them in ``WORK/curriculum.png``.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median

from learning import band

from dataproto import DataProto
from recipes import grpo
from recipes.demo.problems import LEVELS, Split, make_problem
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import ANSWER, answered_rows, is_whole, teach, tiny_checkpoint
from recipes.watch.metrics_file import read_metrics
from rollout.prompts import PromptBuilder

KINDS = {"curriculum": ["--curriculum"], "shuffled": []}
MEAN = "all"
RATE = 2e-4
"""The peak of the learning rate. With 5e-4, that of the preset, level 1 falls from 0.703 to 0.609 in 30 steps with curriculum."""
OTHER_PROBLEMS = 1000  # seed of the problems of a start; the runs have others


def start_of(work: Path, seed: int, updates: int) -> Path:
    """The checkpoint of a seed after ``updates`` on true answers of level 1, which is made if it is not there."""
    path = work / f"start-{updates}-updates" / f"seed_{seed}"
    if is_whole(path):
        return path
    shutil.copytree(tiny_checkpoint(seed), path, dirs_exist_ok=True)
    problems, random = [make_problem(place, 1, OTHER_PROBLEMS) for place in range(1024)], Random(seed)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=512)
    prompts = builder([{"prompt": problem.text, "images": [problem.image]} for problem in problems])

    def batches() -> Iterator[DataProto]:
        while True:
            chosen = [random.randrange(len(problems)) for _ in range(32)]
            texts = [ANSWER.format(answer=problems[place].answer) for place in chosen]
            yield answered_rows(builder, prompts[chosen], texts)

    teach(path, batches(), updates, 2e-3)
    return path


def write_problems(work: Path, name: str, levels: Sequence[int], count: int, split: Split) -> Path:
    """``count`` problems of each level as JSON Lines with pictures in files, unless they are there."""
    file = work / f"{name}.jsonl"
    if file.exists():
        return file
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for level in levels:
        for place, row in enumerate(ProblemRows(level, 0, split)[:count]):
            picture = folder / f"{level}-{place}.png"
            row["images"][0].save(picture)
            truth = row["reward_model"]["ground_truth"]
            problem = {"problem": row["prompt"][0]["content"], "answer": truth, "images": [f"{name}/{picture.name}"]}
            lines.append(json.dumps(problem | {"data_source": f"level{level}"}))
    draft = file.with_suffix(f".{os.getpid()}")  # another process may write the same
    draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return draft.rename(file)


def accuracies(work: Path, kind: str, seed: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """The held-out accuracy of each level, and their mean, by step."""
    folder = work / f"{kind}-{options.steps}-steps" / f"seed_{seed}"
    if not (folder / "report.html").exists():
        train = write_problems(work, "train", [*LEVELS], options.problems, "train")
        tests = [
            f"level{level}={write_problems(work, f'level{level}', [level], options.eval_rows, 'test')}"
            for level in LEVELS
        ]
        sets = ["--data-path", str(train), "--eval-data-path", *tests, "--eval-rows", str(options.eval_rows)]
        model = ["--model-path", str(start_of(options.work, seed, options.taught))]
        run = (
            f"--preset tiny --seed {seed} --steps {options.steps} --eval-every {options.every} --optimizer.lr {RATE} "
            "--algorithm.kl-coef 0 --algorithm.n 8 --max-prompt-length 512 --keep-rollouts 0 --overwrite"
        )
        if grpo.main([*model, *sets, *run.split(), *KINDS[kind], "--output-dir", str(folder)]):
            sys.exit(f"{kind}, seed {seed} failed")
    found = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        levels = {f"level {level}": row.get(f"val-core/level{level}/acc/mean@1") for level in LEVELS}
        known = {name: value for name, value in levels.items() if value is not None}
        if known:
            found[row["step"]] = known | {MEAN: fmean(known.values())}
    return found


def table(runs: dict[str, list[dict[int, dict[str, float]]]]) -> str:
    """Medians and ranges over the seeds, one line for each step and kind."""
    lines = ["| step | order | " + " | ".join([*(f"level {level}" for level in LEVELS), MEAN]) + " |"]
    lines.append("| --- " * (len(LEVELS) + 3) + "|")
    for step in next(iter(runs.values()))[0]:
        for kind, seeds in runs.items():
            cells = []
            for name in seeds[0][step]:
                values = [found[step][name] for found in seeds]
                cells.append(f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
            lines.append(f"| {step} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[int, dict[str, float]]]], path: Path) -> None:
    """The held-out accuracy of each level and of all by step, medians and bands over the seeds."""
    from matplotlib.figure import Figure

    names = [*(f"level {level}" for level in LEVELS), MEAN]
    figure = Figure(figsize=(3 * len(names), 3.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for number, (kind, seeds) in enumerate(runs.items()):
            band(axes, [*seeds[0]], [[found[name] for found in run.values()] for run in seeds], kind, f"C{number}")
        axes.set(title=name, xlabel="step")
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(frameon=False)
    figure.savefig(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the problems and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run (default: 120)")
    parser.add_argument("--taught", type=int, default=80, help="supervised updates of a start (default: 80)")
    parser.add_argument("--every", type=int, default=30, help="steps between evaluations (default: 30)")
    parser.add_argument("--problems", type=int, default=64, help="problems of each level (default: 64)")
    parser.add_argument("--eval-rows", type=int, default=64, help="held-out problems of each level (default: 64)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    runs = {kind: [accuracies(options.work, kind, seed, options) for seed in options.seeds] for kind in KINDS}
    draw(runs, options.work / "curriculum.png")
    print(table(runs))


if __name__ == "__main__":
    main()
