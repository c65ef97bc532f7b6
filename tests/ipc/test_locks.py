"""Locks of sharing, each by an interleaving that goes wrong without it. The importer is another simulated machine."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.internal import Deferred, ordered_after, queue_behind, record_uncaptured
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.ipc.exporter.exports import Exports, Hold, Lease, exports_of
from streamalloc.ipc.importer import imported, imports
from streamalloc.ipc.importer.imports import Imports, imports_of
from streamalloc.ipc.ring.producer import ConsumerLink, Deliveries, RingProducer, Slot
from streamalloc.ipc.ring.protocol import SlotMemory
from streamalloc.ipc.store.protocol import Connection, decode, encode
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.wire.control_block import ControlBlock
from streamalloc.vmm.growable import RemappableBuffer
from tests.interleaving import interleaved
from tests.ipc.support import PAGE, again, shared_pool
from tests.support import Replaced, executed, names

pytestmark = pytest.mark.simulated_only("threads of Python are the same on any driver")


class Owner(NamedTuple):
    """The process that shares."""

    device: sa.Device
    stream: sa.Stream
    pool: sa.MemoryPool
    exports: Exports

    def lease(self) -> tuple[Lease, sa.Buffer]:
        """A new buffer and its lease."""
        buffer = self.pool.allocate(64, self.stream)
        return self.exports.lease(buffer), buffer


@pytest.fixture
def owner() -> Iterator[Owner]:
    device = sa.Device(0, driver=sd.simulated())
    session = session_of(device)
    with device.create_stream() as stream, shared_pool(device) as pool:
        yield Owner(device, stream, pool, exports_of(session))


@pytest.fixture
def importer() -> Imports:
    driver = sd.traced(sd.simulated())
    return imports_of(session_of(sa.Device(0, driver=driver)))


ONCE: dict[str, Callable[[Owner, Imports, pytest.MonkeyPatch], tuple[Any, Callable[[], Any], Callable[[Any], Any]]]] = {
    "a lease of a buffer": lambda owner, importer, patch: (
        Exports.lease, lambda: owner.pool.allocate(64, owner.stream), owner.exports.lease,
    ),
    "a handle of a pool": lambda owner, importer, patch: (
        Exports.pool, lambda: shared_pool(owner.device), owner.exports.pool,
    ),
    "a handle server": lambda owner, importer, patch: _one_handle_server(patch),
    "a control block": lambda owner, importer, patch: _one_control_block(owner.exports.block(), importer),
    "the words of a slot": lambda owner, importer, patch: (
        ControlBlock.importer_words, (block := owner.exports.block()).importers.clear,
        lambda _: block.importer_words(1000, 1),
    ),
}  # fmt: skip
"""A function that makes something once, what comes before it, and its call."""


def _one_handle_server(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(handle_server, "_serve", lambda listener: listener.close())
    patch.setattr(handle_server, "_endpoints", {})
    return handle_server.serve, handle_server._endpoints.clear, lambda _: handle_server.serve()


def _one_control_block(block: ControlBlock, importer: Imports) -> Any:
    def attach(_: None) -> object:
        return importer.control_block(block.id, lambda _: ipc.Fd(os.dup(block.fd.fileno())))

    return Imports._once, importer.blocks.clear, attach


@pytest.mark.parametrize("kind", ONCE)
def test_is_made_once(owner: Owner, importer: Imports, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    function, prepare, make = ONCE[kind](owner, importer, monkeypatch)
    found: list[object] = []

    def act(it: Any) -> None:
        found.append(make(it))

    for it in interleaved(function, prepare, act, act):
        assert found[0] == found[1], kind
        found.clear()
        if it is not None:
            it.close()


class TestExporter:
    def test_no_two_announcements_have_one_value(self, owner: Owner) -> None:
        found: list[int] = []

        def announce(it: tuple[Lease, sa.Buffer]) -> None:
            found.append(it[0].announce(owner.stream))

        for lease, _ in interleaved(Lease.announce, owner.lease, announce, announce):
            assert len({*found}) == 2 and lease.words.last_announced == max(found)
            found.clear()

    @pytest.mark.parametrize("end", [Lease.end_if_closed, Lease.end_for_good])
    def test_a_hold_is_not_lost_while_another_ends(self, owner: Owner, end: Callable[..., bool]) -> None:
        hold = Hold()

        def make() -> tuple[Lease, sa.Buffer]:
            lease, buffer = owner.lease()
            lease.add_hold(Hold(lambda: True))
            return lease, buffer

        for lease, _ in interleaved(
            Lease._in_transit, make, lambda it: end(it[0], owner.stream), lambda it: it[0].add_hold(hold)
        ):
            assert lease._in_transit()
            lease._holds.clear()

    def test_a_refused_free_refuses_no_open(self, owner: Owner, importer: Imports) -> None:
        """Another importer opens the memory at any of its lines."""
        drivers: list[Any] = [importer.session.driver, sd.simulated()]
        streams = [sa.Device(0, driver=driver).create_stream() for driver in drivers]

        def open_it(shared: ipc.Shared, which: int) -> Any:
            return ipc.open(bytes(shared), again(shared.fds), stream=streams[which], driver=drivers[which])

        def make() -> tuple[sa.Buffer, ipc.Shared, Any]:
            _, buffer = owner.lease()
            shared = ipc.share(buffer)
            return buffer, shared, open_it(shared, 0)

        def refused(buffer: sa.Buffer) -> None:
            with pytest.raises(sa.StillImportedError):
                buffer.free(still_imported="raise")

        for _, _, opened in interleaved(
            Lease.end_if_closed, make, lambda it: refused(it[0]), lambda it: open_it(it[1], 1).close(), at="line"
        ):
            opened.close()
        for stream in streams:
            stream.close()

    def test_a_free_that_ignores_importers_leaves_descriptors_stale(
        self, owner: Owner, importer: Imports, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also beside one that asks them, and makes descriptors valid again."""
        # An importer opens the memory right after the first look.
        looks = itertools.cycle([True, False])
        monkeypatch.setattr(Lease, "_all_closing", lambda *_: next(looks))
        driver: Any = importer.session.driver
        stream = sa.Device(0, driver=driver).create_stream()
        opened: list[Any] = []

        def make() -> tuple[Lease, sa.Buffer]:
            lease, buffer = owner.lease()
            shared = ipc.share(buffer)
            opened.append(ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver))
            return lease, buffer

        for lease, _ in interleaved(
            Lease._follow_importers,
            make,
            lambda it: it[0].end_if_closed(owner.stream),
            lambda it: it[1].free(still_imported="ignore"),
            at="line",
        ):
            assert lease.words.generation.value != lease.generation
            opened.pop().close()
        opened.pop().close()
        stream.close()

    def test_the_last_slot_goes_to_one(self, owner: Owner) -> None:
        found: list[list[Lease]] = []
        block = owner.exports.block()

        def make() -> None:
            found.clear()
            owner.exports.leaving.clear()
            block.free_slots[:] = [0]

        def take(_: None) -> None:
            found.append(owner.exports._next_free(1))

        for _ in interleaved(Exports._next_free, make, take, take):
            assert found.count([]) == 1


class Imported(NamedTuple):
    """Descriptors of one buffer, and what was opened by them."""

    buffer: sa.Buffer
    shared: ipc.Shared
    opened: list[Any]
    before: int


class TestImporter:
    @pytest.mark.parametrize(
        ("function", "call"),
        [
            (Imports._once, "cuMemPoolImportFromShareableHandle"),
            (imported.ImportedBuffer.__init__, "cuMemPoolImportPointer"),
        ],
    )
    def test_two_open_one(self, owner: Owner, importer: Imports, function: Callable[..., object], call: str) -> None:
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

    def test_no_pool_is_released_while_it_is_opened(self, owner: Owner, importer: Imports) -> None:
        driver: Any = importer.session.driver
        stream = sa.Device(0, driver=driver).create_stream()

        def make() -> Imported:
            buffer = shared_pool(owner.device).allocate(64, owner.stream)
            return Imported(buffer, ipc.share(buffer), [], 0)

        def open_it(it: Imported) -> None:
            it.opened.append(ipc.open(bytes(it.shared), again(it.shared.fds), stream=stream, driver=driver))

        for it in interleaved(Imports._once, make, open_it, lambda _: importer.release_ended()):
            assert {*importer.pools.values()} == {*importer.handles.values()}
            it.opened[0].close()
            it.shared.cancel()
        stream.close()

    def test_one_is_refused_while_another_is_opened(self, owner: Owner) -> None:
        """The free waits for the one, and not for the other."""
        simulated: Any = sd.simulated()
        refused: list[bool] = []

        def import_pointer(*arguments: Any) -> Any:
            if refused:
                refused.pop()
                return cuda.CUresult.CUDA_ERROR_UNKNOWN, None
            return simulated.cuMemPoolImportPointer(*arguments)

        driver: Any = Replaced(simulated, cuMemPoolImportPointer=import_pointer)
        stream = sa.Device(0, driver=driver).create_stream()

        def make() -> tuple[sa.Buffer, ipc.Shared]:
            refused[:] = [True]
            buffer = owner.pool.allocate(64, owner.stream)
            return buffer, ipc.share(buffer)

        def open_it(it: tuple[sa.Buffer, ipc.Shared]) -> None:
            with contextlib.suppress(sa.CudaError):
                ipc.open(bytes(it[1]), again(it[1].fds), stream=stream, driver=driver).close()

        for buffer, _ in interleaved(imported.ImportedBuffer.__init__, make, open_it, open_it):
            assert executed(stream)
            buffer.free(still_imported="raise")
        stream.close()

    def test_closed_objects_of_an_import_leave_no_events(self, owner: Owner, importer: Imports) -> None:
        driver: Any = importer.session.driver
        with sa.Device(0, driver=driver).create_stream() as stream:
            shared = ipc.share(owner.pool.allocate(64, owner.stream))
            opened = [ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver)]
            for _ in range(6):
                ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver).close()
            (used,) = importer.allocations.values()
            assert 1 <= len(used.passed) <= 2
            opened.pop().close()

    def test_two_objects_of_one_import_are_closed(self, owner: Owner, importer: Imports) -> None:
        """The last one ends the import."""
        driver: Any = importer.session.driver
        stream = sa.Device(0, driver=driver).create_stream()

        def make() -> list[Any]:
            buffer = owner.pool.allocate(64, owner.stream)
            shared = ipc.share(buffer)
            return [ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver) for _ in range(2)]

        for _ in interleaved(imports.Import.end_use, make, lambda it: it[0].close(), lambda it: it[1].close()):
            assert importer.allocations == {}
        stream.close()


class TestLeases:
    """Used in two threads: no count is lost."""

    def make(self) -> tuple[Any, imports.LeaseUse]:
        words: Any = SimpleNamespace(exporter_words=SimpleNamespace(generation=SimpleNamespace(value=0)))
        words.opened = SimpleNamespace(value=0)
        self.block: Any = SimpleNamespace(importer_words=lambda slot, importer: words, importer=0)
        self.imports: Any = SimpleNamespace(lock=threading.RLock())
        return words, self.open()

    def open(self) -> imports.LeaseUse:
        use = imports.LeaseUse(self.imports, self.block, 0, 0)
        use.begin()
        return use

    def open_and_close(self, _: object) -> None:
        self.open().take_back()

    def test_one_is_closed(self) -> None:
        for words, _ in interleaved(
            imports.LeaseUse.take_back, self.make, lambda it: it[1].take_back(), lambda it: self.open()
        ):
            assert words.opened.value == 1

    def test_one_is_opened(self) -> None:
        for words, _ in interleaved(imports.LeaseUse.begin, self.make, lambda it: self.open(), self.open_and_close):
            assert words.opened.value == 2


class Owed(Deferred):
    """What a stream owes: an item that uses another stream."""

    def __init__(self, stream: sa.Stream) -> None:
        self._stream = stream

    def attempt(self) -> bool:
        record_uncaptured(self._stream)
        return True


class TestWhatAStreamOwes:
    """It is not attempted under a lock for which a thread waits that has the other stream."""

    def test_while_an_import_ends(self, owner: Owner, importer: Imports) -> None:
        driver: Any = importer.session.driver
        device = sa.Device(0, driver=driver)
        one, other = device.create_stream(), device.create_stream()

        buffers = [owner.pool.allocate(64, owner.stream) for _ in range(2)]

        def open_it(buffer: sa.Buffer, stream: sa.Stream) -> Any:
            shared = ipc.share(buffer)
            return ipc.open(bytes(shared), again(shared.fds), stream=stream, driver=driver)

        def make() -> tuple[Any, Any]:
            return open_it(buffers[0], one), open_it(buffers[1], other)

        def drop(it: tuple[Any, Any]) -> None:
            queue_behind(one, Owed(other))
            ordered_after(other, it[1].close)

        for _ in interleaved(imports.Import._count_down, make, lambda it: it[0].close(), drop):
            assert importer.allocations == {}
        one.close()
        other.close()

    @pytest.mark.parametrize("act", [Lease.announce, Lease.end_for_good])
    def test_while_a_lease_is_used(
        self, owner: Owner, act: Callable[[Lease, sa.Stream], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # An importer has queued its last work.
        monkeypatch.setattr(ControlBlock, "all_closed", lambda *_: False)
        monkeypatch.setattr(Lease, "_using", lambda _: [0])
        monkeypatch.setattr(ControlBlock, "wait_closed", lambda block, stream, *_: stream.checked_raw())
        with owner.device.create_stream() as other:

            def use(it: tuple[Lease, sa.Buffer]) -> None:
                queue_behind(owner.stream, Owed(other))
                ordered_after(other, lambda _: it[0].end_for_good(other))

            for _, buffer in interleaved(act, owner.lease, lambda it: act(it[0], owner.stream), use):
                buffer.free(still_imported="ignore")


class Settling(Deliveries):
    """Deliveries of one slot, which its consumer has released and which is to be sent as well."""

    def __init__(self) -> None:
        nothing: Any = SimpleNamespace(close=lambda: None, send=lambda *_, **__: None, closed=True, _at=0)
        super().__init__(nothing, nothing, nothing, 64, 64)
        words: Any = SimpleNamespace(closing=SimpleNamespace(value=1))
        slot = Slot(0, nothing, theirs=words, value=1)
        self.unsent[slot] = None
        self.consumers[ConsumerLink(nothing, nothing, 0, [], {slot: None})] = None
        self.delivered: list[object] = []

    def _deliver(self, slot: Any) -> None:
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


def _wait(state: Settling) -> None:
    state.take = lambda: state.free[0] if state.free or state.settle() else None  # type: ignore
    RingProducer.next(state.producer(), 1)


def _end(state: Settling) -> None:
    state._end_sent = True
    state.attempt()


class TestRing:
    @pytest.mark.parametrize(
        "first",
        [lambda state: RingProducer.statistics(state.producer()), _wait, lambda state: state.attempt(), _end],
        ids=["statistics", "waiting for a slot", "the end is sent", "the end"],
    )
    def test_a_slot_is_freed_once(self, first: Callable[[Settling], object]) -> None:
        def settle(state: Settling) -> None:
            with state.lock:
                state.settle()

        for state in interleaved(Deliveries.settle, Settling, first, settle):
            assert len(state.free) <= 1

    def test_an_item_is_sent_once(self) -> None:
        def deliver(state: Settling) -> None:
            with state.lock:
                state.deliver_unsent()

        for state in interleaved(Deliveries.deliver_unsent, Settling, _add, deliver):
            assert len(state.delivered) == 1 and not state.unsent

    def test_a_slot_is_taken_once(self) -> None:
        def make() -> Settling:
            state = Settling()
            for index in range(2):
                state.free.append(SimpleNamespace(theirs=None, value=0, index=index))  # type: ignore[arg-type]
            return state

        taken: list[Any] = []

        def take(state: Settling) -> None:
            taken.append(RingProducer.next(state.producer())._slot)

        for _ in interleaved(Deliveries.take, make, take, take):
            assert taken[0] is not taken[1]
            taken.clear()

    def test_an_item_is_handed_off_once(self) -> None:
        refused: list[bool] = []

        class Holder(SimpleNamespace):
            _held, _used = True, 0
            check_usable = SlotMemory.check_usable

        def make() -> tuple[Settling, Any]:
            state = Settling()
            state.unsent.clear()
            lease: Any = SimpleNamespace(announce=lambda *_: None)
            return state, Holder(_slot=Slot(0, lease), index=0)

        def hand_off(it: tuple[Settling, Any]) -> None:
            try:
                it[0].hand_off(it[1])
            except sa.ClosedError:
                refused.append(True)

        for state, _ in interleaved(Deliveries.hand_off, make, hand_off, hand_off):
            assert len(state.delivered) == len(refused) == 1
            refused.clear()


def test_each_request_to_a_store_gets_its_answer() -> None:
    class Answering(SimpleNamespace):
        """A server that answers in the order of the requests."""

        closed = False

        def send(self, data: bytes, handles: object, timeout: float) -> None:
            self.requests.append(data)

        def receive(self, timeout: float) -> tuple[bytes, tuple[()]]:
            return encode({"to": decode(self.requests.pop(0))["number"]}), ()

    found: dict[int, object] = {}

    def make() -> Connection:
        connection = Connection.__new__(Connection)
        connection._channel = Answering(requests=[])  # type: ignore[assignment]
        connection._lock = threading.Lock()
        connection._process = os.getpid()
        return connection

    def ask(number: int) -> Callable[[Connection], None]:
        def act(it: Connection) -> None:
            found[number] = it.ask("fetch", number=number)[0]["to"]

        return act

    for _ in interleaved(Connection.ask, make, ask(1), ask(2)):
        assert found == {1: 1, 2: 2}
        found.clear()


class TestEnds:
    def test_imports_come_while_ended_pools_are_released(self, importer: Imports) -> None:
        held: Any = SimpleNamespace(block=None, from_pool=None)

        def make() -> None:
            importer.handles[1] = imports.PoolImport(importer)
            importer.allocations.clear()
            importer.allocations[b"one", -1] = held

        def open_another(_: None) -> None:
            with importer.lock:
                importer.allocations[b"other", -1] = held

        for _ in interleaved(Imports.release_ended, make, lambda _: importer.release_ended(), open_another):
            assert len(importer.allocations) == 2
        importer.handles.clear()
        importer.allocations.clear()

    def test_a_pool_of_a_handle_is_not_destroyed_while_it_is_used(self, owner: Owner, importer: Imports) -> None:
        """Otherwise the driver refuses to open its memory."""
        driver = importer.session.driver
        with owner.pool.allocate(64, owner.stream) as buffer, contextlib.closing(buffer.handles()) as given:

            def import_it(_: None = None) -> ipc.ImportedPool:
                return ipc.ImportedPool.from_handle(given.fds[0].fileno(), driver=driver)

            def open_it(pool: ipc.ImportedPool) -> None:
                with contextlib.suppress(sa.ClosedError):
                    pool.open(given.data).close()

            def import_and_open(_: None) -> None:
                with import_it() as pool:
                    pool.open(given.data).close()

            function: Any = ipc.ImportedPool.from_handle
            assert list(interleaved(function.__func__, lambda: None, import_and_open, lambda _: import_it().close()))
            assert list(interleaved(ipc.ImportedPool.open, import_it, open_it, ipc.ImportedPool.close))

    def test_a_pool_is_imported_while_its_handle_of_before_is_destroyed(self, owner: Owner, importer: Imports) -> None:
        """The driver returns the same handle until then, and another one afterwards."""
        found: list[imports.PoolImport] = []
        with owner.pool.allocate(64, owner.stream) as buffer, contextlib.closing(buffer.handles()) as given:

            def import_it(_: object = None) -> imports.PoolImport:
                with importer.lock:
                    found.append(importer.import_pool(given.fds[0].fileno()))
                return found[-1]

            def make() -> imports.PoolImport:
                importer.handles.clear()
                old = import_it()
                importer.handles.clear()  # its release is submitted
                return old

            where, driver = owner.device.location.to_driver(), importer.session.driver
            for _ in interleaved(Imports.import_pool, make, import_it, imports.PoolImport.attempt):
                assert not driver.cuMemPoolGetAccess(found[-1]._raw, where)[0]

    def test_a_pool_that_is_imported_anew_is_not_destroyed(self, importer: Imports) -> None:
        """The driver has returned the same handle."""
        destroyed: list[object] = []
        side: Any = SimpleNamespace(lock=importer.lock, handles={})
        side.session = SimpleNamespace(release=lambda it, _: destroyed.append(it))
        done: Any = SimpleNamespace(done=lambda: True)

        def make() -> imports.PoolImport:
            pool = imports.PoolImport(side)
            pool._raw, pool._frees = 1, done
            destroyed.clear()
            side.handles.clear()
            return pool

        def import_again(pool: imports.PoolImport) -> None:
            with side.lock:
                if not destroyed:
                    side.handles[1] = pool

        for _ in interleaved(imports.PoolImport.attempt, make, lambda pool: pool.attempt(), import_again):
            assert bool(destroyed) != bool(side.handles)

    def test_chunks_are_set_by_two_threads(self) -> None:
        device = sa.Device(0, driver=sd.simulated())

        def put(count: int) -> Callable[[imported.ImportedRange], None]:
            return lambda it: it.set_chunks(range(count), lambda _: vmm.PhysicalMemory(device, PAGE), count * PAGE)

        def make() -> imported.ImportedRange:
            it = imported.ImportedRange(device, 4 * PAGE, {device.location: sa.MemAccess.READWRITE}, None, 0)
            put(1)(it)
            return it

        for it in interleaved(RemappableBuffer.set_chunks, make, put(2), put(3), at="line"):
            assert it.nbytes == len(it.mappings) * PAGE == len(it._names) * PAGE
            it.close()
