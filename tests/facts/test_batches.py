"""Copies in batches, and calls for managed memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, HOST, LEGACY, READ
from tests.facts.support import PAGE, MiB, Rig, in_new_thread, said, value

IN_STREAM, AT_CALL, ANY = 1, 2, 3  # CUmemcpySrcAccessOrder


class Batch:
    """Memory of every kind, and batches of copies of 64 bytes between it."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.stream = rig, rig.raw, rig.stream()
        self.array = np.zeros(MiB, np.uint8)
        self.places = {
            "plain": int(rig.plain(MiB)),
            "other": int(rig.plain(MiB)),
            "pinned": int(rig.pinned(4096)),
            "pageable": self.array.ctypes.data,
            "pool": rig.allocate(rig.pool(), MiB, self.stream),
            "readable": rig.mapping(PAGE, (DEVICE, 0, READ)),
            "untouchable": rig.mapping(PAGE),
            "null": 0,
        }
        self.places["end"] = self.places["plain"] + MiB - 8
        rig.synchronize()

    def attributes(self, order: int = IN_STREAM, flags: int = 0, hint: tuple[int, int] | None = None) -> Any:
        made = self.raw.CUmemcpyAttributes()
        ctypes.c_int.from_address(int(made.getPtr())).value = order
        made.flags = flags
        if hint is not None:
            made.srcLocHint = self.rig.location(*hint)
        return made

    def copy(
        self,
        *pairs: str,
        size: int = 64,
        attributes: list[Any] | None = None,
        at: tuple[int, ...] = (0,),
        stream: Any = None,
    ) -> str:
        ends = [[self.places[name] for name in pair.split()] for pair in pairs]
        targets, sources = ([self.raw.CUdeviceptr(pair[side]) for pair in ends] for side in (0, 1))
        given = [self.attributes()] if attributes is None else attributes
        stream = self.stream if stream is None else stream
        sizes = [size] * len(pairs)
        return said(
            self.raw.cuMemcpyBatchAsync(
                targets, sources, sizes, len(pairs), given, list(at), len(given), self.raw.CUstream(int(stream))
            )
        )


@pytest.fixture
def batch(rig: Rig) -> Batch:
    if not hasattr(rig.raw, "cuMemGetDefaultMemPool"):
        pytest.skip("the bindings before CUDA 13 take other arguments")
    return Batch(rig)


def test_ends(batch: Batch) -> None:
    for pair in ("plain other", "plain pageable", "pageable plain", "pinned plain", "pool plain", "plain readable"):
        assert batch.copy(pair) == "SUCCESS"
    for pair in ("null other", "end other", "readable other", "untouchable other", "plain untouchable"):
        assert batch.copy("plain other", pair) == "INVALID_VALUE"


def test_counts(batch: Batch) -> None:
    one, other = batch.attributes(), batch.attributes(ANY)
    assert batch.copy() == "INVALID_VALUE"
    assert batch.copy("plain other", size=0) == "INVALID_VALUE"
    assert batch.copy("plain other", attributes=[], at=()) == "INVALID_VALUE"
    pairs = ("plain other", "plain other")
    assert batch.copy(*pairs, attributes=[one, other], at=(0, 1)) == "SUCCESS"
    assert batch.copy(*pairs, attributes=[one, other], at=(0, 0)) == "INVALID_VALUE"
    assert batch.copy(*pairs, at=(1,)) == "INVALID_VALUE"
    assert batch.copy("plain other", attributes=[one, other], at=(0, 1)) == "INVALID_VALUE"


ATTRIBUTES: dict[str, list[dict[str, Any]]] = {
    "SUCCESS": [{"order": AT_CALL}, {"flags": 1}, {"hint": (HOST, 0)}],
    "INVALID_VALUE": [{"order": 0}, {"order": 4}, {"flags": 2}, {"hint": (DEVICE, 99)}],
}


def test_attributes(batch: Batch) -> None:
    for expected, all_given in ATTRIBUTES.items():
        for given in all_given:
            assert batch.copy("plain pageable", attributes=[batch.attributes(**given)]) == expected, given


def test_streams(batch: Batch) -> None:
    assert batch.copy("plain other", stream=LEGACY) == "INVALID_VALUE"
    assert batch.copy("plain other", stream=1) == "INVALID_VALUE"
    assert batch.copy("plain other", stream=batch.rig.per_thread) == "SUCCESS"

    def outside() -> None:
        assert batch.copy("plain other") == "INVALID_VALUE"

    in_new_thread(outside)
    batch.rig.begin_capture(batch.stream)
    assert batch.copy("plain other") == "STREAM_CAPTURE_UNSUPPORTED"
    assert batch.rig.capture_status(batch.stream) == "ACTIVE"


WAITS = {
    "plain pageable": (True, False, False),
    "pageable plain": (False, True, False),
    "pageable pinned": (False, False, False),
    "pinned pageable": (False, False, False),
    "pinned pinned": (False, True, False),
    "plain pinned": (False, True, False),
    "pinned plain": (False, True, False),
}


@pytest.mark.parametrize("pair", WAITS)
def test_which_are_waited_for(batch: Batch, pair: str) -> None:
    rig, gate = batch.rig, batch.rig.gate()
    for order, waits in zip((IN_STREAM, AT_CALL, ANY), WAITS[pair], strict=True):
        gate.hold(batch.stream)
        with gate.opening_after(0.03 if waits else 5):
            assert batch.copy(pair, attributes=[batch.attributes(order)]) == "SUCCESS"
            assert gate.is_open == waits
        rig.synchronize()


def test_pageable_memory_is_read_before_the_call_returns(batch: Batch) -> None:
    gate, plain = batch.rig.gate(), batch.places["plain"]
    for order in (AT_CALL, ANY):
        value(batch.raw.cuMemsetD8(plain, 0, 64))
        batch.array[:64] = 1
        gate.hold(batch.stream)
        assert batch.copy("plain pageable", attributes=[batch.attributes(order)]) == "SUCCESS"
        batch.array[:64] = 2
        gate.open()
        assert batch.rig.read(plain, 64) == [1] * 64


def test_what_is_not_managed_is_refused(batch: Batch) -> None:
    raw, stream, own = batch.raw, batch.stream, batch.rig.location(DEVICE)
    for name in ("plain", "pinned", "pageable", "pool", "readable"):
        address = batch.places[name]
        assert said(raw.cuMemPrefetchAsync(address, 4096, own, 0, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemAdvise(address, 4096, raw.CUmem_advise(1), own)) == "INVALID_VALUE"
    elsewhere = batch.rig.location(DEVICE, 99)
    assert said(raw.cuMemPrefetchAsync(batch.places["plain"], 4096, elsewhere, 0, stream)) == "INVALID_DEVICE"
    assert said(raw.cuStreamAttachMemAsync(stream, batch.places["plain"], 0, 4)) == "INVALID_VALUE"


def test_setting_that_copies_are_waited_for(batch: Batch) -> None:
    """It can be read again, and changes nothing for calls that need not wait."""
    raw, gate = batch.raw, batch.rig.gate()
    attribute = raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    for name in ("plain", "pool", "pinned"):
        assert said(raw.cuPointerSetAttribute(True, attribute, batch.places[name])) == "SUCCESS"
        assert value(raw.cuPointerGetAttribute(attribute, batch.places[name])) is True
    assert said(raw.cuPointerSetAttribute(True, attribute, batch.places["readable"])) == "NOT_SUPPORTED"
    assert said(raw.cuPointerSetAttribute(True, attribute, batch.places["pageable"])) == "INVALID_VALUE"
    kind = raw.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert said(raw.cuPointerSetAttribute(1, kind, batch.places["plain"])) == "INVALID_VALUE"
    gate.hold(batch.stream)
    with gate.opening_after(60):
        value(raw.cuMemcpyDtoDAsync(batch.places["plain"], batch.places["other"], 64, batch.stream))
        assert not gate.is_open


class TestBoxes:
    def box(self, batch: Batch, pair: str, **given: int) -> Any:
        """Two rows of eight bytes, sixteen bytes apart, of one layer of four."""
        made, places = batch.raw.CUDA_MEMCPY3D_BATCH_OP(), pair.split()
        for side, name, row, rows in ((made.dst, places[0], "drow", "drows"), (made.src, places[1], "srow", "srows")):
            side.type = batch.raw.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
            side.op.ptr.ptr = batch.raw.CUdeviceptr(batch.places[name])
            side.op.ptr.rowLength, side.op.ptr.layerHeight = given.get(row, 16), given.get(rows, 4)
        for field, default in (("width", 8), ("height", 2), ("depth", 1)):
            setattr(made.extent, field, given.get(field, default))
        if given.get("order", IN_STREAM):
            made.srcAccessOrder = batch.raw.CUmemcpySrcAccessOrder(given.get("order", IN_STREAM))
        made.flags = given.get("flags", 0)
        return made

    def copy(self, batch: Batch, *boxes: Any, stream: Any = None, flags: int = 0) -> str:
        stream = batch.stream if stream is None else batch.raw.CUstream(stream)
        return said(batch.raw.cuMemcpy3DBatchAsync(len(boxes), list(boxes), flags, stream))

    @pytest.mark.parametrize(
        ("given", "places"),
        [
            ({}, {0: 0, 16: 16}),
            ({"srow": 0}, {0: 0, 16: 8}),
            ({"drow": 0}, {0: 0, 8: 16}),
            ({"drows": 0, "srows": 0, "depth": 2}, {0: 0, 16: 16, 32: 32, 48: 48}),
            ({"drow": 0, "srow": 0, "drows": 0, "srows": 0, "depth": 2}, {0: 0, 8: 8, 16: 16, 24: 24}),
        ],
    )
    def test_a_length_of_zero_is_that_of_what_is_copied(
        self, batch: Batch, given: dict[str, int], places: dict[int, int]
    ) -> None:
        batch.array[:256] = range(256)
        value(batch.raw.cuMemcpyHtoD(batch.places["other"], batch.array, 256))
        value(batch.raw.cuMemsetD8(batch.places["plain"], 255, 256))
        value(batch.raw.cuCtxSynchronize())  # the stream of the copy does not wait for the legacy one
        assert self.copy(batch, self.box(batch, "plain other", **given)) == "SUCCESS"
        expected = [255] * 64
        for target, source in places.items():
            expected[target : target + 8] = range(source, source + 8)
        assert batch.rig.read(batch.places["plain"], 64) == expected

    def test_what_is_refused(self, batch: Batch) -> None:
        good = self.box(batch, "plain other")
        wrong = [{"srow": 7}, {"srow": 7, "height": 1}, {"srows": 1}, {"flags": 2}]
        for given in (*wrong, *({field: 0} for field in ("width", "height", "depth", "order"))):
            assert self.copy(batch, self.box(batch, "plain other", **given)) == "INVALID_VALUE"
        for pair in ("null other", "end other"):
            assert self.copy(batch, good, self.box(batch, pair)) == "INVALID_VALUE"
        assert self.copy(batch) == "INVALID_VALUE"
        assert self.copy(batch, good, flags=1) == "INVALID_VALUE"
        assert self.copy(batch, good, stream=0) == "INVALID_VALUE"
        assert self.copy(batch, good, stream=2) == "SUCCESS"
        batch.rig.begin_capture(batch.stream)
        assert self.copy(batch, good) == "STREAM_CAPTURE_UNSUPPORTED"
        assert batch.rig.capture_status(batch.stream) == "ACTIVE"

    @pytest.mark.parametrize(
        ("pair", "waits"),
        [
            ("plain pageable", (False, True, False)),
            ("pageable plain", (True, True, True)),
            ("plain pinned", (False, True, False)),
            ("pinned plain", (False, True, False)),
        ],
    )
    def test_which_are_waited_for(self, batch: Batch, pair: str, waits: tuple[bool, ...]) -> None:
        rig, gate = batch.rig, batch.rig.gate()
        for order, wait in zip((IN_STREAM, AT_CALL, ANY), waits, strict=True):
            gate.hold(batch.stream)
            with gate.opening_after(0.03 if wait else 5):
                assert self.copy(batch, self.box(batch, pair, order=order)) == "SUCCESS"
                assert gate.is_open == wait
            rig.synchronize()
