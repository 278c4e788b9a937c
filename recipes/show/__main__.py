"""``python -m recipes.show``."""

import sys

from recipes.show.show_command import main

if __name__ == "__main__":
    sys.exit(main())
