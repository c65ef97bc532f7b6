"""Calls for one buffer on two threads: one waits for the other, and acts on the state that it left."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.session import session_of
from streamalloc.vmm.claims import Claim, Claimable, claiming
from streamalloc.vmm.steps import EvictSteps, RestoreSteps
from tests.interleaving import interleaved
from tests.processes import in_a_child
from tests.support import KEEP, beside, end_what_was_dropped, filled, in_threads, shows
from tests.vmm.support import HOST, PAGE, READWRITE

SIZE = 5000
"""Bytes of each buffer."""
WAIT = 20.0
"""Seconds after which a thread counts as stuck."""


class Thing(Claimable):
    def __init__(self) -> None:
        self._claim = None

    def use(self, act: Callable[[], object] = lambda: None) -> None:
        claiming((self,), act)


class World:
    """Two groups that share two buffers, of one page each, which may grow by another."""

    def __init__(self, driver: Any, *, asleep: bool) -> None:
        self.device = sa.Device(0, driver=driver)
        self.host = sa.MemoryPool(HOST, release_threshold=KEEP, driver=driver)
        self.host.set_access(self.device, READWRITE)
        self.groups = [vmm.SleepGroup(self.device, backup=self.host) for _ in range(2)]
        self.buffers = [vmm.GrowableBuffer(self.device, 2 * PAGE, SIZE) for _ in range(2)]
        for seed, buffer in enumerate(self.buffers):
            filled(buffer, seed)
            for group in self.groups:
                group.add(buffer, "ab"[seed])
        self.device.synchronize()
        if asleep:
            self.groups[0].sleep()

    def check(self) -> None:
        """All or nothing has happened, no bytes are lost, and nothing stays."""
        for group in self.groups:
            if not group.closed:
                group.wake()
        for seed, buffer in enumerate(self.buffers):
            if buffer.evicted:
                buffer.restore()
            assert buffer.closed or (shows(buffer[:SIZE], seed) and len(buffer.mappings) == -(-buffer.nbytes // PAGE))
            buffer.close()
        end_what_was_dropped()
        self.device.synchronize()
        assert self.host.statistics().used == 0
        for owner in (*self.groups, self.host):
            owner.close()


ACTS: dict[str, Callable[[World], object]] = {
    "sleep": lambda it: it.groups[0].sleep(),
    "wake": lambda it: it.groups[0].wake(),
    "evict": lambda it: it.buffers[1].evict(it.host),
    "restore": lambda it: it.buffers[1].restore(),
    "close": lambda it: it.buffers[1].close(),
    "grow": lambda it: it.buffers[1].resize(2 * PAGE),
    "allow": lambda it: it.buffers[1].set_access(it.device),
    "sleep the other": lambda it: it.groups[1].sleep(),
    "wake the other": lambda it: it.groups[1].wake(),
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "sleep": vmm.SleepGroup._sleep.__wrapped__,  # type: ignore[attr-defined]
    "sleep, claiming": vmm.SleepGroup._claim_and_wait,
    "sleep, copying": EvictSteps.unmap_all,
    "wake": RestoreSteps.map_all,
    "evict": EvictSteps._evictable,
    "restore": RestoreSteps.map_all,
    "grow": vmm.GrowableBuffer._resize,
}
"""Functions that the first call makes, at each line of which the second call begins."""
PAIRS = {
    "sleep": ("evict", "close", "sleep the other"),
    "sleep, claiming": ("evict", "close", "sleep the other"),
    "sleep, copying": ("grow",),
    "wake": ("restore", "close", "wake the other"),
    "evict": ("sleep",),
    "restore": ("wake", "close"),
    "grow": ("sleep", "close", "allow"),
}


@pytest.mark.simulated_only("an interleaving is the same on any driver")
@pytest.mark.parametrize(("first", "second"), [(first, second) for first in PAIRS for second in PAIRS[first]])
def test_each_interleaving(first: str, second: str) -> None:
    """The errors are those of a call that comes after the other one."""
    act = first.split(",")[0]
    driver = sd.simulated()

    def make() -> World:
        return World(driver, asleep=act in ("wake", "restore"))

    def expecting(name: str) -> Callable[[World], None]:
        def expect(world: World) -> None:
            with contextlib.suppress(sa.EvictedError, sa.ClosedError if name not in ("sleep", "wake") else KeyError):
                ACTS[name](world)

        return expect

    for world in interleaved(FUNCTIONS[first], make, expecting(act), expecting(second), at="line"):
        world.check()


def test_one_of_two_threads_has_the_claim() -> None:
    found: list[bool] = []

    def take(thing: Thing) -> None:
        found.append(Claim(None, 0).take((thing,), wait=False))

    for _ in interleaved(Claim.take, Thing, take, take):
        assert sorted(found) == [False, True]
        found.clear()


def test_who_waits_for_a_claim_sleeps() -> None:
    thing, waiting, took = Thing(), threading.Event(), list[float]()

    def wait() -> None:
        waiting.set()
        begun = time.thread_time()
        thing.use()
        took.append(time.thread_time() - begun)

    thread = threading.Thread(target=wait)

    def hold() -> None:
        thread.start()
        waiting.wait(WAIT)
        time.sleep(0.2)

    thing.use(hold)
    thread.join(WAIT)
    assert took[0] < 0.05


def test_two_threads_grow_a_buffer() -> None:
    """No growth is lost."""
    device = sa.Device(0, driver=sd.simulated())

    def grow(buffer: vmm.GrowableBuffer) -> None:
        buffer.grow(100)

    function: Any = vmm.GrowableBuffer.grow
    for buffer in interleaved(function.__wrapped__, lambda: vmm.GrowableBuffer(device, 1000, 50), grow, grow):
        assert buffer.nbytes == 250
        buffer.close()


@pytest.mark.simulated_only("an interleaving is the same on any driver")
def test_a_buffer_that_is_put_to_sleep_is_not_removed() -> None:
    driver = sd.simulated()

    def remove(world: World) -> None:
        with contextlib.suppress(sa.EvictedError):
            world.groups[0].remove(world.buffers[1])

    for world in interleaved(
        EvictSteps.unmap_all, lambda: World(driver, asleep=False), ACTS["sleep"], remove, at="line"
    ):
        assert world.buffers[1].evicted == (world.buffers[1] in world.groups[0].buffers)
        world.check()


@pytest.mark.simulated_only("an interleaving is the same on any driver")
@pytest.mark.parametrize("at", [EvictSteps.wait, EvictSteps.copy, EvictSteps.unmap_all])
def test_a_closed_group_takes_no_bytes_of_a_frozen_buffer_that_is_evicted(at: Callable[..., object]) -> None:
    """The backup is the only copy of them."""
    driver = sd.simulated()

    def make() -> World:
        world = World(driver, asleep=False)
        world.groups[0].freeze()
        return world

    for world in interleaved(at, make, ACTS["evict"], lambda it: it.groups[0].close(), at="line"):
        world.check()


def test_a_call_of_a_lower_level_inside_waits_for_none_of_the_higher() -> None:
    """A thread that has an arena would wait for another one by way of a group."""
    one, group, other = Thing(), Thing(), Thing()

    def use_other() -> None:
        with pytest.raises(sa.InUseError, match="call of a hook"):
            claiming((other,), lambda: None, level=1)

    waits = threading.Thread(
        target=lambda: claiming((one,), lambda: claiming((group,), use_other), level=1), daemon=True
    )
    with beside(lambda hold: claiming((other,), hold, level=1)):
        waits.start()
        waits.join(1)
        refused = not waits.is_alive()
    waits.join(WAIT)
    assert refused


class TestHooks:
    """A call out of a hook does not wait for the call that the hook belongs to."""

    @pytest.mark.parametrize("act", ["evict", "close", "grow", "allow", "sleep the other", "wake the other"])
    def test_after_a_wake(self, machine: Any, act: str) -> None:
        world = World(machine, asleep=True)
        world.groups[0].after_wake(lambda _: ACTS[act](world))
        with pytest.raises(sa.InUseError, match="call of a hook"):
            world.groups[0].wake()
        assert all(buffer.evicted for buffer in world.buffers)
        world.groups[0].close()
        world.check()

    def test_before_a_sleep_the_buffers_can_be_changed(self, machine: Any) -> None:
        world = World(machine, asleep=False)
        world.groups[0].before_sleep(lambda _: world.buffers[0].resize(2 * PAGE))
        world.groups[0].before_sleep(lambda _: world.buffers[1].close())
        assert world.groups[0].sleep() == 2 * PAGE
        world.check()

    def test_of_two_groups_that_call_each_other(self, machine: Any) -> None:
        world = World(machine, asleep=False)
        both = threading.Barrier(2)

        def sleep(mine: vmm.SleepGroup, other: vmm.SleepGroup) -> None:
            def hook(_: object) -> None:
                both.wait(WAIT)
                try:
                    with pytest.raises(sa.InUseError, match="call of a hook"):
                        other.sleep()
                finally:
                    both.wait(WAIT)

            mine.before_sleep(hook)
            mine.sleep()

        one, two = world.groups
        in_threads(lambda: sleep(one, two), lambda: sleep(two, one))
        assert all(buffer.evicted for buffer in world.buffers)
        for group in world.groups:
            group.close()
        world.check()


@pytest.mark.simulated_only("an interleaving is the same on any driver")
def test_a_hook_waits_for_pages() -> None:
    """A call for pages waits for no group, so the wait ends."""
    device = sa.Device(0, driver=sd.simulated())

    def body() -> int:
        one = 1
        return one + 1

    for arena in interleaved(
        body,
        lambda: vmm.PageArena(device),
        lambda it: it._physical.changing(body),
        lambda it: Thing().use(lambda: it._physical.changing(lambda: None)),
    ):
        arena.close()


@pytest.mark.simulated_only("a process with a real driver is not forked")
def test_a_forked_child_waits_for_no_call_of_its_parent() -> None:
    one = Thing()
    with beside(one.use):
        assert in_a_child(one.use) == 0


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("act", [vmm.GrowableBuffer.evict, vmm.GrowableBuffer.close, lambda one: one.resize(3 * PAGE)])
def test_a_handler_does_not_change_a_buffer_that_grows(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Any], None]
) -> None:
    with vmm.GrowableBuffer(sa.Device(0, driver=machine), 4 * PAGE, PAGE) as buffer:
        session = session_of(buffer)
        call, refused = getattr(session.driver, name), []

        def interrupted(*args: Any) -> Any:
            answer = call(*args)
            try:
                act(buffer)
            except sa.InUseError as error:
                refused.append(error)
            return answer

        with monkeypatch.context() as patch:
            for caller in (session, session.driver):
                if hasattr(caller, name):  # a session binds the functions of direct calls
                    patch.setattr(caller, name, interrupted)
            buffer.resize(2 * PAGE)
        assert len(refused) == 1
        filled(buffer, 1)
        assert shows(buffer, 1)
        assert [one.nbytes for one in buffer.mappings] == [PAGE, PAGE]


def test_a_buffer_that_was_removed_before_the_group_sleeps_stays_awake(machine: Any) -> None:
    device = sa.Device(0, driver=machine)
    with vmm.SleepGroup(device) as group, group.allocate(SIZE) as stays, group.allocate(SIZE) as leaves:
        listed: list[list[vmm.VirtualBuffer]] = []
        group.before_sleep(lambda _: group.remove(leaves))
        group.before_sleep(listed.append)
        assert group.sleep(keep=False) == PAGE
        assert stays.evicted and not leaves.evicted and listed == [[stays, leaves]]
