"""What the presets of a size choose for the devices that there are, and that it fits them by the forecast."""

from dataclasses import replace

import pytest

from dataproto.errors import InvalidConfig
from recipes.configs import grpo_config, plan_config, ppo_config
from recipes.configs.shared.device_preset import GIB, MODEL_SIZES, Machine
from recipes.configs.shared.published_models import published_config
from recipes.plan.command import policy_setting
from recipes.plan.forecast import forecast
from recipes.plan.model_size import model_size
from recipes.plan.rows import BatchSizes, PromptSizes, response_lengths
from recipes.plan.setting import DEVICES
from workers.model.model_config import ModelConfig

H100 = DEVICES["h100"]
CARD = H100.memory / GIB
SMALL = 22  # GiB, of a card that is sold with 24


def chosen(options, memory=CARD, devices=1, parse=grpo_config.parse):
    return parse(options.split(), machine=Machine(round(memory * GIB), devices))


def expected(config, memory, response):
    """The forecast with prompts of one picture."""
    model = published_config(config.preset)
    prompts, samples = config.data.batch_size, config.algorithm.n
    sizes = PromptSizes((361,), (((1, 30, 30),),)).repeated(prompts)
    responses = response_lengths(prompts * samples, response, config.data.max_response_length)
    batch = BatchSizes(model, sizes, responses, samples)
    return forecast(policy_setting(config, batch, replace(H100, memory=round(memory * GIB))))


CHOICES = {
    "3B on 80 GB": ("--preset 3b", CARD, 1, (8192, "selective", True)),
    "7B on two of 80 GB": ("--preset 7b", CARD, 2, (6144, "selective", True)),
    "adapters of 7B on 80 GB": ("--preset 7b --lora-rank 32", CARD, 1, (10_240, "selective", False)),
    "adapters of 3B in 4 bits on 24 GB": ("--preset 3b --lora-rank 32 --load-in-4bit", SMALL, 1, (8192, "full", False)),
    "3B on 141 GB": ("--preset 3b", 140, 1, (8192, "selective", False)),
    "7B on four of 141 GB": ("--preset 7b", 140, 4, (10_240, "selective", False)),
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.slow
def test_a_preset_fits_the_cards_that_people_have(case):
    options, memory, devices, (budget, mode, idle) = CHOICES[case]
    config = chosen(options, memory, devices)
    compute = config.compute
    assert (compute.token_budget, compute.activation_checkpointing, compute.offload_idle) == (budget, mode, idle)
    assert config.layout.world_size == devices
    assert config.on == ("local" if devices == 1 else "ray")
    found = expected(config, memory, 1024)
    assert found.fits, found.problems


def test_what_is_given_is_not_chosen():
    options = "--preset 3b --token-budget 4096 --engine-options memory_share 0.4 --activation-checkpointing full"
    config = chosen(options)
    compute = config.compute
    assert (compute.token_budget, compute.activation_checkpointing) == (4096, "full")
    assert config.engine_options["memory_share"] == 0.4
    assert compute.offload_idle  # which nothing has said
    same = chosen("--preset 7b --token-budget 10240 --offload-idle false", devices=2).compute  # as without a device
    assert (same.token_budget, same.offload_idle) == (10_240, False)
    assert chosen("--preset 7b --on ray --layout.dp 4").layout.dp == 4
    assert chosen("--preset 7b --on-bad-row skip --data-path rows.parquet", devices=2).layout.dp == 2
    assert chosen("--preset 3b", 140, 8).layout.dp == 1


@pytest.mark.slow
def test_the_engine_gets_what_resting_roles_leave():
    for options, memory, devices in (("--preset 3b", 140, 1), ("--preset 7b --lora-rank 32", CARD, 1)):
        config = chosen(options, memory, devices)
        generating = next(phase for phase in expected(config, memory, 512).phases if phase.name == "gen")
        assert 0.75 * memory < generating.memory / GIB < memory


def test_a_row_longer_than_the_token_budget_counts():
    assert chosen("--preset 3b --max-response-length 16384").compute.activation_checkpointing == "full"


REFUSED = {
    "7B on one of 80 GB": ("--preset 7b", CARD, 1, ("--lora-rank 32", "--on ray --layout.dp 2")),
    "3B on 24 GB": ("--preset 3b", SMALL, 1, ("--lora-rank 32", "--on ray --layout.dp 4")),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.slow
def test_what_fits_nowhere_is_refused_with_options_that_fit(case):
    """Each way that the message names is a choice that the forecast finds to fit."""
    options, memory, devices, ways = REFUSED[case]
    with pytest.raises(InvalidConfig, match=r"needs .* GiB of each device, which has .* GiB: it fits with") as refused:
        chosen(options, memory, devices)
    assert str(refused.value).endswith(" or with ".join(ways))
    for way in ways:
        found = expected(chosen(f"{options} {way}", memory, devices), memory, 512)
        assert found.fits, found.problems


def test_a_cluster_of_ones_own_is_not_refused():
    config = chosen("--preset 7b --on ray --ray.address cluster:1 --layout.dp 1")
    assert config.compute.token_budget == grpo_config.PRESETS["7b"].compute.token_budget


def test_a_critic_counts():
    alone = chosen("--preset 3b", 140, 1)
    beside = chosen("--preset 3b", 140, 1, ppo_config.parse)
    assert not alone.compute.offload_idle
    assert beside.compute.offload_idle


def test_without_a_gpu_a_preset_is_as_written():
    assert grpo_config.parse(["--preset", "7b"]) == grpo_config.PRESETS["7b"]


def test_a_plan_is_for_its_device():
    assert plan_config.parse(["grpo", "--preset", "3b", "--device", "h100"]).config.compute.offload_idle
    assert not plan_config.parse(["grpo", "--preset", "3b"]).config.compute.offload_idle  # an H200
    assert plan_config.parse(["grpo", "--preset", "7b", "--device", "h100"]).config.layout.dp == 4


@pytest.mark.parametrize("name", ["3b", "7b"])
@pytest.mark.slow
def test_the_arithmetic_counts_as_the_model_does(name):
    sizes, model = MODEL_SIZES[name], model_size(published_config(name), ModelConfig())
    assert sizes.total == pytest.approx(model.total, rel=0.01)
    assert sizes.words == model.embedding + model.head
    assert sizes.layer * sizes.layers == pytest.approx(model.layers, rel=0.001)
    adapters = model_size(published_config(name), ModelConfig(lora_rank=8)).trained
    assert 8 * sizes.adapters == pytest.approx(adapters, rel=0.15)


def test_an_impossible_option_is_still_named():
    with pytest.raises(InvalidConfig, match="add --on ray"):
        chosen("--preset 7b --on local --layout.dp 2")
