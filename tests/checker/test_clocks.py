"""Vector clocks against the graph that they stand for, which is searched by brute force."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as some

from streamalloc.checker.clocks import BY_CHOICE, CERTAIN, UNORDERED, Clock, Obstacle, Timeline, TrackedStream
from tests.checker.test_oracle import Oracle

STREAMS, EVENTS = 5, 3  # 0 is the legacy stream, 1 and 2 take turns with it, 3 and 4 do not
STEPS = some.lists(
    some.tuples(
        some.sampled_from(["work", "work", "record", "wait", "synchronise", "wait on the host", "hold", "let go"]),
        some.integers(0, STREAMS - 1),
        some.integers(0, EVENTS - 1),
    ),
    max_size=40,
)


def streams_of(timeline: Timeline) -> list[TrackedStream]:
    legacy = timeline.stream("legacy")
    return [legacy, *(timeline.stream(str(n), legacy=legacy if n < 3 else None) for n in range(1, STREAMS))]


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_clocks_say_what_the_graph_says(steps: list[tuple[str, int, int]]) -> None:
    timeline, graph = Timeline(), Oracle()
    streams = streams_of(timeline)
    last: list[int | None] = [None] * STREAMS
    marks: list[tuple[Obstacle, int] | None] = [None] * EVENTS
    host: int | None = None
    done: list[tuple[int, int, int, Clock]] = []  # node, stream, time, what comes before

    def node(which: int, *before: int | None) -> int:
        neighbours = last if which == 0 else [last[0]] if which < 3 else []
        inside = [one for number, one in enumerate(neighbours) if which or number < 3]
        last[which] = graph.add(last[which], host, *inside, *before)
        return last[which]  # type: ignore[return-value]

    for kind, which, event in steps:
        stream = streams[which]
        mark = marks[event]
        if kind == "work":
            made = node(which)
            timeline.submit(stream, lambda s, n=made, w=which: done.append((n, w, s.time, s.clock.copy())))  # type: ignore[misc]
        elif kind == "record":
            marks[event] = (timeline.record(stream), node(which))
        elif kind == "wait" and mark is not None:
            timeline.wait(stream, mark[0])
            node(which, mark[1])
        elif kind == "synchronise":
            goals = streams[:3] if which == 0 else [stream]
            # As the host waits for what was queued, and not for what it does not order.
            host = graph.add(host, *(last[streams.index(one)] for one in goals))
            for one in goals:
                timeline.host_observes(one.clock)
        elif kind == "wait on the host" and mark is not None:
            assert mark[0].clock is not None
            host = graph.add(host, mark[1])
            timeline.host_observes(mark[0].clock)
    for first, where, time, _ in done:
        for other, there, _, clock in done:
            if first < other:
                expected = where == there or first in graph.reached(other)
                found = timeline.order(clock, streams[where].number, time)
                assert (found == CERTAIN) == expected, (steps, first, other)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_streams_that_are_held_do_all_in_order_when_they_may(steps: list[tuple[str, int, int]]) -> None:
    """Whatever is held and let go: each stream does what it was told in order, and never before what it waits for."""
    timeline = Timeline()
    streams = streams_of(timeline)
    marks: list[Obstacle | None] = [None] * EVENTS
    holds: list[Obstacle] = []
    told: list[list[int]] = [[] for _ in streams]
    did: list[list[int]] = [[] for _ in streams]
    for number, (kind, which, event) in enumerate(steps):
        stream, mark = streams[which], marks[event]
        if kind == "work":
            told[which].append(number)
            timeline.submit(stream, lambda _, n=number, w=which: did[w].append(n))  # type: ignore[misc]
        elif kind == "record":
            marks[event] = timeline.record(stream)
        elif kind == "wait" and mark is not None:
            timeline.wait(stream, mark)
        elif kind == "hold":
            holds.append(Obstacle())
            timeline.wait(stream, holds[-1])
        elif kind == "let go" and holds:
            timeline.end(holds.pop(event % len(holds)), timeline.host)
        elif kind == "synchronise":
            timeline.force(stream)
            assert did[which] == told[which]
        for one, other in zip(did, told, strict=True):
            assert one == other[: len(one)]
    for hold in holds:
        timeline.end(hold, timeline.host)
    assert did == told and not timeline.waiting
    assert all(not stream.queue for stream in streams)


def test_what_the_driver_chose_is_kept_apart() -> None:
    timeline = Timeline()
    one, two, three = (timeline.stream(name) for name in "abc")
    timeline.submit(one, lambda stream: None)
    timeline.submit(two, lambda stream: timeline.chosen(one.clock.copy(), stream))
    mark = timeline.record(two)
    timeline.wait(three, mark)
    assert timeline.order(two.clock, one.number, one.time) == BY_CHOICE
    assert timeline.order(three.clock, one.number, one.time) == BY_CHOICE
    assert timeline.order(three.clock, two.number, two.time) == CERTAIN
    timeline.host_observes(one.clock)
    timeline.submit(three, lambda stream: None)
    assert timeline.order(three.clock, one.number, one.time) == CERTAIN
    assert timeline.order(one.clock, three.number, 1) == UNORDERED


def test_choices_lead_to_others() -> None:
    """A chain through one stream after the other, with steps that the program asked for between them."""
    timeline = Timeline()
    streams = [timeline.stream(str(number)) for number in range(6)]
    timeline.submit(streams[0], lambda stream: None)
    for one, other in itertools.pairwise(streams):
        if one.number % 2:
            timeline.submit(other, lambda stream, one=one: timeline.chosen(one.clock.copy(), stream))  # type: ignore[misc]
        else:
            timeline.wait(other, timeline.record(one))
    first, last = streams[0], streams[-1]
    assert timeline.order(last.clock, first.number, 1) == BY_CHOICE
    assert timeline.order(first.clock, last.number, 1) == UNORDERED


def test_streams_that_are_gone_leave_no_trace() -> None:
    timeline = Timeline()
    stays = timeline.stream("stays")
    for number in range(500):
        passing = timeline.stream(str(number))
        timeline.submit(passing, lambda stream: None)
        timeline.retire(passing)
        timeline.host_observes(passing.clock)
        timeline.submit(stays, lambda stream: None)
        assert timeline.order(stays.clock, passing.number, 1) == CERTAIN
    assert len(stays.clock.known) < 100 and len(timeline.host.known) < 100 and len(timeline._live) < 100


def test_records_bring_nothing_back() -> None:
    """Published records and marks of events have the numbers of streams and threads that ended since."""
    timeline = Timeline()
    mark = None
    for _ in range(200):
        stream, thread = timeline.stream("a"), timeline.thread("b")
        timeline.host_acts(thread)
        timeline.submit(stream, lambda stream: timeline.published.learn(stream.clock))
        mark = timeline.record(stream)
        timeline.retire(stream)
        timeline.ended_threads.append(thread.number)
        assert mark.clock is not None
        timeline.host_observes(mark.clock)
        timeline.host_observes(timeline.published)
    assert len(timeline.host.known) < 100 and len(timeline.published.known) < 100
    assert mark is not None and mark.clock is not None and len(mark.clock.known) < 100


def test_a_word_may_have_been_written_by_either() -> None:
    """Only what comes before both is certain."""
    first: dict[int, int] = {1: 5, 2: 3}
    assert Clock(first).common(Clock({1: 4, 3: 9})).known == {1: 4, 2: 0}
