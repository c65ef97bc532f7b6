"""Base of all calls: the lock, the result tuple, and the rules during stream capture."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from streamalloc.driver.bindings import cuda, value_count

from .. import arguments, call_lock
from ..errors import Fault, Result, check, code_of, not_modelled
from ..machine import Machine
from ..memory import is_code
from ..timeline import HostFunction, Operation, Stream

Method = Callable[..., Any]


EDGE_DATA: bool = hasattr(cuda, "cuMemGetDefaultMemPool")
"""Whether the bindings are for CUDA 13, with edge data in more results."""
GONE = "using registered memory that the host has unmapped"
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
_IN_HOST_FUNCTIONS = re.compile(
    r"cuInit|cuDriverGetVersion|cuGetError\w+|cuThreadExchangeStreamCaptureMode|cuLaunchHostFunc|cuGraphLaunch"
    r"|cuMemset\w+Async|cu(Stream|Event)(?!Create)\w+"
)
"""Calls that a host function may make (observed on H200: test_host_functions)."""


def call(parameters: str, body: Method, *first: Any) -> Any:
    """Make one of several driver calls that share a body. The body gets ``first`` before the arguments.

    ``parameters``: names of :data:`.arguments.BY_NAME`, or names with kinds, such as ``"pCopy:cuda.CUDA_MEMCPY2D
    hStream"``.
    """

    def method(self: Calls, *given: Any) -> Any:
        return body(self, *first, *given)

    pairs = [one.partition(":")[::2] for one in parameters.split()]
    method.__annotations__ = {name: kind or arguments.BY_NAME.get(name, "Any") for name, kind in pairs}
    return method


def with_async(parameters: str, body: Method, *first: Any) -> tuple[Any, Any]:
    """Make a driver call without a stream, and its variant ``...Async`` with a stream as the last parameter."""
    return call(parameters, body, *first), call(f"{parameters} hStream", body, *first)


_SOURCE = """
def {name}(self{parameters}):
    machine = self._machine
    if exiting() and not usable():
        return (deinitialized, {nothing})
    if not machine.ready:
        code = refusal(machine, {before_init})
        if code is not None:
            return (code, {nothing})
    {convert}
    try:
        caller = machine.thread.caller
    except AttributeError:
        caller = machine.thread.caller = Caller()
    {permit}
    enter(caller.is_main)
    machine.timeline.caller = caller
    try:
        {find}
        value = method(self{given})
    except Fault as fault:
        return (fault.code, {nothing})
    except OSError as error:
        return (code_of(error), {nothing})
    except WaitEnded as ended:
        raise ended.error from None
    except BaseException as error:
        machine.cut_short("{name}", error)
        raise
    finally:
        leave(caller.is_main)
    return (success, {value})
"""
"""Source of a driver call. Its parameters keep converted objects alive."""


def driver_call(name: str, method: Method) -> Method:
    """Make a driver call from a method that returns its results and raises :class:`Fault`.

    The call returns a tuple of the result code and as many values as the bindings document; after a failure the values
    are None. Arguments are converted, and objects looked up, by their annotations. The call is compiled, because a
    general function would parse its arguments each time.
    """
    space: dict[str, Any] = {"method": method, **_NAMES}
    parameters, given, convert, find = [], [], [], []
    kinds = {one: kind for one, kind in method.__annotations__.items() if one != "return"}
    defaults = method.__defaults__ or ()
    for at, (one, annotation) in enumerate(kinds.items(), len(defaults) - len(kinds)):
        parameters.append(one if at < 0 else f"{one}={defaults[at]!r}")
        space[f"convert_{one}"], space[f"find_{one}"] = conversion, finder = arguments.kind(one, annotation)
        converted = f"convert_{one}({one})"
        if isinstance(conversion, arguments.Handle):
            space[f"class_{one}"] = conversion.cls
            converted = f"int({one}) if type({one}) is class_{one} else {converted}"
        now = one
        if conversion is not None:
            now = f"{one}_number"
            convert.append(f"{now} = {converted}")
        if finder is not None:
            find.append(f"{one}_found = find_{one}(machine, {now})")
            now = f"{one}_found"
        given.append(now)
    values = value_count(name)
    nothing = "None, " * values
    refused = f"if caller.in_host_function: return (not_permitted, {nothing})"
    source = _SOURCE.format(
        name=name,
        parameters="".join(f", {one}" for one in parameters),
        given="".join(f", {one}" for one in given),
        convert="\n    ".join(convert),
        find="\n        ".join(find),
        before_init=name in _BEFORE_INIT,
        permit="" if _IN_HOST_FUNCTIONS.fullmatch(name) else refused,
        nothing=nothing,
        value="value" if values == 1 else "*value" if values else "",
    )
    exec(compile(source, f"<simulated {name}>", "exec"), space)
    made: Method = space[name]
    made.__doc__, made.__module__ = method.__doc__, method.__module__
    return made


def _refusal(machine: Machine, before_init: bool) -> Any:
    """The result code if the machine is not ready; None if the call may be made."""
    machine.check_whole()
    if before_init and not machine.forked:
        return None
    return Result.CUDA_ERROR_DEINITIALIZED if machine.timeline.closed else Result.CUDA_ERROR_NOT_INITIALIZED


_names_of_lock = vars(call_lock)


def _usable(names: dict[str, Any] = _names_of_lock) -> bool:
    """Whether calls can be made while the interpreter exits: the names of modules still exist, and no thread holds the
    lock that will never run again. The real driver answers to the end (observed on H200: test_life).
    """
    acquire = names["_acquire"]
    if acquire is None or not acquire(False):
        return False
    names["_release"]()
    return True


_NAMES = {
    "Caller": call_lock.Caller,
    "Fault": Fault,
    "WaitEnded": call_lock.WaitEnded,
    "code_of": code_of,
    "deinitialized": Result.CUDA_ERROR_DEINITIALIZED,
    "enter": call_lock.enter,
    "exiting": sys.is_finalizing,
    "leave": call_lock.leave,
    "not_permitted": Result.CUDA_ERROR_NOT_PERMITTED,
    "refusal": _refusal,
    "success": Result.CUDA_SUCCESS,
    "usable": _usable,
}
"""Stored here because a module's names may be gone at interpreter exit."""


class _Uncompiled:
    """A driver call that is compiled at its first look-up."""

    def __init__(self, owner: type[Calls], name: str) -> None:
        self._owner, self._name = owner, name
        self._method = vars(owner)[name]
        self._exiting, self._usable = sys.is_finalizing, _usable
        self._refused = (Result.CUDA_ERROR_DEINITIALIZED, *[None] * value_count(name))

    def __get__(self, calls: Any, cls: Any) -> Any:
        if self._exiting() and not self._usable():
            return lambda *_, **__: self._refused
        made = driver_call(self._name, self._method)
        setattr(self._owner, self._name, made)
        # not by a new look-up: while the interpreter exits, subclasses keep what they have found before
        return made.__get__(calls, cls)


class Calls:
    """Base class of the groups of driver calls: the machine, and common look-ups.

    Methods named like driver functions become driver calls.
    """

    _machine: Machine

    def __init_subclass__(cls) -> None:
        for name in [name for name in vars(cls) if name.startswith("cu")]:
            setattr(cls, name, _Uncompiled(cls, name))

    def _find(self, kind: Any, handle: Any) -> Any:
        """Look up the object of a handle that is not a parameter of the call."""
        convert, find = kind.__metadata__
        return find(self._machine, convert(handle))

    def _host_function(self, address: int, data: int) -> Operation:
        check(address)
        not_modelled(not is_code(address), "a host function where no code lies: the real driver crashes")
        function = _HOST_FUNCTION(address)
        return self._queued_function(lambda: function(data or None))

    def _queued_function(self, function: Callable[[], object]) -> Operation:
        """A host function or callback as an operation."""
        thread = self._machine.thread

        def run() -> None:
            thread.caller = call_lock.Caller(in_host_function=True)
            function()

        return HostFunction(self._machine.timeline, run)

    def _check_launch(self, stream: Stream, name: str) -> None:
        """Refuse work that is not modelled during a capture."""
        not_modelled(self._captured(stream), f"{name} during stream capture")

    def _submit(
        self, stream: Stream, operation: Operation, kind: str, values: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Submit work to a stream, or to the graph that is being captured from it. ``values`` returns the parameters of
        the node.
        """
        if self._captured(stream):
            stream.capture.add(kind, operation, stream, None if values is None else values())
        else:
            stream.submit(operation)

    def _captured(self, stream: Stream) -> bool:
        """Whether ``stream`` is being captured. Raises if the work is not allowed in the stream or in the graph."""
        if not self._machine.graphs.captures:
            return False
        capture = stream.capture
        if capture is None:
            self._not_behind_captures(stream)
            return False
        check(capture.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return True

    def _not_behind_captures(self, stream: Stream) -> None:
        """Invalidate captures of blocking streams, which the legacy stream would have to wait for."""
        if self._machine.graphs.captures:
            self._spoil([peer.capture for peer in stream.peers or ()], Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def _not_captured(self, stream: Stream) -> None:
        """For a call that reports on the work of ``stream``: fail and invalidate the capture if the stream is
        captured.
        """
        if self._machine.graphs.captures:
            self._spoil([stream.capture])
            self._not_behind_captures(stream)
            self._unsafe_during_capture()

    def _unsafe_during_capture(self) -> None:
        """For a call that is unsafe during captures: fail, and invalidate each running capture that forbids it."""
        captures = self._machine.graphs.captures
        if captures:
            caller = self._machine.timeline.caller
            self._spoil([capture for capture in captures if capture.forbids(caller)])

    @staticmethod
    def _spoil(captures: Iterable[Any], code: Any = Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) -> None:
        """Invalidate these captures. The call fails if there are any."""
        running = [capture for capture in captures if capture is not None]
        for capture in running:
            capture.valid = False
        check(not running, code)
