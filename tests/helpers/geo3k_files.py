"""Parquet files with the columns of the ``hiyouga/geometry3k`` data set."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, Sequence, Value
from PIL import Image as PILImage


def drawing(number: int, size: tuple[int, int] = (24, 16)) -> PILImage.Image:
    """A random picture that differs for each number."""
    rng = np.random.default_rng(number)
    return PILImage.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image: PILImage.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def geometry3k(count: int, bad: dict[int, Any] | None = None) -> list[dict[str, Any]]:
    """Rows with EasyR1's columns; ``bad`` replaces the images of some rows, by row number."""
    return [
        {
            "images": (bad or {}).get(number, [{"bytes": png(drawing(number)), "path": None}]),
            "problem": f"<image>Find x of triangle {number}.",
            "answer": str(number),
        }
        for number in range(count)
    ]


def write_geometry3k(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes a parquet file with the features of the data set and the image bytes as given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features(
        {"images": Sequence(Image(decode=False)), "problem": Value("string"), "answer": Value("string")}
    )
    table = Dataset.from_list(rows, features=features).cast_column("images", Sequence(Image()))
    table.to_parquet(str(path))
    return path
