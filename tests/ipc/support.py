"""Helpers for the tests of sharing between processes, and steps of their partners."""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.testing import Gate, settle
from tests.processes import SECONDS, There
from tests.support import KEEP, MiB, eventually, executed, filled, shows

T = TypeVar("T")
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
PAGE = 2 * MiB
PLAIN_BYTES = 2 * MiB
"""Bytes of a :class:`PlainMemory`, a whole block."""


def shared_pool(device: sa.Device, **options: Any) -> sa.MemoryPool:
    """A pool that can be shared and keeps what it reserves."""
    return sa.MemoryPool(device, handle_types=POSIX, release_threshold=KEEP, **options)


class State(NamedTuple):
    """Open resources of a process."""

    descriptors: int
    mappings: int
    threads: int


def state() -> State:
    """This process's, with what was dropped gone."""
    settle()
    descriptors = len(os.listdir("/proc/self/fd"))
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return State(descriptors, mappings, len(os.listdir("/proc/self/task")))


def no_more(before: State, after: State) -> bool:
    """Threads come and go, and one that waits for a death has a file; nothing else may be there that was not.

    There may be less: what earlier tests have left ends at any time.
    """
    more = max(after.threads - before.threads, 0)
    assert after.descriptors <= before.descriptors + more and after.mappings <= before.mappings, (before, after)
    assert more <= 1, (before, after)
    return True


def uses(pool: sa.MemoryPool, nbytes: int = 0) -> bool:
    """Whether the pool comes to have so much in use."""
    return eventually(lambda: pool.statistics().used == nbytes)


def at_once(count: int, work: Callable[[int], None]) -> list[str]:
    """Run ``work`` in several threads that begin together and alternate often; what went wrong."""
    wrong: list[str] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(SECONDS)
            work(number)
        except BaseException as error:
            wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        sys.setswitchinterval(interval)
    return wrong + ["a thread hangs" for thread in threads if thread.is_alive()]


def again(fds: Iterable[ipc.Fd]) -> tuple[ipc.Fd, ...]:
    """Handles for one call, which takes them."""
    return tuple(ipc.Fd(os.dup(fd.fileno())) for fd in fds)


def opened_by(machine: Any, shared: ipc.Shared) -> ipc.ImportedBuffer:
    """Open a shared object on another machine of this process."""
    return ipc.open(bytes(shared), again(shared.fds), driver=machine, kind=ipc.ImportedBuffer)


class PlainMemory(sa.Memory):
    """Memory of ``cuMemAlloc``, as some other library has it."""

    def __init__(self, device: sa.Device, stream: sa.Stream) -> None:
        with device.current():
            self._address = int(device._session.call("cuMemAlloc", PLAIN_BYTES))
        self._stream = stream

    @property
    def address(self) -> int:
        return self._address

    @property
    def nbytes(self) -> int:
        return PLAIN_BYTES

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


# --- what tests have partners do


def same(there: There, one: str, other: str) -> bool:
    return there.kept[one] is there.kept[other]


def make_event(there: There, name: str) -> None:
    there.keep(name, there.device.create_event(interprocess=True))


def make_memory(there: There, name: str) -> None:
    there.keep(name, vmm.PhysicalMemory(there.device, PAGE, handle_types=POSIX))


def make_stream(there: There, name: str) -> None:
    there.keep(name, there.device.create_stream())


def make_pool(there: There, name: str = "pool") -> None:
    there.keep(name, shared_pool(there.device))


def make_buffer(there: There, name: str, seed: int, nbytes: int = MiB, pool: str = "pool") -> int:
    """An allocation with a pattern that is queued on its stream; its address. A pool that is not there is made."""
    if pool not in there.kept:
        make_pool(there, pool)
    buffer = there.keep(name, there.kept[pool].allocate(nbytes, there.stream))
    filled(buffer, seed)
    return int(buffer.address)


def make_growable(there: There, name: str, seed: int, nbytes: int) -> None:
    buffer = vmm.GrowableBuffer(there.device, 64 * MiB, nbytes, handle_types=POSIX, stream=there.stream)
    filled(there.keep(name, buffer), seed)


def hold(there: There, on: str = "stream", gate: str = "gate") -> None:
    """Hold a stream with a gate."""
    if gate not in there.kept:
        there.keep(gate, Gate(there.device))
    there.kept[gate].hold(there.kept[on])


def make_held(there: There) -> None:
    """A buffer that is filled once the gate of its stream opens."""
    pool = there.keep("pool", shared_pool(there.device))
    hold(there)
    there.keep("buffer", pool.allocate(MiB, there.stream)).fill(1)


def synchronize(there: There) -> None:
    there.device.synchronize()


def idle(there: There, on: str = "stream") -> bool:
    """Whether a stream has done its work, or does so soon."""
    return executed(there.kept[on], 5.0)


def busy(there: There, on: str = "stream") -> bool:
    """Whether a stream has work that it does not do."""
    time.sleep(0.005)
    return not there.kept[on].query()


def state_there(there: There) -> State:
    return state()


def used(there: There, pool: str = "pool") -> int:
    there.stream.synchronize()
    return int(there.kept[pool].statistics().used)


# --- processes of multiprocessing


class Chosen:
    """An argument that makes a new process take the driver under test by default, before it opens the next ones."""

    def __init__(self, on_cuda: bool) -> None:
        self.kind = "cuda" if on_cuda else "simulated"

    def __reduce__(self) -> tuple[Any, ...]:
        return _choose, (self.kind,)


def _choose(kind: str) -> None:
    os.environ["STREAMALLOC_DRIVER"] = kind
    warnings.simplefilter("error")


def received(pipe: Connection) -> Any:
    """The next object of a pipe, with a timeout."""
    assert pipe.poll(SECONDS), "nothing came"
    return pipe.recv()


def map_and_see(there: There, name: str, seed: int) -> bool:
    physical = there.kept[name]
    with vmm.AddressRange(physical.nbytes, driver=there.driver) as range_:
        return shows(range_.map(physical, access=there.device), seed)


def refusing(driver: Any, fault: int, act: Callable[[], T]) -> T | None:
    """Do something while one of its next calls of a faulty driver is refused; None if it raised. 0: none is refused."""
    driver._target = len(driver.seen) + fault if fault else 1 << 60
    failed = len(driver.failed)
    try:
        return act()
    except sa.CudaError as error:
        assert error.name == "CUDA_ERROR_UNKNOWN" and len(driver.failed) > failed
        return None
    finally:
        driver.stop()
