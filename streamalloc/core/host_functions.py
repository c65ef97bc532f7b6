"""Host functions in Python, which the driver calls on its own thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from streamalloc.core.errors import undoing
from streamalloc.driver.internal import cuda

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# A callback must outlive the driver's call of it.
_host_functions: dict[int, Any] = {}


def queue_host_function(function: Callable[[], object], queue: Callable[[cuda.CUhostFn, int], object]) -> None:
    """Pass a one-time host function to ``queue``, and keep its callback alive until the driver has called it."""

    def run(token: int | None) -> None:
        try:
            function()
        finally:
            _host_functions.pop(token or 0, None)

    callback = _HOST_FUNCTION(run)
    pointer = ctypes.cast(callback, ctypes.c_void_p).value or 0
    _host_functions[pointer] = callback
    with undoing(lambda: _host_functions.pop(pointer, None)):
        queue(cuda.CUhostFn(pointer), pointer)
