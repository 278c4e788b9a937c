"""Starting vLLM in this process, with the policy as its sampler."""

from collections.abc import Mapping
from typing import Any

import torch

from dataproto.errors import InvalidConfig
from rollout.pretrained import check_in_vllm, check_speculation, family_and_config
from rollout.vllm.versions import (
    error_line,
    executor,
    normalized_pixels,
    prefixes_within_blocks,
    process_settings_kept,
    recording_options,
    set_environment,
    speculative_options,
)
from rollout.vllm.whole_images import READ_WHOLE

GRAPH_ROWS, GRAPH_STRIDE = 512, 16
"""Rows up to which vLLM captures CUDA graphs unless told otherwise, and the distance of their sizes; eager steps are slower."""

UNPROFILED = ("smolvlm", "idefics3")
"""Families whose placeholder image vLLM 0.24 processes to nothing, so that it cannot measure the memory of their tower."""


def processor_options(image_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings of vLLM's image processor: the PIL backend, as everywhere in this project, and the builder's options."""
    return {"use_fast": False} | dict(image_options or {})


def start_llm(
    model_path: str, device: torch.device, options: dict[str, Any], routed_experts: bool = False, speculate: int = 0
) -> tuple[Any, Any]:
    """A running ``vllm.LLM``, and the policy's sampler in it, which with ``routed_experts`` records experts, and for which
    ``speculate`` tokens of a row are drafted.

    Raises:
        InvalidConfig: the options are not supported, or vLLM does not start.
    """
    check_in_vllm(model_path)
    set_environment()
    from vllm import LLM

    from rollout.vllm.prepared_media import use_training_positions
    from rollout.vllm.sampler import install

    if options.get("speculative_config"):
        raise InvalidConfig("speculative_config: the policy itself draws the tokens; use speculate=N for drafts")
    on_cuda = device.type == "cuda"
    if options["dtype"] == "auto":
        options["dtype"] = "bfloat16" if on_cuda else "float32"
    if options["kv_cache_memory_bytes"] is None and not on_cuda:
        options["kv_cache_memory_bytes"] = 1 << 30
    defaults: dict[str, Any] = {
        "distributed_executor_backend": executor(options["tensor_parallel_size"]),
        "enable_sleep_mode": on_cuda,
        "generation_config": "vllm",
    }
    if (
        on_cuda
        and options["max_num_seqs"] > GRAPH_ROWS
        and not options.keys() & {"enforce_eager", "compilation_config"}
    ):
        defaults["max_cudagraph_capture_size"] = -(-options["max_num_seqs"] // GRAPH_STRIDE) * GRAPH_STRIDE
    if not on_cuda:
        defaults |= {"enforce_eager": True, "skip_mm_profiling": True}
    try:
        family, config = family_and_config(model_path)
        check_speculation(speculate, family)
        if on_cuda and family.model_type in UNPROFILED:
            defaults["skip_mm_profiling"] = True
        if not on_cuda and family.mutual_images(config) is not None:
            defaults |= READ_WHOLE
        defaults |= normalized_pixels() | prefixes_within_blocks(family) | speculative_options(speculate)
        if routed_experts:
            defaults |= recording_options()
        with process_settings_kept():
            llm = LLM(model_path, **defaults | options)
    except (OSError, ValueError, TypeError, ImportError, AssertionError) as error:
        raise InvalidConfig(f"vLLM does not start on {model_path}: {error_line(error)}") from error
    llm.collective_rpc(use_training_positions)
    (sampler,) = llm.collective_rpc(install)
    return llm, sampler
