"""The end of things: whatever is dropped in whichever order, the driver sees the one right order."""

import gc
import random
from collections.abc import Callable
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.multicast import symmetric
from streamalloc.testing import Gate
from tests.multicast.support import PAGE, TEAM, Team, added, misorders
from tests.support import Account, end_what_was_dropped, in_a_thread, names

Python = Callable[..., CompletedProcess[str]]
pytestmark = [pytest.mark.gpus(TEAM), pytest.mark.multicast]

# The calls of the end, in the order in which they come where everything goes.
PHASES = ["cuMulticastUnbind", "release object", "release memory", "cuMemAddressFree"]


def parts(driver: Any) -> list[object]:
    """All that a user can hold of a team: bound by handle and by address, mapped several times, closed in part."""
    team = Team(driver)
    devices, made = team.devices, team.object
    team.bindings.pop().close()
    closed = team.memories.pop()
    found = made.bind(team.unicast[-1])
    closed.close()
    team.unicast[0].close()
    team.ranges.pop(0).close()
    buffer = vmm.GrowableBuffer(devices[1], 4 * PAGE, PAGE, chunk=PAGE)
    team.bindings[1].close()
    part = made.bind(team.memories[1], nbytes=PAGE)
    growable = made.bind(buffer[:PAGE], PAGE)
    again = vmm.PhysicalMemory.at(team.unicast[2].address, driver=driver)
    return [
        made, *team.memories, *team.bindings, *team.ranges, *team.unicast, team.view, team.range, team.alias, closed,
        found, buffer, part, growable, again, made.bindings, team.view[:64], team.unicast[1][16:],
        team.range.view(2 * PAGE), buffer.mappings,
    ]  # fmt: skip


def phases(calls: list[Any]) -> list[int]:
    """The calls of the end, as places in :data:`PHASES`."""
    objects = {int(call.answer[1]) for call in calls if call.name == "cuMulticastCreate"}
    found = []
    for call in calls:
        name = call.name
        if name == "cuMemRelease":
            name = "release object" if int(call.args[0]) in objects else "release memory"
        if name in PHASES:
            found.append(PHASES.index(name))
    return found


class TestGarbage:
    @pytest.mark.parametrize(
        "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 200))]
    )
    @in_a_thread
    def test_dropped_in_any_order(self, machine: Any, seed: int) -> None:
        """Some of it in cycles, and collected now and then."""
        chance = random.Random(seed)
        account = Account(machine)
        things = parts(account.driver)
        begun = len(account.traced.calls)
        chance.shuffle(things)
        while things:
            count = chance.randint(1, 6)
            holder: list[object] = things[:count]
            del things[:count]
            if chance.random() < 0.5:
                holder.append(holder)
            del holder
            if chance.random() < 0.3:
                gc.collect()
        gc.collect()
        assert account.left == {}
        assert misorders(account.traced.calls, begun) == []
        ends = phases(account.traced.calls)[len(phases(account.traced.calls[:begun])) :]
        assert ends == sorted(ends) and set(ends) == set(range(len(PHASES)))

    def test_bound_memory_of_a_pool_in_a_cycle(self, machine: Any) -> None:
        """It is freed after it was unbound."""
        account = Account(machine)
        devices = sa.Device.all(account.driver)
        stream = devices[0].create_stream()
        pool = sa.MemoryPool(devices[0])
        buffer = pool.allocate(16 * PAGE, stream)
        made = added(PAGE, devices)
        made.bind(buffer[-buffer.address % PAGE :][:PAGE])
        things = [buffer, made]
        things.append(things)  # type: ignore[arg-type]
        del things, made, buffer
        gc.collect()
        end_what_was_dropped()
        ends = names(account.traced, "cuMulticastUnbind", "cuMemFreeAsync", "cuMemRelease")
        assert ends == ["cuMulticastUnbind", "cuMemRelease", "cuMemFreeAsync"]
        pool.close()
        stream.close()

    def test_the_check_can_fail(self, traced: Any) -> None:
        """Releases by hand in the wrong order are found."""
        team = Team(traced)
        calls = list(traced.calls)
        one, memory = team.object.handle, team.memories[0].handle
        for name, arguments in {
            "released while it was bound": ("cuMemRelease", (memory,)),
            "before object": ("cuMemRelease", (memory,)),
            "released while it was mapped": ("cuMemRelease", (one,)),
            "unmapped before it was unbound": ("cuMemUnmap", (team.view.address, 2 * PAGE)),
            "freed before": ("cuMemAddressFree", (team.view.address, 2 * PAGE)),
        }.items():
            assert misorders(calls) == []
            assert any(name in text for text in misorders([*calls, sd.wrappers.Call(*arguments, (0,))])), name
        assert phases([*calls, sd.wrappers.Call("cuMemRelease", (one,), (0,))]) == [1]


class TestDropped:
    """Objects that keep others, and the time of their end."""

    def test_a_binding_that_is_dropped_stays(self, machine: Any) -> None:
        account = Account(machine)
        team = Team(account.driver)
        team.bindings.clear()
        team.memories.clear()
        gc.collect()
        assert len(team.object.bindings) == TEAM and names(account.traced, "cuMulticastUnbind", "cuMemRelease") == []

    def test_one_synchronisation_releases_all(self, machine: Any) -> None:
        """Also if the collector calls the finaliser of the object before those of the ranges that it is mapped in."""
        account = Account(machine)
        team: Any = Team(account.driver)
        device = team.devices[0]
        team.object.__del__()
        del team
        gc.collect()
        device.synchronize()
        assert account.checked.outstanding() == {}

    def test_bound_after_its_range_was_dropped(self, machine: Any) -> None:
        """The addresses are freed after the object and the memory."""
        account = Account(machine)
        devices = sa.Device.all(account.driver)
        memory, range = vmm.PhysicalMemory(devices[0], PAGE), vmm.AddressRange(PAGE, driver=account.driver)
        with devices[0].create_stream() as stream, Gate(devices[0]) as gate:
            mapping = range.map(memory, access=devices[0])
            gate.hold(stream)
            mapping.fill(1, stream)
            del mapping, range
            gc.collect()
            made = added(PAGE, devices)
            made.bind(memory)
            gate.open()
            stream.synchronize()
            del made
            gc.collect()
            stream.synchronize()
            del memory
            gc.collect()
        assert account.mapped == {}
        assert phases(account.traced.calls) == [0, 1, 2, 3]

    def test_dropped_while_a_stream_is_captured(self, machine: Any) -> None:
        account = Account(machine)
        team: Any = Team(account.driver)
        with team.devices[0].create_stream() as stream:
            with stream.capture() as graph:
                del team
                gc.collect()
                assert names(account.traced, "cuMulticastUnbind", "cuMemUnmap", "cuMemRelease") == []
            graph.close()
            assert misorders(account.traced.calls) == []
        del stream, graph
        assert account.left == {}

    @pytest.mark.parametrize("call", ["cuMulticastUnbind", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
    def test_what_the_driver_refuses_is_tried_again(self, machine: Any, call: str) -> None:
        """And nothing goes before it that has to go after it."""
        account = Account(machine)
        faulty = sd.faulty(account.driver, call, times=2, result="CUDA_ERROR_UNKNOWN")
        team: Any = Team(faulty)
        del team
        gc.collect()
        for _ in range(3):
            end_what_was_dropped()
        assert faulty.failed == 2 * [call]
        assert account.left == {} and misorders(account.traced.calls) == []


class TestClosed:
    @pytest.mark.parametrize("old", [False, True])
    def test_closing_can_unmap(self, machine: Any, old: bool) -> None:
        account = Account(machine)
        team = Team(account.driver)
        if old:
            with pytest.deprecated_call(match="unmap=True"):
                team.object.end()
        else:
            team.object.close(unmap=True)
        assert team.object.closed and team.view.closed and team.alias.closed
        team.object.close(unmap=True)
        assert names(account.traced, "cuMemRelease") == ["cuMemRelease"] and misorders(account.traced.calls) == []

    def test_refused_while_mapped(self, machine: Any) -> None:
        team = Team(machine)
        with pytest.raises(ValueError, match="2 mappings"):
            team.object.close()
        team.view.close()
        with pytest.raises(ValueError, match="1 mapping"):
            team.object.close()
        assert team.object.handle and len(team.object.bindings) == TEAM
        team.alias.close()
        team.object.close()
        team.object.close()
        assert team.object.closed and team.object.bindings == ()

    def test_queued_work_is_waited_for(self, machine: Any) -> None:
        account = Account(machine)
        team = Team(account.driver)
        account.traced.calls.clear()
        team.bindings[0].close()
        assert names(account.traced, "cuMemFree", "cuMulticastUnbind") == [
            *TEAM * ["cuMemFree"], "cuMulticastUnbind",
        ]  # fmt: skip
        account.traced.calls.clear()
        team.bindings[1].close(())
        assert names(account.traced, "cuMemFree", "cuMulticastUnbind") == ["cuMulticastUnbind"]


EXIT = """
import streamalloc as sa
from streamalloc import multicast, vmm
PAGE = 2 << 20
import streamalloc.driver as sd
driver = sd.simulated(devices=2)
devices = sa.Device.all(driver)
made = multicast.MulticastObject(PAGE, 2, driver=driver)
for device in devices: made.add_device(device)
memories = [vmm.PhysicalMemory(device, PAGE) for device in devices]
bindings = [made.bind(memory) for memory in memories]
view = made.map(access=devices); view.fill(1)
addresses = vmm.AddressRange(PAGE, driver=driver); addresses.map(memories[0], access=devices)
holder = [view, bindings[1]]; holder.append(holder)
"""


@pytest.mark.simulated_only("names its driver")
def test_interpreter_exit(python: Python) -> None:
    done = python(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("used", "releasing", "written"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_counters_that_nobody_waits_for_are_not_written(
    used: bool, releasing: bool, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run_until(device: object, *_: object) -> list[Any]:
        asked.append(device)
        return []

    monkeypatch.setattr(symmetric, "run_until", run_until)
    monkeypatch.setattr(symmetric, "finish_all", lambda devices, deadline: [])
    resources: Any = SimpleNamespace(devices={0: "device"}, replicas=["replica"], releasing=releasing)
    signals: Any = SimpleNamespace(used=used)
    assert symmetric._satisfy_and_finish(resources, signals, None) == [] and len(asked) == written
