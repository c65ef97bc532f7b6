"""The interface of a tier: it stores bytes of device memory, and copies them back to device memory.

A tier returns one :class:`SavedBytes` for each buffer. Copies from and to it are queued on one stream
(:class:`~streamalloc.vmm.backup.Copies`). ``copies.finish_transfers()`` ends the host's reads and writes of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from streamalloc.core.internal import CopySide, Memory, Stream
from streamalloc.vmm.backup import Copies

T = TypeVar("T")

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A writable, contiguous array of bytes."""


class SavedBytes(Protocol):
    """The bytes of one buffer in a tier."""

    nbytes: int
    """Size in bytes."""

    @property
    def memory(self) -> Memory | None:
        """The bytes as memory; None if they are not in memory, or in several pieces."""

    @property
    def own(self) -> bool:
        """Whether the tier has allocated the memory or file; :meth:`leave` then releases it."""

    def save(self, source: CopySide, copies: Copies, /) -> None:
        """Queue the copy of device memory to the tier. The copy is complete after ``copies.finish_transfers()`` and all
        queued work of the stream.
        """

    def load(self, target: CopySide, copies: Copies, /) -> None:
        """Queue the copy of the bytes to device memory. After ``copies.finish_transfers()`` it is complete for later
        work of the stream.
        """

    def read(self, offset: int, target: Bytes, /) -> None:
        """Copy bytes from ``offset`` on to a host array. Blocks the host."""

    def write(self, offset: int, source: Bytes, /) -> None:
        """Replace bytes from ``offset`` on by those of a host array. Blocks the host."""

    def leave(self) -> None:
        """Drop the bytes after the copies that use them. Idempotent.

        Raises
        ------
        CudaError
            The driver refused the release, which is attempted again later.
        """


class Tier(Protocol):
    """A store for the bytes of device memory."""

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None, /) -> Sequence[SavedBytes]:
        """Reserve room for buffers of these sizes in bytes, each at least 1: for all, or for none after an error.

        Parameters
        ----------
        sizes
            Sizes in bytes.
        stream
            Stream of the copies.
        name
            Name under which a persistent tier stores the bytes; None if they end with the buffers.
        """


def overlapping(pieces: Iterable[tuple[T, int, int]], offset: int, array: Bytes) -> Iterator[tuple[T, int, Bytes]]:
    """Split an array that begins at ``offset`` of a buffer at the ends of the buffer's pieces.

    ``pieces``: the pieces, each with its offset in the buffer and its size in bytes. Yields each piece that the array
    overlaps, the offset in the piece, and the part of the array.
    """
    stop = offset + array.nbytes
    for piece, start, nbytes in pieces:
        begin, end = max(offset, start), min(stop, start + nbytes)
        if begin < end:
            yield piece, begin - start, array[begin - offset : end - offset]


def part_of(side: CopySide, offset: int, nbytes: int) -> Any:
    """Return a part of one side of a copy, from ``offset`` on."""
    return CopySide(side.address + offset, nbytes, side.ordinal, side.keep, side.after)
