"""Processes that end, are killed, or leave: what the others see of it."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.testing import Gate
from tests.ipc import support as steps
from tests.ipc.support import POSIX, uses
from tests.processes import Kept, Partner, There, fork
from tests.support import MiB, eventually, executed, filled, in_threads, pending, shows

SIZE = 1 << 16
Another = Callable[[], Partner]


def ways(one: Partner, how: str) -> None:
    """End a process: by a signal, or as programs do."""
    if how == "killed":
        one.kill()
    else:
        assert one.end() == 0


HOW = pytest.mark.parametrize("how", ["killed", "ended"])


class TestImporterIsGone:
    @HOW
    def test_while_it_has_memory_open(self, pool: sa.MemoryPool, buffer: sa.Buffer, another: Another, how: str) -> None:
        one = another()
        one.give(buffer)
        buffer.free()
        assert pool.statistics().used == SIZE
        ways(one, how)
        assert uses(pool, 0)

    def test_a_free_that_waits(self, pool: sa.MemoryPool, buffer: sa.Buffer, another: Another) -> None:
        one = another()
        one.give(buffer)
        one.begin(_die_in, 0.1)
        buffer.free(still_imported="wait", timeout=20)
        assert uses(pool, 0)

    def test_with_held_work(self, pool: sa.MemoryPool, buffer: sa.Buffer, stream: sa.Stream, another: Another) -> None:
        """It has closed the memory, and died before its stream came to that: ours goes on."""
        one = another()
        opened = one.give(buffer)
        assert one.run(steps.idle)
        one.run(steps.hold)
        opened.close()
        buffer.free()
        other = pool.allocate(SIZE, stream)
        assert pending(stream)
        one.kill()
        assert executed(stream)
        other.free()
        stream.synchronize()
        assert uses(pool, 0)

    def test_its_place_is_taken(self, pool: sa.MemoryPool, buffer: sa.Buffer, another: Another) -> None:
        """The next process in it does not have open what the one before had."""
        one = another()
        one.give(buffer)
        one.kill()
        with pool.allocate(SIZE, buffer.stream) as other:
            another().give(other)
            buffer.free(still_imported="raise")


def _die_in(there: There, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_close_on_another_thread_comes_after_the_work_of_the_opening_one(
    pool: sa.MemoryPool, buffer: sa.Buffer, stream: sa.Stream, another: Another
) -> None:
    """The per-thread default stream has the same handle on each thread."""
    one = another()
    shared = ipc.share(buffer)
    one.open(shared).close()
    one.run(_close_on_another_thread, bytes(ipc.share(buffer)))
    buffer.free()
    other = pool.allocate(SIZE, stream)
    assert pending(stream)
    one.tell("gate", "open")
    assert executed(stream)
    other.free()
    assert uses(pool, 0)


def _close_on_another_thread(there: There, data: bytes) -> None:
    gate, stream = there.keep("gate", Gate(there.device)), there.device.per_thread_stream

    def use() -> Any:
        with there.device.current():
            opened = there.open(data, stream)
            gate.hold(stream)
            opened.fill(7)
        return opened

    (opened,) = in_threads(use)
    with there.device.current():
        opened.close()


class TestExporterIsGone:
    @pytest.fixture
    def owner(self, another: Another) -> Partner:
        """Another process, with a pool and a buffer."""
        owner = another()
        owner.run(steps.make_buffer, "buffer", 5)
        return owner

    def test_what_was_dropped_first(self, owner: Partner, stream: sa.Stream) -> None:
        """The owner ends with its memory freed, deferred, and its pool closed."""
        opened = owner.take("buffer", stream)
        owner.run(_free_and_close)
        assert owner.end() == 0
        assert shows(opened, 5)
        opened.close()

    @pytest.mark.parametrize("freed", [True, False])
    def test_importers_see_the_close_of_its_pool(self, owner: Partner, stream: sa.Stream, freed: bool) -> None:
        """Also if it keeps the pool object: at the close, or after the free of shared memory that comes later."""
        opened = owner.take("buffer", stream)
        imported = opened._import.from_pool
        opened.close()
        stream.synchronize()
        owner.run(_free_and_close if freed else _close_first)
        assert imported.ended() == freed
        owner.run(_free)
        assert eventually(imported.ended)

    @HOW
    def test_a_stream_that_waits_is_released(self, owner: Partner, stream: sa.Stream, how: str) -> None:
        owner.run(steps.hold)
        opened = owner.take("buffer", stream)
        assert pending(stream) and not opened.lost
        if how == "killed":
            owner.kill()
        else:
            owner.run(_exit_at_once)
        assert executed(stream)
        assert opened.lost and not opened.owner_alive
        opened.close()
        stream.synchronize()

    @pytest.mark.parametrize("ready", [True, False])
    def test_before_it_was_opened(self, owner: Partner, stream: sa.Stream, ready: bool) -> None:
        """Handles outlive their process: what came before it died opens after. Nothing hangs."""
        if not ready:
            owner.run(steps.hold)
        data, fds = owner.shared("buffer")
        owner.kill()
        with ipc.open(data, fds, stream=stream, kind=ipc.ImportedBuffer) as opened:
            assert shows(opened, 5) if ready else executed(stream) and opened.lost
            assert eventually(lambda: not opened.owner_alive)

    def test_an_event_of_a_process_that_was_killed(self, another: Another, stream: sa.Stream) -> None:
        """Work that it did not reach is never done, and nothing that ends waits for it."""
        owner = another()
        owner.run(steps.make_event, "event")
        event = owner.take("event")
        owner.tell("stream", "record", Kept("event"))
        assert eventually(event.query)
        owner.kill()
        assert event.query()
        stream.wait(event)
        assert executed(stream)
        event.close()


def _free(there: There) -> None:
    there.kept.pop("buffer").close()


def _free_and_close(there: There) -> None:
    there.kept["buffer"].free()
    _close_first(there)


def _close_first(there: There) -> None:
    there.kept["pool"].close()


def _exit_at_once(there: There) -> None:
    """End without a word: the answer comes first."""
    import threading

    threading.Timer(0.02, os._exit, (0,)).start()


def test_the_interpreter_ends_with_all_of_it(python: Any) -> None:
    """A program may end with anything open, in any order. It has opened its own buffer, which drivers allow, and freed
    it; another free waits for a stream.
    """
    done = python("""
import sys, os, socket
import streamalloc as sa
from streamalloc import ipc, vmm
import streamalloc.driver as sd
device = sa.Device(0)
stream = device.create_stream()
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
pool = sa.MemoryPool(device, handle_types=POSIX)
buffer = pool.allocate(1 << 20, stream)
buffer.fill(3)
growable = vmm.GrowableBuffer(device, 8 << 20, 1 << 20, handle_types=POSIX, stream=stream)
event = device.create_event(interprocess=True)
from streamalloc.testing import Gate
kept = [ipc.share(one) for one in (pool, buffer, buffer[3:9], growable, event)]
shared = ipc.share(buffer)
opened = ipc.open(bytes(shared), [ipc.Fd(os.dup(fd.fileno())) for fd in shared.fds], stream=stream)
buffer.free()
me = [opened]
me.append(me)
del opened
gate = Gate(device)
gate.hold(stream)
late = pool.allocate(1 << 20, stream)
kept += [ipc.share(late, hold=True)]
late.free()
pool.close()
gate.open()
print('done')
""")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def _inherited(*, close_fds: bool = False) -> set[str]:
    """The memory files that a child has open."""
    code = "import os; print(*[os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')], sep='\\n')"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, check=True, close_fds=close_fds)
    return {line for line in child.stdout.splitlines() if "memfd" in line}


class TestChildren:
    def test_of_subprocess_inherit_nothing(
        self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner, stream: sa.Stream, device: sa.Device
    ) -> None:
        """Neither the exporter's descriptors nor the importer's."""
        before = _inherited()  # such as the driver's own, which tests of its calls have made
        growable = vmm.GrowableBuffer(device, 8 * MiB, MiB, handle_types=POSIX)
        shared = [ipc.share(one) for one in (pool, buffer, growable)]
        partner.run(steps.make_buffer, "buffer", 1)
        opened = partner.take("buffer", stream)
        assert _inherited(close_fds=True) == set()
        assert _inherited() <= before
        assert all(not os.get_inheritable(fd.fileno()) for one in shared for fd in one.fds)
        opened.close()
        growable.close()

    @pytest.mark.simulated_only("CUDA does not survive a fork")
    def test_of_fork_end_nothing_of_the_parent(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """The child drops what it has a copy of; it has the parent's words in shared memory, too."""
        buffers = [pool.allocate(SIZE, stream) for _ in range(2)]
        for seed, buffer in enumerate(buffers):
            filled(buffer, seed)
        plain, held = ipc.share(buffers[0]), ipc.share(buffers[1], hold=True)
        ready = bytes(plain), bytes(held)
        child = fork()
        if not child:
            try:
                del buffers, buffer, plain, held
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert (bytes(plain), bytes(held)) == ready and held.held
        assert partner.open(plain).shows(0) and partner.open(held).shows(1)
        for buffer in buffers:
            buffer.free()

    @pytest.mark.simulated_only("CUDA does not survive a fork")
    def test_of_fork_do_not_keep_a_dead_owner_alive(self, another: Another, stream: sa.Stream) -> None:
        """The owner has forked a child that has nothing to do with CUDA, and is killed while that lives on."""
        owner = another()
        owner.run(steps.make_buffer, "buffer", 5)
        owner.run(steps.hold)
        opened = owner.take("buffer", stream)
        child = owner.run(_fork)
        try:
            assert pending(stream)
            owner.kill()
            assert executed(stream) and opened.lost
        finally:
            os.kill(child, signal.SIGKILL)
        opened.close()

    @pytest.mark.simulated_only("CUDA does not survive a fork")
    def test_of_fork_keep_no_lease_of_the_dead(self, pool: sa.MemoryPool, buffer: sa.Buffer, another: Another) -> None:
        one = another()
        one.give(buffer)
        child = one.run(_fork)
        try:
            buffer.free()
            one.kill()
            assert uses(pool, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def _fork(there: There) -> int:
    child = fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    return child
