"""Prefetches, advice and discards of managed memory, as the documentation has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa

pytestmark = [pytest.mark.managed, pytest.mark.bindings("13.0"), pytest.mark.supports("managed_memory_pools")]

PAGE = 4096
ADVISE = sa.MemAdvise
HOST = sa.MemLocation.host()


@pytest.fixture
def buffer(device: sa.Device, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """Four pages."""
    properties = sa.MemPoolProps(alloc_type=sa.MemAllocationType.MANAGED, location=device.location)
    with sa.MemoryPool(properties) as pool, pool.allocate(4 * PAGE, stream) as buffer:
        yield buffer


def test_host_and_device_use_one_address(buffer: sa.Buffer) -> None:
    buffer.fill(7)
    buffer.stream.synchronize()
    array = buffer.as_array()
    assert buffer.managed and buffer[:8].managed and (array == 7).all()
    array[0] = 9
    found = np.zeros(2, np.uint8)
    buffer[:2].copy_to(found)
    assert list(found) == [9, 7]


def test_prefetch(buffer: sa.Buffer, device: sa.Device) -> None:
    assert buffer.range_attributes() == buffer[:0].range_attributes() == sa.MemRangeAttributes(False, None, None, ())
    buffer.prefetch(device)
    buffer[:PAGE].prefetch(HOST)
    assert buffer[PAGE:].range_attributes().last_prefetch_location == device.location
    assert buffer[:PAGE].range_attributes().last_prefetch_location == HOST
    assert buffer.range_attributes().last_prefetch_location is None
    buffer.prefetch(sa.MemLocation.host_numa(0))
    assert buffer.range_attributes().last_prefetch_location == sa.MemLocation.host_numa(0)


def test_advice(buffer: sa.Buffer, device: sa.Device) -> None:
    buffer.advise(ADVISE.SET_READ_MOSTLY)
    buffer.advise(ADVISE.SET_PREFERRED_LOCATION, device)
    buffer.advise(ADVISE.SET_ACCESSED_BY, device)
    buffer[:PAGE].advise(ADVISE.SET_ACCESSED_BY, HOST)
    assert buffer.range_attributes() == sa.MemRangeAttributes(True, device.location, None, (device.location,))
    assert buffer[:PAGE].range_attributes().accessed_by == (device.location, HOST)
    buffer.advise(ADVISE.UNSET_READ_MOSTLY)
    buffer.advise(ADVISE.UNSET_PREFERRED_LOCATION)
    buffer.advise(ADVISE.UNSET_ACCESSED_BY, device)
    assert buffer.range_attributes() == sa.MemRangeAttributes(False, None, None, ())


def test_discard_leaves_what_is_beside(buffer: sa.Buffer, device: sa.Device) -> None:
    buffer.fill(5)
    buffer[PAGE : 2 * PAGE].discard()
    buffer[2 * PAGE : 3 * PAGE].discard_prefetch(device)
    buffer.stream.synchronize()
    array = buffer.as_array()
    assert (array[:PAGE] == 5).all() and (array[3 * PAGE :] == 5).all()
    assert buffer[2 * PAGE : 3 * PAGE].range_attributes().last_prefetch_location == device.location
    buffer.fill(6)
    buffer.stream.synchronize()
    assert (array == 6).all()


@pytest.mark.simulated_only("on hardware what a discarded range reads as is indeterminate")
def test_discarded_bytes_are_lost(buffer: sa.Buffer) -> None:
    buffer.fill(5)
    buffer[:PAGE].discard()
    buffer.stream.synchronize()
    assert (buffer.as_array()[:PAGE] == 0xDB).all()


def test_another_stream(buffer: sa.Buffer, device: sa.Device, gate: Any) -> None:
    buffer.stream.synchronize()
    other = device.create_stream()
    gate.hold(other)
    buffer.prefetch(device, other)
    assert not other.query() and buffer.stream.query()
    gate.open()
    other.synchronize()


@pytest.mark.parametrize(
    ("call", "act"),
    {
        "cuMemPrefetchAsync": lambda buffer: buffer.prefetch(HOST),
        "cuMemDiscardBatchAsync": lambda buffer: buffer.discard(),
        "cuMemDiscardAndPrefetchBatchAsync": lambda buffer: buffer.discard_prefetch(HOST),
        "cuMemAdvise": lambda buffer: buffer.advise(ADVISE.SET_READ_MOSTLY),
        "cuMemRangeGetAttributes": lambda buffer: buffer.range_attributes(),
    }.items(),
)
def test_call_that_fails(streamalloc_faults: Any, buffer: sa.Buffer, call: str, act: Any) -> None:
    streamalloc_faults.fail(call)
    with pytest.raises(sa.CudaError) as raised:
        act(buffer)
    assert raised.value.call == call
    act(buffer)


class TestRefused:
    def test_memory_that_is_not_managed(self, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device) -> None:
        with pool.allocate(64, stream) as plain:
            assert not plain.managed
            for call in (
                lambda: plain.prefetch(device),
                plain.discard,
                lambda: plain.discard_prefetch(device),
                lambda: plain[:8].advise(ADVISE.SET_READ_MOSTLY),
                plain.range_attributes,
            ):
                with pytest.raises(ValueError, match="is not managed"):
                    call()

    def test_arguments(self, buffer: sa.Buffer, device: sa.Device) -> None:
        for where in (sa.MemLocation.device(99), sa.MemLocation.none()):
            with pytest.raises(ValueError, match="location"):
                buffer.prefetch(where)
        with pytest.raises(TypeError, match="location must be a Device or a MemLocation"):
            buffer.prefetch(0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="advice must be a MemAdvise"):
            buffer.advise(1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="it needs a location"):
            buffer.advise(ADVISE.SET_ACCESSED_BY)
        with pytest.raises(ValueError, match="it takes no location"):
            buffer.advise(ADVISE.SET_READ_MOSTLY, device)
        with pytest.raises(ValueError, match="takes a device or the host"):
            buffer.advise(ADVISE.SET_ACCESSED_BY, sa.MemLocation.host_numa(0))

    def test_legacy_default_stream(self, buffer: sa.Buffer, device: sa.Device) -> None:
        with pytest.raises(ValueError, match="refuses the legacy default stream"):
            buffer.discard(device.default_stream)
        buffer.prefetch(device, device.default_stream)

    def test_freed(self, buffer: sa.Buffer, device: sa.Device) -> None:
        buffer.free()
        for call in (buffer.discard, buffer.range_attributes, lambda: buffer.prefetch(device)):
            with pytest.raises(sa.ClosedError):
                call()
