"""Errors of a store, one class for each kind. The server names the kind in its answer."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store refused a request."""


class StoreKeyError(StoreError, KeyError):
    """The store holds nothing under this key, or already holds something."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class StoreBusyError(StoreError):
    """Another process writes this key, or serves a store of this name."""


class StoreFullError(StoreError, MemoryError):
    """The memory would exceed the limit of the store."""


class StoreGoneError(StoreError, ConnectionError):
    """The server of the store has ended, or closed the connection."""


class LayoutChangedError(StoreError, ValueError):
    """The tensors under a key are others than the caller expects."""


KINDS: dict[str, type[StoreError]]
KINDS = {"refused": StoreError, "key": StoreKeyError, "busy": StoreBusyError, "full": StoreFullError}
"""Classes by the names that answers of the server have."""


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class in answers."""
    return next((name for name, kind in KINDS.items() if kind is type(error)), "refused")
