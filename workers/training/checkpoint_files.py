"""torch's distributed checkpoint, read without running code from its files.

torch's reader unpickles the table of contents and the values that are not tensors. Here only plain values and the classes that
such a table consists of are accepted.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import EnumMeta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup, checkpoint
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map

from dataproto.errors import WAY_OUT, CheckpointError
from dataproto.planning import split_by_size

FILE_BYTES = 1 << 30
"""Of a file of a training state."""


def write_state(state: dict[str, Any], directory: Path, group: ProcessGroup | None = None) -> None:
    """Writes ``state``, sharded tensors and plain values; every rank writes its own part.

    Args:
        group: the ranks' process group, the default one if ``None``.

    Raises:
        CheckpointError: a rank could not write; every rank raises it, and names that rank.
    """
    try:
        with alone_without_warning():
            checkpoint.save(
                state,
                storage_writer=FileByFile(directory),
                process_group=group,
                no_dist=not distributed.is_initialized(),
            )
    except checkpoint.CheckpointException as error:  # not a subclass of `Exception` in torch
        _raise_interrupt(error)
        causes = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{directory} could not be written: {'; '.join(causes)}{WAY_OUT}") from error


def _raise_interrupt(error: checkpoint.CheckpointException) -> None:
    """Raises the `KeyboardInterrupt` of a rank, which torch collects as if a file had failed."""
    for cause, _ in error.failures.values():
        if isinstance(cause, KeyboardInterrupt):
            raise cause from error


def write_state_behind(state: dict[str, Any], directory: Path) -> "Future[None]":
    """As `write_state`, of a copy of ``state``, in the background; see `run_behind`."""
    copy = tree_map(
        lambda value: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value, state
    )
    return run_behind(lambda group: write_state(copy, directory, group))


def run_behind(write: Callable[[ProcessGroup | None], None]) -> "Future[None]":
    """Calls ``write`` in the background with a process group of all ranks, ``None`` if there is none. Every rank calls it.

    Calls follow one another in their order: two at a time would mix up their collectives on that group if a rank is slower than
    the others.
    """
    return _BEHIND.submit(write, _group_behind() if distributed.is_initialized() else None)


_BEHIND = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")  # one: see `run_behind`


@cache
def _group_behind() -> ProcessGroup:
    """A separate process group: meanwhile the ranks use the default one for other calls."""
    group: ProcessGroup = distributed.new_group(backend="gloo")
    return group


def read_state(state: dict[str, Any], directory: Path) -> None:
    """Fills ``state`` from a checkpoint of any number of ranks; its tensors may be sharded in another way.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, hostile, or of another model.
    """
    with _reading(directory), alone_without_warning():
        checkpoint.load(
            state,
            storage_reader=PlainReader(directory),
            planner=PlainPlanner(),
            no_dist=not distributed.is_initialized(),
        )


def stored_names(directory: Path) -> frozenset[str]:
    """Names of the values in a checkpoint; keys of nested dictionaries are joined by dots.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or hostile.
    """
    with _reading(directory):
        return frozenset(_read_contents(directory).state_dict_metadata)


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Turns every error of reading a checkpoint into a `CheckpointError`."""
    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"{directory} holds no training state")
    try:
        yield
    except (
        checkpoint.CheckpointException,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        OSError,
        EOFError,
    ) as error:
        cause: BaseException = error
        if isinstance(error, checkpoint.CheckpointException):
            _raise_interrupt(error)
            causes = (cause for cause, _ in error.failures.values() if isinstance(cause, _UnreadableContents))
            cause = next(causes, error)
        reason = next((line for line in reversed(str(cause).splitlines()) if line.strip()), type(error).__name__)
        raise CheckpointError(f"{directory} does not fit the model or is damaged: {reason.strip()}") from error


def missing_parts(directory: Path) -> list[str]:
    """Names of files that a complete checkpoint has in ``directory`` and that are absent."""
    if not (directory / ".metadata").is_file():
        return [".metadata"]
    parts = {str(part.relative_path) for part in (_read_contents(directory).storage_data or {}).values()}
    return sorted(part for part in parts if not (directory / part).is_file())


class FileByFile(FileSystemWriter):
    """Writes a rank's part in files of at most `FILE_BYTES`, or one tensor.

    torch keeps what it has copied to the host until the file is complete, so that one file for all would be a second copy of the
    weights and moments in host memory.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        """Writes one file after the other."""
        written: list[WriteResult] = []
        sized = ((item, item.tensor_storage_size() or 0) for item in plan.items)
        for number, items in enumerate(split_by_size(sized, FILE_BYTES)):
            place = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            written += super().write_data(replace(plan, items=items, storage_data=place), planner).wait()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(written)
        return done


@contextlib.contextmanager
def alone_without_warning() -> Iterator[None]:
    """Silences torch's warning that a process is alone, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class PlainReader(FileSystemReader):
    """Reads a table of contents that holds only the classes that such tables consist of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            found = _read_contents(Path(self.path))
        except Exception as error:
            raise _UnreadableContents(str(error) or type(error).__name__) from error
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _UnreadableContents(BaseException):
    """No `Exception`: torch drops those, looks for a table of the rank, and (torch 2.11) says only that it found none."""


def _read_contents(directory: Path) -> Metadata:
    with open(directory / ".metadata", "rb") as file:
        found = _Contents(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"the table of contents is a {type(found).__name__}")
    return found


_HARMLESS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == contents.__name__ and isinstance(getattr(contents, name, None), type):
            return getattr(contents, name)
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 writes members of enumerations
            return _member
        raise pickle.UnpicklingError(f"the table of contents asks for {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"the table of contents asks for {name} of {kind!r}")
    return kind[name]


class PlainPlanner(DefaultLoadPlanner):
    """Accepts values other than tensors only if they are plain."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        super().load_bytes(read_item, _saved(plain))


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
