"""``python -m recipes.synthetic --output FILE.parquet`` writes a data set of drawn problems with the columns of Geometry3K."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from dataproto.errors import DataProtoError, InvalidConfig
from recipes.synthetic.parquet import write_parquet
from recipes.synthetic.problems import LEVELS, Split


@dataclass(frozen=True)
class ParquetConfig:
    """The problems, and the file."""

    output: Path  # parquet file to write; an existing file is replaced
    rows: int = 1000  # problems to draw
    level: int = 1  # 1: a model with less than a million parameters learns it within minutes; 4: similar to Geometry3K
    seed: int = 0  # another one gives other problems
    split: Split = "train"  # no problem occurs in both splits

    def __post_init__(self) -> None:
        if self.output.suffix != ".parquet":
            raise InvalidConfig(f"output={self.output}: must end in .parquet")
        if self.output.is_dir():
            raise InvalidConfig(f"output={self.output}: must be a file, but is a directory")
        if self.rows < 1:
            raise InvalidConfig(f"rows={self.rows}: must be at least 1")
        if self.level not in LEVELS:
            raise InvalidConfig(f"level={self.level} is unknown: choose one of {sorted(LEVELS)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the file, and returns the exit status; an error is one line on stderr."""
    try:
        config = tyro.cli(ParquetConfig, args=arguments, description=__doc__, prog="recipes.synthetic")
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
