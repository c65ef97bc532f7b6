"""How the benchmark measures: rows, the ways to do what a row is about, and rounds of short blocks.

All ways of a row run interleaved, each round in another order, so that a machine which is slower for a while is so for
all. Figures are medians over the rounds with the 10th and 90th percentile; ratios are medians of each round's.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import KEEP_ALL, Chosen

__all__ = [
    "SIZE",
    "Bench",
    "Call",
    "Contender",
    "Effort",
    "Row",
    "Setup",
    "Target",
    "Timed",
    "Unavailable",
    "fastest",
    "is_other",
    "measured",
    "ratio",
    "step_times",
    "value_of",
]

SIZE = 4096

# Ways whose name begins with one of these words are other libraries': they need a GPU, and to be installed.
OTHERS = ("C", "cuda.core", "CuPy", "PyTorch", "RMM")

Call = Callable[[], object]
T = TypeVar("T")


class Unavailable(Exception):
    """A row or a way cannot be measured here; the message says why."""


class Contender(Protocol):
    """What is measured, where that is not one plain call. It may have ``extra``, further figures of its own."""

    def measure(self, number: int) -> float:
        """Do it so often; how much one took, in the row's unit."""


class Timed:
    """A function to be called: microseconds of a call."""

    def __init__(self, call: Call) -> None:
        self._timer = timeit.Timer(call)

    def measure(self, number: int) -> float:
        return self._timer.timeit(number) / number * 1e6


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    block: float
    """Seconds that one block of calls is meant to take."""
    live: tuple[int, ...]
    """How many allocations are alive while a pair is timed; a simulated driver is spared the last figure."""
    host_buffers: int
    """How many buffers' host memory is measured."""
    imports: int
    growths: int
    """How often a buffer is grown."""
    whole_devices: int
    """How often a buffer is grown to the whole device."""
    evictions: int
    """How often a buffer is evicted and restored."""
    evicted: int
    """How large it is, in bytes."""
    replays: int
    """How often each trace is replayed."""
    once: int = 1


@dataclass(frozen=True)
class Target:
    """What one way's figure should be, alone or beside another way's. On a GPU, unless ``simulated``."""

    of: str
    limit: float
    to: str = ""
    """The way that it is divided by; empty: the figure itself, in the row's unit."""
    figure: str = ""
    """Which figure: a name in ``extra``, ``"ratio_to_raw"``; empty: the time (of whatever the row has)."""
    at_least: bool = False
    """The figure should be at least, and not at most, the limit."""
    simulated: bool = False


@dataclass(frozen=True)
class Row:
    """Something to do, and the ways to do it; the first is what the others are compared with."""

    key: str
    """Its name in the report, and what ``--rows`` chooses by."""
    title: str
    ways: Mapping[str, Setup]
    """By name, what makes ready a function to be timed. Where it raises for another library, the report says why."""
    targets: tuple[Target, ...] = ()
    most: int = 20_000
    """Calls in a block at most: queues of a GPU that are full would make the host wait."""
    unit: str = "us"
    rounds: str = "rounds"
    """The field of :class:`Effort` that says how often."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """What a way is compared with where that is not the first one."""
    need: Callable[[Bench], object] = lambda bench: None
    """Raises :class:`Unavailable` where none of it can be measured."""


class Bench:
    """What the rows share: a device, streams and a pool, each as the library's object and as the driver's."""

    def __init__(self, chosen: Chosen, effort: Effort, shared: contextlib.ExitStack) -> None:
        self.chosen = chosen
        self.effort = effort
        self.shared = shared
        """What lives until the end."""
        self.resources: contextlib.ExitStack = shared
        """What lives as long as the row that is measured."""
        self.libraries: dict[Any, Any] = {}
        """Other libraries that were set up."""
        self.sharing: Any = None
        """The other process and the pool that are shared with it, of the row that does so."""
        # Any: the rows also use the bindings' classes, which every driver passes on.
        self.driver: Any = cast(Any, chosen.driver)
        self.device: sa.Device = sa.Device(0)
        # Raw calls want the device's context to be the current one; the library sees to that itself.
        shared.enter_context(self.device.current())
        self.stream: sa.Stream = shared.enter_context(self.device.create_stream())
        self.raw_stream: Any = self.driver.CUstream(self.stream.handle)
        self.pool, self.raw_pool = self.new_pool()

    def new_pool(self, **options: Any) -> tuple[sa.MemoryPool, Any]:
        """A pool that gives nothing back, and its driver handle."""
        pool = self.resources.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP_ALL, **options))
        return pool, self.driver.CUmemoryPool(pool.handle)

    def need_virtual_memory(self) -> None:
        """End a row that maps memory where that cannot be done."""
        if not self.device.supports.virtual_memory_management:
            raise Unavailable("this device's memory cannot be mapped by hand")

    def buffer(self, nbytes: int = SIZE) -> sa.Buffer:
        """Memory for as long as the row is measured."""
        return self.resources.enter_context(self.pool.allocate(nbytes, self.stream))

    def raw_buffer(self, nbytes: int = SIZE) -> Any:
        """The same as the bindings' pointer."""
        return self.driver.CUdeviceptr(self.buffer(nbytes).address)

    @functools.cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """Ordinary memory of the host."""
        return np.zeros(SIZE, np.uint8)


Setup: TypeAlias = Callable[[Bench], "Call | Contender"]


def value_of(answer: Any) -> Any:
    """The value of a raw call that succeeded; None where it has none."""
    error, *values = answer
    if error:
        raise RuntimeError(error)
    return values[0] if values else None


def fastest(*calls: Call) -> Call:
    """Of several ways to say the same to the driver, the one that takes least."""
    return min(calls, key=lambda call: min(timeit.repeat(call, number=50, repeat=5)))


def step_times(step: Call, count: int) -> list[float]:
    """Microseconds that each of ``count`` calls takes. No garbage is collected during one."""
    return [seconds * 1e6 for seconds in timeit.repeat(step, number=1, repeat=count)]


def is_other(name: str) -> bool:
    """Whether a way is another library's."""
    return name.replace(",", " ").split()[0] in OTHERS


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of each round's ratio."""
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def measured(bench: Bench, row: Row) -> dict[str, Any]:
    """A row's figures and targets, or why there are none."""
    report: dict[str, Any] = {"key": row.key, "title": row.title, "unit": row.unit}
    with contextlib.ExitStack() as resources:
        bench.resources = resources
        resources.callback(bench.device.synchronize)
        try:
            row.need(bench)
            ready, missing = _ready(bench, row)
        except Unavailable as reason:
            return {**report, "unavailable": str(reason), "rows": [], "targets": []}
        times = _times(bench, row, ready)
        rows = []
        for name, contender in ready.items():
            base = row.bases.get(name, next(iter(row.ways)))
            of_base = {"ratio_to_raw": ratio(times[name], times[base])} if base in times else {}
            rows.append({"name": name, **_spread(times[name]), **of_base, **getattr(contender, "extra", {})})
    found = {one["name"]: one for one in rows}
    return {**report, "rows": [*rows, *missing], "targets": list(_targets(bench, row, found, times))}


def _ready(bench: Bench, row: Row) -> tuple[dict[str, Contender], list[dict[str, Any]]]:
    """The ways that can be measured, and rows that say why others cannot.

    What is not installed is left out without a word (``ImportError``); what does not fit this driver is named.
    """
    ready: dict[str, Contender] = {}
    missing: list[dict[str, Any]] = []
    for name, setup in row.ways.items():
        other = is_other(name)
        if other and bench.chosen.is_simulated:
            continue
        try:
            made = setup(bench)
            contender = made if hasattr(made, "measure") else Timed(made)
            contender.measure(1)
        except ImportError:
            pass
        except Unavailable as reason:
            missing.append({"name": name, "unavailable": str(reason)})
        except Exception as error:
            if not other:
                raise
            missing.append({"name": name, "unavailable": f"{type(error).__name__}: {error}"})
        else:
            ready[name] = contender
    if not ready:
        raise Unavailable("; ".join(f"{one['name']}: {one['unavailable']}" for one in missing) or "nothing to measure")
    return ready, missing


def _times(bench: Bench, row: Row, ready: dict[str, Contender]) -> dict[str, list[float]]:
    """How much each way took, by way and round."""
    numbers = {name: _number(bench, row, contender) for name, contender in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for names in _orders(list(ready), getattr(bench.effort, row.rounds)):
        for name in names:
            bench.device.synchronize()
            times[name].append(ready[name].measure(numbers[name]))
    return times


def _number(bench: Bench, row: Row, contender: Contender) -> int:
    """How often a way is done in a block, so that the blocks of all take about as long."""
    if row.most == 1:
        return 1
    contender.measure(min(row.most, 50))
    bench.device.synchronize()
    once = timeit.timeit(lambda: contender.measure(20), number=1) / 20
    bench.device.synchronize()
    return max(1, min(row.most, int(bench.effort.block / once)))


def _orders(items: Sequence[T], rounds: int) -> Iterator[Sequence[T]]:
    """The items once for each round, in other orders: none is to run after the same one always."""
    shuffled = random.Random(0)
    for _ in range(rounds):
        yield shuffled.sample(items, len(items))


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def _targets(
    bench: Bench, row: Row, rows: dict[str, dict[str, Any]], times: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    """The row's targets beside what was found: None where one of the ways is not there, or has no such figure."""
    for target in row.targets:
        if target.simulated != bench.chosen.is_simulated:
            continue
        names = [target.of, *([target.to] if target.to else [])]
        found: float | None = None
        if target.figure:
            values = [rows[name][target.figure] for name in names if target.figure in rows.get(name, {})]
            if len(values) == len(names):
                found = values[0] / values[1] if target.to else values[0]
        elif all(name in times for name in names):
            found = ratio(times[target.of], times[target.to]) if target.to else rows[target.of]["median"]
        met = None
        if found is not None:
            met = bool(found >= target.limit if target.at_least else found <= target.limit)
        shown = {"of": target.of, "to": target.to, "figure": target.figure, "found": found, "met": met}
        yield {**shown, "at_least" if target.at_least else "at_most": target.limit}
