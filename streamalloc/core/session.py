"""Session: the state of the package for one driver, and all driver calls that are not direct.

A :class:`Session` calls driver functions by name and raises an exception for an error. It retains the devices' primary
contexts, and refuses all calls in a forked child. ``notebooks/docs/contributing.md`` has a glossary, and shows the path
of a call from the public function to the driver.

**Direct calls.** A frequent call, such as an allocation or a copy, goes straight to a driver function that was bound
beforehand. The session binds the functions that :data:`DIRECT` names, and each allocator binds two more. A direct call
is made only if the memory is allocated, the arguments have the expected types, and the stream can take the call now
(:meth:`~streamalloc.core.stream.Stream.ready`). Otherwise the call is a checked call: a slower path, which checks the
arguments and explains errors.

If the driver refuses a direct call, the error is raised unless a checked call can succeed. For example, the driver
refuses a copy under another device's context, and the checked call makes the stream's own context current. Fills,
copies, records, waits and queries need no current context on streams other than default streams
(``tests/facts/test_contexts.py``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from streamalloc.core.errors import attach, error_from, is_gone, unsupported
from streamalloc.driver import ForkedProcessError
from streamalloc.driver.internal import BINDINGS_VERSION, PreventedCallError, RLock, as_asked, cuda, version_that_added

if TYPE_CHECKING:
    from streamalloc.driver import Driver
    from streamalloc.driver.internal import MemoryListener

T = TypeVar("T")


class _Direct:
    """The driver functions of direct calls, as attributes of the session. Allocators bind two more."""

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
"""Names of the driver functions that each session binds when it is made."""

NOT_CALLED = (PreventedCallError, ForkedProcessError)
"""Classes of errors that are raised before the driver function is called, and by nothing else."""


RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
"""Capture mode (``cuThreadExchangeStreamCaptureMode``) that keeps captures of other streams valid."""
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
"""Capture mode of a new thread. In this mode, unsafe calls such as ``cuMemFree`` invalidate captures of other threads.
"""


class _ShutsAfterFork(Protocol):
    def _shut_after_fork(self) -> None: ...


class OwnsHandle(Protocol):
    """Owner of the driver handle ``_raw``, which is None after its release."""

    _raw: Any


class Session(_Direct):
    """The package's state for one driver object: the result of :meth:`of`."""

    __slots__ = (
        *DIRECT,
        "__weakref__",
        "_contexts",
        "beside_captures",
        "bound",
        "_lock",
        "_state",
        "driver",
        "forked",
        "latest_library_stream",
        "library_streams",
        "listener",
        "unusable",
    )

    def __init__(self, driver: Driver) -> None:
        self.driver: Driver = driver
        """The driver itself, for code that binds its functions."""
        # An attribute, because the globals of this module may be gone when the last finalisers run.
        self.unusable: Callable[[], bool] = sys.is_finalizing
        """Returns whether driver calls of finalisers are forbidden: in a forked child, and while the interpreter shuts
        down.
        """
        self.forked: bool = False
        """True in a forked child, in which all calls are refused."""
        self.listener: MemoryListener | None = getattr(driver, "listener", None)
        """Listener of a driver that checks stream order (``driver.checked``), else None. The listener only records
        calls.
        """
        self.library_streams: dict[Hashable, tuple[object, Any]] = {}
        """Latest streams of other libraries, each with the library's object, by key
        (:mod:`streamalloc.core.library_streams`). The entry that was added last comes last.
        """
        self.latest_library_stream: tuple[object, Any] = object(), None
        """The library's object that was found last, and its stream. Compared with a look-up in the table, an
        allocation with its free takes 0.1 to 0.2 us less.
        """
        self.beside_captures: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Returns a context manager for a driver call that must invalidate no capture of another thread. The deferred
        queue, which lists the captures, replaces this default.
        """
        self._contexts: dict[int, Any] = {}
        """Primary contexts (``CUcontext``) by device ordinal."""
        self._state: dict[object, Any] = {}
        """The object of each :class:`PerDriver` for this driver."""
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        """Objects with bound driver functions. In a forked child, each object replaces its functions by refusals."""
        self._lock = RLock()
        for name in DIRECT:
            setattr(self, name, getattr(driver, name))
        self.call("cuInit", 0)

    @staticmethod
    def of(driver: Driver) -> Session:
        """Return the session of ``driver``: the same object at each call for the same driver.

        Raises
        ------
        TypeError
            ``driver`` is not a driver.
        CudaError
            The driver cannot be initialised (``cuInit``).
        """
        if not callable(getattr(driver, "cuInit", None)):
            raise TypeError(f"driver must have the functions of cuda.bindings.driver, which {driver!r} does not")
        driver = as_asked(driver)
        with _sessions_lock:
            session = _sessions.get(id(driver))
            if session is None or not hasattr(session, "_state"):  # Half cleared: see :func:`sessions`.
                session = _sessions[id(driver)] = Session(driver)
                if isinstance(driver, ModuleType):
                    _kept.append(session)
            return session

    def __del__(self) -> None:
        # If a session is in a garbage cycle, the collector clears the weak references to the session before it drops
        # the other objects of the cycle. The releases of those objects keep this session alive. They would wait for
        # ever if a new session served the driver, so this session is registered again.
        if hasattr(self, "_lock") and self.usable:  # The attribute is missing if __init__ has raised.
            _sessions.setdefault(id(self.driver), self)

    @property
    def usable(self) -> bool:
        """Whether a finaliser may call the driver: the opposite of :attr:`unusable`."""
        return not self.unusable()

    def call(self, name: str, *args: Any, hint: str | Callable[[], str] = "") -> Any:
        """Call driver function ``name`` and return its results: None, a value, or a tuple.

        ``hint`` is a text for the error with the usual cause of a failure, or a function that returns this text.

        Raises
        ------
        CudaError
            The driver returned an error; :mod:`streamalloc.core.errors` has the class for each.
        NotSupportedError
            The bindings or the installed driver do not have the function.
        ForkedProcessError
            This process is a forked child of the one that opened the driver.
        """
        function = None if self.forked else getattr(self.driver, name, None)
        if function is None:
            function = self._function(name)
        try:
            with self.beside_captures():
                answer = function(*args)
        except RuntimeError as error:
            self._raise_too_old(name, error)
        if answer[0]:
            raise error_from(answer[0], name, hint if isinstance(hint, str) else hint())
        return None if len(answer) == 1 else answer[1] if len(answer) == 2 else answer[1:]

    def call_in(self, ordinal: int, name: str, *args: Any, hint: str | Callable[[], str] = "") -> Any:
        """Call driver function ``name`` as :meth:`call` does, while the primary context of device ``ordinal`` is
        current. Only for functions that create no handle: if the caller's context cannot be restored, the result is
        lost.
        """
        with self.current(ordinal):
            return self.call(name, *args, hint=hint)

    def create_in(self, ordinal: int, owner: OwnsHandle, name: str, *args: Any, hint: str = "") -> None:
        """Call driver function ``name``, which creates a handle, while the primary context of device ``ordinal`` is
        current, and store the handle in ``owner._raw``. Raises as :meth:`call`.

        The handle is stored before the caller's context is restored. If the driver then refuses to restore the context,
        ``owner`` has the handle and can still end it.
        """
        with self.current(ordinal):
            owner._raw = self.call(name, *args, hint=hint)

    def release(self, owner: OwnsHandle, name: str, *args: Any, hint: str = "") -> None:
        """Call driver function ``name``, which ends the handle in ``owner._raw``, at most once.

        The attribute is cleared right before the call, so that no other thread or finaliser ends the handle again. If
        the driver refuses, the handle is restored unless it is gone (:func:`~streamalloc.core.errors.is_gone`). Raises
        the errors of :meth:`call`.
        """
        function = self._function(name)
        with self.beside_captures():
            # Threads are not switched between these lines, so only one thread gets the handle.
            raw = owner._raw
            owner._raw = None
            if raw is None:
                return
            try:
                result = function(raw, *args)[0]
            except NOT_CALLED:
                owner._raw = raw
                raise
        if result:
            if not is_gone(error_from(result, name)):
                owner._raw = raw
            # The error gets no local name: error and frame would form a reference cycle that keeps the callers' objects
            # alive.
            raise error_from(result, name, hint)

    def _function(self, name: str) -> Any:
        if self.forked:
            raise ForkedProcessError(_FORKED)
        function = getattr(self.driver, name, None)
        if function is None:
            raise unsupported(name, f"cuda-bindings {version_that_added(name)}", f"cuda-bindings {BINDINGS_VERSION}")
        return function

    def _raise_too_old(self, name: str, error: RuntimeError) -> NoReturn:
        """Raise NotSupportedError if libcuda lacks function ``name``, which the bindings report by a RuntimeError;
        otherwise raise ``error`` again.
        """
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
        """Return the primary context of a device (``cuDevicePrimaryCtxRetain``), retained once and never released.

        The context must outlast every object of the device, and the garbage collector drops these objects in any order.
        Other libraries share the context. The last release of the context would destroy the streams and memory of those
        libraries, and a later use of such a handle crashes the process.
        """
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    context = self._contexts[ordinal] = self.call("cuDevicePrimaryCtxRetain", ordinal)
        return context

    def current(self, ordinal: int) -> _Current:
        """Return a context manager that makes a device's primary context current on this thread, and restores the
        caller's context at its end (``cuCtxPushCurrent``, ``cuCtxPopCurrent``).
        """
        return _Current(self, self._contexts.get(ordinal) or self.context(ordinal))

    @property
    def ordinals(self) -> list[int]:
        """The ordinals of the devices whose primary contexts this session has retained."""
        return list(self._contexts)

    def device_of(self, context: Any) -> int:
        """Return the ordinal of the device of ``context``, a ``CUcontext`` (``cuCtxGetDevice``)."""
        with _Current(self, context):
            return int(self.call("cuCtxGetDevice"))

    def relaxed(self) -> _Relaxed:
        """Return a context manager in which this thread's calls invalidate no capture of other streams.

        The context manager sets the thread's capture mode to relaxed (``cuThreadExchangeStreamCaptureMode``). A call
        that names a captured stream can still invalidate that stream's capture.
        """
        return _Relaxed(self)

    def shut_with_me(self, bound: _ShutsAfterFork) -> None:
        """Register an object with bound driver functions. In a forked child, its ``_shut_after_fork`` is called to
        replace them.
        """
        self.bound.add(bound)

    def _shut_after_fork(self) -> None:
        self.forked = True
        self.unusable = lambda: True
        self._lock = RLock()
        for name in DIRECT:
            setattr(self, name, refuse_after_fork)
        for bound in tuple(self.bound):
            bound._shut_after_fork()


def members(several: weakref.WeakSet[T]) -> list[T]:
    """Return a list of a weak set's members. If another thread changes the set meanwhile, Python raises RuntimeError,
    and the set is listed again.
    """
    while True:
        try:
            return list(several)
        except RecursionError:  # Also a RuntimeError. Without this the loop would not end.
            raise
        except RuntimeError:
            continue


def drained(pop: Callable[[], T]) -> Iterator[T]:
    """Yield what ``pop`` takes off a list or a deque, until the list is empty. Other threads may take or add entries
    meanwhile.
    """
    with contextlib.suppress(IndexError):
        while True:
            yield pop()


class PerDriver(Generic[T]):
    """State shared by the objects of one driver. ``state(session)`` returns one object per driver, made on first use.

    The call takes no lock, so finalisers may make it. If two threads make the first call at once, both run ``make``,
    and one of the two results is dropped. So ``make`` must have no side effect.
    """

    def __init__(self, make: Callable[[Session], T]) -> None:
        self._make = make

    def __call__(self, session: Session) -> T:
        """Return the object of the session's driver, made at the first call; the same object each time."""
        found: T | None = session._state.get(self)
        if found is None:
            made: T = session._state.setdefault(self, self._make(session))
            return made
        return found


class _HasSession(Protocol):
    @property
    def _session(self) -> Session: ...


def session_of(thing: _HasSession) -> Session:
    """Return the session of a device, a stream, an event, a graph, memory or a pool."""
    return thing._session


class _Current:
    """Push a context on entry and pop it on exit (``cuCtxPushCurrent``, ``cuCtxPopCurrent``).

    The pop restores the caller's own context; ``cuCtxSetCurrent`` could not. If our context remained current, the
    thread's work on default streams would run on another device, without an error. So the pop is made even if a signal
    handler raises right after the push.
    """

    __slots__ = ("_context", "_session")

    def __init__(self, session: Session, context: Any) -> None:
        self._session = session
        self._context = context

    def __enter__(self) -> None:
        # The driver is called without Session.call, which is slower: each checked call on a default stream enters here.
        session = self._session
        if session.forked:
            session.check_process()
        driver = session.driver
        try:
            result = driver.cuCtxPushCurrent(self._context)[0]
        except BaseException:
            driver.cuCtxPopCurrent()
            raise
        if result:
            raise error_from(result, "cuCtxPushCurrent")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        result = (refuse_after_fork if self._session.forked else self._session.driver.cuCtxPopCurrent)()[0]
        if result:
            _fail(result, "cuCtxPopCurrent", error)


class _Relaxed:
    """Set the thread's capture mode to relaxed on entry, and to the earlier one on exit
    (``cuThreadExchangeStreamCaptureMode``).
    """

    __slots__ = ("_mode", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        exchange = self._session.cuThreadExchangeStreamCaptureMode
        try:
            result, self._mode = exchange(RELAXED)
        except BaseException:
            exchange(GLOBAL)  # The mode of before is lost: set that of new threads.
            raise
        if result:
            raise error_from(result, "cuThreadExchangeStreamCaptureMode")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        result = self._session.cuThreadExchangeStreamCaptureMode(self._mode)[0]
        if result:
            _fail(result, "cuThreadExchangeStreamCaptureMode", error)


def _fail(result: Any, call: str, error: BaseException | None) -> None:
    """Raise the error for ``result`` (``CUresult``) of driver function ``call`` at the end of a ``with`` block. If the
    block has raised ``error``, attach the driver's error to ``error`` instead, because ``error`` says more.
    """
    if error is None:
        # No local name for the error: it would form a reference cycle, see Session.release.
        raise error_from(result, call)
    attach(error, error_from(result, call))


_FORKED = (
    "this object belongs to the process that was forked; CUDA cannot be used in a forked child: "
    "start it with multiprocessing's 'spawn' or 'forkserver' method"
)
# Sessions by the ``id`` of their driver. A session keeps its driver alive, so no ``id`` is reused.
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
# Sessions of drivers that are modules, such as the real one, kept until the process ends.
_kept: list[Session] = []
_sessions_lock = RLock()


def sessions() -> tuple[Session, ...]:
    """Return the sessions of all drivers that are in use, without sessions that the garbage collector is clearing."""
    # `valuerefs` lists the references in one call. During a loop over the table, another thread or the garbage
    # collector could change the table, and Python would raise RuntimeError.
    found = [reference() for reference in _sessions.valuerefs()]
    # A session without `_state` is being cleared by the collector: its own finaliser has registered it again.
    return tuple(one for one in found if one is not None and hasattr(one, "_state"))


# Rules for the forked child of a process that has used CUDA. A driver call may hang on a lock that a thread of the
# parent held, or end a handle that the parent still uses. The child's garbage collector drops inherited objects. So the
# child makes no driver call: the functions of each session raise ForkedProcessError, and finalisers find that the
# session is not usable. Locks are made anew, because the threads that held them do not exist in the child. The child
# may close what the kernel duplicated: file descriptors and mappings of shared memory.


def refuse_after_fork(*_args: Any, **_kwargs: Any) -> Any:
    """Raise ForkedProcessError. In a forked child, this function replaces the bound driver functions."""
    raise ForkedProcessError(_FORKED)


def _ask_for_the_process() -> None:
    """Make finalisers compare the process id before they call the driver, from right before the fork.

    In the child, finalisers of thread-local objects run before :func:`_shut_sessions_after_fork` marks the sessions.
    """
    for session in sessions():
        if not session.forked:
            session.unusable = functools.partial(_is_unusable, os.getpid(), os.getpid, sys.is_finalizing)


# The functions are arguments, because module globals may be gone when the last finalisers run.
def _is_unusable(pid: int, process: Callable[[], int], exiting: Callable[[], bool]) -> bool:
    return process() != pid or exiting()


def _shut_sessions_after_fork() -> None:
    global _sessions_lock
    _sessions_lock = RLock()
    for session in sessions():
        session._shut_after_fork()


os.register_at_fork(before=_ask_for_the_process, after_in_child=_shut_sessions_after_fork)
