"""``python -m recipes.view RUN_DIR`` shows a run in the browser."""

import sys

from recipes.view import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
