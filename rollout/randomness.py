"""Random streams that belong to samples: a sample draws the same numbers on any rank, in any batch, beside any neighbours."""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a sample, such as (seed, uid, sample number).

    >>> derive_seed(0, "1-7", 3) == derive_seed(0, "1-7", 3)
    True
    >>> derive_seed(0, "1-7", 3) == derive_seed(0, "1-7", 4)
    False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seeds: np.ndarray, step: int | np.ndarray) -> np.ndarray:
    """Number ``step`` (one for all, or ``(B,)``) of each stream: ``(B,)`` float64 in [0, 1).

    SplitMix64 (Steele et al. 2014) in counter mode.

    >>> draws = uniforms(np.array([1, 2], dtype=np.uint64), step=0)
    >>> bool(((draws >= 0) & (draws < 1)).all()), bool(draws[0] != draws[1])
    (True, True)
    """
    with np.errstate(over="ignore"):
        z = _mix(seeds.astype(np.uint64)) + (np.asarray(step, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
