"""``torch.compile`` for the repeated layers and for the scores of tokens.

Layers are compiled one by one; all layers of a kind share the compiled code. Sizes that change from batch to batch (tokens,
segments, keys) are dynamic from the start, so a new length compiles nothing. Code around the layers stays eager.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dataproto.errors import InvalidConfig
from workers.model.compiled_code import cache_folder
from workers.model.mixture import fused_module
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import prepare_compilation, replace_forward
from workers.parallel.activation_checkpointing import Checkpointed
from workers.parallel.expert import split_experts
from workers.parallel.transform import Transform, repeated_layers
from workers.ranks.mesh import Ranks

# Variants of a layer that may be compiled: with gradients and without, prompts shared or not, full and windowed attention.
VARIANTS = 32

# Widths that are no multiple of 8, such as the 3,420 of Qwen2.5-VL's tower, keep matrix products from the fast kernels.
OPTIONS: dict[str, Any] = {"force_shape_pad": True}

# Without it, code is compiled for fewer than 4,096 rows (or than twice as many rows as columns, or than 5 million elements), and
# again, on one rank while all others wait, at the first micro-batch of another size: where norms' gradients are summed over rows
# and over columns, torch fuses both sums only above these sizes.
FUSE_AT_EVERY_SIZE = "triton.mix_order_reduction_non_strict_mode"

LENGTHS = r".*max_(length|seqlen)"  # of segments, by the names of torch's arguments

# Split experts and the hooks of FSDP say so themselves; of the hooks torch 2.14 gives another reason than releases before.
MEANT = re.compile(
    r"torch\.compiler\.disable|torch\._dynamo\.decorators, qualname: disable|torch\._dynamo\.disable\(\)"
)
WITHOUT_REASON = "it gives no reason here; TORCH_LOGS=graph_breaks prints it"

_told: set[str] = set()

log = logging.getLogger(__name__)


class CompiledLayers(Transform):
    """Repeated layers and scores of tokens that run through ``torch.compile``."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return options.compile

    def apply(self, module: PackedVLM) -> None:
        """Replaces ``forward`` of each layer instance; a layer is compiled when it first runs.

        Raises:
            InvalidConfig: the model is on a CPU and there is no C++ compiler.
        """
        check_compiler(next(module.parameters()).device)
        keep_compiled_code()
        for layer in repeated_layers(module):
            if experts := [fused_module(each) for each in split_experts(layer)]:
                compile_in_parts(layer, experts)
            else:
                replace_forward(layer, Compiled(layer.forward))
        module.score = partial(module.score, compiled=True)


def compile_in_parts(layer: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Compiles a layer around its split experts, which exchange tokens outside of compiled code, and the experts themselves.

    torch runs all of a checkpointed function uncompiled if a part of it cannot be compiled. So a checkpoint of the whole layer
    goes around the compiled parts. In place of a selective one each module of experts has its own. The other parts keep what
    their compiled code chooses, and the tokens that ranks gather for the experts are kept; without torch.compile they are
    gathered again.
    """
    around = layer.forward
    if not isinstance(around, Checkpointed):
        replace_forward(layer, Compiled(around))
    elif around.selective:
        replace_forward(layer, Compiled(around.forward))
        for each in experts:
            replace_forward(each, Checkpointed(each.forward, selective=True))
    else:
        replace_forward(layer, Checkpointed(Compiled(around.forward), selective=False))
    for each in experts:
        replace_forward(each, Compiled(each.forward))


class Compiled:
    """A layer's forward function, compiled for any number of tokens and segments.

    Where torch cannot compile a part of it, that part runs as it is, and the log says why, once for each reason.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        prepare_compilation(VARIANTS, LENGTHS)
        self.forward = torch.compile(forward, options=compile_options())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.config.recompile_limit < VARIANTS:  # vLLM sets it to 16 where it imports its flex attention
            prepare_compilation(VARIANTS, LENGTHS)
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Tensor):
                    mark_sizes(each)
        breaks, skipped = Counter(counters["graph_break"]), skipped_frames()
        result = self.forward(*args, **kwargs)
        new = Counter(counters["graph_break"]) - breaks
        for reason in new or [WITHOUT_REASON] * (skipped_frames() > skipped):
            tell_of(reason)
        return result


def compile_options() -> dict[str, Any]:
    """Options of ``torch.compile``; torch refuses those that a version does not have."""
    return OPTIONS | {name: True for name in (FUSE_AT_EVERY_SIZE,) if name in torch._inductor.list_options()}


def skipped_frames() -> int:
    """How many functions torch has left uncompiled in this process; of some it counts no break."""
    return counters["frames"]["total"] - counters["frames"]["ok"]


def tell_of(reason: str) -> None:
    """Warns that a part of a layer is not compiled, once for each reason, unless that is meant."""
    if reason not in _told and not MEANT.search(reason):
        _told.add(reason)
        first_lines = " ".join(line.strip() for line in reason.splitlines()[:2])
        log.warning("torch.compile left a part of a layer uncompiled, which is slower: %s", first_lines)


def mark_sizes(tensor: Tensor) -> None:
    """Marks the sizes that change: all but the size of features, the last dimension of floating-point tensors."""
    last = tensor.ndim - tensor.is_floating_point()
    torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim in range(last) if tensor.shape[dim] > 1])


def keep_compiled_code() -> None:
    """Stores compiled code in ``dataproto/inductor`` of the user's cache folder, where the next run finds it.

    Torch's own folder is a temporary one. ``TORCHINDUCTOR_CACHE_DIR`` names another, and ``XDG_CACHE_HOME`` another cache folder.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, default_cache_dir()) == default_cache_dir():  # torch sets it to its own when it first asks
        os.environ[name] = str(cache_folder("inductor"))


def check_compiler(device: torch.device) -> None:
    """Raises `InvalidConfig` unless ``torch.compile`` can build code for the device."""
    if device.type != "cpu":
        return
    import torch._inductor.config as inductor

    names = inductor.cpp.cxx if isinstance(inductor.cpp.cxx, (list, tuple)) else (inductor.cpp.cxx,)
    if not any(name and which(name) for name in names):
        raise InvalidConfig(
            "compile=True on a CPU needs a C++ compiler, and none was found: install g++ (or name one in CXX), or leave "
            "compile off"
        )
