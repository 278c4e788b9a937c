"""``python -m recipes.export``: a checkpoint of a run as a model that others load."""

import sys
from collections.abc import Sequence

import tyro

from recipes import export
from recipes.run.command_line import exit_status, parse_config


def main(arguments: Sequence[str]) -> int:
    """Parses the command line, exports, and returns the exit status; a user's mistake is one line on stderr."""
    default = export.ModelExportConfig(tyro.MISSING, tyro.MISSING)
    with exit_status(arguments) as status:
        print(f"model: {export.export_model(parse_config(arguments, default, export.__doc__, 'dataproto export'))}")
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
