"""Several copies in one driver call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from streamalloc.core.copies import CopySide, access_hint, queue_batch
from streamalloc.core.device import Device, check_location, location_of
from streamalloc.core.errors import CaptureError, refused, unsupported
from streamalloc.core.managed import refuse_legacy
from streamalloc.core.memory_base import MemoryBase, kinds
from streamalloc.core.properties import MemLocation, checked_type
from streamalloc.core.session import Session
from streamalloc.core.stream import Stream, StreamLike, as_stream
from streamalloc.driver.internal import BINDINGS_VERSION, cuda

_CALL = "cuMemcpyBatchAsync"
_Order = Literal["stream", "during_api_call", "any"]
_Overlap = Literal["default", "prefer_overlap_with_compute"]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of a copy of :func:`copy_batch` (``CUmemcpyAttributes``).

    Attributes
    ----------
    src_access_order
        When the source is read: in ``"stream"`` order; ``"during_api_call"``, after which it may change; or at
        ``"any"`` time until the copy is done.
    src_location_hint, dst_location_hint
        Location to assume for managed memory; None for no hint.
    overlap_mode
        ``"prefer_overlap_with_compute"`` asks to run beside kernels.
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
                place = location_of(field, hint)
                check_location(session, place)
                setattr(made, field, place.to_driver())
        return made


def copy_batch(
    stream: StreamLike,
    srcs: Sequence[Any],
    dsts: Sequence[Any],
    *,
    options: CopyOptions | Sequence[CopyOptions] | None = None,
) -> None:
    """Copy all bytes of each source to its target in one driver call (``cuMemcpyBatchAsync``).

    The copies run after earlier work of the stream, in any order among each other. So no target may be the source of
    another copy.

    Parameters
    ----------
    stream
        The stream to queue on: not the legacy default stream, and not a captured stream.
    srcs, dsts
        Memory as for :meth:`Memory.copy_from` and :meth:`Memory.copy_to`. A target has the size of its source.
    options
        One for all copies, or a sequence with one for each; None for the default.

    Raises
    ------
    TypeError, ValueError
        The sequences have different lengths, are empty, or an entry cannot be copied; the message has its index.
    CaptureError
        The stream is being captured; use ``copy_to`` there.
    NotSupportedError
        The bindings are older than 13.0.
    """
    for name, given in (("srcs", srcs), ("dsts", dsts)):
        if isinstance(given, MemoryBase) or not isinstance(given, Sequence):
            raise TypeError(f"{name} must be a sequence of memory, not {type(given).__name__}; copy_to makes one copy")
    if len(srcs) != len(dsts) or not srcs:
        raise ValueError(f"{len(srcs)} srcs and {len(dsts)} dsts: a batch has as many of both, and at least one")
    wanted = [options or CopyOptions()] * len(srcs) if options is None or isinstance(options, CopyOptions) else options
    if len(wanted) != len(srcs):
        raise ValueError(f"{len(wanted)} options for {len(srcs)} copies")
    for one in wanted:
        checked_type("options", one, CopyOptions)
    if not hasattr(cuda, "CUmemcpyAttributes") or not hasattr(cuda, "cuMemGetDefaultMemPool"):
        raise unsupported(_CALL, "cuda-bindings 13.0", f"cuda-bindings {BINDINGS_VERSION}")
    ordered = as_stream(stream, _session_of(stream, (*srcs, *dsts)))
    session = ordered._session
    refuse_legacy(ordered, _CALL)
    if ordered.capturing:
        raise refused(CaptureError, _CALL, "the stream is being captured, where copy_to makes a node of the graph")
    pairs = [_pair(number, session, *ends) for number, ends in enumerate(zip(dsts, srcs, strict=True))]
    filled = [(pair, option) for pair, option in zip(pairs, wanted, strict=True) if pair[0].nbytes]
    if not filled:
        return
    changes = groupby(range(len(filled)), lambda number: filled[number][1])
    runs, attributes = zip(*((next(numbers), option._to_driver(session)) for option, numbers in changes), strict=True)
    for (target, source), _ in filled:
        for side in (target, source):
            side.ordered_before(ordered)
    targets, sources = ([pair[side].address for pair, _ in filled] for side in (0, 1))
    sizes = [target.nbytes for (target, _), _ in filled]
    hint = functools.partial(access_hint, [side for pair, _ in filled for side in pair], ordered)
    with ordered.device.current():
        queue_batch(session, ordered._checked_raw(), targets, sources, sizes, attributes, runs, hint)


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
        sides = CopySide.writable(target, session), CopySide.readable(source, session)
    except (TypeError, ValueError) as error:
        raise type(error)(f"copy {number}: {error}") from None
    if sides[0].nbytes != sides[1].nbytes:
        raise ValueError(f"copy {number}: the source has {sides[1].nbytes} bytes and the target {sides[0].nbytes}")
    return sides
