"""Streams: queues of work that one device runs in order.

The package makes streams of its own. It accepts default streams and streams of other libraries in the same places
(:mod:`streamalloc.core.stream_resolution`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, cast

from streamalloc.core.deferred import MOST_PER_SYNC, Deferred, HandleEnd, deferred_queue, refused_to_end, work
from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    NotReadyError,
    error_from,
    refused,
    undoing,
)
from streamalloc.core.event import (
    Event,
    EventLike,
    Spares,
    defer_end,
    destroy_event,
    finished,
    foreign_event,
    is_done,
)
from streamalloc.core.html import Row, Shown
from streamalloc.core.library_streams import (
    CuPyStreamLike,
    NumbaStreamLike,
    SupportsCudaStream,
    TorchStreamLike,
    kept_stream,
    only_names,
    open_check,
)
from streamalloc.core.resource import Closes
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import RLock, cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture, CaptureMode, Graph

T = TypeVar("T")

StreamLike: TypeAlias = Union["Stream", SupportsCudaStream, TorchStreamLike, CuPyStreamLike, NumbaStreamLike]
"""A :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy, PyTorch or Numba stream."""


# Handles that name a stream of the current context, whichever that is (driver API, "Stream handles").
LEGACY = 1
PER_THREAD = 2
DEFAULT_HANDLES = (0, LEGACY, PER_THREAD)
_NO_LISTS: Mapping[object, Any] = MappingProxyType({})
NOT_CAPTURED = (cuda.CUresult.CUDA_SUCCESS, cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
"""Answer of ``cuStreamIsCapturing`` for a stream that is not being captured."""
_INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_host_functions: dict[int, Any] = {}
"""Callbacks of host functions, by address, until the driver has called them."""

moment: Callable[[], int] = itertools.count().__next__
"""Returns a higher number at each call, on any thread."""


class Kind(enum.Enum):
    """Owner of the driver's stream. It never changes."""

    MADE = enum.auto()
    """Made by the package (``cuStreamCreateWithPriority``), which alone destroys it."""
    DEFAULT = enum.auto()
    """A default stream of a context. It is never destroyed."""
    BORROWED = enum.auto()
    """Made by other code, which destroys it and may capture it."""


_MADE = Kind.MADE
_DEFAULT = Kind.DEFAULT
_BORROWED = Kind.BORROWED


class Stream(Closes, Shown):
    """A stream of one device.

    Made by :meth:`Device.create_stream`, :attr:`Device.default_stream` or :attr:`Device.per_thread_stream`;
    :meth:`of_handle` borrows other libraries' streams. Closing destroys a stream that :meth:`Device.create_stream` made
    (``cuStreamDestroy``). The host does not wait, and the driver still finishes the queued work. Other streams are
    never destroyed by this object.
    """

    __slots__ = (
        "__weakref__",
        "_answer",
        "_asks",
        "_attempting",
        "_before_work",
        "_capture",
        "_closed",
        "_closed_at",
        "_direct",
        "_dropping",
        "_endings",
        "_foreign_captures",
        "_handle",
        "_in_use",
        "_kind",
        "_last",
        "_may_be_direct",
        "_number",
        "_owner",
        "_raw",
        "_sees_all",
        "_session",
        "_spare",
        "_thread",
        "_threads",
        "_weak_owner",
        "device",
        "free_lists",
        "name",
        "open_check",
    )

    device: Device
    """The device that runs the stream's work."""
    name: str
    """Name given to :meth:`Device.create_stream`; may be empty."""
    # The slots for fast paths, which :mod:`streamalloc.core.session` describes.
    _handle: Any
    """``CUstream`` for direct calls that queue work; None to forbid them."""
    _answer: Any
    """Result of ``_asks`` that allows a direct call; None to forbid them."""
    _asks: Callable[[], Any]
    """Called before a direct call, if ``_answer`` is set."""
    _direct: Session | None
    """Session for direct allocations without a check; None to forbid them."""
    free_lists: Mapping[object, Any]
    """Free lists for the caches' fast paths, by key; empty if forbidden."""
    open_check: tuple[Callable[[], Any], Any] | None
    """Function, and its result while the library has the stream open; None if no other code closes the stream.
    ``_asks`` and ``_answer`` are the two while direct calls are allowed.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a Stream is made by Device.create_stream, or borrowed by Stream.of_handle")

    def _prepare(
        self, device: Device, kind: Kind, raw: Any, owner: object, *, may_be_direct: bool, name: str = ""
    ) -> None:
        self.device = device
        self.name = name
        # Set before the handle: if construction is interrupted, the finaliser reads the kind.
        self._kind = kind
        self._owner = owner
        """Object that keeps the driver's stream alive."""
        self._may_be_direct = may_be_direct
        """Whether fast paths may use the stream if nothing else forbids it."""
        self._session = device._session
        self._capture: Capture | None = None
        self._foreign_captures = False
        """Whether other code may capture the stream, so that only the driver knows whether it is being captured."""
        self._closed = True
        self._last: list[Event] = []
        """After close or drop: an event after all work, see :func:`end_of`."""
        self._spare = Spares()
        self._in_use = RLock()
        """Held while the stream is closed, a capture begins, or another thread uses it."""
        self._forbid_direct()
        self._asks = int
        self._closed_at: int | None = None
        """The :func:`moment` at which a close by the library was noticed."""
        self.open_check = None
        self._threads: Threads | None = None
        """Thread-local data; set for per-thread default streams only."""
        self._thread = 0
        """Number of its thread, see :func:`of_this_thread`; 0 for other streams."""
        self._weak_owner: Callable[[], object] | None = None
        """Reference to the kept library object; None if the stream holds it."""
        self._dropping: list[None] = []
        """One entry per finaliser that is freeing memory on the stream."""
        self._raw = raw
        self._endings: list[Deferred] = []
        """Items that end before the stream is closed."""
        self._before_work: list[Deferred] = []
        """Items to attempt before more work, see :func:`queue_behind`."""
        self._attempting: list[int] = []
        """Identifiers of threads that are attempting ``_before_work``."""

    def _open(self, *, non_blocking: bool = False) -> None:
        number = self._number = int(self._raw)
        # The legacy stream cannot be captured. No other code knows a stream made here, until :meth:`_lend`.
        self._foreign_captures = self._kind is _BORROWED or number == PER_THREAD
        # Later work of a blocking stream waits for the legacy stream, but a query of it does not cover the legacy
        # stream. A query of the legacy stream covers all blocking streams.
        self._sees_all = non_blocking or number in (0, LEGACY)
        self._closed = False
        self._allow_direct()

    @classmethod
    def _create(cls, device: Device, blocking: bool, priority: int, name: str = "") -> Self:
        flags = cuda.CUstream_flags.CU_STREAM_DEFAULT if blocking else cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = cls.__new__(cls)
        stream._prepare(device, _MADE, None, None, may_be_direct=True, name=name)
        with device.current():
            stream._session.create(stream, "_raw", "cuStreamCreateWithPriority", int(flags), priority)
        stream._open(non_blocking=not blocking)
        created_streams(stream._session).add(stream)
        if name:
            _named(stream._session)[stream._number] = stream
        listener = stream._session.listener
        if name and listener is not None:
            listener.named(stream._raw, name)
        return stream

    @classmethod
    def of_handle(cls, device: Device, handle: int, owner: object, *, direct: bool = False) -> Self:
        """Borrow a stream of ``device`` that other code made. Closing or dropping the object does not destroy the
        stream.

        Parameters
        ----------
        device
            The device of the stream.
        handle
            The driver's ``CUstream`` as a number; 0, 1 and 2 are the default streams.
        owner
            An object that keeps the driver's stream alive, referenced by this object. None if the caller keeps it
            alive.
        direct
            Whether allocations use the fast path and caches, as on a stream of :meth:`Device.create_stream`. The caller
            must check before each that the stream is not being captured. No effect for default streams, which have one
            object per device.
        """
        if handle in DEFAULT_HANDLES:
            from streamalloc.core.stream_resolution import default_stream

            return cast("Self", default_stream(device, handle))
        stream = cls.__new__(cls)
        stream._prepare(device, _BORROWED, cuda.CUstream(handle), owner, may_be_direct=direct)
        stream._open()
        return stream

    # -- fast paths --------------------------------------------------------------------------------------------

    def _forbid_direct(self) -> None:
        """Make every call take its slow path."""
        self._handle = self._answer = self._direct = None
        self.free_lists = _NO_LISTS

    _shut_after_fork = _forbid_direct

    def _allow_direct(self) -> None:
        if self._closed or self._capture or self._before_work or deferred_queue(self._session).forbidding:
            return
        if self._kind is _DEFAULT:
            if deferred_queue(self._session).captures:
                self._answer = None  # The slow path checks whether a blocking stream is captured.
                return
            # The handle names a stream of the current context.
            self._asks = self._session.cuCtxGetCurrent
            self._answer = (cuda.CUresult.CUDA_SUCCESS, self._session.context(self.device.ordinal))
            self._session.shut_with_me(self)
            return
        if self.open_check is not None:
            self._asks, self._answer = self.open_check
            return
        self._handle = self._raw
        if self._may_be_direct:
            self._direct = self._session

    def _lend(self) -> None:
        """From now on other code may capture the stream: ask the driver before memory of a capture can be meant."""
        self._foreign_captures = True
        self._may_be_direct = False
        self._direct = None
        self.free_lists = _NO_LISTS

    def _notice_joining(self) -> None:
        """Ask whether a wait has made a stream of ours part of a capture by other code."""
        if self._kind is _MADE and not self._foreign_captures and self.capturing:
            self._lend()

    def _asked_handle(self) -> Any | None:
        """``CUstream`` of a stream without ``_handle`` if direct calls are allowed now, else None.

        They are allowed on a default stream whose context is current, and on a stream that its library has not closed.
        """
        answer, asks = self._answer, self._asks
        try:
            return self._raw if answer is not None and asks() == answer else None
        except Exception:  # the library's object is gone or raises
            return None

    def _drop_handle(self, buffer: Any) -> Any | None:
        """As :meth:`_asked_handle`, for a finaliser that frees a buffer.

        A free on the legacy stream would invalidate captures of blocking streams; during one, ``cuStreamIsCapturing``
        returns an error for the legacy stream. The per-thread handle names another stream on each thread.
        """
        answer, asks, raw, threads = self._answer, self._asks, self._raw, self._threads
        try:
            if answer is None or asks() != answer:
                return None
            if threads is not None:
                return raw if buffer._owner == threads.number else None
        except Exception:
            return None
        is_capturing = self._session.cuStreamIsCapturing
        return None if self.open_check is None and is_capturing(raw)[0] else raw

    # -- streams of other libraries ----------------------------------------------------------------------------

    def _outlived(self, destroyed: bool = False) -> None:
        """Close a kept stream whose library object is gone. ``destroyed``: the driver's stream is gone too."""
        if self._session.usable:
            if not self._closed and (destroyed or self.open_check is not None or self._endings):
                self._close_by_library()
            self.close()

    def _replaced(self) -> None:
        """Attempt the items that end with this stream. Another object of the library now has its handle."""
        for item in tuple(self._endings):
            with contextlib.suppress(CudaError):
                deferred_queue(self._session).end(item)
        if self._endings:
            self._outlived()

    def _holding(self) -> Stream:
        """This stream, or one that also keeps the library's object alive."""
        owner = self._weak_owner and self._weak_owner()
        return self if owner is None else self._of_library(owner)

    def _of_library(self, owner: object) -> Stream:
        """A copy of this stream that keeps the library's object alive."""
        stream = Stream.of_handle(self.device, self._number, owner)
        stream._ask_before_use(open_check(owner, self._number, weak=False))
        return stream

    def _ask_before_use(self, check: tuple[Callable[[], Any], Any] | None) -> None:
        """Before each use, check whether the library has closed the stream."""
        if check is not None:
            self._forbid_direct()
            self.open_check = check
            self._allow_direct()
            closable_streams(self._session).add(self)

    def _close_by_library(self) -> None:
        """Close a stream that its library has closed. The end of its work is unknown."""
        self._closed_at = now = moment()
        latest = latest_closed(self._session)
        latest[now] = self
        # Another thread may have added a later one, which stays.
        for moment_of_other in [*latest]:
            other = latest.get(moment_of_other) if moment_of_other < now else None
            if other is not None and other.device.ordinal == self.device.ordinal:
                latest.pop(moment_of_other, None)
        if self._endings:  # They ask the stream for that end.
            awaited_ends(self._session).add(self)
        self._end_use()

    # -- properties --------------------------------------------------------------------------------------------

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream``) as a number.

        Other code may capture a stream that it has the handle of. So from the first read on, allocations on the stream,
        and allocations and frees of a :class:`CachingAllocator`, ask the driver (``cuStreamIsCapturing``).

        Raises
        ------
        ClosedError
            The stream was closed.
        """
        self._notify_lent(self._checked_raw(), used=False)
        return self._number

    def _notify_lent(self, raw: Any, used: bool) -> None:
        """Record that other code gets the handle, or (``used``) queues work on the stream."""
        if not self._foreign_captures and self._kind is _MADE:
            self._lend()
        listener = self._session.listener
        if listener is not None:
            with self._context():
                listener.lent(raw, used)

    @property
    def is_default(self) -> bool:
        """Whether this is a default stream of the device (legacy or per-thread)."""
        return self._kind is _DEFAULT

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the stream's library closed it."""
        notice_close(self)
        return self._closed

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a graph (``cuStreamIsCapturing``)."""
        return int(self._call("cuStreamIsCapturing")) != 0

    def _captured(self) -> bool:
        """Whether the stream is being captured. This needs no driver call if only this package knows the stream."""
        if self._capture is not None:
            return True
        return (self._foreign_captures or self._kind is _DEFAULT) and self.capturing

    @property
    def priority(self) -> int:
        """The stream's priority; lower numbers run first (``cuStreamGetPriority``)."""
        return int(self._call("cuStreamGetPriority"))

    @property
    def blocking(self) -> bool:
        """Whether the stream and the legacy default stream wait for each other (``cuStreamGetFlags``).

        Raises
        ------
        CaptureError
            The stream is being captured: the call would invalidate the capture.
        """
        if self._captured():
            raise refused(CaptureError, "cuStreamGetFlags", "it would end the capture of the stream; ask afterwards")
        return not int(self._call("cuStreamGetFlags")) & int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    # -- work --------------------------------------------------------------------------------------------------

    def _checked_raw(self) -> Any:
        if self._closed or (self.open_check is not None and self.closed):
            raise ClosedError(f"{self!r} was closed{'' if self.open_check is None else ', here or by its library'}")
        if self._before_work and threading.get_ident() not in self._attempting:
            self._attempt_before_work()
        return self._raw

    def _attempt_before_work(self, *items: Deferred) -> None:
        """Attempt ``items``, by default all of ``_before_work``. If none is left, allow fast paths again."""
        me = threading.get_ident()
        try:
            self._attempting += (me,)  # no call here: a signal handler could raise after it
            for item in items or tuple(self._before_work):
                # If the driver refuses, the item is attempted again.
                with contextlib.suppress(CudaError), self._session.relaxed():
                    if item.attempt():
                        with contextlib.suppress(ValueError):  # another thread was faster
                            self._before_work.remove(item)
        finally:
            self._attempting.remove(me)
        self._allow_direct()
        # A finaliser may have added an item since the loop ended.
        if self._before_work:
            self._forbid_direct()

    def _context(self) -> contextlib.AbstractContextManager[object]:
        """Make the device's context current if the handle depends on it, and break no capture of another thread."""
        queue = deferred_queue(self._session)
        if self._kind is not _DEFAULT:
            return queue.beside_captures()
        return self._current_beside_captures() if queue.forbids_here else self.device.current()

    @contextlib.contextmanager
    def _current_beside_captures(self) -> Iterator[None]:
        with self._session.relaxed(), self.device.current():
            yield

    def _call(self, name: str, *args: Any) -> Any:
        """A driver call whose first argument is this stream."""
        raw = self._checked_raw()
        with self._context():
            return self._session.call(name, raw, *args)

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Record an event after the work queued so far, and return it (``cuEventRecord``).

        Default: a new event, which can measure time if ``timing``. Closed events of this stream are reused.
        """
        handle, spare = self._handle or self._asked_handle(), self._spare
        if handle is None or timing:
            return self._record_slowly(event, timing)
        if type(event) is Event and event._session is self._session and event._raw is not None:
            result = event._session.cuEventRecord(event._raw, handle)[0]
            if result:
                raise error_from(result, "cuEventRecord")
            event._capture = None
            event._foreign_captures |= self._foreign_captures
            return event
        if event is None and spare:
            again = Event.__new__(Event)
            again.device = self.device
            again.interprocess = False
            again._session = session = self._session
            again._capture = None
            again._foreign_captures = self._foreign_captures
            again._spare = spare
            try:
                again._raw = spare.pop()
            except IndexError:  # another thread took it
                return self._record_slowly(None, timing)
            result = session.cuEventRecord(again._raw, handle)[0]
            if not result:
                return again
            # The event belongs to a context that was reset. Destroy it and make a new one.
            again._spare = None
            if result != _INVALID_HANDLE:
                raise error_from(result, "cuEventRecord")
        return self._record_slowly(event, timing)

    def _record_slowly(self, event: Event | None, timing: bool) -> Event:
        raw = self._checked_raw()
        if event is None:
            event = Event(self.device, timing=timing)
            if not (self._closed or self._capture or timing):
                event._spare = self._spare
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event, not {type(event).__name__} ({event!r})")
        elif event._session is not self._session:
            raise ValueError(f"{event!r} belongs to another driver than {self!r}")
        with self._context():
            self._session.call("cuEventRecord", event._checked_raw(), raw)
        event._capture = self._capture
        event._foreign_captures |= self._foreign_captures
        return event

    def wait(self, other: Event | EventLike | StreamLike) -> None:
        """Order later work of this stream after an event, or after all queued work of another stream.

        Events of cuda.core and of the bindings are accepted. The host does not wait (``cuStreamWaitEvent``).
        """
        handle, session = self._handle or self._asked_handle(), self._session
        if handle is not None:
            if type(other) is Event:
                raw = other._raw
                if raw is not None and other._capture is None and other._session is session:
                    result = session.cuStreamWaitEvent(handle, raw, 0)[0]
                    if result:
                        raise error_from(result, "cuStreamWaitEvent")
                    if other._foreign_captures and not self._foreign_captures:
                        self._notice_joining()
                    return
            else:
                if type(other) is Stream:
                    source: Any = other
                else:
                    source, owner = session.latest_stream
                    if owner() is not other:
                        source = kept_stream(other, session)
                if source is not None and source._session is session and source._order(handle):
                    if source._foreign_captures and not self._foreign_captures:
                        self._notice_joining()
                    return
        self._wait_slowly(other)

    def _order(self, handle: Any) -> bool:
        """Order the stream with this ``CUstream`` after all queued work, by a spare event.

        Returns
        -------
        bool
            False if there is no spare event, or direct calls are not allowed.
        """
        spare, session, ours = self._spare, self._session, self._handle or self._asked_handle()
        if ours is None or not spare:
            return False
        try:
            raw = spare.pop()
        except IndexError:  # another thread took it
            return False
        result = None
        try:
            result, call = session.cuEventRecord(raw, ours)[0], "cuEventRecord"
            if not result:
                # The wait refers to this record, even if the event is recorded again later.
                result, call = session.cuStreamWaitEvent(handle, raw, 0)[0], "cuStreamWaitEvent"
        finally:
            if result:
                destroy_event(session, raw)
            else:
                spare.append(raw)
                spare.end_if_closed(session)
        if result and result != _INVALID_HANDLE:  # of an event whose context was reset
            raise error_from(result, call)
        return not result

    def _wait_slowly(self, other: Event | EventLike | StreamLike) -> None:
        self._checked_raw()
        foreign = foreign_event(other)
        if foreign is not None:
            self._call("cuStreamWaitEvent", foreign, 0)
            self._notice_joining()
            return
        if not isinstance(other, Event):
            from streamalloc.core.stream_resolution import as_stream

            ordered = as_stream(cast("StreamLike", other), self._session)
            other = (kept_stream(other, self._session) or ordered).record()
        elif other._session is not self._session:
            raise ValueError(f"{other!r} belongs to another driver than {self!r}")
        if other._capture is None or other._capture is self._capture:
            self._call("cuStreamWaitEvent", other._checked_raw(), 0)
            if other._foreign_captures:
                self._notice_joining()
            return
        # A wait for an event of a captured stream adds this stream to the capture.
        with self._in_use:
            self._call("cuStreamWaitEvent", other._checked_raw(), 0)
            other._capture.adopt(self)

    def synchronize(self) -> None:
        """Block the host until all work queued so far is done (``cuStreamSynchronize``).

        The driver then makes the memory of completed frees available to every stream, and releases memory above the
        release threshold.
        """
        handle = self._handle or self._asked_handle()
        if handle is not None:
            result = self._session.cuStreamSynchronize(handle)[0]
            if result:
                raise error_from(result, "cuStreamSynchronize")
        else:
            self._call("cuStreamSynchronize")
        work(self._session, MOST_PER_SYNC)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine of :mod:`asyncio` for the work queued so far. The loop runs other tasks meanwhile.

        Equivalent to ``await stream.record()`` (:meth:`Event.__await__`). Work queued during the wait is not included.
        """
        refuse_capture(self, "cuEventQuery", "await it after the capture")

        async def wait() -> None:
            with self.record() as event:
                await finished(event)

        return wait().__await__()

    def query(self) -> bool:
        """Whether all work queued so far is done (``cuStreamQuery``)."""
        handle = self._handle or self._asked_handle()
        if handle is not None:
            return is_done(self._session.cuStreamQuery(handle)[0], "cuStreamQuery")
        try:
            self._call("cuStreamQuery")
        except NotReadyError:
            return False
        return True

    def launch_host_func(self, function: Callable[[], object]) -> None:
        """Queue a Python function in stream order; the driver calls it on its own thread (``cuLaunchHostFunc``).

        The function must not call the driver. An exception in it goes to ``sys.unraisablehook``, and the stream
        continues.

        Raises
        ------
        CaptureError
            The stream is being captured. The bindings free the host function's data after its first call, so a second
            launch of the graph would crash.
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
        with undoing(lambda: _host_functions.pop(pointer, None)):
            self._call("cuLaunchHostFunc", cuda.CUhostFn(pointer), pointer)

    def capture(self, mode: CaptureMode = "global") -> contextlib.AbstractContextManager[Graph]:
        """Record the work of a ``with`` block into a graph instead of running it (``cuStreamBeginCapture``).

        Yields the :class:`Graph`, which is complete when the block ends. Allocations and frees become nodes of the
        graph. The driver refuses calls that are unsafe during a capture: on all threads with ``mode="global"``, on this
        thread with ``"thread_local"``, on none with ``"relaxed"``.
        """
        from streamalloc.core.graph import Capture

        return Capture(self, mode)

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the use of the stream, and destroy it if :meth:`Device.create_stream` made it (``cuStreamDestroy``).

        Queued work still runs. Buffers allocated on it stay valid. Idempotent. Default streams stay open.
        """
        if self._closed or self._kind is _DEFAULT:
            return
        if self._capture is not None or (self._kind is _MADE and self._captured()):
            raise refused(CaptureError, "cuStreamDestroy", "the stream is being captured; end the capture first")
        if self._kind is not _MADE:
            self._end_use()
            return
        with self._in_use:
            if self.closed:  # by another thread meanwhile
                return
            for item in tuple(self._endings):
                # If the driver refuses, a later point of work attempts the item again.
                with contextlib.suppress(CudaError):
                    deferred_queue(self._session).end(item)
            self._endings.clear()
            # Remaining buffers are freed after this event.
            self._last[:] = [self.record()]
            defer_end(self._session, self._last[0])
            self._spare.end(self._session)
            # A finaliser adds its entry before it reads the handle, so after these lines no new one uses the handle.
            self._forbid_direct()
            self._closed = True
            if self._dropping:
                deferred_queue(self._session).submit(_LateEnd(self._session, self._raw, self._dropping))
                return
            result = self._session.driver.cuStreamDestroy(self._raw)[0]
        if result:
            refused_to_end(self._session, "cuStreamDestroy", self._raw, result)
            raise error_from(result, "cuStreamDestroy")

    def _thread_ended(self, here: bool) -> None:
        """Close the per-thread default stream of one thread. For finalisers; ``here``: on that thread."""
        if here and self._endings:
            with contextlib.suppress(CudaError), self._session.relaxed():
                if not self.capturing:
                    self._record_end(self._raw)
        if self._endings and not self._last:
            self._close_by_library()
        else:
            self._end_use()

    def _record_end(self, raw: Any) -> None:
        """Record an event after all work of a stream that is ending."""
        last = Event(self.device)
        with self._context():
            self._session.call("cuEventRecord", last._raw, raw)
        self._last.append(last)
        defer_end(self._session, last)

    def _end_use(self) -> None:
        """Close a stream that other code made. For finalisers too."""
        self._forbid_direct()
        self._closed = True
        self._spare.end(self._session)
        for item in tuple(self._endings):
            deferred_queue(self._session).submit(item)
        self._endings.clear()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version 0 and the handle, for other libraries' use."""
        self._notify_lent(self._checked_raw(), used=True)
        return (0, self._number)

    def __del__(self) -> None:
        # A stream whose construction was interrupted may have a handle; it counts as closed.
        raw = getattr(self, "_raw", None)
        if raw is None or not self._session.usable:
            return
        if self._kind is not _MADE:
            self._spare.end(self._session)
            return
        if not self._closed or not self._last:
            # Buffers of this garbage cycle may be finalised later, and need an event after the stream's work.
            is_capturing = self._session.driver.cuStreamIsCapturing
            captured = self._foreign_captures and is_capturing(raw) != NOT_CAPTURED
            if self._capture is None and not captured:
                with contextlib.suppress(CudaError), self._session.relaxed():
                    if self._endings or self._session.driver.cuStreamQuery(raw)[0]:
                        self._record_end(raw)
            self._closed = True
            self._forbid_direct()
            self._spare.end(self._session)
            destroy = self._session.driver.cuStreamDestroy
            self._raw = None
            if captured:
                deferred_queue(self._session).submit(_LateEnd(self._session, raw, []))
                return
            result = destroy(raw)[0]
            if result:
                refused_to_end(self._session, "cuStreamDestroy", raw, result)

    def _about(self) -> Iterator[Row]:
        if self.name:
            yield "name", self.name
        yield "handle", f"{int(self._checked_raw()):#x}"
        yield "device", self.device
        with self._session.relaxed():
            yield "state", "capturing" if self._captured() else "idle" if self.query() else "has work to do"

    def _text(self) -> str:
        kind = {0: "legacy default", LEGACY: "legacy default", PER_THREAD: "per-thread default"}.get(self._number)
        name = f" {self.name!r}" if self.name else ""
        state = " closed" if self._closed else " capturing" if self._capture else ""
        return f"{name} {kind or hex(self._number)} of device {self.device.ordinal}{state}"


class _LateEnd(HandleEnd):
    """Destruction of a stream that was closed while finalisers on other threads freed memory on it, or dropped while
    other code captured it.
    """

    __slots__ = ("_dropping",)

    def __init__(self, session: Session, raw: Any, dropping: list[None]) -> None:
        super().__init__(session, "cuStreamDestroy", raw)
        self._dropping = dropping

    def attempt(self) -> bool:
        result, status = self._session.cuStreamIsCapturing(self._raw)
        return not (self._dropping or (not result and status)) and super().attempt()


class Threads(threading.local):
    """Thread-local data of a device's per-thread default stream."""

    number = 0
    """Number of the thread, never reused; 0 before :func:`of_this_thread`."""
    stream: Stream | None = None
    end: object = None


created_streams: PerDriver[weakref.WeakSet[Stream]] = PerDriver(lambda _: weakref.WeakSet())
"""Streams of :meth:`Device.create_stream`, open or closed."""
closable_streams: PerDriver[weakref.WeakSet[Stream]] = PerDriver(lambda _: weakref.WeakSet())
"""Streams that their library may close."""
awaited_ends: PerDriver[set[Stream]] = PerDriver(lambda _: set())
"""Streams closed by their library while memory waits for their work."""
latest_closed: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""The latest stream per device that its library closed, by :func:`moment`."""


# -- what the areas need of streams --------------------------------------------------------------------------


def raw_handle(stream: Stream) -> Any:
    """The stream's ``CUstream``; raises :class:`ClosedError` if it was closed."""
    return stream._checked_raw()


def stream_call(stream: Stream, name: str, *args: Any) -> Any:
    """Call driver function ``name`` with the stream as its first argument."""
    return stream._call(name, *args)


def is_borrowed(stream: Stream) -> bool:
    """Whether other code made the stream, and may capture it."""
    return stream._kind is _BORROWED


def may_be_captured(stream: Stream) -> bool:
    """Whether other code may capture the stream, so that only the driver knows whether it is being captured."""
    return stream._foreign_captures


def is_captured(stream: Stream) -> bool:
    """Whether a stream that can be captured is being captured (``cuStreamIsCapturing`` if other code may do so)."""
    return stream._capture is not None or (stream._foreign_captures and stream.capturing)


def direct_spares(stream: StreamLike, session: Session) -> Spares | None:
    """The spare events of an open stream that is not being captured; None for borrowed streams. They outlive the
    stream.
    """
    if type(stream) is Stream and stream._direct is session and stream._kind is not _BORROWED:
        return stream._spare
    return None


def end_with_stream(stream: Stream, item: Deferred) -> None:
    """Attempt ``item`` before the stream is closed, or after it was dropped."""
    deferred_queue(stream._session).end_with(stream, item)
    stream._endings.append(item)


def keeps_alive(stream: Stream) -> Stream | None:
    """A stream that keeps alive the library object of ``stream``; None if the object's end destroys no stream.

    CuPy's and Numba's objects destroy their stream in their finaliser. Streams of other libraries may be closed at any
    time.
    """
    owner = stream._weak_owner and stream._weak_owner()
    if owner is None or stream.open_check is not None or only_names(owner):
        return None
    return stream._of_library(owner)


def sees_all_work(stream: Stream) -> bool:
    """Whether a query of the stream covers all work that the stream's later work waits for."""
    return stream._sees_all


def notice_close(stream: Stream) -> None:
    """Mark a stream as closed if its library has closed it: the close then counts from now on."""
    if stream.open_check is not None and not stream._closed:
        asks, answer = stream.open_check
        try:
            is_open = asks() == answer
        except Exception:
            is_open = False
        if not is_open:
            stream._close_by_library()


def refuse_capture(stream: Stream, call: str, why: str) -> None:
    """Raise :class:`CaptureError` if the stream is being captured; ``call`` names the call for the error."""
    if stream._captured():
        raise refused(CaptureError, call, f"the stream is being captured; {why}")


def end_of(stream: Stream) -> list[Event]:
    """The list that gets an event after all of a stream's work when the stream is closed or dropped.

    The list stays empty if the driver refuses the record.
    """
    return stream._last


_named: PerDriver[weakref.WeakValueDictionary[int, Stream]] = PerDriver(lambda _: weakref.WeakValueDictionary())


def name_of_stream(session: Session, handle: int) -> str:
    """The name of the open stream with this handle; empty if it has none."""
    stream = _named(session).get(handle)
    return "" if stream is None or stream.closed else stream.name


def spare_events(stream: Stream) -> set[int]:
    """Handles of a stream's spare events."""
    return {int(raw) for raw in tuple(getattr(stream, "_spare", ()))}
