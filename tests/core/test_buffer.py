"""Buffers: what they are, filling, copying, views, and freeing."""

import array
import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.testing import Gate
from tests.support import KEEP, MiB, each_raises, executed, holds, in_threads, names, pending, read

COUNTED = bytes(range(64))


def test_what_it_tells(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with pool.allocate(1000, stream) as buffer, pool.allocate(1000, stream) as other:
        assert buffer.nbytes == len(buffer) == 1000
        assert buffer.stream is stream and buffer.owner is pool
        assert buffer.location == sa.MemLocation.device(0)
        assert buffer.device_accessible and not buffer.host_accessible and not buffer.freed
        assert hex(buffer.address) in repr(buffer) and "1000" in repr(buffer)
        assert buffer != other and weakref.ref(buffer)() is buffer


class TestFreeing:
    @pytest.mark.parametrize("end", ["returns", "raises", "frees"])
    def test_block(self, pool: sa.MemoryPool, stream: sa.Stream, end: str) -> None:
        with contextlib.suppress(KeyError), pool.allocate(64, stream) as buffer:
            assert pool.statistics().used == 64
            if end == "frees":
                buffer.free()
            if end == "raises":
                raise KeyError
        assert buffer.freed and pool.statistics().used == 0

    def test_on_another_stream(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, other: sa.Stream) -> None:
        """The memory is free after the other stream's work: only there is it used again while that is pending."""
        buffer = pool.allocate(20 * MiB, stream)
        address = buffer.address
        other.wait(stream)
        gate.hold(other)
        buffer.free(other)
        with pool.allocate(20 * MiB, other) as again:
            assert again.address == address
        gate.open()


class TestFill:
    @pytest.mark.parametrize(
        ("value", "width", "pattern"),
        [
            (255, None, b"\xff"),
            (-128, None, b"\x80"),
            (7, 1, b"\7"),
            (0x1234, 2, b"\x34\x12"),
            (-32768, 2, b"\x00\x80"),
            (0xDEADBEEF, 4, b"\xef\xbe\xad\xde"),
            (-(1 << 31), 4, b"\x00\x00\x00\x80"),
            (b"\x01\x02", None, b"\x01\x02"),
            (b"\x01\x02\x03\x04", 4, b"\x01\x02\x03\x04"),
            (np.int8(-1), None, b"\xff"),
            (np.float16(1.0), None, b"\x00\x3c"),
            (np.uint32(1), 4, b"\x01\x00\x00\x00"),
        ],
        ids=repr,
    )
    def test_pattern(self, buffer: sa.Buffer, value: Any, width: int | None, pattern: bytes) -> None:
        buffer.fill(value, width=width)
        assert read(buffer).tobytes() == pattern * (64 // len(pattern))

    @pytest.mark.parametrize(
        ("value", "width", "error"),
        [
            (256, None, ValueError),
            (-129, None, ValueError),
            (1 << 32, 4, ValueError),
            (-(1 << 31) - 1, 4, ValueError),
            (1, 3, ValueError),
            (1, 0, ValueError),
            (b"abc", None, ValueError),
            (b"ab", 4, ValueError),
            (np.int64(1), None, ValueError),
            (np.uint8(1), 2, ValueError),
            (1.5, None, TypeError),
            (True, None, TypeError),
            (None, None, TypeError),
        ],
    )
    def test_no_pattern(self, buffer: sa.Buffer, value: Any, width: int | None, error: type[Exception]) -> None:
        with pytest.raises(error):
            buffer.fill(value, width=width)
        assert read(buffer).tobytes() == COUNTED

    @pytest.mark.parametrize(("start", "stop", "width"), [(0, 63, 2), (0, 62, 4), (1, 9, 2), (2, 10, 4)])
    def test_size_or_address_that_is_no_multiple(self, buffer: sa.Buffer, start: int, stop: int, width: int) -> None:
        with pytest.raises(ValueError, match=f"width={width}"):
            buffer[start:stop].fill(0, width=width)

    def test_bounds(self, buffer: sa.Buffer) -> None:
        buffer[2:10].fill(0xFFFF, width=2)
        buffer[12:16].fill(-1, width=4)
        buffer[63:].fill(0)
        expected = bytearray(COUNTED)
        expected[2:10] = b"\xff" * 8
        expected[12:16] = b"\xff" * 4
        expected[63] = 0
        assert read(buffer).tobytes() == bytes(expected)


HOST: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda data: memoryview(bytearray(data)),
    "array": lambda data: array.array("I", data),
    "numpy": lambda data: np.frombuffer(bytearray(data), np.int16).reshape(4, 8),
    "ctypes": (ctypes.c_uint32 * 16).from_buffer_copy,
}


class Interface:
    """Another library's array: only its ``__cuda_array_interface__`` is known."""

    def __init__(self, memory: sa.Memory, **fields: Any) -> None:
        self._memory = memory
        plain = {"shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}
        self.__cuda_array_interface__ = plain | fields


class TestCopy:
    @pytest.mark.parametrize("name", HOST)
    def test_with_host_memory(self, buffer: sa.Buffer, name: str) -> None:
        data = bytes(range(100, 164))
        source, target = HOST[name](data), HOST[name](bytes(64))
        buffer.copy_from(source)
        buffer.copy_to(target)
        buffer.stream.synchronize()
        assert bytes(memoryview(target)) == data

    @pytest.mark.parametrize(
        "fields",
        [{}, {"strides": (1,)}, {"shape": (4, 4), "typestr": "<f4", "strides": (16, 4)}, {"stream": None}],
        ids=str,
    )
    def test_with_another_library_s_array(self, buffer: sa.Buffer, pool: sa.MemoryPool, fields: dict[str, Any]) -> None:
        with pool.allocate(64, buffer.stream) as memory:
            theirs = Interface(memory, **fields)
            buffer.copy_to(theirs)
            assert read(memory).tobytes() == COUNTED
            memory.fill(5)
            buffer.copy_from(theirs)
            assert holds(buffer, 5)

    def test_another_library_s_array_says_after_which_stream(
        self, device: sa.Device, buffer: sa.Buffer, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate
    ) -> None:
        """Version 3 of the interface: whoever uses the memory does so after the work of the stream that it names."""
        with device.create_stream() as theirs, pool.allocate(64, stream) as memory:
            stream.synchronize()
            gate.hold(theirs)
            memory.fill(6, theirs)
            buffer.copy_from(Interface(memory, stream=theirs.handle))
            assert pending(stream)
            gate.open()
            assert holds(buffer, 6)

    def test_to_a_read_only_array(self, buffer: sa.Buffer, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, buffer.stream) as memory:
            constant = Interface(memory, data=(memory.address, True))
            with pytest.raises(ValueError, match="read-only"):
                buffer.copy_to(constant)
            memory.fill(3)
            buffer.copy_from(constant)
            assert holds(buffer, 3)

    @pytest.mark.parametrize("make", [bytes, lambda size: memoryview(bytes(size))])
    def test_to_read_only_memory(self, buffer: sa.Buffer, make: Callable[[int], Any]) -> None:
        with pytest.raises(ValueError, match="read-only"):
            buffer.copy_to(make(64))

    @pytest.mark.parametrize(
        ("other", "error", "says"),
        [
            (np.zeros(128, np.uint8)[::2], ValueError, "contiguous"),
            (memoryview(bytearray(128))[::2], ValueError, "contiguous"),
            (bytearray(63), ValueError, "63"),
            (bytearray(65), ValueError, "65"),
            (None, TypeError, "target|source"),
            ("text", TypeError, "target|source"),
            ([0] * 64, TypeError, "target|source"),
            # Fields of another library's array.
            ({"strides": (2,)}, ValueError, "contiguous"),
            ({"shape": (4, 4), "typestr": "<f4", "strides": (4, 16)}, ValueError, "contiguous"),
            ({"shape": (16, 2), "typestr": "<f4"}, ValueError, "128"),
        ],
    )
    def test_with_no_memory_of_its_size(self, buffer: sa.Buffer, other: Any, error: type[Exception], says: str) -> None:
        for copy in (buffer.copy_to, buffer.copy_from):
            with pytest.raises(error, match=says):
                copy(Interface(buffer, **other) if isinstance(other, dict) else other)

    def test_on_another_stream(self, buffer: sa.Buffer, gate: Gate, other: sa.Stream) -> None:
        buffer.stream.synchronize()
        gate.hold(buffer.stream)
        target = bytearray(64)
        buffer.copy_to(target, stream=other)
        assert bytes(target) == COUNTED
        buffer.copy_from(bytes(64), stream=other)
        buffer[:32].fill(9, other)
        assert executed(other) and pending(buffer.stream)
        gate.open()
        assert holds(buffer[:32], 9) and holds(buffer[32:], 0)

    def test_runs_under_its_stream_s_context(self, buffer: sa.Buffer, pool: sa.MemoryPool) -> None:
        """Programming guide 4.3.5.1: from a thread without a current context, too."""

        def work() -> bytes:
            with pool.allocate(64, buffer.stream) as other:
                other.copy_from(buffer)
                target = bytearray(64)
                other.copy_to(target)
                return bytes(target)

        assert in_threads(work) == [COUNTED]


def test_work_of_nothing(traced: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
    with pool.allocate(0, stream) as empty:
        for value in (1, b"ab", np.float32(1)):
            empty.fill(value)
        empty.copy_to(bytearray())
        empty.copy_from(np.zeros((0, 3)))
        empty.copy_to(empty)
        assert not [name for name in names(traced) if name.startswith(("cuMemcpy", "cuMemset"))]


@pytest.mark.gpus(2)
class TestTwoDevices:
    @pytest.fixture
    def theirs(self, peer: sa.Device) -> Any:
        """64 bytes on device 1 with the value 1."""
        with peer.create_stream() as stream, sa.MemoryPool(peer, release_threshold=KEEP) as pool:
            with pool.allocate(64, stream) as buffer:
                buffer.fill(1)
                stream.synchronize()
                yield buffer
            stream.synchronize()

    @pytest.mark.parametrize("on", ["own", "other"])
    def test_copies(self, buffer: sa.Buffer, theirs: sa.Buffer, pool: sa.MemoryPool, on: str) -> None:
        """Copies between devices need no access to each other's memory, on either device's stream."""
        stream = {"own": buffer.stream, "other": theirs.stream}[on]
        with pool.allocate(64, buffer.stream) as second:
            buffer.stream.synchronize()
            second.copy_from(theirs, stream)
            theirs[8:16].copy_from(buffer[16:24], stream)
            second[:8].copy_from(buffer[:8], stream)
            buffer[24:].copy_to(theirs[24:], stream)
            stream.synchronize()
            assert read(second).tobytes() == bytes([*range(8), *[1] * 56])
            assert read(theirs).tobytes() == bytes([*[1] * 8, *range(16, 24), *[1] * 8, *range(24, 64)])

    def test_work_that_needs_access(self, buffer: sa.Buffer, pool: sa.MemoryPool, peer: sa.Device) -> None:
        buffer.stream.synchronize()
        target = bytearray(64)
        with peer.create_stream() as stream:
            each_raises(sa.InvalidValueError, lambda: buffer.fill(3, stream), match="set_access")
            each_raises(sa.InvalidValueError, lambda: buffer.copy_to(target, stream), match="set_access")
            pool.set_access(peer, sa.MemAccess.READWRITE)
            buffer.fill(3, stream)
            buffer.copy_to(target, stream)
            stream.synchronize()
            assert bytes(target) == bytes([3] * 64)

    def test_allocation_on_the_other_s_stream(self, pool: sa.MemoryPool, peer: sa.Device) -> None:
        with peer.create_stream() as stream, pool.allocate(64, stream) as buffer:
            before = buffer.device_accessible
            pool.set_access(peer, sa.MemAccess.READWRITE)
            assert [before, buffer.device_accessible] == [False, True]
            buffer.fill(2)
            assert holds(buffer, 2)


class TestViews:
    @pytest.mark.parametrize(
        ("item", "start", "stop"),
        [
            (slice(2, 5), 2, 5),
            (slice(None), 0, 64),
            (slice(-10, -5), 54, 59),
            (slice(9, 3), 9, 9),
            (slice(64, 64), 64, 64),
            (slice(np.int64(1), np.int64(2)), 1, 2),
        ],
    )
    def test_range(self, buffer: sa.Buffer, item: slice, start: int, stop: int) -> None:
        view = buffer[item]
        assert isinstance(view, sa.BufferView) and isinstance(view, sa.Memory)
        assert (view.address, view.nbytes, len(view)) == (buffer.address + start, stop - start, stop - start)
        assert view.owner is buffer and view.stream is buffer.stream and view.location == buffer.location
        assert read(view).tobytes() == bytes(range(start, stop)) and f"{start}:{stop}" in repr(view)

    def test_of_a_view(self, buffer: sa.Buffer) -> None:
        view = buffer.view(8, 32).view(4)[:8][-2:]
        assert (view.address, view.nbytes) == (buffer.address + 18, 2)
        view.fill(0)
        assert read(buffer).tobytes() == bytes([*range(18), 0, 0, *range(20, 64)])

    @pytest.mark.parametrize(
        ("item", "error"),
        [
            (slice(0, 65), ValueError),
            (slice(-65, 3), ValueError),
            (slice(0, -65), ValueError),
            (slice(None, None, 2), ValueError),
            (slice("a", None), TypeError),
            (slice(1.5, None), TypeError),
            (0, TypeError),
            ((slice(0, 1),), TypeError),
        ],
    )
    def test_what_is_no_range(self, buffer: sa.Buffer, item: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            buffer[item]

    def test_keep_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        view = pool.allocate(64, stream)[8:16]
        gc.collect()
        assert pool.statistics().used == 64
        view.fill(4)
        assert holds(view, 4)
        del view
        assert pool.statistics().used == 0


@pytest.mark.parametrize("first", ["owner", "buffer"])
def test_finalisers_of_a_cycle_free_once(traced: Any, stream: sa.Stream, pool: sa.MemoryPool, first: str) -> None:
    """The collector calls the finalisers of a cycle in an order of its own, each with all objects still there."""

    class Owner:
        def __init__(self) -> None:
            self.kept: list[Any] = [self]

        def __del__(self) -> None:
            self.kept[1].close()

    for _ in range(20):
        if first == "owner":
            owner = Owner()
        buffer = pool.allocate(64, stream)
        if first == "buffer":
            owner = Owner()
        owner.kept.append(buffer)
        del owner, buffer
        gc.collect()
    assert len(names(traced, "cuMemFreeAsync")) == 20
