"""Handles of programs on raw driver calls: what they export is opened here, and the other way round."""

import ctypes
import functools
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Gate, settle
from tests.ipc.support import PAGE, POSIX, shared_pool
from tests.processes import FD, Descriptor, Kept, Opaque, Peer, finished, in_a_child
from tests.support import MiB, Replaced, each_raises, eventually, holds

GUIDE = Path(__file__).parents[2] / "notebooks/docs/guides/handles.md"
WRONG_LENGTH = re.compile("has 64 bytes, not 3")


@pytest.fixture(scope="module")
def peers(on_cuda: bool) -> Iterator[Peer]:
    with Peer(on_cuda) as peer:
        yield peer


@pytest.fixture
def peer(peers: Peer) -> Iterator[Peer]:
    """A process on raw calls, with a stream."""
    peers.rig("stream", keep="stream")
    yield peers
    peers.reset()


def exported(peer: Peer, call: str, name: str) -> ipc.Fd:
    """The descriptor that the peer exports of what it keeps under a name."""
    return ipc.Fd(peer.fetch(peer.value(call, Kept(name), FD, 0)))


class TestTheirsHere:
    def test_physical_memory(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        peer.rig("memory", 3 * PAGE, handle_types=1, keep="memory")
        there = peer.rig("map", peer.rig("reserve", 3 * PAGE), Kept("memory"), 3 * PAGE)
        assert peer.rig("set_access", there, 3 * PAGE, (1, 0, 3)) == "SUCCESS"
        assert peer.said("cuMemsetD8", there, 9, 3 * PAGE) == "SUCCESS"
        peer.rig("synchronize")
        fd = exported(peer, "cuMemExportToShareableHandle", "memory")
        with (
            vmm.PhysicalMemory.from_handle(fd, driver=device.driver) as memory,
            vmm.AddressRange(memory.nbytes, driver=device.driver) as addresses,
        ):
            assert (memory.nbytes, memory.location, fd.closed) == (3 * PAGE, device.location, True)
            mapping = addresses.map(memory, access=device)
            assert holds(mapping, 9)

    def test_pool(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        peer.rig("pool", handle_types=1, keep="pool")
        address = peer.value("cuMemAllocFromPoolAsync", 3000, Kept("pool"), Kept("stream"), keep="memory")
        peer.rig("synchronize")  # The fill is on another stream than the allocation, and returns before its end.
        peer.value("cuMemsetD8", address, 5, 3000)
        peer.rig("synchronize")
        fd = exported(peer, "cuMemPoolExportToShareableHandle", "pool")
        data = peer.value("cuMemPoolExportPointer", address)
        with ipc.ImportedPool.from_handle(fd, driver=device.driver) as pool:
            assert pool.device == device
            with pool.open(data, stream=stream) as one, pool.open(data, stream=stream) as two:
                assert (one.nbytes, one.address, one.location) == (3000, two.address, device.location)
                one.close()
                assert holds(two, 5)
                two.fill(6)
                stream.synchronize()
                assert peer.rig("read", address, 4) == [6] * 4
            other = bytearray(data)
            other[8] ^= 0x80
            with pytest.raises(sa.InvalidValueError, match="cuMemPoolImportPointer"):
                pool.open(bytes(other), stream=stream)
            assert pool.open(data, stream=stream).nbytes == 3000  # dropped
        with pytest.raises(sa.ClosedError):
            pool.open(data, stream=stream)
        assert pool.closed

    def test_a_pool_is_imported_again_once_it_was_closed(self, peer: Peer, device: sa.Device) -> None:
        peer.rig("pool", handle_types=1, keep="pool")
        fd = exported(peer, "cuMemPoolExportToShareableHandle", "pool")
        for _ in range(3):
            pool = ipc.ImportedPool.from_handle(fd.fileno(), driver=device.driver)
            assert pool.handle
            pool.close()
        assert not fd.closed
        fd.close()

    def test_plain_memory(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        address = peer.rig("plain", 4 * MiB, keep="memory")
        peer.value("cuMemsetD8", int(address), 3, 4 * MiB)
        peer.rig("synchronize")
        handle = peer.value("cuIpcGetMemHandle", int(address))
        with ipc.open_memory_handle(handle, stream=stream) as buffer:
            assert (buffer.nbytes, buffer.location) == (4 * MiB, device.location)
            assert holds(buffer, 3)
        with pytest.raises(sa.CudaError):
            ipc.open_memory_handle(bytes(64), stream=stream)

    def test_event(self, peer: Peer, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        event = peer.rig("event", 6, keep="event")  # without timing, for other processes
        handle = peer.value("cuIpcGetEventHandle", Kept("event"))
        with sa.Event.from_handle(handle, device) as opened:
            gate.hold(stream)
            stream.record(opened)
            assert peer.said("cuEventQuery", Kept("event")) == "NOT_READY"
            gate.open()
            stream.synchronize()
            assert eventually(lambda: peer.said("cuEventQuery", Kept("event")) == "SUCCESS")
        assert event


class TestOursThere:
    def test_buffer(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        with shared_pool(device) as pool, pool.allocate(MiB, stream) as buffer:
            buffer.fill(4)
            stream.synchronize()
            given = buffer[512:1024].handles()
            assert (given.offset, given.nbytes, given.sizes) == (512, 512, (MiB,))
            assert given.device == device.uuid.bytes
            fd = Descriptor(given.fds[0].fileno())
            peer.value("cuMemPoolImportFromShareableHandle", fd, FD, 0, keep="pool")
            data = Opaque("CUmemPoolPtrExportData", bytes(given.data or b""))
            there = peer.value("cuMemPoolImportPointer", Kept("pool"), data)
            assert peer.rig("read", there + 512, 4) == [4] * 4
            assert peer.said("cuMemFreeAsync", there, Kept("stream")) == "SUCCESS"
            peer.rig("synchronize")
            given.close()
            assert all(fd.closed for fd in given.fds)
            stream.synchronize()

    def test_chunks(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        options: dict[str, Any] = {"handle_types": POSIX, "stream": stream, "chunk": PAGE}
        with vmm.GrowableBuffer(device, 64 * MiB, PAGE + 5, **options) as buffer:
            buffer.fill(8)
            stream.synchronize()
            given = buffer.handles()
            assert (given.sizes, given.nbytes, given.data) == ((PAGE, PAGE), PAGE + 5, None)
            peer.value("cuMemImportFromShareableHandle", Descriptor(given.fds[0].fileno()), FD, keep="memory")
            there = peer.rig("map", peer.rig("reserve", PAGE), Kept("memory"), PAGE)
            assert peer.rig("set_access", there, PAGE, (1, 0, 3)) == "SUCCESS"
            assert peer.rig("read", there, 4) == [8] * 4
            given.close()

    def test_plain_memory_and_event(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        with device.current():
            address = device.driver.cuMemAlloc(PAGE)[1]
        with sa.Buffer.from_handle(address, PAGE, owner="this", stream=stream) as buffer:
            buffer.fill(2)
            stream.synchronize()
            given = buffer.handles()
            handle = Opaque("CUipcMemHandle", bytes(given.data or b""))
            there = peer.value("cuIpcOpenMemHandle", handle, 1)
            assert peer.rig("read", there, 4) == [2] * 4
            assert peer.said("cuIpcCloseMemHandle", there) == "SUCCESS"
        with device.create_event(interprocess=True) as event:
            handle = Opaque("CUipcEventHandle", bytes(event.handles().data or b""))
            peer.value("cuIpcOpenEventHandle", handle, keep="event")
            assert peer.said("cuEventQuery", Kept("event")) == "SUCCESS"

    @pytest.mark.parametrize("before", [True, False])
    def test_what_was_closed_is_not_given_out(self, device: sa.Device, stream: sa.Stream, before: bool) -> None:
        """Whether or not it was exported before."""
        pool, event = shared_pool(device), device.create_event(interprocess=True)
        memory = vmm.PhysicalMemory(device, PAGE, handle_types=POSIX)
        growable = vmm.GrowableBuffer(device, 8 * MiB, MiB, handle_types=POSIX)
        things: list[Any] = [pool.allocate(64, stream), pool, memory, event, growable]
        views = [things[0][:4]]
        for thing in things:
            if before:
                thing.handles().close()
            thing.close()
        for thing in (*things, *views):
            each_raises(sa.ClosedError, thing.handles, functools.partial(ipc.share, thing))


class _Owner:
    """Owner of memory in other code."""


class TestOwners:
    def plain(self, device: sa.Device, nbytes: int = MiB) -> Any:
        with device.current():
            return device.driver.cuMemAlloc(nbytes)[1]

    def known(self, device: sa.Device, address: Any) -> bool:
        found = sa.pointer_attributes(int(address), driver=device.driver)
        return found.kind is not sa.MemoryKind.UNKNOWN

    @pytest.mark.parametrize("how", ["free", "close", "drop"])
    def test_another_object(self, device: sa.Device, stream: sa.Stream, gate: Gate, how: str) -> None:
        address, owner = self.plain(device), _Owner()
        kept = weakref.ref(owner)
        buffer = sa.Buffer.from_handle(address, MiB, owner=owner, stream=stream)
        assert buffer.owner is owner and buffer.location == device.location and buffer.device_accessible
        del owner
        gate.hold(stream)
        buffer.fill(1)
        if how == "drop":
            del buffer
        else:
            getattr(buffer, how)()
        settle()
        assert kept() is not None
        gate.open()
        stream.synchronize()
        settle()
        assert kept() is None and self.known(device, address)
        sa.Buffer.from_handle(address, MiB, owner="this", stream=stream).free()
        assert not self.known(device, address)

    @pytest.mark.parametrize("kind", ["cuMemAlloc", "cuMemHostAlloc", "pool"])
    @pytest.mark.parametrize("how", ["free", "drop"])
    def test_this(self, device: sa.Device, stream: sa.Stream, kind: str, how: str) -> None:
        raw = device.driver
        with sa.MemoryPool(device) as pool, device.current():
            address = {
                "cuMemAlloc": lambda: raw.cuMemAlloc(MiB),
                "cuMemHostAlloc": lambda: raw.cuMemHostAlloc(MiB, 0),
                "pool": lambda: raw.cuMemAllocFromPoolAsync(MiB, cuda.CUmemoryPool(pool.handle), stream._raw),
            }[kind]()[1]
            buffer = sa.Buffer.from_handle(address, MiB, owner="this", stream=stream)
            assert buffer.host_accessible == (kind == "cuMemHostAlloc")
            buffer.fill(1)
            with pytest.raises(ValueError, match="owns this handle already"):
                sa.Buffer.from_handle(address, MiB, owner="this", stream=stream)
            if how == "free":
                buffer.free()
                each_raises(sa.ClosedError, buffer.free)
            else:
                del buffer
            stream.synchronize()

            def gone() -> bool:
                settle()
                return not self.known(device, address)

            assert eventually(gone)

    def test_the_driver_tells_the_size(self, device: sa.Device, stream: sa.Stream) -> None:
        address = int(self.plain(device, 1000))
        with pytest.raises(ValueError, match="has 1,000 bytes"):
            sa.Buffer.from_handle(address, 1001, owner=None, stream=stream)
        with pytest.raises(ValueError, match=r"inside of the allocation"):
            sa.Buffer.from_handle(address + 8, 8, owner="this", stream=stream)
        assert sa.Buffer.from_handle(address + 8, 992, owner=None, stream=stream).nbytes == 992
        sa.Buffer.from_handle(address, 1000, owner="this", stream=stream).free()
        with pytest.raises(ValueError, match="it was freed"):
            sa.Buffer.from_handle(address, 1000, owner=None, stream=stream)

    def test_mapped_memory(self, device: sa.Device, stream: sa.Stream) -> None:
        with vmm.stripe([device], 2 * PAGE, stream=stream) as buffer:
            with sa.Buffer.from_handle(buffer.address, 2 * PAGE, owner=buffer, stream=stream) as again:
                again.fill(3)
                assert holds(buffer, 3) and again.location == device.location
            with pytest.raises(ValueError, match="mapped by cuMemMap"):
                sa.Buffer.from_handle(buffer.address, PAGE, owner="this", stream=stream)

    @pytest.mark.parametrize("where", ["device", "host"])
    def test_pool(self, device: sa.Device, stream: sa.Stream, where: str) -> None:
        location = device.location if where == "device" else sa.MemLocation.host()
        raw = device.driver.cuMemPoolCreate(sa.MemPoolProps(location=location).to_driver())[1]
        owner = _Owner()
        kept = weakref.ref(owner)
        pool = sa.MemoryPool.from_handle(raw, owner=owner, driver=device.driver)
        del owner
        assert (pool.location, pool.owned) == (location, False) and kept() is not None
        with pool.allocate(4096, stream) as buffer:
            assert buffer.owner is pool
        stream.synchronize()
        pool.close()
        with pytest.raises(ValueError, match="memory is at"):
            elsewhere = sa.MemLocation.host() if where == "device" else device.location
            sa.MemoryPool.from_handle(raw, owner="this", location=elsewhere, driver=device.driver)
        del pool, buffer
        assert kept() is None
        ours = sa.MemoryPool.from_handle(raw, owner="this", driver=device.driver)
        assert ours.owned
        with pytest.raises(ValueError, match="owns this handle already"):
            sa.MemoryPool.from_handle(raw, owner="this", driver=device.driver)
        assert sa.MemoryPool.from_handle(raw, owner=ours, driver=device.driver) is ours
        ours.close()
        with pytest.raises(sa.InvalidValueError):
            sa.MemoryPool.from_handle(raw, owner=None, driver=device.driver)

    def test_physical_memory(self, device: sa.Device) -> None:
        spec = vmm.PhysicalMemory(device, PAGE).properties
        raw = device.driver.cuMemCreate(2 * PAGE, spec.to_driver(), 0)[1]
        owner = _Owner()
        kept = weakref.ref(owner)
        with vmm.PhysicalMemory.from_handle(raw, owner=owner, driver=device.driver) as memory:
            del owner
            assert (memory.nbytes, memory.location) == (2 * PAGE, device.location)
            assert kept() is not None
        assert kept() is None
        ours = vmm.PhysicalMemory.from_handle(raw, 2 * PAGE, owner="this", driver=device.driver)
        with pytest.raises(ValueError, match="owns this handle already"):
            vmm.PhysicalMemory.from_handle(raw, owner="this", driver=device.driver)
        ours.close()
        assert device.driver.cuMemRelease(raw)[0].name == "CUDA_ERROR_INVALID_VALUE"

    @pytest.mark.bindings("13.1")
    def test_memory_of_a_hidden_device(self, machine: Any, device: sa.Device) -> None:
        """Newer drivers may say INVISIBLE in place of the type DEVICE, which driver 580 says."""

        def properties(handle: Any) -> Any:
            result, prop = machine.cuMemGetAllocationPropertiesFromHandle(handle)
            prop.location.type, prop.location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_INVISIBLE, -2
            return result, prop

        def granularity(prop: Any, option: Any) -> Any:
            assert prop.location.type is cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            return machine.cuMemGetAllocationGranularity(prop, option)

        driver: Any = Replaced(machine, cuMemGetAllocationPropertiesFromHandle=properties)
        driver.cuMemGetAllocationGranularity = granularity
        here = sa.Device(0, driver=driver)
        with vmm.PhysicalMemory(device, 2 * PAGE, handle_types=POSIX) as theirs:
            memory = vmm.PhysicalMemory.from_handle(theirs.export(), driver=driver)
            with memory, vmm.AddressRange(2 * PAGE, driver=driver) as addresses:
                assert (memory.nbytes, str(memory.location), memory.location.seen) == (2 * PAGE, "INVISIBLE", False)
                mapping = addresses.map(memory, access=here)
                with here.create_stream() as stream:
                    mapping.fill(7, stream)
                    stream.synchronize()
                assert holds(mapping, 7)
                with pytest.raises(ValueError, match="does not see that device"):
                    vmm.PhysicalMemory(memory.location, PAGE, driver=driver)


@pytest.mark.gpus(2)
class TestTwoDevices:
    @pytest.fixture
    def second(self, device: sa.Device) -> sa.Device:
        return sa.Device(1, driver=device.driver)

    def test_memory_is_where_the_driver_says(self, device: sa.Device, second: sa.Device, stream: sa.Stream) -> None:
        with second.current():
            address = second.driver.cuMemAlloc(4096)[1]
        buffer = sa.Buffer.from_handle(address, 4096, owner="this", driver=device.driver)
        assert (buffer.location, buffer.stream.device) == (second.location, second)
        buffer.free()
        with sa.MemoryPool(second) as pool, second.create_stream() as other, pool.allocate(4096, other) as made:
            seen = sa.Buffer.from_handle(made.address, 4096, owner=made, stream=stream)
            assert seen.location == second.location and not seen.device_accessible
            seen.free()
            stream.synchronize()
        with second.create_stream() as other, sa.PlainMemory(second).allocate(4096, other) as made:
            seen = sa.Buffer.from_handle(made.address, 4096, owner=made, stream=stream)
            assert seen.location == second.location and not seen.device_accessible
            seen.free()

    def test_a_pool_that_two_can_use(self, device: sa.Device, second: sa.Device) -> None:
        """Some drivers do not tell which device has the memory: then it is said, and checked where it can be."""
        raw = device.driver.cuMemPoolCreate(sa.MemPoolProps(location=second.location).to_driver())[1]
        pool = sa.MemoryPool.from_handle(raw, owner=None, driver=device.driver)
        assert pool.location == second.location
        with pytest.raises(ValueError, match="memory is at DEVICE:1"):
            sa.MemoryPool.from_handle(raw, owner=None, location=device.location, driver=device.driver)
        pool.set_access(device, sa.MemAccess.READWRITE)
        named = sa.MemoryPool.from_handle(raw, owner="this", location=second.location, driver=device.driver)
        assert named.location == second.location and named.peers == {device}
        named.close()

    def test_an_imported_pool(self, device: sa.Device, second: sa.Device) -> None:
        with shared_pool(second) as pool, second.create_stream() as stream, pool.allocate(4096, stream) as buffer:
            buffer.fill(6)
            stream.synchronize()
            given = buffer.handles()
            assert given.device == second.uuid.bytes
            with ipc.ImportedPool.from_handle(given.fds[0], driver=device.driver) as imported:
                assert imported.device == second
                with imported.open(given.data) as opened:
                    assert opened.location == second.location and holds(opened, 6)


@pytest.mark.simulated_only("CUDA does not survive a fork")
def test_a_forked_child_takes_no_handles(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device) as pool, pool.allocate(4096, stream) as buffer:
        plain = sa.PlainMemory(device)
        calls: list[Callable[[], object]] = [
            lambda: sa.Buffer.from_handle(buffer.address, 4, owner=buffer, stream=stream),
            lambda: sa.MemoryPool.from_handle(pool._raw, owner=pool, driver=device.driver),
            lambda: plain.allocate(4, stream),
            lambda: ipc.open_memory_handle(bytes(64), stream=stream),
        ]
        assert in_a_child(lambda: each_raises(sa.ForkedProcessError, *calls)) == 0


def _file() -> int:
    return os.open(__file__, os.O_RDONLY)


DESCRIPTORS: dict[str, Callable[[], int]] = {
    "a file": _file,
    "a directory": lambda: os.open("/", os.O_RDONLY),
    "a socket": lambda: socket.socket().detach(),
    "a pipe": lambda: os.pipe()[0],
}


def test_what_was_exported_twice(device: sa.Device, stream: sa.Stream) -> None:
    """Each import has a handle of its own, and one pool serves both of its imports."""
    with vmm.PhysicalMemory(device, PAGE, handle_types=POSIX) as memory:
        one, two = (vmm.PhysicalMemory.from_handle(memory.export(), driver=device.driver) for _ in range(2))
        with vmm.AddressRange(2 * PAGE, driver=device.driver) as addresses, two:
            first = addresses.map(one, access=device)
            first.fill(3, stream)
            one.close()
            assert holds(addresses.map(two, PAGE, access=device), 3)
            stream.synchronize()
    with shared_pool(device) as pool, pool.allocate(4096, stream) as buffer:
        given = [buffer.handles() for _ in range(2)]
        assert given[0].data == given[1].data
        pools = [ipc.ImportedPool.from_handle(each.fds[0], driver=device.driver) for each in given]
        assert pools[0].handle == pools[1].handle
        pools[0].close()
        with pools[1] as left, left.open(given[0].data, stream=stream) as opened:
            assert opened.nbytes == 4096


@pytest.mark.parametrize("kind", ["CUmemPoolPtrExportData", "cudaMemPoolPtrExportData", "ctypes", "numpy", "bytearray"])
def test_forms_of_opaque_handles(kind: str) -> None:
    """Structs of both modules of the bindings, and whatever has the bytes."""
    data = bytes(range(64))
    made: Any = {"ctypes": (ctypes.c_ubyte * 64)(*data), "numpy": np.frombuffer(data, np.uint8)}.get(
        kind, bytearray(data)
    )
    if "ExportData" in kind:
        made = getattr(cuda if kind.startswith("CU") else importlib.import_module("cuda.bindings.runtime"), kind)()
        ctypes.memmove(made.getPtr(), data, 64)
    assert sa.MemPoolPtrExportData(made) == data
    for wrong in ("x" * 64, 5, None):
        with pytest.raises(TypeError, match="or its bytes"):
            sa.MemPoolPtrExportData(wrong)
    if "ExportData" in kind:
        with pytest.raises(TypeError, match="or its bytes"):
            sa.IpcMemHandle(made)


def test_addresses_of_ctypes(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
    with pool.allocate(64, stream) as buffer:
        again = sa.Buffer.from_handle(ctypes.c_void_p(buffer.address), 64, owner=buffer, stream=stream)
        assert again.address == buffer.address
    with pytest.raises(TypeError, match="must be a CUdeviceptr or its number"):
        sa.Buffer.from_handle(ctypes.c_void_p(None), 64, owner=None, stream=stream)


class TestRefused:
    def test_access_of_what_is_no_device_of_the_driver(self, device: sa.Device) -> None:
        other = sa.Device(0, driver=simulated())
        pool = shared_pool(device)
        with pool, ipc.ImportedPool.from_handle(pool.handles().fds[0], driver=device.driver) as imported:
            with pytest.raises(ValueError, match="belongs to another driver"):
                imported.set_access(other)
            for wrong in (0, device.location):
                with pytest.raises(TypeError, match="device must be a Device"):
                    imported.set_access(wrong)  # type: ignore[arg-type]
            imported.set_access(device)

    @pytest.mark.parametrize("kind", DESCRIPTORS)
    @pytest.mark.parametrize(
        "open_", [vmm.PhysicalMemory.from_handle, ipc.ImportedPool.from_handle], ids=["memory", "pool"]
    )
    def test_descriptors_that_are_files(self, device: sa.Device, open_: Callable[..., Any], kind: str) -> None:
        with ipc.Fd(DESCRIPTORS[kind]()) as fd, pytest.raises(ValueError, match=f"is {kind}, and no handle"):
            open_(fd.fileno(), driver=device.driver)
        each_raises(ValueError, lambda: open_(99999, driver=device.driver), match="no open file descriptor")
        each_raises(sa.ClosedError, lambda: open_(fd, driver=device.driver))

    def test_another_kind(self, device: sa.Device) -> None:
        """A handle of memory taken as that of a pool, and the other way round, also by the struct."""
        with vmm.PhysicalMemory(device, PAGE, handle_types=POSIX) as memory, shared_pool(device) as pool:
            with pytest.raises(sa.NotSupportedError):
                ipc.ImportedPool.from_handle(memory.handles().fds[0], driver=device.driver)
            with pytest.raises(sa.NotSupportedError):
                vmm.PhysicalMemory.from_handle(pool.handles().fds[0], driver=device.driver)
            with pytest.raises(ValueError, match="cannot be mapped in this size"):
                vmm.PhysicalMemory.from_handle(memory.export(), 2 * PAGE, driver=device.driver)
        for handle in (sa.IpcMemHandle(bytes(64)), "text", 5):
            with pytest.raises(TypeError):
                sa.Event.from_handle(handle, device)
        for wrong in (cuda.CUstream(64), cuda.CUdeviceptr(64), cuda.CUresult.CUDA_SUCCESS):
            with pytest.raises(TypeError, match="must be a CUmemoryPool or its number"):
                sa.MemoryPool.from_handle(wrong, owner=None, driver=device.driver)
        with pytest.raises(TypeError, match="must be a CUdeviceptr or its number"):
            sa.Buffer.from_handle(cuda.CUmemoryPool(64), 4, owner=None, driver=device.driver)
        with pytest.raises(TypeError, match="must be a CUipcMemHandle"):
            ipc.open_memory_handle(sa.IpcEventHandle(bytes(64)), driver=device.driver)
        for call in (sa.IpcMemHandle, lambda data: ipc.open_memory_handle(data, driver=device.driver)):
            with pytest.raises(ValueError, match=WRONG_LENGTH):
                call(b"abc")
        assert sa.MemFabricHandle(sa.MemFabricHandle(bytes(64)).to_driver()) == bytes(64)

    def test_what_its_owner_freed(self, peer: Peer, device: sa.Device, stream: sa.Stream) -> None:
        address = peer.value("cuMemAlloc", 4 * MiB)
        handle = peer.value("cuIpcGetMemHandle", address)
        ipc.open_memory_handle(handle, stream=stream).close()
        assert peer.said("cuMemFree", address) == "SUCCESS"
        with pytest.raises(sa.InvalidValueError, match="has freed it"):
            ipc.open_memory_handle(handle, stream=stream)

    def test_what_an_ended_process_gave(self, on_cuda: bool, device: sa.Device, stream: sa.Stream) -> None:
        with Peer(on_cuda) as peer:
            handle = peer.value("cuIpcGetMemHandle", peer.value("cuMemAlloc", 4 * MiB))
            peer.rig("pool", handle_types=1, keep="pool")
            fd = exported(peer, "cuMemPoolExportToShareableHandle", "pool")
            address = peer.value("cuMemAllocFromPoolAsync", 3000, Kept("pool"), 0)
            assert peer.said("cuMemsetD8", address, 5, 3000) == "SUCCESS"
            peer.rig("synchronize")
            data = peer.value("cuMemPoolExportPointer", address)
            peer.kill()
        with pytest.raises(sa.CudaError, match="has ended"):
            ipc.open_memory_handle(handle, stream=stream)
        # A descriptor keeps the memory of a pool.
        with ipc.ImportedPool.from_handle(fd, driver=device.driver) as pool, pool.open(data, stream=stream) as opened:
            assert holds(opened, 5)

    @pytest.mark.simulated_only("two drivers")
    def test_another_driver(self, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        other = sd.simulated(seed=1)
        with pool.allocate(4096, stream) as buffer, vmm.PhysicalMemory(device, PAGE) as memory:
            with pytest.raises(ValueError, match=r"is in no memory .* of another driver"):
                sa.Buffer.from_handle(buffer.address, 4096, owner=buffer, driver=other)
            with pytest.raises(sa.InvalidValueError, match="was destroyed, is of another process"):
                sa.MemoryPool.from_handle(pool.handle, owner=pool, driver=other)
            handle = cuda.CUmemGenericAllocationHandle(memory.handle)
            with pytest.raises(NotImplementedError, match="the real driver crashes"):
                vmm.PhysicalMemory.from_handle(handle, owner=memory, driver=other)

    @pytest.mark.parametrize("number", [0, 99992])
    def test_numbers_that_are_no_handles(self, device: sa.Device, number: int) -> None:
        wrong: Any = (ValueError, sa.InvalidValueError)
        each_raises(wrong, lambda: sa.MemoryPool.from_handle(number, owner=None, driver=device.driver))
        with pytest.raises(ValueError, match=r"is in no memory|is no handle"):
            sa.Buffer.from_handle(number, 4, owner=None, driver=device.driver)
        for owner in (True, "that"):
            with pytest.raises((TypeError, ValueError)):
                sa.Buffer.from_handle("abc" if owner is True else 8, 4, owner=owner, driver=device.driver)

    def test_who_owns_is_said(self, device: sa.Device) -> None:
        with vmm.PhysicalMemory(device, PAGE, handle_types=POSIX) as memory:
            handle = cuda.CUmemGenericAllocationHandle(memory.handle)
            with pytest.raises(TypeError, match="owner is missing"):
                vmm.PhysicalMemory.from_handle(handle, driver=device.driver)
            with pytest.raises(TypeError, match="an import has its own handle"):
                vmm.PhysicalMemory.from_handle(memory.export(), owner=None, driver=device.driver)
            assert vmm.PhysicalMemory.from_handle(handle, owner=memory, driver=device.driver).nbytes == PAGE
        default = device.driver.cuDeviceGetDefaultMemPool(0)[1]
        with pytest.raises(ValueError, match="default pool"):
            sa.MemoryPool.from_handle(default, owner="this", driver=device.driver)


def _block(language: str, name: str) -> str:
    found = re.search(rf"```{language}\n((?://|#) {name}.*?)```", GUIDE.read_text(), re.S)
    assert found is not None
    return found[1]


def _compiled(folder: Path, link: bool) -> Path | None:
    """The guide's C++ program; None without a compiler or CUDA's headers. Only linking needs a driver."""
    compiler, homes = shutil.which("c++"), [*Path("/usr/local").glob("cuda*"), Path("/usr")]
    headers = next((home / "include" for home in homes if (home / "include/cuda.h").exists()), None)
    if compiler is None or headers is None:
        return None
    source, program = folder / "peer.cpp", folder / "peer"
    source.write_text(_block("cpp", "peer.cpp"))
    command = [compiler, "-Wall", "-Wextra", "-Werror", str(source), "-I", str(headers), "-o", str(program)]
    subprocess.run([*command, *(["-l:libcuda.so.1"] if link else ["-c"])], check=True)
    return program


def test_the_program_of_the_guide(tmp_path: Path, on_cuda: bool) -> None:
    """Against the C++ program on a GPU, where it compiles, and against one on raw calls of Python elsewhere."""
    (tmp_path / "exchange.py").write_text(_block("py fragment", "exchange.py"))
    compiled = _compiled(tmp_path, on_cuda)
    raw = [sys.executable, "-m", "tests.ipc.raw_peer"]
    peer = [str(compiled)] if on_cuda and compiled else raw
    ran = finished([sys.executable, tmp_path / "exchange.py", *peer], on_cuda)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "both directions\n", "")
