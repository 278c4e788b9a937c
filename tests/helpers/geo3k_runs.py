"""Short runs of the Geometry3K recipe: their command lines, and what they leave."""

import json
from pathlib import Path

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
    paths = ["--model-path", model_path, "--data-path", data_path, "--reward", reward, "--output-dir", str(output_dir)]
    return [*paths, *settings.split(), *more]


def rows_of(directory):
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def without_times(rows):
    timed = ("timing", "perf/t")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]
