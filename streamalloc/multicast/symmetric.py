"""Symmetric memory: memory of the same size for each rank, mapped on the devices of all ranks.

:mod:`.setup.collective` lists the steps of a creation. The memory of this process ends in one of these ways:

* *A failed creation*, on all ranks. Each rank releases its resources, waits until the other ranks have done so
  (``RankGroup.barrier_after_failure``), and closes the communicator if it was made for this memory.
* :meth:`SymmetricMemory.close`, on all ranks. In step ``meet`` the hosts wait for each other. In step ``finish`` each
  waits for its devices (``finish_all``). Then ``RankResources.release`` releases this process's part. ``_leaving`` says
  that both steps have succeeded: if the driver then refuses a release, the next call repeats only the release.
* *A failed close.* If a rank is missing in one of the steps, the others abandon the memory, with the rest of their time
  but at least ``_GRACE``, and raise the error of the step.
* :meth:`SymmetricMemory.abandon`, alone; also at the end of a ``with`` block that raises. Streams of this process may
  wait for a rank that never comes, so ``_satisfy_and_finish`` writes the values that they wait for, and then waits for
  the devices. If a device is busy too long, nothing is released, and the call can be repeated.
* *A drop.* The finaliser cannot wait: it warns, and submits a :class:`_DroppedMemory`. The first attempt starts a
  thread that does what ``abandon`` does before its release. A later attempt releases.
* *The end of the process.* Nothing is done, because the operating system releases everything.
"""

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

from streamalloc.core.errors import ClosedError, CudaError, attach, size_text, undoing
from streamalloc.core.internal import BufferView, Deferred, Device, Stream, StreamLike, as_stream, deferred_queue
from streamalloc.core.properties import MemHandleType
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver import Driver
from streamalloc.formats.html import Row, Shown, mib, place, table
from streamalloc.ipc import Communicator, CommunicatorLike, as_communicator
from streamalloc.ipc.internal import deadline_after, left
from streamalloc.multicast.setup import collective
from streamalloc.multicast.setup.plan import Plan
from streamalloc.multicast.setup.rank_group import RankGroup, SymmetricMemoryError
from streamalloc.multicast.setup.resources import RankResources, finish_all, run_until
from streamalloc.multicast.signals import Signals
from streamalloc.vmm import Mapping

_SIGNAL_PAD_BYTES = 4096
_ABANDON_TIMEOUT = 10.0
"""Seconds that ``abandon()`` waits by default for this process's devices to become idle."""
_GRACE = 1.0
"""Seconds that a failed ``close()`` waits at least for this process's devices to become idle, even after its
deadline.
"""


class Tables(NamedTuple):
    """Device addresses of two ``uint64`` arrays in a rank's memory, for kernels: the result of
    :meth:`SymmetricMemory.tables`. The rank is the index in each array.
    """

    buffers: int
    """Device address of the array with the values of :attr:`SymmetricMemory.addresses`."""
    signal_pads: int
    """Device address of the array with the values of :attr:`SymmetricMemory.signal_addresses`."""


class SymmetricBuffer(BufferView):
    """Memory of one rank, or the multicast view of all ranks, mapped in this process. :attr:`SymmetricMemory.buffers`,
    ``signal_pads`` and ``multicast_buffer`` return such buffers.

    The buffer keeps its :class:`SymmetricMemory` alive, but not open: after the close, uses of the buffer raise
    ClosedError.
    """

    _ptr = None  # None: so fills and copies read the properties ``stream`` and ``owner``.

    def __init__(self, owner: SymmetricMemory, mapping: Mapping, start: int, nbytes: int, device: Device) -> None:
        super().__init__(mapping, start, nbytes)
        self._symmetric = owner
        self._device = device

    @property
    def stream(self) -> Stream:
        """The default stream of this process's device.

        If this process has all ranks: the default stream of the device of the buffer's rank, or of rank 0 for the
        multicast view.
        """
        return self._device.default_stream

    @property
    def owner(self) -> SymmetricMemory:
        """The symmetric memory that contains the buffer."""
        return self._symmetric

    @property
    def device_accessible(self) -> bool:
        """True: the devices of this process's ranks have access."""
        return True

    def check_usable(self) -> None:
        if self._symmetric.closed:
            raise ClosedError(f"{self._symmetric!r} was closed")

    def _resident_on(self) -> int | None:
        # The result is None, because a copy needs only the address, and the device of another process's rank may have
        # no context in this process.
        return None

    def __repr__(self) -> str:
        state = "closed" if self._symmetric.closed else f"at {self.address:#x}"
        return f"<SymmetricBuffer of {size_text(self.nbytes)} {state}, of {self._symmetric!r}>"


class SymmetricMemory(Closes, Shown):
    """Memory of the same size on each rank's device, mapped in the processes of all ranks.

    Creation and :meth:`close` are collective: all ranks make the call. Each rank allocates memory, and the ranks
    exchange handles. Every rank then maps the memory of all ranks (:attr:`buffers`). If the devices support multicast,
    a store to :attr:`multicast_buffer` reaches every rank. ::

        with SymmetricMemory(1 << 20, communicator, device=device) as memory:
            memory.buffers[memory.rank].fill(memory.rank, stream)
            memory.barrier(stream)  # work after it runs after the fills of all ranks
            result.copy_from(memory.buffers[0], stream)  # reads the memory of rank 0

    The set-up succeeds on all ranks or fails on all ranks. After a failure every rank raises an error and releases its
    resources. A :class:`SymmetricMemoryError` names the rank at fault and the step. The communicator can be used again
    unless one of its own calls failed, for example because a rank died or did not come in time. If the drivers of the
    ranks have different versions, :class:`~streamalloc.ipc.DriverVersionWarning` is issued.

    Use a ``with`` block, or call :meth:`close` on all ranks. If the block ends with an exception, it calls
    :meth:`abandon` instead, and does not wait for the other ranks. If the object is garbage-collected without a close,
    this process's resources are released with a ``ResourceWarning``. The other ranks are then not notified. After the
    close, methods and properties that return or use the memory raise ClosedError.

    Not thread-safe: call its methods from one thread at a time.

    Parameters
    ----------
    nbytes
        Size of each rank's memory in bytes; the same on all ranks. The physical memory also has the signal pad,
        counters and tables. Its size is rounded up to the granularity, which is up to 512 MiB with multicast.
    communicator
        The group of ranks, or an object that :func:`streamalloc.ipc.as_communicator` accepts. None: the default group
        of ``torch.distributed``.
    device
        This rank's device. Default: the device of the current context, or the only visible device.
    devices
        Instead of ``communicator``: the devices of a team of which this process has all ranks, one for each device. See
        :meth:`local`.
    multicast
        True: create a multicast view, or raise if it is not supported. False: create no view. ``"auto"``: create a view
        if there are two ranks or more, and each has a device of its own that supports multicast; a failure is still an
        error. The same on all ranks.
    handle_type
        Type of the handles that the ranks exchange; the same on all ranks. Default: fabric handles if all devices
        support and permit them, else file descriptors. File descriptors need all ranks on one machine, of one user and
        in one network namespace.
    signal_pad_bytes
        Size in bytes of each rank's signal pad: zeroed memory for your kernels. The same on all ranks.
    timeout
        Most seconds for the whole set-up, and for :meth:`close`. None: the communicator's limit for each call.
    driver
        The driver whose device is used if no device is given. Default: the process's default driver.

    Raises
    ------
    ValueError
        The ranks got different arguments. Raised on all ranks; the message lists the arguments.
    TypeError, ValueError
        An argument of this rank is wrong. The other ranks raise :class:`SymmetricMemoryError` with the same text, but
        they are not told of a wrong ``communicator`` or wrong ``devices``.
    NotSupportedError
        The requested multicast or handle type is not supported, or no handle type is. Raised on all ranks.
    SymmetricMemoryError
        A step failed on a rank, a rank died, or the timeout expired. Raised on all ranks. If this package captures a
        stream on a rank, the first step fails.
    """

    def __init__(
        self,
        nbytes: int | str,
        communicator: CommunicatorLike = None,
        *,
        device: Device | None = None,
        devices: Sequence[Device] | None = None,
        multicast: bool | Literal["auto"] = "auto",
        handle_type: MemHandleType | None = None,
        signal_pad_bytes: int | str = _SIGNAL_PAD_BYTES,
        timeout: float | None = 60.0,
        driver: Driver | None = None,
    ) -> None:
        group = None if devices is not None else as_communicator(communicator)
        self._owned = group is not communicator
        if devices is not None:
            collective.check_devices(communicator, device, devices, handle_type)
        self._group = team = RankGroup(group, 1 if devices is None else len(devices))
        self._leaving = False
        """Whether all ranks have agreed to close. If the release then fails, the next :meth:`close` only retries the
        release.
        """
        self.timeout: float | None = timeout
        """Seconds that :meth:`close` may take; None: the communicator's limit for each call."""
        arguments = collective.Arguments(nbytes, multicast, handle_type, signal_pad_bytes, timeout)
        given = dict(enumerate(devices or ())) if device is None else {team.local[0]: device}
        deadline = collective.deadline_or_none(timeout)
        with contextlib.ExitStack() as undo:
            # After an error these run from the last to the first: release this rank's resources, wait until the other
            # ranks have released their resources, and close the communicator, which the wait needs.
            undo.enter_context(undoing(self._close_communicator))
            undo.enter_context(undoing(functools.partial(team.barrier_after_failure, deadline)))
            plan, chosen = collective.agree(team, arguments, given, driver, deadline)
            resources = RankResources(session_of(chosen[team.local[0]]), chosen, team.size, plan.physical_bytes)
            undo.enter_context(undoing(functools.partial(deferred_queue(resources.session).end, resources)))
            bases = collective.set_up(team, resources, plan, deadline)
            self._signals = Signals(plan.layout, bases)
            self._describe(team, plan, resources, bases)
            self._finalizer = weakref.finalize(self, _drop, _DroppedMemory(resources, self._signals), repr(self))
            # At exit the finaliser does not run, because the operating system then releases everything.
            self._finalizer.atexit = False

    @classmethod
    def local(
        cls,
        devices: Sequence[Device],
        nbytes: int | str,
        *,
        multicast: bool | Literal["auto"] = "auto",
        signal_pad_bytes: int | str = _SIGNAL_PAD_BYTES,
        timeout: float | None = 60.0,
    ) -> SymmetricMemory:
        """Allocate symmetric memory on several devices of this process; a rank is an index in ``devices``.

        No communicator is needed, and no handles are exchanged. All devices have access to all memory. The other
        parameters and the errors are the same as for the class. :attr:`rank`, :attr:`device`, :attr:`buffer_table` and
        :attr:`signal_table` belong to rank 0. The order ``local(nbytes, devices)`` is deprecated. ::

            with SymmetricMemory.local([Device(0), Device(1)], 1 << 20) as memory:
                memory.buffers[1].fill(7, stream)    # stream of device 0
        """
        if isinstance(devices, int):
            warnings.warn("local(nbytes, devices) is deprecated: give devices first", DeprecationWarning, stacklevel=2)
            devices, nbytes = nbytes, devices  # type: ignore[assignment]
        return cls(nbytes, devices=devices, multicast=multicast, signal_pad_bytes=signal_pad_bytes, timeout=timeout)

    def _describe(self, group: RankGroup, plan: Plan, resources: RankResources, bases: tuple[int, ...]) -> None:
        """Set the attributes that do not change after the set-up."""
        self._resources = resources
        self._bases = bases
        """Address at which each rank's memory is mapped in this process, indexed by rank."""
        self._layout = plan.layout
        self.rank: int = group.local[0]
        """This process's rank; 0 if this process has all ranks."""
        self.ranks: tuple[int, ...] = group.local
        """Ranks of this process: one rank, or all ranks."""
        self.size: int = group.size
        """Number of ranks."""
        self.nbytes: int = plan.layout.nbytes
        """Size of each rank's memory in bytes, as requested."""
        self.physical_bytes: int = resources.physical_bytes
        """Size in bytes of the physical memory that each rank allocated."""
        self.device: Device = resources.devices[self.rank]
        """This rank's device; the device of rank 0 if this process has all ranks."""
        self.devices: tuple[Device, ...] = tuple(resources.devices.values())
        """The devices of :attr:`ranks`, in the same order."""
        self.driver: Driver = resources.session.driver
        """The driver of the devices."""
        self.communicator: Communicator | None = group.communicator
        """The group of ranks; None if this process has all ranks."""
        self.handle_type: MemHandleType = resources.kind
        """Handle type that the ranks exchanged; ``NONE`` if this process has all ranks."""
        self.multicast: bool = plan.multicast
        """Whether there is a multicast view."""
        self.signal_offset: int = plan.layout.signal_pad
        """Bytes from the start of a rank's memory to its signal pad, equal on all ranks.

        A store at this offset of the multicast view (:attr:`multicast_address`) reaches the signal pads of all
        ranks.
        """
        self.signal_pad_bytes: int = plan.layout.signal_pad_bytes
        """Size of each signal pad in bytes."""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`abandon` has released the memory. Uses then raise ClosedError."""
        return not self._resources.made

    # -- memory ----------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> tuple[SymmetricBuffer, ...]:
        """The memory of every rank, this rank included, indexed by rank. Raises ClosedError after the close."""
        return self._replicas(0, self.nbytes)

    @property
    def signal_pads(self) -> tuple[SymmetricBuffer, ...]:
        """The signal pad of every rank, indexed by rank; initially zero. Raises ClosedError after the close."""
        return self._replicas(self.signal_offset, self.signal_pad_bytes)

    @property
    def multicast_buffer(self) -> SymmetricBuffer | None:
        """Multicast view of all ranks' memory, for stores and reductions; None without multicast.

        A store, fill or copy to the view writes the same offset of every rank's memory. The result of ordinary reads is
        undefined. Kernels read with ``multimem.ld_reduce``, which returns the sum (or another reduction) over all
        ranks. Raises ClosedError after the close.

        The view and :attr:`buffers` are different addresses of the same memory, and the hardware does not order
        accesses through different addresses, even in one thread. Put ``fence.proxy.alias`` between a store through one
        address and a load through the other. The end of a kernel, a barrier and a signal also order such accesses.
        """
        self._check_open()
        mapping = self._resources.view
        return None if mapping is None else SymmetricBuffer(self, mapping, 0, self.nbytes, self.device)

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Address of each rank's memory in this process, indexed by rank. Raises ClosedError after the close."""
        self._check_open()
        return np.array(self._bases, np.uint64)

    @property
    def multicast_address(self) -> int | None:
        """Address of the multicast view in this process; None without multicast. Raises ClosedError after the close.

        The view has the same offsets as each rank's memory, so kernels can also write signal pads through the view.
        """
        self._check_open()
        mapping = self._resources.view
        return None if mapping is None else mapping.address

    @property
    def signal_addresses(self) -> npt.NDArray[np.uint64]:
        """Address of each rank's signal pad in this process, indexed by rank. Raises ClosedError after the close."""
        self._check_open()
        return np.array([base + self.signal_offset for base in self._bases], np.uint64)

    def tables(self, rank: int | None = None) -> Tables:
        """Return the addresses of the two tables in a rank's memory: pass them to kernels that run on the rank's
        device.

        Parameters
        ----------
        rank
            A rank of this process (:attr:`ranks`); default: :attr:`rank`.

        Raises
        ------
        ValueError
            ``rank`` is not a rank of this process.
        ClosedError
            The memory was closed.
        """
        self._check_open()
        base = self._bases[self.rank if rank is None else self._checked_rank(rank)]
        return Tables(base + self._layout.buffer_table, base + self._layout.signal_table)

    @property
    def buffer_table(self) -> int:
        """Device address of a ``uint64`` array in this rank's memory, with the values of :attr:`addresses`: the same as
        ``tables().buffers``. Raises ClosedError after the close.
        """
        return self.tables().buffers

    @property
    def signal_table(self) -> int:
        """Device address of a ``uint64`` array in this rank's memory, with the values of :attr:`signal_addresses`: the
        same as ``tables().signal_pads``. Raises ClosedError after the close.
        """
        return self.tables().signal_pads

    def _replicas(self, start: int, nbytes: int) -> tuple[SymmetricBuffer, ...]:
        self._check_open()
        devices = self._resources.devices
        return tuple(
            SymmetricBuffer(self, mapping, start, nbytes, devices.get(rank, self.device))
            for rank, mapping in self._resources.replicas.items()
        )

    def _checked_rank(self, rank: int) -> int:
        if rank not in self._resources.devices:
            raise ValueError(f"rank={rank!r}: this process has {list(self.ranks)}")
        return rank

    # -- order between ranks ---------------------------------------------------------------------------------

    def barrier(self, *streams: StreamLike, channel: int = 0) -> None:
        """Make later work of ``streams`` wait for the work that every rank queued on its stream before its barrier.

        Call this on all ranks, equally often. The host does not block (``cuStreamWriteValue32``,
        ``cuStreamWaitValue32``). Work after the barrier can read what each rank wrote before the barrier.

        Parameters
        ----------
        streams
            One stream of this rank's device. If this process has all ranks: one stream for each rank, in order of rank.
        channel
            A number from 0 to 15; barriers on different channels are independent. If the previous barrier on the
            channel used another stream of this rank, the new stream also waits for that barrier.

        Raises
        ------
        CaptureError
            A stream is being captured. A graph cannot repeat a barrier, because the counters increase at each call.
        TypeError
            The number of streams is wrong, or an argument has a wrong type.
        ValueError
            The channel does not exist, or a stream belongs to another driver, or to no device of :attr:`devices`.
        ClosedError, CudaError
            The memory or a stream was closed, or the driver refused a call.
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
        """Signal another rank once the work queued on the stream has completed (``cuStreamWriteValue32``).

        The host does not block. Signals are counted: the peer's n-th :meth:`wait_signal` on a channel waits for the
        n-th signal from this rank. Raises the errors of :meth:`barrier`; ValueError also if ``peer`` is not another
        rank, ``rank`` is not a rank of this process, or several ranks have the stream's device and ``rank`` is missing.

        Parameters
        ----------
        peer
            The rank to signal.
        stream
            The stream on which the signal is queued.
        channel
            A number from 0 to 15; signals on different channels are counted independently.
        rank
            The sending rank, if this process has all ranks. Default: the rank of the stream's device.
        """
        self._check_open()
        ordered = self._team_stream(stream)
        self._signals.put(self._rank_of(ordered, rank), peer, ordered, channel)

    def wait_signal(self, peer: int, stream: StreamLike, *, channel: int = 0, rank: int | None = None) -> None:
        """Make later work of a stream wait for the next signal from the rank ``peer`` (``cuStreamWaitValue32``).

        The host does not block. ``peer`` is the sending rank, ``rank`` the receiving rank; ``stream``, ``channel`` and
        the errors are those of :meth:`put_signal`.
        """
        self._check_open()
        ordered = self._team_stream(stream)
        self._signals.wait(self._rank_of(ordered, rank), peer, ordered, channel)

    def _team_stream(self, stream: StreamLike) -> Stream:
        ordered = as_stream(stream, self._resources.session)
        if ordered.device not in self._resources.devices.values():
            raise ValueError(f"{ordered!r} has no access: the devices of this process's ranks are {list(self.devices)}")
        return ordered

    def _rank_of(self, stream: Stream, rank: int | None) -> int:
        if rank is not None:
            return self._checked_rank(rank)
        found = [rank for rank, device in self._resources.devices.items() if device == stream.device]
        if len(found) > 1:
            raise ValueError(f"ranks {found} are on the stream's device: choose one by rank=")
        return found[0]

    # -- release ---------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Release everything once all ranks have called this and their devices are idle. A second call does nothing.

        No rank waits for the releases of the other ranks: memory returns to a device when the last rank has unmapped
        it. If a rank died or did not call this in time, this rank releases its resources alone, and the error names the
        missing rank. A communicator that was made for this memory is closed.

        Parameters
        ----------
        timeout
            Seconds to wait for the other ranks and the devices. Default: :attr:`timeout`.

        Raises
        ------
        SymmetricMemoryError
            A rank died, was not ready in time, or could not wait for its devices. This rank's resources are released
            once its devices are idle. For this the call waits until ``timeout`` has passed, but at least one second;
            one second if there is no limit. If a device is still busy then, or if other code captures a stream of a
            device, nothing is released; the capture is then invalid.
        CaptureError, TypeError, ValueError
            This package captures a stream, or ``timeout`` is negative or no number. Nothing was released or sent.
        CudaError
            Work of a device of this process had failed, or the driver refused a release. After a refusal, call
            :meth:`close` again to retry.
        """
        if self.closed:
            return
        collective.check_no_capture(self._resources.session)
        deadline = deadline_after(self.timeout if timeout is None else timeout)
        failed: list[CudaError] = []
        if not self._leaving:
            devices = self._resources.devices
            try:
                # A barrier of the hosts comes first: without it, a device could wait for a signal that a rank has not
                # queued yet.
                self._group.step("meet", lambda rank: None, deadline)
                self._group.step("finish", lambda rank: failed.extend(finish_all([devices[rank]], deadline)), deadline)
            except SymmetricMemoryError as first:
                try:
                    self.abandon(_GRACE if deadline is None else max(left(deadline), _GRACE))
                except Exception as later:
                    attach(first, later)
                raise
            self._leaving = True
        with _raising(failed):
            self._release()
            self._close_communicator()

    def abandon(self, timeout: float = _ABANDON_TIMEOUT) -> None:
        """Release this rank's resources without the other ranks, for example after a rank has died.

        The counters of barriers and signals are set, so that the waits on this process's streams end. Memory that other
        ranks have mapped stays until those ranks unmap it. The communicator stays open. A second call does nothing.

        Parameters
        ----------
        timeout
            Seconds to wait until this process's devices are idle.

        Raises
        ------
        TimeoutError, CaptureError, TypeError, ValueError
            A device was still busy after that time, for example because a kernel waits for another rank. Or a stream is
            being captured, by any code; a capture by other code is then invalid. Or ``timeout`` is negative or no
            number. Nothing was released.
        CudaError
            Work of a device had failed, or the driver refused a release. After a refusal, call this method again.
        """
        if self.closed:
            return
        collective.check_no_capture(self._resources.session)
        failures = _satisfy_and_finish(self._resources, self._signals, deadline_after(timeout))
        with _raising(failures):
            self._release()

    def _release(self) -> None:
        self._resources.release()
        self._signals.forget()
        self._finalizer.detach()

    def _close_communicator(self) -> None:
        if self._owned and self._group.communicator is not None and not self._group.failed:
            self._group.communicator.close()

    def _leave(self, *, failed: bool) -> None:
        if failed:
            self.abandon()
        else:
            self.close()

    def _about(self) -> Iterator[Row]:
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

    def _text(self) -> str:
        who = f"rank {self.rank} of {self.size}" if self.communicator is not None else f"{self.size} devices"
        multicast = ", with multicast" if self.multicast else ""
        state = ", closed" if self.closed else multicast
        return f" of {size_text(self.nbytes)} for each rank, {who}{state}"


@contextlib.contextmanager
def _raising(failures: list[CudaError]) -> Iterator[None]:
    """Raise the first of ``failures``, errors of the devices' work, after the block; or attach them to an error of the
    driver in the block.
    """
    try:
        yield
    except CudaError as error:
        for failure in failures:
            attach(error, failure)
        raise
    if failures:
        raise failures.pop(0)


def _satisfy_and_finish(resources: RankResources, signals: Signals, deadline: float | None) -> list[CudaError]:
    """Write into the counters the values for which streams of this process still wait. Then block until the devices are
    idle. Returns the failures of both. ``deadline`` and errors as for :func:`run_until`.
    """
    failures: list[CudaError] = []

    def satisfy(rank: int, device: Device) -> None:
        counters = signals.released(rank)
        at = signals.layout.counters
        # The copy needs a new stream, because the default stream would wait for the streams that wait for this copy.
        with resources.session.relaxed(), device.create_stream() as stream:
            resources.replicas[rank][at : at + counters.nbytes].copy_from(counters, stream)
            stream.synchronize()

    if signals.used and resources.replicas and not resources.releasing:
        for rank, device in resources.devices.items():
            failures += run_until(device, functools.partial(satisfy, rank, device), deadline)
    return failures + finish_all(resources.devices.values(), deadline)


class _DroppedMemory(Deferred):
    """Item of the session's deferred queue that releases garbage-collected symmetric memory once the devices are idle.
    The other ranks are not notified.
    """

    def __init__(self, resources: RankResources, signals: Signals) -> None:
        self.resources: RankResources = resources
        self._signals = signals
        self._waiter: threading.Thread | None = None
        self._idle = False
        """True once the work on all devices has ended."""

    def attempt(self) -> bool:
        """Release the memory if the thread of an earlier call has found the devices idle. Otherwise start this thread
        unless it runs: it ends the waits of queued work for other ranks, then waits for the devices. Returns True once
        everything is released.
        """
        if self._idle:
            return self.resources.attempt()
        if self._waiter is None or not self._waiter.is_alive():
            self._waiter = threading.Thread(target=self._wait, name="streamalloc waits for devices", daemon=True)
            self._waiter.start()
        return False

    def _wait(self) -> None:
        # An error, such as a capture by other code, is hidden here: the next attempt() starts a new thread.
        with contextlib.suppress(Exception), self.resources.session.relaxed():
            _satisfy_and_finish(self.resources, self._signals, None)
            self._idle = True


def _drop(dropped: _DroppedMemory, description: str) -> None:
    """Submit garbage-collected memory to the deferred queue, with a ResourceWarning that contains ``description``. The
    finaliser calls this function.
    """
    session = dropped.resources.session
    if dropped.resources.made and session.usable:
        deferred_queue(session).submit(dropped)
        warnings.warn(f"{description} was dropped without close()", ResourceWarning, stacklevel=2)
