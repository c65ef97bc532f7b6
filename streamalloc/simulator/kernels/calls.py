"""Modules, libraries and functions, their launches and their occupancy.

Launch limits and occupancy follow NVIDIA's documentation (CUDA C++ Programming Guide, "Compute Capabilities", and the
occupancy calculator). The values of a kernel without registers and shared memory were read from an H200: test_modules.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import arguments
from streamalloc.simulator.arguments import Device, Function, Int, Kernel, Link, Module, NamedFunction, UnsignedInt
from streamalloc.simulator.calls.base import Calls, call
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Fault, Result, check, need, not_modelled
from streamalloc.simulator.graphs import Values
from streamalloc.simulator.kernels import modules
from streamalloc.simulator.kernels.launches import CELLS, Cells, Launch, Shape, offsets, packed, plain, unpack
from streamalloc.simulator.kernels.modules import BINARIES
from streamalloc.simulator.memory import Intervals
from streamalloc.simulator.scheduler import Operation, Queue

_ATTRIBUTE = cuda.CUfunction_attribute
_PREFIX = "CU_FUNC_ATTRIBUTE_"
# The numbers of attributes that can be set; the last is that of clusters' scheduling.
_DYNAMIC, _CARVEOUT, _LAST = 8, 9, 15
_SETTABLE = (_DYNAMIC, _CARVEOUT, *range(11, _LAST + 1))
_COOPERATIVE = "CU_LAUNCH_ATTRIBUTE_COOPERATIVE"
_CLUSTER = "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
_REGISTERS_PER_WARP = 256
"""Allocation unit of registers per warp."""


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
        return cuda.CUmodule(self._machine.modules.modules.add(modules.Module(modules.load(image), context)).handle)

    def _load_file(self, name: Any) -> Any:
        self._machine.current()
        return self._load(_path(name))

    cuModuleLoad = call("fname", _load_file)
    cuModuleLoadData = call("image", _load)
    cuModuleLoadDataEx = call("image numOptions options optionValues", _load)
    cuModuleLoadFatBinary = call("fatCubin", _load)

    def cuModuleUnload(self, hmod: Module) -> None:
        self._unsafe_during_capture()
        self._machine.drain()
        self._machine.modules.unload(hmod, self._machine.allocations)

    def _find_function(self, cls: Any, module: Module, name: Any) -> Any:
        return cls(self._machine.modules.find(module, _text(name)).handle)

    cuModuleGetFunction = call("hmod name", _find_function, cuda.CUfunction)

    def _variable(self, module: Module, name: Any) -> tuple[Any, int]:
        """A variable of a module, or of a library for the current context."""
        module = module.library or module
        context = module.context or self._machine.current()
        found = self._machine.modules.variable(module, _text(name), context, self._machine.allocations)
        return cuda.CUdeviceptr(found.base), found.size

    cuModuleGetGlobal = call("hmod name", _variable)

    def _function_count(self, module: Module) -> int:
        return len(self._names(module))

    def _functions(self, cls: Any, count: int, module: Module) -> list[Any]:
        return [cls(self._machine.modules.find(module, name).handle) for name in self._names(module)[:count]]

    cuModuleGetFunctionCount = call("mod", _function_count)
    cuModuleEnumerateFunctions = call("numFunctions:UnsignedInt mod", _functions, cuda.CUfunction)

    @staticmethod
    def _names(module: Module) -> list[str]:
        return list(need(module.contents, "the functions of a module that is not PTX").kernels)

    def cuModuleGetLoadingMode(self) -> Any:
        return cuda.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING

    # -- libraries -------------------------------------------------------------------------------------------

    def _load_library(self, code: Any, *options: Any) -> Any:
        return cuda.CUlibrary(self._machine.modules.modules.add(modules.Module(modules.load(code), None)).handle)

    _OPTIONS = "jitOptions jitOptionsValues numJitOptions libraryOptions libraryOptionValues numLibraryOptions"
    cuLibraryLoadData = call(f"code {_OPTIONS}", _load_library)

    def _load_library_file(self, name: Any, *options: Any) -> Any:
        return self._load_library(_path(name))

    cuLibraryLoadFromFile = call(f"fileName {_OPTIONS}", _load_library_file)

    cuLibraryUnload = call("library", cuModuleUnload)
    cuLibraryGetKernel = call("library name", _find_function, cuda.CUkernel)
    cuLibraryGetGlobal = call("library name", _variable)
    cuLibraryGetKernelCount = call("lib", _function_count)
    cuLibraryEnumerateKernels = call("numKernels:UnsignedInt lib", _functions, cuda.CUkernel)

    def cuLibraryGetModule(self, library: arguments.Library) -> Any:
        return cuda.CUmodule(self._machine.modules.in_context(library, self._machine.current()).handle)

    # -- functions -------------------------------------------------------------------------------------------

    def cuKernelGetFunction(self, kernel: Kernel) -> Any:
        module = self._machine.modules.in_context(kernel.module, self._machine.current())
        function = self._machine.modules.find(module, kernel.name)
        function.attributes = kernel.attributes
        return cuda.CUfunction(function.handle)

    def cuKernelGetLibrary(self, kernel: Kernel) -> Any:
        return cuda.CUlibrary(kernel.module.handle)

    def cuFuncGetModule(self, hfunc: NamedFunction) -> Any:
        return cuda.CUmodule(hfunc.module.handle)

    def cuFuncGetName(self, hfunc: NamedFunction) -> bytes:
        return hfunc.name.encode()

    cuKernelGetName = call("hfunc:NamedKernel", cuFuncGetName)

    def cuFuncIsLoaded(self, function: Function) -> Any:
        return cuda.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED

    def _ignored(self, *unused: Any) -> None:
        """A call without effect here: caches and lazy loading are not simulated."""

    cuFuncLoad = call("function", _ignored)
    cuFuncSetCacheConfig = call("hfunc config", _ignored)
    cuFuncSetSharedMemConfig = call("hfunc config", _ignored)
    cuKernelSetCacheConfig = call("kernel config dev:Device", _ignored)

    def _parameter(self, function: Function, index: int) -> tuple[int, int]:
        types = self._types(function)
        check(index < len(types))
        return offsets(types)[index], ctypes.sizeof(types[index])

    cuFuncGetParamInfo = call("func:NamedFunction paramIndex:Size", _parameter)
    cuKernelGetParamInfo = call("kernel:NamedKernel paramIndex:Size", _parameter)

    def _parameter_count(self, function: Function) -> int:
        return len(self._types(function))

    cuFuncGetParamCount = call("func", _parameter_count)
    cuKernelGetParamCount = call("kernel", _parameter_count)

    @staticmethod
    def _types(function: Function) -> tuple[Any, ...]:
        return need(function.types, f"the parameters of {function.name!r}: register it with testing.kernel(types=...)")

    # -- attributes ------------------------------------------------------------------------------------------

    def _bound(self, name: str, device: Any = None) -> int:
        """A device attribute that bounds kernels."""
        found = device or self._machine.current().device
        return int(found.attributes[name])

    def _attribute(self, attribute: Any, function: Function, *unused: Any) -> int:
        """An attribute: set or registered, or else that of an empty kernel."""
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

    def _set_attribute(self, function: Function, attribute: Any, value: int) -> None:
        number = arguments.member("attrib", attribute, _ATTRIBUTE)
        check(number in _SETTABLE)
        if number == _DYNAMIC:
            most = self._bound("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self._machine.devices[0])
            check(0 <= value <= most - int(function.registered.get("SHARED_SIZE_BYTES", 0)))
        elif number == _CARVEOUT:
            check(-1 <= value <= 100)
        function.attributes[number] = value

    cuFuncSetAttribute = call("hfunc attrib value:Int", _set_attribute)

    def cuKernelSetAttribute(self, attrib: Any, val: Int, kernel: Kernel, dev: Device) -> None:
        self._set_attribute(kernel, attrib, val)

    cuFuncGetAttribute = call("attrib hfunc", _attribute)
    cuKernelGetAttribute = call("attrib kernel dev:Device", _attribute)

    # -- occupancy -------------------------------------------------------------------------------------------

    def _blocks(self, function: Function, block: int, dynamic: int, *flags: int) -> int:
        """Number of blocks that can run concurrently on a multiprocessor."""
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

    _BLOCK = "func blockSize:Int dynamicSMemSize:Size"
    cuOccupancyMaxActiveBlocksPerMultiprocessor = call(_BLOCK, _blocks)
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = call(f"{_BLOCK} flags", _blocks)

    def _best_block(self, function: Function, shared_of: Any, dynamic: int, most: int, *flags: int) -> tuple[int, int]:
        """The smallest grid that fills the device, and the block size with the most concurrent threads."""
        address = int(shared_of or 0)
        shared = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(address) if address else lambda block: dynamic
        largest = self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        sizes = range(min(most or largest, largest) // 32 * 32, 0, -32)
        counts = {size: self._blocks(function, size, shared(size)) for size in sizes}
        best = max(sizes, key=lambda size: size * counts[size])
        return counts[best] * self._bound("MULTIPROCESSOR_COUNT"), best

    _BLOCK_SIZE = "func blockSizeToDynamicSMemSize dynamicSMemSize:Size blockSizeLimit:Int"
    cuOccupancyMaxPotentialBlockSize = call(_BLOCK_SIZE, _best_block)
    cuOccupancyMaxPotentialBlockSizeWithFlags = call(f"{_BLOCK_SIZE} flags", _best_block)

    def cuOccupancyAvailableDynamicSMemPerBlock(self, func: Function, numBlocks: Int, blockSize: Int) -> int:
        check(numBlocks > 0 and blockSize > 0)
        static = int(func.registered.get("SHARED_SIZE_BYTES", 0))
        share = self._bound("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // numBlocks - static
        # Observed on H200: test_modules.
        allowed = self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, func)
        return max(min(share, allowed), 0)

    # -- launches --------------------------------------------------------------------------------------------

    def _shape(self, function: Function, sizes: tuple[int, ...], cooperative: bool = False) -> Shape:
        """The shape of a launch: six extents, and shared memory in bytes."""
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
        return Launch(self, context, function.name, kernel, shape, arguments_of), cells

    def _launch_kernel(self, cooperative: bool, function: Function, *more: Any) -> None:
        *sizes, stream, params = more[:9]
        self._launch_in(stream, function, tuple(sizes), params, more[9] if more[9:] else 0, cooperative)

    _EXTENTS = " ".join(f"{part}Dim{axis}:UnsignedInt" for part in ("grid", "block") for axis in "XYZ")
    _LAUNCH = f"f {_EXTENTS} sharedMemBytes:UnsignedInt hStream:Queue kernelParams"
    cuLaunchKernel = call(f"{_LAUNCH} extra", _launch_kernel, False)
    cuLaunchCooperativeKernel = call(_LAUNCH, _launch_kernel, True)

    def _launch_in(
        self, stream: Queue, function: Function, sizes: tuple[int, ...], params: Any, extra: Any, cooperative: bool
    ) -> None:
        shape = self._shape(function, sizes, cooperative)
        operation, cells = self._launch_of(stream.context, function, shape, params, extra)
        self._submit(stream, operation, "KERNEL", lambda: node_values(function, shape, cells))

    def cuLaunchKernelEx(self, config: cuda.CUlaunchConfig, f: Function, kernelParams: Any, extra: Any) -> None:
        """Launch attributes other than clusters and cooperation are ignored: the simulated order is stricter."""
        sizes = tuple(int(getattr(config, f"{part}Dim{axis}")) for part in ("grid", "block") for axis in "XYZ")
        attributes = {one.id.name: one.value for one in list(config.attrs or ())[: int(config.numAttrs)]}
        if _CLUSTER in attributes:
            cluster = attributes[_CLUSTER].clusterDim
            for size, part in zip(sizes, (cluster.x, cluster.y, cluster.z), strict=False):
                check(part and size % int(part) == 0)
        cooperative = _COOPERATIVE in attributes and bool(attributes[_COOPERATIVE].cooperative)
        stream = self._machine.stream(arguments.stream(config.hStream))
        self._launch_in(stream, f, (*sizes, int(config.sharedMemBytes)), kernelParams, extra, cooperative)

    def kernel_uses(self, f: Any, params: Any, extra: Any = 0) -> list[tuple[int, int, bool, bool]] | None:
        """Not a driver function: address, size, write flag and atomic flag of each use of a launch; None if unknown.
        Bytes that are read and written count as written.
        """
        function = self._machine.modules.functions.get(int(cuda.CUfunction(f or 0)))
        kernel = None if function is None else function.kernel
        if function is None or kernel is None or not kernel.declares:
            return None
        given = tuple(map(plain, unpack(function.name, params, extra, function.types)))
        kinds = {(False, False): Intervals(), (True, False): Intervals(), (True, True): Intervals()}
        for address, size, *kind in kernel.touched(given) or ():
            if size:
                kinds[kind[0], kind[1]].add(address, address + size)
        for one in kinds[True, False]:
            kinds[False, False].remove(*one)
        return [(start, end - start, *kind) for kind, ranges in kinds.items() for start, end in ranges]

    # -- linking: the result is the concatenation of the added PTX texts -----------------------------------------

    def cuLinkCreate(self, numOptions: UnsignedInt, options: Any, optionValues: Any) -> Any:
        self._machine.current()
        return cuda.CUlinkState(self._machine.modules.links.add(modules.Link()).handle)

    def _add_text(self, link: Link, typename: Any, data: Any, size: int, *rest: Any) -> None:
        check(size)
        link.texts.append(ctypes.string_at(arguments.host_pointer(data), size).rstrip(b"\0"))

    def _add_file(self, link: Link, typename: Any, path: Any, *options: Any) -> None:
        link.texts.append(_path(path))

    _LINK_OPTIONS = "numOptions:UnsignedInt options optionValues"
    cuLinkAddData = call(f"state:Link typename data size:Size name {_LINK_OPTIONS}", _add_text)
    cuLinkAddFile = call(f"state:Link typename path {_LINK_OPTIONS}", _add_file)

    def cuLinkComplete(self, state: Link) -> tuple[int, int]:
        parts = b"\n".join(state.texts)
        made = parts if b".version" in parts or parts.startswith(BINARIES) else BINARIES[0] + parts
        state.linked = ctypes.create_string_buffer(made)
        return ctypes.addressof(state.linked), len(state.linked)

    def cuLinkDestroy(self, state: Link) -> None:
        del self._machine.modules.links[state.handle]


def node_values(function: Function, shape: Shape, cells: Cells) -> Values:
    """The parameters of a kernel node: fields of CUDA_KERNEL_NODE_PARAMS, and ``cells`` with the arguments."""
    slots = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(one) for one in cells if isinstance(one, CELLS)))
    values: Values = {"func": cuda.CUfunction(function.handle), "sharedMemBytes": shape.shared_bytes}
    for part, extent in (("grid", shape.grid), ("block", shape.block)):
        values.update({f"{part}Dim{axis}": size for axis, size in zip("XYZ", extent, strict=True)})
    return {**values, "kernelParams": ctypes.addressof(slots) if cells else 0, "cells": (slots, cells)}
