"""The notebooks run on either driver, each in an empty folder, and what is committed with them is what they print."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")
pytest.importorskip("matplotlib_inline")

from tests.package.notebooks import Outputs, Runner

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Cells with this tag print what differs between machines or versions of the bindings.
VARIES = "varies"


def _read(path: Path) -> Any:
    import nbformat  # takes seconds, which only the worker that runs these tests spends

    return nbformat.read(path, as_version=4)


def _code(path: Path) -> list[Any]:
    return [cell for cell in _read(path).cells if cell.cell_type == "code"]


def _printed(outputs: Outputs) -> list[Any]:
    """Text and objects of a cell, without images, and with one name for every handle and address."""
    texts = [text for one in outputs.shown if "image/png" not in one for _, text in sorted(one.items())]
    return [sorted((name, _without_numbers(text)) for name, text in outputs.streams.items()),
            *map(_without_numbers, texts)]  # fmt: skip


def _without_numbers(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+\b", "0x...", text)


@pytest.fixture(scope="module")
def runner(on_cuda: bool) -> Iterator[Runner]:
    with Runner(on_cuda) as runner:
        yield runner


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs: nothing of the project lies beside a notebook that somebody has downloaded."""
    return tmp_path_factory.mktemp("downloaded")


def test_a_picture_is_drawn_once(runner: Runner, empty: Path) -> None:
    cells = [
        "import streamalloc as sa; pool = sa.MemoryPool(sa.Device(0))",
        "pool.plot()",  # as the value of the cell
        "picture = pool.plot()\nprint(1)",  # at the end of the cell
        "picture",
    ]
    runner.begin("pictures", empty, cells)
    assert [one.images for one in runner.result("pictures")] == [0, 1, 1, 1]


def test_set_up(runner: Runner, empty: Path, on_cuda: bool) -> None:
    cells = [
        "import os, subprocess, sys\nimport streamalloc as sa\nmachine = sa.testing.notebook(devices=2)",
        "dev = sa.Device(0)\nload, compute = (dev.create_stream(name=name) for name in ('load', 'compute'))\n"
        "buffer = sa.allocate(1024, load)\nbuffer.fill(1, compute)",
        "with sa.observe(dev) as observer:\n    kept = sa.allocate(1024, load)\nobserver.leaks()",
        "print(machine.hazards[0])\nmachine.hazards",
        "program = 'import streamalloc as sa; print(sa.Device.count(), sa.Device(0).uuid)'\n"
        "told = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True).stdout\n"
        "print(told == f'{sa.Device.count()} {dev.uuid}\\n')",
        "dev.synchronize()\nbuffer.free()\nkept.free()",
    ]
    runner.begin("set-up", empty, cells)
    ready, wrong, leaks, told, same, _ = runner.result("set-up")
    assert re.fullmatch(
        r"running on \d+ x .+\n" if on_cuda else r"running on 2 x .+, simulated\n", ready.streams["stdout"]
    )
    (shown,) = wrong.shown  # below the cell that has it
    assert shown["text/html"].startswith(
        "<details><summary><b>use before allocation</b>, 0.0 MiB, at cell [2], line 4<"
    )
    assert "<code>cell [3], line 2 in &lt;module&gt;</code>" in leaks.shown[0]["text/html"]
    text = told.streams["stdout"]
    assert "stream &#x27;compute&#x27; (created at cell [2], line 2)" in told.shown[0]["text/html"]
    assert "on stream 'compute' (created at cell [2], line 2)" in " ".join(text.split())
    assert text.endswith("allocated:\n  cell [2], line 3, in <module>\n    buffer = sa.allocate(1024, load)\n")
    assert same.streams["stdout"] == "True\n"


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: str(path.stem))
def path(request: pytest.FixtureRequest) -> Path:
    """A notebook of the project."""
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def executed(path: Path, runner: Runner, empty: Path) -> list[Outputs]:
    """Outputs of the cells on the driver under test. An error in one is raised here."""
    # And the next one, meanwhile.
    for one in NOTEBOOKS[(at := NOTEBOOKS.index(path)) : at + 2]:
        runner.begin(one.stem, empty, [cell.source for cell in _code(one)])
    return runner.result(path.stem)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_every_cell_runs(path: Path, executed: list[Outputs]) -> None:
    assert len(executed) == len(_code(path)) > 0


def test_pictures_are_drawn(executed: list[Outputs]) -> None:
    assert sum(one.images for one in executed) >= 3


def test_needs_no_other_module(path: Path) -> None:
    nodes = [node for cell in _code(path) for node in ast.walk(ast.parse(cell.source))]
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert found <= {"matplotlib", "numpy", "streamalloc"}


class TestCommitted:
    def test_its_programs_fit_the_page(self, path: Path) -> None:
        assert [line for cell in _code(path) for line in cell.source.splitlines() if len(line) > 100] == []

    def test_was_executed_from_top_to_bottom(self, path: Path) -> None:
        cells = _code(path)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))

    def test_has_its_pictures(self, path: Path) -> None:
        assert sum(Outputs.committed(cell).images for cell in _code(path)) >= 3
        assert path.stat().st_size < 1_000_000

    def test_is_valid_and_names_no_machine(self, path: Path) -> None:
        import nbformat

        notebook = _read(path)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        source = path.read_text(encoding="utf-8")
        assert not re.findall(r"/(?:home|root|tmp|work|opt|Users)/[^\s\"]*", source)

    @pytest.mark.simulated_only("the outputs that are committed are the simulated driver's")
    def test_prints_what_it_says(self, path: Path, executed: list[Outputs]) -> None:
        for now, cell in zip(executed, _code(path), strict=True):
            then = Outputs.committed(cell)
            if VARIES in cell.metadata.get("tags", []):
                assert _printed(now), cell.id
            else:
                assert _printed(now) == _printed(then) and now.images == then.images, cell.id
