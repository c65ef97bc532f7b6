"""Bridge to CuPy: allocations from pools of streamalloc, arrays of CuPy over memory, and memory over arrays of CuPy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import numpy.typing as npt

from streamalloc.core.errors import OutOfMemoryError
from streamalloc.core.internal import Memory, StreamLike
from streamalloc.core.session import GLOBAL, RELAXED
from streamalloc.interop.bridge import AllocatorSource, Bridge, Sources, library, library_for
from streamalloc.interop.loans import Borrowed, Lent, borrow, form
from streamalloc.pool import MemoryPool

__all__ = ["array", "memory", "use"]


def use(*sources: AllocatorSource, callbacks: bool = False) -> Bridge:
    """Make CuPy allocate from ``sources``, on all threads.

    :doc:`/docs/recipes/one-pool` has a program.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device that CuPy uses.
    callbacks
        True: CuPy calls Python for each allocation. False: CuPy gets the handles of pools, if all sources are pools.

    Returns
    -------
    Bridge
        The bridge, started: by handles if all sources are pools, else by callbacks.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, no source is given, or two sources have the same device or different
        drivers. Or the sources are of a simulated driver, or this thread is inside ``cupy.cuda.using_allocator``.
    ModuleNotFoundError
        CuPy is not installed.
    """
    return CuPyBridge(Sources(sources), callbacks).start()


class CuPyBridge(Bridge):
    """Bridge that replaces CuPy's allocator. :func:`use` returns such a bridge.

    With callbacks CuPy calls Python for each allocation, on CuPy's current stream.

    With handles CuPy's own ``MemoryAsyncPool`` allocates. The bridge makes the pools current, and CuPy sets their
    release thresholds to CuPy's limit (``CUPY_GPU_MEMORY_LIMIT``; default: never release). CuPy also sets the threshold
    of the current pool of each device without a source. :meth:`stop` restores the current pools and their thresholds.
    Allocations are made in relaxed mode (``cuThreadExchangeStreamCaptureMode``), so that they invalidate no
    capture. If the stream is being captured, as inside ``torch.cuda.graph``, the memory belongs to the graph. These
    limits hold with handles, but not with callbacks:

    * CuPy frees in the thread's own capture mode. Dropping an array of another stream invalidates a capture in global
      mode.
    * If an array is dropped after its stream, CuPy frees it on the current stream, as in its own pools.
    * An array of a default stream is freed on the default stream of the current device.
    """

    def _install(self, undo: contextlib.ExitStack) -> None:
        cupy, pools = library("cupy", self.sources.session), self.sources.pools
        before = cupy.cuda.get_allocator()
        by_handles = pools is not None and not self._callbacks
        cupy.cuda.set_allocator(self._by_handles(cupy, undo) if by_handles else _allocator(cupy, self.sources))
        undo.callback(cupy.cuda.set_allocator, before)

    def _by_handles(self, cupy: Any, undo: contextlib.ExitStack) -> Callable[[int], Any]:
        """Make the pools current, and return a function of CuPy that allocates from the current pools, in relaxed
        capture mode.
        """
        pools, current = self.sources.pools or {}, []
        for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
            pool = pools.get(ordinal) or MemoryPool.current(self.sources.device(ordinal))
            undo.callback(setattr, pool.attributes, "release_threshold", pool.attributes.release_threshold)
            undo.enter_context(pool.make_current())
            current.append(pool.handle)
        return _in_relaxed_mode(self.sources, cupy.cuda.MemoryAsyncPool(pool_handles=current).malloc)


def _in_relaxed_mode(sources: Sources, malloc: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function that calls ``malloc`` in relaxed capture mode, in which it invalidates no capture of other
    code.
    """
    exchange = cast(Any, sources.session.driver).cuThreadExchangeStreamCaptureMode

    def allocate(nbytes: int) -> Any:
        mode = GLOBAL
        try:
            _, mode = exchange(RELAXED)
            return malloc(nbytes)
        finally:
            exchange(mode or GLOBAL)  # The mode is None if the driver has refused the change.

    return allocate


def _allocator(cupy: Any, sources: Sources) -> Any:
    get_stream, get_device = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id
    pointer, unowned = cupy.cuda.MemoryPointer, cupy.cuda.UnownedMemory
    take, own = sources.allocate, cupy.cuda.Stream

    def allocate(nbytes: int) -> Any:
        stream, ordinal = get_stream(), get_device()
        # If CuPy has not made the stream, CuPy's stream object does not keep the handle valid, so it is no owner.
        owned = type(stream) is own and getattr(stream, "_foreign_stream_ref", None) is None
        try:
            memory = take(nbytes, ordinal, stream.ptr, stream if owned else None)
        except OutOfMemoryError as error:
            total = -1 if error.used is None else error.used
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, total, error.limit or 0) from error
        return pointer(unowned(memory.address, nbytes, memory, ordinal), 0)

    return allocate


def array(
    memory: Memory,
    dtype: npt.DTypeLike | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    stream: StreamLike | None = None,
) -> Any:
    """Return an array of CuPy over ``memory``. The array keeps the memory alive.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of ``memory`` if it is a typed view, otherwise bytes in one
        dimension. With ``dtype`` alone the result has one dimension. With ``shape`` alone a typed view keeps its type,
        and other memory is bytes.
    stream
        The stream that uses the array; default: CuPy's current stream. This stream waits for the work queued on the
        memory's stream. When the array is dropped, the memory's stream waits for this stream. If other streams use the
        array, make this stream wait for them before the array is dropped.

    Raises
    ------
    TypeError, ValueError
        The memory cannot be viewed with this type and shape, or is of a simulated driver. Or ``stream`` is not a stream
        of this driver.
    ModuleNotFoundError
        CuPy is not installed.
    ClosedError
        The memory was freed, or ``stream`` was closed.
    """
    cupy = library_for("cupy", memory)
    lent = Lent(form(memory, dtype, shape), cupy.cuda.get_current_stream() if stream is None else stream)
    unowned = cupy.cuda.UnownedMemory(lent.address, lent.nbytes, lent, lent.location.id)
    return cupy.ndarray(lent.shape, lent.dtype, cupy.cuda.MemoryPointer(unowned, 0))


def memory(array: Any, stream: StreamLike) -> Borrowed:
    """Return an array of CuPy as memory that ``stream`` uses, without a copy.

    The lender is CuPy's current stream. Raises the errors of :func:`borrow`, and ModuleNotFoundError if CuPy is not
    installed.
    """
    return borrow(array, stream, lender=library("cupy").cuda.get_current_stream())
