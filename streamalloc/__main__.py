"""Entry point of ``python -m streamalloc``, whose commands are the modules of :mod:`streamalloc.cli`."""

import sys

from streamalloc.cli import main

if __name__ == "__main__":
    sys.exit(main())
