"""Observers: who has which memory, since when and from which line, and what people do with that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamalloc.core.internal import (
    Allocator,
    ClosedError,
    Device,
    Drawn,
    Leaves,
    Session,
    checked_size,
    session_of,
    size_text,
)
from streamalloc.driver import default as default_driver
from streamalloc.multicast import SymmetricMemory
from streamalloc.observing import export
from streamalloc.observing.account import Account, Hook
from streamalloc.observing.profiler import Profiler
from streamalloc.observing.records import Allocation, Happening, Phase
from streamalloc.observing.report import LeakReport
from streamalloc.vmm import AddressRange, VirtualBuffer

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.driver import Driver

__all__ = ["Observer", "observe"]


class Observer(Drawn, Leaves):
    """Knows which memory is allocated, since when and from which line; made by :func:`observe`.

    It observes from :meth:`start` to :meth:`stop`, which a ``with`` block calls, and can be asked after that, too.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.phases: list[Phase] = []
        """All phases so far, in the order in which they began."""

    # -- beginning and end -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Observe from now on. Idempotent."""
        self._account.start()
        return self

    def stop(self) -> None:
        """Observe no more. Idempotent. Allocators have their own functions again, unless others observe them."""
        self._account.stop()

    def __enter__(self) -> Self:
        return self.start()

    def _leave(self, *, failed: bool) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether it observes now."""
        return self._account.started

    @property
    def limit(self) -> int:
        """The most bytes that may be allocated at once; 0 for no limit. It can be assigned."""
        return self._account.limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._account.limit = checked_size("limit", nbytes)

    # -- what it knows ---------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[Allocation, ...]:
        """What is allocated, in the order in which it was."""
        self._account.settle()
        return tuple(self._account.live.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, in requested sizes."""
        self._account.settle()
        return self._account.nbytes

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at once."""
        self._account.settle()
        return self._account.peak

    @property
    def history(self) -> tuple[Happening, ...]:
        """All that happened, the oldest first; where the observer was told how much to keep, the last so many."""
        self._account.settle()
        return tuple(self._account.happened)

    def leaks(self) -> LeakReport:
        """What is allocated now, by the place that asked for it."""
        return LeakReport(self.live)

    def assert_nothing_left(self) -> None:
        """Raise :class:`LeakError` where something is still allocated; the error says how much and from where."""
        self.leaks().raise_if_any()

    @contextlib.contextmanager
    def phase(self, name: str, limit: int = 0) -> Iterator[Phase]:
        """A named stretch of the program, as a ``with`` block: the most memory during it is noted.

        Phases may lie in each other, and be entered by several threads; all memory counts in each of them.

        Parameters
        ----------
        name
            What it is called. A phase may be entered many times.
        limit
            The most bytes that may be allocated at once during it; 0 for no limit.
        """
        checked_size("limit", limit)
        account = self._account
        account.settle()
        phase = Phase(name, account.phase.get(), account.nbytes, limit)
        range_ = contextlib.nullcontext() if account.profiler is None else account.profiler.range(name)
        token = account.phase.set(phase)
        try:
            with range_:
                self.phases.append(phase)
                account.begin(phase)
                yield phase
        finally:
            account.settle()
            account.end(phase)
            phase.after = account.nbytes
            phase.ended = time.time_ns()
            account.phase.reset(token)

    @contextlib.contextmanager
    def tag(self, tag: str) -> Iterator[None]:
        """A ``with`` block in which what this thread (or task) allocates is said to be for ``tag``."""
        token = self._account.tag.set(tag)
        try:
            yield
        finally:
            self._account.tag.reset(token)

    # -- what others open ------------------------------------------------------------------------------------

    def save_pytorch(self, path: str | Path) -> None:
        """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz): a pickle of plain dictionaries."""
        export.save_pytorch(path, self.history, self.live)

    def save_rmm(self, path: str | Path) -> None:
        """Write a log as RMM's does: CSV, which :func:`streamalloc.traces.from_rmm` reads, too."""
        export.save_rmm(path, self.history)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for Perfetto and Chrome (JSON): bytes of each source over time, and the phases."""
        export.save_chrome(path, self.history, self.live, self.phases)

    def __repr__(self) -> str:
        if not hasattr(self, "_account"):
            return f"<{type(self).__name__} that could not be made>"
        known = self._account
        state = "observes" if known.started else "stopped"
        return f"<Observer, {state}: {size_text(known.nbytes)} in {len(known.live)} allocations>"

    def _repr_html_(self) -> str:
        return self.leaks()._repr_html_()


def observe(
    *what: Device | Allocator | VirtualBuffer | AddressRange | SymmetricMemory,
    limit: int = 0,
    depth: int = 1,
    history: int | None = 1 << 20,
    on_allocate: Hook | None = None,
    on_free: Hook | None = None,
    nvtx: bool = False,
    driver: Driver | None = None,
) -> Observer:
    """An observer of memory, for a ``with`` block: what is allocated, since when, from which line, and what leaks.

    It is told of each allocation and each free, those of finalisers and those that were left for later included.
    Several observers may be there at once, begin and end in any order, and observe the same memory. What was allocated
    before it began is not known to it, except what is mapped in the objects that it was given. Not seen is memory that
    the graph of a capture owns, and what another library allocates by a pool's handle, past this one.

    Parameters
    ----------
    what
        Pools, caches (with their pool), growable and striped buffers, address ranges, symmetric memory, or devices,
        which means all of that in their memory, also what is made later. Nothing: everything of ``driver``. Allocations
        that name no pool (:func:`streamalloc.allocate`) are observed with their device. Of what is mapped in more
        places than one the first counts, and what another process has made counts nothing.
    limit
        The most bytes that may be allocated at once. Beyond that :class:`OutOfMemoryError` is raised, before the
        driver is asked. Threads that allocate at the same moment may exceed it by what they ask for.
    depth
        How many frames of the program are kept of each allocation; 1 is the line that called the library.
    history
        How much of what happened is kept, for what is exported: the last so many allocations and frees; None keeps all.
    on_allocate, on_free
        Called with the :class:`Allocation`. What a hook raises goes to who allocates, and the memory is given back; or
        to who frees, and the memory is freed. Memory that a finaliser has freed is told of at the next call.
    nvtx
        Whether phases are NVTX ranges, and what is allocated an NVTX counter, which profilers show (needs ``nvtx``).
    driver
        The driver to observe where ``what`` names nothing.

    Raises
    ------
    TypeError, ValueError
        Something cannot be observed, or a number is out of range.
    ClosedError
        Something was closed.
    """
    checked_size("limit", limit)
    for name, value in (("depth", depth), ("history", 0 if history is None else history)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__} ({value!r})")
        if value < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    for one in what:
        if not isinstance(one, (Device, Allocator, VirtualBuffer, AddressRange, SymmetricMemory)):
            raise TypeError(f"what: {one!r} is no device, pool, cache, virtual or symmetric memory, or address range")
        if getattr(one, "closed", False):
            raise ClosedError(f"{one!r} was closed")
    sessions = [Session.of(one.driver) if isinstance(one, SymmetricMemory) else session_of(one) for one in what]
    if not what:
        sessions = [Session.of(default_driver() if driver is None else driver)]
    elif driver is not None:
        raise ValueError("driver: what is observed has a driver already")
    profiler = Profiler() if nvtx else None
    return Observer(Account(dict.fromkeys(sessions), what, limit, depth, history, on_allocate, on_free, profiler))
