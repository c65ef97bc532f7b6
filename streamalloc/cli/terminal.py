"""Output of commands as text: with colours and folded lines in a terminal, plain in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_STYLED = re.compile(r"(\x1b\[[0-9;]*m)([^\x1b]*)(\x1b\[0m)")
_ERASE = "\r\x1b[K"
_GAP = "  "
_NARROWEST = 24
"""Least width in characters to which text is folded, also in the last column of a table. A longer word is broken into
parts.
"""


class UsageError(Exception):
    """A command cannot run with these arguments. The function ``main`` prints the message, and returns the exit
    code 2.
    """


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. The stream is None if the process was started without it."""
    return stream is not None and stream.isatty()


class OutputError(Exception):
    """The output of a command cannot be written. The cause is an ``OSError``."""


def add_json_argument(parser: argparse.ArgumentParser, kind: Callable[[str], str] = str) -> None:
    """Add the option ``--json [FILE]`` to ``parser``. ``kind``: function that checks and returns FILE."""
    about = "write JSON to FILE; without FILE print it instead of the table (write -- before a word that is no FILE)"
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", type=kind, help=about)


def error_text(error: Exception) -> str:
    """Return the text of an error for a message. That of an ``OSError`` about a file has the file, and no number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Return a context manager for a block that writes the file ``path``, which an option names. It raises
    :class:`UsageError` in place of an ``OSError`` of the block.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def check_output(path: str) -> None:
    """Raise :class:`UsageError` if the file ``path``, which an option names, cannot be written. No file is changed or
    left behind.
    """
    new = not os.path.lexists(path)
    # A pipe or a device is not opened: the reader of a pipe would see its end when this function closes it.
    if new or os.path.isfile(path) or os.path.isdir(path):
        with writing(path):
            open(path, "xb" if new else "ab").close()
            if new:
                os.unlink(path)


def write_file(path: str, text: str) -> None:
    """Write ``text`` in UTF-8 to the file ``path``, which an option names. Raises :class:`UsageError` if the file
    cannot be written.
    """
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


class Terminal:
    """Output of a command. In a terminal it has colours, and lines are folded.

    Each line is flushed, so that it appears at once, and so that a closed pipe is detected. Methods that print raise
    :class:`OutputError` if the output cannot be written.

    Parameters
    ----------
    json
        Value of the option ``--json``: the file to which :meth:`write_json` writes. ``"-"``: JSON replaces all lines.
        None: no JSON is written.
    """

    def __init__(self, json: str | None = None) -> None:
        self._json = json
        interactive = _is_terminal(sys.stdout)
        # As https://no-color.org says, every value of NO_COLOR except an empty one turns colours off.
        self.coloured: bool = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = shutil.get_terminal_size().columns if interactive else None
        self._drawn = False

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured and text else text

    bold: functools.partialmethod[str] = functools.partialmethod(_styled, "1")
    dim: functools.partialmethod[str] = functools.partialmethod(_styled, "2")
    good: functools.partialmethod[str] = functools.partialmethod(_styled, "32")
    bad: functools.partialmethod[str] = functools.partialmethod(_styled, "1;31")
    warning: functools.partialmethod[str] = functools.partialmethod(_styled, "33")

    def line(self, text: str = "") -> None:
        """Print a line, unless JSON replaces all lines. Raises :class:`OutputError` if the output cannot be written."""
        if self._json != "-":
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            self._erase()
            print(text, flush=True)
        except OSError as error:
            raise OutputError(error.strerror) from error

    def write_json(self, report: dict[str, Any]) -> None:
        """Write ``report`` as JSON to the file of ``--json``. For ``"-"`` the JSON is printed; without the option
        nothing is written. Raises :class:`UsageError` if the file cannot be written, and :class:`OutputError` if the
        JSON cannot be printed.
        """
        text = json.dumps(report, indent=2)
        if self._json == "-":
            self._print(text)
        elif self._json is not None:
            write_file(self._json, text + "\n")

    def fits(self, text: str) -> bool:
        """Whether ``text`` fits into one line of the terminal. True if the output is a pipe."""
        return self._width is None or _width(text) <= self._width

    def heading(self, text: str) -> None:
        """Print an empty line, and ``text`` as a title."""
        self.line()
        self.paragraph(self.bold(text), indent=0)

    def paragraph(self, text: str, indent: int = 2, first: str | None = None) -> None:
        """Print text, folded to the width of the terminal.

        ``indent``: number of spaces before each line. ``first``: text that replaces these spaces in the first line.
        """
        margin = " " * indent
        start = margin if first is None else first
        for part in [text] if self._width is None else _folded(text, max(self._width - indent, _NARROWEST)):
            self.line(start + part)
            start = margin

    def table(self, rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "") -> None:
        """Print rows in aligned columns.

        ``align`` has one letter for each column, ``l`` for left or ``r`` for right; default ``l``. A cell may have
        several lines. In a narrow terminal, titles and left-aligned columns are folded at words. If the table is still
        too wide, the first cell of a row stands alone, and the other cells below it, each after its title.
        """
        rows = list(rows)
        every = [header, *rows] if header else rows
        columns = list(zip(*every, strict=True))
        align = align.ljust(len(columns), "l")
        widths = [max(map(_width, column)) for column in columns]
        least = [_least(column, letter, bool(header)) for column, letter in zip(columns, align, strict=True)]
        # The last column, if left-aligned, often has sentences. Without a least width, these would be folded at each
        # word.
        if align.endswith("l") and widths:
            least[-1] = min(widths[-1], _NARROWEST)
        while not self._fits(widths) and widths != least:
            folding = [at for at, width in enumerate(widths) if width > least[at]]
            widths[max(folding, key=widths.__getitem__)] -= 1
        if not self._fits(widths):
            for first, *others in rows:
                self.paragraph(first)
                for title, cell in itertools.zip_longest(header[1:], others, fillvalue=""):
                    if cell:
                        self.paragraph(f"{title} {cell}".strip(), indent=6)
            return
        for row in every:
            style = self.dim if row is header else str
            cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
            for parts in itertools.zip_longest(*cells, fillvalue=""):
                self.line(style(_GAP.join(["", *map(_padded, parts, widths, align)]).rstrip()))

    def _fits(self, widths: Iterable[int]) -> bool:
        """Whether columns of these widths fit beside each other in the terminal."""
        return self._width is None or sum(len(_GAP) + width for width in widths) <= self._width

    @contextlib.contextmanager
    def progress(self, total: float = 1) -> Iterator[Callable[[str, float], None]]:
        """Show the progress of a ``with`` block on stderr, if that is a terminal. The block gets a function. The
        block calls this function with the name of the next step, and with the part of ``total`` that is done. Once that
        part is more than 0, the line also shows an estimate of the remaining time. At the end of the block the line is
        erased.
        """
        began = time.monotonic()

        def note(step: str, done: float) -> None:
            if not _is_terminal(sys.stderr):
                return
            share = f"{done / total:.0%}"
            if done:
                share += f", about {_time(max((time.monotonic() - began) * (total / done - 1), 1))} left"
            text = f"{share}: {step}"[: shutil.get_terminal_size().columns - 1]
            print(f"{_ERASE}{text}", end="", file=sys.stderr, flush=True)
            self._drawn = True

        try:
            yield note
        finally:
            self._erase()

    def _erase(self) -> None:
        """Erase the line that :meth:`progress` has printed, because other text follows."""
        if self._drawn:
            print(_ERASE, end="", file=sys.stderr, flush=True)
            self._drawn = False


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _width(text: str) -> int:
    """Return the width of a text in characters: that of its longest line, without escape codes for colours."""
    return max(map(len, _ESCAPES.sub("", text).split("\n")))


def _least(column: Sequence[str], letter: str, header: bool) -> int:
    """Return the least width of a column. ``letter``: its alignment. The width is that of its longest word, or of its
    figures and the words of its title.
    """
    folding = column if letter == "l" else column[:header]
    words = [word for text in folding for word in _ESCAPES.sub("", text).split()]
    figures = [_width(text) for text in column[len(folding) :]]
    return max([min(_width(word), _NARROWEST) for word in words] + figures, default=0)


def _folded(text: str, width: int) -> list[str]:
    """Fold a text at words to lines of at most ``width`` characters. Each line gets the colour of the text."""
    if _width(text) <= width:
        return text.split("\n")
    styled = _STYLED.fullmatch(text)
    code, plain, end = styled.groups() if styled else ("", _ESCAPES.sub("", text), "")
    return [f"{code}{part}{end}" for part in textwrap.wrap(plain, width)]


def _padded(text: str, width: int, align: str) -> str:
    padding = " " * (width - _width(text))
    return padding + text if align == "r" else text + padding
