"""``streamalloc profile``: the file it writes makes a machine like this one."""

import json
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli.machine import choose
from tests.cli.conftest import Run


def test_file_makes_the_machine(machine: Any, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    text = run("profile", "-o", str(path))
    count = sa.Device.count()
    chosen = text.splitlines()[-1].removeprefix("STREAMALLOC_DRIVER=")
    assert chosen == f"simulated:{f'devices={count},' if count > 1 else ''}profile={path}"
    with sd.use(choose(chosen).driver):
        assert sa.Device.count() == count
        again = sa.Device(0)
    assert (again.name, again.total_memory) == (sa.Device(0).name, sa.Device(0).total_memory)
    assert again.supports == sa.Device(0).supports


def test_standard_output(machine: Any, run: Run) -> None:
    assert json.loads(run("profile"))["name"] == sa.Device(0).name


@pytest.mark.usefixtures("no_driver")
def test_no_profile_of_a_machine_that_is_not_there(refused: Run, tmp_path: Path) -> None:
    assert "no CUDA driver: nothing there" in refused("profile", "-o", str(tmp_path / "mine.json"))
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_written(machine: Any, refused: Run, tmp_path: Path) -> None:
    assert f"cannot write {tmp_path}" in refused("profile", "-o", str(tmp_path))
