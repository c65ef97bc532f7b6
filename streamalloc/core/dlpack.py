"""DLPack capsules: memory handed to another library as a tensor, without a copy.

A capsule's deleter must be C code, because consumers may call it while an exception is being raised, and a Python
callback fails then. numpy has such a deleter. If an array came from a DLPack capsule, numpy exports it and every slice
with the device of that capsule. So each device has one array of all addresses, a window, which is never released. A
slice of the window that keeps the memory alive is exported. The window's elements are never read or written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

# DLDeviceType of dlpack.h.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_NAME = b"dltensor_versioned"
_UINT = 1
_ADDRESSES = 2**63 - 1


class Tensor(ctypes.Structure):
    """``DLTensor`` of ``dlpack.h``, the first member of ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensorVersioned`` of ``dlpack.h``. It has no deleter, because it is never deleted."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", Tensor),
    )


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Everything:
    """DLPack exporter of a managed tensor. Its device is pinned host memory, because NumPy imports no GPU memory."""

    def __init__(self, managed: _Managed) -> None:
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA_HOST, 0)

    def __dlpack__(self, **_: object) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), _NAME, None)


class Window(np.ndarray[Any, Any]):
    """All addresses of one device as an array of bytes: the byte at ``address`` is ``window[address - 1]``.

    The attribute ``memory`` of a slice keeps the memory alive.
    """

    __slots__ = ("memory",)

    memory: object


_windows: dict[tuple[int, int], Window] = {}
cuda_windows: dict[int | None, Window] = {}
"""Windows of GPUs, by ordinal."""


def _window(device: tuple[int, int]) -> Window:
    """The window of a DLPack device, which is a pair of type and number."""
    found = _windows.get(device)
    if found is None:
        # From address 1: for an array at address 0, numpy would allocate memory.
        shape = (ctypes.c_int64 * 1)(_ADDRESSES)
        managed = _Managed(1, 0, None, None, 0, Tensor(1, CUDA_HOST, 0, 1, _UINT, 8, 1, shape, None, 0))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))  # for ever: modules go before arrays do at exit
        made = np.from_dlpack(_Everything(managed)).view(Window)
        managed.dl_tensor.device_type, managed.dl_tensor.device_id = device
        found = _windows.setdefault(device, made)
        if device[0] == CUDA:
            cuda_windows[device[1]] = found
    return found


def part(memory: object, address: int, nbytes: int, device: tuple[int, int]) -> Any:
    """Return a byte array that keeps ``memory`` alive and that DLPack exports with ``device``."""
    first = (address or 1) - 1
    made: Any = _window(device)[first : first + nbytes]
    made.memory = memory
    return made


def tensor_in(capsule: object) -> Tensor:
    """The tensor of a ``dltensor`` capsule; valid while the capsule lives."""
    return Tensor.from_address(_pointer_in(capsule, b"dltensor"))
