"""Memory as arrays of a type and shape, on the host and on devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import assert_type

import streamalloc as sa
from streamalloc.testing import Gate
from tests.support import each_raises, holds, pending, read

T = TypeVar("T", bound=np.generic)

STRUCTURE = np.dtype([("key", np.int32), ("value", np.float64)])
PADDED = np.dtype([("key", np.int8), ("value", np.float32)], align=True)


def elements(view: sa.TypedView[T]) -> npt.NDArray[T]:
    """The elements of an array, once all that its stream has queued is done."""
    target = np.zeros(view.shape, view.dtype)
    view.copy_to(target)
    view.stream.synchronize()
    return target


class TestForm:
    @pytest.mark.parametrize(
        ("dtype", "shape", "seen"),
        [
            (np.float32, None, (16,)),
            ("<f2", (4, 8), (4, 8)),
            (np.int64, (2, -1, 2), (2, 2, 2)),
            ("V16", None, (4,)),
            ("V64", (), ()),
        ],
    )
    def test_sizes(self, buffer: sa.Buffer, dtype: Any, shape: Any, seen: Any) -> None:
        view, array = buffer.view_as(dtype, shape), np.empty(seen, dtype)
        assert (view.address, view.owner, view.stream) == (buffer.address, buffer, buffer.stream)
        for name in ("dtype", "shape", "size", "nbytes"):
            assert getattr(view, name) == getattr(array, name)
        assert f"{np.dtype(dtype)} {seen}" in repr(view)
        if seen:
            assert len(view) == len(array)
        else:
            with pytest.raises(TypeError):
                len(view)

    def test_of_nothing(self, buffer: sa.Buffer) -> None:
        assert buffer[:0].view_as(np.float32, (0, 3)).shape == (0, 3)
        assert buffer[:0].view_as(np.float32).shape == (0,)

    @pytest.mark.parametrize("shape", [(17,), (4, 5), (-2, -8), (-1, -1), (0, -1), (3, -1), ()])
    def test_shapes_that_do_not_fit(self, buffer: sa.Buffer, shape: Any) -> None:
        with pytest.raises(ValueError, match="does not fill the 64 bytes"):
            buffer.view_as(np.float32, shape)

    @pytest.mark.parametrize("shape", [-1, 2, 2.0])
    def test_a_shape_that_is_a_number(self, buffer: sa.Buffer, shape: Any) -> None:
        with pytest.raises(TypeError, match=f"shape={shape} must be a tuple"):
            buffer.view_as("f4", shape)

    @pytest.mark.parametrize("dtype", [object, "V0", [("a", object)], np.dtype((np.int32, (2,)))])
    def test_types_that_no_device_has(self, buffer: sa.Buffer, dtype: Any) -> None:
        with pytest.raises(TypeError, match="dtype"):
            buffer.view_as(dtype)

    def test_places_that_are_not_aligned(self, buffer: sa.Buffer) -> None:
        with pytest.raises(ValueError, match="aligned"):
            buffer[1:9].view_as(np.float64)
        assert buffer[8:16].view_as(np.float64).address == buffer.address + 8

    def test_bytes_of_it_are_memory_as_ever(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        view = host.view_as(np.float32, (4, 4))
        buffer.view_as(np.float32, (4, 4)).copy_from(view)
        assert (read(buffer) == np.arange(64)).all()
        flat = buffer.view_as(np.uint16, (32,)).bytes
        flat.fill(7)
        assert holds(buffer, 7) and type(flat) is type(flat[8:16]) is sa.BufferView
        assert (flat.address, flat.nbytes, view[1].bytes.address) == (buffer.address, 64, host.address + 16)


class TestFill:
    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            ("?", True),
            ("i1", -1),
            ("f2", 1.5),
            (">i2", 1),
            ("f4", 0.1),
            ("i8", 1),
            ("u8", 2**63 + 1),
            (">f8", 1),
            ("c16", 0.1 - 0.2j),
            ("M8[s]", np.datetime64(7, "s")),
            ("S3", b"abc"),
            ("S5", b"ab"),
            ("V6", b"abcdef"),
            (STRUCTURE, (3, 0.25)),
            (PADDED, (3, 0.25)),
        ],
    )
    @pytest.mark.parametrize("count", [0, 1, 2, 37])
    def test_elements(self, pool: sa.MemoryPool, stream: sa.Stream, dtype: Any, value: Any, count: int) -> None:
        expected = np.full(count, np.array(value, dtype))
        with pool.allocate(expected.nbytes, stream) as memory:
            view = memory.view_as(dtype)
            view.fill(value)
            assert (elements(view) == expected).all()

    def test_of_packed_structures_at_odd_addresses(self, buffer: sa.Buffer) -> None:
        packed = np.dtype([("key", np.int8), ("value", np.int16)])
        view = buffer[1:64].view_as(packed)
        view.fill((1, 515))
        assert (elements(view) == np.full(21, np.array((1, 515), packed))).all()

    def test_on_another_stream(self, buffer: sa.Buffer, gate: Gate, other: sa.Stream) -> None:
        other.wait(buffer.stream.record())
        gate.hold(other)
        buffer.view_as(np.float64).fill(1.5, other)
        assert pending(other) and not pending(buffer.stream)
        gate.open()
        buffer.stream.wait(other.record())
        assert (elements(buffer.view_as(np.float64)) == 1.5).all()

    @pytest.mark.parametrize(
        ("dtype", "value", "error"),
        [
            ("u1", 300, ValueError),
            ("i1", np.int64(300), ValueError),
            ("i4", 0.5, ValueError),
            ("i4", float("nan"), ValueError),
            ("?", 2, ValueError),
            ("f4", 1e300, ValueError),
            ("f4", 1j, TypeError),
            ("f4", "1", TypeError),
            ("i4", b"12", TypeError),
            ("i4", [1], (TypeError, ValueError)),
            ("S2", b"abc", TypeError),
            ("V4", b"ab", TypeError),
            (STRUCTURE, 3, (TypeError, ValueError)),
        ],
    )
    def test_values_that_the_type_does_not_have(self, buffer: sa.Buffer, dtype: Any, value: Any, error: Any) -> None:
        view = buffer[: 4 * np.dtype(dtype).itemsize].view_as(dtype)
        with pytest.raises(error, match="value"):
            view.fill(value)
        assert (read(buffer) == np.arange(64)).all()

    def test_a_width_is_of_bytes(self, buffer: sa.Buffer) -> None:
        with pytest.raises(TypeError, match=r"\.bytes\.fill"):
            buffer.view_as(np.int32).fill(1, width=2)  # type: ignore[arg-type]

    def test_in_a_graph(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.float64)
        with buffer.stream.capture() as graph:
            view.fill(0.1)
        buffer.fill(0)
        graph.launch(buffer.stream)
        assert (elements(view) == 0.1).all()


class Interface:
    """An array of another library."""

    def __init__(self, view: sa.TypedView[Any]) -> None:
        self.__cuda_array_interface__ = view.__cuda_array_interface__


class TestCopies:
    @pytest.fixture
    def second(self, pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
        with pool.allocate(64, stream) as buffer:
            yield buffer

    def others(self, second: sa.Buffer, host: sa.Buffer, dtype: Any, shape: Any) -> list[Any]:
        """One of each kind that is copied, of 64 bytes."""
        array: Any = np.zeros(shape, dtype)
        return [host.view_as(dtype, shape), array, memoryview(array), Interface(second.view_as(dtype, shape))]

    def test_of_the_same_form(self, host: sa.Buffer, buffer: sa.Buffer, second: sa.Buffer) -> None:
        view = buffer.view_as(np.int16, (4, 8))
        expected = np.arange(32, dtype=np.int16).reshape(4, 8)
        view.copy_from(expected)
        for other in self.others(second, host, np.int16, (4, 8)):
            view.copy_to(other)
            view.stream.synchronize()
            view.bytes.fill(0)
            view.copy_from(other)
            assert (elements(view) == expected).all()

    @pytest.mark.parametrize(
        ("dtype", "shape", "error"),
        [
            (np.float32, (16,), TypeError),
            (">i4", (16,), TypeError),
            (np.uint8, (64,), TypeError),
            (np.int32, (4, 4), ValueError),
        ],
    )
    def test_of_another(
        self, host: sa.Buffer, buffer: sa.Buffer, second: sa.Buffer, dtype: Any, shape: Any, error: Any
    ) -> None:
        view = buffer.view_as(np.int32)
        for other in self.others(second, host, dtype, shape):
            for copy, name in ((view.copy_from, "source"), (view.copy_to, "target")):
                with pytest.raises(error, match=name):
                    copy(other)

    def test_of_memory_without_a_type(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        with pytest.raises(TypeError, match=r"uint8.*\.bytes"):
            buffer.view_as(np.int32).copy_from(host)
        buffer.view_as(np.uint8).copy_from(host)
        buffer.copy_from(host.view_as(np.int32))  # bytes take all
        assert (read(buffer) == np.arange(64)).all()

    def test_of_structures(self, buffer: sa.Buffer, second: sa.Buffer) -> None:
        kind = np.dtype([("key", np.int32), ("value", np.float32)])
        buffer.view_as(kind).copy_from(Interface(second.view_as(kind)))
        with pytest.raises(TypeError, match="elements of"):
            buffer.view_as(kind).copy_from(Interface(second.view_as("V8")))

    def test_of_no_kind_that_is_copied(self, buffer: sa.Buffer) -> None:
        with pytest.raises(TypeError, match="buffer protocol"):
            buffer.view_as(np.int32).copy_from(5)  # type: ignore[arg-type]


def selected(array: Any, index: Any) -> Any:
    """The part that an index selects, or the class of its error."""
    try:
        part = array[index]
    except (IndexError, ValueError) as error:
        return type(error)
    if isinstance(part, sa.TypedView):
        assert part.dtype == array.dtype
        return part.as_array()
    return part if part.flags.c_contiguous else ValueError


class TestIndices:
    SLICES = (slice(1, 3), slice(None, -1), slice(2, 2), slice(3, 4, 2), slice(None, None, -1))
    PARTS = (0, -1, np.int64(2), 4, *SLICES, Ellipsis, None)

    def test_as_numpy_selects(self, host: sa.Buffer) -> None:
        view = host.view_as(np.uint8, (4, 4, 4))
        tuples = [index for count in range(4) for index in itertools.product(self.PARTS, repeat=count)]
        for index in (*self.PARTS, *tuples, (0, 0, 0, 0)):
            assert np.array_equal(selected(view, index), selected(view.as_array(), index)), index

    @pytest.mark.parametrize("index", [[0, 1], np.array([0]), True, "key", 1.0])
    def test_what_is_none(self, buffer: sa.Buffer, index: Any) -> None:
        with pytest.raises(TypeError):
            buffer.view_as(np.float32, (4, 4))[index]

    def test_selections_are_memory(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.int64)
        view.fill(1)
        view[2:4].copy_from(np.array([5, 6]))
        view[7].fill(9)
        view[0:2].fill(-7)
        assert elements(view).tolist() == [-7, -7, 5, 6, 1, 1, 1, 9]
        part = view.view(2, 4)
        assert (part.address, part.shape) == (view.address + 16, (2,))


class TestTyping:
    """The view of type checkers: mypy reads this file, and reports every ignored error that is none."""

    def test_views(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.float32, (4, 4))
        assert_type(view, sa.TypedView[np.float32])
        assert_type(view[1:3], sa.TypedView[np.float32])
        assert_type(view[0, 1], sa.TypedView[np.float32])
        assert_type(view.view(1, 2), sa.TypedView[np.float32])
        assert_type(view.bytes, sa.BufferView)
        assert_type(view.dtype, np.dtype[np.float32])
        assert_type(view.view_as(np.dtype(np.int16)), sa.TypedView[np.int16])
        assert_type(buffer.view_as("<f4"), sa.TypedView[Any])

    def test_arrays(self, host: sa.Buffer) -> None:
        view = host.view_as(np.int32)
        assert_type(view.as_array(), npt.NDArray[np.int32])
        assert_type(np.asarray(view), npt.NDArray[np.int32])

    def test_copies(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.float32)
        same, other = np.zeros(16, np.float32), np.zeros(16, np.int32)
        view.copy_from(same)
        each_raises(TypeError, lambda: view.copy_from(other))  # type: ignore[arg-type]
        each_raises(TypeError, lambda: view.copy_to(other))  # type: ignore[arg-type]


class TestNumpy:
    def test_shares_the_memory(self, host: sa.Buffer) -> None:
        view = host.view_as(np.uint32, (4, 4))
        array = np.asarray(view)
        assert (array.dtype, array.shape, array.ctypes.data) == (np.dtype(np.uint32), (4, 4), host.address)
        array[1, 2] = 5
        assert view.as_array()[1, 2] == np.from_dlpack(view)[1, 2] == host.as_array(np.uint32)[6] == 5

    def test_of_another_form(self, host: sa.Buffer) -> None:
        view = host.view_as(np.uint32, (4, 4))
        assert view.as_array(np.uint8).shape == (64,)
        assert view.as_array(shape=(2, 8)).dtype == np.uint32
        assert view.view_as(np.uint16, (2, 16)).as_array().shape == (2, 16)

    def test_structures(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        for kind in (np.dtype([("key", np.int32), ("value", np.float32)]), PADDED):
            array = np.asarray(host.view_as(kind))
            assert array.dtype == kind and array["value"][1] == host.as_array(np.float32)[3]
        with pytest.raises(AttributeError, match="view_as"):  # no interface can name the padding
            _ = buffer.view_as(PADDED).__cuda_array_interface__
