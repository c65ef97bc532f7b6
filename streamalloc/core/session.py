"""Session: the state of the package for one driver, and the way of all driver calls off the hot path.

A :class:`Session` calls driver functions by name, raises an exception for an answer that is an error, retains the
devices' primary contexts, and refuses all calls in a forked child.

**Fast paths** have one shape. The plain case calls a driver function that was bound beforehand: one of those that
:data:`DIRECT` names, which are attributes of the session, or those of an allocator. Everything else takes the slow
path, which checks, explains and copes: ``_fill_slowly`` is that of ``fill``. The case is plain if the memory is there,
the arguments have the usual types, and the stream has a handle to use. A stream has three slots for that, which are
None while the stream is closed, is captured by this library, or has an item to attempt before more work is queued
(:func:`~streamalloc.core.queued_work.queue_behind`):

=============  ==========================  ========================================================================
Slot           Set for                     The call goes straight to the driver
=============  ==========================  ========================================================================
``_handle``    our own, other libraries'   if it is not an allocation
``_direct``    our own                     also if it is an allocation
``_answer``    default streams             while ``_asks``, ``cuCtxGetCurrent``, answers this: the handle means nothing
                                           without a context
``_answer``    those that a library may   while ``_asks``, a question to the library's object, answers this
               close
=============  ==========================  ========================================================================

An allocation on a stream that other code may capture asks ``cuStreamIsCapturing`` before: memory that is allocated in a
capture belongs to the graph. A free asks nothing, as the driver refuses it without harm to the capture. Streams of
other libraries are resolved once (:mod:`streamalloc.core.library_streams`). An answer of the driver that is an error is
raised, unless the slow path can do better: copies are refused while the context of another device is current, and the
slow path makes the stream's own current. Fills, copies, records, waits and queries on streams that are not default
streams need no current context otherwise (``tests/facts/test_contexts.py``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from streamalloc.core.errors import LOST, attach, error_from, undoing, unsupported
from streamalloc.driver import DriverMisuseError, ForkedProcessError
from streamalloc.driver.internal import BINDINGS_VERSION, as_asked, cuda, version_that_added

if TYPE_CHECKING:
    from streamalloc.driver import Driver
    from streamalloc.driver.internal import Listener

T = TypeVar("T")


class _Direct:
    """The driver functions that fast paths call; an allocator has its own two."""

    __slots__ = ()

    cuCtxGetCurrent: Any
    cuEventQuery: Any
    cuEventRecord: Any
    cuMemCreate: Any
    cuMemFreeAsync: Any
    cuMemMap: Any
    cuMemPoolExportPointer: Any
    cuMemPoolGetAttribute: Any
    cuMemPoolImportPointer: Any
    cuMemSetAccess: Any
    cuMemUnmap: Any
    cuMemcpyAsync: Any
    cuMemcpyDtoHAsync: Any
    cuMemcpyHtoDAsync: Any
    cuMemsetD8Async: Any
    cuPointerGetAttribute: Any
    cuStreamIsCapturing: Any
    cuStreamQuery: Any
    cuStreamSynchronize: Any
    cuStreamWaitEvent: Any
    cuStreamWaitValue32: Any
    cuStreamWriteValue32: Any
    cuThreadExchangeStreamCaptureMode: Any


DIRECT = tuple(_Direct.__annotations__)
"""Their names."""

NOT_CALLED = (DriverMisuseError, ForkedProcessError)
"""Exceptions that a driver function raises in place of the call."""


RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
"""Capture mode of a thread (``cuThreadExchangeStreamCaptureMode``) whose calls break no capture of other streams."""
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
"""Capture mode that a thread has by itself."""


class _ShutsAfterFork(Protocol):
    def _shut_after_fork(self) -> None: ...


class OwnsHandle(Protocol):
    """Owner of a driver handle, which is None once it was released."""

    _raw: Any


NO_STREAM = (None, object)
"""No kept stream, and a question whose answer is no library's object."""


class Session(_Direct):
    """A driver as the facade uses it; one for each driver object (:meth:`of`)."""

    __slots__ = (
        *DIRECT,
        "__weakref__",
        "_contexts",
        "_bound",
        "_lock",
        "_state",
        "driver",
        "forked",
        "latest_stream",
        "library_streams",
        "listener",
        "unusable",
    )

    def __init__(self, driver: Driver) -> None:
        self.driver: Driver = driver
        """The driver itself, for code that binds its functions."""
        # Kept here: the globals of this module may be gone when the last finalisers run.
        self.unusable: Callable[[], bool] = sys.is_finalizing
        """Whether a finaliser may not call the driver: in a forked child, and while the interpreter shuts down."""
        self.forked: bool = False
        """True in a forked child, in which all calls are refused."""
        self.listener: Listener | None = getattr(driver, "listener", None)
        """Listener of a driver that checks stream order; it only records."""
        self.library_streams: dict[type, tuple[Callable[[Any], Any], dict[Any, Any], Callable[[Any], Any] | None]] = {}
        """Kept streams by type of a library's stream, see :mod:`streamalloc.core.library_streams`."""
        self.latest_stream: tuple[Any, Callable[[], Any]] = NO_STREAM
        """The kept stream that was found last, and the question for its library's object."""
        self._contexts: dict[int, Any] = {}
        self._state: dict[object, Any] = {}
        self._bound: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        for name in DIRECT:
            setattr(self, name, getattr(driver, name))
        self.call("cuInit", 0)

    @staticmethod
    def of(driver: Driver) -> Session:
        """The session of ``driver``, the same one each time.

        Raises
        ------
        TypeError
            ``driver`` is no driver.
        """
        if not callable(getattr(driver, "cuInit", None)):
            raise TypeError(f"driver must have the functions of cuda.bindings.driver, which {driver!r} does not")
        driver = as_asked(driver)
        with _sessions_lock:
            session = _sessions.get(id(driver))
            if session is None:
                session = _sessions[id(driver)] = Session(driver)
                if isinstance(driver, ModuleType):
                    _kept.append(session)
            return session

    @property
    def usable(self) -> bool:
        """The opposite of :attr:`unusable`."""
        return not self.unusable()

    def call(self, name: str, *args: Any, hint: str | Callable[[], str] = "") -> Any:
        """Call driver function ``name`` and return the rest of its answer: None, a value, or a tuple.

        ``hint`` is the usual cause of a failure, or a function that finds that cause.

        Raises
        ------
        CudaError
            The driver answered an error; the class is that of :mod:`streamalloc.core.errors` for the answer.
        NotSupportedError
            The bindings do not have the function.
        ForkedProcessError
            This process is a forked child of the one that opened the driver.
        """
        function = self._function(name)
        try:
            answer = function(*args)
        except RuntimeError as error:
            self._raise_too_old(name, error)
        if answer[0]:
            raise error_from(answer[0], name, hint if isinstance(hint, str) else hint())
        return None if len(answer) == 1 else answer[1] if len(answer) == 2 else answer[1:]

    def create(self, owner: object, attribute: str, name: str, *args: Any, hint: str | Callable[[], str] = "") -> None:
        """Call driver function ``name``, which makes a handle, and keep the handle in ``owner.attribute``.

        Errors as for :meth:`call`; the attribute is set only on success.
        """
        setattr(owner, attribute, self.call(name, *args, hint=hint))

    def release(self, owner: OwnsHandle, name: str, *args: Any, hint: str = "") -> None:
        """Call driver function ``name``, which ends the handle in ``owner._raw``, at most once.

        The handle is forgotten right before the call, so that neither another thread nor a finaliser ends it again.
        If the driver refuses, the handle is kept, unless its context is lost.
        """
        function = self._function(name)
        # Threads are not switched between these lines.
        raw = owner._raw
        owner._raw = None
        if raw is None:
            return
        result = function(raw, *args)[0]
        if result:
            if not isinstance(error_from(result, name), LOST):
                owner._raw = raw
            # A local name for the error would make a cycle of error and frame, which keeps the caller's objects.
            raise error_from(result, name, hint)

    def _function(self, name: str) -> Any:
        if self.forked:
            raise ForkedProcessError(_FORKED)
        function = getattr(self.driver, name, None)
        if function is None:
            raise unsupported(name, f"cuda-bindings {version_that_added(name)}", f"cuda-bindings {BINDINGS_VERSION}")
        return function

    def _raise_too_old(self, name: str, error: RuntimeError) -> NoReturn:
        """Raise NotSupportedError if the error means that libcuda lacks the function; else raise the error."""
        if "not found" not in str(error):
            raise error
        version = self.driver.cuDriverGetVersion()[1]
        found = f"one for CUDA {version // 1000}.{version % 1000 // 10}"
        raise unsupported(name, "a newer driver, which has this function", found) from error

    def check_process(self) -> None:
        """Raise :class:`ForkedProcessError` in a forked child."""
        if self.forked:
            raise ForkedProcessError(_FORKED)

    def context(self, ordinal: int) -> Any:
        """The primary context of a device (``cuDevicePrimaryCtxRetain``), retained once and never released.

        The context must outlast every object of the device, in whatever order the garbage collector drops them.
        """
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    context = self._contexts[ordinal] = self.call("cuDevicePrimaryCtxRetain", ordinal)
        return context

    def current(self, ordinal: int) -> _Current:
        """Block in which a device's primary context is the current one of this thread."""
        return _Current(self, self.context(ordinal))

    @property
    def ordinals(self) -> list[int]:
        """The devices whose primary contexts are in use."""
        return list(self._contexts)

    def device_of(self, context: Any) -> int:
        """The ordinal of a context's device."""
        with _Current(self, context):
            return int(self.call("cuCtxGetDevice"))

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Block in which calls of this thread break no capture of other streams.

        It sets the capture mode of the thread (``cuThreadExchangeStreamCaptureMode``). A call that names a captured
        stream still breaks the capture of that stream.
        """
        # A signal handler may raise before the mode is known; every thread's own mode is global.
        name, mode = "cuThreadExchangeStreamCaptureMode", GLOBAL
        with undoing(lambda: self.call(name, mode)):
            mode = self.call(name, RELAXED)
            yield
            self.call(name, mode)  # here, as a handler may raise before it, too

    def shut_with_me(self, holder: _ShutsAfterFork) -> None:
        """Register an object that has bound driver functions, to replace them in a forked child."""
        self._bound.add(holder)

    def bound_objects(self) -> list[Any]:
        """The objects that have bound driver functions."""
        return members(self._bound)

    def _shut_after_fork(self) -> None:
        self.forked = True
        self.unusable = lambda: True
        self._lock = threading.RLock()
        for name in DIRECT:
            setattr(self, name, refuse_after_fork)
        for holder in tuple(self._bound):
            holder._shut_after_fork()


def members(several: weakref.WeakSet[T]) -> list[T]:
    """The members of a set to which other threads add."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(several)


class PerDriver(Generic[T]):
    """State that the objects of one driver share: ``state(session)`` is one object for each driver, made on first use.

    The call takes no lock, so finalisers may make it. If two threads make it at once, one of two new objects is
    dropped, so ``make`` must have no effect beyond the object.
    """

    def __init__(self, make: Callable[[Session], T]) -> None:
        self._make = make

    def __call__(self, session: Session) -> T:
        """The object of a driver."""
        found: T | None = session._state.get(self)
        if found is None:
            made: T = session._state.setdefault(self, self._make(session))
            return made
        return found


class _HasSession(Protocol):
    @property
    def _session(self) -> Session: ...


def session_of(thing: _HasSession) -> Session:
    """The session of a device, a stream, an event, a graph, memory or a pool."""
    return thing._session


class _Current:
    """Push a context on entry and pop it on exit (``cuCtxPushCurrent``, ``cuCtxPopCurrent``)."""

    __slots__ = ("_context", "_session")

    def __init__(self, session: Session, context: Any) -> None:
        self._session = session
        self._context = context

    def __enter__(self) -> None:
        # Not by Session.call, for speed: each call for a default stream comes here.
        self._session.check_process()
        driver = self._session.driver
        try:
            result = driver.cuCtxPushCurrent(self._context)[0]
        except BaseException:
            # A signal handler has raised after the call, and no block follows that would pop the context.
            driver.cuCtxPopCurrent()
            raise
        if result:
            raise error_from(result, "cuCtxPushCurrent")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        result = (refuse_after_fork if self._session.forked else self._session.driver.cuCtxPopCurrent)()[0]
        if result:
            if error is None:
                # Without a local name for the error, see Session.release.
                raise error_from(result, "cuCtxPopCurrent")
            attach(error, error_from(result, "cuCtxPopCurrent"))


_FORKED = (
    "this object belongs to the process that was forked; CUDA cannot be used in a forked child: "
    "start it with multiprocessing's 'spawn' or 'forkserver' method"
)
# By id of the driver. A session lives as long as an object of its driver, and keeps the driver, so no id is reused.
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
# Sessions of drivers that are modules, such as the real one. They live as long as the process.
_kept: list[Session] = []
_sessions_lock = threading.RLock()


def sessions() -> tuple[Session, ...]:
    """The sessions of all drivers that are in use."""
    with _sessions_lock:
        return tuple(_sessions.values())


def refuse_after_fork(*_args: Any, **_kwargs: Any) -> Any:
    """Replacement for a driver function in a forked child."""
    raise ForkedProcessError(_FORKED)


def _ask_for_the_process() -> None:
    """Have finalisers compare the process: those of other threads' data run in a child before it is shut."""
    for session in sessions():
        if not session.forked:
            session.unusable = functools.partial(_is_unusable, os.getpid(), os.getpid, sys.is_finalizing)


# With its functions as arguments: the globals of this module may be gone when the last finalisers run.
def _is_unusable(pid: int, process: Callable[[], int], exiting: Callable[[], bool]) -> bool:
    return process() != pid or exiting()


def _shut_sessions_after_fork() -> None:
    global _sessions_lock
    _sessions_lock = threading.RLock()
    for session in tuple(_sessions.values()):
        session._shut_after_fork()


os.register_at_fork(before=_ask_for_the_process, after_in_child=_shut_sessions_after_fork)
