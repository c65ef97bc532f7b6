"""Pools, allocations, plain memory, physical memory and events of one process, used in another.

Readings from two processes on one H200. ``peer`` is the other process.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.facts.enums import DEVICE, FABRIC, HOST_NUMA, POSIX_FD, READWRITE, UNTIMED
from tests.facts.support import COUNTERS, PAGE, REUSE_POLICIES, UINT64_MAX, MiB, Rig, said, value
from tests.processes import FD, OPAQUE_BYTES, Descriptor, Kept, Member, Opaque, Peer, bytes_of, opaque
from tests.support import eventually

INTERPROCESS = 4
LAZY_ENABLE_PEER_ACCESS = 1


# What was read is what the call answered; afterwards such a process aborts or crashes.
CORRUPTS = "a refused export of a pool as a fabric handle damages the heap of the process, with bindings 13.3"


class SharedPool:
    """A pool of this process that can be exported, its allocations, and what they are to others."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pool = rig.pool(UINT64_MAX, handle_types=POSIX_FD)
        self.stream = rig.stream()
        self.fd = rig.exported(self.pool)

    def allocate(self, size: int, byte: int = 7) -> int:
        """An allocation full of a byte, ready for use."""
        address = int(self.rig.allocate(self.pool, size, self.stream))
        self.fill(address, byte, size)
        return address

    def fill(self, address: int, byte: int, size: int) -> None:
        value(self.rig.raw.cuMemsetD8Async(address, byte, size, self.stream))
        value(self.rig.raw.cuStreamSynchronize(self.stream))

    def free(self, address: int) -> None:
        self.rig.free(address, self.stream)
        value(self.rig.raw.cuStreamSynchronize(self.stream))

    def data(self, address: int) -> bytes:
        return bytes_of(value(self.rig.raw.cuMemPoolExportPointer(address)))


@pytest.fixture
def shared(rig: Rig) -> SharedPool:
    return SharedPool(rig)


@pytest.fixture
def importer(peer: Peer, shared: SharedPool) -> Peer:
    """The other process, where the shared pool was imported as "pool", and which has a "stream"."""
    assert import_pool(peer, shared.fd) == "SUCCESS"
    peer.rig("stream", keep="stream")
    return peer


def hold(peer: Peer) -> None:
    """Hold the other process's stream at a "gate"."""
    peer.rig("gate", keep="gate")
    peer.tell("gate", "hold", Kept("stream"))


def import_pool(peer: Peer, fd: int) -> str:
    return peer.said("cuMemPoolImportFromShareableHandle", Descriptor(fd), FD, 0, keep="pool")


def pointer_data(data: bytes) -> Opaque:
    return Opaque("CUmemPoolPtrExportData", data)


def import_pointer(peer: Peer, data: bytes) -> str:
    return peer.said("cuMemPoolImportPointer", Kept("pool"), pointer_data(data), keep="pointer")


def imported(peer: Peer, data: bytes) -> int:
    return int(peer.value("cuMemPoolImportPointer", Kept("pool"), pointer_data(data), keep="pointer"))


def owner_of_a_pool(process: Peer) -> tuple[int, bytes]:
    """Let the other process share a pool with an allocation of sevens: the descriptor and the pointer's data."""
    process.rig("pool", UINT64_MAX, handle_types=POSIX_FD, keep="pool")
    process.rig("stream", keep="stream")
    process.value("cuMemAllocFromPoolAsync", MiB, Kept("pool"), Kept("stream"), keep="memory")
    process.value("cuMemsetD8Async", Kept("memory"), 7, MiB, Kept("stream"))
    process.value("cuStreamSynchronize", Kept("stream"))
    fd = process.fetch(process.value("cuMemPoolExportToShareableHandle", Kept("pool"), FD, 0))
    return fd, process.value("cuMemPoolExportPointer", Kept("memory"))


def is_the_same(peer: Peer, there: int, rig: Rig, here: int, size: int, byte: int) -> None:
    """Each process sees what the other one writes."""
    for offset in (0, size - 4):
        assert peer.rig("read", there + offset, 4) == [byte] * 4
    assert peer.said("cuMemsetD8", there, 5, size) == "SUCCESS"
    peer.rig("synchronize")
    assert rig.read(here, 4) == [5] * 4


# Of a pool of these properties, or of the default pool.
EXPORTS: dict[str, tuple[str, dict[str, Any] | None, int, int]] = {
    "flags": ("INVALID_VALUE", {"handle_types": POSIX_FD}, POSIX_FD, 1),
    "of another type": ("INVALID_VALUE", {"handle_types": POSIX_FD}, FABRIC, 0),
    "not made for it": ("INVALID_VALUE", {}, POSIX_FD, 0),
    "the default pool": ("INVALID_VALUE", None, POSIX_FD, 0),
    "of a host node": ("SUCCESS", {"location": HOST_NUMA, "handle_types": POSIX_FD}, POSIX_FD, 0),
    # there is no IMEX channel, which making such a pool does not need
    "fabric": ("NOT_PERMITTED", {"handle_types": FABRIC}, FABRIC, 0),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.simulated_only(CORRUPTS)] if EXPORTS[name][2] == FABRIC else [])
        for name in EXPORTS
    ],
)
def test_export_of_a_pool(rig: Rig, name: str) -> None:
    expected, properties, handle_type, flags = EXPORTS[name]
    pool = value(rig.raw.cuDeviceGetDefaultMemPool(0)) if properties is None else rig.pool(**properties)
    assert said(rig.export(pool, handle_type, flags)) == expected


def test_descriptor_is_inherited(shared: SharedPool) -> None:
    """Unlike that of physical memory."""
    assert os.get_inheritable(shared.fd)


class TestImportOfAPool:
    def test_twice(self, importer: Peer, shared: SharedPool) -> None:
        first = importer.value("cuMemPoolImportFromShareableHandle", Descriptor(shared.fd), FD, 0)
        assert first == importer.value("cuMemPoolImportFromShareableHandle", Descriptor(shared.fd), FD, 0)

    def test_is_used_for_imports_alone(self, importer: Peer, rig: Rig) -> None:
        names = [*REUSE_POLICIES, "RELEASE_THRESHOLD", *COUNTERS]
        members = [Member("CUmemPool_attribute", int(rig.pool_attribute(name))) for name in names]
        calls: list[tuple[Any, ...]] = [("cuMemPoolGetAttribute", Kept("pool"), member) for member in members]
        calls += [
            ("cuMemPoolSetAttribute", Kept("pool"), members[0], 1),
            ("cuMemPoolTrimTo", Kept("pool"), 0),
            ("cuMemPoolExportToShareableHandle", Kept("pool"), FD, 0),
            ("cuMemAllocFromPoolAsync", 4, Kept("pool"), Kept("stream")),
            ("cuDeviceSetMemPool", 0, Kept("pool")),
        ]
        assert [importer.said(*one) for one in calls] == ["INVALID_VALUE"] * len(calls)

    def test_access_of_its_device(self, importer: Peer) -> None:
        assert importer.rig("access_flags", Kept("pool"), DEVICE, 0) == READWRITE
        assert importer.rig("grant", Kept("pool"), (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert importer.rig("access_flags", Kept("pool"), DEVICE, 0) == READWRITE

    def test_is_not_destroyed_while_it_has_imports(self, importer: Peer, shared: SharedPool) -> None:
        data = shared.data(shared.allocate(MiB))
        imported(importer, data)
        assert importer.said("cuMemPoolDestroy", Kept("pool")) == "INVALID_VALUE"
        assert importer.rig("read", Kept("pointer"), 4) == [7] * 4

    def test_is_destroyed_when_it_has_none(self, importer: Peer, shared: SharedPool) -> None:
        """And imported again; without any import, and when one was freed. It fails after 466 that are all kept."""
        data = shared.data(shared.allocate(MiB))
        assert importer.said("cuMemPoolDestroy", Kept("pool")) == "SUCCESS"
        for _ in range(2):
            assert import_pool(importer, shared.fd) == "SUCCESS"
            imported(importer, data)
            assert importer.rig("read", Kept("pointer"), 4) == [7] * 4
            assert importer.said("cuMemFreeAsync", Kept("pointer"), Kept("stream")) == "SUCCESS"
            importer.rig("synchronize")
            assert importer.said("cuMemPoolDestroy", Kept("pool")) == "SUCCESS"

    def test_is_destroyed_without_waiting_for_a_stream(self, importer: Peer) -> None:
        hold(importer)
        assert importer.said("cuMemPoolDestroy", Kept("pool")) == "SUCCESS"
        importer.tell("gate", "open")

    def test_in_the_process_that_exports_it(self, rig: Rig, shared: SharedPool) -> None:
        raw, address = rig.raw, shared.allocate(MiB)
        pool = value(rig.import_pool(shared.fd))
        assert said(raw.cuMemAllocFromPoolAsync(4, pool, shared.stream)) == "INVALID_VALUE"
        assert said(raw.cuDeviceSetMemPool(0, pool)) == "INVALID_VALUE"
        data = value(raw.cuMemPoolExportPointer(address))
        assert said(rig.keep(raw.cuMemPoolImportPointer(pool, data))) == "SUCCESS"

    def test_of_something_else(self, rig: Rig) -> None:
        fd = rig.exported(rig.memory(handle_types=POSIX_FD))
        assert [said(rig.import_pool(one)) for one in (999999, fd)] == ["UNKNOWN", "NOT_SUPPORTED"]


class TestExportOfAPointer:
    def test_is_64_bytes_that_stay_the_same(self, shared: SharedPool) -> None:
        address = shared.allocate(MiB)
        assert len(shared.data(address)) == OPAQUE_BYTES
        assert shared.data(address) == shared.data(address)

    def test_of_no_allocation_of_such_a_pool(self, rig: Rig, shared: SharedPool) -> None:
        kept, freed, other = shared.allocate(MiB), shared.allocate(MiB), rig.allocate(rig.pool(), MiB, rig.stream())
        rig.free(freed, shared.stream)
        for address in (kept + 512, freed, other):
            assert said(rig.raw.cuMemPoolExportPointer(address)) == "INVALID_VALUE"

    def test_before_its_pool_was_exported(self, rig: Rig) -> None:
        pool, stream, raw = rig.pool(handle_types=POSIX_FD), rig.stream(), rig.raw
        address = rig.allocate(pool, MiB, stream)
        assert said(raw.cuMemPoolExportPointer(address)) == "INVALID_VALUE"
        rig.exported(pool)
        assert said(raw.cuMemPoolExportPointer(address)) == "SUCCESS"

    def test_imported(self, importer: Peer, shared: SharedPool) -> None:
        imported(importer, shared.data(shared.allocate(MiB)))
        assert importer.said("cuMemPoolExportPointer", Kept("pointer")) == "INVALID_VALUE"


class TestImportOfAPointer:
    def test_is_the_same_memory(self, importer: Peer, rig: Rig, shared: SharedPool) -> None:
        address = shared.allocate(4 * MiB)
        is_the_same(importer, imported(importer, shared.data(address)), rig, address, 4 * MiB, 7)

    def test_lies_as_in_the_pool(self, importer: Peer, shared: SharedPool) -> None:
        first, second = shared.allocate(4 * MiB), shared.allocate(1000)
        distance = imported(importer, shared.data(second)) - imported(importer, shared.data(first))
        assert distance == second - first

    def test_address_range(self, importer: Peer, shared: SharedPool) -> None:
        address = imported(importer, shared.data(shared.allocate(4 * MiB)))
        assert importer.value("cuMemGetAddressRange", address + 5) == [address, 4 * MiB]

    def test_attributes(self, importer: Peer, shared: SharedPool, rig: Rig) -> None:
        pool = importer.value("cuMemPoolImportFromShareableHandle", Descriptor(shared.fd), FD, 0)
        address = imported(importer, shared.data(shared.allocate(4 * MiB)))
        expected = {"MEMORY_TYPE": 2, "RANGE_SIZE": 4 * MiB, "ALLOWED_HANDLE_TYPES": 0, "DEVICE_ORDINAL": 0}
        expected |= {"DEVICE_POINTER": address, "CONTEXT": 0, "ACCESS_FLAGS": 3, "MEMPOOL_HANDLE": pool}
        assert importer.rig("pointer_attributes", address, list(expected)) == expected

    def test_twice_is_not_counted(self, importer: Peer, shared: SharedPool) -> None:
        data = shared.data(shared.allocate(MiB))
        assert imported(importer, data) == imported(importer, data)
        frees = [importer.said("cuMemFreeAsync", Kept("pointer"), Kept("stream")) for _ in range(2)]
        assert frees == ["SUCCESS", "INVALID_VALUE"]

    @pytest.mark.parametrize("function", ["cuMemFree", "cuMemFreeAsync"])
    def test_again_after_its_free(self, importer: Peer, shared: SharedPool, function: str) -> None:
        data = shared.data(shared.allocate(MiB))
        address = imported(importer, data)
        stream = () if function == "cuMemFree" else (Kept("stream"),)
        assert importer.said(function, address, *stream) == "SUCCESS"
        assert importer.said("cuMemsetD8", address, 1, 4) == "INVALID_VALUE"
        assert imported(importer, data) == address
        assert importer.rig("read", address, 4) == [7] * 4

    def test_while_its_free_is_pending(self, importer: Peer, shared: SharedPool) -> None:
        data = shared.data(shared.allocate(MiB))
        imported(importer, data)
        hold(importer)
        assert importer.said("cuMemFreeAsync", Kept("pointer"), Kept("stream")) == "SUCCESS"
        assert import_pointer(importer, data) == "SUCCESS"

    def test_lets_the_owner_use_the_memory_again(self, importer: Peer, rig: Rig, shared: SharedPool) -> None:
        address = shared.allocate(MiB)
        imported(importer, shared.data(address))
        shared.free(address)
        assert int(rig.allocate(shared.pool, MiB, shared.stream)) == address

    def test_of_freed_memory(self, importer: Peer, shared: SharedPool) -> None:
        address = shared.allocate(MiB)
        data = shared.data(address)
        shared.free(address)
        assert import_pointer(importer, data) == "SUCCESS"

    def test_of_damaged_data(self, importer: Peer, shared: SharedPool) -> None:
        data = bytearray(shared.data(shared.allocate(MiB)))
        for byte, bits in ((0, 1), (8, 0x80)):
            damaged = bytearray(data)
            damaged[byte] ^= bits
            assert import_pointer(importer, bytes(damaged)) == "INVALID_VALUE"
        assert import_pointer(importer, bytes(OPAQUE_BYTES)) == "INVALID_VALUE"

    def test_outlives_the_pool(self, another: Callable[..., Peer], rig: Rig) -> None:
        # The owner is a process of its own: hardware was seen to crash some time after a pool in use was destroyed.
        raw, owner = rig.raw, another()
        fd, data = owner_of_a_pool(owner)
        pool = value(rig.import_pool(fd))
        os.close(fd)
        struct = opaque(raw.CUmemPoolPtrExportData(), data)
        address = value(rig.keep(raw.cuMemPoolImportPointer(pool, struct)))
        assert owner.said("cuMemPoolDestroy", Kept("pool")) == "SUCCESS"
        assert rig.read(address, 4) == [7] * 4


class TestPhysicalMemory:
    """Memory of cuMemCreate; test_physical_memory has the facts of a single process."""

    @pytest.fixture
    def fd(self, rig: Rig) -> Iterator[int]:
        """A descriptor of memory that is full of nines."""
        raw = rig.raw
        memory = rig.memory(PAGE, handle_types=POSIX_FD)
        self.here = rig.map(rig.reserve(PAGE), memory)
        assert rig.set_access(self.here, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        value(raw.cuMemsetD8(self.here, 9, PAGE))
        value(raw.cuCtxSynchronize())
        fd = rig.exported(memory)
        rig.release(memory)
        yield fd
        rig.close_fd(fd)

    def import_memory(self, peer: Peer, fd: int, keep: str = "memory") -> int:
        return int(peer.value("cuMemImportFromShareableHandle", Descriptor(fd), FD, keep=keep))

    def map(self, peer: Peer) -> int:
        there = int(peer.rig("reserve", PAGE))
        assert peer.said("cuMemMap", there, PAGE, 0, Kept("memory"), 0) == "SUCCESS"
        assert peer.rig("set_access", there, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        return there

    def test_imports(self, peer: Peer, fd: int) -> None:
        free = peer.rig("device_free")
        assert self.import_memory(peer, fd) != self.import_memory(peer, fd, "again")
        assert peer.rig("device_free") == free
        assert peer.said("cuMemExportToShareableHandle", Kept("memory"), FD, 0) == "INVALID_VALUE"

    def test_is_the_same_memory(self, peer: Peer, rig: Rig, fd: int) -> None:
        self.import_memory(peer, fd)
        is_the_same(peer, self.map(peer), rig, self.here, PAGE, 9)

    def test_outlives_what_its_owner_has_of_it(self, peer: Peer, rig: Rig, fd: int) -> None:
        self.import_memory(peer, fd)
        there = self.map(peer)
        value(rig.raw.cuMemUnmap(self.here, PAGE))
        assert peer.rig("read", there, 4) == [9] * 4


class TestPlainMemory:
    """cuIpc*MemHandle."""

    def handle(self, rig: Rig, address: Any) -> bytes:
        return bytes_of(value(rig.raw.cuIpcGetMemHandle(address)))

    def memory(self, rig: Rig, size: int = 4 * MiB, byte: int = 9) -> int:
        address = int(rig.plain(size))
        value(rig.raw.cuMemsetD8(address, byte, size))
        value(rig.raw.cuCtxSynchronize())
        return address

    def open(self, peer: Peer, data: bytes, flags: int = LAZY_ENABLE_PEER_ACCESS) -> str:
        return peer.said("cuIpcOpenMemHandle", Opaque("CUipcMemHandle", data), flags)

    def opened(self, peer: Peer, data: bytes) -> int:
        return int(peer.value("cuIpcOpenMemHandle", Opaque("CUipcMemHandle", data), LAZY_ENABLE_PEER_ACCESS))

    def test_handle_is_of_the_allocation(self, rig: Rig) -> None:
        address = self.memory(rig)
        assert self.handle(rig, address) == self.handle(rig, address) == self.handle(rig, address + 4096)

    def test_no_handle_of_other_memory(self, rig: Rig) -> None:
        pooled = rig.allocate(rig.pool(), MiB, rig.stream())
        for address in (0, int(rig.pinned(4096)), pooled, rig.mapping(PAGE)):
            assert said(rig.raw.cuIpcGetMemHandle(address)) == "INVALID_VALUE"

    def test_opened_and_closed_by_its_owner(self, rig: Rig) -> None:
        address = self.memory(rig)
        handle = value(rig.raw.cuIpcGetMemHandle(address))
        answers = [said(rig.raw.cuIpcOpenMemHandle(handle, flags)) for flags in (1, 0)]
        assert answers == ["INVALID_CONTEXT", "INVALID_VALUE"]
        assert said(rig.raw.cuIpcCloseMemHandle(address)) == "INVALID_VALUE"

    def test_is_the_same_memory(self, peer: Peer, rig: Rig) -> None:
        address = self.memory(rig)
        is_the_same(peer, self.opened(peer, self.handle(rig, address)), rig, address, 4 * MiB, 9)

    def test_opening_is_counted(self, peer: Peer, rig: Rig) -> None:
        data = self.handle(rig, self.memory(rig))
        there = self.opened(peer, data)
        assert self.opened(peer, data) == there
        assert peer.said("cuIpcCloseMemHandle", there + 4096) == "INVALID_VALUE"
        assert peer.said("cuIpcCloseMemHandle", there) == "SUCCESS"
        assert peer.rig("read", there, 4) == [9] * 4
        assert peer.said("cuIpcCloseMemHandle", there) == "SUCCESS"
        assert peer.said("cuMemsetD8", there, 1, 4) == "INVALID_VALUE"
        assert peer.said("cuIpcCloseMemHandle", there) == "INVALID_VALUE"

    def test_is_neither_freed_nor_passed_on(self, peer: Peer, rig: Rig) -> None:
        there = self.opened(peer, self.handle(rig, self.memory(rig)))
        assert peer.said("cuMemFree", there) == "INVALID_VALUE"
        assert peer.said("cuIpcGetMemHandle", there) == "INVALID_VALUE"

    def test_attributes(self, peer: Peer, rig: Rig) -> None:
        there = self.opened(peer, self.handle(rig, self.memory(rig)))
        assert peer.value("cuMemGetAddressRange", there + 5) == [there, 4 * MiB]
        expected = {"MEMORY_TYPE": 2, "IS_LEGACY_CUDA_IPC_CAPABLE": 0, "DEVICE_ORDINAL": 0, "RANGE_SIZE": 4 * MiB}
        assert peer.rig("pointer_attributes", there, list(expected)) == expected

    @pytest.mark.gpus(2)
    def test_opened_where_another_device_is_current(self, rig: Rig, on_cuda: bool) -> None:
        """It is of the device and the context that are current, and that device's work can use it."""
        address = self.memory(rig)
        peer = Peer(on_cuda, devices=value(rig.raw.cuDeviceGetCount()))
        try:
            peer.rig("device_context", 1, keep="second")
            there = self.opened(peer, self.handle(rig, address))
            # libcuda was asked for the ordinal: bindings 13.3 read 0
            known = {"DEVICE_ORDINAL": 1} if not on_cuda else {}
            expected = known | {"MEMORY_TYPE": 2, "RANGE_SIZE": 4 * MiB, "CONTEXT": peer.value("cuCtxGetCurrent")}
            assert peer.rig("pointer_attributes", there, list(expected)) == expected
            assert peer.said("cuMemsetD8", there, 5, 4 * MiB) == peer.said("cuCtxSynchronize") == "SUCCESS"
            assert rig.read(address, 4) == [5] * 4
            assert peer.said("cuIpcCloseMemHandle", there) == "SUCCESS"
        finally:
            peer.close()

    def test_two_that_share_a_block(self, peer: Peer, rig: Rig) -> None:
        one, two = self.memory(rig, 1000, 1), self.memory(rig, 1000, 2)
        there, there_too = self.opened(peer, self.handle(rig, one)), self.opened(peer, self.handle(rig, two))
        assert there_too - there == two - one
        assert there % PAGE == one % PAGE
        assert peer.value("cuMemGetAddressRange", there) == [there, 1000]
        assert (peer.rig("read", there, 4), peer.rig("read", there_too, 4)) == ([1] * 4, [2] * 4)

    def test_of_garbage(self, peer: Peer, rig: Rig) -> None:
        for byte in (b"\x55", b"\0"):
            assert self.open(peer, byte * OPAQUE_BYTES) == "INVALID_VALUE"
        assert self.open(peer, self.handle(rig, self.memory(rig)), flags=0) == "INVALID_VALUE"

    def test_bytes_that_are_not_looked_at(self, peer: Peer, rig: Rig) -> None:
        data = self.handle(rig, self.memory(rig))
        there = self.opened(peer, data)
        for byte, bits in ((0, 1), (32, 0xFF)):
            other = bytearray(data)
            other[byte] ^= bits
            assert self.opened(peer, bytes(other)) == there

    def test_freed_while_it_is_open(self, peer: Peer, rig: Rig) -> None:
        address = self.memory(rig)
        data = self.handle(rig, address)
        there = self.opened(peer, data)
        assert said(rig.raw.cuMemFree(rig.disown(address))) == "SUCCESS"
        assert self.opened(peer, data) == there

    @pytest.mark.parametrize("was_open", [False, True])
    def test_of_freed_memory(self, peer: Peer, rig: Rig, was_open: bool) -> None:
        """Unlike a pool's."""
        address = self.memory(rig)
        data = self.handle(rig, address)
        if was_open:
            assert peer.said("cuIpcCloseMemHandle", self.opened(peer, data)) == "SUCCESS"
        assert said(rig.raw.cuMemFree(rig.disown(address))) == "SUCCESS"
        assert self.open(peer, data) == "INVALID_VALUE"

    def test_of_freed_memory_in_a_block_that_is_open(self, peer: Peer, rig: Rig) -> None:
        address, other = self.memory(rig, 1000), self.memory(rig, 1000, 2)
        data = self.handle(rig, address)
        there = self.opened(peer, self.handle(rig, other))
        assert said(rig.raw.cuMemFree(rig.disown(address))) == "SUCCESS"
        assert self.open(peer, data) == "SUCCESS"
        assert peer.rig("read", there, 4) == [2] * 4

    @pytest.mark.parametrize("how", ["kill", "end"])
    def test_of_a_process_that_is_gone(self, peer: Peer, another: Callable[..., Peer], how: str) -> None:
        owner = another(fresh=how == "end")
        data = owner.value("cuIpcGetMemHandle", owner.value("cuMemAlloc", 4 * MiB))
        getattr(owner, how)()
        assert self.open(peer, data) == "INVALID_HANDLE"


class TestEvents:
    @pytest.fixture
    def event(self, rig: Rig) -> Any:
        return rig.event(UNTIMED | INTERPROCESS)

    @pytest.fixture
    def opener(self, peer: Peer, rig: Rig, event: Any) -> Peer:
        """The other process, where the event was opened as "event", and which has a "stream"."""
        peer.value("cuIpcOpenEventHandle", self.handle(rig, event), keep="event")
        peer.rig("stream", keep="stream")
        return peer

    @staticmethod
    def handle(rig: Rig, event: Any) -> Opaque:
        return Opaque("CUipcEventHandle", bytes_of(value(rig.raw.cuIpcGetEventHandle(event))))

    @staticmethod
    def query(peer: Peer) -> str:
        return peer.said("cuEventQuery", Kept("event"))

    @staticmethod
    def wait(peer: Peer) -> str:
        return peer.said("cuStreamWaitEvent", Kept("stream"), Kept("event"), 0)

    @staticmethod
    def executed(peer: Peer) -> bool:
        return bool(peer.rig("executed", Kept("stream")))

    @staticmethod
    def held(peer: Peer) -> bool:
        return bool(peer.rig("held", Kept("stream")))

    def test_handles(self, rig: Rig, event: Any) -> None:
        assert self.handle(rig, event) == self.handle(rig, event)
        assert said(rig.raw.cuIpcGetEventHandle(rig.event(UNTIMED))) == "INVALID_HANDLE"
        handle = value(rig.raw.cuIpcGetEventHandle(event))
        assert said(rig.raw.cuIpcOpenEventHandle(handle)) == "INVALID_CONTEXT"

    def test_opened_twice(self, opener: Peer, rig: Rig, event: Any) -> None:
        assert self.query(opener) == "SUCCESS"
        first = opener.value("cuIpcOpenEventHandle", self.handle(rig, event))
        assert opener.value("cuIpcOpenEventHandle", self.handle(rig, event)) != first

    def test_has_no_handle_there_and_no_time(self, opener: Peer) -> None:
        assert opener.said("cuIpcGetEventHandle", Kept("event")) == "INVALID_HANDLE"
        assert opener.said("cuEventRecord", Kept("event"), Kept("stream")) == "SUCCESS"
        assert opener.said("cuEventElapsedTime", Kept("event"), Kept("event")) == "INVALID_HANDLE"

    def test_of_garbage(self, peer: Peer) -> None:
        for byte in (b"\x55", b"\0"):
            handle = Opaque("CUipcEventHandle", byte * OPAQUE_BYTES)
            assert peer.said("cuIpcOpenEventHandle", handle) == "MAP_FAILED"

    def test_of_a_process_that_has_ended(self, rig: Rig, on_cuda: bool) -> None:
        with Peer(on_cuda) as peer:
            peer.rig("event", UNTIMED | INTERPROCESS, keep="event")
            handle = opaque(rig.raw.CUipcEventHandle(), peer.value("cuIpcGetEventHandle", Kept("event")))
            peer.kill()
        if on_cuda:
            event = rig.own(value(rig.raw.cuIpcOpenEventHandle(handle)), rig.raw.cuEventDestroy)
            assert said(rig.raw.cuEventQuery(event)) == "SUCCESS"
        else:
            with pytest.raises(NotImplementedError, match="has ended"):
                rig.raw.cuIpcOpenEventHandle(handle)

    @pytest.mark.parametrize("destroyed", [False, True])
    def test_holds_a_stream_of_the_other_process(self, opener: Peer, rig: Rig, event: Any, destroyed: bool) -> None:
        stream, gate = rig.stream(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuEventRecord(event, stream))
        assert self.query(opener) == "NOT_READY"
        assert self.wait(opener) == "SUCCESS"
        if destroyed:
            assert said(rig.raw.cuEventDestroy(rig.disown(event))) == "SUCCESS"
        assert self.held(opener)
        gate.open()
        assert self.executed(opener)
        assert self.query(opener) == "SUCCESS"
        assert destroyed or opener.said("cuEventSynchronize", Kept("event")) == "SUCCESS"

    def test_recorded_there_behind_a_gate(self, opener: Peer, rig: Rig, event: Any) -> None:
        hold(opener)
        opener.value("cuEventRecord", Kept("event"), Kept("stream"))
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
        stream = rig.stream()
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 0)) == "SUCCESS"
        assert rig.held(stream)
        opener.tell("gate", "open")
        assert rig.executed(stream)
        assert said(rig.raw.cuEventQuery(event)) == "SUCCESS"

    def test_a_wait_is_for_the_recording_that_was_there(self, opener: Peer, rig: Rig, event: Any) -> None:
        first, second, gate, later = rig.stream(), rig.stream(), rig.gate(), rig.gate()
        gate.hold(first)
        value(rig.raw.cuEventRecord(event, first))
        assert self.wait(opener) == "SUCCESS"
        later.hold(second)
        value(rig.raw.cuEventRecord(event, second))
        gate.open()
        assert self.executed(opener)
        assert self.query(opener) == "NOT_READY"
        later.open()
        assert eventually(lambda: self.query(opener) == "SUCCESS")

    def test_destroyed_by_both(self, opener: Peer, rig: Rig, event: Any) -> None:
        handle = self.handle(rig, event)
        assert opener.said("cuEventDestroy", Kept("event")) == "SUCCESS"
        assert said(rig.raw.cuEventDestroy(rig.disown(event))) == "SUCCESS"
        assert opener.said("cuIpcOpenEventHandle", handle) == "SUCCESS"

    def test_of_a_process_that_is_killed(self, another: Callable[..., Peer]) -> None:
        # Whoever waits waits for ever, so that is a process of its own, too.
        owner, waiting = another(), another()
        owner.rig("event", UNTIMED | INTERPROCESS, keep="event")
        owner.rig("stream", keep="stream")
        hold(owner)
        owner.value("cuEventRecord", Kept("event"), Kept("stream"))
        handle = Opaque("CUipcEventHandle", owner.value("cuIpcGetEventHandle", Kept("event")))
        waiting.value("cuIpcOpenEventHandle", handle, keep="event")
        waiting.rig("stream", keep="stream")
        assert self.wait(waiting) == "SUCCESS"
        owner.kill()
        time.sleep(0.1)
        assert self.held(waiting)
        assert self.query(waiting) == "NOT_READY"
