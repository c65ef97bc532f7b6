"""The recorded state of a driver: streams, events, graphs and memory, in terms of :mod:`.ranges`."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamalloc.driver.account import Account
from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.capture import Capture, Graph, Node
from streamalloc.driver.checker.clocks import CERTAIN, Actor, Clock, Obstacle, Stream, Timeline
from streamalloc.driver.checker.events import Event
from streamalloc.driver.checker.foreign_streams import ForeignStreams
from streamalloc.driver.checker.host_calls import HostCall
from streamalloc.driver.checker.interprocess import Interprocess
from streamalloc.driver.checker.judge import Judge, missing_order
from streamalloc.driver.checker.open_files import OpenFiles
from streamalloc.driver.checker.queued_sources import HOST_KINDS, QueuedSources
from streamalloc.driver.checker.ranges import (
    NEVER,
    Access,
    Addresses,
    Binding,
    Bytes,
    Moment,
    Piece,
    Range,
    accesses,
    size_text,
)
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Launched, Stack, here, place_of
from streamalloc.driver.checker.wait_values import WaitValues

__all__ = ["KERNEL", "OPENED", "Array", "Physical", "State", "Touch", "nothing", "number_of"]

Touch = tuple[int, int, bool]
"""Address, number of bytes, and whether they are written."""
Pieces = list[tuple[Piece, bool]]
"""Parts of ranges, and whether they are written."""
Finish = Callable[[tuple[Any, ...]], object]
"""A function that is called with the driver's answer."""

KERNEL = "a kernel"
"""Name of a use that the program reports by ``used``."""
OPENED = "memory of another process"
"""Kind of a range from ``cuIpcOpenMemHandle``."""
_LEGACY, _PER_THREAD = 1, 2
_ARRAYS = 1 << 64
"""First of the addresses that stand for arrays, beyond those of memory."""
_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_IS_MANAGED = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
_KEEP_ADDRESSES = ("allocation", "import", "mapping", "array")
"""Kinds whose addresses stay reserved after the free."""


def nothing(answer: tuple[Any, ...]) -> None:
    """Do nothing with the answer."""


def _contains(line: str, address: int) -> bool:
    """Whether a line of ``/proc/self/maps`` is that of readable memory at an address."""
    bounds, rights = line.split(maxsplit=2)[:2]
    start, end = (int(one, 16) for one in bounds.split("-"))
    return start <= address < end and rights[0] == "r"


def number_of(value: Any) -> int:
    """The number of a handle or address; 0 for None, and the address of the bytes for a host object that has some."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return int(np.frombuffer(value, np.uint8).ctypes.data) if len(value) else 0
    return int(value)


@dataclass(eq=False)
class Array(Range):
    """An array, at addresses that no memory has."""

    pitch: int = 0
    lines: int = 1
    """Rows of a plane."""
    element: int = 1
    """Bytes of an element."""


class Physical:
    """Physical memory, or a multicast object, with its mappings."""

    def __init__(self, size: int, stack: Stack, device: int | None, multicast: bool = False) -> None:
        self.bytes: Bytes = Bytes()
        self.size = size
        self.stack = stack
        self.device = device
        self.bindings: list[Binding] | None = [] if multicast else None
        self.mappings: list[Range] = []

    def __str__(self) -> str:
        return f"physical memory of {size_text(self.size)}"


class _Thread:
    """A host thread, with its per-thread default streams by context."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.streams: dict[int, Stream] = {}


class State:
    """Everything that calls have shown; guarded by the lock of its owner."""

    def __init__(self, driver: Any, found: Callable[[Hazard], None]) -> None:
        self.driver = driver
        self.account: Account = Account()
        self.timeline: Timeline = Timeline()
        self.found: Callable[[Hazard], None] = found
        self.addresses: Addresses = Addresses()
        self.reserved: Addresses = Addresses()
        """Address ranges of ``cuMemAddressReserve``."""
        self.values: WaitValues = WaitValues(self.timeline, self.addresses, self.is_of_host)
        self.judge: Judge = Judge(self.timeline, found, self.values.published)
        self.streams: dict[int, Stream] = {}
        self.devices: dict[Stream, int | None] = {}
        self.events: dict[int, Event] = {}
        self.interprocess: Interprocess = Interprocess(
            self.timeline, self.addresses, self.values, self.events, self.judge
        )
        self.foreign: ForeignStreams = ForeignStreams(driver, self.timeline)
        self.sources: QueuedSources = QueuedSources(
            self.timeline, self.foreign, self.judge, lambda: self.unseen_kernels
        )
        self.captures: dict[Stream, Capture] = {}
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, list[Node]] = {}
        self.launched: dict[int, Obstacle] = {}
        """End of the latest launch of each executable graph."""
        self.host_calls: dict[int, HostCall] = {}
        """Host functions by the pointer that the driver has."""
        self.physical: dict[int, Physical] = {}
        self.arrays: dict[int, Array] = {}
        self.mipmapped: dict[int, tuple[Any, dict[int, None]]] = {}
        """Descriptor of each mipmapped array, and the handles of its known levels."""
        self.array_end: int = _ARRAYS
        self.primary: dict[int, int] = {}
        """Primary context by device."""
        self.pools: dict[int, dict[int, int] | None] = {}
        """Access of devices by pool handle; None where all have access."""
        self.current_pools: dict[int, int] = {}
        self.uninitialized: bool = False
        """Whether copies of unwritten memory are reported."""
        self.unseen_kernels: bool = False
        """Whether kernels were launched, which may have written anything."""
        self.notes: dict[str, None] = {}
        """Notes on checks that were given up, each once."""
        self.files: OpenFiles[Physical] = OpenFiles()
        """Exported and imported physical memory by open file."""
        self._legacy: dict[int, Stream] = {}
        self._per_thread: list[Stream] = []
        self._here = threading.local()
        self._over: deque[dict[int, Stream]] = deque()
        """Per-thread streams of threads that have ended."""
        # With this variable the bindings take 0 for the per-thread default stream.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self._zero = _PER_THREAD if per_thread else _LEGACY

    def note(self, text: str) -> None:
        """Note a check that is given up."""
        self.notes[text] = None

    # -- questions to the driver -----------------------------------------------------------------------------

    def answer(self, name: str, *args: Any) -> tuple[Any, ...]:
        """The values that a driver function returns; empty where the driver lacks the function or refuses."""
        function = getattr(self.driver, name, None)
        answer: tuple[Any, ...] = (1,) if function is None else function(*args)
        return () if answer[0] else answer[1:]

    def ask(self, name: str, *args: Any) -> int | None:
        """The first of these values as a number, or None."""
        values = self.answer(name, *args)
        return int(values[0]) if values else None

    def context(self) -> int:
        """The current context."""
        return self.ask("cuCtxGetCurrent") or 0

    def is_of_host(self, address: int) -> bool:
        """Whether the driver takes an address for host memory."""
        return self.ask("cuPointerGetAttribute", _MEMORY_TYPE, address) == _HOST

    def is_managed(self, address: int) -> bool:
        """Whether the driver takes an address for managed memory."""
        return bool(self.ask("cuPointerGetAttribute", _IS_MANAGED, address))

    def is_pageable(self, address: int) -> bool:
        """Whether the driver does not know an address: it copies to such memory before the call returns."""
        return self.addresses.find(address) is None and self.ask("cuPointerGetAttribute", _MEMORY_TYPE, address) is None

    def _is_there(self, address: int) -> bool:
        """Whether memory lies at an address of a freed range."""
        if self.ask("cuPointerGetAttribute", _MEMORY_TYPE, address) is not None:
            return True
        # Host memory may have the addresses of any freed memory; addresses that a driver keeps are not readable.
        with open("/proc/self/maps") as maps:
            return any(_contains(line, address) for line in maps)

    # -- threads and streams ---------------------------------------------------------------------------------

    def _thread(self) -> _Thread:
        found: _Thread | None = getattr(self._here, "thread", None)
        if found is None:
            found = self._here.thread = _Thread(self.timeline.thread(""))
            weakref.finalize(found, self._over.append, found.streams).atexit = False
        return found

    def thread(self) -> Actor:
        """The calling host thread."""
        actor = self._thread().actor
        within = actor.within
        name = threading.current_thread().name
        actor.name = f"host thread {name}" if within is None else f"the host function of {within.name}"
        return actor

    def stream(self, handle: Any) -> Stream:
        """The stream of a handle."""
        number = number_of(handle)
        found = self.streams.get(number)
        return self._special(number) if found is None else found

    def capture_of(self, stream: Stream) -> Capture | None:
        """The capture that a stream is in."""
        return self.captures.get(stream) if self.captures else None

    def _special(self, number: int) -> Stream:
        """A default stream, or a stream that was created before the checker."""
        kind = number or self._zero
        if kind == _LEGACY:
            return self.legacy(self.context())
        if kind == _PER_THREAD:
            return self._own(self.context())
        # A query of the flags of a captured stream would break the capture.
        flags = 1 if self.ask("cuStreamIsCapturing", number) else self.ask("cuStreamGetFlags", number) or 0
        return self.add_stream(number, not flags & 1, self.ask("cuStreamGetCtx", number) or 0)

    def _own(self, context: int) -> Stream:
        """The per-thread default stream of the calling thread."""
        mine = self._thread().streams
        found = mine.get(context)
        if found is None or found not in self.devices:  # its context may have ended
            while self._over:
                for one in self._over.popleft().values():
                    if one in self._per_thread:
                        self._per_thread.remove(one)
                        self.retire(one)
            legacy = self.legacy(context)
            name = f"the per-thread default stream of {threading.current_thread().name}"
            found = mine[context] = self.timeline.stream(name, context, legacy)
            self._per_thread.append(found)
            self.foreign.can_use(found)
            self.devices[found] = self.devices[legacy]
        return found

    def legacy(self, context: int) -> Stream:
        """The legacy default stream of a context."""
        found = self._legacy.get(context)
        if found is None:
            found = self._legacy[context] = self.timeline.stream("the legacy default stream", context)
            self.devices[found] = self.ask("cuCtxGetDevice")
            self.foreign.can_use(found)
        return found

    def add_stream(
        self, handle: int, blocking: bool, context: int | None = None, made_at: Stack | None = None
    ) -> Stream:
        """Add a stream; ``made_at`` is None for a stream of another library."""
        where = self.context() if context is None else context
        legacy = self.legacy(where)
        name = f"stream {handle:#x} ({'of another library' if made_at is None else 'created at ' + place_of(made_at)})"
        made = self.timeline.stream(name, where, legacy if blocking else None)
        self.streams[handle] = made
        self.devices[made] = self.devices[legacy]
        if made_at is None:
            self.foreign.uses(made)
        return made

    def rename(self, handle: Any, name: str) -> None:
        """Set the name of a stream in reports."""
        stream = self.stream(handle)
        stream.name = f"stream {name!r} ({stream.name.partition('(')[2]}"

    def all_streams(self, context: int | None = None) -> list[Stream]:
        """The streams of a context or of all; destroyed streams may still have work."""
        found = [*self.streams.values(), *self._legacy.values(), *self._per_thread, *self.timeline.retired]
        return [one for one in found if context is None or one.context == context]

    def retire(self, stream: Stream) -> None:
        """Record that a stream was destroyed."""
        self.captures.pop(stream, None)
        self.foreign.ended(stream)
        self.devices.pop(stream, None)
        self.timeline.retire(stream)

    def look(self) -> None:
        """Check for changes that no call shows: values in memory, and work of other libraries."""
        if self.timeline.held:
            self.values.look()
        if self.foreign.pending:
            self.foreign.look()

    # -- waits of the host -----------------------------------------------------------------------------------

    def synchronising(self, streams: Iterable[Stream]) -> Callable[[], None]:
        """Begin a wait of the host for the queued work of streams; call the result when it has succeeded."""
        self.sources.check()
        goals: list[tuple[Obstacle | None, Clock]] = []
        for stream in streams:
            for one in (stream, *(stream.peers or ())):
                mark = self.timeline.record(one) if one.obstacle is not None else None
                goals.append((mark, one.clock.copy()))

        def synchronised() -> None:
            for mark, clock in goals:
                if mark is not None:
                    self.timeline.force_mark(mark)
                self.timeline.host_observes(clock if mark is None or mark.clock is None else mark.clock)

        return synchronised

    def host_waited_for(self, stream: Stream) -> None:
        """Record that the host has waited for the queued work of a stream."""
        self.synchronising((stream,))()

    def wait_for_device(self) -> None:
        """Record that the driver waits for all streams, as it does in a synchronous free."""
        synchronised = self.synchronising(self.all_streams())
        for stream in self.all_streams():
            self.timeline.force(stream)
        synchronised()

    # -- events ----------------------------------------------------------------------------------------------

    def event(self, handle: Any) -> Event:
        """The event of a handle."""
        number = number_of(handle)
        found = self.events.get(number)
        if found is None:
            found = self.events[number] = Event(foreign=True)
        return found

    def record(self, event: Event, handle: Any, external: bool = False) -> None:
        """Record an event in a stream; ``external``: in a capture, at each launch."""
        stream = self.stream(handle)
        capture = self.capture_of(stream)
        if capture is not None and external:
            self.name(handle, capture.step(lambda handle: self.record(event, handle)))
        elif capture is not None:
            event.mark, event.captured = None, (capture, capture.record(stream))
        else:
            event.captured = None
            event.mark = self.timeline.record(stream)
            if event.shared:
                self.sources.clear()
                self.interprocess.notifies(stream)
                number = self.interprocess.recorded(event)
                self.timeline.submit(stream, lambda stream: self._publish(stream, event, number))

    def _publish(self, stream: Stream, event: Event, number: int) -> None:
        self.values.published.learn(stream.clock)
        self.interprocess.covers(event, stream.clock, number)

    def wait(self, stream: Stream, event: Event, external: bool = False) -> None:
        """Have a stream wait for an event; ``external``: in a capture, at each launch for an event outside."""
        capture = self.capture_of(stream)
        if event.captured is not None:
            of, clock = event.captured
            if not of.ended:
                of.join(stream, clock)
                self.captures[stream] = of
        elif capture is not None:
            if external:
                self.name(stream, capture.step(lambda handle: self.wait(self.stream(handle), event)))
        else:
            if event.mark is not None:
                self.timeline.wait(stream, event.mark)
            unseen = self.interprocess.recorded_elsewhere(event)
            if unseen is not None:
                self.timeline.submit(stream, lambda stream: stream.clock.learn(unseen))

    # -- uses ------------------------------------------------------------------------------------------------

    def _pieces(self, touched: Iterable[Touch]) -> Pieces:
        return [
            (piece, write) for at, size, write in touched for piece in self.addresses.pieces(number_of(at), int(size))
        ]

    def pieces(self, touched: Iterable[Touch]) -> Pieces:
        """The ranges behind addresses, without freed ones whose addresses other memory may have."""
        return [one for one in self._pieces(touched) if not one[0][0].vacated]

    def _prepare(self, pieces: Pieces) -> None:
        """Update what other processes have announced about memory before its use."""
        if self.interprocess.imported:
            for range_ in {piece[0] for piece, _ in pieces}:
                self.interprocess.refresh(range_)
        self.sources.forget(piece[0] for piece, write in pieces if write)

    def act(
        self,
        handle: Any,
        what: str,
        touched: Iterable[Touch],
        stack: Stack,
        atomic: bool = False,
        kernel: bool = False,
    ) -> Stream:
        """Queue reads and writes in a stream."""
        stream = self.stream(handle)
        pieces = self.pieces(touched)
        self._queue_use(stream, handle, Node("use", what, stack, pieces, kernel=kernel), atomic)
        return stream

    def use_on_device(self, handle: Any, address: int, nbytes: int, write: bool) -> None:
        """Queue a kernel that the program reports; the access rights of its device are checked."""
        stream, stack = self.stream(handle), here()
        pieces = self._pieces([(address, nbytes, write)])
        self._queue_use(stream, handle, Node("use", KERNEL, stack, pieces, kernel=True), checks_rights=True)
        if sum(high - low for (_, low, high), _ in pieces) < nbytes and stream not in self.captures:
            for range_ in self.reserved.overlapping(address, address + nbytes):
                self.judge.report(
                    "access without a grant",
                    f"a kernel on {stream.name} uses a part of {range_} where no memory is mapped.",
                    "map memory there and grant access before the use (cuMemMap, cuMemSetAccess).",
                    range_,
                    stack,
                )

    def _queue_use(
        self, stream: Stream, handle: Any, node: Node, atomic: bool = False, checks_rights: bool = False
    ) -> None:
        pieces, what, stack, kernel = node.pieces, node.what, node.stack, node.kernel
        self._prepare(pieces)
        capture = self.capture_of(stream)
        if capture is not None:
            capture.add(stream, node)
            if not checks_rights:
                self.name(handle, node)
            return
        device = self.devices.get(stream) if checks_rights else None
        self.timeline.submit(stream, lambda stream: self.touch(stream, pieces, what, stack, atomic, kernel, device))
        self.sources.add(stream, pieces, what, stack)
        if stream.obstacle is not None:
            for (range_, _, _), write in pieces:
                range_.held_write |= write
                if not self.values.may_be_over(stream):
                    # A synchronous free before the stream goes on is a hazard.
                    range_.last[stream.number] = Access(stream, what, stack, write, time=NEVER)
        self.foreign.did(stream, number_of(handle))

    def stale(self, handle: Any, what: str, touched: Iterable[Touch], stack: Stack, *, in_order: bool = True) -> Finish:
        """Report a use of memory that was certainly freed before, which the driver may refuse.

        ``in_order`` is False for a call that names the memory, in no stream order. The result is to be called with the
        answer.
        """
        gone = [one for one in self._pieces(touched) if one[0][0].ended is not None]
        if not gone:
            return nothing
        stream = self.stream(handle) if in_order else None
        if stream is None:
            return self._stale(gone, self.thread(), self.timeline.everything(), what, stack)
        if stream in self.captures:
            return self.stale_at_launch(what, touched, stack)
        elif stream.obstacle is None:
            return self._stale(gone, stream, self.timeline.before_next(stream), what, stack)
        return nothing

    def stale_at_launch(self, what: str, touched: Iterable[Touch], stack: Stack) -> Finish:
        """Report that a graph gets an operation on memory that was freed; a pool or a mapping may have it again."""
        gone = [one for one in self._pieces(touched) if one[0][0].vacated]
        return self._stale(gone, self.thread(), self.timeline.everything(), what, stack) if gone else nothing

    def _stale(self, gone: Pieces, actor: Actor, clock: Clock, what: str, stack: Stack) -> Finish:
        late = []
        for (range_, low, high), write in gone:
            pieces, access, ended = ((range_, low, high),), Access(actor, what, stack, write), range_.ended
            assert ended is not None
            if ended.actor is not actor and not self.timeline.certain(clock, ended.actor.number, ended.time):
                continue
            if range_.vacated and self._is_there(low):
                # Other memory may have the addresses by now.
                late.append((pieces, access))
            else:
                self.judge.use(pieces, access, clock)

        def finish(answer: tuple[Any, ...]) -> None:
            for pieces, access in late if answer[0] else ():
                self.judge.use(pieces, access, clock)

        return finish

    def touch(
        self,
        stream: Stream,
        pieces: Pieces,
        what: str,
        stack: Stack,
        atomic: bool = False,
        kernel: bool = False,
        device: int | None = None,
    ) -> None:
        """Check the reads and writes of an operation when its stream runs it."""
        written = self.interprocess.written
        for access, piece in accesses(stream, pieces, what, stack, atomic, kernel):
            if self.uninitialized and not (access.write or kernel or self.unseen_kernels or self.foreign.is_there):
                self.judge.reads_unwritten(piece, access)
            self.judge.use((piece,), access, stream.clock, device)
            if access.write and written and piece[0] in written:
                self.interprocess.wrote(*piece, stream)

    def use_on_host(
        self, address: int, nbytes: int, write: bool, what: str = "an access", *, seen: bool = False
    ) -> None:
        """Check a read or write by a host thread; ``seen``: the program reports it."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        access = Access(thread, what, here(), write)
        pieces = self.addresses.pieces(address, nbytes)
        self._prepare([(piece, write) for piece in pieces])
        if seen:
            self.sources.check()
        self.judge.use(pieces, access, self.timeline.host)
        if seen:
            self.sources.view(pieces)

    def revoke(
        self, ranges: Iterable[Range], old: dict[int, int], new: dict[int, int], what: str, stack: Stack
    ) -> None:
        """Report uses that may still run on devices that are about to lose access."""
        lost = {device for device, rights in new.items() if old.get(device, 0) & ~rights}
        for range_ in ranges if lost else ():
            for use in range_.last.values():
                if not isinstance(use.actor, Stream) or self.devices.get(use.actor) not in lost:
                    continue
                if self.timeline.order(self.timeline.host, use.actor.number, use.time) != CERTAIN:
                    self.judge.report(
                        "access without a grant",
                        f"{what} revokes the access of device {self.devices[use.actor]} to {range_}, but nothing "
                        f"orders it after {use}.",
                        missing_order(use, self.thread()),
                        range_,
                        stack,
                        used=use.stack,
                    )

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, address: int, size: int, handle: Any, grants: dict[int, int] | None, stack: Stack) -> Range:
        """Queue an allocation in a stream."""
        stream = self.stream(handle)
        made = Range(address, size, "allocation", stack=stack, grants=grants, pending=True)
        made.born = Moment(stream, "allocation", stack)
        self.addresses.add(made)
        capture = self.capture_of(stream)
        if capture is not None:
            node = Node("allocate", stack=stack, range=made)
            capture.add(stream, node)
            made.born = Moment(stream, "allocation at a launch of its graph", stack)
            self.name(handle, node)
        else:
            self.timeline.submit(stream, lambda stream: self.judge.allocate(made, stream))
            self.foreign.did(stream, number_of(handle))
        return made

    def free(self, address: int, handle: Any, what: str, stack: Stack) -> Finish:
        """Queue a free in a stream before its call; the result is to be called with the answer."""
        found = self.addresses.find(address)
        stream = self.stream(handle)
        if found is None or found.base != address:
            self.timeline.submit(stream, lambda stream: None)
            return nothing
        capture = self.capture_of(stream)
        if capture is not None:
            return self._captured_free(capture, stream, handle, Node("free", what, stack, range=found))
        self.sources.check()
        self.sources.forget((found,))
        check_importers = self.interprocess.frees(found, what, stack, stream)
        refused: list[bool] = []

        def free(stream: Stream) -> None:
            if not refused:
                check_importers()
                self.judge.free(found, stream, stream.clock, what, stack)

        def finish(answer: Any) -> None:
            if answer[0]:
                refused.append(True)
                found.ended = None
            else:
                self.foreign.did(stream, number_of(handle))

        self.timeline.submit(stream, free)
        return finish

    def _captured_free(self, capture: Capture, stream: Stream, handle: Any, node: Node) -> Finish:
        take_back = capture.add(stream, node)

        def finish(answer: Any) -> None:
            if answer[0]:
                capture.graph.nodes.remove(node)
                take_back()
            else:
                self.name(handle, node)

        return finish

    def end(self, ranges: Iterable[Range], what: str, stack: Stack, ending: str = "") -> Finish:
        """Free ranges by the host before its call; the result is to be called with the answer."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        ended = [one for one in ranges if one.ended is None]
        self.sources.check()
        self.sources.forget(ended)
        for one in ended:
            self.interprocess.frees(one, what, stack)()
            self.judge.free(one, thread, self.timeline.host, what, stack, ending)

        def finish(answer: Any) -> None:
            for one in ended:
                if answer[0]:
                    one.ended = None
                else:
                    one.vacated = one.kind not in _KEEP_ADDRESSES

        return finish

    def end_context(self, context: int, what: str, stack: Stack) -> None:
        """Record the end of a context with its streams and memory."""
        for handle in [handle for handle, one in self.streams.items() if one.context == context]:
            self.retire(self.streams.pop(handle))
            self.account.lost("stream", handle)
        for one in [self._legacy.pop(context, None), *(it for it in self._per_thread if it.context == context)]:
            if one is not None:
                self.retire(one)
        self._per_thread = [one for one in self._per_thread if one.context != context]
        thread = self.thread()
        self.timeline.host_acts(thread)
        for range_ in self.addresses.living():
            if range_.context == context != 0:
                range_.ended, range_.vacated = Moment(thread, what, stack), True
                self.account.lost(range_.kind, range_.base)
                self.interprocess.import_ended(range_)

    def map(self, address: int, size: int, offset: int, memory: Physical, stack: Stack) -> None:
        """Add a mapping."""
        made = Range(address, size, "mapping", memory.bytes, offset, stack, grants={}, bindings=memory.bindings)
        memory.mappings = [one for one in memory.mappings if one.ended is None] + [made]
        self.addresses.add(made)

    def mappings(self, address: int, size: int) -> list[Range]:
        """The mappings in an address range."""
        return [one for one in self.addresses.overlapping(address, address + size) if one.kind == "mapping"]

    # -- values in memory, host functions --------------------------------------------------------------------

    def write_value(self, handle: Any, address: int, value: int, bits: int) -> None:
        """Queue a write of a value in a stream (``cuStreamWriteValue32``)."""
        stream = self.stream(handle)
        capture = self.capture_of(stream)
        if capture is not None:
            self.name(handle, capture.step(lambda handle: self.write_value(handle, address, value, bits)))
        else:
            # The host may poll the value.
            self.sources.clear()
            self.interprocess.notifies(stream)
            self._use_word(stream, f"cuStreamWriteValue{bits}", address, bits // 8)
            self.values.write(stream, address, value)

    def _use_word(self, stream: Stream, what: str, address: int, nbytes: int) -> None:
        """Queue a use of a value in device memory, which has to be allocated; it races with no other use."""
        found = self.addresses.find(address)
        if found is None or found.kind in HOST_KINDS:
            return
        pieces, stack = ((found, address, address + nbytes),), here()

        def use(stream: Stream) -> None:
            self.judge.use(pieces, Access(stream, what, stack, True), stream.clock, races=False)

        self.timeline.submit(stream, use)

    def wait_value(self, handle: Any, address: int, value: int, flag: int, bits: int) -> None:
        """Queue a wait for a value in a stream (``cuStreamWaitValue32``)."""
        stream = self.stream(handle)
        capture = self.capture_of(stream)
        if capture is not None:
            self.name(handle, capture.step(lambda handle: self.wait_value(handle, address, value, flag, bits)))
        else:
            self._use_word(stream, f"cuStreamWaitValue{bits}", address, bits // 8)
            held = stream.obstacle
            self.values.wait(stream, address, value, flag, bits)
            if held is None and stream.obstacle is not None:
                self._holds(stream, f"cuStreamWaitValue{bits}", address, bits // 8)

    def _holds(self, stream: Stream, what: str, address: int, nbytes: int) -> None:
        """Record the memory of a value that a stream waits for: it is in use until the wait is over."""
        last = next((range_.last for range_, _, _ in self.addresses.pieces(address, nbytes)), {})
        before, waiting = last.get(stream.number), Access(stream, what, here(), False, time=NEVER)
        last[stream.number] = waiting

        def over(stream: Stream) -> None:
            if last.get(stream.number) is waiting:
                del last[stream.number]
                if before is not None:
                    last[stream.number] = before

        self.timeline.submit(stream, over)

    def host_call(self, stays: bool) -> HostCall:
        """A new host function; ``stays``: a graph has it."""
        return HostCall(self.timeline, self.stream, self.thread, stays)

    def host_function(self, handle: Any) -> HostCall:
        """Queue a call of a host function in a stream; a captured stream calls it at each launch."""
        stream = self.stream(handle)
        capture = self.capture_of(stream)
        made = self.host_call(stays=capture is not None)
        if capture is None:
            made.queue(handle)
        else:
            made.node = capture.step(made.queue, made)
        return made

    # -- graphs ----------------------------------------------------------------------------------------------

    def name(self, handle: Any, *nodes: Node) -> None:
        """Ask the driver for the node that a call has added to the capture of a stream."""
        stream = handle if isinstance(handle, Stream) else self.stream(handle)
        capture = self.captures.get(stream)
        if capture is None:
            return
        number = next((one for one, it in self.streams.items() if it is stream), 0) if handle is stream else handle
        answer = self.answer("cuStreamGetCaptureInfo", number)
        there = answer[3] if len(answer) > 4 else None
        capture.name(stream, int(there[0]) if there and int(answer[-1]) == 1 else 0, nodes)

    def graph(self, handle: Any) -> Graph:
        """The graph of a handle."""
        return self.graphs.setdefault(number_of(handle), Graph())

    def launch(self, executable: int, handle: Any, stack: Stack) -> None:
        """Queue a launch of a graph, which runs after earlier launches of the same."""
        stream = self.stream(handle)
        nodes = self.executables.get(executable, [])
        capture = self.capture_of(stream)
        if capture is not None:
            copies = [replace(node, handle=0) for node in nodes]
            for node in copies:
                capture.add(stream, node)
            self.name(handle, *copies)
            return
        before = self.launched.get(executable)
        if before is not None:
            self.timeline.wait(stream, before)
        used = [one for node in nodes if node.enabled for one in node.pieces]
        self._prepare(used)
        together: list[Node] = []
        for node in nodes:
            if node.kind == "step":
                self._run(stream, together, stack)
                together = []
                node.step(handle)
                continue
            together.append(node)
            if node.kind == "allocate":
                if self.addresses.find(node.range.base) is not node.range:
                    self.addresses.add(node.range)
            elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
                # The graph uses the memory that is mapped there now.
                node.pieces = self._pieces((low, high - low, write) for (_, low, high), write in node.pieces)
        self._run(stream, together, stack)
        if stream.obstacle is not None:
            for (range_, _, _), write in used:
                range_.held_write |= write
        elif not any(node.kind == "step" for node in nodes):
            self.sources.add(stream, used, "cuGraphLaunch", stack)
        self.launched[executable] = self.timeline.record(stream)

    def _run(self, stream: Stream, nodes: list[Node], stack: Stack) -> None:
        def run(stream: Stream) -> None:
            device = self.devices.get(stream)
            for node in nodes:
                self.timeline.next(stream)
                if not node.enabled:
                    continue
                launched = Launched(node.stack, stack)
                if node.kind == "use":
                    self.touch(stream, node.pieces, node.what, launched, kernel=node.kernel, device=device)
                elif node.kind == "free":
                    self.judge.free(node.range, stream, stream.clock, node.what, launched)
                else:
                    made = node.range
                    if not made.pending and made.ended is None:
                        # The graph was instantiated with a free at each launch.
                        self.judge.free(made, stream, stream.clock, "cuGraphLaunch", stack)
                    made.ended = None
                    made.last.clear()
                    made.bytes = Bytes()
                    self.judge.allocate(made, stream)

        self.timeline.submit(stream, run)

    # -- the end ---------------------------------------------------------------------------------------------

    def leaks(self) -> list[Hazard]:
        """A hazard for each place that allocated memory which is not freed."""
        there: list[tuple[str, Range | Physical]] = [
            (one.kind, one)
            for one in self.addresses.living()
            if not one.pending and one.kind not in ("registered memory", "array")
        ]
        there += [
            ("physical memory", one)
            for one in dict.fromkeys(self.physical.values())
            if one.stack and all(mapping.ended for mapping in one.mappings)
        ]
        places: dict[tuple[str, Stack], list[Range | Physical]] = {}
        for kind, one in there:
            places.setdefault((kind, one.stack), []).append(one)
        return [
            Hazard(
                "leak",
                f"{leaked[0]} was not freed" + (f", and {len(leaked) - 1} more." if len(leaked) > 1 else "."),
                "free it before the end.",
                leaked[0].base if isinstance(leaked[0], Range) else 0,
                sum(one.size for one in leaked),
                places=(("allocated", stack),),
            )
            for (_, stack), leaked in places.items()
        ]

    def close(self) -> None:
        """Check the operations of waiting streams as if they had run, and remove the entries for other processes."""
        self.sources.check()
        for stream in tuple(self.timeline.held):
            self.timeline.force(stream)
        self.interprocess.close()
        self.files.close()
