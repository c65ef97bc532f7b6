"""What the benchmark's sections share: how long to measure, on what, in which order, and how figures are summed up."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import Chosen
from streamalloc.cli.terminal import Terminal
from streamalloc.core.errors import size_text

__all__ = [
    *("FULL", "KEEP_ALL", "QUICK", "SIZE", "SPREAD", "TO_RAW", "Bench", "Call", "Column", "Effort", "Section"),
    *("Unavailable", "begun", "cuda_core", "in_turns", "interleaved", "judged", "prepared", "ratio", "rotated"),
    *("show_table", "spread", "step_times", "value_of"),
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


class Unavailable(Exception):
    """A section cannot be measured here; the message says why."""


def value_of(answer: Any) -> Any:
    """The value of a raw call that succeeded; None where it has none."""
    error, *values = answer
    if error:
        raise RuntimeError(error)
    return values[0] if values else None


def cuda_core() -> tuple[Any, Any, Any]:
    """cuda.core, its device and a stream of it."""
    core = importlib.import_module("cuda.core")
    if not hasattr(core, "DeviceMemoryResource"):  # older versions have it elsewhere
        core = importlib.import_module("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    return core, device, device.create_stream()


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
        self.pool: sa.MemoryPool
        self.raw_pool: Any
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


class Way(Protocol):
    """Something to measure, as :func:`prepared` has to know it."""

    @property
    def name(self) -> str: ...
    @property
    def other(self) -> bool:
        """Another library: it needs a GPU, and to be installed."""


W = TypeVar("W", bound=Way)


def prepared(
    bench: Bench, ways: Sequence[W], setup: Callable[[W], T]
) -> tuple[list[tuple[W, T]], list[dict[str, Any]]]:
    """The ways that can be measured with what was set up for each, and rows that say why others cannot.

    Another library that is absent is left out without a word. One that does not fit this driver has a row.
    """
    ready: list[tuple[W, T]] = []
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


def interleaved(bench: Bench, calls: Sequence[Call], most: int) -> list[list[float]]:
    """Microseconds a call, by function and round."""
    timers = [timeit.Timer(call) for call in calls]
    for timer in timers:
        timer.timeit(min(most, 50))
    bench.device.synchronize()
    once = max(timer.timeit(20) / 20 for timer in timers)
    number = max(1, min(most, int(bench.effort.block / once)))
    times: list[list[float]] = [[] for _ in timers]
    for at in rotated(range(len(timers)), bench.effort.rounds):
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


# --- how it is shown ------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A part of the benchmark."""

    key: str
    """Its name in the report."""
    measure: Callable[[Bench], Any]
    show: Callable[[Terminal, Any], None]


class Column(NamedTuple):
    """A column of figures."""

    head: str
    key: str
    shown: str = ",.2f"
    """A figure's format."""
    target: str = ""
    """The key of the target, in rows that have one."""
    as_target: str = "<= {:g}"
    """How the target is shown: with ``<=`` or ``>=`` first."""


SPREAD = (Column("median", "median_us"), Column("p10", "p10_us"), Column("p90", "p90_us"))
TO_RAW = Column("/ raw", "ratio_to_raw", target="target_ratio", as_target="<= {:g} x raw")


def begun(terminal: Terminal, title: str, of: str, result: Mapping[str, Any]) -> bool:
    """The heading of a section, with ``of`` what was measured; whether it was, and if not, why."""
    available = "unavailable" not in result
    known = {key: size_text(value) if key.endswith("bytes") else value for key, value in result.items()}
    terminal.heading(title.format(of.format_map(known) if available else ""))
    if not available:
        terminal.paragraph(f"not measured: {result['unavailable']}")
    return available


def show_table(
    terminal: Terminal, head: str, rows: Sequence[Mapping[str, Any]], *columns: Column, names: int = 0
) -> None:
    """Rows with a name and figures, and below them why others have no figures; ``names`` is the names' least width."""
    targets = any(column.target for column in columns)
    shown = []
    for row in rows:
        if "unavailable" in row:
            continue
        cells, target = [row["name"].ljust(names)], ""
        for column in columns:
            figure = format(row[column.key], column.shown) if column.key in row else ""
            if column.target in row:
                figure = judged(terminal, figure, _meets(row[column.key], row[column.target], column.as_target))
                target = column.as_target.format(row[column.target])
            cells.append(figure)
        shown.append([*cells, target] if targets else cells)
    header = [head, *(column.head for column in columns), *(["target"] if targets else [])]
    terminal.table(shown, header=header, align="l" + "r" * len(columns))
    for row in rows:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")


def _meets(value: float, target: float, as_target: str) -> bool:
    return value <= target if as_target.startswith("<=") else value >= target
