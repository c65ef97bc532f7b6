"""Arrays: how they are made, what they are, and copies of rows to and from them."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda, runtime

from .functions import ARRAY, BITS, ENDS, Functions, copy_kind, set_end
from .translation import address

_FORMATS = {pair: number for number, pair in BITS.items()}


def _descriptor(desc: Any, extent: tuple[int, int, int], flags: int) -> Any:
    """The CUDA_ARRAY3D_DESCRIPTOR of an array."""
    made = cuda.CUDA_ARRAY3D_DESCRIPTOR()
    bits = [int(getattr(desc, one)) for one in "xyzw"]
    kind = int(desc.f), bits[0]
    if kind not in _FORMATS or any(one not in (0, bits[0]) for one in bits):
        raise NotImplementedError(f"not modelled: arrays of the format {kind}")
    made.Format = cuda.CUarray_format(_FORMATS[kind])
    made.NumChannels, made.Flags = sum(one > 0 for one in bits), flags
    made.Width, made.Height, made.Depth = extent
    return made


class ArrayFunctions(Functions):
    """cudaMalloc*Array, cudaArrayGetInfo, cudaMemcpy*Array."""

    def cudaMallocArray(self, desc: Any, width: int, height: int, flags: int) -> Any:
        return self._array(_descriptor(desc, (width, height, 0), flags))

    def cudaMalloc3DArray(self, desc: Any, extent: Any, flags: int) -> Any:
        return self._array(_descriptor(desc, _extent(extent), flags))

    def _array(self, descriptor: Any) -> Any:
        return runtime().cudaArray_t(int(self.call("cuArray3DCreate", descriptor)))

    def cudaMallocMipmappedArray(self, desc: Any, extent: Any, numLevels: int, flags: int) -> Any:
        made = self.call("cuMipmappedArrayCreate", _descriptor(desc, _extent(extent), flags), numLevels)
        return runtime().cudaMipmappedArray_t(int(made))

    def cudaArrayGetInfo(self, array: Any) -> tuple[Any, Any, int]:
        described = self.call("cuArray3DGetDescriptor", cuda.CUarray(int(array)))
        extent = runtime().make_cudaExtent(int(described.Width), int(described.Height), int(described.Depth))
        kind, bits = BITS[int(described.Format)]
        channels = [bits if number < int(described.NumChannels) else 0 for number in range(4)]
        made = runtime().cudaChannelFormatDesc()
        made.x, made.y, made.z, made.w = channels
        made.f = runtime().cudaChannelFormatKind(kind)
        return made, extent, int(described.Flags)

    def cudaGetChannelDesc(self, array: Any) -> Any:
        return self.cudaArrayGetInfo(array)[0]

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy(self, width: int, height: int, kind: Any, ends: dict[str, tuple[Any, ...]], stream: Any) -> None:
        """A copy of rows. An end is a pointer and a pitch, or an array and offsets in bytes and rows."""
        copy = cuda.CUDA_MEMCPY3D()
        for (side, end), memory in zip(ends.items(), ENDS[copy_kind(kind)], strict=True):
            if len(end) == 3:
                setattr(copy, f"{side}MemoryType", cuda.CUmemorytype(ARRAY))
                setattr(copy, f"{side}Array", cuda.CUarray(int(end[0])))
                setattr(copy, f"{side}XInBytes", end[1])
                setattr(copy, f"{side}Y", end[2])
            else:
                set_end(copy, side, memory, address(end[0]), end[1])
        copy.WidthInBytes, copy.Height, copy.Depth = width, height, 1
        self.call("cuMemcpy3DAsync" if stream else "cuMemcpy3D", copy, *stream)

    def cudaMemcpy2DToArray(
        self,
        dst: Any,
        wOffset: int,
        hOffset: int,
        src: Any,
        spitch: int,
        width: int,
        height: int,
        kind: Any,
        *stream: Any,
    ) -> None:
        self._copy(width, height, kind, {"src": (src, spitch), "dst": (dst, wOffset, hOffset)}, stream)

    def cudaMemcpy2DFromArray(
        self,
        dst: Any,
        dpitch: int,
        src: Any,
        wOffset: int,
        hOffset: int,
        width: int,
        height: int,
        kind: Any,
        *stream: Any,
    ) -> None:
        self._copy(width, height, kind, {"src": (src, wOffset, hOffset), "dst": (dst, dpitch)}, stream)

    def cudaMemcpy2DArrayToArray(
        self,
        dst: Any,
        wOffsetDst: int,
        hOffsetDst: int,
        src: Any,
        wOffsetSrc: int,
        hOffsetSrc: int,
        width: int,
        height: int,
        kind: Any,
    ) -> None:
        ends = {"src": (src, wOffsetSrc, hOffsetSrc), "dst": (dst, wOffsetDst, hOffsetDst)}
        self._copy(width, height, kind, ends, ())

    # The bytes of a row; the driver refuses those that reach into the next one.

    def cudaMemcpyToArray(
        self, dst: Any, wOffset: int, hOffset: int, src: Any, count: int, kind: Any, *stream: Any
    ) -> None:
        self.cudaMemcpy2DToArray(dst, wOffset, hOffset, src, count, count, 1, kind, *stream)

    def cudaMemcpyFromArray(
        self, dst: Any, src: Any, wOffset: int, hOffset: int, count: int, kind: Any, *stream: Any
    ) -> None:
        self.cudaMemcpy2DFromArray(dst, count, src, wOffset, hOffset, count, 1, kind, *stream)

    def cudaMemcpyArrayToArray(
        self, dst: Any, wD: int, hD: int, src: Any, wS: int, hS: int, count: int, kind: Any
    ) -> None:
        self.cudaMemcpy2DArrayToArray(dst, wD, hD, src, wS, hS, count, 1, kind)


def _extent(extent: Any) -> tuple[int, int, int]:
    return int(extent.width), int(extent.height), int(extent.depth)
