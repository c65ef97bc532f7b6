"""Rules for copies, fills and kernels: work that reads and writes memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from streamalloc.checker import uses
from streamalloc.checker.capture import TrackedNode
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.state import State, TrackedArray
from streamalloc.checker.uses import Arguments, Around, Steps, Use, rules_of
from streamalloc.driver.bindings import number_of

# Values of CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL and _ANY, which older bindings lack. With _ANY a copy may read
# its source during the call or later.
_AT_CALL, _ANY = 2, 3
_ROWS = 1 << 15
"""Largest number of rows of a plane that are checked. The other rows are left out, with a note."""


class _Memory(NamedTuple):
    """Memory that the arguments of one call name, by the way in which the call uses it."""

    used: Iterable[Use] = ()
    """Reads and writes in stream order, as far as they are known."""
    sides: tuple[Any, ...] = ()
    """Target and source of a copy, or target of a fill, by which it is decided whether the host waits. None for an
    array.
    """
    taken: Iterable[Use] = ()
    """Reads of memory that end before the call returns, outside of stream order."""
    named: Iterable[Use] = ()
    """Memory that must exist, although the call neither reads nor writes it."""
    then: Callable[[TrackedStream], object] = lambda stream: None
    """Function that is called with the stream after the work is queued."""


Read: TypeAlias = Callable[[State, Arguments], _Memory]


def _stream(args: Arguments, at: int | None) -> Any:
    """Return the stream's handle from the argument with the index ``at``, which may be a launch configuration.
    ``at=None``: the legacy stream.
    """
    given = 0 if at is None else args[at]
    return getattr(given, "hStream", given)


def _works(stream_at: int | None, read: Read = lambda state, args: _Memory()) -> Around:
    """Rule for a call that uses memory in a stream. ``read``: function that returns the memory that the arguments name.

    ``stream_at``: index of the stream argument; None for a synchronous call, which uses the legacy stream.
    """

    def rule(state: State, name: str, args: Arguments) -> Steps:
        memory, handle = read(state, args), _stream(args, stream_at)
        found = uses.look_up(state, memory.used)
        named = uses.look_up(state, memory.named).pieces if memory.named else []
        report_refused = uses.stale(state, handle, name, found.pieces + named)
        answer = yield
        report_refused(answer)
        if answer[0]:
            return
        for address, nbytes, write in memory.taken:
            uses.use_on_host(state, number_of(address), nbytes, write, name)
        stream, waits = state.stream(handle), stream_at is None
        if waits and _is_staged(state, memory.sides):
            # Before such a copy the driver waits for the earlier work. It does not wait for the copy itself, whose
            # bytes may still be on the way when the call returns.
            uses.host_waited_for(state, stream)
        captured = stream in state.streams.captures
        pieces = uses.present(state, found, in_graph=captured)
        uses.queue_use(state, stream, TrackedNode("use", name, state.place(), pieces))
        memory.then(stream)
        if not captured and _host_waits(state, memory.sides, waits):
            uses.host_waited_for(state, stream)

    return rule


def _host_waits(state: State, sides: tuple[Any, ...], synchronous: bool) -> bool:
    """Whether the host waits for the work of a call. ``sides``: target and source. The host waits for

    * a copy to pageable memory, even an asynchronous one;
    * a synchronous copy with a side in host memory, unless it is from pageable memory to a device;
    * a synchronous fill of host or managed memory.
    """
    if not synchronous:
        return len(sides) == 2 and sides[0] is not None and state.is_pageable(number_of(sides[0]))
    there = [number_of(one) for one in sides if one is not None]
    if len(sides) == 2:
        on_host = any(state.is_pageable(one) or state.ask.is_host_memory(one) for one in there)
        return on_host and not _is_staged(state, sides)
    return any(state.ask.is_host_memory(one) or state.ask.is_managed(one) for one in there)


def _is_staged(state: State, sides: tuple[Any, ...]) -> bool:
    """Whether the copy is from pageable memory to a device. The driver first copies such a source to a buffer of its
    own.
    """
    if len(sides) < 2 or sides[1] is None or not state.is_pageable(number_of(sides[1])):
        return False
    target = None if sides[0] is None else number_of(sides[0])
    return target is None or not (state.is_pageable(target) or state.ask.is_host_memory(target))


def _fills(stream_at: int | None, width: int) -> Around:
    """Rule for a fill. ``width``: size of an element in bytes.

    A fill of 4 to 64 bytes also counts as a write of values for which streams may wait, unless a stream is being
    captured.
    """

    def read(state: State, args: Arguments) -> _Memory:
        address, nbytes = number_of(args[0]), int(args[2]) * width

        def then(stream: TrackedStream) -> None:
            if 4 <= nbytes <= 64 and not state.streams.captures:
                value = int.from_bytes(int(args[1]).to_bytes(width, "little") * (4 // width), "little")
                for at in range(address, address + nbytes - 3, 4):
                    state.values.write(stream, at, value)

        return _Memory([(address, nbytes, True)], (address,), then=then)

    return _works(stream_at, read)


def _copies(stream_at: int | None, size_at: int = 2, source_at: int = 1) -> Around:
    """Rule for a copy of bytes to the address in the first argument.

    The parameters are indexes of the call's arguments: the stream (None for a synchronous call), the size, the source.
    """
    return _works(stream_at, lambda state, args: _copied(state, args[0], args[source_at], int(args[size_at])))


def _copied(state: State, target: Any, source: Any, size: int) -> _Memory:
    used = [(source, size, False), (target, size, True)]

    def then(stream: TrackedStream) -> None:
        if size and stream not in state.streams.captures and not state.streams.foreign.may_write:
            state.types.copied(target, source, size, "a copy")

    same = number_of(source) == number_of(target)
    return _Memory(used[1:] if same else used, (target, source) if size else (), then=then)


def rows(state: State, start: int, pitch: int, width: int, height: int, write: bool) -> list[Use]:
    """Return a use for each row of a plane, or one use if the rows are contiguous. ``start``: address of the first row.
    ``pitch``: distance of the rows in bytes; 0 if they are contiguous. ``width``: bytes of a row. ``height``: number of
    rows. ``write``: whether the rows are written.

    At most 32,768 rows are returned; further rows are left out, with a note.
    """
    if pitch in (0, width) or height <= 1:
        return [(start, width * height, write)]
    if height > _ROWS:
        state.notes.add("rows")
    return [(start + row * pitch, width, write) for row in range(min(height, _ROWS))]


def plane(state: State, copy: Any) -> list[Use]:
    """Return the rows that a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D`` reads and writes. Rows of an array that was not
    created through this driver are left out, with a note.
    """
    depth, width, height = int(getattr(copy, "Depth", 1) or 1), int(copy.WidthInBytes), int(copy.Height)
    found: list[Use] = []
    for side, write in (("src", False), ("dst", True)):
        kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
        x, y, z = (int(getattr(copy, f"{side}{name}", 0)) for name in ("XInBytes", "Y", "Z"))
        # For a pitch or a height of 0 the driver takes the smallest that fits. With 0, all rows would overlap.
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


def _box(state: State, start: int, pitch: int, lines: int, sizes: tuple[int, int, int], write: bool) -> list[Use]:
    """Return a use for each row of a box. Each plane of the memory has ``lines`` rows of ``pitch`` bytes.

    ``sizes``: width of the box in bytes, height in rows, depth in planes.
    """
    width, height, depth = sizes
    if lines == height:
        return rows(state, start, pitch, width, height * depth, write)
    starts = range(start, start + depth * pitch * lines, pitch * lines)
    return [row for at in starts for row in rows(state, at, pitch, width, height, write)]


def _boxes(state: State, operations: Iterable[Any]) -> _Memory:
    """Return the uses of a batch of ``CUDA_MEMCPY3D_BATCH_OP``."""
    used: list[Use] = []
    taken: list[Use] = []
    for one in operations:
        width, height, depth = (int(getattr(one.extent, name)) for name in ("width", "height", "depth"))
        order = _order(one)
        for side, write in ((one.src, False), (one.dst, True)):
            if "ARRAY" in getattr(side.type, "name", ""):
                array, at = _array(state, side.op.array.array), side.op.array.offset
                if array is None:
                    continue
                # The struct counts elements of the array; `_box` needs bytes.
                pitch, lines, element = array.pitch, array.lines, array.element
                start = array.base + int(at.x) * element + int(at.y) * pitch + int(at.z) * pitch * lines
                found = _box(state, start, pitch, lines, (width * element, height, depth), write)
            else:
                there = side.op.ptr
                pitch, lines = int(there.rowLength) or width, int(there.layerHeight) or height
                found = _box(state, number_of(there.ptr), pitch, lines, (width, height, depth), write)
            if write or order != _AT_CALL:
                used += found
            if not write and order in (_AT_CALL, _ANY):
                taken += found
    return _Memory(used, taken=taken)


def _arrays(stream_at: int | None, target: int, source: int, array_to: bool, array_from: bool) -> Around:
    """Rule for a copy of a row to or from an array. ``target`` and ``source``: index of the first argument for this
    side.

    An array has two arguments: its handle, and an offset in bytes. ``array_to``, ``array_from``: whether the side is an
    array.
    """

    def read(state: State, args: Arguments) -> _Memory:
        size, used = int(args[source + 1 + array_from]), []
        for at, is_array, write in ((source, array_from, False), (target, array_to, True)):
            array = _array(state, args[at]) if is_array else None
            if array is not None:
                used.append((array.base + int(args[at + 1]), size, write))
            elif not is_array:
                used.append((args[at], size, write))
        return _Memory(used, (None if array_to else args[target], None if array_from else args[source]))

    return _works(stream_at, read)


def _order(one: Any) -> int:
    """Return the source access order of a copy in a batch (``CUmemcpySrcAccessOrder``) as a number; 0 if it is
    unknown.
    """
    with contextlib.suppress(ValueError):  # The getter raises it for an unknown enum number.
        return int(getattr(one, "srcAccessOrder", 0) or 0)
    return 0


def _batch(state: State, args: Arguments) -> _Memory:
    """Return the uses of a batch of copies (``cuMemcpyBatchAsync``)."""
    targets, sources, sizes, _, attributes, begins = args[:6]
    # `begins[i]` is the index of the first copy that has attribute `i`.
    orders = dict(zip(map(int, begins or ()), map(_order, attributes or ()), strict=False))
    used, taken, order = [], [], 0
    for at, (target, source, size) in enumerate(zip(targets, sources, sizes, strict=False)):
        order = orders.get(at, order)
        if order in (_AT_CALL, _ANY):
            taken.append((source, int(size), False))
        if order != _AT_CALL:
            used.append((source, int(size), False))
        used.append((target, int(size), True))
    return _Memory(used, taken=taken)


def _with_attributes(state: State, args: Arguments) -> _Memory:
    """Return the uses of ``cuMemcpyWithAttributesAsync``."""
    one = _batch(state, ((args[0],), (args[1],), (args[2],), 1, (args[3],), (0,)))
    copied = _copied(state, args[0], args[1], int(args[2]))
    return one._replace(sides=copied.sides, then=copied.then)


def _discarded(state: State, args: Arguments) -> list[Use]:
    """Return the ranges of a discard. They count as written, because their contents are lost."""
    return [(at, int(size), True) for at, size in zip(args[0], args[1], strict=False)]


def _fills_rows(stream_at: int | None, width: int) -> Around:
    def read(state: State, args: Arguments) -> _Memory:
        used = rows(state, number_of(args[0]), int(args[1]), int(args[3]) * width, int(args[4]), True)
        return _Memory(used, (args[0],))

    return _works(stream_at, read)


def _side(copy: Any, side: str) -> Any:
    """Return the address of one side (``"src"`` or ``"dst"``) of a ``CUDA_MEMCPY2D`` or ``CUDA_MEMCPY3D``.

    None for an array.
    """
    kind = getattr(getattr(copy, f"{side}MemoryType"), "name", "")
    return None if "ARRAY" in kind else getattr(copy, side + ("Host" if "HOST" in kind else "Device"))


def _copies_plane(stream_at: int | None) -> Around:
    """Rule for a copy of a plane or box."""

    def read(state: State, args: Arguments) -> _Memory:
        return _Memory(plane(state, args[0]), (_side(args[0], "dst"), _side(args[0], "src")))

    return _works(stream_at, read)


def _launches(stream_at: int, params_at: int | None = None, function_at: int = 0) -> Around:
    """Rule for a kernel launch. The parameters are indexes of the call's arguments.

    ``stream_at``: the stream or the launch configuration. ``params_at``: the kernel's arguments; None: the uses are
    unknown. ``function_at``: the kernel function.
    """

    def rule(state: State, name: str, args: Arguments) -> Steps:
        launch = () if params_at is None else (args[function_at], *args[params_at:])
        used = uses.look_up(state, (one[:3] for one in uses.kernel_uses(state, *launch) or ())).pieces
        handle, kernel = _stream(args, stream_at), uses.kernel_name(state, name, *launch) if used else name
        report_refused = uses.stale(state, handle, kernel, used)
        answer = yield
        report_refused(answer)
        if answer[0]:
            return
        stream, where = state.stream(handle), f"on {state.stream(handle).name}"
        runs = stream not in state.streams.captures
        for node in uses.kernel_nodes(state, name, state.place(), where, runs, *launch):
            uses.queue_use(state, stream, node)

    return rule


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
    "cuMemcpyWithAttributesAsync": _works(-1, _with_attributes),
    "cuMemcpyBatchAsync": _works(-1, _batch),
    "cuMemcpy3DBatchAsync": _works(-1, lambda state, args: _boxes(state, list(args[1])[: int(args[0])])),
    "cuMemcpy3DWithAttributesAsync": _works(-1, lambda state, args: _boxes(state, (args[0],))),
    **dict.fromkeys(("cuMemcpyAtoD", "cuMemcpyAtoH"), _arrays(None, 0, 1, False, True)),
    **dict.fromkeys(("cuMemcpyDtoA", "cuMemcpyHtoA"), _arrays(None, 0, 2, True, False)),
    "cuMemcpyAtoA": _arrays(None, 0, 2, True, True),
    "cuMemcpyAtoHAsync": _arrays(4, 0, 1, False, True),
    "cuMemcpyHtoAAsync": _arrays(4, 0, 2, True, False),
    **dict.fromkeys(("cuLaunchKernel", "cuLaunchCooperativeKernel"), _launches(8, params_at=9)),
    "cuLaunchKernelEx": _launches(0, params_at=2, function_at=1),
    "cuLaunchGridAsync": _launches(3),
    "cuMemBatchDecompressAsync": _launches(-1),
    **dict.fromkeys(
        ("cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"),
        _works(-1, lambda state, args: _Memory(_discarded(state, args))),
    ),
    "cuMemPrefetchBatchAsync": _works(-1, lambda state, args: _Memory(named=_discarded(state, args))),
    "cuMemPrefetchAsync": _works(-1, lambda state, args: _Memory(named=((args[0], int(args[1]), False),))),
    "cuStreamAttachMemAsync": _works(0),
    "cuGraphUpload": _works(1),
    "cuSignalExternalSemaphoresAsync": _works(-1),
}
RULES = rules_of(_WORK)
