"""The functions of cuda.bindings.runtime over a simulated machine."""

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from streamalloc import driver as sd
from streamalloc import testing
from streamalloc.driver.bindings import cuda, runtime, signature
from streamalloc.simulator.driver import SimulatedDriver
from streamalloc.simulator.internal import Runtime
from streamalloc.simulator.runtime import OTHER_LAYOUT, OWN, driver_call, properties
from tests.support import each_raises, in_a_thread

pytestmark = pytest.mark.simulated_only("the runtime over the simulated driver")

cudart: Any = runtime()
Kind = cudart.cudaMemcpyKind
Error = cudart.cudaError_t
_CUDA_13 = hasattr(cuda, "cuMemGetDefaultMemPool")
_EDGES = [None] * _CUDA_13
"""The list of edge data in calls of graphs, which came with CUDA 13."""


def ok(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == Error.cudaSuccess, answer
    return answer[1] if len(answer) == 2 else answer[1:]


@pytest.fixture
def rt(machine: Any) -> Any:
    return Runtime(machine)


_CALLS = {
    "cudaDeviceGetLimit": "cuCtxGetLimit",
    "cudaDeviceGetP2PAttribute": "cuDeviceGetP2PAttribute",
    "cudaDeviceFlushGPUDirectRDMAWrites": "cuFlushGPUDirectRDMAWrites",
    "cudaEventCreateWithFlags": "cuEventCreate",
    "cudaFree": "cuMemFree",
    "cudaFreeArray": "cuArrayDestroy",
    "cudaFreeMipmappedArray": "cuMipmappedArrayDestroy",
    "cudaGetDeviceCount": "cuDeviceGetCount",
    "cudaGetDeviceFlags": "cuCtxGetFlags",
    "cudaGetMipmappedArrayLevel": "cuMipmappedArrayGetLevel",
    "cudaGraphInstantiateWithFlags": "cuGraphInstantiate",
    "cudaHostRegister": "cuMemHostRegister",
    "cudaMallocFromPoolAsync": "cuMemAllocFromPoolAsync",
    "cudaStreamCreateWithFlags": "cuStreamCreate",
}


@pytest.mark.parametrize(("name", "call"), _CALLS.items())
def test_a_function_is_a_driver_call_with_the_same_parameters_and_results(name: str, call: str) -> None:
    assert driver_call(name) == call
    (ours, results), (theirs, their_results) = signature(cuda, call), signature(cudart, name)
    assert len(ours.parameters) == len(theirs.parameters) and len(results) == len(their_results)


def fields(cls: Any) -> set[str]:
    return {name for name in dir(cls) if not name.startswith(("_", "reserved"))}


def is_struct(cls: Any) -> bool:
    return isinstance(cls, type) and not issubclass(cls, int) and hasattr(cls, "getPtr") and not hasattr(cls, "__int__")


_SAME_BYTES = {"cudaGraphInstantiateParams", "cudaKernelNodeParams", "cudaMemPoolProps"}
"""Structs with the driver's first bytes, whose fields have other names, or are fewer."""


def test_structs_are_those_of_the_driver_byte_by_byte_or_are_converted() -> None:
    modelled = {name for cls in SimulatedDriver.__mro__ for name in vars(cls)}
    compared = set()
    for name in [one for one in dir(cudart) if one.startswith("cuda") and one not in OWN]:
        call = None if isinstance(getattr(cudart, name), type) else driver_call(name)
        if call in modelled:
            both = signature(cudart, name), signature(cuda, call)
            kinds = [[one.annotation for one in taken.parameters.values()] for taken, _ in both]
            for their, our in [*zip(*kinds, strict=False), *zip(both[0][1], both[1][1], strict=False)]:
                compared.add((their.removeprefix("[]"), our.removeprefix("[]")))
    pairs = {one: (getattr(cudart, one, None), getattr(cuda, other, None)) for one, other in compared}
    structs = {name: pair for name, pair in pairs.items() if all(map(is_struct, pair))}
    assert structs.keys() > {*OTHER_LAYOUT, "cudaMemLocation", "cudaMemAllocNodeParams"}
    for name in structs.keys() - {*OTHER_LAYOUT, *_SAME_BYTES}:
        one, other = structs[name]
        assert fields(one) == fields(other), name
        assert cudart.sizeof(one) == cuda.sizeof(other), name


def test_the_fields_of_properties_are_device_attributes() -> None:
    names = {field: [one.name for one in members] for field, members in properties().items()}
    prefix = "CU_DEVICE_ATTRIBUTE_"
    assert names["warpSize"] == [f"{prefix}WARP_SIZE"]
    assert names["maxThreadsDim"] == [f"{prefix}MAX_BLOCK_DIM_{axis}" for axis in "XYZ"]
    assert names["maxTexture1D"] == [f"{prefix}MAXIMUM_TEXTURE1D_WIDTH"]
    parts = ("WIDTH", "HEIGHT", "LAYERS")
    assert names["maxSurface2DLayered"] == [f"{prefix}MAXIMUM_SURFACE2D_LAYERED_{one}" for one in parts]
    parts = ("WIDTH", "HEIGHT", "DEPTH")
    assert names["maxTexture3DAlt"] == [f"{prefix}MAXIMUM_TEXTURE3D_{one}_ALTERNATE" for one in parts]
    fields = {one for one in dir(cudart.cudaDeviceProp) if not one.startswith("_")}
    others = {"getPtr", "luid", "luidDeviceNodeMask", "name", "reserved", "totalGlobalMem", "uuid"}
    assert fields - names.keys() <= others
    one_each = {field for field, members in names.items() if len(members) == 1}
    assert {field for field in names if type(getattr(cudart.cudaDeviceProp(), field)) is int} == one_each


@in_a_thread
def test_a_call_makes_the_primary_context_current() -> None:
    driver: Any = sd.simulated(devices=2)
    rt: Any = Runtime(driver)
    assert ok(rt.cudaGetDeviceCount()) == 2 and ok(rt.cudaGetDevice()) == 0
    assert int(driver.cuCtxGetCurrent()[1]) == 0
    memory = ok(rt.cudaMalloc(100))
    assert type(memory) is int and ok(rt.cudaPointerGetAttributes(memory)).device == 0
    ok(rt.cudaSetDevice(1))
    assert int(driver.cuCtxGetDevice()[1]) == ok(rt.cudaGetDevice()) == 1
    assert ok(rt.cudaPointerGetAttributes(ok(rt.cudaMalloc(100)))).device == 1
    assert ok(rt.cudaDeviceGetByPCIBusId(ok(rt.cudaDeviceGetPCIBusId(16, 1)))) == 1
    assert not _CUDA_13 or int(driver.cuCtxGetDevice_v2(None)[1]) == 1
    assert rt.cudaSetDevice(2) == (Error.cudaErrorInvalidDevice,)
    ok(rt.cudaSetDeviceFlags(cudart.cudaDeviceScheduleSpin))
    assert ok(rt.cudaGetDeviceFlags()) == cudart.cudaDeviceScheduleSpin | cudart.cudaDeviceMapHost
    assert rt.cudaSetDeviceFlags(3) == (Error.cudaErrorInvalidValue,)
    ok(rt.cudaDeviceReset())
    ok(rt.cudaMalloc(100))


def test_a_finaliser_may_use_the_runtime_while_a_context_is_made(machine: Any) -> None:
    """Both retain the primary context, and one of them releases it again."""

    class Collected:
        """A driver in which the collector runs before a context is retained."""

        def __getattr__(self, name: str) -> Any:
            return getattr(machine, name)

        def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
            if not freed:
                freed.append(True)
                freed.append(rt.cudaFree(0))
            return machine.cuDevicePrimaryCtxRetain(device)

    def use() -> None:
        ok(rt.cudaSetDevice(0))
        ok(rt.cudaDeviceReset())

    freed: list[Any] = []
    rt = Runtime(Collected())
    other = threading.Thread(target=use, daemon=True)
    other.start()
    other.join(5)
    assert not other.is_alive() and freed == [True, (Error.cudaSuccess,)]
    assert machine.cuDevicePrimaryCtxGetState(0)[2] == 0


def test_the_last_error_is_returned_once(rt: Any) -> None:
    assert rt.cudaMemPoolTrimTo(cudart.cudaMemPool_t(12345), 0) == (Error.cudaErrorInvalidValue,)
    ok(rt.cudaMalloc(1))
    assert rt.cudaPeekAtLastError() == rt.cudaGetLastError() == (Error.cudaErrorInvalidValue,)
    assert rt.cudaGetLastError() == (Error.cudaSuccess,)
    assert rt.cudaGetErrorName(Error.cudaErrorMemoryAllocation) == (Error.cudaSuccess, b"cudaErrorMemoryAllocation")


@pytest.mark.resets_contexts
def test_a_lost_context_is_the_last_error_once(rt: Any, machine: Any) -> None:
    @testing.kernel("fails", types=[])
    def fails() -> None:
        raise ValueError("no kernel")

    ok(rt.cudaFree(0))
    try:
        function = machine.cuModuleGetFunction(machine.cuModuleLoadData(b"\x7fELF")[1], b"fails")[1]
        machine.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        lost = (Error.cudaErrorLaunchFailure,)
        assert rt.cudaDeviceSynchronize() == rt.cudaGetLastError() == lost
        assert rt.cudaGetLastError() == (Error.cudaSuccess,)
        assert rt.cudaMalloc(1)[:1] == lost
    finally:
        testing.unregister_kernel("fails")
        machine.cuDevicePrimaryCtxReset(0)


def test_copies_by_kind(rt: Any) -> None:
    source, found = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 16), np.uint8)
    stream = ok(rt.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
    row = ok(rt.cudaMalloc(64))
    ok(rt.cudaMemcpyAsync(row, source, 64, Kind.cudaMemcpyHostToDevice, stream))
    plane, pitch = ok(rt.cudaMallocPitch(16, 4))
    ok(rt.cudaMemcpy2DAsync(plane, pitch, row, 16, 16, 4, Kind.cudaMemcpyDeviceToDevice, stream))
    ok(rt.cudaStreamSynchronize(stream))
    ok(rt.cudaMemcpy2D(found, 16, plane, pitch, 16, 4, Kind.cudaMemcpyDeviceToHost))
    assert (found == source).all()
    ok(rt.cudaMemset2D(plane, pitch, 0x107, 16, 2))
    parameters = cudart.cudaMemcpy3DParms()
    for pointer, memory, width in ((parameters.srcPtr, plane, pitch), (parameters.dstPtr, found.ctypes.data, 16)):
        pointer.ptr, pointer.pitch, pointer.xsize, pointer.ysize = memory, width, 16, 2
    parameters.extent.width, parameters.extent.height, parameters.extent.depth = 16, 2, 2
    parameters.kind = Kind.cudaMemcpyDefault
    ok(rt.cudaMemcpy3D(parameters))
    assert (found[:2] == 7).all() and (found[2:] == source[2:]).all()
    wrong = rt.cudaMemcpy2D(found, 8, plane, pitch, 16, 4, Kind.cudaMemcpyDeviceToHost)
    assert wrong == (Error.cudaErrorInvalidValue,)
    with pytest.raises(AttributeError):
        rt.cudaMemcpy(row, source, 64, 1)


@pytest.mark.bindings("13.0")
def test_batches_of_copies(rt: Any) -> None:
    source, found = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 16), np.uint8)
    row, other, stream = ok(rt.cudaMalloc(64)), ok(rt.cudaMalloc(16)), ok(rt.cudaStreamCreate())
    ok(rt.cudaMemset(other, 7, 16))
    order = cudart.cudaMemcpyAttributes()
    order.srcAccessOrder = cudart.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    ok(rt.cudaMemcpyBatchAsync([row, row + 32], [source[2], other], [16, 16], 2, [order], [0], 1, stream))
    ok(rt.cudaStreamSynchronize(stream))
    ok(rt.cudaMemcpy(found, row, 64, Kind.cudaMemcpyDeviceToHost))
    assert (found[0] == source[2]).all() and (found[2] == 7).all()


def test_copies_of_boxes_between_devices() -> None:
    rt: Any = Runtime(sd.simulated(devices=2))
    source, found = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 16), np.uint8)
    there = ok(rt.cudaMalloc(64))
    ok(rt.cudaMemcpy(there, source, 64, Kind.cudaMemcpyHostToDevice))
    ok(rt.cudaSetDevice(1))
    here = ok(rt.cudaMalloc(64))
    channel = ok(cudart.cudaCreateChannelDesc(8, 0, 0, 0, cudart.cudaChannelFormatKind.cudaChannelFormatKindUnsigned))
    array = ok(rt.cudaMallocArray(channel, 16, 4, 0))
    box = cudart.cudaMemcpy3DPeerParms()
    box.srcPtr, box.dstPtr = cudart.make_cudaPitchedPtr(there, 16, 16, 4), cudart.make_cudaPitchedPtr(here, 16, 16, 4)
    box.dstDevice, box.extent = 1, cudart.make_cudaExtent(16, 4, 1)
    ok(rt.cudaMemcpy3DPeer(box))
    box.srcPtr.ptr, box.srcDevice, box.dstArray = here, 1, array
    ok(rt.cudaMemcpy3DPeerAsync(box, 0))
    ok(rt.cudaMemcpy2DFromArray(found, 16, array, 0, 0, 16, 4, Kind.cudaMemcpyDeviceToHost))
    assert (found == source).all()
    box.srcDevice = 2
    assert rt.cudaMemcpy3DPeer(box) == (Error.cudaErrorInvalidDevice,)
    box.srcPtr.ptr, box.srcDevice = there, 0
    with pytest.raises(NotImplementedError, match="of an array between two devices"):
        rt.cudaMemcpy3DPeer(box)
    assert rt.cudaMemcpy3DPeer(None) == (Error.cudaErrorInvalidValue,)


def test_nodes_of_any_kind(rt: Any) -> None:
    graph, kinds, found = ok(rt.cudaGraphCreate(0)), cudart.cudaGraphNodeType, np.zeros(64, np.uint8)
    fill, copy, memory = (cudart.cudaGraphNodeParams() for _ in range(3))
    fill.type, copy.type, memory.type = (
        kinds.cudaGraphNodeTypeMemset,
        kinds.cudaGraphNodeTypeMemcpy,
        kinds.cudaGraphNodeTypeMemAlloc,
    )
    memory.alloc.poolProps.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned
    memory.alloc.poolProps.location.type = cudart.cudaMemLocationType.cudaMemLocationTypeDevice
    memory.alloc.bytesize, target = 64, ok(rt.cudaMalloc(64))
    node = ok(rt.cudaGraphAddNode(graph, None, *_EDGES, 0, memory))
    fill.memset.dst, fill.memset.value, fill.memset.elementSize = memory.alloc.dptr, 7, 1
    fill.memset.width, fill.memset.height = 64, 1
    node = ok(rt.cudaGraphAddNode(graph, [node], *_EDGES, 1, fill))
    box = copy.memcpy.copyParams
    box.srcPtr = cudart.make_cudaPitchedPtr(memory.alloc.dptr, 64, 64, 1)
    box.dstPtr = cudart.make_cudaPitchedPtr(target, 64, 64, 1)
    box.extent, box.kind = cudart.make_cudaExtent(64, 1, 1), Kind.cudaMemcpyDefault
    node = ok(rt.cudaGraphAddNode(graph, [node], *_EDGES, 1, copy))
    ok(rt.cudaGraphLaunch(ok(rt.cudaGraphInstantiate(graph, 0)), 0))
    ok(rt.cudaMemcpy(found, target, 64, Kind.cudaMemcpyDeviceToHost))
    assert (found == 7).all()
    ok(rt.cudaFree(memory.alloc.dptr))
    with pytest.raises(NotImplementedError, match="cudaGraphMemcpyNodeGetParams"):
        rt.cudaGraphMemcpyNodeGetParams(node)


def test_structs_enumerations_and_handles(rt: Any) -> None:
    assert rt.cudaMalloc(0) == (Error.cudaSuccess, 0)
    each_raises(TypeError, lambda: rt.cudaMalloc(None))
    properties = cudart.cudaMemPoolProps()
    properties.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned
    properties.location.type = cudart.cudaMemLocationType.cudaMemLocationTypeDevice
    pool = ok(rt.cudaMemPoolCreate(properties))
    assert type(pool) is cudart.cudaMemPool_t
    threshold = cudart.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    ok(rt.cudaMemPoolSetAttribute(pool, threshold, cuda.cuuint64_t(9)))
    assert int(ok(rt.cudaMemPoolGetAttribute(pool, threshold))) == 9
    access = ok(rt.cudaMemPoolGetAccess(pool, properties.location))
    assert access is cudart.cudaMemAccessFlags.cudaMemAccessFlagsProtReadWrite
    stream = ok(rt.cudaStreamCreate())
    memory = ok(rt.cudaMallocFromPoolAsync(64, pool, stream))
    ok(rt.cudaMemsetAsync(memory, 1, 64, stream))
    ok(rt.cudaFreeAsync(memory, stream))
    assert rt.cudaMemPoolCreate(poolProps=None) == (Error.cudaErrorInvalidValue, None)
    each_raises(TypeError, lambda: rt.cudaMemPoolCreate(5), match=r"cudaMemPoolProps, got int")
    with pytest.raises(TypeError, match=r"multiple values|unexpected keyword"):
        rt.cudaMemPoolGetAttribute(pool, attr=threshold, more=1)


def test_graphs(rt: Any) -> None:
    stream, memory = ok(rt.cudaStreamCreate()), ok(rt.cudaMalloc(64))
    ok(rt.cudaStreamBeginCapture(stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    ok(rt.cudaMemsetAsync(memory, 3, 32, stream))
    status, _, _, nodes, *edges, count = ok(rt.cudaStreamGetCaptureInfo(stream))
    assert status is cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    assert [type(one) for one in nodes] == [cudart.cudaGraphNode_t] and count == 1
    assert [len(one) for one in edges] == [1] * len(_EDGES)
    graph = ok(rt.cudaStreamEndCapture(stream))
    assert ok(rt.cudaGraphMemsetNodeGetParams(nodes[0])).width == 32
    params = cudart.cudaMemAllocNodeParams()
    params.bytesize, params.poolProps.location.type = 64, cudart.cudaMemLocationType.cudaMemLocationTypeDevice
    params.poolProps.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned
    made = ok(rt.cudaGraphAddMemAllocNode(graph, nodes, 1, params))
    copied = ok(rt.cudaGraphAddMemcpyNode1D(graph, [made], 1, params.dptr, memory, 32, Kind.cudaMemcpyDeviceToDevice))
    back = memory + 32, params.dptr, 32, Kind.cudaMemcpyDeviceToDevice
    ok(rt.cudaGraphAddMemFreeNode(graph, [ok(rt.cudaGraphAddMemcpyNode1D(graph, [copied], 1, *back))], 1, params.dptr))
    ok(rt.cudaGraphLaunch(ok(rt.cudaGraphInstantiate(graph, 0)), stream))
    ok(rt.cudaStreamSynchronize(stream))
    found = np.zeros(64, np.uint8)
    ok(rt.cudaMemcpy(found, memory, 64, Kind.cudaMemcpyDeviceToHost))
    assert (found == 3).all()


def test_host_nodes(rt: Any) -> None:
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    pointer = ctypes.cast(function, ctypes.c_void_p).value
    stream = ok(rt.cudaStreamCreate())
    ok(rt.cudaStreamBeginCapture(stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    ok(rt.cudaLaunchHostFunc(stream, cudart.cudaHostFn_t(pointer), 5))
    graph = ok(rt.cudaStreamEndCapture(stream))
    (node,) = ok(rt.cudaGraphGetRootNodes(graph, 1))[0]
    params = ok(rt.cudaGraphHostNodeGetParams(node))
    assert (int(params.fn), params.userData) == (pointer, 5)
    instance = ok(rt.cudaGraphInstantiate(graph, 0))
    params.userData = 6
    ok(rt.cudaGraphExecHostNodeSetParams(instance, node, params))
    ok(rt.cudaGraphLaunch(instance, stream))
    ok(rt.cudaStreamSynchronize(stream))
    assert seen == [6]


def test_kernels_of_a_library(rt: Any) -> None:
    seen: list[int] = []
    testing.kernel("count", types=[ctypes.c_int])(seen.append)
    try:
        kernel = ok(
            rt.cudaLibraryGetKernel(ok(rt.cudaLibraryLoadData(b"\x7fELF", None, None, 0, None, None, 0)), b"count")
        )
        assert ok(rt.cudaFuncGetAttributes(kernel)).maxThreadsPerBlock == 1024
        params = cudart.cudaKernelNodeParams()
        params.func = int(kernel)
        for extent in (params.gridDim, params.blockDim):
            extent.x = extent.y = extent.z = 1
        params.kernelParams = ((7,), (ctypes.c_int,))
        graph = ok(rt.cudaGraphCreate(0))
        ok(rt.cudaGraphAddKernelNode(graph, None, 0, params))
        ok(rt.cudaGraphLaunch(ok(rt.cudaGraphInstantiate(graph, 0)), 0))
        ok(rt.cudaDeviceSynchronize())
    finally:
        testing.unregister_kernel("count")
    assert seen == [7]


def test_arrays(rt: Any) -> None:
    channels = ok(cudart.cudaCreateChannelDesc(16, 16, 0, 0, cudart.cudaChannelFormatKind.cudaChannelFormatKindSigned))
    array, other = (ok(rt.cudaMallocArray(channels, 8, 4, cudart.cudaArraySurfaceLoadStore)) for _ in range(2))
    described, extent, flags = ok(rt.cudaArrayGetInfo(array))
    assert [described.x, described.y, described.z, described.w, int(described.f)] == [16, 16, 0, 0, 0]
    assert (extent.width, extent.height, extent.depth, flags) == (8, 4, 0, cudart.cudaArraySurfaceLoadStore)
    model, part = np.arange(128, dtype=np.uint8).reshape(4, 32), np.full((2, 16), 200, np.uint8)
    line, rows = np.zeros(12, np.uint8), np.zeros((2, 12), np.uint8)
    ok(rt.cudaMemcpy2DToArray(array, 0, 0, model, 32, 32, 4, Kind.cudaMemcpyHostToDevice))
    ok(rt.cudaMemcpy2DToArray(array, 4, 1, part, 16, 12, 2, Kind.cudaMemcpyHostToDevice))
    model[1:3, 4:16] = 200
    ok(rt.cudaMemcpy2DArrayToArray(other, 0, 0, array, 4, 2, 8, 1, Kind.cudaMemcpyDeviceToDevice))
    ok(rt.cudaMemcpyFromArray(line, other, 0, 0, 8, Kind.cudaMemcpyDeviceToHost))
    assert (line[:8] == model[2, 4:12]).all()
    ok(rt.cudaMemcpyFromArray(line, array, 4, 1, 12, Kind.cudaMemcpyDeviceToHost))
    assert (line == model[1, 4:16]).all()
    box = cudart.cudaMemcpy3DParms()
    box.srcArray, box.kind, box.extent = array, Kind.cudaMemcpyDeviceToHost, cudart.make_cudaExtent(3, 2, 1)
    box.srcPos.x = 2  # four bytes an element
    box.dstPtr.ptr, box.dstPtr.pitch, box.dstPtr.ysize = rows.ctypes.data, 12, 2
    ok(rt.cudaMemcpy3D(box))
    assert (rows == model[:2, 8:20]).all()


def test_what_is_not_modelled_says_so(rt: Any) -> None:
    each_raises(NotImplementedError, lambda: rt.cudaChooseDevice(cudart.cudaDeviceProp()), match="cudaChooseDevice")
    with pytest.raises(NotImplementedError, match="cuGraphDebugDotPrint"):
        rt.cudaGraphDebugDotPrint(ok(rt.cudaGraphCreate(0)), b"", 0)
