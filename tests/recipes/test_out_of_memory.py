"""What a run says when a device has no memory left."""

import pytest
import torch

from dataproto.errors import OutOfMemory, WorkerFailed
from recipes.configs.grpo_config import GRPORunConfig
from recipes.configs.sft_config import SFTConfig
from recipes.grpo import parse
from recipes.run.out_of_memory import naming_options
from recipes.run.policy_gradient import run

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


def told(error, *arguments, config=GRPORunConfig):
    if arguments:
        config = parse(["--preset", "any", "--model-path", "m", *arguments])
    else:
        config = config()
    with pytest.raises(OutOfMemory) as raised, naming_options(config, 1000):
        raise error
    return str(raised.value)


def test_an_update_is_told_of_the_three_options_that_help_most():
    text = told(torch.OutOfMemoryError(CUDA))
    assert text == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. No memory was left in the phase update; what helps most in this run: "
        "--activation-checkpointing full, --token-budget 8192, --offload-idle (docs/what_now.md)"
    )


def test_what_a_run_has_is_not_named_again():
    text = told(
        WorkerFailed("actor.update failed: OutOfMemoryError"), "--activation-checkpointing", "full", "--offload-idle"
    )
    assert "--token-budget 8192, --on ray --layout.dp 2, --lora-rank 16 (" in text


def test_supervised_training_is_told_too():
    assert "--activation-checkpointing full" in told(torch.OutOfMemoryError(CUDA), config=SFTConfig)


def test_other_errors_stay():
    with pytest.raises(WorkerFailed, match="died"), naming_options(GRPORunConfig(), 1000):
        raise WorkerFailed("died")


def test_a_run_whose_sampling_needs_too_much_is_told_of_sampling(tmp_path, capsys):
    def sample(*_, **__):
        raise torch.OutOfMemoryError(CUDA)

    config = parse(
        [
            "--steps",
            "1",
            "--run.no-eval-first",
            "--batch-size",
            "4",
            "--algorithm.minibatch",
            "2",
            "--output-dir",
            str(tmp_path / "run"),
        ]
    )
    with pytest.raises(OutOfMemory, match=r"phase generation; .*: --offload-idle, --on ray --layout.dp 2"):
        run(config, sample)
    said = capsys.readouterr().out
    assert "data: synthetic rows, new ones in each step, 4 a step; 256 held out" in said
    assert "preset tiny and options: " in said
    assert "batch-size 4" in said
