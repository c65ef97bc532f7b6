"""Driver calls in host functions: which are refused, and which are made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from streamalloc.simulator import DeadlockError
from tests.facts.support import PAGE, Rig, said, value

# Calls and their arguments: numbers, or what ``Calls`` has of these names.
MADE = """
    cuInit 0, cuDriverGetVersion, cuGetErrorName code, cuThreadExchangeStreamCaptureMode mode,
    cuMemsetD8Async memory 1 64 stream, cuStreamDestroy new_stream, cuStreamQuery stream, cuStreamSynchronize stream,
    cuStreamWaitEvent stream done 0, cuStreamGetCtx stream, cuStreamGetFlags stream, cuStreamGetPriority stream,
    cuStreamGetId stream, cuStreamIsCapturing stream, cuStreamWriteValue32 stream host 1 0,
    cuStreamWaitValue32 stream host 0 0, cuEventDestroy new_event, cuEventRecord event stream, cuEventQuery done,
    cuEventSynchronize done, cuEventElapsedTime done done, cuGraphLaunch ready stream, cuLaunchHostFunc stream nothing 0
    """
REFUSED = """
    cuDeviceGet 0, cuDeviceGetCount, cuDeviceTotalMem 0, cuDeviceCanAccessPeer 0 0, cuDevicePrimaryCtxGetState 0,
    cuDevicePrimaryCtxRetain 0, cuDevicePrimaryCtxRelease 0, cuCtxGetCurrent, cuCtxGetDevice, cuCtxPushCurrent context,
    cuCtxPopCurrent, cuCtxSetCurrent context, cuCtxSynchronize, cuCtxRecordEvent context event, cuMemGetInfo,
    cuMemAlloc 64, cuMemFree memory, cuMemHostAlloc 64 0, cuMemFreeHost host, cuMemHostRegister host 4096 0,
    cuPointerGetAttribute attribute memory, cuMemGetAddressRange memory, cuMemcpyHtoD memory host 64,
    cuMemcpyAsync memory host 64 stream, cuMemcpyHtoDAsync memory host 64 stream, cuMemsetD8 memory 1 64,
    cuMemAllocAsync 64 stream, cuMemAllocFromPoolAsync 64 pool stream, cuMemFreeAsync pooled stream,
    cuMemPoolDestroy pool, cuMemPoolTrimTo pool 0, cuDeviceGetMemPool 0, cuDeviceSetMemPool 0 pool,
    cuMemRelease physical, cuMemAddressReserve 2097152 0 0 0, cuMemAddressFree reserved 2097152,
    cuMemUnmap reserved 2097152, cuStreamCreate 1, cuStreamCreateWithPriority 1 0, cuEventCreate 0, cuGraphCreate 0,
    cuGraphInstantiate graph 0, cuGraphExecDestroy ready, cuGraphDestroy graph, cuDeviceGraphMemTrim 0
    """


class Calls:
    """Makes calls in host functions, with what they take."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.context = rig, rig.raw, rig.context
        self.own, self.stream = rig.stream(), rig.stream()
        self.code, self.mode = self.raw.CUresult(1), self.raw.CUstreamCaptureMode(0)
        self.attribute, self.nothing = self.raw.CUpointer_attribute(2), self.function(lambda: None)
        self.new_stream, self.new_event = value(self.raw.cuStreamCreate(1)), value(self.raw.cuEventCreate(0))
        self.pool, self.event, self.done = rig.pool(), rig.event(0), rig.event(0)
        value(self.raw.cuEventRecord(self.done, self.stream))
        self.memory, self.host, self.physical = rig.plain(PAGE), int(rig.pinned(4096)), rig.memory()
        self.pooled, self.reserved = rig.allocate(self.pool, PAGE, self.stream), rig.reserve(PAGE)
        rig.begin_capture(self.stream)
        value(self.raw.cuMemsetD8Async(self.memory, 1, 64, self.stream))
        self.graph = value(rig.end_capture(self.stream))
        self.ready = rig.instantiate(self.graph)
        rig.synchronize()

    def function(self, body: Callable[[], object]) -> Any:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: body())
        self.rig.own(function, lambda _: None)  # kept until the end
        return self.raw.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)

    def inside(self, body: Callable[[], str]) -> str:
        """What the body says in a host function."""
        found: list[str] = []
        value(self.raw.cuLaunchHostFunc(self.own, self.function(lambda: found.append(body())), 0))
        value(self.raw.cuStreamSynchronize(self.own))
        self.rig.synchronize()
        return found[0]

    def call(self, name: str, *words: str) -> str:
        arguments = [int(word) if word.isdigit() else getattr(self, word) for word in words]
        return self.inside(lambda: said(getattr(self.raw, name)(*arguments)))


@pytest.fixture
def calls(rig: Rig) -> Calls:
    return Calls(rig)


def test_calls(calls: Calls) -> None:
    for text, expected in ((MADE, "SUCCESS"), (REFUSED, "NOT_PERMITTED")):
        for call in text.split(","):
            assert calls.call(*call.split()) == expected, call
    calls.rig.synchronize()


def test_arguments_of_refused_calls_are_not_looked_at(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuMemFree(12345))) == "NOT_PERMITTED"
    assert calls.inside(lambda: said(calls.raw.cuMemsetD8Async(0, 1, 64, calls.stream))) == "INVALID_VALUE"


def test_its_own_stream_is_not_ready(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuStreamQuery(calls.own))) == "NOT_READY"


@pytest.mark.simulated_only("the real driver waits for ever")
def test_waiting_for_its_own_stream(calls: Calls) -> None:
    def wait() -> str:
        with pytest.raises(DeadlockError, match="own stream"):
            calls.raw.cuStreamSynchronize(calls.own)
        return "refused"

    assert calls.inside(wait) == "refused"


def test_callbacks_and_host_nodes(calls: Calls) -> None:
    raw, found = calls.raw, list[str]()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        lambda *_: found.append(said(raw.cuMemAlloc(64)))
    )
    callback = raw.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    value(raw.cuStreamAddCallback(calls.own, callback, 0, 0))
    value(raw.cuStreamSynchronize(calls.own))
    calls.rig.begin_capture(calls.own)
    value(raw.cuLaunchHostFunc(calls.own, calls.function(lambda: found.append(said(raw.cuMemAlloc(64)))), 0))
    graph = value(calls.rig.end_capture(calls.own))
    ready = calls.rig.own(value(raw.cuGraphInstantiate(graph, 0)), raw.cuGraphExecDestroy)
    value(raw.cuGraphLaunch(ready, calls.own))
    value(raw.cuStreamSynchronize(calls.own))
    assert found == ["NOT_PERMITTED", "NOT_PERMITTED"]
