"""Small stand-ins for other libraries, with the protocols that the bridges use, on the driver under test.

What they do beside is as little as the tests need: streams, arrays of bytes that can be filled and read, and the way in
which each library takes and gives back memory. The same tests run on the libraries themselves on GPUs.

``STREAMALLOC_DRIVER=simulated python -m tests.interop.standins program.py`` runs a program of the documentation with
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import streamalloc.driver


class Calls:
    """The driver's calls as such a library makes them: on device 0, or the one that is current on the thread."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._local = threading.local()
        self._contexts: dict[int, Any] = {}
        self("cuInit", 0)

    @property
    def device(self) -> int:
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, ordinal: int) -> None:
        self._local.device = ordinal

    def __call__(self, name: str, *args: Any) -> Any:
        result, *values = getattr(self.driver, name)(*args)
        if result:
            raise RuntimeError(f"{name}: {result.name}")
        return values[0] if len(values) == 1 else values

    def here(self, name: str, *args: Any) -> Any:
        """A call under the context of the device that is current."""
        ordinal = self.device
        if ordinal not in self._contexts:
            self._contexts[ordinal] = self("cuDevicePrimaryCtxRetain", ordinal)
        self("cuCtxPushCurrent", self._contexts[ordinal])
        try:
            return self(name, *args)
        finally:
            self("cuCtxPopCurrent")

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.here("cuMemsetD8Async", address, value, nbytes, stream)

    def write(self, address: int, data: Any, stream: int) -> None:
        data = np.ascontiguousarray(data)
        self.here("cuMemcpyHtoDAsync", address, data, data.nbytes, stream)

    def read(self, address: int, nbytes: int, stream: int) -> Any:
        data = np.zeros(nbytes, np.uint8)
        self.here("cuMemcpyDtoHAsync", data, address, nbytes, stream)
        self.here("cuStreamSynchronize", stream)
        return data

    def non_blocking(self) -> int:
        return int(self.here("cuStreamCreate", 1))


def new_pool(calls: Calls, release_threshold: int = 0, max_size: int = 0) -> Any:
    """A driver pool of device 0; never destroyed."""
    driver = calls.driver
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.maxSize = max_size
    pool = calls.here("cuMemPoolCreate", properties)
    attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    calls("cuMemPoolSetAttribute", pool, attribute, driver.cuuint64_t(release_threshold))
    return pool


class _Owner:
    """Keeps memory."""


class FakeStream:
    """A stream that a library made."""

    __module__ = "cupy.cuda"  # wrappers of other modules may outlive their stream

    def __init__(self, calls: Calls, handle: int | None = None) -> None:
        self.calls = calls
        self.device_id = calls.device if handle is None else -1
        self.ptr = calls.non_blocking() if handle is None else handle
        self.made = handle is None

    def synchronize(self) -> None:
        self.calls.here("cuStreamSynchronize", self.ptr)

    def __del__(self) -> None:
        if self.made:
            self.calls.driver.cuStreamDestroy(self.ptr)


# -- CuPy ------------------------------------------------------------------------------------------------------------


def cupy(driver: Any) -> dict[str, ModuleType]:
    calls = Calls(driver)
    local = threading.local()

    class Stream(FakeStream):
        def __init__(self, non_blocking: bool = False, handle: int | None = None) -> None:
            super().__init__(calls, handle)

        def __enter__(self) -> Stream:
            local.streams = [*getattr(local, "streams", ()), self]
            return self

        def __exit__(self, *_: object) -> None:
            local.streams = local.streams[:-1]

        @classmethod
        def from_external(cls, stream: Any) -> Stream:
            return cls(handle=stream.__cuda_stream__()[1])

    Stream.null = Stream(handle=0)  # type: ignore[attr-defined]
    Stream.ptds = Stream(handle=2)  # type: ignore[attr-defined]

    def get_current_stream() -> Any:
        streams = getattr(local, "streams", ())
        return streams[-1] if streams else Stream.null  # type: ignore[attr-defined]

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.id = ordinal

        def __enter__(self) -> None:
            self.before, calls.device = calls.device, self.id

        def __exit__(self, *_: object) -> None:
            calls.device = self.before

    class OutOfMemoryError(MemoryError):
        def __init__(self, size: int, total: int, limit: int = 0) -> None:
            super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes)")

    class UnownedMemory:
        def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
            if device_id < 0 and ptr == 0:
                raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
            self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner

    class MemoryPointer:
        def __init__(self, mem: Any, offset: int) -> None:
            self.mem, self.ptr = mem, mem.ptr + offset

    class MemoryAsync:
        def __init__(self, size: int, stream: Any) -> None:
            self.size, self.device_id, self.ptr = size, calls.device, 0
            self.stream_ref = weakref.ref(stream)
            if size:
                self.ptr = int(calls.here("cuMemAllocAsync", size, stream.ptr))

        def __del__(self) -> None:
            if self.ptr:
                calls.here("cuMemFreeAsync", self.ptr, (self.stream_ref() or get_current_stream()).ptr)

    class MemoryAsyncPool:
        """CuPy's, which asks the pool for figures before each allocation."""

        def __init__(self, pool_handles: Any) -> None:
            self.handles = [driver.CUmemoryPool(handle) for handle in pool_handles]
            everything = (1 << 64) - 1
            attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            for ordinal, handle in enumerate(pool_handles):
                calls("cuDeviceSetMemPool", ordinal, driver.CUmemoryPool(handle))
                calls("cuMemPoolSetAttribute", driver.CUmemoryPool(handle), attribute, driver.cuuint64_t(everything))

        def figure(self, name: str) -> int:
            attribute = getattr(driver.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
            return int(calls("cuMemPoolGetAttribute", self.handles[calls.device], attribute))

        def malloc(self, size: int) -> Any:
            held = self.figure("RESERVED_MEM_CURRENT")
            if held - self.figure("USED_MEM_CURRENT") < size and self.figure("RELEASE_THRESHOLD") < held + size:
                raise OutOfMemoryError(size, held)
            try:
                return malloc_async(-(-size // 512) * 512)
            except RuntimeError as error:
                raise OutOfMemoryError(size, 0) from error

    def malloc_async(size: int) -> Any:
        return MemoryPointer(MemoryAsync(size, get_current_stream()), 0)

    def malloc(size: int) -> Any:
        pointer = int(calls.here("cuMemAlloc", size)) if size else 0
        owner = _Owner()
        weakref.finalize(owner, driver.cuMemFree, pointer)
        return MemoryPointer(UnownedMemory(pointer, size, owner, calls.device), 0)

    state = SimpleNamespace(allocator=malloc)

    def set_allocator(allocator: Any) -> None:
        state.allocator = allocator

    class NdArray:
        def __init__(self, shape: Any, dtype: Any, memptr: Any) -> None:
            self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr
            self.nbytes = math.prod(shape) * self.dtype.itemsize

        def fill(self, value: int) -> None:
            calls.fill(self.data.ptr, value, self.nbytes, get_current_stream().ptr)

        def get(self) -> Any:
            read = calls.read(self.data.ptr, self.nbytes, get_current_stream().ptr)
            return read.view(self.dtype).reshape(self.shape)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "strides": None,
                    "version": 3, "stream": get_current_stream().ptr or 1}  # fmt: skip

    def empty(size: int, dtype: Any = np.uint8) -> Any:
        return NdArray((size,), dtype, state.allocator(size * np.dtype(dtype).itemsize))

    module: Any = ModuleType("cupy")
    module.uint8, module.empty, module.ndarray = np.uint8, empty, NdArray
    module.cuda = SimpleNamespace(
        Stream=Stream, Device=Device, get_current_stream=get_current_stream, MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory, MemoryAsyncPool=MemoryAsyncPool, malloc_async=malloc_async,
        set_allocator=set_allocator, get_allocator=lambda: state.allocator,
        device=SimpleNamespace(get_device_id=lambda: calls.device),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        runtime=SimpleNamespace(getDeviceCount=lambda: int(calls("cuDeviceGetCount"))),
    )  # fmt: skip
    return {"cupy": module}


# -- Numba -----------------------------------------------------------------------------------------------------------


def numba(driver: Any) -> dict[str, ModuleType]:
    calls = Calls(driver)

    class CudaAPIError(RuntimeError):
        def __init__(self, code: int, message: str) -> None:
            super().__init__(code, message)
            self.code = code

    class HostOnlyCUDAMemoryManager:
        def __init__(self, *, context: Any) -> None:
            self.context = context

        def reset(self) -> None: ...

    class NumbaCUDAMemoryManager(HostOnlyCUDAMemoryManager):
        interface_version = 1

        def memalloc(self, size: int) -> Any:
            pointer = int(calls.here("cuMemAlloc", size))
            return MemoryPointer(self.context, pointer, size, finalizer=lambda: driver.cuMemFree(pointer))

    class MemoryPointer:
        def __init__(self, context: Any, pointer: Any, size: int, owner: Any = None, finalizer: Any = None) -> None:
            self.device_pointer, self.size = int(pointer), size
            if finalizer is not None:
                self._finalizer = weakref.finalize(self, finalizer)

    class Context:
        def __init__(self) -> None:
            self.device = SimpleNamespace(id=0)
            ensure_memory_manager()
            self.memory_manager = numba_driver._memory_manager(context=self)

        def get_memory_info(self) -> Any:
            return self.memory_manager.get_memory_info()

        def reset(self) -> None:
            self.memory_manager.reset()

    def ensure_memory_manager() -> None:
        numba_driver._memory_manager = numba_driver._memory_manager or NumbaCUDAMemoryManager

    def set_memory_manager(manager: Any) -> None:
        assert manager(context=None).interface_version == 1
        numba_driver._memory_manager = manager

    class DeviceArray:
        def __init__(self, size: int, memory: Any) -> None:
            self.size, self.gpu_data = size, memory

        def copy_to_device(self, data: Any) -> None:
            calls.write(self.gpu_data.device_pointer, data, 1)

        def copy_to_host(self) -> Any:
            return calls.read(self.gpu_data.device_pointer, self.size, 1)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (self.size,), "typestr": "|u1", "data": (self.gpu_data.device_pointer, False),
                    "strides": None, "version": 3}  # fmt: skip

    def current_context() -> Any:
        if gpu.primary_context is None:
            gpu.primary_context = Context()
        return gpu.primary_context

    def from_cuda_array_interface(interface: Any, owner: Any, sync: bool) -> Any:
        assert "stream" not in interface and sync is False
        nbytes = math.prod(interface["shape"]) * np.dtype(interface["typestr"]).itemsize
        pointer = MemoryPointer(None, interface["data"][0], nbytes)
        pointer.owner = owner  # type: ignore[attr-defined]
        return DeviceArray(nbytes, pointer)

    gpu = SimpleNamespace(primary_context=None)
    cuda: Any = ModuleType("numba.cuda")
    cuda.HostOnlyCUDAMemoryManager, cuda.MemoryPointer = HostOnlyCUDAMemoryManager, MemoryPointer
    cuda.MemoryInfo = lambda free, total: SimpleNamespace(free=free, total=total)
    cuda.current_context = current_context
    cuda.from_cuda_array_interface = from_cuda_array_interface
    cuda.device_array = lambda size, dtype=np.uint8: DeviceArray(size, current_context().memory_manager.memalloc(size))
    numba_driver: Any = ModuleType("numba.cuda.cudadrv.driver")
    numba_driver._memory_manager, numba_driver.set_memory_manager = None, set_memory_manager
    numba_driver.CudaAPIError, numba_driver._ensure_memory_manager = CudaAPIError, ensure_memory_manager
    devices: Any = ModuleType("numba.cuda.cudadrv.devices")
    devices.gpus = SimpleNamespace(lst=[gpu])
    package: Any = ModuleType("numba")
    package.cuda = cuda
    return {"numba": package, "numba.cuda": cuda, "numba.cuda.cudadrv": ModuleType("numba.cuda.cudadrv"),
            "numba.cuda.cudadrv.driver": numba_driver, "numba.cuda.cudadrv.devices": devices}  # fmt: skip


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def torch(driver: Any) -> dict[str, ModuleType]:
    calls = Calls(driver)
    local = threading.local()
    settings = [""]
    mutex = threading.RLock()  # the allocator's
    recording: list[Any] = []
    allocate_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    known: list[dict[int, dict[str, int]]] = []  # the segments of all pools, also of those that were dropped
    freeable: list[tuple[Any, dict[int, dict[str, int]]]] = []
    by_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    segment_size = 2 << 20

    class OutOfMemoryError(RuntimeError): ...

    class CustomAllocator:
        def __init__(self, allocate: int, free: int) -> None:
            # From native code: Python's lock is let go of for the call, and taken in the callback.
            self.allocate, self.free = allocate_type(allocate), free_type(free)

    plain = SimpleNamespace(
        allocate=lambda nbytes, *_: int(calls.here("cuMemAlloc", nbytes)),
        free=lambda address, *_: calls.here("cuMemFree", address),
    )

    class MemPool:
        """Segments of 2 MiB, or of the size of a large tensor; one tensor in each at a time."""

        def __init__(self, allocator: Any = plain) -> None:
            self.allocator = allocator
            self.segments: dict[int, dict[str, int]] = {}
            known.append(self.segments)
            by_id[self.id] = self

        @property
        def id(self) -> int:
            return id(self)

        def use_count(self) -> int:
            return 1 + len(graphs.get(self.id, ())) + recording.count(self)

        def take(self, nbytes: int, stream: int) -> int:
            size = -(-nbytes // segment_size) * segment_size
            with mutex:
                for address, segment in self.segments.items():
                    fits = segment["total_size"] == size and segment["stream"] == stream
                    if fits and not segment["allocated_size"]:
                        segment["allocated_size"] = nbytes
                        return address
            with contextlib.nullcontext() if "release_lock_on_cudamalloc:True" in settings[0] else mutex:
                address = self.allocator.allocate(size, calls.device, stream or None) or 0
            if not address:
                raise OutOfMemoryError("CUDA out of memory.")
            with mutex:
                self.segments[address] = {
                    "address": address, "total_size": size, "allocated_size": nbytes, "stream": stream,
                }  # fmt: skip
            return address

        def __del__(self) -> None:
            # PyTorch aborts the process.
            assert not recording, "a pool is released while allocations are routed"
            assert self.use_count() == 1, "a pool is released while a graph uses it"
            freeable.append((self.allocator, self.segments))
            free_empty(self.allocator, self.segments)

    def free_empty(allocator: Any, segments: dict[int, dict[str, int]]) -> None:
        """As PyTorch does with pools that nobody can allocate from any more: with its lock held."""
        with mutex:
            for address, segment in list(segments.items()):
                if not segment["allocated_size"]:
                    del segments[address]
                    allocator.free(address, segment["total_size"], 0, segment["stream"] or None)

    def empty_cache() -> None:
        for allocator, segments in freeable:
            free_empty(allocator, segments)

    def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, int]]:
        with mutex:
            return [segment for segments in known for segment in segments.values()]

    graphs: dict[int, weakref.WeakSet[Any]] = {}  # the graphs that were captured with a pool, by its id()

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: int = 0) -> Iterator[None]:
        if pool in recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        recording.append(pool)
        local.pools = [*getattr(local, "pools", ()), pool]
        try:
            yield
        finally:
            local.pools.remove(pool)
            recording.remove(pool)

    class Tensor:
        device = SimpleNamespace(type="cuda", index=0)
        dtype = "uint8"

        def __init__(self, size: int, address: int, let_go: Callable[[], object], keep: object = None) -> None:
            self.size, self.address, self.keep = size, address, keep
            weakref.finalize(self, let_go)

        @property
        def shape(self) -> tuple[int]:
            return (self.size,)

        def data_ptr(self) -> int:
            return self.address

        def numel(self) -> int:
            return self.size

        def element_size(self) -> int:
            return 1

        def is_contiguous(self) -> bool:
            return True

        def detach(self) -> Tensor:
            return self

        def fill_(self, value: int) -> Tensor:
            calls.fill(self.address, value, self.size, current_stream().cuda_stream)
            return self

        def cpu(self) -> Any:
            read = calls.read(self.address, self.size, current_stream().cuda_stream)
            return SimpleNamespace(numpy=lambda: read)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None,
                    "version": 2}  # fmt: skip

    class HostTensor:
        def __init__(self, array: Any) -> None:
            self.array, self.dtype, self.shape = array, "uint8", array.shape

        def numpy(self) -> Any:
            return self.array

        def view(self, *_: object) -> HostTensor:
            return self

        def clone(self) -> HostTensor:
            return HostTensor(self.array.copy())

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

    def empty(size: int, dtype: Any = None, device: str = "cuda", pin_memory: bool = False) -> Any:
        if device == "cpu":
            return HostTensor(np.empty(size, np.uint8))
        # Of several pools the one that was named first, as PyTorch has it.
        pool = next(iter(getattr(local, "pools", ())), None)
        if pool is not None:
            address = pool.take(size, current_stream().cuda_stream)
            segments = pool.segments  # the tensor does not keep the pool

            def let_go() -> None:
                with mutex:
                    segments[address]["allocated_size"] = 0

            return Tensor(size, address, let_go)
        address = int(calls.here("cuMemAlloc", size))
        return Tensor(size, address, lambda: driver.cuMemFree(address))

    class Stream(FakeStream):
        def __init__(self, handle: int | None = None) -> None:
            super().__init__(calls, handle)
            self.cuda_stream = self.ptr
            del self.ptr

        def synchronize(self) -> None:
            calls.here("cuStreamSynchronize", self.cuda_stream)

        def __del__(self) -> None:
            """PyTorch's streams are of a pool of its own, and stay."""

    null = Stream(0)

    def current_stream(device: Any = None) -> Any:
        return getattr(local, "stream", null)

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        before, local.stream = current_stream(), stream
        try:
            yield
        finally:
            local.stream = before

    def capturing() -> bool:
        return bool(calls.here("cuStreamIsCapturing", current_stream().cuda_stream))

    @contextlib.contextmanager
    def on_device(ordinal: int) -> Iterator[None]:
        before, calls.device = calls.device, ordinal
        try:
            yield
        finally:
            calls.device = before

    class CUDAGraph:
        executable: Any

        def replay(self) -> None:
            calls.here("cuGraphLaunch", self.executable, current_stream().cuda_stream)

    @contextlib.contextmanager
    def graph(graph: Any, pool: int, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        stream = stream or Stream()
        with on(stream), use_mem_pool(by_id[pool]):
            calls.here("cuStreamBeginCapture", stream.cuda_stream, driver.CUstreamCaptureMode(0))
            try:
                yield
            finally:
                captured = calls.here("cuStreamEndCapture", stream.cuda_stream)
        graph.executable = calls.here("cuGraphInstantiate", captured, 0)
        graphs.setdefault(pool, weakref.WeakSet()).add(graph)

    def from_dlpack(array: Any) -> Tensor:
        capsule = array.__dlpack__(stream=current_stream().cuda_stream or 1)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value or 0
        return Tensor(array.nbytes, address, lambda: None, capsule)

    module: Any = ModuleType("torch")
    module.uint8, module.dtype, module.empty, module.from_dlpack = "uint8", type("dtype", (), {}), empty, from_dlpack
    module.OutOfMemoryError, module.from_numpy = OutOfMemoryError, HostTensor
    module._C = SimpleNamespace(
        _cuda_customAllocator=CustomAllocator,
        _accelerator_getAllocatorSettings=lambda: settings[0],
        _accelerator_setAllocatorSettings=lambda text: settings.__setitem__(0, text),
    )
    module.cuda = SimpleNamespace(
        MemPool=MemPool, use_mem_pool=use_mem_pool, Stream=Stream, stream=on, current_stream=current_stream,
        device=on_device, is_initialized=lambda: True,
        empty_cache=empty_cache, memory_snapshot=memory_snapshot, graphs=graphs, CUDAGraph=CUDAGraph, graph=graph,
        current_device=lambda: calls.device, is_available=lambda: True, is_current_stream_capturing=capturing,
    )  # fmt: skip
    return {"torch": module}


# -- RMM -------------------------------------------------------------------------------------------------------------


def rmm(driver: Any) -> dict[str, ModuleType]:
    calls = Calls(driver)

    class Stream(FakeStream):
        def __init__(self, handle: int | None = None) -> None:
            super().__init__(calls, handle)

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.ptr)

    null = Stream(0)

    class CudaMemoryResource:
        def allocate(self, nbytes: int, stream: Any) -> int:
            return int(calls.here("cuMemAlloc", nbytes)) if nbytes else 0

        def deallocate(self, address: int, nbytes: int, stream: Any) -> None:
            calls.here("cuMemFree", address)

    class CudaAsyncViewMemoryResource:
        def __init__(self, pool_handle: Any) -> None:
            assert isinstance(pool_handle, driver.CUmemoryPool)
            self.pool = pool_handle

        def allocate(self, nbytes: int, stream: Any) -> int:
            try:
                return int(calls.here("cuMemAllocFromPoolAsync", nbytes, self.pool, stream.ptr)) if nbytes else 0
            except RuntimeError as error:
                raise MemoryError(str(error)) from None

        def deallocate(self, address: int, nbytes: int, stream: Any) -> None:
            calls.here("cuMemFreeAsync", address, stream.ptr)

    class CudaAsyncMemoryResource(CudaAsyncViewMemoryResource):
        def __init__(self, release_threshold: int = 0) -> None:
            super().__init__(new_pool(calls, release_threshold=release_threshold))

    class StatisticsResourceAdaptor:
        def __init__(self, upstream_mr: Any) -> None:
            self.upstream_mr = upstream_mr
            self.allocation_counts = SimpleNamespace(current_bytes=0, peak_bytes=0)

        def allocate(self, nbytes: int, stream: Any) -> Any:
            address, counts = self.upstream_mr.allocate(nbytes, stream), self.allocation_counts
            counts.current_bytes += nbytes
            counts.peak_bytes = max(counts.peak_bytes, counts.current_bytes)
            return address

        def deallocate(self, address: int, nbytes: int, stream: Any) -> None:
            self.allocation_counts.current_bytes -= nbytes
            self.upstream_mr.deallocate(address, nbytes, stream)

    class CallbackMemoryResource:
        def __init__(self, allocate_func: Any, deallocate_func: Any) -> None:
            # RMM makes a new stream object of the handle for each call.
            self.allocate = lambda nbytes, stream: allocate_func(nbytes, Stream(stream.ptr))
            self.deallocate = lambda at, nbytes, stream: deallocate_func(at, nbytes, Stream(stream.ptr))

    resources: dict[int, Any] = {0: CudaMemoryResource()}

    class DeviceBuffer:
        def __init__(self, size: int, stream: Any = null) -> None:
            self.resource, self.size, self.stream = resources[0], size, stream
            self.ptr = 0
            self.ptr = self.resource.allocate(size, stream)

        def copy_from_host(self, data: Any, stream: Any = null) -> None:
            calls.write(self.ptr, data, stream.ptr)

        def copy_to_host(self, stream: Any = null) -> Any:
            return calls.read(self.ptr, self.size, stream.ptr)

        def __del__(self) -> None:
            if self.ptr:
                self.resource.deallocate(self.ptr, self.size, self.stream)

    module: Any = ModuleType("rmm")
    module.DeviceBuffer, module.resources = DeviceBuffer, resources
    module.mr = SimpleNamespace(
        CudaAsyncViewMemoryResource=CudaAsyncViewMemoryResource, CallbackMemoryResource=CallbackMemoryResource,
        CudaAsyncMemoryResource=CudaAsyncMemoryResource, StatisticsResourceAdaptor=StatisticsResourceAdaptor,
        CudaMemoryResource=CudaMemoryResource,
        get_per_device_resource=resources.__getitem__, set_per_device_resource=resources.__setitem__,
        set_current_device_resource=functools.partial(resources.__setitem__, 0),
    )  # fmt: skip
    module.pylibrmm = SimpleNamespace(stream=SimpleNamespace(Stream=Stream))
    return {"rmm": module}


# -- cuda.core -------------------------------------------------------------------------------------------------------


def cuda_core(driver: Any) -> dict[str, ModuleType]:
    calls = Calls(driver)

    class CUDAError(Exception): ...

    class Stream(FakeStream):
        def __init__(self) -> None:
            super().__init__(calls)

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.ptr)

        def sync(self) -> None:
            self.synchronize()

    class MemoryResource: ...

    class Buffer:
        def __init__(self, ptr: int, size: int, mr: Any, owner: Any, stream: Any) -> None:
            self.handle, self.size, self.memory_resource, self._owner, self._stream = ptr, size, mr, owner, stream

        @staticmethod
        def from_handle(ptr: int, size: int, mr: Any = None, owner: Any = None, *, stream: Any = None) -> Buffer:
            assert (mr is None) != (owner is None)
            return Buffer(ptr, size, mr, owner, stream)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.memory_resource, name)

        def fill(self, value: int, *, stream: Any) -> None:
            calls.fill(self.handle, value, self.size, stream.ptr)

        def copy_to(self, dst: Any, *, stream: Any) -> None:
            calls.here("cuMemcpyDtoHAsync", dst.array, self.handle, self.size, stream.ptr)

        def close(self, stream: Any = None) -> None:
            resource, self.memory_resource = self.memory_resource, None
            if resource is not None:
                resource.deallocate(self.handle, self.size, stream=stream or self._stream)

        def __del__(self) -> None:
            self.close()

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (self.size,), "typestr": "|u1", "data": (self.handle, False), "version": 3}

    class DeviceMemoryResource(MemoryResource):
        is_device_accessible, is_host_accessible = True, False

        def __init__(self, device: Any, options: Any = None) -> None:
            self.device_id = device.device_id
            if options is not None:
                self.handle = new_pool(calls, max_size=options.max_size)
                return
            self.handle = calls("cuDeviceGetMemPool", self.device_id)
            self.is_handle_owned = False
            attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            if not int(calls("cuMemPoolGetAttribute", self.handle, attribute)):
                calls("cuMemPoolSetAttribute", self.handle, attribute, driver.cuuint64_t((1 << 64) - 1))

        def allocate(self, size: int, *, stream: Any) -> Buffer:
            try:
                pointer = int(calls("cuMemAllocFromPoolAsync", size, self.handle, stream.ptr))
            except RuntimeError as error:
                raise CUDAError(str(error)) from None
            return Buffer(pointer, size, self, None, stream)

        def deallocate(self, ptr: int, size: int, *, stream: Any) -> None:
            calls("cuMemFreeAsync", ptr, stream.ptr)

    class HostBuffer:
        def __init__(self, size: int) -> None:
            self.array = np.zeros(size, np.uint8)
            self.__dlpack__, self.__dlpack_device__ = self.array.__dlpack__, self.array.__dlpack_device__

    resources: dict[int, Any] = {}

    class Device:
        def __init__(self, ordinal: int = 0) -> None:
            self.device_id = ordinal

        def set_current(self) -> None: ...

        def create_stream(self) -> Stream:
            return Stream()

        @property
        def memory_resource(self) -> Any:
            if self.device_id not in resources:
                resources[self.device_id] = DeviceMemoryResource(self)
            return resources[self.device_id]

        @memory_resource.setter
        def memory_resource(self, resource: Any) -> None:
            resources[self.device_id] = resource

        def allocate(self, size: int, *, stream: Any) -> Any:
            return self.memory_resource.allocate(size, stream=stream)

    module: Any = ModuleType("cuda.core")
    module.Device, module.Buffer, module.MemoryResource = Device, Buffer, MemoryResource
    module.DeviceMemoryResource, module.DeviceMemoryResourceOptions = DeviceMemoryResource, SimpleNamespace
    module.LegacyPinnedMemoryResource = lambda: SimpleNamespace(allocate=HostBuffer)
    utils: Any = ModuleType("cuda.core._utils.cuda_utils")
    utils.CUDAError = CUDAError
    return {"cuda.core": module, "cuda.core._utils": ModuleType("cuda.core._utils"),
            "cuda.core._utils.cuda_utils": utils}  # fmt: skip


# -- torch_memory_saver and vLLM's allocator --------------------------------------------------------------------------


class Sleeper:
    """PyTorch's tensors in memory that is released and mapped again, as both libraries do it."""

    def __init__(self, driver: Any) -> None:
        self.calls = Calls(driver)
        self.driver = driver
        self.made: dict[int, SimpleNamespace] = {}

    @contextlib.contextmanager
    def pool(self, tag: str) -> Iterator[None]:
        import torch

        allocator = SimpleNamespace(allocate=lambda nbytes, *_: self.allocate(nbytes, tag), free=self.free)
        pool = torch.cuda.MemPool(allocator)
        with torch.cuda.use_mem_pool(pool):
            yield

    def allocate(self, nbytes: int, tag: str) -> int:
        address = int(self.calls("cuMemAddressReserve", nbytes, 0, 0, 0))
        self.made[address] = SimpleNamespace(nbytes=nbytes, tag=tag, bytes=None)
        self.map(address)
        return address

    def map(self, address: int) -> None:
        driver, one = self.driver, self.made[address]
        properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        one.handle = self.calls("cuMemCreate", one.nbytes, properties, 0)
        self.calls("cuMemMap", address, one.nbytes, 0, one.handle, 0)
        self.calls("cuMemSetAccess", address, one.nbytes, [access], 1)
        if one.bytes is not None:
            self.calls.here("cuMemcpyHtoD", address, one.bytes, one.nbytes)

    def unmap(self, address: int, keep: bool) -> None:
        one = self.made[address]
        self.calls.here("cuCtxSynchronize")
        one.bytes = np.empty(one.nbytes, np.uint8) if keep else None
        if keep:
            self.calls.here("cuMemcpyDtoH", one.bytes, address, one.nbytes)
        self.calls("cuMemUnmap", address, one.nbytes)
        self.calls("cuMemRelease", one.handle)

    def free(self, address: int, *_: object) -> None:
        self.unmap(address, keep=False)
        self.calls("cuMemAddressFree", address, self.made.pop(address).nbytes)

    def tagged(self, tags: Any) -> list[int]:
        return [address for address, one in self.made.items() if tags is None or one.tag in tags]


def torch_memory_saver(driver: Any) -> dict[str, ModuleType]:
    sleeper = Sleeper(driver)
    kept: set[str] = set()

    class TorchMemorySaver:
        hook_mode = "preload"

        def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Any:
            kept.update([tag] if enable_cpu_backup else [])
            return sleeper.pool(tag)

        def pause(self, tag: str) -> None:
            for address in sleeper.tagged([tag]):
                sleeper.unmap(address, keep=tag in kept)

        def resume(self, tag: str) -> None:
            for address in sleeper.tagged([tag]):
                sleeper.map(address)

    module: Any = ModuleType("torch_memory_saver")
    module.torch_memory_saver = TorchMemorySaver()
    return {"torch_memory_saver": module}


def vllm(driver: Any) -> dict[str, ModuleType]:
    sleeper = Sleeper(driver)

    class CuMemAllocator:
        @staticmethod
        def get_instance() -> CuMemAllocator:
            return instance

        def use_memory_pool(self, tag: str = "default") -> Any:
            return sleeper.pool(tag)

        def sleep(self, offload_tags: Any = ("default",)) -> None:
            for address in sleeper.tagged(None):
                sleeper.unmap(address, keep=sleeper.made[address].tag in offload_tags)

        def wake_up(self, tags: list[str] | None = None) -> None:
            for address in sleeper.tagged(tags):
                sleeper.map(address)

    instance = CuMemAllocator()
    module: Any = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator = CuMemAllocator
    packages = {name: ModuleType(name) for name in ("vllm", "vllm.device_allocator")}
    return {**packages, "vllm.device_allocator.cumem": module}


STANDINS: dict[str, Callable[[Any], dict[str, ModuleType]]] = {
    "cupy": cupy, "numba": numba, "torch": torch, "rmm": rmm, "cuda_core": cuda_core,
    "torch_memory_saver": torch_memory_saver, "vllm": vllm,
}  # fmt: skip


def run(program: str) -> None:
    """Run a program of the documentation with the stand-ins, on the default driver."""
    for standin in STANDINS.values():
        sys.modules.update(standin(streamalloc.driver.default()))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1])
