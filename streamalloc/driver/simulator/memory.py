"""Real memory under simulated addresses: anonymous files, reservations of address space, and who lives where.

Physical memory is a ``memfd``: it can be mapped several times, in several processes, and costs nothing until
it is touched. An address range is reserved as an inaccessible mapping; backing a piece of it maps the file
over it, and releasing the piece puts the inaccessible mapping back and punches a hole into the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_left, bisect_right, insort
from typing import Generic, Protocol, TypeVar

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = mmap.MAP_ANONYMOUS, 0x4000
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, size, protection, flags, fd, offset)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(got)


class Physical:
    """Memory without an address: a sparse anonymous file."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(f"streamalloc:{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)

    def discard(self, offset: int, size: int) -> None:
        """Forget the contents of a range and give its pages back to the system."""
        _libc.fallocate(self.fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, size)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Intervals:
    """A set of addresses as disjoint, sorted, half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        kept = [
            (low, high)
            for a, b in zip(self._starts[first:last], self._ends[first:last], strict=True)
            for low, high in ((a, min(b, start)), (max(a, end), b))
            if low < high
        ]
        self._starts[first:last] = [low for low, _ in kept]
        self._ends[first:last] = [high for _, high in kept]

    def covers(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= end

    def __iter__(self) -> zip[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)


class Reservation:
    """A range of addresses of this process, of which pieces may be mapped."""

    def __init__(self, size: int, alignment: int) -> None:
        self.size = size
        self._raw_size = size + alignment
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._raw = _mmap(None, self._raw_size, _PROT_NONE, flags)
        self.base = -(-self._raw // alignment) * alignment
        self.mapped = Intervals()

    @property
    def end(self) -> int:
        return self.base + self.size

    def map(self, start: int, size: int, physical: Physical, offset: int) -> None:
        """Put ``physical`` at address ``start``, readable and writable."""
        _mmap(start, size, _PROT_READ_WRITE, _MAP_FIXED | _MAP_SHARED | _MAP_NORESERVE, physical.fd, offset)
        self.mapped.add(start, start + size)

    def unmap(self, start: int, size: int) -> None:
        flags = _MAP_FIXED | _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        _mmap(start, size, _PROT_NONE, flags)
        self.mapped.remove(start, start + size)

    def close(self) -> None:
        if self._raw_size:
            _libc.munmap(self._raw, self._raw_size)
            self._raw_size = 0


class Arena:
    """A reservation with its own physical memory, the same offset in both."""

    def __init__(self, name: str, size: int, alignment: int) -> None:
        self.reservation = Reservation(size, alignment)
        try:
            self.physical = Physical(name, size)
        except OSError:
            self.reservation.close()
            raise
        self.base = self.reservation.base

    def back(self, offset: int, size: int) -> None:
        self.reservation.map(self.base + offset, size, self.physical, offset)

    def release(self, offset: int, size: int) -> None:
        self.reservation.unmap(self.base + offset, size)
        self.physical.discard(offset, size)

    def close(self) -> None:
        self.reservation.close()
        self.physical.close()


class Bank:
    """The physical memory of one device, or of the host: how much there is and how much is taken."""

    def __init__(self, total: int, overhead: int = 0) -> None:
        self.total = total
        self.used = overhead

    @property
    def free(self) -> int:
        return self.total - self.used


class Extent(Protocol):
    """Anything with an address and a size."""

    base: int
    size: int


E = TypeVar("E", bound=Extent)


class AddressMap(Generic[E]):
    """Finds the one extent that holds an address.

    Most look-ups name the first byte of an extent; only others need the sorted list, so it is brought up to
    date then.
    """

    def __init__(self) -> None:
        self.at: dict[int, E] = {}
        self._sorted: list[int] = []
        self._unsorted: set[int] = set()

    def add(self, extent: E) -> None:
        self.at[extent.base] = extent
        self._unsorted.add(extent.base)

    def remove(self, extent: E) -> None:
        base = extent.base
        del self.at[base]
        if base in self._unsorted:
            self._unsorted.remove(base)
        else:
            del self._sorted[bisect_left(self._sorted, base)]

    def find(self, address: int) -> E | None:
        """The extent with ``base <= address < base + size``."""
        found = self.at.get(address)
        if found is not None:
            return found
        if self._unsorted:
            if len(self._unsorted) > 16:
                self._sorted = sorted(self.at)
            else:
                for base in self._unsorted:
                    insort(self._sorted, base)
            self._unsorted.clear()
        at = bisect_right(self._sorted, address) - 1
        if at < 0:
            return None
        found = self.at[self._sorted[at]]
        return found if address < found.base + found.size else None


def view_address(source: object) -> int:
    """Where an object with the buffer protocol keeps its bytes; read-only and any shape, but contiguous."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(view), 0)
    address = view.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return int(address)


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
