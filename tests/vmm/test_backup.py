"""Backups belong to the buffers that they hold, and are released once, after the copies that read or write them."""

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.stores import disk
from tests.interrupting import Interrupt, Interrupted
from tests.support import (
    KEEP,
    end_what_was_dropped,
    filled,
    holds,
    in_a_thread,
    in_threads,
    pattern,
    read,
    sampled,
    shows,
)
from tests.vmm.support import HOST, PAGE, READWRITE

SIZE = 5000
"""Bytes of most buffers, of one page each."""
WAIT = 20.0
"""Seconds after which a thread counts as stuck."""


def refusing(driver: Any) -> Any:
    """A driver that refuses the calls it is told to refuse."""
    kind: Any = Faults
    return kind(driver)


class Foreign:
    """A stream of somebody else, who may destroy it with work in it. Like one of cuda.core, it has no handle then."""

    def __init__(self, device: sa.Device) -> None:
        self._device = device
        driver: Any = device.driver
        with device.current():
            result, self._raw = driver.cuStreamCreate(int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        assert not result

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._raw)

    def destroy(self) -> None:
        raw, self._raw = self._raw, cuda.CUstream(0)
        with self._device.current():
            assert not self._device.driver.cuStreamDestroy(raw)[0]


class World:
    """Two buffers of a group that sleep in one backup, and a gate that holds the stream on which the first wakes."""

    def __init__(self, device: sa.Device, host: sa.MemoryPool, kind: str, gate: Gate) -> None:
        self.device, self.host = device, host
        self.foreign = Foreign(device) if kind == "foreign" else None
        self.ours = device.create_stream() if kind == "own" else None
        self.held: Any = self.foreign or self.ours or device.default_stream
        self.other = device.create_stream()
        self.group: Any = vmm.SleepGroup(device, backup=host)
        self.first: vmm.VirtualBuffer = self.group.allocate(SIZE, tag="first")
        self.second: Any = self.group.allocate(SIZE, tag="first")
        filled(self.first, 1, self.other)
        filled(self.second, 2, self.other)
        self.group.sleep(stream=self.other)
        self.gate = gate
        gate.hold(self.held)

    def leave(self) -> None:
        """The stream that is held goes, with the copy in it."""
        if self.foreign is not None:
            self.foreign.destroy()
        elif self.ours is not None:
            self.ours.close()

    def overwrite(self) -> list[sa.Buffer]:
        """Take all memory of the pool that is free, and fill it."""
        taken = [self.host.allocate(SIZE, self.other) for _ in range(4)]
        for one in taken:
            one.fill(0xEE, self.other)
        self.other.synchronize()
        return taken

    def check(self, *, second: bool) -> None:
        taken = self.overwrite()
        self.gate.open()
        self.device.synchronize()
        assert shows(self.first, 1)
        if second:
            assert shows(self.second, 2)
        for one in taken:
            one.free()
        self.device.synchronize()
        assert self.host.statistics().used == 0
        if self.group is not None and not self.group.closed:
            self.group.close()
        self.first.close()
        if self.second is not None:
            self.second.close()
        self.other.close()


def _wake_first(world: World) -> None:
    """Alone, as the second has another tag by now."""
    if world.second is not None:
        world.group.add(world.second, "second")
    world.group.wake("first", stream=world.held)


def _drop(world: World, name: str) -> None:
    setattr(world, name, None)
    gc.collect()
    end_what_was_dropped()
    if world.second is not None:
        world.second.restore(stream=world.other)


FIRST: dict[str, Callable[[World], object]] = {
    "wake": _wake_first,
    "restore": lambda it: it.first.restore(stream=it.held),
}
SECOND: dict[str, Callable[[World], object]] = {
    "restore": lambda it: it.second.restore(stream=it.other),
    "wake": lambda it: it.group.wake(stream=it.other),
    "close the group": lambda it: (it.group.close(), it.second.restore(stream=it.other)),
    "drop the group": lambda it: _drop(it, "group"),
    "close": lambda it: it.second.close(),
    "drop": lambda it: _drop(it, "second"),
}
KINDS = ["own", "default", "foreign"]


@pytest.mark.parametrize("kind", KINDS)
class TestOrder:
    @pytest.mark.parametrize("gone", [False, True], ids=["", "stream destroyed"])
    @pytest.mark.parametrize("second", SECOND)
    @pytest.mark.parametrize("first", FIRST)
    def test_the_copy_is_pending_when_the_last_buffer_leaves(
        self, device: sa.Device, host: sa.MemoryPool, gate: Gate, kind: str, first: str, second: str, gone: bool
    ) -> None:
        world = World(device, host, kind, gate)
        FIRST[first](world)
        if gone:
            world.leave()
        SECOND[second](world)
        world.check(second=second not in ("close", "drop"))

    @pytest.mark.parametrize("faults", [0, 1, 2])
    def test_one_buffer_alone(self, machine: Any, kind: str, faults: int) -> None:
        """Its backup is freed after the copy. The driver may refuse to record where that ends."""
        calls = ("cuEventRecord", "cuEventCreate")
        driver: Any = machine
        layers = []
        for _ in range(faults):
            driver = refusing(driver)
            layers.append(driver)
        there = sa.Device(0, driver=driver)
        with sa.MemoryPool(HOST, release_threshold=KEEP, driver=driver) as host, Gate(there) as gate:
            host.set_access(there, READWRITE)
            world = World(there, host, kind, gate)
            world.second.close()
            for layer, call in zip(layers, calls, strict=False):
                layer.fail(call, result="CUDA_ERROR_UNKNOWN")
            world.first.restore(stream=world.held)
            for layer in layers:
                layer.stop()
            assert not faults or layers[0].failed
            world.leave()
            world.second = None
            world.check(second=False)

    @pytest.mark.parametrize("how", ["close", "drop", "again"])
    def test_a_restore_whose_undo_fails(self, machine: Any, kind: str, how: str) -> None:
        """The copy is queued, and the host cannot wait for it: nothing that it uses is released before it."""
        faults = refusing(second := refusing(sd.checked(machine)))
        there = sa.Device(0, driver=faults)
        with sa.MemoryPool(HOST, release_threshold=KEEP, driver=faults) as host, Gate(there) as gate:
            host.set_access(there, READWRITE)
            buffer: Any = vmm.GrowableBuffer(there, PAGE, PAGE)
            buffer.fill(7)
            buffer.evict(host)
            buffer.set_access(there, sa.MemAccess.READ)  # two more calls come behind the copy
            held: Any = there.create_stream() if kind == "own" else there.default_stream
            foreign = Foreign(there) if kind == "foreign" else None
            faults.fail("cuStreamSynchronize", 1, result="CUDA_ERROR_UNKNOWN")
            second.fail("cuStreamSynchronize", 1, result="CUDA_ERROR_UNKNOWN")
            gate.hold(foreign or held)
            with pytest.raises(sa.CudaError):
                buffer.restore(stream=foreign or held)
            assert faults.failed and second.failed and buffer.evicted
            faults.stop()
            second.stop()
            with there.create_stream() as other:
                if how == "drop":
                    buffer = None
                    gc.collect()
                    end_what_was_dropped()
                taken = [host.allocate(PAGE, other) for _ in range(2)]
                for one in taken:
                    one.fill(0xEE, other)
                other.synchronize()
                threading.Timer(0.02, gate.open).start()
                if how == "close":
                    buffer.close()
                elif how == "again":
                    buffer.restore()
                    assert holds(buffer, 7)
                    buffer.close()
                there.synchronize()
                for one in taken:
                    one.free(other)
            if foreign is not None:
                foreign.destroy()
            end_what_was_dropped()
            there.synchronize()
            assert host.statistics().used == 0
            hazards = second.wrapped.hazards
        assert hazards == []


class TestOwner:
    @pytest.mark.parametrize("how", ["close", "restore", "drop", "cycle"])
    def test_goes_with_the_last_buffer(self, device: sa.Device, host: sa.MemoryPool, how: str) -> None:
        group = vmm.SleepGroup(device, backup=host)
        several: list[Any] = [group.allocate(SIZE, tag="a") for _ in range(3)]
        group.sleep()
        assert host.statistics().used >= 3 * SIZE
        for left in (2, 1, 0):
            buffer = several.pop()
            if how == "close":
                buffer.close()
            elif how == "restore":
                buffer.restore()
            elif how == "cycle":
                holder = [buffer]
                holder.append(holder)
                del holder
            del buffer
            gc.collect()
            end_what_was_dropped()
            device.synchronize()
            assert (host.statistics().used > 0) == bool(left)
        group.close()

    def test_no_room_for_the_second_tag(self, device: sa.Device) -> None:
        with sa.MemoryPool(HOST, max_size=32 << 20) as host:
            host.set_access(device, READWRITE)
            group = vmm.SleepGroup(device, backup=host)
            with group.allocate(SIZE, tag="first"), group.allocate(64 << 20, tag="second"):
                with pytest.raises(sa.OutOfMemoryError) as refused:
                    group.sleep()
                device.synchronize()
                # The traceback keeps the frames, and through them all that the failed call did not release.
                assert refused.tb and host.statistics().used == 0
            group.close()


def test_buffers_come_while_others_are_listed(device: sa.Device) -> None:
    group = vmm.SleepGroup(device)
    made: list[vmm.VirtualBuffer] = []

    def look() -> None:
        while len(made) < 64:
            assert len(group.buffers) <= 64 and group.mapped_bytes >= 0

    def make() -> None:
        for _ in range(64):
            made.append(group.allocate(0))

    in_threads(look, make)
    for buffer in made:
        buffer.close()
    group.close()


@pytest.mark.simulated_only("takes all memory of the device")
@pytest.mark.parametrize("error", [KeyboardInterrupt, sa.OutOfMemoryError])
def test_memory_is_taken_when_a_sleep_is_undone(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Nobody gets it before all sleep, so that no buffer is lost and none stays asleep."""
    device = sa.Device(0, driver=sd.simulated(memory=16 * PAGE))
    group = vmm.SleepGroup(device)
    several = [group.allocate(4 * PAGE) for _ in range(3)]
    for seed, buffer in enumerate(several):
        filled(buffer, seed)
    give_back = vmm.GrowableBuffer.begin_eviction
    taken: list[vmm.PhysicalMemory] = []

    def interrupted(self: vmm.GrowableBuffer, *args: Any) -> None:
        if self is not several[2]:
            give_back(self, *args)
            return
        with contextlib.suppress(sa.OutOfMemoryError):
            while True:
                taken.append(vmm.PhysicalMemory(device, PAGE))
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt
        vmm.PhysicalMemory(device, PAGE)

    with monkeypatch.context() as patch:
        patch.setattr(vmm.GrowableBuffer, "begin_eviction", interrupted)
        with pytest.raises(error):
            group.sleep()
    assert len(taken) == 4 and not group.asleep
    assert all(shows(buffer, seed) for seed, buffer in enumerate(several))


def sleep_by_half(group: vmm.SleepGroup, faults: Any, inner: Any) -> None:
    """The second unmap fails, and so does the undo of the first one, whose memory stays."""
    faults.fail("cuMemUnmap", 2, result="CUDA_ERROR_UNKNOWN")
    inner.fail("cuMemMap", result="CUDA_ERROR_UNKNOWN")
    with pytest.raises(sa.CudaError, match="cuMemUnmap"):
        group.sleep(keep=False)
    faults.stop()
    inner.stop()


def test_bytes_that_stay_in_memory_are_neither_read_nor_replaced(machine: Any) -> None:
    inner = refusing(machine)
    faults = refusing(inner)
    with vmm.SleepGroup(sa.Device(0, driver=faults)) as group:
        buffer, other = group.allocate(PAGE), group.allocate(PAGE)
        filled(buffer, 1)
        sleep_by_half(group, faults, inner)
        assert buffer.evicted and not other.evicted
        for call in (group.read, group.write):
            with pytest.raises(ValueError, match=r"keeps its memory.*wake\(\)"):
                call(buffer, pattern(PAGE, 2))
        filled(other, 3)
        group.sleep()
        assert other.eviction is not None
        group.wake()
        assert shows(buffer, 1) and shows(other, 3)
        buffer.close()
        other.close()


def test_memory_that_is_kept_and_was_closed_since(machine: Any) -> None:
    """The buffer holds a handle of its own."""
    inner = refusing(machine)
    faults = refusing(inner)
    with vmm.GrowableBuffer(sa.Device(0, driver=faults), 2 * PAGE, 2 * PAGE, chunk=PAGE) as buffer:
        filled(buffer, 3)
        first = buffer.mappings[0].memory
        other = vmm.GrowableBuffer(buffer.device, PAGE, PAGE)
        group = vmm.SleepGroup(buffer.device)
        group.add(buffer)
        group.add(other)
        sleep_by_half(group, faults, inner)
        assert buffer.evicted
        first.close()
        buffer.restore()
        assert shows(buffer, 3) and len(buffer.mappings) == 2
        other.close()


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@pytest.mark.parametrize("step", ["sleep", "wake"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
# An interrupt inside of Path.read_text leaves its file to the collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
@in_a_thread
def test_interrupted_at_any_point(
    device: sa.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, on_disk: bool
) -> None:
    """No bytes are lost, and no more than the one backup that was being made; no file stays that is not complete."""
    monkeypatch.setattr(disk, "_SLOTS", 1)

    def prepare() -> tuple[sa.MemoryPool, vmm.SleepGroup, list[vmm.VirtualBuffer], sa.Stream]:
        host = sa.MemoryPool(HOST, driver=device.driver)
        host.set_access(device, READWRITE)
        backup = vmm.DiskTier(device, tmp_path, block=4096, threads=1) if on_disk else host
        group = vmm.SleepGroup(device, backup=backup)
        several = [group.allocate(SIZE, tag=tag) for tag in "ab"]
        for seed, buffer in enumerate(several):
            buffer.fill(seed + 1)
        stream = device.create_stream()
        if step == "wake":
            group.sleep(stream=stream)
        return host, group, several, stream

    for _ in range(2):
        _, group, several, stream = prepare()
        points = Interrupt()
        with points:
            getattr(group, step)(stream=stream)
    wrong = []
    assert len(points.distinct()) > 20
    for nth in sampled(points.distinct(), 15):
        host, group, several, stream = prepare()
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            getattr(group, step)(stream=stream)
        for seed, buffer in enumerate(several):
            if not buffer.evicted and not (read(buffer) == seed + 1).all():
                wrong.append(f"{block.came}: bytes")
        group.wake()
        if not all((read(buffer) == seed + 1).all() for seed, buffer in enumerate(several)):
            wrong.append(f"{block.came}: bytes after waking")
        device.synchronize()
        end_what_was_dropped()
        if host.statistics().used > SIZE:
            wrong.append(f"{block.came}: backups stay")
        for buffer in several:
            buffer.close()
    assert wrong == [] and list(tmp_path.iterdir()) == []
