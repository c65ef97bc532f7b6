"""Bridge to Numba: allocations from pools of streamalloc, device arrays over memory, and memory over device arrays."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy.typing as npt

from streamalloc.core.errors import OutOfMemoryError
from streamalloc.core.internal import Buffer, Memory, Stream, StreamLike, work
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda as bindings
from streamalloc.interop.bridge import AllocatorSource, Bridge, Sources, dropped_of, library, library_for
from streamalloc.interop.loans import Borrowed, Lent, borrow, form

__all__ = ["array", "memory", "use"]


def use(*sources: AllocatorSource) -> Bridge:
    """Make Numba allocate device memory from ``sources`` on all threads, in all contexts that exist or are made later.

    :doc:`/docs/guides/interop` has a program.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.

    Returns
    -------
    Bridge
        The bridge, started. Numba cannot use the handles of pools, so it calls Python for each allocation.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, no source is given, or two sources have the same device or different
        drivers. Or the sources are of a simulated driver, and ``testing.install`` is not active.
    ModuleNotFoundError
        Numba is not installed.
    """
    return NumbaCallback(Sources(sources)).start()


class NumbaCallback(Bridge):
    """Bridge that replaces Numba's memory manager. :func:`use` returns such a bridge.

    Numba does not report which stream will use the memory. So memory is allocated on the legacy default stream. Numba's
    streams are blocking streams, so their later work comes after the allocation. A non-blocking stream of another
    library must wait for the legacy default stream.

    Memory that Numba drops is freed after the work of all blocking streams, and of all streams that this package knows.
    The host does not wait. Small arrays are freed in batches: at 64 arrays or 1 MiB of a device, when the host
    synchronises, when memory runs out, and at :meth:`stop`. While one of these streams is captured, the frees are
    deferred.
    """

    def _install(self, undo: contextlib.ExitStack) -> None:
        numba = library("numba.cuda.cudadrv.driver", self.sources.session)
        devices = library("numba.cuda.cudadrv.devices")
        manager = manager_class(self.sources)
        before = numba._memory_manager
        managers = {id(context): context.memory_manager for context in _contexts(devices)}

        def restore() -> None:
            numba._memory_manager = before
            numba._ensure_memory_manager()
            for context in _contexts(devices):
                if isinstance(context.memory_manager, manager):
                    known = managers.get(id(context))
                    context.memory_manager = known or numba._memory_manager(context=context)

        undo.callback(work, self.sources.session)
        undo.callback(restore)
        numba.set_memory_manager(manager)
        for context in _contexts(devices):
            context.memory_manager = manager(context=context)


def _contexts(devices: Any) -> list[Any]:
    """Return the contexts that Numba has made. Each of them has its own memory manager, which has to be replaced."""
    return [device.primary_context for device in devices.gpus.lst if getattr(device, "primary_context", None)]


def manager_class(sources: Sources) -> Any:
    """Return a class of memory managers for Numba that allocate from ``sources``."""
    cuda = library("numba.cuda")
    driver = library("numba.cuda.cudadrv.driver")
    base: Any = cuda.HostOnlyCUDAMemoryManager

    class Manager(base):  # type: ignore[misc]
        """Memory manager that allocates device memory from the sources. Pinned host memory is Numba's own."""

        interface_version = 1

        def initialize(self) -> None:
            """Do nothing. Numba calls this method before the first allocation."""

        def memalloc(self, size: int) -> Any:
            """Allocate ``size`` bytes on the legacy default stream, and return a ``MemoryPointer``. Raises
            ``CudaAPIError`` if no memory is left.
            """
            ordinal = int(self.context.device.id)
            dropped = dropped_of(sources.session)
            if sources.works or dropped.refused:
                dropped.refused = False
                work(sources.session)
            try:
                memory = sources.allocate(size, ordinal, 0)
            except OutOfMemoryError as error:
                raise driver.CudaAPIError(error.code, str(error)) from error
            address = bindings.CUdeviceptr(memory.address)
            return cuda.MemoryPointer(self.context, address, size, finalizer=functools.partial(_drop, [memory]))

        def get_ipc_handle(self, memory: Any) -> Any:
            """Raise ``NotImplementedError``: memory of pools has no legacy IPC handle."""
            raise NotImplementedError(
                "memory of pools has no legacy IPC handle: share it by streamalloc.ipc, or allocate it by Numba's own "
                "memory manager"
            )

        def get_memory_info(self) -> Any:
            """Return free and total bytes of the device. Memory that pools reserve counts as used."""
            info = sources.device(int(self.context.device.id)).memory_info()
            return cuda.MemoryInfo(free=info.free, total=info.total)

    return Manager


def array(
    memory: Memory,
    dtype: npt.DTypeLike | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    stream: StreamLike | None = None,
) -> Any:
    """Return a device array of Numba over ``memory``. The array keeps the memory alive.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of ``memory`` if it is a typed view, otherwise bytes in one
        dimension. With ``dtype`` alone the result has one dimension. With ``shape`` alone a typed view keeps its type,
        and other memory is bytes.
    stream
        The stream that uses the array; default: the legacy default stream, which Numba uses by default, too. This
        stream waits for the work queued on the memory's stream. When the array is dropped, the memory's stream waits
        for this stream. If other streams use the array, make this stream wait for them before the array is dropped.

    Raises
    ------
    TypeError, ValueError
        The memory cannot be viewed with this type and shape. Or it is of a simulated driver, and ``testing.install`` is
        not active. Or ``stream`` is not a stream of this driver.
    ModuleNotFoundError
        Numba is not installed.
    ClosedError
        The memory was freed, or ``stream`` was closed.
    EvictedError
        The memory is evicted.
    """
    numba = library_for("numba.cuda", memory)
    lent = Lent(form(memory, dtype, shape), memory.stream.device.default_stream if stream is None else stream)
    # The entry "stream" is left out, because Numba would make the host wait for that stream.
    interface = {key: value for key, value in lent.__cuda_array_interface__.items() if key != "stream"}
    return numba.from_cuda_array_interface(interface, owner=lent, sync=False)


def memory(array: Any, stream: Stream) -> Borrowed:
    """Return a device array of Numba as memory that ``stream`` uses, without a copy. The lender is the legacy default
    stream of the device of ``stream``. Raises the errors of :func:`borrow`.

    :doc:`/docs/guides/interop` has a program.
    """
    return borrow(array, stream, lender=stream.device.default_stream)


def _drop(held: list[Memory]) -> None:
    """Free memory that Numba has dropped. Numba calls this function on any thread, also at the exit of the process.

    ``held``: list with the memory. The call empties the list, so that Numba's callback keeps no memory. Memory that is
    not a :class:`Buffer` is released with its last reference.
    """
    memory = held.pop()
    if isinstance(memory, Buffer):
        dropped_of(session_of(memory)).add(memory)
