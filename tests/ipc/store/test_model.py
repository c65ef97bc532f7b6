"""Any sequence of writes and reads of a store, with refused calls and connections that end, compared with a model.

Writers are on one simulated machine of this process, readers on that or on another one. To the server, a client whose
connection ends is one that was killed. Kills of processes are in test_deaths.
"""

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
from tests.support import MiB, each_raises, end_what_was_dropped, eventually, holds, workout

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


STEPS = [
    "begin", "begin", "like", "allocate", "allocate", "allocate", "tie", "commit", "commit", "abort", "raise", "die",
]  # fmt: skip
reads = precondition(lambda self: bool(self.readers))
holds_some = precondition(lambda self: bool(self.current))


class Tensor(NamedTuple):
    nbytes: int
    value: int
    offset: int


class Epoch:
    """What a writer writes, and readers read."""

    def __init__(self, key: str, replace: bool, used: int) -> None:
        self.key = key
        self.replace = replace
        self.used = used
        self.number = self.nbytes = 0
        self.chunks: list[int] = []
        self.like = False
        self.reused = False
        """Whether a later epoch got the memory."""
        self.tensors: dict[str, Tensor] = {}
        self.readers: list[Any] = []

    @property
    def mapped(self) -> int:
        return sum(self.chunks)

    @property
    def layout(self) -> tuple[list[int], list[tuple[str, int, int]]]:
        return self.chunks, [(name, tensor.nbytes, tensor.offset) for name, tensor in self.tensors.items()]

    def is_in(self, weights: Any) -> bool:
        return list(weights) == list(self.tensors) and all(
            (weights.layout[name].offset, weights[name].nbytes) == (tensor.offset, tensor.nbytes)
            and holds(weights[name], tensor.value)
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
        self.recycles: dict[str, bool] = {}
        """Whether the last commit of a key was like the one before."""
        self.spares: dict[str, Epoch] = {}
        """Epochs that nobody has, kept for the next ones like them."""
        self.older: list[Epoch] = []
        """Replaced and removed epochs with readers."""
        self.writers: list[tuple[Any, Epoch]] = []
        self.readers: list[tuple[Any, Epoch]] = []
        self.orphans: list[tuple[Any, Epoch]] = []
        """Readers whose connection has ended."""

    @property
    def epochs(self) -> list[Epoch]:
        return [*self.current.values(), *self.older, *self.spares.values(), *(epoch for _, epoch in self.writers)]

    def retire(self, key: str) -> None:
        """Keep the last commit of a key, which is removed, for its readers only."""
        epoch = self.current.pop(key)
        self.spares.pop(key, None)
        if epoch.readers:
            self.older.append(epoch)

    def unused(self, epoch: Epoch) -> None:
        """Keep the memory of a replaced epoch if the next one can have it."""
        current = self.current.get(epoch.key)
        if current is not None and self.recycles[epoch.key] and epoch.chunks == current.chunks:
            self.spares.setdefault(epoch.key, epoch)

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

    def begin_like(self, key: str, value: int, fault: int) -> None:
        """Begin an epoch like the last one, and fill it."""
        error = ipc.StoreKeyError if key not in self.current else ipc.StoreBusyError
        if key not in self.current or any(epoch.key == key for _, epoch in self.writers):
            with pytest.raises(error):
                self.stores[0].write(key, like="previous")
            return

        def write() -> Any:
            return self.stores[0].write(key, like="previous", stream=self.stream)

        for refused in (fault, 0):
            spare, before = self.spares.pop(key, None), self.current[key]
            epoch = Epoch(key, True, next(self.clock))
            epoch.like = True
            self.writers.append((None, epoch))
            if spare is not None:
                spare.reused = True
                epoch.chunks = spare.chunks
            while len(epoch.chunks) < len(before.chunks):
                more = before.chunks[len(epoch.chunks)]
                if not self.has_room(more):
                    self.writers.pop()
                    with pytest.raises(ipc.StoreFullError):
                        refusing(self.drivers[0], refused, write)
                        write()  # unless another call was refused before
                    return
                epoch.chunks = [*epoch.chunks, more]
            created = self.drivers[0].seen.count("cuMemCreate")
            writer = refusing(self.drivers[0], refused, write)
            self.writers.pop()
            if writer is None:
                assert eventually(lambda: self.listed().get(key, (None,) * 6)[5] is None)  # its writer has ended
                if spare is not None and self.listed()[key][7]:  # the call was refused before the store was asked
                    self.spares[key], spare.reused = spare, False
                continue
            assert self.drivers[0].seen.count("cuMemCreate") - created == (0 if spare else len(epoch.chunks))
            self.writers.append((writer, epoch))
            assert writer.names == tuple(before.tensors) and writer.nbytes == before.mapped
            epoch.nbytes = epoch.mapped
            for name, tensor in before.tensors.items():
                writer[name].fill(value)
                epoch.tensors[name] = tensor._replace(value=value)
            return

    @rule(key=KEY, value=some.integers(0, 255), fault=FAULT, held=some.booleans(), more=SIZES)
    def write_like(self, key: str, value: int, fault: int, held: bool, more: list[int] | None) -> None:
        """Begin like the last epoch, perhaps allocate more, and commit."""
        count = len(self.writers)
        self.begin_like(key, value, fault)
        if len(self.writers) > count:
            if more and held:
                self.allocate_all(count, more, value, fault)
            self.commit(count, fault, held)

    @rule(key=KEY, sizes=SIZES, value=some.integers(0, 255), fault=FAULT, held=some.booleans(), bulk=some.booleans())
    def write(self, key: str, sizes: list[int] | None, value: int, fault: int, held: bool, bulk: bool) -> None:
        """Begin, allocate and commit, unless somebody else writes; without sizes, those of the last commit."""
        count = len(self.writers)
        if sizes is None and key in self.current:
            sizes = [tensor.nbytes for name, tensor in self.current[key].tensors.items() if name[0] == "t"]
        self.begin(key, True)
        if len(self.writers) > count:
            for some_sizes in [sizes or [PAGE]] if bulk else [[nbytes] for nbytes in sizes or [PAGE]]:
                self.allocate_all(count, some_sizes, value, fault)
            self.commit(count, fault, held)

    @rule(key=KEY, replace=some.booleans(), which=WHICH, nbytes=SIZE, fault=FAULT, how=some.sampled_from(STEPS))
    def step_of_a_writer(self, key: str, replace: bool, which: int, nbytes: int, fault: int, how: str) -> None:
        """Several keys are written at once; with more steps of the sorts that lead on."""
        if how == "begin" or not self.writers:
            self.begin(key, replace)
        elif how == "like":
            self.begin_like(key, nbytes % 251, fault)
        elif how == "allocate":
            self.allocate_all(which, [nbytes], nbytes % 255 + which, fault)
        elif how == "tie":
            self.tie(which, "xy"[replace])
        elif how == "commit":
            self.commit(which, fault, replace)
        else:
            self.give_up(which, how, fault)

    def allocate_all(self, which: int, sizes: list[int], value: int, fault: int) -> None:
        """One tensor by ``allocate``, several by ``allocate_all``: all or none of them."""
        writer, epoch = self.writers[which % len(self.writers)]
        tensors: dict[str, Tensor] = {}
        start = end = -(-epoch.nbytes // 512) * 512
        for nbytes in sizes:
            offset = -(-end // 512) * 512
            tensors[f"t{len(epoch.tensors) + len(tensors)}"] = Tensor(nbytes, value, offset)
            end = offset + nbytes

        def allocate() -> bool:
            if len(sizes) == 1:
                writer.allocate(next(iter(tensors)), sizes[0], np.uint8)
            else:
                writer.allocate_all({name: (tensor.nbytes, np.uint8) for name, tensor in tensors.items()})
            return True

        missing = end - epoch.mapped
        more = pages(max(missing, epoch.mapped // 8)) if missing > 0 else 0
        if more and not self.has_room(more):
            each_raises(ipc.StoreFullError, allocate)
            return
        if refusing(self.drivers[0], fault, allocate) is None:
            assert not tensors.keys() & writer.keys() and self.listed() == self.expected()
            allocate()
        for name in tensors:
            writer[name].fill(value)
        epoch.nbytes, epoch.chunks = max(start, end), epoch.chunks + [more] * bool(more)
        epoch.tensors |= tensors

    def has_room(self, more: int) -> bool:
        """Whether so many bytes can be reserved, after keys were evicted for that."""
        held = sum(epoch.mapped for epoch in self.epochs)
        if held + more > LIMIT:
            held -= sum(epoch.mapped for epoch in self.spares.values())
            self.spares.clear()
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
        epoch.chunks = epoch.chunks or [PAGE]
        epoch.number = self.numbers[epoch.key] = self.numbers.get(epoch.key, 0) + 1
        assert writer.epoch == epoch.number and writer.closed
        self.stream.synchronize()
        assert eventually(lambda: deferred_queue(self.stream._session).work() >= 0 and writer.range.closed)
        epoch.used = next(self.clock)
        replaced, self.current[epoch.key] = self.current.get(epoch.key), epoch
        self.recycles[epoch.key] = epoch.like
        spare = self.spares.get(epoch.key)
        if spare is not None and not (epoch.like and spare.chunks == epoch.chunks):
            del self.spares[epoch.key]
        if replaced is not None and replaced.readers:
            self.older.append(replaced)
        elif replaced is not None:
            self.unused(replaced)

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
            for view in (one for one in weights.values() if one.nbytes):
                with pytest.raises(sa.ClosedError):
                    view.fill(0)
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
            self.unused(epoch)

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

    @rule()
    def trim(self) -> None:
        """Free what nobody has."""
        assert self.stores[1].trim() == sum(epoch.mapped for epoch in self.spares.values())
        self.spares.clear()

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert eventually(lambda: self.listed() == self.expected()), (self.listed(), self.expected())
        for weights, epoch in [*self.readers, *self.orphans][-3:]:
            assert epoch.is_in(weights) or epoch.reused
            assert not (epoch.reused and weights in epoch.readers)

    def listed(self) -> dict[str, Any]:
        found = {
            entry.key: (entry.epoch if entry.layout else 0, entry.tensors, entry.nbytes, len(entry.readers),
                        [(number, len(pids)) for number, _, pids in entry.older], entry.writer, entry.awaited,
                        entry.spare)
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
            spare = self.spares[key].mapped if key in self.spares else 0
            found[key] = (*last[:2], nbytes, last[2], older, writer, False, spare)
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
