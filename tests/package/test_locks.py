"""Locks, each by an interleaving that goes wrong without it."""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.core.session as sessions_module
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.checker.report import Reports
from streamalloc.checker.wrapper import CheckedDriver
from streamalloc.core import deferred
from streamalloc.core.allocation_hooks import Watching, tap_of, watching_of
from streamalloc.core.deferred import Deferred, DeferredQueue
from streamalloc.core.fence import Fence, all_work, queue_behind, queue_if_allowed, settle
from streamalloc.core.graph import Capture
from streamalloc.core.library_streams import LibraryStream
from streamalloc.core.session import Session, session_of, sessions
from streamalloc.core.stream import DefaultStream, OwnStream
from streamalloc.driver.internal import cuda
from streamalloc.interop import torch as torch_bridge
from streamalloc.interop.bridge import dropped_of
from streamalloc.interop.loans import Lent
from streamalloc.observing import observer as observed
from streamalloc.observing.records import Phase
from streamalloc.pool.cache.state import CacheState
from streamalloc.pool.ending import PoolEnd
from streamalloc.testing import leaks as objects
from streamalloc.testing.leaks import Accounts
from streamalloc.vmm.internal import unwatch_mappings, watch_mappings
from streamalloc.vmm.ownership import Allocations, Node, allocations_of
from streamalloc.vmm.physical_memory import MemorySpec
from tests.interleaving import interleaved
from tests.support import names
from tests.vmm.support import PAGE


def test_a_node_is_released_by_one_of_two_threads() -> None:
    released: list[Node] = []

    class Counted(Node):
        def release(self) -> None:
            released.append(self)
            self.gone = True

    def make() -> Node:
        node = Counted()
        node.allocations = Allocations(Session.of(sd.simulated()))
        return node

    for node in interleaved(Node.attempt, make, Node.attempt, Node.attempt):
        assert released == [node]
        released.clear()


def test_a_primary_context_is_retained_once() -> None:
    def make() -> tuple[Any, Session]:
        driver = sd.traced(sd.simulated())
        return driver, Session.of(driver)

    for driver, session in interleaved(Session.context, make, lambda it: it[1].context(0), lambda it: it[1].context(0)):
        assert [call.name for call in driver.calls].count("cuDevicePrimaryCtxRetain") == 1
        assert session.ordinals == [0]


def test_a_hazard_that_two_threads_deliver_is_kept_once() -> None:
    def make() -> CheckedDriver:
        checked: Any = sd.checked(sd.simulated())
        checked._reports.found += [
            sd.Hazard(kind, "two writes", "order them", 512) for kind in ("race", "leak", "double free")
        ]
        return cast("CheckedDriver", checked)

    kept: list[list[Any]] = []
    guard = threading.Lock()

    def keep(checked: CheckedDriver) -> None:
        fresh = checked._turn.alone(checked._reports.take)
        with guard:
            kept.append(fresh)

    for checked in interleaved(Reports.take, make, keep, keep, at="line"):
        assert sum(map(len, kept)) == len(checked.hazards) == 3
        kept.clear()


class TestWatching:
    """Watchers of allocators, which are added and removed in two threads."""

    class Watcher:
        def wants(self, allocator: object) -> bool:
            return True

    @pytest.fixture
    def world(self) -> Iterator[tuple[Watching, sa.MemoryPool]]:
        device = sa.Device(0, driver=sd.simulated())
        with sa.MemoryPool(device) as pool:
            yield watching_of(session_of(device)), pool

    @pytest.mark.parametrize("function", [Watching.add, Watching.remove, Watching._watch])
    def test_none_is_lost(self, world: tuple[Watching, sa.MemoryPool], function: Any) -> None:
        watching, pool = world
        one: Any = self.Watcher()
        other: Any = self.Watcher()
        first: dict[Any, Callable[[Any], object]] = {
            Watching.add: lambda _: watching.add(one),
            Watching.remove: lambda _: watching.remove(one),
            Watching._watch: lambda _: watching.bound(pool),
        }

        def make() -> None:
            watching.remove(other)
            watching.remove(one)
            if function is not Watching.add:
                watching.add(one)

        left = {other} if function is Watching.remove else {one, other}
        for _ in interleaved(function, make, first[function], lambda _: watching.add(other)):
            tap = tap_of(pool.free_function)
            assert tap is not None and set(tap.watchers) == set(watching.watchers) == left


class TestSessions:
    def test_a_driver_has_one(self) -> None:
        found: list[Session] = []

        def find(driver: Any) -> None:
            found.append(Session.of(driver))

        for driver in interleaved(Session.of, sd.simulated, find, find):
            assert found[0] is found[1] is Session.of(driver)
            found.clear()

    def test_a_driver_gets_another_while_the_collector_clears_one(self) -> None:
        """The collector may let another thread run where it drops an object of the session's cycle."""

        class Dropped:
            def __init__(self, session: Session) -> None:
                self.session = session

            def __del__(self) -> None:
                seen.append(weakref.ref(self, lambda _: found.append(Session.of(driver))))

        seen, found = list[Any](), list[Session]()
        driver: Any = sd.simulated()
        session: Any = Session.of(driver)
        session._state[Dropped] = Dropped(session)
        del session
        gc.collect()
        assert len(found) == 1 and found[0] is Session.of(driver) and sa.Device(0, driver=driver).name

    def test_they_are_listed_while_one_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = sd.simulated(), sd.simulated()
        made: list[Session] = []

        def make() -> None:
            monkeypatch.setattr(sessions_module, "_sessions", weakref.WeakValueDictionary())
            made[:] = [Session.of(first)]

        def make_another(_: None) -> None:
            made.append(Session.of(second))

        listed: Any = weakref.WeakValueDictionary.valuerefs
        for _ in interleaved(listed, make, lambda _: sessions(), make_another):
            assert {*made} == {*sessions()}


class TestEnds:
    """Two threads use, close or adopt one object: each driver call succeeds, and each end is made once."""

    @pytest.fixture
    def device(self) -> sa.Device:
        return sa.Device(0, driver=sd.traced(sd.simulated()))

    @staticmethod
    def use(act: Callable[[Any], object]) -> Callable[[Any], object]:
        """``act``, which may find the object closed."""

        def used(it: Any) -> None:
            with contextlib.suppress(sa.ClosedError):
                act(it)

        return used

    @staticmethod
    def ends(device: sa.Device, *of: str) -> list[int]:
        """How often each of these functions was called. All driver calls must have succeeded."""
        calls: Any = device.driver
        assert [call for call in calls.calls if call.answer[0]] == []
        found = [names(calls).count(name) for name in of]
        calls.calls.clear()
        return found

    @pytest.mark.parametrize(
        ("function", "act", "other"),
        [
            (PoolEnd._attempt, sa.MemoryPool.close, lambda it: it._end.attempt()),
            (sa.MemoryPool._call, sa.MemoryPool.trim, sa.MemoryPool.close),
            (sa.MemoryPool.statistics, sa.MemoryPool.statistics, sa.MemoryPool.close),
        ],
    )
    def test_of_a_pool(self, device: sa.Device, function: Any, act: Any, other: Any) -> None:
        for pool in interleaved(function, lambda: sa.MemoryPool(device), self.use(act), other):
            pool.close()
            device.synchronize()
            assert self.ends(device, "cuMemPoolDestroy") == [1]

    def test_of_a_pool_of_other_code(self, device: sa.Device) -> None:
        def adopt(made: list[Any]) -> None:
            with contextlib.suppress(ValueError):
                made.append(sa.MemoryPool.from_handle(made[0], owner="this", driver=device.driver))

        props = cuda.CUmemPoolProps()
        props.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        adopting = sa.MemoryPool.from_handle.__func__  # type: ignore[attr-defined]
        for made in interleaved(adopting, lambda: [device.driver.cuMemPoolCreate(props)[1]], adopt, adopt, at="line"):
            assert len(made) == 2
            made[1].close()
            assert names(device.driver).count("cuMemPoolDestroy") == 1
            device.driver.calls.clear()  # type: ignore[attr-defined]

    def test_of_a_buffer(self, device: sa.Device) -> None:
        with sa.MemoryPool(device) as pool, device.create_stream() as stream:
            for _ in interleaved(sa.Buffer.close, lambda: pool.allocate(64, stream), sa.Buffer.close, sa.Buffer.close):
                assert self.ends(device, "cuMemFreeAsync") == [1]

    @pytest.mark.parametrize("act", [sa.Graph.instantiate, sa.Graph.close])
    def test_of_a_graph(self, device: sa.Device, act: Any) -> None:
        for graph in interleaved(
            sa.Graph.instantiate, lambda: sa.Graph.create(device), self.use(sa.Graph.instantiate), self.use(act)
        ):
            graph.close()
            made, *ended = self.ends(device, "cuGraphInstantiate", "cuGraphExecDestroy", "cuGraphDestroy")
            assert made <= 1 and ended == [made, 1]


class TestStreams:
    """The answer of :func:`queue_if_allowed` holds to the end of the call, whatever another thread does."""

    class State(NamedTuple):
        stream: sa.Stream
        other: sa.Stream
        entered: contextlib.ExitStack
        found: list[tuple[bool, bool]]
        """Whether the call may queue work, and whether the stream could take it at the end of the call."""

    @staticmethod
    def begin(state: State) -> None:
        state.entered.enter_context(state.stream.capture("relaxed"))

    @staticmethod
    def join(state: State) -> None:
        state.stream.wait(state.other.record())  # which is in a capture

    @staticmethod
    def close(state: State) -> None:
        state.stream.close()

    @pytest.mark.parametrize("act", ["begin", "join", "close"])
    def test_a_call_that_may_queue(self, act: str) -> None:
        device = sa.Device(0, driver=sd.simulated())

        def make() -> TestStreams.State:
            state = self.State(device.create_stream(), device.create_stream(), contextlib.ExitStack(), [])
            if act == "join":
                state.entered.enter_context(state.other.capture("relaxed"))
            return state

        def queue(state: TestStreams.State) -> None:
            found: list[bool] = []
            may = queue_if_allowed(state.stream, lambda: found.append(not state.stream.capturing))
            state.found.append((may, any(found)))

        for state in interleaved(queue, make, queue, getattr(self, act)):
            assert state.found in ([(True, True)], [(False, False)])
            with contextlib.suppress(sa.CudaError):  # a capture that is not joined
                state.entered.close()
            state.stream.close()
            state.other.close()

    def test_a_capture_begins_before_or_after_an_event_of_all_work(self) -> None:
        """The record of such an event would invalidate it."""
        device = sa.Device(0, driver=sd.simulated())

        def make() -> TestStreams.State:
            return self.State(device.create_stream(), device.default_stream, contextlib.ExitStack(), [])

        for state in interleaved(all_work, make, lambda _: all_work(device), self.begin, at="line"):
            assert state.stream.capturing
            state.entered.close()
            state.stream.close()

    def test_two_threads_close_one(self) -> None:
        driver: Any = sd.traced(sd.simulated())
        device = sa.Device(0, driver=driver)
        for _ in interleaved(OwnStream._close, device.create_stream, sa.Stream.close, sa.Stream.close):
            assert names(driver, "cuStreamDestroy") == ["cuStreamDestroy"]
            driver.calls.clear()

    @pytest.mark.parametrize("function", [OwnStream._close, Capture.__enter__])
    def test_one_thread_closes_a_stream_and_one_captures_it(self, function: Any) -> None:
        driver: Any = sd.traced(sd.simulated())
        device = sa.Device(0, driver=driver)

        def capture(stream: sa.Stream) -> None:
            with contextlib.suppress(sa.ClosedError), stream.capture():
                pass

        def close(stream: sa.Stream) -> None:
            with contextlib.suppress(sa.CaptureError):
                stream.close()

        begin, end, destroy = "cuStreamBeginCapture", "cuStreamEndCapture", "cuStreamDestroy"
        acts = (close, capture) if function is OwnStream._close else (capture, close)
        for stream in interleaved(function, device.create_stream, *acts):
            assert names(driver, begin, end, destroy) in ([destroy], [begin, end], [begin, end, destroy])
            stream.close()
            driver.calls.clear()

    def test_no_stream_of_other_code_is_closed_in_a_capture(self) -> None:
        device = sa.Device(0, driver=sd.simulated())

        def make() -> TestStreams.State:
            theirs = device.create_stream()
            ours = sa.Stream.of_handle(device, theirs.handle, theirs)
            return self.State(ours, theirs, contextlib.ExitStack(), [])

        def close(state: TestStreams.State) -> None:
            with contextlib.suppress(sa.CaptureError):
                state.stream.close()

        for state in interleaved(LibraryStream._close, make, close, TestEnds.use(self.begin)):
            assert state.stream._closed is (state.stream._capture is None)
            state.entered.close()

    def test_no_call_is_made_directly_at_any_moment(self) -> None:
        """While a default stream has items to attempt first."""
        stream = sa.Device(0, driver=sd.simulated()).default_stream
        stream._before_work.append(TestDeferred.Item())
        stream._forbid_direct()
        found: list[bool] = []

        def look(_: None) -> None:
            found.append(stream.usable)

        for _ in interleaved(DefaultStream._allow_direct, lambda: None, lambda _: stream._allow_direct(), look):
            assert not found.pop()

    def test_a_finaliser_does_not_wait_for_who_closes_a_stream(self) -> None:
        stream = sa.Device(0, driver=sd.simulated()).create_stream()
        item = TestDeferred.Item()
        queue_behind(stream, item)
        with stream._in_use, ThreadPoolExecutor(1) as other:
            other.submit(settle, stream, item).result(20)
            assert item.attempts == 0
        settle(stream, item)
        assert item.attempts == 1
        stream.close()

    @pytest.mark.parametrize("drop", ["a lent array of no stream", "a batch of Numba's arrays"])
    def test_a_finaliser_of_work_of_all_streams_waits_for_none(self, drop: str) -> None:
        device = sa.Device(0, driver=sd.simulated())
        with device.create_stream() as stream, device.create_stream() as busy, sa.MemoryPool(device) as pool:
            buffer: sa.Buffer | None = pool.allocate(1 << 20, stream)
            assert buffer is not None
            held = [Lent(buffer.view_as(np.uint8), None)] if drop.startswith("a lent") else []
            dropped = held.clear if held else functools.partial(dropped_of(session_of(device)).add, buffer)
            del buffer
            with busy._in_use, ThreadPoolExecutor(1) as other:
                other.submit(dropped).result(20)
            del dropped
            device.synchronize()
            assert pool.statistics().used == 0

    def test_two_threads_ask_whether_work_is_done(self) -> None:
        device = sa.Device(0, driver=sd.simulated())
        session, found = session_of(device), list[bool]()

        def ask(work: Fence) -> None:
            found.append(work.done())

        with device.create_stream():
            for work in interleaved(Fence.done, lambda: Fence(session), ask, ask, at="line"):
                assert any(found) and work.done()
                found.clear()


@pytest.mark.parametrize("function", [watch_mappings, unwatch_mappings])
def test_no_watcher_of_mappings_is_lost(function: Any) -> None:
    session = session_of(sa.Device(0, driver=sd.simulated()))
    allocations = allocations_of(session)
    one: Any = object()
    other: Any = object()

    def make() -> None:
        allocations.watchers = () if function is watch_mappings else (one,)

    left = {one, other} if function is watch_mappings else {other}
    for _ in interleaved(function, make, lambda _: function(session, one), lambda _: watch_mappings(session, other)):
        assert {*allocations.watchers} == left


def test_memory_of_a_mapping_becomes_one_object() -> None:
    found: list[object] = []
    device = sa.Device(0, driver=sd.simulated())

    def adopt(buffer: vmm.GrowableBuffer) -> None:
        found.append(buffer.mappings[0].memory)

    for buffer in interleaved(MemorySpec.object_of, lambda: vmm.GrowableBuffer(device, PAGE, PAGE), adopt, adopt):
        assert found[0] is found[1] is buffer.mappings[0].memory
        found.clear()
        buffer.close()


class TestDeferred:
    class Item(Deferred):
        attempts = 0

        def attempt(self) -> bool:
            self.attempts += 1
            return True

    class Waiting(Deferred):
        """An item whose attempts in vain take until they are told to end."""

        def __init__(self) -> None:
            self.attempts = 0
            self.begun, self.over = threading.Event(), threading.Event()

        def attempt(self) -> bool:
            self.attempts += 1
            self.begun.set()
            assert self.over.wait(20)
            return False

    @pytest.mark.parametrize("function", [DeferredQueue._take, DeferredQueue._let_go])
    def test_each_item_is_attempted_once(self, function: Any) -> None:
        items: list[TestDeferred.Item] = []

        def make() -> DeferredQueue:
            queue = DeferredQueue()
            items[:] = [self.Item(), self.Item()]
            for item in items:
                queue.submit(item)
            return queue

        for queue in interleaved(function, make, DeferredQueue.work, DeferredQueue.work):
            assert [item.attempts for item in items] == [1, 1] and len(queue) == 0

    def test_an_item_that_is_submitted_again_as_it_ends_is_attempted_again(self) -> None:
        def make() -> tuple[DeferredQueue, TestDeferred.Item]:
            queue, item = DeferredQueue(), self.Item()
            queue.submit(item)
            return queue, item

        def submit_again(state: tuple[DeferredQueue, TestDeferred.Item]) -> None:
            state[0].submit(state[1])
            state[0].work()

        for queue, item in interleaved(DeferredQueue._let_go, make, lambda it: it[0].work(), submit_again):
            assert item.attempts == 2 and len(queue) == 0

    @pytest.fixture
    def queue_of_one(self) -> Iterator[Callable[[], tuple[DeferredQueue, Waiting]]]:
        """A function that makes a queue with an item that was attempted once."""
        items: list[TestDeferred.Waiting] = []
        before = {*deferred._unfinished}

        def make() -> tuple[DeferredQueue, TestDeferred.Waiting]:
            queue, item = DeferredQueue(), self.Waiting()
            items.append(item)
            queue.submit(item)
            item.over.set()
            queue.work()
            return queue, item

        yield make
        for item in items:
            item.over.set()
        deferred._unfinished.intersection_update(before)

    def test_a_round_that_begins_late_does_not_hide_items_from_later_ones(self, queue_of_one: Any) -> None:
        def work_often(state: tuple[DeferredQueue, TestDeferred.Waiting]) -> None:
            for _ in range(3):
                state[0].work()

        for queue, item in interleaved(DeferredQueue._round, queue_of_one, lambda it: it[0].work(), work_often):
            before = item.attempts
            queue.work()
            assert item.attempts == before + 1

    def test_a_capture_begins_before_or_after_a_call_that_would_break_it(self) -> None:
        found: list[bool] = []

        def call(queue: DeferredQueue) -> None:
            with queue.beginning:
                if not queue.captures:
                    found.append(bool(queue.captures))

        for queue in interleaved(call, DeferredQueue, call, lambda it: it.begin_capture(it)):
            assert queue.captures and found in ([], [False])
            found.clear()


@pytest.mark.parametrize("first", [observed.Account.begin, observed.Account.end])
@pytest.mark.parametrize("second", [observed.Account.begin, observed.Account.end])
def test_no_phase_is_lost(first: Any, second: Any) -> None:
    account = sa.observe(driver=sd.simulated())._account
    one, other = (Phase(name, None, 0, 0) for name in ("one", "other"))
    ends = {one: first is observed.Account.end, other: second is observed.Account.end}

    def make() -> None:
        account.open = tuple(phase for phase in ends if ends[phase])

    for _ in interleaved(first, make, lambda _: first(account, one), lambda _: second(account, other)):
        assert {*account.open} == {phase for phase in ends if not ends[phase]}


def test_a_free_is_passed_to_the_hook_once() -> None:
    passed: list[Any] = []
    account = sa.observe(driver=sd.simulated(), on_free=passed.append)._account

    def make() -> observed.Account:
        account._unreported.append(Any)  # type: ignore[arg-type]
        return account

    for _ in interleaved(observed.Account.look, make, observed.Account.look, observed.Account.look):
        assert passed == [Any]
        passed.clear()


def test_a_cache_opens_a_stream_once() -> None:
    device = sa.Device(0, driver=sd.simulated())
    opened: list[object] = []

    def open_it(state: tuple[CacheState, sa.Stream]) -> None:
        opened.append(state[0].open(state[1]))

    with sa.MemoryPool(device) as pool, device.create_stream() as stream:
        for state, _ in interleaved(CacheState.open, lambda: (CacheState(pool), stream), open_it, open_it):
            assert opened[0] is opened[1] is state.of(stream)
            opened.clear()


class TestAccounts:
    """The account of the leak check."""

    HANDLE = 7

    def call(self, accounts: Accounts, name: str, handle: int) -> None:
        accounts._observe(name, lambda *_: (0, handle) if name == "cuMemCreate" else (0,), (handle,))

    def test_a_handle_that_two_threads_retain(self) -> None:
        """It has two owners."""

        def retain(accounts: Accounts) -> None:
            self.call(accounts, "cuMemCreate", self.HANDLE)

        def make() -> Accounts:
            return Accounts(sd.simulated())

        for accounts in interleaved(Accounts._observe, make, retain, retain):
            self.call(accounts, "cuMemRelease", self.HANDLE)
            assert [leak.handle for leak in accounts.leaks()] == [self.HANDLE]
            self.call(accounts, "cuMemRelease", self.HANDLE)
            assert accounts.leaks() == []

    def test_leaks_are_read_while_others_come(self) -> None:
        found: list[list[int]] = []

        def make() -> Accounts:
            accounts = Accounts(sd.simulated())
            self.call(accounts, "cuMemCreate", 1)
            return accounts

        for _ in interleaved(
            Accounts.leaks,
            make,
            lambda it: found.append([leak.handle for leak in it.leaks()]),
            lambda it: self.call(it, "cuMemCreate", 2),
        ):
            assert found.pop() in ([1], [1, 2])


@pytest.mark.parametrize("function", [objects._Places.begin, objects._Places.end])
def test_two_threads_watch_for_leaks(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that make objects are recorded from the first watch to the end of the last."""
    original = ipc.Shared.__init__
    monkeypatch.setattr(objects, "_classes", lambda _: ())
    begins = function is objects._Places.begin

    def make() -> Any:
        places = objects._Places()
        if not begins:
            places.begin()
            places.begin()
        return places

    for places in interleaved(function, make, function, function):
        if begins:
            assert len(places._functions) == 2
            places.end()
            assert ipc.Shared.__init__ is not original
            places.end()
        assert ipc.Shared.__init__ is original


def test_segments_of_pytorch_are_compared_with_the_latest_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one lacks a segment that was allocated meanwhile, which would be freed."""
    segments: set[int] = set()
    latest: list[set[int]] = []

    class Ledger:
        ledger = True

        def free_gone(self, there: set[int]) -> int:
            assert not latest or there >= latest[-1]
            latest.append(there)
            return 0

    def snapshot(include_traces: bool) -> list[dict[str, int]]:
        return [{"address": one} for one in segments]

    def allocate(_: None) -> None:
        segments.add(1)
        torch_bridge._return_segments()

    def make() -> None:
        segments.clear()
        latest.clear()

    cuda = SimpleNamespace(memory_snapshot=snapshot)
    monkeypatch.setattr(torch_bridge, "library", lambda _: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch_bridge, "_made", [Ledger()])
    function = torch_bridge._return_segments
    for _ in interleaved(function, make, lambda _: function(), allocate):
        assert latest[-1] == {1}
