"""Descriptors taken from other processes by number, for peers that cannot send them."""

from __future__ import annotations

import ctypes
import errno
import os

from streamalloc.core.internal import Fd

__all__ = ["fetch_descriptor"]

# The same number on every architecture that CUDA runs on.
_PIDFD_OPEN = 434
_PIDFD_GETFD = 438
_syscall = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long, use_errno=True)(
    ("syscall", ctypes.pythonapi)
)


def fetch_descriptor(pid: int, number: int) -> Fd:
    """Take a duplicate of another process's descriptor, without its help (``pidfd_open``, ``pidfd_getfd``).

    For peers that send only numbers; a :class:`Channel` needs no permission. Nothing else here uses this.

    Raises
    ------
    PermissionError
        The kernel does not let this process trace that one.
    ProcessLookupError
        There is no such process.
    OSError
        It has no such descriptor (``EBADF``), or the kernel is older than Linux 5.6 (``ENOSYS``).
    """
    for name, value in (("pid", pid), ("number", number)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {type(value).__name__} ({value!r})")
        if not 0 <= value < 1 << 31 or (name == "pid" and not value):
            raise ValueError(f"{name}={value} is out of range")
    with _called("pidfd_open", pid, number, _PIDFD_OPEN, pid, 0) as process:
        return _called("pidfd_getfd", pid, number, _PIDFD_GETFD, process.fileno(), number)


def _called(function: str, pid: int, number: int, call: int, *arguments: int) -> Fd:
    answer = _syscall(call, *arguments, *[0] * (3 - len(arguments)))
    if answer >= 0:
        return Fd(answer)
    code = ctypes.get_errno()
    causes = {
        errno.EPERM: (
            "only of processes that this one may trace; see /proc/sys/kernel/yama/ptrace_scope (1 allows children, and "
            "those that called prctl(PR_SET_PTRACER)), CAP_SYS_PTRACE and the container's seccomp profile. A Channel "
            "needs none of that"
        ),
        errno.EBADF: "that process has no such descriptor",
        errno.ENOSYS: "this needs Linux 5.6",
    }
    raise OSError(code, f"descriptor {number} of process {pid} ({function}): {causes.get(code, os.strerror(code))}")
