"""``python -m recipes.plan``."""

import sys

from recipes.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
