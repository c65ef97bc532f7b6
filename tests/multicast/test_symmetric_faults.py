"""Each rank fails in each step of the set-up: all raise the same error, nothing is left, another attempt succeeds."""

import contextlib
import errno
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.ipc import GroupError
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from streamalloc.multicast.setup import steps
from streamalloc.multicast.setup.rank_group import RankGroup, rank_at_fault
from tests.multicast.ranks import Crew, Meddled, Rank
from tests.multicast.support import all_ended
from tests.support import Account, collect_and_freeze, open_descriptors

pytestmark = pytest.mark.simulated_only("driver calls are made to fail, and multicast objects are made")

SIZE = 4
ENDS_AND_MIDDLE = (0, 1, SIZE - 1)
"""The first rank makes the multicast object; of those between it and the last one stands for all."""
NEVER = 1 << 40

# A call of each step; several where a step has several.
CALLS = {
    "agree": "cuMemGetAllocationGranularity",
    "create": "cuMemCreate",
    "export": "cuMemExportToShareableHandle",
    "import": "cuMemImportFromShareableHandle",
    "add": "cuMulticastAddDevice",
    "bind": "cuMulticastBindMem",
    "reserve": "cuMemAddressReserve",
    "map": "cuMemMap",
    "access": "cuMemSetAccess",
    "clear": "cuStreamSynchronize",
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(SIZE, fabric=False) as crew:
        crew.run(use)
        collect_and_freeze()
        yield crew


def use(rank: Rank) -> None:
    """Operations that must succeed after a failure."""
    with rank.memory(multicast=True) as memory:
        stream = rank.device.create_stream()
        memory.barrier(stream)
        stream.synchronize()
        stream.close()


def test_the_error_lists_the_steps_in_their_order(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, None] = {}
    step = RankGroup.step

    def noted(group: RankGroup, name: str, *rest: Any) -> list[bytes]:
        made[name] = None
        return step(group, name, *rest)

    monkeypatch.setattr(RankGroup, "step", noted)
    crew.run(use)
    assert [*made] == re.findall(r'``"(\w+)"``', SymmetricMemoryError.__doc__ or "")


def assert_all_fail(crew: Crew, make: Callable[[Rank], SymmetricMemory], who: int, step: str, reason: str) -> None:
    """All ranks raise one error, and nothing is left of the attempt."""
    # Asked for memory, the simulated driver closes what was shared of what is gone.
    open_descriptors()
    free, before = [rank.free for rank in crew.ranks], open_descriptors()
    outcomes = crew.outcomes(make)
    for error in outcomes:
        assert isinstance(error, SymmetricMemoryError), outcomes
        assert (error.rank, error.step) == (who, step) and reason in error.reason, outcomes
    assert len({str(error) for error in outcomes}) == 1
    assert outcomes[who].__cause__ is not None
    # The errors are still there, and what their tracebacks hold.
    assert crew.left == [{}] * crew.size
    assert [rank.free for rank in crew.ranks] == free
    assert open_descriptors() == before


@pytest.mark.parametrize("step", CALLS)
@pytest.mark.parametrize("who", ENDS_AND_MIDDLE)
def test_a_driver_call_fails(crew: Crew, who: int, step: str) -> None:
    crew.ranks[who].fail(CALLS[step])
    try:
        assert_all_fail(crew, functools.partial(Rank.memory, multicast=True), who, step, CALLS[step])
    finally:
        crew.ranks[who].fail("")
    crew.run(use)
    assert crew.left == [{}] * SIZE


@pytest.mark.parametrize("who", ENDS_AND_MIDDLE)
def test_the_exchange_fails(crew: Crew, who: int) -> None:
    """Before this rank has given anything, as where a descriptor is not open any more. The group is not harmed."""

    def refuse(go_on: Callable[[], Any]) -> NoReturn:
        raise OSError(errno.EBADF, "Bad file descriptor")

    def make(rank: Rank) -> SymmetricMemory:
        group = Meddled(rank.group, "exchange", refuse) if rank.number == who else None
        return rank.memory(group=group, multicast=True)

    assert_all_fail(crew, make, who, "exchange", "OSError: [Errno 9] Bad file descriptor")
    crew.run(use)
    assert crew.left == [{}] * SIZE


class TestSeveral:
    def test_ranks_fail_at_once(self, crew: Crew) -> None:
        for who in (3, 1):
            crew.ranks[who].fail("cuMemMap", 3)
        outcomes = crew.outcomes(lambda rank: rank.memory())
        assert {(error.rank, error.step) for error in outcomes} == {(1, "map")}
        for rank in crew.ranks:
            rank.fail("")
        crew.run(use)


def test_a_rank_that_fails_ends_the_step_of_its_process() -> None:
    tried = []

    def do(rank: int) -> bytes:
        tried.append(rank)
        raise ValueError(rank)

    with pytest.raises(SymmetricMemoryError) as caught:
        RankGroup(None, 3).step("create", do, None)
    assert (tried, caught.value.rank, caught.value.step) == ([0], 0, "create")


@pytest.mark.parametrize("result", ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"])
def test_an_attribute_that_the_driver_lacks(machine: Any, result: str) -> None:
    device = sa.Device(0, driver=sd.faulty(machine, "cuDeviceGetAttribute", result=result))
    assert steps._has(device, "MULTICAST_SUPPORTED") is False


class TestInterrupts:
    def test_are_told_to_the_others(self, crew: Crew) -> None:
        def interrupted(rank: Rank) -> SymmetricMemory:
            if rank.number == 2:
                driver: Any = rank.driver
                wrapped = driver.cuMemSetAccess

                def once(*args: Any) -> Any:
                    driver.cuMemSetAccess = wrapped
                    raise KeyboardInterrupt

                driver.cuMemSetAccess = once
            return rank.memory(multicast=True)

        outcomes = crew.outcomes(interrupted)
        assert type(outcomes.pop(2)) is KeyboardInterrupt
        for error in outcomes:
            assert (error.rank, error.step) == (2, "access") and "KeyboardInterrupt" in error.reason
        del outcomes, error
        assert crew.left == [{}] * SIZE
        crew.run(use)


class TestGroups:
    """If the communicator itself fails, it is not used again, and all ranks are notified."""

    def test_a_reason_that_is_no_text(self) -> None:
        """As of a file name that is no UTF-8."""

        def refuse(number: int) -> None:
            if number == 1:
                raise OSError("\udcff")

        with Crew(2) as few:
            outcomes = few.outcomes(lambda rank: RankGroup(rank.group).step("map", refuse, None))
            assert [str(error) for error in outcomes] == 2 * ["rank 1 failed in step 'map': OSError: \\udcff"]
            few.run(lambda rank: rank.group.barrier())

    @pytest.mark.parametrize(
        ("calls", "rank"),
        [({0: "exchange", 4: "allgather"}, 4), ({4: "allgather", 0: "exchange"}, 4), ({1: "", 3: ""}, 1), ({}, 9)],
    )
    def test_the_rank_at_fault(self, calls: dict[int, str], rank: int) -> None:
        assert rank_at_fault(GroupError("rank 7", calls), own=9, call="exchange") == rank
        assert rank_at_fault(OSError("rank 7"), own=9, call="exchange") == 9


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
class TestACallAndAnUndoFail:
    """Whichever they are: nothing is left, now or once it was tried again."""

    def fails(self, account: Account, call: int, undo: int) -> tuple[int, list[str]]:
        """Number of calls, and those that failed, if one fails and an undo after it."""
        first = sd.faulty(account.checked, NEVER, result="CUDA_ERROR_UNKNOWN")
        driver = sd.faulty(first, NEVER, result="CUDA_ERROR_UNKNOWN")
        devices = sa.Device.all(driver)
        # What is asked once for each driver.
        SymmetricMemory.local(devices, 100).close()
        begun = len(driver.seen)
        first._target, driver._target = len(first.seen) + call, begun + call + undo
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SymmetricMemory.local(devices, 100).close()
        first._target = driver._target = NEVER
        count = len(driver.seen) - begun
        open_descriptors()
        assert all_ended(driver), (first.failed, driver.failed)
        return count, first.failed + driver.failed

    def sweep(self, calls: slice, undos: Callable[[int], Iterable[int]]) -> None:
        account = Account(sd.simulated(devices=2))
        count, _ = self.fails(account, NEVER, 1)
        assert count > 60
        collect_and_freeze()
        for call in range(1, count + 1)[calls]:
            for undo in undos(call):
                _, failed = self.fails(account, call, undo)
                assert account.left == {} and account.checked.hazards == [], (call, undo, failed)
                if len(failed) < 2:
                    break
            account.traced.calls.clear()

    def test_some(self) -> None:
        self.sweep(slice(None, None, 2), lambda call: [1 + call % 17])

    @pytest.mark.soak
    @pytest.mark.timeout(600)
    def test_all(self) -> None:
        self.sweep(slice(None), lambda call: itertools.count(1))


def test_errors_travel() -> None:
    import pickle

    error = SymmetricMemoryError(3, "bind", "OutOfMemoryError: no room")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.step, again.reason) == (3, "bind", "OutOfMemoryError: no room")
    assert str(again) == "rank 3 failed in step 'bind': OutOfMemoryError: no room"
