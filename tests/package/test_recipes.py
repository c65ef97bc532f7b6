"""Programs of the recipes and of the pages for beginners: each runs alone, and prints what its page shows below it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import support
from tests.package.programs import Runner, runner, serve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "notebooks" / "docs"
_OTHERS = [DOCS / f"{name}.md" for name in ("getting-started", "coming-from", "guides/testing")]
PAGES = [*sorted((DOCS / "recipes").glob("*.md")), *_OTHERS]
"""Pages whose programs run alone. The programs of other pages run in order, or have other files beside them."""
_BLOCK = re.compile(r"^```(?:python|py)\b[^\n]*\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_LIBRARY = re.compile(
    r"^(?:import|from) (cupy|cuda\.core|numba\.cuda|rmm|torch_memory_saver|torch|vllm)\b", re.MULTILINE
)
_OF_THE_MACHINE = ("resident.py", "sleep.py")
"""Programs whose pages show figures of the simulated machine."""
_WIDTH = 84
"""Columns of a block that a page shows without a bar to scroll it."""


class Program(NamedTuple):
    page: Path
    name: str
    text: str
    output: str


def programs() -> list[Program]:
    found = []
    for page in PAGES:
        for text, output in _BLOCK.findall(page.read_text()):
            named = re.match(r"# (\w+\.py)\n", text)
            assert named, f"{page}: a program without a name in its first line: {text}"
            found.append(Program(page, named[1], text, output))
    return found


PROGRAMS = programs()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    on_cuda = request.config.option.streamalloc_driver == "cuda"
    # The sockets of stores are there, so that other runs of this test serve stores of the same names.
    sockets = str(tmp_path_factory.mktemp("sockets"))
    with runner(on_cuda, STREAMALLOC_CHECK="raise", XDG_RUNTIME_DIR=sockets) as started:
        yield started


_FRAME = re.compile(rf'  File "(?:<string>|{re.escape(serve.__code__.co_filename)})", .*\n(?:    .*\n)?')


def plain(text: str, folder: Path) -> str:
    """Output without what differs from run to run: folders, addresses, times, and the frames of the runner."""
    text = _FRAME.sub("", text.replace(f"{folder}/", ""))
    return re.sub(r"\bin \d+\.\d+s", "in 0.35s", re.sub(r"\b0x[0-9a-f]{7,}", "0x302000000", text))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_runs_alone_and_prints_what_its_page_has(program: Program, runs: Runner, on_cuda: bool, tmp_path: Path) -> None:
    (tmp_path / program.name).write_text(program.text)
    libraries = _LIBRARY.findall(program.text)
    arguments = [program.name]
    if program.name.startswith("test_"):
        # Without what takes seconds: other plugins, and the assertions of this package, which pytest would rewrite.
        arguments = ["-m", "pytest", "-q", "--assert=plain", "-p", "streamalloc.testing.plugin", *arguments]
    elif libraries and on_cuda:
        for library in libraries:
            support.library(library)
    elif libraries:
        arguments = ["-m", "tests.interop.standins", *arguments]
    done = runs.run(tmp_path, *arguments)
    # On hardware other code may have the handles of streams, so that the checker leaves something out.
    errors = re.sub(r"(?m)^streamalloc check: not checked: .*\n", "", done.errors) if on_cuda else done.errors
    # Tensors live to the end, which the checker reports.
    assert done.code == 0 and (libraries or not errors), done.errors
    if not (on_cuda and program.name in _OF_THE_MACHINE):
        assert plain(done.output, tmp_path) == program.output != ""


def test_programs_before_and_after_a_change_print_the_same() -> None:
    printed = {program.name: program.output for program in PROGRAMS}
    pairs = [name for name in printed if name.endswith("_before.py")]
    assert len(pairs) == 4
    for name in pairs:
        assert printed[name] == printed[name.replace("_before", "_after")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_pages_say_what_to_change_on_a_gpu(page: Path) -> None:
    assert re.search(r"\b[Oo]n (?:a GPU|two GPUs)\b", page.read_text())


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_blocks_fit_their_column(page: Path) -> None:
    """All but output, whose paths and sentences are as long as they are."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if kind[:1] != "{" and kind != "text" for line in block.splitlines()]
    assert max(map(len, lines), default=0) <= _WIDTH
