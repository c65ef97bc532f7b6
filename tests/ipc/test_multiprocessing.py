"""Memory, pools and events through multiprocessing's queues, pipes and arguments."""

import multiprocessing
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from queue import Full
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.ipc import multiprocess
from streamalloc.testing import Gate
from tests.ipc.support import PAGE, POSIX, Chosen, received, shared_pool
from tests.processes import SECONDS
from tests.support import MiB, each_raises, eventually, filled, holds, read, shows

SIZE = 1 << 16
Fill = Callable[[int], sa.Buffer]


@pytest.fixture
def context() -> Any:
    """The faster start method of processes."""
    return multiprocessing.get_context("forkserver")


@pytest.fixture
def run(context: Any, on_cuda: bool) -> Iterator[Callable[..., Any]]:
    """Starts processes, which have ended well when the test is over."""
    processes: list[Any] = []

    def run(target: Callable[..., None], *args: Any) -> Any:
        process = context.Process(target=_with_driver, args=(Chosen(on_cuda), target, *args), daemon=True)
        process.start()
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.join(SECONDS)
        code = process.exitcode
        process.kill()
        assert code == 0


def _with_driver(_: None, target: Callable[..., None], *args: Any) -> None:
    target(*args)


def test_the_sender_ends_first(run: Callable[..., Any], context: Any, stream: sa.Stream) -> None:
    """Opened objects stay; the others are refused with a reason."""
    here, there = context.Pipe()
    process = run(_send_two_and_wait, there)
    opened = received(here)
    late = here.recv_bytes()
    here.send("end")
    process.join(SECONDS)
    with pytest.raises((OSError, ValueError), match=r"ended|closed"):
        pickle.loads(late)
    assert shows(opened, 7)
    opened.close()


def _send_two_and_wait(connection: Any) -> None:
    device = sa.Device(0)
    with device.create_stream() as stream, shared_pool(device) as pool, shared_pool(device) as other:
        first, second = pool.allocate(SIZE, stream), other.allocate(SIZE, stream)
        filled(first, 7)
        connection.send(first)
        connection.send(second)
        assert received(connection) == "end"
        second.free(still_imported="ignore")


@pytest.mark.parametrize("kind", ["Queue", "Pipe", "argument"])
def test_any_stream_of_the_receiver_s_waits(
    run: Callable[..., Any], context: Any, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, kind: str
) -> None:
    here, there = context.Pipe()
    buffer = pool.allocate(SIZE, stream)
    buffer.fill(1)
    stream.synchronize()
    gate.hold(stream)
    buffer.fill(2)
    if kind == "argument":
        run(_read_on_its_own, there, buffer)
    else:
        queue = there if kind == "Pipe" else getattr(context, kind)()
        run(_read_on_its_own, there, queue)
        (here.send if kind == "Pipe" else queue.put)(buffer)
    assert received(here) == "has it"
    assert not here.poll(0.05)
    gate.open()
    assert received(here) == [2]
    buffer.free()


def _read_on_its_own(connection: Any, source: Any) -> None:
    buffer = source
    if not isinstance(source, sa.Memory):
        buffer = source.recv() if hasattr(source, "recv") else source.get()
    found = np.zeros(buffer.nbytes, np.uint8)
    connection.send("has it")
    with sa.Device(0).create_stream() as stream:
        buffer.copy_to(found, stream)
        stream.synchronize()
        connection.send(sorted(set(found.tolist())))
        buffer.close(stream)


class Hides:
    """An object of a program's own, which a queue's thread alone looks into."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def _answer_values(connection: Any, queue: Any) -> None:
    """The value of all bytes of each item, or the error that came instead, until None comes."""
    while True:
        try:
            item: Any = queue.get(timeout=SECONDS)
        except LateError:
            connection.send("late")
            continue
        except Exception as error:
            connection.send((type(error).__name__, str(error)))
            continue
        if item is None:
            break
        while not isinstance(item, sa.Memory):
            values = item.values() if isinstance(item, dict) else item
            item = item.thing if isinstance(item, Hides) else next(iter(values))
        connection.send(sorted(set(read(item).tolist())))
        item.close()  # type: ignore[attr-defined]
        del item


class Named(NamedTuple):
    """A message of a program."""

    thing: Any


class Settings(dict[str, Any]):
    """A dictionary whose items are attributes, also in place of its methods."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class TestFreedAfterPut:
    """``queue.put(buffer)``, and the buffer is freed before the queue's thread comes to it."""

    @pytest.fixture
    def queue(self, request: pytest.FixtureRequest, context: Any) -> Any:
        queue = getattr(context, getattr(request, "param", "Queue"))()
        yield queue
        if hasattr(queue, "join_thread"):
            queue.close()
            queue.join_thread()

    @pytest.fixture
    def answers(self, run: Callable[..., Any], context: Any, queue: Any) -> Any:
        """Pipe on which another process answers with the values that it gets from the queue, until it gets None."""
        here, there = context.Pipe()
        run(_answer_values, there, queue)
        yield here
        queue.put(None)

    @pytest.fixture
    def fed_later(self, queue: Any) -> Iterator[Event]:
        """The thread that feeds the queue comes to nothing before this is set."""
        go = Event()
        queue.put(_Late(go))
        yield go
        go.set()

    @pytest.fixture
    def fill(self, pool: sa.MemoryPool, stream: sa.Stream) -> Fill:
        def fill(value: int) -> sa.Buffer:
            buffer = pool.allocate(4096, stream)
            buffer.fill(value)
            return buffer

        return fill

    PACKED: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012
        "itself": lambda thing: thing,
        "in a tuple": lambda thing: (thing, 1),
        "in other containers": lambda thing: Named(defaultdict(list, it=frozenset([thing]))),
        "in a dictionary in a list": lambda thing: [{"it": thing}],
        "a view": lambda thing: thing[16:2064],
        "an array": lambda thing: thing.view_as(np.float32),
        "shared": lambda thing: ipc.share(thing, hold=True),
        "shared, in an object": lambda thing: Hides(ipc.share(thing, hold=True)),
    }

    @pytest.mark.parametrize(
        ("queue", "packed", "end"),
        [
            *(("Queue", packed, "drop") for packed in PACKED),
            ("Queue", "a view", "close"),
            ("JoinableQueue", "itself", "free"),
        ],
        indirect=["queue"],
    )
    def test_arrives(
        self, queue: Any, answers: Any, fed_later: Event, fill: Fill, pool: sa.MemoryPool, packed: str, end: str
    ) -> None:
        buffer = fill(7)
        queue.put(self.PACKED[packed](buffer))
        if end != "drop":
            getattr(buffer, end)()
        del buffer
        with fill(1):
            # What was freed would be the same memory.
            fed_later.set()
            assert received(answers) == "late"
            assert received(answers) == [7]
        assert eventually(lambda: pool.statistics().used == 0)

    def test_what_an_object_hides_raises_over_there(
        self, queue: Any, answers: Any, fed_later: Event, fill: Fill, capfd: pytest.CaptureFixture[str]
    ) -> None:
        buffer = fill(7)
        queue.put(Hides(buffer))
        buffer.free()
        queue.put(fill(8))
        fed_later.set()
        assert received(answers) == "late"
        kind, text = received(answers)
        assert kind == "ClosedError" and "freed" in text and "ipc.share(buffer, hold=True)" in text
        assert received(answers) == [8]
        assert "ClosedError" in capfd.readouterr().err

    def test_what_cannot_be_shared(self, queue: Any, answers: Any, device: sa.Device, stream: sa.Stream) -> None:
        """The error is raised where the object is put, or where it is received, never in a thread of the queue."""
        with sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
            freed = pool.allocate(64, stream)
            freed.free()
            kinds: tuple[tuple[Any, type[Exception]], ...] = (
                (pool, ValueError), (buffer, ValueError), (freed, sa.ClosedError), (stream, TypeError),
            )  # fmt: skip
            with pytest.raises(TypeError, match="send its ordinal"):
                queue.put(device)
            for thing, kind in kinds:
                for packed in (thing, [thing], {"it": (thing,)}):
                    with pytest.raises(kind):
                        queue.put(packed)
                queue.put(Hides(thing))
                assert received(answers)[0] == kind.__name__

    def test_a_queue_that_is_full(self, context: Any, fill: Fill, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """It has taken nothing, and nothing is held."""
        queue = context.Queue(1)
        queue.put(None)
        buffer = fill(7)
        each_raises(Full, lambda: queue.put(buffer, timeout=0.01), lambda: queue.put([buffer], block=False))
        buffer.free(still_imported="raise")
        stream.synchronize()
        assert pool.statistics().used == 0
        queue.get()
        queue.close()
        queue.join_thread()
        with pytest.raises(ValueError, match="closed"):
            queue.put(fill(1))

    def test_what_holds_nothing_of_ours_is_left_alone(self, queue: Any) -> None:
        """It is the same object that the queue's thread pickles."""
        go = Event()
        message = [_Later(go), 1]
        queue.put(message)
        message.append(2)
        loop: list[Any] = []
        loop.append(loop)
        queue.put(loop)
        go.set()
        assert queue.get(timeout=SECONDS) == [3, 1, 2]
        assert len(queue.get(timeout=SECONDS)) == 1

    def test_an_end_that_is_opened_to_look_for_readers_is_closed_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[ipc.Fd] = []
        monkeypatch.setattr(multiprocess, "hung_up", opened.append)
        reader, writer = map(ipc.Fd, os.pipe())
        with reader, writer:
            assert not multiprocess._has_no_readers(writer) and opened[0].closed

    def test_dictionaries_whose_methods_are_hidden_are_searched(self, buffer: Any) -> None:
        assert not multiprocess._contains_ours(Settings(values=1))
        assert multiprocess._contains_ours(Settings(values=buffer))

    def test_without_a_thread_the_caller_is_told(self, context: Any, fill: Fill, on_cuda: bool) -> None:
        """A pipe, a simple queue, the arguments of a process, and the tasks of a pool of workers."""
        buffer = fill(1)
        buffer.free()
        here, _there = context.Pipe()
        for send in (here.send, context.SimpleQueue().put):
            for thing in (buffer, Hides(buffer)):
                with pytest.raises(sa.ClosedError, match="freed"):
                    send(thing)
        each_raises(sa.ClosedError, context.Process(target=len, args=(buffer,)).start, match="freed")
        with context.Pool(1, initializer=_take, initargs=(Chosen(on_cuda),)) as workers:
            with pytest.raises(sa.ClosedError, match="freed"):
                workers.apply_async(len, (buffer,)).get(SECONDS)
            workers.close()
            workers.join()

    def test_an_executor_s_future_is_told(self, context: Any, fill: Fill, on_cuda: bool) -> None:
        buffer = fill(1)
        buffer.free()
        arguments: Any = (Chosen(on_cuda),)
        take: Any = _take
        with ProcessPoolExecutor(1, context, initializer=take, initargs=arguments) as workers:
            with pytest.raises(sa.ClosedError, match="freed"):
                workers.submit(len, buffer).result(SECONDS)
            with fill(3) as other:
                assert workers.submit(_value_in_a_worker, other).result(SECONDS) == [3]

    def test_shared_twice(self, queue: Any, answers: Any, fill: Fill, pool: sa.MemoryPool) -> None:
        """A result of ``share`` holds the memory in each message, even if it did not hold it before."""
        buffer = fill(7)
        shared = ipc.share(buffer)
        queue.put(shared)
        queue.put(shared)
        buffer.free()
        assert received(answers) == received(answers) == [7]
        assert eventually(lambda: pool.statistics().used == 0)


class _Late:
    """Comes out of a queue as a text that nobody has put in, once the thread that feeds it may go on."""

    def __init__(self, go: Event) -> None:
        self._go = go

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._go.wait(SECONDS)
        return _late, ()


class _Later(_Late):
    def __reduce__(self) -> tuple[Any, ...]:
        assert self._go.wait(SECONDS)
        return int, (3,)


def _late() -> Any:
    raise LateError


class LateError(Exception):
    """Not an item."""


def _value_in_a_worker(buffer: Any) -> list[int]:
    with buffer:
        return sorted(set(read(buffer).tolist()))


def _take(_: None, pool: Any = None) -> None:
    assert pool is None or type(pool).__name__ == "ImportedPool"


def test_memory_of_many_chunks(device: sa.Device, stream: sa.Stream) -> None:
    """More handles than one message of a channel carries."""
    mine, theirs = ipc.Channel.pair()
    with (
        mine,
        theirs,
        vmm.GrowableBuffer(device, 400 * MiB, 300 * MiB, handle_types=POSIX, chunk=PAGE, stream=stream) as buffer,
    ):
        for at in range(0, 300, 7):
            buffer[at * MiB : at * MiB + 4096].fill(at % 256)
        ipc.send(mine, buffer, timeout=SECONDS)
        with ipc.receive(theirs, stream=stream, timeout=SECONDS) as opened:
            assert all(holds(opened[at * MiB : at * MiB + 4096], at % 256) for at in range(0, 300, 7))
