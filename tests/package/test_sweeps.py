"""Every public operation, with each of its driver calls failing in turn, or with the next one.

The operations are those that the classes have, not those of a list: a new one without an entry in ``ACTS`` fails.
Whatever fails, the error is one of ours, nothing is given back twice, and all that was made can be closed.
"""

import asyncio
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import os
import pickle
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import CachingAllocator, interop, ipc, multicast, observing, vmm
from streamalloc.driver.account import ENDERS
from streamalloc.driver.bindings import BINDINGS_VERSION, cuda
from tests.processes import fork
from tests.support import GROWTH, MiB, end_what_was_dropped, eventually, in_a_thread, public_names, read, sampled

PAGE = 2 * MiB
DATA = np.zeros(3 * PAGE, np.uint8)
MANY = 8
"""Of an operation that makes more calls than so many, some fail."""
CLASSES: list[type] = [
    sa.Device, sa.Stream, sa.Event, sa.Buffer, sa.BufferView, sa.MemoryPool, sa.Graph, sa.GraphBuffer, sa.GraphMemory,
    sa.PoolAttributes, sa.TypedView, vmm.PhysicalMemory, vmm.AddressRange, vmm.Mapping, vmm.RangeView,
    vmm.GrowableBuffer, vmm.SleepGroup, CachingAllocator, sa.PlainMemory, sa.CallbackAllocator,
]  # fmt: skip


class Refusals:
    """A driver around a driver, which notes undos of what is not there: what that itself refuses to end."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._mapped: set[int] = set()
        self.refused: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if name in ENDERS or name in ("cuMemMap", "cuMemUnmap", "cuMulticastUnbind"):
            function = functools.partial(self._noted, name, function)
        setattr(self, name, function)
        return function

    def _noted(self, name: str, function: Any, *args: Any) -> Any:
        answer = function(*args)
        ends = name != "cuMemMap"
        if name == "cuMemMap" and not answer[0]:
            self._mapped.add(int(args[0]))
        elif name == "cuMemUnmap":
            # The driver takes a range in which nothing is mapped.
            start, nbytes = int(args[0]), int(args[1])
            gone = {address for address in self._mapped if start <= address < start + nbytes}
            self._mapped -= gone
            ends = not gone
        if ends and (answer[0] or name == "cuMemUnmap"):
            self.refused.append(name)
        return answer


def without_listener(driver: Any) -> Any:
    """A wrapper beside whose driver's listener nothing would be cached."""
    driver.listener = None
    return driver


class Faults:
    """A device and a stream through a driver that can be told to fail."""

    told: tuple[type[BaseException], ...] = ()
    """Errors of finalisers that Python may report."""
    whole: tuple[str, ...] = ()
    """Of :meth:`shape`, what is as before or as it is to be also where the driver has refused to end something."""
    needless: tuple[str, ...] = ()
    """Calls that may end what is not there."""
    counts_descriptors = False
    """Whether no file descriptor may be open afterwards that was not; it takes two collections."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.refusals = Refusals(machine)
        self.checked = sd.checked(self.refusals)
        self.faulty = sd.faulty(self.checked, 1 << 60, result="CUDA_ERROR_UNKNOWN")
        self.driver: Any = without_listener(self.faulty)
        self.made = contextlib.ExitStack()
        keep = self.made.enter_context
        self.device = sa.Device(0, driver=self.driver)
        self.other = keep(self.device.create_stream())
        self.stream = keep(self.device.create_stream())
        self.contexts = self.depth()
        self.shapes: list[dict[str, Any]] = []
        """Allowed effects of an operation: all of it, nothing of it, or one of its steps."""
        self.things: dict[type, Any] = {}
        self.performed = 0
        """The calls up to the end of the operation."""

    def end_faults(self) -> None:
        """The operation is over: no more calls fail."""
        self.performed = len(self.faulty.seen)
        self.faulty.stop()

    def shape(self) -> dict[str, Any]:
        """What there is."""
        end_what_was_dropped()
        return {kind: len(handles) for kind, handles in self.checked.outstanding().items() if kind != "event"}

    def put_right(self) -> None:
        """What nobody can whom the driver has refused it: leave a context, and end a capture."""
        while self.depth() > self.contexts:
            self.machine.cuCtxPopCurrent()
        if not self.stream.closed and int(self.checked.cuStreamIsCapturing(self.stream._raw)[1]):
            answer = self.checked.cuStreamEndCapture(self.stream._raw)
            if not answer[0]:
                self.checked.cuGraphDestroy(answer[1])

    def depth(self) -> int:
        """Number of contexts on this thread's stack."""
        taken = []
        while int(self.machine.cuCtxGetCurrent()[1]):
            taken.append(self.machine.cuCtxPopCurrent()[1])
        for context in reversed(taken):
            self.machine.cuCtxPushCurrent(context)
        return len(taken)

    def close(self) -> None:
        self.faulty.stop()
        self.device.synchronize()
        self.things.clear()
        with contextlib.suppress(sa.ClosedError):
            self.made.close()

    @staticmethod
    def left(checked: Any) -> dict[str, Any]:
        """Resources of a driver that were not released, after all objects are closed and dropped."""
        end_what_was_dropped()
        if checked.outstanding():
            gc.collect()
            # A pool ends once the host has synchronised with its frees.
            sa.Device(0, driver=checked).synchronize()
            end_what_was_dropped()
        return dict(checked.outstanding())


class World(Faults):
    """One of each class, but those of virtual memory."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.event = self.stream.record(keep(self.device.create_event(timing=True)))
        self.pool = keep(sa.MemoryPool(self.device, release_threshold=GROWTH))
        self.event_to_share = keep(self.device.create_event(interprocess=True))
        self.buffer = keep(self.pool.allocate(64, self.stream))
        with self.stream.capture() as self.graph:
            self.buffer.fill(1)
        keep(self.graph)
        with self.stream.capture() as graph:
            self.of_graph = self.pool.allocate(64, self.stream)
        keep(graph).launch(self.stream)
        self.cache = keep(CachingAllocator(self.pool))
        self.cache.allocate(64, self.other).free()
        self.stream.synchronize()
        self.things = {
            sa.Device: self.device,
            sa.Stream: self.stream,
            sa.Event: self.event,
            sa.Buffer: self.buffer,
            sa.BufferView: self.buffer[8:40],
            sa.MemoryPool: self.pool,
            sa.Graph: self.graph,
            sa.GraphBuffer: self.of_graph,
            sa.GraphMemory: self.device.graph_memory,
            sa.PoolAttributes: self.pool.attributes,
            sa.TypedView: self.buffer.view_as(np.uint8),
            CachingAllocator: self.cache,
            sa.PlainMemory: sa.PlainMemory(self.device),
            sa.CallbackAllocator: sa.CallbackAllocator(self.pool.allocate, where=self.device),
            object: None,
            type(None): None,
        }

    def shape(self) -> dict[str, Any]:
        """What there is."""
        return {**super().shape(), "buffer": self.buffer.freed}


class Virtual(Faults):
    """One of each class of virtual memory."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.host_pool = keep(sa.MemoryPool(sa.MemLocation.host_numa(0), driver=self.driver))
        self.host_pool.set_access(self.device, sa.MemAccess.READWRITE)
        self.memory = keep(vmm.PhysicalMemory(self.device, PAGE))
        self.free_memory = keep(vmm.PhysicalMemory(self.device, PAGE))
        self.range = keep(vmm.AddressRange(4 * PAGE, driver=self.driver))
        self.mapping = keep(self.range.map(self.memory, access=self.device))
        self.devices = sa.Device.all(self.driver)
        peers = self.devices[1:]
        self.growable = keep(vmm.GrowableBuffer(self.device, 8 * PAGE, 3 * PAGE, chunk=PAGE, access=peers))
        for page in range(3):
            self.growable[page * PAGE : page * PAGE + 8].fill(page + 1)
        self.group = keep(vmm.SleepGroup(self.device, backup=self.host_pool))
        self.sleeper = keep(self.group.allocate(PAGE, self.stream, tag="one"))
        self.second = keep(self.group.allocate(PAGE, self.stream))
        self.stream.synchronize()
        self.things = {
            vmm.PhysicalMemory: self.free_memory,
            vmm.AddressRange: self.range,
            vmm.Mapping: self.mapping,
            vmm.RangeView: self.range.view(0, 4096),
            vmm.GrowableBuffer: self.growable,
            vmm.SleepGroup: self.group,
        }

    def shape(self) -> dict[str, Any]:
        """Sizes, and the mappings with their access."""
        growable = self.growable
        return {
            **super().shape(),
            "range": self.range.closed or self.range.mapped_bytes,
            "growable": growable.closed or (growable.nbytes, growable.mapped_bytes, growable.evicted, self.bytes()),
            "asleep": [one.closed or one.evicted for one in (self.sleeper, self.second)],
            "rights": [self.rights(table) for table in (self.range, growable.range)],
        }

    def bytes(self) -> list[int]:
        """The first byte of each page of the growable buffer that has its contents."""
        growable, pages = self.growable, min(self.growable.nbytes // PAGE, 3)
        return [] if growable.evicted else [int(read(growable[page * PAGE :][:1])[0]) for page in range(pages)]

    def rights(self, table: vmm.AddressRange) -> list[list[int]]:
        """The access that the devices have to each mapping, as the driver knows it."""
        places = [device.location.to_driver() for device in self.devices]
        addresses = [] if table.closed else [one.address for one in table.mappings]
        return [[int(self.machine.cuMemGetAccess(place, one)[1]) for place in places] for one in addresses]

    def mapped(self) -> set[int]:
        """The addresses of all mappings, as the objects know them."""
        tables = (self.range, *(one.range for one in (self.growable, self.sleeper, self.second)))
        return {mapping.address for table in tables if not table.closed for mapping in table.mappings}


def _captured(world: World, stream: sa.Stream) -> None:
    with stream.capture() as graph:
        world.buffer.fill(2, stream)
    graph.close()


def _evicted(world: Virtual, one: Any) -> None:
    if not one.evicted:
        one.evict(world.host_pool)
        world.shapes.append(world.shape())
    one.restore()


def _evicted_to_memory(world: Virtual, one: Any) -> None:
    if not one.evicted:
        memory = world.made.enter_context(world.host_pool.allocate(one.nbytes, world.stream))
        world.shapes.append(world.shape())
        one.evict(memory, stream=world.stream)
        world.shapes.append(world.shape())
    one.restore(stream=world.stream)


def _slept(world: Virtual, one: Any) -> None:
    one.sleep(stream=world.stream)
    world.shapes.append(world.shape())
    one.wake(stream=world.stream)


def _frozen(world: Virtual, one: Any) -> None:
    one.freeze("one", stream=world.stream)
    world.shapes.append(world.shape())
    _slept(world, one)
    one.thaw("one")


def _read_asleep(world: Virtual, one: Any) -> None:
    one.sleep("one", stream=world.stream)
    world.shapes.append(world.shape())
    one.read(world.sleeper, np.zeros(PAGE, np.uint8))


def _written_asleep(world: Virtual, one: Any) -> None:
    one.sleep("one", keep=False, stream=world.stream)
    world.shapes.append(world.shape())
    one.write(world.sleeper, DATA[:PAGE])


def _entered(block: Any) -> None:
    with block:
        pass


def _from_handle(world: World, one: Any) -> Any:
    return one.from_handle(world.buffer.address, 8, owner=world.buffer, stream=world.stream)


def _added_to(world: World, one: Any) -> None:
    with sa.Graph.create(world.device) as graph:
        buffer = one.add_to(graph, 64, world.stream)
        buffer.add_free(after=[buffer.node])


Act = Callable[[Any, Any], Any]


# By the name of a method, for all classes that have it; with the class before it, for that class.
def _data_for(one: Any) -> Any:
    """As many bytes as memory has, of its dtype where it has one."""
    data = DATA[: one.nbytes]
    return data.view(one.dtype).reshape(one.shape) if isinstance(one, sa.TypedView) else data


ACTS: dict[str, Act] = {
    # devices
    "all": lambda world, one: one.all(world.driver),
    "attribute": lambda world, one: one.attribute("MULTIPROCESSOR_COUNT"),
    "can_access": lambda world, one: one.can_access(one),
    "count": lambda world, one: one.count(world.driver),
    "Device.current": lambda world, one: _entered(one.current()),
    # streams and events
    "capture": _captured,
    "elapsed_since": lambda world, one: one.elapsed_since(one),
    "launch_host_func": lambda world, one: one.launch_host_func(int),
    "of_handle": lambda world, one: one.of_handle(world.device, one.handle, one),
    "wait": lambda world, one: one.wait(world.other),
    # memory
    "advise": lambda world, one: one.advise(sa.MemAdvise.SET_READ_MOSTLY),
    "copy_from": lambda world, one: one.copy_from(_data_for(one)),
    "copy_to": lambda world, one: one.copy_to(_data_for(one)),
    "discard_prefetch": lambda world, one: one.discard_prefetch(world.device),
    "fill": lambda world, one: one.fill(3),
    "prefetch": lambda world, one: one.prefetch(world.device),
    "tobytes": lambda world, one: (one.tobytes(), None)[1],
    "handles": lambda world, one: None,  # with raw_handles
    "Buffer.from_handle": _from_handle,
    "GraphBuffer.from_handle": _from_handle,
    "MemoryPool.from_handle": lambda world, one: one.from_handle(
        world.machine.cuDeviceGetDefaultMemPool(0)[1], owner=None, driver=world.driver
    ),
    "PhysicalMemory.from_handle": lambda world, one: one.from_handle(
        cuda.CUmemGenericAllocationHandle(world.free_memory.handle), owner=world.free_memory, driver=world.driver
    ),
    "Event.from_handle": lambda world, one: None,  # of another process, in tests/ipc
    "view": lambda world, one: one.view(0, 8),
    "AddressRange.view": lambda world, one: one.view(0, 4096),
    "view_as": lambda world, one: one.view_as(np.uint8),
    # pools
    "access": lambda world, one: one.access(world.device),
    "allocate": lambda world, one: one.allocate(64, world.stream),
    "allocate_async": lambda world, one: asyncio.run(one.allocate_async(64, world.stream)),
    "MemoryPool.current": lambda world, one: one.current(world.device),
    "default": lambda world, one: one.default(world.device),
    "make_current": lambda world, one: _entered(one.make_current()),
    "set_access": lambda world, one: one.set_access(world.device, sa.MemAccess.READWRITE),
    "CachingAllocator.allocate": lambda world, one: one.allocate(4096, world.stream),
    "to_device": lambda world, one: one.to_device(bytes(64), world.stream),
    "allocate_pitched": lambda world, one: one.allocate_pitched(64, 2, world.stream)[0],
    # graphs
    "Graph.create": lambda world, one: one.create(world.device),
    "add_to": _added_to,
    "add_free": lambda world, one: None,  # with add_to
    "launch": lambda world, one: one.launch(world.stream),
    # virtual memory
    "at": lambda world, one: one.at(world.mapping.address, driver=world.driver),
    "evict": _evicted,
    "export": lambda world, one: None,  # refused before the driver is asked: the memory was not made for that
    "granularity": lambda world, one: one.granularity(world.device),
    "grow": lambda world, one: one.grow(3 * PAGE),
    "map": lambda world, one: one.map(world.free_memory, PAGE, access=world.device),
    "resize": lambda world, one: one.resize(2 * PAGE),
    "restore": lambda world, one: None,  # with evict
    "AddressRange.close": lambda world, one: (one.unmap(), one.close()),
    "AddressRange.set_access": lambda world, one: one.set_access(world.device, sa.MemAccess.READ, stop=PAGE),
    "revoke": lambda world, one: one.revoke(world.device),
    "take": lambda world, one: one.take(PAGE),
    "add": lambda world, one: one.add(world.growable, "two"),
    "SleepGroup.allocate": lambda world, one: one.allocate(PAGE, world.stream),
    "remove": lambda world, one: one.remove(world.sleeper),
    "SleepGroup.read": _read_asleep,
    "SleepGroup.write": _written_asleep,
    "after_wake": lambda world, one: one.after_wake(len),
    "before_sleep": lambda world, one: one.before_sleep(len),
    "measure": lambda world, one: _entered(one.measure("other")),
    "resume": lambda world, one: None,  # with a tier on disk, in tests/vmm
    "sleep": _slept,
    "freeze": _frozen,
    "prepare": lambda world, one: vmm.SleepGroup(world.device).prepare(PAGE),
    "thaw": lambda world, one: None,  # with freeze
    "tagged": lambda world, one: one.tagged("one"),
    "wake": lambda world, one: None,  # with sleep
    "plot": lambda world, one: None,  # of other libraries
}


CHANGES: dict[str, Act] = {
    "grow": lambda world, one: one.grow(2 * PAGE),
    "grow into a piece": lambda world, one: one.grow(1),
    "shrink": lambda world, one: one.resize(PAGE, after=[world.stream, world.stream.record()]),
    "shrink away": lambda world, one: one.resize(0),
    "evict": _evicted,
    "evict for nothing": lambda world, one: one.evict(),
    "evict to memory": _evicted_to_memory,
    "lower access": lambda world, one: one.set_access(world.devices[-1], sa.MemAccess.READ),
}
"""Operations of a growable buffer that a peer can use as well."""


def _group(world: World) -> Any:
    group = vmm.SleepGroup(world.device)
    assert not group.backup.closed
    return group


def _on_default_streams(world: World) -> None:
    for stream in (world.device.default_stream, world.device.per_thread_stream):
        for allocate in (world.pool.allocate, sa.allocate):
            with allocate(64, stream) as buffer:
                buffer.fill(1)


def _on_two_streams(world: World) -> None:
    with world.cache.allocate(64, world.stream) as buffer:
        buffer.fill(1)
        world.other.wait(world.stream.record())
        buffer.free(world.other)
    world.cache.trim()


def _captured_allocation(world: World) -> None:
    with world.stream.capture() as graph, world.pool.allocate(64, world.stream) as buffer:
        buffer.fill(1)
    with graph:
        graph.launch(world.stream)
        world.stream.synchronize()
    world.device.graph_memory.trim()


PROGRAMS = [_on_default_streams, _on_two_streams, _captured_allocation]
"""Several operations, of which some may be done where another one has failed."""

MAKERS: dict[str, Callable[[World], Any]] = {
    "Event": lambda world: sa.Event(world.device),
    "MemoryPool": lambda world: sa.MemoryPool(world.device, release_threshold=MiB),
    "allocate": lambda world: sa.allocate(64, world.stream),
    "pointer_attributes": lambda world: sa.pointer_attributes(world.buffer.address, driver=world.driver),
    "PhysicalMemory": lambda world: vmm.PhysicalMemory(world.device, PAGE),
    "AddressRange": lambda world: vmm.AddressRange(PAGE, driver=world.driver),
    "GrowableBuffer": lambda world: vmm.GrowableBuffer(world.device, 4 * PAGE, 2 * PAGE, chunk=PAGE),
    "stripe": lambda world: vmm.stripe([world.device], 4 * PAGE),
    "SleepGroup": _group,
    "SparseArray": lambda world: vmm.SparseArray(world.device, (1024, 1024)),
    "TilePool": lambda world: vmm.TilePool(world.device, PAGE),
    "CachingAllocator": lambda world: CachingAllocator(world.pool),
    "share": lambda world: ipc.share(world.event_to_share),
    "raw_handles": lambda world: (ipc.raw_handles(world.event_to_share), None)[1],
}
"""Operations that make objects, and functions beside classes."""
if BINDINGS_VERSION >= "13":
    MAKERS["copy_batch"] = lambda world: sa.copy_batch(world.stream, [world.buffer[:8]], [world.buffer[8:16]])


def makers(those: dict[str, Callable[[Any], Any]]) -> Iterator[Any]:
    """Operations that make objects, without an object of their own."""
    acts: dict[str, Act] = {name: functools.partial(_made, make) for name, make in those.items()}
    for name, act in acts.items():
        yield pytest.param(object, act, id=name)
    yield pytest.param(object, OfTheParent(acts), id="makers OfTheParent")


def _made(make: Callable[[Any], Any], world: Any, _: object) -> Any:
    return make(world)


def _act_of(kind: type, name: str, acts: dict[str, Any]) -> Act | None:
    """How an operation is performed: as ``acts`` has it, or without arguments where it needs none."""
    act: Act | None = acts.get(f"{kind.__name__}.{name}", acts.get(name))
    if act is None and callable(getattr(kind, name)) and not _needs_arguments(kind, name):
        return lambda world, one: getattr(one, name)()
    return act


def _needs_arguments(kind: type, name: str) -> bool:
    with contextlib.suppress(ValueError):  # a function of C has no signature
        parameters = [*inspect.signature(getattr(kind, name)).parameters.values()]
        parameters = parameters[inspect.isfunction(inspect.getattr_static(kind, name)) :]
        return any(one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD for one in parameters)
    return True


def members(classes: list[type], acts: dict[str, Any], inherited: bool = True) -> Iterator[Any]:
    """The public operations of classes, and how each is performed; unless ``inherited`` not those of all memory.

    The properties of a class are one operation. Of each class there are all operations once more, on an object that is
    closed, and on one of a forked child's parent.
    """
    for kind in classes:
        properties, operations = [], dict[str, Act]()
        for name in dir(kind):
            member = inspect.getattr_static(kind, name)
            if name.startswith("_") or name in getattr(kind, "_inner", ()) or inspect.ismemberdescriptor(member):
                continue
            act = _act_of(kind, name, {**ACTS, **acts})
            if not isinstance(member, (property, classmethod, staticmethod)) and act is not None:
                operations[name] = act
            if not inherited and member is inspect.getattr_static(sa.Memory, name, None):
                continue
            if isinstance(member, property):
                properties.append(name)
            elif callable(getattr(kind, name)):
                yield pytest.param(kind, act, id=f"{kind.__name__}.{name}")
        yield pytest.param(kind, functools.partial(_read, properties), id=f"{kind.__name__} properties")
        for state in (Closed, OfTheParent, Copied):
            yield pytest.param(kind, state(operations), id=f"{kind.__name__} {state.__name__}")


class Closed:
    """All operations of an object, each of which raises once it is closed. Another close does nothing."""

    error: type[Exception] = sa.ClosedError
    exempt: ClassVar[set[str]] = {
        "AddressRange.set_access", "AddressRange.unmap", "CachingAllocator.reset_peaks", "CachingAllocator.statistics",
        "HostTier.calibrate", "ImportedRange.set_chunks", "MulticastObject.add_device", "PageArena.statistics",
        "RingProducer.add", "SleepGroup.after_wake", "SleepGroup.before_sleep", "SleepGroup.prepare",
        "SleepGroup.remove", "abandon", "end", "start", "stop", "trim",
    }  # fmt: skip
    """Operations that have nothing left to do, and those for which a closed object is a means only."""
    without_driver: ClassVar[set[str]] = {
        "Channel", "Device.can_access", "Fd", "Listener", "Message", "Peer", "RingProducer.statistics",
        "RingSlot.give_back", "Shared", "SleepGroup.add", "SparseArray.level_shape", "SparseArray.mapped_tiles",
        "Store.list", "Store.statistics", "WeightsWriter.place", "WeightsWriter.tie", "counters", "draw", "figures",
        "get", "items", "keys", "leaks", "mark_complete", "ready", "save_chrome", "save_pytorch", "save_rmm", "tables",
        "tagged", "team_complete", "used", "values", "view", "view_as",
    }  # fmt: skip
    """Operations and classes that ask no driver."""
    makes_calls: ClassVar[set[str]] = {
        "DiskTier.hold", "DiskTier.resume", "DiskTier.save", "MemoryPool.statistics", "PageTable.update", "Store.open",
        "Weights.attach",
    }  # fmt: skip
    """Operations that have something to do before they find the object closed. All others make no driver call."""

    def __init__(self, operations: dict[str, Act]) -> None:
        self._operations = operations

    def operations(self, kind: type, exempt: set[str]) -> dict[str, Act]:
        """The operations that have to raise."""
        exempt = exempt | {"close"}
        called = {one: act for one, act in self._operations.items() if not _does_nothing(act)}
        return {one: act for one, act in called.items() if not exempt & {one, kind.__name__, f"{kind.__name__}.{one}"}}

    def raises(self, world: Any, one: Any, act: Act) -> str:
        """Empty, or what an operation did in place of raising the error."""
        try:
            act(world, one)
        except self.error:
            return ""
        except Exception as error:
            return "" if _refused(error) else repr(error)
        return "succeeds"

    def check(self, new: Callable[[], Faults], kind: type) -> None:
        if "close" not in self._operations or kind is sa.GraphBuffer:  # its memory is there in each launch
            return
        world = new()
        one, close = world.things[kind], self._operations["close"]
        close(world, one)
        wrong = {}
        for name, act in {"": close, **self.operations(kind, self.exempt | self.without_driver)}.items():
            before = len(world.faulty.seen)
            found = act(world, one) and "" if act is close else self.raises(world, one, act)
            made = {*world.faulty.seen[before:]} - {"cuThreadExchangeStreamCaptureMode"}
            if found or (made and f"{kind.__name__}.{name}" not in self.makes_calls):
                wrong[name] = found, made
        assert not wrong, wrong
        world.close()


class OfTheParent(Closed):
    """All operations of an object that a forked child has of its parent: each raises there, and none makes a call.

    Nor does the end of all that the child has.
    """

    error = sa.ForkedProcessError
    exempt: ClassVar[set[str]] = {
        "Bridge.start", "DiskTier.reserve", "DiskTier.trim", "HostTier.calibrate", "HostTier.hold", "HostTier.trim",
        "LiveView.stop", "Observer.start", "PageArena.statistics", "PageSpace.copy_from", "PageSpace.copy_to",
        "PageSpace.shared", "RingProducer.add", "SleepGroup.after_wake", "SleepGroup.before_sleep",
        "SleepGroup.remove", "object.CachingAllocator", "object.PageArena", "object.Ring.consumer",
        "object.SymmetricMemory",
    }  # fmt: skip
    """Operations that ask no driver, those that need other arguments, and those that other processes are told of."""

    def check(self, new: Callable[[], Faults], kind: type) -> None:
        world = new()
        one, before = world.things[kind], len(world.faulty.seen)
        wrong = {}
        for name, act in self.operations(kind, self.exempt | self.without_driver).items():
            read, write = os.pipe()
            child = fork()
            if not child:
                signal.alarm(20)
                try:
                    found, seen = self.raises(world, one, act), world.faulty.seen
                    vars(world).clear()
                    del one
                    gc.collect()
                    os.write(write, f"{found}{seen[before:]}".encode())
                finally:
                    os._exit(0)
            os.close(write)
            os.waitpid(child, 0)
            with os.fdopen(read) as pipe:
                wrong[name] = pipe.read()
        assert set(wrong.values()) <= {"[]"}, {name: found for name, found in wrong.items() if found != "[]"}
        world.close()


class Copied(Closed):
    """An object that owns something: there must not be two of it."""

    exempt: ClassVar[set[str]] = {
        "Device", "GraphMemory", "LeakReport", "Message", "Observer", "Peer", "Phase", "PoolAttributes",
        "Registration", "Tagged",
    }  # fmt: skip

    def check(self, new: Callable[[], Faults], kind: type) -> None:
        if kind.__name__ in self.exempt:
            return
        world = new()
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"^\w+ objects own .* cannot be copied or pickled"):
                duplicate(world.things[kind])
        world.close()


def _does_nothing(act: Any) -> bool:
    code, nothing = getattr(act, "__code__", None), (lambda world, one: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (nothing.co_code, nothing.co_consts)


def _read(properties: list[str], world: Any, one: Any) -> None:
    """Read properties, also those after one that an object of this kind cannot have."""
    for name in properties:
        try:
            getattr(one, name)
        except ValueError as error:
            if not _refused(error):
                raise


def _refused(error: BaseException | None) -> bool:
    """Whether it is of arrays of device memory, or of other than managed memory (tests/core/test_managed.py); or of an
    epoch that is committed, after which the driver refused to restore the capture mode.
    """
    if isinstance(error, sa.ClosedError) and "was committed" in str(error):
        return True
    return isinstance(error, ValueError) and bool(re.search("which the host cannot reach|is not managed", str(error)))


def _perform(world: Any, kind: type, act: Act) -> tuple[BaseException | None, dict[str, Any]]:
    """Do it, and keep what it gave; what it raised, and what there is while who called it has that."""
    hook = sys.unraisablehook
    # That of pytest keeps what a finaliser has raised, and all that its frames hold.
    sys.unraisablehook = lambda found: None if issubclass(found.exc_type, world.told) else hook(found)
    try:
        given = act(world, world.things[kind])
    except BaseException as error:
        world.end_faults()
        raised, there = error, world.shape()
    else:
        world.end_faults()
        if hasattr(given, "__exit__") and not isinstance(given, (np.ndarray, sa.BufferView)):
            world.made.enter_context(given)
        return None, world.shape()
    finally:
        sys.unraisablehook = hook
    # Without the frames, which hold what was being made.
    raised.__context__ = raised.__cause__ = None
    return raised.with_traceback(None), there


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(
    ("kind", "act"),
    [
        *members(CLASSES, ACTS),
        *makers(MAKERS),
        *(pytest.param(type(None), lambda world, _, run=run: run(world), id=run.__name__) for run in PROGRAMS),
        *(pytest.param(vmm.GrowableBuffer, act, marks=pytest.mark.gpus(2), id=one) for one, act in CHANGES.items()),
    ],
)
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Act | None) -> None:
    fails_in_turn(lambda: (Virtual if kind.__module__.startswith(vmm.__name__) else World)(machine), kind, act)


@in_a_thread
def fails_in_turn(
    new: Callable[[], Faults],
    kind: type,
    act: Any,
    most: int = MANY,
    errors: tuple[type[Exception], ...] = (),
    halves: tuple[str, ...] = (),
) -> None:
    """Perform an operation in new worlds in which its first call fails, then the second, and so on.

    ``most``: how many calls fail at most; ``errors``: what it may raise besides errors of the driver; ``halves``:
    the calls after whose failure it may be half done.
    """
    assert act is not None, "a new operation: say in ACTS how to perform it"
    if isinstance(act, Closed):
        act.check(new, kind)
        return
    world = new()
    shapes = world.shapes
    shapes.append(world.shape())
    before = len(world.faulty.seen)
    error, there = _perform(world, kind, act)
    calls = world.performed - before
    # Each call of properties, which are many operations in one.
    count = calls if isinstance(act, functools.partial) and act.func is _read else most
    shapes.append(there)
    assert error is None or _refused(error), repr(error)
    world.close()
    counted = type(world).counts_descriptors
    del world
    before_all = descriptors() if counted else Counter()
    for turn, first in enumerate(sampled(range(1, calls + 1), count), 1):
        if turn % 8 == 0:
            # Collections do not come in the driver's calls, and address space is short.
            gc.collect()
        for times in (1, 2) if turn % 2 else (1,):
            world = new()
            world.faulty._times = times
            world.faulty._target = len(world.faulty.seen) + first
            raised, there = _perform(world, kind, act)
            failed = world.faulty.failed
            world.put_right()
            assert raised is None or isinstance(raised, (sa.CudaError, *errors)), (first, times, failed, raised)
            if times == 1 and kind is not type(None) and not any(name in ENDERS or name in halves for name in failed):
                # What the driver refuses to end is still there, and where undoing fails as well, there may be more.
                # What was to be made nobody has where that has failed.
                allowed = shapes[:-1] if kind is object and raised is not None else shapes
                if there not in allowed:
                    gc.collect()  # frames may refer to the error that refers to them
                    there = world.shape()  # without what the frames of the error had
                assert there in allowed, f"{first}, {failed}: {there} is none of {shapes}"
            if times == 1:
                for part in world.whole:
                    assert there[part] in [shape[part] for shape in shapes], (first, failed, part, there[part])
            if times == 1:
                assert {*world.refusals.refused} <= {*world.needless}, (first, failed)
            if times == 1 and isinstance(raised, sa.CudaError):
                assert raised.call in failed, (first, failed, raised)
                # An operation of several steps, or for which another process waits, cannot be done again.
                if kind is not object and TimeoutError not in errors:
                    again, _ = _perform(world, kind, act)
                    assert again is None or _refused(again), (first, failed, again)
            checked, left = world.checked, type(world).left
            world.close()
            del world, raised
            found = _left_at_last(left, checked)
            twice = [str(one) for one in checked.hazards if one.kind == "double free"]
            assert (found, twice) == ({}, []), (first, times, failed)
    if counted:
        assert eventually(lambda: not descriptors() - before_all), descriptors() - before_all


def _left_at_last(left: Callable[[Any], dict[str, Any]], checked: Any) -> dict[str, Any]:
    # A thread of a tier may still be at an access that was abandoned.
    eventually(lambda: not left(checked))
    return left(checked)


def descriptors() -> Counter[str]:
    """Open sockets, pipes and shared memory, after all dropped objects have ended."""
    gc.collect()
    end_what_was_dropped()
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    return Counter({kind: found[kind] for kind in ("socket", "pipe", "/memfd")})


SWEEPS = [
    "tests.package.test_sweeps", "tests.interop.test_sweeps", "tests.ipc.test_sweeps", "tests.ipc.ring.test_sweeps",
    "tests.ipc.store.test_sweeps", "tests.multicast.test_sweeps", "tests.observing.test_sweeps",
    "tests.vmm.test_sweeps", "tests.vmm.pages.test_faults",
]  # fmt: skip
"""Modules that sweep all public names: their ``CLASSES``, and what makes objects, ``MAKERS``."""
NOT_SWEPT = {
    "Memory": "in its subclasses",
    "VirtualBuffer": "in its subclasses",
    "Ring": "makes the ends of a ring, which are swept by its two functions",
    "StreamLike": "a name for types",
    "CommunicatorLike": "a name for types",
    "as_communicator": "makes no driver calls",
    "serve": "with share",
    "send": "as Channel.receive of the ring's sweep",
    "receive": "as Channel.receive of the ring's sweep",
    "open": "by what is opened",
    "live": "as LiveView",
    "StoreServer": "makes no driver calls",
    "PageBudget": "makes no driver calls",
    "RawHandles": "makes no driver calls",
    "Stored": "makes no driver calls of its own: as save and load of the tiers",
    "ExpandableCache": "in tests/vmm/test_expandable.py, while memory moves",
    "MemPoolPtrExportData": "bytes",
    "MemFabricHandle": "bytes",
    "IpcMemHandle": "bytes",
    "IpcEventHandle": "bytes",
    "open_memory_handle": "of another process, as ipc.open of such memory",
    "prefetch_batch": "one call, of managed memory",
    "discard_batch": "one call, of managed memory",
    "discard_prefetch_batch": "one call, of managed memory",
}
"""The other public names, and why."""


def public() -> Iterator[tuple[str, Any]]:
    """All that has operations: classes but plain data, errors and protocols; and functions."""
    for module in (sa, vmm, ipc, multicast, interop, observing):
        for name in public_names(module):
            thing = getattr(module, name)
            if inspect.ismodule(thing) or name.endswith(("Communicator", "GroupLike")):
                continue
            plain = inspect.isclass(thing) and (
                issubclass(thing, (BaseException, enum.Enum))
                or (issubclass(thing, tuple) and not hasattr(thing, "close"))
                or dataclasses.is_dataclass(thing)
                or getattr(thing, "_is_protocol", False)
            )
            if not plain:
                yield name, thing


def test_everything_public_is_swept_somewhere() -> None:
    """A new class or function fails this, and a new operation of a class the sweep that has the class."""
    swept: set[str] = set()
    for name in SWEEPS:
        module = importlib.import_module(name)
        swept |= {kind.__name__ for kind in module.CLASSES}
        swept |= {word for made in module.MAKERS for word in made.replace(".", " ").split()}
    names = {name for name, _ in public()}
    assert names - swept - set(NOT_SWEPT) == set(), "add it to a sweep, or say here why not"
    assert set(NOT_SWEPT) & swept <= {"Ring", "open", "serve"}
    assert set(NOT_SWEPT) <= names, "gone"
