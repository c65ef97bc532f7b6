"""Reserved address ranges and their mappings: the nodes of the ownership tree behind :class:`AddressRange`.

A :class:`MappedBytes` is one mapping. If a buffer creates memory for itself, the mapping also owns the memory's handle.
If the memory is needed as an object, a :class:`PhysicalMemory` is made, which takes the handle over.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

from streamalloc.core.errors import NO_SWITCH_RESOURCES, CudaError, OutOfMemoryError, size_text, undo_all, undoing
from streamalloc.core.internal import Fence, HandleEnd
from streamalloc.core.properties import MemAccess, checked_number
from streamalloc.core.session import Session
from streamalloc.vmm.access import After, Rights, accessing, structs_of, wait_for_users
from streamalloc.vmm.ownership import (
    AllocationHandle,
    Allocations,
    AllocationState,
    GenericAllocation,
    HandleNode,
    Node,
    allocations_of,
)

START, STOP = attrgetter("offset"), attrgetter("stop")


class MappedBytes(Node):
    """One mapping in a reserved range. Its release calls ``cuMemUnmap``, and ``cuMemRelease`` if the mapping owns the
    handle.

    ======================  ===========  ============  ========  ==================================================
    State                   ``_raw``     ``_memory``   ``gone``  Who releases the memory
    ======================  ===========  ============  ========  ==================================================
    new                     None         None          False     nobody: :meth:`map` creates it
    the mapping owns the    the handle   None          False     :meth:`release`, or :meth:`release_handle` after an
    handle                                                       unmap
    an object owns the      None         the object    False     the object; :meth:`release` only unmaps, and
    handle                                                       :meth:`release_handle` closes the object
    retained                a handle of  the object    False     each of the two its own handle;
                            its own                              :meth:`release_handle` both
    unmapped, to be mapped  a handle     the object    True      as before the unmap
    again                                or None
    gone                    None         the object    True      nobody, or the object
                                         or None
    ======================  ===========  ============  ========  ==================================================

    The mapping becomes that of an object by :meth:`as_object`, and then by :meth:`retain` a retained one. Once the
    range was closed or dropped, ``_memory`` is None. The finaliser releases a handle that is left in ``_raw``.
    """

    __slots__ = ("_memory", "_raw", "offset", "reservation", "rights", "spec", "state", "stop")

    state: AllocationState
    """State of the memory. Set only if an object has the handle."""

    def __init__(self, reservation: Reservation, offset: int, stop: int, rights: Rights, spec: Any = None) -> None:
        super().__init__()
        self.reservation: Reservation = reservation
        self.offset: int = offset
        """Offset of the mapping in the range, in bytes."""
        self.stop: int = stop
        """Offset of the end of the mapping in the range, in bytes."""
        self.rights: Rights = rights
        """Permissions by location. Do not modify this dictionary, because several mappings share it."""
        self.spec: Any = spec
        """:class:`MemorySpec` of the memory; None for a multicast object."""
        self._memory: GenericAllocation | None = None
        """The object that owns the handle; None if the mapping owns it."""
        self._raw: Any = None
        """The driver's handle of the memory; None if an object owns it."""

    @property
    def allocations(self) -> Allocations:  # type: ignore[override]
        """State of the driver."""
        return self.reservation.allocations

    @property
    def address(self) -> int:
        """First address. Only for a range that is not released."""
        return int(self.reservation._raw) + self.offset

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.offset

    def as_object(self) -> GenericAllocation:
        """Return the mapped :class:`PhysicalMemory` or multicast object, which may be closed. If the mapping owns the
        handle, the call makes a new :class:`PhysicalMemory` and hands the handle over to it.
        """
        return self.spec.object_of(self) if self._memory is None else self._memory

    @property
    def mark(self) -> str:
        """One character for the memory in drawings of an address range."""
        return self.spec.mark if self._memory is None else self._memory._mark

    @property
    def alone(self) -> bool:
        """Whether only this mapping owns a handle of its memory in this process, so that its release frees the
        memory.
        """
        raw = self._raw
        return raw is not None and int(raw) not in self.reservation.allocations.by_handle

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices with access, without the host."""
        return accessing((self.rights,))

    def before(self) -> Collection[Node]:
        """Return the multicast objects that the memory is bound to; for a mapping of such an object, its bindings."""
        if not hasattr(self, "state"):
            return ()
        objects = list(self.state.objects)
        return [node for one in objects for node in one.bound()] if self.state.is_object else objects

    def map(self) -> None:
        """Map the memory, without permissions (``cuMemMap``), and notify the watchers. If neither an object nor the
        mapping has a handle yet, create the memory first (``cuMemCreate``). Raises ClosedError, CudaError, and the
        errors of watchers.
        """
        allocations, memory, mapped = self.allocations, self._memory, False
        try:
            if memory is not None:
                self.state = memory._node.state
                self.state.mappings[self] = None
            elif self._raw is None:
                self.spec.create(self, self.nbytes)
            raw = memory._checked_raw() if memory is not None and self._raw is None else self._raw
            allocations.session.call("cuMemMap", self.address, self.nbytes, 0, raw, 0)
            mapped = True
            for watcher in allocations.watchers:
                watcher.mapped(self.address, self.as_object())
        except CudaError as error:
            if not mapped:
                if memory is not None and self.state.is_object and isinstance(error, OutOfMemoryError):
                    error.hint = NO_SWITCH_RESOURCES
                self.forget()
            raise

    def retain(self) -> None:
        """Get a handle of the memory (``cuMemRetainAllocationHandle``) unless the mapping owns one. The memory then
        still exists after it is unmapped, even if its object was closed. Raises CudaError.
        """
        if self._raw is None:
            self._raw = self.allocations.session.call("cuMemRetainAllocationHandle", self.address)

    def map_again(self) -> None:
        """Map the memory again after :meth:`retain` and an unmap, without permissions (``cuMemMap``). Do nothing if the
        memory is mapped. Raises CudaError.
        """
        if self.gone:
            self.reservation.add(self)
            self.gone = False
            with undoing(self.forget):
                self.map()

    def unmap(self) -> None:
        """Unmap the memory (``cuMemUnmap``), and notify the watchers. After a signal handler has raised, the call can
        be repeated: the driver accepts addresses that are unmapped already. Raises CudaError.
        """
        self.allocations.session.call("cuMemUnmap", self.address, self.nbytes)
        self.forget()

    def release(self) -> None:
        """Unmap the memory (``cuMemUnmap``), then release the handle if the mapping owns it (``cuMemRelease``). Raises
        CudaError; the finaliser then releases the handle.
        """
        if not self.gone:
            self.unmap()
        self.allocations.session.release(self, "cuMemRelease")

    def release_handle(self) -> None:
        """After the unmap, release the memory: the handle of this mapping, and that of its memory object
        (``cuMemRelease``). Errors of the driver are hidden, because the owner's finaliser tries again.
        """
        with contextlib.suppress(CudaError):
            self.allocations.session.release(self, "cuMemRelease")
            if self._memory is not None:
                self._memory.close()

    def forget(self) -> None:
        """Record that the memory is unmapped: notify the watchers, and remove the mapping from the range's list and
        from the state of the memory. Idempotent.
        """
        allocations = self.allocations
        if allocations.watchers and not self.gone:
            for watcher in allocations.watchers:
                watcher.unmapped(self.address)
        self.gone = self.reservation.stale = True
        state = getattr(self, "state", None)
        if state is not None:
            state.mappings.pop(self, None)
            allocations.forget(state)

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)
        if raw is not None:
            allocations = self.reservation.allocations
            if allocations.session.usable:
                self._raw = None
                allocations.deferred.submit(HandleEnd(allocations.session, "cuMemRelease", raw))


class Reservation(HandleNode):
    """A reserved address range, which owns its mappings, and is released by ``cuMemAddressFree``. :attr:`raw` is its
    first address.
    """

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(allocations_of(session))
        self.nbytes: int = nbytes
        self.entries: list[MappedBytes] = []
        """Mappings in the order of addresses; if :attr:`stale`, also unmapped ones. The list object is never
        replaced.
        """
        self.stale: bool = False
        """Whether :attr:`entries` has unmapped entries."""
        self.copies: Fence | None = None
        """Fence for the last copies to the range; None if there were none. The streams of these copies may be unknown
        to a :class:`Fence` that is made when the range is dropped.
        """
        self.objects: dict[AllocationHandle, None] = {}
        """Multicast objects that were mapped here, or that had memory which was mapped here, when the range was closed
        or dropped.
        """

    def table(self) -> list[MappedBytes]:
        """Remove unmapped entries, and return the mappings in the order of addresses. Do not change the list: it is the
        range's own.
        """
        if self.stale:
            self.stale = False  # Before the scan, because an unmap on another thread during it sets the mark again.
            try:
                self.entries[:] = [entry for entry in self.entries if not entry.gone]
            except BaseException:
                self.stale = True
                raise
        return self.entries

    def add(self, entry: MappedBytes) -> None:
        """Add an entry to :attr:`entries` before its memory is mapped, so that an exception of a signal handler cannot
        lose the mapping.
        """
        entries = self.table()
        at = len(entries)
        if entries and entries[-1].stop > entry.offset:
            at = bisect_left(entries, entry.offset, key=START)
        entries.insert(at, entry)

    def map(self, entries: Iterable[MappedBytes], rights: Rights) -> list[MappedBytes]:
        """Map new adjacent entries (``cuMemMap``), and set their permissions in one call (``cuMemSetAccess``). If a
        call fails, no entry stays mapped. Each entry is mapped before the next is read from the iterator. Returns the
        entries. Raises ClosedError, CudaError, and the errors of the iterator and of watchers.
        """
        made: list[MappedBytes] = []
        with undoing(lambda: undo_all(entry.release for entry in made)):
            for entry in entries:
                made.append(entry)
                self.add(entry)
                entry.map()
            self.grant(made, rights)
        return made

    def touching(self, start: int, stop: int) -> list[MappedBytes]:
        """Return the mappings that overlap the bytes between two offsets, in the order of addresses."""
        entries = self.table()
        if start >= stop or not entries or entries[-1].stop <= start:
            return []
        return overlapping(entries, start, stop)

    def bounds(self, start: int, stop: int | None) -> tuple[int, int]:
        """Return ``start`` and ``stop``, offsets in bytes, after a check; None as ``stop`` becomes the range's end.
        Raises TypeError, and ValueError for offsets outside of the range.
        """
        begin, end = checked_number("start", start), self.nbytes if stop is None else checked_number("stop", stop)
        if not begin <= end <= self.nbytes:
            raise ValueError(f"start={begin}, stop={end}: the range has {size_text(self.nbytes)}")
        return begin, end

    def within(self, start: int, stop: int | None) -> list[MappedBytes]:
        """Return the mappings between two offsets (bytes; None for the range's end). Raises TypeError, and ValueError
        if an offset is outside of the range, or inside of a mapping: the driver only changes whole mappings.
        """
        begin, end = self.bounds(start, stop)
        entries = self.touching(begin, end)
        if entries and (entries[0].offset < begin or entries[-1].stop > end):
            raise ValueError(f"start={begin}, stop={end} cuts a mapping: the driver takes whole ones only")
        return entries

    def grant(self, entries: Sequence[MappedBytes], rights: Rights) -> None:
        """Set the permissions ``rights`` of adjacent mappings in one call (``cuMemSetAccess``). Make no call if
        ``entries`` or ``rights`` is empty. Raises CudaError.
        """
        if not (entries and rights):
            return
        start, structs = entries[0].offset, structs_of(rights)
        address = int(self._raw) + start
        self.allocations.session.call("cuMemSetAccess", address, entries[-1].stop - start, structs, len(structs))
        for entry in entries:
            entry.rights = {**entry.rights, **rights}

    def set_rights(self, entries: Sequence[MappedBytes], rights: Rights, after: After) -> None:
        """Set the permissions ``rights`` of adjacent mappings (``cuMemSetAccess``). After an error no permission has
        changed. If a device loses a permission, the host first waits for ``after``; None means all work of this device.
        Raises NotSupportedError, CudaError, and the errors of :func:`~streamalloc.vmm.access.wait_for_users`.
        """
        for entry in entries:
            if entry._memory is not None:  # None: a buffer, which checks itself.
                entry._memory._check_access(rights)
        losing = [
            {where: had for where, had in entry.rights.items() if had & ~rights.get(where, had)} for entry in entries
        ]
        if accessing(losing):
            wait_for_users(after, self.allocations.session, losing)
        before = [{where: entry.rights.get(where, MemAccess.NONE) for where in rights} for entry in entries]
        # Driver 580 may change some mappings in a call that it refuses.
        undos = [functools.partial(self.grant, (entry,), had) for entry, had in zip(entries, before, strict=True)]
        with undoing(lambda: undo_all(undos)):
            self.grant(entries, rights)

    def unmap(self, entries: Iterable[MappedBytes]) -> None:
        """Unmap mappings, which are given in the order of addresses, by one ``cuMemUnmap`` for each run of adjacent
        mappings. Raises CudaError; runs before the error stay unmapped.
        """
        run: list[MappedBytes] = []
        for entry in entries:
            if run and run[-1].stop != entry.offset:
                self._unmap_run(run)
                run = []
            run.append(entry)
        if run:
            self._unmap_run(run)

    def _unmap_run(self, run: list[MappedBytes]) -> None:
        start, stop = run[0].offset, run[-1].stop
        try:
            self.allocations.session.call("cuMemUnmap", int(self._raw) + start, stop - start)
            for entry in run:
                entry.forget()
        except CudaError:
            raise
        except BaseException:
            # If a signal handler raised, the driver may or may not have unmapped the run, so it is unmapped again. The
            # handles stay open, so that the caller can map the memory again.
            for entry in run:
                (entry.forget if entry.gone else entry.unmap)()
            raise

    def _live(self) -> list[MappedBytes]:
        return [entry for entry in list(self.entries) if not entry.gone]

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices with access to a mapping."""
        return {device for entry in self._live() for device in entry.users}

    def in_use(self) -> bool:
        """Return whether work may still use the range: the work of :meth:`Node.in_use`, or the last copies to the
        range.
        """
        return super().in_use() or (self.copies is not None and not self.copies.done())

    def give_up(self) -> None:
        """Record that the owner was closed or dropped, also for the mappings, whose memory objects have their own
        finalisers. The range then waits for the multicast objects that are mapped or have mapped memory.
        """
        for entry in () if self.given_up else self._live():
            entry.given_up, entry._memory = True, None
            self.objects.update(entry.state.objects if hasattr(entry, "state") else {})
        super().give_up()

    def before(self) -> Collection[Node]:
        """Return the multicast objects in :attr:`objects`, and the handles of all memory that was bound to them."""
        states = [state for one in list(self.objects) for state in list(one.members)]
        return [*self.objects, *(handle for state in states for handle in list(state.handles))]

    def owned(self) -> Sequence[Node]:
        """Return all mappings, in the order of addresses."""
        return self._live()

    def release(self) -> None:
        """Free the addresses (``cuMemAddressFree``) if nothing is mapped any more. Raises CudaError."""
        if not self._live():
            self.release_by("cuMemAddressFree", self.nbytes)

    def forget(self) -> None:
        """Remove the range from the table of reservations, and break its reference cycle with its entries. Entries that
        are still mapped count as unmapped from now on. There are such entries only if the context no longer exists.
        """
        super().forget()
        for entry in self._live():
            entry.gone = True  # It ended with the context.
        self.allocations.reservations.pop(self, None)
        self.entries.clear()


def overlapping(entries: list[MappedBytes], start: int, stop: int) -> list[MappedBytes]:
    """Return those of ``entries``, which are sorted by address, that overlap the bytes between two offsets."""
    return entries[bisect_right(entries, start, key=STOP) : bisect_left(entries, stop, key=START)]
