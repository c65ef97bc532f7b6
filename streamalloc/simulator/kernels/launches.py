"""Kernel launches as stream operations, and their arguments in every form that the bindings accept."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import call_lock
from streamalloc.simulator.allocations import Allocation, is_reachable
from streamalloc.simulator.constants import READ, READ_WRITE, device_place
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Result, check, need, not_modelled
from streamalloc.simulator.kernels.registry import Extent, Kernel
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import is_accessible
from streamalloc.simulator.scheduler import HostFunction


@dataclass(frozen=True)
class Shape:
    """The shape of a launch."""

    grid: Extent
    block: Extent
    shared_bytes: int
    cooperative: bool = False


class NoAccess(MemoryError):
    """A kernel used memory that does not exist or that its device cannot access."""


class Launch(HostFunction):
    """One launch of a registered kernel, on its own thread. The kernel can read these attributes:

    ``name`` of the kernel; ``grid`` and ``block``, the blocks and the threads of a block in each dimension;
    ``shared_bytes`` of a block, the dynamic ones; ``cooperative``; ``device``, its number.
    """

    def __init__(
        self, driver: Any, context: Context, name: str, kernel: Kernel, shape: Shape, arguments: tuple[Any, ...]
    ) -> None:
        self._machine: Machine = driver._machine
        super().__init__(self._machine.scheduler, self._call)
        self._driver = weakref.ref(driver)  # its end closes the machine
        self._context = context
        self._kernel = kernel
        self._arguments = arguments
        self._uses = kernel.touched(arguments)
        self.name = name
        self.grid: Extent = shape.grid
        self.block: Extent = shape.block
        self.shared_bytes: int = shape.shared_bytes
        self.cooperative: bool = shape.cooperative
        self.device: int = context.device.ordinal

    def _call(self) -> None:
        driver = self._driver()  # the memory stays as long as the kernel runs
        self._machine.thread.caller = call_lock.Caller(in_kernel=True)
        if driver is None or self._context.error is not None:
            return
        try:
            _here.launch = self
            self._kernel.function(*self._arguments)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the program may have closed the stream
                print(f"the kernel {self.name!r} raised, and its context is lost:", file=sys.stderr)
                traceback.print_exception(error, file=sys.stderr)
            codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
            self._context.error = next(codes, Result.CUDA_ERROR_LAUNCH_FAILED)

    @property
    def runs(self) -> bool:  # type: ignore[override]  # of other operations it is a constant
        return self._state == "running"

    def touches(self, start: int, end: int) -> bool:
        return any(address < end and start < address + size for address, size, *_ in self._uses or ())

    def view(self, address: int, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The memory as an array (:func:`device_view`)."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        writable = True
        if self._uses is not None:
            covering = [write for at, length, write, _ in self._uses if at <= address and address + size <= at + length]
            if not covering and size:
                raise ValueError(f"{self.name!r} is registered without a read or write of {size} bytes at {address:#x}")
            writable = any(covering)
        call_lock.enter()
        try:
            if writable and self._uses is None and size:
                writable = _may_use(self._machine, self._context, address, size, write=True)
            if size and not _may_use(self._machine, self._context, address, size, writable):
                raise NoAccess(f"no memory that device {self.device} may use: {size} bytes at {address:#x}")
        finally:
            call_lock.leave()
        memory = memoryview((ctypes.c_ubyte * size).from_address(address)) if size else np.empty(0, np.uint8)
        array: npt.NDArray[Any] = np.frombuffer(memory, dtype).reshape(shape)
        array.flags.writeable = writable
        return array


_CODES = {AssertionError: Result.CUDA_ERROR_ASSERT, NoAccess: Result.CUDA_ERROR_ILLEGAL_ADDRESS}


def _may_use(machine: Machine, context: Context, address: int, size: int, write: bool) -> bool:
    """Whether a kernel in a context may use memory. Memory freed after the launch was queued has no allocation any
    more, so it only needs to be mapped. A device never accesses pageable host memory.
    """
    at, end, there = address, address + size, machine.banks.arenas.find(address) is not None
    while at < end:
        allocation = machine.allocations.find(at)
        if allocation is None:
            break
        there = True
        on_team = allocation.mapping is not None and allocation.mapping.is_multicast
        not_modelled(on_team, "a view of multicast memory: use testing.multimem_st, _red and _ld_reduce")
        if not _has_right(allocation, context, write):
            return False
        at = allocation.end
    return there and machine.banks.is_mapped(address, size, write)


def _has_right(allocation: Allocation, context: Context, write: bool) -> bool:
    if allocation.mapping is not None:
        right = allocation.mapping.right(device_place(context.device.ordinal))
        return right & (READ_WRITE if write else READ) == (READ_WRITE if write else READ)
    return is_reachable(allocation, context)


CELLS = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)
Cells = tuple[Any, ...]
"""Copies of arguments as ctypes objects; bindings objects of unknown size as they are."""
_POINTER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_*
_WORD = 8


def unpack(name: str, params: Any, extra: Any, types: tuple[Any, ...] | None) -> Cells:
    """The arguments of a launch of the kernel ``name``. ``types``: its parameter types if known.

    The bindings pack the arguments, and this function reads the memory that a driver would get.
    """
    node, buffer = packed(params, extra)
    slots = int(node.kernelParams)
    if buffer:
        return _from_buffer(buffer, _known(name, types))
    if not slots:
        check(not types)
        return ()
    if isinstance(params, tuple):
        count = len(params[0])
        missing = types is not None and count < len(types)
        not_modelled(missing, f"fewer arguments than {name!r} has parameters: the real driver crashes")
        parameters = (*(types or ()), *[None] * count)[:count]
        cells = tuple(_given(*one) for one in zip(_addresses(slots, count), *params, parameters, strict=True))
        return cells if types is None else cells[: len(types)]
    known = _known(name, types)
    pairs = zip(_addresses(slots, len(known)), known, strict=True)
    return tuple(_read(address, kind) for address, kind in pairs)


def packed(params: Any, extra: Any) -> tuple[Any, int]:
    """The arguments of a launch as packed by the bindings: the node that owns the memory, and the address in ``extra``.
    The driver accepts only one of the two.
    """
    node = cuda.CUDA_KERNEL_NODE_PARAMS()
    node.kernelParams = params  # raises the errors of the bindings
    buffer = int(extra or 0)
    check(not (int(node.kernelParams) and buffer))
    return node, buffer


def _known(name: str, types: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return need(types, f"arguments without types for {name!r}: register it with testing.kernel(..., types=...)")


def _addresses(slots: int, count: int) -> tuple[int, ...]:
    """The addresses of the arguments, read from a ``void**``."""
    return tuple(_read(slots, ctypes.c_uint64 * count, "arguments")) if count else ()


def _read(address: int, kind: Any, what: str = "an argument") -> Any:
    size = ctypes.sizeof(kind)
    not_modelled(not is_accessible(address, size), f"{what} where nothing lies: the real driver crashes")
    return kind.from_buffer_copy(ctypes.string_at(address, size))


def _given(address: int, value: Any, kind: Any, parameter: Any) -> Any:
    """Read one argument. ``kind``: its C type, or None for a ctypes or bindings object. For a numeric parameter the
    bytes of the parameter's type are read, unless the argument's type is smaller (NVIDIA's samples pass an int for a
    size_t). Structs of the bindings are read as the kernel's registered ctypes struct.
    """
    if kind is None and isinstance(value, CELLS):
        kind = type(value)
    if _is_a(parameter, ctypes._SimpleCData) and (kind is None or _is_a(kind, ctypes._SimpleCData)):
        is_short = kind is not None and ctypes.sizeof(kind) < ctypes.sizeof(parameter)
        kind = kind if is_short else parameter
    elif kind is None and hasattr(value, "__int__"):
        kind = ctypes.c_int if isinstance(value, int) else ctypes.c_uint64
    elif kind is None and _is_a(parameter, ctypes.Structure):
        kind = parameter
    return value if kind is None else _read(address, kind)


def _is_a(kind: Any, cls: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, cls)


def plain(cell: Any) -> Any:
    """An argument as kernels get it."""
    value = cell.value if isinstance(cell, ctypes._SimpleCData) else cell
    return 0 if value is None else value  # an address that is null


def _word(address: int) -> int:
    return int(_read(address, ctypes.c_uint64, "extra").value)


def _from_buffer(extra: int, types: tuple[Any, ...]) -> Cells:
    """The arguments in a buffer that ``extra`` describes."""
    settings, at = {}, extra
    while name := _word(at):
        check(name in (_POINTER, _SIZE))
        settings[name] = _word(at + _WORD)
        at += 2 * _WORD
    check(len(settings) == 2)
    size = _word(settings[_SIZE])
    found = []
    for offset, kind in zip(offsets(types), types, strict=True):
        check(offset + ctypes.sizeof(kind) <= size, Result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
        found.append(_read(settings[_POINTER] + offset, kind))
    return tuple(found)


def offsets(types: tuple[Any, ...]) -> list[int]:
    """Byte offsets of the parameters, each aligned to its type."""
    found, at = [], 0
    for kind in types:
        alignment = ctypes.alignment(kind)
        at = -(-at // alignment) * alignment
        found.append(at)
        at += ctypes.sizeof(kind)
    return found


# -- what a running kernel asks --------------------------------------------------------------------------------

_here = threading.local()  # ``launch``: that of the thread


def current_launch() -> Launch:
    """The launch that runs the calling function: ``name``, ``grid``, ``block``, ``shared_bytes``, ``device``.

    :func:`kernel` registers such functions.

    Raises
    ------
    RuntimeError
        The caller is no kernel.
    """
    found: Launch | None = getattr(_here, "launch", None)
    if found is None:
        raise RuntimeError("no kernel runs on this thread")
    return found


def device_view(address: int, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Return simulated memory as a NumPy array, for the kernel on this thread. Valid until the kernel returns.

    :func:`kernel` shows its use.

    The array is read-only if the device may only read the memory, or if the kernel is registered with ``reads`` or
    ``writes`` and no write covers it.

    Parameters
    ----------
    address
        Address of the first byte, as it is passed to kernels.
    shape
        Number of elements, or the shape.
    dtype
        Type of the elements.

    Raises
    ------
    RuntimeError
        No kernel runs on this thread.
    ValueError
        The registered ``reads`` and ``writes`` do not cover the memory.
    MemoryError
        Memory is missing there, or the device has no access to it. The context is lost.
    """
    return current_launch().view(address, shape, np.dtype(dtype))
