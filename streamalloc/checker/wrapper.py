"""The recorder, which applies the rule of each driver call to the state, and the checked driver, which reports its
calls to the recorder.

A recorder gets calls in five ways (feeds). Each changes the state in its turn (:class:`_Turn`), and delivers hazards
after that:

* :class:`CheckedDriver` calls :meth:`Recorder.begin_call` and :meth:`Recorder.end_call` around each call that it
  forwards. A hazard that raises before the call prevents the call.
* :meth:`Recorder.feed` gets calls that were made already. Its hazards cannot prevent these calls.
* :meth:`Recorder.feed_kernels` gets launches of kernels of other code.
* :meth:`Recorder.between_calls` judges uses whose calls were recorded before.
* The package itself calls the methods of ``MemoryListener``. ``used`` and ``shared`` deliver their hazards at once.
  Hazards of the other methods are delivered by the next feed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial, wraps
from time import monotonic, sleep
from typing import Any, TypeVar, cast

from streamalloc.checker import uses
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.poison import Poison
from streamalloc.checker.report import Reports
from streamalloc.checker.rules.streams import HostCall, host_function
from streamalloc.checker.rules.table import RULES, UNKNOWN
from streamalloc.checker.state import State
from streamalloc.checker.streams import CallingThread
from streamalloc.driver.account import COUNTED, ENDERS, MAKERS, SETTLERS
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.errors import DriverMisuseError, PreventedCallError
from streamalloc.driver.locks import RLock
from streamalloc.driver.parent import ParentTest, from_server
from streamalloc.driver.protocol import Driver, MemoryListener, On
from streamalloc.driver.reports import Hazard, Stack, place_of
from streamalloc.driver.wrappers import Call, Function, Wrapper

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")
_MOST_DESTROYED = 4096
"""Largest number of destroyed handles for which a report can name the place of the destruction. A later use of an older
handle is not reported, and a report of its second destruction lacks the place.
"""
_PATIENCE = 1.0
"""Longest time in seconds to wait for queued work before leaks are reported."""
INVALID = (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
"""Answer in place of the driver's for a call that is not made."""
REFUSED = (AttributeError, IndexError, NotImplementedError, OverflowError, TypeError, ValueError)
"""Errors that the bindings raise for wrong arguments, or a simulated machine for calls that it does not model. A rule
that converts such arguments raises them too.
"""


def _notification(delivers: bool = False) -> Callable[[F], F]:
    """Decorate a method to run with the turn to change the state (:class:`_Turn`).

    ``delivers``: whether hazards may be raised in the call, because the program makes it.
    """

    def decorate(step: F) -> F:
        @wraps(step)
        def notify(self: Recorder, *args: Any, **named: Any) -> None:
            if self._turn.mine():
                self._turn.postpone(partial(step, self, *args, **named))
                return
            (self._record if delivers else self._turn.alone)(partial(step, self, *args, **named))

        return cast("F", notify)

    return decorate


class _Turn:
    """Turn to change the state: one thread has it at a time.

    A finaliser may make a driver call between any two lines of a step, on the same thread. So the lock is reentrant:
    otherwise the finaliser would wait for its own thread. The state is half changed then, so its call is recorded after
    the step (:meth:`postpone`). A call that the checker makes itself in a step gives the turn away meanwhile
    (:meth:`outside`).
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._thread = 0
        """``threading.get_ident()`` of the thread that has the turn; 0 if no thread has it."""
        self._postponed: deque[Callable[[], object]] = deque()

    def mine(self) -> bool:
        """Whether this thread has the turn. If so, the caller is a finaliser that has interrupted a step."""
        return self._thread == threading.get_ident()

    def postpone(self, step: Callable[[], object]) -> None:
        """Have ``step`` called after the step that the finaliser has interrupted."""
        self._postponed.append(step)

    def alone(self, step: Callable[..., T], *args: Any) -> T:
        """Call ``step`` with the turn, and return its result."""
        return self.taking(None, step, *args)[0]

    def taking(self, reports: Reports | None, step: Callable[..., T], *args: Any) -> tuple[T, list[Hazard]]:
        """Call ``step`` with the turn. Returns its result, and the hazards that ``reports`` has after it.

        The hazards are taken in the same turn, so that no other thread delivers them.
        """
        with self.lock:
            self._thread = threading.get_ident()
            try:
                # A finaliser may have made a call right after the previous step, and so before this one.
                if self._postponed:
                    self._call_postponed()
                result = step(*args)
                fresh = reports.take() if reports is not None and reports.found else []
                # This block has no loop: on Python 3.12 and newer, an exception of a signal handler in a loop can skip
                # the finally clause.
                if self._postponed:
                    self._call_postponed()
                return result, fresh
            finally:
                if self.mine():  # It is false if a signal handler raised while `outside` was waiting for the lock.
                    self._thread = 0

    def _call_postponed(self) -> None:
        while self._postponed:
            self._postponed.popleft()()

    def outside(self, function: Function, args: tuple[Any, ...]) -> Any:
        """Call a driver function without the turn, and return its answer. With it, the driver could wait for a thread
        whose finaliser waits for the lock.
        """
        self._thread = 0
        self.lock.release()
        try:
            return function(*args)
        finally:
            self.lock.acquire()
            self._thread = threading.get_ident()


class Recorder:
    """Records the calls of one driver, and finds hazards in them."""

    def __init__(self, driver: Any, on: On, uninitialized: bool = False) -> None:
        self._turn = _Turn()
        self._destroyed: dict[int, Stack] = {}
        """For each destroyed object, by its handle: the place of the call that destroyed it."""
        self._on = on
        # A list, because a hazard is raised or shown only after its call (`Reports.take`), when the turn has ended.
        found: list[Hazard] = []
        self.state: State = State(_WithoutLock(driver, self._turn), found.append, uninitialized)
        """The state of the driver. A feed may read it between two calls."""
        self.state.streams.foreign.calls_are_seen = bool(getattr(driver, "is_simulated", False))
        self._reports = Reports(on, self.state.notes, found)
        self.hazards: list[Hazard] = self._reports.all
        """All hazards in the order in which they were found, one for each pair of places. The program may clear the
        list.
        """
        self.finished: bool = False
        """Whether :meth:`finish` or :meth:`close` was called, or the end of the process has shown all hazards."""
        self.process: int = os.getpid()
        """Id of the process that made the recorder. At exit, a forked child reports only hazards that it has found
        itself.
        """

    # -- calls: before and after each --------------------------------------------------------------------------

    def begin_call(self, name: str, args: tuple[Any, ...]) -> uses.Rest | None:
        """Apply the part of a rule that precedes the call, and deliver its hazards. Returns one of these:

        ================  ==============================================  =============================================
        Result            Case                                            Next step of the caller
        ================  ==============================================  =============================================
        ``uses.nothing``  no rule has steps before the call               makes the call, then :meth:`end_call`
        another function  the rule has steps before the call              the same: it takes the driver's answer
        a `RefusedCall`   the rule cannot convert the arguments           the same, but does not poison memory
        None              the call would end an object that is not live   makes no call, and answers :data:`INVALID`
        ================  ==============================================  =============================================

        With ``on="raise"`` a hazard raises :class:`DriverMisuseError`, and the call is not made.
        """
        rule = RULES.get(name)
        if name not in ENDERS and (rule is None or rule.around is None):
            return uses.nothing
        return self._record(self._apply, name, args, True, undo=self._end_unmade)

    def end_call(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], rest: uses.Rest) -> None:
        """Apply the part of a rule that follows the call, and deliver its hazards.

        ``rest``: the result of :meth:`begin_call`. With ``on="raise"`` a hazard raises :class:`DriverMisuseError`.
        Raises the error of a :class:`RefusedCall` if the driver has accepted the call.
        """
        self._record(self._after, name, args, answer, rest)

    def feed(self, call: Call, context: int, place: Stack) -> None:
        """Record a call that was not made through the wrapper. ``context``: handle of the caller's current context;
        ``place``: its place in the program.

        Calls are fed in the order in which they were made, without the checker's own calls. Hazards are delivered as
        for a call through the wrapper, but a wrong call cannot be stopped any more. A call that ends an unknown handle
        is reported only if the driver has refused the call, because the handle may be older than the feed.
        """
        if call.name not in RULES and call.name not in COUNTED:
            self._skipped(call.name, call.answer)
            return

        def record() -> None:
            if not (call.answer[0] and self._ends_unknown(call.name, call.args)):
                self._late(call.name, call.args, call.answer)

        self._deliver_as(CallingThread(call.thread, context, place), record)

    def feed_kernels(
        self, caller: CallingThread, stream: int, launches: Iterable[uses.Launch], runs: Callable[[TrackedStream], None]
    ) -> None:
        """Record launches of kernels of other code on a stream, in the order of ``launches``.

        ``runs`` is called with the stream when the stream runs the kernels. With ``on="raise"`` a hazard raises
        :class:`DriverMisuseError`.
        """

        def record() -> None:
            state = self.state
            state.look()
            uses.kernels_of_others(state, state.stream(stream), launches, runs)

        self._deliver_as(caller, record)

    def between_calls(self, context: int, step: Callable[[], object]) -> None:
        """Call ``step``, which checks uses whose calls were recorded before, and deliver its hazards.

        ``context``: handle of the context to which default streams of these uses belong. With ``on="raise"`` a hazard
        raises :class:`DriverMisuseError`.
        """
        self._deliver_as(CallingThread(0, context, ()), step)

    def _deliver_as(self, caller: CallingThread, step: Callable[[], object]) -> None:
        """Call ``step`` in a turn, with the thread and context of ``caller``, and deliver its hazards."""

        def record() -> None:
            self.state.streams.caller = caller
            try:
                step()
            finally:
                self.state.streams.caller = None

        self._record(record)

    def _record(self, step: Callable[..., T], *args: Any, undo: Callable[[T], object] | None = None) -> T:
        """Call ``step`` in a turn, and deliver the hazards that it finds. Returns the result of ``step``. ``undo`` is
        called with this result if a hazard raises.
        """
        result, fresh = self._turn.taking(self._reports, step, *args)
        if fresh:
            self._reports.deliver(fresh, None if undo is None else partial(undo, result))
        return result

    def _skipped(self, name: str, answer: tuple[Any, ...]) -> None:
        """Add a note for a successful call that has no rule, and that may use memory or order work: it was not
        checked.
        """
        if name in UNKNOWN and not answer[0]:
            self._turn.alone(self.state.notes.add, "calls", name)

    def _end_unmade(self, rest: uses.Rest | None) -> None:
        """End the rule of a call that is not made because of a hazard, as if the driver had refused the call."""
        if rest is not None:
            self._turn.alone(rest, INVALID)

    def _ends_unknown(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether a call ends an object whose handle is not live. If so, this method has reported the call."""
        handle = _handle(args) if name in ENDERS else 0
        if not handle or self.state.account.may_end(name, handle):
            return False
        self._refuse(name, handle)
        return True

    def _apply(self, name: str, args: tuple[Any, ...], can_prevent: bool) -> uses.Rest | None:
        """Run the steps of a rule that precede the call. Returns the steps that follow it; None if the call must not be
        made, which is tested with ``can_prevent``.
        """
        if can_prevent and self._ends_unknown(name, args):
            return None
        self.state.look()
        rule = RULES.get(name)
        if rule is None or rule.around is None:
            return uses.nothing
        try:
            return uses.run_before(rule.around(self.state, name, args))
        except REFUSED as error:
            return RefusedCall(error)

    def _after(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...], rest: uses.Rest) -> None:
        state, succeeded = self.state, not answer[0]
        state.look()
        if succeeded:
            self._count(name, args, answer)
        elif self._destroyed:
            self._find_destroyed(name, args)
        rest(answer)
        rule = RULES.get(name)
        if succeeded and rule is not None and rule.after is not None:
            rule.after(state, name, args, answer)
        shared = state.interprocess
        if shared.posted or shared.leaving or shared.uses:
            shared.update_announcements()

    def _late(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
        """Record a call that was made already: by a finaliser while a rule ran, or by code whose calls are fed."""
        self._after(name, args, answer, self._apply(name, args, False) or uses.nothing)

    # -- handles that are no longer valid ----------------------------------------------------------------------

    def _count(self, name: str, args: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
        """Count the handle of the object that a successful call makes or ends."""
        state = self.state
        if name in MAKERS:
            self._destroyed.pop(int(answer[1]), None)
        if name.endswith("Destroy"):
            self._destroyed[_handle(args)] = state.place()
            if len(self._destroyed) > _MOST_DESTROYED:
                del self._destroyed[next(iter(self._destroyed))]
        if name in COUNTED:
            stream = args[-1] if name in ("cuMemAllocAsync", "cuMemAllocFromPoolAsync") else None
            captures = state.streams.captures
            captured = bool(captures) and stream is not None and state.stream(stream) in captures
            state.account.note(name, args, answer, captured)

    def _refuse(self, name: str, handle: int) -> None:
        """Report a call that ends an object whose handle is not live. Raises :class:`DriverMisuseError` with
        ``on="raise"``.
        """
        range_ = self.state.addresses.find(handle)
        ended = self._destroyed.get(handle) if range_ is None or range_.ended is None else range_.ended.stack
        places = [("this call", self.state.place())]
        what = f"{name}({handle:#x}) is refused, because no live {' or '.join(ENDERS[name])} has this handle"
        if ended is not None:
            places.append(("freed", ended))
            what += f": it was ended at {place_of(ended)}"
        if range_ is not None and range_.ended is not None:
            places.append(("allocated", range_.stack))
        remedy, size = "end it once, and only where your program has made it.", 0 if range_ is None else range_.size
        hazard = Hazard("double free", f"{what}.", remedy, handle, size, places=tuple(places))
        if self._on == "raise":
            raise PreventedCallError(str(hazard), hazard)
        self.state.on_hazard(hazard)

    def _find_destroyed(self, name: str, args: tuple[Any, ...]) -> None:
        """Report a call that the driver has refused, if one of its arguments is the handle of a destroyed object."""
        for argument in args:
            handle = _handle((getattr(argument, "hStream", argument),))
            stack = self._destroyed.get(handle)
            if stack is not None:
                which = next((one.name for one in self.state.timeline.retired if one.handle == handle), f"{handle:#x}")
                what = f"{name} is called with {which}, which was destroyed at {place_of(stack)}."
                remedy = "destroy it after its last use."
                if "Free" in name:
                    remedy += " The memory that this call should have freed stays allocated."
                places = (("this call", self.state.place()), ("destroyed", stack))
                self.state.on_hazard(Hazard("use after destroy", what, remedy, places=places))
                return

    # -- notifications of the facade ---------------------------------------------------------------------------

    @property
    def listener(self) -> MemoryListener:
        """Object that the package notifies of uses and other facts: this recorder."""
        return self

    @_notification(delivers=True)
    def used(self, address: int, nbytes: int, stream: Any, write: bool, atomic: bool = False) -> None:
        """Record a use of ``nbytes`` bytes at ``address`` by a kernel on ``stream`` (CUstream). ``stream=None``: a use
        by the host, now.

        ``write``: whether the use writes. ``atomic``: whether the use is atomic, so that it does not race with other
        atomic uses. With ``on="raise"`` a hazard raises :class:`DriverMisuseError`.
        """
        state = self.state
        state.look()
        if stream is None:
            uses.use_on_host(state, address, nbytes, write, seen=True)
            return
        uses.use_on_device(state, state.stream(stream), address, nbytes, write, atomic)
        if state.interprocess.uses:
            state.interprocess.update_announcements()

    @_notification()
    def lent(self, stream: Any, used: bool) -> None:
        """Record that other code has the handle of ``stream``. ``used``: whether that code queues work on the
        stream.
        """
        foreign, lent = self.state.streams.foreign, self.state.stream(stream)
        (foreign.queues_on if used else foreign.can_queue_on)(lent)
        foreign.is_lent(lent)

    @_notification()
    def named(self, stream: Any, name: str) -> None:
        """Set the name of ``stream`` in reports."""
        self.state.streams.rename(stream, name)

    @_notification()
    def typed(self, address: int, nbytes: int, dtype: Any, write: bool) -> None:
        """Record that queued work writes elements of type ``dtype``. ``write=False``: the host reads elements as this
        type, which is compared with the recorded types, unless other code may launch kernels that the checker does not
        record.
        """
        if write:
            self.state.types.wrote(address, nbytes, dtype, self.state.place())
        # The type of a copy's target is compared already if the driver got the array: a second time would count twice.
        elif not self.state.streams.foreign.may_write and self.state.types.compared != (address, nbytes):
            self.state.types.read(address, nbytes, dtype, "a copy of a view")

    @_notification()
    def released(self, address: int, nbytes: int, released: bool) -> None:
        """Record that the program no longer writes to mapped memory. With ``released`` False, record that it uses this
        memory again.
        """
        uses.release_mapped(self.state, address, nbytes, released)

    @_notification()
    def deferred(self, address: int) -> None:
        """Record that the program has freed memory, and that the driver call for this free comes later. So a missing
        free is no leak.
        """
        found = self.state.addresses.find(address)
        if found is not None:
            found.deferred = True

    @_notification(delivers=True)
    def shared(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        """Record that importers may use ``nbytes`` bytes at ``address`` once the queued work of ``stream`` is done.
        ``name``: name of the announcement, which importers pass to :meth:`opened`. With ``on="raise"`` an incomplete
        export raises :class:`DriverMisuseError`.
        """
        state = self.state
        state.sources.clear()
        state.interprocess.share(state.stream(stream), address, nbytes, name, state.place())

    @_notification()
    def opened(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        """Record that ``stream`` waits for an announcement of :meth:`shared` before it uses ``nbytes`` bytes of
        imported memory at ``address``. ``stream=None``: the host has waited for it.

        ``name``: name of the announcement. ``word``: address of the 32-bit value for which the stream waits.
        """
        on = None if stream is None else self.state.stream(stream)
        self.state.interprocess.opened(on, address, nbytes, name, word)

    # -- reports and leaks -----------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts on everything that this run did not check: one for each reason, with a count and the first place in the
        program.
        """
        return self.state.notes.texts()

    def outstanding(self) -> dict[str, list[int]]:
        """Return the handles or addresses that calls of this driver have made and not released: a list for each kind of
        object.

        A ``"mapping"`` is listed by its address, from ``cuMemMap`` to ``cuMemUnmap``.
        """
        return self._turn.alone(self.state.account.outstanding)

    def leaks(self) -> list[Hazard]:
        """Return the leaks: one hazard for each kind of memory and each place in the program that allocated memory of
        this kind which is not freed.
        """
        return self._turn.alone(self.state.leaks)

    def assert_nothing_left(self) -> None:
        """Raise :class:`DriverMisuseError` unless :meth:`outstanding` is empty."""
        if left := self.outstanding():
            shown = "; ".join(f"{len(handles)} {kind}" for kind, handles in left.items())
            raise DriverMisuseError(f"not released: {shown} ({left})")

    def finish(self) -> list[Hazard]:
        """Attempt deferred releases for at most a second, check the work that is queued behind waits, and add leaks.
        Returns all hazards.

        Without this call, the end of the process does the same, and prints the hazards that were not shown. A forked
        child only prints those that it has found.
        """
        self.settle()
        self.finished = True
        return self.hazards

    def settle(self) -> None:
        end = monotonic() + _PATIENCE
        # An object that the program has dropped is released only after its queued work. So the attempt may have to be
        # repeated.
        while any([settle() for settle in SETTLERS]) and monotonic() < end and self.leaks():
            sleep(0.002)
        self._turn.alone(self.state.close)
        self._reports.found += self.leaks()
        self._turn.alone(self._reports.take)

    def close(self) -> None:
        """Check the work that is queued behind waits. Leaks are not reported. With ``on="raise"`` a hazard raises
        :class:`DriverMisuseError`.
        """
        self.finished = True
        self._record(self.state.close)

    def show_rest(self) -> None:
        """Print the hazards that were not shown, the number of hazards, and the notes on what was not checked."""
        self._reports.show_rest(summary=True)

    def show_at_once(self, test: ParentTest | None) -> None:
        """From now on show each hazard when it is found: in the parent process's test, or on stderr if ``test`` is
        None.
        """
        self._reports.show_at_once(test)


class RefusedCall:
    """Rest of a rule that has refused the arguments of a call with ``error``. If the driver accepts these arguments,
    the rule is wrong, and a call of the object raises ``error``.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, answer: tuple[Any, ...]) -> None:
        if not answer[0]:
            raise self._error


class _WithoutLock:
    """The wrapped driver for calls that the checker itself makes, without the turn (:meth:`_Turn.outside`)."""

    def __init__(self, driver: Any, turn: _Turn) -> None:
        # Refers to the driver and the turn, not to the recorder: otherwise recorder, state and this object would form a
        # cycle, and the driver would exist until a garbage collection. The collector clears a weak reference before the
        # finalisers of its garbage run, which may still make calls.
        self._driver, self._turn = driver, turn

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)

        def ask(*args: Any) -> Any:
            return self._turn.outside(function, args) if self._turn.mine() else function(*args)

        return ask


def _handle(args: tuple[Any, ...]) -> int:
    """Return the handle in the first argument of a call as a number; 0 if this argument is no handle, so that the
    driver refuses it.
    """
    try:
        return number_of(args[0])
    except REFUSED:
        return 0


# -- the driver ------------------------------------------------------------------------------------------------

_EXIT_PRIORITY = -100
"""Priority among the exit functions of multiprocessing. It is below the default, so that the program's functions run
first.
"""
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_QUEUES_HOST_FUNCTION: dict[str, tuple[Any, str]] = {
    "cuLaunchHostFunc": (_HOST_FUNCTION, "CUhostFn"),
    "cuLaunchHostFunc_v2": (_HOST_FUNCTION, "CUhostFn"),
    "cuStreamAddCallback": (_CALLBACK, "CUstreamCallback"),
}
"""For each call that queues a host function: the C type of the function, and the bindings' class of its pointer."""
_NODE_OF_HOST_FUNCTION = {
    "cuGraphAddHostNode": 3,
    "cuGraphHostNodeSetParams": 1,
    "cuGraphExecHostNodeSetParams": 2,
    **dict.fromkeys(("cuGraphAddNode", "cuGraphAddNode_v2", "cuGraphAddNode_v3"), -1),
    **dict.fromkeys(("cuGraphNodeSetParams", "cuGraphExecNodeSetParams"), -1),
}
"""For each call: the index of the argument with node parameters, which may contain a host function."""


class CheckedDriver(Wrapper, Recorder):
    """Driver that forwards each call and finds missing stream order: :func:`checked`."""

    def __init__(self, driver: Driver, on: On, poison: bool, uninitialized: bool = False) -> None:
        Wrapper.__init__(self, driver)
        Recorder.__init__(self, driver, on, uninitialized)
        self._poison = Poison(driver, self.state) if poison else None
        self._host_functions: dict[int, Any] = {}
        """The functions that stand in for the program's host functions, by pointer. They are kept here, because the
        driver may still call them.
        """
        _alive.add(self)
        if from_server():
            from multiprocessing.util import Finalize

            # The report is made by a finaliser of multiprocessing: before Python 3.13 forked processes run no atexit
            # functions. From 3.13 on, spawned processes run atexit functions before the program's finalisers. The frees
            # of these finalisers would then be missing, and look like leaks.
            Finalize(None, _at_exit, exitpriority=_EXIT_PRIORITY)
            atexit.unregister(_at_exit)

    def _observe(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in _QUEUES_HOST_FUNCTION:
            return self._queue_host_function(name, function, args)
        if name in _NODE_OF_HOST_FUNCTION:
            return self._add_host_node(name, function, args)
        return self._call(name, function, args)

    def _call(self, name: str, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name not in RULES and name not in COUNTED:
            answer = _keeps_convention(name, function(*args))
            # Calls with host functions are recorded by a HostCall, so they need no note that they are unchecked.
            if name not in _QUEUES_HOST_FUNCTION:
                self._skipped(name, answer)
            return answer
        if self._turn.mine():
            answer = _keeps_convention(name, function(*args))
            self._turn.postpone(partial(self._late, name, args, answer))
            return answer
        rest = self.begin_call(name, args)
        if rest is None:
            return INVALID
        poison = None if isinstance(rest, RefusedCall) else self._poison
        if poison is not None:
            poison.fill(name, args)
        try:
            answer = _keeps_convention(name, function(*args))
        except BaseException:
            # The bindings have refused the arguments, so the driver was not called.
            self._turn.alone(rest, INVALID)
            raise
        self.end_call(name, args, answer, rest)
        if poison is not None and not answer[0]:
            poison.fill(name, args, answer)
        return answer

    # -- host functions: a stand-in calls the program's function --------------------------------------------------

    def _stand_in(self, kind: Any, theirs: int, call: HostCall) -> int:
        """Return a pointer to a host function that calls ``theirs`` and records when ``theirs`` begins and ends.

        ``kind``: C type of the function. ``call``: record of its calls.
        """
        function = kind(theirs)

        def run(*args: Any) -> None:
            self._turn.alone(self.state.look)
            self._turn.alone(call.begins)
            self._turn.alone(self.state.interprocess.update_announcements)
            try:
                function(*args)
            finally:
                self._turn.alone(call.ends)
                # If `stays` is true, a graph may call the function at each launch, so its pointer must stay valid.
                if not call.stays:
                    self._host_functions.pop(pointer, None)

        ours = kind(run)
        pointer = ctypes.cast(ours, ctypes.c_void_p).value or 0
        self._host_functions[pointer] = ours
        return pointer

    def _queue_host_function(self, name: str, launch: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kind, pointers = _QUEUES_HOST_FUNCTION[name]
        try:
            handle, theirs, *rest = args
            number, stream = int(getattr(cuda, pointers)(theirs)), self._turn.alone(self.state.stream, handle)
        except REFUSED:
            number = 0
        if not number:
            return self._call(name, launch, args)  # The argument is no host function, so the driver refuses the call.
        call = self._turn.alone(host_function, self.state, stream)
        pointer = self._stand_in(kind, number, call)
        try:
            answer = self._call(name, launch, (handle, getattr(cuda, pointers)(pointer), *rest))
        except REFUSED:
            # The pointer is kept. If a signal handler raised the error, the driver may have the function and may call
            # it.
            self._turn.alone(call.refused)
            raise
        node = call.node
        if node is not None:
            self._turn.alone(self.state.streams.name_nodes, stream, node)
        if answer[0]:
            self._host_functions.pop(pointer, None)
            self._turn.alone(call.refused)
        return answer

    def _add_host_node(self, name: str, call: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        params: Any = next(iter(args[_NODE_OF_HOST_FUNCTION[name] :]), None)
        if hasattr(params, "type"):
            params = params.host if "HOST" in getattr(params.type, "name", "") else None
        theirs = int(getattr(params, "fn", None) or 0)
        if not theirs:
            return self._call(name, call, args)
        made = HostCall(self.state, stays=True)
        pointer = self._stand_in(_HOST_FUNCTION, theirs, made)
        self.state.host_calls[pointer] = made
        params.fn = cuda.CUhostFn(pointer)
        try:
            return self._call(name, call, args)
        finally:
            params.fn = cuda.CUhostFn(theirs)


def _keeps_convention(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], cuda.CUresult):
        raise DriverMisuseError(f"{name} answered {answer!r}, not a tuple that starts with a CUresult")
    return answer


# -- the end of the process ------------------------------------------------------------------------------------

_alive: weakref.WeakSet[CheckedDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for one in tuple(_alive):
        one._turn.lock = RLock()
        one._reports.shown.update(one.hazards)  # Otherwise the child would show the parent's hazards again.


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    """Report the hazards at the end of the process. Before that, the arguments of the process are dropped, because they
    may keep memory alive.
    """
    if from_server():
        process: Any = sys.modules["multiprocessing.process"].current_process()
        process._args, process._kwargs = (), {}
    if _alive:
        gc.collect()  # Memory that only a reference cycle keeps, for example by a traceback, is no leak.
    for one in tuple(_alive):
        if not one.finished:
            if one.process == os.getpid():
                one.settle()
            one.finished = True
            one._reports.show_rest(summary=one.process == os.getpid())
