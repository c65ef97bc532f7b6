"""The control block: how many processes may share one, and that waiting for another's end keeps nothing alive."""

import fcntl
import gc
import os
import signal
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.driver.internal import cuda
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.wire.control_block import IMPORTERS, SLOTS, ControlBlock, ImporterWords, ReadyWord
from streamalloc.testing import Gate
from tests.ipc.support import again, make_held, opened_by
from tests.processes import Partner
from tests.support import MiB, Replaced, captured, eventually, executed

pytestmark = [pytest.mark.simulated_only("several drivers in one process, which stand for several processes")]


def test_one_too_many(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    """All places are taken: the lock of each is held."""
    with pool.allocate(MiB, stream) as buffer:
        shared = ipc.share(buffer)
        block = os.open(f"/proc/self/fd/{shared.handles[shared.descriptor.control_block].fileno()}", os.O_RDWR)
        fcntl.fcntl(block, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1, IMPORTERS, 0))
        machine = sd.simulated()
        with pytest.raises(ValueError, match=f"{IMPORTERS} importers already"):
            opened_by(machine, shared)
        os.close(block)
        opened_by(machine, shared).close()


def test_a_collected_importer_that_waits_for_contents(pool: sa.MemoryPool, stream: sa.Stream, gate: Any) -> None:
    """A thread waits for the other's end, which is longer than a driver may be wanted."""
    with pool.allocate(MiB, stream) as buffer:
        gate.hold(stream)
        buffer.fill(1)
        shared = ipc.share(buffer)

        def come_and_go() -> tuple[weakref.ref[Any], int]:
            machine = sd.simulated()
            opened = opened_by(machine, shared)
            place = imports_of(opened._session).blocks[shared.descriptor.control_block].importer
            assert not opened.stream.query()
            opened.close()
            return weakref.ref(machine), place

        gone = []
        for _ in range(3):
            gone.append(come_and_go())
            gc.collect()
        assert [machine() for machine, _ in gone] == [None] * 3
        assert {place for _, place in gone} == {0}  # each has given its place back
        gate.open()
        assert executed(stream)


class TestDeaths:
    def test_while_a_forked_child_lives(self, another: Callable[[], Partner], stream: sa.Stream) -> None:
        """The child has copies of all files, and so of the one with which its parent waited for the death."""
        owner = another()
        owner.run(make_held)
        opened = ipc.open(*owner.shared("buffer"), stream=stream, kind=ipc.ImportedBuffer)
        child = os.fork()
        if not child:
            signal.pause()
        owner.kill()
        try:
            assert executed(stream)
            assert eventually(lambda: not opened.owner_alive)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        opened.close()

    def test_are_waited_for_once_there_can_be_a_thread(
        self, another: Callable[[], Partner], stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        owner = another()
        owner.run(make_held)
        data, fds = owner.shared("buffer")
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", start)
            ipc.open(data, again(fds), stream=stream)
        opened = ipc.open(data, fds, stream=stream, kind=ipc.ImportedBuffer)
        owner.kill()
        assert executed(stream) and opened.lost
        opened.close()


def test_stale_while_the_owner_frees(pool: sa.MemoryPool, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The importer says for a moment that it has opened the memory, which the owner's stream must not wait for."""
    buffer = pool.allocate(MiB, stream)
    shared = ipc.share(buffer)
    machine = sd.simulated()
    with Gate(sa.Device(0, driver=machine)) as gate:
        opened = opened_by(machine, shared)
        block = imports_of(opened._session).blocks[shared.descriptor.control_block]
        words = block.importer_words(shared.descriptor.slot, block.importer)
        gate.hold(opened.stream)
        opened.close()
        importer_words = ControlBlock.importer_words

        def and_then(block: ControlBlock, slot: int, importer: int) -> ImporterWords:
            words.opened.value += 1
            return importer_words(block, slot, importer)

        with monkeypatch.context() as patch:
            # Called between the check that all have closed and the wait of the stream.
            patch.setattr(ControlBlock, "importer_words", and_then)
            buffer.free()
        words.opened.value -= 1
        assert not stream.query()
        gate.open()
        assert executed(stream)


@pytest.mark.parametrize("first_again", [True, False])
def test_a_refused_close_is_repeated_after_another_open(
    pool: sa.MemoryPool, stream: sa.Stream, first_again: bool
) -> None:
    """The free waits for the later object."""
    simulated: Any = sd.simulated()
    refused: list[Any] = []
    machine: Any = Replaced(
        simulated, cuStreamQuery=lambda raw: (refused.pop(),) if refused else simulated.cuStreamQuery(raw)
    )
    buffer = pool.allocate(MiB, stream)
    shared = ipc.share(buffer)
    with sa.Device(0, driver=machine).create_stream() as theirs:
        first = ipc.open(bytes(shared), again(shared.fds), stream=theirs)
        refused.append(cuda.CUresult.CUDA_ERROR_UNKNOWN)
        with pytest.raises(sa.CudaError, match="cuStreamQuery"):
            first.close()
        second = ipc.open(bytes(shared), again(shared.fds), stream=theirs)
        if first_again:
            first.close()
        with pytest.raises(sa.StillImportedError):
            buffer.free(still_imported="raise")
        second.close()
        first.close()
        assert executed(theirs)
        buffer.free(still_imported="raise")
        assert executed(stream)


class TestCapturesOfOtherCode:
    """Captures that have no record here, and must not break."""

    @pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
    def test_of_another(self, raw: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, mode: str) -> None:
        buffer = pool.allocate(MiB, stream)
        stream.synchronize()
        ipc.share(buffer)
        with device.current():
            theirs = raw.cuStreamCreate(1)[1]
            with captured(raw, theirs, mode):
                for _ in range(2):
                    ipc.share(buffer)
                    ipc.share(buffer, device.default_stream)
            raw.cuStreamDestroy(theirs)
        buffer.free()

    def test_of_the_importer_s_stream(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Any) -> None:
        """Objects that are open on another stream stay open, and can be closed."""
        buffer = pool.allocate(MiB, stream)
        machine: Any = sd.simulated()
        opened = opened_by(machine, ipc.share(buffer))
        gate.hold(stream)
        buffer.fill(1)
        shared = ipc.share(buffer)
        device = sa.Device(0, driver=machine)
        with device.current():
            raw = machine.cuStreamCreate(1)[1]
            with captured(machine, raw, "RELAXED"), pytest.raises(sa.CaptureError, match="in a capture"):
                ipc.open(bytes(shared), stream=sa.Stream.of_handle(device, int(raw), raw), driver=machine)
            machine.cuStreamDestroy(raw)
        gate.open()
        opened.close()
        opened_by(machine, shared).close()
        device.synchronize()
        buffer.free()
        stream.synchronize()
        assert pool.statistics().used == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_opened_again_while_the_first_is_collected(pool: sa.MemoryPool, stream: sa.Stream, when: str) -> None:
    """The size is asked for when the memory is open here already: the last object must not go meanwhile."""
    buffer = pool.allocate(MiB, stream)
    shared = ipc.share(buffer)
    simulated: Any = sd.simulated()

    def attribute(*arguments: Any) -> Any:
        if when == "before":
            gc.collect()
        answer = simulated.cuPointerGetAttribute(*arguments)
        if when == "after":
            gc.collect()
        return answer

    machine: Any = Replaced(simulated, cuPointerGetAttribute=attribute)
    cycle: list[Any] = [opened_by(machine, shared)]
    cycle.append(cycle)
    del cycle
    opened = ipc.open(bytes(shared), driver=machine)
    buffer.free()
    stream.synchronize()
    assert pool.statistics().used == MiB
    opened.fill(2)
    opened.close()
    opened.stream.synchronize()
    # A thread closes what was dropped.
    assert eventually(lambda: pool.statistics().used == 0)


def test_threads_get_one_slot_s_words(pool: sa.MemoryPool, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared, to see whether an import is of the same lease."""
    with pool.allocate(MiB, stream) as buffer, opened_by(sd.simulated(), ipc.share(buffer)) as opened:
        (block,) = imports_of(opened._session).blocks.values()
        unused = 1000
        found: list[Any] = []
        word = ControlBlock.word

        def other_thread_first(self: ControlBlock, kind: str, slot: int, importer: int = 0) -> Any:
            if not found:
                found.append(None)
                found[0] = self.importer_words(unused, self.importer)
            return word(self, kind, slot, importer)

        with monkeypatch.context() as patch:
            patch.setattr(ControlBlock, "word", other_thread_first)
            mine = block.importer_words(unused, block.importer)
        assert mine is found[0] and mine.exporter_words is block.exporter_words(unused)


class TestTheFile:
    """Whoever touches a page of a file that was truncated is killed by SIGBUS."""

    def test_cannot_be_truncated_by_an_importer(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(512, stream) as buffer:
            shared = ipc.share(buffer)
            fd = again((shared.handles[shared.descriptor.control_block],))[0]
            for size in (0, 1 << 12, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd.fileno(), size)

    def test_that_could_be_truncated_is_refused(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(512, stream) as buffer:
            shared = ipc.share(buffer)
            real = shared.handles[shared.descriptor.control_block].fileno()
            for flags in (0, os.MFD_ALLOW_SEALING):
                copy = ipc.Fd(os.memfd_create("copy", flags))
                os.sendfile(copy.fileno(), real, 0, os.fstat(real).st_size)
                handles = [copy if fd.fileno() == real else again((fd,))[0] for fd in shared.fds]
                with pytest.raises(ValueError, match="not its control block"):
                    ipc.open(bytes(shared), handles, driver=sd.simulated())

    @pytest.mark.parametrize(("slot", "exists"), [(0, True), (SLOTS - 1, True), (SLOTS, False), (-1, False)])
    def test_a_ready_word_is_in_a_slot(self, pool: sa.MemoryPool, stream: sa.Stream, slot: int, exists: bool) -> None:
        with pool.allocate(512, stream) as buffer:
            shared = ipc.share(buffer)
            name = shared.descriptor.control_block
            text = f"{name.hex()} {slot} 0 1"
            if exists:
                assert not ReadyWord(shared.handles[name], text).lost
            else:
                with pytest.raises(ValueError, match="not the control block of this announcement"):
                    ReadyWord(shared.handles[name], text)
