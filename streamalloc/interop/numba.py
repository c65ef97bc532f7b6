"""Numba allocates device arrays from our memory.

Also by the environment: ``NUMBA_CUDA_MEMORY_MANAGER=streamalloc.interop.numba`` has Numba allocate from the pools that
are current.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from streamalloc.core.internal import Buffer, Device, Memory, OutOfMemoryError, Stream, StreamLike, work
from streamalloc.driver.internal import cuda as bindings
from streamalloc.interop.bridge import Bridge, Source, Sources, free_after_all, library
from streamalloc.interop.loans import Borrowed, Lent, borrow, form
from streamalloc.pool import MemoryPool

__all__ = ["NumbaCallback", "array", "memory", "use"]


def use(*sources: Source) -> Bridge:
    """Have Numba allocate device memory from ours, in contexts that it has and in those to come.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.

    Returns
    -------
    Bridge
        Started; Numba has no use for handles, so that it calls us for each allocation.
    """
    return NumbaCallback(Sources(sources)).start()


class NumbaCallback(Bridge):
    """Numba's memory manager is ours.

    Numba does not say for which stream memory is. It is allocated on the legacy default stream, which orders it for
    Numba's own streams; on a non-blocking stream of another library use it after a dependency. It is freed when Numba
    drops it, in the order of a stream that waits for all work that its device has by then: what ran on such a stream
    is done with it, and the host waits for nothing. The driver would break each capture of the device by that: while
    PyTorch or CuPy captures on the same thread, or this library on any, the free waits for a later call.
    """

    __slots__ = ()

    def _install(self, undo: contextlib.ExitStack) -> None:
        numba = library("numba.cuda.cudadrv.driver")
        devices = library("numba.cuda.cudadrv.devices")
        manager = manager_class(lambda context: self.sources)
        before = numba._memory_manager
        managers = {id(context): context.memory_manager for context in _contexts(devices)}

        def restore() -> None:
            numba._memory_manager = before
            numba._ensure_memory_manager()
            for context in _contexts(devices):
                if isinstance(context.memory_manager, manager):
                    known = managers.get(id(context))
                    context.memory_manager = known or numba._memory_manager(context=context)

        undo.callback(restore)
        numba.set_memory_manager(manager)
        for context in _contexts(devices):
            context.memory_manager = manager(context=context)


def _contexts(devices: Any) -> list[Any]:
    """The contexts that Numba has made already; each has a memory manager of its own."""
    return [device.primary_context for device in devices.gpus.lst if getattr(device, "primary_context", None)]


def manager_class(sources_of: Callable[[Any], Sources]) -> Any:
    """A class of memory managers for Numba; ``sources_of`` gives the memory for a Numba context."""
    cuda = library("numba.cuda")
    driver = library("numba.cuda.cudadrv.driver")
    base: Any = cuda.HostOnlyCUDAMemoryManager

    class Manager(base):  # type: ignore[misc]
        """Device memory of ours; pinned host memory stays Numba's own business."""

        def initialize(self) -> None:
            """Nothing is needed."""

        def memalloc(self, size: int) -> Any:
            """Device memory on the legacy default stream."""
            ordinal = int(self.context.device.id)
            sources = sources_of(self.context)
            work(sources.session)
            try:
                memory = sources.allocate(size, ordinal, 0)
            except OutOfMemoryError as error:
                raise driver.CudaAPIError(error.code, str(error)) from error
            address = bindings.CUdeviceptr(memory.address)
            return cuda.MemoryPointer(self.context, address, size, finalizer=functools.partial(_let_go, [memory]))

        def get_ipc_handle(self, memory: Any) -> Any:
            """Refused: legacy IPC handles of such memory do not exist."""
            raise NotImplementedError(
                "memory of pools has no legacy IPC handle: share it by streamalloc.ipc, or allocate it by Numba's own "
                "memory manager"
            )

        def get_memory_info(self) -> Any:
            """Free and total memory of the device, which pools hold more of than they use."""
            info = sources_of(self.context).device(int(self.context.device.id)).memory_info()
            return cuda.MemoryInfo(free=info.free, total=info.total)

        @property
        def interface_version(self) -> int:
            return 1

    return Manager


def array(
    memory: Memory,
    dtype: npt.DTypeLike | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    stream: StreamLike | None = None,
) -> Any:
    """A Numba device array over memory of ours, which it keeps alive.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of a typed view, else bytes.
    stream
        The stream that uses the array; default: the legacy default stream, which is Numba's. It waits for what the
        memory's stream has queued, and that waits for it when the array has gone. Join other streams to it before.

    Raises
    ------
    TypeError, ValueError
        The memory has no such form.
    """
    numba = library("numba.cuda")
    lent = Lent(form(memory, dtype, shape), memory.stream.device.default_stream if stream is None else stream)
    # Without a stream in it, for which Numba would have the host wait.
    interface = {key: value for key, value in lent.__cuda_array_interface__.items() if key != "stream"}
    return numba.from_cuda_array_interface(interface, owner=lent, sync=False)


def memory(array: Any, stream: Stream) -> Borrowed:
    """A Numba device array as memory of ours, for ``stream``; the legacy default stream is the lender's."""
    return borrow(array, stream, lender=stream.device.default_stream)


def _let_go(held: list[Memory]) -> None:
    """Numba's finaliser: runs wherever an array is dropped, and at the end of the process, too."""
    memory = held.pop()
    if isinstance(memory, Buffer):
        free_after_all(memory)


def __getattr__(name: str) -> Any:
    if name == "_numba_memory_manager":
        return manager_class(_current)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_current_sources: dict[int, Sources] = {}


def _current(context: Any) -> Sources:
    """The pool that is current on a context's device when Numba first allocates there."""
    ordinal = int(context.device.id)
    found = _current_sources.get(ordinal)
    if found is None:
        found = _current_sources.setdefault(ordinal, Sources([MemoryPool.current(Device(ordinal))]))
    return found
