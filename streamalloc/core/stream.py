"""Streams: queues of work that one device runs in order.

The package makes streams, and borrows default streams and those of other libraries, which are accepted wherever ours
are (:mod:`streamalloc.core.stream_resolution`).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, cast

from streamalloc.core.awaiting import finished_once
from streamalloc.core.deferred import OFTEN, Deferred, deferred_queue, refused_to_end, work
from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    NotReadyError,
    error_from,
    refused,
)
from streamalloc.core.event import Event, EventLike, Spares, destroy_event, foreign_event, is_done
from streamalloc.core.host_functions import queue_host_function
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
from streamalloc.core.stream_ends import LateEnd, defer_end
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture, CaptureMode, Graph

T = TypeVar("T")

StreamLike: TypeAlias = Union["Stream", SupportsCudaStream, TorchStreamLike, CuPyStreamLike, NumbaStreamLike]
"""A :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy, PyTorch or Numba stream."""


# Handles that name a stream of whichever context is current, rather than one stream (driver API, "Stream handles").
LEGACY = 1
PER_THREAD = 2
DEFAULT_HANDLES = (0, LEGACY, PER_THREAD)
_NO_LISTS: Mapping[object, Any] = MappingProxyType({})
NOT_CAPTURED = (cuda.CUresult.CUDA_SUCCESS, cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
"""Answer of ``cuStreamIsCapturing`` for a stream that is not captured."""
_INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE

moment: Callable[[], int] = itertools.count().__next__
"""A number that grows with each call, on any thread."""


class Kind(enum.Enum):
    """Owner of the driver's stream, which never changes."""

    MADE = enum.auto()
    """The package made the stream (``cuStreamCreateWithPriority``), and alone destroys it."""
    DEFAULT = enum.auto()
    """A default stream of a context, which nobody destroys."""
    BORROWED = enum.auto()
    """Other code made the stream, destroys it, and may capture it."""


_MADE = Kind.MADE
_DEFAULT = Kind.DEFAULT
_BORROWED = Kind.BORROWED


class Stream(Closes, Shown):
    """A stream of one device.

    Made by :meth:`Device.create_stream`, :attr:`Device.default_stream` or :attr:`Device.per_thread_stream`;
    :meth:`of_handle` borrows other libraries' streams. Closing destroys a stream that
    :meth:`Device.create_stream` made (``cuStreamDestroy``): the driver finishes the work that is queued, and nothing
    waits for it. Nothing here ends any other stream.
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
        "_number",
        "_owner",
        "_plain",
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
    """The name that :meth:`Device.create_stream` was given; empty for a stream without one."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a Stream is made by Device.create_stream, or borrowed by Stream.of_handle")

    def _prepare(self, device: Device, kind: Kind, raw: Any, owner: object, *, plain: bool, name: str = "") -> None:
        self.device = device
        self.name = name
        # Before it has the handle: the finaliser of a stream whose making was interrupted looks at the kind.
        self._kind = kind
        self._owner = owner
        """Object that keeps the driver's stream alive."""
        self._plain = plain
        """Whether fast paths may take the stream as long as nothing else forbids it."""
        self._session = device._session
        self._capture: Capture | None = None
        self._closed = True
        self._last: list[Event] = []
        """Once the stream is closed or dropped, an event after all its work; see :func:`end_of`."""
        self._spare = Spares()
        self._in_use = threading.RLock()
        """Held by who closes the stream or begins to capture it, and by what uses it on other threads than its owner's.
        """
        self._forbid_direct()
        self._asks: Callable[[], Any] = int
        """Question before a call goes straight to the driver, where there is one: ``cuCtxGetCurrent`` for a default
        stream, that of ``open_check`` for a stream that its library may close.
        """
        self._closed_at: int | None = None
        """The :func:`moment` at which its library was found to have closed it: when its work ends is not known."""
        # Question and answer while its library has it open; None for streams that nobody else closes.
        self.open_check: tuple[Callable[[], Any], Any] | None = None
        self._threads: Threads | None = None
        """For the per-thread default stream, and those that stand for one of its threads."""
        self._thread = 0
        """Number of the thread that it stands for, see :func:`of_this_thread`; else 0."""
        self._weak_owner: Callable[[], object] | None = None
        """Reference to the library's object of a kept stream; None for streams that hold their owner."""
        self._dropping: list[None] = []
        """An entry for each finaliser that frees memory on the stream now, for :meth:`close`."""
        self._raw = raw
        self._endings: list[Deferred] = []
        """Items that end before the stream is closed."""
        self._before_work: list[Deferred] = []
        """Items to attempt before more work is queued, see :func:`queue_behind`."""
        self._attempting: list[int] = []
        """Identifiers of the threads that attempt ``_before_work``."""

    def _open(self, *, non_blocking: bool = False) -> None:
        number = self._number = int(self._raw)
        # The legacy stream is never captured, and captures of our own streams are recorded here.
        self._foreign_captures = self._kind is _BORROWED or number == PER_THREAD
        # A query of a blocking stream does not see the work of the legacy stream, for which later work waits; a query
        # of the legacy stream sees the work of all blocking streams.
        self._sees_all = non_blocking or number in (0, LEGACY)
        self._closed = False
        self._allow_direct()

    @classmethod
    def _create(cls, device: Device, blocking: bool, priority: int, name: str = "") -> Self:
        flags = cuda.CUstream_flags.CU_STREAM_DEFAULT if blocking else cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = cls.__new__(cls)
        stream._prepare(device, _MADE, None, None, plain=True, name=name)
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
        """A stream of ``device`` that other code made; neither closing nor dropping the object destroys it.

        Parameters
        ----------
        device
            The device of the stream.
        handle
            The driver's ``CUstream`` as a number; 0, 1 and 2 are the default streams.
        owner
            An object that keeps the driver's stream alive; it is referenced. None if the caller does that.
        direct
            Whether allocations may go straight to the driver as on a stream of :meth:`Device.create_stream`, and be
            cached for it. The caller has to check before each that the stream is not being captured. No difference
            for default streams, of which there is one object for each device.
        """
        if handle in DEFAULT_HANDLES:
            from streamalloc.core.stream_resolution import default_stream

            return cast("Self", default_stream(device, handle))
        stream = cls.__new__(cls)
        stream._prepare(device, _BORROWED, cuda.CUstream(handle), owner, plain=direct)
        stream._open()
        return stream

    # -- fast paths --------------------------------------------------------------------------------------------

    def _forbid_direct(self) -> None:
        """Have every call take its slow path; :mod:`streamalloc.core.session` describes the slots."""
        self._handle: Any = None
        """``CUstream``: calls that queue work may go straight to the driver; else None."""
        self._answer: Any = None
        """Answer to ``_asks`` with which a call may go straight to the driver; None while no call may."""
        self._direct: Session | None = None
        """Session: allocations may go straight to the driver without a question; else None."""
        self.free_lists: Mapping[object, Any] = _NO_LISTS
        """Free lists of caches by their keys, for the fast paths of caches; empty if those may not be used."""

    _shut_after_fork = _forbid_direct

    def _allow_direct(self) -> None:
        if self._closed or self._capture or self._before_work:
            return
        if self._kind is _DEFAULT:
            if deferred_queue(self._session).captures:
                self._answer = None  # The slow path asks whether a blocking stream is captured.
                return
            # The handle stands for a stream of whichever context is current.
            self._asks = self._session.cuCtxGetCurrent
            self._answer = (cuda.CUresult.CUDA_SUCCESS, self._session.context(self.device.ordinal))
            self._session.shut_with_me(self)
            return
        if self.open_check is not None:
            self._asks, self._answer = self.open_check
            return
        self._handle = self._raw
        if self._plain:
            self._direct = self._session

    def _asked_handle(self) -> Any | None:
        """``CUstream`` of a stream without ``_handle`` if a call may go straight to the driver now.

        That is a default stream whose context is the thread's current one, or a stream that its library has not closed.
        """
        answer, asks = self._answer, self._asks
        try:
            return self._raw if answer is not None and asks() == answer else None
        except Exception:  # the library's object has died, or does not answer
            return None

    def _drop_handle(self, buffer: Any) -> Any | None:
        """As :meth:`_asked_handle`, for a finaliser that frees a buffer.

        A free on the legacy stream would break the capture of a blocking stream; ``cuStreamIsCapturing`` answers an
        error then. The handle of a per-thread stream stands for another stream on each thread.
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
        """Close a kept stream whose library's object has died; ``destroyed``: and with it the driver's stream."""
        if self._session.usable:
            if not self._closed and (destroyed or self.open_check is not None or self._endings):
                self._close_by_library()
            self.close()

    def _replaced(self) -> None:
        """End what ends with the stream, while another object of its library names the driver's stream."""
        for item in tuple(self._endings):
            with contextlib.suppress(CudaError):
                deferred_queue(self._session).end(item)
        if self._endings:
            self._outlived()

    def _holding(self) -> Stream:
        """This stream, or for a kept one a stream that keeps the library's object alive."""
        owner = self._weak_owner and self._weak_owner()
        return self if owner is None else self._of_library(owner)

    def _of_library(self, owner: object) -> Stream:
        """This stream of a library as one that keeps the library's object."""
        stream = Stream.of_handle(self.device, self._number, owner)
        stream._ask_before_use(open_check(owner, self._number, weak=False))
        return stream

    def _ask_before_use(self, check: tuple[Callable[[], Any], Any] | None) -> None:
        """Ask before each use whether the library has closed the stream."""
        if check is not None:
            self._forbid_direct()
            self.open_check = check
            self._allow_direct()
            closable_streams(self._session).add(self)

    def _close_by_library(self) -> None:
        """Close a stream that its library has closed: the end of its work is not known."""
        self._closed_at = now = moment()
        latest = latest_closed(self._session)
        latest[now] = self
        # Another thread may be here with a later one, which stays.
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

        Raises
        ------
        ClosedError
            The stream was closed.
        """
        self._notify_lent(self._checked_raw(), used=False)
        return self._number

    def _notify_lent(self, raw: Any, used: bool) -> None:
        """Notify the listener that other code has the stream, or (``used``) queues work on it."""
        listener = self._session.listener
        if listener is not None:
            with self._context():
                listener.lent(raw, used)

    @property
    def is_default(self) -> bool:
        """Whether it is one of the device's default streams (legacy or per-thread)."""
        return self._kind is _DEFAULT

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the library closed its stream."""
        if self.open_check is not None and not self._closed:
            asks, answer = self.open_check
            try:
                is_open = asks() == answer
            except Exception:
                is_open = False
            if not is_open:
                self._close_by_library()
        return self._closed

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a graph (``cuStreamIsCapturing``)."""
        return int(self._call("cuStreamIsCapturing")) != 0

    def _captured(self) -> bool:
        """Whether the stream is being captured, without a driver call for a stream that was made here."""
        # A capture of other code on its own stream, or on a default stream, is not recorded here.
        return self._capture is not None or (self._kind is not _MADE and self.capturing)

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

    # -- work --------------------------------------------------------------------------------------------------

    def _checked_raw(self) -> Any:
        if self._closed or (self.open_check is not None and self.closed):
            raise ClosedError(f"{self!r} was closed{'' if self.open_check is None else ', here or by its library'}")
        if self._before_work and threading.get_ident() not in self._attempting:
            self._attempt_before_work()
        return self._raw

    def _attempt_before_work(self, *items: Deferred) -> None:
        """Attempt ``items``, by default all of ``_before_work``; allow fast paths again if none is left."""
        me = threading.get_ident()
        try:
            self._attempting += (me,)  # without a call, whose return a signal handler could follow
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

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """The device's context made current, where the handle means nothing without one."""
        return self.device.current() if self._kind is _DEFAULT else contextlib.nullcontext()

    def _call(self, name: str, *args: Any) -> Any:
        """A driver call whose first argument is this stream."""
        raw = self._checked_raw()
        with self._context():
            return self._session.call(name, raw, *args)

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Record an event after the work queued so far, and return it (``cuEventRecord``).

        ``event`` is recorded again if given; otherwise one is made, which can measure time if ``timing``. Events that
        were made here and closed are used again.
        """
        handle, spare = self._handle or self._asked_handle(), self._spare
        if handle is None or timing:
            return self._record_slowly(event, timing)
        if type(event) is Event and event._session is self._session and event._raw is not None:
            result = event._session.cuEventRecord(event._raw, handle)[0]
            if result:
                raise error_from(result, "cuEventRecord")
            event._capture = None
            return event
        if event is None and spare:
            again = Event.__new__(Event)
            again.device = self.device
            again.interprocess = False
            again._session = session = self._session
            again._capture = None
            again._spare = spare
            try:
                again._raw = spare.pop()
            except IndexError:  # another thread took it
                return self._record_slowly(None, timing)
            result = session.cuEventRecord(again._raw, handle)[0]
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
            if not (self._closed or self._capture or timing):
                event._spare = self._spare
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event, not {type(event).__name__} ({event!r})")
        elif event._session is not self._session:
            raise ValueError(f"{event!r} belongs to another driver than {self!r}")
        with self._context():
            self._session.call("cuEventRecord", event._checked_raw(), raw)
        event._capture = self._capture
        return event

    def wait(self, other: Event | EventLike | StreamLike) -> None:
        """Let later work of this stream wait for an event, or for all that another stream has queued so far.

        Events of cuda.core and of the bindings are taken too. The host does not wait (``cuStreamWaitEvent``).
        """
        handle, session = self._handle or self._asked_handle(), self._session
        if handle is not None:
            if type(other) is Event:
                raw = other._raw
                if raw is not None and other._capture is None and other._session is session:
                    result = session.cuStreamWaitEvent(handle, raw, 0)[0]
                    if result:
                        raise error_from(result, "cuStreamWaitEvent")
                    return
            else:
                if type(other) is Stream:
                    source: Any = other
                else:
                    source, owner = session.latest_stream
                    if owner() is not other:
                        source = kept_stream(other, session)
                if source is not None and source._session is session and source._order(handle):
                    return
        self._wait_slowly(other)

    def _order(self, handle: Any) -> bool:
        """Let the stream with this ``CUstream`` wait for all queued work, by an event that was used before.

        Returns
        -------
        bool
            False if there is no such event, or calls may not go straight to the driver.
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
                # The other stream goes on waiting for this record after the event is recorded again.
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
            return
        if not isinstance(other, Event):
            from streamalloc.core.stream_resolution import as_stream

            ordered = as_stream(cast("StreamLike", other), self._session)
            other = (kept_stream(other, self._session) or ordered).record()
        elif other._session is not self._session:
            raise ValueError(f"{other!r} belongs to another driver than {self!r}")
        if other._capture is None or other._capture is self._capture:
            self._call("cuStreamWaitEvent", other._checked_raw(), 0)
            return
        # Waiting for an event of a captured stream pulls this stream into the same capture.
        with self._in_use:
            self._call("cuStreamWaitEvent", other._checked_raw(), 0)
            other._capture.adopt(self)

    def synchronize(self) -> None:
        """Block the host until all work queued so far is done (``cuStreamSynchronize``).

        This is also where the driver sees that frees have run: it makes their memory available to every stream and
        releases what exceeds the release threshold.
        """
        handle = self._handle or self._asked_handle()
        if handle is not None:
            result = self._session.cuStreamSynchronize(handle)[0]
            if result:
                raise error_from(result, "cuStreamSynchronize")
        else:
            self._call("cuStreamSynchronize")
        work(self._session, OFTEN)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine of :mod:`asyncio` for the work queued so far; the loop runs other tasks meanwhile.

        As ``await stream.record()`` (:meth:`Event.__await__`). Work that is queued during the wait is not waited for.
        """
        refuse_capture(self, "cuEventQuery", "await it after the capture")
        return finished_once(self.record()).__await__()

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

        queue_host_function(function, lambda *arguments: self._call("cuLaunchHostFunc", *arguments))

    def capture(self, mode: CaptureMode = "global") -> contextlib.AbstractContextManager[Graph]:
        """Record what is queued in a ``with`` block into a graph instead of running it (``cuStreamBeginCapture``).

        Yields the :class:`Graph`, which is complete when the block ends. Allocations and frees
        become nodes of the graph. The driver refuses calls that a graph cannot contain: those of all threads with
        ``mode="global"``, those of this thread with ``"thread_local"``, and none with ``"relaxed"``.
        """
        from streamalloc.core.graph import Capturing

        return Capturing(self, mode)

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the use of the stream, and destroy it if :meth:`Device.create_stream` made it (``cuStreamDestroy``).

        Queued work still runs. Buffers allocated on it stay valid. Idempotent. Default streams stay open.
        """
        if self._closed or self._kind is _DEFAULT:
            return
        if self._capture is not None:
            raise refused(CaptureError, "cuStreamDestroy", "the stream is being captured; end the capture first")
        if self._kind is not _MADE:
            self._end_use()
            return
        with self._in_use:
            if self.closed:  # by another thread meanwhile
                return
            for item in tuple(self._endings):
                # If the driver refuses, the item is attempted again later.
                with contextlib.suppress(CudaError):
                    deferred_queue(self._session).end(item)
            self._endings.clear()
            # Buffers that remain need to know when the stream's work was done, to be freed after it.
            self._last[:] = [self.record()]
            defer_end(self._session, self._last[0])
            self._spare.end(self._session)
            # A finaliser enters itself before it reads the handle, so that none uses it after these lines.
            self._forbid_direct()
            self._closed = True
            if self._dropping:
                deferred_queue(self._session).submit(LateEnd(self._session, self._raw, self._dropping))
                return
            result = self._session.driver.cuStreamDestroy(self._raw)[0]
        if result:
            refused_to_end(self._session, "cuStreamDestroy", self._raw, result)
            raise error_from(result, "cuStreamDestroy")

    def _thread_ended(self, here: bool) -> None:
        """Close the per-thread default stream of one thread. Called by a finaliser, ``here`` if on that thread."""
        if here and self._endings:
            with contextlib.suppress(CudaError), self._session.relaxed():
                if not self.capturing:
                    self._record_end(self._raw)
        if self._endings and not self._last:
            self._close_by_library()
        else:
            self._end_use()

    def _record_end(self, raw: Any) -> None:
        """Record an event after all work of a stream that ends, for what has to come after it."""
        last = Event(self.device)
        with self._context():
            self._session.call("cuEventRecord", last._raw, raw)
        self._last.append(last)
        defer_end(self._session, last)

    def _end_use(self) -> None:
        """Close a stream that other code made. A finaliser may be the caller."""
        self._forbid_direct()
        self._closed = True
        self._spare.end(self._session)
        for item in tuple(self._endings):
            deferred_queue(self._session).submit(item)
        self._endings.clear()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version 0 and the handle, for other libraries."""
        self._notify_lent(self._checked_raw(), used=True)
        return (0, self._number)

    def __del__(self) -> None:
        # A stream whose making was interrupted has a handle, and counts as closed.
        raw = getattr(self, "_raw", None)
        if raw is None or not self._session.usable:
            return
        if self._kind is not _MADE:
            self._spare.end(self._session)
            return
        if not self._closed or not self._last:
            # Buffers of the same garbage cycle may come after their stream, and so does what ends with it.
            if self._capture is None:
                with contextlib.suppress(CudaError), self._session.relaxed():
                    if self._endings or self._session.driver.cuStreamQuery(raw)[0]:
                        self._record_end(raw)
            self._closed = True
            self._forbid_direct()
            self._spare.end(self._session)
            destroy = self._session.driver.cuStreamDestroy
            self._raw = None
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


class Threads(threading.local):
    """The threads that use the per-thread default stream of a device: what the calling one has."""

    number = 0
    """A number that no other thread has or had; 0 before :func:`of_this_thread`."""
    stream: Stream | None = None
    end: object = None


created_streams: PerDriver[weakref.WeakSet[Stream]] = PerDriver(lambda _: weakref.WeakSet())
"""Open and closed streams of :meth:`Device.create_stream`."""
closable_streams: PerDriver[weakref.WeakSet[Stream]] = PerDriver(lambda _: weakref.WeakSet())
"""Streams that their library may close."""
awaited_ends: PerDriver[set[Stream]] = PerDriver(lambda _: set())
"""Streams that their library has closed, until the end of their work is known, if memory waits for that."""
latest_closed: PerDriver[dict[int, Stream]] = PerDriver(lambda _: {})
"""The stream of each device that its library was found last to have closed, by the moment of that."""


# -- what the areas need of streams --------------------------------------------------------------------------


def raw_handle(stream: Stream) -> Any:
    """The driver's ``CUstream``; raises :class:`ClosedError` where the stream was closed."""
    return stream._checked_raw()


def stream_call(stream: Stream, name: str, *args: Any) -> Any:
    """A driver call whose first argument is the stream."""
    return stream._call(name, *args)


def is_borrowed(stream: Stream) -> bool:
    """Whether other code made the stream, and may capture it."""
    return stream._kind is _BORROWED


def direct_spares(stream: StreamLike, session: Session) -> Spares | None:
    """The spare events, which outlive it, of an open stream that we made and that is not being captured; else None."""
    if type(stream) is Stream and stream._direct is session and stream._kind is not _BORROWED:
        return stream._spare
    return None


def end_with_stream(stream: Stream, item: Deferred) -> None:
    """Have ``item`` end before the stream is closed, or after it was dropped."""
    deferred_queue(stream._session).end_with(stream, item)
    stream._endings.append(item)


def keeps_alive(stream: Stream) -> Stream | None:
    """A stream that keeps the object for which ``stream`` is kept; None where its death destroys no stream.

    CuPy's and Numba's objects destroy their stream when they die. Those of other libraries may be closed at any time.
    """
    owner = stream._weak_owner and stream._weak_owner()
    if owner is None or stream.open_check is not None or only_names(owner):
        return None
    return stream._of_library(owner)


def sees_all_work(stream: Stream) -> bool:
    """Whether a query of the stream covers all work that later work of the stream waits for."""
    return stream._sees_all


def refuse_capture(stream: Stream, call: str, why: str) -> None:
    """Raise :class:`CaptureError` where the stream is being captured; ``call`` is what would not be replayed."""
    if stream._captured():
        raise refused(CaptureError, call, f"the stream is being captured; {why}")


def end_of(stream: Stream) -> list[Event]:
    """The list that gets an event after all work of a stream when the stream is closed or dropped.

    The list stays empty if the driver refuses to record the event.
    """
    return stream._last


_named: PerDriver[weakref.WeakValueDictionary[int, Stream]] = PerDriver(lambda _: weakref.WeakValueDictionary())


def name_of_stream(session: Session, handle: int) -> str:
    """The name of the open stream with a handle; empty for a stream without one."""
    stream = _named(session).get(handle)
    return "" if stream is None or stream.closed else stream.name


def spare_events(stream: Stream) -> set[int]:
    """Handles of the closed events that a stream keeps to record again."""
    return {int(raw) for raw in tuple(getattr(stream, "_spare", ()))}
