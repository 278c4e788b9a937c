"""How many functions of ours lie between a recipe's command line and a loss, in one process."""

import json
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from recipes.grpo import main

ROOT = Path(__file__).parents[2]
MOST, MOST_OF_RECIPES = 6, 4  # frames between `main` and the loss

MINE = """
import json, traceback
from pathlib import Path

def loss(log_probs, advantages):
    frames = [(frame.filename, frame.name) for frame in traceback.extract_stack()[:-1]]
    Path(__file__).with_name("frames.json").write_text(json.dumps(frames))
    return -advantages * log_probs, {}

def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)
"""


@pytest.mark.slow
def test_few_frames_lie_between_the_command_line_and_the_loss(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    given = (
        "--steps 1 --batch-size 2 --algorithm.n 2 --eval-rows 2 --max-prompt-length 500 --max-response-length 4"
        f" --preset any --model-path {write_checkpoint('qwen2_5_vl', tmp_path / 'model')} --output-dir {tmp_path / 'run'}"
        f" --reward {tmp_path / 'mine.py'}:score --algorithm.loss {tmp_path / 'mine.py'}:loss"
    )
    assert main(given.split()) == 0
    frames = json.loads((tmp_path / "frames.json").read_text())
    folders = [ROOT / name for name in ("dataproto", "rollout", "workers", "recipes", "dataproto_server")]
    ours = [(Path(file), name) for file, name in frames if any(Path(file).is_relative_to(each) for each in folders)]
    after = [name for _, name in ours].index("main") + 1
    chain = [f"{file.relative_to(ROOT)}:{name}" for file, name in ours[after:]]
    assert chain[:3] == ["recipes/run/policy_gradient.py:run", "recipes/run/loop.py:train", "recipes/grpo.py:grpo_step"]
    assert len(chain) <= MOST, chain
    assert sum(each.startswith("recipes/") for each in chain) <= MOST_OF_RECIPES, chain
