"""Base of all bridges. Through a bridge another library allocates from pools of streamalloc.

A library allocates in one of two ways:

* *Handles*: the library gets the driver's handle of a pool, and calls the driver directly. No Python code runs for its
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
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from streamalloc.core.errors import CaptureError, ClosedError, CudaError, undo_all
from streamalloc.core.internal import (
    LEGACY,
    PER_THREAD,
    Buffer,
    Deferred,
    Device,
    Fence,
    Memory,
    PoolBuffer,
    Stream,
    as_stream,
    deferred_queue,
    ordered_after,
    this_thread,
    unless_busy,
    work,
)
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.resource import Closes
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver.internal import BINDINGS_VERSION, LIBRARIES, cuda
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachedBuffer, CachingAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self


class AllocatorSource(Protocol):
    """A source of memory for another library: a pool, another allocator of streamalloc, or a sleep group.

    An argument of :func:`streamalloc.interop.cupy.use`; :doc:`/docs/guides/interop` has programs.
    """

    @property
    def location(self) -> MemLocation: ...

    def allocate(self, nbytes: int, stream: Stream, /) -> Memory: ...


def library(name: str, session: Session | None = None) -> Any:
    """Import another library. ``session``: the session of the memory that the library is to use.

    Raises
    ------
    ModuleNotFoundError
        It is not installed; the message gives the command to install it.
    ValueError
        The memory is of a simulated driver.
    """
    try:
        found = importlib.import_module(name)
        if session is not None:
            check_driver(found, session)
        return found
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        first = name.partition(".")[0]
        extra = f"bridges-{first if first in ('jax', 'torch') else 'cuda' + BINDINGS_VERSION.partition('.')[0]}"
        raise ModuleNotFoundError(
            f"{name} is not installed: pip install 'streamalloc[{extra}]'", name=error.name
        ) from None


def check_driver(module: ModuleType | None, session: Session) -> None:
    """Raise ValueError if a library uses the CUDA driver and the session a simulated one. A module without a
    ``__spec__`` stands in for a library in tests, and may use any driver.
    """
    spec = getattr(module, "__spec__", None)
    name = None if spec is None else LIBRARIES.get(spec.name.partition(".")[0])
    # A checked CUDA driver has settings, too. ``testing.install`` wraps the functions of the bindings, which Numba
    # calls.
    settings = getattr(session.driver, "settings", "cuda")
    if name and settings != "cuda" and not (name == "Numba" and hasattr(cuda.cuInit, "__wrapped__")):
        raise ValueError(
            f"{name} uses the CUDA driver, and cannot use memory of {session.driver!r}: take a pool of "
            "Device(0, driver=streamalloc.driver.real())"
        )


# Bridges that were started. A bridge continues after its object is dropped.
_started: set[Bridge] = set()


class Bridge(Closes, abc.ABC):
    """Makes another library allocate from :attr:`sources`, from :meth:`start` to :meth:`stop`.

    :func:`streamalloc.interop.cupy.use` returns one; :doc:`/docs/guides/interop` has programs.
    """

    sources: Sources
    """Pools or other allocators, by device."""

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        self.sources = sources
        self._callbacks = callbacks
        """Whether the library calls Python even for pools."""
        self._undo: contextlib.ExitStack | None = None

    @abc.abstractmethod
    def _install(self, undo: contextlib.ExitStack) -> None:
        """Set the library's allocator, and add the calls that restore it to ``undo``."""

    @property
    def started(self) -> bool:
        """Whether the library allocates from :attr:`sources` now."""
        return self._undo is not None

    def start(self) -> Self:
        """Make the library allocate from :attr:`sources`; idempotent."""
        if self._undo is None:
            # In relaxed mode no call here invalidates other code's capture on this thread.
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


_Used: TypeAlias = "tuple[int, object, Stream, Callable[[int, Any], Memory]]"
"""The stream that a library last used on a device: its handle and its stream object in the library, our stream, and the
``allocate`` of the source.
"""


class Sources:
    """The source of memory for each device of a bridge.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, or two sources have the same device or different drivers.
    """

    def __init__(self, sources: Iterable[AllocatorSource]) -> None:
        self.by_device: dict[int, AllocatorSource] = {}
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
        pooled = (MemoryPool, CachingAllocator)
        self.works: bool = not all(isinstance(source, pooled) for source in self.by_device.values())
        """Whether dropped memory of a source is released only at points of work, as virtual memory is."""
        self.exchange: Any = self.session.driver.cuThreadExchangeStreamCaptureMode
        """The driver's ``cuThreadExchangeStreamCaptureMode``."""
        self._last: dict[int, _Used] = {}
        """Stream that the library used last, by device."""

    @property
    def pools(self) -> dict[int, MemoryPool] | None:
        """The sources by device ordinal if all are driver pools, which have handles; otherwise None."""
        pools = {ordinal: source for ordinal, source in self.by_device.items() if isinstance(source, MemoryPool)}
        return pools if len(pools) == len(self.by_device) else None

    def device(self, ordinal: int) -> Device:
        """A device of the sources' driver."""
        return Device(ordinal, driver=self.session.driver)

    def allocate(
        self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True
    ) -> Memory:
        """Allocate memory of a device for a library's stream. ``owner`` keeps the driver's handle valid; None: no
        object does.

        While the stream is being captured, the memory belongs to the graph. With ``in_capture=False`` it is ordinary
        memory instead, which can be used at once.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory.
        ValueError
            No source of this device was given.
        """
        used = self._last.get(ordinal)
        # The driver reuses the handle of a stream that the library has closed.
        if used is None or used[0] != handle or used[1] is not owner:
            used = self._use(ordinal, handle, owner)
        _, _, stream, allocate = used
        if in_capture or stream.is_default or not is_captured(stream):
            return allocate(nbytes, stream)
        # This stream has no other work. It only waits for events that the pool requires.
        aside = _aside_of(stream.device)
        memory = allocate(nbytes, aside)
        aside.synchronize()
        return memory

    def hold(self, memory: Memory) -> object:
        """Return an object that a library keeps while it uses memory. Dropping it frees the memory in stream order."""
        # Other memory has its own finaliser. A cached buffer makes no driver call, captured memory belongs to its
        # graph, and virtual memory is unmapped after the work of its users.
        return _Held(cast("Buffer", memory)) if type(memory) is PoolBuffer else memory

    def _use(self, ordinal: int, handle: int, owner: object) -> _Used:
        source = self.by_device.get(ordinal)
        if source is None:
            given = ", ".join(map(str, self.by_device))
            raise ValueError(f"memory of device {ordinal} was asked for, and the sources are of device {given}")
        # Whether handle 0 is the legacy or the per-thread default stream depends on the build of a library. For all
        # these libraries it is the legacy stream.
        handle_there = handle or LEGACY
        stream: Stream | None = None
        if owner is not None and handle_there not in (LEGACY, PER_THREAD):
            # A cache keeps memory for the object that the session lists for this handle.
            with contextlib.suppress(TypeError):
                stream = as_stream(cast("Any", owner), self.session)
        if stream is None:
            stream = Stream.of_handle(self.device(ordinal), handle_there, owner)
        used = self._last[ordinal] = handle, owner, stream, source.allocate
        return used

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.by_device.values()))


class _Held:
    """A buffer that a library frees by dropping this object, on any thread and with any current device.

    The handle of a default stream depends on the current context, and that of the per-thread stream on the thread. So
    the buffer is freed on the stream of the thread that allocated it.
    """

    __slots__ = ("_buffer", "_thread")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        # None means that the stream is the same on every thread.
        self._thread = this_thread.number if buffer.stream.is_default else None

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            free_dropped(self._buffer, self._thread)


def is_captured(stream: Stream) -> bool:
    """Whether work queued on a stream would be captured, or would invalidate a capture."""
    try:
        return not stream.closed and stream.capturing
    except CaptureError:  # The driver raises this for the legacy stream while a blocking stream is captured.
        return True
    except CudaError:  # The owner has destroyed the stream.
        return False


def free_dropped(buffer: Buffer, thread: int | None = None) -> None:
    """Free memory that a library has dropped, on its stream as seen by the allocating ``thread``. For finalisers.

    Makes only driver calls that do not wait, and takes no lock. The free is usually not deferred, because the library's
    next allocation may need the memory. A failed free is attempted again later.
    """
    session = session_of(buffer)
    if not session.usable or buffer.freed:
        return
    stream = buffer.stream
    if stream.is_default and stream.handle == PER_THREAD and thread not in (None, this_thread.number):
        free_after_all(FreeAfterAll(buffer))
        return
    if not (stream.is_default and is_captured(stream)):
        # In relaxed mode the free invalidates no capture of other code on this thread.
        with contextlib.suppress(CudaError, ClosedError), session.relaxed():
            buffer.free()
            return
    deferred_queue(session).submit(FreeAfterAll(buffer))


def free_after_all(item: FreeAfterAll) -> None:
    """Free memory after all present work of its device's streams. For finalisers.

    The host does not wait: the free is queued at once, or deferred while a capture is under way.
    """
    queue = deferred_queue(item.session)
    with contextlib.suppress(CudaError):  # The item stays in the queue.
        if unless_busy(functools.partial(queue.end, item), None, queue.beginning) is None:
            queue.submit(item)


class FreeAfterAll(Deferred):
    """A deferred free of buffers of one device, after the work of all streams known at that time."""

    def __init__(self, buffer: Buffer) -> None:
        self._device = buffer.stream.device
        self.session: Session = session_of(buffer)
        self.buffers: list[Buffer] = [buffer]
        """Buffers to free."""
        self.nbytes: int = buffer.nbytes
        """Bytes of the buffers; concurrent updates may be lost."""
        self.sealed: bool = False
        """Whether an attempt has begun."""

    def add(self, buffer: Buffer) -> bool:
        """Add a buffer to this free. Returns False if an attempt has begun."""
        # Threads are not switched between these lines.
        if self.sealed:
            return False
        self.buffers.append(buffer)
        self.nbytes += buffer.nbytes
        return True

    def attempt(self) -> bool:
        """Free on a stream that waits for all others. The driver refuses this during a capture."""
        self.sealed = True
        # Nothing is called here, so of two threads that attempt the item only one takes the buffers.
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
            Fence(self.session, without=(aside, default)).precede(aside)
            if default is not None:
                # The default stream is ordered after all blocking streams: Numba's, which are unknown, and those of
                # other threads.
                ordered_after(default, aside.wait)
            undo_all(functools.partial(_free_on, buffer, aside) for buffer in buffers)
        dropped.refused = before
        return True


def _free_on(buffer: Buffer, stream: Stream) -> None:
    with contextlib.suppress(ClosedError):  # Another thread has taken the buffers.
        buffer.free(stream)


class Dropped:
    """Buffers that libraries have dropped. They are freed in batches, because a free after all work is expensive.

    A batch is a deferred item from its first buffer on. It is freed at the next point of work, or when it has
    :data:`BATCH` buffers or :data:`BATCH_BYTES`, so large memory is freed at once.
    """

    def __init__(self, _: Session) -> None:
        self._batches: dict[int, FreeAfterAll] = {}
        """Batches with room for more buffers, by device ordinal."""
        self.refused: bool = False
        """Whether the queue has batches whose free was attempted."""

    def add(self, buffer: Buffer) -> None:
        """Free a buffer after the work of all streams. For finalisers, on any thread."""
        session, ordinal = session_of(buffer), buffer.stream.device.ordinal
        if not session.usable:
            return
        batch = self._batches.get(ordinal)
        if batch is None or not batch.add(buffer):
            batch = self._batches[ordinal] = FreeAfterAll(buffer)
            deferred_queue(session).submit(batch)
        if batch.nbytes >= BATCH_BYTES or len(batch.buffers) >= BATCH:
            free_after_all(batch)
            self.refused = True  # Even an item that has ended stays in the queue until the next point of work.


BATCH = 64
"""Most buffers of a batch of :class:`Dropped`."""
BATCH_BYTES = 1 << 20
"""Bytes from which on a batch is freed at once."""
dropped_of: PerDriver[Dropped] = PerDriver(Dropped)


_asides: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""One stream per device, for work outside the library's streams."""


def _aside_of(device: Device) -> Stream:
    """Return the package's own stream for a device; a new one if the context of the last one was destroyed."""
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

    def __init__(self, sources: Sources) -> None:
        self.sources: Sources = sources
        self._held: dict[int, tuple[Memory, int, int]] = {}
        """Memory by address, with the thread and the stream's handle of its allocation."""

    def __len__(self) -> int:
        return len(self._held)

    def allocate(self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True) -> int:
        """Allocate by :meth:`Sources.allocate`, keep the memory, and return its address."""
        memory = self.sources.allocate(nbytes, ordinal, handle, owner, in_capture=in_capture)
        address = memory.address
        if address:
            self._held[address] = memory, this_thread.number, handle
        return address

    def __contains__(self, address: int) -> bool:
        return address in self._held

    def free(self, address: int, ordinal: int, handle: int | None = None) -> int:
        """Free the memory at an address in stream order, and return its bytes. ``handle``: the stream; None: the stream
        of the allocation.
        """
        held = self._held.pop(address, None)
        if held is None:
            return 0
        memory, thread, own = held
        nbytes = memory.nbytes
        same = handle is None or handle == own or (handle or LEGACY) == (own or LEGACY)
        if same and type(memory) is CachedBuffer:
            return nbytes  # The finaliser of the buffer returns the block to the cache.
        if not isinstance(memory, Buffer):
            # Virtual memory is unmapped after the present work of its devices.
            del held, memory
            work(self.sources.session)
        elif same or handle is None:
            free_dropped(memory, thread)
        elif self.sources.session.usable:
            try:
                memory.free(self.sources._use(ordinal, handle, None)[2])
            except CudaError:
                deferred_queue(self.sources.session).submit(FreeAfterAll(memory))
        return nbytes
