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

import struct

from typing_extensions import Self

from streamalloc.core.door import Door
from streamalloc.core.errors import ClosedError, size_text
from streamalloc.core.later import Deferred, later_of
from streamalloc.core.memory import Memory
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemLocation
from streamalloc.core.stream import Stream

__all__ = [
    "ALIGNMENT",
    "ANSWER",
    "END",
    "HALF",
    "HELLO",
    "IMPORTER",
    "ITEM",
    "MAGIC",
    "MASK",
    "MOST_SLOTS",
    "NAME",
    "NUMBER",
    "PACKET",
    "VERSION",
    "RingEnd",
    "RingEnding",
    "SlotMemory",
]

MOST_SLOTS = 256
"""What is in flight to one consumer has to fit the buffer of its socket, so that a hand-off never blocks: with Linux's
default that is 278 packets."""
ALIGNMENT = 512
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
NAME = struct.Struct("<16s")
NUMBER = struct.Struct("<HH")
ANSWER = struct.Struct("<6sHI")
"""What the consumer answers: magic, version, blocks; then which importer it is on each."""
IMPORTER = struct.Struct("<I")
MAGIC = b"SAring"
VERSION = 1


class SlotMemory(Memory):
    """A slot as one end sees it, usable while it is held."""

    __slots__ = ("__weakref__", "_base", "_held", "_index", "_memory", "_stream", "_used")

    def __init__(self, memory: Memory, stream: Stream, index: int, offset: int) -> None:
        self._memory = memory
        self._stream = stream
        self._index = index
        self._base = memory.address + offset
        self._held = False
        self._used = 0

    @property
    def index(self) -> int:
        """Which slot of the ring it is."""
        return self._index

    @property
    def address(self) -> int:
        """Where the memory begins.

        Raises
        ------
        ClosedError
            It was handed on, or the ring was closed.
        """
        self._check_usable()
        return self._base

    @property
    def stream(self) -> Stream:
        """The ring's stream in this process."""
        return self._stream

    @property
    def location(self) -> MemLocation:
        """Where the memory is."""
        return self._memory.location

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory at the same address."""
        return self._memory.host_accessible

    @property
    def owner(self) -> object:
        """The shared memory that the slots are parts of."""
        return self._memory

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""
        return self._memory.device_accessible

    def _check_usable(self) -> None:
        if not self._held:
            raise ClosedError(f"slot {self._index} of the ring was handed on, or the ring was closed")

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        state = f"{size_text(self.nbytes)} at {self._base:#x}" if self._held else "handed on"
        return f"<{type(self).__name__} {self._index}: {state}>"


class RingEnding(Deferred):
    """What is left to do when an end was closed, or dropped."""

    __slots__ = ("closed",)

    closed: bool
    """Whether it was closed."""


class RingEnd(Closes):
    """What both ends have in common: a size, and an end that may come later."""

    __slots__ = ("__weakref__", "_closed", "_door", "_ending", "slot_bytes", "slots")

    slot_bytes: int
    """The most bytes of an item."""
    slots: int
    """How many slots there are."""

    def __init__(self, door: Door) -> None:
        self._door = door
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
        self._door.check_process()
        if self._closed:
            raise ClosedError("this end of the ring was closed")

    def close(self) -> None:
        """Close this end, after what its stream has queued; idempotent. The host does not wait.

        Raises
        ------
        CudaError
            The driver refused a call. What is left to do is done later.
        """
        self._door.check_process()
        self._closed = True
        ending = self._ending
        if ending is not None:
            ending.closed = True
            later_of(self._door).end(ending)
            self._ending = None

    def __del__(self) -> None:
        ending = getattr(self, "_ending", None)
        if ending is not None and self._door.usable:
            ending.closed = True
            later_of(self._door).hand_in(ending)

    def _state(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        if getattr(self, "slots", None) is None:
            return f"<{type(self).__name__} that could not be made>"
        size = size_text(self.slot_bytes)
        return f"<{type(self).__name__} of {self.slots} slots of {size}, {'closed' if self._closed else self._state()}>"
