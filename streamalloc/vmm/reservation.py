"""Reserved addresses and what is mapped there: where it lies, who may use it, and how it is undone.

A :class:`MappedBytes` is one mapping. Memory that a buffer makes for itself is nothing else until somebody asks for it
as an object: the mapping holds the driver's handle, and one record stands for the handle, the mapping and the access.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from streamalloc.core.internal import (
    CudaError,
    HandleEnd,
    InvalidValueError,
    MemAccess,
    Session,
    attach,
    checked_size,
    error_from,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.vmm.access import Rights, structs_of
from streamalloc.vmm.allocations import AllocationState, HandleNode, allocations_of
from streamalloc.vmm.generic_handle import GenericAllocation
from streamalloc.vmm.release_order import NOTHING, Kind, Node
from streamalloc.vmm.waiting import After, accessing, wait

__all__ = ["MappedBytes", "MappedObject", "Reservation"]

_BEGINNING, _END = attrgetter("offset"), attrgetter("stop")


class MappedBytes(Node):
    """Memory that is mapped at one place of a range: ``cuMemUnmap``, and ``cuMemRelease`` where the handle is here."""

    __slots__ = ("_memory", "_raw", "offset", "reservation", "rights", "state", "stop")

    kind = Kind.MAPPING

    state: AllocationState
    """What is known of the memory; set where an object holds that."""

    def __init__(self, reservation: Reservation, offset: int, stop: int, rights: Rights) -> None:
        # What the class above does, without calling it: a buffer that grows makes one of these for each step.
        self.given_up = self.gone = self._busy = False
        self._first = self._then = NOTHING
        self.reservation: Reservation = reservation
        self.offset: int = offset
        self.stop: int = stop
        self.rights: Rights = rights
        """Who was given which access; never changed in place, as the mappings of a buffer have the same."""
        self._memory: GenericAllocation | None = None
        self._raw: Any = None
        """The handle of the memory, where there is no object that holds it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.offset

    @property
    def live(self) -> bool:
        """Whether it is mapped, or about to be."""
        return not self.gone

    @property
    def memory(self) -> GenericAllocation:
        """The memory as an object, which may have been closed since; from then on that has the handle."""
        return self.reservation.maker.adopt(self) if self._memory is None else self._memory

    @property
    def mark(self) -> str:
        """The character that stands for the memory where a range is drawn."""
        return self.reservation.maker.mark if self._memory is None else self._memory._mark

    @property
    def alone(self) -> bool:
        """Whether nothing but this holds the memory, as far as is known."""
        raw = self._raw
        return raw is not None and int(raw) not in self.reservation.allocations.by_handle

    @property
    def held(self) -> bool:
        """Whether the memory outlasts the mapping, as there is a handle of it here or in the object."""
        return self._raw is not None or (self._memory is not None and not self._memory.closed)

    @property
    def users(self) -> set[int]:
        """The devices that have access."""
        return accessing((self.rights,))

    def hold(self, memory: GenericAllocation) -> None:
        """Have memory that is an object: put this behind or before what has to do with multicast."""
        handle = memory._node
        order = self.reservation.allocations.order
        self._memory, self.state = memory, handle.state
        if handle._first:
            for first in order.before(handle, Kind.BINDING if self.kind is Kind.OBJECT_MAPPING else Kind.OBJECT):
                order.relate(first, self)
        if handle.outlasts_mappings or self.kind is Kind.OBJECT_MAPPING:
            order.relate(self, handle)
        handle.state.mappings[self] = None

    def map(self, raw: Any) -> None:
        """``cuMemMap``, by a handle of the memory."""
        allocations = self.reservation.allocations
        place = int(self.reservation._raw) + self.offset
        result = allocations.session.cuMemMap(place, self.stop - self.offset, 0, raw, 0)[0]
        if result:
            raise error_from(result, "cuMemMap")
        for watcher in allocations.watchers:
            watcher.mapped(place, self.memory)

    def release(self) -> None:
        """``cuMemUnmap``; the handle follows, if it is here."""
        reservation = self.reservation
        # Where nothing is mapped an earlier attempt was interrupted.
        with contextlib.suppress(InvalidValueError):
            reservation.allocations.session.call("cuMemUnmap", int(reservation.raw) + self.offset, self.nbytes)
        self.unmapped()
        self.release_handle()

    def unmapped(self) -> None:
        """It is unmapped. May be called again."""
        allocations = self.reservation.allocations
        if allocations.watchers and not self.gone:
            address = int(self.reservation.raw) + self.offset
            for watcher in allocations.watchers:
                watcher.unmapped(address)
        self.gone = True
        allocations.order.cut(self)

    def release_handle(self) -> None:
        """``cuMemRelease``, if the handle is here. Where the driver refuses, it is tried again once this is dropped."""
        self.reservation.allocations.session.release(self, "cuMemRelease")

    def close(self) -> None:
        """Release the memory, whoever holds it. Where the driver refuses, it is tried again once that is dropped."""
        try:
            if self._raw is not None:
                self.release_handle()
            if self._memory is not None:
                self._memory.close()
        except CudaError:
            pass

    def undo(self, first: BaseException) -> None:
        """Undo what has failed with ``first``; nobody has used it yet. Errors of the undo are attached to the first."""
        try:
            if isinstance(first, CudaError) and first.call in ("cuMemCreate", "cuMemMap"):
                self.unmapped()
                self.release_handle()
            else:
                self.release()
        except Exception as later:
            attach(first, later)

    def forget(self) -> None:
        """The memory has one mapping less, and the range."""
        self.reservation.stale = True
        state = getattr(self, "state", None)
        if state is not None:
            state.mappings.pop(self, None)
            if not state.handles:
                self.reservation.allocations.forget(state)

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)
        if raw is None:
            return
        session = self.reservation.allocations.session
        if session.usable:
            if type(raw) is not HandleEnd:
                raw = self._raw = HandleEnd(session, "cuMemRelease", raw)
            self.reservation.allocations.deferred.submit(raw)
            self._raw = None


class MappedObject(MappedBytes):
    """A mapping of a multicast object."""

    __slots__ = ()

    kind = Kind.OBJECT_MAPPING


class Reservation(HandleNode):
    """A reserved range of addresses: ``cuMemAddressFree``. :attr:`raw` is where it begins."""

    __slots__ = ("entries", "maker", "nbytes", "stale")

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(allocations_of(session), Kind.RESERVATION)
        self.nbytes: int = nbytes
        self.entries: list[MappedBytes] = []
        """What is mapped, in the order of addresses, and what :attr:`stale` says; always the same list."""
        self.maker: Any = None
        """The :class:`MemorySpec` of memory that mappings hold by themselves; None where none do."""
        self.stale: bool = False
        """Whether something in the list was unmapped."""

    def table(self) -> list[MappedBytes]:
        """What is mapped, in the order of addresses."""
        entries = self.entries
        if self.stale:
            self.stale = False
            try:
                entries[:] = [entry for entry in entries if not entry.gone]
            except BaseException:
                self.stale = True
                raise
        return entries

    def add(self, entry: MappedBytes) -> None:
        """Have what is about to be mapped in the table: an interrupt between the two then loses nothing."""
        entries = self.table()
        at = len(entries)
        if entries and entries[-1].stop > entry.offset:
            at = bisect_left(entries, entry.offset, key=_BEGINNING)
        entries.insert(at, entry)

    def touching(self, start: int, stop: int) -> list[MappedBytes]:
        """The mappings that a part of the range touches."""
        entries = self.table()
        if start >= stop or not entries or entries[-1].stop <= start:
            return []
        return entries[bisect_right(entries, start, key=_END) : bisect_left(entries, stop, key=_BEGINNING)]

    def bounds(self, start: int, stop: int | None) -> tuple[int, int]:
        """A part of the range that a user names."""
        begin, end = checked_size("start", start), self.nbytes if stop is None else checked_size("stop", stop)
        if not begin <= end <= self.nbytes:
            raise ValueError(f"start={begin}, stop={end}: the range has {size_text(self.nbytes)}")
        return begin, end

    def within(self, start: int, stop: int | None) -> list[MappedBytes]:
        """The mappings between two offsets; ``ValueError`` where one is cut."""
        begin, end = self.bounds(start, stop)
        entries = self.touching(begin, end)
        if entries and (entries[0].offset < begin or entries[-1].stop > end):
            raise ValueError(f"start={begin}, stop={end} cuts a mapping: the driver takes whole ones only")
        return entries

    def holes(self) -> list[tuple[int, int]]:
        """Where nothing is mapped: pairs of offset and size in bytes."""
        entries = self.table()
        ends = [0, *(entry.stop for entry in entries)]
        starts = [*(entry.offset for entry in entries), self.nbytes]
        return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]

    def drawn(self, width: int) -> str:
        """The range as so many characters."""
        cells = ["."] * width
        for entry in reversed(self.table()):
            first = entry.offset * width // self.nbytes
            last = max(first + 1, -(-entry.stop * width // self.nbytes))
            cells[first:last] = entry.mark * (last - first)
        return "".join(cells)

    def grant(self, entries: Sequence[MappedBytes], rights: Rights, structs: list[Any] | None = None) -> None:
        """Set access of mappings that lie side by side (``cuMemSetAccess``); ``structs``: the driver's form of it."""
        if not (entries and rights):
            return
        start = entries[0].offset
        structs = structs_of(rights) if structs is None else structs
        place = int(self._raw) + start
        result = self.allocations.session.cuMemSetAccess(place, entries[-1].stop - start, structs, len(structs))[0]
        if result:
            raise error_from(result, "cuMemSetAccess")
        for entry in entries:
            entry.rights = {**entry.rights, **rights}

    def set_rights(self, entries: Sequence[MappedBytes], rights: Rights, after: After) -> None:
        """Set access, after what must have passed where some is taken away: of all mappings, or of none."""
        for entry in entries:
            if entry._memory is not None:  # else a buffer has looked
                entry._memory._check_access(rights)
        losing = accessing(
            {where: had for where, had in entry.rights.items() if had & ~rights.get(where, had)} for entry in entries
        )
        if losing:
            wait(after, self.allocations.session, losing)
        before = [{where: entry.rights.get(where, MemAccess.NONE) for where in rights} for entry in entries]
        # Driver 580 may have set some of what it refuses as a whole.
        undos = [functools.partial(self.grant, (entry,), had) for entry, had in zip(entries, before, strict=True)]
        with undoing(lambda: undo_all(undos)):
            self.grant(entries, rights)

    def unmap(self, entries: Iterable[MappedBytes]) -> None:
        """Unmap mappings (``cuMemUnmap``), in one call for each run of them without a hole."""
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
            result = self.allocations.session.cuMemUnmap(int(self._raw) + start, stop - start)[0]
            if result:
                raise error_from(result, "cuMemUnmap")
            for entry in run:
                entry.unmapped()
        except CudaError:
            raise
        except BaseException:
            # Interrupted, nobody knows where: go through with it. What is unmapped already cannot be unmapped again.
            for entry in run:
                (entry.release if entry.live else entry.unmapped)()
            raise
        finally:
            # Memory that was closed, and goes back to a recycler now that it is unmapped.
            allocations = self.allocations
            if allocations.order.ready:
                allocations.order.pass_on(allocations.drop)
                allocations.work()

    def give_up(self) -> None:
        """Unmap what is mapped, once the work that may use it is done."""
        if not self.given_up:
            order = self.allocations.order
            mapped = [entry for entry in self.entries if not entry.gone]
            for entry in mapped:
                order.relate(entry, self)
                if hasattr(entry, "state"):
                    for team in list(entry.state.teams):
                        order.relate(team, self)
                # Nobody asks for the object any more, which has a finaliser of its own.
                entry._memory = None
            self.allocations.drop_after({device for entry in mapped for device in entry.users}, mapped)
            for entry in mapped:
                self.allocations.drop(entry)
        super().give_up()

    def release(self) -> None:
        """``cuMemAddressFree``."""
        self.give_back("cuMemAddressFree", self.nbytes)

    def forget(self) -> None:
        """It is none of the ranges that there are, and keeps nothing: what was mapped refers to it, too."""
        self.allocations.reservations.pop(self, None)
        self.entries.clear()
