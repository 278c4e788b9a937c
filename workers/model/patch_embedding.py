"""Patch embeddings as matrix products.

Hugging Face's towers cut pictures into patches beforehand and still embed each by a convolution that just fits it. As a matrix
product the same numbers come several times as fast, forward and backward.
"""

from torch import Tensor, nn
from torch.nn.functional import linear

from workers.model.patches import replace_forward


def use_linear_patch_embedding(model: nn.Module) -> None:
    """Lets convolutions that may meet one patch at a time be computed as products, in place; weights stay where they are."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.stride == module.kernel_size and module.groups == 1:
            replace_forward(module, PatchProduct(module))


class PatchProduct:
    """The forward function of a convolution, faster where the input is as large as its kernel.

    >>> import torch
    >>> convolution, patches = nn.Conv3d(1, 2, (1, 2, 2)), torch.arange(12.0).view(3, 1, 1, 2, 2)
    >>> torch.allclose(PatchProduct(convolution)(patches), convolution(patches))
    True
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        self.convolution = convolution

    def __call__(self, input: Tensor) -> Tensor:
        """``(patches, C, time, height, width)`` to ``(patches, out, 1, 1, 1)``, as the convolution gives it."""
        own = self.convolution
        if tuple(input.shape[2:]) != own.kernel_size or own.padding not in ("valid", (0, 0, 0)):
            return type(own).forward(own, input)
        return linear(input.flatten(1), own.weight.flatten(1), own.bias)[..., None, None, None]
