"""Any sequence of operations on mappings, and on groups that sleep, compared with models."""

import gc
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.testing import Faults
from streamalloc.vmm import steps
from streamalloc.vmm.stores import disk, host
from tests.support import Account, Bytes, each_raises, end_what_was_dropped, filled, in_a_thread, shows, workout
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE

BLOCK = PAGE // 2  # what is filled and looked at
PAGES = 12


class Model:
    """A range of addresses, memories of one to three pages, and what each block of them holds."""

    def __init__(self, account: Account, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = account.device
        self.range = vmm.AddressRange(PAGES * PAGE, driver=account.driver)
        self.memories = [vmm.PhysicalMemory(self.device, pages * PAGE) for pages in (1, 1, 2, 3)]
        self.blocks = [np.zeros(memory.nbytes // BLOCK, np.uint8) for memory in self.memories]
        self.access = [READWRITE] * PAGES
        # By page of the range: which memory, and its mapping's first page.
        self.table: dict[int, tuple[int, int]] = {}
        for number, memory in enumerate(self.memories):
            self.map(number, 0)
            self.range.mappings[0].fill(0)
            self.unmap(0)
            assert memory.mapping_count == 0

    @property
    def starts(self) -> list[int]:
        return sorted({start for _, start in self.table.values()})

    def map(self, number: int, page: int) -> None:
        """Map a memory, or see it refused where that does not fit."""
        pages = self.memories[number].nbytes // PAGE
        wanted = range(page, page + pages)
        if wanted.stop > PAGES or any(one in self.table for one in wanted):
            with pytest.raises(ValueError):
                self.range.map(self.memories[number], page * PAGE, access=self.device)
            return
        self.range.map(self.memories[number], page * PAGE, access=self.device)
        self.table |= {one: (number, page) for one in wanted}
        self.access[page] = READWRITE

    def unmap(self, start: int, pages: int | None = None) -> None:
        """Unmap a part of the range, or see it refused where it cuts a mapping."""
        stop = start + (pages or self.memories[self.table[start][0]].nbytes // PAGE)
        inside = {page for page in self.table if start <= page < stop}
        cut = any((page in inside) != (self.table[page][1] in inside) for page in self.table) or any(
            page in self.table and self.table[page] == self.table.get(page - 1) for page in (start, stop)
        )
        if cut:
            with pytest.raises(ValueError, match="cuts"):
                self.range.unmap(start * PAGE, stop * PAGE)
            return
        self.range.unmap(start * PAGE, stop * PAGE)
        for page in inside:
            del self.table[page]

    def fill(self, page: int, value: int) -> None:
        """Fill one block by way of one of its mappings, or see it refused."""
        number, start = self.table[page]
        block = 2 * (page - start) + self.random.randrange(2)
        at = start * PAGE + block * BLOCK
        view = self.range.view(at, at + BLOCK)
        if self.access[start] != READWRITE:
            with pytest.raises(ValueError):
                view.fill(value)
            return
        view.fill(value)
        self.blocks[number][block] = value

    def set_access(self, start: int, flags: sa.MemAccess) -> None:
        mapping = next(mapping for mapping in self.range.mappings if mapping.offset == start * PAGE)
        mapping.set_access(self.device, flags)
        self.access[start] = flags

    def step(self, value: int) -> None:
        action = self.random.choice(["map", "map", "map", "fill", "fill", "unmap", "unmap part", "access"])
        if action == "map":
            self.map(self.random.randrange(len(self.memories)), self.random.randrange(PAGES))
        elif action == "unmap part":
            start = self.random.randrange(PAGES)
            self.unmap(start, self.random.randint(1, PAGES - start))
        elif self.table:
            if action == "fill":
                self.fill(self.random.choice(sorted(self.table)), value)
            elif action == "unmap":
                self.unmap(self.random.choice(self.starts))
            else:
                self.set_access(self.random.choice(self.starts), self.random.choice([NONE, READ, READWRITE]))

    def check(self) -> None:
        starts = self.starts
        assert [mapping.offset for mapping in self.range.mappings] == [start * PAGE for start in starts]
        assert [mapping.memory for mapping in self.range.mappings] == [
            self.memories[self.table[start][0]] for start in starts
        ]
        assert self.range.draw() == "".join("0" if page in self.table else "." for page in range(PAGES))
        assert (
            self.range.mapped_bytes
            == PAGES * PAGE - sum(size for _, size in self.range.holes)
            == (len(self.table) * PAGE)
        )
        for number, memory in enumerate(self.memories):
            assert memory.mapping_count == sum(self.table[start][0] == number for start in starts)
        found = np.zeros(1, np.uint8)
        for mapping, start in zip(self.range.mappings, starts, strict=True):
            flags = self.access[start]
            assert mapping.access(self.device) == flags
            if flags:
                for block, value in enumerate(self.blocks[self.table[start][0]]):
                    for at in (block * BLOCK, (block + 1) * BLOCK - 1):
                        mapping[at : at + 1].copy_to(found)
                        mapping.stream.synchronize()
                        assert found[0] == value


@pytest.mark.parametrize("seed", range(4))
@in_a_thread
def test_a_range(account: Account, seed: int) -> None:
    model = Model(account, seed)
    for number in range(1, 31):
        model.step(number)
        model.check()


class Growing:
    """A growable buffer, and what is known of it: its bytes, the sizes of its pieces, and the access to it.

    The bytes are a numpy array that is cut and extended; new ones are undefined until they are written.
    """

    def __init__(self, account: Account, seed: int) -> None:
        self.random, self.account, self.device = random.Random(seed), account, account.device
        self.chunk = self.random.choice([0, PAGE, 2 * PAGE])
        self.host = sa.MemoryPool(HOST, driver=account.driver)
        self.host.set_access(self.device, READWRITE)
        self.plain = sa.MemoryPool(self.device)
        self.buffer = vmm.GrowableBuffer(self.device, 6 * PAGE, chunk=self.chunk)
        self.address = self.buffer.address
        self.bytes: Bytes = np.zeros(0, np.uint8)
        self.pieces: list[int] = []
        self.access = READWRITE

    def step(self, value: int) -> None:
        acts = [self.resize, self.resize, self.resize, self.write, self.write, self.evict, self.set_access]
        self.random.choice(acts)(value)

    def resize(self, _: int) -> None:
        # Few sizes are whole pages, and some are the same again.
        chosen = self.random.choice([0, 1, PAGE - 1, PAGE, PAGE + 1, len(self.bytes), self.random.randrange(6 * PAGE)])
        size, release, old = min(chosen, 6 * PAGE), self.random.random() < 0.6, len(self.bytes)
        known, before = list(self.pieces), len(self.account.traced.calls)
        self.buffer.resize(size, release=release)
        if release and size <= old:
            while self.pieces and sum(self.pieces[:-1]) >= size:
                self.pieces.pop()
        lacking = -(-size // PAGE) * PAGE - sum(self.pieces)
        while lacking > 0:
            self.pieces.append(min(self.chunk or lacking, lacking))
            lacking -= self.pieces[-1]
        assert known != self.pieces or len(self.account.traced.calls) == before
        self.bytes = np.concatenate([self.bytes[:size], np.zeros(max(size - old, 0), np.uint8)])
        self.define(old)

    def define(self, start: int) -> None:
        """Write bytes that are undefined, whoever may write by now."""
        if start < len(self.bytes):
            self.buffer.set_access(self.device)
            self.buffer[start:].fill(0)
            self.bytes[start:] = 0
            self.buffer.set_access(self.device, self.access)

    def write(self, value: int) -> None:
        if len(self.bytes):
            start = self.random.randrange(len(self.bytes))
            stop = min(start + 5000, len(self.bytes))
            if self.access != READWRITE:
                with pytest.raises(sa.InvalidValueError):
                    self.buffer[start:stop].fill(value)
                return
            self.buffer[start:stop].fill(value)
            self.bytes[start:stop] = value

    def set_access(self, _: int) -> None:
        self.access = self.random.choice([READ, READWRITE])
        self.buffer.set_access(self.device, self.access)

    def evict(self, value: int) -> None:
        """To nowhere, to a pool of the host, or to memory of one's own, which may change meanwhile."""
        buffer, size = self.buffer, len(self.bytes)
        kind = self.random.choice(["nowhere", "pool", "memory", "device memory"] if size else ["nowhere", "pool"])
        source = self.plain if kind == "device memory" else self.host
        own = source.allocate(size, buffer.stream) if "memory" in kind else None
        buffer.evict(self.host if kind == "pool" else own)
        assert self.host.statistics().used == (size if kind in ("pool", "memory") else 0)
        assert buffer.evicted and buffer.mappings == () and buffer.mapped_bytes == self.account.physical_bytes == 0
        eviction = buffer.eviction
        assert eviction is not None and eviction.nbytes == sum(self.pieces)
        assert (buffer._backup is None) == (kind == "nowhere" or not size) and "evicted" in repr(buffer)
        each_raises(sa.EvictedError, lambda: buffer.resize(0), lambda: buffer.evict(self.host))
        with vmm.AddressRange(PAGE, address=self.address, driver=self.account.driver) as other:
            assert not other.honoured  # the addresses are still the buffer's
            with vmm.PhysicalMemory(self.device, PAGE) as memory:
                other.map(memory, access=self.device).fill(255)  # what was given back is somebody else's
        if kind == "memory" and own is not None:
            assert np.array_equal(own.as_array(), self.bytes)
            own.as_array()[-1:] = self.bytes[-1:] = value
        if self.random.random() < 0.5:
            self.set_access(0)
        buffer.restore()
        buffer.stream.synchronize()
        if own is not None:
            assert not own.freed
            own.free()
        assert self.host.statistics().used == 0 and buffer.eviction is None
        self.define(0 if kind == "nowhere" else size)

    def check(self) -> None:
        buffer = self.buffer
        assert (buffer.address, buffer.nbytes) == (self.address, len(self.bytes))
        assert [mapping.nbytes for mapping in buffer.mappings] == self.pieces
        assert all(mapping.access(self.device) == self.access for mapping in buffer.mappings)
        assert buffer.rights == {self.device.location: self.access}
        assert buffer.mapped_bytes == sum(self.pieces) == sum(self.account.mapped.values())
        assert buffer.mapped_bytes == self.account.physical_bytes
        for start in (0, max(len(self.bytes) - 6000, 0), *(self.random.randrange(6 * PAGE) for _ in range(6))):
            found = np.zeros(max(min(6000, len(self.bytes) - start), 0), np.uint8)
            buffer[start : start + len(found)].copy_to(found) if len(found) else None
            buffer.stream.synchronize()
            assert np.array_equal(found, self.bytes[start : start + len(found)])


@pytest.mark.parametrize("seed", range(8))
@in_a_thread
def test_a_growable_buffer(account: Account, seed: int) -> None:
    model = Growing(account, seed)
    for number in range(1, 31):
        model.step(number)
        model.check()
    for one in (model.buffer, model.host, model.plain):
        one.close()


# -- any sequence of sleeps, wakes, evictions and freezes, with calls that the driver refuses, compared with a model


WORKOUT = workout(60, 20)
SIZES = (PAGE, PAGE + 5000, 3 * PAGE)
NUMBERS = some.integers(0, 2)
FAULTS = some.one_of(
    some.just(()),
    some.lists(some.integers(1, 60).map(lambda number: (number, 1)), min_size=1, max_size=2),
    # A step that fails, and then its undo.
    some.sampled_from(
        [
            (("cuMemUnmap", nth), (undo, at))
            for nth in (2, 3)
            for at in (1, 2, 3)
            for undo in ("cuMemMap", "cuMemSetAccess")
        ]
        + [((step, nth), ("cuMemUnmap", 1)) for step in ("cuMemCreate", "cuMemSetAccess") for nth in (2, 3)]
    ),
)
"""Calls that the driver refuses, each by its name or number, and its count."""
Fault = Sequence[tuple[Any, int]]
TAGS = some.sampled_from([(), ("a",), ("b",)])


class Sleeping(RuleBasedStateMachine):
    """Three buffers of a group, of tags "a", "a" and "b". The model: the pattern of each, None if it is undefined, and
    the numbers of those that are frozen.
    """

    stores: str = "host"

    def __init__(self) -> None:
        super().__init__()
        self.account = Account(sd.simulated())
        self.inner: Any = Faults(self.account.driver)
        self.outer: Any = Faults(self.inner)
        self.device = sa.Device(0, driver=self.outer)
        self.stream = self.device.create_stream()
        self.folder = tempfile.TemporaryDirectory()
        self.host = sa.MemoryPool(HOST, driver=self.outer)
        self.host.set_access(self.device, READWRITE)
        self.store: Any = self.host
        if self.stores == "pinned":
            self.store = vmm.HostTier(self.device)
        if self.stores == "disk":
            self.store = vmm.DiskTier(self.device, self.folder.name, block=1 << 20, threads=2)
        self.group = vmm.SleepGroup(self.device, backup=self.store)
        self.buffers = [vmm.GrowableBuffer(self.device, 4 * PAGE, nbytes, chunk=PAGE) for nbytes in SIZES]
        for buffer, tag in zip(self.buffers, "aab", strict=True):
            self.group.add(buffer, tag)
            # Some have the memory of their pieces as objects.
            assert self.stores == "host" or all(mapping.memory.handle for mapping in buffer.mappings)
        self.patterns: list[int | None] = [None] * 3
        self.frozen: set[int] = set()
        self.seed = 0

    def attempt(self, act: Any, fault: Fault) -> bool:
        """Act with refused calls; whether it has succeeded. One refused call changes nothing."""
        states = [(buffer.evicted, buffer.frozen) for buffer in self.buffers]
        half = self.half_evicted()
        for layer, (call, nth) in zip((self.outer, self.inner), fault, strict=False):
            layer.fail(call, *(() if isinstance(call, int) else (nth,)), result="CUDA_ERROR_UNKNOWN")
        try:
            act()
            done = True
        except sa.CudaError:
            done = False
        failed = [*self.outer.failed, *self.inner.failed]
        self.outer.stop()
        self.inner.stop()
        if "cuCtxPopCurrent" in failed:
            self.account.driver.cuCtxPopCurrent()  # the context is still there
        if not done and len(failed) == 1:
            assert [(buffer.evicted, buffer.frozen) for buffer in self.buffers] == states, failed
            assert self.half_evicted() <= half, failed
        if not done and len(failed) > 1:  # an undo was refused
            self.frozen = {number for number, buffer in enumerate(self.buffers) if buffer.frozen}
            for buffer in self.buffers:
                if not (buffer.evicted or buffer.frozen):
                    buffer.set_access(self.device)
        self.check(done)
        return done

    def half_evicted(self) -> set[int]:
        """The buffers whose memory is mapped again although they count as evicted: the undo was refused as well."""
        return {number for number, one in enumerate(self.buffers) if one.evicted and one.range.mapped_bytes}

    def check(self, done: bool = False) -> None:
        """``done``: a call has succeeded, after which the model is not up to date."""
        self.stream.synchronize()
        place = self.device.location
        for number, (buffer, pattern) in enumerate(zip(self.buffers, self.patterns, strict=True)):
            assert buffer.evicted or pattern is None or shows(buffer, pattern)
            assert done or buffer.frozen == (number in self.frozen)
            assert buffer.rights[place] == (READ if buffer.frozen else READWRITE)
            if buffer.frozen:
                backup = buffer._backup
                assert backup and backup.stored._present[backup.blocks.start : backup.blocks.stop].all()
            if not buffer.evicted:
                assert self.account.driver.cuMemGetAccess(place.to_driver(), buffer.address)[1] == buffer.rights[place]

    def numbers(self, tags: tuple[str, ...]) -> list[int]:
        return [number for number, tag in enumerate("aab") if tag in tags or not tags]

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        if self.buffers[number].evicted:
            return
        self.seed += 1
        if number in self.frozen:
            with pytest.raises(sa.CudaError, match="is frozen"):
                filled(self.buffers[number], self.seed, self.stream)
            self.check()
            return
        filled(self.buffers[number], self.seed, self.stream)
        self.stream.synchronize()
        self.patterns[number] = self.seed

    @rule(
        tags=some.sampled_from([(), ("a",), ("b",), ("b", "a")]),
        kept=some.sampled_from([True, False, "a", "b"]),
        fault=FAULTS,
    )
    def sleep(self, tags: tuple[str, ...], kept: bool | str, fault: Fault) -> None:
        going = [number for number in self.numbers(tags) if not self.buffers[number].evicted]
        going = [number for number in going if number not in self.frozen]
        if self.attempt(lambda: self.group.sleep(*tags, keep=kept, stream=self.stream), fault):
            for number in going:
                if kept is not True and "aab"[number] != kept:
                    self.patterns[number] = None

    @rule(tags=TAGS, fault=FAULTS)
    def freeze(self, tags: tuple[str, ...], fault: Fault) -> None:
        new = [number for number in self.numbers(tags) if number not in self.frozen]
        if any(self.buffers[number].evicted and self.buffers[number]._backup is None for number in new):
            with pytest.raises(ValueError, match=r"not kept|keeps its memory"):
                self.group.freeze(*tags, stream=self.stream)
        elif self.attempt(lambda: self.group.freeze(*tags, stream=self.stream), fault):
            self.frozen |= {*new}
        self.check()

    @rule(tags=TAGS, fault=FAULTS)
    def thaw(self, tags: tuple[str, ...], fault: Fault) -> None:
        if self.attempt(lambda: self.group.thaw(*tags), fault):
            self.frozen -= {*self.numbers(tags)}
        self.check()

    @rule(pages=some.integers(0, 8), background=some.booleans(), fault=FAULTS)
    def prepare(self, pages: int, background: bool, fault: Fault) -> None:
        if self.stores == "pinned":
            self.attempt(lambda: self.group.prepare(pages * PAGE, background=background).result(20), fault)

    @rule()
    def trim(self) -> None:
        if self.stores == "pinned":
            self.store.trim()

    @rule(tags=TAGS, fault=FAULTS)
    def wake(self, tags: tuple[str, ...], fault: Fault) -> None:
        self.attempt(lambda: self.group.wake(*tags, stream=self.stream), fault)

    @rule(number=NUMBERS, fault=FAULTS)
    def evict(self, number: int, fault: Fault) -> None:
        if not self.buffers[number].evicted:
            self.attempt(lambda: self.buffers[number].evict(self.store, stream=self.stream), fault)

    @rule(number=NUMBERS, fault=FAULTS)
    def restore(self, number: int, fault: Fault) -> None:
        if self.buffers[number].evicted:
            self.attempt(lambda: self.buffers[number].restore(stream=self.stream), fault)

    def teardown(self) -> None:
        self.group.thaw()
        self.frozen.clear()
        self.group.wake(stream=self.stream)
        self.check()
        for buffer in self.buffers:
            buffer.close()
        self.group.close()
        self.device.synchronize()
        if self.store is not self.host:
            self.store.close()
        self.host.close()
        self.stream.close()
        account, folder = self.account, self.folder
        self.__dict__.clear()
        gc.collect()
        end_what_was_dropped()
        folder.cleanup()
        assert account.left == {} and account.checked.hazards == []


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("stores", ["host", "pinned", "disk"])
@in_a_thread
def test_sleeps_and_wakes(stores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_BATCH", PAGE)  # memory is unmapped while later copies run
    monkeypatch.setattr(disk, "_SLOTS", 2)
    monkeypatch.setattr(host, "_BLOCKS", 1)  # a piece of memory for each block
    monkeypatch.setattr(host, "LEAST", PAGE)
    run_state_machine_as_test(type("Machine", (Sleeping,), {"stores": stores}), settings=WORKOUT)
