"""How a simulated call fails: by raising the code that the caller then gets as the first value."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, TypeVar

from streamalloc.driver.bindings import cuda

Result: Any = cuda.CUresult
T = TypeVar("T")


class Fault(Exception):
    """A driver call ends with this result code."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


class NotModelled(NotImplementedError):
    """The simulated driver does not know what the real one would do; or it knows that the process would end there, and
    says "the real driver crashes".
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"not modelled: {what}")


class BrokenMachineError(RuntimeError):
    """A call of this machine was interrupted in the middle, so its state may be inconsistent."""


class DeadlockError(RuntimeError):
    """A call for which the real driver would block for ever."""


def check(condition: object, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> None:
    """Fail with ``code`` unless ``condition`` holds."""
    if not condition:
        raise Fault(code)


def not_modelled(condition: object, what: str) -> None:
    """Say that ``what`` is not modelled, where ``condition`` holds."""
    if condition:
        raise NotModelled(what)


def need(value: T | None, code: Any = Result.CUDA_ERROR_INVALID_VALUE) -> T:
    """The value; where it is None, fails with ``code``, or is not modelled where that is a text."""
    if value is None:
        raise NotModelled(code) if isinstance(code, str) else Fault(code)
    return value


@contextlib.contextmanager
def operating_system(only_memory: bool = False) -> Iterator[None]:
    """A block in which the system may run out of something: ``only_memory`` where that can only be memory."""
    try:
        yield
    except OSError as error:
        if not only_memory:
            raise Fault(Result.CUDA_ERROR_OPERATING_SYSTEM) from error
        if error.errno != errno.ENOMEM:
            raise
        raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY) from error
