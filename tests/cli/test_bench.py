"""``python -m streamalloc bench``: every figure is there. What the figures are is not a test's business."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import streamalloc.driver as sd
from streamalloc.cli import bench, bench_ipc, bench_vmm, measuring
from streamalloc.cli.choice import Chosen
from tests.cli.conftest import Complete, Run, complete, without

SHORT = measuring.Effort(
    rounds=2,
    block=0.0002,
    live=(10, 100, 200),
    host_buffers=200,
    imports=1,
    growths=1,
    whole_devices=1,
    evictions=1,
    evicted=4 << 20,
)
ALL_SECTIONS = bench.SECTIONS
ALL_ROWS = bench.ROWS
# Other libraries change the default pool, and the environment.
OWN_ROWS = tuple(row for row in ALL_ROWS if not row.other)
OWN_WAYS = tuple(way for way in bench_ipc.WAYS if not way.other)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short measurement of what virtual memory costs."""
    monkeypatch.setattr(bench, "ROWS", OWN_ROWS)
    monkeypatch.setattr(bench, "QUICK", SHORT)
    monkeypatch.setattr(bench, "SECTIONS", bench_vmm.SECTIONS)


class Measured(NamedTuple):
    """One whole measurement."""

    run: Complete
    report: Any


@pytest.fixture(scope="module")
def whole(on_cuda: bool, primary_contexts: None, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All sections, measured once for the tests that only read what was found."""
    target = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ROWS", OWN_ROWS), ("QUICK", SHORT)):
            patch.setattr(bench, name, value)
        patch.setattr(bench_ipc, "WAYS", OWN_WAYS)
        run = complete(on_cuda, "bench", "--quick", "--json", str(target))
    return Measured(run, json.loads(target.read_text()))


def test_tables_and_json(whole: Measured) -> None:
    (code, text, _), report = whole
    assert code == 0
    assert report["quick"] is True

    own = [row for row in bench.ROWS if not row.other]
    measured = {(row["group"], row["name"]): row for row in report["rows"]}
    for row in own:
        found = measured[row.group.title, row.name]
        assert 0 < found["p10_us"] <= found["median_us"] <= found["p90_us"]
        assert found["ratio_to_raw"] > 0
        assert f"\n  {row.name}  " in text
    for group in bench.GROUPS:
        assert f"\n{group.title}\n" in text
        first = next(row for row in own if row.group is group)
        assert measured[group.title, first.name]["ratio_to_raw"] == 1

    assert [one["live"] for one in report["live_buffers"]][:2] == [10, 100]
    assert report["live_buffers"][0]["added_ratio"] == 1
    assert 0 < report["host_memory"]["bytes"] < 1000
    assert report["import_time"]["rows"][1]["ratio"] > 0

    for key in ("growth", "growth_to_the_whole_device"):
        rows = report[key]["rows"]
        assert [row["name"] for row in rows][:2] == ["raw calls, results checked", "streamalloc grow"]
        assert rows[0]["ratio_to_raw"] == 1
        assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
    assert report["growth"]["times_faster_than_copying"] > 0
    assert all(row["first_us"] > 0 and row["last_us"] > 0 for row in report["growth_to_the_whole_device"]["rows"])
    eviction = report["eviction"]["rows"]
    assert [("gb_per_s" in row, "ratio_to_pinned" in row) for row in eviction] == [
        *[(True, False)] * 2,
        *[(True, True)] * 2,
        *[(False, False)] * 2,
    ]
    for row in (*report["growth"]["rows"], *report["growth_to_the_whole_device"]["rows"], *eviction):
        assert f"\n  {row['name']}  " in text


def test_target_stands_beside_the_pair(whole: Measured, on_cuda: bool) -> None:
    pair = next(row for row in whole.report["rows"] if row["name"] == "streamalloc")
    assert (pair.get("target_ratio"), pair.get("target_us")) == ((1.35, None) if on_cuda else (None, 25.0))


def test_targets_of_virtual_memory_are_for_a_gpu(whole: Measured, on_cuda: bool) -> None:
    report = whole.report
    rows = [*report["growth"]["rows"], *report["growth_to_the_whole_device"]["rows"], *report["eviction"]["rows"]]
    assert [row["target_ratio"] for row in rows if "target_ratio" in row] == ([1.1, 1.1, 0.8, 0.8] if on_cuda else [])
    assert ("target_times_faster" in report["growth"]) == on_cuda


@pytest.mark.parametrize("attribute", ["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HOST_MEMORY_POOLS_SUPPORTED"])
def test_what_cannot_be_measured_says_why(machine: Any, run: Run, tmp_path: Path, attribute: str) -> None:
    target = tmp_path / "bench.json"
    of_nodes = "HOST_NUMA_MEMORY_POOLS_SUPPORTED"
    with sd.use(without(machine, *{attribute, of_nodes} if "POOLS" in attribute else {attribute})):
        code, text = run("bench", "--quick", "--json", str(target))
    assert code == 0
    report = json.loads(target.read_text())
    assert report["eviction"]["unavailable"] in text
    assert ("unavailable" in report["growth"]) == ("POOLS" not in attribute)


def test_leaves_nothing_behind(whole: Measured) -> None:
    assert whole.run.left == {}


def test_sharing(whole: Measured, on_cuda: bool) -> None:
    text = whole.run.text
    rows = {row["name"]: row for row in whole.report["sharing"]["rows"]}
    assert list(rows) == [way.name for way in OWN_WAYS]
    for name, row in rows.items():
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["per_second"] == pytest.approx(1e6 / row["median_us"])
        assert f"\n  {name}  " in text
    assert rows[bench_ipc.RAW]["ratio_to_raw"] == 1
    (to_raw,) = rows["streamalloc share and open"]["compared"]
    assert (to_raw["to"], to_raw.get("at_most")) == (bench_ipc.RAW, 1.3 if on_cuda else None)
    assert to_raw["times_the_time"] == rows["streamalloc share and open"]["ratio_to_raw"]
    assert ("target: <= 1.2" in text) == on_cuda


def test_other_library_that_cannot_share(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: bench_ipc.Stage) -> bench_ipc.Contender:
        raise ImportError("no such library")

    def failing(_: bench_ipc.Stage) -> bench_ipc.Contender:
        raise RuntimeError("built for another version")

    ways = (
        *bench_ipc.WAYS[:3],
        bench_ipc.Way(bench_ipc.CUDA_CORE, failing, other=True),
        bench_ipc.Way(bench_ipc.TORCH, absent, other=True),
    )
    monkeypatch.setattr(bench_ipc, "WAYS", ways)
    with contextlib.ExitStack() as resources:
        found = bench_ipc.measure_sharing(measuring.Bench(OnAGpu(machine), SHORT, resources))
    rows = {row["name"]: row for row in found["rows"]}
    assert bench_ipc.TORCH not in rows
    assert rows[bench_ipc.CUDA_CORE]["unavailable"] == "RuntimeError: built for another version"
    ours = rows["streamalloc share and open"]
    assert [one["to"] for one in ours["compared"]] == [bench_ipc.RAW]


def test_device_whose_pools_cannot_be_shared(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECTIONS", bench_ipc.SECTIONS)
    with sd.use(without(machine, "MEMPOOL_SUPPORTED_HANDLE_TYPES")):
        code, text = run("bench", "--quick")
    assert code == 0
    assert "not measured: this device's pools cannot be shared between processes" in text


class OnAGpu(Chosen):
    """Any driver, taken for a real one, so that other libraries are measured."""

    @property
    def is_simulated(self) -> bool:
        return False


def test_library_that_is_absent_or_fails(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: measuring.Bench) -> measuring.Call:
        raise ImportError("no such library")

    def failing(_: measuring.Bench) -> measuring.Call:
        raise RuntimeError("built for another version")

    rows = (
        *(row for row in bench.ROWS if not row.other and row.group is bench.PAIR),
        bench.Row(bench.PAIR, "absent", absent, other=True),
        bench.Row(bench.PAIR, "failing", failing, other=True),
    )
    monkeypatch.setattr(bench, "ROWS", rows)
    monkeypatch.setattr(bench, "GROUPS", (bench.PAIR,))
    with contextlib.ExitStack() as resources:
        found = bench.measure_rows(measuring.Bench(OnAGpu(machine), SHORT, resources))
    names = {row["name"]: row for row in found}
    assert "absent" not in names
    assert names["failing"]["unavailable"] == "RuntimeError: built for another version"


@pytest.mark.simulated_only("other libraries are measured where there is a GPU")
def test_other_libraries_are_not_measured_without_a_gpu(
    machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "ROWS", ALL_ROWS)
    monkeypatch.setattr(bench, "SECTIONS", tuple(one for one in ALL_SECTIONS if one.key == "rows"))
    text = run("bench", "--quick")[1]
    assert text.splitlines()[0].startswith("running on the simulated driver")
    assert not [row.name for row in ALL_ROWS if row.other and row.name in text]
