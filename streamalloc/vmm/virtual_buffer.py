"""Buffers of virtual memory at a constant address, whose physical memory can be released (evicted) and restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamalloc.core.errors import EvictedError, size_text
from streamalloc.core.internal import Device, Stream, StreamLike
from streamalloc.core.properties import MemAccess, MemLocation, MemLocationType
from streamalloc.core.session import Session
from streamalloc.formats.html import Drawn, Html, Row, gauge
from streamalloc.vmm.access import Access, After, Rights, copying_stream, rights_of, wait_for_users
from streamalloc.vmm.address_range import Mapping, drawn, rights_text
from streamalloc.vmm.claims import claimed
from streamalloc.vmm.evictable import BackupPlace, Evictable
from streamalloc.vmm.steps import EvictSteps, RestoreSteps, Tags, run_steps
from streamalloc.vmm.stores.blocks import Backup


class VirtualBuffer(Evictable, Drawn):
    """A buffer with a constant address whose physical memory can be released and created again.

    A buffer owns an :class:`AddressRange`, and has memory mapped from the range's start on, without a hole.
    :meth:`evict` releases the physical memory, with or without a copy of the bytes in other memory or on disk.
    :meth:`restore` maps new memory at the same addresses, and copies the stored bytes into it. :class:`SleepGroup` does
    the same for many buffers at once: ``sleep()`` evicts, and ``wake()`` restores, either all its buffers or none. A
    buffer of a group can also be restored alone. :class:`GrowableBuffer` and :func:`stripe` make such buffers. ::

        buffer.evict(host_pool)    # frees device memory; buffer.address stays reserved
        buffer.restore()           # same address, same bytes

    Unmapping is not stream-ordered, see :class:`AddressRange`. So :meth:`evict` and :meth:`close` have an argument
    ``after``. After an error the buffer is unchanged, and the operation can be repeated. If the driver also refuses the
    undo of an eviction, the buffer counts as evicted, and :meth:`restore` maps its old memory again. If the driver
    refuses to release memory, the memory is released later.

    Thread-safe: calls that map or unmap the buffer's memory wait for each other, and for a :class:`SleepGroup` that
    puts the buffer to sleep or wakes it. A hook or a signal handler that makes such a call during another one cannot
    wait. It gets :class:`InUseError` if a call on any thread is changing the buffer. Copies and fills take no lock. If
    one thread queues a copy while another thread unmaps the memory, the driver may crash: hold a lock of your own
    around both calls.
    """

    @property
    def capacity(self) -> int:
        """Size of the reserved address range in bytes."""
        return self.range.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of mapped physical memory; 0 while the buffer is evicted. At least :attr:`nbytes` rounded up to the
        granularity. More after a shrink that left memory mapped: only whole chunks are unmapped, and none with
        ``release=False`` (:meth:`GrowableBuffer.resize`).
        """
        return 0 if self.eviction else self._mapped

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """Mappings of the buffer's chunks, in the order of addresses; an empty tuple while the buffer is evicted. Only
        the buffer unmaps them.
        """
        return tuple(Mapping(self.range, entry) for entry in self.range._node.touching(0, self._mapped))

    @property
    def location(self) -> MemLocation:
        """Location of the memory; if it is on several devices, the location of the first."""
        return self._location

    @property
    def owner(self) -> object:
        """The address range of the buffer."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the device of :attr:`stream` has access to the memory, at least to read."""
        return bool(self._rights.get(self.stream.device.location, MemAccess.NONE))

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU has access to the memory, which it can have only to host memory."""
        return bool(self._rights.get(MemLocation.host(), MemAccess.NONE))

    @claimed
    def set_access(self, who: Access, access: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set permissions on the buffer's memory, and on memory that it gets later (``cuMemSetAccess``).

        ``who``, ``access`` and ``after`` as for :meth:`AddressRange.set_access`. If the buffer is evicted, the
        permissions take effect when it is restored.

        Raises
        ------
        ClosedError, CaptureError
            The buffer, or an event or stream of ``after``, was closed; or a stream is being captured.
        InUseError
            The buffer is frozen, or a signal handler or a hook called this method during another call.
        TypeError, ValueError
            ``who`` is no location of the driver, or is the host for a buffer in device memory. Or ``after`` has
            something else than events and streams of the driver.
        CudaError
            The driver refused the call. No permission has changed.
        """
        self._check_open()
        self.check_thawed()
        rights = device_rights(who, self._session, access, location=self._location)
        self.release_from(self._mapped)
        self.range._node.set_rights(self.range._node.table(), rights, after)
        self._rights = {where: allowed for where, allowed in {**self._rights, **rights}.items() if allowed}

    @claimed
    def evict(
        self,
        backup: BackupPlace = None,
        *,
        stream: StreamLike | None = None,
        after: After = None,
        shared: bool = False,
    ) -> None:
        """Release the physical memory, but keep the addresses reserved. Blocks the host until the bytes are copied.

        Parameters
        ----------
        backup
            Where the bytes are stored: a pool in host memory to which the device has access; a :class:`HostTier` or
            :class:`DiskTier`; or memory or a writable host array of the same size, which the caller keeps. None
            discards the bytes. The argument has no effect for a frozen buffer, which has its backup already.
        stream
            The stream of the copy; default: the buffer's.
        after
            Events or streams that the host first waits for; ``()`` for none. Default: all work of the devices with
            access.
        shared
            Whether to evict also exported memory. All other processes must have closed this memory, and all descriptors
            of its handles must be closed; this is not checked. Memory that is still open elsewhere is not freed, and
            keeps its bytes.

        Raises
        ------
        ClosedError
            The buffer, ``backup``, ``stream``, or an event or stream of ``after`` was closed.
        EvictedError
            The buffer is evicted already.
        InUseError
            Some of the memory was exported (and ``shared`` is False), is mapped elsewhere, is bound to a multicast
            object, or is held by another :class:`PhysicalMemory`, so that its release here would free nothing. Or a
            signal handler or a hook called this method during another call.
        OutOfMemoryError
            There is not enough host memory for the backup. The buffer is unchanged.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        TypeError, ValueError
            ``backup`` is no such place, is of another driver or size, or is memory of the buffer itself. Or the device
            has no access to the pool. Or ``stream`` or ``after`` is no stream or event of the driver.
        OSError, CudaError
            A file cannot be written, or the driver refused a call. The buffer is unchanged, unless the driver also
            refuses the undo: see the class.
        """
        self._check_open()
        if self.eviction:
            raise EvictedError(f"{self!r} is evicted already")
        ordered = copying_stream(stream, self)

        def reserve(tags: Tags) -> Iterator[tuple[Evictable, Backup | None]]:
            for buffer in tags:
                yield buffer, buffer.reserve_backup(backup, ordered)

        steps = EvictSteps(ordered, reserve, after, shared=shared)
        steps.wait({self: ""})
        run_steps(
            self._session,
            (steps.reserve, steps.undo_reserve),
            steps.copy,
            (steps.unmap_all, steps.map_all_again),
            last=steps.release_all,
        )

    @claimed
    def restore(self, *, stream: StreamLike | None = None) -> None:
        """Map new physical memory at the same addresses, with the same permissions, and copy the backup into it.

        The copy is stream-ordered: use the bytes on ``stream`` (default: the buffer's), or after its work. Without a
        backup the bytes are undefined. A buffer that a :class:`SleepGroup` put to sleep can be restored, too.

        Raises
        ------
        ClosedError
            The buffer or ``stream`` was closed.
        EvictedError
            The buffer is not evicted.
        InUseError
            A signal handler or a hook called this method during another call.
        TypeError, ValueError, CaptureError
            ``stream`` is no stream of the driver, or is being captured.
        OutOfMemoryError, CudaError
            There is not enough memory, or the driver refused a call. The buffer is still evicted, and its backup
            complete.
        OSError, DamagedBackupError
            A file of the backup cannot be read, or is damaged. The buffer is still evicted.
        """
        self._check_open()
        if self.eviction is None:
            raise EvictedError(f"{self!r} is not evicted")
        steps = RestoreSteps((self,), copying_stream(stream, self))
        run_steps(
            self._session,
            (steps.map_all, steps.undo_map_all),
            steps.protect,
            (steps.set_awake, steps.set_asleep),
            last=steps.drop_backups,
        )

    @claimed
    def close(self, after: After = None) -> None:
        """Wait for ``after``, then unmap and release the memory and free the addresses (``cuMemUnmap``,
        ``cuMemRelease``, ``cuMemAddressFree``). Idempotent.

        ``after`` is one or several events or streams; ``()`` for none. Default: all work of the devices with access.
        Raises InUseError if a signal handler or a hook called this method during another call, CudaError if the driver
        refuses to unmap, and the errors that :class:`AddressRange` names for ``after``.
        """
        if self.range.closed:
            return
        entries = list(self.range._node.table())
        if entries:
            wait_for_users(after, self._session, (entry.rights for entry in entries))
            self.shrink_to(0, 0)
        self._mapped = self._nbytes = 0
        self._frozen = False
        self.replace_backup(None)
        self.eviction = None
        self.range._free()

    def check_usable(self) -> None:
        if self.range.closed:
            self._check_open()
        if self.eviction is not None:
            raise EvictedError(f"{self!r} is evicted: {self._wake_remedy()} before it is used")

    def _read_only(self, on_host: bool) -> bool:
        return self.rights.get(MemLocation.host() if on_host else self.stream.device.location) == MemAccess.READ

    def _access_hint(self, stream: Stream) -> str:
        where = stream.device.location
        if self._frozen:
            return f"{self!r} is frozen and can only be read: {self._thaw_remedy()} before it is written"
        return f"{where} has no access: set_access(device) gives it" if not self._rights.get(where) else ""

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield from super()._about()
        state = Html("evicted") if self.eviction else gauge(self._mapped, self.capacity)
        yield "mapped", state
        yield "access", rights_text(self.rights)
        yield "chunks", len(self.range._node.table())
        yield "", drawn(self.range)

    def _text(self) -> str:
        if self.range.closed:
            return ", closed"
        state = "evicted" if self.eviction else f"{size_text(self._mapped)} mapped"
        state = f"frozen, {state}" if self._frozen else state
        room = f"{state} of {size_text(self.capacity)} [{self.range.draw(16)}]"
        return f" of {size_text(self._nbytes)} at {self._at:#x}, {room}"


def device_rights(
    access: Access,
    session: Session,
    permission: MemAccess = MemAccess.READWRITE,
    *,
    devices: Sequence[Device] = (),
    location: MemLocation | None = None,
) -> Rights:
    """Return the argument ``access`` as permissions on memory of ``location``. Each of ``devices`` also gets read and
    write access. Locations that are given without a permission get ``permission``. Raises TypeError and ValueError as
    :func:`~streamalloc.vmm.access.rights_of` does, and ValueError if the host would get access to device memory.
    """
    rights = {device.location: MemAccess.READWRITE for device in devices} | rights_of(access, session, permission)
    for where, allowed in rights.items():
        if where.type is not MemLocationType.DEVICE and allowed and not (location and location.on_host):
            raise ValueError(f"access: {where} cannot be given access to device memory")
    return rights
