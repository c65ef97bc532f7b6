"""The commands ``memory`` and ``record``: programs that know nothing of this package, on either driver."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamalloc import traces
from tests.cli.conftest import documented, keys

Python = Callable[..., "subprocess.CompletedProcess[str]"]

_PROGRAM = """
import sys
from cuda.bindings import driver

def ok(answer):
    assert not answer[0], answer
    return answer[1] if len(answer) == 2 else answer[1:]

def weights(nbytes):
    return ok(driver.cuMemAlloc(nbytes))

ok((*driver.cuInit(0), None))
ok((*driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))), None))
stream = ok(driver.cuStreamCreate(1))
scratch = ok(driver.cuMemAllocAsync(96 << 20, stream))
kept = weights(32 << 20)
ok((*driver.cuMemFreeAsync(scratch, stream), None))
ok((*driver.cuStreamSynchronize(stream), None))
more = ok(driver.cuMemAllocAsync(1 << 20, stream))
print("the program ran with", sys.argv[1:])
if "raise" in sys.argv:
    raise ValueError("the program's own")
if "exit" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def command(python: Python, tmp_path: Path) -> Any:
    """Runs a command on the program, in a process of its own."""
    (tmp_path / "program.py").write_text(_PROGRAM)

    def run(*words: str) -> Any:
        code = f"import sys\nfrom streamalloc.cli import main\nsys.exit(main({[str(word) for word in words]!r}))"
        return python(code)

    return run


def test_memory_shows_libraries_and_lines(command: Any, tmp_path: Path) -> None:
    page, data = tmp_path / "memory.html", tmp_path / "memory.json"
    done = command("memory", f"--html={page}", f"--json={data}", tmp_path / "program.py", "one", "--two")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the program ran with ['one', '--two']" in done.stdout
    assert re.search(r"0 +the program +cuMemAlloc +32\.0 MiB +32\.0 MiB\n", done.stdout)
    assert re.search(r"0 +the program +pool allocations +1\.0 MiB +96\.0 MiB\n", done.stdout)
    assert re.search(r"32\.0 MiB +32\.0 MiB +the program +program\.py:10 in weights\n", done.stdout)
    assert "context, modules and the driver's own" in done.stdout
    now, peak = json.loads(data.read_text())["moments"]
    assert keys({"moments": [now, peak]}) == documented("moments")
    assert now["bytes"] == sum(row["nbytes"] for row in now["rows"]) == now["driver"]["0"]
    assert peak["bytes"] - now["bytes"] >= 95 << 20 or any(row["what"] == "pools' reserve" for row in now["rows"])
    (weights,) = (row for row in now["rows"] if row["what"] == "cuMemAlloc")
    assert [frame.rpartition(" in ")[2] for frame in weights["place"][:1] + weights["place"][-1:]] == [
        "weights",
        "<module>",
    ]
    text = page.read_text()
    assert "src=" not in text and "href=" not in text  # it needs no other file
    boxes = re.findall(r"<div title='([^']*)' style='left:([\d.]+)%;width:([\d.]+)%;top:(\d+)px", text)
    assert any(title.startswith("program.py:10 weights: 32.0 MiB") for title, *_ in boxes)
    graphs = [[float(width) for _, _, width, top in boxes if top == depth] for depth in ("0", "20", "40")]
    assert [round(sum(widths)) for widths in graphs] == [200, 200, 200]  # two graphs of 100 %


def test_memory_is_shown_when_the_program_raises_or_exits(command: Any, tmp_path: Path) -> None:
    raised = command("memory", tmp_path / "program.py", "raise")
    assert raised.returncode == 1 and "ValueError: the program's own" in raised.stderr
    first = raised.stderr.splitlines()[1]  # Without the frames of the command.
    assert raised.stderr.startswith("Traceback") and "program.py" in first and "<module>" in first
    exited = command("memory", tmp_path / "program.py", "exit")
    assert exited.returncode == 3 and exited.stderr == ""
    for done in (raised, exited):
        assert re.search(r"cuMemAlloc +32\.0 MiB", done.stdout)
    missing = command("memory", tmp_path / "missing.py")
    assert missing.returncode == 2 and "there is no file" in missing.stderr and missing.stdout == ""


def test_a_picture_of_a_program_without_this_package(command: Any, tmp_path: Path) -> None:
    """The modules for pictures are imported once the program's threads have ended."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "peak.svg"
    done = command("memory", f"--picture={picture}", tmp_path / "program.py")
    assert (done.returncode, done.stderr) == (0, "") and picture.exists()


def test_a_picture_without_matplotlib_is_refused_before_the_program_runs(python: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('ran')")
    words = ["memory", "--picture", str(tmp_path / "peak.png"), str(tmp_path / "program.py")]
    code = f"import sys\nsys.modules['matplotlib'] = None\nfrom streamalloc.cli import main\nsys.exit(main({words!r}))"
    done = python(code)
    assert (done.returncode, done.stdout) == (2, "") and "pip install 'streamalloc[plot]'" in done.stderr


@pytest.mark.parametrize(
    "words",
    [("record", "-o"), ("memory", "--json"), ("memory", "--html"), ("memory", "--picture"), ("check", "--json")],
    ids=" ".join,
)
def test_an_output_that_cannot_be_written_is_refused_before_the_program_runs(
    words: tuple[str, str], refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("print('ran')")
    for file, why in ((tmp_path / "missing" / "x.png", "No such file or directory"), (tmp_path, "Is a directory")):
        assert f"cannot write {file}: {why}" in refused(*words, str(file), str(tmp_path / "program.py"))


@pytest.mark.usefixtures("machine")
def test_an_output_stays_as_it_is_when_the_program_does_not_start(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        assert "there is no file" in refused("record", "-o", str(tmp_path / name), str(tmp_path / "program.py"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old", "old")]
    (tmp_path / "program.py").write_text("print('ran')")
    assert "must end in .png" in refused("memory", "--picture=peak.txt", str(tmp_path / "program.py"))


def test_a_forked_child_that_ends_with_the_program_shows_nothing(command: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nif child := os.fork():\n    os.waitpid(child, 0)\n")
    done = command("memory", program)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("Device memory of") == 1


def test_live_lines_are_printed_while_the_program_runs(command: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM + "import time\ntime.sleep(0.6)\n")
    done = command("memory", "--live", "0.2", program)
    lines = done.stderr.splitlines()
    assert "streamalloc memory: 33.0 MiB taken, 128.0 MiB at the peak; the program 33.0 MiB" in lines
    assert {line.partition(":")[0] for line in lines} == {"streamalloc memory"}


def test_a_recorded_program_is_replayed(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.trace"
    done = command("record", "-o", file, tmp_path / "program.py", "exit")
    assert done.returncode == 3 and "<Trace of 4 events on 2 streams, at most 128 MiB at once>" in done.stdout
    trace = traces.load(file)
    assert [(event.action, event.id, event.nbytes >> 20) for event in trace.events] == [
        ("allocate", 0, 96),
        ("allocate", 1, 32),
        ("free", 0, 96),
        ("allocate", 2, 1),
    ]
    assert [event.stream for event in trace.events] == [0, 1, 0, 0] and trace.threads == 1
    assert trace.source == f"streamalloc record {tmp_path / 'program.py'}" and trace.seconds > 0
    replayed = command("replay", "--on", "pool", file)
    assert replayed.returncode == 0 and "streamalloc MemoryPool" in replayed.stdout
