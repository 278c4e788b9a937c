"""What vLLM 0.24 to 0.32 must be told outside its documented options, and where their interiors differ."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from dataproto.errors import InvalidConfig

FORCED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the actor
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # from 0.30 on the other runner has another kind of sampler
}
DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads belong to training as well
}

JOINED_WEIGHTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that vLLM joins, in its order."""
EXPERTS_MODULE = ".routed_experts"
"""Where experts lie from 0.29 on; 0.30 leaves it out when it tells which weights it has loaded."""
EXPERT_WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Experts' weights: a checkpoint's names, and vLLM's."""


def set_environment() -> None:
    """vLLM reads these when it is imported and when an engine starts."""
    os.environ.update(FORCED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """What starting an engine changes in its process is put back: random states, default
    dtype, thread count, `LD_PRELOAD` for children."""
    threads, set_threads, dtype = torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype()
    preload = os.environ.get("LD_PRELOAD")
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_cuda = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices=on_cuda):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_num_threads = set_threads  # its CPU worker replaces this function
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload


def executor(tensor_parallel: int) -> str | None:
    """How vLLM runs: among several processes it takes its place from what launched them (RANK, LOCAL_RANK, ...)."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if tensor_parallel > 1 and not several:
        raise InvalidConfig(
            f"tensor_parallel={tensor_parallel} needs as many processes: start them by torchrun or Ray and call "
            "torch.distributed.init_process_group first"
        )
    return "external_launcher" if several else None


def batch_of(runner: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The step under way, row by row: names of the requests, how many tokens each has after its prompt, and whether the token
    that it is about to get is thrown away, because only a part of what it has was read.
    """
    batch = runner.input_batch
    rows = batch.num_reqs
    tokens = runner.optimistic_seq_lens_cpu[:rows].numpy() - batch.num_prompt_tokens[:rows]
    return list(batch.req_ids[:rows]), tokens, runner.discard_request_mask.np[:rows]


def model_of(worker: Any) -> nn.Module:
    """The model that a worker runs."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def clear_kv_cache(worker: Any) -> None:
    """Fills the KV cache with zeros: attention multiplies what it masks by 0, and NaN of an earlier row would stay NaN."""
    layers = list(worker.model_runner.kv_caches)
    while layers:
        layer = layers.pop()
        if isinstance(layer, torch.Tensor):
            layer.zero_()
        else:  # several tensors a layer
            layers.extend(layer)


@contextmanager
def loading(worker: Any) -> Iterator[nn.Module]:
    """The worker's model, ready to take weights under their checkpoint names in place.

    Dense layers on CUDA keep their weights as they were loaded: vLLM's own loaders write into them. On a CPU, and for experts,
    it packs them for its kernels, so each layer is loaded beside the old one and packed again once it is complete. Whatever
    happens, the model is whole afterwards.
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
    """vLLM's CPU kernels pack experts' weights where they are set up, which happens once: so they are set up again."""
    for module in model.modules():
        if hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
            method: Any = module.quant_method
            method.moe_kernel = None


def is_packed(model: nn.Module) -> bool:
    """Whether vLLM keeps some weights in another form than it loads them."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu or any(hasattr(module, "w13_weight") for module in model.modules())
