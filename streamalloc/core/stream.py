"""Streams: queues of work that one device runs in order.

There are three kinds: streams of :meth:`Device.create_stream` (:class:`OwnStream`), default streams
(:class:`DefaultStream`), and streams of other libraries (:mod:`~streamalloc.core.library_streams`). Each kind answers
in one method, :meth:`Stream.ready`, whether this thread may call the driver at once, and with which handle. These are
asked:

====================  =====================================================  ==========================================
kind                  before any call                                        before an allocation, too
====================  =====================================================  ==========================================
our own               nothing                                                the driver, for a capture, if other code
                                                                             has the handle
legacy default        the driver, for the current context                    nothing: it cannot be captured
per-thread default    the driver, for the current context; the thread's id   the driver, for a capture
another library's     the library's object, if its users can close it        the driver, for a capture
====================  =====================================================  ==========================================

* *The current context and the thread:* the handle of a default stream names a stream of the current context, and the
  handle of the per-thread stream names another stream on each thread. On the wrong stream, a free would not come after
  the work that uses the memory.
* *The library's object:* the driver crashes on the handle of a destroyed stream.
* *A capture by other code:* memory allocated in a capture belongs to the graph, and each launch writes this memory
  again. If it were handed out as memory of a pool, each launch would overwrite the bytes of a later owner. Only
  ``cuStreamIsCapturing`` reports a capture and leaves it valid; ``cuStreamGetId`` and ``cuStreamGetFlags`` invalidate
  it. A free needs no query: in a capture the driver refuses to free memory of a pool, and the capture stays valid.

Three attributes are the state behind these questions:

* ``usable`` is True unless something forbids direct calls: the stream is closed or captured by this package, has an
  item to attempt before more work, or this package captures any stream in the mode ``"global"``. Default streams are
  also not usable during other captures of this package.
* ``direct`` is the handle if the stream is usable and nothing is to be queried before a call (the second column);
  otherwise None. It saves the call of the method: callers write ``stream.direct or stream.ready()``.
* ``capturable`` is True if the driver has to be queried before an allocation (the third column).

These names report captures. *The error* is CaptureError while a blocking stream is being captured: the driver then
refuses to answer for the legacy stream.

=========================  ==============================  ======================  =================  ==================
name                       who is asked                    the legacy stream       raises             in a finaliser
=========================  ==============================  ======================  =================  ==================
``_capture``               nobody: the capture by this     None                    nothing            yes
                           package that the stream is in
``capturable``             nobody                          False                   nothing            yes
``queue.captures``         nobody: the captures by this    with one, not           nothing            yes
                           package, of any stream          ``usable``
:func:`captures_changed`   ``queue.captures``, for all     with one, not           nothing            no
                           streams                         ``usable``
:func:`captured`           the driver                      False, or the error     CudaError          no, compare with
                                                                                                      ``NOT_CAPTURED``
:attr:`Stream.capturing`   the driver, if ``capturable``   False, or the error     CudaError,         no
                           or without ``direct``                                   ClosedError
:func:`may_be_captured`    ``capturing``                   False; for the error,   nothing: returns   bridges do, of
                                                           True                    False              default streams
``refuse_capture``         ``capturing``                   passes, or the error    those,             no
                                                                                   CaptureError
``run_uncaptured``         ``_capture``; if None, the      calls, or the error     those,             no
                           driver, if ``capturable`` or a                          CaptureError
                           default stream
``record_uncaptured``      ``capturing``, before and       the error, also in any  those; None if     no: takes locks
                           after the record                capture of ours         captured
=========================  ==============================  ======================  =================  ==================

If there is no handle, callers make a checked call (:meth:`Stream.checked_call`), which repairs what it can, and raises
an error otherwise:

* :meth:`Stream.checked_raw` raises :class:`ClosedError` for a closed stream, and attempts the items.
* :meth:`Stream.of_this_thread` replaces a per-thread default stream of another thread by the per-thread stream of this
  thread, for work that is queued. :meth:`Stream.covering` replaces it by the legacy stream, for what comes after its
  work.
* :meth:`Stream.in_context` makes the context current, and protects captures of other threads.
* :func:`captured` asks for a capture: memory is then allocated for the graph, memory of the graph is freed in it, and
  other calls raise :class:`CaptureError` (:meth:`Stream.run_uncaptured`).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, Union, cast

from streamalloc.core.deferred import MOST_PER_SYNC, Deferred, HandleEnd, deferred_queue, end_handle, work
from streamalloc.core.errors import CaptureError, ClosedError, CudaError, error_from, refused
from streamalloc.core.event import (
    Event,
    EventLike,
    Spares,
    defer_end,
    finished,
    foreign_event,
    has_passed,
    is_done,
)
from streamalloc.core.properties import checked_function
from streamalloc.core.resource import Closes, above
from streamalloc.core.session import PerDriver, Session, members, sessions
from streamalloc.driver.internal import SETTLERS, RLock, ThreadLocal, cuda
from streamalloc.formats.html import Row, Shown

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture, CaptureMode, Graph

T = TypeVar("T")


class SupportsCudaStream(Protocol):
    """An object with ``__cuda_stream__``, such as a cuda.core stream. The method returns the version of the protocol,
    which is 0, and the handle.
    """

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStreamLike(Protocol):
    """Type of PyTorch's streams; ``cuda_stream`` is the handle."""

    @property
    def cuda_stream(self) -> int: ...


class CuPyStreamLike(Protocol):
    """Type of CuPy's streams; ``ptr`` is the handle."""

    @property
    def ptr(self) -> int: ...


class NumbaStreamLike(Protocol):
    """Type of Numba's streams; ``handle`` is a pointer of ctypes, or a ``CUstream`` of the bindings."""

    @property
    def handle(self) -> Any: ...


StreamLike: TypeAlias = Union["Stream", SupportsCudaStream, TorchStreamLike, CuPyStreamLike, NumbaStreamLike]
"""A :class:`Stream`, an object with ``__cuda_stream__``, or a CuPy, PyTorch or Numba stream."""


# Handles that name a default stream of whichever context is current at the call.
LEGACY = 1
PER_THREAD = 2
DEFAULT_HANDLES = (0, LEGACY, PER_THREAD)
NOT_CAPTURED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
"""Status of a stream that is not being captured. Frequent calls and finalisers compare a status with it by ``is``. If
the driver refuses the query, it returns None in place of a status, and the stream counts as captured. All other code
asks by :func:`captured`.
"""
_AWAITED = "other must be an Event, a Stream"
_INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_host_functions: dict[int, Any] = {}
"""Ctypes callbacks by address. Each is kept alive until the driver has called it."""


def _queue_host_function(stream: Stream, function: Callable[[], object]) -> None:
    """Queue a new C callback that calls ``function`` once (``cuLaunchHostFunc``). The driver also gets its address as
    its argument, by which it removes itself from ``_host_functions``.
    """
    checked_function("function", function)
    why = "the bindings let a Python function run once, and a graph may be launched more often"
    # These two lines may raise, so they come before the callback is made: only its call by the driver releases it.
    stream.refuse_capture("cuLaunchHostFunc", why)
    launch = stream._session._function("cuLaunchHostFunc")

    def run(token: int | None) -> None:
        try:
            function()
        finally:
            _host_functions.pop(token or 0, None)

    callback = _HOST_FUNCTION(run)
    pointer = ctypes.cast(callback, ctypes.c_void_p).value or 0
    _host_functions[pointer] = callback
    result = stream._result(launch, cuda.CUhostFn(pointer), pointer)
    if result:
        _host_functions.pop(pointer, None)
        raise error_from(result, "cuLaunchHostFunc")


class Stream(Closes, Shown):
    """A stream of one device.

    Made by :meth:`Device.create_stream`, :attr:`Device.default_stream` or :attr:`Device.per_thread_stream`;
    :meth:`of_handle` borrows other libraries' streams. A close or a drop destroys only a stream that
    :meth:`Device.create_stream` made (``cuStreamDestroy``). The host does not wait, and the driver still finishes the
    queued work. Methods that need the handle raise ClosedError after :meth:`close`, and after the stream's library has
    closed the stream.

    During a capture (:meth:`capture`) the driver refuses calls that are unsafe, such as a synchronisation, a query, or
    an allocation on another stream: on all threads in the mode ``"global"``, on the capturing thread in the mode
    ``"thread_local"``. In the mode ``"relaxed"`` it only refuses calls about the work of the captured stream or of its
    device. A refused call raises CaptureError, and makes the capture invalid. On other threads, this package makes its
    calls in the relaxed mode.
    """

    __slots__ = (
        "__weakref__", "_attempting", "_before_work", "_capture", "_closed", "_in_use", "_number", "_raw", "_session",
        "_spare", "capturable", "device", "direct", "drained", "endings", "free_lists", "usable",
    )  # fmt: skip

    _inner = (
        "call", "capturable", "checked_call", "checked_raw", "covering", "direct", "endings", "free_lists",
        "in_context", "last", "of_this_thread", "ready", "refuse_capture", "run_uncaptured",
        "sees_all_work", "thread", "usable",
    )  # fmt: skip

    device: Device
    """The device that runs the stream's work."""
    name: str = ""
    """Name given to :meth:`Device.create_stream`; empty if none was given, and for other streams."""
    is_default: bool = False
    """Whether this is a default stream of the device (legacy or per-thread)."""
    sees_all_work: bool = False
    """Whether ``cuStreamQuery`` covers all work that the stream's later work waits for."""
    last: Sequence[Event] = ()
    """One event after all work of a closed or dropped stream of ours. If the event is closed, it has completed. Empty
    if the stream is open or the record failed.
    """
    _dropping: list[None] = []  # noqa: RUF012 (of streams that we never destroy, so nobody reads it)
    """One entry per finaliser that is freeing memory on the stream; an entry prevents the stream's destruction."""
    direct: Any
    """``CUstream`` if work may be queued now without a check, else None."""
    usable: bool
    """Whether direct calls and reuse of cached memory are allowed; the text of the module says when they are not."""
    thread: int | None = None
    """Identifier of the only thread that may queue work on a per-thread default stream; None for other streams."""
    free_lists: dict[object, dict[int, Any]]
    """Free lists of caches, by the cache's key: dicts of lists of blocks, by ``(nbytes - 1) // 512`` of a request."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a Stream is made by Device.create_stream, or borrowed by Stream.of_handle")

    def _prepare(self, device: Device, raw: Any, *, capturable: bool) -> None:
        self.device = device
        self._session = device._session
        self._capture: Capture | None = None
        """The capture by this package that the stream takes part in."""
        self.capturable = capturable
        """Whether other code may capture the stream: only the driver then reports whether a capture is under way."""
        self._closed = True
        self._spare = Spares()
        self._in_use = RLock()
        """Lock held while the stream is being closed, a capture begins, or a deferred item uses the stream."""
        self.endings: list[Deferred] = []
        """Deferred releases to attempt when the stream ends: by a close of our own stream, otherwise by the queue."""
        self._before_work: list[Deferred] = []
        """Deferred releases to attempt before more work is queued, see :func:`queue_behind`."""
        self._attempting: list[int] = []
        """Identifiers of threads that are attempting ``_before_work``."""
        self.drained = False
        """Whether the device was found idle at some time after the close of the stream, which then has no work left."""
        self.free_lists = {}
        self._forbid_direct()
        # Set last, because the finaliser does nothing for an object without a handle.
        self._raw = raw

    def _open(self) -> None:
        self._number = int(self._raw)
        self._closed = False
        known_streams(self._session).add(self)
        self._allow_direct()

    @staticmethod
    def of_handle(device: Device, handle: int, owner: object) -> Stream:
        """Borrow a stream of ``device`` that other code made and destroys. Raises TypeError if ``device`` is not a
        :class:`Device`, or ``handle`` is not an integer.

        Parameters
        ----------
        device
            The device of the stream.
        handle
            The driver's ``CUstream`` as a number, which is not checked. 0 and 1 give the legacy default stream of
            ``device``, 2 the calling thread's per-thread default stream.
        owner
            Object that keeps the driver's stream alive, and that the result keeps alive; None if the caller keeps the
            driver's stream alive. Not used for default streams.
        """
        return cast("Stream", above.borrowed_stream(device, handle, owner))

    # -- direct calls ------------------------------------------------------------------------------------------

    def ready(self, dropping: bool = False) -> Any | None:
        """Return the ``CUstream`` if this thread may queue work by a direct call now. If the result is None, the caller
        makes a checked call (see the module). ``dropping``: whether the caller is a finaliser that frees memory.
        """
        return self.direct

    def _forbid_direct(self) -> None:
        """Make every later call on the stream a checked call."""
        self.direct = None
        self.usable = False

    _shut_after_fork = _forbid_direct

    def _allow_direct(self) -> None:
        """Allow direct calls, unless the stream is closed, is captured, has items to attempt, or a capture forbids
        them.
        """
        queue = deferred_queue(self._session)
        # Python may switch threads at a call, and the other thread may then close or capture the stream. So no call
        # stands between these tests and the assignments.
        if not (queue.forbidding or self._closed or self._capture or self._before_work):
            self.usable = True
            self.direct = self._raw
        # The other thread may have forbidden direct calls before the assignments allowed them.
        if queue.forbidding or self._closed or self._capture or self._before_work:
            self._forbid_direct()

    # -- checked calls -----------------------------------------------------------------------------------------

    def checked_raw(self) -> Any:
        """Attempt the items of :func:`queue_behind`, and return the ``CUstream``. Raises ClosedError."""
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        if self._before_work and get_ident() not in self._attempting:
            self._attempt_before_work()
        return self._raw

    def _attempt_before_work(self, *items: Deferred) -> None:
        """Attempt ``items``, by default all of ``_before_work``. Allow direct calls again if ``_before_work`` gets
        empty.
        """
        me = get_ident()
        try:
            self._attempting.append(me)
            for item in items or tuple(self._before_work):
                # If the driver refuses, the item stays in the list, and the next call attempts it again.
                with contextlib.suppress(CudaError), self._session.relaxed():
                    if item.attempt():
                        with contextlib.suppress(ValueError):  # Another thread has removed the item meanwhile.
                            self._before_work.remove(item)
        finally:
            self._attempting.remove(me)
        self._allow_direct()

    def in_context(self, act: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call ``act`` while the context that the handle needs is current, and return the result of ``act``. Driver
        calls of ``act`` invalidate no capture that this package makes on another thread.
        """
        with self._session.beside_captures(), self._context():
            return act(*args, **named)

    def _context(self) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which the context that the handle needs is current."""
        return contextlib.nullcontext()

    def checked_call(self, act: Callable[..., T], *args: Any) -> T:
        """Call ``act`` with the ``CUstream``, with whether the stream is being captured, and with ``args``, while the
        context that the handle needs is current (:meth:`in_context`). Returns the result of ``act``. Raises
        ClosedError. For the legacy default stream, raises CaptureError while a blocking stream is being captured.
        """
        raw = self.checked_raw()
        with self._session.beside_captures(), self._context():
            # A query of the legacy stream fails if a blocking stream is captured: the call would end the capture.
            asks = self._capture is None and (self.capturable or self.is_default)
            return act(raw, captured(self._session, raw) if asks else self._capture is not None, *args)

    def run_uncaptured(self, call: str, why: str, act: Callable[..., T], *args: Any) -> T:
        """Call ``act`` with the ``CUstream`` and ``args``, and return the result of ``act``. The call is direct if this
        thread may make one (:meth:`ready`), otherwise as in :meth:`checked_call`. Raises CaptureError if the stream is
        being captured: ``call`` is the name of the driver function that is not called, ``why`` a text with the reason
        and the remedy for the message. Raises ClosedError if the stream was closed.
        """
        handle = self.direct
        if handle is not None and not self.capturable:
            return act(handle, *args)

        def unless_captured(raw: Any, captured: bool) -> T:
            if captured:
                raise _refusal(call, why)
            return act(raw, *args)

        return self.checked_call(unless_captured)

    def refuse_capture(self, call: str, why: str) -> None:
        """Raise the errors of :meth:`run_uncaptured`, whose arguments ``call`` and ``why`` are."""
        if self.capturing:
            raise _refusal(call, why)

    def of_this_thread(self) -> Stream:
        """Return the stream that the handle names on this thread: its own per-thread stream, or this object."""
        return self

    def covering(self) -> Stream:
        """Return a stream whose later work runs after this stream's work: the legacy stream in place of another
        thread's per-thread stream, otherwise this stream.
        """
        return self

    def call(self, name: str, *args: Any) -> Any:
        """Call driver function ``name`` with this stream as its first argument (:meth:`Session.call`). Also raises
        ClosedError if the stream was closed.
        """
        return self.in_context(self._session.call, name, self.checked_raw(), *args)

    def _result(self, call: Any, *args: Any) -> Any:
        """Return the ``CUresult`` of ``call``, a bound driver function whose first argument is this stream."""
        handle = self.direct or self.ready()
        if handle is not None:
            return call(handle, *args)[0]
        return self.in_context(call, self.checked_raw(), *args)[0]

    # -- properties and work -----------------------------------------------------------------------------------

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream``) as a number. Code with the handle may capture the stream, so later
        allocations query the driver whether a capture is under way. Raises ClosedError if the stream was closed.
        """
        self._notify_lent(self.checked_raw(), used=False)
        return self._number

    def _notify_lent(self, raw: Any, used: bool) -> None:
        """Record that other code gets the handle ``raw``, or (with ``used``) that it queues work on the stream."""
        if not self.is_default:
            self.capturable = True
        if self._session.listener is not None:
            self.in_context(self._session.listener.lent, raw, used)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the stream's library closed it. New work then raises ClosedError."""
        return self._closed

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured into a graph (``cuStreamIsCapturing``, if need be). Raises ClosedError
        if the stream was closed. For the legacy default stream, raises CaptureError while a blocking stream is being
        captured.
        """
        return (self.capturable or self.direct is None) and self.in_context(captured, self._session, self.checked_raw())

    @property
    def priority(self) -> int:
        """Priority (``cuStreamGetPriority``). Work of streams with lower numbers runs first. Raises ClosedError if the
        stream was closed.
        """
        return int(self.call("cuStreamGetPriority"))

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        """Record an event after the work queued so far, and return it (``cuEventRecord``).

        Without ``event`` a new :class:`Event` is recorded, which measures time if ``timing``. A given ``event`` keeps
        its own setting. Raises TypeError if ``event`` is not an :class:`Event`, ValueError for another driver's event,
        InvalidHandleError for another device's event, and ClosedError if the event or this stream was closed.
        """
        session = self._session
        handle = self.direct or self.ready()
        raw = self.checked_raw() if handle is None else handle
        reused = False
        if event is None:
            event, reused = _event_of(self, timing)
        elif not isinstance(event, Event):
            raise TypeError(f"event must be an Event, not {type(event).__name__} ({event!r})")
        elif event._session is not session:
            raise ValueError(f"{event!r} belongs to another driver than {self!r}")
        recorded = event._checked_raw()
        record = session.cuEventRecord
        result = (self.in_context(record, recorded, raw) if handle is None else record(recorded, raw))[0]
        if result:
            if reused:
                # Without `_spare`, the finaliser destroys the driver's event instead of keeping it for a later record.
                event._spare = None
                if result == _INVALID_HANDLE:
                    return self.record()  # Reused from a context that was reset: use a new event.
            hint = "" if event.device == self.device else f"{event!r} is not of the device of {self!r}"
            raise error_from(result, "cuEventRecord", hint)
        event._capture = self._capture
        event._foreign_captures |= self.capturable
        return event

    def wait(self, other: Event | EventLike | StreamLike) -> None:
        """Order later work of this stream after an event, or after all queued work of another stream.

        The host does not wait (``cuStreamWaitEvent``). Events of cuda.core and of the bindings are accepted. A wait for
        an event of a capture makes this stream part of the capture. A wait for an event that was never recorded has no
        effect. Raises TypeError if ``other`` is neither event nor stream, ValueError if ``other`` belongs to another
        driver, and ClosedError if ``other`` or this stream was closed.
        """
        session, event = self._session, other
        raw = None if isinstance(other, (Event, Stream)) else foreign_event(other)
        if raw is None:
            if not isinstance(event, Event):
                self.checked_raw()  # Raises before the other stream records an event for nothing.
                event = above.as_stream(other, session, after=True, wanted=_AWAITED).record()
            elif event._session is not session:
                raise ValueError(f"{event!r} belongs to another driver than {self!r}")
            capture, raw = event._capture, event._checked_raw()
            if capture is not None and capture is not self._capture:
                capture.join(self, event)
                return
        result = self._result(session.cuStreamWaitEvent, raw, 0)
        if result:
            raise error_from(result, "cuStreamWaitEvent")
        # The event may be of a capture by other code, and this stream is then a part of that capture. The driver is
        # queried, because `capturing` relies on `capturable`.
        joins = not isinstance(event, Event) or event._foreign_captures
        asks = joins and not self.capturable and not self.is_default
        if asks and self.in_context(captured, session, self.checked_raw()):
            self.capturable = True

    def synchronize(self) -> None:
        """Block the host until all work queued so far is done (``cuStreamSynchronize``). The driver then makes the
        memory of completed frees available to every stream, and releases unused memory of pools above their release
        thresholds. Deferred releases are attempted. Raises ClosedError, and CaptureError during a capture.
        """
        result = self._result(self._session.cuStreamSynchronize)
        if result:
            raise error_from(result, "cuStreamSynchronize")
        work(self._session, MOST_PER_SYNC)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine of :mod:`asyncio` for the work queued so far. The loop runs other tasks meanwhile.

        Equivalent to ``await stream.record()`` (:meth:`Event.__await__`). Raises ClosedError, and while the stream is
        being captured CaptureError, which leaves the capture valid.
        """
        self.refuse_capture("cuEventQuery", "await it after the capture")
        return _finished(self).__await__()

    def query(self) -> bool:
        """Return whether all work queued so far is done (``cuStreamQuery``). Errors as for :meth:`synchronize`."""
        return is_done(self._result(self._session.cuStreamQuery), "cuStreamQuery")

    def launch_host_func(self, function: Callable[[], object]) -> None:
        """Queue a call of a Python function in stream order, on a thread of the driver (``cuLaunchHostFunc``).

        The function must not call the driver. Its exceptions go to ``sys.unraisablehook``, and the stream continues.

        Raises
        ------
        TypeError
            ``function`` is not callable.
        ClosedError, CaptureError
            The stream was closed, or is being captured: a callback can run only once, a graph more often.
        """
        _queue_host_function(self, function)

    def capture(self, mode: CaptureMode = "global") -> contextlib.AbstractContextManager[Graph]:
        """Record the work of a ``with`` block into a graph instead of running it (``cuStreamBeginCapture``).

        ``with`` gives the :class:`Graph`, which is complete when the block ends. Allocations and frees become its
        nodes. If the block raises, the graph is destroyed. :class:`Stream` explains the modes. Raises ValueError for
        another mode, and ClosedError. Raises CaptureError if the stream is being captured already, is the legacy
        default stream, or, at the end of the block, if the capture has become invalid.
        """
        from streamalloc.core.graph import Capture

        return Capture(self, mode)

    # -- close -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the use of the stream, and destroy it if :meth:`Device.create_stream` made it (``cuStreamDestroy``).

        Queued work still runs. Buffers allocated on the stream stay valid. Default streams stay open. Idempotent.
        Raises CaptureError while the stream is being captured, and CudaError if the driver refuses.
        """
        # Subclasses override `_close` instead, so that `Stream.close(stream)` works for streams of every kind.
        self._close()

    def _close(self) -> None:
        """Do what :meth:`close` does for this kind of stream: nothing for default streams."""

    def _submit_endings(self) -> None:
        """Submit the items of ``endings`` to the deferred queue. Takes no lock, so finalisers may call this method."""
        for item in tuple(self.endings):
            deferred_queue(self._session).submit(item)
        self.endings.clear()

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version, 0, and :attr:`handle`, for other libraries. Raises ClosedError."""
        self._notify_lent(self.checked_raw(), used=True)
        return (0, self._number)

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and self._session.usable:
            self._spare.end(self._session)

    def _about(self) -> Iterator[Row]:
        if self.name:
            yield "name", self.name
        yield "handle", f"{int(self.checked_raw()):#x}"
        yield "device", self.device
        with self._session.relaxed():
            yield "state", "capturing" if self.capturing else "idle" if self.query() else "has work to do"

    def _text(self) -> str:
        kind = {0: "legacy default", LEGACY: "legacy default", PER_THREAD: "per-thread default"}.get(self._number)
        name = f" {self.name!r}" if self.name else ""
        state = " closed" if self._closed else " capturing" if self._capture else ""
        return f"{name} {kind or hex(self._number)} of device {self.device.ordinal}{state}"


def _refusal(call: str, why: str) -> CudaError:
    """Return the error for driver function ``call`` that is not called, because the stream is being captured."""
    return refused(CaptureError, call, f"the stream is being captured; {why}")


def captured(session: Session, raw: Any) -> bool:
    """Whether the stream ``raw`` (``CUstream``) is being captured (``cuStreamIsCapturing``). The context of a default
    stream must be current. Raises CaptureError for the legacy default stream while a blocking stream is being captured,
    and CudaError if the driver refuses.
    """
    result, status = session.cuStreamIsCapturing(raw)
    if result:
        raise error_from(result, "cuStreamIsCapturing")
    return status is not NOT_CAPTURED


def may_be_captured(stream: Stream) -> bool:
    """Whether work that is queued on ``stream`` now would become a part of a capture, or would invalidate a capture
    (``cuStreamIsCapturing``). True if the driver refuses to answer because a blocking stream is captured. False for a
    closed stream, and if the driver refuses for another reason: its owner has destroyed the stream.
    """
    try:
        return stream.capturing
    except CaptureError:  # The driver refuses to query the legacy default stream while a blocking stream is captured.
        return True
    except (CudaError, ClosedError):  # The owner of the stream has destroyed it, so no capture can concern it.
        return False


def while_open(stream: Stream, act: Callable[[], T]) -> T:
    """Call ``act`` while no other thread closes ``stream`` or begins to capture it through this package. Returns its
    result.

    If ``stream`` is a default stream, this package begins no capture at all while ``act`` runs, because work on a
    default stream would invalidate captures of blocking streams. Items of :func:`queue_behind` are not attempted,
    because these items take the locks of other streams.
    """
    queue = deferred_queue(stream._session)
    with queue.beginning if stream.is_default else stream._in_use:
        if stream.is_default and queue.captures:
            why = "a stream is being captured, and the call concerns all streams"
            raise refused(CaptureError, "work on a default stream", why)
        return without_items(stream, act)


def without_items(stream: Stream, act: Callable[[], T]) -> T:
    """Call ``act``, and return its result. Work of ``act`` on ``stream`` attempts no items of :func:`queue_behind`.

    For code that holds a lock. An item takes the locks of other streams, and a thread that holds one of them may wait
    for the caller's lock. The caller attempts the items before it takes the lock (:meth:`Stream.checked_raw`).
    """
    me = get_ident()
    try:
        # `append` would be a call, after which a signal handler could raise. The entry would then be left.
        stream._attempting += (me,)
        return act()
    finally:
        stream._attempting.remove(me)


def _event_of(stream: Stream, timing: bool) -> tuple[Event, bool]:
    """Return an event to record on ``stream``, and whether it reuses a closed event of the stream. A new event is made
    if the stream has no closed event, during a capture, and with ``timing``.
    """
    spare = None if timing or stream._capture else stream._spare
    # Python switches no threads between the test and the pop in this line, so no other thread can empty the list in
    # between.
    raw = spare.pop() if spare else None
    if raw is None:
        event = Event(stream.device, timing=timing)
    else:
        event = Event.__new__(Event)
        event._adopt(stream.device, interprocess=False)
        event._raw = raw
    event._spare = spare
    return event, raw is not None


async def _finished(stream: Stream) -> None:
    with stream.record() as event:
        await finished(event)


# -- streams of Device.create_stream -----------------------------------------------------------------------------


class OwnStream(Stream):
    """A stream of :meth:`Device.create_stream`. This object owns the driver's stream and destroys it."""

    __slots__ = ("_dropping", "last", "name", "sees_all_work")

    _dropping: list[None]
    last: list[Event]

    @classmethod
    def _create(cls, device: Device, blocking: bool, priority: int, name: str = "") -> OwnStream:
        flags = cuda.CUstream_flags.CU_STREAM_DEFAULT if blocking else cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = cls.__new__(cls)
        stream.name = name
        stream._dropping = []
        stream.last = []
        # Later work of a blocking stream waits for the legacy stream, but a query of the blocking stream does not cover
        # the legacy stream's work. So only a query of a non-blocking stream covers all work before it.
        stream.sees_all_work = not blocking
        # Not capturable, which saves queries: no other code has the handle yet.
        stream._prepare(device, None, capturable=False)
        stream._session.create_in(device.ordinal, stream, "cuStreamCreateWithPriority", int(flags), priority)
        stream._open()
        if name:
            _named(stream._session)[stream._number] = stream
            if stream._session.listener is not None:
                stream._session.listener.named(stream._raw, name)
        return stream

    def _close(self) -> None:
        if not self._closed:
            # Items of `queue_behind` take the locks of other streams, so they are attempted before this one's is taken.
            with contextlib.suppress(ClosedError):  # Another thread may close the stream meanwhile.
                self.checked_raw()
            while_open(self, self._end)

    def _end(self) -> None:
        if self._closed:  # By another thread.
            return
        self.refuse_capture("cuStreamDestroy", "end the capture first")
        for item in tuple(self.endings):
            # If the driver refuses, the deferred queue attempts the item again later.
            with contextlib.suppress(CudaError):
                deferred_queue(self._session).end(item)
        self.endings.clear()
        # Buffers that are freed later have no stream to be freed on: they are freed after this event.
        self._record_end(self._raw)
        result = self._destroy(self._raw)
        if result:
            raise error_from(result, "cuStreamDestroy")

    def _destroy(self, raw: Any, *, later: bool = False) -> Any:
        """Destroy the driver's stream (``cuStreamDestroy``). With ``later``, or while finalisers are freeing memory on
        the stream, submit an item that destroys it later. Returns the ``CUresult``, or None for an item.
        """
        # A finaliser adds its entry to `_dropping` before it reads the handle. So after the next two lines, only
        # finalisers that have an entry may use the handle.
        self._closed = True
        self._forbid_direct()
        self._spare.end(self._session)
        if later or self._dropping:
            deferred_queue(self._session).submit(_LateEnd(self._session, raw, self._dropping))
            return None
        return end_handle(self._session, "cuStreamDestroy", raw)

    def _record_end(self, raw: Any) -> None:
        """Record an event after all work of the stream, which is ending (``cuEventRecord``). Buffers of the stream that
        are freed later are freed after this event.
        """
        last = Event(self.device)
        self.in_context(self._session.call, "cuEventRecord", last._raw, raw)
        self.last[:] = [last]
        defer_end(self._session, last)

    def __del__(self) -> None:
        # A closed stream with `last` has no handle to destroy. A stream whose construction was interrupted has a handle
        # and `_closed`, but no `last`: its handle must be destroyed, or it would leak.
        raw = getattr(self, "_raw", None)
        if raw is None or not self._session.usable or (self._closed and self.last):
            return
        # Buffers of the same garbage cycle may be finalised later. Their frees need an event after the stream's work.
        is_capturing = self._session.driver.cuStreamIsCapturing
        captured = self.capturable and is_capturing(raw)[1] is not NOT_CAPTURED
        if self._capture is None and not captured:
            with contextlib.suppress(CudaError), self._session.relaxed():
                if self.endings or self._session.driver.cuStreamQuery(raw)[0]:
                    self._record_end(raw)
        self._raw = None
        # While other code captures the stream, destroy it later: cuStreamDestroy would end that capture.
        self._destroy(raw, later=captured)


class _LateEnd(HandleEnd):
    """Queue item that destroys a stream later, because the stream was closed while finalisers on other threads freed
    memory on it, or was dropped while other code captured it.
    """

    __slots__ = ("_dropping",)

    def __init__(self, session: Session, raw: Any, dropping: list[None]) -> None:
        super().__init__(session, "cuStreamDestroy", raw)
        self._dropping = dropping

    def attempt(self) -> bool:
        return not (self._dropping or captured(self._session, self._raw)) and super().attempt()


# -- default streams ---------------------------------------------------------------------------------------------


_numbers = itertools.count(1)


class _ThisThread(ThreadLocal, number=_numbers.__next__):
    """Thread-local attributes."""

    number: int
    """Number of the thread, never reused, unlike ``threading.get_ident``."""


this_thread: _ThisThread = _ThisThread()


class DefaultStream(Stream):
    """A default stream of a device, which no code destroys.

    Its handle names a stream of the current context. Any library may have made another context current since the last
    call, so each direct call reads the current context (``cuCtxGetCurrent``, the cheapest call for this). An allocation
    with its free makes two such reads, which take 24 % of their time. On the per-thread stream the allocation also asks
    whether the stream is being captured, which takes 25 % (H200, driver 580).
    """

    __slots__ = ("_current",)

    is_default = True
    _current: Any
    """The tuple that ``cuCtxGetCurrent`` returns while the stream's context is current."""

    @classmethod
    def _make(cls, device: Device, handle: int) -> Self:
        stream = cls.__new__(cls)
        stream._current = cuda.CUresult.CUDA_SUCCESS, device._session.context(device.ordinal)
        stream._prepare(device, cuda.CUstream(handle), capturable=handle == PER_THREAD)
        stream._open()
        return stream

    def _allow_direct(self) -> None:
        # Not direct during a capture of this package: a checked call finds out whether a blocking stream is captured.
        queue = deferred_queue(self._session)
        self.usable = not (queue.captures or self._capture or self._before_work)
        if queue.captures or self._capture or self._before_work:  # As in the method of the base class.
            self._forbid_direct()

    def _context(self) -> contextlib.AbstractContextManager[None]:
        return self._session.current(self.device.ordinal)

    def _takes_frees(self) -> bool:
        """Whether a finaliser may free on the stream, although the stream is not ``usable``. It frees beside captures
        by this package, in the relaxed mode: otherwise a library that drops its memory then would fill the device.
        """
        return not (self._capture or self._before_work)


class LegacyStream(DefaultStream):
    """The legacy default stream, which synchronises with all blocking streams. It cannot be captured."""

    __slots__ = ()

    sees_all_work = True

    def ready(self, dropping: bool = False) -> Any | None:
        current = self._session.cuCtxGetCurrent  # A function in an attribute is called faster by a local name.
        if current() != self._current or not (self.usable or (dropping and self._takes_frees())):
            return None
        # A free on the legacy stream would invalidate captures of blocking streams. During such a capture
        # cuStreamIsCapturing returns an error for the legacy stream. A finaliser then leaves the free to a deferred
        # item.
        refused = dropping and self._session.cuStreamIsCapturing(self._raw)[1] is not NOT_CAPTURED
        return None if refused else self._raw


class PerThreadStream(DefaultStream):
    """The per-thread default stream of one thread.

    The handle names another stream on each thread, so only the stream's own thread queues work on it directly. If
    another thread frees memory of the stream, the free is queued on the legacy stream, which is ordered after the
    per-thread streams of all threads.
    """

    __slots__ = ("thread",)

    thread: int
    """Identifier (``get_ident``) of the thread. 0 once the thread has ended, because a new thread may get the same
    identifier.
    """

    def _open(self) -> None:
        self.thread = get_ident()
        super()._open()

    def of_this_thread(self) -> Stream:
        return per_thread_stream(self.device)

    def covering(self) -> Stream:
        # Per-thread default streams are blocking streams, so the legacy stream comes after those of all threads.
        return self if self.thread == get_ident() else legacy_stream(self.device)

    # On another thread, the handle names that thread's stream, so a record there would not cover this stream's work.

    def record(self, event: Event | None = None, *, timing: bool = False) -> Event:
        return Stream.record(self.covering(), event, timing=timing)

    def synchronize(self) -> None:
        Stream.synchronize(self.covering())

    def query(self) -> bool:
        return Stream.query(self.covering())

    def ready(self, dropping: bool = False) -> Any | None:
        current, mine = self._session.cuCtxGetCurrent, self.thread == get_ident()
        if not mine or current() != self._current or not (self.usable or (dropping and self._takes_frees())):
            return None
        return self._raw


class _ThreadStreams(ThreadLocal, streams=dict):
    """The calling thread's per-thread default streams of one driver, by device ordinal."""

    streams: dict[int, _OfThread]


class _OfThread:
    """Owner of one thread's per-thread default stream. When the thread ends, this object is dropped, and its finaliser
    marks the stream as one that no thread uses.
    """

    __slots__ = ("stream",)

    def __init__(self, device: Device) -> None:
        self.stream: PerThreadStream = PerThreadStream._make(device, PER_THREAD)

    def __del__(self) -> None:
        stream = getattr(self, "stream", None)  # The attribute is missing if __init__ has raised.
        if stream is not None:
            stream.thread = 0
            if stream._session.usable:
                stream._submit_endings()


_legacy_streams: PerDriver[dict[int, LegacyStream]] = PerDriver(lambda _: {})
"""Legacy default streams by device ordinal."""
_thread_streams: PerDriver[_ThreadStreams] = PerDriver(lambda _: _ThreadStreams())


def legacy_stream(device: Device) -> LegacyStream:
    """Return the legacy default stream of a device, the same object each time."""
    streams = _legacy_streams(device._session)
    return streams.get(device.ordinal) or streams.setdefault(device.ordinal, LegacyStream._make(device, LEGACY))


def per_thread_stream(device: Device) -> PerThreadStream:
    """Return the calling thread's per-thread default stream of a device: on one thread the same object each time."""
    streams = _thread_streams(device._session).streams
    found = streams.get(device.ordinal) or streams.setdefault(device.ordinal, _OfThread(device))
    return found.stream


def default_stream(device: Device, handle: int) -> DefaultStream:
    """Return the default stream of a device that ``handle`` names: the legacy stream for 0 and 1, the calling thread's
    per-thread stream for 2.
    """
    return per_thread_stream(device) if handle == PER_THREAD else legacy_stream(device)


for _kind in (OwnStream, LegacyStream, PerThreadStream):
    _kind.__name__ = _kind.__qualname__ = "Stream"


# -- all streams of a driver -------------------------------------------------------------------------------------


known_streams: PerDriver[weakref.WeakSet[Stream]] = PerDriver(lambda _: weakref.WeakSet())
"""``known_streams(session)`` returns the weak set of the driver's :class:`Stream` objects of all kinds, open or
closed.
"""


@contextlib.contextmanager
def draining(session: Session, ordinal: int) -> Iterator[None]:
    """Return a context manager for a call that waits for all work of device ``ordinal``. At its end, streams that were
    closed before the call are marked as ``drained``: what had to wait for their work can now be done.
    """
    closed = [one for one in members(known_streams(session)) if one.closed and one.device.ordinal == ordinal]
    yield
    for stream in closed:
        stream.drained = True
        stream._submit_endings()


def captures_changed(session: Session) -> None:
    """Forbid direct calls after a capture by this package was listed, or allow them again after its end. During a
    capture, direct calls are forbidden on default streams, and in the mode ``"global"`` on all streams.
    """
    for stream in members(known_streams(session)):
        stream._forbid_direct()
        stream._allow_direct()


def _end_events_of_streams() -> None:
    """Destroy the spare events of all streams, and the completed last events of closed streams, before a leak report.
    The program may keep the streams, for example by buffers that it has freed.
    """
    for session in sessions():
        for stream in members(known_streams(session)) if session.usable else ():
            stream._spare.destroy_all(session)
            for event in stream.last:
                with contextlib.suppress(CudaError), session.relaxed():
                    if has_passed(event):
                        event.close()


SETTLERS.append(_end_events_of_streams)


_named: PerDriver[weakref.WeakValueDictionary[int, Stream]] = PerDriver(lambda _: weakref.WeakValueDictionary())


def name_of_stream(session: Session, handle: int) -> str:
    """Return the name of the open stream of :meth:`Device.create_stream` with this handle (``CUstream`` as a number);
    empty if there is no such stream or it has no name.
    """
    stream = _named(session).get(handle)
    return "" if stream is None or stream.closed else stream.name
