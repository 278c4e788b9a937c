"""A batch as one file that loads without running code.

The format is safetensors. Tensors, arrays, images (as PNG) and long byte strings are sections; the section ``header`` is JSON: a
tree of plain values that describes the batch and names its sections. An object that many rows share is written once and shared
again after loading. Objects of other types need pickle, when saving and when loading.

Every load checks the CRC-32 of the head, the header, images, byte strings and the lengths of ragged rows. Tensors and arrays
stay in the file until they are used; their place, size and alignment are checked, and with ``verify=True`` their CRC-32 too. A
checksum finds damage but not malice. Therefore each claim of a file is checked before memory is allocated for it: loading takes
at most about 350 times the size of the file (for blank images, and far less for other content).
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
    """Writes a batch; replaces an earlier file of that name when all is written.

    Raises:
        FileFormatError: an object is of a type that only pickle can store; names its place.
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
    except ValueError as error:  # an integer with more digits than Python converts
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"a value cannot be written: {error}") from error
    sections.write_sections(path, {"header": Section("U8", (len(text),), text), **writer.sections})


def load(path: Path, make: Callable[[Any, Any, Any], Made], allow_pickle: bool = False, verify: bool = False) -> Made:
    """Reads a file of :func:`save` and returns ``make(batch, non_tensor_batch, meta_info)``.

    Tensors and arrays are in mapped memory: they are read when they are used, and writes into them are private to the process and
    never reach the file. While they are in use the file may be replaced (as :func:`save` does), but not truncated.

    Args:
        allow_pickle: also read pickled objects, which may run code; only for trusted files.
        verify: read everything now and compare it with the checksums.

    Raises:
        FileFormatError: the file is damaged, of another format or version, or has pickled objects without ``allow_pickle``.
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
    except Exception as error:  # anything that a damaged or hostile file causes
        hint = "only files written by save_to_disk can be read (not pickles, which would run code)"
        raise FileFormatError(
            f"{path} is damaged or of another format: {type(error).__name__}: {str(error)[:300]}; {hint}"
        ) from error
