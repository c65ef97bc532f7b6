"""The programs of several processes that the documentation prints: as they stand there, each in a file of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes import finished

DOCS = Path(__file__).parents[2] / "notebooks" / "docs"
_FILE = re.compile(r"^```py\n(# (\w+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """The files that a page prints, by the names in their first lines."""
    return {name: text for text, name in _FILE.findall(page.read_text())}


def starts() -> list[tuple[str, str]]:
    """Pages, and their programs that no other one of the page starts."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        printed = files(page)
        found += [
            (str(page.relative_to(DOCS)), name)
            for name in printed
            if not any(f'"{name}"' in text for other, text in printed.items() if other != name)
        ]
    return found


def test_there_are_some() -> None:
    pages = {page for page, _ in starts()}
    assert {"guides/ipc.md", "recipes/shared-weights.md"} <= pages
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            # One that starts processes is run as well, and so has a name.
            assert "Popen(" not in block or _FILE.match(f"```py\n{block}```"), (page, block)


@pytest.mark.parametrize(("page", "name"), starts())
def test_runs(page: str, name: str, on_cuda: bool, tmp_path: Path) -> None:
    """To the end, with no error in any of the processes, and with nothing to report by the checker."""
    for file, text in files(DOCS / page).items():
        (tmp_path / file).write_text(text)
    command = ["env", f"--chdir={tmp_path}", sys.executable, "-W", "error", name]
    # Sockets of stores are there, so that other runs of this test serve stores of the same names.
    done = finished(command, on_cuda, STREAMALLOC_CHECK="raise", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
