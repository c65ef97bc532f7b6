"""Copies, fills and kernels: work that reads and writes memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.clocks import Stream
from streamalloc.driver.checker.rules.kinds import Answer, Arguments, Rule
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import State, Touch, number_of

__all__ = ["AFTER", "BEFORE", "plane", "rows"]

_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_ROWS = 1 << 15
"""Of a plane with more rows, only so many are looked at."""


def _touches(stream_at: int | None, touched: Callable[[Arguments], Iterable[Touch]]) -> Rule:
    """A call that queues reads and writes."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        state.act(0 if stream_at is None else args[stream_at], name, touched(args), here())

    return rule


def _fills(stream_at: int | None, width: int) -> Rule:
    """A fill. What streams may wait for, as small as a word, is known from then on."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        handle, address, nbytes = 0 if stream_at is None else args[stream_at], number_of(args[0]), int(args[2]) * width
        stream = state.act(handle, name, ((address, nbytes, True),), here())
        if stream_at is None:
            _fill_returns_late(state, stream, address)
        if 4 <= nbytes <= 64 and not state.captures:
            word = int.from_bytes(int(args[1]).to_bytes(width, "little") * (4 // width), "little")
            for at in range(address, address + nbytes - 3, 4):
                state.words.write(state.stream(handle), at, word)

    return rule


def _fill_returns_late(state: State, stream: Stream, address: int) -> None:
    """The host waits for a fill that is not in stream order where the memory is the host's, or managed."""
    if state.is_of_host(address) or state.is_managed(address):
        state.host_knows(stream)


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1) -> Rule:
    """A copy.

    The host waits for one that is not in stream order and has a side of the host's, and for one to ordinary memory.
    """

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        size, source, target = int(args[size_at]), args[source_at], args[0]
        touched = [(source, size, False), (target, size, True)]
        if number_of(source) == number_of(target):
            del touched[0]
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched, here())
        if stream_at is None:
            _returns_late(state, stream, source, target)
        elif size and _is_pageable(state, target) and stream not in state.captures:
            state.host_knows(stream)

    return rule


def _returns_late(state: State, stream: Stream, *sides: Any) -> None:
    """A copy that is not in stream order was made: the host has waited for it, unless both sides are of devices."""
    if any(_is_pageable(state, one) or state.is_of_host(number_of(one)) for one in sides):
        state.host_knows(stream)


def _is_pageable(state: State, address: Any) -> bool:
    """Whether the driver does not know some memory, which it then copies to before the call returns."""
    number = number_of(address)
    if state.addresses.find(number) is not None:
        return False
    ask = getattr(state.driver, "cuPointerGetAttribute", None)
    return ask is None or bool(ask(_MEMORY_TYPE, number)[0])


def rows(start: int, pitch: int, width: int, height: int, write: bool) -> list[Touch]:
    """The rows of a plane, in as few pieces as they are."""
    if pitch in (0, width) or height <= 1:
        return [(start, width * height, write)]
    return [(start + row * pitch, width, write) for row in range(min(height, _ROWS))]


def plane(copy: Any) -> list[Touch]:
    """Both sides of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``, where they are no arrays."""
    depth, width, height = int(getattr(copy, "Depth", 1) or 1), int(copy.WidthInBytes), int(copy.Height)
    found: list[Touch] = []
    for side, write in (("src", False), ("dst", True)):
        kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
        if "ARRAY" in kind:
            continue
        x, y, z = (int(getattr(copy, f"{side}{name}", 0)) for name in ("XInBytes", "Y", "Z"))
        # Zero stands for what just holds the rows, those that are left out included.
        pitch = int(getattr(copy, f"{side}Pitch")) or x + width
        slice_ = pitch * (int(getattr(copy, f"{side}Height", 0)) or y + height)
        start = number_of(getattr(copy, f"{side}Host" if "HOST" in kind else f"{side}Device"))
        start += x + y * pitch + z * slice_
        if slice_ == pitch * height:
            found += rows(start, pitch, width, height * depth, write)
        else:
            for at in range(depth):
                found += rows(start + at * slice_, pitch, width, height, write)
    return found


def _batch(args: Arguments) -> list[Touch]:
    targets, sources, sizes = args[:3]
    return [
        touch
        for target, source, size in zip(targets, sources, sizes, strict=False)
        for touch in ((source, int(size), False), (target, int(size), True))
    ]


def _discarded(args: Arguments) -> list[Touch]:
    """What was there is lost, as if it was written."""
    return [(at, int(size), True) for at, size in zip(args[0], args[1], strict=False)]


def _fills_rows(stream_at: int | None, width: int) -> Rule:
    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        touched = rows(number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched, here())
        if stream_at is None:
            _fill_returns_late(state, stream, number_of(args[0]))

    return rule


def _sides(copy: Any) -> list[Any]:
    """Where a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D`` reads and writes; arrays are the device's."""
    kinds = [(side, getattr(getattr(copy, f"{side}MemoryType"), "name", "")) for side in ("src", "dst")]
    named = [side + ("Host" if "HOST" in kind else "Device") for side, kind in kinds if "ARRAY" not in kind]
    return [getattr(copy, name) for name in named]


def _copies_plane(stream_at: int | None) -> Rule:
    """A copy of a plane; the host waits as for other copies."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        copy = args[0]
        stream = state.act(0 if stream_at is None else args[stream_at], name, plane(copy), here())
        to_host = "HOST" in getattr(copy.dstMemoryType, "name", "")
        if stream_at is None:
            _returns_late(state, stream, *_sides(copy))
        elif to_host and _is_pageable(state, copy.dstHost) and stream not in state.captures:
            state.host_knows(stream)

    return rule


def _work(stream_at: int) -> Rule:
    """Work of which only the stream is known."""
    return _touches(stream_at, lambda args: ())


def _launches_with_config(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.act(args[0].hStream, name, (), here())


AFTER: dict[str, Rule] = {
    "cuMemsetD8": _fills(None, 1),
    "cuMemsetD16": _fills(None, 2),
    "cuMemsetD32": _fills(None, 4),
    "cuMemsetD8Async": _fills(3, 1),
    "cuMemsetD16Async": _fills(3, 2),
    "cuMemsetD32Async": _fills(3, 4),
    "cuMemsetD2D8": _fills_rows(None, 1),
    "cuMemsetD2D16": _fills_rows(None, 2),
    "cuMemsetD2D32": _fills_rows(None, 4),
    "cuMemsetD2D8Async": _fills_rows(5, 1),
    "cuMemsetD2D16Async": _fills_rows(5, 2),
    "cuMemsetD2D32Async": _fills_rows(5, 4),
    "cuMemcpy": _copies(None),
    "cuMemcpyDtoH": _copies(None),
    "cuMemcpyHtoD": _copies(None),
    "cuMemcpyDtoD": _copies(None),
    "cuMemcpyPeer": _copies(None, size_at=4, source_at=2),
    "cuMemcpyAsync": _copies(3),
    "cuMemcpyDtoHAsync": _copies(3),
    "cuMemcpyHtoDAsync": _copies(3),
    "cuMemcpyDtoDAsync": _copies(3),
    "cuMemcpyWithAttributesAsync": _copies(-1),
    "cuMemcpyPeerAsync": _copies(5, size_at=4, source_at=2),
    "cuMemcpy2D": _copies_plane(None),
    "cuMemcpy2DUnaligned": _copies_plane(None),
    "cuMemcpy2DAsync": _copies_plane(1),
    "cuMemcpy3D": _copies_plane(None),
    "cuMemcpy3DAsync": _copies_plane(1),
    "cuMemcpy3DPeer": _copies_plane(None),
    "cuMemcpy3DPeerAsync": _copies_plane(1),
    "cuMemcpyBatchAsync": _touches(-1, _batch),
    "cuLaunchKernel": _work(8),
    "cuLaunchCooperativeKernel": _work(8),
    "cuLaunchKernelEx": _launches_with_config,
    "cuMemcpyAtoD": _touches(None, lambda args: ((args[0], int(args[3]), True),)),
    "cuMemcpyDtoA": _touches(None, lambda args: ((args[2], int(args[3]), False),)),
    "cuMemDiscardBatchAsync": _touches(-1, _discarded),
    "cuMemDiscardAndPrefetchBatchAsync": _touches(-1, _discarded),
    "cuLaunchGridAsync": _work(3),
    "cuStreamAttachMemAsync": _work(0),
    "cuMemMapArrayAsync": _work(2),
    "cuMemPrefetchAsync": _work(-1),
    "cuMemPrefetchBatchAsync": _work(-1),
    "cuMemcpy3DBatchAsync": _work(-1),
    "cuMemcpy3DWithAttributesAsync": _work(-1),
    "cuMemBatchDecompressAsync": _work(-1),
    "cuSignalExternalSemaphoresAsync": _work(-1),
    "cuGraphUpload": _work(1),
}
BEFORE: dict[str, Any] = {}
