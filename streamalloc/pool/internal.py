"""Names of ``pool``, beside the public ones, that the areas above use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

from streamalloc.core.errors import ClosedError, undo_all
from streamalloc.core.internal import Buffer, Device, Event, Stream
from streamalloc.pool.attributes import ATTRIBUTES
from streamalloc.pool.cache.allocator import CachingAllocator
from streamalloc.pool.cache.blocks import CachedBuffer
from streamalloc.pool.pointers import MemoryKind, PointerAttributes, pointer_attributes
from streamalloc.pool.pool import MemoryPool, known_pools, pool_holders, reading


def raw_pool(pool: MemoryPool) -> Any:
    """Return the driver's ``CUmemoryPool``, for calls that do not allocate.

    Raises
    ------
    ClosedError
        The pool was closed.
    """
    return pool._checked_raw()


def reachable_from(pool: MemoryPool, device: Device) -> bool:
    """Whether a device may use a pool's memory (``cuMemPoolGetAccess``)."""
    return pool._reachable_from(device)


def collect_dropped(cache: CachingAllocator) -> None:
    """Put blocks of dropped buffers into the free lists of a cache."""
    cache._state.collect_dropped()


def free_together(buffers: Iterable[Buffer], stream: Stream) -> None:
    """Free buffers on one of our streams; cached blocks return behind one event. Buffers that are already freed are
    skipped.

    Raises
    ------
    CudaError
        The driver refused some of them; the others are freed.
    """
    event: Event | None = None

    def free(buffer: Buffer) -> None:
        nonlocal event
        block = buffer._ptr
        if isinstance(buffer, CachedBuffer) and block is not None and block.home is not None:
            behind = buffer._allocator._return_home(buffer, block, stream, event)
            if behind is not None:
                event = behind
                return
        with contextlib.suppress(ClosedError):  # another thread was faster
            buffer.free(stream)

    undo_all(functools.partial(free, buffer) for buffer in buffers)
