"""DLPack capsules: memory handed to another library as a tensor, without a copy.

A capsule must release what it holds by C code: consumers drop it, and call its deleter, while an exception is on its
way, which no Python callback survives. numpy has that code. It also exports an array that came from a DLPack capsule,
and every slice of it, with the device of that capsule. So there is one array of all addresses for each device, a
window, which lives for ever; a slice of it that keeps the memory alive is exported. Its elements are never read or
written.
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
    """``DLTensor`` of ``dlpack.h``, which is also what ``DLManagedTensor`` begins with."""

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
    """``DLManagedTensorVersioned`` of ``dlpack.h``; without a deleter, as it is never deleted."""

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
    """Shows numpy the managed tensor of a window, as one in pinned memory: it takes none on a GPU."""

    def __init__(self, managed: _Managed) -> None:
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA_HOST, 0)

    def __dlpack__(self, **_: object) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), _NAME, None)


class Window(np.ndarray[Any, Any]):
    """All addresses of one device as an array of bytes: the byte at ``address`` is ``window[address - 1]``.

    A slice of it has an attribute ``memory``, which keeps alive what the slice is part of.
    """

    __slots__ = ("memory",)

    memory: object


_windows: dict[tuple[int, int], Window] = {}
cuda_windows: dict[int | None, Window] = {}
"""Windows of GPUs, by ordinal."""


def _window(device: tuple[int, int]) -> Window:
    """The window of a DLPack device: its type and number."""
    found = _windows.get(device)
    if found is None:
        # From address 1, as an array at 0 would be one that numpy has to allocate.
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
    """An array of bytes that keeps ``memory`` alive and is exported as one on ``device``."""
    first = (address or 1) - 1
    made: Any = _window(device)[first : first + nbytes]
    made.memory = memory
    return made


def tensor_in(capsule: object) -> Tensor:
    """The tensor of a ``dltensor`` capsule, which stays valid as long as the capsule."""
    return Tensor.from_address(_pointer_in(capsule, b"dltensor"))
