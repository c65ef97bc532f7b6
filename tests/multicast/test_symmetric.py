"""Symmetric memory on either driver: of several devices in one process, and of two processes."""

import contextlib
import gc
import math
import threading
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.session import session_of
from streamalloc.multicast import MulticastObject, SymmetricBuffer, SymmetricMemory, SymmetricMemoryError
from streamalloc.multicast.setup.resources import RankResources
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.ownership import Node
from tests.interleaving import interleaved
from tests.multicast.support import all_ended
from tests.processes import Kept, Partner, There, in_a_child
from tests.support import (
    MiB,
    Replaced,
    each_raises,
    end_what_was_dropped,
    executed,
    filled,
    holds,
    pattern,
    pending,
    shows,
)
from tests.vmm.support import each

NBYTES = 3 * MiB + 40


@pytest.fixture
def devices(machine: Any) -> list[sa.Device]:
    return sa.Device.all(machine)[:2]


@pytest.fixture
def streams(devices: list[sa.Device]) -> Iterator[list[sa.Stream]]:
    """A stream of each device."""
    made = [device.create_stream() for device in devices]
    yield made
    for stream in made:
        if not stream.closed:
            stream.synchronize()
            stream.close()


@pytest.fixture
def memory(devices: list[sa.Device]) -> Iterator[SymmetricMemory]:
    """Memory of both devices."""
    with SymmetricMemory.local(devices, NBYTES, multicast=False) as memory:
        yield memory


def words_at(memory: SymmetricMemory, rank: int, address: int, count: int) -> list[int]:
    """64-bit words in a rank's memory, wherever in it."""
    found = np.zeros(count, np.uint64)
    driver: Any = memory.driver
    with memory.devices[rank].current():
        assert driver.cuMemcpyDtoH(found, address, found.nbytes)[0] == 0
    return [int(word) for word in found]


class Number:
    """An integer of another library, which is equal to itself only."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


@pytest.mark.gpus(2)
class TestInOneProcess:
    def test_every_device_writes_and_reads_all_of_it(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        half = NBYTES // 2
        for writer, stream in enumerate(streams):
            for rank, buffer in enumerate(memory.buffers):
                filled(buffer[writer * half : (writer + 1) * half], 1 + 2 * writer + rank, stream)
        memory.barrier(*streams)
        for stream in streams:
            for rank, buffer in enumerate(memory.buffers):
                for writer in (0, 1):
                    found = np.zeros(half, np.uint8)
                    buffer[writer * half : (writer + 1) * half].copy_to(found, stream)
                    stream.synchronize()
                    assert np.array_equal(found, pattern(half, 1 + 2 * writer + rank))

    def test_says_what_it_is(self, memory: SymmetricMemory, devices: list[sa.Device], machine: Any) -> None:
        assert (memory.rank, memory.ranks, memory.size, memory.nbytes) == (0, (0, 1), 2, NBYTES)
        assert memory.device == devices[0] and memory.devices == tuple(devices)
        assert memory.driver is machine and memory.communicator is None
        assert memory.handle_type is sa.MemHandleType.NONE
        assert memory.physical_bytes == 4 * MiB
        assert not memory.multicast and memory.multicast_buffer is None and memory.multicast_address is None
        assert repr(memory) == f"<SymmetricMemory of {NBYTES:,} bytes for each rank, 2 devices>"
        for rank, buffer in enumerate(memory.buffers):
            assert buffer.nbytes == NBYTES and buffer.owner is memory
            assert buffer.location == devices[rank].location and buffer.stream.device == devices[rank]
            assert buffer.device_accessible and not buffer.host_accessible
            assert "SymmetricBuffer" in repr(buffer)

    def test_raw_addresses_are_in_every_rank_s_memory(self, memory: SymmetricMemory) -> None:
        assert memory.addresses.dtype == np.uint64
        assert memory.addresses.tolist() == [buffer.address for buffer in memory.buffers]
        assert memory.signal_addresses.tolist() == [pad.address for pad in memory.signal_pads]
        assert (memory.signal_addresses - memory.addresses).tolist() == [memory.signal_offset] * 2
        assert (memory.buffer_table, memory.signal_table) == memory.tables()
        for rank in memory.ranks:
            tables = memory.tables(rank)
            assert words_at(memory, rank, tables.buffers, 2) == memory.addresses.tolist()
            assert words_at(memory, rank, tables.signal_pads, 2) == memory.signal_addresses.tolist()
        with pytest.raises(ValueError, match="rank=2"):
            memory.tables(2)

    @pytest.mark.parametrize(("nbytes", "pad"), [(1, 0), (1, 1), (2 * MiB, 4096), (2 * MiB - 40, 10)])
    def test_of_any_size(self, devices: list[sa.Device], nbytes: int, pad: int) -> None:
        with SymmetricMemory.local(devices, nbytes, multicast=False, signal_pad_bytes=pad) as memory:
            assert memory.physical_bytes % (2 * MiB) == 0
            for rank, buffer in enumerate(memory.buffers):
                buffer.fill(rank + 1)
            assert [holds(buffer, 1 + rank) for rank, buffer in enumerate(memory.buffers)] == [True, True]
            assert [one.nbytes for one in memory.signal_pads] == [pad] * 2
            assert words_at(memory, 1, memory.tables(1).buffers, 2) == memory.addresses.tolist()

    @pytest.mark.multicast
    def test_takes_whole_granules_of_its_multicast_object(self, devices: list[sa.Device]) -> None:
        free = devices[0].memory_info().free
        granule = MulticastObject.granularity(len(devices), MiB, recommended=True, driver=devices[0].driver)
        with SymmetricMemory.local(devices, MiB):
            assert (free - devices[0].memory_info().free) % granule == 0

    def test_the_barrier_waits_for_the_slowest(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        for rank in (0, 1):
            slow, fast = streams[rank], streams[1 - rank]
            with Gate(slow.device) as gate:
                gate.hold(slow)
                memory.buffers[1 - rank].fill(rank + 1, slow)
                memory.barrier(*streams)
                memory.buffers[rank].copy_from(memory.buffers[1 - rank], fast)
                assert pending(fast)
                gate.open()
                assert executed(fast)
            assert holds(memory.buffers[rank], rank + 1)

    def test_barriers_of_other_channels_go_on(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        others = [device.create_stream() for device in memory.devices]
        with Gate(streams[0].device) as gate:
            gate.hold(streams[0])
            memory.barrier(*streams, channel=3)
            for channel in (0, 15):
                memory.barrier(*others, channel=channel)
            assert all(executed(stream) for stream in others)
            # On the same channel they come after it.
            memory.barrier(*others, channel=3)
            assert pending(others[1])
            gate.open()
            assert all(executed(stream) for stream in others)

    def test_signals_add_up(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        first, second = streams
        for _ in range(2):
            memory.put_signal(1, first, channel=2)
        assert executed(first)
        for _ in range(2):
            memory.wait_signal(0, second, channel=2)
        assert executed(second)
        memory.wait_signal(0, second, channel=2)
        assert pending(second)
        memory.put_signal(1, first, channel=1)
        memory.put_signal(0, second, channel=2)
        assert pending(second)
        memory.put_signal(1, first, channel=2)
        assert executed(second)
        memory.wait_signal(1, first, channel=2)
        assert executed(first)

    def test_signals_add_up_for_any_integers(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        """Such as tensors, which are equal to themselves only."""
        for _ in range(2):
            memory.put_signal(Number(1), streams[0], channel=Number(2))  # type: ignore[arg-type]
        for _ in range(2):
            memory.wait_signal(Number(0), streams[1], channel=Number(2))  # type: ignore[arg-type]
        assert executed(streams[1])
        memory.wait_signal(0, streams[1], channel=2)
        assert pending(streams[1])
        memory.put_signal(1, streams[0], channel=2)
        assert executed(streams[1])

    def test_wrong_uses_of_streams(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        first = streams[0]
        with pytest.raises(TypeError, match="stream"):
            memory.barrier(first)
        for channel, error in ((-1, ValueError), (16, ValueError), (True, TypeError)):
            for use in each(
                lambda channel: memory.barrier(*streams, channel=channel),
                lambda channel: memory.put_signal(1, first, channel=channel),
                lambda channel: memory.wait_signal(1, first, channel=channel),
            ):
                with pytest.raises(error, match=f"channel.*{channel}"):
                    use(channel)
        for peer in (0, 2, -1):
            with pytest.raises(ValueError, match=f"peer={peer}"):
                memory.put_signal(peer, first)
        each_raises(TypeError, lambda: memory.put_signal("1", first), match="peer")  # type: ignore[arg-type]
        each_raises(ValueError, lambda: memory.put_signal(0, first, rank=5), match="rank=5")
        each_raises(TypeError, lambda: memory.barrier(first, 3), match="stream")  # type: ignore[arg-type]
        with first.capture():
            each_raises(
                sa.CaptureError,
                lambda: memory.barrier(*streams),
                lambda: memory.put_signal(1, first),
                lambda: memory.wait_signal(1, first),
            )
        # None of this has counted.
        memory.barrier(*streams)
        assert all(executed(stream) for stream in streams)

    def test_closed_memory_is_of_no_use(self, devices: list[sa.Device], streams: list[sa.Stream]) -> None:
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        buffer, pad = memory.buffers[1], memory.signal_pads[0]
        part = buffer[:10]
        memory.barrier(*streams)
        memory.close()
        memory.close()
        memory.abandon()
        assert memory.closed and "closed" in repr(memory) and "closed" in repr(buffer)
        each_raises(
            sa.ClosedError,
            lambda: memory.buffers,
            lambda: memory.signal_pads,
            lambda: memory.addresses,
            lambda: memory.signal_addresses,
            lambda: memory.multicast_buffer,
            lambda: memory.multicast_address,
            lambda: memory.tables(),
            lambda: memory.barrier(*streams),
            lambda: memory.put_signal(1, streams[0]),
            lambda: memory.wait_signal(1, streams[0]),
            lambda: buffer.address,
            lambda: buffer.fill(0),
            lambda: part.fill(0),
            lambda: pad.fill(0),
        )

    def test_closing_waits_for_the_devices(self, devices: list[sa.Device], streams: list[sa.Stream]) -> None:
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        with Gate(devices[1]) as gate:
            gate.hold(streams[1])
            memory.buffers[0].fill(1, streams[1])
            with pytest.raises(SymmetricMemoryError, match="has not done its work in time") as raised:
                memory.close(timeout=0.05)
            assert (raised.value.rank, raised.value.step) == (1, "finish")
            gate.open()
        memory.close()
        assert memory.closed

    @pytest.mark.parametrize(("limit", "rest"), [(None, 1), (0, 1), (50, 50)])
    def test_a_close_that_failed_waits_for_the_rest_of_its_time(
        self, faults: Faults, devices: list[sa.Device], monkeypatch: pytest.MonkeyPatch, limit: Any, rest: float
    ) -> None:
        memory, asked = SymmetricMemory.local(devices, 100, multicast=False, timeout=None), list[float]()
        faults.fail("cuCtxSynchronize", result="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        with monkeypatch.context() as patched:
            patched.setattr(memory, "abandon", asked.append)
            each_raises(SymmetricMemoryError, lambda: memory.close(limit))
        assert asked == [pytest.approx(rest, rel=0.1)]
        memory.close()

    @pytest.mark.parametrize("seconds", [math.inf, 1e300])
    def test_of_more_time_than_a_thread_can_wait(self, devices: list[sa.Device], seconds: float) -> None:
        SymmetricMemory.local(devices, 100, multicast=False, timeout=seconds).close()
        SymmetricMemory.local(devices, 100, multicast=False).abandon(seconds)

    def test_a_capture_is_not_broken(self, devices: list[sa.Device], streams: list[sa.Stream]) -> None:
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        with streams[0].capture():
            each_raises(sa.CaptureError, memory.close, memory.abandon)
            assert not memory.closed
            with pytest.raises(SymmetricMemoryError, match="end the capture before"):
                SymmetricMemory.local(devices, 100, multicast=False)
        memory.close()

    @pytest.mark.parametrize(
        ("end", "answer", "error"),
        [
            ("close", "LAUNCH_FAILED", sa.DeviceLostError),
            ("abandon", "LAUNCH_FAILED", sa.DeviceLostError),
            ("abandon", "STREAM_CAPTURE_UNSUPPORTED", sa.CaptureError),  # other code captures
        ],
    )
    def test_where_the_devices_cannot_be_waited_for(
        self, faults: Faults, devices: list[sa.Device], end: str, answer: str, error: type[Exception]
    ) -> None:
        """The failure is told. The memory is given back if work has failed."""
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        faults.fail("cuCtxSynchronize", 2, result=f"CUDA_ERROR_{answer}")
        with pytest.raises(error):
            getattr(memory, end)()
        assert memory.closed is (answer == "LAUNCH_FAILED")
        memory.close()

    @pytest.mark.parametrize("end", ["close", "abandon"])
    @pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemAddressFree"])
    def test_a_failure_of_work_is_told_beside_a_refused_release(self, device: sa.Device, end: str, call: str) -> None:
        inner = sd.faulty(device.driver, "cuCtxSynchronize")
        inner.stop()
        driver = sd.faulty(inner, call)
        driver.stop()
        memory = SymmetricMemory.local([sa.Device(0, driver=driver)], 100, multicast=False)
        inner.fail("cuCtxSynchronize", result="CUDA_ERROR_LAUNCH_FAILED")
        driver.fail(call, result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match=f"{call} answered") as caught:
            getattr(memory, end)()
        assert "cuCtxSynchronize answered CUDA_ERROR_LAUNCH_FAILED" in vars(caught.value)["__notes__"][0]
        assert not memory.closed
        memory.close()

    @pytest.mark.simulated_only("a forked child of a process that uses CUDA")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_child_leaves_it_alone(self, memory: SymmetricMemory, streams: list[sa.Stream]) -> None:
        assert in_a_child(lambda: each_raises(sa.ForkedProcessError, memory.close, memory.abandon)) == 0
        memory.barrier(*streams)
        assert all(executed(stream) for stream in streams)

    def test_abandoned_memory_lets_streams_go_on(self, devices: list[sa.Device], streams: list[sa.Stream]) -> None:
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        memory.barrier(*streams)
        memory.wait_signal(1, streams[0])
        memory.wait_signal(1, streams[0])
        memory.wait_signal(0, streams[1], channel=9)
        assert all(pending(stream) for stream in streams)
        memory.abandon()
        assert memory.closed and all(executed(stream) for stream in streams)

    def test_what_is_dropped_is_given_back(self, devices: list[sa.Device], machine: Any) -> None:
        driver = sa.driver.checked(machine)
        own = [sa.Device(device.ordinal, driver=driver) for device in devices]
        memory = SymmetricMemory.local(own, 100, multicast=False)
        ordered = own[0].create_stream()
        memory.wait_signal(1, ordered)
        buffer = memory.buffers[1]
        del memory
        gc.collect()
        # A part of it keeps it.
        buffer.fill(1)
        with pytest.warns(ResourceWarning, match=r"SymmetricMemory of 100 bytes .* dropped without close\(\)$"):
            del buffer
            gc.collect()
        assert all_ended(driver)
        assert executed(ordered)
        ordered.close()
        del ordered
        gc.collect()
        driver.assert_nothing_left()

    def test_who_waits_for_devices_keeps_no_program_from_its_end(
        self, devices: list[sa.Device], streams: list[sa.Stream], gate: Gate
    ) -> None:
        memory = SymmetricMemory.local(devices, 100, multicast=False)
        gate.hold(streams[0])
        memory.buffers[0].fill(1, streams[0])
        with pytest.warns(ResourceWarning, match="dropped without close"):
            del memory
            gc.collect()
        end_what_was_dropped()
        assert [one.daemon for one in threading.enumerate() if one.name == "streamalloc waits for devices"] == [True]
        gate.open()
        assert executed(streams[0]) and all_ended(devices[0].driver)

    def test_which_rank_signals(self, device: sa.Device, streams: list[sa.Stream]) -> None:
        """The streams of a device that two ranks share name neither."""
        with SymmetricMemory.local([device, device], 100, multicast=False) as memory:
            with pytest.raises(ValueError, match=r"ranks \[0, 1\] are on the stream's device"):
                memory.put_signal(1, streams[0])
            memory.put_signal(1, streams[0], rank=0)
            memory.wait_signal(0, streams[0], rank=1)
            memory.barrier(streams[0], streams[0])
            assert executed(streams[0])
            with pytest.raises(ValueError, match="has no access"):
                memory.barrier(streams[0], streams[1])


@pytest.mark.gpus(2)
class TestArguments:
    def test_that_make_no_team(self, devices: list[sa.Device]) -> None:
        group = ipc.SelfCommunicator()
        each_raises(
            TypeError,
            lambda: SymmetricMemory(100, group, devices=devices),
            lambda: SymmetricMemory(100, devices=devices, device=devices[0]),
            match="communicator",
        )
        with pytest.raises(ValueError, match="one or more"):
            SymmetricMemory.local([], 100)
        for wrong in ([devices[0], 1], [0, 1], "01", devices[0]):
            with pytest.raises(TypeError, match="devices must be"):
                SymmetricMemory.local(wrong, 100)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="group"):
            SymmetricMemory(100, 3)  # type: ignore[arg-type]
        other = sa.Device(0, driver=sa.driver.traced(devices[0].driver))
        with pytest.raises(ValueError, match="belongs to another driver"):
            SymmetricMemory.local([devices[0], other], 100)

    def test_the_old_order_is_deprecated(self, devices: list[sa.Device]) -> None:
        with (
            pytest.deprecated_call(match="devices first"),
            SymmetricMemory.local(100, devices, multicast=False) as memory,  # type: ignore[arg-type]
        ):
            assert memory.nbytes == 100 and memory.devices == tuple(devices)

    @pytest.mark.parametrize(
        ("error", "message", "options"),
        [
            (TypeError, "nbytes", {"nbytes": 5.5}),
            (ValueError, "nbytes", {"nbytes": -1}),
            (ValueError, "nbytes=0", {"nbytes": 0}),
            (ValueError, "signal_pad_bytes", {"signal_pad_bytes": -1}),
            (ValueError, "multicast='yes'", {"multicast": "yes"}),
            (ValueError, "timeout", {"timeout": -1}),
        ],
    )
    def test_that_break_a_rule(
        self, devices: list[sa.Device], error: type[Exception], message: str, options: dict[str, Any]
    ) -> None:
        arguments = {"nbytes": 100, "multicast": False} | options
        with pytest.raises(error, match=message):
            SymmetricMemory.local(devices=devices, **arguments)
        with pytest.raises(error, match=message), ipc.SelfCommunicator() as group:
            SymmetricMemory(communicator=group, device=devices[0], **arguments)

    def test_that_only_a_group_has(self, devices: list[sa.Device], machine: Any) -> None:
        # Other libraries may have left a context current, which says the device.
        machine.cuCtxSetCurrent(machine.CUcontext(0))
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"handle_type": sa.MemHandleType.WIN32}, "handle_type="),
            ({"device": devices[1], "driver": sa.driver.traced(machine)}, "belongs to another driver"),
            ({}, rf"which of {sa.Device.count(machine)} devices is this rank's\? Give device="),
        )
        for options, message in wrong:
            with pytest.raises(ValueError, match=message), ipc.SelfCommunicator() as group:
                SymmetricMemory(100, group, multicast=False, **options)
        with pytest.raises(TypeError, match="device"), ipc.SelfCommunicator() as group:
            SymmetricMemory(100, group, multicast=False, device=1)  # type: ignore[arg-type]


@pytest.mark.gpus(2)
@pytest.mark.simulated_only("a device that is slow to answer")
def test_abandoned_in_time_where_nothing_gets_through(machine: Any) -> None:
    stuck, free = threading.Event(), threading.Event()

    def synchronize(stream: Any) -> Any:
        if stuck.is_set():
            free.wait(10)
        return machine.cuStreamSynchronize(stream)

    slow: Any = Replaced(machine, cuStreamSynchronize=synchronize)
    devices = sa.Device.all(slow)
    memory = SymmetricMemory.local(devices, 100)
    with devices[0].create_stream() as stream:
        memory.wait_signal(1, stream)
        stuck.set()
        with pytest.raises(TimeoutError):
            memory.abandon(0.2)
        stuck.clear()
        free.set()
        memory.abandon()


def test_the_current_context_says_which_device(machine: Any, device: sa.Device) -> None:
    with ipc.SelfCommunicator() as group:
        # The only one that is visible, or the one whose context is current.
        with device.current(), SymmetricMemory(100, group) as memory:
            assert memory.device == device and memory.size == 1
        buffer = SymmetricMemory(100, group, device=device).buffers[0]
        buffer.fill(3)
        assert holds(buffer, 3)
        assert buffer.owner.ranks == (0,) and not buffer.owner.multicast
        buffer.owner.close()


# -- in two processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partner(on_cuda: bool) -> Iterator[Partner]:
    """The other process, whose driver has two devices."""
    with Partner(on_cuda, devices=2) as partner:
        yield partner


def group_of(rank: int, token: str) -> ipc.ProcessCommunicator:
    return ipc.ProcessCommunicator(rank, 2, token, 20.0)


def join(there: There, token: str, nbytes: int, options: dict[str, Any]) -> list[int]:
    """Be rank 1, on device 1."""
    group = there.keep("group", group_of(1, token))
    device = sa.Device(1, driver=there.driver)
    memory = there.keep("memory", SymmetricMemory(nbytes, group, device=device, timeout=20, **options))
    there.keep("ordered", device.create_stream())
    found: list[int] = memory.addresses.tolist()
    return found


def write_there(there: There, rank: int, seed: int) -> None:
    filled(there.kept["memory"].buffers[rank], seed, there.kept["ordered"])


def barrier_there(there: There, channel: int = 0) -> None:
    there.kept["memory"].barrier(there.kept["ordered"], channel=channel)


def shows_there(there: There, rank: int, seed: int) -> bool:
    there.kept["ordered"].synchronize()
    return shows(there.kept["memory"].buffers[rank], seed)


def busy_there(there: There) -> bool:
    return pending(there.kept["ordered"])


def close_there(there: There) -> bool:
    memory = there.kept.pop("memory")
    memory.close()
    return bool(memory.closed)


def both(partner: Partner, nbytes: int, devices: Sequence[sa.Device], **options: Any) -> SymmetricMemory:
    """The memory of this process, as rank 0 on device 0, and of the partner."""
    token = token_hex(16)
    group = group_of(0, token)
    partner.begin(join, token, nbytes, options)
    try:
        memory = SymmetricMemory(nbytes, group, device=devices[0], timeout=20, **options)
    finally:
        partner.result()
    return memory


@pytest.mark.gpus(2)
class InTwoProcesses:
    @pytest.fixture
    def memory(self, partner: Partner, devices: list[sa.Device]) -> Iterator[SymmetricMemory]:
        with both(partner, NBYTES, devices, multicast=False) as memory:
            assert memory.handle_type is sa.MemHandleType.POSIX_FILE_DESCRIPTOR
            yield memory
            if not memory.closed:
                partner.begin(close_there)
                memory.close()
                assert partner.result()


class TestInTwoProcesses(InTwoProcesses):
    def test_each_writes_and_reads_the_other_s_memory(
        self, memory: SymmetricMemory, partner: Partner, streams: list[sa.Stream]
    ) -> None:
        stream = streams[0]
        assert (memory.rank, memory.size, memory.devices) == (0, 2, (stream.device,))
        filled(memory.buffers[1], 1, stream)
        partner.run(write_there, 0, 2)
        memory.barrier(stream)
        partner.run(barrier_there)
        assert executed(stream)
        for rank, seed in ((0, 2), (1, 1)):
            assert shows(memory.buffers[rank], seed)
            assert partner.run(shows_there, rank, seed)
        assert all(holds(pad, 0) for pad in memory.signal_pads)

    def test_the_barrier_waits(self, memory: SymmetricMemory, partner: Partner, streams: list[sa.Stream]) -> None:
        stream = streams[0]
        for seed in range(1, 4):
            memory.barrier(stream)
            assert pending(stream)
            partner.run(write_there, 1, seed)
            partner.run(barrier_there)
            memory.buffers[0].copy_from(memory.buffers[1], stream)
            assert executed(stream) and shows(memory.buffers[0], seed)

    def test_signals(self, memory: SymmetricMemory, partner: Partner, streams: list[sa.Stream]) -> None:
        stream = streams[0]
        memory.wait_signal(1, stream)
        assert pending(stream)
        partner.tell("memory", "put_signal", 0, Kept("ordered"))
        assert executed(stream)
        partner.tell("memory", "wait_signal", 0, Kept("ordered"))
        assert partner.run(busy_there)
        memory.put_signal(1, stream)
        assert not partner.run(busy_there)

    def test_its_parts_name_their_owner(self, memory: SymmetricMemory) -> None:
        mine, theirs = memory.buffers
        assert isinstance(theirs, SymmetricBuffer) and theirs.owner is memory
        # Whatever names no stream is queued on this rank's device.
        assert mine.stream.device == theirs.stream.device == memory.device


class TestOneThatDies(InTwoProcesses):
    @pytest.fixture
    def partner(self, on_cuda: bool) -> Iterator[Partner]:
        with Partner(on_cuda, devices=2) as partner:
            yield partner

    def test_one_that_dies_is_left_behind(
        self, memory: SymmetricMemory, partner: Partner, streams: list[sa.Stream], devices: list[sa.Device]
    ) -> None:
        stream = streams[0]
        memory.barrier(stream)
        filled(memory.buffers[0], 5)
        partner.kill()
        assert pending(stream)
        with pytest.raises(SymmetricMemoryError, match=r"rank 1 failed in step 'meet': .* is gone") as raised:
            memory.close()
        assert isinstance(raised.value.__cause__, ipc.PeerGoneError)
        assert memory.closed and executed(stream)
        with SymmetricMemory.local(devices, 100, multicast=False) as again:
            again.buffers[1].fill(1)

    def test_memory_of_one_that_dies_stays(self, memory: SymmetricMemory, partner: Partner) -> None:
        partner.run(write_there, 1, 3)
        assert partner.run(shows_there, 1, 3)
        partner.kill()
        assert shows(memory.buffers[1], 3)
        memory.abandon()
        memory.abandon()


@pytest.mark.simulated_only("threads interleave so on any driver")
def test_two_threads_close_it(device: sa.Device) -> None:
    def make() -> SymmetricMemory:
        return SymmetricMemory.local([device], MiB, multicast=False)

    def close(memory: SymmetricMemory) -> None:
        memory.close()

    for memory in interleaved(RankResources.release, make, close, close):
        assert memory.closed and not memory._resources.made


@pytest.mark.simulated_only("threads interleave in the same way on any driver")
class TestReleaseByTwoThreads:
    faults = Faults(sa.driver.simulated())

    def make(self) -> RankResources:
        device = sa.Device(0, driver=self.faults)
        resources = RankResources(session_of(device), {0: device, 1: device}, 2, 2 * MiB)
        for rank in resources.devices:
            resources.create(rank, sa.MemHandleType.NONE, multicast=False)
        resources.reserve()
        resources.map()
        return resources

    def test_addresses_that_could_not_be_freed(self) -> None:
        """Another thread, which releases them at the same time, does not lose them."""

        def make() -> RankResources:
            resources = self.make()
            self.faults.fail("cuMemAddressFree")
            return resources

        def release(resources: RankResources) -> None:
            with contextlib.suppress(sa.OutOfMemoryError):
                resources.release()

        for resources in interleaved(Node.attempt, make, release, release):
            resources.release()
            assert self.faults.seen.count("cuMemAddressFree") == 2
