"""Two devices of one host: peer access, pools of one used from the other, and copies between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, LEGACY, NO_ACCESS, READ, READWRITE
from tests.facts.support import UINT64_MAX, MiB, Rig, Stats, said, value

pytestmark = pytest.mark.gpus(2)


@dataclasses.dataclass
class Pair:
    """The contexts of both devices and a stream in each, with device 0's context current."""

    rig: Rig
    raw: Any
    contexts: tuple[Any, Any]
    streams: tuple[Any, Any]

    def use(self, device: int) -> None:
        self.rig.use(self.contexts[device])

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
    first = rig.context
    on_first = rig.stream()
    second = rig.device_context(1)
    on_second = rig.stream()
    rig.use(first)
    return Pair(rig, rig.raw, (first, second), (on_first, on_second))


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
    def test_access_both_ways(self, raw: Any) -> None:
        assert [value(raw.cuDeviceCanAccessPeer(*pair)) for pair in ((0, 1), (1, 0))] == [1, 1]

    def test_a_device_is_no_peer_of_itself(self, raw: Any) -> None:
        assert value(raw.cuDeviceCanAccessPeer(0, 0)) == 0

    def test_device_that_is_not_there(self, raw: Any) -> None:
        assert said(raw.cuDeviceCanAccessPeer(0, 99)) == "INVALID_DEVICE"

    @pytest.mark.parametrize(
        ("name", "reading"),
        {
            "PERFORMANCE_RANK": 0,
            "ACCESS_SUPPORTED": 1,
            "NATIVE_ATOMIC_SUPPORTED": 1,
            "ACCESS_ACCESS_SUPPORTED": 1,
            "CUDA_ARRAY_ACCESS_SUPPORTED": 1,
            "ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED": 0,
        }.items(),
    )
    def test_attribute(self, raw: Any, name: str, reading: int) -> None:
        attribute = getattr(raw.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}", None)
        if attribute is None:
            pytest.skip("these bindings do not name the attribute")
        assert value(raw.cuDeviceGetP2PAttribute(attribute, 0, 1)) == reading
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

    def test_revocation(self, pair: Pair, pool: Any) -> None:
        assert pair.rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
        assert pair.rig.grant(pool, (DEVICE, 1, NO_ACCESS)) == "SUCCESS"
        assert pair.rig.access_flags(pool, DEVICE, 1) == NO_ACCESS

    def test_read_only(self, pair: Pair, pool: Any) -> None:
        assert pair.rig.grant(pool, (DEVICE, 1, READ)) == "NOT_SUPPORTED"

    def test_grant_to_both(self, pair: Pair, pool: Any) -> None:
        assert pair.rig.grant(pool, (DEVICE, 1, READWRITE), (DEVICE, 0, READWRITE)) == "SUCCESS"

    def test_a_refused_grant_changes_nothing(self, pair: Pair, pool: Any) -> None:
        assert pair.rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
        wanted = (DEVICE, 1, NO_ACCESS), (DEVICE, 9, READWRITE)
        assert pair.rig.grant(pool, *wanted) == "INVALID_DEVICE"
        assert pair.rig.access_flags(pool, DEVICE, 1) == READWRITE

    def test_pool_of_the_second_device(self, pair: Pair) -> None:
        pool = pair.rig.pool(UINT64_MAX, id=1)
        pair.rig.allocate(pool, 64, pair.streams[0])
        assert pair.rig.access_flags(pool, DEVICE, 0) == NO_ACCESS

    @pytest.mark.parametrize("device", [0, 1])
    def test_host_pool(self, pair: Pair, device: int) -> None:
        pool = pair.rig.pool(location=HOST)
        pair.rig.allocate(pool, 64, pair.streams[0])
        assert pair.rig.access_flags(pool, DEVICE, device) == NO_ACCESS

    def test_current_pool_has_to_be_the_device_s_own(self, pair: Pair) -> None:
        other = value(pair.raw.cuDeviceGetDefaultMemPool(1))
        assert said(pair.raw.cuDeviceSetMemPool(0, other)) == "INVALID_VALUE"

    @pytest.mark.parametrize("current", [0, 1])
    def test_the_stream_chooses_the_default_pool(self, pair: Pair, current: int) -> None:
        pair.use(current)
        pointer = value(pair.rig.keep(pair.raw.cuMemAllocAsync(64, pair.streams[1])))
        handle = pair.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        pool = int(value(pair.raw.cuPointerGetAttribute(handle, pointer)))
        assert pool == int(value(pair.raw.cuDeviceGetDefaultMemPool(1)))


class TestPlainMemoryOfTheOtherDevice:
    """Without peer access: fills are refused; which copies work depends on the current context, too."""

    def test_fill(self, pair: Pair, plain: Any) -> None:
        assert pair.fill(plain, 0) == "INVALID_VALUE"
        pair.use(1)
        assert pair.fill(plain, 0) == "INVALID_VALUE"

    def test_copy_to_it(self, pair: Pair, pooled: Any, plain: Any) -> None:
        assert pair.copy(plain, pooled, 0) == "SUCCESS"
        pair.use(1)
        assert pair.copy(plain, pooled, 0) == "INVALID_VALUE"

    def test_copy_from_it(self, pair: Pair, pooled: Any, plain: Any) -> None:
        assert said(pair.raw.cuMemcpyAsync(pooled, plain, 64, pair.streams[0])) == "SUCCESS"
        value(pair.raw.cuStreamSynchronize(pair.streams[0]))

    @pytest.mark.parametrize("device", [0, 1])
    def test_peer_copy(self, pair: Pair, pooled: Any, plain: Any, device: int) -> None:
        own, peer = pair.contexts
        answer = pair.raw.cuMemcpyPeerAsync(plain, peer, pooled, own, 64, pair.streams[device])
        assert said(answer) == "SUCCESS"
        value(pair.raw.cuStreamSynchronize(pair.streams[device]))

    def test_peer_copy_without_a_current_context(self, pair: Pair, pooled: Any, plain: Any) -> None:
        own, peer = pair.contexts
        pair.rig.use(pair.raw.CUcontext(0))
        answer = pair.raw.cuMemcpyPeerAsync(plain, peer, pooled, own, 64, pair.streams[0])
        assert said(answer) == "SUCCESS"
        value(pair.raw.cuStreamSynchronize(pair.streams[0]))

    def test_copy_to_host(self, pair: Pair, plain: Any) -> None:
        host = np.zeros(4, np.uint8)
        assert said(pair.raw.cuMemcpyDtoH(host, plain, 4)) == "SUCCESS"
        assert said(pair.raw.cuMemcpyDtoHAsync(host, plain, 4, pair.streams[0])) == "SUCCESS"

    def test_peer_copy_carries_the_bytes(self, pair: Pair, pooled: Any, plain: Any) -> None:
        own, peer = pair.contexts
        assert pair.fill(pooled, 0) == "SUCCESS"
        value(pair.raw.cuMemcpyPeerAsync(plain, peer, pooled, own, 64, pair.streams[0]))
        assert pair.rig.read(plain, 64) == [1] * 64


class TestStreamsAndEvents:
    def test_an_event_is_recorded_in_its_own_context_only(self, pair: Pair) -> None:
        event = pair.rig.event()
        assert said(pair.raw.cuEventRecord(event, pair.streams[1])) == "INVALID_HANDLE"

    def test_a_stream_waits_for_an_event_of_the_other_device(self, pair: Pair) -> None:
        event = pair.rig.event()
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
