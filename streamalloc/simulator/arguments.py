"""Arguments as the bindings take them: with the same conversions and the same Python exceptions.

The annotation of a driver call's parameter determines what the method of the call gets: a number (``Size``), the object
of a handle (``Stream``), or a struct or an enum member of the bindings (``cuda.CUmemPoolProps``).
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, TypeVar

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import contexts, graphs, kernels, scheduler
from streamalloc.simulator.constants import Place
from streamalloc.simulator.errors import Fault, Result, check, need, wrong_type
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import view_address

Convert = Callable[[Any], int]
Find = Callable[[Machine, Any], Any]
T = TypeVar("T")


def _integer(value: Any) -> int:
    """Convert any object with ``__index__`` or ``__int__`` except strings to int. Floats are truncated, as in the
    bindings.
    """
    if isinstance(value, int):
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__int__"):
            raise TypeError("an integer is required") from None
        return int(value)


def _unsigned(bits: int, name: str, too_large: str) -> Callable[[Any], int]:
    limit = 1 << bits

    def convert(value: Any) -> int:
        number = _integer(value)
        if number < 0:
            raise OverflowError(f"can't convert negative value to {name}")
        if number >= limit:
            raise OverflowError(too_large)
        return number

    return convert


_TOO_LARGE = "Python int too large to convert to C unsigned long"
_any_size = _unsigned(64, "size_t", _TOO_LARGE)


def size_t(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    return _any_size(value)


def signed_int(value: Any) -> int:
    number = _integer(value)
    if not -(1 << 31) <= number < 1 << 31:
        raise OverflowError("value too large to convert to int")
    return number


@dataclass(frozen=True)
class Handle:
    """Conversion of an argument to the number of a handle. The argument is an object of the bindings' handle class
    ``cls``, anything from which ``cls`` can be made, or None for 0.
    """

    cls: Any

    def __call__(self, value: Any) -> int:
        return 0 if value is None else int(self.cls(value))


device_pointer: Convert = Handle(cuda.CUdeviceptr)
context: Convert = Handle(cuda.CUcontext)
stream: Convert = Handle(cuda.CUstream)
event: Convert = Handle(cuda.CUevent)


def _word(cls: Any, convert: Convert) -> Convert:
    return lambda value: 0 if value is None else convert(int(value) if type(value) is cls else value)


def host_pointer(value: Any) -> int:
    """Return a host address as a number. ``value``: an int, None (for 0), an object with the buffer protocol, or an
    object with ``__int__``.

    Raises ``TypeError`` for a negative int and for any other object, as the bindings do.
    """
    if value is None:
        return 0
    if isinstance(value, int):
        if value >= 0:
            return int(value)
    else:
        try:
            return view_address(value)
        except TypeError:
            if hasattr(value, "__int__"):
                return int(value)
    raise TypeError(
        f"Provided argument is of type {type(value)} but expected Type None, int or object with Buffer Protocol"
    )


def _device(machine: Machine, ordinal: int) -> contexts.SimulatedDevice:
    check(0 <= ordinal < len(machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
    return machine.devices[ordinal]


def _context(machine: Machine, handle: int) -> contexts.Context:
    found = need(machine.contexts.get(handle), Result.CUDA_ERROR_INVALID_CONTEXT)
    check(found.alive, Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)
    return found


def _given_or_current(machine: Machine, handle: int) -> contexts.Context:
    return _context(machine, handle) if handle else machine.current()


def found_in(table: str, code: Any = Result.CUDA_ERROR_INVALID_VALUE, of_null: Any = None) -> Find:
    """Return a function that looks up a handle in a table of the machine. ``table``: path of the attribute. ``code``:
    result code for an unknown handle, or text for a :class:`NotModelled`. ``of_null``: the same for a null handle;
    None: ``code``.
    """
    get = operator.attrgetter(table)
    return lambda machine, handle: need(get(machine).get(handle), code if handle else of_null or code)


# Kinds of parameters that a method gets as numbers.
UnsignedChar = Annotated[int, _unsigned(8, "unsigned char", "value too large to convert to unsigned char")]
UnsignedShort = Annotated[int, _unsigned(16, "unsigned short", "value too large to convert to unsigned short")]
UnsignedInt = Annotated[int, _unsigned(32, "unsigned int", "value too large to convert to unsigned int")]
UnsignedLongLong = Annotated[int, _unsigned(64, "unsigned PY_LONG_LONG", _TOO_LARGE)]
Size = Annotated[int, size_t]
Int = Annotated[int, signed_int]
Word32 = Annotated[int, _word(cuda.cuuint32_t, _unsigned(32, "uint32_t", "value too large to convert to uint32_t"))]
Word64 = Annotated[int, _word(cuda.cuuint64_t, _unsigned(64, "uint64_t", _TOO_LARGE))]
HostPointer = Annotated[int, host_pointer]
DevicePointer = Annotated[int, device_pointer]
MemoryHandle = Annotated[int, Handle(cuda.CUmemGenericAllocationHandle)]
PoolHandle = Annotated[int, Handle(cuda.CUmemoryPool)]
StreamHandle = Annotated[int, stream]
ContextHandle = Annotated[int, context]
DeviceNumber = Annotated[int, Handle(cuda.CUdevice)]
HostFunctionHandle = Annotated[int, Handle(cuda.CUhostFn)]
StreamCallback = Annotated[int, Handle(cuda.CUstreamCallback)]

# Kinds of parameters that a method gets as objects: conversion of the handle, look-up of the object.
Device = Annotated[contexts.SimulatedDevice, Handle(cuda.CUdevice), _device]
Context = Annotated[contexts.Context, context, _context]
ContextOrCurrent = Annotated[contexts.Context, context, _given_or_current]
# ``hStream: Stream`` gives the stream object, ``hStream: StreamHandle`` the number of the handle.
Stream = Annotated[scheduler.Stream, stream, Machine.stream]
# This result code for a destroyed event was observed once on H200. There, such a handle can also kill the process.
Event = Annotated[contexts.Event, event, found_in("events", Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)]
NodeGraph = Annotated[graphs.NodeGraph, Handle(cuda.CUgraph), found_in("graphs.graphs")]
Node = Annotated[graphs.GraphNode, Handle(cuda.CUgraphNode), found_in("graphs.nodes")]
GraphExec = Annotated[graphs.GraphExec, Handle(cuda.CUgraphExec), found_in("graphs.executables")]
_gone = Result.CUDA_ERROR_INVALID_HANDLE
Module = Annotated[kernels.Module, Handle(cuda.CUmodule), found_in("modules", _gone)]
Library = Annotated[kernels.Module, Handle(cuda.CUlibrary), found_in("modules", _gone)]
Function = Annotated[kernels.Function, Handle(cuda.CUfunction), found_in("functions", _gone)]
Kernel = Annotated[kernels.Function, Handle(cuda.CUkernel), found_in("functions", _gone)]
# For calls that query the name, module or parameters of a function. In these calls a null handle has another result
# code (observed on H200: test_modules).
_named = found_in("functions", _gone, Result.CUDA_ERROR_INVALID_VALUE)
NamedFunction = Annotated[kernels.Function, Handle(cuda.CUfunction), _named]
NamedKernel = Annotated[kernels.Function, Handle(cuda.CUkernel), _named]
Link = Annotated[kernels.Linker, Handle(cuda.CUlinkState), found_in("links", _gone)]
_BY_TYPE = {
    **{"size_t": Size, "int": Int, "unsigned int": UnsignedInt, "unsigned long long": UnsignedLongLong},
    **{"unsigned char": UnsignedChar, "unsigned short": UnsignedShort},
}
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("dst", "src", "dstDevice", "srcDevice", "addr", "dptr", "memptr"), DevicePointer),
    **dict.fromkeys(("dstHost", "srcHost"), HostPointer),
    **{"hStream": StreamHandle, "stream": Stream, "hEvent": Event, "hGraphExec": GraphExec, "hNode": Node},
    **{"dev": Device, "device": Device, "dstContext": Context, "srcContext": Context, "memHandle": MemoryHandle},
    **dict.fromkeys(("f", "func", "function", "hfunc"), Function),
    **{"hmod": Module, "mod": Module, "library": Library, "lib": Library, "kernel": Kernel, "state": Link},
}
Steps = tuple[Convert | None, Find | None]
"""Two functions for one parameter; None for a step that the parameter does not need. The first converts the argument
before the call takes the lock. The second looks up or checks the object while the call holds the lock.
"""


def usual(parameter: Parameter, others: Mapping[str, Any]) -> Steps:
    """Return the two functions (:data:`Steps`) for a parameter of a function of the bindings.

    The kind of the parameter is the entry of ``others`` for its name, else the usual kind for its C type, else the
    usual kind for its name.
    """
    name, c_type = parameter.name, parameter.annotation
    cls = getattr(cuda, c_type, None)
    if isinstance(cls, type) and not issubclass(cls, int):
        return None, _checked(name, cls)
    return _steps(others.get(name) or _BY_TYPE.get(c_type) or _BY_NAME.get(name))


def steps(name: str, annotation: str, names: Mapping[str, Any]) -> Steps:
    """Return the two functions (:data:`Steps`) for a parameter with this name and annotation.

    ``names``: global names of the module in which the annotation is written.
    """
    if annotation.startswith("cuda."):
        return None, _checked(name, getattr(cuda, annotation.removeprefix("cuda."), None))
    # The annotation is looked up by its text, because typing.get_type_hints would take 0.1 s for all calls at each
    # import.
    return _steps(names.get(annotation, globals().get(annotation.removeprefix("arguments."))))


def _steps(kind: Any) -> Steps:
    found: tuple[Any, ...] = getattr(kind, "__metadata__", ())
    convert, find, *_ = (*found, None, None)
    return convert, find


def _checked(name: str, cls: Any) -> Find:
    check_argument = number if isinstance(cls, type) and issubclass(cls, int) else struct
    return lambda machine, value: check_argument(name, value, cls)


def member(name: str, value: Any, cls: Any) -> int:
    """Return the number of ``value``, a member of the enum ``cls``. ``name``: name of the argument, for errors.

    Raises the bindings' errors: ``TypeError`` for None and for another object with an attribute ``value``,
    ``AttributeError`` for an object without.
    """
    if value is None:
        raise TypeError(f"Argument '{name}' must not be None")
    if not isinstance(value, cls):
        if not hasattr(value, "value"):
            return int(value.value)  # Raises the AttributeError of the bindings.
        raise wrong_type(name, cls.__name__, value)
    return int(value)


def number(name: str, value: Any, cls: Any) -> int:
    """Return the number of ``value``, a member of the enum ``cls``, for calls that also accept plain numbers. ``name``:
    name of the argument, for errors.

    Bindings from CUDA 13 on accept numbers in these calls; older bindings raise the errors of :func:`member`.
    """
    # Bindings before CUDA 13 (without cuMemGetDefaultMemPool) refuse plain numbers, so the same errors are raised.
    if value is None or isinstance(value, cls) or not hasattr(cuda, "cuMemGetDefaultMemPool"):
        return member(name, value, cls)
    return int(value)


def number_in(struct: Any, name: str, otherwise: int | None = 0) -> int:
    """Return the number of an enum member in the field ``name`` of a struct. For a number that is not in the enum,
    return ``otherwise``; if ``otherwise`` is None, raise :class:`NotModelled`.
    """
    try:
        return int(getattr(struct, name))
    except ValueError:
        return need(otherwise, f"{type(struct).__name__}.{name} that is no member of its enum")


def place(location: Any) -> Place:
    """Convert a CUmemLocation to a :class:`Place`."""
    return Place(int(location.type), int(location.id))


def struct(name: str, value: Any, cls: Any, optional: bool = True) -> Any:
    """Return ``value`` if it is a struct ``cls`` of the bindings; otherwise raise the bindings' ``TypeError``.

    With ``optional``, None gives CUDA_ERROR_INVALID_VALUE: the bindings accept it, and the driver refuses it.
    """
    if optional and value is None:
        raise Fault(Result.CUDA_ERROR_INVALID_VALUE)
    if not isinstance(value, cls):
        raise wrong_type(name, f"cuda.bindings.driver.{cls.__name__}", value)
    return value


def numbers(values: Any, count: int) -> list[int]:
    """Return the first ``count`` values of a sequence as numbers of type ``size_t``. Raises ``RuntimeError`` if there
    are fewer, ``TypeError`` for a value that is no number, and ``OverflowError`` for a number outside of ``size_t``.
    """
    return [size_t(one) for one in _enough(list(values), count)[:count]]


def by_start(values: Iterable[T], begins: list[int], count: int) -> list[T]:
    """Return a list with the value of each of ``count`` entries of a batch. ``values[i]`` applies from entry
    ``begins[i]`` on.

    Gives CUDA_ERROR_INVALID_VALUE unless ``begins`` starts with 0, rises with each number, and ends below ``count``.
    """
    check(begins and begins[0] == 0 and begins[-1] < count and begins == sorted(set(begins)))
    given = list(values)
    return [given[bisect_right(begins, at) - 1] for at in range(count)]


def members(name: str, values: Any, cls: Any, count: int, comma: str = "") -> list[Any]:
    """Return ``values`` as a list, after a check that all are of the class ``cls`` of the bindings. None counts as an
    empty list.

    Raises ``TypeError`` for an object of another class, and ``RuntimeError`` if there are fewer than ``count``.
    ``comma``: text after the class in the bindings' ``TypeError``.
    """
    items = [] if values is None else list(values)
    if not all(isinstance(item, cls) for item in items):
        kind = f"cydriver.{cls.__name__}{comma}"
        raise TypeError(f"Argument '{name}' is not instance of type (expected tuple[{kind}] or list[{kind}]")
    return _enough(items, count)


def structs(name: str, values: Any, cls: Any, count: int) -> list[Any]:
    """Return the first ``count`` objects of ``values``, which must all be structs ``cls`` of the bindings. Raises the
    errors of :func:`members`.
    """
    return members(name, values, cls, count, ",")[:count]


def _enough(items: list[Any], count: int) -> list[Any]:
    if count > len(items):
        raise RuntimeError(f"List is too small: {len(items)} < {count}")
    return items
