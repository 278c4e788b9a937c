"""``python -m recipes.export``: a checkpoint of a run as a model that others load."""

import sys
from collections.abc import Sequence

from transformers.utils.logging import disable_progress_bar

from recipes import export
from recipes.configs.export_config import parse
from recipes.options import exit_status


def main(arguments: Sequence[str]) -> int:
    """Parses the command line, exports, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments, resumes=False) as status:
        config = parse(arguments)
        disable_progress_bar()
        print(f"model: {export.export_model(config)}")
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
