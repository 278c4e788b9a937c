"""Snapshots that clients sample from. The weights of few are in memory: those of the others are read from their files again."""

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch

from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig
from dataproto_server.engine.base_model import BaseModel
from dataproto_server.engine.engine_options import EngineOptions
from rollout.adapters import Adapter, read_adapter
from rollout.adapters.adapter_files import WEIGHTS_FILE

MOST_CHECKPOINTS = 2  # in memory
CHECKPOINT_FILE = "config.json"
"""In a directory with all weights of a model; one with an adapter has none."""


@dataclass(frozen=True)
class Written:
    """The adapter of a model as it was written to a file, for a sampler to come."""

    model_id: str
    file: tuple[int, ...]  # its `identity`


@dataclass(frozen=True)
class Sampler:
    """A snapshot that a client samples from; without a directory the base model."""

    base_model: str
    directory: Path | None
    is_checkpoint: bool  # all weights of a model, not an adapter


class Samplers:
    """Snapshots by their ids: adapters of base models, and checkpoints, of which two are in memory at most."""

    def __init__(
        self, options: EngineOptions, device: torch.device | None, base_of: Callable[[str], BaseModel]
    ) -> None:
        """``base_of``: the base model of a name; raises `InvalidConfig`."""
        self.options, self.device, self.base_of = options, device, base_of
        self._samplers: dict[str, Sampler] = {}
        self._adapters: OrderedDict[str | Written, Adapter] = OrderedDict()  # last used or written last
        self._checkpoints: OrderedDict[str, BaseModel] = OrderedDict()  # last used last
        self._news: SimpleQueue[tuple[Written, Adapter]] = SimpleQueue()  # of threads that write files

    def writing(self, model_id: str, snapshot: Adapter) -> Callable[[Path], None]:
        """Keeps a snapshot that a model writes. A sampler that is opened on these files, also under another name, takes the
        weights from memory.

        They count among those of ``max_samplers``, and replace those that the model wrote before.

        Returns:
            what is called with the directory when the files are written, from any thread.
        """
        self.forget_written(model_id)
        return lambda directory: self._news.put((Written(model_id, identity(directory / WEIGHTS_FILE)), snapshot))

    def _take_written(self) -> None:
        while not self._news.empty():
            self._add(*self._news.get())

    def forget_written(self, model_id: str) -> None:
        """Drops the weights that a model has written and no sampler has taken."""
        self._take_written()
        for key in [each for each in self._adapters if isinstance(each, Written) and each.model_id == model_id]:
            del self._adapters[key]

    def _add(self, key: str | Written, adapter: Adapter) -> None:
        self._adapters[key] = adapter
        while len(self._adapters) > self.options.max_samplers:
            self._adapters.popitem(last=False)

    def open(self, sampler_id: str, base_model: str, directory: Path | None) -> None:
        """Takes a snapshot in, or the base model. An adapter is read at once, and a checkpoint when it is first used.

        Raises:
            InvalidConfig: there is a snapshot of this id.
            CheckpointError: the adapter cannot be read.
        """
        if sampler_id in self._samplers:
            raise InvalidConfig(f"sampler {sampler_id!r} exists already")
        is_checkpoint = directory is not None and (directory / CHECKPOINT_FILE).exists()
        self._samplers[sampler_id] = Sampler(base_model, directory, is_checkpoint)
        if not is_checkpoint:
            try:
                self.weights(sampler_id, ())
            except BaseException:
                del self._samplers[sampler_id]
                raise

    def close(self, sampler_id: str) -> None:
        """Forgets a snapshot; an unknown one is no error."""
        self._samplers.pop(sampler_id, None)
        self._adapters.pop(sampler_id, None)
        if sampler_id in self._checkpoints:
            self._drop(sampler_id)

    def is_checkpoint(self, sampler_id: str) -> bool:
        """Whether a snapshot has all weights of a model; ``False`` for an unknown one."""
        return sampler_id in self._samplers and self._samplers[sampler_id].is_checkpoint

    def weights(self, sampler_id: str, busy: Collection[BaseModel]) -> tuple[BaseModel, Adapter | None] | None:
        """The model and the adapter of a snapshot, from memory or from its files.

        Args:
            busy: models that stay in memory.

        Returns:
            ``None`` for a checkpoint that has no room as long as these stay.

        Raises:
            InvalidConfig: the snapshot or its base model is unknown.
            CheckpointError: the files cannot be read.
        """
        if sampler_id not in self._samplers:
            raise InvalidConfig(f"sampler {sampler_id!r} is unknown")
        sampler = self._samplers[sampler_id]
        if sampler.is_checkpoint:
            model = self._checkpoint(sampler_id, sampler, busy)
            return None if model is None else (model, None)
        base = self.base_of(sampler.base_model)
        return base, None if sampler.directory is None else self._adapter(sampler_id, sampler.directory, base)

    def _adapter(self, sampler_id: str, directory: Path, base: BaseModel) -> Adapter:
        if sampler_id not in self._adapters:
            self._add(sampler_id, self._read(directory, base))
        self._adapters.move_to_end(sampler_id)
        return self._adapters[sampler_id]

    def _read(self, directory: Path, base: BaseModel) -> Adapter:
        self._take_written()
        file, trainer = directory / WEIGHTS_FILE, base.trainer
        found = identity(file) if file.exists() else None
        for key in self._adapters:
            if isinstance(key, Written) and key.file == found:
                return replace(self._adapters.pop(key), directory=directory)
        return read_adapter(directory, trainer.model, trainer.family, trainer.device)

    def _checkpoint(self, sampler_id: str, sampler: Sampler, busy: Collection[BaseModel]) -> BaseModel | None:
        if sampler_id not in self._checkpoints:
            idle = [each for each, model in self._checkpoints.items() if model not in busy]
            if len(self._checkpoints) >= MOST_CHECKPOINTS:
                if not idle:
                    return None
                self._drop(idle[0])
            try:
                self._checkpoints[sampler_id] = BaseModel(str(sampler.directory), self.options, self.device)
            except (DataProtoError, OSError) as error:
                raise CheckpointError(f"sampler {sampler_id!r} cannot be read: {error}") from error
        self._checkpoints.move_to_end(sampler_id)
        return self._checkpoints[sampler_id]

    def _drop(self, sampler_id: str) -> None:
        """Frees the weights of a checkpoint now: parts of a model refer to each other."""
        del self._checkpoints[sampler_id]
        gc.collect()


def identity(file: Path) -> tuple[int, ...]:
    """What stays the same when a file is moved or linked, and not when it is written."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
