"""Commands behind ``python -m streamalloc``. Nothing else in the package imports them."""

from streamalloc.cli.main import main

__all__ = ["main"]
