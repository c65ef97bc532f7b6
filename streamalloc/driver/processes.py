"""Queries of the operating system: processes that run, mapped addresses of this process, and IMEX channels. Environment
of child processes.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_STARTUP = str(Path(__file__).with_name("startup"))
"""Folder of the module ``sitecustomize`` that prepares child processes."""
_EXITING = 4
"""The kernel's flag ``PF_EXITING`` in the field ``flags`` of ``/proc/PID/stat``."""


@contextlib.contextmanager
def for_children(variables: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables within the ``with`` block (None: remove the variable). Python processes that are
    started in the block also find this package's ``sitecustomize`` first (``PYTHONPATH``).
    """
    others = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one != _STARTUP]
    variables = {**variables, "PYTHONPATH": os.pathsep.join([_STARTUP, *others])}
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def alive(process: int) -> bool:
    """Return whether the process with this id runs. Exiting processes and zombies do not count as running."""
    try:
        return runs(Path(f"/proc/{process}/stat").read_bytes())
    except OSError as error:
        # If this process has no free file descriptor, the file cannot be opened. The other process then counts as
        # running, because nothing shows that it has ended.
        return error.errno in (errno.EMFILE, errno.ENFILE)


def runs(stat: bytes) -> bool:
    """Return whether the process whose file ``/proc/PID/stat`` has this content runs."""
    # The process name before the state may contain any characters, also parentheses and spaces.
    state, *_, flags = stat.rpartition(b")")[2].split()[:7]
    # A process with PF_EXITING counts as ended: the kernel sets the flag, closes the files and so releases the locks,
    # and only then changes the state.
    return state not in (b"Z", b"X") and not int(flags) & _EXITING


def mapped_ranges() -> Iterator[tuple[int, int, str]]:
    """Yield start address, end address and rights (such as ``"rw-p"``) of each range that is mapped in this process."""
    # The names of mapped files may contain bytes that are no ASCII text.
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
    """Return the sorted paths of the IMEX channel files of this machine, also of files that this user may not open."""
    return sorted(glob.glob("/dev/nvidia-caps-imex-channels/channel*"))
