"""Other libraries in the benchmark: their streams and pools, created on first use."""

from __future__ import annotations

import importlib
from typing import Any

from streamalloc.cli.measuring import SIZE, Bench


class CudaCore:
    """cuda.core with its own device, stream and pool."""

    def __init__(self, bench: Bench) -> None:
        self.core: Any = importlib.import_module("cuda.core")
        if not hasattr(self.core, "DeviceMemoryResource"):  # older versions have it in cuda.core.experimental
            self.core = importlib.import_module("cuda.core.experimental")
        self.device: Any = self.core.Device(0)
        self.device.set_current()
        self.stream: Any = self.device.create_stream()
        self.resource: Any = self.core.DeviceMemoryResource(self.device, self.core.DeviceMemoryResourceOptions())

    def buffer(self) -> Any:
        """Allocate 4 KiB."""
        return self.resource.allocate(SIZE, stream=self.stream)


class CuPy:
    """CuPy; its own stream stays current until the end of the benchmark."""

    def __init__(self, bench: Bench) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.stream: Any = bench.shared.enter_context(self.new_stream())

    def new_stream(self) -> Any:
        """Create a stream."""
        return self.cupy.cuda.Stream(non_blocking=True)

    def array(self) -> Any:
        """Allocate 4 KiB."""
        return self.cupy.zeros(SIZE, self.cupy.uint8)


class PyTorch:
    """PyTorch with CUDA; its own stream stays current until the end of the benchmark."""

    def __init__(self, bench: Bench) -> None:
        self.torch: Any = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise ImportError("torch without CUDA")
        self.device: Any = self.torch.device("cuda", 0)
        self.stream: Any = self.new_stream()
        bench.shared.enter_context(self.torch.cuda.stream(self.stream))

    def new_stream(self) -> Any:
        """Create a stream."""
        return self.torch.cuda.Stream(self.device)

    def tensor(self) -> Any:
        """Allocate 4 KiB."""
        return self.torch.zeros(SIZE, dtype=self.torch.uint8, device=self.device)


class Rmm:
    """RMM with its allocator over the driver's pools."""

    def __init__(self, bench: Bench) -> None:
        self.mr: Any = importlib.import_module("rmm.mr")
        self.stream: Any = importlib.import_module("rmm.pylibrmm.stream").Stream()
        self.resource: Any = self.mr.CudaAsyncMemoryResource()
