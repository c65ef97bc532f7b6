"""Shorthand for facts about the driver: ``said`` and ``value`` read an answer, a :class:`Rig` makes things.

Every fact in this folder is a reading from an NVIDIA H200 (from two of one host where two are named), driver
580.159 of CUDA 13.0, cuda-bindings 13.3.1. A test states it in raw driver calls, once, for every driver. Numbers that
differ from one kind of GPU to another come from the device's attributes, or the test is skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from streamalloc.driver.bindings import BINDINGS_VERSION, check_readable
from tests.facts.enums import DEVICE, FABRIC, LEGACY, NO_HANDLE, NON_BLOCKING, PINNED, POSIX_FD, UNTIMED
from tests.support import eventually

MiB = 1 << 20
# What physical memory, address ranges and mappings are multiples of: the granularity, which is the same for all.
PAGE = 2 * MiB
# An address of which nothing is reserved.
UNRESERVED = 0x123400000000
UINT64_MAX = (1 << 64) - 1

Answer = tuple[Any, ...]


def said(answer: Answer) -> str:
    """The result code of an answer, without the prefix: ``SUCCESS``, ``INVALID_VALUE``, ``NOT_READY``."""
    name: str = answer[0].name
    return name.removeprefix("CUDA_").removeprefix("ERROR_")


def value(answer: Answer) -> Any:
    """The answer of a successful call: nothing, one value, or a tuple of them."""
    assert said(answer) == "SUCCESS", answer
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


class Stats(NamedTuple):
    """The four counters of a pool, or of a device's graph memory, in bytes."""

    reserved: int
    reserved_high: int
    used: int
    used_high: int


def unreadable(enum: Any, name: str) -> Any:
    """A member that the bindings have and cannot read; otherwise the test is skipped."""
    member = getattr(enum, name, None)
    if member is None:
        pytest.skip(f"cuda-bindings {BINDINGS_VERSION} lack {name}")
    with contextlib.suppress(TypeError):
        check_readable(enum.__name__, member)
        pytest.skip(f"cuda-bindings {BINDINGS_VERSION} read {name}, and the driver's answer is not among the readings")
    return member


class Gate:
    """A word of pinned host memory that holds streams until the host opens it."""

    def __init__(self, rig: Things) -> None:
        self._rig = rig
        self._word = rig.word()
        self.address = ctypes.addressof(self._word)
        self._asked = 0

    def hold(self, stream: Any) -> None:
        """Make the stream wait here until the gate is opened the next time."""
        self._asked += 1
        self._rig.hold(stream, self._word, self._asked)

    def open(self) -> None:
        self._word.value = self._asked

    @property
    def is_open(self) -> bool:
        return self._word.value == self._asked

    @contextlib.contextmanager
    def opening_after(self, seconds: float) -> Iterator[None]:
        """Have another thread open the gate, for calls that may wait on a held stream."""
        timer = threading.Timer(seconds, self.open)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self.open()


class Things:
    """The objects that a test makes through a driver with one context current, and the undo of all of them."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.context = value(raw.cuCtxGetCurrent())
        self._contexts = [self.context]
        self._gates: list[Gate] = []
        self._captured: list[Any] = []
        self._addresses: dict[int, None] = {}
        self._ranges: set[int] = set()
        self._graph_memory_of_others: dict[int, tuple[int, int]] = {}
        """Bytes reserved and used, by device."""
        self._owned: list[tuple[Any, Callable[[], object]]] = []
        self._settled = False

    def device_attribute(self, name: str) -> int:
        """An attribute of device 0."""
        attribute = getattr(self.raw.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(value(self.raw.cuDeviceGetAttribute(attribute, 0)))

    def need(self, name: str) -> None:
        """Skip the test unless device 0 has an attribute, of which there are no readings without it."""
        if not self.device_attribute(name):
            pytest.skip(f"device 0 lacks {name}")

    # --- what a test makes

    def own(self, handle: Any, destroy: Callable[[Any], object]) -> Any:
        """Have something destroyed at the end of the test; what that call answers is not looked at."""
        self._owned.append((handle, lambda: destroy(handle)))
        return handle

    def disown(self, handle: Any) -> Any:
        """Leave the destruction to the test: some handles, destroyed twice, end the process on hardware."""
        self._owned = [owned for owned in self._owned if owned[0] is not handle]
        self._captured = [stream for stream in self._captured if stream is not handle]
        return handle

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        return self.own_stream(self.raw.cuStreamCreate(flags))

    def own_stream(self, answer: Answer) -> Any:
        return self.own(value(answer), self.raw.cuStreamDestroy)

    @property
    def per_thread(self) -> Any:
        """The default stream of this thread."""
        return self.raw.CUstream(2)

    def event(self, flags: int = UNTIMED) -> Any:
        return self.own(value(self.raw.cuEventCreate(flags)), self.raw.cuEventDestroy)

    def gate(self) -> Gate:
        gate = Gate(self)
        self._gates.append(gate)
        return gate

    def device_context(self, device: int) -> Any:
        """The device's primary context, retained for the length of the test and made current."""
        context = value(self.raw.cuDevicePrimaryCtxRetain(device))
        self._contexts.append(context)
        self.own(context, lambda _: self.raw.cuDevicePrimaryCtxRelease(device))
        self.use(context)
        return context

    def use(self, context: Any) -> None:
        value(self.raw.cuCtxSetCurrent(context))

    def pool(self, threshold: int | None = None, policies: str = "111", **props: int) -> Any:
        """A new pool; ``policies`` has a digit for each of REUSE_POLICIES."""
        pool = value(self.create_pool(**props))
        for name, digit in zip(REUSE_POLICIES, policies, strict=True):
            value(self.raw.cuMemPoolSetAttribute(pool, self.pool_attribute(name), int(digit)))
        if threshold is not None:
            self.set_threshold(pool, threshold)
        return pool

    def pool_attribute(self, name: str) -> Any:
        return getattr(self.raw.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")

    def set_threshold(self, pool: Any, size: int) -> None:
        attribute = self.pool_attribute("RELEASE_THRESHOLD")
        value(self.raw.cuMemPoolSetAttribute(pool, attribute, self.raw.cuuint64_t(size)))

    def create_pool(self, **props: int) -> Answer:
        answer: Answer = self.raw.cuMemPoolCreate(self.pool_props(**props))
        if said(answer) == "SUCCESS":
            self.own(answer[1], self._destroy_pool)
        return answer

    def _destroy_pool(self, pool: Any) -> None:
        """Only once all of its memory is free: else hardware was seen to crash later, in calls that are no cause."""
        if self._settled:
            self.raw.cuMemPoolDestroy(pool)

    def pool_props(self, allocation_type: int = PINNED, max_size: int = 0, usage: int = 0, **place: int) -> Any:
        """``place``: arguments of :meth:`_placed`."""
        props = self.raw.CUmemPoolProps()
        props.allocType = self.raw.CUmemAllocationType(allocation_type)
        props.maxSize, props.usage = max_size, usage
        return self._placed(props, **place)

    def _placed(self, props: Any, location: int = DEVICE, id: int = 0, handle_types: int = NO_HANDLE) -> Any:
        if handle_types & FABRIC:
            self.need("HANDLE_TYPE_FABRIC_SUPPORTED")
        props.location = self.location(location, id)
        # The enum has no member for a combination of handle types: written where the struct keeps the field.
        ctypes.c_int.from_address(int(props.getPtr()) + 4).value = handle_types
        return props

    def location(self, kind: int, id: int = 0) -> Any:
        location = self.raw.CUmemLocation()
        location.type = self.raw.CUmemLocationType(kind)
        location.id = id
        return location

    def access(self, kind: int, id: int, flags: int) -> Any:
        descriptor = self.raw.CUmemAccessDesc()
        descriptor.location = self.location(kind, id)
        descriptor.flags = self.raw.CUmemAccess_flags(flags)
        return descriptor

    def grant(self, pool: Any, *wanted: tuple[int, int, int]) -> str:
        """The result of cuMemPoolSetAccess for these (location, id, flags)."""
        descriptors = [self.access(*one) for one in wanted]
        return said(self.raw.cuMemPoolSetAccess(pool, descriptors, len(descriptors)))

    def access_flags(self, pool: Any, kind: int, id: int = 0) -> int:
        return int(value(self.raw.cuMemPoolGetAccess(pool, self.location(kind, id))))

    def allocate(self, pool: Any, size: int, stream: Any) -> int:
        return int(value(self.try_allocate(pool, size, stream)))

    def try_allocate(self, pool: Any, size: int, stream: Any) -> Answer:
        return self.keep(self.raw.cuMemAllocFromPoolAsync(size, pool, stream))

    def keep(self, answer: Answer) -> Answer:
        """Free what a stream-ordered allocation answered, unless the test has done so by its end."""
        if said(answer) == "SUCCESS" and int(answer[1]):
            self._addresses[int(answer[1])] = None
        return answer

    def free(self, pointer: Any, stream: Any) -> None:
        value(self.raw.cuMemFreeAsync(pointer, stream))

    def plain(self, size: int) -> Any:
        return self.own(value(self.raw.cuMemAlloc(size)), self.raw.cuMemFree)

    def pinned(self, size: int) -> Any:
        pointer = self.own(value(self.raw.cuMemHostAlloc(size, 0)), self.raw.cuMemFreeHost)
        ctypes.memset(int(pointer), 0, size)
        return pointer

    def word(self) -> ctypes.c_uint32:
        """A pinned word of zero."""
        return ctypes.c_uint32.from_address(int(self.pinned(64)))

    def hold(self, stream: Any, word: ctypes.c_uint32, at_least: int = 1) -> None:
        """Make the stream wait until the word has this value or a larger one."""
        value(self.raw.cuStreamWaitValue32(stream, ctypes.addressof(word), at_least, 0))

    # --- virtual memory

    def memory_props(
        self, allocation_type: int = PINNED, compression: int = 0, rdma: int = 0, usage: int = 0, **place: int
    ) -> Any:
        """``place``: arguments of :meth:`_placed`."""
        if compression:
            self.need("GENERIC_COMPRESSION_SUPPORTED")
        if rdma:
            self.need("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        props = self.raw.CUmemAllocationProp()
        props.type = self.raw.CUmemAllocationType(allocation_type)
        props.allocFlags.compressionType = compression
        props.allocFlags.gpuDirectRDMACapable = rdma
        props.allocFlags.usage = usage
        return self._placed(props, **place)

    def create_memory(self, size: int = PAGE, **props: int) -> Answer:
        return self.keep_memory(self.raw.cuMemCreate(size, self.memory_props(**props), 0))

    def memory(self, size: int = PAGE, **props: int) -> Any:
        """Physical memory, released at the end unless ``release`` has done it; mappings last until then, too."""
        return value(self.create_memory(size, **props))

    def keep_memory(self, answer: Answer) -> Answer:
        """Release what a call that creates, retains or imports physical memory answered."""
        if said(answer) == "SUCCESS":
            self.own(answer[1], self.raw.cuMemRelease)
        return answer

    def release(self, memory: Any) -> str:
        """The result of cuMemRelease; not done again at the end, when the handle may be another's."""
        return said(self.raw.cuMemRelease(self.disown(memory)))

    def try_reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> Answer:
        answer: Answer = self.raw.cuMemAddressReserve(size, alignment, hint, flags)
        if said(answer) == "SUCCESS":
            self._ranges.add(int(answer[1]))
            self.own(answer[1], lambda start: self._clear_range(int(start), size))
        return answer

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        """An address range, given back at the end with all that is mapped there."""
        return int(value(self.try_reserve(size, alignment, hint)))

    def free_range(self, start: int, size: int) -> str:
        """The result of cuMemAddressFree; not done again at the end, when the addresses may be another's."""
        result = said(self.raw.cuMemAddressFree(start, size))
        if result == "SUCCESS":
            self._ranges.discard(start)
        return result

    def _clear_range(self, start: int, size: int) -> None:
        if start in self._ranges and self.free_range(start, size) != "SUCCESS":
            self.raw.cuMemUnmap(start, size)
            self.free_range(start, size)

    def map(self, address: int, memory: Any, size: int = PAGE) -> int:
        """Map all of the memory, without access for anyone."""
        value(self.raw.cuMemMap(address, size, 0, memory, 0))
        return address

    def mapping(self, size: int = PAGE, *wanted: tuple[int, int, int], **props: int) -> int:
        """New memory in a range of its own, with the access that is wanted."""
        address = self.map(self.reserve(size), self.memory(size, **props), size)
        if wanted:
            assert self.set_access(address, size, *wanted) == "SUCCESS"
        return address

    def set_access(self, address: int, size: int, *wanted: tuple[int, int, int]) -> str:
        """The result of cuMemSetAccess for these (location, id, flags)."""
        descriptors = [self.access(*one) for one in wanted]
        return said(self.raw.cuMemSetAccess(address, size, descriptors, len(descriptors)))

    def get_access(self, address: int, kind: int = DEVICE, id: int = 0) -> int | str:
        """The access flags of a location at an address, or what the call says where it fails."""
        answer = self.raw.cuMemGetAccess(self.location(kind, id), address)
        return int(answer[1]) if said(answer) == "SUCCESS" else said(answer)

    # --- what processes share

    def handle_type(self, number: int) -> Any:
        return self.raw.CUmemAllocationHandleType(number)

    def export(self, shared: Any, handle_type: int = POSIX_FD, flags: int = 0) -> Answer:
        """A pool or physical memory. A descriptor is closed at the end, unless ``close_fd`` has done so."""
        of_pool = isinstance(shared, self.raw.CUmemoryPool)
        call = self.raw.cuMemPoolExportToShareableHandle if of_pool else self.raw.cuMemExportToShareableHandle
        answer: Answer = call(shared, self.handle_type(handle_type), flags)
        return self.keep_fd(answer) if handle_type == POSIX_FD else answer

    def keep_fd(self, answer: Answer) -> Answer:
        if said(answer) == "SUCCESS":
            self.own(answer[1], os.close)
        return answer

    def exported(self, shared: Any, handle_type: int = POSIX_FD) -> Any:
        return value(self.export(shared, handle_type))

    def close_fd(self, fd: int) -> None:
        os.close(self.disown(fd))

    def import_memory(self, handle: Any, handle_type: int = POSIX_FD) -> Answer:
        """From a descriptor, or from the struct of a fabric handle."""
        given = int(handle.getPtr()) if handle_type == FABRIC else handle
        return self.keep_memory(self.raw.cuMemImportFromShareableHandle(given, self.handle_type(handle_type)))

    def imported(self, handle: Any, handle_type: int = POSIX_FD) -> Any:
        return value(self.import_memory(handle, handle_type))

    def import_pool(self, handle: Any, handle_type: int = POSIX_FD) -> Answer:
        given = int(handle.getPtr()) if handle_type == FABRIC else handle
        answer: Answer = self.raw.cuMemPoolImportFromShareableHandle(given, self.handle_type(handle_type), 0)
        return answer

    # --- graphs

    def begin_capture(self, stream: Any, mode: int = 0) -> None:
        value(self.raw.cuStreamBeginCapture(stream, self.raw.CUstreamCaptureMode(mode)))
        self._captured.append(stream)

    def capture_status(self, stream: Any) -> str:
        status: str = value(self.raw.cuStreamIsCapturing(stream)).name
        return status.removeprefix("CU_STREAM_CAPTURE_STATUS_")

    def end_capture(self, stream: Any) -> Answer:
        answer: Answer = self.raw.cuStreamEndCapture(stream)
        if said(answer) == "SUCCESS":
            self.own(answer[1], self.raw.cuGraphDestroy)
        return answer

    def instantiate(self, graph: Any, flags: int = 0) -> Any:
        return self.own(value(self.raw.cuGraphInstantiate(graph, flags)), self.raw.cuGraphExecDestroy)

    # --- the end

    def settle(self) -> bool:
        """Open every gate, end every capture and let all work end, as it may be after a test that failed half-way.

        Fixtures that undo something do this before. False where the driver can no longer do it.
        """
        self.open_gates()
        for stream in self._captured:
            self.end_capture(stream)
        self._captured.clear()
        return self._synchronize_all()

    def open_gates(self) -> None:
        """Let every held stream go on."""
        for gate in self._gates:
            gate.open()

    def close(self) -> None:
        """Settle, then free and destroy what the test made, newest first."""
        self.settle()
        for address in self._addresses:
            self.raw.cuMemFreeAsync(address, LEGACY)
        self._settled = self._synchronize_all()
        for _, destroy in reversed(self._owned):
            destroy()

    def _synchronize_all(self) -> bool:
        """Have every context do its work, and leave the first one current."""
        results = []
        for context in reversed(self._contexts):
            results += [said(self.raw.cuCtxSetCurrent(context)), said(self.raw.cuCtxSynchronize())]
        return set(results) == {"SUCCESS"}


class Rig(Things):
    """The driver under test with one context current, and the undo of all that a test makes through it."""

    def pointer_attribute(self, address: Any, name: str) -> int | str:
        """An attribute of an address, or what the call says where it fails."""
        member = getattr(self.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        answer = self.raw.cuPointerGetAttribute(member, address)
        return int(answer[1]) if said(answer) == "SUCCESS" else said(answer)

    def pointer_attributes(self, address: Any, names: Iterable[str]) -> dict[str, int | str]:
        return {name: self.pointer_attribute(address, name) for name in names}

    def get(self, pool: Any, name: str) -> int:
        return int(value(self.raw.cuMemPoolGetAttribute(pool, self.pool_attribute(name))))

    def stats(self, pool: Any) -> Stats:
        return Stats(*(self.get(pool, name) for name in COUNTERS))

    def reserved(self, pool: Any) -> int:
        return self.get(pool, "RESERVED_MEM_CURRENT")

    def used(self, pool: Any) -> int:
        return self.get(pool, "USED_MEM_CURRENT")

    def device_free(self) -> int:
        """Free memory of the current device."""
        return int(value(self.raw.cuMemGetInfo())[0])

    def query(self, stream: Any) -> str:
        return said(self.raw.cuStreamQuery(stream))

    def held(self, stream: Any) -> bool:
        """Whether the stream has work that does not execute, looked at after a moment in which it could."""
        time.sleep(0.005)
        return self.query(stream) == "NOT_READY"

    def executed(self, stream: Any, within: float = 5.0) -> bool:
        """Whether all work of the stream executes within a time; looking is no synchronisation."""
        return eventually(lambda: self.query(stream) != "NOT_READY", within) and self.query(stream) == "SUCCESS"

    def synchronize(self) -> None:
        value(self.raw.cuCtxSynchronize())

    def read(self, pointer: Any, size: int) -> list[int]:
        """The bytes at a device address, copied once the current context has done its work."""
        self.synchronize()
        bytes_: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
        value(self.raw.cuMemcpyDtoH(bytes_, pointer, size))
        return [int(byte) for byte in bytes_]

    def graph_memory(self, device: int = 0) -> Stats:
        attributes = (getattr(self.raw.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{name}") for name in COUNTERS)
        absolute = [int(value(self.raw.cuDeviceGetGraphMemAttribute(device, one))) for one in attributes]
        before = self._graph_memory_of_others.get(device, (0, 0))
        return Stats(*(number - before[at // 2] for at, number in enumerate(absolute)))

    def forget_graph_memory(self, device: int = 0) -> None:
        """Give back what graphs have reserved before, and start the peaks anew.

        The first time, what is still in use is that of others, a failed test for example; it is not counted.
        """
        first = device not in self._graph_memory_of_others
        if first:
            gc.collect()
        value(self.raw.cuDeviceGraphMemTrim(device))
        if first:
            stats = self.graph_memory(device)
            self._graph_memory_of_others[device] = (stats.reserved, stats.used)
        for name in ("USED_MEM_HIGH", "RESERVED_MEM_HIGH"):
            attribute = getattr(self.raw.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{name}")
            value(self.raw.cuDeviceSetGraphMemAttribute(device, attribute, self.raw.cuuint64_t(0)))


PROGRAM = """
import os
from streamalloc.driver import default
from tests.facts.enums import DEVICE, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, Rig, said, value
raw = default()
value(raw.cuInit(0))
"""
"""The begin of a program, for a test that needs a process of its own which ends before anything else."""
IN_CONTEXT = (
    PROGRAM
    + """
value(raw.cuCtxSetCurrent(value(raw.cuDevicePrimaryCtxRetain(0))))
rig = Rig(raw)
"""
)

REUSE_POLICIES = ("REUSE_FOLLOW_EVENT_DEPENDENCIES", "REUSE_ALLOW_OPPORTUNISTIC", "REUSE_ALLOW_INTERNAL_DEPENDENCIES")
COUNTERS = ("RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_CURRENT", "USED_MEM_HIGH")


def offsets(pointers: Sequence[Any]) -> list[int]:
    """Offset of each pointer from the first."""
    return [int(pointer) - int(pointers[0]) for pointer in pointers]
