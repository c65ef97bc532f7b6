"""Every public operation on sparse arrays and striped memory, with each of its driver calls failing in turn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.vmm.sleep import Tagged
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.vmm.support import PAGE

CLASSES: list[type] = [vmm.SparseArray, vmm.TilePool, vmm.StripedBuffer, Tagged, vmm.DiskTier]


class Tiles(Faults):
    """One of each class."""

    def __init__(self, machine: Any, folder: Path) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.tiles = keep(vmm.TilePool(self.device, PAGE))
        self.spare = keep(vmm.TilePool(self.device, PAGE))
        self.array = keep(vmm.SparseArray(self.device, (512, 512), np.float32, levels=10))
        self.array.map(self.tiles, (slice(0, 128), slice(0, 128)), stream=self.stream)
        # Each free tile was unmapped on another stream, for which the next map waits.
        with vmm.SparseArray(self.device, (31 * 256, 256)) as filler:
            filler.map(self.tiles, stream=self.other)
            filler.unmap(stream=self.other)
        self.data = np.zeros((128, 128), np.float32)
        self.host_pool = keep(sa.MemoryPool(sa.MemLocation.host_numa(0), driver=self.driver))
        self.host_pool.set_access(self.device, sa.MemAccess.READWRITE)
        self.striped = keep(vmm.stripe([self.device], PAGE))
        self.group = keep(vmm.SleepGroup(self.device))
        self.disk = keep(vmm.DiskTier(self.device, folder, block=4096, threads=1, persistent=True))
        self.sleeper = keep(self.group.allocate(5000))
        self.group.sleep(backup=self.disk)
        self.group.wake()
        self.stream.synchronize()
        self.things = {
            vmm.SparseArray: self.array,
            vmm.TilePool: self.spare,
            vmm.StripedBuffer: self.striped,
            Tagged: self.group.tagged("one"),
            vmm.DiskTier: self.disk,
            object: None,
        }

    def close(self) -> None:
        super().close()
        self.device.synchronize()  # with the free of a backup on the default stream, for which its pool waits

    def shape(self) -> dict[str, Any]:
        striped = self.striped
        return {
            **super().shape(),
            "tiles": (self.tiles.free_tiles, self.array.closed or self.array.mapped_bytes),
            "striped": striped.closed or (striped.mapped_bytes, striped.evicted),
            "sleeper": self.sleeper.closed or (self.sleeper.mapped_bytes, self.sleeper.evicted),
        }


def _evicted_to_disk(world: Tiles, one: vmm.DiskTier) -> None:
    if not world.sleeper.evicted:
        world.sleeper.evict(one, stream=world.stream)
        world.shapes.append(world.shape())
    world.sleeper.restore(stream=world.stream)


def _resumed(world: Tiles, one: vmm.DiskTier) -> None:
    world.group.resume(backup=one)
    world.shapes.append(world.shape())
    world.group.wake()


def _stored_blocks(world: Tiles, one: vmm.DiskTier) -> None:
    stored = one.save(world.striped, range(0, 64, 3), 4096, world.stream)
    try:
        one.load(stored, world.striped, range(0, 64, 3), world.stream)
    finally:
        stored.drop()


CORNER = (slice(0, 128), slice(0, 128))


def _tail(world: Tiles, one: vmm.SparseArray) -> None:
    if one.mapped_bytes == one.tile_bytes:  # of the tile that is mapped from the start
        one.map_tail(world.tiles, stream=world.stream)
    world.shapes.append(world.shape())
    one.unmap_tail(stream=world.stream)


TILE_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "SparseArray.copy_from": lambda world, one: one.copy_from(world.data, world.stream, region=CORNER),
    "SparseArray.copy_to": lambda world, one: one.copy_to(world.data, world.stream, region=CORNER),
    "SparseArray.map": lambda world, one: one.map(world.tiles, (slice(128, 256), slice(0, 128)), stream=world.stream),
    "map_tail": _tail,
    "SparseArray.mapped": lambda world, one: None,  # mapped_tiles() by its old name
    "SparseArray.unmap": lambda world, one: one.unmap(stream=world.other),
    "unmap_tail": lambda world, one: None,  # with map_tail
    "DiskTier.hold": _evicted_to_disk,
    "DiskTier.load": lambda world, one: None,  # with save
    "DiskTier.reserve": lambda world, one: one.reserve(4, PAGE),
    "DiskTier.resume": _resumed,
    "DiskTier.save": _stored_blocks,
    "Tagged.allocate": lambda world, one: one.allocate(PAGE, world.stream),
    "StripedBuffer.set_access": lambda world, one: one.set_access(world.device, sa.MemAccess.READWRITE),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "SparseArray": lambda world: vmm.SparseArray(world.device, (1024, 1024)),
    "SparseArray of levels": lambda world: vmm.SparseArray(world.device, (512, 512), levels=10),
    "TilePool": lambda world: vmm.TilePool(world.device, PAGE),
    "stripe": lambda world: vmm.stripe([world.device], 4 * PAGE),
    "dma_buf": lambda world: vmm.dma_buf(world.striped),
}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, TILE_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, tmp_path: Path, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Tiles(machine, tmp_path), kind, act, most=5)
