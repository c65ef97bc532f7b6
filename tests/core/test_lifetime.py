"""The end of things: garbage collection in any order, interpreter exit, forks, threads, and what objects weigh."""

import _thread
import contextlib
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.ipc.exporter.exports import exports_of
from streamalloc.testing import Gate
from tests.package.test_garbage_cycles import of_core
from tests.support import (
    KEEP,
    MiB,
    captured,
    each_raises,
    end_what_was_dropped,
    executed,
    holds,
    in_threads,
    later_memory_is_whole,
    names,
)

Python = Callable[..., CompletedProcess[str]]


class TestGarbage:
    @pytest.mark.parametrize("nth", [1, 2])
    def test_a_refused_mode(self, faults: Any, checker: Any, pool: sa.MemoryPool, stream: sa.Stream, nth: int) -> None:
        """It is made later, or was made already; a finaliser has nobody to raise to."""
        faults.fail("cuThreadExchangeStreamCaptureMode", nth, result="CUDA_ERROR_INVALID_VALUE")
        pool.allocate(64, stream)
        assert faults.failed == ["cuThreadExchangeStreamCaptureMode"]
        end_what_was_dropped()
        assert "pool allocation" not in checker.outstanding() and checker.hazards == []

    @pytest.mark.simulated_only("the handle of a destroyed stream, which can end the process")
    def test_a_free_on_a_stream_that_is_gone(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        """The memory is not gone with another stream than its own."""
        with device.current():
            raw = machine.cuStreamCreate(1)[1]
        theirs = sa.Stream.of_handle(device, int(raw), None)
        with sa.MemoryPool(device) as pool:
            buffer = pool.allocate(4096, stream)
            assert not machine.cuStreamDestroy(raw)[0]
            with pytest.raises(sa.InvalidContextError):
                buffer.free(theirs)
            assert not buffer.freed
            buffer.free()
            stream.synchronize()
            assert pool.statistics().used == 0

    @pytest.mark.parametrize("end", ["free", "free, shared", "drop", "drop in a capture"])
    def test_memory_that_others_freed(self, machine: Any, device: sa.Device, stream: sa.Stream, end: str) -> None:
        """Something else may have its address at a second attempt."""
        kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR if "shared" in end else sa.MemHandleType.NONE
        with sa.MemoryPool(device, handle_types=kind, release_threshold=KEEP) as pool:
            buffer = pool.allocate(4096, stream)
            address = buffer.address
            shared = sa.ipc.share(buffer) if "shared" in end else None
            lease = None if shared is None else shared._lease
            assert not machine.cuMemFreeAsync(cuda.CUdeviceptr(address), cuda.CUstream(stream.handle))[0]
            if "free" in end:
                each_raises(sa.InvalidValueError, buffer.free)
                assert buffer.freed
                each_raises(sa.ClosedError, buffer.free, match="was freed")
                assert lease not in exports_of(session_of(device)).with_memory
                other = pool.allocate(4096, stream)
                del buffer
            else:
                with pytest.warns(ResourceWarning, match=f"{buffer.address:#x} could not be freed"):
                    with stream.capture() if "capture" in end else contextlib.nullcontext():
                        del buffer
                    end_what_was_dropped()
                other = pool.allocate(4096, stream)
            assert other.address == address
            del shared, lease
            other.fill(7)
            end_what_was_dropped()
            pool.allocate(4096, stream).fill(9)
            assert holds(other, 7)
            other.free()

    def test_a_refused_drop_asks_before_its_stream_is_destroyed(
        self, traced: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = sa.Device(0, driver=traced)
        session, stream = session_of(device), device.create_stream()
        ask, destroyed = session.cuStreamIsCapturing, []

        def asked_while_another_thread_closes(handle: Any) -> Any:
            in_threads(stream.close)
            destroyed.append(names(traced).count("cuStreamDestroy"))
            return ask(handle)

        with sa.MemoryPool(device, release_threshold=KEEP) as pool:
            buffer = pool.allocate(4096, stream)
            traced.cuMemFreeAsync(cuda.CUdeviceptr(buffer.address), stream.direct)
            traced.calls.clear()
            monkeypatch.setattr(session, "cuStreamIsCapturing", asked_while_another_thread_closes)
            with pytest.warns(ResourceWarning, match="could not be freed"):
                del buffer
            monkeypatch.undo()
            end_what_was_dropped()
        assert destroyed == [0]

    def test_memory_of_no_capture_is_the_buffer_s(self, pool: sa.MemoryPool, stream: sa.Stream, machine: Any) -> None:
        """The driver answers for it as for memory that was freed."""
        buffer = pool.allocate(4096, stream)
        with captured(machine, stream, "RELAXED"), pytest.raises(sa.CaptureError):
            buffer.free()
        assert not buffer.freed
        buffer.free()

    def test_on_a_per_thread_stream_after_its_thread(self, device: sa.Device, pool: sa.MemoryPool, gate: Gate) -> None:
        """Another thread comes by the point of work at which it is freed."""
        with device.create_stream() as other:
            buffer = pool.allocate(MiB, device.per_thread_stream)
            gate.hold(device.per_thread_stream)
            buffer.fill(1)
            del buffer
            gc.collect()
            in_threads(pool.statistics)
            assert later_memory_is_whole(pool, MiB, other, gate)
            device.synchronize()
            assert pool.statistics().used == 0

    def test_at_once_on_others_streams(self, machine: Any, device: sa.Device, pool: sa.MemoryPool, gate: Gate) -> None:
        """In the order of that stream, and with no call of the package that follows."""
        with device.create_stream() as theirs, device.create_stream() as other:
            borrowed = sa.Stream.of_handle(device, theirs.handle, theirs)
            buffer = pool.allocate(MiB, borrowed)
            gate.hold(theirs)
            buffer.fill(1)
            del buffer
            gc.collect()
            raw, attribute = cuda.CUmemoryPool(pool.handle), cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
            assert int(machine.cuMemPoolGetAttribute(raw, attribute)[1]) == 0
            assert later_memory_is_whole(pool, MiB, other, gate)

    @pytest.mark.parametrize("result", ["CONTEXT_IS_DESTROYED", "DEINITIALIZED", "UNKNOWN"])
    def test_a_finaliser_s_free_fails(self, faults: Any, pool: sa.MemoryPool, stream: sa.Stream, result: str) -> None:
        """It is made later, unless the memory is gone with its context; nothing is told."""
        faults.fail("cuMemFreeAsync", result=f"CUDA_ERROR_{result}")
        buffer = pool.allocate(64, stream)
        address = buffer.address
        del buffer
        assert faults.failed == ["cuMemFreeAsync"]
        stream.synchronize()
        if result != "UNKNOWN":
            assert not faults.cuMemFreeAsync(address, stream._raw)[0]
            stream.synchronize()
        assert pool.statistics().used == 0

    def test_memory_that_cannot_be_freed_later_either_is_told_once(
        self, faults: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        faults.fail("cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN", times=3)
        buffer = pool.allocate(64, stream)
        address = buffer.address
        del buffer
        with pytest.warns(ResourceWarning, match=f"{address:#x}.*CUDA_ERROR_UNKNOWN") as caught:
            device.synchronize()
            device.synchronize()
        assert len(caught) == 1 and len(faults.failed) == 3
        device.synchronize()
        assert pool.statistics().used == 0

    def test_finalisers_never_wait(self, traced: Any, device: sa.Device) -> None:
        things = of_core(device)
        del traced.calls[:]
        things.clear()
        gc.collect()
        waits = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")
        assert names(traced) != [] and names(traced, *waits) == []


@pytest.mark.parametrize("checks", [False, True])
def test_a_thread_that_python_has_not_started(machine: Any, checks: bool) -> None:
    """Calls add no object to ``threading``: it would stay, or print an error at the exit of Python 3.13."""
    driver = sd.checked(machine) if checks else machine
    found: Queue[bool] = Queue()

    def calls() -> None:
        with contextlib.suppress(Exception):
            sa.Device(0, driver=driver).create_stream().close()
            found.put(_thread.get_ident() in {one.ident for one in threading.enumerate()})

    _thread.start_new_thread(calls, ())
    assert not found.get(timeout=60)


EXITS = {
    "live objects in a module": """
pool.make_current(); buffer = pool.allocate(64, stream); view = buffer[8:]
event = stream.record(); current = sa.allocate(64, stream)
buffer.fill(1)
""",
    "work that is pending": """
gate = Gate(device); gate.hold(stream)
buffer = pool.allocate(64, stream); buffer.fill(1)
gate.open()
""",
    "a host pool, its array and a capsule": """
host = sa.MemoryPool(sa.MemLocation.host()); buffer = host.allocate(64, stream); stream.synchronize()
array = buffer.as_array(); capsule = buffer.__dlpack__(stream=-1)
""",
    "a graph": """
with stream.capture() as graph: inside = sa.allocate(64, stream)
graph.launch(stream)
""",
    "a cache": """
cache = sa.CachingAllocator(pool)
buffers = [cache.allocate(64, stream) for _ in range(3)]; buffers.pop().free(); buffers.append(buffers)
""",
    "closed streams and pools": """
buffer = pool.allocate(64, stream); stream.close(); pool.close()
""",
    "an exit handler that uses them": """
import atexit
buffer = pool.allocate(64, stream); atexit.register(lambda: (buffer.fill(1), buffer.free(), stream.synchronize()))
""",
    "a thread of its own": """
import threading
local = threading.local()
def work(): local.buffer = pool.allocate(64, device.create_stream())
thread = threading.Thread(target=work); thread.start(); thread.join()
""",
}
CAPTURE = """
capture = stream.capture(); graph = capture.__enter__(); inside = sa.allocate(64, stream)
"""
EXIT = """
import sys, types
import streamalloc as sa
from streamalloc.testing import Gate
device = sa.Device(0)
def make(name):
    module = sys.modules[name] = types.ModuleType(name)
    module.sa, module.Gate, module.device, module.stream = sa, Gate, device, device.create_stream()
    module.pool = sa.MemoryPool(device, release_threshold=1 << 30)
    return vars(module)
for name, body in {bodies}.items(): exec(body, make(name))
"""


NAMES_ARE_GONE = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
import streamalloc as sa
from streamalloc import vmm
device = sa.Device(0); stream = device.create_stream(); pool = sa.MemoryPool(device, release_threshold=1 << 30)
grown = vmm.GrowableBuffer(device, 4 << 20, 2 << 20, stream=stream)
early.kept = [stream, pool, pool.allocate(64, stream), stream.record(), sa.allocate(64, stream), grown, sa.Device(0)]
del device, stream, pool, grown
# Modules that live on lose their names, the youngest first: those of the library before what the oldest keeps.
sys.kept = list(sys.modules.values())
"""


EXITING = {
    "objects": EXIT.format(bodies=EXITS),
    "a capture": EXIT.format(bodies={"a capture under way": CAPTURE}),
    "names are gone": NAMES_ARE_GONE,
}


@pytest.mark.parametrize("name", EXITING)
def test_interpreter_exit(python: Python, name: str) -> None:
    done = python(EXITING[name])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FORK = """
import gc, os, sys, warnings
import streamalloc as sa, streamalloc.driver as sd
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer say that threads and forks do not mix
driver = sd.traced(sd.simulated(devices=2))
kinds, ours = [], {*globals(), "kinds", "ours", "name", "before", "child"}
devices = sa.Device.all(driver)
device = devices[0]
stream = device.create_stream()
other = device.create_stream()
pool = sa.MemoryPool(device)
buffers = [pool.allocate(64, stream), sa.allocate(64, other), pool.allocate(64, device.default_stream)]
event = stream.record()
with stream.capture() as graph: inside = sa.allocate(64, stream)
class Null: ptr = 0
null, mine, far = Null(), device.per_thread_stream, devices[1].create_stream()
cache = sa.CachingAllocator(sa.MemoryPool(device))
driver.cuCtxSetCurrent(stream._session.context(0))
for one in (null, mine, device.default_stream): cache.allocate(64, one).free(); pool.allocate(64, one).free()
cached, of_thread = ([cache.allocate(64, one) for _ in range(3)] for one in (stream, mine))
cached.pop().free(); of_thread.pop().free()
before = len(driver.calls)
child = os.fork()
if child == 0:
    for use in (
lambda: buffers[2].free(),
lambda: buffers[2].fill(1),
*(function for one in (null, mine, device.default_stream) for function in (
    lambda one=one: pool.allocate(64, one),
    lambda one=one: cache.allocate(64, one),
    lambda one=one: stream.wait(one),
    lambda one=one: buffers[0].fill(1, one),
)),
lambda: device.default_stream.record(),
lambda: mine.query(),
lambda: sa.allocate(64, far),
lambda: cached[0].free(),
lambda: of_thread[0].free(),
lambda: cached[0].fill(1),
lambda: cache.statistics(),
lambda: sa.CachingAllocator(pool).allocate(64, stream),
    ):
        try: use()
        except Exception as error: kinds.append(type(error).__name__)
        else: kinds.append("nothing")
    for name in globals().keys() - ours: del globals()[name]
    gc.collect()
    print(sorted(set(kinds)), len(driver.calls) - before, flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert len(driver.calls) == before
cache.allocate(64, stream).free()
assert len(driver.calls) == before
buffers[0].fill(3); target = bytearray(64); buffers[0].copy_to(target); stream.synchronize()
print(os.waitstatus_to_exitcode(status), set(target))
"""
"""It prints the errors of the uses and how many driver calls the child made, then what the parent goes on with."""


FORK_OF_DATA = """
import os, sys, threading, warnings
import streamalloc as sa, streamalloc.driver as sd
warnings.simplefilter("ignore", DeprecationWarning)
driver = sd.traced(sd.simulated())
device = sa.Device(0, driver=driver)
pool, stream, data = sa.MemoryPool(device), device.create_stream(), threading.local()
ready, end = threading.Event(), threading.Event()
def use():
    data.stream = device.create_stream()
    data.buffers = [pool.allocate(64, stream), pool.allocate(64, device.per_thread_stream)]
    ready.set()
    end.wait()
thread = threading.Thread(target=use)
thread.start()
ready.wait()
before = len(driver.calls)
child = os.fork()
if child == 0:
    print(len(driver.calls) - before, flush=True)
    os._exit(0)
os.waitpid(child, 0)
end.set()
thread.join()
device.synchronize()
print(pool.statistics().used)
"""


@pytest.mark.simulated_only("a process that uses a GPU must not be forked")
@pytest.mark.parametrize(
    ("program", "told"),
    [(FORK_OF_DATA, "0\n0\n"), (FORK, "['ForkedProcessError'] 0\n0 {3}\n")],
    ids=["beside a thread with data of its own", "child"],
)
def test_fork(python: Python, program: str, told: str) -> None:
    """The child gets a clear error for each use, and makes no driver call, not even when it drops everything.

    Data of another thread the interpreter drops in the child before it calls any hook.
    """
    done = python(program)
    assert (done.stdout, done.stderr) == (told, "")


def test_a_buffer_weighs_little(device: sa.Device, stream: sa.Stream) -> None:
    """250 bytes of host memory at most, with the bindings' pointer and what a list needs to hold it."""
    count = 1000
    with sa.MemoryPool(device, release_threshold=1 << 40) as pool:
        pool.allocate(64, stream).free()
        tracemalloc.start()
        try:
            buffers = [pool.allocate(4096, stream) for _ in range(count)]
            # What a simulated driver keeps for its own bookkeeping is not the facade's weight.
            ours = [tracemalloc.Filter(True, f"{Path(sa.__file__).parent}/*.py"), tracemalloc.Filter(True, __file__)]
            simulator = tracemalloc.Filter(False, "*/streamalloc/simulator/*")
            snapshot = tracemalloc.take_snapshot().filter_traces([*ours, simulator])
        finally:
            tracemalloc.stop()
        weight = sum(trace.size for trace in snapshot.traces) / count + sys.getsizeof(buffers[0]._ptr)
        assert sys.getsizeof(buffers[0]) <= weight <= 250
        buffers.clear()


def test_no_foreign_pool_is_ever_changed(machine: Any, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
    """Nothing that we did not make gets another attribute or access, or is trimmed, whatever is done."""
    current = machine.cuDeviceGetMemPool(0)[1]
    with sa.MemoryPool(device, release_threshold=MiB) as pool:
        ours = pool.handle
        pool.attributes.reuse_allow_opportunistic = False
        with pool.make_current(), sa.allocate(MiB, stream) as buffer:
            buffer.fill(1)
            assert holds(buffer, 1)
        with sa.allocate(MiB, stream) as buffer:
            sa.pointer_attributes(buffer.address, driver=traced)
        with sa.MemoryPool(device, max_size=MiB) as small, small.make_current(), pytest.raises(sa.OutOfMemoryError):
            sa.allocate(1 << 46, stream)
        with stream.capture() as graph, sa.allocate(64, stream):
            pass
        with graph:
            graph.launch(stream)
        default = sa.MemoryPool.default(device)
        shown = [default.statistics(), dict(default.attributes), repr(default), default._repr_html_()]
        default.close()
        stream.synchronize()
    assert all(shown) and int(machine.cuDeviceGetMemPool(0)[1]) == int(current)
    changes = ("cuMemPoolSetAttribute", "cuMemPoolSetAccess", "cuMemPoolTrimTo")
    changed = {int(call.args[0]) for call in traced.calls if call.name in changes}
    assert ours in changed and int(machine.cuDeviceGetDefaultMemPool(0)[1]) not in changed


def test_gates_close_with_their_device(checker: Any, device: sa.Device, stream: sa.Stream) -> None:
    with Gate(device) as gate:
        gate.hold(stream)
        assert checker.outstanding()["pinned memory"]
    assert "pinned memory" not in checker.outstanding() and executed(stream)
    gate.close()
