"""Drawn problems as a parquet file with the columns of ``hiyouga/geometry3k``."""

import io
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from recipes.synthetic.problems import Split, make_problem

ROW_GROUP_SIZE = 256

# `datasets` reads these features, so that `images` is a list of pictures.
_FEATURES = {
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
    "problem": {"dtype": "string", "_type": "Value"},
    "answer": {"dtype": "string", "_type": "Value"},
}
SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_parquet(path: Path, indices: Iterable[int], level: int = 1, seed: int = 0, split: Split = "train") -> None:
    """Writes the problems ``indices`` to ``path``, as a complete file or not at all.

    Raises:
        InvalidConfig: the level or the split is unknown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    rows = (problem_row(index, level, seed, split) for index in indices)
    try:
        with pq.ParquetWriter(draft, SCHEMA) as writer:
            for group in _groups(rows, ROW_GROUP_SIZE):
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def problem_row(index: int, level: int = 1, seed: int = 0, split: Split = "train") -> dict[str, Any]:
    """Problem ``index`` as a row: ``images`` (PNG bytes), ``problem``, ``answer``."""
    problem = make_problem(index, level, seed, split)
    return {
        "images": [{"bytes": png_bytes(problem.image), "path": None}],
        "problem": problem.text,
        "answer": problem.answer,
    }


def png_bytes(image: Image.Image) -> bytes:
    """The picture in PNG format."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _groups(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    stream = iter(rows)
    while group := list(islice(stream, size)):
        yield group
