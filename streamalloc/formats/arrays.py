"""Formats of arrays: structs of DLPack, ``__cuda_array_interface__``, and types, elements and indices of NumPy arrays.

The deleter of a DLPack capsule must be C code: a consumer may call it while an exception is set, and a Python callback
then fails. NumPy has such a deleter. An array that NumPy made from a capsule has the device of this capsule, and NumPy
exports the array and its slices with this device. So this module makes one NumPy array of all addresses for each
device: the *window*. Memory is exported as the slice of the window at the memory's address. The slice keeps the memory
alive; the window is never released. No element of a window is read or written.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Iterable
from itertools import groupby
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from streamalloc.formats.lazy_numpy import np

if TYPE_CHECKING:
    import numpy.typing as npt

# -- DLPack --------------------------------------------------------------------------------------------------

# DLDeviceType of dlpack.h.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_NAME = b"dltensor_versioned"
_UINT = 1
_ADDRESSES = 2**63 - 1


class DLTensor(ctypes.Structure):
    """Struct ``DLTensor`` of ``dlpack.h``, the first member of ``DLManagedTensor``."""

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
    """Struct ``DLManagedTensorVersioned`` of ``dlpack.h``. It is never freed here, so it has no deleter."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Everything:
    """Object from which NumPy imports a window's tensor. It exports pinned host memory, because NumPy imports no device
    memory.
    """

    def __init__(self, managed: _Managed) -> None:
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA_HOST, 0)

    def __dlpack__(self, **_: object) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), _NAME, None)


windows: dict[tuple[int, int | None], Any] = {}
"""Windows (:func:`_window`) by DLPack device, which is a pair of device type and ordinal."""


@functools.cache
def _window_type() -> Any:
    class Window(np.ndarray[Any, Any]):
        """All addresses of one device as an array of bytes: the byte at ``address`` is ``window[address - 1]``.

        A slice keeps its memory alive by the attribute ``memory``.
        """

        __slots__ = ("memory",)

    return Window


def _window(device: tuple[int, int]) -> Any:
    """Return the window, an array of all addresses, of a DLPack device, which is a pair of device type and ordinal."""
    found = windows.get(device)
    if found is None:
        # The window begins at address 1, because for an array at address 0 NumPy would allocate memory.
        shape = (ctypes.c_int64 * 1)(_ADDRESSES)
        managed = _Managed(1, 0, None, None, 0, DLTensor(1, CUDA_HOST, 0, 1, _UINT, 8, 1, shape, None, 0))
        # Never freed: at the interpreter's exit, this module is cleared before the arrays that still use the struct.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))
        made = np.from_dlpack(_Everything(managed)).view(_window_type())
        managed.dl_tensor.device_type, managed.dl_tensor.device_id = device
        found = windows.setdefault(device, made)
    return found


def exported(memory: object, address: int, nbytes: int, device: tuple[int, int]) -> Any:
    """Return ``nbytes`` bytes at ``address`` as a NumPy array that keeps ``memory`` alive.

    DLPack exports the array with ``device``, a pair of DLPack's device type and ordinal.
    """
    first = (address or 1) - 1
    made = _window(device)[first : first + nbytes]
    made.memory = memory
    return made


def tensor_in(capsule: object) -> DLTensor:
    """Return the tensor in a capsule of the name ``dltensor``. The tensor is valid while the capsule exists. Raises
    ``ValueError`` for other objects, and for capsules of other names.
    """
    return DLTensor.from_address(_pointer_in(capsule, b"dltensor"))


# -- array interfaces ----------------------------------------------------------------------------------------


class CudaArray(NamedTuple):
    """Fields of a ``__cuda_array_interface__``. ``stream`` is the handle of the stream to wait for, or None."""

    address: int
    read_only: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stream: int | None

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def cuda_array(interface: dict[str, Any], name: str) -> CudaArray:
    """Return the fields of the array interface of another library's array, and check them. ``name`` is the array's name
    in errors.

    Raises
    ------
    TypeError
        The elements are Python objects, or of a type that NumPy does not know.
    ValueError
        The array has a mask or a negative size, or is not C-contiguous.
    KeyError
        A required entry of the interface is missing.
    """
    dtype, shape = interface_form(interface)
    if dtype.hasobject:
        raise TypeError(f"{name} has elements of {dtype}: memory of devices has no Python objects")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has the shape {shape}, with a negative size")
    if interface.get("mask") is not None:
        raise ValueError(f"{name} has a mask, which copies would not follow: pass its data and its mask one by one")
    check_dense(name, shape, interface.get("strides"), dtype.itemsize)
    address, read_only = interface["data"]
    stream = interface.get("stream")
    return CudaArray(int(address), read_only, dtype, shape, None if stream is None else int(stream))


def check_dense(name: str, shape: tuple[int, ...], strides: Any, step: int) -> None:
    """Raise ``ValueError`` if ``strides`` are not those of a C-contiguous array. None as strides means contiguous.

    ``step``: size of an element in bytes. ``name``: the array's name in the error.
    """
    if strides is None or 0 in shape:
        return
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            raise ValueError(f"{name} is not contiguous: strides {tuple(strides)} of shape {shape}")
        step *= size


def interface_form(interface: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the NumPy element type and the shape of an array interface."""
    # A plain type also has a `descr`, with one nameless field. NumPy would make a struct of it.
    described = [field for field in interface.get("descr") or () if field[0]]
    return np.dtype(interface["descr"] if described else interface["typestr"]), tuple(interface["shape"])


def array_form(
    memory: object, address: int, nbytes: int, dtype: npt.DTypeLike, shape: tuple[int, ...] | None
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the element type and the shape of an array that fills ``nbytes`` bytes exactly. A -1 in ``shape`` is
    replaced by the size that fits. None as ``shape``: one dimension. ``memory`` is shown in errors.

    Raises ``ValueError`` if the array does not fill the bytes, or ``address`` is not aligned. Raises ``TypeError`` if
    ``shape`` is not a sequence of integers, or ``dtype`` is no type of NumPy, a subarray type, or a type of Python
    objects or without a size.
    """
    kind = np.dtype(dtype)
    if kind.subdtype is not None:
        raise TypeError(f"dtype={dtype!r} is an array of {kind.base}: let shape say that")
    if kind.hasobject or not kind.itemsize:
        raise TypeError(f"dtype={dtype!r}: memory of devices has elements of a size, and no Python objects")
    count, rest = divmod(nbytes, kind.itemsize)
    if shape is not None and not isinstance(shape, Iterable):
        raise TypeError(f"shape={shape!r} must be a tuple of integers, such as (2, 3)")
    sizes = [-1] if shape is None else [operator.index(size) for size in shape]
    if -1 in sizes:
        place = sizes.index(-1)
        others = math.prod(sizes[:place] + sizes[place + 1 :])
        sizes[place] = count // others if others > 0 else -1
    if rest or min(sizes, default=0) < 0 or math.prod(sizes) != count:
        form = f"shape={shape} of {kind}" if shape is not None else f"no number of {kind} (each {kind.itemsize} bytes)"
        verb = "does not fill" if shape is not None else "fills"
        raise ValueError(f"{form} {verb} the {nbytes} bytes of {memory!r}; memory[start:stop] is a part of it")
    if address % kind.alignment:
        raise ValueError(f"{memory!r} is not aligned for {kind}, which lies at multiples of {kind.alignment} bytes")
    return kind, tuple(sizes)


def host_array(other: Any) -> npt.NDArray[Any] | None:
    """Return an object with the buffer protocol as a NumPy array of the same elements and bytes, without a copy; an
    array itself; None for other objects. Raises ``ValueError`` if NumPy does not know the type of the buffer's
    elements.
    """
    try:
        return other if isinstance(other, np.ndarray) else np.asarray(memoryview(other))
    except TypeError:
        return None


# -- values of elements --------------------------------------------------------------------------------------

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None"
"""A basic index of NumPy: integers, slices, ``...`` and None, alone or in a tuple."""

_WORDS = (1, 2, 4)
_NUMBERS = (int, float, complex)


def to_element(value: object, dtype: np.dtype[Any]) -> bytes:
    """Return the bytes of one element of type ``dtype`` that has the value ``value``.

    Raises
    ------
    TypeError
        ``value`` is not of a kind that NumPy converts to ``dtype``.
    ValueError
        ``dtype`` cannot hold the value, or NumPy refuses to convert it. Floating-point numbers are rounded without an
        error.
    """
    element = np.empty((), dtype)
    try:
        with np.errstate(over="raise", invalid="raise"):
            element[()] = value
            kept = _keeps(element, value)
    except TypeError as error:
        raise TypeError(f"value={value!r} is no value of {dtype}") from error
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"value={value!r} is no value of {dtype}") from error
    if not kept:
        kind = ValueError if isinstance(value, (*_NUMBERS, np.number)) else TypeError
        raise kind(f"value={value!r} is no value of {dtype}")
    return element.tobytes()


def _keeps(element: np.ndarray[Any, Any], value: object) -> bool:
    """Return whether ``element`` has the value that was assigned to it, apart from floating-point rounding."""
    dtype = element.dtype
    if isinstance(value, (bytes, bytearray)):
        padded = value.ljust(dtype.itemsize, b"\0") if dtype.kind == "S" else value
        return element.tobytes() == padded
    if dtype.names is not None:
        return isinstance(value, (tuple, np.void))
    if dtype.kind == "V" and dtype.type is not np.void:  # Of ml_dtypes, such as bfloat16.
        return isinstance(value, (*_NUMBERS, np.number))
    given = np.asarray(value)
    rounds = dtype.kind in "fc" and given.dtype.kind in "biufc"
    return (rounds and np.can_cast(given.dtype, dtype, "same_kind")) or bool(np.all(element == given))


def fill_pattern(value: int | bytes | np.generic, width: int | None) -> tuple[int, int]:
    """Return a fill pattern as the unsigned number for ``cuMemsetD*``, and the pattern's width in bytes (1, 2 or 4).
    ``width`` is that of an integer; None for 1.

    Raises
    ------
    TypeError
        ``value`` is not an integer, bytes or a NumPy scalar.
    ValueError
        The pattern or ``width`` has not 1, 2 or 4 bytes, or ``value`` does not fit ``width``.
    """
    given = value
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        if len(value) not in _WORDS or width not in (None, len(value)):
            allowed = f"a pattern has 1, 2 or 4 bytes{f', and width={width}' if width else ''}"
            raise ValueError(f"value={given!r} has {len(value)} bytes: {allowed}")
        return int.from_bytes(value, "little"), len(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"value must be an integer, bytes or a numpy scalar, not {type(value).__name__} ({value!r})")
    width = 1 if width is None else width
    if width not in _WORDS:
        raise ValueError(f"width={width!r}: allowed are 1, 2 and 4 bytes")
    number = operator.index(value)
    if not -(1 << 8 * width - 1) <= number < 1 << 8 * width:
        raise ValueError(f"value={number} does not fit a pattern of {width} byte{'s' if width > 1 else ''}")
    return number % (1 << 8 * width), width


def fill_steps(element: bytes, address: int) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Return the pattern or the steps with which ``cuMemsetD*`` fills memory at ``address`` with copies of ``element``.

    If the element is a repeated pattern of 1, 2 or 4 bytes, return this pattern and no steps. Otherwise return ``b""``
    and the fills that write one element: start and end (exclusive) in bytes, and pattern.
    """
    size = len(element)
    widths = [width for width in _WORDS if size % width == 0 and address % width == 0]
    for width in widths:
        if element == element[:width] * (size // width):
            return element[:width], []
    width = widths[-1]
    steps, at = [], 0
    for word, run in groupby(element[start : start + width] for start in range(0, size, width)):
        end = at + width * len(list(run))
        steps.append((at, end, word))
        at = end
    return b"", steps


def part_of(shape: tuple[int, ...], itemsize: int, index: Index) -> tuple[int, tuple[int, ...]]:
    """Return the offset in bytes and the shape of the part that a basic index selects from a C-contiguous array.

    Raises
    ------
    TypeError
        The index is not a basic index.
    IndexError
        The index does not fit the shape.
    ValueError
        The selection is not contiguous.
    """
    indices = index if isinstance(index, tuple) else (index,)
    for one in indices:
        if isinstance(one, (bool, np.bool_)) or not (
            one is None or one is Ellipsis or isinstance(one, slice) or hasattr(one, "__index__")
        ):
            raise TypeError(f"{one!r} is no basic index: allowed are integers, slices, ... and None")
    basic = tuple(one if one is None or one is Ellipsis or isinstance(one, slice) else operator.index(one)
                  for one in indices)  # fmt: skip
    # With an ellipsis NumPy returns a view, never an element, and so reads no memory. The array below has no memory.
    basic = basic if Ellipsis in basic else (*basic, Ellipsis)
    strides = [itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    whole = np.lib.stride_tricks.as_strided(np.empty((), f"V{itemsize}"), shape, strides)
    part = whole[basic]
    if not part.flags.c_contiguous:
        raise ValueError(f"{index!r} of shape {shape} is not contiguous: a view is")
    return (part.ctypes.data - whole.ctypes.data if part.size else 0), part.shape


def interface_type(dtype: np.dtype[Any]) -> dict[str, Any] | None:
    """Return the entries ``typestr`` and ``descr`` of an array interface for a type; None if they cannot describe the
    type.
    """
    if dtype.names is None:
        return {"typestr": dtype.str} if np.dtype(dtype.str) == dtype else None
    try:
        return {"typestr": dtype.str, "descr": dtype.descr} if np.dtype(dtype.descr) == dtype else None
    except ValueError:  # NumPy refuses the `descr` of a type whose fields overlap.
        return None
