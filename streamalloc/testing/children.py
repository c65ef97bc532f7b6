"""Reports of the processes that a test starts."""

from __future__ import annotations

import contextlib
import multiprocessing  # creates its configuration
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from streamalloc.core.resource import Leaves
from streamalloc.driver.internal import VARIABLE, ParentTest, configuration

assert multiprocessing.process


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
        self._directory = self._ends.enter_context(
            tempfile.TemporaryDirectory(prefix="streamalloc-", ignore_cleanup_errors=True)
        )
        text = ParentTest(os.getpid(), self._checks, self._directory).to_text()
        settings: tuple[MutableMapping[str, Any], ...] = os.environ, configuration()
        for variables in settings:
            before = variables.get(VARIABLE)
            variables[VARIABLE] = text
            self._ends.callback(_restore, variables, before)
        return self

    def _leave(self, *, failed: bool) -> None:
        self._ends.close()

    def found(self, *checks: str) -> Iterator[str]:
        """The reports of these kinds; each begins with its process."""
        for path in sorted(Path(self._directory).iterdir()):
            process, _, kind = path.name.partition(".")
            if kind in checks:
                yield f"in process {process}, which the test has started:\n{path.read_text().rstrip()}"


def _restore(variables: MutableMapping[str, Any], before: str | None) -> None:
    if before is None:
        variables.pop(VARIABLE, None)
    else:
        variables[VARIABLE] = before
