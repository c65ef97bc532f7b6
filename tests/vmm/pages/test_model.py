"""Any sequence of operations on two spaces, with refused calls, compared with a model."""

import contextlib
import functools
import gc
import itertools
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver.bindings import cuda, value_count
from streamalloc.driver.wrappers import Wrapper
from streamalloc.testing import Gate
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.support import Account, end_what_was_dropped, every, in_a_thread, in_threads, read, workout
from tests.vmm.pages.support import page, settled
from tests.vmm.support import PAGE

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

PAGES, LIMIT = 8, 10
WORKOUT = workout(15, 25)

MAPPING = ["cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease", "cuMemsetD8Async"]
OTHER = [
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemHostAlloc", "cuMemFreeHost", "cuMemcpyAsync",
    "cuMemcpyBatchAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuStreamWaitEvent",
    "cuStreamSynchronize", "cuStreamCreateWithPriority", "cuThreadExchangeStreamCaptureMode",
]  # fmt: skip
RESULTS = [f"CUDA_ERROR_{name}" for name in ("UNKNOWN", "INVALID_VALUE", "OUT_OF_MEMORY")]
PATTERNS = [[1], [1], [1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0, 0, 1], []]
STEP = some.integers(0, 1 << 24)
"""The seed of what a step chooses: Hypothesis itself does not draw evenly."""


class Refusing(Wrapper):
    """A driver that refuses some of the next calls of some functions."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.names: Any = ()
        self.next: list[int] = []
        self.result = ""
        self.refused: list[str] = []

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in self.names and self.next and self.next.pop(0):
            self.refused.append(name)
            return (getattr(cuda.CUresult, self.result), *(None for _ in range(value_count(name))))
        return function(*args)  # type: ignore[no-any-return]


class Pages(RuleBasedStateMachine):
    """Two spaces of an arena, a tier in host memory and one on disk, and the value of each page."""

    driver_below: Any

    def __init__(self) -> None:
        super().__init__()
        self.undo = contextlib.ExitStack()
        self.account = Account(self.driver_below)
        self.driver: Any = Refusing(self.account.driver)
        device = sa.Device(0, driver=self.driver)
        keep = self.undo.enter_context
        self.stream, self.other = keep(device.create_stream()), keep(device.create_stream())
        self.gate = keep(Gate(device))
        self.arena = keep(vmm.PageArena(device, limit=LIMIT * PAGE, patience=20))
        folder = Path(keep(tempfile.TemporaryDirectory()))
        disk = keep(vmm.DiskTier(device, folder, block=1 << 20, threads=1))
        self.tiers = [keep(vmm.HostTier(device)), keep(vmm.HostTier(device, check=True)), disk]
        self.spaces = [self.arena.space(PAGES * PAGE, stream=self.stream) for _ in range(2)]
        self.cells: list[list[Any]] = [[None] * PAGES for _ in range(2)]
        """The cell of each page, a list of one value that pages with the same memory share; None without memory."""
        self.stored: list[dict[int, int]] = [{}, {}]
        self.held: dict[tuple[int, int], Any] = {}
        """Cells of the pages that are parked behind the gate."""
        self.closed_gate = False
        self.values, self.steps = itertools.count(1), itertools.count()
        self.seen = np.zeros(PAGES * PAGE, np.uint8)
        # Pages in each state.
        for number in range(5):
            self.commit(number)
        self.alias(1)
        self.swap_out(1)
        self.release(1)

    # -- helpers -----------------------------------------------------------------------------------------------

    def perform(self, act: Callable[[], Any], error: Any = None) -> bool:
        """Make a call while the driver refuses some calls; returns whether it succeeds. ``error``: why it cannot."""
        rng, driver = self.random, self.driver
        driver.names = rng.choice(
            [rng.sample(MAPPING, 2), rng.sample(MAPPING, 1), rng.sample(OTHER, 1), MAPPING + OTHER]
        )
        driver.next = [0] * rng.randrange(40 if len(driver.names) > 2 else 3) + rng.choice(PATTERNS)
        driver.result, driver.refused = rng.choice(RESULTS), []
        try:
            self.answer = act()
        except (sa.CudaError, ValueError, sa.EvictedError) as raised:
            expected = error is not None and isinstance(raised, error)
            if not (expected or (driver.refused and isinstance(raised, sa.CudaError))):
                raise
            return False
        finally:
            driver.names = ()
            for space in self.spaces if driver.refused else ():
                if not space.closed:
                    space.release([])  # makes the undo that the driver refused
        assert error is None
        return True

    def choose(self, number: int, relevant: Callable[[int, int], object]) -> tuple[int, list[int]]:
        """A side and some of its pages, mostly relevant ones."""
        # Hypothesis repeats numbers.
        self.random = rng = random.Random(number << 10 | next(self.steps))
        side = rng.randrange(2)
        pages = [page for page in range(PAGES) if relevant(side, page)]
        if not pages or rng.random() < 0.1:
            pages = [*range(PAGES)]
        return side, sorted(rng.sample(pages, min(rng.randint(1, 5), len(pages))))

    def committed(self, side: int, page: int) -> object:
        return self.cells[side][page]

    def free(self, side: int, page: int) -> bool:
        return not self.cells[side][page] and page not in self.stored[side]

    def live(self) -> set[int]:
        return {id(cell) for cells in self.cells for cell in cells if cell}

    def room(self, count: int) -> Any:
        """The error of a call that needs so many pages, or None."""
        if len(self.live() | {id(cell) for cell in self.held.values()}) + count > LIMIT:
            self.open()
        return sa.OutOfMemoryError if len(self.live()) + count > LIMIT else None

    def touch(self, side: int, pages: list[int]) -> None:
        """Open the gate if one of the pages waits for it."""
        if any((side, page) in self.held for page in pages):
            self.open()

    def fill(self, side: int, index: int) -> None:
        value = next(self.values) % 256
        page(self.spaces[side], index).fill(value)
        self.cells[side][index][0] = value

    # -- operations --------------------------------------------------------------------------------------------

    @rule()
    def hold(self) -> None:
        if not self.closed_gate:
            self.gate.hold(self.other)
            self.closed_gate = True

    @rule()
    def open(self) -> None:
        self.gate.open()
        self.other.synchronize()
        self.closed_gate = False
        self.held.clear()

    @rule(number=STEP)
    def write(self, number: int) -> None:
        side, pages = self.choose(number, self.committed)
        for index in pages:
            if self.cells[side][index]:
                self.fill(side, index)

    @rule(number=STEP)
    def commit(self, number: int) -> None:
        side, pages = self.choose(number, self.free)
        self.touch(side, pages)
        cells, zero = self.cells[side], self.random.random() < 0.4
        new = [page for page in pages if cells[page] is None]
        error = sa.EvictedError if any(page in self.stored[side] for page in pages) else self.room(len(new))
        if self.perform(lambda: self.spaces[side].commit(pages, zero=zero), error):
            for page in new:
                cells[page] = [0]
                if not zero:
                    self.fill(side, page)

    @rule(number=STEP)
    def release(self, number: int) -> None:
        side, pages = self.choose(number, lambda side, page: not self.free(side, page))
        space, cells = self.spaces[side], self.cells[side]
        after: Any = self.random.choice([None, (), self.stream, self.other, self.stream.record()])
        if after == ():
            self.stream.synchronize()
        if self.perform(lambda: space.release(pages, after=after)):
            for page in pages:
                if cells[page] and self.closed_gate and after in (None, self.other):
                    self.held[side, page] = cells[page]
                cells[page] = None
                self.stored[side].pop(page, None)

    @rule(number=STEP)
    def alias(self, number: int) -> None:
        side, pages = self.choose(number, self.free)
        self.touch(side, pages)
        cells, of = self.cells[side], self.random.randrange(2)
        sources = [page for page in range(PAGES) if self.cells[of][page]] or [0]
        sources = self.random.choices(sources, k=len(pages))
        found = [self.cells[of][page] for page in sources]
        wrong = [
            cell is None or (cells[page] is not None and cells[page] is not cell) or page in self.stored[side]
            for page, cell in zip(pages, found, strict=True)
        ]
        error = (ValueError, sa.EvictedError) if any(wrong) else None
        if self.perform(lambda: self.spaces[side].alias(pages, self.spaces[of], sources), error):
            for page, cell in zip(pages, found, strict=True):
                cells[page] = cell

    @rule(number=STEP)
    def make_private(self, number: int) -> None:
        self.open()
        settled(self.arena)
        side, pages = self.choose(number, self.committed)
        cells = self.cells[side]
        users = [cell for each in self.cells for cell in each]
        shared = [page for page in pages if cells[page] and sum(cell is cells[page] for cell in users) > 1]
        if self.perform(lambda: self.spaces[side].make_private(pages), self.room(len(shared))):
            assert self.answer == len(shared)
            for page in shared:
                cells[page] = [cells[page][0]]

    @rule(number=STEP)
    def swap_out(self, number: int) -> None:
        side, pages = self.choose(number, self.committed)
        cells, tier = self.cells[side], self.random.choice(self.tiers)
        if self.perform(lambda: self.spaces[side].swap_out(pages, tier)):
            for page in pages:
                if cells[page]:
                    self.stored[side][page], cells[page] = cells[page][0], None

    @rule(number=STEP)
    def swap_in(self, number: int) -> None:
        side, pages = self.choose(number, lambda side, page: page in self.stored[side])
        back = [page for page in pages if page in self.stored[side]]
        self.touch(side, back)
        if self.perform(lambda: self.spaces[side].swap_in(pages), self.room(len(back))):
            assert self.answer == len(back)
            for page in back:
                self.cells[side][page] = [self.stored[side].pop(page)]

    @rule(number=STEP)
    def prepare(self, number: int) -> None:
        self.open()  # what is parked may be waited for
        side, pages = self.choose(number, self.free)
        count, act = self.random.randint(0, LIMIT), self.random.randrange(3)
        with contextlib.suppress(sa.OutOfMemoryError):  # kept pages are not taken
            self.perform(
                lambda: (
                    self.spaces[side].prepare(pages).result()
                    if not act
                    else self.arena.prepare(count).result()
                    if act == 1
                    else self.arena.trim(count)
                )
            )

    @rule(number=STEP)
    def make_and_close(self, number: int) -> None:
        side, _ = self.choose(number, self.committed)
        if self.random.random() < 0.7:
            self.perform(lambda: self.arena.space(PAGES * PAGE).close(()))
            return
        self.open()
        if not self.perform(self.spaces[side].close):
            self.spaces[side].close()
        assert self.spaces[side].closed
        self.cells[side], self.stored[side] = [None] * PAGES, {}
        if not self.perform(lambda: self.arena.space(PAGES * PAGE, stream=self.stream)):
            self.answer = self.arena.space(PAGES * PAGE, stream=self.stream)
        self.spaces[side] = self.answer
        del self.answer

    # -- checks ------------------------------------------------------------------------------------------------

    @invariant()
    def has_the_expected_pages(self) -> None:
        for space, cells, stored in zip(self.spaces, self.cells, self.stored, strict=True):
            assert space.committed.tolist() == [page for page in range(PAGES) if cells[page]]
            assert sorted(space._places.stored) == sorted(stored)

    @rule()
    def check(self) -> None:
        """Compare bytes, permissions and counters."""
        cells = {(side, page): cell for side in (0, 1) for page, cell in enumerate(self.cells[side])}
        numbers = {(side, page): int(self.spaces[side].numbers[page]) for side, page in cells if cells[side, page]}
        assert len({*numbers.values()}) == len(self.live())
        assert len({(id(cells[one]), number) for one, number in numbers.items()}) == len(self.live())
        if not self.closed_gate:
            self.arena.device.synchronize()
            pages, spare, kept = settled(self.arena)
            assert pages - spare - kept == len(self.live())
        where = self.arena.location.to_driver()
        for side, space in enumerate(self.spaces):
            space.copy_to(self.seen)
            self.stream.synchronize()
            for index in range(PAGES):
                cell = cells[side, index]
                right = int(self.account.traced.cuMemGetAccess(where, space.address + index * PAGE)[1])
                assert right == 3 if cell else right in (1, 3)
                if cell or not self.closed_gate:
                    assert {*self.seen[index * PAGE : (index + 1) * PAGE : PAGE - 1].tolist()} == {
                        cell[0] if cell else 0
                    }

    def teardown(self) -> None:
        self.open()
        self.check()
        while self.spaces:
            self.spaces.pop().close()
        self.undo.close()
        del self.tiers, self.arena, self.gate, self.stream, self.other, self.undo
        gc.collect()
        end_what_was_dropped()
        assert self.account.left == {}


@in_a_thread
def test_any_sequence(machine: Any) -> None:
    class OnMachine(Pages):
        driver_below = machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamalloc.vmm.pages.space._BATCH", 2)
        run_state_machine_as_test(OnMachine, settings=WORKOUT)


def test_threads_share_an_arena(device: sa.Device) -> None:
    """Each thread has some pages of one space, and a space of its own that shares them."""

    def work(first: int) -> None:
        rng, mine = random.Random(first), [*range(first, first + 4)]
        with device.create_stream() as stream, arena.space(4 * PAGE, stream=stream) as own:
            for turn in range(25):
                space.commit(mine)
                for index in mine:
                    page(space, index).fill((index + turn) % 256, stream)
                own.alias(range(4), space, mine)
                space.release(rng.sample(mine, 2), after=rng.choice([stream, stream.record(), None]))
                own.make_private(range(4), stream)
                data = np.zeros(4 * PAGE, np.uint8)
                own.copy_to(data, stream)
                stream.synchronize()
                assert ([(index + turn) % 256 for index in mine] == data.reshape(4, PAGE)[:, ::4096].T).all()
                own.release(range(4), after=stream)

    with vmm.PageArena(device) as arena, arena.space(16 * PAGE) as space:
        in_threads(*[functools.partial(work, first) for first in (0, 4, 8, 12)])
        space.release(range(16))
        device.synchronize()
        pages, spare, kept = settled(arena)
        assert pages == spare + kept


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@in_a_thread
def test_interrupts_at_any_point(machine: Any, tmp_path: Path, on_disk: bool) -> None:
    """At most one object is lost, and the space works on."""
    for nth in itertools.count(1, 131):
        account = Account(machine)
        device = account.device
        tier: Any = vmm.DiskTier(device, tmp_path, block=PAGE, threads=1) if on_disk else vmm.HostTier(device)
        with vmm.PageArena(account.device) as arena, arena.space(12 * PAGE) as space:
            space.commit(range(4))
            block = Interrupt(nth)
            # The standard library makes a RuntimeError of an exception in Condition.wait().
            with contextlib.suppress(Interrupted, RuntimeError), block:
                space.commit([6, 8])
                space.alias([9, 10], space, [0, 1])
                space.make_private(9)
                space.swap_out([2, 6], tier)
                space.release([3, 8])
                space.swap_in([2])
            if not block.came:
                assert nth > 40 and list(tmp_path.iterdir()) == []
                return
            space.release(range(12))
            space.commit(range(12))
            space.fill(7)
            assert (read(space)[::4096] == 7).all()
        tier.close()
        del tier, arena, space
        gc.collect()
        sa.Device(0, driver=account.driver).synchronize()
        assert lost_one(account.left), (nth, account.left)


PARTS: dict[str, tuple[list[int], Callable[[vmm.PageSpace], object]]] = {
    "commit": ([0, 1, 2, 5, 6, 7], lambda space: space.commit([5, 6, 7])),
    "commit zeros": ([0, 1, 2, 5, 6, 7], lambda space: space.commit([5, 6, 7], zero=True)),
    "alias": ([0, 1, 2, 5, 6, 7], lambda space: space.alias([5, 6, 7], space, [0, 1, 2])),
    "release": ([], lambda space: space.release([0, 1, 2], after=())),
    "swap in": ([0, 1, 2, 9, 10], lambda space: space.swap_in([9, 10])),
}
"""Operations on a space with pages 0, 1 and 2 committed, and 9 and 10 swapped out: the pages that are committed
afterwards, and the call.
"""


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@pytest.mark.parametrize("name", PARTS)
@in_a_thread
def test_an_interrupted_operation_changes_all_pages_or_none(machine: Any, name: str) -> None:
    after, act = PARTS[name]
    for nth in every(3):
        device, block = sa.Device(0, driver=machine), Interrupt(nth)
        with vmm.PageArena(device) as arena, arena.space(12 * PAGE) as space, vmm.HostTier(device) as tier:
            space.commit([0, 1, 2, 9, 10])
            for index in (0, 1, 2, 9, 10):
                page(space, index).fill(index + 1)
            space.swap_out([9, 10], tier)
            if nth % 2:  # The operation uses pages that are kept.
                space.prepare([5]).result()
            space.stream.synchronize()
            with contextlib.suppress(Interrupted), block:
                act(space)
            found = space.committed.tolist()
            assert found in ([0, 1, 2], after), (nth, block.came, found)
            if not block.came:
                assert nth > 20
                return
            space.release([5, 6, 7])
            space.swap_in([9, 10])
            present = [index for index in (0, 1, 2, 9, 10) if index in found or index > 2]
            assert [read(page(space, index))[0] for index in present] == [index + 1 for index in present], block.came


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@pytest.mark.parametrize("call", ["commit", "budget"])
def test_an_interrupted_call_holds_nothing_while_its_frames_stay(machine: Any, tmp_path: Path, call: str) -> None:
    """A handler of the exception can use the space, and so can other threads and processes."""
    budgets = [vmm.PageBudget(tmp_path / "budget", PAGE) for _ in range(2)]
    with vmm.PageArena(sa.Device(0, driver=machine)) as arena, arena.space(PAGE) as space:

        def act() -> None:
            if call == "commit":
                space.commit(0)
            else:
                budgets[0].settle()

        def use() -> None:
            space.release(0, ())
            assert budgets[1].used == 0

        space.commit(0)
        use()
        points = Interrupt()
        with points:
            act()
        for nth in points:
            try:
                with Interrupt(nth):
                    act()
            except Interrupted as error:
                kept = error  # with the frames of the call
            other = threading.Thread(target=use, daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive(), kept
            use()
        assert len(list(points)) > 10
    for budget in budgets:
        budget.close()
