"""Starting vLLM in this process, with the policy as its sampler, and the options by which vLLM 0.24 to 0.33 do so."""

import gc
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed, nn

from dataproto.errors import InvalidConfig
from dataproto.vlm.family import VLMFamily
from rollout.pretrained import check_in_vllm, check_speculation, family_and_config, has_stored
from rollout.vllm.low_rank import LORA_RANK, WEIGHTS_STAY
from rollout.vllm.process_settings import (
    BY_HEAD,
    RUNNER_VARIABLE,
    count_whole_images,
    import_vllm,
    keep_pixels,
    one_compile_thread,
    process_settings_kept,
    runner_chosen,
    search_plain_objects,
    set_environment,
    takes_second_runner,
)
from rollout.vllm.running_engine import error_line

POLICY_WORKER = "rollout.vllm.worker.PolicyWorker"
"""vLLM's name for the worker whose sampler is the policy's."""

RECORDING_WORKER = "rollout.vllm.worker.RecordingWorker"
"""vLLM's name for the worker that records experts."""

SCHEDULER = "rollout.vllm.scheduler.make_scheduler"
"""vLLM's name for what makes the scheduler."""

DRAFTER = "rollout.vllm.sampler.SiblingDrafter"
"""vLLM's name for what drafts tokens."""

QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""Quantisations of weights that are loaded in higher precision, and vLLM's names of them."""

TOWERS = "re:.*(visual|vision|audio|connector|projector|modality_projection).*"
"""vLLM's layers outside of the language model, by their names."""

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


def known_options(**options: Any) -> dict[str, Any]:
    """Those of these options that this version of vLLM has."""
    from vllm import EngineArgs

    return {name: value for name, value in options.items() if name in EngineArgs.__dataclass_fields__}


def chosen_options(family: VLMFamily) -> dict[str, Any]:
    """Options by which vLLM takes pixels as the image processor makes them, and finds more of a prefix that it has.

    Later versions have some models normalize the pixels, and would normalize those that the training side has processed a second
    time. They also find a prefix of a model with recurrent layers inside a block, whose size the states set (528 tokens or more).
    Prompts of these models are read by vLLM's Triton kernels: those of FlashInfer, which it prefers on Hopper, are 64 files that
    the first start on a machine compiles for minutes.
    """
    options: dict[str, Any] = {"mm_device_do_normalize": False}
    if family.recurrent_mixers is not None:
        options |= {"prefix_match_unit": PREFIX_MATCH_UNIT, "gdn_prefill_backend": "triton"}
    return known_options(**options)


def recording_options() -> dict[str, Any]:
    """The options by which vLLM records experts in the slots of its KV cache (`rollout.vllm.expert_slots`).

    A step that vLLM schedules ahead would give away the slots of a response that ends in the step before, so it must not. Neither
    may it copy a block of the cache that a request continues to write, as it does for prefixes that end inside a block: the
    experts would stay under the slots of the block before.
    """
    return {"worker_cls": RECORDING_WORKER, "async_scheduling": False} | known_options(prefix_match_unit=None)


def check_states(family: VLMFamily) -> None:
    """Raises `InvalidConfig` for models with recurrent layers, if they are to take drafts in vLLM's first model runner.

    There, in a step without a draft for any row (in earlier versions in each row without one), a layer goes on from the first of
    the states that it kept, not from that after the last token that counts.
    """
    if family.recurrent_mixers is not None:
        raise InvalidConfig(
            f"speculate: models of type {family.model_type} have recurrent layers, and vLLM's first model runner does not keep "
            f"their states right next to drafts: use vLLM 0.32 or later with Triton and without {RUNNER_VARIABLE}=0, or the hf "
            "engine"
        )


def speculative_options(tokens: int, second_runner: bool, head: bool, max_num_seqs: int) -> dict[str, Any]:
    """The options by which vLLM reads ``tokens`` drafted tokens of each row in a step; ``head``: the model has one that drafts.

    The second runner takes none of our classes, so the drafter named there is vLLM's own, whose function `SecondRunnerSampler`
    replaces. It records graphs for steps of as many drafts as its schedule by the number of rows names: for none too, because
    `rollout.vllm.scheduler` or our drafter, and not that schedule, decides whether a step has any. Drafts by n-grams need the
    tokens of the step before on the host, so that no step is scheduled ahead of them.
    """
    if not tokens:
        return {}
    config: dict[str, Any] = {"method": "custom_class", "model": DRAFTER}
    if second_runner:
        by_ngrams = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
        config = {"method": BY_HEAD} if head else by_ngrams
        if max_num_seqs > 1:
            config["num_speculative_tokens_per_batch_size"] = [
                (1, max_num_seqs - 1, tokens),
                (max_num_seqs, max_num_seqs, 0),
            ]
    ahead = {} if config["method"] == BY_HEAD else {"async_scheduling": False}
    return {"speculative_config": config | {"num_speculative_tokens": tokens}} | ahead


def quantization_options(kind: str | None) -> dict[str, Any]:
    """The option by which vLLM quantises the weights that it loads: fp8 with a scale for each output channel.

    Its kernels for plain ``fp8`` changed between versions: since 0.30 that name reads quantised checkpoints only. Towers stay as
    they are: they read a medium once, and vLLM's kernel cannot start where a width is no multiple of 16 (3,420 in Qwen2.5-VL's).

    Raises:
        InvalidConfig: ``kind`` is no quantisation that this engine has.
    """
    if kind is None:
        return {}
    if kind not in QUANTIZATIONS:
        raise InvalidConfig(f"quantization={kind!r}: choose one of {sorted(QUANTIZATIONS)}")
    return {"quantization": QUANTIZATIONS[kind], "quantization_config": {"ignore": [TOWERS]}}


def worker_options(lora_rank: int, sleep_level: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that tells `rollout.vllm.worker.PolicyWorker` of adapters and of weights that stay. It is a part of the key of
    compiled code on disk, so code with an adapter's products and code without them are not taken for each other.
    """
    told = {LORA_RANK: lora_rank} if lora_rank else {}
    told |= {} if sleep_level else {WEIGHTS_STAY: True}
    return {"additional_config": dict(options.get("additional_config") or {}) | told} if told else {}


def register_awaiting_loader() -> None:
    """Tells vLLM of the loader `AWAITING`, which reads no checkpoint: parameters get small numbers, with which memory can be
    profiled, and buffers keep what the model's class computes, as they do with a checkpoint that lacks them.
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


TILED = ("smolvlm", "idefics3")
"""Families that split images into tiles. vLLM 0.24 could not measure the memory of their tower."""

DENSE_SIZES = 8
"""Batch sizes up to this one are recorded in powers of two."""
STEPS_BETWEEN_POWERS = 4
"""Recorded batch sizes between one power of two and the next, above `DENSE_SIZES`."""
MIXED_TOKENS = 2048
"""Of a step that reads prompts while other rows decode: up to so many, its layers run as recorded graphs too. Launching them one
by one takes the host about 30 ms (36 layers), which is longer than an H200 computes on so many tokens of a model of 3B."""


def processor_options(image_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings of vLLM's image processor: the PIL backend, as everywhere in this project, and the builder's options."""
    return {"use_fast": False} | dict(image_options or {})


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of tokens for which vLLM records CUDA graphs of a step: a step runs as the next larger one.

    Steps that only decode have at most ``max_num_seqs``, and the others often fewer than `MIXED_TOKENS`. Above 8 a step grows by
    less than a quarter, which costs little where it waits for the weights or the host. vLLM's own list has 51 sizes for 256
    sequences, up to 512 tokens.

    >>> graph_sizes(40)[:14], len(graph_sizes(256))
    ([1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48], 36)
    """
    sizes, size = {1, 2, 4, max_num_seqs}, DENSE_SIZES
    while size <= max(max_num_seqs, MIXED_TOKENS):
        sizes.add(size)
        size += (1 << (size.bit_length() - 1)) // STEPS_BETWEEN_POWERS
    return sorted(sizes)


def with_graph_sizes(options: dict[str, Any], speculate: int = 0) -> dict[str, Any]:
    """Options of ``vllm.LLM`` with `graph_sizes`, unless they name sizes or record no graphs; drafts are in a step too."""
    chosen = options.get("compilation_config") or {}
    if options.get("enforce_eager") or not isinstance(chosen, Mapping):
        return options
    if {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & chosen.keys():
        return options
    sizes = {"cudagraph_capture_sizes": graph_sizes(options["max_num_seqs"] * (1 + speculate))}
    return options | {"compilation_config": sizes | dict(chosen)}


def start_llm(
    model_path: str,
    device: torch.device,
    options: dict[str, Any],
    routed_experts: bool = False,
    awaits_weights: bool = False,
    speculate: int = 0,
) -> tuple[Any, Any]:
    """A running ``vllm.LLM``, and the policy's sampler in it.

    Args:
        routed_experts: the sampler records experts.
        awaits_weights: the checkpoint's weights are not read.
        speculate: tokens of a row that are drafted at a time.

    Raises:
        InvalidConfig: the options are not supported, or vLLM does not start.
    """
    check_in_vllm(model_path)
    check_options(options)
    set_environment()
    llm_class = import_vllm().LLM
    collect_old_engines()
    search_plain_objects()
    keep_pixels()
    try:
        second = takes_second_runner(import_vllm().__version__)
        defaults = default_options(model_path, device, options, routed_experts, awaits_weights, speculate, second)
        with process_settings_kept(), runner_chosen(second), one_compile_thread():
            llm = llm_class(model_path, **with_graph_sizes(defaults | options, speculate))
    except (OSError, ValueError, TypeError, ImportError, AssertionError) as error:
        raise InvalidConfig(f"vLLM does not start on {model_path}: {error_line(error)}") from error
    from rollout.vllm.prompt_rendering import use_training_positions
    from rollout.vllm.worker import sampler_of

    llm.collective_rpc(use_training_positions)
    (sampler,) = llm.collective_rpc(sampler_of)
    return llm, sampler


def collect_old_engines() -> None:
    """Frees engines that nothing refers to any more but themselves.

    vLLM ends an engine when Python frees it, and then ends the process groups of whichever engine this process has. It also
    freezes what exists when an engine starts, so an old one could be freed at any time later.

    What is left is frozen, because a start makes up to 16 collections (on CUDA), each of which takes 0.5 to 0.9 s to look through
    all that a trainer has imported. vLLM thaws it after it has recorded graphs.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `InvalidConfig` for options of ``vllm.LLM`` that would replace what makes it sample from the policy."""
    if options.get("speculative_config"):
        raise InvalidConfig("speculative_config: the policy itself draws the tokens; use speculate=N for drafts")
    if options.get("worker_cls"):
        raise InvalidConfig("worker_cls: the engine has a worker of its own, whose sampler is the policy's")


def default_options(
    model_path: str,
    device: torch.device,
    options: dict[str, Any],
    routed_experts: bool,
    awaits_weights: bool,
    speculate: int,
    second_runner: bool = False,
) -> dict[str, Any]:
    """Options of ``vllm.LLM`` that ``options`` may replace; see `start_llm`. Completes dtype and memory in ``options``."""
    on_cuda = device.type == "cuda"
    if options["dtype"] == "auto":
        options["dtype"] = "bfloat16" if on_cuda else "float32"
    if options["kv_cache_memory_bytes"] is None and not on_cuda:
        options["kv_cache_memory_bytes"] = 1 << 30
    family, config = family_and_config(model_path)
    check_version(family)
    needed = dict(family.rollout_config(config))
    if needed and family.part:
        needed = {f"{family.part}_config": needed}
    if needed and options.get("hf_overrides"):
        raise InvalidConfig(
            f"hf_overrides: models of type {family.model_type} have settings of their own there; put these into config.json"
        )
    check_speculation(speculate)
    if speculate and not second_runner:
        check_states(family)
    prefix = family.prediction_head if speculate else None
    head = prefix is not None and has_stored(model_path, prefix)
    if family.model_type in TILED:
        count_whole_images()
    defaults: dict[str, Any] = {
        "distributed_executor_backend": executor(options["tensor_parallel_size"]),
        "enable_sleep_mode": on_cuda,
        "generation_config": "vllm",
        "worker_cls": POLICY_WORKER,
        "scheduler_cls": SCHEDULER,
        "hf_overrides": needed,
        "enforce_eager": not on_cuda,
        "skip_mm_profiling": not on_cuda or family.model_type in TILED,
    }
    if awaits_weights:
        register_awaiting_loader()
        defaults["load_format"] = AWAITING
    if family.experts is None and options.get("quantization") is None:  # no kernels to tune
        defaults |= known_options(enable_flashinfer_autotune=False)
    defaults |= chosen_options(family) | speculative_options(speculate, second_runner, head, options["max_num_seqs"])
    return defaults | recording_options() if routed_experts else defaults
