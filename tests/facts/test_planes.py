"""Fills and copies of planes and boxes: what they check, when they wait, and what a graph keeps of them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST_NUMA, READ, READWRITE
from tests.facts.support import PAGE, UNRESERVED, MiB, Rig, said, value

HOST_KIND, DEVICE_KIND, UNIFIED = 1, 2, 4  # CUmemorytype
KINDS = {"H": HOST_KIND, "D": DEVICE_KIND, "U": UNIFIED}


class Memory:
    """Memory of every kind, a MiB of each and more of what is mapped, with a stream to use it on."""

    nothing, null = UNRESERVED, 0

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.stream = rig, rig.raw, rig.stream()
        self.plain, self.other, self.pinned = int(rig.plain(MiB)), int(rig.plain(MiB)), int(rig.pinned(MiB))
        self.pool = rig.allocate(rig.pool(), MiB, self.stream)
        self.array: npt.NDArray[np.uint8] = np.zeros(MiB, np.uint8)
        self.pageable: int = self.array.ctypes.data
        self.mapped = rig.mapping(PAGE, (DEVICE, 0, READWRITE))
        self.readable, self.untouchable = rig.mapping(PAGE, (DEVICE, 0, READ)), rig.mapping(PAGE)
        self.reserved = rig.reserve(PAGE)
        self.host = rig.mapping(PAGE, (HOST_NUMA, 0, READWRITE), location=HOST_NUMA)  # only the host may use it
        rig.synchronize()


@pytest.fixture
def memory(rig: Rig) -> Memory:
    return Memory(rig)


FILLS = {  # where, pitch, width, height, bytes of an element
    "": ("plain", 0, 64, 10, 3, 1, "SUCCESS"),
    "pitch 0": ("plain", 0, 0, 10, 3, 1, "INVALID_VALUE"),
    "pitch 0, one row": ("plain", 0, 0, 10, 1, 1, "SUCCESS"),
    "rows that overlap": ("plain", 0, 8, 10, 3, 1, "INVALID_VALUE"),
    "a pitch of 2**63, one row": ("plain", 0, 1 << 63, 10, 1, 1, "SUCCESS"),
    "no bytes of nothing": ("null", 0, 64, 0, 3, 1, "SUCCESS"),
    "no rows of nothing": ("nothing", 0, 64, 3, 0, 1, "SUCCESS"),
    "to the end": ("plain", 0, 1024, 1024, 1024, 1, "SUCCESS"),
    "past the end": ("plain", 0, 1024, 1024, 1025, 1, "INVALID_VALUE"),
    "a short last row to the end": ("plain", 24, 1024, 1000, 1024, 1, "SUCCESS"),
    "16 bits at an odd address": ("plain", 1, 64, 4, 2, 2, "INVALID_VALUE"),
    "16 bits, odd pitch": ("plain", 0, 65, 4, 2, 2, "INVALID_VALUE"),
    "16 bits, odd pitch, one row": ("plain", 0, 65, 4, 1, 2, "SUCCESS"),
    "32 bits, pitch of 2 bytes": ("plain", 0, 66, 4, 2, 4, "INVALID_VALUE"),
    "a pool": ("pool", 0, 64, 10, 3, 1, "SUCCESS"),
    "pinned": ("pinned", 0, 64, 10, 3, 1, "SUCCESS"),
    "pageable": ("pageable", 0, 64, 10, 3, 1, "INVALID_VALUE"),
    "mapped": ("mapped", 0, 64, 10, 3, 1, "SUCCESS"),
    "past a mapping": ("mapped", PAGE - 64, 64, 10, 2, 1, "INVALID_VALUE"),
    "readable": ("readable", 0, 64, 10, 3, 1, "INVALID_VALUE"),
    "untouchable": ("untouchable", 0, 64, 10, 1, 1, "INVALID_VALUE"),
    "reserved": ("reserved", 0, 64, 10, 3, 1, "INVALID_VALUE"),
    "the host's": ("host", 0, 64, 10, 3, 1, "INVALID_VALUE"),
    "null": ("null", 0, 64, 10, 3, 1, "INVALID_VALUE"),
}


@pytest.mark.parametrize("case", FILLS)
def test_fills(memory: Memory, case: str) -> None:
    name, offset, pitch, width, height, element, expected = FILLS[case]
    address, bits = getattr(memory, name) + offset, 8 * element
    fill, queue = (getattr(memory.raw, f"cuMemsetD2D{bits}{end}") for end in ("", "Async"))
    assert said(fill(address, pitch, 1, width, height)) == expected
    assert said(queue(address, pitch, 1, width, height, memory.stream)) == expected
    memory.rig.synchronize()


@pytest.mark.parametrize(("element", "pattern"), [(1, [7]), (2, [7, 1]), (4, [7, 1, 0, 0])])
def test_a_fill_leaves_what_is_between_rows(memory: Memory, element: int, pattern: list[int]) -> None:
    value(memory.raw.cuMemsetD8(memory.plain, 0, 64))
    number = int.from_bytes(bytes(pattern), "little")
    value(getattr(memory.raw, f"cuMemsetD2D{8 * element}")(memory.plain, 16, number, 3, 2))
    row = (pattern * 3 + [0] * 16)[:16]
    assert memory.rig.read(memory.plain, 48) == row + row + [0] * 16


@pytest.mark.parametrize(("name", "waits"), [("plain", False), ("pinned", True)])
def test_a_fill_without_a_stream_waits_for_host_memory_only(memory: Memory, name: str, waits: bool) -> None:
    gate, stream = memory.rig.gate(), memory.rig.stream(BLOCKING)
    gate.hold(stream)
    with gate.opening_after(0.05 if waits else 5):
        value(memory.raw.cuMemsetD2D8(getattr(memory, name), 64, 1, 10, 3))
        assert gate.is_open == waits


def plane(memory: Memory, kinds: str, target: str, source: str, **fields: int) -> Any:
    """A ``CUDA_MEMCPY2D`` of three rows of ten bytes; ``kinds`` has a letter for target and source."""
    return _copy(memory, memory.raw.CUDA_MEMCPY2D(), kinds, target, source, fields)


def box(memory: Memory, kinds: str, target: str, source: str, **fields: int) -> Any:
    """A ``CUDA_MEMCPY3D`` of two of them."""
    fields = {"Depth": 2, "srcHeight": 4, "dstHeight": 5, **fields}
    return _copy(memory, memory.raw.CUDA_MEMCPY3D(), kinds, target, source, fields)


def _copy(memory: Memory, copy: Any, kinds: str, target: str, source: str, fields: dict[str, int]) -> Any:
    for side, kind, name in (("dst", kinds[0], target), ("src", kinds[1], source)):
        if kind in KINDS:
            setattr(copy, f"{side}MemoryType", memory.raw.CUmemorytype(KINDS[kind]))
        setattr(copy, f"{side}Host" if kind == "H" else f"{side}Device", getattr(memory, name))
    for name, number in {"WidthInBytes": 10, "Height": 3, "srcPitch": 64, "dstPitch": 64, **fields}.items():
        setattr(copy, name, number)
    return copy


ENDS = {
    "SUCCESS": (
        "DD plain other, DH plain pageable, HD pageable plain, HH pageable pinned, HH pinned pageable, UU plain other,"
        "UU plain pageable, UU pageable plain, UU pinned pageable, DD plain pinned, HD plain other, DH plain other,"
        "HH plain other, HH plain pageable, UD plain other, HU pageable plain, DD pool plain, DD plain pool,"
        "DD mapped plain, DD plain readable, HD host plain, UU host plain, UU plain host, HH pageable host"
    ),
    "INVALID_VALUE": (
        "DD plain pageable, DD pageable plain, ?D plain other, DD readable plain, UU readable plain,"
        "DD untouchable plain, DD plain untouchable, UU plain untouchable, HD pageable untouchable,"
        "DD nothing plain, DD null plain, DD plain null, UU plain null"
    ),
}


@pytest.mark.parametrize("expected", ENDS)
def test_ends(memory: Memory, expected: str) -> None:
    """Device memory may be called the host's, pageable memory not the device's."""
    raw = memory.raw
    for case in ENDS[expected].split(","):
        flat, solid = plane(memory, *case.split()), box(memory, *case.split())
        answers = [raw.cuMemcpy2D(flat), raw.cuMemcpy2DUnaligned(flat), raw.cuMemcpy2DAsync(flat, memory.stream)]
        answers += [raw.cuMemcpy3D(solid), raw.cuMemcpy3DAsync(solid, memory.stream)]
        assert [said(one) for one in answers] == [expected] * 5, case
        memory.rig.synchronize()


BAD, GOOD = "INVALID_VALUE", "SUCCESS"
SHAPES: dict[str, tuple[dict[str, int], str]] = {
    "no bytes": ({"WidthInBytes": 0}, GOOD),
    "no rows": ({"Height": 0}, GOOD),
    "no bytes, bad pitch": ({"WidthInBytes": 0, "srcPitch": 0, "dstPitch": 0}, GOOD),
    "source pitch 0": ({"srcPitch": 0}, GOOD),
    "pitches 0, one row": ({"srcPitch": 0, "dstPitch": 0, "Height": 1}, GOOD),
    "source rows overlap": ({"srcPitch": 9}, BAD),
    "pitch below the width, one row": ({"srcPitch": 9, "Height": 1}, BAD),
    "target rows overlap": ({"dstPitch": 9}, BAD),
    "up to the pitch": ({"srcXInBytes": 54}, GOOD),
    "beyond the pitch": ({"srcXInBytes": 55}, BAD),
    "odd pitches": ({"srcPitch": 13, "dstPitch": 17}, GOOD),
    "a pitch of 2**31": ({"srcPitch": 1 << 31, "Height": 1}, GOOD),
    "to the end": ({"WidthInBytes": 1024, "Height": 1024, "srcPitch": 1024, "dstPitch": 1024}, GOOD),
    "past the end": ({"WidthInBytes": 1024, "Height": 1025, "srcPitch": 1024, "dstPitch": 1024}, BAD),
    "begins at the end": ({"srcY": 1024, "srcPitch": 1024, "dstPitch": 1024}, BAD),
}


def test_shapes(memory: Memory) -> None:
    raw = memory.raw
    for case, (fields, expected) in SHAPES.items():
        copy = plane(memory, "DD", "plain", "other", **fields)
        answers = raw.cuMemcpy2D(copy), raw.cuMemcpy2DUnaligned(copy), raw.cuMemcpy2DAsync(copy, memory.stream)
        assert [said(one) for one in answers] == [expected] * 3, case


BOXES: dict[str, tuple[dict[str, int], str]] = {
    "no slices": ({"Depth": 0}, GOOD),
    "source height 0": ({"srcHeight": 0}, GOOD),
    "nothing given for one row": ({"srcPitch": 0, "dstPitch": 0, "srcHeight": 0, "dstHeight": 0, "Height": 1}, GOOD),
    "slices overlap": ({"srcHeight": 2}, BAD),
    "height below the rows, one slice": ({"srcHeight": 2, "Depth": 1}, BAD),
    "beyond the height": ({"srcY": 2}, BAD),
    "up to the height": ({"srcY": 1}, GOOD),
    "beyond the height, one slice": ({"srcY": 2, "Depth": 1}, BAD),
    "a level of detail": ({"srcLOD": 1}, GOOD),
    "past the end": (
        {"WidthInBytes": 1024, "Height": 32, "Depth": 33}
        | {"srcPitch": 1024, "dstPitch": 1024, "srcHeight": 32, "dstHeight": 32},
        BAD,
    ),
}


def test_boxes(memory: Memory) -> None:
    for case, (fields, expected) in BOXES.items():
        copy = box(memory, "DD", "plain", "other", **fields)
        assert said(memory.raw.cuMemcpy3D(copy)) == expected, case
        assert said(memory.raw.cuMemcpy3DAsync(copy, memory.stream)) == expected, case


def test_rows_need_not_fit_between_pools(memory: Memory) -> None:
    """The omitted rows in front of them do not count: the place of a row is counted as if they did."""
    rig, raw, stream = memory.rig, memory.raw, memory.stream
    memory.plain, memory.other = (rig.allocate(rig.pool(), 4096, stream) for _ in range(2))
    value(raw.cuMemsetD8Async(memory.plain, 0, 4096, stream))
    value(raw.cuMemsetD8Async(memory.other, 7, 4096, stream))
    beyond = {"WidthInBytes": 7, "Height": 1, "Depth": 2, "srcPitch": 8, "srcXInBytes": 5, "dstPitch": 16}
    copy = box(memory, "DD", "plain", "other", **beyond, dstY=7, dstHeight=4)
    assert said(raw.cuMemcpy3DAsync(copy, stream)) == "SUCCESS"
    found = rig.read(memory.plain, 256)
    assert [at for at, byte in enumerate(found) if byte] == [*range(112, 119), *range(176, 183)]
    for wrong in ({"srcPitch": 9}, {"srcHeight": 2}):
        assert said(raw.cuMemcpy3DAsync(box(memory, "DD", "plain", "other", **wrong), stream)) == "INVALID_VALUE"


BEHIND: dict[str, tuple[dict[str, int], int | None]] = {  # fields; the place of the first byte, None: it is refused
    "in the last 512 bytes": ({"srcY": 8}, 512),
    "in the next allocation": ({"srcY": 16}, 1024),
    "beside it": ({"srcXInBytes": 1032, "srcPitch": 4096}, 1032),
    "rows that do not fit": ({"srcXInBytes": 60, "srcY": 16}, 1084),
    "all of it, 40 rows on": ({"WidthInBytes": 1, "Height": 9, "srcY": 40}, 2560),
    "a byte more than it has": ({"WidthInBytes": 2, "Height": 9}, None),
    "a target in the next allocation": ({"dstY": 16}, 1024),
    "a target whose rows do not fit": ({"dstXInBytes": 60, "dstY": 16}, 1084),
    "a target of a byte more": ({"WidthInBytes": 2, "Height": 9, "srcPitch": 4, "dstPitch": 64}, None),
}


@pytest.mark.parametrize("case", BEHIND)
def test_of_pool_memory_only_the_span_of_the_rows_is_checked(memory: Memory, case: str) -> None:
    """From the beginning of the end on: what is left out before the rows does not count, and they need not fit."""
    fields, at = BEHIND[case]
    rig, raw, stream, into = memory.rig, memory.raw, memory.stream, "target" in case
    pool = rig.pool()
    memory.pool, after = rig.allocate(pool, 513, stream), rig.allocate(pool, 4096, stream)
    assert after == memory.pool + 1024
    value(raw.cuMemsetD8Async(after, 9, 4096, stream))
    value(raw.cuMemsetD8Async(memory.plain, 7, 4096, stream))
    value(raw.cuStreamSynchronize(stream))
    target, source = ("pool", "plain") if into else ("plain", "pool")
    copy = plane(memory, "DD", target, source, **{"WidthInBytes": 8, "Height": 1, **fields})
    graph = rig.own(value(raw.cuGraphCreate(0)), raw.cuGraphDestroy)
    node = raw.cuGraphAddMemcpyNode(graph, [], 0, whole(raw, copy), rig.context)
    answers = {said(raw.cuMemcpy2D(copy)), said(raw.cuMemcpy2DAsync(copy, stream)), said(node)}
    assert answers == {"INVALID_VALUE" if at is None else "SUCCESS"}
    rig.synchronize()
    if at is not None and into:
        assert rig.read(after + at - 1024, 9) == [7] * 8 + [9]
    elif at is not None and at >= 1024:
        width = fields.get("WidthInBytes", 8)
        assert rig.read(memory.plain, width + 1) == [9] * width + [7]


def whole(raw: Any, copy: Any) -> Any:
    """The same as a ``CUDA_MEMCPY3D``."""
    made = raw.CUDA_MEMCPY3D()
    for side in ("src", "dst"):
        for name in ("XInBytes", "Y", "MemoryType", "Host", "Device", "Pitch"):
            setattr(made, side + name, getattr(copy, side + name))
    made.WidthInBytes, made.Height, made.Depth = copy.WidthInBytes, copy.Height, 1
    return made


@pytest.mark.parametrize("kinds", ["DD", "HD", "UU"])
@pytest.mark.parametrize("fields", [{"dstXInBytes": 60}, {"dstY": 1 << 14}], ids=["rows", "range"])
def test_the_other_end_is_checked_as_ever(memory: Memory, kinds: str, fields: dict[str, int]) -> None:
    copy = plane(memory, kinds, "pinned" if kinds == "HD" else "plain", "pool", **{"Height": 1, **fields})
    assert said(memory.raw.cuMemcpy2DAsync(copy, memory.stream)) == "INVALID_VALUE"


def test_what_a_copy_moves(memory: Memory) -> None:
    memory.array[:256] = range(256)
    value(memory.raw.cuMemsetD8(memory.plain, 255, 64))
    offsets = {"srcXInBytes": 2, "srcY": 1, "dstXInBytes": 1, "dstY": 1}
    size = {"WidthInBytes": 3, "Height": 2, "srcPitch": 16, "dstPitch": 8}
    value(memory.raw.cuMemcpy2D(plane(memory, "DH", "plain", "pageable", **offsets, **size)))
    found = memory.rig.read(memory.plain, 32)
    assert (found[9:12], found[17:20]) == ([18, 19, 20], [34, 35, 36])
    assert found.count(255) == 26
    value(memory.raw.cuMemsetD8(memory.plain, 255, 64))
    size = {"WidthInBytes": 2, "Height": 2, "srcPitch": 8, "dstPitch": 4, "srcHeight": 4, "dstHeight": 3, "srcZ": 1}
    value(memory.raw.cuMemcpy3D(box(memory, "DH", "plain", "pageable", **offsets, **size)))
    found = memory.rig.read(memory.plain, 32)
    assert [found[at : at + 2] for at in (5, 9, 17, 21)] == [[42, 43], [50, 51], [74, 75], [82, 83]]
    assert found.count(255) == 24


WAITS = {
    "DH plain pageable": (False, True),
    "HD pageable plain": (True, True),
    "DH plain pinned": (False, True),
    "HD pinned plain": (False, True),
    "DD plain other": (False, False),
    "HH pinned pinned": (True, True),
    "HH pinned pageable": (True, True),
    "UU plain pageable": (False, True),
}


@pytest.mark.parametrize("case", WAITS)
def test_which_copies_are_waited_for(memory: Memory, case: str) -> None:
    """The host always waits for a copy both of whose ends are named as the host's."""
    rig, raw, blocking, gate = memory.rig, memory.raw, memory.rig.stream(BLOCKING), memory.rig.gate()
    copy = plane(memory, *case.split())
    for stream, waits in zip((memory.stream, blocking), WAITS[case], strict=True):
        gate.hold(stream)
        with gate.opening_after(0.03 if waits else 5):
            value(raw.cuMemcpy2D(copy) if stream is blocking else raw.cuMemcpy2DAsync(copy, stream))
            assert gate.is_open == waits
        rig.synchronize()


def test_pageable_memory_is_read_before_the_call_returns(memory: Memory) -> None:
    gate = memory.rig.gate()
    gate.hold(memory.stream)
    memory.array[:16] = 1
    value(memory.raw.cuMemcpy2DAsync(plane(memory, "DH", "plain", "pageable"), memory.stream))
    memory.array[:16] = 2
    gate.open()
    assert memory.rig.read(memory.plain, 10) == [1] * 10


def test_between_contexts(memory: Memory) -> None:
    """A context that is not given is the current one."""
    raw, copy = memory.raw, memory.raw.CUDA_MEMCPY3D_PEER()
    _copy(memory, copy, "DD", "plain", "other", {"Depth": 2, "srcHeight": 4, "dstHeight": 5})
    assert said(raw.cuMemcpy3DPeer(copy)) == "SUCCESS"
    copy.srcContext = copy.dstContext = memory.rig.context
    assert said(raw.cuMemcpy3DPeer(copy)) == "SUCCESS"
    assert said(raw.cuMemcpy3DPeerAsync(copy, memory.stream)) == "SUCCESS"


def captured(memory: Memory, call: str, *arguments: Any) -> tuple[str, Any, list[Any]]:
    """The result of a call during a capture, the graph, and its nodes."""
    memory.rig.begin_capture(memory.stream)
    result = said(getattr(memory.raw, call)(*arguments, memory.stream))
    graph = value(memory.rig.end_capture(memory.stream))
    nodes, count = value(memory.raw.cuGraphGetNodes(graph, 4))
    return result, graph, nodes[:count]


@pytest.mark.parametrize("name", ["nothing", "readable", "untouchable", "pageable"])
def test_a_captured_fill_is_checked_when_the_graph_is_instantiated(memory: Memory, name: str) -> None:
    result, graph, nodes = captured(memory, "cuMemsetD2D8Async", getattr(memory, name), 64, 1, 10, 3)
    params = value(memory.raw.cuGraphMemsetNodeGetParams(nodes[0]))
    fields = (params.pitch, params.value, params.elementSize, params.width, params.height)
    assert (result, int(params.dst), fields) == ("SUCCESS", getattr(memory, name), (64, 1, 1, 10, 3))
    assert said(memory.raw.cuGraphInstantiate(graph, 0)) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("ends", "fields", "expected", "count"),
    [
        ("DD plain other", {}, "SUCCESS", 1),
        ("DD plain other", {"WidthInBytes": 0}, "SUCCESS", 0),
        ("DD plain other", {"srcPitch": 3}, "INVALID_VALUE", 0),
        ("DD nothing other", {}, "INVALID_VALUE", 0),
        ("UU nothing other", {}, "SUCCESS", 1),
        ("DD readable other", {}, "INVALID_VALUE", 0),
        ("DD untouchable other", {}, "INVALID_VALUE", 0),
        ("DD plain other", {"Height": 1 << 20}, "INVALID_VALUE", 0),
    ],
)
def test_a_captured_copy_is_checked_at_the_call(
    memory: Memory, ends: str, fields: dict[str, int], expected: str, count: int
) -> None:
    kinds, target, source = ends.split()
    result, graph, nodes = captured(memory, "cuMemcpy2DAsync", plane(memory, kinds, target, source, **fields))
    assert (result, len(nodes)) == (expected, count)
    memory.rig.instantiate(graph)


def test_what_a_graph_keeps_of_copies_and_fills(memory: Memory) -> None:
    raw = memory.raw
    _, _, nodes = captured(memory, "cuMemcpy2DAsync", plane(memory, "DH", "plain", "pinned", srcXInBytes=3, dstY=2))
    copy = value(raw.cuGraphMemcpyNodeGetParams(nodes[0]))
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (HOST_KIND, DEVICE_KIND)
    assert (copy.srcHost, int(copy.dstDevice)) == (memory.pinned, memory.plain)
    assert (copy.srcXInBytes, copy.dstY, copy.srcPitch, copy.srcHeight) == (3, 2, 64, 0)
    assert (copy.WidthInBytes, copy.Height, copy.Depth) == (10, 3, 1)
    for call, kinds, target, source in (
        ("cuMemcpyDtoDAsync", (DEVICE_KIND, DEVICE_KIND), memory.plain, memory.other),
        ("cuMemcpyHtoDAsync", (DEVICE_KIND, HOST_KIND), memory.plain, memory.pinned),
        ("cuMemcpyAsync", (UNIFIED, UNIFIED), memory.plain, memory.other),
    ):
        _, _, nodes = captured(memory, call, target, source, 100)
        copy = value(raw.cuGraphMemcpyNodeGetParams(nodes[0]))
        assert (int(copy.dstMemoryType), int(copy.srcMemoryType)) == kinds
        assert source == (copy.srcHost if kinds[1] == HOST_KIND else int(copy.srcDevice))
        assert (copy.WidthInBytes, copy.Height, copy.Depth, copy.srcPitch, copy.dstHeight) == (100, 1, 1, 0, 0)
    _, _, nodes = captured(memory, "cuMemsetD32Async", memory.plain, 3, 100)
    fill = value(raw.cuGraphMemsetNodeGetParams(nodes[0]))
    assert (fill.pitch, fill.value, fill.elementSize, fill.width, fill.height) == (0, 3, 4, 100, 1)
