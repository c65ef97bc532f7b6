"""Groups of buffers whose physical memory is released and restored together.

A sleep and a wake are each one list of steps, in ``SleepGroup._sleep`` and ``SleepGroup._wake``. A step is a function,
with another function that undoes it if it has changed something. ``run_steps`` does the steps; if one fails, it and the
steps before it are undone, the last step first. Meanwhile no other call changes the group (``claimed``), and all ranks
take part (``Votes``).

The steps of a sleep:

1. *Hooks* of :meth:`SleepGroup.before_sleep`. Undo: their undo hooks.
2. *Claim and wait.* The buffers are claimed, and the host waits for their users. There is nothing to undo.
3. *Reserve* memory or disk space for backups in the tiers. Undo: drop the backups.
4. *Copy.* The copies to the backups are queued. They change no buffer, so there is nothing to undo.
5. *Unmap* each buffer after its copy (``cuMemUnmap``). Undo: map the same memory again.
6. *Vote* of the ranks. This is the last step that a rank can refuse.
7. *Release* the memory (``cuMemRelease``). This is not undone.

The steps of a wake:

1. *Map.* For one buffer after the other, memory is created and mapped, and the copy of its bytes is queued
   (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``). Undo: wait for the copies, then unmap and release the memory.
2. *Protect.* After the copies, buffers that are frozen are made read-only. The undo of step 1 undoes this, too.
3. *Awake.* The buffers can be used. Undo: they cannot.
4. *Hooks* of :meth:`SleepGroup.after_wake`. Undo: their undo hooks.
5. *Vote* of the ranks.
6. *Drop* the backups. This is not undone.

The steps are methods of ``EvictSteps`` and ``RestoreSteps`` in :mod:`streamalloc.vmm.steps`. They change these states
of a buffer:

* ``eviction``: its released memory while it sleeps. If a sleep and its undo have failed, ``eviction.held`` is the old
  memory, which still has the bytes.
* ``_backup``: the :class:`Backup` with its bytes while it sleeps or is frozen; None if the bytes are not kept. Backups
  that were made by one call have their blocks in one ``Stored``.
* ``_frozen``: whether it is read-only, so that its backup stays valid while it is awake, and a sleep copies nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from streamalloc.core.errors import CudaError, EvictedError, attach, size_text, undoing
from streamalloc.core.internal import Device, Stream, StreamLike, check_device, work
from streamalloc.core.properties import MemHandleType, MemLocation, checked_number, checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import members, session_of
from streamalloc.formats.html import Row, Shown, mib, table
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import known_pools
from streamalloc.vmm.access import After, copying_stream, wait_for_users
from streamalloc.vmm.claims import Claimable, claim_also, claimed, claiming
from streamalloc.vmm.growable import GrowableBuffer
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.physical_memory import PhysicalMemory
from streamalloc.vmm.reservation import Reservation
from streamalloc.vmm.steps import (
    RESTORE,
    BackupPlace,
    BackupSteps,
    EvictSteps,
    RestoreSteps,
    Step,
    Tags,
    drop_backups,
    run_steps,
)
from streamalloc.vmm.stores.blocks import Backup, Bytes
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, blocks_of, shared_tier
from streamalloc.vmm.stores.pinned import HUGE
from streamalloc.vmm.virtual_buffer import VirtualBuffer

Hook: TypeAlias = Callable[[list[Any]], object]
"""Function that is called with a list of buffers."""
Hold: TypeAlias = Callable[[Sequence[int], Stream, str], Sequence[Backup]]
"""Method ``hold`` or ``resume`` of a tier."""
_LONGEST_REASON = 2000
"""Largest length in bytes of an error text that is sent to the other ranks; longer texts are cut."""


@dataclass(frozen=True, slots=True, repr=False)
class Residents(Shown):
    """Memory of a device by owner, in bytes, at one moment. ``print`` shows a table.

    ``total`` and ``free`` come from ``cuMemGetInfo``, ``pools`` from ``cuMemPoolGetAttribute``, and ``graphs`` from
    ``cuDeviceGetGraphMemAttribute``. The other sizes are this library's records of memory that it has created.

    The driver reports neither the owners of the rest, :attr:`others`, nor the size of a context. If no other process
    uses the device, ``others`` in a process's first reading is the size of its context. Memory of libraries that call
    the driver directly, such as NCCL, is in ``others``, unless it was measured by :meth:`SleepGroup.measure` or comes
    from a pool or group of this library.
    """

    device: Device
    """The device whose memory is listed."""
    total: int
    """Bytes of the device's memory."""
    free: int
    """Bytes of the device's memory that are free."""
    group: Mapping[str, int]
    """Bytes of the group's awake buffers, by tag."""
    mapped: int
    """Bytes of other physical memory that this process created and mapped."""
    pages: int
    """Bytes of all pages of arenas, including their pages of zeros."""
    pools: Mapping[str, int]
    """Reserved bytes of this process's pools, by name; by handle for a pool without a name."""
    graphs: int
    """Bytes reserved by CUDA graphs that allocate memory."""
    measured: Mapping[str, int]
    """Bytes that :meth:`SleepGroup.measure` measured, by name of the owner."""

    @classmethod
    def of(cls, device: Device, buffers: Mapping[Any, str], measured: Mapping[str, int]) -> Residents:
        """Return the memory of ``device`` now. ``buffers`` are the group's buffers with their tags, ``measured`` the
        bytes of other owners by name. Raises CudaError.
        """
        group: dict[str, int] = {}
        for buffer, tag in buffers.items():
            group[tag] = group.get(tag, 0) + sum(_mapped(device, buffer.range._node).values())
        every: dict[object, int] = {}
        allocations = allocations_of(session_of(device))
        for reservation in list(allocations.reservations):
            every |= _mapped(device, reservation)
        mapped = sum(every.values()) - sum(group.values())
        pages = sum(arena.page_bytes(device.location) for arena in members(allocations.arenas))
        info, pools, graphs = device.memory_info(), _pools(device), device.graph_memory.reserved
        return cls(device, info.total, info.free, group, mapped, pages, pools, graphs, dict(measured))

    @property
    def others(self) -> int:
        """Bytes without a known owner: contexts with their kernels and local memory, libraries that were not measured,
        :class:`PhysicalMemory` without a mapping, imported memory, and other processes.
        """
        return self.total - self.free - sum(bytes for _, bytes in self._known())

    def _known(self) -> Iterator[tuple[str, int]]:
        for tag, nbytes in self.group.items():
            yield f"group, tag {tag!r}", nbytes
        yield "other mapped memory", self.mapped
        yield "page arenas", self.pages
        yield from self.pools.items()
        yield "graphs", self.graphs
        for owner, nbytes in self.measured.items():
            yield f"{owner}, as measured", nbytes

    def rows(self) -> list[tuple[str, int]]:
        """Return the rows of the table as tuples of owner and bytes: the known owners first, then :attr:`others`, the
        free bytes and all bytes.
        """
        rest = ("contexts, libraries, other processes", self.others)
        return [*self._known(), rest, ("free", self.free), ("total", self.total)]

    def _about(self) -> Iterator[Row]:
        yield repr(self.device), table(("on the device", ""), ((owner, mib(nbytes)) for owner, nbytes in self.rows()))

    def __repr__(self) -> str:
        shown = [(owner, mib(nbytes)) for owner, nbytes in self.rows()]
        left, right = (max(len(row[column]) for row in shown) for column in (0, 1))
        return "\n".join(f"{owner:<{left}}  {size:>{right}}" for owner, size in shown)


def _mapped(device: Device, reservation: Reservation) -> dict[object, int]:
    """Return the bytes of physical memory of ``device`` that this process created and mapped in ``reservation``, with a
    key for each memory.

    Memory with several mappings has only one key, so that its bytes count once.
    """
    found: dict[object, int] = {}
    for entry in list(reservation.entries):
        memory, location = entry._memory, None
        if isinstance(memory, PhysicalMemory):
            location = None if entry.state.imported else memory.location
        elif entry._raw is not None:
            location = entry.spec.prop.location
        if not entry.gone and location == device.location:
            found[entry if memory is None else entry.state] = entry.nbytes
    return found


def _pools(device: Device) -> dict[str, int]:
    session = session_of(device)
    pools = {"default pool": MemoryPool.default(device)} if device.supports.memory_pools else {}
    handles = {pool.handle for pool in pools.values()}
    for pool in known_pools(session):
        if pool.location == device.location and pool.handle not in handles:
            handles.add(pool.handle)
            pools[repr(pool.name or f"pool {pool.handle:#x}")] = pool
    found = {}
    for name, pool in pools.items():
        with contextlib.suppress(CudaError):  # The driver refuses statistics of another process's pool.
            found[name] = pool.statistics().reserved
    return found


class Ranks(Protocol):
    """Type of a communicator of the processes (ranks) whose groups sleep and wake together."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    def allgather(self, data: bytes, /, *, timeout: float | None = None) -> Sequence[bytes]:
        """Send ``data`` to all ranks, and return the data of all ranks, in the order of ranks. ``timeout`` is in
        seconds; None for the communicator's own limit.
        """


class RankRefusedError(RuntimeError):
    """Another rank could not sleep or wake, or made another call, so no rank did.

    :meth:`SleepGroup.sleep` and :meth:`SleepGroup.wake` raise it with ``ranks=``.

    Attributes
    ----------
    rank
        The rank that failed; the lowest if several failed.
    reason
        The text of that rank's error, or a text with the name of its other call.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank: int = rank
        self.reason: str = reason

    def __str__(self) -> str:
        return f"rank {self.rank} has refused: {self.reason}"


class Votes:
    """The votes of all ranks on one sleep or wake: each rank votes once, for the call or against it."""

    def __init__(self, ranks: Ranks | None, name: str, timeout: float | None) -> None:
        self._ranks = ranks
        self._name = name
        """Name of the call, for errors."""
        self._timeout = timeout
        self._voted = False
        """Whether this rank has voted."""

    def agree(self) -> None:
        """Vote for the call, and return once all ranks have voted for it. If the call has no ``ranks``, return at
        once.

        Raises
        ------
        RankRefusedError
            Another rank has raised an error, or makes another call. Errors of the communicator propagate; other ranks
            may then have agreed.
        """
        self._vote("")

    @contextlib.contextmanager
    def refusing_errors(self) -> Iterator[None]:
        """Return a context manager. If its ``with`` block raises before :meth:`agree`, it votes against the call, so
        that no other rank waits for this rank's vote.
        """
        try:
            yield
        except BaseException as first:
            if not self._voted:
                try:
                    self._vote(f"{type(first).__name__}: {first}")
                except Exception as later:
                    attach(first, later)
            raise

    def _vote(self, refusal: str) -> None:
        """Send this rank's vote and receive the votes of all ranks. ``refusal`` is the text of this rank's error; empty
        to vote for the call. Raises RankRefusedError, and errors of the communicator.
        """
        if self._ranks is None:
            return
        self._voted = True
        text = f"{self._name}\n{refusal}".encode(errors="backslashreplace")[:_LONGEST_REASON]
        for rank, theirs in enumerate(self._ranks.allgather(text, timeout=self._timeout)):
            call, _, reason = bytes(theirs).decode(errors="replace").partition("\n")
            if rank != self._ranks.rank and (call != self._name or reason):
                raise RankRefusedError(rank, reason or f"it makes another call: {call}")


class _Members(Closes, Claimable):
    """Base class of :class:`SleepGroup`: the buffers with their tags, and the memory of the device by owner."""

    def __init__(self, device: Device, handle_types: MemHandleType) -> None:
        check_device("device", device)
        self._session = session_of(device)
        self.device: Device = device
        """Device of :meth:`allocate`."""
        self.location: MemLocation = device.location
        """Location of the memory of :meth:`allocate`."""
        self.closed: bool = False
        """Whether :meth:`close` was called."""
        self._handle_types = handle_types
        self._members: weakref.WeakKeyDictionary[VirtualBuffer, str] = weakref.WeakKeyDictionary()
        """Tag of each buffer. A buffer that is dropped leaves the group."""
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
            Stream of operations for which the caller names no stream; default: the device's default stream.
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
        buffer._remedy = f"group.wake({tag!r}), or restore() it alone,"

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
                buffer._check_thawed()
            if self._members.pop(buffer, None) is not None:
                buffer._remedy = RESTORE

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
        """Whether at least one buffer of the group is asleep."""
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
        ``cuMemGetInfo``, minus memory of known owners. It is wrong if another thread or process allocates during the
        block, and does not change if the library releases memory later. Blocks with the same owner add up. ::

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


class _Backups(_Members):
    """Base class of :class:`SleepGroup` with the methods that use backups: bytes of sleeping and frozen buffers outside
    of device memory.
    """

    def __init__(
        self, device: Device, handle_types: MemHandleType, backup: MemoryPool | HostTier | DiskTier | None
    ) -> None:
        super().__init__(device, handle_types)
        if backup is not None:
            tier_of(backup)
        self._backup: MemoryPool | HostTier | DiskTier | None = backup
        self._near: HostTier | None = None
        """The default backup, a tier of the device's NUMA node; None before its first use."""

    @property
    def backup(self) -> Any:
        """Pool or tier for the bytes of sleeping and frozen buffers. By default it is a tier in host memory of the
        device's NUMA node, made at its first use. Raises ClosedError if the group was closed.
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
    def freeze(self, *tags: str, stream: StreamLike | None = None, after: After = None) -> None:
        """Back up all buffers, or the buffers with these tags, and make them read-only until :meth:`thaw`.

        The backup stays valid while the buffers are awake, so that the next :meth:`sleep` copies nothing. The host
        waits until the bytes are stored. The device refuses writes (``cuMemSetAccess``): fills and copies to a frozen
        buffer raise :class:`CudaError`. A kernel that writes to it fails with ``CUDA_ERROR_ILLEGAL_ADDRESS``, and the
        context is then lost. Frozen buffers use memory of :attr:`backup` also while they are awake.

        Buffers that are frozen already are skipped. A sleeping buffer is frozen without a copy: it keeps its backup
        when it wakes. Buffers that get the tag later are not frozen. ::

            group.freeze("weights")
            group.sleep()    # unmaps, without a copy
            group.wake()
            group.thaw("weights")

        Parameters
        ----------
        tags
            Tags of the buffers; without a tag, all buffers.
        stream
            Stream of the copies; default: the device's default stream.
        after
            Events or streams with the last writes to the buffers. The host first waits for this work; default: all work
            of the devices with access.

        Raises
        ------
        ValueError
            The bytes of a sleeping buffer were not kept. Or :attr:`backup`, ``stream`` or ``after`` is not allowed, as
            for :meth:`sleep`.
        OutOfMemoryError, OSError
            There is not enough host memory or disk space for the bytes.
        InUseError
            A signal handler or a hook called this method during another call.
        KeyError, TypeError, ClosedError, CaptureError, CudaError
            As for :meth:`sleep`. After any of these errors every buffer is unchanged.
        """
        chosen, ordered = self._chosen(tags), self._copying_stream(stream)
        claim_also(chosen)
        going = {buffer: tag for buffer, tag in chosen.items() if buffer.nbytes and not buffer.frozen}
        awake = {buffer: tag for buffer, tag in going.items() if not buffer.evicted}
        for buffer in going.keys() - awake.keys():
            self._backup_of(buffer)
        steps = BackupSteps(awake, ordered, lambda tags: _by_tag(tags, ordered, tier_of(self.backup).hold))

        def freeze() -> None:
            for buffer in going:
                buffer._backup = steps.backups.get(buffer, buffer._backup)
                buffer._frozen = True

        run_steps(
            functools.partial(wait_for_users, after, self._session, [one.rights for one in awake]),
            *((buffer._make_read_only, buffer._thaw) for buffer in awake),
            (steps.reserve, steps.drop_backups),
            steps.copy,
            ordered.synchronize,
            last=freeze,
        )

    @claimed
    def thaw(self, *tags: str) -> None:
        """Make frozen buffers writable again, and drop the backups of buffers that are awake. Buffers that are not
        frozen are skipped.

        Parameters
        ----------
        tags
            Tags of the buffers; without a tag, all buffers.

        Raises
        ------
        KeyError, TypeError
            No buffer has such a tag, or a tag is no text.
        ClosedError
            The group was closed.
        InUseError
            A signal handler or a hook called this method during another call.
        CudaError
            The driver refused a call. After any of these errors every buffer is unchanged.
        """
        chosen = self._chosen(tags)
        claim_also(chosen)
        _thaw(chosen)

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
        buffer._check_thawed()
        eviction = buffer.eviction
        if eviction is None or eviction.held or buffer._backup is not None or array.nbytes < buffer.nbytes:
            self._backup_of(buffer).write(start, array)
            return
        (backup,) = tier_of(self.backup).hold([buffer.nbytes], self._copying_stream(None))
        with undoing(backup.drop):
            backup.write(0, array)
        buffer._replace_backup(backup)

    def _backup_of(self, buffer: VirtualBuffer) -> Backup:
        if buffer.eviction is None:
            raise ValueError(f"{buffer!r} is awake: copy_to and copy_from copy its bytes")
        if buffer.eviction.held:
            raise ValueError(f"{buffer!r} keeps its memory, because a sleep and its undo failed: wake() it first")
        if buffer._backup is None:
            raise ValueError(f"the bytes of {buffer!r} were not kept: replace all of them")
        return buffer._backup


class SleepGroup(_Backups):
    """Virtual buffers whose physical memory is released and restored together, at the same addresses.

    :meth:`sleep` evicts all buffers of the group and :meth:`wake` restores them, as :meth:`VirtualBuffer.evict` and
    :meth:`VirtualBuffer.restore` do for one buffer. Each call changes all its buffers or none. After an error every
    buffer and its bytes are unchanged, and the call can be repeated. Captured graphs stay valid, because addresses do
    not change. ::

        with vmm.SleepGroup(device) as group:
            weights = group.allocate(8 << 20, tag="weights")
            cache = group.allocate(16 << 20, tag="cache")
            group.sleep(keep=["weights"])    # frees 24 MiB, keeps the bytes of 8 MiB in host memory
            group.wake()

    Each buffer has a tag. :meth:`sleep` and :meth:`wake` take all buffers, or the buffers with given tags. Buffers of
    one tag that go to sleep together share one backup. The backup is released once no buffer needs it, after the copies
    that read it. A buffer that is closed or dropped leaves the group and the backup.

    Thread-safe. Calls that change buffers of the group wait for each other: :meth:`sleep`, :meth:`wake`,
    :meth:`resume`, :meth:`freeze`, :meth:`thaw`, :meth:`read`, :meth:`write`, :meth:`remove` and :meth:`close`, and
    calls that close, resize, evict or restore one of its buffers or set its permissions. :meth:`allocate` and
    :meth:`add` do not wait. If a hook or a signal handler makes a call that would have to wait, the call raises
    :class:`InUseError`.

    Parameters
    ----------
    device
        Device for :meth:`allocate`. Its default stream makes the copies if no stream is given.
    backup
        Where the bytes of sleeping and frozen buffers are stored: a :class:`HostTier`, a :class:`DiskTier`, or a pool
        in host memory to which the device has access. By default all groups with devices on one NUMA node share a
        :class:`HostTier`, with memory of this node if it has enough. This tier keeps its memory for the next sleep of
        any of these groups, because pinning memory takes longer than a copy. ``group.backup.trim()`` releases memory
        that no buffer uses.
    handle_types
        Handle types for sharing the memory of :meth:`allocate` with other processes.

    Raises
    ------
    TypeError
        ``device`` is no Device, or ``backup`` is neither a pool nor a tier.
    """

    def __init__(
        self,
        device: Device,
        *,
        backup: MemoryPool | HostTier | DiskTier | None = None,
        handle_types: MemHandleType = MemHandleType.NONE,
    ) -> None:
        super().__init__(device, handle_types, backup)
        self._before_sleep: list[tuple[Hook, Hook | None]] = []
        """Functions that :meth:`before_sleep` added, each with its undo function or None."""
        self._after_wake: list[tuple[Hook, Hook | None]] = []
        """Functions that :meth:`after_wake` added, each with its undo function or None."""

    def tagged(self, tag: str) -> Tagged:
        """Return an allocator whose buffers belong to the group and get the tag ``tag``, for
        ``streamalloc.interop.torch.use``.
        """
        return Tagged(self, tag)

    def sleep(
        self,
        *tags: str,
        keep: bool | Iterable[str] = True,
        shared: bool = False,
        stream: StreamLike | None = None,
        after: After = None,
        backup: MemoryPool | HostTier | DiskTier | Callable[[VirtualBuffer, str], BackupPlace] | None = None,
        ranks: Ranks | None = None,
        timeout: float | None = None,
    ) -> int:
        """Evict all buffers, or the buffers with these tags. Returns the number of bytes of device memory released.

        The host waits until the bytes to keep are stored. A buffer is unmapped after its own copy, while the copies of
        later buffers run. Sleeping buffers are skipped. Frozen buffers have their backup already, so ``keep`` and
        ``backup`` have no effect on them.

        Parameters
        ----------
        tags
            Tags of the buffers, which are copied in this order; without a tag, all buffers.
        keep
            True to keep the bytes, False to discard them, or the tag or tags of the buffers whose bytes are kept.
        shared
            Whether to evict also memory that was exported; see :meth:`VirtualBuffer.evict`.
        stream
            Stream of the copies; default: the device's default stream.
        after
            Events or streams that the host first waits for; default: all work of the devices with access.
        backup
            Pool, :class:`HostTier` or :class:`DiskTier` for the bytes of this call; default: :attr:`backup`. Or a
            function that is called with each buffer whose bytes are kept, and with its tag. The function returns a
            backup as for :meth:`VirtualBuffer.evict`, such as a host array, or None to discard the bytes.
        ranks
            A communicator, such as an ``ipc.ProcessCommunicator`` or the result of ``ipc.as_communicator(group)``. The
            groups of all its ranks must make this call, and either all groups sleep or none. The ranks vote before any
            memory is released. None: only this group sleeps.
        timeout
            Seconds to wait for the votes of the other ranks; None for the communicator's own limit.

        Raises
        ------
        InUseError
            The memory of a buffer cannot be released, as for :meth:`VirtualBuffer.evict`. Or a signal handler or a hook
            called this method during another call.
        OutOfMemoryError
            There is not enough host memory for the bytes.
        OSError
            A file cannot be written.
        KeyError
            No buffer has a tag of ``tags`` or ``keep``.
        ClosedError
            The group, the backup, ``stream``, or an event or stream of ``after`` was closed.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        TypeError, ValueError
            ``backup`` cannot store the bytes, as for :meth:`VirtualBuffer.evict`. Or a tag is no text, or ``stream`` or
            ``after`` is no stream or event of the driver.
        RankRefusedError
            Another rank cannot sleep.
        CudaError
            The driver refused a call. After any of these errors, and after an error of a hook or of the communicator,
            every buffer is unchanged. If the driver also refuses the undo, some buffers are asleep but still have their
            memory: :meth:`wake` them.
        """
        votes = Votes(ranks, "sleep", timeout)
        with votes.refusing_errors():
            self._check_open()
            ordered = self._copying_stream(stream)
            kept_tags: Collection[str] = ()
            if not isinstance(keep, bool):
                kept_tags = set(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else {keep}
                self._check_tags(kept_tags, self.buffers)

            def reserve(tags: Tags) -> Iterator[tuple[VirtualBuffer, Backup | None]]:
                kept = {one: tag for one, tag in tags.items() if one.nbytes and (keep is True or tag in kept_tags)}
                if callable(backup):
                    for buffer, tag in kept.items():
                        yield buffer, buffer._reserve_backup(backup(buffer, tag), ordered)
                elif kept:
                    yield from _by_tag(kept, ordered, tier_of(backup or self.backup).hold)

            return self._sleep(tags, EvictSteps(ordered, reserve, after, shared=shared), votes)

    @claimed
    def _sleep(self, tags: Sequence[str], steps: EvictSteps, votes: Votes) -> int:
        chosen = self._chosen(tags)
        return run_steps(
            _hook_step(self._before_sleep, [buffer for buffer in chosen if not buffer.evicted]),
            functools.partial(self._claim_and_wait, steps, chosen),
            (steps.reserve, steps.drop_backups),
            steps.copy,
            (steps.unmap, steps.map_again),
            votes.agree,  # Until the vote every rank can undo its steps.
            last=steps.release,
        )

    def _claim_and_wait(self, steps: EvictSteps, chosen: Mapping[VirtualBuffer, str], resumed: bool = False) -> None:
        """Claim the chosen buffers, and wait for their users (:meth:`EvictSteps.wait`). With ``resumed``, sleeping
        buffers take part, too, and frozen ones are refused. This step comes after the hooks, which may use, close and
        evict the buffers.
        """
        claim_also(chosen)
        # Another thread or a hook may have removed or evicted a buffer.
        left = self.buffers
        going = {one: tag for one, tag in chosen.items() if one in left and (resumed or not one.evicted)}
        for buffer in going if resumed else ():
            buffer._check_thawed()
        steps.wait(going)

    @claimed
    def resume(
        self, *tags: str, backup: DiskTier | None = None, stream: StreamLike | None = None, after: After = None
    ) -> int:
        """Put buffers to sleep with the bytes that an earlier group stored in a persistent :class:`DiskTier`.

        The bytes that the buffers have now are discarded. The buffers of each tag must have the same sizes, in the same
        order, as the buffers that were stored. :meth:`wake` later reads the bytes.

        Parameters
        ----------
        tags
            Tags of the buffers; without a tag, all buffers. Buffers that sleep already get the stored bytes, too.
        backup
            The tier with the stored bytes; default: :attr:`backup`.
        stream, after
            As for :meth:`sleep`.

        Returns
        -------
        int
            Number of bytes of device memory released.

        Raises
        ------
        DamagedBackupError
            The file of a tag is damaged or truncated, has buffers or blocks of other sizes, or other users own it or
            can open it.
        OSError
            There is no file for a tag (FileNotFoundError), or a file cannot be read.
        TypeError, ValueError
            The backup is no :class:`DiskTier`, or another argument is not allowed, as for :meth:`sleep`.
        InUseError
            A buffer is frozen, or as for :meth:`sleep`.
        KeyError, ClosedError, CaptureError, CudaError
            As for :meth:`sleep`. After any of these errors every buffer is unchanged.
        """
        chosen, ordered = self._chosen(tags), self._copying_stream(stream)
        tier = backup or self._backup
        if not isinstance(tier, DiskTier):
            raise TypeError(f"backup must be a DiskTier, not {type(tier).__name__} ({tier!r})")
        steps = EvictSteps(ordered, lambda tags: _by_tag(tags, ordered, tier.resume), after)
        return run_steps(
            _hook_step(self._before_sleep, [buffer for buffer in chosen if not buffer.evicted]),
            functools.partial(self._claim_and_wait, steps, chosen, resumed=True),
            (steps.reserve, steps.drop_backups),
            (steps.unmap, steps.map_again),
            last=steps.release,
        )

    def wake(
        self, *tags: str, stream: StreamLike | None = None, ranks: Ranks | None = None, timeout: float | None = None
    ) -> int:
        """Restore all sleeping buffers, or those with these tags. Returns the number of bytes of device memory
        allocated.

        The copies are stream-ordered: use the bytes on ``stream``, or after its work. Bytes that were not kept are
        undefined. The host waits while bytes are read from a disk, and for the copies of frozen buffers.

        Parameters
        ----------
        tags
            Tags of the buffers, which are restored in this order; without a tag, all buffers.
        stream
            Stream of the copies; default: the device's default stream.
        ranks, timeout
            As for :meth:`sleep`: the groups of all ranks wake, or none.

        Raises
        ------
        OutOfMemoryError
            There is not enough device memory. All buffers are still asleep, with their bytes, and the call can be
            repeated.
        OSError, DamagedBackupError
            A file cannot be read, or is damaged: :meth:`write` replaces the bytes.
        KeyError
            No buffer has such a tag.
        ClosedError
            The group was closed: :meth:`VirtualBuffer.restore` restores its buffers one by one. Or ``stream`` was
            closed.
        CaptureError
            ``stream`` is being captured.
        TypeError, ValueError
            ``stream`` is not a stream of this driver, or a tag is no text.
        InUseError
            A signal handler or a hook called this method during another call.
        RankRefusedError
            Another rank cannot wake.
        CudaError
            The driver refused a call. After any of these errors, and after an error of a hook or of the communicator,
            all buffers are still asleep, with their bytes.
        """
        votes = Votes(ranks, "wake", timeout)
        with votes.refusing_errors():
            return self._wake(tags, stream, votes)

    @claimed
    def _wake(self, tags: Sequence[str], stream: StreamLike | None, votes: Votes) -> int:
        chosen = self._chosen(tags)
        claim_also(chosen)
        steps = RestoreSteps(chosen, self._copying_stream(stream))
        return run_steps(
            (steps.map, steps.unmap),
            steps.protect,
            (steps.set_awake, steps.set_asleep),
            _hook_step(self._after_wake, list(steps.evictions)),
            votes.agree,  # Until the vote every rank can undo its steps.
            last=steps.drop_backups,
        )

    def before_sleep(self, hook: Hook, undo: Hook | None = None) -> None:
        """Have ``hook(buffers)`` called in each :meth:`sleep` and :meth:`resume`, before memory is released.

        Hooks are called in the order in which they were added. ``buffers`` is a list of the buffers that are selected
        by the call and awake before the first hook; if there are none, no hook is called. Hooks and other threads can
        still use, close, evict or remove these buffers. A buffer that was closed, evicted or removed takes no part in
        the sleep. If a later hook or the sleep fails, ``undo(buffers)`` is called with the same list; the undo of the
        last hook comes first. Without ``undo`` nothing is called. Raises ClosedError if the group was closed. An
        example for code that registers memory::

            group.before_sleep(deregister, undo=register)
            group.after_wake(register, undo=deregister)
        """
        self._check_open()
        self._before_sleep.append((hook, undo))

    def after_wake(self, hook: Hook, undo: Hook | None = None) -> None:
        """Have ``hook(buffers)`` called in each :meth:`wake`, with a list of the restored buffers, once these can be
        used.

        Hooks are called in the order in which they were added. The bytes are complete in the order of the stream of
        :meth:`wake`. If a later hook or the wake fails, ``undo(buffers)`` is called; the undo of the last hook comes
        first. Then the buffers are put to sleep again, with their earlier bytes. Without ``undo`` nothing is called.
        Raises ClosedError if the group was closed.
        """
        self._check_open()
        self._after_wake.append((hook, undo))

    @claimed
    def close(self) -> None:
        """Remove all buffers from the group. The buffers stay as they are, but frozen buffers are thawed. Idempotent.

        A sleeping buffer keeps its stored bytes until it is restored (:meth:`VirtualBuffer.restore`) or closed. The
        default backup releases its memory once the last group that shares it is closed and no buffer has bytes there.

        Raises
        ------
        InUseError
            A signal handler or a hook called this method during another call.
        CudaError
            The driver refused to thaw a buffer. The group stays open.
        """
        _thaw(self.buffers)
        self.closed = True
        for buffer in self.buffers:
            buffer._remedy = RESTORE
        self._members.clear()
        self._before_sleep.clear()
        self._after_wake.clear()
        self._near = None
        work(self._session)

    def _text(self) -> str:
        if self.closed:
            return ", closed"
        buffers = self.buffers
        state = f"{sum(buffer.evicted for buffer in buffers)} asleep, {size_text(self.mapped_bytes)} mapped"
        return f" of {len(buffers)} buffers, {state}"


def _thaw(buffers: Iterable[VirtualBuffer]) -> None:
    frozen = [buffer for buffer in buffers if buffer.frozen]
    run_steps(
        *((buffer._thaw, buffer._freeze_again) for buffer in frozen), last=functools.partial(drop_backups, frozen)
    )


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


def _hook_step(hooks: Sequence[tuple[Hook, Hook | None]], buffers: Sequence[Any]) -> Step:
    """Return a step that calls the hooks with the buffers. The undo of the step calls the undos of the hooks that have
    returned.
    """
    undos = contextlib.ExitStack()

    def call() -> None:
        for hook, undo in hooks if buffers else ():
            hook(list(buffers))
            if undo is not None:
                undos.callback(undo, list(buffers))

    return call, undos.close


def _by_tag(tags: Tags, stream: Stream, hold: Hold) -> Iterator[tuple[Any, Backup]]:
    """Yield the buffers that have bytes, each with a backup that ``hold`` reserves or opens. The buffers of a tag share
    one call.
    """
    for tag in dict.fromkeys(tags.values()):
        buffers = [buffer for buffer in tags if tags[buffer] == tag and buffer.nbytes]
        if buffers:
            yield from zip(buffers, hold([buffer.nbytes for buffer in buffers], stream, tag), strict=True)


class Tagged:
    """Allocator of buffers of a :class:`SleepGroup` with one tag. :meth:`SleepGroup.tagged` returns it."""

    def __init__(self, group: SleepGroup, tag: str) -> None:
        self.group: SleepGroup = group
        """Group that the buffers belong to."""
        self.tag: str = tag
        """Tag of the buffers."""
        self.location: MemLocation = group.location
        """Location of the memory."""
        self._session = session_of(group)

    def allocate(self, nbytes: int | str, stream: StreamLike | None = None) -> VirtualBuffer:
        """Allocate a buffer of ``nbytes`` bytes with the tag. ``stream`` and errors as for
        :meth:`SleepGroup.allocate`.
        """
        return self.group.allocate(nbytes, stream, tag=self.tag)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} of {self.group!r}>"
