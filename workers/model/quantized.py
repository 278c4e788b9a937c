"""Numbers of fewer bits, by torchao: products of linear layers in float8, and base weights of adapters in 4 bits.

In float8, inputs, weights and gradients are rounded to e4m3 with a scale a row. Weights, gradients and what lies between the
products stay as they are: the optimizer, checkpoints and the engine see no float8.

A weight of 4 bits (NF4 of QLoRA, arXiv:2305.14314) is a parameter of its own class, which `torch.nn.functional.linear` expands
each time that it is used, and again in the backward pass. 64 numbers share a scale of 8 bits, and 256 scales a scale of their
own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig


@contextmanager
def needs_torchao(option: str) -> Iterator[None]:
    """Imports of torchao in here raise an error that names ``option`` if it is not installed.

    Raises:
        InvalidConfig: torchao is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise InvalidConfig(f"{option} needs the package torchao: pip install 'dataproto-vlm[torchao]'") from error


LEAST_WIDTH = 1024
"""Of a layer: in smaller products rounding takes longer than float8 saves."""
MULTIPLE = 16  # of widths, which float8 kernels ask for
LEAST_CAPABILITY = (9, 0)  # of GPUs that have such kernels for a scale a row


def check_float8(config: ModelConfig, device: torch.device, tensor_parallel: int) -> None:
    """Checks the option ``float8``.

    Raises:
        InvalidConfig: it has no effect here, or does not go together with another option; names it.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise InvalidConfig(
            f"float8=True needs a CUDA device of compute capability 9.0 or more (Hopper, Blackwell), not {device}: leave it out"
        )
    if not config.compile:
        raise InvalidConfig(
            "float8=True without compile=True rounds in operations of their own, slower than bfloat16: add it"
        )
    if config.lora_rank:
        raise InvalidConfig(
            "float8=True is for weights that are trained, not for those under adapters: set lora_rank=0"
        )
    if tensor_parallel > 1:
        raise InvalidConfig(
            f"float8=True is for whole linear layers, and tp={tensor_parallel} splits them: it needs tp=1"
        )


def use_float8(model: nn.Module, family: VLMFamily, least_width: int = LEAST_WIDTH, emulate: bool = False) -> list[str]:
    """Lets the decoder's large linear layers multiply in float8, in place. Vision tower, head and routers stay as they are.

    Args:
        least_width: of inputs and outputs of a layer.
        emulate: round as on a GPU, but multiply in float32; for tests.

    Returns:
        The names of the layers.

    Raises:
        InvalidConfig: torchao is not installed, or no layer is large enough.
    """
    with needs_torchao("float8=True"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    names = list(_large_layers(model, family, least_width))
    if not names:
        raise InvalidConfig(f"float8=True: no linear layer of the decoder is {least_width} wide or more: leave it out")
    rowwise: Any = Float8LinearConfig.from_recipe_name("rowwise")
    # The product for a weight's gradient sums over tokens, whose number is any: it is padded.
    config = replace(rowwise, pad_inner_dim=True, emulate=emulate)
    chosen = set(names)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    return names


def _large_layers(model: nn.Module, family: VLMFamily, least_width: int) -> Iterator[str]:
    routers = {id(part) for router in family.routers(model) for part in router.modules()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith(f"{family.decoder_layers}.") and id(layer) not in routers:
            widths = (layer.in_features, layer.out_features)
            if min(widths) >= least_width and not any(width % MULTIPLE for width in widths):
                yield name


BLOCK = 64
SCALER_BLOCK = 256  # at most; a smaller power of two if it has to divide the number of scales


def four_bit(weight: Tensor, name: str) -> nn.Parameter:
    """A frozen parameter with the numbers of ``weight`` ``(out, in)`` rounded to 4 bits; it keeps the shape and the dtype.

    Args:
        name: of the weight, for errors.

    Raises:
        InvalidConfig: torchao is not installed, or the weight cannot be rounded.
    """
    with needs_torchao("load_in_4bit=True"):
        from torchao.quantization import to_nf4
    if weight.numel() % BLOCK:
        raise InvalidConfig(
            f"load_in_4bit=True: {name} has {weight.numel()} numbers, no multiple of {BLOCK}: leave the option out"
        )
    scales = weight.numel() // BLOCK
    rounded = to_nf4(weight.detach().contiguous(), BLOCK, min(scales & -scales, SCALER_BLOCK))
    if not bool(torch.isfinite(dense(rounded)).all()):
        raise InvalidConfig(
            f"load_in_4bit=True: {name} cannot be rounded to 4 bits: it has numbers that are not finite"
        )
    return nn.Parameter(rounded, requires_grad=False)


def dense(weight: Tensor) -> Tensor:
    """The numbers that a weight of 4 bits stands for, in its dtype; any other tensor as it is."""
    expanded: Any = getattr(weight, "get_original_weight", None)
    return weight if expanded is None else expanded()
