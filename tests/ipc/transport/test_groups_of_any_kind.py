"""Communicators from objects that have a rank, a size and an all-gather of bytes, mpi4py's spelling included."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamalloc import ipc
from streamalloc.ipc import GroupError, as_communicator
from streamalloc.ipc.transport.communicator import GroupGoneError, GroupProtocolError, GroupTimeoutError


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


def together(kind: Callable[..., Any], do: Callable[[Any], Any], size: int = 3) -> list[Any]:
    board = Board(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: do(as_communicator(kind(rank, size, board))), range(size)))


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

    assert together(kind, do) == [[b"", b"\1", b"\2\2"]] * 3


def test_ranks_that_do_different_things() -> None:
    def do(group: ipc.Communicator) -> Any:
        with pytest.raises(GroupError) as raised:
            group.barrier() if group.rank == 1 else group.allgather(b"x")
        return raised.value.calls

    assert together(Plain, do) == [{1: "barrier"}, {0: "allgather"}, {1: "barrier"}]


@pytest.mark.parametrize("kind", [GroupTimeoutError, GroupGoneError, GroupProtocolError])
def test_errors_travel(kind: type[GroupError]) -> None:
    again = pickle.loads(pickle.dumps(kind("ranks 2, 5 are late", {2: "", 5: "barrier"})))
    assert type(again) is kind and str(again) == "ranks 2, 5 are late"
    assert again.ranks == (2, 5) and again.calls == {2: "", 5: "barrier"}
