"""Problems by their running success: those that are sometimes solved come more often than those that always or never are."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from dataproto import DataProto
from dataproto.errors import CheckpointError
from recipes.data.loader import Draw

FLOOR = 0.02
"""The weight that every problem has in addition to p (1 - p), which is at most 0.25."""
RATE = 0.5
"""The share of the newest group in the running success of its problem."""
UNSEEN = 0.5
"""What stands for the running success of a problem before its first group, which replaces it."""


class Curriculum(Subset[Any]):
    """Rows that a `recipes.data.loader.PromptLoader` draws at random with the weights p (1 - p) + `FLOOR`.

    p is the running success of a row: `observe` adds that of a group, with the weight `RATE`. A draw depends on the seed, its
    number and all that was observed before it, so a resumed run with the state of this object continues exactly.

    >>> rows = Curriculum(["a", "b"])
    >>> rows.observe(DataProto.from_dict(non_tensors={"uid": ["0-1.7-5f"] * 2, "score": [1.0, 1.0]}))
    {'curriculum/success': 1.0, 'curriculum/seen': 0.5}
    >>> rows.success.tolist()
    [0.5, 1.0]
    >>> places = [place for _, (_, place, _) in zip(range(1000), rows.draws(seed=0, shuffle=True, start=0))]
    >>> 0.04 < places.count(1) / 1000 < 0.1  # 0.02 / (0.02 + 0.27)
    True
    """

    def __init__(self, rows: Any) -> None:
        """``rows`` have a length. Nothing is observed yet."""
        super().__init__(rows, range(len(rows)))
        self.forget()

    def forget(self) -> None:
        """Forgets all that was observed."""
        self.success = np.full(len(self), UNSEEN)
        self.seen = np.zeros(len(self), dtype=bool)
        self._bounds: np.ndarray | None = None

    def draws(self, seed: int, shuffle: bool, start: int) -> Iterator[Draw]:
        """The draws from draw ``start`` on, each with what is observed when it is asked for; see `recipes.data.loader.Draw`."""
        number = start
        while True:
            if self._bounds is None:
                self._bounds = np.cumsum(self.success * (1 - self.success) + FLOOR)
            at = np.random.default_rng([seed, number]).random() * self._bounds[-1]
            place = min(int(np.searchsorted(self._bounds, at, side="right")), len(self) - 1)
            yield f"{number // len(self)}-{place}.{number}", place, None
            number += 1

    def observe(self, data: DataProto) -> dict[str, float]:
        """Adds the success of each group of rollouts: the mean of ``acc`` or else of ``score``, from 0 to 1. Returns metrics."""
        values = data["acc"] if "acc" in data else data["score"]
        groups: dict[str, list[float]] = {}
        for uid, value, score in zip(data["uid"], values, data["score"], strict=True):
            groups.setdefault(str(uid), []).append(float(score if value is None else value))
        for uid, found in groups.items():
            place = int(uid.split("-")[-2].partition(".")[0])
            rate = RATE if self.seen[place] else 1.0
            self.success[place] += rate * (float(np.clip(np.mean(found), 0.0, 1.0)) - self.success[place])
            self.seen[place] = True
        self._bounds = None
        known = self.success[self.seen]
        return {"curriculum/success": float(known.mean()), "curriculum/seen": float(self.seen.mean())}

    def state_dict(self) -> dict[str, Any]:
        """What was observed."""
        return {"success": torch.from_numpy(self.success.copy()), "seen": torch.from_numpy(self.seen.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Raises `CheckpointError` if it is of other rows, or of a run without a curriculum."""
        if len(state.get("success", ())) != len(self):
            raise CheckpointError(
                f"the checkpoint has the running success of {len(state.get('success', ()))} problems, not of {len(self)}"
            )
        self.forget()
        self.success, self.seen = state["success"].numpy().copy(), state["seen"].numpy().copy()
