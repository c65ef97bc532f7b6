"""Poison: fills unwritten and freed memory with conspicuous values."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from streamalloc.checker.rules.memory import granted, mappings
from streamalloc.checker.state import State
from streamalloc.checker.uses import FLAG, may_poll
from streamalloc.driver.bindings import cuda, number_of

ALLOCATED, FREED = 0xCB, 0xDB
"""Byte values of allocated and of freed memory."""
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
_WRITE = 3
_Step: TypeAlias = "Callable[[Poison, tuple[Any, ...], Any], None]"


class Poison:
    """Fills memory by calls of the wrapped driver, which are not recorded."""

    def __init__(self, driver: Any, state: State) -> None:
        self._driver = driver
        self._state = state
        self._delays = bool(getattr(driver, "is_simulated", False))
        """Whether to delay copies to the host."""

    def fill(self, name: str, args: tuple[Any, ...], answer: Any = None) -> None:
        """Fill memory that a call is about to free, or with its answer memory that it has allocated."""
        if name.endswith(_WAITS) or name.startswith("cuMemFree"):
            _WAITED.set()
        step = (_BEFORE if answer is None else _AFTER).get(name)
        if step is not None:
            step(self, args, answer)

    # -- in stream order -------------------------------------------------------------------------------------

    def _allocated(self, args: tuple[Any, ...], answer: Any) -> None:
        if int(answer[1]):
            self._queue(int(answer[1]), int(args[0]), args[-1], ALLOCATED)

    def _freed(self, args: tuple[Any, ...], answer: Any) -> None:
        found = self._state.addresses.find(number_of(args[0]))
        if found is not None and found.kind == "allocation":
            self._queue(found.base, found.size, args[1], FREED)

    def _queue(self, address: int, size: int, stream: Any, value: int) -> None:
        # The fill is ordered by the stream of the allocation or free.
        found = self._state.stream(stream)
        if found not in self._state.streams.captures:
            self._under(found.context, lambda: self._driver.cuMemsetD8Async(address, value, size, stream))

    def _copied(self, args: tuple[Any, ...], answer: Any) -> None:
        """Fill the target of a copy to host memory, and delay the copy until the host waits: a host that reads the
        target too early sees the fill.
        """
        target, nbytes = number_of(args[0]), int(args[2])
        stream, pieces = self._state.stream(args[3]), self._state.addresses.pieces(target, nbytes)
        if not self._delays or nbytes <= FLAG or stream in self._state.streams.captures:
            return
        if pieces and all(may_poll(one) for one, _, _ in pieces) and abs(number_of(args[1]) - target) >= nbytes:
            self._queue(target, nbytes, args[3], ALLOCATED)
            _WAITED.clear()
            self._under(stream.context, lambda: self._driver.cuLaunchHostFunc(args[3], _DELAY, 0))

    # -- at once ---------------------------------------------------------------------------------------------

    def _made(self, args: tuple[Any, ...], answer: Any) -> None:
        found = self._state.addresses.find(int(answer[1]))
        if found is not None:
            self._fill(found.base, found.size, ALLOCATED)

    def _ends(self, args: tuple[Any, ...], answer: Any) -> None:
        found = self._state.addresses.find(number_of(args[0]))
        if found is not None and found.kind == "device memory" and found.base == number_of(args[0]):
            # The free would wait for the device as well.
            self._under(found.context, self._driver.cuCtxSynchronize)
            self._under(found.context, lambda: self._fill(found.base, found.size, FREED))

    def _host_made(self, args: tuple[Any, ...], answer: Any) -> None:
        if int(answer[1]):
            ctypes.memset(int(answer[1]), ALLOCATED, int(args[0]))

    def _host_ends(self, args: tuple[Any, ...], answer: Any) -> None:
        found = self._state.addresses.find(number_of(args[0]))
        if found is not None and found.ended is None and found.kind == "pinned memory":
            ctypes.memset(found.base, FREED, found.size)

    # -- mapped memory ---------------------------------------------------------------------------------------

    def _granted(self, args: tuple[Any, ...], answer: Any) -> None:
        writers = [device for device, rights in granted(args[2]).items() if rights == _WRITE]
        contexts: list[Any] = [one.context for one, device in self._state.streams.devices.items() if device in writers]
        for one in mappings(self._state, number_of(args[0]), int(args[1])) if contexts else ():
            fresh, one.bytes.fresh = one.bytes.fresh, ()
            start, end = one.offset, one.offset + one.size
            for low, high in fresh:
                first, last = max(low, start), min(high, end)
                if first < last:
                    fill = partial(self._fill, one.base + first - start, last - first, ALLOCATED)
                    self._under(contexts[0], fill)
                left = ((low, min(high, start)), (max(low, end), high))
                one.bytes.fresh += tuple(part for part in left if part[0] < part[1])

    # -- fills -----------------------------------------------------------------------------------------------

    def _fill(self, address: int, size: int, value: int) -> None:
        """Fill memory on a separate stream and wait for it."""
        failed, stream = (True, None) if self._state.streams.captures else self._driver.cuStreamCreate(_NON_BLOCKING)
        if failed:
            self._state.notes.add("poison")
            return
        self._driver.cuMemsetD8Async(address, value, size, stream)
        self._driver.cuStreamSynchronize(stream)
        self._driver.cuStreamDestroy(stream)

    def _under(self, context: Any, call: Callable[[], object]) -> None:
        with contextlib.ExitStack() as stack:
            if context:
                self._driver.cuCtxPushCurrent(cuda.CUcontext(context))
                stack.callback(self._driver.cuCtxPopCurrent)
            call()


_WAITED = threading.Event()
"""Set when the host waits for delayed copies."""
_LONGEST_DELAY = 0.02
"""Seconds of a delay of a copy; the host may wait for it unseen."""
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: _WAITED.wait(_LONGEST_DELAY) and None)
# The driver may call it after the checker has gone.
_DELAY: Any = cuda.CUhostFn(ctypes.cast(_FUNCTION, ctypes.c_void_p).value)
_WAITS = ("Synchronize", "Query")
_BEFORE: dict[str, _Step] = {
    **dict.fromkeys(("cuMemcpyAsync", "cuMemcpyDtoHAsync"), Poison._copied),
    "cuMemFreeAsync": Poison._freed,
    "cuMemFree": Poison._ends,
    "cuMemFreeHost": Poison._host_ends,
}
_AFTER: dict[str, _Step] = {
    **dict.fromkeys(("cuMemAllocAsync", "cuMemAllocFromPoolAsync"), Poison._allocated),
    **dict.fromkeys(("cuMemAlloc", "cuMemAllocPitch"), Poison._made),
    **dict.fromkeys(("cuMemHostAlloc", "cuMemAllocHost"), Poison._host_made),
    "cuMemSetAccess": Poison._granted,
}
