"""Blocks that are copied one by one and by the kernel, and the times by which a tier chooses."""

import functools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.block_kernel import COPY_MOST, block_copies
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.stores import copies
from tests.support import Account, each_raises, end_what_was_dropped, filled, names, pattern, pending, read
from tests.vmm.pages.support import commit_filled, values
from tests.vmm.support import PAGE

LAUNCH = "cuLaunchKernel"
MEASURE = copies.Kernel._measure


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have blocks of any size go this way."""
    monkeypatch.setattr(copies.Kernel, "most", lambda *_: 1 << 30 if way == "kernel" else 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has blocks of any size go by the kernel."""
    choose(monkeypatch, "kernel")


@pytest.fixture(params=["copies", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen: str = request.param
    choose(monkeypatch, chosen)
    return chosen


def in_pairs(buffer: sa.Memory) -> bool:
    """Whether each second block of a pattern has the bytes of the block before it."""
    rows = pattern(buffer.nbytes, 1).reshape(-1, 4096).copy()
    rows[1::2] = rows[::2]
    return bool(np.array_equal(read(buffer).reshape(-1, 4096), rows))


class TestBytes:
    @pytest.mark.parametrize(
        ("nbytes", "count", "offset", "suits"),
        [
            (4096, 1300, 0, True),
            (16, 4100, 0, True),  # more than one launch takes
            (16, 8100, 0, True),  # the first ones go ahead
            (16, 3, 0, True),
            (1040, 40, 0, True),  # no multiple of what a warp moves
            (5136, 40, 16, True),
            (96 << 10, 5, 0, True),
            (1000, 40, 0, False),
            (4096, 40, 8, False),
        ],
    )
    def test_of_sizes_and_places(
        self,
        traced: Any,
        device: sa.Device,
        stream: sa.Stream,
        way: str,
        nbytes: int,
        count: int,
        offset: int,
        suits: bool,
    ) -> None:
        blocks = np.random.default_rng(nbytes).permutation(2 * count)
        with sa.allocate(2 * count * nbytes + offset, stream) as buffer, vmm.HostTier(device) as tier:
            filled(buffer, 1)
            memory = buffer[offset:]
            traced.calls.clear()
            stored = tier.save(memory, blocks[:count], nbytes, stream)
            tier.load(stored, memory, blocks[count:], stream)
            assert (LAUNCH in names(traced)) == (way != "copies" and suits)
            rows = pattern(buffer.nbytes, 1)[offset:].reshape(2 * count, nbytes).copy()
            rows[blocks[count:]] = rows[blocks[:count]]
            assert np.array_equal(read(memory).reshape(2 * count, nbytes), rows)
            assert np.array_equal(read(buffer[:offset]), pattern(buffer.nbytes, 1)[:offset])

    @pytest.mark.parametrize("many", [True, False])
    def test_by_as_few_launches_as_the_driver_allows(
        self, traced: Any, device: sa.Device, stream: sa.Stream, monkeypatch: Any, many: bool
    ) -> None:
        choose(monkeypatch, "kernel")
        if not many:
            monkeypatch.setattr(copies, "_MANY_SINCE", 1 << 30)
        with sa.allocate(2 * 4100 * 16, stream) as buffer, vmm.HostTier(device) as tier:
            filled(buffer, 1)
            rows = pattern(buffer.nbytes, 1).reshape(2 * 4100, 16).copy()
            for count in (500, 4100):
                blocks = np.random.default_rng(1).permutation(2 * 4100)[: 2 * count]
                traced.calls.clear()
                stored = tier.save(buffer, blocks[:count], 16, stream)
                tier.load(stored, buffer, blocks[count:], stream)
                assert names(traced).count(LAUNCH) == 2 * -(-count // (4032 if many else 504))
                rows[blocks[count:]] = rows[blocks[:count]]
                assert np.array_equal(read(buffer).reshape(2 * 4100, 16), rows)

    def test_of_pages(self, stream: sa.Stream, device: sa.Device, tmp_path: Path, way: str) -> None:
        with vmm.PageArena(device) as arena, arena.space(16 * PAGE, stream=stream) as space:
            for tier in (vmm.HostTier(device), vmm.HostTier(device, check=True), vmm.DiskTier(device, tmp_path)):
                with tier:
                    commit_filled(space, range(0, 16, 2))
                    assert space.swap_out([2, 6, 10], tier) == 3 and len(space.committed) == 5
                    assert space.swap_in([10, 2, 6]) == 3
                    assert values(space)[::2] == list(range(1, 17, 2))

    def test_on_other_streams(self, device: sa.Device, way: str) -> None:
        with vmm.HostTier(device) as tier, sa.allocate(64 * 4096, device.default_stream) as buffer:
            filled(buffer, 1)
            for stream in (device.default_stream, device.per_thread_stream):
                stored = tier.save(buffer, range(0, 64, 2), 4096, stream)
                buffer.fill(0, stream)
                tier.load(stored, buffer, range(0, 64, 2), stream)
                stream.synchronize()
                rows = pattern(buffer.nbytes, 1).reshape(64, 4096).copy()
                rows[1::2] = 0
                assert np.array_equal(read(buffer).reshape(64, 4096), rows)
                filled(buffer, 1)
                stored.drop()

    @pytest.mark.parametrize("far", [0, 1 << 36, 5 << 40])
    @pytest.mark.parametrize("most", COPY_MOST.values())
    def test_addresses_that_are_far_apart(self, far: int, most: int) -> None:
        rng = np.random.default_rng(1)
        targets, sources = (
            base + rng.permutation(4000)[:1300] * 4096 + rng.integers(0, 3, 1300) * far for base in (1 << 44, 3 << 44)
        )
        found: list[tuple[int, int]] = []
        for one in block_copies(targets, sources, 4096, most):
            found += zip(*one.addresses(), strict=True)
        assert sorted(found) == sorted(zip(targets.tolist(), sources.tolist(), strict=True))

    def test_room_is_used_again_after_the_kernel(self, stream: sa.Stream, gate: Gate, kernel: None) -> None:
        with (
            stream.device.create_stream() as other,
            sa.allocate(64 * 4096, stream) as buffer,
            vmm.HostTier(stream.device, limit=32 * 4096) as tier,
        ):
            filled(buffer, 1)
            each_raises(ValueError, lambda: tier.reserve(1, 0), match="nbytes=0")
            each_raises(ValueError, lambda: tier.reserve(-2, 4096), match="count=-2")
            tier.reserve(32, 4096)
            stored = tier.save(buffer, range(0, 64, 2), 4096, stream)
            stream.synchronize()
            gate.hold(stream)
            tier.load(stored, buffer, range(1, 64, 2), stream)
            stored.drop()
            again = tier.save(buffer, range(0, 64, 2), 4096, other)  # into the room that the kernel has yet to read
            assert pending(other)
            tier.trim()
            gate.open()
            assert in_pairs(buffer)
            other.synchronize()
            again.drop()

    def test_room_of_blocks_dropped_one_by_one_is_used_again(self, stream: sa.Stream, way: str) -> None:
        with sa.allocate(96 * 4096, stream) as buffer, vmm.HostTier(stream.device, limit=64 * 4096) as tier:
            filled(buffer, 1)
            rows = pattern(buffer.nbytes, 1).reshape(96, 4096).copy()
            first: Any = tier.save(buffer, range(64), 4096, stream)
            for block in range(63, 0, -2):
                first.drop([block, block])
            first.drop([1])
            assert tier.used == 32 * 4096
            second = tier.save(buffer, range(64, 96), 4096, stream)
            stream.synchronize()
            assert all(np.array_equal(first.array(block), rows[block]) for block in range(0, 64, 2))
            tier.load(second, buffer, range(32), stream)
            assert np.array_equal(read(buffer).reshape(96, 4096)[:32], rows[64:])
            first.drop()
            second.drop()
            assert tier.used == 0
            stored = tier.save(buffer, range(64), 4096, stream)
            tier.load(stored, buffer, range(32, 96), stream)
            assert np.array_equal(read(buffer).reshape(96, 4096)[64:], rows[32:64])

    def test_no_call_is_made_for_each_block(self, device: sa.Device, stream: sa.Stream, kernel: None) -> None:
        made: list[int] = []

        def count(frame: Any, event: str, _: object) -> None:
            path = frame.f_code.co_filename
            made[-1] += event.endswith("call") and ("/streamalloc/vmm/" in path or path.endswith("block_kernel.py"))

        with sa.allocate(1000 * 4096, stream) as buffer, vmm.HostTier(device) as tier:
            filled(buffer, 1)
            tier.reserve(500, 4096)
            for number in (40, 40, 500):
                blocks = np.random.default_rng(1).permutation(1000)[:number]
                made.append(0)
                sys.setprofile(count)
                try:
                    stored = tier.save(buffer, blocks, 4096, stream)
                    tier.load(stored, buffer, blocks, stream)
                    stored.drop()
                finally:
                    sys.setprofile(None)
                stream.synchronize()
            assert 100 < made[2] < made[1] + 50  # some depend on what has completed

    def test_a_tier_ends_after_the_kernel(self, machine: Any, kernel: None) -> None:
        account = Account(machine)
        device = account.device
        with device.create_stream() as stream, sa.allocate(8 * 4096, stream) as buffer, Gate(device) as gate:
            filled(buffer, 1)
            with vmm.HostTier(device) as tier:
                stored = tier.save(buffer, range(0, 8, 2), 4096, stream)
                stream.synchronize()
                gate.hold(stream)
                tier.load(stored, buffer, range(1, 8, 2), stream)
                stored.drop()
            assert account.calls("cuMemHostUnregister") == []
            gate.open()
            assert in_pairs(buffer)
        del stored, buffer, stream  # with its last event
        assert account.left == {} and account.checked.hazards == []
        assert len(account.calls("cuMemHostUnregister")) == 1


class TestMemoryThatKernelsMayNotUse:
    def test_pages_without_memory(self, device: sa.Device, stream: sa.Stream, kernel: None) -> None:
        with (
            vmm.PageArena(device) as arena,
            arena.space(4 * PAGE, stream=stream) as space,
            vmm.HostTier(device) as tier,
        ):
            commit_filled(space, [0, 2])
            half = PAGE // 2
            stored = tier.save(space, range(0, 8, 2), half, stream)  # uncommitted pages are read as zeros
            with pytest.raises(sa.CudaError):
                tier.load(stored, space, [1, 3, 5, 7], stream)
            tier.load(stored, space, [1, 0, 5, 4], stream)
            stream.synchronize()
            found = read(space).reshape(8, half)[:, 0].tolist()
            assert found == [0, 1, 0, 0, 0, 3, 0, 0]

    def test_of_another_device_or_read_only(self, device: sa.Device, stream: sa.Stream, kernel: None) -> None:
        with vmm.HostTier(device) as tier, vmm.GrowableBuffer(device, PAGE, PAGE, stream=stream) as buffer:
            buffer.fill(1)
            stored = tier.save(buffer, range(0, 8, 2), 4096, stream)
            buffer.set_access({device: sa.MemAccess.READ})
            with pytest.raises(sa.CudaError):
                tier.load(stored, buffer, range(0, 8, 2), stream)
            buffer.set_access(device)
            tier.load(stored, buffer, range(1, 8, 2), stream)
            stream.synchronize()


def untold(machine: Any) -> Any:
    """A driver that does not tell which way is faster, as no real one does."""
    driver: Any = Faults(machine)
    driver.kernel_copies_up_to = None
    return driver


class TestCalibration:
    """Which way is faster is measured; here with little, because a simulated machine takes long for much."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch, not_calibrated: None) -> None:
        monkeypatch.setattr(copies.Kernel, "_measure", MEASURE)
        monkeypatch.setattr(copies, "_SIZES", (4096, 65536))
        monkeypatch.setattr(copies, "_ROOM", 1 << 20)

    def slower(self, machine: Any, call: str) -> set[int]:
        """The most bytes of a copy by the kernel, to the device and from it, if a call of the driver takes 10 ms for
        blocks of 64 KiB.
        """
        driver = untold(machine)
        made = getattr(driver, call)

        def slow(*args: Any) -> Any:
            large = args[2][0] == 65536 if call == "cuMemcpyBatchAsync" else args[-2][0][0].nbytes == 65536
            time.sleep(0.01 * large)
            return made(*args)

        setattr(driver, call, slow)
        with vmm.HostTier(sa.Device(0, driver=driver)) as tier:
            return {copies.kernel_of(tier.device).most(out) for out in (True, False)}

    def test_finds_the_largest_size_at_which_the_kernel_is_as_fast(self, machine: Any) -> None:
        assert self.slower(machine, "cuMemcpyBatchAsync") == {65536}
        assert max(self.slower(machine, LAUNCH)) < 65536

    def test_is_made_for_the_first_tier_and_when_asked(self, machine: Any) -> None:
        driver = untold(machine)
        device = sa.Device(0, driver=driver)
        for launches in (True, False):
            driver.fail(1 << 30)  # which lists the calls from here on
            with vmm.HostTier(device) as tier:
                assert (LAUNCH in driver.seen) == launches
        driver.fail(1 << 30)
        tier.calibrate()
        assert LAUNCH in driver.seen

    @pytest.mark.parametrize(
        ("call", "result", "most"),
        [
            ("cuMemAllocFromPoolAsync", "CUDA_ERROR_OUT_OF_MEMORY", copies._UNMEASURED),
            ("cuMemcpyBatchAsync", "CUDA_ERROR_UNKNOWN", 0),
            (LAUNCH, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 0),
        ],
    )
    def test_that_fails_leaves_nothing(self, account: Account, call: str, result: str, most: int) -> None:
        driver = untold(account.driver)
        driver.fail(call, times=1000, result=result)
        with vmm.HostTier(sa.Device(0, driver=driver)) as tier:
            assert copies.kernel_of(tier.device).most(True) == most
        end_what_was_dropped()

    def test_has_no_hazard(self, machine: Any) -> None:
        checked = sd.checked(untold(machine))
        with vmm.HostTier(sa.Device(0, driver=checked)) as tier:
            tier.calibrate()
        assert checked.hazards == []


class TestFaults:
    @pytest.mark.parametrize(
        ("call", "result"),
        [("cuModuleLoadData", "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"), ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND")],
    )
    def test_without_a_kernel_blocks_are_copied_one_by_one(self, account: Account, call: str, result: str) -> None:
        faults: Any = Faults(account.driver)
        device = sa.Device(0, driver=faults)
        with device.create_stream() as stream, sa.allocate(64 * 4096, stream) as buffer:
            filled(buffer, 1)
            faults.fail(call, times=1000, result=result)
            with vmm.HostTier(device) as tier:
                assert set(faults.failed) == {call}
                faults.fail(1 << 30)
                stored = tier.save(buffer, range(0, 64, 2), 4096, stream)
                tier.load(stored, buffer, range(1, 64, 2), stream)
                assert LAUNCH not in faults.seen
                assert in_pairs(buffer)
                stored.drop()

    def test_a_launch_that_is_refused(self, machine: Any, kernel: None) -> None:
        account = Account(machine)
        faults: Any = Faults(account.driver)
        device = sa.Device(0, driver=faults)
        with device.create_stream() as stream, sa.allocate(9000 * 16, stream) as buffer, vmm.HostTier(device) as tier:
            faults.fail(LAUNCH, 2)
            with pytest.raises(sa.OutOfMemoryError):
                tier.save(buffer.view(), range(0, 9000, 2), 16, stream)
            assert tier.used == 0
        del buffer, stream  # with its last event
        assert account.left == {}


@pytest.mark.parametrize(
    ("nbytes", "blocks", "launched"),
    [
        (4096, [0, 2], True),
        (4096, [0], False),  # one copy
        (4096, [1, 2, 3], False),  # merged to one
        (256 << 10, [0, 2, 4], True),
        (512 << 10, [0, 2, 4], False),
        (128 << 10, [0, 1, 3, 4], True),  # two copies of 256 KiB
        (128 << 10, [0, 1, 2, 4, 5, 6], False),
    ],
)
def test_the_kernel_copies_where_single_copies_are_small(
    traced: Any,
    device: sa.Device,
    stream: sa.Stream,
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    blocks: list[int],
    launched: bool,
) -> None:
    monkeypatch.setattr(copies.Kernel, "most", lambda *_: 256 << 10)
    with sa.allocate(8 * nbytes, stream) as buffer, vmm.HostTier(device) as tier:
        filled(buffer, 1)
        traced.calls.clear()
        stored = tier.save(buffer, blocks, nbytes, stream)
        assert (LAUNCH in names(traced)) == launched
        buffer.fill(0, stream)
        tier.load(stored, buffer, blocks, stream)
        rows = pattern(buffer.nbytes, 1).reshape(8, nbytes)
        assert all(np.array_equal(read(buffer).reshape(8, nbytes)[block], rows[block]) for block in blocks)


def test_the_kernel_declares_its_uses(checker: Any, device: sa.Device, stream: sa.Stream, kernel: None) -> None:
    with device.create_stream() as other, vmm.HostTier(device) as tier, sa.allocate(64 * 4096, stream) as buffer:
        buffer.fill(1)
        stored = tier.save(buffer, range(0, 64, 2), 4096, stream)
        other.wait(stream)
        buffer[4096:8192].fill(2, other)  # no block of these
        tier.load(stored, buffer, range(0, 64, 2), other)
        other.synchronize()
        assert checker.hazards == [] and not any("declare" in note for note in checker.notes)
        buffer.fill(3)
        stored = tier.save(buffer, range(0, 64, 2), 4096, other)
        (hazard,) = checker.hazards
        assert "kernel streamalloc_copy_blocks" in str(hazard) and "read" in str(hazard)
        checker.hazards.clear()
        device.synchronize()
        tier.load(stored, buffer, range(0, 64, 2), stream)
        buffer[:4096].fill(4, other)
        (hazard,) = checker.hazards
        assert "kernel streamalloc_copy_blocks" in str(hazard) and "writ" in str(hazard)
        checker.hazards.clear()
        device.synchronize()


def test_a_stream_is_not_left_out(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
    refused = pytest.raises(TypeError, match=r"stream must be a Stream or .*, not None")
    with vmm.HostTier(device) as tier, pool.allocate(4096, stream) as buffer, refused:
        tier.save(buffer, [0], 4096, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["host", "checked", "disk"])
def test_blocks_that_are_left_can_be_loaded(device: sa.Device, stream: sa.Stream, kind: str, tmp_path: Path) -> None:
    made = vmm.DiskTier(device, tmp_path) if kind == "disk" else vmm.HostTier(device, check=kind == "checked")
    with made as tier, sa.allocate(16 * 4096, stream) as buffer:
        filled(buffer, 1)
        rows = pattern(buffer.nbytes, 1).reshape(16, 4096).copy()
        stored = tier.save(buffer, [3, 5, 7, 9], 4096, stream)
        stored.drop([0, 2])
        assert (len(stored), stored.complete, tier.used) == (4, False, 2 * 4096)
        tier.load(stored, buffer, [0, 1, 2], stream, of=[3, 1, 3])
        rows[[0, 1, 2]] = rows[[9, 5, 9]]
        assert np.array_equal(read(buffer).reshape(16, 4096), rows)
        for wrong in (None, [0, 1], np.array([1, 2])):
            with pytest.raises(ValueError, match=r"of: block [02] of <Stored, 2 of 4 blocks left> was dropped"):
                tier.load(stored, buffer, range(4 if wrong is None else 2), stream, of=wrong)
        with pytest.raises(ValueError, match="blocks: 3 for the contents of 1"):
            tier.load(stored, buffer, range(3), stream, of=1)
        stored.drop([3])
        stored.drop()
        assert tier.used == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_room_of_contents_that_nobody_dropped(device: sa.Device, stream: sa.Stream, kind: str, tmp_path: Path) -> None:
    made = vmm.DiskTier(device, tmp_path) if kind == "disk" else vmm.HostTier(device)
    with made as tier, sa.allocate(4096, stream) as buffer:
        filled(buffer, 1)
        stored = tier.save(buffer, 0, 4096, stream)
        assert tier.used == 4096
        del stored
        end_what_was_dropped()
        assert tier.used == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (-1, ValueError),
        ([0, -1], ValueError),
        ([4], ValueError),
        (True, TypeError),
        ([True], TypeError),
        (1.5, TypeError),
    ],
)
def test_indices_of_stored_blocks_are_checked(
    device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, wrong: Any, error: type[Exception]
) -> None:
    with vmm.HostTier(device) as tier, pool.allocate(4 * 4096, stream) as buffer:
        filled(buffer, 1)
        stored = tier.save(buffer, range(4), 4096, stream)
        each_raises(error, lambda: stored.drop(wrong), match="^blocks")
        each_raises(error, lambda: tier.load(stored, buffer, [0], stream, of=wrong), match="^of")
        assert stored.complete
        stored.drop(range(4))


@pytest.mark.parametrize("wrong", [None, "x", 1.5])
def test_arguments_of_other_types(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, wrong: Any) -> None:
    with vmm.HostTier(device) as tier, pool.allocate(4096, stream) as buffer:
        each_raises(TypeError, lambda: tier.load(wrong, buffer, [0], stream), match="stored must be a Stored")
        each_raises(TypeError, lambda: tier.reserve(wrong, 4096), match="count must be an integer")
        array: Any = np.zeros(4096, np.uint8)
        stored = tier.save(buffer, [0], 4096, stream)
        for memory in (wrong, array):
            each_raises(
                TypeError, functools.partial(tier.save, memory, [0], 4096, stream), match="memory must be a Memory"
            )
            each_raises(
                TypeError, functools.partial(tier.load, stored, memory, [0], stream), match="memory must be a Memory"
            )
