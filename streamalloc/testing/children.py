"""Reports of the processes that a test starts."""

from __future__ import annotations

import contextlib
import multiprocessing  # creates its configuration
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamalloc.core.resource import Leaves
from streamalloc.driver.internal import VARIABLE, ParentTest, configuration

assert multiprocessing.process


@contextlib.contextmanager
def inherited(**values: str) -> Iterator[None]:
    """Set variables for the processes started in a ``with`` block, even by a multiprocessing server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
            patch.setitem(configuration(), name, value)
        yield


class Reports(Leaves):
    """Reports of the processes that are started in a ``with`` block.

    Parameters
    ----------
    checks
        Kinds of reports: ``"check"``, ``"leaks"``.
    """

    def __init__(self, *checks: str) -> None:
        self._checks = checks
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Reports:
        folder = tempfile.TemporaryDirectory(prefix="streamalloc-", ignore_cleanup_errors=True)
        self._directory = self._ends.enter_context(folder)
        test = ParentTest(os.getpid(), self._checks, self._directory)
        self._ends.enter_context(inherited(**{VARIABLE: test.to_text()}))
        return self

    def _leave(self, *, failed: bool) -> None:
        self._ends.close()

    def found(self, *checks: str) -> Iterator[str]:
        """The reports of these kinds; each begins with its process."""
        for path in sorted(Path(self._directory).iterdir()):
            process, _, kind = path.name.partition(".")
            if kind in checks:
                yield f"in process {process}, which the test has started:\n{path.read_text('utf-8').rstrip()}"
