"""Calls that need a current context, and the count of the primary context."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import LEGACY
from tests.facts.support import PROGRAM, Answer, Rig, in_new_thread, said, value


class Scene:
    """Things that were made under a context."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.event = rig, rig.raw, rig.event()
        self.stream, self.spare, self.pool, self.empty = rig.stream(), rig.stream(), rig.pool(), rig.pool()
        rig.begin_capture(self.stream)
        self.graph = value(rig.end_capture(self.stream))
        self.pointer = rig.allocate(self.pool, 64, self.stream)

    def attribute(self, name: str) -> Answer:
        attribute = getattr(self.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        answer: Answer = self.raw.cuPointerGetAttribute(attribute, self.pointer)
        return answer

    def capture(self) -> Answer:
        self.rig.begin_capture(self.stream, mode=2)
        return self.rig.end_capture(self.stream)


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return Scene(rig)


# What calls answer in a thread without a context; work on a stream takes the stream's.
WITHOUT_A_CONTEXT: dict[str, dict[str, Callable[[Scene], Answer]]] = {
    "INVALID_CONTEXT": {
        "its device": lambda s: s.raw.cuCtxGetDevice(),
        "synchronize": lambda s: s.raw.cuCtxSynchronize(),
        "allocate plain memory": lambda s: s.raw.cuMemAlloc(1),
        "create a stream": lambda s: s.raw.cuStreamCreate(1),
        "create an event": lambda s: s.raw.cuEventCreate(0),
        "memory info": lambda s: s.raw.cuMemGetInfo(),
        "allocate pinned memory": lambda s: s.raw.cuMemHostAlloc(64, 0),
        "pop": lambda s: s.raw.cuCtxPopCurrent(),
        "allocate on the legacy stream": lambda s: s.raw.cuMemAllocAsync(64, s.raw.CUstream(0)),
        "allocate on the per-thread stream": lambda s: s.raw.cuMemAllocAsync(64, s.raw.CUstream(2)),
        "free nothing on the legacy stream": lambda s: s.raw.cuMemFreeAsync(0, LEGACY),
        "record on the legacy stream": lambda s: s.raw.cuEventRecord(s.event, LEGACY),
        "the device pointer of an address": lambda s: s.attribute("DEVICE_POINTER"),
        "instantiate a graph": lambda s: s.raw.cuGraphInstantiate(s.graph, 0),
    },
    "SUCCESS": {
        "the size of an address": lambda s: s.attribute("RANGE_SIZE"),
        "create a pool": lambda s: s.rig.create_pool(),
        "the default pool": lambda s: s.raw.cuDeviceGetDefaultMemPool(0),
        "allocate on a stream": lambda s: s.rig.try_allocate(s.pool, 64, s.stream),
        "allocate from the current pool": lambda s: s.rig.keep(s.raw.cuMemAllocAsync(64, s.stream)),
        "free on a stream": lambda s: s.raw.cuMemFreeAsync(s.pointer, s.stream),
        "record": lambda s: s.raw.cuEventRecord(s.event, s.stream),
        "wait for an event": lambda s: s.raw.cuStreamWaitEvent(s.stream, s.event, 0),
        "synchronize an event": lambda s: s.raw.cuEventSynchronize(s.event),
        "query an event": lambda s: s.raw.cuEventQuery(s.event),
        "capture": lambda s: s.capture(),
        "destroy an event": lambda s: s.raw.cuEventDestroy(s.rig.disown(s.event)),
        "destroy a stream": lambda s: s.raw.cuStreamDestroy(s.rig.disown(s.spare)),
        "destroy a pool": lambda s: s.raw.cuMemPoolDestroy(s.rig.disown(s.empty)),
    },
}


@pytest.mark.parametrize("expected", WITHOUT_A_CONTEXT)
def test_without_a_context(scene: Scene, expected: str) -> None:
    def call() -> None:
        assert int(value(scene.raw.cuCtxGetCurrent())) == 0
        found = {name: said(one(scene)) for name, one in WITHOUT_A_CONTEXT[expected].items()}
        assert found == dict.fromkeys(found, expected)

    in_new_thread(call)


def test_pools_of_a_device_that_is_not_there(raw: Any) -> None:
    assert said(raw.cuDeviceGetDefaultMemPool(99)) == "INVALID_DEVICE"
    assert said(raw.cuDeviceGetMemPool(99)) == "INVALID_VALUE"


def test_work_on_a_stream_takes_the_stream_s_context(rig: Rig) -> None:
    raw, stream, pool = rig.raw, rig.stream(), rig.pool()
    pointer = rig.allocate(pool, 64, stream)
    host: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)

    def call() -> None:
        answers = [
            raw.cuMemsetD8Async(pointer, 1, 64, stream),
            raw.cuMemcpyDtoDAsync(pointer, pointer, 64, stream),
            raw.cuMemcpyHtoDAsync(pointer, np.ones(64, np.uint8), 64, stream),
            raw.cuMemcpyDtoHAsync(host, pointer, 64, stream),
            raw.cuMemcpyAsync(pointer, pointer, 64, stream),
            raw.cuStreamSynchronize(stream),
            raw.cuStreamQuery(stream),
        ]
        assert [said(one) for one in answers] == ["SUCCESS"] * 7
        assert said(raw.cuStreamWaitValue32(stream, int(pointer), 0, 0)) == "INVALID_VALUE"

    in_new_thread(call)
    assert host.tolist() == [1] * 64


def test_push_and_pop(rig: Rig) -> None:
    def call() -> None:
        value(rig.raw.cuCtxPushCurrent(rig.context))
        assert int(value(rig.raw.cuCtxGetDevice())) == 0
        assert int(value(rig.raw.cuCtxPopCurrent())) == int(rig.context)
        assert int(value(rig.raw.cuCtxGetCurrent())) == 0

    in_new_thread(call)


def test_the_primary_context_is_one(rig: Rig) -> None:
    assert value(rig.raw.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    again = value(rig.raw.cuDevicePrimaryCtxRetain(0))
    assert int(again) == int(rig.context)
    assert said(rig.raw.cuDevicePrimaryCtxRelease(0)) == "SUCCESS"
    assert value(rig.raw.cuDevicePrimaryCtxGetState(0)) == (0, 1)


# Other tests keep the primary contexts of the process retained, so this counts in a process of its own.
COUNTING = """
def state():
    return value(raw.cuDevicePrimaryCtxGetState(0))
assert state() == (0, 0)
assert said(raw.cuDevicePrimaryCtxRelease(0)) == "INVALID_CONTEXT"
assert said(Rig(raw).create_pool()) == said(raw.cuDeviceGetDefaultMemPool(0)) == "SUCCESS"
assert state() == (0, 0)
for _ in range(2):
    assert said(raw.cuDevicePrimaryCtxRetain(0)) == "SUCCESS" and state() == (0, 1)
for left in (1, 0):
    assert said(raw.cuDevicePrimaryCtxRelease(0)) == "SUCCESS" and state() == (0, left)
"""


def test_the_primary_context_s_count(python: Callable[..., CompletedProcess[str]]) -> None:
    ended = python(PROGRAM + COUNTING)
    assert (ended.returncode, ended.stderr) == (0, "")
