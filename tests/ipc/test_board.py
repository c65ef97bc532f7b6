"""The board that processes share: how many there may be, and that waiting for another's end keeps nothing alive."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc.board import IMPORTERS
from streamalloc.ipc.opening import importer_of
from tests.support import MiB, executed

from .support import Partner, There, hold, shared_pool
from .test_descriptor import again

pytestmark = [
    pytest.mark.usefixtures("quick_collections"),
    pytest.mark.simulated_only("several drivers in one process, which stand for several processes"),
]

MORE = 40
"""Importers of one buffer at a time."""


def opened_by(machine: Any, shared: ipc.Shared) -> ipc.ImportedBuffer:
    """What was shared, opened by another machine of this process."""
    opened = ipc.open(bytes(shared), again(shared.fds), driver=machine)
    assert isinstance(opened, ipc.ImportedBuffer)
    return opened


def test_many_importers(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    buffer = pool.allocate(MiB, stream)
    buffer.fill(3)
    shared = ipc.share(buffer)
    machines = [sd.simulated() for _ in range(MORE)]
    opened = [opened_by(machine, shared) for machine in machines]
    boards = [importer_of(one._door).boards[shared.descriptor.board] for one in opened]
    assert sorted(board.importer for board in boards) == list(range(MORE))
    buffer.free()
    for one in opened:
        assert pool.statistics().used == MiB
        one.close()
        one.stream.synchronize()
    assert pool.statistics().used == 0


def test_one_too_many(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    """All places are taken: the lock of each is held."""
    with pool.allocate(MiB, stream) as buffer:
        shared = ipc.share(buffer)
        board = os.open(f"/proc/self/fd/{shared.handles[shared.descriptor.board].fileno()}", os.O_RDWR)
        fcntl.fcntl(board, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1, IMPORTERS, 0))
        machine = sd.simulated()
        with pytest.raises(ValueError, match=f"{IMPORTERS} importers already"):
            opened_by(machine, shared)
        os.close(board)
        opened_by(machine, shared).close()


class TestCollected:
    """A thread waits for the other's end, which is longer than a driver may be wanted."""

    def test_importer_that_waits_for_contents(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Any) -> None:
        with pool.allocate(MiB, stream) as buffer:
            gate.hold(stream)
            buffer.fill(1)
            shared = ipc.share(buffer)

            def come_and_go() -> tuple[weakref.ref[Any], int]:
                machine = sd.simulated()
                opened = opened_by(machine, shared)
                place = importer_of(opened._door).boards[shared.descriptor.board].importer
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

    def test_exporter_that_waits_for_an_importer(self, partner: Partner) -> None:
        def come_and_go() -> weakref.ref[Any]:
            machine = sd.simulated()
            device = sa.Device(0, driver=machine)
            with shared_pool(device) as pool, device.create_stream() as stream:
                buffer = pool.allocate(MiB, stream)
                buffer.fill(1)
                opened = partner.give(buffer)
                partner.run(hold)
                opened.close()
                buffer.free()
                assert not executed(stream, 0.01)
                partner.run(_let_go)
                assert executed(stream)
            return weakref.ref(machine)

        gone = come_and_go()
        gc.collect()
        assert gone() is None

    def test_not_while_something_is_open(self, another: Callable[[], Partner], stream: sa.Stream) -> None:
        """The death of the exporter is noticed as ever."""
        owner = another()
        owner.run(_make_held)
        opened = ipc.open(*owner.shared("buffer"), stream=stream)
        gc.collect()
        assert not stream.query()
        owner.kill()
        assert executed(stream) and opened.lost
        opened.close()


def _let_go(there: There) -> None:
    there.kept["gate"].open()
    there.device.synchronize()


def _make_held(there: There) -> None:
    there.keep("pool", shared_pool(there.device))
    hold(there)
    there.keep("buffer", there.kept["pool"].allocate(MiB, there.stream)).fill(1)
