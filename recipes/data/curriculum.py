"""Problems by their running success: those that are sometimes solved come more often than those that always or never are."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from dataproto import DataProto
from dataproto.errors import CheckpointError
from dataproto.grouping import grouped_by
from recipes.data.loader import Draw

FLOOR = 0.1
"""The share of the draws that all problems have alike, however few of them are within reach."""
RATE = 0.5
"""The share of the newest group in the running success of its problem."""


class Curriculum(Subset[Any]):
    """Rows that a `recipes.data.loader.PromptLoader` draws at random with the weights p (1 - p), and a share `FLOOR` evenly.

    p is the running success of a row: `observe` adds that of a group, with the weight `RATE`. A row without a group has the mean
    weight of those with one. Between two calls of `observe` no row comes twice before all have come. A draw depends on the seed,
    its number and all that was observed before, so a run that is resumed with the state of this object continues exactly.

    >>> rows = Curriculum(["a", "b", "c"])
    >>> rows.observe(DataProto.from_dict(non_tensors={"uid": ["0-1.7-5f"] * 2, "score": [1.0, 0.0]}))
    {'curriculum/success': 0.5, 'curriculum/seen': 0.3333333333333333}
    >>> rows.observe(DataProto.from_dict(non_tensors={"uid": ["0-2.8-5f"], "score": [1.0]}))
    {'curriculum/success': 0.75, 'curriculum/seen': 0.6666666666666666}
    >>> rows.chances().round(2).tolist()  # of the weights 0.125, 0.25 and 0, and a third of 0.1
    [0.33, 0.63, 0.03]
    >>> sorted(place for _, (_, place, _) in zip(range(3), rows.draws(seed=0, shuffle=True, start=0)))
    [0, 1, 2]
    """

    def __init__(self, rows: Any) -> None:
        """``rows`` have a length. Nothing is observed yet."""
        super().__init__(rows, range(len(rows)))
        self._told = False
        self.forget()

    def forget(self) -> None:
        """Forgets all that was observed."""
        self.success = np.zeros(len(self))
        self.seen = np.zeros(len(self), dtype=bool)
        self._start_step()

    def _start_step(self) -> None:
        self._bounds = np.cumsum(self.chances())
        self._taken: set[int] = set()

    def chances(self) -> np.ndarray:
        """The probability of each row ``(N,)`` in the next draw, where none has been taken."""
        weights, even = self.success * (1 - self.success), np.ones(len(self)) / len(self)
        weights[~self.seen] = weights[self.seen].mean() if self.seen.any() else 0.0
        return (1 - FLOOR) * weights / weights.sum() + FLOOR * even if weights.any() else even

    def draws(self, seed: int, shuffle: bool, start: int) -> Iterator[Draw]:
        """The draws from draw ``start`` on, each with what is observed when it is asked for; see `recipes.data.loader.Draw`."""
        for number in count(start):
            if len(self._taken) == len(self):
                self._taken.clear()
            random = np.random.default_rng([seed, number])
            place = self._place(random)
            while place in self._taken:
                place = self._place(random)
            self._taken.add(place)
            yield f"{number // len(self)}-{place}.{number}", place, None

    def _place(self, random: np.random.Generator) -> int:
        at = random.random() * self._bounds[-1]
        return min(int(np.searchsorted(self._bounds, at, side="right")), len(self) - 1)

    def observe(self, data: DataProto) -> dict[str, float]:
        """Adds the success of each group of rollouts: the mean of ``acc`` or else of ``score``, from 0 to 1. Returns metrics."""
        values = verdicts(data)
        self._tell_other_scale(values)
        for uid, rows in grouped_by(range(len(data)), lambda row: str(data["uid"][row])).items():
            place = int(uid.split("-")[-2].partition(".")[0])
            rate = RATE if self.seen[place] else 1.0
            success = float(np.clip(np.mean([values[row] for row in rows]), 0.0, 1.0))
            self.success[place] += rate * (success - self.success[place])
            self.seen[place] = True
        self._start_step()
        known = self.success[self.seen]
        return {"curriculum/success": float(known.mean()), "curriculum/seen": float(self.seen.mean())}

    def _tell_other_scale(self, values: Iterable[float]) -> None:
        """Warns once of a success outside [0, 1], as the scores of a reward model are."""
        other = next((value for value in values if not 0 <= value <= 1), None)
        if other is not None and not self._told:
            self._told = True
            print(
                f"warning: curriculum: a success of {other:.3g} counts as {int(other > 0)}, so it may look as if no problem were "
                "sometimes solved: let the reward return acc, or scores from 0 to 1"
            )

    def state_dict(self) -> dict[str, Any]:
        """What was observed."""
        return {"success": torch.from_numpy(self.success.copy()), "seen": torch.from_numpy(self.seen.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Raises `CheckpointError` if it is of other rows, or of a run without a curriculum."""
        if (known := len(state.get("success", ()))) != len(self):
            raise CheckpointError(f"the checkpoint has the running success of {known} problems, not of {len(self)}")
        self.success, self.seen = state["success"].numpy().copy(), state["seen"].numpy().copy()
        self._start_step()


def verdicts(data: DataProto) -> list[float]:
    """How good each sample is: ``acc`` where the reward gives one, else ``score``.

    In a group of wrong answers a score that includes the format may differ; ``acc`` does not.
    """
    right = data["acc"] if "acc" in data else [None] * len(data)
    return [float(score if acc is None else acc) for acc, score in zip(right, data["score"], strict=True)]
