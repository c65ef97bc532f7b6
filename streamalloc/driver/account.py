"""Counts of driver handles and addresses that are not released, to find double releases and leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import number_of

SETTLERS: list[Callable[[], int | None]] = []
"""Functions that ``streamalloc.core`` registers. They make deferred releases before leaks are reported. Each returns
the number of releases that are left, or None.
"""

# By kind of resource: the functions that create a handle (the first value after the CUresult), and those that end one
# (the first argument). A missing function causes a false leak or a false double release.
_RESOURCES = {
    "device memory": ("cuMemAlloc cuMemAllocManaged cuMemAllocPitch", "cuMemFree cuMemFreeAsync"),
    "pool allocation": ("cuMemAllocAsync cuMemAllocFromPoolAsync cuMemPoolImportPointer", "cuMemFreeAsync cuMemFree"),
    "pinned memory": ("cuMemHostAlloc cuMemAllocHost", "cuMemFreeHost"),
    "pool": ("cuMemPoolCreate", "cuMemPoolDestroy"),
    "stream": ("cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate", "cuStreamDestroy"),
    "event": ("cuEventCreate cuIpcOpenEventHandle", "cuEventDestroy"),
    "graph": ("cuStreamEndCapture cuGraphCreate cuGraphClone", "cuGraphDestroy"),
    "executable graph": ("cuGraphInstantiate cuGraphInstantiateWithParams", "cuGraphExecDestroy"),
    # Multicast objects are of this kind, too, because cuMemRelease ends them.
    "physical memory": (
        "cuMemCreate cuMulticastCreate cuMemRetainAllocationHandle cuMemImportFromShareableHandle",
        "cuMemRelease",
    ),
    "memory of another process": ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle"),
    "address range": ("cuMemAddressReserve", "cuMemAddressFree"),
    "array": ("cuArray3DCreate cuArrayCreate", "cuArrayDestroy"),
    "mipmapped array": ("cuMipmappedArrayCreate", "cuMipmappedArrayDestroy"),
}
MAKERS = {name: kind for kind, (makers, _) in _RESOURCES.items() for name in makers.split()}
"""Kind of the handle that a driver function creates, by the function's name."""
ENDERS = {
    name: [kind for kind, (_, also) in _RESOURCES.items() if name in also.split()]
    for _, enders in _RESOURCES.values()
    for name in enders.split()
}
"""List of the kinds of handles that a driver function ends, by the function's name."""


_UNCOUNTED = ("cuMemPoolImportFromShareableHandle", "cuMipmappedArrayGetLevel")
"""Names of functions whose handles need not be released."""
_NODES = ("cuGraphAddMemAllocNode", "cuGraphAddNode", "cuGraphAddNode_v2")


class HandleCounts:
    """Number of owners of each handle or address of a driver."""

    def __init__(self) -> None:
        self._live: Counter[tuple[str, int]] = Counter()
        """Number of owners of each handle or address, by kind and handle."""
        self._uncounted: set[int] = set()
        """Handles and addresses that need not be released: graph memory, imported pools, mipmap levels."""

    def may_end(self, name: str, handle: int) -> bool:
        """Return whether driver function ``name`` may end ``handle``. If not, the call is a double release or has a
        wrong handle.
        """
        return handle in self._uncounted or self.owns(name, handle)

    def owns(self, name: str, handle: int) -> bool:
        """Return whether ``handle`` is counted as not released, and is of a kind that the driver function ``name``
        ends. ``name``: a key of :data:`ENDERS`.
        """
        return any(self._live[kind, handle] > 0 for kind in ENDERS[name])

    def note(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], captured: bool) -> None:
        """Count the handles that a successful call of driver function ``name`` has created or ended. ``answer`` is the
        tuple that the function returned. ``captured``: whether the call became a node of a graph.
        """
        if name in MAKERS:
            handle = int(answer[1])
            if handle and captured:
                self._uncounted.add(handle)
            elif name == "cuStreamEndCapture" and self._live["graph", handle]:
                pass  # Captured into a graph that is counted already.
            elif handle:
                # The driver may reuse an address that belonged to a graph. Unlike memory of a graph, the new memory
                # must be freed, so it is counted.
                self._uncounted.discard(handle)
                self._live[MAKERS[name], handle] += 1
        elif name in ENDERS:
            handle = number_of(args[0])
            for kind in ENDERS[name]:
                count = self._live.pop((kind, handle), 0)  # Each unmap reads all keys, so old ones go.
                if count > 1:
                    self._live[kind, handle] = count - 1
        elif name in _UNCOUNTED:
            self._uncounted.add(int(answer[1]))
        elif name in _NODES:
            # Memory of a node is not counted, because each launch allocates it, and the graph may free it.
            params = args[-1]
            # In the parameters of cuGraphAddNode, `alloc` is a member of a union: it is read only if the node's type is
            # MEM_ALLOC.
            if name != "cuGraphAddMemAllocNode":
                params = params.alloc if getattr(params.type, "name", "").endswith("_MEM_ALLOC") else None
            if params is not None:
                self._uncounted.add(int(params.dptr))
        elif name == "cuMemMap":
            self._live["mapping", int(args[0])] += 1
        elif name == "cuMemUnmap":
            # One call may end several mappings: all that begin in the range. Otherwise they would be reported as leaks.
            start, size = int(args[0]), int(args[1])
            for key in [key for key in self._live if key[0] == "mapping" and 0 <= key[1] - start < size]:
                del self._live[key]

    def lost(self, kind: str, handle: int) -> None:
        """Remove a handle from the counts, because it has ended with its context."""
        self._live.pop((kind, handle), None)

    def outstanding(self) -> dict[str, list[int]]:
        """Return sorted lists of the handles and addresses that are not released, by kind."""
        live: dict[str, list[int]] = {}
        for (kind, handle), count in sorted(self._live.items()):
            if count > 0:
                live.setdefault(kind, []).append(handle)
        return live


COUNTED = frozenset((*MAKERS, *ENDERS, "cuMemMap", "cuMemUnmap", *_UNCOUNTED, *_NODES))
"""Names of the driver functions that change the counts."""
