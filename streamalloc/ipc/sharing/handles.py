"""The handles that came with a descriptor, by the names that it gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from streamalloc.core.internal import Fd
from streamalloc.ipc.sharing.descriptor import NOWHERE, Descriptor, Flags, Mechanism
from streamalloc.ipc.transport.handle_server import fetch

__all__ = ["Handles"]


class Handles:
    """The handles that came with one message; what nobody takes is closed."""

    __slots__ = ("_given", "_named", "endpoint")

    endpoint: bytes
    """Where others can be had; zeros where nowhere."""

    def __init__(self, handles: Sequence[Fd]) -> None:
        self._given = handles
        self._named: dict[bytes, Fd] = {}

    def name(self, described: Descriptor) -> None:
        """Tell which handle is which, by the order that the descriptor gives."""
        names = [chunk.id for chunk in described.chunks if not chunk.fabric]
        if described.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
            names = [described.origin]
        if described.control_block != NOWHERE:
            names.append(described.control_block)
        names = list(dict.fromkeys(names))
        # One more is that by which a message holds the allocation. It is closed with what nobody takes.
        by_the_message = int(bool(described.flags & Flags.HELD) and not described.hold)
        if by_the_message and len(self._given) == 1:
            return
        if len(self._given) != len(names) + by_the_message:
            raise ValueError(
                f"the descriptor needs {len(names) + by_the_message} handles, and {len(self._given)} came along"
            )
        self._named = dict(zip(names, self._given, strict=False))
        self._given = self._given[len(names) :]

    def take(self, name: bytes) -> Fd:
        """A handle that came along, or else is fetched from the exporter; the caller's from now on."""
        fd = self._named.pop(name, None)
        if fd is not None:
            return fd
        if self.endpoint == NOWHERE:
            raise ValueError(
                "a handle that the descriptor needs did not come along: send it with streamalloc.ipc.send, or pass "
                "handles=shared.fds"
            )
        return fetch(self.endpoint, name)

    def take_here(self, name: bytes) -> Fd | None:
        """The same; None where it did not come along and the exporter is not of this machine, or has ended."""
        if name in self._named or self.endpoint != NOWHERE:
            with contextlib.suppress(ConnectionError):
                return self.take(name)
        return None

    def close(self) -> None:
        """Close what nobody took."""
        for fd in (*self._given, *self._named.values()):
            fd.close()
