"""A reward model scores a response with its critic's value at the end."""

import torch

from helpers.batches import prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import tiny_config
from workers import ActorConfig, CriticConfig, CriticWorker, launch
from workers.model_reward import ModelReward


def test_a_saved_critic_scores_responses(tmp_path):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    config = tiny_config("qwen2_5_vl")
    prompts = prompt_batch(config, [[(4, 6)], [], [(6, 6)]], texts=[4, 5, 3])
    data = with_responses(config, prompts, lengths=[5, 1, 0], width=6)
    data["responses"] = data["input_ids"][:, -6:]
    critic = CriticWorker(CriticConfig(path))
    with torch.no_grad():
        critic.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    critic.save(tmp_path / "critic")
    values = critic.values(data)["values"]
    with launch(ActorConfig(path), reward=ModelReward(CriticConfig(path), tmp_path / "critic")) as roles:
        scored = roles.reward.score(data)
    assert scored["score"].tolist() == [float(values[0, 4]), float(values[1, 0]), 0.0]
    assert scored["token_level_rewards"][0].tolist() == [0, 0, 0, 0, float(values[0, 4]), 0]
    assert float(values[0, 4]) != 0
    assert len(scored["response_text"]) == 3
