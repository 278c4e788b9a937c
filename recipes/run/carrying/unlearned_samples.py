"""The samples of a run that it has not learned from: those that wait, have begun, or have finished before their group.

They are part of a checkpoint. Groups are in the order of the data.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidRow, RowCountMismatch
from dataproto.packing import equally_wide
from rollout.carried_samples import BEGUN
from rollout.responses import OCCURRENCE, number_occurrences
from workers.roles.carried_groups import DEALT, FAILED, FINISHED, GROUPS, engine_error


@dataclass
class CarriedSamples:
    """The samples that a run has not learned from: they wait, have begun, or have finished before their group."""

    unfinished: DataProto | None = (
        None  # a row for each sample: its prompt's columns, `OCCURRENCE`, `BEGUN` and `DEALT`
    )
    finished: DataProto | None = None  # rollout rows, with `OCCURRENCE`
    since: dict[str, int] = field(default_factory=dict)
    """The number of the weights that each group began with, 0 for one that waits, by uid in the order of the data."""
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the rows being decoded

    def add(self, prompts: DataProto, n: int) -> None:
        """Adds ``n`` samples of each prompt, which wait.

        Raises:
            InvalidRow: a prompt has the uid of another group.
        """
        for row, uid in enumerate(uids := [str(uid) for uid in prompts["uid"]]):
            if uid in self.since or uid in uids[:row]:
                raise InvalidRow(
                    row, f"uid {uid} is that of another prompt, whose samples go on: each prompt needs a uid of its own"
                )
        samples = number_occurrences(prompts.repeat(n, interleave=True))
        samples[BEGUN] = object_array([[] for _ in range(len(samples))])
        samples[DEALT] = np.full(len(samples), -1)
        self.unfinished = samples if self.unfinished is None else _joined([self.unfinished, samples])
        self.since |= dict.fromkeys(uids, 0)

    @property
    def whole(self) -> list[str]:
        """The uids of the groups whose samples have all finished, oldest first."""
        unfinished = set() if self.unfinished is None else set(map(str, self.unfinished["uid"]))
        return [uid for uid in self.since if uid not in unfinished]

    def due(self, before: int, later: int = 0) -> list[str]:
        """The uids of unfinished groups that began with weights ``before`` or earlier ones, without the last ``later``."""
        whole = set(self.whole)
        unfinished = [uid for uid, since in self.since.items() if 0 < since <= before and uid not in whole]
        return unfinished[: max(len(unfinished) - later, 0)]

    def begin(self, groups: int, weight_version: int) -> DataProto:
        """The unfinished samples of the first ``groups`` groups, which are decoded from now on."""
        assert self.unfinished is not None
        chosen = list(self.since)[:groups]
        self.since |= {uid: self.since[uid] or weight_version for uid in chosen}
        self.places = np.flatnonzero(np.isin(self.unfinished["uid"].astype(str), chosen))
        return self.unfinished[self.places]

    def update(self, found: DataProto) -> DataProtoError | None:
        """Takes what became of the samples of `begin`. Returns the error of the engine, if it failed at one of them."""
        assert self.unfinished is not None
        done = found[FINISHED].numpy()
        occurrences = self.unfinished[OCCURRENCE][self.places]
        errors = [
            engine_error(found[FAILED][place], self._name_of(self.places[place]))
            for place in range(len(found))
            if found[FAILED][place] is not None
        ]
        for name in (BEGUN, DEALT):
            column = self.unfinished[name].copy()
            column[self.places] = found[name]
            self.unfinished[name] = column
        rows = found[np.flatnonzero(done)]
        rows.pop([FINISHED], [BEGUN, DEALT, FAILED])
        rows.meta_info.pop(GROUPS, None)
        rows[OCCURRENCE] = occurrences[done]
        if len(rows):
            self.finished = rows if self.finished is None else DataProto.concat([self.finished, rows])
        left = np.setdiff1d(np.arange(len(self.unfinished)), self.places[done])
        self.unfinished = self.unfinished[left] if len(left) else None
        self.places = self.places[:0]
        return errors[0] if errors else None

    def _name_of(self, place: int) -> str:
        """An unfinished sample, for messages."""
        assert self.unfinished is not None
        row, number = f"uid {self.unfinished['uid'][place]}", int(self.unfinished[OCCURRENCE][place])
        if "index" in self.unfinished:
            row = f"row {self.unfinished['index'][place]} ({row})"
        return f"{row}, sample {number}"

    def take(self, groups: int) -> DataProto:
        """Removes the oldest whole groups and returns their rows, in order of groups and samples.

        Raises:
            RowCountMismatch: so many are not whole.
        """
        if len(self.whole) < groups or self.finished is None:
            raise RowCountMismatch(
                f"{len(self.whole)} groups are whole, but a step takes {groups}: a rollout worker has ended too early"
            )
        chosen = {uid: place for place, uid in enumerate(self.whole[:groups])}
        number = np.array([chosen.get(str(uid), -1) for uid in self.finished["uid"]])
        taken = np.flatnonzero(number >= 0)
        data = self.finished[taken[np.lexsort((self.finished[OCCURRENCE][taken], number[taken]))]]
        left = np.flatnonzero(number < 0)
        self.finished = self.finished[left] if len(left) else None
        self.since = {uid: since for uid, since in self.since.items() if uid not in chosen}
        data.pop(non_tensor_batch_keys=[OCCURRENCE])
        return data

    def state_dict(self) -> dict[str, Any]:
        return {
            "unfinished": None if self.unfinished is None else _file_bytes(self.unfinished),
            "finished": None if self.finished is None else _file_bytes(self.finished),
            "since": dict(self.since),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = {name: state[name] for name in ("unfinished", "finished")}
        self.unfinished, self.finished = (None if each is None else _from_file_bytes(each) for each in rows.values())
        self.since = dict(state["since"])


def _joined(parts: Sequence[DataProto]) -> DataProto:
    """Rows of prompts, padded to the widest. A mask of no response tokens tells where they end."""
    marked = [part[:] for part in parts]
    for part in marked:
        part["response_mask"] = torch.zeros(len(part), 0, dtype=torch.int64)
    joined = DataProto.concat(equally_wide(marked))
    joined.pop(["response_mask"])
    return joined


def _file_bytes(data: DataProto) -> Tensor:
    """The bytes ``(N,)`` uint8 of a batch's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        data.save_to_disk(path)
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8))


def _from_file_bytes(content: Tensor) -> DataProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        content.numpy().tofile(path)
        return DataProto.load_from_disk(path).writable()
