"""Fixtures that the tests of the commands share."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import main, worker
from tests.processes import forkserver
from tests.support import Replaced

Run = Callable[..., str]


_GUIDE = Path(__file__).parents[2] / "notebooks" / "docs" / "guides" / "any-program.md"


def keys(value: Any, before: str = "") -> set[str]:
    """The keys of all dictionaries in ``value``, each after the keys of the dictionaries around it."""
    inner = value.items() if isinstance(value, dict) else [("", one) for one in value] if type(value) is list else ()
    own = {f"{before}{key}" for key, _ in inner if key}
    return own.union(*(keys(one, f"{before}{key}." if key else before) for key, one in inner))


def documented(first: str) -> set[str]:
    """The keys of the file whose first key is ``first``, as the guide shows it."""
    shown = map(json.loads, re.findall(r"^```json\n(.*?)^```", _GUIDE.read_text(), re.MULTILINE | re.DOTALL))
    (one,) = (value for value in shown if next(iter(value)) == first)
    return keys(one)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, which ends with an exit code; what it printed. Its error output stays empty."""

    def run(*arguments: str, code: int = 0) -> str:
        ended = main(arguments)
        printed = capsys.readouterr()
        assert (ended, printed.err) == (code, "")
        return printed.out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that cannot be done; what it says on its error output. It prints nothing else."""

    def refused(*arguments: str) -> str:
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return refused


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of the commands start with everything imported. Those of :func:`complete` start as for users."""
    monkeypatch.setattr(worker, "context", forkserver)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver of CUDA is found, nor is another one chosen."""

    def nothing_found() -> Any:
        raise sd.DriverNotFoundError("no CUDA driver: nothing there")

    monkeypatch.setattr("streamalloc.driver.selection.default", nothing_found)
    monkeypatch.delenv("STREAMALLOC_DRIVER", raising=False)


class Complete(NamedTuple):
    """A whole run of a command: its exit code, what it printed, and what it did not give back."""

    code: int
    text: str
    left: dict[str, list[int]]


def complete(on_cuda: bool, *arguments: str) -> Complete:
    """Run a command on the driver under test, simulated with two devices, outside of any test's monkeypatch."""
    driver = sd.checked(sd.real() if on_cuda else sd.simulated(devices=2))
    out, err = io.StringIO(), io.StringIO()
    with sd.use(driver), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    sa.Device(0, driver=driver).synchronize()
    assert err.getvalue() == ""
    assert [str(one) for one in driver.hazards] == []
    return Complete(code, out.getvalue(), driver.outstanding())


def without(machine: Any, *attributes: str) -> Replaced:
    """The driver, with devices that answer 0 for some device attributes."""
    known = machine.CUdevice_attribute
    wanted = {getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}", None) for name in attributes}

    def answer(asked: Any, device: Any) -> Any:
        result, value = machine.cuDeviceGetAttribute(asked, device)
        return result, 0 if asked in wanted else value

    return Replaced(machine, cuDeviceGetAttribute=answer)
