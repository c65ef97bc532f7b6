"""Buffers that map chunks by name: imported memory follows the chunks of its owner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence

from streamalloc.core.internal import Device, StreamLike, close_all, undoing
from streamalloc.vmm.access import Rights
from streamalloc.vmm.generic_allocation import GenericAllocation
from streamalloc.vmm.synchronization import wait_for_users
from streamalloc.vmm.virtual_buffer import VirtualBuffer


class RemappableBuffer(VirtualBuffer):
    """Memory at a constant address; :meth:`set_chunks` replaces the mapped chunks.

    ``offset`` is the offset in bytes of the buffer's first byte in the first chunk.
    """

    __slots__ = ("_lock", "_names", "_offset")

    _names: tuple[Hashable, ...]
    """Names of the mapped chunks, in the order of addresses."""

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._offset = offset
        self._names = ()
        self._lock = threading.Lock()
        self._open(device, capacity, 0, 0, rights, stream)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.range.address + self._offset

    def set_chunks(self, names: Sequence[Hashable], make: Callable[[int], GenericAllocation], nbytes: int) -> None:
        """Map the chunks with these names side by side, and no others. After an error the buffer is unchanged.

        Chunks that are mapped at the same offset already stay mapped. Before a chunk is unmapped, the host waits for
        all work of the devices with access; the caller must hold no lock that another thread needs.

        Parameters
        ----------
        names
            Names of the chunks, in the order of addresses.
        make
            Makes the memory of a new chunk from its index in ``names``. The buffer closes it.
        nbytes
            New size of the buffer in bytes.

        Raises
        ------
        CudaError, ValueError
            Memory cannot be made, or cannot be mapped at its offset.
        """
        wanted = tuple(names)
        made: list[GenericAllocation] = []
        with self._lock, undoing(lambda: close_all(made)):
            pairs = zip(self._names, wanted, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for index in range(same, len(wanted)):
                made.append(make(index))
            entries = list(self.range._node.table())
            staying, going = entries[:same], entries[same:]
            if going:
                wait_for_users(None, self._session, (entry.rights for entry in going))
            before = self._names, self._mapped, self._nbytes
            end = staying[-1].stop if staying else 0
            self._names, self._mapped, self._nbytes = wanted[:same], end, min(nbytes, max(end - self._offset, 0))

            def undo() -> None:
                self.range._node.unmap(self.range._node.touching(end, self.range.nbytes))
                self._map_all(end, [entry.memory for entry in going])
                self._names, self._mapped, self._nbytes = before

            with undoing(undo):
                self.range._node.unmap(going)
                entries = self._map_all(end, made)
                self._mapped = entries[-1].stop if entries else end
                self._names, self._nbytes = wanted, nbytes
                made.clear()  # the buffer owns them now
            for entry in going:
                entry.close()
