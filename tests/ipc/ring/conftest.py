"""Fixtures of the ring's tests."""

from collections.abc import Callable, Iterator

import pytest

import streamalloc as sa
from streamalloc.ipc import Ring, RingConsumer, RingProducer
from tests.ipc.ring.support import SIZE, consumer_of, join, make_ring
from tests.processes import Partner


@pytest.fixture
def ring(pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[RingProducer]:
    """Four slots, and nobody to take them."""
    with Ring.producer(pool, SIZE, 4, stream=stream) as ring:
        yield ring


@pytest.fixture
def joined(ring: RingProducer, partner: Partner) -> RingProducer:
    """The same with a consumer in the other process."""
    join(partner, ring)
    return ring


@pytest.fixture(scope="module")
def filler(on_cuda: bool) -> Iterator[Partner]:
    """A process that lives as long as the tests here."""
    with Partner(on_cuda) as partner:
        yield partner


@pytest.fixture
def fills(another: Callable[[], Partner]) -> Partner:
    """A process with the producer of a ring."""
    partner = another()
    partner.run(make_ring)
    return partner


@pytest.fixture
def own(device: sa.Device) -> Iterator[sa.Stream]:
    """A stream that nothing of another process is left on at the end."""
    with device.create_stream() as stream:
        yield stream


@pytest.fixture
def consumer(fills: Partner, own: sa.Stream) -> Iterator[RingConsumer]:
    """The other end, in this process."""
    with consumer_of(fills, own) as consumer:
        yield consumer
