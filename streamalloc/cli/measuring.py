"""What the benchmark's sections share: how long to measure, on what, in which order, and how figures are summed up."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import Chosen
from streamalloc.cli.terminal import Terminal

__all__ = [
    "FULL",
    "KEEP_ALL",
    "QUICK",
    "SIZE",
    "Bench",
    "Call",
    "Effort",
    "in_turns",
    "interleaved",
    "judged",
    "of_another_library",
    "ratio",
    "spread",
    "step_times",
    "value_of",
]

SIZE = 4096
KEEP_ALL = 2**64 - 1

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    block: float
    """Seconds that one block of calls is meant to take."""
    live: tuple[int, ...]
    live_simulated: tuple[int, ...]
    host_buffers: int
    imports: int
    growths: int = 6
    """How often a buffer is grown; a multiple of 6 has every order of three contenders equally often."""
    whole_devices: int = 2
    """How often a buffer is grown to the whole device."""
    evictions: int = 3
    """How often a buffer is evicted and restored."""
    evicted: int = 1 << 30
    """How large it is, in bytes; on a simulated driver :attr:`evicted_simulated`."""
    evicted_simulated: int = 32 << 20


FULL = Effort(
    rounds=25,
    block=0.01,
    live=(10, 1_000, 100_000, 1_000_000),
    live_simulated=(10, 1_000, 100_000),
    host_buffers=10_000,
    imports=15,
    growths=24,
    whole_devices=6,
    evictions=9,
    evicted=8 << 30,
)
QUICK = Effort(
    rounds=11, block=0.002, live=(10, 1_000, 100_000), live_simulated=(10, 1_000), host_buffers=1_000, imports=3
)


def value_of(answer: Any) -> Any:
    """The value of a raw call that answered one."""
    error, value = answer
    if error:
        raise RuntimeError(error)
    return value


@contextlib.contextmanager
def of_another_library(name: str, other: bool, missing: dict[str, str]) -> Iterator[None]:
    """A block that prepares a row, of another library or of this one.

    Another library may be absent, or may not fit this driver. The reason goes to ``missing``, and nothing is raised.
    """
    try:
        yield
    except ImportError:
        return
    except Exception as error:
        if not other:
            raise
        missing[name] = f"{type(error).__name__}: {error}"


class Bench:
    """What the rows share: a device, a stream and a pool, each as the library's object and as the driver's."""

    def __init__(self, chosen: Chosen, effort: Effort, resources: contextlib.ExitStack) -> None:
        self.chosen = chosen
        self.effort = effort
        self.resources = resources
        self.kept: list[object] = []
        """What has to live as long as the benchmark, such as arrays of which a row has only the address."""
        # Any: the rows also use the bindings' classes, which every driver passes on.
        self.driver: Any = cast(Any, chosen.driver)
        self.device: sa.Device = sa.Device(0)
        # Raw copies want the stream's context to be the current one; the library sees to that itself.
        resources.enter_context(self.device.current())
        self.stream: sa.Stream = resources.enter_context(self.device.create_stream())
        self.raw_stream: Any = self.driver.CUstream(self.stream.handle)
        self.pool: sa.MemoryPool
        self.raw_pool: Any
        self.pool, self.raw_pool = self.new_pool()

    def new_pool(self) -> tuple[sa.MemoryPool, Any]:
        """A pool that gives nothing back, and its driver handle."""
        pool = self.resources.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP_ALL))
        return pool, self.driver.CUmemoryPool(pool.handle)

    def buffer(self) -> sa.Buffer:
        """4 KiB that stay for as long as the benchmark runs."""
        return self.resources.enter_context(self.pool.allocate(SIZE, self.stream))


def interleaved(bench: Bench, calls: Sequence[Call], most: int) -> list[list[float]]:
    """Microseconds a call, by function and round."""
    timers = [timeit.Timer(call) for call in calls]
    for timer in timers:
        timer.timeit(min(most, 50))
    bench.device.synchronize()
    once = max(timer.timeit(20) / 20 for timer in timers)
    number = max(1, min(most, int(bench.effort.block / once)))
    times: list[list[float]] = [[] for _ in timers]
    for number_of_round in range(bench.effort.rounds):
        # Each round begins with another row, so that none always follows the same one.
        for step in range(len(timers)):
            at = (number_of_round + step) % len(timers)
            bench.device.synchronize()
            times[at].append(timers[at].timeit(number) / number * 1e6)
    bench.device.synchronize()
    return times


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median_us": float(middle), "p10_us": float(low), "p90_us": float(high)}


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of each round's ratio."""
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def in_turns(contenders: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """What each of some functions answers, by function and round.

    They run once beforehand, and then in all orders by turns: how long the driver takes to make memory depends on who
    gave memory back just before.
    """
    for contender in contenders:
        contender()
    found: list[list[T]] = [[] for _ in contenders]
    orders = itertools.cycle(itertools.permutations(range(len(contenders))))
    for order in itertools.islice(orders, rounds):
        for at in order:
            found[at].append(contenders[at]())
    return found


def step_times(step: Call, count: int) -> list[float]:
    """Microseconds that each of ``count`` calls takes. No garbage is collected meanwhile."""
    times = []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            start = time.perf_counter_ns()
            step()
            times.append((time.perf_counter_ns() - start) / 1e3)
    finally:
        if collects:
            gc.enable()
    return times


def judged(terminal: Terminal, figure: str, met: bool) -> str:
    """A figure, coloured by whether it meets its target."""
    return terminal.good(figure) if met else terminal.odd(figure)
