"""``python -m recipes.make_vlm``: a small vision-language model with real words."""

import sys
from collections.abc import Sequence

from recipes import make_vlm
from recipes.configs.make_vlm_config import parse
from recipes.options import exit_status


def main(arguments: Sequence[str]) -> int:
    """Parses the command line, makes the model, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        print(f"model: {make_vlm.make_vlm(parse(arguments))}")
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
