"""The state of a simulated machine: devices, contexts, streams, events, allocations, pools."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from . import turns
from .allocations import Allocation, DeviceMemory, HostMemory, OpenedMemory
from .arrays import Array, MipmappedArray, forget_arrays
from .constants import LEGACY_STREAM, PER_THREAD_STREAM, PINNED, Location
from .errors import Fault, Result, check, need
from .heap import Heap
from .memory import AddressMap, Bank, Reservation
from .multicast import Multicast
from .pool import Place, Pool
from .profiles import MachineSpec, Profile
from .shared_events import SharedEvent
from .sharing import Sharing
from .timeline import Clock, Operation, Stream, Timeline, merge
from .virtual import VirtualMemory

if TYPE_CHECKING:
    from .graphs import Graph, GraphExec, Node

A = TypeVar("A", bound=Allocation)

_handles = itertools.count(0x5EED_0000_1000, 0x40)  # of all machines: a handle of one is never valid in another


@dataclass(eq=False)
class Device:
    """One simulated device."""

    ordinal: int
    bank: Bank
    uuid: bytes
    attributes: dict[str, int]
    heap: Heap
    primary: Context = field(init=False)
    graph_used: int = 0
    graph_used_high: int = 0
    graph_reserved: int = 0
    graph_reserved_high: int = 0
    slabs: list[Any] = field(default_factory=list)  # the memory of graphs


class Context:
    """A context; ``alive`` comes and goes for a primary one."""

    def __init__(self, machine: Machine, device: Device, primary: bool, flags: int) -> None:
        self.machine = machine
        self.device = device
        self.primary = primary
        self.flags = flags
        self.handle: int = next(_handles)
        self.alive: bool = not primary
        self.retained = 0
        self.error: Any = None  # the code every later call fails with
        self.peers: set[int] = set()
        self.streams: dict[int, Stream] = {}  # by handle
        self.retired: Clock = {}  # what destroyed streams did
        self._legacy: Stream | None = None
        self._per_thread: dict[int, Stream] = {}
        self._marks: Stream | None = None
        self.id: int = machine.next_context_id()

    @property
    def legacy(self) -> Stream:
        if self._legacy is None:
            self._legacy = self._new_stream(LEGACY_STREAM, True, 0)
            self._legacy.legacy = None
            self._legacy.peers = {}
        return self._legacy

    @property
    def per_thread(self) -> Stream:
        ident = self.machine.timeline.caller.ident
        stream = self._per_thread.get(ident)
        if stream is None:
            stream = self._per_thread[ident] = self._new_stream(PER_THREAD_STREAM, True, 0)
        return stream

    @property
    def marks(self) -> Stream:
        """Nobody's stream, where events of the whole context happen: no work ever waits behind them."""
        if self._marks is None:
            self._marks = self.machine.timeline.adopt(Stream(self.machine.timeline, 0, self, False, 0))
        return self._marks

    def create_stream(self, blocking: bool, priority: int) -> Stream:
        stream = self._new_stream(next(_handles), blocking, priority)
        self.streams[stream.handle] = stream
        self.machine.streams[stream.handle] = stream
        return stream

    def _new_stream(self, handle: int, blocking: bool, priority: int) -> Stream:
        stream = Stream(self.machine.timeline, handle, self, blocking, priority)
        if blocking and handle != LEGACY_STREAM:
            stream.legacy = self.legacy
            assert stream.legacy.peers is not None
            stream.legacy.peers[stream] = None
        return self.machine.timeline.adopt(stream)

    def destroy_stream(self, stream: Stream) -> None:
        """What it has queued still happens; the handle is gone."""
        del self.streams[stream.handle], self.machine.streams[stream.handle]
        self.retired[stream.id] = stream.seq
        merge(self.retired, stream.clock)
        if stream.legacy is not None and stream.legacy.peers is not None:
            stream.legacy.learn(stream)
            if stream.queue:
                # the legacy stream still comes after what is queued here
                stream.legacy.submit(Operation(), ((stream, stream.seq),))
            del stream.legacy.peers[stream]
        if not stream.queue:
            # Destroying a stream that has nothing left to do shows its frees, as synchronising would (test_reuse).
            self.machine.synchronize({stream.id: stream.seq}, lambda: True)
        self.machine.timeline.retire(stream)
        if len(self.retired) > len(self.machine.timeline.streams) + 8:
            awaited = self.machine.awaited_streams()
            self.retired = {number: seq for number, seq in self.retired.items() if number in awaited}

    def all_streams(self) -> list[Stream]:
        own = [stream for stream in (self._legacy, self._marks) if stream is not None]
        return [*own, *self._per_thread.values(), *self.streams.values()]

    def clock(self) -> Clock:
        """All that was ever submitted here."""
        clock = dict(self.retired)
        for stream in self.all_streams():
            merge(clock, stream.clock)
            clock[stream.id] = stream.seq
        return clock

    def unfinished(self) -> tuple[tuple[Stream, int], ...]:
        """The streams that have something left to do, destroyed ones included, and the last of it."""
        live = self.machine.timeline.streams
        gone = [(live[number], seq) for number, seq in self.retired.items() if number in live]
        streams = [(stream, stream.seq) for stream in self.all_streams()]
        return tuple((stream, seq) for stream, seq in (*gone, *streams) if stream.done < seq)

    def close(self) -> None:
        """The context is destroyed: its streams, events and plain memory go with it."""
        self.alive = False
        self.error = None
        self.peers.clear()
        for stream in list(self.streams.values()):
            self.destroy_stream(stream)
        for event in [e for e in self.machine.events.values() if e.context is self]:
            del self.machine.events[event.handle]
        for allocation in list(self.machine.allocations.at.values()):
            if allocation.context is self and isinstance(allocation, (DeviceMemory, HostMemory)):
                self.machine.discard(allocation)
            elif allocation.context is self and isinstance(allocation, OpenedMemory):
                self.machine.sharing.forget_memory(allocation)
        forget_arrays(self.machine, self)
        if self._marks is not None:
            self.machine.timeline.retire(self._marks)
        self._legacy = self._marks = None
        self._per_thread.clear()


class Stamp(Operation):
    """Notes when an event happens, for other processes too where they share it."""

    when: float = 0.0
    shared: SharedEvent | None = None
    number = 0
    """Of the recording, among those of all processes."""

    def step(self) -> bool:
        self.when = time.perf_counter()
        if self.shared is not None:
            self.shared.finish(self.number)
        return True


@dataclass(eq=False)
class Record:
    """One recording of an event: where in which stream, and all that comes before it."""

    stream: Stream
    seq: int
    clock: Clock
    stamp: Stamp

    @property
    def complete(self) -> bool:
        return self.stream.done >= self.seq


@dataclass(eq=False)
class Event:
    """An event, and its latest recording: in a stream, or in a graph that is being captured."""

    handle: int
    context: Context
    flags: int
    record: Record | None = None
    capture: Any = None
    nodes: list[Any] = field(default_factory=list)  # what was captured before it
    shared: SharedEvent | None = None
    opened: bool = False  # by a handle: another process's

    @property
    def complete(self) -> bool:
        if self.shared is not None:
            return self.shared.happened(self.shared.latest)
        return self.record is None or self.record.complete

    @property
    def elsewhere(self) -> SharedEvent | None:
        """The shared event, if its latest recording is not ``record`` but one by another process or handle."""
        if self.shared is None or self.shared.latest == (0 if self.record is None else self.record.stamp.number):
            return None
        return self.shared

    def share(self, shared: SharedEvent) -> SharedEvent:
        """Let other processes see this event, and what was recorded so far."""
        self.shared = shared
        if self.record is not None:
            stamp = self.record.stamp
            stamp.number = shared.begin()
            if self.record.complete:
                shared.finish(stamp.number)
            else:
                stamp.shared = shared
        return shared

    def record_in(self, stream: Stream, after: tuple[tuple[Stream, int], ...] = (), known: Clock | None = None) -> None:
        """Record after all that is in ``stream`` now, and after ``after``, which implies ``known``."""
        stamp = Stamp()
        if self.shared is not None:
            stamp.shared, stamp.number = self.shared, self.shared.begin()
        seq = stream.submit(stamp, after)
        clock = {**stream.clock, stream.id: seq}
        merge(clock, known or {})
        self.record = Record(stream, seq, clock, stamp)
        self.capture = None
        self.nodes = []


class Machine:
    """Everything a simulated driver knows. One lock guards all of it."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec: MachineSpec = spec
        self.profile: Profile = spec.profile
        self.identity: str = spec.identity
        self.fabric: bool | None = spec.fabric
        self.timeline: Timeline = Timeline(spec.seed)
        self.timeline.on_close = self._release
        self.ready: bool = False
        self.forked: bool = False
        self.captures: list[Any] = []
        self.arenas: AddressMap[Reservation] = AddressMap()
        self.allocations: AddressMap[Allocation] = AddressMap()
        self.contexts: dict[int, Context] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.pools: dict[int, Pool] = {}
        self.graphs: dict[int, Graph] = {}
        self.graph_execs: dict[int, GraphExec] = {}
        self.graph_nodes: dict[int, Node] = {}
        self.graph_memories: set[Any] = set()
        self.arrays: dict[int, Array] = {}
        self.mipmapped_arrays: dict[int, MipmappedArray] = {}
        self.capture_count = 0
        self.default_pools: dict[tuple[int, int, int], Pool] = {}
        self.current_pools: dict[tuple[int, int, int], Pool] = {}
        self._thread = threading.local()
        self._context_ids = itertools.count(1)
        self._allocation_ids = itertools.count(1)
        self.host_bank: Bank = Bank(self.profile.host_memory)
        self.host_heap: Heap = Heap("pinned", self.host_bank, self.arenas, self.make_room)
        self.virtual: VirtualMemory = VirtualMemory(self)
        self.sharing: Sharing = Sharing(self)
        self.multicast: Multicast = Multicast(self, spec.multicast_slots, spec.patience)
        self.devices: list[Device] = [self._device(ordinal) for ordinal in range(spec.devices)]
        for device in self.devices:
            device.primary = Context(self, device, primary=True, flags=0)
            self.contexts[device.primary.handle] = device.primary
        _machines.add(self)

    def _device(self, ordinal: int) -> Device:
        profile, memory = self.profile, self.spec.memory
        bank = Bank(profile.total_memory, profile.context_overhead) if memory is None else Bank(memory)
        attributes = dict(profile.attributes)
        attributes["MULTICAST_SUPPORTED"] = int(self.spec.has_multicast)
        if self.fabric is not None:
            attributes["HANDLE_TYPE_FABRIC_SUPPORTED"] = int(self.fabric)
        attributes["PCI_DEVICE_ID"] += ordinal
        digest = hashlib.sha256(f"{self.identity}/{ordinal}".encode()).digest()[:16]
        heap = Heap(
            str(self.sharing.own_label("heap", Place(Location.DEVICE, ordinal))), bank, self.arenas, self.make_room
        )
        return Device(ordinal, bank, digest, attributes, heap)

    def new_handle(self) -> int:
        return next(_handles)

    def next_context_id(self) -> int:
        return next(self._context_ids)

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back everything; nothing may use the machine any more."""
        if not self.forked and not sys.is_finalizing():
            self.ready = False  # finalisers of what was garbage together with the driver may call it yet
            if self.caller().is_main:
                turns.run(self._close)
            else:
                self._close()

    def _close(self) -> None:
        turns.enter()
        self.timeline.close()
        turns.leave()

    def _release(self) -> None:
        for pool in list(self.pools.values()):
            pool.space.close()
        for memory in list(self.graph_memories):
            memory.close()
        for device in self.devices:
            device.heap.close()
            for slab in list(device.slabs):
                slab.close()
        self.host_heap.close()
        self.multicast.close()
        self.virtual.close()
        self.sharing.close()
        for bank in (self.host_bank, *(device.bank for device in self.devices)):
            bank.close()

    def after_fork(self) -> None:
        """In a child process: the driver cannot be used once it was initialised, as on hardware."""
        if self.ready:
            self.forked = True
            self.ready = False
        else:
            self.timeline = Timeline(self.spec.seed)
            self.timeline.on_close = self._release

    # -- contexts --------------------------------------------------------------------------------------------

    def caller(self) -> turns.Caller:
        """The calling thread."""
        try:
            caller: turns.Caller = self._thread.caller
        except AttributeError:
            caller = self._thread.caller = turns.Caller()
        return caller

    def current_or_none(self) -> Context | None:
        stack = self.timeline.caller.contexts
        return stack[-1] if stack else None

    def current(self) -> Context:
        """The calling thread's context; fails where there is none or it is broken."""
        context = need(self.current_or_none(), Result.CUDA_ERROR_INVALID_CONTEXT)
        if not context.alive:
            raise Fault(Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        if context.error is not None:
            raise Fault(context.error)
        return context

    # -- streams ---------------------------------------------------------------------------------------------

    def stream(self, handle: int) -> Stream:
        """The stream of a handle, the three special ones included."""
        found = self.streams.get(handle)
        if found is not None:
            if found.context.error is not None:
                raise Fault(found.context.error)
            return found
        if handle in (0, LEGACY_STREAM):
            return self.current().legacy
        if handle == PER_THREAD_STREAM:
            return self.current().per_thread
        raise Fault(Result.CUDA_ERROR_INVALID_CONTEXT)  # seen once on H200; a destroyed handle can end a process

    def synchronize(self, clock: Clock, finished: Any) -> None:
        """Wait until ``finished()``; then the host knows ``clock``, and pools give up what they may."""
        if not finished():
            self.timeline.wait(finished)
        host = self.timeline.host
        merge(host, clock)
        for pool in list(self.pools.values()):
            pool.settle(host)
        for gone in [number for number in clock if number not in self.timeline.streams]:
            host.pop(gone, None)

    def awaited_streams(self) -> set[int]:
        """The streams that have something left to do, or frees that the host has not seen: others need no clock."""
        pending = (number for pool in self.pools.values() for number in pool.line.pending_streams())
        return {*self.timeline.streams, *pending}

    def drain(self, device: int | None = None) -> None:
        """Wait until no stream (of ``device``) has anything left to do, without telling the host's clock."""
        goals = [
            (stream, stream.seq)
            for stream in self.timeline.streams.values()
            if device is None or stream.context.device.ordinal == device
        ]
        self.timeline.wait(lambda: all(stream.done >= seq for stream, seq in goals))

    # -- memory ----------------------------------------------------------------------------------------------

    def remember(self, allocation: A) -> A:
        """Let an allocation be found by its addresses."""
        allocation.id = next(self._allocation_ids)
        self.allocations.add(allocation)
        return allocation

    def discard(self, allocation: Allocation) -> None:
        """Forget plain or pinned memory and give it back at once."""
        self.allocations.remove(allocation)
        self.unallocate(allocation)

    def unallocate(self, allocation: Allocation) -> None:
        """Give back the memory of a plain or pinned allocation that is no longer known."""
        if isinstance(allocation, (DeviceMemory, HostMemory)) and allocation.block is not None:
            heap = self.host_heap if allocation.device is None else self.devices[allocation.device].heap
            heap.free(allocation.base, allocation.block)
            self.sharing.withdraw(allocation)

    def is_mapped(self, address: int, size: int) -> bool:
        """False for simulated memory that is gone by now; true for memory that is not simulated."""
        return self.arenas.find(address) is None or self.is_backed(address, size)

    def is_backed(self, address: int, size: int) -> bool:
        """Whether all of a range is simulated memory that is there now. It may reach over reservations that touch."""
        end = address + size
        while address < end:
            reservation = self.arenas.find(address)
            if reservation is None or not reservation.mapped.covers(address, min(end, reservation.end)):
                return False
            address = reservation.end
        return True

    def make_room(self, bank: Bank, needed: int, asking: Pool | None = None) -> None:
        """Take from other pools what they hold in reserve, until ``needed`` bytes are free (observed on
        H200: test_pressure).
        """
        for pool in self.pools.values():
            if bank.free >= needed:
                return
            if pool is not asking and pool.space.bank is bank:
                pool.trim(0)

    # -- pools -----------------------------------------------------------------------------------------------

    def new_pool(
        self,
        place: Place,
        allocation_type: int,
        handle_types: int = 0,
        max_size: int = 0,
        implicit: bool = False,
    ) -> Pool:
        device = place.id if place.type == Location.DEVICE else None
        pool = Pool(self, next(_handles), place, device, allocation_type, handle_types, max_size, implicit)
        self.pools[pool.handle] = pool
        return pool

    def pool(self, handle: int) -> Pool:
        found = need(self.pools.get(handle))
        check(not found.destroyed)
        return found

    def pool_key(self, place: Place, allocation_type: int) -> tuple[int, int, int]:
        """Places that share their default and current pool have the same key."""
        return (place.type, 0 if place.type not in (Location.DEVICE, Location.HOST_NUMA) else place.id, allocation_type)

    def default_pool(self, place: Place, allocation_type: int = PINNED) -> Pool:
        key = self.pool_key(place, allocation_type)
        pool = self.default_pools.get(key)
        if pool is None:
            pool = self.default_pools[key] = self.new_pool(Place(*key[:2]), allocation_type, implicit=True)
        return pool

    def current_pool(self, place: Place, allocation_type: int = PINNED) -> Pool:
        pool = self.current_pools.get(self.pool_key(place, allocation_type))
        return self.default_pool(place, allocation_type) if pool is None else pool


_machines: weakref.WeakSet[Machine] = weakref.WeakSet()


def _after_fork() -> None:
    for machine in list(_machines):
        machine.after_fork()


os.register_at_fork(after_in_child=_after_fork)
