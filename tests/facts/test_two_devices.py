"""Two devices of one host: peer access, pools of one used from the other, and copies between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, LEGACY, NO_ACCESS, READ, READWRITE
from tests.facts.support import UINT64_MAX, MiB, Rig, Stats, said, value
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
