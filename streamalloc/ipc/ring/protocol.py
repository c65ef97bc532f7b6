"""The protocol of a ring: packets, words in shared memory, slots, and the base of both ends.

A hand-off exports and imports nothing. Streams and hosts write 32-bit words in the producer's :class:`ControlBlock` and
wait for them. Slot ``k`` and consumer ``i`` have these words:

* ``ready[k]``: the producer's stream writes it after the contents, or the producer's host does if the stream is idle.
  The consumer's stream waits for it.
* ``opened[k, i]``: the consumer's host writes it when it takes the slot. Its value is the number in the packet.
* ``closed[k, i]``: the consumer's stream writes it after its work, or the consumer's host does if the stream is idle.
  The producer's stream waits for it.
* ``closing[k, i]``: the consumer's host writes it after it has queued the write of ``closed``. From then on the
  producer's host may reuse the slot.

The words are counters that only rise, because a stream's wait compares by "at least". Each process writes only its own
words, so the consumer cannot reset a word that the producer's stream waits for. Each use of a slot has a higher value,
so a slot that is used again never looks released by its last use.

If a consumer is gone and ``opened`` is not the packet's number, the consumer has not used the slot, and the producer
sends it to another consumer. If ``opened`` is that number, the item is gone with the consumer: its kernels may have
read it, and the program may have acted on it, so it must not come twice.

If a signal handler raises while a packet is sent or received, that packet may be lost, and its slot with it, until the
consumer has closed or died.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from typing_extensions import Self

from streamalloc.core.errors import ClosedError, size_text
from streamalloc.core.internal import BufferView, Deferred, Memory, Stream, deferred_queue
from streamalloc.core.resource import Closes, Leaves
from streamalloc.core.session import Session
from streamalloc.formats.html import Row, Shown, mib
from streamalloc.ipc.transport.channel import Message, ProtocolError
from streamalloc.ipc.wire.control_block import SLOTS

MOST_SLOTS = 256
"""Limit of the number of slots. The packets of all slots fit one socket buffer (278 packets by default on Linux), so no
hand-off blocks.
"""

PACKET = struct.Struct("<IIIIQ")
"""A hand-off packet: kind, slot, value of ``ready``, value of the consumer's words, bytes used."""
ITEM = 1
END = PACKET.pack(2, 0, 0, 0, 0)

HELLO = struct.Struct("<6sHIQQ16s")
"""The producer's first message: magic, version, number of slots, bytes of a slot, stride, id of the control block. Then
follow the number of each slot in the block, and the buffer's descriptor.
"""
_NUMBER = struct.Struct("<H")
ANSWER = struct.Struct("<6sHI")
"""The consumer's answer: magic, version, and the consumer's importer number on the control block."""
MAGIC = b"SAring"
VERSION = 2


class Introduction(NamedTuple):
    """The producer's first message."""

    block: bytes
    """Id of the control block."""
    numbers: list[int]
    """Number of each slot in the control block."""
    slot_bytes: int
    """Limit of the bytes of an item."""
    stride: int
    """Bytes from the start of one slot to the start of the next."""
    descriptor: bytes
    """Descriptor of the buffer that has all slots."""

    def to_bytes(self) -> bytes:
        """Return the message as bytes, in the layout of :data:`HELLO`."""
        head = HELLO.pack(MAGIC, VERSION, len(self.numbers), self.slot_bytes, self.stride, self.block)
        return head + b"".join([*map(_NUMBER.pack, self.numbers), self.descriptor])

    @classmethod
    def of(cls, message: Message) -> Introduction:
        """Return the fields of a message. Raises ProtocolError if it is not the first message of a producer with this
        version.
        """
        data = message.data
        try:
            magic, version, slots, slot_bytes, stride, block = HELLO.unpack_from(data)
        except struct.error:
            magic = b""
        if magic != MAGIC:
            raise ProtocolError("this is not the first message of a ring's producer")
        if version != VERSION:
            raise ProtocolError(f"a ring of version {version}: this library supports version {VERSION}")
        end = HELLO.size + slots * _NUMBER.size
        if not 1 <= slots <= MOST_SLOTS or end > len(data) or not message.handles:
            raise ProtocolError("the first message of the ring's producer is inconsistent")
        numbers = [number for (number,) in _NUMBER.iter_unpack(data[HELLO.size : end])]
        if max(numbers) >= SLOTS or not 1 <= slot_bytes <= stride:
            raise ProtocolError("a slot of the ring is not in the control block, or has no size")
        return cls(block, numbers, slot_bytes, stride, data[end:])


def answer(importer: int) -> bytes:
    """Return a consumer's answer, with its importer number on the control block."""
    return ANSWER.pack(MAGIC, VERSION, importer)


def importer_in(data: bytes) -> int:
    """Return the importer number in ``data``, a consumer's answer. Raises ProtocolError for other bytes."""
    importer = int.from_bytes(data[-4:], "little")
    if data != answer(importer):
        raise ProtocolError("this is not the answer of a ring's consumer")
    return importer


class SlotMemory(BufferView, Leaves):
    """The memory of a slot, as one end of the ring has it. While this end does not hold the slot, each use raises
    :class:`ClosedError`.
    """

    __slots__ = ("_base", "_held", "_stream", "index")

    _ptr = None  # With an address here, a use would not check that this end holds the slot.

    def __init__(self, memory: Memory, stream: Stream, index: int, offset: int, nbytes: int) -> None:
        super().__init__(memory, offset, nbytes)
        self._stream = stream  # type: ignore[misc]
        self.index: int = index
        """Number of the slot in the ring."""
        self._base = memory._at + offset
        self._held = False

    @property
    def address(self) -> int:
        """Device address of the slot's first byte.

        Raises
        ------
        ClosedError
            The slot was handed off or released, or the ring was closed.
        """
        return self._at

    @property
    def _at(self) -> int:
        self._check_usable()
        return self._base

    def _check_usable(self) -> None:
        if not self._held:
            raise ClosedError(f"slot {self.index} of the ring was handed on, or the ring was closed")

    def __enter__(self) -> Self:
        return self

    def _text(self) -> str:
        return f" {self.index}: {f'{size_text(self.nbytes)} at {self._base:#x}' if self._held else 'handed on'}"


class RingEnding(Deferred):
    """Queue item with the work that remains after one end of a ring was closed or dropped."""

    closed: bool = False
    """Whether this end of the ring was closed or dropped."""


class RingEnd(Closes, Shown):
    """Base of both ends: sizes, and a close whose work may be deferred."""

    __slots__ = ("__weakref__", "_ending", "_session", "slot_bytes", "slots")

    slot_bytes: int
    """Limit of the bytes of an item."""
    slots: int
    """Number of slots."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ending: RingEnding | None = None

    def _open(self, ending: RingEnding) -> None:
        # The queue keeps the ending alive from now on. So if this object is dropped in a reference cycle, the collector
        # does not finalise the ending's resources before the ending has released them.
        deferred_queue(self._session).end_with(self, ending)
        self._ending = ending

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        ending = self._ending
        return ending is None or ending.closed

    def _check_open(self) -> None:
        self._session.check_process()
        if self.closed:
            raise ClosedError("this end of the ring was closed")

    def close(self) -> None:
        """Close this end, after the queued work of its stream; idempotent. The host does not wait.

        Raises
        ------
        CudaError
            The driver refused a call. The rest of the work is deferred.
        """
        self._session.check_process()
        ending = self._ending
        if ending is not None:
            ending.closed = True
            deferred_queue(self._session).end(ending)
            self._ending = None

    def __del__(self) -> None:
        ending = getattr(self, "_ending", None)
        if ending is not None:
            ending.closed = True

    def _state(self) -> str:
        raise NotImplementedError

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield "slots", f"{self.slots} of {mib(self.slot_bytes)}"
        yield "state", self._state()

    def _text(self) -> str:
        state = "closed" if self.closed else self._state()
        return f" of {self.slots} slots of {size_text(self.slot_bytes)}, {state}"
