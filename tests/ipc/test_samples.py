"""NVIDIA's samples streamOrderedAllocationIPC, memMapIPCDrv and simpleIPC, with fills and copies for kernels.

Their processes pass buffers around in a ring: in each round a process works on the buffer of the one after it. In the
samples a wrong order goes unnoticed, as each writes what the one before it wrote; here each checks what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import streamalloc as sa
from tests.ipc.support import shared_pool
from tests.processes import Partner, There
from tests.support import MiB, read

PROCESSES = 3
NBYTES = 2 * MiB


@pytest.fixture
def ring(partner: Partner, another: Callable[[], Partner]) -> Iterator[list[Partner]]:
    yield [partner, *(another() for _ in range(PROCESSES - 1))]


def value_of(rank: int, round_: int) -> int:
    """Value that the process ``rank`` writes in a round."""
    return 1 + rank + 10 * round_


def _rotate(there: There, rank: int, round_: int) -> str:
    """Check that the buffer has what its last writer wrote, in every byte, and overwrite it; all in stream order.

    The process before this one in the ring comes to the same buffer in the next round, and waits for our event.
    """
    place = (rank + round_) % PROCESSES
    opened, event = there.kept[f"buffer {place}"], there.kept[f"event {place}"]
    before = value_of((rank + 1) % PROCESSES, round_ - 1) if round_ else 0
    there.stream.wait(event)
    # Each has a stream and its buffers have others: none of them orders the rest.
    found = np.zeros(opened.nbytes, np.uint8)
    opened.copy_to(found, there.stream)
    there.stream.synchronize()
    opened.fill(value_of(rank, round_), there.stream)
    there.stream.record(event)
    wrong = int((found != before).sum())
    return f"{wrong} bytes of buffer {place} are not {before} but {found[found != before][:4]}" if wrong else ""


def _make_event(there: There, name: str) -> None:
    there.stream.record(there.keep(name, there.device.create_event(interprocess=True)))


def _finish(there: There) -> None:
    there.stream.synchronize()


def _open_as(there: There, name: str, data: bytes) -> None:
    there.keep(name, there.open(data, there.stream))


def pass_around(owner: Partner, name: str, others: list[Partner]) -> None:
    """Have the others open what one of them keeps, under the same name."""
    data, fds = owner.shared(name)
    for other in others:
        if other is not owner:
            other.run(_open_as, name, data, fds=fds)


def rotate(ring: list[Partner]) -> None:
    """As many rounds as there are processes. In each, all work at once: the events alone order them."""
    for round_ in range(2 * PROCESSES):
        for rank, one in enumerate(ring):
            one.begin(_rotate, rank, round_)
        assert [one.result() for one in ring] == [""] * PROCESSES


def contents(one: Partner, name: str) -> int:
    """The value of every byte of a buffer; -1 where they differ."""
    return int(one.run(_value, name))


def _value(there: There, name: str) -> int:
    there.device.synchronize()
    data = read(there.kept[name])
    return int(data[0]) if (data == data[0]).all() else -1


def finished(ring: list[Partner], place: int) -> bool:
    """Whether every process sees in a buffer what its last writer wrote, its owner too."""
    for one in ring:
        one.run(_finish)
    last = 2 * PROCESSES - 1
    wanted = value_of((place - last) % PROCESSES, last)
    return all(contents(one, f"buffer {place}") == wanted for one in ring)


class TestStreamOrderedAllocationIPC:
    """One process has the pool and all buffers; the others import pool, pointers and events."""

    def test_rotation(self, ring: list[Partner]) -> None:
        owner = ring[0]
        owner.run(_allocate, PROCESSES)
        pass_around(owner, "pool", ring)
        for place in range(PROCESSES):
            pass_around(owner, f"buffer {place}", ring)
            owner.run(_make_event, f"event {place}")
            pass_around(owner, f"event {place}", ring)
        rotate(ring)
        assert all(finished(ring, place) for place in range(PROCESSES))
        for one in ring[1:]:
            for place in range(PROCESSES):
                one.run(_close, f"buffer {place}")
        assert owner.run(_free_and_count, PROCESSES) == 0


def _allocate(there: There, count: int) -> None:
    there.keep("pool", shared_pool(there.device))
    for place in range(count):
        there.keep(f"buffer {place}", there.kept["pool"].allocate(NBYTES, there.stream)).fill(0)


def _close(there: There, name: str) -> None:
    there.kept[name].close()


def _free_and_count(there: There, count: int) -> int:
    for place in range(count):
        there.kept[f"buffer {place}"].free()
    there.device.synchronize()
    return int(there.kept["pool"].statistics().used)


class PoolBuffer(sa.Memory):
    """Memory of ``cuMemAlloc``, as some other library has it."""

    def __init__(self, device: sa.Device, stream: sa.Stream) -> None:
        with device.current():
            self._address = int(device._session.call("cuMemAlloc", NBYTES))
        self._stream = stream

    @property
    def address(self) -> int:
        return self._address

    @property
    def nbytes(self) -> int:
        return NBYTES

    @property
    def stream(self) -> sa.Stream:
        return self._stream

    @property
    def location(self) -> sa.MemLocation:
        return self._stream.device.location

    @property
    def owner(self) -> object:
        return None

    @property
    def device_accessible(self) -> bool:
        return True

    def free(self) -> None:
        with self._stream.device.current():
            self._stream.device._session.call("cuMemFree", self._address)
