"""Intervals against single bytes; and calls that simulated drivers do not have, on a driver that does nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import streamalloc.driver as sd
from streamalloc.checker.clocks import CERTAIN, Timeline
from streamalloc.checker.ranges import Access, AddressMap, Bytes, Range, RecordedOperation
from streamalloc.driver.bindings import cuda
from streamalloc.formats.sizes import size_text

LENGTH = 12
USES = some.lists(
    some.tuples(some.integers(0, 2), some.integers(0, LENGTH), some.integers(0, LENGTH), some.booleans()), max_size=25
)


@settings(max_examples=200, deadline=None)
@given(uses=USES, order=some.lists(some.tuples(some.integers(0, 2), some.integers(0, 2)), max_size=25))
def test_intervals_agree_with_single_bytes(
    uses: list[tuple[int, int, int, bool]], order: list[tuple[int, int]]
) -> None:
    timeline, memory = Timeline(), Bytes()
    streams = [timeline.stream(name) for name in "abc"]
    written: list[Access | None] = [None] * LENGTH
    reads: list[dict[int, Access]] = [{} for _ in range(LENGTH)]
    for number, (which, start, end, write) in enumerate(uses):
        if number < len(order):
            before, after = order[number]
            timeline.wait(streams[after], timeline.record(streams[before]))
        stream = streams[which]
        timeline.submit(stream, lambda _: None)
        access = Access(stream, "use", (), write)
        unordered = memory.record_access(start, end, access, stream.clock, timeline) if start < end else []
        found = set(unordered)
        expected = set()
        for at in range(start, end):
            earlier = [written[at], *(reads[at].values() if write else ())]
            for one in earlier:
                if one is not None and one.actor is not stream:
                    ordered = timeline.order(stream.clock, one.actor.number, one.time)
                    if ordered != CERTAIN:
                        expected.add((one, ordered))
            if write:
                written[at], reads[at] = access, {}
            else:
                reads[at][stream.number] = access
        assert found == expected
    bounds = [(low, high) for low, high, _ in memory.uses.over(0, LENGTH)]
    assert [0, *(high for _, high in bounds)] == [*(low for low, _ in bounds), LENGTH]


def test_ranges_take_the_place_of_others() -> None:
    addresses = AddressMap()
    first, second = Range(100, 50, "one"), Range(200, 50, "two")
    addresses.add(second)
    addresses.add(first)
    assert addresses.find(149) is first and addresses.find(150) is None and addresses.find(99) is None
    assert addresses.pieces(140, 80) == [(first, 140, 150), (second, 200, 220)]
    third = Range(120, 100, "three")
    addresses.add(third)
    assert addresses.living() == [third] and addresses.find(110) is None and addresses.find(230) is None


def test_what_has_ended_is_forgotten_at_last() -> None:
    addresses, stays = AddressMap(), Range(1, 1, "stays")
    addresses.add(stays)
    for number in range(25_000):
        made = Range(16 * (number + 1), 8, "goes")
        made.ended = RecordedOperation(Timeline().thread("host"), "free", ())
        addresses.add(made)
    assert addresses.find(1) is stays and addresses.find(16) is None and addresses.find(made.base) is made


def test_many_readers_leave_nothing_that_the_host_knows() -> None:
    calls = Calls()
    for number in range(300):
        stream = calls.make(cuda.CUstream(0x1000 + number), "cuStreamCreate", 1)
        calls.driver.used(1 << 20, 8, stream, False)
        calls.driver.cuStreamSynchronize(stream)
    found = calls.driver.state.addresses.find(1 << 20)
    assert len(found.last) < 100 and len(found.bytes.reads(0, 8)) < 100
    calls.use(0)
    assert calls.kinds() == []


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1, "1 byte"), (1000, "1,000 bytes"), (4096, "4 KiB"), (3 << 20, "3 MiB"), (1 << 30, "1 GiB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


OK = cuda.CUresult.CUDA_SUCCESS


class Yes:
    """A driver all of whose calls succeed. What a call makes is given beforehand."""

    def __init__(self) -> None:
        self.makes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: (OK, self.makes.pop(0)) if self.makes else (OK,)

    def cuCtxGetCurrent(self) -> Any:
        return (OK, cuda.CUcontext(1))

    def cuCtxGetDevice(self) -> Any:
        return (OK, 0)

    def cuPointerGetAttribute(self, *_: Any) -> Any:
        return (OK, 2)


class Calls:
    """Two streams, memory at 1 MiB and at 2 MiB, and what is found."""

    def __init__(self) -> None:
        self.yes = Yes()
        self.driver: Any = sd.checked(self.yes)
        self.a = self.make(cuda.CUstream(0x10), "cuStreamCreate", 1)
        self.b = self.make(cuda.CUstream(0x20), "cuStreamCreate", 1)
        for address in (1 << 20, 2 << 20):
            self.make(cuda.CUdeviceptr(address), "cuMemAlloc", 1 << 20)

    def make(self, thing: Any, name: str, *args: Any) -> Any:
        self.yes.makes.append(thing)
        return getattr(self.driver, name)(*args)[1]

    def use(self, offset: int, nbytes: int = 1, write: bool = True, of: int = 1) -> None:
        self.driver.used((of << 20) + offset, nbytes, self.b, write)

    def kinds(self) -> list[str]:
        return [one.kind for one in self.driver.hazards]


def _plane(calls: Calls) -> None:
    calls.driver.cuMemsetD2D8Async(1 << 20, 256, 1, 100, 4, calls.a)


def _short_plane(calls: Calls) -> None:
    calls.driver.cuMemsetD2D32Async(1 << 20, 256, 1, 25, 4, calls.a)


def _copy_of_a_plane(calls: Calls) -> None:
    copy = cuda.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = cuda.CUdeviceptr(2 << 20), cuda.CUdeviceptr(1 << 20)
    copy.srcPitch, copy.dstPitch, copy.WidthInBytes, copy.Height = 100, 256, 100, 4
    calls.driver.cuMemcpy2DAsync(copy, calls.a)


def _batch(calls: Calls) -> None:
    rows = range(4)
    targets, sources = [(1 << 20) + 256 * row for row in rows], [(2 << 20) + 100 * row for row in rows]
    calls.driver.cuMemcpyBatchAsync(targets, sources, [100] * 4, 4, [], [], 0, calls.a)


def _nodes(calls: Calls) -> None:
    graph = calls.make(cuda.CUgraph(0x30), "cuGraphCreate", 0)
    node = SimpleNamespace(dst=1 << 20, pitch=256, elementSize=1, width=100, height=4)
    calls.make(cuda.CUgraphNode(1), "cuGraphAddMemsetNode", graph, [], 0, node, None)
    clone = calls.make(cuda.CUgraph(0x31), "cuGraphClone", graph)
    launchable = calls.make(cuda.CUgraphExec(0x32), "cuGraphInstantiate", clone, 0)
    calls.driver.cuGraphLaunch(launchable, calls.a)


@pytest.mark.parametrize("write", [_plane, _short_plane, _copy_of_a_plane, _batch, _nodes])
def test_rows_have_gaps(write: Callable[[Calls], None]) -> None:
    """Four rows of 100 bytes, 256 bytes from one to the next."""
    calls = Calls()
    write(calls)
    calls.use(100, 156)
    calls.use(256 * 3 + 100, 1000)
    assert calls.kinds() == []
    calls.use(256 * 3 + 99)
    assert calls.kinds() == ["race"]


@pytest.mark.parametrize("right", [True, False])
def test_words_in_a_batch(right: bool) -> None:
    calls = Calls()
    kinds = cuda.CUstreamBatchMemOpType
    word = (2 << 20) + 64
    write = SimpleNamespace(
        operation=kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32,
        writeValue=SimpleNamespace(address=word, value=5, value64=0, flags=0),
    )
    wait = SimpleNamespace(
        operation=kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32,
        waitValue=SimpleNamespace(address=word, value=5 if right else 4, value64=0, flags=0 if right else 2),
    )
    calls.driver.used(1 << 20, 8, calls.a, True)
    calls.driver.cuStreamBatchMemOp(calls.a, 1, [write], 0)
    if not right:
        calls.driver.used(1 << 20, 8, calls.a, True)
    calls.driver.cuStreamBatchMemOp(calls.b, 1, [wait], 0)
    calls.use(0)
    assert calls.kinds() == ([] if right else ["race"])


def test_an_event_of_another_library_may_have_been_recorded() -> None:
    """It was made and recorded past the checker, so that nobody knows after what."""
    calls = Calls()
    calls.driver.used(1 << 20, 8, calls.a, True)
    calls.driver.cuStreamWaitEvent(calls.b, cuda.CUevent(0x99), 0)
    calls.use(0)
    assert calls.kinds() == []
    own = calls.make(cuda.CUevent(0x98), "cuEventCreate", 0)
    calls.driver.used(1 << 20, 8, calls.a, True)
    calls.driver.cuStreamWaitEvent(calls.b, own, 0)
    calls.use(0)
    assert "race" in calls.kinds()


def _array_copy(array: Any, memory: int, into: bool, first: int = 0) -> Any:
    """64 bytes in each of 4 rows from one on, and as much memory."""
    kinds = cuda.CUmemorytype
    copy = cuda.CUDA_MEMCPY3D()
    side, other = ("dst", "src") if into else ("src", "dst")
    setattr(copy, f"{side}MemoryType", kinds.CU_MEMORYTYPE_ARRAY)
    setattr(copy, f"{side}Array", array)
    setattr(copy, f"{side}Y", first)
    setattr(copy, f"{other}MemoryType", kinds.CU_MEMORYTYPE_DEVICE)
    setattr(copy, f"{other}Device", cuda.CUdeviceptr(memory))
    copy.WidthInBytes, copy.Height, copy.Depth = 64, 4, 1
    return copy


def _array(calls: Calls) -> Any:
    kind = cuda.CUarray_format.CU_AD_FORMAT_FLOAT
    descriptor = SimpleNamespace(Width=16, Height=8, Depth=0, Format=kind, NumChannels=1, Flags=0)
    return calls.make(cuda.CUarray(0x40), "cuArray3DCreate", descriptor)


def test_rows_of_an_array() -> None:
    calls = Calls()
    array = _array(calls)
    calls.driver.cuMemcpy3DAsync(_array_copy(array, 1 << 20, into=True), calls.a)
    calls.driver.cuMemcpy3DAsync(_array_copy(array, 2 << 20, into=False, first=4), calls.b)
    assert calls.kinds() == []
    calls.driver.cuMemcpy3DAsync(_array_copy(array, 2 << 20, into=False, first=3), calls.b)
    assert calls.kinds() == ["race"] and "array of 512 bytes" in calls.driver.hazards[0].what
    calls.driver.cuMemcpyHtoAAsync(array, 448, 3 << 20, 64, calls.a)
    assert calls.kinds() == ["race"] * 2


def test_an_array_that_was_destroyed() -> None:
    calls = Calls()
    array = _array(calls)
    calls.driver.cuMemcpy3DAsync(_array_copy(array, 1 << 20, into=True), calls.a)
    calls.driver.cuArrayDestroy(array)
    assert calls.kinds() == []
    calls.driver.cuMemcpyAtoD(cuda.CUdeviceptr(1 << 20), array, 0, 64)
    assert calls.kinds() == ["use after free"]


@pytest.mark.parametrize("kind", ["AtoD", "AtoH", "DtoA", "HtoA", "AtoHAsync", "HtoAAsync"])
def test_memory_that_is_copied_to_or_from_an_array(kind: str) -> None:
    calls = Calls()
    calls.driver.cuMemsetD8Async(1 << 20, 1, 64, calls.a)
    sides: list[tuple[Any, ...]] = [(cuda.CUdeviceptr(1 << 20),), (_array(calls), 0)]
    target, source = sides if kind.startswith("A") else reversed(sides)
    getattr(calls.driver, f"cuMemcpy{kind}")(*target, *source, 64, *[calls.b] * ("Async" in kind))
    assert calls.kinds() == ["race"]


@pytest.mark.parametrize("name", ["cuArrayCreate", "cuGraphClone", "cuGraphInstantiateWithParams"])
def test_what_was_made_may_be_ended(name: str) -> None:
    calls = Calls()
    if name == "cuArrayCreate":
        descriptor = SimpleNamespace(Width=16, Height=8, Format=cuda.CUarray_format.CU_AD_FORMAT_HALF, NumChannels=2)
        ended = calls.driver.cuArrayDestroy(calls.make(cuda.CUarray(0x40), name, descriptor))
    else:
        graph = calls.make(cuda.CUgraph(0x30), "cuGraphCreate", 0)
        kind = cuda.CUgraph if name == "cuGraphClone" else cuda.CUgraphExec
        made = calls.make(kind(0x31), name, graph, *([] if name == "cuGraphClone" else [None]))
        ended = (calls.driver.cuGraphDestroy if name == "cuGraphClone" else calls.driver.cuGraphExecDestroy)(made)
    assert ended == (OK,) and calls.kinds() == []


def test_nodes_with_common_parameters() -> None:
    """Added to a graph, changed in an executable graph, and replaced with those of another graph."""
    calls = Calls()

    def fill(address: int) -> Any:
        params = SimpleNamespace(dst=address, pitch=64, elementSize=1, width=64, height=1)
        return SimpleNamespace(type=cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, memset=params)

    graphs = []
    for number in (0, 1):
        graphs.append(calls.make(cuda.CUgraph(0x30 + number), "cuGraphCreate", 0))
        node = cuda.CUgraphNode(0x40 + number)
        calls.make(node, "cuGraphAddNode", graphs[-1], [], 0, fill((1 << 20) + 1024 * number))
    launchable = calls.make(cuda.CUgraphExec(0x50), "cuGraphInstantiate", graphs[0], 0)
    calls.driver.cuGraphExecUpdate(launchable, graphs[1])
    calls.driver.cuGraphLaunch(launchable, calls.a)
    calls.use(0, 1024)
    assert calls.kinds() == []
    calls.use(1024)
    assert calls.kinds() == ["race"]
    calls.driver.cuGraphExecNodeSetParams(launchable, cuda.CUgraphNode(0x40), fill((1 << 20) + 2048))
    calls.driver.cuGraphLaunch(launchable, calls.a)
    calls.use(2047, 1)
    assert calls.kinds() == ["race"]
    calls.use(2048)
    assert calls.kinds() == ["race"] * 2


def test_a_kernel_with_common_parameters() -> None:
    """It is known as a kernel, whose uses are not."""
    calls = Calls()
    kernel = SimpleNamespace(func=0, kern=0, kernelParams=0, extra=0)
    params = SimpleNamespace(type=cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, kernel=kernel)
    graph = calls.make(cuda.CUgraph(0x30), "cuGraphCreate", 0)
    calls.make(cuda.CUgraphNode(0x40), "cuGraphAddNode", graph, [], 0, params)
    calls.driver.cuGraphLaunch(calls.make(cuda.CUgraphExec(0x50), "cuGraphInstantiate", graph, 0), calls.a)
    (note,) = calls.driver.notes
    assert note.startswith("kernels that do not declare their uses")


@pytest.mark.parametrize("waits", ["cuCtxWaitEvent", "cuGreenCtxWaitEvent", "cuWaitExternalSemaphoresAsync", ""])
def test_a_stream_waits_without_its_own_event(waits: str) -> None:
    calls = Calls()
    event = calls.make(cuda.CUevent(0x98), "cuEventCreate", 0)
    calls.driver.used(1 << 20, 8, calls.a, True)
    calls.driver.cuEventRecord(event, calls.a)
    if waits:
        semaphores = waits.endswith("Async")
        getattr(calls.driver, waits)(*([[], [], 0, calls.b] if semaphores else [cuda.CUcontext(1), event]))
    calls.use(0)
    assert calls.kinds() == ([] if waits else ["race"])


def test_another_thread_gets_a_handle_during_its_end() -> None:
    calls = Calls()
    place = SimpleNamespace(id=1, type=cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    properties = SimpleNamespace(allocType=None, location=place)
    node = SimpleNamespace(dst=1 << 20, pitch=64, elementSize=1, width=64, height=1)

    def graph() -> Any:
        made = calls.make(cuda.CUgraph(0x30), "cuGraphCreate", 0)
        calls.make(cuda.CUgraphNode(1), "cuGraphAddMemsetNode", made, [], 0, node, None)
        return made

    def launchable() -> Any:
        return calls.make(cuda.CUgraphExec(0x32), "cuGraphInstantiate", source, 0)

    def pool() -> Any:
        return calls.make(cuda.CUmemoryPool(0x50), "cuMemPoolCreate", properties)

    def reserved() -> Any:
        return calls.make(cuda.CUdeviceptr(16 << 20), "cuMemAddressReserve", 64, 0, 0, 0)

    def end(name: str, make: Callable[[], Any], made: Any, *args: Any) -> Any:
        def answer(*_: Any) -> Any:
            make()
            return (OK,)

        setattr(calls.yes, name, answer)
        getattr(calls.driver, name)(made, *args)
        return made

    source = graph()
    end("cuGraphDestroy", graph, source)
    calls.driver.cuGraphLaunch(end("cuGraphExecDestroy", launchable, launchable()), calls.a)
    calls.use(0)
    assert calls.kinds() == ["race"]
    ours = end("cuMemPoolDestroy", pool, pool())
    memory = calls.make(cuda.CUdeviceptr(8 << 20), "cuMemAllocFromPoolAsync", 64, ours, calls.a)
    end("cuMemAddressFree", reserved, reserved(), 64)
    calls.driver.used(memory, 64, calls.a, True)
    calls.driver.used(16 << 20, 64, calls.a, True)
    assert calls.kinds() == ["race", *2 * ["access without a grant"]]


@pytest.mark.parametrize("work", ["", "a kernel", "a grid", "a decompression"])
def test_work_that_may_have_written_anything(work: str) -> None:
    answers = Yes()
    driver: Any = sd.checked(answers, uninitialized=True)
    answers.makes += [cuda.CUmemoryPool(0x50)]
    pool = driver.cuDeviceGetDefaultMemPool(0)[1]
    answers.makes += [cuda.CUstream(0x10)]
    stream = driver.cuStreamCreate(1)[1]
    answers.makes += [cuda.CUdeviceptr(4 << 20)]
    source = driver.cuMemAllocFromPoolAsync(64, pool, stream)[1]
    if work == "a kernel":
        driver.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
    elif work == "a grid":
        driver.cuLaunchGridAsync(None, 1, 1, stream)
    elif work:
        driver.cuMemBatchDecompressAsync(SimpleNamespace(), 1, 0, stream)
    driver.cuMemcpyDtoDAsync(8 << 20, source, 64, stream)
    assert [one.kind for one in driver.hazards] == ([] if work else ["uninitialized"])
