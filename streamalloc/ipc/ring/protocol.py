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
"""Largest number of slots of a ring. The packets of all slots fit into one socket buffer (278 packets by default on
Linux), so no hand-off has to wait.
"""

PACKET = struct.Struct("<IIIIQ")
"""A hand-off packet: kind (1), slot index, value of ``ready``, value of the consumer's words, bytes used."""
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
    """The producer's first message to a consumer: the slots of the ring, and the buffer that has them."""

    block: bytes
    """Id of the control block."""
    numbers: list[int]
    """Number in the control block of each slot of the ring, in the order of the slots."""
    slot_bytes: int
    """Largest size of an item in bytes."""
    stride: int
    """Distance in bytes from the start of a slot to the start of the next slot."""
    descriptor: bytes
    """Descriptor of the buffer that has all slots."""

    def to_bytes(self) -> bytes:
        """Return the message as bytes: the header :data:`HELLO`, the numbers, the descriptor."""
        head = HELLO.pack(MAGIC, VERSION, len(self.numbers), self.slot_bytes, self.stride, self.block)
        return head + b"".join([*map(_NUMBER.pack, self.numbers), self.descriptor])

    @classmethod
    def of(cls, message: Message) -> Introduction:
        """Decode the first message of a producer. Raises ProtocolError if ``message`` is another message, is of another
        version, or has inconsistent numbers of slots.
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
    """Return a consumer's answer as bytes. ``importer``: its importer number on the control block."""
    return ANSWER.pack(MAGIC, VERSION, importer)


def importer_in(data: bytes) -> int:
    """Return the importer number in ``data``, a consumer's answer. Raises ProtocolError for other bytes."""
    importer = int.from_bytes(data[-4:], "little")
    if data != answer(importer):
        raise ProtocolError("this is not the answer of a ring's consumer")
    return importer


class SlotMemory(BufferView, Leaves):
    """The memory of one slot, in the producer or in a consumer. Each use raises :class:`ClosedError` unless this end of
    the ring has the slot at that time.
    """

    __slots__ = ("_base", "_held", "_stream", "index")

    _ptr = None  # If an address were stored here, a use of the memory would not check that this end still has the slot.

    def __init__(self, memory: Memory, stream: Stream, index: int, offset: int, nbytes: int) -> None:
        super().__init__(memory, offset, nbytes)
        self._stream = stream  # type: ignore[misc]
        self.index: int = index
        """Index of the slot in the ring."""
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
        self.check_usable()
        return self._base

    def check_usable(self) -> None:
        if not self._held:
            raise ClosedError(f"slot {self.index} of the ring was handed on, or the ring was closed")

    def __enter__(self) -> Self:
        return self

    def _text(self) -> str:
        return f" {self.index}: {f'{size_text(self.nbytes)} at {self._base:#x}' if self._held else 'handed on'}"


class RingEnding(Deferred):
    """Item of the queue of deferred releases: the work that remains after one end of a ring was closed or dropped."""

    closed: bool = False
    """Whether this end of the ring was closed or dropped."""


class RingEnd(Closes, Shown):
    """Base of producer and consumer: the sizes of the ring, and a close that does not wait. Work that must wait becomes
    an item of the queue of deferred releases.
    """

    __slots__ = ("__weakref__", "_ending", "_session", "slot_bytes", "slots")

    slot_bytes: int
    """Largest size of an item in bytes. :meth:`RingProducer.put` refuses a larger one."""
    slots: int
    """Number of slots of the ring."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ending: RingEnding | None = None

    def _open(self, ending: RingEnding) -> None:
        # The queue keeps ``ending`` alive from now on. Otherwise, if this object is dropped in a reference cycle, the
        # collector could finalise the resources of ``ending`` before ``ending`` has released them.
        deferred_queue(self._session).end_with(self, ending)
        self._ending = ending

    @property
    def closed(self) -> bool:
        """Whether this end was closed in this process. A close of the other end does not count."""
        ending = self._ending
        return ending is None or ending.closed

    def _check_open(self) -> None:
        self._session.check_process()
        if self.closed:
            raise ClosedError("this end of the ring was closed")

    def close(self) -> None:
        """Close this end of the ring. Its memory is released after the queued work of its stream; the host does not
        wait. Idempotent.

        Raises
        ------
        CudaError
            The driver refused a call. Later calls of the package attempt the remaining releases.
        ForkedProcessError
            This process is a forked child of the process that made the ring.
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
