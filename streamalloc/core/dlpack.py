"""DLPack: memory handed to another library as a tensor, without a copy.

A capsule must release what it holds by C code: consumers drop it, and call its deleter, while an exception is on its
way, which no Python callback survives. numpy has that code, so the capsule is that of a numpy array over the address,
whose base is the memory; only the device that it names is set here. The array itself is never read or written.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from streamalloc.core.buffer import numpy_interface
from streamalloc.core.stream import Stream

if TYPE_CHECKING:
    from streamalloc.core.buffer import Memory

__all__ = ["device_of", "export"]

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_NAME = b"dltensor"
_LEGACY_STREAM = 1


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    """The beginning of ``DLTensor`` (``dlpack.h``), with which ``DLManagedTensor`` begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


class _Exposed:
    """Shows memory to numpy wherever it is, so that the array keeps it alive."""

    def __init__(self, memory: Memory, on_host: bool) -> None:
        self.memory = memory
        self.__array_interface__ = numpy_interface(memory, on_host=on_host)


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def device_of(memory: Memory) -> tuple[int, int]:
    """DLPack's device type and number for a piece of memory."""
    if not memory.host_accessible:
        return (_CUDA, memory.location.id)
    if not memory.location.on_host:
        return (_CUDA_MANAGED, memory.stream.device.ordinal)
    return (_CUDA_HOST if memory.device_accessible else _CPU, 0)


def export(
    memory: Memory,
    *,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> Any:
    """A DLPack capsule of ``memory``; see :meth:`Memory.__dlpack__`.

    ``stream`` is what the Python array API standard says: None or 1 for the legacy default stream, 2 for the per-
    thread one, -1 for no ordering, else a driver handle.
    """
    memory._check_usable()
    unreadable = memory._unreadable()
    if unreadable:
        raise BufferError(unreadable)
    device = device_of(memory)
    exposed = _Exposed(memory, on_host=device[0] == _CPU)
    if dl_device is not None and tuple(dl_device) != device:
        raise BufferError(
            f"the memory is on DLPack device {device}; it cannot be exported for {dl_device} without a copy"
        )
    if copy:
        raise BufferError("the memory is shared as it is; copy it on your side")
    if device[0] != _CPU and stream != -1:
        _order(memory, stream)
    capsule = np.asarray(exposed).__dlpack__()
    _DLTensor.from_address(_pointer_in(capsule, _NAME)).device = _DLDevice(*device)
    return capsule


def _order(memory: Memory, stream: int | None) -> None:
    """Make the consumer's stream wait for what our stream has queued."""
    if stream == 0:
        raise ValueError("stream=0 is ambiguous: pass 1 for the legacy default stream, 2 for the per-thread one")
    ours = memory.stream
    handle = _LEGACY_STREAM if stream is None else stream
    if handle != ours.handle:
        Stream.of_handle(ours.device, handle, memory).wait(ours)
