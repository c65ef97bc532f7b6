"""Full, typed, safe control of GPU memory through NVIDIA's cuda-python bindings.

The map; ``help(streamalloc.MemoryPool)`` tells of one name, and ``dir(streamalloc)`` has all of them:

* Objects of CUDA: ``Device``, ``Stream``, ``Event``, ``Graph``.
* Allocation: ``allocate``, ``MemoryPool``, ``CachingAllocator``, ``PlainMemory``, ``CallbackAllocator``.
* Memory: ``Buffer``, its views ``BufferView`` and ``TypedView``, ``copy_batch``, ``pointer_attributes``.
* Errors: ``CudaError`` and its classes, such as ``OutOfMemoryError``; ``ClosedError``, ``InUseError``.
* The driver's structs and enums: ``MemPoolProps``, ``MemAllocationProp``, ``MemLocation``, ``MemHandleType``.
* :mod:`streamalloc.vmm`: virtual memory; buffers that grow, sleep and wake; pages.
* :mod:`streamalloc.ipc`: sharing between processes; rings; stores of weights.
* :mod:`streamalloc.multicast`: writes that reach several GPUs; symmetric memory.
* :mod:`streamalloc.interop`: PyTorch, CuPy, Numba, RMM and others that allocate from a pool of this package.
* :mod:`streamalloc.observing`, :mod:`streamalloc.plots`, :mod:`streamalloc.traces`: live allocations and the lines that
  made them, pictures, recording and replaying.
* :mod:`streamalloc.driver`: the choice of a real, simulated or checked driver; :mod:`streamalloc.testing`: tests
  without a GPU; :mod:`streamalloc.cupti`: the driver calls of other libraries.

``python -m streamalloc`` lists the commands.

PYTEST_DONT_REWRITE: the package may be imported before pytest starts (``streamalloc run -m pytest``).
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import streamalloc.formats.html
from streamalloc.core.resource import above

if TYPE_CHECKING:
    from streamalloc import driver, interop, ipc, multicast, observing, plots, testing, traces, vmm
    from streamalloc.core.buffer import Buffer, GraphBuffer
    from streamalloc.core.capabilities import Capabilities
    from streamalloc.core.copies import CopyOptions, copy_batch
    from streamalloc.core.device import Device, MemoryInfo
    from streamalloc.core.errors import (
        AddressSpaceError,
        CaptureError,
        ClosedError,
        CudaError,
        DeviceLostError,
        EvictedError,
        IncompleteTeamError,
        InUseError,
        InvalidContextError,
        InvalidDeviceError,
        InvalidHandleError,
        InvalidValueError,
        NotInitializedError,
        NotPermittedError,
        NotReadyError,
        NotSupportedError,
        OutOfMemoryError,
        PeerAccessError,
        PendingFreesWarning,
        StaleDescriptorError,
        StillImportedError,
        SystemNotReadyError,
    )
    from streamalloc.core.event import Event
    from streamalloc.core.graph import Graph, GraphMemory, GraphMemoryStatistics
    from streamalloc.core.memory import BufferView, Memory, TypedView
    from streamalloc.core.memory_base import MemRangeAttributes, discard_batch, discard_prefetch_batch, prefetch_batch
    from streamalloc.core.properties import (
        IpcEventHandle,
        IpcMemHandle,
        MemAccess,
        MemAccessDesc,
        MemAdvise,
        MemAllocationType,
        MemFabricHandle,
        MemHandleType,
        MemLocality,
        MemLocation,
        MemLocationType,
        MemPoolPtrExportData,
    )
    from streamalloc.core.resource import Fd
    from streamalloc.core.stream import Stream, StreamLike
    from streamalloc.driver import DriverNotFoundError, ForkedProcessError
    from streamalloc.multicast.objects.multicast_object import MulticastObjectProp
    from streamalloc.observing import Observer, observe
    from streamalloc.pool import (
        CacheStatistics,
        CachingAllocator,
        CallbackAllocator,
        MemoryPool,
        PlainMemory,
        PoolAttributes,
        PoolStatistics,
        allocate,
    )
    from streamalloc.pool.pointers import MemoryKind, PointerAttributes, pointer_attributes
    from streamalloc.pool.properties import MemPoolProps
    from streamalloc.vmm.properties import MemAllocationProp, MemAllocFlags

__version__ = "0.3.0"

if TYPE_CHECKING:
    __all__ = [
        "AddressSpaceError",
        "Buffer",
        "BufferView",
        "CacheStatistics",
        "CachingAllocator",
        "CallbackAllocator",
        "Capabilities",
        "CaptureError",
        "ClosedError",
        "CopyOptions",
        "CudaError",
        "Device",
        "DeviceLostError",
        "DriverNotFoundError",
        "Event",
        "EvictedError",
        "Fd",
        "ForkedProcessError",
        "Graph",
        "GraphBuffer",
        "GraphMemory",
        "GraphMemoryStatistics",
        "InUseError",
        "IncompleteTeamError",
        "InvalidContextError",
        "InvalidDeviceError",
        "InvalidHandleError",
        "InvalidValueError",
        "IpcEventHandle",
        "IpcMemHandle",
        "MemAccess",
        "MemAccessDesc",
        "MemAdvise",
        "MemAllocFlags",
        "MemAllocationProp",
        "MemAllocationType",
        "MemFabricHandle",
        "MemHandleType",
        "MemLocality",
        "MemLocation",
        "MemLocationType",
        "MemPoolProps",
        "MemPoolPtrExportData",
        "MemRangeAttributes",
        "Memory",
        "MemoryInfo",
        "MemoryKind",
        "MemoryPool",
        "MulticastObjectProp",
        "NotInitializedError",
        "NotPermittedError",
        "NotReadyError",
        "NotSupportedError",
        "Observer",
        "OutOfMemoryError",
        "PeerAccessError",
        "PendingFreesWarning",
        "PlainMemory",
        "PointerAttributes",
        "PoolAttributes",
        "PoolStatistics",
        "StaleDescriptorError",
        "StillImportedError",
        "Stream",
        "StreamLike",
        "SystemNotReadyError",
        "TypedView",
        "allocate",
        "copy_batch",
        "discard_batch",
        "discard_prefetch_batch",
        "driver",
        "interop",
        "ipc",
        "multicast",
        "observe",
        "observing",
        "plots",
        "pointer_attributes",
        "prefetch_batch",
        "testing",
        "traces",
        "vmm",
    ]


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of an area above core, imported at its first call."""
    return lambda *args, **options: getattr(importlib.import_module(f"streamalloc.{module}"), name)(*args, **options)


above.reduce_for_processes = _later("ipc.multiprocess", "reduce")
# The import registers the classes; for programs that never name ipc.
above.prepare_for_processes = partial(importlib.import_module, "streamalloc.ipc.multiprocess")
above.raw_handles = _later("ipc", "raw_handles")
above.buffer_from_handle = _later("pool.borrowed", "buffer_from_handle")
streamalloc.formats.html.draw = _later("plots", "draw")

# Imported when first used: whoever only allocates does not wait for the rest, and who tests other things for nothing.
_PACKAGES = ("driver", "interop", "ipc", "multicast", "observing", "plots", "testing", "traces", "vmm")
_NAMES_BY_MODULE = {
    "core.buffer": "Buffer GraphBuffer",
    "core.capabilities": "Capabilities",
    "core.copies": "CopyOptions copy_batch",
    "core.device": "Device MemoryInfo",
    "core.errors": (
        "AddressSpaceError CaptureError ClosedError CudaError DeviceLostError EvictedError InUseError "
        "IncompleteTeamError InvalidContextError InvalidDeviceError InvalidHandleError InvalidValueError "
        "NotInitializedError NotPermittedError NotReadyError NotSupportedError OutOfMemoryError PeerAccessError "
        "PendingFreesWarning StaleDescriptorError StillImportedError SystemNotReadyError"
    ),
    "core.graph": "Graph GraphMemory GraphMemoryStatistics",
    "core.memory_base": "MemRangeAttributes discard_batch discard_prefetch_batch prefetch_batch",
    "core.memory": "BufferView Memory TypedView",
    "core.properties": (
        "IpcEventHandle IpcMemHandle MemAccess MemAccessDesc MemAdvise MemAllocationType MemFabricHandle MemHandleType "
        "MemLocality MemLocation MemLocationType MemPoolPtrExportData"
    ),
    "core.event": "Event",
    "core.resource": "Fd",
    "core.stream": "Stream StreamLike",
    "driver": "DriverNotFoundError ForkedProcessError",
    "multicast.objects.multicast_object": "MulticastObjectProp",
    "observing": "Observer observe",
    "pool": (
        "CacheStatistics CachingAllocator CallbackAllocator MemoryPool PlainMemory PoolAttributes PoolStatistics "
        "allocate"
    ),
    "pool.pointers": "MemoryKind PointerAttributes pointer_attributes",
    "pool.properties": "MemPoolProps",
    "vmm.properties": "MemAllocFlags MemAllocationProp",
}
_LATER = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


if not TYPE_CHECKING:
    # help() prints all that this names, with all methods: 10,000 lines of the classes. dir() has the other names.
    __all__ = [*_PACKAGES]


def __dir__() -> list[str]:
    return [*_PACKAGES, *_LATER, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"streamalloc.{name}")
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(f"streamalloc.{_LATER[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
