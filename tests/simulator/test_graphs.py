"""Graphs: who has which memory, and that launches that may run at a time never share it."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from tests.facts.enums import BLOCKING
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

STEP = 32 * MiB


def reserved(rig: Rig) -> int:
    """Graph memory of device 0 in steps."""
    d = rig.raw
    size = int(ok(d.cuDeviceGetGraphMemAttribute(0, d.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)))
    assert size % STEP == 0
    return size // STEP


def begin(rig: Rig, stream: Any) -> None:
    ok(rig.raw.cuStreamBeginCapture(stream, rig.raw.CUstreamCaptureMode(2)))


class Written:
    """A graph that allocates, fills, waits for a word, copies what is there then to ``out``, and frees."""

    def __init__(self, rig: Rig, value: int, size: int = MiB) -> None:
        d, stream = rig.raw, rig.stream()
        self.value, self._driver = value, d
        self.gate, self._out = rig.word(), rig.word()
        begin(rig, stream)
        self.address = int(ok(d.cuMemAllocAsync(size, stream)))
        ok(d.cuMemsetD8Async(self.address, value, size, stream))
        rig.hold(stream, self.gate)
        ok(d.cuMemcpyDtoHAsync(ctypes.addressof(self._out), self.address + size - 4, 4, stream))
        ok(d.cuMemFreeAsync(self.address, stream))
        self.graph = ok(d.cuStreamEndCapture(stream))
        self.executable = self.instantiate()
        self.gate.value = 1

    def instantiate(self) -> Any:
        return ok(self._driver.cuGraphInstantiate(self.graph, 0))

    def launch(self, stream: Any) -> None:
        ok(self._driver.cuGraphLaunch(self.executable, stream))

    @property
    def right(self) -> bool:
        """Whether what the latest launch copied is what it had written."""
        seen, self._out.value = self._out.value, 0
        return seen == self.value * 0x01010101


def order(rig: Rig, stream: Any, after: Any) -> None:
    event = rig.event()
    ok(rig.raw.cuEventRecord(event, after))
    ok(rig.raw.cuStreamWaitEvent(stream, event, 0))


class TestLaunches:
    def test_of_one_graph_take_turns(self, rig: Rig) -> None:
        d, one, two, word, graph = rig.raw, rig.stream(), rig.stream(), rig.word(), Written(rig, 1)
        rig.hold(one, word)
        graph.launch(one)
        ok(d.cuGraphExecDestroy(graph.executable))
        graph.executable = graph.instantiate()
        graph.launch(two)
        assert rig.query(two) == "NOT_READY"
        word.value = 1
        ok(d.cuStreamSynchronize(two))
        assert graph.right

    def test_that_are_queued_outlive_the_graph(self, rig: Rig) -> None:
        d, stream, graph, machine = rig.raw, rig.stream(), Written(rig, 1), rig.raw._machine
        graph.gate.value = 0
        graph.launch(stream)
        ok(d.cuGraphExecDestroy(graph.executable))
        ok(d.cuGraphDestroy(graph.graph))
        ok(d.cuDeviceGraphMemTrim(0))
        assert reserved(rig) == 1, "it is in use"
        graph.gate.value = 1
        ok(d.cuStreamSynchronize(stream))
        assert graph.right
        ok(d.cuDeviceGraphMemTrim(0))
        assert reserved(rig) == 0
        assert not machine.devices[0].graphs.memories

    def test_for_which_there_is_no_memory(self) -> None:
        rig = new_rig(memory=2 * STEP + 2 * MiB)  # with what the first graph takes
        d, stream, graph = rig.raw, rig.stream(), Written(rig, 1, 40 * MiB)
        plain = ok(d.cuMemAlloc(STEP))
        assert d.cuGraphLaunch(graph.executable, stream)[0] == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        ok(d.cuMemFree(plain))
        graph.launch(stream)
        ok(d.cuStreamSynchronize(stream))
        assert graph.right


def test_many_graphs_that_come_and_go_use_no_addresses_up(rig: Rig) -> None:
    d, stream = rig.raw, rig.stream()
    for _ in range(50):
        graph = Written(rig, 1)
        graph.launch(stream)
        ok(d.cuGraphExecDestroy(graph.executable))
        ok(d.cuGraphDestroy(graph.graph))
    assert len(d._machine.devices[0].graphs.memories) <= 1
    assert reserved(rig) == 1


@pytest.mark.parametrize("seed", range(12))
def test_no_launch_sees_the_memory_of_another(seed: int) -> None:
    rig, dice = new_rig(seed=seed), random.Random(seed)
    d = rig.raw
    streams = [rig.stream(), rig.stream(), rig.stream(BLOCKING), 0]
    graphs = [Written(rig, value, dice.choice([4, MiB, 33 * MiB])) for value in range(1, 6)]
    launched: set[int] = set()
    for _ in range(40):
        action = dice.random()
        if action < 0.6:
            number = dice.randrange(len(graphs))
            graphs[number].launch(dice.choice(streams))
            launched.add(number)
        elif action < 0.8:
            order(rig, dice.choice(streams), after=dice.choice(streams))
        elif action < 0.9:
            ok(d.cuDeviceGraphMemTrim(0))
        else:
            ok(d.cuCtxSynchronize())
            assert all(graphs[number].right for number in launched)
            launched.clear()
    ok(d.cuCtxSynchronize())
    assert all(graphs[number].right for number in launched)
    ok(d.cuDeviceGraphMemTrim(0))
    assert reserved(rig) == 0


@pytest.mark.parametrize("captured", [True, False])
def test_a_launch_waits_for_the_latest_recording_when_it_is_submitted(captured: bool, rig: Rig) -> None:
    """A later recording may wait for the launch itself."""
    d, stream, other, event, gate = rig.raw, rig.stream(), rig.stream(), rig.event(), rig.gate()
    if captured:
        begin(rig, stream)
        ok(d.cuStreamWaitEvent(stream, event, 1))
        graph = ok(d.cuStreamEndCapture(stream))
    else:
        graph = ok(d.cuGraphCreate(0))
        ok(d.cuGraphAddEventWaitNode(graph, [], 0, event))
    launch = ok(d.cuGraphInstantiate(graph, 0))
    ok(d.cuEventRecord(event, other))
    gate.hold(stream)
    ok(d.cuGraphLaunch(launch, stream))
    launched = rig.event()
    ok(d.cuEventRecord(launched, stream))
    ok(d.cuStreamWaitEvent(other, launched, 0))
    ok(d.cuEventRecord(event, other))
    gate.open()
    assert rig.executed(stream) and rig.executed(other)
