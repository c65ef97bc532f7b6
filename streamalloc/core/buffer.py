"""Buffers: allocations of pools, their frees, and the support for sharing them.

A buffer is freed once, by the thread that takes its pointer. :meth:`Buffer.free` and the finaliser call the driver
directly if the stream is ready (:mod:`streamalloc.core.stream`). Other processes may have shared memory open, so its
free goes the checked way, or by its :class:`SharedState`.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

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
from streamalloc.core.memory import Memory
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation, MemLocationType, checked_size
from streamalloc.core.resource import Closes, above
from streamalloc.core.session import GLOBAL, NOT_CALLED, RELAXED, Session
from streamalloc.core.stream import (
    Stream,
    StreamLike,
    as_stream,
    of_this_thread,
)
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row

if TYPE_CHECKING:
    from streamalloc.core.graph import Capture, Graph
    from streamalloc.driver import Driver

StillImported: TypeAlias = Literal["defer", "wait", "raise", "ignore"]
_POLICIES = ("defer", "wait", "raise", "ignore")
_DEFER: StillImported = "defer"

_FOREIGN_IN_CAPTURE = (
    "the stream is being captured, where only memory that the capture allocated can be freed; free it on another stream"
)


class SharedState(abc.ABC):
    """The way a shared buffer is freed, which other processes may have open. :mod:`streamalloc.ipc` sets it when the
    buffer is shared.
    """

    __slots__ = ()

    @abc.abstractmethod
    def free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> None:
        """Free the memory of ``buffer`` after the work of ``stream``, or do as ``still_imported`` says if another
        process has it open. ``timeout`` is in seconds. As :meth:`Buffer.free`, raises StillImportedError.
        """

    @property
    def readers(self) -> int:
        """Number of other processes that have the memory open."""
        return 0

    @abc.abstractmethod
    def drop(self, buffer: Buffer) -> None:
        """Submit the free of a dropped buffer to the queue of ends. The buffer's finaliser calls this, so it takes no
        lock.
        """


class BufferSource:
    """Origin of a buffer's memory: an allocator, or the place of memory that no allocator of this package allocated."""

    __slots__ = ("_free", "_ordinal", "_session", "location")

    location: MemLocation
    """Location of the memory."""
    _free: Any
    """Function that frees memory. It takes a pointer and a ``CUstream``, and returns the driver's answer."""
    _ordinal: int | None
    """Ordinal of the device that owns the memory, see :attr:`Memory._ordinal`."""
    _session: Session

    @property
    def managed(self) -> bool:
        """Whether the memory migrates between devices and host."""
        return False

    def _pool_of(self, buffer: Buffer) -> object:
        """Return the pool that a buffer's memory is in; None if this package does not know it."""
        return None

    def _reachable_from(self, device: Device) -> bool:
        """Whether a device may use the memory."""
        return True


class Residence(NamedTuple):
    """The location of memory, and whether it is managed: the driver then moves it between devices and host."""

    location: MemLocation | None
    """Location of the memory; None if it cannot be found."""
    managed: bool

    @property
    def ordinal(self) -> int | None:
        """Ordinal of the device that has the memory; None for the host, and for a location that cannot be found."""
        found = self.location
        return found.id if found is not None and found.type is MemLocationType.DEVICE else None


class PlainSource(BufferSource):
    """Source of one buffer whose memory no allocator of this package gave: memory of other code, or of a graph that is
    built by nodes.
    """

    __slots__ = ("_managed",)

    def __init__(self, session: Session, place: Residence, free: Any) -> None:
        self._session = session
        self._free = free
        self._ordinal = None if place.managed else place.ordinal
        self._managed = place.managed
        self.location = place.location or MemLocation.none()

    @property
    def managed(self) -> bool:
        """Whether the memory migrates between devices and host."""
        return self._managed


class Allocates(Protocol):
    """An object that allocates for :meth:`Buffer.copy`: a pool, a cache, or an object of the program."""

    def allocate(self, nbytes: int, stream: Any, /) -> Buffer: ...


class Buffer(Memory, Closes):
    """An allocation of a memory pool, ordered by a stream.

    Made by :meth:`MemoryPool.allocate` and :func:`streamalloc.allocate`. Work on its stream may use it at once. Work on
    another stream, or on the host, must come after its stream's work: by an event or a synchronisation. :meth:`free`
    returns the memory in stream order. A buffer that is dropped is freed on its :attr:`stream`.
    """

    __slots__ = ("__weakref__", "_allocator", "_nbytes", "_ptr", "_shared", "_stream")

    _allocator: BufferSource
    _nbytes: int
    _ptr: Any
    """``CUdeviceptr``; None once the memory was freed or shared."""
    _shared: tuple[SharedState, Any] | None
    """State of shared memory, and the ``CUdeviceptr``; None if not shared."""
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
        """Use memory that other code allocated, by any call: C++, another library, this package's raw driver.

        The driver is asked for the kind, the device and the size of the memory (``cuPointerGetAttribute``).

        Parameters
        ----------
        address
            Address of the first byte: an integer or a ``CUdeviceptr``.
        nbytes
            Size in bytes. Mappings side by side count as one memory.
        owner
            The object that owns the memory. It is kept until the buffer is freed or dropped and the work of the stream
            is done; the buffer frees nothing. None: code without such an object owns it, and keeps it longer than the
            buffer is used. ``"this"``: the buffer becomes the owner. It frees memory of a pool in stream order
            (``cuMemFreeAsync``), and other memory after the host has waited for the stream (``cuMemFree``,
            ``cuMemFreeHost``). A dropped buffer does the same, without waiting.
            Memory of ``cuMemHostRegister`` looks the same, and cannot be freed: its owner unregisters it.
        stream
            The stream of operations that name no other; the caller orders it after the work that writes the memory.
            Default: the default stream of the memory's device.
        driver
            The driver to use if ``stream`` is no :class:`Stream`.

        Raises
        ------
        TypeError, ValueError
            ``address`` is not an address, is in no memory that the driver knows, or the memory ends before ``nbytes``.
            Or ``owner="this"`` is given, and the address is inside of an allocation, another buffer owns it, or it is
            mapped.

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
        """Address of the first byte; 0 for an empty buffer."""
        ptr = self._ptr
        return int(self._live() if ptr is None else ptr)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """Stream of operations that name no other, and of the free of a dropped buffer; at first that of the
        allocation.

        Assign another stream if that stream uses the memory last: a dropped buffer is then freed after its work. The
        caller orders the new stream after the work of the previous one. A cached buffer leaves its cache by an
        assignment, so its free returns the memory to the pool.

        Raises
        ------
        ClosedError
            The buffer was freed, and a stream is assigned.
        """
        return self._stream

    @stream.setter
    def stream(self, stream: StreamLike) -> None:
        self._check_usable()
        ordered = as_stream(stream, self._allocator._session)
        self._past_caches()._stream = self._stream = ordered

    def copy(
        self, stream: StreamLike | None = None, *, nbytes: int | str | None = None, allocator: Allocates | None = None
    ) -> Buffer:
        """Allocate memory and copy the bytes to it, in stream order.

        Parameters
        ----------
        stream
            The stream of the allocation and the copy (default: the buffer's own).
        nbytes
            Size of the new memory in bytes (default: that of this buffer). As many bytes are copied as the smaller one
            has.
        allocator
            The allocator of the new memory (default: the buffer's own).

        Raises
        ------
        ValueError
            The buffer has no allocator of this package, and none is named.
        OutOfMemoryError
            There is no memory.

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
        """The pool of the allocation; None for memory that this package did not allocate."""
        return self._allocator._pool_of(self)

    @property
    def location(self) -> MemLocation:
        """Location of the pool's memory."""
        return self._allocator.location

    @property
    def managed(self) -> bool:
        """Whether the driver migrates the memory between devices and host."""
        return self._allocator.managed

    @property
    def device_accessible(self) -> bool:
        """Whether the pool grants access to the device of the buffer's stream."""
        return bool(self._allocator._reachable_from(self._stream.device))

    @property
    def freed(self) -> bool:
        """Whether the memory was freed by this buffer, at once or by an item that waits for importers."""
        return self._ptr is None and self._shared is None

    def free(
        self,
        stream: StreamLike | None = None,
        still_imported: StillImported = _DEFER,
        timeout: float | None = None,
    ) -> None:
        """Free the memory in stream order (``cuMemFreeAsync``). Earlier work may still use it, later work must not.

        Parameters
        ----------
        stream
            The stream after whose work the memory is free (default: the one it was allocated on). The caller must order
            all uses before the free: the driver does not check that. The per-thread default stream of another thread
            has no handle here: the default is then the legacy stream, which is ordered after those of all threads.
        still_imported
            What to do if another process has the shared buffer open, or may still open it because a descriptor is held.
            ``"defer"`` frees once that has ended. ``"wait"`` blocks the host until then. ``"raise"`` raises.
            ``"ignore"`` frees at once: importers then read whatever the memory is reused for.
        timeout
            The longest time in seconds that ``"wait"`` waits; None for no limit.

        Raises
        ------
        ClosedError
            The buffer was freed already, or its stream was closed: name another stream.
        CaptureError
            The stream is being captured and the memory was not allocated in that capture. The capture stays valid.
        StillImportedError
            Another process has it open: ``"raise"`` raises at once, ``"wait"`` after ``timeout``. The buffer stays
            valid.
        """
        ordered = self._stream if stream is None else as_stream(stream, self._stream._session)
        handle, free = ordered.direct or ordered.ready(), self._allocator._free
        if handle is None or still_imported is not _DEFER:
            return self._free_checked(stream, still_imported, timeout)
        # Taken in one line, within which threads are not switched, so of two threads only one frees. A second free
        # would end the memory of the address's next owner.
        ptr, self._ptr = self._ptr, None
        if ptr is None:  # The memory was shared or freed: the checked way finds out which.
            return self._free_checked(stream, still_imported, timeout)
        try:
            result = free(ptr, handle)[0]
        except NOT_CALLED:
            self._ptr = ptr
            raise
        if result:
            raise self._not_freed(result, ordered, ptr, None)

    def _free_on(self, ordered: Stream, handle: Any) -> None:
        """Free the memory on ``ordered``, whose ``CUstream`` is ``handle``, even if other processes have it open.
        Raises ClosedError if it was freed already, CudaError if the driver refuses: the buffer then keeps the memory.
        """
        ptr, shared = self._ptr, self._shared
        self._ptr = self._shared = None
        pointer = ptr if shared is None else shared[1]
        if pointer is None:
            raise freed_already(self)
        free = self._allocator._free
        try:
            result = free(pointer, handle)[0]
        except NOT_CALLED:
            self._ptr, self._shared = ptr, shared
            raise
        if result:
            raise self._not_freed(result, ordered, ptr, shared)

    def _not_freed(self, result: Any, ordered: Stream, ptr: Any, shared: tuple[SharedState, Any] | None) -> CudaError:
        """Return the error of a free that the driver refused. The buffer gets its pointer back, unless the driver no
        longer knows the memory: a second free would then end the memory of the address's next owner.
        """
        error = free_refused(result, ordered)
        # An invalid value means that the driver does not know the address. Other errors of is_gone may come from the
        # stream that the caller named, which may have been destroyed: then the memory still exists.
        if not is_gone(error) or (ordered is not self._stream and not isinstance(error, InvalidValueError)):
            self._ptr, self._shared = ptr, shared
        return error

    def close(self) -> None:
        """Free the memory on its own stream unless it was freed already. The end of a ``with`` block calls this.

        If the stream was closed, the memory is freed after the stream's work. If it was another library's stream and
        that library has closed it, the host waits until the device is idle.
        """
        if self.freed:
            return
        if not self._stream.closed:
            self.free()
            return
        await_closed(self._stream)
        ordered_after(self._stream, self.free)

    def _free_checked(self, stream: StreamLike | None, still_imported: StillImported, timeout: float | None) -> None:
        if still_imported not in _POLICIES:
            raise ValueError(f"still_imported={still_imported!r}: allowed are {', '.join(map(repr, _POLICIES))}")
        if self.freed:
            raise freed_already(self)
        self._session.check_process()
        ordered = self._ordered_on(stream)
        # For a default stream this raises if a blocking stream is captured, and keeps that capture valid.
        if ordered._captured() and not self._belongs_to(ordered._capture):
            raise refused(CaptureError, "cuMemFreeAsync", _FOREIGN_IN_CAPTURE)

        if stream is None and ordered is not of_this_thread(ordered):
            # The handle of another thread's stream would name this thread's, which is not ordered after its work.
            ordered_after(ordered, lambda last: self._free_after(last, still_imported, timeout))
        else:
            self._free_after(ordered, still_imported, timeout)

    def _free_after(self, last: Stream, still_imported: StillImported, timeout: float | None) -> None:
        """Free in the order of ``last``; of shared memory, when no other process has it open."""
        state = shared_state(self)
        if state is not None:
            last._in_context(state.free, self, last, still_imported, timeout)
        else:
            last._in_context(self._free_on, last, last._raw)

    def _belongs_to(self, capture: object) -> bool:
        """Whether ``capture`` may have allocated the memory, so that the memory can be freed in it. None stands for a
        capture by other code.
        """
        return False

    def _past_caches(self) -> Buffer:
        """Return the buffer whose free returns the memory to the driver."""
        return self

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        yield "pool", self.owner
        if self._shared is not None:
            yield "shared", f"open in {self._shared[0].readers} other processes"

    def _live(self) -> Any:
        ptr = self._ptr
        if ptr is None:
            shared = self._shared
            if shared is None:
                raise ClosedError(f"this buffer of {size_text(self._nbytes)} was freed")
            ptr = shared[1]
        return ptr

    def _check_usable(self) -> None:
        self._live()

    _check_open = _check_usable

    def _text(self) -> str:
        where = "freed" if self.freed else f"at {int(self._live()):#x}"
        return f" of {self._nbytes} bytes {where}, {self.location}"


class PoolBuffer(Buffer):
    """The usual :class:`Buffer` of :meth:`Allocator.allocate`. It is freed when it is dropped.

    Its construction runs no Python function, for speed: :meth:`Allocator.allocate` sets the attributes.

    The finaliser runs between any two lines of any thread: while that thread captures a stream, while another one
    closes the buffer's stream, and in any order with the other objects of a garbage cycle. So it makes one free in
    stream order, in the relaxed mode: in the mode that threads begin with, garbage of one stream would end the capture
    of another. If the stream is not ready, the free is left to the queue of ends. A direct free on the per-thread
    stream of another thread would not come after the work that used the memory. A free on a destroyed stream crashes.
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
            if self._shared is not None and self._allocator._session.usable:
                self._shared[0].drop(self)
            return
        # Cleared first, because another finaliser of this garbage cycle may still use the buffer, and must find it
        # freed.
        self._ptr = None
        allocator, stream = self._allocator, self._stream
        session = allocator._session
        unusable = session.unusable
        if unusable():
            return
        exchange, free, dropping = session.cuThreadExchangeStreamCaptureMode, allocator._free, stream._dropping
        mode = GLOBAL
        # While the list has an entry, a close of the stream on another thread does not destroy it. So the entry is made
        # before the handle is read. Only the number of entries counts.
        dropping.append(None)
        try:
            failed, mode = exchange(RELAXED)
            handle = stream.unlent or stream._ready_to_drop()
            if failed:
                mode = GLOBAL
            elif handle is not None:
                failed = free(ptr, handle)[0]
        finally:
            exchange(mode)
            dropping.pop()
        if failed:
            error = error_from(failed, "cuMemFreeAsync")
            # In a capture, the driver gives the same answer for memory that is gone and for memory that is not the
            # graph's.
            if is_gone(error) and not session.cuStreamIsCapturing(handle)[1]:
                _warn_not_freed(ptr, error)
                return
        if handle is None or failed:
            deferred_queue(session).submit(_FreeDropped(session, ptr, stream))


PoolBuffer.__name__ = PoolBuffer.__qualname__ = "Buffer"


class GraphBuffer(Buffer):
    """Memory allocated while its stream was captured: the graph owns it.

    :meth:`MemoryPool.allocate` returns it on a stream that is captured; :class:`Graph` shows a capture.

    The memory exists from the launch of the graph until its free, which is a node of the graph or a :meth:`free` after
    the launch. Dropping the object frees nothing.
    """

    __slots__ = ("_address", "_capture", "node")

    _address: int
    """Address of the memory, for :attr:`address` once a free in the capture has cleared ``_ptr``."""
    _capture: Capture | _Graphs | None
    """The capture that allocated the memory, or its stand-in for a graph that is built by nodes; None for a capture by
    other code.
    """
    node: Any
    """The allocation's ``CUgraphNode``, if :meth:`add_to` made it; otherwise unset."""

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
        """Add an allocation to a graph that is built by nodes (``cuGraphAddMemAllocNode``).

        Nodes that use the memory must depend on :attr:`node`. Add them by raw calls with :attr:`Graph.handle`, or by
        cuda.core.

        Parameters
        ----------
        graph
            The graph, of :meth:`Graph.create` for example, not yet instantiated.
        nbytes
            Size in bytes, at least 1.
        stream
            The stream of operations that name no other; its device has the memory.
        after
            Nodes (``CUgraphNode``) of the graph that the allocation comes after.
        access
            Devices beside that of ``stream`` that may use the memory.

        Raises
        ------
        TypeError, ValueError
            ``stream`` is not a stream, ``access`` names something that is not a device, or one of them
            belongs to another driver.
        InvalidValueError
            A node is of another graph, or the size is 0.

        Examples
        --------
        >>> graph = sa.Graph.create(device)
        >>> buffer = sa.GraphBuffer.add_to(graph, 4096, stream)
        >>> end = buffer.add_free(after=[buffer.node])
        >>> graph.nodes
        ['MEM_ALLOC', 'MEM_FREE']
        """
        session, device = graph._session, stream.device
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
        buffer = cls.__new__(cls)
        buffer.node = session.call_in(
            device.ordinal, "cuGraphAddMemAllocNode", graph._checked_raw(), nodes, len(nodes), params
        )
        source = PlainSource(session, Residence(device.location, managed=False), session.cuMemFreeAsync)
        buffer._allocator, buffer._nbytes, buffer._shared, buffer._stream = source, size, None, stream
        buffer._capture, buffer._address = _Graphs(graph), int(params.dptr)
        buffer._ptr = cuda.CUdeviceptr(buffer._address)
        return buffer

    def add_free(self, *, after: Iterable[Any]) -> Any:
        """Add the free to the graph that :meth:`add_to` named (``cuGraphAddMemFreeNode``). Returns its ``CUgraphNode``.

        Parameters
        ----------
        after
            Nodes that the free comes after: those that use the memory.

        Raises
        ------
        ClosedError
            The graph was closed, or has a free of this memory already.
        """
        graph: Any = self.owner
        nodes = list(after)
        args = graph._checked_raw(), nodes, len(nodes), self._live()
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
        return None if self._capture is None else self._capture.graph

    def free(
        self,
        stream: StreamLike | None = None,
        still_imported: StillImported = _DEFER,
        timeout: float | None = None,
    ) -> None:
        """Free in stream order: while the stream is captured as a node of the graph, otherwise the memory of the last
        launch (``cuMemFreeAsync``).

        The address is the same at every launch, so this may be called after each launch. Memory of graphs cannot be
        shared, so ``still_imported`` and ``timeout`` have no effect.

        Raises
        ------
        InvalidValueError
            No launch has allocated the memory, or the memory was freed already.
        """
        pointer = self._live()
        ordered = self._ordered_on(stream)
        captured = ordered._captured()
        self._address = int(pointer)
        self._free_checked(ordered, still_imported, timeout)
        if not captured:
            self._ptr = pointer

    def _not_freed(self, result: Any, ordered: Stream, ptr: Any, shared: tuple[SharedState, Any] | None) -> CudaError:
        self._ptr = ptr  # No launch has allocated it now, but the next launch will, at the same address.
        return free_refused(result, ordered, "no launch has allocated the memory since its last free")

    def _belongs_to(self, capture: object) -> bool:
        # One capture may contain streams of this package and of other code. So if either capture is unknown, the driver
        # decides.
        return capture is self._capture or None in (capture, self._capture)


class _Graphs(NamedTuple):
    """Stand-in for a :class:`Capture` where a graph is built node by node: buffers read its attribute ``graph``
    only.
    """

    graph: Graph


def _warn_not_freed(ptr: Any, error: CudaError) -> None:
    if not isinstance(error, LOST):  # A lost context has ended all of its memory, so there is nothing to warn of.
        warnings.warn(f"dropped memory at {int(ptr):#x} could not be freed: {error}", ResourceWarning, 3)


class _FreeDropped(Deferred):
    """The free of a buffer that was dropped while its stream was not ready."""

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
        except CudaError as error:
            if not isinstance(error, (CaptureError, NotReadyError)) and not self._warned:
                self._warned = True
                _warn_not_freed(address, error)
            raise
        return True

    def _free(self, ordered: Stream) -> None:
        with notify_freed(self._session, int(self._raw), ordered._raw):
            ordered._in_context(self._session.release, self, "cuMemFreeAsync", ordered._raw)


# -- what sharing needs of buffers ---------------------------------------------------------------------------


def pool_of(buffer: Buffer) -> object:
    """Return the pool that a buffer's memory is in; None if this package does not know it."""
    return buffer._allocator._pool_of(buffer)


def past_caches(buffer: Buffer) -> Buffer:
    """Return the buffer whose free returns the memory to the driver: this buffer, or the pool's buffer behind a cached
    one.

    The call takes cached memory out of its cache for good. A later free of the cached buffer frees the pool's
    buffer.
    """
    return buffer._past_caches()


def shared_state(buffer: Buffer) -> SharedState | None:
    """Return the state that frees a shared buffer; None if the buffer is not shared."""
    return None if buffer._shared is None else buffer._shared[0]


def set_shared(buffer: Buffer, state: SharedState) -> None:
    """Have ``state`` free the buffer from now on. The pointer leaves ``_ptr``, so that a free takes the checked way."""
    buffer._shared = (state, buffer._live() if buffer._ptr is None else buffer._ptr)
    buffer._ptr = None


def freed_already(buffer: Buffer) -> ClosedError:
    """Return the error for a free of a buffer that was freed before; the caller raises it."""
    return ClosedError(f"this buffer of {size_text(buffer._nbytes)} was freed already")


def free_shared(buffer: Buffer, stream: Stream, handle: Any) -> None:
    """Free a shared buffer on ``stream``, whose ``CUstream`` is ``handle`` (``cuMemFreeAsync``), even if other
    processes have it open. If the driver refuses, this raises CudaError, and the buffer stays shared.
    """
    buffer._free_on(stream, handle)


def free_refused(result: Any, stream: Stream, cause: str = "") -> CudaError:
    """Return the exception for a free that the driver refused with ``result``. The driver answers
    CUDA_ERROR_INVALID_VALUE for foreign memory in a capture: that becomes a :class:`CaptureError`.
    ``cause``: the usual cause otherwise.
    """
    invalid = result.name == "CUDA_ERROR_INVALID_VALUE"
    if invalid and stream.capturing:
        return CaptureError(result.name, int(result), "cuMemFreeAsync", _FOREIGN_IN_CAPTURE)
    return error_from(result, "cuMemFreeAsync", cause if invalid else "")


def take_pointer(buffer: Buffer) -> Any:
    """Return the ``CUdeviceptr`` of a shared buffer, and mark the buffer as freed: the caller frees the memory. Returns
    None if the buffer was freed already.
    """
    shared = buffer._shared
    buffer._shared = None
    return None if shared is None else shared[1]
