"""The libraries as the tests use them: the same few operations on each, on the library itself or on its stand-in."""

import abc
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import interop


class LibraryStream:
    """Stream object of another library, which names no handle, or 0, once it is closed."""

    def __init__(self, handle: int | None) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, Any]:
        return (0, self.handle)


class Library(abc.ABC):
    """The functions of a library that the tests need. Arrays are of bytes."""

    name: str
    fills_without_waiting = True
    """Whether a fill is queued only."""
    ends_with: type[BaseException]
    """The library's own error where memory runs out."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @abc.abstractmethod
    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        """Start the bridge."""

    @abc.abstractmethod
    def stream(self) -> Any:
        """A new non-blocking stream; None where the library does not say on which stream it allocates."""

    @abc.abstractmethod
    def make(self, nbytes: int, stream: Any = None) -> Any:
        """An array, allocated on a stream."""

    @abc.abstractmethod
    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        """Fill an array on a stream."""

    @abc.abstractmethod
    def read(self, array: Any, stream: Any = None) -> Any:
        """The bytes of an array, once the stream is done."""

    def holds(self, array: Any, value: int, stream: Any = None) -> bool:
        found = np.asarray(self.read(array, stream)).view(np.uint8)
        return bool(found.min() == found.max() == value)

    def current(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """A ``with`` block in which a stream is the current one of this thread."""
        raise NotImplementedError

    def handle(self, stream: Any) -> int:
        """The driver's handle of a stream."""
        raise NotImplementedError

    def routed(self, bridge: interop.Bridge) -> contextlib.AbstractContextManager[object]:
        """A ``with`` block in which another thread allocates from the bridge's memory, too."""
        return contextlib.nullcontext()

    def finish(self, bridge: interop.Bridge) -> None:
        """Have the library give back what it keeps."""
        bridge.close()


class CuPy(Library):
    name = "cupy"

    def current(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if stream is None else stream

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    @property
    def ends_with(self) -> Any:  # type: ignore[override]
        return self.module.cuda.memory.OutOfMemoryError

    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        return interop.cupy.use(*sources, callbacks=callbacks)

    def stream(self) -> Any:
        return self.module.cuda.Stream(non_blocking=True)

    def make(self, nbytes: int, stream: Any = None) -> Any:
        with self.current(stream):
            return self.module.empty(nbytes, self.module.uint8)

    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        with self.current(stream):
            array.fill(value)

    def read(self, array: Any, stream: Any = None) -> Any:
        with self.current(stream):
            return array.get()


class Numba(Library):
    name = "numba"

    @property
    def ends_with(self) -> Any:  # type: ignore[override]
        from numba.cuda.cudadrv.driver import CudaAPIError

        return CudaAPIError

    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        return interop.numba.use(*sources)

    def stream(self) -> Any:
        return None

    def make(self, nbytes: int, stream: Any = None) -> Any:
        return self.module.cuda.device_array(nbytes, np.uint8)

    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        array.copy_to_device(np.full(array.size, value, np.uint8))

    def read(self, array: Any, stream: Any = None) -> Any:
        return array.copy_to_host()


class Torch(Library):
    name = "torch"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._routing = threading.Lock()

    @property
    def ends_with(self) -> Any:  # type: ignore[override]
        return self.module.OutOfMemoryError

    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        return interop.torch.use(*sources)

    def stream(self) -> Any:
        return self.module.cuda.Stream()

    @contextlib.contextmanager
    def routed(self, bridge: Any) -> Iterator[None]:
        # PyTorch takes one thread at a time; the others make tensors and drop them all the same.
        if not self._routing.acquire(blocking=False):
            yield
            return
        try:
            with self.module.cuda.use_mem_pool(bridge.pool):
                yield
        finally:
            self._routing.release()

    def current(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if stream is None else self.module.cuda.stream(stream)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def make(self, nbytes: int, stream: Any = None) -> Any:
        with self.current(stream):
            return self.module.empty(nbytes, dtype=self.module.uint8, device="cuda")

    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        with self.current(stream):
            array.fill_(value)

    def read(self, array: Any, stream: Any = None) -> Any:
        with self.current(stream):
            return array.cpu().numpy()


class RMM(Library):
    name = "rmm"
    ends_with = MemoryError
    fills_without_waiting = False

    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        return interop.rmm.use(*sources, callbacks=callbacks)

    def stream(self) -> Any:
        return self.module.pylibrmm.stream.Stream()

    def _on(self, stream: Any) -> dict[str, Any]:
        return {} if stream is None else {"stream": stream}

    def make(self, nbytes: int, stream: Any = None) -> Any:
        return self.module.DeviceBuffer(size=nbytes, **self._on(stream))

    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        array.copy_from_host(np.full(array.size, value, np.uint8), **self._on(stream))

    def read(self, array: Any, stream: Any = None) -> Any:
        return array.copy_to_host(**self._on(stream))


class CudaCore(Library):
    name = "cuda_core"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.device = module.Device(0)
        self.device.set_current()
        # The first use makes it, and raises the release threshold of the current pool.
        attributes = sa.MemoryPool.current(sa.Device(0)).attributes
        before = attributes.release_threshold
        assert self.device.memory_resource is not None
        attributes.release_threshold = before
        self.default = self.device.create_stream()

    @property
    def ends_with(self) -> Any:  # type: ignore[override]
        from cuda.core._utils.cuda_utils import CUDAError

        return CUDAError

    def use(self, *sources: Any, callbacks: bool) -> interop.Bridge:
        return interop.cuda_core.use(*sources, callbacks=callbacks)

    def stream(self) -> Any:
        return self.device.create_stream()

    def make(self, nbytes: int, stream: Any = None) -> Any:
        array = self.device.allocate(nbytes, stream=stream or self.default)
        assert (array.is_device_accessible, array.is_host_accessible, array.device_id) == (True, False, 0)
        return array

    def fill(self, array: Any, value: int, stream: Any = None) -> None:
        array.fill(value, stream=stream or self.default)

    def read(self, array: Any, stream: Any = None) -> Any:
        on = stream or self.default
        with sa.Device(0).create_stream() as ours:
            ours.wait(on)
            target = np.zeros(array.size, np.uint8)
            with interop.cuda_core.memory(array, ours, lender=on) as memory:
                memory.copy_to(target)
                ours.synchronize()
            return target


LIBRARIES: dict[str, type[Library]] = {kind.name: kind for kind in (CuPy, Numba, Torch, RMM, CudaCore)}
MODULES = {"cuda_core": "cuda.core"}
