"""The state of a driver as the recorded calls have shown it: its objects by handle, and the helpers that judge them.

:mod:`.rules` and :mod:`.uses` change the state, under the lock of the recorder (:mod:`.wrapper`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, ClassVar

from streamalloc.checker.capture import TrackedEvent, TrackedGraph, TrackedNode
from streamalloc.checker.clocks import Obstacle, Timeline, TrackedStream
from streamalloc.checker.contents import ElementTypes, QueuedSources, WaitValues
from streamalloc.checker.interprocess import Interprocess, OpenFiles
from streamalloc.checker.judge import Judge
from streamalloc.checker.ranges import Access, AddressMap, BoundBytes, Bytes, Piece, Range
from streamalloc.checker.streams import MEMORY_TYPE, Questions, Streams
from streamalloc.driver.account import HandleCounts
from streamalloc.driver.reports import Hazard, Stack
from streamalloc.formats.sizes import size_text

OPENED = "memory of another process"
"""Kind of a range that ``cuIpcOpenMemHandle`` has returned."""
_LEAKS = {
    "allocation": ("freed", "free it before the end: buffer.free(), or cuMemFreeAsync."),
    "import": ("closed", "close it in this process before the end: the opened buffer's close(), or cuMemFreeAsync."),
    OPENED: ("closed", "close it in this process before the end: the opened buffer's close(), or cuIpcCloseMemHandle."),
    "device memory": ("freed", "free it before the end: cuMemFree."),
    "pinned memory": ("freed", "free it before the end: cuMemFreeHost."),
    "array": ("destroyed", "destroy it before the end: cuArrayDestroy."),
    "mapping": ("unmapped", "close it before the end, or call cuMemUnmap and then cuMemRelease."),
    "physical memory": ("released", "close it before the end, or call cuMemRelease."),
}
"""For each kind of resource: the participle for "was not freed", and the advice in a report of a leak."""
_ARRAYS = 1 << 64
"""First of the artificial addresses of arrays. No memory has addresses this high."""


@dataclass(eq=False)
class TrackedArray(Range):
    """CUDA array. Its bytes have no addresses in CUDA, so they get artificial addresses here, by which uses of the
    array are compared.
    """

    pitch: int = 0
    lines: int = 1
    """Number of rows in a plane of the array."""
    element: int = 1
    """Size of an element in bytes."""


@dataclass(eq=False)
class TrackedMemory:
    """Physical memory or a multicast object, with its mappings."""

    size: int
    stack: Stack
    device: int | None = None
    bytes: Bytes = field(default_factory=Bytes)
    bindings: list[BoundBytes] | None = None
    """Bytes bound to a multicast object; None for physical memory."""
    mappings: list[Range] = field(default_factory=list)
    kind: ClassVar[str] = "physical memory"
    base: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.kind} of {size_text(self.size)}"


@dataclass(eq=False)
class Executable:
    """Instance of a graph. Every launch runs its nodes."""

    nodes: list[TrackedNode]
    launched: Obstacle | None = None
    """Obstacle that ends with the latest launch; None before the first launch."""


@dataclass(eq=False)
class State:
    """State of one driver. All reads and changes of it need the recorder's lock."""

    driver: InitVar[Any]
    on_hazard: Callable[[Hazard], None]
    uninitialized: bool = False
    """Whether to report reads of unwritten memory."""
    unseen_upto: int = -1
    """Highest :attr:`.Bytes.number` of memory that a kernel without declared uses may have written."""
    account: HandleCounts = field(default_factory=HandleCounts)
    reserved: AddressMap = field(default_factory=AddressMap)
    """Ranges that ``cuMemAddressReserve`` has reserved."""
    # Objects of the driver by handle.
    events: dict[int, TrackedEvent] = field(default_factory=dict)
    graphs: dict[int, TrackedGraph] = field(default_factory=dict)
    executables: dict[int, Executable] = field(default_factory=dict)
    host_calls: dict[int, Any] = field(default_factory=dict)
    """Host functions (``HostCall``) by the pointer that the driver gets."""
    physical: dict[int, TrackedMemory] = field(default_factory=dict)
    arrays: dict[int, TrackedArray] = field(default_factory=dict)
    array_end: int = _ARRAYS
    variables: dict[int, list[Range]] = field(default_factory=dict)
    """Variables by the handle of their module or library."""
    primary: dict[int, int] = field(default_factory=dict)
    """Handle of the primary context by device ordinal."""
    access: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each context: the access of devices to its cuMemAlloc memory, by device ordinal: 1 read, 3 read and write."""
    pools: dict[int, dict[int, int] | None] = field(default_factory=dict)
    """For each pool, by handle: the access of devices to its memory, as in ``access``; None: all devices have
    access.
    """
    host_pools: set[int] = field(default_factory=set)
    """Handles of the pools of host memory."""
    current_pools: dict[int, int] = field(default_factory=dict)
    """Handle of the current pool by device ordinal, as far as it is known."""
    on_use: Callable[[Access, Piece, TrackedStream, TrackedNode], None] | None = None
    """Function that is called with each use of a range that an allocator may divide into blocks, when the stream runs
    the use. None: such uses are not passed on.
    """
    now: int = 0
    """Time of the current call, in the unit of the code that reports the calls (:mod:`streamalloc.cupti`: ns); 0 if
    that code gives no time.
    """

    def __post_init__(self, driver: Any) -> None:
        self.ask = Questions(driver)
        self.timeline = Timeline()
        self.notes = self.timeline.notes
        self.streams = Streams(self.ask, self.timeline)
        self.judge = Judge(self.timeline, self.on_hazard, self.timeline.published)
        # Bound here, so that rules need no `state.streams` for the place, context, thread and stream of the call.
        self.place, self.context, self.thread = self.streams.place, self.streams.context, self.streams.thread
        self.stream, self.capture_of = self.streams.find, self.streams.capture_of
        self.notes.place = partial(self.place, 1)
        self.addresses = AddressMap(self.notes)
        self.types = ElementTypes(self.addresses, self.judge, self.place)
        self.sources = QueuedSources(self.timeline, self.streams.foreign, self.judge, self.place)
        self.values = WaitValues(self.timeline, self.addresses, self.ask.is_host_memory)
        self.interprocess = Interprocess(self.timeline, self.addresses, self.values, self.events, self.judge)
        self.files: OpenFiles[TrackedMemory] = OpenFiles(self.notes)
        """Exported and imported physical memory by open file."""

    def look(self) -> None:
        """Read the values in host memory for which streams wait, and query whether work of other libraries has ended.
        Both can change without a call that the checker records.
        """
        if self.timeline.waiting:
            self.values.look()
        if self.streams.foreign.pending:
            self.streams.foreign.look()

    def is_pageable(self, address: int) -> bool:
        """Whether ``address`` is in pageable host memory: no recorded call has made memory there, and the driver
        reports none.

        A single copy to such memory ends before the call returns; a batch of copies may end later.
        """
        unseen = self.addresses.find(address) is None
        return unseen and self.ask.number("cuPointerGetAttribute", MEMORY_TYPE, address) is None

    def leaks(self) -> list[Hazard]:
        """Return the leaks: one hazard for each kind of memory and each place in the program that allocated memory of
        this kind which is not freed. The size of the hazard is that of all this memory.

        Left out are registered memory, memory whose free comes later (:attr:`.Range.deferred`), allocations that their
        stream has not run, and physical memory with a mapping.
        """
        due = (one for one in self.addresses.living() if not (one.pending or one.deferred))
        resources: list[Range | TrackedMemory] = [one for one in due if one.kind != "registered memory"]
        named = (one for one in dict.fromkeys(self.physical.values()) if one.stack)
        resources += [one for one in named if all(mapping.ended for mapping in one.mappings)]
        places: dict[tuple[str, Stack], list[Range | TrackedMemory]] = {}
        for one in resources:
            places.setdefault((one.kind, one.stack), []).append(one)
        found = []
        for (_, stack), leaked in places.items():
            more = f", and {len(leaked) - 1} more" if len(leaked) > 1 else ""
            ended, remedy = _LEAKS[leaked[0].kind]
            what, size, at = f"{leaked[0]} was not {ended}{more}.", sum(one.size for one in leaked), leaked[0].base
            found.append(Hazard("leak", what, remedy, at, size, places=(("allocated", stack),)))
        return found

    def close(self) -> None:
        """Check the operations that are queued behind waits, as if the host had found their streams idle.

        After that, remove this process's announcements to other processes, and clear the record of open files without
        names. No file of the program is closed.
        """
        self.sources.check()
        for stream in tuple(self.timeline.waiting):
            self.timeline.force(stream)
        self.interprocess.close()
        self.files.close()
