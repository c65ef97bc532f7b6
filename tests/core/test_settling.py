"""``streamalloc.testing.settle``: nothing that was dropped is left, or how much still waits."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.internal import Deferred, deferred_queue
from streamalloc.core.session import session_of
from streamalloc.testing import Gate, settle


def test_ends_what_was_dropped_of_every_driver(machine: Any) -> None:
    drivers = [sd.checked(machine), sd.checked(machine)]
    for driver in drivers:
        pool = sa.MemoryPool(sa.Device(0, driver=driver))
        holder: list[Any] = [pool]
        holder.append(holder)
        del pool, holder
    before = settle()
    for driver in drivers:
        driver.assert_nothing_left()
    assert before == settle()


def test_says_what_waits(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    before = settle()
    pool = sa.MemoryPool(device)
    buffer = pool.allocate(64, stream)
    gate.hold(stream)
    buffer.free()
    pool.close()
    assert settle() == before + 1
    gate.open()
    stream.synchronize()
    assert settle() == before


def test_raises_what_a_signal_handler_raises(device: sa.Device) -> None:
    class Interrupted(Deferred):
        raised = False

        def attempt(self) -> bool:
            if not self.raised:
                self.raised = True
                raise TimeoutError("by a signal handler")
            return True

    deferred_queue(session_of(device)).submit(Interrupted())
    with pytest.raises(TimeoutError):
        settle()
    settle()
