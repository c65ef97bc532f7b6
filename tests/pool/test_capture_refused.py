"""Pools that no graph allocates from: those made for sharing, and those of host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import interop, observing
from streamalloc.core.session import session_of
from streamalloc.core.stream import as_stream
from streamalloc.driver.bindings import cuda

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


@pytest.fixture
def shareable(device: sa.Device) -> Iterator[sa.MemoryPool]:
    with sa.MemoryPool(device, handle_types=POSIX) as pool:
        yield pool


def _by_a_bridge(pool: sa.MemoryPool, stream: sa.Stream) -> sa.Memory:
    return interop.bridge.Sources([pool]).allocate(64, 0, stream.handle)


def _observed(pool: sa.MemoryPool, stream: sa.Stream) -> sa.Memory:
    with observing.observe(pool):
        return pool.allocate(64, stream)


WAYS: dict[str, Callable[[sa.MemoryPool, sa.Stream], sa.Memory]] = {
    "pool": lambda pool, stream: pool.allocate(64, stream),
    "cache": lambda pool, stream: sa.CachingAllocator(pool).allocate(64, stream),
    "bridge": _by_a_bridge,
    "bridge over a cache": lambda pool, stream: interop.bridge.Sources([sa.CachingAllocator(pool)]).allocate(
        64, 0, stream.handle
    ),
    "observed": _observed,
    "borrowed stream": lambda pool, stream: pool.allocate(64, sa.Stream.of_handle(stream.device, stream.handle, None)),
}


def _refused_in_a_capture(stream: sa.Stream, allocate: Callable[[], object], match: str) -> None:
    """The error says what to do, and the capture goes on."""
    target = sa.MemoryPool(stream.device).allocate(64, stream)
    with stream.capture() as graph:
        with pytest.raises(sa.NotSupportedError, match=match) as caught:
            allocate()
        assert "without handle_types" in str(caught.value) and "before the capture" in str(caught.value)
        target.fill(3)
    assert graph.nodes == ["MEMSET"] and caught.value.code == cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("way", WAYS)
def test_made_for_sharing(shareable: sa.MemoryPool, stream: sa.Stream, way: str) -> None:
    WAYS[way](shareable, stream)
    _refused_in_a_capture(stream, lambda: WAYS[way](shareable, stream), "was made for sharing .*POSIX_FILE_DESCRIPTOR")


def test_current(shareable: sa.MemoryPool, stream: sa.Stream) -> None:
    with shareable.make_current():
        _refused_in_a_capture(stream, lambda: sa.allocate(64, stream), "made for sharing")


def test_of_the_host(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as pool:
        _refused_in_a_capture(stream, lambda: pool.allocate(64, stream), "not in device memory")


def test_captured_by_other_code(machine: Any, shareable: sa.MemoryPool, stream: sa.Stream) -> None:
    raw = cuda.CUstream(stream.handle)

    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, stream.handle)

    theirs = as_stream(Theirs(), session_of(stream))
    assert not machine.cuStreamBeginCapture(raw, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0]
    with pytest.raises(sa.NotSupportedError, match="made for sharing"):
        shareable.allocate(64, theirs)
    result, graph = machine.cuStreamEndCapture(raw)
    assert not result
    machine.cuGraphDestroy(graph)
