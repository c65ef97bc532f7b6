"""When freed memory is used again: the three policies, and which calls tell the host of an executed free."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import INTERPROCESS, LEGACY, UNTIMED
from tests.facts.pool_programs import run
from tests.facts.support import UINT64_MAX, MiB, Rig, Stats, value

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
        self.pointer = self.rig.allocate(self.pool, SIZE, self.first)

    def free(self) -> None:
        self.rig.free(self.pointer, self.first)

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


REUSES: dict[str, str] = {
    "same stream, free pending": "000: a=s:20, hold s, a>s, c=s:20 @0 =32",
    "ordered by an event after the pending free, no policy": (
        "000: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @!0 =64, held t"
    ),
    "ordered by an event after the pending free, opportunistic": (
        "010: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @!0 =64, held t"
    ),
    "ordered by an event after the pending free, events": "100: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @0 =32, held t",
    "ordered by an event after the pending free, both": "110: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @0 =32, held t",
    "free executed, not synchronised, no policy": "000: a=s:20, a>s, c=t:20 @!0 =64",
    "free executed, not synchronised, opportunistic": "010: a=s:20, a>s, c=t:20 @0 =32",
    "free pending and no dependency, events": "100: a=s:20, hold s, a>s, c=t:20 @!0",
    "free pending and no dependency, both": "110: a=s:20, hold s, a>s, c=t:20 @!0",
    "free pending and the pool may not grow": "000/32: a=s:20, hold s, a>s, t:20!",
    "internal dependency where the pool may not grow": "001/32: a=s:20, hold s, a>s, idle t, c=t:20 @0, held t, open",
    "no internal dependency where the pool may grow": "001: a=s:20, hold s, a>s, c=t:20 @!0 =64, idle t",
    "no internal dependency where the end of the pool is enough": (
        "001/32: a=s:20, hold s, a>s, c=t:4 @20, idle t, d=t:20 @0, held t"
    ),
    "host synchronised": "000: a=s:20, a>s, sync s, c=t:20 @0",
    "by events over a third stream": "100: a=s:20, hold s, a>s, s>e, e>t, t>f, f>u, c=u:20 @0, held u",
    "by an event that was complete when waited for": "100: a=s:20, a>s, s>e, e>t, c=t:20 @0",
    "freed on a blocking stream, allocated on the legacy one": "100: a=b:20, hold b, a>b, c=L:20 @0 =32",
    "freed on the legacy stream, allocated on a blocking one": "100: a=L:20, hold b, a>L, c=b2:20 @0 =32",
    "legacy work between two blocking streams": "100: a=b:20, hold b, a>b, fill L, c=b2:20 @0",
    "a destroyed stream shows its frees": "000: a=s:20, a>s, end s, c=t:20 @0",
    "a destroyed stream applies the release threshold": "111: keep 0, a=s:20, a>s =32, end s =0",
    "a destroyed stream shows pending frees once they have run": (
        "000: a=s:20, hold s, a>s, s>e, end s, c=t:20 @!0, open, reached e, d=t:20 @0"
    ),
    "an event recorded before the free releases nothing": (
        "111: keep 0, a=s:20, s>e, a>s, await e =32, sync t =32, sync s =0"
    ),
}


@pytest.mark.parametrize("name", REUSES)
def test_reuse(rig: Rig, name: str) -> None:
    run(rig, REUSES[name])


def test_event_recorded_before_the_free(rig: Rig) -> None:
    run(rig, "100: a=s:20, hold s, s>e, a>s, e>t, c=t:20 @!0")


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


Act = Callable[[Freed, Any], object]
# What the host may do after the first stream has executed the free.
CALLS: dict[str, Act] = {
    "nothing": lambda case, event: None,
    "cuStreamQuery": lambda case, event: value(case.raw.cuStreamQuery(case.first)),
    "cuEventQuery": lambda case, event: value(case.raw.cuEventQuery(event)),
    "cuStreamSynchronize of another stream": lambda case, event: value(case.raw.cuStreamSynchronize(case.second)),
    "cuStreamSynchronize of the legacy stream": lambda case, event: value(case.raw.cuStreamSynchronize(LEGACY)),
    "cuMemcpyDtoH": lambda case, event: host_copy(case, None),
    "cuMemPoolTrimTo": lambda case, event: value(case.raw.cuMemPoolTrimTo(case.pool, 0)),
    "cuEventSynchronize": lambda case, event: value(case.raw.cuEventSynchronize(event)),
    "cuCtxSynchronize": lambda case, event: value(case.raw.cuCtxSynchronize()),
}
ONLY_FOR_REUSE: dict[str, Act] = {
    "cuMemcpyDtoHAsync to pageable memory": lambda case, event: host_copy(case, case.first),
    "cuMemAlloc and cuMemFree": lambda case, event: value(case.raw.cuMemFree(value(case.raw.cuMemAlloc(4)))),
    "cuStreamSynchronize of a dependent stream": lambda case, event: synchronize_dependent(case),
}
ONLY_FOR_RELEASE: dict[str, Act] = {
    "cuMemGetInfo": lambda case, event: value(case.raw.cuMemGetInfo()),
    "cuCtxPushCurrent and cuCtxPopCurrent": lambda case, event: push_and_pop(case),
}
# Those by which it knows of the free.
TELL = ("cuEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize of a dependent stream")


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_REUSE)
def test_another_stream_reuses_after(rig: Rig, name: str) -> None:
    visible, call = name in TELL, (CALLS | ONLY_FOR_REUSE)[name]
    case = Freed(rig, rig.pool(UINT64_MAX, "000"), rig.stream(), rig.stream())
    case.free()
    event = case.recorded(case.first)
    assert rig.executed(case.first)
    call(case, event)
    assert case.reused(case.second) == visible
    reserved = (32 if visible else 64) * MiB
    assert rig.stats(case.pool) == Stats(reserved, reserved, SIZE, SIZE)


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_RELEASE)
def test_pool_releases_after(rig: Rig, name: str) -> None:
    visible, call = name in TELL, (CALLS | ONLY_FOR_RELEASE)[name]
    case = Freed(rig, rig.pool(0), rig.stream(), rig.stream())
    case.free()
    event = case.recorded(case.first)
    assert rig.executed(case.first)
    call(case, event)
    assert rig.stats(case.pool) == Stats(0 if visible else 32 * MiB, 32 * MiB, 0, SIZE)


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
    time.sleep(0.02)  # the device reaches the gate, also beside other processes
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
