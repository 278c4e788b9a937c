"""Held-out accuracy of DPO, KTO and a reward model on synthetic pairs, with their own pictures and with those of other rows.

    python benchmarks/preferences.py --work outputs/preferences

Each run is the recipe's own preset ``tiny``. The control has the same questions and answers, and the picture of another row, in
training and held out: nothing there tells which answer is right.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]

from recipes import dpo, reward_model  # noqa: E402
from recipes.demo.rows import DrawnPairs  # noqa: E402
from recipes.run import preferences  # noqa: E402
from recipes.watch.metrics_file import read_metrics  # noqa: E402

RUNS: dict[str, tuple[Any, list[str]]] = {
    "dpo": (dpo, []),
    "kto": (dpo, ["--algorithm.loss", "kto"]),
    "reward-model": (reward_model, []),
}


class OtherPictures(DrawnPairs):
    """Pairs with the picture of the next row."""

    def row(self, place: int) -> dict[str, Any]:
        return super().row(place) | {"images": super().row(place + 1)["images"]}


def accuracy(name: str, rows: type, folder: Path, options: list[str]) -> float:
    """The held-out accuracy after the run, which is read if it is there."""
    recipe, more = RUNS[name]
    metrics = folder / "metrics.jsonl"
    if not (folder / "report.html").exists():
        setattr(preferences, "DrawnPairs", rows)  # noqa: B010
        if recipe.main([*more, *options, "--output-dir", str(folder), "--overwrite"]):
            sys.exit(f"{name} failed")
    return float(read_metrics(metrics)[-1]["val/accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--runs", nargs="+", choices=[*RUNS], default=[*RUNS], help="which (default: all)")
    parser.add_argument("--steps", default="200", help="steps of each (default: 200)")
    parser.add_argument("--seed", default="0", help="seed of rows and weights (default: 0)")
    arguments = parser.parse_args()
    options = ["--steps", arguments.steps, "--seed", arguments.seed]
    for name in arguments.runs:
        found = [
            accuracy(name, rows, arguments.work / f"{name}-{kind}-{arguments.seed}", options)
            for kind, rows in (("own", DrawnPairs), ("others", OtherPictures))
        ]
        print(f"{name}: held-out accuracy {found[0]:.3f}; with other rows' pictures {found[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
