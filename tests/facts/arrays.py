"""Shorthand for facts about arrays: descriptors, regions to map, and copies between an array and the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.facts.support import PAGE, Answer, Rig, said, value

# Members of CUarray_format.
UINT8, UINT16, UINT32, INT8, HALF, FLOAT = 0x01, 0x02, 0x03, 0x08, 0x10, 0x20
# Flags of CUDA_ARRAY3D_DESCRIPTOR.
LAYERED, SURFACE, CUBEMAP, GATHER, DEPTH, SPARSE, DEFERRED = 0x01, 0x02, 0x04, 0x08, 0x10, 0x40, 0x80
MAP, UNMAP = 1, 2
HOST, DEVICE, ARRAY = 1, 2, 3  # CUmemorytype

# The bytes of a tile, whatever the array; a page of physical memory has 32.
TILE = 1 << 16

Bytes = npt.NDArray[np.uint8]
Extent = tuple[int, int, int]


class Tiling(NamedTuple):
    """The driver's answers for a sparse array: (width, height, depth) of a tile, and its mip tail."""

    tile: Extent
    tail_level: int = 0
    tail_size: int = 0
    flags: int = 0


class Arrays:
    """Makes sparse arrays, of four bytes an element unless something else is wanted, and memory for their tiles."""

    def __init__(self, rig: Rig) -> None:
        rig.need("SPARSE_CUDA_ARRAY_SUPPORTED")
        self.rig, self.raw = rig, rig.raw
        self.stream = rig.stream()
        self._made: dict[Any, Callable[[Any], Answer]] = {}

    def descriptor(
        self, width: int, height: int, depth: int = 0, format: int = UINT8, channels: int = 4, flags: int = SPARSE
    ) -> Any:
        descriptor = self.raw.CUDA_ARRAY3D_DESCRIPTOR()
        descriptor.Width, descriptor.Height, descriptor.Depth = width, height, depth
        descriptor.Format, descriptor.NumChannels = self.raw.CUarray_format(format), channels
        descriptor.Flags = flags
        return descriptor

    def create(self, *extent: int, **wanted: int) -> Answer:
        answer: Answer = self.raw.cuArray3DCreate(self.descriptor(*extent, **wanted))
        if said(answer) == "SUCCESS":
            self._made[answer[1]] = self.raw.cuArrayDestroy
        return answer

    def array(self, *extent: int, **wanted: int) -> Any:
        return value(self.create(*extent, **wanted))

    def mipmap(self, levels: int, *extent: int, **wanted: int) -> Any:
        made = value(self.raw.cuMipmappedArrayCreate(self.descriptor(*extent, **wanted), levels))
        self._made[made] = self.raw.cuMipmappedArrayDestroy
        return made

    def destroy(self, array: Any) -> str:
        return said(self._made.pop(array)(array))

    def close(self) -> None:
        """Destroy the arrays, when no work is left and while the memory in their tiles is still there."""
        self.rig.settle()
        for array in reversed(list(self._made)):
            self.destroy(array)

    def pool(self, pages: int = 1, **props: int) -> Any:
        """Physical memory for tiles."""
        return self.rig.memory(pages * PAGE, usage=1, **props)

    def tiling(self, array: Any) -> Tiling:
        of_mipmap = isinstance(array, self.raw.CUmipmappedArray)
        call = self.raw.cuMipmappedArrayGetSparseProperties if of_mipmap else self.raw.cuArrayGetSparseProperties
        properties = value(call(array))
        tile = properties.tileExtent
        tail = properties.miptailFirstLevel, properties.miptailSize, properties.flags
        return Tiling((int(tile.width), int(tile.height), int(tile.depth)), *map(int, tail))

    def region(
        self,
        array: Any,
        extent: tuple[int, ...] = (0, 0, 1),
        at: tuple[int, ...] = (0, 0, 0),
        pool: Any = None,
        offset: int = 0,
        operation: int = MAP,
        level: int = 0,
        layer: int = 0,
        tail: tuple[int, int] | None = None,
        mask: int = 1,
        flags: int = 0,
    ) -> Any:
        """A CUarrayMapInfo; ``tail``, an offset and a size, names a part of the mip tail instead of a level's."""
        info = self.raw.CUarrayMapInfo()
        if isinstance(array, self.raw.CUmipmappedArray):
            info.resourceType = self.raw.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
            info.resource.mipmap = array
        else:
            info.resourceType = self.raw.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
            info.resource.array = array
        kinds = self.raw.CUarraySparseSubresourceType
        if tail is None:
            info.subresourceType = kinds.CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL
            part = info.subresource.sparseLevel
            part.level, part.layer = level, layer
            part.offsetX, part.offsetY, part.offsetZ = at
            part.extentWidth, part.extentHeight, part.extentDepth = (*extent, 1, 1, 1)[:3]
        else:
            info.subresourceType = kinds.CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL
            info.subresource.miptail.layer = layer
            info.subresource.miptail.offset, info.subresource.miptail.size = tail
        info.memOperationType = self.raw.CUmemOperationType(operation)
        info.memHandleType = self.raw.CUmemHandleType.CU_MEM_HANDLE_TYPE_GENERIC
        if pool is not None:
            info.memHandle.memHandle = pool
        info.offset, info.deviceBitMask, info.flags = offset, mask, flags
        return info

    def submit(self, *regions: Any, stream: Any = None) -> str:
        """The result of cuMemMapArrayAsync, on the stream of these arrays unless another is given."""
        stream = self.stream if stream is None else stream
        return said(self.raw.cuMemMapArrayAsync(list(regions), len(regions), stream))

    def map(self, array: Any, extent: tuple[int, ...], pool: Any, **region: Any) -> str:
        return self.submit(self.region(array, extent, pool=pool, **region))

    def unmap(self, array: Any, extent: tuple[int, ...], **region: Any) -> str:
        return self.submit(self.region(array, extent, operation=UNMAP, **region))

    def write(self, array: Any, data: Bytes) -> None:
        """Copy the data to the begin of the array: by depth, height and bytes of a row."""
        assert self.copy(array, data, (1, *data.shape)[-3:]) == "SUCCESS"
        value(self.raw.cuStreamSynchronize(self.stream))

    def read(self, array: Any, shape: tuple[int, ...], of: Extent = (0, 0, 0)) -> Bytes:
        data = np.full(shape, 7, np.uint8)
        assert self.copy(data, array, (1, *shape)[-3:], of=of) == "SUCCESS"
        value(self.raw.cuStreamSynchronize(self.stream))
        return data

    def side(self, copy: Any, side: str, what: Any, at: Extent, pitch: int, height: int) -> None:
        """One end of a copy: an array, the address of device memory, or bytes of the host, from x, y and z."""
        kind = DEVICE if isinstance(what, int) else HOST if isinstance(what, np.ndarray) else ARRAY
        setattr(copy, f"{side}MemoryType", self.raw.CUmemorytype(kind))
        name = {HOST: "Host", DEVICE: "Device", ARRAY: "Array"}[kind]
        setattr(copy, side + name, what.ctypes.data if kind == HOST else what)
        numbers = (*at, 0, 0) if kind == ARRAY else (*at, pitch, height)
        for field, number in zip(("XInBytes", "Y", "Z", "Pitch", "Height"), numbers, strict=True):
            if hasattr(copy, side + field):
                setattr(copy, side + field, number)

    def copy(
        self,
        target: Any,
        source: Any,
        shape: tuple[int, ...],
        to: Extent = (0, 0, 0),
        of: Extent = (0, 0, 0),
        stream: Any = None,
    ) -> str:
        """``shape`` in bytes: depth, height, width; without a depth by cuMemcpy2DAsync."""
        plane = len(shape) == 2
        copy = self.raw.CUDA_MEMCPY2D() if plane else self.raw.CUDA_MEMCPY3D()
        *depth, copy.Height, copy.WidthInBytes = shape
        if depth:
            copy.Depth = depth[0]
        self.side(copy, "dst", target, to, shape[-1], shape[-2])
        self.side(copy, "src", source, of, shape[-1], shape[-2])
        call = self.raw.cuMemcpy2DAsync if plane else self.raw.cuMemcpy3DAsync
        return said(call(copy, self.stream if stream is None else stream))


def pattern(*shape: int) -> Bytes:
    """Bytes of which none is zero and tiles differ."""
    return np.random.default_rng(3).integers(1, 255, shape, dtype=np.uint8)
