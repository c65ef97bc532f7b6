"""Imports of this process: control blocks, pools and growable ranges by the ids in descriptors, allocations by the
driver's export data.

The driver returns the same address for a second import of an allocation, and does not count imports. So this process
counts the uses of an import (:attr:`Import.uses`), and ends the import with the last use. Before a new pool or control
block is imported, :meth:`Imports.release_ended` submits those that have ended and that nothing uses to the queue of
deferred releases.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, TypeVar

from streamalloc.core.errors import StaleDescriptorError, error_from, is_gone, size_text, warn
from streamalloc.core.internal import (
    Deferred,
    DeferredQueue,
    Device,
    Event,
    Fd,
    Fence,
    Stream,
    StreamLike,
    as_stream,
    deferred_queue,
    without_items,
    work,
)
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver.internal import RLock, cuda, opaque_struct
from streamalloc.ipc.wire.control_block import WORD, ControlBlock, ImporterWords, Mark, fence, reached
from streamalloc.ipc.wire.descriptor import FABRIC, ChunkHandle, Descriptor, Flags
from streamalloc.pool.internal import OnceIdle
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import check_exported, import_memory

T = TypeVar("T")

_LAZY_PEER_ACCESS = 1
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"
IN_A_CAPTURE = "memory of other processes cannot be closed in a capture"
_BAD_POINTER = "the owner's process has freed it, has ended, or is this one; or it is of another pool"


class DriverVersionWarning(UserWarning):
    """Exporter and importer run different drivers, which NVIDIA does not support.

    :func:`open` issues this warning and opens the memory all the same.
    """


class LeaseUse(Deferred):
    """One use of a lease (:class:`~streamalloc.ipc.exporter.exports.Lease`) by an import or a range of this process.
    The word ``opened`` counts the use, and the exporter's free waits for its end.

    As an item of the queue of deferred releases, this object ends the use of a dropped range (:meth:`take_back`) once
    the work is done that is queued at its first attempt.
    """

    def __init__(self, imports: Imports, block: ControlBlock, slot: int, generation: int) -> None:
        """Prepare a use that :meth:`begin` counts. Raises ValueError if ``block`` has no such slot."""
        self.imports: Imports = imports
        self.words: ImporterWords = block.importer_words(slot, block.importer)
        self.generation: int = generation
        """Generation of the slot in the descriptor. The slot has another one once the memory was freed."""
        self.number: int | None = None
        """Value to which this use has counted up ``opened``; None while ``opened`` does not count this use."""
        self._block = block
        self._work: Fence | None = None

    def begin(self) -> None:
        """Count the use, then check whether the descriptor is stale. The docstring of the module of the control blocks
        gives the reason for this order. Raises StaleDescriptorError if the memory was freed before; then nothing is
        counted.
        """
        words = self.words
        with self.imports.lock:
            before = words.opened.value
            try:
                words.opened.value = number = (before + 1) % WORD
                fence()
                if words.exporter_words.generation.value != self.generation:
                    raise StaleDescriptorError("this memory was freed by its owner before it was opened here")
                self.number = number
            except BaseException:
                words.opened.value, self.number = before, None
                raise

    def take_back(self) -> None:
        """End a use after which no work of a stream remains: subtract it from the word ``opened``. Idempotent.

        The word ``closed`` is not written, because streams may still write it for earlier uses.
        """
        with self.imports.lock:
            if self.number is not None:
                self.number = None
                self.words.opened.value = (self.words.opened.value - 1) % WORD

    def end(self, stream: Stream, handle: Any) -> None:
        """End the use after the work of ``stream``, whose ``CUstream`` is ``handle``: the stream writes ``closed``
        (``cuStreamWriteValue32``), then the host writes ``closing``. Idempotent. Raises CudaError; the call can then be
        repeated. The caller holds :attr:`Imports.lock`.
        """
        words, number = self.words, self.number
        if number is None:
            return
        closed, closing = words.closed.value, words.closing.value
        # After a refused call, a later use of the slot may end first. Its values are higher, and words may only rise.
        if words.opened.value == number or not reached(closing, number):
            if closed != closing and not reached(closed, closing):
                # Another stream will still write the end of an earlier use, so this stream waits for that write.
                self._block.wait(stream, words.closed, closing)
            self._block.write_by(handle, stream, words.closed, number)
            words.closing.value = number
        self.number = None

    def attempt(self) -> bool:
        self._work = self._work or Fence(self.imports.session)
        if not self._work.done():
            return False
        self.take_back()
        return True


class PoolImport(Deferred):
    """The driver's handle of a pool of another process.

    The handle is destroyed only after the frees of all imported allocations have run. Driver 580.159 does not wait for
    these frees, and a later use of the handle kills the process.
    """

    def __init__(self, imports: Imports) -> None:
        self.imports: Imports = imports
        self._raw: Any = None
        self._frees: Fence | None = None
        """Fence for all work, frees included, that was queued at the first attempt to destroy the handle; None before
        that attempt.
        """
        self.marks: dict[tuple[ControlBlock, int], Mark] = {}
        """The exporter's marks of this pool, by control block and number. While one of them stands, the pool exists."""
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Objects (:class:`ImportedPool`) that use the handle."""

    def watch(self, block: ControlBlock | None, mark: int) -> None:
        """Record the exporter's mark with the number ``mark`` in ``block``. A change of the mark shows the end of the
        pool. Raises ValueError if the control block has no such mark.
        """
        if block is not None and (block, mark) not in self.marks:
            self.marks[block, mark] = block.mark("pool", mark)

    def ended(self) -> bool:
        """Whether all marks show that the owner has closed the pool or has died. False for a pool without marks.

        A pool of another library has one mark for each time it was shared.
        """
        marks = list(self.marks.items())
        gone = [key for key, mark in marks if not (mark.stands() and key[0].exporter_alive())]
        for key in gone if len(gone) < len(marks) else ():
            self.marks.pop(key, None)
        return len(gone) == len(marks) > 0

    def attempt(self) -> bool:
        imports = self.imports
        self._frees = self._frees or Fence(imports.session)
        if not self._frees.done():
            return False
        with imports.lock:
            # If the pool was imported again meanwhile, the driver returned the same handle, which must not be
            # destroyed.
            if self._raw is not None and int(self._raw) not in imports.handles:
                imports.session.release(self, "cuMemPoolDestroy")
        return True


class Import:
    """One import of an allocation of another process, with one or more uses in this process: one by each
    :class:`ImportedBuffer`, from its open to its close.
    """

    def __init__(
        self, imports: Imports, pool: PoolImport | None, device: Device, block: ControlBlock | None, new: Descriptor
    ) -> None:
        """Prepare an import that :meth:`begin` makes. ``new``: the descriptor of the memory; ``block``: its control
        block. Raises ValueError if the block has no such slot.
        """
        if imports.thread is None:
            imports.start_thread()
        self.imports: Imports = imports
        self.from_pool: PoolImport | None = pool
        """The allocation's pool; None for an allocation of ``cuMemAlloc``."""
        self.device: Device = device
        """Device of the memory."""
        self.leases: list[LeaseUse] = []
        """Uses of the allocation's leases. Each held descriptor of another library's array has a lease of its own."""
        if block is not None and new.flags & Flags.LEASED:
            self.leases.append(LeaseUse(imports, block, new.slot, new.generation))
        self.block: ControlBlock | None = block
        """Control block of the exporter; None if the descriptor names none."""
        self.data: bytes = new.payload
        """The driver's export data: 64 bytes of ``cuMemPoolExportPointer`` or ``cuIpcGetMemHandle``."""
        self.key: tuple[bytes, int] = new.payload, -1 if pool is not None else device.ordinal
        """Key of the import in :attr:`Imports.allocations`: export data and device ordinal, because the driver gives an
        allocation of ``cuMemAlloc`` another address for each device that uses it. -1 for an allocation of a pool.
        """
        self.nbytes: int = new.base_size
        """Size of the whole allocation in bytes; 0 before the import if the descriptor names no size."""
        self._raw: Any = None
        """``CUdeviceptr`` of the memory in this process; None before the import and after its release."""
        self.address: int = 0
        """Address of the memory in this process; 0 before the import."""
        self.uses: set[object] = set()
        """One object for each use that has begun and has not ended."""
        self.passed: tuple[Event, ...] = ()
        """Events recorded after the work of uses that have ended. The stream of the last use's end waits for these
        events.
        """

    def _check_size(self, nbytes: int) -> None:
        """Raise ValueError if ``nbytes``, the size in a descriptor, differs from the driver's size
        (``cuPointerGetAttribute``). ``nbytes=0``: set :attr:`nbytes` to the driver's size. Raises CudaError.
        """
        result, found = self.imports.session.cuPointerGetAttribute(_RANGE_SIZE, self.address)
        if result:
            raise error_from(result, "cuPointerGetAttribute")
        if not nbytes:  # A raw handle of the driver has no size, so the driver's size is used.
            self.nbytes = int(found)
        elif found != nbytes:
            raise ValueError(f"the descriptor says {size_text(nbytes)}, and the driver has {size_text(int(found))}")

    def begin(self, use: object) -> None:
        """Begin the first use: count the use of the lease, and import the allocation (``cuMemPoolImportPointer``,
        ``cuIpcOpenMemHandle``). The caller holds :attr:`Imports.lock`. After an error, call :meth:`end_use`.

        Raises
        ------
        StaleDescriptorError
            The memory was freed before.
        ValueError
            The descriptor names another size than the driver.
        CudaError
            The driver refused the import.
        """
        self.uses.add(use)
        self.imports.allocations[self.key] = self
        for lease in self.leases:
            lease.begin()
        session = self.imports.session
        try:
            if self.from_pool is None:
                with self.device.current():
                    handle = opaque_struct("CUipcMemHandle", self.data)
                    self._raw = session.call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER)
            else:
                data = opaque_struct("CUmemPoolPtrExportData", self.data)
                result, raw = session.cuMemPoolImportPointer(self.from_pool._raw, data)
                if result:
                    raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)
                self._raw = raw
        except BaseException:
            for lease in self.leases:
                lease.take_back()
            raise
        self.address = int(self._raw)
        self._check_size(self.nbytes)

    def join(self, use: object, other: Import) -> None:
        """Begin a further use, for a further descriptor of the same memory. ``other`` was made for that descriptor, and
        its :meth:`begin` is not called. The caller holds :attr:`Imports.lock`. Raises the errors of :meth:`begin`.
        After an error, call :meth:`end_use`.
        """
        self.uses.add(use)
        self.block = self.block or other.block
        for lease in other.leases:
            if not any(lease.words is one.words and lease.generation == one.generation for one in self.leases):
                lease.begin()
                self.leases.append(lease)
        self._check_size(other.nbytes)

    def end_use(self, use: object, stream: Stream, *, used: bool = True) -> None:
        """End a use after the work of ``stream``. The end of the last use ends the import. Idempotent. For memory of
        ``cuMemAlloc`` the host waits for the stream.

        ``used``: whether ``stream`` may have used the memory. If False, as after a failed open, the end of a later use
        does not wait for ``stream``.

        Raises
        ------
        CudaError
            The driver refused a call. The use stays, and the call can be repeated.
        ClosedError, CaptureError
            The stream was closed or is being captured.
        ForkedProcessError
            This process is a forked child.
        """
        if self.imports.session.forked:
            self.imports.session.check_process()
        if self.from_pool is None and use in self.uses:
            # The host waits before it takes the lock. Otherwise imports on other threads would wait, too.
            stream.synchronize()
        stream.run_uncaptured("cuMemFreeAsync", IN_A_CAPTURE, self._count_down, use, stream, used)

    def _count_down(self, _: Any, use: object, stream: Stream, used: bool) -> None:
        """End a use after the work of ``stream``. The last use frees the memory after that work (``cuMemFreeAsync``),
        or at once (``cuIpcCloseMemHandle``), and ends the uses of the leases. Raises CudaError; the memory then stays,
        unless it no longer exists. Raises ClosedError for a stream that was closed meanwhile.
        """

        def count_down() -> None:
            # The stream may have been closed while this thread waited for the lock, so the handle is read here.
            handle = stream.direct or stream.checked_raw()
            if len(self.uses) == 1:
                for event in self.passed:
                    stream.wait(event)
                self._free(handle)
                for lease in self.leases:
                    lease.end(stream, handle)
            elif used:
                # Two older events are queried for each new one, so that only those of queued work stay.
                self.passed = (*self.passed[2:], stream.record(), *_of_queued_work(self.passed[:2]))
            self.uses.discard(use)

        with self.imports.lock:
            if use in self.uses:
                without_items(stream, count_down)

    def _free(self, handle: Any) -> None:
        if self._raw is not None and self.from_pool is None:
            with self.device.current():
                self.imports.session.release(self, "cuIpcCloseMemHandle")
        elif self._raw is not None:
            raw, self._raw = self._raw, None
            result = self.imports.session.cuMemFreeAsync(raw, handle)[0]
            if result:
                error = error_from(result, "cuMemFreeAsync")
                self._raw = None if is_gone(error) else raw
                raise error
        if self.imports.allocations.get(self.key) is self:
            del self.imports.allocations[self.key]


def _of_queued_work(events: tuple[Event, ...]) -> list[Event]:
    """Return those of ``events`` before which work is left (``cuEventQuery``)."""
    if not events:
        return []
    with session_of(events[0]).relaxed():
        return [event for event in events if not event.query()]


class Imports:
    """The imports of this process through one driver, and the thread that releases the imports of dropped objects."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.lock: AbstractContextManager[bool] = RLock()
        """Lock that is held while uses of imports are counted. Code under this lock waits neither for a stream nor for
        a process.
        """
        self.deferred: DeferredQueue = deferred_queue(session)
        self.version: int = int(session.call("cuDriverGetVersion"))
        self.blocks: dict[bytes, ControlBlock] = {}
        self.pools: dict[bytes, PoolImport] = {}
        """Imported pools by their ids in descriptors (16 bytes)."""
        self.handles: dict[int, PoolImport] = {}
        """Imported pools by ``CUmemoryPool`` as a number. The driver returns the same handle for repeated imports."""
        self.allocations: dict[tuple[bytes, int], Import] = {}
        """Imported allocations by :attr:`Import.key`."""
        self.ranges: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        """Growable ranges (:class:`ImportedRange`) by their ids in descriptors (16 bytes)."""
        self._devices: dict[bytes, Device] = {}
        self._dropped: SimpleQueue[bool] = SimpleQueue()
        """Each value put into this queue wakes the thread. It is a ``SimpleQueue``, because a finaliser may put a value
        at any time.
        """
        self.thread: threading.Thread | None = None

    def start_thread(self) -> None:
        """Start the thread that attempts queued items after an object was dropped. Idempotent. Called before each
        import, because a finaliser could not start a thread.
        """
        if self.thread is None:
            args = (self._dropped, weakref.ref(self.session))
            thread = threading.Thread(target=_release_dropped, args=args, name="streamalloc drops", daemon=True)
            thread.start()
            self.thread = thread
            weakref.finalize(self, self._dropped.put, False).atexit = False

    def drop(self, item: Deferred) -> None:
        """Submit ``item``, the release of a dropped object, to the queue of deferred releases, and wake the thread.
        Takes no lock, so finalisers may call it.
        """
        self.deferred.submit(item)
        self._dropped.put(True)

    def device_for(self, described: Descriptor, stream: StreamLike | None) -> Device:
        """Return the device of the memory, or the device of ``stream`` for memory of another machine. Raises ValueError
        for other memory that is on a device that this process does not see.
        """
        device = self._devices.get(described.device) or self.device_of(described.device)
        if device is not None:
            return device
        if described.handle_type == FABRIC and stream is not None:
            return as_stream(stream, self.session).device
        why = "this process does not see: is it hidden by CUDA_VISIBLE_DEVICES?"
        if described.handle_type == FABRIC:
            why = "is not of this machine, or hidden from this process: pass stream=, whose device is to have access"
        raise ValueError(f"the memory is on device {described.device.hex()}, which {why}")

    def device_of(self, uuid: bytes) -> Device | None:
        """Return the device with a UUID of 16 bytes; None if it is not visible to this process."""
        if uuid not in self._devices:
            self._devices.update((device.uuid.bytes, device) for device in Device.all(self.session.driver))
        return self._devices.get(uuid)

    def warn_of_version(self, version: int) -> None:
        """Warn (:class:`DriverVersionWarning`) that ``version``, the exporter's driver version, differs from that of
        this process's driver.
        """
        warn(
            f"the exporter runs a driver for CUDA {version // 1000}.{version % 1000 // 10}, this process one for "
            f"{self.version // 1000}.{self.version % 1000 // 10}: NVIDIA supports equal ones only",
            DriverVersionWarning,
        )

    def control_block(self, name: bytes, take: Callable[[bytes], Fd]) -> ControlBlock:
        """Return the control block with the id ``name`` (16 bytes). The first call maps the file that ``take(name)``
        returns. Raises the errors of ``take`` and of :meth:`ControlBlock.attach`.
        """
        return self._once(self.blocks, name, take, lambda fd: ControlBlock.attach(self.session, fd, name))

    def pool(self, name: bytes, take: Callable[[bytes], Fd]) -> PoolImport:
        """Return the pool with the id ``name`` (16 bytes). The first call imports the file descriptor that
        ``take(name)`` returns. The pool stays in :attr:`pools`, because later descriptors may come without its handle.
        Raises the errors of ``take`` and of :meth:`import_pool`.
        """
        return self._once(self.pools, name, take, lambda fd: self.import_pool(fd.fileno()))

    def _once(self, table: dict[bytes, T], name: bytes, take: Callable[[bytes], Fd], make: Callable[[Fd], T]) -> T:
        found = table.get(name)
        if found is None:
            self.release_ended()
            with take(name) as fd, self.lock:
                found = table.get(name)
                if found is None:
                    found = table[name] = make(fd)
        return found

    def import_pool(self, fd: int) -> PoolImport:
        """Import the pool of the file descriptor ``fd`` (``cuMemPoolImportFromShareableHandle``). ``fd`` stays open.
        The caller holds :attr:`lock`: without it, another thread's destruction of the same pool could make the driver's
        handle invalid. Raises ValueError if ``fd`` is certainly no handle of a driver, and CudaError if the driver
        refuses.
        """
        new, name = PoolImport(self), "cuMemPoolImportFromShareableHandle"
        new._raw = self.session.call(name, check_exported(fd), _POSIX_MEMBER, 0, hint=_BAD_HANDLE)
        return self.handles.setdefault(int(new._raw), new)

    def release_ended(self) -> None:
        """Submit what nothing in this process uses to the queue of deferred releases: pools that their owners have
        closed, pools and control blocks of exporters that have ended, and pools of :meth:`ImportedPool.from_handle`,
        which no descriptor names.
        """
        with self.lock:
            # This is a separate function because of its loop, see :mod:`streamalloc.driver.locks`.
            self._submit_ended()

    def _submit_ended(self) -> None:
        used: set[object] = {one.block for one in self.allocations.values()}
        used |= {one.from_pool for one in self.allocations.values()}
        for number, pool in list(self.handles.items()):
            ended = pool.ended() or pool not in self.pools.values()
            if pool not in used and not pool.users and ended:
                # A later descriptor has to import the pool anew, because this handle will be destroyed.
                for name in [name for name, known in self.pools.items() if known is pool]:
                    del self.pools[name]
                self.deferred.submit(pool)
                del self.handles[number]
        for name, block in list(self.blocks.items()):
            if block not in used and not block.exporter_alive() and block.idle():
                del self.blocks[name]
                self.deferred.submit(OnceIdle(self.session, block.close))

    def memory(self, chunk: ChunkHandle, take: Callable[[bytes], Fd]) -> PhysicalMemory:
        """Import a chunk of physical memory (``cuMemImportFromShareableHandle``), by its fabric handle or the file
        descriptor that ``take`` returns for its id. Each call returns another driver handle, which the caller owns.
        Raises the errors of ``take``, ValueError for a handle of something else, and CudaError if the driver refuses.
        """
        if chunk.fabric:
            return import_memory(self.session, chunk.fabric, chunk.nbytes)
        with take(chunk.id) as fd:
            return import_memory(self.session, fd, chunk.nbytes)


def _release_dropped(dropped: SimpleQueue[bool], reference: weakref.ref[Session]) -> None:
    """Attempt the items of the queue of deferred releases after each True in the queue ``dropped``, and return at
    False. The thread of :class:`Imports` runs this function.

    Without the thread, this process might make no further call that attempts items. The owner of a dropped import would
    then wait for its release for ever.
    """
    while dropped.get():
        session = reference()
        if session is None or not session.usable:
            return
        work(session)
        del session


imports_of: PerDriver[Imports] = PerDriver(Imports)
"""The :class:`Imports` object of each driver in this process."""
