"""Wrappers of a driver that record its calls or make calls fail. Wrappers can be nested.

A wrapper looks up each function once in the wrapped driver. For other names, such as those of enum and struct classes,
a wrapper returns the object of the wrapped driver.
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

    # With a base class of type Any, type checkers accept every driver function as an attribute.
    _Functions: Any
else:
    _Functions = object

Function = Callable[..., tuple[Any, ...]]


class Wrapper(_Functions):  # type: ignore[misc]
    """Base class of wrappers: each call of a driver function becomes a call of :meth:`_observe`.

    To type checkers, a wrapper is a driver. At run time its functions are looked up in the wrapped driver.
    """

    def __init__(self, driver: Driver) -> None:
        self.wrapped: Any = driver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = getattr(self.wrapped, name)
        # Only functions are wrapped. They have a capital after "cu" (cuMemAlloc), unlike other names (cuuint64_t,
        # CUstream).
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
    """Call of a driver function, with its name, its arguments and the tuple that it returned (``CUresult`` first).

    :func:`traced` records such calls.
    """

    name: str
    args: tuple[Any, ...]
    answer: tuple[Any, ...]
    thread: int = field(default=0, compare=False)
    """Identifier of the thread that made the call (``threading.get_ident``)."""
    time: int = field(default=0, compare=False)
    """Time at the beginning of the call in ns (``time.perf_counter_ns``)."""

    def __str__(self) -> str:
        result, *values = self.answer
        shown = ", ".join(_plain(value) for value in values)
        arguments = ", ".join(_plain(arg) for arg in self.args)
        return f"{self.name}({arguments}) -> {_plain(result)} {shown}".rstrip()


def _plain(value: Any) -> str:
    """Return a value as text: the name of an enum member, type and number of a handle, or the ``repr`` of other
    values.
    """
    if hasattr(value, "name"):
        return str(value.name)
    if type(value).__module__.startswith("cuda.") and hasattr(value, "__int__"):
        return f"{type(value).__name__}({int(value):#x})"
    return repr(value)


class Traced(Wrapper):
    """Driver that records its calls: the result of :func:`traced`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.calls: list[Call] = []
        """All calls that have returned, in the order of their returns. The list may be cleared."""

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        time = perf_counter_ns()
        answer = function(*args)
        self.calls.append(Call(name, args, answer, threading.get_ident(), time))
        return answer


def traced(driver: Driver) -> Traced:
    """Return a driver that passes each call to ``driver`` and records it in the list ``calls`` (:class:`Call`).

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
    """Driver that refuses the calls that :meth:`fail` names: the result of :func:`faulty`."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.seen: list[str] = []
        """Names of all calls since the last :meth:`fail`."""
        self.failed: list[str] = []
        """Names of the calls that were refused since the last :meth:`fail`."""
        self._target: str | int = ""

    def fail(self, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Refuse some of the later calls without passing them to the wrapped driver. A second call of this method
        replaces the first.

        Parameters
        ----------
        call
            The name of a driver function, or a number n for the n-th call of any function.
        nth
            If ``call`` is a name: the number of the first call of this function that fails (1 is the next call).
        times
            Number of calls that fail, beginning with that call.
        result
            The name of the ``CUresult`` that these calls return.

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
        """Refuse no more calls: all calls are passed to the wrapped driver again."""
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
    """Return a driver that refuses some calls and passes the other calls to ``driver``. Arguments and errors as for
    :meth:`Faulty.fail`.

    Its lists ``seen`` and ``failed`` contain the names of all calls and of the refused calls. A test that refuses each
    call in turn, by its number, ends when ``failed`` stays empty.

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
