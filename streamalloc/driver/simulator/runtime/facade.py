"""The runtime as an object with the functions of ``cuda.bindings.runtime``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import runtime

from .functions import ArrayFunctions, Failed, Forgotten, Functions
from .tables import PURE, WITHOUT_CONTEXT
from .translation import signature

_UNKNOWN_ERROR = 999

OWN: dict[str, Callable[..., Any]] = {
    name: body for one in (Functions, ArrayFunctions) for name, body in vars(one).items() if name.startswith("cuda")
}
"""Functions that are more than one driver call. Copies and fills are also called ...Async, with a stream at the end."""


class Runtime:
    """The functions of ``cuda.bindings.runtime`` over a driver, with the bindings' own classes.

    As the runtime does, it uses the thread's current context, and where there is none makes the primary context of the
    thread's device current.
    """

    def __init__(self, driver: Any) -> None:
        self._functions = ArrayFunctions(driver)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(runtime(), name)
        if name in PURE or not name.startswith("cuda") or isinstance(found, type) or not callable(found):
            return found
        own = OWN.get(name.removesuffix("Async") if name.startswith(("cudaMemcpy", "cudaMemset")) else name)
        body = self._functions.translated(name) if own is None else functools.partial(own, self._functions)
        function = _function(self._functions, name, body)
        setattr(self, name, function)
        return function


def _function(functions: Functions, name: str, body: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The function of the runtime with a body that raises :class:`Failed`."""
    taken = signature(runtime(), name)
    count, success = len(taken.results), runtime().cudaError_t.cudaSuccess
    prepare = functions.initialise if name in WITHOUT_CONTEXT else functions.make_current

    def function(*args: Any, **named: Any) -> tuple[Any, ...]:
        if named or len(args) != len(taken.parameters):
            args = tuple(taken.bind(args, named))
        try:
            prepare()
            values = body(*args)
        except Failed as failed:
            functions.thread.last = 0 if isinstance(failed, Forgotten) else failed.code
            return (_error(failed.code), *[None] * count)
        return (success, *(values if isinstance(values, tuple) else (values,))[:count])

    function.__name__ = name
    return function


def _error(code: int) -> Any:
    try:
        return runtime().cudaError_t(code)
    except ValueError:
        return runtime().cudaError_t(_UNKNOWN_ERROR)
