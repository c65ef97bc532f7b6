"""Base of all calls: the lock, the result tuple, the rules during stream capture."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments, call_lock
from ..contexts import Context, Device
from ..errors import Fault, Result, check, need, not_modelled
from ..events import Event
from ..machine import Machine
from ..memory import is_code
from ..timeline import HostFunction, Operation, Stream

Method = Callable[..., Any]


EDGE_DATA: bool = hasattr(cuda, "cuMemGetDefaultMemPool")
"""Bindings for CUDA 13, which return edge data in more calls."""
_VALUES = {
    "cuStreamGetCaptureInfo": 5 + EDGE_DATA,
    "cuGraphGetEdges": 3 + EDGE_DATA,
    "cuGraphNodeGetDependencies": 2 + EDGE_DATA,
    "cuGraphNodeGetDependentNodes": 2 + EDGE_DATA,
}
GONE = "using registered memory that the host has unmapped"
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}


def driver_call(method: Method) -> Method:
    """Make a driver call of a method that returns its results and raises :class:`Fault`.

    The call returns a tuple of the result code and the values that the annotation of the method lists, as the bindings
    do. After a failure each value is None. Arguments are converted as their annotations say.
    """
    values = _VALUES.get(method.__name__, _count_values(method.__annotations__["return"]))
    convert = arguments.conversions(method)
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    conversions = [(at, convert[name]) for at, name in enumerate(names) if name in convert]
    positional = conversions[-1][0] + 1 if conversions else 0
    before_init = method.__name__ in _BEFORE_INIT
    nothing = (None,) * values
    success, not_initialized = Result.CUDA_SUCCESS, Result.CUDA_ERROR_NOT_INITIALIZED
    deinitialized = Result.CUDA_ERROR_DEINITIALIZED
    enter, leave = call_lock.enter, call_lock.leave
    exiting = sys.is_finalizing  # kept here: at that time a module's own names may be gone

    @functools.wraps(method)
    def call(self: Calls, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        machine = self._machine
        if not machine.ready:
            machine.check_whole()
            if machine.forked or not before_init:
                return (deinitialized if machine.timeline.closed else not_initialized, *nothing)
        if exiting():  # the worker may have been stopped for good while it held the lock
            return (deinitialized, *nothing)
        given: Any = args  # args keep the objects whose addresses the conversions take
        if conversions:
            given = list(args)
            if len(given) >= positional:
                for at, converted in conversions:
                    given[at] = converted(given[at])
            else:
                for at, converted in conversions:
                    if at < len(given):
                        given[at] = converted(given[at])
                kwargs = {name: convert[name](value) if name in convert else value for name, value in kwargs.items()}
        try:
            caller = machine.thread.caller
        except AttributeError:
            caller = machine.thread.caller = call_lock.Caller()
        is_main = caller.is_main
        enter(is_main)
        machine.timeline.caller = caller
        try:
            value = method(self, *given, **kwargs)
        except Fault as fault:
            return (fault.code, *nothing)
        except call_lock.WaitEnded as ended:
            raise ended.error from None
        except BaseException as error:
            machine.cut_short(method.__name__, error)
            raise
        finally:
            leave(is_main)
        if values == 1:
            return (success, value)
        return (success, *value) if values else (success,)

    return call


def _count_values(returns: str) -> int:
    """The number of values after the result code, from the annotation of a method."""
    if returns == "None":
        return 0
    return returns.count(",") + 1 if returns.startswith("tuple[") else 1


class Calls:
    """Base class of the driver's groups of calls: the machine, and look-ups that several groups need.

    Methods with the names of driver functions become driver calls.
    """

    _machine: Machine

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if name.startswith("cu"):
                setattr(cls, name, driver_call(method))

    def _device(self, dev: Any) -> Device:
        ordinal = arguments.device(dev)
        check(0 <= ordinal < len(self._machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
        return self._machine.devices[ordinal]

    def _context(self, ctx: Any) -> Context:
        return need(self._machine.contexts.get(arguments.context(ctx)), Result.CUDA_ERROR_INVALID_CONTEXT)

    def _alive(self, ctx: Any) -> Context:
        context = self._context(ctx)
        check(context.alive, Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return context

    def _given_or_current(self, ctx: Any) -> Context:
        return self._alive(ctx) if arguments.context(ctx) else self._machine.current()

    def _event(self, event: Any) -> Event:
        # Seen once on H200, where a destroyed handle can also end the process.
        return need(self._machine.events.get(arguments.event(event)), Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)

    def _host_function(self, address: int, data: int) -> Operation:
        check(address)
        not_modelled(not is_code(address), "a host function where no code lies: the real driver crashes")
        function = _HOST_FUNCTION(address)
        return HostFunction(self._machine.timeline, lambda: function(data or None))

    def _stream(self, stream: Any) -> Stream:
        return self._machine.stream(stream if type(stream) is int else arguments.stream(stream))

    def _stream_to_launch_in(self, stream: Any, call: str) -> Stream:
        """A stream for work that is not modelled during a capture."""
        found = self._stream(stream)
        not_modelled(self._machine.graphs.captures and self._captured(found), f"{call} during stream capture")
        return found

    def _submit(self, stream: Stream, operation: Operation, kind: str) -> None:
        """Put work into a stream, or into the graph that is being captured from it."""
        if self._machine.graphs.captures and self._captured(stream):
            stream.capture.add(kind, operation, stream)
        else:
            stream.submit(operation)

    def _captured(self, stream: Stream) -> bool:
        """Whether ``stream`` is being captured; fails if work can go neither into the stream nor into the graph."""
        capture = stream.capture
        if capture is None:
            self._not_behind_captures(stream)
            return False
        check(capture.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return True

    def _not_behind_captures(self, stream: Stream) -> None:
        """The legacy stream would wait for blocking streams that are being captured; that spoils their captures."""
        self._spoil([peer.capture for peer in stream.peers or ()], Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def _unsafe_during_capture(self) -> None:
        """A call that may not be made while a capture runs that forbids it; it spoils that capture."""
        captures = self._machine.graphs.captures
        if captures:
            caller = self._machine.timeline.caller
            self._spoil([capture for capture in captures if capture.forbids(caller)])

    @staticmethod
    def _spoil(captures: Iterable[Any], code: Any = Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) -> None:
        """End captures that a call may not be made during; the call fails where there is any."""
        running = [capture for capture in captures if capture is not None]
        for capture in running:
            capture.invalidate()
        check(not running, code)
