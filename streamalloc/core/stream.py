"""Streams: thin owners of the driver's, and the acceptance of everybody else's.

A stream is a queue of work that one device runs in order; an event marks a point in it. Both are what allocation and
free are ordered by. Kernels and graph building are other libraries' business: their streams are accepted wherever
ours are (:func:`as_stream`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union, cast

from streamalloc.core.door import Door
from streamalloc.core.errors import CaptureError, ClosedError, CudaError, NotReadyError, error_from, refused
from streamalloc.core.event import Event, EventLike, Spares, context_event, foreign_event, is_done
from streamalloc.core.later import Deferred, later_of, refused_to_end, work
from streamalloc.core.ownership import Closes, finaliser
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture, CaptureMode, Graph

__all__ = [
    "CuPyStreamLike",
    "NumbaStreamLike",
    "Stream",
    "StreamLike",
    "SupportsCudaStream",
    "TorchStreamLike",
    "as_stream",
    "direct_handle",
    "direct_view",
    "order_after_context",
    "order_handle_after",
    "ordered_after",
    "queue_behind",
    "raw_handle",
    "refuse_capture",
    "sees_all_work",
    "stream_call",
]


class SupportsCudaStream(Protocol):
    """An object with ``__cuda_stream__``, such as a stream of cuda.core: protocol version 0 and the handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStreamLike(Protocol):
    """A stream of PyTorch."""

    @property
    def cuda_stream(self) -> int: ...


class CuPyStreamLike(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int: ...


class NumbaStreamLike(Protocol):
    """A stream of Numba."""

    @property
    def handle(self) -> Any: ...


StreamLike: TypeAlias = Union["Stream", SupportsCudaStream, TorchStreamLike, CuPyStreamLike, NumbaStreamLike]
"""A :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy, PyTorch or Numba stream."""


# Handles that name a stream of whichever context is current, rather than one stream (driver API, "Stream handles").
_LEGACY = 1
_PER_THREAD = 2
_DEFAULT_HANDLES = (0, _LEGACY, _PER_THREAD)
_NO_LISTS: Mapping[object, Any] = MappingProxyType({})
_INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE


class Stream(Closes):
    """A stream of one device.

    Made by :meth:`Device.create_stream`, :attr:`Device.default_stream` or :attr:`Device.per_thread_stream`;
    :func:`as_stream` wraps other libraries' streams. Closing destroys a stream that we made (``cuStreamDestroy``):
    the driver finishes the work that is queued, and nothing waits for it.
    """

    __slots__ = (
        "__weakref__",
        "_capture",
        "_closed",
        "_default",
        "_direct",
        "_door",
        "_endings",
        "_foreign",
        "_handle",
        "_in_use",
        "_last",
        "_lists",
        "_number",
        "_owed",
        "_paying",
        "_raw",
        "_sees_all",
        "_spare",
        "device",
    )

    device: Device
    """The device that runs the stream's work."""

    def __init__(self, device: Device, raw: Any, *, foreign: object | None = None) -> None:
        self._prepare(device, raw, foreign)
        self._open()

    def _prepare(self, device: Device, raw: Any, foreign: object | None) -> None:
        self.device = device
        self._foreign = foreign
        self._door = device._door
        self._capture: Capture | None = None
        self._closed = True
        # Before it has the handle: who drops what was interrupted from here on must not destroy a default stream.
        self._default = raw is not None and int(raw) in _DEFAULT_HANDLES
        self._sees_all = False
        self._last: Event | None = None
        self._spare = Spares()
        self._in_use = threading.RLock()
        """Held by who closes the stream, and by what uses it on other threads than its owner's."""
        # What fast paths use: the handle where it can go straight to the driver, and the door to compare with theirs.
        self._handle: Any = None
        self._direct: Door | None = None
        self._raw = raw
        self._lists: Mapping[object, Any] = _NO_LISTS
        """By cache, the lists of memory for this stream that fast paths take from; none where they may not."""
        self._endings: tuple[Deferred, ...] = ()
        """What ends before the stream is closed."""
        self._owed: list[Deferred] = []
        """What is attempted before anything more is queued, see :func:`queue_behind`."""
        self._paying: list[int] = []
        """The threads that do so."""

    def _open(self, *, non_blocking: bool = False) -> None:
        number = self._number = int(self._raw)
        # Whether a query sees all that later work would wait for: that of a blocking stream does not see what the
        # legacy stream has to do, while the legacy stream's sees the work of all blocking streams. Where order is
        # checked nobody asks: what is found must not hang on how far a stream happens to be.
        self._sees_all = (non_blocking or number in (0, _LEGACY)) and self._door.shared is None
        self._closed = False
        self._allow_direct()

    @classmethod
    def _create(cls, device: Device, blocking: bool, priority: int) -> Self:
        flags = cuda.CUstream_flags.CU_STREAM_DEFAULT if blocking else cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = cls.__new__(cls)
        stream._prepare(device, None, None)
        with device.current():
            stream._door.create(stream, "_raw", "cuStreamCreateWithPriority", int(flags), priority)
        stream._open(non_blocking=not blocking)
        return stream

    @classmethod
    def of_handle(cls, device: Device, handle: int, owner: object, *, direct: bool = False) -> Self:
        """A stream of ``device`` that other code made and ``owner`` keeps; closing it leaves the driver's alone.

        ``direct``: calls may go straight to the driver as on one of ours, and allocations be cached for it. Whoever
        uses it looks before whether it is being captured. It makes no difference for default streams.
        """
        stream = cls(device, cuda.CUstream(handle), foreign=owner)
        if direct and not stream._default:
            stream._handle = stream._raw
            stream._direct = stream._door
        return stream

    def _allow_direct(self) -> None:
        # Other code may capture its own streams without our knowing, so those are looked at each time.
        if not (self._default or self._closed or self._capture or self._owed or self._foreign is not None):
            self._handle = self._raw
            self._direct = self._door

    def _forbid_direct(self) -> None:
        self._handle = None
        self._direct = None
        self._lists = _NO_LISTS

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream``) as a number.

        Raises
        ------
        ClosedError
            The stream was closed.
        """
        self._tell_lent(self._checked_raw(), used=False)
        return self._number

    def _tell_lent(self, raw: Any, used: bool) -> None:
        """Tell a driver that checks stream order that other code has the stream; ``used``: that it uses it."""
        lent = self._door.lent
        if lent is not None:
            with self._context():
                lent(raw, used)

    @property
    def is_default(self) -> bool:
        """Whether it is one of the device's default streams (legacy or per-thread)."""
        return self._default

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a graph (``cuStreamIsCapturing``)."""
        return int(self._call("cuStreamIsCapturing")) != 0

    def _captured(self) -> bool:
        """What :attr:`capturing` says, without a driver call where we know it ourselves."""
        # Of our own streams we know; other code may capture its own and the default streams without our knowing.
        unknown = self._foreign is not None or self._default
        return self._capture is not None or (unknown and self.capturing)

    def _refuse_capture(self, call: str, why: str) -> None:
        """Raise :class:`CaptureError` where the stream is being captured; ``call`` is what would not be replayed."""
        if self._captured():
            raise refused(CaptureError, call, f"the stream is being captured; {why}")

    @property
    def priority(self) -> int:
        """The stream's priority; lower numbers run first (``cuStreamGetPriority``)."""
        return int(self._call("cuStreamGetPriority"))

    @property
    def blocking(self) -> bool:
        """Whether the stream waits for, and holds up, the legacy default stream (``cuStreamGetFlags``).

        Raises
        ------
        CaptureError
            The stream is being captured: the driver would end the capture.
        """
        if self._capture is not None:
            raise refused(CaptureError, "cuStreamGetFlags", "it would end the capture of the stream; ask afterwards")
        return not int(self._call("cuStreamGetFlags")) & int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def _checked_raw(self) -> Any:
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        if self._owed and threading.get_ident() not in self._paying:
            self._pay()
        return self._raw

    def _pay(self) -> None:
        """Attempt what comes before anything that is queued from now on; then fast paths may be taken again."""
        me = threading.get_ident()
        self._paying.append(me)
        try:
            for item in tuple(self._owed):
                # Where the driver refuses, it is tried again.
                with contextlib.suppress(CudaError):
                    if item.attempt():
                        with contextlib.suppress(ValueError):  # another thread was faster
                            self._owed.remove(item)
        finally:
            self._paying.remove(me)
        self._allow_direct()
        # Another finaliser may just have come.
        if self._owed:
            self._forbid_direct()

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """The device's context made current, where the handle means nothing without one."""
        return self.device.current() if self._default else contextlib.nullcontext()

    def _call(self, name: str, *args: Any, hint: str = "") -> Any:
        """A driver call whose first argument is this stream."""
        raw = self._checked_raw()
        with self._context():
            return self._door.call(name, raw, *args, hint=hint)

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Record an event after the work queued so far, and return it (``cuEventRecord``).

        ``event`` is recorded again if given; otherwise one is made, which can measure time if ``timing``. Events that
        were made here and closed are used again.
        """
        handle, spare = self._handle, self._spare
        if event is None and handle is not None and spare and not timing:
            again = Event.__new__(Event)
            again.device = self.device
            again.interprocess = False
            again._door = door = self._door
            again._capture = None
            again._spare = spare
            try:
                again._raw = spare.pop()
            except IndexError:  # another thread took it
                return self._record_slowly(None, timing)
            result = door.cuEventRecord(again._raw, handle)[0]
            if not result:
                return again
            # It may be one of a context that was reset: it is destroyed, and a new one made.
            again._spare = None
            if result != _INVALID_HANDLE:
                raise error_from(result, "cuEventRecord")
        return self._record_slowly(event, timing)

    def _record_slowly(self, event: Event | None, timing: bool) -> Event:
        raw = self._checked_raw()
        if event is None:
            event = Event(self.device, timing=timing)
            if self._handle is not None and not timing:
                event._spare = self._spare
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event, not {type(event).__name__} ({event!r})")
        elif event._door is not self._door:
            raise ValueError(f"{event!r} belongs to another driver than {self!r}")
        with self._context():
            self._door.call("cuEventRecord", event._checked_raw(), raw)
        event._capture = self._capture
        return event

    def wait(self, other: Event | EventLike | StreamLike) -> None:
        """Let later work of this stream wait for an event, or for all that another stream has queued so far.

        Events of cuda.core and of the bindings are taken too. The host does not wait (``cuStreamWaitEvent``).
        """
        handle = self._handle
        if type(other) is Event and other._capture is None and other._door is self._door:
            raw = other._raw
            if raw is not None and handle is not None:
                result = self._door.cuStreamWaitEvent(handle, raw, 0)[0]
                if result:
                    raise error_from(result, "cuStreamWaitEvent")
                return
        self._wait_slowly(other)

    def _wait_slowly(self, other: Event | EventLike | StreamLike) -> None:
        self._checked_raw()
        foreign = foreign_event(other)
        if foreign is not None:
            self._call("cuStreamWaitEvent", foreign, 0)
            return
        if not isinstance(other, Event):
            other = as_stream(cast("StreamLike", other), self._door).record()
        elif other._door is not self._door:
            raise ValueError(f"{other!r} belongs to another driver than {self!r}")
        self._call("cuStreamWaitEvent", other._checked_raw(), 0)
        if other._capture is not None and other._capture is not self._capture:
            # Waiting for an event of a captured stream pulls this stream into the same capture.
            other._capture.adopt(self)

    def synchronize(self) -> None:
        """Block the host until all work queued so far is done (``cuStreamSynchronize``).

        This is also where the driver sees that frees have run: it makes their memory available to every stream and
        gives back what exceeds the release threshold.
        """
        handle = self._handle
        if handle is not None:
            result = self._door.cuStreamSynchronize(handle)[0]
            if result:
                raise error_from(result, "cuStreamSynchronize")
        else:
            self._call("cuStreamSynchronize")
        work(self._door)

    def query(self) -> bool:
        """Whether all work queued so far is done (``cuStreamQuery``)."""
        handle = self._handle
        if handle is not None:
            return is_done(self._door.cuStreamQuery(handle)[0], "cuStreamQuery")
        return self._query_slowly()

    def _query_slowly(self) -> bool:
        try:
            self._call("cuStreamQuery")
        except NotReadyError:
            return False
        return True

    def launch_host_func(self, function: Callable[[], object]) -> None:
        """Queue a Python function that the driver calls on a thread of its own, in stream order (``cuLaunchHostFunc``).

        The function must not call the driver. An exception in it goes to ``sys.unraisablehook``; the stream goes on.

        Raises
        ------
        CaptureError
            The stream is being captured: the bindings free what a host function needs after its first call, so that a
            graph's second launch would crash.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__} ({function!r})")
        if self.capturing:
            raise refused(
                CaptureError,
                "cuLaunchHostFunc",
                "the bindings let a Python function run once, and a graph may be launched more often",
            )

        def run(token: int | None) -> None:
            try:
                function()
            finally:
                _host_functions.pop(token or 0, None)

        callback = _HOST_FUNCTION(run)
        pointer = ctypes.cast(callback, ctypes.c_void_p).value or 0
        _host_functions[pointer] = callback
        try:
            self._call("cuLaunchHostFunc", cuda.CUhostFn(pointer), pointer)
        except BaseException:
            _host_functions.pop(pointer, None)
            raise

    def capture(self, mode: CaptureMode = "global") -> contextlib.AbstractContextManager[Graph]:
        """Record what is queued in a ``with`` block into a graph instead of running it (``cuStreamBeginCapture``).

        Yields the :class:`~streamalloc.core.graph.Graph`, which is complete when the block ends. Allocations and frees
        become nodes of the graph. ``mode`` is ``"global"``, ``"thread_local"`` or ``"relaxed"``: which calls of which
        threads are refused meanwhile, as they could not be replayed.
        """
        from streamalloc.core.graph import capturing

        return capturing(self, mode)

    def close(self) -> None:
        """Destroy the stream if we made it; queued work still runs. Buffers allocated on it stay valid. Idempotent."""
        if self._closed:
            return
        if self._capture is not None:
            raise refused(CaptureError, "cuStreamDestroy", "the stream is being captured; end the capture first")
        if self._foreign is not None or self._default:
            self._forbid_direct()
            self._closed = True
            return
        with self._in_use:
            if self.closed:  # by another thread meanwhile
                return
            for item in self._endings:
                # Where the driver refuses, it is tried again later.
                with contextlib.suppress(CudaError):
                    later_of(self._door).end(item)
            self._endings = ()
            # Buffers that remain need to know when the stream's work was done, to be freed after it.
            self._last = self.record()
            self._spare.end(self._door)
            destroy = self._door.driver.cuStreamDestroy
            self._forbid_direct()
            # From here to the driver nothing is called that a signal handler could interrupt.
            self._closed = True
            result = destroy(self._raw)[0]
        if result:
            refused_to_end(self._door, "cuStreamDestroy", self._raw, result)
            raise error_from(result, "cuStreamDestroy")

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version 0 and the handle, for other libraries."""
        self._tell_lent(self._checked_raw(), used=True)
        return (0, self._number)

    @finaliser
    def __del__(self) -> None:
        # A stream whose making was interrupted has a handle, and counts as closed.
        raw = getattr(self, "_raw", None)
        if raw is None or self._foreign is not None or self._default or not self._door.usable:
            return
        if not self._closed or self._last is None:
            # Buffers of the same garbage cycle may come after their stream.
            self._closed = True
            self._forbid_direct()
            self._spare.end(self._door)
            destroy = self._door.driver.cuStreamDestroy
            # From here to the driver nothing is called that a signal handler could interrupt.
            self._raw = None
            result = destroy(raw)[0]
            if result:
                refused_to_end(self._door, "cuStreamDestroy", raw, result)

    def __repr__(self) -> str:
        if getattr(self, "_raw", None) is None:
            return "<Stream that could not be made>"
        what = {0: "legacy default", _LEGACY: "legacy default", _PER_THREAD: "per-thread default"}.get(int(self._raw))
        state = " closed" if self._closed else " capturing" if self._capture else ""
        return f"<Stream {what or hex(int(self._raw))} of device {self.device.ordinal}{state}>"


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Callbacks must outlive their call, which the driver makes at a time of its own.
_host_functions: dict[int, Any] = {}


def queue_behind(stream: Stream, item: Deferred) -> None:
    """Have ``item`` end before anything more is queued on ``stream``, or at a point of work. Called by finalisers.

    Two threads may attempt it at once, which must be as good as once.
    """
    later_of(stream._door).hand_in(item)
    stream._owed.append(item)
    stream._forbid_direct()


def _by_protocol(stream: Any) -> int | None:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return None
    version, handle = protocol() if callable(protocol) else protocol
    if version != 0:
        raise ValueError(f"{stream!r}: __cuda_stream__ version {version} is not known; version 0 is")
    return int(handle)


# How the streams of other libraries tell their handle, tried in this order.
_HANDLE_OF: tuple[tuple[str, Callable[[Any], int | None]], ...] = (
    ("__cuda_stream__", _by_protocol),
    ("PyTorch's cuda_stream", lambda stream: getattr(stream, "cuda_stream", None)),
    ("CuPy's ptr", lambda stream: getattr(stream, "ptr", None)),
    ("Numba's handle", lambda stream: getattr(getattr(stream, "handle", None), "value", None)),
    ("the bindings' CUstream", lambda stream: int(stream) if isinstance(stream, cuda.CUstream) else None),
)


def _foreign_handle(stream: object) -> int:
    for _, handle_of in _HANDLE_OF:
        handle = handle_of(stream)
        if isinstance(handle, int):
            return handle
    known = ", ".join(name for name, _ in _HANDLE_OF)
    raise TypeError(f"stream must be a Stream or an object that names its handle ({known}), not {stream!r}")


def _device_named_by(stream: object) -> int | None:
    """The device that a PyTorch or CuPy stream says it is of."""
    for name in ("device_index", "device_id"):
        number = getattr(stream, name, None)
        if isinstance(number, int) and number >= 0:
            return number
    return None


def as_stream(stream: StreamLike, door: Door) -> Stream:
    """``stream`` as a :class:`Stream` of ``door``'s driver.

    Raises
    ------
    TypeError
        It is no stream.
    ValueError
        It is a stream of another driver. One of another device of the same driver is fine, as it is for the driver.
    ClosedError
        It was closed.
    """
    if isinstance(stream, Stream):
        if stream._door is not door:
            raise ValueError(
                f"{stream!r} belongs to another driver: {stream._door.driver!r}, not {door.driver!r} (driver.use() "
                "chooses one for its own thread or task only, driver.set_default() for all)"
            )
        stream._checked_raw()
        return stream
    from streamalloc.core.device import Device

    raw = cuda.CUstream(_foreign_handle(stream))
    if int(raw) in _DEFAULT_HANDLES:
        # Such a handle names no device: its library may tell; else it is the device of the context that is current.
        named = _device_named_by(stream)
        ordinal = door.call("cuCtxGetDevice") if named is None else named
    else:
        # Not cuStreamGetDevice: asking a stream that is captured for its device breaks the capture.
        ordinal = door.device_of(door.call("cuStreamGetCtx", raw))
    made = Stream(Device(int(ordinal), driver=door.driver), raw, foreign=stream)
    if not isinstance(stream, cuda.CUstream):
        made._tell_lent(raw, used=True)
    return made


# -- what the areas need of streams --------------------------------------------------------------------------


def direct_handle(stream: StreamLike, door: Door) -> Any | None:
    """The driver's ``CUstream`` where calls may go straight to the driver of ``door``; None where they may not.

    They may on an open stream of our own that is neither captured nor a default stream.
    """
    return stream._handle if type(stream) is Stream and stream._direct is door else None


def raw_handle(stream: Stream) -> Any:
    """The driver's ``CUstream``; raises :class:`ClosedError` where the stream was closed."""
    return stream._checked_raw()


def stream_call(stream: Stream, name: str, *args: Any, hint: str = "") -> Any:
    """A driver call whose first argument is the stream."""
    return stream._call(name, *args, hint=hint)


def direct_view(stream: StreamLike, door: Door) -> tuple[Any | None, bool]:
    """What :func:`direct_handle` and :func:`sees_all_work` say, for fast paths."""
    if type(stream) is Stream and stream._direct is door:
        return stream._handle, stream._sees_all
    return None, False


def sees_all_work(stream: Stream) -> bool:
    """Whether a query of the stream sees all that later work in it would wait for, and is to be made."""
    return stream._sees_all


def refuse_capture(stream: Stream, call: str, why: str) -> None:
    """Raise :class:`CaptureError` where the stream is being captured; ``call`` is what would not be replayed."""
    stream._refuse_capture(call, why)


@contextlib.contextmanager
def ordered_after(stream: Stream) -> Iterator[Stream]:
    """The stream itself; where it was closed, a stream that comes after its work, for the length of the block.

    Meanwhile no other thread closes it: what ends later uses streams that their owners may be closing.
    """
    with stream._in_use:
        if not stream._closed:
            yield stream
            return
    # A stream for this alone: a default stream would make others wait as well.
    with stream.device.create_stream() as substitute:
        if stream._last is not None and not stream._last.closed:
            substitute.wait(stream._last)
        else:
            order_after_context(substitute)
        yield substitute


def order_after_context(stream: Stream) -> None:
    """Let later work of a stream wait for all that its device's context has queued so far."""
    stream.wait(context_event(stream.device))


def order_handle_after(handle: int, ours: Stream) -> None:
    """Let later work of a stream that other code names by its handle wait for all that ``ours`` has queued."""
    door = ours._door
    if handle in _DEFAULT_HANDLES or ours._handle is None:
        Stream.of_handle(ours.device, handle, None).wait(ours)
        return
    event = ours.record()  # alive until the other stream waits: the driver's is used again after that
    result = door.cuStreamWaitEvent(cuda.CUstream(handle), event._raw, 0)[0]
    if result:
        raise error_from(result, "cuStreamWaitEvent")
