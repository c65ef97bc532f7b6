"""Streams of other libraries: resolved once, on the fast paths, and never taken for another stream."""

import contextlib
import ctypes
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.core import library_streams
from streamalloc.core.allocator import Allocator
from streamalloc.core.buffer import PoolBuffer
from streamalloc.core.deferred import deferred_queue
from streamalloc.core.fence import Fence
from streamalloc.core.library_streams import as_stream
from streamalloc.core.session import Session, session_of
from streamalloc.core.stream import OwnStream, Stream, captures_changed
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults
from tests.interleaving import interleaved
from tests.support import captured, end_what_was_dropped, holds, in_threads, names


class Named:
    """A stream of a library with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Protocol(Named):
    number: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.number)


class Torch(Named):
    """PyTorch's own type, by its name."""


class AnyTorch(Protocol):
    """PyTorch's type for streams of all kinds of devices, by its name."""


class ExternalStream(Named):
    """CuPy's and PyTorch's type for streams of other code, by its name."""


Torch.__module__, Torch.__qualname__ = "torch.cuda.streams", "Stream"
AnyTorch.__module__, AnyTorch.__qualname__ = "torch", "Stream"


def of_pytorch(handle: int, kind: type[Named] = Torch, own: bool = True) -> Any:
    """A stream of PyTorch's own, or of other code: that has its handle as number."""
    return kind(cuda_stream=handle, number=handle, device_index=0, stream_id=3 if own else handle)


LIBRARIES: dict[str, Callable[[int], Any]] = {
    "CuPy": lambda handle: Named(ptr=handle),
    "protocol": lambda handle: Protocol(number=handle),
    "Numba": lambda handle: Named(handle=ctypes.c_void_p(handle)),
    "Numba, NVIDIA": lambda handle: Named(handle=cuda.CUstream(handle)),
    "PyTorch": of_pytorch,
}
OF_OBJECTS = [name for name in LIBRARIES if name != "PyTorch"]
NULL = {f"{name}, null": (lambda handle, make=make: make(0)) for name, make in LIBRARIES.items()}
CURRENT, CAPTURING, MODE = "cuCtxGetCurrent", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode"
ALLOCATE, FREE = "cuMemAllocFromPoolAsync", "cuMemFreeAsync"


class Scene(NamedTuple):
    driver: Any
    device: sa.Device
    own: sa.Stream
    theirs: sa.Stream
    """The stream of a library, by its handle."""
    pool: sa.MemoryPool


@pytest.fixture(autouse=True)
def streams_of_pytorch_stay(machine: Any) -> Iterator[None]:
    """The stand-ins do not: their streams end with the test, so the session must not keep them."""
    yield
    Session.of(machine).library_streams.clear()


@pytest.fixture
def scene(traced: Any, device: sa.Device) -> Iterator[Scene]:
    with device.create_stream() as own, device.create_stream() as theirs, sa.MemoryPool(device) as pool:
        with device.current():
            yield Scene(traced, device, own, theirs, pool)
        device.synchronize()


def stream_of(scene: Scene, kind: str) -> Any:
    named = {"own": scene.own, "default": scene.device.default_stream, "per-thread": scene.device.per_thread_stream}
    return named[kind] if kind in named else {**LIBRARIES, **NULL}[kind](scene.theirs.handle)


def calls(scene: Scene, act: Callable[[], object]) -> list[str]:
    # With several devices, each use of a null stream asks for the device that it names.
    asked = ("cuCtxGetDevice", "cuDeviceGetCount") if sa.Device.count(scene.driver) > 1 else ()
    before = len(scene.driver.calls)
    act()
    return [name for name in names(scene.driver)[before:] if name not in asked]


# Questions of an allocation, of a finaliser, and of all other calls.
ASKS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "own": ([], [], []),
    "default": ([CURRENT], [CURRENT, CAPTURING], [CURRENT]),
    "per-thread": ([CURRENT, CAPTURING], [CURRENT], [CURRENT]),
    **{name: ([CAPTURING], [], []) for name in LIBRARIES},
    **{name: ([CURRENT], [CURRENT, CAPTURING], [CURRENT]) for name in NULL},
}


@pytest.mark.parametrize("kind", ASKS)
def test_calls_of_each_operation(scene: Scene, kind: str) -> None:
    stream, (to_allocate, to_drop, to_queue) = stream_of(scene, kind), ASKS[kind]
    pool, array = scene.pool, np.zeros(4096, np.uint8)
    # A library's stream is resolved at its first use, and makes the event of a wait at the first one.
    with pool.allocate(4096, stream) as buffer, pool.allocate(4096, scene.own) as other:
        scene.own.wait(stream)
        held = []
        assert calls(scene, lambda: held.append(pool.allocate(64, stream))) == [*to_allocate, ALLOCATE]
        assert calls(scene, held[0].free) == [*to_queue, FREE]
        held[:] = [pool.allocate(64, scene.own)]
        assert calls(scene, lambda: held[0].free(stream)) == [*to_queue, FREE]
        held[:] = [pool.allocate(64, stream)]
        assert calls(scene, held.clear) == [MODE, *to_drop, FREE, MODE]
        assert calls(scene, lambda: buffer.fill(3, stream)) == [*to_queue, "cuMemsetD8Async"]
        assert calls(scene, lambda: buffer.fill(4)) == [*to_queue, "cuMemsetD8Async"]
        assert calls(scene, lambda: buffer.copy_to(other, stream)) == [*to_queue, "cuMemcpyAsync"]
        assert calls(scene, lambda: buffer.copy_to(array, stream)) == [*to_queue, "cuMemcpyDtoHAsync"]
        # A wait for a captured stream makes the own one part of the capture.
        ordered = ["cuEventRecord", "cuStreamWaitEvent"] + [CAPTURING] * (kind in LIBRARIES or kind == "per-thread")
        assert calls(scene, lambda: scene.own.wait(stream)) == [*to_queue, *ordered]
        scene.device.synchronize()
        assert holds(other, 4) and (array == 4).all()


@pytest.mark.parametrize("kind", ["default", "per-thread"])
def test_calls_on_default_streams(scene: Scene, kind: str) -> None:
    stream = stream_of(scene, kind)
    stream.record().close()
    assert calls(scene, stream.record) == [CURRENT, "cuEventRecord"]
    assert calls(scene, stream.query) == [CURRENT, "cuStreamQuery"]
    assert calls(scene, stream.synchronize) == [CURRENT, "cuStreamSynchronize"]
    event = scene.own.record()
    assert calls(scene, lambda: stream.wait(event)) == [CURRENT, "cuStreamWaitEvent"]


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_an_object_is_resolved_once(scene: Scene, name: str) -> None:
    """Another object with the same handle is another stream: the first may have been destroyed."""
    session, make = session_of(scene.device), LIBRARIES[name]
    first, second = make(scene.theirs.handle), make(scene.theirs.handle)
    known = as_stream(first, session)
    assert known.device == scene.device and known.handle == scene.theirs.handle
    assert as_stream(first, session) is known and scene.pool.allocate(64, first).stream is known
    assert as_stream(second, session) is not known and as_stream(first, session) is known


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_an_object_lives_for_the_table_and_memory(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_streams, "MOST_KEPT", 2)
    make = LIBRARIES[name]
    theirs = make(scene.theirs.handle)
    gone = weakref.ref(theirs)
    buffer = scene.pool.allocate(64, theirs)
    del theirs
    others = [make(scene.own.handle) for _ in range(3)]
    for other in others:
        scene.own.wait(other)
    assert gone() is not None and buffer.stream.handle == scene.theirs.handle
    buffer.free()
    del buffer
    assert gone() is None


def test_a_stream_that_its_library_has_closed(scene: Scene) -> None:
    theirs = Protocol(number=scene.theirs.handle)
    scene.pool.allocate(64, theirs).free()
    with scene.device.create_stream() as other:
        theirs.number = other.handle
        assert scene.pool.allocate(64, theirs).stream.handle == other.handle


def test_each_object_of_pytorch_is_the_same_stream(scene: Scene) -> None:
    session, handle = session_of(scene.device), scene.theirs.handle
    known = as_stream(of_pytorch(handle), session)
    assert known.device == scene.device and as_stream(of_pytorch(handle), session) is known
    assert list(session.library_streams) == [(handle, 0)]
    # What users have they may close.
    scene.pool.allocate(64, of_pytorch(handle)).stream.close()
    assert known.closed and not as_stream(of_pytorch(handle), session).closed


# Objects that name a stream without owning it.
NAMING: dict[str, Callable[[int], Any]] = {
    "PyTorch": lambda handle: of_pytorch(handle, own=False),
    "PyTorch, external": lambda handle: of_pytorch(handle, ExternalStream),
    "CuPy, external": lambda handle: ExternalStream(ptr=handle),
    "Numba, external": lambda handle: Named(handle=ctypes.c_void_p(handle), external=True),
    "the bindings": cuda.CUstream,
}


@pytest.mark.parametrize("name", NAMING)
def test_an_object_that_only_names_a_stream_is_resolved_each_time(scene: Scene, name: str) -> None:
    """That stream may be destroyed. A call with its handle would crash the process, so nothing is recorded on it."""
    session, theirs = session_of(scene.device), NAMING[name](scene.theirs.handle)
    with scene.pool.allocate(64, theirs) as buffer:
        assert buffer.stream.handle == scene.theirs.handle
        before = len(scene.driver.calls)
        Fence(session)
        recorded = {int(call.args[1]) for call in scene.driver.calls[before:] if call.name == "cuEventRecord"}
        assert scene.own.handle in recorded and buffer.stream not in Fence(session)._ends
    assert not session.library_streams


@pytest.mark.parametrize("kind", [Torch, AnyTorch, ExternalStream])
@pytest.mark.parametrize("own", [True, False])
def test_pytorch_s_objects_are_not_referenced_weakly(scene: Scene, kind: type[Named], own: bool) -> None:
    """PyTorch frees them without clearing weak references, which crashes the collection at the end of a process."""
    cache = sa.CachingAllocator(scene.pool)
    for handle in (scene.theirs.handle, 0):
        theirs = of_pytorch(handle, kind, own)
        for source in (scene.pool, cache, cache):
            with source.allocate(64, theirs) as buffer:
                buffer.fill(1)
                scene.own.wait(theirs)
        assert weakref.getweakrefcount(theirs) == 0
    cache.close()


@pytest.mark.parametrize("name", NULL)
@pytest.mark.parametrize("cached", [False, True])
def test_a_null_stream_in_a_thread_without_a_context(scene: Scene, name: str, cached: bool) -> None:
    """It is the one of device 0, as in the runtime API."""
    source = sa.CachingAllocator(scene.pool) if cached else scene.pool

    def allocate() -> sa.Device:
        assert int(scene.driver.cuCtxGetCurrent()[1]) == 0
        with source.allocate(64, NULL[name](0)) as buffer:
            buffer.fill(1)
            return buffer.stream.device

    assert in_threads(allocate) == [scene.device]
    if cached:
        source.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("handle", [0, 1, 2])
@pytest.mark.parametrize("name", ["CuPy", "protocol"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_null_stream_is_that_of_the_current_device(scene: Scene, name: str, handle: int, cached: bool) -> None:
    """Memory that was freed in the order of one device's stream is not for that of the other."""
    peer, theirs = sa.Device(1, driver=scene.driver), LIBRARIES[name](handle)
    source = sa.CachingAllocator(scene.pool) if cached else scene.pool
    addresses: dict[sa.Device, set[int]] = {scene.device: set(), peer: set()}
    for _ in range(3):
        for device in (scene.device, peer):
            with device.current(), source.allocate(64, theirs) as buffer:
                assert buffer.stream.device == device
                addresses[device].add(buffer.address)
            with device.current():
                scene.own.wait(theirs)
    if cached:
        assert not addresses[scene.device] & addresses[peer]
        assert list(map(len, addresses.values())) == [1, 1]
        source.close()


def test_a_null_stream_in_a_destroyed_context(device: sa.Device) -> None:
    """The context may have been of another device."""

    class Null:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0

    faults = Faults(device.driver)
    with sa.MemoryPool(sa.Device(0, driver=faults)) as pool:
        faults.fail("cuCtxGetDevice", result="CUDA_ERROR_CONTEXT_IS_DESTROYED")
        with pytest.raises(sa.InvalidContextError, match="cuCtxGetDevice"):
            pool.allocate(64, Null())


@pytest.mark.gpus(2)
def test_a_null_stream_of_another_device_closes_none(scene: Scene) -> None:
    theirs = LIBRARIES["CuPy"](0)
    with sa.CachingAllocator(scene.pool) as cache, scene.pool.allocate(64, scene.own) as other:
        cache.allocate(64, theirs).free()
        with scene.own.capture("relaxed"):
            other.fill(1)
            with sa.Device(1, driver=scene.driver).current():
                scene.pool.allocate(64, theirs).free()
        assert not scene.device.default_stream.closed
        assert cache.statistics().cached
        scene.device.synchronize()


@pytest.mark.gpus(2)
def test_a_default_stream_while_another_device_is_current(scene: Scene) -> None:
    peer, stream = sa.Device(1, driver=scene.driver), scene.device.default_stream
    with scene.pool.allocate(64, stream) as buffer, peer.current():
        buffer.fill(5)
        stream.record().close()
        assert "cuCtxPushCurrent" in calls(scene, stream.synchronize)
        buffer.free()
        scene.pool.allocate(64, stream)
    assert scene.pool.statistics().used == 0


def test_default_streams_are_one_object_for_all(scene: Scene) -> None:
    stream = scene.device.default_stream
    assert stream is sa.Device(0, driver=scene.driver).default_stream
    assert stream is sa.Stream.of_handle(scene.device, 1, None)
    assert stream is not scene.device.per_thread_stream
    stream.close()
    assert not stream.closed


# -- captures by the library -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_captures_its_stream(machine: Any, scene: Scene, name: str) -> None:
    theirs = LIBRARIES[name](scene.theirs.handle)
    buffer, dropped = scene.pool.allocate(64, theirs), [scene.pool.allocate(64, theirs)]
    with captured(machine, scene.theirs):
        for inside in (scene.pool.allocate(64, theirs), sa.allocate(64, theirs)):
            assert isinstance(inside, sa.GraphBuffer) and inside.owner is None
        buffer.fill(1)
        for stream in (None, theirs):
            with pytest.raises(sa.CaptureError):
                buffer.free(stream)
        dropped.clear()
    buffer.free()
    end_what_was_dropped()
    scene.device.synchronize()
    assert scene.pool.statistics().used == 0


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_drop_while_another_thread_closes_the_stream(checker: Any, device: sa.Device, pool: sa.MemoryPool) -> None:
    """The memory is freed once, and nothing is queued on a stream that was destroyed."""

    def make() -> tuple[list[sa.Buffer], sa.Stream]:
        stream = device.create_stream()
        return [pool.allocate(64, stream)], stream

    def drop(both: tuple[list[sa.Buffer], sa.Stream]) -> None:
        both[0].clear()

    def close(both: tuple[list[sa.Buffer], sa.Stream]) -> None:
        both[1].close()

    drops_first = interleaved(PoolBuffer.__del__, make, drop, close)
    for _ in itertools.chain(drops_first, interleaved(OwnStream._close, make, close, drop)):
        gc.collect()
        end_what_was_dropped()
        assert pool.statistics().used == 0
        assert "stream" not in checker.outstanding()
    assert checker.hazards == []


def test_an_allocation_while_another_thread_allows_fast_paths(scene: Scene) -> None:
    """As at the end of a capture: the allocation is on its stream, and not on the legacy one."""

    def make() -> list[sa.Buffer]:
        scene.own._forbid_direct()
        return []

    for made in interleaved(
        Allocator.allocate,
        make,
        lambda made: made.append(scene.pool.allocate(64, scene.own)),
        lambda made: scene.own._allow_direct(),
    ):
        allocated = [call for call in scene.driver.calls if call.name == ALLOCATE][-1]
        assert int(allocated.args[2] or 0) == scene.own.handle
        made.clear()


@pytest.mark.parametrize("change", ["close", "capture", "capture of another stream"])
def test_a_stream_that_changes_while_another_thread_allows_fast_paths(device: sa.Device, change: str) -> None:
    """As at the end of a capture: at whichever line the other thread begins, no direct call is allowed."""
    with contextlib.ExitStack() as streams, device.create_stream() as other:

        def make() -> tuple[sa.Stream, contextlib.ExitStack]:
            return streams.enter_context(device.create_stream()), contextlib.ExitStack()

        def act(state: tuple[sa.Stream, contextlib.ExitStack]) -> None:
            stream, captures = state
            if change == "close":
                stream.close()
            elif change == "capture":
                captures.enter_context(stream.capture("relaxed"))
            else:
                deferred_queue(session_of(device)).captures[other] = (
                    1  # as a capture in the mode "global" of another thread
                )
                captures.callback(deferred_queue(session_of(device)).captures.clear)
                captures_changed(session_of(device))

        def allow(state: tuple[sa.Stream, contextlib.ExitStack]) -> None:
            state[0]._allow_direct()

        both = [interleaved(Stream._allow_direct, make, allow, act)]
        both += [interleaved(OwnStream._destroy, make, act, allow)] if change == "close" else []
        for stream, captures in itertools.chain(*both):
            with captures:
                assert (stream.direct, stream.usable) == (None, False)


@pytest.mark.parametrize("name", LIBRARIES)
def test_threads_on_one_library_stream(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, name: str) -> None:
    theirs = LIBRARIES[name](stream.handle)

    def work(number: int) -> None:
        found = np.zeros(64, np.uint8)
        for _ in range(40):
            buffer = pool.allocate(64, theirs)
            buffer.fill(number)
            buffer.copy_to(found, theirs)
            assert (found == number).all()
            if number % 2:
                buffer.free(theirs)
            del buffer

    in_threads(*[functools.partial(work, number) for number in range(8)])
    device.synchronize()
    assert pool.statistics().used == 0


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_named_stream_says_its_name(device: sa.Device, pool: sa.MemoryPool) -> None:
    stream = device.create_stream(name="copies")
    assert stream.name == "copies" and "'copies'" in repr(stream)
    stream.close()
    with pytest.raises(sa.ClosedError, match="'copies'"):
        pool.allocate(64, stream)
    assert device.default_stream.name == ""
    with pytest.raises(TypeError, match="name must be a string"):
        device.create_stream(name=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["own", "default", "CuPy, null"])
@pytest.mark.parametrize("named", [False, True])
def test_two_threads_that_free_one_buffer(scene: Scene, kind: str, named: bool) -> None:
    """One of them gets an error, at whichever line the other one begins: the pointer is taken within one line."""
    stream = stream_of(scene, kind)

    def make() -> tuple[sa.Buffer, list[object], int]:
        return scene.pool.allocate(64, stream), [], names(scene.driver).count(FREE)

    def free(state: tuple[sa.Buffer, list[object], int]) -> None:
        try:
            with scene.device.current():
                state[0].free(stream if named else None)
        except sa.ClosedError as error:
            state[1].append(error)

    for _, errors, before in interleaved(sa.Buffer.free, make, free, free, at="line"):
        assert len(errors) == 1 and names(scene.driver).count(FREE) == before + 1
