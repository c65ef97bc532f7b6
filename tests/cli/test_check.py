"""The command that checks a program: what it prints, writes and exits with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import documented, keys

_PROGRAM = """
import sys, time
from cuda.bindings import driver as cu

cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
first, second = (cu.cuStreamCreate(1)[1] for _ in range(2))
memory = cu.cuMemAllocAsync(4096, first)[1]
event = cu.cuEventCreate(2)[1]
if "right" in sys.argv:
    cu.cuEventRecord(event, first)
    cu.cuStreamWaitEvent(second, event, 0)
cu.cuMemsetD8Async(memory, 1, 4096, second)  # used
cu.cuStreamSynchronize(second)
cu.cuMemFreeAsync(memory, first)
cu.cuEventDestroy(event)
cu.cuStreamDestroy(first)
cu.cuStreamDestroy(second)
if "long" in sys.argv:
    for _ in range(100):
        time.sleep(0.05)
print("the program has ended")
sys.exit(3 if "three" in sys.argv else 0)
"""


@pytest.fixture
def check(tmp_path: Path, on_cuda: bool) -> Any:
    """Runs the command over the program in a process of its own."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)

    def run(*words: str, options: tuple[str, ...] = (), file: Path = program) -> Any:
        variables = os.environ | {"STREAMALLOC_DRIVER": "cuda" if on_cuda else "simulated"}
        root = Path(__file__).parents[2]
        variables["PYTHONPATH"] = f"{root}{os.pathsep}{variables.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "streamalloc", "check", *options, str(file), *words]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_a_finding_is_printed_and_is_the_exit_status(check: Any) -> None:
    done = check()
    assert done.returncode == 1 and done.stdout == "the program has ended\n"
    assert done.stderr.startswith("use before allocation: cuMemsetD8Async") and "# used" in done.stderr
    assert done.stderr.endswith("streamalloc check: 1 hazard, 0 leaks\n")


@pytest.mark.parametrize(("words", "status"), [((), 0), (("three",), 3)])
def test_without_a_finding_the_exit_status_is_the_program_s(check: Any, words: tuple[str, ...], status: int) -> None:
    done = check("right", *words)
    assert (done.returncode, done.stdout, done.stderr) == (status, "the program has ended\n", "")


@pytest.mark.parametrize("options", [("-m",), ()], ids=["package", "folder"])
def test_what_has_no_main_module_is_a_wrong_argument(check: Any, tmp_path: Path, options: tuple[str, ...]) -> None:
    """An exit status of 1 would say that a hazard was found."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    done = check(options=options, file=Path("package"))
    assert done.returncode == 2 and re.fullmatch(
        r"streamalloc check: .*__main__.*\n", done.stderr.removeprefix("python -m ")
    )


def test_kept_memory_is_listed_and_the_exit_status_is_the_program_s(check: Any, on_cuda: bool, tmp_path: Path) -> None:
    keeps = tmp_path / "keeps.py"
    keeps.write_text(_PROGRAM.replace("cu.cuMemFreeAsync(memory, first)", ""))
    done = check("right", options=("--json", str(tmp_path / "found.json")), file=keeps)
    assert done.returncode == 0
    kinds = [one["kind"] for one in json.loads((tmp_path / "found.json").read_text())["hazards"]]
    assert kinds == ([] if on_cuda else ["leak"])
    assert done.stderr.endswith("" if on_cuda else "streamalloc check: 0 hazards, 1 leak\n")
    assert check("right", "three", file=keeps).returncode == 3


def test_the_findings_are_written_as_json(check: Any, tmp_path: Path) -> None:
    check("three", options=("--json", str(tmp_path / "found.json")))
    found = json.loads((tmp_path / "found.json").read_text())
    (hazard,) = found["hazards"]
    assert hazard["kind"] == "use before allocation" and any("# used" in line for line in hazard["stacks"]["this call"])
    assert found["not checked"] == [] and keys(found) == documented("hazards")


@pytest.mark.parametrize("length", ["short", "long"])
def test_the_program_ends_at_the_first_finding_if_asked(check: Any, length: str, on_cuda: bool, tmp_path: Path) -> None:
    done = check(length, options=("--raise", "--json", str(tmp_path / "found.json")))
    assert done.returncode == 1
    if length == "long" or not on_cuda:  # on a GPU the exception comes a millisecond later
        assert done.stdout == "" and re.search(r"^\S*(DriverMisuseError|_Found): ", done.stderr, re.MULTILINE)
    first = json.loads((tmp_path / "found.json").read_text())["hazards"][0]
    assert first["kind"] == "use before allocation"


def test_a_forked_child_that_ends_later_reports_nothing(check: Any, tmp_path: Path, on_cuda: bool) -> None:
    if on_cuda:
        pytest.skip("on the simulated driver")
    program, report = tmp_path / "forks.py", tmp_path / "report.json"
    forks = "import os, time\nchild = os.fork()\nif not child:\n    while not os.path.exists('report.json'):\n"
    program.write_text(f"{forks}        time.sleep(0.01)\n    raise SystemExit(0)\n{_PROGRAM}")
    done = check(options=("--json", str(report)), file=program)  # Its output ends with the child.
    assert done.returncode == 1 and done.stderr.count("streamalloc check:") == 1
    assert len(json.loads(report.read_text())["hazards"]) == 1


@pytest.mark.parametrize("end", ["raise ValueError('of the program')", "raise KeyboardInterrupt"])
def test_an_exception_of_the_program_leaves_the_file(check: Any, tmp_path: Path, end: str) -> None:
    raises = tmp_path / "raises.py"
    raises.write_text(f"{_PROGRAM.partition('print(')[0]}\n{end}\n")
    done = check(options=("--json", str(tmp_path / "found.json")), file=raises)
    assert done.returncode != 0 and end.split()[1].partition("(")[0] in done.stderr.splitlines()[-1]
    (hazard,) = json.loads((tmp_path / "found.json").read_text())["hazards"]
    assert hazard["kind"] == "use before allocation"


def test_threads_are_checked_until_they_end(check: Any, tmp_path: Path) -> None:
    """Also those that the program does not join: one of its own, and the idle one of an executor."""
    threads = tmp_path / "threads.py"
    work = "".join(f"    {line}\n" for line in _PROGRAM.partition("print(")[0].splitlines())
    threads.write_text(
        "import concurrent.futures, sys, threading\nfrom time import sleep\n"
        f"def work():\n    sleep(0.3)\n{work}\n"
        "concurrent.futures.ThreadPoolExecutor().submit(print, 'idle')\n"
        "threading.Thread(target=work).start()\n"
        "sys.exit(0)\n"
    )
    done = check(file=threads)
    assert done.returncode == 1 and done.stderr.endswith("streamalloc check: 1 hazard, 0 leaks\n")


_PARENTS = {
    "subprocess": "import subprocess, sys\nsubprocess.run([sys.executable, 'program.py'], check=True)\n",
    "process": """
import multiprocessing, runpy
if __name__ == "__main__":
    process = multiprocessing.get_context(START).Process(target=runpy.run_path, args=("program.py",))
    process.start()
    process.join()
""",
}


@pytest.mark.parametrize("start", ["subprocess", "spawn", "forkserver", "fork"])
def test_processes_that_the_program_starts_are_checked(check: Any, tmp_path: Path, start: str, on_cuda: bool) -> None:
    if on_cuda and start.startswith("fork"):
        pytest.skip("CUDA does not work after a fork")
    parent = tmp_path / "parent.py"
    parent.write_text(_PARENTS.get(start, _PARENTS["process"].replace("START", repr(start))))
    done = check(options=("--json", str(tmp_path / "found.json")), file=parent)
    (hazard,) = json.loads((tmp_path / "found.json").read_text())["hazards"]
    assert done.returncode == 1 and hazard["kind"] == "use before allocation"
