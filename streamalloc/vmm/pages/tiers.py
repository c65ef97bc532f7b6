"""Tiers: host memory for the contents of pages that are swapped out."""

from __future__ import annotations

import ctypes
import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import OutOfMemoryError, refused, size_text
from streamalloc.core.internal import (
    CopySide,
    Device,
    HandleEnd,
    Memory,
    Stream,
    StreamLike,
    check_device,
    deferred_queue,
    parts_of,
)
from streamalloc.core.properties import checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.pages.queued import Ranges, Work, copy_batch
from streamalloc.vmm.virtual_buffer import copying_stream

_LEAST, _MOST = 32 << 20, 1 << 30  # bytes of a chunk, unless a page is larger
_PORTABLE = 1


class _End(HandleEnd):
    """The end of a chunk, ``cuMemFreeHost``, after the copies that use it."""

    __slots__ = ("work",)

    def __init__(self, session: Session) -> None:
        super().__init__(session, "cuMemFreeHost", None)
        self.work: list[Work] = []
        """Copies that may use it."""

    def allocate(self, device: Device, nbytes: int) -> int:
        """Allocate the chunk (``cuMemHostAlloc``) and return its address."""
        with self._session.relaxed(), device.current():
            address = self._raw = int(self._session.call("cuMemHostAlloc", nbytes, _PORTABLE))
        return address

    def attempt(self) -> bool:
        self.settle()
        return not self.work and super().attempt()

    def settle(self) -> None:
        """Forget copies that have completed."""
        self.work = [one for one in self.work if not one.done()]


class _Chunk:
    """Pinned host memory for some pages of one size; freed once nothing refers to it."""

    __slots__ = ("__weakref__", "_end", "address", "count", "free", "nbytes")

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        session = session_of(device)
        self._end = _End(session)
        # Before the allocation: the calls after it may fail.
        deferred_queue(session).end_with(self, self._end)
        self.address: int = self._end.allocate(device, nbytes * count)
        self.nbytes: int = nbytes
        """Size of a page in bytes."""
        self.count: int = count
        """Number of pages."""
        self.free: list[tuple[int, Work | None]] = []
        """Addresses without contents, each with the last copy there. They are taken from the end."""
        self.free += [(self.address + at * nbytes, None) for at in reversed(range(count))]

    def take(self, most: int) -> list[tuple[int, Work | None]]:
        """Take at most so many addresses, the last ones first."""
        taken = self.free[: -most - 1 : -1]
        del self.free[len(self.free) - len(taken) :]
        return taken

    def use(self, work: Work) -> None:
        """Keep the memory until copies have completed."""
        end = self._end
        end.work.append(work)
        if len(end.work) > 64:
            end.settle()


class Stored:
    """Memory of a tier for the contents of one page."""

    __slots__ = ("_checksum", "address", "chunk", "tier", "work")

    def __init__(self, tier: HostTier, chunk: _Chunk, address: int, work: Work | None) -> None:
        self.tier: HostTier | None = tier
        """The tier; None once the memory was returned."""
        self.chunk: _Chunk = chunk
        self.address: int = address
        self.work: Work | None = work
        """The last copy from or to the memory."""
        self._checksum: int | None = None

    def array(self) -> npt.NDArray[np.uint8]:
        """The contents, once the copies have completed."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.chunk.nbytes).from_address(self.address))

    def seal(self) -> None:
        """Compute a checksum of the contents, which are complete."""
        self._checksum = zlib.crc32(self.array().data)

    def check(self) -> None:
        """Raise ``ValueError`` if the contents have changed since :meth:`seal`."""
        if self._checksum is not None and zlib.crc32(self.array().data) != self._checksum:
            raise ValueError("the contents of a page have changed while it was swapped out: its checksum differs")

    def drop(self) -> None:
        """Return the memory to the tier, which uses it again after the copies; idempotent."""
        tier, self.tier = self.tier, None
        if tier is not None:
            tier._return(self)


def load(stored: Sequence[Stored], target: Ranges, stream: Stream) -> None:
    """Queue the copies of contents to device memory."""
    _copy(stored, target, stream, out=False)


def _copy(stored: Sequence[Stored], device: Ranges, stream: Stream, *, out: bool) -> None:
    """Queue copies from or to a tier, after the last copies of the same memory."""
    for before in {one.work for one in stored}:
        if before is not None and not before.done():
            before.precede(stream)
    chunks = _numbers(one.chunk.address for one in stored)
    host = Ranges(_numbers(one.address for one in stored), device.sizes, chunks)
    try:
        copy_batch(host if out else device, device if out else host, stream)
    finally:
        work = Work.behind(stream)
        for chunk in {one.chunk for one in stored}:
            chunk.use(work)
        for one in stored:
            one.work = work


def _ranges(memory: Sequence[Memory], stream: Stream, side_of: Callable[[object, Session], CopySide]) -> Ranges:
    """Return where memory lies, and let a stream wait for the contents that are still to come."""
    session = session_of(stream)
    whole, indices, offsets, sizes = parts_of(memory)
    sides = [side_of(one, session) for one in whole]
    for side in sides:
        side.ordered_before(stream)
    index, offset, nbytes = (_numbers(found) for found in (indices, offsets, sizes))
    most = _numbers(side.nbytes for side in sides)[index]
    nbytes = np.where(nbytes < 0, most, nbytes)
    for outside in np.flatnonzero(offset + nbytes > most):
        side_of(memory[outside], session)  # raises
    return Ranges(_numbers(side.address for side in sides)[index] + offset, nbytes, index)


def _numbers(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array([*values], np.int64)


class HostTier(Closes):
    """Pinned host memory for pages that are swapped out; it grows as needed, and is kept for later swaps.

    It grows in chunks of at least 32 MiB (``cuMemHostAlloc``). Thread-safe. Contents stay until they are swapped in or
    released, also after :meth:`close`.

    Parameters
    ----------
    device
        Device of the pages.
    limit
        Bytes of host memory at most; None for no limit.
    check
        Whether contents get a checksum, which :meth:`PageSpace.swap_in` checks. :meth:`PageSpace.swap_out` then blocks
        the host until the copies have completed.

    Raises
    ------
    TypeError
        ``device`` is no device.
    """

    __slots__ = ("__weakref__", "_check", "_chunks", "_limit", "_lock", "closed", "device")

    def __init__(self, device: Device, limit: int | None = None, *, check: bool = False) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of the pages."""
        self.closed: bool = False
        """Whether it was closed."""
        self._check = check
        self._limit = None if limit is None else checked_size("limit", limit)
        self._chunks: list[_Chunk] = []
        self._lock = threading.RLock()

    def save(self, memory: Sequence[Memory], stream: StreamLike) -> list[Stored]:
        """Queue the copies of memory to the tier: of all, or of none. For blocks that are smaller than a page.

        Parameters
        ----------
        memory
            Memory of the device, of any sizes.
        stream
            Stream of the copies.

        Returns
        -------
        list of Stored
            The contents, one for each. :meth:`load` copies them back, ``drop()`` returns their memory to the tier.

        Raises
        ------
        OutOfMemoryError
            The tier has no room.
        CaptureError
            ``stream`` is being captured.
        ClosedError, CudaError, ValueError
            The tier was closed, the driver refused a call, or a memory belongs to another driver.
        """
        ordered = copying_stream(stream, session_of(self.device))
        stored = self.save_pages(_ranges(memory, ordered, CopySide.readable), ordered)
        self.settle(stored, ordered)
        return stored

    def load(self, stored: Sequence[Stored], memory: Sequence[Memory], stream: StreamLike) -> None:
        """Queue the copies of contents to memory of the same sizes. Parameters and errors as for :meth:`save`.

        Raises
        ------
        ValueError
            Contents have changed in a tier that checks them, or a size or number differs.
        """
        ordered = copying_stream(stream, session_of(self.device))
        target = _ranges(memory, ordered, CopySide.writable)
        if [one.chunk.nbytes for one in stored] != target.sizes.tolist():
            raise ValueError("memory: give as many as there are contents, each of the same size")
        if self._check:
            for one in stored:
                one.check()
        load(stored, target, ordered)

    def save_pages(self, pages: Ranges, stream: Stream) -> list[Stored]:
        """Queue the copies of pages to host memory: of all, or of none."""
        stored: list[Stored] = []
        try:
            self._take(pages.sizes.tolist(), stored)
            _copy(stored, pages, stream, out=True)
        except BaseException:
            for one in stored:
                one.drop()
            raise
        return stored

    def reserve(self, count: int, nbytes: int) -> None:
        """Allocate host memory for contents ahead (``cuMemHostAlloc``), which takes long.

        Parameters
        ----------
        count, nbytes
            Number of pages or blocks that are to have room, beside the contents of now, and the size of each in bytes.

        Raises
        ------
        OutOfMemoryError, ClosedError
            As for :meth:`save`.
        """
        with self._lock:
            self._check_open()
            free = sum(len(chunk.free) for chunk in self._chunks if chunk.nbytes == nbytes)
            while free < count:
                free += self._grow(nbytes, count - free).count

    def _take(self, sizes: Sequence[int], taken: list[Stored]) -> None:
        with self._lock:
            self._check_open()
            for nbytes, run in itertools.groupby(sizes):
                left = sum(1 for _ in run)
                while left:
                    fitting = (chunk for chunk in self._chunks if chunk.free and chunk.nbytes == nbytes)
                    chunk = next(fitting, None) or self._grow(nbytes, left)
                    slots = chunk.take(left)
                    taken += [Stored(self, chunk, address, work) for address, work in slots]
                    left -= len(slots)

    def _grow(self, nbytes: int, count: int) -> _Chunk:
        wanted = max(min(max(nbytes * count, _LEAST), _MOST) // nbytes, 1)
        room = wanted if self._limit is None else (self._limit - self.reserved) // nbytes
        if not room:
            why = f"the tier's limit of {size_text(self._limit or 0)} leaves no room for {count} pages"
            error = refused(OutOfMemoryError, "cuMemHostAlloc", f"{why} of {size_text(nbytes)}")
            error.requested, error.used, error.limit = nbytes * count, self.used, self._limit or 0
            raise error
        chunk = _Chunk(self.device, nbytes, min(wanted, room))
        self._chunks.append(chunk)
        return chunk

    def _return(self, one: Stored) -> None:
        with self._lock:
            chunk = one.chunk
            chunk.free.append((one.address, one.work))
            if len(chunk.free) == chunk.count:
                # In order again, so that the copies of adjacent pages become one.
                chunk.free.sort(key=lambda free: -free[0])
                if self.closed:
                    self._chunks.remove(chunk)

    def settle(self, stored: Sequence[Stored], stream: Stream) -> None:
        """Compute the checksums, once the copies have completed."""
        if self._check and stored:
            stream.synchronize()
            for one in stored:
                one.seal()

    @property
    def used(self) -> int:
        """Bytes of the contents."""
        with self._lock:
            return sum(chunk.nbytes * (chunk.count - len(chunk.free)) for chunk in self._chunks)

    @property
    def reserved(self) -> int:
        """Bytes of host memory, which is as much as the contents have needed at once."""
        with self._lock:
            return sum(chunk.nbytes * chunk.count for chunk in self._chunks)

    def trim(self) -> None:
        """Release the chunks that hold no contents, each after the copies that use it (``cuMemFreeHost``)."""
        with self._lock:
            self._chunks = [chunk for chunk in self._chunks if len(chunk.free) < chunk.count]
        deferred_queue(session_of(self.device)).work()

    def close(self) -> None:
        """Take no more contents, and release the memory when the last of them leaves. Idempotent."""
        self.closed = True
        self.trim()

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} used"
