"""Poison: conspicuous values in unwritten and freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from streamalloc.checker.contents import FLAG, is_of_host
from streamalloc.checker.ranges import Range
from streamalloc.checker.rules.memory import granted, mappings
from streamalloc.checker.state import State
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.formats.ranges import Intervals

ALLOCATED, FREED = 0xCB, 0xDB
"""Bytes with which allocated and freed memory is filled."""
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
_WRITE = 3


class Poison:
    """Fills memory with conspicuous values, so that wrong reads are noticed. The fills are driver calls that are not
    recorded.
    """

    def __init__(self, driver: Any, state: State) -> None:
        self._driver = driver
        self._state = state
        self._delays = bool(getattr(driver, "is_simulated", False))
        """Whether copies to host memory are delayed (:meth:`_delay`), which is done only on a simulated driver."""

    def fill(self, name: str, args: tuple[Any, ...], answer: Any = None) -> None:
        """Fill memory that a call is about to free, and the target of a copy that :meth:`_delay` delays. If ``answer``
        is given, fill memory that the call has allocated, or to which it gave the first access.
        """
        if name.endswith(_WAITS) or name.startswith("cuMemFree"):
            _WAITED.set()
        if answer is None and name in _FREES:
            found = self._state.addresses.at.get(number_of(args[0]))
            if found is not None and found.kind == _FREES[name]:
                self._fill(found, FREED, args[-1])
        elif answer is None and name in ("cuMemcpyAsync", "cuMemcpyDtoHAsync"):
            self._delay(*args[:4])
        elif answer is not None and name in _ALLOCATES:
            found = self._state.addresses.find(int(answer[1]))
            if found is not None:
                self._fill(found, ALLOCATED, args[-1])
        elif answer is not None and name == "cuMemSetAccess":
            self._granted(*args[:3])

    def _fill(self, range_: Range, value: int, stream: Any) -> None:
        """Fill memory of a pool in stream order, and other memory at once."""
        if range_.kind == "allocation":
            self._queue(range_.base, range_.size, stream, value)
        elif range_.kind == "pinned memory":
            ctypes.memset(range_.base, value, range_.size)
        else:
            with self._under(range_.context):
                if value == FREED:
                    # Queued work may use the memory until cuMemFree has waited for it, so the device is synchronised
                    # before the fill.
                    self._driver.cuCtxSynchronize()
                self._now(range_.base, range_.size, value)

    def _queue(self, address: int, size: int, stream: Any, value: int) -> None:
        # The fill is made in the stream of the allocation or the free, so it is ordered like that operation.
        found = self._state.stream(stream)
        if found not in self._state.streams.captures:
            with self._under(found.context):
                self._driver.cuMemsetD8Async(address, value, size, stream)

    def _now(self, address: int, size: int, value: int) -> None:
        """Fill memory on a separate stream, and wait for the fill. If that is impossible, a note is added."""
        failed, stream = (True, None) if self._state.streams.captures else self._driver.cuStreamCreate(_NON_BLOCKING)
        if failed:
            self._state.notes.add("poison")
            return
        self._driver.cuMemsetD8Async(address, value, size, stream)
        self._driver.cuStreamSynchronize(stream)
        self._driver.cuStreamDestroy(stream)

    def _delay(self, to: Any, source: Any, size: Any, stream: Any) -> None:
        """Fill the target of a copy to host memory, and delay the copy until the host waits, on a simulated driver.

        A host that reads the target too early then reads the fill value. Copies of at most :data:`.FLAG` bytes, in
        captured streams, or to overlapping bytes are left out.
        """
        target, nbytes, found = number_of(to), int(size), self._state.stream(stream)
        pieces = self._state.addresses.pieces(target, nbytes)
        if not self._delays or nbytes <= FLAG or found in self._state.streams.captures:
            return
        if pieces and all(is_of_host(one) for one, _, _ in pieces) and abs(number_of(source) - target) >= nbytes:
            self._queue(target, nbytes, stream, ALLOCATED)
            _WAITED.clear()
            with self._under(found.context):
                self._driver.cuLaunchHostFunc(stream, _DELAY, 0)

    def _granted(self, address: Any, size: Any, descriptors: Any) -> None:
        """Fill those parts of mapped memory to which a device gets access for the first time (``cuMemSetAccess``)."""
        writers = [device for device, rights in granted(descriptors).items() if rights == _WRITE]
        contexts: list[Any] = [one.context for one, device in self._state.streams.devices.items() if device in writers]
        for one in mappings(self._state, number_of(address), int(size)) if contexts else ():
            fresh, start, end = one.bytes.fresh or Intervals(), one.offset, one.offset + one.size
            parts = fresh.within(start, end)
            fresh.remove(start, end)
            for low, high in parts:
                with self._under(contexts[0]):
                    self._now(one.base + low - start, high - low, ALLOCATED)

    @contextlib.contextmanager
    def _under(self, context: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if context:
                self._driver.cuCtxPushCurrent(cuda.CUcontext(context))
                stack.callback(self._driver.cuCtxPopCurrent)
            yield


_WAITED = threading.Event()
"""Set when the host waits, so that delayed copies continue."""
_LONGEST_DELAY = 0.02
"""Longest delay of a copy in seconds. The host may wait for the copy in a way that the checker does not record, and a
longer delay would then hold up the program.
"""
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: _WAITED.wait(_LONGEST_DELAY) and None)
# `_FUNCTION` is at module level, so that it exists until the process ends: the driver may call it after the checker has
# ended.
_DELAY: Any = cuda.CUhostFn(ctypes.cast(_FUNCTION, ctypes.c_void_p).value)
_WAITS = ("Synchronize", "Query")
_FREES = {"cuMemFreeAsync": "allocation", "cuMemFree": "device memory", "cuMemFreeHost": "pinned memory"}
"""For each call that frees: the kind of memory that is filled before the call."""
_ALLOCATES = frozenset(
    ["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAlloc", "cuMemAllocPitch", "cuMemHostAlloc", "cuMemAllocHost"]
)
"""Names of the calls that allocate memory, which is filled after the call."""
