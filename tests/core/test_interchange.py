"""Memory in other libraries' hands without a copy: numpy, the CUDA array interface, and DLPack."""

import ctypes
import gc
import sys
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from tests.support import each_raises, in_threads, names

CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType in dlpack.h


class TestNumpy:
    def test_shares_the_memory(self, host: sa.Buffer) -> None:
        array = host.as_array()
        assert (array.ctypes.data, array.dtype.name, array.shape) == (host.address, "uint8", (64,))
        array[3] = 200
        assert host.as_array()[3] == np.asarray(host)[3] == np.from_dlpack(host)[3] == 200
        assert host[3:4].as_array()[0] == 200

    def test_types_and_shapes(self, host: sa.Buffer) -> None:
        assert host.as_array(np.float32, (4, 4)).shape == (4, 4)
        assert host.as_array("<u2").tolist()[:2] == [0x0100, 0x0302]
        assert host[8:].as_array(np.uint64, (7,)).shape == (7,)
        assert host[:0].as_array().size == 0
        for dtype, shape in ((np.uint8, (63,)), (np.float32, (4, 5)), (np.dtype("V7"), None)):
            with pytest.raises(ValueError):
                host.as_array(dtype, shape)

    def test_device_memory_is_refused(self, buffer: sa.Buffer) -> None:
        each_raises(
            ValueError, buffer.as_array, lambda: np.asarray(buffer.view_as(np.float32)), match=r"device memory.*copy_to"
        )
        assert not hasattr(buffer, "__array_interface__")
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(buffer)

    def test_after_a_free(self, host_pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = host_pool.allocate(64, stream)
        buffer.free()
        each_raises(sa.ClosedError, buffer.as_array, lambda: buffer.__buffer__(0))

    def test_a_device_uses_it_once_granted(self, device: sa.Device, host_pool: sa.MemoryPool, host: sa.Buffer) -> None:
        with pytest.raises(sa.InvalidValueError, match="set_access"):
            host.fill(1)
        assert not hasattr(host, "__cuda_array_interface__") and host.__dlpack_device__() == (CPU, 0)
        host_pool.set_access(device, sa.MemAccess.READWRITE)
        assert host.device_accessible and host.__dlpack_device__() == (CUDA_HOST, 0)
        assert host.__cuda_array_interface__["data"] == (host.address, False)
        host.fill(3)
        host.stream.synchronize()
        assert (host.as_array() == 3).all()


class TestBuffer:
    def test_is_the_memory_itself(self, host: sa.Buffer) -> None:
        view = host.__buffer__(1)
        assert (view.format, view.nbytes, view.readonly) == ("B", host.nbytes, False)
        view[3] = 201
        assert host.as_array()[3] == 201 and host[3:4].__buffer__(0)[0] == 201
        assert host.view_as(np.uint8).__buffer__(0).nbytes == host.nbytes

    def test_of_device_memory(self, buffer: sa.Buffer) -> None:
        with pytest.raises(BufferError, match="copy it with copy_to"):
            buffer.__buffer__(0)

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have no buffers before Python 3.12")
    def test_of_python(self, host: sa.Buffer) -> None:
        with memoryview(host) as view:
            assert view.nbytes == host.nbytes
        assert np.asarray(host).ctypes.data == host.address


class TestCudaArrayInterface:
    @pytest.mark.parametrize(
        ("view", "typestr", "shape", "offset"),
        [
            (lambda buffer: buffer, "|u1", (64,), 0),
            (lambda buffer: buffer[8:24], "|u1", (16,), 8),
            (lambda buffer: buffer.view_as("<f4", (4, 4)), "<f4", (4, 4), 0),
            (lambda buffer: buffer.view_as("<i8").view(2, 4), "<i8", (2,), 16),
            (lambda buffer: buffer[:8].view_as("<f8", ()), "<f8", (), 0),
        ],
    )
    def test_fields(self, buffer: sa.Buffer, view: Any, typestr: str, shape: Any, offset: int) -> None:
        for _ in range(2):  # the first goes the slow way
            assert view(buffer).__cuda_array_interface__ == {
                "shape": shape,
                "typestr": typestr,
                "data": (buffer.address + offset, False),
                "strides": None,
                "version": 3,
                "stream": buffer.stream.handle,
            }

    def test_default_streams_have_numbers(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        """Stream 0 is not allowed in it."""

        class Null:
            ptr = 0

        streams: dict[Any, int] = {device.default_stream: 1, device.per_thread_stream: 2, Null(): 1}
        with device.current():
            for stream, number in streams.items():
                with pool.allocate(64, stream) as buffer:
                    assert buffer.__cuda_array_interface__["stream"] == number

    def test_empty(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(0, stream) as buffer:
            interface = buffer.__cuda_array_interface__
            assert (interface["shape"], interface["data"]) == ((0,), (0, False))


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, and what comes after it in ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_named = ctypes.py_object, ctypes.c_char_p
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_named)(("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, *_named)(("PyCapsule_SetName", ctypes.pythonapi))


class Consumer:
    """A library that takes a capsule over, as DLPack says: renamed at once, its deleter called at the end."""

    def __init__(self, capsule: Any) -> None:
        self.address: int = _pointer(capsule, b"dltensor")
        self.tensor = _Tensor.from_address(self.address)
        assert _rename(capsule, b"used_dltensor") == 0

    def delete(self) -> None:
        self.tensor.deleter(self.address)


def versioned(capsule: Any) -> _Tensor:
    """The tensor in a ``DLManagedTensorVersioned``, which has 32 bytes before it, and no deleter behind."""
    return _Tensor.from_address(_pointer(capsule, b"dltensor_versioned") + 32)


class TestDLPack:
    @pytest.mark.gpus(2)
    def test_device_of_a_peer_s_memory(self, peer: sa.Device) -> None:
        with sa.MemoryPool(peer) as pool, peer.create_stream() as stream, pool.allocate(64, stream) as buffer:
            assert buffer.__dlpack_device__() == (CUDA, 1)

    @pytest.mark.parametrize(
        ("dtype", "code", "bits"),
        [
            (None, 1, 8),
            (np.int16, 0, 16),
            (np.uint8, 1, 8),
            (np.float16, 2, 16),
            (np.complex64, 5, 64),
            (np.bool_, 6, 8),
        ],
    )
    def test_tensor(self, buffer: sa.Buffer, dtype: Any, code: int, bits: int) -> None:
        memory: Any = buffer[8:40] if dtype is None else buffer[8:40].view_as(dtype, (2, -1))
        shape = getattr(memory, "shape", (32,))
        for _ in range(2):  # the first of a device goes the slow way
            consumer = Consumer(memory.__dlpack__(stream=-1))
            capsule = memory.__dlpack__(stream=-1, max_version=(1, 0))
            for tensor in (consumer.tensor, versioned(capsule)):
                assert (tensor.data, tensor.byte_offset) == (buffer.address + 8, 0)
                assert (tensor.device.type, tensor.device.id) == memory.__dlpack_device__() == (CUDA, 0)
                assert tuple(tensor.shape[: tensor.ndim]) == shape
                assert not tensor.strides or tensor.strides[tensor.ndim - 1] == 1
                assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
            consumer.delete()

    def test_types_that_dlpack_does_not_have(self, buffer: sa.Buffer) -> None:
        with pytest.raises(BufferError, match="NumPy exports no"):
            buffer.view_as("V4").__dlpack__(stream=-1)

    @pytest.mark.parametrize("version", [None, (1, 0)])
    @pytest.mark.parametrize("typed", [False, True])
    def test_capsules_keep_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream, version: Any, typed: bool) -> None:
        for _ in range(2):  # the first of a device goes the slow way
            buffer = pool.allocate(64, stream)
            capsule = (buffer.view_as(np.float32) if typed else buffer).__dlpack__(stream=-1, max_version=version)
            del buffer
            gc.collect()
            assert pool.statistics().used == 64
            del capsule
            assert pool.statistics().used == 0

    def test_a_consumer_deletes_on_its_own_thread(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        consumer = Consumer(pool.allocate(64, stream).__dlpack__(stream=-1))
        gc.collect()
        assert pool.statistics().used == 64
        in_threads(consumer.delete)
        assert pool.statistics().used == 0

    @pytest.mark.parametrize("take", [np.from_dlpack, lambda buffer: buffer.as_array(np.uint32)[2:]])
    def test_arrays_of_numpy_keep_the_memory(self, host_pool: sa.MemoryPool, stream: sa.Stream, take: Any) -> None:
        buffer = host_pool.allocate(64, stream)
        stream.synchronize()
        array = take(buffer)
        del buffer
        gc.collect()
        assert host_pool.statistics().used == 64
        del array
        assert host_pool.statistics().used == 0

    def test_at_the_end_of_the_interpreter(self, python: Callable[..., CompletedProcess[str]]) -> None:
        """The array that is exported is freed late; with debugging, what it needs then is overwritten once freed."""
        code = "from streamalloc.formats.arrays import exported; exported(None, 64, 64, (2, 0)).__dlpack__()"
        ended = python(code, PYTHONMALLOC="debug")
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_what_cannot_be_done_without_a_copy(self, buffer: sa.Buffer, host: sa.Buffer) -> None:
        each_raises(BufferError, lambda: buffer.__dlpack__(dl_device=(CPU, 0)), match=r"\(2, 0\)")
        each_raises(BufferError, lambda: host.__dlpack__(copy=True), match="copy")
        assert "dltensor" in repr(host.__dlpack__(copy=False, dl_device=(CPU, 0), max_version=(1, 0)))


class TestDLPackOrder:
    """The consumer's stream is made to wait for ours, and nothing else is done (Python array API, ``__dlpack__``)."""

    WAITS = ("cuEventRecord", "cuStreamWaitEvent", "cuStreamSynchronize", "cuCtxSynchronize")

    @pytest.mark.parametrize("typed", [False, True])
    @pytest.mark.parametrize(("asked", "waits"), [(None, 1), (1, 1), (2, 2), ("their own", None)])
    def test_the_consumer_s_stream_waits(
        self, traced: Any, device: sa.Device, buffer: sa.Buffer, asked: Any, waits: int | None, typed: bool
    ) -> None:
        with device.create_stream() as theirs:
            asked, waits = (theirs.handle, theirs.handle) if waits is None else (asked, waits)
            for _ in range(3):  # from the second on with an event that was used before
                traced.calls.clear()
                (buffer.view_as(np.float32) if typed else buffer).__dlpack__(stream=asked)
                made = [call for call in traced.calls if call.name in self.WAITS]
                assert [call.name for call in made] == ["cuEventRecord", "cuStreamWaitEvent"]
                assert int(made[0].args[1]) == buffer.stream.handle and int(made[1].args[0]) == waits
                assert int(made[0].args[0]) == int(made[1].args[1])

    @pytest.mark.parametrize("which", ["none", "the same"])
    def test_nothing_to_order(self, traced: Any, buffer: sa.Buffer, which: str) -> None:
        traced.calls.clear()
        buffer.__dlpack__(stream=-1 if which == "none" else buffer.stream.handle)
        assert names(traced, *self.WAITS) == []

    @pytest.mark.parametrize("wrong", ["1", -5, 1 << 70])
    def test_what_is_no_stream_loses_no_event(self, traced: Any, buffer: sa.Buffer, wrong: Any) -> None:
        buffer.stream.record().close()
        with pytest.raises((TypeError, OverflowError)):
            buffer.__dlpack__(stream=wrong)
        traced.calls.clear()
        buffer.stream.record().close()
        assert names(traced, "cuEventCreate", "cuEventRecord") == ["cuEventRecord"]

    def test_zero_is_ambiguous(self, buffer: sa.Buffer) -> None:
        with pytest.raises(ValueError, match="ambiguous"):
            buffer.__dlpack__(stream=0)
