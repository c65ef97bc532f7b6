"""Every driver call fails in turn: the error is the one injected, nothing is lost, and the same step then succeeds.

A :class:`Case` prepares something, takes one step, and checks the state. Each call of the step fails once, and the step
is taken again; or a later call fails too, and all is dropped. At the end nothing may be left.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.testing import Faults
from tests.support import Account, in_a_thread, read, sampled
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE

# The calls that give something back. Where one of them fails, the step may be done all but this.
GIVING_BACK = {"cuMemRelease", "cuMemFreeAsync", "cuMemAddressFree", "cuMemUnmap", "cuEventDestroy"}


class Case:
    """Something prepared with the driver of an account, and one step."""

    survived: frozenset[str] = frozenset()
    """The calls that may fail without an error: what they were to give back is given back later."""

    def __init__(self, account: Account, count: int) -> None:
        self.account = account
        self.devices = [sa.Device(ordinal, driver=account.driver) for ordinal in range(count)]
        self.device = self.devices[0]
        self.prepare()

    def prepare(self) -> None:
        """Make the objects that exist before the step."""

    def step(self) -> None:
        """Run the step whose calls fail."""
        raise NotImplementedError

    def check_failed(self, failed: str) -> None:
        """Check the state after the call ``failed`` has failed."""

    def check_done(self) -> None:
        """Check the state after the step."""

    def end(self) -> None:
        """Close what there is."""


class BufferCase(Case):
    """A buffer of two pages, which the peers may use as well."""

    survived = frozenset({"cuMemRelease"})

    buffer: vmm.VirtualBuffer
    pages = 2
    pages_after = 2
    unused = 0
    """Bytes of the last page that are not the buffer's."""

    def prepare(self) -> None:
        nbytes = self.pages * PAGE - self.unused
        self.buffer = vmm.GrowableBuffer(self.device, 8 * PAGE, nbytes, chunk=PAGE, access=self.devices[1:])
        for page in range(self.pages):
            for at in self.marks(page):
                self.buffer[at : at + 8].fill(page + 1)
        self.device.synchronize()

    def marks(self, page: int) -> tuple[int, int]:
        """Offsets of a page's marks: both ends of its used bytes."""
        return page * PAGE, min((page + 1) * PAGE, self.pages * PAGE - self.unused) - 8

    def check_bytes(self, pages: int) -> None:
        for page in range(pages):
            for at in self.marks(page):
                assert read(self.buffer[at : at + 8]).tolist() == 8 * [page + 1]

    def check_mapped(self, pages: int) -> None:
        """So many pages are mapped, everybody has access, and the driver keeps nothing else for us."""
        assert self.buffer.nbytes + self.unused == self.buffer.mapped_bytes == pages * PAGE
        assert [mapping.offset for mapping in self.buffer.mappings] == [page * PAGE for page in range(pages)]
        for mapping in self.buffer.mappings:
            assert [mapping.access(device) for device in self.devices] == len(self.devices) * [READWRITE]
        there = {self.buffer.address + page * PAGE: PAGE for page in range(pages)}
        assert self.account.mapped == there
        assert len(self.account.left["address range"]) == 1

    def check_handles(self, pages: int) -> None:
        assert len(self.account.left.get("physical memory", ())) == pages

    def check_done(self) -> None:
        self.check_mapped(self.pages_after)
        self.check_handles(self.pages_after)
        self.check_bytes(min(self.pages, self.pages_after))

    def end(self) -> None:
        self.buffer.close()


class Make(Case):
    buffer: vmm.GrowableBuffer

    def step(self) -> None:
        self.buffer = vmm.GrowableBuffer(self.device, 4 * PAGE, 2 * PAGE, chunk=PAGE, access=self.devices[1:])

    def check_failed(self, failed: str) -> None:
        assert self.account.left == {}

    def check_done(self) -> None:
        self.buffer.fill(1)
        assert len(self.account.mapped) == 2

    def end(self) -> None:
        self.buffer.close()


class Grow(BufferCase):
    """A growth that fails leaves the old bytes readable, with everybody's access."""

    buffer: vmm.GrowableBuffer
    pages_after = 5

    def step(self) -> None:
        self.buffer.resize(5 * PAGE)

    def check_failed(self, failed: str) -> None:
        self.check_mapped(self.pages)
        self.check_handles(self.pages)
        self.check_bytes(self.pages)


class GrowByOne(Grow):
    """The same by one piece, as buffers grow mostly."""

    pages_after = 3

    def step(self) -> None:
        self.buffer.grow(PAGE)


class GrowFromNothing(Grow):
    pages = 0


class Shrink(BufferCase):
    buffer: vmm.GrowableBuffer
    pages = 5

    def step(self) -> None:
        self.buffer.resize(2 * PAGE)

    def check_failed(self, failed: str) -> None:
        done = self.buffer.nbytes == 2 * PAGE
        assert not done or failed == "cuMemRelease"
        self.check_mapped(2 if done else 5)
        self.check_bytes(2)


class ShrinkAfterStream(Shrink):
    def prepare(self) -> None:
        super().prepare()
        self.stream = self.device.create_stream()
        self.event = self.stream.record()

    def step(self) -> None:
        self.buffer.resize(2 * PAGE, after=[self.stream, self.event])

    def end(self) -> None:
        super().end()
        self.event.close()
        self.stream.close()
        del self.event, self.stream


class ShrinkAway(Shrink):
    pages_after = 0

    def step(self) -> None:
        self.buffer.resize(0)

    def check_failed(self, failed: str) -> None:
        done = self.buffer.nbytes == 0
        assert not done or failed == "cuMemRelease"
        self.check_mapped(0 if done else 5)


class Evict(BufferCase):
    """The buffer is as it was, or evicted with the whole backup."""

    def step(self) -> None:
        self.buffer.evict()

    def check_failed(self, failed: str) -> None:
        assert not self.buffer.evicted or failed in GIVING_BACK
        if self.buffer.evicted:
            self.check_evicted()
        else:
            self.check_mapped(2)
            self.check_handles(2)
            self.check_bytes(2)
            self.check_no_backup()

    def check_evicted(self) -> None:
        assert self.buffer.mappings == () and self.account.mapped == {}
        assert self.buffer.nbytes == 2 * PAGE - self.unused and len(self.account.left["address range"]) == 1

    def check_no_backup(self) -> None:
        assert self.buffer.eviction is None

    def check_done(self) -> None:
        assert self.buffer.evicted
        self.check_evicted()
        self.check_handles(0)


class Backup(BufferCase):
    """A buffer and a host pool for its backup."""

    unused = PAGE - 4096

    def prepare(self) -> None:
        self.pool = sa.MemoryPool(HOST, driver=self.account.driver)
        for device in self.devices:
            self.pool.set_access(device, READWRITE)
        super().prepare()

    def check_backup(self) -> None:
        eviction = self.buffer.eviction
        assert eviction is not None and isinstance(eviction.backup, sa.Buffer) and eviction.nbytes == 2 * PAGE
        kept = eviction.backup.as_array()
        for page in range(2):
            for at in self.marks(page):
                assert kept[at : at + 8].tolist() == 8 * [page + 1]

    def check_no_backup(self) -> None:
        assert self.buffer.eviction is None
        assert self.pool.statistics().used == 0

    def end(self) -> None:
        super().end()
        self.device.synchronize()
        assert self.pool.statistics().used == 0
        self.pool.close()


class EvictToPool(Backup, Evict):
    def step(self) -> None:
        self.buffer.evict(self.pool)

    def check_evicted(self) -> None:
        Evict.check_evicted(self)
        self.check_backup()


class EvictToMemory(Backup, Evict):
    def prepare(self) -> None:
        super().prepare()
        self.stream = self.device.create_stream()
        self.memory = self.pool.allocate(self.buffer.nbytes, self.stream)

    def step(self) -> None:
        self.buffer.evict(self.memory, stream=self.stream)

    def check_evicted(self) -> None:
        Evict.check_evicted(self)
        self.check_backup()

    def check_no_backup(self) -> None:
        assert self.buffer.eviction is None and not self.memory.freed

    def end(self) -> None:
        self.memory.free()
        self.stream.synchronize()
        super().end()
        self.stream.close()
        del self.stream, self.memory


class Restore(Evict):
    """The buffer is evicted as before, or restored."""

    def prepare(self) -> None:
        super().prepare()
        self.buffer.evict()

    def step(self) -> None:
        self.buffer.restore()

    def check_failed(self, failed: str) -> None:
        assert self.buffer.evicted
        self.check_evicted()
        self.check_handles(0)

    def check_done(self) -> None:
        self.check_mapped(2)
        self.check_handles(2)


class RestoreFromPool(EvictToPool):
    survived = frozenset(
        {"cuMemRelease", "cuMemFreeAsync", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
         "cuStreamIsCapturing"}
    )  # fmt: skip

    def prepare(self) -> None:
        super().prepare()
        self.buffer.evict(self.pool)

    def step(self) -> None:
        self.buffer.restore()

    def check_failed(self, failed: str) -> None:
        if self.buffer.evicted:
            self.check_evicted()
            self.check_handles(0)
        else:
            assert failed in GIVING_BACK | {"cuCtxPushCurrent", "cuCtxPopCurrent"}
            self.check_mapped(2)
            self.check_bytes(2)

    def check_done(self) -> None:
        self.check_mapped(2)
        self.check_handles(2)
        self.check_bytes(2)
        self.device.synchronize()
        self.check_no_backup()


class RestoreOnAnotherStream(RestoreFromPool):
    def prepare(self) -> None:
        super().prepare()
        self.stream = self.device.create_stream()

    def step(self) -> None:
        self.buffer.restore(stream=self.stream)

    def check_failed(self, failed: str) -> None:
        self.stream.synchronize()
        super().check_failed(failed)

    def check_done(self) -> None:
        self.stream.synchronize()
        super().check_done()

    def end(self) -> None:
        super().end()
        self.stream.close()
        del self.stream


class Close(BufferCase):
    def step(self) -> None:
        self.buffer.close()

    def check_failed(self, failed: str) -> None:
        if self.buffer.mappings:
            self.check_mapped(2)
            self.check_bytes(2)
        else:
            assert failed in GIVING_BACK

    def check_done(self) -> None:
        assert self.buffer.closed and self.account.left == {}


class CloseEvicted(Backup, Close):
    def prepare(self) -> None:
        super().prepare()
        self.buffer.evict(self.pool)

    def check_failed(self, failed: str) -> None:
        assert self.account.mapped == {}

    def check_done(self) -> None:
        assert self.buffer.closed and set(self.account.left) <= {"pool"}
        self.device.synchronize()
        assert self.pool.statistics().used == 0


class LowerAccess(BufferCase):
    def step(self) -> None:
        self.buffer.set_access(self.devices[-1], READ)

    def check_failed(self, failed: str) -> None:
        self.check_mapped(2)
        assert set(self.buffer.rights.values()) == {READWRITE}

    def check_done(self) -> None:
        assert [mapping.access(self.devices[-1]) for mapping in self.buffer.mappings] == [READ, READ]
        assert self.buffer.rights[self.devices[-1].location] == READ


class RangeCase(Case):
    """Six pages, of which two that lie apart are mapped: ``0.0...``."""

    def prepare(self) -> None:
        self.range = vmm.AddressRange(6 * PAGE, driver=self.account.driver)
        self.memory = vmm.PhysicalMemory(self.device, PAGE)
        for place in (0, 2):
            self.range.map(self.memory, place * PAGE, access=self.devices)

    @property
    def drawn(self) -> str:
        """Mappings by the account of the driver's calls; the range must report the same."""
        mapped = self.account.mapped
        shown = "".join("0" if self.range.address + page * PAGE in mapped else "." for page in range(6))
        assert self.range.draw() == shown and self.memory.mapping_count == len(mapped)
        return shown

    def end(self) -> None:
        self.range.unmap()
        self.range.close()
        self.memory.close()


class Reserve(Case):
    def step(self) -> None:
        self.range = vmm.AddressRange(PAGE, alignment=4 * PAGE, driver=self.account.driver)

    def check_failed(self, failed: str) -> None:
        assert self.account.left == {}

    def end(self) -> None:
        self.range.close()


class Create(Case):
    def step(self) -> None:
        compressible = sa.Device(0).supports.compression is True
        self.memory = vmm.PhysicalMemory(self.device, PAGE, compressible=compressible)

    def check_failed(self, failed: str) -> None:
        assert self.account.left == {}

    def end(self) -> None:
        self.memory.close()


class Find(RangeCase):
    def step(self) -> None:
        self.found = vmm.PhysicalMemory.at(self.range.address + 2 * PAGE, driver=self.account.driver)

    def check_failed(self, failed: str) -> None:
        assert len(self.account.left["physical memory"]) == 1 and self.drawn == "0.0..."

    def check_done(self) -> None:
        assert self.found.handle == self.memory.handle

    def end(self) -> None:
        self.found.close()
        super().end()


class Map(RangeCase):
    def step(self) -> None:
        self.mapping = self.range.map(self.memory, PAGE, access=self.devices)

    def check_failed(self, failed: str) -> None:
        assert self.drawn == "0.0..."

    def check_done(self) -> None:
        assert self.drawn == "000..." and self.mapping.access(self.devices[-1]) == READWRITE


class Unmap(RangeCase):
    """Two calls, for there is a hole between: what was not unmapped is still usable."""

    def step(self) -> None:
        self.range.unmap()

    def check_failed(self, failed: str) -> None:
        assert self.drawn in ("0.0...", "..0...")
        for mapping in self.range.mappings:
            mapping.fill(1)
            self.device.synchronize()

    def check_done(self) -> None:
        assert self.drawn == "......"


class UnmapOne(RangeCase):
    def prepare(self) -> None:
        super().prepare()
        self.mapping = self.range.mappings[1]

    def step(self) -> None:
        self.mapping.close()

    def check_failed(self, failed: str) -> None:
        assert self.drawn == "0.0..." and not self.mapping.closed
        self.mapping.fill(1)
        self.device.synchronize()

    def check_done(self) -> None:
        assert self.drawn == "0....." and self.mapping.closed


class SetAccess(RangeCase):
    def step(self) -> None:
        self.range.set_access(self.devices, READ, start=2 * PAGE, stop=3 * PAGE)

    def check_failed(self, failed: str) -> None:
        last = self.range.mappings[1]
        assert [last.access(device) for device in self.devices] == len(self.devices) * [READWRITE]
        assert set(last.rights.values()) == {READWRITE}

    def check_done(self) -> None:
        last = self.range.mappings[1]
        assert [last.access(device) for device in self.devices] == len(self.devices) * [READ]
        assert set(last.rights.values()) == {READ}


class Revoke(SetAccess):
    def step(self) -> None:
        self.range.mappings[1].revoke(self.devices)

    def check_done(self) -> None:
        assert self.range.mappings[1].access(self.device) == NONE and self.range.mappings[1].rights == {}


class Free(RangeCase):
    def prepare(self) -> None:
        super().prepare()
        self.range.unmap()

    def step(self) -> None:
        self.range.close()

    def check_failed(self, failed: str) -> None:
        assert not self.range.closed and self.drawn == "......"

    def check_done(self) -> None:
        assert self.range.closed and "address range" not in self.account.left

    def end(self) -> None:
        self.memory.close()


class Release(RangeCase):
    def step(self) -> None:
        self.memory.close()

    def check_failed(self, failed: str) -> None:
        assert not self.memory.closed and self.memory.handle
        assert self.drawn == "0.0..."

    def check_done(self) -> None:
        assert self.memory.closed and self.drawn == "0.0..."


class Stripe(Case):
    buffer: vmm.StripedBuffer

    def step(self) -> None:
        self.buffer = vmm.stripe(self.devices, 3 * PAGE)

    def check_failed(self, failed: str) -> None:
        assert self.account.left == {}

    def check_done(self) -> None:
        assert len(self.account.mapped) == len(self.devices)
        self.buffer.fill(1)

    def end(self) -> None:
        self.buffer.close()


CASES = [
    Make, Grow, GrowByOne, GrowFromNothing, Shrink, ShrinkAfterStream, ShrinkAway, Evict, EvictToPool, EvictToMemory,
    Restore, RestoreFromPool, RestoreOnAnotherStream, Close, CloseEvicted, LowerAccess, Reserve, Create, Find, Map,
    Unmap, UnmapOne, SetAccess, Revoke, Free, Release, Stripe,
]  # fmt: skip
WITH_PEERS = [
    pytest.param(kind, 2, marks=pytest.mark.gpus(2))
    for kind in (Make, Grow, GrowByOne, EvictToPool, RestoreFromPool, SetAccess, Stripe)
]


def calls_of(machine: Any, kind: type[Case], count: int) -> range:
    """The numbers of the calls that the step makes; the step itself is right."""
    account = Account(machine)
    case = kind(account, count)
    before = len(account.driver.seen)
    case.step()
    after = len(account.driver.seen)
    case.check_done()
    case.end()
    del case
    assert_nothing_left(account)
    return range(before + 1, after + 1)


def assert_nothing_left(account: Account, failed: str = "") -> None:
    gc.collect()
    for ordinal in range(2):
        if ordinal < int(account.driver.cuDeviceGetCount()[1]):
            sa.Device(ordinal, driver=account.driver).synchronize()
    left = account.left
    if failed == "cuEventDestroy":
        left.pop("event", None)  # refused to a finaliser, which has nobody to tell
    assert left == {}, failed


@pytest.mark.parametrize(("kind", "count"), [*((kind, 1) for kind in CASES), *WITH_PEERS])
@in_a_thread
def test_every_call_fails_in_turn(machine: Any, kind: type[Case], count: int) -> None:
    """After the error the same step succeeds."""
    result = "CUDA_ERROR_OUT_OF_MEMORY"
    numbers = calls_of(machine, kind, count)
    assert len(numbers) >= 1
    for number in sampled(numbers, 6):
        account = Account(machine, number, result=result)
        case = kind(account, count)
        assert len(account.driver.seen) == numbers.start - 1
        try:
            case.step()
        except sa.CudaError as error:
            raised: tuple[str, str] | None = (error.call, error.name)
        else:
            raised = None
        (failed,) = account.driver.failed
        if failed == "cuCtxPopCurrent":
            machine.cuCtxPopCurrent()  # the context is still there
        if raised is None:
            # Without an answer to cuCtxGetCurrent, calls take the path that pushes the context.
            # Without memory for the allocation that waits for a device, the host's memory does. An event ends later.
            assert failed in {"cuCtxGetCurrent", "cuEventDestroy", "cuMemAlloc", *case.survived}
        else:
            assert raised == (failed, result)
            case.check_failed(failed)
            case.step()
        case.check_done()
        case.end()
        del case
        assert_nothing_left(account, failed)


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("kind", CASES)
@in_a_thread
def test_a_call_fails_and_one_of_the_next(machine: Any, kind: type[Case]) -> None:
    """Whatever fails while a failure is dealt with: nothing is lost, or given back twice."""
    for number in sampled(calls_of(machine, kind, 1), 6):
        for later in (1 + number % 4,):
            account = Account(machine, number)
            account.driver = sd.faulty(account.driver, number + later, result="CUDA_ERROR_UNKNOWN")
            case: Any = kind(account, 1)
            with contextlib.suppress(sa.CudaError):
                case.step()
            for failed in (*account.driver.wrapped.failed, *account.driver.failed):
                if failed == "cuCtxPopCurrent":
                    machine.cuCtxPopCurrent()  # the context is still there
            account.driver._target = account.driver.wrapped._target = 1 << 40
            owner = getattr(case, "buffer", None)
            owner = getattr(case, "range", None) if owner is None else owner.range
            if owner is not None and not owner.closed:
                mappings = owner.mappings
                assert {mapping.address: mapping.nbytes for mapping in mappings} == account.mapped
                del mappings
            del case, owner
            assert_nothing_left(account)


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
        if then not in ("close", "drop"):
            assert len(account.mapped) == 4 and len(account.left["physical memory"]) == 4
            assert [mapping.access(device) for mapping in buffer.mappings] == 4 * [READWRITE]
            if then != "evict":
                assert (read(buffer[: 1 if then == "shrink" else PAGE]) == 7).all()
            buffer.fill(8)
            assert (read(buffer) == 8).all()
        if then != "drop":
            buffer.close()
        del buffer
        gc.collect()
        assert account.left == {}

    @pytest.mark.parametrize(
        ("first", "later"),
        [
            (("cuMemCreate", 4), ("cuMemUnmap", 2)),
            (("cuMemSetAccess", 2), ("cuMemRelease", 4)),
            (("cuMemcpyAsync", 3), ("cuMemUnmap", 2)),
            (("cuMemcpyAsync", 3), ("cuMemRelease", 3)),
        ],
    )
    @pytest.mark.parametrize("then", ["again", "close", "drop"])
    def test_restoring(self, machine: Any, first: tuple[str, int], later: tuple[str, int], then: str) -> None:
        account, device = self.failing(machine, first, later)
        with sa.MemoryPool(HOST, driver=device.driver) as pool:
            pool.set_access(device, READWRITE)
            buffer = vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE)
            data = np.arange(2 * PAGE, dtype=np.uint32).astype(np.uint8)
            buffer.copy_from(data)
            device.synchronize()
            buffer.evict(pool)
            with pytest.raises(sa.CudaError) as caught:
                buffer.restore()
            assert caught.value.call == first[0]
            if later[0] != "cuMemRelease":  # that is tried again later
                assert later[0] in "".join(getattr(caught.value, "__notes__", []))
            assert buffer.evicted
            assert buffer.eviction is not None and isinstance(buffer.eviction.backup, sa.Buffer)
            assert np.array_equal(buffer.eviction.backup.as_array(), data)
            del caught
            if then == "again":
                buffer.restore()
                device.synchronize()
                assert len(account.mapped) == 2 and len(account.left["physical memory"]) == 2
                assert np.array_equal(read(buffer), data)
            if then != "drop":
                buffer.close()
            del buffer
            gc.collect()
            device.synchronize()
            assert pool.statistics().used == 0
        del pool
        assert account.left == {}

    @pytest.mark.parametrize("failing", ["cuMemCreate", "a hook"])
    def test_waking_a_buffer_that_kept_its_memory(self, machine: Any, failing: str) -> None:
        """A sleep and its undo have failed, then the wake fails: all buffers are still asleep, and wake later."""
        account = Account(machine)
        inner: Any = Faults(account.driver)
        faults: Any = Faults(inner)
        device = sa.Device(0, driver=faults)
        kept: list[bool] = []

        def hook(_: object) -> None:
            if failing == "a hook" and not kept:
                raise ValueError(failing)

        with vmm.SleepGroup(device) as group:
            one, other = group.allocate(PAGE, tag="one"), group.allocate(PAGE, tag="other")
            one.fill(1)
            other.fill(2)
            inner.fail("cuMemUnmap", 2, result="CUDA_ERROR_UNKNOWN")
            faults.fail("cuMemMap", result="CUDA_ERROR_UNKNOWN")
            with pytest.raises(sa.CudaError):
                group.sleep(keep=False)
            assert [buffer.evicted for buffer in (one, other)] == [True, False]
            group.sleep("other")
            group.after_wake(hook)
            if failing != "a hook":
                faults.fail(failing, result="CUDA_ERROR_UNKNOWN")
            with pytest.raises((sa.CudaError, ValueError)):
                group.wake()
            assert one.evicted and other.evicted and account.mapped == {}
            kept.append(True)
            group.wake()
            assert (read(one) == 1).all() and (read(other) == 2).all()
            for buffer in (one, other):
                buffer.close()
        del one, other, buffer
        gc.collect()
        device.synchronize()
        assert "physical memory" not in account.left

    @pytest.mark.parametrize("how", ["restore", "wake"])
    def test_a_backup_is_freed_after_the_copy(self, machine: Any, how: str) -> None:
        """On the stream that copies, which is not its own, also where the free is refused, and waiting is as well."""
        driver: Any = sd.faulty(machine, "cuMemFreeAsync", 1, result="CUDA_ERROR_UNKNOWN")
        driver = sd.checked(sd.faulty(driver, "cuStreamSynchronize", 2, result="CUDA_ERROR_UNKNOWN"))
        device = sa.Device(0, driver=driver)
        with (
            device.create_stream() as one,
            device.create_stream() as other,
            sa.MemoryPool(HOST, driver=driver) as pool,
            vmm.SleepGroup(device, backup=pool) as group,
            vmm.GrowableBuffer(device, PAGE, PAGE) as buffer,
        ):
            pool.set_access(device, READWRITE)
            group.add(buffer)
            buffer.fill(7, one)
            if how == "restore":
                buffer.evict(pool, stream=one)
            else:
                group.sleep(stream=one)
            with contextlib.suppress(sa.CudaError):
                if how == "restore":
                    buffer.restore(stream=other)
                else:
                    group.wake(stream=other)
            with contextlib.suppress(sa.CudaError):
                other.synchronize()  # fails where nobody has waited
            gc.collect()
            device.synchronize()
            assert not buffer.evicted and (read(buffer) == 7).all() and pool.statistics().used == 0
        assert driver.hazards == []

    def test_mapping(self, machine: Any) -> None:
        """A mapping that could not be unmapped stays in the table, so that it can be unmapped later."""
        account, device = self.failing(machine, ("cuMemSetAccess", 1), ("cuMemUnmap", 1))
        with (
            vmm.AddressRange(PAGE, driver=device.driver) as addresses,
            vmm.PhysicalMemory(device, PAGE) as memory,
        ):
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
