"""Bridge to RMM: memory resources of RMM over pools and other allocators of streamalloc."""

from __future__ import annotations

import contextlib
from typing import Any

from streamalloc.driver.internal import cuda
from streamalloc.interop.bridge import AllocatorSource, Bridge, Ledger, Sources, library

__all__ = ["resource", "use"]

# Resources that are never freed. RMM keeps raw pointers to the resources and to their callbacks, and does not report
# when it last uses them.
_kept: list[object] = []


def use(*sources: AllocatorSource, callbacks: bool = False) -> Bridge:
    """Make RMM, and so cuDF and Dask-CUDA, allocate from ``sources`` on all threads (``set_per_device_resource``).

    :doc:`/docs/guides/interop` has a program.

    Parameters
    ----------
    sources
        Pools or other allocators, one for each device.
    callbacks
        True: RMM calls Python for each allocation. False: RMM gets the handles of pools, if all sources are pools.

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
        RMM is not installed.
    """
    return RMMBridge(Sources(sources), callbacks).start()


def resource(source: AllocatorSource, *, callbacks: bool = False) -> Any:
    """Return a device memory resource of RMM over a pool or another allocator. The resource is never freed.

    :func:`use` sets such a resource on each device. For a pool it is a ``CudaAsyncViewMemoryResource``, whose
    allocations run no Python code. For another allocator, or with ``callbacks``, it is a ``CallbackMemoryResource``. If
    memory runs out, RMM raises ``MemoryError``. Raises the errors of :func:`use`.
    """
    sources = Sources([source])
    return _resource(sources, next(iter(sources.by_device)), callbacks)


class RMMBridge(Bridge):
    """Bridge that replaces RMM's memory resource of each device. :func:`use` returns such a bridge."""

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        super().__init__(sources, callbacks)
        self.resources: dict[int, Any] = {}
        """Resources of RMM that this bridge sets, by device ordinal; empty before the first start."""

    def _install(self, undo: contextlib.ExitStack) -> None:
        mr = library("rmm", self.sources.session).mr
        for ordinal in self.sources.by_device:
            if ordinal not in self.resources:
                self.resources[ordinal] = _resource(self.sources, ordinal, self._callbacks)
            before = mr.get_per_device_resource(ordinal)
            mr.set_per_device_resource(ordinal, self.resources[ordinal])
            undo.callback(mr.set_per_device_resource, ordinal, before)


def _resource(sources: Sources, ordinal: int, callbacks: bool) -> Any:
    mr = library("rmm", sources.session).mr
    pools = sources.pools
    if callbacks or pools is None:
        made = mr.CallbackMemoryResource(*_callbacks(Ledger(sources), ordinal))
    else:
        made = mr.CudaAsyncViewMemoryResource(cuda.CUmemoryPool(pools[ordinal].handle))
    _kept.append((made, sources))
    return made


def _callbacks(ledger: Ledger, ordinal: int) -> tuple[Any, Any]:
    take, release = ledger.allocate, ledger.free

    # RMM passes on the errors of allocate(); OutOfMemoryError is a MemoryError. deallocate() must not raise.
    def allocate(nbytes: int, stream: Any) -> int:
        return take(nbytes, ordinal, stream.__cuda_stream__()[1])

    def deallocate(address: int, nbytes: int, stream: Any) -> None:
        try:  # noqa: SIM105 (costs nothing where nothing is raised)
            release(address, ordinal, stream.__cuda_stream__()[1])
        except Exception:
            pass

    return allocate, deallocate
