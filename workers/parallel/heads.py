"""How attention heads are dealt out to the ranks of tensor and Ulysses sequence parallelism."""

from math import gcd

from dataproto.errors import InvalidConfig


def check_heads(heads: int, sp: int, tp: int) -> None:
    """Raises `InvalidConfig` unless every rank of sp x tp gets as many of the query heads."""
    if heads % (sp * tp):
        fitting = [degree for degree in range(1, heads + 1) if heads % degree == 0]
        raise InvalidConfig(
            f"layout.sp={sp} x layout.tp={tp} = {sp * tp} must divide the {heads} query heads of this model: use one of {fitting}"
        )


def key_value_repeats(heads: int, key_value_heads: int, ranks: int) -> int:
    """How often each key-value head must stand in a row, so that equal parts of the row serve equal parts of the query heads.

    1 where the key-value heads divide over the ranks by themselves.

    >>> key_value_repeats(28, 4, 2), key_value_repeats(16, 2, 8), key_value_repeats(28, 4, 7)
    (1, 4, 7)
    """
    group = heads // key_value_heads
    return group // gcd(group, heads // ranks)


def key_value_share(heads: int, key_value_heads: int, ranks: int, rank: int) -> list[int]:
    """The key-value heads that one rank's query heads use, each as often as `key_value_repeats` makes it stand there.

    >>> [key_value_share(16, 2, 4, rank) for rank in range(4)], key_value_share(6, 3, 2, 1)
    ([[0], [0], [1], [1]], [1, 2, 2])
    """
    repeats = key_value_repeats(heads, key_value_heads, ranks)
    share = key_value_heads * repeats // ranks
    return [place // repeats for place in range(rank * share, (rank + 1) * share)]
