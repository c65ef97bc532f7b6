"""Bytes that are stored outside of device memory, in blocks: contents of pages, of smaller pieces, and of sleeping
buffers.

A *tier* consists of *chunks*; each chunk is an allocation in host memory, or a file. A call that saves makes one
:class:`Stored`. Its :class:`Room` has the address of each block in a chunk, and returns the addresses of dropped blocks
to the chunks. They are reused or released after the copies that use them. The classes::

    Tier                  a store of bytes, with the lock of its room; the base class itself is for a caller's memory
    |- BlockTier          its chunks are shared by several Stored, and kept for later ones
    |  |- HostTier        pinned host memory
    |  `- DiskTier        files
    `- PoolTier           allocations of a pool
    Chunk                 the free addresses of an allocation or file, with fences of the last copies that used them
    |- MemoryChunk        an allocation, which AfterCopies releases
    `- FileChunk          a file
    Stored                the contents that one call saves, with one Room
    |- InMemory           in the chunks of all tiers but DiskTier; its copies are stream-ordered
    `- InFiles            in those of a DiskTier; the host waits for the copies
    Room                  the chunk and the address of each block, and fences of the last copies
    Backup                a Stored and the range of its blocks that one buffer has

Pages and pieces have blocks of one size. Buffers have blocks of different sizes, and each buffer has a :class:`Backup`
for its blocks. In a :class:`HostTier` both share the chunks. A pool and a file for buffers have chunks for one
:class:`Stored`.

The bytes of a buffer go to a :class:`HostTier` in these steps, each with who waits, the host or the
stream of the copies, and for what:

1. *Hold.* ``HostTier.hold`` makes one Stored for all buffers of a tag, in blocks of 2 MiB. The blocks have no places
   yet. ``HostTier._begin`` has threads pin memory if too little is free, and nobody waits for them here.
2. *Begin.* ``InMemory.moving``: the stream waits for ``Room.fences``, the last copies from or to the places that blocks
   have already. Until step 7, ``Stored.in_use`` prevents that another thread's drop returns places.
3. *Describe.* ``Backup.move`` calls the function of ``moving`` with the buffer's blocks and device addresses
   (:class:`Copies`), one buffer after the other.
4. *Place.* ``InMemory._with_places`` gives places to the blocks that have none (``HostTier._place``, ``Room.take``). If
   no place is free, the host waits until a thread has pinned a piece. The copies that were queued before run meanwhile.
5. *Order.* The stream waits for the fences of these places: the copies of those who had the places before.
6. *Copy.* ``InMemory._runs`` joins blocks with adjacent places. ``copy_bytes`` copies each run (``cuMemcpyAsync``).
   After it, ``_with_places`` continues with the blocks that still have no place: steps 4 to 6 again.
7. *End* of ``moving``. One new fence for all these copies goes to ``Room.fences``, to ``InMemory._written``, and to
   ``MemoryChunk.release``, because the memory is released only after them.
8. *Seal.* ``Stored.seal`` does nothing here. A file that is to have a name gets its header and its name.
9. *Wait.* Before the buffers of 64 MiB or more are unmapped, the host waits for an event after their copies
   (``EvictSteps.unmap_all``). A freeze waits for the stream.

They come back in these steps:

1. *Begin.* ``InMemory.moving``: the stream waits for ``InMemory._written``, the copies to the places.
2. *Copy.* As steps 3 and 6 above. All blocks have places.
3. *End* of ``moving``, as step 7. ``_written`` stays as it is.
4. *Drop.* ``Backup.drop``, after the buffers are awake: ``Room.give`` returns the places to their chunks, together with
   ``Room.fences``. Whoever gets the places next waits for these fences: a stream in step 5, or the host for a write
   (``InMemory.write``).

A :class:`Fence` of copies is in up to five places, each for others who come later:

========================  =======================================  ====================================================
Place                     Read by                                  What comes after the copies
========================  =======================================  ====================================================
``Room.fences``           ``InMemory.moving(out=True)``            later copies to the same contents
``InMemory._written``     ``InMemory.moving(out=False)``           copies of these contents to the device
``Chunk._free``           ``Room.take``, after ``Room.give``       copies and writes to places that have a new owner
``MemoryChunk.release``   the deferred queue (``AfterCopies``)     the release of the memory
``Reservation.copies``    ``Reservation.in_use``                   the unmap of a range that was dropped after a wake
========================  =======================================  ====================================================

A pool differs in step 1: ``PoolTier.hold`` allocates memory, and all blocks get places at once. So do pages and pieces,
whose ``BlockTier._take`` replaces steps 1 and 4, and ``copy_batch`` step 6. In files, ``InFiles.moving`` blocks the
host until the copies and the reads or writes are done, so places in files need no fences.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, OutOfMemoryError, refused, size_text, undo_all, undoing
from streamalloc.core.internal import (
    CopySide,
    Deferred,
    Device,
    Fence,
    Memory,
    Stream,
    StreamLike,
    check_device,
    deferred_queue,
    kernels_may_use,
)
from streamalloc.core.properties import checked_number, checked_size, checked_type
from streamalloc.core.resource import Closes, Unique
from streamalloc.core.session import Session, drained, session_of
from streamalloc.driver.internal import COPY_KERNEL, COPY_MOST, RLock
from streamalloc.vmm.access import copying_stream

T = TypeVar("T")
LEAST, _MOST = 32 << 20, 1 << 30  # Smallest and largest chunk in bytes; a larger block has its own.
_FIRST, _LAUNCH = 4 * COPY_MOST[COPY_KERNEL], max(COPY_MOST.values())
"""Number of blocks in the first step of a copy, and in each later step. The first step runs longer than the host needs
to prepare the second step, so that the device does not wait.
"""
_SMALL = 16 << 10
"""Largest size in bytes of a block whose copy takes much less time than the preparation of the copy."""

Blocks: TypeAlias = "int | Sequence[int] | npt.NDArray[np.integer[Any]]"
"""Type of the argument ``blocks``: index of a block, or a sequence or an array of indices."""
Addresses: TypeAlias = "npt.NDArray[np.int64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"
Indices: TypeAlias = "Sequence[int] | Addresses"
Kept: TypeAlias = "tuple[Stored, int]"
"""The stored contents of one page: a :class:`Stored`, and the index of the page's block in it."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A writable, contiguous array of bytes."""


class Copies(NamedTuple):
    """Copies of blocks between a tier and device memory."""

    blocks: Indices
    addresses: Addresses
    """The device address of each of ``blocks``."""
    side: CopySide | None = None
    """The buffer at these addresses; None if there is none, for example for pages."""
    kernels: bool = False
    """Whether kernels of the stream's device may use the memory at all these addresses."""


Move: TypeAlias = Callable[[Copies], None]
"""Function that queues copies on a stream; stream and direction are fixed."""


class Chunk:
    """One allocation or file of a tier, with room for blocks. The chunk is released when the last reference to it is
    dropped.
    """

    def __init__(self, nbytes: int, address: int, every: Addresses) -> None:
        self.nbytes: int = nbytes
        """Size of a block in bytes; 0 for blocks of different sizes."""
        self.count: int = len(every)
        """Number of blocks."""
        self.address: int = address
        """Address of the first block. Chunks of one :class:`Stored` have different addresses."""
        self._every = every
        """Addresses of all blocks, in ascending order."""
        self._free: list[tuple[Addresses, Sequence[Fence]]] = [(self._every, ())]
        """Arrays of free addresses, each with fences of the last copies from or to these addresses. Addresses that were
        returned last are taken first.
        """

    @property
    def left(self) -> int:
        """Number of blocks without contents."""
        return sum(len(addresses) for addresses, _ in list(self._free))

    def take(self, most: int) -> tuple[Addresses, Sequence[Fence]]:
        """Remove at most ``most`` free addresses. Returns these addresses, and the fences of the last copies from or to
        them.
        """
        parts, last = [], dict[Fence, None]()
        with contextlib.suppress(IndexError):
            while most:
                addresses, fences = self._free.pop()
                if len(addresses) > most:
                    self._free.append((addresses[most:], fences))
                parts.append(addresses[:most])
                last.update(dict.fromkeys(fences))
                most -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate((self._every[:0], *parts)), tuple(last)

    def end(self) -> None:
        """Called when the last contents of the chunk were dropped. A chunk that was made for one :class:`Stored`
        releases its memory or deletes its incomplete file. This base class does nothing, because chunks of a
        :class:`BlockTier` are kept for later contents.
        """

    def close(self) -> None:
        """Release the memory now if the copies that use the memory are done. May wait for the devices. Raises
        CudaError. A chunk in a file needs no such call: the file is closed with the last reference to the chunk.
        """

    def give(self, addresses: Addresses, fences: Sequence[Fence]) -> None:
        """Return addresses to the chunk. The next user of these addresses waits for the copies of ``fences``."""
        self._free.append((addresses, fences))
        if self.left == self.count:
            # All addresses are removed from the list first. Otherwise a signal handler that calls `take` meanwhile
            # could get some of them.
            free: list[tuple[Addresses, Sequence[Fence]]] = []
            try:
                free.extend(drained(self._free.pop))
                if sum(len(one) for one, _ in free) == self.count:
                    # All addresses are free. Join them in ascending order, so that copies of adjacent blocks become one
                    # copy. Drop the fences of finished copies: otherwise each reuse of addresses would keep these
                    # fences.
                    last = {fence for _, several in free for fence in several if may_run(fence)}
                    free = [(self._every, tuple(last))]
            finally:
                self._free += free


def may_run(fence: Fence) -> bool:
    """Return whether the copies of ``fence`` may still run; True if the driver refuses the query. Never raises."""
    with contextlib.suppress(CudaError):
        return not fence.done()
    return True


class Room(Deferred):
    """The places of the blocks of one :class:`Stored` in chunks. :meth:`give` is the only way to return places.

    A block gets its place by :meth:`take`, when its Stored is made or when its bytes are first copied. If the Stored is
    dropped, the deferred queue returns the places that are left. So the queue keeps this item alive, and the item does
    not refer to the Stored: otherwise the Stored could never be dropped.
    """

    def __init__(self, sizes: Addresses) -> None:
        self.sizes: Addresses = sizes
        """Size of each block in bytes."""
        self.addresses: Addresses = np.empty(len(sizes), np.int64)
        """Address of each block that has a place."""
        self.bases: Addresses = np.empty(len(sizes), np.int64)
        """Address of the chunk of each block that has a place."""
        self.placed: Mask = np.zeros(len(sizes), np.bool_)
        """Array of bool: whether each block has a place."""
        self.chunks: dict[int, Any] = {}
        """Chunks by their address."""
        self.fences: Sequence[Fence] = ()
        """Fences for the last copies from or to the places."""

    def take(self, chunk: Chunk, blocks: range) -> tuple[int, Sequence[Fence]]:
        """Give places in ``chunk`` to the first of ``blocks``. Returns the number of blocks that got a place, and the
        fences of earlier copies from or to these places. The caller must hold the tier's lock.
        """
        addresses, fences = chunk.take(len(blocks))
        some = slice(blocks.start, blocks.start + len(addresses))
        if len(addresses) == len(self.sizes):
            # A view that repeats one number is used, because filling an array would take longer than the copies.
            self.bases = np.ndarray(len(addresses), np.int64, np.array(chunk.address), strides=(0,))
            self.addresses = addresses
        else:
            self.addresses[some], self.bases[some] = addresses, chunk.address
        self.chunks[chunk.address] = chunk
        self.fences = (*self.fences, *fences)
        self.placed[some] = True
        return len(addresses), fences

    def give(self, blocks: Mask) -> list[Chunk]:
        """Return the places of ``blocks`` to their chunks. Returns a list of the chunks in which no block of this
        object is left.
        """
        chosen, unused = blocks & self.placed, []
        self.placed &= ~chosen  # First: if a signal handler raises, places may be lost, but are not returned twice.
        addresses, bases, left = self.addresses, self.bases, self.bases[self.placed]
        if not chosen.all():
            addresses, bases = addresses[chosen], bases[chosen]
        several = np.unique(bases).tolist() if len(self.chunks) > 1 else [*self.chunks]
        for base in several if len(bases) else ():
            chunk = self.chunks[base]
            if not (left == base).any():
                del self.chunks[base]
                unused.append(chunk)
            chunk.give(addresses[bases == base] if len(several) > 1 else addresses, self.fences)
        return unused

    def attempt(self) -> bool:
        self.give(self.placed)
        return True


class Stored(Unique, abc.ABC):
    """The stored contents of blocks in a tier: of pages, of pieces of memory, or of sleeping buffers.

    :meth:`HostTier.save` and :meth:`DiskTier.save` return it. Its blocks have indices from 0 on, in the order of the
    argument ``blocks`` of ``save``. ``len(stored)`` is the number of blocks, those that were dropped included. If the
    program no longer refers to the object, all its contents are dropped.
    """

    _inner = ("check", "in_use", "load", "moving", "read", "room", "save", "seal", "write")

    def __init__(self, tier: Tier, sizes: Addresses, nbytes: int = 0) -> None:
        self.tier: Tier = tier
        """Tier that has the contents."""
        self.nbytes: int = nbytes
        """Size of a block in bytes; 0 for blocks of buffers, which have different sizes."""
        self.room: Room = Room(sizes)
        """Size and place of each block."""
        self._present = np.ones(len(sizes), np.bool_)
        """Array of bool: whether each block was not dropped."""
        self._busy = 0
        """Number of calls that use the places now. When it reaches 0, the places of dropped blocks are returned. It is
        needed only for drops beside a copy, on another thread or in a signal handler.
        """
        deferred_queue(tier.session).end_with(self, self.room)

    def __len__(self) -> int:
        return len(self._present)

    def __repr__(self) -> str:
        return f"<Stored, {np.count_nonzero(self._present)} of {len(self)} blocks left>"

    @property
    def complete(self) -> bool:
        """Whether every block still has its contents. Blocks without contents cannot be read."""
        return bool(self._present.all())

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Return a context manager during which the tier does not reuse the room of dropped blocks."""
        with self.tier._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self.tier._lock:
                self._busy -= 1
                unused = self._give_dropped()
            end_all(unused)

    @abc.abstractmethod
    def moving(self, stream: Stream, *, out: bool) -> contextlib.AbstractContextManager[Move]:
        """Return a context manager. ``with`` gives a function that queues copies on ``stream``: from device memory if
        ``out``, otherwise to device memory. Work that the stream gets after the ``with`` block finds the copied bytes.
        Blocks the host for a file.

        Raises
        ------
        DamagedBackupError
            The contents of a block in a file have changed.
        OSError, OutOfMemoryError, CudaError
            A file cannot be read or written, there is not enough host memory, or the driver refused a call.
        """

    def seal(self, stream: Stream) -> None:
        """Complete the contents after all their copies were queued on ``stream``, for example by checksums or a file's
        name. This base class does nothing. Raises OSError, CudaError.
        """

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """Copy the bytes of a buffer's block, from ``offset`` (bytes) on, into the host array ``target``. Blocks the
        host. Raises OSError, DamagedBackupError, CudaError.
        """
        raise NotImplementedError

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """Overwrite the bytes of a buffer's block, from ``offset`` (bytes) on, with the host array ``source``. Blocks
        the host. Raises OSError, OutOfMemoryError, CudaError, and DamagedBackupError for a file block that is replaced
        in part.
        """
        raise NotImplementedError

    def save(self, source: Addresses, stream: Stream, kernels: bool = False) -> None:
        """Copy all blocks from the device addresses ``source`` on ``stream``, and complete the contents (:meth:`seal`).
        ``kernels``: whether kernels may use the device memory. Raises OSError, OutOfMemoryError, CudaError.
        """
        with self.moving(stream, out=True) as move:
            move(Copies(range(len(self)), source, None, kernels))
        self.seal(stream)

    def load(self, blocks: Indices, target: Addresses, stream: Stream, kernels: bool = False) -> None:
        """Queue the copies of ``blocks`` to the device addresses ``target`` on ``stream``. ``kernels``: whether kernels
        may use the device memory. Raises DamagedBackupError, OSError, CudaError.
        """
        with self.moving(stream, out=False) as move:
            move(Copies(blocks, target, None, kernels))

    def check(self, blocks: Iterable[int]) -> None:
        """Check the contents of ``blocks``, unless the check needs a copy. Raises DamagedBackupError if the contents of
        a block have changed. This base class does nothing.
        """

    def _chosen(self, name: str, blocks: Blocks | None) -> Indices:
        """Return the indices of all blocks, or those that the argument ``name`` has. Raises TypeError, ValueError."""
        return range(len(self)) if blocks is None else _indices(name, blocks, len(self), self.nbytes, self)

    def drop(self, blocks: Blocks | None = None) -> None:
        """Drop the contents of all blocks, or of ``blocks``. The tier reuses their room after the last copies.
        Idempotent. The other blocks keep their indices.

        Parameters
        ----------
        blocks
            An index, a range or an array of indices, from 0 on. None for all blocks.

        Raises
        ------
        TypeError, ValueError
            ``blocks`` has something that is no index of a block.
        CudaError
            The driver refused a release. The deferred queue tries again later.
        """
        with self.tier._lock:
            self._present[index_of(self._chosen("blocks", blocks))] = False
            unused = self._give_dropped()
        end_all(unused)

    def _give_dropped(self) -> list[Chunk]:
        """Return the places of dropped blocks to their chunks, unless a call uses them. Returns a list of the chunks
        that have no contents of this object any more.
        """
        unused = [] if self._busy else self.room.give(~self._present)
        self.tier._room_returned()
        return unused


def end_all(chunks: Iterable[Chunk]) -> None:
    """Call :meth:`Chunk.end` for chunks without contents. Call this without locks. Raises the first CudaError, after
    all chunks were tried.
    """
    undo_all(chunk.end for chunk in chunks)


def overlapping(pieces: Iterable[T], sizes: Sequence[int], offset: int, array: Bytes) -> Iterator[tuple[T, int, Bytes]]:
    """Split an array at the boundaries of adjacent pieces, of which ``sizes`` has the sizes in bytes. ``offset`` is the
    position of the array, in bytes from the beginning of the first piece.

    Yields tuples of a piece that the array overlaps, the offset in this piece in bytes, and the part of the array for
    it.
    """
    stop = offset + array.nbytes
    for piece, nbytes, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
        begin, last = max(offset, end - nbytes), min(stop, end)
        if begin < last:
            yield piece, begin - end + nbytes, array[begin - offset : last - offset]


class Backup(NamedTuple):
    """The backup of one buffer: its stored bytes in a tier, in adjacent blocks of a :class:`Stored`."""

    stored: Stored
    blocks: range

    def move(self, move: Move, side: CopySide) -> None:
        """Queue the copies between the buffer ``side`` and the stored blocks. ``move`` is the function that
        :meth:`Stored.moving` gives for one stream and direction. Errors as for :meth:`Stored.moving`.
        """
        sizes = self.stored.room.sizes[self.blocks.start : self.blocks.stop]
        move(Copies(self.blocks, side.address + np.cumsum(sizes) - sizes, side))

    def read(self, offset: int, target: Bytes) -> None:
        """Copy the stored bytes from ``offset`` (bytes) on into the host array ``target``. Blocks the host. Raises
        OSError, DamagedBackupError, CudaError.
        """
        for block, begin, part in self._touched(offset, target):
            self.stored.read(block, begin, part)

    def write(self, offset: int, source: Bytes) -> None:
        """Overwrite the stored bytes from ``offset`` (bytes) on with the host array ``source``. Blocks the host. Raises
        OSError, OutOfMemoryError, CudaError, and DamagedBackupError for a file block that is replaced in part.
        """
        for block, begin, part in self._touched(offset, source):
            self.stored.write(block, begin, part)

    def _touched(self, offset: int, array: Bytes) -> Iterator[tuple[int, int, Bytes]]:
        sizes = self.stored.room.sizes[self.blocks.start : self.blocks.stop].tolist()
        return overlapping(self.blocks, sizes, offset, array)

    def drop(self) -> None:
        """Drop the stored bytes. The tier reuses their room after the last copies (:meth:`Stored.drop`). If the driver
        refuses a release, it is made later. Idempotent.
        """
        with contextlib.suppress(CudaError):
            self.stored.drop(self.blocks)


def by_contents(kept: Mapping[int, Kept]) -> Iterator[tuple[Stored, list[int], list[int]]]:
    """Group the pages of ``kept`` by the :class:`Stored` that has their contents. Yields tuples of the :class:`Stored`,
    a list of block indices, and a list of the pages.
    """
    several: dict[Stored, tuple[list[int], list[int]]] = {}
    for place, (stored, index) in kept.items():
        found = several.setdefault(stored, ([], []))
        found[0].append(index)
        found[1].append(place)
    for stored, (indices, places) in several.items():
        yield stored, indices, places


def drop_contents(kept: Mapping[int, Kept]) -> None:
    """Drop the contents in ``kept``, so that their tiers can reuse the room. Raises CudaError."""
    for stored, indices, _ in by_contents(kept):
        stored.drop(indices)


def index_of(blocks: Indices) -> Indices | slice:
    """Return ``blocks`` as an index for arrays: a range as a slice, which selects without a copy, other indices
    unchanged.
    """
    return slice(blocks.start, blocks.stop) if isinstance(blocks, range) else blocks


def _checked(blocks: Blocks, nbytes: int, side: CopySide) -> Addresses:
    """Return the indices of blocks of ``nbytes`` bytes as an array. Raises TypeError for other objects, ValueError for
    an index outside of the memory ``side``.
    """
    if not nbytes:
        raise ValueError("nbytes=0: a block has at least one byte")
    return _indices("blocks", blocks, side.nbytes // nbytes, nbytes, side.keep)


def _indices(name: str, blocks: Blocks, count: int, nbytes: int, where: object) -> Addresses:
    """Return the indices that the argument ``name`` has as an array. Raises TypeError for other objects, ValueError for
    an index that is none of the ``count`` blocks of ``nbytes`` bytes of ``where``.
    """
    # np.asarray would read a range one number at a time.
    listed = np.arange(blocks.start, blocks.stop, blocks.step) if isinstance(blocks, range) else np.asarray(blocks)
    if listed.dtype.kind not in "iu" and listed.size:
        raise TypeError(f"{name} must be indices, not {listed.dtype}")
    numbers = listed.ravel().astype(np.int64, copy=False)
    # As unsigned, a negative number is a large one: one comparison, instead of two, finds all wrong indices.
    if numbers.size and int(numbers.view(np.uint64).max()) >= count:
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        raise ValueError(f"{name}: block {wrong[0]} is none of the {count} of {size_text(nbytes)} in {where!r}")
    return numbers


class Tier:
    """Base class of stores of bytes outside of device memory."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self._lock: contextlib.AbstractContextManager[bool] = RLock()
        """Lock held while room is taken, returned or counted."""

    def _place(self, stored: Stored, blocks: range) -> tuple[int, Sequence[Fence]]:
        """Give places to the first of ``blocks`` of ``stored``, when they are first needed (:meth:`Room.take`). Only a
        :class:`HostTier` has blocks without places. Returns the number of these blocks, and the fences of earlier
        copies from or to the places.
        """
        raise NotImplementedError

    def _room_returned(self) -> None:
        """Called under the lock after contents have returned room. A closed tier then releases chunks that are
        empty.
        """


class BlockTier(Tier, Closes):
    """Base class of :class:`HostTier` and :class:`DiskTier`, with chunks that blocks share. The tier grows in chunks of
    at least 32 MiB, or of less near its limit, and keeps its chunks for later blocks.

    Thread-safe. Contents are kept until they are swapped in or dropped, even after :meth:`close`.
    """

    _call = ""
    """Name of the function that allocates memory or disk space, for errors."""

    def __init__(self, device: Device, limit: int | str | None) -> None:
        check_device("device", device)
        super().__init__(session_of(device))
        self.device: Device = device
        """Device of the memory that is stored in the tier."""
        self.closed: bool = False
        """Whether the tier was closed: it takes no more bytes (ClosedError). Stored bytes stay until they are read
        back.
        """
        self._limit = None if limit is None else checked_size("limit", limit)
        self._chunks: list[Chunk] = []

    @abc.abstractmethod
    def _chunk(self, nbytes: int, count: int) -> Chunk:
        """Return a new chunk, in host memory or a file, with room for ``count`` blocks of ``nbytes`` bytes. Raises
        OutOfMemoryError, OSError.
        """

    @abc.abstractmethod
    def _stored(self, sizes: Addresses, nbytes: int = 0) -> Stored:
        """Return a new :class:`Stored`, whose blocks have no places yet. Arguments as for :class:`Stored`."""

    def _room(self, nbytes: int) -> int:
        """Return the number of bytes that a block of ``nbytes`` bytes needs in a chunk; on disk a multiple of 4096."""
        return nbytes

    def save(self, memory: Memory, blocks: Blocks, nbytes: int | str, stream: StreamLike) -> Stored:
        """Copy blocks of memory to the tier. After an error no block is stored. Use it for blocks smaller than a page.

        Copies to host memory are stream-ordered, unless the tier has checksums. For copies to disk the host waits.

        Parameters
        ----------
        memory
            Memory of the tier's device.
        blocks
            An index, a range or an array of indices: block ``n`` is at offset ``n * nbytes`` of the memory.
        nbytes
            Size of a block in bytes.
        stream
            Stream of the copies.

        Returns
        -------
        Stored
            The stored contents. :meth:`load` copies the contents back; ``drop()`` returns their room to the tier.

        Raises
        ------
        OutOfMemoryError, OSError
            The tier is full, there is not enough host memory, or a file cannot be written.
        CaptureError
            ``stream`` is being captured.
        TypeError, ValueError
            ``blocks`` has something that is no index of a block, ``nbytes`` is 0 or not a size, or ``memory`` or
            ``stream`` is no memory or stream of the driver.
        ClosedError, EvictedError
            The tier or ``stream`` was closed, or ``memory`` was freed or is evicted.
        CudaError
            The driver refused a call.
        """
        checked_type("memory", memory, Memory)  # type: ignore[type-abstract]
        ordered = copying_stream(stream, self.device)
        side = CopySide.of(memory, session_of(ordered))
        size = checked_size("nbytes", nbytes)
        numbers = _checked(blocks, size, side)
        side.ordered_before(ordered)
        stored = self._take(len(numbers), size)
        with undoing(stored.drop):
            with stored.moving(ordered, out=True) as move:
                self._copy(move, memory, numbers, range(len(stored)), size, side, ordered, write=False)
            stored.seal(ordered)
        return stored

    def load(
        self, stored: Stored, memory: Memory, blocks: Blocks, stream: StreamLike, of: Blocks | None = None
    ) -> None:
        """Copy all blocks of ``stored``, or the blocks ``of`` it, back to ``blocks`` of ``memory``, in the same order.
        Errors as for :meth:`save`. A closed tier can still be read.

        Parameters
        ----------
        stored
            The result of :meth:`save`.
        memory, blocks, stream
            As for :meth:`save`.
        of
            Indices of blocks of ``stored``, from 0 on; None for all blocks.

        Raises
        ------
        TypeError, ValueError
            ``stored`` is no :class:`Stored`, the contents of a block were dropped, ``of`` has something that is no
            index of a block, or ``blocks`` has another number of blocks.
        DamagedBackupError
            Contents have changed. The error's ``block`` is the index of the first such block in ``stored``. Blocks on
            disk are checked while they are read, so the contents of the memory are then undefined.
        """
        checked_type("stored", stored, Stored)  # type: ignore[type-abstract]
        checked_type("memory", memory, Memory)  # type: ignore[type-abstract]
        ordered = copying_stream(stream, self.device)
        side = CopySide.of(memory, session_of(ordered), writable=True)
        numbers = _checked(blocks, stored.nbytes, side)
        chosen = stored._chosen("of", of)
        if len(numbers) != len(chosen):
            raise ValueError(f"blocks: {len(numbers)} for the contents of {len(chosen)}")
        present = stored._present[index_of(chosen)]
        if not present.all():
            raise ValueError(f"of: block {chosen[int(present.argmin())]} of {stored!r} was dropped")
        stored.check(map(int, chosen))
        side.ordered_before(ordered)
        with stored.moving(ordered, out=False) as move:
            self._copy(move, memory, numbers, chosen, stored.nbytes, side, ordered, write=True)

    def _check_for(self, stream: Stream) -> None:
        """Raise ClosedError if the tier was closed, ValueError if ``stream`` belongs to another driver."""
        self._check_open()
        if session_of(stream) is not session_of(self.device):
            raise ValueError(f"backup {self!r} belongs to another driver")

    def _copy(
        self,
        move: Move,
        memory: Memory,
        numbers: Addresses,
        of: Indices,
        nbytes: int,
        side: CopySide,
        stream: Stream,
        *,
        write: bool,
    ) -> None:
        """Queue the copies of the blocks ``numbers`` of ``memory``, each of ``nbytes`` bytes, by the function ``move``.
        ``of`` has the index of each block in the tier. ``write``: whether the copies write to the memory.
        """
        count, near = len(numbers), stream.device == self.device
        # In steps, so that the device copies the first blocks while the host prepares the later blocks.
        cuts = range(_FIRST, count, _LAUNCH) if count > _LAUNCH and nbytes <= _SMALL else ()
        for at, end in itertools.pairwise([0, *cuts, count]):
            places = numbers[at:end] * nbytes + side.address
            kernels = near and kernels_may_use(memory, places, nbytes, stream, write=write)
            move(Copies(of[at:end], places, None, kernels))

    def reserve(self, count: int, nbytes: int | str) -> None:
        """Reserve pinned host memory (``cuMemHostRegister``) or disk space (``posix_fallocate``) for later contents, so
        that later calls need not wait for this.

        Parameters
        ----------
        count, nbytes
            Number of pages or blocks to reserve room for, in addition to the contents stored now, and the size of each
            in bytes.

        Raises
        ------
        TypeError, ValueError
            ``count`` is negative or not an integer, or ``nbytes`` is 0 or not a size.
        OutOfMemoryError, OSError
            The tier's limit leaves no room, there is not enough host memory, or a file cannot be written.
        ClosedError, CudaError
            The tier was closed, or the driver refused a call.
        """
        count, nbytes = checked_number("count", count), checked_size("nbytes", nbytes)
        if not nbytes:
            raise ValueError("nbytes=0: a block has at least one byte")
        with self._lock:
            self._check_open()
            # In a function of its own, because a loop in a `with` can leave the lock held: see
            # `streamalloc.driver.locks`.
            self._grow_to(count, nbytes)

    def _grow_to(self, count: int, nbytes: int) -> None:
        free = sum(chunk.left for chunk in self._chunks if chunk.nbytes == nbytes)
        while free < count:
            free += self._grow(nbytes, count - free).count

    def _take(self, count: int, nbytes: int) -> Stored:
        """Return a new :class:`Stored` with places for ``count`` blocks of ``nbytes`` bytes, in existing chunks first.
        Raises OutOfMemoryError, OSError, ClosedError.
        """
        stored = self._stored(np.broadcast_to(np.int64(nbytes), count), nbytes)
        with undoing(stored.drop), self._lock:
            self._check_open()
            self._fill(stored.room, nbytes, count)
        return stored

    def _fill(self, room: Room, nbytes: int, count: int) -> None:
        # Chunks are used in ascending order of addresses. Otherwise copies of the blocks would have to be sorted first.
        fitting = iter(sorted((one for one in self._chunks if one.nbytes == nbytes), key=attrgetter("address")))
        done = 0
        while done < count:
            chunk = next(fitting, None) or self._grow(nbytes, count - done)
            if chunk.left:
                done += room.take(chunk, range(done, count))[0]

    def _grow(self, nbytes: int, count: int) -> Chunk:
        size = self._room(nbytes)
        wanted = max(min(max(size * count, LEAST), _MOST) // size, 1)
        chunk = self._chunk(nbytes, self._allowed(nbytes, wanted, count))
        self._chunks.append(chunk)
        return chunk

    def _allowed(
        self, nbytes: int, wanted: int, asked: int, least: int = 1, under_way: int = 0, promised: int = 0
    ) -> int:
        """Return how many of ``wanted`` new blocks of ``nbytes`` bytes the limit allows. Raises OutOfMemoryError if
        this is fewer than ``least``. ``under_way`` is the number of blocks that other threads are allocating. For the
        error, ``asked`` is the number of requested blocks, and ``promised`` the number of bytes that are reserved for
        others.
        """
        size = self._room(nbytes)
        room = wanted if self._limit is None else (self._limit - self.reserved) // size - under_way
        if room < least:
            used, limit = self.used + promised, self._limit or 0
            why = f"the tier's limit of {size_text(limit)} leaves no room for {size_text(size * asked)}"
            why = f"{why}: {size_text(used)} are used or promised"
            figures = {"requested": size * asked, "used": used, "limit": limit}
            raise refused(OutOfMemoryError, self._call, why, **figures, reserved=self.reserved + size * under_way)
        return min(wanted, room)

    @property
    def used(self) -> int:
        """Bytes of all stored contents. In a :class:`DiskTier`, files of buffers are not included."""
        return sum(chunk.nbytes * (chunk.count - chunk.left) for chunk in self._chunks)

    @property
    def reserved(self) -> int:
        """Bytes of all chunks, with or without contents. Only :meth:`trim` and :meth:`close` release chunks. In a
        :class:`DiskTier`, files of buffers are not included.
        """
        return sum(self._room(chunk.nbytes) * chunk.count for chunk in self._chunks)

    def trim(self) -> None:
        """Release chunks (memory or files) without contents, after the copies that use them. May block the host until
        the devices are idle (``cuMemHostUnregister``). If the driver refuses, the deferred queue tries again later.
        """
        queue = deferred_queue(session_of(self.device))
        queue.work()  # So that dropped buffers leave their room.
        for chunk in self._forget_unused():
            with contextlib.suppress(CudaError):  # The queue tries again later.
                chunk.close()

    def _forget_unused(self) -> set[Chunk]:
        with self._lock:
            unused = {chunk for chunk in self._chunks if chunk.left == chunk.count}
            self._chunks = [chunk for chunk in self._chunks if chunk not in unused]
            return unused

    def _room_returned(self) -> None:
        """Release chunks of a closed tier once their contents were dropped, without waiting for the devices."""
        if self.closed:
            self._forget_unused()

    def close(self) -> None:
        """Accept no more contents, and release each chunk once its last contents are dropped. Chunks without contents
        are released now (:meth:`trim`). Idempotent.
        """
        self.closed = True
        self.trim()
