"""Driver calls for modules, libraries and functions, for launches of functions and for their occupancy.

Launch limits and occupancy follow NVIDIA's documentation (CUDA C++ Programming Guide, "Compute Capabilities", and the
occupancy calculator). The values for a kernel without registers and shared memory were read on an H200 (test_modules).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamalloc.driver.bindings import cuda
from streamalloc.driver.block_kernel import COPY_MOST, BlockCopies
from streamalloc.formats.ranges import Intervals
from streamalloc.simulator import arguments, call_lock, kernels
from streamalloc.simulator.allocations import LiveMemory, is_reachable
from streamalloc.simulator.arguments import Device, Function, Int, Kernel, Link, Module, NamedFunction, UnsignedInt
from streamalloc.simulator.calls.base import Calls, call
from streamalloc.simulator.constants import READ, READ_WRITE, Dim3, Handles, device_place
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Fault, Result, check, need, not_modelled
from streamalloc.simulator.graphs import Values
from streamalloc.simulator.kernels import BINARIES
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import is_accessible
from streamalloc.simulator.profiles import MachineSpec
from streamalloc.simulator.scheduler import HostFunction, Operation, Stream


class LaunchShape(NamedTuple):
    """Sizes of a launch: blocks of the grid in x, y and z, threads of a block in x, y and z, and bytes of dynamic
    shared memory per block.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int
    cooperative: bool = False


class NoAccess(MemoryError):
    """A kernel used memory that does not exist or that its device cannot access."""


class Launch(HostFunction):
    """One launch of a kernel that is a registered Python function. The function runs on a separate thread, on which
    :func:`current_launch` returns this object. Attributes for the function:

    ``name`` of the kernel; ``grid`` and ``block``, tuples (x, y, z) of the blocks and of the threads of a block;
    ``shared_bytes``, the bytes of dynamic shared memory per block; ``cooperative``, a bool; ``device``, the ordinal of
    the device.
    """

    def __init__(
        self, machine: Machine, context: Context, function: Function, shape: LaunchShape, arguments: tuple[Any, ...]
    ) -> None:
        super().__init__(machine.scheduler, self._call)
        self._machine = machine
        self._context = context
        self._kernel: kernels.RegisteredKernel = need(function.kernel)
        self._arguments = arguments
        self._uses = self._kernel.touched(arguments)
        self._whole = {(address, size): write for address, size, write, _ in self._uses or ()}
        self.name: str = function.name
        self.grid, self.block, self.shared_bytes, self.cooperative = shape
        self.device: int = context.device.ordinal

    def _call(self) -> None:
        # This reference keeps the machine and so its memory alive while the kernel runs.
        driver = self._machine.driver()
        self._machine.thread.caller = call_lock.Caller(in_kernel=True)
        if driver is None or self._context.error is not None:
            return
        try:
            _here.launch = self
            self._kernel.function(*self._arguments)
        except BaseException as error:
            # Errors of the prints are ignored: with a closed sys.stderr a print would raise, and the context would not
            # get its error below.
            with contextlib.suppress(Exception):
                print(f"the kernel {self.name!r} raised, and its context is lost:", file=sys.stderr)
                traceback.print_exception(error, file=sys.stderr)
            codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
            self._context.error = next(codes, Result.CUDA_ERROR_LAUNCH_FAILED)

    @property
    def runs(self) -> bool:  # type: ignore[override]  # A property here, a class attribute in the base class.
        return self._state == "running"

    def touches(self, start: int, end: int) -> bool:
        return any(address < end and start < address + size for address, size, *_ in self._uses or ())

    def view(self, address: int, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return memory as an array, which is read-only if the kernel may not write the memory. Raises the errors of
        :func:`device_view`.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        writable = True
        if (address, size) in self._whole:
            writable = self._whole[address, size]
        elif self._uses is not None:
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
    """Whether a kernel in ``context`` may read, or with ``write`` also write, ``size`` bytes at ``address``.

    Memory that was freed after the launch was queued has no allocation any more; it only needs to be mapped. Pageable
    host memory is never accessible.
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


def _has_right(allocation: LiveMemory, context: Context, write: bool) -> bool:
    if allocation.mapping is not None:
        right = allocation.mapping.right(device_place(context.device.ordinal))
        return right & (READ_WRITE if write else READ) == (READ_WRITE if write else READ)
    return is_reachable(allocation, context)


CELLS = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)
Cells = tuple[Any, ...]
"""Arguments of a launch, each copied into a ctypes object. An object of the bindings whose size is unknown is kept
itself, and not copied.
"""
_POINTER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_*
_WORD = 8


def unpack(name: str, params: Any, extra: Any, types: tuple[Any, ...] | None) -> Cells:
    """Return the arguments of a launch of the kernel ``name``. ``types``: ctypes types of its parameters; None if
    unknown.

    The bindings pack the arguments into memory, as for a real driver, and this function reads that memory. Raises
    :class:`NotModelled` if the types are unknown and the arguments are packed without types, if there are too few
    arguments, and if an address has no memory. Gives CUDA_ERROR_INVALID_VALUE if both ``params`` and ``extra`` are
    given, or neither for a kernel with parameters, and CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES if ``extra`` gives too few
    bytes.
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
    return tuple(_read(address, kind) for address, kind in zip(_addresses(slots, len(known)), known, strict=True))


def packed(params: Any, extra: Any) -> tuple[Any, int]:
    """Let the bindings pack the arguments of a launch.

    Returns a tuple of the struct that owns the packed ``params``, and the address that ``extra`` gives, or 0. The
    driver accepts only one of ``params`` and ``extra``; both give CUDA_ERROR_INVALID_VALUE.
    """
    node = cuda.CUDA_KERNEL_NODE_PARAMS()
    node.kernelParams = params  # The bindings check the arguments at this assignment, and raise.
    buffer = int(extra or 0)
    check(not (int(node.kernelParams) and buffer))
    return node, buffer


def _known(name: str, types: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return need(types, f"arguments without types for {name!r}: register it with testing.kernel(..., types=...)")


def _addresses(slots: int, count: int) -> tuple[int, ...]:
    """Return the addresses of ``count`` arguments. ``slots``: address of the ``void**`` in which they are listed."""
    return tuple(_read(slots, ctypes.c_uint64 * count, "arguments")) if count else ()


def _read(address: int, kind: Any, what: str = "an argument") -> Any:
    size = ctypes.sizeof(kind)
    not_modelled(not is_accessible(address, size), f"{what} where nothing lies: the real driver crashes")
    return kind.from_buffer_copy(ctypes.string_at(address, size))


def _given(address: int, value: Any, kind: Any, parameter: Any) -> Any:
    """Read the argument ``value`` at ``address``, where the bindings packed it.

    ``kind``: the C type that the caller named; None for a ctypes or bindings object. ``parameter``: the type that the
    kernel declares; None if unknown. A number is read as the parameter's type, or as the type that the caller named if
    that is smaller: NVIDIA's samples pass an int for a size_t. A struct of the bindings is read as the ctypes struct
    that the kernel declares.
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
    """Return an argument in the form in which the Python function of a kernel gets it. A number becomes an int or
    float; a struct is unchanged.
    """
    value = cell.value if isinstance(cell, ctypes._SimpleCData) else cell
    return 0 if value is None else value  # ctypes gives None as the value of a null pointer.


def _word(address: int) -> int:
    return int(_read(address, ctypes.c_uint64, "extra").value)


def _from_buffer(extra: int, types: tuple[Any, ...]) -> Cells:
    """Return the arguments that a launch passes in a buffer, by the argument ``extra`` of the call.

    ``extra``: address of the list of CU_LAUNCH_PARAM_* names and their values, which give the address and the size of
    the buffer.
    """
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
    """Return the offset in bytes of each parameter, aligned as its type requires."""
    found, at = [], 0
    for kind in types:
        alignment = ctypes.alignment(kind)
        at = -(-at // alignment) * alignment
        found.append(at)
        at += ctypes.sizeof(kind)
    return found


# -- what a running kernel asks --------------------------------------------------------------------------------

_here = threading.local()  # State of each thread. Its attribute ``launch`` is the launch that runs on the thread.


def current_launch() -> Launch:
    """Return the launch of the kernel that runs on this thread. A function that :func:`kernel` has registered may call
    this, and so may what it calls.

    The launch has ``name``; ``grid`` and ``block``, tuples (x, y, z); ``shared_bytes``, the dynamic shared memory of a
    block in bytes; ``cooperative``, a bool; and ``device``, an ordinal.

    Raises
    ------
    RuntimeError
        No kernel runs on this thread.
    """
    found: Launch | None = getattr(_here, "launch", None)
    if found is None:
        raise RuntimeError("no kernel runs on this thread")
    return found


def device_view(address: int, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Return simulated memory as a NumPy array, for the kernel that runs on this thread. The array is valid until the
    kernel returns.

    :func:`kernel` shows its use.

    If the kernel is registered with its uses, the array is read-only unless ``writes`` or ``atomics`` cover it.
    Otherwise it is read-only if the device may only read the memory.

    Parameters
    ----------
    address
        Device address of the first byte, as the kernel gets it.
    shape
        Number of elements, or the shape.
    dtype
        Type of the elements.

    Raises
    ------
    RuntimeError
        No kernel runs on this thread.
    ValueError
        The registered ``reads``, ``writes`` and ``atomics`` do not cover the memory.
    MemoryError
        Memory is missing there, or the device has no access to it. The context is lost unless the kernel catches the
        error.
    NotImplementedError
        The memory is that of a multicast object.
    """
    return current_launch().view(address, shape, np.dtype(dtype))


def _copy_blocks(copies: BlockCopies) -> None:
    """Do the work of the package's own kernel on the simulated driver: copy blocks of ``copies.nbytes`` bytes."""
    for target, source in zip(*copies.addresses(), strict=True):
        device_view(target, copies.nbytes)[:] = device_view(source, copies.nbytes)


for _name in COPY_MOST:
    kernels.kernel(
        _name,
        types=(BlockCopies,),
        reads=lambda copies: ((address, copies.nbytes) for address in copies.addresses()[1]),
        writes=lambda copies: ((address, copies.nbytes) for address in copies.addresses()[0]),
    )(_copy_blocks)


_ATTRIBUTE = cuda.CUfunction_attribute
_PREFIX = "CU_FUNC_ATTRIBUTE_"
# Attributes that cuFuncSetAttribute accepts: dynamic shared memory, carveout, 11 to the scheduling policy of clusters.
_DYNAMIC, _CARVEOUT, _LAST = 8, 9, 15
_SETTABLE = (_DYNAMIC, _CARVEOUT, *range(11, _LAST + 1))
_COOPERATIVE = "CU_LAUNCH_ATTRIBUTE_COOPERATIVE"
_CLUSTER = "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
_REGISTERS_PER_WARP = 256
"""Number of registers by multiples of which the registers of a warp are allocated."""


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
    """Driver calls for kernels: cuModule*, cuLibrary*, cuKernel*, cuFunc*, cuLaunch*Kernel*, cuOccupancy* and cuLink*.

    A launch calls the Python function that :func:`streamalloc.testing.kernel` has registered for the kernel's name.
    For other kernels it raises :class:`NotModelled`, or does nothing if the machine ignores unknown kernels.
    """

    def __init__(self, spec: MachineSpec) -> None:
        super().__init__(spec)
        self.modules: Handles[Module] = Handles()
        self.functions: Handles[Function] = Handles()
        self.links: Handles[Link] = Handles()

    # -- modules ---------------------------------------------------------------------------------------------

    def _load(self, image: Any, *options: Any) -> Any:
        context = self.current()
        self._unsafe_during_capture()
        return cuda.CUmodule(self.modules.add(kernels.Module(kernels.load(image), context)).handle)

    def _load_file(self, name: Any) -> Any:
        self.current()
        return self._load(_path(name))

    cuModuleLoad = call(_load_file)
    cuModuleLoadData = cuModuleLoadDataEx = cuModuleLoadFatBinary = call(_load)

    def cuModuleUnload(self, hmod: Module) -> None:
        self._unsafe_during_capture()
        self.drain()
        self._unload(hmod)

    def _unload(self, module: Module) -> None:
        """Remove a module or a library, with its functions and variables, and the modules of a library."""
        for own in [one for one in self.modules.values() if one.library is module]:
            self._unload(own)
        self.modules.pop(module.handle, None)
        for function in module.functions.values():
            self.functions.pop(function.handle, None)
        for memory in module.variables.values():
            self.allocations.remove(memory)
            assert memory.context is not None
            memory.context.device.heap.free(memory.block)
        module.variables.clear()

    def close_context(self, context: Context) -> None:
        super().close_context(context)
        for module in [one for one in self.modules.values() if one.context is context]:
            self._unload(module)

    def _function(self, module: Module, name: str) -> Function:
        return self.functions.add(module.function(name))

    def _find_function(self, cls: Any, module: Module, name: Any) -> Any:
        return cls(self._function(module, _text(name)).handle)

    cuModuleGetFunction = call(_find_function, cuda.CUfunction)

    def _variable(self, module: Module, name: Any) -> tuple[Any, int]:
        """Return address and size in bytes of a variable: of a module, or of a library in the current context.

        The memory of the variable is allocated at the first call.
        """
        module = module.library or module
        context, text = module.context or self.current(), _text(name)
        found = module.variables.get((text, context))
        if found is None:
            initial, device = module.initial(text), context.device
            address, block, _ = need(device.heap.allocate(len(initial)), Result.CUDA_ERROR_OUT_OF_MEMORY)
            ctypes.memmove(address, initial, len(initial))
            found = kernels.VariableMemory(address, len(initial), device.ordinal, context, block)
            self.allocations.add(found)
            module.variables[text, context] = found
        return cuda.CUdeviceptr(found.base), found.size

    cuModuleGetGlobal = cuLibraryGetGlobal = call(_variable)

    def _function_count(self, module: Module) -> int:
        return len(self._names(module))

    def _functions(self, cls: Any, count: int, module: Module) -> list[Any]:
        return [cls(self._function(module, name).handle) for name in self._names(module)[:count]]

    cuModuleGetFunctionCount = cuLibraryGetKernelCount = call(_function_count)
    cuModuleEnumerateFunctions = call(_functions, cuda.CUfunction)

    @staticmethod
    def _names(module: Module) -> list[str]:
        return list(need(module.contents, "the functions of a module that is not PTX").kernels)

    def cuModuleGetLoadingMode(self) -> Any:
        return cuda.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING

    # -- libraries -------------------------------------------------------------------------------------------

    def _load_library(self, code: Any, *options: Any) -> Any:
        return cuda.CUlibrary(self.modules.add(kernels.Module(kernels.load(code), None)).handle)

    cuLibraryLoadData = call(_load_library)

    def _load_library_file(self, name: Any, *options: Any) -> Any:
        return self._load_library(_path(name))

    cuLibraryLoadFromFile = call(_load_library_file)

    cuLibraryUnload = call(cuModuleUnload)
    cuLibraryGetKernel = call(_find_function, cuda.CUkernel)
    cuLibraryEnumerateKernels = call(_functions, cuda.CUkernel)

    def _in_context(self, library: Module, context: Context) -> Module:
        """Return the module of a library in a context. The first call makes the module."""
        made = (one for one in self.modules.values() if one.library is library and one.context is context)
        return next(made, None) or self.modules.add(kernels.Module(library.contents, context, library))

    def cuLibraryGetModule(self, library: arguments.Library) -> Any:
        return cuda.CUmodule(self._in_context(library, self.current()).handle)

    # -- functions -------------------------------------------------------------------------------------------

    def cuKernelGetFunction(self, kernel: Kernel) -> Any:
        module = self._in_context(kernel.module, self.current())
        function = self._function(module, kernel.name)
        function.attributes = kernel.attributes
        return cuda.CUfunction(function.handle)

    def cuKernelGetLibrary(self, kernel: Kernel) -> Any:
        return cuda.CUlibrary(kernel.module.handle)

    def cuFuncGetModule(self, hfunc: NamedFunction) -> Any:
        return cuda.CUmodule(hfunc.module.handle)

    def cuFuncGetName(self, hfunc: NamedFunction) -> bytes:
        return hfunc.name.encode()

    cuKernelGetName = call(cuFuncGetName, hfunc=arguments.NamedKernel)

    def cuFuncIsLoaded(self, function: Function) -> Any:
        return cuda.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED

    def _ignored(self, *unused: Any) -> None:
        """Do nothing: caches and lazy loading of kernels are not simulated."""

    cuFuncLoad = cuFuncSetCacheConfig = cuFuncSetSharedMemConfig = cuKernelSetCacheConfig = call(_ignored)

    def _parameter(self, function: Function, index: int) -> tuple[int, int]:
        types = self._types(function)
        check(index < len(types))
        return offsets(types)[index], ctypes.sizeof(types[index])

    cuFuncGetParamInfo = cuKernelGetParamInfo = call(_parameter, func=NamedFunction, kernel=arguments.NamedKernel)

    def _parameter_count(self, function: Function) -> int:
        return len(self._types(function))

    cuFuncGetParamCount = cuKernelGetParamCount = call(_parameter_count)

    @staticmethod
    def _types(function: Function) -> tuple[Any, ...]:
        return need(function.types, f"the parameters of {function.name!r}: register it with testing.kernel(types=...)")

    # -- attributes ------------------------------------------------------------------------------------------

    def _bound(self, name: str, device: Any = None) -> int:
        """Return the device attribute ``name``, a limit for kernels. ``device``: None for the device of the current
        context.
        """
        return int((device or self.current().device).attributes[name])

    def _attribute(self, attribute: Any, function: Function, *unused: Any) -> int:
        """Return an attribute of a function: the value that was set, or registered, or else that of an empty kernel."""
        number = arguments.member("attrib", attribute, _ATTRIBUTE)
        name = attribute.name.removeprefix(_PREFIX)
        check(number <= _LAST)
        if number in function.attributes:
            return function.attributes[number]
        if name in function.registered:
            return int(function.registered[name])
        device = self.devices[0]
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
            most = self._bound("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self.devices[0])
            check(0 <= value <= most - int(function.registered.get("SHARED_SIZE_BYTES", 0)))
        elif number == _CARVEOUT:
            check(-1 <= value <= 100)
        function.attributes[number] = value

    cuFuncSetAttribute = call(_set_attribute)

    def cuKernelSetAttribute(self, attrib: Any, val: Int, kernel: Kernel, dev: Device) -> None:
        self._set_attribute(kernel, attrib, val)

    cuFuncGetAttribute = cuKernelGetAttribute = call(_attribute)

    # -- occupancy -------------------------------------------------------------------------------------------

    def _blocks(self, function: Function, block: int, dynamic: int, *flags: int) -> int:
        """Return the number of blocks that fit a multiprocessor. Each block has ``block`` threads and ``dynamic`` bytes
        of dynamic shared memory.
        """
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

    cuOccupancyMaxActiveBlocksPerMultiprocessor = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = call(_blocks)

    def _best_block(self, function: Function, shared_of: Any, dynamic: int, most: int, *flags: int) -> tuple[int, int]:
        """Return a tuple: the number of blocks that fills the device, and the block size for which most threads run at
        the same time.

        ``shared_of``: address of a host function that maps a block size to bytes of shared memory; 0: each block has
        ``dynamic`` bytes. ``most``: the largest block size to try; 0: no such limit.
        """
        address = int(shared_of or 0)
        shared = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(address) if address else lambda block: dynamic
        largest = self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        sizes = range(min(most or largest, largest) // 32 * 32, 0, -32)
        counts = {size: self._blocks(function, size, shared(size)) for size in sizes}
        best = max(sizes, key=lambda size: size * counts[size])
        return counts[best] * self._bound("MULTIPROCESSOR_COUNT"), best

    cuOccupancyMaxPotentialBlockSize = cuOccupancyMaxPotentialBlockSizeWithFlags = call(_best_block)

    def cuOccupancyAvailableDynamicSMemPerBlock(self, func: Function, numBlocks: Int, blockSize: Int) -> int:
        check(numBlocks > 0 and blockSize > 0)
        static = int(func.registered.get("SHARED_SIZE_BYTES", 0))
        share = self._bound("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // numBlocks - static
        # The driver promises no more bytes than a launch may ask for (observed on H200: test_modules).
        allowed = self._attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, func)
        return max(min(share, allowed), 0)

    # -- launches --------------------------------------------------------------------------------------------

    def _shape(self, function: Function, sizes: tuple[int, ...], cooperative: bool = False) -> LaunchShape:
        """Check the sizes of a launch, and return its shape. ``sizes``: x, y and z of the grid, x, y and z of a block,
        then the bytes of dynamic shared memory per block.
        """
        x, y, z, block_x, block_y, block_z, shared = sizes
        limit, attribute = self._bound, self._attribute
        names = (f"MAX_{part}_DIM_{axis}" for part in ("GRID", "BLOCK") for axis in "XYZ")
        check(all(0 < size <= limit(name) for size, name in zip(sizes, names, strict=False)))
        threads = block_x * block_y * block_z
        check(threads <= attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function))
        check(shared <= attribute(_ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function))
        if cooperative:
            most = self._blocks(function, threads, shared) * limit("MULTIPROCESSOR_COUNT")
            check(x * y * z <= most, Result.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
        return LaunchShape((x, y, z), (block_x, block_y, block_z), shared, cooperative)

    def _launch_of(
        self, context: Context, function: Function, shape: LaunchShape, params: tuple[Any, Any]
    ) -> tuple[Operation, Cells]:
        """Return a tuple of the operation that runs a launch, and the launch's arguments.

        If the machine ignores unknown kernels, the operation of such a kernel does nothing.
        """
        own = function.module.context
        check(own is None or own is context, Result.CUDA_ERROR_INVALID_HANDLE)
        if function.kernel is None:
            what = f"the kernel {function.name!r}: register a function for it with testing.kernel, or ignore kernels"
            not_modelled(self.spec.kernels != "ignore", what)
            packed(*params)
            return Operation(), ()
        cells = unpack(function.name, *params, function.types)
        return Launch(self, context, function, shape, tuple(map(plain, cells))), cells

    def _launch_in(
        self, stream: Stream, function: Function, sizes: Any, params: tuple[Any, Any], cooperative: bool
    ) -> None:
        shape = self._shape(function, tuple(sizes), cooperative)
        operation, cells = self._launch_of(stream.context, function, shape, params)
        self._submit(stream, operation, "KERNEL", lambda: node_values(function, shape, cells))

    def _launch_kernel(self, cooperative: bool, function: Function, *more: Any) -> None:
        self._launch_in(more[7], function, more[:7], (more[8], more[9] if more[9:] else 0), cooperative)

    cuLaunchKernel = call(_launch_kernel, False, hStream=arguments.Stream)
    cuLaunchCooperativeKernel = call(_launch_kernel, True, hStream=arguments.Stream)

    def cuLaunchKernelEx(self, config: cuda.CUlaunchConfig, f: Function, kernelParams: Any, extra: Any) -> None:
        """Launch a kernel with attributes. Attributes other than clusters and cooperation are ignored, because the
        simulated order of work is stricter.
        """
        sizes = extents_of(config)
        attributes = {one.id.name: one.value for one in list(config.attrs or ())[: int(config.numAttrs)]}
        if _CLUSTER in attributes:
            cluster = attributes[_CLUSTER].clusterDim
            for size, part in zip(sizes, (cluster.x, cluster.y, cluster.z), strict=False):
                check(part and size % int(part) == 0)
        cooperative = _COOPERATIVE in attributes and bool(attributes[_COOPERATIVE].cooperative)
        stream = self.stream(arguments.stream(config.hStream))
        self._launch_in(stream, f, (*sizes, int(config.sharedMemBytes)), (kernelParams, extra), cooperative)

    def kernel_uses(self, f: Any, params: Any, extra: Any = 0) -> list[tuple[int, int, bool, bool]] | None:
        """Return the memory that a launch of the function ``f`` uses: tuples of address, size in bytes, write flag and
        atomic flag. None if unknown.

        This is not a driver function: the checker calls it. Bytes that are read and written count as written. Raises
        the errors of :func:`unpack`.
        """
        function = self.functions.get(int(cuda.CUfunction(f or 0)))
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
        self.current()
        return cuda.CUlinkState(self.links.add(kernels.Linker()).handle)

    def _add_text(self, link: Link, typename: Any, data: Any, size: int, *rest: Any) -> None:
        check(size)
        link.texts.append(ctypes.string_at(arguments.host_pointer(data), size).rstrip(b"\0"))

    def _add_file(self, link: Link, typename: Any, path: Any, *options: Any) -> None:
        link.texts.append(_path(path))

    cuLinkAddData = call(_add_text)
    cuLinkAddFile = call(_add_file)

    def cuLinkComplete(self, state: Link) -> tuple[int, int]:
        parts = b"\n".join(state.texts)
        made = parts if b".version" in parts or parts.startswith(BINARIES) else BINARIES[0] + parts
        state.linked = ctypes.create_string_buffer(made)
        return ctypes.addressof(state.linked), len(state.linked)

    def cuLinkDestroy(self, state: Link) -> None:
        del self.links[state.handle]


def extents_of(struct: Any) -> tuple[int, ...]:
    """Return x, y and z of a launch's grid in blocks, then x, y and z of a block in threads."""
    return tuple(int(getattr(struct, f"{part}Dim{axis}")) for part in ("grid", "block") for axis in "XYZ")


def node_values(function: Function, shape: LaunchShape, cells: Cells) -> Values:
    """Return the parameters of a kernel node: fields of CUDA_KERNEL_NODE_PARAMS, and ``cells``.

    The entry ``cells`` keeps the memory alive to which ``kernelParams`` refers.
    """
    slots = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(one) for one in cells if isinstance(one, CELLS)))
    values: Values = {"func": cuda.CUfunction(function.handle), "sharedMemBytes": shape.shared_bytes}
    for part, extent in (("grid", shape.grid), ("block", shape.block)):
        values.update({f"{part}Dim{axis}": size for axis, size in zip("XYZ", extent, strict=True)})
    return {**values, "kernelParams": ctypes.addressof(slots) if cells else 0, "cells": (slots, cells)}
