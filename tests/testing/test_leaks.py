"""The leak check: objects and descriptors that a test leaves open."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, multicast, vmm
from streamalloc.driver.bindings import cuda
from streamalloc.driver.internal import Stack, line_of
from streamalloc.testing import machines
from streamalloc.testing.leaks import Accounts, Watch
from tests.testing.conftest import Run

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
PAGE = 2 << 20


class World:
    """A simulated machine of two devices, of which account is kept."""

    def __init__(self) -> None:
        self.driver = Accounts(sd.simulated(devices=2, multicast=True))
        self.device = sa.Device(0, driver=self.driver)
        self.stream = self.device.create_stream()
        self.pool = sa.MemoryPool(self.device, handle_types=POSIX)
        self.buffer = self.pool.allocate(4096, self.stream)

    def found(self, watch: Watch) -> list[tuple[str, Stack]]:
        machines.rest(self.driver)
        leaks = self.driver.leaks()
        known = {self.stream.handle, self.pool.handle, self.buffer.address}
        leaks = [leak for leak in leaks if leak.handle not in known]
        return [
            (str(one).partition("\n")[0], one.place) for one in watch.found(self.driver, leaks, self.driver.exported)
        ]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    # What the first share makes lasts as long as the driver.
    ipc.share(world.buffer)
    yield world
    world.buffer.free()
    world.pool.close()
    world.stream.close()


# By the words that name it: what makes an object; all are closed by close(), and dropped.
OPEN: dict[str, Callable[[World], Any]] = {
    "stream ": lambda world: world.device.create_stream(),
    "event ": lambda world: sa.Event(world.device),
    "pool ": lambda world: sa.MemoryPool(world.device),
    "pool allocation ": lambda world: world.pool.allocate(64, world.stream),
    "CachingAllocator": lambda world: sa.CachingAllocator(world.pool),
    "Listener": lambda world: ipc.Listener(),
    "SelfCommunicator": lambda world: ipc.SelfCommunicator(),
    "Shared POOL_POINTER": lambda world: ipc.share(world.buffer),
    "Shared held": lambda world: ipc.share(world.buffer, hold=True),
    "GrowableBuffer": lambda world: vmm.GrowableBuffer(world.device, 4 * PAGE, PAGE),
    "PhysicalMemory": lambda world: vmm.PhysicalMemory(world.device, PAGE),
    "AddressRange": lambda world: vmm.AddressRange(PAGE, driver=world.driver),
    "SleepGroup": lambda world: vmm.SleepGroup(world.device),
    "MulticastObject": lambda world: multicast.MulticastObject(PAGE, 2, driver=world.driver),
    "file descriptor": lambda world: ipc.Fd(os.dup(0)),
}


@pytest.mark.parametrize("name", OPEN)
def test_an_open_object_is_named_once_with_its_line(world: World, name: str) -> None:
    with Watch() as watch:
        assert world.found(watch) == []
        kept = OPEN[name](world)
        found = world.found(watch)
        assert len(found) == 1, found
        text, place = found[0]
        assert text.startswith(name.partition(" held")[0]), text
        line = OPEN[name].__code__.co_firstlineno
        assert line_of(*place[0]) in (line, line + 1), place
        kept.close() if hasattr(kept, "close") else None
        del kept
        assert world.found(watch) == []


def test_both_ends_of_a_pair(world: World) -> None:
    with Watch() as watch:
        ends = ipc.Channel.pair()
        assert [text.split()[0] for text, _ in world.found(watch)] == ["Channel", "Channel"]
        ends[0].close()
        assert [text.split()[0] for text, _ in world.found(watch)] == ["Channel"]
        ends[1].close()
        assert world.found(watch) == []


def test_a_socket_whose_object_is_gone(world: World) -> None:
    with Watch() as watch:
        ends = ipc.Channel.pair()
        left = ends[0]._socket
        ends[1].close()
        del ends
        assert [text.partition("(")[2][:6] for text, _ in world.found(watch)] == ["socket"]
        left.close()
        assert world.found(watch) == []


def test_descriptors_after_those_of_the_machine(world: World) -> None:
    with Watch() as watch, vmm.PhysicalMemory(world.device, PAGE, handle_types=POSIX):
        ends = os.pipe()
        assert [text.split(" (")[0] for text, _ in world.found(watch)][1:] == [f"file descriptor {end}" for end in ends]
        for end in ends:
            os.close(end)


def test_an_announcement_is_counted_as_its_share(world: World) -> None:
    memory = vmm.GrowableBuffer(world.device, 4 * PAGE, PAGE, handle_types=POSIX)
    ipc.share(memory)
    with Watch() as watch:
        kept = ipc.share(memory)
        assert [text.split()[0] for text, _ in world.found(watch)].count("Shared") == 1
        assert not any("cuEventCreate" in text for text, _ in world.found(watch))
        del kept
    memory.close()


@pytest.mark.parametrize("kind", ["created", "default", "per thread"])
def test_an_event_that_its_stream_keeps_is_no_leak(world: World, kind: str) -> None:
    """A closed event is destroyed with its stream, which records it again until then."""
    streams = {"created": world.stream, "default": world.device.default_stream,
               "per thread": world.device.per_thread_stream}  # fmt: skip
    with Watch() as watch:
        streams[kind].record().close()
        assert world.found(watch) == []
        event = streams[kind].record()
        assert [text.split()[0] for text, _ in world.found(watch)] == ["event"]
        event.close()
        assert world.found(watch) == []


def test_the_last_event_of_a_closed_stream_that_is_kept_is_no_leak(world: World) -> None:
    """Freed buffers keep their streams. Memory that is freed after the report comes after the stream's work."""
    with Watch() as watch:
        stream = world.device.create_stream()
        kept, later = (world.pool.allocate(64, stream) for _ in range(2))
        kept.free()
        stream.close()
        assert [text.split()[0] for text, _ in world.found(watch)] == ["pool"]  # only `later`
        later.close()
        assert world.found(watch) == [] and world.pool.statistics().used == 4096


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("pipe", lambda: os.pipe()),
        ("socket", lambda: tuple(end.detach() for end in __import__("socket").socketpair())),
        ("memfd", lambda: (os.memfd_create("test"),)),
    ],
)
def test_descriptors_by_what_they_are(world: World, kind: str, make: Callable[[], tuple[int, ...]]) -> None:
    with Watch() as watch:
        numbers = make()
        found = world.found(watch)
        assert [text.startswith(f"file descriptor {number} ({kind} ")
                for (text, _), number in zip(found, sorted(numbers), strict=True)] == [True] * len(numbers)  # fmt: skip
        for number in numbers:
            os.close(number)
        assert world.found(watch) == []


def test_the_number_of_a_descriptor_may_be_used_again(world: World) -> None:
    """The machine's own file under the number of one that was exported and closed is none of the test's."""
    memory = vmm.PhysicalMemory(world.device, PAGE, handle_types=POSIX)
    handle, kind = cuda.CUmemGenericAllocationHandle(memory.handle), cuda.CUmemAllocationHandleType(int(POSIX))
    with Watch() as watch:
        raw = world.driver.cuMemExportToShareableHandle(handle, kind, 0)[1]
        assert [text.split(" (")[0] for text, _ in world.found(watch)][1:] == [f"file descriptor {raw}"]
        other = os.memfd_create("streamalloc:test")
        os.dup2(other, raw)
        os.close(other)
        assert len(world.found(watch)) == 1  # the memory itself, which account was kept of before
        os.close(raw)
    memory.close()


@pytest.mark.parametrize("module", ["streamalloc.anything", "program"])
def test_an_object_that_a_thread_of_the_package_has_is_no_leak(world: World, module: str) -> None:
    functions: dict[str, Any] = {"__name__": module}
    exec("def wait(thing, event): event.wait()", functions)
    event = threading.Event()
    with Watch() as watch:
        thread = threading.Thread(target=functions["wait"], args=(ipc.Listener(), event))
        thread.start()
        try:
            assert any("Listener" in text for text, _ in world.found(watch)) == (module == "program")
        finally:
            event.set()
            thread.join()


def test_every_thread_of_the_program_that_still_runs_is_told(world: World) -> None:
    """Beside threads of the package, which end with what they serve."""
    event, threads = threading.Event(), list[threading.Thread]()
    with Watch() as watch:
        for number in range(8):
            functions: dict[str, Any] = {"__name__": "program" if number % 2 else "streamalloc.anything"}
            exec("def wait(event): event.wait()", functions)
            threads.append(threading.Thread(target=functions["wait"], args=(event,)))
            threads[-1].start()
        try:
            told = [text for text, _ in world.found(watch)]
            assert len(told) == 4 and all("still runs" in text for text in told)
        finally:
            event.set()
            for thread in threads:
                thread.join()


def test_the_interpreters_own_descriptors_do_not_count(world: World) -> None:
    import select

    with Watch() as watch, select.epoll(), open(__file__) as file:
        assert world.found(watch) == [] and file


def test_classes_are_as_before(world: World) -> None:
    before = {kind: vars(kind).get("__init__") for kind in (ipc.Channel, ipc.Shared, ipc.Fd, vmm.GrowableBuffer)}
    with Watch(), Watch():
        assert vars(ipc.Channel)["__init__"] is not before[ipc.Channel]
    assert {kind: vars(kind).get("__init__") for kind in before} == before
    gc.collect()


def test_in_a_project(run: Run) -> None:
    result = run(
        """
        import os
        from streamalloc import ipc

        kept = []

        @pytest.fixture(scope="module")
        def late():
            ends = os.pipe()
            with ipc.Listener():
                yield
            for end in ends:
                os.close(end)

        def test_asks_late(streamalloc_machine, request):
            request.getfixturevalue("late")

        class TestInside:
            @pytest.fixture(scope="class")
            def keeping(self):
                kept.append(ipc.Listener())

            def test_last(self, streamalloc_machine_class, streamalloc_machine, request):
                request.getfixturevalue("keeping")

        def test_keeps(streamalloc_machine):
            kept.append((ipc.Listener(), os.pipe()))
        """,
        "--streamalloc-leaks",
    )
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of TestInside.test_last *",
            "1 thing was made here and not released:",
            "*, in keeping",
            "*ERROR at teardown of test_keeps *",
            "3 things were made here and not released:",
            "Listener at @streamalloc-*",
            '  File "*test_in_a_project.py", line *, in test_keeps',
            "    kept.append((ipc.Listener(), os.pipe()))",
            "file descriptor * (pipe *",
        ]
    )
