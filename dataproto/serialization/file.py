"""A batch as one file that loads without running code.

The file is a safetensors file. Tensors, arrays, images (as PNG) and long byte strings are its sections; the section ``header`` is
JSON: a tree of plain values that says what the batch is and which sections it uses. An object that many rows share is written
once and shared again after loading. Objects of other types need pickle, on both sides.

What is checked, and when: the head, the header, images, byte strings and the lengths of ragged rows by CRC-32 on every load;
tensors and arrays, which stay in the file until they are touched, by their place, size and alignment, and with ``verify=True``
by CRC-32 too. A checksum finds damage, not malice: whatever a file claims is checked before memory is taken for it, and no file
can make loading take more than some 350 times its own size (that of blank images; other files stay far below).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tensordict import TensorDict

from dataproto.errors import FileFormatError
from dataproto.serialization import container as sections
from dataproto.serialization.container import Path, Section, Sections, parse
from dataproto.serialization.value_codec import Reader, Writer

Made = TypeVar("Made")


def save(
    path: Path,
    batch: TensorDict | None,
    non_tensor_batch: Mapping[str, Any],
    meta_info: Mapping[str, Any],
    allow_pickle: bool = False,
) -> None:
    """Writes a batch; an earlier file of that name is replaced only when all is written.

    Raises:
        FileFormatError: an object is of a type that only pickle can store; names where it stands.
    """
    writer = Writer(allow_pickle)
    try:
        header = {
            "batch": writer.tree(batch),
            "non_tensor_batch": [
                [name, writer.at("column", name, column)] for name, column in non_tensor_batch.items()
            ],
            "meta_info": writer.at("field", "meta_info", dict(meta_info)),
        }
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise FileFormatError("a value contains itself, or is nested too deeply to be written") from error
    except ValueError as error:  # an integer of more digits than Python writes
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"a value cannot be written: {error}") from error
    sections.write_sections(path, {"header": Section("U8", (len(text),), text), **writer.sections})


def load(path: Path, make: Callable[[Any, Any, Any], Made], allow_pickle: bool = False, verify: bool = False) -> Made:
    """Reads what :func:`save` wrote, and makes of it ``make(batch, non_tensor_batch, meta_info)``.

    Tensors and arrays lie in mapped memory: nothing of them is read until they are touched, and what is written into them is the
    process's own and never reaches the file. The file may be replaced (as :func:`save` does), but not cut while they are in use.

    Args:
        allow_pickle: also read objects that were written with pickle, which may run code: only for files that are trusted.
        verify: read everything once and compare it with its checksums.

    Raises:
        FileFormatError: damaged, of another format or version, or with pickled objects while ``allow_pickle`` is not given.
        OSError: the file cannot be opened.
    """
    try:
        opened = Sections(path, verify)
        header = parse(opened.checked(opened.take("header")).tobytes())
        reader = Reader(opened, allow_pickle)
        batch = reader.tree(header["batch"])
        arrays = reader.columns(header["non_tensor_batch"])
        meta_info = reader.tree(header["meta_info"])
        opened.finish()
        if not isinstance(meta_info, dict):
            raise FileFormatError("meta_info is not a dict")
        return make(batch, arrays, meta_info)
    except FileFormatError as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # whatever a damaged or hostile file provokes
        hint = "only files written by save_to_disk can be read (not pickles, which would run code)"
        raise FileFormatError(
            f"{path} is damaged or of another format: {type(error).__name__}: {str(error)[:300]}; {hint}"
        ) from error
