"""The commands of ``python -m streamalloc``. No other part of the package imports this folder."""

from streamalloc.cli.main import main

__all__ = ["main"]
