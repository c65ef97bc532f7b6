"""From the runtime to the driver: the driver's call behind each function, by tables; parameters and results, read from
the bindings' documentation; conversions between runtime and driver types.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from streamalloc.driver.bindings import cuda, runtime
from streamalloc.simulator.memory import view_address

_RENAMED = {
    "cudaDeviceFlushGPUDirectRDMAWrites": "cuFlushGPUDirectRDMAWrites",
    "cudaEventCreateWithFlags": "cuEventCreate",
    "cudaFreeArray": "cuArrayDestroy",
    "cudaFreeMipmappedArray": "cuMipmappedArrayDestroy",
    "cudaGetDeviceCount": "cuDeviceGetCount",
    "cudaGetDeviceFlags": "cuCtxGetFlags",
    "cudaGetMipmappedArrayLevel": "cuMipmappedArrayGetLevel",
    "cudaGraphInstantiateWithFlags": "cuGraphInstantiate",
    "cudaStreamCreateWithFlags": "cuStreamCreate",
}
_PREFIXES = {"cudaDevice": "cuCtx", "cudaFree": "cuMemFree", "cudaHost": "cuMemHost", "cudaMalloc": "cuMemAlloc"}
"""Driver prefixes by runtime prefix, for names with other differences than ``cuda``/``cu``."""


def driver_call(name: str) -> str | None:
    """The driver call behind a function of the runtime; None if there is none."""
    names = [_RENAMED.get(name, f"cu{name.removeprefix('cuda')}")]
    names += [ours + name.removeprefix(theirs) for theirs, ours in _PREFIXES.items() if name.startswith(theirs)]
    return next((one for one in names if hasattr(cuda, one)), None)


PURE = ("cudaCreateChannelDesc", "cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion")
"""Functions of ``cuda.bindings.runtime`` used unchanged, because they call no driver."""

WITHOUT_CONTEXT = (
    *("cudaDeviceCanAccessPeer", "cudaDeviceGetAttribute", "cudaDeviceGetByPCIBusId", "cudaDeviceGetP2PAttribute"),
    *("cudaDeviceGetPCIBusId", "cudaDeviceReset", "cudaDriverGetVersion", "cudaGetDevice", "cudaGetDeviceCount"),
    *("cudaGetDeviceProperties", "cudaGetLastError", "cudaInitDevice", "cudaLibraryLoadData"),
    *("cudaLibraryLoadFromFile", "cudaLibraryUnload", "cudaPeekAtLastError", "cudaSetDevice"),
    "cudaThreadExchangeStreamCaptureMode",
)
"""Functions that make no primary context."""

OTHER_LAYOUT = ("cudaGraphNodeParams", "cudaMemcpy3DParms", "cudaMemcpy3DPeerParms")
"""Structs with another layout than the driver's struct."""

STRUCTS_IN_LISTS = {"cudaMemAllocNodeParams": ("accessDescs", "CUmemAccessDesc")}
"""Struct fields with lists of structs, which the bindings store separately."""


def _members(enum: Any, prefix: str) -> dict[str, Any]:
    """The members of an enum by name without prefix and underscores, as in fields of the runtime."""
    return {name.removeprefix(prefix).replace("_", ""): member for name, member in enum.__members__.items()}


_FUNCTION_ATTRIBUTES = _members(cuda.CUfunction_attribute, "CU_FUNC_ATTRIBUTE_")
_FUNCTION_ATTRIBUTES["PREFERREDSHMEMCARVEOUT"] = _FUNCTION_ATTRIBUTES["PREFERREDSHAREDMEMORYCARVEOUT"]
_ATTRIBUTES = _members(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_")
# Fields of cudaDeviceProp whose attribute has a different name.
_PROPERTIES = {
    "accessPolicyMaxWindowSize": "MAX_ACCESS_POLICY_WINDOW_SIZE",
    "deviceNumaConfig": "NUMA_CONFIG",
    "deviceNumaId": "NUMA_ID",
    "deviceOverlap": "GPU_OVERLAP",
    "hostRegisterReadOnlySupported": "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "isMultiGpuBoard": "MULTI_GPU_BOARD",
    "kernelExecTimeoutEnabled": "KERNEL_EXEC_TIMEOUT",
    "major": "COMPUTE_CAPABILITY_MAJOR",
    "maxGridSize": "MAX_GRID_DIM",
    "maxThreadsDim": "MAX_BLOCK_DIM",
    "memPitch": "MAX_PITCH",
    "memoryBusWidth": "GLOBAL_MEMORY_BUS_WIDTH",
    "memoryPoolSupportedHandleTypes": "MEMPOOL_SUPPORTED_HANDLE_TYPES",
    "minor": "COMPUTE_CAPABILITY_MINOR",
    "persistingL2CacheMaxSize": "MAX_PERSISTING_L2_CACHE_SIZE",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "regsPerMultiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "reservedSharedMemPerBlock": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "sharedMemPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "sharedMemPerBlockOptin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "sharedMemPerMultiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "totalConstMem": "TOTAL_CONSTANT_MEMORY",
}
_EXTENTS = ("WIDTH", "HEIGHT", "DEPTH", "LAYERS", "PITCH")


def function_attributes() -> dict[str, Any]:
    """Fields of cudaFuncAttributes with their function attributes, without those of clusters."""
    found = {name: _FUNCTION_ATTRIBUTES.get(name.upper()) for name in dir(runtime().cudaFuncAttributes)}
    last = _FUNCTION_ATTRIBUTES["PREFERREDSHMEMCARVEOUT"]
    return {name: member for name, member in found.items() if member is not None and member <= last}


def properties() -> dict[str, list[Any]]:
    """Fields of cudaDeviceProp with their device attributes, one for each number in a field."""
    found = {name: _attributes(name) for name in dir(runtime().cudaDeviceProp)}
    return {name: members for name, members in found.items() if members}


def _attributes(field: str) -> list[Any]:
    name = _PROPERTIES.get(field, field).replace("_", "").upper()
    if name.startswith(("MAXTEXTURE", "MAXSURFACE")):
        whole = f"MAXIMUM{name.removeprefix('MAX')}".replace("MIPMAP", "MIPMAPPED").removesuffix("ALT")
        names = [whole + part + ("ALTERNATE" if name.endswith("ALT") else "") for part in _EXTENTS]
    else:
        names = [name, *(name + axis for axis in "XYZ")]
    return [_ATTRIBUTES[one] for one in names if one in _ATTRIBUTES]


# -- conversions ---------------------------------------------------------------------------------------------------

Convert = Callable[[Any], Any]


def copied(value: Any, cls: Any, source: Any, target: Any) -> Any:
    """Copy a struct's bytes into another class. ``source`` and ``target``: the modules of the two classes."""
    made = cls()
    ctypes.memmove(int(made.getPtr()), int(value.getPtr()), min(source.sizeof(type(value)), target.sizeof(cls)))
    return made


def _is_struct(cls: Any) -> bool:
    return isinstance(cls, type) and not issubclass(cls, int) and hasattr(cls, "getPtr") and not hasattr(cls, "__int__")


def address(value: Any) -> Any:
    """A pointer or handle in the driver's form. Buffer objects give their address."""
    if value is None or isinstance(value, int) or hasattr(value, "getPtr"):
        return 0 if value is None else value
    try:
        return view_address(value)
    except TypeError:
        return value  # the driver's call takes it, or refuses it


class Argument:
    """Converts one argument. ``back`` copies the driver's changes back into a struct."""

    def __init__(self, name: str, theirs: str, ours: str, make: Convert | None = None) -> None:
        self._name, self._is_pointer, self._make = name, not theirs, make
        self._list = ours.startswith("[]")
        self._from: Any = getattr(runtime(), theirs.removeprefix("[]"), None)
        self._to: Any = getattr(cuda, ours.removeprefix("[]"), None)

    def __call__(self, value: Any) -> Any:
        if self._list:
            return value if value is None else [self._one(item) for item in value]
        return self._one(value)

    def _one(self, value: Any) -> Any:
        cls = self._to
        if isinstance(cls, type) and issubclass(cls, int):  # an enumeration
            value.value  # noqa: B018  # the bindings read it, and raise AttributeError for others
            return cls(int(value))
        if not (_is_struct(cls) and _is_struct(self._from)):
            found = address(value) if self._is_pointer else value
            return cls(found) if self._list and self._is_pointer else found
        if value is None:
            return None
        if not isinstance(value, self._from):
            raise TypeError(
                f"Argument '{self._name}' has incorrect type (expected cuda.bindings.runtime.{self._from.__name__}, "
                f"got {type(value).__name__})"
            )
        if self._make is not None:
            return self._make(value)
        made = copied(value, cls, runtime(), cuda)
        field, inner = STRUCTS_IN_LISTS.get(self._from.__name__, ("", ""))
        if field:
            items = [copied(one, getattr(cuda, inner), runtime(), cuda) for one in getattr(value, field)]
            setattr(made, field, items)
        return made

    def back(self, given: Any, converted: Any) -> None:
        if converted is given or not _is_struct(type(converted)):
            return
        if self._from.__name__ in STRUCTS_IN_LISTS:  # it has pointers of its own
            given.dptr = int(converted.dptr)
        elif self._from.__name__ == "cudaGraphNodeParams":
            if given.type == runtime().cudaGraphNodeType.cudaGraphNodeTypeMemAlloc:
                given.alloc.dptr = int(converted.alloc.dptr)
        elif self._make is None:
            size = min(runtime().sizeof(type(given)), cuda.sizeof(type(converted)))
            ctypes.memmove(int(given.getPtr()), int(converted.getPtr()), size)


def result(kind: str) -> Convert:
    """The conversion of a result that the runtime documents as ``kind``."""
    if kind.startswith("[]"):
        convert = result(kind[2:])
        return lambda values: [convert(one) for one in values]
    cls = getattr(runtime(), kind, None) if kind.lower().startswith("cu") else None
    if isinstance(cls, type) and issubclass(cls, int):
        return lambda value: cls(int(value))
    if isinstance(cls, type):
        return lambda value: _made(cls, value)
    is_number = kind == "int" or kind.startswith("unsigned")
    return lambda value: int(value) if is_number or isinstance(value, cuda.CUdeviceptr) else value


def _made(cls: Any, value: Any) -> Any:
    """A handle or a struct of the runtime."""
    return cls(int(value)) if hasattr(value, "__int__") else copied(value, cls, cuda, runtime())


_HEADING = re.compile(r"\n\n[A-Z][\w ]*\n-{3,}\n")
_LINK = re.compile(r":py:obj:`~?\.?([^`]*)`")


class Parameter(NamedTuple):
    name: str
    type: str
    """Class of the bindings, or C type; empty for others."""
    default: int | None


class Signature(NamedTuple):
    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]
    """Types of the values after the result code; ``"[]"`` marks lists."""

    def bind(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The values of the parameters in order."""
        values = list(args)
        for parameter in self.parameters[len(args) :]:
            if parameter.name in named:
                values.append(named.pop(parameter.name))
            elif parameter.default is not None:
                values.append(parameter.default)
            else:
                raise TypeError(f"missing the argument {parameter.name!r}")
        if named or len(values) > len(self.parameters):
            raise TypeError(f"takes {len(self.parameters)} arguments: {', '.join(one.name for one in self.parameters)}")
        return values


@functools.cache
def signature(module: Any, name: str) -> Signature:
    """The signature of a function of ``cuda.bindings.driver`` or ``cuda.bindings.runtime``."""
    documentation: str = getattr(module, name).__doc__
    head = documentation.split("\n")[0]
    inside = re.sub(r"\[([^][]*)\]", lambda found: "[" + found[1].replace(",", ";") + "]", head)
    inside = inside.partition("(")[2].rpartition(")")[0]
    listed = _HEADING.split(documentation.partition("\nReturns\n-------\n")[2])[0]
    lines = [line for line in listed.split("\n") if line[:1].strip()][1:]
    return Signature(
        tuple(_parameter(one.strip()) for one in inside.split(",") if one.strip()), tuple(map(_result, lines))
    )


def _parameter(text: str) -> Parameter:
    """Parse a parameter: ``size_t size``, ``attr: cudaDeviceAttr``, ``stream``, ``size_t numNodes=0``."""
    head, _, annotation = text.partition(":")
    head, _, default = head.partition("=")
    *kind, name = head.split()
    found = next((one for one in re.findall(r"\w+", annotation) if one.lower().startswith("cu")), "")
    in_list = "[]" if "list[" in annotation and found else ""
    return Parameter(name.lstrip("*"), in_list + (found or " ".join(kind)), int(default) if default else None)


def _result(line: str) -> str:
    kind = _LINK.sub(r"\1", line.partition(" : ")[2]).strip()
    return f"[]{kind.removeprefix('list[').rstrip(']')}" if kind.startswith("list[") else kind
