"""RMM allocates from our memory: device memory resources over pools and other allocators of ours."""

from __future__ import annotations

import contextlib
from typing import Any

from streamalloc.driver.internal import cuda
from streamalloc.interop.bridge import Bridge, Ledger, Source, Sources, library

__all__ = ["RMMBridge", "resource", "use"]

# RMM keeps raw pointers to resources and to what they call, and nobody tells when it is done with them.
_kept: list[object] = []


def use(*sources: Source, callbacks: bool = False) -> Bridge:
    """Make our memory RMM's resource of each device (``set_per_device_resource``), as cuDF and Dask-CUDA use it.

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
    return RMMBridge(Sources(sources), callbacks).start()


def resource(source: Source, *, callbacks: bool = False) -> Any:
    """A device memory resource of RMM over a pool or another allocator; it is kept for ever.

    Of a pool it is a ``CudaAsyncViewMemoryResource``, and no Python runs for its allocations; of anything else, or with
    ``callbacks``, a ``CallbackMemoryResource``. Where memory runs out RMM raises ``MemoryError``.
    """
    sources = Sources([source])
    return _resource(sources, next(iter(sources.by_device)), callbacks)


class RMMBridge(Bridge):
    """RMM's resource of each device is ours."""

    __slots__ = ("_callbacks", "resources")

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        super().__init__(sources)
        self._callbacks = callbacks
        self.resources: dict[int, Any] = {}
        """RMM's resources by device, from the first start on."""

    def _install(self, undo: contextlib.ExitStack) -> None:
        mr = library("rmm").mr
        for ordinal in self.sources.by_device:
            if ordinal not in self.resources:
                self.resources[ordinal] = _resource(self.sources, ordinal, self._callbacks)
            before = mr.get_per_device_resource(ordinal)
            mr.set_per_device_resource(ordinal, self.resources[ordinal])
            undo.callback(mr.set_per_device_resource, ordinal, before)


def _resource(sources: Sources, ordinal: int, callbacks: bool) -> Any:
    mr = library("rmm").mr
    pools = sources.pools
    if callbacks or pools is None:
        made = mr.CallbackMemoryResource(*_callbacks(Ledger(sources), ordinal))
    else:
        made = mr.CudaAsyncViewMemoryResource(cuda.CUmemoryPool(pools[ordinal].handle))
    _kept.append((made, sources))
    return made


def _callbacks(ledger: Ledger, ordinal: int) -> tuple[Any, Any]:
    # An exception of the first becomes RMM's: ours for exhausted memory is a MemoryError. The second must raise none.
    def allocate(nbytes: int, stream: Any) -> int:
        return ledger.allocate(nbytes, ordinal, stream.__cuda_stream__()[1])

    def deallocate(address: int, nbytes: int, stream: Any) -> None:
        with contextlib.suppress(Exception):
            ledger.free(address, ordinal, stream.__cuda_stream__()[1])

    return allocate, deallocate
