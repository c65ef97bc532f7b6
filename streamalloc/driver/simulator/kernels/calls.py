"""Modules, libraries and functions, their launches and their occupancy.

Limits of launches and the occupancy are those of NVIDIA's documentation (CUDA C++ Programming Guide, "Compute
Capabilities", and the occupancy calculator). Those of a kernel that needs nothing were read from an H200: test_modules.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import Device, Int, Size, UnsignedInt
from ..calls.base import Calls, call
from ..contexts import Context
from ..errors import Fault, Result, check, need, not_modelled
from ..graphs import Values
from ..memory import Intervals
from ..timeline import Operation, Stream
from .launches import Launch, Shape
from .modules import BINARIES, Function, Image, Module
from .packing import CELLS, Cells, offsets, packed, plain, unpack

_ATTRIBUTE = cuda.CUfunction_attribute
_PREFIX = "CU_FUNC_ATTRIBUTE_"
_DYNAMIC = int(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
_SETTABLE = {
    name: int(getattr(_ATTRIBUTE, _PREFIX + name))
    for name in (
        "MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "PREFERRED_SHARED_MEMORY_CARVEOUT",
        "REQUIRED_CLUSTER_WIDTH",
        "REQUIRED_CLUSTER_HEIGHT",
        "REQUIRED_CLUSTER_DEPTH",
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    )
}
_LAST = _SETTABLE["CLUSTER_SCHEDULING_POLICY_PREFERENCE"]
"""The last attribute that the driver of the readings has; newer bindings name more."""
_COOPERATIVE = "CU_LAUNCH_ATTRIBUTE_COOPERATIVE"
_CLUSTER = "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
_REGISTERS_PER_WARP = 256
"""Registers are given to warps in multiples of this."""


def _text(name: Any) -> str:
    if not isinstance(name, (bytes, bytearray)):
        raise TypeError(f"expected bytes, {type(name).__name__} found")
    return bytes(name).decode(errors="replace")


def _path(name: Any) -> bytes:
    try:
        data = Path(_text(name)).read_bytes()
    except FileNotFoundError:
        raise Fault(Result.CUDA_ERROR_FILE_NOT_FOUND) from None
    except OSError:
        raise Fault(Result.CUDA_ERROR_OPERATING_SYSTEM) from None
    check(data, Result.CUDA_ERROR_INVALID_IMAGE)
    return data


class KernelCalls(Calls):
    """cuModule*, cuLibrary*, cuKernel*, cuFunc*, cuLaunchKernel*, cuOccupancy*, cuLink*."""

    # -- modules ---------------------------------------------------------------------------------------------

    def _load(self, image: Any, *options: Any) -> Any:
        context = self._machine.current()
        self._unsafe_during_capture()
        return cuda.CUmodule(self._machine.modules.add(Module(Image.load(image), context)).handle)

    def _load_file(self, name: Any) -> Any:
        self._machine.current()
        return self._load(_path(name))

    cuModuleLoad: Any = call("fname", _load_file)
    cuModuleLoadData: Any = call("image", _load)
    cuModuleLoadDataEx: Any = call("image numOptions options optionValues", _load)
    cuModuleLoadFatBinary: Any = call("fatCubin", _load)

    def _module(self, handle: Any, cls: Any) -> Module:
        found = self._machine.modules.modules.get(0 if handle is None else int(cls(handle)))
        return need(found, Result.CUDA_ERROR_INVALID_HANDLE)

    def cuModuleUnload(self, hmod: Any) -> None:
        self._unload(self._module(hmod, cuda.CUmodule))

    def _unload(self, module: Module) -> None:
        self._unsafe_during_capture()
        self._machine.drain()
        self._machine.modules.unload(module, self._machine.allocations)

    def cuModuleGetFunction(self, hmod: Any, name: Any) -> Any:
        module, name = self._module(hmod, cuda.CUmodule), _text(name)
        return cuda.CUfunction(self._machine.modules.find(module, name).handle)

    def _variable(self, module: Module, name: Any) -> tuple[Any, int]:
        """A variable of a module, or of a library in the current context."""
        name = _text(name)
        context = module.context or self._machine.current()
        found = self._machine.modules.variable(module, name, context, self._machine.allocations)
        return cuda.CUdeviceptr(found.base), found.size

    def cuModuleGetGlobal(self, hmod: Any, name: Any) -> tuple[Any, int]:
        module = self._module(hmod, cuda.CUmodule)
        return self._variable(module.library or module, name)

    def cuModuleGetFunctionCount(self, mod: Any) -> int:
        return len(self._names(self._module(mod, cuda.CUmodule)))

    def cuModuleEnumerateFunctions(self, numFunctions: UnsignedInt, mod: Any) -> list[Any]:
        module = self._module(mod, cuda.CUmodule)
        find = self._machine.modules.find
        return [cuda.CUfunction(find(module, name).handle) for name in self._names(module)[:numFunctions]]

    @staticmethod
    def _names(module: Module) -> list[str]:
        return list(need(module.image.contents, "the functions of a module that is not PTX").kernels)

    def cuModuleGetLoadingMode(self) -> Any:
        return cuda.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING

    # -- libraries -------------------------------------------------------------------------------------------

    def _load_library(self, code: Any, *options: Any) -> Any:
        return cuda.CUlibrary(self._machine.modules.add(Module(Image.load(code), None)).handle)

    _OPTIONS = "jitOptions jitOptionsValues numJitOptions libraryOptions libraryOptionValues numLibraryOptions"
    cuLibraryLoadData: Any = call(f"code {_OPTIONS}", _load_library)

    def _load_library_file(self, name: Any, *options: Any) -> Any:
        return self._load_library(_path(name))

    cuLibraryLoadFromFile: Any = call(f"fileName {_OPTIONS}", _load_library_file)

    def _library(self, handle: Any) -> Module:
        return self._module(handle, cuda.CUlibrary)

    def cuLibraryUnload(self, library: Any) -> None:
        self._unload(self._library(library))

    def cuLibraryGetKernel(self, library: Any, name: Any) -> Any:
        found, name = self._library(library), _text(name)
        return cuda.CUkernel(self._machine.modules.find(found, name).handle)

    def cuLibraryGetGlobal(self, library: Any, name: Any) -> tuple[Any, int]:
        return self._variable(self._library(library), name)

    def cuLibraryGetModule(self, library: Any) -> Any:
        found = self._library(library)
        return cuda.CUmodule(self._machine.modules.in_context(found, self._machine.current()).handle)

    def cuLibraryGetKernelCount(self, lib: Any) -> int:
        return len(self._names(self._library(lib)))

    def cuLibraryEnumerateKernels(self, numKernels: UnsignedInt, lib: Any) -> list[Any]:
        library = self._library(lib)
        find = self._machine.modules.find
        return [cuda.CUkernel(find(library, name).handle) for name in self._names(library)[:numKernels]]

    # -- functions -------------------------------------------------------------------------------------------

    def _function(self, handle: Any, cls: Any = cuda.CUfunction) -> Function:
        found = self._machine.modules.functions.get(0 if handle is None else int(cls(handle)))
        return need(found, Result.CUDA_ERROR_INVALID_HANDLE)

    def _kernel(self, handle: Any) -> Function:
        return self._function(handle, cuda.CUkernel)

    def cuKernelGetFunction(self, kernel: Any) -> Any:
        found, context = self._kernel(kernel), self._machine.current()
        module = self._machine.modules.in_context(found.module, context)
        function = self._machine.modules.find(module, found.name)
        function.attributes = found.attributes
        return cuda.CUfunction(function.handle)

    def cuKernelGetLibrary(self, kernel: Any) -> Any:
        return cuda.CUlibrary(self._kernel(kernel).module.handle)

    def cuKernelGetName(self, hfunc: Any) -> bytes:
        return self._kernel(hfunc).name.encode()

    def cuFuncGetName(self, hfunc: Any) -> bytes:
        return self._function(hfunc).name.encode()

    def cuFuncGetModule(self, hfunc: Any) -> Any:
        return cuda.CUmodule(self._function(hfunc).module.handle)

    def cuFuncIsLoaded(self, function: Any) -> Any:
        self._function(function)
        return cuda.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED

    def _ignored(self, function: Any, *settings: Any) -> None:
        """A call without effect here: caches and lazy loading are not simulated."""
        self._function(function)

    cuFuncLoad: Any = call("function", _ignored)
    cuFuncSetCacheConfig: Any = call("hfunc config", _ignored)
    cuFuncSetSharedMemConfig: Any = call("hfunc config", _ignored)
    cuKernelSetCacheConfig: Any = call("kernel config dev:Device", _ignored)

    def _parameter(self, function: Function, index: int) -> tuple[int, int]:
        types = self._types(function)
        check(index < len(types))
        return offsets(types)[index], ctypes.sizeof(types[index])

    def cuFuncGetParamInfo(self, func: Any, paramIndex: Size) -> tuple[int, int]:
        return self._parameter(self._function(func), paramIndex)

    def cuKernelGetParamInfo(self, kernel: Any, paramIndex: Size) -> tuple[int, int]:
        return self._parameter(self._kernel(kernel), paramIndex)

    def cuFuncGetParamCount(self, func: Any) -> int:
        return len(self._types(self._function(func)))

    def cuKernelGetParamCount(self, kernel: Any) -> int:
        return len(self._types(self._kernel(kernel)))

    @staticmethod
    def _types(function: Function) -> tuple[Any, ...]:
        return need(function.types, f"the parameters of {function.name!r}: register it with testing.kernel(types=...)")

    # -- attributes ------------------------------------------------------------------------------------------

    def _bound(self, name: str, device: Any = None) -> int:
        """A device attribute that bounds kernels."""
        found = device or self._machine.current().device
        return int(found.attributes[name])

    def _attribute(self, attribute: Any, function: Function) -> int:
        """An attribute: as it was set or registered, or that of a kernel which needs nothing."""
        number = arguments.member("attrib", attribute, _ATTRIBUTE)
        name = attribute.name.removeprefix(_PREFIX)
        check(number <= _LAST)
        if number in function.attributes:
            return function.attributes[number]
        if name in function.registered:
            return int(function.registered[name])
        device = self._machine.devices[0]
        version = 10 * device.attributes["COMPUTE_CAPABILITY_MAJOR"] + device.attributes["COMPUTE_CAPABILITY_MINOR"]
        known = {
            "MAX_THREADS_PER_BLOCK": self._bound("MAX_THREADS_PER_BLOCK", device),
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": self._bound("MAX_SHARED_MEMORY_PER_BLOCK", device)
            - int(function.registered.get("SHARED_SIZE_BYTES", 0)),
            **dict.fromkeys(("PTX_VERSION", "BINARY_VERSION"), version),
            "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
        }
        return known.get(name, 0)

    def _set_attribute(self, attribute: Any, function: Function, value: int) -> None:
        number = arguments.member("attrib", attribute, _ATTRIBUTE)
        check(number in _SETTABLE.values())
        if number == _DYNAMIC:
            most = self._bound("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self._machine.devices[0])
            check(0 <= value <= most - int(function.registered.get("SHARED_SIZE_BYTES", 0)))
        elif number == _SETTABLE["PREFERRED_SHARED_MEMORY_CARVEOUT"]:
            check(-1 <= value <= 100)
        function.attributes[number] = value

    def cuFuncGetAttribute(self, attrib: Any, hfunc: Any) -> int:
        return self._attribute(attrib, self._function(hfunc))

    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: Int) -> None:
        self._set_attribute(attrib, self._function(hfunc), value)

    def cuKernelGetAttribute(self, attrib: Any, kernel: Any, dev: Device) -> int:
        return self._attribute(attrib, self._kernel(kernel))

    def cuKernelSetAttribute(self, attrib: Any, val: Int, kernel: Any, dev: Device) -> None:
        self._set_attribute(attrib, self._kernel(kernel), val)

    # -- occupancy -------------------------------------------------------------------------------------------

    def _blocks(self, function: Function, block: int, dynamic: int) -> int:
        """Number of blocks that run on a multiprocessor at a time."""
        check(block > 0)
        limit = self._bound
        registers, static = (int(function.registered.get(one, 0)) for one in ("NUM_REGS", "SHARED_SIZE_BYTES"))
        warp = limit("WARP_SIZE")
        warps = -(-block // warp)
        if block > self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function):
            return 0
        bounds = [
            limit("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            limit("MAX_THREADS_PER_MULTIPROCESSOR") // (warps * warp),
            limit("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
            // (static + dynamic + limit("RESERVED_SHARED_MEMORY_PER_BLOCK")),
        ]
        if registers:
            per_warp = -(-registers * warp // _REGISTERS_PER_WARP) * _REGISTERS_PER_WARP
            bounds.append(limit("MAX_REGISTERS_PER_MULTIPROCESSOR") // per_warp // warps)
        return min(bounds)

    def _occupancy(self, func: Any, blockSize: int, dynamicSMemSize: int, flags: int = 0) -> int:
        return self._blocks(self._function(func), blockSize, dynamicSMemSize)

    cuOccupancyMaxActiveBlocksPerMultiprocessor: Any = call("func blockSize:Int dynamicSMemSize:Size", _occupancy)
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags: Any = call(
        "func blockSize:Int dynamicSMemSize:Size flags", _occupancy
    )

    def _best_block(self, func: Any, shared_of: Any, dynamic: int, most: int, flags: int = 0) -> tuple[int, int]:
        """The smallest grid that fills the device, and the block size with the most threads at a time."""
        function, address = self._function(func), int(shared_of or 0)
        shared = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(address) if address else lambda block: dynamic
        largest = self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        sizes = range(min(most or largest, largest) // 32 * 32, 0, -32)
        counts = {size: self._blocks(function, size, shared(size)) for size in sizes}
        best = max(sizes, key=lambda size: size * counts[size])
        return counts[best] * self._bound("MULTIPROCESSOR_COUNT"), best

    _BLOCK_SIZE = "func blockSizeToDynamicSMemSize dynamicSMemSize:Size blockSizeLimit:Int"
    cuOccupancyMaxPotentialBlockSize: Any = call(_BLOCK_SIZE, _best_block)
    cuOccupancyMaxPotentialBlockSizeWithFlags: Any = call(f"{_BLOCK_SIZE} flags", _best_block)

    def cuOccupancyAvailableDynamicSMemPerBlock(self, func: Any, numBlocks: Int, blockSize: Int) -> int:
        function = self._function(func)
        check(numBlocks > 0 and blockSize > 0)
        static = int(function.registered.get("SHARED_SIZE_BYTES", 0))
        most = self._bound("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // numBlocks
        return max(min(most, self._bound("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")) - static, 0)

    # -- launches --------------------------------------------------------------------------------------------

    def _shape(self, function: Function, sizes: tuple[int, ...], cooperative: bool = False) -> Shape:
        """The shape of a launch: six extents, and bytes of shared memory."""
        x, y, z, block_x, block_y, block_z, shared = sizes
        limit, attribute = self._bound, self._attribute
        check(all((x, y, z, block_x, block_y, block_z)))
        for name, size in zip("XYZ", (x, y, z), strict=True):
            check(size <= limit(f"MAX_GRID_DIM_{name}"))
        for name, size in zip("XYZ", (block_x, block_y, block_z), strict=True):
            check(size <= limit(f"MAX_BLOCK_DIM_{name}"))
        threads = block_x * block_y * block_z
        check(threads <= attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function))
        check(shared <= attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function))
        if cooperative:
            most = self._blocks(function, threads, shared) * limit("MULTIPROCESSOR_COUNT")
            check(x * y * z <= most, Result.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
        return Shape((x, y, z), (block_x, block_y, block_z), shared, cooperative)

    def _launch_of(
        self, context: Context, function: Function, shape: Shape, params: Any, extra: Any
    ) -> tuple[Operation, Cells]:
        """The operation of a launch in its stream, and its arguments."""
        own = function.module.context
        check(own is None or own is context, Result.CUDA_ERROR_INVALID_HANDLE)
        kernel = function.kernel
        if kernel is None:
            what = f"the kernel {function.name!r}: register a function for it with testing.kernel, or ignore kernels"
            not_modelled(not self._machine.modules.ignore, what)
            packed(params, extra)
            return Operation(), ()
        cells = unpack(function.name, params, extra, function.types)
        arguments_of = tuple(map(plain, cells))
        return Launch(self, self._machine, context, function.name, kernel, shape, arguments_of), cells

    def _launch_kernel(self, cooperative: bool, f: Any, *more: Any) -> None:
        *sizes, stream, params = more[:9]
        self._launch_in(stream, f, tuple(sizes), params, more[9] if more[9:] else 0, cooperative)

    _EXTENTS = " ".join(f"{part}Dim{axis}:UnsignedInt" for part in ("grid", "block") for axis in "XYZ")
    _LAUNCH = f"f {_EXTENTS} sharedMemBytes:UnsignedInt hStream:Stream kernelParams"
    cuLaunchKernel: Any = call(f"{_LAUNCH} extra", _launch_kernel, False)
    cuLaunchCooperativeKernel: Any = call(_LAUNCH, _launch_kernel, True)

    def _launch_in(
        self, stream: Stream, f: Any, sizes: tuple[int, ...], params: Any, extra: Any, cooperative: bool
    ) -> None:
        function = self._function(f)
        shape = self._shape(function, sizes, cooperative)
        operation, cells = self._launch_of(stream.context, function, shape, params, extra)
        self._submit(stream, operation, "KERNEL", lambda: node_values(function, shape, cells))

    def cuLaunchKernelEx(self, config: cuda.CUlaunchConfig, f: Any, kernelParams: Any, extra: Any) -> None:
        """Attributes other than clusters and cooperation change nothing: the order here is stricter."""
        sizes = tuple(int(getattr(config, f"{part}Dim{axis}")) for part in ("grid", "block") for axis in "XYZ")
        attributes = {one.id.name: one.value for one in list(config.attrs or ())[: int(config.numAttrs)]}
        if _CLUSTER in attributes:
            cluster = attributes[_CLUSTER].clusterDim
            for size, part in zip(sizes, (cluster.x, cluster.y, cluster.z), strict=False):
                check(part and size % int(part) == 0)
        cooperative = _COOPERATIVE in attributes and bool(attributes[_COOPERATIVE].cooperative)
        stream = self._machine.stream(arguments.stream(config.hStream))
        self._launch_in(stream, f, (*sizes, int(config.sharedMemBytes)), kernelParams, extra, cooperative)

    def kernel_uses(self, f: Any, params: Any, extra: Any = 0) -> list[tuple[int, int, bool]] | None:
        """No function of the driver: address, size and whether it is written, of what a launch uses; None where that is
        unknown. Bytes that it reads and writes count as written.
        """
        function = self._machine.modules.functions.get(int(cuda.CUfunction(f or 0)))
        kernel = None if function is None else function.kernel
        if function is None or kernel is None or not kernel.declares:
            return None
        given = tuple(map(plain, unpack(function.name, params, extra, function.types)))
        read, written = Intervals(), Intervals()
        for address, size, write in kernel.touched(given) or ():
            if size:
                (written if write else read).add(address, address + size)
        for one in written:
            read.remove(*one)
        pairs = ((read, False), (written, True))
        return [(start, end - start, write) for ranges, write in pairs for start, end in ranges]

    # -- linking: the texts that are added, one after the other ------------------------------------------------

    def cuLinkCreate(self, numOptions: UnsignedInt, options: Any, optionValues: Any) -> Any:
        self._machine.current()
        handle = self._machine.modules.new_link()
        return cuda.CUlinkState(handle)

    def _link(self, state: Any) -> list[bytes]:
        found = self._machine.modules.links.get(0 if state is None else int(cuda.CUlinkState(state)))
        return need(found, Result.CUDA_ERROR_INVALID_HANDLE)

    def cuLinkAddData(
        self,
        state: Any,
        typename: Any,
        data: Any,
        size: Size,
        name: Any,
        numOptions: UnsignedInt,
        options: Any,
        optionValues: Any,
    ) -> None:
        link = self._link(state)
        check(size)
        link.append(ctypes.string_at(arguments.host_pointer(data), size).rstrip(b"\0"))

    def cuLinkAddFile(
        self, state: Any, typename: Any, path: Any, numOptions: UnsignedInt, options: Any, optionValues: Any
    ) -> None:
        self._link(state).append(_path(path))

    def cuLinkComplete(self, state: Any) -> tuple[int, int]:
        link = self._link(state)
        parts = b"\n".join(link)
        made = parts if b".version" in parts or parts.startswith(BINARIES) else BINARIES[0] + parts
        joined = ctypes.create_string_buffer(made)
        self._machine.modules.linked[int(cuda.CUlinkState(state))] = joined
        return ctypes.addressof(joined), len(joined)

    def cuLinkDestroy(self, state: Any) -> None:
        self._link(state)
        number = int(cuda.CUlinkState(state))
        del self._machine.modules.links[number]
        self._machine.modules.linked.pop(number, None)


def node_values(function: Function, shape: Shape, cells: Cells) -> Values:
    """The parameters of a kernel node: fields of CUDA_KERNEL_NODE_PARAMS, and ``cells``, which its arguments are in."""
    slots = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(one) for one in cells if isinstance(one, CELLS)))
    values: Values = {"func": cuda.CUfunction(function.handle), "sharedMemBytes": shape.shared_bytes}
    for part, extent in (("grid", shape.grid), ("block", shape.block)):
        values.update({f"{part}Dim{axis}": size for axis, size in zip("XYZ", extent, strict=True)})
    return {**values, "kernelParams": ctypes.addressof(slots) if cells else 0, "cells": (slots, cells)}
