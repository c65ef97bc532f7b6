"""Answers of the operating system: which processes run, the memory and addresses of this one, and IMEX channels."""

from __future__ import annotations

import errno
import glob
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_STARTUP = str(Path(__file__).with_name("startup"))
"""Folder whose ``sitecustomize`` prepares child processes."""
_EXITING = 4
"""The kernel's flag ``PF_EXITING``, in the flags of ``/proc/PID/stat``."""


def search_path() -> str:
    """Return the value of PYTHONPATH that makes Python find this package's ``sitecustomize`` first."""
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != _STARTUP]
    return os.pathsep.join([_STARTUP, *others])


def alive(process: int) -> bool:
    """Whether the process with this id runs. Exiting processes and zombies do not count."""
    try:
        return runs(Path(f"/proc/{process}/stat").read_bytes())
    except OSError as error:
        # Without a free descriptor the file cannot be opened. The process then counts as running, because nothing shows
        # that it has ended.
        return error.errno in (errno.EMFILE, errno.ENFILE)


def runs(stat: bytes) -> bool:
    """Whether a process runs that has this line in ``/proc/PID/stat``."""
    # The name before the state may contain any characters.
    state, *_, flags = stat.rpartition(b")")[2].split()[:7]
    # An exiting process's files are closed, and so its locks released, before its state changes.
    return state not in (b"Z", b"X") and not int(flags) & _EXITING


def mapped_ranges() -> Iterator[tuple[int, int, str]]:
    """Yield start, end and rights, such as ``"rw-p"``, of each range of addresses that is mapped in this process."""
    # The names of mapped files may be no text.
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            bounds, rights, _ = line.split(" ", 2)
            start, _, end = bounds.partition("-")
            yield int(start, 16), int(end, 16), rights


def address_space_limit() -> int | None:
    """Return the limit of ``ulimit -v`` on this process's address space, in bytes; None for no limit.

    The stream-ordered allocator reserves much more address space than it uses, so NVIDIA does not support such a limit
    (programming guide, "CPU Virtual Memory").
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def imex_channels() -> list[str]:
    """Return the paths of the IMEX channel files of this machine, whether this user may open them or not."""
    return sorted(glob.glob("/dev/nvidia-caps-imex-channels/channel*"))
