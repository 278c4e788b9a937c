"""The benchmarks of training passes on tiny models: every part runs, and tells how it counts recurrent layers."""

import pytest
import torch

from benchmarks import pass_levers, train_step
from benchmarks.workload import counted_recurrence, make_batch, model_config, shape_of
from dataproto.vlm import family_of

SMALL = ["--device", "cpu", "--prompts", "2", "--samples", "2", "--steps", "1", "--warmup", "0"]


def run(module, monkeypatch, capsys, *options):
    monkeypatch.setattr("sys.argv", [module.__name__, *SMALL, *options])
    module.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen3.5"])
def test_levers_measure_scoring_updates_and_a_step(monkeypatch, capsys, size):
    said = run(pass_levers, monkeypatch, capsys, "--size", size, "--parts", "scoring,update,step")
    for part in ("old log-probs, twice the budget", "four updates, nothing unsharded", "update, one optimizer step"):
        assert f"| {part} |" in said
    assert "2 prompts x 2 samples" in said
    assert ("operations of the delta rule" in said) == (size == "tiny-qwen3.5")


@pytest.mark.parametrize("size", ["tiny-moe", "tiny-qwen3.5"])
def test_a_training_step_takes_the_rows_of_geometry3k(monkeypatch, capsys, size):
    said = run(train_step, monkeypatch, capsys, "--size", size, "--parts", "ours,shared", "--rows", "geo3k")
    assert "| ours, packed |" in said
    assert "| ours, 2 samples of each prompt |" in said


def test_rows_of_geometry3k_have_361_and_512_tokens():
    batch = make_batch(model_config("tiny-qwen3.5"), shape_of("qwen3.5-9b", "geo3k"), 2, 2, seed=0)
    assert batch["response_mask"].sum(1).tolist() == [512] * 4
    assert batch["attention_mask"].sum(1).tolist() == [361 + 512] * 4


def test_the_share_of_the_recurrence_is_that_of_the_counted_operations():
    """Two rows of equal length, so that what attention takes is the same in both configs."""
    config = model_config("qwen3.5-9b")
    family, lengths = family_of(config), torch.tensor([1])
    found = family.flops(config, lengths, None, logit_tokens=0)
    said = counted_recurrence(config)
    assert "in each of 24 of 32 layers" in said
    attending = 8 * 4 * 16 * 256  # of one token with itself
    rule = found.language_attention - attending
    assert f"{rule / (found.language_linear + rule):.1%} of the decoder's" in said
