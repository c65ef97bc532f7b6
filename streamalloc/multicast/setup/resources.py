"""What one process holds of a symmetric memory: made step by step, and given back in the one order that is right."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import CaptureError, CudaError, attach
from streamalloc.core.fd import Fd
from streamalloc.core.properties import MemHandleType
from streamalloc.ipc.transport.deadlines import left
from streamalloc.multicast.objects.multicast_object import Binding, MulticastObject
from streamalloc.vmm import AddressRange, Mapping, PhysicalMemory
from streamalloc.vmm.internal import import_memory

__all__ = ["Parts", "finish", "in_time"]

Handle: TypeAlias = Fd | bytes


class Parts:
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
        "multicast",
        "physical_bytes",
        "replicas",
        "size",
        "unicast",
        "view",
        "view_mapping",
    )

    def __init__(self, door: Door, devices: dict[int, Device], size: int) -> None:
        self.door = door
        self.devices = devices
        self.size = size
        self.kind = MemHandleType.NONE
        self.physical_bytes = 0
        self.memories: dict[int, PhysicalMemory] = {}
        """By rank."""
        self.multicast: MulticastObject | None = None
        self.bindings: list[Binding] = []
        self.unicast: AddressRange | None = None
        """The memories of all ranks, side by side."""
        self.view: AddressRange | None = None
        """The multicast object."""
        self.replicas: list[Mapping] = []
        """By rank."""
        self.view_mapping: Mapping | None = None
        self.handles: list[Fd] = []
        """Descriptors that are open here until everything is imported."""

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
        exported = [self._export(self.memories[rank])]
        if self.multicast is not None:
            exported.append(self._export(self.multicast))
        return exported

    def _export(self, thing: PhysicalMemory | MulticastObject) -> Handle:
        handle = thing.export(self.kind)
        if isinstance(handle, Fd):
            self.handles.append(handle)
        return handle

    def take(self, rank: int, given: Sequence[Sequence[Handle]], multicast: bool) -> None:
        """Import what the other ranks gave, and close the descriptors."""
        expected = [1 + (multicast and other == 0) for other in range(self.size)]
        for other, handles in enumerate(given):
            if len(handles) != expected[other]:
                raise ValueError(f"rank {other} gave {len(handles)} handles instead of {expected[other]}")
        if multicast and rank != 0:
            self.multicast = MulticastObject.from_handle(
                given[0][1], self.physical_bytes, self.size, handle_types=self.kind, driver=self.door.driver
            )
        for other, handles in enumerate(given):
            if other != rank:
                self.memories[other] = self._import(handles[0])
        self.close_handles()

    def _import(self, handle: Handle) -> PhysicalMemory:
        return import_memory(self.door, handle, self.physical_bytes)

    def close_handles(self) -> None:
        """Close the descriptors: who has imported what they stand for needs them no more."""
        while self.handles:
            self.handles.pop().close()

    def add(self, rank: int) -> None:
        """Add the rank's device to the team of the multicast object."""
        assert self.multicast is not None
        self.multicast.add_device(self.devices[rank])

    def bind(self, rank: int) -> None:
        """Bind the rank's memory. The driver would block here while a device is missing in the team."""
        assert self.multicast is not None
        self.multicast.team_complete()
        self.bindings.append(self.multicast.bind(self.memories[rank], device=self.devices[rank]))

    def reserve(self) -> None:
        """Reserve the addresses."""
        driver = self.door.driver
        self.unicast = AddressRange(self.size * self.physical_bytes, driver=driver)
        if self.multicast is not None:
            self.view = AddressRange(
                self.physical_bytes, alignment=_power_of_two_in(self.physical_bytes), driver=driver
            )

    def map(self) -> None:
        """Map the memories, and the multicast object."""
        assert self.unicast is not None
        for rank in range(self.size):
            self.replicas.append(self.unicast.map(self.memories[rank], rank * self.physical_bytes))
        if self.view is not None and self.multicast is not None:
            self.view_mapping = self.view.map(self.multicast)

    def access(self) -> None:
        """Give the devices of this process access to all of it."""
        for part in (self.unicast, self.view):
            if part is not None:
                part.set_access(self.devices.values())

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether there is anything to give back."""
        return bool(self.memories or self.multicast or self.unicast or self.view or self.handles)

    def release(self) -> None:
        """Give everything back: unbind, then the multicast object, the memories, and the addresses last.

        No work may be under way that uses any of it. What fails is kept, the rest goes: call it again.

        Raises
        ------
        CudaError
            The first call that failed, with the others attached.
        """
        errors: list[BaseException] = []
        self.replicas, self.view_mapping = [], None
        _attempt(self.close_handles, errors)
        self.bindings = [one for one in self.bindings if not _attempt(functools.partial(one.close, ()), errors)]
        unmapped = _unmap(self.view, errors)
        if (
            self.multicast is not None
            and not self.bindings
            and unmapped
            and _attempt(functools.partial(self.multicast.close, ()), errors)
        ):
            self.multicast = None
        unmapped = _unmap(self.unicast, errors)
        if self.multicast is None and unmapped:
            memories = self.memories.items()
            self.memories = {rank: memory for rank, memory in memories if not _attempt(memory.close, errors)}
        if not self.memories and not self.multicast:
            if self.view is not None and _attempt(self.view.close, errors):
                self.view = None
            if self.unicast is not None and _attempt(self.unicast.close, errors):
                self.unicast = None
        if errors:
            for later in errors[1:]:
                attach(errors[0], later)
            raise errors[0]


def _attempt(undo: Callable[[], object], errors: list[BaseException]) -> bool:
    try:
        undo()
    except Exception as error:
        errors.append(error)
        return False
    return True


def _unmap(part: AddressRange | None, errors: list[BaseException]) -> bool:
    return part is None or _attempt(lambda: part.unmap(after=()), errors)


def _power_of_two_in(number: int) -> int:
    """The largest power of two that divides a number: all that a multicast object's size asks of its address."""
    return number & -number


def finish(devices: Iterable[Device], end: float | None, lost: list[CudaError]) -> None:
    """Block until devices have done all their work; see :func:`in_time`."""
    for device in devices:
        in_time(device, functools.partial(device._door.call, "cuCtxSynchronize"), end, lost)


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
