"""``python -m recipes NAME``: the command ``dataproto NAME``, also where it is not installed."""

import sys

from recipes.commands import main

if __name__ == "__main__":
    sys.exit(main())
