"""JAX arrays over our memory, and JAX arrays as ours. JAX takes no allocator of others."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from streamalloc.core.internal import Memory, StreamLike
from streamalloc.interop.bridge import library
from streamalloc.interop.loans import Borrowed, Lent, borrow, form

__all__ = ["array", "memory"]


def array(memory: Memory, dtype: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None) -> Any:
    """A JAX array over memory of ours, which it keeps alive.

    JAX's stream waits for what the memory's stream has queued. JAX takes its arrays for immutable: write the memory no
    more.

    Parameters
    ----------
    memory
        Device memory.
    dtype, shape
        As for :meth:`Memory.view_as`. Default: those of a typed view, else bytes.

    Raises
    ------
    TypeError, ValueError
        The memory has no such form.
    """
    return library("jax.dlpack").from_dlpack(Lent(form(memory, dtype, shape), None))


def memory(array: Any, stream: StreamLike) -> Borrowed:
    """A JAX array as memory of ours, to be read only, for ``stream``; see :func:`borrow`."""
    return borrow(array, stream)
