"""Release order of related driver resources.

:class:`Kind` defines the order. Two related nodes, such as a mapping and its address range, are released in the order
of their kinds, whichever was closed or dropped first. Unrelated nodes do not wait for each other. Every link points
from a smaller kind to a larger one, so links cannot form a cycle.

A node is for a resource that must be released before or after others. A release that waits only for queued work or for
other processes is an item of :mod:`streamalloc.core.deferred`. A node whose owner was dropped is attempted by such an
item.

Driver 580 requires this order for multicast objects: unbind, unmap and release the object, release the memory that was
bound to it, free the addresses.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from streamalloc.driver.internal import Lock

NOTHING: Final[Any] = MappingProxyType({})
"""Empty set of links. A node gets its own dictionaries with its first link."""


class Kind(enum.IntEnum):
    """Kind of resource. Of two related nodes, the one with the smaller kind is released first."""

    QUEUED_WORK = 0
    """Work that may use the resources; "released" means that it has completed."""
    BINDING = 1
    """Memory bound to a multicast object."""
    OBJECT_MAPPING = 2
    """A mapping of a multicast object."""
    OBJECT = 3
    """The handle of a multicast object, or a sparse array."""
    MAPPING = 4
    """A mapping of physical memory. It has no link to its handle, which may be released earlier."""
    MEMORY = 5
    """The handle of physical memory."""
    TEAM = 6
    """A multicast object together with all memory that was bound to it when it was dropped."""
    RESERVATION = 7
    """A reserved range of addresses."""


class Node:
    """One driver resource to release. It refers to no object of a user."""

    __slots__ = ("_busy", "_first", "_then", "given_up", "gone", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.given_up: bool = False
        """True once the owner has closed or dropped it: it is released as soon as nothing precedes it."""
        self.gone: bool = False
        """True once it is released."""
        self._busy = False
        self._first: dict[Node, None] = NOTHING
        self._then: dict[Node, None] = NOTHING

    def give_up(self) -> None:
        """Record that the owner was dropped; idempotent."""
        self.given_up = True

    def release(self) -> None:
        """Release the resource and set :attr:`gone`, or leave it unset for a later attempt. Must not block.

        The default has no resource and only sets :attr:`gone`.
        """
        self.gone = True

    def forget(self) -> None:
        """Remove the released node from the tables that list it; idempotent."""


class ReleaseOrder:
    """The links between the nodes of one driver. Its lock protects the links and is held for nothing else."""

    __slots__ = ("_lock", "ready")

    def __init__(self) -> None:
        self._lock = Lock()
        self.ready: dict[Node, None] = {}
        """Nodes that can be released now, because no node precedes them."""

    def relate(self, one: Node, other: Node) -> None:
        """Link two nodes of different kinds: the one with the smaller kind is released first."""
        first, then = (one, other) if one.kind < other.kind else (other, one)
        with self._lock:
            if not first.gone:
                if first._then is NOTHING:
                    first._then = {}
                if then._first is NOTHING:
                    then._first = {}
                first._then[then] = None
                then._first[first] = None

    def unrelate(self, one: Node, other: Node) -> None:
        """Remove the link that :meth:`relate` made."""
        with self._lock:
            self._unlink(*((one, other) if one.kind < other.kind else (other, one)))

    def before(self, node: Node, kind: Kind) -> list[Node]:
        """List the nodes of a kind that precede a node."""
        with self._lock:
            return [first for first in node._first if first.kind is kind]

    def after(self, node: Node, kind: Kind) -> list[Node]:
        """List the nodes of a kind that must wait for this node."""
        with self._lock:
            return [then for then in node._then if then.kind is kind]

    def attempt(self, node: Node) -> bool:
        """Release a node that was given up, unless another node precedes it.

        Returns False if the caller must attempt it again. A node that waits for others becomes ready when the last of
        them is released, see :meth:`pass_on`.
        """
        mine = False
        try:
            with self._lock:
                if node._first:
                    # A signal handler may have raised between a release and its cut().
                    for first in [first for first in node._first if first.gone]:
                        self._unlink(first, node)
                waits = bool(node._first)
                if not (waits or node.gone or node._busy):
                    mine = node._busy = True
            if mine:
                node.release()
        finally:
            if node.gone:
                self.cut(node)
            if mine:
                node._busy = False
        return waits or node.gone

    def cut(self, node: Node) -> None:
        """Remove all links of a released node; idempotent."""
        node.forget()
        with self._lock:
            if node._then:
                for then in list(node._then):
                    self._unlink(node, then)
            if node._first:
                for first in list(node._first):
                    self._unlink(first, node)

    def pass_on(self, take: Callable[[Node], object]) -> None:
        """Call ``take`` for each ready node. ``take`` must not use this object."""
        with self._lock:
            for node in list(self.ready):
                take(node)
                del self.ready[node]

    def _unlink(self, first: Node, then: Node) -> None:
        if first in then._first:
            del then._first[first]
        if then.given_up and not then._first and not then.gone:
            self.ready[then] = None
        if then in first._then:
            del first._then[then]
