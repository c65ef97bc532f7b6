"""Pools: making them, their attributes and figures, thresholds and trimming."""

import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import BINDINGS_VERSION, cuda
from streamalloc.pool.ending import pools_of
from streamalloc.testing import Faults, Gate
from tests.interop.libraries import LibraryStream
from tests.support import GROWTH, KEEP, MiB, Replaced, each_raises, eventually, executed, names

POSIX, FABRIC = sa.MemHandleType.POSIX_FILE_DESCRIPTOR, sa.MemHandleType.FABRIC
MANAGED = sa.MemAllocationType.MANAGED


class TestMaking:
    def test_on_a_device(self, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool:
            assert pool.location == sa.MemLocation.device(0)
            assert pool.allocation_type is sa.MemAllocationType.PINNED
            assert pool.properties == sa.MemPoolProps(location=sa.MemLocation.device(0))
            assert pool.properties.gpu_direct_rdma_capable is False
            assert pool.owned and not pool.closed and pool.handle and pool.on_oom == "raise"
            assert pool.statistics() == (0, 0, 0, 0)
            assert hex(pool.handle) in repr(pool) and "DEVICE:0" in repr(pool)

    @pytest.mark.parametrize(
        "where",
        [
            sa.MemLocation.device(0),
            sa.MemLocation.host(),
            sa.MemLocation.host_numa(0),
            sa.MemPoolProps(location=sa.MemLocation.device(0)),
            sa.MemPoolProps(location=sa.MemLocation.device(0), max_size=1 << 40),
            sa.MemPoolProps(location=sa.MemLocation.device(0), handle_types=POSIX),
            sa.MemPoolProps(location=sa.MemLocation.device(0), handle_types=POSIX | FABRIC),
            sa.MemPoolProps(location=sa.MemLocation.host_numa(0), handle_types=POSIX),
            sa.MemPoolProps(location=sa.MemLocation.host(), max_size=MiB),
            sa.MemPoolProps(location=sa.MemLocation.device(0), usage=2),
        ],
        ids=repr,
    )
    def test_everywhere(self, machine: Any, where: Any) -> None:
        with sa.MemoryPool(where) as pool:
            assert pool.statistics() == (0, 0, 0, 0)
            expected = where if isinstance(where, sa.MemPoolProps) else sa.MemPoolProps(location=where)
            assert pool.properties == expected and pool.location == expected.location

    @pytest.mark.bindings("13.0")
    @pytest.mark.parametrize(
        "location",
        [sa.MemLocation.none(), sa.MemLocation.device(0), sa.MemLocation.host(), sa.MemLocation.host_numa(0)],
        ids=str,
    )
    def test_managed(self, machine: Any, location: sa.MemLocation) -> None:
        with sa.MemoryPool(sa.MemPoolProps(alloc_type=MANAGED, location=location)) as pool:
            assert pool.allocation_type is MANAGED and "managed" in repr(pool)
            assert pool.statistics() == (0, 0, 0, 0)
            pool.attributes.release_threshold = 7
            assert pool.attributes.release_threshold == 7 and pool.trim() == 0

    def test_arguments_and_properties(self, machine: Any) -> None:
        properties = sa.MemPoolProps(location=sa.MemLocation.device(0))
        for arguments in ({"max_size": 1}, {"handle_types": POSIX}):
            with pytest.raises(ValueError, match="MemPoolProps"):
                sa.MemoryPool(properties, **arguments)

    def test_changes_nothing_that_was_not_asked_for(self, traced: Any, device: sa.Device) -> None:
        sa.MemoryPool(device).close()
        assert names(traced, "cuMemPoolSetAttribute", "cuMemPoolSetAccess", "cuDeviceSetMemPool") == []


ANY: Any = sa.MemoryPool  # a type checker refuses what is tried
BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "absent device": (lambda _: ANY(sa.MemLocation.device(10**6)), ValueError, "location id=1000000"),
    "host with handle types": (lambda _: ANY(sa.MemLocation.host(), 0, POSIX), ValueError, "HOST"),
    "managed with a limit": (lambda _: sa.MemPoolProps(alloc_type=MANAGED, max_size=1), ValueError, "max_size=1"),
    "nowhere": (lambda _: ANY(sa.MemLocation.none()), ValueError, "location=NONE"),
    "negative limit": (lambda device: ANY(device, max_size=-1), ValueError, "max_size=-1"),
    "limit that no device has": (lambda device: ANY(device, (1 << 64) - 1), ValueError, "max_size"),
    "limit that is no number": (lambda device: ANY(device, max_size=1.5), ValueError, "max_size"),
    "handle types that are a number": (lambda device: ANY(device, 0, 1), TypeError, "handle_types"),
    "negative threshold": (lambda device: ANY(device, release_threshold=-1), ValueError, "threshold=-1"),
    "policy": (lambda device: ANY(device, on_oom="retry"), ValueError, "sync-trim-retry"),
    "a number for a place": (lambda _: ANY(0.5), TypeError, "where"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_do_not_reach_the_driver(traced: Any, name: str) -> None:
    make, error, says = BAD[name]
    with sd.use(traced), pytest.raises(error, match=says):
        make(sa.Device(0))
    assert set(names(traced)) <= {"cuInit", "cuDeviceGetCount"}


class TestRefusedByTheDriver:
    def test_a_numa_node_that_there_is_not(self, machine: Any) -> None:
        with pytest.raises(sa.InvalidValueError, match="NUMA") as caught:
            sa.MemoryPool(sa.MemLocation.host_numa(99))
        assert caught.value.call == "cuMemPoolCreate"

    def test_fabric_without_a_channel(self, faults: Faults, device: sa.Device) -> None:
        faults.fail("cuMemPoolCreate", result="CUDA_ERROR_NOT_PERMITTED")
        with pytest.raises(sa.NotPermittedError, match="IMEX"):
            sa.MemoryPool(device, handle_types=FABRIC)


class TestAttributes:
    def test_of_a_new_pool(self, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool:
            known = dict(pool.attributes)
            assert {name: known[name] for name in list(known)[:8]} == {
                "reuse_follow_event_dependencies": True,
                "reuse_allow_opportunistic": True,
                "reuse_allow_internal_dependencies": True,
                "release_threshold": 0,
                "reserved_mem_current": 0,
                "reserved_mem_high": 0,
                "used_mem_current": 0,
                "used_mem_high": 0,
            }
            assert "release_threshold=0" in repr(pool.attributes)
            assert pool.attributes._repr_html_().count("<tr>") == len(known)
        assert "closed" in repr(pool.attributes)

    def test_one_that_the_driver_lacks(self, faults: Faults, pool: sa.MemoryPool) -> None:
        known = dict(pool.attributes)
        faults.fail("cuMemPoolGetAttribute", 2, result="CUDA_ERROR_INVALID_VALUE")
        found = dict(pool.attributes)
        faults.stop()
        assert list(found) == [name for number, name in enumerate(known) if number != 1]

    @pytest.mark.parametrize(
        "name", ["reuse_follow_event_dependencies", "reuse_allow_opportunistic", "reuse_allow_internal_dependencies"]
    )
    def test_switches(self, pool: sa.MemoryPool, device: sa.Device, name: str) -> None:
        others = dict(pool.attributes)
        for value in (False, True, False):
            setattr(pool.attributes, name, value)
            assert getattr(pool.attributes, name) is value
        assert {**dict(pool.attributes), name: True} == others
        with sa.MemoryPool(device) as another:
            assert getattr(another.attributes, name) is True
        setattr(pool.attributes, name, np.True_)
        assert getattr(pool.attributes, name) is True
        for value in (1, 0, "yes", None):  # type: ignore[assignment]
            with pytest.raises(TypeError, match=name):
                setattr(pool.attributes, name, value)

    @pytest.mark.parametrize(
        ("value", "error"), [(-1, ValueError), (1 << 64, ValueError), (1.0, TypeError), (None, TypeError)]
    )
    def test_release_threshold_that_is_none(self, pool: sa.MemoryPool, value: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="release_threshold"):
            pool.attributes.release_threshold = value
        assert pool.attributes.release_threshold == KEEP

    @pytest.mark.parametrize(
        "name",
        ["reserved_mem_current", "reserved_mem_high", "used_mem_current", "used_mem_high", "location_id", "made_up"],
    )
    def test_what_cannot_be_set(self, pool: sa.MemoryPool, name: str) -> None:
        with pytest.raises(AttributeError):
            setattr(pool.attributes, name, 0)

    def test_of_a_closed_pool(self, device: sa.Device) -> None:
        pool = sa.MemoryPool(device)
        attributes = pool.attributes
        pool.close()
        set_it = functools.partial(setattr, attributes, "release_threshold", 1)
        each_raises(sa.ClosedError, lambda: attributes.release_threshold, set_it, lambda: pool.handle)

    def test_an_old_attribute_that_is_refused_is_an_error(self, faults: Faults, pool: sa.MemoryPool) -> None:
        faults.fail("cuMemPoolGetAttribute", result="CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(sa.InvalidValueError):
            pool.attributes.used_mem_current  # noqa: B018


# The read-only attributes that came with CUDA 13.1 and 13.4: what a driver may answer, and what we say then.
NEWER: dict[str, tuple[int, object]] = {
    "allocation_type": (1, sa.MemAllocationType.PINNED),
    "export_handle_types": (9, POSIX | FABRIC),
    "location_id": (3, 3),
    "location_type": (1, sa.MemLocationType.DEVICE),
    "max_pool_size": (1 << 40, 1 << 40),
    "hw_decompress_enabled": (1, True),
    "locality_domain_id": (2, 2),
}


class TestNewerAttributes:
    @pytest.mark.bindings("13.4")
    @pytest.mark.parametrize("name", NEWER)
    def test_answers_are_typed(self, machine: Any, name: str) -> None:
        pool = _answering(machine, lambda member: (cuda.CUresult.CUDA_SUCCESS, NEWER[name][0]))
        found = getattr(pool.attributes, name)
        assert found == NEWER[name][1] and type(found) is type(NEWER[name][1])

    @pytest.mark.bindings("13.4")
    @pytest.mark.parametrize("name", NEWER)
    def test_a_driver_that_is_too_old(self, machine: Any, name: str) -> None:
        pool = _answering(machine, lambda member: (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, None))
        with pytest.raises(sa.NotSupportedError) as caught:
            getattr(pool.attributes, name)
        major, minor = divmod(machine.cuDriverGetVersion()[1], 1000)
        assert f"{major}.{minor // 10}" in str(caught.value)
        assert ("13.4" if name == "locality_domain_id" else "13.1") in str(caught.value)

    @pytest.mark.bindings("13.4")
    def test_bindings_that_cannot_read_it(self, machine: Any) -> None:
        def refuse(member: Any) -> Any:
            raise TypeError(f"Unsupported attribute: {member.name}")

        pool = _answering(machine, refuse)
        with pytest.raises(sa.NotSupportedError, match="MAX_POOL_SIZE") as caught:
            pool.attributes.max_pool_size  # noqa: B018
        assert f"needs cuda-bindings 13.4.3, found cuda-bindings {BINDINGS_VERSION}" in str(caught.value)

    @pytest.mark.bindings("13.4")
    @pytest.mark.parametrize(
        "location",
        [
            sa.MemLocation(sa.MemLocationType.DEVICE_LOCALITY_DOMAIN, localized=sa.MemLocality(0, 1)),
            sa.MemLocation(sa.MemLocationType.INVISIBLE, -2),
        ],
        ids=str,
    )
    def test_tell_where_a_pool_of_other_code_is(self, machine: Any, location: sa.MemLocation) -> None:
        part = location.localized or sa.MemLocality(location.id, -1)
        told = {"LOCATION_TYPE": location.type, "LOCATION_ID": part.device_id, "ALLOCATION_TYPE": 1}
        told["LOCALITY_DOMAIN_ID"] = part.locality_domain_id
        ours = _answering(
            machine, lambda member: (cuda.CUresult.CUDA_SUCCESS, told[member.name.removeprefix("CU_MEMPOOL_ATTR_")])
        )
        raw = machine.cuMemPoolCreate(sa.MemPoolProps(location=sa.MemLocation.device(0)).to_driver())[1]
        assert sa.MemoryPool.from_handle(raw, owner=None, driver=ours._session.driver).location == location
        assert machine.cuMemPoolDestroy(raw)[0] == cuda.CUresult.CUDA_SUCCESS

    def test_bindings_that_do_not_name_it(self, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
        import streamalloc.core.properties as module

        monkeypatch.setattr(module, "enum_member", lambda enum, name: None)
        with pytest.raises(sa.NotSupportedError) as caught:
            pool.attributes.max_pool_size  # noqa: B018
        assert "cuda-bindings 13.4.3" in str(caught.value) and BINDINGS_VERSION in str(caught.value)


def _answering(machine: Any, answer: Callable[[Any], Any]) -> sa.MemoryPool:
    """A pool of a driver that answers the newer attributes in this way."""

    def attribute(pool: Any, member: Any) -> Any:
        return answer(member) if int(member) > 8 else machine.cuMemPoolGetAttribute(pool, member)

    driver: Any = Replaced(machine, cuMemPoolGetAttribute=attribute)
    return sa.MemoryPool(sa.Device(0, driver=driver))


def test_peaks(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with pool.allocate(20 * MiB, stream):
        with pool.allocate(20 * MiB, stream):
            pass
        assert pool.statistics() == (2 * GROWTH, 2 * GROWTH, 20 * MiB, 40 * MiB)
        pool.reset_peaks()
        assert pool.statistics() == (2 * GROWTH, 2 * GROWTH, 20 * MiB, 20 * MiB)
    stream.synchronize()
    pool.trim()
    assert pool.statistics() == (0, 2 * GROWTH, 0, 20 * MiB)
    pool.reset_peaks()
    assert pool.statistics() == (0, 0, 0, 0)


@pytest.mark.parametrize("how", ["stream", "device", "event"])
def test_which_synchronisations_count(device: sa.Device, stream: sa.Stream, how: str) -> None:
    with sa.MemoryPool(device) as pool:
        pool.allocate(MiB, stream).free()
        event = stream.record()
        assert executed(stream) and pool.statistics().reserved == GROWTH  # asking is none
        {"stream": stream.synchronize, "device": device.synchronize, "event": event.synchronize}[how]()
        assert pool.statistics().reserved == 0


class TestTrim:
    """Warnings are errors here: a trim that warns without a reason fails its test."""

    @pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (GROWTH, 1), (GROWTH + 1, 2), (2 * GROWTH, 2)])
    def test_keeps_whole_steps(self, pool: sa.MemoryPool, stream: sa.Stream, keep: int, left: int) -> None:
        pool.allocate(40 * MiB, stream).free()
        stream.synchronize()
        assert pool.trim(keep) == (2 - left) * GROWTH
        assert pool.statistics().reserved == left * GROWTH

    def test_keeps_what_is_used(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(MiB, stream):
            pool.allocate(100 * MiB, stream).free()
            stream.synchronize()
            assert pool.statistics().reserved == 4 * GROWTH
            assert pool.trim() == 3 * GROWTH

    def test_a_free_that_has_not_run(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        buffer = pool.allocate(40 * MiB, stream)
        gate.hold(stream)
        buffer.free()
        with pytest.warns(sa.PendingFreesWarning, match="^64 MiB beyond") as caught:
            assert pool.trim() == 0
        assert len(caught) == 1 and caught[0].filename == __file__
        gate.open()
        stream.synchronize()
        assert pool.trim() == 2 * GROWTH

    def test_a_free_that_would_not_have_come_back(self, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        with pool.allocate(MiB, stream):
            buffer = pool.allocate(MiB, stream)
            gate.hold(stream)
            buffer.free()
            assert pool.trim() == 0  # the step is in use by the other one
            assert pool.trim(keep=GROWTH) == 0
            gate.open()


class TestClosing:
    def test_live_buffers_stay(self, checker: Any, device: sa.Device, stream: sa.Stream) -> None:
        pool = sa.MemoryPool(device)
        kept, dropped = pool.allocate(64, stream), pool.allocate(64, stream)
        pool.close()
        kept.fill(3)
        target = bytearray(64)
        kept[8:].copy_to(memoryview(target)[8:])
        stream.synchronize()
        assert bytes(target) == bytes(8) + bytes([3]) * 56
        assert kept.owner is pool and kept.location == sa.MemLocation.device(0)
        assert kept.__cuda_array_interface__["shape"] == (64,)
        kept.free()
        del dropped
        assert "pool allocation" not in checker.outstanding()

    def test_gives_the_memory_back(self, device: sa.Device, stream: sa.Stream) -> None:
        before = device.memory_info().free
        pool = sa.MemoryPool(device, release_threshold=KEEP)
        pool.allocate(MiB, stream).free()
        stream.synchronize()
        assert device.memory_info().free == before - GROWTH
        pool.close()
        assert device.memory_info().free == before


class TestNames:
    def test_are_shown(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, name="<kv> cache") as pool:
            assert pool.name == "<kv> cache" and "'<kv> cache'" in repr(pool)
            assert "&lt;kv&gt; cache" in pool._repr_html_()
            with sa.observe(pool) as observer, pool.allocate(512, stream):
                assert "<kv> cache" in str(observer.live[0].source)
        with pytest.raises(sa.ClosedError, match="<kv> cache"):
            pool.allocate(512, stream)
        assert sa.MemoryPool.default(device).name == ""

    def test_in_what_runs_out(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, max_size=1 << 25, name="small") as pool:
            with pytest.raises(sa.OutOfMemoryError, match="pool 'small'") as caught:
                pool.allocate(1 << 30, stream)
            again = pickle.loads(pickle.dumps(caught.value))
            assert again.pool == caught.value.pool == "small" and str(again) == str(caught.value)


# -- when a closed pool is destroyed: not while anything of it is in use or a free has not run -------------------------


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


def destroyed_once_open(traced: Any, device: sa.Device, gate: Gate) -> None:
    """The closed pool is destroyed at a point of work after the gate is opened, and not before."""
    work(session_of(device))
    assert names(traced, DESTROY) == []
    gate.open()
    assert eventually(lambda: work(session_of(device)) and names(traced, DESTROY))


@pytest.mark.parametrize("name", STREAMS)
def test_by_itself_later(traced: Any, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, name: str) -> None:
    """Nobody else synchronises the host with the stream of the free."""
    freeing = STREAMS[name](device, stream)
    buffer = pool.allocate(MiB, freeing)
    with Gate(device) as gate:
        gate.hold(freeing)
        buffer.free()
        pool.close()
        destroyed_once_open(traced, device, gate)


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
        destroyed_once_open(traced, device, gate)


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
