"""``python -m recipes.report RUN_DIR`` writes ``RUN_DIR/report.html``."""

import sys

from recipes.report.page import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
