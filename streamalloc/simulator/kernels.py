"""Python functions that run in place of kernels, found by the kernel's name; modules and libraries with kernels and
variables.

Module images are accepted and not executed. Only kernel names, kernel parameters and global variables are read from
PTX. Nothing is read from other formats.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import inspect
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from streamalloc.simulator.allocations import LiveMemory
from streamalloc.simulator.allocator import Block
from streamalloc.simulator.constants import new_handle
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Result, check, need, not_modelled
from streamalloc.simulator.memory import is_accessible

Uses: TypeAlias = Callable[..., Iterable[tuple[int, int]]]
"""Function that gets a kernel's arguments and returns tuples of address and size in bytes, one for each range that the
kernel uses.
"""
CType: TypeAlias = Any
_F = TypeVar("_F", bound=Callable[..., object])


@dataclass(frozen=True, eq=False)
class RegisteredKernel:
    """A Python function that runs in place of a kernel, with the memory that its registration says the kernel uses."""

    function: Callable[..., object]
    types: tuple[CType, ...] | None
    reads: Uses | None
    writes: Uses | None
    atomics: Uses | None
    attributes: Mapping[str, int] = field(default_factory=dict)

    @property
    def declares(self) -> bool:
        """Whether the registration says which memory the kernel uses."""
        return any(one is not None for one in (self.reads, self.writes, self.atomics))

    def touched(self, arguments: tuple[Any, ...]) -> list[tuple[int, int, bool, bool]] | None:
        """Return the memory that a launch with ``arguments`` uses: tuples of address, size in bytes, write flag and
        atomic flag. None if unknown.
        """
        if not self.declares:
            return None
        kinds = ((self.reads, False, False), (self.writes, True, False), (self.atomics, True, True))
        return [
            (int(address), int(size), write, atomic)
            for uses, write, atomic in kinds
            if uses is not None
            for address, size in uses(*arguments)
        ]


_kernels: dict[str, RegisteredKernel] = {}
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

    If the function raises an exception, its traceback is printed to stderr, and the context is lost as on hardware.
    Later calls in this context return ``CUDA_ERROR_LAUNCH_FAILED``. After an ``AssertionError`` they return
    ``CUDA_ERROR_ASSERT``, and after the ``MemoryError`` of :func:`device_view` ``CUDA_ERROR_ILLEGAL_ADDRESS``.

    The function must not wait for work of the device: a driver call in it that would wait raises ``DeadlockError``.

    Parameters
    ----------
    name
        Name of the kernel in the module (mangled for C++), or a pattern with ``*``.
    types
        Types of the parameters, from ctypes or NumPy. They are needed if the module is not PTX and a launch packs its
        arguments without types (``void**``, arrays of addresses, ``extra``, graph nodes). By default the annotations of
        the function, if each parameter has such a type.
    reads, writes, atomics
        Functions that return pairs of an address and a number of bytes for the arguments of a launch. A checker
        (:func:`streamalloc.driver.checked`) then records these uses, and :func:`device_view` refuses all other memory.
        Bytes of ``atomics`` are written by atomic operations, which do not race with each other. If none of the three
        is given, the uses are unknown.
    attributes
        Values that ``cuFuncGetAttribute`` returns, by enum name without ``CU_FUNC_ATTRIBUTE_``.

    Raises
    ------
    TypeError
        ``name`` is not a str, ``types`` contains an object that is no type of ctypes or NumPy, or the decorated object
        cannot be called.

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
        made = RegisteredKernel(function, given or _annotated(function), reads, writes, atomics, dict(attributes or {}))
        # The old entry is removed first, so that the new one comes last: of several matching patterns the last one
        # counts.
        _kernels.pop(name, None)
        _kernels[name] = made
        return function

    return register


def unregister_kernel(name: str) -> None:
    """Undo :func:`kernel` or :func:`device_global` for a name. Nothing happens if nothing is registered under the
    name.
    """
    _kernels.pop(name, None)
    _globals.pop(name, None)


def device_global(name: str, nbytes: int, initial: bytes = b"") -> None:
    """Register a global variable of modules, for ``cuModuleGetGlobal`` and ``cuLibraryGetGlobal``.

    A variable of a PTX module needs a registration only if the module gives it an initial value. Variables of other
    modules must be registered. Raises ``ValueError`` if ``nbytes`` is less than 1 or than the bytes of ``initial``.

    Parameters
    ----------
    name
        Name of the variable as the module has it.
    nbytes
        Size in bytes.
    initial
        First bytes of the variable's initial value; the other bytes are 0.

    Examples
    --------
    >>> device_global("scale", 4, np.float32(2).tobytes())
    """
    if nbytes < 1 or len(initial) > nbytes:
        raise ValueError(f"nbytes={nbytes}: must be at least 1, and at least the {len(initial)} bytes of initial")
    _globals[name] = initial.ljust(nbytes, b"\0")


def find_kernel(name: str) -> RegisteredKernel | None:
    """Return the kernel registered under ``name``, else the kernel under the latest pattern that matches ``name``; None
    if there is none.
    """
    if name in _kernels:
        return _kernels[name]
    patterns = (one for one in reversed(_kernels) if "*" in one and fnmatch.fnmatchcase(name, one))
    return next((_kernels[one] for one in patterns), None)


def _c_type(given: Any) -> CType:
    """Return the ctypes type for a type of ctypes or NumPy. Raises ``TypeError`` for any other object."""
    if isinstance(given, type) and issubclass(given, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)):
        return given
    # int and float have no fixed size, and NumPy would treat unknown classes as objects, so the error is ignored.
    with contextlib.suppress(TypeError, NotImplementedError):
        dtype = np.dtype(given)
        if given not in (int, float) and not dtype.hasobject:
            return np.ctypeslib.as_ctypes_type(dtype)
    raise TypeError(f"types: {given!r} is no type of ctypes or NumPy")


def _annotated(function: Callable[..., object]) -> tuple[CType, ...] | None:
    """Return the ctypes types for the annotations of a function's parameters; None unless each annotation is a type of
    ctypes or NumPy.
    """
    try:
        return tuple(_c_type(one.annotation) for one in inspect.signature(function, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError):
        return None


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("u8", "b8"), ctypes.c_uint8),
    **dict.fromkeys(("u16", "b16", "f16"), ctypes.c_uint16),
    **dict.fromkeys(("u32", "b32"), ctypes.c_uint32),
    **dict.fromkeys(("u64", "b64"), ctypes.c_uint64),
    **{"s8": ctypes.c_int8, "s16": ctypes.c_int16, "s32": ctypes.c_int32, "s64": ctypes.c_int64},
    **{"f32": ctypes.c_float, "f64": ctypes.c_double},
}
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+(?:\.ptr\b[^,]*?\s)?[\w$%]+(?:\[(\d+)\])?")
_GLOBAL = re.compile(
    r"^\s*(?:\.(?:visible|weak|common)\s+)?\.(?:global|const)\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+([\w$%]+)"
    r"(?:\[(\d+)\])?\s*(=[^;]*)?;",
    re.MULTILINE,
)
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Contents:
    """Kernels of a module by name, with the types of their parameters, and variables by name, with their sizes in
    bytes.
    """

    kernels: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    initialised: frozenset[str] = frozenset()
    """Names of the variables that the module initialises. The initial values are not read."""


def _read(text: str) -> Contents:
    """Return the contents of a module, read from its PTX text."""
    text = _COMMENTS.sub("", text)
    kernels = {name: tuple(map(_type, _PARAMETER.finditer(given))) for name, given in _ENTRY.findall(text)}
    variables, initialised = {}, set()
    for kind, name, count, value in _GLOBAL.findall(text):
        variables[name] = ctypes.sizeof(_TYPES[kind]) * int(count or 1)
        if value:
            initialised.add(name)
    return Contents(kernels, variables, frozenset(initialised))


def _type(found: re.Match[str]) -> Any:
    kind, count = _TYPES[found[1]], found[2]
    return kind * int(count) if count else kind


BINARIES = (b"\x7fELF", *(struct.pack("=I", one) for one in (0xBA55ED50, 0x466243B1)))
"""First four bytes of a cubin, of a fat binary, and of the struct that wraps a fat binary."""


@dataclass(eq=False)
class VariableMemory(LiveMemory):
    """Device memory of a module's variable, from the first query of its address until the module is unloaded."""

    block: Block


def load(given: Any) -> Contents | None:
    """Return the contents of a module image, given as a buffer object or as its address.

    Returns None if the image is binary code: then every name of a kernel counts as existing. Gives
    CUDA_ERROR_INVALID_IMAGE for a text that is not PTX, and CUDA_ERROR_INVALID_VALUE for None, the address 0 and an
    empty buffer. Raises :class:`NotModelled` for an address without memory.
    """
    check(given is not None and not (isinstance(given, int) and not given))
    if not isinstance(given, int):
        data = memoryview(given).tobytes()
        check(data)
    else:
        not_modelled(not is_accessible(given, 1), "an image where nothing lies: the real driver crashes")
        head = ctypes.string_at(given, 4) if is_accessible(given, 4) else b""
        data = head if head in BINARIES else ctypes.string_at(given)
    if data.startswith(BINARIES):
        return None
    text = data.rstrip(b"\0 \n").decode("utf-8", "replace")
    check(".version" in text and ".target" in text, Result.CUDA_ERROR_INVALID_IMAGE)
    return _read(text)


@dataclass(eq=False)
class Module:
    """Module of a context, or a library, which belongs to no context."""

    contents: Contents | None
    context: Context | None
    library: Module | None = None
    """The library of which this is the module in one context; None for all other modules."""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[tuple[str, Context], VariableMemory] = field(default_factory=dict)
    handle: int = field(default_factory=new_handle)

    def function(self, name: str) -> Function:
        found = self.functions.get(name)
        if found is None:
            check(self.contents is None or name in self.contents.kernels, Result.CUDA_ERROR_NOT_FOUND)
            found = self.functions[name] = Function(name, self)
        return found

    def initial(self, name: str) -> bytes:
        """Return the initial bytes of a variable.

        Raises :class:`NotModelled` if these bytes are unknown. Gives CUDA_ERROR_NOT_FOUND for a name that is not in the
        PTX.
        """
        given = _globals.get(name)
        if given is not None:
            return given
        contents = need(self.contents, f"the variable {name!r} of a module that is not PTX: testing.device_global")
        not_modelled(name in contents.initialised, f"the initial value of {name!r}: register testing.device_global")
        return bytes(need(contents.variables.get(name), Result.CUDA_ERROR_NOT_FOUND))


@dataclass(eq=False)
class Function:
    """A function of a module, or a kernel of a library."""

    name: str
    module: Module
    attributes: dict[int, int] = field(default_factory=dict)
    """Attributes that the program has set, by attribute number."""
    handle: int = field(default_factory=new_handle)

    @property
    def kernel(self) -> RegisteredKernel | None:
        """The registered Python function that runs in place of the function; None if there is none."""
        return find_kernel(self.name)

    @property
    def types(self) -> tuple[Any, ...] | None:
        """ctypes types of the parameters, in order; None if unknown.

        The types given to :func:`kernel`, or else the types that were read from the PTX.
        """
        if self.kernel is not None and self.kernel.types is not None:
            return self.kernel.types
        return None if self.module.contents is None else self.module.contents.kernels.get(self.name)

    @property
    def registered(self) -> Mapping[str, int]:
        return {} if self.kernel is None else self.kernel.attributes


@dataclass(eq=False)
class Linker:
    """Object of a CUlinkState. It has the texts that were added, and the image that cuLinkComplete made of these
    texts.
    """

    texts: list[bytes] = field(default_factory=list)
    linked: Any = None
    handle: int = field(default_factory=new_handle)
