"""Output that is pleasant in a terminal and plain in a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

__all__ = ["Terminal"]

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GAP = "  "
# A last column narrower than this is not folded: lines of a word or two read worse than lines that run over.
_NARROWEST = 24


class Terminal:
    """Where a command prints: colours and folding in a terminal, neither elsewhere.

    Every line is flushed, so that a long command is seen to proceed and a reader that left is noticed at once.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        interactive = self._out.isatty()
        # https://no-color.org: any value but the empty one turns colours off.
        self.coloured: bool = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = shutil.get_terminal_size().columns if interactive else None

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured and text else text

    def bold(self, text: str) -> str:
        """What a part is called."""
        return self._styled("1", text)

    def dim(self, text: str) -> str:
        """What can be passed over."""
        return self._styled("2", text)

    def good(self, text: str) -> str:
        """What is as it should be."""
        return self._styled("32", text)

    def bad(self, text: str) -> str:
        """What is not as it should be."""
        return self._styled("1;31", text)

    def odd(self, text: str) -> str:
        """What deserves a look."""
        return self._styled("33", text)

    def line(self, text: str = "") -> None:
        """One line."""
        print(text, file=self._out, flush=True)

    def heading(self, text: str) -> None:
        """The name of the part that follows, after an empty line."""
        self.line()
        self.line(self.bold(text))

    def paragraph(self, text: str, indent: int = 2, first: str | None = None) -> None:
        """Text folded to the terminal's width; ``first`` stands before it in the first line (default: the indent)."""
        margin = " " * indent
        start = margin if first is None else first
        if self._width is None:
            self.line(start + text)
            return
        # Escapes take no room on the screen, so the fold is found without them.
        room = max(self._width - indent, _NARROWEST)
        for number, part in enumerate(textwrap.wrap(text, room) or [""]):
            self.line((start if number == 0 else margin) + part)

    def beside(self, text: str, figures: str, at: int) -> None:
        """A line with figures that begin at a column, or on a line of their own where there is no room for both."""
        line = text + " " * max(at - _width(text), len(_GAP)) + self.dim(figures)
        if figures and self._width is not None and _width(line) > self._width:
            self.line(text)
            line = " " * 8 + self.dim(figures)
        self.line(line.rstrip())

    def table(self, rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "") -> None:
        """Rows in aligned columns.

        ``align`` has a letter for each column, ``l`` or ``r``; missing ones are ``l``. A last column that is left
        aligned is folded to the terminal's width.
        """
        every = [header, *rows] if header else list(rows)
        widths = [max(map(_width, column)) for column in zip(*every, strict=True)]
        align = align.ljust(len(widths), "l")
        for row in every:
            cells = [_padded(*cell) for cell in zip(row, widths, align, strict=True)]
            start = _GAP.join(["", *cells[:-1], ""])
            last = cells[-1].rstrip()
            room = None if self._width is None else self._width - _width(start)
            folded = [last]
            if room is not None and _NARROWEST <= room < _width(last) and not _ESCAPES.search(last):
                folded = textwrap.wrap(last, room)
            for part in folded:
                text = (start + part).rstrip()
                self.line(self.dim(text) if row is header else text)
                start = " " * _width(start)


def _width(text: str) -> int:
    """How many columns a text takes on the screen."""
    return len(_ESCAPES.sub("", text))


def _padded(text: str, width: int, align: str) -> str:
    padding = " " * (width - _width(text))
    return padding + text if align == "r" else text + padding
