"""``Ring``: one process hands items of data to other processes, in memory that is shared once.

The producer allocates one buffer and divides it into *slots*. It fills a free slot in stream order, and sends a
consumer a packet of 24 bytes that names the slot. The consumer's stream waits for the contents, and releases the slot
in stream order.
"""

from __future__ import annotations

from streamalloc.core.internal import StreamLike
from streamalloc.driver import Driver
from streamalloc.ipc.ring.consumer import RingConsumer
from streamalloc.ipc.ring.producer import RingProducer
from streamalloc.ipc.transport.channel import Channel
from streamalloc.pool import MemoryPool


class Ring:
    """Slots of memory in which one process hands items of data to other processes. The memory is shared once.

    One process makes the :meth:`producer`. Every other process makes a :meth:`consumer` over a
    :class:`~streamalloc.ipc.Channel`, whose other end is passed to :meth:`RingProducer.add`. Each item goes to one
    consumer, the consumer with the fewest items in flight. If a consumer closes its end or dies, the items that it
    has not taken go to other consumers. If it dies, items that it has taken and not released are lost.

    Examples
    --------
    The producer:

    >>> ring = Ring.producer(pool, slot_bytes=1 << 20, stream=stream)
    >>> ring.add(channel)
    >>> ring.put(batch)
    >>> ring.close()  # The loops of the consumers end after the items.

    A consumer, in another process:

    >>> for item in Ring.consumer(channel, stream=stream):
    ...     item.copy_to(batch, stream)
    """

    def __init__(self) -> None:
        raise TypeError("a ring has two kinds of ends: make them with Ring.producer and Ring.consumer")

    @staticmethod
    def producer(pool: MemoryPool, slot_bytes: int | str, slots: int = 8, *, stream: StreamLike) -> RingProducer:
        """Make the producing end.

        Parameters
        ----------
        pool
            The pool to allocate the slots from, made with ``handle_types=POSIX_FILE_DESCRIPTOR``.
        slot_bytes
            Largest size of an item in bytes. Each slot takes this size rounded up to a multiple of 512.
        slots
            Number of slots: 1 to 256.
        stream
            The stream that fills the slots.

        Raises
        ------
        TypeError, ValueError
            ``slot_bytes`` is 0 or no size, ``slots`` is not 1 to 256, ``stream`` is not of the pool's driver, or
            ``pool`` is no pool or its memory cannot be shared.
        OutOfMemoryError
            The pool has not enough memory for the slots.
        CaptureError
            The stream is being captured.
        ClosedError
            The pool or the stream was closed.
        CudaError
            The driver refused a call.
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
        """Make the consuming end. Blocks until the producer adds the other end of ``channel``
        (:meth:`RingProducer.add`). Before that, ``channel.fileno()`` is not readable.

        Parameters
        ----------
        channel
            A connection to the producer. The consumer owns the channel from now on, and also closes it if the open
            fails, unless ``timeout`` or ``driver`` is refused.
        stream
            The stream that waits for the contents and releases the slots; default: the default stream of the memory's
            device. A stream made by the program is faster.
        timeout
            Seconds until ``TimeoutError``, here and in :meth:`RingConsumer.next`; None: no limit.
        driver
            The driver to use; default: that of ``stream``, or else :func:`streamalloc.driver.default`.

        Raises
        ------
        TimeoutError
            The producer has not added the other end in time.
        PeerGoneError
            The producer has ended, or closed its end.
        ProtocolError
            The message is not from a ring's producer.
        ValueError, CudaError
            The memory cannot be opened here; the error has the reason. ValueError also for a negative ``timeout``.
        TypeError
            ``channel`` is not a :class:`Channel`, ``stream`` is not a stream, or ``timeout`` is no number.
        CaptureError
            ``stream`` is being captured.
        ClosedError
            The stream or the channel was closed.
        """
        return RingConsumer(channel, stream, timeout, driver)
