"""Base class of all memory: address, size, location, stream and access.

The operations use only these attributes. :mod:`~streamalloc.core.copies` and :mod:`~streamalloc.core.array_interfaces`
define them, and :class:`~streamalloc.core.memory.Memory` combines both.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from streamalloc.core.html import Row, Shown, mib, place
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.resource import Unique
from streamalloc.core.session import Session
from streamalloc.core.stream import Stream, StreamLike, as_stream

kinds: set[type] = set()
"""All memory classes: a look-up is five times faster than ``isinstance``."""


class MemoryBase(Unique, Shown, abc.ABC):
    """A range of bytes, without operations on them."""

    __slots__ = ()

    # For fast paths. They read `_ptr` first: if it is None, the other attributes may be missing.
    _ptr: Any = None
    """Pointer for the driver, ``CUdeviceptr`` or int; None for the slow path."""
    _nbytes: int
    _stream: Stream
    _ordinal: int | None = None
    """Ordinal of the owning device; None for host, managed or unknown memory."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kinds.add(cls)

    @property
    @abc.abstractmethod
    def address(self) -> int:
        """Address of the first byte; 0 for empty memory. Raises :class:`ClosedError` after it was freed."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Size in bytes, as it was asked for."""

    @property
    @abc.abstractmethod
    def stream(self) -> Stream:
        """The stream of operations that name no other stream."""

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Location of the memory."""

    @property
    @abc.abstractmethod
    def owner(self) -> object:
        """Owner of the memory: a pool, a graph, or the memory under a view."""

    @property
    @abc.abstractmethod
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory at the same address."""
        return self.location.on_host

    def used(
        self, stream: StreamLike | None = None, *, write: bool = True, on_host: bool = False, atomic: bool = False
    ) -> None:
        """Report a use that the package cannot see, such as another library's kernel, to a checked driver.

        No effect with other drivers; see :func:`streamalloc.driver.checked`.

        Parameters
        ----------
        stream
            The stream that the kernel was queued on (default: the memory's own).
        write
            True for a write, False for a read.
        on_host
            True if the CPU uses the memory now, outside of any stream.
        atomic
            True if the kernel uses the memory only by atomic operations, which do not race with those of other kernels.

        Raises
        ------
        ClosedError
            The memory was freed.
        ValueError
            Both ``atomic`` and ``on_host`` were given.
        """
        if atomic and on_host:
            raise ValueError("atomic=True, on_host=True: atomic uses are those of kernels")
        address = self._at
        listener = self._session.listener
        if listener is None or not self.nbytes:
            return
        if on_host:
            listener.used(address, self.nbytes, None, write)
            return
        ordered = self.stream if stream is None else as_stream(stream, self._session)
        with ordered._context():
            listener.used(address, self.nbytes, ordered._checked_raw(), write, atomic)

    @property
    def _session(self) -> Session:
        return self.stream._session

    @property
    def _at(self) -> int:
        """:attr:`address`, for work that is ordered by a stream after :meth:`_await_on`."""
        return self.address

    def _await_on(self, stream: Stream) -> None:
        """Let ``stream`` wait for contents that so far only :attr:`stream` waits for."""

    def _check_usable(self) -> None:
        """Raise if the memory exists but cannot be used now. Memory that is gone raises in :attr:`address`."""

    def _unreadable(self) -> str:
        """The reason why ordinary reads are not valid, such as those of a multicast mapping; empty if they are
        valid.
        """
        return ""

    def _resident_on(self) -> int | None:
        """Ordinal that peer copies name as the owning device; None if the address is enough."""
        location = self.location
        named = location.type is MemLocationType.DEVICE and location.seen
        return location.id if named and not self.host_accessible else None

    def _read_only(self, on_host: bool) -> bool:
        """Whether the CPU (``on_host``) or the stream's device may only read the memory."""
        return False

    def _ordered_on(self, stream: StreamLike | None) -> Stream:
        self._check_usable()
        ordered = self.stream if stream is None else as_stream(stream, self._session)
        ordered._checked_raw()
        return ordered

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "address", f"{self._at:#x}"
        yield "memory of", place(self.location)
        yield "stream", self.stream

    def _access_hint(self, stream: Stream) -> str:
        """The likely reason why the driver refuses a stream's device the use of the memory."""
        if self.location == stream.device.location:
            return ""
        return (
            f"the memory is at {self.location} and the stream runs on device {stream.device.ordinal}; "
            f"grant it access: pool.set_access(device, MemAccess.READWRITE)"
        )
