"""Addresses of host memory that is gone, never was, or is there in part: every call refuses them, and none crashes."""

import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import numpy as np
import pytest

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import memory
from tests.facts.enums import HOST
from tests.facts.support import Rig, said, value

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

PAGE = mmap.PAGESIZE

PROGRAM = """
import ctypes, itertools, mmap, threading
import numpy as np
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from tests.facts.support import value as ok

d = sd.simulated(fabric=True)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

ok(d.cuInit(0))
context = ok(d.cuDevicePrimaryCtxRetain(0))
ok(d.cuCtxSetCurrent(context))
stream = ok(d.cuStreamCreate(1))
there = int(ok(d.cuMemAlloc(1 << 20)))
place = 0x5100_0000_0000
"""

# Each call gets each address and size; what it does besides answering would end the process.
EVERY_CALL = (
    PROGRAM
    + """
def pages(count):
    # far from where the system puts other memory, also when they are unmapped
    global place
    place += 1 << 30
    assert libc.mmap(place, count * mmap.PAGESIZE, 3, 0x100022, -1, 0) == place
    return place

freed = int(ok(d.cuMemAlloc(4 << 20)))
ok(d.cuMemFree(freed))
pinned = int(ok(d.cuMemHostAlloc(4 << 20, 0)))
ok(d.cuMemFreeHost(pinned))
reserved = int(ok(d.cuMemAddressReserve(2 << 20, 0, 0, 0)))
half = pages(2)
libc.munmap(half + mmap.PAGESIZE, mmap.PAGESIZE)
guarded = pages(2)
libc.mprotect(guarded + mmap.PAGESIZE, mmap.PAGESIZE, 0)
stale = pages(2)
ok(d.cuMemHostRegister(stale, 2 * mmap.PAGESIZE, 0))
libc.munmap(stale, 2 * mmap.PAGESIZE)
constant = pages(1)
libc.mprotect(constant, mmap.PAGESIZE, mmap.PROT_READ)

WILD = dict(
    freed=freed, pinned=pinned, reserved=reserved, half=half + 4000, guarded=guarded + 4000, stale=stale,
    constant=constant, none=0, low=8, high=0x7000_0000_0000, beyond=1 << 47, last=(1 << 64) - 8,
)
SIZES = (1, 8, 2 * mmap.PAGESIZE, 1 << 20, 1 << 45, (1 << 64) - 8)

def plane(target, source, size, kinds):
    copy = cuda.CUDA_MEMCPY2D()
    copy.WidthInBytes, copy.Height, copy.dstPitch, copy.srcPitch = min(size, 8), 2, 4096, 4096
    return fill(copy, target, source, kinds)

def box(target, source, size, kinds, made=cuda.CUDA_MEMCPY3D):
    copy = made()
    copy.WidthInBytes, copy.Height, copy.Depth = min(size, 8), 2, 2
    copy.dstPitch = copy.srcPitch = 4096
    copy.dstHeight = copy.srcHeight = 2
    return fill(copy, target, source, kinds)

def fill(copy, target, source, kinds):
    for side, address, kind in (("dst", target, kinds[0]), ("src", source, kinds[1])):
        setattr(copy, side + "MemoryType", cuda.CUmemorytype(kind))
        setattr(copy, side + ("Host" if kind == 1 else "Device"), address)
    return copy

def batch(target, source, size):
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(1)
    pointer = cuda.CUdeviceptr
    return d.cuMemcpyBatchAsync([pointer(target)], [pointer(source)], [size], 1, [attributes], [0], 1, stream)

def box_batch(target, source, size):
    one = cuda.CUDA_MEMCPY3D_BATCH_OP()
    one.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(1)
    one.extent.width, one.extent.height, one.extent.depth = size, 1, 1
    for side, address in ((one.dst, target), (one.src, source)):
        side.type = cuda.CUmemcpy3DOperandType(1)
        side.op.ptr.ptr = address
    return d.cuMemcpy3DBatchAsync(1, [one], 0, stream)

ATTRIBUTES = [one for one in cuda.CUpointer_attribute if "DEVICE_POINTER" in one.name or "HOST_POINTER" in one.name]
HANDLE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
CALLS = {
    "cuMemHostRegister": lambda a, n: d.cuMemHostRegister(a, n, 0),
    "cuMemHostUnregister": lambda a, n: a != stale and d.cuMemHostUnregister(a),
    "cuMemHostGetDevicePointer": lambda a, n: d.cuMemHostGetDevicePointer(a, 0),
    "cuMemHostGetFlags": lambda a, n: d.cuMemHostGetFlags(a),
    "cuMemFreeHost": lambda a, n: d.cuMemFreeHost(a),
    "cuMemFree": lambda a, n: d.cuMemFree(a),
    "cuMemFreeAsync": lambda a, n: d.cuMemFreeAsync(a, stream),
    "cuMemGetAddressRange": lambda a, n: d.cuMemGetAddressRange(a),
    "cuPointerGetAttribute": lambda a, n: [d.cuPointerGetAttribute(one, a) for one in ATTRIBUTES][0],
    "cuPointerGetAttributes": lambda a, n: d.cuPointerGetAttributes(len(ATTRIBUTES), ATTRIBUTES, a),
    "cuMemsetD8": lambda a, n: d.cuMemsetD8(a, 1, n),
    "cuMemsetD8Async": lambda a, n: d.cuMemsetD8Async(a, 1, n, stream),
    "cuMemsetD2D8": lambda a, n: d.cuMemsetD2D8(a, 4096, 1, min(n, 8), 2),
    "cuMemcpyHtoD": lambda a, n: d.cuMemcpyHtoD(there, a, n),
    "cuMemcpyHtoDAsync": lambda a, n: d.cuMemcpyHtoDAsync(there, a, n, stream),
    "cuMemcpyDtoH": lambda a, n: d.cuMemcpyDtoH(a, there, n),
    "cuMemcpyDtoHAsync": lambda a, n: d.cuMemcpyDtoHAsync(a, there, n, stream),
    "cuMemcpyDtoD": lambda a, n: d.cuMemcpyDtoD(there, a, n),
    "cuMemcpy to": lambda a, n: d.cuMemcpy(a, there, n),
    "cuMemcpy from": lambda a, n: d.cuMemcpy(there, a, n),
    "cuMemcpy of itself": lambda a, n: d.cuMemcpy(a, a, n),
    "cuMemcpyAsync to": lambda a, n: d.cuMemcpyAsync(a, there, n, stream),
    "cuMemcpyAsync from": lambda a, n: d.cuMemcpyAsync(there, a, n, stream),
    "cuMemcpyPeer": lambda a, n: d.cuMemcpyPeer(there, context, a, context, n),
    "cuMemcpy2D to": lambda a, n: d.cuMemcpy2D(plane(a, there, n, (1, 2))),
    "cuMemcpy2D from": lambda a, n: d.cuMemcpy2D(plane(there, a, n, (2, 1))),
    "cuMemcpy2D of any": lambda a, n: d.cuMemcpy2DAsync(plane(there, a, n, (4, 4)), stream),
    "cuMemcpy3D to": lambda a, n: d.cuMemcpy3D(box(a, there, n, (1, 2))),
    "cuMemcpy3D from": lambda a, n: d.cuMemcpy3DAsync(box(there, a, n, (2, 1)), stream),
    "cuMemcpy3DPeer": lambda a, n: d.cuMemcpy3DPeer(box(there, a, n, (2, 1), cuda.CUDA_MEMCPY3D_PEER)),
    "cuStreamWriteValue32": lambda a, n: d.cuStreamWriteValue32(stream, a, 1, 0),
    "cuStreamWaitValue64": lambda a, n: d.cuStreamWaitValue64(stream, a, 0, 0),
    "cuLaunchHostFunc": lambda a, n: d.cuLaunchHostFunc(stream, cuda.CUhostFn(a), 0),
    "cuMemImportFromShareableHandle": lambda a, n: d.cuMemImportFromShareableHandle(a, HANDLE),
    "cuMemPoolImportFromShareableHandle": lambda a, n: d.cuMemPoolImportFromShareableHandle(a, HANDLE, 0),
}
if hasattr(cuda, "cuMemGetDefaultMemPool"):
    CALLS["cuMemcpyBatchAsync to"] = lambda a, n: batch(a, there, n)
    CALLS["cuMemcpyBatchAsync from"] = lambda a, n: batch(there, a, n)
    CALLS["cuMemcpy3DBatchAsync to"] = lambda a, n: box_batch(a, there, n)
    CALLS["cuMemcpy3DBatchAsync from"] = lambda a, n: box_batch(there, a, n)

SUCCEEDS = {  # calls that use nothing there
    "any": ("cuPointerGetAttributes",),
    "none": ("cuMemFree", "cuMemFreeHost", "cuMemFreeAsync"),
    "stale": ("cuMemHostGetDevicePointer", "cuMemHostGetFlags", "cuMemGetAddressRange", "cuPointerGetAttribute"),
}
answers = 0
for (name, call), (kind, address), size in itertools.product(CALLS.items(), WILD.items(), SIZES):
    print(name, kind, hex(address), size, flush=True)
    try:
        answer = call(address, size)
    except NotImplementedError:
        answer = None
    if answer:
        answers += 1
        there_in_part = kind in ("constant", "half", "guarded") and size <= 8 and "2D" not in name
        if not answer[0] and not (there_in_part or (kind == "constant" and size <= mmap.PAGESIZE)):
            assert name.startswith((*SUCCEEDS["any"], *SUCCEEDS.get(kind, ()))), "success"
    ok(d.cuCtxSynchronize())
ok(d.cuMemHostUnregister(stale))
ok(d.cuMemFree(there))
assert answers > 1000
print("done")
"""
)


LATER = (
    PROGRAM
    + """
size = 1 << 16
assert libc.mmap(place, size, 3, 0x100022, -1, 0) == place
{work}
answers = d.cuStreamSynchronize(stream), d.cuStreamSynchronize(stream)
print([int(answer[0]) for answer in answers])
libc.munmap(place, size)
"""
)
GATED = """
gate = np.zeros(1, np.uint32)
ok(d.cuMemHostRegister(gate.ctypes.data, 4, 0))
ok(d.cuMemHostRegister(place, size, 0))
ok(d.cuStreamWaitValue32(stream, gate.ctypes.data, 1, 0))
{work}
libc.munmap(place, size)
gate[0] = 1
"""
CAPTURED = """
mode = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
ok(d.cuStreamBeginCapture(stream, mode))
{work}
graph = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(stream)), 0))
libc.munmap(place, size)
d.cuGraphLaunch(graph, stream)  # the launch that waits gives the error already
"""
WORK = {
    "copy from": "ok(d.cuMemcpyHtoDAsync(there, place, size, stream))",
    "copy to": "ok(d.cuMemcpyDtoHAsync(place, there, size, stream))",
    "fill": "ok(d.cuMemsetD8Async(place, 1, size, stream))",
    "write of a word": "ok(d.cuStreamWriteValue32(stream, place, 1, 0))",
    "wait for a word": "ok(d.cuStreamWaitValue32(stream, place, 1, 0))",
}
Python = Callable[..., CompletedProcess[str]]


def test_no_call_crashes(python: Python) -> None:
    """Neither at the call nor when the work has run."""
    ended = python(EVERY_CALL)
    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stdout[-200:] + ended.stderr[-2000:]


def test_memory_that_goes_before_the_work_runs_breaks_the_context(python: Python) -> None:
    """On a machine of its own for each kind of work, behind a gate and in a graph; also if it can only be read then."""
    registered = "ok(d.cuMemHostRegister(place, size, 0))\n"
    gated = [GATED.format(work=work) for work in WORK.values()]
    constant = GATED.replace("munmap(place, size)", "mprotect(place, size, mmap.PROT_READ)")
    gated += [constant.format(work=WORK[name]) for name in ("copy to", "write of a word")]
    captured = [CAPTURED.format(work=work if "Memcpy" in work else registered + work) for work in WORK.values()]
    ended = python("".join(LATER.format(work=work) for work in gated + captured))
    illegal = int(cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert ended.stdout.splitlines() == [str([illegal, illegal])] * len(gated + captured), ended.stderr[-2000:]


@pytest.fixture
def pages() -> Iterator[int]:
    """The address of 3,000 pages, which are this test's alone."""
    with mmap.mmap(-1, COUNT * PAGE) as pages:
        view = np.frombuffer(pages, np.uint8)
        yield int(view.ctypes.data)
        del view


COUNT = 3000


class TestAccess:
    """The check that the simulated driver makes of memory that is not its own."""

    @pytest.fixture(params=[False, True], ids=["by madvise", "on an older system"], autouse=True)
    def older(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*args: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

        if request.param:
            monkeypatch.setattr(memory._libc, "madvise", unknown)

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize("hole", [0, 1, 1023, 1024, 1025, COUNT - 1])
    def test_without_one_page(self, pages: int, hole: int, write: bool) -> None:
        assert memory.is_accessible(pages + 5, COUNT * PAGE - 5, write)
        protect(pages + hole * PAGE, 0)
        assert not memory.is_accessible(pages, COUNT * PAGE, write)
        assert not memory.is_accessible(pages + hole * PAGE - (hole > 0), 2, write)

    def test_bytes_stay_the_same_and_rights_count(self, pages: int) -> None:
        view = np.ctypeslib.as_array((ctypes.c_ubyte * (3 * PAGE)).from_address(pages))
        view[:] = np.arange(3 * PAGE) % 251
        assert memory.is_accessible(pages + 3, 3 * PAGE - 3, write=True)
        assert (view == np.arange(3 * PAGE) % 251).all()
        protect(pages + PAGE, mmap.PROT_READ)
        assert memory.is_accessible(pages, 2 * PAGE) and not memory.is_accessible(pages, 2 * PAGE, write=True)
        assert not memory.is_accessible(pages, 1 << 64) and not memory.is_accessible((1 << 64) - 1, 1)


def protect(address: int, rights: int) -> None:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), rights) == 0


class TestRegistrations:
    def test_of_memory_that_is_gone_ends_where_a_range_is_reserved(self, rig: Rig) -> None:
        raw, place, size = rig.raw, 0x5200_0000_0000, 2 << 20
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        assert libc.mmap(place, size, 3, 0x100022, -1, 0) == place
        assert raw.cuMemHostRegister(place + PAGE, PAGE, 0)[0] == 0
        libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
        assert said(raw.cuMemHostGetDevicePointer(place + PAGE, 0)) == "SUCCESS"
        assert int(value(raw.cuMemAddressReserve(size, 0, place, 0))) == place
        assert said(raw.cuMemHostUnregister(place + PAGE)) == "HOST_MEMORY_NOT_REGISTERED"
        assert said(raw.cuMemAddressFree(place, size)) == "SUCCESS"

    def test_of_memory_that_a_closed_pool_of_the_host_had(self, rig: Rig) -> None:
        pool, stream = rig.pool(location=HOST), rig.stream()
        address = int(rig.allocate(pool, PAGE, stream))
        rig.free(address, stream)
        rig.synchronize()
        assert said(rig.raw.cuMemHostRegister(address, PAGE, 0)) == "INVALID_VALUE"
        value(rig.raw.cuMemPoolDestroy(rig.disown(pool)))
        assert said(rig.raw.cuMemHostRegister(address, PAGE, 0)) == "INVALID_VALUE"
