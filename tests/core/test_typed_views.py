"""Memory as arrays of a type and shape, on the host and on devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.testing import Gate
from tests.core.test_interchange import Consumer
from tests.support import holds, pending


@pytest.fixture
def host(device: sa.Device, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """64 bytes of host memory with the values 0 to 63."""
    with sa.MemoryPool(sa.MemLocation.host()) as pool, pool.allocate(64, stream) as buffer:
        stream.synchronize()
        buffer.as_array()[:] = np.arange(64, dtype=np.uint8)
        yield buffer


@pytest.fixture
def buffer(pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
    with pool.allocate(64, stream) as buffer:
        yield buffer


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

    def test_bytes_of_it_are_memory_as_ever(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        view = host.view_as(np.float32, (4, 4))
        buffer.view_as(np.float32, (4, 4)).copy_from(view)
        view[0:4].fill(9) if view.device_accessible else None
        buffer.view_as(np.uint16, (32,)).fill(7, width=1)
        assert holds(buffer, 7) and type(view[8:16]) is sa.BufferView


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
        with pytest.raises(BufferError):
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
