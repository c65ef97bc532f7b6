"""Base class of pools and caches, with the retries of an allocation that finds no memory.

A pool binds the driver's functions to allocate and to free. So :meth:`Allocator.allocate` and :meth:`Buffer.free` make
only one driver call if nothing must be queried about the stream (:mod:`streamalloc.core.stream`). A closed pool binds
an allocation function that raises. :class:`PlainMemory` binds its own functions. A cache overrides ``allocate``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from streamalloc.core.allocation_hooks import Tap, Watcher, bare, holders, tap_of, watching_of
from streamalloc.core.buffer import Buffer, BufferSource, GraphBuffer, PoolBuffer, filled
from streamalloc.core.copies import CopySide
from streamalloc.core.deferred import work
from streamalloc.core.device import Device
from streamalloc.core.errors import CudaError, OutOfMemoryError, error_from, undoing
from streamalloc.core.fence import await_closed
from streamalloc.core.library_streams import as_stream, library_stream
from streamalloc.core.properties import MemLocationType, checked_size
from streamalloc.core.resource import Unique
from streamalloc.core.session import Session, members, refuse_after_fork
from streamalloc.core.stream import NOT_CAPTURED, Stream, StreamLike, known_streams, may_be_captured
from streamalloc.driver.internal import cuda

T = TypeVar("T")

_SHORTEST, _LONGEST = 0.001, 0.02
"""Shortest and longest time in seconds between two attempts of :meth:`Allocator.allocate_async`."""
_OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
_IN_GRAPHS = (
    "an allocation in a capture becomes memory of the graph, and the driver accepts only pools of device memory that "
    "were made without handle_types: allocate before the capture, or from such a pool. The capture goes on"
)


class Allocator(Unique, BufferSource):
    """Source of buffers that allocates memory: a pool, a cache over a pool, or an allocator outside of pools, such as
    :class:`PlainMemory`.
    """

    __slots__ = ("__weakref__", "_raw", "alloc_function")

    _inner: ClassVar[tuple[str, ...]] = (
        "alloc_function", "alloc_name", "checked_raw", "free_function", "pool_of", "reachable_from",
    )  # fmt: skip

    alloc_name = "cuMemAllocFromPoolAsync"
    """Name of the driver function behind ``alloc_function``, for errors."""
    alloc_function: Any
    """The driver's function to allocate, or a replacement of it: :meth:`Tap.allocate` while there are watchers, a
    function of the current pool or of :class:`PlainMemory`, or a function that raises (closed pool, forked child). None
    for a cache, which does not call it.
    """
    _raw: Any
    """``CUmemoryPool``, the second argument of ``alloc_function``."""

    def _bind(self, session: Session, alloc: Any, raw: Any, free: Any = None) -> None:
        """Bind the two functions that allocate and free. ``alloc`` takes the size in bytes, ``raw`` (``CUmemoryPool``)
        and the stream's handle (``CUstream``). ``free`` replaces ``cuMemFreeAsync``.

        The caller must have set ``location`` and ``managed``.
        """
        self._session = session
        location = self.location
        pinned_there = location.type is MemLocationType.DEVICE and location.seen and not self.managed
        self._ordinal = location.id if pinned_there else None
        self.alloc_function = alloc
        self.free_function = session.driver.cuMemFreeAsync if free is None else free
        self._raw = raw
        session.shut_with_me(self)
        watching_of(session).bound(self)

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None:
        """Notify ``watchers`` of each further allocation and free of this allocator. Without watchers, bind the
        driver's own functions again.
        """
        tap = tap_of(self.free_function)  # A closed pool has replaced ``alloc_function``, but not ``free_function``.
        if tap is None:
            if watchers and not self._session.forked:
                tap = Tap(self, self.alloc_function, self.free_function)
                tap.watchers = watchers
                self.alloc_function, self.free_function = tap.allocate, tap.free
            return
        tap.watchers = watchers
        if not watchers:
            # A closed pool or a forked child has set functions that refuse. They must stay.
            if tap_of(self.alloc_function) is tap:
                self.alloc_function = tap._alloc
            self.free_function = tap._free

    def allocate(self, nbytes: int | str, stream: StreamLike) -> Buffer:
        """Allocate in stream order (``cuMemAllocFromPoolAsync``). Work on ``stream`` can use the memory at once.

        Parameters
        ----------
        nbytes
            Size in bytes, or text such as ``"2MiB"``; 0 gives a valid empty buffer. Addresses are multiples of 512
            bytes.
        stream
            The stream that orders the allocation: a :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy,
            PyTorch or Numba stream. It may be of another device of the same driver.

        Returns
        -------
        Buffer
            While ``stream`` is being captured, a :class:`GraphBuffer`, which belongs to the graph.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory. The error has memory figures of the pool and of the device.
        NotSupportedError
            ``stream`` is being captured, and the pool was made for sharing (``handle_types``) or is not in device
            memory.
        CaptureError
            This thread captures another stream in a mode other than ``"relaxed"``; the capture is then invalid. Or
            ``stream`` is the legacy default stream, and a blocking stream is being captured.
        TypeError, ValueError
            ``nbytes`` is not a size or out of range, or ``stream`` is not a stream or belongs to another driver.
        ClosedError
            The pool or the stream was closed.
        """
        ordered = stream if isinstance(stream, Stream) else library_stream(stream, self._session)
        # The shift is not 0 if the size is negative or too large for the driver.
        if type(nbytes) is not int or nbytes >> 64:
            nbytes = checked_size("nbytes", nbytes)
        # Columns 2 and 3 of the table in :mod:`streamalloc.core.stream` give the reasons.
        handle = ordered.direct or ordered.ready()
        if ordered.capturable and handle is not None:  # In a capture, the memory would be the graph's.
            is_capturing = ordered._session.cuStreamIsCapturing  # A local name makes the call faster.
            if is_capturing(handle)[1] is not NOT_CAPTURED:
                handle = None
        if handle is None or ordered._session is not self._session:
            # The argument is passed, not ``ordered``: a library's object may have another stream by now.
            return self._allocate_checked(nbytes, stream)
        buffer: Buffer = PoolBuffer()
        buffer._nbytes = nbytes
        buffer._stream = ordered
        buffer._allocator = self
        buffer.shared = None
        alloc = self.alloc_function
        result, buffer._ptr = alloc(nbytes, self._raw, handle)
        if result:
            self._recover(result, buffer)
        return buffer

    async def allocate_async(self, nbytes: int | str, stream: StreamLike) -> Buffer:
        """Allocate as :meth:`allocate` does. While there is not enough memory, wait without blocking the running event
        loop.

        The allocation is repeated after pauses of 1 to 20 ms, until any thread or process has freed enough memory.
        ``asyncio.wait_for`` limits the wait. A request for more host memory than there is waits without an end, unless
        the pool has a maximum.

        Raises
        ------
        OutOfMemoryError
            The size is more than the pool's maximum or the memory of the device, or ``stream`` is being captured. Other
            errors are those of :meth:`allocate`.
        """
        # asyncio is imported here, because it would double the import time of the package. A program with a running
        # event loop has imported it already.
        from asyncio import sleep

        pause = _SHORTEST
        while True:
            try:
                return self.allocate(nbytes, stream)
            except OutOfMemoryError as error:
                if error.requested is None or _exceeded(**vars(error)):
                    raise
                # No free makes room for memory of a graph, and a pause would leave the capture open.
                if may_be_captured(as_stream(stream, self._session)):
                    raise
            await sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def to_device(self, data: Any, stream: StreamLike) -> Buffer:
        """Allocate memory of the size of ``data``, copy ``data`` to it in stream order, and return the buffer.

        Parameters
        ----------
        data
            Any source of :meth:`Memory.copy_from`: bytes, a numpy array, memory of this package, an array of another
            library.
        stream
            As for :meth:`allocate`.

        Raises
        ------
        TypeError, ValueError
            ``data`` is not of these types, is not contiguous, or is of another driver.
        ClosedError
            The memory ``data`` was freed, or the pool or the stream was closed.
        OutOfMemoryError
            There is not enough memory. Other errors are those of :meth:`allocate`.
        """
        side = CopySide.of(data, self._session)
        buffer = self.allocate(side.nbytes, stream)
        with undoing(buffer.free):
            buffer.copy_from(data)
        return buffer

    def _allocate_checked(self, nbytes: int, stream: StreamLike) -> Buffer:
        """Allocate on a stream about which something must be queried first: it may be captured or closed, or its
        context or thread may not be the current one.
        """
        self._check_open()
        ordered = as_stream(stream, self._session)

        def allocate(handle: Any, captured: bool) -> tuple[Any, Buffer]:
            buffer: Buffer = filled(GraphBuffer if captured else PoolBuffer, self, None, nbytes, ordered)
            if isinstance(buffer, GraphBuffer):
                buffer._graph = None if ordered._capture is None else ordered._capture.graph
            return self._ask_driver(buffer, handle), buffer

        result, buffer = ordered.checked_call(allocate)
        if result:
            self._recover(result, buffer)
        return buffer

    def _ask_driver(self, buffer: Buffer, handle: Any) -> Any:
        """Allocate memory for ``buffer`` on its stream, whose ``CUstream`` is ``handle`` and whose context is current.
        Returns the ``CUresult``. Watchers are not notified of memory of graphs.
        """
        alloc = self.alloc_function if type(buffer) is PoolBuffer else bare(self.alloc_function)
        # The buffer gets the memory before the caller's context is restored: the driver may refuse to restore it, and
        # the memory would be lost.
        result, buffer._ptr = alloc(buffer._nbytes, self._raw, handle)
        return result

    def _recover(self, result: Any, buffer: Buffer) -> None:
        """Handle ``result``, the driver's error for an allocation. If memory is exhausted, release unused memory and
        allocate again. Repeat this as long as the pool's ``on_oom`` function returns True (:meth:`_ask_again`). It is
        not called for a request that no free can make room for. Raises the last error if no allocation succeeds.
        """
        if result != _OUT_OF_MEMORY:
            in_graph = type(buffer) is GraphBuffer and result == cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED
            raise error_from(result, self.alloc_name, f"{self._no_source()}; {_IN_GRAPHS}" if in_graph else "")
        stream = buffer._stream

        def again() -> Any:
            return stream.in_context(self._ask_driver, buffer, stream.checked_raw())

        # In a capture the pool is neither queried nor trimmed, and no stream is synchronised: such calls would
        # invalidate the capture.
        capturing = may_be_captured(stream)
        while result == _OUT_OF_MEMORY:
            with self._session.relaxed():
                released, trouble = (False, "") if capturing else self._release_unused(stream)
            if released and (result := again()) != _OUT_OF_MEMORY:
                break
            with self._session.relaxed():
                failure = self._out_of_memory(result, buffer, capturing, trouble)
            try:
                if capturing or _exceeded(**vars(failure)) or not self._ask_again(failure):
                    raise failure
            finally:
                # Delete the local name: error and frame would form a reference cycle that keeps the callers' objects
                # alive.
                del failure
            result = again()
        if result:
            raise error_from(result, self.alloc_name)

    def _release_unused(self, stream: Stream) -> tuple[bool, str]:
        """Make the deferred releases that are possible, and release unused memory of this allocator. Returns whether an
        allocation may succeed now, and the text of a driver error, or ``""``.
        """
        try:
            for known in members(known_streams(self._session)):
                await_closed(known)
            freed = work(self._session)
            return self._make_room(stream) or freed > 0, ""
        except CudaError as error:
            return False, f"making room failed: {error}"

    def _out_of_memory(self, result: Any, buffer: Buffer, capturing: bool, trouble: str) -> CudaError:
        figures = self._figures(buffer._stream.device, capturing)
        figures["requested"] = buffer._nbytes
        own, pools = figures.pop("allocators", None), figures.pop("holders", ())
        # Other pools are named only if they can be the cause. If this pool has a maximum size, and the allocation would
        # exceed it or the device has enough free memory, their names would mislead.
        used, free = figures.get("used", 0), figures.get("free", 0)
        limited = "limit" in figures and (used + buffer._nbytes > figures["limit"] or free >= buffer._nbytes)
        listed = holders(self._session, self.location, own if limited else None)
        figures["holders"] = (() if limited else pools) + listed
        return error_from(result, self.alloc_name, trouble or _advice(**figures), **figures)

    def _no_source(self) -> str:
        """Return the reason why a graph cannot allocate from this allocator, as text for the error message."""
        return "the stream is being captured, and the pool was made for sharing or is not in device memory"

    def _check_open(self) -> None:
        """Raise :class:`ClosedError` if the allocator was closed."""

    def _make_room(self, stream: Stream) -> bool:
        """Release unused memory of this allocator, so that ``stream`` can allocate. Returns whether to try the
        allocation again; always False in this base class.
        """
        return False

    def _ask_again(self, failure: CudaError) -> bool:
        """Call the pool's ``on_oom`` function with the error ``failure``. Returns whether to try the allocation again;
        False without such a function.
        """
        return False

    def _figures(self, device: Device, capturing: bool) -> dict[str, Any]:
        """Return the figures of an :class:`OutOfMemoryError` (bytes) by their names, without figures that cannot be
        read. With ``capturing``, the driver is not asked about the pool, because that would invalidate the capture.
        """
        raise NotImplementedError

    def _shut_after_fork(self) -> None:
        self.alloc_function = self.free_function = refuse_after_fork


def read_or_none(ask: Callable[[], T]) -> T | None:
    """Return the result of ``ask``, or None if the driver refuses. For optional parts of error messages."""
    try:
        return ask()
    except CudaError:
        return None


def _exceeded(requested: int = 0, limit: int | None = None, total: int | None = None, **_: object) -> str:
    """Return the name of a bound (bytes) that a request exceeds, so that no free can make room for it; ``""`` if there
    is none. The arguments are figures of an :class:`OutOfMemoryError`.
    """
    bounds = ((limit, "the pool's max_size"), (total, "the device's memory"))
    return next((name for bound, name in bounds if bound is not None and requested > bound), "")


def _advice(
    requested: int, used: int | None = None, limit: int | None = None, total: int | None = None, **_: object
) -> str:
    """Return the likely cause of an out-of-memory error with these figures (bytes), as the hint of its message."""
    if name := _exceeded(requested, limit, total):
        return f"the request is larger than {name}"
    if limit is not None and used is not None and requested + used > limit:
        return "the pool's max_size does not leave room for it"
    return "memory that was freed comes back once its streams were synchronized; other pools' after trim()"
