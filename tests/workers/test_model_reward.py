"""A reward model scores a response with its critic's value at the end, and holds nothing that only training needs."""

from functools import partial
from pathlib import Path

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import CheckpointError
from helpers.batches import prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_config
from workers import ActorConfig, CriticConfig, CriticWorker, launch
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorWorker
from workers.roles.reward import ModelReward, ModelRewardWorker

CPU = torch.device("cpu")


def rows() -> DataProto:
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6)]], texts=[4, 5, 3])
    return with_responses(config, prompts, lengths=[5, 1, 0], width=6)


def value_loss(outputs, data):
    return (outputs.values - 1.0) ** 2, {}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def learnt(config: CriticConfig, folder: Path) -> list[float]:
    """Where a critic has learnt and is saved; its values at the end of the first two responses."""
    critic = CriticWorker(config, CPU)
    with torch.no_grad():
        critic.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    critic.update(rows(), value_loss)
    critic.save(folder)
    values = critic.values(rows())["values"]
    return [float(values[0, 4]), float(values[1, 0])]


@pytest.mark.slow
def test_a_saved_critic_scores_responses(path, tmp_path):
    config = CriticConfig(path)
    expected = learnt(config, tmp_path)
    with launch(ActorConfig(path), reward=ModelReward(config, tmp_path)) as roles:
        scored = roles.reward.score(rows())
    assert scored["score"].tolist() == [*expected, 0.0]
    assert scored["token_level_rewards"][0].tolist() == [0, 0, 0, 0, expected[0], 0]
    assert expected[0] != 0
    assert len(scored["response_text"]) == 3


@pytest.mark.parametrize("options", [{"lora_rank": 2}, {"freeze_vision": True}])
@pytest.mark.slow
def test_a_critic_of_which_a_part_was_trained_scores_as_it_did(path, tmp_path, options):
    config = CriticConfig(path, **options)
    expected = learnt(config, tmp_path)
    worker = ModelRewardWorker(ModelReward(config, tmp_path), path, CPU)
    assert worker.score(rows())["score"].tolist() == pytest.approx([*expected, 0.0], abs=1e-6)


def tensors_of(worker: ModelRewardWorker) -> list[torch.Tensor]:
    """Everything that the critic holds, wherever it stands."""
    found, seen, left = [], set(), [worker.critic]
    while left:
        held = left.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            found += [held, *([] if held.grad is None else [held.grad])]
        elif isinstance(held, dict):
            left += [*held, *held.values()]
        elif isinstance(held, list | tuple | set | frozenset):
            left += held
        elif hasattr(held, "__dict__") and not isinstance(held, type):
            left += vars(held).values()
    return found


def test_it_holds_its_weights_once_and_nothing_of_an_optimizer(path, tmp_path):
    config = CriticConfig(path)
    learnt(config, tmp_path)
    worker = ModelRewardWorker(ModelReward(config, tmp_path), path, CPU)
    worker.score(rows())
    assert not any(weight.requires_grad for weight in worker.critic.module.parameters())
    weights = sum(weight.numel() for weight in worker.critic.module.parameters())
    held = sum(
        {
            each.untyped_storage().data_ptr(): each.numel() for each in tensors_of(worker) if each.is_floating_point()
        }.values()
    )
    assert weights <= held < 1.1 * weights  # buffers besides; moments would be twice the weights more


def test_a_checkpoint_of_another_kind_is_refused(path, tmp_path):
    actor = ActorWorker(ActorConfig(path), CPU)
    actor.save(tmp_path / "actor")
    learnt(CriticConfig(path), tmp_path / "critic")
    with pytest.raises(CheckpointError, match=r"is of another model.*value_head"):
        ModelRewardWorker(ModelReward(CriticConfig(path), tmp_path / "actor"), path, CPU)
    with pytest.raises(CheckpointError, match=r"is of another model.*lora_A"):
        ModelRewardWorker(ModelReward(CriticConfig(path, lora_rank=2), tmp_path / "critic"), path, CPU)
    with pytest.raises(CheckpointError, match="holds no training state"):
        ModelRewardWorker(ModelReward(CriticConfig(path), tmp_path / "nowhere"), path, CPU)


def scores_of_a_rank(path: str, folder: Path, layout: Layout) -> list[float]:
    worker = ModelRewardWorker(ModelReward(CriticConfig(path), folder), path, CPU, init_ranks(layout, CPU))
    return list(worker.score(rows())["score"])


def test_it_is_spread_over_ranks_as_any_model(path, tmp_path):
    expected = learnt(CriticConfig(path), tmp_path / "critic")
    layouts = {str(layout): layout for layout in (Layout(dp=2), Layout(pp=2))}
    cases = {name: partial(scores_of_a_rank, path, tmp_path / "critic", layout) for name, layout in layouts.items()}
    for name, outcomes in run_ranks(2, cases, tmp_path).items():
        for outcome in outcomes:
            assert outcome == pytest.approx([*expected, 0.0], abs=1e-5), name
