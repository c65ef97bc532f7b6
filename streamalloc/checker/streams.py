"""Host threads, streams and captures by the handles of a driver, and questions to that driver.

Other libraries may use their own streams, and streams whose handles they can get. They may order these streams, or make
the host wait for them, by calls that the checker does not record. So these streams count as ordered among each other.
The checker records an event after each operation in such a stream, except in default streams. Once the event is done,
or at once if there is none, the host counts as having waited for the operation.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from streamalloc.checker.capture import TrackedCapture, TrackedNode
from streamalloc.checker.clocks import Actor, Timeline, TrackedStream
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.processes import mapped_ranges
from streamalloc.driver.reports import Stack, here, place_of

_NO_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_LEGACY, _PER_THREAD = 1, 2
"""Handles of the legacy and the per-thread default stream."""
_MOST_EVENTS = 64
"""Largest number of operations of a stream of which each has an event that shows its end. If there are more, the host
counts as having waited for all of them, and a missing order after them is not reported.
"""


@contextlib.contextmanager
def beside_captures(driver: Any) -> Iterator[None]:
    """Set the relaxed capture mode of this thread for the ``with`` block (``cuThreadExchangeStreamCaptureMode``). In
    this mode the thread's calls do not invalidate captures.
    """
    failed, mode = driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
    try:
        yield
    finally:
        if not failed:
            driver.cuThreadExchangeStreamCaptureMode(mode)


class ForeignStreams:
    """Streams that other libraries may use. On a real driver the checker does not record these libraries' calls."""

    def __init__(self, driver: Any, timeline: Timeline) -> None:
        self._driver = driver
        self._timeline = timeline
        self._reachable: dict[TrackedStream, None] = {}
        self.calls_are_seen: bool = False
        """Whether the checker records all calls of other libraries, because the driver is simulated."""
        self.is_there: bool = False
        """Whether another library has used a stream."""
        self.may_write: bool = False
        """Whether other code has the handle of a stream, and may launch kernels on it by calls that the checker does
        not record.
        """
        self.pending: dict[TrackedStream, deque[tuple[int, Any]]] = {}
        """For each stream: its operations that may not have ended, as tuples of time and the event recorded after the
        operation.
        """
        self._over: list[Any] = []
        """Events of operations that have ended. They are destroyed when no thread is querying events."""
        self._querying = 0
        """Number of threads that are querying events without holding the lock."""

    def is_ours(self, stream: TrackedStream) -> bool:
        """Whether only calls that the checker records can use a stream.

        If the checker does not record the calls of other libraries, the result is False for a stream whose handle these
        libraries can get. Once they have used any stream, the result is False for all streams, because they may wait
        for the whole device. On a simulated driver the checker records all calls. Then the result is False only for
        streams that other libraries use or can get, and default streams count as ours until they are used.
        """
        reachable = stream in self._reachable
        if self.calls_are_seen:
            return stream not in self._timeline.foreign and (stream.handle <= _PER_THREAD or not reachable)
        return not (self.is_there or reachable)

    def can_queue_on(self, stream: TrackedStream) -> None:
        """Record that other libraries can get the handle of a stream, as they can for a default stream. Once another
        library has used any stream, they may use this stream from now on.
        """
        if self.is_there:
            self._timeline.foreign[stream] = None
        else:
            self._reachable[stream] = None

    def queues_on(self, stream: TrackedStream) -> None:
        """Record that another library queues work on a stream. From now on, other libraries may use all streams whose
        handles they can get.
        """
        self.is_there = True
        self.is_lent(stream)
        if stream not in self._timeline.foreign:
            self._timeline.notes.add("streams", stream.name)
        self._timeline.foreign.update((*self._reachable.items(), (stream, None)))
        self._reachable.clear()

    def is_lent(self, stream: TrackedStream) -> None:
        """Record that other code has the handle of ``stream``, and may launch kernels on it by calls that the checker
        does not record.
        """
        if not self.may_write:
            self.may_write = True
            self._timeline.notes.add("contents", stream.name)

    def ended(self, stream: TrackedStream) -> None:
        """Record that a stream was destroyed, so that no other library can get its handle any more."""
        self._reachable.pop(stream, None)

    def did(self, stream: TrackedStream) -> None:
        """If other libraries may use a stream, record an event after its latest operation (``cuEventRecord``), by which
        the checker finds out when the operation has ended. If that is not possible, the host counts as having waited
        for the operation. No effect while the stream waits for an obstacle.
        """
        if stream not in self._timeline.foreign or stream.obstacle is not None:
            return
        # The time is read first: the event is recorded without holding the lock, and another thread may queue more work
        # meanwhile.
        time = stream.time
        # No event is recorded on a default stream, because it could invalidate captures of other threads.
        event = None if stream.handle <= _PER_THREAD else self._record(stream.handle)
        if event is None or len(self.pending.get(stream, ())) >= _MOST_EVENTS:
            self._end(stream, time)
            self._destroy_events()
        if event is not None:
            self.pending.setdefault(stream, deque()).append((time, event))

    def look(self) -> None:
        """Query the events of the operations that may not have ended (``cuEventQuery``). The host counts as having
        waited for the operations that have ended.
        """
        query = self._driver.cuEventQuery
        with beside_captures(self._driver):
            self._querying += 1
            try:
                for stream, pending in tuple(self.pending.items()):
                    asked = tuple(pending)
                    over = [time for time, event in asked if "NOT_READY" not in query(event)[0].name]
                    self._end(stream, max(over, default=0))
            finally:
                self._querying -= 1
            self._destroy_events()

    def _end(self, stream: TrackedStream, time: int) -> None:
        """Record that the host may have waited for the operations of a stream up to ``time``."""
        over = self._timeline.over
        over[stream.number] = max(over.get(stream.number, 0), time)
        pending = self.pending.get(stream, deque())
        while pending and pending[0][0] <= time:
            self._over.append(pending.popleft()[1])
        if not pending:
            self.pending.pop(stream, None)

    def _destroy_events(self) -> None:
        while self._over and not self._querying:
            self._driver.cuEventDestroy(self._over.pop())

    def _record(self, handle: int) -> Any:
        """Record an event after the queued work of the stream with this handle. Returns the event; None if that is not
        possible.
        """
        driver, stream = self._driver, cuda.CUstream(handle)
        failed, capturing = driver.cuStreamIsCapturing(stream)
        if failed or int(capturing):
            return None
        failed, context = driver.cuStreamGetCtx(stream)[:2]
        if failed or driver.cuCtxPushCurrent(context)[0]:
            return None
        try:
            failed, event = driver.cuEventCreate(_NO_TIMING)
            if failed:
                return None
            if driver.cuEventRecord(event, stream)[0]:
                driver.cuEventDestroy(event)
                return None
            return event
        finally:
            driver.cuCtxPopCurrent()


MEMORY_TYPE: Any = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_IS_MANAGED = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)


def rights_of_process(low: int, high: int) -> list[str]:
    """Return the permissions, such as ``"rw-p"``, of this process's mappings that overlap the addresses from ``low`` up
    to ``high``.
    """
    return [rights for start, end, rights in mapped_ranges() if start < high and low < end]


def is_readable(low: int, high: int) -> bool:
    """Whether this process can read all bytes from ``low`` up to ``high``."""
    parts = [(max(start, low), min(end, high)) for start, end, rights in mapped_ranges() if rights[0] == "r"]
    return sum(max(end - start, 0) for start, end in parts) == high - low


class Questions:
    """Driver calls that the checker itself makes on the wrapped driver, to learn facts that no recorded call has
    shown.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def values(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a driver function. Returns a tuple of its values without the result code; it is empty if the function is
        missing, is not modelled, or fails.
        """
        function = getattr(self.driver, name, None)
        answer: tuple[Any, ...] = (1,)
        # A simulated machine models only some of these calls. Its error must not reach the program, which has not made
        # the call.
        with contextlib.suppress(NotImplementedError):
            answer = answer if function is None else function(*args)
        return () if answer[0] else answer[1:]

    def number(self, name: str, *args: Any) -> int | None:
        """Call a driver function. Returns its first value as a number; None if there is none or the call fails."""
        values = self.values(name, *args)
        return int(values[0]) if values else None

    def is_host_memory(self, address: int) -> bool:
        """Whether the driver reports an address as host memory (``cuPointerGetAttribute``). False for pageable memory,
        which the driver does not know.
        """
        return self.number("cuPointerGetAttribute", MEMORY_TYPE, address) == _HOST

    def is_managed(self, address: int) -> bool:
        """Whether the driver reports an address as managed memory (``cuPointerGetAttribute``)."""
        return bool(self.number("cuPointerGetAttribute", _IS_MANAGED, address))


class CallingThread(NamedTuple):
    """Caller of a call that the wrapper did not forward: its thread, its current context and its place in the program.
    The call may be recorded on another thread.
    """

    thread: int
    context: int
    """Handle of the current context of the thread."""
    place: Stack


class _HostThread:
    """A host thread, with its per-thread default streams by context handle."""

    def __init__(self, actor: Actor, number: int) -> None:
        self.actor = actor
        self.streams: dict[int, TrackedStream] = {}
        self._number = number
        # ``threading.current_thread`` is not used, because it would register a thread that Python has not started.
        self._known = next((one for one in threading.enumerate() if one.ident == number), None)

    @property
    def name(self) -> str:
        """Name of the thread, or its number in hexadecimal if Python has not started the thread."""
        return f"{self._number:#x}" if self._known is None else self._known.name


class Streams:
    """Host threads, streams and captures of a driver, by handle."""

    def __init__(self, questions: Questions, timeline: Timeline) -> None:
        self._ask = questions
        self._timeline = timeline
        self.foreign: ForeignStreams = ForeignStreams(questions.driver, timeline)
        self.by_handle: dict[int, TrackedStream] = {}
        self.devices: dict[TrackedStream, int | None] = {}
        self.captures: dict[TrackedStream, TrackedCapture] = {}
        self.caller: CallingThread | None = None
        """Caller of the call that is being recorded; None if the calling thread itself has made it."""
        self._legacy: dict[int, TrackedStream] = {}
        self._per_thread: list[TrackedStream] = []
        self._here = threading.local()
        self._fed: dict[int, _HostThread] = {}
        """Threads that made calls without the wrapper, by thread number."""
        self._over: deque[dict[int, TrackedStream]] = deque()
        """Per-thread default streams of threads that have ended, by context."""
        # If this variable is set, the bindings treat the handle 0 as the per-thread default stream.
        per_thread = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self._zero = _PER_THREAD if per_thread else _LEGACY

    # -- the current call --------------------------------------------------------------------------------------

    def place(self, depth: int = 8) -> Stack:
        """Return the place of the current call in the program: the innermost ``depth`` frames outside of this
        package.
        """
        return here(depth) if self.caller is None else self.caller.place

    def context(self) -> int:
        """Return the handle of the context that is current in the thread which makes the current call
        (``cuCtxGetCurrent``); 0 if there is none.
        """
        return (self._ask.number("cuCtxGetCurrent") or 0) if self.caller is None else self.caller.context

    # -- threads and streams -----------------------------------------------------------------------------------

    def _thread(self) -> _HostThread:
        if self.caller is not None:
            number = self.caller.thread
            if number not in self._fed:
                self._fed[number] = _HostThread(self._timeline.thread(""), number)
            return self._fed[number]
        found: _HostThread | None = getattr(self._here, "thread", None)
        if found is None:
            found = self._here.thread = _HostThread(self._timeline.thread(""), threading.get_ident())
            weakref.finalize(found, self._timeline.ended_threads.append, found.actor.number).atexit = False
        return found

    def thread(self) -> Actor:
        """Return the host thread that makes the current call. Its name is set for reports."""
        thread = self._thread()
        actor = thread.actor
        within = actor.within
        actor.name = f"host thread {thread.name}" if within is None else f"the host function of {within.name}"
        return actor

    def find(self, handle: Any) -> TrackedStream:
        """Return the stream of a handle. If no recorded call has made it, a stream is added: a default stream, a stream
        of another library, or, for an invalid handle, a stream that is ordered after all operations.
        """
        number = number_of(handle)
        found = self.by_handle.get(number)
        return self._special(number) if found is None else found

    def capture_of(self, stream: TrackedStream) -> TrackedCapture | None:
        """Return the capture to which a stream belongs; None if the stream is not being captured."""
        return self.captures.get(stream) if self.captures else None

    def _special(self, number: int) -> TrackedStream:
        """Return the stream of a handle that no recorded call has made.

        It is a default stream, a stream that was made before the checker, or an invalid handle.
        """
        kind = number or self._zero
        if kind == _LEGACY:
            return self.legacy(self.context())
        if kind == _PER_THREAD:
            return self._own(self.context())
        capturing = self._ask.number("cuStreamIsCapturing", number)
        if capturing is None:
            # The driver does not know the handle, so it will refuse the call that uses the handle.
            unknown = self._timeline.stream(f"stream {number:#x}", handle=number)
            # The refused call uses no memory. The clock contains all operations, so that no check reports a missing
            # order.
            unknown.clock = self._timeline.everything()
            self._timeline.retire(unknown)
            return unknown
        # A captured stream is not queried for its flags, because this call would invalidate the capture.
        flags = 1 if capturing else self._ask.number("cuStreamGetFlags", number) or 0
        where = self._ask.number("cuStreamGetCtx", number) or 0
        self.legacy(where)
        # The driver was called without holding the lock, so another thread may have added the stream meanwhile.
        found = self.by_handle.get(number)
        return self.add(number, not flags & 1, where) if found is None else found

    def _own(self, context: int) -> TrackedStream:
        """Return the per-thread default stream that the calling thread has in a context."""
        thread = self._thread()
        mine = thread.streams
        found = mine.get(context)
        if found is None or found not in self.devices:  # The context of a recorded stream may have ended meanwhile.
            while self._over:
                for one in self._over.popleft().values():
                    if one in self._per_thread:
                        self._per_thread.remove(one)
                        self.retire(one)
            legacy = self.legacy(context)
            if not mine:
                weakref.finalize(thread, self._over.append, mine).atexit = False
            name = f"the per-thread default stream of {thread.name}"
            found = mine[context] = self._timeline.stream(name, context, legacy, _PER_THREAD)
            self._per_thread.append(found)
            self.foreign.can_queue_on(found)
            self.devices[found] = self.devices[legacy]
        return found

    def legacy(self, context: int) -> TrackedStream:
        """Return the legacy default stream of ``context``, the handle of a context. If none is recorded, it is added,
        as a stream of the current device.
        """
        if context not in self._legacy:
            device = self._ask.number("cuCtxGetDevice")
            if context not in self._legacy:  # Another thread may have added the stream during the call.
                found = self._timeline.stream("the legacy default stream", context, handle=_LEGACY)
                self.devices[found] = device
                self.foreign.can_queue_on(found)
                self._legacy[context] = found
        return self._legacy[context]

    def add(self, handle: int, blocking: bool, context: int | None = None, at: Stack | None = None) -> TrackedStream:
        """Add a stream with this handle, and return it. ``blocking``: whether the stream synchronises with the legacy
        default stream. ``context``: handle of the stream's context; None for the current context.

        ``at``: place in the program where the stream was created; None for a stream that another library made and uses.
        """
        where = self.context() if context is None else context
        legacy = self.legacy(where)
        name = f"stream {handle:#x} ({'of another library' if at is None else 'created at ' + place_of(at)})"
        made = self.by_handle[handle] = self._timeline.stream(name, where, legacy if blocking else None, handle)
        self.devices[made] = self.devices[legacy]
        if at is None:
            self.foreign.queues_on(made)
        return made

    def rename(self, handle: Any, name: str) -> None:
        """Set the name of a stream in reports."""
        stream = self.find(handle)
        stream.name = f"stream {name!r} ({stream.name.partition('(')[2]}"

    def all(self, context: int | None = None) -> list[TrackedStream]:
        """Return the streams of one context, or of all contexts.

        Destroyed streams whose work may still run are among them.
        """
        found = [*self.by_handle.values(), *self._legacy.values(), *self._per_thread, *self._timeline.retired]
        return [one for one in found if context is None or one.context == context]

    def retire(self, stream: TrackedStream) -> None:
        """Record that a stream was destroyed, and remove it from captures, devices and the streams whose handles other
        libraries can get.
        """
        self.captures.pop(stream, None)
        self.foreign.ended(stream)
        self.devices.pop(stream, None)
        self._timeline.retire(stream)

    def end_context(self, context: int) -> list[int]:
        """Retire the streams of a context that ends. Returns the handles of these streams, except default streams."""
        ended = [handle for handle, one in self.by_handle.items() if one.context == context]
        for handle in ended:
            self.retire(self.by_handle.pop(handle))
        for one in (self._legacy.pop(context, None), *(it for it in self._per_thread if it.context == context)):
            if one is not None:
                self.retire(one)
        self._per_thread = [one for one in self._per_thread if one.context != context]
        return ended

    def name_nodes(self, stream: TrackedStream, *nodes: TrackedNode) -> None:
        """Set in ``nodes`` the handle of the graph node that a call has just added to the capture of ``stream``
        (``cuStreamGetCaptureInfo``); 0 if it is unknown. No effect if the stream is not being captured.
        """
        capture = self.captures.get(stream)
        if capture is None:
            return
        answer = self._ask.values("cuStreamGetCaptureInfo", stream.handle)
        there = answer[3] if len(answer) > 4 else None
        capture.name(stream, int(there[0]) if there and int(answer[-1]) == 1 else 0, nodes)
