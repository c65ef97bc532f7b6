"""Attributes of streams: what they are at first, what can be set, and what else says of a stream."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.facts.enums import LEGACY
from tests.facts.support import UNRESERVED, Rig, in_new_thread, said, value

WINDOW, POLICY, PRIORITY, DOMAIN_MAP, DOMAIN = 1, 3, 8, 9, 10  # CUstreamAttrID
FORMATS = {WINDOW: "=QQfii", POLICY: "=i", PRIORITY: "=i", DOMAIN_MAP: "=BB", DOMAIN: "=i"}
DEFAULTS = {WINDOW: (0, 0, 0.0, 0, 0), POLICY: (-1,), PRIORITY: (0,), DOMAIN_MAP: (0, 1), DOMAIN: (0,)}


def attribute(rig: Rig, number: int) -> Any:
    return rig.raw.CUstreamAttrID(number)


def read(rig: Rig, stream: Any, number: int) -> tuple[float, ...]:
    got = value(rig.raw.cuStreamGetAttribute(stream, attribute(rig, number)))
    return struct.unpack_from(FORMATS[number], ctypes.string_at(int(got.getPtr()), 64))


def write(rig: Rig, stream: Any, number: int, *given: float) -> str:
    wanted = rig.raw.CUstreamAttrValue()
    packed = struct.pack(FORMATS[number], *given).ljust(64, b"\0")
    ctypes.memmove(int(wanted.getPtr()), packed, 64)
    return said(rig.raw.cuStreamSetAttribute(stream, attribute(rig, number), wanted))


def on_both(rig: Rig, check: Callable[[Any], None]) -> None:
    """Check a stream and a new thread's own default stream, whose attributes no test has set."""

    def in_thread() -> None:
        value(rig.raw.cuCtxSetCurrent(rig.context))
        check(rig.per_thread)

    check(rig.stream())
    in_new_thread(in_thread)


@pytest.mark.usefixtures("same_architecture")
def test_defaults(rig: Rig) -> None:
    """Also of a default stream; other attributes are those of launches."""

    def check(stream: Any) -> None:
        assert {number: read(rig, stream, number) for number in FORMATS} == DEFAULTS
        for one in rig.raw.CUstreamAttrID:
            if int(one) not in FORMATS:
                assert said(rig.raw.cuStreamGetAttribute(stream, one)) == "INVALID_VALUE"

    on_both(rig, check)


ACCEPTED: list[tuple[int, tuple[float, ...], tuple[float, ...]]] = [
    *((POLICY, (1,), (1,)), (POLICY, (4,), (4,))),
    *((PRIORITY, (-5,), (-5,)), (PRIORITY, (-6,), (-5,)), (PRIORITY, (5,), (0,))),
    *((DOMAIN, (1,), (1,)), (DOMAIN_MAP, (2, 3), (2, 3))),
    (WINDOW, (UNRESERVED, 4096, 0.5, 2, 1), (UNRESERVED, 4096, 0.5, 2, 1)),
    (WINDOW, (0, 1 << 27, 1.0, 0, 0), (0, 1 << 27, 1.0, 0, 0)),
]
REFUSED: dict[int, list[tuple[float, ...]]] = {
    POLICY: [(0,), (5,)],
    DOMAIN: [(2,)],
    DOMAIN_MAP: [(0, 4)],
    WINDOW: [(0, 4096, 2.0, 2, 1), (0, 4096, -1.0, 2, 1), (0, 4096, 1.0, 1, 2), (0, 1 << 40, 1.0, 1, 0)],
}


@pytest.mark.usefixtures("same_architecture")
def test_what_can_be_set(rig: Rig) -> None:
    def check(stream: Any) -> None:
        for number, given, kept in ACCEPTED:
            assert write(rig, stream, number, *given) == "SUCCESS"
            assert read(rig, stream, number) == kept
            if number == PRIORITY:
                assert value(rig.raw.cuStreamGetPriority(stream)) == kept[0]

    on_both(rig, check)


@pytest.mark.usefixtures("same_architecture")
def test_what_cannot_be_set(rig: Rig) -> None:
    stream = rig.stream()
    for number, wrong in REFUSED.items():
        assert [write(rig, stream, number, *given) for given in wrong] == ["INVALID_VALUE"] * len(wrong)
        assert read(rig, stream, number) == DEFAULTS[number]


def test_copies_of_all(rig: Rig) -> None:
    raw, source, target = rig.raw, rig.stream(), rig.stream()
    write(rig, source, POLICY, 3)
    write(rig, source, PRIORITY, -2)
    write(rig, source, WINDOW, UNRESERVED, 4096, 0.5, 2, 1)
    assert said(raw.cuStreamCopyAttributes(target, source)) == "SUCCESS"
    assert [read(rig, target, number) for number in FORMATS] == [read(rig, source, number) for number in FORMATS]
    assert said(raw.cuStreamCopyAttributes(target, target)) == "SUCCESS"
    by_flags = (0, 0) if "cuCtxCreate_v4" in dir(raw) else (None, 0, 0)  # with parameters since CUDA 13
    other = value(raw.cuCtxCreate(*by_flags))
    elsewhere = value(raw.cuStreamCreate(1))
    rig.use(rig.context)
    assert said(raw.cuStreamCopyAttributes(elsewhere, source)) == "INVALID_VALUE"
    value(raw.cuCtxDestroy(other))


def test_neither_a_context_nor_a_capture_matters(rig: Rig) -> None:
    raw, stream, other = rig.raw, rig.stream(), rig.stream()

    def outside() -> None:
        assert read(rig, stream, PRIORITY) == (0,)
        assert write(rig, stream, POLICY, 2) == "SUCCESS"
        assert said(raw.cuStreamGetAttribute(LEGACY, attribute(rig, PRIORITY))) == "INVALID_CONTEXT"

    in_new_thread(outside)
    rig.begin_capture(stream)
    assert read(rig, stream, POLICY) == (2,)
    assert write(rig, stream, POLICY, 1) == "SUCCESS"
    assert said(raw.cuStreamCopyAttributes(other, stream)) == "SUCCESS"
    assert said(raw.cuStreamCopyAttributes(stream, other)) == "SUCCESS"
    assert rig.capture_status(stream) == "ACTIVE"


class TestCallbacks:
    def callback(self, rig: Rig, seen: list[tuple[int, int]]) -> tuple[Any, Any]:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        function = kind(lambda stream, status, data: seen.append((status, data)))
        return function, rig.raw.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)

    def test_in_stream_order(self, rig: Rig) -> None:
        raw, stream, gate, seen = rig.raw, rig.stream(), rig.gate(), list[tuple[int, int]]()
        kept, handle = self.callback(rig, seen)
        gate.hold(stream)
        assert said(raw.cuStreamAddCallback(stream, handle, 7, 0)) == "SUCCESS"
        assert not seen
        gate.open()
        value(raw.cuStreamSynchronize(stream))
        assert seen == [(0, 7)]
        assert said(raw.cuStreamAddCallback(stream, handle, 7, 1)) == "INVALID_VALUE"
        del kept

    def test_not_during_a_capture(self, rig: Rig) -> None:
        stream = rig.stream()
        kept, handle = self.callback(rig, [])
        rig.begin_capture(stream)
        assert said(rig.raw.cuStreamAddCallback(stream, handle, 7, 0)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert rig.capture_status(stream) == "INVALIDATED"
        del kept
