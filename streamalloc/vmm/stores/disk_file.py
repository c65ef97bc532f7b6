"""Files with the bytes of buffers: their format, its checks, and reads and writes of blocks. No driver call is made
here.

A file has a header, and after it the bytes of each buffer in blocks. The position of each buffer is a multiple of
4096::

    magic, version, bytes of a block, number of buffers, bytes of the file      _HEAD
    the size of each buffer                                                     8 bytes each
    the CRC-32 of each block                                                    4 bytes each
    the CRC-32 of all before                                                    4 bytes

Numbers are little-endian. Each value of the header is compared with the expected value before blocks are read: a file
may be damaged, truncated, or made by another user.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from streamalloc.core.errors import size_text, undoing
from streamalloc.core.internal import Fd
from streamalloc.vmm.stores.blocks import Bytes

T = TypeVar("T")

PAGE = 4096
"""Alignment of direct reads and writes, in bytes."""
MOST_BLOCK = 64 << 20
"""Largest size of a block in bytes."""
_MAGIC = b"streamSL"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")


class DamagedBackupError(ValueError):
    """Stored bytes have changed, or a file is no backup of these buffers.

    Methods that read stored bytes or open their files raise it, such as :meth:`VirtualBuffer.restore`,
    :meth:`SleepGroup.wake`, :meth:`SleepGroup.resume` and :meth:`PageSpace.swap_in`.

    Attributes
    ----------
    block
        Index of a damaged page or block; None for buffers.
    """

    def __init__(self, why: str, block: int | None = None) -> None:
        super().__init__(why, block)
        self.block: int | None = block

    def __str__(self) -> str:
        return str(self.args[0])


class FileBlock(NamedTuple):
    """One block of a file, which has bytes of one buffer."""

    number: int
    """Number of the block in the file, from 0."""
    position: int
    """Offset of the block in the file, in bytes."""
    offset: int
    """Offset of the block's bytes in the buffer, in bytes."""
    nbytes: int
    """Size of the block in bytes; the last block of a buffer may be smaller."""


_LARGE = 64 << 20
"""Size in bytes of an unnamed file from which on another thread closes the file, because the close takes long."""


def _close(fd: Fd) -> None:
    """Close a file. A large unnamed file is closed on another thread, because the close frees its blocks on disk, which
    takes half as long as writing them.
    """
    about = os.fstat(fd.fileno())
    if about.st_nlink or about.st_blocks * 512 < _LARGE:
        fd.close()
        return
    closing, number = _thread.allocate_lock(), fd.detach()
    closing.acquire()
    _closing.append(closing)
    try:
        _thread.start_new_thread(_free, (number, closing))
    except RuntimeError:  # No thread can start at the exit.
        _free(number, closing)


def _free(number: int, closing: _thread.LockType) -> None:
    try:
        os.close(number)
    finally:
        _closing.remove(closing)
        closing.release()


_PATIENCE = 60.0
"""Longest time in seconds of a wait until files that are being closed have freed their blocks on disk."""
_closing: list[_thread.LockType] = []
"""One lock for each file that another thread is closing, held until its blocks on disk are free."""
os.register_at_fork(after_in_child=_closing.clear)


def _in_room(call: Callable[..., T], *args: object) -> T:
    """Call ``call(*args)``, which needs disk space, and return its result. If the disk is full, wait up to 60 seconds
    for files that other threads are closing, and call it again. Raises OSError.
    """
    before = list(_closing)
    try:
        return call(*args)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not before:
            raise
    for closing in before:
        # The wait has a time limit: if a signal handler raised, the closing thread may not have started, and nothing
        # releases the lock.
        if closing.acquire(timeout=_PATIENCE):
            closing.release()
    return call(*args)


def aligned(nbytes: int) -> Bytes:
    """Return an array of ``nbytes`` bytes of zeros, aligned for direct reads and writes. Its memory is unmapped when
    the last view is dropped.
    """
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of :data:`PAGE`, which direct reads and writes need."""
    return -(-nbytes // PAGE) * PAGE


class DiskFile:
    """An open file with the bytes of buffers or pages. :meth:`create` and :meth:`open` return it.

    Several threads can read and write blocks at once. The descriptor is closed when the file is dropped.
    """

    def __init__(self, fd: Fd, sizes: Sequence[int], block: int, path: Path | None, part: Path | None) -> None:
        self._fd = fd
        self._path = path
        self._part = part
        """Path of an incomplete file, which has a temporary name; None for other files."""
        self.sizes: tuple[int, ...] = tuple(sizes)
        """Sizes of the buffers, in bytes."""
        self.block: int = block
        """Bytes of a block."""
        counts = [-(-size // block) for size in self.sizes]
        self._sums = [0] * sum(counts)
        """CRC-32 of each block, by its number in the file."""
        starts, number, position = [], 0, self._header_bytes
        for size, count in zip(self.sizes, counts, strict=True):
            starts.append((number, position))
            number, position = number + count, position + padded(size)
        self._starts = (*starts, (number, position))
        """Number and position (bytes) of each buffer's first block. A last pair has the number of all blocks, and the
        file's size in bytes.
        """
        self.direct: bool = False
        """Whether reads and writes bypass the page cache."""

    @classmethod
    def create(cls, folder: Path, sizes: Sequence[int], block: int, name: str = "") -> DiskFile:
        """Create a file in ``folder`` for buffers of ``sizes`` bytes, in blocks of ``block`` bytes. Only this user can
        open the file. Raises OSError if the file cannot be created or the disk is full.

        With ``name``, :meth:`seal` gives the file its name; until then the file has a temporary name. Without ``name``,
        the file is deleted from the folder at once, and its disk space is freed when it is closed.
        """
        path = folder / name if name else None
        part = folder / f".{name or secrets.token_hex(8)}.part"
        with contextlib.suppress(FileNotFoundError):
            part.unlink()  # Left by a process that died while it wrote; O_EXCL would fail.
        with undoing(lambda: part.unlink(missing_ok=True)):
            fd = Fd(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            os.fchmod(fd.fileno(), 0o600)  # open() has applied the umask to the mode.
            if path is None:
                part.unlink()
            file = cls(fd, sizes, block, path, None if path is None else part)
            os.ftruncate(fd.fileno(), file.nbytes)
            file._set_direct(True)
            file._allocate()
        return file

    @classmethod
    def open(cls, path: Path, sizes: Sequence[int], block: int) -> DiskFile:
        """Open the complete file ``path`` for buffers of ``sizes`` bytes, in blocks of ``block`` bytes, and check its
        header. Blocks are checked when they are read.

        Raises
        ------
        DamagedBackupError
            The file is damaged or truncated, has buffers or blocks of other sizes, or other users own it or can open
            it.
        OSError
            There is no such file (FileNotFoundError), or the file cannot be opened or read.
        """

        def refuse(why: str) -> DamagedBackupError:
            return DamagedBackupError(f"{path} is no backup of these buffers: {why}")

        try:
            fd = Fd(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise refuse("it is no regular file") from None
            raise
        about = os.fstat(fd.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise refuse("it is no regular file")
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise refuse(f"other users own it or can open it (mode {stat.S_IMODE(about.st_mode):o})")
        head = os.pread(fd.fileno(), _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise refuse(f"it has {about.st_size} bytes")
        magic, version, theirs, count, nbytes = _HEAD.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise refuse("its header is not that of a backup file of this version")
        if theirs != block:
            raise refuse(f"it has blocks of {theirs} bytes and the tier of {block}")
        if count != len(sizes):
            raise refuse(f"it has {count} buffers and the group {len(sizes)}")
        file = cls(fd, sizes, block, path, None)
        if (nbytes, nbytes) != (file.nbytes, about.st_size):
            raise refuse(f"it has {about.st_size} bytes, and its header says {nbytes}: {file.nbytes} are right")
        file._read_header(refuse)
        file._set_direct(True)
        return file

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._starts[-1][1]

    @property
    def _header_bytes(self) -> int:
        return padded(_HEAD.size + 8 * len(self.sizes) + 4 * len(self._sums) + 4)

    def _read_header(self, refuse: Callable[[str], DamagedBackupError]) -> None:
        text = os.pread(self._fd.fileno(), self._header_bytes, 0)
        split = _HEAD.size + 8 * len(self.sizes)
        end = split + 4 * len(self._sums)
        if len(text) < end + 4 or zlib.crc32(text[:end]) != int.from_bytes(text[end : end + 4], "little"):
            raise refuse("the checksum of its header differs")
        if np.frombuffer(text[_HEAD.size : split], "<u8").tolist() != list(self.sizes):
            raise refuse("its buffers have other sizes")
        self._sums = np.frombuffer(text[split:end], "<u4").tolist()

    def _allocate(self) -> None:
        """Allocate disk blocks for the whole file if the file system can do this, so that several threads can write at
        once.
        """
        try:
            _in_room(os.posix_fallocate, self._fd.fileno(), 0, self.nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    def _set_direct(self, direct: bool) -> None:
        """Set or clear ``O_DIRECT``, by which reads and writes bypass the page cache. If the file system refuses,
        nothing changes.
        """
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(self._fd.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(self._fd.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
            self.direct = direct

    def _transfer(self, function: Callable[..., int], room: Bytes, position: int) -> int:
        """Call ``function``, ``os.preadv`` or ``os.pwritev``, for the memory ``room`` at ``position`` (bytes) in the
        file. Returns the number of bytes. If the file system refuses direct access, the call is repeated without
        ``O_DIRECT``. Raises OSError.
        """
        try:
            return function(self._fd.fileno(), [room.data], position)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            # A file system may refuse direct reads and writes, or require a larger alignment than PAGE: go on without
            # them.
            self._set_direct(False)
            return function(self._fd.fileno(), [room.data], position)

    def blocks(self, index: int) -> list[FileBlock]:
        """Return the blocks of the buffer with the number ``index``, in the order of their positions."""
        (number, position), size = self._starts[index], self.sizes[index]
        return [
            FileBlock(number + nth, position + offset, offset, min(self.block, size - offset))
            for nth, offset in enumerate(range(0, size, self.block))
        ]

    def write(self, blocks: Sequence[FileBlock], room: Bytes) -> None:
        """Write adjacent ``blocks`` from the aligned memory ``room``, and record their checksums. Each block is padded
        with zeros to a multiple of 4096 bytes. Raises OSError.
        """
        start = blocks[0].position
        for block in blocks:
            stop = block.position - start + block.nbytes
            self._sums[block.number] = zlib.crc32(room[stop - block.nbytes : stop].data)
            room[stop : padded(stop)] = 0
        self._write_at(start, room[: padded(stop)])

    def _write_at(self, position: int, data: Bytes) -> None:
        done = 0
        while done < data.nbytes:
            done += _in_room(self._transfer, os.pwritev, data[done:], position + done)

    def read(self, blocks: Sequence[FileBlock], room: Bytes, names: Sequence[int | None]) -> None:
        """Read adjacent ``blocks`` into the aligned memory ``room``, and verify their checksums. ``names`` has the
        index of each block for errors, or None.

        Raises
        ------
        DamagedBackupError
            A checksum differs, or the file was truncated. The error's ``block`` is the entry of ``names`` for the
            damaged block.
        OSError
            The file cannot be read.
        """
        start, last = blocks[0].position, blocks[-1]
        done, end = 0, padded(last.position - start + last.nbytes)
        while done < end:
            step = self._transfer(os.preadv, room[done:end], start + done)
            if not step:
                break
            done += step
        for block, name in zip(blocks, names, strict=True):
            stop = block.position - start + block.nbytes
            if done < stop or zlib.crc32(room[stop - block.nbytes : stop].data) != self._sums[block.number]:
                where = f"{size_text(block.nbytes)} at {block.position} of {self._path or 'a file without a name'}"
                why = f"{where} are damaged: their checksum differs, or the file was truncated"
                raise DamagedBackupError(why, name)

    def seal(self) -> None:
        """Complete a file that gets a name: write its header, flush the file to disk, and give it its name. An earlier
        file of this name is replaced. No effect for a file without a name. Raises OSError.
        """
        if self._path is None:
            return
        text = bytearray(_HEAD.pack(_MAGIC, _VERSION, self.block, len(self.sizes), self.nbytes))
        text += np.array(self.sizes, "<u8").tobytes() + np.array(self._sums, "<u4").tobytes()
        text += zlib.crc32(text).to_bytes(4, "little")
        room = aligned(self._header_bytes)
        room[: len(text)] = np.frombuffer(text, np.uint8)
        self._write_at(0, room)
        # The bytes are flushed before the file gets its name. Otherwise a power failure could leave a named file with
        # incomplete bytes.
        os.fdatasync(self._fd.fileno())
        if self._part is not None:
            before = None
            with contextlib.suppress(OSError):
                before = Fd(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
            os.rename(self._part, self._path)
            self._part = None
            folder = Fd(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            os.fsync(folder.fileno())
            if before is not None:
                _close(before)

    def discard(self) -> None:
        """Delete the file if it is incomplete. Idempotent."""
        part, self._part = self._part, None
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink()

    def __del__(self) -> None:
        if getattr(self, "_part", None) is not None:
            self.discard()
        # In a garbage cycle the finaliser of `_fd` may have run first and closed the descriptor.
        if hasattr(self, "_fd") and not self._fd.closed:
            _close(self._fd)
