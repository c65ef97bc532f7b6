"""The end of a pool: when its driver handle can be destroyed.

The driver documents that a pool may be destroyed while allocations live or frees are pending. Driver 580.159 was seen
to crash in later calls of a process that did so. A pool is therefore destroyed once nothing of it is in use and every
free has run; a pool that is closed before that is *retired*, and looked at again whenever the host synchronises or
another pool is made or closed.
"""

from __future__ import annotations

from typing import Any

from streamalloc.core.door import Door
from streamalloc.core.errors import (
    CudaError,
    DeviceLostError,
    InvalidContextError,
    InvalidValueError,
    NotInitializedError,
    NotReadyError,
    undoing,
)
from streamalloc.driver.internal import cuda

__all__ = ["retire"]

_ATTRIBUTES = cuda.CUmemPool_attribute
# What the driver answers about a pool that is no more, or once it has lost the device.
_GONE = (DeviceLostError, InvalidContextError, InvalidValueError, NotInitializedError)


class _Retired:
    """A closed pool that its driver handle outlives."""

    __slots__ = ("_door", "_frees", "_raw")

    def __init__(self, door: Door, raw: Any) -> None:
        self._door = door
        self._raw = raw
        self._frees: list[Any] = []

    @property
    def handle(self) -> int:
        return int(self._raw)

    def end(self) -> bool:
        """Destroy the pool if that is safe now; whether it is destroyed."""
        unused = self._unused()
        if unused:
            self._door.call("cuMemPoolDestroy", self._raw)
        return unused

    def ended(self) -> bool:
        """:meth:`end` for a caller who has nobody to tell an error; a pool whose context is gone needs no end."""
        try:
            return self.end()
        except CudaError as error:
            return isinstance(error, _GONE)

    def _unused(self) -> bool:
        if self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_USED_MEM_CURRENT):
            return False
        # What the host has seen freed goes at once; if nothing is left then, no free can be pending.
        self._door.call("cuMemPoolTrimTo", self._raw, 0)
        if not self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT):
            self._drop_events()
            return True
        if not self._frees:
            self._record()
        return self._frees_have_run()

    def _number(self, attribute: Any) -> int:
        return int(self._door.call("cuMemPoolGetAttribute", self._raw, attribute))

    def _record(self) -> None:
        """Mark the point that every stream of every context has to pass: whoever freed, did so before."""
        with undoing(self._drop_events):
            for ordinal in self._door.ordinals:
                with self._door.current(ordinal):
                    event = self._door.call("cuEventCreate", int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
                    self._frees.append(event)
                    self._door.call("cuCtxRecordEvent", self._door.context(ordinal), event)

    def _frees_have_run(self) -> bool:
        try:
            for event in self._frees:
                self._door.call("cuEventQuery", event)
        except NotReadyError:
            return False
        self._drop_events()
        return True

    def _drop_events(self) -> None:
        while self._frees:
            self._door.call("cuEventDestroy", self._frees.pop())


def retire(door: Door, raw: Any) -> None:
    """Destroy a pool now if that is safe, or as soon as it is.

    Raises
    ------
    CudaError
        The driver refused a call; the pool is tried again later.
    """
    pool = _Retired(door, raw)
    if door.captures:
        door.retire(pool)
        return
    with undoing(lambda: door.retire(pool)):
        if not pool.end():
            door.retire(pool)
