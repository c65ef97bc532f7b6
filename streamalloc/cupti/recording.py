"""Recording of allocations and frees in the order of time: those of driver calls, and the blocks of PyTorch, CuPy and
RMM.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator

from streamalloc.cupti.blocks import ALLOCATED, FREED
from streamalloc.cupti.libraries import Libraries
from streamalloc.cupti.subscription import Block, DriverCall, Subscription
from streamalloc.driver import Call
from streamalloc.driver.bindings import cuda, number_of

_MOST_ENTRIES = 5_000_000
"""Number of entries that PyTorch's history keeps. So many entries take some GB of host memory."""
ALLOCATIONS = frozenset(("cuMemAlloc", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemFree", "cuMemFreeAsync"))
"""Names of the driver functions whose calls are recorded."""
_SUCCESS = cuda.CUresult.CUDA_SUCCESS


class Recording:
    """Recording of the allocations and frees of this process: driver calls of any code, and the blocks of PyTorch, CuPy
    and RMM. It is made within the block of :meth:`running`; call :meth:`calls` after that block.
    """

    def __init__(self) -> None:
        self.libraries: Libraries = Libraries(stacks=None, most_entries=_MOST_ENTRIES)
        """The source of the blocks of PyTorch, CuPy and RMM."""
        self.failure: BaseException | None = None
        """Error that ended the recording early; None if there was none, and before the end of the block of
        :meth:`running`.
        """
        self._calls: list[Call] = []

    def called(self, call: DriverCall) -> None:
        """Record a driver call. The subscription calls this method."""
        self._calls.append(Call(call.function, call.args, call.answer, call.thread, call.time))

    def calls(self) -> list[Call]:
        """Return all allocations and frees, in the order of time. Call this after the block of :meth:`running`: a call
        within the block takes the blocks that were recorded so far, and a later call lacks them.

        The allocation of a block by a library has the form of a call of ``cuMemAllocAsync``. The segments that contain
        blocks are left out.
        """
        blocks = []
        for event in self.libraries.events():
            stream = cuda.CUstream(event.stream)
            if event.kind == ALLOCATED:
                args, answer = (event.nbytes, stream), (_SUCCESS, event.address)
                blocks.append(Call("cuMemAllocAsync", args, answer, 0, event.time))
            elif event.kind == FREED:
                blocks.append(Call("cuMemFreeAsync", (event.address, stream), (_SUCCESS,), 0, event.time))
        addresses = sorted({int(one.answer[1]) for one in blocks if len(one.answer) > 1})
        segments: set[int] = set()
        kept = []
        # A thread may record a free only after another thread has got the memory.
        for call in sorted(self._calls, key=lambda call: call.time):
            if "Alloc" not in call.name:
                address = number_of(call.args[0])
                if address not in segments:
                    kept.append(call)
                elif not int(call.answer[0]):
                    segments.discard(address)
            elif int(call.answer[0]) or not _has_any(addresses, int(call.answer[1]), int(call.args[0])):
                kept.append(call)
            else:
                segments.add(int(call.answer[1]))
        return sorted((*kept, *blocks), key=lambda call: call.time)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context manager that records during its block. Its end sets :attr:`failure`. Raises
        :class:`CuptiError` at the start if CUPTI cannot be used.
        """
        subscription = Subscription(self.called, ALLOCATIONS)
        self.libraries.gate = subscription.gate

        def end() -> None:
            self.failure = subscription.error
            # The list is made here, because PyTorch's history is deleted at the end of ``followed()``.
            self._calls = self.calls()

        with Block() as undo:
            undo.enter_context(self.libraries.followed())
            subscription.open()
            undo.callback(end)
            undo.callback(subscription.close)
            yield


def _has_any(addresses: list[int], start: int, nbytes: int) -> bool:
    at = bisect_left(addresses, start)
    return at < len(addresses) and addresses[at] < start + nbytes
