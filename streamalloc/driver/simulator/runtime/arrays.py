"""Arrays: how they are made, what they are, and copies of rows to and from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda, runtime

from .functions import BITS, ENDS, Functions, copy_kind, set_array, set_end
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


def _copies(target: int, source: int, *, rows: bool = True) -> Callable[..., None]:
    """A copy of several rows, or of bytes of one row. ``target`` and ``source`` are the arguments of the two ends: an
    array and offsets in bytes and rows, or a pointer and, with ``rows``, a pitch. The driver refuses bytes that reach
    into the next row.
    """

    def copy_rows(functions: Functions, *args: Any) -> None:
        ends, (width, *more) = (args[target : target + source], args[:target]), args[target + source :]
        height, kind, *stream = more if rows else (1, *more)
        copy = cuda.CUDA_MEMCPY3D()
        for side, memory, (pointer, *place) in zip(("src", "dst"), ENDS[copy_kind(kind)], ends, strict=True):
            if len(place) == 2:
                set_array(copy, side, pointer)
                setattr(copy, f"{side}XInBytes", place[0])
                setattr(copy, f"{side}Y", place[1])
            else:
                set_end(copy, side, memory, address(pointer), *(place or [width]))
        copy.WidthInBytes, copy.Height, copy.Depth = width, height, 1
        functions.call("cuMemcpy3DAsync" if stream else "cuMemcpy3D", copy, *stream)

    return copy_rows


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

    cudaMemcpy2DToArray = _copies(3, 2)
    cudaMemcpy2DFromArray = _copies(2, 3)
    cudaMemcpy2DArrayToArray = _copies(3, 3)
    cudaMemcpyToArray = _copies(3, 1, rows=False)
    cudaMemcpyFromArray = _copies(1, 3, rows=False)
    cudaMemcpyArrayToArray = _copies(3, 3, rows=False)


def _extent(extent: Any) -> tuple[int, int, int]:
    return int(extent.width), int(extent.height), int(extent.depth)
