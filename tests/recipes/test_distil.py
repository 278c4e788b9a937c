"""On-policy distillation: its advantage, the teachers that it refuses, and runs with pictures and without."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import geometry3k, write_geometry3k
from helpers.geo3k_runs import REWARD, rows_of
from helpers.tiny_prompts import tiny_tokenizer
from recipes.algorithms import advantage_columns, reverse_kl_advantage
from recipes.commands import main
from recipes.configs.distil_config import TINY, DistilConfig, DistilRunConfig, parse
from recipes.grpo import GRPOConfig
from workers import ActorConfig

SETTINGS = (
    "--batch-size 4 --algorithm.n 3 --max-prompt-length 300 --max-response-length 6 --eval-rows 3 --optimizer.lr 1e-2"
    " --token-budget 600 --steps 4 --save-every 2 --keep-rollouts 4"
)


def test_the_advantage_is_worked_by_hand():
    """The teacher finds the first token likelier by 0.5 nats, the second less likely by 2; padding counts nothing."""
    policy, teacher = torch.tensor([[-1.0, -1.0, -9.0]]), torch.tensor([[-0.5, -3.0, 0.0]])
    mask = torch.tensor([[1, 1, 0]])
    found = reverse_kl_advantage(policy.requires_grad_(), teacher, mask)
    assert found.tolist() == [[0.5, -2.0, 0.0]]
    assert not found.requires_grad
    columns = {"old_log_probs": policy.detach(), "ref_log_prob": teacher, "response_mask": mask}
    assert advantage_columns(DistilConfig(), DataProto.from_dict(columns))["advantages"].tolist() == [[0.5, -2.0, 0.0]]


def test_the_gradient_is_that_of_the_reverse_kl():
    """Over all tokens, weighed by the policy: -sum p A grad(log p) = grad KL(p || q), computed exactly."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits, retain_graph=True)
    advantages = reverse_kl_advantage(log_probs[None], teacher[None], torch.ones(1, 4))[0]
    (ours,) = torch.autograd.grad(-(log_probs.exp().detach() * advantages * log_probs).sum(), logits)
    torch.testing.assert_close(ours, exact, atol=1e-6, rtol=0)


def test_options_that_are_not_distillation_are_refused():
    with pytest.raises(InvalidConfig, match=r"advantage[= ]rloo, .*run dataproto grpo"):
        DistilConfig(advantage="rloo")
    with pytest.raises(InvalidConfig, match="no other KL term"):
        DistilConfig(kl_coef=0.1)
    with pytest.raises(InvalidConfig, match=r"reverse_kl needs a teacher: run dataproto distil"):
        GRPOConfig(advantage="reverse_kl")
    assert parse([]) == TINY
    assert not DistilConfig(minibatch=None).scores_first_update  # its advantage reads old log-probs


def test_an_advantage_of_ones_own_that_reads_a_reference_gets_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def gap(ref_log_prob, response_mask):\n    return ref_log_prob * response_mask\n")
    config = GRPOConfig(advantage=f"{file}:gap")
    assert config.needs_reference
    assert config.scores_first_update
    assert not GRPOConfig().needs_reference


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Students and teachers of three model types."""
    return {
        (name, seed): write_checkpoint(name, tmp_path_factory.mktemp(f"{name}-{seed}"), seed)
        for name in ("qwen2_5_vl", "qwen3")
        for seed in (0, 1)
    } | {("qwen3_vl", 0): write_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))}


def test_the_teacher_takes_the_place_of_the_reference(checkpoints):
    config = DistilRunConfig(teacher=checkpoints["qwen3", 1])
    reference = config.reference(ActorConfig(checkpoints["qwen3", 0], temperature=0.7, lora_rank=4, token_budget=99))
    assert (reference.model_path, reference.temperature) == (checkpoints["qwen3", 1], 0.7)
    assert (reference.lora_rank, reference.token_budget) == (0, 99)


def test_a_teacher_that_reads_other_tokens_or_images_is_refused(checkpoints, tmp_path):
    student = checkpoints["qwen3", 0]
    with pytest.raises(InvalidConfig, match="give --teacher CHECKPOINT"):
        DistilRunConfig().check_models(student)
    DistilRunConfig(teacher=checkpoints["qwen3", 1]).check_models(student)
    weights = tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    shutil.copytree(checkpoints["qwen3", 1], weights)
    (tmp_path / "run" / "config.json").write_text("{}")  # that of a run
    for folder in (tmp_path / "run", tmp_path / "run" / "global_step_2"):
        with pytest.raises(InvalidConfig, match=f"holds no checkpoint: it is part of a run; give {weights}"):
            DistilRunConfig(teacher=str(folder)).check_models(student)
    other = write_checkpoint("qwen3", tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    size = len(tiny_tokenizer("qwen3"))
    with pytest.raises(InvalidConfig, match=rf"tokenizers differ \({size} and {size + 1} tokens; 1 have .*'<extra>'\)"):
        DistilRunConfig(teacher=other).check_models(student)
    with pytest.raises(InvalidConfig, match=r"images or positions in other forms .*qwen2_5_vl and qwen3_vl"):
        DistilRunConfig(teacher=checkpoints["qwen3_vl", 0]).check_models(checkpoints["qwen2_5_vl", 0])


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A reward and two data sets: problems with pictures, and sums in words."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "reward.py").write_text(REWARD)
    write_geometry3k(folder / "problems.parquet", geometry3k(16))
    sums = [{"problem": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(16)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))

    def arguments(data, student, teacher, directory, *more):
        named = {
            "--preset": "any",
            "--data-path": folder / data,
            "--model-path": student,
            "--teacher": teacher,
            "--output-dir": directory,
        }
        paths = [str(part) for pair in named.items() for part in pair]
        return ["distil", *paths, "--reward", f"{folder / 'reward.py'}:score", *SETTINGS.split(), *more]

    return arguments


@pytest.mark.long
def test_a_student_with_pictures_comes_nearer_to_the_teacher(checkpoints, options, tmp_path):
    """The teacher is the student with larger logits, so that it prefers some tokens by far."""
    student, teacher = checkpoints["qwen2_5_vl", 0], tmp_path / "teacher"
    shutil.copytree(student, teacher)
    model = AutoModelForImageTextToText.from_pretrained(student)
    model.lm_head.weight.data *= 8
    model.save_pretrained(teacher)
    more = ["--steps", "10", "--save-every", "0", "--batch-size", "8", "--algorithm.n", "64", "--optimizer.lr", "5e-3"]
    assert main(options("problems.parquet", student, teacher, tmp_path / "run", *more)) == 0
    rows = rows_of(tmp_path / "run")
    kl = [row["distil/reverse_kl"] for row in rows[1:]]
    assert kl[0] > 0.3
    assert sum(kl[-3:]) < 0.9 * sum(kl[:3])
    assert rows[1]["timing_s/ref"] > 0
    assert any(name.startswith("val-core/") for name in rows[0])
    assert "<html" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_resumed_run_of_a_language_model_is_the_whole_run(checkpoints, options, tmp_path):
    student, teacher = (checkpoints["qwen3", seed] for seed in (0, 1))
    whole, parts = (("sums.jsonl", student, teacher, tmp_path / name) for name in ("whole", "parts"))
    assert main(options(*whole)) == 0
    assert main(options(*parts, "--steps", "2")) == 0
    assert main(options(*parts, "--resume")) == 0
    expected = {row["step"]: row for row in rows_of(tmp_path / "whole")}
    found = {row["step"]: row for row in rows_of(tmp_path / "parts")}
    for step in (3, 4):
        for name in ("distil/reverse_kl", "actor/pg_loss", "actor/grad_norm"):
            assert found[step][name] == expected[step][name], (step, name)
    assert list((tmp_path / "parts" / "rollouts" / "training").iterdir())


@pytest.mark.slow
def test_without_a_teacher_the_command_says_what_it_needs(checkpoints, capsys, tmp_path):
    student = checkpoints["qwen3", 0]
    assert main(["distil", "--preset", "any", "--model-path", student, "--output-dir", str(tmp_path / "run")]) == 2
    assert "distillation needs a teacher: give --teacher CHECKPOINT" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
