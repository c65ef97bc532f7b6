"""Wrappers of a driver: they record calls or make them fail. Wrappers can be nested.

A wrapper looks up each function once in the wrapped driver. Other names, such as enum and struct classes, come directly
from the wrapped driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from streamalloc.driver.bindings import by_position, cuda, value_count

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver

    # A base of type Any has all driver functions, so type checkers do not take the classes for abstract.
    _Functions: Any
else:
    _Functions = object

Function = Callable[..., tuple[Any, ...]]


class Wrapper(_Functions):  # type: ignore[misc]
    """Base of wrappers: each call of a driver function becomes a call of :meth:`_observe`.

    For type checkers it is a driver. At run time its functions are looked up in the wrapped driver.
    """

    def __init__(self, driver: Driver) -> None:
        self.wrapped: Any = driver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = getattr(self.wrapped, name)
        # A capital after "cu" marks a function (cuMemAlloc), unlike other names (cuuint64_t, CUstream).
        if not (name.startswith("cu") and name[2:3].isupper()):
            return target

        def function(*args: Any, **named: Any) -> tuple[Any, ...]:
            return self._observe(name, target, by_position(name, *args, **named) if named else args)

        function.__name__ = name
        setattr(self, name, function)
        return function

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.wrapped!r}>"


@dataclass(frozen=True)
class Call:
    """Call of a driver function, with its arguments and its answer (``CUresult`` first).

    :func:`traced` records them.
    """

    name: str
    args: tuple[Any, ...]
    answer: tuple[Any, ...]
    thread: int = field(default=0, compare=False)
    """Thread of the call (``threading.get_ident``)."""
    time: int = field(default=0, compare=False)
    """Time of the call in ns (``time.perf_counter_ns``)."""

    def __str__(self) -> str:
        result, *values = self.answer
        shown = ", ".join(_plain(value) for value in values)
        arguments = ", ".join(_plain(arg) for arg in self.args)
        return f"{self.name}({arguments}) -> {_plain(result)} {shown}".rstrip()


def _plain(value: Any) -> str:
    """Return the text of a value: an enum member's name, a handle's number, or the repr."""
    if hasattr(value, "name"):
        return str(value.name)
    if type(value).__module__.startswith("cuda.") and hasattr(value, "__int__"):
        return f"{type(value).__name__}({int(value):#x})"
    return repr(value)


class Traced(Wrapper):
    """Driver that records its calls: :func:`traced`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.calls: list[Call] = []
        """All calls so far in order. It may be cleared."""

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        time = perf_counter_ns()
        answer = function(*args)
        self.calls.append(Call(name, args, answer, threading.get_ident(), time))
        return answer


def traced(driver: Driver) -> Traced:
    """Wrap a driver to record each call in the list ``calls``.

    Examples
    --------
    >>> driver = sa.driver.traced(sa.driver.simulated())
    >>> sa.Device.count(driver=driver)
    1
    >>> driver.calls[-1].name
    'cuDeviceGetCount'
    """
    return Traced(driver)


class Faulty(Wrapper):
    """Driver that refuses the calls that :meth:`fail` names: :func:`faulty`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.seen: list[str] = []
        """Names of all calls since the last :meth:`fail`."""
        self.failed: list[str] = []
        """Names of the calls that were refused."""
        self._target: str | int = ""

    def fail(self, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Refuse some of the later calls, without passing them on. Replaces an earlier fault.

        Parameters
        ----------
        call
            The name of a driver function, or a number n: the n-th call of any function.
        nth
            For a name: the first of its calls that fails (1 is the next one).
        times
            Number of calls that fail from there on.
        result
            The ``CUresult`` that these calls return.

        Raises
        ------
        ValueError
            There is no such function or result, or a number is below 1.
        """
        if isinstance(call, str) and not (call.startswith("cu") and hasattr(cuda, call)):
            raise ValueError(f"call={call!r}: these bindings have no driver function of this name")
        if not hasattr(cuda.CUresult, result):
            raise ValueError(f"result={result!r}: no CUresult; an example is 'CUDA_ERROR_OUT_OF_MEMORY'")
        for name, number in (("call", call), ("nth", nth), ("times", times)):
            if isinstance(number, int) and number < 1:
                raise ValueError(f"{name}={number}: must be at least 1")
        self.stop()
        self.seen.clear()
        self.failed.clear()
        self._first, self._times, self._result = nth, times, getattr(cuda.CUresult, result)
        self._target = call

    def stop(self) -> None:
        """Refuse no more calls: all are passed on again."""
        self._target = ""

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.seen.append(name)
        if isinstance(self._target, int):
            first, number = self._target, len(self.seen)
        elif name == self._target:
            first, number = self._first, self.seen.count(name)
        else:
            return function(*args)
        if first <= number < first + self._times:
            self.failed.append(name)
            return (self._result, *(None for _ in range(value_count(name))))
        return function(*args)


def faulty(
    driver: Driver, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY"
) -> Faulty:
    """Wrap a driver to refuse some calls without making them; arguments and errors as for :meth:`Faulty.fail`.

    The lists ``seen`` and ``failed`` contain the names of all calls and of the refused ones. A sweep stops when
    ``failed`` stays empty.

    Examples
    --------
    >>> driver = sa.driver.faulty(sa.driver.simulated(), "cuMemPoolCreate")
    >>> sa.MemoryPool(sa.Device(0, driver=driver))
    Traceback (most recent call last):
        ...
    streamalloc.OutOfMemoryError: ...
    """
    made = Faulty(driver)
    made.fail(call, nth, times, result)
    return made
