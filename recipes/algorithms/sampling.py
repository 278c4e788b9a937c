"""DAPO's two ways with samples (arXiv:2503.14476): groups that teach nothing, and responses that are too long.

Dimension letters: B rows, R response tokens.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from torch import Tensor

from dataproto.errors import InvalidConfig, RowCountMismatch


def informative_rows(scores: Sequence[float], uid: Sequence[Hashable]) -> np.ndarray:
    """Rows whose group holds different scores: what dynamic sampling keeps (section 3.2, eq. 11).

    Args:
        scores: B numbers; in the paper 1 for a right answer and 0 for a wrong one.
        uid: B hashables, equal for the samples of one prompt.

    Returns:
        (B,) bool.

    Raises:
        RowCountMismatch: the two differ in length.

    >>> informative_rows([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]).tolist()
    [False, False, True, True]
    """
    if len(scores) != len(uid):
        raise RowCountMismatch(f"{len(scores)} scores, {len(uid)} uids")
    found: dict[Hashable, set[float]] = defaultdict(set)
    for name, score in zip(uid, scores, strict=True):
        found[name].add(float(score))
    return np.array([len(found[name]) > 1 for name in uid], dtype=bool)


def overlong_penalty(response_mask: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment of a response that comes near the maximal length (section 3.4, eq. 13).

    With n the row's sampled tokens: 0 up to ``max_length - buffer``, then falling linearly to -1 at ``max_length``.

    Args:
        response_mask: (B, R) of any dtype, not zero where the policy sampled the token.
        max_length: the length at which responses are cut.
        buffer: how many tokens before it the punishment begins.

    Returns:
        (B,) float32 from -1 to 0.

    Raises:
        InvalidConfig: a buffer that is not between 1 and ``max_length``.

    >>> import torch
    >>> overlong_penalty(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]), max_length=4, buffer=2)
    tensor([ 0.0000, -0.5000, -1.0000])
    """
    if not 1 <= buffer <= max_length:
        raise InvalidConfig(
            f"the overlong buffer of {buffer} tokens must be between 1 and the maximal length {max_length}"
        )
    excess = (response_mask != 0).sum(-1) - (max_length - buffer)
    return 0.0 - (excess / buffer).clamp(0.0, 1.0).float()
