"""Calls that need a current context, and the count of the primary context."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import LEGACY
from tests.facts.support import Rig, in_new_thread, said, value


def test_no_context_is_current_in_a_new_thread(raw: Any) -> None:
    def call() -> None:
        assert int(value(raw.cuCtxGetCurrent())) == 0

    in_new_thread(call)


NEEDS_A_CONTEXT = {
    "cuCtxGetDevice": (),
    "cuCtxSynchronize": (),
    "cuMemAlloc": (1,),
    "cuStreamCreate": (1,),
    "cuEventCreate": (0,),
    "cuMemGetInfo": (),
    "cuMemHostAlloc": (64, 0),
    "cuCtxPopCurrent": (),
}


@pytest.mark.parametrize("name", NEEDS_A_CONTEXT)
def test_call_that_needs_a_context(raw: Any, name: str) -> None:
    def call() -> None:
        assert said(getattr(raw, name)(*NEEDS_A_CONTEXT[name])) == "INVALID_CONTEXT"

    in_new_thread(call)


@pytest.mark.parametrize("stream", [0, 2], ids=["legacy", "per-thread"])
def test_allocation_on_a_default_stream_needs_a_context(raw: Any, stream: int) -> None:
    def call() -> None:
        assert said(raw.cuMemAllocAsync(64, raw.CUstream(stream))) == "INVALID_CONTEXT"

    in_new_thread(call)


def test_free_of_nothing_on_the_legacy_stream_needs_a_context(raw: Any) -> None:
    def call() -> None:
        assert said(raw.cuMemFreeAsync(0, LEGACY)) == "INVALID_CONTEXT"

    in_new_thread(call)


def test_record_on_the_legacy_stream_needs_a_context(rig: Rig) -> None:
    event = rig.event()

    def call() -> None:
        assert said(rig.raw.cuEventRecord(event, LEGACY)) == "INVALID_CONTEXT"

    in_new_thread(call)


def test_pools_need_no_context(rig: Rig) -> None:
    def call() -> None:
        pool = value(rig.raw.cuMemPoolCreate(rig.pool_props()))
        assert said(rig.raw.cuMemPoolDestroy(pool)) == "SUCCESS"
        assert int(value(rig.raw.cuDeviceGetDefaultMemPool(0))) != 0

    in_new_thread(call)


def test_pools_of_a_device_that_is_not_there(raw: Any) -> None:
    assert said(raw.cuDeviceGetDefaultMemPool(99)) == "INVALID_DEVICE"
    assert said(raw.cuDeviceGetMemPool(99)) == "INVALID_VALUE"


def test_allocation_on_a_stream_takes_the_stream_s_context(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool()

    def call() -> None:
        rig.allocate(pool, 64, stream)
        pointer = value(rig.keep(rig.raw.cuMemAllocAsync(64, stream)))
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"

    in_new_thread(call)


def test_work_on_a_stream_takes_the_stream_s_context(rig: Rig) -> None:
    raw, stream, pool = rig.raw, rig.stream(), rig.pool()
    pointer = rig.allocate(pool, 64, stream)
    host: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)

    def call() -> None:
        assert said(raw.cuMemsetD8Async(pointer, 1, 64, stream)) == "SUCCESS"
        assert said(raw.cuMemcpyDtoDAsync(pointer, pointer, 64, stream)) == "SUCCESS"
        assert said(raw.cuMemcpyHtoDAsync(pointer, np.ones(64, np.uint8), 64, stream)) == "SUCCESS"
        assert said(raw.cuMemcpyDtoHAsync(host, pointer, 64, stream)) == "SUCCESS"
        assert said(raw.cuMemcpyAsync(pointer, pointer, 64, stream)) == "SUCCESS"
        assert said(raw.cuStreamSynchronize(stream)) == "SUCCESS"
        assert said(raw.cuStreamQuery(stream)) == "SUCCESS"
        assert said(raw.cuStreamWaitValue32(stream, int(pointer), 0, 0)) == "INVALID_VALUE"

    in_new_thread(call)
    assert host.tolist() == [1] * 64


def test_events_on_a_stream_take_the_stream_s_context(rig: Rig) -> None:
    raw, stream, event = rig.raw, rig.stream(), rig.event()

    def call() -> None:
        assert said(raw.cuEventRecord(event, stream)) == "SUCCESS"
        assert said(raw.cuStreamWaitEvent(stream, event, 0)) == "SUCCESS"
        assert said(raw.cuEventSynchronize(event)) == "SUCCESS"
        assert said(raw.cuEventQuery(event)) == "SUCCESS"

    in_new_thread(call)


def test_capture_takes_the_stream_s_context(rig: Rig) -> None:
    stream = rig.stream()

    def call() -> None:
        rig.begin_capture(stream, mode=2)
        assert said(rig.end_capture(stream)) == "SUCCESS"

    in_new_thread(call)


def test_streams_events_and_pools_are_destroyed_without_a_context(rig: Rig) -> None:
    raw = rig.raw
    stream, event, pool = rig.disown(rig.stream()), rig.disown(rig.event()), rig.disown(rig.pool())

    def call() -> None:
        assert said(raw.cuEventDestroy(event)) == "SUCCESS"
        assert said(raw.cuStreamDestroy(stream)) == "SUCCESS"
        assert said(raw.cuMemPoolDestroy(pool)) == "SUCCESS"

    in_new_thread(call)


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


# Other tests keep the primary contexts of the process retained, so these count in a process of their own.
COUNTING = {
    "retaining_nothing_leaves_it_inactive": """
assert d.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
assert d.cuDevicePrimaryCtxRelease(0)[0].name == "CUDA_ERROR_INVALID_CONTEXT"
""",
    "a_pool_does_not_make_it": """
props = d.CUmemPoolProps()
props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
location = d.CUmemLocation()
location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
props.location = location
assert d.cuMemPoolCreate(props)[0] == 0 and d.cuDeviceGetDefaultMemPool(0)[0] == 0
assert d.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
""",
    "it_ends_with_its_last_release": """
for active in (1, 1):
    assert d.cuDevicePrimaryCtxRetain(0)[0] == 0 and d.cuDevicePrimaryCtxGetState(0)[1:] == (0, active)
for active in (1, 0):
    assert d.cuDevicePrimaryCtxRelease(0)[0] == 0 and d.cuDevicePrimaryCtxGetState(0)[1:] == (0, active)
""",
}


@pytest.mark.parametrize("name", COUNTING)
def test_the_primary_context_s_count(name: str, python: Callable[..., CompletedProcess[str]]) -> None:
    begin = "from streamalloc.driver import default; d = default(); assert d.cuInit(0)[0] == 0\n"
    ended = python(begin + COUNTING[name])
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_device_pointer_of_an_address_is_asked_under_a_context(rig: Rig) -> None:
    stream = rig.stream()
    pointer = int(rig.allocate(rig.pool(), 64, stream))
    asked = rig.raw.CUpointer_attribute

    def call() -> None:
        answer = rig.raw.cuPointerGetAttribute(asked.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer)
        assert said(answer) == "INVALID_CONTEXT"
        assert int(value(rig.raw.cuPointerGetAttribute(asked.CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer))) == 64

    in_new_thread(call)


def test_a_graph_is_instantiated_under_a_context(rig: Rig) -> None:
    stream = rig.stream()
    rig.begin_capture(stream)
    graph = value(rig.end_capture(stream))

    def call() -> None:
        assert said(rig.raw.cuGraphInstantiate(graph, 0)) == "INVALID_CONTEXT"

    in_new_thread(call)
