"""The end of a ring that fills slots. How the ends understand each other: see :mod:`streamalloc.ipc.ring.protocol`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from streamalloc.core.internal import (
    CopySide,
    Fd,
    MemLocationType,
    Memory,
    Row,
    Stream,
    StreamLike,
    as_stream,
    checked_size,
    copy_bytes,
    refuse_capture,
    session_of,
    size_text,
    undoing,
)
from streamalloc.ipc.exporter.leases import leases_of
from streamalloc.ipc.exporter.share import Shared, share
from streamalloc.ipc.ring.delivery import ConsumerLink, Deliveries, RingSlot, Slot, SlotHolder
from streamalloc.ipc.ring.protocol import MOST_SLOTS, Introduction, RingEnd, importers_in
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.deadlines import end_of, left
from streamalloc.ipc.transport.packets import Message, ProtocolError
from streamalloc.ipc.wire.control_block import IMPORTERS
from streamalloc.pool import MemoryPool

__all__ = ["RingProducer", "RingSlot", "RingStatistics"]

_ALIGNMENT = 512
# Waiting for a slot: how long to spin, the longest sleep after that, and how often to look whether consumers live.
_SPIN_SECONDS = 50e-6
_LONGEST_PAUSE = 1e-3
_LIVENESS_SECONDS = 0.05


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


class RingProducer(RingEnd):
    """The end of a ring that fills slots; made by :meth:`Ring.producer`. Threads may share it.

    Closing it ends the stream for the consumers, who get all that was handed off before. Its memory is freed in stream
    order, once they have closed their ends. The host does not wait: where the process ends next, synchronise the stream
    first.
    """

    __slots__ = ("_blocks", "_deliveries", "_handles", "_hello", "_ordinal", "stream")

    stream: Stream
    """The stream that fills the slots."""

    def __init__(self, pool: MemoryPool, slot_bytes: int, slots: int, stream: StreamLike) -> None:
        if not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, not {type(pool).__name__} ({pool!r})")
        if not checked_size("slot_bytes", slot_bytes):
            raise ValueError("slot_bytes=0: a slot has one byte at least")
        if not 1 <= checked_size("slots", slots) <= MOST_SLOTS:
            raise ValueError(f"slots={slots}: a ring has 1 to {MOST_SLOTS} slots")
        super().__init__(session_of(pool))
        self.slot_bytes = slot_bytes
        self.slots = slots
        stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.stream = as_stream(stream, self._session)
        refuse_capture(self.stream, "cuMemAllocFromPoolAsync", "a ring is not made in a capture")
        self._ordinal = pool.location.id if pool.location.type is MemLocationType.DEVICE else None
        buffer = pool.allocate(slots * stride, self.stream)
        self._deliveries = state = Deliveries(self._session, buffer, self.stream, slot_bytes, stride)
        # Whatever fails from here on, that ends what was made.
        with undoing(state.attempt):
            shared = share(buffer)
            state.slots += [Slot(index, leases_of(self._session).take()) for index in range(slots)]
            self._blocks = list(dict.fromkeys(slot.block for slot in state.slots))
            self._hello, self._handles = self._introduction(shared)
            state.free.extend(state.slots)
            self._open(state)
        self._session.shut_with_me(self._deliveries)

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
        with undoing(channel.close):
            channel.send(self._hello, self._handles, timeout=timeout)
            answer = channel.receive(timeout=None if end is None else left(end))
            consumer = self._admitted(channel, answer)
            with self._deliveries.lock:
                self._check_open()
                self._deliveries.consumers[consumer] = None
                self._deliveries.deliver_unsent()

    def _introduction(self, shared: Shared) -> tuple[bytes, tuple[Fd, ...]]:
        """What a consumer is told first, and the handles for it: those of the control blocks, then the buffer's."""
        numbers = [(self._blocks.index(slot.block), slot.number) for slot in self._deliveries.slots]
        names = [block.id for block in self._blocks]
        said = Introduction(names, numbers, self.slot_bytes, self._deliveries.stride, bytes(shared))
        return said.to_bytes(), (*(block.fd for block in self._blocks), *shared.fds)

    def _admitted(self, channel: Channel, answer: Message) -> ConsumerLink:
        blocks = dict(zip(self._blocks, importers_in(answer.data, len(self._blocks)), strict=True))
        for block, importer in blocks.items():
            if importer >= IMPORTERS or not block.importer_alive(importer):
                raise ProtocolError(f"a ring's consumer says that it is importer {importer}, which is nobody")
            block.watch_importer(importer)
        slots = self._deliveries.slots
        return ConsumerLink(
            channel, blocks, [slot.block.importer_words(slot.number, blocks[slot.block]) for slot in slots]
        )

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
        deliveries = self._deliveries
        while True:
            with deliveries.lock:
                slot = deliveries.ready_slot()
            if slot is None:
                self._wait_for_slot(timeout)
                continue
            given = RingSlot(deliveries, slot)
            holder = SlotHolder(given, deliveries.dropped.append)
            holder.slot = slot
            # Nothing is called from here on: the caller has the slot, or it is free. Another thread may have been
            # faster.
            free = deliveries.free
            if free and free[0] is slot and not self._closed:
                del free[0]
                slot.holder = holder
                given._held = True
                return given

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
        source = CopySide.readable(data, self._session)
        if source.nbytes > self.slot_bytes:
            raise ValueError(
                f"data has {size_text(source.nbytes)}, and the slots of this ring {size_text(self.slot_bytes)}"
            )
        with self.next(timeout) as slot:
            slot._used = source.nbytes
            copy_bytes(CopySide(slot._base, source.nbytes, self._ordinal, slot), source, self.stream)

    def statistics(self) -> RingStatistics:
        """Figures as they are now."""
        state = self._deliveries
        with state.lock:
            state.settle()
            in_flight = sum(len(consumer.in_flight) for consumer in (*state.consumers, *state.leaving))
            return RingStatistics(
                state.handed_off,
                state.redelivered,
                in_flight + len(state.unsent),
                len(state.free),
                len(state.consumers),
            )

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        for name, value in self.statistics()._asdict().items():
            yield name.replace("_", " "), value

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait_for_slot(self, timeout: float | None) -> None:
        """Block until a slot seems to be free."""
        state = self._deliveries
        end = end_of(timeout)
        now = time.monotonic()
        spun = now + _SPIN_SECONDS
        look = now + _LIVENESS_SECONDS
        pause = _SPIN_SECONDS
        while True:
            with state.lock:
                if state.free or state.settle():
                    return
                now = time.monotonic()
                over = end is not None and now >= end
                # Also when the time is over: who waits for a short time again and again has to hear of it as well.
                if now >= look or over:
                    look = now + _LIVENESS_SECONDS
                    state.drop_gone()
                if state.closed or not state.consumers:
                    state.refuse()
            if over:
                raise TimeoutError(f"no slot of the ring was free within {timeout:g} s: all {self.slots} are in use")
            if now >= spun:
                time.sleep(min(pause, left(end)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _state(self) -> str:
        return f"{len(self._deliveries.consumers)} consumers"
