"""Other processes: whether they run."""

from __future__ import annotations

from pathlib import Path

_EXITING = 4
"""``PF_EXITING`` of the kernel."""


def alive(process: int) -> bool:
    """Whether a process runs. Exiting processes and zombies do not count."""
    try:
        return runs(Path(f"/proc/{process}/stat").read_bytes())
    except OSError:
        return False


def runs(stat: bytes) -> bool:
    """Whether a process with this line in ``/proc/PID/stat`` runs."""
    # The name before the state may contain any characters.
    state, *_, flags = stat.rpartition(b")")[2].split()[:7]
    # An exiting process's files are closed, and so its locks released, before its state changes.
    return state not in (b"Z", b"X") and not int(flags) & _EXITING
