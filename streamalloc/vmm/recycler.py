"""Recycling of physical memory, because ``cuMemCreate`` and ``cuMemRelease`` take most of the time of growth."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from streamalloc.core.allocation_properties import MemAllocationProp
from streamalloc.core.errors import ClosedError, CudaError, size_text, undo_all, undoing
from streamalloc.core.internal import Deferred, Device, deferred_queue, session_for
from streamalloc.core.properties import MemHandleType, MemLocation, checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import OwnsHandle, Session
from streamalloc.driver import Driver
from streamalloc.driver.internal import RLock
from streamalloc.vmm.allocation_handles import AllocationHandle, OwnedHandle
from streamalloc.vmm.physical_memory import MemorySpec, PhysicalMemory, properties_for
from streamalloc.vmm.release_order import Kind
from streamalloc.vmm.reservation import MappedBytes

_TILE_POOL = 1  # CU_MEM_CREATE_USAGE_TILE_POOL


class RecyclerStatistics(NamedTuple):
    """Statistics of a :class:`MemoryRecycler`; counts start at its creation."""

    kept: int
    """Bytes that it keeps now."""
    pieces: int
    """Number of allocations that it keeps now."""
    recycled: int
    """Number of requests served with recycled memory."""
    made: int
    """Number of requests served with new memory."""
    released: int
    """Number of allocations released to the driver."""


class MemoryRecycler(Closes):
    """Keeps closed and dropped physical memory for the next user of the same size.

    A recycler has memory of one location with one set of properties. :meth:`take` returns kept memory, or creates new
    memory. Memory returns to the recycler once it is closed or dropped *and* unmapped everywhere. Unmapping waits for
    queued work (see :class:`AddressRange`), so no user gets memory that is still in use.

    :class:`GrowableBuffer` and :func:`stripe` can also use a recycler; then a restore after an eviction creates no
    memory. When a growable buffer shrinks, the unused memory stays mapped until another user takes it or it is
    released, so growing again needs no driver call. ::

        with vmm.MemoryRecycler(device, limit=1 << 30) as recycler:
            page = recycler.take(2 << 20)
            page.close()                      # the recycler keeps it
            page = recycler.take(2 << 20)     # the same memory, no driver call

    Memory that was exported, has a DMA-BUF, is held by another :class:`PhysicalMemory` or is bound to a multicast
    object is released to the driver instead. Handles that other code has retained are not detected.

    Recycled memory has the bytes of its last user in this process.

    Thread-safe. Dropping a recycler closes it. Memory that was taken stays usable, and is released to the driver when
    it is closed.

    Parameters
    ----------
    where, handle_types, compressible, gpu_direct_rdma, driver
        As for :class:`PhysicalMemory`.
    limit
        Most bytes kept; the oldest memory is released first. Memory in use does not count.

    Raises
    ------
    TypeError, ValueError, NotSupportedError
        As for :class:`PhysicalMemory`. Tile pools are not recycled.
    """

    __slots__ = ("__weakref__", "_spec")

    def __init__(
        self,
        where: Device | MemLocation | MemAllocationProp,
        limit: int,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        compressible: bool = False,
        gpu_direct_rdma: bool = False,
        driver: Driver | None = None,
    ) -> None:
        most = checked_size("limit", limit)
        prop = properties_for(where, handle_types, compressible, gpu_direct_rdma)
        if prop.alloc_flags.usage & _TILE_POOL:
            raise ValueError("tile pools are not recycled: arrays may have tiles in them")
        self._spec = RecyclingSpec(session_for(where, driver), prop, most)

    @property
    def location(self) -> MemLocation:
        """Location of its memory."""
        return self._spec.prop.location

    @property
    def properties(self) -> MemAllocationProp:
        """Properties of its memory."""
        return self._spec.prop

    @property
    def granularity(self) -> int:
        """Granularity in bytes: sizes are multiples of it."""
        return self._spec.granularity

    @property
    def driver(self) -> Driver:
        """Driver of the recycled memory."""
        return self._spec.session.driver

    @property
    def limit(self) -> int:
        """The most bytes that it keeps."""
        return self._spec.limit

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._spec.closed

    def take(self, nbytes: int, *, round_up: bool = False) -> PhysicalMemory:
        """Return kept memory, or create new memory (``cuMemCreate``).

        Parameters
        ----------
        nbytes
            Size in bytes, a multiple of :attr:`granularity`. Kept memory is used only if it has exactly this size: the
            driver maps memory as a whole.
        round_up
            Round the size up to the granularity.

        Raises
        ------
        ClosedError
            It was closed.
        OutOfMemoryError
            There is not enough memory, even after all recyclers of this driver have released theirs.
        TypeError, ValueError
            The size is no multiple of the granularity.
        """
        self._check_open()
        spec = self._spec
        return spec.make(spec.checked(nbytes, round_up=round_up))

    def statistics(self) -> RecyclerStatistics:
        """Return its statistics."""
        spec = self._spec
        spec.allocations.work()
        return RecyclerStatistics(spec.kept, len(spec.order), spec.recycled, spec.made, spec.released)

    def trim(self, keep: int = 0) -> int:
        """Release memory to the driver (``cuMemRelease``), the oldest first. Returns the bytes released.

        Parameters
        ----------
        keep
            Most bytes to keep.

        Raises
        ------
        CudaError
            The driver refused to release an allocation, which is attempted again later. The rest was released.
        """
        most = checked_size("keep", keep)
        self._spec.allocations.work()
        return self._spec.trim(most)

    def close(self) -> None:
        """Release all kept memory, and keep none from now on; idempotent."""
        self._spec.closed = True
        self._spec.trim(0)

    def __del__(self) -> None:
        spec = getattr(self, "_spec", None)
        if spec is not None and not spec.closed and spec.session.usable:
            # Memory that was taken keeps the spec alive, and would return to it.
            spec.closed = True
            if spec.order:
                deferred_queue(spec.session).submit(_DroppedRecycler(spec))

    def _text(self) -> str:
        spec = self._spec
        state = "closed" if spec.closed else f"{size_text(spec.kept)} of at most {size_text(spec.limit)}"
        return f" of {spec.prop.location}, {state}"


class _DroppedRecycler(Deferred):
    """The release of all memory that a dropped recycler keeps."""

    __slots__ = ("_spec",)

    def __init__(self, spec: RecyclingSpec) -> None:
        self._spec = spec

    def attempt(self) -> bool:
        self._spec.make_room()
        return True


class UnusedHandle(OwnedHandle):
    """A handle without a user."""

    __slots__ = ("nbytes",)

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(session)
        self.nbytes: int = nbytes
        """Size of the memory in bytes."""


class RecycledHandle(AllocationHandle):
    """A handle that returns to its recycler when the memory is closed and unmapped."""

    __slots__ = ("ends", "nbytes", "recycler", "spare")

    outlasts_mappings: ClassVar[bool] = True

    def __init__(self, recycler: RecyclingSpec) -> None:
        AllocationHandle.__init__(self, recycler.allocations, Kind.MEMORY)
        self.recycler: RecyclingSpec = recycler
        self.nbytes: int = 0
        """Size of the memory in bytes."""
        self.spare: MappedBytes | None = None
        """Mapping behind the end of a shrunken buffer, which may reclaim it."""
        self.ends: bool = False
        """True if the handle must be released to the driver instead of kept."""

    def only_here(self) -> bool:
        """Whether, to this process's knowledge, no other object or process can use the memory."""
        state = self.state
        if state.exported or state.elsewhere or state.teams:
            return False
        return len(state.handles) == 1 and self in state.handles

    def release(self) -> None:
        """Return the handle to the recycler, or call ``cuMemRelease``."""
        if not self.recycler.keep(self):
            AllocationHandle.release(self)
            self.recycler.released += 1


class RecyclingSpec(MemorySpec):
    """Creator of memory of one kind, which prefers recycled memory. It lives as long as memory that may return to it.

    A spare is memory that a buffer has shrunk by and that is still mapped behind the buffer's end. ``_tables`` protects
    the tables; no other lock is taken under it. A thread holds ``_unmapping`` while it unmaps a spare: until then the
    buffer must not map other memory at the addresses of the spare.
    """

    def __init__(self, session: Session, prop: MemAllocationProp, limit: int) -> None:
        super().__init__(session, prop)
        self.limit: int = limit
        """Bytes that may be kept."""
        self.closed: bool = False
        self.kept: int = 0
        """Bytes that are kept."""
        self.by_size: dict[int, dict[UnusedHandle, None]] = {}
        """Kept handles by size in bytes, the oldest first."""
        self.spares: dict[int, dict[RecycledHandle, None]] = {}
        """Handles of mapped spares by size in bytes."""
        self.order: dict[UnusedHandle | RecycledHandle, None] = {}
        """All kept handles and spares, the oldest first."""
        self._tables = RLock()
        self._unmapping = RLock()
        self.recycled: int = 0
        self.made: int = 0
        self.released: int = 0
        self.allocations.recyclers.add(self)

    def unmapped_bytes(self, location: MemLocation) -> int:
        """Bytes of kept memory at a location that has no mapping."""
        with self._tables:
            kept = sum(nbytes * len(several) for nbytes, several in self.by_size.items())
        return kept if self.prop.location == location else 0

    def new_handle(self) -> AllocationHandle:
        """Make a node that returns the handle to the recycler."""
        return RecycledHandle(self)

    def obtain(self, owner: OwnsHandle, nbytes: int) -> None:
        """Store a recycled handle in ``owner._raw``, or create memory."""
        self.session.check_process()
        assert isinstance(owner, RecycledHandle)
        owner.nbytes = nbytes
        self.allocations.work()
        if not self.by_size.get(nbytes) and self.spares.get(nbytes):
            self._unmap_one(nbytes)
        with self._tables:
            kept = self.by_size.get(nbytes)
            if kept:
                one, _ = kept.popitem()
                self.order.pop(one, None)
                self.kept -= nbytes
                owner._raw, one._raw = one._raw, None
                self.recycled += 1
                return
        super().obtain(owner, nbytes)
        self.made += 1

    def keep(self, handle: RecycledHandle) -> bool:
        """Keep a handle for the next user if its memory has no other user; returns whether it was kept."""
        state, nbytes = handle.state, handle.nbytes
        if handle.spare is not None:  # its buffer was dropped
            self.claim(handle)
        if self.closed or handle.ends or nbytes > self.limit or handle._raw is None:
            return False
        if state.mappings or not handle.only_here():
            return False
        one = UnusedHandle(self.session, nbytes)
        with self._tables:
            # The next user of the driver handle gets a new state.
            if self.allocations.by_handle.get(state.handle) is state:
                self.allocations.by_handle.pop(state.handle, None)
            one._raw, handle._raw = handle._raw, None
            handle.gone = True
            self.order[one] = None
            self.by_size.setdefault(nbytes, {})[one] = None
            self.kept += nbytes
        # Another thread may have called close() first.
        self._trim_quietly(0 if self.closed else self.limit)
        return True

    def trim(self, most: int) -> int:
        """Release the oldest memory until ``most`` bytes are left; return the released bytes."""
        given: list[int] = []

        def releases() -> Iterator[Callable[[], object]]:
            while self.kept > most:
                with self._tables:
                    oldest = next(iter(self.order), None)
                if oldest is None:
                    return
                yield functools.partial(lambda one: given.append(self._release(one)), oldest)

        undo_all(releases())
        return sum(given)

    def make_room(self) -> int:
        """Release all kept memory. If the driver refuses a release, it is made later."""
        kept = self.kept
        self._trim_quietly(0)
        return kept

    def _trim_quietly(self, most: int) -> None:
        with contextlib.suppress(CudaError):
            self.trim(most)

    def _release(self, one: UnusedHandle | RecycledHandle) -> int:
        """Release memory to the driver. Returns its bytes, or 0 if another thread has taken it."""
        if isinstance(one, RecycledHandle):
            with self._unmapping:
                mapping = self.claim(one)
                if mapping is None:
                    return 0
                one.ends = True
                self._unmap(one, mapping)
            return one.nbytes
        with self._tables:
            if one not in self.order:
                return 0
            self.by_size[one.nbytes].pop(one, None)
            del self.order[one]
            self.kept -= one.nbytes
            self.released += 1
        deferred_queue(self.session).end(one)
        return one.nbytes

    # -- mapped spares ---------------------------------------------------------------------------------------

    def offer(self, entries: Sequence[MappedBytes]) -> bool:
        """Keep the memory that a buffer has shrunk by, still mapped. Returns whether all of it can be kept.

        Queued work must no longer use the memory. The buffer must claim the memory before it uses it again.
        """
        if self.closed:
            return False
        offered: list[tuple[RecycledHandle, MappedBytes]] = []
        for entry in entries:
            handle = entry.memory._node
            if not isinstance(handle, RecycledHandle) or handle.recycler is not self or handle.given_up:
                return False
            if handle.nbytes > self.limit or len(handle.state.mappings) != 1 or not handle.only_here():
                return False
            offered.append((handle, entry))
        with self._tables:
            for handle, entry in offered:
                self.spares.setdefault(handle.nbytes, {})[handle] = None
                self.order[handle] = None
                self.kept += handle.nbytes
                handle.spare = entry
        self._trim_quietly(0 if self.closed else self.limit)
        return True

    def claim(self, handle: AllocationHandle) -> MappedBytes | None:
        """Remove a spare from the tables and return its mapping; None if another user has taken and unmapped it."""
        with self._unmapping, self._tables:
            if not isinstance(handle, RecycledHandle) or handle.spare is None:
                return None
            mapping, handle.spare = handle.spare, None
            self.spares[handle.nbytes].pop(handle, None)
            self.order.pop(handle, None)
            self.kept -= handle.nbytes
            return mapping

    def _unmap_one(self, nbytes: int) -> None:
        """Unmap one spare of this size, for another user."""
        with self._unmapping, contextlib.suppress(CudaError):
            with self._tables:
                handle = next(iter(self.spares[nbytes]), None)
            mapping = None if handle is None else self.claim(handle)
            if handle is not None and mapping is not None:
                self._unmap(handle, mapping)

    def _unmap(self, handle: RecycledHandle, mapping: MappedBytes) -> None:
        """Unmap a claimed spare. If the driver refuses, the memory stays with the buffer."""
        allocations = self.allocations
        allocations.end(mapping)
        if mapping.gone:
            with undoing(lambda: allocations.drop(handle)):
                allocations.end(handle)


def spec_for(recycler: MemoryRecycler | None, session: Session, prop: MemAllocationProp) -> MemorySpec:
    """Return the spec for a buffer's memory.

    Raises
    ------
    TypeError, ValueError
        The recycler has memory of another location or driver, or with other properties than requested.
    """
    if recycler is None:
        return MemorySpec(session, prop)
    checked_type("recycler", recycler, MemoryRecycler)
    spec = recycler._spec
    if spec.session is not session:
        raise ValueError(f"recycler={recycler!r} belongs to another driver")
    if spec.prop.location != prop.location:
        raise ValueError(f"recycler={recycler!r} has memory of {spec.prop.location}, and {prop.location} was asked for")
    if prop not in (spec.prop, MemAllocationProp(location=prop.location)):
        raise ValueError(f"recycler={recycler!r} makes memory with {spec.prop}: give the properties to it alone")
    if spec.closed:
        raise ClosedError(f"{recycler!r} was closed")
    return spec
