"""Fills and copies of memory, and batches of copies.

The plain case is one driver call without further checks: a fill with a byte, or a copy of equal sizes on one device. It
needs memory whose :attr:`MemoryBase._ptr` is set, and a stream on which this thread may make a direct driver call
(:meth:`Stream.ready`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

from streamalloc.core.device import Device, known_location, location_of
from streamalloc.core.errors import error_from, unsupported
from streamalloc.core.library_streams import as_stream, library_stream, queue_handle
from streamalloc.core.memory_base import MemoryBase, kinds, refuse_legacy
from streamalloc.core.properties import MemLocation, checked_type
from streamalloc.core.resource import above
from streamalloc.core.session import Session
from streamalloc.core.stream import Stream, StreamLike
from streamalloc.driver.internal import BINDINGS_VERSION, cuda
from streamalloc.formats.arrays import cuda_array, fill_pattern, host_array
from streamalloc.formats.lazy_numpy import np

if TYPE_CHECKING:
    from typing_extensions import Self

_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
"""Name of the driver function by width of the pattern in bytes."""
_WRONG_CONTEXT = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
"""Result of a copy of pool memory while another device's context is current."""


class Copyable(MemoryBase):
    """Memory that can be filled and copied."""

    __slots__ = ()

    def fill(
        self, value: int | bytes | np.generic, stream: StreamLike | None = None, *, width: int | None = None
    ) -> None:
        """Fill with a pattern of 1, 2 or 4 bytes, in stream order (``cuMemsetD8Async``, ``cuMemsetD16Async``,
        ``cuMemsetD32Async``).

        Parameters
        ----------
        value
            An integer, the bytes of the pattern in memory order, or a numpy scalar of 1, 2 or 4 bytes.
        stream
            The stream to queue on (default: the memory's own).
        width
            Width of the pattern in bytes if ``value`` is an integer (default 1). A negative integer is stored in two's
            complement. For other values the width is their size; another ``width`` raises ValueError.

        Raises
        ------
        TypeError, ValueError
            ``value`` is of another type or does not fit ``width``, or the memory's size or address is not a multiple of
            the width. Or ``stream`` is not a stream of this driver.
        ClosedError, EvictedError
            The memory was freed or is evicted, or the stream was closed.
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
        number, width = fill_pattern(value, width)
        count, rest = divmod(self.nbytes, width)
        if rest or self._at % width:
            raise ValueError(f"width={width}: {self.nbytes} bytes at {self._at:#x} are no whole number of patterns")
        ordered = self._ordered_on(stream)
        if count:
            self._await_on(ordered)
            _keep_in_graph(ordered, self)
            wanted = self._at, number, count, ordered.checked_raw()
            hint = functools.partial(self._access_hint, ordered)
            ordered.in_context(self._session.call, _FILLS[width], *wanted, hint=hint)

    def tobytes(self, stream: StreamLike | None = None) -> bytes:
        """Copy all bytes to the host on ``stream`` (default: the memory's own), wait for the stream, and return the
        bytes (``cuMemcpyAsync``, ``cuStreamSynchronize``).

        ``pickle.dumps(memory.tobytes())`` pickles the contents; :meth:`MemoryPool.to_device` copies such bytes to new
        memory. Errors as for :meth:`copy_to` and :meth:`Stream.synchronize`.
        """
        host, ordered = np.empty(self.nbytes, np.uint8), self._ordered_on(stream)
        Copyable.copy_to(self, host, ordered)
        ordered.synchronize()
        return host.tobytes()

    def copy_to(self, target: Any, stream: StreamLike | None = None, *, options: CopyOptions | None = None) -> None:
        """Copy all bytes to ``target``, which must have the same size (``cuMemcpyAsync``, ``cuMemcpyPeerAsync``). The
        host waits only if the target is pageable host memory.

        Keep both sides alive until the copy is done, except pageable memory. If the memory is dropped, its owner may
        reuse it before the copy: a dropped buffer is freed in the order of its own stream, and another library does not
        know the stream of the copy. :func:`streamalloc.interop.borrow` keeps an array of another library.

        The two must not overlap: a copy reads and writes its bytes in no defined order. The driver accepts such a copy,
        and a checked driver reports it as a race. To move bytes within a buffer, copy them to other memory first.

        Parameters
        ----------
        target
            Memory of this package, on any device; an object with ``__cuda_array_interface__``; or a writable,
            contiguous object with the buffer protocol (a numpy array, a bytearray, a memoryview).
        stream
            The stream to queue on (default: the memory's own).
        options
            Options of the copy. :func:`copy_batch` then makes the copy, and refuses the legacy default stream and
            captures. None: a single copy, without options.

        Raises
        ------
        TypeError, ValueError
            The target is not of these types, is read-only or not contiguous, or has another size. Or ``stream`` is not
            a stream of this driver.
        ClosedError, EvictedError
            This memory or the target was freed or is evicted, or the stream was closed.
        CaptureError, NotSupportedError
            With ``options``, as for :func:`copy_batch`.
        """
        if options is not None:
            copy_batch(self._ordered_on(stream), [self], [target], options=options)
        elif not _copied(self, target, stream, False):
            ordered = self._ordered_on(stream)
            copy_bytes(CopySide.of(target, self._session, writable=True), CopySide.of(self, self._session), ordered)

    def copy_from(self, source: Any, stream: StreamLike | None = None, *, options: CopyOptions | None = None) -> None:
        """Copy all bytes from ``source``, which must have the same size. ``stream``, ``options`` and errors as for
        :meth:`copy_to`; the source may be read-only.

        Outside of a capture, the driver reads a pageable host source before the call returns, so the source may then be
        changed or freed. A source in pinned or pool memory is read in stream order. In a capture, each launch reads the
        source and writes the target. The graph of :meth:`Stream.capture` and its queued launches keep both alive. In a
        capture that other code has begun, the caller must keep them alive.
        """
        if options is not None:
            copy_batch(self._ordered_on(stream), [source], [self], options=options)
        elif not _copied(self, source, stream, True):
            ordered = self._ordered_on(stream)
            copy_bytes(CopySide.of(self, self._session, writable=True), CopySide.of(source, self._session), ordered)


class CopySide:
    """Source or target of a copy: its address, size in bytes, owning device, and the object that keeps the memory
    alive.
    """

    __slots__ = ("address", "after", "keep", "nbytes", "ordinal")

    def __init__(self, address: int, nbytes: int, ordinal: int | None, keep: object, after: int | None = None) -> None:
        self.address: int = address
        self.nbytes: int = nbytes
        self.ordinal: int | None = ordinal
        """Ordinal of the owning device; None for host or unknown memory."""
        self.keep: object = keep
        self.after: int | None = after
        """Handle (``CUstream`` as a number) of the stream to wait for before the memory is used; None if there is no
        stream to wait for.
        """

    def is_pageable(self, session: Session) -> bool:
        """Whether the side is an array in pageable host memory, which is neither pinned nor of a pool."""
        return isinstance(self.keep, np.ndarray) and above.residence_of(session, self.address) is None

    def ordered_before(self, stream: Stream) -> None:
        """Have ``stream`` wait before it uses this side's memory: for the exporter's writes to imported memory, or for
        the stream that another library's array names (``cuStreamWaitEvent``).

        For all other memory there is no wait; the caller orders the work.
        """
        if type(self.keep) in kinds:
            self.keep._await_on(stream)  # type: ignore[attr-defined]
        elif self.after is not None:
            device = stream.device if self.ordinal is None else Device._of(self.ordinal, stream._session)
            if self.after != stream._number or device != stream.device:
                stream.wait(Stream.of_handle(device, self.after, self.keep))

    def access_hint(self, stream: Stream) -> str:
        """Return the likely reason why the driver refuses a copy of this memory on ``stream``, as text for an error;
        ``""`` if no reason is known.
        """
        if isinstance(self.keep, MemoryBase):
            return self.keep._access_hint(stream)
        if self.ordinal in (None, stream.device.ordinal):
            return ""
        return (
            f"the array is on device {self.ordinal} and the stream runs on device {stream.device.ordinal}: name a "
            f"stream of device {self.ordinal}"
        )

    @classmethod
    def of(cls, other: object, session: Session, *, writable: bool = False) -> Self:
        """Return the side of a copy for ``other``: memory of this package, an array with ``__cuda_array_interface__``,
        or an object with the buffer protocol. ``writable``: whether ``other`` is the target; otherwise it is the
        source.

        Raises
        ------
        TypeError, ValueError
            ``other`` is of another type, not contiguous, or of another driver; or it is a target and read-only.
        ClosedError, EvictedError
            The memory was freed, or is evicted.
        """
        name = "target" if writable else "source"
        if isinstance(other, MemoryBase):
            if other._session is not session:
                raise ValueError(f"{name} {other!r} belongs to another driver")
            other.check_usable()
            unreadable = "" if writable else other._unreadable()
            if unreadable:
                raise ValueError(unreadable)
            if writable and other.location.on_host and other._read_only(on_host=True):
                raise ValueError(f"{name} {other!r} is read-only to the host")
            return cls(other._at, other.nbytes, other._resident_on(), other)
        interface = getattr(other, "__cuda_array_interface__", None)
        if interface is not None:
            found = cuda_array(interface, name)
            if writable and found.read_only:
                raise ValueError(f"{name} is read-only")
            # The device that owns the memory determines whether the copy is a plain one or one between devices. With
            # one device every copy is plain, so the driver is queried only if there are several devices.
            several = found.nbytes and session.call("cuDeviceGetCount") > 1
            place = above.residence_of(session, found.address) if several else None
            ordinal = None if place is None or place.managed else place.ordinal
            return cls(found.address, found.nbytes, ordinal, other, found.stream)
        array = host_array(other)
        if array is None:
            kinds = "be a Memory, have __cuda_array_interface__ or the buffer protocol"
            raise TypeError(f"{name} must {kinds}, not {type(other).__name__}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: copy it to a contiguous array first")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        return cls(array.ctypes.data, array.nbytes, None, array)


def _copied(ours: MemoryBase, other: Any, stream: StreamLike | None, writing: bool) -> bool:
    """Make a plain copy, of equal sizes on one device, by one driver call. Returns False if the copy was not made, and
    the caller must make it by :func:`copy_bytes`. ``writing``: whether ``ours`` is the target; otherwise it is the
    source.
    """
    ptr, ordinal = ours._ptr, ours._ordinal
    if ptr is None or ordinal is None:
        return False
    own, nbytes = ours._stream, ours._nbytes
    session = own._session
    ordered: Any = own if stream is None else stream
    if not isinstance(ordered, Stream):
        ordered = library_stream(ordered, session)
    handle = queue_handle(ordered, session)
    # The driver refuses the address of an empty array, so an empty copy is left to the caller.
    if handle is None or not nbytes or ordered.device.ordinal != ordinal:
        return False
    if type(other) is np.ndarray:
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
    # The driver refuses a copy of pool memory in the context of another device, and of mapped memory without a context.
    # The caller then repeats the copy in the stream's own context.
    if result and (result != _WRONG_CONTEXT or int(session.call("cuCtxGetCurrent")) == int(session.context(ordinal))):
        name = "cuMemcpyAsync" if type(other) in kinds else "cuMemcpyHtoDAsync" if writing else "cuMemcpyDtoHAsync"
        raise error_from(result, name, ours._access_hint(ordered))
    return not result


def copy_bytes(target: CopySide, source: CopySide, stream: Stream) -> None:
    """Queue a copy of all bytes on ``stream`` (``cuMemcpyAsync``). If a device other than the stream's owns one of the
    sides, the call is ``cuMemcpyPeerAsync``, which needs no peer access. Raises ValueError if the sizes differ,
    ClosedError if the stream was closed, and CudaError.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"source has {source.nbytes} bytes and target {target.nbytes}: take a view of the larger one")
    if not target.nbytes:
        return
    raw = stream.checked_raw()
    session = stream._session
    for side in (target, source):
        side.ordered_before(stream)
    _keep_in_graph(stream, target.keep, source.keep)
    # The driver refuses copies of pool memory unless the stream's own context is current (programming guide,
    # "cudaMemcpyAsync Current Context/Device Sensitivity").
    here, owners = stream.device.ordinal, (target.ordinal, source.ordinal)
    if None not in owners and owners != (here, here):
        to, of = (session.context(ordinal) for ordinal in owners if ordinal is not None)
        session.call_in(here, "cuMemcpyPeerAsync", target.address, to, source.address, of, target.nbytes, raw)
    else:
        hint = functools.partial(access_hint, (target, source), stream)
        session.call_in(here, "cuMemcpyAsync", target.address, source.address, target.nbytes, raw, hint=hint)


def _keep_in_graph(stream: Stream, *used: object) -> None:
    """While this package captures ``stream``, have the graph keep the objects whose memory its next node uses. Each
    launch uses the memory again.
    """
    if stream._capture is not None:
        kept = [one._kept_by_graphs() if isinstance(one, MemoryBase) else one for one in used]
        stream._capture.graph.kept += [one for one in kept if one is not None]


def access_hint(sides: Iterable[CopySide], stream: Stream) -> str:
    """Return the likely reason why the driver refuses a copy on ``stream``, as text for an error; ``""`` if none is
    known.
    """
    ordered = sorted(sides, key=lambda side: side.ordinal is None)
    return next(filter(None, (side.access_hint(stream) for side in ordered)), "")


def kernels_may_use(memory: MemoryBase, blocks: Any, nbytes: int, stream: Stream, *, write: bool) -> bool:
    """Whether it is known that kernels on ``stream`` have access to ``blocks`` of ``memory``, each of ``nbytes`` bytes.
    False if ``stream`` is of another device than the memory's stream. ``write``: whether the kernels write to the
    blocks.

    The driver refuses a copy without access. It does not check a kernel that copies: the kernel would fault, and the
    context would be lost.
    """
    return stream.device == memory.stream.device and memory._kernels_may_use(blocks, nbytes, write)


def queue_batch(
    stream: Stream,
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    attributes: Sequence[Any] = (),
    runs: Sequence[int] = (0,),
    hint: str | Callable[[], str] = "",
) -> None:
    """Queue copies of ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]`` (``cuMemcpyBatchAsync``).

    ``attributes[j]`` (``CUmemcpyAttributes``) applies to the copies from index ``runs[j]`` on. By default all sources
    are read in stream order. ``hint``: text for an error, or a function that returns this text.
    """
    if not attributes:
        in_order = cuda.CUmemcpyAttributes()
        in_order.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes = (in_order,)
    pointers = [list(map(cuda.CUdeviceptr, addresses)) for addresses in (targets, sources)]
    wanted = *pointers, list(sizes), len(sizes), list(attributes), list(runs), len(runs), stream.checked_raw()
    stream._session.call_in(stream.device.ordinal, "cuMemcpyBatchAsync", *wanted, hint=hint)


_CALL = "cuMemcpyBatchAsync"
_Order = Literal["stream", "during_api_call", "any"]
_Overlap = Literal["default", "prefer_overlap_with_compute"]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of copies (``CUmemcpyAttributes``), for :func:`copy_batch`, :meth:`Memory.copy_to` and
    :meth:`Memory.copy_from`.

    Attributes
    ----------
    src_access_order
        Time at which the source is read: in ``"stream"`` order; ``"during_api_call"``, so that the source may change
        afterwards; or at ``"any"`` time until the copy is done.
    src_location_hint, dst_location_hint
        Location that the driver assumes for managed memory; None for no hint.
    overlap_mode
        ``"prefer_overlap_with_compute"`` requests that the copy runs while kernels run; ``"default"`` asks for nothing.

    Raises
    ------
    ValueError
        ``src_access_order`` or ``overlap_mode`` is another text.
    TypeError
        A hint is neither a location nor None.
    """

    src_access_order: _Order = "stream"
    src_location_hint: Device | MemLocation | None = None
    dst_location_hint: Device | MemLocation | None = None
    overlap_mode: _Overlap = "default"

    def __post_init__(self) -> None:
        for name, allowed in (("src_access_order", get_args(_Order)), ("overlap_mode", get_args(_Overlap))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
        for name in ("src_location_hint", "dst_location_hint"):
            if getattr(self, name) is not None:
                location_of(name, getattr(self, name))

    def _to_driver(self, session: Session) -> Any:
        made = cuda.CUmemcpyAttributes()
        order = get_args(_Order).index(self.src_access_order) + 1
        made.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(order)
        made.flags = get_args(_Overlap).index(self.overlap_mode)
        for field, hint in (("srcLocHint", self.src_location_hint), ("dstLocHint", self.dst_location_hint)):
            if hint is not None:
                setattr(made, field, known_location(session, field, hint).to_driver())
        return made


def copy_batch(
    stream: StreamLike,
    srcs: Sequence[Any],
    dsts: Sequence[Any],
    *,
    options: CopyOptions | Sequence[CopyOptions] | None = None,
) -> None:
    """Copy all bytes of each source to its target in one driver call (``cuMemcpyBatchAsync``).

    The copies run after earlier work of the stream. Their order among each other is not defined, so no target may
    overlap a source or another target.

    A copy with a side in pageable host memory is a call of its own, after the batch and without options
    (``cuMemcpyAsync``). When it returns, a pageable target is written, and a pageable source is read. If the driver
    refuses one of these calls, earlier copies have been queued.

    Parameters
    ----------
    stream
        The stream to queue on: not the legacy default stream, and not a captured stream.
    srcs, dsts
        Memory as for :meth:`Memory.copy_from` and :meth:`Memory.copy_to`. A target has the size of its source.
    options
        One :class:`CopyOptions` for all copies, or a sequence with one for each copy; None for the default.

    Raises
    ------
    TypeError, ValueError
        The sequences have different lengths, are empty, or an entry cannot be copied; the message has its index. Or
        ``stream`` is not a stream of this driver, or is the legacy default stream.
    ClosedError, EvictedError
        The memory of an entry was freed or is evicted, or the stream was closed.
    CaptureError
        The stream is being captured; ``copy_to`` works there.
    NotSupportedError
        The bindings are older than 13.0.
    """
    for name, given in (("srcs", srcs), ("dsts", dsts)):
        if isinstance(given, MemoryBase) or not isinstance(given, Sequence):
            raise TypeError(f"{name} must be a sequence of memory, not {type(given).__name__}; copy_to makes one copy")
    if len(srcs) != len(dsts) or not srcs:
        raise ValueError(f"{len(srcs)} srcs and {len(dsts)} dsts: a batch has as many of both, and at least one")
    wanted = [options or CopyOptions()] * len(srcs) if options is None or isinstance(options, CopyOptions) else options
    for one in wanted if isinstance(wanted, Sequence) else [wanted]:
        checked_type("options", one, CopyOptions)
    if len(wanted) != len(srcs):
        raise ValueError(f"{len(wanted)} options for {len(srcs)} copies")
    if not hasattr(cuda, "CUmemcpyAttributes") or not hasattr(cuda, "cuMemGetDefaultMemPool"):
        raise unsupported(_CALL, "cuda-bindings 13.0", f"cuda-bindings {BINDINGS_VERSION}")
    ordered = as_stream(stream, _session_of(stream, (*srcs, *dsts)))
    session = ordered._session
    refuse_legacy(ordered, _CALL)
    ordered.refuse_capture(_CALL, "copy_to makes a node of the graph")
    # Checked before the first copy, and for copies outside of the batch: no copy is made if an option is refused.
    attributes = {option: option._to_driver(session) for option in wanted}
    pairs = [_pair(number, session, *ends) for number, ends in enumerate(zip(dsts, srcs, strict=True))]
    batch: list[tuple[tuple[CopySide, CopySide], Any]] = []
    alone: list[tuple[CopySide, CopySide]] = []
    for pair, option in zip(pairs, wanted, strict=True):
        if any(side.is_pageable(session) for side in pair):
            # A batch may return before the driver has written such a target or read such a source, also in the order
            # "during_api_call" (observed on H200). If the program then drops the array, other memory is written or
            # copied.
            alone.append(pair)
        elif pair[0].nbytes:
            batch.append((pair, attributes[option]))
    if batch:
        _queue_pairs(ordered, batch)
    for target, source in alone:
        copy_bytes(target, source, ordered)


def _queue_pairs(stream: Stream, batch: Sequence[tuple[tuple[CopySide, CopySide], Any]]) -> None:
    changes = groupby(range(len(batch)), lambda number: id(batch[number][1]))
    runs = [next(numbers) for _, numbers in changes]
    attributes = [batch[first][1] for first in runs]
    sides = [side for pair, _ in batch for side in pair]
    for side in sides:
        side.ordered_before(stream)
    targets, sources = ([side.address for side in sides[first::2]] for first in (0, 1))
    sizes = [target.nbytes for (target, _), _ in batch]
    queue_batch(stream, targets, sources, sizes, attributes, runs, functools.partial(access_hint, sides, stream))


def _session_of(stream: StreamLike, ends: Sequence[Any]) -> Session:
    if isinstance(stream, Stream):
        return stream._session
    ours = next((one for one in ends if type(one) in kinds), None)
    if ours is None:
        raise TypeError("srcs and dsts have no memory of streamalloc, and the stream is of another library")
    session: Session = ours._session
    return session


def _pair(number: int, session: Session, target: Any, source: Any) -> tuple[CopySide, CopySide]:
    try:
        sides = CopySide.of(target, session, writable=True), CopySide.of(source, session)
    except (TypeError, ValueError) as error:
        raise type(error)(f"copy {number}: {error}") from None
    if sides[0].nbytes != sides[1].nbytes:
        raise ValueError(f"copy {number}: the source has {sides[1].nbytes} bytes and the target {sides[0].nbytes}")
    return sides
