"""Fills and copies of planes and boxes: rows of memory that a pitch keeps apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import Size
from ..copy_operations import Shape
from ..errors import check, not_modelled
from ..graphs import Values
from .copies import ARRAY, DEVICE, OF_HOST, UNIFIED, Contexts, CopyCalls

PROMISED = {(DEVICE, DEVICE): "both", (DEVICE, OF_HOST): "dst", (OF_HOST, DEVICE): "src"}
"""The ends that the caller declares as device memory, by the memory types of target and source."""

_OF_SIDE = ("XInBytes", "Y", "Z", "LOD", "MemoryType", "Host", "Device", "Array", "Pitch", "Height")
COPY_FIELDS = ("WidthInBytes", "Height", "Depth", *(side + name for side in ("src", "dst") for name in _OF_SIDE))
"""Fields of a CUDA_MEMCPY3D; a CUDA_MEMCPY2D has some of them."""


def _sides(kinds: tuple[int, int]) -> Iterable[tuple[str, int]]:
    return zip(("dst", "src"), kinds, strict=True)


def copy_values(copy: Any, height: int, depth: int) -> Values:
    """The fields of a copy as a CUDA_MEMCPY3D has them."""
    values = {name: int(getattr(copy, name) or 0) for name in COPY_FIELDS if hasattr(copy, name)}
    return {**values, "Height": height, "Depth": depth}


class Copy2DCalls(CopyCalls):
    """cuMemsetD2D*, cuMemcpy2D*, cuMemcpy3DPeer*, and cuMemcpy3D* without arrays."""

    # -- fills -----------------------------------------------------------------------------------------------

    def cuMemsetD2D8(self, dstDevice: Any, dstPitch: Size, uc: Any, Width: Any, Height: Size) -> None:
        self._fill_rows(dstDevice, dstPitch, uc, Width, Height, 1)

    def cuMemsetD2D16(self, dstDevice: Any, dstPitch: Size, us: Any, Width: Any, Height: Size) -> None:
        self._fill_rows(dstDevice, dstPitch, us, Width, Height, 2)

    def cuMemsetD2D32(self, dstDevice: Any, dstPitch: Size, ui: Any, Width: Any, Height: Size) -> None:
        self._fill_rows(dstDevice, dstPitch, ui, Width, Height, 4)

    def cuMemsetD2D8Async(
        self, dstDevice: Any, dstPitch: Size, uc: Any, Width: Any, Height: Size, hStream: Any
    ) -> None:
        self._fill_rows(dstDevice, dstPitch, uc, Width, Height, 1, hStream)

    def cuMemsetD2D16Async(
        self, dstDevice: Any, dstPitch: Size, us: Any, Width: Any, Height: Size, hStream: Any
    ) -> None:
        self._fill_rows(dstDevice, dstPitch, us, Width, Height, 2, hStream)

    def cuMemsetD2D32Async(
        self, dstDevice: Any, dstPitch: Size, ui: Any, Width: Any, Height: Size, hStream: Any
    ) -> None:
        self._fill_rows(dstDevice, dstPitch, ui, Width, Height, 4, hStream)

    def _fill_rows(
        self, dstDevice: Any, pitch: int, value: Any, width: Any, height: int, element: int, hStream: Any = None
    ) -> None:
        if height > 1:
            check(pitch >= arguments.size_t(width) * element and pitch % element == 0)
        self._fill(dstDevice, value, width, element, hStream, height, pitch)

    # -- copies ----------------------------------------------------------------------------------------------

    def cuMemcpy2D(self, pCopy: Any) -> None:
        self._copy_plane(pCopy, None)

    def cuMemcpy2DUnaligned(self, pCopy: Any) -> None:
        self._copy_plane(pCopy, None)

    def cuMemcpy2DAsync(self, pCopy: Any, hStream: Any) -> None:
        self._copy_plane(pCopy, hStream)

    def cuMemcpy3DPeer(self, pCopy: Any) -> None:
        self._copy_between(pCopy, None)

    def cuMemcpy3DPeerAsync(self, pCopy: Any, hStream: Any) -> None:
        self._copy_between(pCopy, hStream)

    def _copy_plane(self, pCopy: Any, hStream: Any) -> None:
        copy = arguments.struct("pCopy", pCopy, cuda.CUDA_MEMCPY2D)
        self._copy_rows(copy, hStream, int(copy.Height), 1)

    def _copy_between(self, pCopy: Any, hStream: Any) -> None:
        copy = arguments.struct("pCopy", pCopy, cuda.CUDA_MEMCPY3D_PEER)
        contexts = (self._given_or_current(copy.dstContext), self._given_or_current(copy.srcContext))
        self._copy_rows(copy, hStream, int(copy.Height), int(copy.Depth), contexts)

    def _copy_rows(self, copy: Any, hStream: Any, height: int, depth: int, contexts: Contexts | None = None) -> None:
        """Between two ends that are no arrays."""
        if not int(copy.WidthInBytes) * height * depth:  # before all other checks
            self._copy(0, 0, Shape.row(0), hStream)
            return
        target, source, kinds, shape = self._rows_of(copy, height, depth)
        values = copy_values(copy, height, depth)
        self._copy(target, source, shape, hStream, PROMISED.get(kinds, ""), contexts, values)

    def _rows_of(self, copy: Any, height: int, depth: int) -> tuple[int, int, tuple[int, int], Shape]:
        """Addresses, memory types and rows of a copy between two ends that are no arrays."""
        kinds = arguments.number_in(copy, "dstMemoryType"), arguments.number_in(copy, "srcMemoryType")
        not_modelled(ARRAY in kinds, "a copy of a plane of an array")
        width = int(copy.WidthInBytes)
        target, fits, *steps = self._side(copy, "dst", kinds[0], width, height)
        source, also, pitch, slice_ = self._side(copy, "src", kinds[1], width, height)
        bases = (getattr(copy, side + ("Host" if kind == OF_HOST else "Device")) for side, kind in _sides(kinds))
        left_out = tuple(first - int(base) for first, base in zip((target, source), bases, strict=True))
        shape = Shape(
            width, height, depth, steps[0], steps[1], pitch, slice_, fits and also, (left_out[0], left_out[1])
        )
        return target, source, kinds, shape

    @staticmethod
    def _side(copy: Any, side: str, kind: int, width: int, height: int) -> tuple[int, bool, int, int]:
        """Address of the first byte of an end, whether the rows fit, the row pitch and the slice pitch."""
        x, y, z = (int(getattr(copy, side + name, 0)) for name in ("XInBytes", "Y", "Z"))
        check(kind in (OF_HOST, DEVICE, UNIFIED))
        pitch = int(getattr(copy, side + "Pitch")) or x + width
        rows = int(getattr(copy, side + "Height", 0)) or y + height
        address = int(getattr(copy, side + ("Host" if kind == OF_HOST else "Device")))
        check(width <= pitch and height <= rows)
        fits = x + width <= pitch and y + height <= rows
        return address + (z * rows + y) * pitch + x, fits, pitch, rows * pitch
