"""The state of a driver as far as recorded calls have shown it: plain data, which :mod:`.rules` changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from streamalloc.checker.capture import TrackedEvent, TrackedGraph, TrackedNode
from streamalloc.checker.clocks import Obstacle, Timeline
from streamalloc.checker.contents import ElementTypes, QueuedSources
from streamalloc.checker.interprocess import Interprocess, OpenFiles
from streamalloc.checker.judge import Judge
from streamalloc.checker.ranges import AddressMap, BoundBytes, Bytes, Range, size_text
from streamalloc.checker.streams import MEMORY_TYPE, Questions, Streams
from streamalloc.checker.wait_values import WaitValues
from streamalloc.driver.account import HandleCounts
from streamalloc.driver.reports import Hazard, Stack

OPENED = "memory of another process"
"""Kind of a range from ``cuIpcOpenMemHandle``."""
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
"""The missing end and the advice for leaks of each kind."""
_ARRAYS = 1 << 64
"""First of the artificial addresses for arrays, beyond those of memory."""


@dataclass(eq=False)
class TrackedArray(Range):
    """An array, at addresses that no memory has."""

    pitch: int = 0
    lines: int = 1
    """Rows of a plane."""
    element: int = 1
    """Bytes of an element."""


@dataclass(eq=False)
class TrackedMemory:
    """Physical memory, or a multicast object, with its mappings."""

    size: int
    stack: Stack
    device: int | None = None
    bytes: Bytes = field(default_factory=Bytes)
    bindings: list[BoundBytes] | None = None
    """Bound bytes of a multicast object; None for other memory."""
    mappings: list[Range] = field(default_factory=list)
    kind: ClassVar[str] = "physical memory"
    base: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.kind} of {size_text(self.size)}"


@dataclass(eq=False)
class Executable:
    """An executable graph."""

    nodes: list[TrackedNode]
    launched: Obstacle | None = None
    """End of the latest launch."""


class State:
    """All that is known of a driver. Its recorder guards it by a lock."""

    def __init__(self, driver: Any, on_hazard: Callable[[Hazard], None], uninitialized: bool = False) -> None:
        self.on_hazard: Callable[[Hazard], None] = on_hazard
        self.uninitialized: bool = uninitialized
        """Whether to report reads of unwritten memory."""
        self.unseen_upto: int = -1
        """Highest number of memory that a kernel without declared uses may have written."""
        # Order.
        self.ask: Questions = Questions(driver)
        self.timeline: Timeline = Timeline()
        self.notes = self.timeline.notes
        self.streams: Streams = Streams(self.ask, self.timeline)
        self.place: Callable[..., Stack] = self.streams.place
        """Returns the place of the present call in the program."""
        self.notes.place = partial(self.place, 1)
        self.context, self.thread = self.streams.context, self.streams.thread
        self.stream, self.capture_of = self.streams.find, self.streams.capture_of
        self.judge: Judge = Judge(self.timeline, on_hazard, self.timeline.published)
        # Memory by address.
        self.account: HandleCounts = HandleCounts()
        self.addresses: AddressMap = AddressMap(self.notes)
        self.reserved: AddressMap = AddressMap()
        """Address ranges of ``cuMemAddressReserve``."""
        self.types: ElementTypes = ElementTypes(self.addresses, self.judge, self.place)
        self.sources: QueuedSources = QueuedSources(self.timeline, self.streams.foreign, self.judge, self.place)
        # What orders streams.
        self.values: WaitValues = WaitValues(self.timeline, self.addresses, self.ask.is_host_memory)
        self.events: dict[int, TrackedEvent] = {}
        self.interprocess: Interprocess = Interprocess(
            self.timeline, self.addresses, self.values, self.events, self.judge
        )
        # Objects by handle.
        self.graphs: dict[int, TrackedGraph] = {}
        self.executables: dict[int, Executable] = {}
        self.host_calls: dict[int, Any] = {}
        """Host functions by the pointer passed to the driver (``HostCall``)."""
        self.physical: dict[int, TrackedMemory] = {}
        self.files: OpenFiles[TrackedMemory] = OpenFiles(self.notes)
        """Exported and imported physical memory, by open file."""
        self.arrays: dict[int, TrackedArray] = {}
        self.array_end: int = _ARRAYS
        self.variables: dict[int, list[Range]] = {}
        """Variables by the handle of their module."""
        self.primary: dict[int, int] = {}
        """Primary context by device."""
        self.access: dict[int, dict[int, int]] = {}
        """Access of devices to the plain memory of each context."""
        self.pools: dict[int, dict[int, int] | None] = {}
        """Access of devices by pool handle; None: all have access."""
        self.host_pools: set[int] = set()
        """Pools of host memory."""
        self.current_pools: dict[int, int] = {}
        """Current pool by device."""

    def look(self) -> None:
        """Read the awaited values in host memory, and query the work of other libraries: both change without a call."""
        if self.timeline.held:
            self.values.look()
        if self.streams.foreign.pending:
            self.streams.foreign.look()

    def is_pageable(self, address: int) -> bool:
        """Whether an address is unknown to the driver. Copies to such memory end before the call returns."""
        return (
            self.addresses.find(address) is None
            and self.ask.number("cuPointerGetAttribute", MEMORY_TYPE, address) is None
        )

    def leaks(self) -> list[Hazard]:
        """A hazard for each place in the program that allocated memory which is not freed."""
        resources: list[Range | TrackedMemory] = [
            one
            for one in self.addresses.living()
            if not (one.pending or one.deferred) and one.kind != "registered memory"
        ]
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
        """Check the operations of waiting streams as if they had run, and remove entries that other processes read."""
        self.sources.check()
        for stream in tuple(self.timeline.held):
            self.timeline.force(stream)
        self.interprocess.close()
        self.files.close()
