"""The cases of PyTorch's sanitizer, ``test/test_cuda_sanitizer.py``."""

from __future__ import annotations

import streamalloc as sa
from tests.driver.checker.corpus.bench import Bench, hazard


@hazard("race")
def torch_simple_error(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    (b.read if right else b.write)(x, b.b)
    b.done(x)


@hazard("race")
def torch_simple_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    if right:
        b.order(b.a, b.b)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_reads_check_last_write(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    b.b.wait(event)
    b.read(x, b.b)
    if right:
        b.c.wait(event)
    b.read(x, b.c)
    b.done(x)


@hazard("race")
def torch_branch_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    for stream in (b.b, b.c):
        stream.wait(event)
        b.read(x, stream)
    if right:
        b.b.wait(b.c)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_chain_sync(b: Bench, right: bool) -> None:
    x = _ready(b)
    streams = [b.stream() for _ in range(11)]
    b.read(x, streams[0])
    for number in range(10):
        if right or number != 5:
            b.order(streams[number], streams[number + 1])
    b.write(x, streams[10])
    b.done(x)


@hazard("race")
def torch_expired_record(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    event = b.a.record(b.event())
    b.read(x, b.a)
    if right:
        b.a.record(event)
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)


@hazard("race")
def torch_deleted_record(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.read(x, b.a)
    event = sa.Event(b.device)
    b.a.record(event)
    if not right:
        event.close()
        event = sa.Event(b.device)  # which may have the same handle
    b.b.wait(event)
    b.write(x, b.b)
    b.done(x)
    event.close()


@hazard("race")
def torch_all_reads_checked(b: Bench, right: bool) -> None:
    x = _ready(b)
    events = []
    for _ in range(10):
        stream = b.stream()
        b.read(x, stream)
        events.append(stream.record(b.event()))
    for event in events if right else events[:-1]:
        b.a.wait(event)
    b.write(x, b.a)
    b.done(x)


@hazard("race")
def torch_multiple_errors(b: Bench, right: bool) -> None:
    several = [_ready(b) for _ in range(10)]
    for x in several:
        b.write(x, b.a)
    if right:
        b.b.wait(b.a)
    for x in several:
        b.write(x, b.b)
    b.done(*several)


@hazard("race")
def torch_correct_state_merging(b: Bench, right: bool) -> None:
    x, y = _ready(b), _ready(b)
    b.write(x, b.a)
    b.write(y, b.b)
    one, two = b.a.record(b.event()), b.b.record(b.event())
    b.write(x, b.a)
    b.write(y, b.b)
    b.b.wait(one)
    b.a.wait(two)
    if right:
        b.order(b.b, b.a)
    b.write(x, b.a)
    b.write(y, b.a)
    b.done(x, y)


@hazard("race")
def torch_record_override(b: Bench, right: bool) -> None:
    x, y = _ready(b), _ready(b)
    b.read(x, b.a)
    b.read(y, b.b)
    event = b.event()
    for stream in (b.b, b.a) if right else (b.a, b.b):
        stream.record(event)
    b.c.wait(event)
    b.write(x, b.c)
    b.done(x, y)


@hazard("race")
def torch_multiple_wait(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    event = b.a.record(b.event())
    b.b.wait(event)
    if right:
        b.c.wait(event)
    b.read(x, b.b)
    b.read(x, b.c)
    b.done(x)


@hazard("race")
def torch_device_and_stream_synchronize(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    (b.a if right else b.c).synchronize()
    b.write(x, b.b)
    b.device.synchronize()
    b.write(x, b.c)
    b.done(x)


@hazard("race")
def torch_a_new_stream_knows_what_the_host_knows(b: Bench, right: bool) -> None:
    x = _ready(b)
    b.write(x, b.a)
    early = b.stream()
    if right:
        b.a.synchronize()
    b.write(x, early)
    b.done(x)


def _ready(b: Bench) -> sa.Buffer:
    x = b.new(b.a)
    b.a.synchronize()
    return x
