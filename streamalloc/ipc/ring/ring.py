"""``Ring``: a stream of data from one process to others, through memory that is shared once.

The producer has one buffer of several *slots*. It fills a free one in stream order and hands it to a consumer with a
packet of 24 bytes; the consumer's stream waits for the contents, and says when the slot may be filled again.
"""

from __future__ import annotations

from streamalloc.core.internal import StreamLike
from streamalloc.driver import Driver
from streamalloc.ipc.ring.consumer import RingConsumer, RingItem
from streamalloc.ipc.ring.producer import RingProducer, RingSlot, RingStatistics
from streamalloc.ipc.transport.channel import Channel
from streamalloc.pool import MemoryPool

__all__ = ["Ring", "RingConsumer", "RingItem", "RingProducer", "RingSlot", "RingStatistics"]


class Ring:
    """A stream of data between processes, through slots of memory that are shared once.

    :meth:`producer` makes the one end; each consumer makes another with :meth:`consumer`, over a
    :class:`~streamalloc.ipc.Channel`. The consumers share the work: each item goes to one of them, that with the fewest
    items in flight.
    """

    def __init__(self) -> None:
        raise TypeError("a ring has two kinds of ends: make them with Ring.producer and Ring.consumer")

    @staticmethod
    def producer(pool: MemoryPool, slot_bytes: int, slots: int = 8, *, stream: StreamLike) -> RingProducer:
        """Make the end that fills slots.

        Parameters
        ----------
        pool
            Where the slots are allocated; a pool that was made for sharing.
        slot_bytes
            The most bytes of an item; a slot takes multiples of 512 bytes.
        slots
            How many there are: 1 to 256.
        stream
            The stream that fills them.

        Raises
        ------
        ValueError
            A size is out of range, or the pool's memory cannot be shared, and why.
        OutOfMemoryError
            There is no memory for the slots.
        CaptureError
            The stream is being captured.
        """
        return RingProducer(pool, slot_bytes, slots, stream)

    @staticmethod
    def consumer(
        channel: Channel,
        *,
        stream: StreamLike | None = None,
        timeout: float | None = None,
        driver: Driver | None = None,
    ) -> RingConsumer:
        """Make the end that takes items; blocks until the producer adds the other end of ``channel``.

        Parameters
        ----------
        channel
            A connection to the producer, which is the ring's from now on: closed with it, and on failure.
        stream
            The stream that waits for the contents, and after whose work a slot is free again; default: the default
            stream of the memory's device. One of your own is faster.
        timeout
            Seconds until ``TimeoutError``, here and later in :meth:`RingConsumer.next`; None for ever.
        driver
            The driver to use; default: that of ``stream``, or else :func:`streamalloc.driver.default`.

        Raises
        ------
        PeerGoneError
            The producer has ended, or closed its end.
        ProtocolError, ValueError
            What came is not of a ring's producer, or cannot be opened here, and why.
        """
        return RingConsumer(channel, stream, timeout, driver)
