"""Contents of blocks in memory, and the tier in pinned host memory for sleeping buffers and swapped-out pages.

Pinning memory takes longer than a copy to it. So threads pin it in *pieces* of at most 128 MiB, and copies begin as
soon as the first piece is there. The way of a piece in a :class:`HostTier`, under the tier's lock except for step 3:

1. *Asked.* ``_begin`` counts the blocks that the contents in ``_holders`` lack, and those of :meth:`HostTier.prepare`,
   and subtracts the blocks that are free or under way. Pieces for the rest go into ``_pieces``, and threads are started
   (``_workers`` is their number).
2. *Taken.* A thread takes the first piece off ``_pieces`` (``_make_piece``). ``_making`` counts its blocks.
3. *Pinned.* The thread fills the memory and registers it (``_host_chunk``, ``cuMemHostRegister``).
4. *There.* The thread adds the :class:`MemoryChunk` to ``_chunks``. Calls that wait in ``_place`` for a place for
   their next copy look there every 0.1 ms.
5. *Done.* A thread that finds no piece ends. When nothing is under way, ``_end_preparations`` sets the results of the
   futures in ``_preparations``.

If step 3 fails, the error is kept in ``_failure``, and ``_pieces`` is cleared, so that all threads end. A call that
waits for room raises the error, and the futures get it. After a close of the tier, the threads clear ``_pieces``, too;
after its drop they end.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import itertools
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from streamalloc.core.errors import ClosedError, OutOfMemoryError, size_text, undoing
from streamalloc.core.internal import CopySide, Device, Fence, Memory, Stream, copy_bytes
from streamalloc.core.properties import checked_size, checked_type
from streamalloc.core.session import PerDriver, Session, members, session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.stores.blocks import (
    LEAST,
    Addresses,
    Backup,
    BlockTier,
    Bytes,
    Chunk,
    Copies,
    Indices,
    Mask,
    Move,
    Stored,
    Tier,
    index_of,
    may_run,
)
from streamalloc.vmm.stores.copies import copy_batch, kernel_of, run_starts
from streamalloc.vmm.stores.disk_file import DamagedBackupError
from streamalloc.vmm.stores.pinned import HUGE, PIECE, AfterCopies, Pinning, Run, cores

_BLOCKS = PIECE // HUGE
"""Largest number of blocks in a piece, which is the memory that a thread fills and pins in one call."""
_PAUSE = 1e-4
"""Seconds between two looks for memory that threads are pinning."""


class MemoryChunk(Chunk):
    """A chunk in memory. The memory is released after the chunk was closed or dropped, and the copies that use the
    memory are done.
    """

    def __init__(
        self,
        session: Session,
        nbytes: int,
        offsets: Sequence[int] | Addresses,
        memory: Memory | Bytes,
        release: Callable[[], object],
        *,
        pinned: bool = False,
    ) -> None:
        """Make a chunk with a block at each of ``offsets`` (bytes) in ``memory``. ``pinned``: whether this is memory of
        a :class:`HostTier`, which keeps the chunk for later contents; its release waits for the devices.
        """
        address = memory.address if isinstance(memory, Memory) else memory.ctypes.data
        super().__init__(nbytes, address, address + np.array(offsets, np.int64))
        self.memory: Any = memory
        """The memory: an array in host memory, memory of a pool, or memory that the caller of an eviction gave."""
        self._pinned = pinned
        self.release: AfterCopies = AfterCopies(session, self, release, waits=pinned)
        """Item that releases the memory after the copies that may still use it."""

    def end(self) -> None:
        if not self._pinned:
            self.close()

    def close(self) -> None:
        self.release.end()


class InMemory(Stored):
    """The contents of blocks in memory. Copies are stream-ordered. A copy to the memory comes after all earlier copies
    from and to the memory; a copy from the memory comes after earlier copies to it.
    """

    def __init__(self, tier: Tier, sizes: Addresses, nbytes: int = 0, *, check: bool = False) -> None:
        super().__init__(tier, sizes, nbytes)
        self._written: Sequence[Fence] = ()
        """Fences for the copies to the memory."""
        self._check = check
        self._sums: Sequence[int] = ()
        """CRC-32 of each block; empty before :meth:`seal`, and if the tier has no checksums."""

    @property
    def lacking(self) -> Mask:
        """Array of bool: whether each block needs a place and has none. Only buffers in a :class:`HostTier` have such
        blocks: the first copies run while more memory is being pinned.
        """
        return self._present & ~self.room.placed

    @contextlib.contextmanager
    def moving(self, stream: Stream, *, out: bool) -> Iterator[Move]:
        """Return a context manager for copies in stream order (:meth:`Stored.moving`)."""
        room = self.room
        with self.in_use():
            before = room.fences if out else self._written
            for one in before:
                one.precede(stream)
            try:
                yield functools.partial(self._move, stream, out)
            finally:
                fence = Fence(session_of(stream), [stream])
                for chunk in room.chunks.values():
                    chunk.release.use(fence)
                with self.tier._lock:
                    room.fences = (*(one for one in room.fences if one not in before and may_run(one)), fence)
                    self._written = (fence,) if out else self._written

    def _move(self, stream: Stream, out: bool, copies: Copies) -> None:
        """Queue ``copies`` on ``stream``: from the device if ``out``, otherwise to the device. Raises CudaError."""
        if copies.side is not None:
            self._move_buffer(stream, out, copies, copies.side)
            return
        chosen, device = index_of(copies.blocks), copies.addresses
        host = self.room.addresses[chosen]
        sides = (host, device) if out else (device, host)
        copy_batch(*sides, self.nbytes, self.room.bases[chosen], stream, out=out, kernels=copies.kernels)

    def _move_buffer(self, stream: Stream, out: bool, copies: Copies, side: CopySide) -> None:
        done, session = 0, session_of(stream)
        for some, fences in self._with_places(copies.blocks):
            for fence in fences:
                fence.precede(stream)
            for first, memory in self._runs(some):
                theirs = CopySide(int(copies.addresses[done + first]), memory.nbytes, side.ordinal, side.keep)
                if out:
                    copy_bytes(CopySide.of(memory, session, writable=True), theirs, stream)
                else:
                    copy_bytes(theirs, CopySide.of(memory, session), stream)
            done += len(some)

    def _with_places(self, blocks: Indices) -> Iterator[tuple[range, Sequence[Fence]]]:
        """Yield parts of ``blocks``, adjacent blocks of a buffer, in order, as soon as they have places. Each part
        comes with fences of the earlier copies from or to its new places.
        """
        assert isinstance(blocks, range)
        lacking = self.lacking[index_of(blocks)]
        first = int(lacking.argmax()) if lacking.any() else len(blocks)
        if first:
            yield blocks[:first], ()
        while first < len(blocks):
            count, fences = self.tier._place(self, blocks[first:])
            yield blocks[first : first + count], fences
            first += count

    def _runs(self, blocks: range) -> Iterator[tuple[int, Memory | Bytes]]:
        """Yield runs of blocks with adjacent places, as tuples: the index of the run's first block in ``blocks``, and
        the memory of the run.
        """
        room, chosen = self.room, index_of(blocks)
        addresses, bases, sizes = room.addresses[chosen], room.bases[chosen], room.sizes[chosen]
        apart = (bases[1:] != bases[:-1]) | (addresses[1:] - addresses[:-1] != sizes[:-1])
        for first, last in itertools.pairwise([*run_starts(apart).tolist(), len(blocks)]):
            base, nbytes = int(bases[first]), int(sizes[first:last].sum())
            memory, start = room.chunks[base].memory, int(addresses[first]) - base
            yield first, memory if nbytes == memory.nbytes else memory[start : start + nbytes]

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """Copy bytes of a block from memory (:meth:`Stored.read`)."""
        part = self._part(range(block, block + 1), offset, target.nbytes)
        if isinstance(part, Memory):
            part.copy_to(target)
            part.stream.synchronize()
        else:
            target[:] = part

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """Overwrite bytes of a block in memory (:meth:`Stored.write`)."""
        for some, fences in self._with_places(range(block, block + 1)):
            for fence in fences:
                fence.synchronize()
            part = self._part(some, offset, source.nbytes)
            if isinstance(part, Memory):
                part.copy_from(source)
                part.stream.synchronize()
            else:
                part[:] = source

    def _part(self, block: range, offset: int, nbytes: int) -> Memory | Bytes:
        """Return a part of a block, as an array if the host has access to the memory."""
        ((_, memory),) = self._runs(block)
        part = memory[offset : offset + nbytes]
        return part.as_array() if isinstance(part, Memory) and part.host_accessible else part

    def seal(self, stream: Stream) -> None:
        """If the contents get checksums, wait for ``stream``, and compute the checksum of each block."""
        if self._check and len(self):
            stream.synchronize()
            self._sums = [zlib.crc32(self.array(block).data) for block in range(len(self))]

    def array(self, block: int) -> Bytes:
        """Return the contents of a block as an array of bytes, without a copy. The caller must have waited for the
        copies to the block.
        """
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(int(self.room.addresses[block])))

    def check(self, blocks: Iterable[int]) -> None:
        """Raise DamagedBackupError if the checksum of one of ``blocks`` differs. The error's ``block`` is the index of
        this block.
        """
        for block in blocks if self._sums else ():
            with self.tier._lock:  # Otherwise another thread could drop the block meanwhile.
                changed = self._present[block] and zlib.crc32(self.array(block).data) != self._sums[block]
            if changed:
                why = "the contents of a page have changed while it was swapped out: its checksum differs"
                raise DamagedBackupError(why, block)


def blocks_of(nbytes: int) -> int:
    """Return the number of blocks of 2 MiB for ``nbytes`` bytes of a buffer. The last block may be shorter."""
    return -(-nbytes // HUGE)


class HostTier(BlockTier):
    """Pinned host memory for the bytes of sleeping buffers and swapped-out pages. The memory is kept for later use.

    Threads fill huge pages and register them (``cuMemHostRegister``), 128 MiB at a time, while copies to memory that is
    pinned already run. If the driver or a limit of the process prevents this, the memory comes from ``cuMemHostAlloc``,
    and a warning with the reason is logged. Thread-safe. Contents are kept until they are swapped in or dropped, or the
    buffers wake or are closed, even after :meth:`close`.

    The first tier of a device loads a kernel (``cuModuleLoadData``), and measures which way of copying is faster. The
    host waits for the device meanwhile.

    The driver waits for all work of the devices when it releases pinned memory (``cuMemHostUnregister``). So
    :meth:`trim` and :meth:`close` may block the host. The memory of a dropped tier is released later, once the devices
    are idle. ::

        with vmm.HostTier(device, limit=64 << 30) as host, vmm.SleepGroup(device, backup=host) as group:
            weights = group.allocate(8 << 20, tag="weights")
            group.sleep()
            print(host.used, host.reserved)
            group.wake()

    Parameters
    ----------
    device
        Device of the buffers and pages.
    limit
        Largest number of bytes of host memory; None for no limit.
    check
        Whether contents of pages and blocks get a checksum, which :meth:`PageSpace.swap_in` and :meth:`load` verify.
        :meth:`PageSpace.swap_out` and :meth:`save` then block the host until the copies are done.

    Raises
    ------
    TypeError, ValueError
        ``device`` is no :class:`Device`, or ``limit`` is not a size.
    """

    _call = "cuMemHostRegister"

    def __init__(self, device: Device, limit: int | str | None = None, *, check: bool = False) -> None:
        self._set_up(device, limit, check)
        kernel_of(device).prepare()

    def _set_up(self, device: Device, limit: int | str | None = None, check: bool = False) -> None:
        super().__init__(device, limit)
        self._check = check
        self._pinning = Pinning(device)
        self._holders: weakref.WeakSet[InMemory] = weakref.WeakSet()
        """Contents of buffers, some of whose blocks may not have room yet."""
        self._pieces: deque[tuple[int, Bytes | None]] = deque()
        """Pieces that no thread has begun to pin: tuples of the number of blocks, and reserved memory for these blocks
        or None.
        """
        self._making = 0
        """Number of blocks whose memory threads are pinning now."""
        self._workers = 0
        """Number of threads that pin memory."""
        self._failure: Exception | None = None
        """Error of a thread that pinned memory; None if there was none. After an error the other threads stop, too."""
        self._preparations: list[Future[int]] = []
        """Futures of :meth:`prepare` that are not done."""
        _all_tiers.add(self)
        # Registered again to be last, and so called first: the exit function of the simulated driver lets no more calls
        # through.
        atexit.unregister(_await_threads)
        atexit.register(_await_threads)

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Backup]:
        """Reserve room for buffers of ``sizes`` bytes, and return a ``Backup`` for each. Threads begin to pin memory
        that is missing (``cuMemHostRegister``). ``name`` has no effect.

        Raises
        ------
        OutOfMemoryError
            The tier's limit would be exceeded.
        ClosedError
            The tier was closed.
        ValueError
            The stream belongs to another driver.
        """
        self._check_for(stream)
        ends = [0, *itertools.accumulate(map(blocks_of, sizes))]
        parts = np.full(ends[-1], HUGE)
        for end, nbytes in zip(ends[1:], sizes, strict=True):
            parts[end - 1] -= -nbytes % HUGE
        stored = self._stored(parts)
        with self._lock:
            self._check_open()
            self._holders.add(stored)
            with undoing(stored.drop):
                self._begin(0, cores(), len(stored))
        return [Backup(stored, range(first, last)) for first, last in itertools.pairwise(ends)]

    def calibrate(self) -> None:
        """Measure again up to which block size a kernel is faster than single copies. Blocks the host.

        The first tier of a device measures this size for all tiers of the process, in less than 0.1 s. If the device
        was busy then, call this method while the device is idle. Errors of the driver are not raised.
        """
        kernel_of(self.device).prepare(again=True)

    def prepare(self, nbytes: int | str, *, background: bool = False, most_cores: int | None = None) -> Future[int]:
        """Pin memory in advance (``cuMemHostRegister``) for ``nbytes`` bytes of buffers that will go to sleep.

        Parameters
        ----------
        nbytes
            Size in bytes, or text such as ``"8GiB"``. Free memory that is pinned already is included. If memory is
            missing, at least 32 MiB are pinned.
        background
            Whether to return at once, while threads pin the memory. A sleep during that time uses memory that is pinned
            already, and up to eight threads to pin more.
        most_cores
            Largest number of threads; default: one for each core that the process may use, at most 8.

        Returns
        -------
        concurrent.futures.Future
            A future whose result is the number of bytes of free pinned memory, once all memory is pinned. It cannot be
            cancelled. With ``background`` the future has the errors OutOfMemoryError, CudaError and ClosedError; the
            call does not raise them.

        Raises
        ------
        TypeError, ValueError
            ``nbytes`` is not a size, or ``most_cores`` is no number from 1 on.
        OutOfMemoryError, CudaError
            There is not enough host memory, the tier's limit would be exceeded, or the driver refused a call.
        ClosedError
            The tier was closed, also by another thread during the call.
        """
        count, threads = blocks_of(checked_size("nbytes", nbytes)), cores() if most_cores is None else most_cores
        if checked_type("most_cores", threads, int) < 1:
            raise ValueError(f"most_cores={threads}: at least one is needed")
        future: Future[int] = Future()
        # The future cannot be cancelled from now on: the thread that sets its result would get an error.
        future.set_running_or_notify_cancel()
        # The threads stop when nothing refers to the tier, so the future keeps the tier alive.
        future.add_done_callback(lambda _: self)
        try:
            with self._lock:
                self._check_open()
                self._begin(count, threads, count)
                self._preparations.append(future)
        except (OutOfMemoryError, ClosedError) as error:
            if not background:
                raise
            # The traceback is removed: its frames refer to the future, and the reference cycle would keep the tier
            # alive.
            future.set_exception(error.with_traceback(None))
        self._end_preparations()
        if not background:
            future.result()
        return future

    def _end_preparations(self) -> None:
        """If no thread pins memory any more, set the result (free bytes) or the error of the futures of
        :meth:`prepare`.
        """
        with self._lock:
            if self._under_way:
                return
            ended, self._preparations = self._preparations, []
            free, failure = self._free_blocks(), self._failure
        for future in ended:
            if self.closed:
                future.set_exception(ClosedError(f"{self!r} was closed"))
            elif failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(free * HUGE)

    def _begin(self, extra: int, threads: int, asked: int) -> None:
        """Have up to ``threads`` threads pin memory for all blocks that have no room yet and for ``extra`` blocks, if
        there are not enough free blocks. The caller must hold the lock. Raises OutOfMemoryError if the limit would be
        exceeded. ``asked`` is the number of blocks of this request, for the error.
        """
        promised = sum(int(one.lacking.sum()) for one in members(self._holders))
        missing = promised + extra - self._free_blocks() - self._under_way
        if missing > 0:
            wanted, others = max(missing, LEAST // HUGE), promised + extra - asked
            count = self._allowed(HUGE, wanted, asked, missing, self._under_way, others * HUGE)
            self._failure = whole = None
            # All memory is reserved in one call, because each change of the address space waits for the threads that
            # fill pages, and blocks these threads meanwhile.
            with contextlib.suppress(OutOfMemoryError):
                whole = self._pinning.reserve(count * HUGE)
            pieces = [(at, min(at + _BLOCKS, count)) for at in range(0, count, _BLOCKS)]
            # New pieces come first, because a sleep that needs memory now must not wait for the rest of a preparation.
            self._pieces.extendleft(
                (end - at, None if whole is None else whole[at * HUGE : end * HUGE]) for at, end in reversed(pieces)
            )
        while self._workers < min(threads, len(self._pieces)):
            # Not `threading.Thread`: if a signal handler raises in its `start`, the new thread may wait for ever, and
            # the interpreter waits for it at exit.
            _thread.start_new_thread(_make_pieces, (weakref.ref(self),))
            # The thread is counted after its start, which may fail. It cannot end before it is counted, because it
            # needs the lock.
            self._workers += 1

    @property
    def _under_way(self) -> int:
        """Number of blocks whose memory will be or is being pinned."""
        return self._making + sum(count for count, _ in self._pieces)

    def _free_blocks(self) -> int:
        return sum(chunk.left for chunk in self._chunks if chunk.nbytes == HUGE)

    def _place(self, stored: Stored, blocks: range) -> tuple[int, Sequence[Fence]]:
        """As :meth:`Tier._place`. If no place is free, wait until a thread has pinned memory. Raises the error of a
        thread, ClosedError.
        """
        while (place := self._free_place(stored, blocks)) is None:
            # Not a condition of `threading`: if a signal handler raises in its methods, the lock may stay held.
            time.sleep(_PAUSE)
        return place

    def _free_place(self, stored: Stored, blocks: range) -> tuple[int, Sequence[Fence]] | None:
        """Take a free place (:meth:`_place`). If there is none, have threads pin memory, and return None."""
        with self._lock:
            chunk = next((one for one in self._chunks if one.nbytes == HUGE and one.left), None)
            if chunk is not None:
                return stored.room.take(chunk, blocks)
            self._check_open()
            if self._failure is not None and not self._under_way:
                try:
                    raise self._failure
                finally:
                    self._failure = None
            self._begin(0, cores(), len(stored))
        return None

    def _make_piece(self) -> bool:
        """Pin the next piece of memory. Threads of the tier call this method. Returns False if there are no more
        pieces, so that the thread ends.
        """
        with self._lock:
            # The process waits for this thread at exit (:func:`_await_threads`), so it must not pin more memory then.
            if self.closed or not threading.main_thread().is_alive():
                self._pieces.clear()
            count, room = self._pieces.popleft() if self._pieces else (0, None)
            if not count:
                self._workers -= 1
            self._making += count
        if not count:
            self._end_preparations()
            return False
        made: list[Chunk] = []
        failure: Exception | None = None
        try:
            made.append(self._host_chunk(HUGE, count, room=room))
        except Exception as error:
            failure = error
        with self._lock:
            if failure is not None:
                self._failure = failure
                self._pieces.clear()
            self._chunks += made
            self._making -= count
        failure = None  # The error's traceback refers to this frame: avoid the reference cycle.
        self._end_preparations()
        return True

    def _chunk(self, nbytes: int, count: int) -> Chunk:
        with ThreadPoolExecutor(cores()) as threads:
            return self._host_chunk(nbytes, count, threads.map)

    def _host_chunk(self, nbytes: int, count: int, run: Run = map, room: Bytes | None = None) -> Chunk:
        memory, release = self._pinning.obtain(nbytes * count, run, room)
        return MemoryChunk(self.session, nbytes, np.arange(count) * nbytes, memory, release, pinned=True)

    def _stored(self, sizes: Addresses, nbytes: int = 0) -> InMemory:
        return InMemory(self, sizes, nbytes, check=self._check and nbytes > 0)

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} of {size_text(self.reserved)} used"


def _make_pieces(tier: weakref.ref[HostTier]) -> None:
    """Pin pieces until there are no more or the tier is dropped. Threads of a tier run this function."""
    while (found := tier()) is not None and found._make_piece():
        del found


_all_tiers: weakref.WeakSet[HostTier] = weakref.WeakSet()


def _await_threads() -> None:
    """Wait at exit for the threads that pin memory: an exit that stops a thread in a driver call could crash the
    process.
    """
    for tier in members(_all_tiers):
        while tier._workers > 0 and tier.session.usable:  # A forked child has none of the threads.
            time.sleep(_PAUSE)
        tier._end_preparations()


_tiers = PerDriver[weakref.WeakValueDictionary[int, HostTier]](lambda _: weakref.WeakValueDictionary())
"""Shared tiers (:func:`shared_tier`) by number of the NUMA node."""


def shared_tier(device: Device) -> HostTier:
    """Return the tier that all groups with devices on one NUMA node share; make the tier if there is none. The tier is
    released once no group refers to it and it has no bytes of a buffer.
    """
    tiers, node = _tiers(session_of(device)), device.supports.host_numa_id or 0
    found = tiers.get(node)
    if found is None or found.closed:
        # The shared tier is for buffers only, so no kernel is loaded, for which the driver would wait for the device.
        found = HostTier.__new__(HostTier)
        found._set_up(device)
        tiers[node] = found
    return found


_ALLOCATION = 1 << 30
"""Largest size of an allocation in bytes. Pools can reuse pieces of equal size, and drivers limit the size of pinned
allocations.
"""
_ALIGNMENT = 512  # Alignment of buffers in a piece, in bytes: that of a pool.


def backup_in(memory: Memory | Bytes, session: Session) -> Backup:
    """Return a backup in ``memory``, an object of the caller. The backup keeps this object alive until the copies are
    done, and does not free its memory.
    """
    stored = InMemory(Tier(session), np.array([memory.nbytes]))
    stored.room.take(MemoryChunk(session, memory.nbytes, [0], memory, [memory].clear), range(1))
    return Backup(stored, range(1))


class PoolTier(Tier):
    """Tier over a pool in host memory, to which the device of the copies has access.

    The buffers of one call are stored side by side in common allocations of at most 1 GiB, because the driver pins and
    frees few large allocations faster than many small ones. Each allocation is freed once, after the last buffer with
    bytes in it was dropped, and after all copies that read or write it, on any stream.
    """

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__(session_of(pool))
        self.pool: MemoryPool = pool

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Backup]:
        """Allocate memory for buffers of ``sizes`` bytes on ``stream`` (``cuMemAllocFromPoolAsync``), and return a
        :class:`Backup` for each buffer. ``name`` has no effect.

        Raises
        ------
        ValueError
            The pool is of another driver or not in host memory, or the stream's device has no access to it.
        OutOfMemoryError
            There is not enough host memory.
        ClosedError
            The pool was closed.
        """
        pool = self.pool
        if session_of(pool) is not session_of(stream):
            raise ValueError(f"backup {pool!r} belongs to another driver")
        if not pool.location.on_host:
            raise ValueError(f"backup={pool!r} is not in host memory")
        if not pool.reachable_from(stream.device):
            how = "pool.set_access(device, MemAccess.READWRITE) gives it, so that copies run at full speed"
            raise ValueError(f"backup={pool!r} gives {stream.device!r} no access: {how}")
        blocks, bounds, end = list[range](), list[tuple[int, int]](), 0
        for nbytes in sizes:
            first, start = len(bounds), -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes
            cuts = [start, *range((start // _ALLOCATION + 1) * _ALLOCATION, end, _ALLOCATION), end]
            bounds += itertools.pairwise(cuts)
            blocks.append(range(first, len(bounds)))
        stored, done = InMemory(self, np.array([stop - start for start, stop in bounds])), 0
        with undoing(stored.drop):
            for at in range(0, end, _ALLOCATION):
                memory = pool.allocate(min(_ALLOCATION, end - at), stream)
                offsets = [start - at for start, _ in bounds if at <= start < at + _ALLOCATION]
                chunk = MemoryChunk(self.session, 0, offsets, memory, memory.close)
                done += stored.room.take(chunk, range(done, len(bounds)))[0]
        return [Backup(stored, some) for some in blocks]
