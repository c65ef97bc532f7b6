"""Memory in other libraries' hands without a copy: numpy, the CUDA array interface, and DLPack."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from tests.support import holds, in_threads, names

CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType in dlpack.h


class TestNumpy:
    def test_shares_the_memory(self, host: sa.Buffer) -> None:
        array = host.as_array()
        assert (array.ctypes.data, array.dtype.name, array.shape) == (host.address, "uint8", (64,))
        array[3] = 200
        assert host.as_array()[3] == np.asarray(host)[3] == 200
        assert host[3:4].as_array()[0] == 200

    def test_what_streams_write_is_there(self, host: sa.Buffer, buffer: sa.Buffer) -> None:
        buffer.fill(7)
        host.copy_from(buffer)
        host.stream.synchronize()
        assert (host.as_array() == 7).all()
        host.as_array()[:] = 9
        buffer.copy_from(host)
        assert holds(buffer, 9)

    @pytest.mark.parametrize("node", [None, 0])
    def test_of_a_numa_node(self, device: sa.Device, stream: sa.Stream, node: int | None) -> None:
        location = sa.MemLocation.host() if node is None else sa.MemLocation.host_numa(node)
        with sa.MemoryPool(location) as pool, pool.allocate(8, stream) as buffer:
            stream.synchronize()
            assert buffer.host_accessible and buffer.location == location
            buffer.as_array(np.int64)[0] = -5
            assert buffer.as_array(np.int64)[0] == -5

    def test_types_and_shapes(self, host: sa.Buffer) -> None:
        assert host.as_array(np.float32, (4, 4)).shape == (4, 4)
        assert host.as_array("<u2").tolist()[:2] == [0x0100, 0x0302]
        assert host[8:].as_array(np.uint64, (7,)).shape == (7,)

    @pytest.mark.parametrize(("dtype", "shape"), [(np.uint8, (63,)), (np.float32, (4, 5)), (np.dtype("V7"), None)])
    def test_that_do_not_fit(self, host: sa.Buffer, dtype: Any, shape: Any) -> None:
        with pytest.raises(ValueError):
            host.as_array(dtype, shape)

    def test_keeps_the_memory(self, host_pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = host_pool.allocate(64, stream)
        stream.synchronize()
        array = buffer.as_array(np.uint32)[2:]
        del buffer
        gc.collect()
        assert host_pool.statistics().used == 64
        del array
        assert host_pool.statistics().used == 0

    def test_device_memory_is_refused(self, buffer: sa.Buffer) -> None:
        with pytest.raises(ValueError, match="device memory"):
            buffer.as_array()
        assert not hasattr(buffer, "__array_interface__")

    def test_after_a_free(self, host_pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = host_pool.allocate(64, stream)
        buffer.free()
        with pytest.raises(sa.ClosedError):
            buffer.as_array()

    def test_empty(self, host_pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with host_pool.allocate(0, stream) as buffer:
            assert buffer.as_array().size == 0

    def test_a_device_uses_it_once_granted(self, device: sa.Device, host_pool: sa.MemoryPool, host: sa.Buffer) -> None:
        with pytest.raises(sa.InvalidValueError, match="set_access"):
            host.fill(1)
        host_pool.set_access(device, sa.MemAccess.READWRITE)
        assert host.device_accessible
        host.fill(3)
        host.stream.synchronize()
        assert (host.as_array() == 3).all()


class TestBuffer:
    def test_is_the_memory_itself(self, host: sa.Buffer) -> None:
        view = host.__buffer__(1)
        assert (view.format, view.nbytes, view.readonly) == ("B", host.nbytes, False)
        view[3] = 201
        assert host.as_array()[3] == 201 and host[3:4].__buffer__(0)[0] == 201
        typed = host.view_as(np.uint8).__buffer__(0)
        assert typed.nbytes == host.nbytes

    def test_of_device_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as buffer, pytest.raises(BufferError, match="copy it with copy_to"):
            buffer.__buffer__(0)
        with pytest.raises(sa.ClosedError):
            buffer.__buffer__(0)

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have no buffers before Python 3.12")
    def test_of_python(self, host: sa.Buffer) -> None:
        with memoryview(host) as view:
            assert view.nbytes == host.nbytes
        assert np.asarray(host).ctypes.data == host.address


class TestCudaArrayInterface:
    def test_fields(self, buffer: sa.Buffer, stream: sa.Stream) -> None:
        assert buffer.__cuda_array_interface__ == {
            "shape": (64,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "strides": None,
            "version": 3,
            "stream": stream.handle,
        }

    def test_of_a_view(self, buffer: sa.Buffer) -> None:
        interface = buffer[8:24].__cuda_array_interface__
        assert (interface["shape"], interface["data"]) == ((16,), (buffer.address + 8, False))

    @pytest.mark.parametrize(("default", "handle"), [("default_stream", 1), ("per_thread_stream", 2)])
    def test_default_streams_have_numbers(
        self, device: sa.Device, pool: sa.MemoryPool, default: str, handle: int
    ) -> None:
        with pool.allocate(64, getattr(device, default)) as buffer:
            assert buffer.__cuda_array_interface__["stream"] == handle

    def test_stream_zero_is_not_allowed_in_it(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        class Null:
            ptr = 0

        with device.current(), pool.allocate(64, Null()) as buffer:
            assert buffer.__cuda_array_interface__["stream"] == 1

    def test_empty(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(0, stream) as buffer:
            interface = buffer.__cuda_array_interface__
            assert (interface["shape"], interface["data"]) == ((0,), (0, False))

    def test_what_no_device_may_use_has_none(
        self, device: sa.Device, host_pool: sa.MemoryPool, host: sa.Buffer
    ) -> None:
        assert not hasattr(host, "__cuda_array_interface__")
        host_pool.set_access(device, sa.MemAccess.READWRITE)
        assert host.__cuda_array_interface__["data"] == (host.address, False)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """``DLManagedTensor`` of dlpack.h."""

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


class Consumer:
    """A library that takes a capsule over, as DLPack says: renamed at once, its deleter called at the end."""

    def __init__(self, capsule: Any) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.restype, rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
        self.address: int = pointer(capsule, b"dltensor")
        self.tensor = _Tensor.from_address(self.address)
        assert rename(capsule, b"used_dltensor") == 0

    def delete(self) -> None:
        self.tensor.deleter(self.address)


class TestDLPack:
    def test_device(self, buffer: sa.Buffer, host: sa.Buffer) -> None:
        assert buffer.__dlpack_device__() == (CUDA, 0) and buffer[1:2].__dlpack_device__() == (CUDA, 0)
        assert host.__dlpack_device__() == (CPU, 0)

    @pytest.mark.gpus(2)
    def test_device_of_a_peer_s_memory(self, peer: sa.Device) -> None:
        with sa.MemoryPool(peer) as pool, peer.create_stream() as stream, pool.allocate(64, stream) as buffer:
            assert buffer.__dlpack_device__() == (CUDA, 1)

    def test_device_of_host_memory_that_a_device_may_use(
        self, device: sa.Device, host_pool: sa.MemoryPool, host: sa.Buffer
    ) -> None:
        host_pool.set_access(device, sa.MemAccess.READWRITE)
        assert host.__dlpack_device__() == (CUDA_HOST, 0)

    def test_tensor(self, buffer: sa.Buffer) -> None:
        consumer = Consumer(buffer[8:40].__dlpack__(stream=-1))
        tensor = consumer.tensor
        assert tensor.data == buffer.address + 8 and tensor.byte_offset == 0
        assert (tensor.device.type, tensor.device.id) == (CUDA, 0)
        assert (tensor.ndim, tensor.shape[0]) == (1, 32)
        assert not tensor.strides or tensor.strides[0] == 1
        assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)  # kDLUInt
        consumer.delete()

    def test_a_consumer_keeps_the_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        consumer = Consumer(pool.allocate(64, stream).__dlpack__(stream=-1))
        gc.collect()
        assert pool.statistics().used == 64
        consumer.delete()
        assert pool.statistics().used == 0

    def test_a_consumer_deletes_on_its_own_thread(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        consumer = Consumer(pool.allocate(64, stream).__dlpack__(stream=-1))
        in_threads(consumer.delete)
        assert pool.statistics().used == 0

    def test_a_capsule_that_nobody_takes(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        capsule = pool.allocate(64, stream).__dlpack__(stream=-1)
        assert "dltensor" in repr(capsule)
        gc.collect()
        assert pool.statistics().used == 64
        del capsule
        assert pool.statistics().used == 0

    def test_at_the_end_of_the_interpreter(self, python: Callable[..., CompletedProcess[str]]) -> None:
        """The array that is exported is freed late; with debugging, what it needs then is overwritten once freed."""
        code = "from streamalloc.core.array_interfaces import _exported; _exported(None, 64, 64, (2, 0)).__dlpack__()"
        ended = python(code, PYTHONMALLOC="debug")
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_numpy(self, host: sa.Buffer) -> None:
        array = np.from_dlpack(host)
        assert array.ctypes.data == host.address and array.tolist() == list(range(64))
        host.as_array()[5] = 99
        assert array[5] == 99

    def test_numpy_keeps_the_memory(self, host_pool: sa.MemoryPool, stream: sa.Stream) -> None:
        array = np.from_dlpack(host_pool.allocate(64, stream))
        gc.collect()
        assert host_pool.statistics().used == 64
        del array
        assert host_pool.statistics().used == 0

    def test_numpy_cannot_have_device_memory(self, buffer: sa.Buffer) -> None:
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(buffer)

    def test_what_cannot_be_done_without_a_copy(self, buffer: sa.Buffer, host: sa.Buffer) -> None:
        with pytest.raises(BufferError, match=r"\(2, 0\)"):
            buffer.__dlpack__(dl_device=(CPU, 0))
        with pytest.raises(BufferError, match="copy"):
            host.__dlpack__(copy=True)
        assert "dltensor" in repr(host.__dlpack__(copy=False, dl_device=(CPU, 0), max_version=(1, 0)))

    def test_after_a_free(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(64, stream)
        buffer.free()
        with pytest.raises(sa.ClosedError):
            buffer.__dlpack__()


class TestDLPackOrder:
    """The consumer's stream is made to wait for ours, and nothing else is done (Python array API, ``__dlpack__``)."""

    WAITS = ("cuEventRecord", "cuStreamWaitEvent", "cuStreamSynchronize", "cuCtxSynchronize")

    @pytest.fixture
    def memory(self, traced: Any) -> Iterator[sa.Buffer]:
        device = sa.Device(0, driver=traced)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
            del traced.calls[:]
            yield buffer

    @pytest.mark.parametrize(("asked", "waits"), [(None, 1), (1, 1), (2, 2)])
    def test_default_streams(self, traced: Any, memory: sa.Buffer, asked: int | None, waits: int) -> None:
        memory.__dlpack__(stream=asked)
        made = [call for call in traced.calls if call.name in self.WAITS]
        assert [call.name for call in made] == ["cuEventRecord", "cuStreamWaitEvent"]
        assert int(made[0].args[1]) == memory.stream.handle and int(made[1].args[0]) == waits

    def test_a_stream_of_its_own(self, traced: Any, memory: sa.Buffer) -> None:
        with memory.stream.device.create_stream() as theirs:
            del traced.calls[:]
            memory.__dlpack__(stream=theirs.handle)
            made = [call for call in traced.calls if call.name in self.WAITS]
            assert [call.name for call in made] == ["cuEventRecord", "cuStreamWaitEvent"]
            assert int(made[1].args[0]) == theirs.handle

    @pytest.mark.parametrize("which", ["none", "the same"])
    def test_nothing_to_order(self, traced: Any, memory: sa.Buffer, which: str) -> None:
        memory.__dlpack__(stream=-1 if which == "none" else memory.stream.handle)
        assert names(traced, *self.WAITS) == []

    def test_zero_is_ambiguous(self, memory: sa.Buffer) -> None:
        with pytest.raises(ValueError, match="ambiguous"):
            memory.__dlpack__(stream=0)
