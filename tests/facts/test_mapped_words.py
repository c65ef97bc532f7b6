"""Words of memory that was mapped by hand, written and waited for by streams: of the own device, and of another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts.enums import DEVICE, LEGACY, NO_ACCESS, READ, READWRITE
from tests.facts.support import PAGE, Rig, said, value
from tests.facts.teams import Contexts

OWN, SECOND = (DEVICE, 0, READWRITE), (DEVICE, 1, READWRITE)
AT_LEAST, EQUAL, AND, NOR, FLUSH = 0, 1, 2, 3, 1 << 30


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
        stream = rig.stream()
        for comparison, operand, now, met in (
            (EQUAL, 5, 5, True),
            (AND, 4, 12, True),
            (NOR, 0xFFFFFFF0, 3, True),
            (AT_LEAST, 1, 0x7FFFFFFF, True),
            (AT_LEAST, 0, 0xFFFFFFFF, False),  # cyclic: 0 is one more
        ):
            assert write(rig, stream, word, now) == "SUCCESS"
            assert wait(rig, stream, word, operand, comparison) == "SUCCESS"
            assert rig.executed(stream) if met else rig.held(stream)
            assert write(rig, rig.stream(), word, operand) == "SUCCESS"
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
        assert wait(rig, stream, word, 0, FLUSH) == "NOT_SUPPORTED"
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

    def test_waiting_for_a_word_of_the_other_s_memory(
        self, rig: Rig, streams: tuple[Any, Any], words: list[int]
    ) -> None:
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
