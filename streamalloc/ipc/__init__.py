"""The same memory in several processes, with lifetimes that stay correct when processes die."""

from streamalloc.core.internal import Fd
from streamalloc.ipc.exporter.share import Shared, send, serve, share
from streamalloc.ipc.importer.imported import ImportedArray, ImportedBuffer, ImportedPool, ImportedRange
from streamalloc.ipc.importer.open import DriverVersionWarning, Imported, open, receive
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
from streamalloc.ipc.store.manifest import Layout, Tensor
from streamalloc.ipc.store.server import StoreServer
from streamalloc.ipc.store.store import Store, StoreEntry, StoreStatistics
from streamalloc.ipc.store.weights import StoredView, Weights
from streamalloc.ipc.store.writing import WeightsWriter
from streamalloc.ipc.transport.channel import Channel, Listener, Message, Peer, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.communicator import (
    AllgatherCommunicator,
    Communicator,
    CommunicatorLike,
    MPICommunicator,
    MPIGroupLike,
    ProcessCommunicator,
    ProcessGroupLike,
    SelfCommunicator,
    TorchCommunicator,
    TorchGroupLike,
    as_communicator,
)
from streamalloc.ipc.transport.process_group import GroupError
from streamalloc.ipc.wire.descriptor import Chunk, Descriptor, Flags, Mechanism

__all__ = [
    "AllgatherCommunicator",
    "Channel",
    "Chunk",
    "Communicator",
    "CommunicatorLike",
    "Descriptor",
    "DriverVersionWarning",
    "Fd",
    "Flags",
    "GroupError",
    "Imported",
    "ImportedArray",
    "ImportedBuffer",
    "ImportedPool",
    "ImportedRange",
    "Layout",
    "LayoutChangedError",
    "Listener",
    "MPICommunicator",
    "MPIGroupLike",
    "Mechanism",
    "Message",
    "Peer",
    "PeerGoneError",
    "ProcessCommunicator",
    "ProcessGroupLike",
    "ProtocolError",
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
    "TorchCommunicator",
    "TorchGroupLike",
    "Weights",
    "WeightsWriter",
    "as_communicator",
    "open",
    "receive",
    "send",
    "serve",
    "share",
]
