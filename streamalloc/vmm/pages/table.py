"""Tables of the pages of a space in device memory, for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Stream, StreamLike, TypedView, as_stream
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver.internal import RLock
from streamalloc.pool import MemoryPool
from streamalloc.vmm.pages.space import PageSpace


class PageTable(Closes):
    """A page table in device memory: for each page the number of its physical page, or -1 if it is not committed.

    :meth:`update` changes the table in stream order: earlier kernels read the old entries, later kernels the new. ::

        table = vmm.PageTable(cache, np.int32, stream=stream)
        cache.release(pages, after=stream)   # kernels that are queued may use the pages
        table.update()                       # kernels that are queued from now on see -1

    Thread-safe.

    Parameters
    ----------
    space
        The space.
    dtype
        ``int32`` or ``int64``.
    stream
        Stream of the table; default: the space's. Work on other streams must be ordered after it.

    Raises
    ------
    TypeError
        ``space`` is no space, or ``dtype`` is another type.
    OutOfMemoryError
        There is not enough memory.
    """

    def __init__(self, space: PageSpace, dtype: npt.DTypeLike = np.int64, *, stream: StreamLike | None = None) -> None:
        if not isinstance(space, PageSpace):
            raise TypeError(f"space must be a PageSpace, not {type(space).__name__} ({space!r})")
        kind = np.dtype(dtype)
        if kind not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(f"dtype={kind}: allowed are int32 and int64")
        self.space: PageSpace = space
        """The space."""
        self.stream: Stream = space.stream if stream is None else as_stream(stream, session_of(space))
        """Stream of the table."""
        self._lock = RLock()
        self._sent: npt.NDArray[Any] = np.full(space.page_count, -2, kind)
        self._buffer = MemoryPool.current(space.device).allocate(self._sent.nbytes, self.stream)
        with undoing(self._buffer.close):
            self.update()

    @property
    def entries(self) -> TypedView[Any]:
        """The table: an array with an element for each page.

        Raises
        ------
        ClosedError
            The table was closed.
        """
        return self._buffer.view_as(self._sent.dtype)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._buffer.freed

    def update(self) -> int:
        """Queue a copy of the changed entries (``cuMemcpyHtoDAsync``). Returns their number.

        Raises
        ------
        ClosedError
            Table or space was closed.
        """
        with self._lock:
            entries = self.entries
            now = self.space.numbers.astype(self._sent.dtype)
            changed = np.flatnonzero(now != self._sent)
            if changed.size:
                span = slice(int(changed[0]), int(changed[-1]) + 1)
                entries[span].copy_from(now[span], self.stream)
                self._sent = now
            return int(changed.size)

    def close(self) -> None:
        """Free the table in stream order (``cuMemFreeAsync``). Idempotent."""
        self._buffer.close()

    def _text(self) -> str:
        return f" of {self._sent.size} pages{', closed' if self.closed else ''}"
