"""What both ends of a ring have in common: packets, words in shared memory, slots, and how they end.

Nothing is exported, imported or sent back for a hand-off: words of the producer's :class:`ControlBlock` are written
and waited for, by the streams and by the hosts. For each slot ``k`` and consumer ``i`` they are

* ``ready[k]``, written by the producer's stream after the contents, or by its host where the stream has no work left;
  the consumer's stream waits for it;
* ``opened[k, i]``, set by the consumer's host when it takes the slot, to the number that came in the packet;
* ``closed[k, i]``, written by the consumer's stream after its work, or by its host; the producer's stream waits for it;
* ``closing[k, i]``, set by the consumer's host when it has queued that: the producer's host may reuse the slot.

A slot whose number a consumer has not written into ``opened`` was not touched by it, so that when the consumer has
gone another one can have it. A packet may come twice where a signal handler has raised while it was sent: the number
tells.

A signal handler may raise after any call, but not between two lines that call nothing, and neither do threads take
turns there. Lines that move a slot from one state to another call nothing.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import Self

from streamalloc.core.internal import (
    BufferView,
    ClosedError,
    Closes,
    Deferred,
    Leaves,
    Memory,
    Row,
    Session,
    Shown,
    Stream,
    deferred_queue,
    finaliser,
    mib,
    size_text,
)
from streamalloc.ipc.transport.packets import Message, ProtocolError
from streamalloc.ipc.wire.control_block import SLOTS

__all__ = [
    "ANSWER", "END", "HALF", "HELLO", "ITEM", "MAGIC", "MASK", "MOST_SLOTS", "PACKET", "VERSION",
    "Introduction", "RingEnd", "RingEnding", "SlotMemory", "answer", "importers_in",
]  # fmt: skip

MOST_SLOTS = 256
"""What is in flight to one consumer has to fit the buffer of its socket, so that a hand-off never blocks: with Linux's
default that is 278 packets."""
MASK = (1 << 32) - 1
HALF = 1 << 31
"""A word ``w`` that counts up is behind a number ``n`` where ``(w - n) & MASK >= HALF``."""

PACKET = struct.Struct("<IIIIQ")
"""A hand-off: what it is, slot, the value of the slot's ready word, that of the consumer's words, bytes used."""
ITEM = 1
END = PACKET.pack(2, 0, 0, 0, 0)

HELLO = struct.Struct("<6sHIIQQ")
"""What the producer says first: magic, version, blocks, slots, bytes of a slot, and from one to the next. The blocks'
names follow, then block and number there of each slot, then the descriptor of the buffer."""
_NAME = struct.Struct("<16s")
_NUMBER = struct.Struct("<HH")
ANSWER = struct.Struct("<6sHI")
"""What the consumer answers: magic, version, blocks; then which importer it is on each."""
_IMPORTER = struct.Struct("<I")
MAGIC = b"SAring"
VERSION = 1


class Introduction(NamedTuple):
    """What a producer says first."""

    names: list[bytes]
    """Of the control blocks."""
    numbers: list[tuple[int, int]]
    """Which control block each slot is in, and its number there."""
    slot_bytes: int
    stride: int
    """From one slot to the next, in bytes."""
    descriptor: bytes

    def to_bytes(self) -> bytes:
        """For consumers."""
        head = HELLO.pack(MAGIC, VERSION, len(self.names), len(self.numbers), self.slot_bytes, self.stride)
        return head + b"".join([*self.names, *itertools.starmap(_NUMBER.pack, self.numbers), self.descriptor])

    @classmethod
    def of(cls, message: Message) -> Introduction:
        """What came; ``ProtocolError`` where that is something else."""
        data = message.data
        try:
            magic, version, blocks, slots, slot_bytes, stride = HELLO.unpack_from(data)
        except struct.error:
            magic = b""
        if magic != MAGIC:
            raise ProtocolError("this is not what a ring's producer says first")
        if version != VERSION:
            raise ProtocolError(f"a ring of version {version}: this library knows version {VERSION}")
        names_end = HELLO.size + blocks * _NAME.size
        numbers_end = names_end + slots * _NUMBER.size
        if not 1 <= blocks <= slots <= MOST_SLOTS or numbers_end > len(data) or len(message.handles) < blocks:
            raise ProtocolError("what the ring's producer says does not fit together")
        names = [name for (name,) in _NAME.iter_unpack(data[HELLO.size : names_end])]
        numbers = [(block, number) for block, number in _NUMBER.iter_unpack(data[names_end:numbers_end])]
        if any(block >= blocks or number >= SLOTS for block, number in numbers) or not 1 <= slot_bytes <= stride:
            raise ProtocolError("a slot of the ring is in no control block, or has no size")
        return cls(names, numbers, slot_bytes, stride, data[numbers_end:])


def answer(importers: Sequence[int]) -> bytes:
    """What a consumer answers that is these importers on the control blocks."""
    return ANSWER.pack(MAGIC, VERSION, len(importers)) + b"".join(map(_IMPORTER.pack, importers))


def importers_in(data: bytes, count: int) -> list[int]:
    """The importers in such an answer; ``ProtocolError`` where there are not so many, or it is something else."""
    head, rest = data[: ANSWER.size], data[ANSWER.size :]
    if head != ANSWER.pack(MAGIC, VERSION, count) or len(rest) != count * _IMPORTER.size:
        raise ProtocolError("this is not what a ring's consumer answers")
    return [importer for (importer,) in _IMPORTER.iter_unpack(rest)]


class SlotMemory(BufferView, Leaves):
    """A slot as one end sees it, usable while it is held."""

    __slots__ = ("_base", "_held", "_stream", "index")

    _ptr = None  # It is usable only while it is held, which the slow path looks at.
    index: int
    """Which slot of the ring it is."""

    def __init__(self, memory: Memory, stream: Stream, index: int, offset: int, nbytes: int) -> None:
        super().__init__(memory, offset, nbytes)
        self._stream = stream  # type: ignore[misc]
        self.index = index
        self._base = memory._at + offset
        self._held = False

    @property
    def address(self) -> int:
        """Where the memory begins.

        Raises
        ------
        ClosedError
            It was handed on, or the ring was closed.
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

    def __repr__(self) -> str:
        state = f"{size_text(self.nbytes)} at {self._base:#x}" if self._held else "handed on"
        return f"<{type(self).__name__} {self.index}: {state}>"


class RingEnding(Deferred):
    """What is left to do when an end was closed, or dropped."""

    __slots__ = ("closed",)

    closed: bool
    """Whether it was closed."""


class RingEnd(Closes, Shown):
    """What both ends have in common: a size, and an end that may come later."""

    __slots__ = ("__weakref__", "_closed", "_ending", "_session", "slot_bytes", "slots")

    slot_bytes: int
    """The most bytes of an item."""
    slots: int
    """How many slots there are."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._closed = True
        self._ending: RingEnding | None = None

    def _open(self, ending: RingEnding) -> None:
        self._ending = ending
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _check_open(self) -> None:
        self._session.check_process()
        if self._closed:
            raise ClosedError("this end of the ring was closed")

    def close(self) -> None:
        """Close this end, after what its stream has queued; idempotent. The host does not wait.

        Raises
        ------
        CudaError
            The driver refused a call. What is left to do is done later.
        """
        self._session.check_process()
        self._closed = True
        ending = self._ending
        if ending is not None:
            ending.closed = True
            deferred_queue(self._session).end(ending)
            self._ending = None

    @finaliser
    def __del__(self) -> None:
        ending = getattr(self, "_ending", None)
        if ending is not None and self._session.usable:
            ending.closed = True
            deferred_queue(self._session).submit(ending)

    def _state(self) -> str:
        raise NotImplementedError

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield "slots", f"{self.slots} of {mib(self.slot_bytes)}"
        yield "state", self._state()

    def __repr__(self) -> str:
        if getattr(self, "slots", None) is None:
            return f"<{type(self).__name__} that could not be made>"
        size = size_text(self.slot_bytes)
        return f"<{type(self).__name__} of {self.slots} slots of {size}, {'closed' if self._closed else self._state()}>"
