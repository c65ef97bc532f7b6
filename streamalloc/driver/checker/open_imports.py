"""Which processes have memory of others open: a folder that all checkers of a user share.

Each import of an allocation is a file there, named by what was exported and by the process, until it is freed. Files of
processes that have ended are removed by whoever comes across them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
from pathlib import Path

__all__ = ["close_import", "folder", "holders", "open_import"]

_numbers = itertools.count()


def folder() -> Path:
    """The folder, which is this user's alone."""
    found = Path(tempfile.gettempdir()) / f"streamalloc-checker-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        found.mkdir(mode=0o700)
    return found


def _digest(exported: bytes) -> str:
    return hashlib.sha256(exported).hexdigest()[:32]


def open_import(exported: bytes) -> Path | None:
    """Say that this process has what was exported; the entry. None where there is no place for it."""
    path = folder() / f"{_digest(exported)}-{os.getpid()}-{next(_numbers)}"
    try:
        path.touch()
    except OSError:
        return None
    return path


def close_import(entry: Path) -> None:
    """Take an entry back."""
    with contextlib.suppress(OSError):
        entry.unlink()


def holders(exported: bytes) -> list[int]:
    """The other processes that have what was exported."""
    found = []
    for entry in folder().glob(f"{_digest(exported)}-*"):
        process = int(entry.name.split("-")[1])
        if process == os.getpid():
            continue
        if Path(f"/proc/{process}").exists():
            found.append(process)
        else:
            close_import(entry)
    return sorted(set(found))
