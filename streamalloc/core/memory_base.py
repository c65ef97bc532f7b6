"""Base classes of all memory: address, size, location, stream and access, and the operations of managed memory.

Other operations, in :mod:`~streamalloc.core.copies` and :mod:`~streamalloc.core.memory`, use only the attributes that
are defined here.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from streamalloc.core.device import Device, known_location
from streamalloc.core.errors import ClosedError
from streamalloc.core.library_streams import as_stream
from streamalloc.core.properties import MemAdvise, MemLocation, MemLocationType, checked_type
from streamalloc.core.resource import Shareable
from streamalloc.core.session import Session
from streamalloc.core.stream import LEGACY, Stream, StreamLike
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row, Shown, mib, place
from streamalloc.formats.sizes import size_text

kinds: set[type] = set()
"""All memory classes. A look-up of a type in this set is five times faster than ``isinstance``."""


class MemoryBase(Shareable, Shown, abc.ABC):
    """Base class of memory: a range of bytes with address, size, location and stream, without fills, copies and
    exports.
    """

    __slots__ = ()

    _inner: ClassVar[tuple[str, ...]] = ("check_usable",)

    # Fills, copies and exports read these attributes to make their driver call without further checks. They read `_ptr`
    # first: while it is None, the other attributes may be missing.
    _ptr: Any = None
    """Pointer for the driver, ``CUdeviceptr`` or int; None if the memory must be checked before each driver call."""
    _nbytes: int
    _stream: Stream
    _ordinal: int | None = None
    """Ordinal of the owning device; None for host and managed memory, and if the device is not known."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kinds.add(cls)

    @property
    @abc.abstractmethod
    def address(self) -> int:
        """Device address of the first byte; 0 for empty memory. Raises :class:`ClosedError` after the free."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Size in bytes, as requested."""

    @property
    @abc.abstractmethod
    def stream(self) -> Stream:
        """The stream of operations that name no stream."""

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Location of the memory: a device, the host, or a NUMA node. ``MemLocation.none()`` for managed memory without
        a preferred location, and if the location is not known.
        """

    @property
    @abc.abstractmethod
    def owner(self) -> object:
        """Owner of the memory: a pool, a graph, or the memory that this object is a view of."""

    @property
    @abc.abstractmethod
    def device_accessible(self) -> bool:
        """Whether the stream's device has access. If not, ``__cuda_array_interface__`` raises AttributeError."""

    @property
    def managed(self) -> bool:
        """Whether the memory is managed: one address for all devices and the host. The driver migrates it."""
        return False

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory at the same address: true for host and managed memory."""
        return self.managed or self.location.on_host

    def used(
        self, stream: StreamLike | None = None, *, write: bool = True, on_host: bool = False, atomic: bool = False
    ) -> None:
        """Report a use by other code, such as another library's kernel, to a checked driver.

        No effect with other drivers; see :func:`streamalloc.driver.checked`.

        Parameters
        ----------
        stream
            The stream that the kernel was queued on (default: the memory's own).
        write
            True for a write, False for a read.
        on_host
            True if the CPU uses the memory now, outside of any stream.
        atomic
            True if the kernel uses the memory only by atomic operations, which do not race with atomic operations of
            other kernels.

        Raises
        ------
        ClosedError
            The memory was freed.
        ValueError
            Both ``atomic`` and ``on_host`` were given.
        """
        if atomic and on_host:
            raise ValueError("atomic=True, on_host=True: atomic uses are those of kernels")
        address = self._at
        listener = self._session.listener
        if listener is None or not self.nbytes:
            return
        if on_host:
            listener.used(address, self.nbytes, None, write)
            return
        ordered = self.stream if stream is None else as_stream(stream, self._session)
        ordered.in_context(listener.used, address, self.nbytes, ordered.checked_raw(), write, atomic)

    @property
    def _session(self) -> Session:
        return self.stream._session

    @property
    def _at(self) -> int:
        """The address, for work on a stream that already waits for the contents (:meth:`_await_on`)."""
        return self.address

    def _await_on(self, stream: Stream) -> None:
        """Have ``stream`` wait for the exporter's writes to imported memory, for which only :attr:`stream` waits by
        itself. For other kinds of memory, do nothing.
        """

    def check_usable(self) -> None:
        """Raise an error, such as EvictedError, if the memory cannot be used now. For freed memory, this method or
        :attr:`address` raises ClosedError.
        """

    def _unreadable(self) -> str:
        """Return the reason why ordinary reads of the memory are not valid, for example of a multicast mapping; empty
        if they are valid.
        """
        return ""

    def _resident_on(self) -> int | None:
        """Return the ordinal that ``cuMemcpyPeerAsync`` gets as the owning device; None if ``cuMemcpyAsync`` finds the
        memory by its address alone.
        """
        location = self.location
        named = location.type is MemLocationType.DEVICE and location.seen
        return location.id if named and not self.host_accessible else None

    def _read_only(self, on_host: bool) -> bool:
        """Return whether the CPU (with ``on_host``) or the stream's device has only read access to the memory."""
        return False

    def _ordered_on(self, stream: StreamLike | None, *, after: bool = False) -> Stream:
        """Return ``stream``, or by default :attr:`stream`, after a check. ``after``: as for :func:`as_stream`."""
        self.check_usable()
        named = self.stream if stream is None else stream
        try:
            return as_stream(named, self._session, after=after)
        except ClosedError:
            if stream is not None:
                raise
            raise ClosedError(f"{named!r}, the stream of {self!r}, was closed: name another stream") from None

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes) if self.nbytes >= 1 << 20 else size_text(self.nbytes)
        yield "address", f"{self._at:#x}"
        yield "memory of", place(self.location)
        yield "stream", self.stream

    def _kept_by_graphs(self) -> object:
        """Return the object that a graph keeps alive because its nodes use the memory. None for memory of graphs, which
        no drop frees: the graph would keep itself alive.
        """
        return self

    def _kernels_may_use(self, blocks: Any, nbytes: int, write: bool) -> bool:
        """Return whether kernels on the stream's device may use blocks of ``nbytes`` bytes at the addresses ``blocks``.
        ``write``: whether the kernels write to the blocks.
        """
        return self.device_accessible and not (write and self._read_only(on_host=False))

    def _access_hint(self, stream: Stream) -> str:
        """Return the likely reason why the driver refuses work of ``stream`` on the memory, as text for an error;
        ``""`` if no reason is known.
        """
        if self.location == stream.device.location:
            return ""
        return (
            f"the memory is at {self.location} and the stream runs on device {stream.device.ordinal}; "
            f"grant it access: pool.set_access(device, MemAccess.READWRITE)"
        )


Where: TypeAlias = "Device | MemLocation"

# `_PROCESSOR`: advice for a device or the host, not for a NUMA node. `_WITH_LOCATION`: all advice with a location.
_PROCESSOR = (MemAdvise.SET_ACCESSED_BY, MemAdvise.UNSET_ACCESSED_BY)
_WITH_LOCATION = (MemAdvise.SET_PREFERRED_LOCATION, *_PROCESSOR)
_INT = 4  # Bytes of a C int: an attribute is one, or a list.
_CPU, _NONE = -1, -2  # CU_DEVICE_CPU (the host), CU_DEVICE_INVALID (no device)


class MemRangeAttributes(NamedTuple):
    """Attributes that hold for all pages of a range of managed memory (``cuMemRangeGetAttributes``): the value of
    :attr:`Memory.range_attributes`.

    Attributes
    ----------
    read_mostly
        Whether each device that reads gets its own copy of the pages.
    preferred_location, last_prefetch_location
        A location; None if none was set, or if pages differ.
    accessed_by
        Locations of the devices, or the host, whose page tables keep the memory mapped.
    """

    read_mostly: bool
    preferred_location: MemLocation | None
    last_prefetch_location: MemLocation | None
    accessed_by: tuple[MemLocation, ...]


class Migrating(MemoryBase):
    """Memory with operations for managed memory. All of them raise ValueError if the memory is not managed, and
    ClosedError if it was freed.
    """

    __slots__ = ()

    def prefetch(self, location: Device | MemLocation, stream: StreamLike | None = None) -> None:
        """Migrate managed memory in stream order, in whole host pages (``cuMemPrefetchAsync``).

        Parameters
        ----------
        location
            A device, host memory, or a NUMA node of the host.
        stream
            The stream to queue on (default: the memory's own).

        Raises
        ------
        TypeError, ValueError
            The memory is not managed, or ``location`` is not such a location of its driver. Or ``stream`` is not a
            stream of this driver.
        ClosedError
            The memory was freed, or the stream was closed.
        """
        self._check_managed()
        place, ordered = self._known("location", location).to_driver(), self._ordered_on(stream)
        if self.nbytes:
            wanted = self._at, self.nbytes, place, 0, ordered.checked_raw()
            ordered.in_context(self._session.call, "cuMemPrefetchAsync", *wanted)

    def discard(self, stream: StreamLike | None = None) -> None:
        """Discard the contents of managed memory in stream order (``cuMemDiscardBatchAsync``). They are not migrated
        later.

        Until the memory is written, reads return indeterminate values. ``stream``: stream to queue on; default: the
        memory's own. Raises the errors of :meth:`prefetch`, ValueError for the legacy default stream, and
        NotSupportedError if the bindings are older than 13.0.
        """
        discard_batch(stream or self.stream, [self])

    def discard_prefetch(self, location: Device | MemLocation, stream: StreamLike | None = None) -> None:
        """Discard the contents and migrate the memory in one call, which copies nothing
        (``cuMemDiscardAndPrefetchBatchAsync``). ``location`` and ``stream`` as for :meth:`prefetch`. Raises the errors
        of :meth:`prefetch` and :meth:`discard`.
        """
        discard_prefetch_batch(stream or self.stream, [self], location)

    def advise(self, advice: MemAdvise, location: Device | MemLocation | None = None) -> None:
        """Advise the driver on the use of managed memory (``cuMemAdvise``). The advice takes effect at once, for whole
        pages.

        Parameters
        ----------
        advice
            The advice; its name shows whether it is set or unset.
        location
            The preferred location, or the device or host that accesses the memory. None for SET_READ_MOSTLY,
            UNSET_READ_MOSTLY and UNSET_PREFERRED_LOCATION.

        Raises
        ------
        TypeError, ValueError
            The memory is not managed, ``advice`` is not a :class:`MemAdvise` or does not take such a location, or
            ``location`` is missing or superfluous.
        ClosedError
            The memory was freed.
        """
        self._check_managed()
        checked_type("advice", advice, MemAdvise)
        if (location is not None) != (advice in _WITH_LOCATION):
            needed = "needs a location" if advice in _WITH_LOCATION else "takes no location"
            raise ValueError(f"advice={advice}: it {needed}")
        place = MemLocation.none() if location is None else self._known("location", location)
        if advice in _PROCESSOR and place.type not in (MemLocationType.DEVICE, MemLocationType.HOST):
            raise ValueError(f"location={place}: {advice} takes a device or the host")
        if self.nbytes:
            self._session.call("cuMemAdvise", self._at, self.nbytes, cuda.CUmem_advise(int(advice)), place.to_driver())

    def range_attributes(self) -> MemRangeAttributes:
        """Return the advice and the last prefetch location of the memory (``cuMemRangeGetAttributes``).

        Raises
        ------
        ValueError
            The memory is not managed.
        ClosedError
            The memory was freed.
        """
        self._check_managed()
        if not self.nbytes:
            return MemRangeAttributes(False, None, None, ())
        session = self._session
        count = int(session.call("cuDeviceGetCount")) + 1
        sizes = [_INT, _INT, _INT, _INT, _INT, _INT * count]
        attributes = [getattr(cuda.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}") for name in _ATTRIBUTES]
        found = session.call("cuMemRangeGetAttributes", sizes, attributes, len(sizes), self._at, self.nbytes)
        mostly, *places, users = found
        by = (MemLocation.host() if one == _CPU else MemLocation.device(one) for one in users if one != _NONE)
        return MemRangeAttributes(bool(mostly), _place(*places[:2]), _place(*places[2:]), tuple(by))

    @property
    def read_mostly(self) -> bool:
        """Whether each device that reads the managed memory gets its own copy of the pages; False if this is so for
        only some of the pages. Assign True or False to advise the driver (``cuMemAdvise``).
        """
        return self.range_attributes().read_mostly

    @read_mostly.setter
    def read_mostly(self, value: bool) -> None:
        self.advise(MemAdvise.SET_READ_MOSTLY if checked_type("value", value, bool) else MemAdvise.UNSET_READ_MOSTLY)

    @property
    def preferred_location(self) -> MemLocation | None:
        """Preferred location of the managed memory; None if there is none, or if pages differ. Assign a location or
        None to advise the driver (``cuMemAdvise``).
        """
        return self.range_attributes().preferred_location

    @preferred_location.setter
    def preferred_location(self, where: Device | MemLocation | None) -> None:
        if where is not None:
            self.advise(MemAdvise.SET_PREFERRED_LOCATION, where)
        else:
            self.advise(MemAdvise.UNSET_PREFERRED_LOCATION)

    @property
    def accessed_by(self) -> frozenset[MemLocation]:
        """Devices, or the host, whose page tables keep the managed memory mapped.

        Assign the complete set: the advice is set for new members, and unset for members that are missing
        (``cuMemAdvise``).
        """
        return frozenset(self.range_attributes().accessed_by)

    @accessed_by.setter
    def accessed_by(self, places: Iterable[Device | MemLocation]) -> None:
        before, wanted = self.accessed_by, {self._known("places", one) for one in places}
        for one in before - wanted:
            self.advise(MemAdvise.UNSET_ACCESSED_BY, one)
        for one in wanted - before:
            self.advise(MemAdvise.SET_ACCESSED_BY, one)

    def _check_managed(self) -> None:
        self.check_usable()
        if not self.managed:
            raise ValueError(f"{self!r} is not managed: memory of a pool with MemAllocationType.MANAGED is")

    def _known(self, name: str, where: Device | MemLocation) -> MemLocation:
        place = known_location(self._session, name, where)
        if place.type is MemLocationType.NONE:
            raise ValueError(f"{name}={place}: allowed are a device, the host and its NUMA nodes")
        return place


def prefetch_batch(stream: StreamLike, memories: Sequence[Migrating], location: Where | Sequence[Where]) -> None:
    """Migrate several managed memories in one call (``cuMemPrefetchBatchAsync``), as :meth:`Memory.prefetch` does.

    Parameters
    ----------
    stream
        The stream to queue on: not the legacy default stream.
    memories
        The managed memories; at least one.
    location
        One location for all memories, or a sequence with one for each: a device, host memory, or a NUMA node of the
        host.

    Raises
    ------
    TypeError, ValueError
        A memory is not managed, ``memories`` is empty, the memories are of several drivers, the stream is the legacy
        default stream or not a stream of their driver, ``location`` is not such a location, or there are more or fewer
        locations than memories.
    ClosedError
        A memory was freed, or the stream was closed.
    NotSupportedError
        The bindings are older than 13.0.
    """
    _queue_batch("cuMemPrefetchBatchAsync", stream, memories, location)


def discard_batch(stream: StreamLike, memories: Sequence[Migrating]) -> None:
    """Discard the contents of several managed memories in one call (``cuMemDiscardBatchAsync``), as
    :meth:`Memory.discard` does. ``stream``, ``memories`` and errors as for :func:`prefetch_batch`.
    """
    _queue_batch("cuMemDiscardBatchAsync", stream, memories, None)


def discard_prefetch_batch(
    stream: StreamLike, memories: Sequence[Migrating], location: Where | Sequence[Where]
) -> None:
    """Discard the contents of several managed memories and migrate the memories, in one call that copies nothing
    (``cuMemDiscardAndPrefetchBatchAsync``). Arguments and errors as for :func:`prefetch_batch`.
    """
    _queue_batch("cuMemDiscardAndPrefetchBatchAsync", stream, memories, location)


def _queue_batch(
    call: str, stream: StreamLike, memories: Sequence[Migrating], location: Where | Sequence[Where] | None
) -> None:
    if not memories:
        raise ValueError("memories is empty: a batch has at least one")
    for one in memories:
        if not isinstance(one, Migrating):
            raise TypeError(f"memories must be managed memory, not {type(one).__name__} ({one!r})")
        one._check_managed()
    session = memories[0]._session
    if any(one._session is not session for one in memories):
        raise ValueError("memories are of several drivers: a batch is of one")
    ordered = as_stream(stream, session)
    refuse_legacy(ordered, call)
    filled = [one for one in memories if one.nbytes]
    places: tuple[Any, ...] = ()
    if isinstance(location, Sequence):
        if len(location) != len(memories):
            raise ValueError(f"{len(location)} locations for {len(memories)} memories")
        known = [one._known("location", place) for one, place in zip(memories, location, strict=True) if one.nbytes]
        places = [one.to_driver() for one in known], list(range(len(known))), len(known)
    elif location is not None:
        places = [memories[0]._known("location", location).to_driver()], [0], 1
    pointers, sizes = [cuda.CUdeviceptr(one._at) for one in filled], [one.nbytes for one in filled]
    if filled:
        ordered.in_context(session.call, call, pointers, sizes, len(filled), *places, 0, ordered.checked_raw())


_ATTRIBUTES = (
    "READ_MOSTLY",
    *(f"{what}_LOCATION_{part}" for what in ("PREFERRED", "LAST_PREFETCH") for part in ("TYPE", "ID")),
    "ACCESSED_BY",
)


def _place(kind: Any, number: Any) -> MemLocation | None:
    """Return the location with the type ``kind`` and the id ``number``, which the driver reports; None for the type
    NONE. The id is used only for devices and NUMA nodes.
    """
    found = MemLocationType(int(kind))
    numbered = found in (MemLocationType.DEVICE, MemLocationType.HOST_NUMA)
    return None if found is MemLocationType.NONE else MemLocation(found, int(number) if numbered else 0)


def refuse_legacy(stream: Stream, call: str) -> None:
    """Raise ValueError if ``stream`` is the legacy default stream, which batched driver calls refuse, and ClosedError
    if ``stream`` was closed. ``call``: name of the driver function, for the message.
    """
    if int(stream.checked_raw()) in (0, LEGACY):
        raise ValueError(f"stream={stream!r}: {call} refuses the legacy default stream; name another one")
