"""A signal at the n-th bytecode of a block: the handler runs where CPython runs it, and raises.

CPython looks for signals at three kinds of bytecode only: where a function of Python begins or goes on (``RESUME``),
after a call of something that is no function of Python (``CALL``, ``CALL_FUNCTION_EX``), and where a loop jumps back.
So nothing is raised here by hand: a trace function counts bytecodes, and then lets the signal come before the next one,
by functions of C alone, and CPython runs the handler where it would run that of a real signal.

A driver function is one call to its caller: :class:`Atomic` has a handler wait until it has returned.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Atomic", "Interrupted", "Place", "Points", "Signal", "since_3_11"]

since_3_11 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 looks for signals also when a function of Python returns"
)
"""For tests of interrupts at any point: what a function has made may be lost then."""


class Interrupted(BaseException):
    """What the signal handler raises."""


class Place(NamedTuple):
    """Where a handler has run."""

    function: str
    opcode: str
    file: str
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        """Where a frame is."""
        code = frame.f_code
        return cls(_name(code), _opcode(code, frame.f_lasti), code.co_filename, frame.f_lineno)

    def __str__(self) -> str:
        return f"{self.function} at {self.opcode}, {self.file}:{self.line}"


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


@functools.cache
def _opcodes(code: CodeType) -> bytes:
    return code.co_code


def _opcode(code: CodeType, offset: int) -> str:
    return dis.opname[_opcodes(code)[offset]]


def _in_c(name: str, arguments: int) -> Any:
    """A function of Python's own library that can be called with objects, of which it looks at none, and gives None."""
    function = ctypes.PyDLL(None)[name]
    function.argtypes = [ctypes.py_object] * arguments
    function.restype = None
    return function


_nothing = _in_c("PyGILState_Check", 3)
_signal = _in_c("PyErr_SetInterrupt", 3)
_signal_at_end = _in_c("PyErr_SetInterrupt", 1)


class _Token:
    __slots__ = ("__weakref__",)


class Atomic:
    """A driver around a driver, each of whose functions is one call, as those of C are."""

    used = None  # who is told of uses gets no cached memory

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if name.startswith("cu") and name[2:3].isupper():
            # A partial is called by C, which looks for signals when it has returned.
            function = functools.partial(_call, function)
        setattr(self, name, function)
        return function


_late: list[Any] = []
"""The signal that has come in a driver function, which sets it again when it returns."""


def _call(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    finally:
        if _late and _late[0] is None:
            # It goes when this frame does, and then the callback, of C, sets the signal.
            token = _Token()
            _late[0] = weakref.ref(token, _signal_at_end)


_CALL = _call.__code__


class Signal:
    """A block in which a signal comes before the n-th bytecode, which is not the first."""

    def __init__(self, nth: int) -> None:
        self.came: Place | None = None
        """Where the handler has run and raised; None where it has not, in the block."""
        self.finaliser: Place | None = None
        """The finaliser in which that was: Python tells what comes out of one, and goes on."""
        self._left = nth
        self._over = False

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._tracer = sys.gettrace()
        self._block = sys._getframe(1)
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        sys.settrace(self._tracer)
        _late.clear()
        signal.signal(signal.SIGINT, self._before)
        sys.unraisablehook = self._hook
        del self._block

    def _unraisable(self, found: Any) -> None:
        if found.exc_type is not Interrupted:
            self._hook(found)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if self._over or self.came is not None or frame is None or frame is self._block:
            return
        around = list(self._around(frame))
        if any(caller.f_code is _CALL for caller in around):
            if not _late:
                _late.append(None)
            return
        tracing = [caller for caller in around if caller.f_code in _TRACING]
        if tracing and tracing[-1].f_back is not None:
            # A generator goes on, which had its trace function before: at its next bytecode.
            tracing[-1].f_back.f_trace = _signal
            return
        if any(caller.f_code in _OURS for caller in around):
            return
        sys.settrace(None)
        self.came = Place.of(frame)
        self.finaliser = next((Place.of(caller) for caller in around if caller.f_code.co_name == "__del__"), None)
        raise Interrupted

    def _around(self, frame: FrameType) -> Iterator[FrameType]:
        """A frame of the block, and its callers."""
        caller: FrameType | None = frame
        while caller is not None and caller is not self._block:
            yield caller
            caller = caller.f_back

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        if any(caller.f_code is _CALL or caller.f_code in _OURS for caller in self._around(frame)):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "opcode":
            self._comes_to(frame)

    def _comes_to(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 1:
            # From the next event on, whatever it is, all that runs is C's.
            for caller in self._around(frame):
                if caller.f_trace is not None:
                    caller.f_trace = _signal
            sys.settrace(_nothing)


_OURS = {vars(Signal)[name].__code__ for name in ("__enter__", "__exit__", "_unraisable")}
_TRACING = {vars(Signal)[name].__code__ for name in ("_called", "_traced", "_comes_to")}


class Points(Signal):
    """A block in which no signal comes, and which finds the bytecodes where one makes a difference.

    Iterated, it gives what :class:`Signal` takes: before which bytecodes a signal has to come so that CPython looks for
    it at their end, or where a function begins that they call.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._count = 0
        self._places: dict[int, list[tuple[CodeType, str]]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(number for number in self._places if number > 1))

    def at(self, function: str, opcode: str) -> list[int]:
        """Those of a function, by its qualified name, and a bytecode."""
        return [
            number
            for number, places in self._places.items()
            if any((_name(code), name) == (function, opcode) for code, name in places) and number > 1
        ]

    def distinct(self, folder: Path) -> list[int]:
        """The first one of each kind of bytecode in each function of a folder."""
        found: dict[tuple[CodeType, str], int] = {}
        for number in self:
            for place in self._places[number]:
                if place[0].co_filename.startswith(str(folder)):
                    found.setdefault(place, number)
        return sorted(set(found.values()))

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        traced = super()._called(frame, event, argument)
        if traced is not None:
            # No event comes before this bytecode.
            self._places.setdefault(self._count, []).append((frame.f_code, "RESUME"))
        return traced

    def _comes_to(self, frame: FrameType) -> None:
        self._count += 1
        name = _opcode(frame.f_code, frame.f_lasti)
        if name.startswith(_LOOK):
            self._places.setdefault(self._count, []).append((frame.f_code, name))


_LOOK = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
