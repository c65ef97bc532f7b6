"""Drivers around a driver: they pass calls on, and record them, check them, or make them fail. They stack.

Each wrapper is made of one *observer*, an object with ``call(name, function, args)``; what it wraps is only looked up
once per function. What is not a driver function (the enum and struct classes) comes straight from the wrapped driver.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TextIO

from streamalloc.driver.bindings import cuda

if TYPE_CHECKING:
    from streamalloc.driver.protocol import Driver as _Interface
else:
    _Interface = object

__all__ = ["Call", "Checked", "DriverMisuseError", "Faulty", "Traced", "checked", "faulty", "traced"]

Function = Callable[..., tuple[Any, ...]]


class _Wrapper(_Interface):
    """The common part of all wrappers: every driver function goes through :meth:`_observe`.

    To type checkers it is a driver; at run time each function is looked up in the driver that is wrapped.
    """

    def __init__(self, driver: _Interface) -> None:
        self._wrapped: Any = driver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = getattr(self._wrapped, name)
        # Capital letters after "cu" tell a function (cuMemAlloc) from the module's other names (cuuint64_t, CUstream).
        if not (name.startswith("cu") and name[2:3].isupper()):
            return target

        def function(*args: Any, **named: Any) -> tuple[Any, ...]:
            if not named:
                return self._observe(name, target, args)
            # Observers see values in the order given; the driver gets each under its name.
            return self._observe(name, lambda *_: target(*args, **named), (*args, *named.values()))

        function.__name__ = name
        setattr(self, name, function)
        return function

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self._wrapped!r}>"


@dataclass(frozen=True)
class Call:
    """One call of a driver function, with its arguments and its whole answer (``CUresult`` first)."""

    name: str
    args: tuple[Any, ...]
    answer: tuple[Any, ...]
    thread: int = field(default=0, compare=False)
    """The thread that made it (``threading.get_ident``)."""
    time: int = field(default=0, compare=False)
    """When it was made: nanoseconds of a clock that began at any time (``time.perf_counter_ns``)."""

    def __str__(self) -> str:
        result, *values = self.answer
        shown = ", ".join(_plain(value) for value in values)
        arguments = ", ".join(_plain(arg) for arg in self.args)
        return f"{self.name}({arguments}) -> {_plain(result)} {shown}".rstrip()


def _plain(value: Any) -> str:
    """An enum member by its name, a handle by its number, anything else by its repr."""
    if hasattr(value, "name"):
        return str(value.name)
    if type(value).__module__.startswith("cuda.") and hasattr(value, "__int__"):
        return f"{type(value).__name__}({int(value):#x})"
    return repr(value)


class Traced(_Wrapper):
    """A driver that records its calls: :func:`traced`."""

    def __init__(self, driver: _Interface, to: TextIO | None) -> None:
        super().__init__(driver)
        self.calls: list[Call] = []
        """All calls so far, in order. It may be cleared."""
        self._to = to

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        time = perf_counter_ns()
        answer = function(*args)
        call = Call(name, args, answer, threading.get_ident(), time)
        self.calls.append(call)
        if self._to is not None:
            print(call, file=self._to)
        return answer


def traced(driver: _Interface, to: TextIO | None = None) -> Traced:
    """A driver that records each call in its list ``calls``, and prints it to ``to`` where that is given."""
    return Traced(driver, to)  # type: ignore[abstract]  # it looks functions up


class DriverMisuseError(AssertionError):
    """Found by :func:`checked`: something released twice or never, or a call that broke the return convention."""


# What makes and what ends each kind of resource. A maker's handle is the first value of its answer; an ender's is its
# first argument.
_RESOURCES = {
    "device memory": ("cuMemAlloc", "cuMemFree cuMemFreeAsync"),
    "pool allocation": ("cuMemAllocAsync cuMemAllocFromPoolAsync cuMemPoolImportPointer", "cuMemFreeAsync cuMemFree"),
    "pinned memory": ("cuMemHostAlloc", "cuMemFreeHost"),
    "pool": ("cuMemPoolCreate", "cuMemPoolDestroy"),
    "stream": ("cuStreamCreate cuStreamCreateWithPriority", "cuStreamDestroy"),
    "event": ("cuEventCreate cuIpcOpenEventHandle", "cuEventDestroy"),
    "graph": ("cuStreamEndCapture", "cuGraphDestroy"),
    "executable graph": ("cuGraphInstantiate", "cuGraphExecDestroy"),
    # also of multicast objects, whose handles are of the same kind
    "physical memory": (
        "cuMemCreate cuMulticastCreate cuMemRetainAllocationHandle cuMemImportFromShareableHandle",
        "cuMemRelease",
    ),
    "memory of another process": ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle"),
    "address range": ("cuMemAddressReserve", "cuMemAddressFree"),
    "array": ("cuArray3DCreate", "cuArrayDestroy"),
    "mipmapped array": ("cuMipmappedArrayCreate", "cuMipmappedArrayDestroy"),
}
_MAKERS = {name: kind for kind, (makers, _) in _RESOURCES.items() for name in makers.split()}
_ENDERS = {
    name: [kind for kind, (_, also) in _RESOURCES.items() if name in also.split()]
    for _, enders in _RESOURCES.values()
    for name in enders.split()
}


class Checked(_Wrapper):
    """A driver that keeps account of what is made and released: :func:`checked`."""

    def __init__(self, driver: _Interface) -> None:
        super().__init__(driver)
        # Taken again by the same thread where a finaliser runs in the middle of an observation.
        self._lock = threading.RLock()
        self._live: Counter[tuple[str, int]] = Counter()
        self._graph_memory: set[int] = set()

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        handle = int(args[0] or 0) if name in _ENDERS and args else 0
        if handle and handle not in self._graph_memory:
            kinds = _ENDERS[name]
            with self._lock:
                if not any(self._live[kind, handle] for kind in kinds):
                    raise DriverMisuseError(f"{name}({handle:#x}): no live {' or '.join(kinds)} has this handle")
        capturing = name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync") and self._captures(args[-1])
        answer = function(*args)
        if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], cuda.CUresult):
            raise DriverMisuseError(f"{name} answered {answer!r}, not a tuple that starts with a CUresult")
        if not answer[0]:
            with self._lock:
                if name == "cuMemMap":
                    self._live["mapping", int(args[0])] += 1
                elif name == "cuMemUnmap":
                    # of whole mappings: all that begin in the range
                    start, size = int(args[0]), int(args[1])
                    for key in [key for key in self._live if key[0] == "mapping" and 0 <= key[1] - start < size]:
                        del self._live[key]
                else:
                    self._count(name, handle, answer, capturing)
        return answer

    def _captures(self, stream: Any) -> bool:
        answer = self._wrapped.cuStreamIsCapturing(stream)
        return not answer[0] and int(answer[1]) != 0

    def _count(self, name: str, handle: int, answer: tuple[Any, ...], capturing: bool) -> None:
        if name in _MAKERS and int(answer[1]):
            if capturing:
                self._graph_memory.add(int(answer[1]))
            else:
                # An address may be handed out again once a graph that owned it is gone.
                self._graph_memory.discard(int(answer[1]))
                self._live[_MAKERS[name], int(answer[1])] += 1
        elif handle:
            for kind in _ENDERS[name]:
                if self._live[kind, handle]:
                    self._live[kind, handle] -= 1
                    break

    def outstanding(self) -> dict[str, list[int]]:
        """What was made through this driver and not released, by kind: driver handles or addresses.

        A ``"mapping"`` is there from ``cuMemMap`` to ``cuMemUnmap``, by its address.
        """
        with self._lock:
            live: dict[str, list[int]] = {}
            for (kind, handle), count in sorted(self._live.items()):
                if count > 0:
                    live.setdefault(kind, []).append(handle)
            return live

    def assert_nothing_left(self, besides: Iterable[str] = ()) -> None:
        """Raise :class:`DriverMisuseError` if anything is outstanding, except of the kinds in ``besides``."""
        left = {kind: handles for kind, handles in self.outstanding().items() if kind not in set(besides)}
        if left:
            shown = "; ".join(f"{len(handles)} {kind}" for kind, handles in left.items())
            raise DriverMisuseError(f"not released: {shown} ({left})")


def checked(driver: _Interface) -> Checked:
    """A driver that keeps account of what is made and released.

    A release of something that is not live raises :class:`DriverMisuseError` before the driver is reached;
    ``outstanding()`` lists what was not released and ``assert_nothing_left()`` raises where that is not nothing.
    Mappings of memory are counted as well. Memory that a capture makes belongs to its graph and is not counted.
    """
    return Checked(driver)  # type: ignore[abstract]  # it looks functions up


class Faulty(_Wrapper):
    """A driver that refuses some calls: :func:`faulty`."""

    def __init__(self, driver: _Interface, call: str | int, nth: int, times: int, result: str) -> None:
        super().__init__(driver)
        self._target = call
        self._first = nth
        self._times = times
        self._result = getattr(cuda.CUresult, result)
        self.seen: list[str] = []
        """The names of all calls."""
        self.failed: list[str] = []
        """The names of those that were refused."""

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
            return (self._result, *(None for _ in range(_VALUES.get(name, _guess_values(name)))))
        return function(*args)


# How many values follow the CUresult where it is not what the name suggests (makers and getters: one, others: none).
_VALUES = {
    "cuMemGetInfo": 2,
    "cuMemGetAddressRange": 2,
    "cuGraphGetNodes": 2,
    "cuCtxGetStreamPriorityRange": 2,
    "cuDevicePrimaryCtxGetState": 2,
    "cuMemAllocPitch": 2,
    "cuCtxPopCurrent": 1,
    "cuDevicePrimaryCtxRetain": 1,
    "cuDeviceTotalMem": 1,
    "cuDeviceCanAccessPeer": 1,
    "cuStreamIsCapturing": 1,
    "cuStreamEndCapture": 1,
    "cuGraphInstantiate": 1,
    "cuEventElapsedTime": 1,
}


def _guess_values(name: str) -> int:
    return int(name in _MAKERS or any(word in name for word in ("Get", "Retain", "Import", "Export")))


def faulty(
    driver: _Interface, call: str | int, nth: int = 1, times: int = 1, result: str = "CUDA_ERROR_OUT_OF_MEMORY"
) -> Faulty:
    """A driver that refuses some calls without passing them on.

    Parameters
    ----------
    call
        The name of the function that fails, or a number n: the n-th call of any function.
    nth
        For a name: the first of its calls that fails (1 is the next one).
    times
        How many calls fail from there on.
    result
        The ``CUresult`` that they answer.

    The wrapper's lists ``seen`` and ``failed`` name all calls and those that were refused, so that a sweep can stop
    when a run no longer reaches the fault.
    """
    return Faulty(driver, call, nth, times, result)  # type: ignore[abstract]  # it looks functions up
