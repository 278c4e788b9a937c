"""Where vLLM 0.24 to 0.32 need more than documented options, and where their internals differ."""

import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from dataproto.errors import InvalidConfig
from dataproto.vlm.family import VLMFamily

FORCED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the actor
}
DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads belong to training as well
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nvcc would build it at the first start on a machine, and the policy's replaces it
}

JOINED_WEIGHTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that vLLM fuses, in its order."""
EXPERTS_MODULE = ".routed_experts"
"""The module that holds experts from 0.29 on. 0.30 omits it in the names of the weights that it has loaded."""
COMPUTED_WEIGHTS = (".W_UK_T", ".W_UV")
"""Ends of the names of parameters that vLLM computes from others when weights have been loaded: those of latent attention."""
EXPERT_WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Weights of experts: names in checkpoints, and in vLLM."""


LATENT_EPS = 1e-6
"""Of the norms of compressed queries, keys and values in DeepSeek-V3's code, whatever ``rms_norm_eps`` is."""

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

CHANGED_VARIABLES = ("LD_PRELOAD", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR")
"""What an engine sets for itself: other models of the process are compiled by as many threads, into folders of their own."""


def set_environment() -> None:
    """Sets the variables that vLLM reads when it is imported and when an engine starts."""
    os.environ.update(FORCED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def allow_adapted_heads() -> None:
    """Lets adapters have matrices for the output projection, in all models that are started from now on.

    vLLM computes them for every model, but refuses their files unless the class of the model names the projection, which only
    some classes do.
    """
    import_vllm()
    from vllm.model_executor.models.interfaces import SupportsLoRA

    SupportsLoRA.embedding_modules = {"lm_head": "output_embeddings"} | SupportsLoRA.embedding_modules


def search_plain_objects() -> None:
    """Has vLLM pass over objects of other libraries that say that they have a ``__dict__`` and have none.

    On a CPU it searches all modules for kernels that it replaces, and a start fails at such an object of llvmlite's, which the
    image processor of Kimi K2.5 imports through numba.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        return  # this version does not search
    dispatcher.vars = _attributes


def count_whole_images() -> None:
    """Has vLLM count an image of Idefics3 or SmolVLM that is not split as one tile.

    transformers' image processor by Pillow counts none, and vLLM 0.24 then gives the vision tower nothing of the image.
    """
    import_vllm()
    from vllm.model_executor.models.idefics3 import Idefics3ProcessingInfo

    own = Idefics3ProcessingInfo.get_num_patches
    if not hasattr(own, "__wrapped__"):
        Idefics3ProcessingInfo.get_num_patches = wraps(own)(lambda info, **image: max(own(info, **image), 1))


def _attributes(value: Any) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """Restores what the start of an engine changes in the process: random states, default dtype, number of threads, and
    environment variables (`CHANGED_VARIABLES`).
    """
    threads, set_threads, dtype = torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_cuda = list(range(torch.cuda.device_count()))
    try:
        with variables_kept(), torch.random.fork_rng(devices=on_cuda):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_num_threads = set_threads  # its CPU worker replaces this function
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def import_vllm() -> Any:
    """The package, imported.

    It sets `TORCHINDUCTOR_COMPILE_THREADS` to 1, because Inductor once forked its processes. They are started afresh since torch
    2.6, so Inductor reads the variable before: all of the cores build kernels for the actor's layers. For vLLM's own see
    `one_compile_thread`.
    """
    import torch._inductor.config  # noqa: F401

    with variables_kept():
        import vllm
    return vllm


def check_version(family: VLMFamily) -> None:
    """Raises `InvalidConfig` for a family that needs a later vLLM."""
    if family.vllm_module and find_spec(family.vllm_module) is None:
        raise InvalidConfig(
            f"this version of vLLM takes no models of type {family.model_type}: it has no {family.vllm_module}; use vLLM 0.32, "
            "or the hf engine"
        )


@contextmanager
def one_compile_thread() -> Iterator[None]:
    """Lets Inductor compile in this process within the block, as vLLM means it: its start hung beside a pool of processes (vLLM's
    issues 10480 and 10619).
    """
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@contextmanager
def variables_kept() -> Iterator[None]:
    """Restores `CHANGED_VARIABLES` after the block."""
    before = {name: os.environ.get(name) for name in CHANGED_VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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


def executor(tensor_parallel: int) -> str | None:
    """vLLM's executor: with several processes, the one that reads the launcher's variables (RANK, LOCAL_RANK, ...)."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if tensor_parallel > 1 and not several:
        raise InvalidConfig(
            f"tensor_parallel={tensor_parallel} needs {tensor_parallel} processes: start them with torchrun or Ray and call "
            "torch.distributed.init_process_group first"
        )
    return "external_launcher" if several else None


def batch_of(runner: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The rows of the current step: names of the requests, the number of tokens that each has after its prompt, and whether its
    next token is discarded because only a part of its prompt has been read.
    """
    batch = runner.input_batch
    rows = batch.num_reqs
    tokens = runner.optimistic_seq_lens_cpu[:rows].numpy() - batch.num_prompt_tokens[:rows]
    return list(batch.req_ids[:rows]), tokens, runner.discard_request_mask.np[:rows]


def attention_group(runner: Any) -> int:
    """The group of layers whose KV cache has a slot for each token: those with full attention."""
    groups = [type(group.kv_cache_spec).__name__ for group in runner.kv_cache_config.kv_cache_groups]
    return next((number for number, name in enumerate(groups) if "FullAttention" in name), 0)


def slots_of_step(runner: Any, group: int) -> torch.Tensor:
    """The slots ``(N,)`` of the tokens of the current step in the KV cache of a group of layers."""
    batch = runner.input_batch
    slots: torch.Tensor = batch.block_table[group].slot_mapping.gpu[: int(runner.query_start_loc.np[batch.num_reqs])]
    return slots


def slots_of_request(runner: Any, name: str, group: int, tokens: int) -> np.ndarray | None:
    """The slots ``(tokens,)`` of the first tokens of a request, by vLLM's own name of it; ``None`` if it does not run."""
    state = runner.requests.get(name)
    if state is None or name not in runner.input_batch.req_id_to_index:
        return None
    size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
    blocks = np.asarray(state.block_ids[group], dtype=np.int64)
    if len(blocks) * size < tokens:
        return None
    slots: np.ndarray = (blocks[:, None] * size + np.arange(size)).ravel()[:tokens]
    return slots


def state_of(engine: Any, name: str) -> Any:
    """What vLLM knows of a request that it has: ``detokenizer.output_token_ids``, ``logprobs_processor.prompt_logprobs`` and
    ``num_cached_tokens``. ``None`` if it has dropped it.
    """
    processor = engine.output_processor
    (own,) = getattr(processor, "external_req_ids", {}).get(name) or [name]  # its own names, in later versions
    return processor.request_states.get(own)


def model_of(worker: Any) -> nn.Module:
    """The model of a worker."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def renamed(model: Any, name: str) -> list[str]:
    """A checkpoint's name of a weight under the names of the modules of vLLM's model, none if that model leaves it out.

    From 0.30 on the mapper of a language model also names the fused layer that the weight is a part of; `JOINED_WEIGHTS` does
    that here. Before, some language models have no mapper.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return [name]
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    names: list[str] = mapper.apply_list([name])
    return names


def takes_transposed(model: nn.Module, name: str) -> bool:
    """Whether checkpoints hold the fused weights of experts as ``(experts, in, out)``; the parameter ``name`` is ``(experts, out,
    in)``. Before 0.30 vLLM's models did not say so, and those of Qwen3-VL alone were fused.
    """
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_fused_checkpoint_transposed", True))


def match_latent_attention(model: nn.Module) -> None:
    """Has multi-head latent attention (`LATENT_EPS`) computed as in Hugging Face's model.

    vLLM's gives the norms of compressed queries, keys and values the epsilon of the others. On a CPU its kernel for plain rotary
    angles takes queries for contiguous, and here they are parts of heads; other kinds of angles do not use that kernel.
    """
    for module in model.modules():
        norms = [getattr(module, f"{name}_a_layernorm", None) for name in ("q", "kv")]
        if norms[1] is None:
            continue
        for norm in norms:
            if norm is not None:
                norm.variance_epsilon = LATENT_EPS
        rotary: Any = module.rotary_emb
        if next(module.parameters()).device.type == "cpu":
            rotary._forward_method = rotary.forward_native


def clear_kv_cache(worker: Any) -> None:
    """Fills the KV cache with zeros. Attention multiplies masked values by 0, so NaN of an earlier row would spread."""
    layers = list(worker.model_runner.kv_caches)
    while layers:
        layer = layers.pop()
        if isinstance(layer, torch.Tensor):
            layer.zero_()
        else:  # several tensors per layer
            layers.extend(layer)


@contextmanager
def loading(worker: Any) -> Iterator[nn.Module]:
    """The worker's model, prepared to load weights in place under their checkpoint names.

    Dense layers on CUDA keep their weights as loaded, so vLLM's loaders write into them. On a CPU, and for experts, vLLM packs
    weights for its kernels; there each layer is loaded into new memory and packed again when it is complete. After an error the
    model is still usable.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = model_of(worker)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        if not is_packed(model):
            yield model
            return
        if next(model.parameters()).device.type == "cpu":
            _pack_experts_anew(model)
        initialize_layerwise_reload(model)
        try:
            yield model
        finally:
            finalize_layerwise_reload(model, worker.model_config)


def _pack_experts_anew(model: nn.Module) -> None:
    """Sets up vLLM's CPU kernels for experts again, because they pack weights only in their setup."""
    for module in model.modules():
        if hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
            method: Any = module.quant_method
            method.moe_kernel = None


def is_packed(model: nn.Module) -> bool:
    """Whether vLLM stores some weights in another form than it loads them."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu or any(hasattr(module, "w13_weight") or is_quantized(module) for module in model.modules())


def is_quantized(module: nn.Module) -> bool:
    """Whether vLLM quantises the weight of a layer when it loads it, into ``weight (in, out)`` and ``weight_scale (out, 1)``."""
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


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


def error_line(error: BaseException) -> str:
    """The root cause of an error of vLLM's, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if not re.match(r"\d+ validation errors? for ", line)]
    line = lines[0].strip().partition(" [type=")[0] if lines else type(error).__name__
    if "cached item" in line:
        line += "; its images are larger than vLLM's cache of processed images: raise mm_processor_cache_gb"
    return line
