"""When freed memory is used again: the three policies, and which calls tell the host of an executed free."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.facts.support import BLOCKING, INTERPROCESS, LEGACY, UINT64_MAX, UNTIMED, MiB, Rig, Stats, said, value

SIZE = 20 * MiB


@dataclasses.dataclass
class Freed:
    """20 MiB of a pool, allocated on the first stream and about to be freed there."""

    rig: Rig
    pool: Any
    first: Any
    second: Any

    def __post_init__(self) -> None:
        self.raw = self.rig.raw
        self.gate = self.rig.gate()
        self.pointer = self.rig.allocate(self.pool, SIZE, self.first)

    def free(self) -> None:
        self.rig.free(self.pointer, self.first)

    def free_pending(self) -> None:
        self.gate.hold(self.first)
        self.free()

    def free_executed(self) -> None:
        self.free()
        assert self.rig.executed(self.first)

    def recorded(self, stream: Any) -> Any:
        """An event recorded on the stream now."""
        event = self.rig.event()
        value(self.raw.cuEventRecord(event, stream))
        return event

    def order(self, stream: Any, after: Any) -> None:
        value(self.raw.cuStreamWaitEvent(stream, self.recorded(after), 0))

    def reused(self, stream: Any) -> bool:
        """Whether 20 MiB on the stream land on the freed ones."""
        return int(self.rig.allocate(self.pool, SIZE, stream)) == int(self.pointer)


def freed(rig: Rig, policies: str, first: int = 1, second: int = 1, **properties: int) -> Freed:
    pool = rig.pool(UINT64_MAX, policies, **properties)
    return Freed(rig, pool, rig.stream(first), rig.stream(second))


class TestPolicies:
    """Policies as digits: follow event dependencies, allow opportunistic, allow internal dependencies."""

    def test_same_stream_free_pending(self, rig: Rig) -> None:
        case = freed(rig, "000")
        case.free_pending()
        assert case.reused(case.first)
        assert rig.reserved(case.pool) == 32 * MiB

    @pytest.mark.parametrize(("policies", "reused"), [("000", False), ("010", False), ("100", True), ("110", True)])
    def test_ordered_by_an_event_after_the_free_pending(self, rig: Rig, policies: str, reused: bool) -> None:
        case = freed(rig, policies)
        case.free_pending()
        case.order(case.second, after=case.first)
        assert case.reused(case.second) == reused
        assert rig.reserved(case.pool) == (32 if reused else 64) * MiB
        assert rig.held(case.second)

    @pytest.mark.parametrize(("policies", "reused"), [("000", False), ("010", True)])
    def test_free_executed_not_synchronised(self, rig: Rig, policies: str, reused: bool) -> None:
        case = freed(rig, policies)
        case.free_executed()
        assert case.reused(case.second) == reused
        assert rig.reserved(case.pool) == (32 if reused else 64) * MiB

    @pytest.mark.parametrize("policies", ["100", "110"])
    def test_free_pending_and_no_dependency(self, rig: Rig, policies: str) -> None:
        case = freed(rig, policies)
        case.free_pending()
        assert not case.reused(case.second)

    def test_free_pending_and_the_pool_may_not_grow(self, rig: Rig) -> None:
        case = freed(rig, "000", max_size=32 * MiB)
        case.free_pending()
        assert said(rig.try_allocate(case.pool, SIZE, case.second)) == "OUT_OF_MEMORY"

    def test_internal_dependency_where_the_pool_may_not_grow(self, rig: Rig) -> None:
        case = freed(rig, "001", max_size=32 * MiB)
        case.free_pending()
        assert rig.query(case.second) == "SUCCESS"
        assert case.reused(case.second)
        assert rig.held(case.second)
        case.gate.open()
        assert rig.executed(case.second)

    def test_no_internal_dependency_where_the_pool_may_grow(self, rig: Rig) -> None:
        case = freed(rig, "001")
        case.free_pending()
        assert not case.reused(case.second)
        assert rig.reserved(case.pool) == 64 * MiB
        assert rig.query(case.second) == "SUCCESS"

    def test_no_internal_dependency_where_the_end_of_the_pool_is_enough(self, rig: Rig) -> None:
        case = freed(rig, "001", max_size=32 * MiB)
        case.free_pending()
        small = rig.allocate(case.pool, 4 * MiB, case.second)
        assert int(small) - int(case.pointer) == 20 * MiB
        assert rig.query(case.second) == "SUCCESS"
        assert case.reused(case.second)
        assert rig.held(case.second)

    def test_host_synchronised(self, rig: Rig) -> None:
        case = freed(rig, "000")
        case.free()
        value(rig.raw.cuStreamSynchronize(case.first))
        assert case.reused(case.second)


class TestEventDependencies:
    """With FOLLOW_EVENT_DEPENDENCIES alone."""

    def test_over_a_third_stream(self, rig: Rig) -> None:
        case, third = freed(rig, "100"), rig.stream()
        case.free_pending()
        case.order(case.second, after=case.first)
        case.order(third, after=case.second)
        assert case.reused(third)
        assert rig.held(third)

    def test_event_recorded_before_the_free(self, rig: Rig) -> None:
        case = freed(rig, "100")
        case.gate.hold(case.first)
        event = case.recorded(case.first)
        case.free()
        value(rig.raw.cuStreamWaitEvent(case.second, event, 0))
        assert not case.reused(case.second)

    def test_event_complete_when_waited_for(self, rig: Rig) -> None:
        case = freed(rig, "100")
        case.free()
        event = case.recorded(case.first)
        assert rig.executed(case.first)
        value(rig.raw.cuStreamWaitEvent(case.second, event, 0))
        assert case.reused(case.second)

    def test_freed_on_a_blocking_stream_allocated_on_the_legacy_one(self, rig: Rig) -> None:
        case = freed(rig, "100", first=BLOCKING)
        case.free_pending()
        assert case.reused(LEGACY)
        assert rig.reserved(case.pool) == 32 * MiB

    def test_freed_on_the_legacy_stream_allocated_on_a_blocking_one(self, rig: Rig) -> None:
        first, second = rig.stream(BLOCKING), rig.stream(BLOCKING)
        case = Freed(rig, rig.pool(UINT64_MAX, "100"), LEGACY, second)
        case.gate.hold(first)
        case.free()
        assert case.reused(second)
        assert rig.reserved(case.pool) == 32 * MiB

    def test_legacy_work_between_two_blocking_streams(self, rig: Rig) -> None:
        case = freed(rig, "100", first=BLOCKING, second=BLOCKING)
        pointer = rig.plain(64)
        case.free_pending()
        value(rig.raw.cuMemsetD8Async(pointer, 1, 64, LEGACY))
        assert case.reused(case.second)


def host_copy(case: Freed, stream: Any) -> None:
    target, source = np.zeros(4, np.uint8), case.rig.plain(4096)
    if stream is None:
        value(case.raw.cuMemcpyDtoH(target, source, 4))
    else:
        value(case.raw.cuMemcpyDtoHAsync(target, source, 4, stream))


def synchronize_dependent(case: Freed) -> None:
    case.order(case.second, after=case.first)
    value(case.raw.cuStreamSynchronize(case.second))


def push_and_pop(case: Freed) -> None:
    value(case.raw.cuCtxPushCurrent(case.rig.context))
    value(case.raw.cuCtxPopCurrent())


# What the host may do after the first stream has executed the free, and whether it knows of the free by that.
CALLS: dict[str, tuple[bool, Callable[[Freed, Any], object]]] = {
    "nothing": (False, lambda case, event: None),
    "cuStreamQuery": (False, lambda case, event: value(case.raw.cuStreamQuery(case.first))),
    "cuEventQuery": (False, lambda case, event: value(case.raw.cuEventQuery(event))),
    "cuEventSynchronize": (True, lambda case, event: value(case.raw.cuEventSynchronize(event))),
    "cuCtxSynchronize": (True, lambda case, event: value(case.raw.cuCtxSynchronize())),
    "cuStreamSynchronize of another stream": (
        False,
        lambda case, event: value(case.raw.cuStreamSynchronize(case.second)),
    ),
    "cuStreamSynchronize of the legacy stream": (
        False,
        lambda case, event: value(case.raw.cuStreamSynchronize(LEGACY)),
    ),
    "cuMemcpyDtoH": (False, lambda case, event: host_copy(case, None)),
    "cuMemPoolTrimTo": (False, lambda case, event: value(case.raw.cuMemPoolTrimTo(case.pool, 0))),
}
ONLY_FOR_REUSE: dict[str, tuple[bool, Callable[[Freed, Any], object]]] = {
    "cuMemcpyDtoHAsync to pageable memory": (False, lambda case, event: host_copy(case, case.first)),
    "cuMemAlloc and cuMemFree": (
        False,
        lambda case, event: value(case.raw.cuMemFree(value(case.raw.cuMemAlloc(4)))),
    ),
    "cuStreamSynchronize of a dependent stream": (True, lambda case, event: synchronize_dependent(case)),
}
ONLY_FOR_RELEASE: dict[str, tuple[bool, Callable[[Freed, Any], object]]] = {
    "cuMemGetInfo": (False, lambda case, event: value(case.raw.cuMemGetInfo())),
    "cuCtxPushCurrent and cuCtxPopCurrent": (False, lambda case, event: push_and_pop(case)),
}


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_REUSE)
def test_another_stream_reuses_after(rig: Rig, name: str) -> None:
    visible, call = (CALLS | ONLY_FOR_REUSE)[name]
    case = freed(rig, "000")
    case.free()
    event = case.recorded(case.first)
    assert rig.executed(case.first)
    call(case, event)
    assert case.reused(case.second) == visible
    reserved = (32 if visible else 64) * MiB
    assert rig.stats(case.pool) == Stats(reserved, reserved, SIZE, SIZE)


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_RELEASE)
def test_pool_releases_after(rig: Rig, name: str) -> None:
    visible, call = (CALLS | ONLY_FOR_RELEASE)[name]
    case = Freed(rig, rig.pool(0), rig.stream(), rig.stream())
    case.free()
    event = case.recorded(case.first)
    assert rig.executed(case.first)
    call(case, event)
    assert rig.stats(case.pool) == Stats(0 if visible else 32 * MiB, 32 * MiB, 0, SIZE)


def test_pool_releases_not_for_an_event_recorded_before_the_free(rig: Rig) -> None:
    case = Freed(rig, rig.pool(0), rig.stream(), rig.stream())
    event = case.recorded(case.first)
    case.free_executed()
    value(rig.raw.cuEventSynchronize(event))
    assert rig.reserved(case.pool) == 32 * MiB
    value(rig.raw.cuStreamSynchronize(case.second))
    assert rig.reserved(case.pool) == 32 * MiB
    value(rig.raw.cuStreamSynchronize(case.first))
    assert rig.reserved(case.pool) == 0


class TestDestroyedStreams:
    def test_show_their_frees(self, rig: Rig) -> None:
        stream, other, pool = rig.disown(rig.stream()), rig.stream(), rig.pool(UINT64_MAX, "000")
        first = rig.allocate(pool, 20 * MiB, stream)
        rig.free(first, stream)
        assert rig.executed(stream)
        value(rig.raw.cuStreamDestroy(stream))
        assert int(rig.allocate(pool, 20 * MiB, other)) == int(first)

    def test_apply_the_release_threshold(self, rig: Rig) -> None:
        stream, pool = rig.disown(rig.stream()), rig.pool(0)
        rig.free(rig.allocate(pool, 20 * MiB, stream), stream)
        assert rig.executed(stream) and rig.reserved(pool) == 32 * MiB
        value(rig.raw.cuStreamDestroy(stream))
        assert rig.reserved(pool) == 0

    def test_show_pending_frees_once_they_have_run(self, rig: Rig) -> None:
        stream, other, gate = rig.disown(rig.stream()), rig.stream(), rig.gate()
        pool = rig.pool(UINT64_MAX, "000")
        first = rig.allocate(pool, 20 * MiB, stream)
        gate.hold(stream)
        rig.free(first, stream)
        done = rig.event()
        value(rig.raw.cuEventRecord(done, stream))
        value(rig.raw.cuStreamDestroy(stream))
        assert int(rig.allocate(pool, 20 * MiB, other)) != int(first)
        gate.open()
        end = time.monotonic() + 5
        while said(rig.raw.cuEventQuery(done)) == "NOT_READY" and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)
        assert int(rig.allocate(pool, 20 * MiB, other)) == int(first)


def test_synchronising_with_a_context_s_event_shows_no_frees(rig: Rig) -> None:
    stream, event, pool = rig.stream(), rig.event(), rig.pool(0, "000")
    rig.free(rig.allocate(pool, 20 * MiB, stream), stream)
    value(rig.raw.cuCtxRecordEvent(rig.context, event))
    value(rig.raw.cuEventSynchronize(event))
    assert rig.reserved(pool) == 32 * MiB


@pytest.mark.parametrize("asks", ["own", "another"])
@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ("", True),
        ("event", True),
        ("event record", True),
        ("event allocate", True),
        ("event fill", False),
        ("event free", False),
        ("event gate", False),
        ("event fill event", False),
        ("fill event", True),
        ("fill event fill", True),
        ("gate fill", True),
        ("gate event fill", True),
        ("gate fill event", True),
        ("shared", True),
    ],
    ids=lambda given: (given or "nothing") if isinstance(given, str) else None,
)
def test_a_free_is_known_once_the_next_command_is_reached(rig: Rig, asks: str, steps: str, known: bool) -> None:
    """A command of the same stream takes the mark along, behind the events that it waits for. Where nothing is left to
    do, no mark is needed; a record without time and an allocation are nothing to do, and no commands. A record of an
    event of several processes is a command before it waits for the event's earlier record.
    """
    pool, elsewhere = rig.pool(UINT64_MAX), rig.pool(UINT64_MAX)
    stream, held, gate, plain, event = rig.stream(), rig.stream(), rig.gate(), rig.plain(512), rig.event()
    freed = rig.allocate(pool, 8 * MiB, stream)
    rig.free(freed, stream)
    assert rig.executed(stream)
    for step in steps.split():
        if step == "event":
            gate.hold(held)
            value(rig.raw.cuEventRecord(event, held))
            value(rig.raw.cuStreamWaitEvent(stream, event, 0))
        elif step == "gate":
            gate.hold(stream)
        elif step == "shared":  # this record waits for the earlier one
            gate.hold(held)
            shared = rig.event(UNTIMED | INTERPROCESS)
            for recorder in (held, stream):
                value(rig.raw.cuEventRecord(shared, recorder))
        elif step == "fill":
            value(rig.raw.cuMemsetD8Async(plain, 0, 512, stream))
        elif step == "record":
            value(rig.raw.cuEventRecord(rig.event(), stream))
        else:
            pointer = rig.allocate(elsewhere, MiB, stream)
            if step == "free":
                rig.free(pointer, stream)
    time.sleep(0.001)  # the device reaches the gate
    joined = rig.allocate(pool, 16 * MiB, stream if asks == "own" else rig.stream())
    assert joined - freed == (0 if known else 8 * MiB)


@pytest.mark.parametrize("again", [False, True], ids=["of what it gets", "of something else"])
def test_who_waits_for_memory_waits_for_the_last_free_of_the_stream(rig: Rig, again: bool) -> None:
    pool, elsewhere = rig.pool(UINT64_MAX, "001", max_size=32 * MiB), rig.pool(UINT64_MAX)
    freeing, asking, gate = rig.stream(), rig.stream(), rig.gate()
    freed, other = rig.allocate(pool, SIZE, freeing), rig.allocate(elsewhere, MiB, freeing)
    rig.free(freed, freeing)
    assert rig.executed(freeing)
    gate.hold(freeing)
    if again:
        rig.free(other, freeing)
    assert rig.allocate(pool, SIZE, asking) == freed
    assert rig.held(asking) == again
