"""Kernels as Python functions."""

import ctypes
import io
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamalloc import driver as sd
from streamalloc import testing
from streamalloc.driver.bindings import cuda, runtime
from streamalloc.simulator.calls.kernels import offsets
from tests.facts.enums import DEVICE, READ
from tests.facts.support import PAGE, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import eventually

pytestmark = pytest.mark.resets_contexts  # and has kernels of the simulated driver

N = 256
PTX = b"""
.version 8.0  // .entry not_me()
.target sm_90
.visible .global .align 4 .u32 counter;
.const .align 4 .b8 table[64];
.global .u32 begun = 7;
.visible .entry scale(
    .param .u64 .ptr .global .align 4 scale_param_0,
    .param .f32 scale_param_1,
    .param .align 4 .b8 scale_param_2[12],
    .param .u32 scale_param_3
)
{ ret; }
"""
_ARRAY = np.frombuffer(PTX, np.uint8)
TYPES = (np.uint64, ctypes.c_float, ctypes.c_uint)


@pytest.fixture
def scale() -> Iterator[list[Any]]:
    """A kernel that multiplies, and its launches."""
    launches: list[Any] = []

    def uses(x: int, factor: float, count: int) -> list[tuple[int, int]]:
        return [(x, 4 * count)]

    @testing.kernel("scale", types=TYPES, reads=uses, writes=uses)
    def run(x: int, factor: float, count: int) -> None:
        launches.append(testing.current_launch())
        testing.device_view(x, count, np.float32)[:] *= factor

    yield launches
    testing.unregister_kernel("scale")


def load(raw: Any, name: bytes = b"scale", image: Any = b"\x7fELF") -> Any:
    return ok(raw.cuModuleGetFunction(ok(raw.cuModuleLoadData(image)), name))


def ones(raw: Any) -> Any:
    memory = ok(raw.cuMemAlloc(4 * N))
    ok(raw.cuMemcpyHtoD(memory, np.ones(N, np.float32), 4 * N))
    return memory


def contents(raw: Any, memory: Any) -> set[float]:
    found = np.empty(N, np.float32)
    ok(raw.cuMemcpyDtoH(found, memory, 4 * N))
    return set(found.tolist())


def launch(raw: Any, function: Any, params: Any, extra: Any = 0, stream: Any = 0, block: int = 32) -> Any:
    return raw.cuLaunchKernel(function, 1, 1, 1, block, 1, 1, 0, stream, params, extra)


def typed(memory: Any, factor: float) -> Any:
    return ((memory, factor, N), (None, ctypes.c_float, ctypes.c_uint))


@pytest.mark.parametrize("packing", ["typed", "array", "address", "ctypes", "extra"])
def test_arguments_arrive_from_every_packing(raw: Any, scale: list[Any], packing: str) -> None:
    function, memory = load(raw), ones(raw)
    values = ctypes.c_uint64(int(memory)), ctypes.c_float(2.5), ctypes.c_uint(N)
    addresses = [ctypes.addressof(one) for one in values]
    array = np.array(addresses, np.uint64)
    buffer = np.zeros(1, np.dtype([("x", "u8"), ("factor", "f4"), ("count", "u4")]))
    buffer[0] = (int(memory), 2.5, N)
    size = ctypes.c_size_t(buffer.nbytes)
    extra = np.array([1, buffer.ctypes.data, 2, ctypes.addressof(size), 0], np.uint64)
    given: dict[str, Any] = {
        "typed": (typed(memory, 2.5), 0),
        "array": (array, 0),
        "address": (array.ctypes.data, 0),
        "ctypes": ((ctypes.c_void_p * 3)(*addresses), 0),
        "extra": (0, extra.ctypes.data),
    }
    ok(launch(raw, function, *given[packing]))
    assert contents(raw, memory) == {2.5}


def test_the_bindings_refuse_other_packings(raw: Any, scale: list[Any]) -> None:
    function = load(raw)
    for wrong in ("text", ((1,), ()), ((1,), (3,))):
        with pytest.raises(TypeError):
            launch(raw, function, wrong)


def test_more_and_fewer_arguments_than_parameters(raw: Any, scale: list[Any]) -> None:
    function, memory = load(raw), ones(raw)
    values, kinds = typed(memory, 2.0)
    ok(launch(raw, function, ((*values, 7), (*kinds, ctypes.c_int))))
    assert contents(raw, memory) == {2.0}
    with pytest.raises(NotImplementedError, match="fewer arguments than 'scale'"):
        launch(raw, function, (values[:2], kinds[:2]))
    for none in (None, 0, ((), ())):
        assert launch(raw, function, none) == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)


@pytest.mark.parametrize(
    ("kind", "value", "count", "found"),
    [
        (ctypes.c_double, 2.5, ctypes.c_uint, 0.0),
        (ctypes.c_int, 0x40200000, ctypes.c_uint, 2.5),
        (ctypes.c_longlong, 0x40200000, ctypes.c_uint, 2.5),
        (ctypes.c_float, 2.5, ctypes.c_ushort, 2.5),  # shorter than its parameter
    ],
)
def test_parameters_read_own_types(raw: Any, scale: list[Any], kind: Any, value: Any, count: Any, found: float) -> None:
    memory = ones(raw)
    ok(launch(raw, load(raw), ((memory, value, N), (None, kind, count))))
    assert contents(raw, memory) == {found}


class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


@pytest.mark.parametrize("kind", [Dim3, None])
def test_structs_of_the_bindings(raw: Any, kind: Any) -> None:
    seen: list[Any] = []
    testing.kernel("sees", types=kind and [ctypes.c_int, kind])(lambda number, extent: seen.append(extent))
    try:
        extent = runtime().dim3()
        extent.x, extent.y, extent.z = 1, 2, 3
        ok(launch(raw, load(raw, b"sees"), ((5, extent), (ctypes.c_int, None))))
        ok(raw.cuCtxSynchronize())
    finally:
        testing.unregister_kernel("sees")
    assert [type(one) for one in seen] == [kind or runtime().dim3]
    assert [seen[0].x, seen[0].y, seen[0].z] == [1, 2, 3]


def plain(x: int, count: np.int32) -> None:
    """A kernel whose first parameter has no size."""


@pytest.mark.parametrize("function", [plain, lambda x: None])
def test_untyped_arguments_need_types(raw: Any, function: Any) -> None:
    testing.kernel("untyped")(function)
    try:
        with pytest.raises(NotImplementedError, match="untyped"):
            launch(raw, load(raw, b"untyped"), np.zeros(2, np.uint64))
    finally:
        testing.unregister_kernel("untyped")


@pytest.mark.parametrize("words", [(1, 0, 2, 0x1000, 0), (1, 0x1000, 2, 0x1000, 0)])
def test_extra_that_leads_nowhere(raw: Any, scale: list[Any], words: tuple[int, ...]) -> None:
    extra = np.array(words, np.uint64)
    with pytest.raises(NotImplementedError, match="extra where nothing lies"):
        launch(raw, load(raw), 0, extra.ctypes.data)


def test_only_functions_have_names() -> None:
    for wrong in (None, b"bytes", 5):
        with pytest.raises(TypeError, match="must be a str"):
            testing.kernel(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a function, got 5"):
        testing.kernel("five")(5)  # type: ignore[type-var]


def test_types_are_those_of_ctypes_or_numpy() -> None:
    for wrong in (int, object, "no type"):
        with pytest.raises(TypeError, match="no type of ctypes or NumPy"):
            testing.kernel("wrong", types=[wrong])


def test_a_launch_is_in_stream_order(raw: Any, scale: list[Any]) -> None:
    function, memory = load(raw), ones(raw)
    stream, word = ok(raw.cuStreamCreate(1)), ok(raw.cuMemHostAlloc(4, 0))
    ctypes.c_uint32.from_address(word).value = 0
    ok(raw.cuStreamWaitValue32(stream, word, 1, 0))
    config = cuda.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    kernel = ok(raw.cuLibraryGetKernel(ok(raw.cuLibraryLoadData(b"\x7fELF", None, None, 0, None, None, 0)), b"scale"))
    ok(launch(raw, function, typed(memory, 3.0), 0, stream, block=64))
    ok(raw.cuLaunchKernelEx(config, kernel, typed(memory, 2.0), 0))
    ok(raw.cuLaunchCooperativeKernel(function, 2, 1, 1, 1, 1, 1, 8, stream, typed(memory, 0.5)))
    assert not scale
    ctypes.c_uint32.from_address(word).value = 1
    ok(raw.cuStreamSynchronize(stream))
    assert contents(raw, memory) == {3.0}
    assert [(one.grid[0], one.block[0], one.shared_bytes, one.device) for one in scale] == [
        (1, 64, 0, 0),
        (1, 1, 0, 0),
        (2, 1, 8, 0),
    ]


def test_kernels_without_a_function(raw: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"kernel 'nobody'.*testing\.kernel"):
        launch(raw, load(raw, b"nobody"), None)
    lenient = new_rig(kernels="ignore").raw
    ok(launch(lenient, load(lenient, b"nobody"), None))
    ok(lenient.cuCtxSynchronize())


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError, "LAUNCH_FAILED"), (AssertionError, "ASSERT"), (None, "ILLEGAL_ADDRESS")],
    ids=["raises", "asserts", "no memory"],
)
def test_a_kernel_s_error_loses_the_context(raw: Any, capfd: pytest.CaptureFixture[str], error: Any, code: str) -> None:
    def fail() -> None:
        if error is not None:
            raise error("a mistake in a kernel")
        testing.device_view(0x1000, 4)

    testing.kernel("fails")(fail)
    try:
        function = load(raw, b"fails")
        ok(launch(raw, function, None))
        lost = getattr(cuda.CUresult, f"CUDA_ERROR_{code}")
        assert raw.cuCtxSynchronize() == (lost,)
        assert raw.cuMemAlloc(4)[0] == launch(raw, function, None)[0] == lost
    finally:
        testing.unregister_kernel("fails")
        raw.cuDevicePrimaryCtxReset(0)
    assert "in fail" in capfd.readouterr().err


def check_failing_launch(raw: Any, name: str) -> None:
    """Launch a kernel whose function raises: the context is lost."""
    try:
        ok(launch(raw, load(raw, name.encode()), None))
        assert raw.cuCtxSynchronize() == (cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    finally:
        testing.unregister_kernel(name)
        raw.cuDevicePrimaryCtxReset(0)


def test_a_kernel_that_waits(raw: Any, capfd: pytest.CaptureFixture[str]) -> None:
    context = ok(raw.cuCtxGetCurrent())

    @testing.kernel("waits", types=[])
    def wait() -> None:
        ok(raw.cuCtxSetCurrent(context))
        raw.cuCtxSynchronize()

    check_failing_launch(raw, "waits")
    assert "DeadlockError: a kernel waits for work" in capfd.readouterr().err


def test_a_kernel_that_raises_where_nothing_can_be_printed(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    testing.kernel("fails", types=[])(lambda: 1 / 0)
    check_failing_launch(raw, "fails")


def test_a_view_is_what_was_declared(raw: Any) -> None:
    seen: list[Any] = []

    @testing.kernel("peek", reads=lambda x, y: [(x, 16)], writes=lambda x, y: [(y, 16)])
    def peek(x: int, y: int) -> None:
        seen.append(testing.device_view(x, 4, np.int32).flags.writeable)
        seen.append(testing.device_view(y, (2, 2), np.int32).flags.writeable)
        try:
            testing.device_view(x, 17)
        except ValueError as error:
            seen.append(str(error))

    x, y = ok(raw.cuMemAlloc(32)), ok(raw.cuMemAlloc(32))
    ok(launch(raw, load(raw, b"peek"), ((x, y), (None, None))))
    ok(raw.cuCtxSynchronize())
    testing.unregister_kernel("peek")
    assert seen == [False, True, f"'peek' is registered without a read or write of 17 bytes at {int(x):#x}"]
    with pytest.raises(RuntimeError, match="no kernel"):
        testing.device_view(int(x), 4)


def test_names_and_parameters_of_ptx(raw: Any) -> None:
    module = ok(raw.cuModuleLoadData(PTX))
    function = ok(raw.cuModuleGetFunction(module, b"scale"))
    parameters = [raw.cuFuncGetParamInfo(function, at)[1:] for at in range(4)]
    assert parameters == [(0, 8), (8, 4), (12, 12), (24, 4)]
    for missing in (raw.cuModuleGetFunction(module, b"not_me"), raw.cuModuleGetGlobal(module, b"scale")):
        assert missing[0] == cuda.CUresult.CUDA_ERROR_NOT_FOUND
    counter, size = raw.cuModuleGetGlobal(module, b"counter")[1:]
    assert size == 4 and raw.cuModuleGetGlobal(module, b"table")[2] == 64
    ok(raw.cuMemsetD32(counter, 5, 1))
    again = np.zeros(1, np.uint32)
    ok(raw.cuMemcpyDtoH(again, raw.cuModuleGetGlobal(module, b"counter")[1], 4))
    assert again[0] == 5
    assert raw.cuMemFree(counter)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(NotImplementedError, match="begun"):
        raw.cuModuleGetGlobal(module, b"begun")
    ok(raw.cuModuleUnload(module))
    assert raw.cuMemsetD32(counter, 5, 1)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    assert launch(raw, function, None)[0] == cuda.CUresult.CUDA_ERROR_INVALID_HANDLE


@pytest.mark.parametrize(
    "form", [bytearray, lambda text: np.frombuffer(text, np.uint8), lambda text: _ARRAY.ctypes.data]
)
def test_images_of_every_form(raw: Any, form: Any) -> None:
    kept, linked = form(PTX), ok(raw.cuLinkCreate(0, None, None))
    kind = cuda.CUjitInputType.CU_JIT_INPUT_PTX
    ok(raw.cuLinkAddData(linked, kind, PTX, len(PTX), b"name", 0, None, None))
    for image in (PTX, kept, ok(raw.cuLinkComplete(linked))[0]):
        assert raw.cuModuleGetFunction(ok(raw.cuModuleLoadData(image)), b"nope")[0]
        assert load(raw, image=image)
    ok(raw.cuLinkDestroy(linked))
    assert raw.cuModuleLoadData(b"")[0] == raw.cuModuleLoadData(None)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE


def test_registered_variables(raw: Any) -> None:
    testing.device_global("state", 8, b"ab")
    try:
        module = ok(raw.cuModuleLoadData(b"\x7fELF"))
        address, size = raw.cuModuleGetGlobal(module, b"state")[1:]
        found = bytearray(size)
        ok(raw.cuMemcpyDtoH(found, address, size))
        assert found == b"ab".ljust(8, b"\0")
    finally:
        testing.unregister_kernel("state")


def test_limits_of_launches(raw: Any, scale: list[Any]) -> None:
    """But those that are readings, in tests/facts/test_modules.py."""
    function, memory = load(raw), ones(raw)
    shared = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel = ok(raw.cuLibraryGetKernel(ok(raw.cuLibraryLoadData(b"\x7fELF", None, None, 0, None, None, 0)), b"scale"))
    assert raw.cuKernelSetAttribute(shared, 1 << 20, kernel, 0) == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
    # 2,048 threads of a multiprocessor are 2 blocks of 1,024, on 132 of them.
    large = raw.cuLaunchCooperativeKernel(function, 265, 1, 1, 1024, 1, 1, 0, 0, typed(memory, 1.0))
    assert large == (cuda.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,)


def test_kernel_nodes(raw: Any, scale: list[Any]) -> None:
    function, memory, stream = load(raw), ones(raw), ok(raw.cuStreamCreate(1))
    params = cuda.CUDA_KERNEL_NODE_PARAMS()
    params.func, params.kernelParams = function, typed(memory, 2.0)
    for part in ("gridDim", "blockDim"):
        for axis in "XYZ":
            setattr(params, part + axis, 1)
    graph = ok(raw.cuGraphCreate(0))
    node = ok(raw.cuGraphAddKernelNode(graph, None, 0, params))
    instance = ok(raw.cuGraphInstantiate(graph, 0))
    copied = ok(raw.cuGraphKernelNodeGetParams(node))
    other = ok(raw.cuGraphAddKernelNode(graph, [node], 1, copied))  # another graph than the instance
    assert [int(one) for one in raw.cuGraphGetRootNodes(graph, 1)[1]] == [int(node)]
    priority = cuda.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    value = cuda.CUkernelNodeAttrValue()
    value.priority = -3
    ok(raw.cuGraphKernelNodeSetAttribute(node, priority, value))
    ok(raw.cuGraphKernelNodeCopyAttributes(other, node))
    assert ok(raw.cuGraphKernelNodeGetAttribute(other, priority)).priority == -3
    ok(raw.cuGraphLaunch(instance, stream))
    ok(raw.cuStreamSynchronize(stream))
    assert contents(raw, memory) == {2.0}
    copied.kernelParams = typed(memory, 5.0)
    ok(raw.cuGraphExecKernelNodeSetParams(instance, node, copied))
    ok(raw.cuGraphLaunch(instance, stream))
    ok(raw.cuStreamSynchronize(stream))
    assert contents(raw, memory) == {10.0}
    ok(raw.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(launch(raw, function, typed(memory, 0.5), 0, stream))
    captured = ok(raw.cuGraphInstantiate(ok(raw.cuStreamEndCapture(stream)), 0))
    for _ in range(2):
        ok(raw.cuGraphLaunch(captured, stream))
    ok(raw.cuStreamSynchronize(stream))
    assert contents(raw, memory) == {2.5}


def test_unmapping_waits_for_a_kernel_that_runs(raw: Any) -> None:
    rig = Rig(raw)
    begun, go, seen = threading.Event(), threading.Event(), []

    @testing.kernel("slow", types=[np.uint64])
    def slow(address: int) -> None:
        begun.set()
        go.wait(10)
        view = testing.device_view(address, 1)
        seen.append((int(view[0]), view.flags.writeable))

    address = rig.mapping(PAGE, (DEVICE, 0, READ))
    ok(launch(raw, load(raw, b"slow"), ((int(address),), (ctypes.c_uint64,))))
    assert begun.wait(10)
    threading.Timer(0.02, go.set).start()
    ok(raw.cuMemUnmap(address, PAGE))
    testing.unregister_kernel("slow")
    ok(raw.cuCtxSynchronize())
    assert seen == [(0, False)]
    rig.close()


def test_a_machine_lives_as_long_as_its_kernels() -> None:
    go, seen = threading.Event(), []

    @testing.kernel("late", types=[np.uint64])
    def late(address: int) -> None:
        go.wait(10)
        seen.append(int(testing.device_view(address, 1)[0]))

    driver = new_rig().raw
    ok(launch(driver, load(driver, b"late"), ((int(ok(driver.cuMemAlloc(4))),), (ctypes.c_uint64,))))
    testing.unregister_kernel("late")
    gone = weakref.ref(driver)
    del driver
    go.set()
    assert eventually(lambda: gone() is None) and seen == [0]


@pytest.mark.unchecked("it races on purpose")
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuLaunchKernelEx", "graph"])
def test_the_checker_sees_kernels(raw: Any, scale: list[Any], call: str) -> None:
    checked: Any = sd.checked(raw)
    function, one, two = load(checked), *(ok(checked.cuStreamCreate(1)) for _ in range(2))
    memory = ok(checked.cuMemAllocAsync(4 * N, one))

    def run(stream: Any) -> None:
        if call == "cuLaunchKernel":
            ok(launch(checked, function, typed(memory, 1.0), 0, stream))
        elif call == "graph":
            ok(checked.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
            ok(launch(checked, function, typed(memory, 1.0), 0, stream))
            graph = ok(checked.cuStreamEndCapture(stream))
            ok(checked.cuGraphLaunch(ok(checked.cuGraphInstantiate(graph, 0)), stream))
        else:
            config = cuda.CUlaunchConfig()
            for part in ("gridDim", "blockDim"):
                for axis in "XYZ":
                    setattr(config, part + axis, 1)
            config.hStream = stream
            ok(checked.cuLaunchKernelEx(config, function, typed(memory, 1.0), 0))

    run(one)
    run(one)
    event = ok(checked.cuEventCreate(2))
    ok(checked.cuEventRecord(event, one))
    ok(checked.cuStreamWaitEvent(two, event, 0))
    run(two)
    assert checked.hazards == []
    run(one)
    assert [hazard.kind for hazard in checked.hazards] == ["race"]
    ok(checked.cuCtxSynchronize())
    ok(checked.cuMemFree(memory))


def test_parameters_are_aligned() -> None:
    assert offsets((ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_uint16)) == [0, 8, 16, 18]
