"""Errors of a store, one class for each kind. The server names the kind in its answer."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store refused a request.

    The calls of a :class:`Store` raise it.
    """


class StoreKeyError(StoreError, KeyError):
    """The store holds nothing under this key, or already holds something.

    :meth:`Store.open`, :meth:`Store.write` and :meth:`Store.remove` raise it.
    """

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class StoreBusyError(StoreError):
    """Another process writes this key, or serves a store of this name.

    :meth:`Store.write` and :meth:`Store.serve` raise it.
    """


class StoreFullError(StoreError, MemoryError):
    """The memory would exceed the limit of the store, or its server has no file descriptor left.

    :meth:`WeightsWriter.allocate` and :meth:`WeightsWriter.commit` raise it; without a descriptor, so do all calls that
    connect to the server.
    """


class StoreGoneError(StoreError, ConnectionError):
    """The server of the store has ended, or closed the connection.

    The calls of a :class:`Store` raise it.
    """


class LayoutChangedError(StoreError, ValueError):
    """The tensors under a key differ from those that the caller expects.

    :meth:`Store.open` and :meth:`Weights.attach` raise it.
    """


KINDS: dict[str, type[StoreError]]
KINDS = {"refused": StoreError, "key": StoreKeyError, "busy": StoreBusyError, "full": StoreFullError}
"""Error classes by the names that the server's answers have."""
NAMES: dict[type[BaseException], str] = {kind: name for name, kind in KINDS.items()}
"""Name of each error class in an answer. An error of any other class has the name ``"refused"``."""
