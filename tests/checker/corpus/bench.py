"""The parts of planted hazards: ``case.run(bench, right)`` plants one, or runs its corrected twin.

Kernels are told of with ``used``, so that no wrong program touches memory that is not there: all of it may run on
hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamalloc as sa
from streamalloc.driver import Checked
from streamalloc.driver.bindings import cuda
from tests.support import KEEP, MiB

SIZE = 4096
PAGE = 2 * MiB


class Bench:
    """A device of a checked driver, and short names for what programs do."""

    def __init__(self, driver: Checked) -> None:
        self.driver: Any = driver
        self.device = sa.Device(0, driver=driver)
        self._stack = contextlib.ExitStack()
        self.a, self.b, self.c = (self.stream() for _ in range(3))
        self.pool = self._stack.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP))
        self._made: list[sa.Buffer] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.done(*self._made)
        self._stack.close()

    def keep(self, owner: Any) -> Any:
        """Close something at the end, when the device has nothing left to do."""
        return self._stack.enter_context(owner)

    def stream(self, blocking: bool = False) -> sa.Stream:
        return self.keep(self.device.create_stream(blocking=blocking))  # type: ignore[no-any-return]

    def event(self, **options: bool) -> sa.Event:
        return self.keep(self.device.create_event(**options))  # type: ignore[no-any-return]

    def new(self, stream: sa.Stream, nbytes: int = SIZE) -> sa.Buffer:
        """Memory that the end of the bench frees, if nothing else did."""
        self._made.append(self.pool.allocate(nbytes, stream))
        return self._made[-1]

    def ready(self, nbytes: int = SIZE) -> sa.Buffer:
        """Memory whose allocation the host has waited for."""
        made = self.new(self.a, nbytes)
        self.a.synchronize()
        return made

    def order(self, before: sa.Stream, after: sa.Stream, right: bool = True) -> None:
        """Order one stream after another, unless the program is a wrong one."""
        if right:
            after.wait(before.record(self.event()))

    def wait(self, stream: Any, right: bool) -> None:
        """Have the host wait for a stream, an event or a device, unless the program is a wrong one."""
        if right:
            stream.synchronize()

    def read(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream, write=False)

    def write(self, memory: sa.Memory, stream: sa.Stream) -> None:
        memory.used(stream)

    def done(self, *buffers: sa.Buffer) -> None:
        """Free what is left, when the device has nothing left to do."""
        self.device.synchronize()
        for one in buffers:
            if not one.freed:
                one.free()

    def raw(self, name: str, *args: Any) -> Any:
        """A call of the driver itself, in the context of the device."""
        with self.device.current():
            answer = getattr(self.driver, name)(*args)
        return answer[1] if len(answer) > 1 and not answer[0] else answer[0]

    def at(self, address: int, stream: sa.Stream, write: bool = True, nbytes: int = SIZE) -> None:
        """A kernel that uses addresses, whatever is there."""
        self.driver.used(address, nbytes, cuda.CUstream(stream.handle), write)

    def word(self) -> int:
        """Pinned memory for streams to wait for."""
        address = int(self.raw("cuMemHostAlloc", 64, 0))
        ctypes.memset(address, 0, 64)
        self._stack.callback(lambda: self.raw("cuMemFreeHost", address))
        return address


@dataclass(frozen=True)
class Case:
    """One hazard."""

    name: str
    kind: str
    run: Callable[[Bench, bool], object]
    gpus: int = 1
    simulated: str = ""
    """Why it cannot run on hardware."""
    bindings: str = ""
    """The version of the bindings that it needs."""
    portable: bool = True


CASES: list[Case] = []
Program = Callable[[Bench, bool], object]


def hazard(kind: str, **options: Any) -> Callable[[Program], Program]:
    def add(run: Program) -> Program:
        CASES.append(Case(run.__name__, kind, run, **options))
        return run

    return add
