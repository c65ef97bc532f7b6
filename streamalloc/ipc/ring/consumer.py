"""The consuming end of a ring; see :mod:`streamalloc.ipc.ring.protocol`."""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from typing_extensions import Self

from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.internal import Stream, StreamLike, as_stream, ordered_after, session_for
from streamalloc.core.properties import checked_type
from streamalloc.core.session import refuse_after_fork, session_of
from streamalloc.driver import Driver
from streamalloc.ipc.importer.imported import Announcement, ImportedBuffer
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.importer.open import open as open_shared
from streamalloc.ipc.ring.protocol import END, ITEM, PACKET, Introduction, RingEnd, RingEnding, SlotMemory, answer
from streamalloc.ipc.transport.channel import Channel, PeerGoneError, ProtocolError, deadline_after, left
from streamalloc.ipc.wire.control_block import ControlBlock, reached

# Seconds between two checks that the producer is alive. The channel does not always show the producer's death, because
# a forked child of the producer may keep a copy of the socket.
_LIVENESS_SECONDS = 0.25

_unpacked = PACKET.unpack


class RingItem(SlotMemory):
    """An item that a consumer has taken, made by :meth:`RingConsumer.next`.

    The ring's stream waits for the contents. If the ring was opened without a stream, every other stream that uses the
    item also waits, and so does the host when it reads :attr:`address`. The end of the ``with`` block releases the slot
    in stream order. Later items in the same slot reuse this object.
    """

    __slots__ = ("_any_stream", "_block", "_mine", "_number", "_ready", "_value", "_words")

    def __init__(
        self, memory: ImportedBuffer, index: int, offset: int, block: ControlBlock, number: int, any_stream: bool
    ) -> None:
        super().__init__(memory, memory.stream, index, offset, 0)
        self._any_stream = any_stream
        self._block = block
        self._number = number
        self._mine = block.importer_words(number, block.importer)
        """Words of the slot that this consumer writes."""
        self._words = block.exporter_words(number)
        """Words of the slot that the producer writes."""
        self._ready = 0
        """Value that ``ready`` reaches when the contents are complete."""
        self._value = self._mine.closing.value
        """Value that this consumer writes to its words of the slot: to ``opened`` when it takes the item, to ``closed``
        and ``closing`` when it releases the item.
        """

    @property
    def lost(self) -> bool:
        """Whether the producer died before its stream had filled the slot. The answer is final once the ring's stream
        is synchronised.
        """
        return self._words.was_lost(self._ready)

    @property
    def address(self) -> int:
        """Device address of the slot's first byte.

        If the ring was opened without a stream, the host waits for the contents; see :func:`streamalloc.ipc.open`.

        Raises
        ------
        ClosedError
            The item was released, or the ring was closed.
        """
        at = self._at
        self._wait_on(None)
        return at

    def _await_on(self, stream: Stream) -> None:
        super()._await_on(stream)
        self._wait_on(stream)

    def _wait_on(self, stream: Stream | None) -> None:
        if self._any_stream:
            Announcement(self._block, self._words, 0, self._ready).wait(stream)

    def release(self, stream: StreamLike | None = None) -> None:
        """Release the slot after the work of ``stream``, by default the ring's stream (``cuStreamWriteValue32``).
        Idempotent. Raises CaptureError if the stream is being captured, ClosedError if the stream was closed, TypeError
        or ValueError if ``stream`` is not a stream of this driver, and CudaError if the driver refuses.
        """
        if not self._held:
            return
        mine = self._mine
        value = self._value
        ordered = as_stream(self._stream if stream is None else stream, session_of(self._stream), after=True)
        self._block.write(ordered, mine.closed, value)
        self._held = False
        mine.closing.value = value

    def _leave(self, *, failed: bool) -> None:
        self.release()


class RingConsumer(RingEnd):
    """The consuming end of a ring; made by :meth:`Ring.consumer`. One thread at a time may take items.

    Iteration yields items until the producer closes the ring, and releases each item before it takes the next one.
    ``async for`` does the same without blocking the running event loop, so that one thread serves several rings.

    :meth:`close` releases the held items. Items that were not taken go to other consumers.
    """

    __slots__ = ("_again", "_channel", "_current", "_items", "_memory", "_receive", "taken", "timeout")

    def __init__(
        self, channel: Channel, stream: StreamLike | None, timeout: float | None, driver: Driver | None
    ) -> None:
        checked_type("channel", channel, Channel)
        own = session_of(stream) if driver is None and isinstance(stream, Stream) else None
        super().__init__(own or session_for(None, driver))
        self._channel = channel
        self._receive: Any = channel.receive
        self._again: bytes | None = None
        """A received packet whose item was not taken yet; None without such a packet."""
        self._current: tuple[RingItem, int] | None = None
        self.timeout: float | None = timeout
        """Default of ``timeout`` for :meth:`next`, in seconds; None for no limit."""
        self.taken: int = 0
        """Number of items taken so far."""
        end = deadline_after(timeout)
        with undoing(channel.close):
            message = channel.receive(timeout=timeout)
            first = Introduction.of(message)
            fd, *handles = message.handles
            memory = open_shared(first.descriptor, handles, stream=stream, driver=self._session.driver)
            with undoing(memory.close):
                with fd:
                    block = imports_of(self._session).control_block(first.block, lambda _: fd)
                if not isinstance(memory, ImportedBuffer) or memory.nbytes < first.stride * len(first.numbers):
                    raise ProtocolError("the memory that came is no buffer, or too small for the ring's slots")
                self.slots: int = len(first.numbers)
                self.slot_bytes: int = first.slot_bytes
                self._memory = memory
                self._items = [
                    RingItem(memory, index, index * first.stride, block, number, stream is None)
                    for index, number in enumerate(first.numbers)
                ]
                channel.send(answer(block.importer), timeout=None if end is None else left(end))
                self._open(_ConsumerEnding(channel, self._memory, self._items))
        self._session.shut_with_me(self)

    def _shut_after_fork(self) -> None:
        # In a forked child nothing may be received: the packets are for the parent process.
        self._receive = refuse_after_fork

    @property
    def stream(self) -> Stream:
        """The stream that waits for the contents and releases the slots. If :meth:`Ring.consumer` was called without a
        stream, it is the default stream of the memory's device.
        """
        return self._memory.stream

    @property
    def held(self) -> int:
        """Number of items that were taken and not released yet. The producer cannot fill their slots."""
        return sum(item._held for item in self._items)

    def fileno(self) -> int:
        """Return the file descriptor of the connection. It is readable when :meth:`next` would return or raise without
        waiting.

        So ``select.select(consumers, [], [])``, or ``loop.add_reader`` of :mod:`asyncio`, waits for several rings.
        There is one exception: if the driver refused the stream's wait for an item, :meth:`next` has raised. The next
        call returns this item, although the descriptor may not be readable.

        Raises
        ------
        ClosedError
            This end was closed.
        """
        self._check_open()
        return self._channel.fileno()

    def next(self, timeout: float | None = None) -> RingItem:
        """Return the next item; :attr:`stream` waits for its contents. Use the item in a ``with`` block.

        Items come in the order in which the producer sent them to this consumer. The host waits until the item is
        handed off; only the stream waits for its contents (``cuStreamWaitValue32``). If a signal handler raises in this
        call, one item may be lost; its slot is released when this end is closed.

        Parameters
        ----------
        timeout
            Seconds to wait; 0: do not wait; None: :attr:`timeout`.

        Raises
        ------
        TypeError, ValueError
            ``timeout`` is no number, or is negative.
        TimeoutError
            No item was handed off in time.
        EOFError
            The producer has closed the ring, and all items were taken.
        PeerGoneError
            The producer has died, and all items that it had handed off were taken. Items that it had not filled are
            :attr:`~RingItem.lost`.
        ProtocolError
            The packet is not an item of this ring; the connection is then closed.
        ClosedError
            This end was closed.
        CaptureError, CudaError
            The contents are not complete yet, and the stream cannot wait for them, because it is being captured or the
            driver refuses. The next call returns the item.
        """
        data = self._again
        if data is None:
            # The packet is kept until its item is taken. If the driver refuses the stream's wait, the next call uses
            # the same packet.
            data = self._again = self._next_packet(self.timeout if timeout is None else timeout)
        try:
            kind, index, ready, value, nbytes = _unpacked(data)
            item: RingItem = self._items[index]
        except (struct.error, IndexError):
            self._refuse(data)
        if kind != ITEM or nbytes > self.slot_bytes or item._held:
            self._refuse(data)
        if item._words.ready.value != ready:
            Announcement(item._block, item._words, 0, ready).precede(item._stream)
        if self.closed:
            self._check_open()
        item._mine.opened.value = value
        item._value = value
        item._ready = ready
        item._nbytes = nbytes
        item._held = True
        self._again = None
        self.taken += 1
        return item

    def _next_packet(self, wait: float | None) -> bytes:
        """Return the next packet, after ``wait`` seconds at most. Checks at intervals that the producer is alive.
        Raises TimeoutError, PeerGoneError, ClosedError.
        """
        end, alive = deadline_after(wait), True
        while True:
            try:
                data: bytes = self._receive(timeout=min(left(end), _LIVENESS_SECONDS) if alive else 0).data
                return data
            except TimeoutError:
                if not alive:
                    raise PeerGoneError("the producer of the ring has died") from None
                alive = self._items[0]._block.exporter_alive()
                if alive and left(end) == 0:
                    raise TimeoutError(f"no item of the ring came within {wait:g} s") from None
            except (ClosedError, PeerGoneError):
                self._check_open()
                raise

    def _refuse(self, data: bytes) -> NoReturn:
        """Raise the error for a packet that is not an item of this ring: EOFError for the packet that ends the ring,
        otherwise ProtocolError after closing the connection.
        """
        if data == END:
            self._check_open()
            raise EOFError("the producer has closed the ring")
        self._again = None
        self._channel.close()
        raise ProtocolError(f"{data[:64]!r} is no item of this ring; the connection is closed")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RingItem:
        self._end_turn()
        try:
            return self._begin_turn(self.next())
        except EOFError:
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RingItem:
        self._end_turn()
        while True:
            try:
                return self._begin_turn(self.next(0))
            except EOFError:
                raise StopAsyncIteration from None
            except TimeoutError:
                await self._readable()

    async def _readable(self) -> None:
        """Wait until :meth:`fileno` is readable, for at most a quarter of a second: then the producer is checked
        again.
        """
        # asyncio is imported here, because an import at module level would double the import time of the package.
        import asyncio

        loop, ready, fd = asyncio.get_running_loop(), asyncio.Event(), self.fileno()
        loop.add_reader(fd, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), _LIVENESS_SECONDS)
        except asyncio.TimeoutError:
            pass
        finally:
            loop.remove_reader(fd)

    def _end_turn(self) -> None:
        """Release the item that the iteration returned last, unless the program has released it."""
        if self._current is not None:
            item, value = self._current
            # Item objects are reused. If the program released this item, the object may now be a later item, which must
            # not be released.
            if item._held and item._value == value:
                item.release()
            self._current = None

    def _begin_turn(self, item: RingItem) -> RingItem:
        self._current = (item, item._value)
        return item

    def _state(self) -> str:
        return f"{self.taken} items taken"


class _ConsumerEnding(RingEnding):
    """Item of the queue of deferred releases that ends a consumer: it closes the channel, releases the held items, and
    closes the memory.
    """

    def __init__(self, channel: Channel, memory: ImportedBuffer, items: list[RingItem]) -> None:
        self._channel = channel
        self._memory = memory
        self._items = items
        self._busy = False

    def attempt(self) -> bool:
        if self._busy:
            return False
        self._busy = True
        try:
            self._channel.shutdown()
            self._channel.close()
            if not self._memory.closed:
                ordered_after(self._memory.stream, self._release_all)
            return True
        finally:
            self._busy = False

    def _release_all(self, stream: Stream) -> None:
        for item in self._items:
            item.release(stream)
            if not reached(item._mine.closed.value, item._value):
                # An item may have been released on another stream. The memory is then closed after the work of that
                # stream too.
                item._block.wait(stream, item._mine.closed, item._value)
        self._memory.close(stream)
