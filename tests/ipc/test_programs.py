"""The programs of several processes that the documentation prints: as they stand there, each in a file of its own."""

import re
import sys
from pathlib import Path

import pytest

from tests.package.test_recipes import PAGES as ALONE
from tests.processes import finished, python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "notebooks" / "docs").rglob("*.md")} - {*ALONE})]
# A program, and below it what it prints, if it prints anything.
_FILE = re.compile(r"^```py\n(# (\w+\.py)\n.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """The files that a page prints, by the names in their first lines."""
    return {name: text for text, name, _ in _FILE.findall(page.read_text())}


def starts() -> list[tuple[str, str]]:
    """Pages, and their programs that no other one of the page starts."""
    found = []
    for page in PAGES:
        printed = files(page)
        found += [
            (str(page.relative_to(ROOT)), name)
            for name in printed
            if not any(f'"{name}"' in text for other, text in printed.items() if other != name)
        ]
    return found


def test_there_are_some() -> None:
    pages = {page for page, _ in starts()}
    assert {"notebooks/docs/guides/ipc.md", "README.md"} <= pages
    for page in PAGES:
        for block in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            # One that starts processes is run as well, and so has a name.
            assert "Popen(" not in block or _FILE.match(f"```py\n{block}```\n"), (page, block)


_WRONG = "wrong.py"
"""The program of the README that the checker reports."""


@pytest.mark.parametrize(
    ("page", "name"), [one for one in starts() if not one[1].startswith("test_") and one[1] != _WRONG]
)
def test_runs(page: str, name: str, on_cuda: bool, tmp_path: Path) -> None:
    """To the end, with the output that the page prints, no error in any process, and no report of the checker."""
    for file, text in files(ROOT / page).items():
        (tmp_path / file).write_text(text)
    (printed,) = (printed for _, file, printed in _FILE.findall((ROOT / page).read_text()) if file == name)
    command = ["env", f"--chdir={tmp_path}", sys.executable, "-W", "error", name]
    # Sockets of stores are there, so that other runs of this test serve stores of the same names.
    done = finished(command, on_cuda, STREAMALLOC_CHECK="raise", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_the_wrong_program_is_reported_as_the_first_page_shows(on_cuda: bool, tmp_path: Path) -> None:
    """And the mend that the page names ends the report."""
    page = (ROOT / "README.md").read_text()
    text, printed = files(ROOT / "README.md")[_WRONG], page.partition("```text\n")[2].partition("```")[0]
    wrong, mend = "batch.free()\n", "batch.free(compute)\n"
    assert wrong in text and f"`{mend.strip()}`" in page
    for program, report in ((text, printed), (text.replace(wrong, mend), "")):
        (tmp_path / _WRONG).write_text(program)
        done = finished(["env", f"--chdir={tmp_path}", sys.executable, _WRONG], on_cuda, STREAMALLOC_CHECK="report")
        found = re.sub(r"\b0x[0-9a-f]{7,}", "0x302000000", done.stderr.replace(f"{tmp_path}/", ""))
        assert (done.returncode, done.stdout, found) == (0, "", report)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("producer_consumer.py", "the consumer read {7}\n"),
        ("ring.py", f"the consumers read the batches {[*range(12)]}\n"),
    ],
)
def test_examples_run(name: str, printed: str, on_cuda: bool) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "notebooks" / "examples" / name)]
    done = finished([*command, *([] if on_cuda else ["--simulated"])], on_cuda=True, STREAMALLOC_CHECK="raise")
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_least_cost_has_a_line_for_each_kind_of_stream(on_cuda: bool) -> None:
    done = finished([sys.executable, "-W", "error", str(ROOT / "notebooks" / "examples" / "least_cost.py")], on_cuda)
    lines = [re.findall(r"[\w-]+, (?:freed|dropped) \d+\.\d\d|^[\w.-]+", line) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines][:3] == ["own", "default", "per-thread"]
    assert {len(line) for line in lines if line[0] != "cupy.empty"} == {5}
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.simulated_only("its machines are simulated")
def test_a_program_of_two_machines_ends() -> None:
    """Threads that carry words between machines are stopped before the simulated driver keeps its lock."""
    page = (ROOT / "notebooks" / "docs" / "guides" / "ipc.md").read_text()
    (text,) = re.findall(r"^```python\n((?:(?!```).)*?fabric=True.*?)^```", page, re.MULTILINE | re.DOTALL)
    for _ in range(2):
        assert finished(python(text)).returncode == 0
