"""Measurement of ``bench``: rows, their variants, and rounds of short blocks.

The variants of a row take turns, in a new order in each round. So a slow moment of the machine affects all variants. A
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

SIZE = 4096
"""Size of a buffer in bytes in most rows: 4 KiB."""
BLOCK = 0.01
"""Seconds that a block of calls should take; with ``--quick`` a fifth of them."""
LEAST = 20
"""Smallest number of runs in one block of a variant made by :func:`repeated`, so that the median is meaningful."""
UNITS = {"us": ("microseconds", 1e6), "ms": ("milliseconds", 1e3)}
"""Units of times by abbreviation: name of the unit, and number of units in one second."""

_LIBRARIES = ("cuda.core", "CuPy", "PyTorch")
"""Beginnings of the names of variants for other libraries, which need a GPU."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """A variant of a row after its set-up, with the function that measures it."""

    measure: Callable[[int], float]
    """Function that runs the variant as often as its argument says. It returns the seconds of one run."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further figures of the last measurement, by name."""


def timed(call: Call) -> Measured:
    """Return a variant that runs ``call``. Its time is the mean of the runs of a block."""
    timer = timeit.Timer(call)
    return Measured(lambda number: timer.timeit(number) / number)


def repeated(once: Call) -> Measured:
    """Return a variant that calls ``once``. Its time is the median of at least :data:`LEAST` runs."""
    return Measured(lambda number: statistics.median(timeit.repeat(once, number=1, repeat=max(number, LEAST))))


def undone(call: Call, undo: Call, nbytes: int = 0) -> Measured:
    """Return a variant that runs ``call``. After each run ``undo`` reverses it, which is not measured.

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
    """Upper limit for a figure of a variant. Targets are checked on GPUs only."""

    of: str
    """Name of the variant to which the limit applies."""
    limit: float
    to: str = ""
    """Name of the variant whose figure divides the figure of ``of``. Empty: the limit is for the figure itself."""
    figure: str = ""
    """Name of a figure in :attr:`Measured.extra` to which the limit applies; empty for the time."""


@dataclass(frozen=True)
class BenchRow:
    """One task of the benchmark, with its variants. Ratios are to the first variant, unless ``bases`` names another
    one.
    """

    key: str
    """Name of the row in the report, and for ``--rows``."""
    title: str
    variants: Mapping[str, Setup]
    """Functions that set up the variants, by the names of the variants."""
    targets: tuple[Target, ...] = ()
    most: int = 20_000
    """Largest number of calls in a block. When a stream's queue is full, a call that queues work has to wait, and the
    measured time would be wrong.
    """
    unit: str = "us"
    rounds: tuple[int, int] = (25, 11)
    """Numbers of rounds without and with ``--quick``."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """For a variant that is not compared with the first variant of the row: the name of the variant to compare with."""
    need: Callable[[Bench], object] = lambda bench: None
    """Function that makes what the variants of the row share. It raises :class:`Unavailable` if the row cannot be
    measured.
    """


slow_row = functools.partial(BenchRow, most=1, unit="ms", rounds=(9, 3))
"""Makes a :class:`BenchRow` whose variants take milliseconds or more."""


class Bench:
    """Objects that the rows of the benchmark use: a device, a stream and a pool for the whole run, the stream also as a
    handle of the driver; objects of other libraries; and resources that are closed at the end of a row.
    """

    def __init__(self, chosen: Chosen, quick: bool, shared: contextlib.ExitStack) -> None:
        self.chosen = chosen
        self.quick = quick
        self.shared = shared
        """Stack of the resources that are closed at the end of the benchmark."""
        self.resources: contextlib.ExitStack = shared
        """Stack of the resources that are closed at the end of the current row."""
        self.libraries: dict[Any, Any] = {}
        """Objects of other libraries, by the class that made them."""
        self.common: Any = None
        """Object that all variants of the current row use, such as a size or a store. The row's function ``need`` sets
        it.
        """
        # The type is Any, because raw variants also use the classes of the bindings, which every driver has as
        # attributes.
        self.driver: Any = cast(Any, chosen.driver)
        self.device: sa.Device = sa.Device(0)
        # Without a current context, raw driver calls fail; those of the package set it themselves.
        shared.enter_context(self.device.current())
        self.stream: sa.Stream = shared.enter_context(self.device.create_stream())
        # ``stream.handle`` is not read: after a read, each allocation on the stream would query whether the stream is
        # being captured.
        self.raw_stream: Any = self.stream.checked_raw()
        self.pool: sa.MemoryPool = self.new_pool()[0]
        """Pool that is closed at the end of the benchmark, because it is made before the first row."""

    def new_pool(self) -> tuple[sa.MemoryPool, Any]:
        """Make a pool that keeps all its memory until the end of the row. Returns a tuple of the pool and its
        handle.
        """
        pool = self.resources.enter_context(sa.MemoryPool(self.device, release_threshold=KEEP_ALL))
        return pool, self.driver.CUmemoryPool(pool.handle)

    def new_stream(self) -> sa.Stream:
        """Make a stream that is closed at the end of the row."""
        return self.resources.enter_context(self.device.create_stream())

    def library(self, kind: Callable[[Bench], Any]) -> Any:
        """Return the objects of another library. The first call makes them, for all rows. ``kind``: their class. Raises
        ``ImportError`` if the library is not installed.
        """
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
        """A NumPy array of 4 KiB in pageable host memory."""
        return np.zeros(SIZE, np.uint8)


Setup: TypeAlias = Callable[[Bench], "Call | Measured"]


# --- other libraries ------------------------------------------------------------------------------------------------


class CudaCore:
    """A device, a stream and a pool of cuda.core. Raises ``ImportError`` if cuda.core is not installed."""

    def __init__(self, bench: Bench) -> None:
        self.core: Any = importlib.import_module("cuda.core")
        if not hasattr(self.core, "DeviceMemoryResource"):  # Older versions have the class in cuda.core.experimental.
            self.core = importlib.import_module("cuda.core.experimental")
        self.device: Any = self.core.Device(0)
        self.device.set_current()
        self.stream: Any = self.device.create_stream()
        self.resource: Any = self.core.DeviceMemoryResource(self.device, self.core.DeviceMemoryResourceOptions())

    def buffer(self) -> Any:
        """Allocate 4 KiB from cuda.core's pool, in the order of cuda.core's stream."""
        return self.resource.allocate(SIZE, stream=self.stream)


class CuPy:
    """The module ``cupy``, and a stream of CuPy that is current until the end of the benchmark.

    Raises ``ImportError`` if CuPy is not installed.
    """

    def __init__(self, bench: Bench) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.stream: Any = bench.shared.enter_context(self.cupy.cuda.Stream(non_blocking=True))

    def array(self) -> Any:
        """Make an array of 4 KiB from CuPy's memory pool."""
        return self.cupy.zeros(SIZE, self.cupy.uint8)


class PyTorch:
    """The module ``torch``, device 0, and a stream of PyTorch that is current until the end of the benchmark. Raises
    ``ImportError`` if PyTorch is not installed, or cannot use CUDA.
    """

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
    """Return the first value after the ``CUresult`` in the result of a raw driver call; None if there is no value.
    Raises ``RuntimeError`` if the call failed.
    """
    error, *values = answer
    if error:
        raise RuntimeError(error)
    return values[0] if values else None


def is_library(name: str) -> bool:
    """Whether the variant with this name measures another library."""
    return name.replace(",", " ").split()[0] in _LIBRARIES


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios of two variants' times in each round."""
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def measured(bench: Bench, row: BenchRow) -> dict[str, Any]:
    """Measure a row, and return its report as a dictionary. For a row that cannot be measured, the report has the
    reason.
    """
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
    """Set up the variants of a row. Returns the variants that work, by name, and for each other variant its entry in
    the report.

    A library that is not installed (``ImportError``) has no entry. Raises :class:`Unavailable` if no variant works.
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
    """Return for each variant, by name, its times in all rounds, in the unit of the row."""
    numbers = {name: _calls_per_block(bench, row, variant) for name, variant in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    shuffled = random.Random(0)
    for _ in range(row.rounds[bench.quick]):
        # The order is random, so that no variant always runs after the same other variant.
        for name in shuffled.sample(list(ready), len(ready)):
            bench.device.synchronize()
            times[name].append(ready[name].measure(numbers[name]) * UNITS[row.unit][1])
    return times


def _calls_per_block(bench: Bench, row: BenchRow, variant: Measured) -> int:
    """Return the number of calls of a variant that take :data:`BLOCK` seconds; at most ``row.most``."""
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
    """Yield a dictionary for each target of a row, with the figure that was found.

    The figure is None if the variant was not measured, or has no such figure.
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
