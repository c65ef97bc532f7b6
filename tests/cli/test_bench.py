"""``python -m streamalloc bench``: every figure is there. What the figures are is not a test's business."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import streamalloc.driver as sd
from streamalloc.cli import bench, bench_processes, bench_vmm, measuring, worker
from streamalloc.cli.machine import Chosen, Unavailable
from streamalloc.cli.measuring import BenchRow, Target
from streamalloc.traces import Event, Trace
from tests.cli.conftest import Complete, Run, complete, without
from tests.processes import forkserver

pytestmark = pytest.mark.timeout(300)  # the first test measures every row, under the checker

SMALL = Trace((Event("allocate", 0, 4096, 0, 0, 0), Event("free", 0, 4096, 0, 0, 1)))
ALL_ROWS = bench.ROWS


def own(row: BenchRow) -> BenchRow:
    """The row in short, without other libraries, which change the default pool, and the environment."""
    kept = {name: setup for name, setup in row.variants.items() if not measuring.is_library(name)}
    return dataclasses.replace(row, variants=kept, rounds=(2, 1 if row.most == 1 else 2))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short measurement of the library alone."""
    monkeypatch.setattr(bench, "ROWS", tuple(map(own, ALL_ROWS)))
    monkeypatch.setattr(measuring, "BLOCK", 0.001)


class Measured(NamedTuple):
    """One whole measurement."""

    run: Complete
    report: Any
    rows: dict[str, Any]


@pytest.fixture(scope="module")
def whole(on_cuda: bool, primary_contexts: None, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All rows, measured once for the tests that only read what was found."""
    target = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROWS", tuple(map(own, ALL_ROWS)))
        patch.setattr(measuring, "BLOCK", 0.001)
        patch.setattr(bench_processes, "_made", lambda name: SMALL)
        patch.setattr(measuring, "LEAST", 5)
        patch.setattr(bench_processes, "_TIMED", "print(0.1)  # instead of import {}")
        patch.setattr(bench_vmm, "STEPS", 4)
        patch.setattr(bench_vmm, "SEGMENTS", 4)
        patch.setattr(bench_vmm, "EVICTED", 32 << 20)
        patch.setattr(bench_vmm, "EVICTED_SIMULATED", 4 << 20)
        # As users start it: in the tests of the tour.
        patch.setattr(worker, "context", forkserver)
        run = complete(on_cuda, "bench", "--quick", "--json", str(target))
    report = json.loads(target.read_text())
    return Measured(run, report, {row["key"]: row for row in report["rows"]})


def test_every_way_of_every_row_is_in_the_table_and_the_report(whole: Measured) -> None:
    assert whole.run.code == 0
    assert whole.report["quick"] is True
    assert list(whole.rows) == [row.key for row in ALL_ROWS]
    for row in map(own, ALL_ROWS):
        found = whole.rows[row.key]
        assert f"\n{row.title}\n" in whole.run.text
        measured = {one["name"]: one for one in found["rows"]}
        assert next(iter(row.variants)) in measured
        for name, one in measured.items():
            assert 0 < one["p10"] <= one["median"] <= one["p90"]
            assert one["ratio_to_raw"] > 0
            assert f"\n  {name}  " in whole.run.text
        assert measured[next(iter(row.variants))]["ratio_to_raw"] == 1


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.key)
def test_targets_name_ways_of_their_row(row: BenchRow) -> None:
    names = {name for target in row.targets for name in (target.of, target.to)} | {*row.bases, *row.bases.values()}
    assert names - {""} <= set(row.variants)


def test_further_figures(whole: Measured) -> None:
    eviction = whole.rows["eviction"]["rows"]
    assert ["gb_per_s" in row for row in eviction] == [True] * 4 + [False] * 2
    replayed = {row["name"]: row for row in whole.rows["replay_serving"]["rows"]}
    assert replayed["streamalloc MemoryPool"]["driver_calls"] == 2
    assert replayed["streamalloc MemoryPool"]["peak_used"] == 4096


def test_leaves_nothing_behind(whole: Measured) -> None:
    assert whole.run.left == {}


def test_choice_of_rows(machine: Any, run: Run) -> None:
    text = run("bench", "--quick", "--rows", "DLPack", "-k", "fill")
    titles = {row.title for row in ALL_ROWS if f"\n{row.title}\n" in text}
    assert titles == {row.title for row in ALL_ROWS if row.key in ("dlpack", "fill")}


def test_no_such_row(machine: Any, refused: Run) -> None:
    assert "no row has abacus; there are pair, drop, fill" in refused("bench", "-k", "abacus")


@pytest.mark.parametrize("attribute", ["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HOST_MEMORY_POOLS_SUPPORTED"])
def test_what_cannot_be_measured_says_why(machine: Any, run: Run, tmp_path: Path, attribute: str) -> None:
    target = tmp_path / "bench.json"
    of_nodes = "HOST_NUMA_MEMORY_POOLS_SUPPORTED"
    with sd.use(without(machine, *{attribute, of_nodes} if "POOLS" in attribute else {attribute})):
        text = run("bench", "--quick", "-k", "growth", "-k", "eviction", "--json", str(target))
    rows = {row["key"]: row for row in json.loads(target.read_text())["rows"]}
    if "POOLS" in attribute:
        evict = {row["name"]: row for row in rows["eviction"]["rows"]}[bench_vmm.EVICT]
        assert evict["unavailable"] in text
        assert "unavailable" not in rows["growth"]
    else:
        assert text.count("not measured: this device does not support virtual memory management") == 2


# --- how it is measured, by stand-ins -------------------------------------------------------------------------------


class OnAGpu(Chosen):
    """Any driver, taken for a real one, so that other libraries are measured."""

    @property
    def is_simulated(self) -> bool:
        return False


def fixed(*values: float, **extra: float) -> Callable[[Any], Any]:
    """A variant that takes as long as it is told, by turns."""

    def setup(bench: Any) -> Any:
        turns = list(values)

        def measure(number: int) -> float:
            turns.append(turns.pop(0))
            return turns[-1] / 1e6

        return measuring.Measured(measure, extra)

    return setup


def raising(error: Exception) -> Callable[[Any], Any]:
    def setup(bench: Any) -> Any:
        raise error

    return setup


def measured(machine: Any, row: BenchRow) -> dict[str, Any]:
    with contextlib.ExitStack() as resources:
        return measuring.measured(measuring.Bench(OnAGpu(machine), False, resources), row)


row_of = functools.partial(BenchRow, "row", "A row", most=1, rounds=(2, 2))


def test_medians_ratios_and_targets(machine: Any) -> None:
    # The first call of each is made beforehand: with two values, rounds begin with the second.
    ways = {"raw": fixed(2, 4), "ours": fixed(3, 8, size=6.0), "PyTorch": fixed(1, 1, size=2.0)}
    targets = {
        Target("ours", 1.7, "raw"): (1.75, False),
        Target("ours", 1.8, "raw"): (1.75, True),
        Target("ours", 5.5): (5.5, True),
        Target("ours", 3.0, "PyTorch", "size"): (3.0, True),
        Target("ours", 5.0, figure="size"): (6.0, False),
        Target("ours", 1.0, "absent"): (None, None),
        Target("raw", 1.0, figure="size"): (None, None),
    }
    found = measured(machine, row_of(ways, tuple(targets)))
    raw, ours, _ = found["rows"]
    assert (raw["median"], raw["ratio_to_raw"]) == (3, 1)
    assert (ours["median"], ours["ratio_to_raw"], ours["size"]) == (5.5, (8 / 4 + 3 / 2) / 2, 6)
    assert [(one["found"], one["met"]) for one in found["targets"]] == [*targets.values()]


def test_other_bases(machine: Any) -> None:
    row = row_of({"a": fixed(2), "b": fixed(6), "c": fixed(18)}, bases={"c": "b"})
    assert [one["ratio_to_raw"] for one in measured(machine, row)["rows"]] == [1, 3, 3]


def test_libraries_that_are_absent_or_fail(machine: Any) -> None:
    ways = {
        "raw": fixed(1),
        "CuPy": raising(ImportError("no such library")),
        "PyTorch, cached": raising(RuntimeError("built for another version")),
        "streamalloc": raising(Unavailable("not here")),
    }
    found = measured(machine, row_of(ways))
    rows = {one["name"]: one for one in found["rows"]}
    assert set(rows) == {"raw", "PyTorch, cached", "streamalloc"}
    assert rows["PyTorch, cached"]["unavailable"] == "RuntimeError: built for another version"
    assert rows["streamalloc"]["unavailable"] == "not here"
    with pytest.raises(RuntimeError, match="ours"):
        measured(machine, row_of({"raw": raising(RuntimeError("ours"))}))


@pytest.mark.simulated_only("other libraries are measured where there is a GPU")
def test_no_other_library_is_measured_without_a_gpu(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROWS", (row_of({"raw": fixed(1), "CuPy": raising(AssertionError("asked"))}),))
    assert "CuPy" not in run("bench")


@pytest.mark.parametrize("limit", [1, 2])
def test_targets(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    monkeypatch.setattr(Chosen, "is_simulated", False)
    targets = (Target("ours", limit, "raw"),)
    monkeypatch.setattr(bench, "ROWS", (row_of({"raw": fixed(2), "ours": fixed(3)}, targets),))
    text = run("bench")
    assert f"Targets: {limit - 1} met, {2 - limit} missed\n" in text
    assert (f"row - ours: 1.5 times raw (target: <= {limit})" in text) == (limit == 1)
