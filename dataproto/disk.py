"""A batch as one file that loads without running code.

The file is a safetensors file. Tensors, arrays, images (as PNG) and byte strings are its entries; the entry ``header`` is JSON:
a tree of plain values in which ``{"$": kind, ...}`` stands for whatever JSON has no form of. An object that many rows share is
written once and shared again after loading. Objects of other types need pickle, on both sides.
"""

import base64
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from dataproto.errors import FileFormatError
from dataproto.rows import object_array
from dataproto.tensordict_utils import nested_tensor_from_tensor_list

FORMAT, VERSION = "dataproto", "1"
Path: TypeAlias = str | os.PathLike[str]
Made = TypeVar("Made")

# What safetensors stores under its own name; other dtypes go as bytes.
_NATIVE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
}
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}


def save(
    path: Path,
    batch: TensorDict | None,
    non_tensor_batch: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    allow_pickle: bool = False,
) -> None:
    """Writes a batch; an earlier file of that name is replaced only when all is written.

    Raises:
        FileFormatError: an object is of a type that only pickle can store; names where it stands.
    """
    from safetensors.torch import save_file

    writer = _Writer(allow_pickle)
    try:
        header = {
            "batch": None if batch is None else writer.batch(batch),
            "non_tensor_batch": {
                name: writer.tree(array, f"column {name!r}") for name, array in non_tensor_batch.items()
            },
            "meta_info": writer.tree(dict(meta_info), "meta_info"),
        }
        text = json.dumps(header, allow_nan=False).encode()
    except RecursionError as error:
        raise FileFormatError("a value contains itself, or is nested too deeply to be written") from error
    writer.entries["header"] = _bytes_tensor(text)
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    with open(temporary, "wb"):  # an ordinary OSError where nothing can be written
        pass
    try:
        save_file(writer.entries, temporary, metadata={"format": FORMAT, "version": VERSION})
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def load(path: Path, make: Callable[[Any, Any, Any], Made], allow_pickle: bool = False) -> Made:
    """Reads what :func:`save` wrote, and makes of it ``make(batch, non_tensor_batch, meta_info)``.

    Raises:
        FileFormatError: damaged, of another format or version, or with pickled objects while ``allow_pickle`` is not given.
        OSError: the file cannot be opened.
    """
    from safetensors import safe_open

    with open(path, "rb"):  # an ordinary OSError where there is nothing to read
        pass
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise FileFormatError(f"{path} was not written by save_to_disk")
            if metadata.get("version") != VERSION:
                raise FileFormatError(f"{path} has version {metadata.get('version')!r}; this library reads {VERSION!r}")
            reader = _Reader(lambda name: file.get_tensor(name).clone(), allow_pickle)
            header = json.loads(reader.bytes("header"))
            batch = None if header["batch"] is None else reader.batch(header["batch"])
            arrays = {name: reader.tree(node) for name, node in header["non_tensor_batch"].items()}
            meta_info = reader.tree(header["meta_info"])
            if not isinstance(meta_info, dict):
                raise FileFormatError(f"{path}: meta_info is not a dict")
            return make(batch, arrays, meta_info)
    except FileFormatError:
        raise
    except Exception as error:  # whatever a damaged or hostile file provokes
        hint = "only files written by save_to_disk can be read (not pickles, which would run code)"
        raise FileFormatError(f"{path} is damaged or of another format: {error}; {hint}") from error


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class _Writer:
    """Values to JSON nodes, with everything large put aside as entries of the file."""

    def __init__(self, allow_pickle: bool) -> None:
        self.entries: dict[str, torch.Tensor] = {}
        self._allow_pickle = allow_pickle
        self._nodes: dict[int, Any] = {}  # id of a shared object -> its node
        self._alive: list[Any] = []  # keeps ids unique while writing
        self._storages: set[int] = set()

    def batch(self, batch: TensorDict) -> dict[str, Any]:
        columns = {name: self.tree(value, f"column {name!r}") for name, value in batch.items()}
        return {"rows": batch.batch_size[0], "on_device": batch.device is not None, "columns": columns}

    def tree(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if kind is list:
            return [self.tree(item, where) for item in value]
        if kind is dict:
            if all(type(key) is str for key in value) and "$" not in value:
                return {key: self.tree(item, f"{where}, key {key!r}") for key, item in value.items()}
            return {
                "$": "dict",
                "items": [[self.tree(key, where), self.tree(item, where)] for key, item in value.items()],
            }
        if kind in (tuple, set, frozenset):
            return {"$": kind.__name__, "items": [self.tree(item, where) for item in value]}
        if kind is complex:
            return {"$": "complex", "value": [self.tree(value.real, where), self.tree(value.imag, where)]}
        if id(value) not in self._nodes:
            self._nodes[id(value)] = self._large(value, where)
            self._alive.append(value)
        return self._nodes[id(value)]

    def _large(self, value: Any, where: str) -> dict[str, Any]:
        from PIL import Image

        if isinstance(value, torch.Tensor) and value.layout in (torch.strided, torch.jagged):
            return self._tensor(value, where)
        if type(value) is np.ndarray and value.dtype == object:
            items = [self.tree(item, f"{where}, row {row}") for row, item in enumerate(value.reshape(-1).tolist())]
            return {"$": "objects", "shape": list(value.shape), "items": items}
        if type(value) is np.ndarray and value.dtype.kind in "biufcSUmM":
            data = self._entry(_bytes_tensor(value.tobytes()))
            return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
            return {"$": "scalar", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
        if isinstance(value, Image.Image):
            return self._image(value)
        if type(value) in (bytes, bytearray):
            return {"$": type(value).__name__, "data": self._entry(_bytes_tensor(bytes(value)))}
        if self._allow_pickle:
            return {"$": "pickle", "data": self._entry(_bytes_tensor(pickle.dumps(value)))}
        raise FileFormatError(
            f"{where} holds a {type(value).__name__}, which only pickle can store: give allow_pickle=True"
        )

    def _tensor(self, value: torch.Tensor, where: str) -> dict[str, Any]:
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            return {"$": "nested", "layout": layout, "rows": [self.tree(row, where) for row in value.unbind()]}
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype in _NATIVE:
            return {"$": "tensor", "data": self._entry(tensor)}
        dtype = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.reshape(-1).view(torch.uint8)
        return {"$": "tensor", "data": self._entry(bits), "dtype": dtype, "shape": list(value.shape)}

    def _image(self, image: Any) -> dict[str, Any]:
        if image.mode not in _PNG_MODES:
            data = self._entry(_bytes_tensor(image.tobytes()))
            return {"$": "pixels", "mode": image.mode, "size": list(image.size), "data": data}
        buffer = io.BytesIO()
        exif = {"exif": image.getexif()} if "exif" in image.info else {}
        image.save(buffer, format="PNG", compress_level=1, **exif)
        return {"$": "png", "mode": image.mode, "data": self._entry(_bytes_tensor(buffer.getvalue()))}

    def _entry(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage().data_ptr()
        if storage and storage in self._storages:  # safetensors refuses tensors that share memory
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        name = str(len(self.entries))
        self.entries[name] = tensor
        return name


class _Reader:
    """The inverse of :class:`_Writer`."""

    def __init__(self, entry: Callable[[str], torch.Tensor], allow_pickle: bool) -> None:
        self._entry = entry
        self._allow_pickle = allow_pickle
        self._shared: dict[str, Any] = {}  # node -> the one object made from it

    def batch(self, node: dict[str, Any]) -> TensorDict:
        columns = {name: self.tree(value) for name, value in node["columns"].items()}
        return TensorDict(columns, batch_size=[node["rows"]], device="cpu" if node["on_device"] else None)

    def bytes(self, name: str) -> bytes:
        return self._entry(name).numpy().tobytes()

    def tree(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.tree(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self.tree(item) for key, item in node.items()}
        kind, entry = node["$"], node.get("data")
        if entry is None:
            return self._small(kind, node)
        if (key := repr(node)) not in self._shared:
            self._shared[key] = self._large(kind, node, entry)
        return self._shared[key]

    def _small(self, kind: str, node: dict[str, Any]) -> Any:
        if kind == "float":
            return float(node["value"])
        if kind == "complex":
            return complex(*map(self.tree, node["value"]))
        if kind == "dict":
            return {self.tree(key): self.tree(item) for key, item in node["items"]}
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.tree, node["items"]))
        if kind == "scalar":
            return np.frombuffer(base64.b64decode(node["value"]), dtype=np.dtype(node["dtype"]))[0]
        if kind == "objects":
            return object_array([self.tree(item) for item in node["items"]]).reshape(node["shape"])
        if kind == "nested":
            rows = [self.tree(row) for row in node["rows"]]
            if node["layout"] == "jagged":
                return nested_tensor_from_tensor_list(rows)
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
        raise FileFormatError(f"unknown kind of value {kind!r}")

    def _large(self, kind: str, node: dict[str, Any], entry: str) -> Any:
        if kind == "tensor":
            tensor = self._entry(entry)
            return tensor.view(getattr(torch, node["dtype"])).view(node["shape"]) if "dtype" in node else tensor
        if kind == "array":
            return np.frombuffer(bytearray(self.bytes(entry)), dtype=np.dtype(node["dtype"])).reshape(node["shape"])
        if kind in ("bytes", "bytearray"):
            return self.bytes(entry) if kind == "bytes" else bytearray(self.bytes(entry))
        if kind == "png":
            return self._png(entry, node["mode"])
        if kind == "pixels":
            from PIL import Image

            return Image.frombytes(node["mode"], tuple(node["size"]), self.bytes(entry))
        if kind == "pickle":
            if not self._allow_pickle:
                raise FileFormatError(
                    "the file holds pickled objects, which may run code: give allow_pickle=True to trust it"
                )
            return pickle.loads(self.bytes(entry))
        raise FileFormatError(f"unknown kind of value {kind!r}")

    def _png(self, entry: str, mode: str) -> Any:
        from PIL import Image

        with Image.open(io.BytesIO(self.bytes(entry)), formats=["PNG"]) as image:
            plain = image.copy()  # a plain image, not a reader that holds on to its bytes
        return plain if plain.mode == mode else plain.convert(mode)
