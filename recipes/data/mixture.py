"""A mixture of several data sets by weight."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dataproto.errors import InvalidConfig
from recipes.data.loader import Draw, draws, may_recur

BLOCK = 4096  # draws whose sources are chosen together


class Mixture:
    """Rows of several sources; each draw takes the next row of a source that is chosen at random by weight.

    The order of rows within a source does not depend on the other sources. A draw depends only on (seed, number of the draw).

    >>> rows = Mixture([["a", "b"], ["c"]], weights=[1, 3])
    >>> places = [place for _, (_, place, _) in zip(range(1000), rows.draws(seed=0, shuffle=True, start=0))]
    >>> 0.7 < places.count(2) / 1000 < 0.8, abs(places.count(0) - places.count(1)) <= 1
    (True, True)
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]) -> None:
        """Creates a mixture of sequences of rows, or of objects with a method ``draws`` (see `recipes.data.loader.draws`).

        Raises:
            InvalidConfig: the numbers of sources and weights differ, or a weight is not above 0.
        """
        if not sources or len(sources) != len(weights):
            raise InvalidConfig(f"{len(sources)} data sets, but {len(weights)} weights")
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise InvalidConfig(f"weights={list(weights)}: each must be above 0")
        self.sources = list(sources)
        self.weights = [float(weight) for weight in weights]
        self.shares = np.asarray(self.weights) / sum(self.weights)
        sizes = [len(source) if hasattr(source, "__len__") else 2**40 for source in self.sources]
        self.starts = [0, *accumulate(sizes)][:-1]

    @property
    def recurring(self) -> bool:
        """Whether images of a source may come back."""
        return any(map(may_recur, self.sources))

    def __getitem__(self, place: int) -> Any:
        number = self._source(place)
        return self.sources[number][place - self.starts[number]]

    def read_row(self, raw: Any, place: int) -> Any:
        """Converts a raw row of a source without places."""
        number = self._source(place)
        return self.sources[number].read_row(raw, place - self.starts[number])

    def draws(self, seed: int, shuffle: bool, start: int) -> Iterator[Draw]:
        """The draws from draw ``start`` on; see `recipes.data.loader.Draw`."""
        block, skipped = divmod(start, BLOCK)
        before = np.zeros(len(self.sources), dtype=np.int64)
        for done in range(block):
            before += np.bincount(self._choices(seed, done), minlength=len(self.sources))
        before += np.bincount(self._choices(seed, block)[:skipped], minlength=len(self.sources))
        streams = [
            draws(source, seed + number, shuffle, int(before[number])) for number, source in enumerate(self.sources)
        ]
        while True:
            for number in self._choices(seed, block)[skipped:].tolist():
                uid, place, raw = next(streams[number])
                yield f"{number}-{uid}", self.starts[number] + place, raw
            block, skipped = block + 1, 0

    def _choices(self, seed: int, block: int) -> np.ndarray:
        return np.random.default_rng([seed, block]).choice(len(self.sources), size=BLOCK, p=self.shares)

    def _source(self, place: int) -> int:
        return int(np.searchsorted(self.starts, place, side="right")) - 1
