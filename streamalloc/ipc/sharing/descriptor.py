"""What travels: a versioned binary format of our own, checked byte by byte before the driver is asked anything.

A descriptor names a mechanism, where the memory is, and what must come with it. Nothing in it is trusted: lengths,
versions, ranges and a checksum are checked here, the device and the size of what was imported by :func:`open`.
"""

from __future__ import annotations

import enum
import math
import re
import struct
import zlib
from typing import NamedTuple

__all__ = [
    "HEAD_BYTES",
    "MOST_CHUNKS",
    "NOWHERE",
    "PAYLOAD_BYTES",
    "Chunk",
    "Descriptor",
    "Flags",
    "Head",
    "Mechanism",
    "Part",
    "check_array",
    "head_of",
    "part_of",
    "with_array",
    "with_hold",
]


class Mechanism(enum.IntEnum):
    """How memory is shared."""

    POOL = 1
    """A pool: ``cuMemPoolExportToShareableHandle``."""
    POOL_POINTER = 2
    """An allocation of a pool: ``cuMemPoolExportPointer``."""
    PHYSICAL = 3
    """Physical memory, one or several chunks: ``cuMemExportToShareableHandle``."""
    LEGACY = 4
    """A block of ``cuMemAlloc``: ``cuIpcGetMemHandle``."""
    EVENT = 5
    """An event: ``cuIpcGetEventHandle``."""


_WITHOUT_MEMORY = (Mechanism.POOL, Mechanism.EVENT)
_MECHANISMS = {int(mechanism): mechanism for mechanism in Mechanism}
MAGIC = b"SAipc"
VERSION = 4
FABRIC = 8
"""``CU_MEM_HANDLE_TYPE_FABRIC`` as a descriptor's handle type: the handles are bytes, and in the descriptor."""

# The head, which stays the same from one allocation of a pool to the next: magic, version, mechanism, total length;
# device, origin, control block, endpoint; pool mark; flags, driver version, handle type; payload length, chunks.
_HEAD = struct.Struct("<5sHBI16s16s16s16sQIIIHH")
HEAD_BYTES = _HEAD.size
"""What is the same for all allocations of one pool that have their leases in one control block."""
# What does not: slot, generation, ready; offset, size, base size; hold.
_NUMBERS = struct.Struct("<IIIQQQQ")
_BODY = _HEAD.size + _NUMBERS.size
_HOLD = struct.Struct("<Q")
_FLAGS_AT = _HEAD.size - struct.calcsize("<IIIHH")
_HOLD_AT = _BODY - _HOLD.size
_CHUNK = struct.Struct("<16sQ")
_FABRIC_CHUNK = struct.Struct("<16sQ64s")
_CHECK = struct.Struct("<I")
NOWHERE = bytes(16)
"""The name of no control block and no endpoint."""
PAYLOAD_BYTES = 64
"""Of the driver's export data."""
# All that follows the head of an allocation: the numbers, the driver's export data as payload, the checksum.
_PLAIN = struct.Struct(_NUMBERS.format + f"{PAYLOAD_BYTES}s")
_PLAIN_BYTES = _HEAD.size + _PLAIN.size + _CHECK.size
_pack, _unpack, _crc = _PLAIN.pack, struct.Struct(_PLAIN.format + "I").unpack_from, zlib.crc32
_SHORTEST = _BODY + _CHECK.size
MOST_CHUNKS = 2048
"""The most chunks of physical memory in one descriptor."""
_MOST_PAYLOAD = 256
_MOST_BYTES = 1 << 48
_FLAGS = 0x1F
# A type as numpy writes it: byte order, kind, size in bytes.
_TYPE = re.compile(r"[<>|]([biufcV])([1-9][0-9]{0,3})")
_MOST_DIMENSIONS = 16
_HANDLE_TYPES = (0, 1, FABRIC)


class Chunk(NamedTuple):
    """A chunk of physical memory in a descriptor: 16 bytes that name it, its size, and its handle if that is bytes."""

    id: bytes
    nbytes: int
    fabric: bytes = b""
    """The 64 bytes of its fabric handle; empty where a file descriptor goes along instead."""


class Flags:
    """The bits of :attr:`Descriptor.flags`."""

    HELD = 1
    """The exporter counts this descriptor as on its way, until the mark that :attr:`Descriptor.hold` names has ended.
    Without one, one more handle comes along: that by which the message holds the allocation."""
    READ_ONLY = 2
    """Importers map the memory for reading only."""
    LEASED = 8
    """The slot is the allocation's lease, and importers say there when they open and close it."""
    GROWABLE = 4
    """``base_size`` is a capacity, and later descriptors of this origin may have more chunks."""
    ARRAY = 16
    """The part that is shared is an array: its type and shape are the end of the payload."""


class Part(NamedTuple):
    """Of the descriptor of an allocation, what opening one needs that is not in its head."""

    slot: int
    generation: int
    ready: int
    offset: int
    size: int
    base_size: int
    hold: int
    payload: bytes


_make = tuple.__new__  # what the classes here come down to, at a third of their cost


class Head:
    """The head of the descriptors of a pool's allocations; makes and reads what follows it."""

    __slots__ = ("_checksum", "data", "driver_version", "flags", "plain")

    def __init__(self, data: bytes) -> None:
        self.data: bytes = data
        self._checksum = zlib.crc32(data)
        _, _, _, total, *_, self.flags, self.driver_version, handle_type, extra, count = _HEAD.unpack(data)
        parts = (total, extra, count) == (_PLAIN_BYTES, PAYLOAD_BYTES, 0)
        self.plain: bool = parts and handle_type in (0, 1) and not self.flags & (~_FLAGS | Flags.ARRAY)
        """Whether all is right that it says of what follows, and that has the usual form."""

    @classmethod
    def of(
        cls,
        names: tuple[bytes, ...],
        pool_mark: int,
        flags: int,
        driver_version: int,
        handle_type: int,
    ) -> Head:
        """That of allocations of a pool; ``names`` are those of device, origin, control block and endpoint."""
        numbers = (pool_mark, flags, driver_version, handle_type, PAYLOAD_BYTES, 0)
        return cls(_HEAD.pack(MAGIC, VERSION, Mechanism.POOL_POINTER, _PLAIN_BYTES, *names, *numbers))

    def descriptor(
        self, slot: int, generation: int, ready: int, offset: int, size: int, base_size: int, payload: bytes
    ) -> bytes:
        """The descriptor of an allocation, or a part of it."""
        rest = _pack(slot, generation, ready, offset, size, base_size, 0, payload)
        return self.data + rest + _crc(rest, self._checksum).to_bytes(4, "little")

    def part(self, data: bytes) -> Part | None:
        """What bytes say that begin so, if all is right with them; else :meth:`Descriptor.from_bytes` tells.

        The head is :attr:`plain`.
        """
        if len(data) != _PLAIN_BYTES:
            return None
        numbers = _unpack(data, HEAD_BYTES)
        _, _, _, offset, size, base_size, _, _, said = numbers
        if _crc(data[HEAD_BYTES:-4], self._checksum) != said or not offset + size <= base_size <= _MOST_BYTES:
            return None
        return _make(Part, numbers[:8])


def with_hold(data: bytes, hold: int) -> bytes:
    """The same descriptor, held by a mark, or with 0 by the message that carries it."""
    body = bytearray(data[: -_CHECK.size])
    body[_FLAGS_AT] |= Flags.HELD
    _HOLD.pack_into(body, _HOLD_AT, hold)
    return bytes(body) + _CHECK.pack(zlib.crc32(body))


def check_array(dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` where an array of this type, as numpy writes it, and shape does not travel."""
    if not _TYPE.fullmatch(dtype) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(
            f"an array of {dtype} with {len(shape)} dimensions does not travel: allowed are plain numbers and bytes in "
            f"at most {_MOST_DIMENSIONS} dimensions; share the memory itself"
        )


def with_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The same descriptor, whose part is an array that :func:`check_array` takes."""
    described = Descriptor.from_bytes(data)
    return described._replace(flags=described.flags | Flags.ARRAY, dtype=dtype, shape=shape).to_bytes()


def _packed_array(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A type and a shape as the end of a payload: the type's text, the sizes, how many sizes, and the text's length."""
    return dtype.encode() + struct.pack(f"<{len(shape)}QBB", *shape, len(shape), len(dtype))


def _parted(payload: bytes, size: int) -> tuple[bytes, str, tuple[int, ...]]:
    """A payload without the type and shape at its end, and these, of an array of ``size`` bytes."""
    dimensions, letters = payload[-2:] if len(payload) >= 2 else (_MOST_DIMENSIONS + 1, 0)
    start = len(payload) - 2 - 8 * dimensions - letters
    if dimensions > _MOST_DIMENSIONS or start < 0:
        raise ValueError("the descriptor is damaged: its array has no place")
    dtype = payload[start : start + letters].decode("ascii", "replace")
    shape = struct.unpack_from(f"<{dimensions}Q", payload, start + letters)
    found = _TYPE.fullmatch(dtype)
    if found is None or math.prod(shape) * int(found[2]) != size:
        raise ValueError(f"the descriptor's array of {dtype!r} and {shape} is none of {size} bytes")
    return payload[:start], dtype, shape


class Descriptor(NamedTuple):
    """A descriptor's fields; sizes and offsets in bytes.

    Attributes
    ----------
    mechanism
        How it is shared.
    device
        The device's UUID, 16 bytes.
    origin
        16 bytes that name the pool, the block or the range: what is imported once and used by many descriptors.
    control_block, slot, generation, ready
        The exporter's control block, the allocation's slot there, which allocation it stands for, and the value of the
        slot's ``ready`` word from which on the contents are there. Zeros for ``control_block`` mean that there is none.
    endpoint
        Where handles can be had that did not come along; zeros where nowhere.
    driver_version
        The exporter's driver.
    handle_type
        ``CUmemAllocationHandleType`` of the handles.
    offset, size, base_size
        The part that is shared, and the size of the allocation that it is a part of.
    payload
        The driver's opaque bytes.
    chunks
        The chunks of physical memory, in the order of addresses; with fabric handles, all of them have one.
    hold
        What holds the allocation until this descriptor was opened: a word of the control block in the lower 32 bits,
        and its value in the upper ones. 0 means none.
    pool_mark
        The same for the word that changes when the pool has ended.
    dtype, shape
        With :attr:`Flags.ARRAY` the type and shape of the part that is shared.
    """

    mechanism: Mechanism
    device: bytes
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
    payload: bytes = b""
    chunks: tuple[Chunk, ...] = ()
    hold: int = 0
    pool_mark: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """The descriptor as it travels."""
        if self.handle_type == FABRIC:
            packed = b"".join(_FABRIC_CHUNK.pack(*chunk) for chunk in self.chunks)
        else:
            packed = b"".join(_CHUNK.pack(chunk.id, chunk.nbytes) for chunk in self.chunks)
        payload = self.payload + (_packed_array(self.dtype, self.shape) if self.flags & Flags.ARRAY else b"")
        total = _SHORTEST + len(payload) + len(packed)
        head = (self.flags, self.driver_version, self.handle_type, len(payload), len(self.chunks))
        body = _HEAD.pack(MAGIC, VERSION, self.mechanism, total, *self[1:5], self.pool_mark, *head)
        part = (self.slot, self.generation, self.ready, self.offset, self.size, self.base_size, self.hold)
        body += _NUMBERS.pack(*part) + payload + packed
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Descriptor:
        """The descriptor in bytes that were received.

        Raises
        ------
        ValueError
            They are not a descriptor, are damaged, or of a version that this library does not know.
        """
        if type(data) is not bytes:
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"a descriptor is bytes, not {type(data).__name__}")
            data = bytes(data)
        length = len(data)
        if length < _SHORTEST or not data.startswith(MAGIC):
            raise ValueError(f"these {length} bytes are no descriptor of shared memory")
        _, version, mechanism, said, *names, pool_mark, flags, driver_version, handle_type, extra, count = (
            _HEAD.unpack_from(data)
        )
        if version != VERSION:
            raise ValueError(f"a descriptor of version {version}: this library knows version {VERSION}")
        if said != length or zlib.crc32(data[: -_CHECK.size]) != int.from_bytes(data[-_CHECK.size :], "little"):
            raise ValueError("the descriptor is damaged: its length or checksum is wrong")
        slot, generation, ready, offset, size, base_size, hold = _NUMBERS.unpack_from(data, HEAD_BYTES)
        form = _FABRIC_CHUNK if handle_type == FABRIC else _CHUNK
        parts = _SHORTEST + extra + form.size * count
        if extra > _MOST_PAYLOAD or count > MOST_CHUNKS or length != parts:
            raise ValueError("the descriptor is damaged: its parts do not fit its length")
        kind = _MECHANISMS.get(mechanism)
        if kind is None:
            raise ValueError(f"a descriptor of mechanism {mechanism}: allowed are 1 to {max(Mechanism)}")
        if flags & ~_FLAGS or handle_type not in _HANDLE_TYPES:
            raise ValueError(f"the descriptor has unknown flags ({flags:#x}) or handle type ({handle_type})")
        if handle_type == FABRIC and kind is not Mechanism.PHYSICAL:
            raise ValueError(
                f"a descriptor of a {kind.name} with fabric handles: only physical memory is shared by them"
            )
        if base_size > _MOST_BYTES or offset + size > base_size:
            raise ValueError(f"the descriptor's {size} bytes at {offset} are outside of its {base_size} bytes")
        if kind in _WITHOUT_MEMORY and (count or base_size or flags):
            raise ValueError(f"a descriptor of a {kind.name} speaks of memory")
        at = _BODY + extra
        chunks: tuple[Chunk, ...] = ()
        if count:
            chunks = tuple(Chunk(*form.unpack_from(data, at + place * form.size)) for place in range(count))
            if any(not 0 < chunk.nbytes <= _MOST_BYTES for chunk in chunks):
                raise ValueError("a chunk of the descriptor has no size, or too large a one")
        payload, dtype = data[_BODY:at], ""
        shape: tuple[int, ...] = ()
        if flags & Flags.ARRAY:
            payload, dtype, shape = _parted(payload, size)
        # What cls() comes down to, at a third of its cost.
        words = (flags, slot, generation, ready, driver_version, handle_type, offset, size, base_size)
        return _make(cls, (kind, *names, *words, payload, chunks, hold, pool_mark, dtype, shape))


def head_of(described: Descriptor) -> Head:
    """How a descriptor begins."""
    return Head(described.to_bytes()[:HEAD_BYTES])


def part_of(described: Descriptor) -> Part:
    """What opening an allocation needs that is not in the head."""
    return _make(Part, (*described[6:9], *described[11:14], described.hold, described.payload))
