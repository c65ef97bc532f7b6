"""Packets of messages: made by the sender, checked and joined by the receiver.

A message is one packet, or several packets if it is larger.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from typing_extensions import Buffer as BytesLike

from streamalloc.core.internal import Fd

PACKET_DATA = 64 * 1024
"""The most bytes of one packet."""
PACKET_HANDLES = 64
"""The most file descriptors of one packet."""
MAX_DATA = 1 << 20
"""The most bytes of one message."""
MAX_HANDLES = 4096
"""The most file descriptors of one message."""


class ProtocolError(ValueError):
    """A packet is no message of this library: it is cut off or damaged, or another version or program sent it."""


class PeerGoneError(ConnectionError):
    """The process at the other end has ended, or has closed its end."""


class Message(NamedTuple):
    """A received message: bytes and descriptors."""

    data: bytes
    handles: tuple[Fd, ...]


# Magic, version, number of descriptors, bytes of data.
_HEADER = struct.Struct("<4sHHI")
MAGIC = b"SAch"
VERSION = 1
HEADER_BYTES = _HEADER.size
# After the header of one part of a message: the message's random name, index of the part, number of parts, bytes and
# descriptors of the whole message.
_PART = struct.Struct("<8sIIII")
_PART_MAGIC = b"SAcp"
_PART_DATA = PACKET_DATA - _PART.size
PACKET_BYTES = HEADER_BYTES + PACKET_DATA
header = _HEADER.pack
"""Packs a packet's header: :data:`MAGIC`, :data:`VERSION`, number of descriptors, bytes of data."""
_unpack = _HEADER.unpack_from
_Rights: TypeAlias = tuple[int, int, "array.array[int]"]
Packet: TypeAlias = tuple[bytes, Sequence[Fd | int]]
"""A packet and its descriptors."""


class Partial(NamedTuple):
    """The parts of a message that were received so far, in order."""

    name: bytes
    nbytes: int
    """Bytes of the whole message."""
    parts: int
    """Number of parts of the whole message."""
    fds: int
    """Number of descriptors of the whole message."""
    data: tuple[bytes, ...]
    handles: tuple[Fd, ...]


def rights_of(handles: Sequence[Fd | int]) -> list[_Rights]:
    """Descriptors as the ancillary data of ``sendmsg``."""
    if not handles:
        return []
    numbers = [handle.fileno() if isinstance(handle, Fd) else checked_descriptor(handle) for handle in handles]
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]


def as_bytes(data: BytesLike) -> bytes:
    """A copy of the data that a caller sends; ``TypeError`` if it is no bytes-like object."""
    try:
        return bytes(memoryview(data))
    except TypeError:
        raise TypeError(
            f"data must be bytes, not {type(data).__name__} ({data!r}); memory, pools and events are sent with "
            "streamalloc.ipc.send(channel, thing)"
        ) from None


def checked_descriptor(number: object) -> int:
    """A descriptor's number, checked."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a descriptor must be an Fd or an int, not {type(number).__name__} ({number!r})")
    if number < 0:
        raise ValueError(f"{number} is no descriptor: they are 0 or more")
    return number


def packets_of(data: bytes, handles: Sequence[Fd | int]) -> Iterator[Packet]:
    """The packets of a message that is too large for one packet."""
    if len(data) > MAX_DATA or len(handles) > MAX_HANDLES:
        raise ValueError(
            f"a message of {len(data)} bytes and {len(handles)} descriptors: at most {MAX_DATA} and {MAX_HANDLES} "
            "fit in one"
        )
    name = os.urandom(8)
    count = max(-(-len(data) // _PART_DATA), -(-len(handles) // PACKET_HANDLES))
    for number in range(count):
        some = handles[number * PACKET_HANDLES : (number + 1) * PACKET_HANDLES]
        body = _PART.pack(name, number, count, len(data), len(handles))
        body += data[number * _PART_DATA : (number + 1) * _PART_DATA]
        yield header(_PART_MAGIC, VERSION, len(some), len(body)) + body, some


def with_part(partial: Partial | None, packet: bytes, handles: tuple[Fd, ...]) -> Partial | str:
    """A partial message with the next part added; a text with the reason if the part does not continue it."""
    if len(packet) < HEADER_BYTES + _PART.size:
        return f"a part of a message of {len(packet)} bytes"
    name, number, count, nbytes, total = _PART.unpack_from(packet, HEADER_BYTES)
    if nbytes > MAX_DATA or total > MAX_HANDLES or not 2 <= count <= max(nbytes, total):
        return f"a message of {count} parts, with {nbytes} bytes and {total} descriptors"
    if not number:
        partial = Partial(name, nbytes, count, total, (), ())
    elif partial is None or partial[:4] != (name, nbytes, count, total) or number != len(partial.data):
        return f"part {number} of a message whose parts before it did not come"
    longer = partial._replace(
        data=(*partial.data, packet[HEADER_BYTES + _PART.size :]), handles=partial.handles + handles
    )
    have, fds = sum(map(len, longer.data)), len(longer.handles)
    if have > nbytes or fds > total or (number + 1 == count and (have, fds) != (nbytes, total)):
        return f"parts with {have} bytes and {fds} descriptors, instead of {nbytes} and {total}"
    return longer


def fault_in(packet: bytes, handles: int, flags: int) -> str | None:
    """The reason why a packet is no packet of a message, as text; None if the packet is one."""
    if flags & socket.MSG_TRUNC:
        return f"a packet of more than {PACKET_BYTES} bytes"
    if len(packet) < HEADER_BYTES:
        return f"a packet of {len(packet)} bytes"
    magic, version, count, size = _unpack(packet)
    if magic not in (MAGIC, _PART_MAGIC):
        return f"it begins with {magic!r}"
    if version != VERSION:
        return f"its version is {version}, and this library supports version {VERSION}"
    if size != len(packet) - HEADER_BYTES:
        return f"it has {len(packet) - HEADER_BYTES} bytes of data and says {size}"
    if flags & socket.MSG_CTRUNC or count != handles:
        here = " (this process may have too many files open: ulimit -n)" if count > handles else ""
        return f"it came with {handles} descriptors and says {count}{here}"
    return None
