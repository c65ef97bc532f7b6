"""In which order things that have to do with each other go back to the driver.

:class:`Kind` is the order. Two things that are related (a mapping and the range that it lies in, a multicast object and
memory that is bound to it) are released in the order of their kinds, whichever of them is given up first; what is not
related does not wait for each other. Links point from one kind to a later one, so that there is no cycle.

The order is that of driver 580 for multicast objects: unbind, unmap and release the object, release the memory that was
bound to it, free the addresses.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

__all__ = ["NOTHING", "Kind", "Node", "ReleaseOrder"]

NOTHING: Final[Any] = MappingProxyType({})
"""What most nodes are linked to: they have dictionaries of their own once there is something in them."""


class Kind(enum.IntEnum):
    """What is released; of two things that are related the one of the smaller kind goes first."""

    QUEUED_WORK = 0
    """Work that may use what is to go: "released" once it is done."""
    BINDING = 1
    OBJECT_MAPPING = 2
    """A mapping of a multicast object."""
    OBJECT = 3
    """The handle of a multicast object, or a sparse array."""
    MAPPING = 4
    """A mapping of physical memory. Its handle may go before it: the two are not related."""
    MEMORY = 5
    """The handle of physical memory."""
    TEAM = 6
    """A multicast object and all memory that was bound to it when it was dropped: released when they are."""
    RESERVATION = 7
    """A range of addresses."""


class Node:
    """One thing that the driver has to get back. It refers to no object of a user."""

    __slots__ = ("_busy", "_first", "_then", "given_up", "gone", "kind")

    given_up: bool
    """Whether it is to be released as soon as nothing has to go before it."""
    gone: bool
    """Whether it was released."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.given_up = False
        self.gone = False
        self._busy = False
        self._first: dict[Node, None] = NOTHING
        self._then: dict[Node, None] = NOTHING

    def give_up(self) -> None:
        """Its owner was dropped. May be called again."""
        self.given_up = True

    def release(self) -> None:
        """Give it back, and set :attr:`gone`; or leave that alone, where it has to be tried again.

        It must not wait. After the end nothing is done. By default there is nothing to give back.
        """
        self.gone = True

    def forget(self) -> None:
        """Take it out of what is known of it, once it has gone. May be called again."""


class ReleaseOrder:
    """The links between the nodes of one driver. Its lock is held while links change, and for nothing else."""

    __slots__ = ("_lock", "_ready")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[Node, None] = {}
        """Given up, and nothing has to go before them any more."""

    def relate(self, one: Node, other: Node) -> None:
        """Have one of two nodes of different kinds go before the other."""
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
        """Undo :meth:`relate`."""
        with self._lock:
            self._unlink(*((one, other) if one.kind < other.kind else (other, one)))

    def before(self, node: Node, kind: Kind) -> list[Node]:
        """What of a kind has to go before a node."""
        with self._lock:
            return [first for first in node._first if first.kind is kind]

    def after(self, node: Node, kind: Kind) -> list[Node]:
        """What of a kind waits for a node."""
        with self._lock:
            return [then for then in node._then if then.kind is kind]

    def attempt(self, node: Node) -> bool:
        """Release a node that was given up, if nothing has to go before it.

        False says to try it again later. A node that has to wait for others is seen to by whoever releases the last of
        those: :meth:`pass_on`.
        """
        mine = False
        try:
            with self._lock:
                if node._first:
                    # What has gone already may still be here, where taking it out of the way was interrupted.
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
        """Take a node that has gone out of the way of others. May be called again."""
        node.forget()
        with self._lock:
            if node._then:
                for then in list(node._then):
                    self._unlink(node, then)
            if node._first:
                for first in list(node._first):
                    self._unlink(first, node)

    @property
    def ready(self) -> bool:
        """Whether there are nodes for :meth:`pass_on`."""
        return bool(self._ready)

    def pass_on(self, take: Callable[[Node], object]) -> None:
        """Call ``take``, which makes no use of this object, for each node that can go now."""
        try:
            self._pass_on(take)
        except BaseException:
            # Interrupted: whoever is ready now has nobody else who sees to it.
            self._pass_on(take)
            raise

    def _pass_on(self, take: Callable[[Node], object]) -> None:
        with self._lock:
            for node in list(self._ready):
                take(node)
                self._ready.pop(node, None)

    def _unlink(self, first: Node, then: Node) -> None:
        if first in then._first:
            del then._first[first]
        if then.given_up and not then._first and not then.gone:
            self._ready[then] = None
        if then in first._then:
            del first._then[then]
