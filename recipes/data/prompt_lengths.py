"""Lengths of the prompts of a data set, computed once for each file and processor.

A length needs the header of every image and the tokenizer, which takes minutes for a large data set. So the lengths of data in
files are kept in ``dataproto/prompt_lengths`` of the user's cache directory (``$XDG_CACHE_HOME`` or ``~/.cache``), under a digest
of all they depend on: path, size and time of change of each file, how its rows are read, tokenizer, chat template and image
processor. Files of images that rows name are checked one by one. The folder may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dataproto.errors import DataProtoError
from rollout.prompts import PromptBuilder
from rollout.prompts.prepared_rows import conversation_of
from rollout.prompts.sources import media_file

FORM = 5
"""Increased when prompts are rendered or counted in another way, or files are written in another form."""

Stamp = list[int] | None
"""Size and time of change (ns) of a file, `None` where there is none."""


def prompt_lengths(rows: Sequence[Any], builder: PromptBuilder) -> list[int | None]:
    """Tokens of each prompt, image tokens included, as `PromptBuilder.prompt_length` counts them from the headers of images.

    Those of rows from files are read from the cache, if nothing has changed, and written there. A row whose length cannot be
    determined has `None`.
    """
    digest = lengths_digest(rows, builder)
    file = None if digest is None else cache_folder() / f"{digest}.json"
    found = None if file is None else _read(file, len(rows))
    if found is None:
        found, images = _count(rows, builder)
        if file is not None:
            _write(file, {"lengths": found, "images": images})
    return found


def cache_folder() -> Path:
    """Where lengths are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto" / "prompt_lengths"


def lengths_digest(rows: Any, builder: PromptBuilder) -> str | None:
    """A digest of all that the lengths depend on but images in files of their own; `None` for rows that are not from files."""
    files, read = getattr(rows, "files", ()), getattr(rows, "read", None)
    tokenizer = getattr(builder.tokenizer, "backend_tokenizer", None)
    if not files or not isinstance(read, partial) or tokenizer is None:
        return None
    parts = {
        "form": FORM,
        "packages": [_version(name) for name in ("dataproto-vlm", "transformers", "tokenizers")],
        "files": [[str(file.resolve()), _stamp(file)] for file in files],
        "rows": [
            read.func.__module__,
            read.func.__qualname__,
            sorted((key, getattr(value, "__qualname__", repr(value))) for key, value in read.keywords.items()),
            [str(root) for _, root in rows.tables],
        ],
        "builder": type(builder).__qualname__,
        "tokenizer": tokenizer.to_str(),
        "template": builder.tokenizer.chat_template,
        "template arguments": builder.template_arguments,
        "processor": builder.image_processor and builder.image_processor.to_dict(),
        "options": builder.image_options,
        "model": builder.config.to_dict(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str | None:
    """The version of a package; `None` for one that is not installed, as of this one in a checkout on ``PYTHONPATH``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _count(rows: Sequence[Any], builder: PromptBuilder) -> tuple[list[int | None], dict[str, Stamp]]:
    """The lengths, and the stamps of the images that are files."""
    lengths: list[int | None] = []
    images: dict[str, Stamp] = {}
    for place in range(len(rows)):
        length = None
        with contextlib.suppress(DataProtoError):
            row = rows[place]
            for source in conversation_of(row).media:
                image = media_file(source, row.get("media_root"))
                if image is not None:
                    images[str(image.absolute())] = _stamp(image)
            length = builder.prompt_length(row)
        lengths.append(length)
    return lengths, images


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _read(file: Path, rows: int) -> list[int | None] | None:
    """The lengths in a file of the cache, unless it is broken or an image has changed since."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        lengths: list[int | None] = kept["lengths"]
        current = len(lengths) == rows and all(_stamp(Path(image)) == stamp for image, stamp in kept["images"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return lengths if current else None


def _write(file: Path, kept: dict[str, Any]) -> None:
    """Writes a file whole or not at all; without room or permission there is no cache."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(file)
