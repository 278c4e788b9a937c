"""Several tokens of a row in one forward pass: drafted tokens are kept as far as they are those that the row draws."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataproto.transfer import move
from dataproto.vlm import VLMFamily
from rollout.drafts import Drafts
from rollout.hf.batch import Batch
from rollout.hf.requests import OpenRequest


class Speculation(Drafts):
    """Drafts for the rows of an engine. Letters: W rows, K longest draft."""

    def __init__(self, most: int, banned_ids: Sequence[int], device: torch.device) -> None:
        """``most`` tokens are drafted for a row at a time."""
        super().__init__(banned_ids, device)
        self.most = most

    def open_row(self, row: OpenRequest) -> None:
        """Adds a request. Those of one ``uid``, or without one those of one prompt, learn from each other."""
        ids, row.drafts = row.request.input_ids, [0, 0]
        self.open(row.number, row.request.uid or id(ids), ids)

    def drafts(self, batch: Batch, predicted: Callable[[int], Tensor] | None) -> list[list[int]]:
        """A draft for each row, perhaps empty, that does not go beyond its ``max_tokens``.

        Rows whose last tokens are new take what the head of the model has ``predicted``, a function of the number K of tokens
        that gives the drafts ``(W, K)`` of all rows.
        """
        found: list[list[int]] = [[] for _ in batch.rows]
        new: list[tuple[int, int]] = []  # row, tokens that it may take
        running = np.flatnonzero(batch.running).tolist()
        for place in running if self.pay(len(running)) else []:
            row = batch.rows[place]
            left = min(self.most, row.sampling.max_tokens - len(row.token_ids))
            found[place] = self.next_tokens(row.number, left)
            if not found[place]:
                new.append((place, left))
        if new and predicted is not None:
            tokens = predicted(max(left for _, left in new)).tolist()
            for place, left in new:
                found[place] = tokens[place][:left]
        for place, draft in enumerate(found):
            batch.rows[place].drafts[0] += len(draft)
        return found


class KeptStates:
    """The states of recurrent layers after each token of a pass over drafts, so that rows go back to the last token they keep.

    In such a pass these layers read one token after another, by the function that reads single tokens without drafts.
    """

    def __init__(self, model: Any, family: VLMFamily) -> None:
        self._states: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer; (W, ...) after each token
        self._records = False
        for mixer in family.recurrent_modules(model).values():
            mixer.forward = partial(self._read, mixer.forward, mixer.layer_idx)

    @contextmanager
    def record(self) -> Iterator[None]:
        """A context in which the model reads a sampled token of each row and the drafts after it."""
        self._states, self._records = {}, True
        try:
            yield
        finally:
            self._records = False

    def _read(self, read: Callable[..., Tensor], layer: int, hidden_states: Tensor, **options: Any) -> Tensor:
        """The outputs ``(W, L, H)`` of a recurrent layer."""
        if not self._records:
            return read(hidden_states=hidden_states, **options)
        cached = (options.get("cache") or options.get("cache_params")).layers[layer]  # type: ignore[union-attr]
        states, found = self._states.setdefault(layer, []), []
        for token in hidden_states.split(1, dim=1):
            found.append(read(hidden_states=token, **options | {"attention_mask": None}))
            states.append((cached.conv_states[0].clone(), cached.recurrent_states[0].clone()))
        return torch.cat(found, dim=1)

    def go_back(self, batch: Batch, rows: Tensor, ahead: Tensor) -> None:
        """Puts the ``rows (N,)`` into the states after their sampled token and ``ahead (N,)`` drafted ones."""
        for layer, states in self._states.items():
            cached = batch.layers[layer]
            for now, after in zip((cached.conv_states[0], cached.recurrent_states[0]), zip(*states), strict=True):
                now[rows] = torch.stack(after)[ahead, rows]


class DraftPlaces(NamedTuple):
    """The places of all drafted tokens of a batch, row after row."""

    rows: np.ndarray  # (N,) row of each drafted token
    ahead: np.ndarray  # (N,) number of drafted tokens before it in its row
    tokens: np.ndarray  # (N,) the drafted tokens

    @classmethod
    def of(cls, drafts: Sequence[Sequence[int]]) -> "DraftPlaces":
        """
        >>> DraftPlaces.of([[5, 6], [], [7]]).rows.tolist(), DraftPlaces.of([[5, 6], [], [7]]).ahead.tolist()
        ([0, 0, 2], [0, 1, 0])
        """
        rows = [row for row, draft in enumerate(drafts) for _ in draft]
        ahead = [place for draft in drafts for place in range(len(draft))]
        tokens = [token for draft in drafts for token in draft]
        return cls(*(np.array(each, dtype=np.int64) for each in (rows, ahead, tokens)))


def padded_drafts(first: Tensor, drafts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids ``(W, 1 + K)``, of each row its ``first (W,)`` token and its draft, and a mask of those that are no padding.

    >>> padded_drafts(torch.tensor([1, 2]), [[5, 6], []])[0].tolist()
    [[1, 5, 6], [2, 0, 0]]
    """
    longest = max(map(len, drafts))
    ids = torch.tensor([[*draft, *[0] * (longest - len(draft))] for draft in drafts], dtype=torch.int64)
    lengths = torch.tensor([1 + len(draft) for draft in drafts])
    filled = torch.arange(1 + longest) < lengths[:, None]
    return torch.cat([first[:, None], move(ids, first.device)], dim=1), move(filled, first.device)


def matching(places: DraftPlaces, drawn: np.ndarray, rows: int) -> np.ndarray:
    """For each of the ``rows`` how many drafted tokens are equal to the ``drawn (N,)`` ones before the first that is not.

    >>> matching(DraftPlaces.of([[5, 6, 7], [8], []]), np.array([5, 9, 7, 8]), 3).tolist()
    [1, 1, 0]
    """
    counts = np.zeros(rows, dtype=np.int64)
    for row, ahead, equal in zip(places.rows, places.ahead, places.tokens == drawn):
        if equal and counts[row] == ahead:
            counts[row] += 1
    return counts
