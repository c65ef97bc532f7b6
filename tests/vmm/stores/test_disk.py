"""Backups on disk: contents, files, damage, faults of the driver and of the disk."""

import contextlib
import errno
import functools
import gc
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from streamalloc.vmm.stores import disk, disk_file
from tests.support import Account, end_what_was_dropped, filled, in_threads, pattern, read, shows
from tests.vmm.support import PAGE

BLOCK = 4096
SIZES = (25 * BLOCK + 100, 10, 2 * BLOCK)
"""Sizes of buffers; the first has more blocks than there is staging memory for."""
TAGS = ("a", "a", "b/c")


def deleted() -> int:
    """Number of open files that have no name any more; those of other tests are not of a backup."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.endswith(" (deleted)") and "memfd" not in link for link in links)


@pytest.fixture
def tier(device: sa.Device, tmp_path: Path) -> Iterator[vmm.DiskTier]:
    with vmm.DiskTier(device, tmp_path / "backups", block=BLOCK) as tier:
        yield tier


@pytest.fixture
def kept(device: sa.Device, tmp_path: Path) -> Iterator[vmm.DiskTier]:
    with vmm.DiskTier(device, tmp_path / "backups", persistent=True, block=BLOCK) as tier:
        yield tier


def made(group: vmm.SleepGroup, seed: int = 0) -> list[vmm.VirtualBuffer]:
    several = [group.allocate(nbytes, tag=tag) for nbytes, tag in zip(SIZES, TAGS, strict=True)]
    for nth, buffer in enumerate(several):
        filled(buffer, seed + nth)
    return several


def right(several: list[vmm.VirtualBuffer], seed: int = 0) -> bool:
    return all(shows(buffer, seed + nth) for nth, buffer in enumerate(several))


def test_a_tag_too_long_for_a_file(device: sa.Device, kept: vmm.DiskTier) -> None:
    tag = "x" * 250
    with vmm.SleepGroup(device, backup=kept) as group:
        buffer = group.allocate(PAGE, tag=tag)
        with pytest.raises(ValueError, match=r"'x{250}' has 257 bytes in its name: allowed are 249"):
            group.sleep(tag)
        assert not buffer.evicted and list(kept.folder.iterdir()) == []


class TestContents:
    @pytest.mark.parametrize("persistent", [False, True])
    def test_blocks_are_freed_on_another_thread(
        self, device: sa.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool
    ) -> None:
        """Those of files that a sleep replaces, or of files without a name after the wake."""
        closes: list[Callable[[], None]] = []

        def start(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            if len(closes) == 1:
                raise RuntimeError("can't start new thread at interpreter shutdown")
            assert os.fstat(args[0]).st_nlink == 0
            closes.append(functools.partial(function, *args))

        threads = types.SimpleNamespace(start_new_thread=start, allocate_lock=threading.Lock)
        monkeypatch.setattr(disk_file, "_thread", threads)
        monkeypatch.setattr(disk_file, "_LARGE", 1)
        tier = vmm.DiskTier(device, tmp_path, persistent=persistent, block=BLOCK)
        with tier, vmm.SleepGroup(device, backup=tier) as group:
            several = made(group)
            before = deleted()
            for _ in range(2):
                group.sleep()
                group.wake()
            # Two files, of which a thread closes one; the rest is closed at once.
            assert len(closes) == 1 and deleted() == before + 1
            closes[0]()
            assert deleted() == before and right(several)

    @pytest.mark.parametrize("allocates", [True, False])
    def test_a_full_disk_has_room_once_another_thread_has_closed_a_file(
        self, device: sa.Device, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch, allocates: bool
    ) -> None:
        close, allocate, write = os.close, os.posix_fallocate, os.pwritev
        opening, closed = threading.Event(), threading.Event()

        def close_late(fd: int) -> None:
            if threading.current_thread() is threading.main_thread():
                close(fd)
            else:
                opening.wait(20)
                close(fd)
                closed.set()

        def full(call: Callable[..., Any], error: int) -> Callable[..., Any]:
            def limited(*args: Any) -> Any:
                if not closed.is_set():
                    opening.set()
                    raise OSError(error, "no space")
                return call(*args)

            return limited

        with vmm.SleepGroup(device, backup=tier) as group:
            several = made(group)
            group.sleep()
            monkeypatch.setattr(disk_file, "_LARGE", 1)
            monkeypatch.setattr(os, "close", close_late)
            group.wake()
            fallocate = full(allocate, errno.EDQUOT if allocates else errno.EOPNOTSUPP)
            monkeypatch.setattr(os, "posix_fallocate", fallocate)
            monkeypatch.setattr(os, "pwritev", full(write, errno.ENOSPC))
            group.sleep()
            group.wake()
            assert closed.is_set() and right(several)

    def test_are_read_and_replaced_asleep(self, device: sa.Device, tier: vmm.DiskTier) -> None:
        with vmm.SleepGroup(device, backup=tier) as group:
            several = made(group)
            group.sleep()
            part = np.zeros(3 * BLOCK, np.uint8)
            group.read(several[0], part, BLOCK - 5)
            assert np.array_equal(part, pattern(SIZES[0], 0)[BLOCK - 5 :][: 3 * BLOCK])
            group.write(several[0], part, SIZES[0] - part.nbytes)
            group.wake()
            expected = np.concatenate((pattern(SIZES[0], 0)[: -part.nbytes], part))
            assert np.array_equal(read(several[0]), expected) and shows(several[1], 1)

    @pytest.mark.parametrize("step", ["sleep", "wake"])
    def test_staging_waits_for_the_copies(self, device: sa.Device, tier: vmm.DiskTier, gate: Gate, step: str) -> None:
        with vmm.SleepGroup(device, backup=tier) as group, device.create_stream() as held:
            several = made(group)
            device.synchronize()
            if step == "wake":
                group.sleep()
            gate.hold(held)
            act = functools.partial(group.sleep, after=()) if step == "sleep" else group.wake
            thread = threading.Thread(target=lambda: act(stream=held))
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
            gate.open()
            thread.join(20)
            group.wake()
            held.synchronize()
            assert right(several)

    def test_memory_that_the_device_may_only_read(self, device: sa.Device, tier: vmm.DiskTier) -> None:
        with vmm.GrowableBuffer(device, PAGE, PAGE) as buffer:
            filled(buffer, 1)
            buffer.set_access(device, sa.MemAccess.READ)
            buffer.evict(tier)
            buffer.restore()
            assert shows(buffer, 1)

    def test_staging_memory_is_bounded_and_used_again(self, account: Account, tmp_path: Path) -> None:
        tier = vmm.DiskTier(account.device, tmp_path, block=BLOCK)
        with tier, vmm.SleepGroup(account.device, backup=tier) as group:
            several = made(group)
            for _ in range(2):
                group.sleep()
                group.wake()
            assert right(several)
            registered = [call.args for call in account.traced.calls if call.name == "cuMemHostRegister"]
            assert [int(nbytes) for _, nbytes, _ in registered] == [disk._SLOTS * BLOCK]
            for buffer in several:
                buffer.close()
        assert len(account.calls("cuMemHostUnregister")) == 1
        assert account.left == {} and account.checked.hazards == []

    def test_a_dropped_tier_unregisters_its_memory(self, account: Account, tmp_path: Path) -> None:
        tier = vmm.DiskTier(account.device, tmp_path, block=BLOCK)
        with vmm.GrowableBuffer(account.device, PAGE, PAGE) as buffer:
            buffer.evict(tier)
            buffer.restore()
        del tier
        gc.collect()
        account.device.synchronize()
        end_what_was_dropped()
        assert len(account.calls("cuMemHostUnregister")) == 1

    def test_two_groups_at_once(self, device: sa.Device, tier: vmm.DiskTier) -> None:
        def cycle(seed: int) -> None:
            with vmm.SleepGroup(device, backup=tier) as group, device.create_stream() as stream:
                several = made(group, seed)
                for _ in range(3):
                    group.sleep(stream=stream)
                    group.wake(stream=stream)
                stream.synchronize()
                assert right(several, seed)

        in_threads(lambda: cycle(0), lambda: cycle(10))


class TestFiles:
    def test_are_for_this_user_and_outlive_the_buffers(self, device: sa.Device, kept: vmm.DiskTier) -> None:
        before = os.umask(0)
        try:
            with vmm.SleepGroup(device, backup=kept) as group:
                several = made(group)
                group.sleep()
        finally:
            os.umask(before)
        assert sorted(path.name for path in kept.folder.iterdir()) == ["a.backup", "b%2Fc.backup"]
        assert {path.stat().st_mode & 0o777 for path in kept.folder.iterdir()} == {0o600}
        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group, 5)
            group.sleep("a", keep=False)
            assert group.resume() == PAGE and group.asleep
            group.wake()
            assert right(several)
            several[0].fill(0)
            group.sleep()  # replaces the files
            group.wake()
            assert not read(several[0]).any() and shows(several[2], 2)

    def test_what_a_dead_process_left_is_replaced(self, device: sa.Device, kept: vmm.DiskTier) -> None:
        (kept.folder / ".a.backup.part").write_bytes(b"half")
        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group)
            group.sleep("a")
            assert [path.name for path in kept.folder.iterdir()] == ["a.backup"]
            group.wake()
            assert right(several)

    def test_only_a_tier_on_disk_resumes(self, device: sa.Device) -> None:
        with vmm.SleepGroup(device) as group, pytest.raises(TypeError, match="DiskTier"):
            group.resume()

    @pytest.mark.parametrize("when", range(1, 5))
    def test_the_disk_is_full(
        self, device: sa.Device, kept: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch, when: int
    ) -> None:
        count, write = itertools.count(1), os.pwritev

        def full(fd: int, data: Any, position: int) -> int:
            if next(count) >= when:
                raise OSError(errno.ENOSPC, "no space")
            return write(fd, data, position)

        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", full)
                with pytest.raises(OSError, match="no space"):
                    group.sleep()
            assert not group.asleep and right(several) and list(kept.folder.iterdir()) == []
            group.sleep()
            group.wake()
            assert right(several)

    @pytest.mark.parametrize("reason", ["ENOSPC", "EOPNOTSUPP"])
    def test_room_is_allocated_first(
        self, device: sa.Device, kept: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch, reason: str
    ) -> None:
        def refuse(fd: int, offset: int, nbytes: int) -> None:
            assert nbytes == os.fstat(fd).st_size
            raise OSError(getattr(errno, reason), reason)

        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group)
            group.sleep("a")
            (path,) = kept.folder.iterdir()
            assert path.stat().st_blocks * 512 >= path.stat().st_size
            group.wake()
            path.unlink()
            monkeypatch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(OSError, match="ENOSPC") if reason == "ENOSPC" else contextlib.nullcontext():
                group.sleep()
            assert group.asleep == (reason != "ENOSPC") == (len(list(kept.folder.iterdir())) == 2)
            group.wake()
            assert right(several)

    def test_a_write_that_outlives_its_call_changes_no_later_contents(
        self, stream: sa.Stream, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write, begun, goes_on, ended = disk_file.DiskFile.write, *(threading.Event() for _ in range(3))

        def late(file: disk_file.DiskFile, blocks: Any, room: Any) -> None:
            if blocks[0].number == 0:
                begun.wait(20)
                raise OSError(errno.ENOSPC, "no space")
            begun.set()
            goes_on.wait(20)
            write(file, blocks, room)
            ended.set()

        with sa.allocate(2 * BLOCK, stream) as buffer:
            buffer.fill(1)
            monkeypatch.setattr(disk_file.DiskFile, "write", late)
            with pytest.raises(OSError, match="no space"):
                tier.save(buffer, range(2), BLOCK, stream)
            monkeypatch.undo()
            buffer.fill(2)
            stored = tier.save(buffer, range(2), BLOCK, stream)
            goes_on.set()
            assert ended.wait(20)
            buffer.fill(0)
            tier.load(stored, buffer, range(2), stream)
            assert set(read(buffer)) == {2}
            stored.drop()

    def test_a_file_system_without_direct_calls(
        self, device: sa.Device, tier: vmm.DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that refuses them only when they are made."""
        direct = set()
        write = disk_file.DiskFile._transfer

        def refuse(self: Any, function: Callable[..., int], room: Any, position: int) -> int:
            def call(*args: Any) -> int:
                direct.add(self.direct)
                if self.direct:
                    raise OSError(errno.EINVAL, "not aligned")
                return function(*args)

            return write(self, call, room, position)

        monkeypatch.setattr(disk_file.DiskFile, "_transfer", refuse)
        with vmm.SleepGroup(device, backup=tier) as group:
            several = made(group)
            group.sleep()
            group.wake()
            assert right(several) and False in direct

    @pytest.mark.parametrize(
        ("wrong", "message"), [({"block": 100}, "block=100"), ({"block": 0}, "block=0"), ({"threads": 0}, "threads=0")]
    )
    def test_wrong_arguments(self, device: sa.Device, tmp_path: Path, wrong: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            vmm.DiskTier(device, tmp_path, **wrong)  # type: ignore[arg-type]

    def test_a_closed_tier(self, device: sa.Device, tier: vmm.DiskTier) -> None:
        with vmm.SleepGroup(device, backup=tier) as group:
            several = made(group)
            group.sleep()
            tier.close()
            group.wake()
            assert right(several)
            with pytest.raises(sa.ClosedError, match="closed"):
                group.sleep()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _put(offset: int, data: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    return put


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MOST = b"\xff" * 8
HOSTILE: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + BLOCK),
    "another file": _put(0, b"x"),
    "another version": _put(8, b"\2"),
    "blocks of 2 GiB": _put(12, b"\0\0\0\x80"),
    "buffers without number": _put(16, MOST),
    "huge": _put(24, MOST),
    "another size": _put(32, MOST),
    "a checksum": _put(48, b"\x12\x34"),
    "readable": lambda path: path.chmod(0o644),
    "link": _link,
    "fifo": _fifo,
    "folder": _folder,
}


class TestDamage:
    @pytest.mark.parametrize("how", HOSTILE)
    def test_is_found_before_a_driver_call(self, account: Account, tmp_path: Path, how: str) -> None:
        tier = vmm.DiskTier(account.device, tmp_path, persistent=True, block=BLOCK)
        with tier, vmm.SleepGroup(account.device, backup=tier) as group:
            several = made(group)
            group.sleep()
            group.wake()
            HOSTILE[how](tmp_path / "a.backup")
            account.traced.calls.clear()
            with pytest.raises(vmm.DamagedBackupError, match=r"a\.backup"):
                group.resume("a", after=())
            assert account.calls("cuMemUnmap", "cuMemcpyAsync", "cuMemHostRegister") == []
            assert not group.asleep and right(several)
            for buffer in several:
                buffer.close()

    @pytest.mark.parametrize("change", ["sizes", "number", "absent"])
    def test_another_layout(self, device: sa.Device, kept: vmm.DiskTier, change: str) -> None:
        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group)
            group.sleep("a")
            group.wake()
            if change == "sizes":
                several[1].resize(11)  # type: ignore[attr-defined]
            elif change == "number":
                several.append(group.allocate(5, tag="a"))
            else:
                (kept.folder / "a.backup").unlink()
            absent = FileNotFoundError, r"no group has put 'a' to sleep in this folder.*a\.backup"
            error, says = absent if change == "absent" else (vmm.DamagedBackupError, "is no backup of these buffers")
            with pytest.raises(error, match=says):
                group.resume("a")
            assert not group.asleep and shows(several[0], 0)

    def test_of_a_block(self, device: sa.Device, kept: vmm.DiskTier) -> None:
        with vmm.SleepGroup(device, backup=kept) as group:
            several = made(group)
            group.sleep()
            _put((kept.folder / "a.backup").stat().st_size - BLOCK, b"xxxxx")(kept.folder / "a.backup")
            for _ in range(2):
                with pytest.raises(vmm.DamagedBackupError, match="damaged"):
                    group.wake()
                assert all(buffer.evicted for buffer in several) and group.mapped_bytes == 0
            with pytest.raises(vmm.DamagedBackupError, match="damaged"):
                group.read(several[1], np.zeros(1, np.uint8))
            group.write(several[1], pattern(SIZES[1], 1))
            group.wake()
            assert right(several)
