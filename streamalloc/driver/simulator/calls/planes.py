"""Fills and copies of planes and boxes: rows of memory that a pitch keeps apart."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import Size
from ..errors import check, not_modelled
from ..moves import Shape
from .copies import CopyCalls

HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype
MAX_PITCH = (1 << 31) - 1


class PlaneCalls(CopyCalls):
    """cuMemsetD2D*, cuMemcpy2D*, cuMemcpy3DPeer*; what cuMemcpy3D* does without arrays."""

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
        self, dstDevice: Any, pitch: int, value: Any, width: Any, height: int, element: int, hStream: Any = 0
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
        self._copy_rows(copy, hStream, int(copy.Height), 1, None)

    def _copy_between(self, pCopy: Any, hStream: Any) -> None:
        copy = arguments.struct("pCopy", pCopy, cuda.CUDA_MEMCPY3D_PEER)
        contexts = (self._alive(copy.dstContext), self._alive(copy.srcContext))
        self._copy_rows(copy, hStream, int(copy.Height), int(copy.Depth), contexts)

    def _copy_rows(self, copy: Any, hStream: Any, height: int, depth: int, contexts: Any) -> None:
        """Between two ends that are both no arrays."""
        kinds = arguments.field(copy, "dstMemoryType"), arguments.field(copy, "srcMemoryType")
        not_modelled(ARRAY in kinds, "a copy of a plane of an array")
        width = int(copy.WidthInBytes)
        (target, *target_steps), (source, *source_steps) = (
            self._side(copy, side, kind, width, height, depth) for side, kind in zip(("dst", "src"), kinds, strict=True)
        )
        device = {(DEVICE, DEVICE): "both", (DEVICE, HOST): "dst", (HOST, DEVICE): "src"}.get(kinds, "")
        shape = Shape(width, height, depth, *target_steps, *source_steps)
        self._copy(target, source, shape.size, hStream, device, contexts, shape)

    @staticmethod
    def _side(copy: Any, side: str, kind: int, width: int, height: int, depth: int) -> tuple[int, int, int]:
        """Where the first byte of an end lies, and how far rows and slices are apart."""
        x, y, z = (int(getattr(copy, side + name, 0)) for name in ("XInBytes", "Y", "Z"))
        pitch, rows = int(getattr(copy, side + "Pitch")), int(getattr(copy, side + "Height", 0))
        not_modelled(getattr(copy, side + "LOD", 0), "a copy of another level of detail")
        check(kind in (HOST, DEVICE, UNIFIED) and pitch <= MAX_PITCH)
        check(x + width <= pitch and (depth == 1 or y + height <= rows))
        address = int(getattr(copy, side + ("Host" if kind == HOST else "Device")))
        return address + (z * rows + y) * pitch + x, pitch, rows * pitch
