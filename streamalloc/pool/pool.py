"""Memory pools as objects (driver API, "Stream Ordered Memory Allocator")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from streamalloc.core.errors import (
    ClosedError,
    CudaError,
    NotSupportedError,
    OutOfMemoryError,
    PendingFreesWarning,
    error_from,
    size_text,
    undoing,
    warn,
)
from streamalloc.core.internal import (
    DOMAIN_NEEDS,
    FABRIC_NEEDS,
    Allocator,
    Buffer,
    Device,
    Fence,
    Stream,
    StreamLike,
    as_stream,
    check_location,
    deferred_queue,
    location_of,
    read_or_none,
    session_for,
    work,
)
from streamalloc.core.properties import (
    MemAccess,
    MemAllocationType,
    MemHandleType,
    MemLocality,
    MemLocation,
    MemLocationType,
    checked_size,
    checked_type,
)
from streamalloc.core.resource import Closes, Leaves, Shareable, made_for_sharing
from streamalloc.core.session import Session, members, session_of
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Drawn, Row, gauge, place
from streamalloc.pool.access import GrantsAccess
from streamalloc.pool.attributes import ATTRIBUTES, PoolAttributes, PoolStatistics
from streamalloc.pool.ending import PoolEnd, pools_of
from streamalloc.pool.places import existing_pool, location_of_pool, pool_locations, set_current_pool
from streamalloc.pool.plain import THIS, check_handle, is_ours, refuse_second_owner
from streamalloc.pool.properties import MemPoolProps

if TYPE_CHECKING:
    from streamalloc.driver import Driver

OutOfMemoryPolicy: TypeAlias = Literal["raise", "sync-trim-retry"] | Callable[[OutOfMemoryError], bool]
_POLICIES = ("raise", "sync-trim-retry")

# The attributes are in the order of the fields of PoolStatistics.
_FIGURES = tuple(
    getattr(cuda.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
    for name in ("RESERVED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_CURRENT", "USED_MEM_HIGH")
)
_POOL_HANDLE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE

POOL_STEP = 32 << 20
"""Bytes by which a pool grows on driver 580. ``trim`` uses this number to detect pending frees."""


def whole_steps(nbytes: float) -> int:
    """Return ``nbytes`` rounded up to :data:`POOL_STEP`."""
    return -(-int(nbytes) // POOL_STEP) * POOL_STEP


class MemoryPool(GrantsAccess, Closes, Shareable, Drawn):
    """A pool of stream-ordered memory (``cuMemPoolCreate``).

    A pool that this object owns (:attr:`owned`) is destroyed after the object was closed or dropped, once all
    allocations of the pool are freed (``cuMemPoolDestroy``). Until then the allocations stay usable. Pools of
    :meth:`default` and :meth:`current` that belong to the driver or to other code are never destroyed: :meth:`close`
    does nothing to them.

    Examples
    --------
    ::

        with sa.MemoryPool(device, release_threshold=1 << 30, name="activations") as pool:
            buffer = pool.allocate(1 << 20, stream)
            buffer.fill(0)
            buffer.free()

    Parameters
    ----------
    where
        A device, its ordinal, or a location whose memory the pool manages; or complete :class:`MemPoolProps`.
    max_size
        The most bytes that the pool may reserve; 0 for the system's limit. The driver rounds the number up to its
        growth step. The size may be text such as ``"2GiB"``. A float such as 0.5 is a share of the device's memory. Not
        allowed with :class:`MemPoolProps`, which has this field.
    handle_types
        Kinds of handles for sharing the pool with other processes. Graphs cannot allocate from such a pool. Not allowed
        with :class:`MemPoolProps`, which has this field.
    release_threshold
        Bytes that stay reserved when the host synchronises. None keeps the driver's default, 0.
    initial_size
        Bytes that the pool reserves when it is made, rounded up to steps of the driver. For this, a buffer of this size
        is allocated and freed. If ``release_threshold`` is None, it is set to the number of bytes reserved.
    name
        A name that ``repr``, reports and errors show. It need not be unique.
    on_oom
        Policy for an allocation that finds no memory even after caches of the pool have returned their free memory.
        ``"raise"`` raises the error. ``"sync-trim-retry"`` waits for the streams that this package knows, trims the
        pool, and tries the allocation once more. A function is called with the :class:`OutOfMemoryError` after each
        failed attempt, on the thread of the allocation, but not while the stream is being captured, nor for more bytes
        than ``max_size`` or the memory of the device. If the function returns True, because it has released memory, the
        allocation is tried again. Exceptions of the function go to the caller of the allocation.
    driver
        The driver to use if ``where`` is not a :class:`Device`.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a documented rule, or names a device that the driver does not have.
    NotSupportedError
        The device, the driver or the bindings cannot make such a pool. The message says what is needed.
    OutOfMemoryError
        There is not enough memory for ``initial_size``.
    """

    __slots__ = ("_on_oom", "_owner", "allocation_type", "exported", "name", "properties")

    _inner = (*Allocator._inner, "exported")

    _owner: object
    """Object of other code that owns the pool, kept alive here; unset or None if there is no such object."""
    allocation_type: MemAllocationType
    """Kind of the memory: pinned in its location, or managed."""
    properties: MemPoolProps | None
    """Properties of the pool; None for a pool that this class did not create."""
    name: str
    """Name that ``repr``, reports and errors show; empty if none was given."""
    exported: Any
    """The pool's exported handle, which :mod:`streamalloc.ipc` keeps here until the pool is closed; None before the
    pool is shared.
    """

    def __init__(
        self,
        where: Device | MemLocation | MemPoolProps | int,
        max_size: int | float | str = 0,
        handle_types: MemHandleType = MemHandleType.NONE,
        release_threshold: int | str | None = None,
        *,
        initial_size: int | str = 0,
        name: str = "",
        on_oom: OutOfMemoryPolicy = "raise",
        driver: Driver | None = None,
    ) -> None:
        self._end = None
        on_oom = _checked_policy(on_oom)
        checked_type("name", name, str)
        initial_size = checked_size("initial_size", initial_size)
        if release_threshold is not None:
            release_threshold = checked_size("release_threshold", release_threshold)
        session = session_for(where, driver)
        properties = _properties_of(where, max_size, handle_types, session)
        if 0 < properties.max_size < initial_size:
            raise ValueError(f"initial_size={initial_size} is more than max_size={properties.max_size}")
        check_location(session, properties.location)
        work(session)
        struct = properties.to_driver()
        self._end = end = PoolEnd(session, properties.location, properties.alloc_type)
        deferred_queue(session).end_with(self, end)
        end._raw = session.call("cuMemPoolCreate", struct, hint=_why_refused(properties))
        self._open(session, end.raw, properties.location, properties.alloc_type)
        self.properties = properties
        self.name = name
        self._on_oom = on_oom
        if properties.handle_types:
            made_for_sharing()
        if release_threshold is not None or initial_size:
            # `close` would not do: the error's traceback keeps this object alive, and the deferred queue must end the
            # pool even if a driver call fails.
            with undoing(lambda: deferred_queue(session).end(end)), undoing(self._shut):
                if release_threshold is not None:
                    self.attributes.release_threshold = release_threshold
                if initial_size:
                    _prime(self, initial_size, release_threshold is None)

    def _open(self, session: Session, raw: Any, location: MemLocation, allocation_type: MemAllocationType) -> None:
        self.location = location
        self.allocation_type = allocation_type
        self.managed = allocation_type is MemAllocationType.MANAGED
        self.name = ""
        self._bind(session, session.driver.cuMemAllocFromPoolAsync, raw)
        self.properties = None
        self.closed = False
        self.exported = None
        self._on_oom = "raise"
        pools_of(session).alive[int(raw)] = self
        pool_locations(session)[int(raw)] = location

    @classmethod
    def default(
        cls,
        where: Device | MemLocation | int,
        allocation_type: MemAllocationType = MemAllocationType.PINNED,
        *,
        driver: Driver | None = None,
    ) -> MemoryPool:
        """Return the default pool of a location (``cuDeviceGetDefaultMemPool``, ``cuMemGetDefaultMemPool``).

        ``where`` is a device, its ordinal, or a location. ``allocation_type`` is the kind of memory, pinned by default.
        ``driver`` is the driver to use if ``where`` is not a :class:`Device`. Raises TypeError, ValueError for a
        location without such a pool, and NotSupportedError for bindings without the function.
        """
        return cls._existing("Default", where, allocation_type, driver)

    @classmethod
    def current(
        cls,
        where: Device | MemLocation | int,
        allocation_type: MemAllocationType = MemAllocationType.PINNED,
        *,
        driver: Driver | None = None,
    ) -> MemoryPool:
        """Return the current pool of a location, from which allocations without a named pool come
        (``cuDeviceGetMemPool``, ``cuMemGetMemPool``). If the pool has an object in this process, this object is
        returned; otherwise a new object, which does not own the pool. ``where``, ``allocation_type`` and ``driver`` as
        for :meth:`default`, with the same errors.
        """
        return cls._existing("", where, allocation_type, driver)

    @classmethod
    def _existing(
        cls, which: str, where: Device | MemLocation | int, allocation_type: MemAllocationType, driver: Driver | None
    ) -> MemoryPool:
        location = location_of("where", where)
        checked_type("allocation_type", allocation_type, MemAllocationType)
        session = session_for(where, driver)
        if location.type is MemLocationType.HOST_NUMA_CURRENT:
            raise ValueError("location=HOST_NUMA_CURRENT: name the NUMA node (HOST_NUMA) or take any (HOST)")
        if location.type is MemLocationType.NONE and allocation_type is not MemAllocationType.MANAGED:
            raise ValueError("location=NONE: only managed memory may have no preferred location")
        check_location(session, location)
        # A dropped pool may still be the current pool, until its item of the deferred queue is attempted.
        work(session)
        raw = existing_pool(session, which, location, allocation_type)
        return cls._of_handle(session, raw, location, allocation_type)

    @classmethod
    def _of_handle(
        cls, session: Session, raw: Any, location: MemLocation, allocation_type: MemAllocationType
    ) -> MemoryPool:
        """Return the object for the pool ``raw`` (``CUmemoryPool``): the existing object, or a new object that does not
        own the pool.
        """
        known = cls._known(session, raw)
        if known is not None:
            return known
        pool = cls.__new__(cls)
        pool._end = None
        pool._open(session, raw, location, allocation_type)
        if int(raw) in pools_of(session).closed:
            pool._shut()
        return pool

    @classmethod
    def from_handle(
        cls, raw: Any, *, owner: object, location: MemLocation | None = None, driver: Driver | None = None
    ) -> MemoryPool:
        """Return a new object for a pool of other code, by the pool's handle; ``owner`` itself if it is the pool.

        Parameters
        ----------
        raw
            A ``CUmemoryPool`` of this process, or its number. For the file descriptor of another process's pool see
            :meth:`ipc.ImportedPool.from_handle`.
        owner
            The object that destroys the pool. It is kept alive by the returned object. None: other code destroys the
            pool. ``"this"``: the returned object destroys the pool when it is closed or dropped, as a pool that the
            constructor made.
        location
            The location of the memory. By default the driver is queried (``cuMemPoolGetAttribute``,
            ``cuMemPoolGetAccess``). Drivers older than CUDA 13.1 do not report it: then name the location if several
            devices have access, or if the NUMA node of host memory matters.
        driver
            The driver to use; default: :func:`streamalloc.driver.default`.

        Raises
        ------
        TypeError, ValueError
            ``raw`` is not a handle, ``owner`` is another text, or an object of this process owns the pool. Or the
            location is not known, or differs from the location that the driver reports. Or ``owner="this"`` is given
            for a default pool, which cannot be destroyed.
        ClosedError
            The pool was closed in this process.
        InvalidValueError
            The driver does not accept the handle, for example because the pool was destroyed.

        Examples
        --------
        >>> again = sa.MemoryPool.from_handle(pool.handle, owner=pool)
        >>> again is pool
        True
        """
        session, ours = session_for(None, driver), is_ours(owner)
        session.check_process()
        handle = cuda.CUmemoryPool(check_handle(session, "raw", raw, cuda.CUmemoryPool))
        if int(handle) in pools_of(session).closed:
            raise ClosedError(f"raw={int(handle):#x}: this pool was closed")
        known = cls._known(session, handle)
        if known is not None and known.owned:
            if owner is known:
                return known
            raise refuse_second_owner(known) if ours else ValueError(f"owner={owner!r}: {known!r} owns this pool")
        found, allocation_type = _asked(session, handle)
        both = found is not None and location is not None and (found, location)
        if both and both[0] != both[1] and not (both[0].on_host and both[1].on_host):
            raise ValueError(f"location={location}: the pool's memory is at {found}")
        location = location or found
        if location is None:
            raise ValueError("the driver does not tell which device has this pool's memory: pass location=")
        if ours and _default_pool(session, location, allocation_type) == int(handle):
            raise ValueError(f"owner={THIS!r}: this is the default pool of {location}, which cannot be destroyed")
        pool = cls.__new__(cls)
        pool._end = end = PoolEnd(session, location, allocation_type) if ours else None
        with pools_of(session).adopting:
            if cls._known(session, handle) is known:
                if end is not None:
                    deferred_queue(session).end_with(pool, end)
                    end._raw = handle
                pool._open(session, handle, location, allocation_type)
                pool._owner = None if ours else owner
                return pool
        return cls.from_handle(raw, owner=owner, location=location, driver=driver)  # Lost a race: take that object.

    @staticmethod
    def _known(session: Session, raw: Any) -> MemoryPool | None:
        """Return the existing object for a driver handle; None if there is none, or only the object of an earlier pool
        that had the same handle.
        """
        pools = pools_of(session)
        known = pools.alive.get(int(raw))
        return known if isinstance(known, MemoryPool) and known.closed == (int(raw) in pools.closed) else None

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number. Raises ClosedError if the pool was closed."""
        return int(self.checked_raw())

    @property
    def owned(self) -> bool:
        """Whether closing this object destroys the pool. False for pools of the driver, and for pools of other code
        unless :meth:`from_handle` got ``owner="this"``.
        """
        return self._end is not None

    @property
    def on_oom(self) -> OutOfMemoryPolicy:
        """Policy of :meth:`allocate` when memory runs out, as for the argument of the constructor. For pools that the
        constructor did not make it is ``"raise"`` at first. Assign another policy to change it.

        Raises
        ------
        ValueError
            Something else than a policy is assigned.
        """
        return self._on_oom

    @on_oom.setter
    def on_oom(self, policy: OutOfMemoryPolicy) -> None:
        self._on_oom = _checked_policy(policy)

    @property
    def attributes(self) -> PoolAttributes:
        """The attributes of the pool. A read queries the driver (``cuMemPoolGetAttribute``), and an assignment sets the
        attribute (``cuMemPoolSetAttribute``).
        """
        return PoolAttributes(self)

    def statistics(self) -> PoolStatistics:
        """Return the bytes reserved and used, now and at most since :meth:`reset_peaks` (``cuMemPoolGetAttribute``).

        The deferred releases that are possible now are made first. Raises ClosedError if the pool was closed. Raises
        CaptureError if this thread captures a stream in a mode other than ``"relaxed"``; the capture is then invalid.
        """
        session = self._session
        work(session)
        read = session.cuMemPoolGetAttribute
        with session.beside_captures():
            answers = self._counted(lambda: [read(self.checked_raw(), figure) for figure in _FIGURES])
        for result, _ in answers:
            if result:
                raise error_from(result, "cuMemPoolGetAttribute")
        return PoolStatistics._make(int(value) for _, value in answers)

    def reset_peaks(self) -> None:
        """Set both high-water marks to the present bytes (``cuMemPoolSetAttribute``). Raises ClosedError."""
        for peak in ("reserved_mem_high", "used_mem_high"):
            self.attributes._set(ATTRIBUTES[peak], cuda.cuuint64_t(0))

    def trim(self, keep: int | str = 0) -> int:
        """Release unused memory until ``keep`` bytes stay reserved (``cuMemPoolTrimTo``). ``keep`` may be text such as
        ``"64MiB"``. Returns the number of bytes released.

        Memory counts as unused once the host has synchronised with its free. If more than expected stays reserved, the
        call issues a :class:`PendingFreesWarning`: frees are pending, or allocations in use are scattered over the
        pool's memory.

        Raises
        ------
        TypeError, ValueError, ClosedError, CaptureError
            ``keep`` is not a size, the pool was closed, or a capture forbids the call (:meth:`statistics`).
        """
        keep = checked_size("keep", keep)
        work(self._session)
        before = self.attributes.reserved_mem_current
        self._call("cuMemPoolTrimTo", keep)
        after, _, used, _ = self.statistics()
        # Without pending frees, at most the last growth step stays reserved, unless allocations are scattered.
        held = max(keep, used)
        if after > whole_steps(held):
            text = (
                f"{size_text(after - held)} beyond what is used and kept stay reserved: frees were still pending, or "
                "live allocations lie scattered; synchronize the streams that freed memory before trimming"
            )
            warn(text, PendingFreesWarning)
        return max(int(before - after), 0)

    def pool_of(self, buffer: Buffer) -> MemoryPool:
        return self

    def make_current(self) -> MadeCurrent:
        """Make this the current pool of its location, from which allocations without a named pool come
        (``cuDeviceSetMemPool``, ``cuMemSetMemPool``).

        The call takes effect at once. The end of ``with pool.make_current():`` makes the earlier pool current again, or
        the default pool if the earlier one was closed meanwhile. Raises ClosedError if the pool was closed, and
        NotSupportedError for bindings without the function.
        """
        self.checked_raw()
        previous = MemoryPool._existing("", self.location, self.allocation_type, self._session.driver)
        self._set_current()
        return MadeCurrent(self, previous)

    def _set_current(self) -> None:
        set_current_pool(self._session, self.checked_raw(), self.location, self.allocation_type)

    def _make_room(self, stream: Stream) -> bool:
        freed = any([cache._make_room(stream) for cache in self._caches()])
        if self.on_oom != "sync-trim-retry":
            return freed
        Fence(self._session).synchronize()
        with self._session.relaxed():
            self._call("cuMemPoolTrimTo", 0)
        return True

    def _ask_again(self, failure: CudaError) -> bool:
        return callable(self.on_oom) and isinstance(failure, OutOfMemoryError) and bool(self.on_oom(failure))

    def _caches(self) -> list[Any]:
        return [cache for cache in members(pools_of(self._session).caches) if cache.pool is self]

    def _figures(self, device: Device, capturing: bool) -> dict[str, Any]:
        figures: dict[str, Any] = {"pool": self.name} if self.name else {}
        statistics = None if capturing else read_or_none(self.statistics)
        if statistics is not None:
            figures.update(used=statistics.used, reserved=statistics.reserved)
            figures["holders"] = pool_holders(self._session, self.location, except_for=self)
            figures["allocators"] = (self,)
        if self.properties is not None and self.properties.max_size:
            figures["limit"] = whole_steps(self.properties.max_size)  # As the driver rounds it up.
        if self.location.type is MemLocationType.DEVICE:
            figures.update(_memory_of(Device(self.location.id, driver=self._session.driver)))
        return figures

    def close(self) -> None:
        """Close the pool, and destroy it later if this object owns it (``cuMemPoolDestroy``). Idempotent.

        Allocations in use stay usable and can be freed. The pool is destroyed once all its allocations are freed and
        the frees have run, for example at a later synchronisation of the host. If the pool is the current pool, the
        default pool of its location becomes current. Caches over the pool are closed. For a pool that other code owns,
        the call does nothing. Any thread may query, trim or close the pool meanwhile, but not allocate from it.
        """
        if self.closed or self._end is None:
            return
        for cache in self._caches():
            cache.close()
        with self._session.relaxed():
            self._end.close()
        self._shut()
        work(self._session)
        deferred_queue(self._session).end(self._end)

    def _shut(self) -> None:
        self.closed = True
        # A bound method would form a reference cycle with the pool: a dropped pool would then wait for the garbage
        # collector.
        self.alloc_function = partial(_refuse, repr(self))
        # Importers detect the close by the end of the exported handle, which leases of shared memory may delay.
        self.exported = None

    def _no_source(self) -> str:
        if self.properties is not None and self.properties.handle_types:
            made_with = f"handle_types={self.properties.handle_types!r}"
            return f"the stream is being captured, and {self!r} was made for sharing ({made_with})"
        return super()._no_source()

    def _check_open(self) -> None:
        self.checked_raw()

    def _text(self) -> str:
        kind = "" if self.allocation_type is MemAllocationType.PINNED else f" {self.allocation_type.name.lower()}"
        state = "closed" if self.closed else f"{int(self._raw):#x}"
        name = f" {self.name!r}" if self.name else ""
        return f"{name}{kind} {self.location} {state}"

    def _about(self) -> Iterator[Row]:
        self.checked_raw()
        now = self.statistics()
        if self.name:
            yield "name", self.name
        yield "memory of", place(self.location)
        yield "handle", f"{int(self._raw):#x}"
        yield from ((name.replace("_", " "), gauge(value, now.reserved_high)) for name, value in now._asdict().items())


def _prime(pool: MemoryPool, nbytes: int, keep: bool) -> None:
    """Reserve ``nbytes`` bytes of ``pool`` by an allocation that is freed again. With ``keep``, set the release
    threshold to the number of bytes that are then reserved.
    """
    ordinal = pool.location.id if pool.location.type is MemLocationType.DEVICE else 0
    with Device(ordinal, driver=session_of(pool).driver).create_stream() as stream:
        with pool.allocate(nbytes, stream):
            if keep:
                pool.attributes.release_threshold = pool.attributes.reserved_mem_current
        stream.synchronize()


class MadeCurrent(Leaves):
    """The change of a current pool that :meth:`MemoryPool.make_current` has made. The end of its ``with`` block makes
    the earlier pool current again.
    """

    def __init__(self, pool: MemoryPool, previous: MemoryPool) -> None:
        self._pool = pool
        self._previous = previous

    def __enter__(self) -> MemoryPool:
        return self._pool

    def _leave(self, *, failed: bool) -> None:
        previous = self._previous
        if previous.closed:
            # For the handle of a destroyed pool, the driver reports no error and uses the default pool.
            previous = MemoryPool.default(previous.location, previous.allocation_type, driver=previous._session.driver)
        previous._set_current()


class CurrentPool(Allocator):
    """Allocator that uses the pool that is current on its device at each allocation (``cuMemAllocAsync``)."""

    alloc_name = "cuMemAllocAsync"

    def __init__(self, device: Device) -> None:
        session = session_for(device, None)
        # In a forked child, allocators that the parent has made refuse calls, but this object may be new in the child.
        session.check_process()
        function = session.driver.cuMemAllocAsync

        self.location, self.managed = device.location, False
        self._bind(session, lambda nbytes, _, stream: function(nbytes, stream), None)

    @staticmethod
    def of(device: Device) -> CurrentPool:
        """Return the allocator that uses the pool that is current on ``device`` at each allocation: the same object as
        long as it exists. Raises ForkedProcessError in a forked child.
        """
        current = pools_of(session_for(device, None)).current
        found = current.get(device.ordinal)
        if not isinstance(found, CurrentPool):
            found = current[device.ordinal] = CurrentPool(device)
        return found

    def pool_of(self, buffer: Buffer) -> object:
        if not buffer.address:
            return MemoryPool.current(self.location, driver=self._session.driver)
        raw = self._session.call("cuPointerGetAttribute", _POOL_HANDLE, buffer.address)
        known = MemoryPool._known(self._session, raw)
        # cuMemAllocAsync uses a pool of its stream's device.
        return known or MemoryPool._of_handle(self._session, raw, self.location, MemAllocationType.PINNED)

    def reachable_from(self, device: Device) -> bool:
        pool = MemoryPool.current(self.location, driver=self._session.driver)
        return self.location == device.location or pool.reachable_from(device)

    def _make_room(self, stream: Stream) -> bool:
        return MemoryPool.current(self.location, driver=self._session.driver)._make_room(stream)

    def _ask_again(self, failure: CudaError) -> bool:
        return MemoryPool.current(self.location, driver=self._session.driver)._ask_again(failure)

    def _figures(self, device: Device, capturing: bool) -> dict[str, Any]:
        pool = None if capturing else read_or_none(lambda: MemoryPool.current(device))
        if pool is None:
            return _memory_of(device)
        figures = pool._figures(device, capturing)
        if "allocators" in figures:
            figures["allocators"] += (self,)
        return figures


def allocate(nbytes: int | str, stream: StreamLike) -> Buffer:
    """Allocate from the current pool of the stream's device (``cuMemAllocAsync``), as :meth:`MemoryPool.allocate` does.

    Parameters
    ----------
    nbytes, stream
        As for :meth:`MemoryPool.allocate`. A stream of another library counts as a stream of the default driver.

    Raises
    ------
    OutOfMemoryError, NotSupportedError, CaptureError, TypeError, ValueError, ClosedError
        As for :meth:`MemoryPool.allocate`.
    """
    if not isinstance(stream, Stream):
        stream = as_stream(stream, Session.of(default_driver()))
    return CurrentPool.of(stream.device).allocate(nbytes, stream)


def known_pools(session: Session) -> list[MemoryPool]:
    """Return the open pools of a driver that have an object in this process."""
    # `valuerefs` lists the references in one call. A loop over the dict would raise if another thread adds a pool.
    known = [reference() for reference in pools_of(session).alive.valuerefs()]
    return [pool for pool in known if isinstance(pool, MemoryPool) and not pool.closed]


def pool_holders(session: Session, location: MemLocation, except_for: MemoryPool | None = None) -> tuple[str, ...]:
    """Return texts for an out-of-memory error, one for each pool, except ``except_for``, that has reserved memory of a
    location. The texts are sorted by bytes reserved, most first.
    """
    found: list[tuple[int, str]] = []
    for pool in known_pools(session):
        if pool.location == location and pool is not except_for:
            with contextlib.suppress(ClosedError, CudaError), session.relaxed():
                reserved, used = pool.attributes.reserved_mem_current, pool.attributes.used_mem_current
                name = f"pool {pool.name!r}" if pool.name else f"the pool {int(pool.checked_raw()):#x}"
                found.append((reserved, f"{name}: {size_text(reserved)} reserved, {size_text(used)} used"))
    return tuple(line for reserved, line in sorted(found, reverse=True) if reserved)


def _asked(session: Session, raw: Any) -> tuple[MemLocation | None, MemAllocationType]:
    """Return the location and allocation type of the pool ``raw``, as the driver reports them
    (``cuMemPoolGetAttribute``). The location is None if it cannot be found. Raises CudaError for a destroyed or
    imported pool.
    """
    made = MemoryPool.__new__(MemoryPool)
    made._session, made._raw, made.closed, made._end = session, raw, False, None
    # This attribute is read first, because driver 580 refuses it for a destroyed pool. cuMemPoolGetAccess, below, would
    # return a wrong result, or crash.
    hint = "the pool was destroyed, is of another process, or was imported: see ipc.ImportedPool.from_handle"
    session.call("cuMemPoolGetAttribute", raw, _FIGURES[0], hint=hint)
    access = session.call("cuMemPoolGetAccess", raw, MemLocation.host().to_driver())
    on_host, kind = int(access) != MemAccess.NONE, MemAllocationType.PINNED
    # Some bindings and drivers lack these attributes: then the location is inferred, and the type counts as pinned.
    with contextlib.suppress(CudaError):
        told = made.attributes
        kind, where, number = told.allocation_type, told.location_type, told.location_id
        if where is MemLocationType.DEVICE_LOCALITY_DOMAIN:
            return MemLocation(where, localized=MemLocality(number, told.locality_domain_id)), kind
        return MemLocation(where, number), kind
    return location_of_pool(session, raw, on_host, kind), kind


def _properties_of(
    where: Device | MemLocation | MemPoolProps | int,
    max_size: float | str,
    handle_types: MemHandleType,
    session: Session,
) -> MemPoolProps:
    if isinstance(where, MemPoolProps):
        if max_size or handle_types:
            raise ValueError("max_size and handle_types are fields of MemPoolProps: set them there")
        return where
    location = location_of("where", where, "a Device, its ordinal, a MemLocation or MemPoolProps")
    return MemPoolProps(location=location, max_size=_limit_of(location, max_size, session), handle_types=handle_types)


def _default_pool(session: Session, location: MemLocation, allocation_type: MemAllocationType) -> int:
    # Bindings before CUDA 13 know no default pool in host memory.
    with contextlib.suppress(NotSupportedError):
        return int(existing_pool(session, "Default", location, allocation_type))
    return 0


def _checked_policy(on_oom: OutOfMemoryPolicy) -> OutOfMemoryPolicy:
    if not callable(on_oom) and on_oom not in _POLICIES:
        raise ValueError(f"on_oom={on_oom!r}: allowed are {', '.join(map(repr, _POLICIES))} and a function")
    return on_oom


def _limit_of(location: MemLocation, max_size: float | str, session: Session) -> int:
    """Return the most bytes of a pool for the argument ``max_size``, which is a size or, as a float, a share of the
    device's memory. Raises TypeError, ValueError.
    """
    if not isinstance(max_size, float):
        return checked_size("max_size", max_size)
    if not 0 < max_size <= 1 or location.type is not MemLocationType.DEVICE:
        raise ValueError(f"max_size={max_size}: a float is a share, above 0 and up to 1, of a device's memory")
    check_location(session, location)
    return int(max_size * Device(location.id, driver=session.driver).memory_info().total)


def _refuse(pool: str, *_: object) -> Any:
    raise ClosedError(f"{pool} was closed")


def _memory_of(device: Device) -> dict[str, Any]:
    info = read_or_none(device.memory_info)
    return {} if info is None else dict(info._asdict())


def _why_refused(properties: MemPoolProps) -> str:
    """Return text for the error if the driver refuses to make a pool with these properties: the usual cause, or
    ``""``.
    """
    if properties.handle_types & MemHandleType.FABRIC:
        return FABRIC_NEEDS
    if properties.alloc_type is MemAllocationType.MANAGED:
        return (
            "pools of managed memory need a driver for CUDA 13.0, and concurrent managed access on every device: see "
            "device.supports.managed_memory_pools"
        )
    if properties.location.type is MemLocationType.DEVICE_LOCALITY_DOMAIN:
        return DOMAIN_NEEDS
    if properties.location.type is MemLocationType.HOST_NUMA:
        return f"location={properties.location}: is there such a NUMA node, and does the device support pools on it?"
    if properties.max_size:
        return f"max_size={properties.max_size}: more than the device can map?"
    return ""
