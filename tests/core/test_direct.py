"""Fast paths (:mod:`streamalloc.core.session`): one driver call; all else has the slow path's words."""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.deferred import Deferred
from streamalloc.core.fence import queue_behind
from streamalloc.core.session import DIRECT
from streamalloc.testing import Faults, Gate
from tests.support import each_raises, holds, names, pending, read


class Scene(NamedTuple):
    """Objects that the operations work on."""

    driver: Any
    stream: sa.Stream
    pool: sa.MemoryPool
    memory: sa.Buffer
    other: sa.Buffer
    array: Any


@pytest.fixture
def scene(traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[Scene]:
    with pool.allocate(4096, stream) as memory, pool.allocate(4096, stream) as other:
        stream.record().close()
        memory.fill(1)
        other.fill(2)
        other.__dlpack__(stream=-1)
        yield Scene(traced, stream, pool, memory, other, np.full(4096, 3, np.uint8))
        stream.synchronize()


Operation = Callable[[Scene, sa.Memory], object]
# Every operation with a fast path, and the driver calls of its plain case.
ON_MEMORY: dict[str, tuple[Operation, list[str]]] = {
    "fill": (lambda s, memory: memory.fill(7), ["cuMemsetD8Async"]),
    "copy to": (lambda s, memory: memory.copy_to(s.other), ["cuMemcpyAsync"]),
    "copy from": (lambda s, memory: memory.copy_from(s.other), ["cuMemcpyAsync"]),
    "to numpy": (lambda s, memory: memory.copy_to(s.array), ["cuMemcpyDtoHAsync"]),
    "from numpy": (lambda s, memory: memory.copy_from(s.array), ["cuMemcpyHtoDAsync"]),
    "DLPack": (lambda s, memory: memory.__dlpack__(stream=-1), []),
    "array interface": (lambda s, memory: memory.__cuda_array_interface__, []),
}
ON_OTHERS: dict[str, tuple[Operation, list[str]]] = {
    "record": (lambda s, _: s.stream.record(), ["cuEventRecord"]),
    "query": (lambda s, _: s.stream.query(), ["cuStreamQuery"]),
    "synchronize": (lambda s, _: s.stream.synchronize(), ["cuStreamSynchronize"]),
    "record and wait": (lambda s, _: s.stream.wait(s.stream), ["cuEventRecord", "cuStreamWaitEvent"]),
    "query an event": (lambda s, _: s.stream.record().query(), ["cuEventRecord", "cuEventQuery"]),
    "statistics": (lambda s, _: s.pool.statistics(), ["cuMemPoolGetAttribute"] * 4),
}
OPERATIONS = ON_MEMORY | ON_OTHERS
IN_CALLS = [name for name, (_, calls) in OPERATIONS.items() if calls]


def calls(scene: Scene, what: Callable[[], object]) -> list[str]:
    before = len(scene.driver.calls)
    what()
    return names(scene.driver)[before:]


class TestPlainCase:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_makes_one_call(self, scene: Scene, name: str) -> None:
        operation, expected = OPERATIONS[name]
        for memory in (scene.memory, scene.memory[0:4096]):
            assert calls(scene, functools.partial(operation, scene, memory)) == expected

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

    @pytest.mark.parametrize("name", ON_MEMORY)
    def test_freed(self, scene: Scene, name: str) -> None:
        buffer = scene.pool.allocate(4096, scene.stream)
        made = (buffer, buffer[0:4096], buffer.view_as(np.uint8))
        buffer.free()
        for memory in made:
            with pytest.raises(sa.ClosedError, match=r"this buffer of 4 KiB was freed"):
                ON_MEMORY[name][0](scene, memory)

    def test_freed_memory_beside_other(self, scene: Scene) -> None:
        buffer = scene.pool.allocate(4096, scene.stream)
        view = buffer[8:]
        buffer.free()
        uses: list[Callable[[], object]] = [lambda: view.address]
        uses += [functools.partial(copy, buffer) for copy in (scene.other.copy_to, scene.other.copy_from)]
        each_raises(sa.ClosedError, *uses)
        assert buffer.nbytes == 4096 and buffer.stream is scene.stream  # what needs no memory is still told

    @pytest.mark.parametrize("name", IN_CALLS)
    def test_of_what_is_closed(self, scene: Scene, name: str) -> None:
        pool = sa.MemoryPool(scene.stream.device)
        with scene.stream.device.create_stream() as stream:
            memory = scene.pool.allocate(4096, stream)
        pool.close()
        with pytest.raises(sa.ClosedError, match=r"<(Stream|MemoryPool) .* closed>,? .*was closed"):
            OPERATIONS[name][0](scene._replace(stream=stream, pool=pool), memory)
        memory.close()

    @pytest.mark.parametrize("name", IN_CALLS)
    def test_what_the_driver_answers(self, streamalloc_faults: Faults, scene: Scene, name: str) -> None:
        operation, expected = OPERATIONS[name]
        streamalloc_faults.fail(expected[-1], result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match=rf"{expected[-1]} answered .*UNKNOWN"):
            operation(scene, scene.memory)

    def test_arrays_that_do_not_fit(self, scene: Scene) -> None:
        memory = scene.memory
        fixed = np.zeros(4096, np.uint8)
        fixed.flags.writeable = False
        for array in (np.zeros(4095, np.uint8), np.zeros(4097, np.uint8), np.zeros((64, 64), np.uint8, order="F")):
            for copy in (memory.copy_from, memory.copy_to):
                with pytest.raises(ValueError, match=r"take a view of the larger one|not contiguous"):
                    copy(array)
        with pytest.raises(ValueError, match="target is read-only"):
            memory.copy_to(fixed)
        memory.copy_from(fixed)
        assert holds(memory, 0)

    def test_streams_that_do_not_fit(self, scene: Scene) -> None:
        foreign = sa.Device(0, driver=sd.simulated()).create_stream()
        uses: list[Callable[[Any], None]] = [
            lambda stream: scene.memory.fill(1, stream),
            lambda stream: scene.memory.copy_to(scene.array, stream),
            scene.stream.wait,
        ]
        for use in uses:
            each_raises(ValueError, functools.partial(use, foreign), match="belongs to another driver")
            each_raises(TypeError, functools.partial(use, object()), match=r"(stream|other) must be .*a Stream")
        foreign.close()

    @pytest.mark.parametrize("cached", [False, True])
    def test_no_driver_gets_the_handle_of_another_ones_stream(self, scene: Scene, cached: bool) -> None:
        """Driver 580 takes each handle for an address and reads there: another driver's handle ends the process."""
        source = sa.CachingAllocator(scene.pool) if cached else scene.pool
        foreign = sa.Device(0, driver=sd.simulated()).create_stream()
        foreign.__cuda_stream__()  # others may capture it, so that an allocation asks

        def allocate() -> None:
            with pytest.raises(ValueError, match="belongs to another driver"):
                source.allocate(64, foreign)

        assert calls(scene, allocate) == []
        foreign.close()

    @pytest.mark.gpus(2)
    def test_while_another_device_is_current(self, scene: Scene) -> None:
        with sa.Device(1, driver=scene.driver).current():
            for operation, _ in OPERATIONS.values():
                operation(scene, scene.memory)
            scene.memory.copy_from(np.full(4096, 4, np.uint8))
        assert holds(scene.memory, 4)


class TestEventsUsedAgain:
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

    def test_a_few_are_kept_and_none_when_the_stream_is_closed(self, checker: Any) -> None:
        stream = sa.Device(0, driver=checker).create_stream()
        events = [stream.record() for _ in range(50)]
        late = events.pop()
        while events:
            events.pop().close()
        assert 1 < len(checker.outstanding()["event"]) < 20
        stream.close()
        del stream
        gc.collect()
        assert len(checker.outstanding()["event"]) == 1
        late.close()
        checker.assert_nothing_left()

    def test_an_event_of_a_context_that_is_gone(self, streamalloc_faults: Faults, stream: sa.Stream) -> None:
        """It is refused, and a new one is made."""
        stream.record().close()
        streamalloc_faults.fail("cuEventRecord", result="CUDA_ERROR_INVALID_HANDLE")
        assert stream.record().query()
        assert streamalloc_faults.failed == ["cuEventRecord"]


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
        assert stream.direct is None
    if why != "is captured":
        assert stream.direct is None
    item.ready = True
    stream._attempt_before_work()
    assert (stream.direct is None) == (why == "is closed")
    stream.close()
