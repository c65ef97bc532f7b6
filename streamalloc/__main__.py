"""Entry point of ``python -m streamalloc tour | info | bench | replay | profile | serve | store | run``."""

import sys

from streamalloc.cli import main

if __name__ == "__main__":
    sys.exit(main())
