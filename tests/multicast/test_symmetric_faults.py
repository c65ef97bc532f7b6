"""Each rank fails, or is killed, in each step of the set-up: the others raise an error, and nothing is left."""

import contextlib
import errno
import functools
import itertools
import re
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from secrets import token_hex
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc import GroupError
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from streamalloc.multicast.setup import collective
from streamalloc.multicast.setup.rank_group import RankGroup, rank_at_fault
from tests.ipc.support import state
from tests.multicast.ranks import Crew, Meddled, Rank
from tests.multicast.support import all_ended
from tests.processes import Mortal, Partner, There, die
from tests.support import Account, collect_and_freeze, eventually, open_descriptors

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

    def noted(group: RankGroup, name: str, *rest: Any, **named: Any) -> list[bytes]:
        made[name] = None
        return step(group, name, *rest, **named)

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


def test_several_ranks_fail_at_once(crew: Crew) -> None:
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
    assert collective._has(device, "MULTICAST_SUPPORTED") is False


def test_interrupts_are_told_to_the_others(crew: Crew) -> None:
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

    def test_ranks_meet_after_a_failure(self) -> None:
        met, alone = list[object](), RankGroup(None, 2)
        communicator: Any = SimpleNamespace(rank=0, size=2, barrier=lambda timeout: met.append(timeout))
        communicator.allgather = lambda data, timeout: 1 / 0
        group = RankGroup(communicator)
        for one in (group, alone):
            one.barrier_after_failure(None)
            assert not one.failed
        with pytest.raises(SymmetricMemoryError, match="ZeroDivisionError"):
            group.step("map", bytes, None)
        group.barrier_after_failure(None)
        assert met == [None]
        broken: Any = SimpleNamespace(rank=0, size=2, barrier=lambda timeout: 1 / 0)
        (lost := RankGroup(broken)).barrier_after_failure(None)
        assert lost.failed

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


# -- ``kill -9`` of a rank in each step: the others fail in time, name it, and have nothing left. Ranks are processes


RANKS = 3
LIMIT = 10.0
# The call before which a rank is killed.
KILLED_AT = CALLS | {"exchange": "", "clear": "cuMemcpyAsync", "finish": "cuCtxSynchronize"}


class Outcome(NamedTuple):
    """The outcome in a process that lives."""

    rank: int
    step: str
    cause: str
    left: dict[str, Any]
    descriptors: int


def open_files(there: There, rank: int) -> int:
    """Number of open files; the simulated driver closes those of memory that was shared when it is asked for memory."""
    sa.Device(rank, driver=there.driver).memory_info()
    return state().descriptors


def live(there: There, rank: int, token: str) -> Outcome | None:
    """Take part, as a rank that is not killed."""
    before = open_files(there, rank)
    driver = sd.checked(there.driver)
    group = ipc.ProcessCommunicator(rank, RANKS, token, LIMIT)
    # So that all have met.
    group.barrier()
    try:
        with SymmetricMemory(100, group, device=sa.Device(rank, driver=driver), multicast=True, timeout=LIMIT):
            pass
        return None
    except SymmetricMemoryError as error:
        told = error.rank, error.step, type(error.__cause__).__name__
    finally:
        group.close()
    # The other one may have to let go of our memory yet.
    eventually(lambda: open_files(there, rank) <= before, within=2)
    after = open_files(there, rank)
    left = driver.outstanding()
    # Closed streams leave one, which goes with the error.
    left.pop("event", None)
    return Outcome(*told, left, after - before)


def take_part_and_die(there: There, rank: int, token: str, call: str | int) -> bool:
    """Take part, as the rank that is killed; whether it survived."""
    group: Any = ipc.ProcessCommunicator(rank, RANKS, token, LIMIT)
    group.barrier()
    driver: Any = there.driver
    if call:
        driver = Mortal(driver, call)
    else:
        group = Meddled(group, "exchange", die)
    with SymmetricMemory(100, group, device=sa.Device(rank, driver=driver), multicast=True, timeout=LIMIT):
        pass
    group.close()
    return True


@pytest.fixture(scope="module")
def survivors() -> Iterator[list[Partner]]:
    partners = [Partner(False, devices=RANKS) for _ in range(RANKS - 1)]
    yield partners
    for partner in partners:
        partner.close()


def killed(survivors: list[Partner], who: int, call: str | int) -> list[Outcome | None]:
    """Outcomes of the other ranks when one is killed before a call."""
    token = token_hex(16)
    with Partner(False, devices=RANKS) as victim:
        others = [rank for rank in range(RANKS) if rank != who]
        for rank, partner in zip(others, survivors, strict=True):
            partner.begin(live, rank, token)
        try:
            assert victim.run(take_part_and_die, who, token, call)
        except (ConnectionError, OSError):
            assert victim.ended() == -signal.SIGKILL
        return [partner.result() for partner in survivors]


def test_nobody_dies(survivors: list[Partner]) -> None:
    assert killed(survivors, 0, "cuNothing") == [None] * (RANKS - 1)


@pytest.mark.parametrize("step", KILLED_AT)
@pytest.mark.parametrize("who", [0, RANKS - 1])
def test_in_each_step(survivors: list[Partner], who: int, step: str) -> None:
    for outcome in killed(survivors, who, KILLED_AT[step]):
        assert outcome is not None
        assert (outcome.rank, outcome.step, outcome.cause) == (who, step, "GroupGoneError")
        assert (outcome.left, outcome.descriptors) == ({}, 0)
