"""Locks of sharing, each by an interleaving that goes wrong without it. The importer is another simulated machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.buffer import shared_state
from streamalloc.core.internal import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.ipc.exporter import leases
from streamalloc.ipc.exporter.leases import Exports, Hold, Lease, Leases, exports_of, leases_of
from streamalloc.ipc.importer import imported
from streamalloc.ipc.importer.open import Importer, importer_of
from streamalloc.ipc.ring.producer import ConsumerLink, Deliveries, RingProducer
from streamalloc.ipc.transport import handle_server
from streamalloc.vmm.growable import RemappableBuffer
from tests.interleaving import interleaved
from tests.ipc.support import PAGE, shared_pool
from tests.ipc.wire.test_descriptor import again
from tests.support import names

pytestmark = pytest.mark.simulated_only("threads of Python are the same on any driver")


class Owner(NamedTuple):
    """The process that shares."""

    device: sa.Device
    stream: sa.Stream
    pool: sa.MemoryPool
    exports: Exports
    leases: Leases

    def lease(self) -> tuple[Lease, sa.Buffer]:
        """A new buffer and its lease."""
        buffer = self.pool.allocate(64, self.stream)
        return self.exports.lease(buffer, cuda.CUdeviceptr(buffer.address)), buffer


@pytest.fixture
def owner() -> Iterator[Owner]:
    device = sa.Device(0, driver=sd.simulated())
    session = session_of(device)
    with device.create_stream() as stream, shared_pool(device) as pool:
        yield Owner(device, stream, pool, exports_of(session), leases_of(session))


@pytest.fixture
def importer() -> Importer:
    driver = sd.traced(sd.simulated())
    return importer_of(session_of(sa.Device(0, driver=driver)))


class TestExporter:
    @pytest.mark.parametrize("function", [Exports.lease, Leases.add])
    def test_a_buffer_gets_one_lease(self, owner: Owner, function: Any) -> None:
        found: list[Lease | None] = []
        route = owner.exports.route(owner.pool)

        def share(buffer: sa.Buffer) -> None:
            pointer = cuda.CUdeviceptr(buffer.address)
            if function is Leases.add:
                found.append(owner.leases.add(buffer, pointer, route))
            else:
                found.append(owner.exports.lease(buffer, pointer))

        for buffer in interleaved(function, lambda: owner.pool.allocate(64, owner.stream), share, share):
            assert {*found} - {None} == {shared_state(buffer)} and (None in found) == (function is Leases.add)
            found.clear()
            buffer.free()

    def test_a_pool_gets_one_route(self, owner: Owner) -> None:
        found: list[object] = []

        def share(pool: sa.MemoryPool) -> None:
            found.append(owner.exports.route(pool))

        for pool in interleaved(Exports.route, lambda: shared_pool(owner.device), share, share):
            assert found[0] is found[1]
            found.clear()
            pool.close()

    def test_one_handle_server_is_started(self, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[bytes] = []

        def serve(_: object) -> bytes:
            started.append(b"endpoint")
            return started[-1]

        monkeypatch.setattr(handle_server, "serve", serve)
        monkeypatch.setattr(leases, "_endpoints", {})

        def make() -> Exports:
            leases._endpoints.clear()
            started.clear()
            return Exports(session_of(owner.device))

        for _ in interleaved(Exports.serve, make, Exports.serve, Exports.serve):
            assert len(started) == 1

    def test_no_two_announcements_have_one_value(self, owner: Owner) -> None:
        found: list[int] = []

        def announce(it: tuple[Lease, sa.Buffer]) -> None:
            found.append(it[0].announce(owner.stream))

        for lease, _ in interleaved(Lease.announce, owner.lease, announce, announce):
            assert len({*found}) == 2 and lease.words.last_announced == max(found)
            found.clear()

    def test_a_hold_is_not_lost_while_another_ends(self, owner: Owner) -> None:
        hold = Hold()

        def make() -> tuple[Lease, sa.Buffer]:
            lease, buffer = owner.lease()
            lease.hold(Hold(), kept=False)  # dropped at once
            return lease, buffer

        for lease, _ in interleaved(
            Lease._in_transit, make, lambda it: it[0].end(owner.stream), lambda it: it[0].hold(hold)
        ):
            assert lease._in_transit()
            lease._holds.clear()

    def test_the_last_slot_goes_to_one(self, owner: Owner) -> None:
        found: list[Lease | None] = []
        slot = (owner.leases.block(), 0)

        def make() -> None:
            found.clear()
            owner.leases.leaving.clear()
            owner.leases._free[:] = [slot]

        def take(_: None) -> None:
            found.append(owner.leases._next_free())

        for _ in interleaved(Leases._next_free, make, take, take):
            assert found.count(None) == 1


class Imported(NamedTuple):
    """Descriptors of one buffer, and what was opened by them."""

    buffer: sa.Buffer
    shared: ipc.Shared
    opened: list[Any]
    before: int


class TestImporter:
    def test_a_control_block_is_attached_once(self, owner: Owner, importer: Importer) -> None:
        block = owner.leases.block()
        found: list[object] = []

        def attach(_: None) -> None:
            found.append(importer.control_block(block.id, lambda _: ipc.Fd(os.dup(block.fd.fileno()))))

        for _ in interleaved(Importer.control_block, lambda: importer.blocks.clear(), attach, attach):
            assert found[0] is found[1] is importer.blocks[block.id]
            found.clear()

    @pytest.mark.parametrize(
        ("function", "call"),
        [
            (Importer.pool, "cuMemPoolImportFromShareableHandle"),
            (imported.open_import, "cuMemPoolImportPointer"),
        ],
    )
    def test_two_open_one_descriptor(
        self, owner: Owner, importer: Importer, function: Callable[..., object], call: str
    ) -> None:
        """The driver imports the pool once, and the allocation."""
        driver: Any = importer.session.driver
        stream = sa.Device(0, driver=driver).create_stream()

        def make() -> Imported:
            pool = shared_pool(owner.device)
            buffer = pool.allocate(64, owner.stream)
            return Imported(buffer, ipc.share(buffer), [], len(names(driver, call)))

        def open_it(it: Imported) -> None:
            it.opened.append(ipc.open(bytes(it.shared), again(it.shared.fds), stream=stream, driver=driver))

        for it in interleaved(function, make, open_it, open_it):
            assert len(names(driver, call)) == it.before + 1
            assert it.opened[0].address == it.opened[1].address
            for one in it.opened:
                one.close()
            it.shared.cancel()
        stream.close()

    def test_two_objects_of_one_import_are_closed(self, owner: Owner, importer: Importer) -> None:
        """The last one ends the import."""
        driver: Any = importer.session.driver
        stream = sa.Device(0, driver=driver).create_stream()

        def make() -> list[Any]:
            buffer = owner.pool.allocate(64, owner.stream)
            shared = ipc.share(buffer)
            return [ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver) for _ in range(2)]

        for _ in interleaved(imported._release, make, lambda it: it[0].close(), lambda it: it[1].close()):
            assert importer.imports == {}
        stream.close()


class Settling(Deliveries):
    """Deliveries of one slot, which the user has returned and which is to be sent as well."""

    def __init__(self) -> None:
        nothing: Any = SimpleNamespace(close=lambda: None, send=lambda *_, **__: None, closed=True)
        super().__init__(nothing, nothing, nothing, 64, 64)
        slot: Any = object()
        self.returned.append(slot)
        self.unsent[slot] = None
        self.consumers[ConsumerLink(nothing, {}, [])] = None
        self.delivered: list[object] = []

    def _deliver(self, slot: Any, holder: Any = None) -> None:
        del self.unsent[slot]
        self.delivered.append(slot)

    def drop_gone(self) -> None:
        self.settle()

    def producer(self) -> Any:
        """A producer as far as its calls use it."""
        return SimpleNamespace(
            _deliveries=self,
            _hello=b"",
            _handles=(),
            _check_open=lambda: None,
            _admitted=lambda *_: next(iter(self.consumers)),
        )


def _add(state: Settling) -> None:
    mine, theirs = ipc.Channel.pair()
    with mine, theirs:
        theirs.send(b"")
        RingProducer.add(state.producer(), mine, 1)


def _end(state: Settling) -> None:
    state._end_sent = True
    state.attempt()


class TestRing:
    @pytest.mark.parametrize(
        "first",
        [
            lambda state: RingProducer.statistics(state.producer()),
            lambda state: RingProducer._wait_for_slot(state.producer(), 1),
            lambda state: state.attempt(),
            _end,
        ],
        ids=["statistics", "waiting for a slot", "the end is sent", "the end"],
    )
    def test_a_slot_is_freed_once(self, first: Callable[[Settling], object]) -> None:
        def settle(state: Settling) -> None:
            with state.lock:
                state.settle()

        for state in interleaved(Deliveries.settle, Settling, first, settle):
            assert len(state.free) <= 1 and not state.returned

    def test_an_item_is_sent_once(self) -> None:
        def deliver(state: Settling) -> None:
            with state.lock:
                state.deliver_unsent()

        for state in interleaved(Deliveries.deliver_unsent, Settling, _add, deliver):
            assert len(state.delivered) == 1 and not state.unsent


class TestEnds:
    def test_imports_come_while_ended_pools_are_released(self, importer: Importer) -> None:
        held: Any = SimpleNamespace(source=SimpleNamespace(block=None))

        def make() -> None:
            importer.handles[1] = imported.PoolHandle(importer.session, importer.handles, importer.lock)
            importer.imports.clear()
            importer.imports[b"one"] = held

        def open_another(_: None) -> None:
            with importer.lock:
                importer.imports[b"other"] = held

        for _ in interleaved(Importer._release_ended, make, lambda _: importer._release_ended(), open_another):
            assert len(importer.imports) == 2
        importer.handles.clear()
        importer.imports.clear()

    def test_a_pool_that_is_imported_anew_is_not_destroyed(self, importer: Importer) -> None:
        """The driver has returned the same handle."""
        destroyed: list[object] = []
        session: Any = SimpleNamespace(release=lambda it, _: destroyed.append(it))
        done: Any = SimpleNamespace(done=lambda: True)

        def make() -> imported.PoolHandle:
            pool = imported.PoolHandle(session, {}, importer.lock)
            pool._raw, pool._frees = 1, done
            destroyed.clear()
            return pool

        def import_again(pool: imported.PoolHandle) -> None:
            with pool.lock:
                if not destroyed:
                    pool.known[1] = pool

        for pool in interleaved(imported.PoolHandle.attempt, make, lambda pool: pool.attempt(), import_again):
            assert bool(destroyed) != bool(pool.known)

    def test_chunks_are_set_by_two_threads(self) -> None:
        device = sa.Device(0, driver=sd.simulated())

        def put(count: int) -> Callable[[imported.ImportedRange], None]:
            return lambda it: it.set_chunks(range(count), lambda _: vmm.PhysicalMemory(device, PAGE), count * PAGE)

        def make() -> imported.ImportedRange:
            it = imported.ImportedRange(device, 4 * PAGE, {device.location: sa.MemAccess.READWRITE}, None, 0)
            put(1)(it)
            return it

        for it in interleaved(RemappableBuffer.set_chunks, make, put(2), put(3)):
            assert it.nbytes == len(it.mappings) * PAGE == len(it._names) * PAGE
            it.close()
