"""Between processes, what is the simulator's own business: ends and kills, damage, descriptors, cost."""

import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamalloc.simulator.contexts import TABLE_EVENTS
from streamalloc.simulator.scheduler import Stream
from tests.facts.enums import DEVICE, FABRIC, HOST_NUMA, POSIX_FD, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, said, value
from tests.facts.test_sharing import imported, owner_of_a_pool
from tests.processes import FABRIC_HANDLE, FD, OPAQUE_BYTES, Descriptor, Kept, Opaque, Peer, bytes_of, opaque
from tests.simulator.support import mappings, new_rig
from tests.support import bytecodes, eventually, in_a_thread

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

SHARED_EVENT = 6
CHUNK = 32 * MiB


@pytest.fixture
def other() -> Iterator[Rig]:
    """A rig on another machine of the same host, as another process has it."""
    other = new_rig()
    yield other
    other.close()


def descriptors(process: int | str = "self") -> list[str]:
    links = []
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            links.append(os.readlink(f"/proc/{process}/fd/{name}"))
        except OSError:  # the one that listed them
            continue
    return sorted(links)


def shared_pool(rig: Rig, other: Rig) -> tuple[Any, Any]:
    """A pool, and what it is to the other."""
    pool = rig.pool(UINT64_MAX, handle_types=POSIX_FD)
    return pool, value(other.import_pool(rig.exported(pool)))


def lend(peer: Peer, fd: int) -> None:
    """Let the other process have a pool as "pool"."""
    peer.value("cuMemPoolImportFromShareableHandle", Descriptor(fd), FD, 0, keep="pool")


def event_handle(rig: Rig, event: Any) -> bytes:
    return bytes_of(value(rig.raw.cuIpcGetEventHandle(event)))


def memory_handle(rig: Rig, address: Any) -> bytes:
    return bytes_of(value(rig.raw.cuIpcGetMemHandle(address)))


def pointer(rig: Rig, pool: Any, data: bytes) -> Any:
    struct = opaque(rig.raw.CUmemPoolPtrExportData(), data)
    return rig.keep(rig.raw.cuMemPoolImportPointer(pool, struct))


def allocate(rig: Rig, pool: Any, size: int, byte: int, stream: Any) -> tuple[int, bytes]:
    """An allocation full of a byte, and its data for others."""
    address = int(rig.allocate(pool, size, stream))
    value(rig.raw.cuMemsetD8Async(address, byte, size, stream))
    value(rig.raw.cuStreamSynchronize(stream))
    return address, bytes_of(value(rig.raw.cuMemPoolExportPointer(address)))


class TestPools:
    def test_growth_after_the_export(self, peer: Peer, rig: Rig) -> None:
        pool, stream = rig.pool(UINT64_MAX, handle_types=POSIX_FD), rig.stream()
        lend(peer, rig.exported(pool))
        for byte in range(1, 5):
            _, data = allocate(rig, pool, CHUNK, byte, stream)
            there = imported(peer, data)
            assert peer.rig("read", there + CHUNK - 4, 4) == [byte] * 4
        assert rig.reserved(pool) == 4 * CHUNK

    def test_takes_no_memory_of_the_importer(self, peer: Peer, rig: Rig) -> None:
        pool, free = rig.pool(UINT64_MAX, handle_types=POSIX_FD), peer.rig("device_free")
        lend(peer, rig.exported(pool))
        imported(peer, allocate(rig, pool, CHUNK, 1, rig.stream())[1])
        assert peer.rig("device_free") == free

    @pytest.mark.parametrize("how", ["end", "kill"])
    def test_the_owner_is_gone(self, another: Callable[..., Peer], rig: Rig, how: str) -> None:
        owner = another(fresh=how == "end")
        fd, data = owner_of_a_pool(owner)
        pool = value(rig.import_pool(fd))
        address = value(pointer(rig, pool, data))
        getattr(owner, how)()
        assert rig.read(address, 4) == [7] * 4
        value(rig.raw.cuMemsetD8(address, 3, MiB))
        assert rig.read(address, 4) == [3] * 4
        rig.free(address, rig.stream())
        assert int(value(rig.import_pool(fd))) == int(pool)
        assert rig.read(value(pointer(rig, pool, data)), 4) == [3] * 4
        os.close(fd)

    def test_the_importer_is_gone(self, another: Callable[..., Peer], rig: Rig) -> None:
        importer = another()
        pool, stream = rig.pool(handle_types=POSIX_FD), rig.stream()
        lend(importer, rig.exported(pool))
        address, data = allocate(rig, pool, MiB, 7, stream)
        there = imported(importer, data)
        importer.value("cuMemsetD8", there, 4, MiB)
        importer.rig("synchronize")
        importer.kill()
        assert rig.read(address, 4) == [4] * 4
        rig.free(address, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        assert rig.reserved(pool) == 0

    def test_access_of_devices_is_the_importers_own(self) -> None:
        rig, other = new_rig(devices=2), new_rig(devices=2)
        pool = rig.pool(UINT64_MAX, handle_types=POSIX_FD)
        assert rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
        imported = value(other.import_pool(rig.exported(pool)))
        assert [other.access_flags(imported, DEVICE, device) for device in (0, 1)] == [READWRITE, 0]
        assert other.grant(imported, (DEVICE, 1, READWRITE)) == "SUCCESS"
        assert other.access_flags(imported, DEVICE, 1) == READWRITE

    def test_hundreds_in_one_process(self, rig: Rig, other: Rig) -> None:
        """Kept as well as destroyed: none takes the addresses of a whole device."""
        kept, handles = [], set()
        for _ in range(600):
            pool = value(rig.create_pool(handle_types=POSIX_FD))
            fd = rig.exported(pool)
            imported = value(other.import_pool(fd))
            rig.close_fd(fd)
            assert said(rig.raw.cuMemPoolDestroy(pool)) == "SUCCESS"
            handles.add(int(imported))
            kept.append(imported)
        assert len(handles) == 600
        arenas = len(other.raw._machine.banks.arenas.at)
        for imported in kept:
            assert said(other.raw.cuMemPoolDestroy(imported)) == "SUCCESS"
            assert said(other.raw.cuMemPoolDestroy(imported)) == "INVALID_VALUE"
        assert len(other.raw._machine.banks.arenas.at) == arenas - 600

    def test_destroying_one_waits_for_what_uses_it(self, rig: Rig, other: Rig) -> None:
        stream = rig.stream()
        pool, imported = shared_pool(rig, other)
        _, data = allocate(rig, pool, MiB, 7, stream)
        there, gate, using = value(pointer(other, imported, data)), other.gate(), other.stream()
        assert said(other.raw.cuMemPoolDestroy(imported)) == "INVALID_VALUE"
        gate.hold(using)
        value(other.raw.cuMemsetD8Async(there, 9, MiB, using))
        value(other.raw.cuMemFreeAsync(there, using))
        with gate.opening_after(0.1):
            assert said(other.raw.cuMemPoolDestroy(imported)) == "SUCCESS"
            assert gate.is_open
        value(other.raw.cuStreamSynchronize(using))

    def test_keeps_no_streams_that_freed_its_memory(self, rig: Rig, other: Rig) -> None:
        pool, imported = shared_pool(rig, other)
        _, data = allocate(rig, pool, MiB, 7, rig.stream())
        counts = []
        for _ in range(3):
            stream = value(other.raw.cuStreamCreate(1))
            value(other.raw.cuMemFreeAsync(value(pointer(other, imported, data)), stream))
            for call in (other.raw.cuStreamSynchronize, other.raw.cuStreamDestroy):
                value(call(stream))
            counts.append(sum(type(one) is Stream for one in gc.get_objects()))
        assert counts[0] == counts[2]

    def test_one_that_is_large(self, rig: Rig, other: Rig) -> None:
        """Its first allocations are where they were, whatever else is imported."""
        stream = rig.stream()
        pool, imported = shared_pool(rig, other)
        _, small = allocate(rig, pool, MiB, 7, stream)
        first = value(pointer(other, imported, small))
        large = int(value(rig.raw.cuMemAllocFromPoolAsync(20 << 30, pool, stream)))
        value(rig.raw.cuMemsetD8Async(large + (20 << 30) - 4, 5, 4, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        there = value(pointer(other, imported, bytes_of(value(rig.raw.cuMemPoolExportPointer(large)))))
        assert other.read(int(there) + (20 << 30) - 4, 4) == [5] * 4
        assert other.read(first, 4) == [7] * 4
        assert int(value(pointer(other, imported, small))) == int(first)

    def test_what_is_not_modelled(self, rig: Rig, other: Rig) -> None:
        stream = rig.stream()
        pool, node = rig.pool(UINT64_MAX, handle_types=POSIX_FD), rig.pool(location=HOST_NUMA, handle_types=POSIX_FD)
        imported = value(other.import_pool(rig.exported(pool)))
        with pytest.raises(NotImplementedError, match="importing a pool of host memory"):
            other.import_pool(rig.exported(node))
        address, data = allocate(rig, pool, MiB, 1, stream)
        with pytest.raises(NotImplementedError, match="a pool that was not imported"):
            pointer(rig, pool, data)
        value(pointer(other, imported, data))
        rig.free(address, stream)
        _, larger = allocate(rig, pool, 2 * MiB, 1, stream)
        with pytest.raises(NotImplementedError, match="freed by its owner before"):
            pointer(other, imported, larger)


class TestDamage:
    def test_of_pointer_data(self, rig: Rig, other: Rig) -> None:
        pool, imported = shared_pool(rig, other)
        _, data = allocate(rig, pool, MiB, 1, rig.stream())
        for damaged in each_byte_damaged(data):
            assert said(pointer(other, imported, damaged)) == "INVALID_VALUE"
        another_pool = rig.pool(UINT64_MAX, handle_types=POSIX_FD)
        rig.exported(another_pool)
        _, foreign = allocate(rig, another_pool, MiB, 1, rig.stream())
        assert said(pointer(other, imported, foreign)) == "INVALID_VALUE"

    def test_of_event_handles(self, rig: Rig, other: Rig) -> None:
        data = event_handle(rig, rig.event(SHARED_EVENT))
        for damaged in each_byte_damaged(data):
            handle = opaque(other.raw.CUipcEventHandle(), damaged)
            assert said(other.raw.cuIpcOpenEventHandle(handle)) == "MAP_FAILED"

    def test_of_memory_handles(self, rig: Rig, other: Rig) -> None:
        data = memory_handle(rig, rig.plain(MiB))
        unread = [*range(8), *range(32, 40)]
        for byte, damaged in enumerate(each_byte_damaged(data)):
            answer = other.raw.cuIpcOpenMemHandle(opaque(other.raw.CUipcMemHandle(), damaged), 1)
            assert said(answer) == ("SUCCESS" if byte in unread else "INVALID_VALUE")

    def test_of_fabric_handles(self) -> None:
        rig, other = new_rig(fabric=True), new_rig(fabric=True)
        pool = rig.pool(handle_types=FABRIC)
        for damaged in each_byte_damaged(bytes_of(rig.exported(pool, FABRIC))):
            assert said(other.import_pool(opaque(other.raw.CUmemFabricHandle(), damaged), FABRIC)) == "INVALID_VALUE"

    @pytest.mark.parametrize("kind", ["pool", "memory"])
    def test_descriptors_of_something_else(self, rig: Rig, kind: str) -> None:
        exports = [rig.exported(rig.pool(handle_types=POSIX_FD)) for _ in range(2)]
        name = os.readlink(f"/proc/self/fd/{exports[0]}")
        name = name.removeprefix("/memfd:").removesuffix(" (deleted)").replace(":pool:", f":{kind}:")
        forged = os.memfd_create(name)  # could be cut off while it is mapped
        os.ftruncate(forged, PAGE)
        foreign = new_rig(name="another machine")
        exported = foreign.exported(foreign.pool(handle_types=POSIX_FD))
        read_only = os.open(f"/proc/self/fd/{exports[1]}", os.O_RDONLY)
        events = os.memfd_create(name.replace(f":{kind}:", ":events:"), os.MFD_ALLOW_SEALING)
        fcntl.fcntl(events, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        pipe, other_end = os.pipe()
        fds = [forged, exported, read_only, events, pipe, 999999, 1 << 40]
        for fd in fds:
            assert said(rig.import_pool(fd) if kind == "pool" else rig.import_memory(fd)) == "UNKNOWN"
        for fd in (*fds[:5], other_end):
            os.close(fd)


def each_byte_damaged(data: bytes) -> Iterator[bytes]:
    assert len(data) == OPAQUE_BYTES
    for byte in range(len(data)):
        yield bytes([*data[:byte], data[byte] ^ 0x10, *data[byte + 1 :]])


class TestEvents:
    def opened(self, rig: Rig, event: Any, other: Rig) -> Any:
        handle = opaque(other.raw.CUipcEventHandle(), event_handle(rig, event))
        return other.own(value(other.raw.cuIpcOpenEventHandle(handle)), other.raw.cuEventDestroy)

    def test_many(self, rig: Rig, other: Rig) -> None:
        """More than one table has place for."""
        stream, gate = rig.stream(), rig.gate()
        events = [rig.event(SHARED_EVENT) for _ in range(TABLE_EVENTS + 1)]
        opened = [self.opened(rig, event, other) for event in events]
        gate.hold(stream)
        for event in (events[0], events[-1]):
            value(rig.raw.cuEventRecord(event, stream))
        answers = [said(other.raw.cuEventQuery(opened[index])) for index in (0, 1, -2, -1)]
        assert answers == ["NOT_READY", "SUCCESS", "SUCCESS", "NOT_READY"]
        gate.open()

    @pytest.mark.soak
    def test_hand_over_is_quick(self, peer: Peer, rig: Rig) -> None:
        """Ping-pong: each process waits for the other's event before it records its own."""
        raw, stream, rounds = rig.raw, rig.stream(), 40
        ours, theirs = rig.event(SHARED_EVENT), rig.event(SHARED_EVENT)
        for name, event in (("ours", ours), ("theirs", theirs)):
            handle = Opaque("CUipcEventHandle", event_handle(rig, event))
            peer.value("cuIpcOpenEventHandle", handle, keep=name)
        peer.rig("stream", keep="stream")
        gate = rig.gate()
        gate.hold(stream)
        for _ in range(rounds):
            value(raw.cuEventRecord(ours, stream))
            peer.value("cuStreamWaitEvent", Kept("stream"), Kept("ours"), 0)
            peer.value("cuEventRecord", Kept("theirs"), Kept("stream"))
            value(raw.cuStreamWaitEvent(stream, theirs, 0))
        start = time.perf_counter()
        gate.open()
        value(raw.cuStreamSynchronize(stream))
        assert (time.perf_counter() - start) / (2 * rounds) < 0.002

    def test_during_a_capture(self, rig: Rig, other: Rig) -> None:
        event, stream = rig.event(SHARED_EVENT), rig.stream()
        opened = self.opened(rig, event, other)
        captured = other.stream()
        other.begin_capture(captured, 2)
        assert said(other.raw.cuEventRecord(opened, captured)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert said(other.end_capture(captured)) == "SUCCESS"
        other.begin_capture(captured, 2)
        assert said(other.raw.cuStreamWaitEvent(captured, opened, 0)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert said(other.end_capture(captured)) == "STREAM_CAPTURE_INVALIDATED"
        value(rig.raw.cuEventRecord(event, stream))

    def test_the_interpreter_ends_while_a_stream_waits(self, another: Callable[..., Peer], rig: Rig) -> None:
        event, stream, gate, waiting = rig.event(SHARED_EVENT), rig.stream(), rig.gate(), another(fresh=True)
        gate.hold(stream)
        value(rig.raw.cuEventRecord(event, stream))
        handle = Opaque("CUipcEventHandle", event_handle(rig, event))
        waiting.value("cuIpcOpenEventHandle", handle, keep="event")
        waiting.rig("stream", keep="stream")
        waiting.value("cuStreamWaitEvent", Kept("stream"), Kept("event"), 0)
        waiting.value("cuEventRecord", Kept("event"), Kept("stream"))
        assert waiting.end() == 0
        gate.open()
        # the recording that is the latest never happens, as the one who made it is gone
        assert rig.executed(stream)
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"


class TestMemory:
    def test_plain_memory_is_unmapped_with_its_context(self, rig: Rig, other: Rig) -> None:
        raw, handle = other.raw, memory_handle(rig, rig.plain(MiB))
        there = int(value(raw.cuIpcOpenMemHandle(opaque(raw.CUipcMemHandle(), handle), 1)))
        value(raw.cuDevicePrimaryCtxReset(0))
        value(raw.cuCtxSetCurrent(value(raw.cuDevicePrimaryCtxRetain(0))))
        assert said(raw.cuMemsetD8(there, 1, 1)) == "INVALID_VALUE"
        again = int(value(raw.cuIpcOpenMemHandle(opaque(raw.CUipcMemHandle(), handle), 1)))
        value(raw.cuMemsetD8(again, 1, MiB))

    def test_plain_memory_is_closed_once_work_is_done(self, rig: Rig, other: Rig) -> None:
        raw, stream, gate = other.raw, other.stream(), other.gate()
        address = int(rig.plain(MiB))
        handle = opaque(raw.CUipcMemHandle(), memory_handle(rig, address))
        there = value(raw.cuIpcOpenMemHandle(handle, 1))
        gate.hold(stream)
        value(raw.cuMemsetD8Async(there, 8, MiB, stream))
        with gate.opening_after(0.02):
            value(raw.cuIpcCloseMemHandle(there))
        value(raw.cuStreamSynchronize(stream))
        assert rig.read(address, 4) == [8] * 4


class TestFabric:
    def test_between_processes(self, another: Callable[..., Peer]) -> None:
        rig, importer = new_rig(fabric=True), another(fabric=True)
        pool, memory = rig.pool(UINT64_MAX, handle_types=FABRIC), rig.memory(PAGE, handle_types=FABRIC)
        handles = {"pool": bytes_of(rig.exported(pool, FABRIC)), "memory": bytes_of(rig.exported(memory, FABRIC))}
        _, data = allocate(rig, pool, MiB, 7, rig.stream())
        importer.rig("synchronize")  # it has started
        before = len(descriptors(importer.pid))
        for name, function, flags in (
            ("pool", "cuMemPoolImportFromShareableHandle", (0,)),
            ("memory", "cuMemImportFromShareableHandle", ()),
        ):
            assert importer.said(function, handles[name], FABRIC_HANDLE, *flags, keep=name) == "SUCCESS"
        there = imported(importer, data)
        assert importer.rig("read", there, 4) == [7] * 4
        assert len(descriptors(importer.pid)) == before + 1  # of the memory
        free = rig.device_free()
        rig.release(memory)
        assert rig.device_free() == free
        importer.kill()
        assert rig.device_free() == free + PAGE

    def test_without_a_channel(self) -> None:
        with_channel, without = new_rig(fabric=True, name="one"), new_rig(name="one")
        handle = with_channel.exported(with_channel.pool(handle_types=FABRIC), FABRIC)
        assert said(without.export(without.pool(handle_types=FABRIC), FABRIC)) == "NOT_PERMITTED"
        assert said(without.import_pool(handle, FABRIC)) == "NOT_PERMITTED"
        with pytest.raises(NotImplementedError, match="the real driver crashes"):
            with_channel.raw.cuMemPoolImportFromShareableHandle(5, with_channel.handle_type(FABRIC), 0)


class TestWhatIsLeft:
    def one_round(self, rig: Rig, peer: Peer) -> None:
        """Share one of everything, once."""
        raw, stream = rig.raw, rig.stream()
        pool, event = rig.pool(UINT64_MAX, handle_types=POSIX_FD), rig.event(SHARED_EVENT)
        lend(peer, rig.exported(pool))
        address, data = allocate(rig, pool, MiB, 1, stream)
        there = imported(peer, data)
        peer.value("cuMemFree", there)
        handle = Opaque("CUipcEventHandle", event_handle(rig, event))
        peer.value("cuIpcOpenEventHandle", handle, keep="event")
        peer.value("cuEventSynchronize", Kept("event"))
        peer.value("cuEventDestroy", Kept("event"))
        handle = Opaque("CUipcMemHandle", memory_handle(rig, rig.plain(MiB)))
        peer.value("cuIpcCloseMemHandle", peer.value("cuIpcOpenMemHandle", handle, 1))
        memory = rig.memory(PAGE, handle_types=POSIX_FD)
        peer.value("cuMemImportFromShareableHandle", Descriptor(rig.exported(memory)), FD, keep="memory")
        rig.free(address, stream)
        value(raw.cuStreamSynchronize(stream))
        rig.close()
        rig.__init__(raw)  # type: ignore[misc]
        peer.reset()

    def test_no_descriptors_and_no_files(self, peer: Peer, rig: Rig) -> None:
        files = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")}
        self.one_round(rig, peer)
        gc.collect()
        mine, theirs = descriptors(), descriptors(peer.pid)
        for _ in range(20):
            self.one_round(rig, peer)
        assert len(descriptors()) <= len(mine)  # machines of other tests may close late
        assert len(descriptors(peer.pid)) == len(theirs)
        for folder, names in files.items():
            made = set(os.listdir(folder)) - names
            # folders of testing.children are of programs that run beside this one
            assert not [name for name in made if "streamalloc" in name and not name.startswith("streamalloc-")]

    def test_nothing_of_a_machine_that_is_forgotten(self) -> None:
        def use() -> None:
            one, two = new_rig(), new_rig()
            pool = one.pool(UINT64_MAX, handle_types=POSIX_FD)
            fd = one.exported(pool)
            _, data = allocate(one, pool, MiB, 1, one.stream())
            value(pointer(two, value(two.import_pool(fd)), data))
            event = opaque(two.raw.CUipcEventHandle(), event_handle(one, one.event(SHARED_EVENT)))
            value(two.raw.cuIpcOpenEventHandle(event))
            memory = one.memory(PAGE, handle_types=POSIX_FD)
            lent = one.exported(memory)
            two.imported(lent)
            one.release(memory)
            handle = memory_handle(one, one.plain(MiB))
            value(two.raw.cuIpcOpenMemHandle(opaque(two.raw.CUipcMemHandle(), handle), 1))
            os.close(fd)
            os.close(lent)

        gc.collect()
        before = len(descriptors()), mappings()
        for _ in range(20):
            use()
        gc.collect()
        # A machine with work in progress closes once that is done, and those of other tests may close late.
        assert eventually(lambda: len(descriptors()) <= before[0] and mappings() <= before[1])


@in_a_thread
def test_a_pointer_is_shared_at_little_cost(rig: Rig, other: Rig) -> None:
    value(rig.raw.cuCtxSetCurrent(rig.context))
    stream = rig.stream()
    pool, imported = shared_pool(rig, other)
    addresses = [rig.allocate(pool, 4096, stream) for _ in range(1000)]

    def share(address: int) -> None:
        data = rig.raw.cuMemPoolExportPointer(address)[1]
        assert said(other.raw.cuMemPoolImportPointer(imported, data)) == "SUCCESS"

    for address in addresses[:-1]:
        share(int(address))
    assert bytecodes(lambda: share(int(addresses[-1]))) < 3_000
