"""Checks that a test requests from its child processes, and the directory for the children's reports.

The test stores both in an environment variable and in the configuration of :mod:`multiprocessing`. This configuration
is pickled for each child, so it reaches even children of a fork server that was started earlier.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from typing import Any, NamedTuple

VARIABLE = "STREAMALLOC_TEST"
"""Name of the environment variable, and key of the multiprocessing configuration, whose value is the text of a
:class:`ParentTest`.
"""

_AT_START = os.environ.get(VARIABLE, "")


class ParentTest(NamedTuple):
    """Test that started this process, directly or through another process."""

    process: int
    """Process ID of the test."""
    checks: tuple[str, ...]
    """Requested reports: ``"check"`` on stream order, ``"leaks"`` on leaks, ``"notes"`` on what was not checked."""
    directory: str
    """Directory of the reports, private to this user."""

    def to_text(self) -> str:
        """Return the test as text for the environment variable :data:`VARIABLE`."""
        return f"{self.process}:{'+'.join(self.checks)}:{self.directory}"

    @classmethod
    def from_text(cls, text: str) -> ParentTest:
        """Return the test that ``text`` of :meth:`to_text` describes. Raises ``ValueError`` for any other text."""
        process, checks, directory = text.split(":", 2)
        return cls(int(process), tuple(checks.split("+")), directory)

    def report(self, kind: str, text: str) -> None:
        """Add ``text`` to this process's report of the check ``kind``, if the test requested this check.

        Nothing is written if the test has ended and its directory no longer exists.
        """
        if kind in self.checks:
            path = os.path.join(self.directory, f"{os.getpid()}.{kind}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "ab") as file:
                file.write(f"{text}\n".encode(errors="backslashreplace"))


def configuration() -> dict[str, Any]:
    """Return the dict that :mod:`multiprocessing` pickles for its child processes. A change of the dict reaches later
    children.

    If multiprocessing is not imported, the dict is empty, and a change is lost.
    """
    module = sys.modules.get("multiprocessing.process")
    found: dict[str, Any] = {} if module is None else getattr(module.current_process(), "_config", {})
    return found


def from_server() -> bool:
    """Return whether multiprocessing has started this process."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def parent_test() -> ParentTest | None:
    """Return the test that started this process; None in the test's own process and if no test started it.

    The result stays the same until the process ends, even if the test ends before.
    """
    # The result is cached by process id, because a forked child inherits the cache of its parent.
    return _find(os.getpid())


@functools.cache
def _find(process: int) -> ParentTest | None:
    # The environment may be that of an earlier test, during which a multiprocessing server was started.
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
