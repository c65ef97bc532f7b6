"""Events: creation, what their queries say, and elapsed time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST_NUMA, LEGACY, NON_BLOCKING, TIMED, UNTIMED
from tests.facts.support import UINT64_MAX, MiB, Rig, said, value


def test_flags(rig: Rig) -> None:
    assert all(int(rig.event(flags)) for flags in (0, 1, 2, 3, 6, 7))
    # 4 is interprocess, which has to come with 2, no timing.
    assert [said(rig.raw.cuEventCreate(flags)) for flags in (4, 8, 99)] == ["INVALID_VALUE"] * 3


def test_never_recorded(rig: Rig) -> None:
    event = rig.event()
    assert said(rig.raw.cuEventQuery(event)) == said(rig.raw.cuEventSynchronize(event)) == "SUCCESS"


def test_recorded_behind_a_gate(rig: Rig) -> None:
    stream, event, gate = rig.stream(), rig.event(), rig.gate()
    gate.hold(stream)
    assert said(rig.raw.cuEventRecord(event, stream)) == "SUCCESS"
    assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
    gate.open()
    assert said(rig.raw.cuStreamSynchronize(stream)) == "SUCCESS"
    assert said(rig.raw.cuEventQuery(event)) == "SUCCESS"


def test_synchronize_waits(rig: Rig) -> None:
    stream, event, gate = rig.stream(), rig.event(), rig.gate()
    gate.hold(stream)
    value(rig.raw.cuEventRecord(event, stream))
    with gate.opening_after(0.05):
        assert said(rig.raw.cuEventSynchronize(event)) == "SUCCESS"
        assert gate.is_open


def test_destroyed_while_a_stream_waits_for_it(rig: Rig) -> None:
    first, second, event, gate = rig.stream(), rig.stream(BLOCKING), rig.event(), rig.gate()
    gate.hold(first)
    value(rig.raw.cuEventRecord(event, first))
    value(rig.raw.cuStreamWaitEvent(second, event, 0))
    assert said(rig.raw.cuEventDestroy(rig.disown(event))) == "SUCCESS"
    assert rig.held(second)
    gate.open()
    rig.synchronize()
    assert rig.query(second) == "SUCCESS"


class TestContext:
    """cuCtxRecordEvent. That it succeeds is a reading, what the event then stands for is the documentation's."""

    def test_recorded(self, rig: Rig) -> None:
        raw, event = rig.raw, rig.event()
        answers = raw.cuCtxRecordEvent(rig.context, event), raw.cuEventSynchronize(event), raw.cuEventQuery(event)
        assert [said(one) for one in answers] == ["SUCCESS"] * 3

    @pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING], ids=["blocking", "non-blocking"])
    def test_comes_after_the_work_of_every_stream(self, rig: Rig, flags: int) -> None:
        held, waiting, event, gate = rig.stream(flags), rig.stream(), rig.event(), rig.gate()
        gate.hold(held)
        value(rig.raw.cuCtxRecordEvent(rig.context, event))
        value(rig.raw.cuStreamWaitEvent(waiting, event, 0))
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
        assert rig.held(waiting)
        gate.open()
        assert said(rig.raw.cuEventSynchronize(event)) == "SUCCESS"
        assert rig.executed(waiting)

    @pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING], ids=["blocking", "non-blocking"])
    def test_comes_after_the_work_of_destroyed_streams(self, rig: Rig, flags: int) -> None:
        stream, event, gate = rig.disown(rig.stream(flags)), rig.event(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuStreamDestroy(stream))
        value(rig.raw.cuCtxRecordEvent(rig.context, event))
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
        gate.open()
        assert said(rig.raw.cuEventSynchronize(event)) == "SUCCESS"


class TestElapsedTime:
    def test_of_events_without_time(self, rig: Rig) -> None:
        stream, start, end = rig.stream(), rig.event(TIMED), rig.event()
        assert said(rig.raw.cuEventElapsedTime(start, rig.event(TIMED))) == "INVALID_HANDLE"
        value(rig.raw.cuEventRecord(start, stream))
        value(rig.raw.cuEventRecord(end, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        assert said(rig.raw.cuEventElapsedTime(start, end)) == "INVALID_HANDLE"

    def test_not_yet_executed(self, rig: Rig) -> None:
        stream, start, end, gate = rig.stream(), rig.event(TIMED), rig.event(TIMED), rig.gate()
        value(rig.raw.cuEventRecord(start, stream))
        gate.hold(stream)
        value(rig.raw.cuEventRecord(end, stream))
        assert said(rig.raw.cuEventElapsedTime(start, end)) == "NOT_READY"

    def test_both_ways(self, rig: Rig) -> None:
        stream, start, end = rig.stream(), rig.event(TIMED), rig.event(TIMED)
        value(rig.raw.cuEventRecord(start, stream))
        value(rig.raw.cuEventRecord(end, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        elapsed = value(rig.raw.cuEventElapsedTime(start, end))
        assert elapsed >= 0
        assert value(rig.raw.cuEventElapsedTime(end, start)) == -elapsed


class TestLegacyOrder:
    """Calls in the order of the legacy stream, which waits behind a gate here."""

    def hold_legacy(self, rig: Rig) -> Any:
        """Let the legacy stream wait for an event, which is behind a gate."""
        held, event = rig.stream(), rig.event()
        rig.gate().hold(held)
        value(rig.raw.cuEventRecord(event, held))
        value(rig.raw.cuStreamWaitEvent(LEGACY, event, 0))
        return event

    def test_a_record_without_time_is_no_work(self, rig: Rig) -> None:
        self.hold_legacy(rig)
        stream, event = rig.stream(BLOCKING), rig.event()
        value(rig.raw.cuEventRecord(event, stream))
        assert rig.query(stream) == "SUCCESS"
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
        value(rig.raw.cuStreamWaitEvent(stream, event, 0))  # even its own
        assert rig.held(stream)

    def test_a_record_is_no_work_either_where_the_event_is_pending(self, rig: Rig) -> None:
        event, stream = self.hold_legacy(rig), rig.stream(BLOCKING)
        value(rig.raw.cuEventRecord(event, stream))
        assert rig.query(stream) == "SUCCESS"

    def test_a_record_with_time_is_work(self, rig: Rig) -> None:
        self.hold_legacy(rig)
        stream = rig.stream(BLOCKING)
        value(rig.raw.cuEventRecord(rig.event(TIMED), stream))
        assert rig.held(stream)

    def test_a_wait_for_what_has_happened_is_no_work(self, rig: Rig) -> None:
        event = rig.event()
        value(rig.raw.cuEventRecord(event, rig.stream()))
        self.hold_legacy(rig)
        stream = rig.stream(BLOCKING)
        value(rig.raw.cuStreamWaitEvent(stream, event, 0))
        assert rig.query(stream) == "SUCCESS"

    @pytest.mark.parametrize(
        ("location", "policies", "size", "held"),
        [
            pytest.param(DEVICE, "111", 2 * MiB, False, id="known"),
            pytest.param(DEVICE, "111", 4 * MiB, True, id="from the end"),
            pytest.param(DEVICE, "111", 40 * MiB, True, id="growing"),
            pytest.param(DEVICE, "011", 4 * MiB, False, id="from the end, not looking"),
            pytest.param(DEVICE, "011", 40 * MiB, False, id="growing, not looking"),
            pytest.param(HOST_NUMA, "111", 2 * MiB, False, id="known to the host"),
            pytest.param(HOST_NUMA, "111", 4 * MiB, True, id="from the end for the host"),
        ],
    )
    def test_an_allocation_is_work_where_it_looks_at_other_streams(
        self, rig: Rig, location: int, policies: str, size: int, held: bool
    ) -> None:
        """The case of a pool without free memory whose policy is to follow events."""
        pool = rig.pool(UINT64_MAX, policies, location=location)
        stream = rig.stream(BLOCKING)
        first, _ = (rig.allocate(pool, 2 * MiB, stream) for _ in range(2))
        rig.free(first, stream)
        rig.synchronize()
        self.hold_legacy(rig)
        rig.allocate(pool, size, stream)
        assert rig.held(stream) == held


@pytest.mark.parametrize(("flags", "held"), [(UNTIMED | 4, True), (UNTIMED, False)], ids=["interprocess", "own"])
def test_an_interprocess_event_s_records_happen_in_turn(rig: Rig, flags: int, held: bool) -> None:
    first, second, event, gate = rig.stream(), rig.stream(), rig.event(flags), rig.gate()
    gate.hold(first)
    value(rig.raw.cuEventRecord(event, first))
    value(rig.raw.cuEventRecord(event, second))
    assert rig.held(second) == held
