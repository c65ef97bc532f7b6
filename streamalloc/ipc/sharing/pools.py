"""Pools of other processes, which the driver knows here by one handle each."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from streamalloc.core.internal import Deferred, Device, Event, Fd, MemAccess, MemAccessDesc, Session, context_events
from streamalloc.driver.internal import cuda
from streamalloc.ipc.sharing.control_block import ControlBlock

__all__ = ["ImportedPool", "PoolHandle", "PoolHandles"]

_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"


class PoolHandles:
    """The driver's handles of pools of other processes: it has one of each, however often that was imported."""

    def __init__(self, session: Session, lock: contextlib.AbstractContextManager[bool]) -> None:
        self.session = session
        self.lock = lock
        """Held while a pool is imported or let go of."""
        self.known: dict[int, PoolHandle] = {}

    def opened(self, fd: Fd) -> PoolHandle:
        """The pool in a file descriptor (``cuMemPoolImportFromShareableHandle``); :attr:`lock` is held."""
        made = PoolHandle(self)
        name = "cuMemPoolImportFromShareableHandle"
        self.session.create(made, "_raw", name, fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE)
        return self.known.setdefault(int(made.raw), made)


class PoolHandle(Deferred):
    """The driver's handle of a pool of another process.

    It ends once the frees of what was imported have run. The driver waits for nothing then, and what is done with the
    handle afterwards ends the process (driver 580.159).
    """

    __slots__ = ("_events", "_raw", "all", "marks", "users")

    def __init__(self, all: PoolHandles) -> None:
        self.all: PoolHandles = all
        self._raw: Any = None
        self._events: list[Event] | None = None
        self.marks: set[tuple[ControlBlock, int]] = set()
        """What tells that its owner still has it."""
        self.users: weakref.WeakSet[ImportedPool] = weakref.WeakSet()

    @property
    def raw(self) -> Any:
        """The driver's ``CUmemoryPool``."""
        return self._raw

    def ended(self) -> bool:
        """Whether its owner has closed it, or has died, as far as can be known."""
        return not all(block.marked("pool", mark) and block.exporter_alive() for block, mark in self.marks)

    def attempt(self) -> bool:
        session = self.all.session
        if self._events is None:
            self._events = context_events(session, session.ordinals)
        if not all(event.query() for event in self._events):
            return False
        with self.all.lock:
            # Where it was imported anew meanwhile, the driver has the same handle.
            if self._raw is not None and int(self._raw) not in self.all.known:
                session.release(self, "cuMemPoolDestroy")
        return True


class ImportedPool:
    """A pool of another process. It makes allocations of it known here; nothing can be allocated from it."""

    __slots__ = ("__weakref__", "_pool", "device")

    device: Device
    """The device that has the memory."""

    def __init__(self, pool: PoolHandle, device: Device) -> None:
        self._pool = pool
        self.device = device
        pool.users.add(self)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number."""
        return int(self._pool.raw)

    @property
    def _session(self) -> Session:
        return self._pool.all.session

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Let another device of this process use the pool's memory (``cuMemPoolSetAccess``)."""
        descriptor = MemAccessDesc(device.location, access).to_driver()
        self._session.call("cuMemPoolSetAccess", self._pool.raw, [descriptor], 1)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.handle:#x} on device {self.device.ordinal}>"
