"""Check of stream order for a whole process: the checker, fed with the driver calls of all libraries through CUPTI."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import time_ns
from typing import Any

from streamalloc.checker.capture import TrackedNode
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.contents import HOST_KINDS
from streamalloc.checker.ranges import Access, Piece
from streamalloc.checker.rules.table import RULES, UNKNOWN
from streamalloc.checker.streams import MEMORY_TYPE, CallingThread
from streamalloc.checker.uses import Kernel
from streamalloc.checker.wrapper import REFUSED, Recorder
from streamalloc.cupti import callers
from streamalloc.cupti.blocks import Blocks, Run, Use, addresses_of, kernel_of, parts_of
from streamalloc.cupti.gate import QUIET
from streamalloc.cupti.libraries import Libraries
from streamalloc.cupti.operators import Operators
from streamalloc.cupti.subscription import LAUNCHES, SOON, Block, DriverCall, RaisedAgain, Subscription, made
from streamalloc.driver import Hazard
from streamalloc.driver.account import COUNTED
from streamalloc.driver.internal import cuda
from streamalloc.driver.processes import for_children
from streamalloc.driver.reports import write_hazards
from streamalloc.driver.wrappers import Call

VARIABLE = "STREAMALLOC_CHECK_ALL"
"""Environment variable with the path of the folder in which checked child processes write their hazards."""
_MOST_LOGGED = 20_000
"""Number of logged uses after which the histories of the libraries are read, and the uses judged."""
_FEW_ENTRIES = 50_000
"""Number of entries that PyTorch's history keeps while only one stream has work."""
_GLANCE = 0.001
"""Seconds between two tests by a thread that waits for the lock. It tests whether another thread waits for the mutex of
PyTorch's allocator.
"""
_MOST_WAITING = 1000
"""Largest number of launches and calls of ``_ON_DEVICE`` that wait for the next call of another kind. These calls are
followed together, because that costs less than one at a time.
"""
_ON_DEVICE = frozenset(("cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async", "cuMemcpyDtoDAsync"))
_MAKE_SEGMENTS = ("cuMemAlloc", "cuMemMap")
_USES = ("cuLaunch", "cuMemcpy", "cuMemset")
_UNLOADS = frozenset(("cuModuleUnload", "cuLibraryUnload", "cuCtxDestroy", "cuDevicePrimaryCtxReset"))
_SUCCESS, _FAILED = cuda.CUresult.CUDA_SUCCESS, (cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
_HOST, _DEVICE = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE


class _Seen:
    """Stand-in for the driver, because callbacks must not call the driver. It answers from the calls followed so
    far.
    """

    is_simulated = True
    """True, as for a simulated machine: the checker records the calls of all libraries."""

    def __init__(self) -> None:
        self.context = 0
        """Handle of the current context of the thread whose call is being followed."""
        self.addresses: Any = None
        self._devices: dict[int, int] = {}
        """Device ordinal of each primary context, by context handle."""

    def saw(self, call: DriverCall) -> None:
        """Store the device of a primary context, if ``call`` has returned such a context."""
        if call.function == "cuDevicePrimaryCtxRetain" and not call.answer[0]:
            self._devices[call.answer[1]] = call.args[0]

    def cuStreamIsCapturing(self, stream: Any) -> tuple[Any, ...]:
        return _SUCCESS, 0

    def cuStreamGetFlags(self, stream: Any) -> tuple[Any, ...]:
        return _SUCCESS, 1

    def cuStreamGetCtx(self, stream: Any) -> tuple[Any, ...]:
        return _SUCCESS, self.context

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return _SUCCESS, self._devices.get(self.context, 0)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        return *_FAILED, mode

    def cuPointerGetAttribute(self, attribute: Any, address: Any) -> tuple[Any, ...]:
        found = self.addresses.find(int(address)) if attribute == MEMORY_TYPE else None
        return _FAILED if found is None else (_SUCCESS, _HOST if found.kind in HOST_KINDS else _DEVICE)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: _FAILED


class _Found(RaisedAgain):
    """Exception that says that there is a hazard. It takes no arguments, because ``PyThreadState_SetAsyncExc`` gets a
    class.
    """

    def __init__(self) -> None:
        super().__init__("the check of all driver calls has found a hazard; its report says more")


class _Raising:
    """Thread that raises :class:`_Found` in the main thread every half second until the block of :func:`check` ends.

    To raise it once is not enough: Python prints and drops an exception that arrives in a callback or a finaliser.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._running = threading.Lock()
        # ``Thread.start`` would wait for the new thread, and so release the GIL in a callback.
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        pause = SOON
        with self._running:
            while not self._ended.wait(pause):
                thread = ctypes.c_ulong(threading.main_thread().ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Found))
                pause = 0.5

    def end(self) -> None:
        """End the thread. No exception arrives after this call."""
        self._ended.set()
        with self._running:
            pass


class Check:
    """Check of the driver calls of all code in this process; the value of the ``with`` block of :func:`check`."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises
        """Whether the first hazard raises an exception in the main thread."""
        self._raising: _Raising | None = None
        self._seen = _Seen()
        self._recorder = Recorder(self._seen, "report")
        self._seen.addresses = self._recorder.state.addresses
        self._recorder.state.on_use = self._used
        # The driver does not report which bytes a kernel writes, so any kernel may write.
        self._recorder.state.streams.foreign.may_write = True
        self._libraries = Libraries(stacks=None, most_entries=_FEW_ENTRIES)
        self._blocks = Blocks(self._recorder.state)
        self._operators: Operators | None = None
        """Dispatch mode of PyTorch; None until the program makes a stream, because one stream needs no check."""
        self._has_streams = False
        self._waiting: deque[DriverCall] = deque()
        """Calls that are not followed yet, oldest first. Consecutive launches on a stream are followed together."""
        self._turn = threading.Lock()
        """Lock of the thread that follows the waiting calls. The callbacks of other threads wait for this lock, so that
        their threads do not overwrite the arguments of the calls before the checker has read them.
        """
        self._worker = 0
        """Ident of the thread that follows the waiting calls; 0 if no thread does."""
        self._late: dict[int, int] = {}
        """By thread: time (ns) of its last call that did not wait. Until then arguments may have been overwritten."""
        self._handles: set[int] = set()
        """Handles of the streams on which kernels were launched."""
        self._of_natives: set[int | None] = set()
        """Addresses that a library of NVIDIA has allocated for itself, and that the checker does not track yet."""
        self._first: TrackedStream | None = None
        """First stream on which an operation was followed; None before."""
        self._is_alone = True
        """Whether only one stream has had work, and no capture has begun. Then no use can be a hazard, and the
        histories of the libraries are not read.
        """
        self._has_new_segments = False
        """Whether a library may have allocated a segment since the histories were read."""
        self._was_read = False
        """Whether uses have been judged before. The first time, PyTorch's live blocks are also read."""
        self._subscription: Subscription = Subscription(self._called, {*RULES, *COUNTED, *UNKNOWN, *LAUNCHES})
        self._libraries.gate = gate = self._subscription.gate
        self._recorder.state.judge.sees_grants = lambda: not gate.has_left_out

    @property
    def hazards(self) -> list[Hazard]:
        """All hazards so far, oldest first. Two hazards with the same pair of places in the program count once."""
        return self._recorder.hazards

    @property
    def error(self) -> BaseException | None:
        """Error that ended the check early; None if there was none."""
        return self._subscription.error

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts that say which calls and which memory were not checked."""
        return self._recorder.notes

    @contextlib.contextmanager
    def running(self, at_once: bool) -> Iterator[Check]:
        """Check the process within the ``with`` block. Its value is this object. ``at_once``: whether each hazard is
        printed when it is found.

        Raises :class:`CuptiError` if CUPTI cannot be used. If the object was made with ``raises=True``, the first
        hazard raises ``DriverMisuseError`` in the main thread, at the latest at the end of the block.
        """
        if at_once:
            self._recorder.show_at_once(None)
        process = os.getpid()
        with Block() as undo:
            if at_once:
                undo.callback(self._show_rest)
            undo.callback(self._recorder.close)
            undo.enter_context(self._libraries.followed())
            undo.callback(self.merge)
            undo.callback(self._leave_operators)
            undo.callback(self._raise_here)
            undo.callback(self._work)
            self._subscription.open()
            undo.callback(self._subscription.close)
            yield self
        if self._raises and self.hazards and os.getpid() == process:
            raise _Found

    def _raise_here(self) -> None:
        """End the thread that raises :class:`_Found` in the main thread, so that no exception arrives after the
        block.
        """
        if self._raising is not None:
            self._raising.end()

    def _leave_operators(self) -> None:
        if self._operators is not None:
            self._operators.close()

    def _show_rest(self) -> None:
        self._recorder.show_rest()
        if self.error is not None:
            text = "".join(traceback.format_exception(self.error))
            print(f"streamalloc check: not checked: all that came after this error:\n{text}", file=sys.stderr)

    @contextlib.contextmanager
    def in_children(self, folder: Path) -> Iterator[None]:
        """Also check the Python processes that the program starts within the ``with`` block. The block sets the
        environment variables ``STREAMALLOC_CHECK_ALL`` and ``PYTHONPATH``, which these processes inherit.

        Each of these processes writes its hazards to a JSON file in ``folder`` when it ends, if there are any.
        """
        with for_children({VARIABLE: str(folder)}):
            yield

    def merge(self, upto: int | None = None) -> None:
        """Report the hazards among the uses logged up to the time ``upto`` (``time.time_ns``; None: now), with the
        allocations and frees of the libraries' allocators until then. No effect while only one stream has work.
        """
        is_alone = self._is_alone
        of_torch = self._has_new_segments or not is_alone
        self._has_new_segments = False
        events = self._libraries.events(of_torch, live=not (is_alone or self._was_read))
        self._was_read |= not is_alone

        def judge() -> None:
            self._blocks.merge(events, upto or time_ns(), is_alone)

        self._recorder.between_calls(self._seen.context, judge)

    # -- in callbacks ----------------------------------------------------------------------------------------------

    def _called(self, call: DriverCall) -> None:
        function, is_launch = call.function, call.function in LAUNCHES
        if not is_launch and function.startswith("cuStreamCreate"):
            self._has_streams |= callers.caller(None) not in callers.NATIVE
        if self._has_streams:
            call = self._with_operands(call)
        # PyTorch may make the calls of QUIET while it holds its allocator's mutex. If this callback waited for a thread
        # that waits for the mutex, both would wait for ever.
        is_quiet = not is_launch and function in QUIET and self._libraries.torch is not None
        self._waiting.append(call._replace(is_late=True) if is_quiet else call)
        if is_quiet or call.is_late:
            return
        if is_launch:
            stream = call.args[1]
            if stream in self._handles and len(self._waiting) < _MOST_WAITING:
                return
            self._handles.add(stream)
        elif function in _ON_DEVICE and len(self._waiting) < _MOST_WAITING:
            return
        elif function == "cuMemAlloc" and call.answer[1] and callers.caller(None) in callers.NATIVE:
            # A library of NVIDIA, such as cuDNN, has allocated this memory, and may fill the memory on a stream of its
            # own. The program cannot order that work, so a report of a missing order would not help.
            self._of_natives.add(call.answer[1])
        self._work(call)

    def _with_operands(self, call: DriverCall) -> DriverCall:
        """Enter the dispatch mode on this thread. Returns the call, with the tensors of the PyTorch operator if it is a
        launch.
        """
        torch = self._libraries.torch
        if self._operators is None and torch is not None:
            self._operators = Operators(torch)
        if self._operators is None:
            return call
        self._operators.enter()
        if call.function not in LAUNCHES:
            return call
        operands = self._operators.operands(call.thread, kernel_of(call), call.pointers)
        return made(DriverCall, (*call[:-2], operands, False)) if operands else call

    def _work(self, call: DriverCall | None = None) -> None:
        """Follow all waiting calls; leave them to a later call if the wait for another thread could deadlock. ``call``:
        the call whose callback runs on this thread; None outside of callbacks.
        """
        if self._worker == threading.get_ident():
            # A finaliser made the call within the loop below, which takes this call, too. A wait for `_turn` would not
            # end.
            return
        is_mine = False
        try:
            while not is_mine:
                # ``map`` calls ``acquire`` from C, so no signal handler can raise between the call and the assignment.
                # Such an exception would leave the lock held for ever.
                (is_mine,) = map(self._turn.acquire, (True,), (_GLANCE,))
                # Another thread waits for the mutex of PyTorch's allocator, and this thread may hold that mutex. To
                # wait for the other thread would deadlock.
                if not is_mine and call is not None and self._subscription.gate.is_asking:
                    self._late[call.thread] = call.time
                    return
            self._worker = threading.get_ident()
            while self._waiting:
                self._take()
            self._recorder.state.sources.is_late = False
        finally:
            if is_mine:
                self._worker = 0
                self._turn.release()
        if self._raises and self.hazards and self._raising is None:
            self._raising = _Raising()

    def _take(self) -> None:
        one, was_alone = self._waiting.popleft(), self._is_alone
        state = self._recorder.state
        state.now, self._seen.context = one.time, one.context
        if one.function.startswith(_USES) and (self._has_new_segments or self._blocks.count > _MOST_LOGGED):
            # The libraries' histories are read before this use, so that the use is compared with its block and not with
            # the whole segment. The reading takes the allocator's mutex. This thread does not hold it, because PyTorch
            # makes no call of ``_USES`` with the mutex.
            self.merge(one.time)
        # If the call's thread did not wait for the lock, it may have overwritten the arguments of the call.
        state.sources.is_late = one.is_late or one.time <= max(self._late.values(), default=0)
        if one.function in LAUNCHES:
            run, stream = [one], (one.args[1], one.thread, one.context)
            while self._waiting and (later := self._waiting[0]).function in LAUNCHES:
                if (later.args[1], later.thread, later.context) != stream:
                    break
                run.append(self._waiting.popleft())
            self._run(run)
        else:
            self._follow(one)
        if was_alone and not self._is_alone:
            self._libraries.record_all()

    def _run(self, launches: list[DriverCall]) -> None:
        """Record consecutive launches of one thread on one stream, each at its own time of the stream."""

        def runs(stream: TrackedStream) -> None:
            self._uses(stream)
            self._blocks.log(Run(stream, stream.time, stream.clock.known.copy(), launches))
            # Each launch needs its own time on the stream, because two uses of equal time have no order.
            stream.time += len(launches) - 1
            stream.clock.known[stream.number] = stream.time

        first = launches[0]
        caller = CallingThread(first.thread, first.context, first.place)
        described = ((addresses_of(one), functools.partial(_kernel, one)) for one in launches)
        self._recorder.feed_kernels(caller, first.args[1], described, runs)

    def _follow(self, call: DriverCall) -> None:
        self._seen.saw(call)
        self._has_new_segments |= call.function in _MAKE_SEGMENTS
        if call.function == "cuStreamBeginCapture":
            self._is_alone = False
            self._blocks.captures.append((call.time, 0))
        elif call.function == "cuStreamEndCapture":
            ended = [(begin, end or call.time) for begin, end in self._blocks.captures]
            self._blocks.captures[:] = ended
        if call.function in _UNLOADS:
            self._subscription.kernels.forget()
        try:
            self._recorder.feed(Call(call.function, call.args, call.answer, call.thread), call.context, call.place)
        except REFUSED:
            # C code may pass arguments that the bindings never pass, such as a null pointer for the answer.
            self._recorder.state.notes.add("calls", call.function, call.place)
        addresses, address = self._recorder.state.addresses, call.answer[-1]
        if self._of_natives and address in self._of_natives and (found := addresses.find(address)) is not None:
            self._of_natives.discard(address)
            addresses.divide(found)

    def _uses(self, stream: TrackedStream) -> None:
        """Note that the stream has work. Once a second stream has work, uses have to be judged."""
        if self._first is None:
            self._first = stream
        self._is_alone &= stream is self._first

    def _used(self, access: Access, piece: Piece, stream: TrackedStream, node: TrackedNode) -> None:
        self._uses(stream)
        _, low, high = piece
        now, clock = self._recorder.state.now, stream.clock.known.copy()
        # None means that the write is unknown. A kernel may write, and its first use of new memory counts as a write.
        part = low, high, access.write or (None if node.kernel else False)
        what, place, captured = access.what, access.stack, node.captured
        self._blocks.log(Use(now, stream, access.time, clock, what, place, (part,), captured))


def _kernel(launch: DriverCall) -> Kernel:
    return kernel_of(launch).what, launch.place, functools.partial(parts_of, launch)


@contextlib.contextmanager
def check(*, at_once: bool = False, raises: bool = False) -> Iterator[Check]:
    """Check the stream order of all driver calls in a ``with`` block, made by the program, PyTorch, CuPy or any
    library.

    The check follows memory of pools, ``cuMemAlloc``, mappings, pinned memory, and the blocks of PyTorch's and CuPy's
    allocators, with the copies, fills, kernels, waits, graphs and frees that use it. The check assumes that a kernel
    uses the memory whose addresses are among its arguments, and that the kernel writes

    * its output, if it is a kernel of PyTorch for element-wise operations, reductions or lists of tensors, or a kernel
      of CuPy's own operations;
    * what the schema of PyTorch's operator says, once the program has made a stream, if the operator uses its tensors
      whole;
    * new memory that no call has used before, unless these two say that the kernel only reads it.

    All other uses by a kernel are unknown, and count as reads. So a race is missed if its only write is such an unknown
    use.

    Import the libraries and initialise CUDA in the block. Leaks are not reported, because libraries keep memory until
    the end.

    Parameters
    ----------
    at_once
        Whether to print each hazard on the standard error stream when it is found.
    raises
        Whether the first hazard raises :class:`~streamalloc.driver.DriverMisuseError` in the main thread. The exception
        comes soon after the hazard was found, at the latest at the end of the block.

    Raises
    ------
    CuptiError
        CUPTI's library is missing, or another tool has subscribed: CUPTI allows one subscriber at a time.

    Reference: CUPTI's callback API, ``cuptiSubscribe``. :doc:`/docs/reference/cupti` has an example.
    """
    with Check(raises).running(at_once) as running:
        yield running


def check_child() -> None:
    """Check this process until it ends. A checked parent process has started it (:meth:`Check.in_children`). Raises
    :class:`CuptiError` if CUPTI cannot be used.
    """
    folder, process = Path(os.environ[VARIABLE]), os.getpid()
    check, undo = Check(raises=False), contextlib.ExitStack()
    undo.enter_context(check.running(at_once=True))

    def end() -> None:
        undo.close()
        if os.getpid() == process:
            write_hazards(folder, check.hazards)

    atexit.register(end)
