"""The notebooks run from top to bottom on either driver, and what is committed with them is what they print."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
# Not matplotlib alone: importing this builds its font cache, of which the kernel would tell in a notebook's output.
pytest.importorskip("matplotlib.font_manager")

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Cells with this tag print what differs between machines or versions of the bindings.
VARIES = "varies"


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _is_image(output: Any) -> bool:
    return "image/png" in output.get("data", {})


def _printed(cell: Any) -> list[Any]:
    """What a cell printed and displayed, without images, and with one name for every handle and address."""
    streams: dict[str, str] = {}
    displayed = []
    for output in cell.outputs:
        if output.output_type == "stream":
            streams[output.name] = streams.get(output.name, "") + output.text
        elif not _is_image(output):
            displayed += [_without_numbers(text) for _, text in sorted(output.data.items())]
    return [*((name, _without_numbers(text)) for name, text in sorted(streams.items())), *displayed]


def _without_numbers(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+\b", "0x...", text)


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: str(path.stem))
def path(request: pytest.FixtureRequest) -> Path:
    """A notebook of the project."""
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def executed(path: Path, on_cuda: bool) -> Iterator[Any]:
    """The notebook after a run of all its cells on the driver under test. An error in a cell is raised here."""
    notebook = _read(path)
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None
    # The package from this tree, installed or not.
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "STREAMALLOC_DRIVER": "cuda" if on_cuda else "simulated",
    }
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=environment)
    yield notebook


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_every_cell_runs(executed: Any) -> None:
    count = len(_code(executed))
    assert [cell.execution_count for cell in _code(executed)] == list(range(1, count + 1))


def test_pictures_are_drawn(executed: Any) -> None:
    assert sum(_is_image(output) for cell in _code(executed) for output in cell.outputs) >= 4


class TestCommitted:
    def test_was_executed_from_top_to_bottom(self, path: Path) -> None:
        cells = _code(_read(path))
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))

    def test_has_its_pictures(self, path: Path) -> None:
        assert sum(_is_image(output) for cell in _code(_read(path)) for output in cell.outputs) >= 4
        assert path.stat().st_size < 1_000_000

    def test_is_valid_and_names_no_machine(self, path: Path) -> None:
        notebook = _read(path)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        source = path.read_text(encoding="utf-8")
        assert not re.findall(r"/(?:home|root|tmp|work|opt|Users)/[^\s\"]*", source)

    @pytest.mark.simulated_only("the outputs that are committed are the simulated driver's")
    def test_prints_what_it_says(self, path: Path, executed: Any) -> None:
        for now, then in zip(_code(executed), _code(_read(path)), strict=True):
            if VARIES in then.metadata.get("tags", []):
                assert _printed(now), then.id
            else:
                assert _printed(now) == _printed(then), then.id
