"""Prefetches, advice and discards of managed memory, as the documentation has them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver import simulated
from streamalloc.testing import Faults
from tests.support import each_raises, read

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
    assert read(buffer[:2]).tolist() == [9, 7]


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


CALLS: dict[str, Callable[[sa.Memory], object]] = {
    "cuMemPrefetchAsync": lambda memory: memory.prefetch(HOST),
    "cuMemDiscardBatchAsync": lambda memory: memory.discard(),
    "cuMemDiscardAndPrefetchBatchAsync": lambda memory: memory.discard_prefetch(HOST),
    "cuMemAdvise": lambda memory: memory.advise(ADVISE.SET_READ_MOSTLY),
    "cuMemRangeGetAttributes": lambda memory: memory.range_attributes(),
}


@pytest.mark.parametrize("call", CALLS)
def test_refused(
    streamalloc_faults: Faults, buffer: sa.Buffer, pool: sa.MemoryPool, stream: sa.Stream, call: str
) -> None:
    """By the driver, of memory that is not managed, and of freed memory."""
    act = CALLS[call]
    streamalloc_faults.fail(call)
    with pytest.raises(sa.CudaError) as raised:
        act(buffer)
    assert raised.value.call == call
    act(buffer)
    with pool.allocate(64, stream) as plain:
        for memory in (plain, plain[:8]):
            with pytest.raises(ValueError, match="is not managed"):
                act(memory)
        assert not plain.managed
    buffer.free()
    with pytest.raises(sa.ClosedError):
        act(buffer)


def test_arguments_that_do_not_fit(buffer: sa.Buffer, device: sa.Device) -> None:
    uses: list[tuple[Callable[..., None], tuple[Any, ...], type[Exception], str]] = [
        (buffer.prefetch, (sa.MemLocation.device(99),), ValueError, "location"),
        (buffer.prefetch, (sa.MemLocation.none(),), ValueError, "location"),
        (buffer.prefetch, (0.5,), TypeError, "location must be a Device or a MemLocation"),
        (buffer.advise, (1,), TypeError, "advice must be a MemAdvise"),
        (buffer.advise, (ADVISE.SET_ACCESSED_BY,), ValueError, "it needs a location"),
        (buffer.advise, (ADVISE.SET_READ_MOSTLY, device), ValueError, "it takes no location"),
        (
            buffer.advise,
            (ADVISE.SET_ACCESSED_BY, sa.MemLocation.host_numa(0)),
            ValueError,
            "takes a device or the host",
        ),
        (buffer.discard, (device.default_stream,), ValueError, "refuses the legacy default stream"),
    ]
    for use, arguments, error, words in uses:
        with pytest.raises(error, match=words):
            use(*arguments)
    buffer.prefetch(device, device.default_stream)


def test_devices_of_another_driver(buffer: sa.Buffer, stream: sa.Stream) -> None:
    other = sa.Device(0, driver=simulated())
    hint = sa.CopyOptions(dst_location_hint=other)
    uses: list[Callable[[], object]] = [
        lambda: buffer.prefetch(other),
        lambda: buffer.discard_prefetch(other),
        lambda: sa.prefetch_batch(stream, [buffer], other),
        lambda: sa.discard_prefetch_batch(stream, [buffer], [other]),
        lambda: buffer.advise(ADVISE.SET_PREFERRED_LOCATION, other),
        lambda: setattr(buffer, "preferred_location", other),
        lambda: setattr(buffer, "accessed_by", [other]),
        lambda: buffer.copy_from(bytes(4 * PAGE), options=hint),
    ]
    each_raises(ValueError, *uses, match="belongs to another driver")
    assert buffer.range_attributes() == sa.MemRangeAttributes(False, None, None, ())
