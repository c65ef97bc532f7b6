"""Stand-in for the package ``torch_memory_saver`` over :mod:`streamalloc.interop.memory_saver`, for its own tests.

With this folder first in ``PYTHONPATH``, and a checkout named by ``STREAMALLOC_TEST_SAVER``, the tests of the
checkout run unchanged. They also read names inside the original (its library of C functions, its pools by key), which
:class:`Saver` has. Written after commit 4a43c97771f139db0215c1378e8a0b50e679d23d of 20 August 2026.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from streamalloc.core.internal import work
from streamalloc.core.session import session_of
from streamalloc.interop.memory_saver import TorchMemorySaver, configure_subprocess
from streamalloc.interop.torch import collect

__all__ = ["configure_subprocess", "torch_memory_saver"]

# The modules testing_utils and utils are those of the checkout.
__path__ = [str(Path(os.environ["STREAMALLOC_TEST_SAVER"], "torch_memory_saver"))]


class Saver(TorchMemorySaver):
    """The saver, with the names inside the original that its tests read."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[tuple[str, bool, str | None]] = []

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        with super().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            self._entered.append((tag, enable_cpu_backup, cpu_backup_backend))
            try:
                yield
            finally:
                self._entered.pop()

    @property
    def _impl(self) -> Any:
        return self

    _binary_wrapper = cdll = _mem_pools = _impl

    def pop(self, key: tuple[str, bool, bool, str, int]) -> Any:
        """Take the pool of a region out, as ``_mem_pools.pop(key)`` does."""
        tag, on_host, on_disk, backend, ordinal = key
        kind = backend if on_host else "disk" if on_disk else "none"
        bridge = self._bridges.pop((ordinal, f"{tag}:{kind}", None))
        bridge.close()
        return bridge

    @contextlib.contextmanager
    def _with_region_config(self, **_: Any) -> Iterator[None]:
        """A region without a pool: what PyTorch frees in it returns at once."""
        yield
        collect()
        for group in self._groups.values():
            work(session_of(group))

    def tms_get_interesting_region(self) -> bool:
        return bool(self._entered)

    def tms_get_current_tag(self) -> bytes:
        return self._entered[-1][0].encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        return self._entered[-1][1]

    def tms_get_cpu_backup_backend(self) -> bytes:
        named = self._entered[-1][2] if self._entered else None
        return (named or self._backend).encode()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
        return getattr(ctypes.CDLL(min(loaded)), name)


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instances", ctypes.c_uint * 2))


def _memory_used(device: int = 0) -> int:
    """Device memory of this process by NVML: others on the device would change the figures that the tests compare."""
    nvml, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    count, processes = ctypes.c_uint(256), (_Process * 256)()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(found)) == 0
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(found, ctypes.byref(count), processes) == 0
    return next(int(one.used) for one in processes[: count.value] if one.pid == os.getpid())


torch.cuda.device_memory_used = _memory_used

torch_memory_saver = Saver()
