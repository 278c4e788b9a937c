"""Computes the patch embedding of vision towers as a matrix product.

Towers of Hugging Face embed each image patch by a convolution whose kernel is as large as the patch. A matrix product gives the
same result, several times faster in forward and backward pass.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from workers.model.patches import replace_forward


def use_linear_patch_embedding(model: nn.Module) -> None:
    """Replaces the forward function of each convolution that may process single patches, in place; weights do not change."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.stride == module.kernel_size and module.groups == 1:
            replace_forward(module, LinearPatchEmbedding(module))


class LinearPatchEmbedding:
    """The forward function of a convolution, as a matrix product if the input is as large as the kernel.

    Pixels get the dtype of the weights, which Kimi's tower leaves to its caller. Only here it is known: FSDP casts weights as it
    gathers them.

    >>> import torch
    >>> convolution, patches = nn.Conv3d(1, 2, (1, 2, 2)), torch.arange(12.0).view(3, 1, 1, 2, 2)
    >>> torch.allclose(LinearPatchEmbedding(convolution)(patches), convolution(patches))
    True
    """

    def __init__(self, convolution: Any) -> None:
        self.convolution = convolution

    def __call__(self, input: Tensor) -> Tensor:
        """``(patches, C, *kernel)`` to ``(patches, out, 1, ..)``, as the convolution returns it."""
        conv = self.convolution
        input = input.to(conv.weight.dtype)
        if tuple(input.shape[2:]) != conv.kernel_size or conv.padding not in ("valid", (0,) * len(conv.kernel_size)):
            out: Tensor = type(conv).forward(conv, input)
            return out
        return linear(input.flatten(1), conv.weight.flatten(1), conv.bias)[(..., *[None] * len(conv.kernel_size))]
