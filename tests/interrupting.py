"""Exceptions that signal handlers raise: at the n-th point of a block (:class:`Interrupt`), or at random times
(:class:`interrupts`).

The rule for the package: such an exception corrupts nothing and causes no deadlock, and at most the one object that was
being made leaks. CPython runs a handler at the beginning of a Python function and after the return of a C function.
:class:`Interrupt` raises at the n-th of these points. These points do not count:

* points inside of the driver, because a real driver has none;
* points of finalisers, because Python drops their exceptions;
* the first point of an ``__exit__``, which no Python program can guard;
* the points at which a condition of :mod:`threading` has acquired its lock, or has released the lock to wait.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sized
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest

import streamalloc

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Interrupt", "Interrupted", "interrupts", "lost_one", "since_3_11"]

since_3_11 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 looks for signals also when a function of Python returns"
)
"""Mark that skips tests of signals at random times on Python 3.10."""

_PACKAGE = os.path.dirname(streamalloc.__file__)
_DRIVERS = tuple(f"{_PACKAGE}/{folder}/" for folder in ("checker", "driver", "simulator"))
_WEAK = (weakref.__file__, sys.modules["_weakrefset"].__file__)
_OF_CONDITIONS = tuple(
    vars(threading.Condition)[name].__code__ for name in ("__enter__", "_release_save", "_acquire_restore")
)
_RELEASE = "_release_save"
"""Name of the C function by which a condition releases its ``RLock``."""


class Interrupted(BaseException):
    """Exception that the signal handler raises."""


class Interrupt:
    """Context manager in whose block the n-th point raises :class:`Interrupted`. With 0 no point raises, and the points
    are recorded.

    ``finalisers``: whether the points of finalisers count, too. Python drops the exception of a finaliser.
    """

    def __init__(self, nth: int = 0, *, finalisers: bool = False) -> None:
        self.left = nth
        """Number of points that are left until a point raises."""
        self.came = ""
        """Place of the point that raised, as text; empty before."""
        self._finalisers = finalisers
        self._points: list[tuple[CodeType, str]] = []
        self._inside: FrameType | None = None

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        # Kept: the interpreter may call the function once more after it has dropped its own reference.
        self._profile = self._event
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self._hook

    def _unraisable(self, found: Any) -> None:
        if found.exc_type is not Interrupted:
            self._hook(found)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the recorded points, from 1 on."""
        return iter(range(1, len(self._points) + 1))

    def distinct(self) -> list[int]:
        """Return the numbers of recorded points, one for each kind of event in each function of the package, in
        ascending order.
        """
        found: dict[tuple[CodeType, str], int] = {}
        for number, point in enumerate(self._points, 1):
            if point[0].co_filename.startswith(_PACKAGE):
                found.setdefault(point, number)
        return sorted(found.values())

    def _event(self, frame: FrameType, event: str, function: object) -> None:
        code = frame.f_code
        if self._inside is not None:
            if event == "return" and frame is self._inside:
                self._inside = None
        elif event == "call" and self._is_another_s(code):
            self._inside = frame
        elif event == "c_return" or (event == "call" and code.co_name != "__exit__"):
            if code.co_filename == __file__ or getattr(function, "__name__", "") == _RELEASE:
                return
            self._points.append((code, event))
            self.left -= 1
            if not self.left:
                self.came = f"{code.co_name} at {event}, {code.co_filename}:{frame.f_lineno}"
                raise Interrupted

    def _is_another_s(self, code: CodeType) -> bool:
        file = code.co_filename
        finaliser = (code.co_name == "__del__" and not self._finalisers) or file in _WEAK
        # Nothing is raised out of a function that the collector calls either; Hypothesis registers one.
        finaliser = finaliser or any(getattr(one, "__code__", None) is code for one in gc.callbacks)
        return finaliser or code in _OF_CONDITIONS or file.startswith(_DRIVERS)


class interrupts:
    """Context manager in whose block signals arrive after random times; their handler raises :class:`Interrupted`. The
    end of the block drops this exception.
    """

    def __init__(self, longest: float = 0.001) -> None:
        self.came = 0
        """Number of times that the handler has raised."""
        self._longest = longest
        self._over = False
        self._inside: FrameType | None = None

    def __enter__(self) -> Self:
        self._inside = sys._getframe(1)
        # For finalisers that are stopped: the hook of pytest, which takes long, would be stopped as well.
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._longest)
        return self

    def _unraisable(self, found: Any) -> None:
        if found.exc_type is not Interrupted:
            self._hook(found)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        # Python 3.12 and 3.13 do not leave a block by its end where a loop in it jumps back.
        around = sys.version_info >= (3, 12) and frame is self._inside
        caller = frame
        while caller is not None and caller is not self._inside:
            # Neither where the block begins and ends, nor in a handler that runs there.
            around = around or caller.f_code in _AROUND
            caller = caller.f_back
        if self._over or caller is None:
            return  # the block, or the function that it is in, has been left
        soon = self._longest if around else random.uniform(self._longest / 20, self._longest)
        signal.setitimer(signal.ITIMER_REAL, soon)
        if not around:
            self.came += 1
            raise Interrupted

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._over = True
        self._inside = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        sys.unraisablehook = self._hook
        return kind is Interrupted


_AROUND = tuple(vars(interrupts)[name].__code__ for name in ("__enter__", "__exit__", "_handle", "_unraisable"))


def lost_one(left: Mapping[str, Sized]) -> bool:
    """Whether at most one handle of each kind is left, as after the leak of one object."""
    return all(len(handles) <= 1 for handles in left.values())
