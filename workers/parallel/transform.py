"""What every transform of a packed model is, and what it may do after it has been applied."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks


class Transform:
    """One change of a packed model: a degree of parallelism, or how its layers are computed.

    A subclass names `axes` or implements `is_due`, and implements `apply`. The other methods are called on every transform of a
    model, on every rank, at the moment that their names say; here they do nothing.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    """The axes of the layout, see `Ranks.size`, over which it splits the work."""

    def __init__(self, ranks: Ranks, options: ModelConfig) -> None:
        self.ranks, self.options = ranks, options

    def take_options(self, options: ModelConfig) -> None:
        """Works by these options from the next call on; they differ from the former ones only in ``unsharded``."""
        self.options = options

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        """Whether this layout and these options ask for the transform. Default: the layout has several ranks along `axes`."""
        return ranks.size(*cls.axes) > 1

    def apply(self, module: PackedVLM) -> None:
        """Changes ``module`` in place.

        Raises:
            InvalidConfig: the model does not fit the layout or the options.
        """
        raise NotImplementedError

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks along `axes`, which are several where the transform is due; see `Ranks.submesh`."""
        return cast(DeviceMesh, self.ranks.submesh(*self.axes))

    def sum_gradients(self, module: PackedVLM) -> None:
        """Adds up gradients of which several ranks hold parts; called once before each optimizer step.

        Transforms add up different parameters, so their order does not matter; all ranks use the same order.
        """

    def keep_gathered(self, module: PackedVLM, backward: bool) -> AbstractContextManager[None]:
        """A context around all micro-batches of one call, in which gathered weights may stay gathered."""
        return nullcontext()

    def before_backward(self, module: PackedVLM, last: bool) -> None:
        """Called before each backward pass of a call; ``last`` for that of its last micro-batch."""

    def reduce_gradients(self, module: PackedVLM) -> None:
        """Called after the backward passes of a pipeline, none of which `before_backward` has named the last."""

    def drop_gradients(self, module: PackedVLM) -> None:
        """Drops gradients that a transform holds in addition to those of the parameters; called after errors."""

    def reshard(self, module: PackedVLM) -> None:
        """Frees gathered weights; called after passes without backward passes, and after errors."""

    def norm_group(self) -> ProcessGroup | None:
        """Ranks that hold other parameters of the same model, over which the norm of the gradients is summed."""
        return None

    def repeated_parameters(self, module: PackedVLM) -> Sequence[nn.Parameter]:
        """Parameters of this rank that another rank of `norm_group` counts in that norm."""
        return ()


def repeated_layers(module: PackedVLM) -> list[nn.Module]:
    """The layers of towers and decoder, in the order in which they run."""
    paths = module.family.repeated_layers
    return [layer for path in paths for layer in module.model.get_submodule(path).children()]
