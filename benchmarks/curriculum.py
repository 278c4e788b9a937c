"""GRPO with ``--curriculum`` and with shuffled epochs, on one set of synthetic problems of all levels, over seeds.

    python benchmarks/curriculum.py --work outputs/curriculum
    python benchmarks/curriculum.py --work outputs/curriculum --seeds 0 --steps 40

The set has as many problems of each level, written once to WORK; the model is that of ``dataproto grpo``, which has never seen
any. Both runs of a seed have the same start, options and held-out problems, those of each level by themselves. A run that is
complete in WORK is read and not run again; several processes can share WORK, one for each seed. Prints held-out accuracies,
medians and ranges over the seeds, by step.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).resolve().parent
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]

from recipes import grpo  # noqa: E402
from recipes.demo.problems import LEVELS, Split  # noqa: E402
from recipes.demo.rows import ProblemRows  # noqa: E402
from recipes.watch.metrics_file import read_metrics  # noqa: E402

KINDS = {"curriculum": ["--curriculum"], "shuffled": []}
MEAN = "all"


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
    draft = file.with_suffix(".part")
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
        lengths = ["--max-prompt-length", "512", "--max-response-length", "16", "--algorithm.kl-coef", "0"]
        sets = ["--data-path", str(train), "--eval-data-path", *tests, "--eval-rows", str(options.eval_rows)]
        run = (
            f"--seed {seed} --steps {options.steps} --eval-every {options.every} --keep-rollouts 0 --overwrite".split()
        )
        if grpo.main([*sets, *lengths, *run, *KINDS[kind], "--output-dir", str(folder)]):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the problems and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run (default: 120)")
    parser.add_argument("--every", type=int, default=60, help="steps between evaluations (default: 60)")
    parser.add_argument("--problems", type=int, default=64, help="problems of each level (default: 64)")
    parser.add_argument("--eval-rows", type=int, default=64, help="held-out problems of each level (default: 64)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    runs = {kind: [accuracies(options.work, kind, seed, options) for seed in options.seeds] for kind in KINDS}
    print(table(runs))


if __name__ == "__main__":
    main()
