"""PTX instructions ``multimem.*`` as Python functions that queue them on streams of the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.internal import Stream
from streamalloc.core.session import session_of

Values: TypeAlias = npt.NDArray[Any]
AddressLike: TypeAlias = Any
"""A device address as a number, or an object with an attribute ``address``."""

_OPERATIONS: dict[str, Callable[..., Values]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_OF_INTEGERS = frozenset(_OPERATIONS)
# Types of the PTX manual, without bfloat16, which NumPy lacks. PTX adds signed 64-bit integers as unsigned ones.
SUPPORTED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("uint32", "int32", "uint64", "int64"), _OF_INTEGERS),
    "float16": frozenset(("add", "min", "max")),
    "float32": frozenset(("add",)),
    "float64": frozenset(("add",)),
}
"""Names of the operations that ``multimem`` instructions have, by NumPy's name of the type."""


def multimem_st(stream: Stream, address: AddressLike, values: Values) -> None:
    """Store values in the memory of every device behind a multicast mapping, as a kernel does with ``multimem.st``.

    The stores are queued on ``stream``, as a kernel would be. On hardware, write a kernel with the PTX instruction of
    the same name.

    Parameters
    ----------
    stream
        A stream of a simulated device that has access to ``address``.
    address
        Address of the first value in a mapping of a multicast object, a multiple of the values' size; or an object with
        an attribute ``address``.
    values
        Array of the values. This call copies them.

    Raises
    ------
    ValueError
        The address is not in multicast memory, or not aligned, or the values do not have the byte order of the CPU.
    NotImplementedError
        The stream's driver is not a simulated one.
    ClosedError
        The stream was closed, or the memory of ``address`` was freed.
    CudaError
        The device has no access to the address.

    Examples
    --------
    >>> with SymmetricMemory.local(sa.Device.all(), 1 << 20) as memory:
    ...     stream = memory.buffers[0].stream
    ...     multimem_st(stream, memory.multicast_buffer, np.arange(4))  # writes to the memory of each device
    """
    array, at = _operand(values, address)
    data = array.tobytes()

    def store(where: int, offset: int, size: int) -> None:
        ctypes.memmove(where, data[offset : offset + size], size)

    _launch(stream, "multimem_update", (at, len(data), store), (at, len(data), True, False))


def multimem_red(stream: Stream, address: AddressLike, values: Values, op: str = "add") -> None:
    """Combine values with the memory of every device behind a multicast mapping, in place (``multimem.red``).

    Raises the errors of :func:`multimem_st`, and ValueError for one more reason, which is given below.

    Parameters
    ----------
    stream, address
        As for :func:`multimem_st`.
    values
        Array of the values. Its type: (u)int32 or (u)int64 for all operations, float16 for add, min and max, float32 or
        float64 for add.
    op
        Name of the operation: ``add``, ``min``, ``max``, ``and``, ``or`` or ``xor``.

    Raises
    ------
    ValueError
        No instruction has this type and operation.
    """
    array, at = _operand(values, address)
    data, dtype = array.tobytes(), array.dtype.name
    _check_supported(dtype, op)

    def reduce(where: int, offset: int, size: int) -> None:
        replica = np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(where)), array.dtype)
        given = np.frombuffer(data, array.dtype, size // array.itemsize, offset)
        replica[:] = _combine(op, replica, given)

    _launch(stream, "multimem_update", (at, len(data), reduce), (at, len(data), True, True))


def multimem_ld_reduce(
    stream: Stream, into: AddressLike, address: AddressLike, count: int, dtype: npt.DTypeLike, op: str = "add"
) -> None:
    """Reduce over the memory of all devices behind a multicast mapping (``multimem.ld_reduce``), and store the result.

    Sums of float16 are rounded once (``.acc::f32``). The devices' values are combined in the order in which the devices
    were added; hardware defines no order. Raises the errors of :func:`multimem_red`.

    Parameters
    ----------
    stream
        As for :func:`multimem_st`.
    into
        Address of the first result, in memory that the stream's device may write.
    address
        Address of the first values in the multicast memory.
    count
        Number of results. Each device has the same number of values.
    dtype, op
        Type of the values, and name of the operation, as for :func:`multimem_red`.
    """
    kind = np.dtype(dtype)
    at = _aligned(address, kind)
    target, size = _address(into), count * kind.itemsize
    _check_supported(kind.name, op)

    def combine(replicas: list[bytes]) -> bytes:
        first, *others = [np.frombuffer(one, kind) for one in replicas]
        result = first.astype(np.float32) if kind == np.float16 else first
        for one in others:
            result = _combine(op, result, one.astype(result.dtype))
        return result.astype(kind).tobytes()

    uses = ((at, size, False, True), (target, size, True, False))
    _launch(stream, "multimem_gather", (target, at, size, combine), *uses)


def _launch(stream: Stream, call: str, arguments: tuple[Any, ...], *uses: tuple[int, int, bool, bool]) -> None:
    """Queue an operation of the simulated driver (its method ``call``), and report its memory uses to the checker, if
    any.

    ``uses``: for each use, address, bytes, whether the bytes are written, and whether atomically. Raises
    ``NotImplementedError`` on a real driver.
    """
    if not hasattr(stream.device.driver, call):
        raise NotImplementedError("only on the simulated driver; on hardware, write a kernel with this instruction")
    stream.call(call, *arguments)
    listener = session_of(stream.device).listener
    if listener is not None:
        with stream.device.current():
            for address, nbytes, write, atomic in uses:
                listener.used(address, nbytes, stream.checked_raw(), write, atomic)


def _combine(op: str, left: Values, right: Values) -> Values:
    with np.errstate(all="ignore"):
        return np.asarray(_OPERATIONS[op](left, right))


def _check_supported(dtype: str, op: str) -> None:
    """Raise ``ValueError`` if no ``multimem`` instruction has this type and operation."""
    if dtype not in SUPPORTED:
        raise ValueError(f"dtype={dtype!r}: multimem instructions are for {', '.join(SUPPORTED)}")
    if op not in SUPPORTED[dtype]:
        raise ValueError(f"op={op!r}: for {dtype} there are {', '.join(sorted(SUPPORTED[dtype]))}")


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
