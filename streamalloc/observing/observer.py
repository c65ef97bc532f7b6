"""Observers (:func:`observe`, :class:`Observer`), and the account of live allocations of each observer.

A thread that allocates or frees appends a note to a deque. This takes no lock, because a finaliser may free memory on a
thread that holds the lock. Afterwards the thread takes the lock and enters all notes, which updates the account.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Self

from streamalloc.core.errors import ClosedError, OutOfMemoryError, refused, size_text, warn
from streamalloc.core.internal import Allocator, Device, name_of_stream, watching_of, work
from streamalloc.core.properties import MemLocation, checked_function, checked_number, checked_size, checked_type
from streamalloc.core.resource import Leaves
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import RLock
from streamalloc.formats.html import Drawn
from streamalloc.multicast import SymmetricMemory
from streamalloc.observing import export
from streamalloc.observing.records import Action, Allocation, Happening, LeakReport, Phase, Source, largest, sites
from streamalloc.pool.internal import CachingAllocator, collect_dropped
from streamalloc.vmm import AddressRange, PageSpace, VirtualBuffer
from streamalloc.vmm.internal import MappedMemory, is_counted, unwatch_mappings, watch_mappings

Hook = Callable[[Allocation], object]


class Counters(NamedTuple):
    """Numbers of allocations and bytes while an observer recorded: the result of :meth:`Observer.counters`."""

    nbytes: int
    """Bytes allocated now."""
    peak: int
    """Most bytes allocated at once."""
    live: int
    """Number of allocations that are live now."""
    allocations: int
    """Number of allocations in total."""
    total: int
    """Bytes allocated in total."""
    live_high: int
    """Largest number of allocations that were live at once."""
    largest: int
    """Size of the largest allocation in bytes."""
    failures: int
    """Number of allocation calls that the driver refused. Such an allocation may have succeeded at a second attempt,
    after memory was released.
    """


# Kinds of notes (first item of each note in ``Account._notes``).
_ALLOCATED, _FREED, _FREE_FAILED, _ALLOCATION_FAILED = range(4)
# Number of latest frees to keep. A free is noted before the driver call, because another thread may get the memory
# during the call. If the driver then refuses the free, the allocation is put back.
_REMEMBERED = 256


@dataclass(eq=False, repr=False)
class Account:
    """Account of one observer: live allocations, history, limits and hooks. Allocators call its methods."""

    sessions: dict[Session, None]
    targets: InitVar[Sequence[object]]
    limit: int
    """Largest number of bytes that may be allocated at once; 0 for no limit."""
    depth: int
    """Number of stack frames to record for each allocation."""
    history: InitVar[int | None]
    on_allocate: Hook | None
    on_free: Hook | None
    profiler: export.Profiler | None
    log_path: str | Path | None

    started: bool = False
    live: dict[int, Allocation] = field(default_factory=dict)
    """Live allocations, by address."""
    nbytes: int = 0
    peak: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * 5)
    """The last five fields of :class:`Counters`."""
    open: tuple[Phase, ...] = ()
    """Phases (:meth:`Observer.phase`) that have not ended."""
    _log: export.Log | None = None
    _logged: bool = False
    """Whether the log file was created, so that a later start appends to it."""
    _entering: int | None = None
    """Identifier of the thread that enters notes now (``threading.get_ident``); None if no thread does."""

    def __post_init__(self, targets: Sequence[object], history: int | None) -> None:
        self.happened: deque[Happening] = deque(maxlen=history)
        self.phase: ContextVar[Phase | None] = ContextVar("phase", default=None)
        """Innermost phase of the current thread or task."""
        self.tag: ContextVar[str] = ContextVar("tag", default="")
        self._lock = RLock()
        """Held while notes are entered, and while phases or the log change."""
        self._unwritten: list[Happening] = []
        self._allocators = [target for target in targets if isinstance(target, Allocator)]
        self._allocators += [target.pool for target in targets if isinstance(target, CachingAllocator)]
        self._devices = [target for target in targets if isinstance(target, Device)]
        # Weak references, so that closed objects end. With the start and end address of a range of the object.
        self._spans = [(weakref.ref(target), *span) for target in targets for span in _spans(target)]
        self._everything = not targets
        self._targets = targets
        """Objects to observe. Emptied once :meth:`start` has recorded their mappings."""
        self._notes: deque[tuple[int, Any, int, int, int]] = deque()
        """Notes that are not entered yet, as tuples: kind, allocation or address, stream handle, thread,
        nanoseconds.
        """
        self._gone: deque[Allocation] = deque(maxlen=_REMEMBERED)
        """Allocations that were freed last. If the driver refuses a free, its allocation is put back into ``live``."""
        self._unreported: deque[Allocation] = deque()
        """Freed allocations for which ``on_free`` has not been called yet."""
        for session in self.sessions:
            session.shut_with_me(self)
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Begin to record. The first start also adds the mappings that the observed objects have. No effect while it
        records.
        """
        if not self.started:
            before = [one for target in self._targets for one in _mapped_in(target)]
            if self.log_path is not None:
                self._log = export.Log(self.log_path, append=self._logged)
                self._logged = True
            self.started = True
            for address, nbytes, source in before:
                self._note(_ALLOCATED, self._allocation(address, nbytes, 0, source, ()), 0)
            self._targets = ()
            for session in self.sessions:
                watching_of(session).add(self)
                watch_mappings(session, self)

    def stop(self) -> None:
        """Stop recording, and bring the account up to date (:meth:`settle`). A second call does nothing."""
        if self.started:
            with contextlib.ExitStack() as undo:
                undo.callback(self._end)
                for session in self.sessions:
                    undo.callback(unwatch_mappings, session, self)
                    undo.callback(watching_of(session).remove, self)
                self.settle()

    def _end(self) -> None:
        self.started = False
        while self._notes:  # Allocators no longer call this account, so no thread adds notes.
            self._enter_notes()
        self._close_log()

    def _close_log(self) -> None:
        with self._lock:
            log, self._log = self._log, None
            if log is not None:
                log.close()

    def _shut_after_fork(self) -> None:
        """Reset what a forked child must not use: a lock that a thread of the parent may have held, and the parent's
        log.
        """
        self.started, self._entering, self._lock = False, None, RLock()
        self._close_log()

    def begin(self, phase: Phase) -> None:
        """Add ``phase`` to the open phases: until :meth:`end`, the peak of ``phase`` is updated, and its limit
        applies.
        """
        with self._lock:
            self.open = (*self.open, phase)

    def end(self, phase: Phase) -> None:
        """Remove a phase from the open phases, because its block has ended."""
        with self._lock:
            self.open = tuple([one for one in self.open if one is not phase])

    # -- calls of the allocators -----------------------------------------------------------------------------

    def wants(self, allocator: Allocator) -> bool:
        """Return whether allocations of this allocator are to be recorded."""
        if self._everything:
            return True
        at = allocator.location
        return any(allocator is one for one in self._allocators) or any(at == one.location for one in self._devices)

    def asked(self, allocator: Allocator | None, nbytes: int) -> None:
        """Raise :class:`OutOfMemoryError` if an allocation of ``nbytes`` bytes would exceed a limit. Called before the
        driver function.

        ``allocator``: None for memory that is to be mapped.
        """
        limits = [(self.limit, "the observer's limit")] if self.limit else []
        limits += [(phase.limit, f"the limit of phase {phase.path!r}") for phase in self.open if phase.limit]
        for limit, whose in limits:
            self.look()
            if self.nbytes + nbytes > limit:
                self.settle()
            if self.nbytes + nbytes > limit:
                call = "cuMemCreate" if allocator is None else allocator.alloc_name
                raise self._over(limit, whose, nbytes, call)

    def _over(self, limit: int, whose: str, nbytes: int, call: str) -> OutOfMemoryError:
        why = f"{whose}, {size_text(limit)}, leaves no room for {size_text(nbytes)}"
        why = f"{why}: {size_text(self.nbytes)} are allocated"
        figures = {"requested": nbytes, "used": self.nbytes, "limit": limit}
        return refused(OutOfMemoryError, call, why, **figures, holders=tuple(largest([*self.live.values()])))

    def holders(self, location: MemLocation, allocators: Collection[object] | None) -> list[str]:
        """Return texts about the live memory of a location: one for each of the five lines of the program with most
        bytes, and one for all other lines together.

        Only memory of ``allocators`` counts; None: memory of all allocators, and mappings.
        """
        self._enter_notes()
        live = [one for one in [*self.live.values()] if one.source.location == location]
        if allocators is not None:
            # `keyrefs` lists the references in one call. A loop would raise if another thread allocates and adds a
            # source.
            known = [one for reference in self._sources.keyrefs() if (one := reference()) is not None]
            counted = [one for one in known if one in allocators or getattr(one, "pool", None) in allocators]
            own = {id(self._sources.get(one)) for one in counted}
            live = [one for one in live if id(one.source) in own]
        return largest(live)

    def allocated(self, allocator: Allocator | None, address: int, nbytes: int, stream: Any) -> None:
        """Record an allocation that the driver has made. ``stream``: driver handle of the stream. No effect without an
        ``allocator``.
        """
        if allocator is not None:
            self._record(self._from(allocator, address, nbytes, int(stream)))

    def allocation_failed(self, allocator: Allocator | None, nbytes: int, stream: Any) -> None:
        """Record that the driver has refused an allocation."""
        if allocator is not None:
            one = self._from(allocator, 0, nbytes, int(stream))
            self._note(_ALLOCATION_FAILED, one, one.stream)
            self.look()

    def freed(self, address: int, stream: Any) -> None:
        """Note a free, before the driver function is called. ``stream``: driver handle; None for the stream of the
        allocation.

        Finalisers also call this, so it takes no lock.
        """
        self._note(_FREED, address, -1 if stream is None else int(stream))

    def free_failed(self, address: int) -> None:
        """Note that the driver has refused a free. Finalisers also call this, so it takes no lock."""
        self._note(_FREE_FAILED, address, 0)

    def to_be_mapped(self, address: int, nbytes: int) -> None:
        """Raise :class:`OutOfMemoryError` if a mapping of ``nbytes`` bytes would exceed a limit.

        Called before the memory is mapped.
        """
        if self._everything or self._devices or self._spanned(address):
            self.asked(None, nbytes)

    def mapped(self, address: int, memory: MappedMemory) -> None:
        """Record a new mapping if this observer observes its addresses or the location of its memory."""
        where = getattr(memory, "location", MemLocation.none())
        wanted = self._everything or any(where == one.location for one in self._devices)
        if self._spanned(address) or (wanted and is_counted(memory)):
            self._record(self._allocation(address, memory.nbytes, 0, Source("mapping", where, ""), sites(self.depth)))

    def _record(self, one: Allocation) -> None:
        self._note(_ALLOCATED, one, one.stream)
        self.look()
        if self.on_allocate is not None:
            self.on_allocate(one)

    def unmapped(self, address: int) -> None:
        """Note the end of a mapping, once the memory was unmapped, or the page of an arena was released."""
        self._note(_FREED, address, 0)

    def _spanned(self, address: int) -> bool:
        # The addresses of a closed object do not count, because another object may have reserved them.
        return any(start <= address < stop and not getattr(of(), "closed", True) for of, start, stop in self._spans)

    def _from(self, allocator: Allocator, address: int, nbytes: int, stream: int) -> Allocation:
        name = name_of_stream(session_of(allocator), stream)
        return self._allocation(address, nbytes, stream, self._source(allocator), sites(self.depth), name)

    def _allocation(
        self, address: int, nbytes: int, stream: int, source: Source, where: Any, name: str = ""
    ) -> Allocation:
        phase = self.phase.get()
        path = "" if phase is None else phase.path
        return Allocation(
            address, nbytes, stream, threading.get_ident(), self.tag.get(), path, time.time_ns(), where, source, name
        )

    def _source(self, allocator: Allocator) -> Source:
        found = self._sources.get(allocator)
        if found is None:
            pool = allocator.pool if isinstance(allocator, CachingAllocator) else allocator
            found = Source("pool" if pool is allocator else "cache", allocator.location, getattr(pool, "name", ""))
            self._sources[allocator] = found
        return found

    # -- the account -----------------------------------------------------------------------------------------

    def _note(self, kind: int, what: Any, stream: int) -> None:
        now = what.time if kind == _ALLOCATED else time.time_ns()
        self._notes.append((kind, what, stream, threading.get_ident(), now))

    def look(self) -> None:
        """Enter the notes into the account, and call ``on_free`` for the allocations that were freed."""
        self._enter_notes()
        while self._unreported and self.on_free is not None:
            try:
                one = self._unreported.popleft()
            except IndexError:
                return  # Removed by another thread.
            self.on_free(one)

    def settle(self) -> None:
        """Bring the account up to date: do the deferred frees that are possible now, then enter the notes."""
        for session in self.sessions if self.started and self._entering != threading.get_ident() else ():
            if session.usable:
                work(session)
                for allocator in watching_of(session).allocators():
                    if isinstance(allocator, CachingAllocator) and self.wants(allocator):
                        collect_dropped(allocator)
        self.look()

    def _enter_notes(self) -> None:
        """Enter the notes that exist now into the account.

        A signal handler may interrupt this method and call it again. The inner call then returns at once, and the
        handler reads the account without the note that is being entered.
        """
        with self._lock:
            if self._entering is None:
                self._entering = threading.get_ident()
                try:
                    # In a function of its own, because a loop here can skip the finally clause: see
                    # `streamalloc.driver.locks`.
                    self._enter_some(len(self._notes))
                finally:
                    self._entering = None

    def _enter_some(self, count: int) -> None:
        for _ in range(count):
            self._enter(*self._notes.popleft())
        written, self._unwritten = self._unwritten, []
        if written and self._log is not None:
            try:
                self._log.write(written)
            except OSError as error:
                self._close_log()
                warn(f"the log of allocations ends here: {error}", RuntimeWarning)

    def _enter(self, kind: int, what: Any, stream: int, thread: int, now: int) -> None:
        added: Allocation | None = None
        freed: Allocation | None = None
        if kind == _ALLOCATED:
            # Other code may have freed the earlier allocation at this address without a note.
            added, freed = what, self.live.pop(what.address, None)
        elif kind == _FREED:
            freed = self.live.pop(what, None)
        elif kind == _FREE_FAILED and what not in self.live:
            added = next((one for one in reversed(self._gone) if one.address == what), None)
        elif kind == _ALLOCATION_FAILED:
            self.counts[4] += 1
            self._happen("failure", what, now, stream, thread)
        if freed is not None:
            self.nbytes -= freed.nbytes
            self._happen("free", freed, now, stream if kind == _FREED and stream >= 0 else freed.stream, thread)
            if kind == _FREED:
                self._gone.append(freed)
                if self.on_free is not None:
                    self._unreported.append(freed)
        if added is not None:
            self.live[added.address] = added
            self.nbytes += added.nbytes
            if kind == _ALLOCATED:
                self.counts[0] += 1
                self.counts[1] += added.nbytes
                self.counts[2] = max(self.counts[2], len(self.live))
                self.counts[3] = max(self.counts[3], added.nbytes)
            self._happen("allocate", added, now, added.stream, thread)
        for phase in self.open:
            phase.peak = max(phase.peak, self.nbytes)
        self.peak = max(self.peak, self.nbytes)
        if self.profiler is not None:
            self.profiler.sample(self.nbytes)

    def _happen(self, action: Action, one: Allocation, *when: int) -> None:
        entry = Happening(action, one, *when)
        self.happened.append(entry)
        if self._log is not None:
            self._unwritten.append(entry)


def _spans(target: object) -> list[tuple[int, int]]:
    """Return start and end of each address range in which an object maps memory."""
    if isinstance(target, (VirtualBuffer, AddressRange)):
        range = target if isinstance(target, AddressRange) else target.range
        return [(range.address, range.address + range.nbytes)]
    if isinstance(target, PageSpace):
        return [(target.address, target.address + target.page_count * target.page_size)]
    if isinstance(target, SymmetricMemory):
        begins = target.addresses
        return [(int(begins[rank]), int(begins[rank]) + target.physical_bytes) for rank in target.ranks]
    return []


def _mapped_in(target: object) -> list[tuple[int, int, Source]]:
    """Return address, size in bytes, and source of each mapping that an object has now."""
    found: list[tuple[int, int, MemLocation]] = []
    if isinstance(target, (VirtualBuffer, AddressRange)):
        found = [(one.address, one.nbytes, one.memory.location) for one in target.mappings]
    elif isinstance(target, PageSpace):
        # One entry for each physical page, because aliases of a page use no more memory.
        numbers, size = target.numbers, target.page_size
        pages = {int(numbers[page]): page for page in reversed(target.committed.tolist())}
        found = [(target.address + page * size, size, target.location) for page in pages.values()]
    elif isinstance(target, SymmetricMemory):
        devices = zip(_spans(target), target.devices, strict=True)
        found = [(start, stop - start, device.location) for (start, stop), device in devices]
    return [(address, nbytes, Source("mapping", location, "")) for address, nbytes, location in found]


class Observer(Drawn, Leaves):
    """Record of allocations and frees, with time and source line: the result of :func:`observe`.

    The observer records from :meth:`start` to :meth:`stop`; a ``with`` block calls both. The records can also be read
    after the stop. While the observer records, a read of the records first makes the deferred frees that are possible.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.phases: list[Phase] = []
        """All phases so far, in order of their start."""

    # -- beginning and end -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start recording. Returns the observer. The first start also records the mappings that the observed objects
        have. No effect while the observer records. After :meth:`stop`, new records are added to the earlier ones. Frees
        between a stop and the next start are not recorded, so memory that was freed then still counts as live. Raises
        ``OSError`` if the log cannot be opened.
        """
        self._account.start()
        return self

    def stop(self) -> None:
        """End the recording. Allocators without another observer then have no extra cost. A second call does
        nothing.
        """
        self._account.stop()

    def __enter__(self) -> Self:
        return self.start()

    def _leave(self, *, failed: bool) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether the observer records now: True from :meth:`start` to :meth:`stop`."""
        return self._account.started

    @property
    def limit(self) -> int:
        """Largest number of bytes allocated at once; 0: no limit. An allocation beyond it raises
        :class:`OutOfMemoryError` before the driver call. Assign a size, in bytes or as text; other values raise
        TypeError or ValueError.
        """
        return self._account.limit

    @limit.setter
    def limit(self, nbytes: int | str) -> None:
        self._account.limit = checked_size("limit", nbytes)

    # -- records ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[Allocation, ...]:
        """Live allocations, oldest first. An allocation whose free the driver has refused is listed as a new one."""
        self._account.settle()
        return tuple([*self._account.live.values()])  # See :attr:`history`.

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, as the sum of the requested sizes."""
        self._account.settle()
        return self._account.nbytes

    @property
    def peak(self) -> int:
        """Most bytes allocated at once since the first :meth:`start`."""
        self._account.settle()
        return self._account.peak

    def counters(self) -> Counters:
        """Return the numbers of allocations and bytes (now, at most, in total) and of refusals by the driver."""
        account = self._account
        account.settle()
        return Counters(account.nbytes, account.peak, len(account.live), *account.counts)

    @property
    def history(self) -> tuple[Happening, ...]:
        """Allocations, frees and failures, oldest first: the last n of them with ``observe(history=n)``."""
        self._account.settle()
        # A list is made first, in one call. The collector may run at the allocation of a tuple and let another thread
        # enter notes.
        return tuple([*self._account.happened])

    def leaks(self) -> LeakReport:
        """Return a report of the live allocations, grouped by the line that allocated the memory."""
        return LeakReport(self.live)

    def assert_nothing_left(self) -> None:
        """Raise :class:`LeakError`, which lists the bytes and the lines, if allocations of :attr:`live` are left."""
        self.leaks().raise_if_any()

    @contextlib.contextmanager
    def phase(self, name: str, limit: int | str = 0) -> Iterator[Phase]:
        """Return a context manager that records the peak of allocated bytes of its ``with`` block, under a name.

        Phases may be nested, and each thread may be in a different phase. Every phase counts the memory of all threads.
        The block gets the :class:`Phase`.

        Parameters
        ----------
        name
            Name of the phase. Several phases may have the same name.
        limit
            Largest number of bytes that may be allocated at once during the phase, with the observed bytes from before
            the phase; 0 for no limit. An allocation that would exceed the limit raises :class:`OutOfMemoryError`.

        Raises
        ------
        TypeError, ValueError
            ``name`` is not a ``str``, or ``limit`` is not a size.
        """
        checked_type("name", name, str)
        most = checked_size("limit", limit)
        account = self._account
        account.settle()
        phase = Phase(name, account.phase.get(), account.nbytes, most)
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
        """Return a context manager: the allocations of this thread or task in its ``with`` block get ``tag``. An inner
        tag replaces the outer one until its block ends.

        The ``with`` statement raises ``TypeError`` if ``tag`` is not a ``str``.
        """
        token = self._account.tag.set(checked_type("tag", tag, str))
        try:
            yield
        finally:
            self._account.tag.reset(token)

    # -- files for other tools -------------------------------------------------------------------------------

    def save_pytorch(self, path: str | Path) -> None:
        """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz): a pickle of plain dictionaries.

        Raises ``OSError`` if the file cannot be written.
        """
        export.save_pytorch(path, self.history, self.live)

    def save_rmm(self, path: str | Path) -> None:
        """Write a log in RMM's format (CSV), which :func:`streamalloc.traces.load` reads.

        After RMM's columns follow the names of pool and stream, the tag, the phase, and the line of the program. Raises
        ``OSError`` if the file cannot be written.
        """
        export.save_rmm(path, self.history)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for Perfetto and Chrome (JSON): the allocated bytes of each source over time, and the phases.

        Raises ``OSError`` if the file cannot be written.
        """
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
    limit: int | str = 0,
    depth: int = 1,
    history: int | None = 1 << 20,
    on_allocate: Hook | None = None,
    on_free: Hook | None = None,
    nvtx: bool = False,
    log: str | Path | None = None,
    driver: Driver | None = None,
) -> Observer:
    """Return an observer of memory for a ``with`` block: who allocates, how much, and what is still allocated.

    The observer records every allocation and free, including frees by finalisers and deferred frees. While it records,
    an :class:`OutOfMemoryError` names the lines whose memory is live (``holders``). Several observers may observe the
    same memory, and may start and stop in any order.

    Not recorded are:

    * memory from before the start, except the mappings that the objects in ``what`` have at that time;
    * allocations of 0 bytes;
    * memory that belongs to the graph of a capture;
    * memory that another library allocates through a pool's handle.

    Parameters
    ----------
    what
        Pools, caches (with their pool), growable and striped buffers, address ranges, page spaces (their committed
        pages), symmetric memory; or devices, for all memory on the device, also of objects created later. Default:
        everything of ``driver``. Allocations without a pool (:func:`streamalloc.allocate`) count for their device. If
        you pass a pool that a cache uses, the blocks of the cache count, and not the buffers that the cache returns.
        Pass the cache to count the buffers.

        In a range or buffer that is passed, each mapping counts. For a device, and by default, physical memory counts
        from its first mapping until that mapping ends, and memory of another process does not count.
    limit
        Largest number of bytes that may be allocated at once; 0 for no limit. An allocation that would exceed the limit
        raises :class:`OutOfMemoryError` before the driver is called. Threads that allocate at the same moment may
        together exceed the limit.
    depth
        Number of stack frames to record for each allocation. 1: only the line that called the library. 0: no frames.
    history
        Number of allocations and frees to keep in the history; None: all.
    on_allocate, on_free
        Functions that are called with the :class:`Allocation`. If ``on_allocate`` raises, the memory is freed, and the
        caller of the allocation gets the error. If ``on_free`` raises, the memory is also freed, and the caller of the
        free gets the error. For a free by a finaliser, ``on_free`` is called at the next allocation, free, or read of
        the observer.
    nvtx
        True: phases become NVTX ranges, and the allocated bytes become an NVTX counter. Needs the package ``nvtx``.
    log
        Path of a file to which each allocation, free and failure is written at once. A free by a finaliser is written
        with the next line, and is missing if the process is killed before. The format is the same as for
        :meth:`Observer.save_rmm`. The start raises OSError if the file cannot be opened.
    driver
        The driver to observe if ``what`` is empty. Default: the process's default driver.

    Raises
    ------
    TypeError, ValueError
        An object cannot be observed, a hook is not callable, a number is out of range, or both ``what`` and ``driver``
        are given.
    ClosedError
        An object in ``what`` was closed.
    ModuleNotFoundError
        ``nvtx=True`` is given, and the package ``nvtx`` is not installed.

    Examples
    --------
    >>> with observe(pool, limit=1 << 30) as observer:
    ...     run()
    >>> observer.assert_nothing_left()
    """
    most = checked_size("limit", limit)
    for name, value in (("depth", depth), ("history", 0 if history is None else history)):
        checked_number(name, value)
    for name, hook in (("on_allocate", on_allocate), ("on_free", on_free)):
        checked_function(name, hook, optional=True)
    if not (log is None or isinstance(log, (str, bytes, os.PathLike))):  # A number would be taken for a descriptor.
        raise TypeError(f"log must be a path, not {type(log).__name__} ({log!r})")
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
    return Observer(Account(dict.fromkeys(sessions), what, most, depth, history, on_allocate, on_free, profiler, log))
