"""Budgets that arenas of several processes share."""

import contextlib
import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Faults
from tests.processes import Partner, There
from tests.support import each_raises, eventually, in_threads
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import settled
from tests.vmm.support import PAGE

Engines = Callable[[int], Partner]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pages.budget"


@pytest.fixture
def budget(path: Path) -> Iterator[vmm.PageBudget]:
    with vmm.PageBudget(path, 8 * PAGE) as budget:
        yield budget


@pytest.fixture
def space(device: sa.Device, budget: vmm.PageBudget) -> Iterator[vmm.PageSpace]:
    with vmm.PageArena(device, budget=budget) as arena, arena.space(PAGES * PAGE) as space:
        yield space


def engine(there: There, path: str, pages: int) -> None:
    """An engine of another process with some committed pages, which it releases when it is asked to."""
    asked: list[int] = []
    there.kept["asked"] = asked

    def on_ask(nbytes: int) -> None:
        asked.append(nbytes)
        if there.kept["gives"]:
            own.release(own.committed[: nbytes // PAGE], after=())

    there.kept["gives"] = True
    there.kept["budget"] = budget = vmm.PageBudget(path, on_ask=on_ask)
    there.kept["arena"] = arena = vmm.PageArena(there.device, budget=budget)
    there.kept["space"] = own = arena.space(PAGES * PAGE, stream=there.stream)
    own.commit(range(pages))
    own[: pages * PAGE].fill(9)
    there.stream.synchronize()


@pytest.fixture
def engines(on_cuda: bool, path: Path) -> Iterator[Engines]:
    """Makes engines with so many committed pages, which are killed at the end."""
    with contextlib.ExitStack() as made:

        def make(pages: int) -> Partner:
            partner: Partner = made.enter_context(Partner(on_cuda))
            partner.run(engine, str(path), pages)
            return partner

        yield make


def release(there: There, pages: list[int]) -> None:
    there.kept["space"].release(pages, after=())


def state(there: There) -> tuple[int, list[int]]:
    return there.kept["space"].committed.size, there.kept["asked"]


def refuse(there: There) -> None:
    there.kept["gives"] = False


def forked(there: There) -> int:
    """The number of a child, which lives until it is killed."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return child


class TestOne:
    def test_of_two_arenas(self, device: sa.Device, path: Path) -> None:
        with (
            vmm.PageBudget(path, 4 * PAGE) as budget,
            vmm.PageArena(device, budget=budget) as arena,
            vmm.PageArena(device, budget=budget) as second,
            arena.space(PAGES * PAGE) as space,
            second.space(PAGES * PAGE) as other,
        ):
            space.commit(range(3))
            assert arena.budget is budget and (budget.used, budget.mine) == (3 * PAGE, 3 * PAGE)
            with pytest.raises(sa.OutOfMemoryError, match="budget of 8 MiB leaves no room for 2 pages") as caught:
                other.commit(range(2))
            assert (caught.value.requested, caught.value.limit) == (2 * PAGE, 4 * PAGE)
            assert other.committed.size == 0 and settled(second) == (0, 0, 0) and budget.used == 3 * PAGE
            other.commit([0])
            space.release([0, 1], after=())
            settled(arena)
            other.commit(range(3))  # what the first one keeps
            assert settled(arena) == (1, 0, 0) and budget.used == 4 * PAGE
            with pytest.raises(sa.OutOfMemoryError):
                arena.prepare(1).result()
            space.close()
            arena.close()
            assert budget.used == 3 * PAGE
            with pytest.raises(ValueError, match=r"have 6 MiB: close them"):
                budget.close()

    @pytest.mark.parametrize(
        ("wrong", "error"), [(math.nan, ValueError), (-1, ValueError), ("1", TypeError), ([1], TypeError)]
    )
    def test_times_that_are_none(self, device: sa.Device, budget: vmm.PageBudget, wrong: Any, error: Any) -> None:
        each_raises(error, lambda: budget.wait(1, wrong), match="timeout")
        each_raises(error, lambda: vmm.PageArena(device, patience=wrong), match="patience")

    def test_what_is_refused(self, device: sa.Device, path: Path) -> None:
        with pytest.raises(ValueError, match="a new budget needs a limit"):
            vmm.PageBudget(path)
        assert not path.exists()
        path.touch()
        with pytest.raises(ValueError, match="a new budget needs a limit"):
            vmm.PageBudget(path)
        with vmm.PageBudget(path, PAGE) as budget:
            assert vmm.PageBudget(path).limit == PAGE
            each_raises(ValueError, lambda: vmm.PageBudget(path, 2 * PAGE), match="has 2 MiB")
            each_raises(TypeError, lambda: vmm.PageArena(device, budget=path), match="budget must be")  # type: ignore[arg-type]
            each_raises(TypeError, lambda: vmm.PageBudget(path, on_ask=3), match="on_ask must be a function, not int")  # type: ignore[arg-type]
            os.truncate(path, 100)
            with pytest.raises(ValueError, match="was truncated"):
                budget.wait(1)
            os.truncate(path, os.stat(path).st_size)
            path.write_bytes(b"x" * os.stat(path).st_size)
            with pytest.raises(ValueError, match="is no budget"):
                vmm.PageBudget(path)
            path.unlink()
        with pytest.raises(sa.ClosedError):
            vmm.PageArena(device, budget=budget)

    def test_the_driver_has_no_memory(self, faults: Faults, budget: vmm.PageBudget, space: vmm.PageSpace) -> None:
        """What could not be created does not count."""
        arena: Any = space.owner
        faults.fail("cuMemCreate", 3)
        with pytest.raises(sa.OutOfMemoryError):
            space.commit(range(5))
        assert settled(arena) == (2, 2, 0) and budget.used == 2 * PAGE
        arena.trim()
        assert budget.used == 0

    def test_threads(self, device: sa.Device, path: Path) -> None:
        def work(budget: vmm.PageBudget) -> None:
            with vmm.PageArena(device, budget=budget) as arena, arena.space(PAGES * PAGE) as space:
                for turn in range(20):
                    # Threads that share a budget may wait for each other's unused pages, which nobody gives then.
                    budget.wait(4 * PAGE, 0.05)
                    with contextlib.suppress(sa.OutOfMemoryError):  # another one was first
                        space.commit(range(4))
                    assert budget.used <= 8 * PAGE
                    space.release(range(4), after=())
                    if turn % 3 == 0:
                        arena.trim()

        with vmm.PageBudget(path, 8 * PAGE) as first, vmm.PageBudget(path) as second:
            in_threads(*[functools.partial(work, budget) for budget in (first, first, second, second)])
            assert first.used == 0


class TestProcesses:
    def test_who_asks_gets(self, engines: Engines, budget: vmm.PageBudget, space: vmm.PageSpace) -> None:
        other = engines(8)
        assert budget.used == 8 * PAGE
        with pytest.raises(sa.OutOfMemoryError, match="others were asked"):
            space.commit(range(3))
        assert budget.wait(3 * PAGE, 5)
        space.commit(range(3))
        committed, asked = other.run(state)
        assert committed == 5 and asked and max(asked) == 3 * PAGE
        assert budget.used == 8 * PAGE

    def test_what_is_not_in_use_is_given_first(
        self, engines: Engines, budget: vmm.PageBudget, space: vmm.PageSpace
    ) -> None:
        other = engines(8)
        other.run(release, [0, 1, 2])
        assert budget.used == 8 * PAGE and budget.wait(3 * PAGE, 5)
        space.commit(range(3))
        assert other.run(state) == (5, [])

    def test_nobody_gives_below_its_share(self, engines: Engines, budget: vmm.PageBudget, space: vmm.PageSpace) -> None:
        other = engines(5)
        space.commit(range(3))
        assert budget.wait(PAGE, 5)
        space.commit(range(4))
        assert not budget.wait(PAGE, 0.2)
        assert other.run(state) == (4, [PAGE])

    def test_a_death_returns_all(self, engines: Engines, budget: vmm.PageBudget, space: vmm.PageSpace) -> None:
        other, third = engines(6), engines(2)
        other.run(refuse)
        assert not budget.wait(4 * PAGE, 0.1)
        other.kill()
        assert budget.wait(6 * PAGE, 5)
        space.commit(range(6))
        assert budget.used == 8 * PAGE and third.run(state)[0] == 2
        third.kill()
        assert eventually(lambda: budget.used == 6 * PAGE)
        engines(2)
        assert budget.used == 8 * PAGE

    @pytest.mark.simulated_only("forks a process that has used the driver")
    def test_a_forked_child_keeps_nothing(self, engines: Engines, budget: vmm.PageBudget) -> None:
        other = engines(6)
        child = other.run(forked)
        try:
            assert budget.used == 6 * PAGE
            other.kill()
            assert eventually(lambda: budget.used == 0)  # the child closes its copy once it runs
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("error")
def test_a_failed_release_is_asked_for_again_where_warnings_are_errors(
    device: sa.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamalloc.vmm.pages.budget._AFTER_ERROR", 0.05)
    asked: list[int] = []
    path = tmp_path / "budget"

    def fail(nbytes: int) -> None:
        asked.append(nbytes)
        raise RuntimeError

    with (
        vmm.PageBudget(path, 2 * PAGE, on_ask=fail) as budget,
        vmm.PageBudget(path) as other,
        vmm.PageArena(device, budget=budget) as arena,
        vmm.PageArena(device, budget=other) as its_arena,
        arena.space(2 * PAGE) as space,
        its_arena.space(2 * PAGE) as its_space,
    ):
        space.commit(range(2))
        assert not other.wait(PAGE, timeout=0.1)
        assert eventually(lambda: bool(asked))
        space.release([0], after=())
        assert other.wait(PAGE, timeout=60)
        its_space.commit([0])


def test_an_arena_without_a_thread_leaves_the_next_one_answering(
    device: sa.Device, budget: vmm.PageBudget, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            vmm.PageArena(device, budget=budget)
    with (
        vmm.PageArena(device, budget=budget) as arena,
        arena.space(PAGES * PAGE) as space,
        vmm.PageBudget(path) as other,
    ):
        space.commit(range(8))
        space.release(range(8), after=())
        settled(arena)
        assert other.wait(PAGE, timeout=5)
