"""The interface between the facade and a checker of stream order."""

from __future__ import annotations

from typing import Any, Protocol


class Listener(Protocol):
    """An object that the facade notifies of memory uses which are no driver calls.

    A driver with an attribute ``listener`` has one; :func:`streamalloc.driver.checked` makes such a driver. The facade
    makes the same driver calls with and without a listener. Streams are driver handles (``CUstream``); the context of a
    default stream is current in each notification.
    """

    def used(self, address: int, nbytes: int, stream: Any, write: bool) -> None:
        """Record that a kernel in ``stream`` uses ``nbytes`` bytes; None for the stream: the host uses them now."""

    def lent(self, stream: Any, used: bool) -> None:
        """Record that code outside this package has the handle of ``stream``; ``used``: it queues work there."""

    def named(self, stream: Any, name: str) -> None:
        """Record the name of a new stream."""

    def typed(self, address: int, nbytes: int, dtype: Any, write: bool) -> None:
        """Record that the latest work writes elements of NumPy's type; not ``write``: that it reads them as such."""

    def deferred(self, address: int) -> None:
        """Record that the program has freed shared memory, whose free waits for importers."""

    def shared(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        """Record that importers may use ``nbytes`` bytes after the work queued in ``stream`` so far.

        ``name`` identifies the announcement in both processes.
        """

    def opened(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        """Record that ``stream`` waits for the announcement ``name`` before it uses ``nbytes`` bytes of an import.

        ``word`` is the address of the 32-bit word that the stream waits for. None for the stream: the host has waited.
        """
