"""A simulated machine ready for use, and short names for what these tests do with it."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.simulator import simulated

MiB = 1 << 20
KEEP = (1 << 64) - 1


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a call that must have succeeded."""
    assert answer[0] == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]


class Rig:
    """A machine with device 0's primary context current."""

    def __init__(self, **machine: Any) -> None:
        self.driver: Any = simulated(**machine)
        d = self.driver
        ok(d.cuInit(0))
        self.context = ok(d.cuDevicePrimaryCtxRetain(0))
        ok(d.cuCtxSetCurrent(self.context))

    def stream(self, blocking: bool = False) -> Any:
        return ok(self.driver.cuStreamCreate(0 if blocking else 1))

    def event(self) -> Any:
        return ok(self.driver.cuEventCreate(2))

    def pool(self, threshold: int = KEEP, max_size: int = 0) -> Any:
        d = self.driver
        location = d.CUmemLocation()
        location.type, location.id = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
        props = d.CUmemPoolProps()
        props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location, props.maxSize = location, max_size
        pool = ok(d.cuMemPoolCreate(props))
        attribute = d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        ok(d.cuMemPoolSetAttribute(pool, attribute, d.cuuint64_t(threshold)))
        return pool

    def policies(self, pool: Any, follow: int, opportunistic: int, internal: int) -> None:
        for number, value in enumerate((follow, opportunistic, internal), 1):
            ok(self.driver.cuMemPoolSetAttribute(pool, self.driver.CUmemPool_attribute(number), value))

    def reserved(self, pool: Any) -> int:
        attribute = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        return int(ok(self.driver.cuMemPoolGetAttribute(pool, attribute)))

    def allocate(self, size: int, pool: Any, stream: Any) -> int:
        return int(ok(self.driver.cuMemAllocFromPoolAsync(size, pool, stream)))

    def free(self, address: int, stream: Any) -> None:
        ok(self.driver.cuMemFreeAsync(address, stream))

    def word(self) -> ctypes.c_uint32:
        """A pinned word of zero."""
        word = ctypes.c_uint32.from_address(ok(self.driver.cuMemHostAlloc(4, 0)))
        word.value = 0
        return word

    def hold(self, stream: Any, word: ctypes.c_uint32, value: int = 1) -> None:
        """Hold ``stream`` until the word has at least this value."""
        ok(self.driver.cuStreamWaitValue32(stream, ctypes.addressof(word), value, 0))

    def busy(self, stream: Any) -> bool:
        answer: Any = self.driver.cuStreamQuery(stream)[0]
        return bool(answer == self.driver.CUresult.CUDA_ERROR_NOT_READY)
