"""Checks that a test asks for, in the processes that it starts."""

import multiprocessing.forkserver
import os
from pathlib import Path
from typing import Any

import pytest

from streamalloc.driver.internal import VARIABLE, ParentTest
from streamalloc.testing.machines import reports
from tests.processes import finished, python
from tests.testing.conftest import Run

CHILD = """
import gc
import multiprocessing
import os
import subprocess
import sys
import streamalloc.driver

kept = []

def leaky():
    device = sa.Device(0)
    kept.append(sa.MemoryPool(device).allocate(4096, device.create_stream()))

def both():
    fills(ordered=False)
    leaky()

def right(*given):
    fills(ordered=True)

def started(method, function):
    process = multiprocessing.get_context(method).Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0

def programmed(environment, function):
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import {__name__} as it; it.{function}()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=True)

@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setenv("STREAMALLOC_DRIVER", "simulated")
"""


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find this tree."""
    from tests.processes import ROOT

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # A fork server of an earlier test has the environment of that test.
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    for name in ("pid", "alive_fd", "address"):
        monkeypatch.setattr(server, f"_forkserver_{name}", None)


def test_of_multiprocessing(run: Run) -> None:
    result = run(
        CHILD
        + """
def test_both(streamalloc_machine):
    started("forkserver", both)

def test_right(streamalloc_machine):
    started("forkserver", right)

@pytest.mark.streamalloc(check=False, leaks=False)
def test_not_asked(streamalloc_machine):
    started("forkserver", both)

@pytest.mark.streamalloc(leaks=False)
def test_one_of_them(streamalloc_machine):
    started("forkserver", leaky)
""",
        "--streamalloc-check",
        "--streamalloc-leaks",
    )
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_both*",
            "in process *, which the test has started:",
            "use before allocation: cuMemsetD8Async in fill() on stream *",
            "*, in fills",
            "in process *, which the test has started:",
            "leak: allocation of 4 KiB at *",
        ]
    )


def test_a_process_that_outlives_its_test(run: Run) -> None:
    """It goes on with the driver that it has."""
    run(
        CHILD
        + """
def steps(connection):
    device = sa.Device(0)
    stream = device.create_stream()
    while connection.recv():
        with sa.MemoryPool(sa.Device(0)) as pool:
            pool.allocate(4096, stream).free()
        connection.send(type(sa.driver.default()).__name__)

def asked(ends):
    ends[0].send(True)
    return ends[0].recv()

@pytest.fixture(scope="module")
def lasting():
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    made = []
    yield lambda: made.append(context.Process(target=steps, args=(ends[1],))) or made[0].start(), ends
    ends[0].send(False)
    made[0].join()
    assert made[0].exitcode == 0

@pytest.mark.streamalloc(check=True)
def test_starts_it(lasting):
    lasting[0]()
    assert asked(lasting[1]) == "CheckedDriver"

def test_uses_it(lasting):
    assert asked(lasting[1]) == "CheckedDriver"
"""
    ).assert_outcomes(passed=2)


def test_of_programs(run: Run) -> None:
    result = run(
        CHILD
        + """
def test_both(streamalloc_environment):
    programmed(streamalloc_environment, "both")
""",
        "--streamalloc-check",
        "--streamalloc-leaks",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_both*", "use before allocation*", "leak: *"])


def test_reports_of_names_that_are_no_text() -> None:
    with reports("check") as found:
        test = ParentTest.from_text(os.environ[VARIABLE])
        test.report("check", os.fsdecode(b"\xff"))
        assert [text.splitlines()[1:] for text in found("check")] == [["\\udcff"]]
        assert [oct(one.stat().st_mode) for one in Path(test.directory).iterdir()] == ["0o100600"]


@pytest.mark.parametrize("variable", ["no number:check:/tmp", "1:check:/nowhere/at/all", "1"])
def test_of_a_test_that_has_ended(variable: str) -> None:
    """A process that outlives its test has nobody to report to."""
    code = "from streamalloc.driver.parent import parent_test; print(parent_test())"
    assert finished(python(code), False, **{VARIABLE: variable}).stdout == "None\n"


def test_of_buffers_that_were_sent(run: Run) -> None:
    """Arguments of a process last until its end, and are no leak."""
    run(
        CHILD
        + """
def test_it(streamalloc_machine, streamalloc_environment, monkeypatch):
    monkeypatch.setenv("STREAMALLOC_DRIVER", streamalloc_environment["STREAMALLOC_DRIVER"])
    device = sa.Device(0)
    stream = device.create_stream()
    with sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR) as pool:
        with pool.allocate(4096, stream) as buffer:
            buffer.fill(1)
            stream.synchronize()
            process = multiprocessing.get_context("spawn").Process(target=right, args=(buffer,))
            process.start()
            process.join()
            assert process.exitcode == 0
            process.close()
            buffer.free(still_imported="wait", timeout=10)
    stream.close()
""",
        "--streamalloc-leaks",
    ).assert_outcomes(passed=1)
