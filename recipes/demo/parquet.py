"""``python -m recipes.demo.parquet --output FILE.parquet`` writes a data set of drawn problems with the columns of Geometry3K."""

import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from datasets import Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from rich.console import Console
from rich.progress import track

from dataproto.errors import DataProtoError, InvalidConfig
from recipes.demo.problems import LEVELS, Split, make_problem

ROW_GROUP_SIZE = 256
SCHEMA = Features(images=List(ImageFeature()), problem=Value("string"), answer=Value("string")).arrow_schema
"""As `datasets` reads it: ``images`` is a list of pictures."""


@dataclass(frozen=True)
class ParquetConfig:
    """The problems, and the file."""

    output: Path  # parquet file to write; an existing file is replaced
    rows: int = 1000  # problems to draw
    level: int = 1  # 1: a model with less than a million parameters learns it within minutes; 4: similar to Geometry3K
    seed: int = 0  # another one gives other problems
    split: Split = "train"  # no problem occurs in both splits

    def __post_init__(self) -> None:
        if self.output.suffix != ".parquet" or self.output.is_dir():
            raise InvalidConfig(f"output={self.output}: must be a file that ends in .parquet")
        if self.rows < 1:
            raise InvalidConfig(f"rows={self.rows}: must be at least 1")
        if self.level not in LEVELS:
            raise InvalidConfig(f"level={self.level} is unknown: choose one of {sorted(LEVELS)}")


def write_parquet(path: Path, indices: Iterable[int], level: int = 1, seed: int = 0, split: Split = "train") -> None:
    """Writes the problems ``indices`` to ``path``, as a complete file or not at all.

    Raises:
        InvalidConfig: the level or the split is unknown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    group: list[dict[str, Any]] = []
    try:
        with pq.ParquetWriter(draft, SCHEMA) as writer:
            for index in indices:
                group.append(problem_row(index, level, seed, split))
                if len(group) == ROW_GROUP_SIZE:
                    writer.write_table(pa.Table.from_pylist(group, SCHEMA))
                    group.clear()
            writer.write_table(pa.Table.from_pylist(group, SCHEMA))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def problem_row(index: int, level: int = 1, seed: int = 0, split: Split = "train") -> dict[str, Any]:
    """Problem ``index`` as a row: ``images`` (PNG bytes), ``problem``, ``answer``."""
    problem = make_problem(index, level, seed, split)
    images = [{"bytes": png_bytes(problem.image), "path": None}]
    return {"images": images, "problem": problem.text, "answer": problem.answer}


def png_bytes(image: Image.Image) -> bytes:
    """The picture in PNG format."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the file, and returns the exit status; an error is one line on stderr."""
    try:
        config = tyro.cli(ParquetConfig, args=arguments, description=__doc__, prog="recipes.demo.parquet")
        numbers = track(range(config.rows), "drawing", console=Console(stderr=True))
        write_parquet(config.output, numbers, config.level, config.seed, config.split)
    except (DataProtoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return 130
    print(f"{config.output}: {config.rows} problems of level {config.level}, split {config.split}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
