"""Memory of the same size on several devices, each of which reaches all of it: set up everywhere, or nowhere."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from streamalloc.core.device import Device
from streamalloc.core.door import door_behind
from streamalloc.core.errors import ClosedError, CudaError, EvictedError, attach, size_text, undoing
from streamalloc.core.html import Row, Shown, mib, place, table
from streamalloc.core.later import Deferred, later_of
from streamalloc.core.memory import BufferView, CopySide
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemHandleType
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.driver import Driver
from streamalloc.ipc import Communicator, CommunicatorLike, as_communicator
from streamalloc.ipc.internal import end_of, left
from streamalloc.multicast.setup.agreement import Layout
from streamalloc.multicast.setup.participants import SymmetricMemoryError, Team
from streamalloc.multicast.setup.resources import RankResources, finish, in_time
from streamalloc.multicast.setup.steps import Asked, agree, check_now, checked_team, end_or_none, set_up
from streamalloc.multicast.signals import Signals
from streamalloc.pool import MemoryPool
from streamalloc.vmm import Mapping, RangeView
from streamalloc.vmm.internal import Backup, BackupRange, copying

__all__ = ["SymmetricBuffer", "SymmetricMemory", "Tables"]

_SIGNAL_PAD_BYTES = 4096
# How long the devices of what is abandoned are waited for.
_PATIENCE = 10.0
# What a rank takes after the others have failed it, where no time is left.
_GRACE = 1.0


class Tables(NamedTuple):
    """Where a rank's memory has the addresses of all ranks' memory, as arrays of 64-bit words, one word for each."""

    buffers: int
    signal_pads: int


class SymmetricBuffer(BufferView):
    """One rank's memory, or the multicast view of all of it, as this process sees it; it keeps the whole alive."""

    __slots__ = ("_device", "_keeper")

    _ptr = None  # It has a stream and an owner of its own, which the slow path looks at.

    def __init__(self, keeper: SymmetricMemory, place: RangeView, start: int, nbytes: int, device: Device) -> None:
        super().__init__(place, start, nbytes)
        self._keeper = keeper
        self._device = device

    @property
    def stream(self) -> Stream:
        """The default stream of this rank's device."""
        return self._device.default_stream

    @property
    def owner(self) -> SymmetricMemory:
        """What it is a part of."""
        return self._keeper

    @property
    def device_accessible(self) -> bool:
        """True: the devices of this process's ranks may use it."""
        return True

    def _check_usable(self) -> None:
        self._keeper._check_open()

    def _resident_on(self) -> int | None:
        # Its address is enough for copies, which then need no context on another rank's device.
        return None

    def __repr__(self) -> str:
        where = "closed" if self._keeper.closed else f"at {self.address:#x}"
        return f"<SymmetricBuffer of {size_text(self.nbytes)} {where}, of {self._keeper!r}>"


class SymmetricMemory(Closes, Shown):
    """Memory of the same size on each device of a team, mapped by every rank.

    Every rank allocates, the ranks exchange handles, and each maps the memory of all: :attr:`buffers`. Where the
    devices support it, :attr:`multicast_buffer` is a view of all of them at once, into which one store reaches every
    device. All ranks make this at the same time, and close it at the same time.

    The ranks agree on how it is done, and tell each other after each step how it went. So the set-up succeeds on all of
    them or fails on all with one :class:`SymmetricMemoryError`, which names the rank and the step. By then nothing is
    left of it, and if no rank has died the communicator is good for another attempt.

    Close it with :meth:`close`, on all ranks, or by a ``with`` block; where a block ends with an exception the other
    ranks are not waited for (:meth:`abandon`). What is dropped instead is given back without a word to the other ranks,
    with a ``ResourceWarning``.

    Not to be used from several threads at once.

    Parameters
    ----------
    nbytes
        Size of each rank's part in bytes, as users see it; the same on all ranks. The physical memory is larger: signal
        pads and tables lie behind these bytes, and it is rounded up to the granularity, with multicast the recommended
        one for multicast objects (which may be 512 MiB).
    communicator
        The group: whatever :func:`streamalloc.ipc.as_communicator` takes. None: the default group of
        ``torch.distributed``.
    device
        This rank's device. Default: that of the current context, else the only one that is visible.
    devices
        In place of ``communicator``: one process has all ranks, one for each of these devices; see :meth:`local`.
    multicast
        Whether there is a multicast view. ``"auto"``: where all devices support it and differ from each other. What
        fails while it is made is an error nevertheless. The same on all ranks.
    handle_type
        What the processes exchange. Default: fabric handles where all devices offer them and may make them, else file
        descriptors, for which all ranks have to be on one machine. The same on all ranks.
    signal_pad_bytes
        Size of each rank's signal pad, zeroed memory for the users' kernels; the same on all ranks.
    timeout
        Seconds for the set-up as a whole, and for :meth:`close`. None: as the communicator has it for each call.
    driver
        The driver to use where no device is given.

    Raises
    ------
    ValueError
        The ranks gave different sizes or options; on all ranks, naming them.
    TypeError, ValueError
        An argument of this rank breaks a rule; the other ranks get a :class:`SymmetricMemoryError` that says so.
    NotSupportedError
        Multicast or a handle type was asked for and does not work here, or nothing does; on all ranks.
    SymmetricMemoryError
        A step failed on some rank, or a rank did not come in time or died; on all ranks.
    """

    __slots__ = (
        "__weakref__",
        "_asleep",
        "_bases",
        "_finalizer",
        "_layout",
        "_leaving",
        "_owned",
        "_plan",
        "_resources",
        "_signals",
        "_team",
        "timeout",
    )

    timeout: float | None
    """Seconds for :meth:`close`."""

    def __init__(
        self,
        nbytes: int,
        communicator: CommunicatorLike = None,
        *,
        device: Device | None = None,
        devices: Sequence[Device] | None = None,
        multicast: bool | Literal["auto"] = "auto",
        handle_type: MemHandleType | None = None,
        signal_pad_bytes: int = _SIGNAL_PAD_BYTES,
        timeout: float | None = 60.0,
        driver: Driver | None = None,
    ) -> None:
        group = None if devices is not None else as_communicator(communicator)
        self._owned = group is not communicator
        self._team = Team(group, checked_team(communicator, device, devices, handle_type) if devices is not None else 1)
        self._leaving = False
        self._asleep: dict[int, _Contents] | None = None
        """While it sleeps what its ranks' memory had in it, by rank."""
        self.timeout = timeout
        resources: RankResources | None = None
        end = end_or_none(timeout)
        try:
            asked = Asked(nbytes, multicast, handle_type, signal_pad_bytes, timeout)
            given = {} if devices is None else dict(enumerate(devices))
            if device is not None:
                given = dict.fromkeys(self._team.here, device)
            plan, chosen = agree(self._team, asked, given, driver, end)
            self._layout = plan.layout
            resources = RankResources(door_behind(chosen[self._team.here[0]]), chosen, self._team.size)
            self._resources = resources
            bases = self._bases = set_up(self._team, resources, plan, end)
            self._plan = plan._replace(physical_bytes={resources.kind: resources.physical_bytes})
            self._signals = Signals(plan.layout, bases)
            self._finalizer = weakref.finalize(self, _drop, _Dropped(resources, self._signals), repr(self))
            # The operating system takes everything at the end of a process.
            self._finalizer.atexit = False
        except BaseException as first:
            if resources is not None:
                try:
                    later_of(resources.door).end(resources)
                except Exception as later:
                    attach(first, later)
            self._team.settle(end)
            self._leave_group()
            raise

    @classmethod
    def local(
        cls,
        nbytes: int,
        devices: Sequence[Device],
        *,
        multicast: bool | Literal["auto"] = "auto",
        signal_pad_bytes: int = _SIGNAL_PAD_BYTES,
        timeout: float | None = 60.0,
    ) -> SymmetricMemory:
        """Symmetric memory of several devices in this process alone; a rank is the index of its device.

        No communicator is needed, and no handles: every part is usable from all of the devices. Whatever is for one
        rank (:attr:`rank`, :attr:`device`, :attr:`buffer_table`) is for rank 0 then.
        """
        return cls(nbytes, devices=devices, multicast=multicast, signal_pad_bytes=signal_pad_bytes, timeout=timeout)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank; the first where it has all of them."""
        return self._team.here[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process: one, or all."""
        return self._team.here

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._team.size

    @property
    def nbytes(self) -> int:
        """Size of each rank's part in bytes, as it was asked for."""
        return self._layout.nbytes

    @property
    def physical_bytes(self) -> int:
        """How much memory each rank's device gave, in bytes."""
        return self._resources.physical_bytes

    @property
    def device(self) -> Device:
        """This rank's device."""
        return self._resources.devices[self.rank]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of :attr:`ranks`."""
        return tuple(self._resources.devices.values())

    @property
    def driver(self) -> Driver:
        """The driver that it belongs to."""
        return self._resources.door.driver

    @property
    def communicator(self) -> Communicator | None:
        """The group of its ranks; None where one process has all."""
        return self._team.communicator

    @property
    def handle_type(self) -> MemHandleType:
        """What was exchanged; ``NONE`` where one process has all ranks."""
        return self._resources.kind

    @property
    def multicast(self) -> bool:
        """Whether there is a multicast view."""
        return self._resources.multicast is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed or abandoned."""
        return not self._resources.made

    # -- its memory ------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> tuple[SymmetricBuffer, ...]:
        """The memory of each rank, by rank; this rank's own among them."""
        return self._replicas(0, self._layout.nbytes)

    @property
    def signal_pads(self) -> tuple[SymmetricBuffer, ...]:
        """Each rank's signal pad, for the users' kernels: zero at first, and never touched by anything here."""
        return self._replicas(self._layout.signal_pad, self._layout.signal_pad_bytes)

    @property
    def multicast_buffer(self) -> SymmetricBuffer | None:
        """The memory of all ranks at once, to be written only; None where there is no multicast view.

        A store to it reaches every rank's memory at the same place, and so do fills and copies into it. Ordinary reads
        of it mean nothing: kernels use ``multimem.ld_reduce``, which gives the sum (or another reduction) of what the
        ranks have there.

        It is another address of memory that :attr:`buffers` name, too, and the hardware does not order accesses by
        different addresses, not even those of one thread: between a store to the view and a load of the buffer, or the
        other way round, belongs a ``fence.proxy.alias``. The end of a kernel and a wait for another rank's barrier or
        signal order them as well.
        """
        self._check_open()
        mapping = self._resources.view
        if mapping is None:
            return None
        return SymmetricBuffer(self, _lasting(mapping), 0, self._layout.nbytes, self.device)

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Where each rank's memory begins in this process, by rank."""
        self._check_open()
        return np.array(self._bases, np.uint64)

    @property
    def multicast_address(self) -> int | None:
        """Where the multicast view begins; None where there is none. The parts of a rank's memory are at the same
        places in it, so that signal pads can be written through it too.
        """
        self._check_open()
        mapping = self._resources.view
        return None if mapping is None else mapping.address

    @property
    def signal_addresses(self) -> npt.NDArray[np.uint64]:
        """Where each rank's signal pad begins in this process, by rank."""
        self._check_open()
        return np.array([base + self._layout.signal_pad for base in self._bases], np.uint64)

    @property
    def signal_offset(self) -> int:
        """Where the signal pad is in each rank's memory, in bytes from its beginning."""
        return self._layout.signal_pad

    @property
    def signal_pad_bytes(self) -> int:
        """Size of each signal pad in bytes."""
        return self._layout.signal_pad_bytes

    def tables(self, rank: int | None = None) -> Tables:
        """Where kernels find :attr:`addresses` and :attr:`signal_addresses` in a rank's own memory.

        Parameters
        ----------
        rank
            One of :attr:`ranks`; default: the first.
        """
        self._check_open()
        base = self._bases[self.rank if rank is None else self._checked_here(rank)]
        return Tables(base + self._layout.buffer_table, base + self._layout.signal_table)

    @property
    def buffer_table(self) -> int:
        """The address of :attr:`addresses` in this rank's device memory: an array of ``uint64``."""
        return self.tables().buffers

    @property
    def signal_table(self) -> int:
        """The address of :attr:`signal_addresses` in this rank's device memory: an array of ``uint64``."""
        return self.tables().signal_pads

    def _replicas(self, start: int, nbytes: int) -> tuple[SymmetricBuffer, ...]:
        self._check_open()
        devices = self._resources.devices
        return tuple(
            SymmetricBuffer(self, _lasting(mapping), start, nbytes, devices.get(rank, self.device))
            for rank, mapping in self._resources.replicas.items()
        )

    # -- order between ranks ---------------------------------------------------------------------------------

    def barrier(self, *streams: StreamLike, channel: int = 0) -> None:
        """Let work that is queued on a stream from now on wait for all that every rank has queued before its barrier.

        All ranks call it, as often as each other; the host does not wait (``cuStreamWriteValue32``,
        ``cuStreamWaitValue32``). What any rank has written before the barrier is seen by all after it.

        Parameters
        ----------
        streams
            This rank's stream; where one process has all ranks, a stream for each, in their order.
        channel
            Barriers of different channels have nothing to do with each other; there are 16. On one channel a stream
            waits for the one that was used before it.

        Raises
        ------
        CaptureError
            The stream is being captured: the counters behind it count up at each call.
        """
        self._check_open()
        if len(streams) != len(self.ranks):
            raise TypeError(
                f"barrier() takes a stream for each rank of this process, {len(self.ranks)}, and got {len(streams)}"
            )
        self._signals.barrier(
            {rank: self._team_stream(stream) for rank, stream in zip(self.ranks, streams, strict=True)}, channel
        )

    def put_signal(self, peer: int, stream: StreamLike, *, channel: int = 0, rank: int | None = None) -> None:
        """Tell another rank, in stream order, that what this stream has queued so far is done.

        The host does not wait (``cuStreamWriteValue32``). Signals add up: the n-th wait there is for the n-th signal
        from here on this channel.

        Parameters
        ----------
        peer
            Whom to tell.
        stream
            Whose work is done then.
        channel
            Signals of different channels have nothing to do with each other; there are 16.
        rank
            Who tells it, where one process has all ranks; default: the rank on the stream's device.
        """
        self._check_open()
        ordered = self._team_stream(stream)
        self._signals.put(self._acting(rank, ordered), peer, ordered, channel)

    def wait_signal(self, peer: int, stream: StreamLike, *, channel: int = 0, rank: int | None = None) -> None:
        """Let a stream wait for the next signal from another rank (``cuStreamWaitValue32``); see :meth:`put_signal`."""
        self._check_open()
        ordered = self._team_stream(stream)
        self._signals.wait(self._acting(rank, ordered), peer, ordered, channel)

    def _team_stream(self, stream: StreamLike) -> Stream:
        ordered = as_stream(stream, self._resources.door)
        if ordered.device not in self._resources.devices.values():
            raise ValueError(f"{ordered!r} has no access: the devices of this process's ranks are {list(self.devices)}")
        return ordered

    def _acting(self, rank: int | None, stream: Stream) -> int:
        if rank is not None:
            return self._checked_here(rank)
        found = [rank for rank, device in self._resources.devices.items() if device == stream.device]
        if len(found) > 1:
            raise ValueError(f"ranks {found} are on the stream's device: say which one with rank=")
        return found[0]

    def _checked_here(self, rank: int) -> int:
        if rank not in self._resources.devices:
            raise ValueError(f"rank={rank!r}: this process has {list(self.ranks)}")
        return rank

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Give everything back, once all ranks are here and have done their work. Collective; idempotent.

        Where that cannot be because a rank does not come, or has died, this rank gives its part back all the same, and
        the error says which rank it was.

        Parameters
        ----------
        timeout
            Seconds for it; default: :attr:`timeout`.

        Raises
        ------
        SymmetricMemoryError
            Not all ranks came, or one has not done its work in time. What this rank had is given back, unless its own
            device still works a second later.
        CaptureError
            A stream is being captured: nothing was done, and no rank was told.
        CudaError
            Work of this rank's device had failed, or the driver refuses to give something back; calling it again tries
            the latter again.
        """
        if self.closed:
            return
        check_now(self._resources.door)
        end = end_of(self.timeout if timeout is None else timeout)
        lost: list[CudaError] = []
        if not self._leaving:
            try:
                # First all have to have queued what others may wait for.
                self._team.step("close", lambda rank: None, end)
                self._team.step("close", lambda rank: finish([self._resources.devices[rank]], end, lost), end)
            except SymmetricMemoryError as first:
                try:
                    self.abandon(_GRACE if end is None else max(left(end), _GRACE))
                except Exception as later:
                    attach(first, later)
                raise
            self._leaving = True
        self._release()
        self._leave_group()
        if lost:
            raise lost[0]

    def abandon(self, timeout: float = _PATIENCE) -> None:
        """Give back what this rank has, without the others: the way out after one of them has died. Idempotent.

        Streams that wait for a barrier or a signal are let go on, whatever they would find. Memory that others have
        mapped stays until they let go of it. The communicator is left as it is.

        Raises
        ------
        TimeoutError
            This rank's device has not done its work in so many seconds: a kernel may wait for another rank. Nothing was
            given back.
        CaptureError, CudaError
            As :meth:`close`.
        """
        if self.closed:
            return
        check_now(self._resources.door)
        lost: list[CudaError] = []
        end = end_of(timeout)
        _let_go_on(self._resources, self._signals, end, lost)
        self._release()
        if lost:
            raise lost[0]

    def _release(self) -> None:
        self._resources.attempt()
        asleep, self._asleep = self._asleep or {}, None
        for contents in asleep.values():
            contents.close()
        self._signals.forget()
        self._finalizer.detach()

    def _leave_group(self) -> None:
        if self._owned and self.communicator is not None and not self._team.lost:
            self.communicator.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} was closed")
        if self._asleep is not None:
            raise EvictedError(f"{self!r} sleeps: wake() it first, on all ranks")

    # -- sleep -----------------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether its memory was given back by :meth:`sleep`."""
        return self._asleep is not None

    def sleep(self, backup: MemoryPool | None = None, *, timeout: float | None = None) -> None:
        """Give the memory of all ranks back, together; the addresses stay. On all ranks at the same time.

        The host waits for the devices' work. Signal pads, and what barriers and signals have counted, are kept in any
        case. Nothing but :meth:`wake`, :meth:`close` and :meth:`abandon` can be called meanwhile.

        Parameters
        ----------
        backup
            A pool in host memory, to which this process's devices have access, that takes the bytes of this process's
            ranks; None gives them up. Each rank decides for itself.
        timeout
            Seconds; default: :attr:`timeout`.

        Raises
        ------
        EvictedError
            It sleeps already.
        SymmetricMemoryError
            A rank did not come in time, or could not copy, as there is no host memory. Nothing has changed.
        CudaError
            The driver refuses to give something back; calling it again tries that again.
        """
        if self._asleep is not None and self._resources.memories:
            self._resources.give_memory_back()  # where that was refused before
            return
        self._check_open()
        check_now(self._resources.door)
        end = end_of(self.timeout if timeout is None else timeout)
        kept: dict[int, _Contents] = {}

        def copy(rank: int) -> None:
            lost: list[CudaError] = []
            finish([self._resources.devices[rank]], end, lost)
            if lost:
                raise lost[0]
            kept[rank] = _Contents.of(self._resources, self._layout, rank, backup)

        try:
            # First all have to have queued what others may wait for.
            self._team.step("sleep", lambda rank: None, end)
            self._team.step("sleep", copy, end)
        except BaseException:
            for contents in kept.values():
                contents.close()
            raise
        self._asleep = kept
        self._resources.give_memory_back()

    def wake(self, *, timeout: float | None = None) -> None:
        """Give all ranks memory again, at the same addresses, and the bytes that were kept. On all ranks together.

        Bytes that were not kept are undefined. Buffers and tables from before, and graphs that use them, are valid
        again.

        Parameters
        ----------
        timeout
            Seconds; default: :attr:`timeout`.

        Raises
        ------
        EvictedError
            It does not sleep.
        SymmetricMemoryError
            A rank has no memory, or did not come in time, or the driver refuses a step there. On all ranks it sleeps as
            before, with its bytes, and if no rank has died it can be tried again.
        """
        asleep = self._asleep
        if asleep is None:
            raise EvictedError(f"{self!r} does not sleep")
        check_now(self._resources.door)
        resources, layout = self._resources, self._layout
        end = end_of(self.timeout if timeout is None else timeout)
        if resources.memories:
            self._release_memory()  # where that failed before
        try:
            set_up(self._team, resources, self._plan, end, lambda rank: asleep[rank].put_back(resources, layout, rank))
        except BaseException as first:
            try:
                self._release_memory()
            except Exception as later:
                attach(first, later)
            self._team.settle(end)
            raise
        self._asleep = None
        for contents in asleep.values():
            contents.close()

    def _release_memory(self) -> None:
        """Release what a wake that failed has made, after the copies into it, which it may not have waited for."""
        finish(self._resources.devices.values(), end_of(_PATIENCE), [])
        self._resources.give_memory_back()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _leave(self, *, failed: bool) -> None:
        if failed:
            self.abandon()
        else:
            self.close()

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield "size", f"{mib(self.nbytes)} for each rank, of {mib(self.physical_bytes)} that are mapped"
        yield "rank", f"{self.rank} of {self.size}" if self.communicator is not None else f"all {self.size}"
        view = self.multicast_address
        yield "multicast", "no" if view is None else f"a store at {view:#x} reaches every rank"
        devices = dict(zip(self.ranks, self.devices, strict=True))
        rows = (
            (rank, place(devices[rank].location) if rank in devices else "another process", f"{int(address):#x}")
            for rank, address in enumerate(self.addresses)
        )
        yield "memory", table(("rank", "of", "address here"), rows)

    def __repr__(self) -> str:
        if not hasattr(self, "_resources"):
            return f"<{type(self).__name__} that could not be made>"
        who = f"rank {self.rank} of {self.size}" if self.communicator is not None else f"{self.size} devices"
        awake = ", with multicast" if self.multicast else ""
        state = ", closed" if self.closed else ", asleep" if self._asleep is not None else awake
        return f"<{type(self).__name__} of {size_text(self.nbytes)} for each rank, {who}{state}>"


def _lasting(mapping: Mapping) -> RangeView:
    """The place of a mapping, whatever is mapped there: what sleeps is mapped anew when it wakes."""
    return RangeView(mapping.range, mapping.offset, mapping.offset + mapping.nbytes)


class _Contents(NamedTuple):
    """What the memory of a rank has in it, while that was given back."""

    kept: BackupRange | None
    """The user's bytes; None where they were given up."""
    rest: npt.NDArray[np.uint8]
    """What lies behind them."""

    @classmethod
    def of(cls, resources: RankResources, layout: Layout, rank: int, backup: MemoryPool | None) -> _Contents:
        """A copy of it."""
        replica = resources.replicas[rank]
        rest = np.zeros(layout.total - layout.signal_pad, np.uint8)
        with resources.devices[rank].create_stream() as stream, copying(stream) as copies:
            replica[layout.signal_pad : layout.total].copy_to(rest, stream)
            kept = None if backup is None else Backup.allocate(backup, layout.nbytes, stream).hold(0, layout.nbytes)
            contents = cls(kept, rest)
            with undoing(contents.close):
                try:
                    if kept is not None:
                        kept.save(replica[: layout.nbytes], copies)
                finally:
                    stream.synchronize()
                    copies.finished = True
        return contents

    def put_back(self, resources: RankResources, layout: Layout, rank: int) -> None:
        """Copy it into new memory."""
        replica = resources.replicas[rank]
        with resources.devices[rank].create_stream() as stream, copying(stream) as copies:
            replica[layout.signal_pad : layout.total].copy_from(self.rest, stream)
            if self.kept is not None:
                self.kept.load(CopySide.of(replica[: layout.nbytes]), copies)
            stream.synchronize()
            copies.finished = True

    def close(self) -> None:
        """It is not needed any more."""
        if self.kept is not None:
            self.kept.leave()


# -- undoing -------------------------------------------------------------------------------------------------


def _let_go_on(resources: RankResources, signals: Signals, end: float | None, lost: list[CudaError]) -> None:
    """Wait for the devices; before, write what streams wait for, so that none waits for a rank that never answers."""

    def write(rank: int, device: Device) -> None:
        words = signals.awaited(rank)
        at = signals.layout.words
        # Not the default stream, which waits for the others.
        with resources.door.relaxed(), device.create_stream() as stream:
            resources.replicas[rank][at : at + words.nbytes].copy_from(words, stream)
            stream.synchronize()

    if signals.used and resources.replicas and not resources.going:
        for rank, device in resources.devices.items():
            in_time(device, functools.partial(write, rank, device), end, lost)
    finish(resources.devices.values(), end, lost)


class _Dropped(Deferred):
    """Symmetric memory that was dropped: given back once its devices have done their work. No other rank is told."""

    __slots__ = ("_signals", "_waiter", "_work_done", "resources")

    def __init__(self, resources: RankResources, signals: Signals) -> None:
        self.resources: RankResources = resources
        self._signals = signals
        self._waiter: threading.Thread | None = None
        self._work_done = False

    def attempt(self) -> bool:
        """Give it back if that can be done now; the devices are waited for on another thread."""
        if self._work_done:
            return self.resources.attempt()
        if self._waiter is None or not self._waiter.is_alive():
            self._waiter = threading.Thread(target=self._wait, name="streamalloc waits for devices", daemon=True)
            self._waiter.start()
        return False

    def _wait(self) -> None:
        # Where that fails, as in a capture of other code, it is tried again.
        with contextlib.suppress(Exception), self.resources.door.relaxed():
            _let_go_on(self.resources, self._signals, None, [])
            self._work_done = True


def _drop(dropped: _Dropped, what: str) -> None:
    """Hand in what was dropped, for a finaliser."""
    door = dropped.resources.door
    if dropped.resources.made and door.usable:
        later_of(door).hand_in(dropped)
        warnings.warn(f"{what} was dropped without close()", ResourceWarning, stacklevel=2)
