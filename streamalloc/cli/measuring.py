"""Measurement of ``bench``: rows, their variants, and rounds of short blocks.

The variants of a row take turns, in a new order each round. So a slow moment of the machine affects all of them. A
figure is the median of the rounds, beside the 10th and 90th percentile. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np

import streamalloc as sa
from streamalloc.cli.machine import KEEP_ALL, Chosen, Unavailable
from streamalloc.core.internal import raw_handle

SIZE = 4096
"""Bytes of a buffer in most rows: 4 KiB."""
BLOCK = 0.01
"""Seconds that a block of calls should take; a fifth of that with ``--quick``."""
LEAST = 20
"""Smallest number of transfers between processes in a block."""
UNITS = {"us": ("microseconds", 1e6), "ms": ("milliseconds", 1e3)}
"""Units of times: name, and how many make a second."""

_LIBRARIES = ("cuda.core", "CuPy", "PyTorch")
"""First words of the variants of other libraries, which need a GPU."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Variant of a row after its set-up, with the function that measures it."""

    measure: Callable[[int], float]
    """Runs the variant as many times as its argument says, and returns the seconds of one run."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further figures of the last run, by name."""


def timed(call: Call) -> Measured:
    """Return a variant that runs ``call``, and takes its mean time."""
    timer = timeit.Timer(call)
    return Measured(lambda number: timer.timeit(number) / number)


def repeated(once: Call) -> Measured:
    """Return a variant that calls ``once``, and whose time is the median of :data:`LEAST` runs or more."""
    return Measured(lambda number: statistics.median(timeit.repeat(once, number=1, repeat=max(number, LEAST))))


def undone(call: Call, undo: Call, nbytes: int = 0) -> Measured:
    """Return a variant that runs ``call``. After each run ``undo`` reverses it, outside of the time.

    ``nbytes``: bytes that the call copies, for a figure in GB/s; 0: no such figure.
    """
    extra: dict[str, float] = {}

    def measure(number: int) -> float:
        total = 0.0
        for _ in range(number):
            total += timeit.timeit(call, number=1)
            undo()
        if nbytes:
            extra["gb_per_s"] = nbytes * number / total / 1e9
        return total / number

    return Measured(measure, extra)


@dataclass(frozen=True)
class Target:
    """Upper limit of a figure of a variant. It counts on GPUs only."""

    of: str
    """Name of the variant."""
    limit: float
    to: str = ""
    """Variant whose figure divides the figure of ``of``; empty if the limit is for the figure itself."""
    figure: str = ""
    """Key in ``extra``; empty for the time."""


@dataclass(frozen=True)
class BenchRow:
    """One task of the benchmark, and its variants. Ratios are to the first variant."""

    key: str
    """Name in the report, and for ``--rows``."""
    title: str
    variants: Mapping[str, Setup]
    """Functions that set up the variants, by name."""
    targets: tuple[Target, ...] = ()
    most: int = 20_000
    """Largest number of calls in a block. A call that queues work blocks when the queue of its stream is full, and
    would then be measured wrongly.
    """
    unit: str = "us"
    rounds: tuple[int, int] = (25, 11)
    """Number of rounds: without and with ``--quick``."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """Variant to compare with, by variant, if that is not the first variant of the row."""
    need: Callable[[Bench], object] = lambda bench: None
    """Raises :class:`Unavailable` if the row cannot be measured, and makes what its variants share."""


slow_row = functools.partial(BenchRow, most=1, unit="ms", rounds=(9, 3))
"""Makes a row whose variants take milliseconds or more."""


class Bench:
    """Device, stream and pool that the rows share, as objects of the library and as handles of the driver."""

    def __init__(self, chosen: Chosen, quick: bool, shared: contextlib.ExitStack) -> None:
        self.chosen = chosen
        self.quick = quick
        self.shared = shared
        """Resources to close at the end of the benchmark."""
        self.resources: contextlib.ExitStack = shared
        """Resources to close at the end of the current row."""
        self.libraries: dict[Any, Any] = {}
        """Objects of other libraries, by the class that makes them."""
        self.common: Any = None
        """Object that the variants of the current row share. The row's ``need`` sets it: a size, a store, a worker."""
        # Any, because raw variants use the classes of the bindings, too, which every driver has.
        self.driver: Any = cast(Any, chosen.driver)
        self.device: sa.Device = sa.Device(0)
        # Raw driver calls need a current context; the library's calls do not.
        shared.enter_context(self.device.current())
        self.stream: sa.Stream = shared.enter_context(self.device.create_stream())
        # Not ``stream.handle``: then each later allocation on the stream would ask the driver whether it is captured.
        self.raw_stream: Any = raw_handle(self.stream)
        self.pool: sa.MemoryPool = self.new_pool()[0]

    def new_pool(self) -> tuple[sa.MemoryPool, Any]:
        """Make a pool that keeps all its memory until the end of the row. Returns it, and its handle."""
        pool = self.resources.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP_ALL))
        return pool, self.driver.CUmemoryPool(pool.handle)

    def new_stream(self) -> sa.Stream:
        """Make a stream, which is closed at the end of the row."""
        return self.resources.enter_context(self.device.create_stream())

    def library(self, kind: Callable[[Bench], Any]) -> Any:
        """Return the objects of another library. The first call makes them, for all rows. ``kind``: their class."""
        if kind not in self.libraries:
            self.libraries[kind] = kind(self)
        return self.libraries[kind]

    def buffer(self) -> sa.Buffer:
        """Allocate 4 KiB from :attr:`pool`. The buffer is freed at the end of the row."""
        return self.resources.enter_context(self.pool.allocate(SIZE, self.stream))

    def raw_buffer(self) -> Any:
        """Allocate 4 KiB as :meth:`buffer` does. Returns the address as the bindings' object."""
        return self.driver.CUdeviceptr(self.buffer().address)

    @functools.cached_property
    def array(self) -> np.ndarray[Any, Any]:
        """Array of 4 KiB in pageable host memory."""
        return np.zeros(SIZE, np.uint8)


Setup: TypeAlias = Callable[[Bench], "Call | Measured"]


# --- other libraries ------------------------------------------------------------------------------------------------


class CudaCore:
    """Objects of cuda.core: a device, a stream and a pool. Raises ``ImportError`` if it is not installed."""

    def __init__(self, bench: Bench) -> None:
        self.core: Any = importlib.import_module("cuda.core")
        if not hasattr(self.core, "DeviceMemoryResource"):  # Older versions have the class in cuda.core.experimental.
            self.core = importlib.import_module("cuda.core.experimental")
        self.device: Any = self.core.Device(0)
        self.device.set_current()
        self.stream: Any = self.device.create_stream()
        self.resource: Any = self.core.DeviceMemoryResource(self.device, self.core.DeviceMemoryResourceOptions())

    def buffer(self) -> Any:
        """Allocate 4 KiB from cuda.core's pool, in the order of its stream."""
        return self.resource.allocate(SIZE, stream=self.stream)


class CuPy:
    """Objects of CuPy.

    Its stream is current until the end of the benchmark. Raises ``ImportError`` if it is not installed.
    """

    def __init__(self, bench: Bench) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.stream: Any = bench.shared.enter_context(self.cupy.cuda.Stream(non_blocking=True))

    def array(self) -> Any:
        """Make an array of 4 KiB from CuPy's memory pool."""
        return self.cupy.zeros(SIZE, self.cupy.uint8)


class PyTorch:
    """Objects of PyTorch. Its stream is current until the end of the benchmark. Raises ``ImportError`` without CUDA."""

    def __init__(self, bench: Bench) -> None:
        self.torch: Any = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise ImportError("torch without CUDA")
        self.device: Any = self.torch.device("cuda", 0)
        bench.shared.enter_context(self.torch.cuda.stream(self.torch.cuda.Stream(self.device)))

    def tensor(self) -> Any:
        """Make a tensor of 4 KiB from PyTorch's caching allocator."""
        return self.torch.zeros(SIZE, dtype=self.torch.uint8, device=self.device)


# --- measuring ------------------------------------------------------------------------------------------------------


def value_of(answer: Any) -> Any:
    """Return the value of a raw driver call, or None if it has none. Raises ``RuntimeError`` if the call has failed."""
    error, *values = answer
    if error:
        raise RuntimeError(error)
    return values[0] if values else None


def is_library(name: str) -> bool:
    """Whether a variant of this name belongs to another library."""
    return name.replace(",", " ").split()[0] in _LIBRARIES


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios of two variants' times, round by round."""
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def measured(bench: Bench, row: BenchRow) -> dict[str, Any]:
    """Measure a row and return its report. If the row cannot be measured, the report has the reason."""
    report: dict[str, Any] = {"key": row.key, "title": row.title, "unit": row.unit}
    with contextlib.ExitStack() as resources:
        bench.resources = resources
        resources.callback(bench.device.synchronize)
        try:
            row.need(bench)
            ready, missing = _set_up(bench, row)
        except Unavailable as reason:
            return {**report, "unavailable": str(reason), "rows": [], "targets": []}
        times = _times(bench, row, ready)
        found = {}
        for name, variant in ready.items():
            base = row.bases.get(name, next(iter(row.variants)))
            low, middle, high = map(float, np.percentile(times[name], (10, 50, 90)))
            found[name] = {"name": name, "median": middle, "p10": low, "p90": high, **variant.extra}
            if base in times:
                found[name]["ratio_to_raw"] = ratio(times[name], times[base])
    return {**report, "rows": [*found.values(), *missing], "targets": list(_targets(bench, row, found, times))}


def _set_up(bench: Bench, row: BenchRow) -> tuple[dict[str, Measured], list[dict[str, Any]]]:
    """Set up the variants of a row. Returns those that work, and for the others what the report says.

    It says nothing about a library that is not installed (``ImportError``). Raises :class:`Unavailable` if none works.
    """
    ready: dict[str, Measured] = {}
    missing: list[dict[str, Any]] = []
    for name, setup in row.variants.items():
        library = is_library(name)
        if library and bench.chosen.is_simulated:
            continue
        try:
            made = setup(bench)
            variant = made if isinstance(made, Measured) else timed(made)
            variant.measure(1)
        except ImportError:
            continue
        except Exception as error:
            if not (library or isinstance(error, Unavailable)):
                raise
            reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            missing.append({"name": name, "unavailable": reason})
        else:
            ready[name] = variant
    if not ready:
        raise Unavailable("; ".join(f"{one['name']}: {one['unavailable']}" for one in missing) or "nothing to measure")
    return ready, missing


def _times(bench: Bench, row: BenchRow, ready: dict[str, Measured]) -> dict[str, list[float]]:
    """Return the times of all rounds by variant, in the row's unit."""
    numbers = {name: _calls_per_block(bench, row, variant) for name, variant in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    shuffled = random.Random(0)
    for _ in range(row.rounds[bench.quick]):
        # The order is random, so that no variant always runs after the same variant.
        for name in shuffled.sample(list(ready), len(ready)):
            bench.device.synchronize()
            times[name].append(ready[name].measure(numbers[name]) * UNITS[row.unit][1])
    return times


def _calls_per_block(bench: Bench, row: BenchRow, variant: Measured) -> int:
    """Return how many calls of a variant take :data:`BLOCK` seconds, but at most ``row.most``."""
    if row.most == 1:
        return 1
    variant.measure(min(row.most, 50))
    bench.device.synchronize()
    once = timeit.timeit(lambda: variant.measure(20), number=1) / 20
    bench.device.synchronize()
    return max(1, min(row.most, int(BLOCK / (5 if bench.quick else 1) / once)))


def _targets(
    bench: Bench, row: BenchRow, rows: dict[str, dict[str, Any]], times: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    """Yield the targets of a row, each with the figure that was found.

    The figure is None if the variant was not measured or lacks it.
    """
    for target in () if bench.chosen.is_simulated else row.targets:
        found: float | None = None
        with contextlib.suppress(KeyError):
            if target.to and not target.figure:
                found = ratio(times[target.of], times[target.to])
            else:
                figure = target.figure or "median"
                found = rows[target.of][figure] / (rows[target.to][figure] if target.to else 1)
        met = None if found is None else bool(found <= target.limit)
        asked = {"of": target.of, "to": target.to, "figure": target.figure, "at_most": target.limit}
        yield {**asked, "found": found, "met": met}
