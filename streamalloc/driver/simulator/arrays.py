"""Sparse arrays: which of their tiles have memory, and moving bytes between tiles and ordinary memory.

A tile is 64 KiB of the memory it is mapped to, its elements in rows. A tile without memory reads as zero and drops
what is written. Mip levels smaller than a tile share one block of 64 KiB, the tail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .banks import Banks
from .constants import STEP, TILE_SIZE, new_handle
from .contexts import Context
from .errors import NotModelled, Result
from .physical import Memory
from .timeline import Operation

# Elements of a tile in each dimension, by the bytes of an element (observed on H200: test_sparse_arrays).
_TILES_2D = {1: (256, 256, 1), 2: (256, 128, 1), 4: (128, 128, 1), 8: (128, 64, 1), 16: (64, 64, 1)}
_TILES_3D = {1: (64, 32, 32), 2: (32, 32, 32), 4: (32, 32, 16), 8: (32, 16, 16), 16: (16, 16, 16)}

Extent = tuple[int, int, int]
"""Elements in x, y and z."""
Tile = tuple[int, int, int, int, int, int]
"""Tile: device, level (or TAIL), layer, then x, y and z in tiles."""
Bytes = npt.NDArray[np.uint8]
TAIL = -1


def _rows(address: int, pitch: int, shape: tuple[int, int]) -> Bytes:
    """Memory at an address as rows of bytes."""
    height, width = shape
    memory = memoryview((ctypes.c_ubyte * ((height - 1) * pitch + width)).from_address(address))
    rows: Bytes = np.ndarray(shape, np.uint8, memory, strides=(pitch, 1))
    return rows


@dataclass(frozen=True)
class Layout:
    """Description of a sparse array. ``layers`` is 0 without layers; ``extent`` is that of one layer."""

    extent: Extent
    layers: int
    solid: bool
    """Three-dimensional."""
    element: int
    """Bytes."""
    levels: int = 1
    mipmapped: bool = False

    @property
    def tile(self) -> Extent:
        return (_TILES_3D if self.solid else _TILES_2D)[self.element]

    def extent_of(self, level: int) -> Extent:
        x, y, z = self.extent
        return max(x >> level, 1), max(y >> level, 1), max(z >> level, 1)

    def bytes_of(self, level: int) -> int:
        x, y, z = self.extent_of(level)
        return x * y * z * self.element

    @property
    def tail_first(self) -> int:
        """The first level that is smaller than a tile; as many as there are levels where none is."""
        for level in range(self.levels):
            if any(length < tile for length, tile in zip(self.extent_of(level), self.tile, strict=True)):
                return level
        return self.levels

    @property
    def has_tail(self) -> bool:
        return self.tail_first < self.levels

    def check_tail(self) -> None:
        """Refuse a mip tail of a shape that was not observed: larger than a tile, or before levels of whole tiles."""
        first = self.tail_first
        size = sum(self.bytes_of(level) for level in range(first, self.levels))
        if self.mipmapped and not 0 < first < self.levels:
            raise NotModelled("the tail of a mipmapped array that is smaller than a tile, or has no smaller level")
        if size > TILE_SIZE or (self.has_tail and not self.mipmapped and (self.solid or self.layers)):
            raise NotModelled("the tail of an array of this shape")

    def tail_offset(self, level: int) -> int:
        return sum(self.bytes_of(above) for above in range(self.tail_first, level))


@dataclass(eq=False)
class Storage:
    """The tiles of an array, or of all levels of a mipmapped one, and the memory behind them."""

    context: Context
    layout: Layout
    tiles: dict[Tile, tuple[Memory, int]] = field(default_factory=dict)
    queued: int = 0
    """Operations on it that are not done yet."""

    def put(self, tile: Tile, backing: tuple[Memory, int] | None) -> None:
        """Put memory behind a tile, or take it away. The new memory counts the tile already."""
        before = self.tiles.pop(tile, None)
        if before is not None:
            before[0].tiles -= 1
        if backing is not None:
            self.tiles[tile] = backing

    def clear(self) -> None:
        for tile in list(self.tiles):
            self.put(tile, None)


@dataclass(eq=False)
class Array:
    """A handle of an array, or of one level of a mipmapped one."""

    storage: Storage
    level: int = 0
    mipmap: MipmappedArray | None = None
    handle: int = field(default_factory=new_handle)


@dataclass(eq=False)
class MipmappedArray:
    storage: Storage
    levels: dict[int, Array] = field(default_factory=dict)
    handle: int = field(default_factory=new_handle)


@dataclass(eq=False)
class Arrays:
    """The arrays of a machine by their handles."""

    arrays: dict[int, Array] = field(default_factory=dict)
    mipmapped: dict[int, MipmappedArray] = field(default_factory=dict)

    def destroy(self, array: Array) -> None:
        """Destroy an array. For a level of a mipmapped array, only the handle ends."""
        del self.arrays[array.handle]
        if array.mipmap is not None:
            del array.mipmap.levels[array.level]
        else:
            array.storage.clear()

    def destroy_mipmapped(self, mipmap: MipmappedArray) -> None:
        del self.mipmapped[mipmap.handle]
        for level in mipmap.levels.values():
            del self.arrays[level.handle]
        mipmap.storage.clear()

    def forget(self, context: Context) -> None:
        """The arrays of a context end with it."""
        for mipmap in [one for one in self.mipmapped.values() if one.storage.context is context]:
            self.destroy_mipmapped(mipmap)
        for array in [one for one in self.arrays.values() if one.storage.context is context]:
            self.destroy(array)


class Remap(Operation):
    """The moment when tiles get memory or lose it."""

    def __init__(self, changes: list[tuple[Storage, Tile, tuple[Memory, int] | None]]) -> None:
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


@dataclass(frozen=True)
class Box:
    """A part of an array: x in bytes, z in layers or slices."""

    x: int
    y: int
    z: int
    width: int
    height: int
    depth: int


@dataclass(frozen=True)
class Linear:
    """Ordinary memory as rows of a box; ``keep`` keeps it alive."""

    address: int
    pitch: int
    slice_pitch: int
    keep: bytes | None = None

    def span(self, box: Box) -> int:
        """Bytes from the first to behind the last."""
        return (box.depth - 1) * self.slice_pitch + (box.height - 1) * self.pitch + box.width


class TileCopy(Operation):
    """Moves a box between an array and ordinary memory, some slices at a time."""

    def __init__(self, banks: Banks, context: Context, array: Array, box: Box, linear: Linear, into: bool) -> None:
        self._banks = banks
        self._context = context
        self._array = array
        self._box = box
        self._linear = linear
        self._into = into
        self._done = 0
        self._slices = max(STEP // (box.width * box.height), 1)
        self._simulated = banks.arenas.find(linear.address) is not None
        self.heavy: bool = box.width * box.height * box.depth > STEP
        array.storage.queued += 1

    def step(self) -> bool:
        linear, box = self._linear, self._box
        stop = min(self._done + self._slices, box.depth)
        if not self._banks.is_there(linear.address, linear.span(box), self._simulated, write=not self._into):
            self._context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS
            stop = self._done = box.depth
        for z in range(self._done, stop):
            rows = _rows(linear.address + z * linear.slice_pitch, linear.pitch, (box.height, box.width))
            self._move(rows, box.z + z)
        self._done = stop
        if self._done < box.depth:
            return False
        self._array.storage.queued -= 1
        return True

    def touches(self, start: int, end: int) -> bool:
        first = self._linear.address
        return self._simulated and first < end and start < first + self._linear.span(self._box)

    def _move(self, rows: Bytes, z: int) -> None:
        for tile, y, x, shape, offset, pitch in self._segments(z):
            part = rows[y : y + shape[0], x : x + shape[1]]
            backing = self._array.storage.tiles.get(tile)
            if backing is None:
                if not self._into:
                    part[:] = 0
                continue
            memory, start = backing
            stored = _rows(memory.window.address + start + offset, pitch, shape)
            if self._into:
                stored[:] = part
            else:
                part[:] = stored

    def _segments(self, z: int) -> Iterator[tuple[Tile, int, int, tuple[int, int], int, int]]:
        """A slice of the box, tile by tile: the tile, where in the slice its part begins (row and byte), the shape
        of the part, where in the tile it begins, and the tile's pitch.
        """
        box, layout, level = self._box, self._array.storage.layout, self._array.level
        device = self._context.device.ordinal
        layer, z = (z, 0) if layout.layers else (0, z)
        if layout.has_tail and level >= layout.tail_first:
            pitch = layout.extent_of(level)[0] * layout.element
            offset = layout.tail_offset(level) + box.y * pitch + box.x
            yield (device, TAIL, layer, 0, 0, 0), 0, 0, (box.height, box.width), offset, pitch
            return
        columns, rows, slices = layout.tile
        pitch = columns * layout.element
        top, right, bottom = box.y, box.x + box.width, box.y + box.height
        while top < bottom:
            row = top // rows
            below = min((row + 1) * rows, bottom)
            left = box.x
            while left < right:
                column = left // pitch
                beyond = min((column + 1) * pitch, right)
                offset = ((z % slices) * rows + top % rows) * pitch + left % pitch
                tile = (device, level, layer, column, row, z // slices)
                yield tile, top - box.y, left - box.x, (below - top, beyond - left), offset, pitch
                left = beyond
            top = below
