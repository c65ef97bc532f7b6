"""The account that an observer keeps: what it is told of each allocation and free.

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
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from streamalloc.core.internal import (
    Allocator,
    Device,
    MemLocation,
    OutOfMemoryError,
    Session,
    refused,
    size_text,
    watching_of,
    work,
)
from streamalloc.multicast import SymmetricMemory
from streamalloc.observing.profiler import Profiler
from streamalloc.observing.records import Allocation, Happening, Phase, Source, sites
from streamalloc.observing.report import places
from streamalloc.pool import CachingAllocator
from streamalloc.vmm import AddressRange, VirtualBuffer
from streamalloc.vmm.internal import GenericAllocation, is_counted, unwatch_mappings, watch_mappings

__all__ = ["Account", "Hook"]

Hook = Callable[[Allocation], object]

# What a note is about.
_ALLOCATED, _FREED, _KEPT, _FAILED = range(4)
# Frees that the driver may refuse yet.
_REMEMBERED = 256


class Account:
    """What is allocated, what was, and who is told of it."""

    def __init__(
        self,
        sessions: dict[Session, None],
        targets: Iterable[object],
        limit: int,
        depth: int,
        history: int | None,
        on_allocate: Hook | None,
        on_free: Hook | None,
        profiler: Profiler | None,
    ) -> None:
        self.limit: int = limit
        """The most bytes that may be allocated at once; 0 for no limit."""
        self.started = False
        """Whether it is told."""
        self.live: dict[int, Allocation] = {}
        """What is allocated, by address."""
        self.nbytes = 0
        self.peak = 0
        self.happened: deque[Happening] = deque(maxlen=history)
        self.open: tuple[Phase, ...] = ()
        """The phases that go on."""
        self.phase: ContextVar[Phase | None] = ContextVar("phase", default=None)
        """The innermost one of the thread or task."""
        self.tag: ContextVar[str] = ContextVar("tag", default="")
        self.profiler = profiler
        self._depth = depth
        self._on_allocate = on_allocate
        self._on_free = on_free
        self._sessions = sessions
        self._allocators = [target for target in targets if isinstance(target, Allocator)]
        self._allocators += [target.pool for target in targets if isinstance(target, CachingAllocator)]
        self._devices = [target for target in targets if isinstance(target, Device)]
        self._spans = [span for target in targets for span in _spans(target)]
        self._everything = not (self._allocators or self._devices or self._spans)
        self._before = [one for target in targets for one in _mapped_in(target)]
        self._notes: deque[tuple[int, Any, int, int, int]] = deque()
        """What happened, and is not in the account: kind, what about, stream, thread, time."""
        self._keeper: int | None = None
        """The thread that keeps the account; nobody waits for it but who reads."""
        self._gone: deque[Allocation] = deque(maxlen=_REMEMBERED)
        self._untold: deque[Allocation] = deque()
        """What was freed that the hook is to be told of."""
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Be told from now on. Idempotent."""
        if not self.started:
            self.started = True
            for address, nbytes, source in self._before:
                self._note(_ALLOCATED, self._allocation(address, nbytes, 0, source, ()), 0)
            self._before = []
            for session in self._sessions:
                watching_of(session).add(self)
                watch_mappings(session, self)

    def stop(self) -> None:
        """Be told no more. Idempotent."""
        if self.started:
            with contextlib.ExitStack() as undo:
                for session in self._sessions:
                    undo.callback(unwatch_mappings, session, self)
                    undo.callback(watching_of(session).remove, self)
                self.settle()
            self.started = False

    def begin(self, phase: Phase) -> None:
        """A phase goes on from now."""
        self._swap((phase,), None)

    def end(self, phase: Phase) -> None:
        """A phase has ended."""
        self._swap((), phase)

    def _swap(self, more: tuple[Phase, ...], without: Phase | None) -> None:
        while True:
            before = self.open
            after = (*(one for one in before if one is not without), *more)
            # Nothing is called between these two.
            if self.open is before:
                self.open = after
                return

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
        limits += [(phase.limit, f"the limit of phase {phase.path!r}") for phase in self.open if phase.limit]
        for limit, whose in limits:
            self.look()
            if self.nbytes + nbytes > limit:
                self.settle()
            if self.nbytes + nbytes > limit:
                raise self._over(limit, whose, nbytes, "cuMemCreate" if allocator is None else "cuMemAllocAsync")

    def _over(self, limit: int, whose: str, nbytes: int, call: str) -> OutOfMemoryError:
        largest = "; ".join(map(str, places(tuple(self.live.values()))[:3]))
        why = f"{whose}, {size_text(limit)}, leaves no room for {size_text(nbytes)}"
        have = f"{size_text(self.nbytes)} are allocated{f', most of it {largest}' if largest else ''}"
        error = refused(OutOfMemoryError, call, f"{why}: {have}")
        error.requested, error.used, error.limit = nbytes, self.nbytes, limit
        return error

    def allocated(self, allocator: Allocator | None, address: int, nbytes: int, stream: Any) -> None:
        """Memory was allocated."""
        if allocator is not None:
            one = self._allocation(address, nbytes, int(stream), self._source(allocator), sites(self._depth))
            self._note(_ALLOCATED, one, one.stream)
            self.look()
            if self._on_allocate is not None:
                self._on_allocate(one)

    def failed(self, allocator: Allocator | None, nbytes: int, stream: Any) -> None:
        """Memory was asked for, and the driver has refused it."""
        if allocator is not None:
            one = self._allocation(0, nbytes, int(stream), self._source(allocator), sites(self._depth))
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
        one = self._allocation(address, memory.nbytes, 0, source, sites(self._depth))
        self._note(_ALLOCATED, one, 0)
        self.look()
        if self._on_allocate is not None:
            self._on_allocate(one)

    def unmapped(self, address: int) -> None:
        """What was mapped is unmapped."""
        self._note(_FREED, address, 0)

    def _spanned(self, address: int) -> bool:
        return any(start <= address < stop for start, stop in self._spans)

    def _allocation(self, address: int, nbytes: int, stream: int, source: Source, where: Any) -> Allocation:
        phase = self.phase.get()
        path = "" if phase is None else phase.path
        return Allocation(
            address, nbytes, stream, threading.get_ident(), self.tag.get(), path, time.time_ns(), where, source
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
        while self._untold and self._on_free is not None:
            try:
                one = self._untold.popleft()
            except IndexError:
                return  # Another thread tells it.
            self._on_free(one)

    def settle(self) -> None:
        """Enter all that was noted, for who reads; frees that were left for later are made if they can."""
        me = threading.get_ident()
        for session in self._sessions if self.started and self._keeper != me else ():
            if session.usable:
                work(session)
                for allocator in watching_of(session).allocators():
                    if isinstance(allocator, CachingAllocator) and self.wants(allocator):
                        allocator.collect_dropped()
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
                # No loop in here: Python 3.12 and 3.13 skip what follows where a signal comes at its jump back.
                self._enter_all()
            finally:
                self._keeper = None

    def _enter_all(self) -> None:
        while self._notes:
            self._enter(*self._notes[0])

    def _enter(self, kind: int, what: Any, stream: int, thread: int, now: int) -> None:
        untold: tuple[Allocation, ...] = ()
        gone: tuple[Allocation, ...] = ()
        if kind == _ALLOCATED:
            # Other code may have freed memory by its address.
            before = self.live.get(what.address)
            total = self.nbytes + what.nbytes - (0 if before is None else before.nbytes)
            happened: tuple[Happening, ...] = (Happening("allocate", what, now, stream, thread),)
            if before is not None:
                happened = (Happening("free", before, now, before.stream, thread), *happened)
            for phase in self.open:
                phase.peak = max(phase.peak, total)
            peak = max(self.peak, total)
            # Nothing is called from here on, so that nothing comes in between.
            self.live[what.address] = what
            self.peak = peak
        elif kind == _FREED and what in self.live:
            one = self.live[what]
            total = self.nbytes - one.nbytes
            happened = (Happening("free", one, now, one.stream if stream < 0 else stream, thread),)
            gone = (one,)
            if self._on_free is not None:
                untold = (one,)
            # Nothing is called from here on.
            del self.live[what]
        elif (
            kind == _KEPT
            and what not in self.live
            and (again := next((one for one in reversed(self._gone) if one.address == what), None))
        ):
            total = self.nbytes + again.nbytes
            happened = (Happening("allocate", again, now, again.stream, thread),)
            # Nothing is called from here on.
            self.live[what] = again
        else:
            total = self.nbytes
            happened = (Happening("failure", what, now, stream, thread),) if kind == _FAILED else ()
        self.nbytes = total
        self.happened += happened
        self._gone += gone
        self._untold += untold
        del self._notes[0]
        if self.profiler is not None:
            self.profiler.sample(total)


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
