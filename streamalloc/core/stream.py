"""Streams and events: thin owners of the driver's, and the acceptance of everybody else's.

A stream is a queue of work that one device runs in order; an event marks a point in it. Both are what allocation and
free are ordered by. Kernels and graph building are other libraries' business: their streams are accepted wherever
ours are (:func:`as_stream`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from streamalloc.core.door import Door
from streamalloc.core.errors import CaptureError, ClosedError, NotReadyError
from streamalloc.core.ownership import Closes
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture, CaptureMode, Graph

__all__ = ["Event", "Stream", "StreamLike", "as_stream"]


StreamLike: TypeAlias = Union["Stream", Any]
"""A :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy, PyTorch or Numba stream."""

# Handles that name a stream of whichever context is current, rather than one stream (driver API, "Stream handles").
_LEGACY = 1
_PER_THREAD = 2
_DEFAULT_HANDLES = (0, _LEGACY, _PER_THREAD)

# Stands where a handle would, for streams that need more than the hot path does. The bindings refuse it with a
# TypeError, so that a hot path which meets it falls through to the slow one; None would mean the legacy default
# stream to them.
_NOT_DIRECT = "not a handle"


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
        "_foreign",
        "_handle",
        "_last",
        "_raw",
        "_sees_all",
        "device",
    )

    device: Device
    """The device that runs the stream's work."""

    def __init__(self, device: Device, raw: Any, *, foreign: object | None = None, non_blocking: bool = False) -> None:
        door = device._door
        self.device = device
        self._raw = raw
        self._foreign = foreign
        self._door = door
        self._capture: Capture | None = None
        self._closed = False
        self._default = int(raw) in _DEFAULT_HANDLES
        # Whether a query sees all that later work would wait for: that of a blocking stream does not see what the
        # legacy stream has to do, while the legacy stream's sees the work of all blocking streams.
        self._sees_all = non_blocking or int(raw) in (0, _LEGACY)
        self._last: Event | None = None
        # What the hot path uses: the handle where it can go straight to the driver, and the door to compare with its
        # own.
        self._handle: Any = _NOT_DIRECT
        self._direct: Door | None = None
        self._allow_direct()

    @classmethod
    def of_handle(cls, device: Device, handle: int, owner: object) -> Self:
        """A stream of ``device`` that other code made and ``owner`` keeps; closing it leaves the driver's alone."""
        return cls(device, cuda.CUstream(handle), foreign=owner)

    def _allow_direct(self) -> None:
        # Other code may capture its own streams without our knowing, so those are looked at each time.
        if not (self._default or self._closed or self._capture or self._foreign is not None):
            self._handle = self._raw
            self._direct = self._door

    def _forbid_direct(self) -> None:
        self._handle = _NOT_DIRECT
        self._direct = None

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream``) as a number.

        Raises
        ------
        ClosedError
            The stream was closed.
        """
        return int(self._checked_raw())

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
            raise CaptureError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900, call, why)

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
            raise CaptureError(
                "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900, "cuStreamGetFlags", "ask after the capture"
            )
        return not int(self._call("cuStreamGetFlags")) & int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def _checked_raw(self) -> Any:
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        return self._raw

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

        ``event`` is recorded again if given; otherwise one is made, which can measure time if ``timing``.
        """
        raw = self._checked_raw()
        if event is None:
            event = Event(self.device, timing=timing)
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event, not {type(event).__name__} ({event!r})")
        elif event._door is not self._door:
            raise ValueError(f"{event!r} belongs to another driver than {self!r}")
        with self._context():
            self._door.call("cuEventRecord", event._checked_raw(), raw)
        event._capture = self._capture
        return event

    def wait(self, other: Event | StreamLike) -> None:
        """Let later work of this stream wait for an event, or for all that another stream has queued so far.

        Events of cuda.core and of the bindings are taken too. The host does not wait (``cuStreamWaitEvent``).
        """
        self._checked_raw()
        foreign = _foreign_event(other)
        if foreign is not None:
            self._call("cuStreamWaitEvent", foreign, 0)
            return
        if not isinstance(other, Event):
            other = as_stream(other, self._door).record()
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
        self._call("cuStreamSynchronize")
        self._door.reap()

    def query(self) -> bool:
        """Whether all work queued so far is done (``cuStreamQuery``)."""
        try:
            self._call("cuStreamQuery")
        except NotReadyError:
            return False
        return True

    def call(self, function: Callable[[], object]) -> None:
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
            raise CaptureError(
                "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
                900,
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
            raise CaptureError(
                "CUDA_ERROR_ILLEGAL_STATE",
                401,
                "cuStreamDestroy",
                "the stream is being captured; end the capture first",
            )
        if self._foreign is None and not self.is_default:
            # Buffers that remain need to know when the stream's work was done, to be freed after it.
            self._last = self.record()
        self._closed = True
        self._forbid_direct()
        if self._last is not None:
            self._door.call("cuStreamDestroy", self._raw)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version 0 and the handle, for other libraries."""
        return (0, self.handle)

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._foreign is not None or self.is_default or not self._door.usable:
            return
        self._closed = True
        self._door.driver.cuStreamDestroy(self._raw)

    def __repr__(self) -> str:
        what = {0: "legacy default", _LEGACY: "legacy default", _PER_THREAD: "per-thread default"}.get(int(self._raw))
        state = " closed" if self._closed else " capturing" if self._capture else ""
        return f"<Stream {what or hex(int(self._raw))} of device {self.device.ordinal}{state}>"


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Callbacks must outlive their call, which the driver makes at a time of its own.
_host_functions: dict[int, Any] = {}


class Event(Closes):
    """A point in a stream's work, recorded by :meth:`Stream.record`.

    Parameters
    ----------
    device
        The device whose streams can record it.
    timing
        Whether :meth:`elapsed_since` works; events that do not measure time are cheaper.
    blocking_sync
        Whether :meth:`synchronize` sleeps rather than spins.
    interprocess
        Whether other processes can open it; such an event cannot measure time.
    """

    __slots__ = ("__weakref__", "_capture", "_closed", "_door", "_raw", "device", "interprocess")

    interprocess: bool
    """Whether other processes can open it."""

    def __init__(
        self, device: Device, *, timing: bool = False, blocking_sync: bool = False, interprocess: bool = False
    ) -> None:
        self._closed = True
        if timing and interprocess:
            raise ValueError(
                "interprocess=True: an event that other processes can open cannot measure time (timing=True)"
            )
        kinds = cuda.CUevent_flags
        flags = (
            (0 if timing else int(kinds.CU_EVENT_DISABLE_TIMING))
            | (int(kinds.CU_EVENT_BLOCKING_SYNC) if blocking_sync else 0)
            | (int(kinds.CU_EVENT_INTERPROCESS) if interprocess else 0)
        )
        self.device = device
        self.interprocess = bool(interprocess)
        self._door = device._door
        self._capture: Capture | None = None
        with device.current():
            self._raw = self._door.call("cuEventCreate", flags)
            self._closed = False

    @classmethod
    def _of_handle(cls, device: Device, raw: Any) -> Self:
        """Take over an event that another process made."""
        event = cls.__new__(cls)
        event.device = device
        event.interprocess = False
        event._door = device._door
        event._capture = None
        event._raw = raw
        event._closed = False
        return event

    @property
    def handle(self) -> int:
        """The driver's handle (``CUevent``) as a number.

        Raises
        ------
        ClosedError
            The event was closed.
        """
        return int(self._checked_raw())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def _checked_raw(self) -> Any:
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        return self._raw

    def query(self) -> bool:
        """Whether the work before the event is done; True if it was never recorded (``cuEventQuery``)."""
        try:
            self._door.call("cuEventQuery", self._checked_raw())
        except NotReadyError:
            return False
        return True

    def synchronize(self) -> None:
        """Block the host until the work before the event is done (``cuEventSynchronize``)."""
        self._door.call("cuEventSynchronize", self._checked_raw())
        self._door.reap()

    def elapsed_since(self, start: Event) -> float:
        """Milliseconds between two recorded events that measure time (``cuEventElapsedTime``).

        Raises
        ------
        InvalidHandleError
            One of them does not measure time, was not recorded, or is of another device.
        NotReadyError
            The work before one of them is not done.
        """
        return float(
            self._door.call(
                "cuEventElapsedTime",
                start._checked_raw(),
                self._checked_raw(),
                hint="both events must be made with timing=True and recorded on the same device",
            )
        )

    def close(self) -> None:
        """Destroy the event (``cuEventDestroy``); streams that wait for it go on waiting. Idempotent."""
        if not self._closed:
            self._closed = True
            self._door.call("cuEventDestroy", self._raw)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._door.usable:
            self._closed = True
            self._door.driver.cuEventDestroy(self._raw)

    def __repr__(self) -> str:
        return f"<Event {int(self._raw):#x} of device {self.device.ordinal}{' closed' if self._closed else ''}>"


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


def _foreign_event(event: object) -> Any | None:
    """The driver's event behind one of cuda.core or of the bindings; None for anything else."""
    if isinstance(event, cuda.CUevent):
        return event
    if type(event).__module__.startswith("cuda.core") and hasattr(event, "is_done"):
        return cuda.CUevent(int(getattr(event, "handle", 0)))
    return None


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
            raise ValueError(f"{stream!r} belongs to another driver: {stream._door.driver!r}, not {door.driver!r}")
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
    return Stream(Device(int(ordinal), driver=door.driver), raw, foreign=stream)
