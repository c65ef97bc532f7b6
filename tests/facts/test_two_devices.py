"""Two devices of one host: peer access, pools and mappings, copies between them, and which of them a process sees."""

import ctypes
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from streamalloc import testing
from streamalloc.driver import simulated
from streamalloc.driver.bindings import opaque_bytes
from tests.facts.enums import BLOCKING, DEVICE, HOST, LEGACY, NO_ACCESS, POSIX_FD, READ, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, Stats, said, value
from tests.facts.support import value as ok
from tests.facts.teams import Contexts
from tests.processes import FD, Descriptor, Kept, Member, Opaque, Peer, bytes_of, finished, python

pytestmark = pytest.mark.gpus(2)


class Pair(Contexts):
    def fill(self, pointer: Any, device: int) -> str:
        """The result of a fill on the device's stream."""
        result = said(self.raw.cuMemsetD8Async(pointer, 1, 64, self.streams[device]))
        value(self.raw.cuStreamSynchronize(self.streams[device]))
        return result

    def copy(self, target: Any, source: Any, device: int) -> str:
        """The result of a copy on the device's stream."""
        result = said(self.raw.cuMemcpyDtoDAsync(target, source, 64, self.streams[device]))
        value(self.raw.cuStreamSynchronize(self.streams[device]))
        return result


@pytest.fixture
def pair(rig: Rig) -> Pair:
    return Pair(rig)


@pytest.fixture
def pool(pair: Pair) -> Any:
    """A pool of device 0."""
    return pair.rig.pool(UINT64_MAX)


@pytest.fixture
def pooled(pair: Pair, pool: Any) -> Any:
    """20 MiB of that pool, allocated on device 1's stream."""
    pointer = pair.rig.allocate(pool, 20 * MiB, pair.streams[1])
    value(pair.raw.cuStreamSynchronize(pair.streams[1]))
    return pointer


@pytest.fixture
def plain(pair: Pair) -> Any:
    """Plain memory of device 1."""
    pair.use(1)
    pointer = pair.rig.plain(MiB)
    pair.use(0)
    return pointer


class TestPeers:
    def test_access_and_attributes(self, raw: Any) -> None:
        assert [value(raw.cuDeviceCanAccessPeer(*pair)) for pair in ((0, 1), (1, 0), (0, 0))] == [1, 1, 0]
        assert said(raw.cuDeviceCanAccessPeer(0, 99)) == "INVALID_DEVICE"
        readings = {"PERFORMANCE_RANK": 0, "ACCESS_SUPPORTED": 1, "NATIVE_ATOMIC_SUPPORTED": 1}
        readings |= {"ACCESS_ACCESS_SUPPORTED": 1, "CUDA_ARRAY_ACCESS_SUPPORTED": 1}
        for name, reading in {**readings, "ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED": 0}.items():
            attribute = getattr(raw.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}", None)
            if attribute is not None:
                assert value(raw.cuDeviceGetP2PAttribute(attribute, 0, 1)) == reading, name
                assert said(raw.cuDeviceGetP2PAttribute(attribute, 0, 0)) == "INVALID_DEVICE"

    def test_enable_and_disable(self, pair: Pair) -> None:
        raw, (own, peer) = pair.raw, pair.contexts
        assert said(raw.cuCtxEnablePeerAccess(peer, 0)) == "SUCCESS"
        assert said(raw.cuCtxEnablePeerAccess(peer, 0)) == "PEER_ACCESS_ALREADY_ENABLED"
        assert said(raw.cuCtxDisablePeerAccess(peer)) == "SUCCESS"
        assert said(raw.cuCtxDisablePeerAccess(peer)) == "PEER_ACCESS_NOT_ENABLED"
        assert said(raw.cuCtxEnablePeerAccess(own, 0)) == "PEER_ACCESS_UNSUPPORTED"

    def test_enabled_access_is_to_the_peer_s_plain_memory(self, pair: Pair, pool: Any, plain: Any) -> None:
        attributes = {"ACCESS_FLAGS": READWRITE, "MAPPED": 1, "DEVICE_POINTER": "INVALID_VALUE"}
        assert pair.rig.pointer_attributes(plain, attributes) == attributes
        assert pair.fill(plain, 0) == "INVALID_VALUE"
        value(pair.raw.cuCtxEnablePeerAccess(pair.contexts[1], 0))
        attributes["DEVICE_POINTER"] = int(plain)
        assert pair.rig.pointer_attributes(plain, attributes) == attributes
        assert pair.fill(plain, 0) == "SUCCESS"
        pointer = pair.rig.allocate(pool, 64, pair.streams[0])
        pair.use(1)
        assert pair.fill(pointer, 1) == "INVALID_VALUE"
        pair.use(0)
        value(pair.raw.cuCtxDisablePeerAccess(pair.contexts[1]))


class TestPool:
    def test_allocation_on_the_other_device_s_stream(self, pair: Pair, pool: Any, pooled: Any) -> None:
        assert pair.rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 20 * MiB, 20 * MiB)
        assert said(pair.raw.cuMemFreeAsync(pooled, pair.streams[1])) == "SUCCESS"

    def test_memory_before_a_grant(self, pair: Pair, pool: Any, pooled: Any, plain: Any) -> None:
        assert pair.rig.access_flags(pool, DEVICE, 1) == NO_ACCESS
        assert pair.fill(pooled, 1) == "INVALID_VALUE"
        pair.use(1)
        assert pair.fill(pooled, 1) == "INVALID_VALUE"
        assert pair.fill(pooled, 0) == "SUCCESS"
        assert pair.copy(plain, pooled, 1) == "INVALID_VALUE"
        host = np.zeros(4, np.uint8)
        assert said(pair.raw.cuMemcpyDtoHAsync(host, pooled, 4, pair.streams[1])) == "INVALID_VALUE"

    def test_copies_under_the_other_device_s_context(self, pair: Pair, pool: Any) -> None:
        """The current context decides, not that of the stream."""
        mine, host = pair.rig.allocate(pool, 64, pair.streams[0]), np.zeros(64, np.uint8)
        pair.use(1)
        raw, stream = pair.raw, pair.streams[0]
        assert said(raw.cuMemcpyAsync(mine, mine, 64, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemcpyHtoDAsync(mine, host, 64, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemcpyDtoHAsync(host, mine, 64, stream)) == "INVALID_VALUE"
        assert pair.fill(mine, 0) == "SUCCESS"

    def test_a_grant_is_for_existing_memory_too(self, pair: Pair, pool: Any, pooled: Any, plain: Any) -> None:
        assert pair.rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
        assert pair.rig.access_flags(pool, DEVICE, 1) == READWRITE
        pair.use(1)
        assert pair.fill(pooled, 1) == "SUCCESS"
        assert pair.copy(plain, pooled, 1) == "SUCCESS"
        pair.use(0)
        assert pair.copy(plain, pooled, 0) == "SUCCESS"

    def test_grants(self, pair: Pair, pool: Any) -> None:
        rig, refused = pair.rig, ((DEVICE, 1, NO_ACCESS), (DEVICE, 9, READWRITE))
        assert rig.grant(pool, (DEVICE, 1, READWRITE), (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert rig.grant(pool, (DEVICE, 1, READ)) == "NOT_SUPPORTED"
        assert rig.grant(pool, *refused) == "INVALID_DEVICE"
        assert rig.access_flags(pool, DEVICE, 1) == READWRITE
        assert rig.grant(pool, (DEVICE, 1, NO_ACCESS)) == "SUCCESS"
        assert rig.access_flags(pool, DEVICE, 1) == NO_ACCESS

    def test_pools_of_the_second_device_and_of_the_host(self, pair: Pair) -> None:
        rig = pair.rig
        second, host = rig.pool(UINT64_MAX, id=1), rig.pool(location=HOST)
        for pool, devices in ((second, [0]), (host, [0, 1])):
            rig.allocate(pool, 64, pair.streams[0])
            assert [rig.access_flags(pool, DEVICE, device) for device in devices] == [NO_ACCESS] * len(devices)
        other = value(pair.raw.cuDeviceGetDefaultMemPool(1))
        assert said(pair.raw.cuDeviceSetMemPool(0, other)) == "INVALID_VALUE"  # it has to be the device's own

    @pytest.mark.parametrize("current", [0, 1])
    def test_the_stream_chooses_the_default_pool(self, pair: Pair, current: int) -> None:
        pair.use(current)
        pointer = value(pair.rig.keep(pair.raw.cuMemAllocAsync(64, pair.streams[1])))
        assert pair.rig.pointer_attribute(pointer, "MEMPOOL_HANDLE") == int(
            value(pair.raw.cuDeviceGetDefaultMemPool(1))
        )


class TestPlainMemoryOfTheOtherDevice:
    """Without peer access: fills are refused; which copies work depends on the current context, too."""

    def test_fill_and_copies(self, pair: Pair, pooled: Any, plain: Any) -> None:
        host = np.zeros(4, np.uint8)
        assert pair.fill(plain, 0) == "INVALID_VALUE"
        assert pair.copy(plain, pooled, 0) == "SUCCESS"
        assert said(pair.raw.cuMemcpyDtoH(host, plain, 4)) == "SUCCESS"
        assert said(pair.raw.cuMemcpyDtoHAsync(host, plain, 4, pair.streams[0])) == "SUCCESS"
        assert said(pair.raw.cuMemcpyAsync(pooled, plain, 64, pair.streams[0])) == "SUCCESS"
        value(pair.raw.cuStreamSynchronize(pair.streams[0]))
        pair.use(1)
        assert pair.fill(plain, 0) == pair.copy(plain, pooled, 0) == "INVALID_VALUE"

    @pytest.mark.parametrize("current", [True, False], ids=["a context", "none"])
    def test_peer_copies(self, pair: Pair, pooled: Any, plain: Any, current: bool) -> None:
        own, peer = pair.contexts
        assert pair.fill(pooled, 0) == "SUCCESS"
        if not current:
            pair.rig.use(pair.raw.CUcontext(0))
        for stream in pair.streams if current else pair.streams[:1]:
            assert said(pair.raw.cuMemcpyPeerAsync(plain, peer, pooled, own, 64, stream)) == "SUCCESS"
            value(pair.raw.cuStreamSynchronize(stream))
        pair.rig.use(own)
        assert pair.rig.read(plain, 64) == [1] * 64


class TestStreamsAndEvents:
    def test_events_are_recorded_in_their_context_and_waited_for_in_any(self, pair: Pair) -> None:
        event = pair.rig.event()
        assert said(pair.raw.cuEventRecord(event, pair.streams[1])) == "INVALID_HANDLE"
        value(pair.raw.cuEventRecord(event, pair.streams[0]))
        assert said(pair.raw.cuStreamWaitEvent(pair.streams[1], event, 0)) == "SUCCESS"
        assert pair.rig.executed(pair.streams[1])

    def test_pinned_memory_is_everybody_s(self, pair: Pair) -> None:
        pointer = pair.rig.pinned(64)
        pair.use(1)
        assert pair.fill(int(pointer), 1) == "SUCCESS"

    def test_each_context_has_its_legacy_stream(self, pair: Pair, plain: Any) -> None:
        blocking, gate = pair.rig.stream(BLOCKING), pair.rig.gate()
        gate.hold(blocking)
        pair.use(1)
        value(pair.raw.cuMemsetD8Async(plain, 1, 4, LEGACY))
        assert pair.rig.executed(LEGACY)
        pair.use(0)
        assert pair.rig.held(blocking)


def test_a_graph_s_memory_is_reserved_on_the_pool_s_device(pair: Pair) -> None:
    raw, rig, stream = pair.raw, pair.rig, pair.streams[0]
    pool = rig.pool(UINT64_MAX, id=1)
    for device in (0, 1):
        rig.forget_graph_memory(device)
    rig.begin_capture(stream)
    pointer = value(raw.cuMemAllocFromPoolAsync(MiB, pool, stream))
    assert said(raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
    executable = rig.instantiate(value(rig.end_capture(stream)))
    assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
    value(raw.cuStreamSynchronize(stream))
    assert [rig.graph_memory(device).reserved for device in (0, 1)] == [0, 32 * MiB]
    value(raw.cuDeviceGraphMemTrim(1))


FIRST, SECOND = (DEVICE, 0, READWRITE), (DEVICE, 1, READWRITE)


class MappedPair(Contexts):
    """A page of each device's memory, mapped side by side, and what is in each device's context."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        of_first = int(rig.plain(2 * PAGE))
        self.use(1)
        self.plain = of_first, int(rig.plain(2 * PAGE))
        self.use(0)
        self.start = rig.reserve(8 * PAGE)  # of device 0's page; device 1's is the next
        for device in (0, 1):
            rig.map(self.start + device * PAGE, rig.memory(id=device))

    def set_access(self, *wanted: tuple[int, int, int], pages: int = 2) -> str:
        return self.rig.set_access(self.start, pages * PAGE, *wanted)

    def flags(self, page: int) -> list[int | str]:
        """Flags of device 0 and device 1."""
        return [self.rig.get_access(self.start + page * PAGE, DEVICE, device) for device in (0, 1)]

    def fill(self, page: int, size: int) -> str:
        """The result of a fill in the current context."""
        return said(self.raw.cuMemsetD8(self.start + page * PAGE, 1, size))

    def peer_copy(self, on: int, target: int, to: int, source: int, of: int) -> str:
        """The result of a copy of a page between contexts, on a stream of the device ``on``."""
        contexts, stream = self.contexts, self.streams[on]
        answer = self.raw.cuMemcpyPeerAsync(target, contexts[to], source, contexts[of], PAGE, stream)
        value(self.raw.cuStreamSynchronize(stream))
        return said(answer)


@pytest.fixture
def mapped(rig: Rig) -> MappedPair:
    return MappedPair(rig)


def test_no_device_has_access_at_first(mapped: MappedPair) -> None:
    assert mapped.flags(1) == [NO_ACCESS, NO_ACCESS]


def test_memory_names_its_own_device(mapped: MappedPair, on_cuda: bool) -> None:
    """In every current context, and without access. Bindings 13.3 read 0, so that libcuda is asked."""
    mapped.use(1)
    pinned = int(mapped.rig.pinned(64))
    mapped.use(0)
    ordinal = mapped.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

    def device_of(address: int) -> int:
        if not on_cuda:
            return int(value(mapped.raw.cuPointerGetAttribute(ordinal, address)))
        found, cuda = ctypes.c_int(-1), ctypes.CDLL("libcuda.so.1")
        assert cuda.cuPointerGetAttribute(ctypes.byref(found), int(ordinal), ctypes.c_uint64(address)) == 0
        return found.value

    own = (mapped.plain[1], pinned, mapped.start + PAGE)
    assert [device_of(address) for address in (*own, mapped.plain[0], mapped.start)] == [1, 1, 1, 0, 0]


def test_memory_is_taken_from_its_own_device(mapped: MappedPair) -> None:
    mapped.use(1)
    free = mapped.rig.device_free()
    mapped.use(0)
    mapped.rig.memory(64 * MiB, id=1)
    mapped.use(1)
    assert free - mapped.rig.device_free() == 64 * MiB


class TestAccessToMappings:
    def test_of_one_device_to_both(self, mapped: MappedPair) -> None:
        assert mapped.set_access(FIRST) == "SUCCESS"
        assert mapped.flags(1)[1] == NO_ACCESS
        assert mapped.fill(0, 2 * PAGE) == "SUCCESS"
        mapped.rig.synchronize()
        mapped.use(1)
        assert mapped.fill(1, 4) == "INVALID_VALUE"

    def test_to_read(self, mapped: MappedPair) -> None:
        assert mapped.set_access(FIRST) == "SUCCESS"
        value(mapped.raw.cuMemsetD8(mapped.start, 1, PAGE))
        mapped.rig.synchronize()
        mapped.use(1)
        assert mapped.set_access((DEVICE, 1, READ)) == "SUCCESS"
        assert mapped.flags(0) == [READWRITE, READ]
        assert mapped.fill(0, 4) == "INVALID_VALUE"
        assert mapped.rig.read(mapped.start, 4) == [1] * 4

    def test_to_write_to_one_and_read_the_other(self, mapped: MappedPair) -> None:
        mapped.use(1)
        assert mapped.set_access((DEVICE, 1, READ)) == "SUCCESS"
        assert mapped.set_access(SECOND, pages=1) == "SUCCESS"
        assert said(mapped.raw.cuMemcpyHtoD(mapped.start, np.full(8, 9, np.uint8), 8)) == "SUCCESS"
        assert mapped.fill(0, 2 * PAGE) == "INVALID_VALUE"
        assert said(mapped.raw.cuMemcpyDtoD(mapped.start, mapped.start + PAGE, 8)) == "SUCCESS"

    def test_of_both_to_both(self, mapped: MappedPair) -> None:
        assert mapped.set_access(FIRST, SECOND) == "SUCCESS"
        for device in (0, 1):
            mapped.use(device)
            assert mapped.fill(0, 2 * PAGE) == "SUCCESS"
            mapped.rig.synchronize()

    def test_taken_away(self, mapped: MappedPair) -> None:
        assert mapped.set_access(FIRST, SECOND) == "SUCCESS"
        assert mapped.set_access((DEVICE, 1, NO_ACCESS)) == "SUCCESS"
        assert [mapped.flags(page)[1] for page in (0, 1)] == [NO_ACCESS] * 2


class TestCopiesOfMappings:
    @pytest.fixture(autouse=True)
    def own_access(self, mapped: MappedPair) -> None:
        """Each device's access to its own page, and no more."""
        for device, wanted in enumerate((FIRST, SECOND)):
            assert mapped.rig.set_access(mapped.start + device * PAGE, PAGE, wanted) == "SUCCESS"

    def test_between_contexts(self, mapped: MappedPair) -> None:
        """Need no more: each side is reached in its own context."""
        first, second = mapped.start, mapped.start + PAGE
        mapped.use(1)
        assert mapped.peer_copy(1, mapped.plain[1], 1, first, 0) == "SUCCESS"
        mapped.use(0)
        assert mapped.peer_copy(0, mapped.plain[0], 0, second, 1) == "SUCCESS"
        assert mapped.peer_copy(0, first, 0, second, 1) == "SUCCESS"

    @pytest.mark.parametrize("name", ["cuMemcpyDtoDAsync", "cuMemcpyAsync"])
    def test_in_one_context(self, mapped: MappedPair, name: str) -> None:
        mapped.use(1)
        answer = getattr(mapped.raw, name)(mapped.plain[1], mapped.start, PAGE, mapped.streams[1])
        assert said(answer) == "INVALID_VALUE"
        mapped.rig.synchronize()

    def test_over_both_pages(self, mapped: MappedPair) -> None:
        assert mapped.set_access(FIRST, SECOND) == "SUCCESS"
        mapped.use(1)
        target, (first, second) = mapped.plain[1], mapped.contexts
        assert said(mapped.raw.cuMemcpyPeer(target, second, mapped.start, first, 2 * PAGE)) == "SUCCESS"
        assert said(mapped.raw.cuMemcpyDtoD(target, mapped.start, 2 * PAGE)) == "SUCCESS"
        mapped.rig.synchronize()

    @pytest.mark.parametrize("page", [0, 1])
    def test_pointer(self, mapped: MappedPair, page: int) -> None:
        address = mapped.start + page * PAGE
        expected: dict[str, int | str] = {
            "MEMORY_TYPE": 2,
            "ACCESS_FLAGS": NO_ACCESS if page else READWRITE,
            "DEVICE_POINTER": "INVALID_VALUE" if page else address,
        }
        assert mapped.rig.pointer_attributes(address, expected) == expected


# -- the devices that ``CUDA_VISIBLE_DEVICES`` shows, and another process's memory of one that it hides ---------------


Seen = Callable[[str], tuple[str, list[str]]]

PROGRAM = """
import ctypes, json, os, sys
from cuda.bindings import driver
def seen(value):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    result = driver.cuInit(0)[0]
    structs = [] if result else [driver.cuDeviceGetUuid(n)[1] for n in range(driver.cuDeviceGetCount()[1])]
    return result.name, [ctypes.string_at(int(one.getPtr()), 16).hex() for one in structs]
"""
# Indices of the devices that are shown; X and Y stand for the ids of both.
SHOWN = {
    **{"0": [0], "1": [1], "0,1": [0, 1], "1,0": [1, 0], "0,1,2": [0, 1], "0,2,1": [0], "0,-1,1": [0], "0,": [0]},
    **{"0,,1": [0], " 1": [1], "1 ,0": [1, 0], " 1 , 0 ": [1, 0], "\t1": [1], "1\n": [1]},
    **{"1abc,0": [1, 0], "0,abc,1": [0], "1 0": [1], "1.5": [1], "0-1": [0], "0x1": [0], "01": [1], "+1": [1]},
    **{"-0": [0], "4294967296": [0], "4294967297": [1]},
    **{"GPU-Y": [1], "GPU-Y,GPU-X": [1, 0], "GPU-X,GPU-Y,": [0, 1], "GPU-Y , GPU-X": [1], "GPU-Yx": [1]},
    **{"GPU-Y00": [1]},
    **{"GPU-X,0": [0], "0,GPU-Y": [0], "MIG-X": [0], "0,MIG-GPU-Y/1/0": [0]},
}
NONE = ["", " ", "-1", "-1,0", "2", ",0", "abc", "all", "NoDevFiles", "'1'", "99999999999"]
NONE += ["GPU-", "gpu-Y", "Y", "MIG-GPU-X/1/0"]
TWICE = ["0,0", "1,1", "GPU-X,GPU-X"]


@pytest.fixture
def seen(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Answer of cuInit, and the ids of the devices that a process sees."""

    def see(value: str) -> tuple[str, list[str]]:
        if on_cuda:
            ran = finished(python(f"{PROGRAM}print(json.dumps(seen(sys.argv[1])))", value), on_cuda)
            result, ids = json.loads(ran.stdout)
            return result, ids
        names: dict[str, Any] = {}
        with testing.install(simulated(devices=2, name="visible")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
            exec(PROGRAM, names)
            seen: Seen = names["seen"]
            return seen(value)

    return see


def test_what_a_value_shows(seen: Seen, on_cuda: bool) -> None:
    ids = seen("0,1")[1]

    def answer(text: str) -> tuple[str, list[int]]:
        for letter, one in zip("XY", ids, strict=True):
            text = text.replace(letter, str(uuid.UUID(one)))
        result, found = seen(text)
        return result.removeprefix("CUDA_").removeprefix("ERROR_"), [ids.index(one) for one in found]

    assert {text: answer(text) for text in SHOWN} == {text: ("SUCCESS", shown) for text, shown in SHOWN.items()}
    assert {answer(text)[0] for text in NONE} == {"NO_DEVICE"}
    assert {answer(text)[0] for text in TWICE} == {"INVALID_DEVICE"}


class TestAnotherProcessSMemory:
    """Of device 0, in a process that sees device 1 alone. It says device 0 there, too."""

    @pytest.fixture
    def peer(self, rig: Rig, on_cuda: bool) -> Iterator[Peer]:
        peer = Peer(on_cuda, devices=ok(rig.raw.cuDeviceGetCount()), visible="1")
        peer.said("cuStreamCreate", 1, keep="stream")
        yield peer
        peer.close()

    @staticmethod
    def shares(peer: Peer, rig: Rig, there: int, address: int) -> None:
        """The process reads and writes the memory of this one."""
        number = int(rig.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        assert peer.value("cuPointerGetAttribute", Member("CUpointer_attribute", number), there) == 0
        assert list(peer.rig("read", there, 8)) == [9] * 8
        assert peer.said("cuMemsetD8", there, 5, 8) == peer.said("cuCtxSynchronize") == "SUCCESS"
        assert list(rig.read(address, 8)) == [5] * 8

    @staticmethod
    def written(rig: Rig, address: int) -> int:
        ok(rig.raw.cuMemsetD8(address, 9, 64))
        ok(rig.raw.cuCtxSynchronize())
        return address

    def test_plain(self, rig: Rig, peer: Peer) -> None:
        address = self.written(rig, int(rig.plain(4 * MiB)))
        handle = Opaque("CUipcMemHandle", bytes_of(ok(rig.raw.cuIpcGetMemHandle(address))))
        self.shares(peer, rig, int(peer.value("cuIpcOpenMemHandle", handle, 1)), address)

    def test_pooled(self, rig: Rig, peer: Peer) -> None:
        """The device has no access to the pool, and can use it all the same."""
        pool, stream = rig.pool(handle_types=POSIX_FD), rig.stream()
        peer.value("cuMemPoolImportFromShareableHandle", Descriptor(rig.exported(pool)), FD, 0, keep="pool")
        assert peer.rig("access_flags", Kept("pool"), DEVICE, 0) == NO_ACCESS
        address = self.written(rig, rig.allocate(pool, 4 * MiB, stream))
        data = Opaque("CUmemPoolPtrExportData", opaque_bytes(ok(rig.raw.cuMemPoolExportPointer(address))))
        self.shares(peer, rig, int(peer.value("cuMemPoolImportPointer", Kept("pool"), data)), address)

    def test_physical(self, rig: Rig, peer: Peer) -> None:
        memory = rig.memory(handle_types=POSIX_FD)
        address = rig.map(rig.reserve(PAGE), memory)
        assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        peer.value("cuMemImportFromShareableHandle", Descriptor(rig.exported(memory)), FD, keep="memory")
        mapped = peer.rig("map", peer.rig("reserve", PAGE), Kept("memory"))
        assert peer.rig("set_access", mapped, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        self.shares(peer, rig, mapped, self.written(rig, address))


def test_bus_ids(rig: Rig, on_cuda: bool) -> None:
    """A device that is hidden, or not there, is an invalid one; any other text is an invalid value."""
    peer = Peer(on_cuda, devices=ok(rig.raw.cuDeviceGetCount()), visible="1")
    try:
        first, second = (ok(rig.raw.cuDeviceGetPCIBusId(20, number)) for number in range(2))
        assert peer.value("cuDeviceGetByPCIBusId", second) == 0
        texts = (first, b"0000:fe:1e.0", b"hello")
        answers = [peer.said("cuDeviceGetByPCIBusId", text) for text in texts]
        assert answers == ["INVALID_DEVICE", "INVALID_DEVICE", "INVALID_VALUE"]
    finally:
        peer.close()
