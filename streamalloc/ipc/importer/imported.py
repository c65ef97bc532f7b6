"""Objects of this process for memory of another process: pools, buffers, arrays and ranges.

A stream waits for the contents of opened memory; if no stream can, the host waits.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from streamalloc.core.errors import CaptureError, ClosedError, CudaError, attach, size_text
from streamalloc.core.internal import (
    Deferred,
    Device,
    Fd,
    Memory,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    check_device,
    ordered_after,
    session_for,
    work,
)
from streamalloc.core.properties import (
    IpcMemHandle,
    MemAccess,
    MemAccessDesc,
    MemAllocationType,
    MemLocation,
    MemPoolPtrExportData,
)
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.formats.html import Row
from streamalloc.ipc.importer.imports import IN_A_CAPTURE, Import, LeaseUse, PoolImport, imports_of
from streamalloc.ipc.wire.control_block import ControlBlock, ExporterWords, reached
from streamalloc.ipc.wire.descriptor import NOWHERE, Descriptor, Foreign, Mechanism
from streamalloc.pool.internal import OnceIdle, location_of_pool
from streamalloc.vmm.internal import After, RemappableBuffer, Rights

# Seconds between two reads of an announced value.
_PAUSE = 0.0002


class Announcement(NamedTuple):
    """Announcement by the exporter: the contents are complete when the word ``ready`` of a slot reaches the value
    :attr:`ready`.
    """

    block: ControlBlock
    words: ExporterWords
    """The words of the announcement's slot that the exporter writes (``ready``, ``announced``, ``generation``)."""
    generation: int
    ready: int

    @property
    def written(self) -> bool:
        """Whether the word ``ready`` has reached the value: the contents are complete, or lost (:attr:`lost`)."""
        value = self.words.ready.value
        return value == self.ready or reached(value, self.ready)

    @property
    def lost(self) -> bool:
        """Whether an importer wrote the value, because the exporter had died before its stream wrote it."""
        return self.words.was_lost(self.ready)

    def precede(self, stream: Stream, memory: Memory | None = None) -> None:
        """Make later work of ``stream`` wait for the announcement, unless the value is written already
        (``cuStreamWaitValue32``). The checker of the driver is told that the contents of ``memory`` are waited for.
        Raises ValueError if the exporter has announced no such value, CaptureError if the stream is being captured,
        ClosedError if it was closed, and CudaError if the driver refuses.
        """
        if memory is not None:
            self._tell_checker(memory, stream)
        if self.written:
            return
        if not reached(self.words.announced.value, self.ready):
            raise ValueError("the descriptor waits for contents that its exporter has not announced")
        self.block.expect(self.words, self.ready)
        self.block.wait(stream, self.words.ready, self.ready)

    def wait(self, stream: Stream | None, memory: Memory | None = None) -> None:
        """Make ``stream`` wait for the announcement (:meth:`precede`). If ``stream`` is None or is being captured, the
        host waits instead, at most until the exporter dies. Raises the errors of :meth:`precede` except CaptureError;
        none if ``stream`` is None.
        """
        if stream is not None:
            with contextlib.suppress(CaptureError):
                self.precede(stream, memory)
                return
        if not self.written:
            # Without this, the wait would not end if the exporter dies. Then a thread of this process writes the value.
            self.block.expect(self.words, self.ready)
            while not self.written:
                time.sleep(_PAUSE)
        if stream is None and memory is not None:
            self._tell_checker(memory, None)

    def seen(self, memory: Memory) -> bool:
        """Whether the contents of ``memory`` are complete now, so that nobody has to wait. If so, the checker of the
        driver is told that the host has waited for them.
        """
        written = self.written
        if written:
            self._tell_checker(memory, None)
        return written

    def _tell_checker(self, memory: Memory, stream: Stream | None) -> None:
        """Tell the checker, if the driver has one, that ``stream`` waits for the contents of ``memory``.
        ``stream=None``: the host waits.
        """
        listener = self.block.session.listener
        if listener is None:
            return
        name = self.block.announcement(self.words.slot, self.generation, self.ready)
        with contextlib.nullcontext() if stream is None else stream.device.current():
            raw = None if stream is None else stream.checked_raw()
            listener.opened(memory._at, memory.nbytes, raw, name, int(self.words.ready.pointer))


class ImportedPool(Foreign, Closes):
    """A pool of another process. Its allocations can be opened here, but this process cannot allocate from it.

    :func:`open` and :meth:`from_handle` return objects of this class. The driver's handle is destroyed
    (``cuMemPoolDestroy``) when nothing in this process uses the pool, and the owner has closed the pool or has ended.
    The handle of :meth:`from_handle` does not wait for the owner.
    """

    def __init__(self, pool: PoolImport, device: Device) -> None:
        self._pool = pool
        self.device: Device = device
        """Device of the pool's memory."""
        pool.users.add(self)

    @classmethod
    def from_handle(cls, handle: Fd | int, *, driver: Driver | None = None) -> ImportedPool:
        """Import a pool that any program exported (``cuMemPoolImportFromShareableHandle``).

        Parameters
        ----------
        handle
            A file descriptor of ``cuMemPoolExportToShareableHandle``. An :class:`Fd` is closed by this call, even if it
            fails; a descriptor given as a number stays open.
        driver
            The driver to use; default: :func:`streamalloc.driver.default`.

        Raises
        ------
        TypeError
            ``handle`` is neither an :class:`Fd` nor a number.
        ValueError
            ``handle`` is no open descriptor, or that of a file, directory, socket or pipe; or the pool is not of memory
            of a device that this process sees.
        ClosedError
            The :class:`Fd` was closed.
        CudaError
            The driver refuses the descriptor: physical memory, a pool of another machine.

        Examples
        --------
        >>> pool = sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
        >>> given = pool.allocate(4096, stream).handles()  # in the other process
        >>> with ipc.ImportedPool.from_handle(given.fds[0]) as imported:
        ...     print(imported.open(given.data, stream=stream).nbytes)
        4096
        """
        if isinstance(handle, bool) or not isinstance(handle, (int, Fd)):
            raise TypeError(f"handle must be an Fd or its number, not {type(handle).__name__}: pools have no other")
        session = session_for(None, driver)
        imports = imports_of(session)
        imports.release_ended()
        # The lock is held until the new object is a user of the pool: before that, another thread that imports a pool
        # would find this pool unused, and destroy its handle.
        with handle if isinstance(handle, Fd) else contextlib.nullcontext(), imports.lock:
            found = imports.import_pool(handle.fileno() if isinstance(handle, Fd) else handle)
            place = location_of_pool(session, found._raw, False, MemAllocationType.PINNED)
            if place is None:
                raise ValueError(f"handle={handle!r} is of a pool of host memory, or of a device not visible here")
            return cls(found, Device(place.id, driver=session.driver))

    def open(self, export_data: bytes | Any, *, stream: StreamLike | None = None) -> ImportedBuffer:
        """Open an allocation by the driver's data alone (``cuMemPoolImportPointer``).

        The owner neither announces the contents nor waits for this use: order the stream after the owner's work, for
        example by :meth:`Event.from_handle`, and close the buffer before its owner frees the memory.

        Parameters
        ----------
        export_data
            A ``CUmemPoolPtrExportData``, its 64 bytes, or a :class:`MemPoolPtrExportData`. The driver reports the size.
        stream
            The stream of operations that name no other, and of the close. Default: the device's default stream.

        Raises
        ------
        ClosedError
            The pool was closed here, or ``stream`` was closed.
        CaptureError
            ``stream`` is being captured.
        TypeError, ValueError
            These are no export data, or ``stream`` is not a stream of this driver.
        InvalidValueError
            The data are of another pool, or damaged. Those of memory that its owner has freed are not refused.
        """
        data = bytes(MemPoolPtrExportData(export_data))
        described = Descriptor(Mechanism.POOL_POINTER, NOWHERE, payload=data)
        with self._pool.imports.lock:  # A close by another thread between these calls would destroy the pool.
            self._check_open()
            new = Import(self._pool.imports, self._pool, self.device, None, described)
            return _raw_import(new, described, stream)

    @property
    def closed(self) -> bool:
        """Whether this object was closed. It stays False if the owner closes the pool."""
        return self not in self._pool.users

    def close(self) -> None:
        """End the use of the pool; opened buffers stay usable. Idempotent. The driver's handle is destroyed later
        (``cuMemPoolDestroy``), see the class.
        """
        self._pool.users.discard(self)
        self._pool.imports.release_ended()
        work(self._session)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number. Raises ClosedError if the pool was closed here."""
        self._check_open()
        return int(self._pool._raw)

    @property
    def _session(self) -> Session:
        return self._pool.imports.session

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Give another device of this process access to the pool's memory (``cuMemPoolSetAccess``).

        Access that the owner has given to devices does not apply here. At first only the device that has the memory has
        access, if this process sees it.

        Raises
        ------
        TypeError, ValueError
            ``device`` is no device of this driver, or ``access`` is no :class:`MemAccess`.
        InvalidDeviceError, NotSupportedError
            The device cannot reach the memory, or the driver does not grant this access.
        ClosedError
            The pool was closed here.
        """
        self._check_open()
        check_device("device", device, self._session)
        descriptor = MemAccessDesc(device.location, access).to_driver()
        why = f"access={access.name}: pools grant READWRITE or NONE to peers, and the owner's access stays"
        self._session.call("cuMemPoolSetAccess", self._pool._raw, [descriptor], 1, hint=why)

    def __repr__(self) -> str:
        return f"<ImportedPool {'closed' if self.closed else hex(self.handle)} on device {self.device.ordinal}>"


class ForeignMemory(Memory, Foreign):
    """Memory of another process, whose exporter announces when the contents are complete."""

    __slots__ = ()

    _announced: Announcement | None
    """Announcement of the last open; None if the descriptor has no control block."""
    _contents: tuple[Announcement, ...]
    """One announcement for each open without a stream, for which the default stream of the device waits at the open.
    Every other stream waits for all of these announcements before it uses the memory. The host waits before it returns
    an address, because the package is not told of uses by address, and before a use in a capture, because graphs cannot
    wait for other processes.
    """

    @property
    def address(self) -> int:
        """The device address in this process.

        If the memory was opened without a stream, the host waits until the contents are there.

        Raises
        ------
        ClosedError
            The memory was closed.
        """
        at = self._at
        for contents in self._contents:
            contents.wait(None, self)
        return at

    def _await_on(self, stream: Stream) -> None:
        for contents in self._contents:
            contents.wait(stream, self)

    @property
    def lost(self) -> bool:
        """Whether the contents will never be complete, because the owner died before that. False while the contents are
        still awaited. Raises ClosedError if the memory was closed.
        """
        self.check_usable()
        return self._announced is not None and self._announced.lost

    @property
    def owner_alive(self) -> bool | None:
        """Whether the exporting process is alive; None if unknown, because the descriptor has no control block. Raises
        ClosedError if the memory was closed.
        """
        self.check_usable()
        return None if self._announced is None else self._announced.block.exporter_alive()


class ImportedBuffer(ForeignMemory, Closes):
    """An allocation of another process, or a part of an allocation, made by :func:`open`.

    Its close is stream-ordered, and allows the owner to free the memory. A dropped object is closed on its own
    stream.
    """

    __slots__ = ("__weakref__", "_announced", "_contents", "_import", "_nbytes", "_offset", "_stream", "_use")

    def __init__(self, new: Import, described: Descriptor, stream: Stream, announced: Announcement | None) -> None:
        """Open the allocation of ``described`` by the import ``new``, or use the import that this process already has
        of the allocation. ``stream`` waits for the contents that ``announced`` announces. Raises StaleDescriptorError,
        ValueError, CudaError; then nothing stays open.
        """
        self._use = object()
        """Use of the import (:attr:`Import.uses`)."""
        self._import, self._stream = new, stream
        self._offset = described.offset
        self._nbytes = described.size
        self._announced: Announcement | None = announced
        self._contents: tuple[Announcement, ...] = ()
        try:
            with new.imports.lock:
                known = new.imports.allocations.get(new.key)
                if known is None or known._raw is None:
                    new.begin(self._use)
                else:
                    self._import = known
                    known.join(self._use, new)
            self._nbytes = described.size or self._import.nbytes
            if announced is not None:
                announced.precede(stream, self)
        except BaseException as first:
            # Undo the open after any error, also one that a signal handler raised. Otherwise the owner's free would
            # wait forever.
            try:
                self._import.end_use(self._use, stream, used=False)
            except (CudaError, ClosedError) as later:
                attach(first, later)
            raise

    @property
    def _at(self) -> int:
        return self._checked_import().address + self._offset

    @property
    def nbytes(self) -> int:
        """Size in bytes of the shared part, or of the allocation that was opened by a raw handle. It stays after the
        close.
        """
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """The stream of the open, which waits for the owner's work. After an open without a stream, the device's
        default stream.

        Memory opened without a stream can be used on any stream: each waits for the owner's work before its first use.
        """
        return self._stream

    @property
    def location(self) -> MemLocation:
        """Device of the memory, as a location. Raises ClosedError if the buffer was closed."""
        return self._checked_import().device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """Whether :attr:`stream` belongs to the device that owns the memory. Raises ClosedError if the buffer was
        closed.
        """
        return self.stream.device == self._checked_import().device

    @property
    def closed(self) -> bool:
        """Whether this object was closed. Other objects of the same allocation do not count."""
        return self._use not in self._import.uses

    def close(self, stream: StreamLike | None = None) -> None:
        """Release the memory after the work of ``stream``, by default its own (``cuMemFreeAsync``,
        ``cuStreamWriteValue32``). Idempotent.

        The owner's free is ordered after that work. If this process has opened the allocation several times, the last
        close releases it. For memory of ``cuMemAlloc``, the host waits for the stream (``cuIpcCloseMemHandle``). The
        default for a per-thread stream is that of :meth:`Buffer.free`.

        Raises
        ------
        CaptureError
            The stream is being captured.
        TypeError, ValueError
            ``stream`` is not a stream of this driver.
        ClosedError
            ``stream`` was closed.
        CudaError
            The driver refused the release.
        """
        if self._use not in self._import.uses:
            return
        ordered = as_stream(self._stream if stream is None else stream, self._session, after=True)
        if self._contents or self._import.from_pool is None:
            ordered.refuse_capture("cuStreamWriteValue32", IN_A_CAPTURE)
        if self._contents:
            self._await_on(ordered)
        self._import.end_use(self._use, ordered)
        self._import.imports.deferred.work()

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        alive = {True: "alive", False: "gone", None: "not known"}[self.owner_alive]
        yield "owner", f"another process, {alive}{', and the contents never came' if self.lost else ''}"

    def _checked_import(self) -> Import:
        if self._use not in self._import.uses:
            raise ClosedError(f"this imported buffer of {size_text(self._nbytes)} was closed")
        return self._import

    def check_usable(self) -> None:
        self._checked_import()

    @property
    def _session(self) -> Session:
        return self._import.imports.session

    def __del__(self) -> None:
        imported = getattr(self, "_import", None)
        if imported is not None and self._use in imported.uses and imported.imports.session.usable:
            listener = imported.imports.session.listener
            if listener is not None and len(imported.uses) == 1:
                listener.deferred(int(imported.address))
            imported.imports.drop(_CloseDropped(imported, self._use, self._stream))

    def _text(self) -> str:
        where = "closed" if self.closed else f"at {self._at:#x}, {self.location}"
        return f" of {self._nbytes} bytes {where}"


class _CloseDropped(Deferred):
    """Item of the queue of deferred releases: the close of a dropped :class:`ImportedBuffer`, after the work of the
    buffer's stream.
    """

    __slots__ = ("_import", "_stream", "_use")

    def __init__(self, imported: Import, use: object, stream: Stream) -> None:
        self._import, self._use, self._stream = imported, use, stream

    def attempt(self) -> bool:
        imports = self._import.imports
        if self._import.from_pool is None:
            # The end waits for the stream, so it is made once the stream is idle.
            imports.deferred.submit(OnceIdle(imports.session, self._close))
        else:
            self._close()
        return True

    def _close(self) -> None:
        ordered_after(self._stream, functools.partial(self._import.end_use, self._use))


def _raw_import(new: Import, described: Descriptor, stream: StreamLike | None) -> ImportedBuffer:
    """Open memory by the driver's handle alone, without lease and announcement. ``stream=None``: the device's default
    stream. Raises CaptureError, ValueError, CudaError.
    """
    ordered = new.device.default_stream if stream is None else as_stream(stream, new.imports.session)
    ordered.refuse_capture("cuMemPoolImportPointer", "memory of other processes cannot be opened in a capture")
    return ImportedBuffer(new, described, ordered, None)


def open_memory_handle(
    handle: bytes | Any, *, stream: StreamLike | None = None, driver: Driver | None = None
) -> ImportedBuffer:
    """Open memory of ``cuMemAlloc`` of another process by the driver's handle alone (``cuIpcOpenMemHandle``).

    The owner neither announces the contents nor waits for this use: order your work as for :meth:`ImportedPool.open`.
    The close waits on the host for the stream (``cuIpcCloseMemHandle``). On the simulated driver, opened memory
    outlives the owner's process; this was not tried on a GPU.

    Parameters
    ----------
    handle
        A ``CUipcMemHandle``, its 64 bytes, or an :class:`IpcMemHandle`. The driver reports the size.
    stream
        Stream of operations that name no other. The memory is opened for its device. Default: the default stream of
        device 0.
    driver
        The driver to use if ``stream`` is no :class:`Stream`; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    TypeError, ValueError
        ``handle`` is not such a handle, or ``stream`` is not a stream.
    CaptureError, ClosedError
        ``stream`` is being captured, or was closed.
    InvalidValueError, InvalidHandleError, InvalidContextError
        The memory was freed, its process has ended, or this process owns it.
    """
    session = session_of(stream) if isinstance(stream, Stream) else session_for(None, driver)
    device = Device(0, driver=session.driver) if stream is None else as_stream(stream, session).device
    described = Descriptor(Mechanism.LEGACY, NOWHERE, payload=bytes(IpcMemHandle(handle)))
    return _raw_import(Import(imports_of(session), None, device, None, described), described, stream)


class ImportedArray(TypedView[Any], Closes):
    """An array of another process, with its type and shape, made by :func:`open`.

    :attr:`owner` is the imported memory. Closing the array closes this memory, and closing the memory closes the array.
    """

    _parent: ImportedBuffer | ImportedRange

    @property
    def closed(self) -> bool:
        """Whether :attr:`owner` was closed, and so the array. Uses then raise :class:`ClosedError`."""
        return self._parent.closed

    def close(self, stream: StreamLike | None = None) -> None:
        """Close :attr:`owner`, which releases the memory after the work of ``stream``. Idempotent. Raises the errors of
        the owner's ``close``.

        Without ``stream``, an :class:`ImportedBuffer` is closed after the work of its own stream, and an
        :class:`ImportedRange` after all work of the devices with access. The host waits for the work only if the owner
        is an :class:`ImportedRange`, or has memory of ``cuMemAlloc``.
        """
        self._parent.close(stream)


class ImportedRange(ForeignMemory, RemappableBuffer):
    """Physical memory of another process, mapped at one address here: a result of :func:`open`.

    The driver keeps the memory while any process has a handle of it. A range shared by fabric handles with a hold also
    has a lease: the owner keeps the memory until the range is closed here.

    After an open without a stream, each stream waits for the contents before its first use of this object. For uses
    through :attr:`range` only the device's default stream waits, so order other streams after the default stream.
    """

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._announced: Announcement | None = None
        self._contents: tuple[Announcement, ...] = ()
        self._lease: LeaseUse | None = None
        """Use of the lease of the last open that had a lease; None if no open had one."""
        super().__init__(device, capacity, rights, stream, offset)

    @property
    def _at(self) -> int:
        return super(ForeignMemory, self).address

    def close(self, after: After = None) -> None:
        """Unmap and release the memory, and end the use of the lease. First the host waits for ``after``; default: all
        work of the devices with access. Idempotent. Raises the errors of :meth:`VirtualBuffer.close`.
        """
        super().close(after)
        self._replace_lease(None)

    def _replace_lease(self, lease: LeaseUse | None) -> None:
        ended, self._lease = self._lease, lease
        if ended is not None:
            ended.take_back()

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None and self._session.usable:
            lease.imports.drop(lease)

    def evict(self, *_: Any, **__: Any) -> None:
        """Raise ValueError for any arguments, because only the owning process can evict the memory."""
        raise ValueError(f"{self!r} is memory of another process, which evicts it")
