"""What one process holds of a symmetric memory: made step by step, and given back in the one order that is right."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import CaptureError, CudaError, undo_all
from streamalloc.core.event import context_event
from streamalloc.core.fd import Fd
from streamalloc.core.later import Deferred
from streamalloc.core.properties import MemHandleType
from streamalloc.ipc.internal import left
from streamalloc.multicast.objects.multicast_object import MulticastObject
from streamalloc.vmm import AddressRange, Mapping, PhysicalMemory
from streamalloc.vmm.internal import import_memory

__all__ = ["RankResources", "finish", "in_time"]

Handle: TypeAlias = Fd | bytes


class RankResources(Deferred):
    """The memory of all ranks as this process has it, with the multicast object, the addresses and the mappings.

    ``devices`` are those of this process's ranks, by rank: they get access to everything.
    """

    def __init__(self, door: Door, devices: dict[int, Device], size: int) -> None:
        self.door: Door = door
        self.devices: dict[int, Device] = devices
        self.size: int = size
        self.kind: MemHandleType = MemHandleType.NONE
        self.physical_bytes: int = 0
        self.handles: list[Fd] = []
        """Descriptors that are open here until everything is imported."""
        self.memories: dict[int, PhysicalMemory] = {}
        """By rank, as what maps it."""
        self.replicas: dict[int, Mapping] = {}
        self.going = False
        """Whether giving the memory back has begun: its work was waited for, and some of it may have gone."""
        self.multicast: MulticastObject | None = None
        """The multicast object, if there is one, and what maps it."""
        self.view: Mapping | None = None
        self.ranges: list[AddressRange] = []
        """The memories of all ranks side by side, and the multicast object."""

    # -- the steps, each for one rank of this process --------------------------------------------------------

    def create(self, rank: int, multicast: bool) -> None:
        """Make the rank's memory; rank 0 makes the multicast object, too."""
        device = self.devices[rank]
        self.memories[rank] = PhysicalMemory(self.physical_bytes, device, handle_types=self.kind)
        if multicast and rank == 0:
            self.multicast = MulticastObject(
                self.physical_bytes, self.size, handle_types=self.kind, driver=device.driver
            )

    def export(self, rank: int) -> list[Handle]:
        """Handles for the other processes: of the rank's memory, and of the multicast object if it has made that."""
        exported: list[Handle] = []
        for thing in (self.memories[rank], self.multicast):
            if thing is not None:
                handle = thing.export(self.kind)
                self.keep(handle)
                exported.append(handle)
        return exported

    def keep(self, *handles: Handle) -> None:
        """Keep descriptors until everything is imported."""
        self.handles += [handle for handle in handles if isinstance(handle, Fd)]

    def import_handles(self, rank: int, given: Sequence[Sequence[Handle]], multicast: bool) -> None:
        """Import what the other ranks gave, and close the descriptors."""
        for other, handles in enumerate(given):
            expected = 1 + (multicast and other == 0)
            if len(handles) != expected:
                raise ValueError(f"rank {other} gave {len(handles)} handles instead of {expected}")
        if multicast and rank != 0:
            self.multicast = MulticastObject.from_handle(
                given[0][1], self.physical_bytes, self.size, handle_types=self.kind, driver=self.door.driver
            )
        for other, handles in enumerate(given):
            if other != rank:
                self.memories[other] = import_memory(self.door, handles[0], self.physical_bytes)
        # Who has imported what they stand for needs them no more.
        self._close_handles()

    def add(self, rank: int) -> None:
        """Add the rank's device to the team of the multicast object."""
        self._object.add_device(self.devices[rank])

    def bind(self, rank: int) -> None:
        """Bind the rank's memory. The driver would block here while a device is missing in the team."""
        self._object.team_complete()
        self._object.bind(self.memories[rank], device=self.devices[rank])

    def reserve(self) -> None:
        """Reserve the addresses, which stay until the end."""
        if self.ranges:
            return
        nbytes, driver = self.physical_bytes, self.door.driver
        self.ranges.append(AddressRange(self.size * nbytes, driver=driver))
        if self.multicast is not None:
            # The largest power of two in its size is all that a multicast object asks of its address.
            self.ranges.append(AddressRange(nbytes, alignment=nbytes & -nbytes, driver=driver))

    def map(self) -> None:
        """Map the memories, and the multicast object."""
        for rank in range(self.size):
            self.replicas[rank] = self.ranges[0].map(self.memories[rank], rank * self.physical_bytes)
        if self.multicast is not None:
            self.view = self.ranges[1].map(self.multicast)

    def access(self) -> None:
        """Give the devices of this process access to all of it."""
        for range in self.ranges:
            range.set_access(self.devices.values())

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether there is anything to give back."""
        return bool(self.handles or self.multicast or self.memories or self.ranges)

    def give_memory_back(self) -> None:
        """Give everything but the addresses back, in the order that the driver asks for.

        No work may be under way that uses any of it. What fails is kept, with all that has to go after it: call it
        again.

        Raises
        ------
        CudaError
            The first call that failed, with the others attached.
        """
        self.going = True
        self._close_handles()
        if self.multicast is not None:
            # The work of all devices was waited for.
            self.multicast.end(after=())
        for range in self.ranges:
            range.unmap(after=())
        undo_all(memory.close for memory in self.memories.values())
        self.multicast = self.view = None
        self.replicas.clear()
        self.memories.clear()
        self.going = False

    def attempt(self) -> bool:
        """Give everything back, as :meth:`give_memory_back`, and then the addresses."""
        self.give_memory_back()
        undo_all(range.close for range in self.ranges)
        self.ranges.clear()
        return True

    @property
    def _object(self) -> MulticastObject:
        assert self.multicast is not None
        return self.multicast

    def _close_handles(self) -> None:
        while self.handles:
            self.handles[-1].close()
            del self.handles[-1]


def finish(devices: Iterable[Device], end: float | None, lost: list[CudaError]) -> None:
    """Block until devices have done all their work; see :func:`in_time`."""
    for device in devices:
        synchronize = functools.partial(door_behind(device).call, "cuCtxSynchronize")
        if _is_idle(device):
            _do(device, synchronize, lost)
        else:
            in_time(device, synchronize, end, lost)


def _is_idle(device: Device) -> bool:
    """Whether a device has no work left, as it mostly has: waiting in time takes a thread."""
    with contextlib.suppress(CudaError):
        return context_event(device).query()
    return False


def _do(device: Device, do: Callable[[], object], lost: list[CudaError]) -> None:
    try:
        with device.current():
            do()
    except CaptureError:
        raise
    except CudaError as error:
        lost.append(error)


def in_time(device: Device, do: Callable[[], object], end: float | None, lost: list[CudaError]) -> None:
    """Do something that waits for a device; nothing in the driver has a time limit.

    ``lost`` gets the error of a device whose work has failed: no work is left there, either.

    Raises
    ------
    TimeoutError
        It was not done by ``end``, a moment on the monotonic clock: a stream may wait for a rank that never answers.
    CaptureError
        Other code captures a stream: devices cannot be synchronised then.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            _do(device, do, lost)
        except Exception as error:
            failed.append(error)

    waiter = threading.Thread(target=run, name="streamalloc waits for a device", daemon=True)
    waiter.start()
    waiter.join(None if end is None else min(left(end), threading.TIMEOUT_MAX))
    if waiter.is_alive():
        raise TimeoutError(f"{device!r} has not done its work in time")
    if failed:
        raise failed[0]
