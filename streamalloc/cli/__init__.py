"""The commands behind ``python -m streamalloc``; nothing else in the package imports them."""

from streamalloc.cli.main import main

__all__ = ["main"]
