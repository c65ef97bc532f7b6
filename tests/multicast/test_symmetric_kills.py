"""``kill -9`` of a rank in each step: the others fail in time, name it, and have nothing left. Ranks are processes."""

import os
import signal
from collections.abc import Iterator
from secrets import token_hex
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from tests.ipc.support import state
from tests.multicast.ranks import Meddled
from tests.processes import Partner, There, eventually

pytestmark = pytest.mark.simulated_only("multicast objects are made, and processes are killed in the middle of it")

SIZE = 3
LIMIT = 10.0
# The call before which a rank is killed.
CALLS = {
    "agree": "cuMemGetAllocationGranularity",
    "create": "cuMemCreate",
    "export": "cuMemExportToShareableHandle",
    "exchange": "",
    "import": "cuMemImportFromShareableHandle",
    "add": "cuMulticastAddDevice",
    "bind": "cuMulticastBindMem",
    "reserve": "cuMemAddressReserve",
    "map": "cuMemMap",
    "access": "cuMemSetAccess",
    "clear": "cuMemcpyAsync",
    "close": "cuCtxSynchronize",
}


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """A driver whose process is killed before a call: the one of a name, or the n-th of all."""

    def __init__(self, driver: Any, call: str | int) -> None:
        self._driver = driver
        self._call = call
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._driver, name)
        if not (name.startswith("cu") and name[2:3].isupper()):
            return target

        def function(*args: Any) -> Any:
            self._calls += 1
            if self._call in (name, self._calls):
                die()
            return target(*args)

        return function


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
    group = ipc.ProcessCommunicator(rank, SIZE, token, LIMIT)
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
    group: Any = ipc.ProcessCommunicator(rank, SIZE, token, LIMIT)
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
    partners = [Partner(False, devices=SIZE) for _ in range(SIZE - 1)]
    yield partners
    for partner in partners:
        partner.close()


def killed(survivors: list[Partner], who: int, call: str | int) -> list[Outcome | None]:
    """Outcomes of the other ranks when one is killed before a call."""
    token = token_hex(16)
    with Partner(False, devices=SIZE) as victim:
        others = [rank for rank in range(SIZE) if rank != who]
        for rank, partner in zip(others, survivors, strict=True):
            partner.begin(live, rank, token)
        try:
            assert victim.run(take_part_and_die, who, token, call)
        except (ConnectionError, OSError):
            assert victim.ended() == -signal.SIGKILL
        return [partner.result() for partner in survivors]


def test_nobody_dies(survivors: list[Partner]) -> None:
    assert killed(survivors, 0, "cuNothing") == [None] * (SIZE - 1)


@pytest.mark.parametrize("step", CALLS)
@pytest.mark.parametrize("who", [0, SIZE - 1])
def test_in_each_step(survivors: list[Partner], who: int, step: str) -> None:
    for outcome in killed(survivors, who, CALLS[step]):
        assert outcome is not None
        assert (outcome.rank, outcome.step, outcome.cause) == (who, step, "GroupGoneError")
        assert (outcome.left, outcome.descriptors) == ({}, 0)
