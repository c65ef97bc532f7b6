"""Batches of memory operations in a stream."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from tests.facts.support import UNRESERVED, MiB, Rig, in_new_thread, said, value

WAIT, WRITE, FLUSH, WAIT_64, WRITE_64, BARRIER = range(1, 7)  # CUstreamBatchMemOpType


class Words:
    """Pinned words, and batches for them."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.stream = rig, rig.stream()
        self.at = int(rig.pinned(4096))

    def operation(self, kind: int, address: int = 0, number: int = 0, flags: int = 0) -> Any:
        """An operation without an address has its flags in the place of the address."""
        one = self.rig.raw.CUstreamBatchMemOpParams()
        head = struct.pack("=iI", kind, flags if kind in (FLUSH, BARRIER) else 0)
        packed = head + struct.pack("=QQI", address, number, 0 if kind in (FLUSH, BARRIER) else flags)
        ctypes.memmove(int(one.getPtr()), packed.ljust(48, b"\0"), 48)
        return one

    def batch(self, *operations: tuple[int, ...], flags: int = 0) -> str:
        made = [self.operation(*one) for one in operations]
        return said(self.rig.raw.cuStreamBatchMemOp(self.stream, len(made), made, flags))

    def read(self, offset: int) -> int:
        value(self.rig.raw.cuStreamSynchronize(self.stream))
        return ctypes.c_uint32.from_address(self.at + offset).value


@pytest.fixture
def words(rig: Rig) -> Words:
    return Words(rig)


def test_one_after_the_other(words: Words) -> None:
    at, wide = words.at, 1 << 40 | 8
    done = words.batch((WRITE, at, 6), (WAIT, at, 6, 1), (WRITE_64, at + 8, wide), (WAIT_64, at + 8, wide))
    assert (done, words.read(0), words.read(8), words.read(12)) == ("SUCCESS", 6, 8, 1 << 8)
    assert words.batch((WRITE, at, 1), (WAIT, at + 64, 1), (WRITE, at + 4, 2)) == "SUCCESS"
    assert words.rig.held(words.stream)
    assert ctypes.c_uint32.from_address(at + 4).value == 0
    ctypes.c_uint32.from_address(at + 64).value = 1
    assert words.read(4) == 2


def test_all_or_nothing(words: Words) -> None:
    assert words.batch((WRITE, words.at, 5), (WRITE, UNRESERVED, 1)) == "INVALID_VALUE"
    assert words.batch((WRITE, words.at, 5), (0, words.at, 1)) == "INVALID_VALUE"
    assert words.read(0) == 0


def test_at_most_255(words: Words) -> None:
    assert words.batch(*[(WRITE, words.at, number) for number in range(255)]) == "SUCCESS"
    assert words.batch(*[(WRITE, words.at, 7)] * 256) == "INVALID_VALUE"
    assert words.read(0) == 254
    assert words.batch() == "SUCCESS"


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ((FLUSH,), "NOT_SUPPORTED"),
        ((BARRIER, 0, 0, 0), "SUCCESS"),
        ((BARRIER, 0, 0, 1), "SUCCESS"),
        ((BARRIER, 0, 0, 2), "INVALID_VALUE"),
        ((7,), "INVALID_VALUE"),
        ((8,), "INVALID_VALUE"),
    ],
)
def test_operations_without_a_word(words: Words, operation: tuple[int, ...], expected: str) -> None:
    assert words.batch(operation) == expected


def test_words(words: Words) -> None:
    rig, at = words.rig, words.at
    pool, page = rig.allocate(rig.pool(), MiB, words.stream), np.zeros(64, np.uint32)
    for kind, address, flags, expected in (
        (WRITE, at, 1, "INVALID_VALUE"),
        (WAIT, at, 1 << 30, "NOT_SUPPORTED"),
        (WAIT, at, 4, "INVALID_VALUE"),
        (WRITE, at + 2, 0, "INVALID_VALUE"),
        (WRITE_64, at + 4, 0, "INVALID_VALUE"),
        (WRITE, int(rig.plain(64)), 0, "SUCCESS"),
        (WRITE, pool, 0, "INVALID_VALUE"),
        (WRITE, page.ctypes.data, 0, "INVALID_VALUE"),
        (WRITE, at + 4092, 0, "SUCCESS"),
        (WRITE, at + 4096, 0, "INVALID_VALUE"),
        (WRITE, 0, 0, "INVALID_VALUE"),
    ):
        assert words.batch((kind, address, 0, flags)) == expected, (kind, address - at, flags)
    assert words.batch((WRITE, at, 1), flags=1) == "INVALID_VALUE"


@pytest.mark.usefixtures("nothing_reserved")
def test_memory_of_a_graph_has_no_words(words: Words) -> None:
    rig, stream = words.rig, words.stream
    rig.begin_capture(stream)
    pointer = value(rig.raw.cuMemAllocAsync(4 * MiB, stream))
    instance = rig.instantiate(value(rig.end_capture(stream)))
    value(rig.raw.cuGraphLaunch(instance, stream))
    assert words.batch((WRITE, int(pointer), 1)) == "INVALID_VALUE"
    assert said(rig.raw.cuStreamWaitValue32(stream, pointer, 0, 0)) == "INVALID_VALUE"
    rig.free(pointer, stream)


def test_without_a_context(words: Words) -> None:
    def outside() -> None:
        assert words.batch((WRITE, words.at, 3)) == "SUCCESS"

    in_new_thread(outside)
    assert words.read(0) == 3


def test_a_batch_is_one_node_of_a_graph(words: Words) -> None:
    raw, rig = words.rig.raw, words.rig
    rig.begin_capture(words.stream)
    assert words.batch((WRITE, words.at, 3), (WRITE, words.at + 4, 4)) == "SUCCESS"
    assert words.batch() == "SUCCESS"
    assert words.batch((0,)) == "INVALID_VALUE"
    assert words.batch((WRITE, words.at + 2, 3)) == "INVALID_VALUE"
    assert words.batch((BARRIER,)) == "SUCCESS"
    graph = value(rig.end_capture(words.stream))
    nodes, count = value(raw.cuGraphGetNodes(graph, 3))
    kind = raw.CUgraphNodeType.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
    assert (count, [value(raw.cuGraphNodeGetType(node)) for node in nodes]) == (3, [kind] * 3)
    value(raw.cuGraphLaunch(rig.instantiate(graph), words.stream))
    assert (words.read(0), words.read(4)) == (3, 4)
