"""From a model on one device to one spread over many: an ordered list of transforms, each in a module of its own.

A transform is ``apply(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> None`` and works in place.
"""

from collections.abc import Callable
from importlib import import_module

from dataproto.errors import InvalidConfig
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks

# Import path of each transform and when it is due, in the order in which they are applied: each one wraps what those before left.
TRANSFORMS: tuple[tuple[str, Callable[[Ranks, ModelConfig], bool]], ...] = (
    ("workers.parallel.pipeline", lambda ranks, options: ranks.size("pp") > 1),
    ("workers.parallel.tensor", lambda ranks, options: ranks.size("tp") > 1),
    ("workers.parallel.expert", lambda ranks, options: ranks.size("ep") > 1),
    ("workers.parallel.ulysses", lambda ranks, options: ranks.size("sp") > 1),
    ("workers.parallel.tokens", lambda ranks, options: ranks.size("sp", "tp") > 1),
    ("workers.parallel.vision_split", lambda ranks, options: ranks.size("sp", "tp") > 1),
    ("workers.parallel.activation_checkpointing", lambda ranks, options: options.activation_checkpointing != "none"),
    ("workers.parallel.compiling", lambda ranks, options: options.compile),
    ("workers.parallel.fsdp", lambda ranks, options: ranks.size("dp", "sp") > 1),
)


def parallelize(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> None:
    """Applies the transforms that are due, in place. A world of one with plain options is left as it is.

    Raises:
        InvalidConfig: an option that has nothing to work on in this layout, or what a transform refuses.
    """
    if options.offload and ranks.size("dp", "sp") == 1:
        raise InvalidConfig(
            f"offload=True keeps shards in host memory, and {ranks.layout} has none: it needs dp x sp > 1"
        )
    if ranks.size("pp") == 1 and (options.pipeline_layers is not None or options.pipeline_schedule != "1f1b"):
        raise InvalidConfig(
            f"pipeline_schedule={options.pipeline_schedule!r} and pipeline_layers={options.pipeline_layers} are for layouts with "
            f"pp > 1, not for {ranks.layout}"
        )
    for path, is_due in TRANSFORMS:
        if is_due(ranks, options):
            import_module(path).apply(module, ranks, options)
