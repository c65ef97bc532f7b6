"""Calls that need memory which was freed, values in memory, and host memory at the addresses of freed memory."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np

from streamalloc import testing, vmm
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import GONE, PAGE, RAW_ACTS, SIZE, Bench, hazard, programs
from tests.checker.corpus.nodes import Graph

programs(
    """
free racing a use
    a_copy_is_refused_as_another_stream_frees: x = new a; y = new b; a > b; + cuMemcpyDtoDAsync y x 4096 b; + b > a;
        free x; - cuMemcpyDtoDAsync y x 4096 b
use after free
    access_is_granted_after_the_unmap: m = mapped; - unmap m; grant m 3
    freed_memory_is_exported: x = cuMemAlloc 4096; - cuMemFree x; cuIpcGetMemHandle x; + cuMemFree x
    freed_memory_is_written_by_a_value: x = cuMemAlloc 4096; - cuMemFree x; put a x 0; synchronize a; + cuMemFree x
    freed_memory_is_waited_for_by_a_value: x = cuMemAlloc 4096; + cuMemsetD8 x 0 4; + synchronize device; - cuMemFree x;
        until a x 0; synchronize a; + cuMemFree x
    freed_memory_is_filled_in_a_capture: x = cuMemAlloc 4096; - cuMemFree x; begin a; cuMemsetD8Async x 1 4096 a; end;
        + cuMemFree x
    freed_memory_is_filled_by_a_node: x = cuMemAlloc 4096; - cuMemFree x; g = graph; node g x; + cuMemFree x
    freed_memory_is_set_up_for_synchronous_copies: x = cuMemAlloc 4096; - cuMemFree x; synchronous x; + cuMemFree x
""",
    simulated=GONE,
)
programs(
    """
unmap while in use
    a_value_is_unmapped_while_a_stream_writes_it: m = mapped; put a m 1; + synchronize a; unmap m
""",
    simulated="the write of hardware may fault, which ends the context",
)
programs(
    """
release while in use
    a_value_is_freed_while_a_stream_waits_for_it: w = cuMemHostAlloc 64 0; cuMemsetD8 w 0 64; synchronize device;
        until a w 1; + open w; + synchronize a; - open_soon w; cuMemFreeHost w
""",
    simulated="a free of hardware waits there, which nobody has promised",
)
programs(
    """
use after free
    a_kernel_is_launched_after_the_free: x = cuMemAlloc 4096; y = cuMemAlloc 4096; - cuMemFree x; kernel x 4096;
        + cuMemFree x; cuMemFree y
out of bounds
    a_kernel_goes_beyond_its_memory: x = cuMemAlloc 4096; kernel x 4096|4100; cuMemFree x
""",
    simulated="kernels of the simulated driver say what they use",
)
programs(
    """
out of bounds
    a_kernel_writes_its_neighbour: x = new a 512; y = new a 512; at x a 512|513
"""
)
programs(
    """
race
    a_variable_is_copied_to_while_it_is_read: m = module; v = variable m; cuMemsetD8Async v 1 4096 a; + a > b; look v b;
        synchronize device; cuModuleUnload m
use after free
    a_variable_has_ended_with_its_module: m = module; v = variable m; + at v a; cuModuleUnload m; - at v a
""",
    simulated="modules of the simulated driver need no code",
)

_LIBC = ctypes.CDLL(None)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_FIXED_NOREPLACE = 0x100000


@testing.kernel("corpus_write", writes=lambda address, nbytes: [(address, nbytes)])
def _write(address: np.uint64, nbytes: np.int32) -> None:
    """Use memory; all that is checked is said in the line above."""


def _launch(b: Bench, address: int, nbytes: int) -> None:
    module = b.raw("cuModuleLoadData", b"\x7fELF")
    arguments = ((int(address), nbytes), (ctypes.c_void_p, ctypes.c_int))
    function = b.raw("cuModuleGetFunction", module, b"corpus_write")
    b.raw("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, cuda.CUstream(b.a.handle), arguments, 0)
    b.raw("cuCtxSynchronize")
    b.raw("cuModuleUnload", module)


testing.device_global("corpus_table", SIZE)
RAW_ACTS["kernel"] = _launch
_SYNC = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
RAW_ACTS["synchronous"] = lambda b, address: b.raw("cuPointerSetAttribute", True, _SYNC, address)
RAW_ACTS["module"] = lambda b: b.raw("cuModuleLoadData", b"\x7fELF")
RAW_ACTS["variable"] = lambda b, module: int(b.raw("cuModuleGetGlobal", module, b"corpus_table"))


@hazard("race", simulated="hardware crashes at host memory in its own address range")
def host_memory_at_the_addresses_of_a_mapping(b: Bench, right: bool) -> None:
    """The host memory is right; that a copy from it is followed shows by what the copy writes."""
    addresses = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    memory = b.keep(vmm.PhysicalMemory(b.device, PAGE))
    b.raw("cuMemMap", addresses, PAGE, 0, cuda.CUmemGenericAllocationHandle(memory.handle), 0)
    b.raw("cuMemUnmap", addresses, PAGE)
    b.raw("cuMemAddressFree", addresses, PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    there = _LIBC.mmap(addresses, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.raw("cuMemcpyHtoDAsync", x.address, there, SIZE, cuda.CUstream(b.a.handle))
    b.order(b.a, b.b, right)
    b.write(x, b.b)
    b.done(x)
    _LIBC.munmap(ctypes.c_void_p(there), ctypes.c_size_t(PAGE))


@hazard("race", simulated="a host function runs when it likes")
def a_function_of_a_graph_follows_a_gate_that_the_host_opens(b: Bench, right: bool) -> None:
    """The gate orders the graph after what the host has seen, not after all that was queued meanwhile."""
    x, gate = b.new(b.a), b.word()
    b.a.synchronize()
    called = threading.Event()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: called.set())
    stream = cuda.CUstream(b.a.handle)
    with b.a.capture() as graph:
        b.read(x, b.a)
        b.raw("cuLaunchHostFunc", stream, cuda.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
    b.keep(graph)
    b.raw("cuStreamWaitValue32", stream, gate, 1, 0)
    graph.launch(b.a)
    b.order(b.a, b.b, right)
    b.write(x, b.b)
    ctypes.c_uint32.from_address(gate).value = 1
    assert called.wait(10)


@hazard("race", simulated="modules of the simulated driver need no code")
def a_kernel_beside_a_fill_of_a_graph_is_given_other_memory(b: Bench, right: bool) -> None:
    x, y = b.ready(), b.ready()
    graph, module, params = Graph(b), b.raw("cuModuleLoadData", b"\x7fELF"), cuda.CUDA_KERNEL_NODE_PARAMS()
    params.func = b.raw("cuModuleGetFunction", module, b"corpus_write")
    for extent in ("gridDim", "blockDim"):
        for axis in "XYZ":
            setattr(params, f"{extent}{axis}", 1)
    graph.fill(x.address)
    params.kernelParams = ((y.address, SIZE), (ctypes.c_void_p, ctypes.c_int))
    b.raw("cuGraphKernelNodeSetParams", graph.add("Kernel", [], params), params)
    graph.launch(b.a)
    if right:
        b.b.wait(b.a.record())
    x.fill(2, b.b)
    b.device.synchronize()
    b.raw("cuModuleUnload", module)
