"""What the tests of the commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamalloc.cli import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; its exit code and what it printed. Nothing may go to the error output."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        printed = capsys.readouterr()
        assert printed.err == ""
        return code, printed.out

    return run


class Altered:
    """A driver in which some functions, or other attributes, are others."""

    def __init__(self, driver: Any, **others: Any) -> None:
        self._driver = driver
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def without(machine: Any, *attributes: str) -> Altered:
    """The driver, with devices that answer 0 for some device attributes."""
    known = machine.CUdevice_attribute
    wanted = {getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}", None) for name in attributes}

    def answer(asked: Any, device: Any) -> Any:
        result, value = machine.cuDeviceGetAttribute(asked, device)
        return result, 0 if asked in wanted else value

    return Altered(machine, cuDeviceGetAttribute=answer)
