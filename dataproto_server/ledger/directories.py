"""Directories that are whole or absent: written under another name, hashed, and renamed."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from dataproto.errors import CheckpointError, raised_as, undoing, wait_for_disk
from dataproto_server.refusals import InvalidRequest

log = logging.getLogger("dataproto.serve")
MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
TEMPORARY = ".new-"


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
async def new_directory(target: Path) -> AsyncIterator[Path]:
    """A directory to write to; after the block it is ``target``, with a manifest, on disk. A failed block leaves nothing.

    An older ``target`` is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.mkdir()
    with undoing(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        yield temporary
        await asyncio.to_thread(_publish, temporary, target)


def _temporary(target: Path) -> Path:
    return target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"


def _publish(temporary: Path, target: Path) -> None:
    files = {path.name: _digest(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in temporary.iterdir():
        wait_for_disk(path)
    wait_for_disk(temporary)
    remove_directory(target)
    temporary.rename(target)
    wait_for_disk(target.parent)


def check_directory(directory: Path) -> None:
    """Compares a directory with its manifest. Raises `CheckpointError` if a file is missing or has changed."""
    files = files_of(directory)
    with raised_as(CheckpointError, "the checkpoint is damaged", OSError, ValueError):
        wrong = [name for name, digest in files.items() if _digest(directory / checked_name(name)) != digest]
    if wrong:
        raise CheckpointError(f"the checkpoint is damaged: {', '.join(wrong)} has changed")


def files_of(directory: Path) -> dict[str, str]:
    """The SHA-256 of the files of a directory, by their names. Raises `CheckpointError` if its manifest cannot be read."""
    with raised_as(CheckpointError, "the checkpoint is damaged", OSError, ValueError):
        files: dict[str, str] = json.loads((directory / MANIFEST).read_text())
    return files


def is_damaged(directory: Path) -> bool:
    """Whether a directory is there, but not as it was written. One that is absent or cannot be read may come back."""
    try:
        check_directory(directory)
    except CheckpointError as error:
        unread = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
        return directory.is_dir() and not unread
    return False


def remove_directory(directory: Path) -> None:
    """Removes a directory at once for readers; an absent one is no error."""
    with suppress(FileNotFoundError):
        shutil.rmtree(directory.rename(_temporary(directory)), ignore_errors=True)


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
