"""Physical memory that is kept for whoever needs some next: making and releasing it is most of what growth costs."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from typing_extensions import Self

from streamalloc.core.internal import (
    ClosedError,
    Closes,
    CudaError,
    Deferred,
    Device,
    MemAllocationProp,
    MemHandleType,
    MemLocation,
    OwnsHandle,
    Session,
    checked_size,
    deferred_queue,
    session_for,
    size_text,
)
from streamalloc.driver import Driver
from streamalloc.vmm.allocations import AllocationHandle
from streamalloc.vmm.physical_memory import MemorySpec, PhysicalMemory, properties_for
from streamalloc.vmm.release_order import Kind
from streamalloc.vmm.reservation import MappedBytes

__all__ = ["MemoryRecycler", "RecyclerStatistics", "RecyclingSpec", "spec_for"]

_TILE_POOL = 1


class RecyclerStatistics(NamedTuple):
    """Figures of a :class:`MemoryRecycler`; those that count do so from its making on."""

    kept: int
    """How many bytes it keeps now."""
    pieces: int
    """How many pieces of physical memory these are."""
    recycled: int
    """How often memory was taken that it had."""
    made: int
    """How often the driver had to make some."""
    released: int
    """How many pieces went back to the driver: beyond the limit, trimmed, or not fit to be handed out again."""


class MemoryRecycler(Closes):
    """Keeps physical memory that was closed or dropped, for whoever needs some of the same size next.

    It has memory of one kind: of one place, made with the same properties. :meth:`take` gives what it has, or else asks
    the driver. What was taken comes back by itself once it is closed or dropped *and* unmapped everywhere, whoever
    mapped it; unmapping waits for work that uses it, see :class:`AddressRange`, so that nobody gets memory that is
    still in use. :class:`GrowableBuffer` and :func:`stripe` take from it, too: restoring after an eviction then asks
    for no new memory. What a growable buffer shrinks by is kept where it is mapped, until somebody else takes it or it
    goes back to the driver: growing again needs no driver call.

    Memory that was exported, for which there is a DMA-BUF, which another :class:`PhysicalMemory` holds too, or which is
    bound to a multicast object, goes back to the driver instead. Other code that has retained the driver's handle by
    itself is not seen.

    What is taken holds the bytes that it had, which are those of other users of this process.

    It may be used from several threads at once. Dropping it closes it. What is taken stays usable then, and is released
    to the driver once it is closed.

    Parameters
    ----------
    where, handle_types, compressible, gpu_direct_rdma, driver
        As for :class:`PhysicalMemory`.
    limit
        The most bytes that it keeps; what was kept longest goes back to the driver first. Memory that is in use does
        not count.

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
        """Where its memory is."""
        return self._spec.prop.location

    @property
    def properties(self) -> MemAllocationProp:
        """What its memory is made with."""
        return self._spec.prop

    @property
    def granularity(self) -> int:
        """What sizes must be a multiple of, in bytes."""
        return self._spec.granularity

    @property
    def driver(self) -> Driver:
        """The driver that it belongs to."""
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
        """Physical memory: some that it keeps, or else new (``cuMemCreate``).

        Parameters
        ----------
        nbytes
            Size in bytes, a multiple of :attr:`granularity`. Only memory of just this size is taken from what is kept:
            the driver maps memory as a whole.
        round_up
            Round the size up to such a multiple.

        Raises
        ------
        ClosedError
            It was closed.
        OutOfMemoryError
            There is no memory, also after all recyclers of this driver gave back what they kept.
        TypeError, ValueError
            The size is no multiple of the granularity.
        """
        spec = self._spec
        if spec.closed:
            raise ClosedError(f"{self!r} was closed")
        return spec.make(spec.checked(nbytes, round_up=round_up))

    def statistics(self) -> RecyclerStatistics:
        """What it keeps, and what has gone through it."""
        spec = self._spec
        spec.allocations.work()
        return RecyclerStatistics(spec.kept, len(spec.order), spec.recycled, spec.made, spec.released)

    def trim(self, keep: int = 0) -> int:
        """Give memory back to the driver (``cuMemRelease``), what was kept longest first; how many bytes.

        Parameters
        ----------
        keep
            How many bytes to keep at most.

        Raises
        ------
        CudaError
            The driver refused to release something, which is tried again later. The rest was given back.
        """
        most = checked_size("keep", keep)
        self._spec.allocations.work()
        return self._spec.trim(most)

    def close(self) -> None:
        """Give back what it keeps, and keep nothing from now on. Idempotent."""
        self._spec.closed = True
        self._spec.trim(0)

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError(f"{self!r} was closed")
        return self

    def __repr__(self) -> str:
        spec = getattr(self, "_spec", None)
        if spec is None:
            return f"<{type(self).__name__} that could not be made>"
        state = "closed" if spec.closed else f"{size_text(spec.kept)} of at most {size_text(spec.limit)}"
        return f"<{type(self).__name__} of {spec.prop.location}, {state}>"


class Kept(Deferred):
    """A handle that nobody uses. Dropping it gives the memory back."""

    __slots__ = ("_raw", "_session", "nbytes")

    def __init__(self, session: Session, nbytes: int) -> None:
        self._session = session
        self._raw: Any = None
        self.nbytes: int = nbytes

    def attempt(self) -> bool:
        """``cuMemRelease``."""
        self._session.release(self, "cuMemRelease")
        return True

    def forget(self) -> None:
        """The driver has ended."""
        self._raw = None

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and self._session.usable:
            deferred_queue(self._session).submit(self)


class Spare:
    """Memory that a buffer has shrunk by, and has mapped still. It can have it back."""

    __slots__ = ("handle", "mapping", "nbytes")

    def __init__(self, handle: RecycledHandle, mapping: MappedBytes) -> None:
        self.handle: RecycledHandle = handle
        self.mapping: MappedBytes = mapping
        self.nbytes: int = handle.nbytes


class RecycledHandle(AllocationHandle):
    """A handle that goes to a recycler once nobody uses the memory any more."""

    __slots__ = ("ends", "nbytes", "recycler", "spare")

    outlasts_mappings: ClassVar[bool] = True

    def __init__(self, recycler: RecyclingSpec) -> None:
        AllocationHandle.__init__(self, recycler.allocations, Kind.MEMORY)
        self.recycler: RecyclingSpec = recycler
        self.nbytes: int = 0
        self.spare: Spare | None = None
        """As what the recycler has it while it is mapped."""
        self.ends: bool = False
        """Whether it is to be given back to the driver."""

    def only_here(self) -> bool:
        """Whether nobody else can have the memory, as far as can be known."""
        state = self.state
        if state.exported or state.elsewhere or state.bindings or state.teams:
            return False
        return len(state.handles) == 1 and self in state.handles

    def release(self) -> None:
        """Keep it for others, or ``cuMemRelease``."""
        if not self.recycler.keep(self):
            AllocationHandle.release(self)
            self.recycler.released += 1


class RecyclingSpec(MemorySpec):
    """Makes memory of one kind, or takes what it keeps. It stays as long as memory that may come back to it.

    Handles are moved by lines that call nothing: no other thread and no signal handler comes between them, so that each
    handle has one owner at any time. The lock is held where something is unmapped that belongs to a buffer, which must
    not map anything there meanwhile.
    """

    __slots__ = ("_lock", "by_size", "closed", "kept", "limit", "made", "order", "recycled", "released", "spares")

    def __init__(self, session: Session, prop: MemAllocationProp, limit: int) -> None:
        super().__init__(session, prop)
        self.limit: int = limit
        self.closed: bool = False
        self.kept: int = 0
        """How many bytes there are."""
        self.by_size: dict[int, deque[Kept]] = {}
        """What is kept, of each size the longest first."""
        self.spares: dict[int, dict[Spare, None]] = {}
        """What buffers can have back, by size."""
        self.order: dict[Kept | Spare, None] = {}
        """All of it, what was kept longest first."""
        self._lock = threading.RLock()
        self.recycled: int = 0
        self.made: int = 0
        self.released: int = 0
        self.allocations.keepers.add(self)

    def new_handle(self) -> AllocationHandle:
        """What brings the memory back."""
        return RecycledHandle(self)

    def obtain(self, owner: OwnsHandle, nbytes: int) -> None:
        """Have ``owner`` hold memory that is kept, or else new memory."""
        self.session.check_process()
        assert isinstance(owner, RecycledHandle)
        handle = owner
        handle.nbytes = nbytes
        self.allocations.work()
        kept = self.by_size.get(nbytes)
        if not kept and self.spares.get(nbytes):
            self._unmap_one(nbytes)
            kept = self.by_size.get(nbytes)
        if kept:
            one = kept[-1]
            del kept[-1]
            del self.order[one]
            handle._raw = one._raw
            one._raw = None
            self.kept -= nbytes
            self.recycled += 1
            return
        super().obtain(handle, nbytes)
        self.made += 1

    def keep(self, handle: RecycledHandle) -> bool:
        """Take a handle over, if others may have the memory; whether they may."""
        state, nbytes = handle.state, handle.nbytes
        if handle.spare is not None:  # its buffer was dropped
            self.claim(handle)
        if self.closed or handle.ends or nbytes > self.limit or handle._raw is None:
            return False
        if state.mappings or not handle.only_here():
            return False
        known = self.allocations.by_handle
        one = Kept(self.session, nbytes)
        pieces = self.by_size.setdefault(nbytes, deque())
        # Nothing is called from here on until the handle is kept. Nobody finds what is known of it any more.
        if state.handle in known and known[state.handle] is state:
            del known[state.handle]
        one._raw = handle._raw
        handle._raw = None
        handle.gone = True
        self.order[one] = None
        pieces += (one,)
        self.kept += nbytes
        # A close on another thread may have come before.
        self._trim_quietly(0 if self.closed else self.limit)
        return True

    def trim(self, most: int) -> int:
        """Give back what was kept longest until ``most`` bytes are left; how many bytes."""
        given = 0
        first: CudaError | None = None
        try:
            while self.kept > most:
                one = self._longest()
                if one is None:
                    break
                try:
                    given += self._give_back(one)
                except CudaError as error:
                    first = first or error
            if first is not None:
                raise first
        finally:
            # A frame that knows its own error would keep all that its callers hold.
            del first
        return given

    def make_room(self) -> int:
        """Give back everything, for others that find no memory; what the driver refuses is tried again later."""
        kept = self.kept
        self._trim_quietly(0)
        return kept

    def _trim_quietly(self, most: int) -> None:
        with contextlib.suppress(CudaError):
            self.trim(most)

    def _longest(self) -> Kept | Spare | None:
        for one in self.order:
            return one
        return None

    def _give_back(self, one: Kept | Spare) -> int:
        """Give back what was kept longest; how many bytes. Another thread may have been faster."""
        if isinstance(one, Spare):
            with self._lock:
                if not self.claim(one.handle):
                    return 0
                one.handle.ends = True
                self._unmap(one)
            return one.nbytes
        # Nothing is called from here on until it has left both tables.
        if one not in self.order:
            return 0
        del self.by_size[one.nbytes][0]
        del self.order[one]
        self.kept -= one.nbytes
        self.released += 1
        deferred_queue(self.session).end(one)
        return one.nbytes

    # -- what stays mapped -----------------------------------------------------------------------------------

    def offer(self, entries: Sequence[MappedBytes]) -> bool:
        """Keep memory of a buffer that has shrunk where it is mapped; whether that can be done with all of it.

        Its work was waited for, and the buffer does not use it unless it claims it.
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
        for handle, mapping in offered:
            spare = Spare(handle, mapping)
            spares = self.spares.setdefault(spare.nbytes, {})
            # Nothing is called from here on.
            spares[spare] = None
            self.order[spare] = None
            self.kept += spare.nbytes
            handle.spare = spare
        self._trim_quietly(0 if self.closed else self.limit)
        return True

    def claim(self, handle: AllocationHandle) -> bool:
        """Have memory back that was offered; False where somebody else has it, and it is unmapped by now."""
        with self._lock:
            spare = handle.spare if isinstance(handle, RecycledHandle) else None
            if spare is None:
                return False
            # Nothing is called from here on.
            del self.spares[spare.nbytes][spare]
            del self.order[spare]
            self.kept -= spare.nbytes
            spare.handle.spare = None
            return True

    def _unmap_one(self, nbytes: int) -> None:
        """Unmap memory of this size that a buffer could have back, for somebody else."""
        with self._lock, contextlib.suppress(CudaError):
            for spare in self.spares[nbytes]:
                self.claim(spare.handle)
                self._unmap(spare)
                return

    def _unmap(self, spare: Spare) -> None:
        """Unmap memory that was claimed. What the driver refuses is left to the buffer."""
        allocations = self.allocations
        allocations.end(spare.mapping)
        if spare.mapping.gone:
            try:
                allocations.end(spare.handle)
            except CudaError:
                allocations.drop(spare.handle)
                raise


def spec_for(recycler: MemoryRecycler | None, session: Session, prop: MemAllocationProp, *, asked: bool) -> MemorySpec:
    """How a buffer makes its memory: as a recycler does where there is one. ``asked``: for more than its place.

    Raises
    ------
    TypeError, ValueError
        The recycler has memory of another place or driver, or the properties were given beside it.
    """
    if recycler is None:
        return MemorySpec(session, prop)
    if not isinstance(recycler, MemoryRecycler):
        raise TypeError(f"recycler must be a MemoryRecycler, not {type(recycler).__name__} ({recycler!r})")
    spec = recycler._spec
    if spec.session is not session:
        raise ValueError(f"recycler={recycler!r} belongs to another driver")
    if spec.prop.location != prop.location:
        raise ValueError(f"recycler={recycler!r} has memory of {spec.prop.location}, and {prop.location} was asked for")
    if asked and spec.prop != prop:
        raise ValueError(f"recycler={recycler!r} makes memory with {spec.prop}: give the properties to it alone")
    if spec.closed:
        raise ClosedError(f"{recycler!r} was closed")
    return spec
