"""Buffers: what they are, filling, copying, views, and freeing."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.testing import Gate
from tests.support import KEEP, MiB, executed, holds, in_threads, names, pending, read


class TestBuffer:
    def test_what_it_tells(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(1000, stream) as buffer:
            assert buffer.nbytes == len(buffer) == 1000
            assert buffer.address > 0 and buffer.address % 512 == 0
            assert buffer.stream is stream and buffer.owner is pool
            assert buffer.location == sa.MemLocation.device(0)
            assert buffer.device_accessible and not buffer.host_accessible and not buffer.freed
            assert hex(buffer.address) in repr(buffer) and "1000" in repr(buffer)

    def test_is_a_value_of_its_own(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(1, stream) as one, pool.allocate(1, stream) as two:
            assert one != two and two.address - one.address == 512
            assert weakref.ref(one)() is one


class TestFreeing:
    def test_twice(self, traced: Any, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        buffer = pool.allocate(64, stream)
        buffer.free()
        for again in (None, stream, device.default_stream):
            with pytest.raises(sa.ClosedError, match="freed already"):
                buffer.free(again)
        buffer.close()
        assert names(traced, "cuMemFreeAsync") == ["cuMemFreeAsync"]
        assert buffer.freed and "freed" in repr(buffer)

    def test_use_afterwards(self, traced: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, stream) as other:
            buffer = pool.allocate(64, stream)
            view = buffer[:8]
            buffer.free()
            del traced.calls[:]
            uses: list[Callable[[], object]] = [
                lambda: buffer.address,
                lambda: buffer.fill(1),
                lambda: buffer.copy_to(bytearray(64)),
                lambda: buffer.copy_from(bytes(64)),
                lambda: other.copy_to(buffer),
                lambda: other.copy_from(buffer),
                lambda: buffer.__cuda_array_interface__,
                lambda: buffer.__dlpack__(),
                lambda: buffer.__enter__(),
                lambda: view.address,
                lambda: view.fill(1),
                lambda: view[2:].copy_to(bytearray(6)),
            ]
            for number, use in enumerate(uses):
                with pytest.raises(sa.ClosedError):
                    use()
                assert names(traced) == [], number
            assert buffer.nbytes == 64 and buffer.stream is stream  # what needs no memory is still told

    def test_block(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as buffer:
            assert pool.statistics().used == 64
        assert buffer.freed and pool.statistics().used == 0

    def test_block_that_fails(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pytest.raises(KeyError), pool.allocate(64, stream):
            raise KeyError
        assert pool.statistics().used == 0

    def test_block_after_a_free(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as buffer:
            buffer.free()
        assert pool.statistics().used == 0

    def test_on_another_stream(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        """The memory is free after the other stream's work: only there is it used again while that is pending."""
        with device.create_stream() as other:
            buffer = pool.allocate(20 * MiB, stream)
            address = buffer.address
            other.wait(stream)
            gate.hold(other)
            buffer.free(other)
            with pool.allocate(20 * MiB, other) as again:
                assert again.address == address
            gate.open()

    def test_is_in_stream_order(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        """Work that was queued before the free still uses the memory."""
        with pool.allocate(64, stream) as target:
            source = pool.allocate(64, stream)
            source.fill(7)
            gate.hold(stream)
            target.copy_from(source)
            source.free()
            gate.open()
            assert holds(target, 7)

    def test_dropped(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(64, stream)
        assert buffer and pool.statistics().used == 64
        del buffer
        assert pool.statistics().used == 0


PATTERNS: dict[str, tuple[Any, int | None, bytes]] = {
    "zero": (0, None, b"\0"),
    "byte": (0xAB, None, b"\xab"),
    "largest byte": (255, None, b"\xff"),
    "negative byte": (-1, None, b"\xff"),
    "smallest byte": (-128, None, b"\x80"),
    "byte by width": (7, 1, b"\7"),
    "16 bits": (0x1234, 2, b"\x34\x12"),
    "largest 16 bits": (65535, 2, b"\xff\xff"),
    "negative 16 bits": (-2, 2, b"\xfe\xff"),
    "smallest 16 bits": (-32768, 2, b"\x00\x80"),
    "32 bits": (0xDEADBEEF, 4, b"\xef\xbe\xad\xde"),
    "negative 32 bits": (-3, 4, b"\xfd\xff\xff\xff"),
    "smallest 32 bits": (-(1 << 31), 4, b"\x00\x00\x00\x80"),
    "one of bytes": (b"\x01", None, b"\x01"),
    "two of bytes": (b"\x01\x02", None, b"\x01\x02"),
    "four of bytes": (b"\x01\x02\x03\x04", 4, b"\x01\x02\x03\x04"),
    "bytearray": (bytearray(b"\x05\x06"), None, b"\x05\x06"),
    "numpy uint8": (np.uint8(200), None, b"\xc8"),
    "numpy int8": (np.int8(-1), None, b"\xff"),
    "numpy uint16": (np.uint16(258), None, b"\x02\x01"),
    "numpy int16": (np.int16(-2), None, b"\xfe\xff"),
    "numpy float16": (np.float16(1.0), None, b"\x00\x3c"),
    "numpy int32": (np.int32(-3), None, b"\xfd\xff\xff\xff"),
    "numpy uint32": (np.uint32(1), 4, b"\x01\x00\x00\x00"),
    "numpy float32": (np.float32(1.0), None, b"\x00\x00\x80\x3f"),
}


class TestFill:
    @pytest.mark.parametrize("name", PATTERNS)
    def test_pattern(self, buffer: sa.Buffer, name: str) -> None:
        value, width, pattern = PATTERNS[name]
        buffer.fill(value, width=width)
        assert read(buffer).tobytes() == pattern * (64 // len(pattern))

    @pytest.mark.parametrize(
        ("value", "width", "error", "says"),
        [
            (256, None, ValueError, "256"),
            (-129, None, ValueError, "-129"),
            (65536, 2, ValueError, "65536"),
            (-32769, 2, ValueError, "-32769"),
            (1 << 32, 4, ValueError, "4 bytes"),
            (-(1 << 31) - 1, 4, ValueError, "4 bytes"),
            (1, 3, ValueError, "1, 2 and 4"),
            (1, 8, ValueError, "1, 2 and 4"),
            (1, 0, ValueError, "1, 2 and 4"),
            (b"", None, ValueError, "1, 2 or 4"),
            (b"abc", None, ValueError, "1, 2 or 4"),
            (b"12345678", None, ValueError, "1, 2 or 4"),
            (b"ab", 4, ValueError, "width=4"),
            (np.float64(1), None, ValueError, "1, 2 or 4"),
            (np.int64(1), None, ValueError, "1, 2 or 4"),
            (np.uint8(1), 2, ValueError, "width=2"),
            (1.5, None, TypeError, "float"),
            (True, None, TypeError, "bool"),
            (None, None, TypeError, "NoneType"),
            ("a", None, TypeError, "str"),
            ([1], None, TypeError, "list"),
        ],
    )
    def test_pattern_that_is_none(
        self, buffer: sa.Buffer, value: Any, width: int | None, error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            buffer.fill(value, width=width)
        assert read(buffer).tobytes() == bytes(range(64))

    @pytest.mark.parametrize(("size", "width"), [(63, 2), (62, 4), (61, 4), (1, 2), (3, 4)])
    def test_no_whole_number_of_patterns(self, buffer: sa.Buffer, size: int, width: int) -> None:
        with pytest.raises(ValueError, match=f"width={width}.*{size} bytes"):
            buffer[:size].fill(0, width=width)

    @pytest.mark.parametrize(("start", "width"), [(1, 2), (1, 4), (2, 4), (3, 2)])
    def test_address_that_is_no_multiple(self, buffer: sa.Buffer, start: int, width: int) -> None:
        with pytest.raises(ValueError, match=f"width={width}"):
            buffer[start : start + 8].fill(0, width=width)

    def test_bounds(self, buffer: sa.Buffer) -> None:
        buffer[2:10].fill(0xFFFF, width=2)
        buffer[12:16].fill(-1, width=4)
        buffer[63:].fill(0)
        expected = bytearray(range(64))
        expected[2:10] = b"\xff" * 8
        expected[12:16] = b"\xff" * 4
        expected[63] = 0
        assert read(buffer).tobytes() == bytes(expected)

    def test_on_another_stream(self, device: sa.Device, buffer: sa.Buffer, stream: sa.Stream, gate: Gate) -> None:
        with device.create_stream() as other:
            stream.synchronize()
            gate.hold(stream)
            buffer.fill(9, other)
            assert executed(other) and pending(stream)
            gate.open()
            assert holds(buffer, 9)

    @pytest.mark.parametrize("default", ["default_stream", "per_thread_stream"])
    def test_on_a_default_stream(self, device: sa.Device, buffer: sa.Buffer, default: str) -> None:
        stream = getattr(device, default)
        buffer.stream.synchronize()
        buffer.fill(9, stream)
        stream.synchronize()
        assert holds(buffer, 9)

    def test_of_nothing(self, traced: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pool.allocate(0, stream) as empty:
            for value in (1, b"ab", np.float32(1)):
                empty.fill(value)
            assert names(traced, "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async") == []

    def test_synchronises_nothing(self, traced: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, stream) as buffer:
            del traced.calls[:]
            buffer.fill(1)
            buffer.fill(1, width=4)
            assert names(traced) == ["cuMemsetD8Async", "cuMemsetD32Async"]


SOURCES: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "array": lambda data: array.array("B", data),
    "numpy": lambda data: np.frombuffer(data, np.uint8),
    "numpy of floats": lambda data: np.frombuffer(data, np.float32),
    "numpy of two dimensions": lambda data: np.frombuffer(data, np.uint16).reshape(4, 8),
    "ctypes": lambda data: (ctypes.c_uint8 * len(data)).from_buffer_copy(data),
}
TARGETS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(64),
    "memoryview": lambda: memoryview(bytearray(64)),
    "array": lambda: array.array("I", bytes(64)),
    "numpy": lambda: np.zeros(64, np.uint8),
    "numpy of floats": lambda: np.zeros(8, np.float64),
    "numpy of two dimensions": lambda: np.zeros((4, 8), np.int16),
    "ctypes": lambda: (ctypes.c_uint32 * 16)(),
}


class Interface:
    """Another library's array: only its ``__cuda_array_interface__`` is known."""

    def __init__(self, memory: sa.Memory, **fields: Any) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
            **fields,
        }


class TestCopy:
    @pytest.mark.parametrize("name", SOURCES)
    def test_from_host(self, buffer: sa.Buffer, name: str) -> None:
        data = bytes(range(100, 164))
        buffer.copy_from(SOURCES[name](data))
        assert read(buffer).tobytes() == data

    @pytest.mark.parametrize("name", TARGETS)
    def test_to_host(self, buffer: sa.Buffer, name: str) -> None:
        target = TARGETS[name]()
        buffer.copy_to(target)
        buffer.stream.synchronize()
        assert bytes(memoryview(target)) == bytes(range(64))

    def test_between_buffers(self, buffer: sa.Buffer, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, buffer.stream) as to, pool.allocate(64, buffer.stream) as back:
            buffer.copy_to(to)
            back.copy_from(to)
            assert read(back).tobytes() == bytes(range(64))

    def test_between_pools(self, device: sa.Device, buffer: sa.Buffer) -> None:
        with sa.MemoryPool(device) as pool, pool.allocate(64, buffer.stream) as other:
            other.copy_from(buffer)
            assert read(other).tobytes() == bytes(range(64))

    def test_between_views(self, buffer: sa.Buffer) -> None:
        buffer[0:8].copy_to(buffer[56:64])
        buffer[8:16].copy_from(buffer[16:24])
        expected = bytearray(range(64))
        expected[56:64] = range(8)
        expected[8:16] = range(16, 24)
        assert read(buffer).tobytes() == bytes(expected)

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"strides": None},
            {"strides": (1,)},
            {"shape": (4, 4), "typestr": "<f4"},
            {"shape": (4, 4), "typestr": "<f4", "strides": (16, 4)},
            {"stream": None},
        ],
        ids=str,
    )
    def test_with_another_library_s_array(self, buffer: sa.Buffer, pool: sa.MemoryPool, fields: dict[str, Any]) -> None:
        with pool.allocate(64, buffer.stream) as memory:
            theirs = Interface(memory, **fields)
            buffer.copy_to(theirs)
            assert read(memory).tobytes() == bytes(range(64))
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

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"strides": (2,)}, "contiguous"),
            ({"shape": (4, 4), "typestr": "<f4", "strides": (4, 16)}, "contiguous"),
            ({"shape": (63,)}, "63"),
            ({"shape": (16, 2), "typestr": "<f4"}, "128"),
        ],
        ids=str,
    )
    def test_with_an_array_that_does_not_fit(self, buffer: sa.Buffer, fields: dict[str, Any], says: str) -> None:
        for copy in (buffer.copy_to, buffer.copy_from):
            with pytest.raises(ValueError, match=says):
                copy(Interface(buffer, **fields))

    def test_to_a_read_only_array(self, buffer: sa.Buffer, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, buffer.stream) as memory:
            constant = Interface(memory, data=(memory.address, True))
            with pytest.raises(ValueError, match="read-only"):
                buffer.copy_to(constant)
            memory.fill(3)
            buffer.copy_from(constant)
            assert holds(buffer, 3)

    @pytest.mark.parametrize(
        "target", [bytes(64), memoryview(bytes(64)), np.frombuffer(bytes(64), np.uint8)], ids=lambda one: str(type(one))
    )
    def test_to_read_only_memory(self, buffer: sa.Buffer, target: Any) -> None:
        with pytest.raises(ValueError, match="read-only"):
            buffer.copy_to(target)
        assert bytes(target) == bytes(64)

    @pytest.mark.parametrize(
        "other", [np.zeros(128, np.uint8)[::2], np.zeros((8, 16), np.uint8)[:, :8], memoryview(bytearray(128))[::2]]
    )
    def test_with_scattered_memory(self, buffer: sa.Buffer, other: Any) -> None:
        for copy in (buffer.copy_to, buffer.copy_from):
            with pytest.raises(ValueError, match="contiguous"):
                copy(other)

    @pytest.mark.parametrize("size", [0, 1, 63, 65, 128])
    def test_of_another_size(self, buffer: sa.Buffer, pool: sa.MemoryPool, size: int) -> None:
        with pool.allocate(size, buffer.stream) as memory:
            for other in (bytearray(size), memory):
                for copy in (buffer.copy_to, buffer.copy_from):
                    with pytest.raises(ValueError, match=rf"\b{size}\b"):
                        copy(other)

    @pytest.mark.parametrize("other", [None, 0, "text", [0] * 64, object()], ids=lambda value: type(value).__name__)
    def test_with_what_is_no_memory(self, buffer: sa.Buffer, other: Any) -> None:
        for name, copy in (("target", buffer.copy_to), ("source", buffer.copy_from)):
            with pytest.raises(TypeError, match=name):
                copy(other)

    def test_of_nothing(self, traced: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pool.allocate(0, stream) as empty:
            empty.copy_to(bytearray())
            empty.copy_from(b"")
            empty.copy_from(np.zeros((0, 3)))
            empty.copy_to(empty)
            assert not [name for name in names(traced) if name.startswith("cuMemcpy")]

    def test_a_pageable_source_may_change_at_once(self, buffer: sa.Buffer, stream: sa.Stream, gate: Gate) -> None:
        source = np.full(64, 1, np.uint8)
        gate.hold(stream)
        buffer.copy_from(source)
        source[:] = 2
        gate.open()
        assert holds(buffer, 1)

    def test_a_pageable_target_is_there_at_once(self, buffer: sa.Buffer) -> None:
        target = bytearray(64)
        buffer.copy_to(target)
        assert bytes(target) == bytes(range(64))

    def test_is_ordered_by_the_stream(self, buffer: sa.Buffer, pool: sa.MemoryPool, gate: Gate) -> None:
        with pool.allocate(64, buffer.stream) as other:
            other.fill(0)
            buffer.stream.synchronize()
            gate.hold(buffer.stream)
            buffer.fill(8)
            other.copy_from(buffer)
            buffer.fill(9)
            gate.open()
            assert holds(other, 8) and holds(buffer, 9)

    def test_on_another_stream(self, device: sa.Device, buffer: sa.Buffer, gate: Gate) -> None:
        buffer.stream.synchronize()
        with device.create_stream() as other:
            gate.hold(buffer.stream)
            target = bytearray(64)
            buffer.copy_to(target, stream=other)
            assert bytes(target) == bytes(range(64))
            buffer.copy_from(bytes(64), stream=other)
            other.synchronize()
            gate.open()
            assert holds(buffer, 0)

    def test_runs_under_its_stream_s_context(self, buffer: sa.Buffer, pool: sa.MemoryPool) -> None:
        """Programming guide 4.3.5.1: from a thread without a current context, too."""

        def work() -> bytes:
            with pool.allocate(64, buffer.stream) as other:
                other.copy_from(buffer)
                target = bytearray(64)
                other.copy_to(target)
                return bytes(target)

        assert in_threads(work) == [bytes(range(64))]

    def test_much(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        data = np.random.default_rng(1).integers(0, 256, 3 * MiB + 7, np.uint8)
        with pool.allocate(data.nbytes, stream) as one, pool.allocate(data.nbytes, stream) as two:
            one.copy_from(data)
            two.copy_from(one)
            assert np.array_equal(read(two), data)


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
    def test_to_the_other(self, buffer: sa.Buffer, theirs: sa.Buffer, on: str) -> None:
        """Copies between devices need no access to each other's memory, on either device's stream."""
        buffer.stream.synchronize()
        stream = {"own": buffer.stream, "other": theirs.stream}[on]
        buffer.copy_to(theirs, stream)
        stream.synchronize()
        assert read(theirs).tobytes() == bytes(range(64))

    @pytest.mark.parametrize("on", ["own", "other"])
    def test_from_the_other(self, buffer: sa.Buffer, theirs: sa.Buffer, on: str) -> None:
        buffer.stream.synchronize()
        stream = {"own": buffer.stream, "other": theirs.stream}[on]
        buffer.copy_from(theirs, stream)
        stream.synchronize()
        assert holds(buffer, 1)

    def test_both_on_the_other(self, buffer: sa.Buffer, pool: sa.MemoryPool, peer: sa.Device) -> None:
        """Between two buffers of device 0, on a stream of device 1 that may not use them."""
        with pool.allocate(64, buffer.stream) as second, peer.create_stream() as stream:
            buffer.stream.synchronize()
            second.copy_from(buffer, stream)
            stream.synchronize()
            assert read(second).tobytes() == bytes(range(64))

    def test_views(self, buffer: sa.Buffer, theirs: sa.Buffer) -> None:
        theirs[8:16].copy_from(buffer[16:24], buffer.stream)
        buffer.stream.synchronize()
        assert read(theirs).tobytes() == bytes([1] * 8 + [*range(16, 24)] + [1] * 48)

    def test_a_fill_needs_access(self, buffer: sa.Buffer, pool: sa.MemoryPool, peer: sa.Device) -> None:
        buffer.stream.synchronize()
        with peer.create_stream() as stream:
            with pytest.raises(sa.InvalidValueError, match="set_access"):
                buffer.fill(3, stream)
            pool.set_access(peer, sa.MemAccess.READWRITE)
            buffer.fill(3, stream)
            stream.synchronize()
            assert holds(buffer, 3)

    def test_to_host(self, buffer: sa.Buffer, theirs: sa.Buffer, pool: sa.MemoryPool, peer: sa.Device) -> None:
        buffer.stream.synchronize()
        target = bytearray(64)
        with pytest.raises(sa.InvalidValueError, match="set_access"):
            buffer.copy_to(target, theirs.stream)
        pool.set_access(peer, sa.MemAccess.READWRITE)
        buffer.copy_to(target, theirs.stream)
        theirs.stream.synchronize()
        assert bytes(target) == bytes(range(64))

    def test_allocation_on_the_other_s_stream(self, pool: sa.MemoryPool, peer: sa.Device) -> None:
        with peer.create_stream() as stream:
            buffer = pool.allocate(64, stream)
            before = buffer.device_accessible
            pool.set_access(peer, sa.MemAccess.READWRITE)
            assert [before, buffer.device_accessible] == [False, True]
            buffer.fill(2)
            assert holds(buffer, 2)
            buffer.free()


class TestViews:
    @pytest.mark.parametrize(
        ("item", "start", "stop"),
        [
            (slice(2, 5), 2, 5),
            (slice(None), 0, 64),
            (slice(-3, None), 61, 64),
            (slice(None, -60), 0, 4),
            (slice(-10, -5), 54, 59),
            (slice(5, 5), 5, 5),
            (slice(9, 3), 9, 9),
            (slice(64, 64), 64, 64),
            (slice(0, 64, 1), 0, 64),
            (slice(np.int64(1), np.int64(2)), 1, 2),
        ],
    )
    def test_range(self, buffer: sa.Buffer, item: slice, start: int, stop: int) -> None:
        view = buffer[item]
        assert isinstance(view, sa.BufferView) and isinstance(view, sa.Memory)
        assert (view.address, view.nbytes, len(view)) == (buffer.address + start, stop - start, stop - start)
        assert view.owner is buffer and view.stream is buffer.stream and view.location == buffer.location
        assert read(view).tobytes() == bytes(range(start, stop))

    def test_by_name(self, buffer: sa.Buffer) -> None:
        assert (buffer.view(3, 9).address, buffer.view(3, 9).nbytes) == (buffer.address + 3, 6)
        assert buffer.view().nbytes == 64 and buffer.view(60).nbytes == 4

    def test_of_a_view(self, buffer: sa.Buffer) -> None:
        view = buffer[8:32][4:12][-2:]
        assert (view.address, view.nbytes) == (buffer.address + 18, 2)
        assert read(view).tobytes() == bytes([18, 19])
        view.fill(0)
        assert read(buffer).tobytes() == bytes([*range(18), 0, 0, *range(20, 64)])

    @pytest.mark.parametrize("item", [slice(0, 65), slice(65, 66), slice(-65, 3), slice(0, -65), slice(1 << 70, None)])
    def test_outside(self, buffer: sa.Buffer, item: slice) -> None:
        with pytest.raises(ValueError, match="64 bytes"):
            buffer[item]

    @pytest.mark.parametrize("step", [2, -1])
    def test_steps(self, buffer: sa.Buffer, step: int) -> None:
        with pytest.raises(ValueError, match="step"):
            buffer[::step]

    @pytest.mark.parametrize("item", [0, -1, "a", (slice(0, 1),), None, 1.5])
    def test_what_is_no_range(self, buffer: sa.Buffer, item: Any) -> None:
        with pytest.raises(TypeError):
            buffer[item]

    @pytest.mark.parametrize("bound", ["a", 1.5])
    def test_bounds_that_are_no_numbers(self, buffer: sa.Buffer, bound: Any) -> None:
        with pytest.raises(TypeError):
            buffer[bound:]

    def test_keep_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        view = pool.allocate(64, stream)[8:16]
        gc.collect()
        assert pool.statistics().used == 64
        view.fill(4)
        assert holds(view, 4)
        del view
        assert pool.statistics().used == 0

    def test_read_well(self, buffer: sa.Buffer) -> None:
        assert "8:16" in repr(buffer[8:16])


@pytest.mark.parametrize("first", ["owner", "buffer"])
def test_a_finaliser_of_the_same_cycle_frees_nothing_twice(machine: Any, first: str) -> None:
    """The collector calls the finalisers of a cycle in an order of its own, each with all objects still there."""

    class Owner:
        buffer: sa.Buffer

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            self.buffer.close()

    driver = sd.traced(machine)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        for _ in range(20):
            if first == "owner":
                owner = Owner()
                owner.buffer = pool.allocate(64, stream)
            else:
                buffer = pool.allocate(64, stream)
                owner = Owner()
                owner.buffer = buffer
                del buffer
            del owner
            gc.collect()
        stream.synchronize()
    assert len(names(driver, "cuMemFreeAsync")) == 20
