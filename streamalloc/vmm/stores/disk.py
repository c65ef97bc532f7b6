"""Store on disk: a folder with one file per group of buffers, and unnamed files for pages."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from streamalloc.core.errors import size_text, undoing
from streamalloc.core.internal import CopySide, Device, Memory, Stream, copy_bytes
from streamalloc.core.properties import checked_size
from streamalloc.core.session import Session, session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.stores.blocks import Addresses, BlockTier, Chunk, Stored, copy_batch
from streamalloc.vmm.stores.disk_file import MOST_BLOCK, PAGE, Block, DiskFile, aligned, padded
from streamalloc.vmm.stores.pool import Bytes, Copies, PoolTier, SavedBytes, Tier, overlapping, part_of
from streamalloc.vmm.stores.staging import Loading, Saving, Staging

_SLOTS = 16
_LONGEST = 255 - len("..part")
"""Most bytes of a file name, with the suffix used during writing."""


class _Slots(Chunk):
    """A chunk in an unnamed file. Addresses of blocks are numbers of slots in the file."""

    __slots__ = ("file",)

    def __init__(self, folder: Path, nbytes: int, count: int, block: int, address: int) -> None:
        self.file: DiskFile = DiskFile.create(folder, [nbytes] * count, block)
        super().__init__(nbytes, count, address, 1)

    def runs(self, slots: Addresses, most: int) -> Iterator[tuple[slice, list[Block]]]:
        """Split slots, which are in ascending order, into runs of adjacent file blocks of at most ``most`` bytes.

        For each run, yields a slice of ``slots`` and the file blocks. A slot that is larger than ``most`` has one run
        for each of its blocks.
        """
        whole = max(most // padded(self.nbytes), 1)
        numbers = (slots - self.address).tolist()
        first = 0
        while first < len(numbers):
            stop = first + 1
            while stop < len(numbers) and stop - first < whole and numbers[stop] == numbers[stop - 1] + 1:
                stop += 1
            blocks = [block for number in numbers[first:stop] for block in self.file.blocks(number)]
            for some in [blocks] if self.nbytes <= most else [[block] for block in blocks]:
                yield slice(first, stop), some
            first = stop


class _Contents(Stored):
    """The contents of blocks in files. Each call waits for its copies, so no copy is queued when it returns."""

    __slots__ = ()

    tier: DiskTier

    def save(self, source: Addresses, stream: Stream) -> None:
        """Copy the blocks to the files, through staging memory."""
        self._move(Saving, np.arange(len(self)), source, stream)

    def load(self, blocks: Sequence[int] | Addresses, target: Addresses, stream: Stream) -> None:
        """Copy the blocks from the files, through staging memory, and check them."""
        self._move(Loading, blocks, target, stream)

    def _move(self, kind: type[Any], blocks: Sequence[int] | Addresses, device: Addresses, stream: Stream) -> None:
        if not len(blocks):
            return
        bases, places = self._bases[blocks], self._addresses[blocks]
        # Other streams may be captured meanwhile.
        with self.in_use(), session_of(stream).relaxed():
            transfer = self.tier._moving(kind, stream)
            with undoing(transfer.abandon):
                for chunk in self._chunks.values():
                    mine = np.flatnonzero(bases == chunk.address)
                    mine = mine[np.argsort(places[mine])]
                    for which, some in chunk.runs(places[mine], self.tier.block):
                        names = np.asarray(blocks)[mine[which]].tolist()
                        copy = functools.partial(_copy, device[mine[which]], some, stream, kind is Saving)
                        transfer.move(chunk.file, some, copy, names)
                transfer.finish()


def _copy(device: Addresses, blocks: Sequence[Block], stream: Stream, out: bool, room: Bytes) -> None:
    """Queue the copies of blocks of one size between device and staging memory."""
    first = blocks[0]
    host = np.array([block.position for block in blocks]) - first.position + room.ctypes.data
    sides = (host, device + first.offset)[:: 1 if out else -1]
    copy_batch(sides[0], sides[1], first.nbytes, np.zeros(len(host), np.int64), stream)


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
        Most bytes on disk for pages and blocks; None for no limit. Files of buffers do not count.
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

    __slots__ = ("_given", "_idle", "_threads", "block", "folder", "persistent")

    _call = "posix_fallocate"

    def __init__(
        self,
        device: Device,
        folder: str | os.PathLike[str],
        limit: int | None = None,
        *,
        persistent: bool = False,
        block: int = 4 << 20,
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
        self._threads = checked_size("threads", threads)
        if not self._threads:
            raise ValueError("threads=0: at least one is needed")
        self._given = 0
        """Number of slots of all files so far, also of closed ones: the next file begins with this number."""
        self._idle: list[Staging] = []
        """Staging memory that no call uses."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[SavedBytes]:
        """Create a file for buffers of these sizes. With a name, in a persistent tier, the file outlives the buffers.

        Raises
        ------
        ClosedError
            The tier was closed.
        OSError
            The file cannot be created.
        """
        self._check(stream)
        stays = self.persistent and name is not None
        return self._bytes_of(DiskFile.create(self.folder, sizes, self.block, self._name(name or "") if stays else ""))

    def resume(self, sizes: Sequence[int], stream: Stream, name: str) -> Sequence[SavedBytes]:
        """Open the complete file that an earlier :meth:`hold` made under this name, for buffers of the same sizes.

        Raises
        ------
        DamagedBackupError
            The file is damaged or truncated, has another layout, or other users own it or can open it.
        FileNotFoundError
            There is none.
        ClosedError
            The tier was closed.
        """
        self._check(stream)
        return self._bytes_of(DiskFile.open(self.folder / self._name(name), sizes, self.block))

    @staticmethod
    def _name(name: str) -> str:
        file = f"{quote(name, safe='')}.backup"
        if len(file) > _LONGEST:
            raise ValueError(f"a file named after {name!r} has {len(file)} bytes in its name: allowed are {_LONGEST}")
        return file

    def _bytes_of(self, file: DiskFile) -> Sequence[SavedBytes]:
        holders: set[int] = set(range(len(file.sizes)))
        return [DiskBytes(self, file, index, holders) for index in range(len(file.sizes))]

    def _check(self, stream: Stream) -> None:
        self._check_open()
        if session_of(stream) is not self._session:
            raise ValueError(f"backup {self!r} belongs to another driver")

    def _moving(self, kind: type[Any], stream: Stream) -> Any:
        """Make a transfer. It uses idle staging memory, or new staging memory if there is none."""
        staging = None
        with contextlib.suppress(IndexError):
            staging = self._idle.pop()
        return kind(stream, staging or Staging(stream, _SLOTS, self.block), self._threads, self._take_back)

    def _chunk(self, nbytes: int, count: int) -> Chunk:
        first = self._given
        self._given += count
        return _Slots(self.folder, nbytes, count, self.block, first)

    def _room(self, nbytes: int) -> int:
        return padded(nbytes)

    def _stored(self, nbytes: int) -> Stored:
        return _Contents(self, nbytes)

    def _take_back(self, staging: Staging) -> None:
        self._idle.append(staging)
        if self.closed:
            self.close()

    def close(self) -> None:
        """Accept no more bytes, and release the staging memory (``cuMemHostUnregister``). Idempotent."""
        super().close()
        while self._idle:
            self._idle.pop().close()

    @property
    def _session(self) -> Session:
        return session_of(self.device)

    def _text(self) -> str:
        state = ", closed" if self.closed else f", {size_text(self.used)} of pages" * bool(self._chunks)
        return f" in {self.folder}{', persistent' if self.persistent else ''}{state}"


def _copy_side(side: CopySide, stream: Stream | None, out: bool, room: Bytes) -> None:
    assert stream is not None
    host = CopySide(room.ctypes.data, side.nbytes, None, room)
    copy_bytes(*((host, side) if out else (side, host)), stream)


class DiskBytes:
    """The bytes of one buffer in a file."""

    __slots__ = ("_file", "_holders", "_index", "_tier", "nbytes")

    own = True
    memory: Memory | None = None

    def __init__(self, tier: DiskTier, file: DiskFile, index: int, holders: set[int]) -> None:
        self._tier = tier
        self._file: DiskFile | None = file
        self._index = index
        self._holders = holders
        """Indices of the buffers whose bytes are still needed. All :class:`DiskBytes` of a file share this set."""
        self.nbytes: int = file.sizes[index]

    def _opened(self) -> DiskFile:
        assert self._file is not None
        return self._file

    def save(self, source: CopySide, copies: Copies) -> None:
        """Begin to write device memory to the file."""
        self._move(Saving, source, copies)

    def load(self, target: CopySide, copies: Copies) -> None:
        """Begin to read device memory from the file."""
        self._move(Loading, target, copies)

    def _move(self, kind: type[Any], side: CopySide, copies: Copies) -> None:
        tier, file = self._tier, self._opened()
        transfer = copies.transfer((tier, kind), functools.partial(tier._moving, kind))
        for block in file.blocks(self._index):
            part = part_of(side, block.offset, block.nbytes)
            transfer.move(file, [block], functools.partial(_copy_side, part, copies.stream, kind is Saving))

    def read(self, offset: int, target: Bytes) -> None:
        """Copy bytes to a host array."""
        file = self._opened()
        for block, begin, part in self._touched(offset, target):
            room = aligned(file.block)
            file.read([block], room, [None])
            part[:] = room[begin : begin + part.nbytes]

    def write(self, offset: int, source: Bytes) -> None:
        """Replace bytes by those of a host array. A persistent file is damaged if the process dies during this
        call.
        """
        file = self._opened()
        for block, begin, part in self._touched(offset, source):
            room = aligned(file.block)
            if part.nbytes < block.nbytes:
                file.read([block], room, [None])
            room[begin : begin + part.nbytes] = part
            file.write([block], room)
        file.seal()

    def _touched(self, offset: int, array: Bytes) -> Iterator[tuple[Block, int, Bytes]]:
        blocks = self._opened().blocks(self._index)
        return overlapping(((block, block.offset, block.nbytes) for block in blocks), offset, array)

    def leave(self) -> None:
        """Drop the bytes. With the last buffer, also delete the file if it is incomplete."""
        file, self._file = self._file, None
        self._holders.discard(self._index)
        if file is not None and not self._holders:
            file.discard()


def tier_of(backup: MemoryPool | DiskTier) -> Tier:
    """Return the tier that an argument names.

    Raises
    ------
    TypeError
        The argument is neither a pool nor a tier.
    """
    if isinstance(backup, MemoryPool):
        return PoolTier(backup)
    if not isinstance(backup, DiskTier):
        raise TypeError(f"backup must be a MemoryPool or DiskTier, not {type(backup).__name__} ({backup!r})")
    return backup
