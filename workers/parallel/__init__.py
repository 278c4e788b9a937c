"""From a model on one device to one spread over many: an ordered list of transforms, each in a module of its own.

A transform is ``apply(module: PackedVLM, ranks: Ranks, options: EngineConfig) -> None`` and works in place.
"""

from collections.abc import Callable
from importlib import import_module

from workers.engine_config import EngineConfig
from workers.mesh import Ranks
from workers.packed import PackedVLM

# Import path of each transform and when it is due, in the order in which they are applied: each one wraps what those before left.
TRANSFORMS: tuple[tuple[str, Callable[[Ranks, EngineConfig], bool]], ...] = (
    ("workers.parallel.pipeline", lambda ranks, options: ranks.size("pp") > 1),
    ("workers.parallel.tensor", lambda ranks, options: ranks.size("tp") > 1),
    ("workers.parallel.expert", lambda ranks, options: ranks.size("ep") > 1),
    ("workers.parallel.ulysses", lambda ranks, options: ranks.size("sp") > 1),
    ("workers.parallel.tokens", lambda ranks, options: ranks.size("sp", "tp") > 1),
    ("workers.parallel.vision", lambda ranks, options: ranks.size("sp", "tp") > 1),
    ("workers.parallel.checkpointing", lambda ranks, options: options.activation_checkpointing != "none"),
    ("workers.parallel.compiling", lambda ranks, options: options.compile),
    ("workers.parallel.fsdp", lambda ranks, options: ranks.size("dp", "sp") > 1),
)


def parallelize(module: PackedVLM, ranks: Ranks, options: EngineConfig) -> None:
    """Applies the transforms that are due, in place. A world of one with plain options is left as it is."""
    for path, is_due in TRANSFORMS:
        if is_due(ranks, options):
            import_module(path).apply(module, ranks, options)
