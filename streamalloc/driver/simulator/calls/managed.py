"""Calls for managed memory. Only their answers for other memory are modelled, as no managed memory exists here."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import DevicePointer, Size, UnsignedInt
from ..constants import Location
from ..errors import Fault, Result, check
from .base import EDGE_DATA, Calls

_SYNC_MEMOPS = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS


class ManagedMemoryCalls(Calls):
    """cuMemPrefetchAsync, cuMemAdvise, cuMemRangeGetAttribute, cuStreamAttachMemAsync, cuPointerSetAttribute."""

    def cuStreamAttachMemAsync(self, hStream: Any, dptr: DevicePointer, length: Size, flags: UnsignedInt) -> None:
        self._stream(hStream)
        raise Fault(Result.CUDA_ERROR_INVALID_VALUE)

    def cuMemRangeGetAttribute(self, dataSize: Size, attribute: Any, devPtr: DevicePointer, count: Size) -> Any:
        raise Fault(Result.CUDA_ERROR_INVALID_VALUE)

    if EDGE_DATA:  # earlier bindings take other arguments

        def cuMemPrefetchAsync(
            self, devPtr: DevicePointer, count: Size, location: Any, flags: UnsignedInt, hStream: Any
        ) -> None:
            self._check_place(location)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)

        def cuMemAdvise(self, devPtr: DevicePointer, count: Size, advice: Any, location: Any) -> None:
            self._check_place(location)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)

    def _check_place(self, location: Any) -> None:
        place = arguments.place(arguments.struct("location", location, cuda.CUmemLocation))
        known = place.type != Location.DEVICE or 0 <= place.id < len(self._machine.devices)
        check(known, Result.CUDA_ERROR_INVALID_DEVICE)

    def cuPointerSetAttribute(self, value: Any, attribute: Any, ptr: DevicePointer) -> None:
        """The only attribute that can be set changes nothing that is seen here: copies that the host does not wait for
        are not waited for with it either (observed on H200: test_pointer_attributes).
        """
        check(arguments.member("attribute", attribute, cuda.CUpointer_attribute) == int(_SYNC_MEMOPS))
        allocation = self._machine.allocations.find(ptr)
        check(allocation is not None)
        assert allocation is not None
        check(allocation.mapping is None, Result.CUDA_ERROR_NOT_SUPPORTED)
        allocation.waits = bool(value)
