"""Backups in host memory: pieces of a pool, their room, bytes that are read and replaced while the buffer sleeps."""

import contextlib
import gc
import itertools
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Faults, Gate, settle
from streamalloc.vmm import steps
from streamalloc.vmm.stores import host as stores
from streamalloc.vmm.stores import pinned as ways
from streamalloc.vmm.stores.blocks import Chunk
from streamalloc.vmm.stores.pinned import HUGE, host_segments
from tests.support import Account, MiB, NoHostMemory, each_raises, eventually, filled, names, pattern, read, shows

PIECE = 1 << 20
THREE = 40 * MiB
"""A size that takes three pieces of pinned memory, with the fixture ``small_pins``."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_ALLOCATION", PIECE)


@pytest.fixture
def small_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one call pin 16 MiB at most."""
    monkeypatch.setattr(stores, "_BLOCKS", 8)


def sleep_and_wake(group: vmm.SleepGroup, nbytes: int = 100) -> None:
    with group.allocate(nbytes) as buffer:
        filled(buffer, 1)
        group.sleep()
        group.wake()
        assert shows(buffer, 1)


def test_blocks_with_room_between_them_are_no_run() -> None:
    memory = np.arange(64, dtype=np.uint8)
    room = SimpleNamespace(
        addresses=np.array([0, 8, 32]),
        bases=np.zeros(3, int),
        sizes=np.full(3, 8),
        chunks={0: SimpleNamespace(memory=memory)},
    )
    stored: Any = SimpleNamespace(room=room)
    runs = [(first, np.asarray(part).tolist()) for first, part in stores.InMemory._runs(stored, range(3))]
    assert runs == [(0, [*range(16)]), (2, [*range(32, 40)])]


def test_room_that_no_thread_makes_is_asked_for() -> None:
    begun: list[object] = []
    made = SimpleNamespace(nbytes=HUGE, left=1)
    tier: Any = SimpleNamespace(_chunks=[], _failure=None, _under_way=0, _check_open=lambda: None)
    tier._begin, tier._lock = lambda *asked: begun.append(asked), contextlib.nullcontext()

    class Blocks(list[int]):
        room = SimpleNamespace(take=lambda chunk, blocks: (len(blocks), ()))

    blocks: Any = Blocks([0])
    assert vmm.HostTier._free_place(tier, blocks, range(1)) is None and len(begun) == 1
    tier._chunks.append(made)
    assert vmm.HostTier._free_place(tier, blocks, range(1)) == (1, ()) and len(begun) == 1


class TestOfGroups:
    """The tier that groups share."""

    def test_groups_that_sleep_in_turn_share_it(self, device: sa.Device) -> None:
        with vmm.SleepGroup(device) as one:
            with vmm.SleepGroup(device) as two:
                assert one.backup is two.backup
                one.backup.trim()
                others = one.backup.reserved  # of this process's other groups, such as those of the savers
                sleep_and_wake(one, 40 * MiB)
                reserved = one.backup.reserved
                sleep_and_wake(two, 40 * MiB)
                assert two.backup.reserved == reserved == others + 40 * MiB
            assert one.backup.reserved == reserved
            one.backup.trim()
            assert one.backup.reserved == others
            sleep_and_wake(one)
            one.backup.close()
            sleep_and_wake(one)

    def test_its_memory_goes_with_the_last_group(self, account: Account) -> None:
        group = vmm.SleepGroup(sa.Device(0, driver=account.driver))
        buffer = group.allocate(MiB)
        filled(buffer, 3)
        group.sleep()
        group.close()
        buffer.restore()
        assert shows(buffer, 3)
        buffer.close()
        settle()

    def test_resident_memory_is_as_before(self, device: sa.Device) -> None:
        def resident() -> int:
            found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
            assert found
            return int(found[1]) << 10

        with vmm.SleepGroup(device) as group:
            sleep_and_wake(group)
            group.backup.trim()
            before = resident()
            group.prepare(64 * MiB)
            assert resident() - before >= 63 * MiB
            group.backup.trim()
            assert abs(resident() - before) < 16 * MiB

    def test_a_limit(self, device: sa.Device) -> None:
        group = vmm.SleepGroup(device, backup=vmm.HostTier(device, 40 * MiB))
        with group, group.backup as tier, group.allocate(30 * MiB) as one, group.allocate(20 * MiB) as two:
            for seed, buffer in enumerate((one, two)):
                filled(buffer, seed)
            with pytest.raises(sa.OutOfMemoryError, match="limit of 40 MiB"):
                group.sleep()
            assert shows(one, 0) and shows(two, 1) and tier.used == 0
            with pytest.raises(sa.OutOfMemoryError, match="limit of 40 MiB"):
                group.prepare(42 * MiB)
            group.prepare(40 * MiB)
            group.sleep(backup=lambda buffer, _: tier if buffer is one else np.zeros(buffer.nbytes, np.uint8))
            assert tier.used == 30 * MiB
            group.wake()
            assert shows(one, 0) and shows(two, 1)


class TestWays:
    """Pinned memory comes from any of the calls that give it."""

    @pytest.mark.parametrize("refused", [False, True])
    def test_in_turn(
        self, machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: bool
    ) -> None:
        monkeypatch.setattr(ways, "_said", set())
        outer: Any = Faults(machine)
        account = Account(outer)
        inner: Any = Faults(account.driver)
        with vmm.SleepGroup(sa.Device(0, driver=inner)) as group:
            if refused:
                outer.fail("cuMemHostRegister", times=9)
            for _ in range(2):
                sleep_and_wake(group, 3 * MiB)
            assert len(caplog.messages) == refused
            assert all("cuMemHostAlloc" in message for message in caplog.messages)
            outer.stop()
        settle()
        assert account.left == {}

    def test_more_than_there_is(self, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel would kill the process."""
        monkeypatch.setattr(ways, "available_memory", lambda: 32 * MiB)
        with pytest.raises(sa.OutOfMemoryError, match="32 MiB are available"):
            ways.reserve(2 * MiB)
        with vmm.SleepGroup(device) as group:
            sleep_and_wake(group)

    def test_the_figures_of_a_limit_add_up(self, device: sa.Device) -> None:
        group = vmm.SleepGroup(device, backup=vmm.HostTier(device, 48 * MiB))
        with group, group.backup:
            kept = [group.allocate(20 * MiB, tag=tag) for tag in "abc"]
            why = "limit of 48 MiB leaves no room for 20 MiB: 40 MiB are used or promised"
            with pytest.raises(sa.OutOfMemoryError, match=why) as caught:
                group.sleep()
            assert (caught.value.requested, caught.value.used, caught.value.limit) == (20 * MiB, 40 * MiB, 48 * MiB)
            group.sleep("a", "b")
            with pytest.raises(sa.OutOfMemoryError, match=why):
                group.prepare(20 * MiB)
            group.wake()
            assert not any(buffer.evicted for buffer in kept)

    @pytest.mark.usefixtures("small_pins")
    def test_none_is_left(self, machine: Any) -> None:
        host = NoHostMemory(machine)
        account = Account(host.driver)
        device = sa.Device(0, driver=account.driver)
        with vmm.SleepGroup(device) as group, group.allocate(THREE) as buffer, group.allocate(100) as other:
            filled(buffer, 1)
            filled(other, 2)
            host.begin(registered=1)
            each_raises(sa.OutOfMemoryError, group.sleep, lambda: group.prepare(THREE))
            host.stop()
            assert not group.asleep and group.backup.used == 0
            group.sleep()
            group.wake()
            assert shows(buffer, 1) and shows(other, 2)
        settle()
        assert account.left == {}


@pytest.mark.parametrize("refused", ["", "cuMemHostRegister"])
def test_a_dropped_tier_stops_no_thread(machine: Any, refused: str) -> None:
    """Its memory is released by calls that wait for all streams, also for one that waits for the thread itself."""
    account = Account(machine)
    faults: Any = Faults(account.driver)
    device = sa.Device(0, driver=faults)
    with contextlib.ExitStack() as stack:
        held, other = (stack.enter_context(device.create_stream()) for _ in range(2))
        pool = stack.enter_context(sa.MemoryPool(device))
        buffer, gate = stack.enter_context(pool.allocate(8192, other)), stack.enter_context(Gate(device))
        for name in refused.split():
            faults.fail(name, times=9, result="CUDA_ERROR_NOT_SUPPORTED")
        tier = vmm.HostTier(device)
        saved = tier.save(buffer, [0], 8192, other)
        faults.stop()
        other.synchronize()
        gate.hold(held)
        del tier, saved
        gc.collect()
        thread = threading.Thread(target=other.synchronize, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and not held.query()
    # An attempt is repeated after 20 ms. Events are kept for reuse.
    assert eventually(lambda: [settle()] and account.left.keys() <= {"event"})


class TestPrepare:
    @pytest.mark.usefixtures("small_pins")
    @pytest.mark.parametrize("background", [True, False])
    def test_a_sleep_pins_nothing_more(self, traced: Any, device: sa.Device, background: bool) -> None:
        with vmm.SleepGroup(device) as group, group.allocate(THREE) as buffer:
            filled(buffer, 1)
            assert group.prepare(background=background, most_cores=1).result(10) == THREE
            assert group.backup.reserved == THREE and len(names(traced, "cuMemHostRegister")) == 3
            group.prepare(THREE // 2)
            group.sleep()
            assert len(names(traced, "cuMemHostRegister")) == 3
            group.wake()
            assert shows(buffer, 1)

    def test_a_future_cannot_be_cancelled(self, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, make = threading.Event(), vmm.HostTier._host_chunk

        def slow(tier: vmm.HostTier, *args: Any, **options: Any) -> Any:
            assert begun.wait(10)
            return make(tier, *args, **options)

        monkeypatch.setattr(vmm.HostTier, "_host_chunk", slow)
        with vmm.HostTier(device) as tier:
            futures = [tier.prepare(4 * MiB, background=True) for _ in range(2)]
            assert not futures[0].cancel()
            begun.set()
            assert all(future.result(10) >= 4 * MiB for future in futures)

    @pytest.mark.parametrize(
        ("wrong", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (1.5, TypeError)]
    )
    def test_cores_that_are_none(self, device: sa.Device, wrong: Any, error: Any) -> None:
        with vmm.HostTier(device) as tier:
            for background in (True, False):
                with pytest.raises(error, match="most_cores"):
                    tier.prepare(MiB, background=background, most_cores=wrong)
            assert tier.reserved == 0

    @pytest.mark.usefixtures("small_pins")
    def test_a_sleep_meanwhile(self, device: sa.Device) -> None:
        with vmm.SleepGroup(device) as group, group.allocate(THREE) as buffer:
            filled(buffer, 1)
            for _ in range(3):
                group.prepare(background=True, most_cores=1)
                group.sleep()
                group.wake()
                assert shows(buffer, 1) and group.backup.reserved == THREE
                group.backup.trim()

    def test_in_the_background_without_memory(self, machine: Any) -> None:
        host = NoHostMemory(machine)
        with vmm.SleepGroup(sa.Device(0, driver=host.driver)) as group:
            host.begin()
            assert isinstance(group.prepare(MiB, background=True).exception(10), sa.OutOfMemoryError)
            with pytest.raises(sa.OutOfMemoryError):
                group.prepare(MiB)
            host.stop()
            sleep_and_wake(group)

    def test_errors_in_the_background_are_the_future_s(self, device: sa.Device) -> None:
        with vmm.HostTier(device, limit=48 * MiB) as tier:
            refused = tier.prepare(64 * MiB, background=True).exception(10)
            assert isinstance(refused, sa.OutOfMemoryError) and refused.requested == 64 * MiB
            assert tier.prepare(48 * MiB, background=True).result(10) == 48 * MiB
            with pytest.raises(sa.OutOfMemoryError):
                tier.prepare(64 * MiB)
        assert isinstance(tier.prepare(MiB, background=True).exception(10), sa.ClosedError)

    def test_the_group_is_closed_meanwhile(self, account: Account) -> None:
        group = vmm.SleepGroup(sa.Device(0, driver=account.driver))
        future = group.prepare(600 * MiB, background=True, most_cores=1)
        tier = group.backup
        group.close()
        tier.close()
        wait([future], 10)
        tier.trim()
        assert tier.reserved == 0 and future.done()
        with pytest.raises(sa.ClosedError):
            group.prepare(1)
        del tier, group, future
        settle()

    def test_no_signal_handler_can_wedge_its_threads(
        self, stream: sa.Stream, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it could in ``threading``: if it raises while a thread starts, or begins to wait, locks stay held."""
        pool.allocate(1, stream).fill(0)  # The simulated device starts a thread of its own.
        stream.synchronize()
        monkeypatch.setattr(threading.Thread, "start", None)
        with vmm.HostTier(stream.device) as tier:
            assert tier.prepare(THREE, background=True).result(10) >= THREE

    def test_the_process_ends_meanwhile(self, python: Callable[..., Any]) -> None:
        """The exit waits for the piece that is being pinned, before the driver lets no more calls through."""
        done = python("""
import time, streamalloc as sa
from streamalloc.vmm.stores import host
tier = host.HostTier(sa.Device(0))
obtain = tier._pinning.obtain

def slow(*args):
    time.sleep(0.3)
    return obtain(*args)

tier._pinning.obtain = slow
future = tier.prepare(32 << 20, background=True)
future.add_done_callback(lambda future: print(future.result() == 32 << 20, flush=True))
while not tier._making:
    time.sleep(1e-4)
""")
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")

    def test_of_other_backups(self, device: sa.Device, host: sa.MemoryPool) -> None:
        with vmm.SleepGroup(device, backup=host) as group, pytest.raises(TypeError, match="backup must be a HostTier"):
            group.prepare(1)


@pytest.mark.usefixtures("small_pieces")
class TestPieces:
    def test_buffers_span_them(self, device: sa.Device, host: sa.MemoryPool) -> None:
        group = vmm.SleepGroup(device, backup=host)
        several = [group.allocate(nbytes) for nbytes in (PIECE // 2, 2 * PIECE + 100, 10, PIECE)]
        for seed, buffer in enumerate(several):
            filled(buffer, seed)
        group.sleep()
        # The second begins in the first piece and ends in the third.
        assert [len(one._backup.blocks) for one in several if one._backup] == [1, 3, 1, 2]
        assert host.statistics().used == sum(buffer.nbytes for buffer in several) + 512 * 2 - 100 - 10
        part = np.zeros(PIECE, np.uint8)
        group.read(several[1], part, PIECE // 2 + 7)
        assert np.array_equal(part, pattern(several[1].nbytes, 1)[PIECE // 2 + 7 :][:PIECE])
        group.write(several[1], part, 3)
        group.wake()
        expected = pattern(several[1].nbytes, 1).copy()
        expected[3 : 3 + PIECE] = part
        assert np.array_equal(read(several[1]), expected)
        assert all(shows(several[seed], seed) for seed in (0, 2, 3))
        device.synchronize()
        assert host.statistics().used == 0

    def test_no_memory_for_the_last(self, faults: Faults, device: sa.Device, host: sa.MemoryPool) -> None:
        with vmm.SleepGroup(device, backup=host) as group:
            buffer = group.allocate(3 * PIECE)
            filled(buffer, 1)
            faults.fail("cuMemAllocFromPoolAsync", 3)
            with pytest.raises(sa.OutOfMemoryError):
                group.sleep()
            faults.stop()
            device.synchronize()
            assert shows(buffer, 1) and host.statistics().used == 0
            buffer.close()


def test_copies_run_while_other_memory_changes(traced: Any, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_BATCH", 2 * PIECE)
    with vmm.SleepGroup(device) as group:
        several = [group.allocate(PIECE) for _ in range(5)]
        for seed, buffer in enumerate(several):
            filled(buffer, seed)
        traced.calls.clear()
        group.sleep(after=())
        calls = names(traced, "cuEventSynchronize", "cuStreamSynchronize", "cuMemUnmap")
        event, unmap = "cuEventSynchronize", "cuMemUnmap"
        # Any number of waits in a row: how many it takes depends on how far the copies are.
        runs = [(call, *((len([*run]),) if call == unmap else ())) for call, run in itertools.groupby(calls)]
        assert runs == [(event,), (unmap, 2), (event,), (unmap, 2), (event,), (unmap, 1)]
        traced.calls.clear()
        group.wake()
        assert names(traced, "cuMemCreate", "cuMemcpyAsync") == ["cuMemCreate", "cuMemcpyAsync"] * 5
        assert all(shows(buffer, seed) for seed, buffer in enumerate(several))
        for buffer in several:
            buffer.close()


class TestReplacing:
    def test_bytes_that_were_not_kept(self, device: sa.Device, host: sa.MemoryPool) -> None:
        with vmm.SleepGroup(device, backup=host) as group:
            buffer = group.allocate(5000)
            filled(buffer, 1)
            group.sleep(keep=False)
            new = pattern(5000, 2)
            each_raises(ValueError, lambda: group.read(buffer, new), match="not kept")
            each_raises(ValueError, lambda: group.write(buffer, new[:-1]), match="not kept")
            group.write(buffer, new)
            group.write(buffer, np.array([1.5], np.float32), 8)
            group.wake()
            assert read(buffer)[8:12].view(np.float32)[0] == 1.5
            assert np.array_equal(read(buffer)[12:], new[12:])
            device.synchronize()
            assert host.statistics().used == 0
            buffer.close()

    @pytest.mark.parametrize(
        ("offset", "array", "message"),
        [
            (1, np.zeros(5000, np.uint8), "ends before"),
            (0, np.zeros((4, 4), np.uint8).T[1:], "contiguous"),
            (-1, np.zeros(1, np.uint8), "offset"),
        ],
    )
    def test_wrong_arguments(self, device: sa.Device, offset: int, array: Any, message: str) -> None:
        with vmm.SleepGroup(device) as group:
            buffer = group.allocate(5000)
            with pytest.raises(ValueError, match="awake"):
                group.read(buffer, np.zeros(1, np.uint8))
            group.sleep()
            for call in (group.read, group.write):
                with pytest.raises(ValueError, match=message):
                    call(buffer, array, offset)
            buffer.close()
            for call in (group.read, group.write):
                with pytest.raises(sa.ClosedError):
                    call(buffer, array, offset)

    def test_a_buffer_of_another_group(self, device: sa.Device) -> None:
        with vmm.SleepGroup(device) as group, vmm.SleepGroup(device) as other, group.allocate(5000) as buffer:
            filled(buffer, 1)
            group.sleep()
            for call in (other.read, other.write):
                with pytest.raises(ValueError, match="not in the group"):
                    call(buffer, pattern(5000, 2))
            group.wake()
            assert shows(buffer, 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_segments(machine: Any, pinned: bool) -> None:
    """Zeroed, pinned until they are dropped; if one cannot be pinned, none stays."""
    host = NoHostMemory(machine)
    device = sa.Device(0, driver=host.driver)

    def known(address: int) -> bool:
        return sa.pointer_attributes(address, driver=host.driver).kind is not sa.MemoryKind.UNKNOWN

    segments = host_segments(device, [2 * MiB, 34 * MiB], pinned=pinned)
    addresses = [segment.slots[0].ctypes.data for segment in segments]
    assert [segment.slots[0].nbytes for segment in segments] == [2 * MiB, 34 * MiB]
    assert not any(segment.slots[0].any() for segment in segments)
    assert [known(address) for address in addresses] == [pinned, pinned]
    first = segments[0].slots[0]
    del segments
    settle()
    assert not any(map(known, addresses))
    first[:] = 1  # the pages stay with the array
    if pinned:
        host.begin(registered=1)
        with pytest.raises(sa.OutOfMemoryError):
            host_segments(device, [2 * MiB, 2 * MiB], pinned=True)
        host.stop()
        settle()


@pytest.mark.parametrize("handler", ["takes", "takes all", "takes and gives"])
@pytest.mark.parametrize("act", ["take", "give"])
def test_a_signal_handler_that_takes_room(act: str, handler: str) -> None:
    """It runs where Python looks for signals: at calls."""
    nth = 1
    while interrupted(act, handler, nth):
        nth += 1
    assert nth > 3


def interrupted(act: str, handler: str, left: int) -> bool:
    """Take or return room with a handler at one of the calls; whether there were so many."""
    chunk = Chunk(16, 4096, np.arange(4096, 4224, 16))
    mine = [chunk.take(3)[0], chunk.take(2)[0]]
    theirs: list[Any] = []

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename.endswith("blocks.py"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                theirs.append(chunk.take(8 if handler == "takes all" else 2)[0])
                if handler == "takes and gives":
                    chunk.give(theirs.pop(), ())

    sys.setprofile(look)
    try:
        if act == "take":
            mine.append(chunk.take(2)[0])
        else:
            while mine:
                chunk.give(mine.pop(), ())
    finally:
        sys.setprofile(None)
    held = [int(address) for addresses in (*mine, *theirs) for address in addresses]
    free = [int(address) for addresses, _ in chunk._free for address in addresses]
    assert sorted([*held, *free]) == [4096 + 16 * n for n in range(8)]
    assert chunk.left == len(free)
    return left <= 0
