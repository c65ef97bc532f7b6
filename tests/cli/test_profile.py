"""``streamalloc profile``: the file it writes makes a machine like this one."""

import json
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import main
from streamalloc.cli.machine import choose
from tests.cli.conftest import Run


def test_file_makes_the_machine(machine: Any, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    code, text = run("profile", "-o", str(path))
    count = sa.Device.count()
    assert code == 0
    chosen = text.splitlines()[-1].removeprefix("STREAMALLOC_DRIVER=")
    assert chosen == f"simulated:{f'devices={count},' if count > 1 else ''}profile={path}"
    with sd.use(choose(chosen).driver):
        assert sa.Device.count() == count
        again = sa.Device(0)
    assert (again.name, again.total_memory) == (sa.Device(0).name, sa.Device(0).total_memory)
    assert again.supports == sa.Device(0).supports


def test_standard_output(machine: Any, run: Run) -> None:
    code, text = run("profile")
    assert code == 0 and json.loads(text)["name"] == sa.Device(0).name


def test_no_profile_of_a_machine_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def nothing_found() -> Any:
        raise sd.DriverNotFoundError("no CUDA driver: nothing there")

    monkeypatch.setattr("streamalloc.driver.selection.default", nothing_found)
    monkeypatch.delenv("STREAMALLOC_DRIVER", raising=False)
    assert main(["profile", "-o", str(tmp_path / "mine.json")]) == 2
    assert "no CUDA driver: nothing there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_written(machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["profile", "-o", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}" in capsys.readouterr().err
