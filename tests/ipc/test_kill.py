"""``kill -9`` before each single call that a process makes of its driver: the other goes on, and a new one can join."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from tests.ipc.support import POSIX, make_buffer, make_growable, shared_pool
from tests.processes import Mortal, Partner, There, holds_there
from tests.support import MiB, eventually, executed, filled, holds, shows

Another = Callable[[], Partner]
MOST = 60
"""Calls that a scenario may make."""


def mortal(there: There) -> None:
    """From now on, this process's driver can be armed."""
    there.driver = Mortal(there.driver)
    there.device = sa.Device(0, driver=there.driver)
    there.stream = there.kept["stream"] = there.device.create_stream()


def armed(there: There, calls: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may not come to its end."""
    there.driver.call = calls + 1
    answer = function(there, *args)
    there.driver.call = None
    return answer


def dies(one: Partner, calls: int, function: Callable[..., Any], *args: Any, fds: Any = ()) -> bool:
    """Whether the process dies in this function, when it is killed before that call."""
    try:
        one.run(armed, calls, function, *args, fds=fds)
    except (ConnectionError, OSError):
        assert one.ended() == -signal.SIGKILL
        return True
    return False


def _use(there: There, data: bytes, value: int) -> None:
    """Open, read, write and close in stream order."""
    with there.open(data, there.stream) as opened:
        part = opened[:4096]
        assert holds(part, 1)
        part.fill(value)
    there.device.synchronize()


def _buffer(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> Any:
    return pool.allocate(2 * MiB, stream)


def _growable(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> Any:
    return vmm.GrowableBuffer(device, 8 * MiB, 2 * MiB, handle_types=POSIX, stream=stream)


@pytest.mark.parametrize("make", [_buffer, _growable], ids=["buffer", "growable"])
def test_importers(
    make: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, another: Another
) -> None:
    """Another one has the memory open all the time; the owner frees it after each death, where it is a buffer."""
    for calls in range(MOST):
        one = another()
        one.run(mortal)
        memory = make(device, pool, stream)
        memory.fill(1)
        shared = ipc.share(memory)
        witness = partner.open(shared)
        died = dies(one, calls, _use, bytes(shared), 9, fds=shared.fds)
        memory.fill(1)
        assert executed(stream)
        new = partner.give(memory)
        assert new.ask("nbytes") == 2 * MiB and partner.run(holds_there, new.name, 1)
        new.close()
        witness.close()
        memory.close()
        assert executed(stream)
        assert eventually(lambda: pool.statistics().used == 0)
        one.close()
        if not died:
            break
    assert 5 < calls < MOST - 1


def _own(there: There) -> None:
    """Make and share memory of each kind, again and again, and free some of it."""
    pool = shared_pool(there.device)
    for number in range(2):
        buffer = pool.allocate(MiB, there.stream)
        buffer.fill(number)
        ipc.share(buffer)
        buffer.free()
    with vmm.GrowableBuffer(there.device, 8 * MiB, MiB, handle_types=POSIX, stream=there.stream) as growable:
        ipc.share(growable)
        growable.grow(2 * MiB)
        ipc.share(growable)
    filled(there.kept["buffer"], 5)
    ipc.share(there.kept["buffer"])
    there.kept["buffer"].free()
    pool.close()
    there.device.synchronize()


def test_exporters(another: Another, stream: sa.Stream) -> None:
    """Objects that were opened before stay, and streams that wait are released."""
    reached = 0
    for calls in range(0, 100, 3):
        one = another()
        one.run(mortal)
        one.run(make_buffer, "buffer", 5)
        one.run(make_growable, "growable", 5, MiB)
        opened = [one.take(name, stream) for name in ("buffer", "growable")]
        died = dies(one, calls, _own)
        assert executed(stream)
        assert all(shows(each, 5) for each in opened)
        filled(opened[0], 6)
        assert shows(opened[0], 6)
        for each in opened:
            each.close()
        assert executed(stream)
        one.close()
        reached = calls
        if not died:
            break
    assert 5 < reached < 99
