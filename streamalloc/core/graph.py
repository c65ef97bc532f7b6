"""Graphs: captures of streams, launches, and the memory of graphs.

While a stream is captured, its queued work becomes nodes of a graph, allocations included. The graph owns the memory of
its allocations, which has the same address at every launch. :meth:`Graph.create` makes a graph without nodes, to which
cuda.core, driver calls and :meth:`GraphBuffer.add_to` add nodes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from streamalloc.core.deferred import HandleEnd, deferred_queue, work
from streamalloc.core.errors import ClosedError, CudaError, NotSupportedError
from streamalloc.core.resource import Closes, above
from streamalloc.core.session import GLOBAL, NOT_CALLED
from streamalloc.core.stream import StreamLike, captures_changed
from streamalloc.driver.internal import RLock, cuda

if TYPE_CHECKING:
    from typing_extensions import Self

    from streamalloc.core.device import Device
    from streamalloc.core.event import Event
    from streamalloc.core.stream import Stream

CaptureMode: TypeAlias = Literal["global", "thread_local", "relaxed"]
_MODES = ("global", "thread_local", "relaxed")


class Graph(Closes):
    """A graph, usually captured by :meth:`Stream.capture`. It can be launched any number of times; :meth:`close`
    releases it.

    The driver allows only one instance at a time of a graph that allocates memory. So a graph is instantiated once, by
    the first launch or by :meth:`instantiate`.

    Examples
    --------
    ::

        with stream.capture() as graph:
            buffer = pool.allocate(1 << 20, stream)
            buffer.fill(0)
            buffer.free()
        graph.launch(stream)
    """

    __slots__ = (
        "__weakref__", "_closed", "_executable", "_handle", "_in_use", "_launches", "_session", "device", "kept",
    )  # fmt: skip

    def __init__(self, device: Device) -> None:
        self.device: Device = device
        """The device of the captured stream, or that of :meth:`create`."""
        self._session = device._session
        self._handle = HandleEnd(self._session, "cuGraphDestroy", None)
        self._executable = HandleEnd(self._session, "cuGraphExecDestroy", None)
        self.kept: list[object] = []
        """Objects whose memory the fills and copies of the graph use. The graph and its queued launches keep these
        objects alive.
        """
        self._launches: Any = None
        """Item (:class:`~streamalloc.core.fence.KeptForWork`) that keeps ``kept`` for queued launches; None before the
        first launch, and if nothing is kept.
        """
        self._closed = False
        self._in_use = RLock()
        """Lock held while the graph is instantiated or destroyed."""

    @classmethod
    def create(cls, device: Device) -> Self:
        """Make a graph without nodes for streams of ``device`` (``cuGraphCreate``). Nodes are added by driver calls
        with :attr:`handle`, by cuda.core and by :meth:`GraphBuffer.add_to`. Raises TypeError if ``device`` is no
        :class:`Device`.
        """
        from streamalloc.core.device import check_device

        check_device("device", device)
        graph = cls(device)
        graph._handle._raw = graph._session.call("cuGraphCreate", 0)
        return graph

    @property
    def complete(self) -> bool:
        """Whether the graph can be launched. False before the end of the capture, after a failed capture, and after
        :meth:`close`.
        """
        return self._handle._raw is not None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, also by the end of a ``with`` block. Launches then raise ClosedError."""
        return self._closed

    @property
    def handle(self) -> int:
        """The driver's handle (``CUgraph``) as a number, for driver calls and cuda.core. :meth:`close` destroys this
        handle.

        Raises
        ------
        ClosedError
            The capture has not ended or has failed, or the graph was closed.
        """
        return int(self._checked_raw())

    def _checked_raw(self) -> Any:
        raw = self._handle._raw
        if raw is None:
            raise ClosedError(f"{self!r} has no nodes: its capture has not ended, failed, or it was closed")
        return raw

    def _raw_to_extend(self) -> Any:
        """Return the ``CUgraph``, to which nodes are added. Raises ClosedError, and ValueError if the graph was
        instantiated: its instance would lack the nodes.
        """
        if self._executable._raw is not None:
            raise ValueError(f"{self!r} was instantiated already, and its launches would lack the node: add it before")
        return self._checked_raw()

    @property
    def nodes(self) -> list[str]:
        """A list of the kinds of the graph's nodes, such as ``"MEM_ALLOC"`` (``cuGraphGetNodes``,
        ``cuGraphNodeGetType``). Raises ClosedError as :attr:`handle` does.
        """
        raw = self._checked_raw()
        _, count = self._session.call("cuGraphGetNodes", raw, 0)
        nodes, _ = self._session.call("cuGraphGetNodes", raw, count)
        kinds = (self._session.call("cuGraphNodeGetType", node) for node in nodes[:count])
        return [kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds]

    def instantiate(self, *, auto_free_on_launch: bool = False) -> Self:
        """Make the graph ready to launch (``cuGraphInstantiate``), and return the graph itself. Further calls have no
        effect, whatever their argument is.

        Parameters
        ----------
        auto_free_on_launch
            Whether each launch first frees the memory of earlier launches that was not freed. With False the driver
            refuses a launch while such memory is left.

        Raises
        ------
        ClosedError
            The capture has not ended or has failed, or the graph was closed.
        InvalidValueError
            The driver refuses the graph, for example because a fill or copy uses memory that was freed after the
            capture.
        NotSupportedError
            The graph allocates memory, and other code has an instance of it.
        """
        # Two threads may make the first launch. The driver refuses a second instance of a graph that allocates memory,
        # and of another graph one of the two instances would be lost.
        with self._in_use:
            if self._executable._raw is not None:
                return self
            flag = cuda.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
            wanted = self._checked_raw(), int(flag) if auto_free_on_launch else 0
            hint = "a fill or copy may use memory that was freed after its capture"
            owner = self._executable
            try:
                self._session.create_in(self.device.ordinal, owner, "cuGraphInstantiate", *wanted, hint=hint)
            except NotSupportedError as error:
                error.hint = "a graph with allocation nodes has one instance at a time, and other code has made one"
                raise
        return self

    def launch(self, stream: StreamLike) -> None:
        """Run the graph's work in stream order (``cuGraphLaunch``). The first launch also instantiates the graph,
        unless :meth:`instantiate` was called.

        Raises
        ------
        InvalidValueError
            Memory of an earlier launch is not freed, and the graph was instantiated without ``auto_free_on_launch``.
        ClosedError
            The graph or the stream was closed, or the capture has not ended or has failed.
        NotSupportedError
            As for :meth:`instantiate`.
        TypeError, ValueError
            ``stream`` is not a stream of this driver.
        """
        target: Stream = above.as_stream(stream, self._session)
        self.instantiate()
        hint = "free what an earlier launch allocated, or instantiate the graph with auto_free_on_launch=True"
        launched = self._executable._raw, target.checked_raw()
        with self._kept_for(target):
            self._session.call_in(target.device.ordinal, "cuGraphLaunch", *launched, hint=hint)

    def _kept_for(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block for a launch on ``stream``. The objects of :attr:`kept` are kept until the launch is
        done, also if this graph is dropped before.
        """
        if not self.kept:
            return contextlib.nullcontext()
        if stream._capture is not None:  # The launch becomes a node of another graph, which copies at each launch.
            stream._capture.graph.kept += self.kept
            return contextlib.nullcontext()
        with self._in_use:
            if self._launches is None:
                item = above.kept_for_work(self._session, self.kept)
                # The queue keeps the item. A finaliser that submits it could be interrupted by a signal handler. The
                # item is stored after that: a signal handler that raises in between must not leave it without a queue.
                deferred_queue(self._session).end_with(self, item)
                self._launches = item
        launching: contextlib.AbstractContextManager[None] = self._launches.queueing(stream)
        return launching

    def close(self) -> None:
        """Destroy the graph and its instance; queued launches still run (``cuGraphDestroy``, ``cuGraphExecDestroy``).
        Idempotent. Raises CudaError if the driver refuses; a further call tries again.
        """
        self._closed = True
        with self._in_use, self._session.relaxed():
            try:
                self._executable.attempt()
            finally:
                self._handle.attempt()

    def __del__(self) -> None:
        executable: HandleEnd | None = getattr(self, "_executable", None)
        if executable is not None and (executable._raw or self._handle._raw) and self._session.usable:
            queue = deferred_queue(self._session)
            queue.submit(executable)
            queue.submit(self._handle)

    def _text(self) -> str:
        state = "closed" if self._closed else "complete" if self.complete else "without nodes"
        return f" of device {self.device.ordinal}, {state}"


class Capture(contextlib.AbstractContextManager[Graph]):
    """Context manager of :meth:`Stream.capture`. It holds the streams that take part in the capture, and the graph.

    If the block raises, the capture is ended, its graph is destroyed, and the exception propagates.

    The capture begins in these steps:

    1. The capture is added to ``captures`` of the deferred queue, under the lock ``beginning``. From then on no
       deferred item is attempted, and no thread makes a call that names the legacy stream or a whole context. Such a
       call after ``cuStreamBeginCapture`` would invalidate the capture, and the program would lose its graph because of
       a release in the background. A thread that is in such a call holds the lock, so the capture waits for the end of
       the call.
    2. Direct driver calls are forbidden. In the mode "global" the driver refuses unsafe calls of *all* threads, and
       each such call invalidates the capture. So other threads make checked calls, in the relaxed mode.
    3. The stream's lock is taken. A deferred item may be freeing memory on the stream on another thread: this free
       would become a node, and run again with each launch.
    4. The driver begins the capture (``cuStreamBeginCapture``).

    At the end of the block, the driver ends the capture (``cuStreamEndCapture``), and the streams run their work again.
    Then the capture is removed from ``captures``, and the deferred items are attempted.
    """

    def __init__(self, origin: Stream, mode: CaptureMode) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: allowed are {', '.join(map(repr, _MODES))}")
        self.graph: Graph = Graph(origin.device)
        self._origin = origin
        self._mode = getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode.upper()}")
        self._session = origin._session
        self._queue = deferred_queue(origin._session)
        self._streams: list[Stream] = []
        self._begun = False

    def __enter__(self) -> Graph:
        if self._begun:
            raise RuntimeError("a capture is made once: call Stream.capture for another")
        raw = self._origin.checked_raw()
        try:
            self._begin(raw)
            return self.graph
        except BaseException as error:
            # If a signal handler raises after the capture has begun, no `with` block ends the capture, so it is ended
            # here.
            self.__exit__(type(error), error, None)
            raise

    def _begin(self, raw: Any) -> None:
        self._queue.begin_capture(self, forbids=self._mode == GLOBAL)
        captures_changed(self._session)
        # A deferred item on another thread may be freeing memory on the stream: without the lock, the capture would
        # record the free.
        with self._origin._in_use:
            if self._origin.closed:  # By another thread.
                raise ClosedError(f"{self._origin!r} was closed")
            # Set before the call: if a signal handler raises when the call returns, `__exit__` still ends the capture.
            self._begun = True
            try:
                hint = "is the stream being captured already?"
                if self._origin.is_default and not self._origin.capturable:
                    hint = "the legacy default stream cannot be captured: capture a stream of Device.create_stream"
                self._origin.in_context(self._session.call, "cuStreamBeginCapture", raw, self._mode, hint=hint)
            except (CudaError, *NOT_CALLED):
                self._begun = False
                raise
            self.adopt(self._origin)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = False
        try:
            if error is None:
                self._end()
                ended = True
        finally:
            try:
                if self._begun and not ended:
                    # If the block has invalidated the capture, `cuStreamEndCapture` ends the capture, but returns an
                    # error. The error of the block says more.
                    with contextlib.suppress(CudaError):
                        self._end()
                    self.graph.close()
            finally:
                if self in self._queue.captures:
                    del self._queue.captures[self]
                captures_changed(self._session)
                work(self._session)

    def _end(self) -> None:
        try:
            self._origin.in_context(self._take_graph)
        finally:
            # With `_capture` left set, later work of the streams would count as captured.
            for stream in self._streams:
                stream._capture = None
                stream._allow_direct()
            self._streams.clear()

    def _take_graph(self) -> None:
        self.graph._handle._raw = self._session.call("cuStreamEndCapture", self._origin._raw)

    def join(self, stream: Stream, event: Event) -> None:
        """Have ``stream`` wait for ``event`` of this capture (``cuStreamWaitEvent``). The driver then captures
        ``stream``, too.
        """
        with stream._in_use:
            wanted = stream.checked_raw(), event._checked_raw(), 0
            hint = "" if self in self._queue.captures else event._capture_hint
            stream.in_context(self._session.call, "cuStreamWaitEvent", *wanted, hint=hint)
            self.adopt(stream)

    def adopt(self, stream: Stream) -> None:
        """Add a stream that the driver captures. Until the capture ends, direct calls on the stream are forbidden, and
        its allocations belong to the graph.
        """
        stream._capture = self
        stream._forbid_direct()
        self._streams.append(stream)


class GraphMemoryStatistics(NamedTuple):
    """Memory that a device's graphs use and reserve, in bytes: the result of :meth:`GraphMemory.statistics`."""

    reserved: int
    """Bytes reserved for graphs."""
    reserved_high: int
    """Most bytes reserved since :meth:`GraphMemory.reset_peaks`, or else since the process began."""
    used: int
    """Bytes in use by graphs."""
    used_high: int
    """Most bytes in use since :meth:`GraphMemory.reset_peaks`, or else since the process began."""


class GraphMemory:
    """Memory of a device that belongs to graphs, and not to the device's pools.

    :attr:`Device.graph_memory` returns it; :doc:`/docs/guides/graphs` has programs.

    The launch of a graph with allocation nodes reserves memory of the device. The memory stays reserved until
    :meth:`trim`.
    """

    __slots__ = ("_session", "device")

    def __init__(self, device: Device) -> None:
        self.device: Device = device
        self._session = device._session

    def _get(self, name: str) -> int:
        attribute = getattr(cuda.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{name}")
        return int(self._session.call("cuDeviceGetGraphMemAttribute", self.device.ordinal, attribute))

    @property
    def used(self) -> int:
        """Bytes in use by graphs (``cuDeviceGetGraphMemAttribute``). Memory counts from the first launch that uses it
        until :meth:`trim` releases it, also after its free.
        """
        return self._get("USED_MEM_CURRENT")

    @property
    def used_high(self) -> int:
        """Most bytes in use since :meth:`reset_peaks`, or else since the process began
        (``cuDeviceGetGraphMemAttribute``).
        """
        return self._get("USED_MEM_HIGH")

    @property
    def reserved(self) -> int:
        """Bytes reserved for graphs (``cuDeviceGetGraphMemAttribute``)."""
        return self._get("RESERVED_MEM_CURRENT")

    @property
    def reserved_high(self) -> int:
        """Most bytes reserved since :meth:`reset_peaks`, or else since the process began
        (``cuDeviceGetGraphMemAttribute``).
        """
        return self._get("RESERVED_MEM_HIGH")

    def statistics(self) -> GraphMemoryStatistics:
        """Return the bytes reserved and used, now and at most since :meth:`reset_peaks`
        (``cuDeviceGetGraphMemAttribute``).
        """
        return GraphMemoryStatistics(self.reserved, self.reserved_high, self.used, self.used_high)

    def reset_peaks(self) -> None:
        """Set both high-water marks to the bytes used and reserved now (``cuDeviceSetGraphMemAttribute``)."""
        for name in ("USED_MEM_HIGH", "RESERVED_MEM_HIGH"):
            attribute = getattr(cuda.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{name}")
            self._session.call("cuDeviceSetGraphMemAttribute", self.device.ordinal, attribute, cuda.cuuint64_t(0))

    def trim(self) -> int:
        """Release reserved memory that no launched graph uses (``cuDeviceGraphMemTrim``). Returns the number of bytes
        released.
        """
        before = self.reserved
        self._session.call("cuDeviceGraphMemTrim", self.device.ordinal)
        return max(before - self.reserved, 0)

    def __repr__(self) -> str:
        return f"<GraphMemory of device {self.device.ordinal}>"
