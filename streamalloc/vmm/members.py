"""The buffers of a sleeping group with their tags, and their bytes outside of device memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from streamalloc.core.errors import EvictedError, size_text, undoing
from streamalloc.core.internal import Device, Stream, StreamLike, check_device
from streamalloc.core.properties import MemHandleType, MemLocation, checked_number, checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import copying_stream
from streamalloc.vmm.claims import Claimable, claim_also, claimed, claiming
from streamalloc.vmm.growable import GrowableBuffer
from streamalloc.vmm.residents import Residents
from streamalloc.vmm.stores.blocks import Backup, Bytes
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, blocks_of, shared_tier
from streamalloc.vmm.stores.pinned import HUGE
from streamalloc.vmm.virtual_buffer import VirtualBuffer


class Members(Closes, Claimable):
    """Base class of :class:`SleepGroup` with what a group has: its buffers with their tags, the tier for their bytes,
    and the figures of the other memory of its device.
    """

    def __init__(
        self, device: Device, backup: MemoryPool | HostTier | DiskTier | None, handle_types: MemHandleType
    ) -> None:
        check_device("device", device)
        if backup is not None:
            tier_of(backup)
        self._session = session_of(device)
        self.device: Device = device
        """Device of :meth:`allocate`."""
        self.location: MemLocation = device.location
        """Location of the memory of :meth:`allocate`."""
        self.closed: bool = False
        """Whether :meth:`close` was called. Then :meth:`allocate`, :meth:`sleep` and :meth:`wake` raise ClosedError."""
        self._handle_types = handle_types
        self._members: weakref.WeakKeyDictionary[VirtualBuffer, str] = weakref.WeakKeyDictionary()
        """Tag of each buffer. A buffer that is dropped leaves the group."""
        self._backup: MemoryPool | HostTier | DiskTier | None = backup
        self._near: HostTier | None = None
        """The default backup, a tier of the device's NUMA node; None before its first use."""
        self._measured: dict[str, int] = {}
        """Bytes that :meth:`measure` found, by owner."""

    def allocate(self, nbytes: int | str, stream: StreamLike | None = None, *, tag: str = "") -> VirtualBuffer:
        """Allocate a buffer that belongs to the group. The memory can be used at once on any stream.

        Parameters
        ----------
        nbytes
            Size in bytes, or text such as ``"2MiB"``; 0 gives an empty buffer. The size of the physical memory is
            rounded up to the granularity.
        stream
            Stream of operations that name no stream; default: the device's default stream.
        tag
            Tag by which :meth:`sleep` and :meth:`wake` select buffers; the empty text by default.

        Raises
        ------
        OutOfMemoryError, AddressSpaceError
            There is not enough memory, or the process has no addresses left.
        ClosedError
            The group or ``stream`` was closed.
        TypeError, ValueError
            ``nbytes`` is not a size, ``stream`` is not a stream of the driver, or ``tag`` is no text.
        NotSupportedError, NotPermittedError
            The device or this user cannot share memory by the group's handle types.
        """
        self._check_open()
        size, tag = checked_size("nbytes", nbytes), checked_type("tag", tag, str)
        buffer = GrowableBuffer(self.device, max(size, 1), size, handle_types=self._handle_types, stream=stream)
        self._admit(buffer, tag)
        return buffer

    def add(self, buffer: VirtualBuffer, tag: str = "") -> None:
        """Add a buffer to the group, or change the tag of a buffer that is in the group. The buffer may be evicted; it
        then counts as asleep.

        Raises
        ------
        TypeError, ValueError
            ``buffer`` is no virtual buffer or belongs to another driver, or ``tag`` is no text.
        ClosedError
            The group was closed.
        """
        self._check_open()
        if session_of(checked_type("buffer", buffer, VirtualBuffer)) is not self._session:
            raise ValueError(f"{buffer!r} belongs to another driver than the group")
        self._admit(buffer, checked_type("tag", tag, str))

    def _admit(self, buffer: VirtualBuffer, tag: str) -> None:
        self._members[buffer] = tag
        buffer._group = weakref.ref(self)

    def tagged(self, tag: str) -> Tagged:
        """Return an allocator whose buffers belong to the group and get the tag ``tag``, for
        ``streamalloc.interop.torch.use``.
        """
        return Tagged(self, tag)

    def remove(self, buffer: VirtualBuffer) -> None:
        """Remove a buffer from the group. A buffer that is not in the group is left as it is.

        Raises
        ------
        EvictedError
            The buffer is in the group and asleep: wake it first.
        InUseError
            The buffer is in the group and frozen: thaw it first. Or a signal handler or a hook called this method
            during another call.
        TypeError
            ``buffer`` is no virtual buffer.
        """

        def act() -> None:
            if buffer.evicted and buffer in self._members:
                raise EvictedError(f"{buffer!r} sleeps, and its bytes are the group's: wake() it first")
            if buffer in self._members:
                buffer.check_thawed()
            self._members.pop(buffer, None)

        claiming((checked_type("buffer", buffer, VirtualBuffer),), act)

    @property
    def buffers(self) -> dict[VirtualBuffer, str]:
        """The group's buffers and their tags, in the order in which they were added. Closed buffers are left out. Empty
        after :meth:`close`.
        """
        # keyrefs() copies the keys in one step, because another thread may add buffers meanwhile.
        found = [reference() for reference in self._members.keyrefs()]
        tags = {buffer: self._members.get(buffer) for buffer in found if buffer is not None and not buffer.closed}
        return {buffer: tag for buffer, tag in tags.items() if tag is not None}

    @property
    def asleep(self) -> bool:
        """Whether at least one buffer of the group is asleep: uses of its bytes raise :class:`EvictedError`."""
        return any(buffer.evicted for buffer in self.buffers)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory that the group's buffers have now. Sleeping buffers have none."""
        return sum(buffer.mapped_bytes for buffer in self.buffers)

    def _chosen(self, tags: Sequence[str]) -> dict[VirtualBuffer, str]:
        """Return the buffers with these tags, or all buffers. Raises ClosedError, KeyError, TypeError."""
        self._check_open()
        buffers = self.buffers
        self._check_tags(tags, buffers)
        if not tags:
            return buffers
        return {buffer: tag for wanted in tags for buffer, tag in buffers.items() if tag == wanted}

    @staticmethod
    def _check_tags(tags: Collection[str], buffers: Mapping[VirtualBuffer, str]) -> None:
        """Raise KeyError for a tag that no buffer has, because bytes could be lost by a misspelt tag. Raise TypeError
        if a tag is no text.
        """
        unknown = [tag for tag in tags if checked_type("tag", tag, str) not in buffers.values()]
        if unknown:
            known = f"there are {sorted(set(buffers.values()))}" if buffers else "the group has no buffers"
            remedy = f"allocate(nbytes, tag={unknown[0]!r}) or add(buffer, {unknown[0]!r}) gives a buffer this tag"
            raise KeyError(f"no buffer has the tag {unknown[0]!r}: {known}; {remedy}")

    @property
    def backup(self) -> Any:
        """Host :class:`MemoryPool`, :class:`HostTier` or :class:`DiskTier` for the bytes of sleeping and frozen
        buffers. Default: a tier in host memory of the device's NUMA node, made at its first use. Raises ClosedError if
        the group was closed.
        """
        self._check_open()
        if self._backup is not None:
            return self._backup
        if self._near is None or self._near.closed:
            self._near = shared_tier(self.device)
        return self._near

    def prepare(
        self, nbytes: int | str | None = None, *, background: bool = False, most_cores: int | None = None
    ) -> Future[int]:
        """Pin host memory for the next sleep (``cuMemHostRegister``), because pinning takes longer than the copy. See
        :meth:`HostTier.prepare`.

        With ``background=True`` the call returns at once, and threads pin the memory. A sleep during that time uses the
        memory that is pinned already. ::

            group.prepare(background=True, most_cores=2)
            serve()
            group.sleep()

        Parameters
        ----------
        nbytes
            Number of bytes that the sleep will keep; default: the bytes of all buffers that are awake and not frozen.
        background
            Whether to return at once, while threads pin the memory.
        most_cores
            Largest number of threads; default: one for each core that the process may use, at most 8.

        Returns
        -------
        concurrent.futures.Future
            A future whose result is the number of bytes of pinned memory that is free, once all memory is pinned. With
            ``background`` the future has the errors OutOfMemoryError, CudaError, and ClosedError of the backup. After
            the first two, the sleep tries again.

        Raises
        ------
        TypeError, ValueError
            :attr:`backup` is no :class:`HostTier`, or a number is not allowed.
        OutOfMemoryError, CudaError
            There is not enough host memory, the limit of :attr:`backup` would be exceeded, or the driver refused a
            call.
        ClosedError
            The group or :attr:`backup` was closed.
        """
        tier = self.backup
        if not isinstance(tier, HostTier):
            raise TypeError(f"backup must be a HostTier to prepare memory, not {type(tier).__name__} ({tier!r})")
        if nbytes is None:
            nbytes = sum(blocks_of(one.nbytes) for one in self.buffers if not (one.evicted or one.frozen)) * HUGE
        return tier.prepare(nbytes, background=background, most_cores=most_cores)

    @claimed
    def read(self, buffer: VirtualBuffer, target: Any, offset: int = 0) -> None:
        """Copy stored bytes of a sleeping buffer to a host array; the buffer stays asleep. Blocks the host.

        Parameters
        ----------
        buffer
            A sleeping buffer of the group.
        target
            Writable, contiguous array or object with the buffer protocol. As many bytes are copied as it has.
        offset
            Offset of the first byte in the buffer, in bytes.

        Raises
        ------
        TypeError, ValueError
            ``buffer`` is no virtual buffer, is awake or not in the group, or its bytes were not kept. Or ``target`` is
            no writable array of bytes, or is too large. Or a sleep and its undo failed, so that the buffer still has
            its memory: :meth:`wake` it.
        DamagedBackupError, OSError
            The stored bytes are damaged, or a file cannot be read.
        ClosedError
            The group or the buffer was closed.
        InUseError
            A signal handler or a hook called this method during another call.
        """
        self._claim_member(buffer)
        self._backup_of(buffer).read(*_checked_bytes(buffer, target, offset))

    @claimed
    def write(self, buffer: VirtualBuffer, source: Any, offset: int = 0) -> None:
        """Replace stored bytes of a sleeping buffer by the bytes of a host array; the buffer stays asleep. Blocks the
        host.

        A buffer whose bytes were not kept can only be written as a whole; its bytes are then stored in :attr:`backup`.
        A frozen buffer cannot be written.

        Parameters
        ----------
        buffer
            A sleeping buffer of the group.
        source
            Contiguous array or object with the buffer protocol. All its bytes are copied.
        offset
            Offset of the first byte in the buffer, in bytes.

        Raises
        ------
        TypeError, ValueError
            ``buffer`` is no virtual buffer, is awake or not in the group. Or ``source`` is no array of bytes, is too
            large, or is smaller than a buffer whose bytes were not kept. Or a sleep and its undo failed, so that the
            buffer still has its memory: :meth:`wake` it.
        InUseError
            The buffer is frozen, or a signal handler or a hook called this method during another call.
        OutOfMemoryError, OSError
            There is not enough host memory or disk space to store the bytes.
        DamagedBackupError
            A block of a file is replaced in part, and its other bytes are damaged.
        ClosedError
            The group, the buffer, or :attr:`backup` for bytes that were not kept, was closed.
        """
        self._claim_member(buffer)
        start, array = _checked_bytes(buffer, source, offset)
        buffer.check_thawed()
        eviction = buffer.eviction
        if eviction is None or eviction.held or buffer._backup is not None or array.nbytes < buffer.nbytes:
            self._backup_of(buffer).write(start, array)
            return
        (backup,) = tier_of(self.backup).hold([buffer.nbytes], self._copying_stream(None))
        with undoing(backup.drop):
            backup.write(0, array)
        buffer.replace_backup(backup)

    def _backup_of(self, buffer: VirtualBuffer) -> Backup:
        if buffer.eviction is None:
            raise ValueError(f"{buffer!r} is awake: copy_to and copy_from copy its bytes")
        if buffer.eviction.held:
            raise ValueError(f"{buffer!r} keeps its memory, because a sleep and its undo failed: wake() it first")
        if buffer._backup is None:
            raise ValueError(f"the bytes of {buffer!r} were not kept: replace all of them")
        return buffer._backup

    def _claim_member(self, buffer: VirtualBuffer) -> None:
        """Claim a buffer of the group, in a call that has claimed the group. Raises ClosedError, InUseError, TypeError,
        and ValueError for a buffer that is not in the group.
        """
        self._check_open()
        claim_also((checked_type("buffer", buffer, VirtualBuffer),))
        buffer._check_open()
        if buffer not in self._members:
            raise ValueError(f"{buffer!r} is not in the group {self!r}")

    def _copying_stream(self, stream: StreamLike | None) -> Stream:
        return copying_stream(self.device.default_stream if stream is None else stream, self.device)

    def resident(self) -> Residents:
        """Return the memory of the device by owner, as it is now, including memory that the group cannot release.
        Raises ClosedError, CudaError.
        """
        self._check_open()
        return Residents.of(self.device, self.buffers, self._measured)

    @contextlib.contextmanager
    def measure(self, owner: str) -> Iterator[None]:
        """Return a context manager that attributes device memory which is allocated in its block to ``owner``, for
        :meth:`resident`.

        Use it for libraries that call the driver directly: for example, create an NCCL communicator and run its first
        collective in the block, or load kernels. The number of bytes is the difference of two readings of
        ``cuMemGetInfo``, minus memory of known owners. The number is wrong if another thread or process allocates
        during the block. It stays the same if the library releases memory later. The numbers of blocks with the same
        owner are added. ::

            with group.measure("NCCL"):
                torch.distributed.all_reduce(tensor)

        Parameters
        ----------
        owner
            Name of the owner in the table.

        Raises
        ------
        ClosedError, CudaError
            The group was closed, or the driver refused a reading.
        """
        before = self.resident().others

        def count() -> None:
            self._measured[owner] = self._measured.get(owner, 0) + self.resident().others - before

        with undoing(count):
            yield
        count()


def _checked_bytes(buffer: VirtualBuffer, array: Any, offset: int) -> tuple[int, Bytes]:
    """Return the offset in bytes as an int, and the array as an array of bytes. Raises TypeError, and ValueError if the
    array is not contiguous or does not fit into the buffer at ``offset``.
    """
    start = checked_number("offset", offset)
    found: Bytes = np.asarray(array if hasattr(array, "__array__") else memoryview(array))
    if not found.flags.c_contiguous:
        raise ValueError("the array is not contiguous: copy it to a contiguous one first")
    found = found.reshape(-1).view(np.uint8)
    if start + found.nbytes > buffer.nbytes:
        raise ValueError(f"offset={start} and {size_text(found.nbytes)}: {buffer!r} ends before")
    return start, found


class Tagged:
    """Allocator of buffers of a :class:`SleepGroup` with one tag: the result of :meth:`SleepGroup.tagged`."""

    def __init__(self, group: Members, tag: str) -> None:
        self.group: Members = group
        """Group that the buffers belong to."""
        self.tag: str = tag
        """Tag of the buffers."""
        self.location: MemLocation = group.location
        """Location of the memory."""
        self._session = session_of(group)

    def allocate(self, nbytes: int | str, stream: StreamLike | None = None) -> VirtualBuffer:
        """Allocate a buffer of ``nbytes`` bytes with the tag. ``stream``: stream of operations that name no stream.
        Raises the errors of :meth:`SleepGroup.allocate`.
        """
        return self.group.allocate(nbytes, stream, tag=self.tag)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} of {self.group!r}>"
