"""What one process holds of a symmetric memory: made step by step, and given back in the one order that is right."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import CaptureError, CudaError, attach
from streamalloc.core.fd import Fd
from streamalloc.core.later import Deferred
from streamalloc.core.properties import MemHandleType
from streamalloc.ipc.internal import left
from streamalloc.multicast.objects.multicast_object import Binding, MulticastObject
from streamalloc.vmm import AddressRange, Mapping, PhysicalMemory
from streamalloc.vmm.internal import import_memory

__all__ = ["RankResources", "finish", "in_time"]

Handle: TypeAlias = Fd | bytes

_UNICAST, _VIEW = 0, 1


class RankResources(Deferred):
    """The memory of all ranks as this process has it, with the multicast object, the addresses and the mappings.

    ``devices`` are those of this process's ranks, by rank: they get access to everything.
    """

    __slots__ = (
        "bindings",
        "devices",
        "door",
        "handles",
        "kind",
        "memories",
        "objects",
        "physical_bytes",
        "ranges",
        "replicas",
        "size",
        "views",
    )

    def __init__(self, door: Door, devices: dict[int, Device], size: int) -> None:
        self.door: Door = door
        self.devices: dict[int, Device] = devices
        self.size: int = size
        self.kind: MemHandleType = MemHandleType.NONE
        self.physical_bytes: int = 0
        self.handles: dict[int, Fd] = {}
        """Descriptors that are open here until everything is imported."""
        self.bindings: dict[int, Binding] = {}
        """By rank, as the next two."""
        self.replicas: dict[int, Mapping] = {}
        self.memories: dict[int, PhysicalMemory] = {}
        self.objects: dict[int, MulticastObject] = {}
        """The multicast object, if there is one."""
        self.views: dict[int, Mapping] = {}
        """What maps it."""
        self.ranges: dict[int, AddressRange] = {}
        """The memories of all ranks side by side, and the multicast object."""

    @property
    def multicast(self) -> MulticastObject | None:
        """The multicast object; None where there is none."""
        return self.objects.get(_VIEW)

    @property
    def view(self) -> Mapping | None:
        """The mapping of the multicast object; None where there is none."""
        return self.views.get(_VIEW)

    # -- the steps, each for one rank of this process --------------------------------------------------------

    def create(self, rank: int, multicast: bool) -> None:
        """Make the rank's memory; rank 0 makes the multicast object, too."""
        device = self.devices[rank]
        self.memories[rank] = PhysicalMemory(self.physical_bytes, device, handle_types=self.kind)
        if multicast and rank == 0:
            self.objects[_VIEW] = MulticastObject(
                self.physical_bytes, self.size, handle_types=self.kind, driver=device.driver
            )

    def export(self, rank: int) -> list[Handle]:
        """Handles for the other processes: of the rank's memory, and of the multicast object if it has made that."""
        exported: list[Handle] = []
        for thing in (self.memories[rank], *self.objects.values()):
            handle = thing.export(self.kind)
            self.keep(handle)
            exported.append(handle)
        return exported

    def keep(self, *handles: Handle) -> None:
        """Keep descriptors until everything is imported."""
        for handle in handles:
            if isinstance(handle, Fd):
                self.handles[len(self.handles)] = handle

    def import_handles(self, rank: int, given: Sequence[Sequence[Handle]], multicast: bool) -> None:
        """Import what the other ranks gave, and close the descriptors."""
        for other, handles in enumerate(given):
            expected = 1 + (multicast and other == 0)
            if len(handles) != expected:
                raise ValueError(f"rank {other} gave {len(handles)} handles instead of {expected}")
        if multicast and rank != 0:
            self.objects[_VIEW] = MulticastObject.from_handle(
                given[0][1], self.physical_bytes, self.size, handle_types=self.kind, driver=self.door.driver
            )
        for other, handles in enumerate(given):
            if other != rank:
                self.memories[other] = import_memory(self.door, handles[0], self.physical_bytes)
        # Who has imported what they stand for needs them no more.
        _close_all(self.handles)

    def add(self, rank: int) -> None:
        """Add the rank's device to the team of the multicast object."""
        self.objects[_VIEW].add_device(self.devices[rank])

    def bind(self, rank: int) -> None:
        """Bind the rank's memory. The driver would block here while a device is missing in the team."""
        self.objects[_VIEW].team_complete()
        self.bindings[rank] = self.objects[_VIEW].bind(self.memories[rank], device=self.devices[rank])

    def reserve(self) -> None:
        """Reserve the addresses."""
        driver = self.door.driver
        self.ranges[_UNICAST] = AddressRange(self.size * self.physical_bytes, driver=driver)
        if self.objects:
            self.ranges[_VIEW] = AddressRange(
                self.physical_bytes, alignment=_power_of_two_in(self.physical_bytes), driver=driver
            )

    def map(self) -> None:
        """Map the memories, and the multicast object."""
        for rank in range(self.size):
            self.replicas[rank] = self.ranges[_UNICAST].map(self.memories[rank], rank * self.physical_bytes)
        if self.objects:
            self.views[_VIEW] = self.ranges[_VIEW].map(self.objects[_VIEW])

    def access(self) -> None:
        """Give the devices of this process access to all of it."""
        for range in self.ranges.values():
            range.set_access(self.devices.values())

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether there is anything to give back."""
        return bool(self.handles or self.bindings or self.objects or self.memories or self.ranges)

    def attempt(self) -> bool:
        """Give everything back, in the order that the driver asks for. No work may be under way that uses any of it.

        What fails is kept, with all that has to go after it: call it again.

        Raises
        ------
        CudaError
            The first call that failed, with the others attached.
        """
        _close_all(self.handles)
        _close_all(self.bindings)
        self._unmap(_VIEW, self.views)
        _close_all(self.objects)
        self._unmap(_UNICAST, self.replicas)
        _close_all(self.memories)
        _close_all(self.ranges)
        return True

    def _unmap(self, which: int, mappings: dict[int, Mapping]) -> None:
        if which in self.ranges:
            self.ranges[which].unmap(after=())
        mappings.clear()


def _close_all(held: dict[int, Any]) -> None:
    """Close everything in ``held``, and keep there what fails."""
    errors: list[Exception] = []
    for key, one in tuple(held.items()):
        try:
            if isinstance(one, (Binding, MulticastObject)):
                # The work of all devices was waited for.
                one.close(after=())
            else:
                one.close()
            del held[key]
        except Exception as error:
            errors.append(error)
    for later in errors[1:]:
        attach(errors[0], later)
    if errors:
        raise errors[0]


def _power_of_two_in(number: int) -> int:
    """The largest power of two that divides a number: all that a multicast object's size asks of its address."""
    return number & -number


def finish(devices: Iterable[Device], end: float | None, lost: list[CudaError]) -> None:
    """Block until devices have done all their work; see :func:`in_time`."""
    for device in devices:
        in_time(device, functools.partial(door_behind(device).call, "cuCtxSynchronize"), end, lost)


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
            with device.current():
                do()
        except CaptureError as error:
            failed.append(error)
        except CudaError as error:
            lost.append(error)
        except Exception as error:
            failed.append(error)

    waiter = threading.Thread(target=run, name="streamalloc waits for a device", daemon=True)
    waiter.start()
    waiter.join(None if end is None else min(left(end), threading.TIMEOUT_MAX))
    if waiter.is_alive():
        raise TimeoutError(f"{device!r} has not done its work in time")
    if failed:
        raise failed[0]
