"""``python -m streamalloc bench``: every figure is there. What the figures are is not a test's business."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import streamalloc.driver as sd
from streamalloc.cli import bench
from streamalloc.cli.choice import Chosen

from .conftest import Run

SHORT = bench.Effort(rounds=2, block=0.0002, live=(10, 100), live_simulated=(10, 100), host_buffers=200, imports=1)
ALL_SECTIONS = bench.SECTIONS
ALL_ROWS = bench.ROWS


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short measurement, without import times, which start processes, and peers, which change the default pool."""
    monkeypatch.setattr(bench, "ROWS", tuple(row for row in ALL_ROWS if not row.peer))
    monkeypatch.setattr(bench, "QUICK", SHORT)
    monkeypatch.setattr(bench, "SECTIONS", tuple(one for one in ALL_SECTIONS if one[0] != "import_time"))


def test_tables_and_json(machine: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECTIONS", ALL_SECTIONS)
    target = tmp_path / "bench.json"
    code, text = run("bench", "--quick", "--json", str(target))
    assert code == 0
    report = json.loads(target.read_text())
    assert report["quick"] is True

    own = [row for row in bench.ROWS if not row.peer]
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

    assert [one["live"] for one in report["live_buffers"]] == [10, 100]
    assert report["live_buffers"][0]["added_ratio"] == 1
    assert 0 < report["host_memory"]["bytes"] < 1000
    assert report["import_time"]["ratio"] > 0


def test_target_stands_beside_the_pair(machine: Any, on_cuda: bool, run: Run) -> None:
    report = json.loads(run("bench", "--quick", "--json")[1])
    pair = next(row for row in report["rows"] if row["name"] == "streamalloc")
    assert (pair.get("target_ratio"), pair.get("target_us")) == ((1.35, None) if on_cuda else (None, 25.0))


def test_leaves_nothing_behind(machine: Any, run: Run) -> None:
    accounts = sd.checked(machine)
    with sd.use(accounts):
        run("bench", "--quick", "--json")
    accounts.assert_nothing_left()


class OnAGpu(Chosen):
    """Any driver, taken for a real one, so that other libraries are measured."""

    @property
    def is_simulated(self) -> bool:
        return False


def test_library_that_is_absent_or_fails(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: bench.Bench) -> bench.Call:
        raise ImportError("no such library")

    def failing(_: bench.Bench) -> bench.Call:
        raise RuntimeError("built for another version")

    rows = (
        *(row for row in bench.ROWS if not row.peer and row.group is bench.PAIR),
        bench.Row(bench.PAIR, "absent", absent, peer=True),
        bench.Row(bench.PAIR, "failing", failing, peer=True),
    )
    monkeypatch.setattr(bench, "ROWS", rows)
    monkeypatch.setattr(bench, "GROUPS", (bench.PAIR,))
    with contextlib.ExitStack() as resources:
        found = bench.measure_rows(bench.Bench(OnAGpu(machine), SHORT, resources))
    names = {row["name"]: row for row in found}
    assert "absent" not in names
    assert names["failing"]["unavailable"] == "RuntimeError: built for another version"


@pytest.mark.simulated_only("other libraries are measured where there is a GPU")
def test_other_libraries_are_not_measured_without_a_gpu(machine: Any, run: Run) -> None:
    text = run("bench", "--quick")[1]
    assert text.splitlines()[0].startswith("running on the simulated driver")
    assert not [row.name for row in ALL_ROWS if row.peer and row.name in text]
