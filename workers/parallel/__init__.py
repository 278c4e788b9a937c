"""From a model on one device to one spread over many: an ordered list of transforms, one class in a file each."""

from dataproto.errors import InvalidConfig
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel.activation_checkpointing import ActivationCheckpointing
from workers.parallel.compiling import CompiledLayers
from workers.parallel.expert import ExpertParallel
from workers.parallel.fsdp import FullySharded
from workers.parallel.pipeline import PipelineParallel
from workers.parallel.tensor import TensorParallel
from workers.parallel.tokens import TokenSplit
from workers.parallel.transform import Transform
from workers.parallel.ulysses import UlyssesParallel
from workers.parallel.vision_split import VisionSplit
from workers.ranks.mesh import Ranks

__all__ = ["TRANSFORMS", "Transform", "parallelize"]

TRANSFORMS: tuple[type[Transform], ...] = (
    PipelineParallel,
    TensorParallel,
    ExpertParallel,
    UlyssesParallel,
    TokenSplit,
    VisionSplit,
    ActivationCheckpointing,
    CompiledLayers,
    FullySharded,
)
"""All transforms in the order in which they are applied: each one wraps the result of those before it."""


def parallelize(module: PackedVLM, ranks: Ranks, options: ModelConfig) -> list[Transform]:
    """Applies the transforms that are due to ``module``, in place, and returns them in that order.

    A world of one with plain options needs none, and the module stays unchanged.

    Raises:
        InvalidConfig: an option has no effect in this layout, or a transform refuses the model.
    """
    if options.offload and ranks.size("dp", "sp") == 1:
        raise InvalidConfig(
            f"offload=True keeps shards in host memory, and {ranks.layout} has none: it needs dp x sp > 1"
        )
    if options.load_in_4bit and ranks.size("tp") > 1:
        raise InvalidConfig(
            f"load_in_4bit=True keeps weights whole on every rank, and {ranks.layout} splits them: it needs tp=1"
        )
    if ranks.size("pp") == 1 and options.pipeline_layers is not None:
        raise InvalidConfig(
            f"pipeline_layers={options.pipeline_layers} is for layouts with pp > 1, not for {ranks.layout}"
        )
    if ranks.size("pp") > 1 and options.freeze_language:
        raise InvalidConfig(
            f"freeze_language=True trains only the first stage, and {ranks.layout} has others: it needs pp=1"
        )
    if options.mtp_coef and ranks.size("pp", "sp", "tp") > 1:
        raise InvalidConfig(
            f"mtp_coef={options.mtp_coef} trains a head that no transform splits, and {ranks.layout} splits the model: it needs "
            "tp=1, pp=1 and sp=1"
        )
    transforms = [kind(ranks, options) for kind in TRANSFORMS if kind.is_due(ranks, options)]
    for transform in transforms:
        transform.apply(module)
    return transforms
