"""Exceptions that end a simulated call, and functions that raise them. A :class:`Fault` becomes the call's result
code.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from streamalloc.driver.bindings import cuda

Result: Any = cuda.CUresult
T = TypeVar("T")


class Fault(Exception):
    """Exception that makes the driver call in which it is raised return the result code ``code``."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


class NotModelled(NotImplementedError):
    """Behaviour that is not simulated, because the behaviour of the real driver is unknown or is a crash."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not modelled: {what}")


def wrong_type(name: str, expected: str, given: object) -> TypeError:
    """Return the bindings' error for an argument of another class."""
    return TypeError(f"Argument '{name}' has incorrect type (expected {expected}, got {type(given).__name__})")


class BrokenMachineError(RuntimeError):
    """An earlier call of this machine was interrupted midway, so the state of the machine may be inconsistent. Make
    another machine.
    """


class DeadlockError(RuntimeError):
    """The real driver may block for ever in this call."""


def check(condition: object, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> None:
    """Raise :class:`Fault` with ``code`` unless ``condition`` is true."""
    if not condition:
        raise Fault(code)


def not_modelled(condition: object, what: str) -> None:
    """Raise :class:`NotModelled` if ``condition`` is true. ``what``: the text after "not modelled"."""
    if condition:
        raise NotModelled(what)


def need(value: T | None, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> T:
    """Return ``value`` unless it is None. For None, raise :class:`Fault` with ``code``, or :class:`NotModelled` if
    ``code`` is text.
    """
    if value is None:
        raise NotModelled(code) if isinstance(code, str) else Fault(code)
    return value


def need_a(cls: type[T], value: object, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> T:
    """Return ``value`` if it is an instance of ``cls``. Otherwise raise the error that :func:`need` raises for None."""
    return need(value if isinstance(value, cls) else None, code)


def code_of(error: Fault | OSError) -> Any:
    """Return the result code for a call that raised ``error``: the code of a fault; for an error of the operating
    system CUDA_ERROR_OUT_OF_MEMORY if memory or file space was missing, else CUDA_ERROR_OPERATING_SYSTEM.

    An OSError without an error number came from a signal handler, and is raised again.
    """
    if isinstance(error, Fault):
        return error.code
    if error.errno is None:
        raise error
    return Result.CUDA_ERROR_OUT_OF_MEMORY if error.errno in _NO_MEMORY else Result.CUDA_ERROR_OPERATING_SYSTEM


_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


@contextlib.contextmanager
def undo_by(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call ``undo(*arguments)`` if the ``with`` block raises ``OSError``. The error is raised again."""
    try:
        yield
    except OSError:
        undo(*arguments)
        raise
