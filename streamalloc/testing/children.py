"""Reports of the processes that a test starts."""

from __future__ import annotations

import contextlib
import multiprocessing  # creates its configuration
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


@contextlib.contextmanager
def reports(*checks: str) -> Iterator[Callable[..., Iterator[str]]]:
    """Collect the reports of the processes that are started in a ``with`` block.

    ``checks`` are the wanted kinds of reports: ``"check"``, ``"leaks"``. Yields a function that takes kinds, and yields
    their reports so far; each begins with its process.
    """

    def found(*kinds: str) -> Iterator[str]:
        for path in sorted(Path(folder).iterdir()):
            process, _, kind = path.name.partition(".")
            if kind in kinds:
                yield f"in process {process}, which the test has started:\n{path.read_text('utf-8').rstrip()}"

    with (
        tempfile.TemporaryDirectory(prefix="streamalloc-", ignore_cleanup_errors=True) as folder,
        inherited(**{VARIABLE: ParentTest(os.getpid(), checks, folder).to_text()}),
    ):
        yield found
