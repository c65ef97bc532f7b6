"""Calls as a subscriber sees them: arguments, answers, threads, places, errors."""

import contextlib
import ctypes
import functools
import shutil
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import cupti
from streamalloc.cupti import gate, library
from streamalloc.cupti.gate import C_CALLBACK, Gate, _executable, listing, machine_code
from streamalloc.cupti.kernels import Kernel
from streamalloc.cupti.layouts import layout
from streamalloc.cupti.recording import Recording
from streamalloc.cupti.subscription import _known
from streamalloc.driver.bindings import cuda
from tests.cupti.interposed import encode
from tests.processes import in_a_child
from tests.support import in_threads

KiB = 1 << 10


def seen(shown: Any, *functions: str) -> tuple[list[cupti.DriverCall], Any]:
    calls: list[cupti.DriverCall] = []
    return calls, cupti.subscribe(calls.append, functions)


def test_calls_have_their_arguments_and_answers(shown: Any) -> None:
    calls, block = seen(shown, "cuMemAllocAsync", "cuMemsetD8Async", "cuMemFreeAsync", "cuStreamSynchronize")
    with sa.Device(0, driver=shown).current(), block as subscription:
        stream = shown.cuStreamCreate(1)[1]
        address = int(shown.cuMemAllocAsync(4 * KiB, stream)[1])
        shown.cuMemsetD8Async(address, 7, 4 * KiB, stream)
        shown.cuMemFreeAsync(address, stream)
        shown.cuStreamSynchronize(stream)
        shown.cuStreamDestroy(stream)
    success, handle = cuda.CUresult.CUDA_SUCCESS, int(stream)
    assert subscription.error is None
    assert [(one.function, one.args, one.answer) for one in calls] == [
        ("cuMemAllocAsync", (4 * KiB, handle), (success, address)),
        ("cuMemsetD8Async", (address, 7, 4 * KiB, handle), (success,)),
        ("cuMemFreeAsync", (address, handle), (success,)),
        ("cuStreamSynchronize", (handle,), (success,)),
    ]
    assert {one.thread for one in calls} == {threading.get_ident()}
    assert [one.time for one in calls] == sorted(one.time for one in calls)
    assert all(any(code.co_filename == __file__ for code, _ in one.place) for one in calls)


def test_places_are_the_innermost_frames_of_the_program(shown: Any) -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            shown.cuMemGetInfo()

    calls, block = seen(shown, "cuMemGetInfo")
    with sa.Device(0, driver=shown).current(), block:
        deep(20)
    names = [code.co_name for code, _ in calls[0].place]
    assert len(names) == 8 and set(names[3:]) == {"deep"}


def test_long_arguments_of_a_kernel_are_read_whole() -> None:
    address, words = 0x7F0000000000, 40
    long = (ctypes.c_uint64 * words)(*(address + at if at % 2 else at for at in range(words)))
    short = ctypes.c_uint64(address)
    kernel = Kernel("name", [8, 4, 8 * words + 4])
    params = (ctypes.c_uint64 * 3)(ctypes.addressof(short), 0, ctypes.addressof(long))
    assert kernel.pointers(ctypes.addressof(params), 1, 1) == (address, *(address + at for at in range(1, words, 2)))
    assert kernel.pointers(0, 1, 1) is None and Kernel("name", None).pointers(ctypes.addressof(params), 1, 1) is None
    assert Kernel("name", [4, 4]).pointers(0, 1, 1) == ()


def test_a_listener_may_ask_pytorch(shown: Any) -> None:
    """It waits for callbacks of other threads, but not for its own."""
    device, main, begun = sa.Device(0, driver=shown), threading.get_ident(), threading.Event()
    order, took = list[str](), list[float]()

    def synchronize() -> None:
        with device.current():
            shown.cuCtxSynchronize()

    def listen(call: cupti.DriverCall) -> None:
        if call.thread != main:
            begun.set()
            sleep(0.1)
            order.append("other")
        else:
            if took:
                threading.Thread(target=synchronize).start()
                assert begun.wait(5)
            begin = monotonic()
            with subscription.gate.asking():
                order.append("asked")
            took.append(monotonic() - begin)

    with cupti.subscribe(listen, ["cuCtxSynchronize"]) as subscription:
        synchronize()
        synchronize()
    assert subscription.error is None and order == ["asked", "other", "asked"] and max(took) < 0.5


def test_calls_that_the_gate_has_written_are_shown_with_the_next_one(shown: Any) -> None:
    calls, block = seen(shown, "cuEventQuery", "cuMemGetInfo")
    with sa.Device(0, driver=shown).current(), block as subscription:
        subscription.gate.write_frees()
        if subscription.gate.address == subscription.gate.words[0]:
            pytest.skip("the gate is for other processors")
        event = shown.cuEventCreate(2)[1]
        captured, stream = shown.cuEventCreate(2)[1], shown.cuStreamCreate(1)[1]
        shown.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        shown.cuEventRecord(captured, stream)
        shown.cuGraphDestroy(shown.cuStreamEndCapture(stream)[1])
        assert shown.cuEventQuery(captured)[0]  # A query without an answer is left out.
        assert not shown.cuEventQuery(event)[0] and calls == []
        assert not shown.cuMemGetInfo()[0]
        assert not shown.cuEventQuery(event)[0] and len(calls) == 2
        ends = shown.cuEventDestroy(event), shown.cuEventDestroy(captured), shown.cuStreamDestroy(stream)
        assert not any(result for (result,) in ends)
    assert [(one.function, one.is_late) for one in calls] == [
        ("cuEventQuery", True),
        ("cuMemGetInfo", False),
        ("cuEventQuery", True),
    ]
    assert calls[0].args == (int(event),) and calls[0].thread == threading.get_ident() == calls[1].thread
    assert all(any(code.co_filename == __file__ for code, _ in one.place) for one in calls)


def test_structures_and_arrays_are_copied(shown: Any) -> None:
    calls, block = seen(shown, "cuMemCreate", "cuMemSetAccess")
    with block, sa.Device(0, driver=shown).current():
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        memory = shown.cuMemCreate(2 << 20, prop, 0)[1]
        at = shown.cuMemAddressReserve(2 << 20, 0, 0, 0)[1]
        shown.cuMemMap(at, 2 << 20, 0, memory, 0)
        access = cuda.CUmemAccessDesc()
        access.location.type, access.location.id = prop.location.type, 0
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        shown.cuMemSetAccess(at, 2 << 20, [access], 1)
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        for undo in (shown.cuMemUnmap(at, 2 << 20), shown.cuMemRelease(memory), shown.cuMemAddressFree(at, 2 << 20)):
            assert not undo[0]
    made, granted = calls
    assert made.args[1].type == cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert made.answer[1] == int(memory)
    assert [one.flags for one in granted.args[2]] == [access.flags]
    assert granted.args[2][0].location.type == cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


def test_a_refused_call_has_its_result(shown: Any) -> None:
    calls, block = seen(shown, "cuMemAlloc")
    with block, sa.Device(0, driver=shown).current():
        assert shown.cuMemAlloc(0)[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    assert calls[0].answer == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, None)


def test_an_error_of_the_listener_ends_the_subscription_and_not_the_program(shown: Any) -> None:
    def listener(call: cupti.DriverCall) -> None:
        numbers.append(call.time)
        raise ValueError("of the listener")

    numbers: list[int] = []
    functions = ["cuMemGetInfo", "cuEventQuery"]
    with cupti.subscribe(listener, functions) as subscription, sa.Device(0, driver=shown).current():
        for _ in range(3):
            assert not shown.cuMemGetInfo()[0]
        subscription.gate.write_frees()  # The calls that are stored from now on are not passed on either.
        event = shown.cuEventCreate(2)[1]
        assert not shown.cuEventQuery(event)[0] and not shown.cuEventDestroy(event)[0]
    assert len(numbers) == 1 and str(subscription.error) == "of the listener"


@pytest.mark.simulated_only("no driver call is made in the child")
@pytest.mark.parametrize(
    "block", [cupti.check, cupti.memory, Recording().running, lambda: cupti.subscribe(print, ["cuMemGetInfo"])]
)
def test_a_forked_child_ends_nothing_of_its_parent(shown: Any, block: Any) -> None:
    """Not even if another thread of the parent has a lock at that time."""
    open_block = contextlib.ExitStack()
    running = open_block.enter_context(block())
    lock = getattr(running, "_turn", threading.Lock())

    def end() -> None:
        open_block.close()
        assert shown.library._callback is not None

    with open_block:
        with lock:
            assert in_a_child(end) == 0
        assert shown.library._callback is not None
    assert shown.library._callback is None


@pytest.mark.simulated_only("CUPTI is a stand-in")
def test_a_forked_child_that_leaves_the_block_ends_in_silence(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Also where the interpreter ends, and drops what the child has left undone."""
    done = python("""
import os, sys, warnings
from streamalloc import cupti
from streamalloc.cupti import subscription
from tests.cupti.interposed import Library
from tests.cupti.pytorch import Torch
subscription.Library = Library
warnings.simplefilter("ignore")
torch = sys.modules["torch"] = Torch()
torch.cuda.memory._record_memory_history = lambda begin=None, main=os.getpid(), **_: (
    None if os.getpid() == main else os.write(1, b"PyTorch is used in the child")
)
with cupti.check(at_once=True):
    child = os.fork()
    if not child:
        sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_threads_change_less_often_while_calls_are_listened_to(shown: Any) -> None:
    before = sys.getswitchinterval()
    with cupti.subscribe(lambda call: None, ["cuMemGetInfo"]):
        assert sys.getswitchinterval() > 0.09 > before
    assert sys.getswitchinterval() == before


def test_a_process_whose_lock_of_python_nobody_gives_away_says_so(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """While a thread sleeps with the lock; not while it sleeps without."""
    code = """
import ctypes, time
from streamalloc.cupti import subscription
subscription._MOST_SILENT = 0.5
watch = subscription._Watch()
watch.open()
time.sleep(1)
print("so far", flush=True)
{sleep}
watch.close()
time.sleep(0.8)
"""
    sleeps = "ctypes.PyDLL(None).usleep(800_000)", "time.sleep(0.8)"
    held, free = in_threads(*(functools.partial(python, code.format(sleep=one)) for one in sleeps))
    assert held.returncode == free.returncode == 0 and held.stdout == "so far\n"
    assert held.stderr.count("no thread of Python has run") == 1 and free.stderr == ""


def test_an_interrupt_in_a_callback_reaches_the_program(shown: Any) -> None:
    def listener(call: cupti.DriverCall) -> None:
        if not calls:
            calls.append(call)
            raise KeyboardInterrupt

    calls: list[cupti.DriverCall] = []
    with sa.Device(0, driver=shown).current(), cupti.subscribe(listener, ["cuMemGetInfo"]) as subscription:
        with pytest.raises(KeyboardInterrupt):
            assert not shown.cuMemGetInfo()[0]
            for _ in range(1000):
                sleep(0.001)
        assert not shown.cuMemGetInfo()[0] and subscription.error is None


def test_a_second_subscriber_is_refused(on_cuda: bool) -> None:
    if not on_cuda:
        pytest.skip("the stand-in takes any number")
    first, second = (cupti.subscribe(lambda call: None, ["cuMemGetInfo"]) for _ in range(2))
    with first, pytest.raises(cupti.CuptiError, match="takes one"), second:
        pass


def test_without_a_gpu_the_error_says_that_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_found() -> Any:
        raise sd.DriverNotFoundError("no CUDA driver: nothing there")

    unknown = types.SimpleNamespace(cuptiSubscribe=lambda *_: 999, cuptiGetResultString=lambda *_: 0)
    monkeypatch.setattr(library, "_load", lambda: unknown)
    monkeypatch.setattr(library, "real", nothing_found)
    with pytest.raises(cupti.CuptiError, match=r"\(999\); a GPU is needed: no CUDA driver: nothing there"):
        library.Library().subscribe(0, 0, [])


def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_paths", lambda: ["libcupti.so.0"])
    with pytest.raises(cupti.CuptiError, match=r"pip install 'streamalloc\[cupti\]'"), cupti.check():
        pass


@pytest.mark.parametrize(
    ("name", "args", "answer"),
    [
        pytest.param(
            *("cuMemcpyBatchAsync", ([1 << 40], [1 << 41], [512], 1, [], [], 0, 7), ()),
            marks=pytest.mark.bindings("13.0"),  # Earlier ones return more.
        ),
        ("cuMemGetAddressRange", (1 << 40,), (1 << 39, 4096)),
        ("cuStreamWaitValue32", (7, 1 << 40, 3, 1), ()),
        ("cuEventCreate", (2,), (99,)),
        ("cuDeviceGetMemPool", (0,), (77,)),
        ("cuMemAddressReserve", (1 << 21, 0, 1 << 40, 0), (1 << 40,)),
    ],
)
def test_layouts_read_what_c_would_write(name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
    import ctypes

    memory, kept = encode(name, args, (0, *answer))
    how = layout(name)
    assert how is not None and kept is not None
    read = how.arguments(ctypes.addressof(memory))
    assert [list(one) if isinstance(one, tuple) else one for one in read] == list(args)
    assert how.answer(ctypes.addressof(memory), 0) == (cuda.CUresult.CUDA_SUCCESS, *answer)


def test_an_answer_is_as_wide_as_its_type() -> None:
    memory = ctypes.create_string_buffer(b"\x02\x00\x00\x00" + b"\xff" * 12)
    arguments = ctypes.c_uint64(ctypes.addressof(memory))
    for name, value in (("cuDeviceGetCount", 2), ("cuCtxGetDevice", 2), ("cuMemPoolCreate", 0xFFFFFFFF00000002)):
        how = layout(name)
        assert how is not None and how.answer(ctypes.addressof(arguments), 0)[1] == value


def test_a_number_that_the_enum_of_a_field_lacks_is_0() -> None:
    props = cuda.CUmemAllocationProp()
    props.location.id = 3
    ctypes.c_int.from_address(int(props.getPtr())).value = 99  # the type
    memory, kept = encode("cuMemCreate", (4096, props, 0), (0, 7))
    how = layout("cuMemCreate")
    assert how is not None and kept
    _, read, _ = how.arguments(ctypes.addressof(memory))
    assert (read.type, read.location.id) == (0, 3)


def test_functions_are_followed_in_the_version_that_the_bindings_call() -> None:
    versions = {
        "cuMemAlloc": ("cuMemAlloc", "cuMemAlloc_v2"),
        "cuGraphInstantiate": ("cuGraphInstantiate", "cuGraphInstantiate_v2", "cuGraphInstantiateWithFlags"),
        "cuMemHostAlloc": ("cuMemHostAlloc", "cuMemHostAlloc_v2"),
        "cuCtxSynchronize": ("cuCtxSynchronize", "cuCtxSynchronize_v2"),
        "cuLaunchKernel": ("cuLaunchKernel", "cuLaunchKernel_ptsz"),
    }
    names = dict(enumerate(name for several in versions.values() for name in several))
    followed = {names[number]: (base, own) for number, (base, _, own, _) in _known(names, frozenset(versions)).items()}
    assert followed == {
        "cuMemAlloc_v2": ("cuMemAlloc", False),
        "cuGraphInstantiateWithFlags": ("cuGraphInstantiate", False),
        "cuMemHostAlloc": ("cuMemHostAlloc", False),
        "cuMemHostAlloc_v2": ("cuMemHostAlloc", False),
        "cuCtxSynchronize": ("cuCtxSynchronize", False),
        "cuCtxSynchronize_v2": ("cuCtxSynchronize", False),
        "cuLaunchKernel": ("cuLaunchKernel", False),
        "cuLaunchKernel_ptsz": ("cuLaunchKernel", True),
    }


def test_every_function_of_the_bindings_has_a_layout() -> None:
    functions = [name for name in dir(cuda) if name.startswith("cu") and name[2:3].isupper() and "Gl" not in name]
    missing = [name for name in functions if layout(name) is None]
    assert missing == [] and len(functions) > 400


# -- the gate: calls of threads without the GIL, and of all while somebody asks, come later ----------------------------


FUNCTIONS = {1: "cuEventQuery", 2: "cuEventRecord", 3: "cuEventCreate", 4: "cuLaunchKernel"}
QUERY, RECORD, CREATE, LAUNCH = FUNCTIONS
SIGNATURE = (None, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t)


class Gated:
    """A gate, with the calls that it let through."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.gate = Gate(self._called, FUNCTIONS)
        self._without, self._with = C_CALLBACK(self.gate.address), ctypes.PYFUNCTYPE(*SIGNATURE)(self.gate.address)

    def _called(self, user: int, domain: int, number: int, data: int) -> None:
        self.seen.append((number, struct.unpack_from("I", ctypes.string_at(data, 4))[0]))
        self.gate.left += bool(self.gate.modes[number])

    @contextlib.contextmanager
    def data(self, number: int, *args: int, site: int = 1, result: int = 0) -> Iterator[int]:
        words, answer = (ctypes.c_uint64 * 5)(*args), ctypes.c_uint32(result)
        data = struct.pack("I4xQQQQQ", site, 0, ctypes.addressof(words), ctypes.addressof(answer), 0, 77)
        kept = ctypes.create_string_buffer(data)
        yield ctypes.addressof(kept)

    def call(self, number: int, *args: int, with_lock: bool = False, site: int = 1, result: int = 0) -> None:
        with self.data(number, *args, site=site, result=result) as data:
            (self._with if with_lock else self._without)(self.gate.user, 1, number, data)

    def written(self) -> list[tuple[int, ...]]:
        return [(*one[:4], *struct.unpack_from("Q", one.args)) for one in self.gate.take()]


@pytest.fixture
def gated() -> Gated:
    made = Gated()
    if made.gate.address == made.gate.words[0]:
        pytest.skip("not on this processor")
    return made


def test_the_listing_has_the_instructions_of_its_bytes(tmp_path: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    (tmp_path / "code").write_bytes(machine_code())
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--insn-width=12"]
    shown = subprocess.run([*command, str(tmp_path / "code")], capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in shown.partition("<.data>:")[2].strip().splitlines()]
    assert [(int(at.strip(" :"), 16), " ".join(text.split())) for at, _, text in rows] == [
        (int(line[:2], 16), line[31:].partition(";")[0].strip()) for line in listing()
    ]


def test_a_call_is_shown_once_after_it_has_returned(gated: Gated) -> None:
    for number in FUNCTIONS:
        gated.call(number, site=0)
        gated.call(number)
    assert gated.seen == [(number, 1) for number in FUNCTIONS] and gated.written() == []


def test_queries_without_pythons_lock_are_written_once_pytorch_is_there(gated: Gated) -> None:
    gated.gate.write_frees()
    gated.call(QUERY, 64, result=600)
    for number in (RECORD, LAUNCH):
        gated.call(number)
    gated.call(QUERY, with_lock=True)
    assert gated.seen == [(RECORD, 1), (LAUNCH, 1), (QUERY, 1)]
    assert gated.written() == [(QUERY, 600, threading.get_ident(), 77, 64)] and gated.written() == []


def test_what_libraries_call_with_a_lock_is_written_while_somebody_asks(gated: Gated) -> None:
    before = gated.gate.has_left_out
    with gated.gate.asking():
        for at, number in enumerate(FUNCTIONS):
            gated.call(number, at)
        # Arguments of the third point to what is gone later.
        assert (before, gated.gate.has_left_out) == (False, True)
    assert gated.seen == [(LAUNCH, 1)]
    assert [(one[0], one[-1]) for one in gated.written()] == [(QUERY, 0), (RECORD, 1)]
    gated.call(RECORD)
    assert gated.seen[1:] == [(RECORD, 1)]


def test_more_calls_than_there_is_room_for_are_shown(gated: Gated) -> None:
    gated.gate.write_frees()
    for number in range(5000):
        gated.call(QUERY, number)
    written = gated.written()
    assert [one[-1] for one in written] == list(range(len(written))) and len(written) + len(gated.seen) == 5000
    for number in range(5000):  # round the ring
        gated.call(QUERY, number)
        if number % 100 == 0:
            written = gated.written()
    assert written[-1][-1] == 4900


def test_calls_of_several_threads_are_all_written(gated: Gated) -> None:
    def work(first: int) -> None:
        together.wait()
        for number in range(first, first + 900):
            gated.call(QUERY, number)

    together = threading.Barrier(4)
    gated.gate.write_frees()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(1000 * at,)) for at in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    found = gated.written()
    assert sorted(one[-1] for one in found) == [1000 * at + n for at in range(4) for n in range(900)]
    assert len({one[2] for one in found}) == 4


# rbx = struct; struct.lock(struct.mutex); struct.gate(struct.user, 1, struct.number, struct.data); struct.unlock(...)
_LIBRARY = bytes.fromhex("534889fb488b3bff5308488b7b20be010000008b5328488b4b30ff5318488b3bff53105bc3")


def test_nobody_waits_with_a_lock_for_who_asks(gated: Gated) -> None:
    """A library calls the driver with a lock of its own, for which another thread waits with Python's."""
    libc, held, mutex = ctypes.CDLL(None), ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    locking = (libc.pthread_mutex_lock, libc.pthread_mutex_unlock)
    function = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in locking]
    code = _executable(_LIBRARY)
    assert code is not None
    allocate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    over: list[int] = []

    def work() -> None:
        while not over:
            with gated.data(RECORD) as data:
                words = ctypes.addressof(mutex), *function, gated.gate.address, gated.gate.user, RECORD, data
                allocate((ctypes.c_uint64 * 7)(*words))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            with gated.gate.asking():
                held.pthread_mutex_lock(mutex)
                held.usleep(100)
                held.pthread_mutex_unlock(mutex)
            gated.written()
            sleep(1e-4)
    finally:
        over.append(1)
        thread.join()
    assert len(gated.seen) > 0


def test_who_asks_waits_for_callbacks_that_have_begun(gated: Gated) -> None:
    order: list[str] = []
    begun = threading.Event()

    class Slow(list[Any]):
        def append(self, one: Any) -> None:
            begun.set()
            sleep(0.05)
            order.append("called")

    gated.seen = Slow()
    thread = threading.Thread(target=gated.call, args=(RECORD,))
    thread.start()
    assert begun.wait(5)
    with gated.gate.asking():
        order.append("asked")
    thread.join()
    assert order == ["called", "asked"]


@pytest.mark.parametrize("number", [QUERY, CREATE])
def test_a_call_while_the_counts_are_read_hides_no_callback(gated: Gated, number: int) -> None:
    """Another thread's call is written down, or left out, after the first count was read."""
    begun, goes_on, ended = threading.Event(), threading.Event(), []

    class Slow(list[Any]):
        def append(self, one: Any) -> None:
            begun.set()
            goes_on.wait(5)
            ended.append(one)

    class Words:
        calls = 3

        def __getitem__(self, at: int) -> int:
            found: int = words[at]
            if words[gate._ASKING] and self.calls:
                self.calls -= 1
                gated.call(number)
            elif not self.calls:
                goes_on.set()
            return found

        def __setitem__(self, at: int, value: int) -> None:
            words[at] = value

    gated.seen, words, gated.gate.words = Slow(), gated.gate.words, Words()
    thread = threading.Thread(target=gated.call, args=(RECORD,))
    thread.start()
    assert begun.wait(5)
    with gated.gate.asking():
        assert ended
    thread.join()


def test_each_call_is_shown_where_there_is_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_executable", lambda code: None)
    plain = Gated()
    plain.gate.write_frees()
    with plain.gate.asking():
        for number in FUNCTIONS:
            plain.call(number)
    assert plain.seen == [(number, 1) for number in FUNCTIONS] and plain.written() == []


def test_a_callback_that_was_not_counted_is_waited_for_once(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_PATIENCE", 0.05)
    gated.call(RECORD)
    gated.gate.left -= 1
    begin = monotonic()
    with gated.gate.asking():
        assert monotonic() - begin >= 0.05 and gated.gate.left == 1


def test_an_interrupt_after_a_call_was_taken(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may be lost; the next one is taken."""

    def interrupted(*args: Any) -> None:
        pack_into(*args)
        monkeypatch.setattr(struct, "pack_into", pack_into)
        raise KeyboardInterrupt

    pack_into = struct.pack_into
    gated.gate.write_frees()
    for at in (1, 2):
        gated.call(QUERY, at)
    monkeypatch.setattr(struct, "pack_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gated.written()
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: found.extend(gated.written()), daemon=True)
    thread.start()
    thread.join(5)
    assert [one[-1] for one in found] == [2]
