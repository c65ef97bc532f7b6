"""Bridge to cuda.core. nccl4py, nvshmem4py and nvmath allocate buffers of cuda.core, so they use the bridge, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from streamalloc.core.errors import OutOfMemoryError
from streamalloc.core.internal import Memory, StreamLike
from streamalloc.interop.bridge import AllocatorSource, Bridge, Ledger, Sources, library, library_for
from streamalloc.interop.loans import Borrowed, Lent, borrow
from streamalloc.pool import MemoryPool

__all__ = ["buffer", "memory", "resource", "use"]


def use(*sources: AllocatorSource, callbacks: bool = False) -> Bridge:
    """Make ``Device.allocate`` of cuda.core allocate from ``sources`` on this thread (``Device.memory_resource``).

    Each thread has its own ``Device`` objects. On other threads, set ``memory_resource`` to a :func:`resource`.
    :doc:`/docs/guides/interop` has a program.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.
    callbacks
        True: cuda.core calls Python for each allocation. False: cuda.core gets the handles of pools and calls the
        driver; for other allocators it calls Python.

    Returns
    -------
    Bridge
        The bridge, started.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, no source is given, or two sources have the same device or different
        drivers. Or the sources are of a simulated driver.
    ModuleNotFoundError
        cuda.core is not installed.
    """
    return CudaCoreBridge(Sources(sources), callbacks).start()


def resource(source: AllocatorSource, *, callbacks: bool = False) -> Any:
    """Make a memory resource of cuda.core over a pool or another allocator. :func:`use` sets such a resource on each
    device.

    For a pool the resource is a ``DeviceMemoryResource``, which uses the pool's handle and does not own the pool. For
    another allocator, or with ``callbacks``, the resource calls Python, and each allocation must name its stream. If
    memory runs out, cuda.core's ``CUDAError`` is raised. Raises the errors of :func:`use`.
    """
    sources = Sources([source])
    ordinal = next(iter(sources.by_device))
    return _resource(sources, ordinal, callbacks)


class CudaCoreBridge(Bridge):
    """Bridge that replaces the memory resource of cuda.core's devices. :func:`use` returns such a bridge."""

    def _install(self, undo: contextlib.ExitStack) -> None:
        core = library("cuda.core", self.sources.session)
        for ordinal in self.sources.by_device:
            device = core.Device(ordinal)
            device.set_current()
            with _threshold_kept(MemoryPool.current(self.sources.device(ordinal))):
                before = device.memory_resource
            device.memory_resource = _resource(self.sources, ordinal, self._callbacks)
            undo.callback(setattr, device, "memory_resource", before)


def _resource(sources: Sources, ordinal: int, callbacks: bool) -> Any:
    core = library("cuda.core", sources.session)
    source = sources.by_device[ordinal]
    if isinstance(source, MemoryPool) and not callbacks:
        # Without options, DeviceMemoryResource() takes the handle of the device's current pool. So the pool is made
        # current.
        with source.make_current(), _threshold_kept(source):
            return core.DeviceMemoryResource(core.Device(ordinal))
    return resource_class(core)(sources, ordinal)


@contextlib.contextmanager
def _threshold_kept(pool: MemoryPool) -> Iterator[None]:
    """Restore a pool's release threshold after the ``with`` block. ``DeviceMemoryResource()`` changes a threshold
    of 0.
    """
    before = pool.attributes.release_threshold
    try:
        yield
    finally:
        pool.attributes.release_threshold = before


def resource_class(core: Any) -> Any:
    """Return a class of memory resources of cuda.core that call Python. ``core``: the module ``cuda.core``."""
    base: Any = core.MemoryResource

    class Resource(base):  # type: ignore[misc]
        """Memory resource of cuda.core for device memory. It calls Python for each allocation."""

        is_device_accessible, is_host_accessible, is_managed = True, False, False
        device_id = 0

        def __init__(self, sources: Sources, ordinal: int) -> None:
            self._ledger = Ledger(sources)
            self.device_id = ordinal

        def allocate(self, size: int, *, stream: Any) -> Any:
            """Allocate ``size`` bytes in the order of ``stream``. Returns a buffer of cuda.core.

            Raises cuda.core's ``CUDAError`` if memory runs out.
            """
            handle = int(stream.__cuda_stream__()[1])
            try:
                address = self._ledger.allocate(size, self.device_id, handle, stream)
            except OutOfMemoryError as error:
                raise _error(error) from error
            return core.Buffer.from_handle(address, size, mr=self, stream=stream)

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            """Free the memory at ``ptr`` in the order of ``stream``. cuda.core calls this method when a buffer is
            closed or dropped.
            """
            self._ledger.free(int(ptr), self.device_id, int(stream.__cuda_stream__()[1]))

    return Resource


def _error(error: OutOfMemoryError) -> Exception:
    """Return the error as a ``CUDAError`` of cuda.core. This class has no public name; if it is not found, returns
    ``error``.
    """
    try:
        kind: Any = library("cuda.core._utils.cuda_utils").CUDAError
    except (ModuleNotFoundError, AttributeError):
        return error
    made: Exception = kind(f"{error.name}: {error}")
    return made


def buffer(memory: Memory, stream: StreamLike) -> Any:
    """Return a buffer of cuda.core over ``memory``. The buffer keeps the memory alive. :func:`memory` does the reverse.

    ``stream`` waits for the work queued on the memory's stream. When the buffer is dropped, the memory's stream waits
    for ``stream``. If other streams use the buffer, make ``stream`` wait for them before the buffer is dropped. Raises
    ModuleNotFoundError if cuda.core is not installed, TypeError if ``memory`` is not of this package or ``stream`` is
    not a stream, ValueError if the memory is of a simulated driver or ``stream`` of another driver, and ClosedError if
    the memory was freed or ``stream`` was closed.
    """
    core = library_for("cuda.core", memory)
    lent = Lent(memory.view_as("u1"), stream)
    return core.Buffer.from_handle(lent.address, lent.nbytes, owner=lent)


def memory(buffer: Any, stream: StreamLike, *, lender: StreamLike | None = None) -> Borrowed:
    """Return a buffer of cuda.core as memory that ``stream`` uses, without a copy. Parameters and errors are those of
    :func:`borrow`.
    """
    return borrow(buffer, stream, lender=lender)
