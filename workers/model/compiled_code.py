"""Where compiled code is stored from one run to the next."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder ``dataproto/name`` of the user's cache folder, which ``XDG_CACHE_HOME`` names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dataproto" / name
