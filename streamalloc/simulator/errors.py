"""Exceptions that end a simulated call, and checks that raise them. A :class:`Fault` becomes the call's result code."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from streamalloc.driver.bindings import cuda

Result: Any = cuda.CUresult
T = TypeVar("T")


class Fault(Exception):
    """Makes the driver call in which it is raised return the result code ``code``."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


class NotModelled(NotImplementedError):
    """Behaviour that is not simulated: that of the real driver is unknown, or is a crash."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not modelled: {what}")


class BrokenMachineError(RuntimeError):
    """An earlier call of this machine was interrupted midway, so its state may be inconsistent. Use another machine."""


class DeadlockError(RuntimeError):
    """The real driver would block forever in this call."""


def check(condition: object, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> None:
    """Raise a :class:`Fault` with ``code`` unless ``condition`` holds."""
    if not condition:
        raise Fault(code)


def not_modelled(condition: object, what: str) -> None:
    """Raise :class:`NotModelled` if ``condition`` holds."""
    if condition:
        raise NotModelled(what)


def need(value: T | None, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> T:
    """Return the value. For None, raise a :class:`Fault` with ``code``, or :class:`NotModelled` if ``code`` is text."""
    if value is None:
        raise NotModelled(code) if isinstance(code, str) else Fault(code)
    return value


def need_a(cls: type[T], value: object, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> T:
    """Return the value if it is of this class; else raise as :func:`need` does for None."""
    return need(value if isinstance(value, cls) else None, code)


def code_of(error: Fault | OSError) -> Any:
    """Return the result code of a call that raised ``error``, its own or the operating system's.

    An OSError without a number came from a signal handler and is raised again.
    """
    if isinstance(error, Fault):
        return error.code
    if error.errno is None:
        raise error
    return Result.CUDA_ERROR_OUT_OF_MEMORY if error.errno in _NO_MEMORY else Result.CUDA_ERROR_OPERATING_SYSTEM


_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


@contextlib.contextmanager
def undo_by(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call ``undo`` if the ``with`` block raises ``OSError``, which it then raises again."""
    try:
        yield
    except OSError:
        undo(*arguments)
        raise
