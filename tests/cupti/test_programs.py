"""Programs of PyTorch in which a wait before or after an operator is missing: found at the lines that comments mark,
and silent with the argument ``fixed``.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, environment

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
PAGE = ROOT / "notebooks" / "docs" / "guides" / "any-program.md"
_each = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def marked(path: Path, name: str) -> set[int]:
    """The lines with a mark."""
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf"  # {name}\b", line)}


@_each
def test_is_small_and_shown_on_the_page(path: Path) -> None:
    text = path.read_text()
    what = ast.get_docstring(ast.parse(text))
    assert what is not None and "FIXED" in text and '"right bytes" if ' in text and len(text.splitlines()) <= 35
    assert len(marked(path, "used")) == 1 and len(marked(path, "this call: race")) == 1
    assert f"../../../tests/cupti/programs/{path.name}\n" in PAGE.read_text()
    assert f"<summary>{what.rstrip('.')}: <code>{path.name}</code></summary>" in PAGE.read_text()


@_each
@pytest.mark.parametrize("words", [(), ("fixed",)], ids=["wrong", "fixed"])
def test_is_found_on_a_gpu(path: Path, words: tuple[str, ...], on_cuda: bool, tmp_path: Path) -> None:
    if not on_cuda:
        pytest.skip("PyTorch runs on GPUs only")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "streamalloc", "check", "--json", str(found), str(path), *words]
    done = subprocess.run(
        command, env=environment(STREAMALLOC_DRIVER="cuda"), capture_output=True, text=True, timeout=120, check=False
    )
    assert found.exists(), (done.returncode, done.stderr)
    hazards = json.loads(found.read_text())["hazards"]
    assert (done.returncode, len(hazards)) == ((0, 0) if words else (1, 1)), done.stderr
    for hazard in hazards:
        for name, mark in (("used", "used"), ("this call", "this call: race")):
            (line,) = marked(path, mark)
            assert f'{path.name}", line {line},' in "".join(hazard["stacks"][name])
    assert not words or done.stdout == "right bytes\n"


def test_there_are_several() -> None:
    assert len(PROGRAMS) >= 4
