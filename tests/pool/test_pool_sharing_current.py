"""Default and current pools, and who may use a pool's memory."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from tests.support import MiB, Replaced, each_raises, holds, names

READWRITE, NONE, READ = sa.MemAccess.READWRITE, sa.MemAccess.NONE, sa.MemAccess.READ
HOST = sa.MemLocation.host()


@pytest.fixture(autouse=True)
def current_pool_restored(machine: Any) -> Iterator[None]:
    """A test may leave another pool current; a real device outlives it."""
    assert machine.cuInit(0)[0] == cuda.CUresult.CUDA_SUCCESS
    before = machine.cuDeviceGetMemPool(0)[1]
    yield
    machine.cuDeviceSetMemPool(0, before)


class TestDefault:
    def test_is_the_driver_s(self, machine: Any, device: sa.Device) -> None:
        default = sa.MemoryPool.default(device)
        assert default.handle == int(machine.cuDeviceGetDefaultMemPool(0)[1])
        assert not default.owned and default.properties is None
        assert default.location == sa.MemLocation.device(0)

    def test_one_object_while_it_lives(self, device: sa.Device) -> None:
        default = sa.MemoryPool.default(device)
        assert sa.MemoryPool.default(device) is default is sa.MemoryPool.default(sa.MemLocation.device(0))
        assert sa.MemoryPool.current(device) is default

    def test_is_never_destroyed(self, traced: Any, device: sa.Device) -> None:
        default = sa.MemoryPool.default(device)
        default.close()  # others may hold the same object
        assert not default.closed and default.statistics()
        del default
        gc.collect()
        again = sa.MemoryPool.default(device)
        assert not again.closed and again.statistics()
        assert names(traced, "cuMemPoolDestroy") == []

    @pytest.mark.gpus(2)
    def test_each_device_has_its_own(self, device: sa.Device, peer: sa.Device) -> None:
        here, there = sa.MemoryPool.default(device), sa.MemoryPool.default(peer)
        assert here is not there and there.location == sa.MemLocation.device(1)

    @pytest.mark.bindings("13.0")
    @pytest.mark.parametrize("kind", [sa.MemAllocationType.PINNED, sa.MemAllocationType.MANAGED])
    @pytest.mark.parametrize("where", [sa.MemLocation.device(0), HOST, sa.MemLocation.host_numa(0)], ids=str)
    def test_of_every_place_and_kind(self, raw: Any, where: sa.MemLocation, kind: sa.MemAllocationType) -> None:
        driver_kind = raw.CUmemAllocationType(int(kind))
        for ask, theirs in (
            (sa.MemoryPool.default, raw.cuMemGetDefaultMemPool),
            (sa.MemoryPool.current, raw.cuMemGetMemPool),
        ):
            pool = ask(where, kind)
            assert pool.handle == int(theirs(where.to_driver(), driver_kind)[1])
            assert (pool.location, pool.allocation_type, pool.owned) == (where, kind, False)

    @pytest.mark.bindings("13.0")
    def test_managed_memory_without_a_place(self, machine: Any) -> None:
        assert sa.MemoryPool.default(sa.MemLocation.none(), sa.MemAllocationType.MANAGED).handle

    @pytest.mark.parametrize(
        ("where", "says"),
        [
            (sa.MemLocation(sa.MemLocationType.HOST_NUMA_CURRENT), "HOST_NUMA_CURRENT"),
            (sa.MemLocation.none(), "location=NONE"),
            (sa.MemLocation.device(10**6), "id=1000000"),
        ],
    )
    def test_of_no_place(self, machine: Any, where: sa.MemLocation, says: str) -> None:
        for ask in (sa.MemoryPool.default, sa.MemoryPool.current):
            with pytest.raises(ValueError, match=says):
                ask(where)

    @pytest.mark.bindings("13.0")
    def test_of_an_absent_numa_node(self, machine: Any) -> None:
        with pytest.raises(sa.InvalidValueError):
            sa.MemoryPool.default(sa.MemLocation.host_numa(99))


class TestCurrent:
    def test_a_call(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        pool.make_current()
        assert sa.MemoryPool.current(device) is pool
        with sa.allocate(5, stream) as buffer:
            assert buffer.owner is pool and pool.statistics().used == 5
        sa.MemoryPool.default(device).make_current()
        with sa.allocate(5, stream) as buffer:
            assert buffer.owner is sa.MemoryPool.default(device) and pool.statistics().used == 0

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_block_restores(self, device: sa.Device, pool: sa.MemoryPool, fails: bool) -> None:
        before = sa.MemoryPool.current(device)
        with contextlib.suppress(KeyError), pool.make_current() as entered:
            assert entered is pool and sa.MemoryPool.current(device) is pool
            if fails:
                raise KeyError
        assert sa.MemoryPool.current(device) is before

    def test_the_previous_pool_was_closed_meanwhile(self, machine: Any, device: sa.Device, pool: sa.MemoryPool) -> None:
        previous = sa.MemoryPool(device)
        with previous.make_current():
            with pool.make_current():
                previous.close()
            assert sa.MemoryPool.current(device) is sa.MemoryPool.default(device)
        assert int(machine.cuDeviceGetMemPool(0)[1]) == int(machine.cuDeviceGetDefaultMemPool(0)[1])

    def test_closed_inside_its_own_block(self, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool, pool.make_current():
            pool.close()
            assert sa.MemoryPool.current(device) is sa.MemoryPool.default(device)
        assert sa.MemoryPool.current(device) is sa.MemoryPool.default(device)

    def test_dropped_while_it_is_current(self, device: sa.Device, stream: sa.Stream) -> None:
        sa.MemoryPool(device).make_current()
        gc.collect()
        assert sa.MemoryPool.current(device) is sa.MemoryPool.default(device)
        with sa.allocate(64, stream) as buffer:
            assert buffer.address

    def test_set_by_other_code(self, machine: Any, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
        """The pool of other code is there under its handle, and is not ours to destroy."""
        theirs = machine.cuMemPoolCreate(sa.MemPoolProps(location=sa.MemLocation.device(0)).to_driver())[1]
        machine.cuDeviceSetMemPool(0, theirs)
        try:
            found = sa.MemoryPool.current(device)
            assert found.handle == int(theirs) and not found.owned
            with sa.allocate(7, stream) as buffer:
                assert buffer.owner is found and found.statistics().used == 7
                stream.synchronize()
            found.close()
            assert names(traced, "cuMemPoolDestroy") == []
        finally:
            machine.cuDeviceSetMemPool(0, machine.cuDeviceGetDefaultMemPool(0)[1])
            machine.cuMemPoolDestroy(theirs)

    @pytest.mark.gpus(2)
    def test_is_each_device_s_own(self, device: sa.Device, peer: sa.Device, pool: sa.MemoryPool) -> None:
        with pool.make_current():
            assert sa.MemoryPool.current(peer) is sa.MemoryPool.default(peer)

    @pytest.mark.bindings("13.0")
    def test_of_managed_memory(self, machine: Any) -> None:
        kind = sa.MemAllocationType.MANAGED
        before = sa.MemoryPool.current(sa.MemLocation.none(), kind)
        with sa.MemoryPool(sa.MemPoolProps(alloc_type=kind)) as pool, pool.make_current():
            assert sa.MemoryPool.current(sa.MemLocation.none(), kind) is pool
        assert sa.MemoryPool.current(sa.MemLocation.none(), kind) is before


class TestAccess:
    def test_of_the_owner(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        assert pool.access(device) is READWRITE is pool.access(sa.MemLocation.device(0))
        assert pool.access(HOST) is NONE is pool.access(sa.MemLocation.host_numa(0))

    def test_the_owner_s_stays(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        with pytest.raises(sa.InvalidDeviceError, match="owner"):
            pool.set_access(device, NONE)
        pool.set_access(device, READWRITE)
        assert pool.access(device) is READWRITE

    def test_read_only_is_not_supported(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        with pytest.raises(sa.NotSupportedError, match="READWRITE or NONE"):
            pool.set_access(device, READ)

    def test_the_host_cannot_have_device_memory(self, pool: sa.MemoryPool) -> None:
        with pytest.raises(sa.NotSupportedError, match="to the host in host memory only"):
            pool.set_access(HOST, READWRITE)

    @pytest.mark.parametrize("access", [3, "READWRITE", None, True])
    def test_what_is_no_access(self, device: sa.Device, pool: sa.MemoryPool, access: Any) -> None:
        with pytest.raises(TypeError, match="access"):
            pool.set_access(device, access)

    @pytest.mark.parametrize("who", [[0.5], ["a"], [None]])
    def test_what_is_nobody(self, pool: sa.MemoryPool, who: Any) -> None:
        each_raises(TypeError, lambda: pool.set_access(who, READWRITE), lambda: pool.access(who[0]), match="who")

    @pytest.mark.parametrize("where", [HOST, sa.MemLocation.host_numa(0)], ids=str)
    def test_of_a_host_pool(self, device: sa.Device, where: sa.MemLocation) -> None:
        with sa.MemoryPool(where) as pool:
            assert (pool.access(HOST), pool.access(device)) == (READWRITE, NONE)
            pool.set_access(device, READWRITE)
            assert pool.access(device) is READWRITE
            pool.set_access(device, NONE)
            assert pool.access(device) is NONE
            with pytest.raises(sa.NotSupportedError):
                pool.set_access(where, NONE)


@pytest.mark.gpus(2)
class TestPeers:
    def test_grant_and_revoke(self, pool: sa.MemoryPool, peer: sa.Device, stream: sa.Stream) -> None:
        """For all allocations, past and future."""
        assert pool.access(peer) is NONE
        with pool.allocate(MiB, stream) as past, peer.create_stream() as theirs:
            stream.synchronize()
            with pytest.raises(sa.InvalidValueError):
                past.fill(1, theirs)
            pool.set_access(peer, READWRITE)
            assert pool.access(peer) is READWRITE
            with pool.allocate(MiB, stream) as future:
                stream.synchronize()
                for buffer in (past, future):
                    buffer.fill(1, theirs)
                theirs.synchronize()
                assert holds(past, 1) and holds(future, 1)
            pool.set_access(peer, NONE)
            assert pool.access(peer) is NONE
            with pytest.raises(sa.InvalidValueError, match="set_access"):
                past.fill(2, theirs)

    def test_several_at_once(self, device: sa.Device, peer: sa.Device, pool: sa.MemoryPool) -> None:
        pool.set_access([device, peer.location], READWRITE)
        assert pool.access(peer) is READWRITE

    def test_a_list_with_an_absent_device_changes_nothing(self, pool: sa.MemoryPool, peer: sa.Device) -> None:
        with pytest.raises(ValueError, match="id=1000000"):
            pool.set_access([peer, sa.MemLocation.device(10**6)], READWRITE)
        assert pool.access(peer) is NONE

    def test_peer_capability_is_asked_first(self, machine: Any) -> None:
        apart: Any = Replaced(machine, cuDeviceCanAccessPeer=lambda device, other: (cuda.CUresult.CUDA_SUCCESS, 0))
        driver = sd.traced(apart)
        device, peer = sa.Device.all(driver)[:2]
        with sa.MemoryPool(device) as pool:
            with pytest.raises(sa.PeerAccessError, match="device 1 cannot reach the memory of device 0"):
                pool.set_access(peer, READWRITE)
            pool.set_access(device, READWRITE)
            assert names(driver).count("cuMemPoolSetAccess") == 1

    def test_interfaces_say_who_may_use_it(self, pool: sa.MemoryPool, peer: sa.Device) -> None:
        with peer.create_stream() as theirs, pool.allocate(64, theirs) as buffer:
            assert not hasattr(buffer, "__cuda_array_interface__")
            pool.set_access(peer, READWRITE)
            assert buffer.__cuda_array_interface__["data"][0] == buffer.address
