"""Every driver call fails in turn: the error is the one injected, nothing is lost, and the same step then succeeds.

A :class:`Case` prepares something, takes one step, and checks the state. Each call of the step fails once, and the step
is taken again; or a later call fails too, and all is dropped. At the end nothing may be left.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, in_a_thread, read, sampled
from tests.vmm.support import HOST, PAGE, READ, READWRITE


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
    """A buffer, a pool and memory for a backup, and a stream; the peers may use the buffer as well."""

    survived = frozenset(
        {"cuMemRelease", "cuMemFreeAsync", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
         "cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamCreateWithPriority"}
    )  # fmt: skip
    pages = 2
    halfway = False
    """Whether a call that fails may leave the step half done."""
    act: ClassVar[Any]
    before: ClassVar[Any] = None

    def prepare(self) -> None:
        self.pool = sa.MemoryPool(HOST, driver=self.account.driver)
        for device in self.devices:
            self.pool.set_access(device, READWRITE)
        self.stream = self.device.create_stream()
        self.event = self.stream.record()
        self.buffer = vmm.GrowableBuffer(self.device, 8 * PAGE, self.pages * PAGE, chunk=PAGE, access=self.devices[1:])
        self.memory = self.pool.allocate(self.buffer.nbytes, self.stream)
        for at in range(0, self.buffer.nbytes, PAGE // 2):
            self.buffer[at : at + 8].fill(at * 2 // PAGE + 1)
        self.device.synchronize()
        if self.before is not None:
            self.before()
        self.state = self.seen()

    def step(self) -> None:
        self.act()

    def seen(self) -> object:
        """Size, mappings and permissions, as the buffer and as the driver have them."""
        buffer = self.buffer
        if buffer.closed:
            return "closed"
        offsets = [mapping.offset for mapping in buffer.mappings]
        assert {buffer.address + offset: PAGE for offset in offsets} == self.account.mapped
        rights = [[mapping.access(device) for device in self.devices] for mapping in buffer.mappings]
        assert all(one == [buffer.rights[device.location] for device in self.devices] for one in rights)
        return buffer.nbytes, buffer.evicted, offsets, rights

    def check_failed(self, failed: str) -> None:
        self.stream.synchronize()
        assert self.halfway or self.seen() == self.state
        self.check_bytes()

    def check_bytes(self) -> None:
        if self.buffer.closed or self.buffer.evicted or self.unkept:
            return
        for at in range(0, min(self.pages * PAGE, self.buffer.nbytes), PAGE // 2):
            assert read(self.buffer[at : at + 8]).tolist() == 8 * [at * 2 // PAGE + 1]

    unkept = False
    """Whether the bytes were discarded."""

    def check_done(self) -> None:
        self.stream.synchronize()
        assert self.seen() != self.state
        self.check_bytes()

    def end(self) -> None:
        self.buffer.close()
        self.memory.close()
        self.device.synchronize()
        assert self.pool.statistics().used == 0
        self.event.close()
        self.stream.close()
        self.pool.close()
        del self.event, self.stream, self.memory, self.pool


def of_buffer(name: str, act: Callable[[Any], object], **more: Any) -> type[Case]:
    return type(name, (BufferCase,), {"act": act, **more})


class Make(Case):
    buffer: vmm.VirtualBuffer

    def step(self) -> None:
        self.buffer = vmm.GrowableBuffer(self.device, 4 * PAGE, 2 * PAGE, chunk=PAGE, access=self.devices[1:])

    def check_failed(self, failed: str) -> None:
        assert self.account.left == {}

    def check_done(self) -> None:
        self.buffer.fill(1)
        assert len(self.account.mapped) == len(self.buffer.mappings)

    def end(self) -> None:
        self.buffer.close()


class Stripe(Make):
    def step(self) -> None:
        self.buffer = vmm.stripe(self.devices, 3 * PAGE)


class RangeCase(Case):
    """Six pages, of which two that lie apart are mapped: ``0.0...``."""

    halfway = False
    act: ClassVar[Any]

    def prepare(self) -> None:
        self.range = vmm.AddressRange(6 * PAGE, driver=self.account.driver)
        self.memory = vmm.PhysicalMemory(self.device, PAGE)
        for place in (0, 2):
            self.range.map(self.memory, place * PAGE, access=self.devices)
        self.mapping = self.range.mappings[1]
        self.found: vmm.PhysicalMemory | None = None
        self.state = self.seen()

    def step(self) -> None:
        self.act()

    def seen(self) -> object:
        """Mappings by the account of the driver's calls, of which the range must report the same, and permissions."""
        if self.range.closed:
            return "closed"
        mapped = self.account.mapped
        shown = "".join("0" if self.range.address + page * PAGE in mapped else "." for page in range(6))
        assert self.range.draw() == shown and self.memory.mapping_count == len(mapped)
        rights = [[one.access(device) for device in self.devices] for one in self.range.mappings]
        return shown, rights, self.memory.closed, self.found is not None

    def check_failed(self, failed: str) -> None:
        assert self.halfway or self.seen() == self.state
        for mapping in () if self.range.closed else self.range.mappings:
            mapping.fill(1)
        self.device.synchronize()

    def check_done(self) -> None:
        assert self.seen() != self.state

    def end(self) -> None:
        if self.found is not None:
            self.found.close()
        if not self.range.closed:
            self.range.unmap()
        self.range.close()
        self.memory.close()


def of_range(name: str, act: Callable[[Any], object], **more: Any) -> type[Case]:
    return type(name, (RangeCase,), {"act": act, **more})


def _find(it: Any) -> None:
    it.found = vmm.PhysicalMemory.at(it.range.address + 2 * PAGE, driver=it.account.driver)


GROW = of_buffer("Grow", lambda it: it.buffer.resize(5 * PAGE))
GROW_BY_ONE = of_buffer("GrowByOne", lambda it: it.buffer.grow(PAGE))
EVICT_TO_POOL = of_buffer("EvictToPool", lambda it: it.buffer.evict(it.pool))
RESTORE_FROM_POOL = of_buffer(
    "RestoreFromPool", lambda it: it.buffer.restore(), before=lambda it: it.buffer.evict(it.pool)
)
SET_ACCESS = of_range("SetAccess", lambda it: it.range.set_access(it.devices, READ, start=2 * PAGE, stop=3 * PAGE))
CASES: list[Any] = [
    Make,
    GROW,
    GROW_BY_ONE,
    of_buffer("GrowFromNothing", lambda it: it.buffer.resize(5 * PAGE), pages=0),
    of_buffer("Shrink", lambda it: it.buffer.resize(2 * PAGE), pages=5),
    of_buffer("ShrinkAfterStream", lambda it: it.buffer.resize(2 * PAGE, after=[it.stream, it.event]), pages=5),
    of_buffer("ShrinkAway", lambda it: it.buffer.resize(0), pages=5),
    of_buffer("Evict", lambda it: it.buffer.evict()),
    EVICT_TO_POOL,
    of_buffer("EvictToMemory", lambda it: it.buffer.evict(it.memory, stream=it.stream)),
    of_buffer("Restore", lambda it: it.buffer.restore(), before=lambda it: it.buffer.evict(), unkept=True),
    RESTORE_FROM_POOL,
    of_buffer(
        "RestoreOnAnotherStream",
        lambda it: it.buffer.restore(stream=it.stream),
        before=lambda it: it.buffer.evict(it.pool),
    ),
    of_buffer("Close", lambda it: it.buffer.close(), halfway=True),
    of_buffer("CloseEvicted", lambda it: it.buffer.close(), before=lambda it: it.buffer.evict(it.pool), halfway=True),
    of_buffer("LowerAccess", lambda it: it.buffer.set_access(it.devices[-1], READ)),
    of_range("Find", _find),
    of_range("Map", lambda it: it.range.map(it.memory, PAGE, access=it.devices)),
    of_range("Unmap", lambda it: it.range.unmap(), halfway=True),  # two calls, as there is a hole between
    of_range("UnmapOne", lambda it: it.mapping.close()),
    SET_ACCESS,
    of_range("Revoke", lambda it: it.mapping.revoke(it.devices)),
    of_range("Free", lambda it: (it.range.unmap(), it.range.close()), halfway=True),
    of_range("Release", lambda it: it.memory.close()),
    Stripe,
]
WITH_PEERS = [
    pytest.param(kind, 2, marks=pytest.mark.gpus(2))
    for kind in (Make, GROW, GROW_BY_ONE, EVICT_TO_POOL, RESTORE_FROM_POOL, SET_ACCESS, Stripe)
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
def test_every_call_fails_in_turn(machine: Any, on_cuda: bool, kind: type[Case], count: int) -> None:
    """After the error the same step succeeds."""
    result = "CUDA_ERROR_OUT_OF_MEMORY"
    numbers = calls_of(machine, kind, count)
    assert len(numbers) >= 1
    for number in sampled(numbers, 6):
        account = Account(machine, result=result)
        case = kind(account, count)
        # Counted from here: what comes before may ask more often whether queued work is done.
        account.driver._target = len(account.driver.seen) + 1 + number - numbers.start
        try:
            case.step()
        except sa.CudaError as error:
            raised: tuple[str, str] | None = (error.call, error.name)
        else:
            raised = None
        if not account.driver.failed and on_cuda:
            continue  # a step makes a call less where work is over sooner
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
