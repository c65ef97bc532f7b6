"""DLPack capsules: memory handed to another library as a tensor, without a copy.

A capsule must release what it holds by C code: consumers drop it, and call its deleter, while an exception is on its
way, which no Python callback survives. numpy has that code, so the capsule is that of a numpy array over the address,
whose base is the memory; only the device that it names is set here. The array itself is never read or written.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "LEGACY_STREAM", "capsule"]

# DLDeviceType of dlpack.h.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
LEGACY_STREAM = 1
_NAME = b"dltensor"


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    """The beginning of ``DLTensor`` (``dlpack.h``), with which ``DLManagedTensor`` begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


class _Exposed:
    """Shows memory to numpy wherever it is, so that the array keeps it alive."""

    def __init__(self, memory: object, interface: dict[str, Any]) -> None:
        self.memory = memory
        self.__array_interface__ = interface


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def capsule(memory: object, interface: dict[str, Any], device: tuple[int, int]) -> Any:
    """A DLPack capsule that keeps ``memory``, whose bytes are as numpy's array ``interface`` says, on a device."""
    made = np.asarray(_Exposed(memory, interface)).__dlpack__()
    _DLTensor.from_address(_pointer_in(made, _NAME)).device = _DLDevice(*device)
    return made
