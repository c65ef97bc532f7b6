"""The same memory in several processes, with lifetimes that hold when processes die."""

from streamalloc.core.internal import Fd
from streamalloc.ipc.ring.ring import Ring, RingConsumer, RingItem, RingProducer, RingSlot, RingStatistics
from streamalloc.ipc.sharing.descriptor import Chunk, Descriptor, Flags, Mechanism
from streamalloc.ipc.sharing.exports import Shared, serve
from streamalloc.ipc.sharing.importer import DriverVersionWarning
from streamalloc.ipc.sharing.imports import ImportedArray, ImportedBuffer, ImportedRange
from streamalloc.ipc.sharing.opening import Imported, open, receive
from streamalloc.ipc.sharing.pools import ImportedPool
from streamalloc.ipc.sharing.sending import send
from streamalloc.ipc.sharing.share import share
from streamalloc.ipc.transport.channel import Channel, Listener, Peer
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
from streamalloc.ipc.transport.packets import Message, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.process_group import GroupError

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
    "TorchCommunicator",
    "TorchGroupLike",
    "as_communicator",
    "open",
    "receive",
    "send",
    "serve",
    "share",
]
