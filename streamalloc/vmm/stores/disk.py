"""Tier on disk: a folder with one file for the buffers of each tag, and unnamed files for pages."""

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
    Backup,
    BlockTier,
    Bytes,
    Chunk,
    Copies,
    Move,
    Stored,
    index_of,
    overlapping,
)
from streamalloc.vmm.stores.copies import copy_batch, kernel_of
from streamalloc.vmm.stores.disk_file import MOST_BLOCK, PAGE, DiskFile, FileBlock, aligned, padded
from streamalloc.vmm.stores.host import HostTier, PoolTier
from streamalloc.vmm.stores.pinned import HostMemory

_SLOTS = 16
"""Number of slots in one staging memory, which is pinned host memory for one call. A slot has the size of a block."""
_LONGEST = 255 - len("..part")
"""Largest length of a file name in bytes. While the file is written, its name has ``.`` before it and ``.part`` after
it, which gives at most 255 bytes.
"""


class FileChunk(Chunk):
    """A chunk that is a file. The address of a block is its number: over all files of pages, or within a file of
    buffers.
    """

    def __init__(self, file: DiskFile, nbytes: int, address: int) -> None:
        super().__init__(nbytes, address, address + np.arange(len(file.sizes)))
        self.file: DiskFile = file

    def runs(self, slots: Addresses, most: int) -> Iterator[list[tuple[int, FileBlock]]]:
        """Split ``slots`` (addresses in ascending order) into runs of adjacent file blocks. A run has at most ``most``
        bytes, or one block. Yields each run as a list of tuples: the index of the address in ``slots``, and the file
        block.
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
        """Delete the file if it is incomplete."""
        self.file.discard()


_End: TypeAlias = "Event | Future[None]"
"""Object to wait for at the end of one part of a step: the event after the copies of this part, or the future of its
read or write.
"""
_Step: TypeAlias = "tuple[Bytes, Callable[[], _End], _End]"
"""A step of a transfer: its slot, a function that begins its second part, and the object to wait for at the end of the
part that has begun.
"""


class _Transfer:
    """The transfer of the blocks of one call between disk and device, through the slots of one staging memory.

    Worker threads read and write files; the calling thread makes all driver calls. A step moves adjacent blocks through
    one slot, in two parts: to disk, a copy to the slot and then a write; from disk, a read and then a copy from the
    slot.
    """

    def __init__(self, contents: InFiles, stream: Stream, out: bool) -> None:
        self._contents = contents
        self.stream: Stream = stream
        self.out: bool = out
        """Whether blocks are copied from device memory to disk."""
        self._staging = contents.tier._staging(stream.device)
        self._free = list(self._staging.slots)
        self._first: deque[_Step] = deque()
        """Steps whose first part has begun, oldest first."""
        self._second: deque[_Step] = deque()
        """Steps whose second part has begun, oldest first."""
        self._most_second = max(len(self._free) - 2, 0) if out else 1
        """If no slot is free and more steps than this number are in their second part, a new step waits for the oldest
        of these steps.
        """
        self._threads = ThreadPoolExecutor(contents.tier._threads)

    def move(
        self, file: DiskFile, blocks: Sequence[FileBlock], copy: Callable[[Bytes], None], names: Sequence[int | None]
    ) -> None:
        """Wait for a free slot, and begin to move adjacent ``blocks`` of ``file``, which fit in one slot. Raises
        OSError, DamagedBackupError, CudaError of earlier steps.

        ``copy`` queues the copies from or to the slot. ``names`` has the index of each block for errors, or None.
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
        """Begin a read or a write, ``access(*args)``, on a worker thread. Until it ends, the room in the file counts as
        in use: :meth:`abandon` waits for no thread, and a late write could otherwise overwrite what another call has
        stored in dropped room. Returns the future.
        """
        # The worker thread ends the use. If the thread never begins this task, `use` is dropped with it, which also
        # ends the use.
        use = contextlib.ExitStack()
        use.enter_context(self._contents.in_use())
        return self._threads.submit(_access, use, access, *args)

    def _advance_oldest(self) -> None:
        """Wait for the first part of the oldest step, and begin its second part. Raises the errors of both parts."""
        slot, second, end = self._first.popleft()
        _await(end)
        self._second.append((slot, second, second()))

    def _end_oldest(self) -> None:
        """Wait for the second part of the oldest step, and free its slot. Raises the error of this part."""
        slot, _, end = self._second.popleft()
        _await(end)
        self._free.append(slot)

    def finish(self) -> None:
        """Block the host until all blocks are on disk, or in device memory. Then end the worker threads, and return the
        staging memory to the tier. Raises OSError, DamagedBackupError, CudaError.
        """
        while self._first:
            self._advance_oldest()
        while self._second:
            self._end_oldest()
        self._threads.shutdown()
        self._contents.tier._take_back(self._staging)

    def abandon(self) -> None:
        """Stop after an error, without waiting for the worker threads: they may be waiting for a lock that an exception
        of a signal handler has left locked. The staging memory is released after the copies that use it; a thread keeps
        its slot alive.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._staging.release.use(Fence(session_of(self.stream), [self.stream]))
        self._first.clear()  # The error's traceback keeps this object alive, but must not keep its events.
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


class InFiles(Stored):
    """The contents of blocks in files. Each call blocks the host until its copies are done."""

    tier: DiskTier

    @contextlib.contextmanager
    def moving(self, stream: Stream, *, out: bool) -> Iterator[Move]:
        """Return a context manager for copies (:meth:`Stored.moving`). The blocks pass through staging memory, and are
        checked when they are read.
        """
        # In another capture mode, the waits of this call would invalidate captures of other streams.
        with self.in_use(), session_of(stream).relaxed():
            transfer = _Transfer(self, stream, out)
            with undoing(transfer.abandon):
                yield functools.partial(self._move, transfer)
                transfer.finish()

    def _move(self, transfer: _Transfer, copies: Copies) -> None:
        chosen = index_of(copies.blocks)
        numbers, bases, places = np.arange(len(self))[chosen], self.room.bases[chosen], self.room.addresses[chosen]
        # Each block of a buffer is copied alone, because the buffer may be in memory of several devices.
        most = self.tier.block if self.nbytes else 0
        for chunk in self.room.chunks.values():
            mine = np.flatnonzero(bases == chunk.address)
            mine = mine[np.argsort(places[mine])]
            for run in chunk.runs(places[mine], most):
                which, some = mine[[index for index, _ in run]], [block for _, block in run]
                names = numbers[which].tolist() if self.nbytes else [None] * len(some)
                device = copies.addresses[which] + np.array([block.offset for block in some])
                copy = functools.partial(_copy, device, some, transfer.stream, transfer.out, copies.kernels)
                transfer.move(chunk.file, some, copy, names)

    def seal(self, stream: Stream) -> None:
        """Write the header of each file that gets a name, and give the file its name."""
        for chunk in self.room.chunks.values():
            chunk.file.seal()

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """Copy bytes of a block from its file (:meth:`Stored.read`)."""
        for file, some, begin, part in self._touched(block, offset, target):
            room = aligned(file.block)
            file.read([some], room, [None])
            part[:] = room[begin : begin + part.nbytes]

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """Overwrite bytes of a block in its file (:meth:`Stored.write`). A persistent file is damaged if the process
        dies during this call.
        """
        for file, some, begin, part in self._touched(block, offset, source):
            room = aligned(file.block)
            if part.nbytes < some.nbytes:
                file.read([some], room, [None])
            room[begin : begin + part.nbytes] = part
            file.write([some], room)
        self.room.chunks[int(self.room.bases[block])].file.seal()

    def _touched(self, block: int, offset: int, array: Bytes) -> Iterator[tuple[DiskFile, FileBlock, int, Bytes]]:
        chunk = self.room.chunks[int(self.room.bases[block])]
        several = chunk.file.blocks(int(self.room.addresses[block]) - chunk.address)
        for some, begin, part in overlapping(several, [one.nbytes for one in several], offset, array):
            yield chunk.file, some, begin, part


def _copy(
    device: Addresses, blocks: Sequence[FileBlock], stream: Stream, out: bool, kernels: bool, room: Bytes
) -> None:
    """Queue the copies of adjacent ``blocks`` on ``stream`` between the addresses ``device`` and the slot ``room``;
    from the device if ``out``. ``kernels``: whether kernels may use the device memory. Raises CudaError.
    """
    host = np.array([block.position for block in blocks]) - blocks[0].position + room.ctypes.data
    sizes = np.array([block.nbytes for block in blocks])
    targets, sources = (host, device)[:: 1 if out else -1]
    equal = int(sizes[0]) if (sizes == sizes[0]).all() else sizes
    copy_batch(targets, sources, equal, np.zeros(len(host), np.int64), stream, out=out, kernels=kernels)


class DiskTier(BlockTier):
    """A folder on disk for the bytes of sleeping buffers, and of pages that are swapped out.

    Several threads write and read blocks at once, through 16 blocks of pinned host memory per call. They bypass the
    page cache if the file system allows it (``O_DIRECT``). Each block has a checksum. Only this user can open the
    files. ::

        with vmm.DiskTier(device, "/nvme/sleep") as disk:
            group.sleep(backup=disk)
            group.wake()

    Without ``persistent`` a file has no name, and is deleted when its last buffer is awake or dropped, or when the
    process ends. With ``persistent`` a file gets the name of its tag once it is complete. This file stays after the
    buffers have woken, until the next sleep replaces it. Another process can read it by :meth:`SleepGroup.resume`. Only
    one group at a time may use a folder with persistent files. A second group is not refused: each group wakes with its
    own bytes, and the file that stays has the bytes of the group that slept last.

    :meth:`PageSpace.swap_out` and :meth:`save` store pages and blocks in unnamed files of at least 32 MiB, which are
    reused for later pages. These methods, :meth:`PageSpace.swap_in` and :meth:`load` block the host. ::

        with vmm.DiskTier(device, "/nvme/pages", limit=256 << 30) as disk:
            space.swap_out(range(64), disk)
            space.swap_in(range(64))

    Thread-safe. Bytes are kept until the buffers wake or are closed, or the pages are swapped in, even after
    :meth:`close`.

    Parameters
    ----------
    device
        Device of the buffers and pages.
    folder
        Path of the folder. A missing folder is created, with access only for this user.
    limit
        Largest number of bytes on disk for pages and blocks; None for no limit. Files of buffers are not included.
    persistent
        Whether files of buffers are kept after the buffers have woken and the process has ended.
    block
        Size of a block in bytes, a multiple of 4096, at most 64 MiB. :meth:`SleepGroup.resume` refuses files with
        blocks of another size.
    threads
        Number of threads that read or write in each call.

    Raises
    ------
    TypeError, ValueError
        ``device`` is no device, ``folder`` no path, ``limit`` no size, or ``block`` or ``threads`` is not as above.
    OSError
        The folder cannot be created.
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
        """Whether files of buffers are kept after the buffers have woken and the process has ended."""
        self.block: int = checked_size("block", block)
        """Size of a block in bytes."""
        if not self.block or self.block % PAGE or self.block > MOST_BLOCK:
            raise ValueError(f"block={block}: allowed are multiples of {PAGE} up to {MOST_BLOCK}")
        self._threads = checked_number("threads", threads)
        if not self._threads:
            raise ValueError("threads=0: at least one is needed")
        self._given = 0
        """Number of addresses that all files have used so far, including closed files. The next file begins with this
        number.
        """
        self._idle: list[HostMemory] = []
        """Staging memories that no call uses now."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kernel_of(device).prepare()

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Backup]:
        """Create a file for buffers of ``sizes`` bytes, and return a ``Backup`` for each buffer. ``stream`` makes the
        copies.

        ``name``: name of the file in a persistent tier, which stays after the buffers have woken; None for a file
        without a name, which does not. A tier that is not persistent ignores the argument.

        Raises
        ------
        ClosedError
            The tier was closed.
        ValueError
            ``stream`` belongs to another driver, or ``name`` is too long for the name of a persistent file.
        OSError
            The file cannot be created, or the disk is full.
        """
        self._check_for(stream)
        stays = self.persistent and name is not None
        return self._held(DiskFile.create(self.folder, sizes, self.block, self._name(name or "") if stays else ""))

    def resume(self, sizes: Sequence[int], stream: Stream, name: str) -> Sequence[Backup]:
        """Open the file that :meth:`hold` made with ``name``, also in another process, for buffers of the same
        ``sizes`` in bytes. Returns a ``Backup`` with the bytes of each buffer. ``stream``: only its driver is checked.

        Raises
        ------
        DamagedBackupError
            The file is damaged or truncated, has buffers or blocks of other sizes, or other users own it or can open
            it.
        OSError
            There is no such file (FileNotFoundError), or the file cannot be opened or read.
        ClosedError
            The tier was closed.
        ValueError
            ``stream`` belongs to another driver, or ``name`` is too long for the name of a file.
        """
        self._check_for(stream)
        path = self.folder / self._name(name)
        try:
            return self._held(DiskFile.open(path, sizes, self.block))
        except FileNotFoundError as error:
            why = f"no group has put {name!r} to sleep in this folder with persistent=True"
            raise FileNotFoundError(error.errno, why, str(path)) from None

    @staticmethod
    def _name(name: str) -> str:
        file = f"{quote(name, safe='')}.backup"
        if len(file) > _LONGEST:
            raise ValueError(f"a file named after {name!r} has {len(file)} bytes in its name: allowed are {_LONGEST}")
        return file

    def _held(self, file: DiskFile) -> Sequence[Backup]:
        stored = self._stored(np.array(file.sizes))
        stored.room.take(FileChunk(file, 0, 0), range(len(stored)))
        return [Backup(stored, range(index, index + 1)) for index in range(len(stored))]

    def _staging(self, device: Device) -> HostMemory:
        """Return staging memory that no other call uses. If there is none, make one (``cuMemHostRegister``). Raises
        OutOfMemoryError.
        """
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return HostMemory(device, _SLOTS * self.block, self.block)

    def _chunk(self, nbytes: int, count: int) -> Chunk:
        first = self._given
        self._given += count
        return FileChunk(DiskFile.create(self.folder, [nbytes] * count, self.block), nbytes, first)

    def _room(self, nbytes: int) -> int:
        return padded(nbytes)

    def _stored(self, sizes: Addresses, nbytes: int = 0) -> Stored:
        return InFiles(self, sizes, nbytes)

    def _take_back(self, staging: HostMemory) -> None:
        self._idle.append(staging)
        if self.closed:
            self.close()

    def close(self) -> None:
        """Accept no more contents, release the staging memory (``cuMemHostUnregister``), and delete the files of pages
        once their last contents are dropped. May block the host until the devices are idle. Idempotent.
        """
        super().close()
        while self._idle:
            self._idle.pop().close()

    def _text(self) -> str:
        state = ", closed" if self.closed else f", {size_text(self.used)} of pages" * bool(self._chunks)
        return f" in {self.folder}{', persistent' if self.persistent else ''}{state}"


def tier_of(backup: object) -> PoolTier | HostTier | DiskTier:
    """Return the tier for the argument ``backup``: ``backup`` itself, or for a pool a new :class:`PoolTier`. Whether
    the pool is in host memory is checked later, by :meth:`PoolTier.hold`.

    Raises
    ------
    TypeError
        ``backup`` is neither a pool nor a tier.
    """
    if isinstance(backup, MemoryPool):
        return PoolTier(backup)
    if isinstance(backup, (HostTier, DiskTier)):
        return backup
    text = f"backup must be a MemoryPool, HostTier or DiskTier, not {type(backup).__name__} ({backup!r})"
    if isinstance(backup, (str, Path)):
        text += f": DiskTier(device, {backup!r}) stores in a folder"
    raise TypeError(text)
