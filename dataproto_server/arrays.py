"""Arrays of the Tinker API, in protobuf and in JSON, as NumPy arrays and sparse rows; all of them are checked."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dataproto_server.backend import Array, SparseRows
from dataproto_server.protobuf_messages import Tensor
from dataproto_server.refusals import InvalidRequest

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32, BFLOAT16: np.uint16}
LITTLE = "<"  # the byte order of the wire, and of every machine on which this runs


def values_of(data: bytes, dtype: int) -> Array:
    """The numbers of a protobuf field, ``(n,)`` float32 or int64.

    >>> values_of(b"\\x80\\x3f", BFLOAT16)
    array([1.], dtype=float32)
    """
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype} is unknown: there are 1 float32, 2 int64, 3 int32 and 4 bfloat16")
    size = np.dtype(DTYPES[dtype]).itemsize
    if len(data) % size:
        raise InvalidRequest(f"{len(data)} bytes are no whole number of values of {size} bytes")
    values = np.frombuffer(data, DTYPES[dtype])
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64) if dtype == INT32 else values


def read_tensor(message: Any) -> Array | SparseRows:
    """The array of a protobuf ``Tensor``."""
    encoding = message.WhichOneof("encoding")
    if encoding == "sparse_csr":
        csr = message.sparse_csr
        crow, columns = values_of(csr.crow_indices, INT64), values_of(csr.col_indices, INT64)
        return sparse_rows(values_of(csr.values, message.dtype), crow, columns, list(message.shape))
    return shaped(values_of(message.dense, message.dtype), list(message.shape))


def read_json_tensor(value: Any) -> Array | SparseRows:
    """The array of a JSON ``TensorData``."""
    if not isinstance(value, Mapping) or not {"data", "dtype"} <= value.keys():
        raise InvalidRequest("a tensor has data and dtype")
    if value["dtype"] not in ("int64", "float32"):
        raise InvalidRequest(f"a tensor's dtype is int64 or float32, not {value['dtype']!r}")
    values = json_numbers(value["data"], np.dtype(value["dtype"]))
    shape = value.get("shape")
    if value.get("sparse_crow_indices") is None:
        return shaped(values, [len(values)] if shape is None else shape)
    crow, columns = (
        json_numbers(value.get(name), np.dtype(np.int64)) for name in ("sparse_crow_indices", "sparse_col_indices")
    )
    return sparse_rows(values, crow, columns, shape or [])


def json_numbers(values: Any, dtype: np.dtype[Any]) -> Array:
    """A list of numbers as an ``(n,)`` array; numbers with a fraction are no integers."""
    try:
        found: npt.NDArray[Any] = np.asarray(values)
        if found.size == 0:
            found = found.astype(dtype)
        allowed = "iu" if dtype.kind == "i" else "iuf"
        if not isinstance(values, Sequence) or found.ndim != 1 or found.dtype.kind not in allowed:
            raise InvalidRequest(f"expected a list of numbers of {dtype}")
        return found.astype(dtype)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequest(f"expected a list of numbers of {dtype}: {error}") from error


def shaped(values: Array, shape: Any) -> Array:
    """Values in their shape; no shape is one dimension.

    >>> shaped(np.arange(4), [2, 2]).tolist()
    [[0, 1], [2, 3]]
    """
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"shape {shape} is no list of sizes")
    if not shape and values.size != 1:
        return values
    if len(shape) > 2:
        raise InvalidRequest(f"shape {shape} has {len(shape)} dimensions: there may be 1 or 2")
    if prod(shape) != values.size:
        raise InvalidRequest(f"shape {shape} does not hold {values.size} values")
    return values.reshape(shape or [1])


def sparse_rows(values: Array, crow: Array, columns: Array, shape: Any) -> SparseRows:
    """Compressed sparse rows, after all checks."""
    sizes = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size >= 0 for size in shape)
    if not sizes:
        raise InvalidRequest(f"shape {shape} of a sparse array is not (rows, columns)")
    rows, width = shape
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(values) or (np.diff(crow) < 0).any():
        raise InvalidRequest(f"crow_indices must rise from 0 to {len(values)} in {rows + 1} numbers")
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < width):
        raise InvalidRequest(f"col_indices must be {len(values)} numbers from 0 to {width - 1}")
    return SparseRows(values, crow, columns, (rows, width))


def write_tensor(array: Array | SparseRows) -> Any:
    """A protobuf ``Tensor`` of float32 or int64 values."""
    values = array.values if isinstance(array, SparseRows) else array
    dtype = FLOAT32 if values.dtype.kind == "f" else INT64
    data = np.ascontiguousarray(values, np.dtype(DTYPES[dtype]).newbyteorder(LITTLE)).tobytes()
    message = Tensor(dtype=dtype, shape=array.shape)
    if isinstance(array, SparseRows):
        message.sparse_csr.values = data
        message.sparse_csr.crow_indices = array.crow_indices.astype("<i8").tobytes()
        message.sparse_csr.col_indices = array.col_indices.astype("<i8").tobytes()
    else:
        message.dense = data
    return message


def padded_rows(array: Array | SparseRows, filler: int) -> Array:
    """``(N, K)`` with the values of each row first, and then filler; K is the largest number of values of a row.

    >>> sparse = SparseRows(np.array([7, 8, 9]), np.array([0, 1, 3]), np.array([5, 0, 2]), (2, 6))
    >>> padded_rows(sparse, -1).tolist()
    [[7, -1], [8, 9]]
    """
    if not isinstance(array, SparseRows):
        return array
    counts = np.diff(array.crow_indices)
    rows = np.full((len(counts), int(counts.max(initial=0))), filler, array.values.dtype)
    rows[np.arange(rows.shape[1])[None] < counts[:, None]] = array.values
    return rows


def unpadded_rows(rows: Array, like: Array | SparseRows) -> Array | SparseRows:
    """The values of `padded_rows`, in the layout of the array that it was given."""
    if not isinstance(like, SparseRows):
        return rows
    counts = np.diff(like.crow_indices)
    values = rows[np.arange(rows.shape[1])[None] < counts[:, None]]
    return SparseRows(values, like.crow_indices, like.col_indices, like.shape)
