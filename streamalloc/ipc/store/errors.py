"""Errors of a store. The server's answer to a refused request has the name of one of these classes."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store refused a request. Base of the other errors of a store.

    The methods of :class:`Store` raise this error.
    """


class StoreKeyError(StoreError, KeyError):
    """The store has no commit under this key, or already has a commit that must not be replaced.

    :meth:`Store.open`, :meth:`Store.write` and :meth:`Store.remove` raise this error.
    """

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class StoreBusyError(StoreError):
    """Another process is writing this key, or serves a store of this name.

    :meth:`Store.write` and :meth:`Store.serve` raise this error.
    """


class StoreFullError(StoreError, MemoryError):
    """The memory would exceed the limit of the store, or its server has no file descriptor left.

    :meth:`WeightsWriter.allocate` and :meth:`WeightsWriter.commit` raise this error. If the server has no free file
    descriptor, all calls that connect to it do so.
    """


class StoreGoneError(StoreError, ConnectionError):
    """No server of the store runs, or the server has ended or closed the connection.

    The methods of :class:`Store` raise this error.
    """


class LayoutChangedError(StoreError, ValueError):
    """The last commit of a key has another layout than the caller expects, or, in :meth:`Weights.attach`, chunks of
    other sizes.

    :meth:`Store.open` and :meth:`Weights.attach` raise this error.
    """


KINDS: dict[str, type[StoreError]]
KINDS = {"refused": StoreError, "key": StoreKeyError, "busy": StoreBusyError, "full": StoreFullError}
"""Error class for each name in an answer of the server."""
NAMES: dict[type[BaseException], str] = {kind: name for name, kind in KINDS.items()}
"""Name of each error class in an answer of the server. An error of any other class is sent as ``"refused"``."""
