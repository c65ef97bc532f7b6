"""``python -m streamalloc replay``: which figures there are. What they are is worked out in ``tests/traces``."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamalloc.cli import main
from streamalloc.traces import Event, Trace
from tests.cli.conftest import Complete, Run, complete, documented, keys

SMALL = Trace((Event("allocate", 0, 4096, 0, 0, 0), Event("free", 0, 4096, 0, 0, 1)), "by hand", {"lost things": 3})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    SMALL.save(tmp_path / "small.jsonl")
    return tmp_path / "small.jsonl"


def test_table_and_json(on_cuda: bool, small: Path, tmp_path: Path, primary_contexts: None) -> None:
    arguments = ("replay", str(small), "--on", "pool", "--on", "raw", "--json", str(tmp_path / "found.json"))
    done: Complete = complete(on_cuda, *arguments)
    assert (done.code, done.left) == (0, {})
    assert "small.jsonl: 1 allocation and 1 free on 1 stream, by 1 thread; at most 0.0 MiB at once" in done.text
    assert "left out: 3 lost things" in done.text
    report = json.loads((tmp_path / "found.json").read_text())
    assert keys(report) == documented("headline")
    assert report["trace"] == {"events": 2, "source": "by hand", "peak": 4096, "streams": 1}
    pool, raw = report["rows"]
    assert (pool["name"], raw["name"]) == ("streamalloc MemoryPool", "raw calls on a pool, results checked")
    assert (pool["driver_calls"], pool["peak_used"], pool["failures"]) == (2, 4096, 0)
    assert pool["reserved_over_used"] == pool["peak_reserved"] / 4096
    assert all(row["name"] in done.text for row in report["rows"])


def test_json_alone_on_the_output(machine: Any, run: Run, small: Path) -> None:
    text = run("replay", str(small), "--on", "pool", "--json")
    assert json.loads(text)["rows"][0]["failures"] == 0


def test_json_in_a_folder(machine: Any, capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
    assert main(["replay", str(small), "--on", "pool", "--json", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.simulated_only("other libraries run where there is a GPU")
def test_other_library_without_a_gpu(machine: Any, run: Run, small: Path) -> None:
    text = run("replay", str(small), "--on", "cupy")
    assert "CuPy MemoryPool: not replayed (it needs a GPU)" in text


@pytest.mark.parametrize(
    ("arguments", "why"), [(["nowhere"], "nowhere: No such file"), ([__file__], "neither a streamalloc trace")]
)
def test_bad_arguments(machine: Any, refused: Run, arguments: list[str], why: str) -> None:
    assert why in refused("replay", *arguments)
