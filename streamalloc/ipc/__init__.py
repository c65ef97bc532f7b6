"""The same memory in several processes, with lifetimes that hold when processes die."""

from streamalloc.fd import Fd
from streamalloc.ipc.channel import Channel, Listener, Message, Peer, PeerGoneError, ProtocolError
from streamalloc.ipc.descriptor import Chunk, Descriptor, Flags, Mechanism
from streamalloc.ipc.endpoint import serve
from streamalloc.ipc.group import (
    Communicator,
    MPICommunicator,
    ProcessCommunicator,
    SelfCommunicator,
    TorchCommunicator,
    as_communicator,
)
from streamalloc.ipc.leases import LeasedBuffer
from streamalloc.ipc.opening import DriverVersionWarning, ImportedBuffer, ImportedPool, ImportedRange, open
from streamalloc.ipc.pidfd import fetch_descriptor
from streamalloc.ipc.ring import Ring, RingConsumer, RingItem, RingProducer, RingSlot, RingStatistics
from streamalloc.ipc.sharing import Shared, share
from streamalloc.ipc.transfer import receive, send

__all__ = [
    "Channel",
    "Chunk",
    "Communicator",
    "Descriptor",
    "DriverVersionWarning",
    "Fd",
    "Flags",
    "ImportedBuffer",
    "ImportedPool",
    "ImportedRange",
    "LeasedBuffer",
    "Listener",
    "MPICommunicator",
    "Mechanism",
    "Message",
    "Peer",
    "PeerGoneError",
    "ProcessCommunicator",
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
    "as_communicator",
    "fetch_descriptor",
    "open",
    "receive",
    "send",
    "serve",
    "share",
]
