"""Fills, copies and batches of copies: what they check at the call, and when they read and write host memory."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, HOST_NUMA, LEGACY, READ, READWRITE
from tests.facts.support import PAGE, UINT64_MAX, Answer, MiB, Rig, said, value
from tests.support import in_threads

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


def test_arrays_bytes_and_bytearrays(memory: Memory) -> None:
    """Objects that the bindings accept as a host address."""
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


@pytest.mark.parametrize("kind", ["pageable", "pinned"])
def test_a_launch_waits_for_copies_to_pageable_memory(memory: Memory, kind: str) -> None:
    rig, raw, stream = memory.rig, memory.raw, memory.stream
    target = memory.pageable.ctypes.data if kind == "pageable" else int(memory.pinned)
    ctypes.memset(target, 1, 4096)
    value(raw.cuMemsetD8Async(memory.five, 5, 4096, stream))
    rig.begin_capture(stream)
    value(raw.cuMemcpyDtoHAsync(target, memory.five, 4096, stream))
    graph = rig.instantiate(value(rig.end_capture(stream)))
    for _ in range(2):
        gate = rig.gate()
        gate.hold(stream)
        with gate.opening_after(0.03 if kind == "pageable" else 60):
            value(raw.cuGraphLaunch(graph, stream))
            assert gate.is_open == (kind == "pageable")
        value(raw.cuStreamSynchronize(stream))
        assert ctypes.string_at(target, 4096) == b"\5" * 4096


@pytest.mark.parametrize("target", ["pinned", "granted", "pageable", "host pool"])
def test_copies_from_host_to_host(memory: Memory, target: str) -> None:
    """Memory of a host's pool counts as that of a device that may use it, and as pageable if none may."""
    raw, rig = memory.raw, memory.rig
    pool = rig.pool(location=HOST)
    assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
    pools = {"granted": pool, "host pool": rig.pool(location=HOST)}
    places = {name: [int(rig.allocate(one, 4096, memory.stream)) for _ in range(2)] for name, one in pools.items()}
    places["pageable"] = [memory.pageable.ctypes.data + at for at in (0, 4096)]
    places["pinned"] = [int(rig.pinned(4096)) for _ in range(2)]
    value(raw.cuStreamSynchronize(memory.stream))
    for name, (_, source) in places.items():
        waits = target in ("pageable", "host pool") or "granted" not in (target, name)
        ctypes.memset(source, 1, 4096)
        gate = rig.gate()
        gate.hold(memory.stream)
        with gate.opening_after(0.03 if waits else 60):
            value(raw.cuMemcpyAsync(places[target][0], source, 4096, memory.stream))
            assert gate.is_open == waits, name
            ctypes.memset(source, 2, 4096)
        value(raw.cuStreamSynchronize(memory.stream))
        late = not waits and name in ("granted", "pinned")
        assert ctypes.string_at(places[target][0], 4096) == bytes([1 + late]) * 4096, name


def test_only_a_copy_to_the_host_waits_and_for_blocking_streams(memory: Memory) -> None:
    """The calls without a stream: work of the legacy stream."""
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


IN_STREAM, AT_CALL, ANY = 1, 2, 3  # CUmemcpySrcAccessOrder


class Batch:
    """Memory of every kind, and batches of copies of 64 bytes between it."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.stream = rig, rig.raw, rig.stream()
        self.array = np.zeros(MiB, np.uint8)
        self.places = {
            "plain": int(rig.plain(MiB)),
            "other": int(rig.plain(MiB)),
            "pinned": int(rig.pinned(4096)),
            "pageable": self.array.ctypes.data,
            "pool": rig.allocate(rig.pool(), MiB, self.stream),
            "readable": rig.mapping(PAGE, (DEVICE, 0, READ)),
            "untouchable": rig.mapping(PAGE),
            "null": 0,
        }
        self.places["end"] = self.places["plain"] + MiB - 8
        rig.synchronize()

    def attributes(self, order: int = IN_STREAM, flags: int = 0, hint: tuple[int, int] | None = None) -> Any:
        made = self.raw.CUmemcpyAttributes()
        ctypes.c_int.from_address(int(made.getPtr())).value = order
        made.flags = flags
        if hint is not None:
            made.srcLocHint = self.rig.location(*hint)
        return made

    def copy(
        self,
        *pairs: str,
        size: int = 64,
        attributes: list[Any] | None = None,
        at: tuple[int, ...] = (0,),
        stream: Any = None,
    ) -> str:
        ends = [[self.places[name] for name in pair.split()] for pair in pairs]
        targets, sources = ([self.raw.CUdeviceptr(pair[side]) for pair in ends] for side in (0, 1))
        given = [self.attributes()] if attributes is None else attributes
        stream = self.stream if stream is None else stream
        sizes = [size] * len(pairs)
        return said(
            self.raw.cuMemcpyBatchAsync(
                targets, sources, sizes, len(pairs), given, list(at), len(given), self.raw.CUstream(int(stream))
            )
        )


@pytest.fixture
def batch(rig: Rig) -> Iterator[Batch]:
    if not hasattr(rig.raw, "cuMemGetDefaultMemPool"):
        pytest.skip("the bindings before CUDA 13 take other arguments")
    batch = Batch(rig)
    yield batch
    rig.settle()  # a batch may still write to the array


def test_ends_of_a_batch(batch: Batch) -> None:
    for pair in ("plain other", "plain pageable", "pageable plain", "pinned plain", "pool plain", "plain readable"):
        assert batch.copy(pair) == "SUCCESS"
    for pair in ("null other", "end other", "readable other", "untouchable other", "plain untouchable"):
        assert batch.copy("plain other", pair) == "INVALID_VALUE"


def test_counts_of_a_batch(batch: Batch) -> None:
    one, other = batch.attributes(), batch.attributes(ANY)
    assert batch.copy() == "INVALID_VALUE"
    assert batch.copy("plain other", size=0) == "INVALID_VALUE"
    assert batch.copy("plain other", attributes=[], at=()) == "INVALID_VALUE"
    pairs = ("plain other", "plain other")
    assert batch.copy(*pairs, attributes=[one, other], at=(0, 1)) == "SUCCESS"
    assert batch.copy(*pairs, attributes=[one, other], at=(0, 0)) == "INVALID_VALUE"
    assert batch.copy(*pairs, at=(1,)) == "INVALID_VALUE"
    assert batch.copy("plain other", attributes=[one, other], at=(0, 1)) == "INVALID_VALUE"


ATTRIBUTES: dict[str, list[dict[str, Any]]] = {
    "SUCCESS": [{"order": AT_CALL}, {"flags": 1}, {"hint": (HOST, 0)}],
    "INVALID_VALUE": [{"order": 0}, {"order": 4}, {"flags": 2}, {"hint": (DEVICE, 99)}],
}


def test_attributes_of_a_batch(batch: Batch) -> None:
    for expected, all_given in ATTRIBUTES.items():
        for given in all_given:
            assert batch.copy("plain pageable", attributes=[batch.attributes(**given)]) == expected, given


def test_streams_of_a_batch(batch: Batch) -> None:
    assert batch.copy("plain other", stream=LEGACY) == "INVALID_VALUE"
    assert batch.copy("plain other", stream=1) == "INVALID_VALUE"
    assert batch.copy("plain other", stream=batch.rig.per_thread) == "SUCCESS"

    def outside() -> None:
        assert batch.copy("plain other") == "INVALID_VALUE"

    in_threads(outside)
    batch.rig.begin_capture(batch.stream)
    assert batch.copy("plain other") == "STREAM_CAPTURE_UNSUPPORTED"
    assert batch.rig.capture_status(batch.stream) == "ACTIVE"


WAITS = {
    "plain pageable": (True, False, False),
    "pageable plain": (False, True, False),
    "pageable pinned": (False, False, False),
    "pinned pageable": (False, False, False),
    "pinned pinned": (False, True, False),
    "plain pinned": (False, True, False),
    "pinned plain": (False, True, False),
}


@pytest.mark.parametrize("pair", WAITS)
def test_which_batches_are_waited_for(batch: Batch, pair: str) -> None:
    rig, gate = batch.rig, batch.rig.gate()
    for order, waits in zip((IN_STREAM, AT_CALL, ANY), WAITS[pair], strict=True):
        gate.hold(batch.stream)
        with gate.opening_after(0.03 if waits else 5):
            assert batch.copy(pair, attributes=[batch.attributes(order)]) == "SUCCESS"
            assert gate.is_open == waits
        rig.synchronize()


def test_pageable_memory_of_a_batch_is_read_before_the_call_returns(batch: Batch) -> None:
    gate, plain = batch.rig.gate(), batch.places["plain"]
    for order in (AT_CALL, ANY):
        value(batch.raw.cuMemsetD8(plain, 0, 64))
        value(batch.raw.cuCtxSynchronize())  # the stream of the copy does not wait for the legacy one
        batch.array[:64] = 1
        gate.hold(batch.stream)
        assert batch.copy("plain pageable", attributes=[batch.attributes(order)]) == "SUCCESS"
        batch.array[:64] = 2
        gate.open()
        assert batch.rig.read(plain, 64) == [1] * 64


def test_what_is_not_managed_is_refused(batch: Batch) -> None:
    raw, stream, own = batch.raw, batch.stream, batch.rig.location(DEVICE)
    for name in ("plain", "pinned", "pageable", "pool", "readable"):
        address = batch.places[name]
        assert said(raw.cuMemPrefetchAsync(address, 4096, own, 0, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemAdvise(address, 4096, raw.CUmem_advise(1), own)) == "INVALID_VALUE"
    elsewhere = batch.rig.location(DEVICE, 99)
    assert said(raw.cuMemPrefetchAsync(batch.places["plain"], 4096, elsewhere, 0, stream)) == "INVALID_DEVICE"
    assert said(raw.cuStreamAttachMemAsync(stream, batch.places["plain"], 0, 4)) == "INVALID_VALUE"


def test_setting_that_copies_are_waited_for(batch: Batch) -> None:
    """It can be read again, and changes nothing for calls that need not wait."""
    raw, gate = batch.raw, batch.rig.gate()
    attribute = raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    for name in ("plain", "pool", "pinned"):
        assert said(raw.cuPointerSetAttribute(True, attribute, batch.places[name])) == "SUCCESS"
        assert value(raw.cuPointerGetAttribute(attribute, batch.places[name])) is True
    assert said(raw.cuPointerSetAttribute(True, attribute, batch.places["readable"])) == "NOT_SUPPORTED"
    assert said(raw.cuPointerSetAttribute(True, attribute, batch.places["pageable"])) == "INVALID_VALUE"
    kind = raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert said(raw.cuPointerSetAttribute(1, kind, batch.places["plain"])) == "INVALID_VALUE"
    gate.hold(batch.stream)
    with gate.opening_after(60):
        value(raw.cuMemcpyDtoDAsync(batch.places["plain"], batch.places["other"], 64, batch.stream))
        assert not gate.is_open


class TestBoxes:
    def box(self, batch: Batch, pair: str, **given: int) -> Any:
        """Two rows of eight bytes, sixteen bytes apart, of one layer of four."""
        made, places = batch.raw.CUDA_MEMCPY3D_BATCH_OP(), pair.split()
        for side, name, row, rows in ((made.dst, places[0], "drow", "drows"), (made.src, places[1], "srow", "srows")):
            side.type = batch.raw.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
            side.op.ptr.ptr = batch.raw.CUdeviceptr(batch.places[name])
            side.op.ptr.rowLength, side.op.ptr.layerHeight = given.get(row, 16), given.get(rows, 4)
        for field, default in (("width", 8), ("height", 2), ("depth", 1)):
            setattr(made.extent, field, given.get(field, default))
        if given.get("order", IN_STREAM):
            made.srcAccessOrder = batch.raw.CUmemcpySrcAccessOrder(given.get("order", IN_STREAM))
        made.flags = given.get("flags", 0)
        return made

    def copy(self, batch: Batch, *boxes: Any, stream: Any = None, flags: int = 0) -> str:
        stream = batch.stream if stream is None else batch.raw.CUstream(stream)
        return said(batch.raw.cuMemcpy3DBatchAsync(len(boxes), list(boxes), flags, stream))

    @pytest.mark.parametrize(
        ("given", "places"),
        [
            ({}, {0: 0, 16: 16}),
            ({"srow": 0}, {0: 0, 16: 8}),
            ({"drow": 0}, {0: 0, 8: 16}),
            ({"drows": 0, "srows": 0, "depth": 2}, {0: 0, 16: 16, 32: 32, 48: 48}),
            ({"drow": 0, "srow": 0, "drows": 0, "srows": 0, "depth": 2}, {0: 0, 8: 8, 16: 16, 24: 24}),
        ],
    )
    def test_zero_length_is_that_of_the_copy(self, batch: Batch, given: dict[str, int], places: dict[int, int]) -> None:
        batch.array[:256] = range(256)
        value(batch.raw.cuMemcpyHtoD(batch.places["other"], batch.array, 256))
        value(batch.raw.cuMemsetD8(batch.places["plain"], 255, 256))
        value(batch.raw.cuCtxSynchronize())  # the stream of the copy does not wait for the legacy one
        assert self.copy(batch, self.box(batch, "plain other", **given)) == "SUCCESS"
        expected = [255] * 64
        for target, source in places.items():
            expected[target : target + 8] = range(source, source + 8)
        assert batch.rig.read(batch.places["plain"], 64) == expected

    def test_what_is_refused(self, batch: Batch) -> None:
        good = self.box(batch, "plain other")
        wrong = [{"srow": 7}, {"srow": 7, "height": 1}, {"srows": 1}, {"flags": 2}]
        for given in (*wrong, *({field: 0} for field in ("width", "height", "depth", "order"))):
            assert self.copy(batch, self.box(batch, "plain other", **given)) == "INVALID_VALUE"
        for pair in ("null other", "end other"):
            assert self.copy(batch, good, self.box(batch, pair)) == "INVALID_VALUE"
        assert self.copy(batch) == "INVALID_VALUE"
        assert self.copy(batch, good, flags=1) == "INVALID_VALUE"
        assert self.copy(batch, good, stream=0) == "INVALID_VALUE"
        assert self.copy(batch, good, stream=2) == "SUCCESS"
        batch.rig.begin_capture(batch.stream)
        assert self.copy(batch, good) == "STREAM_CAPTURE_UNSUPPORTED"
        assert batch.rig.capture_status(batch.stream) == "ACTIVE"

    @pytest.mark.parametrize(
        ("pair", "waits"),
        [
            ("plain pageable", (False, True, False)),
            ("pageable plain", (True, True, True)),
            ("plain pinned", (False, True, False)),
            ("pinned plain", (False, True, False)),
        ],
    )
    def test_which_are_waited_for(self, batch: Batch, pair: str, waits: tuple[bool, ...]) -> None:
        rig, gate = batch.rig, batch.rig.gate()
        for order, wait in zip((IN_STREAM, AT_CALL, ANY), waits, strict=True):
            gate.hold(batch.stream)
            with gate.opening_after(0.03 if wait else 5):
                assert self.copy(batch, self.box(batch, pair, order=order)) == "SUCCESS"
                assert gate.is_open == wait
            rig.synchronize()
