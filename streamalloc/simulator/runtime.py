"""Functions of ``cuda.bindings.runtime``, implemented with the calls of any driver.

A function with the same effect as one driver call is translated: a table names the call, and arguments and results are
converted by the types in the bindings' documentation. :class:`Functions` implements all other functions.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda, runtime, signature
from streamalloc.simulator.errors import NotModelled, wrong_type
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
"""Prefixes of driver calls by prefixes of runtime functions, for names that differ by more than ``cuda`` and ``cu``."""


def driver_call(name: str) -> str | None:
    """Return the name of the driver call with the same effect as a function of the runtime; None if there is none."""
    names = [_RENAMED.get(name, f"cu{name.removeprefix('cuda')}")]
    names += [ours + name.removeprefix(theirs) for theirs, ours in _PREFIXES.items() if name.startswith(theirs)]
    return next((one for one in names if hasattr(cuda, one)), None)


PURE = ("cudaCreateChannelDesc", "cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion")
"""Functions of ``cuda.bindings.runtime`` that are used unchanged, because they make no driver call."""

WITHOUT_CONTEXT = (
    *("cudaDeviceCanAccessPeer", "cudaDeviceGetAttribute", "cudaDeviceGetByPCIBusId", "cudaDeviceGetP2PAttribute"),
    *("cudaDeviceGetPCIBusId", "cudaDeviceReset", "cudaDriverGetVersion", "cudaGetDevice", "cudaGetDeviceCount"),
    *("cudaGetDeviceProperties", "cudaGetLastError", "cudaInitDevice", "cudaLibraryLoadData"),
    *("cudaLibraryLoadFromFile", "cudaLibraryUnload", "cudaPeekAtLastError", "cudaSetDevice"),
    "cudaThreadExchangeStreamCaptureMode",
)
"""Functions of the runtime that need no context. Before every other function, a primary context is made current if the
thread has none.
"""

OTHER_LAYOUT = ("cudaGraphNodeParams", "cudaMemcpy3DParms", "cudaMemcpy3DPeerParms")
"""Structs whose layout differs from that of the driver's struct, so each has its own conversion. Other structs are
copied as bytes.
"""

STRUCTS_IN_LISTS = {"cudaMemAllocNodeParams": ("accessDescs", "CUmemAccessDesc")}
"""Field of a runtime struct that has a list of structs, and the driver's class of these structs, by name of the runtime
struct. The bindings store the list outside of the struct, so a copy of the struct's bytes does not contain it.
"""


def _members(enum: Any, prefix: str) -> dict[str, Any]:
    """Return the members of an enum by their names in fields of the runtime: without prefix and underscores."""
    return {name.removeprefix(prefix).replace("_", ""): member for name, member in enum.__members__.items()}


_FUNCTION_ATTRIBUTES = _members(cuda.CUfunction_attribute, "CU_FUNC_ATTRIBUTE_")
_FUNCTION_ATTRIBUTES["PREFERREDSHMEMCARVEOUT"] = _FUNCTION_ATTRIBUTES["PREFERREDSHAREDMEMORYCARVEOUT"]
_ATTRIBUTES = _members(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_")
# Device attribute for each field of cudaDeviceProp whose name differs from that of its attribute.
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
    """Return the driver's function attribute for each field of cudaFuncAttributes. Attributes of clusters are
    left out.
    """
    found = {name: _FUNCTION_ATTRIBUTES.get(name.upper()) for name in dir(runtime().cudaFuncAttributes)}
    last = _FUNCTION_ATTRIBUTES["PREFERREDSHMEMCARVEOUT"]
    return {name: member for name, member in found.items() if member is not None and member <= last}


def properties() -> dict[str, list[Any]]:
    """Return, for each field of cudaDeviceProp, a list of device attributes: one for each number in the field."""
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
    """Return a struct of class ``cls`` with the bytes of ``value``.

    ``source`` and ``target``: the modules of the class of ``value`` and of ``cls``; their ``sizeof`` gives the sizes.
    """
    made = cls()
    ctypes.memmove(int(made.getPtr()), int(value.getPtr()), min(source.sizeof(type(value)), target.sizeof(cls)))
    return made


def _is_struct(cls: Any) -> bool:
    return isinstance(cls, type) and not issubclass(cls, int) and hasattr(cls, "getPtr") and not hasattr(cls, "__int__")


def address(value: Any) -> Any:
    """Return a pointer or a handle in the form that the driver's functions take: the address of a buffer object, 0 for
    None, and any other value as it is.
    """
    if value is None or isinstance(value, int) or hasattr(value, "getPtr"):
        return 0 if value is None else value
    try:
        return view_address(value)
    except TypeError:
        return value  # The driver's function converts or refuses it.


class Argument:
    """Conversion of one argument of the runtime to the driver's class.

    ``theirs`` and ``ours``: names of the argument's class in the runtime and in the driver. An empty ``theirs`` stands
    for a pointer. ``make``: conversion of a struct whose layouts differ. After the call, ``back`` copies the driver's
    changes into the caller's struct.
    """

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
            value.value  # noqa: B018  # The bindings read this attribute, and raise AttributeError for other objects.
            return cls(int(value))
        if not (_is_struct(cls) and _is_struct(self._from)):
            found = address(value) if self._is_pointer else value
            return cls(found) if self._list and self._is_pointer else found
        if value is None:
            return None
        if not isinstance(value, self._from):
            raise wrong_type(self._name, f"cuda.bindings.runtime.{self._from.__name__}", value)
        if self._make is not None:
            return self._make(value)
        made = copied(value, cls, runtime(), cuda)
        field, inner = STRUCTS_IN_LISTS.get(self._from.__name__, ("", ""))
        if field:
            setattr(made, field, [copied(one, getattr(cuda, inner), runtime(), cuda) for one in getattr(value, field)])
        return made

    def back(self, given: Any, converted: Any) -> None:
        if converted is given or not _is_struct(type(converted)):
            return
        # Only these bytes: the others point to the list of the converted struct, which the caller must not get.
        if self._from.__name__ in STRUCTS_IN_LISTS:
            given.dptr = int(converted.dptr)
        elif self._from.__name__ == "cudaGraphNodeParams":
            if given.type == runtime().cudaGraphNodeType.cudaGraphNodeTypeMemAlloc:
                given.alloc.dptr = int(converted.alloc.dptr)
        elif self._make is None:
            size = min(runtime().sizeof(type(given)), cuda.sizeof(type(converted)))
            ctypes.memmove(int(given.getPtr()), int(converted.getPtr()), size)


def result(kind: str) -> Convert:
    """Return a function that converts a result of a driver call to ``kind``, the type that the runtime documents."""
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
    """Return a handle or a struct of the driver as an object of the runtime's class ``cls``."""
    return cls(int(value)) if hasattr(value, "__int__") else copied(value, cls, cuda, runtime())


_NOT_READY = 600
"""cudaErrorNotReady: the code that a query returns. The runtime does not store this code as the last error."""
_HOST, _DEVICE, ARRAY, _UNIFIED = 1, 2, 3, 4  # CUmemorytype
ENDS = ((_HOST, _HOST), (_HOST, _DEVICE), (_DEVICE, _HOST), (_DEVICE, _DEVICE), (_UNIFIED, _UNIFIED))
"""Memory types of source and target, by cudaMemcpyKind as index."""
# Kind of channel (cudaChannelFormatKind) and number of bits, by CUarray_format.
BITS = {1: (1, 8), 2: (1, 16), 3: (1, 32), 8: (0, 8), 9: (0, 16), 10: (0, 32), 16: (2, 16), 32: (2, 32)}
_COPIES = ("cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpy")
"""Driver calls that copy bytes, by cudaMemcpyKind as index."""
_DEFAULT = 4  # cudaMemcpyDefault
_NO_DEVICE = -2  # cudaInvalidDeviceId
_PITCH_ELEMENT = 4


class Failed(Exception):
    """Exception that makes the function of the runtime return the error ``code``, in most cases the result of a driver
    call.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Forgotten(Failed):
    """Error that is not stored as the thread's last error: a query returned it, or the function has read the last error
    itself.
    """


def _copies(target: int, source: int, *, rows: bool = True) -> Callable[..., None]:
    """Return a function of the runtime that copies several rows or, without ``rows``, bytes of one row.

    ``target`` and ``source``: the number of arguments for each side. An array takes three arguments: its handle, an
    offset in bytes, and an offset in rows. A pointer takes one, and with ``rows`` a pitch as well. The driver refuses
    bytes that extend into the next row.
    """

    def copy_rows(functions: Functions, *args: Any) -> None:
        ends, (width, *more) = (args[target : target + source], args[:target]), args[target + source :]
        height, kind, *stream = more if rows else (1, *more)
        copy = cuda.CUDA_MEMCPY3D()
        for side, memory, (pointer, *place) in zip(("src", "dst"), ENDS[copy_kind(kind)], ends, strict=True):
            if len(place) == 2:
                set_end(copy, side, ARRAY, int(pointer), 0)
                setattr(copy, f"{side}XInBytes", place[0])
                setattr(copy, f"{side}Y", place[1])
            else:
                set_end(copy, side, memory, address(pointer), *(place or [width]))
        copy.WidthInBytes, copy.Height, copy.Depth = width, height, 1
        functions.call("cuMemcpy3DAsync" if stream else "cuMemcpy3D", copy, *stream)

    return copy_rows


class Functions:
    """Functions of the runtime, made of calls of a driver. Each ``cuda*`` function returns its values, and raises
    :class:`Failed` for an error.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._retained: dict[int, Any] = {}
        self.thread: threading.local = threading.local()
        """Attributes for each thread: ``device``, the ordinal that the thread chose, and ``last``, the code of its last
        error.
        """

    def call(self, name: str, *args: Any) -> Any:
        """Make a driver call. Returns its first value; None if it has none. Raises :class:`Failed` if the call
        fails.
        """
        values = self.values(name, *args)
        return values[0] if values else None

    def values(self, name: str, *args: Any) -> Any:
        """Make a driver call. Returns a list of its values, without the result code. Raises :class:`Failed` if the call
        fails; for CUDA_ERROR_NOT_READY its subclass :class:`Forgotten`.
        """
        code, *values = getattr(self._driver, name)(*args)
        if code:
            raise (Forgotten if int(code) == _NOT_READY else Failed)(int(code))
        return values

    def translated(self, name: str) -> Callable[..., Any]:
        """Return the function ``name`` of the runtime, made of one driver call.

        If the driver call takes flags or a context in addition, it gets 0 or the current context. For a function that
        cannot be translated, the returned function raises :class:`NotModelled`.
        """
        call, (taken, kinds) = driver_call(name), signature(runtime(), name)
        theirs = list(taken.parameters.values())
        ours = [] if call is None else list(signature(cuda, call)[0].parameters.values())
        more = "".join(one.name for one in ours[len(theirs) :])
        other_layout = {*OTHER_LAYOUT, *(f"[]{one}" for one in OTHER_LAYOUT)} & {*kinds}
        if call is None or len(ours) < len(theirs) or more not in ("", "Flags", "ctx") or other_layout:
            return functools.partial(_refuse, name)
        make = dict(zip(OTHER_LAYOUT, (self._node, self._box, self._peer_box), strict=True))
        pairs = zip(theirs, ours, strict=False)
        convert = [Argument(one.name, one.annotation, two.annotation, make.get(one.annotation)) for one, two in pairs]
        results = [result(kind) for kind in kinds]

        def body(*args: Any) -> Any:
            given = [one(value) for one, value in zip(convert, args, strict=True)]
            last = [] if not more else [0 if more == "Flags" else self.call("cuCtxGetCurrent")]
            values = self.values(call, *given, *last)
            for one, before, after in zip(convert, args, given, strict=True):
                one.back(before, after)
            return tuple(one(value) for one, value in zip(results, values, strict=True))

        return body

    # -- devices and contexts --------------------------------------------------------------------------------

    def make_current(self) -> None:
        """Make sure that the thread has a current context.

        If it has none, the primary context of the thread's device becomes current. If the driver is not initialised,
        ``cuInit`` is called first.
        """
        code, context = self._driver.cuCtxGetCurrent()
        if code:
            self.initialise()
            context = self.call("cuCtxGetCurrent")
        if not int(context):
            self.call("cuCtxSetCurrent", self._primary(getattr(self.thread, "device", 0)))

    def initialise(self) -> None:
        if self._driver.cuDeviceGetCount()[0]:
            self.call("cuInit", 0)

    def _primary(self, device: int) -> Any:
        """Return the primary context of a device. It is retained once and kept until cudaDeviceReset."""
        found = self._retained.get(device)
        if found is None:
            # Another thread, or a finaliser on this one, may do the same meanwhile. Finalisers cannot wait for a lock.
            made = self.call("cuDevicePrimaryCtxRetain", _number(device))
            found = self._retained.setdefault(device, made)
            if found is not made:
                self.call("cuDevicePrimaryCtxRelease", _number(device))
        return found

    def cudaGetDevice(self) -> int:
        code, context = self._driver.cuCtxGetCurrent()
        if not code and int(context):
            return int(self.call("cuCtxGetDevice"))
        return int(getattr(self.thread, "device", 0))

    def cudaSetDevice(self, device: int) -> None:
        self.call("cuCtxSetCurrent", self._primary(device))
        self.thread.device = device

    def cudaInitDevice(self, device: int, deviceFlags: int, flags: int) -> None:
        self._primary(device)

    def cudaDeviceReset(self) -> None:
        device = self.cudaGetDevice()
        self.call("cuDevicePrimaryCtxReset", _number(device))
        if self._retained.pop(device, None) is not None:
            self.call("cuDevicePrimaryCtxRelease", _number(device))
            self.call("cuCtxSetCurrent", 0)

    def cudaSetDeviceFlags(self, flags: int) -> None:
        self.call("cuDevicePrimaryCtxSetFlags", _number(self.cudaGetDevice()), flags)

    def cudaDeviceEnablePeerAccess(self, peerDevice: int, flags: int) -> None:
        self.call("cuCtxEnablePeerAccess", self._primary(peerDevice), flags)

    def cudaDeviceDisablePeerAccess(self, peerDevice: int) -> None:
        self.call("cuCtxDisablePeerAccess", self._primary(peerDevice))

    def _attribute(self, attribute: Any, device: int) -> int:
        """Return a device attribute as a number; 0 if the driver does not have it."""
        code, value = self._driver.cuDeviceGetAttribute(attribute, _number(device))
        return 0 if code else int(value)

    def cudaGetDeviceProperties(self, device: int) -> Any:
        made = runtime().cudaDeviceProp()
        made.name = self.call("cuDeviceGetName", 256, _number(device)).ljust(256, b"\0")[:256]
        made.totalGlobalMem = int(self.call("cuDeviceTotalMem", _number(device)))
        made.uuid = copied(self.call("cuDeviceGetUuid", _number(device)), runtime().cudaUUID_t, cuda, runtime())
        for field, attributes in properties().items():
            numbers = [self._attribute(one, device) for one in attributes]
            setattr(made, field, numbers if len(numbers) > 1 else numbers[0])
        return made

    # -- errors ----------------------------------------------------------------------------------------------

    def cudaPeekAtLastError(self) -> None:
        last = getattr(self.thread, "last", 0)
        if last:
            raise Failed(last)

    def cudaGetLastError(self) -> None:
        last = getattr(self.thread, "last", 0)
        self.thread.last = 0
        if last:
            # The last error is returned even if the context is lost (observed on H200: test_runtime).
            raise Forgotten(last)

    # -- streams, events, memory -----------------------------------------------------------------------------

    def cudaMalloc(self, size: int) -> int:
        return 0 if size == 0 else int(self.call("cuMemAlloc", size))

    def cudaMallocPitch(self, width: int, height: int) -> tuple[int, int]:
        memory, pitch = self.values("cuMemAllocPitch", width, height, _PITCH_ELEMENT)
        return int(memory), int(pitch)

    def cudaMalloc3D(self, extent: Any) -> Any:
        made = runtime().cudaPitchedPtr()
        made.ptr, made.pitch = self.cudaMallocPitch(int(extent.width), int(extent.height) * int(extent.depth))
        made.xsize, made.ysize = int(extent.width), int(extent.height)
        return made

    def cudaPointerGetAttributes(self, ptr: Any) -> Any:
        made, kinds = runtime().cudaPointerAttributes(), runtime().cudaMemoryType
        wanted = ("MEMORY_TYPE", "DEVICE_ORDINAL", "DEVICE_POINTER", "HOST_POINTER", "IS_MANAGED")
        names = [getattr(cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{one}") for one in wanted]
        values = self.call("cuPointerGetAttributes", len(names), names, address(ptr))
        kind, device, on_device, on_host, managed = (int(one) for one in values)
        if not kind:
            made.device, made.hostPointer = _NO_DEVICE, address(ptr)
            return made
        on = kinds.cudaMemoryTypeHost if kind == _HOST else kinds.cudaMemoryTypeDevice
        made.type = kinds.cudaMemoryTypeManaged if managed else on
        made.device, made.devicePointer, made.hostPointer = device, on_device, on_host
        return made

    # -- fills and copies ------------------------------------------------------------------------------------

    def cudaMemset(self, devPtr: Any, value: int, count: int, *stream: Any) -> None:
        self.call("cuMemsetD8Async" if stream else "cuMemsetD8", address(devPtr), value & 0xFF, count, *stream)

    def cudaMemset2D(self, devPtr: Any, pitch: int, value: int, width: int, height: int, *stream: Any) -> None:
        name = "cuMemsetD2D8Async" if stream else "cuMemsetD2D8"
        self.call(name, address(devPtr), pitch, value & 0xFF, width, height, *stream)

    def cudaMemset3D(self, pitchedDevPtr: Any, value: int, extent: Any, *stream: Any) -> None:
        start, pitch, rows = (int(getattr(pitchedDevPtr, one)) for one in ("ptr", "pitch", "ysize"))
        for plane in range(int(extent.depth)):
            at = start + plane * pitch * rows
            self.cudaMemset2D(at, pitch, value, int(extent.width), int(extent.height), *stream)

    def cudaMemcpy(self, dst: Any, src: Any, count: int, kind: Any, *stream: Any) -> None:
        self.call(_COPIES[copy_kind(kind)] + ("Async" if stream else ""), address(dst), address(src), count, *stream)

    def cudaMemcpyPeer(self, dst: Any, dstDevice: int, src: Any, srcDevice: int, count: int, *stream: Any) -> None:
        ends = address(dst), self._primary(dstDevice), address(src), self._primary(srcDevice)
        self.call("cuMemcpyPeerAsync" if stream else "cuMemcpyPeer", *ends, count, *stream)

    cudaMemcpy2D = _copies(2, 2)

    def _box(self, given: Any, peer: Any = None) -> Any:
        """Return a cudaMemcpy3DParms as a CUDA_MEMCPY3D. If one side is an array, x and width of the struct count
        elements.
        """
        copy, arrays = peer or cuda.CUDA_MEMCPY3D(), [int(given.srcArray), int(given.dstArray)]
        element = next((self.element(one) for one in arrays if one), 1)
        kinds = ENDS[_DEFAULT if peer else copy_kind(given.kind)]
        for side, kind, array in zip(("src", "dst"), kinds, arrays, strict=True):
            at, memory = getattr(given, f"{side}Pos"), getattr(given, f"{side}Ptr")
            set_end(copy, side, ARRAY if array else kind, array or int(memory.ptr), int(memory.pitch))
            setattr(copy, f"{side}Height", int(memory.ysize))
            setattr(copy, f"{side}XInBytes", int(at.x) * (element if array else 1))
            setattr(copy, f"{side}Y", int(at.y))
            setattr(copy, f"{side}Z", int(at.z))
        copy.WidthInBytes = int(given.extent.width) * element
        copy.Height, copy.Depth = int(given.extent.height), int(given.extent.depth)
        return copy

    def _peer_box(self, given: Any) -> Any:
        """Return a cudaMemcpy3DPeerParms as a CUDA_MEMCPY3D_PEER."""
        copy = self._box(given, cuda.CUDA_MEMCPY3D_PEER())
        for side in ("src", "dst"):
            setattr(copy, f"{side}Context", self._primary(int(getattr(given, f"{side}Device"))))
        return copy

    def _node(self, given: Any) -> Any:
        """Return a cudaGraphNodeParams as a CUgraphNodeParams. Copies get the current context, and so do fills without
        a context.
        """
        made, kinds = copied(given, cuda.CUgraphNodeParams, runtime(), cuda), runtime().cudaGraphNodeType
        if given.type == kinds.cudaGraphNodeTypeMemcpy:
            made.memcpy.copyParams = self._box(given.memcpy.copyParams)
            made.memcpy.copyCtx = self.call("cuCtxGetCurrent")
        elif given.type == kinds.cudaGraphNodeTypeMemset and not int(made.memset.ctx):
            made.memset.ctx = self.call("cuCtxGetCurrent")
        return made

    def element(self, array: int) -> int:
        """Return the size in bytes of an element of the array with this handle."""
        described = self.call("cuArray3DGetDescriptor", cuda.CUarray(array))
        return BITS[int(described.Format)][1] // 8 * int(described.NumChannels)

    # -- graphs and kernels ----------------------------------------------------------------------------------

    def cudaGraphAddMemcpyNode1D(self, graph: Any, dependencies: Any, count: int, *row: Any) -> Any:
        return self.translated("cudaGraphAddMemcpyNode")(graph, dependencies, count, _row(*row))

    def cudaGraphMemcpyNodeSetParams1D(self, node: Any, *row: Any) -> None:
        self.translated("cudaGraphMemcpyNodeSetParams")(node, _row(*row))

    def cudaGraphExecMemcpyNodeSetParams1D(self, instance: Any, node: Any, *row: Any) -> None:
        self.translated("cudaGraphExecMemcpyNodeSetParams")(instance, node, _row(*row))

    def cudaKernelSetAttributeForDevice(self, kernel: Any, attr: Any, value: int, device: int) -> None:
        attribute = cuda.CUfunction_attribute(int(attr))
        self.call("cuKernelSetAttribute", attribute, value, cuda.CUkernel(int(kernel)), _number(device))

    def cudaFuncGetAttributes(self, func: Any) -> Any:
        made, function = runtime().cudaFuncAttributes(), cuda.CUfunction(int(func))
        for field, attribute in function_attributes().items():
            setattr(made, field, self.call("cuFuncGetAttribute", attribute, function))
        return made

    # -- arrays ----------------------------------------------------------------------------------------------

    def cudaMallocArray(self, desc: Any, width: int, height: int, flags: int) -> Any:
        return self._array(_descriptor(desc, (width, height, 0), flags))

    def cudaMalloc3DArray(self, desc: Any, extent: Any, flags: int) -> Any:
        return self._array(_descriptor(desc, _extent(extent), flags))

    def _array(self, descriptor: Any) -> Any:
        return runtime().cudaArray_t(int(self.call("cuArray3DCreate", descriptor)))

    def cudaMallocMipmappedArray(self, desc: Any, extent: Any, numLevels: int, flags: int) -> Any:
        made = self.call("cuMipmappedArrayCreate", _descriptor(desc, _extent(extent), flags), numLevels)
        return runtime().cudaMipmappedArray_t(int(made))

    def cudaArrayGetInfo(self, array: Any) -> tuple[Any, Any, int]:
        described = self.call("cuArray3DGetDescriptor", cuda.CUarray(int(array)))
        extent = runtime().make_cudaExtent(int(described.Width), int(described.Height), int(described.Depth))
        kind, bits = BITS[int(described.Format)]
        channels = [bits if number < int(described.NumChannels) else 0 for number in range(4)]
        made = runtime().cudaChannelFormatDesc()
        made.x, made.y, made.z, made.w = channels
        made.f = runtime().cudaChannelFormatKind(kind)
        return made, extent, int(described.Flags)

    def cudaGetChannelDesc(self, array: Any) -> Any:
        return self.cudaArrayGetInfo(array)[0]

    cudaMemcpy2DToArray = _copies(3, 2)
    cudaMemcpy2DFromArray = _copies(2, 3)
    cudaMemcpy2DArrayToArray = _copies(3, 3)
    cudaMemcpyToArray = _copies(3, 1, rows=False)
    cudaMemcpyFromArray = _copies(1, 3, rows=False)
    cudaMemcpyArrayToArray = _copies(3, 3, rows=False)


def _refuse(name: str, *_args: Any) -> None:
    raise NotModelled(name)


def _number(device: Any) -> Any:
    if not -(1 << 31) <= int(device) < 1 << 31:
        raise OverflowError("value too large to convert to int")
    return cuda.CUdevice(int(device)) if int(device) >= 0 else cuda.CUdevice(-1)


def copy_kind(kind: Any) -> int:
    number = int(kind.value)
    if not 0 <= number < len(_COPIES):
        raise Failed(int(runtime().cudaError_t.cudaErrorInvalidMemcpyDirection))
    return number


def set_end(copy: Any, side: str, memory: int, pointer: int, pitch: int) -> None:
    """Set memory type, pointer and pitch of one side ("src" or "dst") in the struct of a row copy. An array has no
    pitch.
    """
    setattr(copy, f"{side}MemoryType", cuda.CUmemorytype(memory))
    setattr(copy, side + {_HOST: "Host", ARRAY: "Array"}.get(memory, "Device"), pointer)
    setattr(copy, f"{side}Pitch", pitch)


def _row(dst: Any, src: Any, size: int, kind: Any) -> Any:
    """Return a cudaMemcpy3DParms that copies ``size`` bytes as one row."""
    made = runtime().cudaMemcpy3DParms()
    for pointer, memory in ((made.dstPtr, dst), (made.srcPtr, src)):
        pointer.ptr, pointer.pitch, pointer.xsize, pointer.ysize = address(memory), size, size, 1
    made.extent.width, made.extent.height, made.extent.depth = size, 1, 1
    made.kind = kind
    return made


_FORMATS = {pair: number for number, pair in BITS.items()}


def _descriptor(desc: Any, extent: tuple[int, int, int], flags: int) -> Any:
    """Return the CUDA_ARRAY3D_DESCRIPTOR for a channel description, an extent and flags. Raises ``NotImplementedError``
    for a format that is not simulated.
    """
    made = cuda.CUDA_ARRAY3D_DESCRIPTOR()
    bits = [int(getattr(desc, one)) for one in "xyzw"]
    kind = int(desc.f), bits[0]
    if kind not in _FORMATS or any(one not in (0, bits[0]) for one in bits):
        raise NotImplementedError(f"not modelled: arrays of the format {kind}")
    made.Format = cuda.CUarray_format(_FORMATS[kind])
    made.NumChannels, made.Flags = sum(one > 0 for one in bits), flags
    made.Width, made.Height, made.Depth = extent
    return made


def _extent(extent: Any) -> tuple[int, int, int]:
    return int(extent.width), int(extent.height), int(extent.depth)


_UNKNOWN_ERROR = 999

OWN: dict[str, Callable[..., Any]] = {name: body for name, body in vars(Functions).items() if name.startswith("cuda")}
"""Functions of the runtime that :class:`Functions` implements, by name. Copies and fills also exist with the suffix
Async and a stream as the last argument.
"""


class Runtime:
    """Functions of ``cuda.bindings.runtime`` over a driver, with the bindings' own classes.

    Like the runtime, it uses the thread's current context. If there is none, it makes the primary context of the
    thread's device current.
    """

    def __init__(self, driver: Any) -> None:
        self._functions = Functions(driver)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(runtime(), name)
        if name in PURE or not name.startswith("cuda") or isinstance(found, type) or not callable(found):
            return found
        own = OWN.get(name.removesuffix("Async") if name.startswith(("cudaMemcpy", "cudaMemset")) else name)
        body = self._functions.translated(name) if own is None else functools.partial(own, self._functions)
        function = _function(self._functions, name, body)
        setattr(self, name, function)
        return function


def _function(functions: Functions, name: str, body: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Return the function ``name`` of the runtime. ``body`` does its work, and raises :class:`Failed`.

    The function returns a tuple of the result code and the values. It stores the code of an error as the thread's last
    error.
    """
    taken, results = signature(runtime(), name)
    count, success = len(results), runtime().cudaError_t.cudaSuccess
    prepare = functions.initialise if name in WITHOUT_CONTEXT else functions.make_current

    def function(*args: Any, **named: Any) -> tuple[Any, ...]:
        if named or len(args) != len(taken.parameters):
            bound = taken.bind(*args, **named)
            bound.apply_defaults()
            args = bound.args
        try:
            prepare()
            values = body(*args)
        except Failed as failed:
            if not isinstance(failed, Forgotten):
                functions.thread.last = failed.code
            return (_error(failed.code), *[None] * count)
        return (success, *(values if isinstance(values, tuple) else (values,))[:count])

    function.__name__ = name
    return function


def _error(code: int) -> Any:
    try:
        return runtime().cudaError_t(code)
    except ValueError:
        return runtime().cudaError_t(_UNKNOWN_ERROR)
