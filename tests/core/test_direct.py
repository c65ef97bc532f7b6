"""Fast paths (:mod:`streamalloc.core.session`): one driver call; all else has the slow path's words."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.deferred import Deferred
from streamalloc.core.fence import queue_behind
from streamalloc.core.session import DIRECT, session_of
from streamalloc.core.stream import direct_handle
from streamalloc.testing import Gate
from tests.support import MiB, holds, in_threads, names, pending, read


class Scene(NamedTuple):
    """Objects that the operations work on."""

    driver: Any
    stream: sa.Stream
    pool: sa.MemoryPool
    memory: sa.Buffer
    other: sa.Buffer
    array: Any


@pytest.fixture
def scene(machine: Any) -> Iterator[Scene]:
    driver = sd.traced(machine)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        stream.record().close()
        with pool.allocate(4096, stream) as memory, pool.allocate(4096, stream) as other:
            memory.fill(1)
            other.fill(2)
            other.__dlpack__(stream=-1)
            yield Scene(driver, stream, pool, memory, other, np.full(4096, 3, np.uint8))
            stream.synchronize()


Operation = Callable[[Scene, sa.Memory], object]
# Every operation with a fast path, and the driver calls of its plain case.
OPERATIONS: dict[str, tuple[Operation, list[str]]] = {
    "fill": (lambda s, memory: memory.fill(7), ["cuMemsetD8Async"]),
    "copy to": (lambda s, memory: memory.copy_to(s.other), ["cuMemcpyAsync"]),
    "copy from": (lambda s, memory: memory.copy_from(s.other), ["cuMemcpyAsync"]),
    "to numpy": (lambda s, memory: memory.copy_to(s.array), ["cuMemcpyDtoHAsync"]),
    "from numpy": (lambda s, memory: memory.copy_from(s.array), ["cuMemcpyHtoDAsync"]),
    "DLPack": (lambda s, memory: memory.__dlpack__(stream=-1), []),
    "array interface": (lambda s, memory: memory.__cuda_array_interface__, []),
}
ON_STREAMS: dict[str, tuple[Callable[[Scene], object], list[str]]] = {
    "record": (lambda s: s.stream.record(), ["cuEventRecord"]),
    "query": (lambda s: s.stream.query(), ["cuStreamQuery"]),
    "synchronize": (lambda s: s.stream.synchronize(), ["cuStreamSynchronize"]),
    "record and wait": (lambda s: s.stream.wait(s.stream), ["cuEventRecord", "cuStreamWaitEvent"]),
    "query an event": (lambda s: s.stream.record().query(), ["cuEventRecord", "cuEventQuery"]),
    "statistics": (lambda s: s.pool.statistics(), ["cuMemPoolGetAttribute"] * 4),
}
of_memory = pytest.mark.parametrize("name", OPERATIONS)
of_streams = pytest.mark.parametrize("name", ON_STREAMS)


def calls(scene: Scene, what: Callable[[], object]) -> list[str]:
    before = len(scene.driver.calls)
    what()
    return names(scene.driver)[before:]


class TestPlainCase:
    @of_memory
    def test_makes_one_call(self, scene: Scene, name: str) -> None:
        operation, expected = OPERATIONS[name]
        assert calls(scene, lambda: operation(scene, scene.memory)) == expected

    @of_memory
    def test_of_a_view_too(self, scene: Scene, name: str) -> None:
        operation, expected = OPERATIONS[name]
        assert calls(scene, lambda: operation(scene, scene.memory[0:4096])) == expected

    @of_streams
    def test_of_a_stream(self, scene: Scene, name: str) -> None:
        operation, expected = ON_STREAMS[name]
        assert calls(scene, lambda: operation(scene)) == expected

    def test_on_another_stream(self, scene: Scene) -> None:
        with scene.stream.device.create_stream() as second:
            second.wait(scene.stream)
            scene.memory.fill(9, second)
            target = np.zeros(4096, np.uint8)
            assert calls(scene, lambda: scene.memory.copy_to(target, second)) == ["cuMemcpyDtoHAsync"]
            second.synchronize()
            assert (target == 9).all()

    def test_the_bytes_are_right(self, scene: Scene) -> None:
        memory, other, array = scene.memory, scene.other, scene.array
        memory[0:1024].fill(200)
        memory[1024:2048].copy_from(array[:1024])
        memory[2048:3072].copy_from(other[0:1024])
        memory[3072:4096].copy_to(other[3072:4096])
        assert np.array_equal(read(memory), np.repeat(np.array([200, 3, 2, 1], np.uint8), 1024))
        assert np.array_equal(read(other), np.repeat(np.array([2, 1], np.uint8), [3072, 1024]))


def test_what_is_bound_is_used() -> None:
    code = "".join(file.read_text() for file in Path(sa.__file__).parent.rglob("*.py"))
    assert [name for name in DIRECT if f".{name}" not in code] == []


class TestNotPlain:
    """The slow path's errors come, in its words, and nothing is asked of the driver."""

    @of_memory
    def test_freed(self, scene: Scene, name: str) -> None:
        buffer = scene.pool.allocate(4096, scene.stream)
        view = buffer[0:4096]
        buffer.free()
        for memory in (buffer, view):
            with pytest.raises(sa.ClosedError, match=r"this buffer of 4 KiB was freed"):
                OPERATIONS[name][0](scene, memory)

    @pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("DLPack", "array interface")])
    def test_its_stream_is_closed(self, scene: Scene, name: str) -> None:
        with scene.stream.device.create_stream() as second:
            memory = scene.pool.allocate(4096, second)
        with pytest.raises(sa.ClosedError, match=r"<Stream .* closed> was closed"):
            OPERATIONS[name][0](scene, memory)
        memory.close()

    @of_streams
    def test_a_closed_stream(self, scene: Scene, name: str) -> None:
        stream = scene.stream.device.create_stream()
        stream.close()
        if name != "statistics":
            with pytest.raises(sa.ClosedError, match=r"<Stream .* closed> was closed"):
                ON_STREAMS[name][0](scene._replace(stream=stream))

    def test_a_closed_pool(self, scene: Scene) -> None:
        pool = sa.MemoryPool(scene.stream.device)
        pool.close()
        with pytest.raises(sa.ClosedError, match=r"<MemoryPool .* closed> was closed"):
            pool.statistics()

    @pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("DLPack", "array interface")])
    def test_what_the_driver_answers(self, machine: Any, name: str) -> None:
        operation, (call,) = OPERATIONS[name]
        faulty = sd.faulty(machine, call, times=9, result="CUDA_ERROR_UNKNOWN")
        device = sa.Device(0, driver=faulty)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(4096, stream) as memory:
            with pool.allocate(4096, stream) as other, pytest.raises(sa.CudaError, match=rf"{call} answered .*UNKNOWN"):
                operation(Scene(faulty, stream, pool, memory, other, np.zeros(4096, np.uint8)), memory)
            assert faulty.failed == [call]

    @of_streams
    def test_what_the_driver_answers_to_streams(self, machine: Any, name: str) -> None:
        operation, expected = ON_STREAMS[name]
        faulty = sd.faulty(machine, expected[-1], result="CUDA_ERROR_UNKNOWN")
        device = sa.Device(0, driver=faulty)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(4096, stream) as memory:
            with pytest.raises(sa.CudaError, match=rf"{expected[-1]} answered .*UNKNOWN"):
                operation(Scene(faulty, stream, pool, memory, memory, None))
            assert faulty.failed == [expected[-1]]

    def test_values_of_other_types(self, scene: Scene) -> None:
        for value, words in ((256, "does not fit a pattern of 1 byte"), (-129, "does not fit"), (True, "not bool")):
            with pytest.raises((TypeError, ValueError), match=words):
                scene.memory.fill(value)
        scene.memory.fill(-1)
        assert holds(scene.memory, 255)

    def test_arrays_that_do_not_fit(self, scene: Scene) -> None:
        memory = scene.memory
        fortran = np.zeros((64, 64), np.uint8, order="F")
        fixed = np.zeros(4096, np.uint8)
        fixed.flags.writeable = False
        cases: list[tuple[Callable[[], None], str]] = [
            (lambda: memory.copy_from(np.zeros(4095, np.uint8)), "source has 4095 bytes and target 4096"),
            (lambda: memory.copy_to(np.zeros(4097, np.uint8)), "source has 4096 bytes and target 4097"),
            (lambda: memory.copy_from(fortran), "source is not contiguous"),
            (lambda: memory.copy_to(fortran), "target is not contiguous"),
            (lambda: memory.copy_to(fixed), "target is read-only"),
            (lambda: memory.copy_to(memory[0:5]), "source has 4096 bytes and target 5"),
        ]
        for case, words in cases:
            with pytest.raises(ValueError, match=words):
                case()
        memory.copy_from(fixed)
        assert holds(memory, 0)

    def test_a_stream_of_another_driver(self, scene: Scene) -> None:
        foreign = sa.Device(0, driver=sd.simulated()).create_stream()
        cases: list[Callable[[], None]] = [
            lambda: scene.memory.fill(1, foreign),
            lambda: scene.memory.copy_to(scene.array, foreign),
            lambda: scene.stream.wait(foreign),
        ]
        for case in cases:
            with pytest.raises(ValueError, match="belongs to another driver"):
                case()
        foreign.close()

    def test_no_stream_at_all(self, scene: Scene) -> None:
        nothing: Any = object()
        cases: list[Callable[[], None]] = [
            lambda: scene.memory.fill(1, nothing),
            lambda: scene.memory.copy_to(scene.array, nothing),
        ]
        for case in cases:
            with pytest.raises(TypeError, match="stream must be a Stream"):
                case()

    @pytest.mark.gpus(2)
    def test_while_another_device_is_current(self, scene: Scene) -> None:
        with sa.Device(1, driver=scene.driver).current():
            for name in OPERATIONS:
                OPERATIONS[name][0](scene, scene.memory)
            ON_STREAMS["record and wait"][0](scene)
            scene.memory.copy_from(np.full(4096, 4, np.uint8))
        assert holds(scene.memory, 4)

    @pytest.mark.gpus(2)
    def test_memory_of_two_devices(self, scene: Scene) -> None:
        second = sa.Device(1, driver=scene.driver)
        with second.create_stream() as stream, sa.MemoryPool(second) as pool, pool.allocate(4096, stream) as far:
            far.fill(8)
            scene.stream.wait(stream)
            assert "cuMemcpyPeerAsync" in calls(scene, lambda: scene.memory.copy_from(far))
            assert holds(scene.memory, 8)

    def test_a_forked_child(self, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        device = sa.Device(0, driver=sd.traced(machine))
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as memory:
            session: Any = stream._session
            kept = {name: getattr(session, name) for name in sys.modules["streamalloc.core.session"].DIRECT}
            session._shut_after_fork()
            try:
                for case in (lambda: memory.fill(1), stream.query, stream.record, pool.statistics, stream.synchronize):
                    with pytest.raises(sd.ForkedProcessError):
                        case()
            finally:
                session.forked, session.unusable = False, sys.is_finalizing
                for name, function in kept.items():
                    setattr(session, name, function)
                pool._alloc, pool._free = session.driver.cuMemAllocFromPoolAsync, session.driver.cuMemFreeAsync


class TestEventsUsedAgain:
    def test_the_driver_s_event_is_the_same(self, stream: sa.Stream) -> None:
        first = stream.record()
        handle = first.handle
        first.close()
        assert stream.record().handle == handle

    def test_what_waits_goes_on_waiting_for_the_first(self, device: sa.Device, stream: sa.Stream) -> None:
        with device.create_stream() as waiting, Gate(device) as first, Gate(device) as second:
            first.hold(stream)
            event = stream.record()
            waiting.wait(event)
            handle = event.handle
            event.close()
            second.hold(stream)
            again = stream.record()
            assert again.handle == handle and pending(waiting)
            first.open()
            waiting.synchronize()
            assert not again.query()
            second.open()
            again.synchronize()

    def test_one_of_a_capture_is_not(self, scene: Scene) -> None:
        with scene.stream.capture():
            event = scene.stream.record()
            assert "cuEventDestroy" in calls(scene, event.close)

    def test_a_few_are_kept_and_none_when_the_stream_is_closed(self, machine: Any) -> None:
        driver = sd.checked(machine)
        device = sa.Device(0, driver=driver)
        stream = device.create_stream()
        events = [stream.record() for _ in range(50)]
        late = events.pop()
        for event in events:
            event.close()
        assert 1 < len(driver.outstanding()["event"]) < 20
        del events, event
        stream.close()
        del stream
        gc.collect()
        assert len(driver.outstanding()["event"]) == 1
        late.close()
        driver.assert_nothing_left()

    def test_threads_that_close_the_same_event(self, machine: Any) -> None:
        """It comes back once: two users of one event would wait for each other's work."""
        device = sa.Device(0, driver=machine)
        with device.create_stream() as stream:
            for _ in range(200):
                event = stream.record()
                in_threads(*[event.close] * 3)
                held = [stream.record() for _ in range(3)]
                assert len({one.handle for one in held}) == 3
                for one in held:
                    one.close()

    def test_an_event_of_a_context_that_is_gone(self, machine: Any) -> None:
        """It is refused, and a new one is made."""
        driver = sd.faulty(machine, "cuEventRecord", nth=2, result="CUDA_ERROR_INVALID_HANDLE")
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream:
            stream.record().close()
            assert stream.record().query()
            assert driver.failed == ["cuEventRecord"]


class TestCapsules:
    def test_keeps_the_memory_and_names_its_device(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """In both versions of the protocol; in the newer one 32 bytes come before the tensor."""
        pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        for version, name, offset in ((None, b"dltensor", 0), ((1, 0), b"dltensor_versioned", 32)):
            buffer = pool.allocate(3 * MiB, stream)
            address, before = buffer.address, pool.statistics().used
            for _ in range(2):  # the first goes the slow way
                capsule = buffer.__dlpack__(stream=-1, max_version=version)
            words = ctypes.cast(pointer_in(capsule, name) + offset, ctypes.POINTER(ctypes.c_int32))
            assert ctypes.cast(words, ctypes.POINTER(ctypes.c_uint64))[0] == address
            assert (words[2], words[3]) == (2, 0)
            del buffer
            gc.collect()
            assert pool.statistics().used == before
            del capsule
            assert pool.statistics().used < before


class Item(Deferred):
    """An item that ends when told to."""

    ready = False

    def attempt(self) -> bool:
        return self.ready


@pytest.mark.parametrize("why", ["owes an item", "is captured", "is closed"])
def test_a_stream_is_not_direct_while_it(device: sa.Device, why: str) -> None:
    """Neither after one of the items that it owes has ended, nor after a capture."""
    stream, item = device.create_stream(), Item()
    with stream.capture("relaxed") if why != "is closed" else stream:
        queue_behind(stream, item)
        item.ready = why == "is captured"
        stream._attempt_before_work(item)
        assert direct_handle(stream, session_of(stream)) is None
    if why != "is captured":
        assert direct_handle(stream, session_of(stream)) is None
    item.ready = True
    stream._attempt_before_work()
    assert (direct_handle(stream, session_of(stream)) is None) == (why == "is closed")
    stream.close()
