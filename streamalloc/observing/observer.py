"""The public interface of observers: :class:`Observer` and :func:`observe`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamalloc.core.errors import ClosedError, size_text
from streamalloc.core.html import Drawn
from streamalloc.core.internal import Allocator, Device
from streamalloc.core.properties import checked_size, checked_type
from streamalloc.core.resource import Leaves
from streamalloc.core.session import Session, session_of
from streamalloc.driver import default as default_driver
from streamalloc.multicast import SymmetricMemory
from streamalloc.observing import export
from streamalloc.observing.account import Account, Hook
from streamalloc.observing.records import Allocation, Happening, Phase
from streamalloc.observing.report import LeakReport
from streamalloc.vmm import AddressRange, PageSpace, VirtualBuffer

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.driver import Driver


class Observer(Drawn, Leaves):
    """Records live allocations with their time and source line; made by :func:`observe`.

    It records from :meth:`start` to :meth:`stop`; a ``with`` block calls both. Its records can be read after the block.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.phases: list[Phase] = []
        """All phases so far, in order of their start."""

    # -- beginning and end -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to observe; idempotent."""
        self._account.start()
        return self

    def stop(self) -> None:
        """Stop observing; idempotent. Allocators without other observers lose the extra cost."""
        self._account.stop()

    def __enter__(self) -> Self:
        return self.start()

    def _leave(self, *, failed: bool) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether it is observing."""
        return self._account.started

    @property
    def limit(self) -> int:
        """Most bytes allocated at once; 0 for no limit. Assign to change it."""
        return self._account.limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._account.limit = checked_size("limit", nbytes)

    # -- records ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[Allocation, ...]:
        """Live allocations, oldest first."""
        self._account.settle()
        return tuple(self._account.live.values())

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, in requested sizes."""
        self._account.settle()
        return self._account.nbytes

    @property
    def peak(self) -> int:
        """Most bytes allocated at once."""
        self._account.settle()
        return self._account.peak

    @property
    def history(self) -> tuple[Happening, ...]:
        """Allocations, frees and failures, oldest first. With ``observe(history=n)``, only the last n."""
        self._account.settle()
        return tuple(self._account.happened)

    def leaks(self) -> LeakReport:
        """A report of the live allocations, by the line that allocated them."""
        return LeakReport(self.live)

    def assert_nothing_left(self) -> None:
        """Raise :class:`LeakError` if memory is still allocated; the error has the bytes and the lines."""
        self.leaks().raise_if_any()

    @contextlib.contextmanager
    def phase(self, name: str, limit: int = 0) -> Iterator[Phase]:
        """A named ``with`` block, whose peak of allocated bytes is recorded.

        Phases may be nested, and several threads may each be in a phase. Every phase counts the memory of all threads.

        Parameters
        ----------
        name
            Name of the phase. Several phases may have the same name.
        limit
            Most bytes allocated at once during the phase; 0 for no limit.
        """
        checked_type("name", name, str)
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
        """A ``with`` block in which allocations of this thread or task get a tag."""
        token = self._account.tag.set(checked_type("tag", tag, str))
        try:
            yield
        finally:
            self._account.tag.reset(token)

    # -- files for other tools -------------------------------------------------------------------------------

    def save_pytorch(self, path: str | Path) -> None:
        """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz): a pickle of plain dictionaries."""
        export.save_pytorch(path, self.history, self.live)

    def save_rmm(self, path: str | Path) -> None:
        """Write a log in RMM's format (CSV), which :func:`streamalloc.traces.load` reads.

        After RMM's columns come the names of pool and stream, tag, phase, and the line of the program.
        """
        export.save_rmm(path, self.history)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for Perfetto and Chrome (JSON): bytes of each source over time, and phases."""
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
    *what: Device | Allocator | VirtualBuffer | AddressRange | PageSpace | SymmetricMemory,
    limit: int = 0,
    depth: int = 1,
    history: int | None = 1 << 20,
    on_allocate: Hook | None = None,
    on_free: Hook | None = None,
    nvtx: bool = False,
    log: str | Path | None = None,
    driver: Driver | None = None,
) -> Observer:
    """Make an observer of memory for a ``with`` block: allocations, their lines, limits and leaks.

    It records every allocation and free, including those of finalisers and deferred frees. Meanwhile an
    :class:`OutOfMemoryError` names the lines that hold the memory (``holders``). Several observers may observe the same
    memory, and start and stop in any order. Not recorded: memory allocated before the start (except existing mappings
    of the objects passed), memory owned by the graph of a capture, and memory that another library allocates from a
    pool's handle.

    Parameters
    ----------
    what
        Pools, caches (with their pool), growable and striped buffers, address ranges, spaces of pages (the committed
        ones), symmetric memory; or devices, for all of these in the device's memory, including later ones. Default:
        everything of ``driver``. Allocations without a pool (:func:`streamalloc.allocate`) are observed with their
        device. In a range or buffer that was passed each mapping counts; else memory counts at its first mapping, until
        that is closed, and memory of another process does not count.
    limit
        Most bytes allocated at once; 0 for no limit. A larger allocation raises :class:`OutOfMemoryError` before the
        driver is called. Threads that allocate at the same moment may together exceed the limit.
    depth
        Stack frames to record of each allocation; 1: only the line that called the library; 0: none.
    history
        Number of allocations and frees to keep; None: all.
    on_allocate, on_free
        Functions called with the :class:`Allocation`. If ``on_allocate`` raises, the memory is freed and the caller of
        the allocation gets the error. If ``on_free`` raises, the memory is freed and the caller of the free gets it.
        For memory freed by a finaliser, ``on_free`` is called at the next allocation, free, or read of the observer.
    nvtx
        True: phases are NVTX ranges, and the allocated bytes an NVTX counter (needs ``nvtx``).
    log
        A file that gets a line for each allocation, free and failure at once, so it is complete even if the process is
        killed. The format is that of :meth:`Observer.save_rmm`. Frees by finalisers are written with the next line.
    driver
        The driver to observe if ``what`` is empty.

    Raises
    ------
    TypeError, ValueError
        An object cannot be observed, a hook is not a function, or a number is out of range.
    ClosedError
        An object was closed.

    Examples
    --------
    >>> with observe(pool, limit=1 << 30) as observer:
    ...     run()
    >>> observer.assert_nothing_left()
    """
    checked_size("limit", limit)
    for name, value in (("depth", depth), ("history", 0 if history is None else history)):
        if checked_type(name, value, int) < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    for name, hook in (("on_allocate", on_allocate), ("on_free", on_free)):
        if not (hook is None or callable(hook)):
            raise TypeError(f"{name} must be a function, not {type(hook).__name__} ({hook!r})")
    for one in what:
        if not isinstance(one, (Device, Allocator, VirtualBuffer, AddressRange, PageSpace, SymmetricMemory)):
            raise TypeError(
                f"what: {one!r} is no device, pool, cache, virtual or symmetric memory, address range or space of pages"
            )
        if getattr(one, "closed", False):
            raise ClosedError(f"{one!r} was closed")
    sessions = [Session.of(one.driver) if isinstance(one, SymmetricMemory) else session_of(one) for one in what]
    if not what:
        sessions = [Session.of(default_driver() if driver is None else driver)]
    elif driver is not None:
        raise ValueError("driver: what is observed has a driver already")
    profiler = export.Profiler() if nvtx else None
    return Observer(Account(dict.fromkeys(sessions), what, limit, depth, history, on_allocate, on_free, profiler, log))
