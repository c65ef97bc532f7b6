"""Resources of one process for symmetric memory, created step by step, and released."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streamalloc.core.errors import CaptureError, CudaError, undo_all
from streamalloc.core.internal import Deferred, Device, Fd
from streamalloc.core.properties import MemHandleType
from streamalloc.core.resource import close_all
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import RLock
from streamalloc.ipc.internal import left
from streamalloc.multicast.objects.multicast_object import MulticastObject
from streamalloc.vmm import AddressRange, Mapping, PhysicalMemory
from streamalloc.vmm.internal import import_memory

Handle: TypeAlias = Fd | bytes


class RankResources(Deferred):
    """The resources of this process for symmetric memory: handles of the physical memory of all ranks and of the
    multicast object, address ranges, mappings.

    ``devices`` has the device of each rank of this process, by rank. These devices get access to all mappings. ``size``
    is the number of ranks, and ``physical_bytes`` the size of each rank's memory.
    """

    def __init__(self, session: Session, devices: dict[int, Device], size: int, physical_bytes: int) -> None:
        self.session: Session = session
        self.devices: dict[int, Device] = devices
        self.size: int = size
        self.kind: MemHandleType = MemHandleType.NONE
        self.physical_bytes: int = physical_bytes
        self.handles: list[Fd] = []
        """File descriptors to close once all memory is imported."""
        self.memories: dict[int, PhysicalMemory] = {}
        """Physical memory of all ranks, by rank."""
        self.replicas: dict[int, Mapping] = {}
        """Mappings of :attr:`memories`, by rank."""
        self._lock = RLock()
        """Lock held during a release, because two threads may close the memory. It is reentrant, because a finaliser
        that releases may run during a release.
        """
        self.releasing: bool = False
        """Whether a release has begun and not succeeded yet. Some mappings may be unmapped then."""
        self.multicast: MulticastObject | None = None
        self.view: Mapping | None = None
        """Mapping of the multicast object; None without one."""
        self.ranges: list[AddressRange] = []
        """The address range of all ranks' memory, and the address range of the multicast object if there is one."""

    # -- the steps, each for one rank of this process --------------------------------------------------------

    def create(self, rank: int, kind: MemHandleType, multicast: bool) -> None:
        """Create the memory of ``rank`` for handles of type ``kind`` (``cuMemCreate``), and set :attr:`kind`. With
        ``multicast``, rank 0 also creates the multicast object (``cuMulticastCreate``). Raises CudaError.
        """
        device, self.kind = self.devices[rank], kind
        self.memories[rank] = PhysicalMemory(device, self.physical_bytes, handle_types=kind)
        if multicast and rank == 0:
            shape = self.physical_bytes, self.size
            self.multicast = MulticastObject(*shape, handle_types=kind, driver=device.driver)

    def export(self, rank: int) -> list[Handle]:
        """Return handles of the rank's memory and, if this rank created the multicast object, of this object
        (``cuMemExportToShareableHandle``). Raises CudaError.
        """
        exported: list[Handle] = []
        for allocation in (self.memories[rank], self.multicast):
            if allocation is not None:
                handle = allocation.export(self.kind)
                self.keep(handle)
                exported.append(handle)
        return exported

    def keep(self, *handles: Handle) -> None:
        """Keep file descriptors among ``handles`` open until all memory is imported."""
        self.handles += [handle for handle in handles if isinstance(handle, Fd)]

    def import_handles(self, rank: int, received: Sequence[Sequence[Handle]], multicast: bool) -> None:
        """Import the memory of the other ranks for ``rank`` (``cuMemImportFromShareableHandle``). With ``multicast``, a
        rank other than 0 also imports the multicast object of rank 0. Then close the file descriptors; after an error,
        :meth:`release` closes them. Raises ValueError if a rank sent a wrong number of handles, and CudaError if the
        driver refuses.

        ``received`` has the handles that each rank sent, by rank: the handle of its memory and, with ``multicast``,
        from rank 0 also the handle of the multicast object.
        """
        for other, handles in enumerate(received):
            expected = 1 + (multicast and other == 0)
            if len(handles) != expected:
                raise ValueError(f"rank {other} gave {len(handles)} handles instead of {expected}")
        if multicast and rank != 0:
            self.multicast = MulticastObject.from_handle(
                received[0][1], self.physical_bytes, self.size, handle_types=self.kind, driver=self.session.driver
            )
        for other, handles in enumerate(received):
            if other != rank:
                self.memories[other] = import_memory(self.session, handles[0], self.physical_bytes)
        self._close_handles()

    def add_device(self, rank: int) -> None:
        """Add the rank's device to the team of the multicast object (``cuMulticastAddDevice``). Raises CudaError."""
        self._object.add_device(self.devices[rank])

    def bind(self, rank: int) -> None:
        """Bind the rank's memory to the multicast object (``cuMulticastBindMem``). Call this once all ranks have added
        their devices: the driver would block until then. Raises CudaError.
        """
        self._object.mark_complete()
        self._object.bind(self.memories[rank], device=self.devices[rank])

    def reserve(self) -> None:
        """Reserve an address range for the memory of all ranks, and another for the multicast object if there is one
        (``cuMemAddressReserve``). Raises AddressSpaceError if the process has no such free range, and CudaError for any
        other refusal.
        """
        nbytes, driver = self.physical_bytes, self.session.driver
        self.ranges.append(AddressRange(self.size * nbytes, driver=driver))
        if self.multicast is not None:
            # Otherwise the driver refuses the map: the address must be a multiple of the largest power of two that
            # divides the object's size.
            self.ranges.append(AddressRange(nbytes, alignment=nbytes & -nbytes, driver=driver))

    def map(self) -> None:
        """Map the memory of all ranks side by side, in the order of ranks, and the multicast object (``cuMemMap``).
        Raises CudaError.
        """
        for rank in range(self.size):
            self.replicas[rank] = self.ranges[0].map(self.memories[rank], rank * self.physical_bytes)
        if self.multicast is not None:
            self.view = self.ranges[1].map(self.multicast)

    def set_access(self) -> None:
        """Give the devices of this process's ranks access to all mappings (``cuMemSetAccess``). Raises CudaError."""
        for range in self.ranges:
            range.set_access(self.devices.values())

    # -- release ---------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether there are resources to release."""
        return bool(self.handles or self.multicast or self.memories or self.ranges)

    def release(self) -> None:
        """Release the handles, the multicast object, the mappings, the memory and the addresses, in this order. Call
        this once the work that uses the memory is done.

        If a driver call fails, its resource is kept, and so are resources that must be released after it. Call the
        method again to retry.

        Raises
        ------
        CudaError
            A driver call failed. Errors of further calls are attached.
        """
        with self._lock:
            self.releasing = True
            self._close_handles()
            if self.multicast is not None:
                self.multicast.close(after=(), unmap=True)
            for range in self.ranges:
                range.unmap(after=())
            undo_all(memory.close for memory in self.memories.values())
            self.multicast = self.view = None
            self.replicas.clear()
            self.memories.clear()
            undo_all(range.close for range in self.ranges)
            self.ranges.clear()
            self.releasing = False

    def attempt(self) -> bool:
        self.release()
        return True

    @property
    def _object(self) -> MulticastObject:
        assert self.multicast is not None
        return self.multicast

    def _close_handles(self) -> None:
        close_all(self.handles)
        self.handles.clear()


def finish_all(devices: Iterable[Device], deadline: float | None) -> list[CudaError]:
    """Block the host until all work of the devices is done (``cuCtxSynchronize``). Returns the failures of their work.
    ``deadline`` and errors as for :func:`run_until`.

    The call invalidates captures by other code. :func:`~streamalloc.core.fence.await_device` does not, but while it
    waits for a device that never gets idle, for example after another rank's death, no thread can use the context.
    """
    waits = [(device, functools.partial(session_of(device).call, "cuCtxSynchronize")) for device in devices]
    return [failure for device, wait in waits for failure in run_until(device, wait, deadline)]


def run_until(device: Device, do: Callable[[], object], deadline: float | None) -> list[CudaError]:
    """Call ``do``, which waits for ``device``, on a new thread, because the driver's waits have no time limit.

    Returns the error of ``do`` if it is a CudaError, other than CaptureError: a device whose work has failed is also
    idle, so that the release can follow. Other errors of ``do`` are raised.

    Raises
    ------
    TimeoutError
        ``do`` has not returned at the time ``deadline`` (``time.monotonic``). The thread keeps running.
    CaptureError
        ``do`` raised it: other code captures a stream, so that the device cannot be synchronised.
    """
    failures: list[CudaError] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with device.current():
                do()
        except CaptureError as error:
            errors.append(error)
        except CudaError as error:
            failures.append(error)
        except BaseException as error:
            errors.append(error)

    waiter = threading.Thread(target=run, name="streamalloc waits for a device", daemon=True)
    waiter.start()
    waiter.join(None if deadline is None else min(left(deadline), threading.TIMEOUT_MAX))
    if waiter.is_alive():
        raise TimeoutError(f"{device!r} has not done its work in time")
    if errors:
        raise errors.pop()  # `pop`, because the traceback would form a cycle with this frame.
    return failures
