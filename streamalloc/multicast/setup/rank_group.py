"""Group of ranks that run steps together. A step succeeds on all ranks, or fails on all ranks with the same error.

After each step every rank sends its outcome to all others, even if the step failed on this rank. So no rank waits for a
rank that has failed, and all ranks make the same calls of the communicator in the same order.

The layers below a step, between processes of one machine (:mod:`streamalloc.ipc`):

1. :meth:`RankGroup.step` calls the function of the step for the ranks of this process.
2. ``RankGroup._share`` makes a packet of the outcome: a result or the text of an error. If a rank's packet is an error,
   it raises :class:`SymmetricMemoryError`.
3. ``Communicator.allgather`` gives each rank the packets of all. A failed call ends the communicator for good.
4. ``Mesh.all_to_all`` sends the packet over a channel to each rank, with the name of the call, and compares the names.
5. ``Channel.send`` writes to a socket, and ends with an error if the other process dies.

A process that has all ranks stops after 2. On several machines, the communicator's own transport takes the place of 4
and 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.resource import close_all
from streamalloc.ipc import Communicator, GroupError
from streamalloc.ipc.internal import described, left

_DONE, _FAILED = b"\0", b"\1"
_LONGEST_REASON = 2000
"""Largest length in bytes of an error text that is sent to the other ranks; longer texts are cut."""
_GRACE = 2.0
"""Seconds that other ranks have at least for the undo of a failed step, even if less time is left."""


class SymmetricMemoryError(RuntimeError):
    """A step of a collective call failed on one rank, and therefore on all ranks.

    The creation of :class:`SymmetricMemory`, and :meth:`SymmetricMemory.close`, raise it. A failed creation has
    released its resources; for a failed close, see there.

    Attributes
    ----------
    rank
        The rank that failed; the lowest if several failed.
    step
        The step that failed: ``"agree"``, ``"create"``, ``"export"``, ``"exchange"``, ``"import"``, ``"add"``,
        ``"bind"``, ``"reserve"``, ``"map"``, ``"access"`` or ``"clear"``; of a close, ``"meet"`` or ``"finish"``.
    reason
        The text of the error on that rank.
    """

    def __init__(self, rank: int, step: str, reason: str) -> None:
        super().__init__(rank, step, reason)
        self.rank = rank
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} failed in step {self.step!r}: {self.reason}"


class RankGroup:
    """The ranks of a communicator, or all ranks of one process.

    Parameters
    ----------
    communicator
        Object that connects processes with one rank each; None if this process has all ranks.
    size
        Number of ranks if there is no communicator.
    """

    def __init__(self, communicator: Communicator | None, size: int = 1) -> None:
        self.communicator = communicator
        self.size: int = size if communicator is None else communicator.size
        self.local: tuple[int, ...] = tuple(range(size)) if communicator is None else (communicator.rank,)
        """Ranks of this process."""
        self.failed: bool = False
        """Whether the communicator has failed, so that no other rank can be reached."""

    def step(
        self, name: str, do: Callable[[int], bytes | None], deadline: float | None, *, once: bool = False
    ) -> list[bytes]:
        """Run one step for each rank of this process, then exchange the outcomes.

        Parameters
        ----------
        name
            Name of the step, for errors.
        do
            Function that is called with each rank of this process. The bytes that it returns are sent to all ranks.
        deadline
            Time (``time.monotonic``, seconds) at which the wait for other ranks ends; None for the communicator's own
            limit.
        once
            Whether ``do`` is called for the first rank of this process only.

        Returns
        -------
        The bytes that ``do`` returned on each rank, by rank; with ``once``, on each process.

        Raises
        ------
        SymmetricMemoryError
            The step failed on a rank, or the communicator failed. ``__cause__`` is the error of this process's rank or
            of the communicator; None if the step failed only on ranks of other processes.
        BaseException
            An exception that is no ``Exception``, such as KeyboardInterrupt, is raised unchanged. If ``do`` raised it,
            the other ranks are told first.
        """
        outcomes: dict[int, bytes | BaseException] = {}
        for rank in self.local[:1] if once else self.local:
            try:
                outcomes[rank] = do(rank) or b""
            except BaseException as error:
                # KeyboardInterrupt too: without an outcome of this rank, the other ranks would wait for it.
                outcomes[rank] = error
                break
        try:
            return self._share(name, outcomes, deadline)
        finally:
            # The traceback of an error refers to this frame. If this frame also referred to the error, the reference
            # cycle would keep the objects of all frames of the traceback alive until a garbage collection.
            outcomes.clear()

    def exchange(self, name: str, handles: Sequence[Fd], deadline: float | None) -> list[tuple[Fd, ...]]:
        """Send the file descriptors ``handles`` to all ranks, as the step ``name``. Returns a list with a tuple for
        each rank: duplicates of the descriptors that the rank sent. ``deadline`` and errors as for :meth:`step`.
        """
        assert self.communicator is not None
        communicator = self.communicator
        received: list[tuple[Fd, ...]] = []

        def exchange(rank: int) -> None:
            try:
                received.extend(communicator.exchange(handles, timeout=_seconds(deadline)))
            except Exception:
                # The call may have failed before it sent its message, for which the other ranks wait. So an empty
                # message is sent.
                with contextlib.suppress(Exception):
                    received.extend(communicator.exchange((), timeout=_seconds(deadline)))
                raise

        # The outcome is exchanged as for any step. Otherwise a rank that fails after the other ranks have received all
        # descriptors would fail alone, and the other ranks would use its memory.
        with undoing(lambda: close_all(fd for fds in received for fd in fds)):
            self.step(name, exchange, deadline)
        return received

    def barrier_after_failure(self, deadline: float | None) -> None:
        """Block until the other ranks have undone a failed step, too: at most until ``deadline``, or for 2 seconds if
        that is longer; None: the communicator's own limit. No effect if the communicator has failed, or if there is
        none.

        No ``Exception`` is raised, because the caller is already raising the step's own error. If the barrier fails,
        the communicator counts as failed.
        """
        if self.communicator is None or self.failed:
            return
        try:
            self.communicator.barrier(timeout=None if deadline is None else max(left(deadline), _GRACE))
        except Exception:
            self.failed = True

    def _share(self, name: str, outcomes: dict[int, bytes | BaseException], deadline: float | None) -> list[bytes]:
        errors = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        packets = [_packet(outcome) for outcome in outcomes.values()]
        if self.communicator is not None:
            try:
                packets = self.communicator.allgather(packets[0], timeout=_seconds(deadline))
            except BaseException as error:
                self.failed = True
                if not isinstance(error, Exception):
                    raise
                # If the step itself failed here, its error is reported rather than the communicator's: the step's error
                # came first, and the communicator may only say that it is broken.
                (own,) = self.local
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


def _seconds(deadline: float | None) -> float | None:
    return None if deadline is None else left(deadline)


def _packet(outcome: bytes | BaseException) -> bytes:
    if isinstance(outcome, BaseException):
        return _FAILED + described(outcome).encode(errors="backslashreplace")[:_LONGEST_REASON]
    return _DONE + outcome


def rank_at_fault(error: BaseException, own: int, call: str) -> int:
    """Return the rank that a communicator's ``error`` names as the cause; this rank, ``own``, if the error names none.

    If ranks made different calls, the cause is a rank whose call is not ``call``, the name of this rank's call.
    """
    calls = error.calls if isinstance(error, GroupError) else {}
    others = [rank for rank, made in calls.items() if made != call]
    return next(iter(others or calls), own)
