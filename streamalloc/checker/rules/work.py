"""Copies, fills and kernels: work that reads and writes memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamalloc.checker import uses
from streamalloc.checker.capture import TrackedNode
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.state import State, TrackedArray
from streamalloc.checker.uses import Answer, Arguments, Finish, Touch, nothing, rules
from streamalloc.driver.bindings import number_of

# CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL and _ANY, which older bindings lack. With _ANY a copy may read its source
# during the call or later.
_AT_CALL, _ANY = 2, 3
_ROWS = 1 << 15
"""Most rows of a plane that are checked."""


@dataclass(frozen=True)
class _Work:
    """Rule for a call that uses memory in a stream."""

    stream_at: int | None
    """Index of the stream argument; None for synchronous calls, which use the legacy stream."""
    touched: Callable[[State, Arguments], Iterable[Touch]] = lambda state, args: ()
    """Returns the known reads and writes in stream order."""
    sides: Callable[[Arguments], tuple[Any, ...]] = lambda args: ()
    """Returns target and source of a copy, or target of a fill; None for arrays. The host may wait for such work."""
    then: Callable[[State, TrackedStream, Arguments], object] = lambda state, stream, args: None
    """Called after the work is queued."""
    taken: Callable[[State, Arguments], Iterable[Touch]] = lambda state, args: ()
    """Reads that end before the call returns, outside stream order."""
    named: Callable[[State, Arguments], Iterable[Touch]] = lambda state, args: ()
    """Memory that must exist, but is neither read nor written."""

    def after(self, state: State, name: str, args: Arguments, answer: Answer) -> None:
        """Queue the work after a successful call."""
        for address, nbytes, write in self.taken(state, args):
            uses.use_on_host(state, number_of(address), nbytes, write, name)
        stream = state.stream(self._stream(args))
        if self.stream_at is None and self._is_staged(state, args):
            # The driver waits for earlier work, but the copied bytes may be in transit when the call returns.
            uses.host_waited_for(state, stream)
        for node in self._nodes(state, name, args, stream):
            uses.queue_use(state, stream, node)
        self.then(state, stream, args)
        if stream not in state.streams.captures and self._host_waits(state, args):
            uses.host_waited_for(state, stream)

    def _nodes(self, state: State, name: str, args: Arguments, stream: TrackedStream) -> list[TrackedNode]:
        find = uses.node_pieces if stream in state.streams.captures else uses.pieces
        return [TrackedNode("use", name, state.place(), find(state, self.touched(state, args)))]

    def _stream(self, args: Arguments) -> Any:
        """Return the stream's handle from an argument or a launch configuration."""
        given = 0 if self.stream_at is None else args[self.stream_at]
        return getattr(given, "hStream", given)

    def _host_waits(self, state: State, args: Arguments) -> bool:
        """Whether the host waits for the work: for copies to pageable memory, for synchronous copies with a side in
        host memory except those from pageable memory to a device, and for synchronous fills of host or managed memory.
        """
        sides = self.sides(args)
        if self.stream_at is not None:
            return len(sides) == 2 and sides[0] is not None and state.is_pageable(number_of(sides[0]))
        there = [number_of(one) for one in sides if one is not None]
        if len(sides) == 2:
            on_host = any(state.is_pageable(one) or state.ask.is_host_memory(one) for one in there)
            return on_host and not self._is_staged(state, args)
        return any(state.ask.is_host_memory(one) or state.ask.is_managed(one) for one in there)

    def _is_staged(self, state: State, args: Arguments) -> bool:
        """Whether the driver stages a copy: from pageable memory to a device."""
        sides = self.sides(args)
        if len(sides) < 2 or sides[1] is None or not state.is_pageable(number_of(sides[1])):
            return False
        target = None if sides[0] is None else number_of(sides[0])
        return target is None or not (state.is_pageable(target) or state.ask.is_host_memory(target))

    def before(self, state: State, name: str, args: Arguments) -> Finish:
        """Check for freed memory before the call."""
        return uses.stale(state, self._stream(args), name, (*self.touched(state, args), *self.named(state, args)))


def _target(args: Arguments) -> tuple[Any]:
    return (args[0],)


def _fills(stream_at: int | None, width: int) -> _Work:
    """Rule for a fill. A small fill is also a write of values that streams may wait for."""

    def then(state: State, stream: TrackedStream, args: Arguments) -> None:
        address, nbytes = number_of(args[0]), int(args[2]) * width
        if 4 <= nbytes <= 64 and not state.streams.captures:
            value = int.from_bytes(int(args[1]).to_bytes(width, "little") * (4 // width), "little")
            for at in range(address, address + nbytes - 3, 4):
                state.values.write(stream, at, value)

    return _Work(stream_at, lambda state, args: ((args[0], int(args[2]) * width, True),), _target, then)


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1) -> _Work:
    """A copy."""

    def touched(state: State, args: Arguments) -> list[Touch]:
        size, source, target = int(args[size_at]), args[source_at], args[0]
        found = [(source, size, False), (target, size, True)]
        return found[1:] if number_of(source) == number_of(target) else found

    def sides(args: Arguments) -> tuple[Any, ...]:
        return (args[0], args[source_at]) if int(args[size_at]) else ()

    def then(state: State, stream: TrackedStream, args: Arguments) -> None:
        if int(args[size_at]) and stream not in state.streams.captures and not state.streams.foreign.may_write:
            state.types.copied(args[0], args[source_at], int(args[size_at]), "a copy")

    return _Work(stream_at, touched, sides, then)


def rows(state: State, start: int, pitch: int, width: int, height: int, write: bool) -> list[Touch]:
    """Return the rows of a plane; a single piece if they are contiguous."""
    if pitch in (0, width) or height <= 1:
        return [(start, width * height, write)]
    if height > _ROWS:
        state.notes.add("rows")
    return [(start + row * pitch, width, write) for row in range(min(height, _ROWS))]


def plane(state: State, copy: Any) -> list[Touch]:
    """Return both sides of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``."""
    depth, width, height = int(getattr(copy, "Depth", 1) or 1), int(copy.WidthInBytes), int(copy.Height)
    found: list[Touch] = []
    for side, write in (("src", False), ("dst", True)):
        kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
        x, y, z = (int(getattr(copy, f"{side}{name}", 0)) for name in ("XInBytes", "Y", "Z"))
        # A pitch or height of 0 means the smallest one.
        pitch = int(getattr(copy, f"{side}Pitch", 0)) or x + width
        lines = int(getattr(copy, f"{side}Height", 0)) or y + height
        if "ARRAY" in kind:
            array = _array(state, getattr(copy, f"{side}Array"))
            if array is None:
                continue
            start, pitch, lines = array.base, array.pitch, array.lines
        else:
            start = number_of(getattr(copy, f"{side}Host" if "HOST" in kind else f"{side}Device"))
        found += _box(state, start + x + y * pitch + z * pitch * lines, pitch, lines, (width, height, depth), write)
    return found


def _array(state: State, handle: Any) -> TrackedArray | None:
    """Return the array of a handle; None if another driver object made it."""
    found = state.arrays.get(number_of(handle))
    if found is None:
        state.notes.add("memory", "an array")
    return found


def _box(state: State, start: int, pitch: int, lines: int, sizes: tuple[int, int, int], write: bool) -> list[Touch]:
    """Return the rows of a box of several planes, each with ``lines`` rows. ``sizes``: width, height and depth."""
    width, height, depth = sizes
    if lines == height:
        return rows(state, start, pitch, width, height * depth, write)
    step = pitch * lines
    return [row for at in range(depth) for row in rows(state, start + at * step, pitch, width, height, write)]


def _boxes(state: State, operations: Iterable[Any], at_call: bool) -> list[Touch]:
    """Return both sides of each ``CUDA_MEMCPY3D_BATCH_OP``. ``at_call``: only sources that may be read before the call
    returns.
    """
    found: list[Touch] = []
    for one in operations:
        width, height, depth = (int(getattr(one.extent, name)) for name in ("width", "height", "depth"))
        order = _order(one)
        for side, write in ((one.src, False), (one.dst, True)):
            if at_call if write else not _reads(order, at_call):
                continue
            if "ARRAY" in getattr(side.type, "name", ""):
                array, at = _array(state, side.op.array.array), side.op.array.offset
                if array is None:
                    continue
                # Extents and offsets of arrays count elements.
                pitch, lines, element = array.pitch, array.lines, array.element
                start = array.base + int(at.x) * element + int(at.y) * pitch + int(at.z) * pitch * lines
                found += _box(state, start, pitch, lines, (width * element, height, depth), write)
            else:
                there = side.op.ptr
                pitch, lines = int(there.rowLength) or width, int(there.layerHeight) or height
                found += _box(state, number_of(there.ptr), pitch, lines, (width, height, depth), write)
    return found


def _of_array(state: State, array: Any, offset: Any, size: Any, write: bool) -> list[Touch]:
    found = _array(state, array)
    return [] if found is None else [(found.base + int(offset), int(size), write)]


def _arrays(stream_at: int | None, target: int, source: int, array_to: bool, array_from: bool) -> _Work:
    """A copy of a row to or from an array. ``target`` and ``source``: argument indices (an array has two)."""

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

    def sides_of(args: Arguments) -> tuple[Any, Any]:
        return None if array_to else args[target], None if array_from else args[source]

    return _Work(stream_at, touched, sides_of)


def _order(one: Any) -> int:
    """Return the source access order of a copy in a batch."""
    with contextlib.suppress(ValueError):  # The bindings' getter raises for unknown numbers.
        return int(getattr(one, "srcAccessOrder", 0) or 0)
    return 0


def _reads(order: int, at_call: bool) -> bool:
    """Whether the call may read a source with this access order; with ``at_call`` False, whether the stream
    reads it.
    """
    return order in (_AT_CALL, _ANY) if at_call else order != _AT_CALL


def _batch(at_call: bool, state: State, args: Arguments) -> list[Touch]:
    """Stream-ordered uses of a batch of copies. ``at_call``: only reads that may come before the call returns."""
    targets, sources, sizes, _, attributes, begins = args[:6]
    # An attribute applies from its own index on.
    orders = dict(zip(map(int, begins or ()), map(_order, attributes or ()), strict=False))
    found, order = [], 0
    for at, (target, source, size) in enumerate(zip(targets, sources, sizes, strict=False)):
        order = orders.get(at, order)
        if _reads(order, at_call):
            found.append((source, int(size), False))
        if not at_call:
            found.append((target, int(size), True))
    return found


def _one(at_call: bool, state: State, args: Arguments) -> list[Touch]:
    """As :func:`_batch`, for ``cuMemcpyWithAttributesAsync``."""
    return _batch(at_call, state, ((args[0],), (args[1],), (args[2],), 1, (args[3],), (0,)))


def _copies_boxes(operations: Callable[[Arguments], Iterable[Any]]) -> _Work:
    def touched(at_call: bool, state: State, args: Arguments) -> list[Touch]:
        return _boxes(state, operations(args), at_call)

    return _Work(-1, partial(touched, False), taken=partial(touched, True))


def _discarded(state: State, args: Arguments) -> list[Touch]:
    """Rule for a discard, which counts as a write."""
    return [(at, int(size), True) for at, size in zip(args[0], args[1], strict=False)]


def _fills_rows(stream_at: int | None, width: int) -> _Work:
    def touched(state: State, args: Arguments) -> list[Touch]:
        return rows(state, number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)

    return _Work(stream_at, touched, _target)


def _side(copy: Any, side: str) -> Any:
    """Return the address of one side (``"src"``, ``"dst"``) of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``; None for an
    array.
    """
    kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
    return None if "ARRAY" in kind else getattr(copy, side + ("Host" if "HOST" in kind else "Device"))


def _copies_plane(stream_at: int | None) -> _Work:
    """Rule for a copy of a plane or box."""

    def sides(args: Arguments) -> tuple[Any, Any]:
        return _side(args[0], "dst"), _side(args[0], "src")

    return _Work(stream_at, lambda state, args: plane(state, args[0]), sides)


@dataclass(frozen=True)
class _Launch(_Work):
    """A kernel."""

    params_at: int | None = None
    """Index of the argument with the kernel's arguments; None if the uses are unknown."""
    function_at: int = 0

    def _launch(self, args: Arguments) -> tuple[Any, ...]:
        return () if self.params_at is None else (args[self.function_at], *args[self.params_at :])

    def _nodes(self, state: State, name: str, args: Arguments, stream: TrackedStream) -> list[TrackedNode]:
        runs = stream not in state.streams.captures
        return uses.kernel_nodes(state, name, state.place(), f"on {stream.name}", runs, *self._launch(args))

    def before(self, state: State, name: str, args: Arguments) -> Finish:
        launch = self._launch(args)
        touched = [one[:3] for one in uses.kernel_uses(state, *launch) or ()]
        return (
            uses.stale(state, self._stream(args), uses.kernel_name(state, name, *launch), touched)
            if touched
            else nothing
        )


_WORK = {
    **{
        f"cuMemsetD{8 * width}{end}": _fills(at, width) for width in (1, 2, 4) for end, at in (("", None), ("Async", 3))
    },
    **{
        f"cuMemsetD2D{8 * width}{end}": _fills_rows(at, width)
        for width in (1, 2, 4)
        for end, at in (("", None), ("Async", 5))
    },
    **{f"cuMemcpy{kind}": _copies(None) for kind in ("", "DtoH", "HtoD", "DtoD")},
    **{f"cuMemcpy{kind}Async": _copies(3) for kind in ("", "DtoH", "HtoD", "DtoD")},
    "cuMemcpyPeer": _copies(None, size_at=4, source_at=2),
    "cuMemcpyPeerAsync": _copies(5, size_at=4, source_at=2),
    **{f"cuMemcpy{kind}": _copies_plane(None) for kind in ("2D", "2DUnaligned", "3D", "3DPeer")},
    **{f"cuMemcpy{kind}Async": _copies_plane(1) for kind in ("2D", "3D", "3DPeer")},
    "cuMemcpyWithAttributesAsync": replace(_copies(-1), touched=partial(_one, False), taken=partial(_one, True)),
    "cuMemcpyBatchAsync": _Work(-1, partial(_batch, False), taken=partial(_batch, True)),
    "cuMemcpy3DBatchAsync": _copies_boxes(lambda args: list(args[1])[: int(args[0])]),
    "cuMemcpy3DWithAttributesAsync": _copies_boxes(lambda args: (args[0],)),
    **dict.fromkeys(("cuMemcpyAtoD", "cuMemcpyAtoH"), _arrays(None, 0, 1, False, True)),
    **dict.fromkeys(("cuMemcpyDtoA", "cuMemcpyHtoA"), _arrays(None, 0, 2, True, False)),
    "cuMemcpyAtoA": _arrays(None, 0, 2, True, True),
    "cuMemcpyAtoHAsync": _arrays(4, 0, 1, False, True),
    "cuMemcpyHtoAAsync": _arrays(4, 0, 2, True, False),
    **dict.fromkeys(("cuLaunchKernel", "cuLaunchCooperativeKernel"), _Launch(8, params_at=9)),
    "cuLaunchKernelEx": _Launch(0, params_at=2, function_at=1),
    "cuLaunchGridAsync": _Launch(3),
    "cuMemBatchDecompressAsync": _Launch(-1),
    "cuMemDiscardBatchAsync": _Work(-1, _discarded),
    "cuMemDiscardAndPrefetchBatchAsync": _Work(-1, _discarded),
    "cuStreamAttachMemAsync": _Work(0),
    "cuGraphUpload": _Work(1),
    "cuMemPrefetchAsync": _Work(-1, named=lambda state, args: ((args[0], int(args[1]), False),)),
    "cuMemPrefetchBatchAsync": _Work(-1, named=_discarded),
    "cuSignalExternalSemaphoresAsync": _Work(-1),
}
RULES = rules(
    before={name: work.before for name, work in _WORK.items()},
    after={name: work.after for name, work in _WORK.items()},
)
