"""Any sequence of operations on two spaces, from one thread or several, compared with a model."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.support import Account, end_what_was_dropped, in_a_thread, read
from tests.vmm.pages.support import settled
from tests.vmm.support import PAGE

PAGES = 12


class Model:
    """Two spaces, a tier in host memory and one on disk, and the value of each page."""

    def __init__(self, account: Account, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.arena = vmm.PageArena(account.device, limit=16 * PAGE)
        self.host = vmm.HostTier(account.device, check=bool(seed % 2))
        self.disk = vmm.DiskTier(account.device, folder, block=1 << 20, threads=2)
        self.spaces = [self.arena.space(PAGES * PAGE) for _ in range(2)]
        self.cells: list[list[Any]] = [[None] * PAGES for _ in range(2)]
        """The cell of each page, a list of one value that pages with the same memory share; None without memory."""
        self.stored: list[dict[int, int]] = [{}, {}]
        self.values = itertools.count(1)

    def some(self) -> list[int]:
        return sorted(self.random.sample(range(PAGES), self.random.randint(1, 5)))

    def step(self) -> None:
        side = self.random.randrange(2)
        space, cells, stored = self.spaces[side], self.cells[side], self.stored[side]
        pages, memory = self.some(), {id(cell) for each in self.cells for cell in each if cell}
        act = self.random.choice(["commit", "release", "alias", "private", "out", "in", "fill", "close"])
        if act == "commit":
            new = [page for page in pages if cells[page] is None]
            if any(page in stored for page in pages):
                with pytest.raises(sa.EvictedError):
                    space.commit(pages)
            elif len(memory) + len(new) > 16:
                with pytest.raises(sa.OutOfMemoryError):
                    space.commit(pages)
            else:
                space.commit(pages)
                for page in new:
                    cells[page] = [0]
                    self.fill(side, page)
        elif act == "release":
            after = self.random.choice([None, (), space.stream])
            if after == ():
                space.stream.synchronize()
            space.release(pages, after=after)
            for page in pages:
                cells[page] = None
                stored.pop(page, None)
        elif act == "alias":
            other = self.random.randrange(2)
            sources = [self.random.randrange(PAGES) for _ in pages]
            found = [self.cells[other][page] for page in sources]
            wrong = [
                cell is None or (cells[page] is not None and cells[page] is not cell)
                for page, cell in zip(pages, found, strict=True)
            ]
            if any(wrong) or any(page in stored for page in pages):
                with pytest.raises((ValueError, sa.EvictedError)):
                    space.alias(pages, self.spaces[other], sources)
            else:
                space.alias(pages, self.spaces[other], sources)
                for page, cell in zip(pages, found, strict=True):
                    cells[page] = cell
        elif act == "private":
            counts = [sum(cell is cells[page] for each in self.cells for cell in each) for page in pages]
            shared = [page for page, count in zip(pages, counts, strict=True) if cells[page] and count > 1]
            if len(memory) + len(shared) > 16:
                with pytest.raises(sa.OutOfMemoryError):
                    space.make_private(pages)
            else:
                assert space.make_private(pages) == len(shared)
                for page in shared:
                    cells[page] = [cells[page][0]]
        elif act == "out":
            space.swap_out(pages, self.random.choice([self.host, self.disk]))
            for page in pages:
                if cells[page]:
                    stored[page], cells[page] = cells[page][0], None
        elif act == "in":
            back = [page for page in pages if page in stored]
            if len(memory) + len(back) > 16:
                with pytest.raises(sa.OutOfMemoryError):
                    space.swap_in(pages)
            else:
                assert space.swap_in(pages) == len(back)
                for page in back:
                    cells[page] = [stored.pop(page)]
        elif act == "fill":
            for page in pages:
                if cells[page]:
                    self.fill(side, page)
        elif self.random.random() < 0.1:
            space.close()
            self.spaces[side] = self.arena.space(PAGES * PAGE)
            self.cells[side], self.stored[side] = [None] * PAGES, {}

    def fill(self, side: int, page: int) -> None:
        value = next(self.values) % 256
        self.spaces[side][page * PAGE : (page + 1) * PAGE].fill(value)
        self.cells[side][page][0] = value

    def check(self) -> None:
        self.arena.device.synchronize()
        end_what_was_dropped()
        for space, cells in zip(self.spaces, self.cells, strict=True):
            assert space.committed.tolist() == [page for page in range(PAGES) if cells[page]]
            wanted = [cell[0] if cell else 0 for cell in cells]
            ends = [read(space[page * PAGE + at :][:8])[0] for page in range(PAGES) for at in (0, PAGE - 8)]
            assert ends == [value for value in wanted for _ in range(2)]
        memory = {id(cell) for each in self.cells for cell in each if cell}
        pages, spare, kept = settled(self.arena)
        assert pages - spare - kept == len(memory)

    def close(self) -> None:
        for one in (*self.spaces, self.host, self.disk, self.arena):
            one.close()


@pytest.mark.parametrize("seed", range(6))
@in_a_thread
def test_any_sequence(machine: Any, tmp_path: Path, seed: int) -> None:
    account = Account(machine)
    model = Model(account, seed, tmp_path)
    for number in range(120):
        model.step()
        if number % 6 == 0:
            model.check()
    model.check()
    model.close()
    del model
    gc.collect()
    assert account.left == {}


def test_threads_share_an_arena(device: sa.Device) -> None:
    """Each thread has some pages of one space, and a space of its own that shares them."""
    failures: list[BaseException] = []

    def work(space: vmm.PageSpace, first: int, seed: int) -> None:
        rng = random.Random(seed)
        try:
            with device.create_stream() as stream, arena.space(4 * PAGE, stream=stream) as own:
                for turn in range(25):
                    mine = [first + page for page in range(4)]
                    space.commit(mine)
                    for page in mine:
                        space[page * PAGE : (page + 1) * PAGE].fill((page + turn) % 256, stream)
                    own.alias(range(4), space, mine)
                    space.release(rng.sample(mine, 2), after=rng.choice([stream, stream.record(), None]))
                    own.make_private(range(4), stream)
                    data = np.zeros(4 * PAGE, np.uint8)
                    own.copy_to(data, stream)
                    stream.synchronize()
                    seen = data.reshape(4, PAGE)[:, ::4096]
                    assert ([(page + turn) % 256 for page in mine] == seen.T).all()
                    own.release(range(4), after=stream)
        except BaseException as error:
            failures.append(error)

    with vmm.PageArena(device) as arena, arena.space(16 * PAGE) as space:
        threads = [threading.Thread(target=work, args=(space, 4 * number, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        space.release(range(16))
        device.synchronize()
        pages, spare, kept = settled(arena)
        assert pages == spare + kept


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@in_a_thread
def test_interrupts_at_any_point(machine: Any, tmp_path: Path) -> None:
    """At most one object is lost, and the space works on."""
    for nth in itertools.count(1, 131):
        account = Account(machine)
        model = Model(account, 1, tmp_path)
        space = model.spaces[0]
        space.commit(range(4))
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            space.commit([6, 8])
            space.alias([9, 10], space, [0, 1])
            space.make_private(9)
            space.swap_out([2, 6], model.host)
            space.release([3, 8])
            space.swap_in([2])
        if not block.came:
            assert nth > 1
            return
        space.release(range(PAGES))
        space.commit(range(PAGES))
        space[: PAGES * PAGE].fill(7)
        assert (read(space)[::4096] == 7).all()
        model.close()
        del model, space
        gc.collect()
        sa.Device(0, driver=account.driver).synchronize()
        assert lost_one(account.left), (nth, account.left)


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
