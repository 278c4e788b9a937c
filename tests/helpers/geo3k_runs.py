"""Short runs of recipes: their command line, and comparison of the metrics that they write."""

import json
import math
from pathlib import Path

from helpers.metrics import learned

REWARD = '''
def score(data_source, solution_str, ground_truth, extra_info):
    """Rewards short answers, so that even a random model has something to learn from."""
    return {"score": 1.0 / (1 + len(solution_str)), "acc": float(len(solution_str) < 5)}
'''


def arguments(model_path, data_path, reward, output_dir, *more):
    settings = (
        "--batch-size 4 --algorithm.n 3 --max-prompt-length 500 --max-response-length 6 --eval-rows 5 --optimizer.lr 1e-3"
        " --algorithm.entropy-coef 0.01 --token-budget 600 --steps 5 --save-every 2"
    )
    paths = [
        "--preset",
        "any",
        "--model-path",
        model_path,
        "--data-path",
        data_path,
        "--reward",
        reward,
        "--output-dir",
        str(output_dir),
    ]
    return [*paths, *settings.split(), *more]


def rows_of(directory):
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def without_measurements(rows):
    """The metrics of each step without times, rates and memory, which no two runs have alike."""
    return [learned(row) for row in rows]


def assert_same_run(directory: Path, other: Path) -> None:
    """Asserts that two runs have equal metrics in the same steps, except for what is measured."""
    mine, theirs = without_measurements(rows_of(directory)), without_measurements(rows_of(other))
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for row, expected in zip(mine, theirs, strict=True):
        assert row.keys() == expected.keys()
        for name, value in row.items():
            assert math.isclose(value, expected[name], rel_tol=2e-4, abs_tol=2e-5), (row["step"], name)
