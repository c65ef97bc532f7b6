"""Copies, fills and kernels: work that reads and writes memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.rules.kinds import Answer, Arguments, Rule
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import State, Touch, number_of

__all__ = ["AFTER", "BEFORE", "plane", "rows"]

_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_ROWS = 1024


def _touches(stream_at: int | None, touched: Callable[[Arguments], Iterable[Touch]], waits: bool = False) -> Rule:
    """A call that queues reads and writes; with ``waits`` the host waits for them."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched(args), here())
        if waits:
            state.host_knows(stream)

    return rule


def _fills(stream_at: int | None, width: int) -> Rule:
    """A fill. What streams may wait for, as small as a word, is known from then on."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        handle, address, nbytes = 0 if stream_at is None else args[stream_at], number_of(args[0]), int(args[2]) * width
        state.act(handle, name, ((address, nbytes, True),), here())
        if 4 <= nbytes <= 64 and not state.captures:
            word = int.from_bytes(int(args[1]).to_bytes(width, "little") * (4 // width), "little")
            for at in range(address, address + nbytes - 3, 4):
                state.words.write(state.stream(handle), at, word)

    return rule


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1, waits: bool = False) -> Rule:
    """A copy; the host waits for one to ordinary memory of its own."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        size = int(args[size_at])
        touched = ((args[source_at], size, False), (args[0], size, True))
        stream = state.act(0 if stream_at is None else args[stream_at], name, touched, here())
        if waits or (stream_at is not None and size and _is_pageable(state, args[0]) and stream not in state.captures):
            state.host_knows(stream)

    return rule


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
    if height > _ROWS:
        return [(start, pitch * (height - 1) + width, write)]
    return [(start + row * pitch, width, write) for row in range(height)]


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


def _fill_rows(width: int) -> Callable[[Arguments], list[Touch]]:
    return lambda args: rows(number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)


def _copies_plane(stream_at: int) -> Rule:
    """A copy of a plane in stream order; the host waits for one to ordinary memory of its own."""

    def rule(state: State, name: str, args: Arguments, answer: Answer) -> None:
        copy = args[0]
        stream = state.act(args[stream_at], name, plane(copy), here())
        to_host = "HOST" in getattr(copy.dstMemoryType, "name", "")
        if to_host and _is_pageable(state, copy.dstHost) and stream not in state.captures:
            state.host_knows(stream)

    return rule


def _plane_of_first(args: Arguments) -> list[Touch]:
    return plane(args[0])


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
    "cuMemsetD2D8": _touches(None, _fill_rows(1)),
    "cuMemsetD2D16": _touches(None, _fill_rows(2)),
    "cuMemsetD2D32": _touches(None, _fill_rows(4)),
    "cuMemsetD2D8Async": _touches(5, _fill_rows(1)),
    "cuMemsetD2D16Async": _touches(5, _fill_rows(2)),
    "cuMemsetD2D32Async": _touches(5, _fill_rows(4)),
    "cuMemcpy": _copies(None, waits=True),
    "cuMemcpyDtoH": _copies(None, waits=True),
    "cuMemcpyHtoD": _copies(None, waits=True),
    "cuMemcpyDtoD": _copies(None),
    "cuMemcpyPeer": _copies(None, size_at=4, source_at=2),
    "cuMemcpyAsync": _copies(3),
    "cuMemcpyDtoHAsync": _copies(3),
    "cuMemcpyHtoDAsync": _copies(3),
    "cuMemcpyDtoDAsync": _copies(3),
    "cuMemcpyWithAttributesAsync": _copies(-1),
    "cuMemcpyPeerAsync": _copies(5, size_at=4, source_at=2),
    "cuMemcpy2D": _touches(None, _plane_of_first, waits=True),
    "cuMemcpy2DUnaligned": _touches(None, _plane_of_first, waits=True),
    "cuMemcpy2DAsync": _copies_plane(1),
    "cuMemcpy3D": _touches(None, _plane_of_first, waits=True),
    "cuMemcpy3DAsync": _copies_plane(1),
    "cuMemcpy3DPeer": _touches(None, _plane_of_first),
    "cuMemcpy3DPeerAsync": _touches(1, _plane_of_first),
    "cuMemcpyBatchAsync": _touches(-1, _batch),
    "cuLaunchKernel": _work(8),
    "cuLaunchCooperativeKernel": _work(8),
    "cuLaunchKernelEx": _launches_with_config,
    "cuStreamAddCallback": _work(0),
    "cuStreamAttachMemAsync": _work(0),
    "cuMemMapArrayAsync": _work(2),
    "cuMemPrefetchAsync": _work(-1),
    "cuMemPrefetchBatchAsync": _work(-1),
    "cuMemcpy3DBatchAsync": _work(-1),
    "cuGraphUpload": _work(1),
}
BEFORE: dict[str, Any] = {}
