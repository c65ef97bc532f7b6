"""CuPy allocates from our memory, and CuPy arrays over it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from streamalloc.core.internal import Memory, OutOfMemoryError, StreamLike
from streamalloc.interop.bridge import Bridge, Source, Sources, library
from streamalloc.interop.loans import Borrowed, Lent, borrow, form

__all__ = ["CuPyCallback", "CuPyHandles", "array", "memory", "use"]


def use(*sources: Source, callbacks: bool = False) -> Bridge:
    """Have CuPy allocate from our memory, on all threads.

    Parameters
    ----------
    sources
        Pools of the devices that CuPy uses, or other allocators, one for each device.
    callbacks
        Call us for each allocation even where pools have handles.

    Returns
    -------
    Bridge
        Started. :class:`CuPyHandles` where all sources are pools, else :class:`CuPyCallback`.

    Raises
    ------
    ValueError
        The thread is inside ``cupy.cuda.using_allocator``.
    """
    given = Sources(sources)
    return (CuPyCallback if callbacks or given.pools is None else CuPyHandles)(given).start()


class CuPyHandles(Bridge):
    """CuPy's own ``MemoryAsyncPool`` over the handles of our pools.

    CuPy makes the pools current, and sets their release thresholds to its limit (``CUPY_GPU_MEMORY_LIMIT``; else
    nothing is given back), also of the pools that are current on devices of which no pool was given. All of that is set
    back when the bridge stops.

    CuPy asks the pool for figures before each allocation (``cuMemPoolGetAttribute``), which no capture but a relaxed
    one allows. Allocations are therefore made in the relaxed mode (``cuThreadExchangeStreamCaptureMode``): on a stream
    that is being captured, as inside ``torch.cuda.graph``, the memory is the graph's, and beside a capture it is
    ordinary memory. Frees are CuPy's own calls in the thread's own mode: an array of another stream that is dropped
    while a capture in the global mode is under way breaks that. Callbacks do not have that.

    An array that is dropped after its CuPy stream is freed on the stream that is current then, as CuPy does with its
    own pools; one of a default stream is freed on that of the device that is current then. Callbacks do not have that.
    """

    __slots__ = ()

    def _install(self, undo: contextlib.ExitStack) -> None:
        cupy = library("cupy")
        pools = self.sources.pools or {}
        current = []
        for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
            device = self.sources.device(ordinal)
            pool = pools.get(ordinal) or type(next(iter(pools.values()))).current(device)
            undo.callback(setattr, pool.attributes, "release_threshold", pool.attributes.release_threshold)
            undo.enter_context(pool.make_current())
            current.append(pool.handle)
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(_in_relaxed_mode(self.sources, cupy.cuda.MemoryAsyncPool(pool_handles=current).malloc))
        undo.callback(cupy.cuda.set_allocator, before)


def _in_relaxed_mode(sources: Sources, malloc: Callable[[int], Any]) -> Callable[[int], Any]:
    """CuPy's allocation, whose questions to the pool break no capture that other code has begun."""
    relaxed = sources.session.relaxed

    def allocate(nbytes: int) -> Any:
        with relaxed():
            return malloc(nbytes)

    return allocate


class CuPyCallback(Bridge):
    """CuPy calls us for each allocation, on the stream that is CuPy's current one."""

    __slots__ = ()

    def _install(self, undo: contextlib.ExitStack) -> None:
        cupy = library("cupy")
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(_allocator(cupy, self.sources))
        undo.callback(cupy.cuda.set_allocator, before)


def _allocator(cupy: Any, sources: Sources) -> Any:
    get_stream, get_device = cupy.cuda.get_current_stream, cupy.cuda.device.get_device_id
    pointer, unowned = cupy.cuda.MemoryPointer, cupy.cuda.UnownedMemory
    hold, own = sources.hold, cupy.cuda.Stream

    def allocate(nbytes: int) -> Any:
        stream = get_stream()
        ordinal = get_device()
        try:
            # One that CuPy did not make may end whatever we keep.
            owned = type(stream) is own and getattr(stream, "_foreign_stream_ref", None) is None
            memory = sources.allocate(nbytes, ordinal, stream.ptr, stream if owned else None)
        except OutOfMemoryError as error:
            total = -1 if error.used is None else error.used
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, total, error.limit or 0) from error
        return pointer(unowned(memory.address, nbytes, hold(memory), ordinal), 0)

    return allocate


def array(
    memory: Memory,
    dtype: npt.DTypeLike | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    stream: StreamLike | None = None,
) -> Any:
    """A CuPy array over memory of ours, which it keeps alive.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of a typed view, else bytes.
    stream
        The stream that uses the array; default: CuPy's current one. It waits for what the memory's stream has queued,
        and that waits for it when the array has gone. Join other streams to it before.

    Raises
    ------
    TypeError, ValueError
        The memory has no such form.
    """
    cupy = library("cupy")
    lent = Lent(form(memory, dtype, shape), cupy.cuda.get_current_stream() if stream is None else stream)
    unowned = cupy.cuda.UnownedMemory(lent.address, lent.nbytes, lent, lent.location.id)
    return cupy.ndarray(lent.shape, lent.dtype, cupy.cuda.MemoryPointer(unowned, 0))


def memory(array: Any, stream: StreamLike) -> Borrowed:
    """A CuPy array as memory of ours, for ``stream``; CuPy's current stream is the lender's, see :func:`borrow`."""
    return borrow(array, stream, lender=library("cupy").cuda.get_current_stream())
