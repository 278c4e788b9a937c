"""The recipe with vLLM in two Ray processes is the run of one process with the Hugging Face engine."""

import math

import pytest

from helpers.geo3k_files import geometry3k, write_geometry3k
from helpers.geo3k_runs import REWARD, arguments, rows_of, without_measurements
from helpers.option_files import in_files
from recipes.demo.tiny_model import make_tiny_model
from recipes.geo3k_grpo import main

SETTINGS = ("--steps", "2", "--save-every", "0")
PLACE = ("--on", "ray", "--layout.dp", "2", "--ray.object-store-gib", "0.2", "--engine", "vllm")


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.long
def test_vllm_in_two_processes_makes_the_run_of_one(tmp_path):
    for split, count in (("train", 12), ("test", 5)):
        write_geometry3k(tmp_path / "data" / f"{split}-00000-of-00001.parquet", geometry3k(count))
    (tmp_path / "mine.py").write_text(REWARD)
    files = str(make_tiny_model(tmp_path / "model")), str(tmp_path / "data"), f"{tmp_path / 'mine.py'}:score"
    assert main(arguments(*files, tmp_path / "one", *SETTINGS)) == 0
    assert main(arguments(*files, tmp_path / "two", *SETTINGS, *in_files(PLACE, tmp_path))) == 0
    one, two = (without_measurements(rows_of(tmp_path / name)) for name in ("one", "two"))
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 1, 2]
    for row, expected in zip(two, one, strict=True):
        for name, value in expected.items():
            if not name.startswith("training/rollout_probs_diff"):
                assert math.isclose(row[name], value, rel_tol=1e-3, abs_tol=1e-4), (row["step"], name)
