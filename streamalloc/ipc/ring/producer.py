"""The end of a ring that fills slots. :mod:`streamalloc.ipc.ring.protocol` has the protocol."""

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
from streamalloc.ipc.ring.delivery import ConsumerLink, Deliveries, RingSlot, Slot
from streamalloc.ipc.ring.protocol import MOST_SLOTS, Introduction, RingEnd, importers_in
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.deadlines import end_of, left
from streamalloc.ipc.transport.packets import Message, ProtocolError
from streamalloc.ipc.wire.control_block import IMPORTERS
from streamalloc.pool import MemoryPool

_ALIGNMENT = 512
# Waiting for a slot, in seconds: polling without a sleep, the longest sleep after that, and between two checks whether
# the consumers are alive.
_SPIN_SECONDS = 50e-6
_LONGEST_PAUSE = 1e-3
_LIVENESS_SECONDS = 0.05


class RingStatistics(NamedTuple):
    """Counters of a producer."""

    handed_off: int
    """Items handed to consumers so far."""
    redelivered: int
    """Items of these sent to a second consumer, as the first had gone without opening them."""
    in_flight: int
    """Filled slots that a consumer has not released."""
    free: int
    """Slots that can be filled; a slot that is being filled is neither."""
    consumers: int
    """Consumers that receive items."""


class RingProducer(RingEnd):
    """The end of a ring that fills slots; made by :meth:`Ring.producer`. Threads may share it.

    After :meth:`close` the consumers receive all items that were handed off before, and then the end. The memory is
    freed in stream order, when all consumers have closed their ends. The host does not wait: synchronise the stream
    before the process ends.
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
            A connection to the consumer. The ring owns it from now on, and closes it on failure and when the consumer
            goes.
        timeout
            Seconds until ``TimeoutError``; None: no limit.

        Raises
        ------
        PeerGoneError
            The consumer has ended, or could not make its end.
        ProtocolError
            The answer is not from a ring's consumer.
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
        """The first message to a consumer, and its handles: those of the control blocks, then the buffer's."""
        numbers = [(self._blocks.index(slot.block), slot.number) for slot in self._deliveries.slots]
        names = [block.id for block in self._blocks]
        first = Introduction(names, numbers, self.slot_bytes, self._deliveries.stride, bytes(shared))
        return first.to_bytes(), (*(block.fd for block in self._blocks), *shared.fds)

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

        If the stream of the consumer that released the slot has not reached the release, :attr:`stream` waits for it
        (``cuStreamWaitValue32``).

        Parameters
        ----------
        timeout
            Seconds to wait for a slot; None: no limit.

        Raises
        ------
        TimeoutError
            All slots are in flight or being filled.
        PeerGoneError
            The ring has no consumer, or all have gone. Add one and call again.
        ClosedError
            The ring was closed.
        CaptureError
            The stream is being captured.
        """
        while True:
            with self._deliveries.lock:
                slot = self._deliveries.take()
            if slot is not None:
                return slot
            self._wait_for_slot(timeout)

    def put(self, data: Memory | Any, timeout: float | None = None) -> None:
        """Copy ``data`` into the next free slot and hand the slot off, in stream order (``cuMemcpyAsync``).

        Parameters
        ----------
        data
            A source as for :meth:`Memory.copy_from`, of at most :attr:`slot_bytes` bytes.
        timeout
            Seconds to wait for a slot; None: no limit.

        Raises
        ------
        ValueError
            ``data`` is larger than a slot.
        TimeoutError, PeerGoneError, ClosedError, CaptureError
            As for :meth:`next`.
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
        """The counters now."""
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
        """Block until a slot is free, though another thread may take it first."""
        state = self._deliveries
        end = end_of(timeout)
        now = time.monotonic()
        spun = now + _SPIN_SECONDS
        check = now + _LIVENESS_SECONDS
        pause = _SPIN_SECONDS
        while True:
            with state.lock:
                if state.free or state.settle():
                    return
                now = time.monotonic()
                over = end is not None and now >= end
                # Also at the deadline: a caller may use timeouts shorter than the interval.
                if now >= check or over:
                    check = now + _LIVENESS_SECONDS
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
