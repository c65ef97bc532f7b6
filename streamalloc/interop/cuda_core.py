"""cuda.core allocates from our memory, and with it nccl4py, nvshmem4py and nvmath, which build on its buffers."""

from __future__ import annotations

import contextlib
from typing import Any

from streamalloc.core.internal import Memory, OutOfMemoryError, StreamLike
from streamalloc.interop.bridge import Bridge, Ledger, Source, Sources, library
from streamalloc.interop.loans import Borrowed, Lent, borrow
from streamalloc.pool import MemoryPool

__all__ = ["CudaCoreBridge", "buffer", "memory", "resource", "use"]


def use(*sources: Source, callbacks: bool = False) -> Bridge:
    """Make our memory what ``Device.allocate`` of cuda.core takes (``Device.memory_resource``).

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.
    callbacks
        Call us for each allocation even where pools have handles.

    Returns
    -------
    Bridge
        Started.
    """
    return CudaCoreBridge(Sources(sources), callbacks).start()


def resource(source: Source, *, callbacks: bool = False) -> Any:
    """A memory resource of cuda.core over a pool or another allocator.

    Of a pool it is a ``DeviceMemoryResource``, which has its handle and does not own it; of anything else, or with
    ``callbacks``, one that calls us. Buffers of the latter need a stream when they are allocated. Where memory runs out
    cuda.core's ``CUDAError`` is raised.
    """
    sources = Sources([source])
    ordinal = next(iter(sources.by_device))
    return _resource(sources, ordinal, callbacks)


class CudaCoreBridge(Bridge):
    """The memory resource of each cuda.core device is ours."""

    __slots__ = ("_callbacks",)

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        super().__init__(sources)
        self._callbacks = callbacks

    def _install(self, undo: contextlib.ExitStack) -> None:
        core = library("cuda.core")
        for ordinal in self.sources.by_device:
            device = core.Device(ordinal)
            device.set_current()
            before = device.memory_resource
            device.memory_resource = _resource(self.sources, ordinal, self._callbacks)
            undo.callback(setattr, device, "memory_resource", before)


def _resource(sources: Sources, ordinal: int, callbacks: bool) -> Any:
    core = library("cuda.core")
    source = sources.by_device[ordinal]
    if isinstance(source, MemoryPool) and not callbacks:
        # It takes the handle of the pool that is current while it is made.
        with source.make_current():
            return core.DeviceMemoryResource(core.Device(ordinal))
    return resource_class(core)(sources, ordinal)


def resource_class(core: Any) -> Any:
    """A class of cuda.core's memory resources that call us."""
    base: Any = core.MemoryResource

    class Resource(base):  # type: ignore[misc]
        """Device memory of ours, by callbacks."""

        def __init__(self, sources: Sources, ordinal: int) -> None:
            self._ledger = Ledger(sources)
            self._ordinal = ordinal

        def allocate(self, size: int, *, stream: Any) -> Any:
            """A buffer of cuda.core, ordered by a stream."""
            handle = int(stream.__cuda_stream__()[1])
            try:
                address = self._ledger.allocate(size, self._ordinal, handle, stream)
            except OutOfMemoryError as error:
                raise _error(error) from error
            return core.Buffer.from_handle(address, size, mr=self, stream=stream)

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            """Free in the order of a stream; cuda.core calls it when a buffer is closed or dropped."""
            self._ledger.free(int(ptr), self._ordinal, int(stream.__cuda_stream__()[1]))

        @property
        def is_device_accessible(self) -> bool:
            return True

        @property
        def is_host_accessible(self) -> bool:
            return False

        @property
        def is_managed(self) -> bool:
            return False

        @property
        def device_id(self) -> int:
            return self._ordinal

    return Resource


def _error(error: OutOfMemoryError) -> Exception:
    """cuda.core's own error, which has no public name."""
    try:
        kind: Any = library("cuda.core._utils.cuda_utils").CUDAError
    except (ModuleNotFoundError, AttributeError):
        return error
    made: Exception = kind(f"{error.name}: {error}")
    return made


def buffer(memory: Memory, stream: StreamLike) -> Any:
    """A buffer of cuda.core over memory of ours, which it keeps alive.

    ``stream`` uses it: it waits for what the memory's stream has queued, and that waits for it when the buffer has
    gone. Join other streams to it before.
    """
    lent = Lent(memory.view_as("u1"), stream)
    return library("cuda.core").Buffer.from_handle(lent.address, lent.nbytes, owner=lent)


def memory(buffer: Any, stream: StreamLike, *, lender: StreamLike | None = None) -> Borrowed:
    """A buffer of cuda.core as memory of ours, for ``stream``; see :func:`borrow`."""
    return borrow(buffer, stream, lender=lender)
