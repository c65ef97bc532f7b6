"""Fills and copies of memory, and the two sides of a copy.

Both have a fast path (:mod:`streamalloc.core.session`) for memory whose :attr:`MemoryBase._ptr` is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamalloc.core.array_interfaces import cuda_array
from streamalloc.core.device import Device
from streamalloc.core.elements import fill_pattern
from streamalloc.core.errors import error_from
from streamalloc.core.memory_base import MemoryBase, kinds
from streamalloc.core.places import place_of
from streamalloc.core.session import Session
from streamalloc.core.stream import Stream, StreamLike, library_stream, queue_handle
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from typing_extensions import Self

_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
"""Driver function for each width of a pattern, in bytes."""
_Array = np.ndarray
_WRONG_CONTEXT = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
"""Answer to a copy of pool memory under another device's context."""


class Copyable(MemoryBase):
    """Memory that is filled and copied."""

    __slots__ = ()

    def fill(
        self, value: int | bytes | np.generic, stream: StreamLike | None = None, *, width: int | None = None
    ) -> None:
        """Fill with a pattern of 1, 2 or 4 bytes (``cuMemsetD8Async``, ``cuMemsetD16Async``, ``cuMemsetD32Async``).

        Parameters
        ----------
        value
            An integer, the bytes of the pattern in memory order, or a numpy scalar of 1, 2 or 4 bytes.
        stream
            The stream to queue on (default: the memory's own).
        width
            Bytes of the pattern for an integer (default 1). A negative integer is stored in two's complement.

        Raises
        ------
        TypeError, ValueError
            The value does not fit the width, or the memory's size or address is not a multiple of the width.
        """
        ptr = self._ptr
        if ptr is not None and width is None and type(value) is int and 0 <= value < 256:
            own, nbytes = self._stream, self._nbytes
            handle = queue_handle(own if stream is None else stream, own._session)
            if handle is not None and nbytes:
                result = own._session.cuMemsetD8Async(ptr, value, nbytes, handle)[0]
                if result:
                    raise error_from(result, "cuMemsetD8Async", self._access_hint(self._ordered_on(stream)))
                return
        self._fill_slowly(value, stream, width)

    def _fill_slowly(self, value: int | bytes | np.generic, stream: StreamLike | None, width: int | None) -> None:
        number, width = fill_pattern(value, width)
        count, rest = divmod(self.nbytes, width)
        if rest or self._at % width:
            raise ValueError(f"width={width}: {self.nbytes} bytes at {self._at:#x} are no whole number of patterns")
        ordered = self._ordered_on(stream)
        if count:
            self._await_on(ordered)
            with ordered._context():
                self._session.call(
                    _FILLS[width],
                    self._at,
                    number,
                    count,
                    ordered._checked_raw(),
                    hint=lambda: self._access_hint(ordered),
                )

    def copy_to(self, target: Any, stream: StreamLike | None = None) -> None:
        """Copy all bytes to ``target``, which must have the same size (``cuMemcpyAsync``, ``cuMemcpyPeerAsync``).

        Parameters
        ----------
        target
            Memory of this package, of any device; an object with ``__cuda_array_interface__``; or a writable,
            contiguous object with the buffer protocol (a numpy array, a bytearray, a memoryview).
        stream
            The stream to queue on (default: the memory's own). The copy runs under its device's context.

        Raises
        ------
        TypeError, ValueError
            The target is none of these, is read-only or not contiguous, or has another size.
        """
        if not _copied(self, target, stream, False):
            self._copy_slowly(target, self, stream)

    def copy_from(self, source: Any, stream: StreamLike | None = None) -> None:
        """Copy all bytes from ``source``, which must have the same size. Otherwise as :meth:`copy_to`.

        A pageable host source may be changed or freed once the call returns: the driver has read it. A source in pinned
        or pool memory is read in stream order. In a capture each launch reads the source and writes the target; the
        graph keeps both alive.
        """
        if not _copied(self, source, stream, True):
            self._copy_slowly(self, source, stream)

    def _copy_slowly(self, target: Any, source: Any, stream: StreamLike | None) -> None:
        ordered = self._ordered_on(stream)
        copy_bytes(CopySide.writable(target, self._session), CopySide.readable(source, self._session), ordered)


class CopySide:
    """One side of a copy: address, size, owning device, and the object that keeps the memory alive."""

    __slots__ = ("address", "after", "keep", "nbytes", "ordinal")

    def __init__(self, address: int, nbytes: int, ordinal: int | None, keep: object, after: int | None = None) -> None:
        self.address: int = address
        self.nbytes: int = nbytes
        self.ordinal: int | None = ordinal
        """Ordinal of the owning device; None for host or unknown memory."""
        self.keep: object = keep
        self.after: int | None = after
        """Handle of the stream to wait for before use; None for none."""

    @classmethod
    def of(cls, memory: MemoryBase) -> Self:
        """Memory of ours."""
        memory._check_usable()
        return cls(memory._at, memory.nbytes, memory._resident_on(), memory)

    @classmethod
    def readable(cls, source: object, session: Session) -> Self:
        """Source of a copy: memory of ours, of another library, or an object with the buffer protocol."""
        return cls._of_argument(source, session, "source", writable=False)

    @classmethod
    def writable(cls, target: object, session: Session) -> Self:
        """Target of a copy."""
        return cls._of_argument(target, session, "target", writable=True)

    def ordered_before(self, stream: Stream) -> None:
        """Have a stream wait until the memory may be used."""
        if type(self.keep) in kinds:
            self.keep._await_on(stream)  # type: ignore[attr-defined]
        elif self.after is not None:
            device = stream.device if self.ordinal is None else Device._of(self.ordinal, stream._session)
            if self.after != stream._number or device != stream.device:
                stream.wait(Stream.of_handle(device, self.after, self.keep))

    def access_hint(self, stream: Stream) -> str:
        """The likely reason why the driver refuses a stream's device the use of the memory."""
        if isinstance(self.keep, MemoryBase):
            return self.keep._access_hint(stream)
        if self.ordinal in (None, stream.device.ordinal):
            return ""
        return (
            f"the array is on device {self.ordinal} and the stream runs on device {stream.device.ordinal}: name a "
            f"stream of device {self.ordinal}"
        )

    @classmethod
    def _of_argument(cls, other: object, session: Session, name: str, *, writable: bool) -> Self:
        if isinstance(other, MemoryBase):
            if other._session is not session:
                raise ValueError(f"{name} {other!r} belongs to another driver")
            side = cls.of(other)
            unreadable = "" if writable else other._unreadable()
            if unreadable:
                raise ValueError(unreadable)
            if writable and other.location.on_host and other._read_only(on_host=True):
                raise ValueError(f"{name} {other!r} is read-only to the host")
            return side
        interface = getattr(other, "__cuda_array_interface__", None)
        if interface is not None:
            found = cuda_array(interface, name)
            if writable and found.read_only:
                raise ValueError(f"{name} is read-only")
            # With one device the address is enough for the driver.
            several = found.nbytes and session.call("cuDeviceGetCount") > 1
            place = place_of(session, found.address) if several else None
            ordinal = None if place is None or place.managed else place.ordinal
            return cls(found.address, found.nbytes, ordinal, other, found.stream)
        try:
            array = other if isinstance(other, np.ndarray) else np.asarray(memoryview(other))  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"{name} must be a Memory, have __cuda_array_interface__ or the buffer protocol, "
                f"not {type(other).__name__}"
            ) from error
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: copy it to a contiguous array first")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        return cls(array.ctypes.data, array.nbytes, None, array)


def _copied(ours: MemoryBase, other: Any, stream: StreamLike | None, writing: bool) -> bool:
    """Copy by the fast path if it applies; returns whether it did. ``writing``: ``ours`` is the target."""
    ptr, ordinal = ours._ptr, ours._ordinal
    if ptr is None or ordinal is None:
        return False
    own, nbytes = ours._stream, ours._nbytes
    session = own._session
    ordered: Any = own if stream is None else stream
    if not isinstance(ordered, Stream):
        ordered = library_stream(ordered, session)
    handle = queue_handle(ordered, session)
    # The driver refuses the address of an empty array.
    if handle is None or not nbytes or ordered.device.ordinal != ordinal:
        return False
    if type(other) is _Array:
        flags = other.flags
        if other.nbytes != nbytes or not flags.c_contiguous:
            return False
        if writing:
            result = session.cuMemcpyHtoDAsync(ptr, other, nbytes, handle)[0]
        elif flags.writeable:
            result = session.cuMemcpyDtoHAsync(other, ptr, nbytes, handle)[0]
        else:
            return False
    elif type(other) in kinds:
        there = other._ptr
        if (
            there is None
            or other._ordinal != ordinal
            or other._nbytes != nbytes
            or other._stream._session is not session
        ):
            return False
        to, of = (ptr, there) if writing else (there, ptr)
        result = session.cuMemcpyAsync(to, of, nbytes, handle)[0]
    else:
        return False
    if result and (
        result != _WRONG_CONTEXT or int(session.call("cuCtxGetCurrent")) in (0, int(session.context(ordinal)))
    ):
        name = "cuMemcpyAsync" if type(other) in kinds else "cuMemcpyHtoDAsync" if writing else "cuMemcpyDtoHAsync"
        raise error_from(result, name, ours._access_hint(ordered))
    return not result


def copy_bytes(target: CopySide, source: CopySide, stream: Stream) -> None:
    """Queue a copy. If another device owns one of the two sides, use the peer call, which needs no access."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"source has {source.nbytes} bytes and target {target.nbytes}: take a view of the larger one")
    if not target.nbytes:
        return
    raw = stream._checked_raw()
    session = stream._session
    for side in (target, source):
        side.ordered_before(stream)
    if stream._capture is not None:
        stream._capture.graph.kept += (target.keep, source.keep)
    # The driver refuses copies of pool memory unless the stream's own context is current (programming guide 4.3.5.1).
    with stream.device.current():
        owners = (target.ordinal, source.ordinal)
        if None not in owners and owners != (stream.device.ordinal, stream.device.ordinal):
            to, of = (session.context(ordinal) for ordinal in owners if ordinal is not None)
            session.call("cuMemcpyPeerAsync", target.address, to, source.address, of, target.nbytes, raw)
        else:
            hint = functools.partial(access_hint, (target, source), stream)
            session.call("cuMemcpyAsync", target.address, source.address, target.nbytes, raw, hint=hint)


def access_hint(sides: Iterable[CopySide], stream: Stream) -> str:
    """The likely reason why the driver refuses a copy: memory of another device, or else of the host."""
    ordered = sorted(sides, key=lambda side: side.ordinal is None)
    return next(filter(None, (side.access_hint(stream) for side in ordered)), "")


def queue_batch(
    session: Session,
    raw: Any,
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    attributes: Sequence[Any] = (),
    runs: Sequence[int] = (0,),
    hint: str | Callable[[], str] = "",
) -> None:
    """Queue copies in one driver call (``cuMemcpyBatchAsync``). ``raw``: the ``CUstream``. Sizes are in bytes.

    ``attributes[i]`` applies to the copies from index ``runs[i]`` on. Default: all sources are read in stream order.
    """
    if not attributes:
        in_order = cuda.CUmemcpyAttributes()
        in_order.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes = (in_order,)
    pointers = [list(map(cuda.CUdeviceptr, addresses)) for addresses in (targets, sources)]
    settings = list(attributes), list(runs), len(runs)
    session.call("cuMemcpyBatchAsync", *pointers, list(sizes), len(sizes), *settings, raw, hint=hint)
