"""Observers: what is told of each allocation and free, and keeps the account.

Whoever allocates or frees hands a note in (:class:`collections.deque`), also from a finaliser or a signal handler, and
takes no lock for that. One thread at a time takes the notes off and keeps the account; who comes meanwhile leaves his
note to that thread. A note is taken off by the lines that enter it, between which nothing is called: an interrupt
loses none and enters none twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamalloc.core.buffer import Allocator
from streamalloc.core.cached import mend
from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import ClosedError, OutOfMemoryError, refused, size_text
from streamalloc.core.html import Drawn
from streamalloc.core.later import work
from streamalloc.core.properties import MemLocation, checked_size
from streamalloc.core.watching import watching_of
from streamalloc.driver import default as default_driver
from streamalloc.multicast import SymmetricMemory
from streamalloc.observing import export
from streamalloc.observing.profiler import Profiler
from streamalloc.observing.records import Allocation, Happening, Phase, Source, sites
from streamalloc.observing.report import LeakReport, places
from streamalloc.pool import CachingAllocator
from streamalloc.vmm import AddressRange, VirtualBuffer
from streamalloc.vmm.internal import GenericAllocation, is_counted, unwatch_mappings, watch_mappings

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.driver import Driver

__all__ = ["Observer", "observe"]

Hook = Callable[[Allocation], object]

# What a note is about.
_ALLOCATED, _FREED, _KEPT, _FAILED = range(4)
# Frees that the driver may refuse yet.
_REMEMBERED = 256


class Observer(Drawn):
    """Knows which memory is allocated, since when and from which line; made by :func:`observe`.

    It observes from :meth:`start` to :meth:`stop`, which a ``with`` block calls, and can be asked after that, too.
    """

    def __init__(
        self,
        doors: dict[Door, None],
        targets: Iterable[object],
        limit: int,
        depth: int,
        history: int | None,
        on_allocate: Hook | None,
        on_free: Hook | None,
        profiler: Profiler | None,
    ) -> None:
        self.limit: int = limit
        """The most bytes that may be allocated at once; 0 for no limit. It can be assigned."""
        self.depth: int = depth
        """How many frames are kept of each allocation."""
        self.on_allocate: Hook | None = on_allocate
        """Called with each allocation, by the thread that made it. What it raises undoes the allocation."""
        self.on_free: Hook | None = on_free
        """Called with each allocation that was freed."""
        self._doors = doors
        self._allocators = [target for target in targets if isinstance(target, Allocator)]
        self._allocators += [target.pool for target in targets if isinstance(target, CachingAllocator)]
        self._devices = [target for target in targets if isinstance(target, Device)]
        self._spans = [span for target in targets for span in _spans(target)]
        self._everything = not (self._allocators or self._devices or self._spans)
        self._before = [one for target in targets for one in _mapped_in(target)]
        self._profiler = profiler
        self._started = False
        self._notes: deque[tuple[int, Any, int, int, int]] = deque()
        """What happened, and is not in the account: kind, what about, stream, thread, time."""
        self._keeper: int | None = None
        """The thread that keeps the account; nobody waits for it but who reads."""
        self._live: dict[int, Allocation] = {}
        self._nbytes = 0
        self._peak = 0
        self._history: deque[Happening] = deque(maxlen=history)
        self._gone: deque[Allocation] = deque(maxlen=_REMEMBERED)
        self._untold: deque[Allocation] = deque()
        """What was freed that the hook is to be told of."""
        self._open: tuple[Phase, ...] = ()
        self.phases: list[Phase] = []
        """All phases so far, in the order in which they began."""
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self._phase: ContextVar[Phase | None] = ContextVar("phase", default=None)
        self._tag: ContextVar[str] = ContextVar("tag", default="")

    # -- beginning and end -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Observe from now on. Idempotent."""
        if not self._started:
            self._started = True
            for address, nbytes, source in self._before:
                self._note(_ALLOCATED, self._allocation(address, nbytes, 0, source, ()), 0)
            self._before = []
            for door in self._doors:
                watching_of(door).add(self)
                watch_mappings(door, self)
        return self

    def stop(self) -> None:
        """Observe no more. Idempotent. Allocators have their own functions again, unless others observe them."""
        if self._started:
            with contextlib.ExitStack() as undo:
                for door in self._doors:
                    undo.callback(unwatch_mappings, door, self)
                    undo.callback(watching_of(door).remove, self)
                self._settle()
            self._started = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether it observes now."""
        return self._started

    # -- what it knows ---------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[Allocation, ...]:
        """What is allocated, in the order in which it was."""
        self._settle()
        return tuple(self._live.values())

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, in requested sizes."""
        self._settle()
        return self._nbytes

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at once."""
        self._settle()
        return self._peak

    @property
    def history(self) -> tuple[Happening, ...]:
        """All that happened, the oldest first; where the observer was told how much to keep, the last so many."""
        self._settle()
        return tuple(self._history)

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
        self._settle()
        phase = Phase(name, self._phase.get(), self._nbytes, limit)
        token = self._phase.set(phase)
        range_ = contextlib.nullcontext() if self._profiler is None else self._profiler.range(name)
        try:
            with range_:
                self.phases.append(phase)
                self._swap(lambda phases: (*phases, phase))
                yield phase
        finally:
            self._settle()
            self._swap(lambda phases: tuple(other for other in phases if other is not phase))
            phase.after = self._nbytes
            phase.ended = time.time_ns()
            self._phase.reset(token)

    def _swap(self, change: Callable[[tuple[Phase, ...]], tuple[Phase, ...]]) -> None:
        while True:
            before = self._open
            after = change(before)
            if self._open is before:
                self._open = after
                return

    @contextlib.contextmanager
    def tag(self, tag: str) -> Iterator[None]:
        """A ``with`` block in which what this thread (or task) allocates is said to be for ``tag``."""
        token = self._tag.set(tag)
        try:
            yield
        finally:
            self._tag.reset(token)

    # -- what others open ------------------------------------------------------------------------------------

    def save_pytorch(self, path: str | Path) -> None:
        """Write a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz): a pickle of plain dictionaries."""
        export.save_pytorch(path, self.history, self.live)

    def save_rmm(self, path: str | Path) -> None:
        """Write a log as RMM's does: CSV, which :func:`streamalloc.traces.from_rmm` reads, too."""
        export.save_rmm(path, self.history)

    def save_chrome(self, path: str | Path) -> None:
        """Write a trace for Perfetto and Chrome (JSON): bytes of each source over time, and the phases."""
        export.save_chrome(path, self.history, self.phases)

    def __repr__(self) -> str:
        if not hasattr(self, "_tag"):
            return f"<{type(self).__name__} that could not be made>"
        state = "observes" if self._started else "stopped"
        return f"<Observer, {state}: {size_text(self._nbytes)} in {len(self._live)} allocations>"

    def _repr_html_(self) -> str:
        return self.leaks()._repr_html_()

    # -- what it is told -------------------------------------------------------------------------------------

    def wants(self, allocator: Allocator) -> bool:
        """Whether it observes an allocator."""
        if self._everything:
            return True
        at = allocator.location
        return any(allocator is one for one in self._allocators) or any(at == one.location for one in self._devices)

    def asked(self, allocator: Allocator | None, nbytes: int) -> None:
        """Memory is asked for: raise where a limit leaves no room."""
        limits = [(self.limit, "the observer's limit")] if self.limit else []
        limits += [(phase.limit, f"the limit of phase {phase.path!r}") for phase in self._open if phase.limit]
        for limit, whose in limits:
            self.look()
            if self._nbytes + nbytes > limit:
                self._settle()
            if self._nbytes + nbytes > limit:
                raise self._over(limit, whose, nbytes, "cuMemCreate" if allocator is None else "cuMemAllocAsync")

    def _over(self, limit: int, whose: str, nbytes: int, call: str) -> OutOfMemoryError:
        largest = "; ".join(map(str, places(self.live)[:3]))
        why = f"{whose}, {size_text(limit)}, leaves no room for {size_text(nbytes)}"
        have = f"{size_text(self._nbytes)} are allocated{f', most of it {largest}' if largest else ''}"
        error = refused(OutOfMemoryError, call, f"{why}: {have}")
        error.requested, error.used, error.limit = nbytes, self._nbytes, limit
        return error

    def allocated(self, allocator: Allocator | None, address: int, nbytes: int, stream: Any) -> None:
        """Memory was allocated."""
        if allocator is not None:
            one = self._allocation(address, nbytes, int(stream), self._source(allocator), sites(self.depth))
            self._note(_ALLOCATED, one, one.stream)
            self.look()
            if self.on_allocate is not None:
                self.on_allocate(one)

    def failed(self, allocator: Allocator | None, nbytes: int, stream: Any) -> None:
        """Memory was asked for, and the driver has refused it."""
        if allocator is not None:
            one = self._allocation(0, nbytes, int(stream), self._source(allocator), sites(self.depth))
            self._note(_FAILED, one, one.stream)

    def freed(self, address: int, stream: Any) -> None:
        """Memory is about to be freed. Called by finalisers."""
        self._note(_FREED, address, -1 if stream is None else int(stream))

    def kept(self, address: int) -> None:
        """It was not freed after all. Called by finalisers."""
        self._note(_KEPT, address, 0)

    def to_be_mapped(self, address: int, nbytes: int) -> None:
        """Memory is to be mapped: raise where a limit leaves no room."""
        if self._everything or self._devices or self._spanned(address):
            self.asked(None, nbytes)

    def mapped(self, address: int, memory: GenericAllocation) -> None:
        """Memory is mapped."""
        if not self._spanned(address):
            where = getattr(memory, "location", None)
            if not (self._everything or any(where == one.location for one in self._devices)) or not is_counted(memory):
                return
        source = Source("mapping", getattr(memory, "location", MemLocation.none()), "physical memory")
        one = self._allocation(address, memory.nbytes, 0, source, sites(self.depth))
        self._note(_ALLOCATED, one, 0)
        self.look()
        if self.on_allocate is not None:
            self.on_allocate(one)

    def unmapped(self, address: int) -> None:
        """What was mapped is unmapped."""
        self._note(_FREED, address, 0)

    def _spanned(self, address: int) -> bool:
        return any(start <= address < stop for start, stop in self._spans)

    def _allocation(self, address: int, nbytes: int, stream: int, source: Source, where: Any) -> Allocation:
        phase = self._phase.get()
        path = "" if phase is None else phase.path
        return Allocation(
            address, nbytes, stream, threading.get_ident(), self._tag.get(), path, time.time_ns(), where, source
        )

    def _source(self, allocator: Allocator) -> Source:
        found = self._sources.get(allocator)
        if found is None:
            cached = isinstance(allocator, CachingAllocator)
            found = Source("cache" if cached else "pool", allocator.location, repr(allocator))
            self._sources[allocator] = found
        return found

    # -- the account -----------------------------------------------------------------------------------------

    def _note(self, kind: int, what: Any, stream: int) -> None:
        now = what.time if kind == _ALLOCATED else time.time_ns()
        self._notes.append((kind, what, stream, threading.get_ident(), now))

    def look(self) -> None:
        """Enter what was noted, unless another thread is doing that, and tell the hook of frees."""
        self._keep(threading.get_ident())
        while self._untold and self.on_free is not None:
            try:
                one = self._untold.popleft()
            except IndexError:
                return  # Another thread tells it.
            self.on_free(one)

    def _settle(self) -> None:
        """Enter all that was noted, for who reads; frees that were left for later are made if they can."""
        me = threading.get_ident()
        for door in self._doors if self._started and self._keeper != me else ():
            if door.usable:
                work(door)
                for allocator in watching_of(door).allocators():
                    if isinstance(allocator, CachingAllocator) and self.wants(allocator):
                        mend(allocator)
        # Not where a signal handler reads in the middle of it.
        while self._notes and self._keeper != me:
            self._keep(me)
            if self._notes:
                time.sleep(0)
        self.look()

    def _keep(self, me: int) -> None:
        """Enter the notes that are there, unless another thread does."""
        while self._notes:
            # Nothing is called from here to the block that undoes it.
            if self._keeper is not None:
                return
            self._keeper = me
            try:
                while self._notes:
                    self._enter(*self._notes[0])
            finally:
                self._keeper = None

    def _enter(self, kind: int, what: Any, stream: int, thread: int, now: int) -> None:
        untold: tuple[Allocation, ...] = ()
        gone: tuple[Allocation, ...] = ()
        if kind == _ALLOCATED:
            # A cache hands out again what a pool has given.
            before = self._live.get(what.address)
            total = self._nbytes + what.nbytes - (0 if before is None else before.nbytes)
            happened: tuple[Happening, ...] = (Happening("allocate", what, now, stream, thread),)
            for phase in self._open:
                phase.peak = max(phase.peak, total)
            peak = max(self._peak, total)
            # Nothing is called from here on, so that nothing comes in between.
            self._live[what.address] = what
            self._peak = peak
        elif kind == _FREED and what in self._live:
            one = self._live[what]
            total = self._nbytes - one.nbytes
            happened = (Happening("free", one, now, one.stream if stream < 0 else stream, thread),)
            gone = (one,)
            if self.on_free is not None:
                untold = (one,)
            # Nothing is called from here on.
            del self._live[what]
        elif (
            kind == _KEPT
            and what not in self._live
            and (again := next((one for one in reversed(self._gone) if one.address == what), None))
        ):
            total = self._nbytes + again.nbytes
            happened = (Happening("allocate", again, now, again.stream, thread),)
            # Nothing is called from here on.
            self._live[what] = again
        else:
            total = self._nbytes
            happened = (Happening("failure", what, now, stream, thread),) if kind == _FAILED else ()
        self._nbytes = total
        self._history += happened
        self._gone += gone
        self._untold += untold
        del self._notes[0]
        if self._profiler is not None:
            self._profiler.sample(total)


def _spans(target: object) -> list[tuple[int, int]]:
    """The addresses that an object has for what is mapped."""
    if isinstance(target, VirtualBuffer):
        return [(target.range.address, target.range.address + target.range.nbytes)]
    if isinstance(target, AddressRange):
        return [(target.address, target.address + target.nbytes)]
    if isinstance(target, SymmetricMemory):
        begins = target.addresses
        return [(int(begins[rank]), int(begins[rank]) + target.physical_bytes) for rank in target.ranks]
    return []


def _mapped_in(target: object) -> list[tuple[int, int, Source]]:
    """What is mapped in an object already: address, size and source."""
    if isinstance(target, (VirtualBuffer, AddressRange)):
        return [
            (one.address, one.nbytes, Source("mapping", one.memory.location, repr(target))) for one in target.mappings
        ]
    if isinstance(target, SymmetricMemory):
        places_ = zip(_spans(target), target.devices, strict=True)
        return [
            (start, stop - start, Source("mapping", device.location, repr(target))) for (start, stop), device in places_
        ]
    return []


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
    before it began is not known to it, except what is mapped in the objects that it was given. Memory that the graph of
    a capture owns is not observed.

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
    for name, value in (("limit", limit), ("depth", depth), ("history", history or 0)):
        checked_size(name, value)
    for one in what:
        if not isinstance(one, (Device, Allocator, VirtualBuffer, AddressRange, SymmetricMemory)):
            raise TypeError(f"what: {one!r} is no device, pool, cache, virtual or symmetric memory, or address range")
        if getattr(one, "closed", False):
            raise ClosedError(f"{one!r} was closed")
    doors = [Door.of(one.driver) if isinstance(one, SymmetricMemory) else door_behind(one) for one in what]
    if not what:
        doors = [Door.of(default_driver() if driver is None else driver)]
    elif driver is not None:
        raise ValueError("driver: what is observed has a driver already")
    profiler = Profiler() if nvtx else None
    return Observer(dict.fromkeys(doors), what, limit, depth, history, on_allocate, on_free, profiler)
