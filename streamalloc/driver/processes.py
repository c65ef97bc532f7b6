"""Processes: whether others run, and the memory that is mapped in this one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_EXITING = 4
"""``PF_EXITING`` of the kernel."""


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


def mapped_ranges() -> Iterator[tuple[int, int, str]]:
    """Start, end and rights, such as ``"rw-p"``, of each range of addresses that is mapped in this process."""
    # The names of mapped files may be no text.
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            bounds, rights, _ = line.split(" ", 2)
            start, _, end = bounds.partition("-")
            yield int(start, 16), int(end, 16), rights
