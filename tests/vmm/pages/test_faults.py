"""Every public operation on pages, with each of its driver calls failing in turn, or the next one too."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.support import end_what_was_dropped, eventually, read
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import fill
from tests.vmm.support import PAGE

CLASSES: list[type] = [vmm.PageArena, vmm.PageSpace, vmm.HostTier, vmm.PageTable]


class Paged(Faults):
    """An arena, a space with pages of each state, and a tier."""

    needless = ("cuMemUnmap",)  # of addresses without memory, before pages are mapped there

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.arena = keep(vmm.PageArena(self.device, limit=10 * PAGE))
        self.tier = keep(vmm.HostTier(self.device, check=True))
        self.space = keep(self.arena.space(PAGES * PAGE, stream=self.stream))
        self.space.commit([0, 1, 2, 6])
        self.space.alias([4, 5], self.space, [0, 1])
        fill(self.space, [2, 4, 5, 6])
        self.space.swap_out(6, self.tier)
        self.stream.synchronize()
        self.table = keep(vmm.PageTable(self.space))
        self.things = {
            vmm.PageArena: self.arena,
            vmm.PageSpace: self.space,
            vmm.HostTier: self.tier,
            vmm.PageTable: self.table,
            object: None,
        }

    def shape(self) -> dict[str, Any]:
        space = self.space
        end_what_was_dropped()
        rest = {} if space.closed else {"values": [self.value(place) for place in (2, 4, 5)], "mapped": self.mapped()}
        eventually(lambda: not self.arena.statistics().parked, 0.2)
        found = super().shape()
        for kind in ("physical memory", "pinned memory", "stream"):
            found.pop(kind, None)  # what was created stays: spare pages, the memory of the tier, what clears pages
        return {
            **found,
            "parked": self.arena.statistics().parked,
            "committed": space.closed or space.committed.tolist(),
            "stored": space.closed or sorted(space._places.stored),
            **rest,
        }

    def value(self, place: int) -> int:
        """The first byte of a page; -1 if nothing is mapped, which only two faults may leave."""
        with contextlib.suppress(sa.EvictedError):
            return int(read(self.space[place * PAGE : place * PAGE + 16])[0])
        return -1

    def mapped(self) -> list[int]:
        """The permissions of the device, as the driver knows them. A page that is not committed may have kept more."""
        where, committed = self.device.location.to_driver(), set(self.space.committed.tolist())
        starts = range(self.space.address, self.space.address + PAGES * PAGE, PAGE)
        rights = [int(self.machine.cuMemGetAccess(where, start)[1] or 0) for start in starts]
        return [right if place in committed else min(right, 1) for place, right in enumerate(rights)]


def _space(world: Paged) -> Any:
    return world.arena.space(2 * PAGE)


def _prepared(world: Paged, one: vmm.PageArena) -> None:
    one.prepare(2).result()
    world.shapes.append(world.shape())
    one.prepare(3).result()


def _swapped(world: Paged, one: vmm.PageSpace) -> None:
    one.swap_out([2, 4], world.tier)
    world.stream.synchronize()
    world.shapes.append(world.shape())
    one.swap_in([2, 4])


def _saved(world: Paged, one: vmm.HostTier) -> None:
    blocks = range(0, PAGE // 4096, 32)
    stored = one.save(world.space, blocks, 4096, world.stream)
    try:
        one.load(stored, world.space, blocks, world.stream)
    finally:
        stored.drop()


PAGE_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "PageArena.prepare": _prepared,
    "PageArena.space": lambda world, one: one.space(2 * PAGE),
    "PageSpace.alias": lambda world, one: one.alias([8, 9, 12], one, [2, 0, 1]),
    "PageSpace.commit": lambda world, one: one.commit([2, 7, 8, 10]),
    "PageSpace.make_private": lambda world, one: one.make_private([1, 2, 4]),
    "PageSpace.prepare": lambda world, one: one.prepare([2, 7, 8]).result(),
    "PageSpace.release": lambda world, one: one.release([0, 2, 6], after=world.stream),
    "PageSpace.shared": lambda world, one: one.shared([0, 2]),
    "PageSpace.swap_in": lambda world, one: one.swap_in(range(PAGES)),
    "PageSpace.swap_out": _swapped,
    "PageTable.update": lambda world, one: (world.space.commit([8, 9]), one.update()),
    "HostTier.hold": lambda world, one: one.hold([PAGE], world.stream)[0].drop(),
    "HostTier.prepare": lambda world, one: one.prepare(40 * PAGE),
    "HostTier.load": lambda world, one: None,  # with save
    "HostTier.reserve": lambda world, one: one.reserve(40, PAGE),
    "HostTier.save": _saved,
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "PageArena": lambda world: vmm.PageArena(world.device),
    "PageSpace": _space,
    "PageTable": lambda world: vmm.PageTable(world.space, "int32"),
    "HostTier": lambda world: vmm.HostTier(world.device),
}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, PAGE_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Paged(machine), kind, act, most=5)
