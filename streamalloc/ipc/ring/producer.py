"""The end of a ring that fills slots. How the ends understand each other: see :mod:`streamalloc.ipc.ring.protocol`."""

from __future__ import annotations

import contextlib
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from streamalloc.core.buffer import Buffer
from streamalloc.core.door import Door
from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.fd import Fd
from streamalloc.core.memory import CopySide, Memory, copy_bytes
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemLocationType, checked_size
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.ipc.ring.protocol import (
    ALIGNMENT,
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
from streamalloc.ipc.sharing.control_block import IMPORTERS, ControlBlock, ImporterWords
from streamalloc.ipc.sharing.exports import Shared, share
from streamalloc.ipc.sharing.lease import Lease, leases_of
from streamalloc.ipc.transport.channel import Channel, Message, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.deadlines import end_of, left
from streamalloc.pool import MemoryPool

__all__ = ["RingProducer", "RingSlot", "RingStatistics"]

# Waiting for a slot: how long to spin, the longest sleep after that, and how often to look whether consumers live.
_SPIN_SECONDS = 50e-6
_LONGEST_PAUSE = 1e-3
_LIVENESS_SECONDS = 0.05
# More than a packet needs whatever happens, as there is room for it.
_SEND_SECONDS = 10.0

_packed = PACKET.pack


class RingStatistics(NamedTuple):
    """Figures of a producer."""

    handed_off: int
    """Items that were handed to consumers so far."""
    redelivered: int
    """How many of them went to another consumer later, as the first had gone without opening them."""
    in_flight: int
    """Slots that consumers have, or that wait for one."""
    free: int
    """Slots that can be filled; those that are being filled are neither."""
    consumers: int
    """Consumers that get items."""


class RingSlot(Part):
    """A slot that the producer fills, made by :meth:`RingProducer.next`.

    Leaving its ``with`` block hands it to a consumer, in stream order; where that fails, or the block did, it is given
    back unsent. The object is used again for later items in the same slot.
    """

    __slots__ = ("_board", "_number", "_place", "_ready", "_ring", "_size", "_words")

    def __init__(self, ring: RingProducer, lease: Lease, index: int) -> None:
        super().__init__(ring._buffer, ring.stream, index, index * ring._stride)
        # The ring refers to its slots, and is closed when it is dropped: so they must not refer back.
        self._ring = weakref.ref(ring)
        self._size = ring.slot_bytes
        self._board = lease.block
        self._number = lease.slot
        self._words = lease.words
        self._ready = lease.words.announced.value
        self._place: ImporterWords | None = None
        """The words of the consumer that has it, or had it last."""

    @property
    def nbytes(self) -> int:
        """The most bytes of an item."""
        return self._size

    @property
    def nbytes_used(self) -> int:
        """How many bytes, from the beginning on, the consumer gets; all unless it is set.

        Raises
        ------
        TypeError, ValueError
            It is no integer, or more than the slot has.
        """
        return self._used

    @nbytes_used.setter
    def nbytes_used(self, value: int) -> None:
        if checked_size("nbytes_used", value) > self._size:
            raise ValueError(f"nbytes_used={value}: the slots of this ring have {self._size} bytes")
        self._used = value

    def hand_off(self) -> None:
        """Hand the slot to a consumer, after the stream's work so far (``cuStreamWriteValue32``).

        Raises
        ------
        PeerGoneError
            No consumer is left; the slot can be handed off when one was added, or given back.
        ClosedError
            It was handed on already, or the ring was closed.
        CaptureError
            The stream is being captured.
        """
        self._check_usable()
        self._producer()._hand_off(self)

    def give_back(self) -> None:
        """Give the slot back unsent; without effect if it was handed off."""
        self._producer()._give_back(self)

    def _producer(self) -> RingProducer:
        ring = self._ring()
        if ring is None:
            raise ClosedError("the ring was closed")
        return ring

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._held:
            return
        ring = self._producer()
        if kind is not None:
            ring._give_back(self)
            return
        try:
            ring._hand_off(self)
        except BaseException:
            ring._give_back(self)
            raise


class _Consumer:
    """A consumer as the producer sees it."""

    __slots__ = ("boards", "channel", "in_flight", "places", "send", "turn")

    def __init__(self, channel: Channel, boards: list[tuple[ControlBlock, int]], places: list[ImporterWords]) -> None:
        self.channel = channel
        self.send = channel.send
        self.boards = boards
        """The boards of the slots, and which importer it is there."""
        self.places = places
        self.in_flight: deque[RingSlot] = deque()
        self.turn = 0
        """Which item it was given last."""

    def settle_first(self, free: deque[RingSlot]) -> None:
        """Move the slots that it has released, as far as it did so in order."""
        in_flight = self.in_flight
        while in_flight:
            slot = in_flight[0]
            if slot._place.closing.value != slot._value:  # type: ignore[union-attr]
                return
            free.append(in_flight.popleft())

    def settle(self, free: deque[RingSlot]) -> None:
        """Move the slots that it has released, in whatever order."""
        for slot in tuple(self.in_flight):
            if slot._place.closing.value == slot._value:  # type: ignore[union-attr]
                self.in_flight.remove(slot)
                free.append(slot)

    def unopened(self) -> list[RingSlot]:
        """Take away the slots that it has not opened; for one that never will."""
        found = [slot for slot in self.in_flight if slot._place.opened.value != slot._value]  # type: ignore[union-attr]
        for slot in found:
            self.in_flight.remove(slot)
        return found

    def close(self) -> None:
        # A forked child may have a copy of the connection.
        self.channel.shutdown()
        self.channel.close()


def _load(consumer: _Consumer) -> tuple[int, int]:
    return len(consumer.in_flight), consumer.turn


def _gone(consumers: Iterable[_Consumer]) -> list[_Consumer]:
    """Those that have closed their ends, or died."""
    poll = select.poll()
    found: dict[int, _Consumer] = {}
    gone = []
    for consumer in consumers:
        if consumer.channel.closed or not all(board.importer_alive(importer) for board, importer in consumer.boards):
            gone.append(consumer)
        else:
            fd = consumer.channel.fileno()
            found[fd] = consumer
            poll.register(fd, 0)
    return gone + [found[fd] for fd, _ in poll.poll(0)]


class RingProducer(Closes):
    """The end of a ring that fills slots; made by :meth:`Ring.producer`. Threads may share it.

    Closing it ends the stream for the consumers, who get all that was handed off before. Its memory is freed in stream
    order, once they have closed their ends. The host does not wait: where the process ends next, synchronise the stream
    first.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_closed",
        "_consumers",
        "_door",
        "_free",
        "_handed_off",
        "_handles",
        "_hello",
        "_leases",
        "_leaving",
        "_lock",
        "_ordinal",
        "_redelivered",
        "_slots",
        "_stride",
        "_unsent",
        "slot_bytes",
        "slots",
        "stream",
    )

    slot_bytes: int
    """The most bytes of an item."""
    slots: int
    """How many slots there are."""
    stream: Stream
    """The stream that fills the slots."""

    def __init__(self, pool: MemoryPool, slot_bytes: int, slots: int, stream: StreamLike) -> None:
        self._closed = True
        if not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, not {type(pool).__name__} ({pool!r})")
        if not checked_size("slot_bytes", slot_bytes):
            raise ValueError("slot_bytes=0: a slot has one byte at least")
        if not 1 <= checked_size("slots", slots) <= MOST_SLOTS:
            raise ValueError(f"slots={slots}: a ring has 1 to {MOST_SLOTS} slots")
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._stride = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        self._door = pool._door
        ordered = as_stream(stream, self._door)
        ordered._refuse_capture("cuMemAllocFromPoolAsync", "a ring is not made in a capture")
        self.stream = ordered
        self._lock = threading.Lock()
        self._free: deque[RingSlot] = deque()
        self._unsent: deque[RingSlot] = deque()
        """Filled slots that a consumer has not opened before it went."""
        self._consumers: list[_Consumer] = []
        self._leaving: list[_Consumer] = []
        """Consumers that have gone, but have slots that their streams may use still."""
        self._handed_off = 0
        self._redelivered = 0
        self._ordinal = pool.location.id if pool.location.type is MemLocationType.DEVICE else None
        self._leases: list[Lease] = []
        self._buffer: Buffer = pool.allocate(slots * self._stride, ordered)
        with undoing(self._undo):
            shared = share(self._buffer)
            leases = leases_of(self._door)
            for _ in range(slots):
                self._leases.append(leases.take())
            self._slots = [RingSlot(self, lease, index) for index, lease in enumerate(self._leases)]
            self._hello, self._handles = self._introduction(shared)
        self._free.extend(self._slots)
        self._closed = False
        self._door.shut_with_me(self)

    def _undo(self) -> None:
        for lease in self._leases:
            leases_of(self._door).give(lease)
        self._buffer.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    # -- consumers -------------------------------------------------------------------------------------------

    def add(self, channel: Channel, timeout: float | None = None) -> None:
        """Add a consumer, at any time. Blocks until it has made its end with :meth:`Ring.consumer`.

        Parameters
        ----------
        channel
            A connection to it, which is the ring's from now on: closed with it, on failure, and when the consumer goes.
        timeout
            Seconds until ``TimeoutError``; None for ever.

        Raises
        ------
        PeerGoneError
            It has ended, or could not make its end.
        ProtocolError
            What it answers is not of a ring's consumer.
        ClosedError
            The ring was closed.
        """
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel, not {type(channel).__name__} ({channel!r})")
        self._check_open()
        end = end_of(timeout)
        try:
            channel.send(self._hello, self._handles, timeout=timeout)
            answer = channel.receive(timeout=None if end is None else left(end))
            consumer = self._admitted(channel, answer)
            with self._lock:
                self._check_open()
                self._consumers.append(consumer)
                self._deliver_unsent()
        except BaseException:
            channel.close()
            raise

    def _boards(self) -> list[ControlBlock]:
        return list({id(lease.block): lease.block for lease in self._leases}.values())

    def _introduction(self, shared: Shared) -> tuple[bytes, tuple[Fd, ...]]:
        """What a consumer is told first, and the handles that go along: those of the boards, then the buffer's."""
        boards = self._boards()
        places = {id(board): place for place, board in enumerate(boards)}
        head = HELLO.pack(MAGIC, VERSION, len(boards), self.slots, self.slot_bytes, self._stride)
        names = b"".join(NAME.pack(board.id) for board in boards)
        numbers = b"".join(NUMBER.pack(places[id(lease.block)], lease.slot) for lease in self._leases)
        return head + names + numbers + bytes(shared), (*(board.fd for board in boards), *shared.fds)

    def _admitted(self, channel: Channel, answer: Message) -> _Consumer:
        boards = self._boards()
        head, rest = answer.data[: ANSWER.size], answer.data[ANSWER.size :]
        if head != ANSWER.pack(MAGIC, VERSION, len(boards)) or len(rest) != len(boards) * IMPORTER.size:
            raise ProtocolError("this is not what a ring's consumer answers")
        importers = [importer for (importer,) in IMPORTER.iter_unpack(rest)]
        for board, importer in zip(boards, importers, strict=True):
            if importer >= IMPORTERS or not board.importer_alive(importer):
                raise ProtocolError(f"a ring's consumer says that it is importer {importer}, which is nobody")
            board.watch_importer(importer)
        on = {id(board): importer for board, importer in zip(boards, importers, strict=True)}
        places = [slot._board.importer_words(slot._number, on[id(slot._board)]) for slot in self._slots]
        return _Consumer(channel, list(zip(boards, importers, strict=True)), places)

    # -- slots -----------------------------------------------------------------------------------------------

    def next(self, timeout: float | None = None) -> RingSlot:
        """The next free slot, to be filled on :attr:`stream`. Use it in a ``with`` block.

        Where the stream of the consumer that released it has work left, ours waits for that (``cuStreamWaitValue32``).

        Parameters
        ----------
        timeout
            Seconds to wait for a slot; None for ever.

        Raises
        ------
        TimeoutError
            Consumers have not released any, or all are being filled.
        PeerGoneError
            There is no consumer, or none is left. When one was added, it goes on.
        ClosedError
            The ring was closed.
        CaptureError
            The stream is being captured.
        """
        with self._lock:
            if self._free or self._settle():
                return self._take()
        return self._wait_for_slot(timeout)

    def put(self, data: Memory | Any, timeout: float | None = None) -> None:
        """Copy ``data`` into the next free slot and hand that off, in stream order (``cuMemcpyAsync``).

        Parameters
        ----------
        data
            As for :meth:`Memory.copy_from`, but of any size up to :attr:`slot_bytes`.
        timeout
            As for :meth:`next`, which also says what else is raised.

        Raises
        ------
        ValueError
            It is larger than a slot.
        """
        source = CopySide.readable(data, self._door)
        if source.nbytes > self.slot_bytes:
            raise ValueError(f"data has {source.nbytes} bytes, and the slots of this ring {self.slot_bytes}")
        with self.next(timeout) as slot:
            slot._used = source.nbytes
            copy_bytes(CopySide(slot._base, source.nbytes, self._ordinal, slot), source, self.stream)

    def statistics(self) -> RingStatistics:
        """Figures as they are now."""
        with self._lock:
            self._settle()
            in_flight = sum(len(consumer.in_flight) for consumer in (*self._consumers, *self._leaving))
            return RingStatistics(
                self._handed_off,
                self._redelivered,
                in_flight + len(self._unsent),
                len(self._free),
                len(self._consumers),
            )

    def close(self) -> None:
        """End the stream: consumers get what was handed off, then the end. Idempotent.

        The memory is freed in stream order, once they have closed their ends.
        """
        self._door.check_process()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()
        self._buffer.close()

    def _end(self) -> None:
        for slot in self._slots:
            slot._held = False
        self._part_with(_gone(self._consumers))
        with contextlib.suppress(OSError):
            self._deliver_unsent()
        for consumer in self._consumers:
            with contextlib.suppress(OSError):
                consumer.send(END, timeout=_SEND_SECONDS)
        ending = _Ending(self._door, self._leases, self._consumers + self._leaving)
        if not ending.ended():
            self._door.retire(ending)
        self._consumers, self._leaving = [], []
        self._unsent.clear()
        self._free.clear()

    # -- with the lock held ----------------------------------------------------------------------------------

    def _take(self) -> RingSlot:
        if self._closed or not self._consumers:
            self._refuse()
        slot = self._free[0]
        place = slot._place
        if place is not None and (place.closed.value - slot._value) & MASK >= HALF:
            slot._board.wait(self.stream, place.closed_address, slot._value)
        self._free.popleft()
        slot._held = True
        slot._used = slot._size
        return slot

    def _hand_off(self, slot: RingSlot) -> None:
        with self._lock:
            if not slot._held or not self._consumers:
                slot._check_usable()
                self._refuse()
            if self._unsent:
                self._deliver_unsent()
            ready = (slot._ready + 1) & MASK
            words = slot._words
            slot._board.tell(self.stream, words.ready, words.ready_address, ready)
            slot._ready = words.announced.value = ready
            self._deliver(slot)
            slot._held = False

    def _give_back(self, slot: RingSlot) -> None:
        with self._lock:
            if slot._held:
                slot._held = False
                self._free.appendleft(slot)

    def _deliver(self, slot: RingSlot) -> None:
        """Send a filled slot to the consumer that has the fewest."""
        while True:
            consumer = self._chosen()
            place = consumer.places[slot._index]
            value = (place.closing.value + 1) & MASK
            try:
                consumer.send(_packed(ITEM, slot._index, slot._ready, value, slot._used), timeout=_SEND_SECONDS)
            except (ConnectionError, ClosedError):
                self._part_with([consumer])
                continue
            slot._place = place
            slot._value = value
            consumer.in_flight.append(slot)
            self._handed_off = consumer.turn = self._handed_off + 1
            return

    def _chosen(self) -> _Consumer:
        consumers = self._consumers
        if len(consumers) == 1:
            return consumers[0]
        if not consumers:
            self._refuse()
        for consumer in consumers:
            consumer.settle_first(self._free)
        return min(consumers, key=_load)

    def _deliver_unsent(self) -> None:
        while self._unsent and self._consumers:
            self._deliver(self._unsent[0])
            self._unsent.popleft()
            self._handed_off -= 1
            self._redelivered += 1

    def _settle(self) -> bool:
        """Take back what consumers have released; whether there is a free slot."""
        for consumer in self._consumers:
            consumer.settle(self._free)
        if self._leaving:
            for consumer in self._leaving:
                consumer.settle(self._free)
            self._leaving = [consumer for consumer in self._leaving if consumer.in_flight]
        return bool(self._free)

    def _part_with(self, gone: Iterable[_Consumer]) -> None:
        """Give up consumers that have gone; others get what they have not opened."""
        for consumer in gone:
            self._consumers.remove(consumer)
            consumer.close()
            consumer.settle(self._free)
            self._unsent.extend(consumer.unopened())
            if consumer.in_flight:
                # Its words are set when it lets go of them, or by those who watch over it when it dies.
                self._leaving.append(consumer)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait_for_slot(self, timeout: float | None) -> RingSlot:
        end = end_of(timeout)
        now = time.monotonic()
        spun = now + _SPIN_SECONDS
        look = now + _LIVENESS_SECONDS
        pause = _SPIN_SECONDS
        while True:
            with self._lock:
                if self._settle():
                    return self._take()
                now = time.monotonic()
                over = end is not None and now >= end
                # Also when the time is over: who waits for a short time again and again has to hear of it as well.
                if now >= look or over:
                    look = now + _LIVENESS_SECONDS
                    self._part_with(_gone(self._consumers))
                    self._deliver_unsent()
                if self._closed or not self._consumers:
                    self._refuse()
            if over:
                raise TimeoutError(f"no slot of the ring was free within {timeout:g} s: all {self.slots} are in use")
            if now >= spun:
                time.sleep(min(pause, left(end)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _shut_after_fork(self) -> None:
        # The consumers are the parent's, and a thread of it may have held the lock.
        self._lock = threading.Lock()
        self._consumers, self._leaving = [], []

    def _check_open(self) -> None:
        self._door.check_process()
        if self._closed:
            raise ClosedError("the ring was closed")

    def _refuse(self) -> NoReturn:
        """Say why nothing can be handed off."""
        self._check_open()
        raise PeerGoneError("the ring has no consumer: none was added, or all have gone; it goes on when one is added")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._door.usable:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._consumers)} consumers"
        return f"<RingProducer of {self.slots} slots of {self.slot_bytes} bytes, {state}>"


class _Ending:
    """What is left of a closed producer until its consumers are done; kept by the door until then."""

    __slots__ = ("_consumers", "_door", "_leases")

    handle = 0

    def __init__(self, door: Door, leases: list[Lease], consumers: list[_Consumer]) -> None:
        self._door = door
        self._leases = leases
        self._consumers = consumers

    def ended(self) -> bool:
        """Whether no consumer has a slot or will open one, so that the words can serve others."""
        busy = self._busy()
        if busy:
            for consumer in _gone(busy):
                consumer.unopened()
            busy = self._busy()
        if busy:
            return False
        for lease in self._leases:
            leases_of(self._door).give(lease)
        return True

    def _busy(self) -> list[_Consumer]:
        for consumer in self._consumers:
            consumer.settle(deque())
            if not consumer.in_flight:
                consumer.channel.close()
        self._consumers = [consumer for consumer in self._consumers if consumer.in_flight]
        return self._consumers
