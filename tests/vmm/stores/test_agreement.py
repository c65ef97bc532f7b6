"""Hooks around sleep and wake, and groups of several ranks that sleep together."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.testing import Faults
from tests.support import Account, every, filled, in_a_thread, in_threads, shows

WAIT = 20.0
"""Seconds after which a thread counts as stuck."""


class Diary(list[str]):
    """Hooks that write down their names; one may fail."""

    def __init__(self) -> None:
        self.failing = ""

    def hook(self, name: str) -> Callable[[list[vmm.VirtualBuffer]], None]:
        def call(buffers: list[vmm.VirtualBuffer]) -> None:
            self.append(f"{name} of {len(buffers)}")
            if name == self.failing:
                raise RuntimeError(name)

        return call

    def take(self) -> list[str]:
        entries = list(self)
        self.clear()
        return entries


@pytest.fixture
def diary(group: vmm.SleepGroup) -> Diary:
    diary = Diary()
    group.before_sleep(diary.hook("sleep 1"), diary.hook("undo sleep 1"))
    group.before_sleep(diary.hook("sleep 2"))
    group.before_sleep(diary.hook("sleep 3"), undo=diary.hook("undo sleep 3"))
    group.after_wake(diary.hook("wake 1"), diary.hook("undo wake 1"))
    group.after_wake(diary.hook("wake 2"), diary.hook("undo wake 2"))
    return diary


def made(group: vmm.SleepGroup) -> list[vmm.VirtualBuffer]:
    several = [group.allocate(5000, tag=tag) for tag in "ab"]
    for seed, buffer in enumerate(several):
        filled(buffer, seed)
    return several


class TestHooks:
    def test_are_called_in_order(self, group: vmm.SleepGroup, diary: Diary) -> None:
        group.sleep()
        group.wake()
        assert diary.take() == []  # without buffers
        several = made(group)
        states: list[bool] = []
        group.before_sleep(lambda buffers: states.append(group.asleep))
        group.after_wake(lambda buffers: states.append(shows(buffers[0], 0)))
        group.sleep("a")
        group.sleep()
        assert diary.take() == [f"sleep {nth} of 1" for nth in (1, 2, 3, 1, 2, 3)]
        group.wake()
        assert diary.take() == ["wake 1 of 2", "wake 2 of 2"]
        assert states == [False, True, True] and shows(several[1], 1)

    @pytest.mark.parametrize("failing", ["sleep 1", "sleep 2", "sleep 3"])
    def test_one_fails_before_the_sleep(self, group: vmm.SleepGroup, diary: Diary, failing: str) -> None:
        several = made(group)
        diary.failing = failing
        with pytest.raises(RuntimeError, match=failing):
            group.sleep()
        number = int(failing[-1])
        before = [f"sleep {nth} of 2" for nth in range(1, number + 1)]
        assert diary.take() == before + ["undo sleep 1 of 2"] * (number > 1)
        assert not group.asleep and all(shows(buffer, seed) for seed, buffer in enumerate(several))

    def test_the_sleep_fails(self, machine: Any) -> None:
        faults: Any = Faults(machine)
        group, diary = vmm.SleepGroup(sa.Device(0, driver=faults)), Diary()
        group.before_sleep(diary.hook("1"), diary.hook("undo 1"))
        group.before_sleep(diary.hook("2"), diary.hook("undo 2"))
        several = made(group)
        diary.failing = "undo 2"
        faults.fail("cuMemUnmap", 2, result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match="cuMemUnmap") as raised:
            group.sleep()
        faults.stop()
        assert diary == ["1 of 2", "2 of 2", "undo 2 of 2", "undo 1 of 2"]
        assert any("undo 2" in note for note in vars(raised.value)["__notes__"])
        assert not group.asleep and all(shows(buffer, seed) for seed, buffer in enumerate(several))
        for buffer in several:
            buffer.close()
        group.close()

    @pytest.mark.parametrize("kept", [True, False])
    def test_one_fails_after_the_wake(self, group: vmm.SleepGroup, diary: Diary, kept: bool) -> None:
        several = made(group)
        group.sleep(keep=kept)
        diary.clear()
        diary.failing = "wake 2"
        # What the hooks have done to the bytes is undone, too.
        group.after_wake(lambda buffers: None)
        group._after_wake.insert(0, (lambda buffers: buffers[0].fill(9), None))
        with pytest.raises(RuntimeError, match="wake 2"):
            group.wake()
        assert diary.take() == ["wake 1 of 2", "wake 2 of 2", "undo wake 1 of 2"]
        assert all(buffer.evicted for buffer in several) and group.mapped_bytes == 0
        diary.failing = ""
        group._after_wake.pop(0)
        group.wake()
        assert not group.asleep
        if kept:
            assert all(shows(buffer, seed) for seed, buffer in enumerate(several))
            group.device.synchronize()
            assert group.backup.used == 0

    def test_one_that_calls_the_group(self, group: vmm.SleepGroup) -> None:
        several = made(group)
        group.before_sleep(lambda buffers: group.sleep())
        with pytest.raises(sa.InUseError, match="hook"):
            group.sleep()
        assert shows(several[0], 0) and not group.asleep


class Rank:
    """A group of one rank, in a thread."""

    def __init__(self, device: sa.Device, communicator: Any) -> None:
        self.communicator = communicator
        self.group = vmm.SleepGroup(device)
        self.buffers = made(self.group)
        self.error: BaseException | None = None

    def act(self, name: str) -> None:
        self.error = None
        try:
            getattr(self.group, name)(ranks=self.communicator)
        except Exception as error:
            self.error = error

    @property
    def right(self) -> bool:
        return all(shows(buffer, seed) for seed, buffer in enumerate(self.buffers))


def together(ranks: Sequence[Rank], *names: str) -> list[str]:
    """Have each rank make its call: the names of the errors."""
    in_threads(*[partial(rank.act, name) for rank, name in zip(ranks, names * len(ranks), strict=False)])
    return [type(rank.error).__name__ for rank in ranks]


@pytest.fixture
def ranks(device: sa.Device) -> Iterator[list[Rank]]:
    ranks = [Rank(device, communicator) for communicator in ipc.ProcessCommunicator.create(2, timeout=WAIT)]
    yield ranks
    for rank in ranks:
        for buffer in rank.buffers:
            buffer.close()
        rank.group.close()
        rank.communicator.close()


def refuse(buffers: list[vmm.VirtualBuffer]) -> None:
    raise RuntimeError("not now")


class TestRanks:
    def test_sleep_and_wake(self, ranks: list[Rank]) -> None:
        for _ in range(2):
            assert together(ranks, "sleep") == ["NoneType"] * 2
            assert all(buffer.evicted for rank in ranks for buffer in rank.buffers)
            assert together(ranks, "wake") == ["NoneType"] * 2
            assert all(rank.right for rank in ranks)

    @pytest.mark.parametrize("step", ["sleep", "wake"])
    def test_one_cannot(self, ranks: list[Rank], step: str) -> None:
        if step == "wake":
            together(ranks, "sleep")
        hooks = ranks[1].group._before_sleep if step == "sleep" else ranks[1].group._after_wake
        hooks.append((refuse, None))
        assert together(ranks, step) == ["RankRefusedError", "RuntimeError"]
        refusal: Any = ranks[0].error
        assert (refusal.rank, refusal.reason) == (1, "RuntimeError: not now")
        assert {buffer.evicted for rank in ranks for buffer in rank.buffers} == {step == "wake"}
        hooks.clear()
        assert together(ranks, step) == ["NoneType"] * 2
        together(ranks, "wake")
        assert all(rank.right for rank in ranks)

    def test_other_calls_and_closed_groups(self, ranks: list[Rank]) -> None:
        assert together(ranks, "sleep", "wake") == ["RankRefusedError"] * 2
        assert all(rank.right for rank in ranks)
        ranks[1].group.close()
        assert together(ranks, "sleep") == ["RankRefusedError", "ClosedError"]
        assert all(rank.right for rank in ranks)

    @pytest.mark.parametrize("timeout", [None, 2.5])
    def test_votes_have_the_timeout_of_the_call(self, group: vmm.SleepGroup, timeout: float | None) -> None:
        given: list[float | None] = []

        class Alone:
            rank = 0

            def allgather(self, data: bytes, /, *, timeout: float | None = None) -> list[bytes]:
                given.append(timeout)
                return [data]

        made(group)
        group.sleep(ranks=Alone(), timeout=timeout)
        group.wake(ranks=Alone(), timeout=timeout)
        assert given == [timeout, timeout]

    def test_one_that_is_gone(self, ranks: list[Rank]) -> None:
        together(ranks, "sleep")
        ranks[1].communicator.close()
        ranks[0].act("wake")
        assert isinstance(ranks[0].error, ipc.GroupError)
        assert all(buffer.evicted for buffer in ranks[0].buffers)
        ranks[0].group.wake()
        assert ranks[0].right


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@in_a_thread
def test_a_hook_fails_and_any_call_of_the_undo(machine: Any) -> None:
    """The bytes are in the backup still, and the next wake has them."""
    for nth in every(5):
        account = Account(machine)
        faults: Any = Faults(account.driver)
        device = sa.Device(0, driver=faults)
        group = vmm.SleepGroup(device)
        several = made(group)
        group.sleep()

        def fail(buffers: list[vmm.VirtualBuffer], faults: Any = faults, nth: int = nth) -> None:
            buffers[0].fill(9)
            faults.fail(nth, result="CUDA_ERROR_UNKNOWN")
            raise RuntimeError("hook")

        group.after_wake(fail)
        with pytest.raises(RuntimeError, match="hook"):
            group.wake()
        reached = list(faults.failed)
        faults.stop()
        for call in reached:
            if call == "cuCtxPopCurrent":
                machine.cuCtxPopCurrent()
        assert all(buffer.evicted for buffer in several)
        group._after_wake.clear()
        group.wake()
        assert all(shows(buffer, seed) for seed, buffer in enumerate(several))
        for buffer in several:
            buffer.close()
        group.close()
        device.synchronize()
        assert account.left == {} and account.checked.hazards == []
        if not reached:
            break
    assert nth > 3
