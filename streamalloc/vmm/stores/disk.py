"""Store on disk: a folder with one file per group of buffers, and unnamed files for pages."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import numpy as np

from streamalloc.core.errors import size_text, undoing
from streamalloc.core.internal import Device, Event, Fence, Stream
from streamalloc.core.properties import checked_number, checked_size
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.stores.blocks import (
    Addresses,
    BlockTier,
    Bytes,
    Chunk,
    Copies,
    Move,
    Saved,
    Stored,
    index_of,
    overlapping,
)
from streamalloc.vmm.stores.copies import copy_batch, kernel_of
from streamalloc.vmm.stores.disk_file import MOST_BLOCK, PAGE, DiskFile, FileBlock, aligned, padded
from streamalloc.vmm.stores.host import HostTier, PoolTier
from streamalloc.vmm.stores.pinned import HostMemory

_SLOTS = 16
"""Number of slots in one staging memory; each has room for one block."""
_LONGEST = 255 - len("..part")
"""Limit of the bytes of a file name. During writing ``.`` stands before and ``.part`` behind it: 255 bytes in all."""


class _Slots(Chunk):
    """A chunk in a file. Addresses of blocks are numbers of slots in the file."""

    def __init__(self, file: DiskFile, nbytes: int, address: int) -> None:
        super().__init__(nbytes, len(file.sizes), address, 1)
        self.file: DiskFile = file

    def runs(self, slots: Addresses, most: int) -> Iterator[list[tuple[int, FileBlock]]]:
        """Split slots, which are in ascending order, into runs of adjacent file blocks of at most ``most`` bytes, or of
        one block. Each block comes with the index of its slot in ``slots``.
        """
        run: list[tuple[int, FileBlock]] = []
        for which, number in enumerate((slots - self.address).tolist()):
            for block in self.file.blocks(number):
                if run:
                    first, last = run[0][1], run[-1][1]
                    end = last.position + padded(last.nbytes)
                    if block.position != end or end + padded(block.nbytes) - first.position > most:
                        yield run
                        run = []
                run.append((which, block))
        if run:
            yield run

    def end(self) -> None:
        """Delete an incomplete file."""
        self.file.discard()


_End: TypeAlias = "Event | Future[None]"
"""End of one part of a step: the event after its copies, or the future of its read or write."""
_Step: TypeAlias = "tuple[Bytes, Callable[[], _End], _End]"
"""A step of a transfer: its slot, a function that begins its second part, and the end of the part that has begun."""


class _Transfer:
    """The blocks of one call, which pass through the slots of one staging memory.

    Worker threads read and write files. The calling thread makes all driver calls. A step moves adjacent blocks through
    one slot, in two parts: first a copy to the slot, then a write to the file; or first a read, then a copy.
    """

    def __init__(self, contents: _Contents, stream: Stream, out: bool) -> None:
        self._contents = contents
        self.stream: Stream = stream
        self.out: bool = out
        """Whether blocks are copied from device memory."""
        self._staging = contents.tier._staging(stream.device)
        self._free = list(self._staging.slots)
        self._first: deque[_Step] = deque()
        """Steps whose first part has begun, oldest first."""
        self._second: deque[_Step] = deque()
        """Steps whose second part has begun, oldest first."""
        self._most_second = max(len(self._free) - 2, 0) if out else 1
        """If no slot is free and more steps than this are in their second part, a new step ends the oldest of these."""
        self._threads = ThreadPoolExecutor(contents.tier._threads)

    def move(
        self, file: DiskFile, blocks: Sequence[FileBlock], copy: Callable[[Bytes], None], names: Sequence[int | None]
    ) -> None:
        """Begin to move adjacent ``blocks`` of ``file``, which fit in a slot, after waiting for a free slot. Raises
        OSError, DamagedBackupError, CudaError of earlier steps.

        ``copy``: queues the copies from or to the slot. ``names``: the index of each block for errors, or None.
        """
        while not self._free:
            if len(self._second) > self._most_second or not self._first:
                self._end_oldest()
            else:
                self._advance_oldest()
        slot = self._free.pop()

        def copied() -> Event:
            copy(slot)
            return self.stream.record()

        if self.out:
            self._first.append((slot, functools.partial(self._begin, file.write, blocks, slot), copied()))
        else:
            self._first.append((slot, copied, self._begin(file.read, blocks, slot, names)))

    def _begin(self, access: Callable[..., None], *args: object) -> Future[None]:
        """Begin a read or a write, ``access(*args)``, on a thread. Until it ends, the room in the file counts as in
        use: :meth:`abandon` waits for no thread, and a late write could otherwise overwrite what another call has
        stored in dropped room.
        """
        # The thread ends the use. If it never begins, its argument is dropped, which ends it too.
        use = contextlib.ExitStack()
        use.enter_context(self._contents.in_use())
        return self._threads.submit(_access, use, access, *args)

    def _advance_oldest(self) -> None:
        """Wait for the first part of the oldest step, and begin its second part. Raises the errors of both."""
        slot, second, end = self._first.popleft()
        _await(end)
        self._second.append((slot, second, second()))

    def _end_oldest(self) -> None:
        """Wait for the second part of the oldest step, and free its slot. Raises the error of that part."""
        slot, _, end = self._second.popleft()
        _await(end)
        self._free.append(slot)

    def finish(self) -> None:
        """Block the host until all blocks are on disk, or in device memory. Ends the threads, and gives the staging
        memory back to the tier. Raises OSError, DamagedBackupError, CudaError.
        """
        while self._first:
            self._advance_oldest()
        while self._second:
            self._end_oldest()
        self._threads.shutdown()
        self._contents.tier._take_back(self._staging)

    def abandon(self) -> None:
        """Stop after an error, without waiting for the threads: an exception of a signal handler may have left a lock
        for which they wait. The staging memory is released after the copies that use it. A thread keeps its slot.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._staging.release.use(Fence(session_of(self.stream), [self.stream]))
        self._first.clear()  # The frames of the error keep this object, but must not keep its events.
        self._second.clear()


def _access(use: contextlib.ExitStack, access: Callable[..., None], *args: object) -> None:
    with use:
        access(*args)


def _await(end: _End) -> None:
    if isinstance(end, Event):
        end.synchronize()
        end.close()
    else:
        end.result()


class _Contents(Stored):
    """The contents of blocks in files. Each call waits for its copies, so no copy is queued when it returns."""

    tier: DiskTier

    @contextlib.contextmanager
    def moving(self, stream: Stream, *, out: bool) -> Iterator[Move]:
        """See :meth:`Stored.moving`. The blocks pass through staging memory, and are checked when they are read."""
        # Relaxed, because waits of this call would invalidate captures of other streams.
        with self.in_use(), session_of(stream).relaxed():
            transfer = _Transfer(self, stream, out)
            with undoing(transfer.abandon):
                yield functools.partial(self._move, transfer)
                transfer.finish()

    def _move(self, transfer: _Transfer, copies: Copies) -> None:
        chosen = index_of(copies.blocks)
        numbers, bases, places = np.arange(len(self))[chosen], self._bases[chosen], self._addresses[chosen]
        # Each block of a buffer is copied alone, because the buffer may be in memory of several devices.
        most = self.tier.block if self.nbytes else 0
        for chunk in self._chunks.values():
            mine = np.flatnonzero(bases == chunk.address)
            mine = mine[np.argsort(places[mine])]
            for run in chunk.runs(places[mine], most):
                which, some = mine[[index for index, _ in run]], [block for _, block in run]
                names = numbers[which].tolist() if self.nbytes else [None] * len(some)
                device = copies.addresses[which] + np.array([block.offset for block in some])
                copy = functools.partial(_copy, device, some, transfer.stream, transfer.out, copies.kernels)
                transfer.move(chunk.file, some, copy, names)

    def seal(self, stream: Stream) -> None:
        """Write the header of a file with a name, and give it the name."""
        for chunk in self._chunks.values():
            chunk.file.seal()

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """See :meth:`Stored.read`."""
        for file, some, begin, part in self._touched(block, offset, target):
            room = aligned(file.block)
            file.read([some], room, [None])
            part[:] = room[begin : begin + part.nbytes]

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """See :meth:`Stored.write`. A persistent file is damaged if the process dies during this call."""
        for file, some, begin, part in self._touched(block, offset, source):
            room = aligned(file.block)
            if part.nbytes < some.nbytes:
                file.read([some], room, [None])
            room[begin : begin + part.nbytes] = part
            file.write([some], room)
        self._chunks[int(self._bases[block])].file.seal()

    def _touched(self, block: int, offset: int, array: Bytes) -> Iterator[tuple[DiskFile, FileBlock, int, Bytes]]:
        chunk = self._chunks[int(self._bases[block])]
        several = chunk.file.blocks(int(self._addresses[block]) - chunk.address)
        for some, begin, part in overlapping(several, [one.nbytes for one in several], offset, array):
            yield chunk.file, some, begin, part


def _copy(
    device: Addresses, blocks: Sequence[FileBlock], stream: Stream, out: bool, kernels: bool, room: Bytes
) -> None:
    """Queue the copies of adjacent ``blocks`` between the addresses ``device`` and the slot ``room`` on ``stream``:
    from the device if ``out``. ``kernels``: kernels may use the device memory. Raises CudaError.
    """
    host = np.array([block.position for block in blocks]) - blocks[0].position + room.ctypes.data
    sizes = np.array([block.nbytes for block in blocks])
    targets, sources = (host, device)[:: 1 if out else -1]
    equal = int(sizes[0]) if (sizes == sizes[0]).all() else sizes
    copy_batch(targets, sources, equal, np.zeros(len(host), np.int64), stream, out=out, kernels=kernels)


class DiskTier(BlockTier):
    """A folder on disk for the bytes of buffers that sleep, and of pages that are swapped out.

    Several threads write and read blocks at once, through at most 16 blocks of pinned host memory. They bypass the page
    cache if the file system allows it (``O_DIRECT``). Each block has a checksum. Only this user can open the files. ::

        with vmm.DiskTier(device, "/nvme/sleep") as disk:
            group.sleep(backup=disk)
            group.wake()

    Without ``persistent`` a file has no name, and ends with the last buffer in it or with the process. With
    ``persistent`` a file gets the name of its tag once it is complete. It stays after the buffers have woken, until the
    next sleep replaces it. Another process can read it by :meth:`SleepGroup.resume`. Only one group at a time may use a
    folder with persistent files.

    :meth:`PageSpace.swap_out` and :meth:`save` store pages and blocks in unnamed files, which grow in chunks of at
    least 32 MiB. Their room is reused for later pages. These calls and :meth:`PageSpace.swap_in` and :meth:`load` block
    the host. ::

        with vmm.DiskTier(device, "/nvme/pages", limit=256 << 30) as disk:
            space.swap_out(range(64), disk)
            space.swap_in(range(64))

    Thread-safe. Bytes stay until the buffers wake or are closed, or the pages are swapped in, even after :meth:`close`.

    Parameters
    ----------
    device
        Device of the buffers and pages.
    folder
        Path of the folder. If it is missing, it is created for this user only.
    limit
        Limit of the bytes on disk for pages and blocks; None for no limit. Files of buffers do not count.
    persistent
        Whether files outlive the buffers and the process.
    block
        Bytes of a block, a multiple of 4096, at most 64 MiB. Files with other blocks are refused.
    threads
        Number of threads that read or write.

    Raises
    ------
    TypeError, ValueError
        An argument is not allowed; the message names it.
    OSError
        The folder cannot be made.
    """

    _call = "posix_fallocate"

    def __init__(
        self,
        device: Device,
        folder: str | os.PathLike[str],
        limit: int | str | None = None,
        *,
        persistent: bool = False,
        block: int | str = 4 << 20,
        threads: int = 8,
    ) -> None:
        super().__init__(device, limit)
        self.folder: Path = Path(folder)
        """Path of the folder."""
        self.persistent: bool = persistent
        """Whether files outlive the buffers and the process."""
        self.block: int = checked_size("block", block)
        """Bytes of a block."""
        if not self.block or self.block % PAGE or self.block > MOST_BLOCK:
            raise ValueError(f"block={block}: allowed are multiples of {PAGE} up to {MOST_BLOCK}")
        self._threads = checked_number("threads", threads)
        if not self._threads:
            raise ValueError("threads=0: at least one is needed")
        self._given = 0
        """Number of slots in all files so far, including closed ones. The next file begins with this number."""
        self._idle: list[HostMemory] = []
        """Staging memory that no call uses now."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kernel_of(device).prepare()

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Saved]:
        """Create a file for buffers of ``sizes`` bytes, and return the room of each. With ``name``, in a persistent
        tier, the file outlives the buffers. ``stream``: that of the copies.

        Raises
        ------
        ClosedError
            The tier was closed.
        OSError
            The file cannot be created, or the disk is full.
        """
        self._check_for(stream)
        stays = self.persistent and name is not None
        return self._held(DiskFile.create(self.folder, sizes, self.block, self._name(name or "") if stays else ""))

    def resume(self, sizes: Sequence[int], stream: Stream, name: str) -> Sequence[Saved]:
        """Open the complete file that an earlier :meth:`hold` made under ``name``, for buffers of the same ``sizes`` in
        bytes. Returns the bytes of each buffer.

        Raises
        ------
        DamagedBackupError
            The file is damaged or truncated, has another layout, or other users own it or can open it.
        FileNotFoundError
            There is no such file.
        ClosedError
            The tier was closed.
        """
        self._check_for(stream)
        return self._held(DiskFile.open(self.folder / self._name(name), sizes, self.block))

    @staticmethod
    def _name(name: str) -> str:
        file = f"{quote(name, safe='')}.backup"
        if len(file) > _LONGEST:
            raise ValueError(f"a file named after {name!r} has {len(file)} bytes in its name: allowed are {_LONGEST}")
        return file

    def _held(self, file: DiskFile) -> Sequence[Saved]:
        stored, chunk = _Contents(self), _Slots(file, 0, 0)
        stored.add(chunk, *chunk.take(chunk.count), sizes=file.sizes)
        return [Saved(stored, range(index, index + 1)) for index in range(chunk.count)]

    def _staging(self, device: Device) -> HostMemory:
        """Return staging memory that no call uses; make some if there is none (``cuMemHostRegister``). Raises
        OutOfMemoryError.
        """
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return HostMemory(device, _SLOTS * self.block, self.block)

    def _chunk(self, nbytes: int, count: int) -> Chunk:
        first = self._given
        self._given += count
        return _Slots(DiskFile.create(self.folder, [nbytes] * count, self.block), nbytes, first)

    def _room(self, nbytes: int) -> int:
        return padded(nbytes)

    def _stored(self, nbytes: int) -> Stored:
        return _Contents(self, nbytes)

    def _take_back(self, staging: HostMemory) -> None:
        self._idle.append(staging)
        if self.closed:
            self.close()

    def close(self) -> None:
        """Accept no more bytes, and release the staging memory (``cuMemHostUnregister``). Idempotent."""
        super().close()
        while self._idle:
            self._idle.pop().close()

    def _text(self) -> str:
        state = ", closed" if self.closed else f", {size_text(self.used)} of pages" * bool(self._chunks)
        return f" in {self.folder}{', persistent' if self.persistent else ''}{state}"


def tier_of(backup: MemoryPool | HostTier | DiskTier) -> PoolTier | HostTier | DiskTier:
    """Return the tier for the argument ``backup``: itself, or one over a pool in host memory.

    Raises
    ------
    TypeError
        The argument is neither a pool nor a tier.
    """
    if isinstance(backup, MemoryPool):
        return PoolTier(backup)
    if not isinstance(backup, (HostTier, DiskTier)):
        raise TypeError(f"backup must be a MemoryPool, HostTier or DiskTier, not {type(backup).__name__} ({backup!r})")
    return backup
