"""The producing end of a ring. It fills slots, and takes back slots from consumers that are gone; see
:mod:`.protocol`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from streamalloc.core.errors import ClosedError, size_text, undoing
from streamalloc.core.internal import (
    Buffer,
    CopySide,
    Fd,
    Memory,
    Stream,
    StreamLike,
    as_stream,
    copy_bytes,
    work,
)
from streamalloc.core.properties import MemLocationType, checked_number, checked_size, checked_type
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import Lock
from streamalloc.formats.html import Row
from streamalloc.ipc.exporter.exports import Lease, exports_of, hung_up
from streamalloc.ipc.exporter.share import share
from streamalloc.ipc.ring.protocol import (
    END,
    ITEM,
    MOST_SLOTS,
    PACKET,
    Introduction,
    RingEnd,
    RingEnding,
    SlotMemory,
    importer_in,
)
from streamalloc.ipc.transport.channel import Channel, Message, PeerGoneError, ProtocolError, deadline_after, left
from streamalloc.ipc.wire.control_block import IMPORTERS, WORD, ControlBlock, ImporterWords, reached
from streamalloc.pool import MemoryPool

# Seconds after which a send to a consumer fails. The socket buffer has space for the packets of all slots, so a send
# rarely waits.
_SEND_SECONDS = 10.0

_packed = PACKET.pack


@dataclass(eq=False, slots=True)
class Slot:
    """The producer's record of one slot, the memory for one item. The object is used for all items that come into the
    slot.
    """

    index: int
    lease: Lease
    """Lease whose words (:attr:`.Lease.words`) the producer writes for this slot of the ring."""
    used: int = 0
    """Size in bytes of the item that is in the slot."""
    theirs: ImporterWords | None = None
    """Words that the last consumer of this slot writes; None if the next fill has no consumer to wait for."""
    value: int = 0
    """Value that the words ``closed`` and ``closing`` in :attr:`theirs` reach when the consumer releases the slot."""
    holder: weakref.ref[RingSlot] | None = None
    """Weak reference to the last :class:`RingSlot` made for this slot; None before the first."""


class RingSlot(SlotMemory):
    """A slot of the ring that the program fills, made by :meth:`RingProducer.next`.

    The end of the ``with`` block hands the slot to a consumer, in stream order. If the block or the hand-off raises an
    exception, or if the object is dropped, the slot is not sent and becomes free again.
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
        """Size of the item in bytes, from the slot's first byte on; default: the whole slot. Can be assigned.

        Raises
        ------
        TypeError, ValueError
            The assigned value is not an integer, or is negative or larger than the slot.
        """
        return self._used

    @nbytes_used.setter
    def nbytes_used(self, value: int) -> None:
        if checked_number("nbytes_used", value) > self._nbytes:
            raise ValueError(f"nbytes_used={value}: the slots of this ring have {size_text(self._nbytes)}")
        self._used = value

    def check_usable(self) -> None:
        if not getattr(self, "_held", False) or self._deliveries.closed:
            raise ClosedError(f"slot {self.index} of the ring was handed on, or the ring was closed")

    def hand_off(self) -> None:
        """Hand the slot to a consumer, after the work queued on the stream (``cuStreamWriteValue32``).

        Raises
        ------
        PeerGoneError
            No consumer is left. Add one and hand off the slot again, or give the slot back.
        ClosedError
            The slot was handed on already, or the ring was closed.
        CaptureError, CudaError
            The stream is being captured, or the driver refused a call.
        """
        self.check_usable()
        self._deliveries.hand_off(self)

    def give_back(self) -> None:
        """Make the slot free again without sending it. No effect after :meth:`hand_off`."""
        if self._held:
            self._held = False
            self._deliveries.free.append(self._slot)
            if self._deliveries.closed:
                work(self._deliveries.session)

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            self._deliveries.free.append(self._slot)

    def _leave(self, *, failed: bool) -> None:
        try:
            if not failed and self._held:
                self._deliveries.hand_off(self)
        finally:
            self.give_back()


@dataclass(eq=False, slots=True)
class ConsumerLink:
    """The producer's record of one consumer: its channel, the words that it writes, and the slots that it has."""

    channel: Channel
    block: ControlBlock
    importer: int
    """Importer number of the consumer on the control block."""
    words: list[ImporterWords]
    """Words that the consumer writes, one for each slot, in the order of the slots."""
    in_flight: dict[Slot, None] = field(default_factory=dict)
    """Slots sent to the consumer and not released, oldest first."""
    turn: int = 0
    """Value of :attr:`Deliveries.sends` at the last send to this consumer. If consumers have equally many slots in
    flight, the consumer with the lowest value gets the next item.
    """

    def close(self) -> None:
        # close() alone would leave the connection open if a forked child has a copy of the socket.
        self.channel.shutdown()
        self.channel.close()


def _load(consumer: ConsumerLink) -> tuple[int, int]:
    return len(consumer.in_flight), consumer.turn


def _gone(consumers: Iterable[ConsumerLink]) -> list[ConsumerLink]:
    """Return the consumers that have closed their ends or died."""
    return [
        consumer
        for consumer in consumers
        if consumer.channel.closed or not consumer.block.importer_alive(consumer.importer) or hung_up(consumer.channel)
    ]


class Deliveries(RingEnding):
    """The slots and consumers of a producer. As an item of the queue of deferred releases, it ends when the consumers
    have released all slots.

    Each slot is in one state: in :attr:`free`, held by the program (:class:`RingSlot`), in ``in_flight`` of a consumer,
    or in :attr:`unsent`.
    """

    def __init__(self, session: Session, buffer: Buffer, stream: Stream, slot_bytes: int, stride: int) -> None:
        self.slot_bytes: int = slot_bytes
        self.stride: int = stride
        """Distance in bytes from the start of a slot to the start of the next slot."""
        self.session: Session = session
        self.buffer: Buffer = buffer
        self.stream: Stream = stream
        self.lock: contextlib.AbstractContextManager[bool] = Lock()
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()
        """Slots that can be filled. :class:`RingSlot` appends slots that are not sent, without taking the lock."""
        self.unsent: dict[Slot, None] = {}
        """Filled slots that no consumer has: the consumer has gone without opening them, or the send has not begun."""
        self.consumers: dict[ConsumerLink, None] = {}
        self.leaving: dict[ConsumerLink, None] = {}
        """Consumers that get no more items but may still use slots."""
        self.handed_off: int = 0
        self.redelivered: int = 0
        self.sends: int = 0
        self._end_sent = False

    # -- with the lock held ----------------------------------------------------------------------------------

    def take(self) -> RingSlot | None:
        """Take the next free slot for the stream to fill. The stream waits for the slot's last consumer
        (``cuStreamWaitValue32``). Returns None if no slot is free. Raises the errors of :meth:`refuse` if the
        ring was closed or has no consumer, CaptureError if the stream would have to wait and is being captured, and
        CudaError if the driver refuses.
        """
        if not self.free and not self.settle():
            return None
        if self.closed or not self.consumers:
            self.refuse()
        slot = self.free[0]
        theirs, value = slot.theirs, slot.value
        if theirs is not None and theirs.closed.value != value and not reached(theirs.closed.value, value):
            slot.lease.block.wait_closed(self.stream, theirs, value)
        taken = RingSlot(self, slot)
        slot.holder = weakref.ref(taken)
        del self.free[0]
        taken._held = True
        return taken

    def settle(self) -> bool:
        """Move the slots that consumers have released to :attr:`free`. Close the channels of leaving consumers that use
        no slot any more. Returns whether any slot is free now.
        """
        for consumer in (*self.consumers, *self.leaving):
            for slot in tuple(consumer.in_flight):
                if slot.theirs.closing.value == slot.value:  # type: ignore[union-attr]
                    del consumer.in_flight[slot]
                    self.free.append(slot)
        for consumer in tuple(self.leaving):
            if not consumer.in_flight:
                del self.leaving[consumer]
                consumer.channel.close()
        return bool(self.free)

    def drop_gone(self) -> None:
        """Remove consumers that are gone, and send the items that they have not opened to other consumers. Raises
        the errors of :meth:`deliver_unsent`.
        """
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
        """Move the slots that gone consumers have not opened to :attr:`unsent`.

        Opened slots stay in flight until their words are written: by the consumer when it releases them, or by the
        thread that waits for the consumer's death.
        """
        self.settle()
        for consumer in _gone(consumers):
            for slot in tuple(consumer.in_flight):
                if slot.theirs.opened.value != slot.value:  # type: ignore[union-attr]
                    slot.theirs = None
                    self.unsent[slot] = None
                    del consumer.in_flight[slot]

    def deliver_unsent(self) -> None:
        """Send the items in :attr:`unsent` to the consumers; nothing is sent if there is no consumer. Raises
        PeerGoneError if the last consumer goes meanwhile. The items that were not sent stay in :attr:`unsent`.
        """
        while self.unsent and self.consumers:
            self._deliver(next(iter(self.unsent)))
            self.redelivered += 1

    def _deliver(self, slot: Slot) -> None:
        """Send a slot in :attr:`unsent` to the consumer with the fewest slots in flight. If the send fails, that
        consumer is removed, and the slot is sent to the next consumer. Raises PeerGoneError if no consumer is left.
        """
        while slot in self.unsent:
            if not self.consumers:
                self.refuse()
            if len(self.consumers) > 1:
                self.settle()
            consumer = min(self.consumers, key=_load)
            theirs = consumer.words[slot.index]
            value = (theirs.closing.value + 1) % WORD
            packet = _packed(ITEM, slot.index, slot.lease.words.last_announced, value, slot.used)
            # The slot counts as in flight before the send. If a signal handler raises during the send, the consumer may
            # have the packet. So no other consumer may get the slot, which is lost until this consumer has gone.
            consumer.in_flight[slot] = None
            del self.unsent[slot]
            slot.theirs = theirs
            slot.value = value
            self.sends = consumer.turn = self.sends + 1
            try:
                consumer.channel.send(packet, timeout=_SEND_SECONDS)
            except (ConnectionError, ClosedError, TimeoutError):
                self._drop(consumer)

    def refuse(self) -> NoReturn:
        """Raise the error for an item that cannot be handed off: ForkedProcessError in a forked child, ClosedError for
        a closed ring, otherwise PeerGoneError, because the ring has no consumer.
        """
        self.session.check_process()
        if self.closed:
            raise ClosedError("the ring was closed")
        raise PeerGoneError("the ring has no consumer: add one; the producer continues then")

    # -- without the lock held -------------------------------------------------------------------------------

    def hand_off(self, holder: RingSlot) -> None:
        """Announce the contents of a filled slot (``cuStreamWriteValue32``) and send the slot to a consumer. After an
        error the slot stays with ``holder``. Raises the errors of :meth:`RingSlot.hand_off`.
        """
        with self.lock:
            holder.check_usable()
            if not self.consumers:
                self.refuse()
            self.deliver_unsent()
            slot = holder._slot
            slot.used = holder._used
            slot.lease.announce(self.stream)
            self.unsent[slot] = None
            holder._held = False
            self.handed_off += 1
            try:
                self._deliver(slot)
            except (ConnectionError, ClosedError):
                del self.unsent[slot]
                holder._held = True
                self.handed_off -= 1
                raise

    def attempt(self) -> bool:
        """Send the packet that ends the ring to the consumers. Free the memory once the program holds no slot, and
        release the slots once no consumer uses them. Returns whether all this is done.
        """
        with self.lock:
            if not self._end_sent:
                self._send_end()
            holders = [slot.holder() for slot in self.slots if slot.holder is not None]
            if any(holder is not None and holder._held for holder in holders):
                return False  # The program may still fill this slot, so a later attempt frees the memory.
        self.buffer.close()
        with self.lock:
            self._take_unopened(self.leaving)
            self.settle()
            if self.leaving:
                return False
        for slot in self.slots:
            slot.lease.release()
        return True

    def _send_end(self) -> None:
        with contextlib.suppress(OSError):
            self.drop_gone()
        for consumer in tuple(self.consumers):
            with contextlib.suppress(OSError, ClosedError):
                consumer.channel.send(END, timeout=_SEND_SECONDS)
            self.leaving[consumer] = None
            del self.consumers[consumer]
        self.unsent.clear()
        self.free.clear()
        self._end_sent = True

    def _shut_after_fork(self) -> None:
        # The consumers belong to the parent process. The lock is replaced, because another thread of the parent may
        # have held the old lock at the fork.
        self.lock = Lock()
        self.consumers, self.leaving = {}, {}


_ALIGNMENT = 512
_SPIN_SECONDS = 50e-6
"""Seconds of polling without a sleep in a wait for a slot. The first sleep after that is as long."""
_LONGEST_PAUSE = 1e-3
"""Longest sleep in a wait for a slot, in seconds. Each sleep is twice as long as the one before."""
_LIVENESS_SECONDS = 0.05
"""Seconds between two checks, in a wait for a slot, that the consumers are alive."""


class RingStatistics(NamedTuple):
    """Counters of a producer since its creation, and the present numbers of its slots and consumers: the result of
    :meth:`RingProducer.statistics`.
    """

    handed_off: int
    """Number of items handed to consumers so far. An item that was sent again counts once."""
    redelivered: int
    """Number of items sent again to another consumer, because the first consumer ended without opening them."""
    in_flight: int
    """Number of filled slots that no consumer has released."""
    free: int
    """Number of slots that can be filled. A slot that is being filled does not count."""
    consumers: int
    """Number of consumers that receive items."""


class RingProducer(RingEnd):
    """The producing end of a ring; made by :meth:`Ring.producer`. Threads may share it.

    If a consumer's process ends, the items that it has not taken go to another consumer. Without another one, they wait
    in their slots for the next :meth:`add`. Items that it has taken and not released are lost, and the producer is not
    told which.

    After :meth:`close` the consumers receive all earlier items, and then the end. The memory is freed in stream order
    once the program holds no slot. The host does not wait, so synchronise the stream before the process ends.
    """

    def __init__(self, pool: MemoryPool, slot_bytes: int | str, slots: int, stream: StreamLike) -> None:
        checked_type("pool", pool, MemoryPool)
        size = checked_size("slot_bytes", slot_bytes)
        if not size:
            raise ValueError("slot_bytes=0: a slot has one byte at least")
        if not 1 <= checked_number("slots", slots) <= MOST_SLOTS:
            raise ValueError(f"slots={slots}: a ring has 1 to {MOST_SLOTS} slots")
        super().__init__(session_of(pool))
        self.slot_bytes = size
        self.slots = slots
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.stream: Stream = as_stream(stream, self._session)
        """The stream that fills the slots, and on which their memory is freed."""
        self.stream.refuse_capture("cuMemAllocFromPoolAsync", "a ring is not made in a capture")
        self._ordinal = pool.location.id if pool.location.type is MemLocationType.DEVICE else None
        buffer = pool.allocate(slots * stride, self.stream)
        self._deliveries = state = Deliveries(self._session, buffer, self.stream, size, stride)
        with undoing(state.attempt):
            shared = share(buffer)
            leases = exports_of(self._session).new_leases(slots)
            state.slots += itertools.starmap(Slot, enumerate(leases))
            self._block = block = leases[0].block
            numbers = [lease.slot for lease in leases]
            self._hello = Introduction(block.id, numbers, size, stride, bytes(shared)).to_bytes()
            self._handles: tuple[Fd, ...] = block.fd, *shared.fds
            state.free.extend(state.slots)
            self._open(state)
        self._session.shut_with_me(self._deliveries)

    # -- consumers -------------------------------------------------------------------------------------------

    def add(self, channel: Channel, timeout: float | None = None) -> None:
        """Add a consumer, at any time. Blocks until the consumer has called :meth:`Ring.consumer`.

        Parameters
        ----------
        channel
            A connection to the consumer. The ring owns it, and closes it when the consumer ends or if this call fails.
            The caller keeps it after TypeError or ValueError, and if the ring was closed before the call.
        timeout
            Seconds until ``TimeoutError``; None: no limit.

        Raises
        ------
        TypeError, ValueError
            ``channel`` is not a :class:`Channel`, or ``timeout`` is no number or negative.
        TimeoutError
            The consumer has not called :meth:`Ring.consumer` in time.
        PeerGoneError
            The consumer's process has ended, or could not create its end of the ring.
        ProtocolError
            The answer is not from a ring's consumer.
        ClosedError
            The ring or the channel was closed.
        """
        checked_type("channel", channel, Channel)
        self._check_open()
        end = deadline_after(timeout)
        with undoing(channel.close):
            channel.send(self._hello, self._handles, timeout=timeout)
            try:
                answer = channel.receive(timeout=None if end is None else left(end))
            except TimeoutError:
                raise TimeoutError(f"no consumer has called Ring.consumer within {timeout:g} s") from None
            consumer = self._admitted(channel, answer)
            with self._deliveries.lock:
                self._check_open()
                self._deliveries.consumers[consumer] = None
                self._deliveries.deliver_unsent()

    def _admitted(self, channel: Channel, answer: Message) -> ConsumerLink:
        block, importer = self._block, importer_in(answer.data)
        if importer >= IMPORTERS or not block.importer_alive(importer):
            raise ProtocolError(f"a ring's consumer says that it is importer {importer}, which is nobody")
        block.watch_importer(importer)
        words = [block.importer_words(slot.lease.slot, importer) for slot in self._deliveries.slots]
        return ConsumerLink(channel, block, importer, words)

    # -- slots -----------------------------------------------------------------------------------------------

    def next(self, timeout: float | None = None) -> RingSlot:
        """Return the next free slot; fill it on :attr:`stream`. Use it in a ``with`` block.

        If the stream of the slot's last consumer has not reached its release of the slot, :attr:`stream` waits for the
        release (``cuStreamWaitValue32``).

        Parameters
        ----------
        timeout
            Seconds to wait for a slot; 0: do not wait; None: no limit.

        Raises
        ------
        TypeError, ValueError
            ``timeout`` is no number, or is negative.
        TimeoutError
            All slots are in flight or being filled.
        PeerGoneError
            The ring has no consumer, or all consumers have gone. Add a consumer and call again.
        ClosedError
            The ring was closed.
        CaptureError, CudaError
            The stream cannot wait for the release, because it is being captured or the driver refuses.
        """
        state = self._deliveries
        end = deadline_after(timeout)
        began = checked = time.monotonic()
        pause = _SPIN_SECONDS
        while True:
            with state.lock:
                slot = state.take()
                if slot is not None:
                    return slot
                now = time.monotonic()
                over = end is not None and now >= end
                # Consumers are also checked at the deadline, because a caller's timeout may be shorter than the
                # interval of the checks.
                if over or now >= checked + _LIVENESS_SECONDS:
                    checked = now
                    state.drop_gone()
                if state.closed or not state.consumers:
                    state.refuse()
            if over:
                raise TimeoutError(f"no slot of the ring was free within {timeout:g} s: all {self.slots} are in use")
            if now >= began + _SPIN_SECONDS:
                time.sleep(min(pause, left(end)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def put(self, data: Memory | Any, timeout: float | None = None) -> None:
        """Copy ``data`` into the next free slot and hand the slot off, in stream order (``cuMemcpyAsync``).

        Parameters
        ----------
        data
            A source as for :meth:`Memory.copy_from`, of at most :attr:`slot_bytes` bytes.
        timeout
            Seconds to wait for a slot; 0: do not wait; None: no limit.

        Raises
        ------
        TypeError, ValueError
            ``data`` is no source of :meth:`Memory.copy_from`, or is larger than a slot. Or ``timeout`` is no number, or
            is negative.
        TimeoutError, PeerGoneError, ClosedError
            As for :meth:`next`.
        CaptureError, CudaError
            The stream is being captured, or the driver refused a call.
        """
        source = CopySide.of(data, self._session)
        if source.nbytes > self.slot_bytes:
            raise ValueError(
                f"data has {size_text(source.nbytes)}, and the slots of this ring {size_text(self.slot_bytes)}"
            )
        with self.next(timeout) as slot:
            slot._used = source.nbytes
            copy_bytes(CopySide(slot._base, source.nbytes, self._ordinal, slot), source, self.stream)

    def statistics(self) -> RingStatistics:
        """Return the counters (:class:`RingStatistics`). Slots that consumers have released by now count as free."""
        state = self._deliveries
        with state.lock:
            state.settle()
            in_flight = sum(len(consumer.in_flight) for consumer in (*state.consumers, *state.leaving))
            waiting = in_flight + len(state.unsent), len(state.free), len(state.consumers)
            return RingStatistics(state.handed_off, state.redelivered, *waiting)

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        for name, value in self.statistics()._asdict().items():
            yield name.replace("_", " "), value

    def _state(self) -> str:
        return f"{len(self._deliveries.consumers)} consumers"
