"""Makes a simulation from its options, which are read by attribute: `recipes.configs.simulation_config`."""

from math import isqrt
from typing import Any

from transformers import AutoConfig

from dataproto.vlm import family_of
from recipes.forecast import BatchSizes, PromptSizes, device_named, response_lengths
from recipes.simulation.cluster_shape import Cluster
from recipes.simulation.layout_search import best_step
from recipes.simulation.published_models import published_config
from recipes.simulation.simulated_step import SimulatedStep
from recipes.simulation.workload import Workload
from workers.model.model_config import ModelConfig

BITS = 8


def simulated(options: Any) -> SimulatedStep:
    """The step that a `recipes.configs.simulation_config.SimulationConfig` asks for.

    Raises:
        InvalidConfig: the model or the device is unknown, or nothing fits.
    """
    config = published_config(options.preset) if options.model_path is None else read_config(options.model_path)
    cluster = Cluster(
        device_named(options.device), options.devices, options.node, network=1e9 * options.network_gbit / BITS
    )
    compute = ModelConfig(
        token_budget=options.token_budget, activation_checkpointing=options.activation_checkpointing, compile=True
    )
    layout = None if options.layout.world_size == 1 < options.devices else options.layout
    return best_step(workload_of(config, options), cluster, compute, layout, options.tensor_parallel)


def read_config(path: str) -> Any:
    """The config of a checkpoint whose model has a family."""
    config = AutoConfig.from_pretrained(path)
    family_of(config).check_supported(config)
    return config


def workload_of(config: Any, options: Any) -> Workload:
    """The rows of a step: prompts of one length with one image, responses of log-normal lengths.

    Old log-probs of the first mini-batch are those of the update, so they are computed for the others alone.
    """
    side = 2 * max(isqrt(options.image_patches) // 2, 1)
    grids = ((1, side, side),) if options.image_patches else ()
    prompts = PromptSizes((options.prompt_length,), (grids,)).repeated(options.batch_size)
    responses = response_lengths(options.batch_size * options.n, options.mean_response, options.max_response_length)
    batch = BatchSizes(config, prompts, responses, options.n)
    return Workload(batch, options.minibatch, old_log_probs=1 - options.minibatch / options.batch_size)
