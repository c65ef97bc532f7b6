"""Driver names for functions of the runtime and for fields of its structs."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda, runtime

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
