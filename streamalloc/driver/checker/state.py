"""What the checker knows of a driver: its streams, events, graphs and memory, in terms of :mod:`.hazards`."""

from __future__ import annotations

import ctypes
import mmap
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
from streamalloc.driver.checker.hazards import (
    NEVER,
    Access,
    Addresses,
    Binding,
    Bytes,
    Judge,
    Moment,
    Piece,
    Range,
    accesses,
    size_text,
)
from streamalloc.driver.checker.interprocess import Interprocess
from streamalloc.driver.checker.open_files import OpenFiles
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Launched, Stack, here, place_of
from streamalloc.driver.checker.wait_values import WaitValues

__all__ = ["KERNEL", "OPENED", "Array", "HostCall", "Physical", "State", "Touch", "number_of"]

Touch = tuple[int, int, bool]
"""Where, how many bytes, and whether they are written."""

KERNEL = "a kernel"
"""A use that a program tells of."""
OPENED = "memory of another process"
"""The kind of a range that ``cuIpcOpenMemHandle`` gives."""
_LEGACY, _PER_THREAD = 1, 2
_ARRAYS = 1 << 64
"""Where the addresses begin that stand for arrays."""
_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_IS_MANAGED = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_HOST_KINDS = ("pinned memory", "registered memory")


def _nothing(answer: tuple[Any, ...]) -> None:
    """Nothing was found before the call."""


def number_of(value: Any) -> int:
    """A handle or an address as a number; None is 0, and an object with bytes of the host is where these are."""
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
    """How many rows a plane has."""
    element: int = 1


class Physical:
    """Physical memory, or a multicast object, with its handles."""

    def __init__(self, size: int, stack: Stack, device: int | None, multicast: bool = False) -> None:
        self.bytes: Bytes = Bytes()
        self.size = size
        self.stack = stack
        self.device = device
        self.bindings: list[Binding] | None = [] if multicast else None
        self.mappings: list[Range] = []

    def __str__(self) -> str:
        return f"physical memory of {size_text(self.size)}"


class HostCall:
    """A function of the host that streams call: once, or at each launch of a graph."""

    __slots__ = ("_queued", "_running", "_state", "cancelled", "node", "stays")

    def __init__(self, state: State) -> None:
        self._state = state
        self._queued: deque[tuple[Stream, Obstacle, Obstacle]] = deque()
        """For each call that was queued: its stream, the end of what comes before, and its own end."""
        self._running: list[Obstacle] = []
        self.node: Node | None = None
        """What it is in a capture."""
        self.stays = False
        """Whether a graph has it, which may be launched again."""
        self.cancelled = False

    def queue(self, handle: Any) -> None:
        """A stream is to call it."""
        if self.cancelled:
            return
        timeline, stream = self._state.timeline, self._state.stream(handle)
        before, ended = timeline.record(stream), Obstacle()
        timeline.wait(stream, ended)
        self._queued.append((stream, before, ended))

    def begins(self) -> None:
        """The oldest call begins: all that its stream did before is over."""
        timeline = self._state.timeline
        if not self._queued:
            # Other code has launched the graph.
            timeline.host_observes(timeline.everything())
            return
        stream, before, ended = self._queued.popleft()
        self._running.append(ended)
        self._state.thread().within = stream
        timeline.force_mark(before)
        if before.clock is not None:
            timeline.host_observes(before.clock)

    def ends(self) -> None:
        """The call has returned."""
        if self._running:
            self._state.timeline.end(self._running.pop(0), self._state.timeline.host)
        self._state.thread().within = None

    def refused(self) -> None:
        """The driver has refused the call that queues it."""
        if self.stays:
            self.cancelled = True
        else:
            self.skip()

    def skip(self) -> None:
        """The latest call that was queued does not come."""
        if self._queued:
            self._state.timeline.end(self._queued.pop()[2], self._state.timeline.host)


class _Thread:
    """A host thread, with its per-thread streams by context."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.streams: dict[int, Stream] = {}


class State:
    """All that calls have told; guarded by the lock of its owner."""

    def __init__(self, driver: Any, found: Callable[[Hazard], None]) -> None:
        self.driver = driver
        self.account: Account = Account()
        self.timeline: Timeline = Timeline()
        self.found: Callable[[Hazard], None] = found
        self.addresses: Addresses = Addresses()
        self.reserved: Addresses = Addresses()
        """Addresses that memory can be mapped at."""
        self.values: WaitValues = WaitValues(self.timeline, self.addresses, self.is_of_host)
        self.judge: Judge = Judge(self.timeline, found, self.values.published)
        self.streams: dict[int, Stream] = {}
        self.devices: dict[Stream, int | None] = {}
        self.events: dict[int, Event] = {}
        self.interprocess: Interprocess = Interprocess(self.timeline, self.addresses, self.values, self.events, found)
        self.foreign: ForeignStreams = ForeignStreams(driver, self.timeline)
        self.captures: dict[Stream, Capture] = {}
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, list[Node]] = {}
        self.launched: dict[int, Obstacle] = {}
        """The end of the latest launch of each."""
        self.host_calls: dict[int, HostCall] = {}
        """By the pointer that the driver was given."""
        self.physical: dict[int, Physical] = {}
        self.arrays: dict[int, Array] = {}
        self.mipmapped: dict[int, tuple[Any, dict[int, None]]] = {}
        """What these were made with, and the handles of the levels that were asked for."""
        self.array_end: int = _ARRAYS
        self.primary: dict[int, int] = {}
        """The primary contexts of devices."""
        self.pools: dict[int, dict[int, int] | None] = {}
        """What devices may do with the memory of a pool, by its handle."""
        self.current_pools: dict[int, int] = {}
        self.uninitialized: bool = False
        """Whether copies of what nobody has written are reported."""
        self.unseen_kernels: bool = False
        """Whether there were kernels, which may have written anything."""
        self.notes: dict[str, None] = {}
        """What is not checked, each once."""
        self.files: OpenFiles[Physical] = OpenFiles()
        """What was exported or imported, by its file."""
        self._legacy: dict[int, Stream] = {}
        self._per_thread: list[Stream] = []
        self._here = threading.local()
        self._over: deque[dict[int, Stream]] = deque()
        """The per-thread streams of threads that have ended."""
        # The bindings take 0 for the per-thread stream where this is set.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self._zero = _PER_THREAD if per_thread else _LEGACY

    def note(self, text: str) -> None:
        """Something is not checked from now on."""
        self.notes[text] = None

    # -- who -------------------------------------------------------------------------------------------------

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

    def _ask(self, name: str, *args: Any) -> int:
        """What the driver answers, 0 where it has no answer."""
        function = getattr(self.driver, name, None)
        if function is None:
            return 0
        answer = function(*args)
        return 0 if answer[0] else int(answer[1])

    def context(self) -> int:
        """The context that is current."""
        return self._ask("cuCtxGetCurrent")

    def stream(self, handle: Any) -> Stream:
        """The stream of a handle."""
        number = number_of(handle)
        found = self.streams.get(number)
        return self._special(number) if found is None else found

    def _special(self, number: int) -> Stream:
        kind = number or self._zero
        if kind in (_LEGACY, _PER_THREAD):
            context = self.context()
            legacy = self.legacy(context)
            if kind == _LEGACY:
                return legacy
            mine = self._thread().streams
            found = mine.get(context)
            if found not in self.devices:  # its context may have ended
                while self._over:
                    for one in self._over.popleft().values():
                        if one in self._per_thread:
                            self._per_thread.remove(one)
                            self.retire(one)
                name = f"the per-thread default stream of {threading.current_thread().name}"
                found = mine[context] = self.timeline.stream(name, context, legacy)
                self._per_thread.append(found)
                self.foreign.can_use(found)
                self.devices[found] = self.devices[legacy]
            return found
        # Made before anybody looked. Asking a stream that is captured for its flags would break the capture.
        flags = 1 if self._ask("cuStreamIsCapturing", number) else self._ask("cuStreamGetFlags", number)
        return self.add_stream(number, not flags & 1, self._ask("cuStreamGetCtx", number))

    def legacy(self, context: int) -> Stream:
        """The legacy default stream of a context."""
        found = self._legacy.get(context)
        if found is None:
            found = self._legacy[context] = self.timeline.stream("the legacy default stream", context)
            self.devices[found] = self._device()
            self.foreign.can_use(found)
        return found

    def _device(self) -> int | None:
        function = getattr(self.driver, "cuCtxGetDevice", None)
        answer: Any = (1,) if function is None else function()
        return None if answer[0] else int(answer[1])

    def add_stream(
        self, handle: int, blocking: bool, context: int | None = None, made_at: Stack | None = None
    ) -> Stream:
        """A stream that was made; ``made_at``: where, None where other code has made it."""
        where = self.context() if context is None else context
        legacy = self.legacy(where)
        name = f"stream {handle:#x} ({'of other code' if made_at is None else 'created at ' + place_of(made_at)})"
        made = self.timeline.stream(name, where, legacy if blocking else None)
        self.streams[handle] = made
        self.devices[made] = self.devices[legacy]
        if made_at is None:
            self.foreign.uses(made)
        return made

    def all_streams(self, context: int | None = None) -> list[Stream]:
        """The streams of a context, or all; those that were destroyed may have something left to do."""
        found = [*self.streams.values(), *self._legacy.values(), *self._per_thread, *self.timeline.retired]
        return [one for one in found if context is None or one.context == context]

    def retire(self, stream: Stream) -> None:
        """A stream was destroyed."""
        self.captures.pop(stream, None)
        self.foreign.ended(stream)
        self.devices.pop(stream, None)
        self.timeline.retire(stream)

    def look(self) -> None:
        """See what came about past this driver."""
        if self.timeline.held:
            self.values.look()
        if self.foreign.pending:
            self.foreign.look()

    # -- what the host learns --------------------------------------------------------------------------------

    def behind(self, streams: Iterable[Stream]) -> list[tuple[Stream, Obstacle | None, Clock]]:
        """How far streams are to come now; for :meth:`reached`."""
        goals: list[tuple[Stream, Obstacle | None, Clock]] = []
        for stream in streams:
            for one in (stream, *(stream.peers or ())):
                mark = self.timeline.record(one) if one.obstacle is not None else None
                goals.append((one, mark, one.clock.copy()))
        return goals

    def reached(self, goals: Iterable[tuple[Stream, Obstacle | None, Clock]]) -> None:
        """The host knows that streams have come as far as they were to."""
        for _, mark, clock in goals:
            if mark is not None:
                self.timeline.force_mark(mark)
            self.timeline.host_observes(clock if mark is None or mark.clock is None else mark.clock)

    def host_waited_for(self, stream: Stream) -> None:
        """The host has waited for all of a stream."""
        self.reached(self.behind((stream,)))

    # -- events ----------------------------------------------------------------------------------------------

    def event(self, handle: Any) -> Event:
        """The event of a handle."""
        number = number_of(handle)
        found = self.events.get(number)
        if found is None:
            found = self.events[number] = Event(foreign=True)
        return found

    def record(self, event: Event, handle: Any, external: bool = False) -> None:
        """An event is recorded; ``external``: in a capture, at each launch."""
        stream = self.stream(handle)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None and external:
            self.name(handle, capture.step(lambda handle: self.record(event, handle)))
        elif capture is not None:
            event.mark, event.captured = None, (capture, capture.record(stream))
        else:
            event.captured = None
            event.mark = self.timeline.record(stream)
            if event.shared:
                number = self.interprocess.recorded(event)
                self.timeline.submit(stream, lambda stream: self._publish(stream, event, number))

    def _publish(self, stream: Stream, event: Event, number: int) -> None:
        self.values.published.learn(stream.clock)
        self.interprocess.covers(event, stream.clock, number)

    def wait(self, stream: Stream, event: Event, external: bool = False) -> None:
        """A stream is to wait for an event; ``external``: in a capture, for one of outside at each launch."""
        capture = self.captures.get(stream) if self.captures else None
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
            others = self.interprocess.elsewhere(event)
            if others is not None:
                self.timeline.submit(stream, lambda stream: stream.clock.learn(others))

    # -- memory ----------------------------------------------------------------------------------------------

    def act(
        self,
        handle: Any,
        what: str,
        touched: Iterable[Touch],
        stack: Stack,
        atomic: bool = False,
        kernel: bool = False,
    ) -> Stream:
        """A stream is to read and write memory."""
        stream = self.stream(handle)
        pieces = [
            (piece, write)
            for at, size, write in touched
            for piece in self.addresses.pieces(number_of(at), int(size))
            if not piece[0].vacated
        ]
        self._refresh(pieces)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            node = Node("use", what, stack, pieces, kernel=kernel)
            capture.add(stream, node)
            self.name(handle, node)
        else:
            self.timeline.submit(stream, lambda stream: self.touch(stream, pieces, what, stack, atomic, kernel))
            if stream.obstacle is not None:
                self._is_to_touch(stream, pieces, what, stack)
            self.foreign.did(stream, number_of(handle))
        return stream

    def _refresh(self, pieces: Iterable[tuple[Piece, bool]]) -> None:
        if self.interprocess.imported:
            for range_ in {piece[0] for piece, _ in pieces}:
                self.interprocess.refresh(range_)

    def _is_to_touch(self, stream: Stream, pieces: list[tuple[Piece, bool]], what: str, stack: Stack) -> None:
        """A stream that waits is to use memory, which must not be ended at once before."""
        if not self.values.may_be_over(stream):
            for (range_, _, _), write in pieces:
                range_.last[stream.number] = Access(stream, what, stack, write, time=NEVER)

    def stale(
        self, handle: Any, what: str, touched: Iterable[Touch], stack: Stack
    ) -> Callable[[tuple[Any, ...]], None]:
        """A stream is asked to use memory; report what has certainly ended before, which the driver may refuse.

        What is returned is to be called with the answer.
        """
        gone = [
            (piece, write)
            for at, size, write in touched
            for piece in self.addresses.pieces(number_of(at), int(size))
            if piece[0].ended is not None
        ]
        if not gone:
            return _nothing
        stream, late = self.stream(handle), []
        if stream in self.captures or stream.obstacle is not None:
            return _nothing
        clock = self.timeline.before_next(stream)
        for (range_, low, high), write in gone:
            pieces, access, ended = ((range_, low, high),), Access(stream, what, stack, write), range_.ended
            assert ended is not None
            if ended.actor is not stream and not self.timeline.certain(clock, ended.actor.number, ended.time):
                continue
            if range_.vacated and self._is_there(range_, low):
                # It may be ordinary memory by now, or that of other code.
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
        pieces: list[tuple[Piece, bool]],
        what: str,
        stack: Stack,
        atomic: bool = False,
        kernel: bool = False,
        device: int | None = None,
    ) -> None:
        """A stream reads and writes memory: in no order, save for a kernel, whose own order is not known."""
        written = self.interprocess.written
        for access, piece in accesses(stream, pieces, what, stack, atomic, kernel):
            if self.uninitialized and not (access.write or kernel or self.unseen_kernels or self.foreign.is_there):
                self.judge.reads_unwritten(piece, access)
            self.judge.use((piece,), access, stream.clock, device)
            if access.write and written and piece[0] in written:
                self.interprocess.wrote(*piece, stream)

    def use_on_host(self, address: int, nbytes: int, write: bool, what: str = "use by the host") -> None:
        """A host thread reads or writes memory itself."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        access = Access(thread, what, here(), write)
        pieces = self.addresses.pieces(address, nbytes)
        self._refresh([(piece, write) for piece in pieces])
        self.judge.use(pieces, access, self.timeline.host)

    def use_on_device(self, handle: Any, address: int, nbytes: int, write: bool) -> None:
        """A stream uses memory in a way that is told: its device's rights count as well."""
        stream, stack = self.stream(handle), here()
        pieces = [(piece, write) for piece in self.addresses.pieces(address, nbytes)]
        self._refresh(pieces)
        capture = self.captures.get(stream)
        if capture is not None:
            capture.add(stream, Node("use", KERNEL, stack, pieces, kernel=True))
            return
        device = self.devices.get(stream)
        self.timeline.submit(
            stream, lambda stream: self.touch(stream, pieces, KERNEL, stack, kernel=True, device=device)
        )
        if stream.obstacle is not None:
            self._is_to_touch(stream, pieces, KERNEL, stack)
        self.foreign.did(stream, number_of(handle))
        if sum(high - low for (_, low, high), _ in pieces) < nbytes:
            for range_ in self.reserved.overlapping(address, address + nbytes):
                self._unmapped(stream, range_, stack)

    def _unmapped(self, stream: Stream, range_: Range, stack: Stack) -> None:
        self.found(
            Hazard(
                "access without a grant",
                f"a kernel of {stream.name} uses a part of {range_} where no memory is mapped",
                "map memory there and grant access before it is used (cuMemMap, cuMemSetAccess)",
                range_.base,
                range_.size,
                places=(("this call", stack), ("reserved", range_.stack)),
            )
        )

    def revoke(
        self, ranges: Iterable[Range], old: dict[int, int], new: dict[int, int], what: str, stack: Stack
    ) -> None:
        """The rights of devices are about to change."""
        lost = {device for device, rights in new.items() if old.get(device, 0) & ~rights}
        for range_ in ranges if lost else ():
            for use in range_.last.values():
                if not isinstance(use.actor, Stream) or self.devices.get(use.actor) not in lost:
                    continue
                if self.timeline.order(self.timeline.host, use.actor.number, use.time) != CERTAIN:
                    self.found(
                        Hazard(
                            "access without a grant",
                            f"{what} takes away the access of device {self.devices[use.actor]} to {range_}, which "
                            f"{use.what} of {use.actor.name} may still be using",
                            f"the host must synchronise with {use.actor.name} after its {use.what}",
                            range_.base,
                            range_.size,
                            places=(("this call", stack), ("used", use.stack), ("allocated", range_.stack)),
                        )
                    )

    def allocate(self, address: int, size: int, handle: Any, grants: dict[int, int] | None, stack: Stack) -> Range:
        """Memory was allocated in stream order."""
        stream = self.stream(handle)
        made = Range(address, size, "allocation", stack=stack, grants=grants, pending=True)
        made.born = Moment(stream, "allocation", stack)
        self.addresses.add(made)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            node = Node("allocate", stack=stack, range=made)
            capture.add(stream, node)
            made.born = Moment(stream, "allocation at a launch of its graph", stack)
            self.name(handle, node)
        else:
            self.timeline.submit(stream, lambda stream: self.judge.allocate(made, stream))
            self.foreign.did(stream, number_of(handle))
        return made

    def free(self, address: int, handle: Any, what: str, stack: Stack) -> Callable[[Any], None]:
        """Memory is about to be freed in stream order; returns what is to be called with the answer."""
        found = self.addresses.find(address)
        stream = self.stream(handle)
        if found is None or found.base != address:
            self.timeline.submit(stream, lambda stream: None)
            return lambda answer: None
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            return self._captured_free(capture, stream, handle, Node("free", what, stack, range=found))
        self.interprocess.frees(found, what, stack)
        refused: list[bool] = []

        def free(stream: Stream) -> None:
            if not refused:
                self.judge.free(found, stream, stream.clock, what, stack)

        def finish(answer: Any) -> None:
            if answer[0]:
                refused.append(True)
                found.ended = None
            else:
                self.foreign.did(stream, number_of(handle))

        self.timeline.submit(stream, free)
        return finish

    def _captured_free(self, capture: Capture, stream: Stream, handle: Any, node: Node) -> Callable[[Any], None]:
        take_back = capture.add(stream, node)

        def finish(answer: Any) -> None:
            if answer[0]:
                capture.graph.nodes.remove(node)
                take_back()
            else:
                self.name(handle, node)

        return finish

    def end(self, ranges: Iterable[Range], what: str, stack: Stack, ending: str = "") -> Callable[[Any], None]:
        """The host is about to end ranges at once; returns what is to be called with the answer."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        ended = [one for one in ranges if one.ended is None]
        for one in ended:
            self.interprocess.frees(one, what, stack, at_once=True)
            self.judge.free(one, thread, self.timeline.host, what, stack, ending)

        def finish(answer: Any) -> None:
            for one in ended:
                if answer[0]:
                    one.ended = None
                else:
                    # Memory of pools and mappings keep their addresses longer.
                    one.vacated = one.kind not in ("allocation", "import", "mapping", "array")

        return finish

    def end_context(self, context: int, what: str, stack: Stack) -> None:
        """A context has ended, and with it what was its own."""
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
                self.interprocess.let_go(range_)

    def map(self, address: int, size: int, offset: int, memory: Physical, stack: Stack) -> None:
        """Memory was mapped."""
        made = Range(address, size, "mapping", memory.bytes, offset, stack, grants={}, bindings=memory.bindings)
        memory.mappings = [one for one in memory.mappings if one.ended is None] + [made]
        self.addresses.add(made)

    def mappings(self, address: int, size: int) -> list[Range]:
        """The mappings of a range of addresses."""
        return [one for one in self.addresses.overlapping(address, address + size) if one.kind == "mapping"]

    # -- words -----------------------------------------------------------------------------------------------

    def write_word(self, handle: Any, address: int, value: int, bits: int) -> None:
        """A stream is to write a word, after all that it has queued."""
        stream = self.stream(handle)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            self.name(handle, capture.step(lambda handle: self.write_word(handle, address, value, bits)))
        else:
            self.values.write(stream, address, value)

    def wait_word(self, handle: Any, address: int, value: int, flag: int, bits: int) -> None:
        """A stream is to wait for a value of a word."""
        stream = self.stream(handle)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            self.name(handle, capture.step(lambda handle: self.wait_word(handle, address, value, flag, bits)))
        else:
            self.values.wait(stream, address, value, flag, bits)

    def is_of_host(self, address: int) -> bool:
        """Whether the driver knows an address as one of memory of the host."""
        function = getattr(self.driver, "cuPointerGetAttribute", None)
        answer: Any = (1,) if function is None else function(_MEMORY_TYPE, address)
        return not answer[0] and int(answer[1]) == _HOST

    def _is_there(self, range_: Range, address: int) -> bool:
        """Whether there is memory where a range has been."""
        function = getattr(self.driver, "cuPointerGetAttribute", None)
        if function is None or not function(_MEMORY_TYPE, address)[0]:
            return True
        page = mmap.PAGESIZE
        # Of pages that are not mapped the system says so.
        return range_.kind in _HOST_KINDS and not _mincore(address // page * page, page, ctypes.byref(ctypes.c_ubyte()))

    def is_managed(self, address: int) -> bool:
        """Whether the driver migrates some memory."""
        function = getattr(self.driver, "cuPointerGetAttribute", None)
        answer: Any = (1,) if function is None else function(_IS_MANAGED, address)
        return not answer[0] and bool(answer[1])

    # -- host functions --------------------------------------------------------------------------------------

    def host_function(self, handle: Any) -> HostCall:
        """A stream is to call a function of the host; a captured one calls it at each launch."""
        made, stream = HostCall(self), self.stream(handle)
        capture = self.captures.get(stream) if self.captures else None
        if capture is None:
            made.queue(handle)
        else:
            made.stays = True
            made.node = capture.step(made.queue, made)
        return made

    # -- captured nodes --------------------------------------------------------------------------------------

    def name(self, handle: Any, *nodes: Node) -> None:
        """Ask the driver which node a call has added to the capture of a stream."""
        stream = handle if isinstance(handle, Stream) else self.stream(handle)
        capture = self.captures.get(stream)
        function = getattr(self.driver, "cuStreamGetCaptureInfo", None)
        if capture is None or function is None:
            return
        number = next((one for one, it in self.streams.items() if it is stream), 0) if handle is stream else handle
        answer = function(number)
        there = answer[4] if len(answer) > 5 and not answer[0] else None
        capture.name(stream, int(there[0]) if there and int(answer[-1]) == 1 else 0, nodes)

    # -- graphs ----------------------------------------------------------------------------------------------

    def graph(self, handle: Any) -> Graph:
        """The graph of a handle."""
        return self.graphs.setdefault(number_of(handle), Graph())

    def launch(self, executable: int, handle: Any, stack: Stack) -> None:
        """A stream is to run a graph, after earlier launches of the same."""
        stream = self.stream(handle)
        nodes = self.executables.get(executable, [])
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            copies = [replace(node, handle=0) for node in nodes]
            for node in copies:
                capture.add(stream, node)
            self.name(handle, *copies)
            return
        before = self.launched.get(executable)
        if before is not None:
            self.timeline.wait(stream, before)
        self._refresh([one for node in nodes for one in node.pieces])
        together: list[Node] = []
        for node in nodes:
            if node.kind == "step":
                self._run(stream, together, stack)
                together = []
                node.step(handle)
                continue
            together.append(node)
            if node.kind == "allocate":
                self._place(node.range)
            elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
                # What is mapped there now is what the graph uses.
                node.pieces = [
                    (there, write)
                    for (_, low, high), write in node.pieces
                    for there in self.addresses.pieces(low, high - low)
                ]
        self._run(stream, together, stack)
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
                        # Freed by the launch, as the graph was told to.
                        self.judge.free(made, stream, stream.clock, "cuGraphLaunch", stack)
                    made.ended = None
                    made.last.clear()
                    made.bytes = Bytes()
                    self.judge.allocate(made, stream)

        self.timeline.submit(stream, run)

    def _place(self, made: Range) -> None:
        if self.addresses.find(made.base) is not made:
            self.addresses.add(made)

    # -- the end ---------------------------------------------------------------------------------------------

    def leaks(self) -> list[Hazard]:
        """Memory that is there and was not given back: one for each place that allocated it."""
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
                f"{leaked[0]} was not given back" + (f", and {len(leaked) - 1} more" if len(leaked) > 1 else ""),
                "free it, or let it go, before the end",
                leaked[0].base if isinstance(leaked[0], Range) else 0,
                sum(one.size for one in leaked),
                places=(("allocated", stack),),
            )
            for (_, stack), leaked in places.items()
        ]

    def close(self) -> None:
        """Judge what is held, as if all of it had happened, and take entries back."""
        for stream in tuple(self.timeline.held):
            self.timeline.force(stream)
        self.interprocess.close()
        self.files.close()
