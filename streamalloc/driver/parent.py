"""Checks that a test requests from its child processes, and the directory for their reports.

The test sets them in an environment variable and in the configuration of :mod:`multiprocessing`. That configuration is
pickled, so it reaches even processes of a fork server that was started earlier.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from typing import Any, NamedTuple

VARIABLE = "STREAMALLOC_TEST"
"""Name of the environment variable and of the multiprocessing configuration key."""

_AT_START = os.environ.get(VARIABLE, "")


class ParentTest(NamedTuple):
    """Test that started this process, directly or through another process."""

    process: int
    """Process ID of the test."""
    checks: tuple[str, ...]
    """Requested checks: ``"check"`` for stream order, ``"leaks"``."""
    directory: str
    """Directory of the reports, private to this user."""

    def to_text(self) -> str:
        """Return the test as text, the value of :data:`VARIABLE`."""
        return f"{self.process}:{'+'.join(self.checks)}:{self.directory}"

    @classmethod
    def from_text(cls, text: str) -> ParentTest:
        """Return the test of a text from :meth:`to_text`. Raises ``ValueError`` for any other text."""
        process, checks, directory = text.split(":", 2)
        return cls(int(process), tuple(checks.split("+")), directory)

    def report(self, kind: str, text: str) -> None:
        """Add a report if the test requested its ``kind``.

        Nothing is written if the test, and its directory, are gone.
        """
        if kind in self.checks:
            path = os.path.join(self.directory, f"{os.getpid()}.{kind}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "ab") as file:
                file.write(f"{text}\n".encode(errors="backslashreplace"))


def configuration() -> dict[str, Any]:
    """Return the dict that :mod:`multiprocessing` pickles for its child processes. A change reaches later children.

    It is empty if multiprocessing is not imported; a change is then lost.
    """
    module = sys.modules.get("multiprocessing.process")
    found: dict[str, Any] = {} if module is None else getattr(module.current_process(), "_config", {})
    return found


def from_server() -> bool:
    """Whether multiprocessing has started this process."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def parent_test() -> ParentTest | None:
    """Return the test that started this process; None in the test's own process and without a test.

    The answer is constant for the life of the process, even if the test ends.
    """
    # The answer is cached by process id, because a forked child inherits the cache of its parent.
    return _find(os.getpid())


@functools.cache
def _find(process: int) -> ParentTest | None:
    # A multiprocessing server may have the environment of an earlier test.
    text = configuration().get(VARIABLE) or ("" if from_server() else _AT_START)
    if not text:
        return None
    try:
        found = ParentTest.from_text(text)
        status = os.stat(found.directory)
    except (ValueError, OSError):
        return None
    private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return found if private and found.process != process else None
