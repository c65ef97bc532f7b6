"""Full, typed, safe control of GPU memory through NVIDIA's cuda-python bindings.

An overview of the names follows. ``help(streamalloc.MemoryPool)`` describes one name, and ``dir(streamalloc)`` lists
all names:

* Objects of CUDA: ``Device``, ``Stream``, ``Event``, ``Graph``.
* Allocation: ``allocate``, ``MemoryPool``, ``CachingAllocator``, ``PlainMemory``, ``CallbackAllocator``.
* Memory: ``Buffer``, its views ``BufferView`` and ``TypedView``, ``copy_batch``, ``pointer_attributes``.
* Errors: ``CudaError`` and its classes, such as ``OutOfMemoryError``; ``ClosedError``, ``InUseError``.
* The driver's structs and enums: ``MemPoolProps``, ``MemAllocationProp``, ``MemLocation``, ``MemHandleType``.
* :mod:`streamalloc.vmm`: virtual memory; buffers that grow, sleep and wake; pages.
* :mod:`streamalloc.ipc`: sharing between processes; rings; stores of weights.
* :mod:`streamalloc.multicast`: writes that reach several GPUs; symmetric memory.
* :mod:`streamalloc.interop`: PyTorch, CuPy, Numba, RMM and others that allocate from a pool of this package.
* :mod:`streamalloc.observing`, :mod:`streamalloc.plots`, :mod:`streamalloc.traces`: live allocations and the lines of
  code that made them; pictures of memory; recording and replaying of allocations.
* :mod:`streamalloc.driver`: the choice of a real, simulated or checked driver; :mod:`streamalloc.testing`: tests
  without a GPU; :mod:`streamalloc.cupti`: the driver calls of other libraries.

``python -m streamalloc`` lists the commands.

PYTEST_DONT_REWRITE: the package may be imported before pytest starts (``streamalloc run -m pytest``).
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

import streamalloc.core.resource
import streamalloc.formats.html

if TYPE_CHECKING:
    # Each name is imported as itself, because type checkers treat only such names as public.
    from streamalloc import cupti as cupti
    from streamalloc import driver as driver
    from streamalloc import interop as interop
    from streamalloc import ipc as ipc
    from streamalloc import multicast as multicast
    from streamalloc import observing as observing
    from streamalloc import plots as plots
    from streamalloc import testing as testing
    from streamalloc import traces as traces
    from streamalloc import vmm as vmm
    from streamalloc.core.buffer import Buffer as Buffer
    from streamalloc.core.buffer import GraphBuffer as GraphBuffer
    from streamalloc.core.capabilities import Capabilities as Capabilities
    from streamalloc.core.copies import CopyOptions as CopyOptions
    from streamalloc.core.copies import copy_batch as copy_batch
    from streamalloc.core.device import Device as Device
    from streamalloc.core.device import MemoryInfo as MemoryInfo
    from streamalloc.core.errors import AddressSpaceError as AddressSpaceError
    from streamalloc.core.errors import CaptureError as CaptureError
    from streamalloc.core.errors import ClosedError as ClosedError
    from streamalloc.core.errors import CudaError as CudaError
    from streamalloc.core.errors import DeviceLostError as DeviceLostError
    from streamalloc.core.errors import EvictedError as EvictedError
    from streamalloc.core.errors import IncompleteTeamError as IncompleteTeamError
    from streamalloc.core.errors import InUseError as InUseError
    from streamalloc.core.errors import InvalidContextError as InvalidContextError
    from streamalloc.core.errors import InvalidDeviceError as InvalidDeviceError
    from streamalloc.core.errors import InvalidHandleError as InvalidHandleError
    from streamalloc.core.errors import InvalidValueError as InvalidValueError
    from streamalloc.core.errors import NotInitializedError as NotInitializedError
    from streamalloc.core.errors import NotPermittedError as NotPermittedError
    from streamalloc.core.errors import NotReadyError as NotReadyError
    from streamalloc.core.errors import NotSupportedError as NotSupportedError
    from streamalloc.core.errors import OutOfMemoryError as OutOfMemoryError
    from streamalloc.core.errors import PeerAccessError as PeerAccessError
    from streamalloc.core.errors import PendingFreesWarning as PendingFreesWarning
    from streamalloc.core.errors import StaleDescriptorError as StaleDescriptorError
    from streamalloc.core.errors import StillImportedError as StillImportedError
    from streamalloc.core.errors import SystemNotReadyError as SystemNotReadyError
    from streamalloc.core.event import Event as Event
    from streamalloc.core.graph import Graph as Graph
    from streamalloc.core.graph import GraphMemory as GraphMemory
    from streamalloc.core.graph import GraphMemoryStatistics as GraphMemoryStatistics
    from streamalloc.core.memory import BufferView as BufferView
    from streamalloc.core.memory import Memory as Memory
    from streamalloc.core.memory import TypedView as TypedView
    from streamalloc.core.memory_base import MemRangeAttributes as MemRangeAttributes
    from streamalloc.core.memory_base import discard_batch as discard_batch
    from streamalloc.core.memory_base import discard_prefetch_batch as discard_prefetch_batch
    from streamalloc.core.memory_base import prefetch_batch as prefetch_batch
    from streamalloc.core.properties import IpcEventHandle as IpcEventHandle
    from streamalloc.core.properties import IpcMemHandle as IpcMemHandle
    from streamalloc.core.properties import MemAccess as MemAccess
    from streamalloc.core.properties import MemAccessDesc as MemAccessDesc
    from streamalloc.core.properties import MemAdvise as MemAdvise
    from streamalloc.core.properties import MemAllocationType as MemAllocationType
    from streamalloc.core.properties import MemFabricHandle as MemFabricHandle
    from streamalloc.core.properties import MemHandleType as MemHandleType
    from streamalloc.core.properties import MemLocality as MemLocality
    from streamalloc.core.properties import MemLocation as MemLocation
    from streamalloc.core.properties import MemLocationType as MemLocationType
    from streamalloc.core.properties import MemPoolPtrExportData as MemPoolPtrExportData
    from streamalloc.core.resource import Fd as Fd
    from streamalloc.core.stream import Stream as Stream
    from streamalloc.core.stream import StreamLike as StreamLike
    from streamalloc.driver import DriverNotFoundError as DriverNotFoundError
    from streamalloc.driver import ForkedProcessError as ForkedProcessError
    from streamalloc.multicast.objects.multicast_object import MulticastObjectProp as MulticastObjectProp
    from streamalloc.observing import Observer as Observer
    from streamalloc.observing import observe as observe
    from streamalloc.pool import MemoryPool as MemoryPool
    from streamalloc.pool import PoolAttributes as PoolAttributes
    from streamalloc.pool import PoolStatistics as PoolStatistics
    from streamalloc.pool import allocate as allocate
    from streamalloc.pool.cache.allocator import CacheStatistics as CacheStatistics
    from streamalloc.pool.cache.allocator import CachingAllocator as CachingAllocator
    from streamalloc.pool.plain import CallbackAllocator as CallbackAllocator
    from streamalloc.pool.plain import PlainMemory as PlainMemory
    from streamalloc.pool.pointers import MemoryKind as MemoryKind
    from streamalloc.pool.pointers import PointerAttributes as PointerAttributes
    from streamalloc.pool.pointers import pointer_attributes as pointer_attributes
    from streamalloc.pool.properties import MemPoolProps as MemPoolProps
    from streamalloc.vmm.properties import MemAllocationProp as MemAllocationProp
    from streamalloc.vmm.properties import MemAllocFlags as MemAllocFlags

__version__ = "0.3.0"


def _later(module: str, name: str) -> Any:
    """Return a function that calls the function ``name`` of ``streamalloc.<module>``, which is imported at the first
    call.
    """
    return lambda *args, **options: getattr(importlib.import_module(f"streamalloc.{module}"), name)(*args, **options)


_above = streamalloc.core.resource.above
_above.reduce_for_processes = _later("ipc.multiprocess", "reduce")
# Without this import, a program that uses no ipc itself could not send its buffers through multiprocessing's queues.
_above.prepare_for_processes = functools.partial(importlib.import_module, "streamalloc.ipc.multiprocess")
_above.raw_handles = _later("ipc", "raw_handles")
_above.buffer_from_handle = _later("pool.plain", "buffer_from_handle")
_above.residence_of = _later("pool.places", "residence_of")
streamalloc.formats.html.draw = _later("plots", "draw")

# Names of subpackages that are imported at their first use, so that a program that only allocates need not wait for
# them.
_PACKAGES = ("cupti", "driver", "interop", "ipc", "multicast", "observing", "plots", "testing", "traces", "vmm")
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
    "pool": "MemoryPool PoolAttributes PoolStatistics allocate",
    "pool.cache.allocator": "CacheStatistics CachingAllocator",
    "pool.pointers": "MemoryKind PointerAttributes pointer_attributes",
    "pool.properties": "MemPoolProps",
    "pool.plain": "CallbackAllocator PlainMemory",
    "vmm.properties": "MemAllocFlags MemAllocationProp",
}
_LATER = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


if not TYPE_CHECKING:
    # The names of single objects are not in ``__all__``, because help() would print all of them with all their methods:
    # 10,000 lines. dir() lists these names.
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
