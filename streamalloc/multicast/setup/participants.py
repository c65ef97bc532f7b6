"""Ranks that do the same steps together: each step succeeds on all of them, or fails on all with one error.

After a step all ranks tell each other how it went, whatever happened on this one. So nobody waits for a rank that has
given up, and all ranks make the same calls of their communicator in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from streamalloc.core.errors import undoing
from streamalloc.core.fd import Fd
from streamalloc.core.ownership import close_all
from streamalloc.ipc import Communicator, GroupError
from streamalloc.ipc.internal import described, left

__all__ = ["SymmetricMemoryError", "Team"]

_DONE, _FAILED = b"\0", b"\1"
_LONGEST_REASON = 2000
# The ranks that are waited for once more after a failure, to have given everything back.
_GRACE = 2.0


class SymmetricMemoryError(RuntimeError):
    """A step of what ranks do together failed on one of them, and so on all: nothing of it is left.

    Attributes
    ----------
    rank
        The rank at fault; of several, the first.
    step
        What it was doing: ``"agree"``, ``"create"``, ``"export"``, ``"exchange"``, ``"import"``, ``"add"``, ``"bind"``,
        ``"reserve"``, ``"map"``, ``"access"``, ``"clear"``, ``"sleep"``, ``"fill"`` or ``"close"``.
    reason
        What went wrong there, in words.
    """

    def __init__(self, rank: int, step: str, reason: str) -> None:
        super().__init__(rank, step, reason)
        self.rank = rank
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} failed in step {self.step!r}: {self.reason}"


class Team:
    """The ranks of a group as one process sees them.

    Parameters
    ----------
    communicator
        How to reach the other processes, each of which has one rank; None where this process has all ranks.
    size
        How many ranks there are, where there is no communicator.
    """

    def __init__(self, communicator: Communicator | None, size: int = 1) -> None:
        self.communicator = communicator
        self.size: int = size if communicator is None else communicator.size
        self.here: tuple[int, ...] = tuple(range(size)) if communicator is None else (communicator.rank,)
        """The ranks of this process."""
        self.lost: bool = False
        """Whether the communicator has failed: no rank can be told anything any more."""

    def step(self, name: str, do: Callable[[int], bytes | None], end: float | None) -> list[bytes]:
        """Do something for each rank of this process, and tell the others how it went.

        Parameters
        ----------
        name
            The step, for errors.
        do
            What to do for a rank; the bytes that it returns go to all ranks.
        end
            The moment on the monotonic clock until which the others are waited for; None: as the communicator does.

        Returns
        -------
        The bytes of every rank.

        Raises
        ------
        SymmetricMemoryError
            It failed on some rank. The error of this process, if there was one, is its ``__cause__``.
        """
        outcomes: dict[int, bytes | BaseException] = {}
        for rank in self.here:
            try:
                outcomes[rank] = do(rank) or b""
            except BaseException as error:
                # Told to the others even where it is an interrupt, for they would wait.
                outcomes[rank] = error
                break
        return self._share(name, outcomes, end)

    def exchange(self, name: str, handles: Sequence[Fd], end: float | None) -> list[tuple[Fd, ...]]:
        """Duplicates of the descriptors that every rank gives; otherwise as :meth:`step`."""
        assert self.communicator is not None
        given: list[tuple[Fd, ...]] = []

        def exchange(rank: int) -> None:
            assert self.communicator is not None
            try:
                given.extend(self.communicator.exchange(handles, timeout=_seconds(end)))
            except Exception:
                # Refused before anything was sent, perhaps: then the others still wait for this rank's part.
                with contextlib.suppress(Exception):
                    given.extend(self.communicator.exchange((), timeout=_seconds(end)))
                raise

        # A rank may fail when the others have what they need: they have to hear of it in this step.
        with undoing(lambda: close_all(fd for fds in given for fd in fds)):
            self.step(name, exchange, end)
        return given

    def settle(self, end: float | None) -> None:
        """Wait until all ranks have given back what a failed step leaves, if they can be reached."""
        if self.communicator is None or self.lost:
            return
        try:
            self.communicator.barrier(timeout=None if end is None else max(left(end), _GRACE))
        except Exception:
            self.lost = True

    def _share(self, name: str, outcomes: dict[int, bytes | BaseException], end: float | None) -> list[bytes]:
        errors = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        packets = [_packet(outcomes[rank]) for rank in outcomes]
        if self.communicator is not None:
            try:
                packets = self.communicator.allgather(packets[0], timeout=_seconds(end))
            except BaseException as error:
                self.lost = True
                if not isinstance(error, Exception):
                    raise
                # What failed first says more: after a failed call a communicator only says that it is of no use.
                (own,) = self.here
                first = errors.get(own, error)
                if not isinstance(first, Exception):
                    raise first from error
                call = "exchange" if own in errors and name == "exchange" else "allgather"
                raise SymmetricMemoryError(rank_at_fault(first, own, call), name, described(first)) from first
        failed = [rank for rank, packet in enumerate(packets) if packet[:1] != _DONE]
        if not failed:
            return [packet[1:] for packet in packets]
        cause = next(iter(errors.values()), None)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        reason = packets[failed[0]][1:].decode(errors="replace")
        raise SymmetricMemoryError(failed[0], name, reason) from cause


def _seconds(end: float | None) -> float | None:
    return None if end is None else left(end)


def _packet(outcome: bytes | BaseException) -> bytes:
    if isinstance(outcome, BaseException):
        return _FAILED + described(outcome).encode(errors="backslashreplace")[:_LONGEST_REASON]
    return _DONE + outcome


def rank_at_fault(error: BaseException, own: int, call: str) -> int:
    """The rank that a communicator's error is about; our own where it is about none.

    Where two ranks did different things, it is the one that did not do ``call``.
    """
    calls = error.calls if isinstance(error, GroupError) else {}
    others = [rank for rank, did in calls.items() if did != call]
    return next(iter(others or calls), own)
