"""Text output: coloured and folded in a terminal, plain in a pipe."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GAP = "  "
_NARROWEST = 24
"""Minimum columns of folded text."""


class UsageError(Exception):
    """A command cannot run with these arguments; ``main`` prints the message and returns exit code 2."""


class OutputError(Exception):
    """The output of a command cannot be written; the cause is an ``OSError``."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json [FILE]``."""
    about = "write JSON to FILE; without FILE print it instead of the table"
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help=about)


def plural(count: int, noun: str) -> str:
    """Return ``"1 device"`` or ``"2 devices"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def write_file(path: str, text: str) -> None:
    """Write a file that an option names."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


class Terminal:
    """Output of a command. In a terminal it is coloured and folded.

    Every line is flushed, so that progress is visible and a closed pipe is noticed at once.

    Parameters
    ----------
    json
        Value of the option ``--json``. ``"-"``: JSON replaces all lines.
    """

    def __init__(self, json: str | None = None) -> None:
        self._json = json
        interactive = sys.stdout.isatty()
        # https://no-color.org: any value but the empty one turns colours off.
        self.coloured: bool = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = shutil.get_terminal_size().columns if interactive else None

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured and text else text

    bold: functools.partialmethod[str] = functools.partialmethod(_styled, "1")
    dim: functools.partialmethod[str] = functools.partialmethod(_styled, "2")
    good: functools.partialmethod[str] = functools.partialmethod(_styled, "32")
    bad: functools.partialmethod[str] = functools.partialmethod(_styled, "1;31")
    warning: functools.partialmethod[str] = functools.partialmethod(_styled, "33")

    def line(self, text: str = "") -> None:
        """Print a line."""
        if self._json != "-":
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError as error:
            raise OutputError(error.strerror) from error

    def write_json(self, report: dict[str, Any]) -> None:
        """Write a report to the file of ``--json``, with ``"-"`` to the output, with None nowhere."""
        text = json.dumps(report, indent=2)
        if self._json == "-":
            self._print(text)
        elif self._json is not None:
            write_file(self._json, text + "\n")

    def heading(self, text: str) -> None:
        """Print an empty line and a title."""
        self.line()
        self.line(self.bold(text))

    def paragraph(self, text: str, indent: int = 2, first: str | None = None) -> None:
        """Print text folded to the terminal's width; ``first`` replaces the indent of the first line."""
        margin = " " * indent
        start = margin if first is None else first
        if self._width is None:
            self.line(start + text)
            return
        # Only `first` may have escape sequences, which take no columns, so the text is folded alone.
        room = max(self._width - indent, _NARROWEST)
        for number, part in enumerate(textwrap.wrap(text, room) or [""]):
            self.line((start if number == 0 else margin) + part)

    def table(self, rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "") -> None:
        """Print rows in aligned columns.

        ``align`` has one letter for each column, ``l`` or ``r``; default ``l``. A left-aligned last column is folded
        to the terminal's width.
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
    """Return the number of columns that a text takes on the screen."""
    return len(_ESCAPES.sub("", text))


def _padded(text: str, width: int, align: str) -> str:
    padding = " " * (width - _width(text))
    return padding + text if align == "r" else text + padding
