"""Driver resources that a test does not release, with the lines that created them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from streamalloc.driver import Driver
from streamalloc.driver.internal import COUNTED, HandleCounts, RLock, Stack, Wrapper, here, lines


class Leak(NamedTuple):
    """A driver resource that was created and not released."""

    kind: str
    """Kind of resource, such as ``"stream"``."""
    handle: int
    """The driver's handle or address."""
    call: str
    """The driver function that made it."""
    place: Stack
    """Stack of that call, without frames of this package."""

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} {self.handle:#x} ({self.call})", *lines(self.place)])


def leak_report(leaks: Sequence[object]) -> str:
    """The leaks as text."""
    things = "1 thing was" if len(leaks) == 1 else f"{len(leaks)} things were"
    return "\n".join([f"{things} made here and not released:", *map(str, leaks)])


_EXPORTS = {"cuMemExportToShareableHandle", "cuMemPoolExportToShareableHandle", "cuMemGetHandleForAddressRange"}


def descriptor_key(number: int) -> tuple[int, int, int]:
    """Identity of an open descriptor: its number, and device and number of the file's inode.

    The number alone is not enough: after a close another file may get it.
    """
    status = os.fstat(number)
    return number, status.st_dev, status.st_ino


class Accounts(Wrapper):
    """A driver that records each created resource, with the call's stack, until its release.

    Memory that is allocated in a capture belongs to its graph, and is not counted.

    Parameters
    ----------
    driver
        Any driver.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        # Reentrant: a finaliser may call the driver while its thread holds the lock.
        self._lock = RLock()
        self._account = HandleCounts()
        self._made: dict[int, tuple[str, Stack]] = {}
        self.exported: dict[tuple[int, int, int], Stack] = {}
        """Stacks of calls that returned file descriptors, by :func:`descriptor_key`."""

    def __getattr__(self, name: str) -> Any:
        # Functions that neither create nor release resources are called directly.
        if name in COUNTED | _EXPORTS or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(self.wrapped, name)

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        on_stream = args and name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync")
        captured = bool(on_stream) and self._captures(args[-1])
        answer: tuple[Any, ...] = function(*args)
        if not answer[0] and name in _EXPORTS:
            if isinstance(answer[1], int):
                self.exported[descriptor_key(answer[1])] = here()
        elif not answer[0]:
            with self._lock:
                self._account.note(name, args, answer, captured)
                if name == "cuMemMap" or len(answer) > 1:
                    handle = int(args[0] if name == "cuMemMap" else answer[1])
                    self._made.pop(handle, None)  # a reused handle moves to the end
                    self._made[handle] = (name, here())
        return answer

    def _captures(self, stream: Any) -> bool:
        answer = self.wrapped.cuStreamIsCapturing(stream)
        return not answer[0] and int(answer[1]) != 0

    def leaks(self) -> list[Leak]:
        """Resources made through this driver and not released, oldest first."""
        with self._lock:
            order = {handle: number for number, handle in enumerate(self._made)}
            left = [Leak(kind, handle, *self._made.get(handle, ("", ())))
                    for kind, handles in self._account.outstanding().items() for handle in handles]  # fmt: skip
            return sorted(left, key=lambda leak: order.get(leak.handle, 0))
