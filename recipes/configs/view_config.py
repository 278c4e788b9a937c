"""A run in the browser while it goes on: ``dataproto view RUN_DIR``.

Serves its curves and kept rows on this machine only, for reading only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recipes.options import parse_config


@dataclass(frozen=True)
class ViewConfig:
    """What is served, and where."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN-DIR")]  # the --output-dir of the run
    port: int = 8420  # of 127.0.0.1; 0: any free one


def parse(arguments: Sequence[str]) -> ViewConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, ViewConfig(tyro.MISSING), __doc__, "dataproto view")
