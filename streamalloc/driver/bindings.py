"""NVIDIA's bindings and the differences between their versions.

Only this module imports ``cuda.bindings``. The enum and struct classes of the bindings work on machines without a GPU,
so the real and the simulated driver share them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from cuda.bindings import __version__ as _version
from cuda.bindings import driver as cuda

from streamalloc.formats.lazy_numpy import np

BINDINGS_VERSION: str = _version

_ADDED = {
    "13.0": """
        cuMemGetDefaultMemPool cuMemGetMemPool cuMemSetMemPool cuMemDiscardBatchAsync cuMemDiscardAndPrefetchBatchAsync
        cuMemPrefetchBatchAsync
        cuMemcpyBatchAsync CU_MEM_ALLOCATION_TYPE_MANAGED CU_MEM_LOCATION_TYPE_NONE
        CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        """,
    "13.1": """
        CU_MEM_LOCATION_TYPE_INVISIBLE cuMulticastBindMem_v2 cuMulticastBindAddr_v2
        """,
    "13.4": "CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_COUNT CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN",
    "13.4.3": """
        CU_MEMPOOL_ATTR_ALLOCATION_TYPE CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES CU_MEMPOOL_ATTR_LOCATION_ID
        CU_MEMPOOL_ATTR_LOCATION_TYPE CU_MEMPOOL_ATTR_MAX_POOL_SIZE CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED
        CU_MEMPOOL_ATTR_LOCALITY_DOMAIN_ID
        """,
}
# By name, the first version of the bindings that this package can use it of: older versions lack the name, return
# another result (cuMemcpyBatchAsync), or cannot read the attribute (CU_MEMPOOL_ATTR_*, there since 13.1). Only error
# messages use it, as the remedy.
_ADDED_IN = {name: version for version, names in _ADDED.items() for name in names.split()}

# CUmemPoolProps and CUmemAllocationProp both begin with the allocation type and the handle types, which are C ints.
_HANDLE_TYPES_OFFSET = 4


@functools.cache
def runtime() -> Any:
    """Return the module ``cuda.bindings.runtime``, imported at the first call."""
    return importlib.import_module("cuda.bindings.runtime")


def version_that_added(name: str) -> str:
    """Return the first version of cuda-bindings in which ``name`` can be used, as text such as "13.0", or "a newer
    version". For error messages.
    """
    return _ADDED_IN.get(name, "a newer version")


def check_name(enum_name: str, prefix: str, name: str) -> None:
    """Raise ``ValueError``, which suggests similar names, unless newer bindings have the member ``prefix + name``. Call
    this only if the installed bindings lack the member.
    """
    if prefix + name in _ADDED_IN:
        return
    import difflib  # Imported here, because it is slow to import and only the error message needs it.

    known = [*getattr(cuda, enum_name).__members__, *_ADDED_IN]
    near = difflib.get_close_matches(name, [one.removeprefix(prefix) for one in known if one.startswith(prefix)])
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"no {enum_name} of cuda-bindings {BINDINGS_VERSION} has the name {prefix}{name}{meant}")


def enum_member(enum_name: str, member: str) -> Any | None:
    """Return a member of an enum of the bindings; None if the installed bindings lack it."""
    return getattr(getattr(cuda, enum_name, None), member, None)


def check_readable(enum_name: str, member: Any) -> None:
    """Raise the ``TypeError`` of the installed bindings if they define the attribute ``member`` but cannot read its
    value.
    """
    getattr(cuda, f"_Helper{enum_name}")(member, 0, is_getter=True)


WAIT_COMPARISONS: dict[int, Callable[[int, int, int], bool]] = {
    0: lambda there, value, bits: (there - value) % (1 << bits) < 1 << (bits - 1),  # GEQ, cyclic
    1: lambda there, value, bits: there == value,
    2: lambda there, value, bits: there & value != 0,
    3: lambda there, value, bits: ~(there | value) % (1 << bits) != 0,
}
"""Comparisons of ``cuStreamWaitValue32`` and ``cuStreamWaitValue64``, by ``CUstreamWaitValue_flags``. Each function
takes the value in memory, the value to wait for, and their number of bits.
"""


_HEADING = re.compile(r"\n\n[A-Z][\w ]*\n-{3,}\n")


def takes(name: str, module: Any = cuda) -> list[str]:
    """Return a list of the parameters of a function, in the form of its docstring, such as ``attr: cudaDeviceAttr``;
    an empty list for an unknown function. ``module``: the module of the bindings that has the function.

    A C type is written before the name, and a default after it: ``size_t numNodes=0``.
    """
    head = (getattr(getattr(module, name, None), "__doc__", None) or "").split("\n")[0]
    inside = re.sub(r"\[[^][]*\]", lambda found: found[0].replace(",", ";"), head).partition("(")[2].rpartition(")")[0]
    return [one.strip() for one in inside.split(",") if one.strip()]


def returns(name: str, module: Any = cuda) -> list[str]:
    """Return a list of the values that a function returns after the result code, in the form of its docstring, such as
    ``pool : CUmemoryPool``; an empty list for an unknown function.
    """
    documentation = getattr(getattr(module, name, None), "__doc__", None) or ""
    listed = _HEADING.split(documentation.partition("\nReturns\n-------\n")[2])[0]
    return [line for line in listed.split("\n") if line[:1].strip()][1:]


_LINK = re.compile(r":py:obj:`~?\.?([^`]*)`")


@functools.cache
def signature(module: Any, name: str) -> tuple[inspect.Signature, list[str]]:
    """Return the signature of a function of the driver or the runtime, and the types of the values that it returns
    after the result code.

    ``module`` is ``cuda.bindings.driver`` or ``cuda.bindings.runtime``. An annotation is the name of a class of the
    bindings or of a C type; it is empty for other types. ``"[]"`` before the name marks a list.
    """
    return inspect.Signature([*map(_parameter, takes(name, module))]), [*map(_result, returns(name, module))]


def _parameter(text: str) -> inspect.Parameter:
    """Parse a parameter in one of these forms: ``size_t size``, ``attr: cudaDeviceAttr``, ``stream``, ``size_t
    numNodes=0``.
    """
    head, _, annotation = text.partition(":")
    head, _, default = head.partition("=")
    *kind, name = head.split()
    found = next((one for one in re.findall(r"\w+", annotation) if one.lower().startswith("cu")), "")
    in_list = "[]" if "list[" in annotation and found else ""
    kept, annotation = int(default) if default else inspect.Parameter.empty, in_list + (found or " ".join(kind))
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name.lstrip("*"), plain, default=kept, annotation=annotation)


def _result(line: str) -> str:
    kind = _LINK.sub(r"\1", line.partition(" : ")[2]).strip()
    return f"[]{kind.removeprefix('list[').rstrip(']')}" if kind.startswith("list[") else kind


def by_position(name: str, /, *given: Any, **named: Any) -> tuple[Any, ...]:
    """Return all arguments of driver function ``name`` by position, defaults included. Raise ``TypeError`` if the
    arguments do not fit the function.
    """
    bound = signature(cuda, name)[0].bind(*given, **named)
    bound.apply_defaults()
    return bound.args


@functools.cache
def parameters(name: str) -> tuple[str, ...]:
    """Return the parameter names of a driver function in order; empty if the function has no docstring."""
    return tuple(re.split("[:=]", one)[0].split()[-1].lstrip("*") for one in takes(name))


@functools.cache
def c_signature(name: str) -> tuple[str, ...]:
    """Return the C types of a driver function's arguments in order; empty for an unknown function."""
    capsule = importlib.import_module("cuda.bindings.cydriver").__pyx_capi__.get(name)
    inside = re.search(r"\((.*)\)", str(capsule))  # The capsule's name is the C signature.
    return tuple(inside[1].split(", ")) if inside and inside[1] != "void" else ()


@functools.cache
def value_count(name: str) -> int:
    """Return the number of values that a driver function returns after the result code; 0 for an unknown function."""
    return len(returns(name))


def number_of(value: Any) -> int:
    """Return a handle or an address as an int; 0 for None. For bytes or an array in host memory, return the address of
    the data.
    """
    if value is None:
        return 0
    if hasattr(value, "__array_interface__"):
        return int(value.__array_interface__["data"][0])
    if isinstance(value, (bytes, bytearray, memoryview)):
        return int(np.frombuffer(value, np.uint8).ctypes.data) if len(value) else 0
    return int(value)


def handle_types_member(value: int) -> Any:
    """Return a ``CUmemAllocationHandleType`` for any combination of flags.

    The driver accepts combined handle types (``POSIX_FILE_DESCRIPTOR | FABRIC``), but the bindings' enum has no member
    for them. The bindings' setter accepts an instance of the enum that is made without a look-up of a member.
    """
    try:
        return cuda.CUmemAllocationHandleType(value)
    except ValueError:
        made: Any = int.__new__(cuda.CUmemAllocationHandleType, value)
        made._value_ = value  # The setter of cuda-bindings 12.9 reads this attribute.
        return made


def read_handle_types(props: Any) -> int:
    """Return the handle-type flags of a ``CUmemPoolProps`` or ``CUmemAllocationProp`` as an int, even if flags are
    combined.

    The bindings' getter raises for combined flags, so the field is read from the struct's memory.
    """
    return ctypes.c_uint32.from_address(int(props.getPtr()) + _HANDLE_TYPES_OFFSET).value


_PROP_BYTES = int(cuda.sizeof(cuda.CUmemAllocationProp))


def prop_bytes(prop: Any) -> bytes:
    """Return the bytes of a ``CUmemAllocationProp``."""
    return ctypes.string_at(prop.getPtr(), _PROP_BYTES)


# Opaque structs for sharing, and values of launch attributes, have 64 bytes. Some versions of the bindings have no
# attribute for these bytes, so the bytes are read and written at the struct's address.
_OPAQUE_BYTES = 64


def opaque_bytes(struct: Any) -> bytes:
    """Return the bytes of a 64-byte struct: a shareable handle, a pointer's export data, an attribute's value."""
    return ctypes.string_at(struct.getPtr(), _OPAQUE_BYTES)


def opaque_struct(name: str, data: bytes) -> Any:
    """Return an opaque struct of the bindings' class ``name`` with the bytes ``data``.

    Raises ``ValueError`` if ``data`` does not have 64 bytes.
    """
    if len(data) != _OPAQUE_BYTES:
        raise ValueError(f"a {name} has {_OPAQUE_BYTES} bytes, not {len(data)}")
    struct = getattr(cuda, name)()
    ctypes.memmove(struct.getPtr(), data, _OPAQUE_BYTES)
    return struct
