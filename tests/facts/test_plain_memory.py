"""cuMemAlloc and its like, pinned and registered memory; what cuPointerGetAttribute says of every kind of memory."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import (
    BLOCKING,
    DEVICE,
    FABRIC,
    HOST,
    HOST_NUMA,
    NO_HANDLE,
    NON_BLOCKING,
    OWN,
    POSIX_FD,
    READWRITE,
)
from tests.facts.support import PAGE, Answer, MiB, Rig, said, unreadable, value
from tests.support import in_threads


def _free_after(rig: Rig, steps: tuple[tuple[int, ...], ...]) -> list[int]:
    """The device's free memory before and after each of several allocations of these sizes."""
    rig.stream()
    readings = [rig.device_free()]
    for sizes in steps:
        for size in sizes:
            rig.plain(size)
        readings.append(rig.device_free())
    return readings


PAGEABLE = np.zeros(64, np.uint8)

ANSWERS: dict[str, dict[str, Callable[[Rig], Answer]]] = {
    "SUCCESS": {
        "free nothing": lambda rig: rig.raw.cuMemFree(0),
        "free in stream order": lambda rig: rig.raw.cuMemFreeAsync(rig.plain(4096), rig.stream()),
        "free nothing pinned": lambda rig: rig.raw.cuMemFreeHost(0),
    },
    "INVALID_VALUE": {
        "no bytes": lambda rig: rig.raw.cuMemAlloc(0),
        "free inside an allocation": lambda rig: rig.raw.cuMemFree(int(rig.plain(1)) + 256),
        "free what is no allocation": lambda rig: rig.raw.cuMemFree(12345),
        "free host memory": lambda rig: rig.raw.cuMemFree(int(rig.pinned(64))),
        "free again": lambda rig: again(rig.raw.cuMemFree, rig.plain(1)),
        "pinned, flags that are none": lambda rig: rig.raw.cuMemHostAlloc(100, 99),
        "free inside pinned memory": lambda rig: rig.raw.cuMemFreeHost(int(rig.pinned(100)) + 4),
        "free pinned memory again": lambda rig: again(rig.raw.cuMemFreeHost, rig.pinned(100)),
        "free device memory as pinned": lambda rig: rig.raw.cuMemFreeHost(int(rig.plain(1))),
        "device address of pageable memory": lambda rig: rig.raw.cuMemHostGetDevicePointer(PAGEABLE.ctypes.data, 0),
        "register where nothing is mapped": lambda rig: rig.raw.cuMemHostRegister(0x7000_0000_0000, 4096, 0),
        "unregister what is pinned otherwise": lambda rig: rig.raw.cuMemHostUnregister(int(rig.pinned(4096))),
        "unregister inside of that": lambda rig: rig.raw.cuMemHostUnregister(int(rig.pinned(4096)) + 16),
    },
    "OUT_OF_MEMORY": {"more than there is": lambda rig: rig.raw.cuMemAlloc(1 << 45)},
    "HOST_MEMORY_NOT_REGISTERED": {
        "unregister where nothing is mapped": lambda rig: rig.raw.cuMemHostUnregister(0x7000_0000_0000)
    },
    "NOT_FOUND": {
        "range behind the end": lambda rig: rig.raw.cuMemGetAddressRange(int(rig.plain(5 * MiB)) + 5 * MiB),
        "range of nothing": lambda rig: rig.raw.cuMemGetAddressRange(0),
        "range of pageable memory": lambda rig: rig.raw.cuMemGetAddressRange(PAGEABLE.ctypes.data),
        "range behind the end in a pool": lambda rig: rig.raw.cuMemGetAddressRange(pooled(rig) + 1000),
        "range in a host pool without a grant": lambda rig: rig.raw.cuMemGetAddressRange(pooled(rig, HOST)),
        "range in a node's pool without a grant": lambda rig: rig.raw.cuMemGetAddressRange(pooled(rig, HOST_NUMA)),
    },
}


def again(call: Callable[[Any], Answer], pointer: Any) -> Answer:
    assert said(call(pointer)) == "SUCCESS"
    return call(pointer)


def pooled(rig: Rig, location: int = DEVICE) -> int:
    """1000 bytes of a pool."""
    return rig.allocate(rig.pool(location=location), 1000, rig.stream())


@pytest.mark.parametrize("expected", ANSWERS)
def test_answers(rig: Rig, expected: str) -> None:
    found = {name: said(call(rig)) for name, call in ANSWERS[expected].items()}
    assert found == dict.fromkeys(found, expected)


class TestDeviceMemory:
    def test_small_allocations_lie_512_bytes_apart(self, rig: Rig) -> None:
        first, second = rig.plain(1), rig.plain(1)
        assert int(second) - int(first) == 512

    def test_large_allocations_begin_at_2_mib(self, rig: Rig) -> None:
        assert [int(rig.plain(size)) % (2 * MiB) for size in (5 * MiB, 3 * MiB + 1)] == [0, 0]

    def test_device_memory_is_taken_in_steps_of_2_mib(self, in_new_process: Callable[..., list[int]]) -> None:
        readings = in_new_process(_free_after, ((1, 1), (5 * MiB,), (3 * MiB + 1,)))
        taken = [before - after for before, after in itertools.pairwise(readings)]
        assert taken == [2 * MiB, 6 * MiB, 4 * MiB]

    def test_pitch(self, rig: Rig) -> None:
        pointer, pitch = value(rig.raw.cuMemAllocPitch(100, 10, 4))
        rig.own(pointer, rig.raw.cuMemFree)
        assert pitch == 512
        assert value(rig.raw.cuMemGetAddressRange(pointer))[1] == 5120

    def test_free_waits_for_every_stream(self, rig: Rig) -> None:
        stream, gate, pointer = rig.stream(), rig.gate(), rig.plain(4 * MiB)
        gate.hold(stream)
        with gate.opening_after(0.05):
            assert said(rig.raw.cuMemFree(pointer)) == "SUCCESS"
            assert gate.is_open

    def test_allocation_waits_for_none(self, rig: Rig) -> None:
        stream, gate = rig.stream(), rig.gate()
        gate.hold(stream)
        with gate.opening_after(60):
            rig.plain(64 * MiB)
            assert not gate.is_open


class TestPinnedMemory:
    def test_calls(self, rig: Rig) -> None:
        raw = rig.raw
        assert int(value(raw.cuMemHostAlloc(0, 0))) == int(value(raw.cuMemAllocHost(0))) == 0
        for answer in (raw.cuMemHostAlloc(100, 0), raw.cuMemAllocHost(100)):
            pointer = rig.own(value(answer), raw.cuMemFreeHost)
            assert int(value(raw.cuMemHostGetDevicePointer(pointer, 0))) == int(pointer) != 0
            assert value(raw.cuMemHostGetFlags(pointer)) == 2

    def test_each_has_a_range_of_its_own(self, rig: Rig) -> None:
        pointer = int(rig.pinned(100))
        start, length = value(rig.raw.cuMemGetAddressRange(pointer))
        assert (int(start), length) == (pointer, 100)


@pytest.mark.parametrize("function", ["cuMemFree", "cuMemFreeHost"])
@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_a_free_waits_for_the_work_of_destroyed_streams(rig: Rig, flags: int, function: str) -> None:
    stream, gate = rig.disown(rig.stream(flags)), rig.gate()
    pointer = rig.disown(rig.plain(1) if function == "cuMemFree" else rig.pinned(1))
    gate.hold(stream)
    value(rig.raw.cuStreamDestroy(stream))
    thread = threading.Thread(target=getattr(rig.raw, function), args=(pointer,))
    thread.start()
    thread.join(0.05)
    held = thread.is_alive()
    gate.open()
    thread.join()
    assert held


@pytest.fixture
def pages(rig: Rig) -> Iterator[int]:
    """The address of two pages of ordinary memory, unregistered at the end."""
    memory = np.zeros(4 * 4096, np.uint8)
    address = (int(memory.ctypes.data) + 4095) // 4096 * 4096
    yield address
    rig.raw.cuMemHostUnregister(address)


class TestRegisteredMemory:
    def test_register(self, raw: Any, pages: int) -> None:
        assert said(raw.cuMemHostRegister(pages, 8192, 0)) == "SUCCESS"
        assert said(raw.cuMemHostRegister(pages, 8192, 0)) == "HOST_MEMORY_ALREADY_REGISTERED"
        start, size = value(raw.cuMemGetAddressRange(pages + 100))
        assert (int(start), size) == (pages, 8192)
        assert said(raw.cuMemHostUnregister(pages)) == "SUCCESS"
        assert said(raw.cuMemHostUnregister(pages)) == "HOST_MEMORY_NOT_REGISTERED"

    def test_freed_device_memory(self, rig: Rig) -> None:
        pointer = int(rig.plain(4 * MiB))
        value(rig.raw.cuMemFree(pointer))
        assert said(rig.raw.cuMemHostRegister(pointer, 4096, 0)) == "INVALID_VALUE"


class TestAddressRange:
    """cuMemGetAddressRange: requested bytes, whatever the allocation occupies."""

    def test_live(self, rig: Rig) -> None:
        host, stream = rig.pool(location=HOST), rig.stream()
        assert rig.grant(host, (1, 0, 3)) == "SUCCESS"
        pooled = rig.allocate(rig.pool(), 1000, stream)
        for pointer, size, at in (
            (rig.plain(1), 1, 0),
            (rig.plain(5 * MiB), 5 * MiB, 4 * MiB),
            (pooled, 1000, 0),
            (pooled, 1000, 999),
            (rig.allocate(host, 4096, stream), 4096, 0),
        ):
            start, length = value(rig.raw.cuMemGetAddressRange(int(pointer) + at))
            assert (int(start), length) == (int(pointer), size)

    def test_freed(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        rig.plain(1)
        plain = rig.plain(1)
        value(rig.raw.cuMemFree(plain))
        rig.allocate(pool, 1000, stream)
        pooled = rig.allocate(pool, 4096, stream)
        rig.free(pooled, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        for pointer in (plain, pooled):
            assert said(rig.raw.cuMemGetAddressRange(pointer)) == "NOT_FOUND"


def test_frees_without_a_context(rig: Rig, pages: int) -> None:
    """Memory is given back also by a thread that has none."""
    raw, device, host = rig.raw, int(value(rig.raw.cuMemAlloc(64))), int(value(rig.raw.cuMemHostAlloc(64, 0)))
    value(raw.cuMemHostRegister(pages, 8192, 0))

    def free() -> None:
        answers = [raw.cuMemFree(device), raw.cuMemFree(0), raw.cuMemFreeHost(host), raw.cuMemHostUnregister(pages)]
        assert [said(one) for one in answers] == ["SUCCESS"] * 4

    in_threads(free)


def test_registering_looks_at_the_whole_range(rig: Rig, pages: int) -> None:
    value(rig.raw.cuMemHostRegister(pages + 4096, 100, 0))
    assert said(rig.raw.cuMemHostRegister(pages, 3 * 4096, 0)) == "HOST_MEMORY_ALREADY_REGISTERED"
    value(rig.raw.cuMemHostUnregister(pages + 4096))


def host_flags(rig: Rig, *wanted: tuple[int, int]) -> list[int]:
    """Flags that pinned allocations of these sizes and flags report, one after the other."""
    pointers = [rig.own(int(value(rig.raw.cuMemHostAlloc(*one))), rig.raw.cuMemFreeHost) for one in wanted]
    return [value(rig.raw.cuMemHostGetFlags(one)) for one in pointers]


class TestPlacement:
    """Small allocations share blocks of 2 MiB."""

    BLOCK = 2 * MiB

    def test_the_host_s_lies_among_the_device_s(self, rig: Rig) -> None:
        both = [(int(rig.plain(self.BLOCK)), int(rig.pinned(self.BLOCK))) for _ in range(4)]
        assert any(pinned - plain == self.BLOCK for plain, pinned in both)

    def test_the_best_fit_of_all_blocks(self, rig: Rig) -> None:
        first, second = (int(rig.plain(self.BLOCK - 4096)) for _ in range(2))
        assert int(rig.plain(4096)) in (first + self.BLOCK - 4096, second + self.BLOCK - 4096)

    def test_no_small_allocation_reaches_over_a_block(self, rig: Rig) -> None:
        sizes = [self.BLOCK - 512 * (1 + at % 3) for at in range(6)]
        # The first may lie behind what an earlier test of the process has left in a block.
        assert all(int(rig.plain(size)) % self.BLOCK <= self.BLOCK - size for size in sizes)

    def test_of_equal_parts_that_which_has_been_free_longest(self, rig: Rig) -> None:
        size = 3 * 512
        parts = [rig.plain(size) for _ in range(5)]
        for at in (3, 1):
            value(rig.raw.cuMemFree(rig.disown(parts[at])))
        assert [int(rig.plain(size)) for _ in range(2)] == [int(parts[3]), int(parts[1])]

    def test_what_was_freed_in_a_stream_comes_back_when_the_host_knows(self, rig: Rig) -> None:
        stream = rig.stream()
        pointer = rig.plain(3 * MiB)
        free = value(rig.raw.cuMemGetInfo())[0]
        value(rig.raw.cuMemFreeAsync(rig.disown(pointer), stream))
        assert rig.executed(stream)
        assert value(rig.raw.cuMemGetInfo())[0] == free
        value(rig.raw.cuStreamSynchronize(stream))
        assert value(rig.raw.cuMemGetInfo())[0] == free + 4 * MiB

    def test_until_then_it_is_there(self, rig: Rig) -> None:
        raw, stream, pointer = rig.raw, rig.stream(), rig.plain(3 * MiB)
        value(raw.cuMemFreeAsync(rig.disown(pointer), stream))
        assert rig.executed(stream)
        assert int(value(raw.cuMemGetAddressRange(pointer))[0]) == int(pointer)
        assert said(raw.cuMemsetD8(pointer, 1, 64)) == "SUCCESS"
        rig.synchronize()
        assert said(raw.cuMemGetAddressRange(pointer)) == "NOT_FOUND"
        assert said(raw.cuMemsetD8(pointer, 1, 64)) == "INVALID_VALUE"

    def test_the_first_graph_of_a_context_takes_a_block(self, rig: Rig) -> None:
        def taken() -> int:
            stream, before = rig.stream(), value(rig.raw.cuMemGetInfo())[0]
            rig.begin_capture(stream, 2)
            graph = rig.own(value(rig.end_capture(stream)), rig.raw.cuGraphDestroy)
            rig.own(value(rig.raw.cuGraphInstantiate(graph, 0)), rig.raw.cuGraphExecDestroy)
            return int(before - value(rig.raw.cuMemGetInfo())[0])

        assert taken() in (0, self.BLOCK)  # nothing where there was another graph before
        assert taken() == 0

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_block_s_first_allocation_says_whether_it_is_portable(
        self, in_new_process: Callable[..., list[int]], first: int
    ) -> None:
        """In a new process: others have blocks with room, whose flags their first allocations have said."""
        assert in_new_process(host_flags, (2 * MiB - 4096, first), (2048, 1 - first)) == [2 | first, 2 | first]

    def test_write_combined_memory_has_blocks_of_its_own(self, rig: Rig) -> None:
        pinned, combined = (
            rig.own(int(value(rig.raw.cuMemHostAlloc(512, flags))), rig.raw.cuMemFreeHost) for flags in (0, 4)
        )
        assert pinned // self.BLOCK != combined // self.BLOCK

    def test_large_host_memory_has_its_own_flags(self, rig: Rig) -> None:
        assert host_flags(rig, (3 * MiB, 1), (3 * MiB, 0), (3 * MiB, 5)) == [3, 2, 7]


BAD = "INVALID_VALUE"
RANGE = 8 * PAGE

# Answers that every kind below has in common.
COMMON: dict[str, int | str] = {"SYNC_MEMOPS": 0, "IS_MANAGED": 0, "DEVICE_ORDINAL": 0, "MAPPED": 1}
COMMON |= {"ALLOWED_HANDLE_TYPES": 0, "ACCESS_FLAGS": 3}

KINDS = ("device", "pool", "host pool", "pinned", "mapped")
# A value is a number; or "context" or "pool", the current context or the allocation's pool; or "itself" or "start", the
# address asked for or the first of the allocation or range; or the name of an error.
READINGS: dict[str, tuple[int | str, ...]] = {
    "CONTEXT": ("context", 0, 0, "context", 0),
    "MEMORY_TYPE": (2, 2, 1, 1, 2),
    "DEVICE_POINTER": ("itself", "itself", BAD, "itself", "itself"),
    "HOST_POINTER": (BAD, BAD, "itself", "itself", BAD),
    "IS_LEGACY_CUDA_IPC_CAPABLE": (1, 0, 0, 0, 0),
    "RANGE_START_ADDR": ("start", "start", 0, "start", "start"),
    "RANGE_SIZE": (5 * MiB, 1000, 1000, 100, RANGE),
    "IS_GPU_DIRECT_RDMA_CAPABLE": (1, 0, 0, 0, 0),
    "MEMPOOL_HANDLE": (0, "pool", "pool", 0, 0),
}
WITHOUT_ACCESS = {"MEMORY_TYPE": 2, "DEVICE_POINTER": BAD, "RANGE_SIZE": RANGE, "MAPPED": 1, "ACCESS_FLAGS": 0}
NAMES = (*COMMON, *READINGS, "BUFFER_ID")

NEWER = ("MAPPING_SIZE", "MAPPING_BASE_ADDR", "MEMORY_BLOCK_ID", "IS_HW_DECOMPRESS_CAPABLE")


def attribute(raw: Any, name: str) -> Any:
    return getattr(raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")


class Sample:
    """An allocation of a kind: its first address, addresses to ask about, and its pool where it has one."""

    def __init__(self, rig: Rig, kind: str) -> None:
        self.pool, inside = 0, 16
        match kind:
            case "device":
                self.start = int(rig.plain(5 * MiB))
            case "pinned":
                self.start = int(rig.pinned(100))
            case "registered":
                memory = np.zeros(4 * 4096, np.uint8)
                self.start = start = (int(memory.ctypes.data) + 4095) // 4096 * 4096
                value(rig.raw.cuMemHostRegister(start, 8192, 0))
                # The array is owned with it: it has to outlive the registration.
                rig.own(memory, lambda _: rig.raw.cuMemHostUnregister(start))
            case "mapped":
                self.start, inside = mapped(rig), 2 * PAGE + 100
            case name:
                locations = {"pool": DEVICE, "host pool": HOST, "host NUMA pool": HOST_NUMA}
                pool, stream = rig.pool(location=locations[name]), rig.stream()
                self.pool, self.start = int(pool), int(rig.allocate(pool, 1000, stream))
                value(rig.raw.cuStreamSynchronize(stream))
        self.addresses = [self.start] if "host" in kind else [self.start, self.start + inside]


def mapped(rig: Rig) -> int:
    """A range with pages 0 and 2 mapped and accessible, and page 3 mapped without access."""
    start = rig.reserve(RANGE)
    for page in (0, 2, 3):
        rig.map(start + page * PAGE, rig.memory())
    for page in (0, 2):
        assert rig.set_access(start + page * PAGE, PAGE, OWN) == "SUCCESS"
    return start


@pytest.mark.parametrize("kind", [*KINDS, "host NUMA pool", "registered"])
def test_pointer_attributes(rig: Rig, kind: str) -> None:
    like = {"host NUMA pool": "host pool", "registered": "pinned"}.get(kind, kind)
    readings = COMMON | {name: row[KINDS.index(like)] for name, row in READINGS.items()}
    if kind == "registered":
        readings["RANGE_SIZE"] = 8192
    if not rig.device_attribute("GPU_DIRECT_RDMA_SUPPORTED"):
        readings["IS_GPU_DIRECT_RDMA_CAPABLE"] = 0
    sample = Sample(rig, kind)
    for address in sample.addresses:
        words = {"context": int(rig.context), "pool": sample.pool, "itself": address, "start": sample.start}
        expected = {name: words.get(one, one) if isinstance(one, str) else one for name, one in readings.items()}
        assert rig.pointer_attributes(address, expected) == expected


def test_pointer_attributes_of_what_is_no_allocation(rig: Rig) -> None:
    memory, pool, stream, start = np.zeros(64, np.uint8), rig.pool(), rig.stream(), mapped(rig)
    rig.allocate(pool, 1000, stream)
    freed = int(rig.allocate(pool, 4096, stream))
    rig.free(freed, stream)
    value(rig.raw.cuStreamSynchronize(stream))
    for address in (int(memory.ctypes.data), freed, 0, start + PAGE, start + 6 * PAGE):
        assert rig.pointer_attributes(address, NAMES) == dict.fromkeys(NAMES, BAD)


def test_pointer_attributes_of_a_mapping_without_access(rig: Rig) -> None:
    start = mapped(rig)
    expected = WITHOUT_ACCESS | {"RANGE_START_ADDR": start}
    assert rig.pointer_attributes(start + 3 * PAGE, expected) == expected


def test_pointer_attributes_of_a_mapping_are_the_memory_s(rig: Rig) -> None:
    plain, special = rig.mapping(handle_types=POSIX_FD), rig.mapping(PAGE, OWN, rdma=1)
    assert rig.pointer_attribute(plain, "ALLOWED_HANDLE_TYPES") == POSIX_FD
    assert rig.pointer_attribute(special, "IS_GPU_DIRECT_RDMA_CAPABLE") == 1
    start = mapped(rig)
    first, inside, second = (rig.pointer_attribute(start + at, "BUFFER_ID") for at in (0, 100, 2 * PAGE))
    assert first == inside != second


def test_address_range_is_the_mapping(rig: Rig) -> None:
    start = mapped(rig)
    for at, base in ((0, 0), (100, 0), (2 * PAGE, 2 * PAGE)):
        assert [int(one) for one in value(rig.raw.cuMemGetAddressRange(start + at))] == [start + base, PAGE]
    for page in (1, 6):
        assert said(rig.raw.cuMemGetAddressRange(start + page * PAGE)) == "NOT_FOUND"


def test_freed_is_no_allocation_at_once(rig: Rig) -> None:
    stream = rig.stream()
    pointer = rig.allocate(rig.pool(), 1000, stream)
    rig.free(pointer, stream)
    assert rig.pointer_attribute(pointer, "MEMORY_TYPE") == BAD


def test_buffer_id_is_the_allocation_s(rig: Rig) -> None:
    addresses = [int(rig.plain(5 * MiB)), int(rig.plain(5 * MiB)), int(rig.pinned(100))]
    ids = [rig.pointer_attribute(address, "BUFFER_ID") for address in addresses]
    assert len(set(ids)) == 3
    assert rig.pointer_attribute(addresses[0] + 777, "BUFFER_ID") == ids[0]


@pytest.mark.parametrize("handle_types", [NO_HANDLE, POSIX_FD, FABRIC])
def test_allowed_handle_types_are_the_pool_s(rig: Rig, handle_types: int) -> None:
    pointer = rig.allocate(rig.pool(handle_types=handle_types), 4096, rig.stream())
    assert rig.pointer_attribute(pointer, "ALLOWED_HANDLE_TYPES") == handle_types


def test_host_pool_has_a_device_pointer_once_granted(rig: Rig) -> None:
    pool, stream = rig.pool(location=HOST), rig.stream()
    assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
    pointer = int(rig.allocate(pool, 4096, stream))
    assert rig.pointer_attribute(pointer, "DEVICE_POINTER") == pointer
    assert said(rig.raw.cuMemHostGetDevicePointer(pointer, 0)) == "INVALID_VALUE"


def test_many_pointer_attributes_at_once(rig: Rig) -> None:
    pooled, memory = int(rig.allocate(rig.pool(), 1000, rig.stream())), np.zeros(64, np.uint8)
    wanted = [attribute(rig.raw, name) for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_SIZE")]
    for address, expected in ((pooled, [2, 0, 1000]), (memory.ctypes.data, [0, 0])):
        count = len(expected)
        found = value(rig.raw.cuPointerGetAttributes(count, wanted[:count], address))
        assert [int(one) for one in found] == expected


@pytest.mark.parametrize("name", NEWER)
def test_attribute_that_the_bindings_cannot_read(rig: Rig, name: str) -> None:
    member = unreadable(rig.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    with pytest.raises(TypeError, match=f"^Unsupported attribute: {member.name}$"):
        rig.raw.cuPointerGetAttribute(member, int(rig.plain(64)))


def test_where_a_range_of_a_host_s_pool_begins_is_a_place_in_a_chunk(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool(location=HOST)
    pointers = [rig.allocate(pool, size, stream) for size in (512, 40 * MiB, 512)]
    places = [rig.pointer_attribute(pointer, "RANGE_START_ADDR") for pointer in pointers]
    assert places == [0, 512, 8 * MiB + 512]
