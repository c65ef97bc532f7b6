"""Buffers: allocations of pools, their frees, and what is needed to share them with other processes.

The way of an allocation (:meth:`Allocator.allocate`):

1. *Stream.* :func:`library_stream` finds the :class:`Stream` of another library's object.
2. *Ready.* :meth:`Stream.ready` gives the handle, and the driver says whether other code captures the stream. Without a
   handle, :meth:`Allocator._allocate_checked` does steps 2 and 3 on the checked way (:mod:`streamalloc.core.stream`).
3. *Driver.* ``alloc_function`` of the pool allocates (``cuMemAllocFromPoolAsync``); the buffer has the pointer.
4. *Refusal.* :meth:`Allocator._recover` makes room and repeats step 3, or raises.

The way of a free (:meth:`Buffer.free`). The thread that takes the pointer out of the buffer frees it; nobody else does.

1. *Ready.* :meth:`Stream.ready` gives the handle. Without a handle, step 4 follows, and for shared memory its second
   half.
2. *Driver.* ``free_function`` of the allocator frees (``cuMemFreeAsync``).
3. *Refusal.* :meth:`Buffer._not_freed` puts the pointer back, unless the memory is gone.
4. *Checked way.* :meth:`Buffer._free_checked` finds a stream after the uses. :meth:`Buffer._free_after` refuses
   captures that did not allocate the memory. For shared memory, :meth:`SharedState.begin_free` says whether the free
   is made now. :meth:`Buffer.free_on` makes it, by steps 2 and 3.

The way of a drop (:meth:`PoolBuffer.__del__`):

1. *Ready.* :meth:`Stream.ready` gives the handle; the stream is not destroyed meanwhile.
2. *Driver.* ``free_function`` frees, in the relaxed capture mode; for a default stream, if need be, in its context.
3. *Later.* Without a handle, or after a refusal, the queue of ends gets a :class:`_FreeDropped`. A point of work frees
   the memory in the order of its stream (:func:`~streamalloc.core.fence.ordered_after`). Shared memory goes to
   :meth:`SharedState.drop`.
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from streamalloc.core.allocation_hooks import notify_freed
from streamalloc.core.deferred import Deferred, deferred_queue
from streamalloc.core.device import Device, check_device
from streamalloc.core.errors import (
    LOST,
    CaptureError,
    ClosedError,
    CudaError,
    InvalidValueError,
    NotReadyError,
    error_from,
    is_gone,
    refused,
    size_text,
    undoing,
)
from streamalloc.core.fence import await_closed, ordered_after
from streamalloc.core.library_streams import as_stream
from streamalloc.core.memory import Memory
from streamalloc.core.properties import (
    MemAccess,
    MemAccessDesc,
    MemLocation,
    MemLocationType,
    checked_seconds,
    checked_size,
    checked_type,
)
from streamalloc.core.resource import Closes, above
from streamalloc.core.session import GLOBAL, NOT_CALLED, RELAXED, Session
from streamalloc.core.stream import NOT_CAPTURED, Stream, StreamLike
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row

if TYPE_CHECKING:
    from streamalloc.core.graph import Graph
    from streamalloc.driver import Driver

StillImported: TypeAlias = Literal["defer", "wait", "raise", "ignore"]
_POLICIES = ("defer", "wait", "raise", "ignore")
_DEFER: StillImported = "defer"

_NOT_ALLOCATED = "no launch has allocated the memory since its last free"
_FOREIGN_IN_CAPTURE = (
    "the stream is being captured, where only memory that the capture allocated can be freed; free it after the capture"
)


class SharedState(abc.ABC):
    """State of a shared buffer, which other processes may have open. It says when the buffer frees the memory.
    :mod:`streamalloc.ipc` attaches this object when the buffer is shared.
    """

    __slots__ = ("pointer",)

    pointer: Any
    """``CUdeviceptr`` of the memory. The pointer of the buffer itself is None while the buffer is shared."""

    @abc.abstractmethod
    def begin_free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> bool:
        """Return whether ``buffer`` frees the memory now, on ``stream``; the buffer then calls :meth:`end_free`. If the
        result is False, this object has freed the memory, or frees it later. ``still_imported`` and ``timeout``
        (seconds) say what to do if another process has the memory open, as in :meth:`Buffer.free`. Raises
        StillImportedError.
        """

    def end_free(self, freed: bool) -> None:  # noqa: B027 (only a lease has an end to note)
        """Note that the buffer has made its free. ``freed``: whether the memory is freed, by this free or by another
        thread. Does nothing in this base class.
        """

    @property
    def readers(self) -> int:
        """Number of other processes that have the memory open; 0 in this base class."""
        return 0

    @abc.abstractmethod
    def drop(self, buffer: Buffer) -> None:
        """Submit the free of a dropped buffer to the deferred queue. The buffer's finaliser calls this method, so it
        takes no lock, except that of a driver that checks the calls.
        """


class BufferSource:
    """Source of a buffer's memory: an allocator, or a :class:`PlainSource` for memory that no allocator of this package
    allocated.
    """

    __slots__ = ("_ordinal", "_session", "free_function", "location", "managed")

    location: MemLocation
    """Location of the memory; ``MemLocation.none()`` for managed memory without a preferred location, and if the driver
    reports no location.
    """
    managed: bool
    """Whether the memory is managed: the driver migrates it between devices and host."""
    free_function: Any
    """Function that frees memory. It takes a pointer and a ``CUstream``, and returns a tuple with the ``CUresult``."""
    _ordinal: int | None
    """Ordinal of the device that owns the memory; None for host, managed or unknown memory."""
    _session: Session

    def pool_of(self, buffer: Buffer) -> object:
        """Return the pool or other allocator of a buffer's memory; None if it is unknown to this package."""
        return None

    def reachable_from(self, device: Device) -> bool:
        """Return whether ``device`` has access to the memory. This base class has no pool, and returns True."""
        return True


class Residence(NamedTuple):
    """The location of memory, and whether the memory is managed, so that the driver migrates it between devices and
    host.
    """

    location: MemLocation | None
    """Location of the memory; None if the driver does not report a location."""
    managed: bool

    @property
    def ordinal(self) -> int | None:
        """Ordinal of the device that owns the memory; None for host memory, and if the location is None."""
        found = self.location
        return found.id if found is not None and found.type is MemLocationType.DEVICE else None


class PlainSource(BufferSource):
    """Source of one buffer whose memory no allocator of this package allocated: memory of other code, or of a graph
    that is built node by node.
    """

    __slots__ = ()

    def __init__(self, session: Session, place: Residence, free: Any) -> None:
        self._session = session
        self.free_function = free
        self._ordinal = None if place.managed else place.ordinal
        self.managed = place.managed
        self.location = place.location or MemLocation.none()


class Allocates(Protocol):
    """Type of the allocator that :meth:`Buffer.copy` takes: a pool, a cache, or any object with ``allocate``."""

    def allocate(self, nbytes: int, stream: Any, /) -> Buffer: ...


class Buffer(Memory, Closes):
    """An allocation of a memory pool, ordered by a stream.

    Made by :meth:`MemoryPool.allocate` and :func:`streamalloc.allocate`. Work on the buffer's stream may use the memory
    at once. Work on another stream, or on the host, must be ordered after the stream's work, by an event or a
    synchronisation. :meth:`free` returns the memory in stream order. A buffer that is dropped is freed on its
    :attr:`stream`.
    """

    __slots__ = ("__weakref__", "_allocator", "_nbytes", "_ptr", "_stream", "shared")

    _inner = (*Memory._inner, "free_by", "free_on", "past_caches", "shared")

    _allocator: BufferSource
    _nbytes: int
    _ptr: Any
    """``CUdeviceptr``; None once the memory was freed or shared."""
    shared: SharedState | None
    """State that frees the memory while the buffer is shared; None if the buffer is not shared."""
    _stream: Stream

    @property
    def _ordinal(self) -> int | None:  # type: ignore[override]
        return self._allocator._ordinal

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a Buffer is made by MemoryPool.allocate, streamalloc.allocate or Buffer.from_handle")

    @staticmethod
    def from_handle(
        address: Any,
        nbytes: int | str,
        *,
        owner: object,
        stream: StreamLike | None = None,
        driver: Driver | None = None,
    ) -> Buffer:
        """Make a buffer of memory that other code allocated by any driver call, for example C++ code or another
        library.

        The driver is queried for the kind, the device and the size of the memory (``cuPointerGetAttribute``).

        Parameters
        ----------
        address
            Address of the first byte: an integer or a ``CUdeviceptr``.
        nbytes
            Size in bytes, or text such as ``"2MiB"``. The memory may consist of several adjacent mappings.
        owner
            The object that owns the memory. It is kept alive until the buffer is freed or dropped and the work of the
            stream is done; the buffer frees nothing. None: other code owns the memory, and keeps it as long as the
            buffer is used. ``"this"``: the buffer becomes the owner. It frees memory of a pool in stream order
            (``cuMemFreeAsync``), and other memory after the host has waited for the stream (``cuMemFree``,
            ``cuMemFreeHost``). A dropped buffer frees the memory, too, but the host does not wait. Do not give
            ``"this"`` for memory of ``cuMemHostRegister``: the driver does not distinguish such memory from other host
            memory, and cannot free it.
        stream
            The stream of operations that name no stream; the caller orders it after the work that writes the memory.
            Default: the default stream of the memory's device.
        driver
            The driver to use if ``stream`` is None or another library's stream.

        Raises
        ------
        TypeError, ValueError
            ``address`` is not an address or not in CUDA memory, or the memory has fewer than ``nbytes`` bytes there. Or
            ``owner="this"`` is given, and ``address`` is not the beginning of an allocation, the memory is mapped, or a
            buffer with ``owner="this"`` owns it already. A buffer of a pool is not recognised as the owner. Or
            ``owner`` is another text, or ``stream`` is not a stream of the driver.
        ClosedError
            ``stream`` was closed.

        Examples
        --------
        >>> again = sa.Buffer.from_handle(buffer.address, 4096, owner=buffer, stream=stream)
        >>> again.location == buffer.location
        True
        """
        found: Buffer = above.buffer_from_handle(address, nbytes, owner, stream, driver)
        return found

    @property
    def address(self) -> int:
        """Address of the first byte; 0 for an empty buffer. Raises :class:`ClosedError` once the buffer was freed."""
        ptr = self._ptr
        return int(self._live() if ptr is None else ptr)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """Stream of operations that name no stream, and of the free of a dropped buffer. At first it is the stream of
        the allocation.

        Assign another stream if that stream uses the memory last: a dropped buffer is then freed after the new stream's
        work. The caller orders the new stream after the work of the previous stream. An assignment takes a cached
        buffer out of its cache, so a later free returns the memory to the pool.

        Raises
        ------
        ClosedError
            A stream is assigned, and the buffer was freed or the stream closed.
        TypeError, ValueError
            The assigned object is not a stream of this driver.
        """
        return self._stream

    @stream.setter
    def stream(self, stream: StreamLike) -> None:
        self.check_usable()
        ordered = as_stream(stream, self._allocator._session)
        self.past_caches()._stream = self._stream = ordered

    def copy(
        self, stream: StreamLike | None = None, *, nbytes: int | str | None = None, allocator: Allocates | None = None
    ) -> Buffer:
        """Allocate a new buffer and copy the bytes to it, in stream order (``cuMemcpyAsync``).

        Parameters
        ----------
        stream
            The stream of the allocation and the copy (default: the buffer's own). If this is another stream, let it
            wait for the work that writes this buffer.
        nbytes
            Size of the new buffer in bytes, or text such as ``"2MiB"`` (default: the size of this buffer). If the sizes
            differ, the smaller number of bytes is copied, and the rest of a larger buffer is not initialised.
        allocator
            The allocator of the new buffer (default: the allocator of this buffer).

        Raises
        ------
        TypeError, ValueError
            ``nbytes`` is not a size, ``stream`` is not a stream of this driver, or ``allocator`` was not given and the
            buffer has no allocator of this package.
        ClosedError
            The buffer was freed, or the stream closed.
        OutOfMemoryError
            There is not enough memory for the new buffer.

        Examples
        --------
        >>> larger = buffer.copy(nbytes=2 * buffer.nbytes)  # with buffer.free(), a resize
        >>> larger.nbytes // buffer.nbytes
        2
        """
        source: Any = self._allocator if allocator is None else allocator
        if not hasattr(source, "allocate"):
            raise ValueError(f"{self!r} has no allocator of this package: name one")
        ordered = self._ordered_on(stream)
        made: Buffer = source.allocate(self.nbytes if nbytes is None else checked_size("nbytes", nbytes), ordered)
        both = min(made.nbytes, self.nbytes)
        with undoing(made.free):
            made[:both].copy_from(self[:both], ordered)
        return made

    @property
    def owner(self) -> object:
        """The pool of the allocation; None for memory that this package did not allocate. For a buffer of
        :func:`streamalloc.allocate` the driver is queried (``cuPointerGetAttribute``), and ClosedError is raised once
        the buffer was freed.
        """
        return self._allocator.pool_of(self)

    @property
    def location(self) -> MemLocation:
        """Location of the memory; ``MemLocation.none()`` for managed memory without a preferred location, and if the
        driver reports no location.
        """
        return self._allocator.location

    @property
    def managed(self) -> bool:
        """Whether the driver migrates the memory between devices and host."""
        return self._allocator.managed

    @property
    def device_accessible(self) -> bool:
        """Whether the device of the buffer's stream has access to the pool's memory (``cuMemPoolGetAccess``). True for
        memory of :meth:`GraphBuffer.add_to`, which has no pool.
        """
        return bool(self._allocator.reachable_from(self._stream.device))

    @property
    def freed(self) -> bool:
        """Whether the buffer was freed: by :meth:`free`, by :meth:`close`, or by the end of a ``with`` block. The
        memory of a shared buffer may still wait for other processes.
        """
        return self._ptr is None and self.shared is None

    def free(
        self,
        stream: StreamLike | None = None,
        still_imported: StillImported = _DEFER,
        timeout: float | None = None,
    ) -> None:
        """Free the memory in stream order (``cuMemFreeAsync``). Earlier work may use the memory, later work must not.

        Parameters
        ----------
        stream
            The stream after whose work the memory is free (default: :attr:`stream`). The caller must order
            all uses before the free: the driver does not check that. In place of a per-thread stream of another thread
            it is the legacy stream (:attr:`Device.per_thread_stream`).
        still_imported
            Policy if another process has the shared buffer open, or may still open it with a descriptor that was shared
            with ``hold=True``. ``"defer"`` frees the memory later, after the last use. ``"wait"`` blocks the host until
            then. ``"raise"`` raises StillImportedError. ``"ignore"`` frees at once: importers then read whatever the
            memory is reused for.
        timeout
            The longest time in seconds that ``"wait"`` waits; None for no limit.

        Raises
        ------
        ClosedError
            The buffer was freed already, or the stream of the free was closed: name another stream.
        CaptureError
            The stream is being captured, and the memory was not allocated in this capture. The capture stays valid.
        StillImportedError
            Another process has the buffer open, or may still open it: with ``"raise"`` at once, with ``"wait"`` after
            ``timeout`` seconds. The buffer stays valid.
        TypeError, ValueError
            ``stream`` is not a stream or belongs to another driver, ``still_imported`` is another text, or,
            with ``"wait"``, ``timeout`` is negative or no number.
        """
        ordered = self._stream if stream is None else as_stream(stream, self._stream._session, after=True)
        handle, free = ordered.direct or ordered.ready(), self._allocator.free_function
        if handle is None or still_imported is not _DEFER:
            return self._free_checked(stream, still_imported, timeout)
        # Python switches no threads within this line, so only one of two threads gets the pointer. A second free would
        # free the memory of the next owner of the address.
        ptr, self._ptr = self._ptr, None
        if ptr is None:
            if self.shared is None or ordered.capturable or ordered.is_default:  # Freed; or a capture may be under way.
                return self._free_checked(stream, still_imported, timeout)
            return self._free_after(handle, False, ordered, still_imported, timeout)
        try:
            result = free(ptr, handle)[0]
        except NOT_CALLED:
            self._ptr = ptr
            raise
        if result:
            raise self._not_freed(result, ordered, ptr, None)

    def free_on(self, ordered: Stream, handle: Any) -> None:
        """Free the memory on ``ordered``, whose ``CUstream`` is ``handle`` (``cuMemFreeAsync``), even if other
        processes have the memory open. Raises ClosedError if the memory was freed already. Raises CudaError if the
        driver refuses; the buffer then keeps the memory, unless the memory no longer exists.
        """
        ptr, shared = self._ptr, self.shared
        self._ptr = self.shared = None
        pointer = ptr if shared is None else shared.pointer
        if pointer is None:
            self._live()
        free = self._allocator.free_function
        try:
            result = free(pointer, handle)[0]
        except NOT_CALLED:
            self._ptr, self.shared = ptr, shared
            raise
        if result:
            raise self._not_freed(result, ordered, ptr, shared)

    def _not_freed(self, result: Any, ordered: Stream, ptr: Any, shared: SharedState | None) -> CudaError:
        """Return the error of a free that the driver refused with ``result``. Give the pointer back to the buffer,
        unless the memory no longer exists: a second free would then free the memory of the next owner of the address.
        """
        error = free_refused(result, ordered)
        # CUDA_ERROR_INVALID_VALUE means that no memory has this address. Other errors of `is_gone` may come from the
        # stream that the caller named: the stream may have been destroyed, while the memory still exists.
        if not is_gone(error) or (ordered is not self._stream and not isinstance(error, InvalidValueError)):
            self._ptr, self.shared = ptr, shared
        return error

    def close(self) -> None:
        """Free the memory on :attr:`stream`, unless it was freed already. The end of a ``with`` block calls this
        method. Raises the errors of :meth:`free`.

        If the stream was closed, the memory is freed after the stream's work. If another library has closed its own
        stream, the host first waits until the device is idle.
        """
        if self.freed:
            return
        try:
            if not self._stream.closed:
                self.free()
                return
            await_closed(self._stream)
            ordered_after(self._stream, self.free)
        except ClosedError:
            if not self.freed:  # Otherwise another thread has freed the memory meanwhile.
                raise

    def _free_checked(self, stream: StreamLike | None, still_imported: StillImported, timeout: float | None) -> None:
        if still_imported not in _POLICIES:
            raise ValueError(f"still_imported={still_imported!r}: allowed are {', '.join(map(repr, _POLICIES))}")
        if timeout is not None and still_imported == "wait":
            checked_seconds("timeout", timeout)
        ordered = self._ordered_on(stream, after=True)
        self._session.check_process()
        ordered.checked_call(self._free_after, ordered, still_imported, timeout)

    def _free_after(
        self, handle: Any, captured: bool, last: Stream, still_imported: StillImported, timeout: float | None
    ) -> None:
        """Free the memory after the work of ``last``, whose ``CUstream`` is ``handle`` and whose context is current.
        ``captured``: whether the stream is being captured. For shared memory, ``still_imported`` and ``timeout`` apply
        as in :meth:`free`.
        """
        capture, state = last._capture, self.shared
        if captured and not self._belongs_to(None if capture is None else capture.graph):
            raise refused(CaptureError, "cuMemFreeAsync", _FOREIGN_IN_CAPTURE)
        if state is None:
            self.free_on(last, handle)
        elif state.begin_free(self, last, still_imported, timeout):
            try:
                self.free_on(last, last.direct or last.checked_raw())
            finally:
                state.end_free(self.freed)

    def _belongs_to(self, graph: object) -> bool:
        """Whether the capture of ``graph`` may have allocated the memory, so that the memory can be freed in it. None
        stands for a capture by other code.
        """
        return False

    def past_caches(self) -> Buffer:
        """Return the buffer whose free returns the memory to the driver. For a cached buffer this is the buffer of the
        pool behind it; for any other buffer it is the buffer itself. The memory of a cached buffer leaves its cache for
        good: a later free of the cached buffer frees the buffer of the pool.
        """
        return self

    def free_by(self, state: SharedState) -> None:
        """Let ``state`` decide from now on when the memory is freed (:meth:`SharedState.begin_free`). ``_ptr`` becomes
        None, so that a free finds the buffer shared. Raises ClosedError if the buffer was freed.
        """
        state.pointer = self._live()
        self.shared = state
        self._ptr = None

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        yield "pool", self.owner
        if self.shared is not None:
            yield "shared", f"open in {self.shared.readers} other processes"

    def _live(self) -> Any:
        ptr = self._ptr
        if ptr is None:
            shared = self.shared
            if shared is None:
                raise ClosedError(f"this buffer of {size_text(self._nbytes)} was freed")
            ptr = shared.pointer
        return ptr

    def check_usable(self) -> None:
        self._live()

    _check_open = check_usable

    def _text(self) -> str:
        where = "freed" if self.freed else f"at {int(self._live()):#x}"
        return f" of {self._nbytes} bytes {where}, {self.location}"


B = TypeVar("B", bound=Buffer)


def filled(kind: type[B], allocator: BufferSource, pointer: Any, nbytes: int, stream: Stream) -> B:
    """Return a new buffer of class ``kind``, with its attributes set. It owns ``pointer``: a ``CUdeviceptr``, a block
    of a cache, or None.
    """
    buffer = kind.__new__(kind)
    buffer._nbytes = nbytes
    buffer._stream = stream
    buffer._allocator = allocator
    buffer.shared = None
    buffer._ptr = pointer
    return buffer


class PoolBuffer(Buffer):
    """The usual :class:`Buffer` of :meth:`Allocator.allocate`. It is freed when it is dropped.

    For speed, the constructor runs no Python function: :meth:`Allocator.allocate` sets the attributes.

    The finaliser runs between any two lines of any thread: while that thread captures a stream, while another thread
    closes the buffer's stream, and in any order with the other objects of a garbage cycle. So it only makes one free in
    stream order, in the relaxed capture mode: in the default mode, the free could invalidate the capture of another
    stream. If the stream cannot take the call now (:meth:`Stream.ready`), an item of the deferred queue makes the free.
    A direct free on another thread's per-thread stream would not come after the work that used the memory. A free on a
    destroyed stream would crash.
    """

    __slots__ = ()

    if not TYPE_CHECKING:
        __init__ = object.__init__

    def __del__(self) -> None:
        try:
            ptr = self._ptr
        except AttributeError:  # The allocation raised, so this buffer owns no memory.
            return
        if ptr is None:
            if self.shared is not None and self._allocator._session.usable:
                self.shared.drop(self)
            return
        # First, because another finaliser of this garbage cycle may still use the buffer, and must find it freed.
        self._ptr = None
        allocator, stream = self._allocator, self._stream
        session = allocator._session
        unusable = session.unusable
        if unusable():
            return
        exchange, free, dropping = session.cuThreadExchangeStreamCaptureMode, allocator.free_function, stream._dropping
        # In the end ``handle`` is None if the free was not called. Otherwise ``result`` is the driver's answer to it.
        mode, result = GLOBAL, 0
        # While the list has an entry, a close of the stream on another thread does not destroy the driver's stream. So
        # the entry is made before the handle is read. Only the number of entries counts.
        dropping.append(None)
        try:
            failed, mode = exchange(RELAXED)
            # Other libraries' streams are `capturable`: only `ready` checks their garbage cycle. Ours need no call.
            handle = None if failed else (not stream.capturable and stream.direct) or stream.ready(True)
            if failed:
                mode = GLOBAL
            elif handle is not None:
                result = free(ptr, handle)[0]
            elif stream.is_default:
                # Perhaps only another context is current. If the driver refuses a change of contexts before the free,
                # `handle` stays None; after the free, only the error is lost.
                with contextlib.suppress(CudaError), stream._context():
                    handle = stream.ready(True)
                    if handle is not None:
                        result = free(ptr, handle)[0]
            if handle is None or result:
                _free_later(session, ptr, stream, handle, result)
        except NOT_CALLED:
            _free_later(session, ptr, stream, None, 0)
            raise
        finally:
            exchange(mode)
            dropping.pop()


PoolBuffer.__name__ = PoolBuffer.__qualname__ = "Buffer"


class GraphBuffer(Buffer):
    """Memory that a launch of a graph allocates. The graph owns this memory.

    :meth:`MemoryPool.allocate` returns it if the stream is being captured (:class:`Graph` shows a capture), and
    :meth:`add_to` adds it to a graph.

    The memory exists from a launch of the graph until its free, which is a node of the graph or a :meth:`free` after
    the launch. If the object is dropped, nothing is freed.
    """

    __slots__ = ("_address", "_graph", "node")

    _address: int
    """Address of the memory, for :attr:`address` after a free in the capture has cleared ``_ptr``."""
    _graph: Graph | None
    """The graph whose launch allocates the memory; None if other code began the capture."""
    node: Any
    """The allocation's ``CUgraphNode`` if :meth:`add_to` made this buffer; otherwise unset."""

    @classmethod
    def add_to(
        cls,
        graph: Graph,
        nbytes: int | str,
        stream: Stream,
        *,
        after: Iterable[Any] = (),
        access: Iterable[Device] = (),
    ) -> GraphBuffer:
        """Add an allocation to a graph that is built node by node, and return its buffer (``cuGraphAddMemAllocNode``).

        Nodes that use the memory must depend on :attr:`node`. Add such nodes by driver calls with :attr:`Graph.handle`,
        or by cuda.core.

        Parameters
        ----------
        graph
            The graph, for example of :meth:`Graph.create`. Add all nodes before the graph is instantiated.
        nbytes
            Size in bytes, at least 1.
        stream
            The stream of operations that name no stream. The memory is on the stream's device.
        after
            Nodes (``CUgraphNode``) of the graph that the allocation comes after.
        access
            Devices that get read and write access to the memory, in addition to the device of ``stream``.

        Raises
        ------
        TypeError, ValueError
            ``graph`` is not a :class:`Graph`, ``nbytes`` is not a size, ``stream`` is not a :class:`Stream`, ``access``
            names something that is not a device, or one of them belongs to another driver. Or the graph was
            instantiated already, for example by its first launch.
        InvalidValueError
            A node is of another graph, or the size is 0.
        ClosedError
            The graph was closed.

        Examples
        --------
        >>> graph = sa.Graph.create(device)
        >>> buffer = sa.GraphBuffer.add_to(graph, 4096, stream)
        >>> end = buffer.add_free(after=[buffer.node])
        >>> graph.nodes
        ['MEM_ALLOC', 'MEM_FREE']
        """
        from streamalloc.core.graph import Graph

        checked_type("stream", stream, Stream)
        session, device = checked_type("graph", graph, Graph)._session, stream.device
        if stream._session is not session:
            raise ValueError(f"stream={stream!r} belongs to another driver than {graph!r}")
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location = device.location.to_driver()
        peers = list(access)
        for peer in peers:
            check_device("access", peer, session)
        grants = [MemAccessDesc(peer.location, MemAccess.READWRITE).to_driver() for peer in peers]
        params.accessDescs, params.accessDescCount = grants, len(grants)
        params.bytesize = size = checked_size("nbytes", nbytes)
        nodes = list(after)
        source = PlainSource(session, Residence(device.location, managed=False), session.cuMemFreeAsync)
        buffer = filled(cls, source, None, size, stream)
        wanted = graph._raw_to_extend(), nodes, len(nodes), params
        buffer.node = session.call_in(device.ordinal, "cuGraphAddMemAllocNode", *wanted)
        buffer._graph, buffer._address = graph, int(params.dptr)
        buffer._ptr = cuda.CUdeviceptr(buffer._address)
        return buffer

    def add_free(self, *, after: Iterable[Any]) -> Any:
        """Add the free of this memory to its graph (``cuGraphAddMemFreeNode``), and return the free's ``CUgraphNode``.

        Parameters
        ----------
        after
            Nodes that the free comes after: all nodes that use the memory.

        Raises
        ------
        ClosedError
            The graph was closed, or has a free of this memory already.
        InvalidValueError
            A node is of another graph.
        ValueError
            Other code captured the graph, so that its handle is unknown. Or the graph was instantiated already.
        """
        graph = self._graph
        if graph is None:
            raise ValueError(
                f"{self!r} is of a graph that other code captured: call cuGraphAddMemFreeNode with its handle"
            )
        nodes, pointer = list(after), self._live()
        args = graph._raw_to_extend(), nodes, len(nodes), pointer
        node = graph._session.call_in(graph.device.ordinal, "cuGraphAddMemFreeNode", *args)
        self._ptr = None
        return node

    @property
    def address(self) -> int:
        """Address of the first byte at every launch, also after :meth:`free`; 0 for an empty buffer."""
        ptr = self._ptr
        return self._address if ptr is None else int(ptr)

    @property
    def _at(self) -> int:
        return int(self._live())

    @property
    def owner(self) -> object:
        """The graph whose launch allocates the memory; None if other code began the capture."""
        return self._graph

    def free(
        self,
        stream: StreamLike | None = None,
        still_imported: StillImported = _DEFER,
        timeout: float | None = None,
    ) -> None:
        """Free in stream order (``cuMemFreeAsync``). In the capture the free becomes a node of the graph; afterwards it
        frees the memory of the last launch.

        The address is the same at every launch, so the method may be called after each launch. Memory of graphs cannot
        be shared, so ``still_imported`` and ``timeout`` have no effect.

        Raises
        ------
        InvalidValueError
            No launch has allocated the memory, or the memory was freed already.
        ClosedError
            The graph frees the memory itself, by a free in the capture or :meth:`add_free`. Or the stream was closed.
        CaptureError
            The stream is being captured into another graph.
        TypeError, ValueError
            As for :meth:`Buffer.free`.
        """
        self._free_checked(stream, still_imported, timeout)

    def _free_after(self, handle: Any, captured: bool, *wanted: Any) -> None:
        pointer = self._live()
        self._address = int(pointer)
        super()._free_after(handle, captured, *wanted)
        if not captured:
            self._ptr = pointer

    def _kept_by_graphs(self) -> object:
        return None

    def _access_hint(self, stream: Stream) -> str:
        return super()._access_hint(stream) or ("" if stream._capture else _NOT_ALLOCATED)

    def _not_freed(self, result: Any, ordered: Stream, ptr: Any, shared: SharedState | None) -> CudaError:
        self._ptr = ptr  # free() must find it: the next launch allocates at the same address.
        return free_refused(result, ordered, _NOT_ALLOCATED)

    def _belongs_to(self, graph: object) -> bool:
        # One capture may contain streams of this package and of other code. So if either graph is unknown, the free is
        # allowed here, and the driver decides.
        return graph is self._graph or None in (graph, self._graph)


def _warn_not_freed(ptr: Any, error: CudaError) -> None:
    if not isinstance(error, LOST):  # A lost context has no memory left, so nothing leaks.
        warnings.warn(f"dropped memory at {int(ptr):#x} could not be freed: {error}", ResourceWarning, 3)


def _free_later(session: Session, ptr: Any, stream: Stream, handle: Any, result: Any) -> None:
    """Submit an item that frees memory of a dropped buffer, unless the memory is gone. ``handle``: the ``CUstream`` on
    which the driver has refused the free with ``result``; None if the driver was not called.
    """
    if handle is not None:
        error = error_from(result, "cuMemFreeAsync")
        # In a capture, the driver returns the same error for memory that no longer exists and for memory that is not
        # the graph's. So the error is final only outside of a capture.
        if is_gone(error) and session.cuStreamIsCapturing(handle)[1] is NOT_CAPTURED:
            _warn_not_freed(ptr, error)
            return
    deferred_queue(session).submit(_FreeDropped(session, ptr, stream))


class _FreeDropped(Deferred):
    """Queue item that frees the memory of a dropped buffer, because its finaliser could not make the free at once."""

    __slots__ = ("_raw", "_session", "_stream", "_warned")

    def __init__(self, session: Session, ptr: Any, stream: Stream) -> None:
        self._session = session
        self._raw = ptr
        self._stream = stream
        self._warned = False

    def attempt(self) -> bool:
        address = self._raw
        try:
            ordered_after(self._stream, self._free)
        except NOT_CALLED:
            # Not raised: the caller has no part in the free.
            return False
        except CudaError as error:
            if not isinstance(error, (CaptureError, NotReadyError)) and not self._warned:
                self._warned = True
                _warn_not_freed(address, error)
            raise
        return True

    def _free(self, ordered: Stream) -> None:
        with notify_freed(self._session, int(self._raw), ordered._raw):
            ordered.in_context(self._session.release, self, "cuMemFreeAsync", ordered._raw)


def free_refused(result: Any, stream: Stream, cause: str = "") -> CudaError:
    """Return the exception for a free that the driver refused with ``result``. In a capture, CUDA_ERROR_INVALID_VALUE
    means that the memory is not the graph's, and becomes a :class:`CaptureError`. ``cause``: text with the usual cause
    of this error outside of a capture.
    """
    invalid = result.name == "CUDA_ERROR_INVALID_VALUE"
    if invalid and stream.capturing:
        return CaptureError(result.name, int(result), "cuMemFreeAsync", _FOREIGN_IN_CAPTURE)
    return error_from(result, "cuMemFreeAsync", cause if invalid else "")
