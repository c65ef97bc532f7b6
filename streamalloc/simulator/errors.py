"""Exceptions of simulated calls. A :class:`Fault` holds the result code that the call returns."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from streamalloc.driver.bindings import cuda

Result: Any = cuda.CUresult
T = TypeVar("T")


class Fault(Exception):
    """Makes the driver call in which it is raised return this result code."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


class NotModelled(NotImplementedError):
    """The behaviour of the real driver is unknown, or is a crash ("the real driver crashes")."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not modelled: {what}")


class BrokenMachineError(RuntimeError):
    """A call of this machine was interrupted midway, so its state may be inconsistent."""


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
    """The result code of a call that failed or got ``error`` from the operating system. An error without a number came
    from a signal handler and is raised again.
    """
    if isinstance(error, Fault):
        return error.code
    if error.errno is None:
        raise error
    return Result.CUDA_ERROR_OUT_OF_MEMORY if error.errno in _NO_MEMORY else Result.CUDA_ERROR_OPERATING_SYSTEM


_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


@contextlib.contextmanager
def undo_by(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """A ``with`` block that calls ``undo`` if the operating system refuses something in it."""
    try:
        yield
    except OSError:
        undo(*arguments)
        raise
