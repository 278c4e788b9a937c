"""``python -m recipes.report RUN_DIR`` writes ``RUN_DIR/report.html``."""

import sys
from collections.abc import Iterable

from dataproto.errors import DataProtoError
from recipes.report.page import write_report


def main(arguments: Iterable[str]) -> int:
    paths = list(arguments)
    if len(paths) != 1 or paths[0].startswith("-"):
        print("usage: dataproto report RUN_DIR", file=sys.stderr)
        return 0 if paths in (["-h"], ["--help"]) else 2
    try:
        print(write_report(paths[0]))
    except (DataProtoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
