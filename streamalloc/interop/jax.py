"""Arrays of JAX over memory of streamalloc, and memory over arrays of JAX. JAX has no interface for other
allocators.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from streamalloc.core.internal import Memory, StreamLike
from streamalloc.interop.bridge import library_for
from streamalloc.interop.loans import Borrowed, Lent, borrow, form

__all__ = ["array", "memory"]


def array(memory: Memory, dtype: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None) -> Any:
    """Return an array of JAX over ``memory``. The array keeps the memory alive.

    JAX's stream waits for the work queued on the memory's stream. When the array is dropped, the memory's stream waits
    for JAX's stream. JAX's arrays are immutable, so do not write to the memory after this call.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of ``memory`` if it is a typed view, otherwise bytes in one
        dimension. With ``dtype`` alone the result has one dimension. With ``shape`` alone a typed view keeps its type,
        and other memory is bytes.

    Raises
    ------
    TypeError, ValueError
        The memory cannot be viewed with this type and shape, or is of a simulated driver.
    ModuleNotFoundError
        JAX is not installed.
    ClosedError
        The memory was freed.
    EvictedError
        The memory is evicted.
    """
    return library_for("jax.dlpack", memory).from_dlpack(Lent(form(memory, dtype, shape), None))


def memory(array: Any, stream: StreamLike) -> Borrowed:
    """Return an array of JAX as memory that ``stream`` uses. Do not write to this memory. Raises the errors of
    :func:`borrow`.
    """
    return borrow(array, stream)
