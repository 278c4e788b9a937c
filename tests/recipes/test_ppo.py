"""PPO with a critic: its advantages by hand, the warm-up of the critic, and whole and interrupted runs of the entry point."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from helpers.option_files import in_files
from recipes.algorithms.options import advantage_columns
from recipes.geo3k_grpo import main as run_grpo
from recipes.geo3k_ppo import PRESETS, main, parse
from recipes.ppo import PPOConfig, critic_loss, ppo_step
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import launch
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig, Values

REWARD = '''
def score(data_source, solution_str, ground_truth, extra_info):
    """Rewards short answers, so that even a random model has something to learn from."""
    return {"score": 1.0 / (1 + len(solution_str)), "acc": float(len(solution_str) < 5)}
'''


def test_advantages_by_hand():
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
            "values": torch.tensor([[0.5, 0.8], [0.4, 7.0]]),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
        }
    )
    found = advantage_columns(PPOConfig(lam=0.5, gamma=0.9, whiten=False), data)
    first = 0.9 * 0.8 - 0.5 + 0.45 * 0.2
    torch.testing.assert_close(found["advantages"], torch.tensor([[first, 0.2], [-0.4, 0.0]]))
    torch.testing.assert_close(found["returns"], torch.tensor([[first + 0.5, 1.0], [0.0, 0.0]]))
    found = advantage_columns(PPOConfig(lam=0.5, gamma=0.9), data)
    assert found["advantages"][data["response_mask"] == 1].mean().item() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(found["returns"][0], torch.tensor([first + 0.5, 1.0]))


def test_the_critics_loss_by_hand():
    data = DataProto.from_dict({"values": torch.tensor([[0.0]]), "returns": torch.tensor([[1.0]])})
    loss, metrics = critic_loss(PPOConfig(value_clip=0.1))(Values(torch.tensor([[0.5]])), data)
    assert loss.item() == pytest.approx(0.9**2 / 2)
    assert metrics["critic/vf_clipfrac"].item() == 1
    loss, _ = critic_loss(PPOConfig(value_clip=None))(Values(torch.tensor([[0.5]])), data)
    assert loss.item() == pytest.approx(0.5**2 / 2)


def test_a_step_of_the_warm_up_leaves_no_features_of_the_tower(tmp_path):
    path = write_checkpoint("qwen2_5_vl", tmp_path)
    prompts = PromptBuilder.from_pretrained(path, max_prompt_length=300)(ROWS[:2])
    actor = ActorConfig(path, freeze_vision=True)

    def score(rows):
        return [{"score": float(number)} for number, _ in enumerate(rows)]

    with launch(actor, actor.frozen(), score, critic=CriticConfig(path, freeze_vision=True)) as roles:
        kept = [group.worker.module.kept for group in (roles.actor, roles.critic)]
        encoded = []
        for group in (roles.actor, roles.critic):
            module = group.worker.module
            module.register_forward_hook(lambda *_, module=module: encoded.append(bool(module.kept._kept)))
        config = PPOConfig(critic_warmup=1, kl_coef=0.1, kl_in="reward")  # which needs the actor's log-probs
        _, metrics = ppo_step(roles, prompts, config, SamplingParams(max_tokens=4))
    assert "actor/pg_loss" not in metrics
    assert all(encoded)
    assert len(encoded) >= 2
    assert not any(each._kept for each in kept)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"advantage": "grpo", "n": 2}, "dataproto grpo"),
        ({"lam": 1.5}, "from 0 to 1"),
        ({"gamma": -0.1}, "from 0 to 1"),
        ({"value_clip": 0.0}, "above 0"),
        ({"critic_warmup": -1}, "critic_warmup"),
        ({"critic_epochs": 0}, "critic_epochs"),
        ({"dynamic_sampling": 3}, "groups"),
    ],
)
def test_impossible_settings_are_refused_and_say_why(wrong, reason):
    with pytest.raises(InvalidConfig, match=reason):
        PPOConfig(**wrong)


def test_options_are_typed_on_the_command_line():
    config = parse(
        ["--algorithm.lam", "0.95", "--critic-optimizer.lr", "2e-4", "--steps", "7", "--algorithm.clip", "0.1", "0.3"]
    )
    assert (config.algorithm.lam, config.critic_optimizer.lr, config.run.steps) == (0.95, 2e-4, 7)
    assert config.algorithm.clip == (0.1, 0.3)
    assert config.data == PRESETS["tiny"].data
    assert parse(["--preset", "any", "--model-path", "x"]).algorithm == PPOConfig()
    with pytest.raises(InvalidConfig, match=r"^--algorithm.advantage rloo does not use a critic: run dataproto grpo$"):
        parse(["--algorithm.advantage", "rloo"])


# Whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ppo")
    (path / "mine.py").write_text(REWARD)
    write_checkpoint("qwen2_5_vl", path / "model")
    return path


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    settings = (
        "--batch-size 4 --algorithm.n 2 --max-prompt-length 500 --max-response-length 6 --eval-rows 4 --optimizer.lr 1e-3"
        " --critic-optimizer.lr 1e-3 --algorithm.minibatch 2 --algorithm.critic-epochs 2 --token-budget 600 --steps 4"
        " --save-every 2 --algorithm.kl-coef 0.05 --algorithm.kl-in reward"
        " --algorithm.critic-warmup 1"
    )
    paths = ["--preset", "any", "--model-path", str(folder / "model"), "--reward", f"{folder / 'mine.py'}:score"]
    given = in_files([*settings.split(), *more], folder / f"options of {name}")
    return [*paths, "--output-dir", str(folder / name), *given]


def rows_of(directory: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing", "perf/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


@pytest.fixture(scope="module")
def finished_run(folder):
    assert main(arguments(folder, "whole")) == 0
    return folder / "whole"


@pytest.mark.slow
def test_a_run_reports_the_critic_under_verls_names_and_saves_it(finished_run):
    rows = rows_of(finished_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    names = (
        "vf_loss vf_clipfrac vpred_mean grad_norm lr values/mean returns/mean advantages/mean rewards/mean score/mean"
        " vf_explained_var"
    )
    for row in rows[1:]:
        assert all(math.isfinite(row[f"critic/{name}"]) for name in names.split())
        assert row["critic/grad_norm"] > 0
        assert row["actor/reward_kl_penalty_coeff"] > 0
    assert rows[1]["critic/values/mean"] == 0  # the head is zero at first
    assert rows[-1]["critic/values/mean"] != 0
    assert (finished_run / "global_step_4" / "critic" / "training").is_dir()
    assert (finished_run / "report.html").exists()


@pytest.mark.slow
def test_in_the_warm_up_the_critic_alone_learns(finished_run):
    rows = rows_of(finished_run)
    assert "actor/pg_loss" not in rows[1]
    assert rows[1]["critic/vf_loss"] > 0
    assert rows[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)
    assert rows[2]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)  # still the reference
    assert all("actor/pg_loss" in row for row in rows[2:])
    assert abs(rows[3]["actor/reward_kl_penalty"]) > 1e-5


@pytest.mark.slow
def test_a_run_that_is_saved_and_resumed_before_the_actor_first_learns_is_the_uninterrupted_one_to_the_bit(
    finished_run, folder
):
    saving = arguments(folder, "resumed", "--save-every", "1", "--keep-checkpoints", "4", "--save-in-background")
    assert main(saving) == 0
    assert rows_of(folder / "resumed") == rows_of(finished_run)
    for step in (2, 3, 4):
        shutil.rmtree(folder / "resumed" / f"global_step_{step}")
    assert main([*saving, "--resume"]) == 0
    assert rows_of(folder / "resumed") == rows_of(finished_run)


@pytest.mark.slow
def test_dynamic_sampling_draws_on_exactly_where_an_interrupted_run_stood(folder):
    """In a run of RLOO with GSPO's loss and length punishment, whose scores are often equal within a group."""
    (folder / "parity.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 2\n"
    )
    given = (
        "--batch-size 3 --algorithm.n 2 --max-prompt-length 500 --max-response-length 6 --eval-rows 2 --steps 4"
        " --save-every 2 --algorithm.advantage rloo --algorithm.loss gspo --algorithm.aggregation seq-mean-token-mean"
        " --algorithm.dynamic-sampling 3 --algorithm.overlong-buffer 3 --optimizer.lr 1e-3"
    )
    paths = ["--preset", "any", "--model-path", str(folder / "model"), "--reward", f"{folder / 'parity.py'}:score"]
    arguments = [*paths, "--output-dir", str(folder / "grpo"), *given.split()]
    assert run_grpo(arguments) == 0
    whole = rows_of(folder / "grpo")
    generations = [row["train/num_gen_batches"] for row in whole[1:]]
    assert max(generations) > 1
    assert all(1 <= count <= 3 for count in generations)
    assert sum(row["train/filtered_groups"] for row in whole[1:]) > 0
    assert all(row["reward/overlong_penalty"] <= 0 for row in whole[1:])
    assert not (folder / "grpo" / "global_step_4" / "critic").exists()
    (folder / "grpo" / "global_step_4").rename(folder / "away_grpo")
    assert run_grpo([*arguments, "--resume"]) == 0
    assert rows_of(folder / "grpo") == whole


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_the_default_run_learns_from_pictures(seed, tmp_path):
    assert main(["--seed", str(seed), "--output-dir", str(tmp_path / "run")]) == 0
    rows = rows_of(tmp_path / "run")
    name = next(name for name in rows[0] if name.endswith("acc/mean@1"))
    assert rows[0][name] < 0.2
    assert rows[-1][name] > 0.6
