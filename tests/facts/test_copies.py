"""Fills and copies: what they check at the call, and when they read and write host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, HOST_NUMA, READWRITE
from tests.facts.support import UINT64_MAX, Answer, MiB, Rig, said, value

Bytes = npt.NDArray[np.uint8]


class Memory:
    """Memory of every kind, with a stream to use it on."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.stream = rig, rig.raw, rig.stream()
        self.small, self.five, self.three = rig.plain(1), rig.plain(5 * MiB), rig.plain(3 * MiB + 1)
        self.pool = rig.allocate(rig.pool(UINT64_MAX), 1000, self.stream)
        # no device may access the hosts' pools
        self.host_pool = rig.allocate(rig.pool(UINT64_MAX, location=HOST), 4096, self.stream)
        self.numa_pool = rig.allocate(rig.pool(UINT64_MAX, location=HOST_NUMA), 4096, self.stream)
        self.pinned, self.pageable = rig.pinned(4096), np.zeros(1 << 16, np.uint8)
        value(rig.raw.cuStreamSynchronize(self.stream))


@pytest.fixture
def memory(rig: Rig) -> Memory:
    return Memory(rig)


CALLS: dict[str, dict[str, Callable[[Memory], Answer]]] = {
    "SUCCESS": {
        "fill no bytes": lambda m: m.raw.cuMemsetD8(m.small, 1, 0),
        "fill no bytes of nothing": lambda m: m.raw.cuMemsetD8Async(0, 0, 0, m.stream),
        "fill of a pool": lambda m: m.raw.cuMemsetD8Async(m.pool, 1, 1000, m.stream),
        "fill 32 bits": lambda m: m.raw.cuMemsetD32Async(m.five, 0xDEADBEEF, 4, m.stream),
        "fill pinned": lambda m: m.raw.cuMemsetD8Async(int(m.pinned), 1, 64, m.stream),
        "copy no bytes of nothing": lambda m: m.raw.cuMemcpyDtoDAsync(0, 0, 0, m.stream),
        "copy between overlapping ranges": lambda m: m.raw.cuMemcpyDtoDAsync(int(m.five) + 4, m.five, 64, m.stream),
        "copy of any kind from pageable": lambda m: m.raw.cuMemcpyAsync(m.five, m.pageable.ctypes.data, 64, m.stream),
        "copy of any kind from host pool": lambda m: m.raw.cuMemcpyAsync(m.five, m.host_pool, 64, m.stream),
        "copy of any kind to host pool": lambda m: m.raw.cuMemcpyAsync(m.host_pool, m.five, 64, m.stream),
        "copy to host whose target is on the device": lambda m: m.raw.cuMemcpyDtoHAsync(
            int(m.five), m.three, 64, m.stream
        ),
        "copy to device whose source is on the device": lambda m: m.raw.cuMemcpyHtoDAsync(
            m.five, int(m.three), 64, m.stream
        ),
        "copy to device past the end in host pool": lambda m: m.raw.cuMemcpyHtoDAsync(
            m.five, int(m.host_pool) + 4000, 200, m.stream
        ),
    },
    "INVALID_VALUE": {
        "fill past the end of a small allocation": lambda m: m.raw.cuMemsetD8Async(m.small, 1, 4 * MiB, m.stream),
        "fill one byte past the end": lambda m: m.raw.cuMemsetD8Async(m.five, 1, 5 * MiB + 1, m.stream),
        "fill past the requested bytes in a pool": lambda m: m.raw.cuMemsetD8Async(m.pool, 1, 1024, m.stream),
        "fill past the end of a pool": lambda m: m.raw.cuMemsetD8Async(m.pool, 1, 64 * MiB, m.stream),
        "fill 16 bits misaligned": lambda m: m.raw.cuMemsetD16Async(int(m.five) + 1, 1, 4, m.stream),
        "fill 32 bits misaligned": lambda m: m.raw.cuMemsetD32Async(int(m.five) + 2, 1, 4, m.stream),
        "fill pageable": lambda m: m.raw.cuMemsetD8Async(m.pageable.ctypes.data, 1, 64, m.stream),
        "fill host pool": lambda m: m.raw.cuMemsetD8Async(m.host_pool, 7, 1000, m.stream),
        "fill host NUMA pool": lambda m: m.raw.cuMemsetD8Async(m.numa_pool, 7, 1000, m.stream),
        "copy to nothing": lambda m: m.raw.cuMemcpyDtoDAsync(0, m.small, 4, m.stream),
        "copy past the end of the target": lambda m: m.raw.cuMemcpyDtoDAsync(m.small, m.five, 3 * MiB, m.stream),
        "copy past the end of the source": lambda m: m.raw.cuMemcpyDtoDAsync(m.five, m.three, 5 * MiB, m.stream),
        "copy on the device from pageable": lambda m: m.raw.cuMemcpyDtoDAsync(
            m.five, m.pageable.ctypes.data, 64, m.stream
        ),
        "copy on the device from host pool": lambda m: m.raw.cuMemcpyDtoDAsync(m.five, m.host_pool, 64, m.stream),
        "copy to host from what is no device memory": lambda m: m.raw.cuMemcpyDtoHAsync(
            m.pageable, 12345678, 4, m.stream
        ),
        "copy to device past the end of pinned": lambda m: m.raw.cuMemcpyHtoDAsync(
            m.five, int(m.pinned) + 4000, 200, m.stream
        ),
    },
}


@pytest.mark.parametrize("expected", CALLS)
def test_calls(memory: Memory, expected: str) -> None:
    for name, call in CALLS[expected].items():
        assert said(call(memory)) == expected, name
        assert said(memory.raw.cuStreamSynchronize(memory.stream)) == "SUCCESS"


@pytest.mark.parametrize("kind", ["pinned", "plain"])
def test_no_copy_passes_the_end_of_an_allocation(rig: Rig, kind: str) -> None:
    """Nor where another allocation follows, unlike with mapped memory."""
    raw, stream, other = rig.raw, rig.stream(), rig.plain(2 * MiB)
    nbytes = 32 * MiB if kind == "pinned" else 2 * MiB
    several: list[int] = []
    while not (ends := [at + nbytes for at in several if at + nbytes in several]):
        # Gaps that earlier tests have left are filled first.
        assert len(several) < 64
        several.append(int(rig.pinned(nbytes) if kind == "pinned" else rig.plain(nbytes)))
    end = ends[0]
    assert said(raw.cuMemcpyAsync(end - MiB, other, 2 * MiB, stream)) == "INVALID_VALUE"
    assert said(raw.cuMemcpyAsync(other, end - MiB, 2 * MiB, stream)) == "INVALID_VALUE"
    assert said(raw.cuMemcpyAsync(end - 2 * MiB, other, 2 * MiB, stream)) == "SUCCESS"


def test_fill_32_bits_writes_little_endian(memory: Memory) -> None:
    value(memory.raw.cuMemsetD32Async(memory.five, 0xDEADBEEF, 2, memory.stream))
    assert memory.rig.read(memory.five, 8) == [0xEF, 0xBE, 0xAD, 0xDE] * 2


class TestBuffers:
    """Objects that the bindings accept as a host address."""

    def test_arrays_bytes_and_bytearrays(self, memory: Memory) -> None:
        raw, back, written = memory.raw, np.zeros(64, np.uint8), bytearray(4)
        memory.pageable[:64] = np.arange(64)
        value(raw.cuMemcpyHtoD(memory.five, memory.pageable, 64))
        value(raw.cuMemcpyDtoH(back, memory.five, 64))
        assert back.tolist() == list(range(64))
        value(raw.cuMemcpyHtoD(memory.five, b"abcd", 4))
        value(raw.cuMemcpyDtoH(written, memory.five, 4))
        back.flags.writeable = False  # which the bindings do not look at
        value(raw.cuMemcpyDtoH(back, memory.five, 4))
        assert written == back[:4].tobytes() == bytes(memory.rig.read(memory.five, 4)) == b"abcd"


class TestPageableMemory:
    SIZES = (1024, 65536, 65537, 1 << 20)

    def test_is_read_at_the_call(self, memory: Memory) -> None:
        for size in self.SIZES:
            gate, buffer = memory.rig.gate(), np.full(size, 1, np.uint8)
            gate.hold(memory.stream)
            with gate.opening_after(60):
                value(memory.raw.cuMemcpyHtoDAsync(memory.five, buffer, size, memory.stream))
                assert not gate.is_open
            buffer[:] = 2
            assert set(memory.rig.read(memory.five, size)) == {1}

    def test_is_written_by_the_end_of_the_call(self, memory: Memory) -> None:
        for size in self.SIZES:
            gate, buffer = memory.rig.gate(), np.zeros(size, np.uint8)
            gate.hold(memory.stream)
            value(memory.raw.cuMemsetD8Async(memory.five, 3, size, memory.stream))
            with gate.opening_after(0.03):
                value(memory.raw.cuMemcpyDtoHAsync(buffer, memory.five, size, memory.stream))
                assert gate.is_open
                assert set(buffer.tolist()) == {3}


def read_at_execution(memory: Memory, pointer: int) -> bool:
    """Whether a copy from host memory behind a gate sees what the host wrote after the call."""
    gate = memory.rig.gate()
    ctypes.memset(pointer, 2, 4096)
    gate.hold(memory.stream)
    with gate.opening_after(60):
        value(memory.raw.cuMemcpyHtoDAsync(memory.five, pointer, 4096, memory.stream))
        assert not gate.is_open
        ctypes.memset(pointer, 9, 4096)
        gate.open()
    return memory.rig.read(memory.five, 4096) == [9] * 4096


def writing_waits(memory: Memory, pointer: int) -> bool:
    """Whether a copy to host memory behind a gate returns only after it has been done."""
    gate = memory.rig.gate()
    gate.hold(memory.stream)
    with gate.opening_after(0.2):
        value(memory.raw.cuMemcpyDtoHAsync(pointer, memory.five, 4096, memory.stream))
        return gate.is_open


def test_host_memory_is_used_at_execution_where_a_device_may_use_it(memory: Memory) -> None:
    rig = memory.rig
    pool = rig.pool(location=HOST)
    assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
    granted = int(rig.allocate(pool, 4096, memory.stream))
    value(memory.raw.cuStreamSynchronize(memory.stream))
    for pointer, late in ((int(memory.pinned), True), (granted, True), (int(memory.host_pool), False)):
        assert read_at_execution(memory, pointer) == late
        assert writing_waits(memory, pointer) != late


class TestSynchronousCalls:
    """The calls without a stream: work of the legacy stream."""

    def test_only_a_copy_to_the_host_waits_and_for_blocking_streams(self, memory: Memory) -> None:
        raw, blocking, host = memory.raw, memory.rig.stream(BLOCKING), np.zeros(64, np.uint8)
        for stream, copies, waits in ((memory.stream, True, False), (blocking, True, True), (blocking, False, False)):
            gate = memory.rig.gate()
            gate.hold(stream)
            with gate.opening_after(0.05 if waits else 60):
                value(raw.cuMemcpyDtoH(host, memory.three, 64) if copies else raw.cuMemsetD8(memory.three, 1, 64))
                assert gate.is_open == waits
            memory.rig.synchronize()


@pytest.mark.parametrize("kind", [HOST, HOST_NUMA])
@pytest.mark.parametrize("granted", [False, True])
def test_memory_of_a_host_s_pool_is_no_device_memory(rig: Rig, kind: int, granted: bool) -> None:
    stream, pool, host = rig.stream(), rig.pool(location=kind), np.zeros(8, np.uint8)
    if granted:
        assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
    pointer = rig.allocate(pool, 64, stream)
    assert said(rig.raw.cuMemcpyHtoD(pointer, host, 8)) == "INVALID_VALUE"
    assert said(rig.raw.cuMemcpyDtoH(host, pointer, 8)) == "INVALID_VALUE"


def test_an_end_that_is_too_small_is_seen_whatever_the_other_is(rig: Rig) -> None:
    """With enough to read, the host would write where nothing lies, and crash."""
    single = int(rig.plain(1))
    assert said(rig.raw.cuMemcpy(single + 512, single, 64)) == "INVALID_VALUE"
