"""Any sequence of sleeps, wakes, evictions and freezes, with calls that the driver refuses, compared with a model."""

import gc
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.testing import Faults
from streamalloc.vmm import virtual_buffer
from streamalloc.vmm.stores import disk, host
from tests.support import Account, end_what_was_dropped, filled, in_a_thread, shows, workout
from tests.vmm.support import HOST, PAGE, READ, READWRITE

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

WORKOUT = workout(60, 20)
SIZES = (PAGE, PAGE + 5000, 3 * PAGE)
NUMBERS = some.integers(0, 2)
FAULTS = some.one_of(
    some.just(()),
    some.lists(some.integers(1, 60).map(lambda number: (number, 1)), min_size=1, max_size=2),
    # A step that fails, and then its undo.
    some.sampled_from(
        [
            (("cuMemUnmap", nth), (undo, at))
            for nth in (2, 3)
            for at in (1, 2, 3)
            for undo in ("cuMemMap", "cuMemSetAccess")
        ]
        + [((step, nth), ("cuMemUnmap", 1)) for step in ("cuMemCreate", "cuMemSetAccess") for nth in (2, 3)]
    ),
)
"""Calls that the driver refuses, each by its name or number, and its count."""
Fault = Sequence[tuple[Any, int]]
TAGS = some.sampled_from([(), ("a",), ("b",)])


class Sleeping(RuleBasedStateMachine):
    """Three buffers of a group, of tags "a", "a" and "b". The model: the pattern of each, None if it is undefined, and
    the numbers of those that are frozen.
    """

    stores: str = "host"

    def __init__(self) -> None:
        super().__init__()
        self.account = Account(sd.simulated())
        self.inner: Any = Faults(self.account.driver)
        self.outer: Any = Faults(self.inner)
        self.device = sa.Device(0, driver=self.outer)
        self.stream = self.device.create_stream()
        self.folder = tempfile.TemporaryDirectory()
        self.host = sa.MemoryPool(HOST, driver=self.outer)
        self.host.set_access(self.device, READWRITE)
        self.store: Any = self.host
        if self.stores == "pinned":
            self.store = vmm.HostTier(self.device)
        if self.stores == "disk":
            self.store = vmm.DiskTier(self.device, self.folder.name, block=1 << 20, threads=2)
        self.group = vmm.SleepGroup(self.device, backup=self.store)
        self.buffers = [vmm.GrowableBuffer(self.device, 4 * PAGE, nbytes, chunk=PAGE) for nbytes in SIZES]
        for buffer, tag in zip(self.buffers, "aab", strict=True):
            self.group.add(buffer, tag)
            # Some have the memory of their pieces as objects.
            assert self.stores == "host" or all(mapping.memory.handle for mapping in buffer.mappings)
        self.patterns: list[int | None] = [None] * 3
        self.frozen: set[int] = set()
        self.seed = 0

    def attempt(self, act: Any, fault: Fault) -> bool:
        """Act with refused calls; whether it has succeeded. One refused call changes nothing."""
        states = [(buffer.evicted, buffer.frozen) for buffer in self.buffers]
        half = self.half_evicted()
        for layer, (call, nth) in zip((self.outer, self.inner), fault, strict=False):
            layer.fail(call, *(() if isinstance(call, int) else (nth,)), result="CUDA_ERROR_UNKNOWN")
        try:
            act()
            done = True
        except sa.CudaError:
            done = False
        failed = [*self.outer.failed, *self.inner.failed]
        self.outer.stop()
        self.inner.stop()
        if "cuCtxPopCurrent" in failed:
            self.account.driver.cuCtxPopCurrent()  # the context is still there
        if not done and len(failed) == 1:
            assert [(buffer.evicted, buffer.frozen) for buffer in self.buffers] == states, failed
            assert self.half_evicted() <= half, failed
        if not done and len(failed) > 1:  # an undo was refused
            self.frozen = {number for number, buffer in enumerate(self.buffers) if buffer.frozen}
            for buffer in self.buffers:
                if not (buffer.evicted or buffer.frozen):
                    buffer.set_access(self.device)
        self.check(done)
        return done

    def half_evicted(self) -> set[int]:
        """The buffers whose memory is mapped again although they count as evicted: the undo was refused as well."""
        return {number for number, one in enumerate(self.buffers) if one.evicted and one.range.mapped_bytes}

    def check(self, done: bool = False) -> None:
        """``done``: a call has succeeded, after which the model is not up to date."""
        self.stream.synchronize()
        place = self.device.location
        for number, (buffer, pattern) in enumerate(zip(self.buffers, self.patterns, strict=True)):
            assert buffer.evicted or pattern is None or shows(buffer, pattern)
            assert done or buffer.frozen == (number in self.frozen)
            assert buffer.rights[place] == (READ if buffer.frozen else READWRITE)
            if buffer._frozen is not None:
                saved = buffer._frozen
                assert saved.stored._present[saved.blocks.start : saved.blocks.stop].all(), "the backup was dropped"
            if not buffer.evicted:
                assert self.account.driver.cuMemGetAccess(place.to_driver(), buffer.address)[1] == buffer.rights[place]

    def numbers(self, tags: tuple[str, ...]) -> list[int]:
        return [number for number, tag in enumerate("aab") if tag in tags or not tags]

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        if self.buffers[number].evicted:
            return
        self.seed += 1
        if number in self.frozen:
            with pytest.raises(sa.CudaError, match="is frozen"):
                filled(self.buffers[number], self.seed, self.stream)
            self.check()
            return
        filled(self.buffers[number], self.seed, self.stream)
        self.stream.synchronize()
        self.patterns[number] = self.seed

    @rule(
        tags=some.sampled_from([(), ("a",), ("b",), ("b", "a")]),
        kept=some.sampled_from([True, False, "a", "b"]),
        fault=FAULTS,
    )
    def sleep(self, tags: tuple[str, ...], kept: bool | str, fault: Fault) -> None:
        going = [number for number in self.numbers(tags) if not self.buffers[number].evicted]
        going = [number for number in going if number not in self.frozen]
        if self.attempt(lambda: self.group.sleep(*tags, keep=kept, stream=self.stream), fault):
            for number in going:
                if kept is not True and "aab"[number] != kept:
                    self.patterns[number] = None

    @rule(tags=TAGS, fault=FAULTS)
    def freeze(self, tags: tuple[str, ...], fault: Fault) -> None:
        new = [number for number in self.numbers(tags) if number not in self.frozen]
        evictions = [self.buffers[number].eviction for number in new]
        if any(one is not None and one.saved is None for one in evictions):
            with pytest.raises(ValueError, match=r"not kept|keeps its memory"):
                self.group.freeze(*tags, stream=self.stream)
        elif self.attempt(lambda: self.group.freeze(*tags, stream=self.stream), fault):
            self.frozen |= {*new}
        self.check()

    @rule(tags=TAGS, fault=FAULTS)
    def thaw(self, tags: tuple[str, ...], fault: Fault) -> None:
        if self.attempt(lambda: self.group.thaw(*tags), fault):
            self.frozen -= {*self.numbers(tags)}
        self.check()

    @rule(pages=some.integers(0, 8), background=some.booleans(), fault=FAULTS)
    def prepare(self, pages: int, background: bool, fault: Fault) -> None:
        if self.stores == "pinned":
            self.attempt(lambda: self.group.prepare(pages * PAGE, background=background).result(20), fault)

    @rule()
    def trim(self) -> None:
        if self.stores == "pinned":
            self.store.trim()

    @rule(tags=TAGS, fault=FAULTS)
    def wake(self, tags: tuple[str, ...], fault: Fault) -> None:
        self.attempt(lambda: self.group.wake(*tags, stream=self.stream), fault)

    @rule(number=NUMBERS, fault=FAULTS)
    def evict(self, number: int, fault: Fault) -> None:
        if not self.buffers[number].evicted:
            self.attempt(lambda: self.buffers[number].evict(self.store, stream=self.stream), fault)

    @rule(number=NUMBERS, fault=FAULTS)
    def restore(self, number: int, fault: Fault) -> None:
        if self.buffers[number].evicted:
            self.attempt(lambda: self.buffers[number].restore(stream=self.stream), fault)

    def teardown(self) -> None:
        self.group.thaw()
        self.frozen.clear()
        self.group.wake(stream=self.stream)
        self.check()
        for buffer in self.buffers:
            buffer.close()
        self.group.close()
        self.device.synchronize()
        if self.store is not self.host:
            self.store.close()
        self.host.close()
        self.stream.close()
        account, folder = self.account, self.folder
        self.__dict__.clear()
        gc.collect()
        end_what_was_dropped()
        folder.cleanup()
        assert account.left == {} and account.checked.hazards == []


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("stores", ["host", "pinned", "disk"])
@in_a_thread
def test_sleeps_and_wakes(stores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_buffer, "_BATCH", PAGE)  # memory is unmapped while later copies run
    monkeypatch.setattr(disk, "_SLOTS", 2)
    monkeypatch.setattr(host, "_BLOCKS", 1)  # a piece of memory for each block
    monkeypatch.setattr(host, "LEAST", PAGE)
    run_state_machine_as_test(type("Machine", (Sleeping,), {"stores": stores}), settings=WORKOUT)
