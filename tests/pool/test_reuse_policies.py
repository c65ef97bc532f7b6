"""When a pool uses freed memory again: the readings of tests/facts/test_reuse.py, through the facade."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import streamalloc as sa
from streamalloc.testing import Gate
from tests.support import GROWTH, KEEP, MiB, executed, pending

SIZE = 20 * MiB
POLICIES = ("reuse_follow_event_dependencies", "reuse_allow_opportunistic", "reuse_allow_internal_dependencies")


@dataclasses.dataclass
class Bench:
    """20 MiB that are about to be freed on the first of two streams."""

    pool: sa.MemoryPool
    first: sa.Stream
    second: sa.Stream
    gate: Gate

    def __post_init__(self) -> None:
        self.buffer = self.pool.allocate(SIZE, self.first)
        self.address = self.buffer.address

    def set(self, policies: str) -> None:
        for name, digit in zip(POLICIES, policies, strict=True):
            setattr(self.pool.attributes, name, digit == "1")

    def free_pending(self) -> None:
        self.gate.hold(self.first)
        self.buffer.free()

    def free_executed(self) -> None:
        self.buffer.free()
        assert executed(self.first)

    def reused(self, stream: sa.Stream) -> bool:
        """Whether 20 MiB on this stream are the freed ones; if not, they are new."""
        with self.pool.allocate(SIZE, stream) as again:
            found = again.address == self.address
        assert self.pool.statistics().reserved == (GROWTH if found else 2 * GROWTH)
        return found


@pytest.fixture
def bench(request: pytest.FixtureRequest, device: sa.Device, gate: Gate) -> Iterator[Bench]:
    limit = getattr(request, "param", 0)
    with (
        sa.MemoryPool(device, max_size=limit, release_threshold=KEEP) as pool,
        device.create_stream() as first,
        device.create_stream() as second,
    ):
        yield Bench(pool, first, second, gate)
        gate.open()
        device.synchronize()


def test_same_stream(bench: Bench) -> None:
    bench.set("000")
    bench.free_pending()
    assert bench.reused(bench.first)


@pytest.mark.parametrize(("policies", "reused"), [("000", False), ("010", False), ("100", True), ("110", True)])
def test_ordered_by_an_event(bench: Bench, policies: str, reused: bool) -> None:
    bench.set(policies)
    bench.free_pending()
    bench.second.wait(bench.first.record())
    assert bench.reused(bench.second) is reused
    assert pending(bench.second)


@pytest.mark.parametrize(("policies", "reused"), [("000", False), ("010", True)])
def test_executed_but_not_synchronised(bench: Bench, policies: str, reused: bool) -> None:
    bench.set(policies)
    bench.free_executed()
    assert bench.reused(bench.second) is reused


@pytest.mark.parametrize("policies", ["000", "100", "010", "110"])
def test_pending_without_a_dependency(bench: Bench, policies: str) -> None:
    bench.set(policies)
    bench.free_pending()
    assert not bench.reused(bench.second)
    assert executed(bench.second)


@pytest.mark.parametrize("bench", [GROWTH], indirect=True)
def test_pending_in_a_full_pool(bench: Bench) -> None:
    bench.set("000")
    bench.free_pending()
    with pytest.raises(sa.OutOfMemoryError):
        bench.pool.allocate(SIZE, bench.second)


@pytest.mark.parametrize("bench", [GROWTH], indirect=True)
def test_an_internal_dependency_in_a_full_pool(bench: Bench) -> None:
    """The driver makes the second stream wait."""
    bench.set("001")
    bench.free_pending()
    assert bench.reused(bench.second)
    assert pending(bench.second)
    bench.gate.open()
    assert executed(bench.second)


def test_an_internal_dependency_only_where_growing_fails(bench: Bench) -> None:
    bench.set("001")
    bench.free_pending()
    assert not bench.reused(bench.second)
    assert executed(bench.second)


@pytest.mark.parametrize("how", ["stream", "device", "event"])
def test_synchronised(bench: Bench, how: str) -> None:
    bench.set("000")
    bench.buffer.free()
    synchronize = {
        "stream": bench.first.synchronize,
        "device": bench.first.device.synchronize,
        "event": bench.first.record().synchronize,
    }
    synchronize[how]()
    assert bench.reused(bench.second)


@pytest.mark.parametrize("how", ["query", "the other stream", "trim"])
def test_what_is_no_synchronisation(bench: Bench, how: str) -> None:
    bench.set("000")
    bench.free_executed()
    if how == "the other stream":
        bench.second.synchronize()
    elif how == "trim":
        with pytest.warns(sa.PendingFreesWarning):
            bench.pool.trim()
    assert not bench.reused(bench.second)


def test_through_a_third_stream(bench: Bench, device: sa.Device) -> None:
    bench.set("100")
    bench.free_pending()
    with device.create_stream() as between:
        between.wait(bench.first)
        bench.second.wait(between)
        assert bench.reused(bench.second)
        bench.gate.open()


def test_an_event_before_the_free(bench: Bench) -> None:
    bench.set("100")
    event = bench.first.record()
    bench.free_pending()
    bench.second.wait(event)
    assert not bench.reused(bench.second)


def test_dropped_memory_counts_as_freed_on_its_stream(bench: Bench) -> None:
    bench.set("000")
    bench.gate.hold(bench.first)
    del bench.buffer
    assert bench.reused(bench.first)


def test_current_pool(device: sa.Device, bench: Bench) -> None:
    """The same through ``sa.allocate``."""
    bench.set("100")
    bench.free_pending()
    bench.second.wait(bench.first)
    with bench.pool.make_current(), sa.allocate(SIZE, bench.second) as again:
        assert again.address == bench.address
