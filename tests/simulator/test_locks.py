"""Locks of what several processes share, each by an interleaving of two holders that goes wrong without it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamalloc.simulator.calls.copies import PlannedCopy
from streamalloc.simulator.calls.multicast import Gather, Update
from streamalloc.simulator.contexts import _RING, TABLE_BYTES, EventTable, SharedEvent
from streamalloc.simulator.errors import Fault
from streamalloc.simulator.memory import Physical
from streamalloc.simulator.multicast import MulticastMemory, MulticastTable, TeamBinding
from streamalloc.simulator.runtime import Functions
from tests.interleaving import interleaved

Tables = tuple[MulticastTable, MulticastTable]


@pytest.fixture
def make() -> Iterator[Callable[[], Tables]]:
    """A function that makes a table for teams of two devices, and returns two of its holders."""
    made: list[MulticastTable] = []

    def begin() -> Tables:
        one = MulticastTable.create("team", 2, 1 << 21, 1)
        made.extend((one, MulticastTable.open(one.physical.fd)))
        return one, made[-1]

    yield begin
    for table in made:
        table.leave()


class TestMulticast:
    def test_holders_have_numbers_of_their_own(self, make: Callable[[], Tables]) -> None:
        opened: list[MulticastTable] = []

        def join(tables: Tables) -> None:
            opened.append(MulticastTable.open(tables[0].physical.fd))

        for _ in interleaved(MulticastTable.__init__, make, join, join, at="line"):
            assert opened[0].holder != opened[1].holder
            for table in opened:
                table.leave()
            opened.clear()

    def test_each_device_is_added(self, make: Callable[[], Tables]) -> None:
        for tables in interleaved(
            MulticastTable.add, make, lambda it: it[0].add(0, True), lambda it: it[1].add(1, True), at="line"
        ):
            assert {*tables[0].devices} == {0, 1}

    @pytest.mark.parametrize("first", ["reads", "binds"])
    def test_a_binding_is_seen(self, make: Callable[[], Tables], first: str) -> None:
        def bind(which: int) -> Callable[[Tables], object]:
            return lambda it: it[which].bind(which, 0, 3, 4, 0, 512)

        reads = first == "reads"
        for tables in interleaved(
            MulticastTable.bindings if reads else MulticastTable.bind,
            make,
            (lambda it: it[0].bindings()) if reads else bind(0),
            bind(1),
            at="line",
        ):
            devices = [binding.device for binding in tables[0].bindings()]
            assert sorted(devices) == ([1] if reads else [0, 1])

    def test_a_removed_binding_is_not_seen(self, make: Callable[[], Tables]) -> None:
        def begin() -> Tables:
            tables = make()
            tables[0].bind(0, 0, 3, 4, 0, 512)
            return tables

        def bind_and_read(tables: Tables) -> None:
            tables[1].bind(1, 0, 3, 4, 0, 512)
            tables[1].bindings()

        for tables in interleaved(MulticastTable._write, begin, lambda it: it[0].unbind(1), bind_and_read):
            assert [binding.device for binding in tables[1].bindings()] == [1]

    def test_a_binding_is_read_as_a_whole(self, make: Callable[[], Tables]) -> None:
        found: list[list[TeamBinding]] = []
        for tables in interleaved(
            MulticastTable._write,
            make,
            lambda it: it[0].bind(0, 0, 3, 4, 0, 512),
            lambda it: found.append(it[1].bindings()),
        ):
            assert found.pop() in ([], tables[0].bindings())

    def test_two_bind_the_same_range(self, make: Callable[[], Tables]) -> None:
        refused: list[bool] = []
        owner = SimpleNamespace(labels=SimpleNamespace(number=lambda device: device))

        def begin() -> Tables:
            tables = make()
            tables[0].add(0, True)
            refused.clear()
            return tables

        def bind(which: int) -> Callable[[Tables], None]:
            def act(tables: Tables) -> None:
                physical = SimpleNamespace(fd=tables[which].physical.fd, seal=lambda: None)
                backing: Any = SimpleNamespace(physical=physical, device=0, start=0, memory=None)
                multicast: Any = SimpleNamespace(table=tables[which], _machine=owner, _bound={})
                try:
                    MulticastMemory.bind(multicast, 0, 512, backing)
                except Fault:
                    refused.append(True)

            return act

        for tables in interleaved(MulticastMemory.bind, begin, bind(0), bind(1), at="line"):
            assert len(refused) == len(tables[0].bindings()) == 1


@pytest.mark.parametrize("kind", [Update, Gather])
def test_replicas_are_used_by_one_process(kind: type[PlannedCopy], monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is a read and a write of each replica; a gather reads all of them."""
    held = [False]

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    def replicas(address: int, size: int) -> dict[int, Any]:
        assert held[0]
        return {}

    table = SimpleNamespace(table=SimpleNamespace(locked=locked))
    operation: Any = kind.__new__(kind)
    operation._machine = SimpleNamespace(team_at=lambda _: (None, table), replicas=replicas)
    operation._target = operation._replicated = operation._done = operation._size = 0
    operation._combine = lambda _: b""
    monkeypatch.setattr(PlannedCopy, "step", lambda _: held[0])
    assert operation.step() == (kind is Update)


@pytest.mark.parametrize("finish", [False, True])
def test_each_recording_of_an_event_has_a_number(finish: bool) -> None:
    """The event of a later one does not become that of an earlier one."""
    numbers: list[int] = []

    def make() -> tuple[SharedEvent, SharedEvent]:
        fd = os.memfd_create("events")
        os.truncate(fd, TABLE_BYTES)
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        numbers.clear()
        first, second = (EventTable(Physical.adopt(one)) for one in (fd, other))
        return SharedEvent(first, 0), SharedEvent(second, 0)

    def record(which: int) -> Callable[[tuple[SharedEvent, SharedEvent]], object]:
        if finish:
            return lambda it: it[which].finish(1 + which * _RING)  # both have one word
        return lambda it: numbers.append(it[which].begin())

    function: Any = SharedEvent.finish if finish else SharedEvent.begin
    for events in interleaved(function, make, record(0), record(1)):
        assert finish or sorted(numbers) == [1, 2]
        assert not finish or events[0].happened(1 + _RING)


def test_the_runtime_retains_a_context_once() -> None:
    """Of two threads that do so at the same time, one releases it again."""
    retained: list[object] = []

    class Driver:
        def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, object]:
            retained.append(device)
            return 0, object()

        def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
            retained.pop()
            return (0,)

    def use(functions: Functions) -> None:
        functions._primary(0)

    for _ in interleaved(Functions._primary, lambda: Functions(Driver()), use, use):
        assert len(retained) == 1
        retained.clear()
