"""Helpers for the tests of multicast objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import streamalloc as sa
from streamalloc import multicast, vmm
from streamalloc.core.deferred import deferred_queue
from streamalloc.core.session import Session
from tests.processes import eventually
from tests.support import MiB

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


class Team:
    """A multicast object of all devices of a driver, memory bound on each, and views of everything."""

    def __init__(self, driver: Any, pages: int = 2) -> None:
        self.devices = sa.Device.all(driver)
        self.object = multicast.MulticastObject(pages * PAGE, len(self.devices), driver=driver)
        for device in self.devices:
            self.object.add_device(device)
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
    objects: set[int] = set()
    released: set[int] = set()
    holders: Counter[int] = Counter()
    bound: list[tuple[int, int, int, int]] = []  # object, device, offset, memory
    team: dict[int, set[int]] = {}  # the memory that was ever bound to an object
    mapped: dict[int, tuple[int, int]] = {}  # address: size and handle
    ranges: dict[int, int] = {}
    inside: dict[int, set[int]] = {}  # the handles that were ever mapped in a range
    wrong: list[str] = []
    for number, call in enumerate(calls):
        if call.answer[0]:
            continue
        if number == begun:
            wrong.clear()
        numbers = [int(arg) if hasattr(arg, "__int__") else 0 for arg in call.args]
        value = int(call.answer[1]) if len(call.answer) == 2 and hasattr(call.answer[1], "__int__") else 0
        if call.name in ("cuMulticastCreate", "cuMemCreate", "cuMemRetainAllocationHandle"):
            holders[value] += 1
        if call.name == "cuMulticastCreate":
            objects.add(value)
            team[value] = set()
        elif call.name == "cuMemAddressReserve":
            ranges[value] = numbers[0]
        elif call.name == "cuMulticastBindMem":
            bound.append((numbers[0], -1, numbers[1], numbers[2]))
            team[numbers[0]].add(numbers[2])
        elif call.name == "cuMulticastBindAddr":
            memory = _at(mapped, numbers[2])
            bound.append((numbers[0], -1, numbers[1], memory))
            team[numbers[0]].add(memory)
        elif call.name == "cuMulticastUnbind":
            # Of one offset the bindings of all devices go, one by one, in the order in which they were made.
            found = next(one for one in bound if (one[0], one[2]) == (numbers[0], numbers[2]))
            bound.remove(found)
            if number < begun and all(one[3] != found[3] for one in bound):
                team[found[0]].discard(found[3])
        elif call.name == "cuMemMap":
            mapped[numbers[0]] = numbers[1], numbers[3]
            base = next(at for at, size in ranges.items() if at <= numbers[0] < at + size)
            inside.setdefault(base, set()).add(numbers[3])
        elif call.name == "cuMemUnmap":
            for at in [at for at in mapped if numbers[0] <= at < numbers[0] + numbers[1]]:
                handle = mapped.pop(at)[1]
                if number < begun:
                    for handles in inside.values():
                        handles.discard(handle)
                if any(one[0] == handle for one in bound):
                    wrong.append(f"object {handle:#x} unmapped before it was unbound")
        elif call.name == "cuMemRelease":
            # Memory that was closed by hand stays mapped, and usable.
            handle = numbers[0]
            holders[handle] -= 1
            if holders[handle]:
                continue
            released.add(handle)
            if any(handle in (one[0], one[3]) for one in bound):
                wrong.append(f"{handle:#x} released while it was bound")
            if handle in objects and any(one == handle for _, one in mapped.values()):
                wrong.append(f"{handle:#x} released while it was mapped")
            for one in objects - released:
                if handle in team[one]:
                    wrong.append(f"memory {handle:#x} released before object {one:#x}")
        elif call.name == "cuMemAddressFree":
            involved = inside.get(numbers[0], set())
            for one in objects:
                if one in involved or team[one] & involved:
                    left = ({one} | team[one]) - released
                    if left:
                        wrong.append(f"addresses {numbers[0]:#x} freed before {[hex(handle) for handle in left]}")
            del ranges[numbers[0]]
    return wrong


def _at(mapped: dict[int, tuple[int, int]], address: int) -> int:
    return next((handle for at, (size, handle) in mapped.items() if at <= address < at + size), 0)
