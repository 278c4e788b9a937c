"""Losses and advantages that users register or name as FILE.py:FUNCTION, and their errors."""

import re
import sys
from pathlib import Path

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidColumn, InvalidConfig
from helpers.option_files import in_files
from recipes.algorithms.options import AlgorithmConfig, advantage_columns
from recipes.algorithms.registry import ADVANTAGES, GREEDY, LOSSES, takes
from recipes.geo3k_grpo import parse
from recipes.grpo import policy_loss
from workers.model.packed_model import Outputs

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
MINE = """
import torch

def loss(log_probs, old_log_probs, advantages, clip, entropy, weight=2.0, *rest, **others):
    ratio = (log_probs - old_log_probs).exp().clamp(max=1 + clip[1])
    return -weight * advantages * ratio, {"actor/mine": entropy}

def advantage(token_level_rewards, response_mask, gamma):
    return gamma * token_level_rewards.sum(1, keepdim=True) * response_mask

def scalar(log_probs):
    return log_probs.sum(), {}

def wanting(log_probs, unheard_of):
    return log_probs, {}

not_a_function = 3
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def batch():
    data = {"token_level_rewards": torch.tensor([[0.0, 2.0]]), "response_mask": torch.ones(1, 2)}
    data["advantages"] = torch.tensor([[1.0, -1.0]])
    return DataProto.from_dict(data, non_tensors={"uid": ["a"]})


def outputs():
    return Outputs(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.5, 0.25]]))


def test_functions_of_a_file_get_columns_and_options_by_name(mine, tmp_path):
    options = ["--algorithm.loss", f"{mine}:loss", "--algorithm.advantage", f"{mine}:advantage"]
    options += ["--algorithm.gamma", "0.5", "--algorithm.clip", "0", "0"]
    config = parse(in_files(["--preset", "any", "--model-path", "x", *options], tmp_path)).algorithm
    assert advantage_columns(config, batch())["advantages"].tolist() == [[1.0, 1.0]]
    loss, metrics = policy_loss(config)(outputs(), batch())
    assert loss.tolist() == [[-2.0, 2.0]]
    assert metrics["actor/mine"].tolist() == metrics["actor/entropy"].tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{}:nothing", r"mine.py has no function 'nothing'; it defines advantage, loss, scalar, wanting"),
        ("{}:not_a_function", "has no function"),
        ("{}x:loss", "there is no file"),
        (":loss", "or FILE.py:FUNCTION"),
    ],
)
def test_a_missing_function_is_an_error_of_one_line(mine, name, reason):
    for option in ("loss", "advantage"):
        with pytest.raises(InvalidConfig, match=reason):
            parse(["--preset", "any", "--model-path", "x", f"--algorithm.{option}", name.format(mine)])


def test_a_file_that_cannot_be_imported_is_an_error_with_the_reason(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InvalidConfig, match="ZeroDivisionError"):
        AlgorithmConfig(loss=f"{tmp_path / 'broken.py'}:loss")


def test_arguments_and_results_of_a_function_are_checked(mine):
    with pytest.raises(
        InvalidConfig,
        match=r"wanting has the argument 'unheard_of', which is neither .* nor a column .* columns are adv",
    ):
        policy_loss(AlgorithmConfig(loss=f"{mine}:wanting"))(outputs(), batch())
    with pytest.raises(
        InvalidColumn, match=r"scalar returned \(\), but must return one number for each token \(1, 2\)"
    ):
        policy_loss(AlgorithmConfig(loss=f"{mine}:scalar"))(outputs(), batch())
    with pytest.raises(InvalidColumn, match="scalar returned tuple"):
        advantage_columns(AlgorithmConfig(advantage=f"{mine}:scalar"), batch() | log_probs())


@pytest.mark.parametrize("returned", [torch.zeros(1, 2), (torch.zeros(1, 2), {}, {}), (torch.zeros(1, 2), None)])
def test_a_loss_that_returns_no_pair_is_told_what_to_return(returned):
    LOSSES.register("alone", lambda log_probs: returned)
    try:
        with pytest.raises(InvalidColumn, match=r"no pair: return loss, \{\}"):
            policy_loss(AlgorithmConfig(loss="alone"))(outputs(), batch())
    finally:
        LOSSES.remove("alone")


def log_probs():
    return DataProto.from_dict({"log_probs": torch.zeros(1, 2)})


def test_the_example_of_the_document_runs():
    source = re.search(r"## Your own algorithm.*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)
    exec(compile(source, str(DOCUMENT), "exec"), {})
    try:
        config = AlgorithmConfig(loss="reinforce", advantage="score_above_half")
        assert config.aggregation == "seq-mean-token-mean"
        assert advantage_columns(config, batch())["advantages"].tolist() == [[1.5, 1.5]]
        assert policy_loss(config)(outputs(), batch())[0].tolist() == [[1.0, -2.0]]
    finally:
        LOSSES.remove("reinforce")
        ADVANTAGES.remove("score_above_half")


def test_names_are_unique_and_papers_set_only_known_options():
    with pytest.raises(InvalidConfig, match="loss 'ppo' is already registered"):
        LOSSES.register("ppo", lambda log_probs: (log_probs, {}))
    with pytest.raises(InvalidConfig, match=r"paper sets \['epochs'\], but may only set"):
        LOSSES.register("other", lambda log_probs: (log_probs, {}), paper={"epochs": 2})


def test_the_loss_of_a_file_is_sent_with_its_code_to_processes_without_the_file(mine):
    import ray

    from workers.cluster.ray_group import pickle_unimportable_modules_by_value

    loss = policy_loss(AlgorithmConfig(loss=f"{mine}:loss"))
    name = next(name for name in sys.modules if name.startswith("loss_mine_"))
    pickle_unimportable_modules_by_value()
    code = ray.cloudpickle.dumps(loss)
    module = sys.modules.pop(name)
    try:
        assert ray.cloudpickle.loads(code)(outputs(), batch())[0].tolist() == [[-2.0, 2.0]]
    finally:
        sys.modules[name] = module


def test_advantages_with_greedy_responses_say_so_before_they_are_imported():
    named = [ADVANTAGES.find(name) for name in ADVANTAGES.names]
    assert [each.takes(GREEDY) for each in named] == [takes(each.function, GREEDY) for each in named]
    assert any(each.takes(GREEDY) for each in named)
