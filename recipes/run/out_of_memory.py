"""Which options help most where a device has no memory left."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dataproto.errors import InvalidConfig, OutOfMemory
from recipes.configs.shared.run_config import RecipeConfig

NO_ROOM = ("No available memory for the cache blocks", "larger than the available KV cache memory")
"""What vLLM says as it starts where its share of the memory holds the weights, but not enough of the KV cache."""
SIGNS = ("out of memory", "OutOfMemoryError", "can't allocate memory", "is less than desired", *NO_ROOM)
"""What the message or the type of an allocator's error, or of vLLM's, has, also of one in another process."""


@contextmanager
def naming_options(config: RecipeConfig, longest: int) -> Iterator[None]:
    """Adds to an error of the allocator the three options that help most in this run.

    Args:
        config: the run's options, of policy-gradient or supervised training.
        longest: the largest number of tokens of a row, which a micro-batch holds at least.

    Raises:
        OutOfMemory: a device, or the host, had no memory left.
    """
    try:
        yield
    except (RuntimeError, InvalidConfig) as error:
        # torch's own, `WorkerFailed` of another process, and vLLM's at its start
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OutOfMemory) or not any(sign in text for sign in SIGNS):
            raise
        called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        phase = "start" if "launch" in called else "generation" if called & {"sample", "generate"} else "update"
        room = any(sign in text for sign in NO_ROOM)
        found = _room_for_cache(config) if room else _ways(config, longest, phase)
        ways = [way for use, way in found if use][:3]
        said = str(error).partition("\n")[0]
        raise OutOfMemory(
            f"{said} No memory was left in the phase {phase}; what helps most in this run: {', '.join(ways)} (docs/what_now.md)"
        ) from error


def _room_for_cache(config: RecipeConfig) -> Iterator[tuple[bool, str]]:
    """As `_ways`, where vLLM's share of the memory is too small for a KV cache."""
    options, ranks = config.engine_options, config.layout.world_size
    share, size = float(options.get("memory_share", 0.5)), int(options.get("kv_cache_bytes", 0))
    yield size > 0, f"--engine-options kv_cache_bytes {2 * size}"
    yield not size and share < 0.9, f"--engine-options memory_share {min(1.5 * share, 0.9):.2f}"
    yield True, "a smaller --max-response-length"
    yield "tensor_parallel" not in options and ranks > 1, f"--engine-options tensor_parallel {ranks}"
    yield "max_num_batched_tokens" not in options, "--engine-options max_num_batched_tokens 2048"
    yield True, "smaller --max-pixels"


def _ways(config: RecipeConfig, longest: int, phase: str) -> Iterator[tuple[bool, str]]:
    """Options with their values, and whether this run can use them; those that save most in the phase come first."""
    compute, vllm = config.compute, config.engine == "vllm"
    stays = not (compute.offload_idle or compute.offload)
    if phase == "update":
        yield compute.activation_checkpointing != "full", "--activation-checkpointing full"
        yield compute.token_budget > longest, f"--token-budget {max(compute.token_budget // 2, longest)}"
    if phase in ("start", "generation") and vllm:
        share = float(config.engine_options.get("memory_share", 0.5))
        yield True, f"--engine-options memory_share {0.7 * share:.2f}"
    yield stays, "--offload-idle"
    yield config.on == "local" or config.layout.world_size > 1, f"--on ray --layout.dp {2 * config.layout.dp}"
    yield not (compute.lora_rank or compute.freeze_language), "--lora-rank 16"
    yield compute.lora_rank > 0 and not compute.load_in_4bit, "--load-in-4bit"
    yield not compute.lora_rank and config.optimizer.kind == "adamw", "--optimizer.kind adamw8bit"
    yield True, "smaller --max-response-length and --max-pixels"
