"""The chunks of a growable buffer: one record each, until somebody asks for the memory as an object."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, names, pattern, read
from tests.vmm.support import PAGE, same, write

PACKAGE = str(Path(sa.__file__).parent)
DRIVERS = tuple(f"{PACKAGE}/{folder}/" for folder in ("checker", "driver", "simulator"))


@pytest.fixture
def buffer(account: Account) -> Iterator[vmm.GrowableBuffer]:
    """Three chunks of a page, made by the fast path, with bytes in them."""
    with vmm.GrowableBuffer(account.device, 8 * PAGE) as buffer:
        for _ in range(3):
            buffer.grow(PAGE)
        write(buffer, pattern(3 * PAGE))
        yield buffer


def handles(account: Account) -> int:
    return len(account.left.get("physical memory", ()))


class TestMemory:
    def test_as_an_object(self, account: Account, buffer: vmm.GrowableBuffer) -> None:
        mapping = buffer.mappings[1]
        memory = mapping.memory
        assert isinstance(memory, vmm.PhysicalMemory) and mapping.memory is memory is buffer.mappings[1].memory
        assert (memory.nbytes, memory.location, memory.mapping_count) == (PAGE, account.device.location, 1)
        assert memory.handle in account.left["physical memory"] and handles(account) == 3
        assert memory.properties == buffer.properties == memory.query()
        assert f"{memory.handle:#x}" in repr(memory) and repr(memory) in repr(mapping)
        assert buffer.range.draw(8) == "000....." and same(buffer, pattern(3 * PAGE))

    def test_mapped_elsewhere(self, account: Account, buffer: vmm.GrowableBuffer) -> None:
        memory = buffer.mappings[2].memory
        with vmm.AddressRange(PAGE, driver=account.driver) as other:
            alias = other.map(memory, access=account.device)
            assert same(alias, pattern(3 * PAGE)[2 * PAGE :])
            with pytest.raises(sa.InUseError, match="mapped in 2 places"):
                buffer.evict()
            buffer.resize(2 * PAGE)
            assert memory.closed and same(alias, pattern(3 * PAGE)[2 * PAGE :])
        assert handles(account) == 2

    def test_kept_longer_than_the_buffer(self, account: Account) -> None:
        buffer = vmm.GrowableBuffer(account.device, 8 * PAGE, PAGE)
        buffer.grow(PAGE)
        write(buffer, pattern(2 * PAGE))
        memory = buffer.mappings[1].memory
        del buffer
        gc.collect()
        assert list(account.left) == ["physical memory"] and handles(account) == 1 and not memory.closed
        with vmm.AddressRange(PAGE, driver=account.driver) as other:
            assert same(other.map(memory, access=account.device), pattern(2 * PAGE)[PAGE:])
        del memory
        assert account.left == {}

    @pytest.mark.parametrize("asked", [False, True])
    def test_of_what_is_gone(self, account: Account, buffer: vmm.GrowableBuffer, asked: bool) -> None:
        mapping = buffer.mappings[2]
        before = mapping.memory if asked else None
        buffer.resize(2 * PAGE)
        assert mapping.closed and isinstance(mapping.memory, vmm.PhysicalMemory) and mapping.memory.closed
        assert mapping.memory is (before or mapping.memory) and mapping.memory.nbytes == PAGE
        assert "closed" in repr(mapping) and handles(account) == 2
        with pytest.raises(sa.ClosedError):
            _ = mapping.memory.handle


class TestOneStep:
    def test_keeps_one_object(self, account: Account) -> None:
        def ours() -> Counter[str]:
            gc.collect()
            kinds = (type(one) for one in gc.get_objects())
            return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("streamalloc.vmm"))

        with vmm.GrowableBuffer(account.device, 256 * PAGE, PAGE) as buffer:
            buffer.grow(PAGE)
            before = ours()
            for _ in range(100):
                buffer.grow(PAGE)
            assert ours() - before == {"MappedBytes": 100}

    def test_asks_for_room_where_others_keep_memory(self) -> None:
        driver = sd.traced(sd.simulated(memory=16 * PAGE))
        device = sa.Device(0, driver=driver)
        with vmm.PageArena(device) as arena, vmm.GrowableBuffer(device, 32 * PAGE, PAGE) as buffer:
            arena.prepare(8).result()
            before = len(driver.calls)
            buffer.grow(8 * PAGE)
            made = [name for name in names(driver)[before:] if name != "cuThreadExchangeStreamCaptureMode"]
            assert made == ["cuMemCreate", *8 * ["cuMemRelease"], "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
            with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
                buffer.grow(8 * PAGE)
            assert caught.value.requested == 8 * PAGE and buffer.mapped_bytes == 9 * PAGE
            buffer.grow(PAGE)
            buffer.fill(1)
            assert (read(buffer) == 1).all() and len(buffer.mappings) == 3
