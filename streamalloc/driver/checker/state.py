"""What the checker knows of a driver: its streams, events, graphs and memory, in terms of :mod:`.hazards`."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from streamalloc.driver.account import Account
from streamalloc.driver.checker import ledger
from streamalloc.driver.checker.capture import Capture, Node
from streamalloc.driver.checker.clocks import CERTAIN, Actor, Clock, Obstacle, Stream, Timeline
from streamalloc.driver.checker.hazards import Access, Addresses, Binding, Bytes, Judge, Moment, Piece, Range
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Stack, here

__all__ = ["Event", "Physical", "State", "Touch", "number_of"]

Touch = tuple[int, int, bool]
"""Where, how many bytes, and whether they are written."""

_LEGACY, _PER_THREAD = 1, 2
_COMPARISONS: dict[int, Callable[[int, int, int], bool]] = {
    0: lambda word, value, bits: (word - value) % (1 << bits) < 1 << (bits - 1),  # GEQ, cyclic
    1: lambda word, value, bits: word == value,
    2: lambda word, value, bits: word & value != 0,
    3: lambda word, value, bits: ~(word | value) % (1 << bits) != 0,
}
_WORDS: dict[int, Any] = {32: ctypes.c_uint32, 64: ctypes.c_uint64}
_WRITES_KEPT, _WORDS_KEPT = 16, 10_000


def number_of(value: Any) -> int:
    """A handle or an address as a number; None is 0, and an object with bytes of the host is where these are."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return int(np.frombuffer(value, np.uint8).ctypes.data) if len(value) else 0
    return int(value)


class Event:
    """An event, and its latest recording."""

    __slots__ = ("captured", "mark", "shared")

    def __init__(self, shared: bool = False) -> None:
        self.mark: Obstacle | None = None
        """None where it was never recorded, or not in this process."""
        self.captured: tuple[Capture, Clock] | None = None
        self.shared = shared
        """Whether other processes may wait for it."""


class Physical:
    """Physical memory, or a multicast object, with its handles."""

    def __init__(self, size: int, stack: Stack, device: int | None, multicast: bool = False) -> None:
        self.bytes: Bytes = Bytes()
        self.size = size
        self.stack = stack
        self.device = device
        self.bindings: list[Binding] | None = [] if multicast else None
        self.bound_on: list[int | None] = []
        """The device of each binding."""
        self.mappings: list[Range] = []


class _Word(Obstacle):
    """A stream waits for a value of a word."""

    __slots__ = ("accepts", "key", "range", "read")

    def __init__(self, key: tuple[Bytes, int] | None, accepts: Callable[[int], bool]) -> None:
        super().__init__()
        self.key = key
        self.accepts = accepts
        self.range: Range | None = None
        self.read: Callable[[], int] | None = None
        """Reads the word, where the host can."""


class State:
    """All that calls have told; guarded by the lock of its owner."""

    def __init__(self, driver: Any, found: Callable[[Hazard], None]) -> None:
        self.driver = driver
        self.account: Account = Account()
        self.timeline: Timeline = Timeline()
        self.judge: Judge = Judge(self.timeline, found)
        self.found: Callable[[Hazard], None] = found
        self.addresses: Addresses = Addresses()
        self.streams: dict[int, Stream] = {}
        self.devices: dict[Stream, int | None] = {}
        self.events: dict[int, Event] = {}
        self.captures: dict[Stream, Capture] = {}
        self.graphs: dict[int, list[Node]] = {}
        self.executables: dict[int, list[Node]] = {}
        self.launched: dict[int, Obstacle] = {}
        """The end of the latest launch of each."""
        self.physical: dict[int, Physical] = {}
        self.pools: dict[int, dict[int, int] | None] = {}
        """What devices may do with the memory of a pool, by its handle."""
        self.current_pools: dict[int, int] = {}
        self.exports: dict[bytes, Range] = {}
        self.exported: dict[Range, bytes] = {}
        self.entries: dict[Range, Path] = {}
        self.shared_events: dict[bytes, Event] = {}
        self.exported_files: dict[tuple[int, int, int], Physical] = {}
        self._legacy: dict[int, Stream] = {}
        self._per_thread: dict[tuple[int, int], Stream] = {}
        self._threads: dict[int, Actor] = {}
        self._unannounced: dict[int, list[tuple[Range, Stack]]] = {}
        self._words: dict[tuple[Bytes, int], list[tuple[int | None, Clock]]] = {}
        # The bindings take 0 for the per-thread stream where this is set.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self._zero = _PER_THREAD if per_thread else _LEGACY

    # -- who -------------------------------------------------------------------------------------------------

    def thread(self) -> Actor:
        """The calling host thread."""
        number = threading.get_ident()
        actor = self._threads.get(number)
        if actor is None:
            # A number is given to another thread when one has ended: what either did comes before what the other does.
            actor = self._threads[number] = self.timeline.thread("")
        actor.name = f"host thread {threading.current_thread().name}"
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
            thread = threading.get_ident()
            found = self._per_thread.get((context, thread))
            if found is None:
                name = f"the per-thread default stream of {threading.current_thread().name}"
                found = self._per_thread[context, thread] = self.timeline.stream(name, context, legacy)
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
        return found

    def _device(self) -> int | None:
        function = getattr(self.driver, "cuCtxGetDevice", None)
        answer: Any = (1,) if function is None else function()
        return None if answer[0] else int(answer[1])

    def add_stream(self, handle: int, blocking: bool, context: int | None = None) -> Stream:
        """A stream that was made."""
        where = self.context() if context is None else context
        legacy = self.legacy(where)
        made = self.timeline.stream(f"stream {handle:#x}", where, legacy if blocking else None)
        self.streams[handle] = made
        self.devices[made] = self.devices[legacy]
        return made

    def all_streams(self, context: int | None = None) -> list[Stream]:
        """The streams of a context, or all; those that were destroyed may have something left to do."""
        found = [*self.streams.values(), *self._legacy.values(), *self._per_thread.values(), *self.timeline.retired]
        return [one for one in found if context is None or one.context == context]

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
            self.timeline.tell(clock if mark is None or mark.clock is None else mark.clock)

    def host_knows(self, stream: Stream) -> None:
        """The host has waited for all of a stream."""
        self.reached(self.behind((stream,)))

    def look(self) -> None:
        """See which words that streams wait for the host has written meanwhile."""
        for stream in tuple(self.timeline.held):
            word = stream.obstacle
            if isinstance(word, _Word) and word.read is not None:
                gone = word.range is not None and word.range.ended is not None
                if gone or word.accepts(word.read()):
                    self.timeline.end(word, self.timeline.host)

    # -- memory ----------------------------------------------------------------------------------------------

    def act(self, handle: Any, what: str, touched: Iterable[Touch], stack: Stack, atomic: bool = False) -> Stream:
        """A stream is to read and write memory."""
        stream = self.stream(handle)
        pieces = [
            (piece, write) for at, size, write in touched for piece in self.addresses.pieces(number_of(at), int(size))
        ]
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            capture.use(stream, pieces, what, stack)
        else:
            self.timeline.submit(stream, lambda stream: self.touch(stream, pieces, what, stack, atomic))
        return stream

    def touch(
        self,
        stream: Stream,
        pieces: list[tuple[Piece, bool]],
        what: str,
        stack: Stack,
        atomic: bool = False,
        device: int | None = None,
    ) -> None:
        """A stream reads and writes memory."""
        for piece, write in pieces:
            self.judge.use((piece,), Access(stream, what, stack, write, atomic), stream.clock, device)
            if write and self.timeline.held:
                self._wrote(piece, stream)

    def use_on_host(self, address: int, nbytes: int, write: bool) -> None:
        """A host thread reads or writes memory itself."""
        thread = self.thread()
        self.timeline.act(thread)
        access = Access(thread, "use by the host", here(), write)
        self.judge.use(self.addresses.pieces(address, nbytes), access, self.timeline.host)

    def use_on_device(self, handle: Any, address: int, nbytes: int, write: bool) -> None:
        """A stream uses memory in a way that is told: its device's rights count as well."""
        stream, stack = self.stream(handle), here()
        pieces = [(piece, write) for piece in self.addresses.pieces(address, nbytes)]
        capture = self.captures.get(stream)
        if capture is not None:
            capture.use(stream, pieces, "a kernel", stack)
            return
        device = self.devices.get(stream)
        self.timeline.submit(stream, lambda stream: self.touch(stream, pieces, "a kernel", stack, device=device))

    def allocate(self, address: int, size: int, handle: Any, grants: dict[int, int] | None, stack: Stack) -> Range:
        """Memory was allocated in stream order."""
        stream = self.stream(handle)
        made = Range(address, size, "allocation", stack=stack, grants=grants, pending=True)
        made.born = Moment(stream, "allocation", stack)
        self.addresses.add(made)
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            capture.allocate(stream, made)
        else:
            self.timeline.submit(stream, lambda stream: self.judge.allocate(made, stream))
        return made

    def free(self, address: int, handle: Any, what: str, stack: Stack) -> Callable[[], None]:
        """Memory is about to be freed in stream order; returns what takes that back."""
        found = self.addresses.find(address)
        stream = self.stream(handle)
        if found is None or found.base != address:
            self.timeline.submit(stream, lambda stream: None)
            return lambda: None
        capture = self.captures.get(stream) if self.captures else None
        if capture is not None:
            return capture.free(stream, found, what, stack)
        self._exporter_frees(found, what, stack)
        refused: list[bool] = []

        def free(stream: Stream) -> None:
            if not refused:
                self.judge.free(found, stream, stream.clock, what, stack)

        def undo() -> None:
            refused.append(True)
            found.ended = None

        self.timeline.submit(stream, free)
        return undo

    def end(self, ranges: Iterable[Range], what: str, stack: Stack, ending: str = "") -> Callable[[], None]:
        """The host is about to end ranges at once; returns what takes that back."""
        thread = self.thread()
        self.timeline.act(thread)
        ended = [one for one in ranges if one.ended is None]
        for one in ended:
            self._exporter_frees(one, what, stack)
            self.judge.free(one, thread, self.timeline.host, what, stack, ending)

        def undo() -> None:
            for one in ended:
                one.ended = None

        return undo

    def map(self, address: int, size: int, offset: int, memory: Physical, stack: Stack) -> None:
        """Memory was mapped."""
        made = Range(address, size, "mapping", memory.bytes, offset, stack, grants={}, bindings=memory.bindings)
        memory.mappings = [one for one in memory.mappings if one.ended is None] + [made]
        self.addresses.add(made)

    def mappings(self, address: int, size: int) -> list[Range]:
        """The mappings of a range of addresses."""
        return [one for one in self.addresses.overlapping(address, address + size) if one.kind == "mapping"]

    # -- sharing ---------------------------------------------------------------------------------------------

    def _exporter_frees(self, range_: Range, what: str, stack: Stack) -> None:
        entry = self.entries.pop(range_, None)
        if entry is not None:
            ledger.close_import(entry)
        exported = self.exported.get(range_)
        if exported is not None:
            others = ledger.holders(exported)
            if others:
                self.found(
                    Hazard(
                        "free before the importer's",
                        f"{what} of {range_}, which process {', '.join(map(str, others))} has imported and not freed",
                        "free it when every importer has freed its pointer, and say so to this process",
                        range_.base,
                        range_.size,
                        places=(("this call", stack), ("allocated", range_.stack)),
                    )
                )

    def incomplete(self, range_: Range, clock: Clock) -> Moment | None:
        """What has been done to memory and does not come before something with this clock."""
        moments: list[Moment] = [one for one in range_.last.values() if one.write]
        if range_.born is not None:
            moments.append(range_.born)
        order = self.timeline.order
        return next((one for one in moments if order(clock, one.actor.number, one.time) != CERTAIN), None)

    def export(self, range_: Range, exported: bytes, stack: Stack, announced_later: bool) -> None:
        """An allocation was exported."""
        self.exports[exported] = range_
        self.exported[range_] = exported
        if announced_later:
            self._unannounced.setdefault(threading.get_ident(), []).append((range_, stack))
            return
        missing = self.incomplete(range_, self.timeline.host)
        clocks = (one.mark.clock for one in self.events.values() if one.shared and one.mark and one.mark.clock)
        if missing is not None and not any(self.incomplete(range_, clock) is None for clock in clocks):
            self._incomplete(range_, missing, stack)

    def exports_of_thread(self) -> list[tuple[Range, Stack]]:
        """What the calling thread has exported, and has not said yet when it is ready; it says so now."""
        return self._unannounced.pop(threading.get_ident(), [])

    def announce(self, exports: list[tuple[Range, Stack]], clock: Clock) -> None:
        """Importers are told that memory is ready, after all of a clock."""
        for range_, stack in exports:
            missing = self.incomplete(range_, clock)
            if missing is not None and self.incomplete(range_, self.timeline.host) is not None:
                self._incomplete(range_, missing, stack)

    def _incomplete(self, range_: Range, missing: Moment, stack: Stack) -> None:
        self.found(
            Hazard(
                "export before completion",
                f"{range_} is exported while {missing.what} of {missing.actor.name} may still be under way, for which "
                "importers cannot wait",
                f"synchronise with {missing.actor.name} first, or record an interprocess event there that importers "
                "wait for",
                range_.base,
                range_.size,
                places=(("this call", stack), ("used", missing.stack), ("allocated", range_.stack)),
            )
        )

    # -- words -----------------------------------------------------------------------------------------------

    def _key(self, address: int) -> tuple[tuple[Bytes, int] | None, Range | None]:
        pieces = self.addresses.pieces(address, 4)
        if not pieces:
            return None, None
        range_, low, high = pieces[0]
        places = range_.physical(low, high)
        return ((places[0][0], places[0][1]) if places else None), range_

    def write_word(self, handle: Any, address: int, value: int, bits: int, what: str, stack: Stack) -> None:
        """A stream is to write a word, after all that it has queued."""
        stream = self.stream(handle)
        if self.captures and stream in self.captures:
            return
        key, _ = self._key(address)
        exports = self.exports_of_thread()

        def write(stream: Stream) -> None:
            self.announce(exports, stream.clock)
            if key is None:
                return
            writes = self._words.setdefault(key, [])
            writes.append((value, stream.clock.copy()))
            del writes[:-_WRITES_KEPT]
            if len(self._words) > _WORDS_KEPT:
                del self._words[next(iter(self._words))]
            for held in tuple(self.timeline.held):
                word = held.obstacle
                if isinstance(word, _Word) and word.key == key and word.accepts(value):
                    self.timeline.end(word, stream.clock)

        self.timeline.submit(stream, write)

    def _wrote(self, piece: Piece, stream: Stream) -> None:
        """A copy, a fill or a kernel has written memory: with what is not known."""
        range_, low, high = piece
        for memory, start, end in range_.physical(low, high):
            for held in tuple(self.timeline.held):
                word = held.obstacle
                if isinstance(word, _Word) and word.key and word.key[0] is memory and start <= word.key[1] < end:
                    self.timeline.end(word, stream.clock)

    def wait_word(self, handle: Any, address: int, value: int, flag: int, bits: int) -> None:
        """A stream is to wait for a value of a word."""
        stream = self.stream(handle)
        if self.captures and stream in self.captures:
            return
        key, range_ = self._key(address)
        compare = _COMPARISONS.get(flag & 3, _COMPARISONS[0])
        word = _Word(key, lambda there: compare(there, value, bits))
        word.range = range_
        if range_ is None or range_.kind in ("pinned memory", "registered memory"):
            # Of other memory than that of devices nobody tells us who writes it.
            word.read = lambda: int(_WORDS[bits].from_address(address).value)

        def meet(stream: Stream) -> None:
            order: Clock | None = None
            for written, clock in reversed(self._words.get(key, ()) if key else ()):
                if written is None or not word.accepts(written):
                    break
                # Any of these may be what the stream sees.
                order = clock if order is None else order.common(clock)
            if order is None and word.read is not None and word.accepts(word.read()):
                order = self.timeline.host
            if order is not None:
                self.timeline.end(word, order)

        self.timeline.submit(stream, meet)
        self.timeline.wait(stream, word)

    # -- host functions --------------------------------------------------------------------------------------

    def host_function(self, handle: Any) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """A stream is to call a function; what is to be told when it begins and when it has ended."""
        stream = self.stream(handle)
        if self.captures and stream in self.captures:
            return None
        before = self.timeline.record(stream)
        ended = Obstacle()
        self.timeline.wait(stream, ended)

        def begins() -> None:
            self.timeline.force_mark(before)
            if before.clock is not None:
                self.timeline.tell(before.clock)

        return begins, lambda: self.timeline.end(ended, self.timeline.host)

    # -- graphs ----------------------------------------------------------------------------------------------

    def launch(self, executable: int, handle: Any, stack: Stack) -> None:
        """A stream is to run a graph, after earlier launches of the same."""
        stream = self.stream(handle)
        nodes = self.executables.get(executable, [])
        before = self.launched.get(executable)
        if before is not None:
            self.timeline.wait(stream, before)
        for node in nodes:
            if node.kind == "allocate":
                self._place(node.range)
            elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
                # What is mapped there now is what the graph uses.
                node.pieces = [
                    (there, write)
                    for (_, low, high), write in node.pieces
                    for there in self.addresses.pieces(low, high - low)
                ]

        def run(stream: Stream) -> None:
            device = self.devices.get(stream)
            for node in nodes:
                if node.kind == "use":
                    self.touch(stream, node.pieces, node.what, node.stack, device=device)
                elif node.kind == "free":
                    self.judge.free(node.range, stream, stream.clock, node.what, node.stack)
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
        self.launched[executable] = self.timeline.record(stream)

    def _place(self, made: Range) -> None:
        if self.addresses.find(made.base) is not made:
            self.addresses.add(made)

    # -- the end ---------------------------------------------------------------------------------------------

    def leaks(self) -> list[Hazard]:
        """Memory that is there and was not given back: one for each place that allocated it."""
        places: dict[tuple[str, Stack], list[Range]] = {}
        for one in self.addresses.living():
            if not one.pending and one.kind != "registered memory":
                places.setdefault((one.kind, one.stack), []).append(one)
        return [
            Hazard(
                "leak",
                f"{ranges[0]} was not given back" + (f", and {len(ranges) - 1} more" if len(ranges) > 1 else ""),
                "free it, or let it go, before the end",
                ranges[0].base,
                sum(one.size for one in ranges),
                places=(("allocated", stack),),
            )
            for (_, stack), ranges in places.items()
        ]

    def close(self) -> None:
        """Judge what is held, as if all of it had happened, and take entries back."""
        for stream in tuple(self.timeline.held):
            self.timeline.force(stream)
        for entry in self.entries.values():
            ledger.close_import(entry)
        self.entries.clear()
