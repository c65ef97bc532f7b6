"""Driver calls from methods. :func:`driver_call` makes a call that takes the lock, runs the method and makes the result
tuple. :class:`Calls`, the base class of all areas, has the rules during stream capture.

The annotation of a parameter is its conversion. For example, ``hStream: Stream`` stands for
``Annotated[scheduler.Stream, stream, Machine.stream]`` of :mod:`..arguments`. Before the lock, ``stream`` converts the
argument to the number of a handle. Under the lock, ``Machine.stream`` looks up the object, which the method gets.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

from streamalloc.driver.bindings import by_position, cuda, signature, value_count
from streamalloc.simulator import arguments, call_lock
from streamalloc.simulator.errors import BrokenMachineError, Fault, Result, check, code_of, not_modelled
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import is_code
from streamalloc.simulator.scheduler import HostFunction, Operation, Stream

Method = Callable[..., Any]


EDGE_DATA: bool = hasattr(cuda, "cuMemGetDefaultMemPool")
"""Whether the bindings are for CUDA 13 or newer, whose graph calls return edge data."""
GONE = "using registered memory that the host has unmapped"
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
_IN_HOST_FUNCTIONS = re.compile(
    r"cuInit|cuDriverGetVersion|cuGetError\w+|cuThreadExchangeStreamCaptureMode|cuLaunchHostFunc|cuGraphLaunch"
    r"|cuMemset\w+Async|cu(Stream|Event)(?!Create)\w+"
)
"""Calls that a host function may make (observed on H200: test_streams)."""


def call(body: Method, *first: Any, **kinds: Any) -> Any:
    """Make a method that is assigned to the names of one or more driver calls. Its parameters are those of the call in
    the bindings. The method calls ``body`` with ``first`` and then the arguments of the call. ``kinds``: for parameters
    by name, a kind that differs from :func:`.arguments.usual`.
    """

    def method(self: Calls, *given: Any) -> Any:
        return body(self, *first, *given)

    method.__kinds__ = kinds  # type: ignore[attr-defined]
    return method


def _steps(name: str, method: Method) -> tuple[int, list[tuple[int, Any, Any]], list[tuple[int, Any]]]:
    """Return the number of arguments of a call, their conversions to numbers, and the look-ups of objects that follow.

    A conversion is a tuple: index of the argument, the bindings' class of the handle (None if there is none), and the
    function. An object of exactly that class is converted by plain ``int``, which is faster. A look-up is a tuple of
    index and function.
    """
    if hasattr(method, "__kinds__"):
        steps = [arguments.usual(one, method.__kinds__) for one in signature(cuda, name)[0].parameters.values()]
    else:
        kinds = ((one, kind) for one, kind in method.__annotations__.items() if one != "return")
        steps = [arguments.steps(one, kind, method.__globals__) for one, kind in kinds]
    conversions = [(at, getattr(convert, "cls", None), convert) for at, (convert, _) in enumerate(steps) if convert]
    return len(steps), conversions, [(at, find) for at, (_, find) in enumerate(steps) if find]


def driver_call(name: str, method: Method) -> Method:
    """Make a driver call from a method that returns its results and raises :class:`Fault`.

    The call returns a tuple of the result code and as many values as in the bindings; after a failure the values are
    None. A fault or an ``OSError`` is a failure; all other exceptions are raised, such as :class:`NotModelled` and the
    bindings' errors for arguments. The annotations of the method, or else the parameters in the bindings
    (:func:`call`), determine how the arguments are converted, and which objects are looked up.

    The steps of a call: refuse it at interpreter exit or before ``cuInit``, convert the arguments, refuse it in a host
    function that may not make this call, take the lock, look up the objects, run the method, release the lock, make the
    tuple.

    The function binds names of the module to local names, because at the exit of the interpreter the names of a module
    may be gone, and even builtins.
    """
    (count, conversions, finders), values = _steps(name, method), value_count(name)
    nothing, before_init, permitted = (None,) * values, name in _BEFORE_INIT, _IN_HOST_FUNCTIONS.fullmatch(name)
    exiting, usable, refusal, bind = sys.is_finalizing, _usable, _refusal, functools.partial(by_position, name)
    enter, leave, wait_ended = call_lock.enter, call_lock.leave, call_lock.WaitEnded
    success, result, failures, code = Result.CUDA_SUCCESS, Result, (Fault, OSError), code_of

    @functools.wraps(method)
    def driver_function(self: Any, *given: Any, **named: Any) -> tuple[Any, ...]:
        machine: Machine = self._machine
        unready = exiting() and not usable() and result.CUDA_ERROR_DEINITIALIZED
        if unready := unready or (not machine.ready and refusal(machine, before_init)):
            return (unready, *nothing)
        if named or len(given) != count:
            given = bind(*given, **named)
        passed = [*given]  # The objects in `given` are kept, because they own the memory whose addresses are passed.
        for at, usual, convert in conversions:
            value = given[at]
            passed[at] = int(value) if type(value) is usual else convert(value)
        caller = machine.thread.caller
        if caller.in_host_function and not permitted:
            return (result.CUDA_ERROR_NOT_PERMITTED, *nothing)
        enter(caller.is_main)
        machine.scheduler.caller = caller
        try:
            for at, find in finders:
                passed[at] = find(machine, passed[at])
            found = method(machine, *passed)
        except failures as failure:
            return (code(failure), *nothing)
        except wait_ended as ended:
            raise ended.error from None
        except BaseException as error:
            # A signal handler raised, so the machine may be half changed, and cannot be used any more.
            if not isinstance(error, Exception):
                machine.cut_call, machine.ready = name, False
            raise
        finally:
            leave(caller.is_main)
        return (success, found) if values == 1 else (success, *found) if values else (success,)

    if hasattr(method, "__kinds__"):
        whole = [_SELF, *signature(cuda, name)[0].parameters.values()]
        driver_function.__signature__ = Signature(whole)  # type: ignore[attr-defined]
    return driver_function


_SELF = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)


def _refusal(machine: Machine, before_init: bool) -> Any:
    """Return the result code of a call on a machine that is not ready; None if the call may be made.

    Raises :class:`BrokenMachineError` if a signal handler interrupted an earlier call in the middle.
    """
    if machine.cut_call is not None:
        what = f"{machine.cut_call} was interrupted in the middle"
        raise BrokenMachineError(f"{what}; make another machine with driver.simulated()")
    if before_init and not machine.forked:
        return None
    return Result.CUDA_ERROR_DEINITIALIZED if machine.scheduler.closed else Result.CUDA_ERROR_NOT_INITIALIZED


_names_of_lock = vars(call_lock)


def _usable(names: dict[str, Any] = _names_of_lock) -> bool:
    """Whether calls can still be made while the interpreter exits.

    The names of the lock's module must still exist, and no stopped thread may hold the lock. Calls of the real driver
    work until the process ends (observed on H200: tests/simulator/test_life).
    """
    acquire = names["_acquire"]
    if acquire is None or not acquire(False):
        return False
    names["_release"]()
    return True


class Calls(Machine):
    """Base class for the driver calls of one area, such as copies or graphs, with look-ups that several areas use.

    A method that is named like a driver function becomes a function of :class:`.driver.SimulatedDriver`. The annotation
    of a parameter defines how the argument is converted (:mod:`..arguments`). A subclass adds the state of its area. It
    extends the methods of :class:`.Machine` that end a context, release memory, and close the machine.
    """

    def _find(self, kind: Any, handle: Any) -> Any:
        """Return the object of a handle that is not a parameter of the call, such as a field of a struct.

        ``kind``: an annotated type of :mod:`..arguments`, which has the conversion and the look-up.
        """
        convert, find = kind.__metadata__
        return find(self, convert(handle))

    def _host_function(self, address: int, data: int) -> Operation:
        check(address)
        not_modelled(not is_code(address), "a host function where no code lies: the real driver crashes")
        function = _HOST_FUNCTION(address)
        return self._queued_function(lambda: function(data or None))

    def _queued_function(self, function: Callable[[], object]) -> Operation:
        """Return an operation that calls a host function or a stream callback. The function may make only a few driver
        calls.
        """
        thread = self.thread

        def run() -> None:
            thread.caller = call_lock.Caller(in_host_function=True)
            function()

        return HostFunction(self.scheduler, run)

    def _check_launch(self, stream: Stream, name: str) -> None:
        """Raise :class:`NotModelled` if ``stream`` is being captured: the capture of this call, ``name``, is not
        simulated.
        """
        not_modelled(self._captured(stream), f"{name} during stream capture")

    def _submit(
        self, stream: Stream, operation: Operation, kind: str, values: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Submit work to a stream.

        If the stream is being captured, the work becomes a node of this ``kind`` in the graph instead.

        ``values`` returns the parameters of the node; it is only called for a node.
        """
        if self._captured(stream):
            stream.capture.add(kind, operation, stream, None if values is None else values())
        else:
            stream.submit(operation)

    def _captured(self, stream: Stream) -> bool:
        """Whether ``stream`` is being captured.

        Gives CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if the capture is invalid. Calls :meth:`_not_behind_captures` for a
        stream that is not captured.
        """
        if not self.graphs.captures:
            return False
        capture = stream.capture
        if capture is None:
            self._not_behind_captures(stream)
            return False
        check(capture.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return True

    def _not_behind_captures(self, stream: Stream) -> None:
        """Refuse a call on the legacy stream while a blocking stream of its context is being captured.

        It gives CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, and the captures become invalid: work in the legacy stream would
        have to wait for captured work, which never runs.
        """
        if self.graphs.captures:
            self._spoil([peer.capture for peer in stream.peers or ()], Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def _not_captured(self, stream: Stream) -> None:
        """Refuse a call that queries whether work of ``stream`` is done, if a capture forbids such a call.

        Such a capture is the capture of the stream itself, or any capture that forbids unsafe calls of this thread.
        These captures become invalid.
        """
        if self.graphs.captures:
            self._spoil([stream.capture])
            self._not_behind_captures(stream)
            self._unsafe_during_capture()

    def _unsafe_during_capture(self) -> None:
        """Refuse the call if a running capture forbids unsafe calls of this thread.

        Each capture that forbids it becomes invalid.
        """
        captures = self.graphs.captures
        if captures:
            caller = self.scheduler.caller
            self._spoil([capture for capture in captures if capture.forbids(caller)])

    @staticmethod
    def _spoil(captures: Iterable[Any], code: Any = Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) -> None:
        """Invalidate ``captures`` (None in it stands for no capture), and refuse the call with ``code`` if there is at
        least one.
        """
        running = [capture for capture in captures if capture is not None]
        for capture in running:
            capture.valid = False
        check(not running, code)
