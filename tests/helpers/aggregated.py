"""The loss of rows, as an update computes it."""

from torch import Tensor

from workers.training.loss_sums import token_weights, weighted_sum


def aggregate(
    loss: Tensor, mask: Tensor, mode: str, total: Tensor | float | None = None, max_length: int | None = None
) -> Tensor:
    """The share that these rows have in the loss of a mini-batch with ``total``, by default that of these rows only."""
    return weighted_sum(loss, token_weights(mask, mode, total, max_length))
