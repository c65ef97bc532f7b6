"""Copies, fills and kernels: work that reads and writes memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.clocks import Stream
from streamalloc.driver.checker.rules.rule import Answer, Arguments, Asked, Finish, Rule
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import State, Touch, number_of

__all__ = ["AFTER", "BEFORE", "plane", "rows"]

_MEMORY_TYPE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_AT_CALL = 2  # CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, which older bindings lack
_ROWS = 1 << 15
"""Of a plane with more rows, only so many are looked at."""


@dataclass(frozen=True)
class _Work:
    """A call that reads and writes memory in a stream."""

    stream_at: int | None
    """The argument with the stream; None: the legacy stream, and the call is not in stream order."""
    touched: Callable[[State, Arguments], Iterable[Touch]]
    then: Callable[[State, Stream, Arguments], object] = lambda state, stream, args: None
    """Called when the work was queued."""
    taken: Callable[[State, Arguments], Iterable[Touch]] = lambda state, args: ()
    """What is read before the call returns, in no stream order."""

    def __call__(self, state: State, name: str, args: Arguments, answer: Answer) -> None:
        """The call has succeeded."""
        handle = 0 if self.stream_at is None else args[self.stream_at]
        for address, nbytes, write in self.taken(state, args):
            state.use_on_host(number_of(address), nbytes, write, name)
        self.then(state, state.act(handle, name, self.touched(state, args), here()), args)

    def before(self, state: State, name: str, args: Arguments) -> Finish:
        """The call is about to be made, perhaps on memory that is not there any more."""
        handle = 0 if self.stream_at is None else args[self.stream_at]
        return state.stale(handle, name, self.touched(state, args), here())


def _touches(stream_at: int | None, touched: Callable[[Arguments], Iterable[Touch]]) -> _Work:
    """A call that queues reads and writes."""
    return _Work(stream_at, lambda state, args: touched(args))


def _fills(stream_at: int | None, width: int) -> _Work:
    """A fill. What streams may wait for, as small as a word, is known from then on."""

    def then(state: State, stream: Stream, args: Arguments) -> None:
        address, nbytes = number_of(args[0]), int(args[2]) * width
        if stream_at is None:
            _fill_returns_late(state, stream, address)
        if 4 <= nbytes <= 64 and not state.captures:
            word = int.from_bytes(int(args[1]).to_bytes(width, "little") * (4 // width), "little")
            for at in range(address, address + nbytes - 3, 4):
                state.values.write(stream, at, word)

    return _Work(stream_at, lambda state, args: ((args[0], int(args[2]) * width, True),), then)


def _fill_returns_late(state: State, stream: Stream, address: int) -> None:
    """The host waits for a fill that is not in stream order where the memory is the host's, or managed."""
    if state.is_of_host(address) or state.is_managed(address):
        state.host_waited_for(stream)


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1) -> _Work:
    """A copy.

    The host waits for one that is not in stream order and has a side of the host's, and for one to ordinary memory.
    """

    def touched(state: State, args: Arguments) -> list[Touch]:
        size, source, target = int(args[size_at]), args[source_at], args[0]
        found = [(source, size, False), (target, size, True)]
        return found[1:] if number_of(source) == number_of(target) else found

    def then(state: State, stream: Stream, args: Arguments) -> None:
        if stream_at is None:
            _returns_late(state, stream, args[source_at], args[0])
        elif int(args[size_at]) and stream not in state.captures and _is_pageable(state, args[0]):
            state.host_waited_for(stream)

    return _Work(stream_at, touched, then)


def _returns_late(state: State, stream: Stream, *sides: Any) -> None:
    """A copy that is not in stream order was made: the host has waited for it, unless both sides are of devices."""
    if any(_is_pageable(state, one) or state.is_of_host(number_of(one)) for one in sides):
        state.host_waited_for(stream)


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


def plane(state: State, copy: Any) -> list[Touch]:
    """Both sides of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``."""
    depth, width, height = int(getattr(copy, "Depth", 1) or 1), int(copy.WidthInBytes), int(copy.Height)
    found: list[Touch] = []
    for side, write in (("src", False), ("dst", True)):
        kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
        x, y, z = (int(getattr(copy, f"{side}{name}", 0)) for name in ("XInBytes", "Y", "Z"))
        # Zero stands for what just holds the rows, those that are left out included.
        pitch = int(getattr(copy, f"{side}Pitch", 0)) or x + width
        lines = int(getattr(copy, f"{side}Height", 0)) or y + height
        if "ARRAY" in kind:
            array = state.arrays.get(number_of(getattr(copy, f"{side}Array")))
            if array is None:
                continue
            start, pitch, lines = array.base, array.pitch, array.lines
        else:
            start = number_of(getattr(copy, f"{side}Host" if "HOST" in kind else f"{side}Device"))
        found += _box(start + x + y * pitch + z * pitch * lines, pitch, lines, width, height, depth, write)
    return found


def _box(start: int, pitch: int, lines: int, width: int, height: int, depth: int, write: bool) -> list[Touch]:
    """Rows of several planes, each of ``lines`` rows."""
    if lines == height:
        return rows(start, pitch, width, height * depth, write)
    step = pitch * lines
    return [row for at in range(depth) for row in rows(start + at * step, pitch, width, height, write)]


def _boxes(state: State, operations: Iterable[Any], at_call: bool) -> list[Touch]:
    """Both sides of ``CUDA_MEMCPY3D_BATCH_OP``, for each; ``at_call``: the sources read before the call returns."""
    found: list[Touch] = []
    for one in operations:
        width, height, depth = (int(getattr(one.extent, name)) for name in ("width", "height", "depth"))
        early = _order(one) == _AT_CALL
        for side, write in ((one.src, False), (one.dst, True)):
            if (early and not write) is not at_call:
                continue
            if "ARRAY" in getattr(side.type, "name", ""):
                array, at = state.arrays.get(number_of(side.op.array.array)), side.op.array.offset
                if array is None:
                    continue
                # Extents and offsets of arrays count elements.
                pitch, lines, element = array.pitch, array.lines, array.element
                start = array.base + int(at.x) * element + int(at.y) * pitch + int(at.z) * pitch * lines
                found += _box(start, pitch, lines, width * element, height, depth, write)
            else:
                there = side.op.ptr
                pitch, lines = int(there.rowLength) or width, int(there.layerHeight) or height
                found += _box(number_of(there.ptr), pitch, lines, width, height, depth, write)
    return found


def _of_array(state: State, array: Any, offset: Any, size: Any, write: bool) -> list[Touch]:
    found = state.arrays.get(number_of(array))
    return [] if found is None else [(found.base + int(offset), int(size), write)]


def _arrays(stream_at: int | None, target: int, source: int, array_to: bool, array_from: bool) -> _Work:
    """A copy of a row from or to an array; the arguments of each side, of which an array has two."""

    def touched(state: State, args: Arguments) -> list[Touch]:
        size = args[source + 1 + array_from]
        sides = ((source, array_from, False), (target, array_to, True))
        return [
            touch
            for at, is_array, write in sides
            for touch in (
                _of_array(state, args[at], args[at + 1], size, write) if is_array else [(args[at], int(size), write)]
            )
        ]

    def then(state: State, stream: Stream, args: Arguments) -> None:
        sides = [args[at] for at, is_array in ((source, array_from), (target, array_to)) if not is_array]
        if stream_at is None:
            _returns_late(state, stream, *sides)
        elif not array_to and stream not in state.captures and _is_pageable(state, args[target]):
            state.host_waited_for(stream)

    return _Work(stream_at, touched, then)


def _order(one: Any) -> int:
    """When the source of a copy of a batch is read."""
    with contextlib.suppress(ValueError):  # the bindings' getter, of a number that is none
        return int(getattr(one, "srcAccessOrder", 0) or 0)
    return 0


def _batch(at_call: bool) -> Callable[[State, Arguments], list[Touch]]:
    """What a batch of copies uses in stream order, or what it reads before the call returns."""

    def touched(state: State, args: Arguments) -> list[Touch]:
        targets, sources, sizes, _, attributes, begins = args[:6]
        # Each of the attributes holds from where it begins.
        orders = dict(zip(map(int, begins or ()), map(_order, attributes or ()), strict=False))
        found, order = [], 0
        for at, (target, source, size) in enumerate(zip(targets, sources, sizes, strict=False)):
            order = orders.get(at, order)
            if (order == _AT_CALL) is at_call:
                found.append((source, int(size), False))
            if not at_call:
                found.append((target, int(size), True))
        return found

    return touched


def _one(at_call: bool) -> Callable[[State, Arguments], list[Touch]]:
    """The same of ``cuMemcpyWithAttributesAsync``."""
    return lambda state, args: _batch(at_call)(state, ((args[0],), (args[1],), (args[2],), 1, (args[3],), (0,)))


def _boxes_of(
    operations: Callable[[Arguments], Iterable[Any]], at_call: bool
) -> Callable[[State, Arguments], list[Touch]]:
    return lambda state, args: _boxes(state, operations(args), at_call)


def _copies_boxes(operations: Callable[[Arguments], Iterable[Any]]) -> _Work:
    return _Work(-1, _boxes_of(operations, False), taken=_boxes_of(operations, True))


def _discarded(args: Arguments) -> list[Touch]:
    """What was there is lost, as if it was written."""
    return [(at, int(size), True) for at, size in zip(args[0], args[1], strict=False)]


def _fills_rows(stream_at: int | None, width: int) -> _Work:
    def touched(state: State, args: Arguments) -> list[Touch]:
        return rows(number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)

    def then(state: State, stream: Stream, args: Arguments) -> None:
        if stream_at is None:
            _fill_returns_late(state, stream, number_of(args[0]))

    return _Work(stream_at, touched, then)


def _sides(copy: Any) -> list[Any]:
    """Where a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D`` reads and writes; arrays are the device's."""
    kinds = [(side, getattr(getattr(copy, f"{side}MemoryType"), "name", "")) for side in ("src", "dst")]
    named = [side + ("Host" if "HOST" in kind else "Device") for side, kind in kinds if "ARRAY" not in kind]
    return [getattr(copy, name) for name in named]


def _copies_plane(stream_at: int | None) -> _Work:
    """A copy of a plane; the host waits as for other copies."""

    def then(state: State, stream: Stream, args: Arguments) -> None:
        copy = args[0]
        to_host = "HOST" in getattr(copy.dstMemoryType, "name", "")
        if stream_at is None:
            _returns_late(state, stream, *_sides(copy))
        elif to_host and stream not in state.captures and _is_pageable(state, copy.dstHost):
            state.host_waited_for(stream)

    return _Work(stream_at, lambda state, args: plane(state, args[0]), then)


def _launches(stream_at: int) -> _Work:
    """A kernel, of which only the stream is known."""

    def then(state: State, stream: Stream, args: Arguments) -> None:
        state.unseen_kernels = True

    return _Work(stream_at, lambda state, args: (), then)


def _work(stream_at: int) -> _Work:
    """Work of which only the stream is known."""
    return _touches(stream_at, lambda args: ())


def _launches_with_config(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.act(args[0].hStream, name, (), here())
    state.unseen_kernels = True


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
    "cuMemcpyWithAttributesAsync": _Work(-1, _one(False), _copies(-1).then, _one(True)),
    "cuMemcpyPeerAsync": _copies(5, size_at=4, source_at=2),
    "cuMemcpy2D": _copies_plane(None),
    "cuMemcpy2DUnaligned": _copies_plane(None),
    "cuMemcpy2DAsync": _copies_plane(1),
    "cuMemcpy3D": _copies_plane(None),
    "cuMemcpy3DAsync": _copies_plane(1),
    "cuMemcpy3DPeer": _copies_plane(None),
    "cuMemcpy3DPeerAsync": _copies_plane(1),
    "cuMemcpyBatchAsync": _Work(-1, _batch(False), taken=_batch(True)),
    "cuLaunchKernel": _launches(8),
    "cuLaunchCooperativeKernel": _launches(8),
    "cuLaunchKernelEx": _launches_with_config,
    "cuMemcpyAtoD": _arrays(None, 0, 1, False, True),
    "cuMemcpyDtoA": _arrays(None, 0, 2, True, False),
    "cuMemcpyAtoH": _arrays(None, 0, 1, False, True),
    "cuMemcpyHtoA": _arrays(None, 0, 2, True, False),
    "cuMemcpyAtoA": _arrays(None, 0, 2, True, True),
    "cuMemcpyAtoHAsync": _arrays(4, 0, 1, False, True),
    "cuMemcpyHtoAAsync": _arrays(4, 0, 2, True, False),
    "cuMemDiscardBatchAsync": _touches(-1, _discarded),
    "cuMemDiscardAndPrefetchBatchAsync": _touches(-1, _discarded),
    "cuLaunchGridAsync": _launches(3),
    "cuStreamAttachMemAsync": _work(0),
    "cuMemMapArrayAsync": _work(2),
    "cuMemPrefetchAsync": _work(-1),
    "cuMemPrefetchBatchAsync": _work(-1),
    "cuMemcpy3DBatchAsync": _copies_boxes(lambda args: list(args[1])[: int(args[0])]),
    "cuMemcpy3DWithAttributesAsync": _copies_boxes(lambda args: (args[0],)),
    "cuMemBatchDecompressAsync": _launches(-1),
    "cuSignalExternalSemaphoresAsync": _work(-1),
    "cuGraphUpload": _work(1),
}
BEFORE: dict[str, Asked] = {name: rule.before for name, rule in AFTER.items() if isinstance(rule, _Work)}
