"""``python -m recipes.parity``: how far an engine's log-probs are from the actor's."""

import sys
from collections.abc import Sequence

from transformers.utils.logging import disable_progress_bar

from recipes import parity
from recipes.configs.parity_config import parse
from recipes.options import exit_status


def main(arguments: Sequence[str]) -> int:
    """Parses the command line, compares, prints, and returns the exit status."""
    with exit_status(arguments, resumes=False) as status:
        config = parse(arguments)
        disable_progress_bar()
        found, differing = parity.compare_log_probs(config)
    if status.code:
        return status.code
    print("\n".join(parity.comparison_table(found)))
    if config.check_weights:
        print(f"weights that differ: {', '.join(differing) or 'none'}")
    too_far = config.tolerance is not None and not found["all"].max <= config.tolerance  # NaN is too far
    if too_far:
        print(f"the largest difference exceeds --tolerance {config.tolerance:g}")
    return int(too_far or bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
