"""Contexts and devices: calls that need one, what they say about themselves, and arguments of unusual kinds."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamalloc.simulator.profiles import built_in
from tests.facts.conftest import CAPABILITY, DRIVER_VERSION, NAME
from tests.facts.enums import DEVICE, LEGACY, PINNED, POSIX_FD
from tests.facts.support import PROGRAM, UINT64_MAX, Answer, MiB, Rig, said, value
from tests.support import in_threads


class Scene:
    """Things that were made under a context."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.event = rig, rig.raw, rig.event()
        self.stream, self.spare, self.pool, self.empty = rig.stream(), rig.stream(), rig.pool(), rig.pool()
        rig.begin_capture(self.stream)
        self.graph = value(rig.end_capture(self.stream))
        self.pointer = rig.allocate(self.pool, 64, self.stream)

    def attribute(self, name: str) -> Answer:
        attribute = getattr(self.raw.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        answer: Answer = self.raw.cuPointerGetAttribute(attribute, self.pointer)
        return answer

    def capture(self) -> Answer:
        self.rig.begin_capture(self.stream, mode=2)
        return self.rig.end_capture(self.stream)


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return Scene(rig)


# What calls answer in a thread without a context; work on a stream takes the stream's.
WITHOUT_A_CONTEXT: dict[str, dict[str, Callable[[Scene], Answer]]] = {
    "INVALID_CONTEXT": {
        "its device": lambda s: s.raw.cuCtxGetDevice(),
        "synchronize": lambda s: s.raw.cuCtxSynchronize(),
        "allocate plain memory": lambda s: s.raw.cuMemAlloc(1),
        "create a stream": lambda s: s.raw.cuStreamCreate(1),
        "create an event": lambda s: s.raw.cuEventCreate(0),
        "memory info": lambda s: s.raw.cuMemGetInfo(),
        "allocate pinned memory": lambda s: s.raw.cuMemHostAlloc(64, 0),
        "pop": lambda s: s.raw.cuCtxPopCurrent(),
        "allocate on the legacy stream": lambda s: s.raw.cuMemAllocAsync(64, s.raw.CUstream(0)),
        "allocate on the per-thread stream": lambda s: s.raw.cuMemAllocAsync(64, s.raw.CUstream(2)),
        "free nothing on the legacy stream": lambda s: s.raw.cuMemFreeAsync(0, LEGACY),
        "record on the legacy stream": lambda s: s.raw.cuEventRecord(s.event, LEGACY),
        "the device pointer of an address": lambda s: s.attribute("DEVICE_POINTER"),
        "instantiate a graph": lambda s: s.raw.cuGraphInstantiate(s.graph, 0),
        "get the limit of the stack": lambda s: s.raw.cuCtxGetLimit(s.raw.CUlimit(0)),
        "set the limit of the stack": lambda s: s.raw.cuCtxSetLimit(s.raw.CUlimit(0), 2048),
        "the cache configuration": lambda s: s.raw.cuCtxGetCacheConfig(),
        "reset persisting lines of the cache": lambda s: s.raw.cuCtxResetPersistingL2Cache(),
        "start a profiler": lambda s: s.raw.cuProfilerStart(),
        "stop a profiler": lambda s: s.raw.cuProfilerStop(),
    },
    "SUCCESS": {
        "the size of an address": lambda s: s.attribute("RANGE_SIZE"),
        "create a pool": lambda s: s.rig.create_pool(),
        "the default pool": lambda s: s.raw.cuDeviceGetDefaultMemPool(0),
        "allocate on a stream": lambda s: s.rig.try_allocate(s.pool, 64, s.stream),
        "allocate from the current pool": lambda s: s.rig.keep(s.raw.cuMemAllocAsync(64, s.stream)),
        "free on a stream": lambda s: s.raw.cuMemFreeAsync(s.pointer, s.stream),
        "record": lambda s: s.raw.cuEventRecord(s.event, s.stream),
        "wait for an event": lambda s: s.raw.cuStreamWaitEvent(s.stream, s.event, 0),
        "synchronize an event": lambda s: s.raw.cuEventSynchronize(s.event),
        "query an event": lambda s: s.raw.cuEventQuery(s.event),
        "capture": lambda s: s.capture(),
        "destroy an event": lambda s: s.raw.cuEventDestroy(s.rig.disown(s.event)),
        "destroy a stream": lambda s: s.raw.cuStreamDestroy(s.rig.disown(s.spare)),
        "destroy a pool": lambda s: s.raw.cuMemPoolDestroy(s.rig.disown(s.empty)),
    },
}


@pytest.mark.parametrize("expected", WITHOUT_A_CONTEXT)
def test_without_a_context(scene: Scene, expected: str) -> None:
    def call() -> None:
        assert int(value(scene.raw.cuCtxGetCurrent())) == 0
        found = {name: said(one(scene)) for name, one in WITHOUT_A_CONTEXT[expected].items()}
        assert found == dict.fromkeys(found, expected)

    in_threads(call)


def test_work_on_a_stream_takes_the_stream_s_context(rig: Rig) -> None:
    raw, stream, pool = rig.raw, rig.stream(), rig.pool()
    pointer = rig.allocate(pool, 64, stream)
    host: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)

    def call() -> None:
        answers = [
            raw.cuMemsetD8Async(pointer, 1, 64, stream),
            raw.cuMemcpyDtoDAsync(pointer, pointer, 64, stream),
            raw.cuMemcpyHtoDAsync(pointer, np.ones(64, np.uint8), 64, stream),
            raw.cuMemcpyDtoHAsync(host, pointer, 64, stream),
            raw.cuMemcpyAsync(pointer, pointer, 64, stream),
            raw.cuStreamSynchronize(stream),
            raw.cuStreamQuery(stream),
        ]
        assert [said(one) for one in answers] == ["SUCCESS"] * 7
        assert said(raw.cuStreamWaitValue32(stream, int(pointer), 0, 0)) == "INVALID_VALUE"

    in_threads(call)
    assert host.tolist() == [1] * 64


def test_push_and_pop(rig: Rig) -> None:
    def call() -> None:
        value(rig.raw.cuCtxPushCurrent(rig.context))
        assert int(value(rig.raw.cuCtxGetDevice())) == 0
        assert int(value(rig.raw.cuCtxPopCurrent())) == int(rig.context)
        assert int(value(rig.raw.cuCtxGetCurrent())) == 0

    in_threads(call)


def test_the_primary_context_is_one(rig: Rig) -> None:
    assert value(rig.raw.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    again = value(rig.raw.cuDevicePrimaryCtxRetain(0))
    assert int(again) == int(rig.context)
    assert said(rig.raw.cuDevicePrimaryCtxRelease(0)) == "SUCCESS"
    assert value(rig.raw.cuDevicePrimaryCtxGetState(0)) == (0, 1)


# Other tests keep the primary contexts of the process retained, so this counts in a process of its own.
COUNTING = """
def state():
    return value(raw.cuDevicePrimaryCtxGetState(0))
assert state() == (0, 0)
assert said(raw.cuDevicePrimaryCtxRelease(0)) == "INVALID_CONTEXT"
assert said(Rig(raw).create_pool()) == said(raw.cuDeviceGetDefaultMemPool(0)) == "SUCCESS"
assert state() == (0, 0)
for _ in range(2):
    assert said(raw.cuDevicePrimaryCtxRetain(0)) == "SUCCESS" and state() == (0, 1)
for left in (1, 0):
    assert said(raw.cuDevicePrimaryCtxRelease(0)) == "SUCCESS" and state() == (0, left)
"""


def test_the_primary_context_s_count(python: Callable[..., CompletedProcess[str]]) -> None:
    ended = python(PROGRAM + COUNTING)
    assert (ended.returncode, ended.stderr) == (0, "")


# The readings of attributes are in the profile of an H200, h200.json. Left out are those that depend on the host (the
# PCI address, the board's number) or on a second device.
OF_THE_HOST = """
    PCI_BUS_ID PCI_DEVICE_ID PCI_DOMAIN_ID MULTI_GPU_BOARD MULTI_GPU_BOARD_GROUP_ID GPU_PCI_SUBSYSTEM_ID
    MULTICAST_SUPPORTED
"""
READINGS = {name: reading for name, reading in built_in("h200").attributes.items() if name not in OF_THE_HOST.split()}

# Those that differ from one board or host to another of the same architecture.
OF_THE_BOARD = """
    CLOCK_RATE MULTIPROCESSOR_COUNT KERNEL_EXEC_TIMEOUT COMPUTE_MODE ECC_ENABLED MEMORY_CLOCK_RATE
    GLOBAL_MEMORY_BUS_WIDTH L2_CACHE_SIZE ASYNC_ENGINE_COUNT HOST_NATIVE_ATOMIC_SUPPORTED PAGEABLE_MEMORY_ACCESS
    PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES DIRECT_MANAGED_MEM_ACCESS_FROM_HOST MAX_PERSISTING_L2_CACHE_SIZE
    GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED GPU_DIRECT_RDMA_SUPPORTED GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    GPU_DIRECT_RDMA_WRITES_ORDERING MEMPOOL_SUPPORTED_HANDLE_TYPES DMA_BUF_SUPPORTED HANDLE_TYPE_FABRIC_SUPPORTED
    NUMA_CONFIG NUMA_ID MPS_ENABLED HOST_NUMA_ID D3D12_CIG_SUPPORTED MEM_DECOMPRESS_ALGORITHM_MASK
    MEM_DECOMPRESS_MAXIMUM_LENGTH VULKAN_CIG_SUPPORTED GPU_PCI_DEVICE_ID
    HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED HOST_NUMA_MEMORY_POOLS_SUPPORTED HOST_NUMA_MULTINODE_IPC_SUPPORTED
    HOST_ALLOC_DMA_BUF_SUPPORTED ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED
"""

# Attributes that the bindings list and this driver does not know.
UNKNOWN_ATTRIBUTES = """
    ATOMIC_REDUCTION_SUPPORTED D3D12_CIG_STREAMS_SUPPORTED DMA_BUF_MMAP_SUPPORTED LOGICAL_ENDPOINT_UNICAST_SUPPORTED
    LOGICAL_ENDPOINT_MULTICAST_SUPPORTED LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED
    LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED
"""


def answers(raw: Any, names: Iterable[str]) -> dict[str, int | str]:
    """Answers of the driver for the attributes that the bindings name."""
    members = {name: getattr(raw.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None) for name in names}
    found = {name: raw.cuDeviceGetAttribute(one, 0) for name, one in members.items() if one is not None}
    return {name: one[1] if said(one) == "SUCCESS" else said(one) for name, one in found.items()}


def check(raw: Any, names: Iterable[str]) -> None:
    found = answers(raw, names)
    assert found == {name: READINGS[name] for name in found} and len(found) > 20


@pytest.mark.usefixtures("same_architecture")
def test_attributes(raw: Any) -> None:
    check(raw, READINGS.keys() - OF_THE_BOARD.split())


@pytest.mark.usefixtures("same_gpu")
def test_attributes_of_the_board(raw: Any) -> None:
    check(raw, READINGS.keys() & OF_THE_BOARD.split())


@pytest.mark.usefixtures("same_driver")
def test_attributes_that_the_driver_does_not_know(raw: Any) -> None:
    assert {*answers(raw, UNKNOWN_ATTRIBUTES.split()).values()} <= {"INVALID_VALUE"}


# The bindings of 12.9 name a number there that the driver does know.
@pytest.mark.bindings("13.0")
@pytest.mark.usefixtures("same_driver")
def test_attribute_behind_the_last(raw: Any) -> None:
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX
    assert said(raw.cuDeviceGetAttribute(attribute, 0)) == "INVALID_VALUE"


@pytest.mark.usefixtures("same_gpu", "all_devices")
def test_multicast_needs_a_second_device(raw: Any) -> None:
    count = value(raw.cuDeviceGetCount())
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    assert value(raw.cuDeviceGetAttribute(attribute, 0)) == int(count > 1)


@pytest.mark.gpus(2)
def test_multicast_of_two_devices(raw: Any) -> None:
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    assert [value(raw.cuDeviceGetAttribute(attribute, device)) for device in (0, 1)] == [1, 1]


@pytest.mark.usefixtures("same_driver")
def test_driver_version(raw: Any) -> None:
    assert value(raw.cuDriverGetVersion()) == DRIVER_VERSION


def test_name_is_padded_to_the_length_asked_for(raw: Any) -> None:
    name = value(raw.cuDeviceGetName(64, 0))
    assert len(name) == 64 and name.rstrip(b"\0").decode().isprintable()


@pytest.mark.simulated_only("which must not skip what other machines do")
def test_machine_of_the_readings(raw: Any) -> None:
    assert value(raw.cuDeviceGetName(64, 0)).rstrip(b"\0").decode() == NAME
    assert value(raw.cuDeviceComputeCapability(0)) == CAPABILITY
    assert value(raw.cuDriverGetVersion()) == DRIVER_VERSION


@pytest.mark.usefixtures("same_gpu")
def test_total_memory(raw: Any) -> None:
    assert value(raw.cuDeviceTotalMem(0)) == 150109880320


def test_memory_info(raw: Any) -> None:
    free, total = value(raw.cuMemGetInfo())
    assert total == value(raw.cuDeviceTotalMem(0))
    assert 0 < free < total


def test_uuid(raw: Any) -> None:
    assert len(value(raw.cuDeviceGetUuid(0)).bytes) == 16


def test_device_that_is_not_there(raw: Any) -> None:
    assert [said(raw.cuDeviceGet(ordinal)) for ordinal in (-1, 99)] == ["INVALID_DEVICE"] * 2
    assert said(raw.cuDeviceGetAttribute(raw.CUdevice_attribute(1), 99)) == "INVALID_DEVICE"
    assert said(raw.cuDeviceGetDefaultMemPool(99)) == "INVALID_DEVICE"
    assert said(raw.cuDeviceGetMemPool(99)) == "INVALID_VALUE"


def test_init_again(raw: Any) -> None:
    assert [said(raw.cuInit(flags)) for flags in (0, 1)] == ["SUCCESS", "INVALID_VALUE"]


def test_error_name_and_string(raw: Any) -> None:
    error = raw.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert value(raw.cuGetErrorName(error)) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert value(raw.cuGetErrorString(error)) == b"out of memory"


def test_errors_that_only_newer_bindings_name(raw: Any) -> None:
    for error in raw.CUresult:
        (code, name), (_, text) = raw.cuGetErrorName(error), raw.cuGetErrorString(error)
        assert (name is None) == (text is None) == (code == raw.CUresult.CUDA_ERROR_INVALID_VALUE), error


@pytest.mark.usefixtures("same_architecture")
def test_stream_priority_range(raw: Any) -> None:
    assert value(raw.cuCtxGetStreamPriorityRange()) == (0, -5)


@pytest.mark.usefixtures("same_driver")
def test_context_api_version(rig: Rig) -> None:
    assert value(rig.raw.cuCtxGetApiVersion(rig.context)) == 3020


def test_context_flags_of_a_primary_context(raw: Any) -> None:
    map_host, resize_local_memory = 8, 16  # the second is set by the CUDA runtime, where a library has loaded that
    assert value(raw.cuCtxGetFlags()) & ~resize_local_memory == map_host


@pytest.mark.simulated_only("a process is initialised once")
def test_before_init(machine: Any) -> None:
    assert value(machine.cuDriverGetVersion()) == 13000
    assert said(machine.cuDeviceGetCount()) == said(machine.cuMemAlloc(1)) == "NOT_INITIALIZED"


@pytest.mark.parametrize(
    ("size", "used"),
    [(4096.0, 4096), (4096.5, 4096), (True, 1), (np.int64(64), 64), (64, 64)],
    ids=["float", "fraction", "bool", "numpy", "int"],
)
def test_size_of_an_allocation(rig: Rig, size: Any, used: int) -> None:
    pool = rig.pool(UINT64_MAX)
    rig.allocate(pool, size, rig.stream())
    assert rig.used(pool) == used


def test_size_of_an_allocation_of_zero_as_a_float(rig: Rig) -> None:
    size: Any = 0.0
    assert int(rig.allocate(rig.pool(UINT64_MAX), size, rig.stream())) == 0


@pytest.mark.parametrize("size", [1 << 63, UINT64_MAX])
def test_size_of_an_allocation_beyond_any_memory(rig: Rig, size: int) -> None:
    assert said(rig.try_allocate(rig.pool(), size, rig.stream())) == "OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (-1, OverflowError, "can't convert negative value to size_t"),
        (1 << 64, OverflowError, "Python int too large to convert to C unsigned long"),
        ("x", TypeError, "an integer is required"),
        (None, TypeError, "an integer is required"),
    ],
    ids=["negative", "too large", "str", "None"],
)
def test_size_of_an_allocation_that_is_refused(rig: Rig, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        rig.raw.cuMemAllocFromPoolAsync(size, rig.pool(), rig.stream())


@pytest.mark.parametrize("pool", [None, 0])
def test_allocation_from_no_pool(rig: Rig, pool: Any) -> None:
    assert said(rig.raw.cuMemAllocFromPoolAsync(64, pool, rig.stream())) == "INVALID_VALUE"


def test_allocation_on_what_is_no_stream(rig: Rig) -> None:
    with pytest.raises(TypeError, match=r"^an integer is required$"):
        rig.raw.cuMemAllocFromPoolAsync(64, rig.pool(), "x")


@pytest.mark.parametrize(
    ("byte", "message"),
    [(300, "value too large to convert to unsigned char"), (-1, "can't convert negative value to unsigned char")],
)
def test_byte_of_a_fill(rig: Rig, byte: int, message: str) -> None:
    with pytest.raises(OverflowError, match=f"^{message}$"):
        rig.raw.cuMemsetD8Async(rig.plain(64), byte, 4, rig.stream())


@pytest.mark.bindings("13.0")
class TestNumbersForEnums:
    """Some calls of the bindings take numbers in place of the members of enums."""

    def test_where_they_do(self, rig: Rig) -> None:
        raw = rig.raw
        assert said(raw.cuMemGetAllocationGranularity(rig.memory_props(), 0)) == "SUCCESS"
        assert said(raw.cuMemGetDefaultMemPool(rig.location(DEVICE), PINNED)) == "SUCCESS"
        with open("/dev/null") as nothing:
            assert said(raw.cuMemImportFromShareableHandle(nothing.fileno(), POSIX_FD)) == "UNKNOWN"
        assert said(raw.cuDeviceGetP2PAttribute(1, 0, 0)) == "INVALID_DEVICE"

    def test_where_they_do_not(self, rig: Rig) -> None:
        with pytest.raises(AttributeError, match="object has no attribute 'value'"):
            rig.raw.cuMemPoolGetAttribute(rig.pool(), 1)

    def test_nothing_at_all(self, rig: Rig) -> None:
        with pytest.raises(TypeError, match="must not be None"):
            rig.raw.cuMemGetAllocationGranularity(rig.memory_props(), None)


def test_no_word_is_the_word_zero(rig: Rig) -> None:
    stream, word = rig.stream(), rig.word()
    word.value = 7
    value(rig.raw.cuStreamWriteValue32(stream, ctypes.addressof(word), None, 0))
    value(rig.raw.cuStreamSynchronize(stream))
    assert word.value == 0


# -- limits and settings of contexts -----------------------------------------------------------------------------------


STACK, PRINTF, HEAP, DEPTH, LAUNCHES, GRANULARITY, PERSISTING, SHARED, GRAPHICS, FALLBACK = range(10)  # CUlimit
PAGE = 2 << 20


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limits are those of the primary context, which other tests use. A test without a rig may need a new driver.

    The first launch after a change of the stack's size makes launches on all other streams wait for it. It is made
    here, where no test holds its stream.
    """
    if "rig" not in request.fixturenames:
        yield
        return
    rig: Rig = request.getfixturevalue("rig")
    limits = {number: rig.raw.cuCtxGetLimit(limit(rig, number)) for number in range(GRANULARITY + 2)}
    yield
    rig.settle()
    for number, answer in limits.items():
        if said(answer) == "SUCCESS":
            rig.raw.cuCtxSetLimit(limit(rig, number), answer[1])
    rig.raw.cuMemsetD8(rig.plain(MiB), 0, MiB)
    rig.synchronize()


def limit(rig: Rig, number: int) -> Any:
    return rig.raw.CUlimit(number)


def put(rig: Rig, number: int, wanted: int) -> int | str:
    """Set a limit: what it is then, or what the call says where it fails."""
    answer = rig.raw.cuCtxSetLimit(limit(rig, number), wanted)
    return int(value(rig.raw.cuCtxGetLimit(limit(rig, number)))) if said(answer) == "SUCCESS" else said(answer)


@pytest.fixture
def persisting(rig: Rig) -> int:
    """A tenth of the cache that can be set aside: the step of that limit."""
    return rig.device_attribute("MAX_PERSISTING_L2_CACHE_SIZE") // 10


@pytest.mark.usefixtures("same_architecture")
def test_defaults(rig: Rig, persisting: int) -> None:
    expected = {
        STACK: 1024,
        PRINTF: 8650752,
        HEAP: 8 << 20,
        DEPTH: "UNSUPPORTED_LIMIT",
        LAUNCHES: 2048,
        GRANULARITY: 64,
        PERSISTING: 3 * persisting,
        SHARED: rig.device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        GRAPHICS: 0,
        FALLBACK: "UNSUPPORTED_LIMIT",
    }
    for number, known in expected.items():
        answer = rig.raw.cuCtxGetLimit(limit(rig, number))
        assert (answer[1] if said(answer) == "SUCCESS" else said(answer)) == known
    assert said(rig.raw.cuCtxGetLimit(rig.raw.CUlimit.CU_LIMIT_MAX)) == "INVALID_VALUE"


SETTABLE = [
    (STACK, 1, 16),
    (STACK, 1000, 1008),
    (STACK, 512 << 10, "INVALID_VALUE"),
    (PRINTF, 0, 524288),
    (PRINTF, 1000001, 1000192),
    (PRINTF, 1 << 45, 1 << 31),
    (HEAP, 1000, 4 << 20),
    (HEAP, 5000001, 5046272),
    (LAUNCHES, 1, 32),
    (LAUNCHES, 33, 33),
    (LAUNCHES, 1 << 20, 599186),
    (GRANULARITY, 0, 0),
    (GRANULARITY, 33, 33),
    (GRANULARITY, 129, "INVALID_VALUE"),
    (SHARED, 1024, "NOT_PERMITTED"),
    (GRAPHICS, 0, "NOT_PERMITTED"),
    (DEPTH, 2, "UNSUPPORTED_LIMIT"),
]
"""A limit, the size that is asked for, and the size that it has then or the answer."""


@pytest.mark.usefixtures("same_architecture")
def test_what_can_be_set(in_new_process: Callable[..., list[int | str]]) -> None:
    """Once a kernel that prints was launched, the size for that is refused."""
    wanted = [(number, size) for number, size, _ in SETTABLE]
    assert in_new_process(_put_each, wanted) == [kept for *_, kept in SETTABLE]


def _put_each(rig: Rig, wanted: list[tuple[int, int]]) -> list[int | str]:
    found = []
    for number, size in wanted:
        before = rig.raw.cuCtxGetLimit(limit(rig, number))
        found.append(put(rig, number, size))
        if said(before) == "SUCCESS":
            put(rig, number, before[1])
    return found


@pytest.mark.usefixtures("same_architecture")
def test_cache_that_is_set_aside(rig: Rig, persisting: int) -> None:
    assert put(rig, PERSISTING, 1) == persisting
    assert put(rig, PERSISTING, persisting + 1) == 2 * persisting
    assert put(rig, PERSISTING, 10 * persisting + 1) == "INVALID_VALUE"


def test_stacks_take_memory(rig: Rig, in_new_process: Callable[..., list[int]]) -> None:
    """One for every thread that can run at a time. Kernels that have run keep the stacks that they needed."""
    sizes = [512, 2048, 3008, 4096]
    readings = in_new_process(_free_with_stacks, [1024, *(size for one in sizes for size in (one, 1024))])
    multiprocessors = rig.device_attribute("MULTIPROCESSOR_COUNT")
    threads = multiprocessors * rig.device_attribute("MAX_THREADS_PER_MULTIPROCESSOR")
    before = readings[0]
    assert readings[::2] == [before] * 5
    expected = [(size * threads // PAGE - 1024 * threads // PAGE) * PAGE for size in sizes]
    assert [before - reading for reading in readings[1::2]] == expected


def _free_with_stacks(rig: Rig, sizes: list[int]) -> list[int]:
    """The device's free memory after the stacks were given each of these sizes."""
    readings = []
    for size in sizes:
        assert put(rig, STACK, size) == size
        readings.append(rig.device_free())
    return readings


def test_other_stacks_wait_for_all_streams(rig: Rig) -> None:
    gate = rig.gate()
    for number, wanted, waits in ((STACK, 2048, True), (HEAP, 16 << 20, False), (GRANULARITY, 32, False)):
        gate.hold(rig.stream())
        with gate.opening_after(0.05 if waits else 5):
            assert put(rig, number, wanted) == wanted
            assert gate.is_open == waits
        rig.synchronize()


def _size_that_takes_memory(rig: Rig) -> int:
    """A size of stacks that the context has no memory for; kernels of other tests leave some."""
    for size in (2048, 4096, 8192, 16384):
        put(rig, STACK, 1024)
        before = rig.device_free()
        put(rig, STACK, size)
        taken = before - rig.device_free()
        put(rig, STACK, 1024)
        if taken:
            return size
    pytest.skip("the stacks of this process take no more memory")


def test_not_during_a_capture(rig: Rig) -> None:
    wanted = _size_that_takes_memory(rig)
    stream = rig.stream()
    rig.begin_capture(stream)
    assert said(rig.raw.cuCtxGetLimit(limit(rig, STACK))) == "SUCCESS"
    assert rig.capture_status(stream) == "ACTIVE"
    assert put(rig, STACK, wanted) == "STREAM_CAPTURE_UNSUPPORTED"
    assert rig.capture_status(stream) == "INVALIDATED"


def test_settings(rig: Rig) -> None:
    raw = rig.raw
    assert int(value(raw.cuCtxGetCacheConfig())) == 0
    assert said(raw.cuCtxSetCacheConfig(raw.CUfunc_cache(1))) == "SUCCESS"
    assert int(value(raw.cuCtxGetCacheConfig())) == 1
    value(raw.cuCtxSetCacheConfig(raw.CUfunc_cache(0)))
    assert said(raw.cuCtxResetPersistingL2Cache()) == "SUCCESS"
    target, scope = raw.CUflushGPUDirectRDMAWritesTarget(0), raw.CUflushGPUDirectRDMAWritesScope(100)
    assert said(raw.cuFlushGPUDirectRDMAWrites(target, scope)) == "SUCCESS"
    capability = tuple(rig.device_attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    assert value(raw.cuDeviceComputeCapability(0)) == capability
    properties = value(raw.cuDeviceGetProperties(0))
    assert (properties.maxThreadsPerBlock, properties.SIMDWidth) == (1024, 32)
    assert list(properties.maxThreadsDim) == [1024, 1024, 64]


def test_all_streams_wait_for_an_event(rig: Rig) -> None:
    """Also streams that are made later. A stream without work is done."""
    raw, stream, gate, event, plain = rig.raw, rig.stream(), rig.gate(), rig.event(), rig.plain(64)
    other = rig.stream()
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "SUCCESS"
    gate.hold(stream)
    value(raw.cuEventRecord(event, stream))
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "SUCCESS"
    for one in (other, rig.stream()):
        assert rig.query(one) == "SUCCESS"
        value(raw.cuMemsetD8Async(plain, 1, 64, one))
        assert rig.held(one)
    gate.open()
    assert rig.executed(other)
    assert said(raw.cuCtxWaitEvent(None, event)) == "INVALID_CONTEXT"
    rig.begin_capture(stream)
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert rig.capture_status(stream) == "INVALIDATED"
