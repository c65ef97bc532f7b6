"""Any sequence of writes and reads of a store, with refused calls and connections that end, compared with a model.

Writers are on one simulated machine of this process, readers on that or on another one. To the server, a client whose
connection ends is one that was killed. Kills of processes are in test_deaths.
"""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue
from streamalloc.testing import Gate
from tests.ipc.support import refusing
from tests.processes import eventually
from tests.support import MiB, end_what_was_dropped, holds, workout

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import Phase
from hypothesis import strategies as some
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

PAGE, LIMIT = 2 * MiB, 14 * MiB
WORKOUT = workout(10, 30, phases=[Phase.generate])
KEY = some.sampled_from("abc")
WHICH = some.integers(0, 5)
FAULT = some.sampled_from([0, 0, 0, *range(1, 16)])
"""Which of the next calls is refused; 0: none."""
SIZE = some.sampled_from([0, 1, 1000, PAGE, 5 * MiB, 9 * MiB])
SIZES = some.none() | some.lists(SIZE, max_size=3)
_names = itertools.count()


STEPS = ["begin", "begin", "allocate", "allocate", "allocate", "tie", "commit", "commit", "abort", "raise", "die"]
reads = precondition(lambda self: bool(self.readers))
holds_some = precondition(lambda self: bool(self.current))


class Tensor(NamedTuple):
    nbytes: int
    value: int


class Epoch:
    """What a writer writes, and readers read."""

    def __init__(self, key: str, replace: bool, used: int) -> None:
        self.key = key
        self.replace = replace
        self.used = used
        self.number = self.nbytes = self.mapped = 0
        self.tensors: dict[str, Tensor] = {}
        self.readers: list[Any] = []

    @property
    def layout(self) -> tuple[int, list[tuple[str, int]]]:
        return self.mapped, [(name, tensor.nbytes) for name, tensor in self.tensors.items()]

    def is_in(self, weights: Any) -> bool:
        return list(weights) == list(self.tensors) and all(
            weights[name].nbytes == tensor.nbytes and holds(weights[name], tensor.value)
            for name, tensor in self.tensors.items()
        )


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Model(RuleBasedStateMachine):
    @initialize(evict=some.booleans())
    def serve(self, evict: bool) -> None:
        self.drivers: list[Any] = [sd.faulty(sd.simulated(), 1 << 60, result="CUDA_ERROR_UNKNOWN") for _ in range(2)]
        self.devices = [sa.Device(0, driver=driver) for driver in self.drivers]
        self.stream = self.devices[0].create_stream()
        self.free = [device.memory_info().free for device in self.devices]
        self.server = ipc.Store.serve(f"model-{os.getpid()}-{next(_names)}", limit=LIMIT, evict=evict)
        self.stores = [ipc.Store(self.server.name, driver=driver) for driver in self.drivers]
        self.evict = evict
        self.evicted = 0
        self.clock = itertools.count(1)
        self.numbers: dict[str, int] = {}
        """The number of each key's last epoch, while the server knows the key."""
        self.current: dict[str, Epoch] = {}
        self.older: list[Epoch] = []
        """Replaced and removed epochs with readers."""
        self.writers: list[tuple[Any, Epoch]] = []
        self.readers: list[tuple[Any, Epoch]] = []
        self.orphans: list[tuple[Any, Epoch]] = []
        """Readers whose connection has ended."""

    @property
    def epochs(self) -> list[Epoch]:
        return [*self.current.values(), *self.older, *(epoch for _, epoch in self.writers)]

    def retire(self, key: str) -> None:
        """Keep the last commit of a key for its readers only."""
        epoch = self.current.pop(key, None)
        if epoch is not None and epoch.readers:
            self.older.append(epoch)

    # -- writers ---------------------------------------------------------------------------------------------

    def begin(self, key: str, replace: bool) -> None:
        error: type[ipc.StoreError] | None = None
        if any(epoch.key == key for _, epoch in self.writers):
            error = ipc.StoreBusyError
        elif key in self.current and not replace:
            error = ipc.StoreKeyError
        if error is not None:
            with pytest.raises(error):
                self.stores[0].write(key, replace=replace)
            return
        writer = self.stores[0].write(key, replace=replace, stream=self.stream)
        self.writers.append((writer, Epoch(key, replace, next(self.clock))))

    @rule(key=KEY, sizes=SIZES, value=some.integers(0, 255), fault=FAULT, held=some.booleans())
    def write(self, key: str, sizes: list[int] | None, value: int, fault: int, held: bool) -> None:
        """Begin, allocate and commit, unless somebody else writes; without sizes, those of the last commit."""
        count = len(self.writers)
        if sizes is None and key in self.current:
            sizes = [tensor.nbytes for name, tensor in self.current[key].tensors.items() if name[0] == "t"]
        self.begin(key, True)
        if len(self.writers) > count:
            for nbytes in sizes or [PAGE]:
                self.allocate(count, nbytes, value, fault)
            self.commit(count, fault, held)

    @rule(key=KEY, replace=some.booleans(), which=WHICH, nbytes=SIZE, fault=FAULT, how=some.sampled_from(STEPS))
    def step_of_a_writer(self, key: str, replace: bool, which: int, nbytes: int, fault: int, how: str) -> None:
        """Several keys are written at once; with more steps of the sorts that lead on."""
        if how == "begin" or not self.writers:
            self.begin(key, replace)
        elif how == "allocate":
            self.allocate(which, nbytes, nbytes % 255 + which, fault)
        elif how == "tie":
            self.tie(which, "xy"[replace])
        elif how == "commit":
            self.commit(which, fault, replace)
        else:
            self.give_up(which, how, fault)

    def allocate(self, which: int, nbytes: int, value: int, fault: int) -> None:
        writer, epoch = self.writers[which % len(self.writers)]
        name = f"t{len(epoch.tensors)}"
        offset = -(-epoch.nbytes // 512) * 512
        missing = offset + nbytes - epoch.mapped
        more = pages(max(missing, epoch.mapped // 8)) if missing > 0 else 0
        if more and not self.has_room(more):
            with pytest.raises(ipc.StoreFullError):
                writer.allocate(name, nbytes, np.uint8)
            return
        if refusing(self.drivers[0], fault, lambda: writer.allocate(name, nbytes, np.uint8)) is None:
            assert name not in writer and self.listed() == self.expected()
            writer.allocate(name, nbytes, np.uint8)
        writer[name].fill(value)
        epoch.nbytes, epoch.mapped = offset + nbytes, epoch.mapped + more
        epoch.tensors[name] = Tensor(nbytes, value)

    def has_room(self, more: int) -> bool:
        """Whether so many bytes can be reserved, after keys were evicted for that."""
        held = sum(epoch.mapped for epoch in self.epochs)
        busy = {epoch.key for epoch in self.older} | {epoch.key for _, epoch in self.writers}
        idle = [epoch for key, epoch in self.current.items() if key not in busy and not epoch.readers]
        if self.evict and held + more - sum(epoch.mapped for epoch in idle) <= LIMIT:
            for epoch in sorted(idle, key=lambda one: one.used):
                if held + more > LIMIT:
                    held -= epoch.mapped
                    self.evicted += 1
                    self.retire(epoch.key)
        return held + more <= LIMIT

    def tie(self, which: int, name: str) -> None:
        writer, epoch = self.writers[which % len(self.writers)]
        if "t0" in epoch.tensors and name not in epoch.tensors:
            writer.tie(name, "t0")
            epoch.tensors[name] = epoch.tensors["t0"]
        elif "t0" in epoch.tensors:
            with pytest.raises(ValueError, match="whose name exists"):
                writer.tie(name, "t0")

    def commit(self, which: int, fault: int, held: bool) -> None:
        """With copies queued or without. An epoch without tensors has one page."""
        writer, epoch = self.writers[which % len(self.writers)]
        full = not epoch.mapped and not self.has_room(PAGE)
        self.writers.remove((writer, epoch))
        if full:
            with pytest.raises(ipc.StoreFullError), writer:
                pass
            return
        with Gate(self.devices[0]) as gate:
            if held and epoch.tensors:
                gate.hold(self.stream)
                for name, tensor in epoch.tensors.items():
                    writer[name].fill(tensor.value)
            done = refusing(self.drivers[0], fault, lambda: writer.commit() or True)
            if not writer.epoch:
                writer.commit()
            elif done is None:  # committed, and then the release was refused
                writer._release(())
            gate.open()
        self.retire(epoch.key)
        epoch.mapped = max(epoch.mapped, PAGE)
        epoch.number = self.numbers[epoch.key] = self.numbers.get(epoch.key, 0) + 1
        assert writer.epoch == epoch.number and writer.closed
        self.stream.synchronize()
        assert eventually(lambda: deferred_queue(self.stream._session).work() >= 0 and writer.range.closed)
        epoch.used = next(self.clock)
        self.current[epoch.key] = epoch

    def give_up(self, which: int, how: str, fault: int) -> None:
        writer, _ = self.writers.pop(which % len(self.writers))
        if how == "raise":
            with pytest.raises(ZeroDivisionError), writer:
                self.drivers[0]._target = len(self.drivers[0].seen) + fault if fault else 1 << 60
                raise ZeroDivisionError
            self.drivers[0]._target = 1 << 60
        elif how == "abort":
            writer.abort()
            writer.abort()
        else:
            writer._connection.close()
        if not writer.range.closed:
            writer._release(())
        with pytest.raises(sa.ClosedError):
            writer.allocate("more", 1, np.uint8)

    # -- readers ---------------------------------------------------------------------------------------------

    @holds_some
    @rule(which=WHICH, where=some.integers(0, 9), fault=FAULT)
    def open_or_remove(self, which: int, where: int, fault: int) -> None:
        if where == 9:
            self.remove(which)
        else:
            self.open(which, where % 2, fault)

    def open(self, which: int, where: int, fault: int) -> None:
        store, key = self.stores[where], sorted(self.current)[which % len(self.current)]
        weights = refusing(self.drivers[where], fault, lambda: store.open(key))
        if weights is None:
            weights = store.open(key)
        epoch = self.current[key]
        assert weights.epoch == epoch.number and weights.nbytes == epoch.mapped
        assert epoch.is_in(weights)
        epoch.readers.append(weights)
        epoch.used = next(self.clock)
        self.readers.append((weights, epoch))

    @reads
    @rule(which=WHICH, how=some.sampled_from(["detach", "attach", "attach", "close", "die"]), fault=FAULT)
    def step_of_a_reader(self, which: int, how: str, fault: int) -> None:
        if how in ("detach", "attach"):
            self.detach_and_attach(which, how == "attach", fault)
        else:
            self.end(which, how, fault)

    def detach_and_attach(self, which: int, latest: bool, fault: int) -> None:
        weights, epoch = self.readers[which % len(self.readers)]
        driver, newer = weights.device.driver, self.current.get(epoch.key)
        address = weights.address
        if not latest:
            refusing(driver, fault, weights.detach)
            weights.detach()
            refusing(driver, fault, weights.attach)
            weights.attach()
        elif newer is None or newer.layout != epoch.layout:
            with pytest.raises((ipc.StoreKeyError, ipc.LayoutChangedError)):
                weights.attach(latest=True)
        else:
            if refusing(driver, fault, lambda: weights.attach(latest=True) or True) is None:
                assert weights.epoch == epoch.number and weights.attached and epoch.is_in(weights)
                weights.attach(latest=True)
            self.readers.remove((weights, epoch))
            self.readers.append((weights, newer))
            self.leave(weights, epoch)
            newer.readers.append(weights)
            newer.used = next(self.clock)
            epoch = newer
        assert weights.address == address and weights.attached and epoch.is_in(weights)

    def leave(self, weights: Any, epoch: Epoch) -> None:
        """The server sees that a reader has ended."""
        epoch.readers.remove(weights)
        epoch.used = next(self.clock)
        if epoch in self.older and not epoch.readers:
            self.older.remove(epoch)

    def end(self, which: int, how: str, fault: int) -> None:
        weights, epoch = self.readers.pop(which % len(self.readers))
        if how == "close":
            refusing(weights.device.driver, fault, weights.close)
            weights.close()
        else:
            weights._epoch.connection.close()
            assert not weights.server_alive
            self.orphans.append((weights, epoch))
        self.leave(weights, epoch)

    def remove(self, which: int) -> None:
        key = sorted(self.current)[which % len(self.current)]
        self.stores[0].remove(key)
        self.retire(key)
        for use in (self.stores[0].remove, self.stores[1].open):
            with pytest.raises(ipc.StoreKeyError, match="holds nothing"):
                use(key)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert eventually(lambda: self.listed() == self.expected()), (self.listed(), self.expected())
        for weights, epoch in [*self.readers, *self.orphans][-3:]:
            assert epoch.is_in(weights)

    def listed(self) -> dict[str, Any]:
        found = {
            entry.key: (entry.epoch if entry.layout else 0, entry.tensors, entry.nbytes, len(entry.readers),
                        [(number, len(pids)) for number, _, pids in entry.older], entry.writer, entry.awaited)
            for entry in self.stores[1].list()
        }  # fmt: skip
        return found | {"": self.server._holdings.evicted}

    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = {"": self.evicted}
        for key in {epoch.key for epoch in self.epochs}:
            current = self.current.get(key)
            last = (0, 0, 0) if current is None else (current.number, len(current.tensors), len(current.readers))
            nbytes = sum(epoch.mapped for epoch in self.epochs if epoch.key == key)
            older = [(epoch.number, len(epoch.readers)) for epoch in self.older if epoch.key == key]
            writer = os.getpid() if any(epoch.key == key for _, epoch in self.writers) else None
            found[key] = (*last[:2], nbytes, last[2], older, writer, False)
        for key in [*self.numbers]:
            if key not in found and not any(key == lost for lost in self.server.lost):
                del self.numbers[key]  # a key without epochs is forgotten
        return found

    def teardown(self) -> None:
        with self.server:  # whose thread would keep this process alive
            for weights, _ in [*self.readers, *self.orphans]:
                weights.close()
            for writer, _ in self.writers:
                writer.abort()
            for key in self.current:
                self.stores[0].remove(key)
            assert eventually(lambda: self.stores[0].statistics().nbytes == 0)
        self.stream.close()
        self.readers.clear()
        gc.collect()
        end_what_was_dropped()
        assert eventually(lambda: [device.memory_info().free for device in self.devices] == self.free)


@pytest.mark.simulated_only("other machines of this process, and refused calls")
@pytest.mark.unchecked("refuses calls")
def test_any_sequence() -> None:
    run_state_machine_as_test(Model, settings=WORKOUT)
