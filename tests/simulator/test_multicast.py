"""Multicast, what is the simulator's own business: deadlocks, slots, processes that end, stand-ins for kernels."""

import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import testing
from streamalloc.simulator import DeadlockError
from streamalloc.simulator.multicast import MulticastMemory
from streamalloc.testing.multimem import SUPPORTED
from tests.facts.enums import DEVICE, FABRIC, POSIX_FD, READ, READWRITE
from tests.facts.support import PAGE, Rig, said, value
from tests.facts.teams import Team, properties, whole
from tests.processes import FABRIC_HANDLE, FD, Descriptor, Kept, Peer, bytes_of, python, started
from tests.simulator.support import mappings, on
from tests.simulator.support import new_rig as any_rig
from tests.support import each_raises, open_descriptors, soon

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


MACHINE = {"devices": 2, "patience": 0.2}


def new_rig(**machine: Any) -> Rig:
    return any_rig(**{**MACHINE, **machine})


@pytest.fixture
def team(rig: Rig) -> Team:
    """A team that other processes can have, with device 0."""
    team = Team(rig, handle_types=POSIX_FD)
    team.add(0)
    return team


@pytest.fixture
def process(another: Callable[..., Peer]) -> Peer:
    return another(devices=2)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of the test runner could add a device."""
    here = threading.current_thread()
    monkeypatch.setattr(threading, "enumerate", lambda: [here])


def join(process: Peer, team: Team, device: int = 1, add: bool = True) -> None:
    """Let the other process have the object, and add a device."""
    fd = team.rig.exported(team.object)
    process.value("cuMemImportFromShareableHandle", Descriptor(fd), FD, keep="object")
    team.rig.close_fd(fd)
    if add:
        process.value("cuMulticastAddDevice", Kept("object"), device)


def bind_there(process: Peer) -> int:
    """Let the other process bind memory; where it sees that."""
    process.rig("memory", PAGE, id=1, handle_types=POSIX_FD, keep="memory")
    process.value("cuMulticastBindMem", Kept("object"), 0, Kept("memory"), 0, PAGE, 0)
    address: int = process.rig("reserve", PAGE)
    process.rig("map", address, Kept("memory"), PAGE)
    process.rig("set_access", address, PAGE, (DEVICE, 0, READWRITE))
    return address


class TestSupport:
    @on(devices=1)
    def test_one_device_has_none(self, rig: Rig) -> None:
        props = properties(rig.raw, 2)
        assert said(rig.raw.cuMulticastCreate(props)) == "NOT_SUPPORTED"
        flag = rig.raw.CUmulticastGranularity_flags(0)
        assert said(rig.raw.cuMulticastGetGranularity(props, flag)) == "NOT_SUPPORTED"

    def test_can_be_switched_off(self) -> None:
        raw = new_rig(multicast=False).raw
        assert said(raw.cuMulticastCreate(properties(raw, 2))) == "NOT_SUPPORTED"

    @pytest.mark.parametrize("devices", [1, 3])
    def test_teams_of_which_nothing_is_known(self, rig: Rig, devices: int) -> None:
        with pytest.raises(NotImplementedError, match=r"multicast object for (one|more) device"):
            rig.raw.cuMulticastCreate(properties(rig.raw, devices))

    def test_fabric_handles_need_a_channel(self, rig: Rig) -> None:
        props = properties(rig.raw, 2, handle_types=FABRIC | POSIX_FD)
        assert said(rig.raw.cuMulticastCreate(props)) == "NOT_PERMITTED"
        assert said(new_rig(fabric=True).raw.cuMulticastCreate(props)) == "SUCCESS"
        with pytest.raises(NotImplementedError):
            new_rig(fabric=False).raw.cuMulticastCreate(props)


@pytest.mark.usefixtures("alone")
class TestDeadlocks:
    def test_binding(self, rig: Rig) -> None:
        team = Team(rig)
        assert team.add(1) == "SUCCESS"
        with pytest.raises(DeadlockError, match=r"cuMulticastBindMem.* 1 of 2 .*\(1\).*nobody else"):
            team.bind(rig.memory())
        assert team.add(0) == "SUCCESS"
        assert team.bind(rig.memory()) == "SUCCESS"

    def test_binding_by_address(self, rig: Rig) -> None:
        with pytest.raises(DeadlockError, match=r"cuMulticastBindAddr.* 0 of 2 .*\(none\)"):
            Team(rig).bind_address(rig.mapping(PAGE))

    def test_mapping(self, rig: Rig) -> None:
        with pytest.raises(DeadlockError, match="cuMemMap"):
            rig.map(rig.reserve(PAGE), Team(rig).object)

    def test_wrong_arguments_come_first(self, rig: Rig) -> None:
        assert Team(rig).bind(rig.memory(), size=4096) == "INVALID_VALUE"

    def test_a_descriptor_may_bring_others(self, rig: Rig) -> None:
        team = Team(rig, handle_types=POSIX_FD)
        fd = rig.exported(team.object)
        with pytest.raises(DeadlockError, match=r"nobody has added the others within 0\.2 s"):
            team.bind(rig.memory(handle_types=POSIX_FD))
        rig.close_fd(fd)
        with pytest.raises(DeadlockError, match="nobody else"):
            team.bind(rig.memory(handle_types=POSIX_FD))


class TestWaiting:
    @on(patience=30)
    def test_for_a_device_that_another_thread_adds(self, rig: Rig) -> None:
        team = Team(rig)
        team.add(0)
        with soon(lambda: team.add(1), 0.1):
            assert team.bind(rig.memory()) == "SUCCESS"

    @on(patience=30)
    def test_with_a_handle_that_is_released_meanwhile(self, rig: Rig, team: Team) -> None:
        again = rig.imported(rig.exported(team.object))

        def go_on() -> None:
            rig.release(team.object)
            value(rig.raw.cuMulticastAddDevice(again, 1))

        memory = rig.memory(handle_types=POSIX_FD)
        with soon(go_on, 0.05), pytest.raises(NotImplementedError, match="handle that does not exist"):
            team.bind(memory)

    @on(patience=30)
    def test_for_a_device_that_another_process_adds(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team, add=False)
        with soon(lambda: process.value("cuMulticastAddDevice", Kept("object"), 1), 0.1):
            assert team.bind(rig.memory(handle_types=POSIX_FD)) == "SUCCESS"

    @pytest.mark.usefixtures("alone")
    @on(patience=30)
    def test_for_a_process_that_dies(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team, add=False)
        os.kill(process.pid, signal.SIGSTOP)
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.2; kill -9 {process.pid}"])
        with pytest.raises(DeadlockError, match="nobody else"):
            team.bind(rig.memory(handle_types=POSIX_FD))
        killer.wait()
        process.close()


class TestSlots:
    @on(multicast_slots=2)
    def test_run_out(self, rig: Rig) -> None:
        teams = [Team(rig).add_all() for _ in range(3)]
        memory = [rig.memory(id=0) for _ in teams]
        assert [team.bind(one) for team, one in zip(teams, memory, strict=True)] == ["SUCCESS"] * 2 + ["OUT_OF_MEMORY"]
        assert said(rig.raw.cuMemMap(rig.reserve(PAGE), PAGE, 0, teams[2].object, 0)) == "OUT_OF_MEMORY"
        rig.release(teams[0].object)
        assert Team(rig).add_all().bind(rig.memory()) == "SUCCESS"

    @on(multicast_slots=1)
    def test_an_object_without_all_its_devices_has_none(self, rig: Rig) -> None:
        Team(rig).add(0)
        assert Team(rig).add_all().bind(rig.memory()) == "SUCCESS"


class TestWhatIsNotKnown:
    def test_work_where_a_device_has_bound_nothing(self, rig: Rig) -> None:
        team = Team(rig, size=2 * PAGE).add_all()
        assert team.bind(rig.memory(2 * PAGE)) == "SUCCESS"
        assert team.bind(rig.memory(id=1), size=PAGE) == "SUCCESS"
        address = team.map()
        value(rig.raw.cuMemsetD8(address, 1, PAGE))
        with pytest.raises(NotImplementedError, match=r"devices \[1\] have bound nothing"):
            rig.raw.cuMemsetD8(address, 1, PAGE + 1)

    def test_work_when_memory_was_unbound_meanwhile(self, rig: Rig) -> None:
        team, address = whole(rig)
        stream, gate = rig.stream(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuMemsetD8Async(address, 1, PAGE, stream))
        assert team.unbind(1) == "SUCCESS"
        gate.open()
        assert said(rig.raw.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"

    def test_calls(self, rig: Rig) -> None:
        raw, team, target, stream = rig.raw, Team(rig, size=2 * PAGE).add_all(), rig.plain(PAGE), rig.stream()
        memory, (whole_team, address) = rig.memory(2 * PAGE), whole(rig)
        assert team.bind(memory) == "SUCCESS"
        calls: list[tuple[str, Callable[[], object]]] = [
            ("multicast object", lambda: raw.cuMemcpyDtoH(bytearray(4), address, 4)),
            ("multicast object", lambda: raw.cuMemcpyDtoD(target, address, 4)),
            ("multicast object", lambda: raw.cuMemcpyDtoD(address + 8, address, 4)),
            ("multicast object", lambda: raw.cuMemsetD2D8(address, 64, 1, 8, 2)),
            ("multicast object", lambda: raw.cuStreamWaitValue32(stream, address, 0, 0)),
            ("multicast object", lambda: raw.cuStreamWriteValue32(stream, address, 0, 0)),
            ("not modelled", lambda: raw.cuMemGetAddressRange(address)),
            ("not modelled", lambda: raw.cuMemGetAllocationPropertiesFromHandle(whole_team.object)),
            ("where physical memory", lambda: team.bind(team.object)),
            ("where a multicast object", lambda: raw.cuMulticastAddDevice(memory, 0)),
            ("another size", lambda: team.unbind(0, size=PAGE)),
            ("offset", lambda: raw.cuMemMap(rig.reserve(PAGE), PAGE, PAGE, team.object, 0)),
        ]
        for attribute in ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_SIZE", "ACCESS_FLAGS"):
            calls.append(("not modelled", functools.partial(rig.pointer_attributes, address, [attribute])))
        for words, call in calls:
            each_raises(NotImplementedError, call, match=words)

    def test_memory_of_a_pool_that_was_freed(self, rig: Rig) -> None:
        team = Team(rig).add_all()
        stream = rig.stream()
        address = rig.allocate(rig.pool(), PAGE, stream)
        assert team.bind_address(int(address)) == "SUCCESS"
        assert team.bind(rig.memory(id=1)) == "SUCCESS"
        where = team.map()
        rig.free(address, stream)
        with pytest.raises(NotImplementedError, match=r"devices \[0\] have .*freed"):
            rig.raw.cuMemsetD8(where, 1, PAGE)


@on(devices=3)
def test_a_device_outside_the_team(rig: Rig) -> None:
    team, address = whole(rig, 2)
    assert rig.set_access(address, PAGE, (DEVICE, 1, READWRITE), (DEVICE, 2, READWRITE)) == "ILLEGAL_STATE"
    assert rig.get_access(address, id=1) == 0
    assert team.bind(rig.memory(id=2)) == "INVALID_DEVICE"


def test_captured_writes_reach_every_device(rig: Rig) -> None:
    team, address = whole(rig)
    stream, source = rig.stream(), rig.plain(PAGE)
    value(rig.raw.cuMemsetD8(source, 9, PAGE))
    rig.synchronize()
    rig.begin_capture(stream)
    value(rig.raw.cuMemsetD8Async(address, 4, PAGE, stream))
    value(rig.raw.cuMemcpyAsync(address, source, 2, stream))
    with pytest.raises(NotImplementedError):
        rig.raw.cuMemcpyAsync(source, address, 2, stream)
    executable = rig.instantiate(value(rig.end_capture(stream)))
    for _ in range(2):
        value(rig.raw.cuMemsetD8(address, 0, PAGE))
        rig.synchronize()
        value(rig.raw.cuGraphLaunch(executable, stream))
        assert team.read() == [[9, 9, 4, 4]] * 2


class Machine:
    """Two or more devices, a team of all of them, and streams of each."""

    def __init__(self, devices: int, nbytes: int = PAGE, **machine: Any) -> None:
        self.rig = new_rig(devices=devices, **machine)
        self.team = Team(self.rig, devices, size=nbytes).add_all().bind_all()
        self.address = self.team.map(*range(devices))
        self.devices = [sa.Device(ordinal, driver=self.rig.raw) for ordinal in range(devices)]
        self.streams = [device.create_stream() for device in self.devices]

    def put(self, values: list[Any]) -> None:
        for view, array in zip(self.team.views, values, strict=True):
            value(self.rig.raw.cuMemcpyHtoD(view, array, array.nbytes))
        self.rig.synchronize()

    def get(self, like: Any) -> list[Any]:
        for device in self.devices:
            device.synchronize()
        return [np.array(self.rig.read(view, like.nbytes), np.uint8).view(like.dtype) for view in self.team.views]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.rig.close()


@pytest.fixture
def four() -> Iterator[Machine]:
    machine = Machine(4)
    yield machine
    machine.close()


NUMPY: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMBINATIONS = [(dtype, op) for dtype, ops in SUPPORTED.items() for op in sorted(ops)]


def some(dtype: str, count: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return random.integers(-50, 50, count).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, count, dtype, endpoint=True)


class TestMultimem:
    def test_reductions(self, four: Machine) -> None:
        into = four.rig.mapping(PAGE, (DEVICE, 0, READWRITE), (DEVICE, 2, READWRITE))
        for dtype, op in COMBINATIONS:
            values, operand = [some(dtype, 100, seed) for seed in range(4)], some(dtype, 100, 9)
            four.put(values)
            testing.multimem_ld_reduce(four.streams[2], into, four.address, 100, dtype, op)
            four.streams[2].synchronize()
            got = np.array(four.rig.read(into, operand.nbytes), np.uint8).view(dtype)
            assert (got == functools.reduce(NUMPY[op], values)).all(), (dtype, op)
            testing.multimem_red(four.streams[1], four.address, operand, op)
            for got, before in zip(four.get(operand), values, strict=True):
                assert (got == NUMPY[op](before, operand)).all(), (dtype, op)

    def test_sums_of_halves_are_rounded_once(self, four: Machine) -> None:
        four.put([np.array([one], np.float16) for one in (2048, 1, 1, 0)])
        into = four.rig.mapping(PAGE, (DEVICE, 0, READWRITE))
        testing.multimem_ld_reduce(four.streams[0], into, four.address, 1, np.float16)
        four.streams[0].synchronize()
        assert np.array(four.rig.read(into, 2), np.uint8).view(np.float16)[0] == 2050

    def test_stream_order(self, four: Machine) -> None:
        gate = four.rig.gate()
        gate.hold(four.streams[0].handle)
        testing.multimem_red(four.streams[0], four.address, np.ones(4, np.int32))
        assert four.rig.held(four.streams[0].handle)
        testing.multimem_red(four.streams[1], four.address, np.full(4, 5, np.int32))
        four.streams[1].synchronize()
        seen: Any = np.zeros(4, np.int32)
        value(four.rig.raw.cuMemcpyDtoHAsync(seen, four.team.views[3], 16, four.rig.stream()))
        assert seen.tolist() == [5] * 4
        gate.open()
        assert all((got == 6).all() for got in four.get(np.zeros(4, np.int32)))

    def test_large(self) -> None:
        machine = Machine(2, 2 * PAGE)
        values = some("int32", PAGE // 2, 1)
        machine.put([values, values])
        testing.multimem_red(machine.streams[0], machine.address, values)
        into = machine.rig.mapping(2 * PAGE, (DEVICE, 0, READWRITE))
        testing.multimem_ld_reduce(machine.streams[0], into, machine.address, PAGE // 2, "int32")
        machine.streams[0].synchronize()
        got = np.zeros_like(values)
        value(machine.rig.raw.cuMemcpyDtoH(got, into, 2 * PAGE))
        assert (got == values * 4).all()
        machine.close()

    def test_bad_arguments(self, four: Machine) -> None:
        stream = four.streams[0]
        ones = np.ones(4, np.float32)
        view, address, other_order = four.team.views[0], four.address, ones.astype(ones.dtype.newbyteorder("S"))
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("no mapping of a multicast object", lambda: testing.multimem_st(stream, view, ones)),
            ("no mapping of a multicast object", lambda: testing.multimem_st(stream, address + PAGE - 4, ones)),
            ("multiple of 4", lambda: testing.multimem_red(stream, address + 2, ones)),
            ("for float32 there are add", lambda: testing.multimem_red(stream, address, ones, "max")),
            ("int16", lambda: testing.multimem_ld_reduce(stream, view, address, 4, np.int16)),
            ("byte order", lambda: testing.multimem_red(stream, address, other_order)),
            ("multiple of 4", lambda: testing.multimem_ld_reduce(stream, view, address + 1, 4, np.float32)),
        ]
        for words, call in wrong:
            each_raises(ValueError, call, match=words)
        for into in (four.rig.reserve(PAGE), ones.ctypes.data, 0x10):
            with pytest.raises(sa.CudaError):
                testing.multimem_ld_reduce(stream, into, address, 4, np.float32)
        stream.synchronize()

    def test_into_registered_memory(self, four: Machine) -> None:
        four.put([np.full(4, value, np.int32) for value in range(4)])
        into = np.zeros(1024, np.int32)
        value(four.rig.raw.cuMemHostRegister(into.ctypes.data, into.nbytes, 0))
        testing.multimem_ld_reduce(four.streams[0], into.ctypes.data, four.address, 4, np.int32)
        four.streams[0].synchronize()
        assert into[:5].tolist() == [6] * 4 + [0]
        value(four.rig.raw.cuMemHostUnregister(into.ctypes.data))

    def test_access(self, four: Machine) -> None:
        address = four.rig.map(four.rig.reserve(PAGE), four.team.object)
        assert four.rig.set_access(address, PAGE, (DEVICE, 0, READ), (DEVICE, 1, READWRITE)) == "SUCCESS"
        ones, into = np.ones(4, np.float32), four.team.views[0]
        testing.multimem_st(four.streams[1], address, ones)
        testing.multimem_ld_reduce(four.streams[0], into, address, 4, np.float32)
        each_raises(
            sa.CudaError,
            lambda: testing.multimem_st(four.streams[0], address, ones),
            lambda: testing.multimem_ld_reduce(four.streams[2], into, address, 4, np.float32),
        )

    def test_through_wrappers(self) -> None:
        machine = Machine(2)
        device = sa.Device(0, driver=sd.traced(sd.checked(machine.rig.raw)))
        with device.create_stream() as stream:
            testing.multimem_st(stream, machine.address, np.full(4, 7, np.uint8))
            stream.synchronize()
        assert machine.team.read() == [[7] * 4] * 2
        machine.close()

    def test_other_drivers_have_none(self) -> None:
        class Other:
            def __init__(self) -> None:
                self._driver = sd.simulated()

            def __getattr__(self, name: str) -> Any:
                if name.startswith("multimem"):
                    raise AttributeError(name)
                return getattr(self._driver, name)

        stream = sa.Device(0, driver=Other()).create_stream()
        with pytest.raises(NotImplementedError, match="on hardware, write a kernel"):
            testing.multimem_st(stream, 0, np.ones(1, np.int32))
        stream.close()


class TestBetweenProcesses:
    def test_device_added_there(self, rig: Rig, process: Peer) -> None:
        team = Team(rig, handle_types=POSIX_FD)
        join(process, team)
        assert [team.add(1), team.add(0)] == ["INVALID_VALUE", "SUCCESS"]
        assert process.said("cuMulticastAddDevice", Kept("object"), 0) == "INVALID_VALUE"

    def test_what_is_bound_there(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team)
        bind_there(process)
        assert team.bind(rig.memory(id=1, handle_types=POSIX_FD)) == "INVALID_VALUE"
        with pytest.raises(NotImplementedError, match="another process"):
            team.unbind(1)

    def test_a_process_that_is_killed(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team)
        bind_there(process)
        memory = rig.memory(handle_types=POSIX_FD)
        assert team.bind(memory) == "SUCCESS"
        address, view = team.map(), team.view(memory)
        value(rig.raw.cuMemsetD8(address, 1, PAGE))
        process.kill()
        with pytest.raises(NotImplementedError, match=r"devices \[1\] have bound nothing"):
            rig.raw.cuMemsetD8(address, 2, PAGE)
        # its device stays in the team, and anybody can bind memory of that
        assert team.add(1) == "INVALID_VALUE"
        other = rig.memory(id=1, handle_types=POSIX_FD)
        assert team.bind(other) == "SUCCESS"
        value(rig.raw.cuMemsetD8(address, 3, PAGE))
        rig.synchronize()
        assert rig.read(view, 1) + rig.read(team.view(other), 1) == [3, 3]

    def test_a_process_that_is_killed_with_work_queued_here(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team)
        bind_there(process)
        assert team.bind(rig.memory(handle_types=POSIX_FD)) == "SUCCESS"
        address, stream, gate = team.map(), rig.stream(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuMemsetD8Async(address, 1, PAGE, stream))
        process.kill()
        gate.open()
        assert said(rig.raw.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"

    def test_a_process_that_dies_with_the_lock(self, rig: Rig) -> None:
        team = Team(rig, handle_types=POSIX_FD)
        fd = rig.exported(team.object)
        code = (
            "from streamalloc.simulator.multicast import MulticastTable; import time\n"
            f"with MulticastTable.open({fd}).locked(): print('locked', flush=True); time.sleep(60)"
        )
        with started(python(code), [fd]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            with soon(process.kill, 0.1):
                assert team.add(0) == "SUCCESS"
        assert team.add(1) == "SUCCESS"

    def test_the_object_goes_on_when_its_maker_has_ended(self, rig: Rig, process: Peer, team: Team) -> None:
        join(process, team)
        there = bind_there(process)
        rig.release(team.object)
        assert process.said("cuMulticastAddDevice", Kept("object"), 0) == "INVALID_VALUE"
        process.rig("memory", PAGE, id=0, handle_types=POSIX_FD, keep="mine")
        process.value("cuMulticastBindMem", Kept("object"), 0, Kept("mine"), 0, PAGE, 0)
        where = process.rig("reserve", PAGE)
        process.rig("map", where, Kept("object"))
        assert process.rig("set_access", where, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        process.value("cuMemsetD8", where, 9, PAGE)
        assert process.rig("read", there, 2) == [9, 9]

    def test_reductions_of_several_processes(self, rig: Rig) -> None:
        """Each adds 300 times to every replica, and none is lost."""
        team = Team(rig, handle_types=POSIX_FD).add_all().bind_all()
        fd = rig.exported(team.object)
        processes = [started(python(ADDING, fd), [fd], stdout=None) for _ in range(2)]
        assert [process.wait(60) for process in processes] == [0, 0]
        assert team.read() == [[600 % 256, 600 // 256, 0, 0]] * 2

    def test_fabric_handles(self, another: Callable[..., Peer]) -> None:
        rig, process = new_rig(fabric=True), another(devices=2, fabric=True)
        team = Team(rig, handle_types=FABRIC)
        team.add(0)
        handle = bytes_of(rig.exported(team.object, FABRIC))
        process.value("cuMemImportFromShareableHandle", handle, FABRIC_HANDLE, keep="object")
        process.value("cuMulticastAddDevice", Kept("object"), 1)
        assert team.bind(rig.memory(handle_types=FABRIC)) == "SUCCESS"
        rig.close()

    def test_machines_of_one_process(self) -> None:
        """As threads have them that stand for processes."""
        rig, other = new_rig(), new_rig()
        team = Team(rig, handle_types=POSIX_FD)
        theirs = other.imported(rig.exported(team.object))
        assert team.add(0) == "SUCCESS"
        value(other.raw.cuMulticastAddDevice(theirs, 1))
        memory, far = rig.memory(handle_types=POSIX_FD), other.memory(id=1, handle_types=POSIX_FD)
        assert team.bind(memory) == "SUCCESS"
        value(other.raw.cuMulticastBindMem(theirs, 0, far, 0, PAGE, 0))
        rig.use(rig.context)
        value(rig.raw.cuMemsetD8(team.map(), 5, PAGE))
        assert rig.read(team.view(memory), 1) == [5]
        other.use(other.context)
        address = other.map(other.reserve(PAGE), far)
        assert other.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert other.read(address, 1) == [5]
        other.close()
        rig.close()


class TestTheEnd:
    def test_nothing_is_left_when_all_was_undone(self, rig: Rig) -> None:
        free, files, mapped = rig.device_free(), open_descriptors(), mappings()
        other = Rig(rig.raw)
        team, address = whole(other, handle_types=POSIX_FD)
        value(other.raw.cuMemsetD8(address, 1, PAGE))
        other.synchronize()
        other.exported(team.object)
        other.close()
        assert (rig.device_free(), open_descriptors(), mappings()) == (free, files, mapped)

    def test_nothing_is_left_of_a_machine_that_is_dropped(self) -> None:
        files, mapped = open_descriptors(), mappings()
        rig = new_rig()
        _, address = whole(rig, handle_types=POSIX_FD)
        value(rig.raw.cuMemsetD8(address, 1, PAGE))
        rig.raw.cuCtxSetCurrent(rig.raw.CUcontext(0))
        del rig, _
        assert (open_descriptors(), mappings()) == (files, mapped)


ADDING = """
import sys, numpy as np, streamalloc as sa
from streamalloc import testing
from tests.simulator.support import new_rig
from tests.facts.enums import DEVICE, READWRITE
from tests.facts.support import PAGE, value
rig = new_rig(devices=2)
raw = rig.raw
address = rig.map(rig.reserve(PAGE), rig.imported(int(sys.argv[1])))
assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
with sa.Device(0, driver=raw).create_stream() as stream:
    for _ in range(300):
        testing.multimem_red(stream, address, np.ones(1, np.uint32))
    stream.synchronize()
"""


def test_memory_that_another_process_has_unbound_is_not_kept() -> None:
    closed: list[int] = []
    table = SimpleNamespace(devices=[0], bindings=list)
    memory: Any = SimpleNamespace(table=table, _windows={7: SimpleNamespace(close=lambda: closed.append(7))})
    assert MulticastMemory.replicas(memory, 0, 64) == {0: []}
    assert closed == [7] and memory._windows == {}
