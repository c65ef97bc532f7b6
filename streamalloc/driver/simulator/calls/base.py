"""Base of all calls: the lock, the result tuple, the rules during stream capture."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.driver.bindings import cuda, value_count

from .. import arguments, call_lock
from ..errors import Fault, Result, check, not_modelled
from ..machine import Machine
from ..memory import is_code
from ..timeline import HostFunction, Operation, Stream

Method = Callable[..., Any]


EDGE_DATA: bool = hasattr(cuda, "cuMemGetDefaultMemPool")
"""Bindings for CUDA 13, which return edge data in more calls."""
GONE = "using registered memory that the host has unmapped"
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}


def call(parameters: str, body: Method, *first: Any) -> Any:
    """One of several driver calls that have a body in common, which gets ``first`` before the arguments.

    ``parameters`` are names of :data:`.arguments.BY_NAME`, or names with kinds: ``"pCopy:cuda.CUDA_MEMCPY2D hStream"``.
    """

    def method(self: Calls, *given: Any) -> Any:
        return body(self, *first, *given)

    pairs = [one.partition(":")[::2] for one in parameters.split()]
    annotations = {name: kind or arguments.BY_NAME.get(name, "Any") for name, kind in pairs}
    method.__annotations__ = annotations
    shown = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *annotations)]
    setattr(method, "__signature__", inspect.Signature(shown))  # noqa: B010
    return method


def driver_call(name: str, method: Method) -> Method:
    """Make a driver call of a method that returns its results and raises :class:`Fault`.

    The call returns a tuple of the result code and as many values as the bindings document; after a failure each value
    is None. Arguments are converted, and objects found, as their annotations say.
    """
    values = value_count(name)
    annotations = [one for one in method.__annotations__.items() if one[0] != "return"]
    kinds = [(at, *arguments.kind(*one)) for at, one in enumerate(annotations)]
    conversions = [(at, convert) for at, convert, _ in kinds if convert is not None]
    finders = [(at, find) for at, _, find in kinds if find is not None]
    positional = max((at for at, _ in (*conversions, *finders)), default=-1) + 1
    before_init = name in _BEFORE_INIT
    nothing = (None,) * values
    success, not_initialized = Result.CUDA_SUCCESS, Result.CUDA_ERROR_NOT_INITIALIZED
    deinitialized = Result.CUDA_ERROR_DEINITIALIZED
    enter, leave = call_lock.enter, call_lock.leave
    exiting = sys.is_finalizing  # kept here: at that time a module's own names may be gone

    @functools.wraps(method)
    def checked(self: Calls, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        machine = self._machine
        if not machine.ready:
            machine.check_whole()
            if machine.forked or not before_init:
                return (deinitialized if machine.timeline.closed else not_initialized, *nothing)
        if exiting():  # the worker may have been stopped for good while it held the lock
            return (deinitialized, *nothing)
        if kwargs or len(args) < positional:
            bound = inspect.signature(method).bind(self, *args, **kwargs)
            bound.apply_defaults()
            args = bound.args[1:]
        given: Any = args  # args keep the objects whose addresses the conversions take
        if positional:
            given = list(args)
            for at, converted in conversions:
                given[at] = converted(given[at])
        try:
            caller = machine.thread.caller
        except AttributeError:
            caller = machine.thread.caller = call_lock.Caller()
        is_main = caller.is_main
        enter(is_main)
        machine.timeline.caller = caller
        try:
            for at, find in finders:
                given[at] = find(machine, given[at])
            value = method(self, *given)
        except Fault as fault:
            return (fault.code, *nothing)
        except call_lock.WaitEnded as ended:
            raise ended.error from None
        except BaseException as error:
            machine.cut_short(name, error)
            raise
        finally:
            leave(is_main)
        if values == 1:
            return (success, value)
        return (success, *value) if values else (success,)

    return checked


class Calls:
    """Base class of the driver's groups of calls: the machine, and look-ups that several groups need.

    Methods with the names of driver functions become driver calls.
    """

    _machine: Machine

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if name.startswith("cu"):
                setattr(cls, name, driver_call(name, method))

    def _find(self, kind: Any, handle: Any) -> Any:
        """The object of a handle that is no parameter of the call."""
        convert, find = kind.__metadata__
        return find(self._machine, convert(handle))

    def _host_function(self, address: int, data: int) -> Operation:
        check(address)
        not_modelled(not is_code(address), "a host function where no code lies: the real driver crashes")
        function = _HOST_FUNCTION(address)
        return HostFunction(self._machine.timeline, lambda: function(data or None))

    def _check_launch(self, stream: Stream, name: str) -> None:
        """Refuse work that is not modelled during a capture."""
        not_modelled(self._machine.graphs.captures and self._captured(stream), f"{name} during stream capture")

    def _submit(
        self, stream: Stream, operation: Operation, kind: str, values: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Put work into a stream, or into the graph that is being captured from it; ``values`` makes the parameters of
        its node.
        """
        if self._machine.graphs.captures and self._captured(stream):
            stream.capture.add(kind, operation, stream, None if values is None else values())
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
            capture.valid = False
        check(not running, code)
