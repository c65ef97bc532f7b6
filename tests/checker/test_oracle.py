"""Random programs: the checker against a search of the graph of all that they do.

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
import random
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
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
