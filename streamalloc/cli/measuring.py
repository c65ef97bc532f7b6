"""What the benchmark's sections share: how long to measure, on what, in which order, and how figures are summed up."""

from __future__ import annotations

import contextlib
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import KEEP_ALL, Chosen

__all__ = ["SIZE", "Bench", "Call", "Effort", "Unavailable", "prepared", "rotated", "step_times", "value_of"]

SIZE = 4096

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    block: float
    """Seconds that one block of calls is meant to take."""
    live: tuple[int, ...]
    """How many allocations are alive while a pair is timed; a simulated driver is spared the last figure."""
    host_buffers: int
    imports: int
    growths: int
    """How often a buffer is grown; a multiple of 6 has every order of three contenders equally often."""
    whole_devices: int
    """How often a buffer is grown to the whole device."""
    evictions: int
    """How often a buffer is evicted and restored."""
    evicted: int
    """How large it is, in bytes."""


class Unavailable(Exception):
    """A section cannot be measured here; the message says why."""


def value_of(answer: Any) -> Any:
    """The value of a raw call that succeeded; None where it has none."""
    error, *values = answer
    if error:
        raise RuntimeError(error)
    return values[0] if values else None


class Bench:
    """What the rows share: a device, a stream and a pool, each as the library's object and as the driver's."""

    def __init__(self, chosen: Chosen, effort: Effort, resources: contextlib.ExitStack) -> None:
        self.chosen = chosen
        self.effort = effort
        self.resources = resources
        self.array: np.ndarray[Any, Any] = np.empty(SIZE, np.uint8)
        """Ordinary memory of the host, for rows that copy to it."""
        # Any: the rows also use the bindings' classes, which every driver passes on.
        self.driver: Any = cast(Any, chosen.driver)
        self.device: sa.Device = sa.Device(0)
        # Raw copies want the stream's context to be the current one; the library sees to that itself.
        resources.enter_context(self.device.current())
        self.stream: sa.Stream = resources.enter_context(self.device.create_stream())
        self.raw_stream: Any = self.driver.CUstream(self.stream.handle)
        self.pool, self.raw_pool = self.new_pool()

    def new_pool(self) -> tuple[sa.MemoryPool, Any]:
        """A pool that gives nothing back, and its driver handle."""
        pool = self.resources.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP_ALL))
        return pool, self.driver.CUmemoryPool(pool.handle)

    def need_virtual_memory(self) -> None:
        """End a section that maps memory where that cannot be done."""
        if not self.device.supports.virtual_memory_management:
            raise Unavailable("this device's memory cannot be mapped by hand")

    def buffer(self) -> sa.Buffer:
        """4 KiB that stay for as long as the benchmark runs."""
        return self.resources.enter_context(self.pool.allocate(SIZE, self.stream))


def prepared(
    bench: Bench, ways: Sequence[Any], setup: Callable[[Any], T]
) -> tuple[list[tuple[Any, T]], list[dict[str, Any]]]:
    """The ways that can be measured with what was set up for each, and rows that say why others cannot.

    A way has a ``name``, and is of another library (``other``) or of this one. Others are measured on a GPU only. One
    that is absent is left out without a word, one that does not fit this driver has a row that says so.
    """
    ready: list[tuple[Any, T]] = []
    missing: list[dict[str, Any]] = []
    for way in ways:
        if way.other and bench.chosen.is_simulated:
            continue
        try:
            ready.append((way, setup(way)))
        except Exception as error:
            if not way.other:
                raise
            if not isinstance(error, ImportError):
                missing.append({"name": way.name, "unavailable": f"{type(error).__name__}: {error}"})
    return ready, missing


def rotated(items: Sequence[T], rounds: int) -> Iterator[T]:
    """All items in each round. Each begins with another one, so that none always follows the same."""
    for number in range(rounds):
        first = number % len(items)
        yield from (*items[first:], *items[:first])


def step_times(step: Call, count: int) -> list[float]:
    """Microseconds that each of ``count`` calls takes. No garbage is collected during one."""
    return [seconds * 1e6 for seconds in timeit.repeat(step, number=1, repeat=count)]
