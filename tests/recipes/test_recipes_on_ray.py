"""Recipes in two real Ray processes: each makes the run of one process."""

from collections.abc import Iterator

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, assert_same_run, rows_of
from recipes import classify, geo3k_ppo, sft
from workers.ray_config import RayConfig
from workers.ray_group import running_ray

TWO = ("--on", "ray", "--layout.dp", "2")


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with running_ray(RayConfig(object_store_gib=0.2), processes=3):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def test_ppo_with_its_critic(model, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    settings = (
        "--batch-size 4 --algorithm.n 2 --max-prompt-length 500 --max-response-length 6 --eval-rows 4 --optimizer.lr 1e-3"
        " --critic-optimizer.lr 1e-3 --algorithm.minibatch 2 --algorithm.critic-epochs 2 --token-budget 600 --steps 2"
        " --save-every 0 --algorithm.kl-coef 0.05 --algorithm.kl-in reward"
    )
    paths = ["--model-path", model, "--reward", f"{tmp_path / 'mine.py'}:score"]
    for name, place in (("one", ()), ("two", TWO)):
        given = [*paths, "--output-dir", str(tmp_path / name), *settings.split(), *place]
        assert geo3k_ppo.main(given) == 0
    assert rows_of(tmp_path / "one")[2]["critic/values/mean"] != 0
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("recipe", [sft, classify])
def test_supervised_training(recipe, model, tmp_path):
    settings = (
        "--batch-size 7 --eval-rows 5 --max-response-length 5 --optimizer.lr 1e-3 --token-budget 200 --steps 3"
        " --save-every 0 --eval-every 2"
    )
    for name, place in (("one", ()), ("two", TWO)):
        given = ["--model-path", model, "--output-dir", str(tmp_path / name), *settings.split(), *place]
        assert recipe.main(given) == 0
    assert rows_of(tmp_path / "one")[-1]["val/loss"] < rows_of(tmp_path / "one")[0]["val/loss"]
    assert_same_run(tmp_path / "two", tmp_path / "one")
