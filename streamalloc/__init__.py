"""Full, typed, safe control of GPU memory through NVIDIA's cuda-python bindings.

See :mod:`streamalloc.pool` for stream-ordered memory pools, and :mod:`streamalloc.driver` for the choice of a real or
a simulated driver.
"""

from streamalloc import driver
from streamalloc.buffer import Buffer, BufferView, GraphBuffer, Memory
from streamalloc.capabilities import Capabilities
from streamalloc.device import Device, MemoryInfo
from streamalloc.driver import DriverNotFoundError, ForkedProcessError
from streamalloc.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    DeviceLostError,
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
)
from streamalloc.graph import Graph, GraphMemory, GraphMemoryStatistics
from streamalloc.pointers import MemoryKind, PointerAttributes, pointer_attributes
from streamalloc.pool import MemoryPool, PoolAttributes, PoolStatistics, allocate
from streamalloc.properties import (
    MemAccess,
    MemAccessDesc,
    MemAllocationProp,
    MemAllocationType,
    MemAllocFlags,
    MemHandleType,
    MemLocality,
    MemLocation,
    MemLocationType,
    MemPoolProps,
    MulticastObjectProp,
)
from streamalloc.stream import Event, Stream

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BufferView",
    "Capabilities",
    "CaptureError",
    "ClosedError",
    "CudaError",
    "Device",
    "DeviceLostError",
    "DriverNotFoundError",
    "Event",
    "ForkedProcessError",
    "Graph",
    "GraphBuffer",
    "GraphMemory",
    "GraphMemoryStatistics",
    "InvalidContextError",
    "InvalidDeviceError",
    "InvalidHandleError",
    "InvalidValueError",
    "MemAccess",
    "MemAccessDesc",
    "MemAllocFlags",
    "MemAllocationProp",
    "MemAllocationType",
    "MemHandleType",
    "MemLocality",
    "MemLocation",
    "MemLocationType",
    "MemPoolProps",
    "Memory",
    "MemoryInfo",
    "MemoryKind",
    "MemoryPool",
    "MulticastObjectProp",
    "NotInitializedError",
    "NotPermittedError",
    "NotReadyError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PeerAccessError",
    "PendingFreesWarning",
    "PointerAttributes",
    "PoolAttributes",
    "PoolStatistics",
    "Stream",
    "allocate",
    "driver",
    "pointer_attributes",
]
