"""Bytes outside of device memory, as blocks: the contents of pages, of smaller pieces, and of buffers that sleep.

A tier consists of chunks, each an allocation or a file. *Room* is the part of a chunk for a block, whether it has bytes
or not. A call that saves makes one :class:`Stored`, with an address in a chunk for each block. The room of a dropped
block is used again, or released, after the copies that use it.

Pages and pieces have blocks of one size, and share the chunks of a :class:`BlockTier`. Buffers that sleep have chunks
of their own; each buffer keeps its blocks as :class:`Saved`.
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
    Device,
    Event,
    Fence,
    Memory,
    Stream,
    StreamLike,
    all_work,
    check_device,
    deferred_queue,
    kernels_may_use,
)
from streamalloc.core.properties import checked_size
from streamalloc.core.resource import Closes, Unique
from streamalloc.core.session import drained, session_of
from streamalloc.driver.internal import COPY_KERNEL, COPY_MOST, RLock
from streamalloc.vmm.access import After, copying_stream, ends_of

T = TypeVar("T")
LEAST, _MOST = 32 << 20, 1 << 30  # Smallest and largest chunk in bytes, unless one block is larger.
_FIRST, _LAUNCH = 4 * COPY_MOST[COPY_KERNEL], max(COPY_MOST.values())
"""Number of blocks in the first launch, and in each later launch. The first launch runs longer than the host needs to
prepare the second, so the device does not wait.
"""
_SMALL = 16 << 10
"""Size in bytes of a block up to which its copy takes much less time than the preparation of the copy."""

Blocks: TypeAlias = "int | Sequence[int] | npt.NDArray[np.integer[Any]]"
"""Index of a block, or a sequence or an array of indices."""
Addresses: TypeAlias = "npt.NDArray[np.int64]"
Indices: TypeAlias = "Sequence[int] | Addresses"
Kept: TypeAlias = "tuple[Stored, int]"
"""The contents of a place: a :class:`Stored`, and the index of the block in it."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A writable, contiguous array of bytes."""


class Copies(NamedTuple):
    """Copies of blocks between a tier and device memory."""

    blocks: Indices
    addresses: Addresses
    """The device address of each block."""
    side: CopySide | None = None
    """The buffer at these addresses; None for addresses without a buffer, for example of pages."""
    kernels: bool = False
    """Whether kernels of the stream's device may use the memory at all these addresses."""


Move: TypeAlias = Callable[[Copies], None]
"""Function that queues copies."""


class Chunk:
    """One allocation or file of a tier, with room for blocks of one size. It is released once nothing refers to it."""

    def __init__(self, nbytes: int, count: int, address: int, step: int) -> None:
        self.nbytes: int = nbytes
        """Size of a block in bytes."""
        self.count: int = count
        """Number of blocks."""
        self.address: int = address
        """Address of the first block; unique among the chunks of one :class:`Stored`."""
        self._every = address + np.arange(count) * step
        """Addresses of all blocks, in ascending order."""
        self._free: list[tuple[Addresses, Sequence[Fence]]] = [(self._every, ())]
        """Free addresses, with fences of the last copies from or to them. Those returned last are taken first."""

    @property
    def left(self) -> int:
        """Number of blocks without contents."""
        return sum(len(addresses) for addresses, _ in list(self._free))

    def take(self, most: int) -> tuple[Addresses, Sequence[Fence]]:
        """Take at most ``most`` free addresses. Returns them, and the fences of the last copies from or to them."""
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
        """Release the chunk, because its contents have ended. Only chunks that were made for one :class:`Stored` do so;
        those of a :class:`BlockTier` stay for later contents.
        """

    def give(self, addresses: Addresses, fences: Sequence[Fence]) -> None:
        """Return addresses to the chunk. The next user of them waits for the copies of ``fences``."""
        self._free.append((addresses, fences))
        if self.left == self.count:
            # Take all addresses off the list first. Then a signal handler that takes room meanwhile gets none of them.
            free: list[tuple[Addresses, Sequence[Fence]]] = []
            try:
                free.extend(drained(self._free.pop))
                if sum(len(one) for one, _ in free) == self.count:
                    # All addresses are free. Join them in ascending order, so that copies of adjacent blocks become one
                    # copy. Forget completed copies: contents that reuse only some addresses would keep them forever.
                    last = {fence for _, several in free for fence in several if may_run(fence)}
                    free = [(self._every, tuple(last))]
            finally:
                self._free += free


def may_run(fence: Fence) -> bool:
    """Whether the copies before ``fence`` may still run: also if the driver refuses to say. Never raises."""
    with contextlib.suppress(CudaError):
        return not fence.done()
    return True


class Stored(Unique, abc.ABC):
    """The contents of blocks in a tier: pages, pieces of memory, or the bytes of buffers that sleep."""

    def __init__(self, tier: Tier, nbytes: int = 0) -> None:
        self.tier: Tier = tier
        """Tier with the contents."""
        self.nbytes: int = nbytes
        """Size of a block in bytes; 0 for the bytes of buffers, which have several sizes."""
        self._addresses = self._bases = self._sizes = np.empty(0, np.int64)
        """Arrays with an element for each block: its address, the address of its chunk, and for buffers its size."""
        self._chunks: dict[int, Any] = {}
        """Chunks by the address of their first block. :attr:`_bases` has that address for each block."""
        self._present = np.empty(0, np.bool_)
        """For each block, whether it has contents."""
        self._dropped: list[npt.NDArray[np.bool_]] = []
        """Masks of dropped blocks whose addresses are not yet returned to their chunks."""
        self._busy = 0
        """Number of calls that use the addresses. When it reaches 0, the addresses of dropped blocks are returned."""
        self._fences: Sequence[Fence] = ()
        """Fences behind the last copies from or to the room."""

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def complete(self) -> bool:
        """Whether every block has contents."""
        return bool(self._present.all())

    def add(
        self, chunk: Chunk, addresses: Addresses, fences: Sequence[Fence] = (), sizes: Sequence[int] | Addresses = ()
    ) -> None:
        """Add blocks at ``addresses`` of ``chunk``. ``sizes``: bytes of each block of a buffer; other blocks have
        :attr:`nbytes`. ``fences``: the last copies from or to these addresses. The caller holds the tier's lock.
        """
        self._chunks[chunk.address] = chunk
        self._fences = (*self._fences, *fences)
        # A view that repeats one number: to fill the pages of a new array would take longer than the copies.
        bases: Addresses = np.ndarray(len(addresses), np.int64, np.array(chunk.address), strides=(0,))
        if len(self):
            addresses, bases = np.concatenate((self._addresses, addresses)), np.concatenate((self._bases, bases))
        self._addresses, self._bases = addresses, bases
        if len(sizes):
            self._sizes = np.concatenate((self._sizes, np.asarray(sizes, np.int64)))
        self._present = np.ones(len(addresses), np.bool_)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the tier from reusing the room of dropped blocks during a ``with`` block."""
        with self.tier._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self.tier._lock:
                self._busy -= 1
                unused = self._return_dropped()
            end_all(unused)

    @abc.abstractmethod
    def moving(self, stream: Stream, *, out: bool) -> contextlib.AbstractContextManager[Move]:
        """Return a ``with`` block that gets a function which queues copies on ``stream``: from device memory if
        ``out``, otherwise to it. After the block, later work of the stream finds the bytes.

        Raises
        ------
        DamagedBackupError
            The contents of a block have changed.
        """

    def seal(self, stream: Stream) -> None:
        """Complete the contents, once all their copies are queued on ``stream``: compute checksums, name a file. By
        default nothing is left to do.
        """

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """Copy the bytes of a buffer's block from ``offset`` on into the host array ``target``. Blocks the host. Raises
        OSError, DamagedBackupError, CudaError.
        """
        raise NotImplementedError

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """Overwrite the bytes of a buffer's block from ``offset`` on with the host array ``source``. Blocks the host.
        Raises OSError, OutOfMemoryError, CudaError.
        """
        raise NotImplementedError

    def save(self, source: Addresses, stream: Stream, kernels: bool = False) -> None:
        """Copy all blocks from the device addresses ``source`` on ``stream``, and complete the contents (:meth:`seal`).
        ``kernels``: see :class:`Copies`. Raises OSError, CudaError.
        """
        with self.moving(stream, out=True) as move:
            move(Copies(range(len(self)), source, None, kernels))
        self.seal(stream)

    def load(self, blocks: Indices, target: Addresses, stream: Stream, kernels: bool = False) -> None:
        """Queue the copies of ``blocks`` to the device addresses ``target`` on ``stream``. ``kernels``: see
        :class:`Copies`. Raises DamagedBackupError, OSError, CudaError.
        """
        with self.moving(stream, out=False) as move:
            move(Copies(blocks, target, None, kernels))

    def check(self, blocks: Iterable[int]) -> None:
        """Raise DamagedBackupError if the contents of one of ``blocks`` have changed, as far as that can be found
        without a copy.
        """

    def drop(self, blocks: Sequence[int] | None = None) -> None:
        """Return the room of all blocks, or of these, to the tier, which reuses it after the copies. Idempotent.

        Raises
        ------
        CudaError
            The driver refused a release, which is attempted again later.
        """
        with self.tier._lock:
            chosen = np.zeros(len(self), np.bool_)
            chosen[... if blocks is None else np.asarray(blocks, np.int64)] = True
            chosen &= self._present
            self._present[chosen] = False
            if chosen.any():
                self._dropped.append(chosen)
            unused = self._return_dropped()
        end_all(unused)

    def _return_dropped(self) -> list[Chunk]:
        """Return the addresses of dropped blocks to their chunks. Returns the chunks that have no contents of this
        object now.
        """
        if self._busy or not self._dropped:
            return []
        chosen, self._dropped = np.logical_or.reduce(self._dropped), []
        addresses, bases, chunks = self._addresses, self._bases, self._chunks
        if not chosen.all():
            addresses, bases = addresses[chosen], bases[chosen]
        several = np.unique(bases).tolist() if len(chunks) > 1 else [*chunks]
        left = self._bases[self._present]
        unused = [base for base in several if not (left == base).any()]
        self._chunks = {base: chunk for base, chunk in chunks.items() if base not in unused}
        for base in several:
            chunks[base].give(addresses[bases == base] if len(several) > 1 else addresses, self._fences)
        self.tier._room_returned()
        return [chunks[base] for base in unused]


def end_all(chunks: Iterable[Chunk]) -> None:
    """End chunks that no contents use (:meth:`Chunk.end`). Call it without locks. Raises the first CudaError, after all
    were attempted.
    """
    undo_all(chunk.end for chunk in chunks)


def overlapping(pieces: Iterable[T], sizes: Sequence[int], offset: int, array: Bytes) -> Iterator[tuple[T, int, Bytes]]:
    """Split an array at the ends of adjacent pieces. The array begins at ``offset``; ``sizes`` has the bytes of each
    piece.

    Yields each piece that the array overlaps, the offset in the piece, and the part of the array.
    """
    stop = offset + array.nbytes
    for piece, nbytes, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
        begin, last = max(offset, end - nbytes), min(stop, end)
        if begin < last:
            yield piece, begin - end + nbytes, array[begin - offset : last - offset]


class Saved(NamedTuple):
    """The bytes of one buffer in a tier: adjacent blocks of a :class:`Stored`."""

    stored: Stored
    blocks: range

    def move(self, move: Move, side: CopySide) -> None:
        """Queue the copies between the buffer ``side`` and its blocks, by the function ``move``, which knows stream and
        direction.
        """
        sizes = self.stored._sizes[self.blocks.start : self.blocks.stop]
        move(Copies(self.blocks, side.address + np.cumsum(sizes) - sizes, side))

    def read(self, offset: int, target: Bytes) -> None:
        """Copy the saved bytes from ``offset`` (bytes) on into the host array ``target``. Blocks the host. Raises
        OSError, DamagedBackupError.
        """
        for block, begin, part in self._touched(offset, target):
            self.stored.read(block, begin, part)

    def write(self, offset: int, source: Bytes) -> None:
        """Overwrite the saved bytes from ``offset`` (bytes) on with the host array ``source``. Blocks the host. Raises
        OSError, OutOfMemoryError.
        """
        for block, begin, part in self._touched(offset, source):
            self.stored.write(block, begin, part)

    def _touched(self, offset: int, array: Bytes) -> Iterator[tuple[int, int, Bytes]]:
        sizes = self.stored._sizes[self.blocks.start : self.blocks.stop].tolist()
        return overlapping(self.blocks, sizes, offset, array)

    def drop(self) -> None:
        """Return the room of the bytes to the tier, which reuses it after the copies (:meth:`Stored.drop`). Idempotent.
        Raises CudaError.
        """
        self.stored.drop(self.blocks)


def by_contents(kept: Mapping[int, Kept]) -> Iterator[tuple[Stored, list[int], list[int]]]:
    """Group places by the :class:`Stored` with their contents. Yields the contents, block indices and places."""
    several: dict[Stored, tuple[list[int], list[int]]] = {}
    for place, (stored, index) in kept.items():
        found = several.setdefault(stored, ([], []))
        found[0].append(index)
        found[1].append(place)
    for stored, (indices, places) in several.items():
        yield stored, indices, places


def drop_contents(kept: Mapping[int, Kept]) -> None:
    """Drop these contents, so that their tiers can reuse the room."""
    for stored, indices, _ in by_contents(kept):
        stored.drop(indices)


def index_of(blocks: Indices) -> Indices | slice:
    """Return adjacent blocks as a slice, which takes a part of an array without a copy."""
    return slice(blocks.start, blocks.stop) if isinstance(blocks, range) else blocks


def _checked(blocks: Blocks, nbytes: int, side: CopySide) -> Addresses:
    """Return the indices of blocks of ``nbytes`` bytes as an array. Raises TypeError for other objects, ValueError for
    an index outside of the memory ``side``.
    """
    if not nbytes:
        raise ValueError("nbytes=0: a block has at least one byte")
    # NumPy would read a range one number at a time.
    listed = np.arange(blocks.start, blocks.stop, blocks.step) if isinstance(blocks, range) else np.asarray(blocks)
    if listed.dtype.kind not in "iu" and listed.size:
        raise TypeError(f"blocks must be indices, not {listed.dtype}")
    numbers = listed.ravel().astype(np.int64, copy=False)
    count = side.nbytes // nbytes
    # Viewed as unsigned, a negative number is a large one: one comparison finds indices on both sides of the range.
    if numbers.size and int(numbers.view(np.uint64).max()) >= count:
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        raise ValueError(f"blocks: block {wrong[0]} is none of the {count} of {size_text(nbytes)} in {side.keep!r}")
    return numbers


class Tier:
    """A place for bytes outside of device memory."""

    def __init__(self) -> None:
        self._lock: contextlib.AbstractContextManager[bool] = RLock()
        """Held while room is taken, returned or counted."""

    def _room_returned(self) -> None:
        """Called under the lock after contents have returned room: a closed tier releases chunks that are empty now."""


class BlockTier(Tier, Closes):
    """Room for blocks outside of device memory. It grows in chunks of at least 32 MiB, and keeps them for later blocks.

    Thread-safe. Contents stay until they are swapped in or dropped, even after :meth:`close`.
    """

    _call = ""
    """Name of the call that makes room, for errors."""

    def __init__(self, device: Device, limit: int | str | None) -> None:
        check_device("device", device)
        super().__init__()
        self.device: Device = device
        """Device of the memory."""
        self.closed: bool = False
        """Whether the tier was closed."""
        self._limit = None if limit is None else checked_size("limit", limit)
        self._chunks: list[Chunk] = []

    @abc.abstractmethod
    def _chunk(self, nbytes: int, count: int) -> Chunk:
        """Make a chunk with room for ``count`` blocks of ``nbytes`` bytes: host memory or a file. Raises
        OutOfMemoryError, OSError.
        """

    @abc.abstractmethod
    def _stored(self, nbytes: int) -> Stored:
        """Return new contents without blocks, for blocks of ``nbytes`` bytes."""

    def _room(self, nbytes: int) -> int:
        """Return the bytes of room that a block of ``nbytes`` bytes takes: on disk whole pages."""
        return nbytes

    def save(self, memory: Memory, blocks: Blocks, nbytes: int | str, stream: StreamLike) -> Stored:
        """Copy blocks of memory to the tier: all, or none after an error. For blocks smaller than a page.

        To host memory the copies are stream-ordered, unless the tier checks its contents; to disk the host waits.

        Parameters
        ----------
        memory
            Memory of the device.
        blocks
            An index, a range or an array of indices: block ``n`` is at offset ``n * nbytes`` of the memory.
        nbytes
            Size of a block in bytes.
        stream
            Stream of the copies.

        Returns
        -------
        Stored
            The contents. :meth:`load` copies them back, ``drop()`` returns their room to the tier.

        Raises
        ------
        OutOfMemoryError, OSError
            The tier has no room, or a file cannot be written.
        CaptureError
            ``stream`` is being captured.
        TypeError, ValueError
            A block is outside of the memory, or the memory belongs to another driver.
        ClosedError, CudaError
            Tier or memory was closed, or the driver refused a call.
        """
        ordered = copying_stream(stream, self.device)
        side = CopySide.of(memory, session_of(ordered))
        size = checked_size("nbytes", nbytes)
        numbers = _checked(blocks, size, side)
        side.ordered_before(ordered)
        stored = self._stored(size)
        with undoing(stored.drop):
            self._take(len(numbers), stored)
            with stored.moving(ordered, out=True) as move:
                self._copy(move, memory, numbers, size, side, ordered, write=False)
            stored.seal(ordered)
        return stored

    def load(self, stored: Stored, memory: Memory, blocks: Blocks, stream: StreamLike) -> None:
        """Copy contents back to blocks of memory. Parameters and errors as for :meth:`save`.

        Raises
        ------
        ValueError
            Contents were dropped, or ``blocks`` has a different length.
        DamagedBackupError
            Contents have changed; ``block`` is the index of the first such block. Blocks on disk are checked while they
            are read, so the memory is undefined then.
        """
        ordered = copying_stream(stream, self.device)
        side = CopySide.of(memory, session_of(ordered), writable=True)
        numbers = _checked(blocks, stored.nbytes, side)
        if len(numbers) != len(stored) or not stored.complete:
            raise ValueError(f"blocks: {len(numbers)} for the contents of {len(stored)}, of which none may be dropped")
        stored.check(range(len(stored)))
        side.ordered_before(ordered)
        with stored.moving(ordered, out=False) as move:
            self._copy(move, memory, numbers, stored.nbytes, side, ordered, write=True)

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
        nbytes: int,
        side: CopySide,
        stream: Stream,
        *,
        write: bool,
    ) -> None:
        """Queue the copies of the blocks ``numbers`` of ``memory``, each of ``nbytes`` bytes, by the function ``move``.
        ``write``: the copies write to the memory.
        """
        count, near = len(numbers), stream.device == self.device
        # The device copies the first blocks while the host prepares the later blocks.
        cuts = range(_FIRST, count, _LAUNCH) if count > _LAUNCH and nbytes <= _SMALL else ()
        for at, end in itertools.pairwise([0, *cuts, count]):
            places = numbers[at:end] * nbytes + side.address
            kernels = near and kernels_may_use(memory, places, nbytes, stream, write=write)
            move(Copies(range(at, end), places, None, kernels))

    def reserve(self, count: int, nbytes: int | str) -> None:
        """Reserve room for later contents, because that takes long: host memory (``cuMemHostAlloc``), or space on disk.

        Parameters
        ----------
        count, nbytes
            Number of pages or blocks to reserve room for, beside the present contents, and the size of each in bytes.

        Raises
        ------
        OutOfMemoryError, OSError, ClosedError
            As for :meth:`save`.
        """
        with self._lock:
            self._check_open()
            # A separate function, because since Python 3.12 an interrupt in a loop can leave a ``with`` block without
            # its end.
            self._grow_to(count, checked_size("nbytes", nbytes))

    def _grow_to(self, count: int, nbytes: int) -> None:
        free = sum(chunk.left for chunk in self._chunks if chunk.nbytes == nbytes)
        while free < count:
            free += self._grow(nbytes, count - free).count

    def _take(self, count: int, stored: Stored) -> None:
        """Give the contents ``stored`` room for ``count`` blocks, of existing chunks first. Raises OutOfMemoryError,
        OSError, ClosedError.
        """
        with self._lock:
            self._check_open()
            self._fill(stored, count)

    def _fill(self, stored: Stored, count: int) -> None:
        # Take chunks in ascending order. Otherwise copies of the blocks would have to be sorted first.
        fitting = iter(sorted((one for one in self._chunks if one.nbytes == stored.nbytes), key=attrgetter("address")))
        while (left := count - len(stored)) > 0:
            chunk = next(fitting, None) or self._grow(stored.nbytes, left)
            addresses, fences = chunk.take(left)
            if len(addresses):
                stored.add(chunk, addresses, fences)

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
        that is fewer than ``least``. ``under_way``: number of blocks that are being made. For the error: ``asked``, the
        number of blocks of the request, and ``promised``, the bytes that others may still use.
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
        """Bytes of the contents."""
        return sum(chunk.nbytes * (chunk.count - chunk.left) for chunk in self._chunks)

    @property
    def reserved(self) -> int:
        """Bytes of all chunks, used or not. Only :meth:`trim` and :meth:`close` release chunks."""
        return sum(self._room(chunk.nbytes) * chunk.count for chunk in self._chunks)

    def trim(self) -> None:
        """Release the memory or files without contents, after the copies that use them (``cuMemHostUnregister``)."""
        queue = deferred_queue(session_of(self.device))
        queue.work()  # Returns the room of dropped buffers, so that unused chunks are found.
        self._forget_unused()
        queue.work()

    def _forget_unused(self) -> None:
        with self._lock:
            self._chunks = [chunk for chunk in self._chunks if chunk.left < chunk.count]

    def _room_returned(self) -> None:
        """Release the chunks that a closed tier has kept for contents."""
        if self.closed:
            self._forget_unused()

    def close(self) -> None:
        """Accept no more contents, and release the room once the last contents leave. Idempotent."""
        self.closed = True
        self.trim()


def ends_or_all(after: After, device: Device) -> Iterable[Event | Stream]:
    """Return the events and streams that ``after`` names; for None, an event after all work of the device
    (:func:`~streamalloc.core.fence.all_work`). Raises ValueError, CaptureError.
    """
    return all_work(device) if after is None else ends_of(after, session_of(device))
