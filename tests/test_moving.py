"""docs/moving.md: what it names of this library exists, and rows of the other libraries are read as it says."""

import importlib
import re
from pathlib import Path

import pytest
from PIL import Image

from dataproto.errors import DataProtoError
from helpers.tiny_prompts import tiny_builder
from recipes.algorithms import ADVANTAGES, LOSSES
from recipes.commands import COMMANDS
from recipes.data.problem_rows import read_row
from recipes.dpo import DPOConfig
from recipes.grpo import GRPORunConfig, main, parse
from recipes.options import options_of
from recipes.options.option_table import on_command_line
from recipes.rewards import as_reward_function
from recipes.watch.metrics_file import read_metrics
from workers.roles.reward import RewardRow

PAGE = (Path(__file__).parents[1] / "docs" / "moving.md").read_text(encoding="utf-8")
PICTURE = Image.new("RGB", (56, 56), "red")
QUESTION = [{"role": "user", "content": "<image>Which colour?"}]
TYPED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def ours(section: str) -> str:
    """The last cells of a section's table, which are about this library."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return "\n".join(line.rpartition(" | ")[2] for line in text.splitlines() if line.startswith("|"))


def test_every_option_and_command_of_ours_exists() -> None:
    known = {f"--{option.name}": option for option in on_command_line(options_of(GRPORunConfig()))}
    switched_off = {f"--{option.no_flag.lstrip('-')}" for option in known.values() if option.kind is bool}
    commands = "\n".join(fenced("bash")).partition("dataproto grpo")[2]
    named = set(re.findall(r"--[a-z][\w.-]*", ours("Options") + ours("Data") + ours("Reward functions") + commands))
    assert len(named) > 50
    assert named - set(known) - switched_off == set()
    known |= {f"--{option.name}": option for option in on_command_line(options_of(DPOConfig()))}
    elsewhere = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", PAGE))
    theirs = {"--backend", "--local_dir", "--target_dir"}  # of verl's and EasyR1's mergers
    assert elsewhere - set(known) - switched_off - {"--preset", "--config"} - theirs == set()
    assert set(re.findall(r"dataproto (grpo|ppo|export|\w+) ", ours("In short"))) <= set(COMMANDS)


def test_its_command_is_understood() -> None:
    command = "\n".join(fenced("bash")).partition("dataproto grpo ")[2].replace("\\\n", " ")
    config = parse(command.split())
    assert (config.algorithm.n, config.algorithm.minibatch, config.layout.dp, config.run.epochs) == (5, 128, 8, 15)
    assert config.algorithm.clip == (0.2, 0.3)


def test_names_of_losses_and_advantages_are_known() -> None:
    for option, registry in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        named = set(re.findall(rf"--algorithm\.{option} (\w+)`", PAGE))
        assert named
        assert named <= set(registry.names)


def test_its_python_runs(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: (LOSSES.remove("policy_gradient"), ADVANTAGES.remove("score_above_half")))
    for block in fenced("python"):
        exec(block, {})
    assert "policy_gradient" in LOSSES.names
    modules = re.findall(r"`((?:recipes|dataproto|workers)\.[\w.]+)`", PAGE)
    for name in modules:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": QUESTION, "images": [PICTURE], "reward_model": {"ground_truth": "red"}, "data_source": "colours"},
        {"problem": "<image>Which colour?", "images": [PICTURE], "answer": "red"},
        {"prompt": TYPED, "image": PICTURE, "solution": "red"},
        {"prompt": TYPED, "images": [PICTURE], "ground_truth": "red"},
    ],
    ids=["verl", "EasyR1", "TRL", "TRL with images"],
)
def test_rows_of_the_other_libraries_are_read(raw: dict) -> None:
    row = read_row(raw, 0, instruction="")
    assert row["reward_model"]["ground_truth"] == "red"
    assert tiny_builder()([row])["multi_modal_data"][0]["image"][0].size == (56, 56)


def test_images_without_any_place_come_first() -> None:
    row = read_row({"prompt": [{"role": "user", "content": "Which colour?"}], "image": PICTURE, "solution": "red"}, 0)
    assert row["prompt"][0]["content"] == "<image>Which colour?"
    rows = [{"prompt": prompt, "images": [PICTURE]} for prompt in (row["prompt"], "Which colour?")]
    marked, unread = tiny_builder()(rows)[
        "raw_prompt_ids"
    ]  # a loop of one's own takes rows that no reader has converted
    assert marked == unread
    two = read_row({"prompt": "<image>Which colour?", "images": [PICTURE, PICTURE], "solution": "red"}, 0)
    with pytest.raises(DataProtoError, match="1 image markers in the prompt, but 2 images"):
        tiny_builder()([two])


def test_the_truth_is_an_argument_of_trls_functions() -> None:
    raw = {"prompt": QUESTION, "images": [PICTURE], "solution": "red", "level": 3}
    row = read_row(raw, 0)
    given = RewardRow("red", row["reward_model"]["ground_truth"], "colours", row["extra_info"], row["prompt"])

    def reward(prompts, completions, ground_truth, answer, level):
        assert (ground_truth, answer, level) == (["red"], ["red"], [3])
        return [0.5]

    assert as_reward_function(reward)([given])[0]["score"] == 0.5


@pytest.mark.long
def test_the_metrics_of_a_run_have_these_names(tmp_path: Path) -> None:
    options = "--steps 1 --batch-size 4 --eval-rows 4 --algorithm.n 4 --algorithm.minibatch 2 --algorithm.kl-coef 0.01"
    assert main([*options.split(), "--algorithm.entropy-coef", "0.001", "--output-dir", str(tmp_path)]) == 0
    found = {
        re.sub(r"/synthetic/level1/", "/SOURCE/", name)
        for row in read_metrics(tmp_path / "metrics.jsonl")
        for name in row
    }
    named = set(re.findall(r"`([\w-]+/[\w/@-]+)`", ours("Metrics")))
    assert len(named) > 15
    assert named - found == set()
    for place in re.findall(r"`(global_step_)N(/[\w/]+)`", ours("Checkpoints")):
        assert (tmp_path / "1".join(place)).exists()
