"""Any sequence of sleeps, wakes and evictions, with calls that the driver refuses, compared with a model in Python."""

from __future__ import annotations

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
from streamalloc.vmm.stores import disk
from tests.support import Account, end_what_was_dropped, filled, in_a_thread, shows, workout
from tests.vmm.support import HOST, PAGE, READWRITE

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

WORKOUT = workout(25, 20)
SIZES = (PAGE, PAGE + 5000, 3 * PAGE)
NUMBERS = some.integers(0, 2)
FAULTS = some.one_of(
    some.just(()),
    some.lists(some.integers(1, 60).map(lambda number: (number, 1)), min_size=1, max_size=2),
    # A step that fails, and then its undo.
    some.sampled_from(
        [(("cuMemUnmap", nth), (undo, 1)) for nth in (2, 3) for undo in ("cuMemMap", "cuMemSetAccess")]
        + [((step, nth), ("cuMemUnmap", 1)) for step in ("cuMemCreate", "cuMemSetAccess") for nth in (2, 3)]
    ),
)
"""Calls that the driver refuses, each by its name or number, and its count."""
Fault = Sequence[tuple[Any, int]]


class Sleeping(RuleBasedStateMachine):
    """Three buffers of a group, of tags "a", "a" and "b". The model is the pattern of each, None if it is undefined."""

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
        if self.stores == "disk":
            self.store = vmm.DiskTier(self.device, self.folder.name, block=1 << 20, threads=2)
        self.group = vmm.SleepGroup(self.device, backup=self.store)
        self.buffers = [vmm.GrowableBuffer(self.device, 4 * PAGE, nbytes, chunk=PAGE) for nbytes in SIZES]
        for buffer, tag in zip(self.buffers, "aab", strict=True):
            self.group.add(buffer, tag)
        self.patterns: list[int | None] = [None] * 3
        self.seed = 0

    def attempt(self, act: Any, fault: Fault) -> bool:
        """Act with refused calls; whether it has succeeded. One refused call changes nothing."""
        asleep = [buffer.evicted for buffer in self.buffers]
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
            assert [buffer.evicted for buffer in self.buffers] == asleep, failed
            assert self.half_evicted() <= half, failed
        self.check()
        return done

    def half_evicted(self) -> set[int]:
        """The buffers whose memory is mapped again although they count as evicted: the undo was refused as well."""
        return {number for number, one in enumerate(self.buffers) if one.evicted and one.range.mapped_bytes}

    def check(self) -> None:
        self.stream.synchronize()
        for buffer, pattern in zip(self.buffers, self.patterns, strict=True):
            assert buffer.evicted or pattern is None or shows(buffer, pattern)

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        if not self.buffers[number].evicted:
            self.seed += 1
            filled(self.buffers[number], self.seed, self.stream)
            self.stream.synchronize()
            self.patterns[number] = self.seed

    @rule(
        tags=some.sampled_from([(), ("a",), ("b",), ("b", "a")]), kept=some.sampled_from([True, "a", "b"]), fault=FAULTS
    )
    def sleep(self, tags: tuple[str, ...], kept: bool | str, fault: Fault) -> None:
        going = [number for number, tag in enumerate("aab") if (tag in tags or not tags)]
        going = [number for number in going if not self.buffers[number].evicted]
        if self.attempt(lambda: self.group.sleep(*tags, keep=kept, stream=self.stream), fault):
            for number in going:
                if kept is not True and "aab"[number] != kept:
                    self.patterns[number] = None

    @rule(tags=some.sampled_from([(), ("a",), ("b",)]), fault=FAULTS)
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
@pytest.mark.parametrize("stores", ["host", "disk"])
@in_a_thread
def test_sleeps_and_wakes(stores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_buffer, "_BATCH", PAGE)  # memory is unmapped while later copies run
    monkeypatch.setattr(disk, "_SLOTS", 2)
    run_state_machine_as_test(type("Machine", (Sleeping,), {"stores": stores}), settings=WORKOUT)
