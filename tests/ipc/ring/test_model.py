"""Any sequence of operations on a ring with up to three consumers, with refused calls, compared with a model.

The consumers are other simulated machines of this process. Which calls are refused is drawn, at either end.
"""

import contextlib
import gc
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc import Ring
from tests.ipc.ring.support import settled
from tests.ipc.support import refusing, shared_pool
from tests.processes import SECONDS
from tests.support import each_raises, end_what_was_dropped, eventually, soon, workout

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import Phase
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

SIZE, SLOTS = 1000, 4
WORKOUT = workout(20, 30, phases=[Phase.generate])
WHO = some.integers(0, 2)
FAULT = some.sampled_from([0, 0, 0, 1, 2, 3])
"""Which of the next calls is refused; 0: none."""


class End:
    """A consumer and its model: what it was sent and has not taken, and what it has taken and not released."""

    def __init__(self, consumer: Any, driver: Any) -> None:
        self.consumer = consumer
        self.driver = driver
        self.sent: list[tuple[int, int]] = []
        self.taken: list[tuple[Any, tuple[int, int]]] = []
        self.turn = 0

    @property
    def load(self) -> tuple[int, int]:
        return len(self.sent) + len(self.taken), self.turn


class Model(RuleBasedStateMachine):
    """An item is a value, which its bytes have, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.driver: Any = sd.faulty(sd.simulated(), 1 << 60, result="CUDA_ERROR_UNKNOWN")
        self.stream = sa.Device(0, driver=self.driver).create_stream()
        self.pool = shared_pool(self.stream.device)
        self.ring = Ring.producer(self.pool, SIZE, SLOTS, stream=self.stream)
        self.ends: list[End] = []
        self.unsent: list[tuple[int, int]] = []
        """Items of consumers that had gone before they took them."""
        self.slots: list[tuple[Any, int]] = []
        """Slots that are being filled."""
        self.handed_off = self.redelivered = self.turns = 0
        self.gone: list[Any] = []

    @property
    def free(self) -> int:
        used = len(self.unsent) + len(self.slots) + sum(end.load[0] for end in self.ends)
        return SLOTS - used

    # -- consumers -------------------------------------------------------------------------------------------

    @rule(any_stream=some.booleans())
    def join_one(self, any_stream: bool) -> None:
        self.join(any_stream)

    def join(self, any_stream: bool) -> None:
        if len(self.ends) == 3:
            return
        driver: Any = sd.faulty(sd.simulated(), 1 << 60, result="CUDA_ERROR_UNKNOWN")
        stream = None if any_stream else sa.Device(0, driver=driver).create_stream()
        ours, theirs = ipc.Channel.pair()
        made: list[Any] = []
        with soon(lambda: made.append(Ring.consumer(theirs, stream=stream, timeout=SECONDS, driver=driver)), 0):
            self.ring.add(ours, SECONDS)
        self.ends.append(End(made[0], driver))
        self.deliver()

    def deliver(self) -> None:
        """What waits goes to the consumers, as each has the fewest."""
        while self.unsent and self.ends:
            self.send(self.unsent.pop(0))
            self.redelivered += 1

    def send(self, item: tuple[int, int]) -> None:
        end = min(self.ends, key=lambda end: end.load)
        self.turns += 1
        end.turn = self.turns
        end.sent.append(item)

    @rule(who=WHO, fault=FAULT)
    def take(self, who: int, fault: int) -> None:
        if not self.ends:
            return
        end = self.ends[who % len(self.ends)]
        if not end.sent:
            with pytest.raises(TimeoutError):
                end.consumer.next(0)
            return
        item = refusing(end.driver, fault, lambda: end.consumer.next(SECONDS))
        if item is None:  # the next call takes it
            item = end.consumer.next(SECONDS)
        value, size = end.sent.pop(0)
        found = np.zeros(size, np.uint8)
        item.copy_to(found)
        item.stream.synchronize()
        assert item.nbytes == size and (found == value).all() and not item.lost
        end.taken.append((item, (value, size)))

    @rule(who=WHO, which=some.integers(0, SLOTS), fault=FAULT)
    def release(self, who: int, which: int, fault: int) -> None:
        end = self.ends[who % len(self.ends)] if self.ends else None
        if end is None or not end.taken:
            return
        item, _ = end.taken.pop(which % len(end.taken))
        refusing(end.driver, fault, item.release)
        item.release()  # idempotent, and does what was refused
        with pytest.raises(sa.ClosedError):
            item.fill(0)

    @rule(who=WHO, drop=some.booleans())
    def leave(self, who: int, drop: bool) -> None:
        """What it has taken is gone with it, and what it has not taken goes to others."""
        if who >= len(self.ends):
            return
        end = self.ends.pop(who)
        if drop:
            cycle: list[Any] = [end.consumer, end.taken.copy()]
            cycle.append(cycle)
            end.consumer = None
            end.taken.clear()
            del cycle
            gc.collect()
            end_what_was_dropped()
        else:
            end.consumer.close()
        self.gone.append(end)
        with self.ring._deliveries.lock:
            self.ring._deliveries.drop_gone()
        self.unsent += end.sent
        self.deliver()

    # -- the producer ----------------------------------------------------------------------------------------

    @rule(value=some.integers(0, 255), size=some.integers(0, SIZE), fault=FAULT)
    def put(self, value: int, size: int, fault: int) -> None:
        if not self.ends and value % 2:
            self.join(any_stream=size % 2 == 0)
        error = TimeoutError if self.ends else ipc.PeerGoneError
        if not self.free or not self.ends:
            with pytest.raises(error, match=f"within 0 s: all {SLOTS}" if self.ends else "the ring has no consumer"):
                self.ring.put(bytes([value]) * size, 0)
            return
        before = self.ring.statistics().handed_off
        refusing(self.driver, fault, lambda: self.ring.put(bytes([value]) * size, SECONDS))
        if self.ring.statistics().handed_off == before:  # refused
            self.ring.put(bytes([value]) * size, SECONDS)
        self.handed_off += 1
        self.send((value, size))

    @rule()
    def begin(self) -> None:
        if self.free and self.ends:
            slot = self.ring.next(0)
            self.slots.append((slot, len(self.slots) + 1))
            slot.fill(len(self.slots))

    @rule(which=some.integers(0, SLOTS), how=some.sampled_from(["hand off", "give back", "drop"]))
    def finish(self, which: int, how: str) -> None:
        if not self.slots:
            return
        slot, value = self.slots.pop(which % len(self.slots))
        if how == "hand off" and self.ends:
            slot.hand_off()
            self.handed_off += 1
            self.send((value, SIZE))
        elif how == "hand off":
            each_raises(ipc.PeerGoneError, slot.hand_off)
            slot.give_back()
        elif how == "give back":
            slot.give_back()
        if how != "drop":
            with pytest.raises(sa.ClosedError):
                slot.fill(1)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def counts(self) -> None:
        in_flight = SLOTS - self.free - len(self.slots)
        assert self.ring.statistics() == (self.handed_off, self.redelivered, in_flight, self.free, len(self.ends))
        assert [end.consumer.held for end in self.ends] == [len(end.taken) for end in self.ends]

    def teardown(self) -> None:
        """All that was handed off still arrives, then the end; then nothing is left."""
        self.slots.clear()
        self.ring.close()
        for end in self.ends:
            for item, _ in end.taken:
                item.release()
            assert [item.nbytes for item in end.consumer] == [size for _, size in end.sent]
            with pytest.raises(EOFError):
                end.consumer.next(0)
            end.consumer.close()
        end_what_was_dropped()
        assert eventually(lambda: not settled(self.stream) and self.pool.statistics().used == 0)
        with contextlib.suppress(sa.ClosedError):
            self.pool.close()
        self.stream.close()


@pytest.mark.simulated_only("other machines of this process, and refused calls")
@pytest.mark.unchecked("refuses calls")
def test_any_sequence() -> None:
    run_state_machine_as_test(Model, settings=WORKOUT)
