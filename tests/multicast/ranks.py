"""Ranks as threads of this process, each with a simulated machine of its own: machines that simulate the same one.

To a rank the others are then what other processes would be. What really takes processes is in test_symmetric_faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import Fd, ipc
from streamalloc.multicast import SymmetricMemory
from tests.multicast.support import all_ended
from tests.processes import SECONDS
from tests.support import Account, pattern, read


class Rank:
    """One rank: its group and its driver, which keeps account and may fail."""

    def __init__(self, group: Any, machine: Any) -> None:
        self.group = group
        self.machine = machine
        self.number: int = group.rank
        self.size: int = group.size
        self.fail("")

    def fail(self, call: str | int, nth: int = 1, result: str = "CUDA_ERROR_UNKNOWN") -> None:
        """Let a driver call fail from now on, once: by name or number; none of this name. The account begins anew."""
        self.account = Account(self.machine, call, nth, result)
        self.traced, self.driver = self.account.traced, self.account.driver

    @property
    def device(self) -> sa.Device:
        return sa.Device(self.number, driver=self.driver)

    def memory(self, nbytes: Any = 5000, group: Any = None, **options: Any) -> SymmetricMemory:
        """The memory under test, which all ranks make."""
        if "device" not in options:
            options["device"] = self.device
        options.setdefault("timeout", SECONDS)
        return SymmetricMemory(nbytes, self.group if group is None else group, **options)

    def calls(self, *functions: str) -> list[str]:
        """The driver calls so far, only those of the given functions if any are given."""
        return self.account.calls(*functions)

    @property
    def left(self) -> dict[str, Any]:
        """Resources that were not released, by kind, after an attempt of deferred items; contexts stay."""
        all_ended(self.driver)
        left = self.account.left
        # A stream that was closed has one until it is dropped, and the traceback of an error keeps it.
        left.pop("event", None)
        return left

    @property
    def free(self) -> int:
        """The free bytes of the rank's device."""
        return self.device.memory_info().free


class Crew:
    """The ranks of a group."""

    def __init__(self, size: int, **machine: Any) -> None:
        """``machine``: arguments of ``simulated``."""
        self.size = size
        self._threads = ThreadPoolExecutor(size)
        arguments: dict[str, Any] = {"devices": max(size, 2), "patience": 2.0, **machine}
        groups = ipc.ProcessCommunicator.create(size, timeout=SECONDS)
        self.ranks = [Rank(group, sd.simulated(**arguments)) for group in groups]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            rank.group.close()

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """Results of the ranks; raises the error of one."""
        results = self.outcomes(function)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def outcomes(self, function: Callable[[Rank], Any]) -> list[Any]:
        """Results or errors of the ranks."""

        def outcome(rank: Rank) -> Any:
            try:
                return function(rank)
            except BaseException as error:
                return error

        return [done.result(SECONDS) for done in [self._threads.submit(outcome, rank) for rank in self.ranks]]

    def each(self, *functions: Callable[[Rank], Any]) -> list[Any]:
        """Results or errors of the ranks, each with a function of its own."""
        return self.outcomes(lambda rank: functions[rank.number](rank))

    @property
    def left(self) -> list[dict[str, Any]]:
        """Resources that each rank has not released."""
        left = [rank.left for rank in self.ranks]
        for rank in self.ranks:
            if not rank.left:
                # There is no need to go through it again.
                rank.account.traced.calls.clear()
        return left


def reaches_all(rank: Rank, memory: SymmetricMemory) -> bool:
    """Whether every rank can write to every rank's memory, and read what all have written."""
    part = memory.nbytes // memory.size
    stream = memory.device.create_stream()
    for peer, buffer in enumerate(memory.buffers):
        start = rank.number * part
        buffer[start : start + part].copy_from(pattern(part, 1 + rank.number * memory.size + peer), stream)
    memory.barrier(stream)
    stream.synchronize()
    whole = True
    for peer, buffer in enumerate(memory.buffers):
        for writer in range(memory.size):
            found = read(buffer[writer * part : writer * part + part])
            whole &= bool((found == pattern(part, 1 + writer * memory.size + peer)).all())
    # Nobody writes again before all have read.
    rank.group.barrier()
    stream.close()
    return whole


class Meddled:
    """A communicator that does what a test says at its n-th exchange or allgather, and some after it."""

    def __init__(
        self, group: Any, call: str, do: Callable[[Callable[[], Any]], Any], nth: int = 1, times: int = 1
    ) -> None:
        self.rank, self.size, self.host = group.rank, group.size, group.host
        self._group = group
        self._call = call
        self._do = do
        self._left = nth
        self._times = times

    def _maybe(self, call: str, go_on: Callable[[], Any]) -> Any:
        if call == self._call:
            self._left -= 1
            if -self._times < self._left <= 0:
                return self._do(go_on)
        return go_on()

    def allgather(self, data: Any, *, timeout: float | None = None) -> list[bytes]:
        found: list[bytes] = self._maybe("allgather", lambda: self._group.allgather(data, timeout=timeout))
        return found

    def barrier(self, *, timeout: float | None = None) -> None:
        self._maybe("barrier", lambda: self._group.barrier(timeout=timeout))

    def exchange(self, handles: Sequence[Fd | int], *, timeout: float | None = None) -> list[tuple[Fd, ...]]:
        found: list[tuple[Fd, ...]] = self._maybe("exchange", lambda: self._group.exchange(handles, timeout=timeout))
        return found

    def close(self) -> None:
        self._group.close()
