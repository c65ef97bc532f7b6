"""Groups of buffers whose physical memory is released and restored together.

A sleep, a wake, a freeze and a thaw are each one list of steps, in ``SleepGroup._sleep``, ``SleepGroup._wake``,
``SleepGroup.freeze`` and ``SleepGroup._thaw_all``. A step is a function, with another function that undoes it if it
has changed something. ``run_steps`` does the steps; if one fails, it and the steps before it are undone, the last step
first. Meanwhile no other call changes the group (``claimed``). In a sleep and a wake all ranks take part (``Votes``).

The steps of a sleep:

1. *Hooks* of :meth:`SleepGroup.before_sleep`. Undo: their undo hooks.
2. *Claim and wait.* The buffers are claimed, and the host waits for their users. There is nothing to undo.
3. *Reserve* memory or disk space for backups in the tiers. Undo: drop the backups.
4. *Copy.* The copies to the backups are queued. They change no buffer, so there is nothing to undo.
5. *Unmap* each buffer after its copy (``cuMemUnmap``). Undo: map the same memory again.
6. *Vote* of the ranks. This is the last step that a rank can refuse.
7. *Release* the memory (``cuMemRelease``). This is not undone.

:meth:`SleepGroup.resume` has these steps, too, but neither a copy nor a vote: step 3 opens backups that exist.

The steps of a wake:

1. *Map.* For one buffer after the other, memory is created and mapped, and the copy of its bytes is queued
   (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``). Undo: wait for the copies, then unmap and release the memory.
2. *Protect.* After the copies, buffers that are frozen are made read-only. The undo of step 1 undoes this, too.
3. *Awake.* The buffers can be used. Undo: they cannot.
4. *Hooks* of :meth:`SleepGroup.after_wake`. Undo: their undo hooks.
5. *Vote* of the ranks.
6. *Drop* the backups, except those of frozen buffers. This is not undone.

The steps of a freeze, after the buffers are claimed:

1. *Wait* for the users of the buffers that are awake. There is nothing to undo.
2. *Make read-only* each of these buffers (``cuMemSetAccess``). Undo: make it writable.
3. *Reserve*, as in a sleep.
4. *Copy*, as in a sleep. The host waits for the copies.
5. *Frozen.* The buffers count as frozen and have their backups. This is not undone.

The steps of a thaw, which :meth:`SleepGroup.close` does, too, after the buffers are claimed:

1. *Make writable* each frozen buffer, which then does not count as frozen. Undo: make it read-only and frozen again.
2. *Drop* the backups of buffers that are awake. This is not undone.

The steps are methods of ``BackupSteps``, ``EvictSteps`` and ``RestoreSteps`` in :mod:`streamalloc.vmm.steps`, and of
``Evictable`` for one buffer. :mod:`streamalloc.vmm.stores.blocks` describes the way of the bytes from a buffer to its
backup and back. The steps change these states of a buffer:

* ``eviction``: its released memory while it sleeps. If a sleep and its undo have failed, ``eviction.held`` is the old
  memory, which still has the bytes.
* ``_backup``: the :class:`Backup` with its bytes while it sleeps or is frozen; None if the bytes are not kept. Backups
  that were made by one call have their blocks in one ``Stored``.
* ``_frozen``: whether it is read-only, so that its backup stays valid while it is awake, and a sleep copies nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from streamalloc.core.errors import attach, size_text
from streamalloc.core.internal import Device, Stream, StreamLike, work
from streamalloc.core.properties import MemHandleType, checked_function, checked_type
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import After
from streamalloc.vmm.claims import claim_also, claimed
from streamalloc.vmm.evictable import BackupPlace
from streamalloc.vmm.members import Members
from streamalloc.vmm.steps import (
    BackupSteps,
    EvictSteps,
    RestoreSteps,
    Step,
    Tags,
    drop_unneeded,
    run_steps,
)
from streamalloc.vmm.stores.blocks import Backup
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier
from streamalloc.vmm.virtual_buffer import VirtualBuffer

Hook: TypeAlias = Callable[[list[Any]], object]
"""Function that is called with a list of buffers."""
TierMethod: TypeAlias = Callable[[Sequence[int], Stream, str], Sequence[Backup]]
"""Method ``hold`` or ``resume`` of a tier."""
_LONGEST_REASON = 2000
"""Largest length in bytes of an error text that is sent to the other ranks; longer texts are cut."""


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


class SleepGroup(Members):
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
        super().__init__(device, backup, handle_types)
        self._before_sleep: list[tuple[Hook, Hook | None]] = []
        """Functions that :meth:`before_sleep` added, each with its undo function or None."""
        self._after_wake: list[tuple[Hook, Hook | None]] = []
        """Functions that :meth:`after_wake` added, each with its undo function or None."""

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
                        yield buffer, buffer.reserve_backup(backup(buffer, tag), ordered)
                elif kept:
                    yield from _by_tag(kept, ordered, tier_of(backup or self.backup).hold)

            return self._sleep(tags, EvictSteps(ordered, reserve, after, shared=shared), votes)

    @claimed
    def _sleep(self, tags: Sequence[str], steps: EvictSteps, votes: Votes) -> int:
        chosen = self._chosen(tags)
        return run_steps(
            self._session,
            _hook_step(self._before_sleep, [buffer for buffer in chosen if not buffer.evicted]),
            functools.partial(self._claim_and_wait, steps, chosen),
            (steps.reserve, steps.undo_reserve),
            steps.copy,
            (steps.unmap_all, steps.map_all_again),
            votes.agree,  # Until the vote every rank can undo its steps.
            last=steps.release_all,
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
            buffer.check_thawed()
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
            The backup is no :class:`DiskTier`, or ``tags``, ``stream`` or ``after`` is not as for :meth:`sleep`.
        InUseError
            A buffer is frozen, or as for :meth:`sleep`.
        KeyError, ClosedError, CaptureError, CudaError
            As for :meth:`sleep`. After any of these errors every buffer is unchanged.
        """
        chosen, ordered = self._chosen(tags), self._copying_stream(stream)
        tier = backup or self._backup
        resume = checked_type("backup", tier, DiskTier).resume
        steps = EvictSteps(ordered, lambda tags: _by_tag(tags, ordered, resume), after)
        return run_steps(
            self._session,
            _hook_step(self._before_sleep, [buffer for buffer in chosen if not buffer.evicted]),
            functools.partial(self._claim_and_wait, steps, chosen, resumed=True),
            (steps.reserve, steps.undo_reserve),
            (steps.unmap_all, steps.map_all_again),
            last=steps.release_all,
        )

    def wake(
        self, *tags: str, stream: StreamLike | None = None, ranks: Ranks | None = None, timeout: float | None = None
    ) -> int:
        """Restore all sleeping buffers, or the sleeping buffers with these tags. Returns the number of bytes of device
        memory allocated.

        The copies are stream-ordered: use the bytes on ``stream``, or after its work. Bytes that were not kept are
        undefined. The host waits while bytes are read from a disk, and for the copies of frozen buffers.

        Parameters
        ----------
        tags
            Tags of the buffers, which are restored in this order; without a tag, all buffers. Buffers with bytes in one
            store are restored one after the other.
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
            self._session,
            (steps.map_all, steps.undo_map_all),
            steps.protect,
            (steps.set_awake, steps.set_asleep),
            _hook_step(self._after_wake, list(steps.evictions)),
            votes.agree,  # Until the vote every rank can undo its steps.
            last=steps.drop_backups,
        )

    @claimed
    def freeze(self, *tags: str, stream: StreamLike | None = None, after: After = None) -> None:
        """Back up all buffers, or the buffers with these tags, and make them read-only until :meth:`thaw`.

        The backup stays valid while the buffers are awake, so that the next :meth:`sleep` copies nothing. The host
        waits until the bytes are stored. The frozen buffers are read-only for the device (``cuMemSetAccess``). A fill
        or a copy to one raises :class:`CudaError`. A kernel that writes to one fails with
        ``CUDA_ERROR_ILLEGAL_ADDRESS``, and the process loses the context. Frozen buffers use memory of :attr:`backup`
        also while they are awake.

        Buffers that are frozen already are skipped. A sleeping buffer is frozen without a copy: it keeps its backup
        when it wakes. Buffers that get the tag later are not frozen. If the group is dropped without :meth:`close`, its
        buffers stay frozen, and :meth:`thaw` of another group that has them makes them writable. ::

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
        steps = BackupSteps(ordered, lambda tags: _by_tag(tags, ordered, tier_of(self.backup).hold), after)

        def freeze() -> None:
            for buffer in going:
                buffer._backup = steps.backups.get(buffer, buffer._backup)
                buffer._frozen = True

        run_steps(
            self._session,
            functools.partial(steps.wait, awake),
            *((buffer.make_read_only, buffer.make_writable) for buffer in awake),
            (steps.reserve, steps.undo_reserve),
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
        self._thaw_all(chosen)

    def _thaw_all(self, buffers: Iterable[VirtualBuffer]) -> None:
        frozen = [buffer for buffer in buffers if buffer.frozen]
        if frozen:  # Without a driver call, so that a forked child can also close a group.
            run_steps(
                self._session,
                *((buffer.make_writable, buffer.freeze_again) for buffer in frozen),
                last=functools.partial(drop_unneeded, frozen),
            )

    def before_sleep(self, hook: Hook, undo: Hook | None = None) -> None:
        """Have ``hook(buffers)`` called in each :meth:`sleep` and :meth:`resume`, before memory is released.

        Hooks are called in the order in which they were added. ``buffers`` is a list of the buffers that are selected
        by the call and awake before the first hook; if there are none, no hook is called. Hooks and other threads can
        still use, close, evict or remove these buffers. A buffer that was closed, evicted or removed takes no part in
        the sleep. If a later hook or the sleep fails, ``undo(buffers)`` is called with the same list; the undo of the
        last hook comes first. Without ``undo`` nothing is called. Raises ClosedError if the group was closed, and
        TypeError if ``hook`` or ``undo`` cannot be called. An example for code that registers memory::

            group.before_sleep(deregister, undo=register)
            group.after_wake(register, undo=deregister)
        """
        self._check_open()
        self._before_sleep.append((checked_function("hook", hook), checked_function("undo", undo, optional=True)))

    def after_wake(self, hook: Hook, undo: Hook | None = None) -> None:
        """Have ``hook(buffers)`` called in each :meth:`wake`, with a list of the restored buffers, once these can be
        used.

        Hooks are called in the order in which they were added. The bytes are complete in the order of the stream of
        :meth:`wake`. If a later hook or the wake fails, ``undo(buffers)`` is called; the undo of the last hook comes
        first. Then the buffers are put to sleep again, with their earlier bytes. Without ``undo`` nothing is called.
        Raises ClosedError if the group was closed, and TypeError if ``hook`` or ``undo`` cannot be called.
        """
        self._check_open()
        self._after_wake.append((checked_function("hook", hook), checked_function("undo", undo, optional=True)))

    @claimed
    def close(self) -> None:
        """Remove all buffers from the group. The buffers stay as they are, but frozen buffers are thawed, also if
        another group froze them. Idempotent.

        A sleeping buffer keeps its stored bytes until it is restored (:meth:`VirtualBuffer.restore`) or closed. The
        default backup releases its memory once the last group that shares it is closed and no buffer has bytes there.

        Raises
        ------
        InUseError
            A signal handler or a hook called this method during another call.
        CudaError
            The driver refused to thaw a buffer. The group stays open.
        """
        chosen = self.buffers
        claim_also(chosen)
        self._thaw_all(chosen)
        self.closed = True
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


def _by_tag(tags: Tags, stream: Stream, open_backups: TierMethod) -> Iterator[tuple[Any, Backup]]:
    """Yield the buffers that have bytes, each with a backup that ``open_backups`` reserves or opens. The buffers of
    a tag share one call.
    """
    for tag in dict.fromkeys(tags.values()):
        buffers = [buffer for buffer in tags if tags[buffer] == tag and buffer.nbytes]
        if buffers:
            yield from zip(buffers, open_backups([buffer.nbytes for buffer in buffers], stream, tag), strict=True)
