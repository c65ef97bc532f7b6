"""Imported pools of other processes."""

from __future__ import annotations

import os

from .banks import Banks
from .blocks import Block
from .constants import CHUNK, READ_WRITE, Handle, Place, new_handle
from .errors import check, operating_system
from .files import Label
from .memory import Physical, Reservation
from .timeline import Operation, Stream

_VIEW = 16 << 30
"""Bytes of another process's pool that get addresses at first."""


class ImportedPool:
    """A pool of another process. Its allocations have the same offsets here, at addresses of this process."""

    managed = False
    handle_types = Handle.NONE  # an imported pool cannot be exported again (observed on H200: test_sharing)

    def __init__(self, banks: Banks, label: Label, fd: int) -> None:
        self._arenas = banks.arenas
        self.handle: int = new_handle()
        self.serial: int = int(label.serial, 16)
        self.place: Place = label.place
        self.device: int = label.place.id
        self.access: dict[int, int] = {}
        self.imports: int = 0
        """Allocations of it that are imported now."""
        self._freed: dict[int, tuple[Stream, int]] = {}
        """By stream: the last free of an import."""
        physical = Physical.adopt(os.dup(fd))
        self._whole = physical.size
        try:
            # The file is sparse, and what the owner's pool grows by is there. Most pools are far smaller than their
            # device, and a process has addresses for some hundred of these only.
            self._views = [Reservation(min(self._whole, _VIEW), CHUNK)]
            self._views[0].map(self._views[0].base, self._views[0].size, physical, 0)
        finally:
            physical.close()
        self._arenas.add(self._views[0])

    def address(self, offset: int, size: int) -> int:
        """Always the same address for the same memory."""
        check(offset + size <= self._whole)
        if offset + size > self._views[-1].size:
            with operating_system():
                view = Reservation(self._whole, CHUNK)
                view.map_again(self._views[0])
            self._views.append(view)
            self._arenas.add(view)
        return next(view for view in self._views if offset + size <= view.size).base + offset

    @property
    def granted(self) -> bool:
        return True  # it is device memory

    def accessible(self, device: int) -> bool:
        """Whether work of ``device`` may touch this memory."""
        return device == self.device or self.access.get(device, 0) == READ_WRITE

    def give_back(self, block: Block, size: int, stream: Stream) -> None:
        """Free an imported allocation, in stream order, in this process only."""
        self.imports -= 1
        self._freed[stream.id] = (stream, stream.submit(Operation()))

    def give_back_now(self, block: Block) -> None:
        """The same as cuMemFree does it."""
        self.imports -= 1

    @property
    def is_touched(self) -> bool:
        """Whether queued work may use an imported allocation."""
        return any(stream.done < seq for stream, seq in self._freed.values())

    def close(self) -> None:
        for view in self._views:
            self._arenas.remove(view)
            view.close()
