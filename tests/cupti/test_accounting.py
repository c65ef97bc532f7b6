"""Device memory of the process by library and line: now, at the peak, and when the driver refused it."""

import contextlib
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import cupti, traces
from streamalloc.cupti import accounting, callers, segments
from streamalloc.cupti.accounting import Followed
from streamalloc.cupti.blocks import ALLOCATED, FREED, SEGMENT, Event
from streamalloc.cupti.internal import ALLOCATIONS, FUNCTIONS, REST, Recording
from streamalloc.cupti.libraries import Libraries
from streamalloc.driver.bindings import cuda
from streamalloc.driver.internal import line_of
from tests.cupti.pytorch import MiB, Torch
from tests.interleaving import interleaved
from tests.processes import in_a_child
from tests.support import collecting_at


@pytest.fixture
def memory(shown: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[cupti.Memory]:
    """The account of all calls of the test, with a current context."""
    monkeypatch.setattr(Libraries, "followed", lambda self: contextlib.nullcontext(self))
    with sa.Device(0, driver=shown).current():
        with cupti.Memory(shown).running() as running:
            yield running
        assert running.error is None


def ok(answer: tuple[Any, ...]) -> Any:
    assert not answer[0], answer
    return answer[1] if len(answer) == 2 else answer[1:]


def mine(moment: cupti.Moment) -> dict[str, int]:
    """MiB of the test's calls by kind of memory."""
    found: dict[str, int] = {}
    for row in moment.rows:
        if row.library != "the driver":
            found[row.what] = found.get(row.what, 0) + row.nbytes // MiB
    return found


def marks(moment: cupti.Moment) -> dict[str, int]:
    """MiB by the comment at the end of the line that took them."""
    import linecache

    found: dict[str, int] = {}
    for row in moment.rows:
        for code, at in [one for one in row.place if one[0].co_filename == __file__][:1]:
            mark = linecache.getline(code.co_filename, line_of(code, at)).partition("# ")[2].strip()
            found[mark] = found.get(mark, 0) + row.nbytes // MiB
    return found


def properties() -> Any:
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return prop


def array(depth: int = 0) -> Any:
    desc = cuda.CUDA_ARRAY3D_DESCRIPTOR()
    desc.Width, desc.Height, desc.Depth, desc.NumChannels = 1024, 1024 // (depth or 1), depth, 4
    desc.Format = cuda.CUarray_format.CU_AD_FORMAT_FLOAT
    return desc


MAKERS: dict[str, tuple[str, int, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "cuMemAlloc": ("cuMemAlloc", 8, lambda d: ok(d.cuMemAlloc(8 * MiB)), lambda d, made: d.cuMemFree(made)),
    "cuMemAllocPitch": (
        "cuMemAlloc",
        4,
        lambda d: ok(d.cuMemAllocPitch(4096, 1024, 4))[0],
        lambda d, made: d.cuMemFree(made),
    ),
    "cuMemAllocAsync": (
        "pool allocations",
        8,
        lambda d: ok(d.cuMemAllocAsync(8 * MiB, 1)),
        lambda d, made: d.cuMemFreeAsync(made, 1),
    ),
    "cuMemCreate": (
        "cuMemCreate",
        8,
        lambda d: ok(d.cuMemCreate(8 * MiB, properties(), 0)),
        lambda d, made: d.cuMemRelease(made),
    ),
    "cuArray3DCreate": ("arrays", 16, lambda d: ok(d.cuArray3DCreate(array())), lambda d, made: d.cuArrayDestroy(made)),
    "cuMipmappedArrayCreate": (
        "arrays",
        20,  # 16 MiB, and a quarter of it
        lambda d: ok(d.cuMipmappedArrayCreate(array(), 2)),
        lambda d, made: d.cuMipmappedArrayDestroy(made),
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_memory_counts_from_its_call_to_its_end(shown: Any, memory: cupti.Memory, name: str) -> None:
    what, size, make, end = MAKERS[name]
    made = make(shown)
    now = memory.now()
    assert mine(now) == {what: size}
    (row,) = (row for row in now.rows if row.what == what)
    assert row.library == "the program" and row.device == 0
    assert __file__ in {code.co_filename for code, _ in row.place}
    ok((*end(shown, made), None))
    now, peak = memory.moments()
    assert mine(now) == {} and mine(peak) == {what: size}


def test_frees_that_the_gate_has_written_down_count(shown: Any, memory: cupti.Memory) -> None:
    assert memory._subscription is not None
    memory._subscription.gate.write_frees()
    counts: list[Callable[[], int]] = [lambda: memory.taken()[0], lambda: mine(memory.now()).get("cuMemAlloc", 0)]
    for count in counts:
        address = ok(shown.cuMemAlloc(4 * MiB))
        assert count()
        ok(shown.cuMemFree(address))
        assert not count()


def test_the_sum_is_the_drivers_figure_and_the_rest_stays(shown: Any, memory: cupti.Memory) -> None:
    def rest(moment: cupti.Moment) -> int:
        return sum(row.nbytes for row in moment.rows if row.what.startswith(REST))

    before = memory.now()
    held = [ok(shown.cuMemAlloc(32 * MiB)) for _ in range(4)]
    after = memory.now()
    for one in held:
        ok((*shown.cuMemFree(one), None))
    assert [row.what for row in before.rows if row.what.startswith(REST)] == [REST]
    assert before.nbytes == before.driver[0] and after.nbytes == after.driver[0]
    grown = after.driver[0] - before.driver[0]
    assert abs(grown - 128 * MiB) < grown / 100 and abs(rest(after) - rest(before)) < grown / 100


def test_the_account_is_changed_and_read_under_its_lock(memory: cupti.Memory) -> None:
    """Each step once, but ``moments`` twice: what it asks the driver it asks without, since callbacks take the lock."""

    class Lock(contextlib.ContextDecorator):
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *_: object) -> None:
            pass

    entered: list[bool] = []
    call = cupti.DriverCall("cuStreamEndCapture", (7, None), (0, None), 0, 0, (), 0)
    memory._lock = Lock()  # type: ignore[assignment]
    for step, times in (
        (lambda: memory.called(call), 1),
        (lambda: memory._library_has(Event(1, FREED, 64, 32, 0, "CuPy", tuple)), 1),
        (memory.taken, 1),
        (memory.moments, 2),
    ):
        entered.clear()
        step()
        assert len(entered) == times
    memory._lock = threading.RLock()


def test_memory_is_counted_by_line_at_the_peak(shown: Any, memory: cupti.Memory) -> None:
    first = ok(shown.cuMemAlloc(8 * MiB))  # first
    ok((*shown.cuMemFree(first), None))
    second = ok(shown.cuMemAlloc(24 * MiB))  # second
    third = ok(shown.cuMemAllocAsync(4 * MiB, 1))  # third
    ok((*shown.cuMemFree(second), None))
    last = ok(shown.cuMemAlloc(2 * MiB))  # last
    now, peak = memory.moments()
    # What cuMemFree takes of a pool counts as used for ever.
    ok((*shown.cuMemFreeAsync(third, 1), None))
    ok((*shown.cuMemFree(last), None))
    assert marks(now) == {"third": 4, "last": 2} and marks(peak) == {"second": 24, "third": 4}


def test_sums_at_the_peak_are_those_of_a_model(shown: Any) -> None:
    """Random calls that take and give back: the sums are those of the moment with the most."""
    random_ = random.Random(7)
    account = cupti.Memory(shown)
    places = [((compile(text, __file__, "exec"), 0),) for text in ("one()", "two()")]
    live: dict[int, tuple[int, int]] = {}
    most, then, time = 0, {0: 0, 1: 0}, 0

    def call(name: str, args: tuple[Any, ...], answer: Any, place: int) -> None:
        success = cuda.CUresult.CUDA_SUCCESS
        account.called(cupti.DriverCall(name, args, (success, answer), 1, 0, places[place], time))

    for time in range(2000):
        if live and random_.random() < 0.49:
            address = random_.choice([*live])
            call("cuMemFree", (address,), None, live.pop(address)[1])
        else:
            nbytes, place = random_.randrange(1, 99), random_.randrange(2)
            live[address := 1000 + time] = nbytes, place
            call("cuMemAlloc", (nbytes,), address, place)
        total = sum(nbytes for nbytes, _ in live.values())
        if total > most:
            most = total
            then = {one: sum(nbytes for nbytes, place in live.values() if place == one) for one in (0, 1)}
    now, peak = account.moments()
    present = {one: sum(nbytes for nbytes, at in live.values() if at == one) for one in (0, 1)}
    for moment, model in ((now, present), (peak, then)):
        for number, stack in enumerate(places):
            found = sum(row.nbytes for row in moment.rows if row.place == stack)
            assert found == model[number], (moment.name, number)
    assert peak.nbytes == most and most > now.nbytes


def test_physical_memory_counts_until_its_last_mapping_ends(shown: Any, memory: cupti.Memory) -> None:
    handle = ok(shown.cuMemCreate(4 * MiB, properties(), 0))
    at = ok(shown.cuMemAddressReserve(8 * MiB, 0, 0, 0))
    ok((*shown.cuMemMap(at, 4 * MiB, 0, handle, 0), None))
    ok((*shown.cuMemMap(int(at) + 4 * MiB, 4 * MiB, 0, handle, 0), None))
    ok((*shown.cuMemRelease(handle), None))
    assert mine(memory.now()) == {"cuMemCreate": 4}
    again = ok(shown.cuMemRetainAllocationHandle(int(at) + MiB))  # any address in the mapping
    ok((*shown.cuMemUnmap(at, 8 * MiB), None))
    assert mine(memory.now()) == {"cuMemCreate": 4}
    ok((*shown.cuMemRelease(again), None))
    assert mine(memory.now()) == {}
    ok((*shown.cuMemAddressFree(at, 8 * MiB), None))


def test_a_pool_has_a_reserve_beside_its_allocations(shown: Any, memory: cupti.Memory) -> None:
    props = cuda.CUmemPoolProps()
    props.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = ok(shown.cuMemPoolCreate(props))
    threshold = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok((*shown.cuMemPoolSetAttribute(pool, threshold, cuda.cuuint64_t(1 << 40)), None))
    kept, freed = (ok(shown.cuMemAllocFromPoolAsync(64 * MiB, pool, 1)) for _ in range(2))
    ok((*shown.cuMemFreeAsync(freed, 1), None))
    ok((*shown.cuStreamSynchronize(1), None))
    now = memory.now()
    reserved = int(ok(shown.cuMemPoolGetAttribute(pool, cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)))
    ok((*shown.cuMemPoolTrimTo(pool, 0), None))
    ok((*shown.cuMemFree(ok(shown.cuMemAlloc(256 * MiB))), None))
    peak = memory.moments()[1]  # the largest reserve so far counts
    reserve, of_peak = (sum(row.nbytes for row in one.rows if row.what == "pools' reserve") for one in (now, peak))
    ok((*shown.cuMemFreeAsync(kept, 1), None))
    ok((*shown.cuStreamSynchronize(1), None))
    ok((*shown.cuMemPoolDestroy(pool), None))
    assert mine(now) == {"pool allocations": 64} and reserve >= reserved - 64 * MiB >= 64 * MiB
    assert of_peak >= reserve


def test_memory_ends_with_its_context(shown: Any, memory: cupti.Memory) -> None:
    context = ok(shown.cuCtxCreate(*([] if hasattr(cuda, "cuCtxCreate_v4") else [None]), 0, 0))
    ok(shown.cuMemAlloc(8 * MiB))
    assert mine(memory.now()) == {"cuMemAlloc": 8}
    ok((*shown.cuCtxDestroy(context), None))
    assert mine(memory.now()) == {}


def test_a_refusal_keeps_what_was_held_then(shown: Any, memory: cupti.Memory) -> None:
    held = ok(shown.cuMemAlloc(16 * MiB))  # held
    assert shown.cuMemAlloc(1 << 45)[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    ok((*shown.cuMemFree(held), None))
    now, _, refused = memory.moments()
    assert refused.name == f"cuMemAlloc of {1 << 45:,} bytes was refused"
    assert marks(refused) == {"held": 16} and marks(now) == {}


def test_allocations_of_a_capture_are_not_those_of_a_pool(shown: Any, memory: cupti.Memory) -> None:
    stream = ok(shown.cuStreamCreate(1))
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok((*shown.cuStreamBeginCapture(stream, relaxed), None))
    address = ok(shown.cuMemAllocAsync(8 * MiB, stream))
    ok((*shown.cuMemFreeAsync(address, stream), None))
    graph = ok(shown.cuStreamEndCapture(stream))
    after = ok(shown.cuMemAllocAsync(2 * MiB, stream))
    assert mine(memory.now()) == {"pool allocations": 2}
    ok((*shown.cuMemFreeAsync(after, stream), None))
    ok((*shown.cuGraphDestroy(graph), None))
    ok((*shown.cuStreamDestroy(stream), None))


def test_a_capture_of_a_thread_s_own_default_stream_is_not_one_of_another_thread(
    shown: Any, memory: cupti.Memory
) -> None:
    """The streams of all threads have the same handle."""
    context, taken = shown.cuCtxGetCurrent()[1], list[dict[str, int]]()

    def allocate() -> None:
        ok(shown.cuCtxSetCurrent(context))
        address = ok(shown.cuMemAllocAsync(MiB, cuda.CU_STREAM_PER_THREAD))
        taken.append(mine(memory.now()))
        ok(shown.cuMemFreeAsync(address, cuda.CU_STREAM_PER_THREAD))
        ok(shown.cuStreamSynchronize(cuda.CU_STREAM_PER_THREAD))

    other = threading.Thread(target=allocate)
    ok(shown.cuStreamBeginCapture(2, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    other.start()
    other.join()
    ok(shown.cuGraphDestroy(ok(shown.cuStreamEndCapture(2))))
    assert taken == [{"pool allocations": 1}] and mine(memory.now()) == {}


def test_an_error_of_the_account_does_not_reach_the_program(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti.Memory, "_made", lambda self, call: 1 / 0)
    with sa.Device(0, driver=shown).current(), cupti.Memory(shown).running() as running:
        ok((*shown.cuMemFree(ok(shown.cuMemAlloc(MiB))), None))
    assert isinstance(running.error, ZeroDivisionError)


def test_a_call_is_of_the_innermost_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def called_from(*files: str) -> str:
        """The library of a call whose frames are of these files, outermost first."""
        function: Callable[[], str] = lambda: callers.caller(sys._getframe(1))  # noqa: E731
        for file in reversed(files):
            names = {"inner": function}
            exec(compile("outer = lambda: inner()", file, "exec"), names)
            function = names["outer"]
        return function()

    monkeypatch.setattr(callers, "_backtrace", None)
    installed = "/env/lib/python3.12/site-packages"
    assert called_from("/home/user/program.py") == "the program"
    assert called_from("/home/user/program.py", f"{installed}/cupy/_core.py") == "CuPy"
    assert called_from(f"{installed}/torch/nn.py", f"{installed}/rmm/mr.py", f"{installed}/cuda/bindings/x.py") == "RMM"
    assert called_from(f"{installed}/torch/nn.py", "/home/user/program.py") == "the program"
    assert called_from("/home/user/program.py", f"{installed}/somelib/part/x.py") == "somelib"

    def called_by(*files: str) -> str:
        """The library of a call whose frames of C are of these files, innermost first."""
        monkeypatch.setattr(callers, "_Frames", lambda: [*range(1, 1 + len(files))])
        monkeypatch.setattr(callers, "_backtrace", lambda frames, most: len(frames))
        monkeypatch.setattr(callers, "_file", lambda address: files[address - 1])
        return callers.caller(None)

    below = ("/x/libcupti.so.13", "/usr/lib/libcuda.so.1")
    assert called_by(*below, "/x/libcudart.so.13", f"{installed}/nvidia/lib/libcudnn_ops.so.9") == "cuDNN"
    assert called_by(*below, f"{installed}/torch/lib/libc10_cuda.so", "/usr/bin/python3.12") == "PyTorch"
    assert called_by(*below, "/lib/_ctypes.cpython-312.so", "/usr/bin/python3.12", "/x/libhost.so") == "the program"
    assert called_by("/x/libother.so", *below, "/usr/bin/python3.12") == "the program"


def test_the_library_is_that_of_the_calling_thread_s_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, or a finaliser, may ask meanwhile."""

    def backtrace(frames: Any, most: int) -> int:
        frames[0], frames[1] = 1, mine.library
        return 2

    def ask(library: int) -> None:
        mine.library = library
        found[library] = callers.caller(None)

    mine, found = threading.local(), dict[int, str]()
    monkeypatch.setattr(callers, "_backtrace", backtrace)
    monkeypatch.setattr(callers, "_file", {1: "/lib/libcuda.so.1", 2: "/lib/libnccl.so.2", 3: "/lib/libcublas.so"}.get)
    for _ in interleaved(callers.caller, lambda: None, lambda _: ask(2), lambda _: ask(3)):
        assert found == {2: "NCCL", 3: "cuBLAS"}


def test_the_figure_of_the_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a container it has its number there; inside, it is the one that is new."""

    def figures(*readings: dict[int, int]) -> list[dict[str, int]]:
        left = [{"GPU-1": callers.Gpu(100, one)} for one in readings]
        monkeypatch.setattr(callers, "gpus", lambda: left.pop(0))
        process = callers.Process()
        assert process.taken("GPU-1", 30) == 70 and process.taken("GPU-2", 30) is None
        return [process.figures() for _ in readings[1:]]

    other = {900001: 5}
    assert figures(other, other | {os.getpid(): 9, 900002: 7}) == [{"GPU-1": 9}]
    assert figures(other, other | {900003: 9}, {900003: 8, 900004: 1}) == [{"GPU-1": 9}, {"GPU-1": 8}]
    assert figures(other, other | {900003: 9, 900004: 1}, other) == [{}, {}]


def test_an_error_of_the_account_does_not_stop_the_program(machine: Any) -> None:
    """It is kept, and the account gets no further calls."""
    calls: list[cupti.DriverCall] = []

    def called(call: cupti.DriverCall) -> None:
        calls.append(call)
        raise ZeroDivisionError

    account = types.SimpleNamespace(failure=None, called=called)
    with sa.Device(0, driver=machine).current():
        driver = Followed(machine, account, frozenset(["cuMemGetInfo"]))
        assert not driver.cuMemGetInfo()[0] and not driver.cuMemGetInfo()[0]
    assert len(calls) == 1 and isinstance(account.failure, ZeroDivisionError)


def test_memory_that_another_thread_gets_at_once_stays_in_the_account(machine: Any) -> None:
    def make() -> tuple[Any, cupti.Memory, int]:
        account = cupti.Memory(machine)
        driver = Followed(machine, account, FUNCTIONS)
        return driver, account, ok(driver.cuMemAllocAsync(MiB, stream))

    with sa.Device(0, driver=machine).current():
        stream, got = ok(machine.cuStreamCreate(1)), list[int]()
        for _, account, _ in interleaved(
            Followed._observe,
            make,
            lambda state: state[0].cuMemFreeAsync(state[2], stream),
            lambda state: got.append(ok(state[0].cuMemAllocAsync(MiB, stream))),
        ):
            now, _, libraries = account.taken()
            assert account.failure is None and now == sum(libraries.values()) == MiB
            ok(machine.cuMemFreeAsync(got.pop(), stream))
        ok(machine.cuStreamSynchronize(stream))


def test_a_free_waits_for_no_account_of_another_thread(machine: Any) -> None:
    """The account may wait for a thread of which a finaliser frees memory."""
    told, freed = threading.Event(), threading.Event()

    def called(call: Any) -> None:
        if call.function == "cuMemAllocAsync" and threading.current_thread() is thread:
            told.set()
            assert freed.wait(10)

    account = types.SimpleNamespace(called=called, failure=None)
    driver = Followed(machine, account, FUNCTIONS)

    def allocate() -> None:
        with sa.Device(0, driver=machine).current():
            kept.append(ok(driver.cuMemAllocAsync(MiB, stream)))

    thread = threading.Thread(target=allocate)
    with sa.Device(0, driver=machine).current():
        stream = ok(machine.cuStreamCreate(1))
        kept = [ok(driver.cuMemAllocAsync(MiB, stream))]
        thread.start()
        assert told.wait(10)
        ok(driver.cuMemFreeAsync(kept.pop(), stream))
        freed.set()
        thread.join()
        assert account.failure is None
        ok(driver.cuMemFreeAsync(kept.pop(), stream))
        ok(machine.cuStreamSynchronize(stream))


@pytest.mark.simulated_only("no driver call is made in the child")
def test_a_forked_child_waits_for_no_thread_of_its_parent(machine: Any) -> None:
    account = cupti.Memory(machine)
    driver = Followed(machine, account, FUNCTIONS)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with account._lock:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert in_a_child(lambda: driver.cuMemFreeAsync(0, 0)) == 0
    over.set()
    thread.join()


# --- libraries ------------------------------------------------------------------------------------------------------


def split_of(torch: segments.Torch) -> dict[str, int]:
    found = torch.split(0)
    lines = {f"line {place[0][0].co_firstlineno}": nbytes for place, nbytes in found.live.items()}
    return {"cached": found.cached, "fragments": found.fragments, **lines}


def test_earlier_states_of_pytorchs_allocator_are_those_that_were() -> None:
    """For random acts, and each span of time: the state with the most live bytes while the segments had their size."""
    random_, torch = random.Random(3), Torch()
    for _ in range(300):
        free = [at for at, (*_, blocks) in torch.segments.items() if not blocks]
        live = [(at, one) for at, (*_, blocks) in torch.segments.items() for one in blocks]
        kind = random_.random()
        if not torch.segments or kind < 0.1:
            torch.act("segment_alloc", (1 + len(torch.history)) << 26, random_.choice((2, 20)) * MiB)
        elif kind < 0.2 and free:
            at = random_.choice(free)
            torch.act("segment_free", at, torch.segments[at][0])
        elif kind < 0.5 and live:
            at, one = random_.choice(live)
            torch.act("free_completed", one, torch.segments[at][2][one][0])
        else:
            at = random_.choice([*torch.segments])
            places = [at + part * 65536 for part in range(torch.segments[at][0] // 65536)]
            empty = [place for place in places if place not in torch.segments[at][2]]
            if empty:
                torch.act("alloc", random_.choice(empty), random_.choice((512, 65536)), random_.randrange(1, 9))
    now = segments.Torch(torch._snapshot())
    assert split_of(now) == torch.split()
    for number in range(0, len(torch.states), 7):
        time, reserved, _ = torch.states[number]
        span = torch.states[number : number + 5]
        stop = span[-1][0] * 1000 + 5_000_000  # between two entries
        same = [split for _, size, split in span if size == reserved]
        sizes = [sum(value for name, value in split.items() if name.startswith("line")) for split in same]
        found = now.at_most(time * 1000 + 5_000_000, stop, reserved)
        assert found is not None
        best = [split for split, size in zip(same, sizes, strict=True) if size == max(sizes)]
        assert split_of(found) in best, number
    first = now.at_most(0, 5_000_000, 0)  # before all acts
    assert first is not None and split_of(first) == {"cached": 0, "fragments": 0}
    assert now.at_most(0, 10**18, 12345) is None  # segments that never had this size


@pytest.mark.parametrize(("mapped", "rest"), [(0, {MiB: 2 * MiB}), (1, {0: MiB, 2 * MiB: MiB}), (2, {0: 2 * MiB})])
def test_a_mapping_is_any_part_of_an_expandable_segment(mapped: int, rest: dict[int, int]) -> None:
    base = 1 << 30
    entry = {"action": "segment_map", "addr": base + mapped * MiB, "size": MiB, "time_us": 10}
    segment = {"address": base, "total_size": 3 * MiB, "device": 0, "blocks": []}
    before = segments.Torch({"segments": [segment], "device_traces": [[entry]]}).at_most(0, 10_000, 2 * MiB)
    assert before is not None and before.segments == {base + offset: size for offset, size in rest.items()}


def test_pytorchs_segments_are_split(shown: Any, memory: cupti.Memory) -> None:
    torch = Torch()
    memory.libraries.torch = torch
    one, two = (int(ok(shown.cuMemAlloc(20 * MiB))) for _ in range(2))
    torch.act("segment_alloc", one, 20 * MiB)
    torch.act("segment_alloc", two, 20 * MiB)
    torch.act("alloc", one + 4 * MiB, 8 * MiB, line=7)
    other = ok(shown.cuMemAlloc(MiB))
    now = memory.now()
    assert mine(now) == {"live blocks": 8, "cached blocks": 20, "fragments": 12, "cuMemAlloc": 1}
    (live,) = (row for row in now.rows if row.what == "live blocks")
    assert live.library == "PyTorch" and line_of(*live.place[0]) == 7
    torch.act("segment_free", two, 20 * MiB)
    for address in (one, two, other):
        ok((*shown.cuMemFree(address), None))


class CuPy:
    """CuPy's hooks."""

    def __init__(self) -> None:
        self.cuda = types.SimpleNamespace(
            MemoryHook=contextlib.nullcontext, get_current_stream=lambda: types.SimpleNamespace(ptr=0)
        )


def test_cupys_segments_are_split(shown: Any, memory: cupti.Memory) -> None:
    def tell(kind: str, address: int, nbytes: int) -> None:
        memory.libraries._take(Event(1, kind, address, nbytes, 0, "CuPy", tuple))

    one, two = (int(ok(shown.cuMemAlloc(20 * MiB))) for _ in range(2))
    for address, size in ((one, 20), (two, 5)):
        tell(SEGMENT, address, size * MiB)
        tell(ALLOCATED, address, size * MiB)
    full = memory.now()
    tell(FREED, one, 20 * MiB)
    now, peak = memory.moments()
    for address in (one, two):
        ok((*shown.cuMemFree(address), None))
    assert mine(full) == {"live blocks": 25, "fragments": 15}
    assert mine(now) == {"live blocks": 5, "cached blocks": 20, "fragments": 15}
    assert mine(peak) == {"live blocks": 25, "cached blocks and fragments": 15}


def test_finalisers_that_free_blocks_while_the_account_is_read(shown: Any, memory: cupti.Memory) -> None:
    """They may run on the thread that reads it, which has the lock."""

    def tell(kind: str, address: int) -> None:
        memory._library_has(Event(1, kind, address, 512, 0, "CuPy", tuple))

    def free(*_: object) -> None:
        if left:
            tell(FREED, left.pop())

    segment = int(ok(shown.cuMemAlloc(2 * MiB)))
    tell(SEGMENT, segment)
    left = [segment + 512 * number for number in range(1024)]
    for address in left:
        tell(ALLOCATED, address)
    with collecting_at(1, free):
        moments = memory.moments()
    ok((*shown.cuMemFree(segment), None))
    assert len(moments) == 2 and len(left) < 1024


def test_blocks_of_libraries_are_recorded_in_place_of_their_segments(shown: Any) -> None:
    torch, recording = Torch(), Recording()
    recording.libraries.torch = torch
    with sa.Device(0, driver=shown).current(), cupti.subscribe(recording.called, ALLOCATIONS):
        segment = int(ok(shown.cuMemAlloc(20 * MiB)))
        torch.act("segment_alloc", segment, 20 * MiB)
        for action in ("alloc", "free_completed", "alloc"):
            torch.act(action, segment, MiB, line=1)
        other = int(ok(shown.cuMemAlloc(4 * MiB)))
        for address in (other, segment):
            ok((*shown.cuMemFree(address), None))
    trace = traces.from_calls(recording.calls())
    assert [(event.action, event.nbytes // MiB) for event in trace.events] == [
        ("allocate", 1),
        ("free", 1),
        ("allocate", 1),
        ("allocate", 4),
        ("free", 4),
    ]


@pytest.mark.simulated_only("on hardware, another library may have a context current")
def test_a_context_that_is_gone_hides_no_other() -> None:
    driver: Any = sd.simulated(devices=2)
    driver.cuInit(0)
    contexts = {int(driver.cuDevicePrimaryCtxRetain(ordinal)[1]) for ordinal in (0, 1)}
    asked = accounting._Asked(sd.faulty(driver, "cuCtxPushCurrent"), contexts, {})
    assert (len(asked.lost), len(asked.free)) == (1, 1)
