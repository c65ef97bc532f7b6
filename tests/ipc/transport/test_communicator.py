"""Groups, also from other objects that gather: all get what all give, and nobody waits in vain for one that failed."""

import copy
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamalloc import ClosedError, Fd, ipc
from streamalloc.ipc import GroupError
from streamalloc.ipc.transport.channel import Channel, PeerGoneError, ProtocolError
from streamalloc.ipc.transport.communicator import (
    _HEAD,
    Collective,
    Communicator,
    GroupGoneError,
    GroupProtocolError,
    GroupTimeoutError,
    ProcessCommunicator,
    SelfCommunicator,
    TimeLimit,
    _Group,
    as_communicator,
)
from tests.processes import started
from tests.support import each_raises, library, open_descriptors, soon


def together(groups: Sequence[Any], *does: Callable[[Any], Any]) -> list[Any]:
    """Results or errors of each rank's function; each rank is a thread here. One function serves all ranks."""
    results: list[Any] = [None] * len(groups)

    def run(group: Any, do: Callable[[Any], Any]) -> None:
        try:
            results[group.rank] = do(group)
        except Exception as error:
            results[group.rank] = error

    functions = does if len(does) > 1 else does * len(groups)
    threads = [threading.Thread(target=run, args=pair) for pair in zip(groups, functions, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def memory(text: str) -> Fd:
    fd = Fd(os.memfd_create("shared"))
    os.write(fd.fileno(), text.encode())
    return fd


def content(fd: Fd) -> str:
    return os.pread(fd.fileno(), 1000, 0).decode()


def exercise(group: Communicator) -> None:
    """Run all operations of a communicator on every rank."""
    assert isinstance(group, Communicator) and 0 <= group.rank < group.size
    others = range(group.size)
    assert group.allgather(b"rank %d" % group.rank) == [b"rank %d" % rank for rank in others]
    assert group.allgather(b"") == [b""] * group.size
    large = bytes(range(256)) * 1000
    for given, data in enumerate(group.allgather(bytearray(large[: given_bytes(group.rank)]))):
        assert data == large[: given_bytes(given)]
    group.barrier(timeout=30)
    # Different numbers of them, and more than fit into one message.
    mine = [memory(f"{group.rank}.{i}") for i in range(30 * group.rank + 50)]
    found = group.exchange(mine, timeout=30)
    assert [[content(fd) for fd in fds] for fds in found] == [
        [f"{rank}.{i}" for i in range(30 * rank + 50)] for rank in others
    ]
    for fds in (mine, *found):
        for fd in fds:
            fd.close()
    assert group.exchange([]) == [()] * group.size
    with memory("same") as fd:
        before = open_descriptors()
        for _ in range(30):
            for (duplicate,) in group.exchange([fd]):
                assert duplicate.fileno() != fd.fileno()
                duplicate.close()
        assert open_descriptors() <= before
    group.barrier()


def given_bytes(rank: int) -> int:
    return 100_000 * rank + 1


def child(group: ProcessCommunicator, report: Channel) -> None:
    exercise(group)
    with group, report:
        report.send(b"%d of %d" % (group.rank, group.size))


class TestProcesses:
    def test_exchange(self) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        mine, *theirs = ProcessCommunicator.create(3)
        ours, reports = zip(*(Channel.pair() for _ in theirs), strict=True)
        children = [context.Process(target=child, args=pair) for pair in zip(theirs, reports, strict=True)]
        for process in children:
            process.start()
        exercise(mine)
        for rank, report in enumerate(ours, 1):
            assert report.receive(timeout=20).data == b"%d of 3" % rank
            report.close()
        for process, report in zip(children, reports, strict=True):
            process.join(20)
            assert process.exitcode == 0
            report.close()
        with pytest.raises(PeerGoneError, match=r"rank [12] .*is gone"):
            mine.barrier(timeout=10)

    def test_alone(self) -> None:
        for group in (SelfCommunicator(), *ProcessCommunicator.create(1)):
            with group:
                exercise(group)
                assert repr(group) == f"<{type(group).__name__} rank 0 of 1>"
            group.close()
            assert group.closed and "closed" in repr(group)
            for call, given in ((group.barrier, ()), (group.exchange, ([],)), (group.allgather, (b"",))):
                with pytest.raises(ClosedError, match="was closed"):
                    call(*given)

    def test_bad_arguments_leave_the_group_usable(self) -> None:
        groups = ProcessCommunicator.create(2)
        each_raises(TypeError, lambda: groups[0].allgather("text"))  # type: ignore[arg-type]
        each_raises(OSError, lambda: groups[0].exchange([1 << 20]), match="Bad file descriptor")
        each_raises(ValueError, lambda: groups[0].barrier(timeout=-1), match="timeout")
        assert together(groups, lambda group: group.barrier()) == [None, None]

    def test_travel_to_processes_only_and_unused_only(self) -> None:
        groups = ProcessCommunicator.create(2)
        for how in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="ProcessCommunicator"):
                how(groups[0])
        together(groups, lambda group: group.barrier())
        with pytest.raises(TypeError, match="before the first call"):
            multiprocessing.reduction.ForkingPickler.dumps(groups[0])

    def test_one_process_for_each_rank(self) -> None:
        group = ProcessCommunicator.create(2)[1]
        with Channel.listen(address_of(group)), pytest.raises(OSError, match="in use"):
            group.barrier()


def address_of(group: ProcessCommunicator) -> str:
    return f"@streamalloc-{os.geteuid()}-{group._token}-{group.rank}"


class TestFaults:
    """Every rank learns which rank is at fault, whichever it waits for itself."""

    @pytest.fixture
    def groups(self) -> list[ProcessCommunicator]:
        groups = ProcessCommunicator.create(5)
        together(groups, lambda group: group.barrier())
        return groups

    def test_a_rank_that_never_comes(self, groups: list[ProcessCommunicator]) -> None:
        present = [group for group in groups if group.rank != 3]
        results = together(present + groups[3:4], *[lambda group: group.barrier(timeout=0.2)] * 4, lambda _: None)
        for rank in (0, 1, 2, 4):
            assert isinstance(results[rank], TimeoutError), results
            assert str(results[rank]) == "rank 3 did not come to the barrier within 0.2 s"
        # Late, it learns the same, and nobody can go on.
        with pytest.raises(TimeoutError, match="rank 3 did not come"):
            groups[3].barrier(timeout=5)
        each_raises(ClosedError, *(group.barrier for group in groups), match="failed: rank 3")

    def test_ranks_that_never_came_at_all(self) -> None:
        groups = ProcessCommunicator.create(4, timeout=0.2)
        results = together(groups, *[lambda group: group.barrier(), lambda _: None] * 2)
        for rank in (0, 2):
            assert isinstance(results[rank], TimeoutError)
            assert str(results[rank]) == "ranks 1, 3 did not come within 0.2 s"

    @pytest.mark.parametrize("call", ["barrier", "exchange"])
    def test_a_rank_that_leaves(self, groups: list[ProcessCommunicator], call: str) -> None:
        def join(group: ProcessCommunicator) -> None:
            if group.rank == 2:
                time.sleep(0.05)
                group.close()
            elif call == "barrier":
                group.barrier()
            else:
                group.exchange([0])

        before = open_descriptors()
        results = together(groups, join)
        assert results[2] is None
        for rank in (0, 1, 3, 4):
            assert isinstance(results[rank], PeerGoneError) and "rank 2 " in str(results[rank]), results
        del results
        assert open_descriptors() <= before - 5 * 4

    def test_a_rank_that_fails_tells_the_others(self, groups: list[ProcessCommunicator]) -> None:
        def join(group: ProcessCommunicator) -> None:
            if group.rank == 1:
                with pytest.raises(OSError, match="Bad file"):
                    assert group._mesh is not None
                    group._mesh.all_to_all(Collective.EXCHANGE, b"", [1 << 20], TimeLimit.of(None))
            else:
                group.exchange([0])

        results = together(groups, join)
        assert results[1] is None
        for rank in (0, 2, 3, 4):
            assert isinstance(results[rank], PeerGoneError) and "rank 1 gave up: OSError" in str(results[rank])

    @pytest.mark.parametrize("reason", [b"", b"\xff", b"1", b"[1, 2, 3]", b"[false, [[1]], 0]", b"[" * 50_000])
    def test_a_reason_that_cannot_be_read(self, reason: bytes) -> None:
        groups = ProcessCommunicator.create(2)
        together(groups, lambda group: group.barrier())
        mesh = groups[1]._mesh
        assert mesh is not None
        mesh._channels[0].send(_HEAD.pack(Collective.FAILED, 1) + reason)
        each_raises(ProtocolError, groups[0].barrier, match="cannot be read")

    def test_ranks_that_do_different_things(self, groups: list[ProcessCommunicator]) -> None:
        results = together(
            groups,
            *[lambda group: group.barrier()] * 3,
            lambda group: group.exchange([0]),
            lambda group: group.barrier(),
        )
        assert all(isinstance(one, (ProtocolError, PeerGoneError)) for one in results), results
        assert any("all ranks must do the same" in str(one) for one in results)

    def test_a_rank_that_is_killed(self) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        groups = ProcessCommunicator.create(3)
        children = [context.Process(target=wait_in_vain, args=(group,)) for group in groups[1:]]
        for process in children:
            process.start()
        groups[0].barrier()
        os.kill(children[1].pid, signal.SIGKILL)
        with pytest.raises(PeerGoneError, match=rf"rank 2 \(process {children[1].pid}\) is gone"):
            groups[0].exchange([0])
        children[0].join(20)
        assert children[0].exitcode == 7
        children[1].join(20)

    def test_callers_who_are_no_ranks(self) -> None:
        groups = ProcessCommunicator.create(2, timeout=10)
        result: list[Any] = []
        with soon(lambda: result.append(together(groups[:1], lambda group: group.allgather(b"a"))), 0):
            for word in (None, b"", b"hello", b"hello\5\0\0\0", b"HELLO\1\0\0\0"):
                with connected(address_of(groups[0])) as channel:
                    if word is not None:
                        channel.send(word)
            groups[1].allgather(b"b")
        assert result == [[[b"a", b"b"]]]


def connected(address: str) -> Channel:
    end = time.monotonic() + 5
    while True:
        try:
            return Channel.connect(address)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.001)


def wait_in_vain(group: ProcessCommunicator) -> None:
    """A child: comes once, and then waits, one rank for the other and the other for its end."""
    try:
        group.barrier()  # not over here, perhaps, when it is over there
        if group.rank == 2:
            time.sleep(60)
        group.exchange([0])
    except PeerGoneError as error:
        # Told by the rank that noticed first, or noticed by itself.
        sys.exit(7 if "rank 2 " in str(error) else 8)


class _Elsewhere(_Group):
    """A group whose bytes travel on a way of their own, and whose ranks may be on several machines."""

    __slots__ = ("_way",)

    def __init__(self, way: ProcessCommunicator, host: str) -> None:
        super().__init__(way.rank, way.size, way.timeout)
        self.host = host or self.host
        self._way = way

    def _gathered(self, call: Collective, packet: bytes, limit: TimeLimit) -> list[bytes]:
        return self._way.allgather(packet)


def test_several_machines() -> None:
    ways = ProcessCommunicator.create(3)
    groups = [_Elsewhere(way, host) for way, host in zip(ways, ("here", "there", "here"), strict=True)]
    for _ in range(2):
        for result in together(groups, lambda group: group.exchange([0])):
            assert isinstance(result, ValueError)
            assert "ranks 0, 2 on here; rank 1 on there" in str(result) and "fabric" in str(result)
    assert together(groups, lambda group: group.allgather(b"x")) == [[b"x"] * 3] * 3


def test_what_is_no_group() -> None:
    for wrong in (3, "world", object()):
        with pytest.raises(TypeError, match="no group"):
            as_communicator(wrong)  # type: ignore[arg-type]
    if "torch.distributed" not in sys.modules:
        each_raises(ValueError, as_communicator, match=r"SelfCommunicator\(\)")


def run(*commands: list[str]) -> None:
    """Run programs at once; all have to succeed."""
    processes = [started(command, stderr=subprocess.STDOUT) for command in commands]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


_RANK = """
import time
from streamalloc.ipc.transport.communicator import as_communicator
from tests.ipc.transport.test_communicator import exercise
with as_communicator(group) as ours:
    exercise(ours)
group = as_communicator(group)
group.barrier()
if group.rank == 1:
    time.sleep(1)
else:
    try:
        group.allgather(b"x", timeout=0.2)
        raise SystemExit("nobody was missed")
    except TimeoutError as error:
        assert str(error) == "rank 1 did not come to the allgather within 0.2 s", error
"""


def test_mpi() -> None:
    library("mpi4py")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None:
        pytest.skip("needs mpiexec")
    code = f"from mpi4py import MPI\ngroup = MPI.COMM_WORLD\n{_RANK}\nMPI.COMM_WORLD.Barrier()"
    run([mpiexec, "-n", "3", sys.executable, "-c", code])


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_torch(tmp_path: Path, store: str) -> None:
    library("torch")
    where = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}"
    code = f"""
import sys
import torch.distributed as distributed
distributed.init_process_group("gloo", init_method={where!r}, rank=int(sys.argv[1]), world_size=3)
group = None
{_RANK}
distributed.barrier()
distributed.destroy_process_group()
"""
    run(*([sys.executable, "-c", code, str(rank)] for rank in range(3)))


class Board:
    """State that the ranks of a group in one process share."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.turn = threading.Barrier(size, timeout=10)

    def gather(self, rank: int, data: Any) -> list[Any]:
        self.parts[rank] = data
        self.turn.wait()
        found = list(self.parts)
        self.turn.wait()
        return found


class Plain:
    def __init__(self, rank: int, size: int, board: Board) -> None:
        self.rank, self.size, self._board = rank, size, board

    def allgather(self, data: bytes) -> list[bytes]:
        return self._board.gather(self.rank, data)


class LikeMPI:
    def __init__(self, rank: int, size: int, board: Board) -> None:
        self._rank, self._size, self._board = rank, size, board

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, thing: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._board.gather(self._rank, pickle.dumps(thing))]


def in_one_process(kind: Callable[..., Any], do: Callable[[Any], Any]) -> list[Any]:
    board = Board(3)
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda rank: do(as_communicator(kind(rank, 3, board))), range(3)))


@pytest.mark.parametrize("kind", [Plain, LikeMPI])
def test_all_calls(kind: Callable[..., Any]) -> None:
    def do(group: ipc.Communicator) -> list[bytes]:
        with open("/dev/null", "rb") as file:
            assert isinstance(group, ipc.Communicator)
            group.barrier()
            for handles in group.exchange([file.fileno()], timeout=10):
                assert os.path.samestat(os.fstat(handles[0].fileno()), os.fstat(file.fileno()))
            found = group.allgather(bytes([group.rank] * group.rank))
        group.barrier()
        group.close()
        return found

    assert in_one_process(kind, do) == [[b"", b"\1", b"\2\2"]] * 3


def test_ranks_of_any_group_that_do_different_things() -> None:
    def do(group: ipc.Communicator) -> Any:
        with pytest.raises(GroupError) as raised:
            group.barrier() if group.rank == 1 else group.allgather(b"x")
        return raised.value.calls

    for rank, calls in enumerate(in_one_process(Plain, do)):
        # The first rank that notices tells the others; with three ranks it may be any.
        assert calls.get(1) == "barrier" and "allgather" in calls.values(), (rank, calls)


@pytest.mark.parametrize("kind", [GroupTimeoutError, GroupGoneError, GroupProtocolError])
def test_errors_travel(kind: type[GroupError]) -> None:
    again = pickle.loads(pickle.dumps(kind("ranks 2, 5 are late", {2: "", 5: "barrier"})))
    assert type(again) is kind and str(again) == "ranks 2, 5 are late"
    assert again.ranks == (2, 5) and again.calls == {2: "", 5: "barrier"}
