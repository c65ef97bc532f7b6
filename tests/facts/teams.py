"""Shorthand for two devices, and for multicast objects: a team, what each device has bound, and what is there."""

from __future__ import annotations

from typing import Any

from tests.facts.enums import DEVICE, NO_HANDLE, READWRITE
from tests.facts.support import PAGE, Answer, Rig, said, value


class Contexts:
    """The contexts of both devices and a stream in each, with device 0's context current."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw = rig, rig.raw
        first, on_first = rig.context, rig.stream()
        self.contexts = first, rig.device_context(1)
        self.streams = on_first, rig.stream()
        rig.use(first)

    def use(self, device: int) -> None:
        self.rig.use(self.contexts[device])


def properties(raw: Any, devices: int, size: int = PAGE, handle_types: int = NO_HANDLE, flags: int = 0) -> Any:
    props = raw.CUmulticastObjectProp()
    props.numDevices, props.size, props.handleTypes, props.flags = devices, size, handle_types, flags
    return props


class Team:
    """A multicast object for the first devices of the machine; nothing is added, bound or mapped yet."""

    def __init__(self, rig: Rig, devices: int = 2, size: int = PAGE, handle_types: int = NO_HANDLE) -> None:
        self.rig, self.raw = rig, rig.raw
        self.size, self.handle_types = size, handle_types
        self.devices = range(devices)
        self.object = self._keep(self.raw.cuMulticastCreate(properties(self.raw, devices, size, handle_types)))
        self.memory: list[Any] = []
        self.views: list[int] = []
        """Addresses on device 0 of the memory that each device has bound."""

    def _keep(self, answer: Answer) -> Any:
        return value(self.rig.keep_memory(answer))

    def add(self, device: int) -> str:
        return said(self.raw.cuMulticastAddDevice(self.object, device))

    def add_all(self) -> Team:
        assert {self.add(device) for device in self.devices} == {"SUCCESS"}
        return self

    def bind(self, memory: Any, offset: int = 0, start: int = 0, size: int | None = None, flags: int = 0) -> str:
        size = self.size if size is None else size
        return said(self.raw.cuMulticastBindMem(self.object, offset, memory, start, size, flags))

    def bind_address(self, address: int, size: int | None = None) -> str:
        return said(self.raw.cuMulticastBindAddr(self.object, 0, address, size or self.size, 0))

    def unbind(self, device: int, offset: int = 0, size: int | None = None) -> str:
        return said(self.raw.cuMulticastUnbind(self.object, device, offset, size or self.size))

    def bind_all(self) -> Team:
        """Memory of each device for the whole object, with a view of it for device 0."""
        for device in self.devices:
            memory = self.rig.memory(self.size, id=device, handle_types=self.handle_types)
            assert self.bind(memory) == "SUCCESS"
            self.memory.append(memory)
            self.views.append(self.view(memory))
        return self

    def view(self, memory: Any, size: int | None = None) -> int:
        size = size or self.size
        address = self.rig.map(self.rig.reserve(size), memory, size)
        assert self.rig.set_access(address, size, (DEVICE, 0, READWRITE)) == "SUCCESS"
        return address

    def map(self, *devices: int) -> int:
        """The object at a new address, for some devices (0 if none is named)."""
        address = self.rig.map(self.rig.reserve(self.size), self.object, self.size)
        wanted = [(DEVICE, device, READWRITE) for device in devices or (0,)]
        assert self.rig.set_access(address, self.size, *wanted) == "SUCCESS"
        return address

    def read(self, offset: int = 0, size: int = 4) -> list[list[int]]:
        """Some bytes of each device's memory."""
        return [self.rig.read(view + offset, size) for view in self.views]


def whole(rig: Rig, devices: int = 2, **options: int) -> tuple[Team, int]:
    """A team that is ready, and the address of its object."""
    team = Team(rig, devices, **options).add_all().bind_all()
    return team, team.map()
