"""Real memory at simulated addresses: anonymous files, reservations of addresses, and tables by address.

Physical memory is a ``memfd``: it can be mapped several times, in several processes, and uses no memory until it is
written. A range of addresses is reserved as an inaccessible mapping. To put memory under a part of it, the file is
mapped over that part. To release the memory, the inaccessible mapping is restored, and a hole is punched into the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
from collections import deque
from ctypes import c_int, c_long, c_size_t, c_void_p
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamalloc.driver.processes import mapped_ranges
from streamalloc.formats.ranges import Extent, Intervals
from streamalloc.simulator.constants import CHUNK
from streamalloc.simulator.errors import undo_by

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = mmap.MAP_ANONYMOUS, 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_RESERVED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MAP_FAILED = c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
_libc.mremap.argtypes = (c_void_p, c_size_t, c_size_t, c_int, c_void_p)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.fallocate.argtypes = (c_int, c_int, c_long, c_long)
_libc.madvise.argtypes = (c_void_p, c_size_t, c_int)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, size, protection, flags, fd, offset)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(got)


def _unmap(address: int, size: int) -> None:
    if size:
        _libc.munmap(address, size)


class Physical:
    """Physical memory: a sparse anonymous file of ``size`` bytes. It has no device address; mappings give it addresses.
    ``name``: last part of the file's name. Raises ``OSError`` if the operating system refuses.
    """

    kept: bool = False
    """Whether the file keeps the contents of discarded ranges, because mappings of other processes may still read
    them.
    """
    lent: bool = False
    """Whether another process may have a file descriptor of this memory."""

    def __init__(self, name: str, size: int) -> None:
        self.size: int = size
        self.fd: int = os.memfd_create(f"streamalloc:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with undo_by(self.close):
            os.ftruncate(self.fd, size)

    @classmethod
    def adopt(cls, fd: int) -> Physical:
        """Return an object for an existing file. The object owns the descriptor ``fd``."""
        physical = cls.__new__(cls)
        physical.fd = fd
        physical.size = os.fstat(fd).st_size
        return physical

    def seal(self) -> None:
        """Seal the file against shrinking, so that a use of its mappings can never fault."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def lend(self) -> int:
        """Return a new file descriptor of this memory for another process.

        The file is opened again and locked. The lock lasts until the last duplicate of the descriptor is closed and all
        its mappings are gone, in any process. So this process can test whether the descriptor is still in use.
        """
        self.seal()
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        with undo_by(os.close, fd):
            fcntl.flock(fd, fcntl.LOCK_SH)
        self.lent = True
        return fd

    @property
    def is_elsewhere(self) -> bool:
        """Whether a lent descriptor, or a mapping made by it, still exists in any process."""
        if not self.lent:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def extend(self, size: int) -> int:
        """Extend the file by ``size`` bytes. Returns the offset of the new part."""
        offset = self.size
        os.ftruncate(self.fd, offset + size)
        self.size += size
        return offset

    def discard(self, offset: int, size: int) -> None:
        """Discard the contents of a range, and give its pages back to the operating system, unless :attr:`kept`
        is set.
        """
        if self.kept:
            return
        _libc.fallocate(self.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, size)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Addresses:
    """Addresses for large ranges, shared by all machines of the process.

    A range gets the lowest free addresses, as on an H200 (observed on H200: test_physical_memory), unless its caller
    chooses the addresses (:meth:`take_at`).
    """

    def __init__(self) -> None:
        self._taken = Intervals()
        self._taken.add(0, _LOWEST)
        self._taken.add(*_KEPT_BY_DRIVER)

    def take(self, size: int, alignment: int) -> int:
        """Reserve the lowest free range of ``size`` bytes whose address is a multiple of ``alignment``, and return the
        address; 0 if there is none.

        The range is inaccessible, except for freed memory in it that is kept readable.
        """
        taken, looked = self._taken, False
        while True:
            base = _lowest(taken, size, alignment)
            if base + size > _HIGHEST:
                return 0
            if _claim(base, size):
                self._taken.add(base, base + size)
                return base
            if looked:
                return 0
            taken, looked = _mapped_now(self._taken), True

    def take_at(self, base: int, size: int) -> bool:
        """Reserve the range of ``size`` bytes at ``base``. Returns False if an address in it is taken."""
        placed = _place(base, size)
        if placed:
            self._taken.add(base, base + size)
        return placed

    def leave(self, base: int, size: int) -> None:
        self._taken.remove(base, base + size)


_LOWEST, _HIGHEST = 0x302000000, 1 << 46
_KEPT_BY_DRIVER = (1 << 40, (1 << 40) + (64 << 20))


def _lowest(taken: Intervals, size: int, alignment: int) -> int:
    """Return the lowest address at which ``size`` bytes do not overlap ``taken``. The address is a multiple of
    ``alignment``.
    """
    base = 0
    for start, end in taken:
        if base + size <= start:
            break
        base = max(base, -(-end // alignment) * alignment)
    return base


def _claim(base: int, size: int) -> bool:
    """Reserve a range. Returns False if another mapping overlaps it.

    Freed memory in the range that was kept readable stays readable.
    """
    end = base + size
    gaps: list[tuple[int, int]] = []
    at = base
    within = sorted((max(start, base), min(start + kept, end)) for start, kept, _ in _kept)
    for start, stop in [*((one, two) for one, two in within if one < two), (end, end)]:
        if at < start:
            if not _place(at, start - at):
                for gap in gaps:
                    _unmap(*gap)
                return False
            gaps.append((at, start - at))
        at = stop
    _forget_kept(base, end)
    return True


def _place(base: int, size: int) -> bool:
    """Reserve exactly these addresses. Returns False if one of them is taken."""
    try:
        got = _mmap(base, size, _PROT_NONE, _RESERVED | _MAP_FIXED_NOREPLACE)
    except OSError:
        return False
    if got != base:  # Linux before 4.17 may choose another address, because it takes the address as a hint only.
        _unmap(got, size)
    return got == base


def _mapped_now(taken: Intervals) -> Intervals:
    """Return ``taken`` together with all mappings of this process, because other code maps addresses too."""
    found = _process_maps()
    for base, size, _ in _kept:
        found.remove(base, base + size)
    for one, two in taken:
        found.add(one, two)
    return found


# -- memory that is not simulated --------------------------------------------------------------------------------

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Advice values of madvise.
_USER_END = 1 << 63


def _process_maps(rights: str = "") -> Intervals:
    """Return the ranges that this process has mapped with the permissions ``rights``: "r", "rw", "x", or "" for any."""
    found = Intervals()
    for start, end, given in mapped_ranges():
        if rights in given:
            found.add(start, end)
    return found


def is_host_memory(address: int, size: int) -> bool:
    """Whether the host may read and write a range. False if the range contains freed memory that was kept readable."""
    end = address + size
    kept = any(start < end and address < start + length for start, length, _ in _kept)
    return not kept and is_accessible(address, size, write=True)


def is_accessible(address: int, size: int, write: bool = False) -> bool:
    """Whether this process may now read each page of a range. ``write``: whether it may also write. The test
    (``madvise``) may allocate pages of the range that were never used.
    """
    first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + size
    if end > _USER_END:
        return False
    if not _libc.madvise(first, end - first, _POPULATE_WRITE if write else _POPULATE_READ):
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        return False
    # EINVAL: missing permissions, or a Linux before 5.14. Only the list of mappings, which is slower, shows which.
    return _process_maps("rw" if write else "r").covers(address, end)


def is_code(address: int) -> bool:
    """Whether the memory at an address is executable by this process."""
    global _code
    if not _code.covers(address, address + 1):
        _code = _process_maps("x")
    return _code.covers(address, address + 1) and is_accessible(address, 1)


_code = Intervals()
"""Ranges that were found to be executable, so that they need not be looked up again."""


class ReservedExtent(Extent):
    """Range of reserved addresses, parts of which can be mapped. All sizes and offsets are in bytes.

    With ``hint``, the range is placed there if these addresses are free. With ``low`` and no ``hint``, it is placed at
    the lowest free addresses. In all other cases the operating system chooses. Except at a ``hint``, the address is a
    multiple of ``alignment``. If a file ``fd`` is given (-1: none), all of the range is mapped to it, from ``offset``
    on. Raises OSError if the operating system refuses.
    """

    def __init__(
        self, size: int, alignment: int, fd: int = -1, offset: int = 0, *, low: bool = False, hint: int = 0
    ) -> None:
        self.size = size
        self.readable: int = 0
        """Number of bytes from the start that read as :data:`FREED` after the range is closed."""
        self.mapped: Intervals = Intervals()
        if hint:
            self.base: int = hint if _addresses.take_at(hint, size) else 0
        else:
            self.base = _addresses.take(size, max(alignment, CHUNK) if size >= CHUNK else alignment) if low else 0
        self.is_placed: bool = self.base != 0
        """Whether this module chose the address; False if the operating system chose it."""
        if not self.is_placed:
            raw = _mmap(None, size + alignment, _PROT_NONE, _RESERVED)
            # The highest aligned addresses are kept, so that the operating system places the next range directly below.
            self.base = (raw + alignment) // alignment * alignment
            _unmap(raw, self.base - raw)
            _unmap(self.base + size, raw + alignment - self.base)
        self._open = True
        if fd >= 0:
            with undo_by(self.close):
                self.map(self.base, size, fd, offset)

    def map(self, start: int, size: int, fd: int, offset: int) -> None:
        """Map ``size`` bytes of a file, from ``offset`` on, at address ``start``, readable and writable. Raises
        ``OSError`` if the operating system refuses.
        """
        _mmap(start, size, _PROT_READ_WRITE, _MAP_FIXED | _MAP_SHARED | _MAP_NORESERVE, fd, offset)
        self.mapped.add(start, start + size)

    def map_again(self, other: ReservedExtent) -> None:
        """Map all of this reservation to the file of ``other``, from the offset in the file at which ``other`` begins.

        This works without a descriptor of the file. Raises ``OSError`` if the operating system refuses; the reservation
        is then closed.
        """
        # With an old size of 0, mremap(2) makes a second mapping of a shared file.
        with undo_by(self.close):
            if _libc.mremap(other.base, 0, self.size, _MREMAP_MAYMOVE | _MREMAP_FIXED, self.base) == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), f"mremap to {self.size} bytes")
        self.mapped.add(self.base, self.end)

    def unmap(self, start: int, size: int) -> None:
        # Fails if the process cannot have more mappings. The pages then stay, which is safe: no call uses them.
        with contextlib.suppress(OSError):
            _mmap(start, size, _PROT_NONE, _MAP_FIXED | _RESERVED)
        self.mapped.remove(start, start + size)

    def close(self) -> None:
        """Unmap the range (``munmap``). Its first :attr:`readable` bytes stay mapped, and read as :data:`FREED`.

        These bytes are unmapped when newer closed ranges exceed the limits for such bytes. Idempotent.
        """
        if not self._open:
            return
        self._open, readable = False, self.readable
        if readable:
            keep_readable(self.base, self.base + readable)
            _kept.append((self.base, readable, self.size))
        _unmap(self.base + readable, self.size - readable)
        if self.is_placed:
            _addresses.leave(self.base, self.size)
        while len(_kept) > 1 and (
            len(_kept) > _FREED_RANGES
            or sum(kept for _, kept, _ in _kept) > _FREED_KEPT
            or sum(reserved for _, _, reserved in _kept) > _FREED_RESERVED
        ):
            start, size, _ = _kept.popleft()
            _unmap(start, size)


class ReservedRange(ReservedExtent):
    """A reservation of cuMemAddressReserve. Only such a range can be freed by cuMemAddressFree and mapped by
    cuMemMap.
    """


FREED = 0xDB
"""Byte that NumPy arrays over freed memory read. Writes by such arrays change no simulated memory."""
_FREED_BYTES = 4 << 20
_FREED_KEPT = 64 << 30
_FREED_RANGES = 256
_FREED_RESERVED = 8 << 40
"""Limits for all freed ranges together that are kept readable: ``_FREED_KEPT`` for their bytes, ``_FREED_RANGES`` for
their number, ``_FREED_RESERVED`` for the bytes of the former reservations. The newest range is kept in any case. The
last limit exists because a new reservation of equal size cannot get the addresses of a kept range. ``_FREED_BYTES`` is
the size of the file that is mapped at the ranges, repeatedly.
"""


@functools.cache
def _freed_file() -> Physical:
    file = Physical("freed", _FREED_BYTES)
    with undo_by(file.close):
        os.write(file.fd, bytes((FREED,)) * _FREED_BYTES)
    return file


def keep_readable(start: int, end: int) -> None:
    """Make addresses without memory read as :data:`FREED`, so that a read by a NumPy array over freed memory does not
    kill the process.

    If the operating system allows no more mappings, the addresses stay as they are.
    """
    with contextlib.suppress(OSError):
        for at in range(start, end, _FREED_BYTES):
            size = min(end - at, _FREED_BYTES)
            _mmap(at, size, _PROT_READ_WRITE, _MAP_FIXED | _MAP_PRIVATE | _MAP_NORESERVE, _freed_file().fd)


_kept: deque[tuple[int, int, int]] = deque()
"""Freed ranges that are kept readable, oldest first: tuples of address, size, and bytes of the former reservation."""


def _forget_kept(start: int, end: int) -> None:
    """Remove a range from :data:`_kept`, because its addresses are reserved again."""
    for _ in range(len(_kept)):
        base, size, reserved = _kept.popleft()
        for low, high in ((base, min(base + size, start)), (max(base, end), base + size)):
            if low < high:
                _kept.append((low, high - low, reserved))


_addresses = Addresses()


def window(fd: int, offset: int, size: int) -> ReservedExtent:
    """Map ``size`` bytes of a file at an address of the operating system's choice, for work on memory that has no
    simulated address. Raises ``OSError`` if the operating system refuses.
    """
    return ReservedExtent(size, mmap.PAGESIZE, fd, offset)


def view_address(source: Any) -> int:
    """Return the address of a contiguous buffer object of any shape, which may be read-only. Raises ``TypeError`` for
    an object without the buffer protocol, and ``ValueError`` for a buffer that is not contiguous.
    """
    return int(np.frombuffer(source, np.uint8).ctypes.data)


# -- rows of bytes -----------------------------------------------------------------------------------------------

Bytes = npt.NDArray[np.uint8]


class Shape(NamedTuple):
    """Shape of a copy: bytes per row, rows per plane, number of planes."""

    width: int
    height: int = 1
    depth: int = 1

    @property
    def size(self) -> int:
        return self.width * self.height * self.depth


class Side(NamedTuple):
    """Ordinary memory (no array) on one side of a copy."""

    address: int
    pitch: int = 0
    """Bytes from the start of a row to the start of the next row."""
    plane: int = 0
    """Bytes from the start of a plane to the start of the next plane."""
    fits: bool = True
    """Whether each row ends within the pitch and the last row within the height that the caller gave. Both count from
    the offsets of the copy in its row and plane.
    """
    skipped: int = 0
    """Bytes between the address that the caller gave and ``address``, the first byte of the copy."""
    data: bytes | None = None
    """The bytes of the side, if the call has read them already; None if the operation reads them when it runs."""

    def span(self, shape: Shape) -> int:
        """Return the number of bytes from the first to the last byte of a copy, including gaps between rows and
        planes.
        """
        return (shape.depth - 1) * self.plane + (shape.height - 1) * self.pitch + shape.width

    def read(self, shape: Shape) -> Side:
        """Return this side with a copy of its bytes. Later writes to the memory do not change the copy."""
        data = ctypes.string_at(self.address, self.span(shape))
        return self._replace(address=view_address(data), data=data)

    def rows(self, shape: Shape, z: int) -> Bytes:
        """Return plane ``z`` of the memory as an array of rows of bytes, without copying."""
        return rows_at(self.address + z * self.plane, self.pitch, shape.height, shape.width)

    def store(self, shape: Shape, z: int, rows: Bytes) -> None:
        self.rows(shape, z)[:] = rows


def rows_at(address: int, pitch: int, height: int, width: int) -> Bytes:
    """Return memory as an array of ``height`` rows of ``width`` bytes. ``pitch``: bytes from the start of a row to that
    of the next.
    """
    memory = memoryview((ctypes.c_ubyte * ((height - 1) * pitch + width)).from_address(address))
    rows: Bytes = np.ndarray((height, width), np.uint8, memory, strides=(pitch, 1))
    return rows
