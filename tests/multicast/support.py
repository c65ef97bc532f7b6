"""Helpers for the tests of multicast objects."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import streamalloc as sa
from streamalloc import multicast, vmm
from streamalloc.core.deferred import deferred_queue
from streamalloc.core.session import Session
from tests.support import MiB, eventually

PAGE = 2 * MiB
TEAM = 4
"""Number of devices of the machines of these tests, unless a test has another one."""
SHAREABLE = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


def all_ended(driver: Any, within: float = 2.0) -> bool:
    """Whether everything has ended that was left for later, once its devices are done."""
    later = deferred_queue(Session.of(driver))

    def ended() -> bool:
        later.work()
        return not len(later)

    return eventually(ended, within)


def added(nbytes: int, devices: list[sa.Device], **options: Any) -> multicast.MulticastObject:
    """A multicast object of these devices."""
    made = multicast.MulticastObject(nbytes, len(devices), driver=devices[0].driver, **options)
    for device in devices:
        made.add_device(device)
    return made


class Team:
    """A multicast object of all devices of a driver, memory bound on each, and views of everything."""

    def __init__(self, driver: Any, pages: int = 2) -> None:
        self.devices = sa.Device.all(driver)
        self.object = added(pages * PAGE, self.devices)
        self.memories = [vmm.PhysicalMemory(device, pages * PAGE) for device in self.devices]
        self.bindings = [self.object.bind(memory) for memory in self.memories]
        self.ranges = [vmm.AddressRange(pages * PAGE, driver=driver) for _ in self.devices]
        self.unicast = [
            range.map(memory, access=self.devices) for range, memory in zip(self.ranges, self.memories, strict=True)
        ]
        self.view = self.object.map(access=self.devices)
        self.range = vmm.AddressRange(2 * pages * PAGE, driver=driver)
        self.alias = self.range.map(self.object, pages * PAGE, access=self.devices[0])


def misorders(calls: Iterable[Any], begun: int = 0) -> list[str]:
    """Calls of a trace that release something in the wrong order.

    The order is: unbind, unmap a multicast object, release it, release the memory that was bound to it, free the
    addresses that either was mapped at. What was undone by hand before call ``begun`` does not count.
    """
    order = Order()
    for number, call in enumerate(calls):
        order.by_hand = number < begun
        if number == begun:
            order.wrong.clear()
        if not call.answer[0] and hasattr(order, call.name):
            numbers = [int(arg) if hasattr(arg, "__int__") else 0 for arg in call.args]
            value = int(call.answer[1]) if len(call.answer) == 2 and hasattr(call.answer[1], "__int__") else 0
            getattr(order, call.name)(value, *numbers)
    return order.wrong


class Order:
    """Follows a trace; its methods take the answer and the arguments of the driver call of their name."""

    def __init__(self) -> None:
        self.by_hand = False
        self.objects: set[int] = set()
        self.released: set[int] = set()
        self.holders: Counter[int] = Counter()
        self.bound: list[tuple[int, int, int]] = []  # object, offset, memory
        self.team: dict[int, set[int]] = {}  # the memory that was ever bound to an object
        self.mapped: dict[int, tuple[int, int]] = {}  # address: size and handle
        self.ranges: dict[int, int] = {}
        self.inside: dict[int, set[int]] = {}  # the handles that were ever mapped in a range
        self.wrong: list[str] = []

    def cuMulticastCreate(self, handle: int, *_: int) -> None:
        self.holders[handle] += 1
        self.objects.add(handle)
        self.team[handle] = set()

    def cuMemCreate(self, handle: int, *_: int) -> None:
        self.holders[handle] += 1

    cuMemRetainAllocationHandle = cuMemCreate

    def cuMemAddressReserve(self, address: int, size: int, *_: int) -> None:
        self.ranges[address] = size

    def cuMulticastBindMem(self, _: int, handle: int, offset: int, memory: int, *__: int) -> None:
        self.bound.append((handle, offset, memory))
        self.team[handle].add(memory)

    def cuMulticastBindAddr(self, _: int, handle: int, offset: int, address: int, *__: int) -> None:
        found = [memory for at, (size, memory) in self.mapped.items() if at <= address < at + size]
        self.cuMulticastBindMem(0, handle, offset, found[0] if found else 0)

    def cuMulticastUnbind(self, _: int, handle: int, device: int, offset: int, *__: int) -> None:
        # Of one offset the bindings of all devices go, one by one, in the order in which they were made.
        found = next(one for one in self.bound if one[:2] == (handle, offset))
        self.bound.remove(found)
        if self.by_hand and all(one[2] != found[2] for one in self.bound):
            self.team[handle].discard(found[2])

    def cuMemMap(self, _: int, address: int, size: int, offset: int, handle: int, *__: int) -> None:
        self.mapped[address] = size, handle
        base = next(at for at, whole in self.ranges.items() if at <= address < at + whole)
        self.inside.setdefault(base, set()).add(handle)

    def cuMemUnmap(self, _: int, address: int, size: int) -> None:
        for at in [at for at in self.mapped if address <= at < address + size]:
            _, handle = self.mapped.pop(at)
            if self.by_hand:
                for handles in self.inside.values():
                    handles.discard(handle)
            if any(one[0] == handle for one in self.bound):
                self.wrong.append(f"object {handle:#x} unmapped before it was unbound")

    def cuMemRelease(self, _: int, handle: int) -> None:
        # Memory that was closed by hand stays mapped, and usable.
        self.holders[handle] -= 1
        if self.holders[handle]:
            return
        self.released.add(handle)
        if any(handle in (one[0], one[2]) for one in self.bound):
            self.wrong.append(f"{handle:#x} released while it was bound")
        if handle in self.objects and any(one == handle for _, one in self.mapped.values()):
            self.wrong.append(f"{handle:#x} released while it was mapped")
        for one in self.objects - self.released:
            if handle in self.team[one]:
                self.wrong.append(f"memory {handle:#x} released before object {one:#x}")

    def cuMemAddressFree(self, _: int, address: int, *__: int) -> None:
        involved = self.inside.get(address, set())
        for one in self.objects:
            left = ({one} | self.team[one]) - self.released
            if left and (one in involved or self.team[one] & involved):
                self.wrong.append(f"addresses {address:#x} freed before {[hex(handle) for handle in left]}")
        del self.ranges[address]
