"""Options of a start that vLLM 0.24 to 0.32 spell differently or do not document, and what a failed start says."""

import re
from importlib.util import find_spec
from typing import Any

from torch import distributed, nn

from dataproto.errors import InvalidConfig
from dataproto.vlm.family import VLMFamily

POLICY_WORKER = "rollout.vllm.policy.worker.PolicyWorker"
"""vLLM's name for the worker whose sampler is the policy's."""

RECORDING_WORKER = "rollout.vllm.routing.recording_worker.RecordingWorker"
"""vLLM's name for the worker that records experts."""

SCHEDULER = "rollout.vllm.policy.decoding_scheduler.make_scheduler"
"""vLLM's name for what makes the scheduler."""

DRAFTER = "rollout.vllm.policy.drafter.SiblingDrafter"
"""vLLM's name for what drafts tokens."""

QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""Quantisations of weights that are loaded in higher precision, and vLLM's names of them."""

PREFIX_MATCH_UNIT = 16
"""Tokens; vLLM's block sizes are multiples of it."""

AWAITING = "awaiting"
"""vLLM's name for the loader of models whose weights are handed over; see `register_awaiting_loader`."""


def check_version(family: VLMFamily) -> None:
    """Raises `InvalidConfig` for a family that needs a later vLLM."""
    if family.vllm_module and find_spec(family.vllm_module) is None:
        raise InvalidConfig(
            f"this version of vLLM takes no models of type {family.model_type}: it has no {family.vllm_module}; use vLLM 0.32, "
            "or the hf engine"
        )


def executor(tensor_parallel: int) -> str | None:
    """vLLM's executor: with several processes, the one that reads the launcher's variables (RANK, LOCAL_RANK, ...)."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if tensor_parallel > 1 and not several:
        raise InvalidConfig(
            f"tensor_parallel={tensor_parallel} needs {tensor_parallel} processes: start them with torchrun or Ray and call "
            "torch.distributed.init_process_group first"
        )
    return "external_launcher" if several else None


def normalized_pixels() -> dict[str, bool]:
    """The option by which vLLM takes pixels as the image processor makes them. Later versions have some models normalize the
    pixels, and would normalize those that the training side has processed a second time.
    """
    from vllm import EngineArgs

    name = "mm_device_do_normalize"
    return {name: False} if name in EngineArgs.__dataclass_fields__ else {}


def untuned() -> dict[str, bool]:
    """The option by which a start leaves out a pass that tunes FlashInfer's kernels, for models that use none of them."""
    from vllm import EngineArgs

    name = "enable_flashinfer_autotune"
    return {name: False} if name in EngineArgs.__dataclass_fields__ else {}


def prefixes_within_blocks(family: VLMFamily) -> dict[str, int]:
    """The option by which vLLM finds a prefix of a model with recurrent layers also inside a block, whose size their states set
    (528 tokens or more). Earlier versions have none.
    """
    from vllm import EngineArgs

    name = "prefix_match_unit"
    usable = family.recurrent_mixers is not None and name in EngineArgs.__dataclass_fields__
    return {name: PREFIX_MATCH_UNIT} if usable else {}


def recording_options() -> dict[str, Any]:
    """The options by which vLLM records experts in the slots of its KV cache (`rollout.vllm.routing`).

    A step that vLLM schedules ahead would give away the slots of a response that ends in the step before, so it must not. Neither
    may it copy a block of the cache that a request goes on to write, as it does for prefixes that end inside a block: the experts
    would stay under the slots of the block before.
    """
    from vllm import EngineArgs

    whole_blocks = {"prefix_match_unit": None} if "prefix_match_unit" in EngineArgs.__dataclass_fields__ else {}
    return {"worker_cls": RECORDING_WORKER, "async_scheduling": False} | whole_blocks


def speculative_options(tokens: int) -> dict[str, Any]:
    """The option by which vLLM reads ``tokens`` drafted tokens of each row in a step."""
    config = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": tokens}
    return {"speculative_config": config} if tokens else {}


def quantization_options(kind: str | None) -> dict[str, Any]:
    """The option by which vLLM quantises the weights that it loads: fp8 with a scale for each output channel.

    Its kernels for ``fp8`` alone changed between versions: since 0.30 that name reads quantised checkpoints only.

    Raises:
        InvalidConfig: ``kind`` is no quantisation that this engine has.
    """
    if kind is None:
        return {}
    if kind not in QUANTIZATIONS:
        raise InvalidConfig(f"quantization={kind!r}: choose one of {sorted(QUANTIZATIONS)}")
    return {"quantization": QUANTIZATIONS[kind]}


def register_awaiting_loader() -> None:
    """Tells vLLM of the loader `AWAITING`, which reads no checkpoint: parameters get small numbers, with which memory can be
    profiled, and buffers keep what the model's class computes, as they do beside a checkpoint that lacks them.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class AwaitingLoader(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            copies = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.device.type != "meta"]
            super().load_weights(model, model_config)
            for buffer, copy in copies:
                buffer.copy_(copy)

    register_model_loader(AWAITING)(AwaitingLoader)


def error_line(error: BaseException) -> str:
    """The root cause of an error of vLLM's, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if not re.match(r"\d+ validation errors? for ", line)]
    line = lines[0].strip().partition(" [type=")[0] if lines else type(error).__name__
    if "cached item" in line:
        line += "; its images are larger than vLLM's cache of processed images: raise mm_processor_cache_gb"
    return line
