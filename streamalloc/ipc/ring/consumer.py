"""The end of a ring that takes items. How the ends understand each other: see :mod:`streamalloc.ipc.ring.protocol`."""

from __future__ import annotations

import contextlib
import struct
import time
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from typing_extensions import Self

from streamalloc.core.door import Door, refuse_after_fork
from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.ownership import Closes
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.ipc.ring.protocol import (
    ANSWER,
    END,
    HALF,
    HELLO,
    IMPORTER,
    ITEM,
    MAGIC,
    MASK,
    MOST_SLOTS,
    NAME,
    NUMBER,
    PACKET,
    VERSION,
    Part,
)
from streamalloc.ipc.sharing.control_block import SLOTS, ControlBlock
from streamalloc.ipc.sharing.imports import ImportedBuffer, Importer, importer_of
from streamalloc.ipc.sharing.imports import open as open_shared
from streamalloc.ipc.transport.channel import Channel, Message, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.deadlines import end_of, left

__all__ = ["RingConsumer", "RingItem"]

# How often to look whether the producer lives, in seconds: its channel does not end if a forked child has a copy.
_LIVENESS_SECONDS = 0.25

_unpacked = PACKET.unpack


class RingItem(Part):
    """An item that a consumer has taken, made by :meth:`RingConsumer.next`.

    Its stream waits for the contents by itself. Leaving its ``with`` block releases the slot in stream order. The
    object is used again for later items in the same slot.
    """

    __slots__ = ("_board", "_number", "_place", "_ready", "_words")

    def __init__(
        self, memory: ImportedBuffer, stream: Stream, index: int, offset: int, board: ControlBlock, number: int
    ) -> None:
        super().__init__(memory, stream, index, offset)
        self._board = board
        self._number = number
        self._place = board.importer_words(number, board.importer)
        self._words = board.slot_words(number)
        self._ready = 0
        self._value = self._place.closing.value

    @property
    def nbytes(self) -> int:
        """How many bytes the producer has used."""
        return self._used

    @property
    def lost(self) -> bool:
        """Whether the producer died before its stream had filled the slot; certain once ours was synchronised."""
        return self._words.was_lost(self._ready)

    def release(self, stream: StreamLike | None = None) -> None:
        """Let the slot be filled again after the work of ``stream`` (default: the ring's); idempotent.

        ``cuStreamQuery``, ``cuStreamWriteValue32``.
        """
        if not self._held:
            return
        place = self._place
        value = self._value
        ordered = self._stream if stream is None else as_stream(stream, self._stream._door)
        self._board.tell(ordered, place.closed, place.closed_address, value)
        self._held = False
        # From here on the producer's host has the slot, and its stream waits for ours.
        place.closing.value = value

    def _take(self, ready: int, value: int, nbytes: int) -> None:
        words = self._words
        if (words.ready.value - ready) & MASK >= HALF:
            self._board.expect(self._number, ready)
            self._board.wait(self._stream, words.ready_address, ready)
        self._place.opened.value = value
        self._value = value
        self._ready = ready
        self._used = nbytes
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RingConsumer(Closes):
    """The end of a ring that takes items; made by :meth:`Ring.consumer`. One thread at a time takes them.

    As an iterator it gives items until the producer closes the ring. Each is released when the next one is asked for.

    Closing it releases what it holds. What it has not taken goes to other consumers.
    """

    __slots__ = (
        "__weakref__",
        "_again",
        "_channel",
        "_closed",
        "_current",
        "_door",
        "_ended",
        "_items",
        "_memory",
        "_receive",
        "slot_bytes",
        "slots",
        "taken",
        "timeout",
    )

    slot_bytes: int
    """The most bytes of an item."""
    slots: int
    """How many slots there are."""
    timeout: float | None
    """Seconds that :meth:`next` waits unless it is told; None for ever."""
    taken: int
    """How many items were taken so far."""

    def __init__(
        self, channel: Channel, stream: StreamLike | None, timeout: float | None, driver: Driver | None
    ) -> None:
        self._closed = True
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel, not {type(channel).__name__} ({channel!r})")
        if driver is None:
            driver = stream._door.driver if isinstance(stream, Stream) else default_driver()
        self._door = Door.of(driver)
        self._channel = channel
        self._receive: Any = channel.receive
        self._ended = False
        self._again: bytes | None = None
        """A packet whose item could not be taken yet, as a driver call failed."""
        self._current: tuple[RingItem, int] | None = None
        self.timeout = timeout
        self.taken = 0
        end = end_of(timeout)
        try:
            message = channel.receive(timeout=timeout)
            told = _introduction(message)
            memory = open_shared(told.descriptor, message.handles[len(told.names) :], stream=stream, driver=driver)
            with undoing(memory.close):
                boards = _attached(importer_of(self._door), told.names, message)
                self._prepare(memory, told, boards)
                channel.send(_answer(boards), timeout=None if end is None else left(end))
        except BaseException:
            channel.close()
            raise
        self._closed = False
        self._door.shut_with_me(self)

    def _shut_after_fork(self) -> None:
        # The packets are the parent's.
        self._receive = refuse_after_fork

    def _prepare(self, memory: Any, told: _Introduction, boards: list[ControlBlock]) -> None:
        if not isinstance(memory, ImportedBuffer) or memory.nbytes < told.stride * len(told.numbers):
            raise ProtocolError("the memory that came is no buffer, or too small for the ring's slots")
        self.slots = len(told.numbers)
        self.slot_bytes = told.slot_bytes
        self._memory = memory
        self._items: list[RingItem] = [
            RingItem(memory, memory.stream, index, index * told.stride, boards[place], number)
            for index, (place, number) in enumerate(told.numbers)
        ]

    @property
    def stream(self) -> Stream:
        """The stream that waits for the contents, and after whose work slots are free again."""
        return self._memory.stream

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def held(self) -> int:
        """How many items were taken and not released yet."""
        return sum(item._held for item in self._items)

    def next(self, timeout: float | None = None) -> RingItem:
        """The next item, whose contents :attr:`stream` waits for. Use it in a ``with`` block.

        Items come in the order in which this consumer was given them. The host waits for an item to be handed off, not
        for its contents (``cuStreamWaitValue32``).

        Parameters
        ----------
        timeout
            Seconds to wait; None for :attr:`timeout`.

        Raises
        ------
        TimeoutError
            None was handed off.
        EOFError
            The producer has closed the ring, and all items were taken.
        PeerGoneError
            The producer has died, and all items that it had handed off were taken. Those that it had not filled by then
            are :attr:`~RingItem.lost`.
        ProtocolError
            Something else than an item came.
        ClosedError
            This end was closed.
        CaptureError
            The stream is being captured. The item stays the next one.
        """
        data = self._again
        if data is None:
            data = self._next_packet(self.timeout if timeout is None else timeout)
        try:
            kind, index, ready, value, nbytes = _unpacked(data)
            item: RingItem = self._items[index]
        except (struct.error, IndexError):
            self._refuse(data)
        if kind != ITEM or nbytes > self.slot_bytes or item._held:
            self._refuse(data)
        try:
            item._take(ready, value, nbytes)
        except BaseException:
            self._again = data
            raise
        self._again = None
        self.taken += 1
        return item

    def _next_packet(self, wait: float | None) -> bytes:
        if self._ended:
            self._say_ended()
        try:
            data: bytes = self._receive(
                timeout=_LIVENESS_SECONDS if wait is None else min(wait, _LIVENESS_SECONDS)
            ).data
            return data
        except TimeoutError:
            if wait is not None and wait <= _LIVENESS_SECONDS:
                raise
        except (ClosedError, PeerGoneError):
            self._say_closed()
            raise
        return self._next_packet_later(None if wait is None else time.monotonic() + wait - _LIVENESS_SECONDS, wait)

    def _next_packet_later(self, end: float | None, wait: float | None) -> bytes:
        """Go on waiting, and look from time to time whether the producer lives."""
        while True:
            alive = self._items[0]._board.exporter_alive()
            try:
                data: bytes = self._receive(timeout=min(left(end), _LIVENESS_SECONDS) if alive else 0).data
                return data
            except TimeoutError:
                if not alive:
                    raise PeerGoneError("the producer of the ring has died") from None
                if left(end) == 0:
                    raise TimeoutError(f"no item of the ring came within {wait:g} s") from None
            except (ClosedError, PeerGoneError):
                self._say_closed()
                raise

    def _refuse(self, data: bytes) -> NoReturn:
        """What to do with a packet that is no item."""
        if data == END:
            self._ended = True
            self._say_ended()
        self._channel.close()
        raise ProtocolError(f"{data[:64]!r} is no item of this ring; the connection is closed")

    def _say_ended(self) -> NoReturn:
        self._say_closed()
        raise EOFError("the producer has closed the ring")

    def _say_closed(self) -> None:
        if self._closed:
            raise ClosedError("this end of the ring was closed")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RingItem:
        if self._current is not None:
            item, value = self._current
            # Released by hand, the same object may be another item by now.
            if item._held and item._value == value:
                item.release()
            self._current = None
        try:
            item = self.next()
        except EOFError:
            raise StopIteration from None
        self._current = (item, item._value)
        return item

    def close(self) -> None:
        """Release what is held, in stream order, and let go of the memory. Idempotent."""
        self._door.check_process()
        self._closed = True
        self._again = self._current = None
        with contextlib.ExitStack() as ending:
            # All of it is done, whatever fails; the last is done first.
            ending.callback(self._channel.close)
            ending.callback(self._channel.shutdown)
            if self._memory.closed:
                return
            stream = _usable(self.stream)
            ending.callback(self._memory.close, stream)
            for item in self._items:
                ending.callback(self._let_go, item, stream)

    def _let_go(self, item: RingItem, stream: Stream) -> None:
        item.release(stream)
        if (item._place.closed.value - item._value) & MASK >= HALF:
            # It was released on another stream; the memory is closed after that one's work too.
            item._board.wait(stream, item._place.closed_address, item._value)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._door.usable:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.taken} items taken"
        return f"<RingConsumer of {self.slots} slots of {self.slot_bytes} bytes, {state}>"


def _usable(stream: Stream) -> Stream:
    """The stream, or one that comes after the work of a stream that was closed."""
    if not stream.closed:
        return stream
    substitute = stream.device.default_stream
    if stream._last is None:
        stream.device.synchronize()
    else:
        substitute.wait(stream._last)
    return substitute


# -- how it begins -------------------------------------------------------------------------------------------


class _Introduction(NamedTuple):
    """What a producer says first."""

    names: list[bytes]
    """Of the boards."""
    numbers: list[tuple[int, int]]
    """Which board each slot is on, and its number there."""
    slot_bytes: int
    stride: int
    descriptor: bytes


def _introduction(message: Message) -> _Introduction:
    data = message.data
    try:
        magic, version, boards, slots, slot_bytes, stride = HELLO.unpack_from(data)
    except struct.error:
        magic = b""
    if magic != MAGIC:
        raise ProtocolError("this is not what a ring's producer says first")
    if version != VERSION:
        raise ProtocolError(f"a ring of version {version}: this library knows version {VERSION}")
    names_end = HELLO.size + boards * NAME.size
    numbers_end = names_end + slots * NUMBER.size
    if not 1 <= boards <= slots <= MOST_SLOTS or numbers_end > len(data) or len(message.handles) < boards:
        raise ProtocolError("what the ring's producer says does not fit together")
    names = [name for (name,) in NAME.iter_unpack(data[HELLO.size : names_end])]
    numbers = [(board, number) for board, number in NUMBER.iter_unpack(data[names_end:numbers_end])]
    if any(board >= boards or number >= SLOTS for board, number in numbers) or not 1 <= slot_bytes <= stride:
        raise ProtocolError("a slot of the ring is on no board, or has no size")
    return _Introduction(names, numbers, slot_bytes, stride, data[numbers_end:])


def _attached(importer: Importer, names: list[bytes], message: Message) -> list[ControlBlock]:
    """The boards of the slots; that of the buffer is there already."""
    blocks = []
    for name, fd in zip(names, message.handles, strict=False):
        block = importer.control_block(name, lambda _, fd=fd: fd)  # type: ignore[misc]
        assert block is not None
        if block.fd is not fd:
            fd.close()
        blocks.append(block)
    return blocks


def _answer(boards: list[ControlBlock]) -> bytes:
    importers = b"".join(IMPORTER.pack(board.importer) for board in boards)
    return ANSWER.pack(MAGIC, VERSION, len(boards)) + importers
