"""Descriptors: a versioned binary format, checked byte by byte before any driver call.

A descriptor names the mechanism, the memory, and the handles that must come with it. It is untrusted input: this module
checks lengths, versions, ranges and a checksum. :func:`streamalloc.ipc.open` checks the device, and the size of the
imported memory.
"""

from __future__ import annotations

import enum
import math
import re
import struct
import zlib
from typing import NamedTuple


class Mechanism(enum.IntEnum):
    """The driver's mechanism by which memory is shared.

    Value of ``mechanism`` of a :class:`Descriptor`; :func:`share` chooses it by the kind of memory.
    """

    POOL = 1
    """A pool: ``cuMemPoolExportToShareableHandle``."""
    POOL_POINTER = 2
    """An allocation of a pool: ``cuMemPoolExportPointer``."""
    PHYSICAL = 3
    """Physical memory, one or several chunks: ``cuMemExportToShareableHandle``."""
    LEGACY = 4
    """An allocation of ``cuMemAlloc``: ``cuIpcGetMemHandle``."""
    EVENT = 5
    """An event: ``cuIpcGetEventHandle``."""


_MECHANISMS = {int(one): one for one in Mechanism}  # A call of the class takes ten times as long.
_WITHOUT_MEMORY = (Mechanism.POOL, Mechanism.EVENT)
MAGIC = b"SAipc"
VERSION = 5
FABRIC = 8
"""Value of ``CU_MEM_HANDLE_TYPE_FABRIC``. A fabric handle has 64 bytes, which travel in the descriptor."""

# Magic, version, total length; the first 16 fields of the class, in its order; payload length, number of chunks.
_HEAD = struct.Struct("<5sHIB16s16s16s16sIIIIIIQQQQQHH")
_FIELDS = 16
_CHUNK = struct.Struct("<16sQ")
_FABRIC_CHUNK = struct.Struct("<16sQ64s")
_CHECK = struct.Struct("<I")
_SHORTEST = _HEAD.size + _CHECK.size
NOWHERE = bytes(16)
"""16 zero bytes, an id that stands for no control block, no endpoint or no origin."""
MOST_CHUNKS = 2048
"""Largest number of chunks of physical memory in one descriptor, and in one epoch of a store."""
_MOST_PAYLOAD = 256
_MOST_BYTES = 1 << 48
_FLAGS = 0x1D
# Type of elements in NumPy's notation: byte order, kind, size in bytes.
_TYPE = re.compile(r"[<>|]([biufcV])([1-9][0-9]{0,3})")
_MOST_DIMENSIONS = 16
_HANDLE_TYPES = (0, 1, FABRIC)


class Foreign:
    """Base class of objects for memory and pools that another process owns. Only the owner can share such memory."""

    __slots__ = ()


class ChunkHandle(NamedTuple):
    """One chunk of physical memory in a descriptor.

    The field ``chunks`` of :class:`Descriptor` has a tuple of these.
    """

    id: bytes
    """Id of the memory (16 bytes), equal in all processes."""
    nbytes: int
    """Size of the chunk in bytes."""
    fabric: bytes = b""
    """The fabric handle, 64 bytes; empty if the chunk has a file descriptor instead."""


class Flags:
    """The bits of :attr:`Descriptor.flags`."""

    HELD = 1
    """The exporter keeps the memory until the mark :attr:`Descriptor.hold` changes. If ``hold`` is 0, one end of a pipe
    comes with the handles, and the exporter keeps the memory until that end is closed.
    """
    GROWABLE = 4
    """The memory is a growable buffer, and ``base_size`` is its capacity. Later descriptors with this ``origin`` may
    have more chunks.
    """
    LEASED = 8
    """The slot is the lease of the allocation: importers count their opens and closes in it."""
    ARRAY = 16
    """The shared part is an array; the payload ends with its type and shape."""


def check_array(dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` for an array that a descriptor cannot describe. Allowed are NumPy types of plain numbers and
    bytes, and at most 16 dimensions.
    """
    if not _TYPE.fullmatch(dtype) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(
            f"an array of {dtype} with {len(shape)} dimensions does not travel: allowed are plain numbers and bytes in "
            f"at most {_MOST_DIMENSIONS} dimensions; share the memory itself"
        )


def _pack_array(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the last part of an array's payload: NumPy type as ASCII, size of each dimension (u64, little-endian),
    number of dimensions (u8), length of the type (u8).
    """
    return dtype.encode() + struct.pack(f"<{len(shape)}QBB", *shape, len(shape), len(dtype))


def _split_array(payload: bytes, size: int) -> tuple[bytes, str, tuple[int, ...]]:
    """Split the payload of an array of ``size`` bytes into the driver's bytes, the NumPy type and the shape
    (:func:`_pack_array`). Raises ValueError if type or shape are damaged or give another size.
    """
    dimensions, letters = payload[-2:] if len(payload) >= 2 else (_MOST_DIMENSIONS + 1, 0)
    start = len(payload) - 2 - 8 * dimensions - letters
    if dimensions > _MOST_DIMENSIONS or start < 0:
        raise ValueError("the descriptor is damaged: its payload is too short for an array's type and shape")
    dtype = payload[start : start + letters].decode("ascii", "replace")
    shape = struct.unpack_from(f"<{dimensions}Q", payload, start + letters)
    found = _TYPE.fullmatch(dtype)
    if found is None or math.prod(shape) * int(found[2]) != size:
        raise ValueError(f"the descriptor's array of {dtype!r} and {shape} does not have {size} bytes")
    return payload[:start], dtype, shape


class Descriptor(NamedTuple):
    """The fields of a descriptor; sizes and offsets in bytes.

    :attr:`Shared.descriptor` has this class.

    Attributes
    ----------
    mechanism
        The driver's mechanism.
    device
        16 bytes: the device's UUID.
    origin
        16 bytes: the id of the pool or range, which is imported once for many descriptors. Zeros for everything else.
    control_block, slot, generation, ready
        Id of the exporter's control block (16 bytes, zeros if there is none), index of the slot, the slot's generation,
        and the value of its word ``ready`` that announces the contents.
    endpoint
        16 bytes that name the socket from which missing handles can be fetched; zeros if there is none.
    flags
        Bits of :class:`Flags`.
    driver_version
        The exporter's driver version, as ``cuDriverGetVersion`` gives it.
    handle_type
        ``CUmemAllocationHandleType`` of the handles.
    offset, size, base_size
        Offset and size of the shared part, and the size of the whole allocation.
    hold
        The mark that keeps the allocation until this descriptor is opened: its index in the lower 32 bits, its value in
        the upper 32. 0 means none.
    pool_mark
        The mark that changes when the pool has ended, in the same form.
    payload
        The driver's opaque export data.
    chunks
        The chunks of physical memory in the order of addresses. With fabric handles, every chunk has one.
    dtype, shape
        With :attr:`Flags.ARRAY`, NumPy type such as ``"<f4"`` and shape of the shared part; otherwise empty.
    """

    mechanism: Mechanism
    device: bytes = bytes(16)
    origin: bytes = bytes(16)
    control_block: bytes = bytes(16)
    endpoint: bytes = bytes(16)
    flags: int = 0
    slot: int = 0
    generation: int = 0
    ready: int = 0
    driver_version: int = 0
    handle_type: int = 0
    offset: int = 0
    size: int = 0
    base_size: int = 0
    hold: int = 0
    pool_mark: int = 0
    payload: bytes = b""
    chunks: tuple[ChunkHandle, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def handle_ids(self) -> list[bytes]:
        """Return the ids of the handles that importers need, in the order in which they travel.

        A message has all of these handles or none, because a channel carries each handle once. The pipe of a hold comes
        after the handles.
        """
        ids = [chunk.id for chunk in self.chunks if not chunk.fabric]
        if self.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
            ids = [self.origin]
        if self.control_block != NOWHERE:
            ids.append(self.control_block)
        return list(dict.fromkeys(ids))  # A chunk that is mapped several times has one handle.

    def to_bytes(self, hold: int | None = None) -> bytes:
        """Return the descriptor's bytes, with a checksum at the end.

        Parameters
        ----------
        hold
            The number of a hold's mark, or 0 for a pipe in the same message. None: the present :attr:`hold`.
        """
        fields = self if hold is None else self._replace(flags=self.flags | Flags.HELD, hold=hold)
        form, length = (_FABRIC_CHUNK, 3) if self.handle_type == FABRIC else (_CHUNK, 2)
        chunks = b"".join(form.pack(*chunk[:length]) for chunk in self.chunks) if self.chunks else b""
        payload = self.payload + (_pack_array(self.dtype, self.shape) if self.flags & Flags.ARRAY else b"")
        total = _SHORTEST + len(payload) + len(chunks)
        head = _HEAD.pack(MAGIC, VERSION, total, *fields[:_FIELDS], len(payload), len(self.chunks))
        body = head + payload + chunks
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Descriptor:
        """Return the fields of a received descriptor, after a check of all of them.

        Raises
        ------
        ValueError
            The bytes are not a descriptor, are damaged, or have another version.
        TypeError
            ``data`` is not bytes.
        """
        if type(data) is not bytes:
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"a descriptor is bytes, not {type(data).__name__}: bytes(shared) has those of share()")
            data = bytes(data)
        length = len(data)
        if length < _SHORTEST or not data.startswith(MAGIC):
            raise ValueError(f"these {length} bytes are no descriptor of shared memory")
        _, version, total, *fields, extra, count = _HEAD.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"a descriptor of version {version}: this library reads version {VERSION}")
        if total != length or zlib.crc32(data[: -_CHECK.size]) != int.from_bytes(data[-_CHECK.size :], "little"):
            raise ValueError("the descriptor is damaged: its length or checksum is wrong")
        form = _FABRIC_CHUNK if fields[_HANDLE_TYPE] == FABRIC else _CHUNK
        if extra > _MOST_PAYLOAD or count > MOST_CHUNKS or length != _SHORTEST + extra + form.size * count:
            raise ValueError("the descriptor is damaged: its parts do not fit its length")
        end = _HEAD.size + extra
        chunks = tuple(ChunkHandle(*parts) for parts in form.iter_unpack(data[end : -_CHECK.size])) if count else ()
        mechanism = _MECHANISMS.get(fields[0])
        if mechanism is None:
            raise ValueError(f"a descriptor of the unknown mechanism {fields[0]}")
        found = cls(mechanism, *fields[1:], data[_HEAD.size : end], chunks)  # type: ignore[call-arg]
        found._check()
        if found.flags & Flags.ARRAY:
            payload, dtype, shape = _split_array(found.payload, found.size)
            return found._replace(payload=payload, dtype=dtype, shape=shape)
        return found

    def _check(self) -> None:
        """Raise ``ValueError`` unless the fields are valid and consistent."""
        if self.flags & ~_FLAGS or self.handle_type not in _HANDLE_TYPES:
            raise ValueError(f"the descriptor has unknown flags ({self.flags:#x}) or handle type ({self.handle_type})")
        if self.handle_type == FABRIC and self.mechanism is not Mechanism.PHYSICAL:
            what = self.mechanism.name
            raise ValueError(f"a descriptor of a {what} with fabric handles: only physical memory is shared by them")
        if self.base_size > _MOST_BYTES or self.offset + self.size > self.base_size:
            raise ValueError(f"the descriptor's {self.size} bytes at {self.offset} are outside of its {self.base_size}")
        if self.flags & (Flags.LEASED | Flags.HELD) and self.control_block == NOWHERE:
            raise ValueError("the descriptor has a lease or a hold, but names no control block")
        if self.mechanism in _WITHOUT_MEMORY and (self.chunks or self.base_size or self.flags & ~Flags.HELD):
            raise ValueError(f"a descriptor of a {self.mechanism.name} has fields for memory")
        for chunk in self.chunks:
            if not 0 < chunk.nbytes <= _MOST_BYTES:
                raise ValueError(f"a chunk of the descriptor has 0 bytes or more than {_MOST_BYTES}")


_HANDLE_TYPE = Descriptor._fields.index("handle_type")
