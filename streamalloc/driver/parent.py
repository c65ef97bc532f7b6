"""Checks that a test requests of its child processes, and the directory of their reports.

The test stores both in an environment variable and in the configuration of :mod:`multiprocessing`. A process gets that
configuration by pickle, also if its fork server was started before the test.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Any, NamedTuple

__all__ = ["VARIABLE", "ParentTest", "configuration", "parent_test"]

VARIABLE = "STREAMALLOC_TEST"
"""The environment variable, and the key in the configuration of multiprocessing."""

_AT_START = os.environ.get(VARIABLE, "")


class ParentTest(NamedTuple):
    """The test that has started this process, directly or through another process."""

    process: int
    """Process number of the test."""
    checks: tuple[str, ...]
    """Kinds of reports: ``"check"`` (stream order), ``"leaks"``."""
    directory: str
    """Path of the reports' directory, of mode 700."""

    def to_text(self) -> str:
        """The value of the variable."""
        return f"{self.process}:{'+'.join(self.checks)}:{self.directory}"

    @classmethod
    def from_text(cls, text: str) -> ParentTest:
        """The reverse of :meth:`to_text`. Raises ``ValueError`` for any other text."""
        process, checks, directory = text.split(":", 2)
        return cls(int(process), tuple(checks.split("+")), directory)

    def report(self, kind: str, text: str) -> None:
        """Add a report of this process if the test requests its kind; no error if the test has ended."""
        if kind in self.checks:
            path = os.path.join(self.directory, f"{os.getpid()}.{kind}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "a") as file:
                file.write(f"{text}\n")


def configuration() -> dict[str, Any]:
    """multiprocessing's configuration, which child processes inherit; empty until it is imported."""
    module = sys.modules.get("multiprocessing.process")
    found: dict[str, Any] = {} if module is None else getattr(module.current_process(), "_config", {})
    return found


def _from_server() -> bool:
    """Whether multiprocessing has started this process."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def parent_test() -> ParentTest | None:
    """The test that has started this process; None in the test's own process, and without a test.

    The answer stays the same for the life of a process, which may be longer than the test's.
    """
    process = os.getpid()
    if process not in _found:
        _found[process] = _find(process)
    return _found[process]


_found: dict[int, ParentTest | None] = {}
"""Results by process number, as a fork copies the dictionary."""


def _find(process: int) -> ParentTest | None:
    # A fork server may have the environment of an earlier test.
    text = configuration().get(VARIABLE) or ("" if _from_server() else _AT_START)
    if not text:
        return None
    try:
        found = ParentTest.from_text(text)
        status = os.stat(found.directory)
    except (ValueError, OSError):
        return None
    private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return found if private and found.process != process else None
