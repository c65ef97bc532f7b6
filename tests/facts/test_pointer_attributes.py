"""cuPointerGetAttribute for every kind of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, FABRIC, HOST, HOST_NUMA, NO_HANDLE, POSIX_FD, READWRITE
from tests.facts.support import MiB, Rig, said, unreadable, value

# What every kind below has in common.
COMMON = {
    "SYNC_MEMOPS": 0,
    "IS_MANAGED": 0,
    "DEVICE_ORDINAL": 0,
    "MAPPED": 1,
    "ALLOWED_HANDLE_TYPES": 0,
    "ACCESS_FLAGS": 3,
}

# A value is a number; or "context" or "pool", the current context or the allocation's pool; or "itself" or
# "start", the address asked for or the allocation's first; or the name of an error.
READINGS: dict[str, dict[str, int | str]] = {
    "device": {
        "CONTEXT": "context",
        "MEMORY_TYPE": 2,
        "DEVICE_POINTER": "itself",
        "HOST_POINTER": "INVALID_VALUE",
        "IS_LEGACY_CUDA_IPC_CAPABLE": 1,
        "RANGE_START_ADDR": "start",
        "RANGE_SIZE": 5 * MiB,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 1,
        "MEMPOOL_HANDLE": 0,
    },
    "pool": {
        "CONTEXT": 0,
        "MEMORY_TYPE": 2,
        "DEVICE_POINTER": "itself",
        "HOST_POINTER": "INVALID_VALUE",
        "IS_LEGACY_CUDA_IPC_CAPABLE": 0,
        "RANGE_START_ADDR": "start",
        "RANGE_SIZE": 1000,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
        "MEMPOOL_HANDLE": "pool",
    },
    "host pool": {
        "CONTEXT": 0,
        "MEMORY_TYPE": 1,
        "DEVICE_POINTER": "INVALID_VALUE",
        "HOST_POINTER": "itself",
        "IS_LEGACY_CUDA_IPC_CAPABLE": 0,
        "RANGE_START_ADDR": 0,
        "RANGE_SIZE": 1000,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
        "MEMPOOL_HANDLE": "pool",
    },
    "pinned": {
        "CONTEXT": "context",
        "MEMORY_TYPE": 1,
        "DEVICE_POINTER": "itself",
        "HOST_POINTER": "itself",
        "IS_LEGACY_CUDA_IPC_CAPABLE": 0,
        "RANGE_START_ADDR": "start",
        "RANGE_SIZE": 100,
        "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
        "MEMPOOL_HANDLE": 0,
    },
}
READINGS["host NUMA pool"] = READINGS["host pool"]
READINGS["registered"] = READINGS["pinned"] | {"RANGE_SIZE": 8192}
READINGS["inside device"] = READINGS["device"]
READINGS["inside pool"] = READINGS["pool"]
CASES = [(kind, name) for kind, own in READINGS.items() for name in (*COMMON, *own)]

NEWER = ("MAPPING_SIZE", "MAPPING_BASE_ADDR", "MEMORY_BLOCK_ID", "IS_HW_DECOMPRESS_CAPABLE")


def attribute(raw: Any, name: str) -> Any:
    return getattr(raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")


class Sample:
    """An allocation of a kind: its first address, the one to ask about, and its pool where it has one."""

    def __init__(self, rig: Rig, kind: str) -> None:
        self.pool: Any = 0
        match kind.removeprefix("inside "):
            case "device":
                self.start = int(rig.plain(5 * MiB))
            case "pinned":
                self.start = int(rig.pinned(100))
            case "registered":
                memory = np.zeros(4 * 4096, np.uint8)
                start = (int(memory.ctypes.data) + 4095) // 4096 * 4096
                value(rig.raw.cuMemHostRegister(start, 8192, 0))
                # The array is owned with it: it has to outlive the registration.
                rig.own(memory, lambda _: rig.raw.cuMemHostUnregister(start))
                self.start = start
            case name:
                locations = {"pool": DEVICE, "host pool": HOST, "host NUMA pool": HOST_NUMA}
                self.pool, stream = rig.pool(location=locations[name]), rig.stream()
                self.start = int(rig.allocate(self.pool, 1000, stream))
                value(rig.raw.cuStreamSynchronize(stream))
        inside = kind.startswith("inside") or kind == "registered"
        self.address = self.start + 16 if inside else self.start


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}-{name}" for kind, name in CASES])
def test_attribute(rig: Rig, kind: str, name: str) -> None:
    sample = Sample(rig, kind)
    words = {"context": rig.context, "pool": sample.pool, "itself": sample.address, "start": sample.start}
    reading = (COMMON | READINGS[kind])[name]
    answer = rig.raw.cuPointerGetAttribute(attribute(rig.raw, name), sample.address)
    if isinstance(reading, str) and reading not in words:
        assert said(answer) == reading
    else:
        expected = words[reading] if isinstance(reading, str) else reading
        if name == "IS_GPU_DIRECT_RDMA_CAPABLE":
            expected = expected and rig.device_attribute("GPU_DIRECT_RDMA_SUPPORTED")
        assert int(value(answer)) == int(expected)


@pytest.mark.parametrize("name", [*COMMON, *READINGS["pool"], "BUFFER_ID"])
@pytest.mark.parametrize("kind", ["pageable", "freed in a pool", "nothing"])
def test_of_what_is_no_allocation(rig: Rig, kind: str, name: str) -> None:
    memory = np.zeros(64, np.uint8)
    if kind == "pageable":
        address = int(memory.ctypes.data)
    elif kind == "nothing":
        address = 0
    else:
        pool, stream = rig.pool(), rig.stream()
        rig.allocate(pool, 1000, stream)
        address = int(rig.allocate(pool, 4096, stream))
        rig.free(address, stream)
        value(rig.raw.cuStreamSynchronize(stream))
    assert said(rig.raw.cuPointerGetAttribute(attribute(rig.raw, name), address)) == "INVALID_VALUE"


def test_freed_is_no_allocation_at_once(rig: Rig) -> None:
    stream = rig.stream()
    pointer = rig.allocate(rig.pool(), 1000, stream)
    rig.free(pointer, stream)
    assert said(rig.raw.cuPointerGetAttribute(attribute(rig.raw, "MEMORY_TYPE"), pointer)) == "INVALID_VALUE"


def test_buffer_id_is_the_allocation_s(rig: Rig) -> None:
    addresses = [int(rig.plain(5 * MiB)), int(rig.plain(5 * MiB)), int(rig.pinned(100))]
    wanted = attribute(rig.raw, "BUFFER_ID")
    ids = [value(rig.raw.cuPointerGetAttribute(wanted, address)) for address in addresses]
    assert len(set(ids)) == 3
    assert value(rig.raw.cuPointerGetAttribute(wanted, addresses[0] + 777)) == ids[0]


@pytest.mark.parametrize("handle_types", [NO_HANDLE, POSIX_FD, FABRIC])
def test_allowed_handle_types_are_the_pool_s(rig: Rig, handle_types: int) -> None:
    pointer = rig.allocate(rig.pool(handle_types=handle_types), 4096, rig.stream())
    allowed = rig.raw.cuPointerGetAttribute(attribute(rig.raw, "ALLOWED_HANDLE_TYPES"), pointer)
    assert int(value(allowed)) == handle_types


def test_host_pool_has_a_device_pointer_once_granted(rig: Rig) -> None:
    pool, stream = rig.pool(location=HOST), rig.stream()
    assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
    pointer = int(rig.allocate(pool, 4096, stream))
    answer = rig.raw.cuPointerGetAttribute(attribute(rig.raw, "DEVICE_POINTER"), pointer)
    assert int(value(answer)) == pointer
    assert said(rig.raw.cuMemHostGetDevicePointer(pointer, 0)) == "INVALID_VALUE"


def test_many_at_once(rig: Rig) -> None:
    pointer = int(rig.allocate(rig.pool(), 1000, rig.stream()))
    wanted = [attribute(rig.raw, name) for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_SIZE")]
    values = value(rig.raw.cuPointerGetAttributes(3, wanted, pointer))
    assert [int(one) for one in values] == [2, 0, 1000]


def test_many_at_once_of_pageable_memory_are_zero(rig: Rig) -> None:
    memory = np.zeros(64, np.uint8)
    wanted = [attribute(rig.raw, name) for name in ("MEMORY_TYPE", "DEVICE_ORDINAL")]
    values = value(rig.raw.cuPointerGetAttributes(2, wanted, memory.ctypes.data))
    assert [int(one) for one in values] == [0, 0]


@pytest.mark.parametrize("name", NEWER)
def test_attribute_that_the_bindings_cannot_read(rig: Rig, name: str) -> None:
    member = unreadable(rig.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    with pytest.raises(TypeError, match=f"^Unsupported attribute: {member.name}$"):
        rig.raw.cuPointerGetAttribute(member, int(rig.plain(64)))


def test_where_a_range_of_a_host_s_pool_begins_is_a_place_in_a_chunk(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool(location=HOST)
    pointers = [rig.allocate(pool, size, stream) for size in (512, 40 * MiB, 512)]
    attribute = rig.raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    places = [int(value(rig.raw.cuPointerGetAttribute(attribute, one))) for one in pointers]
    assert places == [0, 512, 8 * MiB + 512]
