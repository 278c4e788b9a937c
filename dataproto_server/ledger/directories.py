"""Directories that are whole or absent: written under another name, hashed, and renamed."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from dataproto.errors import CheckpointError
from dataproto_server.backend import DIGESTS_FILE
from dataproto_server.refusals import InvalidRequest

log = logging.getLogger("dataproto.serve")
MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
TEMPORARY = ".new-"
SYNCING = 8  # directories that are brought to the disk at a time
SYNC_AFTER_SECONDS = 0.5
"""A directory is brought to the disk this many seconds after it is written, unless somebody waits for it. Requests of the same
moment are answered first: their commit to the database would wait for the disk."""


def checked_name(name: str) -> str:
    """A name that can be part of a path. Raises `InvalidRequest` for any other.

    >>> checked_name("step-100")
    'step-100'
    """
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"name {name[:200]!r}: may have 1 to 128 letters, digits, '.', '_' and '-', without a leading '.' or '-'"
        )
    return name


@asynccontextmanager
async def new_directory(target: Path, *, synced: bool = True) -> AsyncIterator[Path]:
    """A directory to write to; after the block it is ``target``, with a manifest, on disk. A failed block leaves nothing.

    An older ``target`` is replaced.

    Args:
        synced: whether it must be on disk. If not, a kill of this process loses nothing; a loss of power may, until
            `sync_directory` has returned.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.mkdir()
    try:
        yield temporary
        await asyncio.to_thread(_publish, temporary, target, synced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary(target: Path) -> Path:
    return target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"


def _publish(temporary: Path, target: Path, synced: bool) -> None:
    _write_manifest(temporary)
    if synced:
        _sync_files(temporary)
    remove_directory(target)
    temporary.rename(target)
    if synced:
        _sync(target.parent)


def sync_directory(directory: Path) -> None:
    """Returns when a directory is on disk, or is gone."""
    with suppress(FileNotFoundError):
        _sync_files(directory)
        _sync(directory.parent)


class Syncs:
    """Directories on their way to the disk, by the runs that have written them.

    A failure stays: Linux tells of it once, and takes the pages for written, so a second try with the same files would prove
    nothing. It is known in this process alone, so a later one trusts no files that may not be on disk; see `copy_files`.

    They have threads of their own: those of the event loop name the directories that clients wait for.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SYNCING, "sync")
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._failed: set[str] = set()
        self._known: dict[str, set[Path]] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # set while somebody waits for the directories of a run

    def mark_written(self, run: str, directory: Path) -> None:
        """Records that this process has written a directory, and will know if it cannot be brought to the disk."""
        self._known.setdefault(run, set()).add(directory)

    def wrote(self, run: str, directory: Path) -> bool:
        """Whether this process has written a directory, and knows of no failure: a replay has no reason to write it again."""
        return directory in self._known.get(run, ())

    def end(self, run: str) -> None:
        """Forgets the directories of a run, which no replay reaches any more."""
        self._known.pop(run, None)
        self._awaited.pop(run, None)

    def begin(self, run: str, directory: Path) -> None:
        """Begins to bring a directory to the disk, `SYNC_AFTER_SECONDS` from now or when somebody waits for it."""
        self.mark_written(run, directory)
        task, tasks = asyncio.create_task(self._sync(run, directory)), self._tasks.setdefault(run, set())
        tasks.add(task)
        task.add_done_callback(lambda task: self._ended(run, task))

    async def _sync(self, run: str, directory: Path) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._awaited.setdefault(run, asyncio.Event()).wait(), SYNC_AFTER_SECONDS)
        began = time.perf_counter()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, sync_directory, directory)
        except OSError as error:
            self.give_up(run, directory, error)
            raise
        log.info("snapshot %s: synced %.3f s", directory, time.perf_counter() - began)

    def _ended(self, run: str, task: asyncio.Task[None]) -> None:
        self._tasks[run].discard(task)
        if task.cancelled() or task.exception() is not None:
            self._failed.add(run)

    def give_up(self, run: str, directory: Path, error: OSError) -> None:
        """Records that a directory of a run cannot be brought to the disk."""
        log.error("%s cannot be brought to the disk: run %s gets no snapshot any more", directory, run, exc_info=error)
        self._failed.add(run)
        self._known.get(run, set()).discard(directory)

    def failed(self, run: str) -> bool:
        """Whether a directory of a run may not be on disk, and never will be known to be."""
        return run in self._failed

    async def done(self, run: str) -> None:
        """Returns when all directories of a run are on disk. Raises `OSError` if one could not be brought there."""
        self._awaited.setdefault(run, asyncio.Event()).set()
        await asyncio.gather(*self._tasks.get(run, ()), return_exceptions=True)
        self._awaited.pop(run, None)
        if self.failed(run):
            raise OSError(f"a snapshot for samplers of run {run} may not be on disk")

    def close(self) -> None:
        """Waits for none any longer: those under way count as failed."""
        for task in [each for tasks in self._tasks.values() for each in tasks]:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _write_manifest(directory: Path) -> None:
    told = directory / DIGESTS_FILE
    known = json.loads(told.read_text()) if told.exists() else {}
    files = {path.name: known.get(path.name) or _digest(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))


def _sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def check_directory(directory: Path) -> None:
    """Compares a directory with its manifest. Raises `CheckpointError` if a file is missing or has changed."""
    files = files_of(directory)
    try:
        wrong = [name for name, digest in files.items() if _digest(directory / checked_name(name)) != digest]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
    if wrong:
        raise CheckpointError(f"the checkpoint is damaged: {', '.join(wrong)} has changed")


def files_of(directory: Path) -> dict[str, str]:
    """The SHA-256 of the files of a directory, by their names. Raises `CheckpointError` if its manifest cannot be read."""
    try:
        files: dict[str, str] = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {error}") from error
    return files


def is_damaged(directory: Path) -> bool:
    """Whether a directory is there, but not as it was written. One that is absent or cannot be read may come back."""
    try:
        check_directory(directory)
    except CheckpointError as error:
        unread = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
        return directory.is_dir() and not unread
    return False


def copy_files(source: Path, target: Path) -> None:
    """Copies the files of a directory, compared with its manifest, to an empty one.

    After a failure to write files, or a kill before they were on disk, memory may still hold what the disk does not have, and
    bringing the same files to the disk again would succeed. A copy is written anew.

    Raises:
        CheckpointError: a file is missing, has changed, or cannot be read.
        OSError: the copy cannot be written.
    """
    check_directory(source)
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    check_directory(target)
    (target / MANIFEST).unlink()


def remove_directory(directory: Path) -> None:
    """Removes a directory at once for readers; an absent one is no error."""
    hidden = _temporary(directory)
    try:
        directory.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def remove_unfinished(root: Path) -> None:
    """Removes what a kill left of directories that were being written or removed."""
    for path in root.rglob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def directory_size(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in directory.iterdir())


def link_files(source: Path, target: Path) -> None:
    """Gives ``target`` the files of a checkpoint, by hard links where the file system has them."""
    for path in source.iterdir():
        if path.name != MANIFEST:
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copy2(path, target / path.name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
