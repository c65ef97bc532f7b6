"""Arrays, and copies of boxes from and to arrays. A *box* is a number of planes of the same number of rows of bytes.

An ordinary array has all its memory from the start, in rows, as documented. In a sparse array only some tiles have
memory. A mapped tile is 64 KiB of memory with the tile's elements in rows. An unmapped tile reads as zero and discards
writes. Mip levels smaller than a tile share one block of 64 KiB, the tail.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from streamalloc.simulator.banks import Banks
from streamalloc.simulator.constants import BLOCK, STEP, TILE_SIZE, Dim3, new_handle, round_up
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import NotModelled, Result
from streamalloc.simulator.memory import Bytes, Shape, Side, rows_at, view_address
from streamalloc.simulator.physical import CreatedMemory
from streamalloc.simulator.scheduler import Operation

# Numbers of elements of a tile in x, y and z, by the size of an element in bytes (observed on H200:
# test_sparse_arrays).
_TILES_2D = {1: (256, 256, 1), 2: (256, 128, 1), 4: (128, 128, 1), 8: (128, 64, 1), 16: (64, 64, 1)}
_TILES_3D = {1: (64, 32, 32), 2: (32, 32, 32), 4: (32, 32, 16), 8: (32, 16, 16), 16: (16, 16, 16)}

Tile = tuple[int, int, int, int, int, int]
"""Key of a piece of 64 KiB in an array: device, mip level (or :data:`TAIL` or :data:`WHOLE`), layer, and x, y and z
counted in tiles.
"""
TAIL = -1
"""Value in place of the level: the piece is the mip tail, one block for all levels that are smaller than a tile."""
WHOLE = -2
"""Value in place of the level: the piece is a part of an array with deferred mapping, which has no tiles. x is the
number of the part.
"""
_MAP_NORESERVE = 0x4000


@dataclass(frozen=True)
class ArrayLayout:
    """Description of an array. ``layers``: number of layers; 0 if the array is not layered. ``extent``: numbers of
    elements in x, y and z of one layer.
    """

    extent: Dim3
    layers: int
    solid: bool
    """Whether the array has three dimensions."""
    element: int
    """Size of an element in bytes."""
    levels: int = 1
    mipmapped: bool = False
    sparse: bool = True
    deferred: bool = False
    """Whether the array gets its memory later, as a whole (flag CUDA_ARRAY3D_DEFERRED_MAPPING)."""
    described: Dim3 = (0, 0, 0)
    """Tuple of format, number of channels and flags, as in the descriptor of the array."""
    line: bool = False
    """Whether the array has one dimension."""

    @property
    def size(self) -> int:
        """Size in bytes of the elements of all levels and layers."""
        return self.start_of(self.levels)

    @property
    def required(self) -> int:
        """Bytes of memory that an array with deferred mapping needs (observed on H200: test_sparse_arrays).

        A row is padded to a multiple of 64 bytes, and the rows to whole groups of 8. In a plane, the number of groups
        is rounded up to a multiple of a power of two: the smallest power that is not below the number, but at most 16.
        In a volume, the number of planes is rounded up in this way, and the number of groups is not.
        """
        total = 0
        for level in range(self.levels):
            width, height, depth = self.extent_of(level)
            rows, most = -(-height // 8), 1 if self.solid else 16
            rows = round_up(rows, min(most, 1 << (rows - 1).bit_length()))
            planes = round_up(depth, min(16, 1 << (depth - 1).bit_length()))
            total += round_up(width * self.element, 64) * 8 * rows * planes
        return round_up(total * max(self.layers, 1), TILE_SIZE)

    def start_of(self, level: int) -> int:
        """Return the offset of a level in the memory of an ordinary array, in bytes."""
        return sum(self.bytes_of(above) for above in range(level)) * max(self.layers, 1)

    @property
    def tile(self) -> Dim3:
        return (_TILES_3D if self.solid else _TILES_2D)[self.element]

    def extent_of(self, level: int) -> Dim3:
        x, y, z = self.extent
        return max(x >> level, 1), max(y >> level, 1), max(z >> level, 1)

    def bytes_of(self, level: int) -> int:
        x, y, z = self.extent_of(level)
        return x * y * z * self.element

    @property
    def tail_first(self) -> int:
        """Number of the first level that is smaller than a tile. The number of levels if no level is smaller, and for
        an array that is not sparse.
        """
        if not self.sparse:
            return self.levels
        for level in range(self.levels):
            if any(length < tile for length, tile in zip(self.extent_of(level), self.tile, strict=True)):
                return level
        return self.levels

    @property
    def has_tail(self) -> bool:
        return self.tail_first < self.levels

    def check_tail(self) -> None:
        """Raise :class:`NotModelled` for a mip tail of a shape that no recording shows.

        These shapes are: a tail of more bytes than a tile, a mipmapped array without a level of whole tiles or without
        a tail, and the tail of a layered or three-dimensional array without mip levels.
        """
        first = self.tail_first
        size = sum(self.bytes_of(level) for level in range(first, self.levels))
        if self.mipmapped and not 0 < first < self.levels:
            raise NotModelled("the tail of a mipmapped array that is smaller than a tile, or has no smaller level")
        if size > TILE_SIZE or (self.has_tail and not self.mipmapped and (self.solid or self.layers)):
            raise NotModelled("the tail of an array of this shape")


@dataclass(eq=False)
class Storage:
    """Memory of an array, or of all levels of a mipmapped array. An ordinary array has all its bytes in :attr:`memory`;
    any other array has them in :attr:`tiles`.
    """

    context: Context
    layout: ArrayLayout
    memory: mmap.mmap | None = None
    """The bytes of an ordinary array; None for an array that gets its memory by cuMemMapArrayAsync."""
    tiles: dict[Tile, tuple[CreatedMemory, int]] = field(default_factory=dict)
    """For each mapped tile: the physical memory under it, and the offset in bytes in that memory."""
    queued: int = 0
    """Number of queued operations that use the memory."""

    def put(self, tile: Tile, backing: tuple[CreatedMemory, int] | None) -> None:
        """Set the memory under a tile. ``backing``: the physical memory and the offset in bytes in it; None: remove the
        memory.

        The number of tiles of the old memory (:attr:`.CreatedMemory.tiles`) is reduced. The caller has already raised
        that of the new memory.
        """
        before = self.tiles.pop(tile, None)
        if before is not None:
            before[0].tiles -= 1
        if backing is not None:
            self.tiles[tile] = backing

    def allocate(self) -> None:
        """Allocate the memory of an ordinary array. The bank of the device counts it in whole blocks of 2 MiB. Raises
        ``OSError`` if the operating system refuses.
        """
        self.memory = mmap.mmap(-1, self.layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.context.device.bank.used += round_up(self.layout.size, BLOCK)

    def clear(self) -> None:
        if self.memory is not None:
            self.context.device.bank.used -= round_up(self.layout.size, BLOCK)
            self.memory = None
        for tile in list(self.tiles):
            self.put(tile, None)

    def rows(self, part: Part, shape: Shape, z: int) -> Iterator[tuple[Bytes | None, int, int, tuple[int, int]]]:
        """Yield the pieces of plane ``z`` of a box that begins at ``part``.

        A piece is a tuple: the array's bytes (None for an unmapped tile), the row and the byte in the plane at which
        the piece begins, and its height in rows and width in bytes.
        """
        layout, z = self.layout, part.z + z
        if not layout.sparse:
            if self.memory is None:
                whole, offset = self.tiles[self.context.device.ordinal, WHOLE, 0, 0, 0, 0]
                base = whole.window.base + offset
            else:
                base = view_address(self.memory)
            width, height, _ = layout.extent_of(part.array.level)
            pitch = width * layout.element
            start = layout.start_of(part.array.level) + (z * height + part.y) * pitch + part.x
            piece = (shape.height, shape.width)
            yield rows_at(base + start, pitch, *piece), 0, 0, piece
            return
        for tile, y, x, piece, offset, pitch in self._segments(part, shape, z):
            backing = self.tiles.get(tile)
            if backing is None:
                yield None, y, x, piece
            else:
                memory, start = backing
                yield rows_at(memory.window.base + start + offset, pitch, *piece), y, x, piece

    def _segments(self, part: Part, shape: Shape, z: int) -> Iterator[tuple[Tile, int, int, tuple[int, int], int, int]]:
        """Yield the pieces of plane ``z`` of a box that begins at ``part``, one for each tile.

        A piece is a tuple: the tile, the row and the byte in the plane at which the piece begins, its height and width,
        its offset in the tile, and the pitch of the tile's rows in bytes.
        """
        layout, device, level = self.layout, self.context.device.ordinal, part.array.level
        layer, z = (z, 0) if layout.layers else (0, z)
        if layout.has_tail and level >= layout.tail_first:
            pitch = layout.extent_of(level)[0] * layout.element
            offset = sum(layout.bytes_of(above) for above in range(layout.tail_first, level)) + part.y * pitch + part.x
            yield (device, TAIL, layer, 0, 0, 0), 0, 0, (shape.height, shape.width), offset, pitch
            return
        columns, rows, slices = layout.tile
        pitch = columns * layout.element
        top, right, bottom = part.y, part.x + shape.width, part.y + shape.height
        while top < bottom:
            row = top // rows
            below = min((row + 1) * rows, bottom)
            left = part.x
            while left < right:
                column = left // pitch
                beyond = min((column + 1) * pitch, right)
                offset = ((z % slices) * rows + top % rows) * pitch + left % pitch
                tile = (device, level, layer, column, row, z // slices)
                yield tile, top - part.y, left - part.x, (below - top, beyond - left), offset, pitch
                left = beyond
            top = below


@dataclass(eq=False)
class Array:
    """Object of a ``CUarray``: an array, or one level of a mipmapped array."""

    storage: Storage
    level: int = 0
    mipmap: MipmappedArray | None = None
    handle: int = field(default_factory=new_handle)


@dataclass(frozen=True)
class Part:
    """The position in an array at which a copied box begins: x in bytes, y in rows, z in layers or slices."""

    array: Array
    x: int
    y: int
    z: int

    def rows(self, shape: Shape, z: int) -> Bytes:
        """Return the bytes of plane ``z`` of a box, as an array of height times width. Unmapped tiles read as zero."""
        found: Bytes = np.zeros((shape.height, shape.width), np.uint8)
        for stored, y, x, (height, width) in self.array.storage.rows(self, shape, z):
            if stored is not None:
                found[y : y + height, x : x + width] = stored
        return found

    def store(self, shape: Shape, z: int, rows: Bytes) -> None:
        """Write ``rows`` to plane ``z`` of a box. Bytes for unmapped tiles are discarded."""
        for stored, y, x, (height, width) in self.array.storage.rows(self, shape, z):
            if stored is not None:
                stored[:] = rows[y : y + height, x : x + width]


@dataclass(eq=False)
class MipmappedArray:
    """Object of a ``CUmipmappedArray``. Its levels are arrays with the same storage."""

    storage: Storage
    mipmap: ClassVar[None] = None
    """Always None. An :class:`Array` that is a level of a mipmapped array names that array in this attribute."""
    handle: int = field(default_factory=new_handle)


class Remap(Operation):
    """Operation of ``cuMemMapArrayAsync``. In stream order it maps memory to tiles, or unmaps the memory of tiles."""

    def __init__(self, changes: list[tuple[Storage, Tile, tuple[CreatedMemory, int] | None]]) -> None:
        self._changes = changes
        for storage, _, backing in changes:
            storage.queued += 1
            if backing is not None:
                backing[0].tiles += 1

    def step(self) -> bool:
        for storage, tile, backing in self._changes:
            storage.queued -= 1
            storage.put(tile, backing)
        return True


class BoxCopy(Operation):
    """Operation that copies a box, from or to an array or between rows of memory, a few planes per step.

    If memory was unmapped since the call, the copy ends, and later calls in the context fail
    (CUDA_ERROR_ILLEGAL_ADDRESS); the process does not crash.
    """

    def __init__(self, banks: Banks, context: Context, shape: Shape, target: Part | Side, source: Part | Side) -> None:
        self._banks = banks
        self._context = context
        self._shape = shape
        self._target = target
        self._source = source
        self._done = 0
        self._planes = max(STEP // (shape.width * shape.height), 1)
        self.heavy: bool = shape.size > STEP
        self._memory = [
            (side.address, side.span(shape), banks.arenas.find(side.address) is not None, side is target)
            for side in (target, source)
            if isinstance(side, Side)
        ]
        self._queue(1)

    def _queue(self, change: int) -> None:
        for side in (self._target, self._source):
            if isinstance(side, Part):
                side.array.storage.queued += change

    def step(self) -> bool:
        stop = min(self._done + self._planes, self._shape.depth)
        if not all(self._banks.is_there(*memory) for memory in self._memory):
            self._context.error = self._context.error or Result.CUDA_ERROR_ILLEGAL_ADDRESS
            stop = self._done = self._shape.depth
        for z in range(self._done, stop):
            self._target.store(self._shape, z, self._source.rows(self._shape, z))
        self._done = stop
        if stop < self._shape.depth:
            return False
        self._queue(-1)
        return True

    def touches(self, start: int, end: int) -> bool:
        return any(simulated and at < end and start < at + size for at, size, simulated, _ in self._memory)
