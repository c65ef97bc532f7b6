"""Base of all bridges, by which another library allocates from pools of streamalloc.

A library allocates in one of two ways:

* *Handles*: the library gets the driver's handle of a pool, and calls the driver itself. No Python code runs for its
  allocations, except a change of the capture mode for CuPy.
* *Callbacks*: the library calls Python for each allocation. Needed for allocators without a driver handle: a caching
  allocator, virtual memory that sleeps.

``use(...)`` of each module of :mod:`streamalloc.interop` starts a :class:`Bridge`. :meth:`Bridge.stop`, or the end of a
``with`` block, restores the library's own allocator for later allocations. Memory allocated before stays valid,
and is freed to its source when the library frees it. Stop the bridges of one library in the reverse order of their
starts. Dropping a bridge does not stop it.

Rules for callbacks, implemented by :class:`Sources` and :class:`Ledger`:

* Memory is allocated on the library's stream and freed in the order of that stream, on any thread and with any current
  device. The host never synchronises.
* The library gets its own error type; no Python exception enters C code.
* Objects that C code may call are never freed. Memory of arrays that are live at the end of the process is freed by the
  driver.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from streamalloc.core.errors import CaptureError, CudaError
from streamalloc.core.internal import (
    LEGACY,
    PER_THREAD,
    Buffer,
    Deferred,
    Device,
    Memory,
    PlainBuffer,
    QueuedWork,
    Stream,
    as_stream,
    deferred_queue,
    ordered_after,
    raw_handle,
    this_thread,
    unless_busy,
    work,
)
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.resource import Closes
from streamalloc.core.session import GLOBAL, RELAXED, PerDriver, Session, session_of
from streamalloc.driver.internal import BINDINGS_VERSION
from streamalloc.pool import CachingAllocator, MemoryPool
from streamalloc.pool.internal import CachedBuffer, free_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self


class Source(Protocol):
    """A source of memory: a pool, another allocator of streamalloc, or a sleep group.

    An argument of :func:`streamalloc.interop.cupy.use`; :doc:`/docs/guides/interop` has programs.
    """

    @property
    def location(self) -> MemLocation: ...

    def allocate(self, nbytes: int, stream: Stream, /) -> Memory: ...


def library(name: str) -> Any:
    """Import another library.

    Raises
    ------
    ModuleNotFoundError
        It is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        first = name.partition(".")[0]
        extra = f"bridges-{first if first in ('jax', 'torch') else 'cuda' + BINDINGS_VERSION.partition('.')[0]}"
        raise ModuleNotFoundError(
            f"{name} is not installed: pip install 'streamalloc[{extra}]'", name=error.name
        ) from None


# Started bridges, which go on after they are dropped.
_started: set[Bridge] = set()


class Bridge(Closes, abc.ABC):
    """Has another library allocate from :attr:`sources`, from :meth:`start` to :meth:`stop`.

    :func:`streamalloc.interop.cupy.use` returns one; :doc:`/docs/guides/interop` has programs.
    """

    __slots__ = ("__weakref__", "_undo", "sources")

    sources: Sources
    """Pools or other allocators, by device."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._undo: contextlib.ExitStack | None = None

    @abc.abstractmethod
    def _install(self, undo: contextlib.ExitStack) -> None:
        """Set the library's allocator, and add the calls that restore it to ``undo``."""

    @property
    def started(self) -> bool:
        """Whether the library allocates from :attr:`sources` now."""
        return self._undo is not None

    def start(self) -> Self:
        """Have the library allocate from :attr:`sources`; idempotent."""
        if self._undo is None:
            # Relaxed mode: no call here invalidates a capture of other code on this thread.
            with self.sources.session.relaxed(), contextlib.ExitStack() as undo:
                self._install(undo)
                self._undo = undo.pop_all()
            _started.add(self)
        return self

    def stop(self) -> None:
        """Restore the library's allocator; idempotent."""
        undo, self._undo = self._undo, None
        _started.discard(self)
        if undo is not None:
            with self.sources.session.relaxed():
                undo.close()

    def close(self) -> None:
        """Alias of :meth:`stop`."""
        self.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __repr__(self) -> str:
        state = "started" if getattr(self, "_undo", None) is not None else "stopped"
        return f"<{type(self).__module__}.{type(self).__name__}, {state}, from {getattr(self, 'sources', None)!r}>"


_Used: TypeAlias = "tuple[int, Stream, Any, Callable[[int, Any], Memory], Any]"
"""The stream that a library used last on a device: its handle as the library names it, the stream, the driver's
``CUstream`` if captures are asked for here, the source's ``allocate``, and the stream that this takes."""


class Sources:
    """The sources of a bridge, one for each device.

    Raises
    ------
    TypeError, ValueError
        A source is no allocator of device memory, or two are of one device or of different drivers.
    """

    __slots__ = ("_capturing", "_streams", "by_device", "exchange", "last", "latest", "session", "works")

    def __init__(self, sources: Iterable[Source]) -> None:
        self.by_device: dict[int, Source] = {}
        """Sources, by device ordinal."""
        sessions = set()
        for source in sources:
            location = getattr(source, "location", None)
            if not isinstance(location, MemLocation) or not callable(getattr(source, "allocate", None)):
                raise TypeError(f"a source must be a MemoryPool or another allocator, not {source!r}")
            if location.type is not MemLocationType.DEVICE:
                raise ValueError(f"{source!r} is not in device memory, where libraries expect theirs")
            if location.id in self.by_device:
                raise ValueError(f"{source!r} and {self.by_device[location.id]!r} are both of device {location.id}")
            self.by_device[location.id] = source
            sessions.add(session_of(cast("Any", source)))
        if len(sessions) != 1:
            raise ValueError("name at least one source" if not sessions else "the sources are of different drivers")
        self.session: Session = sessions.pop()
        """Session of the sources' driver."""
        self.works: bool = not all(
            isinstance(source, (MemoryPool, CachingAllocator)) for source in self.by_device.values()
        )
        """Whether memory that was dropped needs points of work to be released, as virtual memory does."""
        self._capturing: Any = self.session.driver.cuStreamIsCapturing
        self.exchange: Any = self.session.driver.cuThreadExchangeStreamCaptureMode
        """The driver's ``cuThreadExchangeStreamCaptureMode``."""
        # One Stream for each that the library uses now; the last of each device stays, to be found at once.
        self._streams: weakref.WeakValueDictionary[tuple[int, int], Stream] = weakref.WeakValueDictionary()
        self.last: dict[int, _Used] = {}
        """Stream that the library used last, by device."""
        self.latest: dict[int, tuple[object, Callable[[int, Any], Memory], Any]] = {}
        """By device: the library's object of the stream that it used last, and what :meth:`allocate` would do for that:
        the source's ``allocate`` with this stream."""

    @property
    def pools(self) -> dict[int, MemoryPool] | None:
        """The sources by device ordinal if all of them are driver pools, which have handles; else None."""
        pools = {ordinal: source for ordinal, source in self.by_device.items() if isinstance(source, MemoryPool)}
        return pools if len(pools) == len(self.by_device) else None

    def device(self, ordinal: int) -> Device:
        """A device of the sources' driver."""
        return Device(ordinal, driver=self.session.driver)

    def allocate(
        self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True
    ) -> Memory:
        """Memory of a device for a stream of the library. ``owner`` keeps the driver's handle valid; None: nobody does.

        While the stream is being captured the memory belongs to the graph; unless ``in_capture`` is False, then it is
        ordinary memory, which can be used at once.

        Raises
        ------
        OutOfMemoryError
            There is none.
        ValueError
            No source of this device was given.
        """
        used = self.last.get(ordinal)
        if used is None or used[0] != handle:
            used = self._use(ordinal, handle, owner)
        _, stream, raw, allocate, named = used
        if raw is not None or not (in_capture or stream.is_default):
            result, status = self._capturing(raw or raw_handle(stream))
            if result or status:
                if not in_capture:
                    # The stream of ours has nothing to do but wait for what the pool has it wait for.
                    aside = _aside_of(stream.device)
                    memory = allocate(nbytes, aside)
                    aside.synchronize()
                    return memory
                # The slow way of allocating sees that the memory becomes the graph's.
                named = Stream.of_handle(stream.device, handle, owner)
        return allocate(nbytes, named)

    def hold(self, memory: Memory) -> object:
        """Object that a library keeps as long as it uses memory, and drops to free it in stream order."""
        # The finalisers of other memory release it: a cached buffer's makes no driver call, memory of a capture is its
        # graph's, and virtual memory is unmapped once its users' work is done.
        return _Held(cast("Buffer", memory), self) if type(memory) is PlainBuffer else memory

    def stream(self, ordinal: int, handle: int, owner: object = None) -> Stream:
        """A stream of the library as one of ours; ``owner`` is kept as long as memory that was allocated on it."""
        return self._use(ordinal, handle, owner)[1]

    def _use(self, ordinal: int, handle: int, owner: object) -> _Used:
        source = self.by_device.get(ordinal)
        if source is None:
            given = ", ".join(map(str, self.by_device))
            raise ValueError(f"memory of device {ordinal} was asked for, and the sources are of device {given}")
        # The handle 0 means what the library was built for: for all of them the legacy default stream.
        key = ordinal, handle or LEGACY
        stream = self._streams.get(key)
        if stream is None:
            stream = Stream.of_handle(self.device(ordinal), key[1], owner, direct=isinstance(source, MemoryPool))
            self._streams[key] = stream
        named: Any = stream
        if isinstance(source, CachingAllocator) and owner is not None and not stream.is_default:
            # The cache keeps memory for a library's stream while the library's object lives.
            with contextlib.suppress(TypeError):
                named = owner if raw_handle(as_stream(cast("Any", owner), self.session)) else stream
        raw = raw_handle(stream) if isinstance(source, MemoryPool) and not stream.is_default else None
        used = self.last[ordinal] = handle, stream, raw, source.allocate, named
        self.latest[ordinal] = (owner if raw is None else None), source.allocate, named
        return used

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.by_device.values()))


class _Held:
    """A buffer that a library frees by dropping this object, on any thread and with any current device.

    The handle of a default stream depends on the current context, and that of the per-thread stream on the thread. So
    the buffer is freed on the stream of the thread that allocated it.
    """

    __slots__ = ("_buffer", "_sources", "_thread")

    def __init__(self, buffer: Buffer, sources: Sources) -> None:
        self._buffer = buffer
        # None: the stream is the same on every thread.
        self._thread = this_thread.number if buffer.stream.is_default else None
        self._sources = sources

    def __del__(self) -> None:
        sources = getattr(self, "_sources", None)
        if sources is None or not sources.session.usable:
            return
        if self._thread is not None:
            free_dropped(self._buffer, self._thread)
            return
        # In the relaxed mode it breaks no capture of other code that may be under way on this thread.
        exchange, mode = sources.exchange, GLOBAL
        try:
            _, mode = exchange(RELAXED)
            self._buffer.free()
        except Exception:
            free_dropped(self._buffer)
        finally:
            exchange(mode or GLOBAL)  # None: the driver refused


def is_captured(stream: Stream) -> bool:
    """Whether work queued on a stream would be captured, or would invalidate a capture."""
    try:
        return not stream.closed and stream.capturing
    except CaptureError:  # the legacy stream, while a blocking one is captured
        return True
    except CudaError:  # its owner has destroyed it
        return False


def free_dropped(buffer: Buffer, thread: int | None = None) -> None:
    """Free memory that a library has dropped, on its stream as allocated by ``thread``. Called by finalisers.

    Makes driver calls that do not wait, and takes no lock. The free is not deferred in general, as the library's next
    allocation may need the memory. A free that fails is tried again later.
    """
    session = session_of(buffer)
    if not session.usable or buffer.freed:
        return
    stream = buffer.stream
    if stream.is_default and stream.handle == PER_THREAD and thread not in (None, this_thread.number):
        free_after_all(FreeAfterAll(buffer))
        return
    if not (stream.is_default and is_captured(stream)):
        with contextlib.suppress(CudaError), session.relaxed():
            buffer.free()
            return
    deferred_queue(session).submit(FreeAfterAll(buffer))


def free_after_all(item: FreeAfterAll) -> None:
    """Free memory after the work of all streams that its device has now. Called by finalisers.

    The host does not wait: the free is queued at once, or deferred while a capture is under way.
    """
    queue = deferred_queue(item.session)
    with contextlib.suppress(CudaError):  # the item stays in the queue
        if unless_busy(functools.partial(queue.end, item), None, queue.beginning) is None:
            queue.submit(item)


class FreeAfterAll(Deferred):
    """A deferred free of buffers of one device, after the work of all streams that are known at the free."""

    __slots__ = ("_device", "buffers", "nbytes", "sealed", "session")

    def __init__(self, buffer: Buffer) -> None:
        self._device = buffer.stream.device
        self.session: Session = session_of(buffer)
        self.buffers: list[Buffer] = [buffer]
        """Buffers to free."""
        self.nbytes: int = buffer.nbytes
        """Bytes of them; less if several threads have added buffers at once."""
        self.sealed: bool = False
        """Whether an attempt has begun."""

    def add(self, buffer: Buffer) -> bool:
        """Free this buffer as well; False if an attempt has begun."""
        # Threads are not switched between these lines.
        if self.sealed:
            return False
        self.buffers.append(buffer)
        self.nbytes += buffer.nbytes
        return True

    def attempt(self) -> bool:
        """Free on a stream that waits for all others; the driver refuses while a capture is under way."""
        self.sealed = True
        # No call: of two threads that attempt the item, one has the buffers.
        buffers, self.buffers = self.buffers, []
        try:
            return not buffers or self._free(buffers)
        finally:
            self.buffers += [buffer for buffer in buffers if not buffer.freed]

    def _free(self, buffers: list[Buffer]) -> bool:
        dropped = dropped_of(self.session)
        dropped.refused, before = True, dropped.refused
        streams = {buffer.stream for buffer in buffers if not buffer.freed}
        if any(map(is_captured, streams)):
            return False
        if streams:
            aside = _aside_of(self._device)
            default = next((stream for stream in streams if stream.is_default), None)
            QueuedWork(self.session, without=(aside, default)).precede(aside)
            if default is not None:
                # It comes after all blocking streams: those of Numba, which are not known, and those of other threads.
                ordered_after(default, aside.wait)
            free_together(buffers, aside)
        dropped.refused = before
        return True


class Dropped:
    """Buffers that libraries have dropped and that are freed together, as one free after all work is dear.

    A batch is an item of the queue from its first buffer on. It is freed at the next point of work, or as soon as it
    has :data:`BATCH` buffers or :data:`BATCH_BYTES`: memory that others could miss is freed at once.
    """

    __slots__ = ("_batches", "refused")

    def __init__(self, _: Session) -> None:
        self._batches: dict[int, FreeAfterAll] = {}
        """Batches that are not full, by ordinal of the device."""
        self.refused: bool = False
        """Whether the queue has batches that were attempted."""

    def add(self, buffer: Buffer) -> None:
        """Free a buffer after the work of all streams. Called by finalisers, on any thread."""
        session, ordinal = session_of(buffer), buffer.stream.device.ordinal
        if not session.usable:
            return
        batch = self._batches.get(ordinal)
        if batch is None or batch.sealed:
            batch = self._batches[ordinal] = FreeAfterAll(buffer)
            deferred_queue(session).submit(batch)
        elif not batch.add(buffer):
            deferred_queue(session).submit(FreeAfterAll(buffer))
            return
        if batch.nbytes >= BATCH_BYTES or len(batch.buffers) >= BATCH:
            free_after_all(batch)
            self.refused = True  # Also one that has ended is in the queue until the next point of work.


BATCH = 64
"""Most buffers of a batch of :class:`Dropped`."""
BATCH_BYTES = 1 << 20
"""Bytes from which on a batch is freed at once."""
dropped_of: PerDriver[Dropped] = PerDriver(Dropped)


_asides: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""One stream for each device, for work that belongs to no stream of the library."""


def _aside_of(device: Device) -> Stream:
    """The stream of ours for a device; a new one if the context has died with the last."""
    streams = _asides(session_of(device))
    found = streams.get(device.ordinal)
    if found is not None:
        with contextlib.suppress(CudaError):
            found.query()
            return found
        streams.pop(device.ordinal, None)
    return streams.setdefault(device.ordinal, device.create_stream())


class Ledger:
    """Memory by address, for libraries whose callbacks pass only addresses."""

    __slots__ = ("_held", "_last", "sources")

    def __init__(self, sources: Sources) -> None:
        self.sources: Sources = sources
        self._last = sources.last
        self._held: dict[int, tuple[Memory, int, int]] = {}
        """Memory by address, with the thread and the stream's handle of its allocation."""

    def __len__(self) -> int:
        return len(self._held)

    def allocate(self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True) -> int:
        """Allocate by :meth:`Sources.allocate`, and keep the memory; its address."""
        used = self._last.get(ordinal)
        if used is not None and used[0] == handle and used[2] is None and in_capture:
            memory = used[3](nbytes, used[4])
        else:
            memory = self.sources.allocate(nbytes, ordinal, handle, owner, in_capture=in_capture)
        address = memory.address
        if address:
            self._held[address] = memory, this_thread.number, handle
        return address

    def __contains__(self, address: int) -> bool:
        return address in self._held

    def free(self, address: int, ordinal: int, handle: int | None = None) -> int:
        """Free the memory at an address in the order of a stream; None: that of its allocation. Returns its bytes."""
        held = self._held.pop(address, None)
        if held is None:
            return 0
        memory, thread, own = held
        nbytes = memory.nbytes
        same = handle is None or handle == own or (handle or LEGACY) == (own or LEGACY)
        if same and type(memory) is CachedBuffer:
            return nbytes  # Its finaliser returns the block to the cache.
        if not isinstance(memory, Buffer):
            # Virtual memory is unmapped once the work that its devices have now is done.
            del held, memory
            work(self.sources.session)
        elif same or handle is None:
            free_dropped(memory, thread)
        elif self.sources.session.usable:
            try:
                memory.free(self.sources.stream(ordinal, handle))
            except CudaError:
                deferred_queue(self.sources.session).submit(FreeAfterAll(memory))
        return nbytes
