"""Tiers: host memory for the contents of pages that are swapped out."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import OutOfMemoryError, refused, size_text, undoing
from streamalloc.core.internal import (
    CopySide,
    Device,
    HandleEnd,
    Memory,
    Stream,
    StreamLike,
    check_device,
    deferred_queue,
)
from streamalloc.core.properties import checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.pages.queued import Work, copy_batch
from streamalloc.vmm.virtual_buffer import copying_stream

_LEAST, _MOST = 32 << 20, 1 << 30  # bytes of a chunk, unless a page is larger
_PORTABLE = 1


class _End(HandleEnd):
    """The end of a chunk, ``cuMemFreeHost``, after the copies that use it."""

    __slots__ = ("work",)

    def __init__(self, session: Session) -> None:
        super().__init__(session, "cuMemFreeHost", None)
        self.work: dict[Work, None] = {}
        """Copies that may use it; several threads change it at once."""

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
        for one in list(self.work):
            if one.done():
                self.work.pop(one, None)


Blocks: TypeAlias = "int | Sequence[int] | npt.NDArray[np.integer[Any]]"
"""Index of a block, or a sequence or an array of indices."""
Addresses: TypeAlias = "npt.NDArray[np.int64]"
Kept: TypeAlias = "tuple[Stored, int]"
"""The contents of one block, and their index there."""


class _Chunk:
    """Pinned host memory for some blocks of one size; freed once nothing refers to it."""

    __slots__ = ("__weakref__", "_end", "_free", "address", "count", "left", "nbytes")

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        session = session_of(device)
        self._end = _End(session)
        # Before the allocation: the calls after it may fail.
        deferred_queue(session).end_with(self, self._end)
        self.address: int = self._end.allocate(device, nbytes * count)
        self.nbytes: int = nbytes
        """Size of a block in bytes."""
        self.count: int = count
        """Number of blocks."""
        self.left: int = 0
        """Number of blocks without contents."""
        self._free: list[tuple[Addresses, Sequence[Work]]] = []
        """Addresses without contents, with the last copies there; the last ones are taken first."""
        self.give(self.address + np.arange(count) * nbytes, ())

    def take(self, most: int) -> tuple[Addresses, Sequence[Work]]:
        """Take at most so many addresses, and the last copies there. Some are left."""
        addresses, works = self._free[-1]
        taken = addresses[:most]
        # First: an exception of a signal handler may leave memory unused, but none counted that is not there.
        self.left -= len(taken)
        self._free[-1:] = [(addresses[most:], works)] if len(addresses) > most else []
        return taken, works

    def give(self, addresses: Addresses, works: Sequence[Work]) -> None:
        """Return addresses, which are used again after these copies."""
        self._free.append((addresses, works))
        self.left += len(addresses)
        if self.left == self.count and len(self._free) > 1:
            # In order again, so that the copies of adjacent blocks become one.
            last = {work for _, several in self._free for work in several}
            self._free = [(self.address + np.arange(self.count) * self.nbytes, tuple(last))]

    def use(self, work: Work) -> None:
        """Keep the memory until copies have completed."""
        end = self._end
        end.work[work] = None
        if len(end.work) > 64:
            end.settle()


class Stored:
    """The contents of blocks of one size in a tier; made by :meth:`HostTier.save`."""

    __slots__ = ("_addresses", "_bases", "_chunks", "_held", "_sums", "_works", "nbytes", "tier")

    def __init__(self, tier: HostTier, nbytes: int) -> None:
        self.tier: HostTier = tier
        """The tier."""
        self.nbytes: int = nbytes
        """Size of a block in bytes."""
        self._addresses = self._bases = np.empty(0, np.int64)
        self._chunks: dict[int, _Chunk] = {}
        """Chunks by the address, which :attr:`_bases` has for each block."""
        self._held = np.empty(0, np.bool_)
        """Whether each block has its memory."""
        self._works: Sequence[Work] = ()
        """The last copies from or to the memory."""
        self._sums: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def complete(self) -> bool:
        """Whether no block was dropped."""
        return bool(self._held.all())

    def _add(self, chunk: _Chunk, addresses: Addresses, works: Sequence[Work]) -> None:
        """Add memory; under the tier's lock."""
        self._chunks[chunk.address] = chunk
        self._works = (*self._works, *works)
        self._bases = np.concatenate((self._bases, np.full_like(addresses, chunk.address)))
        self._addresses = np.concatenate((self._addresses, addresses))
        self._held = np.ones(len(self._addresses), np.bool_)

    def copy(self, blocks: Addresses | Sequence[int], device: Addresses, stream: Stream, *, out: bool) -> None:
        """Queue copies of these blocks from or to device memory, after the last copies of their memory."""
        before = self._works
        for one in before:
            if not one.done():
                one.precede(stream)
        host = self._addresses[blocks]
        try:
            copy_batch(host if out else device, device if out else host, self.nbytes, self._bases[blocks], stream)
        finally:
            work = Work.behind(stream)
            for chunk in self._chunks.values():
                chunk.use(work)
            with self.tier._lock:
                self._works = (*(one for one in self._works if one not in before), work)

    def array(self, block: int) -> npt.NDArray[np.uint8]:
        """The contents of a block, once the copies have completed."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(int(self._addresses[block])))

    def seal(self) -> None:
        """Compute checksums of the contents, which are complete."""
        self._sums = [zlib.crc32(self.array(block).data) for block in range(len(self))]

    def check(self, blocks: Iterable[int]) -> None:
        """Raise ``ValueError`` if the contents of some blocks have changed since :meth:`seal`."""
        for block in blocks if self._sums else ():
            with self.tier._lock:  # another thread may drop it
                changed = self._held[block] and zlib.crc32(self.array(block).data) != self._sums[block]
            if changed:
                raise ValueError("the contents of a page have changed while it was swapped out: its checksum differs")

    def drop(self, blocks: Sequence[int] | None = None) -> None:
        """Return the memory of all blocks, or of these, to the tier, which uses it after the copies; idempotent."""
        with self.tier._lock:
            every = np.arange(len(self._held))
            chosen = every if blocks is None else np.unique(every[np.array(blocks, np.int64)])
            chosen = chosen[self._held[chosen]]
            self._held[chosen] = False
            addresses, bases, chunks = self._addresses[chosen], self._bases[chosen], self._chunks
            left = np.unique(self._bases[np.flatnonzero(self._held)]).tolist()
            self._chunks = {base: chunks[base] for base in left}
            for base in np.unique(bases).tolist():
                chunks[base].give(addresses[bases == base], self._works)
            if self.tier.closed:
                self.tier._forget_unused()


def by_contents(kept: Mapping[int, Kept]) -> Iterator[tuple[Stored, list[int], list[int]]]:
    """Split places by what has their contents; yield that, their indices there, and the places."""
    several: dict[Stored, tuple[list[int], list[int]]] = {}
    for place, (stored, index) in kept.items():
        found = several.setdefault(stored, ([], []))
        found[0].append(index)
        found[1].append(place)
    for stored, (indices, places) in several.items():
        yield stored, indices, places


def drop_contents(kept: Mapping[int, Kept]) -> None:
    """Return the memory of contents to their tiers."""
    for stored, indices, _ in by_contents(kept):
        stored.drop(indices)


def _places(blocks: Blocks, nbytes: int, side: CopySide) -> Addresses:
    """Return the addresses of blocks of memory."""
    size = checked_size("nbytes", nbytes)
    if not size:
        raise ValueError("nbytes=0: a block has at least one byte")
    numbers = np.atleast_1d(np.asarray(blocks))
    if numbers.dtype.kind not in "iu" and len(numbers):
        raise TypeError(f"blocks must be indices, not {numbers.dtype}")
    numbers = numbers.astype(np.int64).ravel()
    count = side.nbytes // size
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(f"blocks: block {wrong[0]} is none of the {count} of {size_text(size)} in {side.keep!r}")
    return side.address + numbers * size


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

    def save(self, memory: Memory, blocks: Blocks, nbytes: int, stream: StreamLike) -> Stored:
        """Queue the copies of blocks of memory to the tier: of all, or of none. For blocks smaller than a page.

        Parameters
        ----------
        memory
            Memory of the device.
        blocks
            An index, a range or an array of indices: block ``n`` begins ``n * nbytes`` bytes after the memory does.
        nbytes
            Size of a block in bytes.
        stream
            Stream of the copies.

        Returns
        -------
        Stored
            The contents. :meth:`load` copies them back, ``drop()`` returns their memory to the tier.

        Raises
        ------
        OutOfMemoryError
            The tier has no room.
        CaptureError
            ``stream`` is being captured.
        TypeError, ValueError
            A block is outside of the memory, which may also belong to another driver.
        ClosedError, CudaError
            Tier or memory was closed, or the driver refused a call.
        """
        ordered = copying_stream(stream, session_of(self.device))
        side = CopySide.readable(memory, session_of(ordered))
        places = _places(blocks, nbytes, side)
        side.ordered_before(ordered)
        stored = self.store(places, nbytes, ordered)
        with undoing(stored.drop):
            self.settle(stored, ordered)
        return stored

    def load(self, stored: Stored, memory: Memory, blocks: Blocks, stream: StreamLike) -> None:
        """Queue the copies of contents to blocks of memory. Parameters and errors as for :meth:`save`.

        Raises
        ------
        ValueError
            Contents have changed in a tier that checks them, or were dropped, or ``blocks`` has another number.
        """
        ordered = copying_stream(stream, session_of(self.device))
        side = CopySide.writable(memory, session_of(ordered))
        places = _places(blocks, stored.nbytes, side)
        if len(places) != len(stored) or not stored.complete:
            raise ValueError(f"blocks: {len(places)} for the contents of {len(stored)}, of which none may be dropped")
        stored.check(range(len(stored)))
        side.ordered_before(ordered)
        stored.copy(np.arange(len(stored)), places, ordered, out=False)

    def store(self, places: Addresses, nbytes: int, stream: Stream) -> Stored:
        """Queue the copies of blocks at these addresses to host memory: of all, or of none."""
        stored = Stored(self, nbytes)
        with undoing(stored.drop):
            self._take(len(places), stored)
            stored.copy(np.arange(len(places)), places, stream, out=True)
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
            free = sum(chunk.left for chunk in self._chunks if chunk.nbytes == nbytes)
            while free < count:
                free += self._grow(nbytes, count - free).count

    def _take(self, count: int, stored: Stored) -> None:
        with self._lock:
            self._check_open()
            while len(stored) < count:
                left = count - len(stored)
                fitting = (chunk for chunk in self._chunks if chunk.left and chunk.nbytes == stored.nbytes)
                chunk = next(fitting, None) or self._grow(stored.nbytes, left)
                stored._add(chunk, *chunk.take(left))

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

    def settle(self, stored: Stored, stream: Stream) -> None:
        """Compute the checksums, once the copies have completed."""
        if self._check and len(stored):
            stream.synchronize()
            stored.seal()

    @property
    def used(self) -> int:
        """Bytes of the contents."""
        return sum(chunk.nbytes * (chunk.count - chunk.left) for chunk in self._chunks)

    @property
    def reserved(self) -> int:
        """Bytes of host memory, which is as much as the contents have needed at once."""
        return sum(chunk.nbytes * chunk.count for chunk in self._chunks)

    def trim(self) -> None:
        """Release the chunks that hold no contents, each after the copies that use it (``cuMemFreeHost``)."""
        self._forget_unused()
        deferred_queue(session_of(self.device)).work()

    def _forget_unused(self) -> None:
        with self._lock:
            self._chunks = [chunk for chunk in self._chunks if chunk.left < chunk.count]

    def close(self) -> None:
        """Take no more contents, and release the memory when the last of them leaves. Idempotent."""
        self.closed = True
        self.trim()

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} used"
