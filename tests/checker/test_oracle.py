"""Random programs: the checker, and its vector clocks, against a search of the graph of all that they do.

The oracle is the definition of a race, written down without the checker's means. It knows nothing of clocks, intervals
or obstacles. It notes each operation with those that come right before it: the one before on its stream, the recording
that it waits for, what the host knew at the call, and the legacy stream's turns. Two uses of the same bytes, of which
one is a write, race if no way through these notes leads from one to the other. The search is slow, so programs are
short.

Clocks may lose an order (a false report) or invent one (a miss), above all where a stream waits for something that the
host causes later, and its operations are judged at another time than they were queued. So both must agree: on programs
with races, and on those without. Of the latter, a second run with random legal delays must leave the same bytes, which
tests the oracle against the simulated scheduler.
"""

import ctypes
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.checker.clocks import BY_CHOICE, CERTAIN, UNORDERED, Clock, Obstacle, Timeline, TrackedStream
from streamalloc.driver.bindings import cuda
from tests.support import KEEP, read

SIZE = 256
BLOCKING = (True, True, True, False, False)  # the first is the legacy stream, which the next two take turns with
Use = tuple[int, int, int, bool]
KINDS = {
    "fill": 8, "copy": 4, "record": 6, "wait": 8, "synchronise": 1, "happened": 1, "all": 0.3, "query": 0.7, "new": 1,
    "free": 1, "graph": 1, "launch": 2, "write word": 1.5, "wait word": 1.5, "hold": 0.7, "let go": 1,
}  # fmt: skip


class Oracle:
    """Operations, what each comes right after, and what it uses."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.uses: list[list[Use]] = []

    def add(self, *before: int | None, uses: list[Use] | None = None) -> int:
        self.before.append({one for one in before if one is not None})
        self.uses.append(uses or [])
        return len(self.before) - 1

    def reached(self, last: int) -> set[int]:
        found, todo = {last}, [last]
        while todo:
            fresh = self.before[todo.pop()] - found
            found |= fresh
            todo += fresh
        return found

    def racing(self) -> bool:
        using = [number for number, uses in enumerate(self.uses) if uses]
        reached = {number: self.reached(number) for number in using}
        return any(
            one not in reached[other] and other not in reached[one] and self._clash(one, other)
            for one in using
            for other in using
            if one < other
        )

    def _clash(self, one: int, other: int) -> bool:
        return any(
            a == b and low < end and start < high and (writes or also)
            for a, low, high, writes in self.uses[one]
            for b, start, end, also in self.uses[other]
        )


class Program:
    """A program that a number makes, run on a checked driver and told to the oracle."""

    def __init__(self, seed: int, driver: Any) -> None:
        self.choose = random.Random(seed)
        self.care = (0.0, 0.7, 0.9, 1.0)[seed % 4]
        """Share of the uses before which a stream waits for all others."""
        self.driver = driver
        self.device = sa.Device(0, driver=self.driver)
        own = [self.device.create_stream(blocking=blocking) for blocking in BLOCKING[1:]]
        self.streams = [self.device.default_stream, *own]
        self.pool = sa.MemoryPool(self.device, release_threshold=KEEP)
        self.events = [self.device.create_event() for _ in range(3)]
        self.oracle = Oracle()
        self.last: list[int | None] = [None] * len(self.streams)
        self.host: int | None = None
        self.marks: list[int | None] = [None] * len(self.events)
        self.buffers: list[tuple[sa.Buffer, int]] = []
        self.made = 0
        self.graphs: list[tuple[sa.Graph, list[Use], set[int]]] = []
        self.launched: dict[int, int] = {}
        self.values = int(self.raw("cuMemHostAlloc", 512, 0)[1])
        ctypes.memset(self.values, 0, 512)
        self.written: list[int] = []
        self.gates = 0
        self.value = 0
        self.left: list[bytes] = []
        """Contents of the buffers at the end."""
        self.held: tuple[int, int] | None = None

    def raw(self, name: str, *args: Any) -> Any:
        with self.device.current():
            answer = getattr(self.driver, name)(*args)
        assert not answer[0]
        return answer

    def word(self, number: int) -> int:
        return self.values + 4 * (number % 128)

    def node(self, which: int, *before: int | None, uses: list[Use] | None = None) -> int:
        turns = self.last[1:3] if which == 0 else self.last[:1] if BLOCKING[which] else []
        made = self.last[which] = self.oracle.add(self.last[which], self.host, *turns, *before, uses=uses)
        return made

    def knows(self, *marks: int | None) -> None:
        self.host = self.oracle.add(self.host, *marks)

    def all_of(self, which: int) -> list[int | None]:
        return self.last[:3] if which == 0 else [self.last[which]]

    def order(self, which: int) -> None:
        if self.choose.random() < self.care:
            for other, stream in enumerate(self.streams):
                if other != which:
                    self.streams[which].wait(stream)
                    self.node(which, self.node(other))

    def fill(self, memory: sa.Memory, stream: sa.Stream) -> None:
        self.value = self.value % 255 + 1
        memory.fill(self.value, stream)

    def new(self, which: int) -> None:
        self.made += 1
        self.buffers.append((self.pool.allocate(SIZE, self.streams[which]), self.made))
        self.node(which, uses=[(self.made, 0, SIZE, True)])

    def let_go(self) -> None:
        """Open the gate, which the host does when it knows what it knows."""
        if self.held is None:
            return
        gate, waiting = self.held
        ctypes.c_uint32.from_address(self.word(-gate)).value = 1
        if self.host is not None:
            self.oracle.before[waiting].add(self.host)
        self.held = None
        # The checker looks at words when it is called.
        self.device.create_event().query()

    def step(self) -> None:
        choose = self.choose
        kind = choose.choices(list(KINDS), list(KINDS.values()))[0]
        which, event = choose.randrange(len(self.streams)), choose.randrange(len(self.events))
        if kind in ("synchronise", "happened", "all", "query", "let go"):
            self.let_go()
        if kind in ("fill", "copy", "free", "launch") and len(self.buffers) > 1:
            self.order(which)
        if kind in ("fill", "copy", "new", "free", "graph", "launch"):
            self.work(kind, which)
        elif kind in ("write word", "wait word", "hold"):
            if not self.held:
                self.use_word(kind, which)
        else:
            self.wait(kind, which, event)

    def wait(self, kind: str, which: int, event: int) -> None:
        stream = self.streams[which]
        if kind == "record":
            stream.record(self.events[event])
            self.marks[event] = self.node(which)
        elif kind == "wait":
            stream.wait(self.events[event])
            if self.marks[event] is not None:
                self.node(which, self.marks[event])
        elif kind == "synchronise":
            stream.synchronize()
            self.knows(*self.all_of(which))
        elif kind == "happened":
            self.events[event].synchronize()
            self.knows(self.marks[event])
        elif kind == "all":
            self.device.synchronize()
            self.knows(*self.last)
        elif kind == "query":
            while not stream.query():
                pass
            self.knows(*self.all_of(which))

    def work(self, kind: str, which: int) -> None:
        choose, stream = self.choose, self.streams[which]
        if kind == "fill":
            (memory, named), low, high = choose.choice(self.buffers), choose.choice([0, 64]), choose.choice([128, SIZE])
            self.fill(memory[low:high], stream)
            self.node(which, uses=[(named, low, high, True)])
        elif kind == "copy" and len(self.buffers) > 1:
            (one, first), (other, second) = choose.sample(self.buffers, 2)
            low, at = choose.choice([0, 64, 128]), choose.choice([0, 64, 128])
            one[low : low + 128].copy_to(other[at : at + 128], stream)
            self.node(which, uses=[(first, low, low + 128, False), (second, at, at + 128, True)])
        elif kind == "new" and len(self.buffers) < 4:
            self.new(which)
            self.fill(self.buffers[-1][0], stream)
        elif kind == "free" and len(self.buffers) > 1:
            memory, named = self.buffers.pop(choose.randrange(len(self.buffers)))
            memory.free(stream)
            self.node(which, uses=[(named, 0, SIZE, True)])
        elif kind == "graph" and len(self.graphs) < 2:
            self.capture(choose.choice(self.buffers), choose.choice(self.buffers), choose.random() < 0.5)
        elif kind == "launch" and self.graphs:
            at = choose.randrange(len(self.graphs))
            graph, uses, named_all = self.graphs[at]
            if named_all <= {named for _, named in self.buffers}:
                graph.launch(stream)
                self.launched[at] = self.node(which, self.launched.get(at), uses=uses)

    def use_word(self, kind: str, which: int) -> None:
        handle, number = cuda.CUstream(self.streams[which].handle), len(self.written)
        if kind == "write word" and number < 100:
            self.raw("cuStreamWriteValue32", handle, self.word(number), 1, 0)
            self.written.append(self.node(which))
        elif kind == "wait word" and self.written:
            at = self.choose.randrange(number)
            self.raw("cuStreamWaitValue32", handle, self.word(at), 1, 0)
            self.node(which, self.written[at])
        elif kind == "hold":
            self.gates += 1
            self.raw("cuStreamWaitValue32", handle, self.word(-self.gates), 1, 0)
            self.held = (self.gates, self.node(which))

    def capture(self, one: tuple[sa.Buffer, int], other: tuple[sa.Buffer, int], joined: bool) -> None:
        main, branch = self.streams[3], self.streams[4]
        with main.capture() as graph:
            self.fill(one[0][:128], main)
            branch.wait(main.record(self.device.create_event()))
            self.fill(other[0][64:192], branch)
            if not joined:
                self.fill(one[0][192:], main)
            main.wait(branch.record(self.device.create_event()))
        uses = [(one[1], 0, 128, True), (other[1], 64, 192, True)]
        uses += [] if joined else [(one[1], 192, SIZE, True)]
        self.graphs.append((graph, uses, {one[1], other[1]}))

    def run(self) -> None:
        for _ in range(2):
            which = self.choose.randrange(len(self.streams))
            self.new(which)
            self.fill(self.buffers[-1][0], self.streams[which])
        if self.choose.random() < max(self.care, 0.7):
            self.device.synchronize()
            self.knows(*self.last)
        for _ in range(self.choose.randrange(4, 26)):
            self.step()
        self.let_go()
        self.device.synchronize()
        for memory, _ in self.buffers:
            self.left.append(bytes(read(memory)))
            memory.free(self.streams[0])
        self.device.synchronize()
        for graph, _, _ in self.graphs:
            graph.close()
        self.raw("cuMemFreeHost", self.values)
        for owner in (*self.streams[1:], *self.events, self.pool):
            owner.close()


def agrees(seed: int) -> bool:
    """Whether checker and oracle say the same; and of what both let pass, all legal orders leave the same bytes."""
    program = Program(seed, sd.checked(sd.simulated()))
    program.run()
    found = bool(program.driver.hazards)
    if found != program.oracle.racing():
        return False
    if found:
        return True
    again = Program(seed, sd.simulated(seed=1 + seed))
    again.run()
    return again.left == program.left


@pytest.mark.simulated_only("its orders are those of the simulated scheduler")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_checker_finds_what_a_search_finds(first: int) -> None:
    for seed in range(first, first + 10):
        assert agrees(seed), seed


# -- vector clocks against the graph that they stand for, which is searched by brute force ----------------------------


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
