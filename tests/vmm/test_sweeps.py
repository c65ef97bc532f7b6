"""Every public operation on sparse arrays and striped memory, with each of its driver calls failing in turn, or two."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.vmm.members import Tagged
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.support import Account, read
from tests.vmm.support import PAGE, READWRITE

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


# -- two driver calls fail, in a step and in its undo. That one fails, tests/package/test_sweeps.py has ---------------


class TestTwoFaults:
    """The undoing of a failed step fails as well: the first error is told, and the step can be taken again."""

    def failing(self, machine: Any, first: tuple[str, int], later: tuple[str, int]) -> tuple[Account, sa.Device]:
        account = Account(machine)
        driver: Any = account.driver
        for call, nth in (first, later):
            driver = sd.faulty(driver, call, nth, result="CUDA_ERROR_UNKNOWN")
        return account, sa.Device(0, driver=driver)

    @pytest.mark.parametrize(
        ("first", "later"),
        [
            (("cuMemCreate", 3), ("cuMemUnmap", 1)),
            (("cuMemMap", 3), ("cuMemRelease", 2)),
            (("cuMemSetAccess", 2), ("cuMemUnmap", 1)),
            (("cuMemSetAccess", 2), ("cuMemRelease", 3)),
        ],
    )
    @pytest.mark.parametrize("then", ["again", "shrink", "evict", "drop"])
    def test_growing(self, machine: Any, first: tuple[str, int], later: tuple[str, int], then: str) -> None:
        account, device = self.failing(machine, first, later)
        buffer = vmm.GrowableBuffer(device, 8 * PAGE, PAGE, chunk=PAGE)
        buffer.fill(7)
        device.synchronize()
        with pytest.raises(sa.CudaError) as caught:
            buffer.resize(4 * PAGE)
        assert caught.value.call == first[0]
        if later[0] != "cuMemRelease":  # that is tried again later
            assert later[0] in "".join(getattr(caught.value, "__notes__", []))
        assert buffer.nbytes == PAGE and (read(buffer) == 7).all()
        del caught
        if then == "again":
            buffer.resize(4 * PAGE)
        elif then == "shrink":
            buffer.resize(1)
            buffer.resize(4 * PAGE)
        elif then == "evict":
            buffer.evict()
            assert account.mapped == {} and "physical memory" not in account.left
            buffer.restore()
            assert len(account.mapped) == 1
            buffer.resize(4 * PAGE)
        if then != "drop":
            assert len(account.mapped) == 4 and len(account.left["physical memory"]) == 4
            assert [mapping.access(device) for mapping in buffer.mappings] == 4 * [READWRITE]
            if then != "evict":
                assert (read(buffer[: 1 if then == "shrink" else PAGE]) == 7).all()
            buffer.fill(8)
            assert (read(buffer) == 8).all()
            buffer.close()
        del buffer
        gc.collect()
        assert account.left == {}

    def test_mapping(self, machine: Any) -> None:
        """A mapping that could not be unmapped stays in the table, so that it can be unmapped later."""
        account, device = self.failing(machine, ("cuMemSetAccess", 1), ("cuMemUnmap", 1))
        with vmm.AddressRange(PAGE, driver=device.driver) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            with pytest.raises(sa.CudaError) as caught:
                addresses.map(memory, access=device)
            assert caught.value.call == "cuMemSetAccess"
            assert "cuMemUnmap" in "".join(getattr(caught.value, "__notes__", []))
            assert [mapping.memory for mapping in addresses.mappings] == [memory]
            addresses.unmap()
            addresses.map(memory, access=device)
        assert account.left == {}

    def test_of_a_block(self, machine: Any) -> None:
        """The block's own error is told, with that of the closing."""
        account, device = self.failing(machine, ("cuMemUnmap", 1), ("cuMemAddressFree", 5))
        with pytest.raises(KeyError, match="the block's own") as caught, vmm.GrowableBuffer(device, PAGE, PAGE):
            raise KeyError("the block's own")
        assert "cuMemUnmap" in "".join(getattr(caught.value, "__notes__", []))
        del caught
        gc.collect()
        assert account.left == {}
