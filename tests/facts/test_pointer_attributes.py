"""cuPointerGetAttribute for every kind of memory, and the range of a mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, FABRIC, HOST, HOST_NUMA, NO_HANDLE, POSIX_FD, READWRITE
from tests.facts.support import PAGE, MiB, Rig, said, unreadable, value

BAD = "INVALID_VALUE"
OWN = (DEVICE, 0, READWRITE)
RANGE = 8 * PAGE

# What every kind below has in common.
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
def test_attributes(rig: Rig, kind: str) -> None:
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


def test_of_what_is_no_allocation(rig: Rig) -> None:
    memory, pool, stream, start = np.zeros(64, np.uint8), rig.pool(), rig.stream(), mapped(rig)
    rig.allocate(pool, 1000, stream)
    freed = int(rig.allocate(pool, 4096, stream))
    rig.free(freed, stream)
    value(rig.raw.cuStreamSynchronize(stream))
    for address in (int(memory.ctypes.data), freed, 0, start + PAGE, start + 6 * PAGE):
        assert rig.pointer_attributes(address, NAMES) == dict.fromkeys(NAMES, BAD)


def test_of_a_mapping_without_access(rig: Rig) -> None:
    start = mapped(rig)
    expected = WITHOUT_ACCESS | {"RANGE_START_ADDR": start}
    assert rig.pointer_attributes(start + 3 * PAGE, expected) == expected


def test_of_a_mapping_are_the_memory_s(rig: Rig) -> None:
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


def test_many_at_once(rig: Rig) -> None:
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
