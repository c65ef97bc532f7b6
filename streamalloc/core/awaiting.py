"""``await event`` and ``await stream`` in :mod:`asyncio`, without threads.

Each event loop has one timer for all its waits. It queries the events (``cuEventQuery``) at every turn of the loop
during the first 0.1 ms of a wait, then at intervals. The interval grows from 1 to 10 ms with the age of the youngest
wait. It is at least 20 times the duration of the queries. The timer keeps the waits alive, so a closed loop drops them.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future, TimerHandle

    from streamalloc.core.session import Session

_TURNS = 1e-4
"""Seconds during which every loop turn queries a new wait."""
_SHORTEST, _LONGEST = 1e-3, 1e-2
"""Seconds between queries."""
_SHARE = 20
"""Minimum ratio of an interval to the duration of the previous queries."""


class Awaited(Protocol):
    """An event."""

    @property
    def _session(self) -> Session: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


async def finished(event: Awaited) -> None:
    """Wait as :meth:`Event.synchronize` does, without blocking the running loop."""
    # A running loop has already imported it. At module level the import would double the package's import time.
    from asyncio import get_running_loop

    loop = get_running_loop()
    with event._session.relaxed():
        if event.query():
            event.synchronize()
            return
    poller = _pollers.get(id(loop))
    if poller is None:
        poller = _pollers[id(loop)] = _Poller()
    future = loop.create_future()
    poller.add(loop, future, event)
    try:
        await future
    finally:
        poller.waits.pop(future, None)


async def finished_once(event: Awaited) -> None:
    """Wait for an event that only this function uses, then close it."""
    with contextlib.closing(event):
        await finished(event)


class _Poller:
    """The waits of one loop: event and start time, by future."""

    __slots__ = ("__weakref__", "_timer", "waits")

    def __init__(self) -> None:
        self.waits: dict[Future[None], tuple[Awaited, float]] = {}
        self._timer: TimerHandle | None = None

    def add(self, loop: AbstractEventLoop, future: Future[None], event: Awaited) -> None:
        self.waits[future] = event, loop.time()
        if self._timer is not None:
            if self._timer.when() <= loop.time():
                return
            self._timer.cancel()
        self._timer = loop.call_later(0, self._look, loop)

    def _look(self, loop: AbstractEventLoop) -> None:
        """Query all events, and set the timer again if some are not done."""
        began = loop.time()
        self._timer = None
        for session in dict.fromkeys(event._session for event, _ in self.waits.values()):
            self._query(session)
        # A wait is removed later, when its task continues.
        ages = [began - since for future, (_, since) in self.waits.items() if not future.done()]
        if ages:
            age, now = min(ages), loop.time()
            interval = 0 if age < _TURNS else min(max(age / 8, _SHORTEST), _LONGEST)
            self._timer = loop.call_later(max(interval, _SHARE * (now - began) * (age >= _TURNS)), self._look, loop)

    def _query(self, session: Session) -> None:
        waits = [(future, event) for future, (event, _) in self.waits.items() if event._session is session]
        try:
            # A query in another mode would invalidate captures of other streams.
            with session.relaxed():
                for future, event in waits:
                    _settle(future, event)
        except Exception as error:  # of a forked child, or a lost context
            for future, _ in waits:
                if not future.done():
                    future.set_exception(error)


def _settle(future: Future[None], event: Awaited) -> None:
    """End a wait if its event is done or closed, or if the query fails."""
    if future.done():  # cancelled
        return
    try:
        if event.query():
            # Returns at once. It makes the driver see that the frees before the event have run.
            event.synchronize()
            future.set_result(None)
    except Exception as error:
        future.set_exception(error)


# By id of the loop. The loop's timer keeps its poller alive, and the poller's futures keep the loop.
_pollers: weakref.WeakValueDictionary[int, _Poller] = weakref.WeakValueDictionary()
