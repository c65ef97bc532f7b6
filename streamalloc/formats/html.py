"""HTML for notebooks: a card shows an object as a small table of its properties. Text is escaped.

The class of the object gives the rows of the card (:meth:`Shown._about`). Locations have the same colours as in
figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

draw: Callable[..., Any] | None = None
"""Function that calls ``streamalloc.plots.draw``. ``streamalloc/__init__.py`` sets it, because this folder may not
import ``plots``; None before.
"""

_DEVICES = ("#3f78b5", "#e0923d", "#8a6fb0", "#c45d7c", "#4a9aa5", "#a3863c", "#7d8794", "#b3563e")
_HOST = "#5f9467"
_ELSEWHERE = "#6e7781"
# Without this style, Jupyter aligns the text of cells to the right.
_LEFT = " style='text-align:left'"


class _Location(Protocol):
    @property
    def type(self) -> Any: ...
    @property
    def id(self) -> int: ...
    @property
    def on_host(self) -> bool: ...


class Html(str):
    """Text that is HTML already, and must not be escaped."""

    __slots__ = ()


Row: TypeAlias = tuple[str, object]
"""Title and value of a row of a card. The card shows :class:`Html` as it is, and other values as their ``str``. A size
is given as the text of :func:`mib`.
"""


def escape(text: str) -> str:
    """Return ``text`` with HTML's special characters escaped (:func:`html.escape`)."""
    # html is imported here, because its table of entities takes a tenth of the package's import time.
    import html

    return html.escape(text)


def mib(nbytes: int) -> str:
    """Return a size in MiB as text, with one decimal."""
    return f"{nbytes / 2**20:,.1f} MiB"


def place(location: _Location) -> str:
    """Return a location as text for tables: ``GPU 0``, ``host, node 1`` or ``host``.

    For managed memory, and memory without a location, the text is ``several places``.
    """
    if location.type.name == "DEVICE":
        return f"GPU {location.id}"
    if location.type.name == "HOST_NUMA":
        return f"host, node {location.id}"
    return "host" if location.on_host else "several places"


def color_of(location: _Location) -> str:
    """Return the colour of a location as ``#rrggbb``. GPUs 0 to 7 have different colours, which repeat from GPU 8 on.
    The host has one colour, and all other locations have another.
    """
    if location.type.name == "DEVICE":
        return _DEVICES[location.id % len(_DEVICES)]
    return _HOST if location.on_host else _ELSEWHERE


def _cell(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """Return an HTML table of ``rows``, with a row of titles if ``head`` is not empty.

    Values are escaped, unless they are :class:`Html`.
    """
    titles = "".join(f"<th{_LEFT}>{_cell(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td{_LEFT}>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return Html(f"<table>{f'<thead><tr>{titles}</tr></thead>' if titles else ''}<tbody>{body}</tbody></table>")


def code(text: str) -> Html:
    """Return a text as HTML in a fixed-width font."""
    return Html(f"<code>{escape(text)}</code>")


def gauge(value: int, total: int) -> Html:
    """Return an HTML bar of ``value`` in ``total``, both in bytes. The text beside it has both in MiB, or in GiB if
    ``total`` is at least 10 GiB.
    """
    unit, scale = ("GiB", 1 << 30) if total >= 10 << 30 else ("MiB", 1 << 20)
    bar = f"<progress max='{max(total, 1)}' value='{value}'></progress>"
    share = f"{value / scale:,.1f} {unit} of {total / scale:,.1f} {unit}"
    return Html(f"<span style='white-space:nowrap'>{bar} {share}</span>")


def strip(nbytes: int, pieces: Iterable[tuple[int, int, _Location, str]]) -> Html:
    """Return an HTML strip for an address range of ``nbytes`` bytes, with one piece for each mapping. A piece is offset
    and size in bytes, location, and tooltip text.
    """
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
    """Object that notebooks show as a card: a small table of its properties."""

    __slots__ = ()

    def _about(self) -> Iterator[Row]:
        """Yield the rows of the card. The method may raise for a closed object."""
        return iter(())

    def _card(self) -> list[Row]:
        """Return the rows of the card; no rows for an object that is closed, freed, evicted or half-made."""
        try:
            return list(self._about())
        except Exception:
            return []

    def _repr_html_(self) -> str:
        rows = self._card()
        return f"<b>{escape(type(self).__name__)}</b>{table((), rows)}" if rows else code(repr(self))

    def __rich__(self) -> Any:
        """Return the card as a table of ``rich``, for ``rich.print``."""
        # rich is optional, and only rich calls this method.
        from html import unescape
        from importlib import import_module

        made = import_module("rich.table").Table(title=type(self).__name__, show_header=False, title_justify="left")
        for name, value in self._card() or [("", repr(self))]:
            text = unescape(re.sub("<[^>]*>", " ", value)) if isinstance(value, Html) else str(value)
            if text.strip():
                made.add_row(name, import_module("rich.text").Text(" ".join(text.split())))
        return made


class Drawn(Shown):
    """Base class of objects with a method :meth:`plot`, for example pools, address ranges and observers."""

    __slots__ = ()

    def plot(self, **options: Any) -> Any:
        """Draw the object with matplotlib. Returns the figure.

        ``options``: keyword arguments of :func:`streamalloc.plots.pool`, or of :func:`~streamalloc.plots.address_range`
        for ranges and buffers of ``vmm``; an observer takes none.

        Raises
        ------
        ModuleNotFoundError
            ``matplotlib`` is not installed.
        ClosedError
            The object is a closed pool.
        TypeError
            The function does not have one of the ``options``.
        """
        assert draw is not None
        return draw(self, **options)
