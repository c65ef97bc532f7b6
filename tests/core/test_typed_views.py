"""Memory as arrays of a type and shape, on the host and on devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import assert_type

import streamalloc as sa
from streamalloc.testing import Gate
from tests.core.test_interchange import Consumer
from tests.support import holds, pending, read

T = TypeVar("T", bound=np.generic)


class TestForm:
    @pytest.mark.parametrize(
        ("dtype", "shape", "seen"),
        [
            (np.float32, None, (16,)),
            ("<f2", (4, 8), (4, 8)),
            (np.int64, (2, -1, 2), (2, 2, 2)),
            (np.complex128, (4, 1), (4, 1)),
            (bool, (-1,), (64,)),
            ("V16", None, (4,)),
        ],
    )
    def test_sizes(self, buffer: sa.Buffer, dtype: Any, shape: Any, seen: Any) -> None:
        view = buffer.view_as(dtype, shape)
        assert (view.dtype, view.shape) == (np.dtype(dtype), seen)
        assert (view.nbytes, view.address, view.owner, view.stream) == (64, buffer.address, buffer, buffer.stream)
        assert f"{np.dtype(dtype)} {seen}" in repr(view)

    @pytest.mark.parametrize("shape", [(17,), (4, 5), (-2, -8), (-1, -1), (0, -1), (3, -1), ()])
    def test_shapes_that_do_not_fit(self, buffer: sa.Buffer, shape: Any) -> None:
        with pytest.raises(ValueError, match="does not fill the 64 bytes"):
            buffer.view_as(np.float32, shape)

    def test_one_element(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(8, stream) as buffer:
            assert buffer.view_as(np.float64, ()).__cuda_array_interface__["shape"] == ()

    def test_nothing(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(0, stream) as buffer:
            assert buffer.view_as(np.float32, (0, 3)).shape == (0, 3)
            assert buffer.view_as(np.float32).shape == (0,)

    @pytest.mark.parametrize("dtype", [object, "V0", [("a", object)]])
    def test_types_that_no_device_has(self, buffer: sa.Buffer, dtype: Any) -> None:
        with pytest.raises(TypeError, match="dtype"):
            buffer.view_as(dtype)

    def test_places_that_are_not_aligned(self, buffer: sa.Buffer) -> None:
        with pytest.raises(ValueError, match="aligned"):
            buffer[1:9].view_as(np.float64)
        assert buffer[8:16].view_as(np.float64).address == buffer.address + 8

    def test_arrays_of_arrays(self, buffer: sa.Buffer) -> None:
        with pytest.raises(TypeError, match="let shape say"):
            buffer.view_as(np.dtype((np.int32, (2,))))

    def test_bytes_of_it_are_memory_as_ever(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        view = host.view_as(np.float32, (4, 4))
        buffer.view_as(np.float32, (4, 4)).copy_from(view)
        assert (read(buffer) == np.arange(64)).all()
        flat = buffer.view_as(np.uint16, (32,)).bytes
        flat.fill(7)
        assert holds(buffer, 7) and type(flat) is type(flat[8:16]) is sa.BufferView
        assert (flat.address, flat.nbytes, view[1].bytes.address) == (buffer.address, 64, host.address + 16)

    def test_sizes_in_numpys_terms(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.float32, (2, 8))
        array = np.empty((2, 8), np.float32)
        for name in ("ndim", "size", "itemsize", "nbytes"):
            assert getattr(view, name) == getattr(array, name)
        assert len(view) == len(array)
        with pytest.raises(TypeError):
            len(view[0, 0])


def elements(view: sa.TypedView[T]) -> npt.NDArray[T]:
    """The elements of an array, once all that its stream has queued is done."""
    target = np.zeros(view.shape, view.dtype)
    view.copy_to(target)
    view.stream.synchronize()
    return target


STRUCTURE = np.dtype([("key", np.int32), ("value", np.float64)])
PADDED = np.dtype([("key", np.int8), ("value", np.float32)], align=True)


class TestFill:
    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            ("?", True),
            ("u1", 255),
            ("i1", -1),
            ("i2", -2),
            ("u2", 0x0101),
            ("f2", 1.5),
            (">i2", 1),
            ("f4", 0.1),
            ("i4", 1),
            ("i8", 1),
            ("i8", -1),
            ("u8", 2**63 + 1),
            ("f8", 0),
            ("f8", 0.1),
            (">f8", 1),
            ("c8", 1 + 2j),
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

    def test_of_a_slice_leaves_the_rest(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.float64, (4, 2))
        buffer.fill(0)
        view[1:3].fill(2.5)
        assert elements(view).tolist() == [[0, 0], [2.5, 2.5], [2.5, 2.5], [0, 0]]

    def test_of_packed_structures_at_odd_addresses(self, buffer: sa.Buffer) -> None:
        packed = np.dtype([("key", np.int8), ("value", np.int16)])
        view = buffer[1:64].view_as(packed)
        view.fill((1, 515))
        assert (elements(view) == np.full(21, np.array((1, 515), packed))).all()

    def test_on_another_stream(self, device: sa.Device, buffer: sa.Buffer, gate: Gate) -> None:
        with device.create_stream() as other:
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
            ("u1", -1, ValueError),
            ("i1", np.int64(300), ValueError),
            ("i4", 0.5, ValueError),
            ("i4", float("nan"), ValueError),
            ("?", 2, ValueError),
            ("f4", 1e300, ValueError),
            ("f4", 1j, TypeError),
            ("f4", None, TypeError),
            ("f4", "1", TypeError),
            ("i4", b"12", TypeError),
            ("i4", [1], (TypeError, ValueError)),
            ("S2", b"abc", TypeError),
            ("V4", b"ab", TypeError),
            (STRUCTURE, 3, (TypeError, ValueError)),
        ],
    )
    def test_values_that_the_type_does_not_have(
        self, pool: sa.MemoryPool, stream: sa.Stream, dtype: Any, value: Any, error: Any
    ) -> None:
        with pool.allocate(4 * np.dtype(dtype).itemsize, stream) as memory:
            memory.fill(9)
            with pytest.raises(error, match="value"):
                memory.view_as(dtype).fill(value)
            assert holds(memory, 9)

    def test_a_width_is_of_bytes(self, buffer: sa.Buffer) -> None:
        with pytest.raises(TypeError, match=r"\.bytes\.fill"):
            buffer.view_as(np.int32).fill(1, width=2)  # type: ignore[arg-type]

    def test_in_a_graph(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as memory:
            view = memory.view_as(np.float64)
            with stream.capture() as graph:
                view.fill(0.1)
            memory.fill(0)
            graph.launch(stream)
            assert (elements(view) == 0.1).all()


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
            (np.uint32, (16,), TypeError),
            (">i4", (16,), TypeError),
            (np.uint8, (64,), TypeError),
            (np.int32, (4, 4), ValueError),
            (np.int32, (16, 1), ValueError),
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
        buffer.view_as(np.int32).bytes.copy_from(host)
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


class Interface:
    """An array of another library."""

    def __init__(self, view: sa.TypedView[Any]) -> None:
        self.view = view

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.view.__cuda_array_interface__


class TestIndices:
    @pytest.mark.parametrize(
        "index",
        [
            0,
            -1,
            np.int64(2),
            slice(1, 3),
            slice(None, -1),
            slice(2, 2),
            slice(3, 99),
            slice(3, 4, 2),
            Ellipsis,
            None,
            (),
            (2, 1),
            (2, 1, 3),
            (2, slice(1, 3)),
            (slice(1, 2), slice(None), slice(None)),
            (1, Ellipsis),
            (Ellipsis, slice(None)),
            (slice(1, 2), slice(1, 2), slice(1, 3)),
        ],
    )
    def test_as_numpy_selects(self, host: sa.Buffer, index: Any) -> None:
        view = host.view_as(np.uint8, (4, 4, 4))
        array = view.as_array()
        seen, expected = view[index], array[index]
        assert isinstance(seen, sa.TypedView) and seen.dtype == view.dtype and seen.shape == np.shape(expected)
        assert seen.as_array().tolist() == expected.tolist()

    @pytest.mark.parametrize(
        ("index", "error"),
        [
            (4, IndexError),
            ((0, 0, 0, 0), IndexError),
            (slice(None, None, 2), ValueError),
            (slice(None, None, -1), ValueError),
            ((slice(None), 0), ValueError),
            ((Ellipsis, 0), ValueError),
            ([0, 1], TypeError),
            (np.array([0]), TypeError),
            (True, TypeError),
            ("key", TypeError),
            (1.0, TypeError),
        ],
    )
    def test_what_is_none(self, buffer: sa.Buffer, index: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            buffer.view_as(np.float32, (4, 4))[index]

    def test_selections_are_memory(self, buffer: sa.Buffer) -> None:
        view = buffer.view_as(np.int64)
        view.fill(1)
        view[2:4].copy_from(np.array([5, 6]))
        view[7].fill(9)
        assert elements(view).tolist() == [1, 1, 5, 6, 1, 1, 1, 9]
        part = view.view(2, 4)
        assert (part.address, part.shape) == (view.address + 16, (2,))
        assert part.__cuda_array_interface__["typestr"] == "<i8" and part.__cuda_array_interface__["shape"] == (2,)

    def test_a_selection_keeps_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        part = pool.allocate(64, stream).view_as(np.int64)[1:3]
        gc.collect()
        part.fill(3)
        assert elements(part).tolist() == [3, 3]


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
        with pytest.raises(TypeError):
            view.copy_from(other)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            view.copy_to(other)  # type: ignore[arg-type]


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

    def test_structures(self, host: sa.Buffer) -> None:
        kind = np.dtype([("key", np.int32), ("value", np.float32)])
        array = np.asarray(host.view_as(kind))
        assert array.dtype == kind and array["key"][1] == host.as_array(np.int32)[2]

    def test_types_that_interfaces_cannot_name(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        array = np.asarray(host.view_as(PADDED))
        assert array.dtype == PADDED and array.ctypes.data == host.address
        with pytest.raises(AttributeError, match="view_as"):
            _ = buffer.view_as(PADDED).__cuda_array_interface__

    def test_of_device_memory(self, buffer: sa.Buffer) -> None:
        if not buffer.host_accessible:
            with pytest.raises(ValueError, match="copy_to"):
                np.asarray(buffer.view_as(np.float32))
            with pytest.raises(ValueError, match="copy it with copy_to"):
                np.asarray(buffer)


class TestDevices:
    def test_interface(self, buffer: sa.Buffer, stream: sa.Stream) -> None:
        assert buffer.view_as("<f4", (4, 4)).__cuda_array_interface__ == {
            "shape": (4, 4),
            "typestr": "<f4",
            "data": (buffer.address, False),
            "strides": None,
            "version": 3,
            "stream": stream.handle,
        }

    @pytest.mark.parametrize("version", [None, (1, 0)])
    @pytest.mark.parametrize(
        ("dtype", "code", "bits"),
        [(np.int16, 0, 16), (np.uint8, 1, 8), (np.float16, 2, 16), (np.complex64, 5, 64), (np.bool_, 6, 8)],
    )
    def test_capsules(self, buffer: sa.Buffer, dtype: Any, code: int, bits: int, version: Any) -> None:
        view = buffer.view_as(dtype, (2, -1))
        capsule = view.__dlpack__(stream=-1, max_version=version)
        if version is not None:
            assert "versioned" in repr(capsule)
            return
        tensor = (consumer := Consumer(capsule)).tensor
        assert (tensor.code, tensor.bits, tensor.lanes, tensor.ndim) == (code, bits, 1, 2)
        assert (tensor.shape[0], tensor.shape[1]) == view.shape
        assert (tensor.data, tensor.device.type, tensor.device.id) == (buffer.address, 2, 0)
        consumer.delete()

    def test_types_that_dlpack_does_not_have(self, buffer: sa.Buffer) -> None:
        with pytest.raises(BufferError, match="DLPack"):
            buffer.view_as("V4").__dlpack__(stream=-1)

    def test_a_capsule_keeps_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        capsule = pool.allocate(64, stream).view_as(np.float32, (4, 4)).__dlpack__(stream=-1)
        gc.collect()
        assert pool.statistics().used == 64
        del capsule
        assert pool.statistics().used == 0

    def test_a_stream_waits(self, device: sa.Device, buffer: sa.Buffer, gate: Gate) -> None:
        with device.create_stream() as other:
            gate.hold(buffer.stream)
            buffer.view_as(np.float32).__dlpack__(stream=other.handle)
            buffer.fill(1, other)
            assert pending(other)
            gate.open()
            other.synchronize()
            assert holds(buffer, 1)

    def test_after_a_free(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(64, stream)
        view = buffer.view_as(np.float32)
        buffer.free()
        for use in (lambda: view.__dlpack__(stream=-1), lambda: view.__cuda_array_interface__, lambda: view.address):
            with pytest.raises(sa.ClosedError):
                use()
