"""When a closed pool is destroyed in the driver: not while anything of it is in use or a free has not run."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.pool.ending import pools_of
from streamalloc.testing import Gate
from tests.interop.libraries import LibraryStream
from tests.support import KEEP, MiB, each_raises, eventually, names

DESTROY = "cuMemPoolDestroy"


def test_at_once_where_nothing_was_allocated(traced: Any, pool: sa.MemoryPool) -> None:
    pool.close()
    assert names(traced, DESTROY) == [DESTROY]


def test_at_once_where_the_host_has_seen_all_frees(traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    pool.allocate(40 * MiB, stream).free()
    stream.synchronize()
    pool.close()
    assert names(traced, DESTROY) == [DESTROY]


def test_not_while_an_allocation_lives(traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    buffer = pool.allocate(MiB, stream)
    pool.close()
    stream.synchronize()
    assert names(traced, DESTROY) == []
    buffer.fill(7)
    out = bytearray(MiB)
    buffer.copy_to(out)
    stream.synchronize()
    assert out == bytes([7]) * MiB
    buffer.free()
    assert names(traced, DESTROY) == []
    stream.synchronize()
    assert names(traced, DESTROY) == [DESTROY]


def test_not_while_a_free_is_pending(traced: Any, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device) -> None:
    with Gate(device) as gate, device.create_stream() as other:
        gate.hold(stream)
        pool.allocate(MiB, stream).free()
        pool.close()
        other.synchronize()  # sees nothing of the stream that is held
        assert names(traced, DESTROY) == []
        gate.open()
        stream.synchronize()
        assert names(traced, DESTROY) == [DESTROY]


STREAMS: dict[str, Callable[[sa.Device, sa.Stream], Any]] = {
    "own": lambda device, stream: stream,
    "blocking": lambda device, stream: device.create_stream(blocking=True),
    "legacy": lambda device, stream: device.default_stream,
    "per-thread": lambda device, stream: device.per_thread_stream,
    "a library's": lambda device, stream: LibraryStream(stream.handle),
}


@pytest.mark.parametrize("name", STREAMS)
def test_by_itself_later(traced: Any, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, name: str) -> None:
    """Nobody else synchronises the host with the stream of the free."""
    freeing = STREAMS[name](device, stream)
    buffer = pool.allocate(MiB, freeing)
    with Gate(device) as gate:
        gate.hold(freeing)
        buffer.free()
        pool.close()
        work(session_of(device))
        assert names(traced, DESTROY) == []
        gate.open()
        assert eventually(lambda: work(session_of(device)) and names(traced, DESTROY))


@pytest.mark.parametrize("how", ["closed", "dropped", "closed before the free"])
def test_by_itself_where_the_stream_of_the_free_has_ended(traced: Any, device: sa.Device, how: str) -> None:
    pool, stream = sa.MemoryPool(device, release_threshold=KEEP), device.create_stream()
    buffer = pool.allocate(MiB, stream)
    with Gate(device) as gate:
        gate.hold(stream)
        if how == "closed before the free":
            stream.close()
            buffer.close()
        else:
            buffer.free()
        if how == "closed":
            stream.close()
        del stream, buffer
        gc.collect()
        pool.close()
        work(session_of(device))
        assert names(traced, DESTROY) == []
        gate.open()
        assert eventually(lambda: work(session_of(device)) and names(traced, DESTROY))


def test_not_while_a_stream_is_captured(traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with stream.capture() as graph:
        pool.close()
        assert names(traced, DESTROY) == []
    assert names(traced, DESTROY) == [DESTROY]
    assert graph.nodes == []


def test_another_pool_s_end_is_an_occasion(traced: Any, device: sa.Device, stream: sa.Stream) -> None:
    first, second = sa.MemoryPool(device), sa.MemoryPool(device)
    buffer = first.allocate(MiB, stream)
    first.close()
    buffer.free()
    device.driver.cuStreamSynchronize(stream.handle)  # past us, as other libraries do
    second.close()
    assert names(traced, DESTROY) == [DESTROY] * 2


def test_a_dropped_pool(traced: Any, device: sa.Device, stream: sa.Stream) -> None:
    buffer = sa.MemoryPool(device).allocate(MiB, stream)
    assert names(traced, DESTROY) == []
    del buffer
    gc.collect()
    stream.synchronize()
    assert names(traced, DESTROY) == [DESTROY]


def test_what_is_left_outlives_every_object(machine: Any, checker: Any) -> None:
    """The last object of a driver goes before a free has run; a later object of the same driver ends the pool."""
    gate = Gate(sa.Device(0, driver=machine))

    def use() -> None:
        device = sa.Device(0, driver=checker)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool:
            gate.hold(machine.CUstream(stream.handle))
            pool.allocate(MiB, stream).free()

    use()
    gc.collect()
    assert list(checker.outstanding()) == ["event", "pool"]
    gate.close()
    sa.Device(0, driver=checker).synchronize()
    checker.assert_nothing_left()


def test_an_error_of_the_end_is_told_and_the_end_tried_again(faults: Any, checker: Any, device: sa.Device) -> None:
    faults.fail("cuMemPoolTrimTo", result="CUDA_ERROR_UNKNOWN")
    pool = sa.MemoryPool(device)
    each_raises(sa.CudaError, pool.close, match="cuMemPoolTrimTo answered CUDA_ERROR_UNKNOWN")
    assert pool.closed
    pool.close()
    device.synchronize()
    checker.assert_nothing_left()


@pytest.mark.parametrize("answer", ["INVALID_VALUE", "CONTEXT_IS_DESTROYED"])
def test_a_pool_that_the_driver_does_not_know_has_ended(faults: Any, pool: sa.MemoryPool, answer: str) -> None:
    """A new pool may get its handle, and is open."""
    faults.fail(DESTROY, result=f"CUDA_ERROR_{answer}")
    session, raw = session_of(pool), pool.handle
    each_raises(sa.CudaError, pool.close, match=answer)
    work(session)
    assert raw not in pools_of(session).closed
    assert not faults.cuMemPoolDestroy(cuda.CUmemoryPool(raw))[0]


def test_a_handle_counts_as_that_of_an_open_pool_before_the_driver_can_use_it_again(
    device: sa.Device, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may get the same handle for a new pool as soon as the old one is destroyed."""
    closed = pools_of(session_of(pool)).closed
    destroy = device.driver.cuMemPoolDestroy
    seen: list[set[int]] = []

    def look_and_destroy(raw: Any) -> Any:
        seen.append(set(closed))
        return destroy(raw)

    monkeypatch.setattr(device.driver, "cuMemPoolDestroy", look_and_destroy, raising=False)
    handle = pool.handle
    pool.close()
    assert len(seen) == 1 and handle not in seen[0]
