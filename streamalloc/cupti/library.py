"""CUPTI's callback API through ctypes: the library, its one subscription, and its errors.

NVIDIA's Python package for CUPTI is not used, because its callbacks take twice the time of callbacks by ctypes. A
training step makes a thousand driver calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from streamalloc.driver import DriverNotFoundError, real

memory: Any = (ctypes.c_char * (1 << 62)).from_address(0)
"""All addresses of the process as one buffer. Reading a few bytes by a slice or by :mod:`struct` is much faster than by
a ctypes pointer.
"""
_DRIVER_API = 1
_MOST_FUNCTIONS = 1500
"""Upper limit of the function numbers that are tried. CUPTI 13 has about 800 functions."""
_ALREADY = 39
"""Result code ``CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED``."""
_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


class CuptiError(RuntimeError):
    """CUPTI cannot be used: the library is missing, another tool has subscribed, or a call failed.

    :func:`check`, :func:`memory` and :func:`subscribe` raise this error; see :doc:`/docs/reference/cupti`.
    """


class Library:
    """Functions of ``libcupti`` through ctypes. Raises :class:`CuptiError` if the library is not found."""

    def __init__(self) -> None:
        self._library: Any = _load()
        self._subscriber = ctypes.c_void_p()

    def functions(self) -> dict[int, str]:
        """Return the names of the driver functions that CUPTI reports, by CUPTI's number (``cuptiGetCallbackName``)."""
        found, name = {}, ctypes.c_char_p()
        for number in range(1, _MOST_FUNCTIONS):
            if not self._library.cuptiGetCallbackName(_DRIVER_API, number, ctypes.byref(name)) and name.value:
                found[number] = name.value.decode()
        return found

    def subscribe(self, callback: int, user: int, functions: Iterable[int]) -> None:
        """Make CUPTI call a C function before and after each call of ``functions`` in the process (``cuptiSubscribe``,
        ``cuptiEnableCallback``).

        ``callback``: address of the C function. ``user``: its first argument. ``functions``: CUPTI's numbers.

        Raises
        ------
        CuptiError
            Another tool has subscribed (a profiler, a debugger), this process has subscribed already, or
            ``cuptiSubscribe`` fails for another reason.
        """
        to = ctypes.c_void_p(callback), ctypes.c_void_p(user)
        result = self._library.cuptiSubscribe(ctypes.byref(self._subscriber), *to)
        if result:
            raise CuptiError(f"cuptiSubscribe answered {self._text(result)}{_cause(result)}")
        for number in functions:
            self._library.cuptiEnableCallback(1, self._subscriber, _DRIVER_API, number)

    def unsubscribe(self) -> None:
        """End the subscription (``cuptiUnsubscribe``); no effect if there is none. An error of CUPTI is ignored.
        Callbacks on other threads may still run after this method has returned.
        """
        if self._subscriber:
            self._library.cuptiUnsubscribe(self._subscriber)
            self._subscriber = ctypes.c_void_p()

    def _text(self, result: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuptiGetResultString(result, ctypes.byref(name))
        return f"{(name.value or b'an unknown result').decode()} ({result})"


def _cause(result: int) -> str:
    """Return the usual cause of a result of ``cuptiSubscribe``, as the end of a message; empty if none is known."""
    if result == _ALREADY:
        return "; CUPTI takes one: end the other (a profiler, a debugger, another check)"
    try:
        real()
    except DriverNotFoundError as error:
        return f"; a GPU is needed: {error}"
    return ""


def _load() -> Any:
    tried = []
    for path in _paths():
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(str(error))
    raise CuptiError(
        "the CUPTI library was not found. Install it beside the package: pip install 'streamalloc[cupti]'; PyTorch's "
        f"wheels and NVIDIA's toolkit bring it, too. Tried: {'; '.join(tried)}"
    )


def _paths() -> Iterator[str]:
    """Yield the names and paths to try: names that the loader finds, then NVIDIA's wheels, then the CUDA toolkit."""
    yield from _NAMES
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    for folder in (
        *(root / part for root in roots for part in ("cu13/lib", "cuda_cupti/lib")),
        toolkit / "extras/CUPTI/lib64",
        toolkit / "lib64",
    ):
        for name in _NAMES:
            if (folder / name).exists():
                yield str(folder / name)
