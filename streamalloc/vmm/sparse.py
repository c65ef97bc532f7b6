"""Sparse CUDA arrays: textures and volumes that have memory only for some of their tiles (``cuMemMapArrayAsync``).

An array is divided into *tiles* of 64 KiB. Unmapped tiles read as zero and discard writes. The memory of mapped tiles
comes from a :class:`TilePool`. Mapping and unmapping are stream-ordered. An array with ``deferred=True`` is mapped only
as a whole.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import OutOfMemoryError, refused, size_text, undoing, unsupported
from streamalloc.core.internal import (
    Device,
    Fence,
    Stream,
    StreamLike,
    as_stream,
    check_device,
)
from streamalloc.core.properties import checked_number, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.vmm.ownership import HandleNode, OwnsNode, allocations_of
from streamalloc.vmm.physical_memory import PhysicalMemory
from streamalloc.vmm.properties import ArrayMapInfo

_LAYERED, _SPARSE, _DEFERRED = 0x01, 0x40, 0x80  # CUDA_ARRAY3D_LAYERED, _SPARSE, _DEFERRED_MAPPING
_SINGLE_TAIL = 1  # CU_ARRAY_SPARSE_PROPERTIES_SINGLE_MIPTAIL
_TILE = 1 << 16  # Size of a tile in bytes.
_MOST_NOTED = 64  # Above this number of streams, fences of finished work are removed.
_TAIL, _WHOLE = -1, -2  # Values of `_Tile.level` for the mip tail, and for an array that is mapped as a whole.
_FORMATS = {f"u{size}": f"UNSIGNED_INT{8 * size}" for size in (1, 2, 4)}
_FORMATS |= {f"i{size}": f"SIGNED_INT{8 * size}" for size in (1, 2, 4)}
_FORMATS |= {"f2": "HALF", "f4": "FLOAT"}

Region: TypeAlias = Sequence[slice] | None
"""Type of the argument ``region``, a part of a level: a slice in elements for each dimension. None means the whole
level.
"""


class MipTail(NamedTuple):
    """The smallest mipmap levels, which share memory: the value of :attr:`SparseArray.mip_tail`."""

    first_level: int
    """Number of the first level in the mip tail."""
    nbytes: int
    """Size of the mip tail in bytes. Unless :attr:`single`, each layer has a mip tail of this size."""
    single: bool
    """Whether all layers share one mip tail."""


class TilePool(Closes):
    """Physical memory for tiles of sparse arrays on one device.

    Memory of a tile that was unmapped on one stream can be mapped on another stream, which then waits for the unmap. ::

        pool = vmm.TilePool(device, 2 << 20)  # PhysicalMemory(device, 2 << 20, tile_pool=True)
        with pool, vmm.SparseArray(device, (4096, 4096), np.float32) as array:
            array.map(pool, (slice(0, 128), slice(0, 128)), stream=stream)

    Parameters
    ----------
    device
        Device of the memory.
    nbytes
        Size in bytes, a multiple of the granularity.
    round_up
        Whether to round the size up to the granularity.

    Raises
    ------
    NotSupportedError
        The device does not support sparse arrays.
    OutOfMemoryError, TypeError, ValueError
        As for :class:`PhysicalMemory`.
    """

    def __init__(self, device: Device, nbytes: int | str, *, round_up: bool = False) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of the memory."""
        self.memory: PhysicalMemory = PhysicalMemory(device, nbytes, tile_pool=True, round_up=round_up)
        """Physical memory of the tiles."""
        # Driver 580 crashes if the memory is released while an operation on it is queued. With this attribute, the
        # release of a dropped pool waits for the work of the device.
        self.memory._node.used_unmapped = (device.ordinal,)
        self.tiles: int = self.memory.nbytes // _TILE
        """Number of tiles of 64 KiB that the memory has, free or in use."""
        self._free: deque[_FreeTile] = deque((tile, None, None) for tile in range(self.tiles))
        """Free tiles. The tile that has been free longest comes first."""

    @property
    def free_tiles(self) -> int:
        """Number of tiles of 64 KiB that no array uses. Queued work may still use tiles that were unmapped."""
        return len(self._free)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called. :meth:`SparseArray.map` then raises ClosedError."""
        return self.memory.closed

    def close(self) -> None:
        """Wait for queued operations on the memory, and release the memory (``cuMemRelease``). Idempotent.

        Raises
        ------
        ValueError
            An array uses tiles of the pool: first unmap these tiles, or close the array.
        CudaError
            The driver refused a call.
        """
        if self.memory.closed:
            return
        if len(self._free) < self.tiles:
            mapped = f"{self.tiles - len(self._free)} of {self.tiles} tiles of this pool are mapped in arrays"
            raise ValueError(f"{mapped}: unmap them, or close the arrays")
        for fence in {fence for *_, fence in self._free if fence is not None}:
            fence.synchronize()
        self.memory.close()
        self._free = deque((tile, None, None) for tile, *_ in self._free)

    def _take(self, count: int, stream: Stream, in_a_row: bool) -> list[_FreeTile]:
        """Remove ``count`` free tiles from the pool and return them for use on ``stream``; with ``in_a_row``, adjacent
        tiles. Have the stream wait for earlier work on these tiles. Tiles that have been free longest come first,
        because the work on them is most likely done. Raises OutOfMemoryError, ClosedError.
        """
        self._check_open()
        if in_a_row:
            self._begin_with_row(count)
        if count > len(self._free):
            why = f"the tile pool has {len(self._free)} of {self.tiles} tiles free, and {count} are needed"
            figures = {"requested": count * _TILE, "free": len(self._free) * _TILE, "total": self.memory.nbytes}
            raise refused(OutOfMemoryError, "cuMemMapArrayAsync", why, **figures)
        taken = [self._free.popleft() for _ in range(count)]
        with undoing(lambda: self._put_back(taken)):
            mine = stream.of_this_thread()
            for fence in {fence for _, used, fence in taken if fence is not None and used is not mine}:
                fence.precede(stream)
        return taken

    def _begin_with_row(self, count: int) -> None:
        """Reorder the free tiles so that the first ``count`` tiles are adjacent. Raises OutOfMemoryError if there are
        no ``count`` adjacent free tiles.
        """
        ordered = sorted(self._free, key=operator.itemgetter(0))
        for first in range(len(ordered) - count + 1):
            if ordered[first + count - 1][0] - ordered[first][0] == count - 1:
                self._free = deque(ordered[first : first + count] + ordered[:first] + ordered[first + count :])
                return
        if count <= len(ordered):
            why = f"no {count} of the {len(ordered)} free tiles lie in a row"
            raise refused(OutOfMemoryError, "cuMemMapArrayAsync", why)

    def _put_back(self, taken: Sequence[_FreeTile]) -> None:
        self._free.extendleft(reversed(taken))

    def _text(self) -> str:
        return f" of {self.tiles} tiles on device {self.device.ordinal}, {len(self._free)} free"


_FreeTile: TypeAlias = "tuple[int, Stream | None, Fence | None]"
"""Number of a free tile, the stream that used the tile last, and a fence for this use; None and None if nothing must be
waited for.
"""


class _Array(HandleNode):
    """Node that destroys an array and returns its tiles. It is released before the memory of the tiles' pools."""

    def __init__(self, device: Device, mipmapped: bool) -> None:
        super().__init__(allocations_of(session_of(device)))
        self.device = device
        self.mipmapped = mipmapped
        self.map: dict[_Tile, tuple[TilePool, int]] = {}
        """Mapped tiles, each with its pool and its number in the pool."""
        self.last: dict[weakref.ref[Stream], Fence] = {}
        """A fence for the last map, unmap or copy, by stream. Handles of streams cannot be keys: the driver reuses
        handles, and the handle of the per-thread default stream names another stream on each thread.
        """

    def done(self, pool: TilePool) -> None:
        """If the array has no more tiles of ``pool``, allow the release of the pool before the array."""
        if all(user is not pool for user, _ in self.map.values()):
            pool.memory._state.bindings.pop(self, None)

    @property
    def users(self) -> tuple[int, ...]:
        """Ordinal of the array's device. The release waits for the device's queued work, because it is not documented
        that ``cuArrayDestroy`` waits.
        """
        return (self.device.ordinal,)

    def release(self) -> None:
        """Destroy the array, and return its tiles to their pools. The caller has made sure that no work on the array is
        queued. Raises CudaError.
        """
        try:
            with self.device.current():
                self.release_by("cuMipmappedArrayDestroy" if self.mipmapped else "cuArrayDestroy")
        finally:
            if self.gone:
                while self.map:
                    pool, slot = self.map.popitem()[1]
                    pool._free.append((slot, None, None))
                    self.done(pool)
                self.last.clear()


class _Tile(NamedTuple):
    """Position of a tile of an array. With ``level=_TAIL`` or ``_WHOLE``, the tile is the ``x``-th 64 KiB of a mip tail
    or of the whole array.
    """

    level: int
    layer: int
    z: int
    y: int
    x: int


class SparseArray(OwnsNode):
    """A CUDA array or mipmapped array into which memory is mapped tile by tile.

    Kernels use the array through texture or surface objects, which other libraries make from :attr:`handle`. ::

        with vmm.SparseArray(device, (4096, 4096), np.float32) as array:
            array.map(tiles, (slice(0, 128), slice(0, 128)), stream=stream)    # memory for one tile
            array.mapped_tiles()[0, 0]                                         # True

    Parameters
    ----------
    device
        Device of the array.
    shape
        Shape in elements: (height, width), (depth, height, width), or with ``layered`` (layers, height, width).
    dtype
        Type of one channel: an integer of 8, 16 or 32 bits, or a float of 16 or 32 bits, in native byte order.
    channels
        Number of channels per element: 1, 2 or 4.
    layered
        Whether the first of three dimensions counts layers.
    levels
        Number of mipmap levels; 0 makes an array without mipmaps.
    deferred
        Whether the array is only mapped and unmapped as a whole (``CUDA_ARRAY3D_DEFERRED_MAPPING``), with adjacent
        tiles of one pool. Without memory such an array cannot be copied, and a kernel that uses it fails, so that the
        context is lost.

    Raises
    ------
    NotSupportedError
        The device does not support sparse arrays, or arrays with deferred mapping.
    TypeError
        ``device`` is no Device, or ``shape``, ``dtype`` or ``levels`` has the wrong type.
    ValueError
        The driver has no arrays of this shape, type or number of channels.
    InvalidValueError
        The driver refuses the array, for example because a dimension is too large.
    """

    def __init__(
        self,
        device: Device,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.uint8,
        *,
        channels: int = 1,
        layered: bool = False,
        levels: int = 0,
        deferred: bool = False,
    ) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of the array."""
        self.deferred: bool = bool(deferred)
        """Whether the array is only mapped as a whole (``region`` None)."""
        self.shape: tuple[int, ...] = tuple(checked_number("shape", extent) for extent in shape)
        """Shape of level 0 in elements, including layers."""
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        """NumPy type of one channel."""
        self.channels: int = channels
        """Number of channels per element."""
        self.layered: bool = bool(layered)
        """Whether the first dimension counts layers."""
        self.levels: int = checked_number("levels", levels)
        """Number of mipmap levels; 0 if the array is not mipmapped."""
        self._node = _Array(device, bool(self.levels))
        kind = f"{self.dtype.kind}{self.dtype.itemsize}"
        if len(self.shape) not in (2, 3) or 0 in self.shape:
            raise ValueError(f"shape={shape!r}: allowed are two or three extents of one or more elements")
        if self.layered and len(self.shape) != 3:
            raise ValueError(f"shape={shape!r}: a layered array has three: layers, height, width")
        if kind not in _FORMATS or not self.dtype.isnative:
            raise ValueError(f"dtype={self.dtype}: allowed are {', '.join(_FORMATS)}, in native byte order")
        if channels not in (1, 2, 4):
            raise ValueError(f"channels={channels!r}: allowed are 1, 2 and 4")
        needed = "DEFERRED_MAPPING" if self.deferred else "SPARSE"
        if not device.attribute(f"{needed}_CUDA_ARRAY_SUPPORTED"):
            raise unsupported("cuArray3DCreate", "a device with such arrays", repr(device))
        with undoing(self.close):
            self._create(kind)

    def _create(self, kind: str) -> None:
        session = session_of(self.device)
        descriptor = cuda.CUDA_ARRAY3D_DESCRIPTOR()
        descriptor.Width, descriptor.Height = self.shape[-1], self.shape[-2]
        descriptor.Depth = self.shape[0] if len(self.shape) == 3 else 0
        descriptor.Format = getattr(cuda.CUarray_format, f"CU_AD_FORMAT_{_FORMATS[kind]}")
        descriptor.NumChannels = self.channels
        descriptor.Flags = (_DEFERRED if self.deferred else _SPARSE) | (_LAYERED if self.layered else 0)
        hint = f"an array of shape {self.shape}, {self.levels} levels: more than the device can have?"
        self.nbytes: int = 0
        """Bytes of memory that an array needs if it is mapped as a whole; 0 for other arrays."""
        self.mip_tail: MipTail | None = None
        """The mip tail; None if the array has none."""
        self.tile: tuple[int, ...] = self.level_shape()
        """Shape of a tile in elements: (height, width) or (depth, height, width). If the array is mapped as a whole,
        the shape of level 0 without layers.
        """
        with self.device.current():
            if self.levels:
                self._node._raw = session.call("cuMipmappedArrayCreate", descriptor, self.levels, hint=hint)
            else:
                self._node._raw = session.call("cuArray3DCreate", descriptor, hint=hint)
            if self.deferred:
                name = "cuMipmappedArrayGetMemoryRequirements" if self.levels else "cuArrayGetMemoryRequirements"
                self.nbytes = int(session.call(name, self._node.raw, self.device.ordinal).size)
                return
            name = "cuMipmappedArrayGetSparseProperties" if self.levels else "cuArrayGetSparseProperties"
            found = session.call(name, self._node.raw)
        extent = found.tileExtent
        extents = (int(extent.depth), int(extent.height), int(extent.width))
        self.tile = extents[1 if len(self.shape) == 2 or self.layered else 0 :]
        tail = MipTail(int(found.miptailFirstLevel), int(found.miptailSize), bool(int(found.flags) & _SINGLE_TAIL))
        self.mip_tail = tail if tail.nbytes else None

    @property
    def handle(self) -> int:
        """Driver handle (``CUarray`` or ``CUmipmappedArray``) as a number.

        Raises
        ------
        ClosedError
            The array was closed.
        """
        return int(self._checked_raw())

    @property
    def layers(self) -> int:
        """Number of layers; 1 if the array is not layered."""
        return self.shape[0] if self.layered else 1

    @property
    def tile_bytes(self) -> int:
        """Size of a tile in bytes, 64 KiB. If the array is mapped as a whole, the size of one layer of level 0."""
        return int(np.prod(self.tile)) * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Size of an element in bytes, with all its channels."""
        return self.dtype.itemsize * self.channels

    def level_shape(self, level: int = 0) -> tuple[int, ...]:
        """Return the shape of one level in elements, without layers. Raises TypeError or ValueError if the array has no
        such level.
        """
        most = max(self.levels, 1)
        if not 0 <= checked_type("level", level, int) < most:
            raise ValueError(f"level={level}: the array has {most}")
        extents = self.shape[1:] if self.layered else self.shape
        return tuple(max(extent >> level, 1) for extent in extents)

    def mapped_tiles(self, level: int = 0, layer: int = 0) -> npt.NDArray[np.bool_]:
        """Return an array of bool with the shape of a level in tiles: whether each tile of the level and layer is
        mapped. False for levels in the mip tail. Raises TypeError, ValueError if there is no such level or layer.
        """
        self._check_layer(layer)
        grid = tuple(-(-extent // step) for extent, step in zip(self.level_shape(level), self.tile, strict=True))
        found = np.full(grid, self.deferred and bool(self._node.map))
        for tile in self._node.map:
            if (tile.level, tile.layer) == (level, layer):
                found[(tile.z, tile.y, tile.x)[-len(grid) :]] = True
        return found

    def mapped(self, level: int = 0, layer: int = 0) -> npt.NDArray[np.bool_]:
        """Deprecated: use :meth:`mapped_tiles`, which has the same arguments and result."""
        warnings.warn("mapped() is deprecated: call mapped_tiles()", DeprecationWarning, stacklevel=2)
        return self.mapped_tiles(level, layer)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory of tile pools that the array uses."""
        return _TILE * len(self._node.map)

    def map(self, pool: TilePool, region: Region = None, *, level: int = 0, layer: int = 0, stream: StreamLike) -> None:
        """Map memory to the tiles of a region, stream-ordered (``cuMemMapArrayAsync``). The contents of the tiles are
        undefined.

        Parameters
        ----------
        pool
            Pool that the memory comes from.
        region
            A slice in elements for each dimension, which begins and ends at a tile or at the end of the level. None for
            the whole level, and for an array that is mapped as a whole.
        level, layer
            Number of the mipmap level, which is not in the mip tail, and of the layer.
        stream
            Stream of the array's device, in whose order the tiles are mapped.

        Raises
        ------
        OutOfMemoryError
            The pool has too few free tiles, or too few adjacent free tiles. Nothing is mapped.
        ValueError
            The region contains only a part of a tile, is outside of the level or is mapped already. Or the array has no
            such level or layer, or ``pool`` or the stream is of another device or driver.
        TypeError
            ``pool`` is no :class:`TilePool`, ``stream`` is no stream, or ``level`` or ``layer`` is no integer.
        ClosedError
            The array, the pool or the stream was closed.
        CaptureError
            The stream is being captured.
        CudaError
            The driver refused the call. Nothing is mapped.
        """
        self._map(self._tiles(region, level, layer), pool, stream)

    def unmap(self, region: Region = None, *, level: int = 0, layer: int = 0, stream: StreamLike) -> None:
        """Unmap the tiles of a region, stream-ordered (``cuMemMapArrayAsync``), and return their memory to the pools.

        Tiles that are not mapped are skipped. ``region``, ``level``, ``layer`` and ``stream`` as for :meth:`map`;
        raises the errors that :meth:`map` has for them.
        """
        self._unmap(self._tiles(region, level, layer), stream)

    def map_tail(self, pool: TilePool, *, layer: int = 0, stream: StreamLike) -> None:
        """Map the mip tail of a layer, or the one that all layers share, stream-ordered (``cuMemMapArrayAsync``).
        ``pool``, ``layer`` and ``stream`` as for :meth:`map`. Raises the errors of :meth:`map`, and ValueError if the
        array has no mip tail.
        """
        self._map(self._tail_tiles(layer), pool, stream)

    def unmap_tail(self, *, layer: int = 0, stream: StreamLike) -> None:
        """Unmap the mip tail of a layer, stream-ordered (``cuMemMapArrayAsync``). No effect if the tail is not mapped.
        ``layer`` and ``stream`` as for :meth:`map`. Raises the errors that :meth:`map_tail` has for them.
        """
        self._unmap(self._tail_tiles(layer), stream)

    def _map(self, tiles: Iterator[_Tile], pool: TilePool, stream: StreamLike) -> None:
        ordered = self._ordered(stream)
        checked_type("pool", pool, TilePool)
        if pool.device != self.device:
            raise ValueError(f"{pool!r} is not of {self.device!r}")
        wanted = list(tiles)
        for tile in wanted:
            if tile in self._node.map:
                place = f"the tile at {tile[-len(self.tile) :]} of level {tile.level}"
                place = {_TAIL: "the mip tail", _WHOLE: "the array"}.get(tile.level, place)
                raise ValueError(f"{place} is mapped already")
        taken = pool._take(len(wanted), ordered, self.deferred)
        given = {tile: (pool, slot) for tile, (slot, *_) in zip(wanted, taken, strict=True)}
        pool.memory._state.bindings[self._node] = None  # Orders the release: array, then memory.
        with undoing(lambda: self._node.done(pool)), undoing(lambda: pool._put_back(taken)):
            infos = [self._info(tile, pool, slot) for tile, (_, slot) in given.items()]
            # The driver maps a deferred array as a whole by one change, because its tiles are adjacent.
            self._submit(ordered, infos[:1] if self.deferred else infos)
        self._node.map.update(given)
        self._note(ordered)

    def _unmap(self, tiles: Iterator[_Tile], stream: StreamLike) -> None:
        ordered = self._ordered(stream)
        mapped = [tile for tile in tiles if tile in self._node.map]
        if not mapped:
            return
        self._submit(ordered, [self._info(tile, None, 0) for tile in (mapped[:1] if self.deferred else mapped)])
        fence = self._note(ordered)
        pools = set()
        for tile in mapped:
            pool, slot = self._node.map.pop(tile)
            pool._free.append((slot, ordered.of_this_thread(), fence))
            pools.add(pool)
        for pool in pools:
            self._node.done(pool)

    def copy_from(
        self, source: npt.NDArray[Any], stream: StreamLike, *, region: Region = None, level: int = 0, layer: int = 0
    ) -> None:
        """Copy a contiguous host array into a region of the array, stream-ordered (``cuMemcpy3DAsync``).

        ``source`` has the shape of the region, plus a last dimension if there are several channels. Unmapped tiles
        discard the bytes. ``region``, ``level`` and ``layer`` as for :meth:`map`, but the region may begin and end
        inside of tiles, and the level may be in the mip tail.

        Raises
        ------
        ValueError
            ``source`` has another shape or type or is not contiguous. Or the array has no such level or layer, or the
            region is empty or outside of the level. Or the stream is of another device or driver, or the array is
            mapped as a whole and has no memory.
        TypeError, ClosedError, CaptureError, CudaError
            ``stream`` is no stream, was closed or is being captured, the array was closed, ``level`` or ``layer`` is no
            integer, or the driver refused the call.
        """
        self._copy(np.asarray(source), stream, region, level, layer, to_array=True)

    def copy_to(
        self, target: npt.NDArray[Any], stream: StreamLike, *, region: Region = None, level: int = 0, layer: int = 0
    ) -> None:
        """Copy a region of the array into ``target``, a writable contiguous host array, stream-ordered
        (``cuMemcpy3DAsync``). Unmapped tiles give zeros. Parameters and errors as for :meth:`copy_from`, and TypeError
        if ``target`` is no writable numpy array.
        """
        if not isinstance(target, np.ndarray) or not target.flags.writeable:
            raise TypeError(f"target must be a writable numpy array, not {target!r}")
        self._copy(target, stream, region, level, layer, to_array=False)

    def close(self) -> None:
        """Wait for queued maps, unmaps and copies, then destroy the array and return its tiles to their pools
        (``cuArrayDestroy``, ``cuMipmappedArrayDestroy``). Idempotent. Raises CudaError if the driver refuses.
        """
        # Work may still use the array: it is not documented that `cuArrayDestroy` waits.
        for fence in self._node.last.values():
            fence.synchronize()
        if self._node.raw is not None:
            self._node.end()

    # -- the driver's structs --------------------------------------------------------------------------------

    def _info(self, tile: _Tile, pool: TilePool | None, slot: int) -> ArrayMapInfo:
        """Return the change that maps tile number ``slot`` of ``pool`` at ``tile``, or unmaps ``tile`` if ``pool`` is
        None.
        """
        common: dict[str, Any] = {"mipmapped": bool(self.levels), "device_bit_mask": 1 << self.device.ordinal}
        if pool is not None:
            common |= {"mem_handle": pool.memory.handle, "offset": slot * _TILE}
        if tile.level == _TAIL:
            common |= {"layer": tile.layer, "mip_tail": (tile.x * _TILE, _TILE)}
        elif tile.level != _WHOLE:
            shape, steps = self.level_shape(tile.level), self.tile
            starts = [index * step for index, step in zip(tile[-len(steps) :], steps, strict=True)]
            # The last tile ends where the level ends.
            extents = [min(step, extent - start) for start, step, extent in zip(starts, steps, shape, strict=True)]
            common |= {"level": tile.level, "layer": tile.layer}
            common |= {"offsets": (*starts[::-1], 0)[:3], "extents": (*extents[::-1], 1)[:3]}
        return ArrayMapInfo(self.handle, **common)

    def _submit(self, stream: Stream, changes: list[ArrayMapInfo]) -> None:
        infos = [one.to_driver() for one in changes]
        with self.device.current():
            session_of(self.device).call("cuMemMapArrayAsync", infos, len(infos), stream.checked_raw())

    def _note(self, stream: Stream) -> Fence:
        """Record a fence for the work that was just queued on ``stream``, and return the fence. :meth:`close` and the
        next use of the tiles wait for it.
        """
        last, key = self._node.last, weakref.ref(stream.of_this_thread())
        if len(last) > _MOST_NOTED:
            for done in [other for other, its in last.items() if its.done()]:
                del last[done]
        last[key] = fence = Fence(session_of(self.device), [stream])
        return fence

    def _copy(
        self, host: npt.NDArray[Any], stream: StreamLike, region: Region, level: int, layer: int, *, to_array: bool
    ) -> None:
        ordered = self._ordered(stream)
        if self.deferred and not self._node.map:
            raise ValueError(f"{self!r} has no memory, and is copied only with it: map() it first")
        starts, stops = self._bounds(region, level, layer)
        extents = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        wanted = (*extents, self.channels) if self.channels > 1 else extents
        if host.shape != wanted or host.dtype != self.dtype or not host.flags.c_contiguous:
            found = f"it has shape {host.shape} and {host.dtype}"
            raise ValueError(f"the host array must be contiguous, of shape {wanted} and {self.dtype}; {found}")
        session, width = session_of(self.device), extents[-1] * self.element_bytes
        z = layer if self.layered else starts[0] if len(starts) == 3 else 0
        ours, theirs = ("dst", "src") if to_array else ("src", "dst")
        copy = cuda.CUDA_MEMCPY3D()
        copy.WidthInBytes, copy.Height, copy.Depth = width, extents[-2], extents[0] if len(extents) == 3 else 1
        with self.device.current():
            raw = session.call("cuMipmappedArrayGetLevel", self._node.raw, level) if self.levels else self._node.raw
            for name, value in (
                (f"{theirs}MemoryType", cuda.CUmemorytype.CU_MEMORYTYPE_HOST),
                (f"{theirs}Host", host.ctypes.data),
                (f"{theirs}Pitch", width),
                (f"{theirs}Height", extents[-2]),
                (f"{ours}MemoryType", cuda.CUmemorytype.CU_MEMORYTYPE_ARRAY),
                (f"{ours}Array", raw),
                (f"{ours}XInBytes", starts[-1] * self.element_bytes),
                (f"{ours}Y", starts[-2]),
                (f"{ours}Z", z),
            ):
                setattr(copy, name, value)
            session.call("cuMemcpy3DAsync", copy, ordered.checked_raw())
        self._note(ordered)

    # -- checks of arguments ---------------------------------------------------------------------------------

    def _bounds(self, region: Region, level: int, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples with the start and stop indices of a region, in elements. Raises ValueError for a region,
        level or layer that the array does not have.
        """
        self._check_layer(layer)
        shape = self.level_shape(level)
        parts = (slice(None),) * len(shape) if region is None else region if isinstance(region, Sequence) else ()
        if len(parts) != len(shape) or not all(isinstance(part, slice) for part in parts):
            raise ValueError(f"region={region!r}: allowed are {len(shape)} slices")
        bounds = []
        for part, extent in zip(parts, shape, strict=True):
            start, stop = 0 if part.start is None else part.start, extent if part.stop is None else part.stop
            if part.step not in (None, 1) or not 0 <= start < stop <= extent:
                raise ValueError(f"region={region!r} is empty or outside of level {level}, which has shape {shape}")
            bounds.append((start, stop))
        starts, stops = zip(*bounds, strict=True)
        return starts, stops

    def _tiles(self, region: Region, level: int, layer: int) -> Iterator[_Tile]:
        if self.deferred:
            if region is not None or level or layer:
                raise ValueError(f"region={region!r}, level={level}, layer={layer}: {self!r} is mapped as a whole")
            yield from (_Tile(_WHOLE, 0, 0, 0, index) for index in range(-(-self.nbytes // _TILE)))
            return
        starts, stops = self._bounds(region, level, layer)
        if self.mip_tail is not None and level >= self.mip_tail.first_level:
            raise ValueError(f"level={level} is in the mip tail: map_tail() and unmap_tail() map it")
        shape = self.level_shape(level)
        ranges = []
        for start, stop, step, extent in zip(starts, stops, self.tile, shape, strict=True):
            if start % step or (stop % step and stop != extent):
                ends = f"at multiples of {self.tile} elements, or at the end of the level, which has shape {shape}"
                raise ValueError(f"region={region!r} cuts tiles, which begin and end {ends}")
            ranges.append(range(start // step, -(-stop // step)))
        for index in itertools.product(*ranges):
            yield _Tile(level, layer, *(0,) * (3 - len(index)), *index)

    def _tail_tiles(self, layer: int) -> Iterator[_Tile]:
        self._check_layer(layer)
        if self.mip_tail is None:
            raise ValueError(f"{self!r} has no mip tail: map all of it with map()")
        for index in range(-(-self.mip_tail.nbytes // _TILE)):
            yield _Tile(_TAIL, 0 if self.mip_tail.single else layer, 0, 0, index)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= checked_type("layer", layer, int) < self.layers:
            raise ValueError(f"layer={layer}: the array has {self.layers}")

    def _ordered(self, stream: StreamLike) -> Stream:
        self._checked_raw()
        ordered = as_stream(stream, session_of(self.device))
        if ordered.device != self.device:
            raise ValueError(f"{ordered!r} is not of {self.device!r}, whose array this is")
        ordered.refuse_capture("cuMemMapArrayAsync", "tiles cannot be mapped, and arrays not be copied, in a capture")
        return ordered

    def _text(self) -> str:
        state = "closed" if self._node.raw is None else f"{size_text(self.mapped_bytes)} mapped"
        return f" {' x '.join(map(str, self.shape))} of {self.channels} x {self.dtype}, {state}"
