"""What a producer does with filled slots: which consumer has which, and what comes back when one goes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

from streamalloc.core.internal import Buffer, ClosedError, CudaError, Session, Stream, checked_size, size_text
from streamalloc.ipc.exporter.leases import Lease, hung_up
from streamalloc.ipc.ring.protocol import END, HALF, ITEM, MASK, PACKET, RingEnding, SlotMemory
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.packets import PeerGoneError
from streamalloc.ipc.wire.control_block import ControlBlock, ImporterWords, SlotWords

__all__ = ["ConsumerLink", "Deliveries", "RingSlot", "Slot", "SlotHolder"]

# More than a packet needs whatever happens, as there is room for it.
_SEND_SECONDS = 10.0

_packed = PACKET.pack


class Slot:
    """One of the slots of a producer, as it is used again and again."""

    __slots__ = ("block", "holder", "index", "lease", "number", "place", "ready", "used", "value", "words")

    def __init__(self, index: int, lease: Lease) -> None:
        self.index: int = index
        self.lease: Lease = lease
        self.block: ControlBlock = lease.block
        self.number: int = lease.slot
        self.words: SlotWords = lease.words
        self.ready: int = lease.words.last_announced
        """The value of its ready word when the contents are there."""
        self.used: int = 0
        self.holder: SlotHolder | None = None
        """Who fills it."""
        self.place: ImporterWords | None = None
        """The words of the consumer that has it, or had it last; None where there is nobody to wait for."""
        self.value: int = 0
        """What these are when the consumer has opened and closed it."""


class SlotHolder(weakref.ref["RingSlot"]):
    """Refers to the object by which a user fills a slot.

    Its callback is a function of C: where a user drops the object, no Python code runs that a signal handler could end.
    """

    __slots__ = ("slot",)

    slot: Slot


class RingSlot(SlotMemory):
    """A slot that the producer fills, made by :meth:`RingProducer.next`.

    Leaving its ``with`` block hands it to a consumer, in stream order; where that fails, or the block did, it is given
    back unsent, and so it is when it is dropped.
    """

    __slots__ = ("_deliveries", "_slot", "_used")

    def __init__(self, deliveries: Deliveries, slot: Slot) -> None:
        offset = slot.index * deliveries.stride
        super().__init__(deliveries.buffer, deliveries.stream, slot.index, offset, deliveries.slot_bytes)
        self._deliveries = deliveries
        self._slot = slot
        self._used = deliveries.slot_bytes

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
        if checked_size("nbytes_used", value) > self._nbytes:
            raise ValueError(f"nbytes_used={value}: the slots of this ring have {size_text(self._nbytes)}")
        self._used = value

    def _check_usable(self) -> None:
        if not self._held or self._deliveries.closed:
            raise ClosedError(f"slot {self.index} of the ring was handed on, or the ring was closed")

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
        self._deliveries.hand_off(self)

    def give_back(self) -> None:
        """Give the slot back unsent; without effect if it was handed off."""
        if self._held:
            self._held = False
            self._slot.holder = None
            self._deliveries.free.appendleft(self._slot)

    def _leave(self, *, failed: bool) -> None:
        try:
            if not failed and self._held:
                self._deliveries.hand_off(self)
        finally:
            self.give_back()


class ConsumerLink:
    """A consumer as the producer sees it."""

    __slots__ = ("blocks", "channel", "in_flight", "places", "turn", "unsure")

    def __init__(self, channel: Channel, blocks: dict[ControlBlock, int], places: list[ImporterWords]) -> None:
        self.channel: Channel = channel
        self.blocks: dict[ControlBlock, int] = blocks
        """The control blocks of the slots, and which importer it is there."""
        self.places: list[ImporterWords] = places
        """Its words, by slot."""
        self.in_flight: dict[Slot, None] = {}
        """The slots that it has, in the order in which it was given them."""
        self.turn: int = 0
        """Which item it was given last."""
        self.unsure: bytes = b""
        """The last packet, where it is not known whether it was sent."""

    def make_sure(self) -> None:
        """Send the last packet where it may not have gone out yet: the consumer knows it if it comes twice."""
        if self.unsure:
            self.channel.send(self.unsure, timeout=_SEND_SECONDS)
            self.unsure = b""

    def close(self) -> None:
        # A forked child may have a copy of the connection.
        self.channel.shutdown()
        self.channel.close()


def _load(consumer: ConsumerLink) -> tuple[int, int]:
    return len(consumer.in_flight), consumer.turn


def _gone(consumers: Iterable[ConsumerLink]) -> list[ConsumerLink]:
    """Those that have closed their ends, or died."""
    return [
        consumer
        for consumer in consumers
        if consumer.channel.closed
        or not all(block.importer_alive(importer) for block, importer in consumer.blocks.items())
        or hung_up(consumer.channel)
    ]


class Deliveries(RingEnding):
    """The slots of a producer and its consumers; and its end, once they have let go of all of them.

    Each slot is in one place: in :attr:`free`, with the user (:class:`RingSlot`), ``in_flight`` to a consumer, or in
    :attr:`unsent`. What changes that calls nothing in between.
    """

    def __init__(self, session: Session, buffer: Buffer, stream: Stream, slot_bytes: int, stride: int) -> None:
        self.closed = False
        self.slot_bytes: int = slot_bytes
        self.stride: int = stride
        """From one slot to the next, in bytes."""
        self.session: Session = session
        self.buffer: Buffer = buffer
        self.stream: Stream = stream
        self.lock: contextlib.AbstractContextManager[bool] = threading.Lock()
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()
        self.dropped: deque[Any] = deque()
        """What referred to objects of users that were dropped, see :class:`SlotHolder`."""
        self.unsent: dict[Slot, None] = {}
        """Filled slots that a consumer has not opened before it went."""
        self.consumers: dict[ConsumerLink, None] = {}
        self.leaving: dict[ConsumerLink, None] = {}
        """Consumers that get nothing more, but have slots that their streams may use still."""
        self.handed_off: int = 0
        self.redelivered: int = 0
        self._told = False
        """Whether the consumers were told the end."""

    # -- with the lock held ----------------------------------------------------------------------------------

    def ready_slot(self) -> Slot | None:
        """The next free slot, which the stream may fill; None where there is none. It stays free."""
        if not self.free and not self.settle():
            return None
        if self.closed or not self.consumers:
            self.refuse()
        slot = self.free[0]
        place = slot.place
        if place is not None and (place.closed.value - slot.value) & MASK >= HALF:
            slot.block.wait_closed(self.stream, place, slot.value)
        return slot

    def settle(self) -> bool:
        """Take back what consumers have released, and users have dropped; whether there is a free slot."""
        while self.dropped:
            holder = self.dropped[0]
            if holder.slot.holder is holder:
                self.free += (holder.slot,)
                holder.slot.holder = None
            del self.dropped[0]
        for consumer in (*self.consumers, *self.leaving):
            with contextlib.suppress(OSError, ClosedError):
                consumer.make_sure()
            for slot in tuple(consumer.in_flight):
                if slot.place.closing.value == slot.value:  # type: ignore[union-attr]
                    self.free += (slot,)
                    del consumer.in_flight[slot]
        for consumer in tuple(self.leaving):
            if not consumer.in_flight:
                del self.leaving[consumer]
                consumer.channel.close()
        return bool(self.free)

    def drop_gone(self) -> None:
        """Give up consumers that have gone; others get what these have not opened."""
        for consumer in _gone(self.consumers):
            self._drop(consumer)
        self._take_unopened(self.leaving)
        self.deliver_unsent()

    def _drop(self, consumer: ConsumerLink) -> None:
        if consumer in self.consumers:
            self.leaving[consumer] = None
            del self.consumers[consumer]
        consumer.close()
        self._take_unopened([consumer])

    def _take_unopened(self, consumers: Iterable[ConsumerLink]) -> None:
        """Take away what consumers have not opened that have gone and never will.

        The words of what they have opened are set when they let go of it, or by those who watch over them when they
        die.
        """
        self.settle()
        for consumer in _gone(consumers):
            for slot in tuple(consumer.in_flight):
                if slot.place.opened.value != slot.value:  # type: ignore[union-attr]
                    # Nobody uses it, so that nobody is to be waited for.
                    slot.place = None
                    self.unsent[slot] = None
                    del consumer.in_flight[slot]

    def deliver_unsent(self) -> None:
        """Give the consumers what others have not opened."""
        while self.unsent and self.consumers:
            slot = next(iter(self.unsent))
            self._deliver(slot)
            self.handed_off -= 1
            self.redelivered += 1

    def _deliver(self, slot: Slot, holder: RingSlot | None = None) -> None:
        """Send a filled slot, unsent or with ``holder``, to the consumer that has the fewest."""
        while True:
            consumer = self._chosen()
            place = consumer.places[slot.index]
            value = (place.closing.value + 1) & MASK
            packet = _packed(ITEM, slot.index, slot.ready, value, slot.used)
            # The consumer has it from here on, unless it is known that it has not opened it and never will.
            consumer.unsure = packet
            consumer.in_flight[slot] = None
            slot.place = place
            slot.value = value
            if holder is None:
                del self.unsent[slot]
            else:
                holder._held = False
                lent, slot.holder = slot.holder, None
            self.handed_off = consumer.turn = self.handed_off + 1
            try:
                consumer.make_sure()
                return
            except (ConnectionError, ClosedError):
                consumer.unsure = b""
                self._drop(consumer)
                if slot not in self.unsent:
                    return
                self.handed_off -= 1
                if holder is not None:
                    holder._held = True
                    slot.holder = lent
                    del self.unsent[slot]

    def _chosen(self) -> ConsumerLink:
        while self.consumers:
            if len(self.consumers) > 1:
                self.settle()
            consumer = min(self.consumers, key=_load)
            try:
                consumer.make_sure()
                return consumer
            except (ConnectionError, ClosedError):
                self._drop(consumer)
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say why nothing can be handed off."""
        self.session.check_process()
        if self.closed:
            raise ClosedError("the ring was closed")
        raise PeerGoneError("the ring has no consumer: none was added, or all have gone; it goes on when one is added")

    # -- without it ------------------------------------------------------------------------------------------

    def hand_off(self, holder: RingSlot) -> None:
        """Hand a slot that was filled to a consumer."""
        with self.lock:
            holder._check_usable()
            if not self.consumers:
                self.refuse()
            if self.unsent:
                self.deliver_unsent()
            slot = holder._slot
            words, before = slot.words, slot.ready
            # A value is said once, also where a signal handler raises.
            slot.ready = words.last_announced = words.announced.value = ready = (before + 1) & MASK
            slot.used = holder._used
            try:
                slot.block.write(self.stream, words.ready, ready)
            except (CudaError, ClosedError):
                slot.ready = words.last_announced = words.announced.value = before
                raise
            self._deliver(slot, holder)

    def attempt(self) -> bool:
        """Tell the consumers the end, free the memory, and give back the words once no consumer uses any."""
        with self.lock:
            if not self._told:
                self._tell_end()
        self.buffer.close()
        with self.lock:
            self._take_unopened(self.leaving)
            self.settle()
            if self.leaving:
                return False
        for slot in self.slots:
            slot.lease.release()
        return True

    def _tell_end(self) -> None:
        with contextlib.suppress(OSError):
            self.drop_gone()
        for consumer in tuple(self.consumers):
            with contextlib.suppress(OSError, ClosedError):
                consumer.make_sure()
                consumer.channel.send(END, timeout=_SEND_SECONDS)
            self.leaving[consumer] = None
            del self.consumers[consumer]
        self.unsent.clear()
        self.free.clear()
        self._told = True

    def _shut_after_fork(self) -> None:
        # The consumers are the parent's, and a thread of it may have held the lock.
        self.lock = threading.Lock()
        self.consumers, self.leaving = {}, {}
