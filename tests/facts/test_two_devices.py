"""Two devices of one host: peer access, pools and mappings of one used from the other, and copies between them."""

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, LEGACY, NO_ACCESS, READ, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, MiB, Rig, Stats, said, value
from tests.facts.teams import Contexts

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
        assert pair.fill(plain, 0) == "INVALID_VALUE"
        value(pair.raw.cuCtxEnablePeerAccess(pair.contexts[1], 0))
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
