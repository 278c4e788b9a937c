"""What a run says when a device has no memory left."""

import pytest
import torch

from dataproto.errors import InvalidConfig, OutOfMemory, WorkerFailed
from recipes.configs.grpo_config import GRPORunConfig
from recipes.configs.sft_config import SFTConfig
from recipes.demo.tiny_model import make_tiny_model
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


NO_ROOM = "vLLM does not start on m: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
TOO_LONG = "(8.00 GiB KV cache is needed, which is larger than the available KV cache memory (0.10 GiB)"
NOT_FREE = (
    "Free memory on device cuda:0 (6.9/8.0 GiB) on startup is less than desired GPU memory utilization (0.9, 7.2 GiB)."
)


@pytest.mark.parametrize(
    ("error", "options", "ways"),
    [
        (
            InvalidConfig(NO_ROOM),
            "",
            "memory_share 0.75, a smaller --max-response-length, --engine-options max_num_batched_tokens 2048",
        ),
        (
            WorkerFailed(TOO_LONG),
            "memory_share 0.9 max_num_batched_tokens 9",
            "a smaller --max-response-length, smaller --max-pixels",
        ),
        (InvalidConfig(NOT_FREE), "memory_share 0.9", "memory_share 0.63, --offload-idle, --on ray --layout.dp 2"),
    ],
)
def test_a_start_of_vllm_without_room_is_told_of_its_share(error, options, ways):
    def launch():
        raise error

    config = parse(f"--preset any --model-path m --engine vllm --engine-options seed 0 {options}".split())
    named = pytest.raises(OutOfMemory, match=rf"in the phase start; .*: (--engine-options )?{ways} \(docs")
    with named, naming_options(config, 1000):
        launch()


def test_other_errors_stay():
    with pytest.raises(InvalidConfig, match="wrong"), naming_options(GRPORunConfig(), 1000):
        raise InvalidConfig("wrong")
    with pytest.raises(WorkerFailed, match="died"), naming_options(GRPORunConfig(), 1000):
        raise WorkerFailed("died")


@pytest.mark.slow
def test_a_run_whose_sampling_needs_too_much_is_told_of_sampling(tmp_path, capsys):
    def sample(roles, *_, **__):
        with pytest.raises(InvalidConfig, match="no critic: take the options of dataproto ppo"):
            roles.critic.values(None)
        raise torch.OutOfMemoryError(CUDA)

    settings = "--preset tiny --steps 1 --run.no-eval-first --batch-size 4 --algorithm.minibatch 2"
    model = str(make_tiny_model(tmp_path / "model"))
    config = parse([*settings.split(), "--model-path", model, "--output-dir", str(tmp_path / "run")])
    with pytest.raises(OutOfMemory, match=r"phase generation; .*: --offload-idle, --on ray --layout.dp 2"):
        run(config, sample)
    said = capsys.readouterr().out
    assert "data: synthetic rows, new ones in each step, 4 a step; 256 held out" in said
    assert "preset tiny and options: " in said
    assert "batch-size 4" in said
