"""Tools for tests and demonstrations of stream-ordered code: a gate for either driver, and what stands for kernels on
the simulated one.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.device import Device
from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.ownership import Closes
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.driver.internal import cuda

__all__ = ["Gate", "multimem_ld_reduce", "multimem_red", "multimem_st"]

Values: TypeAlias = npt.NDArray[Any]
AddressLike: TypeAlias = Any
"""A device address, or an object that has one as ``address``."""

_SIZE = 64


class Gate(Closes):
    """Holds streams until the host opens it, so that "this work is still pending" is certain rather than likely.

    A held stream waits for a word of pinned host memory (``cuStreamWaitValue32``); no other stream is touched, and
    the device is not kept busy. A gate can hold again after it was opened. Leaving its ``with`` block opens it,
    synchronises the device, and frees the word.

    Parameters
    ----------
    device
        The device whose streams it holds.
    """

    def __init__(self, device: Device) -> None:
        self._door = device._door
        self.device = device
        self._word: int | None = None
        with undoing(self._free), device.current():
            self._word = int(self._door.call("cuMemHostAlloc", _SIZE, 0))
        self._value = ctypes.c_uint32.from_address(self._word)
        self._value.value = 0
        self._holds = 0

    def hold(self, stream: StreamLike) -> None:
        """Make later work of ``stream`` wait until the gate is opened."""
        if self._word is None:
            raise ClosedError("the gate was closed")
        held = as_stream(stream, self._door)
        self._holds += 1
        at_least: Any = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        held._call("cuStreamWaitValue32", self._word, self._holds, int(at_least))

    def open(self) -> None:
        """Let every held stream go on. Returns at once; the streams notice on their own."""
        if self._word is not None:
            self._value.value = self._holds

    def close(self) -> None:
        """Open the gate, wait for the device, and free the word. Idempotent."""
        if self._word is None:
            return
        self.open()
        self.device.synchronize()
        self._free()

    def _free(self) -> None:
        word, self._word = self._word, None
        if word is not None:
            with self.device.current():
                self._door.call("cuMemFreeHost", word)


# -- what kernels do with multicast memory, on the simulated driver ------------------------------------------


def multimem_st(stream: Stream, address: AddressLike, values: Values) -> None:
    """Store values in every replica of multicast memory, as the threads of a kernel do with ``multimem.st``.

    The simulated driver runs no kernels; this and the next two stand for some, in stream order. On hardware they are a
    few lines of CUDA C++ with the PTX instructions of the same names.

    Parameters
    ----------
    stream
        A stream of a simulated device that has access to ``address``.
    address
        Where the first value goes: an address in a mapping of a multicast object, or an object that has it as
        ``address``; a multiple of the values' size.
    values
        An array. What it holds now is stored, also where the stream comes to it later.

    Raises
    ------
    ValueError
        It is no multicast memory, or not aligned.
    NotImplementedError
        The stream's driver is not a simulated one.
    CudaError
        The device has no access there.
    """
    array, at = _operand(values, address)
    _run(stream, "multimem_st", at, array.tobytes())


def multimem_red(stream: Stream, address: AddressLike, values: Values, op: str = "add") -> None:
    """Apply an operation to every replica of multicast memory, each by itself, as with ``multimem.red``.

    Parameters and errors are those of :func:`multimem_st`, and

    Parameters
    ----------
    values
        An array of one of the types that there are instructions for: (u)int32 and (u)int64 for all operations, float16
        for add, min and max, float32 and float64 for add.
    op
        ``add``, ``min``, ``max``, ``and``, ``or`` or ``xor``.

    Raises
    ------
    ValueError
        There is no such instruction.
    """
    array, at = _operand(values, address)
    _run(stream, "multimem_red", at, array.tobytes(), array.dtype.name, op)


def multimem_ld_reduce(
    stream: Stream, into: AddressLike, address: AddressLike, count: int, dtype: npt.DTypeLike, op: str = "add"
) -> None:
    """Store at ``into`` what the replicas of multicast memory are together, as with ``multimem.ld_reduce``.

    Sums of float16 are rounded once (``.acc::f32``). Otherwise as :func:`multimem_red`.

    Parameters
    ----------
    into
        Where the first of ``count`` results goes: memory that the stream's device may write.
    address
        Where the first values are in the multicast memory.
    """
    kind = np.dtype(dtype)
    at = _aligned(address, kind)
    _run(stream, "multimem_ld_reduce", _address(into), at, count * kind.itemsize, kind.name, op)


def _run(stream: Stream, instruction: str, *args: Any) -> None:
    if not hasattr(stream._door.driver, instruction):
        raise NotImplementedError("only on the simulated driver; on hardware, write a kernel with this instruction")
    stream._call(instruction, *args)


def _operand(values: Values, address: AddressLike) -> tuple[Values, int]:
    array = np.ascontiguousarray(values)
    return array, _aligned(address, array.dtype)


def _aligned(address: AddressLike, dtype: np.dtype[Any]) -> int:
    if not dtype.isnative:
        raise ValueError(f"{dtype!r}: GPUs have the byte order of the CPU")
    at = _address(address)
    if at % dtype.itemsize:
        raise ValueError(f"address={at:#x}: must be a multiple of {dtype.itemsize}, the size of a {dtype.name}")
    return at


def _address(address: AddressLike) -> int:
    where: Any = getattr(address, "address", address)
    return int(where)
