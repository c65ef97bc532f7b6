"""Bridge, the base class: another library allocates from pools of streamalloc.

There are two ways:

* *Handles*: the library gets the driver's handle of a pool, and calls the driver itself. No Python code runs for an
  allocation, but for a change of the capture mode with CuPy.
* *Callbacks*: the library calls Python for each allocation. Allocators without a handle need it: a caching allocator,
  virtual memory that sleeps.

``use(...)`` of each module of :mod:`streamalloc.interop` starts a :class:`Bridge`. :meth:`Bridge.stop`, or the end of a
``with`` block, restores the library's own allocator for later allocations. Memory allocated before stays valid, and is
freed to its source when the library frees it. Stop the bridges of one library in the reverse order of their starts.
Dropping a bridge does not stop it.

:class:`Sources` and :class:`Ledger` keep the rules for callbacks:

* Memory is allocated on the library's stream, and freed in the order of that stream, on any thread and with any current
  device. The host never waits for a stream of the library.
* The library gets errors of its own types. No Python exception enters C code.
* Objects that C code may call are never freed. At the end of the process the driver frees what is left.
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
    """Source of memory for another library: a pool, another allocator of streamalloc, or a sleep group.

    An argument of :func:`streamalloc.interop.cupy.use`; :doc:`/docs/guides/interop` has programs.
    """

    @property
    def location(self) -> MemLocation: ...

    def allocate(self, nbytes: int, stream: Stream, /) -> Memory: ...


def library(name: str, session: Session | None = None) -> Any:
    """Import another library and return it.

    ``session``: that of the memory which the library is to use; None: no memory.

    Raises
    ------
    ModuleNotFoundError
        It is not installed; the message gives the command to install it.
    ValueError
        The memory is of a simulated driver, which the library does not use.
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
    """Raise ``ValueError`` if a library calls the CUDA driver and the session has a simulated one.

    A module without a ``__spec__`` stands in for a library in tests, and may have any driver.
    """
    spec = getattr(module, "__spec__", None)
    name = None if spec is None else LIBRARIES.get(spec.name.partition(".")[0])
    # Only a simulated driver has settings, also behind a checker. Numba calls the functions of the bindings: in a block
    # of ``testing.install`` these have ``__wrapped__``, and then Numba uses the simulated driver, too.
    settings = getattr(session.driver, "settings", "cuda")
    if name and settings != "cuda" and not (name == "Numba" and hasattr(cuda.cuInit, "__wrapped__")):
        raise ValueError(
            f"{name} uses the CUDA driver, and cannot use memory of {session.driver!r}: take a pool of "
            "Device(0, driver=streamalloc.driver.real())"
        )


# Started bridges. The set keeps a bridge alive that the program drops, because the library still allocates from it.
_started: set[Bridge] = set()


class Bridge(Closes, abc.ABC):
    """Bridge through which another library allocates from :attr:`sources`, from :meth:`start` to :meth:`stop`.

    :func:`streamalloc.interop.cupy.use` returns one; :doc:`/docs/guides/interop` has programs.
    """

    sources: Sources
    """Pools or other allocators, by device."""

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        self.sources = sources
        self._callbacks = callbacks
        """Whether the library calls Python for pools, too."""
        self._undo: contextlib.ExitStack | None = None

    @abc.abstractmethod
    def _install(self, undo: contextlib.ExitStack) -> None:
        """Set the library's allocator, and push the calls on ``undo`` that restore the earlier one."""

    @property
    def started(self) -> bool:
        """Whether the library allocates from :attr:`sources` now."""
        return self._undo is not None

    def start(self) -> Self:
        """Make the library allocate from :attr:`sources`. Returns the bridge; idempotent.

        Raises ``ModuleNotFoundError`` if the library is not installed, and ``ValueError`` for memory of a simulated
        driver.
        """
        if self._undo is None:
            # In relaxed mode the calls here invalidate no capture of other code.
            with self.sources.session.relaxed(), contextlib.ExitStack() as undo:
                self._install(undo)
                self._undo = undo.pop_all()
            _started.add(self)
        return self

    def stop(self) -> None:
        """Restore the allocator that the library had before :meth:`start`; idempotent."""
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
"""Stream on which a library last allocated: its handle, the library's object, our object, and the source's
``allocate``.
"""


class Sources:
    """Sources of memory of a bridge, one for each device.

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
        """Whether a source releases dropped memory at points of work only, as it does virtual memory."""
        self._last: dict[int, _Used] = {}
        """Stream that the library used last, by device."""

    @property
    def pools(self) -> dict[int, MemoryPool] | None:
        """Sources by device ordinal, if all are pools, which have handles; else None."""
        pools = {ordinal: source for ordinal, source in self.by_device.items() if isinstance(source, MemoryPool)}
        return pools if len(pools) == len(self.by_device) else None

    def device(self, ordinal: int) -> Device:
        """Return the device with this ordinal, of the sources' driver."""
        return Device(ordinal, driver=self.session.driver)

    def allocate(
        self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True
    ) -> Memory:
        """Allocate memory of the device ``ordinal`` on a library's stream, given by its driver ``handle``.

        ``owner``: the object that keeps the stream's handle valid; None if there is none. On a stream that is being
        captured the memory belongs to the graph. With ``in_capture=False`` it is ordinary memory in that case, too, and
        may be used at once.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory.
        ValueError
            No source of this device was given.
        """
        used = self._last.get(ordinal)
        # The owner is compared, too: the driver may give the handle of a destroyed stream to a new stream, which has
        # another owner.
        if used is None or used[0] != handle or used[1] is not owner:
            used = self._use(ordinal, handle, owner)
        _, _, stream, allocate = used
        if in_capture or stream.is_default or not is_captured(stream):
            return allocate(nbytes, stream)
        # The memory must be usable at once, also by work that is captured, so the host waits. The wait is short, since
        # the package's own stream has no other work: it lasts only until the memory that the pool reuses is free.
        aside = _aside_of(stream.device)
        memory = allocate(nbytes, aside)
        aside.synchronize()
        return memory

    def hold(self, memory: Memory) -> object:
        """Return an object for a library to keep while it uses memory.

        When it is dropped, the memory is freed in stream order.
        """
        # Only buffers of pools need such an object. The finalisers of other memory free in stream order already: a
        # cached buffer makes no driver call, captured memory belongs to its graph, and virtual memory is unmapped after
        # the work of its users.
        return _Held(cast("Buffer", memory)) if type(memory) is PoolBuffer else memory

    def _use(self, ordinal: int, handle: int, owner: object) -> _Used:
        source = self.by_device.get(ordinal)
        if source is None:
            given = ", ".join(map(str, self.by_device))
            raise ValueError(f"memory of device {ordinal} was asked for, and the sources are of device {given}")
        # Handle 0 is the legacy default stream for all these libraries. Only in a build for per-thread default streams
        # would it be the per-thread stream.
        handle_there = handle or LEGACY
        stream: Stream | None = None
        if owner is not None and handle_there not in (LEGACY, PER_THREAD):
            # A cache has one free list for each stream object, so take the object that the session knows.
            with contextlib.suppress(TypeError):
                stream = as_stream(cast("Any", owner), self.session)
        if stream is None:
            stream = Stream.of_handle(self.device(ordinal), handle_there, owner)
        used = self._last[ordinal] = handle, owner, stream, source.allocate
        return used

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.by_device.values()))


class _Held:
    """Object that frees a buffer when a library drops it, on any thread and with any current device.

    The handle of a default stream means another stream in another context, and that of the per-thread default stream on
    another thread. So the buffer is freed on the stream as the thread of the allocation sees it.
    """

    __slots__ = ("_buffer", "_thread")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        # None: the stream is the same on every thread.
        self._thread = this_thread.number if buffer.stream.is_default else None

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            free_dropped(self._buffer, self._thread)


def is_captured(stream: Stream) -> bool:
    """Whether work that is queued on a stream would be captured, or would invalidate a capture."""
    try:
        return not stream.closed and stream.capturing
    except CaptureError:  # The driver raises this for the legacy stream while a blocking stream is captured.
        return True
    except CudaError:  # The owner has destroyed the stream.
        return False


def free_dropped(buffer: Buffer, thread: int | None = None) -> None:
    """Free memory that a library has dropped, on its stream as the allocating ``thread`` sees it. For finalisers.

    It takes no lock, and makes only driver calls that do not wait. The free is made at once where that is possible,
    because the library's next allocation may need the memory. A free that failed is attempted again later.
    """
    session = session_of(buffer)
    if not session.usable or buffer.freed:
        return
    stream = buffer.stream
    if stream.is_default and stream.handle == PER_THREAD and thread not in (None, this_thread.number):
        free_after_all(FreeAfterAll(buffer))
        return
    if not (stream.is_default and is_captured(stream)):
        # In relaxed mode the free invalidates no capture of other code.
        with contextlib.suppress(CudaError, ClosedError), session.relaxed():
            buffer.free()
            return
    deferred_queue(session).submit(FreeAfterAll(buffer))


def free_after_all(item: FreeAfterAll) -> None:
    """Free the buffers of ``item`` after all work that is queued on their device now. For finalisers.

    The host does not wait. The free is queued at once, or deferred while a stream is being captured.
    """
    queue = deferred_queue(item.session)
    with contextlib.suppress(CudaError):  # The item stays in the queue.
        if unless_busy(functools.partial(queue.end, item), None, queue.beginning) is None:
            queue.submit(item)


class FreeAfterAll(Deferred):
    """Deferred free of buffers of one device, after the work of all streams that are known at that time."""

    def __init__(self, buffer: Buffer) -> None:
        self._device = buffer.stream.device
        self.session: Session = session_of(buffer)
        self.buffers: list[Buffer] = [buffer]
        """Buffers to free."""
        self.nbytes: int = buffer.nbytes
        """Bytes of the buffers, about: an update by another thread may be lost."""
        self.sealed: bool = False
        """Whether an attempt has begun."""

    def add(self, buffer: Buffer) -> bool:
        """Add a buffer of the same device. Returns False if an attempt has begun, which would not take it."""
        # Python does not switch threads here, between the test and the append, because nothing is called.
        if self.sealed:
            return False
        self.buffers.append(buffer)
        self.nbytes += buffer.nbytes
        return True

    def attempt(self) -> bool:
        """Free the buffers on a stream that waits for all others. The driver refuses that during a capture.

        Returns whether they are freed; otherwise the item stays in the queue.
        """
        self.sealed = True
        # This line calls no function, so Python does not switch threads within it: only one thread takes the buffers.
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
                # The legacy default stream comes after all blocking streams, also after those that the package does not
                # know, such as Numba's.
                ordered_after(default, aside.wait)
            undo_all(functools.partial(_free_on, buffer, aside) for buffer in buffers)
        dropped.refused = before
        return True


def _free_on(buffer: Buffer, stream: Stream) -> None:
    with contextlib.suppress(ClosedError):  # Another thread has freed it.
        buffer.free(stream)


class Dropped:
    """Buffers that libraries have dropped, in batches, because a free after all work on a device is expensive.

    A batch is in the queue of ends from its first buffer on. It is freed at the next point of work, or once it has
    :data:`BATCH` buffers or :data:`BATCH_BYTES`. So large memory is freed at once.
    """

    def __init__(self, _: Session) -> None:
        self._batches: dict[int, FreeAfterAll] = {}
        """Batches with room for more buffers, by device ordinal."""
        self.refused: bool = False
        """Whether the queue has batches whose free was attempted, so that the next allocation should work it off."""

    def add(self, buffer: Buffer) -> None:
        """Put a buffer into a batch, to be freed after the work of all streams. For finalisers, on any thread."""
        session, ordinal = session_of(buffer), buffer.stream.device.ordinal
        if not session.usable:
            return
        batch = self._batches.get(ordinal)
        if batch is None or not batch.add(buffer):
            batch = self._batches[ordinal] = FreeAfterAll(buffer)
            deferred_queue(session).submit(batch)
        if batch.nbytes >= BATCH_BYTES or len(batch.buffers) >= BATCH:
            free_after_all(batch)
            self.refused = True  # Its item stays in the queue, although it has ended, until the next point of work.


BATCH = 64
"""Buffers from which on a batch of :class:`Dropped` is freed at once."""
BATCH_BYTES = 1 << 20
"""Bytes from which on a batch is freed at once."""
dropped_of: PerDriver[Dropped] = PerDriver(Dropped)


_asides: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""Streams of the package's own, by device ordinal, for work that must not be on a library's stream."""


def _aside_of(device: Device) -> Stream:
    """Return the package's own stream of a device. It is a new one if the context of the last one was destroyed."""
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
        """Allocate as :meth:`Sources.allocate` does, keep the memory, and return its address; 0 for no bytes."""
        memory = self.sources.allocate(nbytes, ordinal, handle, owner, in_capture=in_capture)
        address = memory.address
        if address:
            self._held[address] = memory, this_thread.number, handle
        return address

    def __contains__(self, address: int) -> bool:
        return address in self._held

    def free(self, address: int, ordinal: int, handle: int | None = None) -> int:
        """Free the memory at an address in the order of a stream, and return its bytes; 0 for an unknown address.

        ``handle``: that of the stream, on device ``ordinal``; None for the stream of the allocation.
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
            # Drop the last references to the memory first: only then is the unmap of virtual memory an item of the
            # queue. `work` attempts the item now, so that the memory is free before the next request.
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
