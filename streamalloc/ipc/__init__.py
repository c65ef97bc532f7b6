"""Memory, pools and events that several processes use. A shared allocation is freed once no other process has it open,
also if processes die.

:mod:`.exporter` shares memory and :mod:`.importer` opens it. :mod:`.wire` has what travels between them: descriptors,
and the words of control blocks. :mod:`.transport` has the connections. :mod:`.ring` and :mod:`.store` are built on
these four.

The steps of sharing a buffer of a pool, in the process that owns the buffer:

1. *Share.* ``exporter.share.share`` finds the function of the buffer's kind, ``_share_buffer``.
2. *Lease.* ``exporter.exports.Exports.lease`` exports the pool (``cuMemPoolExportToShareableHandle``) and the
   allocation (``cuMemPoolExportPointer``), and takes a slot of the control block. From now on the ``Lease`` says when
   the buffer is freed.
3. *Hold and ready.* With ``hold=True``, ``exporter.share._published`` first gives the lease a hold
   (``Lease.add_hold``), which keeps the memory while the descriptor is in transit. Then it calls ``Lease.announce``,
   which has the buffer's stream write the slot's word ``ready`` after the contents (``cuStreamWriteValue32``).
4. *Descriptor.* ``_published`` puts pool, slot, generation and value of ``ready`` into a
   ``wire.descriptor.Descriptor``. ``exporter.share.send`` sends its bytes and the file descriptors. If there is a hold,
   ``send`` first gives the lease a second one, which belongs to the message: a pipe, one end of which is sent along.
   After the send it ends the first (``Shared.cancel``).

In the process that opens the buffer:

5. *Open.* ``importer.open.receive`` receives the bytes and the file descriptors. ``Received`` checks the descriptor,
   and ``Received.attach`` maps the control block. ``_open_pointer`` imports the pool
   (``cuMemPoolImportFromShareableHandle``).
6. *Opened.* ``importer.imports.LeaseUse.begin`` counts up the word ``opened`` and compares the generation: if the
   memory was freed before, it raises ``StaleDescriptorError``.
7. *Import.* ``importer.imports.Import.begin`` imports the allocation (``cuMemPoolImportPointer``).
8. *Wait.* ``importer.imported.Announcement.precede`` has the stream wait for ``ready`` (``cuStreamWaitValue32``),
   unless the value is written already. Then ``Received.close`` ends the hold: it sets the mark of the hold to 0, or
   closes the pipe of the hold.
9. *Close.* ``importer.imported.ImportedBuffer.close`` ends one use of the import, by ``Import.end_use``. The end of the
   last use frees the import in stream order (``cuMemFreeAsync``). For memory of ``cuMemAlloc`` the host waits for the
   stream at each close, before it takes the lock of the imports.
10. *Closed.* ``LeaseUse.end`` has the stream write the word ``closed`` after that free; if the stream is idle, the host
    writes it. Then the host writes ``closing``.

In the owner again:

11. *Free.* ``Buffer.free`` asks ``Lease.begin_free``. If no hold lasts, ``Lease.end_for_good`` counts up the
    generation, so that nobody opens the memory any more, and compares the words: if all importers have written
    ``closing``, the stream waits for ``closed``, and the buffer frees the memory (``cuMemFreeAsync``). Otherwise the
    free becomes an item of the queue of deferred releases, ``_DeferredFree``, which later calls of the package attempt.

The objects of these steps. ``Exports`` and ``Imports`` have those of one driver in one process:

============  ===================================================  ===================================================
Subject       In the process that shares                           In the process that opens
============  ===================================================  ===================================================
a pool        ``PoolExport``: its exported handle. Ends with the   ``PoolImport``: the driver's handle of that pool.
              close of the pool, or with its last lease after it   Ends once it is unused, and closed by its owner
a lease       ``Lease``: a slot of a control block. Ends with the  ``LeaseUse``: one use of the lease. Ends with the
              free, or with the ``Shared``                         ``Import``, or with the ``ImportedRange``
memory        ``Buffer``, or another object of the user            ``Import``: one import of an allocation. Each
                                                                   ``ImportedBuffer`` uses it, and it ends with the
                                                                   last of these
contents      ``Lease.announce`` counts up ``ready``               ``Announcement``: the value of ``ready`` that a
                                                                   descriptor names
a descriptor  ``Shared``. In transit it has a ``Hold``, which      ``Received``: what one ``open`` was given. It ends
              ends at the open, or if nobody can open it any more  the hold
============  ===================================================  ===================================================

*The owner dies.* The driver keeps the memory for the importers that have it. Before a stream waits for ``ready``,
``wire.control_block.ControlBlock.expect`` starts a thread that waits for the lock of the owner's process. The kernel
releases this lock with the process. ``ControlBlock._died`` then counts up ``lost`` and writes ``ready``, so that no
stream waits for ever. ``ImportedBuffer.lost`` is True from then on. ``Imports.release_ended`` releases pool and control
block later.

*The importer dies.* If a free finds that an importer has not closed the memory, ``ControlBlock.watch_importer`` starts
such a thread in the owner. At the death ``ControlBlock._count_as_closed`` sets ``closing`` and ``closed`` to
``opened``, and the next call that attempts deferred releases frees the memory. If the importer dies before it has
opened the descriptor, the hold ends with the message (``exporter.exports.Hold``).
"""

from streamalloc.core.internal import Event, Fd
from streamalloc.core.resource import RawHandles
from streamalloc.ipc.exporter.share import Shared, raw_handles, send, serve, share
from streamalloc.ipc.importer.imported import (
    ImportedArray,
    ImportedBuffer,
    ImportedPool,
    ImportedRange,
    open_memory_handle,
)
from streamalloc.ipc.importer.imports import DriverVersionWarning
from streamalloc.ipc.importer.open import open, receive
from streamalloc.ipc.ring.consumer import RingConsumer, RingItem
from streamalloc.ipc.ring.producer import RingProducer, RingSlot, RingStatistics
from streamalloc.ipc.ring.ring import Ring
from streamalloc.ipc.store.errors import (
    LayoutChangedError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreGoneError,
    StoreKeyError,
)
from streamalloc.ipc.store.manifest import Tensor
from streamalloc.ipc.store.server import StoreServer
from streamalloc.ipc.store.store import Store, StoreEntry, StoreStatistics
from streamalloc.ipc.store.weights import StoredView, Weights
from streamalloc.ipc.store.writing import WeightsWriter
from streamalloc.ipc.transport.channel import Channel, Listener, Message, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.communicator import (
    Communicator,
    CommunicatorLike,
    GroupError,
    ProcessCommunicator,
    SelfCommunicator,
    as_communicator,
)

__all__ = [
    "Channel",
    "Communicator",
    "CommunicatorLike",
    "DriverVersionWarning",
    "Event",
    "Fd",
    "GroupError",
    "ImportedArray",
    "ImportedBuffer",
    "ImportedPool",
    "ImportedRange",
    "LayoutChangedError",
    "Listener",
    "Message",
    "PeerGoneError",
    "ProcessCommunicator",
    "ProtocolError",
    "RawHandles",
    "Ring",
    "RingConsumer",
    "RingItem",
    "RingProducer",
    "RingSlot",
    "RingStatistics",
    "SelfCommunicator",
    "Shared",
    "Store",
    "StoreBusyError",
    "StoreEntry",
    "StoreError",
    "StoreFullError",
    "StoreGoneError",
    "StoreKeyError",
    "StoreServer",
    "StoreStatistics",
    "StoredView",
    "Tensor",
    "Weights",
    "WeightsWriter",
    "as_communicator",
    "open",
    "open_memory_handle",
    "raw_handles",
    "receive",
    "send",
    "serve",
    "share",
]


def __dir__() -> list[str]:
    return [*__all__]
