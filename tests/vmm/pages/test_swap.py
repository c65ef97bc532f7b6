"""Pages that are swapped out to host memory and to disk: bytes, room, damage, faults of the disk, other threads."""

import contextlib
import copy
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.internal import Deferred, Fence, deferred_queue
from streamalloc.core.session import session_of
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.stores import disk_file
from tests.support import each_raises, eventually, names, pending, read, soon
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import commit_filled, fill, settled, values
from tests.vmm.stores.test_disk import deleted
from tests.vmm.support import PAGE

AnyTier: TypeAlias = vmm.HostTier | vmm.DiskTier


@pytest.fixture
def host(device: sa.Device) -> Iterator[vmm.HostTier]:
    with vmm.HostTier(device) as tier:
        yield tier


@pytest.fixture(params=[vmm.HostTier, vmm.DiskTier])
def tier(request: pytest.FixtureRequest, device: sa.Device, tmp_path: Path) -> Iterator[AnyTier]:
    folder = [tmp_path] if request.param is vmm.DiskTier else []
    with request.param(device, *folder) as tier:
        yield tier


def test_neither_way_makes_the_host_wait(space: vmm.PageSpace, host: vmm.HostTier, gate: Gate) -> None:
    space.commit([1, 2])
    gate.hold(space.stream)
    fill(space, [1, 2])
    space.swap_out([1, 2], host)
    assert pending(space.stream) and space.parked == 2
    gate.open()
    space.stream.synchronize()
    gate.hold(space.stream)
    space.swap_in([1, 2])
    assert pending(space.stream)
    gate.open()
    assert values(space)[1:3] == [2, 3]


@pytest.mark.parametrize("given", [lambda stream: stream, lambda stream: [stream.record()], lambda stream: None])
def test_swap_out_parks_the_pages_for_other_work(
    space: vmm.PageSpace, host: vmm.HostTier, gate: Gate, other: sa.Stream, given: Callable[[sa.Stream], Any]
) -> None:
    commit_filled(space, [1, 2])
    space.stream.synchronize()
    gate.hold(other)
    space.swap_out([1, 2], host, after=given(other))
    space.stream.synchronize()
    assert pending(other) and space.parked == 2 and not space.kept.size
    gate.open()
    assert space.swap_in([1, 2]) == 2 and values(space)[1:3] == [2, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda space, after: space.commit(0, after),
        lambda space, after: space.alias(0, space, 1, after),
        lambda space, after: space.make_private(1, after=after),
        lambda space, after: space.swap_in(3, after=after),
    ],
    ids=["commit", "alias", "make_private", "swap_in"],
)
def test_the_host_waits_for_other_work(
    space: vmm.PageSpace, host: vmm.HostTier, gate: Gate, other: sa.Stream, change: Callable[[vmm.PageSpace, Any], Any]
) -> None:
    space.commit([1, 3])
    space.alias(2, space, 1)
    space.swap_out(3, host)
    space.stream.synchronize()
    gate.hold(other)
    with soon(gate.open):
        change(space, [other])
        assert not pending(other)


def test_few_calls_for_many_copies(
    traced: Any, on_cuda: bool, stream: sa.Stream, arena: vmm.PageArena, host: vmm.HostTier
) -> None:
    with arena.space(128 * PAGE, stream=stream) as space:
        for pages, calls in (
            (range(20), 1 * ["cuMemcpyAsync"]),
            (range(0, 64, 3), 1 * ["cuMemcpyBatchAsync"]),
            (range(0, 128, 3), 2 * ["cuMemcpyBatchAsync"]),
        ):
            space.commit(pages)
            traced.calls.clear()
            space.swap_out(pages, host)
            assert space.swap_in(pages) == len(pages)
            copies = [name for name in names(traced) if "Memcpy" in name or name == "cuLaunchKernel"]
            # On hardware a kernel may have been faster when the ways were measured.
            assert copies == 2 * calls or (on_cuda and "cuLaunchKernel" in copies and len(copies) <= 2 * len(pages))
            assert not any("Synchronize" in name for name in names(traced) if not name.startswith("cuEvent"))
            space.release(pages, after=stream)


def test_copies_wait_once_for_those_before(traced: Any, stream: sa.Stream, host: vmm.HostTier) -> None:
    with sa.allocate(8 * 4096, stream) as buffer:
        stream.synchronize()
        for one in (stream, stream.device.per_thread_stream):
            stored = host.save(buffer, range(0, 8, 2), 4096, one)
            traced.calls.clear()
            host.load(stored, buffer, range(0, 8, 2), one)
            assert names(traced).count("cuStreamWaitEvent") == 1
            one.synchronize()
            stored.drop()
            traced.calls.clear()


def test_no_copy_passes_the_end_of_an_allocation(arena: vmm.PageArena, stream: sa.Stream, tier: AnyTier) -> None:
    with arena.space(32 * PAGE, stream=stream) as space:
        for pages in (16, 32):
            tier.reserve(pages, PAGE)  # allocations that lie side by side
        commit_filled(space, range(32))
        assert space.swap_out(range(32), tier) == space.swap_in(range(32)) == 32
        assert values(space) == list(range(1, 33))


def test_of_blocks_that_are_smaller_than_a_page(traced: Any, device: sa.Device, stream: sa.Stream) -> None:
    size = 4096
    with vmm.HostTier(device, check=True) as tier, sa.allocate(40 * size + 100, stream) as buffer:
        blocks = np.arange(0, 40, 2)
        for value, block in enumerate(blocks):
            buffer[block * size : (block + 1) * size].fill(value)
        traced.calls.clear()
        stored: Any = tier.save(buffer, blocks, size, stream)
        assert len([name for name in names(traced) if "Memcpy" in name or "Launch" in name]) == 1
        assert tier.used == 20 * size
        buffer.fill(100)
        tier.load(stored, buffer, blocks[::-1], stream)
        rows = read(buffer)[: 40 * size].reshape(40, size)
        assert rows[::2, ::1024].tolist() == [[n] * 4 for n in reversed(range(20))] and (rows[1::2] == 100).all()
        with pytest.raises(ValueError, match="blocks: 19 for the contents of 20"):
            tier.load(stored, buffer, blocks[:-1], stream)
        stored.array(3)[5] += 1
        with pytest.raises(ValueError, match="checksum differs"):
            tier.load(stored, buffer, blocks, stream)
        other = tier.save(buffer, 7, size, stream)
        stored.drop([3, 4])
        stored.drop([4])
        assert tier.used == 19 * size
        with pytest.raises(ValueError, match="was dropped"):
            tier.load(stored, buffer, blocks, stream)
        for one in (stored, stored, other):
            one.drop()
        assert tier.used == 0


@pytest.mark.parametrize("blocks", [-1, 10, [0, 10], np.array([1 << 62])])
def test_blocks_outside_of_memory(stream: sa.Stream, tier: AnyTier, blocks: Any) -> None:
    with sa.allocate(10 * 4096 + 100, stream) as buffer:
        stored = tier.save(buffer, range(len(np.atleast_1d(blocks))), 4096, stream)
        each_raises(
            ValueError,
            lambda: tier.save(buffer, blocks, 4096, stream),
            lambda: tier.load(stored, buffer, blocks, stream),
            match="block ",
        )
        each_raises(ValueError, lambda: tier.save(buffer, 0, 0, stream), match="nbytes=0")
        each_raises(TypeError, lambda: tier.save(buffer, [0.5], 4096, stream), match="indices")  # type: ignore[list-item]
        stored.drop()
        foreign = vmm.GrowableBuffer(sa.Device(0, driver=sd.simulated()), PAGE, PAGE)
        with foreign, pytest.raises(ValueError, match="another driver"):
            tier.save(foreign, 0, 4096, stream)


@pytest.mark.simulated_only("the driver has batches, or it has not")
def test_without_batches(faults: Faults, space: vmm.PageSpace, host: vmm.HostTier) -> None:
    commit_filled(space, [1, 3, 5])
    faults.fail("cuMemcpyBatchAsync", 1, times=2, result="CUDA_ERROR_NOT_SUPPORTED")
    space.swap_out([1, 3, 5], host)
    space.swap_in([1, 3, 5])
    assert faults.failed == 2 * ["cuMemcpyBatchAsync"] and values(space)[:6] == [0, 2, 0, 4, 0, 6]


def test_memory_of_the_tier_is_used_again_after_its_copies(space: vmm.PageSpace, device: sa.Device, gate: Gate) -> None:
    with vmm.HostTier(device, limit=PAGE) as tier, device.create_stream() as other:
        commit_filled(space, [0, 1])
        space.swap_out(0, tier)
        space.stream.synchronize()
        gate.hold(other)
        space.swap_in(0, other)
        space.swap_out(1, tier)
        assert pending(other) and pending(space.stream) and tier.used == PAGE
        gate.open()
        other.synchronize()
        assert values(space)[:2] == [1, 0]
        space.swap_in(1)
        assert values(space)[:2] == [1, 2]


def test_captures_of_other_streams_go_on(space: vmm.PageSpace, tier: AnyTier, device: sa.Device) -> None:
    commit_filled(space, [0, 1, 2])
    space.stream.synchronize()
    with device.create_stream() as other, sa.allocate(64, other) as buffer:
        with other.capture() as graph:
            assert space.swap_out([0, 2], tier) == space.swap_in([0, 2]) == 2
            buffer.fill(3, other)
        graph.launch(other)
        assert (read(buffer) == 3).all() and values(space)[:3] == [1, 2, 3]
        graph.close()


def test_no_room(device: sa.Device, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
    with vmm.HostTier(device, limit=32 << 20) as tier:
        commit_filled(space, range(PAGES))
        with arena.space(4 * PAGE, stream=space.stream) as other:
            commit_filled(other, range(4))
            other.swap_out(range(2), tier)
            with pytest.raises(sa.OutOfMemoryError):
                space.swap_out(range(PAGES), tier)
            assert values(space) == list(range(1, PAGES + 1))
            assert other.swap_in(range(2)) == 2
    with pytest.raises(sa.ClosedError):
        space.swap_out(0, tier)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_space_ends_with_its_contents(arena: vmm.PageArena, tier: AnyTier, how: str) -> None:
    space = arena.space(4 * PAGE)
    space.commit(range(3))
    space.swap_out(range(2), tier)
    if how == "close":
        space.close()
    del space
    gc.collect()

    def ended() -> bool:
        arena.device.synchronize()
        return settled(arena) == (3, 3, 0) and tier.used == 0

    assert eventually(ended)


def test_what_is_refused(space: vmm.PageSpace, device: sa.Device, tier: AnyTier) -> None:
    space.commit(0)
    with pytest.raises(TypeError, match="tier must be a HostTier or DiskTier"):
        space.swap_out(0, "disk")  # type: ignore[arg-type]
    with vmm.HostTier(sa.Device(0, driver=sd.simulated())) as other, pytest.raises(TypeError, match="DiskTier of"):
        space.swap_out(0, other)
    with space.stream.capture() as graph, pytest.raises(sa.CaptureError):
        space.swap_out(0, tier)
    graph.close()
    assert space.committed.tolist() == [0]


@pytest.mark.parametrize("call", ["commit", "release", "swap_out", "alias"])
@pytest.mark.parametrize("captured", ["stream", "event"])
def test_work_of_a_capture_is_refused(space: vmm.PageSpace, host: vmm.HostTier, call: str, captured: str) -> None:
    """No page is changed, and the capture of the stream goes on."""
    space.commit([0, 1])
    with space.device.create_stream() as stream:
        acts: dict[str, Callable[[Any], object]] = {
            "commit": lambda after: space.commit(2, after),
            "release": lambda after: space.release(0, after),
            "swap_out": lambda after: space.swap_out(0, host, after=after),
            "alias": lambda after: space.alias(2, space, 0, after),
        }
        with stream.capture("relaxed") as graph:
            event = stream.record()
            if captured == "stream":
                with pytest.raises(sa.CaptureError):
                    acts[call](stream)
        if captured == "event":
            with pytest.raises(sa.CudaError):
                acts[call](event)
        graph.close()
    assert space.committed.tolist() == [0, 1] and not space.parked
    space.close(())


def test_tiers_grow_under_no_lock(space: vmm.PageSpace, host: vmm.HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads change pages meanwhile."""
    grow, busy = vmm.HostTier._grow, []

    def seen(*args: Any) -> Any:
        busy.append(not space._physical.try_changing(lambda: True, otherwise=False))
        return grow(*args)

    monkeypatch.setattr(vmm.HostTier, "_grow", seen)
    space.commit(range(PAGES))
    space.swap_out(range(PAGES), host)
    assert busy == [False] and host.reserved == 32 << 20
    host.reserve(4, PAGE)
    assert busy == [False, False]
    with pytest.raises(sa.OutOfMemoryError), vmm.HostTier(space.device, limit=PAGE) as small:
        small.reserve(2, PAGE)


def test_a_block_that_is_named_twice_is_dropped_once(stream: sa.Stream, tier: AnyTier) -> None:
    with sa.allocate(4 * 4096, stream) as buffer:
        stored = tier.save(buffer, range(3), 4096, stream)
        stored.drop([0, 0])
        assert tier.used == 2 * 4096
        stored.drop([1, 1, 0])
        assert tier.used == 4096 and stored._present.tolist() == [False, False, True]
        stored.drop()
        assert tier.used == 0


def test_memory_without_contents_is_released_before_other_contents(stream: sa.Stream, machine: Any) -> None:
    size, limit = 32 << 20, 64 << 20
    with vmm.HostTier(stream.device, limit) as tier, sa.allocate(2 * size, stream) as buffer:
        tier.reserve(1, size)
        stored = tier.save(buffer, range(2), size, stream)
        stored.drop([0])
        stream.synchronize()
        tier.trim()
        assert tier.reserved == size and len(stored.room.chunks) == 1
        stored.drop()


@pytest.mark.simulated_only("threads of this process")
def test_copies_that_are_noted_while_completed_ones_are_forgotten(
    device: sa.Device, stream: sa.Stream, host: vmm.HostTier, gate: Gate
) -> None:
    """The memory of a chunk stays until they have completed."""
    with sa.allocate(4096, stream) as buffer:
        stored = host.save(buffer, 0, 4096, stream)
        (chunk,) = stored.room.chunks.values()
        (done,) = chunk.release.fences
        stream.synchronize()
        gate.hold(stream)
        buffer.fill(1)
        late = Fence(session_of(stream), [stream])

        class Asked(Fence):
            asked = False

            def done(self) -> bool:
                if not self.asked:  # as another thread does
                    self.asked = True
                    chunk.release._forget_completed()
                    chunk.release.use(late)
                return True

        chunk.release.use(Asked(session_of(device), ()))
        chunk.release._forget_completed()
        assert list(chunk.release.fences) == [late] and done.done()
        gate.open()
        stored.drop()


def test_the_end_of_a_space_attempts_no_releases_under_its_lock(arena: vmm.PageArena, tier: AnyTier) -> None:
    busy = []

    class Item(Deferred):
        def attempt(self) -> bool:
            busy.append(not space._physical.try_changing(lambda: True, otherwise=False))
            return True

    with arena.space(4 * PAGE) as space:
        space.commit(0)
        space.swap_out(0, tier)
        tier.close()
        arena.device.synchronize()
        deferred_queue(space._session).submit(Item())
        space.close(after=())
        arena.device.synchronize()
        assert busy == [False] and tier.reserved == 0


def test_room_that_is_used_again_waits_for_no_copies_of_long_ago(
    traced: Any, space: vmm.PageSpace, other: sa.Stream, host: vmm.HostTier
) -> None:
    stream = space.stream
    for _ in range(20):
        space.commit([0], after=stream)
        space.swap_out([0], host)
        space.release([0], after=stream)
        stream.synchronize()
    before = len(names(traced))
    host.save(space, [1], PAGE, other).drop()
    assert names(traced)[before:].count("cuStreamWaitEvent") < 5


def test_contents_are_not_copied(space: vmm.PageSpace, tier: AnyTier) -> None:
    stored = tier.save(space, [0], PAGE, space.stream)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(stored)
    stored.drop()
    assert tier.used == 0


# -- pages that are swapped out to disk: room, damage, faults of the disk, other threads ------------------------------


@pytest.fixture
def disk(device: sa.Device, tmp_path: Path) -> Iterator[vmm.DiskTier]:
    with vmm.DiskTier(device, tmp_path / "pages", 4 * PAGE) as disk:
        yield disk


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The reads and writes: name, position, size in bytes."""
    transfer, seen = disk_file.DiskFile._transfer, []

    def count(self: Any, function: Any, room: Any, position: int) -> int:
        seen.append((function.__name__, position, room.nbytes))
        return transfer(self, function, room, position)

    monkeypatch.setattr(disk_file.DiskFile, "_transfer", count)
    return seen


def test_room_is_limited_and_used_again(space: vmm.PageSpace, disk: vmm.DiskTier) -> None:
    before = deleted()
    commit_filled(space, range(6))
    for turn in range(3):
        assert space.swap_out([turn, 5], disk) == 2
        assert space.swap_out([4, 3], disk) == 2
        assert disk.used == disk.reserved == 4 * PAGE and deleted() == before + 2
        with pytest.raises(sa.OutOfMemoryError, match="limit of 8 MiB leaves no room for"):
            space.swap_out((turn + 1) % 3, disk)
        space.swap_in([4, turn])
        assert disk.used == 2 * PAGE
        space.swap_in(range(6))
        assert values(space)[:6] == list(range(1, 7))
    disk.trim()
    assert disk.reserved == 0 and deleted() == before and list(disk.folder.iterdir()) == []


def test_many_small_blocks_take_few_writes(
    device: sa.Device, stream: sa.Stream, tmp_path: Path, calls: list[tuple[str, int, int]]
) -> None:
    """Adjacent ones share a read or write of the size of a staging slot; each has a checksum."""
    size, count = 5000, 40  # padded to 8192
    with vmm.DiskTier(device, tmp_path, block=64 << 10, threads=2) as disk, sa.allocate(count * size, stream) as buffer:
        data = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
        buffer.copy_from(data)
        stored = disk.save(buffer, range(count), size, stream)
        assert [(name, nbytes) for name, _, nbytes in calls] == 5 * [("pwritev", 64 << 10)]
        buffer.fill(0)
        calls.clear()
        disk.load(stored, buffer, np.arange(count)[::-1], stream)
        assert len(calls) == 5 and (read(buffer).reshape(count, size) == data.reshape(count, size)[::-1]).all()
        stored.drop([3])
        with pytest.raises(ValueError, match="was dropped"):
            disk.load(stored, buffer, range(count), stream)
        stored.drop()
        assert disk.used == 0


def test_the_limit_counts_the_padding_of_small_blocks(device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    size, limit = 512, 64 << 10
    with vmm.DiskTier(device, tmp_path, limit) as disk, sa.allocate(17 * size, stream) as buffer:
        stored = disk.save(buffer, range(16), size, stream)
        header = 8192
        assert disk._chunks[0].file.nbytes <= limit + header and disk.reserved == limit  # type: ignore[attr-defined]
        with pytest.raises(sa.OutOfMemoryError):
            disk.save(buffer, 16, size, stream)
        stored.drop()


@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_a_damaged_page_is_named_and_the_others_return(
    space: vmm.PageSpace, arena: vmm.PageArena, disk: vmm.DiskTier, damage: str
) -> None:
    commit_filled(space, range(4))
    space.swap_out(range(4), disk)
    (chunk,) = disk._chunks
    block = chunk.file.blocks(3)[0]  # type: ignore[attr-defined]
    path = f"/proc/self/fd/{chunk.file._fd.fileno()}"  # type: ignore[attr-defined]
    if damage == "changed":
        with open(path, "r+b") as file:
            file.seek(block.position + 4321)
            file.write(b"\xee")
    else:
        os.truncate(path, block.position + 4096)
    for _ in range(2):
        with pytest.raises(vmm.DamagedBackupError, match=r"page 3 of <PageSpace.*damaged") as caught:
            space.swap_in(range(4))
        assert caught.value.block == 3 and space.committed.size == 0 and disk.used == 4 * PAGE
        space.stream.synchronize()
        assert settled(arena)[0] == 4 and values(space) == [0] * PAGES
    assert space.swap_in(range(3)) == 3 and values(space)[:4] == [1, 2, 3, 0]
    space.release(3)
    assert disk.used == 0


def test_transfers_in_several_steps(space: vmm.PageSpace, disk: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, rooms, at: pwritev(fd, [rooms[0][: 256 << 10]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, at: preadv(fd, [rooms[0][: 512 << 10]], at))
    commit_filled(space, range(3))
    assert space.swap_out(range(3), disk) == space.swap_in(range(3)) == 3 and values(space)[:3] == [1, 2, 3]


def test_pages_that_are_larger_than_a_block(device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    size = 3 * PAGE
    with (
        vmm.PageArena(device, size) as arena,
        arena.space(4 * size, stream=stream) as space,
        vmm.DiskTier(device, tmp_path, block=PAGE * 2) as disk,
    ):
        space.commit([0, 1, 3])
        data = np.random.default_rng(2).integers(0, 256, 4 * size, np.uint8)
        data[2 * size : 3 * size] = 0
        for at in (0, 1, 3):
            space[at * size : (at + 1) * size].copy_from(data[at * size : (at + 1) * size])
        assert space.swap_out([0, 3, 1], disk) == space.swap_in([3, 1, 0]) == 3
        assert (read(space) == data).all()


class Held:
    """A call of the file that waits until :meth:`go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, error: int = 0) -> None:
        self.began, self._go = threading.Event(), threading.Event()
        call = getattr(os, name)

        def held(*args: Any) -> int:
            self.began.set()
            assert self._go.wait(30)
            if error:
                raise OSError(error, os.strerror(error))
            done: int = call(*args)
            return done

        monkeypatch.setattr(os, name, held)

    def go(self) -> None:
        self._go.set()


@contextlib.contextmanager
def beside(function: Callable[[], Any], results: list[Any]) -> Iterator[threading.Thread]:
    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def moving(
    space: vmm.PageSpace, disk: vmm.DiskTier, way: str, patch: pytest.MonkeyPatch, error: int = 0
) -> Iterator[tuple[Held, list[Any]]]:
    """A block while another thread swaps pages 0 and 1, and is held in the call of the file; what it returns."""
    if way == "preadv":
        space.swap_out([0, 1], disk)
    held, moved = Held(patch, way, error), list[Any]()
    with beside(lambda: space.swap_out([0, 1], disk) if way == "pwritev" else space.swap_in([0, 1]), moved):
        assert held.began.wait(30)
        yield held, moved


@pytest.mark.parametrize("way", ["pwritev", "preadv"])
def test_other_threads_use_other_pages_meanwhile(
    space: vmm.PageSpace, disk: vmm.DiskTier, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that change the same pages wait."""
    commit_filled(space, range(4))
    others = list[Any]()
    with moving(space, disk, way, monkeypatch) as (held, moved):
        space.commit(5)
        space.release(2, after=space.stream)
        assert space.committed.tolist() == [3, 5]
        with beside(lambda: space.swap_in([0, 1, 3]), others) as thread:
            thread.join(0.05)
            assert thread.is_alive() and others == []
            held.go()
    assert moved == [2] and others == [2 if way == "pwritev" else 0]
    assert values(space)[:2] == [1, 2] and disk.used == 0


@pytest.mark.parametrize("way", ["pwritev", "preadv"])
def test_contents_that_another_thread_drops_keep_their_room_until_the_end(
    space: vmm.PageSpace, arena: vmm.PageArena, disk: vmm.DiskTier, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_filled(space, range(4))
    with moving(space, disk, way, monkeypatch) as (held, moved):
        space.release(1)
        assert disk.used == 2 * PAGE
        held.go()
    assert moved == [2] and disk.used == (PAGE if way == "pwritev" else 0)
    assert space.committed.tolist() == ([2, 3] if way == "pwritev" else [0, 2, 3])
    space.stream.synchronize()
    settled(arena)
    assert values(space)[:4] == [0 if way == "pwritev" else 1, 0, 3, 4]


def test_a_page_that_is_released_before_its_write_fails(
    space: vmm.PageSpace, arena: vmm.PageArena, disk: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays released; the others stay as they were."""
    commit_filled(space, range(3))
    with monkeypatch.context() as patch, moving(space, disk, "pwritev", patch, errno.ENOSPC) as (held, moved):
        space.release(1)
        held.go()
    assert isinstance(moved[0], OSError) and space.committed.tolist() == [0, 2] and disk.used == 0
    space.stream.synchronize()
    assert settled(arena) == (3, 0, 1) and values(space)[:3] == [1, 0, 3]


def test_a_space_closed_meanwhile(arena: vmm.PageArena, disk: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The close waits for the writes."""
    space = arena.space(4 * PAGE)
    space.commit(range(3))
    closed = list[Any]()
    with (
        moving(space, disk, "pwritev", monkeypatch) as (held, moved),
        beside(lambda: space.close(after=()), closed) as thread,
    ):
        thread.join(0.05)
        assert thread.is_alive()
        held.go()
    assert (closed == [None] and moved[0] in (2,)) or isinstance(moved[0], sa.ClosedError)
    assert space.closed and disk.used == 0


def test_a_signal_handler_that_uses_the_same_pages(
    space: vmm.PageSpace, disk: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, as it would wait for the call that it interrupts."""
    commit_filled(space, [0, 1])
    contents = type(disk._stored(np.full(1, PAGE), PAGE))
    save = contents.save

    def handled(*args: Any) -> None:
        with pytest.raises(sa.InUseError):
            space.swap_in(0)
        save(*args)

    monkeypatch.setattr(contents, "save", handled)
    assert space.swap_out([0, 1], disk) == 2
    monkeypatch.undo()
    assert space.swap_in([0, 1]) == 2 and values(space)[:2] == [1, 2]
