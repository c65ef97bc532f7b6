"""The same memory in several processes, with lifetimes that stay correct when processes die."""

from streamalloc.core.internal import Event, Fd
from streamalloc.core.resource import RawHandles
from streamalloc.ipc.exporter.share import Shared, raw_handles, send, serve, share
from streamalloc.ipc.importer.imported import (
    ImportedArray,
    ImportedBuffer,
    ImportedPool,
    ImportedRange,
    open_memory_handle,
)
from streamalloc.ipc.importer.imports import DriverVersionWarning
from streamalloc.ipc.importer.open import open, receive
from streamalloc.ipc.ring.consumer import RingConsumer, RingItem
from streamalloc.ipc.ring.producer import RingProducer, RingSlot, RingStatistics
from streamalloc.ipc.ring.ring import Ring
from streamalloc.ipc.store.errors import (
    LayoutChangedError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreGoneError,
    StoreKeyError,
)
from streamalloc.ipc.store.manifest import Tensor
from streamalloc.ipc.store.server import StoreServer
from streamalloc.ipc.store.store import Store, StoreEntry, StoreStatistics
from streamalloc.ipc.store.weights import StoredView, Weights
from streamalloc.ipc.store.writing import WeightsWriter
from streamalloc.ipc.transport.channel import Channel, Listener, Message, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.communicator import (
    Communicator,
    CommunicatorLike,
    GroupError,
    ProcessCommunicator,
    SelfCommunicator,
    as_communicator,
)

__all__ = [
    "Channel",
    "Communicator",
    "CommunicatorLike",
    "DriverVersionWarning",
    "Event",
    "Fd",
    "GroupError",
    "ImportedArray",
    "ImportedBuffer",
    "ImportedPool",
    "ImportedRange",
    "LayoutChangedError",
    "Listener",
    "Message",
    "PeerGoneError",
    "ProcessCommunicator",
    "ProtocolError",
    "RawHandles",
    "Ring",
    "RingConsumer",
    "RingItem",
    "RingProducer",
    "RingSlot",
    "RingStatistics",
    "SelfCommunicator",
    "Shared",
    "Store",
    "StoreBusyError",
    "StoreEntry",
    "StoreError",
    "StoreFullError",
    "StoreGoneError",
    "StoreKeyError",
    "StoreServer",
    "StoreStatistics",
    "StoredView",
    "Tensor",
    "Weights",
    "WeightsWriter",
    "as_communicator",
    "open",
    "open_memory_handle",
    "raw_handles",
    "receive",
    "send",
    "serve",
    "share",
]


def __dir__() -> list[str]:
    return [*__all__]
