"""The tier on disk: a folder with a file for each group of buffers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from streamalloc.core.internal import CopySide, Device, Memory, Stream, check_device
from streamalloc.core.properties import checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.backup import Copies
from streamalloc.vmm.tiers.disk_file import MOST_BLOCK, PAGE, Block, DiskFile, aligned
from streamalloc.vmm.tiers.host import PoolTier
from streamalloc.vmm.tiers.staging import Loading, Saving, Staging
from streamalloc.vmm.tiers.tier import Bytes, Held, Tier

__all__ = ["DiskTier", "tier_of"]

_SLOTS = 16


class DiskTier(Closes):
    """A folder on disk for the bytes of buffers that sleep.

    Several threads write and read blocks at once, through 16 blocks of pinned host memory at most, and past the page
    cache where the file system can (``O_DIRECT``). Each block has a checksum. Files are only for this user. ::

        with vmm.DiskTier(device, "/nvme/sleep") as disk:
            group.sleep(backup=disk)
            group.wake()

    A file of a tier that is not ``persistent`` has no name: it is gone with the last buffer in it, and when the process
    ends. A persistent tier names the file of a group after the tag, as soon as it is complete. It stays after the
    buffers have woken, until the next sleep replaces it; :meth:`SleepGroup.resume` takes the bytes in another process.
    A folder for persistent files is for one group at a time.

    Thread-safe. Bytes stay until the buffers wake or are closed, also after :meth:`close`.

    Parameters
    ----------
    device
        Device of the buffers.
    folder
        Path of the folder, which is made if there is none, for this user only.
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

    __slots__ = ("__weakref__", "_idle", "_threads", "block", "closed", "device", "folder", "persistent")

    def __init__(
        self,
        device: Device,
        folder: str | os.PathLike[str],
        *,
        persistent: bool = False,
        block: int = 4 << 20,
        threads: int = 8,
    ) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of the buffers."""
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
        self.closed: bool = False
        """Whether it was closed."""
        self._idle: list[Staging] = []
        """Staging memory that no call uses."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Held]:
        """Create a file for buffers of these sizes; it outlives them if it has a name and the tier is persistent.

        Raises
        ------
        ClosedError
            The tier was closed.
        OSError
            The file cannot be created.
        """
        self._check(stream)
        stays = self.persistent and name is not None
        return self._held(DiskFile.create(self.folder, sizes, self.block, self._name(name or "") if stays else ""))

    def resume(self, sizes: Sequence[int], stream: Stream, name: str) -> Sequence[Held]:
        """Open the complete file of an earlier :meth:`hold` of buffers of the same sizes, under the same name.

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
        return self._held(DiskFile.open(self.folder / self._name(name), sizes, self.block))

    @staticmethod
    def _name(name: str) -> str:
        return f"{quote(name, safe='')}.backup"

    def _held(self, file: DiskFile) -> Sequence[Held]:
        holders: set[int] = set(range(len(file.sizes)))
        return [DiskBytes(self, file, index, holders) for index in range(len(file.sizes))]

    def _check(self, stream: Stream) -> None:
        self._check_open()
        if session_of(stream) is not self._session:
            raise ValueError(f"backup {self!r} belongs to another driver")

    def _transfer(self, kind: type[Any], copies: Copies) -> Any:
        """Return the transfer of this kind for the copies of one call."""

        def make(stream: Stream) -> Any:
            staging = None
            with contextlib.suppress(IndexError):
                staging = self._idle.pop()
            return kind(stream, staging or Staging(stream, _SLOTS, self.block), self._threads, self._take_back)

        return copies.by_host((self, kind), make)

    def _take_back(self, staging: Staging) -> None:
        self._idle.append(staging)
        if self.closed:
            self.close()

    def close(self) -> None:
        """Take no more bytes, and release the staging memory (``cuMemHostUnregister``). Idempotent."""
        self.closed = True
        while self._idle:
            self._idle.pop().close()

    @property
    def _session(self) -> Session:
        return session_of(self.device)

    def _text(self) -> str:
        return f" in {self.folder}{', persistent' if self.persistent else ''}{', closed' if self.closed else ''}"


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
        """Buffers of the file that hold it."""
        self.nbytes: int = file.sizes[index]

    def _opened(self) -> DiskFile:
        assert self._file is not None
        return self._file

    def save(self, source: CopySide, copies: Copies) -> None:
        """Begin to write device memory to the file."""
        self._tier._transfer(Saving, copies).save(self._opened(), self._index, source)

    def load(self, target: CopySide, copies: Copies) -> None:
        """Begin to read device memory from the file."""
        self._tier._transfer(Loading, copies).load(self._opened(), self._index, target)

    def read(self, offset: int, target: Bytes) -> None:
        """Copy bytes to a host array."""
        file = self._opened()
        for block, begin, part in self._touched(offset, target):
            room = aligned(file.block)
            file.read(block, room)
            part[:] = room[begin : begin + part.nbytes]

    def write(self, offset: int, source: Bytes) -> None:
        """Replace bytes by those of a host array. If the process ends meanwhile, a persistent file is damaged."""
        file = self._opened()
        for block, begin, part in self._touched(offset, source):
            room = aligned(file.block)
            if part.nbytes < block.nbytes:
                file.read(block, room)
            room[begin : begin + part.nbytes] = part
            file.write(block, room)
        file.seal()

    def _touched(self, offset: int, array: Bytes) -> list[tuple[Block, int, Bytes]]:
        found, stop = [], offset + array.nbytes
        for block in self._opened().blocks(self._index):
            begin, end = max(offset, block.offset), min(stop, block.offset + block.nbytes)
            if begin < end:
                found.append((block, begin - block.offset, array[begin - offset : end - offset]))
        return found

    def leave(self) -> None:
        """Drop the bytes; the last buffer drops the file, and with it one that is not complete."""
        file, self._file = self._file, None
        self._holders.discard(self._index)
        if file is not None and not self._holders:
            file.discard()


def tier_of(backup: MemoryPool | DiskTier) -> Tier:
    """Return the tier that an argument names.

    Raises
    ------
    TypeError
        It is no pool and no tier.
    """
    if isinstance(backup, MemoryPool):
        return PoolTier(backup)
    if not isinstance(backup, DiskTier):
        raise TypeError(f"backup must be a MemoryPool or DiskTier, not {type(backup).__name__} ({backup!r})")
    return backup
