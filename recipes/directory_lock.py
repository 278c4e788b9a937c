"""One process at a time writes into a directory."""

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dataproto.errors import InvalidConfig, writing

LOCK_FILE = ".lock"
_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _leave_to_the_parent() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_the_parent)  # else a lock would live as long as the last child


@contextlib.contextmanager
def locked(directory: Path, way_out: str = "choose another --output-dir", inside: bool = True) -> Iterator[None]:
    """Keeps other processes that write into a directory out of it for the time of a block. Those that only read need no lock.

    The lock is the system's (``flock``): it ends with its process, however that ends, and its children do not have it.

    Args:
        way_out: what a second process can do instead.
        inside: whether the lock is a file in the directory, which then is made if it is missing, and deleted if it stays empty;
            else it is a file next to it, for a directory that is made at once.

    Raises:
        InvalidConfig: another process holds it; names that process.
        FileNotWritten: the lock cannot be made.
    """
    whole = directory.absolute()
    file = whole / LOCK_FILE if inside else whole.with_name(f".{whole.name}{LOCK_FILE}")
    made = [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
    with writing(file.parent, way_out=f"; make room there, or {way_out}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    if (holder := _other_holder(descriptor, file)) is not None:
        os.close(descriptor)
        raise InvalidConfig(f"{directory} is in use by {holder}: wait until that ends, stop it, or {way_out}")
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a child
            file.unlink(missing_ok=True)  # before the lock ends, so that it is not another process's
            _held.discard(descriptor)
            os.close(descriptor)
            with contextlib.suppress(OSError):  # a folder holds something
                for folder in made:
                    folder.rmdir()


def _other_holder(descriptor: int, file: Path) -> str | None:
    """Locks a file and writes into it which process has; the process that has locked, or just deleted, it already, if one has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 500).decode() or "another process"
    except OSError as error:  # some network file systems have no locks
        print(f"no lock in {file.parent} ({error.strerror}): start one process there at a time", file=sys.stderr)
    if not os.fstat(descriptor).st_nlink:
        return "another process"
    with contextlib.suppress(OSError):  # a full disk: what the process writes next tells its file
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode())
    return None
