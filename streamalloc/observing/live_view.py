"""Live view of the pools of this process, in a terminal or a notebook.

A thread reads the statistics of the pools, which frees no memory and invalidates no capture. The first bar of a pool
shows which part of its reserved memory is used. The second bar shows which part of its capacity is reserved.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from streamalloc.core.errors import ClosedError, CudaError
from streamalloc.core.internal import Device, deferred_queue
from streamalloc.core.properties import MemLocationType
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of, sessions
from streamalloc.formats.html import gauge, mib, place, table
from streamalloc.pool import MemoryPool, PoolStatistics
from streamalloc.pool.internal import known_pools

_HEAD = ("pool", "used", "reserved", "most used", "most reserved")


class PoolFigures(NamedTuple):
    """Statistics of one pool at one moment. :meth:`LiveView.figures` returns a list of these."""

    name: str
    """Name of the pool. Without a name, its location and handle."""
    now: PoolStatistics
    capacity: int
    """Largest number of bytes that the pool can reserve: its ``max_size``, or all memory of its location."""


def _name(pool: MemoryPool) -> str:
    return pool.name or f"{place(pool.location)}, {int(pool.checked_raw()):#x}"


def _capacity(pool: MemoryPool) -> int:
    if pool.properties is not None and pool.properties.max_size:
        return pool.properties.max_size
    if pool.location.type is MemLocationType.DEVICE:
        return Device(pool.location.id, driver=session_of(pool).driver).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _figures(pool: MemoryPool) -> PoolFigures | None:
    """Return the statistics of a pool; None if the pool was closed, or if a stream is being captured."""
    session = session_of(pool)
    if not session.usable or deferred_queue(session).captures:
        return None
    try:
        read = pool.attributes
        with session.relaxed():
            reserved = read.reserved_mem_current, read.reserved_mem_high
            now = PoolStatistics(*reserved, read.used_mem_current, read.used_mem_high)
            return PoolFigures(_name(pool), now, _capacity(pool))
    except (ClosedError, CudaError):
        return None


class _Screen(NamedTuple):
    """Output of a view: a function that shows figures, and one that ends the output."""

    show: Callable[[list[PoolFigures]], object]
    end: Callable[[], object] = lambda: None


def _rows(figures: list[PoolFigures], shown: Callable[[int, int], str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, with a text for each column of ``_HEAD``. ``shown`` formats a value and its total as
    a bar.
    """
    for name, now, capacity in figures:
        shares = shown(now.used, now.reserved), shown(now.reserved, capacity)
        yield name, *shares, mib(now.used_high), mib(now.reserved_high)


def _html(figures: list[PoolFigures]) -> str:
    return table(_HEAD, _rows(figures, gauge)) if figures else "no pools"


def _terminal() -> _Screen:
    try:
        names = ("live", "table", "text")
        rich_live, rich_table, rich_text = (importlib.import_module(f"rich.{name}") for name in names)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise ModuleNotFoundError("rich is not installed: pip install 'streamalloc[live]'", name="rich") from None

    def renderable(figures: list[PoolFigures]) -> Any:
        made = rich_table.Table(*_HEAD)
        for row in _rows(figures, _bar):
            made.add_row(*map(rich_text.Text, row))  # rich would read brackets in a str as markup.
        return made

    view = rich_live.Live(renderable([]), auto_refresh=False)
    view.start()
    return _Screen(lambda figures: view.update(renderable(figures), refresh=True), view.stop)


def _bar(value: int, total: int) -> str:
    full = round(10 * value / total) if total else 0
    return f"{'█' * full}{'░' * (10 - full)} {mib(value)}"


def _notebook() -> _Screen:
    display = importlib.import_module("IPython.display")
    handle = display.display(display.HTML(_html([])), display_id=True)
    return _Screen(lambda figures: handle.update(display.HTML(_html(figures))))


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_shell() if get_shell is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class LiveView(Closes):
    """View of pools that a thread updates until :meth:`stop`: the result of :func:`live`."""

    def __init__(self, pools: tuple[MemoryPool, ...], every: float) -> None:
        self._pools = pools
        self._every = every
        self._over = threading.Event()
        self._running: tuple[threading.Thread, _Screen] | None = None

    def figures(self) -> list[PoolFigures]:
        """Return the current statistics of the pools that are not closed. While this package captures a stream, pools
        of the stream's driver are left out.
        """
        pools = self._pools or [pool for session in sessions() for pool in known_pools(session)]
        return [found for found in map(_figures, pools) if found is not None]

    @property
    def running(self) -> bool:
        """Whether the thread of :meth:`start` updates the view; False after :meth:`stop`, or if an error has ended the
        thread.
        """
        return self._running is not None and self._running[0].is_alive()

    def start(self) -> LiveView:
        """Show the view, and update it from a thread until :meth:`stop`. Returns the view. A second call does nothing.

        Raises ``ModuleNotFoundError`` in a terminal without ``rich``.
        """
        if self._running is None:
            self._over.clear()
            screen = _notebook() if _in_notebook() else _terminal()
            thread = threading.Thread(target=self._run, args=(screen,), name="streamalloc live view", daemon=True)
            self._running = thread, screen
            thread.start()
        return self

    def _run(self, screen: _Screen) -> None:
        while not self._over.is_set():
            screen.show(self.figures())
            self._over.wait(self._every)

    def stop(self) -> None:
        """Update the view a last time, and leave it on the screen. :meth:`start` can show the view again. A second call
        does nothing.
        """
        running, self._running = self._running, None
        if running is not None:
            thread, screen = running
            self._over.set()
            try:
                thread.join()
                screen.show(self.figures())
            finally:
                screen.end()

    def close(self) -> None:
        """Stop the view (:meth:`stop`). The end of a ``with`` block calls this method. Idempotent."""
        self.stop()

    def __enter__(self) -> LiveView:
        return self.start()

    def _text(self) -> str:
        return ", running" if self.running else ", stopped"


def live(*pools: MemoryPool, every: float = 0.5) -> LiveView:
    """Return a view of pools that is updated within its ``with`` block, or from ``start()`` to ``stop()``.

    :doc:`/docs/guides/observe` has a program.

    In Jupyter the view is an output of the cell, and is updated even while a cell runs. In a terminal ``rich`` draws a
    table.

    Parameters
    ----------
    pools
        The pools to show; default: all pools of this process, including later ones.
    every
        Seconds between updates.

    Raises
    ------
    TypeError, ValueError
        An argument is not a pool, or ``every`` is not positive, or is longer than a thread can wait.
    ModuleNotFoundError
        Raised by ``start()`` in a terminal: ``rich`` is not installed.
    """
    for one in pools:
        if not isinstance(one, MemoryPool):
            raise TypeError(f"pools: {one!r} is no MemoryPool")
    if not 0 < every <= threading.TIMEOUT_MAX:
        raise ValueError(f"every={every!r}: it has to be more than 0 seconds, and at most {threading.TIMEOUT_MAX:.0f}")
    return LiveView(pools, every)
