"""Answers for an address with virtual memory: cuPointerGetAttribute and cuMemGetAddressRange."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts.enums import DEVICE, POSIX_FD, READWRITE
from tests.facts.support import PAGE, Answer, Rig, said, value

OWN = (DEVICE, 0, READWRITE)
RANGE = 8 * PAGE

# Of a mapping that the device has access to. "itself" is the address asked for, "range" the start of the range.
MAPPED: dict[str, int | str] = {
    "CONTEXT": 0,
    "MEMORY_TYPE": 2,
    "DEVICE_POINTER": "itself",
    "HOST_POINTER": "INVALID_VALUE",
    "SYNC_MEMOPS": 0,
    "IS_MANAGED": 0,
    "DEVICE_ORDINAL": 0,
    "IS_LEGACY_CUDA_IPC_CAPABLE": 0,
    "RANGE_START_ADDR": "range",
    "RANGE_SIZE": RANGE,
    "MAPPED": 1,
    "ALLOWED_HANDLE_TYPES": 0,
    "IS_GPU_DIRECT_RDMA_CAPABLE": 0,
    "ACCESS_FLAGS": READWRITE,
    "MEMPOOL_HANDLE": 0,
}
WITHOUT_ACCESS: dict[str, int | str] = {
    "MEMORY_TYPE": 2,
    "DEVICE_POINTER": "INVALID_VALUE",
    "RANGE_START_ADDR": "range",
    "RANGE_SIZE": RANGE,
    "MAPPED": 1,
    "ACCESS_FLAGS": 0,
}


def asked(rig: Rig, name: str, address: int) -> Answer:
    attribute = getattr(rig.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    answer: Answer = rig.raw.cuPointerGetAttribute(attribute, address)
    return answer


@pytest.fixture
def start(rig: Rig) -> int:
    """A range with pages 0 and 2 mapped and accessible, and page 3 mapped without access."""
    start = rig.reserve(RANGE)
    for page in (0, 2, 3):
        rig.map(start + page * PAGE, rig.memory())
    for page in (0, 2):
        assert rig.set_access(start + page * PAGE, PAGE, OWN) == "SUCCESS"
    return start


def check(answer: Answer, expected: int | str, **words: int) -> None:
    if isinstance(expected, str) and expected not in words:
        assert said(answer) == expected
    else:
        assert int(value(answer)) == (words[expected] if isinstance(expected, str) else expected)


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("at", [0, 100, 2 * PAGE], ids=["first", "inside the first", "second"])
def test_attribute(rig: Rig, start: int, at: int, name: str) -> None:
    check(asked(rig, name, start + at), MAPPED[name], itself=start + at, range=start)


@pytest.mark.parametrize("name", WITHOUT_ACCESS)
def test_attribute_without_access(rig: Rig, start: int, name: str) -> None:
    check(asked(rig, name, start + 3 * PAGE), WITHOUT_ACCESS[name], range=start)


@pytest.mark.parametrize("name", [*MAPPED, "BUFFER_ID"])
@pytest.mark.parametrize("page", [1, 6], ids=["between mappings", "behind them"])
def test_attribute_where_nothing_is_mapped(rig: Rig, start: int, page: int, name: str) -> None:
    assert said(asked(rig, name, start + page * PAGE)) == "INVALID_VALUE"


def test_buffer_id_is_the_mapping_s(rig: Rig, start: int) -> None:
    first, inside, second = (value(asked(rig, "BUFFER_ID", start + at)) for at in (0, 100, 2 * PAGE))
    assert first == inside != second


@pytest.mark.parametrize(("at", "base"), [(0, 0), (100, 0), (2 * PAGE, 2 * PAGE)])
def test_address_range_is_the_mapping(rig: Rig, start: int, at: int, base: int) -> None:
    pair: Any = value(rig.raw.cuMemGetAddressRange(start + at))
    assert [int(one) for one in pair] == [start + base, PAGE]


@pytest.mark.parametrize("page", [1, 6], ids=["between mappings", "behind them"])
def test_address_range_where_nothing_is_mapped(rig: Rig, start: int, page: int) -> None:
    assert said(rig.raw.cuMemGetAddressRange(start + page * PAGE)) == "NOT_FOUND"


def test_allowed_handle_types_are_the_memory_s(rig: Rig) -> None:
    address = rig.mapping(handle_types=POSIX_FD)
    assert int(value(asked(rig, "ALLOWED_HANDLE_TYPES", address))) == POSIX_FD


def test_rdma_is_the_memory_s(rig: Rig) -> None:
    address = rig.mapping(PAGE, OWN, rdma=1)
    assert int(value(asked(rig, "IS_GPU_DIRECT_RDMA_CAPABLE", address))) == 1
