"""Driver calls in host functions: which are refused, and which are made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from streamalloc.simulator import DeadlockError
from tests.facts.support import PAGE, Rig, said, value

MADE = """
    cuInit cuDriverGetVersion cuGetErrorName cuThreadExchangeStreamCaptureMode cuMemsetD8Async cuStreamDestroy
    cuStreamQuery cuStreamSynchronize cuStreamWaitEvent cuStreamGetCtx cuStreamGetFlags cuStreamGetPriority
    cuStreamGetId cuStreamIsCapturing cuStreamWriteValue32 cuStreamWaitValue32 cuEventDestroy cuEventRecord
    cuEventQuery cuEventSynchronize cuEventElapsedTime cuGraphLaunch cuLaunchHostFunc
    """
REFUSED = """
    cuDeviceGet cuDeviceGetCount cuDeviceTotalMem cuDeviceCanAccessPeer cuDevicePrimaryCtxGetState
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuCtxGetCurrent cuCtxGetDevice cuCtxPushCurrent
    cuCtxPopCurrent cuCtxSetCurrent cuCtxSynchronize cuCtxRecordEvent cuMemGetInfo cuMemAlloc cuMemFree
    cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuPointerGetAttribute cuMemGetAddressRange cuMemcpyHtoD
    cuMemcpyAsync cuMemcpyHtoDAsync cuMemsetD8 cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync
    cuMemPoolDestroy cuMemPoolTrimTo cuDeviceGetMemPool cuDeviceSetMemPool cuMemRelease cuMemAddressReserve
    cuMemAddressFree cuMemUnmap cuStreamCreate cuStreamCreateWithPriority cuEventCreate cuGraphCreate
    cuGraphInstantiate cuGraphExecDestroy cuGraphDestroy cuDeviceGraphMemTrim
    """


class Calls:
    """Makes calls in host functions."""

    def __init__(self, rig: Rig) -> None:
        raw = rig.raw
        self.rig, self.raw = rig, raw
        self.stream, self.other = rig.stream(), rig.stream()
        pool, event, done = rig.pool(), rig.event(0), rig.event(0)
        value(raw.cuEventRecord(done, self.other))
        memory, host = rig.plain(PAGE), int(rig.pinned(4096))
        pooled, reserved = rig.allocate(pool, PAGE, self.other), rig.reserve(PAGE)
        rig.begin_capture(self.other)
        value(raw.cuMemsetD8Async(memory, 1, 64, self.other))
        graph = value(rig.end_capture(self.other))
        ready = value(raw.cuGraphInstantiate(graph, 0))
        rig.own(ready, raw.cuGraphExecDestroy)
        rig.synchronize()
        stream = self.other
        self.arguments: dict[str, tuple[Any, ...]] = {
            "cuInit": (0,),
            "cuGetErrorName": (raw.CUresult(1),),
            "cuThreadExchangeStreamCaptureMode": (raw.CUstreamCaptureMode(0),),
            "cuMemsetD8Async": (memory, 1, 64, stream),
            "cuStreamWaitEvent": (stream, done, 0),
            "cuStreamWriteValue32": (stream, host, 1, 0),
            "cuStreamWaitValue32": (stream, host, 0, 0),
            "cuEventRecord": (event, stream),
            "cuEventElapsedTime": (done, done),
            "cuGraphLaunch": (ready, stream),
            "cuDeviceCanAccessPeer": (0, 0),
            "cuCtxPushCurrent": (rig.context,),
            "cuCtxSetCurrent": (rig.context,),
            "cuCtxRecordEvent": (rig.context, event),
            "cuMemAlloc": (64,),
            "cuMemFree": (memory,),
            "cuMemHostAlloc": (64, 0),
            "cuMemFreeHost": (host,),
            "cuMemHostRegister": (host, 4096, 0),
            "cuPointerGetAttribute": (raw.CUpointer_attribute(2), memory),
            "cuMemGetAddressRange": (memory,),
            "cuMemcpyHtoD": (memory, host, 64),
            "cuMemcpyAsync": (memory, host, 64, stream),
            "cuMemcpyHtoDAsync": (memory, host, 64, stream),
            "cuMemsetD8": (memory, 1, 64),
            "cuMemAllocAsync": (64, stream),
            "cuMemAllocFromPoolAsync": (64, pool, stream),
            "cuMemFreeAsync": (pooled, stream),
            "cuMemPoolDestroy": (pool,),
            "cuMemPoolTrimTo": (pool, 0),
            "cuDeviceSetMemPool": (0, pool),
            "cuMemRelease": (rig.memory(),),
            "cuMemAddressReserve": (PAGE, 0, 0, 0),
            "cuMemAddressFree": (reserved, PAGE),
            "cuMemUnmap": (reserved, PAGE),
            "cuStreamCreate": (1,),
            "cuStreamCreateWithPriority": (1, 0),
            "cuEventCreate": (0,),
            "cuGraphCreate": (0,),
            "cuGraphInstantiate": (graph, 0),
            "cuGraphExecDestroy": (ready,),
            "cuGraphDestroy": (graph,),
            "cuLaunchHostFunc": (stream, self.function(lambda: None), 0),
            **dict.fromkeys(("cuDriverGetVersion", "cuDeviceGetCount", "cuMemGetInfo", "cuCtxGetCurrent"), ()),
            **dict.fromkeys(("cuCtxGetDevice", "cuCtxPopCurrent", "cuCtxSynchronize"), ()),
        }
        self.defaults = {"cuDevice": (0,), "cuEvent": (done,), "cuStream": (stream,)}

    def function(self, body: Callable[[], object]) -> Any:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: body())
        self.rig.own(function, lambda _: None)  # kept until the end
        return self.raw.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)

    def inside(self, body: Callable[[], str]) -> str:
        """What the body says in a host function."""
        found: list[str] = []
        value(self.raw.cuLaunchHostFunc(self.stream, self.function(lambda: found.append(body())), 0))
        value(self.raw.cuStreamSynchronize(self.stream))
        self.rig.synchronize()
        return found[0]

    def call(self, name: str) -> str:
        arguments = self.arguments.get(name)
        if arguments is None:
            arguments = next(given for start, given in self.defaults.items() if name.startswith(start))
        if name in ("cuStreamDestroy", "cuEventDestroy"):
            arguments = (value(self.raw.cuStreamCreate(1) if "Stream" in name else self.raw.cuEventCreate(0)),)
        return self.inside(lambda: said(getattr(self.raw, name)(*arguments)))


@pytest.fixture
def calls(rig: Rig) -> Calls:
    return Calls(rig)


def test_calls(calls: Calls) -> None:
    expected = {**dict.fromkeys(MADE.split(), "SUCCESS"), **dict.fromkeys(REFUSED.split(), "NOT_PERMITTED")}
    assert {name: calls.call(name) for name in expected} == expected
    calls.rig.synchronize()


def test_arguments_of_refused_calls_are_not_looked_at(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuMemFree(12345))) == "NOT_PERMITTED"
    assert calls.inside(lambda: said(calls.raw.cuMemsetD8Async(0, 1, 64, calls.other))) == "INVALID_VALUE"


def test_its_own_stream_is_not_ready(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuStreamQuery(calls.stream))) == "NOT_READY"


@pytest.mark.simulated_only("the real driver waits for ever")
def test_waiting_for_its_own_stream(calls: Calls) -> None:
    def wait() -> str:
        with pytest.raises(DeadlockError, match="own stream"):
            calls.raw.cuStreamSynchronize(calls.stream)
        return "refused"

    assert calls.inside(wait) == "refused"


def test_callbacks_and_host_nodes(calls: Calls) -> None:
    raw, found = calls.raw, list[str]()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        lambda *_: found.append(said(raw.cuMemAlloc(64)))
    )
    callback = raw.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    value(raw.cuStreamAddCallback(calls.stream, callback, 0, 0))
    value(raw.cuStreamSynchronize(calls.stream))
    calls.rig.begin_capture(calls.stream)
    value(raw.cuLaunchHostFunc(calls.stream, calls.function(lambda: found.append(said(raw.cuMemAlloc(64)))), 0))
    graph = value(calls.rig.end_capture(calls.stream))
    ready = calls.rig.own(value(raw.cuGraphInstantiate(graph, 0)), raw.cuGraphExecDestroy)
    value(raw.cuGraphLaunch(ready, calls.stream))
    value(raw.cuStreamSynchronize(calls.stream))
    assert found == ["NOT_PERMITTED", "NOT_PERMITTED"]
