"""Any sequence of shares, opens, closes and frees of two buffers, with refused calls, compared with a model.

Two importers are other simulated machines of this process. After each step the exporter is at a point of work.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from tests.ipc.support import again, shared_pool
from tests.support import each_raises, end_what_was_dropped, eventually, holds, workout

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import Phase
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

SIZE = 4096
WORKOUT = workout(40, 40, phases=[Phase.generate])
WHICH = some.integers(0, 1)
WHO = some.integers(0, 1)
FAULT = some.sampled_from([0, 0, 0, 1, 2, 3, 4])
"""Which of the next calls is refused; 0: none."""


class Side:
    """A process: its driver, which can be told to refuse a call, and its streams."""

    def __init__(self) -> None:
        self.driver: Any = sd.faulty(sd.simulated(), 1 << 60, result="CUDA_ERROR_UNKNOWN")
        self.device = sa.Device(0, driver=self.driver)
        self.streams = [self.device.create_stream() for _ in range(2)]

    def twice(self, fault: int, act: Callable[[], Any]) -> Any:
        """Do something while one of its calls is refused, and again if that was told."""
        self.driver._target = len(self.driver.seen) + fault if fault else 1 << 60
        failed = len(self.driver.failed)
        try:
            return act()
        except sa.CudaError as error:
            if len(self.driver.failed) == failed:
                raise
            assert error.name == "CUDA_ERROR_UNKNOWN"
        finally:
            self.driver._target = 1 << 60
        return act()


class Shared:
    """A buffer and its model."""

    def __init__(self, buffer: Any, value: int) -> None:
        self.buffer = buffer
        self.value = value
        self.lease: Any = None
        """Set once it is freed, if it was shared."""
        self.freed = False
        """Whether the owner has freed or dropped it; the memory stays while it is open or held."""
        self.held: list[ipc.Shared] = []
        """Descriptors that keep it until they are opened, cancelled or dropped."""
        self.plain: list[ipc.Shared] = []
        """Descriptors that do not."""
        self.arrived: list[ipc.Shared] = []
        """Descriptors that kept it, and were opened."""
        self.opened: list[Any] = []

    @property
    def used(self) -> bool:
        return bool(self.held or self.opened)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.owner = Side()
        self.importers = [Side(), Side()]
        self.pool = shared_pool(self.owner.device)
        self.things: list[Shared | None] = [None] * 2
        self.values = 0
        self.stale: list[ipc.Shared] = []

    def thing(self, which: int) -> Shared:
        found = self.things[which]
        if found is None:
            self.values = self.values % 250 + 1
            buffer = self.pool.allocate(SIZE, self.owner.streams[0])
            buffer.fill(self.values)
            found = self.things[which] = Shared(buffer, self.values)
        return found

    @rule(which=WHICH, hold=some.booleans(), stream=WHO, fault=FAULT)
    def share_one(self, which: int, hold: bool, stream: int, fault: int) -> None:
        self.share(which, hold, stream, fault)

    def share(self, which: int, hold: bool, stream: int, fault: int) -> None:
        thing = self.thing(which)
        if thing.freed:
            return
        self.owner.streams[stream].wait(thing.buffer.stream)
        shared = self.owner.twice(fault, lambda: ipc.share(thing.buffer, self.owner.streams[stream], hold=hold))
        (thing.held if hold else thing.plain).append(shared)

    @rule(which=WHICH, one=some.integers(0, 3), held=some.booleans(), who=WHO, stream=WHO, fault=FAULT)
    def open(self, which: int, one: int, held: bool, who: int, stream: int, fault: int) -> None:
        thing = self.thing(which)
        if not (thing.held if held else thing.plain):
            self.share(which, held, stream, 0)
        descriptors = thing.held if held else thing.plain
        if not descriptors:
            return
        shared = descriptors.pop(one % len(descriptors))
        side = self.importers[who]
        data = bytes(shared)
        fds = again(shared.fds)

        def attempt() -> Any:
            return ipc.open(data, again(fds), stream=side.streams[stream], driver=side.driver, kind=ipc.ImportedBuffer)

        # A process that has it open can open it once more, whatever its owner does.
        here = any(one._session.driver is side.driver for one in thing.opened)
        stale = thing.freed and not (thing.held or held or here)
        try:
            opened = side.twice(0 if held else fault, attempt)
        except sa.StaleDescriptorError:
            assert stale
            return
        finally:
            for fd in fds:
                fd.close()
        assert not stale and holds(opened, thing.value) and not opened.lost
        thing.opened.append(opened)
        (thing.arrived if held else thing.plain).append(shared)
        assert not shared.held

    @rule(which=WHICH, one=some.integers(0, 3), stream=WHO, fault=FAULT, drop=some.booleans())
    def close(self, which: int, one: int, stream: int, fault: int, drop: bool) -> None:
        thing = self.thing(which)
        if not thing.opened:
            return
        opened = thing.opened.pop(one % len(thing.opened))
        side = next(side for side in self.importers if side.driver is opened._session.driver)
        if not drop:
            side.twice(fault, lambda: opened.close(side.streams[stream]))
            opened.close()
        opened = None

    @rule(which=WHICH, policy=some.sampled_from(["raise", "defer", "drop"]), stream=WHO, fault=FAULT)
    def free(self, which: int, policy: str, stream: int, fault: int) -> None:
        thing = self.thing(which)
        if thing.freed:
            return
        on = self.owner.streams[stream]
        lease = thing.buffer.shared
        if policy == "raise" and thing.used:
            with pytest.raises(sa.StillImportedError):
                thing.buffer.free(on, still_imported="raise")
            assert not thing.buffer.freed
            return
        if policy != "drop":
            self.owner.twice(
                fault, lambda: None if thing.buffer.freed else thing.buffer.free(on, still_imported=policy)
            )
            each_raises(sa.ClosedError, thing.buffer.free)
        thing.buffer, thing.lease = None, lease
        thing.freed = True
        gc.collect()

    @rule(which=WHICH, policy=some.sampled_from(["raise", "defer", "drop"]), stream=WHO)
    def free_in_transit(self, which: int, policy: str, stream: int) -> None:
        self.share(which, True, stream, 0)
        self.free(which, policy, stream, 0)

    @rule(which=WHICH, one=some.integers(0, 3), drop=some.booleans())
    def give_up(self, which: int, one: int, drop: bool) -> None:
        thing = self.thing(which)
        if thing.held:
            shared = thing.held.pop(one % len(thing.held))
            if not drop:
                shared.cancel()
                assert not shared.held

    @invariant()
    def memory(self) -> None:
        """The pool has in use what is not freed, and what others have open or is on its way to them."""
        for side in (*self.importers, self.owner):
            side.device.synchronize()
        for which, thing in enumerate(self.things):
            if thing is not None and thing.freed and not thing.used:
                self.things[which] = None
                self.stale += thing.plain[:1]
        count = sum(thing is not None for thing in self.things)
        assert eventually(lambda: self._used() == count * SIZE)
        for thing in self.things:
            if thing is not None and thing.freed and not thing.held:
                assert eventually(self._made_stale(thing))
            for opened in [] if thing is None else thing.opened:
                assert opened.owner_alive and holds(opened, thing.value)  # type: ignore[union-attr]

    def _made_stale(self, thing: Shared) -> Callable[[], bool]:
        def made() -> bool:
            self.owner.device.synchronize()
            return bool(thing.lease.words.generation.value != thing.lease.generation)

        return made

    def _used(self) -> int:
        self.owner.device.synchronize()
        return self.pool.statistics().used

    def teardown(self) -> None:
        for shared in self.stale[:3]:
            with pytest.raises(sa.StaleDescriptorError):
                ipc.open(bytes(shared), again(shared.fds), driver=self.importers[0].driver)
        self.things = []
        gc.collect()
        end_what_was_dropped()
        assert eventually(lambda: self._used() == 0)
        self.pool.close()
        for side in (*self.importers, self.owner):
            for stream in side.streams:
                stream.close()


@pytest.mark.simulated_only("other machines of this process, and refused calls")
@pytest.mark.unchecked("refuses calls")
def test_any_sequence() -> None:
    run_state_machine_as_test(Model, settings=WORKOUT)
