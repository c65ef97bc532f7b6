"""Open imports of all processes: a directory that all checkers of a user share.

Each open import of an allocation is a file there, named by its export data and the importing process. The next reader
removes the files of processes that have ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
from pathlib import Path

_numbers = itertools.count()
_EXITING = 4
"""``PF_EXITING`` of the kernel."""


def directory() -> Path:
    """The directory, which only this user can read."""
    found = Path(tempfile.gettempdir()) / f"streamalloc-checker-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        found.mkdir(mode=0o700)
    return found


def digest(exported: bytes) -> bytes:
    """A name of 32 characters for export data."""
    return hashlib.sha256(exported).hexdigest()[:32].encode()


def open_import(exported: bytes) -> Path | None:
    """Add an entry for an import of this process; None where the directory cannot be written."""
    path = directory() / f"{digest(exported).decode()}-{os.getpid()}-{next(_numbers)}"
    try:
        path.touch()
    except OSError:
        return None
    return path


def close_import(entry: Path) -> None:
    """Remove an entry."""
    with contextlib.suppress(OSError):
        entry.unlink()


def importers(exported: bytes) -> list[int]:
    """The other processes that have an import of this export data."""
    found = []
    for entry in directory().glob(f"{digest(exported).decode()}-*"):
        process = int(entry.name.split("-")[1])
        if process == os.getpid():
            continue
        if alive(process):
            found.append(process)
        else:
            close_import(entry)
    return sorted(set(found))


def alive(process: int) -> bool:
    """Whether a process runs; one that is exiting, or that its parent has not waited for, does not."""
    try:
        return runs(Path(f"/proc/{process}/stat").read_bytes())
    except OSError:
        return False


def runs(stat: bytes) -> bool:
    """Whether a process with this line in ``/proc/PID/stat`` runs."""
    # The name before the state may contain anything.
    state, *_, flags = stat.rpartition(b")")[2].split()[:7]
    # The kernel closes the files of an exiting process, and so releases its locks, before the state changes.
    return state not in (b"Z", b"X") and not int(flags) & _EXITING
