"""Names and layouts of the weights in vLLM's models, and loading them in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dataproto.errors import ending
from rollout.vllm.versions.running_engine import model_of

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
        with ending(lambda: finalize_layerwise_reload(model, worker.model_config)):
            yield model


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
