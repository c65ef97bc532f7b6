"""Pages that are swapped out to disk: room, damage, faults of the disk, other threads."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.vmm.stores import disk_file
from tests.support import read
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import commit_filled, settled, values
from tests.vmm.stores.test_disk import deleted
from tests.vmm.support import PAGE


@pytest.fixture
def tier(device: sa.Device, tmp_path: Path) -> Iterator[vmm.DiskTier]:
    with vmm.DiskTier(device, tmp_path / "pages", 4 * PAGE) as tier:
        yield tier


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The reads and writes: name, position, size in bytes."""
    transfer, seen = disk_file.DiskFile._transfer, []

    def count(self: Any, function: Any, room: Any, position: int) -> int:
        seen.append((function.__name__, position, room.nbytes))
        return transfer(self, function, room, position)

    monkeypatch.setattr(disk_file.DiskFile, "_transfer", count)
    return seen


def test_room_is_limited_and_used_again(space: vmm.PageSpace, tier: vmm.DiskTier) -> None:
    before = deleted()
    commit_filled(space, range(6))
    for turn in range(3):
        assert space.swap_out([turn, 5], tier) == 2
        assert space.swap_out([4, 3], tier) == 2
        assert tier.used == tier.reserved == 4 * PAGE and deleted() == before + 1
        with pytest.raises(sa.OutOfMemoryError, match="limit of 8 MiB leaves no room for"):
            space.swap_out((turn + 1) % 3, tier)
        space.swap_in([4, turn])
        assert tier.used == 2 * PAGE
        space.swap_in(range(6))
        assert values(space)[:6] == list(range(1, 7))
    tier.trim()
    assert tier.reserved == 0 and deleted() == before and list(tier.folder.iterdir()) == []


def test_many_small_blocks_take_few_writes(
    device: sa.Device, stream: sa.Stream, tmp_path: Path, calls: list[tuple[str, int, int]]
) -> None:
    """Adjacent ones share a read or write of the size of a staging slot; each has a checksum."""
    size, count = 5000, 40  # padded to 8192
    with vmm.DiskTier(device, tmp_path, block=64 << 10, threads=2) as tier, sa.allocate(count * size, stream) as buffer:
        data = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
        buffer.copy_from(data)
        stored = tier.save(buffer, range(count), size, stream)
        assert [(name, nbytes) for name, _, nbytes in calls] == 5 * [("pwritev", 64 << 10)]
        buffer.fill(0)
        calls.clear()
        tier.load(stored, buffer, np.arange(count)[::-1], stream)
        assert len(calls) == 5 and (read(buffer).reshape(count, size) == data.reshape(count, size)[::-1]).all()
        stored.drop([3])
        with pytest.raises(ValueError, match="may be dropped"):
            tier.load(stored, buffer, range(count), stream)
        stored.drop()
        assert tier.used == 0


def test_the_limit_counts_the_padding_of_small_blocks(device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    size, limit = 512, 64 << 10
    with vmm.DiskTier(device, tmp_path, limit) as tier, sa.allocate(17 * size, stream) as buffer:
        stored = tier.save(buffer, range(16), size, stream)
        header = 8192
        assert tier._chunks[0].file.nbytes <= limit + header and tier.reserved == limit  # type: ignore[attr-defined]
        with pytest.raises(sa.OutOfMemoryError):
            tier.save(buffer, 16, size, stream)
        stored.drop()


@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_a_damaged_page_is_named_and_the_others_return(
    space: vmm.PageSpace, arena: vmm.PageArena, tier: vmm.DiskTier, damage: str
) -> None:
    commit_filled(space, range(4))
    space.swap_out(range(4), tier)
    (chunk,) = tier._chunks
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
        assert caught.value.block == 3 and space.committed.size == 0 and tier.used == 4 * PAGE
        space.stream.synchronize()
        assert settled(arena)[0] == 4 and values(space) == [0] * PAGES
    assert space.swap_in(range(3)) == 3 and values(space)[:4] == [1, 2, 3, 0]
    space.release(3)
    assert tier.used == 0


def test_writes_and_reads_in_several_steps(
    space: vmm.PageSpace, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, rooms, at: pwritev(fd, [rooms[0][: 256 << 10]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, at: preadv(fd, [rooms[0][: 512 << 10]], at))
    commit_filled(space, range(3))
    assert space.swap_out(range(3), tier) == space.swap_in(range(3)) == 3 and values(space)[:3] == [1, 2, 3]


def test_pages_that_are_larger_than_a_block(device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    size = 3 * PAGE
    with (
        vmm.PageArena(device, size) as arena,
        arena.space(4 * size, stream=stream) as space,
        vmm.DiskTier(device, tmp_path, block=PAGE * 2) as tier,
    ):
        space.commit([0, 1, 3])
        data = np.random.default_rng(2).integers(0, 256, 4 * size, np.uint8)
        data[2 * size : 3 * size] = 0
        for at in (0, 1, 3):
            space[at * size : (at + 1) * size].copy_from(data[at * size : (at + 1) * size])
        assert space.swap_out([0, 3, 1], tier) == space.swap_in([3, 1, 0]) == 3
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
    space: vmm.PageSpace, tier: vmm.DiskTier, way: str, patch: pytest.MonkeyPatch, error: int = 0
) -> Iterator[tuple[Held, list[Any]]]:
    """A block while another thread swaps pages 0 and 1, and is held in the call of the file; what it returns."""
    if way == "preadv":
        space.swap_out([0, 1], tier)
    held, moved = Held(patch, way, error), list[Any]()
    with beside(lambda: space.swap_out([0, 1], tier) if way == "pwritev" else space.swap_in([0, 1]), moved):
        assert held.began.wait(30)
        yield held, moved


@pytest.mark.parametrize("way", ["pwritev", "preadv"])
def test_other_threads_use_other_pages_meanwhile(
    space: vmm.PageSpace, tier: vmm.DiskTier, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that change the same pages wait."""
    commit_filled(space, range(4))
    others = list[Any]()
    with moving(space, tier, way, monkeypatch) as (held, moved):
        space.commit(5)
        space.release(2, after=space.stream)
        assert space.committed.tolist() == [3, 5]
        with beside(lambda: space.swap_in([0, 1, 3]), others) as thread:
            thread.join(0.05)
            assert thread.is_alive() and others == []
            held.go()
    assert moved == [2] and others == [2 if way == "pwritev" else 0]
    assert values(space)[:2] == [1, 2] and tier.used == 0


@pytest.mark.parametrize("way", ["pwritev", "preadv"])
def test_contents_that_another_thread_drops_keep_their_room_until_the_end(
    space: vmm.PageSpace, arena: vmm.PageArena, tier: vmm.DiskTier, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_filled(space, range(4))
    with moving(space, tier, way, monkeypatch) as (held, moved):
        space.release(1)
        assert tier.used == 2 * PAGE
        held.go()
    assert moved == [2] and tier.used == (PAGE if way == "pwritev" else 0)
    assert space.committed.tolist() == ([2, 3] if way == "pwritev" else [0, 2, 3])
    space.stream.synchronize()
    settled(arena)
    assert values(space)[:4] == [0 if way == "pwritev" else 1, 0, 3, 4]


def test_a_page_that_is_released_before_its_write_fails(
    space: vmm.PageSpace, arena: vmm.PageArena, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays released; the others stay as they were."""
    commit_filled(space, range(3))
    with monkeypatch.context() as patch, moving(space, tier, "pwritev", patch, errno.ENOSPC) as (held, moved):
        space.release(1)
        held.go()
    assert isinstance(moved[0], OSError) and space.committed.tolist() == [0, 2] and tier.used == 0
    space.stream.synchronize()
    assert settled(arena) == (3, 0, 1) and values(space)[:3] == [1, 0, 3]


def test_a_space_that_is_closed_meanwhile(
    arena: vmm.PageArena, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close waits for the writes."""
    space = arena.space(4 * PAGE)
    space.commit(range(3))
    closed = list[Any]()
    with (
        moving(space, tier, "pwritev", monkeypatch) as (held, moved),
        beside(lambda: space.close(after=()), closed) as thread,
    ):
        thread.join(0.05)
        assert thread.is_alive()
        held.go()
    assert (closed == [None] and moved[0] in (2,)) or isinstance(moved[0], sa.ClosedError)
    assert space.closed and tier.used == 0


def test_a_signal_handler_that_uses_the_same_pages(
    space: vmm.PageSpace, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, as it would wait for the call that it interrupts."""
    commit_filled(space, [0, 1])
    contents = type(tier._stored(PAGE))
    save = contents.save

    def handled(*args: Any) -> None:
        with pytest.raises(sa.InUseError):
            space.swap_in(0)
        save(*args)

    monkeypatch.setattr(contents, "save", handled)
    assert space.swap_out([0, 1], tier) == 2
    monkeypatch.undo()
    assert space.swap_in([0, 1]) == 2 and values(space)[:2] == [1, 2]
