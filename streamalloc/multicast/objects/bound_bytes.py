"""What a multicast object has bound, and how that is undone: the graph nodes behind :class:`Binding`."""

from __future__ import annotations

from typing import NamedTuple

from streamalloc.core.errors import InvalidValueError
from streamalloc.multicast.objects.bindable import Member
from streamalloc.vmm.internal import AllocationHandle, AllocationState, HandleNode, Kind, Node

__all__ = ["BindingEntry", "BoundBytes"]

# What is bound must not be freed before it is unbound, in whatever order the garbage collector ends a cycle that has
# all of it: so it is no part of any cycle, and no node refers to an object of a user.
_bound_memory: dict[Node, object] = {}


class _Kept(Node):
    """The object of a user that has bound memory: let go of after the multicast object."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(Kind.MEMORY)
        self.given_up = True

    def forget(self) -> None:
        """Let go of the memory."""
        _bound_memory.pop(self, None)


class BoundBytes(HandleNode):
    """A binding, without the memory: ``cuMulticastUnbind``. :attr:`raw` is the object's handle while it is bound."""

    __slots__ = ("device", "kept", "nbytes", "object", "offset", "state", "sure")

    def __init__(self, object: AllocationHandle, member: Member, device: int, offset: int) -> None:
        super().__init__(object.allocations, Kind.BINDING)
        self.sure: bool = False
        """Whether the driver has bound it: not yet, or that was interrupted."""
        self.object: AllocationHandle = object
        self.state: AllocationState | None = member.state
        self.kept: _Kept = _Kept()
        self.device: int = device
        self.offset: int = offset
        self.nbytes: int = member.nbytes

    def link(self, team: Node, memory: object) -> None:
        """Put the object's mappings and handle, and the memory, behind it, and the memory behind the object."""
        order = self.allocations.order
        self._raw = self.object.raw
        # Related before it is kept, so that an interrupt between the two keeps nothing for ever.
        order.relate(self, self.kept)
        _bound_memory[self.kept] = memory
        for node in (*order.before(self.object, Kind.OBJECT_MAPPING), self.object):
            order.relate(self, node)
        order.relate(self.object, self.kept)
        if self.state is not None:
            self.state.bindings[self] = None
            self.state.teams[team] = None
            for handle in list(self.state.handles):
                order.relate(self, handle)
                order.relate(self.object, handle)
                order.relate(handle, team)
            for mapping in list(self.state.mappings):
                order.relate(self.object, mapping)

    def part(self, team: Node) -> None:
        """The user has unbound it: the memory has nothing to do with the object any more, but by other bindings."""
        state, order = self.state, self.allocations.order
        order.unrelate(self.object, self.kept)
        if state is not None and all(other.object is not self.object for other in list(state.bindings)):
            state.teams.pop(team, None)
            for handle in list(state.handles):
                order.unrelate(handle, team)
            for node in (*state.handles, *state.mappings):
                order.unrelate(self.object, node)

    def release(self) -> None:
        """``cuMulticastUnbind``."""
        try:
            self.give_back("cuMulticastUnbind", self.device, self.offset, self.nbytes)
        except InvalidValueError:
            if self.sure:
                raise
            self.was_refused()

    def was_refused(self) -> None:
        """The driver has not bound it: it refused, or was not reached because of an interrupt."""
        self._raw = None
        self.gone = True

    def forget(self) -> None:
        """The memory has one binding less."""
        if self.state is not None:
            self.state.bindings.pop(self, None)


class BindingEntry(NamedTuple):
    """One binding as its object keeps it: the memory, and what there is to undo."""

    member: Member
    node: BoundBytes

    @property
    def live(self) -> bool:
        return not self.node.gone

    @property
    def stop(self) -> int:
        return self.node.offset + self.node.nbytes
