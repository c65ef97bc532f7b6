"""Agreement before memory is released: hooks with undo, and votes of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from streamalloc.core.errors import attach

T = TypeVar("T")
Hook: TypeAlias = Callable[[list[Any]], object]
"""Function that is called with a list of buffers."""
_LONGEST_REASON = 2000
"""Most bytes of an error text sent to other ranks."""


class Ranks(Protocol):
    """A communicator: the processes whose groups sleep and wake together."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    def allgather(self, data: bytes, /, *, timeout: float | None = None) -> Sequence[bytes]:
        """Return the bytes of all ranks, by rank."""


class RankRefusedError(RuntimeError):
    """Another rank could not sleep or wake, so no rank did.

    :meth:`SleepGroup.sleep` and :meth:`SleepGroup.wake` raise it with ``ranks=``.

    Attributes
    ----------
    rank
        The rank that failed; if several did, the lowest.
    reason
        The text of its error.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank: int = rank
        self.reason: str = reason

    def __str__(self) -> str:
        return f"rank {self.rank} has refused: {self.reason}"


class Votes:
    """The votes of all ranks on one call: each rank votes once, for the call or against it."""

    __slots__ = ("_name", "_ranks", "_timeout", "_voted")

    def __init__(self, ranks: Ranks | None, name: str, timeout: float | None) -> None:
        self._ranks = ranks
        self._name = name
        """Name of the call."""
        self._timeout = timeout
        self._voted = False
        """Whether this rank has voted."""

    def agree(self) -> None:
        """Vote for the call; returns when all ranks have done so.

        Raises
        ------
        RankRefusedError
            Another rank has raised an error, or makes another call. An error of the communicator propagates; then some
            ranks may have agreed.
        """
        self._vote("")

    def run(self, act: Callable[[], T]) -> T:
        """Call ``act``, which calls :meth:`agree` before its last step. If it raises before, vote against the call."""
        try:
            return act()
        except BaseException as first:
            if not self._voted:
                try:
                    self._vote(f"{type(first).__name__}: {first}")
                except Exception as later:
                    attach(first, later)
            raise

    def _vote(self, refusal: str) -> None:
        """Exchange the votes. An empty ``refusal`` is a vote for the call."""
        if self._ranks is None:
            return
        self._voted = True
        text = f"{self._name}\n{refusal}".encode(errors="backslashreplace")[:_LONGEST_REASON]
        for rank, theirs in enumerate(self._ranks.allgather(text, timeout=self._timeout)):
            call, _, reason = bytes(theirs).decode(errors="replace").partition("\n")
            if rank != self._ranks.rank and (call != self._name or reason):
                raise RankRefusedError(rank, reason or f"it makes another call: {call}")
