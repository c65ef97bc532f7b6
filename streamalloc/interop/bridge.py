"""Bridges: another library allocates its memory from pools and other allocators of streamalloc.

There are two ways:

* *Handles*: the library gets the driver's handle of a pool, and calls the driver itself. No Python code runs for an
  allocation, except with CuPy, where it changes the capture mode.
* *Callbacks*: the library calls Python for each allocation. Allocators without a driver handle need callbacks: a
  caching allocator, and virtual memory that can be evicted (a sleep group).

``use(...)`` of a library's module in :mod:`streamalloc.interop` starts a :class:`Bridge`. :meth:`Bridge.stop`, or the
end of a ``with`` block, restores the library's own allocator for later allocations. Memory that was allocated before
stays valid, and returns to its source when the library frees it. Stop the bridges of one library in the reverse order
of their starts. Dropping a bridge does not stop it.

Callbacks obey these rules, most of which :class:`Sources` and :class:`Ledger` implement:

* Memory is allocated on the library's stream. It is freed in stream order after its uses, on any thread and with any
  current device. The host never waits for a stream of the library.
* If memory runs out, the library raises its own exception; RMM raises ``MemoryError``. No Python exception enters C
  code that cannot handle exceptions.
* Objects that C code may call are never freed. At the end of the process the driver frees the memory that is left.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from streamalloc.core.errors import ClosedError, CudaError, undo_all
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
    may_be_captured,
    ordered_after,
    unless_in_use,
    work,
)
from streamalloc.core.properties import MemLocation, MemLocationType, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver.internal import BINDINGS_VERSION, LIBRARIES, cuda
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachedBuffer, CachingAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self


class AllocatorSource(Protocol):
    """Interface of a source of memory for another library: a pool, another allocator of streamalloc, or a sleep group.

    Such an object is an argument of :func:`streamalloc.interop.cupy.use`; :doc:`/docs/guides/interop` has programs.
    """

    @property
    def location(self) -> MemLocation: ...

    def allocate(self, nbytes: int, stream: Stream, /) -> Memory: ...


_OF_CUDA = f"bridges-cuda{BINDINGS_VERSION.partition('.')[0]}"
_EXTRAS = {
    "cupy": _OF_CUDA,
    "jax": "bridges-jax",
    "numba": _OF_CUDA,
    "rmm": _OF_CUDA,
    "torch": "bridges-torch",
}
"""Extra of this package that installs a library, by the library's top-level package."""


def library(name: str, session: Session | None = None) -> Any:
    """Import the module ``name`` of another library, and return the module.

    ``session``: session of the memory that the library is to use; None if it is to use no memory.

    Raises
    ------
    ModuleNotFoundError
        The library is not installed; the message gives the command to install it.
    ValueError
        The memory is of a simulated driver, and the library calls the CUDA driver.
    """
    try:
        found = importlib.import_module(name)
        if session is not None:
            check_driver(found, session)
        return found
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        package = name.partition(".")[0]
        extra = _EXTRAS.get(package)
        wanted = package if extra is None else f"'streamalloc[{extra}]'"
        raise ModuleNotFoundError(f"{error.name} is not installed: pip install {wanted}", name=error.name) from None


def library_for(name: str, memory: Memory) -> Any:
    """Import a library that is to use ``memory``, as :func:`library` does. Raises TypeError if ``memory`` is no Memory
    of this package, such as an array of a library.
    """
    return library(name, session_of(checked_type("memory", memory, Memory)))  # type: ignore[type-abstract]


def check_driver(module: ModuleType | None, session: Session) -> None:
    """Raise ``ValueError`` if the library calls the CUDA driver and the session's driver is a simulated one.

    A module without a ``__spec__`` stands in for a library in tests, and may be used with any driver.
    """
    spec = getattr(module, "__spec__", None)
    name = None if spec is None else LIBRARIES.get(spec.name.partition(".")[0])
    # Without this error, the library would pass simulated addresses to the CUDA driver. Simulated drivers and their
    # wrappers have the attribute `settings`; `cuda.bindings.driver` has not. Numba calls the functions of the bindings.
    # In a block of ``testing.install`` these functions have ``__wrapped__``, and lead to the simulated driver.
    settings = getattr(session.driver, "settings", "cuda")
    if name and settings != "cuda" and not (name == "Numba" and hasattr(cuda.cuInit, "__wrapped__")):
        raise ValueError(
            f"{name} uses the CUDA driver, and cannot use memory of {session.driver!r}: take a pool of "
            "Device(0, driver=streamalloc.driver.real())"
        )


# Started bridges, in the order of their starts. The table keeps a bridge alive if the program drops it, because the
# library still allocates from it.
_started: dict[Bridge, None] = {}


class Bridge(Closes, abc.ABC):
    """Bridge through which another library allocates from :attr:`sources`, from :meth:`start` to :meth:`stop`.

    :func:`streamalloc.interop.cupy.use` returns such a bridge; :doc:`/docs/guides/interop` has programs.
    """

    sources: Sources
    """Sources of memory (pools or other allocators), one for each device."""

    def __init__(self, sources: Sources, callbacks: bool = False) -> None:
        self.sources = sources
        self._callbacks = callbacks
        """Whether the library calls Python for each allocation even if all sources are pools."""
        self._undo: contextlib.ExitStack | None = None

    @abc.abstractmethod
    def _install(self, undo: contextlib.ExitStack) -> None:
        """Set the library's allocator, and push on ``undo`` the calls that restore the allocator of before."""

    @property
    def started(self) -> bool:
        """Whether the library allocates from :attr:`sources` now: True from :meth:`start` to :meth:`stop`."""
        return self._undo is not None

    def start(self) -> Self:
        """Make the library allocate from :attr:`sources`, and return this bridge. Idempotent.

        Raises ``ModuleNotFoundError`` if the library is not installed, and ``ValueError`` if the sources are of a
        simulated driver and the library calls the CUDA driver.
        """
        if self._undo is None:
            # In any other capture mode, the driver calls made here would invalidate captures of other code.
            with self.sources.session.relaxed(), contextlib.ExitStack() as undo:
                self._install(undo)
                self._undo = undo.pop_all()
            _started[self] = None
        return self

    def stop(self) -> None:
        """Restore the allocator that the library had before :meth:`start`; idempotent."""
        undo, self._undo = self._undo, None
        _started.pop(self, None)
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
"""Stream on which a library last allocated: its handle, the library's stream object, the package's :class:`Stream`, and
the method ``allocate`` of the source.
"""


class Sources:
    """Sources of memory of one bridge, one source for each device.

    Raises
    ------
    TypeError, ValueError
        A source does not allocate device memory, no source is given, or two sources have the same device or different
        drivers.
    """

    def __init__(self, sources: Iterable[AllocatorSource]) -> None:
        self.by_device: dict[int, AllocatorSource] = {}
        """Sources by device ordinal."""
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
        """Session of the driver that all sources have."""
        pooled = (MemoryPool, CachingAllocator)
        self.works: bool = not all(isinstance(source, pooled) for source in self.by_device.values())
        """Whether some source has memory that, once dropped, is released only in later calls of this package
        (:func:`work`), such as virtual memory.
        """
        self._submitted = deferred_queue(self.session).submitted
        self._last: dict[int, _Used] = {}
        """Stream on which the library last allocated, by device ordinal."""

    @property
    def pools(self) -> dict[int, MemoryPool] | None:
        """Sources by device ordinal if all sources are pools, which have driver handles; otherwise None."""
        pools = {ordinal: source for ordinal, source in self.by_device.items() if isinstance(source, MemoryPool)}
        return pools if len(pools) == len(self.by_device) else None

    def device(self, ordinal: int) -> Device:
        """Return the :class:`Device` with the ordinal ``ordinal``, of the driver of the sources."""
        return Device(ordinal, driver=self.session.driver)

    def allocate(
        self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True
    ) -> Memory:
        """Allocate ``nbytes`` bytes on the device ``ordinal``, on the library's stream with the driver handle
        ``handle``.

        ``owner``: the object that keeps the stream's handle valid; None if there is none. While the stream is being
        captured, the memory belongs to the graph. With ``in_capture=False`` the memory does not belong to the graph,
        and the host waits until the memory can be used.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory.
        ValueError
            No source of this device was given.
        ClosedError
            The source or the stream was closed.
        """
        used = self._last.get(ordinal)
        # The owner is compared, too. After a stream was destroyed, the driver may give its handle to a new stream,
        # which has another owner.
        if used is None or used[0] != handle or used[1] is not owner:
            used = self._use(ordinal, handle, owner)
        _, _, stream, allocate = used
        if stream.thread is not None and self._submitted:
            # The finaliser of a buffer that the library dropped on another thread has left the free to the queue.
            # Without this call the pool would grow until the device is full.
            work(self.session)
        if in_capture or stream.is_default or not may_be_captured(stream):
            return allocate(nbytes, stream)
        # The memory must be usable at once, also by captured work, so the host waits. The wait is short: the package's
        # own stream has no other work, so the host waits only until the memory that the pool reuses is free.
        aside = _aside_of(stream.device)
        memory = allocate(nbytes, aside)
        aside.synchronize()
        return memory

    def _use(self, ordinal: int, handle: int, owner: object) -> _Used:
        source = self.by_device.get(ordinal)
        if source is None:
            given = ", ".join(map(str, self.by_device))
            raise ValueError(f"memory of device {ordinal} was asked for, and the sources are of device {given}")
        # For all these libraries, handle 0 means the legacy default stream. It would mean the per-thread default stream
        # only in a build for per-thread default streams.
        handle_there = handle or LEGACY
        stream: Stream | None = None
        if owner is not None and handle_there not in (LEGACY, PER_THREAD):
            # A cache has free lists of its own for each :class:`Stream` object. So the object that the session already
            # has for this stream is used.
            with contextlib.suppress(TypeError):
                stream = as_stream(cast("Any", owner), self.session)
        if stream is None:
            stream = Stream.of_handle(self.device(ordinal), handle_there, owner)
        used = self._last[ordinal] = handle, owner, stream, source.allocate
        return used

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.by_device.values()))


def free_after_all(item: FreeAfterAll) -> None:
    """Free the buffers of ``item`` after all work that is queued on their device now. For finalisers.

    The host does not wait. The free is queued at once; while a stream is being captured, it is deferred.
    """
    queue = deferred_queue(item.session)
    # An error is hidden, because a finaliser has no caller: the item stays in the queue, which attempts it again.
    with contextlib.suppress(CudaError):
        if unless_in_use(functools.partial(queue.end, item), None, item.session) is None:
            queue.submit(item)


class FreeAfterAll(Deferred):
    """Item of the queue of deferred releases: it frees buffers of one device after the work of all streams known by
    then.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._device = buffer.stream.device
        self.session: Session = session_of(buffer)
        self.buffers: list[Buffer] = [buffer]
        """Buffers that this item frees."""
        self.nbytes: int = buffer.nbytes
        """Total size of the buffers in bytes. It may be too small, because an update by another thread may be lost."""
        self.sealed: bool = False
        """Whether an attempt to free the buffers has begun. Buffers can no longer be added then."""

    def add(self, buffer: Buffer) -> bool:
        """Add a buffer of the same device, and return True. Returns False if an attempt has begun, which would miss the
        buffer.
        """
        # Nothing is called between the test and the append, so Python does not switch threads between them.
        if self.sealed:
            return False
        self.buffers.append(buffer)
        self.nbytes += buffer.nbytes
        return True

    def attempt(self) -> bool:
        """Free the buffers on a stream that waits for all other streams. The driver refuses this wait during a capture.

        Returns whether the buffers are freed; if not, this item stays in the queue.
        """
        self.sealed = True
        # This line calls no function, so Python does not switch threads within it, and only one thread takes the
        # buffers.
        buffers, self.buffers = self.buffers, []
        try:
            return not buffers or self._free(buffers)
        finally:
            self.buffers += [buffer for buffer in buffers if not buffer.freed]

    def _free(self, buffers: list[Buffer]) -> bool:
        dropped = dropped_of(self.session)
        dropped.refused, before = True, dropped.refused
        streams = {buffer.stream for buffer in buffers if not buffer.freed}
        if any(map(may_be_captured, streams)):
            return False
        if streams:
            aside = _aside_of(self._device)
            default = next((stream for stream in streams if stream.is_default), None)
            Fence(self.session, without=(aside, default)).precede(aside)
            if default is not None:
                # The legacy default stream comes after all blocking streams, including streams that the package has no
                # object for, such as Numba's. So a wait for the default stream covers these streams, too.
                ordered_after(default, aside.wait)
            undo_all(functools.partial(_free_on, buffer, aside) for buffer in buffers)
        dropped.refused = before
        return True


def _free_on(buffer: Buffer, stream: Stream) -> None:
    with contextlib.suppress(ClosedError):  # Another thread may have freed it.
        buffer.free(stream)


class Dropped:
    """Buffers that libraries have dropped, in batches, because each free after all work of a device is expensive.

    A batch is in the queue of deferred releases from its first buffer on. It is freed when the queue is next worked
    off, or as soon as it has :data:`BATCH` buffers or :data:`BATCH_BYTES` bytes. So large memory is freed at once.
    """

    def __init__(self, _: Session) -> None:
        self._batches: dict[int, FreeAfterAll] = {}
        """Latest batch of each device, by device ordinal."""
        self.refused: bool = False
        """Whether the queue contains batches whose free was attempted. The next allocation should then work off the
        queue.
        """

    def add(self, buffer: Buffer) -> None:
        """Add a buffer to a batch, which is freed after the work of all streams. For finalisers, on any thread."""
        session, ordinal = session_of(buffer), buffer.stream.device.ordinal
        if not session.usable:
            return
        batch = self._batches.get(ordinal)
        if batch is None or not batch.add(buffer):
            batch = self._batches[ordinal] = FreeAfterAll(buffer)
            deferred_queue(session).submit(batch)
        if batch.nbytes >= BATCH_BYTES or len(batch.buffers) >= BATCH:
            free_after_all(batch)
            # The item of the batch stays in the queue until the queue is worked off, even if the batch has been freed.
            self.refused = True


BATCH = 64
"""Number of buffers at which a batch of :class:`Dropped` is freed at once."""
BATCH_BYTES = 1 << 20
"""Number of bytes at which a batch of :class:`Dropped` is freed at once."""
dropped_of: PerDriver[Dropped] = PerDriver(Dropped)


_asides: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""Streams that this package has made for work that must not be on a library's stream, by device ordinal."""


def _aside_of(device: Device) -> Stream:
    """Return the stream that this package has made for the device. It makes a new one if the last one's context is
    gone.
    """
    streams = _asides(session_of(device))
    found = streams.get(device.ordinal)
    if found is not None:
        with contextlib.suppress(CudaError):
            found.query()
            return found
        streams.pop(device.ordinal, None)
    return streams.setdefault(device.ordinal, device.create_stream())


class Ledger:
    """Memory of a bridge by device address, for libraries whose callbacks pass only addresses."""

    def __init__(self, sources: Sources) -> None:
        self.sources: Sources = sources
        self._held: dict[int, tuple[Memory, int]] = {}
        """Memory by address, each with the handle of the stream."""

    def __len__(self) -> int:
        return len(self._held)

    def allocate(self, nbytes: int, ordinal: int, handle: int, owner: object = None, *, in_capture: bool = True) -> int:
        """Allocate as :meth:`Sources.allocate` does, keep the memory, and return its address; 0 if ``nbytes`` is 0.
        Raises the errors of that method.
        """
        memory = self.sources.allocate(nbytes, ordinal, handle, owner, in_capture=in_capture)
        address = memory.address
        if address:
            self._held[address] = memory, handle
        return address

    def __contains__(self, address: int) -> bool:
        return address in self._held

    def free(self, address: int, ordinal: int, handle: int | None = None) -> int:
        """Free the memory at ``address`` in the order of a stream, and return the size of the memory in bytes; 0 if the
        address is unknown. Virtual memory is unmapped after the work that uses it.

        ``handle``: handle of the stream on the device ``ordinal``; None for the stream of the allocation.
        """
        held = self._held.pop(address, None)
        if held is None:
            return 0
        memory, own = held
        nbytes, session = memory.nbytes, self.sources.session
        same = handle is None or (handle or LEGACY) == (own or LEGACY)
        if not isinstance(memory, Buffer):
            # The last references to the memory must be dropped first: only then is the unmap of virtual memory in the
            # queue of deferred releases. `work` then attempts the unmap, so that the memory is free before the next
            # request.
            del held, memory
            work(session)
        # The finaliser of a buffer of these classes frees the memory on the stream of the allocation, which is enough.
        elif session.usable and not (same and type(memory) in (PoolBuffer, CachedBuffer)):
            try:
                memory.free(None if same else self.sources._use(ordinal, cast("int", handle), None)[2])
            except CudaError:
                deferred_queue(session).submit(FreeAfterAll(memory))
        return nbytes
