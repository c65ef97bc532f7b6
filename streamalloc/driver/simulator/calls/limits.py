"""Limits and settings of contexts, and calls that profilers and libraries make."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from ..arguments import EventHandle, Size
from ..blocks import round_up
from ..constants import BLOCK
from ..contexts import Context
from ..errors import Result, check, not_modelled
from ..profiles import Limit
from .base import Calls

_NAMES = {int(limit): limit.name.removeprefix("CU_LIMIT_") for limit in cuda.CUlimit}
_FIXED = ("SHMEM_SIZE", "CIG_ENABLED")
_REFUSED = ("MAX_L2_FETCH_GRANULARITY", "PERSISTING_L2_CACHE_SIZE")
"""Limits that refuse a value above the maximum; the others are set to the maximum."""
_TOO_LARGE_STACK = 512 << 10
_CACHE_CONFIGS = range(4)
_FOUR_BYTE_BANKS = cuda.CUsharedconfig.CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE


class LimitCalls(Calls):
    """cuCtx*Limit, cuCtx*CacheConfig and the like, cuCtxWaitEvent, cuProfiler*."""

    def _limit(self, limit: Any) -> tuple[str, Limit]:
        number = int(limit)
        name = _NAMES.get(number, "MAX")
        not_modelled(name == "PER_BLOCK_MEMORY_SIZE", "the limit PER_BLOCK_MEMORY_SIZE")
        check(name != "MAX")
        found = self._machine.profile.limits.get(name)
        check(found is not None, Result.CUDA_ERROR_UNSUPPORTED_LIMIT)
        assert found is not None
        return name, found

    def cuCtxGetLimit(self, limit: Any) -> int:
        context = self._machine.current()
        name, known = self._limit(limit)
        return context.limits.get(name, known.default)

    def cuCtxSetLimit(self, limit: Any, value: Size) -> None:
        context = self._machine.current()
        self._unsafe_during_capture()
        name, known = self._limit(limit)
        check(name not in _FIXED, Result.CUDA_ERROR_NOT_PERMITTED)
        check(name != "STACK_SIZE" or value < _TOO_LARGE_STACK)
        not_modelled(name == "STACK_SIZE" and value > known.most, f"a stack of {value} bytes")
        check(name not in _REFUSED or value <= known.most)
        value = min(max(round_up(value, known.step), known.least), known.most)
        if name == "STACK_SIZE":
            self._resize_stacks(context, context.limits.get(name, known.default), value)
        context.limits[name] = value

    def _resize_stacks(self, context: Context, before: int, after: int) -> None:
        """Every thread that can run at a time has a stack (observed on H200: test_limits)."""
        machine, device = self._machine, context.device
        streams = context.all_streams()
        machine.timeline.wait(lambda: all(stream.done >= stream.seq for stream in streams))
        threads = device.attributes["MULTIPROCESSOR_COUNT"] * device.attributes["MAX_THREADS_PER_MULTIPROCESSOR"]
        change = (after * threads // BLOCK - before * threads // BLOCK) * BLOCK
        not_modelled(change > device.bank.free, "stacks that take more memory than there is")
        device.bank.used += change
        context.stacks += change

    # -- other settings --------------------------------------------------------------------------------------

    def cuCtxGetCacheConfig(self) -> Any:
        return cuda.CUfunc_cache(self._machine.current().limits.get("cache", 0))

    def cuCtxSetCacheConfig(self, config: Any) -> None:
        context = self._machine.current()
        check(int(config) in _CACHE_CONFIGS)
        context.limits["cache"] = int(config)

    def cuCtxGetSharedMemConfig(self) -> Any:
        self._machine.current()
        return _FOUR_BYTE_BANKS

    def cuCtxResetPersistingL2Cache(self) -> None:
        self._machine.current()

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> None:
        """Writes of other devices are not simulated."""
        self._machine.current()

    def cuProfilerStart(self) -> None:
        self._machine.current()

    def cuProfilerStop(self) -> None:
        self._machine.current()

    # -- events of all streams -------------------------------------------------------------------------------

    def cuCtxWaitEvent(self, hCtx: Any, hEvent: EventHandle) -> None:
        """All work from now on waits, that of streams that are made later included; a stream without any does not
        (observed on H200: test_limits).
        """
        context, event = self._alive(hCtx), self._event(hEvent)
        self._spoil(stream.capture for stream in context.all_streams())
        not_modelled(event.capture is not None, "waiting in a context for an event that was recorded in a capture")
        not_modelled(event.elsewhere is not None, "waiting in a context for another process")
        record = event.record
        if record is not None and not record.complete:
            context.awaited.append((record.stream, record.seq))
            for stream in context.all_streams():
                if stream is not context.marks:
                    stream.barrier += ((record.stream, record.seq),)
