"""API keys, and signatures of download addresses."""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from pathlib import Path

from dataproto.errors import InvalidConfig, wait_for_disk

KEY_FILE, SECRET_FILE = "api-key", "signing-secret"
LINE = re.compile(r"([\w.-]{1,64}):\s*([0-9a-f]{64})", re.ASCII)
OWNER = "local"  # whose key a server without a file of keys makes


class Keys:
    """Knows the owner of an API key by the key's SHA-256.

    >>> keys = Keys({hashlib.sha256(b"tml-a").hexdigest(): "ann"}, b"secret")
    >>> keys.owner("tml-a"), keys.owner("tml-b"), keys.owner(None)
    ('ann', None, None)
    """

    def __init__(self, owners: dict[str, str], secret: bytes) -> None:
        self.owners, self.secret = owners, secret

    def owner(self, key: str | None) -> str | None:
        """The owner of a key, or ``None``."""
        if not key:
            return None
        return self.owners.get(hashlib.sha256(key.encode(errors="replace")).hexdigest())

    def signature(self, path: str, expires: int) -> str:
        """The signature of a path until a time in seconds."""
        return hmac.new(self.secret, f"{expires}:{path}".encode(), hashlib.sha256).hexdigest()

    def signed(self, path: str, expires: int, signature: str, now: float) -> bool:
        """Whether a signature is right and has not expired."""
        right = self.signature(path, expires).encode()
        return hmac.compare_digest(right, signature.encode(errors="replace")) and now < expires


def read_keys(file: Path | None, state: Path) -> Keys:
    """The keys of a file of lines ``name: sha256``, or the one key of ``--state``.

    Raises:
        InvalidConfig: a line of the file is malformed, a name or key stands twice, or there is none.
    """
    secret = private_text(state / SECRET_FILE, secrets.token_hex(32)).encode()
    if file is None:
        key = private_text(state / KEY_FILE, f"tml-{secrets.token_urlsafe(32)}")
        return Keys({hashlib.sha256(key.encode()).hexdigest(): OWNER}, secret)
    owners: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            match = LINE.fullmatch(line.strip())
            if match is None:
                raise InvalidConfig(f"{file}, line {number}: must be 'name: sha256 of a key in 64 hexadecimal digits'")
            name, digest = match.groups()
            if name in owners.values():
                raise InvalidConfig(
                    f"{file}, line {number}: {name!r} has a key already, and both would own the same runs: give each key a "
                    "name of its own, or remove the old line"
                )
            if digest in owners:
                raise InvalidConfig(f"{file}, line {number}: {name!r} has the same key as {owners[digest]!r}")
            owners[digest] = name
    if not owners:
        raise InvalidConfig(f"{file} has no key")
    return Keys(owners, secret)


def private_text(path: Path, new: str) -> str:
    """The text of a file that its owner alone can read, made with ``new`` if there is none.

    Raises:
        InvalidConfig: the file is empty.
    """
    if not path.exists():
        _make_private(path, new)
    text = path.read_text().strip()
    if not text:
        raise InvalidConfig(f"{path} is empty: remove it, and the server makes another one")
    return text


def _make_private(path: Path, text: str) -> None:
    """Makes a file that is whole or absent; one that another process has made meanwhile stays."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as file:  # of mode 0600
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
    wait_for_disk(path.parent)
