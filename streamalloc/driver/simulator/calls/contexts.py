"""Contexts: primary ones, made ones, which is current, and peer access between them."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import EventHandle, UnsignedInt
from ..contexts import Context
from ..errors import NotModelled, Result, check, need, not_modelled
from .base import Calls

# cuCtxCreate(flags, dev) became cuCtxCreate(params, flags, dev) in the bindings for CUDA 13.
_CREATE_TAKES_PARAMS = not hasattr(cuda, "cuCtxCreate_v4")
_SCHEDULE_MASK = 0x07
_KNOWN_FLAGS = 0x1F


class ContextCalls(Calls):
    """cuDevicePrimaryCtx*, cuCtx*."""

    # -- primary contexts ------------------------------------------------------------------------------------

    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        context = self._device(dev).primary
        context.alive = True
        context.retained += 1
        return cuda.CUcontext(context.handle)

    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        context = self._device(dev).primary
        check(context.retained, Result.CUDA_ERROR_INVALID_CONTEXT)
        context.retained -= 1
        if not context.retained:
            self._end_context(context)

    def cuDevicePrimaryCtxReset(self, dev: Any) -> None:
        context = self._device(dev).primary
        if context.alive:
            self._end_context(context)
            context.alive = context.retained > 0

    def cuDevicePrimaryCtxGetState(self, dev: Any) -> tuple[int, int]:
        context = self._device(dev).primary
        return context.flags, int(context.alive)

    # -- making and ending -----------------------------------------------------------------------------------

    def cuCtxCreate(self, *args: Any, **kwargs: Any) -> Any:
        if _CREATE_TAKES_PARAMS:
            return self._create_context(*args, **kwargs)
        return self._create_context(None, *args, **kwargs)

    def cuCtxCreate_v4(self, ctxCreateParams: Any, flags: Any, dev: Any) -> Any:
        return self._create_context(ctxCreateParams, flags, dev)

    def _create_context(self, ctxCreateParams: Any, flags: Any, dev: Any) -> Any:
        if ctxCreateParams is not None:
            raise NotModelled("cuCtxCreate with parameters")
        context = self._machine.create_context(self._device(dev), flags=self._context_flags(flags))
        self._machine.timeline.caller.contexts.append(context)
        return cuda.CUcontext(context.handle)

    @staticmethod
    def _context_flags(flags: Any) -> int:
        value = arguments.unsigned_int(flags)
        check(value < 0x100 and value & _SCHEDULE_MASK in (0, 1, 2, 4))
        not_modelled(value & ~_KNOWN_FLAGS, f"context flags {value:#x}")
        return value

    def cuCtxDestroy(self, ctx: Any) -> None:
        context = self._alive(ctx)
        check(not context.primary, Result.CUDA_ERROR_INVALID_CONTEXT)
        self._end_context(context)
        stack = self._machine.timeline.caller.contexts
        if stack and stack[-1] is context:
            stack.pop()

    def _end_context(self, context: Context) -> None:
        streams = context.all_streams()
        self._machine.timeline.wait(lambda: all(stream.done >= stream.seq for stream in streams))
        self._machine.close_context(context)

    # -- the calling thread's context ------------------------------------------------------------------------

    def cuCtxGetCurrent(self) -> Any:
        context = self._machine.current_or_none()
        return cuda.CUcontext(0 if context is None else context.handle)

    def cuCtxSetCurrent(self, ctx: Any) -> None:
        stack = self._machine.timeline.caller.contexts
        context = self._alive(ctx) if arguments.context(ctx) else None
        if stack:
            stack.pop()
        if context is not None:
            stack.append(context)

    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self._machine.timeline.caller.contexts.append(self._alive(ctx))

    def cuCtxPopCurrent(self) -> Any:
        stack = self._machine.timeline.caller.contexts
        check(stack, Result.CUDA_ERROR_INVALID_CONTEXT)
        return cuda.CUcontext(stack.pop().handle)

    def cuCtxGetDevice(self) -> Any:
        return cuda.CUdevice(self._machine.current().device.ordinal)

    def cuCtxSynchronize(self) -> None:
        self._synchronize(self._machine.current())

    def cuCtxSynchronize_v2(self, ctx: Any) -> None:
        self._synchronize(self._given_or_current(ctx))

    def _synchronize(self, context: Context) -> None:
        self._no_stream_captures(context)
        self._unsafe_during_capture()
        clock, unfinished, gone = context.clock(), context.unfinished(), list(context.retired.items())
        self._machine.synchronize(clock, lambda: all(stream.done >= seq for stream, seq in unfinished))
        for number, seq in gone:
            if context.retired.get(number) == seq:
                del context.retired[number]
        context.check()

    def _no_stream_captures(self, context: Context) -> None:
        """Refuse a call on all streams of a context while one is captured, and invalidate each capture there."""
        self._spoil(stream.capture for stream in context.all_streams())

    def cuCtxGetFlags(self) -> int:
        context = self._machine.current()
        usual = self._machine.profile.context_flags if context.primary else 0
        return context.flags | context.implied_flags | usual

    def cuCtxGetApiVersion(self, ctx: Any) -> int:
        self._given_or_current(ctx)
        return self._machine.profile.context_api_version

    def cuCtxGetId(self, ctx: Any) -> int:
        return self._given_or_current(ctx).id

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        self._machine.current()
        return self._machine.profile.stream_priorities

    def cuCtxRecordEvent(self, hCtx: Any, hEvent: EventHandle) -> None:
        context = self._given_or_current(hCtx)
        event = need(self._machine.events.get(hEvent), Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        check(event.context is context, Result.CUDA_ERROR_INVALID_HANDLE)
        self._no_stream_captures(context)
        # Synchronising with it shows no frees (observed on H200: test_reuse), so the record knows of no other stream.
        event.record_in(context.marks, context.unfinished())

    # -- peers -----------------------------------------------------------------------------------------------

    def cuCtxEnablePeerAccess(self, peerContext: Any, Flags: UnsignedInt) -> None:
        context, peer = self._machine.current(), self._alive(peerContext)
        check(Flags == 0)
        check(peer.device is not context.device, Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        check(peer.handle not in context.peers, Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        context.peers.add(peer.handle)

    def cuCtxDisablePeerAccess(self, peerContext: Any) -> None:
        context, peer = self._machine.current(), self._alive(peerContext)
        check(peer.handle in context.peers, Result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
        context.peers.remove(peer.handle)
