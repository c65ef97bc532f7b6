"""Words that streams write and wait for: in batches, and of mapped memory of the own device and of another."""

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, LEGACY, NO_ACCESS, OWN, READ, READWRITE
from tests.facts.support import PAGE, UNRESERVED, MiB, Rig, said, value
from tests.facts.teams import Contexts
from tests.support import in_threads

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

    in_threads(outside)
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


SECOND = (DEVICE, 1, READWRITE)
AT_LEAST, EQUAL, AND, NOR, FLUSH_FIRST = 0, 1, 2, 3, 1 << 30


@pytest.fixture
def word(rig: Rig) -> int:
    """The first word of mapped memory, all of it zero, with three pages of addresses behind it."""
    start = rig.reserve(4 * PAGE)
    rig.map(start, rig.memory())
    assert rig.set_access(start, PAGE, OWN) == "SUCCESS"
    value(rig.raw.cuMemsetD8(start, 0, PAGE))
    rig.synchronize()
    return start


def write(rig: Rig, stream: Any, address: int, number: int, flags: int = 0) -> str:
    return said(rig.raw.cuStreamWriteValue32(stream, address, number, flags))


def wait(rig: Rig, stream: Any, address: int, number: int, flags: int = AT_LEAST) -> str:
    return said(rig.raw.cuStreamWaitValue32(stream, address, number, flags))


class TestOfTheOwnDevice:
    def test_a_stream_waits_for_another_one_s_write(self, rig: Rig, word: int) -> None:
        waiting, writing = rig.stream(), rig.stream()
        assert wait(rig, waiting, word, 1) == "SUCCESS"
        assert rig.held(waiting)
        assert write(rig, writing, word, 1) == "SUCCESS"
        assert rig.executed(waiting)
        assert rig.read(word, 4) == [1, 0, 0, 0]

    def test_a_copy_or_a_fill_ends_the_wait_too(self, rig: Rig, word: int) -> None:
        raw, waiting, writing = rig.raw, rig.stream(), rig.stream()
        for at in (0, 4):
            assert wait(rig, waiting, word + at, 5) == "SUCCESS"
            assert rig.held(waiting)
            if at:
                value(raw.cuMemsetD32Async(word + at, 6, 1, writing))
            else:
                value(raw.cuMemcpyHtoDAsync(word, bytearray(b"\5\0\0\0"), 4, writing))
            assert rig.executed(waiting)

    def test_comparisons(self, rig: Rig, word: int) -> None:
        stream, writer = rig.stream(), rig.stream()
        for comparison, operand, now, met in (
            (EQUAL, 5, 5, True),
            (AND, 4, 12, True),
            (NOR, 0xFFFFFFF0, 3, True),
            (NOR, 0xFFFFFFF0, 15, False),  # together they set all bits
            (AT_LEAST, 1, 0x7FFFFFFF, True),
            (AT_LEAST, 0, 0xFFFFFFFF, False),  # cyclic: 0 is one more
        ):
            assert write(rig, stream, word, now) == "SUCCESS"
            assert wait(rig, stream, word, operand, comparison) == "SUCCESS"
            assert rig.executed(stream) if met else rig.held(stream)
            assert write(rig, writer, word, operand) == "SUCCESS"
            assert rig.executed(writer)  # or it would overwrite the next number
            assert rig.executed(stream)

    def test_64_bits(self, rig: Rig, word: int) -> None:
        stream = rig.stream()
        assert said(rig.raw.cuStreamWriteValue64(stream, word + 8, 1 << 40, 0)) == "SUCCESS"
        assert said(rig.raw.cuStreamWaitValue64(stream, word + 8, 1 << 40, EQUAL)) == "SUCCESS"
        assert rig.executed(stream)

    def test_the_last_word_and_what_is_behind_it(self, rig: Rig, word: int) -> None:
        stream = rig.stream()
        assert write(rig, stream, word + PAGE - 4, 7) == "SUCCESS"
        for outside in (word + PAGE, word + 3 * PAGE):
            assert write(rig, stream, outside, 7) == "INVALID_VALUE"
            assert wait(rig, stream, outside, 7) == "INVALID_VALUE"
        assert rig.executed(stream)
        assert rig.read(word + PAGE - 4, 4) == [7, 0, 0, 0]

    def test_what_is_refused(self, rig: Rig, word: int) -> None:
        stream = rig.stream()
        assert write(rig, stream, word + 2, 7) == wait(rig, stream, word + 2, 7) == "INVALID_VALUE"
        assert [write(rig, stream, word, 7, flags) for flags in (1, 2)] == ["INVALID_VALUE"] * 2  # no memory barrier
        assert wait(rig, stream, word, 0, FLUSH_FIRST) == "NOT_SUPPORTED"
        assert rig.executed(stream)

    def test_the_legacy_stream(self, rig: Rig, word: int) -> None:
        assert write(rig, LEGACY, word, 9) == "SUCCESS"
        assert wait(rig, LEGACY, word, 9) == "SUCCESS"
        rig.synchronize()
        assert rig.read(word, 4) == [9, 0, 0, 0]

    def test_in_a_graph(self, rig: Rig, word: int) -> None:
        captured, stream = rig.stream(), rig.stream()
        rig.begin_capture(captured, 2)
        assert write(rig, captured, word, 9) == "SUCCESS"
        assert wait(rig, captured, word, 9) == "SUCCESS"
        graph = rig.instantiate(value(rig.end_capture(captured)))
        value(rig.raw.cuGraphLaunch(graph, stream))
        assert rig.executed(stream)
        assert rig.read(word, 4) == [9, 0, 0, 0]

    def test_who_may_not_use_the_memory(self, rig: Rig) -> None:
        stream = rig.stream()
        word = rig.mapping(PAGE)
        assert rig.get_access(word) == NO_ACCESS
        assert write(rig, stream, word, 0) == "INVALID_VALUE"
        assert wait(rig, stream, word, 0) == "INVALID_VALUE"
        assert rig.set_access(word, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert wait(rig, stream, word, 0) == "SUCCESS"
        assert rig.executed(stream)


@pytest.mark.gpus(2)
class TestOfTwoDevices:
    @pytest.fixture
    def streams(self, rig: Rig) -> tuple[Any, Any]:
        """One of each device."""
        return Contexts(rig).streams

    @pytest.fixture
    def words(self, rig: Rig) -> list[int]:
        """Memory of each device, which both may use."""
        words = [rig.mapping(PAGE, OWN, SECOND, id=device) for device in (0, 1)]
        for word in words:
            value(rig.raw.cuMemsetD8(word, 0, PAGE))
        rig.synchronize()
        return words

    def test_each_writes_the_other_s_memory_and_waits_for_its_own(
        self, rig: Rig, streams: tuple[Any, Any], words: list[int]
    ) -> None:
        for mine in (0, 1):
            assert wait(rig, streams[mine], words[mine], 1) == "SUCCESS"
            assert rig.held(streams[mine])
            assert write(rig, streams[1 - mine], words[mine], 1) == "SUCCESS"
            assert rig.executed(streams[mine]) and rig.executed(streams[1 - mine])

    def test_wait_for_a_word_of_the_other_s_memory(self, rig: Rig, streams: tuple[Any, Any], words: list[int]) -> None:
        first, second = streams
        assert wait(rig, first, words[1], 1) == "SUCCESS"
        assert rig.held(first)
        assert write(rig, second, words[1], 1) == "SUCCESS"
        assert rig.executed(first)

    def test_access_of_the_other_device_is_of_no_help(self, rig: Rig, streams: tuple[Any, Any]) -> None:
        word = rig.mapping(PAGE, SECOND)
        assert write(rig, streams[0], word, 0) == "INVALID_VALUE"
        assert wait(rig, streams[0], word, 0) == "INVALID_VALUE"
        assert rig.executed(streams[0])
