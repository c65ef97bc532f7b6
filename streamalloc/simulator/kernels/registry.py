"""Python functions that replace kernels, by kernel name."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

Uses: TypeAlias = Callable[..., Iterable[tuple[int, int]]]
"""Maps kernel arguments to used addresses and sizes in bytes."""
CType: TypeAlias = Any
Extent = tuple[int, int, int]
_F = TypeVar("_F", bound=Callable[..., object])


@dataclass(frozen=True, eq=False)
class Kernel:
    """A registered kernel."""

    function: Callable[..., object]
    types: tuple[CType, ...] | None
    reads: Uses | None
    writes: Uses | None
    atomics: Uses | None
    attributes: Mapping[str, int] = field(default_factory=dict)

    @property
    def declares(self) -> bool:
        """Whether its uses are known."""
        return any(one is not None for one in (self.reads, self.writes, self.atomics))

    def touched(self, arguments: tuple[Any, ...]) -> list[tuple[int, int, bool, bool]] | None:
        """Address, size, write flag and atomic flag of each use; None if unknown."""
        if not self.declares:
            return None
        kinds = ((self.reads, False, False), (self.writes, True, False), (self.atomics, True, True))
        return [
            (int(address), int(size), write, atomic)
            for uses, write, atomic in kinds
            if uses is not None
            for address, size in uses(*arguments)
        ]


_kernels: dict[str, Kernel] = {}
_globals: dict[str, bytes] = {}


def kernel(
    name: str,
    *,
    types: Iterable[Any] | None = None,
    reads: Uses | None = None,
    writes: Uses | None = None,
    atomics: Uses | None = None,
    attributes: Mapping[str, int] | None = None,
) -> Callable[[_F], _F]:
    """Register a Python function that replaces a kernel, on every simulated machine of this process.

    A launch of the kernel calls the function in stream order, on a separate thread, once for the whole grid. The
    function gets the kernel's arguments: addresses and integers as int, other numbers as float, ctypes structures as
    copies. :func:`device_view` returns memory as NumPy arrays, :func:`current_launch` the grid. A second registration
    of a name replaces the first one.

    If the function raises, its traceback is printed, and its context is lost as on hardware. Each later call there
    returns ``CUDA_ERROR_LAUNCH_FAILED``; after an ``AssertionError`` it returns ``CUDA_ERROR_ASSERT``, and after a use
    of missing or inaccessible memory ``CUDA_ERROR_ILLEGAL_ADDRESS``.

    The function must not wait for work of the device: a driver call that would wait there raises ``DeadlockError``.

    Parameters
    ----------
    name
        Name of the kernel as the module has it (mangled, where it is C++), or a pattern of it with ``*``.
    types
        Types of the parameters, from ctypes or NumPy. They are needed if the module is not PTX and a launch packs its
        arguments without types (``void**``, arrays of addresses, ``extra``, graph nodes). By default the annotations of
        the function, if each parameter has such a type.
    reads, writes, atomics
        Functions that return pairs of an address and a number of bytes for the arguments of a launch. A checker
        (:func:`streamalloc.driver.checked`) then records these uses, and :func:`device_view` refuses all other memory.
        Bytes of ``atomics`` are written by atomic operations, which do not race with each other. Without all three, the
        uses are unknown.
    attributes
        Answers of ``cuFuncGetAttribute``, by their enum names without ``CU_FUNC_ATTRIBUTE_``.

    Examples
    --------
    >>> import numpy as np
    >>> @kernel("scale", reads=lambda x, a, n: [(x, 4 * n)], writes=lambda x, a, n: [(x, 4 * n)])
    ... def scale(x: np.uint64, a: np.float32, n: np.int32) -> None:
    ...     device_view(x, n, np.float32)[:] *= a
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a str")
    given = None if types is None else tuple(map(_c_type, types))

    def register(function: _F) -> _F:
        if not callable(function):
            raise TypeError(f"the kernel {name!r} must be a function, got {function!r}")
        made = Kernel(function, given or _annotated(function), reads, writes, atomics, dict(attributes or {}))
        _kernels.pop(name, None)  # the latest matching pattern applies
        _kernels[name] = made
        return function

    return register


def unregister_kernel(name: str) -> None:
    """Undo :func:`kernel` or :func:`device_global` for a name. No effect if nothing is registered."""
    _kernels.pop(name, None)
    _globals.pop(name, None)


def device_global(name: str, nbytes: int, initial: bytes = b"") -> None:
    """Register a global variable of modules, for ``cuModuleGetGlobal`` and ``cuLibraryGetGlobal``.

    Variables of PTX modules are read from the PTX. Those of other modules must be registered.

    Parameters
    ----------
    name
        Name of the variable as the module has it.
    nbytes
        Size in bytes.
    initial
        Bytes that it begins with; the rest is 0.

    Examples
    --------
    >>> device_global("scale", 4, np.float32(2).tobytes())
    """
    if nbytes < 1 or len(initial) > nbytes:
        raise ValueError(f"nbytes={nbytes}: must be at least 1, and at least the {len(initial)} bytes of initial")
    _globals[name] = initial.ljust(nbytes, b"\0")


def find_kernel(name: str) -> Kernel | None:
    """The kernel registered under a name, or under a matching pattern."""
    if name in _kernels:
        return _kernels[name]
    patterns = (one for one in reversed(_kernels) if "*" in one and fnmatch.fnmatchcase(name, one))
    return next((_kernels[one] for one in patterns), None)


def find_global(name: str) -> bytes | None:
    """The initial bytes of a registered variable."""
    return _globals.get(name)


def _c_type(given: Any) -> CType:
    """Return the ctypes type of a ctypes or NumPy type."""
    if isinstance(given, type) and issubclass(given, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return given
    # int and float have no size, and NumPy would treat unknown classes as objects.
    with contextlib.suppress(TypeError, NotImplementedError):
        dtype = np.dtype(given)
        if given not in (int, float) and not dtype.hasobject:
            return np.ctypeslib.as_ctypes_type(dtype)
    raise TypeError(f"types: {given!r} is no type of ctypes or NumPy")


def _annotated(function: Callable[..., object]) -> tuple[CType, ...] | None:
    """The types in a function's annotations; None unless each is a ctypes or NumPy type."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        return tuple(_c_type(one.annotation) for one in parameters)
    except (NameError, TypeError, ValueError):
        return None
