"""Bindings in the release-order graph: ``cuMulticastUnbind`` runs before the object and the memory are released."""

from __future__ import annotations

from typing import NamedTuple

from streamalloc.core.internal import InvalidValueError
from streamalloc.multicast.objects.bind_source import BindSource
from streamalloc.vmm.internal import AllocationHandle, AllocationState, HandleNode, Kind, Node

# User objects that have bound memory, by graph node. A global table keeps them out of every reference cycle, so the
# garbage collector cannot free bound memory before it is unbound.
_bound_memory: dict[Node, object] = {}


class _MemoryNode(Node):
    """Keep a user's object alive until the multicast object is released."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(Kind.MEMORY)
        self.given_up = True

    def forget(self) -> None:
        """Drop the reference to the user's object."""
        _bound_memory.pop(self, None)


class BindingNode(HandleNode):
    """One binding as a node of the release order. :attr:`raw` is the object's handle while it is bound."""

    __slots__ = ("confirmed", "device", "memory_node", "nbytes", "object", "offset", "state")

    def __init__(self, object: AllocationHandle, source: BindSource, device: int, offset: int) -> None:
        super().__init__(object.allocations, Kind.BINDING)
        self.confirmed: bool = False
        """Whether the bind call returned success."""
        self.object: AllocationHandle = object
        self.state: AllocationState | None = source.state
        self.memory_node: _MemoryNode = _MemoryNode()
        self.device: int = device
        self.offset: int = offset
        self.nbytes: int = source.nbytes

    def link(self, team: Node, memory: object) -> None:
        """Order the release: this binding, the object's mappings, the object, the memory."""
        order = self.allocations.order
        self._raw = self.object.raw
        # The relation comes first: an interrupt between the two lines then leaks nothing in the table.
        order.relate(self, self.memory_node)
        _bound_memory[self.memory_node] = memory
        for node in (*order.before(self.object, Kind.OBJECT_MAPPING), self.object):
            order.relate(self, node)
        order.relate(self.object, self.memory_node)
        if self.state is not None:
            self.state.bindings[self] = None
            self.state.teams[team] = None
            for handle in list(self.state.handles):
                order.relate(self, handle)
                order.relate(self.object, handle)
                order.relate(handle, team)
            for mapping in list(self.state.mappings):
                order.relate(self.object, mapping)

    def unlink(self, team: Node) -> None:
        """Remove the order between object and memory, unless another binding still joins them."""
        state, order = self.state, self.allocations.order
        order.unrelate(self.object, self.memory_node)
        if state is not None and all(other.object is not self.object for other in list(state.bindings)):
            state.teams.pop(team, None)
            for handle in list(state.handles):
                order.unrelate(handle, team)
            for node in (*state.handles, *state.mappings):
                order.unrelate(self.object, node)

    def release(self) -> None:
        """Call ``cuMulticastUnbind``."""
        try:
            self.give_back("cuMulticastUnbind", self.device, self.offset, self.nbytes)
        except InvalidValueError:
            if self.confirmed:
                raise
            self.was_refused()

    def was_refused(self) -> None:
        """Mark the binding as gone: the driver refused it, or an interrupt came before the call."""
        self._raw = None
        self.gone = True

    def forget(self) -> None:
        """Remove the binding from the state of its memory."""
        if self.state is not None:
            self.state.bindings.pop(self, None)


class BindingRecord(NamedTuple):
    """An entry in the object's list of bindings."""

    source: BindSource
    node: BindingNode

    @property
    def live(self) -> bool:
        """Whether the memory is still bound."""
        return not self.node.gone

    @property
    def stop(self) -> int:
        """Bytes from the start of the object to the end of the binding."""
        return self.node.offset + self.node.nbytes
