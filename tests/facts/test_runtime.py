"""The runtime over the driver: errors, pointers, pitches."""

import ctypes
from typing import Any

import pytest

from streamalloc.driver.bindings import runtime
from streamalloc.simulator.internal import Runtime
from tests.facts.support import Rig

bindings: Any = runtime()
Error, Kind = bindings.cudaError_t, bindings.cudaMemcpyKind


@pytest.fixture
def rt(rig: Rig, on_cuda: bool) -> Any:
    made: Any = bindings if on_cuda else Runtime(rig.raw)
    made.cudaGetLastError()
    return made


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == Error.cudaSuccess, answer
    return answer[1] if len(answer) == 2 else answer[1:]


def last(rt: Any) -> list[Any]:
    """What the last error is, asked for twice."""
    return [rt.cudaGetLastError()[0] for _ in range(2)]


def test_nothing_and_what_is_no_memory(rt: Any) -> None:
    assert ok(rt.cudaMalloc(0)) == 0
    ok(rt.cudaFree(0))
    assert rt.cudaFree(12345)[0] == Error.cudaErrorInvalidValue
    assert last(rt) == [Error.cudaErrorInvalidValue, Error.cudaSuccess]


def test_last_error(rt: Any) -> None:
    assert rt.cudaSetDevice(99)[0] == rt.cudaPeekAtLastError()[0] == Error.cudaErrorInvalidDevice
    assert last(rt) == [Error.cudaErrorInvalidDevice, Error.cudaSuccess]


def test_a_query_leaves_no_last_error(rig: Rig, rt: Any) -> None:
    gate, stream = rig.gate(), rig.stream()
    gate.hold(stream)
    assert rt.cudaStreamQuery(int(stream))[0] == Error.cudaErrorNotReady
    assert last(rt) == [Error.cudaSuccess, Error.cudaSuccess]
    gate.open()


def test_pointers(rt: Any) -> None:
    word = ctypes.c_uint64()
    memory, pinned, other = ok(rt.cudaMalloc(100)), ok(rt.cudaHostAlloc(100, 0)), ctypes.addressof(word)
    kinds = bindings.cudaMemoryType
    for address, kind, device, on_device, on_host in (
        (memory, kinds.cudaMemoryTypeDevice, 0, memory, 0),
        (pinned, kinds.cudaMemoryTypeHost, 0, pinned, pinned),
        (other, kinds.cudaMemoryTypeUnregistered, -2, 0, other),
    ):
        found = ok(rt.cudaPointerGetAttributes(address))
        pointers = int(found.devicePointer), int(found.hostPointer)
        assert (found.type, found.device, pointers) == (kind, device, (on_device, on_host))
    ok(rt.cudaMemcpy(memory, pinned, 10, Kind.cudaMemcpyDeviceToHost))  # the kind is not held against it
    short = rt.cudaMemcpy2D(memory, 5, pinned, 5, 10, 1, Kind.cudaMemcpyHostToDevice)
    assert short[0] == Error.cudaErrorInvalidValue
    rt.cudaGetLastError()
    ok(rt.cudaFree(memory))
    ok(rt.cudaFreeHost(pinned))


def test_pitches(rt: Any) -> None:
    memory, pitch = ok(rt.cudaMallocPitch(100, 3))
    box = ok(rt.cudaMalloc3D(bindings.make_cudaExtent(100, 3, 2)))
    assert pitch == 512 and (box.pitch, box.xsize, box.ysize) == (512, 100, 3)
    ok(rt.cudaFree(memory))
    ok(rt.cudaFree(int(box.ptr)))
