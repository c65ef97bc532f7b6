"""Name of the library that calls the driver, found on the C stack, and this process's device memory according to
NVML.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import uuid
from types import FrameType
from typing import Any, NamedTuple

from streamalloc.cupti.subscription import is_library
from streamalloc.driver.internal import LIBRARIES

PROGRAM = "the program"
_NATIVE = re.compile(r"/lib(cublas|cudnn|nccl|cufft|cusparse|cusolver|curand|cutensor)[\w-]*\.so")
_NATIVE_NAMES = {
    **{"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL", "cufft": "cuFFT", "cusparse": "cuSPARSE"},
    **{"cusolver": "cuSOLVER", "curand": "cuRAND", "cutensor": "cuTENSOR"},
}
NATIVE = frozenset(_NATIVE_NAMES.values())
"""Names of NVIDIA's libraries, such as ``"cuBLAS"``. They allocate memory for themselves, and order the uses of this
memory themselves.
"""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/.]+)")
_DRIVER = re.compile(r"/libcuda\.so")
_BETWEEN = re.compile(r"/lib(cuda|cudart|cupti|ffi|c|gcc_s|stdc\+\+|pthread)[-.][^/]*$|/_ctypes\.|/cuda/bindings/")
"""Pattern of files that may lie on the C stack between libcuda and the library that called it: CUDA's runtime, CUPTI,
the C and C++ libraries, ctypes, the bindings.
"""
# The program's own executable may be listed without a path, so the name alone must match.
_PYTHON = re.compile(r"(^|/)(lib)?python[\d.]*[^/]*$")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
_MOST_FRAMES = 64


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


_Frames = ctypes.c_void_p * _MOST_FRAMES
# ``CDLL`` would release the GIL during a call, which a callback should keep.
_c = ctypes.PyDLL(None)
# ``backtrace`` is a function of glibc, which other C libraries may lack.
_backtrace: Any = getattr(_c, "backtrace", None)
if _backtrace is not None:
    # The first call loads libgcc and allocates memory, which must not happen in a callback. So it is made here.
    _backtrace(_Frames(), 1)


@functools.cache
def _file(address: int) -> str:
    """Return the path of the shared library that contains ``address`` (``dladdr``); "" if no library contains it."""
    found = _Symbol()
    return (found.file or b"").decode(errors="replace") if _c.dladdr(ctypes.c_void_p(address), _at(found)) else ""


def _at(thing: Any) -> Any:
    return ctypes.byref(thing)


def caller(frame: FrameType | None) -> str:
    """Return the name of the library that called the driver. Call this function in a callback of CUPTI.

    ``frame``: the innermost Python frame.

    The library is that of the first frame of the C stack outside of the driver and the bindings. If this frame is
    Python's own, or there is none, the library is that of the innermost Python frame of an installed package, or the
    program if a frame of the program comes first.
    """
    frames = _Frames()
    count = _backtrace(frames, _MOST_FRAMES) if _backtrace is not None else 0
    seen_driver = False
    for address in frames[:count]:
        file = _file(address) if address else ""
        if not seen_driver:
            seen_driver = bool(_DRIVER.search(file))
        elif not file or _BETWEEN.search(file):
            continue
        elif _PYTHON.search(file):
            break
        else:
            return _name(file)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_library(file):
            return PROGRAM
        if _INSTALLED.search(file) and "/cuda/bindings/" not in file and not file.startswith(_PACKAGE):
            return _name(file)
        frame = frame.f_back
    return PROGRAM


def _name(file: str) -> str:
    native, installed = _NATIVE.search(file), _INSTALLED.search(file)
    if native:
        return _NATIVE_NAMES[native[1]]
    if installed:
        return LIBRARIES.get(installed[1], installed[1])
    return os.path.basename(file).partition(".")[0]


class _Info(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("parts", ctypes.c_uint * 2))


class Gpu(NamedTuple):
    """Free bytes of a GPU, and the bytes of each process on it, as NVML reports them. NVML needs no CUDA context."""

    free: int
    processes: dict[int, int]
    """Bytes of each process, by process number. In a container these are process numbers of the host. A process whose
    bytes NVML does not know is left out. Empty if NVML does not list the processes, or there are more than 256.
    """


_MOST_PROCESSES = 256
_UNKNOWN = (1 << 64) - 1
"""Number that NVML reports for a process whose bytes are not known."""


def gpus() -> dict[str, Gpu]:
    """Return the GPUs by UUID; empty if NVML is missing or fails. A GPU that NVML cannot read is left out.

    Driver calls are no substitute for NVML: they would initialise CUDA, and the program could no longer use CUDA in a
    child that it forks.
    """
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    found: dict[str, Gpu] = {}
    count, device, info = ctypes.c_uint(), ctypes.c_void_p(), _Info()
    name, running = ctypes.create_string_buffer(96), (_Process * _MOST_PROCESSES)()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(_at(count)):
        return {}
    list_processes = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", lambda *_: 1)
    for index in range(count.value):
        listed = ctypes.c_uint(_MOST_PROCESSES)
        asked = (
            (nvml.nvmlDeviceGetHandleByIndex_v2, index, _at(device)),
            (nvml.nvmlDeviceGetUUID, device, name, ctypes.c_uint(96)),
            (nvml.nvmlDeviceGetMemoryInfo, device, _at(info)),
        )
        if not any(function(*args) for function, *args in asked):
            known = running[: 0 if list_processes(device, _at(listed), running) else listed.value]
            used = {one.pid: one.used for one in known if one.used != _UNKNOWN}
            found[name.value.decode()] = Gpu(info.free, used)
    nvml.nvmlShutdown()
    return found


class Process:
    """Device memory of this process according to NVML, compared with the state of the GPUs when the object was made."""

    def __init__(self) -> None:
        self._before = gpus()
        """The GPUs by UUID, as they were when this object was made."""
        self._numbers: dict[str, int] = {}
        """Process number by which NVML lists this process, by UUID of the GPU; found by :meth:`figures`."""

    def figures(self) -> dict[str, int]:
        """Return the bytes of this process, by UUID of the GPU, without GPUs whose bytes NVML does not report."""
        found = {}
        for name, gpu in gpus().items():
            before = self._before.get(name, Gpu(0, {}))
            # In a container NVML reports the host's process numbers, which differ from ``os.getpid``. So if exactly one
            # process is new on the GPU since the beginning, it is taken as this process.
            new = [os.getpid()] if os.getpid() in gpu.processes else [*gpu.processes.keys() - before.processes]
            number = self._numbers.get(name, 0)
            if number not in gpu.processes and len(new) == 1:
                number = self._numbers[name] = new[0]
            if number in gpu.processes:
                found[name] = gpu.processes[number]
        return found

    def taken(self, name: str, free: int) -> int | None:
        """Return by how many bytes the free memory of the GPU with UUID ``name`` has fallen since this object was made.
        None if NVML did not list the GPU then.

        ``free``: free bytes of the GPU now.
        """
        return self._before[name].free - free if name in self._before else None


def uuid_text(data: bytes) -> str:
    """Return the UUID of a GPU as text in NVML's form ("GPU-…"). ``data``: the UUID as 16 bytes."""
    return f"GPU-{uuid.UUID(bytes=data)}"
