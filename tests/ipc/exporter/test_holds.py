"""Holds: what is on its way keeps the memory, and ends with whatever carries it."""

import contextlib
import gc
import multiprocessing
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from tests.ipc.support import uses
from tests.processes import SECONDS, Partner, There
from tests.support import each_raises

SIZE = 1 << 16
Pair = tuple[ipc.Channel, ipc.Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = ipc.Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def sent(pool: sa.MemoryPool, stream: sa.Stream, channel: ipc.Channel, count: int = 1) -> None:
    """Buffers on their way, which are freed here already."""
    for _ in range(count):
        with pool.allocate(SIZE, stream) as buffer:
            ipc.send(channel, buffer, hold=True)
    assert pool.statistics().used == count * SIZE


class TestHandlesTravelOnce:
    """A receiver that dropped the message with the handles asks the sender's process for them."""

    @pytest.mark.parametrize("held", [False, True], ids=["plain", "held"])
    def test_is_dropped(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, pair: Pair, held: bool) -> None:
        partner.run(_take_end, fds=(pair[1].fileno(),))
        with pool.allocate(SIZE, stream) as first, pool.allocate(SIZE, stream) as second:
            second.fill(7)
            ipc.send(pair[0], first, hold=held)
            assert partner.run(_drop_message) == 2 + held
            for buffer in (second, second):
                ipc.send(pair[0], buffer, hold=held)
                assert partner.run(_receive_byte) == 7
        assert uses(pool)

    def test_shared_before_any_send(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, pair: Pair) -> None:
        """Such descriptors do not say where to ask, so that the handles go along with each of them."""
        partner.run(_take_end, fds=(pair[1].fileno(),))
        with pool.allocate(SIZE, stream) as buffer:
            buffer.fill(7)
            for shared in [ipc.share(buffer) for _ in range(2)]:
                ipc.send(pair[0], shared)
            assert partner.run(_drop_message) == 2
            assert partner.run(_receive_byte) == 7


def _take_end(there: There) -> None:
    there.kept["end"] = ipc.Channel.from_fd(there.came[0])


def _drop_message(there: There) -> int:
    """Number of descriptors that it had."""
    _, handles = there.kept["end"].receive(timeout=SECONDS)
    for handle in handles:
        handle.close()
    return len(handles)


def _receive_and_close(there: There) -> None:
    ipc.receive(there.kept["end"], stream=there.stream, timeout=SECONDS).close()
    there.stream.synchronize()


def _receive_byte(there: There) -> int:
    with ipc.receive(there.kept["end"], stream=there.stream, timeout=SECONDS) as opened:
        target = np.empty(1, np.uint8)
        opened[:1].copy_to(target)
        there.stream.synchronize()
    return int(target[0])


class TestMessages:
    def test_the_receiver_drops_the_message(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
        sent(pool, stream, pair[0], 2)
        message = pair[1].receive(timeout=SECONDS)
        assert pool.statistics().used == 2 * SIZE
        del message
        assert uses(pool, SIZE)

    def test_the_receiver_refuses_it(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
        sent(pool, stream, pair[0], 2)
        message = pair[1].receive(timeout=SECONDS)
        with pytest.raises(ValueError):
            ipc.open(message.data[:-1], message.handles, stream=stream)
        assert uses(pool, SIZE)
        with pytest.raises(TypeError, match="ImportedBuffer"):
            ipc.receive(pair[1], kind=ipc.ImportedPool, stream=stream, timeout=SECONDS)
        assert uses(pool)

    def test_the_receiver_dies(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
        code = "import time; time.sleep(60)"
        other = subprocess.Popen([sys.executable, "-c", code], pass_fds=[pair[1].fileno()])
        pair[1].close()
        sent(pool, stream, pair[0], 3)
        pair[0].close()
        assert pool.statistics().used == 3 * SIZE
        other.kill()
        other.wait()
        assert uses(pool)

    def test_it_cannot_be_sent(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
        full = 0
        with contextlib.suppress(TimeoutError):
            while full < 100_000:
                pair[0].send(b"x", timeout=0)
                full += 1
        assert 0 < full < 100_000
        with pool.allocate(SIZE, stream) as buffer, pytest.raises(TimeoutError):
            ipc.send(pair[0], buffer, hold=True, timeout=0)
        assert uses(pool)
        pair[1].close()
        with pool.allocate(SIZE, stream) as buffer, pytest.raises(ipc.PeerGoneError):
            ipc.send(pair[0], buffer, hold=True)
        assert uses(pool)

    def test_one_thing_on_two_ways(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
        with pool.allocate(SIZE, stream) as buffer, ipc.Channel.pair()[0] as nowhere:
            shared = ipc.share(buffer, hold=True)
            with pytest.raises(ipc.PeerGoneError):
                ipc.send(nowhere, shared)
            held = [shared.held]
            ipc.send(pair[0], shared)
            assert [*held, shared.held] == [True, False]
        assert pool.statistics().used == SIZE
        pair[1].close()
        assert uses(pool)

    def test_collected_in_a_cycle(self, pool: sa.MemoryPool, stream: sa.Stream, pair: Pair, partner: Partner) -> None:
        """The collector leaves the hold of the message alone, which the receiver ends."""
        cycle: list[Any] = []
        cycle.append(cycle)
        for _ in range(2):
            buffer = pool.allocate(SIZE, stream)
            ipc.send(pair[0], buffer, hold=True)
            cycle.append(buffer)
            del buffer
        del cycle
        gc.collect()
        assert uses(pool, 2 * SIZE)
        partner.run(_take_end, fds=(pair[1].fileno(),))
        partner.run(_receive_and_close)
        assert uses(pool, SIZE)
        partner.run(_receive_and_close)
        assert uses(pool)


def test_what_is_shared_is_no_message_of_a_channel(pool: sa.MemoryPool, stream: sa.Stream, pair: Pair) -> None:
    with pool.allocate(SIZE, stream) as buffer:
        for thing in (buffer, ipc.share(buffer), pool):
            with pytest.raises(TypeError, match=r"ipc\.send"):
                pair[0].send(thing)  # type: ignore[arg-type]


def _wait_for_a_signal(*_: Any) -> None:
    signal.pause()


class TestProcesses:
    """Through multiprocessing, which carries bytes only."""

    @pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "Pipe"])
    def test_nobody_takes_it(self, pool: sa.MemoryPool, stream: sa.Stream, kind: str) -> None:
        """It stays as long as somebody could: until the carrier is closed, or collected."""
        context = multiprocessing.get_context("spawn")
        if kind == "Pipe":
            reading, writing = context.Pipe(duplex=False)
            put = writing.send
        else:
            queue: Any = getattr(context, kind)()
            reading, put = queue._reader, queue.put
        for _ in range(3):
            put(pool.allocate(SIZE, stream))
        assert uses(pool, 3 * SIZE) and reading.poll(SECONDS)
        gc.collect()
        stream.synchronize()
        assert pool.statistics().used == 3 * SIZE
        if kind == "Pipe":
            reading.close()
        else:
            if kind == "Queue":
                queue.close()
                queue.join_thread()
            del queue
        del reading, put
        gc.collect()
        assert uses(pool)

    def test_workers_are_killed(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """With items that they have not taken. Another worker with a queue of its own lives on."""
        context: Any = multiprocessing.get_context("forkserver")
        queue, other = context.SimpleQueue(), context.SimpleQueue()
        workers = [context.Process(target=_wait_for_a_signal, args=(one,), daemon=True) for one in (queue, other)]
        for worker in workers:
            worker.start()
        for _ in range(10):
            queue.put(pool.allocate(SIZE, stream))
        other.put(pool.allocate(SIZE, stream))
        workers[0].kill()
        workers[0].join()
        assert pool.statistics().used == 11 * SIZE  # a worker in its place could take them
        queue.close()
        assert uses(pool, SIZE)
        other.close()
        assert pool.statistics().used == SIZE
        workers[1].kill()
        workers[1].join()
        assert uses(pool)

    def test_the_process_is_killed_before_it_takes_its_arguments(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        context = multiprocessing.get_context("spawn")
        with pool.allocate(SIZE, stream) as buffer:
            process = context.Process(target=_wait_for_a_signal, args=(buffer,))
            process.start()
        process.kill()
        process.join()
        assert uses(pool)

    def test_the_process_cannot_be_started(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        context = multiprocessing.get_context("spawn")
        with (
            pool.allocate(SIZE, stream) as buffer,
            pytest.raises((AttributeError, pickle.PicklingError, TypeError, ValueError), match=r"pickle|local object"),
        ):
            context.Process(target=_wait_for_a_signal, args=(buffer, lambda: 0)).start()
        gc.collect()
        assert uses(pool)

    def test_a_two_way_pipe_is_cut_off(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        ours, theirs = multiprocessing.Pipe()
        with pool.allocate(SIZE, stream) as buffer:
            ours.send(buffer)
        assert pool.statistics().used == SIZE
        theirs.close()
        assert uses(pool)
        ours.close()

    def test_readers_see_the_end_of_a_pipe(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """A hold keeps no end open."""
        reading, writing = multiprocessing.Pipe(duplex=False)
        with pool.allocate(SIZE, stream) as buffer:
            writing.send(buffer)
        writing.close()
        reading.recv_bytes()
        each_raises(EOFError, reading.recv_bytes)
        reading.close()
        assert uses(pool)

    def test_pickled_by_hand(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """Nobody knows where the bytes go: they are held."""
        buffer = pool.allocate(SIZE, stream)
        assert len(ForkingPickler.dumps(buffer)) > 200
        with pytest.raises(sa.StillImportedError):
            buffer.free(still_imported="raise")
        buffer.free(still_imported="ignore")


def test_a_message_keeps_its_hold_if_other_bytes_were_opened(
    pool: sa.MemoryPool, stream: sa.Stream, pair: Pair
) -> None:
    with pool.allocate(SIZE, stream) as buffer:
        shared = ipc.share(buffer, hold=True)
        assert bytes(shared)
        lease: Any = shared._lease
        mark: Any = shared._hold and shared._hold._mark
        ipc.send(pair[0], shared)
        lease.block.mark("hold", mark.number).clear()  # as an importer of the bytes does
        assert lease._in_transit()
        pair[1].receive()
    assert uses(pool)


def test_a_stream_that_is_closed_while_a_free_waits(pool: sa.MemoryPool, device: sa.Device) -> None:
    """The handle that the free had before it waited is not used."""
    stream = device.create_stream()
    buffer = pool.allocate(SIZE, stream)
    shared = ipc.share(buffer, hold=True)
    with ThreadPoolExecutor(1) as executor:
        free = executor.submit(buffer.free, still_imported="wait")
        assert not free.done()
        stream.close()
        shared.cancel()
        with contextlib.suppress(sa.ClosedError):
            free.result(SECONDS)
    buffer.close()
    device.synchronize()
    assert uses(pool)
