"""Hand-offs one after the other over one channel."""

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc.exporter.exports import Lease, exports_of
from streamalloc.ipc.wire.descriptor import Descriptor
from tests.ipc.support import shared_pool
from tests.support import each_raises, end_what_was_dropped, executed, filled, names, shows

pytestmark = pytest.mark.simulated_only("several drivers in one process, which stand for several processes")

SECONDS = 5.0
WITHOUT_WORK = ["cuThreadExchangeStreamCaptureMode", "cuStreamQuery", "cuThreadExchangeStreamCaptureMode"]


class Side(NamedTuple):
    """A process."""

    driver: Any
    stream: sa.Stream
    channel: ipc.Channel

    def calls(self, before: int) -> list[str]:
        return names(self.driver)[before:]


class Sides(NamedTuple):
    """Two of them, and what the first one allocates from."""

    ours: Side
    theirs: Side
    pool: sa.MemoryPool

    def hand_over(self, seed: int | None = None) -> tuple[sa.Buffer, ipc.ImportedBuffer]:
        buffer = self.pool.allocate(4096, self.ours.stream)
        if seed is not None:
            filled(buffer, seed)
        ipc.send(self.ours.channel, buffer)
        opened = ipc.receive(self.theirs.channel, stream=self.theirs.stream, timeout=SECONDS, kind=ipc.ImportedBuffer)
        return buffer, opened


@pytest.fixture
def sides(machine: Any) -> Iterator[Sides]:
    """After some hand-offs."""
    ends = ipc.Channel.pair()
    made = []
    for driver, end in zip((sd.traced(machine), sd.traced(sd.simulated())), ends, strict=True):
        made.append(Side(driver, sa.Device(0, driver=driver).create_stream(), end))
    with shared_pool(made[0].stream.device) as pool:
        found = Sides(made[0], made[1], pool)
        for seed in range(3):
            buffer, opened = found.hand_over(seed)
            assert shows(opened, seed)
            opened.close()
            buffer.free()
        yield found
        for side in made:
            side.channel.close()
            side.stream.close()


@pytest.mark.unchecked("counts calls")
def test_each_side_asks_the_driver_no_more_than_it_has_to(sides: Sides) -> None:
    ours, theirs = len(sides.ours.driver.calls), len(sides.theirs.driver.calls)
    buffer, opened = sides.hand_over()
    assert sides.ours.calls(ours) == ["cuMemAllocFromPoolAsync", "cuMemPoolExportPointer", *WITHOUT_WORK]
    assert sides.theirs.calls(theirs) == ["cuMemPoolImportPointer", "cuPointerGetAttribute"]
    ours, theirs = len(sides.ours.driver.calls), len(sides.theirs.driver.calls)
    opened.close()
    buffer.free()
    assert sides.theirs.calls(theirs) == ["cuMemFreeAsync", *WITHOUT_WORK]
    assert sides.ours.calls(ours) == ["cuMemFreeAsync"]


def test_there_is_no_room(sides: Sides) -> None:
    """A message that was not sent returns its word, so that its slot is used again."""
    buffers = []
    with pytest.raises(TimeoutError):
        for _ in range(10_000):
            buffers.append(sides.pool.allocate(64, sides.ours.stream))
            ipc.send(sides.ours.channel, buffers[-1], timeout=0.01)
    assert len(buffers) > 10 and buffers[-1].shared is not None
    for buffer in buffers:
        lease = buffer.shared
        assert isinstance(lease, Lease) and lease.quiet()
        buffer.free()


@pytest.mark.unchecked("counts calls")
@pytest.mark.parametrize("times", [1, 2])
def test_a_refused_announcement_sends_nothing(machine: Any, times: int) -> None:
    """What is shared from then on is there."""
    driver = sd.faulty(machine, 1 << 60)
    ours, theirs = sa.Device(0, driver=driver).create_stream(), sa.Device(0, driver=sd.simulated()).create_stream()
    one, two = ipc.Channel.pair()
    with one, two, shared_pool(ours.device) as pool, ours, theirs:
        for _ in range(3):
            with pool.allocate(64, ours) as buffer:
                ipc.send(one, buffer)
                ipc.receive(two, stream=theirs).close()
        buffer = pool.allocate(64, ours)
        ipc.share(buffer)
        for _ in range(times):
            driver._target = len(driver.seen) + 2  # after the question before the query
            each_raises(sa.CudaError, lambda: ipc.send(one, buffer), match="cuStreamQuery")
            each_raises(TimeoutError, lambda: two.receive(timeout=0))
        assert driver.failed == ["cuStreamQuery"] * times
        ipc.send(one, buffer)
        opened = ipc.receive(two, stream=theirs, timeout=SECONDS)
        assert executed(theirs) and not opened.lost
        opened.close()
        buffer.free()


def test_a_pool_that_is_dropped_ends_for_importers(sides: Sides) -> None:
    """A channel's record of a pool does not keep the pool."""
    channel = sides.ours.channel
    pool = shared_pool(sides.ours.stream.device)
    for _ in range(3):
        with pool.allocate(64, sides.ours.stream) as buffer:
            ipc.send(channel, buffer)
            descriptor = Descriptor.from_bytes(sides.theirs.channel.receive().data)
    block = exports_of(sides.ours.stream._session).block()
    assert block.mark("pool", descriptor.pool_mark).stands()
    pool.close()
    del pool, buffer
    end_what_was_dropped()
    gc.collect()
    assert not block.mark("pool", descriptor.pool_mark).stands()


def test_another_version_of_the_driver(sides: Sides) -> None:
    """Told each time, although the rest is known."""
    buffer = sides.pool.allocate(4096, sides.ours.stream)
    ipc.send(sides.ours.channel, buffer)
    data = sides.theirs.channel.receive().data
    other = Descriptor.from_bytes(data)._replace(driver_version=12040).to_bytes()
    for _ in range(2):
        with pytest.warns(ipc.DriverVersionWarning, match=r"CUDA 12\.4"):
            ipc.open(other, stream=sides.theirs.stream).close()
    buffer.free()
