"""``python -m recipes.report RUN_DIR`` writes ``RUN_DIR/report.html``."""

import sys
from collections.abc import Iterable

from dataproto.errors import DataProtoError
from recipes.report.page import write_report

HELP = """usage: dataproto report RUN_DIR

Writes RUN_DIR/report.html, the page that shows a run; a run writes it at its end too.

  RUN_DIR                     the --output-dir of the run"""


def main(arguments: Iterable[str]) -> int:
    """Writes the page, prints its path, and returns the exit status."""
    paths = list(arguments)
    if {"-h", "--help", "--help-all"} & {*paths}:
        print(HELP)
        return 0
    if len(paths) != 1 or paths[0].startswith("-"):
        print(HELP.splitlines()[0], file=sys.stderr)
        return 2
    try:
        print(write_report(paths[0]))
    except (DataProtoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
