"""HTML cards of objects for notebooks: one layout per kind, sizes in MiB, all text escaped.

A class yields the rows of its card (:meth:`Shown._about`). Locations have the colours of :mod:`streamalloc.plots`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

draw: Callable[..., Any] | None = None
"""``streamalloc.plots.draw``, imported on use; set by ``streamalloc/__init__.py``."""

_DEVICES = ("#3f78b5", "#e0923d", "#8a6fb0", "#c45d7c", "#4a9aa5", "#a3863c", "#7d8794", "#b3563e")
_HOST = "#5f9467"
_ELSEWHERE = "#6e7781"
# Jupyter would align the text of cells to the right.
_LEFT = " style='text-align:left'"


class _Location(Protocol):
    @property
    def type(self) -> Any: ...
    @property
    def id(self) -> int: ...
    @property
    def on_host(self) -> bool: ...


class Html(str):
    """Text that is HTML, and is not escaped."""

    __slots__ = ()


Row: TypeAlias = tuple[str, object]
"""Title and value of a row, shown by ``str``; :func:`mib` formats sizes."""


def escape(text: str) -> str:
    """The text as HTML (:func:`html.escape`)."""
    # Imported late: its entity table takes a tenth of the package's import time.
    import html

    return html.escape(text)


def mib(nbytes: int) -> str:
    """A size in MiB, with one decimal."""
    return f"{nbytes / 2**20:,.1f} MiB"


def place(location: _Location) -> str:
    """The location of memory, as a label."""
    if location.type.name == "DEVICE":
        return f"GPU {location.id}"
    if location.type.name == "HOST_NUMA":
        return f"host, node {location.id}"
    return "host" if location.on_host else "several places"


def color_of(location: _Location) -> str:
    """The colour of a location."""
    if location.type.name == "DEVICE":
        return _DEVICES[location.id % len(_DEVICES)]
    return _HOST if location.on_host else _ELSEWHERE


def _cell(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """Return a table. Values other than :class:`Html` are escaped."""
    titles = "".join(f"<th{_LEFT}>{_cell(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td{_LEFT}>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return Html(f"<table>{f'<thead><tr>{titles}</tr></thead>' if titles else ''}<tbody>{body}</tbody></table>")


def code(text: str) -> Html:
    """Text in the font of programs."""
    return Html(f"<code>{escape(text)}</code>")


def gauge(value: int, total: int) -> Html:
    """Bar and text for a value and its total, in MiB; in GiB if the total is 10 GiB or more."""
    unit, scale = ("GiB", 1 << 30) if total >= 10 << 30 else ("MiB", 1 << 20)
    bar = f"<progress max='{max(total, 1)}' value='{value}'></progress>"
    share = f"{value / scale:,.1f} {unit} of {total / scale:,.1f} {unit}"
    return Html(f"<span style='white-space:nowrap'>{bar} {share}</span>")


def strip(nbytes: int, pieces: Iterable[tuple[int, int, _Location, str]]) -> Html:
    """A strip of an address range. Each piece is offset, size, location and text; gaps are holes."""
    parts = []
    for offset, size, where, text in pieces:
        left, width = 100 * offset / nbytes, 100 * size / nbytes
        parts.append(
            f"<div title='{escape(text)}' style='position:absolute;left:{left:.3f}%;width:{width:.3f}%;"
            f"height:100%;background:{color_of(where)};box-sizing:border-box;border-right:1px solid white'></div>"
        )
    frame = "position:relative;height:18px;width:480px;max-width:100%;border:1px dashed #6e7781"
    return Html(f"<div style='{frame}'>{''.join(parts)}</div>")


class Shown:
    """An object that notebooks show as a card."""

    __slots__ = ()

    def _about(self) -> Iterator[Row]:
        """Yield the rows of the card. May raise for a closed object."""
        return iter(())

    def _card(self) -> list[Row]:
        """The rows of the card; none for a closed, freed, evicted or half-made object."""
        try:
            return list(self._about())
        except Exception:
            return []

    def _repr_html_(self) -> str:
        rows = self._card()
        return f"<b>{escape(type(self).__name__)}</b>{table((), rows)}" if rows else code(repr(self))

    def __rich__(self) -> Any:
        """The card in a terminal, for ``rich.print``."""
        # Only rich calls this, so that rich is there.
        from html import unescape
        from importlib import import_module

        made = import_module("rich.table").Table(title=type(self).__name__, show_header=False, title_justify="left")
        for name, value in self._card() or [("", repr(self))]:
            text = unescape(re.sub("<[^>]*>", " ", value)) if isinstance(value, Html) else str(value)
            if text.strip():
                made.add_row(name, import_module("rich.text").Text(" ".join(text.split())))
        return made


class Drawn(Shown):
    """An object that can be drawn."""

    __slots__ = ()

    def plot(self, **options: Any) -> Any:
        """Draw the object with matplotlib and return the figure. ``options``: see the function of
        :mod:`streamalloc.plots` for its kind.

        Raises
        ------
        ModuleNotFoundError
            ``matplotlib`` is not installed.
        """
        assert draw is not None
        return draw(self, **options)
